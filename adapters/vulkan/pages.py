"""Pages of the host as memory of a device (VK_EXT_external_memory_host): which ranges a Context has imported, and for whom.

Vulkan imports whole pages, so what is imported is the range around the memory that is meant; a buffer begins where it does, or as few
bytes before as Vulkan's alignment takes. Alignment of pointer and size is seen to here: drivers check it rarely, and crash (measured A2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interop.contract import ExchangeError, Importable

from . import api as vk
from . import memory
from .loader import VulkanError
from .memory import KINDS, Buffer, Memory

if TYPE_CHECKING:
    from interop import Allocation, ExternalHandle

    from .context import Context

_BIT = KINDS["host"][0]
_COHERENT = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
_WANTED = (_COHERENT | vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT, _COHERENT)


@dataclass(eq=False, slots=True)
class Range:
    """Pages that are imported, and which of them whose users keep: those cannot have been unmapped, and others mapped there, since.

    Attributes:
        low, high: their addresses.
        memory: what they are for the device.
        used: ``(low, high)`` of the pages of each user.
    """

    low: int
    high: int
    memory: Memory
    used: list[tuple[int, int]] = field(default_factory=list)

    def has(self, low: int, high: int) -> bool:
        """Whether these pages are still the ones that were imported."""
        return any(lo <= low and high <= hi for lo, hi in self.used)


def importable(context: Context) -> Importable:
    """Any address and any size, where the device imports host pages at all."""
    extension = KINDS["host"][1]
    if not context.has(extension) or not context.host_pointer_alignment:
        there = extension in context.physical.extensions
        return Importable(False, f"{extension} {'was not enabled for this device' if there else 'is not on ' + context.physical.name}")
    if not memory.external(context, "host", memory.usage_of(context)).importable:
        return Importable(False, f"{context.physical.name} imports no buffers of the host's")
    return Importable(True, keeps=True)


def around(address: int, nbytes: int, alignment: int) -> tuple[int, int]:
    """The addresses of the pages around some memory. ExchangeError where a page of the device's is larger than the host's, and not full.

    What shares a page of the host's with memory is mapped as that is; of a larger one nobody knows.
    """
    low, high = address // alignment * alignment, -(-(address + nbytes) // alignment) * alignment
    page = mmap.PAGESIZE
    if low < address // page * page or high > -(-(address + nbytes) // page) * page:
        raise ExchangeError(f"host memory at {address:#x} of {nbytes} bytes: this device imports pages of {alignment} bytes "
                            f"(minImportedHostPointerAlignment), more than the host's {page}",
                            "interop.empty(..., shared_with=[context]) is aligned")
    return low, high


def import_pages(context: Context, handle: ExternalHandle) -> Allocation:
    """A buffer over host memory, which stays the owner's: it must live as long as this. Pages that are imported are not imported again.

    Where the memory does not begin on a boundary for buffers, `Allocation.skip` bytes of it are in front of what is meant.

    Raises:
        ExchangeError: the extension is off, a page is larger than the host's, or the driver refuses the pages. Nothing is left then.
    """
    from interop import Allocation

    context.check()
    context.require(KINDS["host"][1], "importing host memory")
    address, nbytes, owner = handle.value, handle.nbytes, handle.owner
    if address + nbytes > 2**64:
        raise ExchangeError(f"{nbytes} bytes at {address:#x} are no range of host memory")
    low, high = around(address, nbytes, context.host_pointer_alignment)
    readonly = isinstance(owner, Allocation) and owner.readonly
    usage = memory.usage_of(context)
    if readonly:
        usage &= ~vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT       # the validation layers then see who copies into it
    skip = (address - low) % _alignment(context, usage)
    store = context.store
    with store.lock, contextlib.ExitStack() as undo:
        buffer = memory.create_buffer(context, skip + nbytes, usage, _BIT)
        undo.callback(context.vk.vkDestroyBuffer, context.device_handle, buffer, None)
        need = memory.need_of(context, buffer)
        offset = address - skip - low
        if offset + need.size > high - low:
            raise ExchangeError(f"a buffer of {skip + nbytes} bytes takes {need.size} here, and the pages at {low:#x} have "
                                f"{high - low - offset} from there on", "share memory that is larger than the tensor in it")
        found = next((r for r in store.pages if r.has(low, high)), None)
        if found is None:
            found = _import(context, low, high, need.bits)
            store.pages.append(found)
        else:
            found.memory.users += 1
        pages = found
        found.used.append((low, high))
        undo.callback(_leave, context, pages, (low, high))
        memory.bind(context, buffer, pages.memory.handle, address - skip - pages.low)
        undo.pop_all()
    made = _Pages(pages, (low, high), buffer, address - skip - pages.low, skip + nbytes, usage, skip)
    return memory.allocation_of(made, owner=owner, readonly=readonly, alignment=1 if skip else need.alignment)


class _Pages(Buffer):
    """A buffer over imported pages."""

    __slots__ = ("_range", "_used")

    def __init__(self, pages: Range, used: tuple[int, int], handle: int, offset: int, nbytes: int, usage: int,
                 skip: int) -> None:
        super().__init__(pages.memory, handle, offset, nbytes, usage, skip=skip)
        self._range, self._used = pages, used

    def close(self) -> None:
        """Also the range is used by one less."""
        store = self.context.store
        with store.lock:
            if self.users == 1:
                _forget(store, self._range, self._used)
        super().close()


def _import(context: Context, low: int, high: int, bits: int) -> Range:
    says = vk.VkMemoryHostPointerPropertiesEXT()
    t, device = context.vk, context.device_handle
    try:
        context.ok(t.vkGetMemoryHostPointerPropertiesEXT(device, _BIT, low, ctypes.byref(says)), "vkGetMemoryHostPointerPropertiesEXT")
        kind = memory.choose(context, bits & says.memoryTypeBits, _WANTED)
        made = memory.allocate_memory(context, high - low, kind, vk.VkImportMemoryHostPointerInfoEXT(handleType=_BIT, pHostPointer=low))
    except VulkanError as e:
        raise _refused(context, low, high, e) from e
    return Range(low, high, Memory(context, made, high - low, kind, address=low))


def _refused(context: Context, low: int, high: int, e: VulkanError) -> ExchangeError:
    over = [r for r in context.store.pages if r.low < high and low < r.high]
    if over:
        return ExchangeError(f"the pages {low:#x} to {high:#x} overlap with {over[0].low:#x} to {over[0].high:#x}, which this device has "
                             f"imported, and its driver does not import pages twice ({e.code or e.reason})",
                             "import all of the memory before parts of it, or drop the other import")
    return type(e)(f"{context.physical.name} does not import the host pages {low:#x} to {high:#x}: {e.code or e.reason}",
                   "memory that is mapped read-only, or from a file or device, is refused by many drivers: copy it", e.code)


def _leave(context: Context, pages: Range, used: tuple[int, int]) -> None:
    """The end of a use that has no buffer yet."""
    _forget(context.store, pages, used)
    pages.memory.leave()


def _forget(store: memory.Store, pages: Range, used: tuple[int, int]) -> None:
    pages.used.remove(used)
    if not pages.used:
        store.pages.remove(pages)


def _alignment(context: Context, usage: int) -> int:
    """What memory offsets of such buffers are multiples of: one number for all (Vulkan, Resource Memory Association)."""
    known = context.store.alignments.get((usage, _BIT))
    if known is None:
        probe = memory.create_buffer(context, 4096, usage, _BIT)
        try:
            known = memory.need_of(context, probe).alignment
        finally:
            context.vk.vkDestroyBuffer(context.device_handle, probe, None)
        context.store.alignments[usage, _BIT] = known
    return known
