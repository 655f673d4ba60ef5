"""CuPy arrays that can leave as file descriptors: CuPy's own pool over big exportable segments, shared out here.

`Segments` knows chunks, streams and events; `Allocator` is its face towards CuPy. Neither knows arrays or tensors.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interop.contract import DeviceLostError, ExchangeError, Point

from . import virtual
from .driver import CudaError, Driver
from .streams import HOST_TIMEOUT, Streams

#: Bytes that are taken from the driver at once; what is larger than half of it gets a segment of its own.
SEGMENT = 32 << 20
_STEP = 512                     # every block is a multiple of so many bytes, as CuPy's are
_LEGACY, _PER_THREAD = 1, 2
_MEMORY_ALLOCATION = 2          # cudaErrorMemoryAllocation


@dataclass(slots=True, eq=False)
class _Segment:
    """One chunk and the holes in it, by address."""

    chunk: virtual.Mapping
    holes: list[tuple[int, int]] = field(default_factory=list)      # (start, end), neither touching nor empty

    def take(self, size: int) -> int | None:
        """The address of `size` bytes from the first hole that has them."""
        for i, (start, end) in enumerate(self.holes):
            if end - start >= size:
                self.holes[i:i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take them back."""
        end = start + size
        i = bisect.bisect_left(self.holes, (start, end))
        first = last = i
        if i and self.holes[i - 1][1] == start:
            first, start = i - 1, self.holes[i - 1][0]
        if i < len(self.holes) and self.holes[i][0] == end:
            last, end = i + 1, self.holes[i][1]
        self.holes[first:last] = [(start, end)]

    @property
    def empty(self) -> bool:
        """Whether nobody uses any of it."""
        return self.holes == [(self.chunk.address, self.chunk.address + self.chunk.nbytes)]


@dataclass(slots=True, eq=False)
class _Block:
    """What was given out. `stream` is CuPy's object, kept so that an event can be recorded on it in the end."""

    segment: _Segment
    address: int
    size: int
    number: int
    stream: Any
    done: Point | None = None


class Segments:
    """Exportable memory of all GPUs, given out in blocks.

    A block that comes back is used again once the work of the stream that it was given out for is done: an event says so, which is asked
    when the next block is wanted. Nothing here waits for a device; only where memory is out, the host waits for those events.
    """

    def __init__(self, driver: Driver, streams: Streams, nbytes: int = SEGMENT) -> None:
        """`nbytes`: of a segment."""
        self._driver, self._streams, self._nbytes = driver, streams, nbytes
        self._segments: dict[int, list[_Segment]] = {}
        self._blocks: dict[int, _Block] = {}
        self._back: collections.deque[_Block] = collections.deque()      # its stream may not be done
        self._lock = threading.RLock()
        self._pid = 0           # of the process that allocates

    def total(self, device: int) -> int:
        """Bytes taken from the driver on a device."""
        return sum(s.chunk.nbytes for s in self._segments.get(device, ()))

    def malloc(self, size: int, device: int, stream: Any, number: int) -> int:
        """The address of `size` bytes for work on a stream. CudaError where there is no memory."""
        size = -(-size // _STEP) * _STEP
        with self._lock:
            self._pid = os.getpid()
            self._settle(None)
            segment, address = self._take(device, size)
            self._blocks[address] = _Block(segment, address, size, number, stream)
        return address

    def free(self, address: int) -> None:
        """Take a block back. From any thread and from destructors: takes no lock. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        block = self._blocks.pop(address)
        block.done = self._record(block)
        self._back.append(block)

    def trim(self, device: int | None = None) -> int:
        """Give segments that nobody uses back to the driver, and say how many bytes those were. Does not wait."""
        given = 0
        with self._lock:
            self._settle(None)
            for d in list(self._segments) if device is None else [device]:
                segments = self._segments.get(d, [])
                for s in [s for s in segments if s.empty]:
                    segments.remove(s)
                    given += s.chunk.nbytes
                    s.chunk.close()
        return given

    # ---- with the lock held ----
    def _take(self, device: int, size: int) -> tuple[_Segment, int]:
        own = size > self._nbytes // 2
        segments = self._segments.setdefault(device, [])
        if not own:
            found = _hole(segments, size)
            if found is not None:
                return found
        try:
            chunk = virtual.create(self._driver, device, size if own else self._nbytes)
        except CudaError as e:
            if e.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            self._settle(time.monotonic() + HOST_TIMEOUT)
            found = _hole(segments, size)
            if found is not None:
                return found
            self.trim(device)
            chunk = virtual.create(self._driver, device, size)
        start, end = chunk.address, chunk.address + chunk.nbytes
        made = _Segment(chunk, [(start + size, end)] if start + size < end else [])
        segments.append(made)
        return made, start

    def _settle(self, end: float | None) -> None:
        """Make holes of the blocks whose streams are done; until `end` (time.monotonic) wait for those that are not."""
        for _ in range(len(self._back)):
            try:
                block = self._back.popleft()
            except IndexError:
                return
            done = False
            try:
                done = self._is_done(block, end)
            finally:
                if done:
                    block.segment.give(block.address, block.size)
                else:
                    self._back.append(block)

    def _is_done(self, block: _Block, end: float | None) -> bool:
        if block.done is None:
            block.done = self._record(block)
        if block.done is None:
            return False
        if end is not None:
            with contextlib.suppress(TimeoutError, ExchangeError, DeviceLostError):
                block.done.wait(max(0.0, end - time.monotonic()))
        return block.done.done()

    def _record(self, block: _Block) -> Point | None:
        """When the block's stream is done with it; None where that cannot be asked now: a stream that is being captured."""
        # 2 is another stream in each thread, and this may be another thread: the legacy stream comes after all of them
        number = _LEGACY if block.number == _PER_THREAD else block.number
        try:
            return self._streams.record(block.segment.chunk.device, number)
        except (ExchangeError, DeviceLostError):
            return None


def _hole(segments: list[_Segment], size: int) -> tuple[_Segment, int] | None:
    for s in segments:
        found = s.take(size)
        if found is not None:
            return s, found
    return None


class Allocator:
    """What CuPy calls for memory: ``with cupy.cuda.using_allocator(allocator()): ...``. Arrays keep the memory, not the Allocator.

    Attributes:
        pool: the cupy.cuda.MemoryPool in front, for its statistics and limits.
    """

    def __init__(self, cupy: Any, segments: Segments) -> None:
        """A pool of its own over the segments."""
        self._cupy, self._segments = cupy, segments
        make = _taker(cupy, segments)
        self.pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(make, lambda address, _: segments.free(address)).malloc)

    def __call__(self, nbytes: int) -> Any:
        """A cupy.cuda.MemoryPointer to so many bytes on CuPy's current device, for work on its current stream."""
        return self.pool.malloc(nbytes)

    def segment_bytes(self) -> int:
        """Bytes of all segments on CuPy's current device: what other programs cannot have."""
        return self._segments.total(self._cupy.cuda.Device().id)

    def free_all(self) -> int:
        """Give what no array uses back to the driver, and say how many bytes those were.

        Does not wait: segments in which work is still queued stay, until it is called again.
        """
        self.pool.free_all_blocks()
        return self._segments.trim()


_made: dict[int, Allocator] = {}


def allocator(segment: int = SEGMENT) -> Allocator:
    """The allocator of exportable memory for CuPy: ``with cupy.cuda.using_allocator(allocator()): x = cupy.empty(...)``.

    Small arrays share a segment; what they are exported as is the whole segment, and an offset. There is one allocator for each size of
    segment: CuPy's pools (14.2) never give back what they hold when they are dropped, so none is dropped. Only the GPU that the memory
    is on has access to it.

    Args:
        segment: bytes taken from the driver at once; rounded up to the device's granules.

    Raises ExchangeError where CuPy or the driver is missing.
    """
    try:
        import cupy
    except ImportError:
        raise ExchangeError("cupy is not installed", "pip install cupy-cuda13x") from None
    if segment <= 0:
        raise ValueError(f"segment {segment}: bytes, more than none")
    from .adapter import ADAPTER

    ADAPTER.driver.cu           # noqa: B018   raises where there is none, and in a forked child
    found = _made.get(segment)
    if found is None:
        found = _made.setdefault(segment, Allocator(cupy, Segments(ADAPTER.driver, ADAPTER.streams, segment)))
    return found


def _taker(cupy: Any, segments: Segments) -> Callable[[int, int], int]:
    """The malloc of a cupy.cuda.PythonFunctionAllocator: CuPy's error for memory that is out makes its pool empty itself and try again."""
    def malloc(size: int, device: int) -> int:
        stream = cupy.cuda.get_current_stream()
        try:
            return segments.malloc(size, device, stream, int(stream.ptr) or _LEGACY)
        except CudaError as e:
            if e.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise cupy.cuda.runtime.CUDARuntimeError(_MEMORY_ALLOCATION) from None

    return malloc
