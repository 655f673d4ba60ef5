"""Buffers of the application's as Allocations, and Allocations as what the application's descriptors and commands take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from interop.contract import ExchangeError

from . import handles
from .loader import generation
from .memory import KINDS, Buffer, Memory, Need, allocation_of, need_of
from .memory import of as buffer_of
from .timeline import Timeline

if TYPE_CHECKING:
    from interop import Allocation, Tensor

    from .context import Context


class Native(NamedTuple):
    """A tensor as Vulkan's calls take it: the first three are a VkDescriptorBufferInfo.

    Attributes:
        handle: VkBuffer.
        offset, size: the bytes that the tensor touches, in the buffer.
        memory: VkDeviceMemory.
        memory_offset: where the buffer is bound.
        memory_size: allocationSize.
        usage: VkBufferUsageFlags.
        address: VkDeviceAddress of the first of these bytes; 0 where bufferDeviceAddress is off.
    """

    handle: int
    offset: int
    size: int
    memory: int
    memory_offset: int
    memory_size: int
    usage: int
    address: int


def native(tensor: Tensor, *, write: bool = False, descriptor: bool = True) -> Native:
    """What a descriptor, or a command, takes of a tensor's memory. Nothing is ordered or kept: `interop.acquire` does that.

    Args:
        tensor: on memory of a Context, or of a handle that one knows.
        write: it will be written to.
        descriptor: for a storage buffer's descriptor: offset and size are checked against what the device takes.

    Raises:
        ExchangeError: the memory is no Context's; read-only, and `write`; a layout of its own; an offset that is not a multiple of
            minStorageBufferOffsetAlignment, or more bytes than maxStorageBufferRange.
    """
    if getattr(tensor, "layout", None) != "strided":
        raise ExchangeError(f"{tensor!r} is no buffer with strides")
    allocation = tensor.allocation
    allocation.check()
    buffer = buffer_of(allocation, "native")
    c = buffer.context
    c.check()
    if write and (tensor.readonly or allocation.readonly):
        raise ExchangeError("the tensor is read-only: its buffer is not for writing", "copy it: interop.as_tensor(x, readonly=False)")
    first, last = _touched(tensor)
    if first == last:
        raise ExchangeError(f"a tensor of shape {tensor.shape} touches no bytes, and no descriptor is empty "
                            "(VUID-VkDescriptorBufferInfo-range-00341)")
    if descriptor:
        if first % c.storage_alignment:
            raise ExchangeError(f"byte_offset {first} is not a multiple of {c.storage_alignment} (minStorageBufferOffsetAlignment)",
                                "descriptor=False for copies and device addresses, or begin the view on a multiple")
        if last - first > c.max_storage_range:
            raise ExchangeError(f"{last - first} bytes are more than the {c.max_storage_range} of a storage buffer (maxStorageBufferRange)",
                                "descriptor=False for copies and device addresses, or views of parts")
    address, m = buffer.address, buffer.memory
    return Native(buffer.handle, first, last - first, m.handle, buffer.offset, m.nbytes, buffer.usage, address + first if address else 0)


def _touched(t: Tensor) -> tuple[int, int]:
    """The bytes of the buffer, from the first to behind the last, that the tensor's elements lie in."""
    if not t.size:
        return t.byte_offset, t.byte_offset
    if t.is_contiguous():
        return t.byte_offset, t.byte_offset + t.nbytes
    steps = [(n - 1) * s * t.itemsize for n, s in zip(t.shape, t.strides, strict=True)]
    return t.byte_offset + sum(min(s, 0) for s in steps), t.byte_offset + sum(max(s, 0) for s in steps) + t.itemsize


def wrap_buffer(context: Context, buffer: Any, *, memory: Any, memory_size: int, memory_type: int, usage: int, owner: Any,
                memory_offset: int = 0, nbytes: int | None = None, handle_types: Iterable[str] | int = (), dedicated: bool = False,
                mapped: Any = None, ready: Any = None, host_ready: bool = False, readonly: bool = False) -> Allocation:
    """``Context.wrap_buffer``."""
    context.check()
    handle, below = handles.number(buffer, "buffer"), handles.number(memory, "memory")
    size, offset = handles.count(memory_size, "memory_size", 1), handles.count(memory_offset, "memory_offset", 0)
    flags, kinds = handles.count(usage, "usage", 1), _kinds(context, handle_types)
    if not 0 <= handles.count(memory_type, "memory_type", 0) < len(context.memory_types):
        raise ValueError(f"memory_type {memory_type}: {context.physical.name} has {len(context.memory_types)}")
    address = 0 if mapped is None else handles.number(mapped, "mapped")
    kind = context.memory_types[memory_type]
    if address and not kind.host_visible:
        raise ValueError(f"mapped {address:#x}: memory type {memory_type} is not host-visible")
    need = need_of(context, handle)
    length = min(size - offset, need.size) if nbytes is None else handles.count(nbytes, "nbytes", 1)
    _check_binding(need, offset, length, size, memory_type)
    store = context.store
    with store.lock:
        known = store.buffers.get(handle)
        if known is not None:
            m = known.memory
            if (m.handle, known.offset, known.nbytes, m.nbytes, m.kind.index) != (below, offset, length, size, memory_type):
                raise ValueError(f"buffer {handle:#x} is known as {known!r}, which is not what is said of it now")
            _take_address(m, address - offset if address else 0)
            known.users += 1
            known.host_ready |= host_ready
            made = known
        else:
            m = _memory(context, below, size, kind, kinds, dedicated, address - offset if address else 0)
            made = Buffer(m, handle, offset, length, flags, owned=False, host_ready=host_ready)
        try:
            root = _root(m)
        except BaseException:
            made.close()
            raise
    out = _allocation(made, root, owner, readonly)
    if ready is not None:
        _note(context, out, ready)
    return out


def _allocation(made: Buffer, root: Allocation, owner: Any, readonly: bool) -> Allocation:
    offset = made.offset
    alignment = offset & -offset if offset else 256
    return allocation_of(made, owner=owner, readonly=readonly, alignment=alignment, root=root, root_offset=offset, lent=True)


def _check_binding(need: Need, offset: int, nbytes: int, size: int, memory_type: int) -> None:
    """What is said of a buffer against what the driver says of it: it cannot be bound so."""
    if not need.bits >> memory_type & 1:
        raise ValueError(f"memory_type {memory_type}: the buffer cannot be bound to it (memoryTypeBits {need.bits:#x})")
    if offset % need.alignment:
        raise ValueError(f"memory_offset {offset}: the buffer is bound at multiples of {need.alignment} only")
    if nbytes > need.size:
        raise ValueError(f"nbytes {nbytes}: the buffer needs {need.size} bytes of memory, so it cannot be larger")
    if offset + need.size > size:
        raise ValueError(f"the buffer needs {need.size} bytes of memory at {offset}, and memory_size is {size}")


def _memory(context: Context, handle: int, size: int, kind: Any, kinds: tuple[str, ...], dedicated: bool, address: int) -> Memory:
    """The Memory of a handle, with one user more; the first time it is made."""
    known = context.store.memories.get(handle)
    if known is None:
        return Memory(context, handle, size, kind, exports=kinds, dedicated=dedicated, owned=False, address=address)
    if (known.nbytes, known.kind.index) != (size, kind.index):
        raise ValueError(f"memory {handle:#x} is known as {known!r}: memory_size and memory_type are said differently now")
    if known.dedicated:
        raise ValueError(f"memory {handle:#x} is a dedicated allocation, which has one buffer")
    _take_address(known, address)
    known.exports = tuple(dict.fromkeys((*known.exports, *kinds)))
    known.users += 1
    return known


def _take_address(m: Memory, address: int) -> None:
    """Where the application has mapped the first byte of a known memory object."""
    if address and address != m.address:
        if m.address:
            raise ValueError(f"mapped: memory {m.handle:#x} is known to be mapped at {m.address:#x}, which makes that {address:#x}")
        m.address, m.pages = address, True


def _root(m: Memory) -> Allocation:
    """The Allocation of a whole memory object, whose leases and Points those of its buffers are."""
    found = m.root() if m.root is not None else None
    if found is None or found.is_closed:
        # no handle of a driver's: a VkBuffer that happens to have the number of a VkDeviceMemory is another thing
        found = m.context.allocation(~m.handle & (2**64 - 1), m.nbytes, atom=m.atom, traits=m.traits)
        m.root = weakref.ref(found)
    return found


def _note(context: Context, allocation: Allocation, ready: Any) -> None:
    import interop

    point = ready
    if isinstance(ready, (tuple, list)):
        semaphore, value = ready
        point = _Theirs(context, handles.number(semaphore, "ready")).at(int(value))
    whole = allocation.tensor(allocation.nbytes, "uint8", readonly=None)
    if allocation.readonly:
        raise ExchangeError("ready: nobody writes read-only memory", "wrap it when it is")
    interop.acquire(whole, context, "write").release(point)


class _Theirs(Timeline):
    """A timeline semaphore of the application's, to look at."""

    def __init__(self, context: Context, handle: int) -> None:
        self.context, self.exportable, self.reached, self.handle = context, False, 0, handle
        self._generation = generation()

    def close(self) -> None:
        """It is the application's."""


def _kinds(context: Context, given: Iterable[str] | int) -> tuple[str, ...]:
    """Kinds of ExternalHandle, from their names or from VkExternalMemoryHandleTypeFlags."""
    fds = {name: KINDS[name] for name in ("opaque_fd", "dma_buf")}
    if isinstance(given, str):
        raise TypeError(f"handle_types={given!r}: a sequence of kinds, such as ['opaque_fd']")
    names = [name for name, (bit, _) in fds.items() if given & bit] if isinstance(given, int) else list(given)
    for name in names:
        if name not in fds:
            raise ValueError(f"handle_types: {name!r} is none of {', '.join(fds)}")
        context.require(fds[name][1], f"memory that is exported as {name}")
    return tuple(dict.fromkeys(names))

