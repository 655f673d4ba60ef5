"""Points that are cl_events, and queues as whoever waits for them sees them. Knows no tensors.

A driver's own wait has no timeout and no Ctrl-C, and a callback of a driver's thread cannot run Python without waiting for the
interpreter lock that the thread which called the driver may hold. So the status of an event is looked at.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from interop.contract import ExchangeError, Point

from . import loader

_QUEUE_CONTEXT, _QUEUE_DEVICE, _QUEUE_PROPERTIES = 0x1090, 0x1091, 0x1093
_EVENT_QUEUE, _EVENT_STATUS, _EVENT_CONTEXT = 0x11D0, 0x11D3, 0x11D4
OUT_OF_ORDER = 1


class EventPoint(Point):
    """When a cl_event is complete (OpenCL, Event Objects).

    Holds it as long as the Point is there: two threads look at one, and neither may find it released by the other.
    """

    __slots__ = ("_complete", "_driver", "_error", "_event", "_generation", "_pause", "context", "noted")

    def __init__(self, event: int, context: int, *, driver: Any = None) -> None:
        """Takes over one reference to the event, of this cl_context."""
        self._event, self._complete, self.context = event, 0, context
        self._driver = driver if driver is not None else loader.driver()
        self._error: BaseException | None = None
        self._generation, self._pause = loader.generation(), 2e-5
        self.noted: set[int] = set()        # the Allocations on which it has been noted

    def _poll(self) -> bool:
        event = self._event
        if not event:
            return True
        if self._generation != loader.generation():
            self._error, self._event = ExchangeError("this event was made before fork: it is the parent's"), 0
            return True
        code = ctypes.c_int32(1)
        result = self._driver.clGetEventInfo(event, _EVENT_STATUS, 4, ctypes.byref(code), None)
        status = result if result < 0 else code.value
        if status > 0:
            return False
        if status < 0:
            try:
                loader.check(status, "work on an OpenCL queue")
            except ExchangeError as e:
                self._error = e.with_traceback(None)
        self._complete, self._event = event, 0
        return True

    def _let_go(self) -> None:
        event, self._event, self._complete = self._event or self._complete, 0, 0
        if event and loader.alive(self._generation):
            self._driver.clReleaseEvent(event)

    def _block(self, seconds: float) -> None:
        time.sleep(min(seconds, self._pause))
        self._pause = min(self._pause * 1.5, 0.001)

    def error(self) -> BaseException | None:
        """What the commands failed with."""
        return self._error

    @property
    def handle(self) -> int:
        """The cl_event; 0 once it is complete."""
        return self._event

    def native(self) -> int:
        """The cl_event, valid as long as this Point is and not done. ExchangeError when done: there is nothing to wait for."""
        if self._poll():
            raise ExchangeError("this event is complete: there is nothing to wait for")
        return self._event

    def stream_wait(self, stream: Any) -> bool:
        """A barrier on a queue of the same cl_context: what it is given from now on comes after (clEnqueueBarrierWithWaitList).

        False on a queue of another: an event means nothing there.
        """
        if self._poll():
            return self._error is None
        queue = queue_handle(stream)
        if context_of_queue(self._driver, queue) != self.context:
            return False
        barrier(self._driver, queue, [self._event])
        return True

    def __del__(self) -> None:
        """A Point that nobody waits for any more."""
        if getattr(self, "_event", 0) or getattr(self, "_complete", 0):
            try:
                self._let_go()
            except Exception:       # not contextlib: at the very end the names of a module are None
                return

    def __repr__(self) -> str:
        return f"EventPoint({self._event:#x})" if self._event else "EventPoint(done)"


def queue_handle(stream: Any) -> int:
    """A cl_command_queue: an int, or pyopencl's object."""
    value = getattr(stream, "int_ptr", stream)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"stream {stream!r}: a pyopencl.CommandQueue, or a cl_command_queue as int")
    number = int(value.__index__())
    if not 4096 <= number < 2**64:              # no object lies on the first page: -1, and streams as CUDA numbers them
        raise ExchangeError(f"stream {number} is no cl_command_queue", "pass a pyopencl.CommandQueue")
    return number


def context_of_queue(driver: Any, queue: int) -> int:
    """Its cl_context."""
    return loader.info(driver.clGetCommandQueueInfo, queue, _QUEUE_CONTEXT, ctypes.c_void_p, "clGetCommandQueueInfo") or 0


def device_of_queue(driver: Any, queue: int) -> int:
    """Its cl_device_id."""
    return loader.info(driver.clGetCommandQueueInfo, queue, _QUEUE_DEVICE, ctypes.c_void_p, "clGetCommandQueueInfo") or 0


def is_out_of_order(driver: Any, queue: int) -> bool:
    """Whether its commands may overtake each other."""
    flags = loader.info(driver.clGetCommandQueueInfo, queue, _QUEUE_PROPERTIES, ctypes.c_uint64, "clGetCommandQueueInfo")
    return bool(flags & OUT_OF_ORDER)


def mark(driver: Any, queue: int, context: int) -> EventPoint:
    """When everything that the queue was given so far is done, in order or not (clEnqueueMarkerWithWaitList)."""
    out = ctypes.c_void_p()
    loader.check(driver.clEnqueueMarkerWithWaitList(queue, 0, None, ctypes.byref(out)), "clEnqueueMarkerWithWaitList")
    loader.check(driver.clFlush(queue), "clFlush")
    return EventPoint(out.value or 0, context, driver=driver)


def barrier(driver: Any, queue: int, events: list[int]) -> None:
    """What the queue is given from now on comes after these events, and after what it was given before."""
    loader.check(driver.clEnqueueBarrierWithWaitList(queue, *loader.wait_list(events), None), "clEnqueueBarrierWithWaitList")
    loader.check(driver.clFlush(queue), "clFlush")


def point_of(driver: Any, event: int, context: int) -> EventPoint:
    """A Point on somebody's event, which is retained; its queue is flushed, else nobody may wait for it (OpenCL, clFlush)."""
    loader.check(driver.clRetainEvent(event), "clRetainEvent")
    queue = loader.info(driver.clGetEventInfo, event, _EVENT_QUEUE, ctypes.c_void_p, "clGetEventInfo")
    if queue:                           # user events have none
        loader.check(driver.clFlush(queue), "clFlush")
    return EventPoint(event, context, driver=driver)


def context_of_event(driver: Any, event: int) -> int:
    """Its cl_context."""
    return loader.info(driver.clGetEventInfo, event, _EVENT_CONTEXT, ctypes.c_void_p, "clGetEventInfo") or 0


def parts(point: Point) -> list[Point]:
    """A Point of several as those that are not done, one by one; failed ones stay."""
    out: list[Point] = []
    for p in getattr(point, "parts", (point,)):
        out.extend(parts(p) if hasattr(p, "parts") else [] if p.done() and p.error() is None else [p])
    return out


def split(point: Point, context: int, timeout: float) -> list[int]:
    """The cl_events of this cl_context among what must be waited for; the host waits for all else, and for what failed."""
    events = []
    for p in parts(point):
        if isinstance(p, EventPoint) and p.context == context and p.handle:
            events.append(p.handle)
        else:
            p.wait(timeout)
    return events
