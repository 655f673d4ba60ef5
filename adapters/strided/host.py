"""The host's part of a copy: a Move between two of its addresses, and pages that are quick to write. Knows no CUDA."""

from __future__ import annotations

import ctypes

import numpy as np

from .moves import Move

#: Bytes of a huge page.
HUGE = 2 << 20
_MADV_HUGEPAGE = 14


def host_move(move: Move) -> None:
    """Do a Move whose two sides are the host's. The GIL is free meanwhile."""
    if not move.axes:
        ctypes.memmove(move.dst, move.src, move.unit)
        return
    unit, word = move.unit, min(move.word, 8)
    counts = [n for n, _, _ in move.axes]
    if unit in (1, 2, 4, 8) and unit == word:
        kind, last = f"u{unit}", None
    elif unit <= 64:
        kind, last = f"V{unit}", None
    else:                               # NumPy holds the GIL where there are few items, whatever their size
        kind, last = f"u{word}", word
        counts.append(unit // word)
    sides = []
    for side, address in enumerate((move.dst, move.src)):
        steps = [a[1 + side] for a in move.axes]
        sides.append(np.asarray(_Strided(address, counts, steps if last is None else [*steps, last], kind)))
    np.copyto(sides[0], sides[1])


class _Strided:
    """Shows NumPy memory at an address."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: list[int], strides: list[int], kind: str) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": tuple(shape), "strides": tuple(strides),
                                    "typestr": f"{'|' if kind[0] == 'V' or kind == 'u1' else '<'}{kind}"}


def advise_huge(lo: int, hi: int) -> None:
    """Let fresh pages between two addresses, all of which will be written, be huge ones: one fault then does for 512. Advice: no errors."""
    lo, hi = lo + -lo % HUGE, hi - hi % HUGE
    if hi - lo >= 2 * HUGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(lo), ctypes.c_size_t(hi - lo), _MADV_HUGEPAGE)
