"""The kernels of adapters/cuda/pack.cu for the fake driver: the same arithmetic, word by word, and what a launch leaves out is left out."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import numpy as np
from fake_cuda import FakeCuda

_HEAD, _DIM = "=QQIIII", "=IIIIqq"
_THREADS = {"linear": (256, 1, 1), "transpose": (32, 8, 1)}


def install(fake: FakeCuda) -> None:
    """From here on the fake finds linear_N and transpose_N."""
    for kind in _THREADS:
        for word in (1, 2, 4, 8, 16):
            fake.kernels[f"{kind}_{word}"] = functools.partial(_launch, fake, kind, word)


def _launch(fake: FakeCuda, kind: str, word: int, params: int, grid: Any, block: Any) -> Any:
    raw = ctypes.string_at(ctypes.c_void_p.from_address(params).value or 0, struct.calcsize(_HEAD) + 8 * struct.calcsize(_DIM))
    dst, src, total, ndim, tiles_a, tiles_b = struct.unpack_from(_HEAD, raw)
    dims = [struct.unpack_from(_DIM, raw, struct.calcsize(_HEAD) + i * struct.calcsize(_DIM)) for i in range(ndim)]
    if block != _THREADS[kind] or grid[1:] != (1, 1):
        fake.violate(f"{kind}: launched with {grid} blocks of {block} threads")
    wrong = len(fake.violations)
    index = _linear(fake, dims, total, grid[0]) if kind == "linear" else _transpose(dims, tiles_a, tiles_b, grid[0])
    to, source = (base + sum(i * d[side] for i, d in zip(index, dims, strict=True)) for base, side in ((dst, 4), (src, 5)))
    if (np.asarray(to) % word).any() or (np.asarray(source) % word).any():
        fake.violate(f"{kind}_{word}: misaligned address")

    if len(fake.violations) > wrong:
        return (lambda: None), [], []           # who knows which bytes it would hit

    def work() -> None:
        _bytes(to, word)[:] = _bytes(source, word)[:].copy()
    return work, _ranges(source, word), _ranges(to, word)


def _linear(fake: FakeCuda, dims: list[Any], total: int, blocks: int) -> list[Any]:
    i, index = np.arange(min(total, blocks * 1024), dtype=np.int64), []
    for n, magic, shift, _, _, _ in dims[:-1]:
        q = (((i * magic) >> 32) + i) >> shift
        if (q != i // n).any():
            fake.violate(f"linear: {magic} and {shift} do not divide by {n}")
        index.append(i - q * n)
        i = q
    return [*index, i]                      # what is left is the index in the outermost dimension


def _transpose(dims: list[Any], tiles_a: int, tiles_b: int, blocks: int) -> list[Any]:
    t, index = np.arange(blocks, dtype=np.int64), []
    a, t = t % tiles_a * 32, t // tiles_a
    b, t = t % tiles_b * 32, t // tiles_b
    for n, *_ in dims[2:]:
        index.append(t % n)
        t = t // n
    x, y = np.arange(32)[:, None], np.arange(32)[None, :]
    full = [np.broadcast_to(i[:, None, None], (blocks, 32, 32)) for i in index]
    a, b = np.broadcast_arrays(a[:, None, None] + x, b[:, None, None] + y)
    inside = (a < dims[0][0]) & (b < dims[1][0])
    return [i[inside] for i in (a, b, *full)]


class _bytes:
    """Words at any addresses, as rows of bytes."""

    def __init__(self, at: Any, word: int) -> None:
        self.low = int(at.min())
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * (int(at.max()) + word - self.low)).from_address(self.low))
        self.rows = (at - self.low).reshape(-1, 1) + np.arange(word)

    def __getitem__(self, key: Any) -> Any:
        return self.memory[self.rows]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.memory[self.rows] = value


def _ranges(at: Any, word: int) -> list[tuple[int, int]]:
    """The bytes as ranges: exactly where those are few, else what lies between the first and the last."""
    at = np.unique(at)
    if not len(at):
        return []
    starts = np.flatnonzero(np.diff(at, prepend=at[0] - 2 * word) > word)
    if len(starts) > 1024:
        return [(int(at[0]), int(at[-1]) + word - int(at[0]))]
    ends = [*(starts[1:] - 1), len(at) - 1]
    return [(int(at[s]), int(at[e]) + word - int(at[s])) for s, e in zip(starts, ends, strict=True)]
