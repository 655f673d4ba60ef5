"""Memory objects: which cl_mem is behind an Allocation, made by interop, the application's, or over pages of the host.

`Mem` is what is known of a cl_mem; a cl_mem has one Allocation while that lives. What must outlive a cl_mem is held by OpenCL's own
destructor callback, which gives it to the core's retention queue: no Python runs on a driver's thread.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from interop.contract import ExchangeError, Importable, hold_open, retire_address

from . import loader, queues

if TYPE_CHECKING:
    from interop import Allocation, ExternalHandle, Tensor

    from .context import Context

READ_WRITE, WRITE_ONLY, READ_ONLY, USE_HOST_PTR, ALLOC_HOST_PTR = 1, 2, 4, 8, 16
HOST_WRITE_ONLY, HOST_READ_ONLY, HOST_NO_ACCESS = 128, 256, 512
BUFFER = 0x10F0
TYPE, FLAGS, SIZE, _HOST_PTR, _CONTEXT, PARENT, _OFFSET = 0x1100, 0x1101, 0x1102, 0x1103, 0x1106, 0x1107, 0x1108
_GPU_PAGE, _GPU_LINE = 4096, 64         # below, drivers of GPUs copy quietly, and corrupted what lies around (field report B87)


class Mem:
    """What is known of a cl_mem.

    Attributes:
        context, handle, nbytes: whose, the cl_mem, CL_MEM_SIZE.
        flags: CL_MEM_FLAGS.
        queue: the application's cl_command_queue that it was last seen with; 0: none. Work on it comes first where the host writes.
        keeper: pyopencl's object of that queue.
        address: where the host sees it, for platforms where that stays; 0: not asked yet.
        source: pyopencl's Buffer that it came as, which remembers the address for the next Allocation.
        written, read: maps that are still there.
    """

    __slots__ = ("address", "context", "flags", "handle", "keeper", "nbytes", "other", "queue", "read", "source", "written")

    def __init__(self, context: Context, handle: int, nbytes: int, flags: int) -> None:
        """Known by its handle from here on."""
        self.context, self.handle, self.nbytes, self.flags = context, handle, nbytes, flags
        self.queue, self.address, self.written, self.read = 0, 0, 0, 0
        self.keeper: Any = None
        self.source: Any = None
        self.other = context.store.mems.get(handle)      # one that is known by the same handle, and may outlive this
        context.store.mems[handle] = self

    def release(self) -> None:
        """Give interop's reference back."""
        c = self.context
        with c.store.lock:
            newest = c.store.mems.get(self.handle)
            if newest is self:
                if self.other is not None:
                    c.store.mems[self.handle] = self.other
                else:
                    del c.store.mems[self.handle]
            else:
                while newest is not None and newest.other is not self:
                    newest = newest.other
                if newest is not None:
                    newest.other = self.other
            self.other = None
        if c.alive:
            c.driver.clReleaseMemObject(self.handle)

    def seen_with(self, queue: Any) -> None:
        """The application uses it on this queue (pyopencl's object)."""
        if queue is not None and hasattr(queue, "int_ptr"):
            self.queue, self.keeper = int(queue.int_ptr), queue

    def __repr__(self) -> str:
        return f"<Mem {self.handle:#x}, {self.nbytes} bytes>"


class Native(NamedTuple):
    """A tensor as OpenCL's calls take it.

    Attributes:
        handle: cl_mem.
        offset, size: the bytes that the tensor touches.
    """

    handle: int
    offset: int
    size: int


def native(tensor: Tensor, *, write: bool = False) -> Native:
    """``(cl_mem, offset, size)`` of a tensor's memory. Nothing is ordered or kept: `interop.acquire` does that.

    Raises ExchangeError: memory of no Context; read-only, and `write`; an image; an empty tensor; mapped by the host, see `check_unmapped`.
    """
    if getattr(tensor, "layout", None) != "strided":
        raise ExchangeError(f"{tensor!r} is no buffer with strides")
    allocation = tensor.allocation
    allocation.check()
    mem = of(allocation, "native")
    mem.context.check()
    if write and (tensor.readonly or allocation.readonly):
        raise ExchangeError("the tensor is read-only: its cl_mem is not for writing", "copy it: interop.as_tensor(x, readonly=False)")
    check_unmapped(mem, write)
    first, last = touched(tensor)
    if first == last:
        raise ExchangeError(f"a tensor of shape {tensor.shape} touches no bytes, and no cl_mem is empty (OpenCL, clCreateBuffer)")
    return Native(mem.handle, first, last - first)


def check_unmapped(mem: Mem, write: bool) -> None:
    """ExchangeError where commands may not use it: what is mapped may be read by them if it is mapped for reading (OpenCL, Mapping)."""
    if mem.written or (write and mem.read):
        raise ExchangeError(f"the cl_mem {mem.handle:#x} is mapped for {'writing' if mem.written else 'reading'}: a command that "
                            f"{'uses' if mem.written else 'writes'} it is undefined", "release the lease, and drop the arrays made from it")


def touched(t: Tensor) -> tuple[int, int]:
    """The bytes of the cl_mem, from the first to behind the last, that the tensor's elements lie in."""
    if not t.size:
        return t.byte_offset, t.byte_offset
    if t.is_contiguous():
        return t.byte_offset, t.byte_offset + t.nbytes
    steps = [(n - 1) * s * t.itemsize for n, s in zip(t.shape, t.strides, strict=True)]
    return t.byte_offset + sum(min(s, 0) for s in steps), t.byte_offset + sum(max(s, 0) for s in steps) + t.itemsize


def known(allocation: Allocation) -> Mem | None:
    """The Mem behind an Allocation, an Image too; None: the memory is of no Context that interop knows."""
    store = getattr(allocation.context, "store", None)
    found = getattr(store, "mems", {}).get(allocation.handle)
    return found if isinstance(found, Mem) else None


def find(allocation: Allocation) -> Mem | None:
    """`known` where it is a buffer, which has bytes at offsets; None for images."""
    found = known(allocation)
    return found if type(found) is Mem else None


def of(allocation: Allocation, what: str) -> Mem:
    """`find`; ExchangeError where there is none, `what` says what it was for."""
    found = find(allocation)
    if found is None:
        raise ExchangeError(f"{what}: the cl_mem {allocation.handle:#x} is of no Context that interop knows",
                            "opencl.wrap(mem, context=...)")
    return found


# ---- making ----
def check_size(context: Context, nbytes: int) -> None:
    """Raise for what no cl_mem of this context can hold."""
    if nbytes <= 0:
        raise ExchangeError(f"{nbytes} bytes: OpenCL has no empty buffers (CL_INVALID_BUFFER_SIZE)")
    if nbytes > context.max_allocation:
        raise ExchangeError(f"{nbytes} bytes: one cl_mem of {context.cl_device.name.strip()} has at most {context.max_allocation} "
                            "(CL_DEVICE_MAX_MEM_ALLOC_SIZE)", "split the tensor")


def create(context: Context, flags: int, nbytes: int, host: int = 0) -> int:
    """A cl_mem (clCreateBuffer)."""
    code = ctypes.c_int32()
    out = context.driver.clCreateBuffer(context.handle, flags, nbytes, host or None, ctypes.byref(code))
    return loader.made(out, code, f"clCreateBuffer of {nbytes} bytes")


def allocate(context: Context, nbytes: int, *, host: bool = False, alignment: int = 1, queue: Any = None) -> Allocation:
    """A cl_mem; contents undefined.

    Args:
        context: where.
        nbytes: of it.
        host: the host shall see it too: where that takes memory of the host's, that is what it is made of (CL_MEM_ALLOC_HOST_PTR).
        alignment: of the address where the host sees it.
        queue: pyopencl's queue that it is for.

    Raises ExchangeError: too large. OutOfMemory.
    """
    context.check()
    check_size(context, nbytes)
    if alignment > context.data_alignment and context.shares_host:
        return _on_pages(context, nbytes, alignment, queue)
    mem = create(context, READ_WRITE | (ALLOC_HOST_PTR if host else 0), nbytes)
    return _allocation(context, mem, nbytes, READ_WRITE, queue=queue, alignment=alignment)


def _on_pages(context: Context, nbytes: int, alignment: int, queue: Any) -> Allocation:
    """Of host memory of interop's, which can be aligned to anything."""
    from interop import _core

    block = _core.host_tensor((-(-nbytes // alignment) * alignment,), "uint8", False, alignment)
    mem = create(context, READ_WRITE | USE_HOST_PTR, nbytes, block.ptr)
    keep_for(context, mem, block)
    return _allocation(context, mem, nbytes, READ_WRITE | USE_HOST_PTR, queue=queue, alignment=alignment)


def _allocation(context: Context, handle: int, nbytes: int, flags: int, *, queue: Any = None, owner: Any = None, readonly: bool = False,
                alignment: int = 1, **more: Any) -> Allocation:
    """An Allocation that takes over one reference to the cl_mem, also where none can be made."""
    traits = ("host_visible", "coherent", "cached") if context.concurrent_host else ("host_visible",) if context.unified else ()
    mem = Mem(context, handle, nbytes, flags)
    return enter(mem, queue=queue, owner=owner, readonly=readonly, traits=traits, alignment=alignment, **more)


def enter(mem: Mem, *, queue: Any = None, **more: Any) -> Allocation:
    """The one Allocation of a Mem, which is released with it, also where none can be made."""
    mem.seen_with(queue)
    try:
        out = mem.context.allocation(mem.handle, mem.nbytes, free=mem.release, **more)
    except BaseException:
        mem.release()
        raise
    mem.context.store.allocations[mem.handle] = out
    return out


def adopt(context: Context, handle: int, nbytes: int, flags: int, *, owner: Any = None) -> Allocation:
    """An Allocation over a cl_mem that was just made; `owner` lives until that is destroyed."""
    if owner is not None:
        keep_for(context, handle, owner)
    return _allocation(context, handle, nbytes, flags, owner=owner)


def keep_for(context: Context, mem: int, thing: Any) -> None:
    """Hold an object until the cl_mem is destroyed, whoever still holds that (clSetMemObjectDestructorCallback)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    code = context.driver.clSetMemObjectDestructorCallback(mem, retire_address(1), id(thing))
    if code < 0:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))
        context.driver.clReleaseMemObject(mem)
        loader.check(code, "clSetMemObjectDestructorCallback")


# ---- the application's ----
def ask(context: Context, mem: int, what: int, kind: Any = ctypes.c_size_t) -> int:
    """clGetMemObjectInfo."""
    return loader.info(context.driver.clGetMemObjectInfo, mem, what, kind, "clGetMemObjectInfo") or 0


def check_home(context: Context, mem: int) -> None:
    """ExchangeError where a cl_mem is of another cl_context."""
    theirs = ask(context, mem, _CONTEXT, ctypes.c_void_p)
    if theirs != context.handle:
        raise ExchangeError(f"the cl_mem {mem:#x} is of another cl_context ({theirs:#x}, not {context.handle:#x}): a handle means nothing "
                            "there", "wrap it with its own context; interop.to(x, queue) copies between contexts")


def handle_of(mem: Any) -> int:
    """A cl_mem: an int, or pyopencl's object."""
    value = getattr(mem, "int_ptr", mem)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"mem {mem!r}: a cl_mem as int, or a pyopencl.MemoryObject")
    number = int(value.__index__())
    if not 4096 <= number < 2**64:
        raise ValueError(f"mem {number:#x}: no cl_mem")
    return number


def wrap(mem: Any, *, context: Any, queue: Any = None, owner: Any = None, retain: bool = True, readonly: bool = False) -> Allocation:
    """A cl_mem of the application's as an Allocation: ``.tensor(shape, dtype, strides=, byte_offset=)`` views parts of it.

    Args:
        mem: a cl_mem as int, which is trusted, or pyopencl's Buffer.
        context: of the cl_mem: a pyopencl Context or CommandQueue, or a Context.
        queue: pyopencl's CommandQueue that it is used on, which interop's copies then use too.
        owner: kept until the cl_mem is destroyed, also where others hold that.
        retain: False: takes over the caller's reference.
        readonly: every tensor of it is.

    Raises:
        ExchangeError: it is of another cl_context; it is no buffer. TypeError, ValueError: what cannot be a cl_mem.
    """
    from .context import Context

    c = Context.of(queue if queue is not None else context)
    home = Context.of(context)
    if c.handle != home.handle:
        raise ExchangeError("queue and context: the queue is of another cl_context")
    handle = handle_of(mem)
    return wrap_handle(c, handle, queue=queue, owner=owner if owner is not None else None if isinstance(mem, int) else mem,
                       keep=owner, retain=retain, readonly=readonly)


def wrap_handle(c: Context, handle: int, *, queue: Any = None, owner: Any = None, keep: Any = None, retain: bool = True,
                readonly: bool = False) -> Allocation:
    """`wrap` in a Context. A cl_mem that is known is the Allocation that it was."""
    c.check()
    with c.store.lock:
        known = c.store.allocations.get(handle)
        if known is not None and not known.is_closed and (known.readonly or not readonly):
            found = find(known)
            if found is not None:
                found.seen_with(queue)
                if keep is not None:
                    keep_for(c, handle, keep)
                if not retain:
                    c.driver.clReleaseMemObject(handle)
                return known
        check_home(c, handle)
        kind = ask(c, handle, TYPE, ctypes.c_uint32)
        if kind != BUFFER:
            raise ExchangeError(f"the cl_mem {handle:#x} is no buffer (CL_MEM_TYPE {kind:#x})", "opencl.wrap_image(image) takes an image")
        nbytes, flags = ask(c, handle, SIZE), ask(c, handle, FLAGS, ctypes.c_uint64)
        parent = ask(c, handle, PARENT, ctypes.c_void_p)
        more: dict[str, Any] = {}
        if parent:                                  # a sub-buffer: the leases and Points of its parent's bytes
            root = wrap_handle(c, parent, queue=queue)
            more = {"root": root, "root_offset": ask(c, handle, _OFFSET), "lent": True}
        if retain:
            loader.check(c.driver.clRetainMemObject(handle), "clRetainMemObject")
        if keep is not None:
            keep_for(c, handle, keep)
        return _allocation(c, handle, nbytes, flags, queue=queue, owner=owner, readonly=readonly, **more)


# ---- pages of the host ----
def importable(context: Context) -> Importable:
    """Host memory in place: where the device uses the host's memory, at addresses and sizes at which drivers do not copy."""
    if not context.unified:
        return Importable(False, f"{context.cl_device.name.strip()} has memory of its own: CL_MEM_USE_HOST_PTR there is a hidden copy "
                          "(CL_DEVICE_HOST_UNIFIED_MEMORY is false)")
    if not context.shares_host:
        return Importable(False, f"{context.cl_device.name.strip()} says that it uses the host's memory and copies CL_MEM_USE_HOST_PTR")
    if context.is_cpu:
        return Importable(True, "", context.data_alignment)
    return Importable(True, "", max(context.data_alignment, _GPU_PAGE), _GPU_LINE)


def import_pages(context: Context, handle: ExternalHandle) -> Allocation:
    """Host memory as a cl_mem over the same bytes (CL_MEM_USE_HOST_PTR). The owner lives until the cl_mem is destroyed."""
    from interop import Allocation

    context.check()
    address, nbytes, owner = handle.value, handle.nbytes, handle.owner
    check_size(context, nbytes)
    need = importable(context)
    if not need.supported:
        raise ExchangeError(need.reason)
    need.check(handle)              # a misaligned vector load kills the process on PoCL (measured.md C1)
    readonly = isinstance(owner, Allocation) and owner.readonly
    flags = USE_HOST_PTR | (READ_ONLY if readonly else READ_WRITE)
    mem = create(context, flags, nbytes, address)
    if owner is not None:
        keep_for(context, mem, hold_open(owner) if isinstance(owner, Allocation) else owner)
    return _allocation(context, mem, nbytes, flags, owner=owner, readonly=readonly, alignment=need.pointer_alignment)


def order_after_home(mem: Mem, timeout: float) -> None:
    """The host waits for what the application's own queue was given: kernels that read are in nobody's list of events."""
    if mem.queue:
        queues.mark(mem.context.driver, mem.queue, mem.context.handle).wait(timeout)
