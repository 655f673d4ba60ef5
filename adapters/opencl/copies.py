"""Copies of OpenCL's memory: to and from the host, and within a cl_context, any strides. Knows geometry and queues; no leases.

* Where the host sees the memory it copies by itself, through a map: `copy` says NotImplemented, and the layer above maps.
* Else by rectangles: every even run of runs is one clEnqueue...BufferRect.
* Within a cl_context by clEnqueueCopyBuffer(Rect). Between two nobody but the host copies.

A copy goes to the queue given, else to the one that the application uses the memory on, whose next command then comes after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interop.contract import ExchangeError, Point, keep_until, pending

from ..strided import Axis, Move, plan
from . import loader, maps, memory, queues
from .context import HOST_TIMEOUT

if TYPE_CHECKING:
    from interop import Tensor

    from .context import Context
    from .memory import Mem

#: Rectangles from which on two strided tensors are copied through the host: it steps from element to element faster.
RECTS = 1 << 14


def copy(dst: Tensor, src: Tensor, stream: Any) -> Point | Any:
    """Copy `src` to `dst`: equal shape and dtype, at least one element.

    Returns:
        When it is complete; None: it is; NotImplemented: two contexts, or the host copies through a map. What is read from or written to
        the host's memory has been when this returns.

    Raises ExchangeError: a queue of another context; buffers that forbid the host; packed elements with strides.
    """
    if dst.layout != "strided" or src.layout != "strided":
        from . import images

        return images.copy(dst, src, stream)
    to, source = (memory.find(t.allocation) if t.device.name == "opencl" else None for t in (dst, src))
    there = [m for m in (to, source) if m is not None]
    if not there or any(m is None and t.device.name == "opencl" for m, t in ((to, dst), (source, src))):
        return NotImplemented
    if there[0].context.handle != there[-1].context.handle:
        return NotImplemented
    c = there[0].context
    c.check()
    queue = queue_for(c, stream, there)
    for m, write in ((to, True), (source, False)):
        if m is not None:
            memory.check_unmapped(m, write)
    if to is None or source is None:
        maps.check_host(there[0], "write" if to is not None else "read")
        if c.concurrent_host:
            if not _is_none(stream):
                queues.mark(c.driver, queue, c.handle).wait(HOST_TIMEOUT)
            return NotImplemented
    before = pending(dst, "write"), pending(src, "read")        # held: their events are valid as long as they are there
    waits = [e for p in before for e in queues.split(p, c.handle, HOST_TIMEOUT)]
    if to is not None and source is not None:
        move = _plan(dst, src, dst.byte_offset, src.byte_offset, 0)
        if to is source and move.is_nothing:
            return None
        if many(move, to is source) or (to is source and move.overlaps) or _shares_bytes(to, source):
            if c.unified:
                return NotImplemented
            _through_host(c, queue, waits, to, source, dst, src)
            return None
        return submit(c, queue, waits, within(c, queue, to.handle, source.handle, move))
    if to is not None:
        move = _plan(dst, src, dst.byte_offset, src.ptr, 0)
        done = submit(c, queue, waits, _hosted(c, queue, to, move, True))
    else:
        move = _plan(dst, src, dst.ptr, src.byte_offset, 1)
        done = submit(c, queue, waits, _hosted(c, queue, there[0], move, False))
    try:
        done.wait(HOST_TIMEOUT)
    except TimeoutError:
        keep_until(done, dst, src)          # the queue still has it
        raise
    return None


def queue_for(c: Context, stream: Any, there: list[Mem]) -> int:
    """The queue that was given, else the one that the application uses the memory on, else interop's own."""
    return c.find_queue(stream) if not _is_none(stream) else next((m.queue for m in there if m.queue), 0) or c.queue


def _is_none(stream: Any) -> bool:
    return stream is None or (isinstance(stream, int) and not isinstance(stream, bool) and stream == -1)


def _plan(dst: Tensor, src: Tensor, to: int, source: int, lead: int) -> Move:
    if dst.is_contiguous() and src.is_contiguous():
        return Move(to, source, dst.nbytes)
    if dst.dtype.bits * dst.dtype.lanes % 8 and not dst.padded:
        raise ExchangeError(f"dtype {dst.dtype} with strides: elements that share bytes are only copied whole")
    return plan(to, source, dst.itemsize, dst.shape, dst.strides, src.strides, lead)


def _shares_bytes(a: Mem, b: Mem) -> bool:
    """Whether two cl_mem may be the same bytes: over the same pages, or parts of the same buffer."""
    return a is not b and bool((a.flags | b.flags) & memory.USE_HOST_PTR or memory.ask(a.context, a.handle, 0x1107, ctypes.c_void_p)
                               or memory.ask(b.context, b.handle, 0x1107, ctypes.c_void_p))


def rects(move: Move, same: bool = False) -> Iterator[tuple[int, int, int, Axis | None]]:
    """``(dst, src, unit, axis)``: runs, repeated along one axis where its steps are such that OpenCL has words for it.

    Pitches are positive and at least as long as a run, and within one cl_mem (`same`) both are one (OpenCL, clEnqueueCopyBufferRect).
    """
    if _even(move, same):
        axis = move.axes[-1]
        for m in move.outer(len(move.axes) - 1):
            yield m.dst, m.src, m.unit, axis
        return
    for m in move.outer(len(move.axes)):
        yield m.dst, m.src, m.unit, None


def _even(move: Move, same: bool) -> bool:
    if not move.axes:
        return False
    _, to, source = move.axes[-1]
    return to >= move.unit and source >= move.unit and (to == source or not same)


def many(move: Move, same: bool = False) -> bool:
    """Whether a Move, within one cl_mem (`same`) or not, has more rectangles than are worth a command each."""
    runs = move.nbytes // move.unit
    if _even(move, same):
        runs //= move.axes[-1][0]
    return runs > RECTS


def within(c: Context, queue: int, to: int, source: int, move: Move) -> Iterator[int]:
    """Moves between two cl_mem of a context, as commands of `queue`, each given when it is asked for; their codes."""
    for d, s, unit, axis in rects(move, to == source):
        if axis is None:
            yield c.driver.clEnqueueCopyBuffer(queue, source, to, s, d, unit, 0, None, None)
        else:
            n, dstep, sstep = axis
            yield c.driver.clEnqueueCopyBufferRect(queue, source, to, *_origins(s, sstep, d, dstep), loader.sizes(unit, n, 1),
                                                   sstep, 0, dstep, 0, 0, None, None)


def _origins(first: int, first_pitch: int, second: int, second_pitch: int) -> tuple[Any, Any]:
    """Byte offsets as (x, y, z): y rows of the pitch and x bytes."""
    return (loader.sizes(first % first_pitch, first // first_pitch, 0), loader.sizes(second % second_pitch, second // second_pitch, 0))


def _hosted(c: Context, queue: int, mem: Mem, move: Move, write: bool) -> Iterator[int]:
    """Between a buffer and addresses of the host; which of the two sides of the Move is the buffer, `write` says."""
    plain = c.driver.clEnqueueWriteBuffer if write else c.driver.clEnqueueReadBuffer
    rect = c.driver.clEnqueueWriteBufferRect if write else c.driver.clEnqueueReadBufferRect
    for d, s, unit, axis in rects(move):
        offset, address = (d, s) if write else (s, d)
        if axis is None:
            yield plain(queue, mem.handle, 0, offset, unit, address, 0, None, None)
        else:
            n = axis[0]
            step, host_step = (axis[1], axis[2]) if write else (axis[2], axis[1])
            zero = loader.sizes(0, 0, 0)
            yield rect(queue, mem.handle, 0, loader.sizes(offset % step, offset // step, 0), zero, loader.sizes(unit, n, 1), step, 0,
                       host_step, 0, address, 0, None, None)


def submit(c: Context, queue: int, waits: list[int], commands: Iterator[int]) -> queues.EventPoint:
    """Behind `waits`; what the queue is given later comes after, also where it is out of order."""
    unordered = queues.is_out_of_order(c.driver, queue)
    if waits or unordered:
        queues.barrier(c.driver, queue, waits)
    try:
        for code in commands:
            loader.check(code, "a copy of a cl_mem")
    except BaseException:
        queues.mark(c.driver, queue, c.handle).wait(HOST_TIMEOUT)      # nobody will be told of what is on its way
        raise
    done = queues.mark(c.driver, queue, c.handle)
    if unordered:
        queues.barrier(c.driver, queue, [])
    return done


def _through_host(c: Context, queue: int, waits: list[int], to: Mem, source: Mem, dst: Tensor, src: Tensor) -> None:
    """Where the two overlap, or have no rectangles: what is between them is packed memory of the host's."""
    from interop import _core

    packed = _core.host_tensor((dst.nbytes,), "uint8")
    steps, size = [], 1
    for n in reversed(dst.shape):
        steps.append(size)
        size *= n
    steps.reverse()
    move = plan(packed.ptr, src.byte_offset, dst.itemsize, dst.shape, steps, src.strides, 1)
    submit(c, queue, waits, _hosted(c, queue, source, move, False)).wait(HOST_TIMEOUT)
    move = plan(dst.byte_offset, packed.ptr, dst.itemsize, dst.shape, dst.strides, steps, 0)
    done = submit(c, queue, [], _hosted(c, queue, to, move, True))
    keep_until(done, packed)
    done.wait(HOST_TIMEOUT)
