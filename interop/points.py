"""Points: when is it ready. A Point has ``done()`` and ``wait(timeout)``, and where the API can, a native form that a queue waits for.

Knows no framework and no adapter by name: an adapter is asked through its contract (`wait`, `record`).
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from . import _core
from .errors import DeviceLostError, ExchangeError

#: Longest that interop itself waits on the host for somebody's queue before it says so, in seconds.
HOST_TIMEOUT = 60.0
#: A wait is cut into slices of this many seconds, between which signals such as Ctrl-C get in.
_SLICE = 0.1


class Point:
    """A moment after which work is finished: done, being waited for, or failed.

    Subclasses give `_poll` and, where waiting beats polling, `_block`. Everything else follows. A Point belongs to no thread.
    """

    __slots__ = ("__weakref__", "_keep")
    _keep: Any

    def _poll(self) -> bool:
        raise TypeError(f"{type(self).__qualname__} is a Point and lacks _poll()")

    def _block(self, seconds: float) -> None:
        """Wait at most so long, without holding the GIL; returning early is fine."""
        time.sleep(min(seconds, 0.0005))

    def done(self) -> bool:
        """Whether the work has finished. Never blocks. A failed Point is done."""
        return self._poll()

    def wait(self, timeout: float | None = None) -> None:
        """Return once the work has finished.

        Args:
            timeout: seconds; None waits for ever. Ctrl-C gets in either way.

        Raises:
            TimeoutError: it did not finish in time.
            The error that the work failed with.
        """
        if not self._poll():
            self._wait(timeout)
        error = self.error()
        if error is not None:
            raise without_frames(error)

    def _wait(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._poll():
            left = _SLICE if end is None else end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self!r} was not reached within {timeout} s")
            self._block(min(left, _SLICE))

    def error(self) -> BaseException | None:
        """What the work failed with, once it is done; None where it did not."""
        return None

    def native(self) -> Any:
        """The API's own form (a list of (VkSemaphore, value), a cl_event, a CUDA event). ExchangeError where there is none."""
        raise ExchangeError(f"{self!r} has no native form", "wait for it on the host: point.wait()")

    def stream_wait(self, stream: Any) -> bool:
        """Make `stream` wait for this Point without blocking the host. False: this Point cannot; wait on the host."""
        return self._poll()

    def add_done_callback(self, callback: Callable[[Point], Any]) -> None:
        """Call ``callback(self)`` once, when done: at once where it is, else from a thread of interop's. Its errors are reported."""
        if self._poll():
            _call(callback, self)
        else:
            _watcher.watch(self, callback)

    def __await__(self) -> Generator[Any, None, None]:
        """``await point``: the event loop goes on meanwhile."""
        if not self._poll():
            import asyncio  # heavy, and whoever awaits has it already

            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake(_: Point) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                    loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

            self.add_done_callback(wake)
            yield from future
        error = self.error()
        if error is not None:
            raise without_frames(error)


class Ready(Point):
    """Nothing to wait for."""

    __slots__ = ()

    def _poll(self) -> bool:
        return True

    def native(self) -> Any:
        """An empty list: there is nothing that a submit would have to wait for."""
        return []

    def __repr__(self) -> str:
        return "Ready()"


class Failed(Point):
    """Work that ended with an error: whoever waits for it gets that error."""

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        """Keep the error."""
        self._error = error

    def _poll(self) -> bool:
        return True

    def error(self) -> BaseException | None:
        """The error."""
        return self._error

    def __repr__(self) -> str:
        return f"Failed({self._error!r})"


class Foreign(Point):
    """A Point from two functions, for any kind of fence: see `point`."""

    __slots__ = ("_done", "_error", "_finished", "_native", "_stream_wait", "_wait_function")

    def __init__(self, done: Callable[[], bool], wait: Callable[..., Any] | None, native: Any,
                 stream_wait: Callable[[Any], bool] | None) -> None:
        """Use `point`."""
        self._done = done
        self._wait_function = wait
        self._native = native
        self._stream_wait = stream_wait
        self._finished = False
        self._error: BaseException | None = None

    def _poll(self) -> bool:
        if not self._finished:
            try:
                self._finished = bool(self._done())
            except Exception as e:  # a fence that cannot be asked any more (device lost) never will be done otherwise
                # without its frames: what they hold, tensors among it, would live as long as the ledger keeps this
                self._error, self._finished = e.with_traceback(None), True
            if self._finished:
                # what the functions hold (a fence, a device) is not needed any more
                self._done = _yes
                self._wait_function = self._stream_wait = None
        return self._finished

    def _block(self, seconds: float) -> None:
        wait = self._wait_function
        if wait is None:
            super()._block(seconds)
            return
        try:
            wait(seconds)
        except TimeoutError:
            pass
        except Exception as e:
            self._error, self._finished = e.with_traceback(None), True

    def error(self) -> BaseException | None:
        """What done() or wait() raised."""
        return self._error

    def native(self) -> Any:
        """What was given as `native`, called where it is a function."""
        if self._native is None:
            return super().native()
        return self._native() if callable(self._native) else self._native

    def stream_wait(self, stream: Any) -> bool:
        """Through the function given, where there is one."""
        if self._poll():
            return True
        function = self._stream_wait
        return function is not None and bool(function(stream))

    def __repr__(self) -> str:
        return f"Point({'done' if self._finished else 'pending'})"


class All(Point):
    """Done when all of its parts are; fails with the first error among them."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Point]) -> None:
        """Keep the parts."""
        self.parts: tuple[Point, ...] = tuple(parts)

    def _poll(self) -> bool:
        return all(p.done() for p in self.parts)

    def _block(self, seconds: float) -> None:
        for p in self.parts:
            if not p.done():
                p._block(seconds)
                return

    def error(self) -> BaseException | None:
        """The first error."""
        return next((e for p in self.parts if p.done() and (e := p.error()) is not None), None)

    def native(self) -> Any:
        """The native forms of the parts that are not done, one list: what a submit waits for."""
        out: list[Any] = []
        for p in self.parts:
            if not p.done():
                form = p.native()
                out.extend(form if isinstance(form, list) else [form])
        return out

    def stream_wait(self, stream: Any) -> bool:
        """Of all parts; False where one cannot, though others may already be waited for."""
        return all([p.stream_wait(stream) for p in self.parts])

    def __repr__(self) -> str:
        return f"All({', '.join(map(repr, self.parts))})"


READY = Ready()


def point(*, done: Callable[[], bool], wait: Callable[..., Any] | None = None, native: Any = None,
          stream_wait: Callable[[Any], bool] | None = None) -> Point:
    """A Point from an API's own fence.

    Args:
        done: says whether it has signalled; never blocks. What it raises becomes the Point's error.
        wait: blocks at most the seconds it is given, without the GIL; None: `done` is polled.
        native: the API's form, or a function that gives it.
        stream_wait: makes a stream of the API wait and returns True, or returns False.
    """
    if not callable(done) or (wait is not None and not callable(wait)):
        raise TypeError("point() takes two functions, done() and wait(seconds)")
    return Foreign(done, wait, native, stream_wait)


def all_of(points: Iterable[Point]) -> Point:
    """One Point for several; parts that are done and did not fail are left out."""
    parts = [p for p in points if not (p.done() and p.error() is None)]
    if not parts:
        return READY
    return parts[0] if len(parts) == 1 else All(parts)


def as_point(x: Any) -> Point:
    """A Point as it is; None: ready; anything with ``done()`` and ``wait(timeout)``: made one."""
    if x is None:
        return READY
    if isinstance(x, Point):
        return x
    done, wait = getattr(x, "done", None), getattr(x, "wait", None)
    if callable(done) and callable(wait):
        return point(done=done, wait=wait)
    raise TypeError(f"{x!r} is no Point: it needs done() and wait(timeout)")


def _yes() -> bool:
    return True


def _call(callback: Callable[[Point], Any], p: Point) -> None:
    try:
        callback(p)
    except BaseException as e:  # also SystemExit: the thread that calls serves everybody
        _core.report(e)


def _is_over(p: Point) -> bool:
    try:
        return p.done()
    except BaseException as e:  # a Point that cannot be asked: nobody will ever hear more of it
        _core.report(e)
        return True


class _Watcher:
    """One thread that looks at the Points with callbacks; in a forked child, a new one.

    It is fed through a queue whose `put` may interrupt itself: a collection in the midst of one may end an allocation, which waits for a
    Point too.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Point, Callable[[Point], Any]]] = queue.SimpleQueue()
        self._started = False
        self._generation = _core.generation()

    def watch(self, p: Point, callback: Callable[[Point], Any]) -> None:
        if self._generation != _core.generation():  # the parent's thread is not here, and its Points are not ours
            self.__init__()  # type: ignore[misc]
        self._queue.put((p, callback))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="interop-points", daemon=True).start()

    def _run(self) -> None:
        waiting: list[tuple[Point, Callable[[Point], Any]]] = []
        pause = 0.0002
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            while not self._queue.empty():
                waiting.append(self._queue.get())
            finished = [i for i in waiting if _is_over(i[0])]
            if finished:
                waiting = [i for i in waiting if i not in finished]
                while finished:
                    p, callback = finished.pop(0)
                    _call(callback, p)
                    del p, callback
                pause = 0.0002
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005)


_watcher = _Watcher()


# ---- last write and last reads, which the core's ledger keeps by bytes ----
def pending(tensor: Any, access: str) -> Point:
    """What must be over before `tensor` is accessed so: reading waits for writes, writing for writes and reads."""
    kinds = _core.WRITE_POINT if access == "read" else _core.WRITE_POINT | _core.READ_POINT
    span = _core.byte_span(tensor)
    prune(_core.ledger_find(*span, kinds))
    found = _core.ledger_find(*span, kinds)
    return all_of(p for _, kind, p in found if kind & _core.WRITE_POINT or not p.done())


def note(tensor: Any, access: str, p: Point) -> None:
    """`p` is when the access to `tensor` ends. A write takes the place of what it was ordered after on the same bytes."""
    if p.done() and (p.error() is None or access == "read"):      # a reader that failed has harmed nobody
        return
    if not _core.has_allocation(tensor):
        keep_until(p, tensor)
        if p.done():
            return
    space, lo, hi = _core.byte_span(tensor)
    if access == "read":
        prune(_core.ledger_find(space, lo, hi, _core.READ_POINT))
        _core.ledger_add(space, lo, hi, _core.READ_POINT, p)
    else:
        prune(_core.ledger_find(space, lo, hi, _core.READ_POINT | _core.WRITE_POINT))
        _core.ledger_add(space, lo, hi, _core.WRITE_POINT | (_core.DENSE if _is_dense(tensor, lo, hi) else 0), p)
    if p.done() and p.error() is None and not _core.has_allocation(tensor):
        _core.ledger_strike(p, _make_good)      # it ended meanwhile, and what strikes it out then has looked already


def prune(entries: list[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Strike out entries whose Point is done and did not fail, or whose failure has been overwritten; the others."""
    for id, _, p in entries:
        if p.done() and p.error() is None:
            p._keep = None
            _core.ledger_strike(p, _make_good, id)
    return [e for e in entries if not (e[2].done() and e[2].error() is None) and _core.ledger_bounds(e[0]) is not None]


def rewritten(tensor: Any) -> None:
    """The bytes of `tensor` have been written: earlier failures on them are made good, on these and on no others."""
    space, lo, hi = _core.byte_span(tensor)
    if _is_dense(tensor, lo, hi):
        _make_good(space, lo, hi, None)


def _is_dense(tensor: Any, lo: int, hi: int) -> bool:
    return bool(tensor.is_contiguous() or hi - lo == tensor.nbytes)      # else nothing was written between the elements


def _make_good(space: int, lo: int, hi: int, before: int | None) -> None:
    for id, _, old in _core.ledger_find(space, lo, hi, _core.WRITE_POINT):
        bounds = _core.ledger_bounds(id)
        if not old.done() or bounds is None or (before is not None and id >= before):
            continue
        _core.ledger_remove(id)
        for start, end in ((bounds[1], min(lo, bounds[2])), (max(hi, bounds[1]), bounds[2])):
            if start < end:
                _core.ledger_add(space, start, end, bounds[3], old)


def keep_until(p: Point, *memory: Any) -> None:
    """Hold memory of others, which queued work uses, until `p` is done; then the ledger forgets it.

    Also where it failed: nobody says when such memory goes, and its address would be the next one's. `p` itself tells the error.
    """
    if memory and not p.done():
        p._keep = (*(getattr(p, "_keep", None) or ()), *memory)
        p.add_done_callback(_let_go)


def _let_go(p: Point) -> None:
    p._keep = None
    _core.ledger_strike(p, None if p.error() is not None else _make_good)


class After(Point):
    """Done when another Point is and a function has then run, on a thread of interop's; fails with either's error."""

    __slots__ = ("_done", "_error", "_first", "_function")

    def __init__(self, first: Point, function: Callable[[Point], Any]) -> None:
        """Starts waiting at once."""
        self._first: Point | None = first
        self._function: Callable[[Point], Any] | None = function
        self._done = threading.Event()
        self._error: BaseException | None = None
        first.add_done_callback(self._run)

    def _run(self, first: Point) -> None:
        function, self._function = self._function, None
        try:
            self._error = first.error()
            if function is not None:
                function(first)
        except BaseException as e:
            self._error = without_frames(e)
        finally:
            self._first = None
            self._done.set()

    def _poll(self) -> bool:
        return self._done.is_set()

    def _block(self, seconds: float) -> None:
        self._done.wait(seconds)

    def error(self) -> BaseException | None:
        """What went wrong first."""
        return self._error if self._done.is_set() else None

    def __repr__(self) -> str:
        return f"After({'done' if self._done.is_set() else 'pending'})"


def without_frames(e: BaseException) -> BaseException:
    """The same error without its traceback, whose frames would keep the memory that failed."""
    try:
        out = copy.copy(e)
    except Exception:
        out = ExchangeError(repr(e))
    out.__traceback__ = None
    out.__context__ = out.__cause__ = None
    return out


def failed_write(e: BaseException) -> Exception:
    """What whoever asks for memory is told whose last write failed with `e`. A device that is lost stays one: nothing writes it again."""
    if isinstance(e, DeviceLostError):
        return type(e)(f"the last write to this memory was lost with its device: {e}")
    return ExchangeError(f"the last write to this memory failed: {e!r}", "write it again")


def check_queue(allocation: Any, device: Any, stream: int) -> None:
    """Called by the core for ``__dlpack__(stream=)`` on a device without numbered streams: ExchangeError where it names no queue of the
    Context whose memory it is.
    """
    context = None if allocation is None else allocation.context
    if context is None or not context.adapter.can("wait"):
        raise ExchangeError(f"stream {stream}: memory on {device} has no streams that interop knows", "pass None or -1")
    context.adapter.wait(context, stream, READY)


def make_ready(entries: list[tuple[int, int, Any]], device: Any, stream: Any, allocation: Any = None) -> None:
    """Called by the core when memory with pending writes leaves: ordered on `stream` where that works, else the host waits."""
    if stream is not None and isinstance(stream, int) and stream == -1:
        return

    def ordered(p: Point) -> bool:
        if stream is None:
            return False
        context = None if allocation is None else allocation.context
        if context is not None and context.adapter.can("wait"):
            return bool(context.adapter.wait(context, stream, p))      # a Point of another API would take the queue for a stream of its own
        return p.stream_wait(stream)

    for _, _, p in entries:
        if not p.done() and not ordered(p):
            try:
                p.wait(HOST_TIMEOUT)
            except TimeoutError:
                raise TimeoutError(f"the last write to this memory on {device} was not finished within {HOST_TIMEOUT} s") from None
            except Exception as e:
                if not p.done():
                    raise failed_write(e) from e
    for _, _, p in prune(entries):      # a later write that is done makes good what failed before it
        error = p.error() if p.done() else None
        if error is not None:
            raise failed_write(error) from error
