"""Memory of Vulkan seen by the host: maps for a while, views for as long as the memory lives, and what makes writes visible.

Knows Buffers and Memories; leases and tensors are the layer's above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interop.contract import Mapped

from . import api as vk
from .memory import Buffer, Memory, find
from .queue import HOST_TIMEOUT
from .timeline import TimelinePoint

if TYPE_CHECKING:
    from interop import Allocation

    from .context import Context


def atoms(first: int, nbytes: int, atom: int, size: int) -> tuple[int, int]:
    """``(offset, size)`` for VkMappedMemoryRange: these bytes, whole atoms, within a memory object of `size` bytes.

    Offsets are multiples of nonCoherentAtomSize, and so are sizes unless they reach the very end (VUID-VkMappedMemoryRange-size-01390).
    """
    start = first // atom * atom
    end = min(-(-(first + nbytes) // atom) * atom, size)
    return start, max(end - start, 0)


def map_allocation(allocation: Allocation, access: str, first: int, nbytes: int) -> Mapped | Any:
    """Where the host sees `nbytes` of an Allocation from `first` on; NotImplemented where it does not, or could only crawl.

    The whole memory object is mapped, once, until its last user is gone, so that a view never dangles. Memory that is not cached is
    written through and never read through: that is staged instead.
    """
    buffer = find(allocation)
    if buffer is None or not buffer.memory.kind.host_visible or (access != "write" and not buffer.memory.readable):
        return NotImplemented
    memory = buffer.memory
    if not buffer.host_ready:
        show(buffer.context)
    address = memory.pin() + buffer.first + first
    if memory.kind.coherent:
        return Mapped(address, memory.unpin, flush=_nothing)
    t = buffer.context.vk
    return Mapped(address, memory.unpin, flush=_mover(memory, buffer.first, t.vkFlushMappedMemoryRanges, "vkFlushMappedMemoryRanges"),
                  invalidate=_mover(memory, buffer.first, t.vkInvalidateMappedMemoryRanges, "vkInvalidateMappedMemoryRanges"))


def view_of(allocation: Allocation) -> int | None:
    """The host's address of an Allocation that it may touch at any time, for as long as that lives; None where it may not.

    Only coherent and cached memory is such; what the device wrote before is visible.
    """
    buffer = find(allocation)
    if buffer is None or not can_view(buffer):
        return None
    if not buffer.host_ready:
        show(buffer.context)
    return buffer.view()


def can_view(buffer: Buffer) -> bool:
    """Whether the host may touch it at any time."""
    kind = buffer.memory.kind
    return kind.host_visible and kind.coherent and buffer.memory.readable


def show(context: Context) -> None:
    """Make what the Context's queues were given so far visible to the host, and wait for it (Vulkan, Host Access).

    On a device of interop's, where nothing was submitted since, nothing needs to be. Of the application's own submits nobody knows.
    """
    context.check()
    context.check_lost()
    shown = context.store.shown
    waiting = []
    for q in context.queues:
        # the number of the newest submit: every one of interop's own device goes through the Queue
        if context.owned and context.has_timelines and q._last == shown.get(q.handle, 0):
            continue
        waiting.append((q, q.host_barrier()))
    for q, point in waiting:
        point.wait(HOST_TIMEOUT)
        if isinstance(point, TimelinePoint):
            shown[q.handle] = max(point.value, shown.get(q.handle, 0))


def _mover(memory: Memory, offset: int, function: Any, what: str) -> Callable[[int, int], None]:
    """``f(first, nbytes)``: flush or invalidate so many bytes of an Allocation that begins at `offset`."""
    c = memory.context

    def move(first: int, nbytes: int) -> None:
        start, size = atoms(offset + first, nbytes, c.atom, memory.nbytes)
        if size:
            ranges = (vk.VkMappedMemoryRange * 1)(vk.VkMappedMemoryRange(memory=memory.handle, offset=start, size=size))
            c.ok(function(c.device_handle, 1, ranges), what)

    return move


def _nothing(first: int, nbytes: int) -> None:
    """Coherent memory needs no flush."""

