"""Memory objects of a Context: a VkDeviceMemory each, the VkBuffers over it, and which of them is behind a handle. Knows no tensors.

Every Allocation of a Context is a `Buffer` over a `Memory`; `find` leads from one to the other. Nothing is made for zero bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from interop.contract import ExchangeError

from . import api as vk
from . import handles
from .loader import OutOfMemory
from .physical import MemoryType

if TYPE_CHECKING:
    from interop import Allocation

    from .context import Context

#: Kinds of ExternalHandle -> (VkExternalMemoryHandleTypeFlagBits, the extension that it takes).
KINDS = {"opaque_fd": (vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT, "VK_KHR_external_memory_fd"),
         "dma_buf": (vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_DMA_BUF_BIT_EXT, "VK_EXT_external_memory_dma_buf"),
         "host": (vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT, "VK_EXT_external_memory_host")}
#: What a buffer of interop's may be used for, beside its device address where that feature is on.
USAGE = (vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT | vk.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
         | vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT)

_LOCAL, _VISIBLE = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
_COHERENT, _CACHED = vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT, vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
#: Memory for the device. Where one type is everything at once (a GPU without memory of its own, or none), the host sees it at no cost.
FOR_DEVICE = (_LOCAL | _VISIBLE | _COHERENT | _CACHED, _LOCAL, 0)
#: Memory that the host shall use too: such that it needs no lease first, such that it can at least be read last.
FOR_HOST = (_VISIBLE | _COHERENT | _CACHED, _VISIBLE | _CACHED, _VISIBLE | _COHERENT, _VISIBLE)
#: Sizes are multiples of it: whole words for vkCmdFillBuffer, and what drivers round to, so that a buffer is as large as its memory.
_ROUND = 256
#: Types that mean more than `MemoryType` says and take a feature or a queue of their own: lazily allocated, protected, AMD's coherent.
_UNUSUAL = vk.VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT | vk.VK_MEMORY_PROPERTY_PROTECTED_BIT | 0x40 | 0x80


class Store:
    """What a Context knows of its memory, by handle. Entries live as long as Allocations do, and those hold the Context.

    Attributes:
        lock: held while anything here changes. The garbage collector may release memory at any moment, also in the thread that holds it,
            so whatever is done under it says first that it uses something and looks then whether that is there.
        buffers: VkBuffer -> Buffer. memories: VkDeviceMemory -> Memory.
        pages: imported pages of the host.
        shown: VkQueue -> the last submit whose results were made visible to the host.
        alignments: (usage, handle types) -> what memory offsets of such buffers are multiples of.
    """

    __slots__ = ("alignments", "buffers", "lock", "memories", "pages", "shown")

    def __init__(self) -> None:
        """Empty."""
        self.lock = threading.RLock()
        self.buffers: dict[int, Buffer] = {}
        self.memories: dict[int, Memory] = {}
        self.pages: list[Any] = []
        self.shown: dict[int, int] = {}
        self.alignments: dict[tuple[int, int], int] = {}


class Memory:
    """One VkDeviceMemory. Mapped as a whole while anybody needs it, and never twice (VUID-vkMapMemory-memory-00678).

    Attributes:
        context, handle, nbytes: whose it is, the VkDeviceMemory, its allocationSize.
        kind: its MemoryType.
        exports: kinds of ExternalHandle that it was made for.
        dedicated: it is a dedicated allocation, for its one buffer.
        owned: interop frees it.
        address: where the host sees its first byte; 0: nowhere now.
        pages: it is pages of the host, or the application has mapped it: the address is not interop's to take away.
        root: the Allocation of all of it, weakly.
    """

    __slots__ = ("_pins", "address", "context", "dedicated", "exports", "handle", "kind", "nbytes", "owned", "pages", "root", "users")

    def __init__(self, context: Context, handle: int, nbytes: int, kind: MemoryType, *, exports: Iterable[str] = (),
                 dedicated: bool = False, owned: bool = True, address: int = 0) -> None:
        """Known by its handle from here on. One user: whoever makes it."""
        self.context, self.handle, self.nbytes, self.kind = context, handle, nbytes, kind
        self.exports, self.dedicated, self.owned = tuple(exports), dedicated, owned
        self.address, self.pages = address, bool(address)
        self.root: weakref.ref[Allocation] | None = None
        self._pins, self.users = 0, 1
        context.store.memories[handle] = self

    @property
    def readable(self) -> bool:
        """Whether the host reads it through its caches; of write-combined memory it gets 0.03 GB/s (measured.md G)."""
        return self.pages or self.kind.cached

    @property
    def traits(self) -> tuple[str, ...]:
        """As an Allocation names them."""
        kind = self.kind
        there = {"host_visible": kind.host_visible, "coherent": kind.host_visible and kind.coherent,
                 "cached": kind.host_visible and self.readable, "dedicated": self.dedicated}
        return tuple(name for name, is_so in there.items() if is_so)

    @property
    def atom(self) -> int:
        """Bytes that the host and the device can only exchange together."""
        return self.context.atom if self.kind.host_visible and not self.kind.coherent else 1

    def pin(self) -> int:
        """The address of the first byte, mapped until as many `unpin` as `pin` were called."""
        c = self.context
        with c.store.lock:
            self._pins += 1
            try:
                if not self.address:
                    out = ctypes.c_void_p()
                    c.ok(c.vk.vkMapMemory(c.device_handle, self.handle, 0, vk.VK_WHOLE_SIZE, 0, ctypes.byref(out)), "vkMapMemory")
                    self.address = handles.owned(out.value or 0, "vkMapMemory")
            except BaseException:
                self._pins -= 1
                raise
            return self.address

    def unpin(self) -> None:
        """One less needs it mapped."""
        c = self.context
        with c.store.lock:
            self._pins -= 1
            if not self._pins and self.address and not self.pages:
                self.address = 0
                if c.alive:
                    c.vk.vkUnmapMemory(c.device_handle, self.handle)

    @property
    def pins(self) -> int:
        """How many need it mapped."""
        return self._pins

    def leave(self) -> None:
        """One user less; the last one frees it."""
        c = self.context
        with c.store.lock:
            self.users -= 1
            if self.users:
                return
            if c.store.memories.get(self.handle) is self:
                del c.store.memories[self.handle]
        if self.owned and c.alive:
            c.vk.vkFreeMemory(c.device_handle, self.handle, None)       # a map ends with it

    def __repr__(self) -> str:
        return f"<Memory {self.handle:#x}, {self.nbytes} bytes of type {self.kind.index}{', dedicated' if self.dedicated else ''}>"


class Buffer:
    """One VkBuffer over part of a Memory: what an Allocation of Vulkan's is.

    Attributes:
        memory, offset: where its bytes are.
        handle, nbytes, usage: the VkBuffer, its size, and VkBufferUsageFlags.
        owned: interop destroys it.
        host_ready: whoever submits work that writes it ends that with a barrier to the host.
        skip: how many of its first bytes are not the Allocation's.
        users: Allocations over it.
    """

    __slots__ = ("_viewed", "handle", "host_ready", "memory", "nbytes", "offset", "owned", "skip", "usage", "users")

    def __init__(self, memory: Memory, handle: int, offset: int, nbytes: int, usage: int, *, owned: bool = True,
                 host_ready: bool = False, skip: int = 0) -> None:
        """Known by its handle from here on; takes over one use of the memory."""
        self.memory, self.handle, self.offset, self.nbytes, self.usage, self.skip = memory, handle, offset, nbytes, usage, skip
        self.owned, self.host_ready, self.users = owned, host_ready, 1
        self._viewed = False
        memory.context.store.buffers[handle] = self

    @property
    def context(self) -> Context:
        """Whose it is."""
        return self.memory.context

    @property
    def first(self) -> int:
        """Where in the memory its Allocation begins."""
        return self.offset + self.skip

    @property
    def address(self) -> int:
        """Its device address; 0 where the feature is off, or it was not made for that."""
        c = self.context
        if "bufferDeviceAddress" not in c.features or not self.usage & vk.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT:
            return 0
        return int(c.vk.vkGetBufferDeviceAddress(c.device_handle, vk.VkBufferDeviceAddressInfo(buffer=self.handle)))

    def view(self) -> int:
        """The host's address of the first byte of its Allocation, mapped as long as this lives: nobody says when a view ends."""
        with self.context.store.lock:
            if not self._viewed:
                self.memory.pin()
                self._viewed = True
            return self.memory.address + self.first

    def close(self) -> None:
        """One Allocation less; with the last one it is destroyed, and its use of the memory ends."""
        c = self.context
        with c.store.lock:
            self.users -= 1
            if self.users:
                return
            if c.store.buffers.get(self.handle) is self:
                del c.store.buffers[self.handle]
        if self._viewed:
            self._viewed = False
            self.memory.unpin()
        if self.owned and c.alive:
            c.vk.vkDestroyBuffer(c.device_handle, self.handle, None)
        self.memory.leave()

    def __repr__(self) -> str:
        return f"<Buffer {self.handle:#x}, {self.nbytes} bytes at {self.offset} of {self.memory!r}>"


def find(allocation: Allocation) -> Buffer | None:
    """The Buffer behind an Allocation, also where others wrapped its handle; None: the memory is none that a Context knows."""
    store = getattr(allocation.context, "store", None)
    return store.buffers.get(allocation.handle) if isinstance(store, Store) else None


def of(allocation: Allocation, what: str) -> Buffer:
    """`find`; ExchangeError where there is none, `what` says what it was for."""
    found = find(allocation)
    if found is None:
        raise ExchangeError(f"{what}: the VkBuffer {allocation.handle:#x} is of no Context that interop knows",
                            "wrap it: context.wrap_buffer(buffer, memory=, ...)")
    return found


# ---- choosing ----
def choose(context: Context, bits: int, wanted: Sequence[int], nbytes: int = 0) -> MemoryType:
    """The first memory type among `bits` that has all the flags of the first of `wanted` that any has (Vulkan, Device Memory).

    Args:
        context: whose types.
        bits: memoryTypeBits, a bit for each type.
        wanted: VkMemoryPropertyFlags, the most welcome first. A type may have more.
        nbytes: a type whose heap is smaller is passed over.

    Raises:
        ExchangeError: none has them. OutOfMemory: none of those that do is large enough.
    """
    allowed = [m for m in context.memory_types if bits >> m.index & 1 and not m.flags & _UNUSUAL]
    for flags in wanted:
        for m in allowed:
            if m.flags & flags == flags and m.heap_size >= nbytes:
                return m
    fitting = [m for m in allowed if any(m.flags & flags == flags for flags in wanted)]
    if fitting:
        raise OutOfMemory(f"{nbytes} bytes: no heap of {context.physical.name} has more than "
                          f"{max(m.heap_size for m in fitting)}", "allocate less at once", "VK_ERROR_OUT_OF_DEVICE_MEMORY")
    raise ExchangeError(f"{context.physical.name} has no memory type with the flags {' or '.join(f'{f:#x}' for f in wanted)} among "
                        f"memoryTypeBits {bits:#x}: its types have {', '.join(f'{m.index}: {m.flags:#x}' for m in context.memory_types)}")


class External(NamedTuple):
    """What a device says of a kind of handle, for buffers of a usage (vkGetPhysicalDeviceExternalBufferProperties)."""

    exportable: bool
    importable: bool
    dedicated_only: bool


def external(context: Context, kind: str, usage: int) -> External:
    """Asked of the device; all False where the extension is off."""
    bit, extension = KINDS[kind]
    if not context.has(extension):
        return External(False, False, False)
    out = vk.VkExternalBufferProperties()
    info = vk.VkPhysicalDeviceExternalBufferInfo(usage=usage, handleType=bit)
    context.instance_table.vkGetPhysicalDeviceExternalBufferProperties(context.physical_device, info, ctypes.byref(out))
    features = out.externalMemoryProperties.externalMemoryFeatures
    return External(bool(features & vk.VK_EXTERNAL_MEMORY_FEATURE_EXPORTABLE_BIT),
                    bool(features & vk.VK_EXTERNAL_MEMORY_FEATURE_IMPORTABLE_BIT),
                    bool(features & vk.VK_EXTERNAL_MEMORY_FEATURE_DEDICATED_ONLY_BIT))


def usage_of(context: Context, usage: int = USAGE) -> int:
    """The usage with device addresses, where they are on."""
    return usage | (vk.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT if "bufferDeviceAddress" in context.features else 0)


# ---- making ----
class Need(NamedTuple):
    """VkMemoryRequirements of a buffer, and whether it takes, or would rather have, a dedicated allocation."""

    size: int
    alignment: int
    bits: int
    dedicated: bool


def need_of(context: Context, buffer: int) -> Need:
    """Asked of the driver (vkGetBufferMemoryRequirements2)."""
    dedicated = vk.VkMemoryDedicatedRequirements()
    out = vk.VkMemoryRequirements2(pNext=dedicated)
    context.vk.vkGetBufferMemoryRequirements2(context.device_handle, vk.VkBufferMemoryRequirementsInfo2(buffer=buffer), ctypes.byref(out))
    r = out.memoryRequirements
    return Need(r.size, r.alignment, r.memoryTypeBits, bool(dedicated.requiresDedicatedAllocation or dedicated.prefersDedicatedAllocation))


def create_buffer(context: Context, nbytes: int, usage: int, types: int = 0) -> int:
    """A VkBuffer, without memory. `types`: VkExternalMemoryHandleTypeFlags of the memory that it will get."""
    info = vk.VkBufferCreateInfo(size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE)
    if types:
        vk.chain(info, vk.VkExternalMemoryBufferCreateInfo(handleTypes=types))
    out = vk.VkBuffer()
    context.ok(context.vk.vkCreateBuffer(context.device_handle, info, None, ctypes.byref(out)), "vkCreateBuffer")
    return handles.owned(out.value or 0, "vkCreateBuffer")


def allocate_memory(context: Context, nbytes: int, kind: MemoryType, *chain: Any) -> int:
    """A VkDeviceMemory; device addresses are turned on where the Context has them."""
    info = vk.VkMemoryAllocateInfo(allocationSize=nbytes, memoryTypeIndex=kind.index)
    if "bufferDeviceAddress" in context.features:
        chain = (*chain, vk.VkMemoryAllocateFlagsInfo(flags=vk.VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT))
    if chain:
        vk.chain(info, *chain)
    out = vk.VkDeviceMemory()
    context.ok(context.vk.vkAllocateMemory(context.device_handle, info, None, ctypes.byref(out)),
               f"vkAllocateMemory of {nbytes} bytes of type {kind.index}")
    return handles.owned(out.value or 0, "vkAllocateMemory")


def bind(context: Context, buffer: int, memory: int, offset: int) -> None:
    """vkBindBufferMemory."""
    context.ok(context.vk.vkBindBufferMemory(context.device_handle, buffer, memory, offset), "vkBindBufferMemory")


def check_size(context: Context, nbytes: int) -> None:
    """Raise for what no memory object of this device can hold."""
    if nbytes <= 0:
        raise ExchangeError(f"{nbytes} bytes: Vulkan has no empty buffers (VUID-VkBufferCreateInfo-size-00912)")
    if nbytes > context.max_allocation:
        raise ExchangeError(f"{nbytes} bytes: one memory object of {context.physical.name} has at most {context.max_allocation} "
                            "(maxMemoryAllocationSize)", "split the tensor")


def allocate(context: Context, nbytes: int, *, kinds: Iterable[str] = (), wanted: Sequence[int] = FOR_DEVICE, alignment: int = 1,
             usage: int = USAGE) -> Allocation:
    """A memory object with one VkBuffer over all of it; contents undefined.

    Args:
        context: where.
        nbytes: at least so many; rounded up to what the driver needs.
        kinds: what it can be exported as.
        wanted: memory property flags in order of preference.
        alignment: of the Allocation, as far as offsets from its first byte go: always met.
        usage: VkBufferUsageFlags.

    Raises:
        OutOfMemory: there is no memory left. ExchangeError: too large, or it cannot be exported so. Nothing is left then.
    """
    context.check()
    check_size(context, nbytes)
    kinds, usage = tuple(dict.fromkeys(kinds)), usage_of(context, usage)
    types, dedicated_only = 0, False
    for kind in kinds:
        context.require(KINDS[kind][1], f"memory that is exported as {kind}")
        says = external(context, kind, usage)
        if not says.exportable:
            raise ExchangeError(f"{context.physical.name} exports no buffers as {kind}", "share it through the host, or copy")
        types |= KINDS[kind][0]
        dedicated_only |= says.dedicated_only
    with contextlib.ExitStack() as undo:
        buffer, size, need = _fitting_buffer(context, -(-nbytes // _ROUND) * _ROUND, usage, types)
        undo.callback(context.vk.vkDestroyBuffer, context.device_handle, buffer, None)
        check_size(context, need.size)
        type_ = choose(context, need.bits, wanted, need.size)
        dedicated = need.dedicated or dedicated_only
        chain: list[Any] = [vk.VkExportMemoryAllocateInfo(handleTypes=types)] if types else []
        if dedicated:
            chain.append(vk.VkMemoryDedicatedAllocateInfo(buffer=buffer))
        handle = allocate_memory(context, need.size, type_, *chain)
        undo.callback(context.vk.vkFreeMemory, context.device_handle, handle, None)
        bind(context, buffer, handle, 0)
        undo.pop_all()
    memory = Memory(context, handle, need.size, type_, exports=kinds, dedicated=dedicated)
    return allocation_of(Buffer(memory, buffer, 0, size, usage), alignment=max(alignment, need.alignment))


def _fitting_buffer(context: Context, nbytes: int, usage: int, types: int) -> tuple[int, int, Need]:
    """A buffer that is as large as the memory it needs, where the driver lets it: who imports dedicated memory makes the same one."""
    buffer = create_buffer(context, nbytes, usage, types)
    need = need_of(context, buffer)
    if need.size == nbytes:
        return buffer, nbytes, need
    context.vk.vkDestroyBuffer(context.device_handle, buffer, None)
    size = need.size
    buffer = create_buffer(context, size, usage, types)
    return buffer, size, need_of(context, buffer)


def allocation_of(buffer: Buffer, *, alignment: int = 1, owner: Any = None, readonly: bool = False, **more: Any) -> Allocation:
    """An Allocation over a new Buffer, which goes with it: also where none can be made."""
    memory = buffer.memory
    try:
        if buffer.skip:
            more["skip"] = buffer.skip
        out = buffer.context.allocation(buffer.handle, buffer.nbytes - buffer.skip, free=buffer.close, owner=owner, readonly=readonly,
                                        alignment=alignment, traits=memory.traits, exports=memory.exports, atom=memory.atom, **more)
    except BaseException:
        buffer.close()
        raise
    if memory.root is None and buffer.nbytes == memory.nbytes:
        memory.root = weakref.ref(out)
    return out
