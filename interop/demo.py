"""The demonstration: a camera frame and a batch of floats through every pair of installed frameworks, with proof that nothing was copied.

The proof does not trust interop: addresses are asked of the frameworks, and what is written on one side is read on the other by the
frameworks' own means. Where neither side may be written to (jax), the writable buffer underneath is written and both sides read it.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

import interop

from . import health, tables

_ALIGNMENT = 64         # jax shares memory from this alignment on


@dataclass(frozen=True)
class Side:
    """One framework, by its own means and not by interop's.

    Attributes:
        name: as `interop.to` takes it.
        make: an object over an ndarray's memory.
        address: where its first element lies.
        read: the value at a flat index.
        write: put a value at a flat index; None where its objects are never written to.
        today: what a user would call to get one from another framework's object, as text and as a function.
    """

    name: str
    make: Callable[[Any], Any]
    address: Callable[[Any], int]
    read: Callable[[Any, int], float]
    write: Callable[[Any, int, float], None] | None
    today: tuple[str, Callable[[Any], Any]]


def sides() -> tuple[list[Side], list[str]]:
    """Those that are installed and use host memory; and why the others are not shown."""
    here, absent = [], []
    for name, make in _SIDES.items():
        try:
            here.append(make())
        except ImportError as e:
            absent.append(f"{name} is not shown: {e}; python -m interop doctor says how to install it")
    return here, absent


def _interop() -> Side:
    # memoryviews index several dimensions by a tuple only, and a byte takes no float
    def write(t: interop.Tensor, i: int, v: float) -> None:
        np.frombuffer(memoryview(t).cast("B"), t.dtype.name)[i] = v

    def read(t: interop.Tensor, i: int) -> float:
        return float(np.frombuffer(memoryview(t).cast("B"), t.dtype.name)[i])

    return Side("interop", interop.as_tensor, lambda t: int(t.ptr), read, write, ("np.from_dlpack", np.from_dlpack))


def _numpy() -> Side:
    def write(a: NDArray[Any], i: int, v: float) -> None:
        a.reshape(-1)[i] = v

    return Side("numpy", np.asarray, lambda a: int(a.ctypes.data), lambda a, i: float(a.reshape(-1)[i]), write,
                ("np.from_dlpack", np.from_dlpack))  # fmt: skip


def _torch() -> Side:
    torch = import_module("torch")

    def write(t: Any, i: int, v: float) -> None:
        t.view(-1)[i] = v

    return Side("torch", torch.from_numpy, lambda t: int(t.data_ptr()), lambda t, i: float(t.view(-1)[i]), write,
                ("torch.from_dlpack", torch.from_dlpack))  # fmt: skip


def _jax() -> Side:
    jax = import_module("jax")
    return Side("jax", jax.dlpack.from_dlpack, lambda j: int(j.unsafe_buffer_pointer()), lambda j, i: float(j.reshape(-1)[i]), None,
                ("jax.dlpack.from_dlpack", jax.dlpack.from_dlpack))  # fmt: skip


def _tvm_ffi() -> Side:
    tvm_ffi = import_module("tvm_ffi")

    def write(v: Any, i: int, x: float) -> None:
        np.from_dlpack(v).reshape(-1)[i] = x       # it has no indexing of its own

    return Side("tvm_ffi", tvm_ffi.from_dlpack, lambda v: int(v.data_ptr()), lambda v, i: float(np.from_dlpack(v).reshape(-1)[i]), write,
                ("tvm_ffi.from_dlpack", tvm_ffi.from_dlpack))  # fmt: skip


_SIDES: dict[str, Callable[[], Side]] = {"interop": _interop, "numpy": _numpy, "torch": _torch, "jax": _jax, "tvm_ffi": _tvm_ffi}


def inputs() -> list[NDArray[Any]]:
    """A frame of 480 x 640 RGB pixels and a batch of 16 x 3 x 64 x 64 normalised floats, on 64-byte boundaries."""
    y, x = np.mgrid[:480, :640]
    frame = _aligned(np.stack([x * 255 // 639, y * 255 // 479, (x ^ y) & 255], axis=-1).astype(np.uint8))
    batch = _aligned(np.random.default_rng(0).standard_normal((16, 3, 64, 64), dtype=np.float32))
    return [frame, batch]


def _aligned(a: NDArray[Any]) -> NDArray[Any]:
    raw = np.empty(a.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    out = raw[start:start + a.nbytes].view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


@dataclass(frozen=True)
class Shown:
    """What one conversion of one input showed; `fault` is empty where it is proved to share."""

    source: int
    target: int
    wrote: str
    fault: str


def convert(source: Side, target: Side, base: NDArray[Any]) -> tuple[Any, Any, bool]:
    """An object of `source` over `base`, the same memory as `target`, and whether that was promised to be only read."""
    x = source.make(base)
    promised = source.write is None and target.write is not None
    return x, interop.to(x, target.name, copy=False, readonly=True if promised else None), promised


def prove(source: Side, target: Side, base: NDArray[Any]) -> Shown:
    """Convert, compare the addresses, and write on each side that may be written to while reading on the other."""
    x, y, promised = convert(source, target, base)
    at, to = source.address(x), target.address(y)
    shape = tuple(int(n) for n in y.shape)
    if shape != base.shape:
        return Shown(at, to, "", f"shape {shape} instead of {base.shape}")
    ways = list(_ways(source, target, x, y, base, promised))
    for i, way in enumerate(ways):
        position = base.size // 2 + 7 * i
        wanted = float((int(way.read(position)) + 101) % 256)
        way.write(position, wanted)
        if (seen := way.read(position)) != wanted:
            return Shown(at, to, "", f"wrote {wanted} {way.name}: {seen} was read")
    return Shown(at, to, " and ".join(way.name for way in ways), "" if at == to else "the addresses differ")


@dataclass(frozen=True)
class _Way:
    """One direction in which writing is proved: where it is written, where it is read."""

    name: str
    write: Callable[[int, float], None]
    read: Callable[[int], float]


def _ways(source: Side, target: Side, x: Any, y: Any, base: NDArray[Any], promised: bool) -> Iterator[_Way]:
    if source.write is not None:
        yield _Way("forth", partial(source.write, x), partial(target.read, y))
    else:                            # an array that nobody may write to: the memory under it may be written
        yield _Way("below", partial(_write_under, base), partial(target.read, y))
    if target.write is not None and source.write is not None and not promised:
        yield _Way("back", partial(target.write, y), partial(source.read, x))


def _write_under(base: NDArray[Any], i: int, value: float) -> None:
    base.reshape(-1)[i] = value


def _best(function: Callable[[], object], budget: float) -> float:
    # Seconds for one call: the fastest of a few rounds. A partial costs both sides the same; `bench` is the exact one.
    timer = timeit.Timer("f()", globals={"f": function})
    timer.timeit(10)
    loops = max(5, int(budget / 5 / max(timer.timeit(20) / 20, 1e-8)))
    return min(timer.repeat(5, loops)) / loops


def demo(*, quick: bool = False) -> int:
    """Show every pair; 1 where one of them does not share."""
    budget = 5e-4 if quick else 5e-3
    here, notes = sides()
    data = inputs()
    rows, faults, ratios = [], [], []
    for s in here:
        for t in here:
            if s is t:
                continue
            try:
                shown = [prove(s, t, base) for base in data]
            except Exception as e:
                faults.append(f"{s.name} -> {t.name}: {type(e).__name__}: {e}")
                rows.append([s.name, t.name, "", "", "", "", "", "", "FAILED"])
                continue
            faults += [f"{s.name} -> {t.name}, {a.dtype} {a.shape}: {p.fault}" for p, a in zip(shown, data, strict=True) if p.fault]
            x, _, promised = convert(s, t, data[0])
            kwargs = {"readonly": True} if promised else {}
            ours = _best(partial(interop.to, x, t.name, **kwargs), budget)
            theirs = _best(partial(t.today[1], x), budget)
            ratios.append(theirs / ours)
            rows.append([s.name, t.name, f"{shown[0].source:#x}", f"{shown[0].target:#x}", shown[0].wrote, _us(ours),
                         f"{t.today[0]} {_us(theirs)}", f"{theirs / ours:.1f}x", "FAILED" if any(p.fault for p in shown) else "shared"])
    columns = ["from", "to", ">address there", ">address here", "written", ">us", ">today, us", ">ratio", "verdict"]
    title = " and ".join(f"{a.dtype} {a.shape}" for a in data) + ", between every two of " + ", ".join(_label(s.name) for s in here)
    tables.show(title, columns, rows, [*_notes(rows, ratios), *notes, *(f"FAILED {f}" for f in faults)])
    return 1 if faults else 0


def _label(name: str) -> str:
    return f"{name} {interop.__version__ if name == 'interop' else health.version(name)}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _notes(rows: list[list[str]], ratios: list[float]) -> Iterator[str]:
    yield f"{sum(r[-1] == 'shared' for r in rows)} of {len(rows)} conversions share their memory. The addresses are the frameworks' own;"
    yield "what was written forth (source), back (target) or below (in the memory under an immutable array) was read on the other side."
    if ratios:
        yield f"Times as fast as what a user would call today: median {sorted(ratios)[len(ratios) // 2]:.1f}, most {max(ratios):.1f}."
