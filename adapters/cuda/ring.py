"""The way through pageable host memory: a few pinned chunks that are used over and over, and the threads that fill and empty them.

CUDA reaches pageable memory only through pinned memory. What the driver does for that is one copy on one thread; here several threads
copy while the card transfers. Knows chunks, threads and moves; what is done with a chunk, `copies` says.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from interop.contract import DeviceLostError, ExchangeError

from ..strided import Move
from .driver import Driver
from .streams import HOST_TIMEOUT

#: Bytes of a chunk. Each piece costs a few hand-overs of the GIL between the threads, so pieces must not be small.
CHUNK = 4 << 20
#: Chunks that there can be; they are allocated when first needed, and kept. 64 MiB of pinned memory in all, for the process.
CHUNKS = 16
#: Threads that copy, the caller's among them. More bring nothing: the memory is busy then.
THREADS = min(12, len(os.sched_getaffinity(0)))
#: A contiguous copy of at most so many bytes is done by the thread that asks, in pieces of `_PIPELINED`: one is copied while the one
#: before is transferred. To wake others costs about 0.1 ms each. Packing is slower, so that threads are worth it sooner.
INLINE = 8 << 20
_PIPELINED = 1 << 20
_PACKED = 256 << 10     # least bytes of a piece that is packed
_LOOKS = 2      # chunks that are asked about before another is made, or waited for: each question costs a hand-over


class Stopped(Exception):
    """The copy that this thread works on has failed elsewhere and is being given up. Leaves `Ring.run` never."""


class Chunk:
    """Pinned memory at `address`; `busy` is the event after which the card is done with what was last put there.

    `stream`: (device, stream) where no event could be recorded: the card is done with it when that stream is.
    """

    __slots__ = ("address", "busy", "events", "stream")

    def __init__(self, address: int) -> None:
        """Idle."""
        self.address = address
        self.busy: Any = None
        self.stream: tuple[int, int] | None = None
        self.events: dict[int, Any] = {}        # device -> its event for this chunk


class Ring:
    """The chunks of a process, for all its devices: they are allocated portable.

    What is done with them happens within `Driver.using` and `Driver.relaxed`, entered once for many pieces.
    """

    def __init__(self, driver: Driver) -> None:
        """Nothing is allocated."""
        self._driver = driver
        self._lock = threading.RLock()      # a destructor may copy, and come here again
        self._free: deque[Chunk] = deque()
        self._made = 0
        self._pool: ThreadPoolExecutor | None = None

    def take(self, stopped: Callable[[], bool]) -> Chunk:
        """A chunk that may be written to. Raises Stopped, or TimeoutError after `HOST_TIMEOUT`."""
        pause = Pause(stopped, "a chunk of pinned memory")
        while True:
            for _ in range(_LOOKS):
                try:
                    chunk = self._free.popleft()        # atomic, and the one that has been busy for longest
                except IndexError:
                    break
                try:
                    if self.idle(chunk):
                        return chunk
                except (ExchangeError, DeviceLostError):
                    with self._lock:                    # of a device that is lost: the memory may be, too
                        self._made -= 1
                    continue
                self._free.append(chunk)
            with self._lock:
                grow = self._made < CHUNKS
                self._made += grow
            if grow:
                return self._allocate()
            pause()

    def idle(self, chunk: Chunk) -> bool:
        """Whether the card is done with it. The error that its work failed with is raised."""
        if chunk.stream is not None:
            device, stream = chunk.stream
            with self._driver.using(device) as cu, self._driver.relaxed():
                error = cu.cuStreamQuery(stream)[0]
            if error == cu.CUresult.CUDA_ERROR_NOT_READY:
                return False
            chunk.stream = None
            self._driver.check((error, None))
        if chunk.busy is not None:
            cu = self._driver.cu
            error = cu.cuEventQuery(chunk.busy)[0]
            if error == cu.CUresult.CUDA_ERROR_NOT_READY:
                return False
            chunk.busy = None
            self._driver.check((error, None))
        return True

    def given(self, chunk: Chunk, device: int, stream: int) -> None:
        """The chunk is `busy` with what the stream was given so far."""
        cu, check = self._driver.cu, self._driver.check
        event = chunk.events.get(device)
        if event is None:
            event = chunk.events[device] = check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        check(cu.cuEventRecord(event, stream))
        chunk.busy = event

    def wait(self, chunk: Chunk, stopped: Callable[[], bool]) -> None:
        """Return when the card is done with it. Raises as `take` does, or the error of its work."""
        if not self.idle(chunk):
            pause = Pause(stopped, "a copy of the device's")
            while not self.idle(chunk):
                pause()

    def _allocate(self) -> Chunk:
        cu = self._driver.cu
        try:
            return Chunk(int(self._driver.check(cu.cuMemHostAlloc(CHUNK, cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP))))
        except BaseException:
            with self._lock:
                self._made -= 1
            raise

    def give(self, chunk: Chunk) -> None:
        """Take a chunk back; it is used again when it is not `busy` any more."""
        self._free.append(chunk)

    def close(self) -> None:
        """Free the chunks that nobody uses, and end the threads. A later copy starts afresh."""
        cu = self._driver.cu
        with self._lock, self._driver.relaxed():
            pool, self._pool = self._pool, None
            for _ in range(len(self._free)):
                chunk = self._free.popleft()
                try:
                    if not self.idle(chunk):
                        self._free.append(chunk)
                        continue
                except (ExchangeError, DeviceLostError):        # of a device that is lost: the memory may be, too
                    self._made -= 1
                    continue
                self._made -= 1
                for event in chunk.events.values():
                    cu.cuEventDestroy(event)
                self._driver.check(cu.cuMemFreeHost(chunk.address))
        if pool is not None:
            pool.shutdown()

    # ---- threads ----
    def run(self, pieces: Iterator[Move], threads: int, work: Callable[[Iterator[Move], Callable[[], bool]], None]) -> None:
        """Call ``work(pieces, stopped)`` on so many threads, this one among them, which take pieces from one iterator.

        When this returns or raises (also KeyboardInterrupt) no thread works on it any more; the first error is the one that is raised.
        """
        if threads <= 1:
            work(pieces, _never)
            return
        stop = threading.Event()
        shared = _Shared(pieces, stop)
        futures: list[Future[None]] = []
        try:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="interop-cuda")
                for _ in range(threads - 1):
                    futures.append(self._pool.submit(_guarded, work, shared, stop))
            work(shared, stop.is_set)       # it goes on also where all threads are at other copies
        except Stopped:                     # then a thread has the reason
            pass
        except BaseException:
            stop.set()
            raise
        finally:
            for future in futures:
                future.cancel()             # one that has not begun would find nothing left
            _wait_through(futures, stop)
        errors = [e for f in futures if not f.cancelled() and (e := f.exception()) is not None]
        errors.sort(key=lambda e: isinstance(e, Stopped))
        if errors:
            raise errors[0]


def shares(nbytes: int, packs: bool) -> tuple[int, int]:
    """(bytes of a piece, threads) for a copy of `nbytes`; `packs`: the host's side is not contiguous."""
    if packs:
        share = -(-nbytes // THREADS)
        limit = min(CHUNK, max(_PACKED, share + -share % 4096))
        return limit, min(THREADS, -(-nbytes // limit))
    if nbytes <= INLINE:
        return min(CHUNK, _PIPELINED), 1
    return CHUNK, min(THREADS, 1 + nbytes // CHUNK // 2)


def _never() -> bool:
    return False


def _guarded(work: Callable[[Iterator[Move], Callable[[], bool]], None], pieces: Iterator[Move], stop: threading.Event) -> None:
    try:
        work(pieces, stop.is_set)
    except BaseException:
        stop.set()
        raise


def _wait_through(futures: list[Future[None]], stop: threading.Event) -> None:
    """Wait for the threads. Ctrl-C tells them to stop, and they are waited for all the same: they write to memory of the caller's."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait(futures)
            break
        except KeyboardInterrupt as e:
            interrupted = e
            stop.set()
    if interrupted is not None:
        raise interrupted


class _Shared:
    """An iterator that several threads take from; it ends early where the copy is given up."""

    def __init__(self, items: Iterator[Move], stop: threading.Event) -> None:
        self._items, self._stop = items, stop
        self._lock = threading.Lock()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Move:
        with self._lock:
            if self._stop.is_set():
                raise StopIteration
            return next(self._items)


class Pause:
    """Called between two looks at something: returns after a while that grows. Raises Stopped or TimeoutError."""

    def __init__(self, stopped: Callable[[], bool], what: str) -> None:
        """`what` is in the message of the TimeoutError."""
        self._stopped, self._what = stopped, what
        self._end = time.monotonic() + HOST_TIMEOUT
        # alone, a thread looks again at once; of several each look would take the GIL from those that have work
        self._seconds = 0.0 if stopped is _never else 0.0001

    def __call__(self) -> None:
        """Sleep."""
        if self._stopped():
            raise Stopped
        if time.monotonic() > self._end:
            raise TimeoutError(f"{self._what} was not ready within {HOST_TIMEOUT:.0f} s")
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.1 + 0.000001, 0.002)
