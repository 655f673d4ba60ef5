"""Order on CUDA: work of one stream before another's, Points that are events, memory kept until a stream is done with it.

Streams are numbered as the array API does: 1 the legacy default stream, 2 the per-thread one, else a CUstream. One record and one wait,
never a synchronisation of the device; nothing is asked of a stream that is being captured into a graph but whether it is.
"""

from __future__ import annotations

import time
from typing import Any

from interop.contract import DeviceLostError, ExchangeError, Point

from .driver import Driver

#: Seconds that the host waits for a stream before it says so.
HOST_TIMEOUT = 60.0
_SPIN = 0.003       # seconds for which a host wait gives its turn away instead of sleeping
_BATCH, _BATCH_BYTES = 32, 4 << 20       # pieces, or bytes, that wait for one event together,
_GATHER = 0.0005    # and seconds after which fewer do
_SPARE = 32         # events kept for reuse on each device: making one costs more than recording it


class CaptureError(ExchangeError):
    """A stream is being captured into a graph, where the order that was asked for cannot be had."""


class EventPoint(Point):
    """What a stream had been given when the event was recorded. `native` is the CUevent as an int.

    The event goes back to the pool with the Point, not when it is done: somebody may be about to ask it, or to make a stream wait for it.
    """

    __slots__ = ("_device", "_error", "_event", "_over", "_streams")

    def __init__(self, streams: Streams, device: int, event: Any) -> None:
        """Takes the event over."""
        self._streams, self._device, self._event, self._over = streams, device, event, False
        self._error: BaseException | None = None

    def _poll(self) -> bool:
        if self._over:
            return True
        driver = self._streams.driver
        try:
            with driver.relaxed():
                error = driver.cu.cuEventQuery(self._event)[0]
            if error is not driver.ok:
                if error == driver.cu.CUresult.CUDA_ERROR_NOT_READY:
                    return False
                driver.check((error, None))
        except (ExchangeError, DeviceLostError) as e:
            self._error = e.with_traceback(None)
        self._over = True
        return True

    def _block(self, seconds: float) -> None:
        # At first without sleeping: a copy of 64 MiB takes a millisecond, and the shortest sleep a fifteenth of that
        start = time.monotonic()
        while not self._poll():
            waited = time.monotonic() - start
            if waited >= seconds:
                return
            time.sleep(0 if waited < _SPIN else min(0.005, waited / 20))

    def error(self) -> BaseException | None:
        """Why the work can no longer be waited for: the device is lost."""
        return self._error

    def native(self) -> Any:
        """The CUevent, an int; 0 once the work is over."""
        return 0 if self._over else int(self._event)

    def stream_wait(self, stream: Any) -> bool:
        """One cuStreamWaitEvent. False during graph capture, where the wait would be missing from the graph or invalidate it."""
        return self.wait_on(self._device, int(stream))

    def wait_on(self, device: int, stream: int) -> bool:
        """`stream_wait`, of a stream of any GPU."""
        if self._over:
            return self._error is None
        if stream == -1:
            return False        # no stream: who said so waits himself
        streams = self._streams
        with streams.driver.using(device) as cu:
            if streams.capturing(stream):
                return False
            streams.driver.check(cu.cuStreamWaitEvent(stream, self._event, 0))
        return True

    def __del__(self) -> None:
        """The event may be recorded anew from now on; waits for it that are queued stay what they are."""
        if getattr(self, "_error", 0) is None and not self._streams.driver.forked:
            self._streams.reuse(self._device, self._event)

    def __repr__(self) -> str:
        return f"EventPoint(cuda:{self._device}, {'done' if self._over else hex(int(self._event))})"


class Batch(Point):
    """Memory that waits for one stream. The event is recorded when the batch is sealed, which is after all of it was dropped."""

    __slots__ = ("_born", "_done", "_nbytes", "_sealed", "device", "memory", "stream", "streams")

    def __init__(self, streams: Streams, device: int, stream: int) -> None:
        """Empty, and open for more."""
        self.streams, self.device, self.stream = streams, device, stream
        self.memory: list[Any] = []
        self._nbytes, self._sealed, self._born = 0, False, time.monotonic()
        self._done: Point | None = None

    def add(self, memory: Any, nbytes: int) -> None:
        """One piece more; seals it where that is enough for one event."""
        self.memory.append(memory)
        self._nbytes += nbytes
        self._sealed = self._nbytes >= _BATCH_BYTES or len(self.memory) >= _BATCH
        if self._sealed and self.done():
            self.let_go(self)

    def _poll(self) -> bool:
        if self._done is None:
            if not self._sealed and time.monotonic() - self._born < _GATHER:
                return False
            if self.streams.batches.get((self.device, self.stream)) is self:
                del self.streams.batches[self.device, self.stream]
            try:
                self._done = self.streams.record(self.device, self.stream)
            except CaptureError:
                return False        # asked again later: only then can be said when the stream's work so far is done
            except (ExchangeError, DeviceLostError):
                return True         # a stream that was destroyed, a device that is lost: nothing is left to wait for
        return self._done.done()

    @staticmethod
    def let_go(batch: Any) -> None:
        """The work is over: releases run here, on interop's thread or on that of whoever dropped the last piece."""
        batch.memory.clear()


class Streams:
    """The streams of one driver."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is made yet; `made`: interop's own streams by device."""
        self.driver = driver
        self.made: dict[int, int] = {}
        self._spare: dict[int, list[Any]] = {}
        self.batches: dict[tuple[int, int], Batch] = {}

    def own(self, device: int) -> int:
        """interop's own stream on a device: non-blocking, made once. Copies run on it, and producers that ask are told of it."""
        found = self.made.get(device)
        if found is None:
            with self.driver.using(device) as cu:
                made = self.driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
            found = self.made.setdefault(device, int(made))
            if found != int(made):      # another thread was first
                cu.cuStreamDestroy(made)
        return found

    def capturing(self, stream: int) -> bool:
        """Whether it is being captured into a graph. The device is current.

        A legacy stream cannot be asked while another one captures globally (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT): that error is a yes.
        """
        driver = self.driver
        error, status = driver.cu.cuStreamIsCapturing(stream)
        if error is not driver.ok and int(error) != 0:
            if "STREAM_CAPTURE" in getattr(error, "name", ""):
                return True
            driver.check((error, status))
        return int(status) != 0

    def order(self, device: int, first: int, then: int) -> None:
        """What `first` has been given so far, before what `then` is given from now on. ExchangeError, before it, in a capture."""
        driver = self.driver
        cu = driver.cu
        entered = driver.enter(device)
        try:
            if self.capturing(first) or self.capturing(then):
                raise CaptureError(f"a stream is being captured: work of {first:#x} cannot be ordered before {then:#x} in a graph",
                                    "use the same stream on both sides, or pass stream=-1 and order it yourself")
            event = self._event(device, cu)
            try:
                driver.check(cu.cuEventRecord(event, first))
                driver.check(cu.cuStreamWaitEvent(then, event, 0))
            finally:
                self.reuse(device, event)       # a wait that is queued refers to this recording, not to later ones
        finally:
            if entered:
                driver.leave()

    def idle(self, device: int, stream: int) -> bool:
        """Whether all that the stream was given is done; False too where it cannot be asked, in a capture."""
        driver = self.driver
        cu = driver.cu
        entered = driver.enter(device)
        try:
            if self.capturing(stream):
                return False
            with driver.relaxed():
                return cu.cuStreamQuery(stream)[0] is driver.ok
        finally:
            if entered:
                driver.leave()

    def record(self, device: int, stream: int) -> EventPoint:
        """The Point at which what the stream was given so far is done. ExchangeError in a capture."""
        driver = self.driver
        cu = driver.cu
        entered = driver.enter(device)
        try:
            if self.capturing(stream):
                raise CaptureError(f"stream {stream:#x} is being captured: when its work is done, only the graph's launches say")
            event = self._event(device, cu)
            try:
                driver.check(cu.cuEventRecord(event, stream))
            except BaseException:
                self.reuse(device, event)
                raise
        finally:
            if entered:
                driver.leave()
        return EventPoint(self, device, event)

    def synchronize(self, device: int, stream: int) -> None:
        """Wait on the host until what `stream` has been given is done. TimeoutError after `HOST_TIMEOUT`; Ctrl-C gets in."""
        with self.driver.using(device) as cu, self.driver.relaxed():
            if self.capturing(stream):
                raise CaptureError(f"stream {stream:#x} is being captured: its work runs when the graph is launched, not before")
            not_ready = cu.CUresult.CUDA_ERROR_NOT_READY
            end, pause = time.monotonic() + HOST_TIMEOUT, 0.00002
            while (error := cu.cuStreamQuery(stream)[0]) == not_ready:
                if time.monotonic() > end:
                    raise TimeoutError(f"stream {stream:#x} was not finished within {HOST_TIMEOUT:.0f} s")
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005)
            self.driver.check((error, None))

    def keep(self, device: int, stream: int, nbytes: int, memory: Any) -> None:
        """Hold `memory` until what `stream` has been given so far is done; its release is then interop's, on a thread of its own.

        Small pieces are gathered for a moment, because asking the driver of each costs more than sharing it did; `nbytes` says how much.
        """
        batch = self.batches.get((device, stream))
        if batch is not None:
            batch.add(memory, nbytes)
            return
        batch = self.batches[device, stream] = Batch(self, device, stream)
        batch.add(memory, nbytes)
        if batch.memory:
            batch.add_done_callback(Batch.let_go)

    def reuse(self, device: int, event: Any) -> None:
        """Take an event back that nobody asks about any more."""
        spare = self._spare.setdefault(device, [])
        if len(spare) < _SPARE:
            spare.append(event)
        else:
            self.driver.cu.cuEventDestroy(event)

    def _event(self, device: int, cu: Any) -> Any:
        spare = self._spare.get(device)
        if spare:
            try:
                return spare.pop()
            except IndexError:      # another thread took the last one
                pass
        return self.driver.check(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
