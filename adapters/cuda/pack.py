"""Moves on the device, whatever their steps: a copy of the driver's or a kernel of ``pack.cu``. Knows no tensors and gives no order."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..strided import Axis, Move
from .driver import Driver

PTX = Path(__file__).parent / "pack.ptx"
_AXES = 8               # of a launch; what has more is launched for each index along the outer ones
_WORDS = 1 << 30        # of a launch: indices are 32 bits there
_BLOCK = 1024           # words of a block
_TILE = 32              # words along each side of a block that transposes


class Packer:
    """The kernels, loaded for a device when it first needs one."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is loaded."""
        self._driver = driver
        self._functions: dict[tuple[int, str], Any] = {}
        self._modules: dict[int, Any] = {}
        self._lock = threading.RLock()      # a destructor may copy, and come here again

    def enqueue(self, move: Move, device: int, stream: int) -> None:
        """Give a Move to a stream; both sides are addresses that the device reaches, and do not overlap. The device is current."""
        if not move.axes:
            self._driver.check(self._driver.cu.cuMemcpyAsync(move.dst, move.src, move.unit, stream))
            return
        word = move.word
        for part in move.pieces(word * _WORDS):
            axes = part.axes
            if part.unit > word or not axes:        # an axis for the words of a run
                axes = (*axes, (part.unit // word, word, word))
            surplus = len(axes) - _AXES
            for one in Move(part.dst, part.src, word, axes).outer(max(surplus, 0)):
                self._launch(one, device, stream)

    @contextlib.contextmanager
    def temporary(self, device: int, nbytes: int, stream: int) -> Iterator[int]:
        """Device memory for what the stream is given in the block; it goes back in the stream's order, also after an error."""
        driver = self._driver
        with driver.using(device) as cu, driver.relaxed():
            base = int(driver.check(cu.cuMemAllocAsync(nbytes, stream)))
        try:
            yield base
        finally:
            with driver.using(device) as cu, driver.relaxed():
                cu.cuMemFreeAsync(base, stream)

    def _launch(self, move: Move, device: int, stream: int) -> None:
        word, axes = move.unit, move.axes[::-1]
        pair = _transposed(axes)
        name, grid, block, tiles = "linear", -(-move.nbytes // word // _BLOCK), (256, 1), (0, 0)
        if pair is not None:
            a, b = pair
            axes = (axes[a], axes[b], *(x for i, x in enumerate(axes) if i not in pair))
            tiles = (-(-axes[0][0] // _TILE), -(-axes[1][0] // _TILE))
            name, grid, block = "transpose", tiles[0] * tiles[1], (_TILE, 8)
            for n, _, _ in axes[2:]:
                grid *= n
        raw = struct.pack("=QQIIII", move.dst, move.src, move.nbytes // word, len(axes), *tiles)
        raw += b"".join(struct.pack("=IIIIqq", n, *_reciprocal(n), 0, d, s) for n, d, s in axes)
        arguments = ctypes.create_string_buffer(raw, struct.calcsize("=QQIIII") + _AXES * struct.calcsize("=IIIIqq"))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        cu = self._driver.cu
        function = self._function(device, f"{name}_{word}")
        self._driver.check(cu.cuLaunchKernel(function, grid, 1, 1, *block, 1, 0, stream, ctypes.addressof(pointers), 0))

    def _function(self, device: int, name: str) -> Any:
        found = self._functions.get((device, name))
        if found is None:
            cu, check = self._driver.cu, self._driver.check
            with self._lock, self._driver.relaxed():        # loading allocates
                if device not in self._modules:
                    self._modules[device] = check(cu.cuModuleLoadData(PTX.read_bytes() + b"\0"))
                found = self._functions[device, name] = check(cu.cuModuleGetFunction(self._modules[device], name.encode()))
        return found


def _transposed(axes: tuple[Axis, ...]) -> tuple[int, int] | None:
    """The axis along which the destination is fastest and the one along which the source is, where they differ and both are long."""
    a = min(range(len(axes)), key=lambda i: axes[i][1])
    b = min(range(len(axes)), key=lambda i: abs(axes[i][2]) or 1 << 62)
    if a == b or not axes[a][2] or min(axes[a][0], axes[b][0]) < _TILE // 2:
        return None
    return a, b


def _reciprocal(n: int) -> tuple[int, int]:
    """(magic, shift) with ``i // n == (umulhi(i, magic) + i) >> shift`` for i below 2**31 (Granlund and Montgomery, 1994)."""
    shift = (n - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - n)) // n + 1, shift
