"""Copies of Vulkan's memory: to and from the host, and within a Context, any strides. Knows tensors' geometry and queues; no leases.

* Where the host sees the memory it copies by itself, through a map: `copy` says NotImplemented, and the layer above maps. Memory that
  is not cached is written so and never read so.
* Else through `ring`. The device's side is left as contiguous as it is, and the host packs: a region for every run of bytes is dear.
* Within a Context by vkCmdCopyBuffer. Between two Contexts nobody but the host copies.

Everything that is submitted here starts after what its queue was given before, and is seen by whatever comes after, the host too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.contract import ExchangeError, Point

from ..strided import Move, host_move, plan
from . import api as vk
from . import commands, memory, ring
from .queue import HOST_TIMEOUT

if TYPE_CHECKING:
    from interop import Tensor

    from .context import Context
    from .memory import Buffer
    from .queue import Queue

#: Regions of one call.
REGIONS = 1 << 16
#: Runs of bytes from which on two strided tensors are copied through the host: it steps from element to element faster.
RUNS = 1 << 16
_AHEAD = 2          # pieces that the device copies while the host is busy with one

_ALL, _HOST = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
_AFTER = (vk.VkMemoryBarrier * 1)(vk.VkMemoryBarrier(
    srcAccessMask=vk.VK_ACCESS_MEMORY_WRITE_BIT,
    dstAccessMask=(vk.VK_ACCESS_MEMORY_READ_BIT | vk.VK_ACCESS_MEMORY_WRITE_BIT | vk.VK_ACCESS_HOST_READ_BIT
                   | vk.VK_ACCESS_HOST_WRITE_BIT)))


def copy(dst: Tensor, src: Tensor, stream: Any) -> Point | Any:
    """Copy `src` to `dst`: equal shape and dtype, at least one element.

    Args:
        dst, src: memory of one Context, or that and memory of the host. Images: see `images`.
        stream: the VkQueue to copy on, one that the Context knows; None: its first.

    Returns:
        When it is complete; None: it is; NotImplemented: two Contexts, or the host copies through a map.

    Raises:
        ExchangeError: the Context does not know the queue; the VkBuffer is not for copies; packed elements with strides.
    """
    if dst.layout != "strided" or src.layout != "strided":
        from . import images

        return images.copy(dst, src, stream)
    sides = buffers_of(dst, src)
    if sides is None:
        return NotImplemented
    to, source = sides
    context = context_of(to, source)
    ring.sweep(context)
    queue = queue_of(context, stream)
    if all(b is None or _by_host(b, b is to) for b in (to, source)) and (
            to is None or source is None or not _can_copy(source, to) or _is_scattered(dst, src)):
        if stream is not None:
            queue.mark().wait(HOST_TIMEOUT)     # what the host does comes after what that queue was given, too
        return NotImplemented
    for b, usage in ((source, vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT), (to, vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT)):
        if b is not None and not b.usage & usage:
            name = "TRANSFER_DST" if b is to else "TRANSFER_SRC"
            raise ExchangeError(f"the buffer {b.handle:#x} was made with usage {b.usage:#x}, without VK_BUFFER_USAGE_{name}_BIT",
                                "make it for copies, or in memory that the host sees")
    if source is None and to is not None:
        return upload(queue, to.handle, _plan(dst, src, dst.byte_offset, src.ptr, 0))
    if to is None and source is not None:
        download(queue, source.handle, _plan(dst, src, dst.ptr, src.byte_offset, 1))
        return None
    if to is None or source is None:
        return NotImplemented
    if _is_scattered(dst, src):
        return _through_host(queue, to, source, dst, src)
    return _within(queue, to, source, dst, src)


# ---- which memory ----
def buffers_of(dst: Tensor, src: Tensor) -> tuple[Buffer | None, Buffer | None] | None:
    """The Buffers of both sides, None for the host's; None where they are of two Contexts, or of none that interop knows."""
    sides = [memory.find(t.allocation) if t.device.name == "vulkan" else None for t in (dst, src)]
    if any(b is None and t.device.name == "vulkan" for b, t in zip(sides, (dst, src), strict=True)):
        return None
    there = [b for b in sides if b is not None]
    if not there or there[0].context is not there[-1].context:
        return None
    return sides[0], sides[1]


def context_of(*sides: Buffer | None) -> Context:
    """Whose they are, and it can be used."""
    context = next(b for b in sides if b is not None).context
    context.check()
    context.check_lost()
    return context


def queue_of(context: Context, stream: Any) -> Queue:
    """The queue of a `stream` argument; ExchangeError where the Context knows none such."""
    if stream is None:
        return context.queue
    found = context.find_queue(stream)
    if found is None:
        raise ExchangeError(f"stream {stream!r} is no VkQueue that the Context of this memory knows",
                            "Context.wrap(queues=[(queue, family), ...])")
    return found


def _by_host(buffer: Buffer, write: bool) -> bool:
    m = buffer.memory
    return not ring.FORCED and m.kind.host_visible and (write or m.readable)


def _can_copy(source: Buffer, to: Buffer) -> bool:
    return bool(source.usage & vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT and to.usage & vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT)


# ---- moves ----
def _plan(dst: Tensor, src: Tensor, to: int, source: int, lead: int) -> Move:
    """The Move between two positions: addresses of the host, offsets in buffers. `lead`: the side that shall be contiguous."""
    if dst.is_contiguous() and src.is_contiguous():
        return Move(to, source, dst.nbytes)
    if dst.dtype.bits * dst.dtype.lanes % 8 and not dst.padded:
        raise ExchangeError(f"dtype {dst.dtype} with strides: elements that share bytes are only copied whole")
    return plan(to, source, dst.itemsize, dst.shape, dst.strides, src.strides, lead)


def _is_scattered(dst: Tensor, src: Tensor) -> bool:
    move = _plan(dst, src, 0, 0, 0)
    return move.nbytes // move.unit > RUNS


def regions(move: Move) -> Iterator[tuple[int, Any]]:
    """``(how many, VkBufferCopy array)``, at most `REGIONS` each: one for every run."""
    for piece in move.pieces(move.unit * REGIONS):
        to, source = np.array([piece.dst], np.int64), np.array([piece.src], np.int64)
        for n, d, s in piece.axes:
            steps = np.arange(n, dtype=np.int64)
            to = (to[:, None] + steps * d).ravel()
            source = (source[:, None] + steps * s).ravel()
        table = np.empty((to.size, 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = source, to, piece.unit
        yield to.size, (vk.VkBufferCopy * to.size).from_buffer(table.data)


# ---- commands ----
def after(table: Any, buffer: int) -> None:
    """Record: whatever comes later, on the device or the host, sees what was written before."""
    table.vkCmdPipelineBarrier(buffer, _ALL, _ALL | _HOST, 0, 1, _AFTER, 0, None, 0, None)


def submit(queue: Queue, record: Callable[[int], Any], waits: Sequence[Any] = ()) -> Point:
    """Commands between two barriers: after what the queue was given, before whatever comes."""
    table = queue.context.vk

    def all_of_it(buffer: int) -> None:
        commands.between(table, buffer)
        record(buffer)
        after(table, buffer)

    return queue.run(all_of_it, waits=waits)


def copy_buffer(queue: Queue, buffer: int, to: int, source: int, move: Move) -> None:
    """Record a Move between two buffers; `move` counts from their first bytes."""
    for n, table in regions(move):
        queue.context.vk.vkCmdCopyBuffer(buffer, source, to, n, table)


# ---- through the host ----
def upload(queue: Queue, to: int, move: Move) -> Point | None:
    """From addresses of the host to offsets in the VkBuffer `to`. The source has been read when this returns."""
    return send(queue, ((piece, _sender(queue, to, piece)) for piece in move.pieces(ring.CHUNK)))


def _sender(queue: Queue, to: int, piece: Move) -> Callable[[int, int], None]:
    return lambda buffer, chunk: copy_buffer(queue, buffer, to, chunk, piece.scatter(0))


def send(queue: Queue, pieces: Iterator[tuple[Move, Callable[[int, int], Any]]]) -> Point | None:
    """For each piece the host gathers into a chunk, and ``record(VkCommandBuffer, VkBuffer of the chunk)`` says where it goes."""
    context, chunks = queue.context, ring.of(queue.context)
    done: Point | None = None
    try:
        for piece, record in pieces:
            chunk = chunks.take(context)
            try:
                host_move(piece.gather(chunk.address))
                done = chunk.busy = submit(queue, lambda buffer, record=record, chunk=chunk: record(buffer, chunk.handle))  # type: ignore[misc]
            finally:
                chunks.give(chunk)
    except BaseException:
        if done is not None and context.lost is None:
            done.wait(HOST_TIMEOUT)         # nobody will be told of what is on its way
        raise
    return done


def download(queue: Queue, source: int, move: Move) -> None:
    """From offsets in the VkBuffer `source` to addresses of the host. Done when this returns."""
    receive(queue, ((piece, _receiver(queue, source, piece)) for piece in move.pieces(ring.CHUNK)))


def _receiver(queue: Queue, source: int, piece: Move) -> Callable[[int, int], None]:
    return lambda buffer, chunk: copy_buffer(queue, buffer, chunk, source, piece.gather(0))


def receive(queue: Queue, pieces: Iterator[tuple[Move, Callable[[int, int], Any]]]) -> None:
    """For each piece ``record(VkCommandBuffer, VkBuffer of the chunk)`` fills a chunk, and the host scatters out of it."""
    context, chunks = queue.context, ring.of(queue.context)
    flying: deque[tuple[ring.Scratch, Move]] = deque()

    def land() -> None:
        chunk, piece = flying[0]
        if chunk.busy is not None:
            chunk.busy.wait(HOST_TIMEOUT)
        host_move(piece.scatter(chunk.address))
        chunks.give(flying.popleft()[0])

    try:
        for piece, record in pieces:
            if len(flying) == _AHEAD:
                land()
            chunk = chunks.take_now(context)
            while chunk is None:
                if flying:
                    land()
                chunk = chunks.take_now(context) if flying else chunks.take(context)
            flying.append((chunk, piece))
            chunk.busy = submit(queue, lambda buffer, record=record, chunk=chunk: record(buffer, chunk.handle))  # type: ignore[misc]
        while flying:
            land()
    finally:
        for chunk, _ in flying:             # of a copy that failed: busy until the device is done with it
            chunks.give(chunk)


def _through_host(queue: Queue, to: Buffer, source: Buffer, dst: Tensor, src: Tensor) -> Point | None:
    """Both sides in the order in which they lie there, and the host has the steps between."""
    there = np.empty(dst.nbytes, np.uint8)
    steps, size = [], 1
    for n in reversed(dst.shape):
        steps.append(size)
        size *= n
    steps.reverse()
    address = there.ctypes.data
    download(queue, source.handle, plan(address, src.byte_offset, dst.itemsize, dst.shape, steps, src.strides, 1))
    return upload(queue, to.handle, plan(dst.byte_offset, address, dst.itemsize, dst.shape, dst.strides, steps, 0))


# ---- within a Context ----
def _within(queue: Queue, to: Buffer, source: Buffer, dst: Tensor, src: Tensor) -> Point | None:
    move = _plan(dst, src, dst.byte_offset, src.byte_offset, 0)
    if not _overlap(to, source, dst, src, move):
        return submit(queue, lambda buffer: copy_buffer(queue, buffer, to.handle, source.handle, move))
    if to is source and move.is_nothing:
        return None
    scratch = ring.Scratch(queue.context, move.nbytes)

    def twice(buffer: int) -> None:
        copy_buffer(queue, buffer, scratch.handle, source.handle, move.gather(0))
        commands.between(queue.context.vk, buffer)
        copy_buffer(queue, buffer, to.handle, scratch.handle, move.scatter(0))

    done = scratch.busy = submit(queue, twice)
    ring.keep(queue.context, done, scratch)
    return done


def _overlap(to: Buffer, source: Buffer, dst: Tensor, src: Tensor, move: Move) -> bool:
    """Whether the copy reads where it writes: VUID-vkCmdCopyBuffer-pRegions-00117. Two buffers can lie in the same memory."""
    mine, theirs = _places(to, dst), _places(source, src)
    return any(move._replace(dst=move.dst + mine[k], src=move.src + theirs[k]).overlaps for k in mine.keys() & theirs.keys())


def _places(buffer: Buffer, t: Tensor) -> dict[tuple[str, int], int]:
    """In what a buffer lies -> where: the root allocation's bytes, the memory object, pages of the host."""
    space, origin, _ = t.allocation.span()
    m = buffer.memory
    out = {("root", space): origin, ("memory", m.handle): buffer.offset}
    if m.pages:
        out["host", 0] = m.address + buffer.offset
    return out
