"""cl_contexts as places: which device is which number, what it can, the queue of interop's own. Knows no tensors.

``opencl:N`` is the N-th device of all platforms in the order in which the loader lists them. A Context is one cl_context and one of its
devices: in a cl_context of several the device is that of the queue.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, ExchangeError
from interop.memory import Context as Base

from . import loader, queues

if TYPE_CHECKING:
    from interop import Allocation

    from .memory import Mem

#: Longest that the host waits for a queue before it says so, in seconds.
HOST_TIMEOUT = 60.0
_EXIT_TIMEOUT = 2.0
_KEPT = 4               # Contexts that are kept although nobody holds them: making a queue takes 1.4 ms on rusticl
_CPU = 2                # CL_DEVICE_TYPE_CPU
#: Platforms whose CPU devices let the host touch a buffer at any time, mapped or not: beyond the standard, declared and tested.
CONCURRENT_HOST = ("Portable Computing Language", "rusticl", "Intel(R) OpenCL")


class Store:
    """What is known of the memory of one cl_context.

    Attributes:
        lock: held while it changes.
        mems: cl_mem -> Mem.
        allocations: cl_mem -> its one Allocation.
        points: cl_event -> its one Point.
    """

    __slots__ = ("__weakref__", "allocations", "lock", "mems", "points")

    def __init__(self) -> None:
        """Empty."""
        self.lock = threading.RLock()
        self.mems: dict[int, Mem] = {}
        self.allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.points: weakref.WeakValueDictionary[int, queues.EventPoint] = weakref.WeakValueDictionary()


class Context(Base):
    """A cl_context with one of its devices. ``Context.of`` finds the one of a pyopencl object.

    Attributes:
        handle, device_handle: cl_context and cl_device_id.
        cl, cl_device: pyopencl's objects.
        unified: the devices use the host's memory (CL_DEVICE_HOST_UNIFIED_MEMORY): a map moves nothing.
        concurrent_host: the host may touch buffers at any time, by test and not by the standard.
        base_alignment: bytes that sub-buffers begin at multiples of. data_alignment: of the largest vector type.
        max_allocation: bytes of one cl_mem.
        store: what is known of its memory.
    """

    def __init__(self, adapter: Adapter, cl_context: Any, cl_device: Any, *, driver: Any = None) -> None:
        """Use `of`."""
        from interop import Device

        number = number_of(cl_device)
        super().__init__(Device(f"opencl:{number}"), adapter, {"host"})
        self.driver = driver if driver is not None else loader.driver()
        self.cl, self.cl_device = cl_context, cl_device
        self.handle, self.device_handle = int(cl_context.int_ptr), int(cl_device.int_ptr)
        self._made_in = loader.generation()
        self._queue = 0
        self._lock = threading.Lock()
        there = cl_context.devices
        self.unified = all([bool(d.host_unified_memory) for d in there])
        platform = cl_device.platform.name
        self.concurrent_host = self.unified and platform.startswith(CONCURRENT_HOST) and all([bool(d.type & _CPU) for d in there])
        self.data_alignment = max(int(getattr(d, "min_data_type_align_size", 128) or 128) for d in there)
        self.base_alignment = max(max(int(d.mem_base_addr_align) // 8, 1) for d in there)
        self.max_allocation = min(int(d.max_mem_alloc_size) for d in there)
        self.is_cpu = all([bool(d.type & _CPU) for d in there])
        self._shares: bool | None = None
        self.store = _stores.setdefault(self.handle, Store())
        _open.add(self)

    @classmethod
    def of(cls, place: Any) -> Context:
        """The Context of a pyopencl Context, Device or CommandQueue, of ``"opencl:0"``, or itself. TypeError for anything else."""
        from .adapter import ADAPTER

        return ADAPTER.context(place)

    @property
    def queue(self) -> int:
        """The in-order cl_command_queue of interop's own, made when it is first needed: maps, and copies without a queue, go there."""
        self.check()
        with self._lock:
            if not self._queue:
                code = ctypes.c_int32()
                out = self.driver.clCreateCommandQueue(self.handle, self.device_handle, 0, ctypes.byref(code))
                self._queue = loader.made(out, code, "clCreateCommandQueue")
            return self._queue

    def find_queue(self, stream: Any) -> int:
        """The cl_command_queue of a `stream` argument, None: interop's own. ExchangeError where it is of another cl_context."""
        if stream is None or isinstance(stream, Context):
            return self.queue
        found = queues.queue_handle(stream)
        if queues.context_of_queue(self.driver, found) != self.handle:
            raise ExchangeError(f"the queue {found:#x} is of another cl_context than the memory on {self.device}",
                                "use a queue of the memory's own context; interop.to(x, queue) copies where you ask for that place")
        return found

    @property
    def shares_host(self) -> bool:
        """Whether CL_MEM_USE_HOST_PTR memory is the very memory of the host: found out once, by writing on the device and looking."""
        if self._shares is None:
            self._shares = self.unified and self._try_sharing()
        return self._shares

    def _try_sharing(self) -> bool:
        from interop import _core

        n = 4096
        block = _core.host_tensor((n,), "uint8", False, 4096)
        ctypes.memset(block.ptr, 0, n)
        code = ctypes.c_int32()
        mem = self.driver.clCreateBuffer(self.handle, 1 | 8, n, block.ptr, ctypes.byref(code))
        if code.value or not mem:
            return False
        try:
            word = ctypes.c_uint32(0x1D1E7E57)
            if self.driver.clEnqueueFillBuffer(self.queue, mem, ctypes.byref(word), 4, 0, n, 0, None, None):
                return False
            queues.mark(self.driver, self.queue, self.handle).wait(HOST_TIMEOUT)
            return ctypes.string_at(block.ptr, n) == bytes(word) * (n // 4)
        finally:
            self.driver.clReleaseMemObject(mem)

    @property
    def alive(self) -> bool:
        """Whether its objects may be released by what the garbage collector finds."""
        return loader.alive(self._made_in)

    def _close(self) -> None:
        queue, self._queue = self._queue, 0
        if queue and self.alive:
            self.driver.clReleaseCommandQueue(queue)
        self.adapter.forget(self)  # type: ignore[attr-defined]

    def wait_idle(self, timeout: float) -> bool:
        """Wait for what interop's own queue was given; False: it was not done in time."""
        if not self._queue or not self.alive:
            return True
        try:
            queues.mark(self.driver, self._queue, self.handle).wait(timeout)
        except TimeoutError:
            return False
        return True

    def __del__(self) -> None:
        """The queue goes with it."""
        try:
            if getattr(self, "_queue", 0) and self.alive:
                self.driver.clReleaseCommandQueue(self._queue)
        except Exception:           # not contextlib: at the very end the names of a module are None
            return


# ---- numbers ----
_numbers: dict[int, int] = {}
_listed: list[Any] = []
_listed_in = [0]


def all_devices() -> list[Any]:
    """pyopencl's Devices, in the order of ``opencl:0``, ``opencl:1``, ...; empty where there is no driver."""
    if _listed and _listed_in[0] != loader.generation():
        raise ExchangeError("OpenCL was used before fork, and its threads are the parent's: a child process owns no driver object",
                            "start workers with the 'spawn' method")
    if not _listed:
        cl = loader.module()
        try:
            platforms = cl.get_platforms()
        except cl.Error:                # no platform at all is an error of the loader's
            return []
        found = []
        for p in platforms:
            with contextlib.suppress(cl.Error):
                found.extend(p.get_devices())
        _numbers.update((int(d.int_ptr), i) for i, d in enumerate(found))
        _listed.extend(found)
        _listed_in[0] = loader.generation()
    return _listed


def number_of(device: Any) -> int:
    """N of ``opencl:N``; a sub-device has its parent's."""
    all_devices()
    cl = loader.module()
    d = device
    while int(d.int_ptr) not in _numbers:
        try:
            parent = d.parent_device
        except (cl.Error, AttributeError):
            parent = None
        if parent is None:
            raise ExchangeError(f"{device!r} is none of the {len(_listed)} devices that the OpenCL loader lists")
        d = parent
    return _numbers[int(d.int_ptr)]


def device_at(number: int) -> Any:
    """pyopencl's Device of ``opencl:N``; ExchangeError where there is none."""
    found = all_devices()
    if not found:
        raise ExchangeError("no OpenCL driver on this machine", "install the GPU's, or pocl-opencl-icd, which has one for the CPU")
    if not 0 <= number < len(found):
        raise ExchangeError(f"opencl:{number}: this machine has {len(found)} OpenCL devices")
    return found[number]


def devices() -> list[dict[str, Any]]:
    """What ``opencl:0``, ``opencl:1``, ... are: name, platform, version, host_unified."""
    return [{"name": d.name.strip(), "platform": d.platform.name, "version": d.version, "host_unified": bool(d.host_unified_memory)}
            for d in all_devices()]


class Contexts:
    """The Contexts that there are, by cl_context and device: as long as anybody holds them, and the last few in any case."""

    def __init__(self) -> None:
        """None yet."""
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[tuple[int, int], Context] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[tuple[int, int], Context] = OrderedDict()
        self._defaults: dict[int, Context] = {}

    def get(self, adapter: Adapter, cl_context: Any, cl_device: Any) -> Context:
        """That of two pyopencl objects."""
        key = int(cl_context.int_ptr), int(cl_device.int_ptr)
        with self._lock:
            found = self._known.get(key)
            if found is None or found.closed:
                found = self._known[key] = Context(adapter, cl_context, cl_device)
            found.check()                   # the parent's after a fork, as its cl_context is
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found

    def default(self, adapter: Adapter, number: int) -> Context:
        """The one that is made for ``opencl:N`` on first use, and kept."""
        with self._lock:
            found = self._defaults.get(number)
            if found is None or found.closed:
                d = device_at(number)
                found = self._defaults[number] = self.get(adapter, loader.module().Context([d]), d)
            found.check()
            return found

    def forget(self, context: Context) -> None:
        """It was closed."""
        with self._lock:
            tables: tuple[Any, ...] = (self._known, self._kept, self._defaults)
            for table in tables:
                for key in [k for k, v in list(table.items()) if v is context]:
                    del table[key]


_stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
_open: weakref.WeakSet[Context] = weakref.WeakSet()


def _at_exit() -> None:
    """Let what interop queued end before the process does, and no longer than a while."""
    end = time.monotonic() + _EXIT_TIMEOUT
    for c in list(_open):
        if not c.closed and c.alive:
            with contextlib.suppress(Exception):
                c.wait_idle(max(end - time.monotonic(), 0))


atexit.register(_at_exit)
