"""Memory of OpenCL seen by the host: maps for a while, and views for as long as the memory lives where a platform lets the host do that.

By the standard the host may touch a buffer only while it is mapped (OpenCL, Mapping Memory Objects). Maps and their ends go to the queue
of interop's own, in order, and never to one of the application's: what the garbage collector ends, it ends there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interop.contract import ExchangeError, Mapped

from . import loader
from .context import HOST_TIMEOUT, Context
from .memory import HOST_NO_ACCESS, HOST_READ_ONLY, HOST_WRITE_ONLY, USE_HOST_PTR, Mem, find, known, order_after_home
from .queues import EventPoint

if TYPE_CHECKING:
    from interop import Allocation

_READ, _WRITE = 1, 2
_HOST_PTR = 0x1103


def map_allocation(allocation: Allocation, access: str, first: int, nbytes: int) -> Mapped | Any:
    """Where the host sees `nbytes` of an Allocation from `first` on; NotImplemented where a map is a copy in disguise: that is staged.

    Where the platform lets the host touch buffers at any time, the map ends with the lease and its pages stay. Elsewhere it stays until
    the last view is gone, and what the host wrote is handed over by unmapping and mapping again.
    """
    mem = known(allocation)
    if mem is not None and find(allocation) is None:
        mem.context.check()
        check_host(mem, access)
        raise ExchangeError(f"the cl_mem {mem.handle:#x} is an image: no array says how its texels lie, so none is mapped",
                            "interop.copyto with memory of the host's, or of its own cl_context")
    if mem is None or not mem.context.unified:
        return NotImplemented
    check_host(mem, access)
    c = mem.context
    c.check()
    if access != "read":
        order_after_home(mem, HOST_TIMEOUT)
    flags = _READ if access == "read" else _WRITE if access == "write" else _READ | _WRITE
    address = enqueue_map(mem, flags, first, nbytes)
    write = access != "read"
    if c.concurrent_host:
        return Mapped(address, lambda: unmap(c, mem.handle, address), outlives_unmap=True)
    _count(mem, write, 1)

    def end() -> None:
        _count(mem, write, -1)
        unmap(c, mem.handle, address)

    return Mapped(address, end, flush=_remap(mem, flags, first, nbytes, address))


def check_host(mem: Mem, access: str) -> None:
    """ExchangeError where it was made with CL_MEM_HOST_... flags that forbid it."""
    if forbids(mem, access):
        raise ExchangeError(f"the cl_mem {mem.handle:#x} was made with flags {mem.flags:#x}, which forbid the host to {access} it "
                            "(CL_MEM_HOST_READ_ONLY, _WRITE_ONLY, _NO_ACCESS)", "copy it on the device first")


def forbids(mem: Mem, access: str) -> bool:
    """Whether it was made with CL_MEM_HOST_... flags that forbid the host to read or write it."""
    return bool(mem.flags & (HOST_NO_ACCESS | (HOST_READ_ONLY if access != "read" else 0) | (HOST_WRITE_ONLY if access != "write" else 0)))


def _count(mem: Mem, write: bool, step: int) -> None:
    with mem.context.store.lock:
        if write:
            mem.written += step
        else:
            mem.read += step


def enqueue_map(mem: Mem, flags: int, first: int, nbytes: int) -> int:
    """Map, and wait for it without the GIL and with a timeout."""
    c, code, event = mem.context, ctypes.c_int32(), ctypes.c_void_p()
    out = c.driver.clEnqueueMapBuffer(c.queue, mem.handle, 0, flags, first, nbytes, 0, None, ctypes.byref(event), ctypes.byref(code))
    address = loader.made(out, code, "clEnqueueMapBuffer")
    _wait(c, event)
    return address


def unmap(c: Context, mem: int, address: int) -> None:
    """End a map; what the host wrote is the device's when this returns. Nothing where the process has forked or is ending."""
    if not c.alive or c.closed:
        return
    event = ctypes.c_void_p()
    loader.check(c.driver.clEnqueueUnmapMemObject(c.queue, mem, address, 0, None, ctypes.byref(event)), "clEnqueueUnmapMemObject")
    _wait(c, event)


def _wait(c: Context, event: ctypes.c_void_p) -> None:
    loader.check(c.driver.clFlush(c.queue), "clFlush")
    EventPoint(event.value or 0, c.handle, driver=c.driver).wait(HOST_TIMEOUT)


def _remap(mem: Mem, flags: int, first: int, nbytes: int, address: int) -> Callable[[int, int], None]:
    def flush(start: int, size: int) -> None:
        unmap(mem.context, mem.handle, address)
        again = enqueue_map(mem, flags, first, nbytes)
        if again != address:
            raise ExchangeError(f"the driver mapped the cl_mem {mem.handle:#x} at {again:#x} and before at {address:#x}: views of it are "
                                "stale", "copy=True stages it")

    return flush


def view_of(allocation: Allocation) -> int | None:
    """The host's address of an Allocation that it may touch at any time, for as long as that lives; None where it may not.

    That is beyond the standard: only platforms where it is tested (`Context.concurrent_host`).
    """
    mem = find(allocation)
    if mem is None or not mem.context.concurrent_host \
            or mem.flags & (HOST_NO_ACCESS | HOST_READ_ONLY | HOST_WRITE_ONLY):
        return None
    c = mem.context
    c.check()
    if not mem.address:
        if mem.flags & USE_HOST_PTR:
            mem.address = loader.info(c.driver.clGetMemObjectInfo, mem.handle, _HOST_PTR, ctypes.c_void_p, "clGetMemObjectInfo") or 0
        else:
            address = enqueue_map(mem, _READ | _WRITE, 0, mem.nbytes)
            unmap(c, mem.handle, address)
            mem.address = address
            with contextlib.suppress(AttributeError):
                if mem.source is not None:
                    mem.source._interop_address = address
    return mem.address or None
