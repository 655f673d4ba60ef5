"""CuPy as far as interop uses it, over a fake CUDA driver (`fake_cuda`): arrays, memory, streams. Installed as the module ``cupy``."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from fake_cuda import FakeCuda


class Memory:
    """Device memory from cuMemAllocAsync on the stream that is current, given back in its order, as CuPy's pool does."""

    is_managed = False

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.cupy, self.size, self.device_id = cupy, nbytes, cupy.state.device
        self.stream = cupy.cuda.get_current_stream().ptr or 1
        self.ptr = 0
        if nbytes:
            with cupy.on(self.device_id):
                self.ptr = int(cupy.fake.cuMemAllocAsync(nbytes, self.stream)[1])

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            with self.cupy.on(self.device_id):
                self.cupy.fake.cuMemFreeAsync(self.ptr, self.stream)


class UnownedMemory:
    is_managed = False

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class ndarray:
    """A view of device memory; `host` shows the bytes, which in the fake are the host's too."""

    def __init__(self, shape: Any, dtype: Any, memptr: Any = None, strides: Any = None) -> None:
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        if strides is None:
            strides, step = [], self.dtype.itemsize
            for n in reversed(self.shape):
                strides.insert(0, step)
                step *= n
        self.strides = tuple(strides)
        self.data = memptr or MemoryPointer(Memory(sys.modules["cupy"], math.prod(self.shape) * self.dtype.itemsize), 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (13 if self.data.mem.is_managed else 2, self.data.device_id)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("interop reads CuPy's attributes")

    def host(self) -> np.ndarray[Any, Any]:
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + self.dtype.itemsize
        raw = (ctypes.c_ubyte * (high - low)).from_address(self.data.ptr + low)
        return np.ndarray(self.shape, self.dtype, raw, -low, self.strides)


ndarray.__module__ = "cupy"


@contextlib.contextmanager
def installed(fake: FakeCuda) -> Iterator[Any]:
    """The module, importable, until the block ends."""
    cupy: Any = types.ModuleType("cupy")
    cupy.fake, cupy.ndarray = fake, ndarray
    fake.cuInit(0)
    cupy.state = types.SimpleNamespace(device=0, streams={})
    cupy.on = lambda device: fake.current_device(device)

    class Device:
        def __init__(self, id: int | None = None) -> None:
            self.id = cupy.state.device if id is None else id

        def __enter__(self) -> Any:
            self.before, cupy.state.device = cupy.state.device, self.id
            return self

        def __exit__(self, *exc: Any) -> None:
            cupy.state.device = self.before

    class Stream:
        def __init__(self, ptr: int = 0, device: int = 0) -> None:
            self.ptr, self.device = ptr, device

        def __enter__(self) -> Any:
            self.before = cupy.state.streams.get(self.device)
            cupy.state.streams[self.device] = self
            return self

        def __exit__(self, *exc: Any) -> None:
            cupy.state.streams[self.device] = self.before

    Device.__module__ = "cupy.cuda.device"
    cupy.empty = lambda shape, dtype: ndarray(shape, dtype)
    cupy.cuda = types.SimpleNamespace(
        UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, Device=Device, Stream=Stream,
        get_current_stream=lambda: cupy.state.streams.get(cupy.state.device) or Stream(0),
        runtime=types.SimpleNamespace(getDevice=lambda: cupy.state.device, getDeviceCount=lambda: len(fake.attributes)),
    )  # fmt: skip
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    from interop import _core
    from interop.adapters.cupy import ADAPTER

    _core.forget_types()
    kept = ADAPTER.__dict__.copy()
    ADAPTER.__init__()  # type: ignore[misc]
    try:
        yield cupy
    finally:
        ADAPTER.__dict__.update(kept)
        _core.forget_types()
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
