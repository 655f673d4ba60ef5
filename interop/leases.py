"""Leases: access to memory for a while, with the ordering that needs at both ends. A host map is a lease.

Many readers or one writer per byte (the core's ledger decides in one step). Knows Points and the contract's map, copy, record and wait;
no framework by name.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _core, memory, points, transfer
from .errors import ExchangeError, LeaseError
from .points import READY, Point
from .registry import adapter_of, context_of

_ACCESSES = ("read", "write", "read_write")
#: What forbids a new lease of each kind.
_AGAINST = {"read": _core.WRITE_LEASE, "write": _core.WRITE_LEASE | _core.READ_LEASE, "read_write": _core.WRITE_LEASE | _core.READ_LEASE}


class _Hold:
    """What the ledger keeps of a lease: enough to name the holder, nothing that keeps the lease alive."""

    __slots__ = ("access", "thread", "what")

    def __init__(self, what: str, access: str) -> None:
        self.what, self.access, self.thread = what, access, threading.current_thread().name

    def __str__(self) -> str:
        return f"a {self.access} lease on {self.what}, taken in thread {self.thread!r}"


class Lease:
    """Access to memory until `release`. A context manager, also an asynchronous one, whose target is `value`.

    Attributes:
        access: ``"read"``, ``"write"`` or ``"read_write"``.
        after: the Point that must be reached before the bytes are used by a queue that you drive yourself; for host values it was
            waited for already.
        tensor: the Tensor that is leased.
        staged: whether `value` is a copy that `release` writes back.
    """

    __slots__ = ("__weakref__", "_adapter", "_back", "_broken", "_end", "_entry", "_generation", "_lock", "_make", "_place", "_stream",
                 "_timeout", "_value",
                 "access", "after", "released", "staged", "tensor")

    def __init__(self, tensor: Any, access: str) -> None:
        """Made by `acquire` and ``Tensor.map``."""
        self.tensor, self.access = tensor, access
        self.after: Point = READY
        self.staged = False
        self.released: Point | None = READY     # until it is held
        self._entry = 0
        self._broken = False       # the block that was to write ended with an error
        self._generation = _core.generation()
        self._value: Any = None
        self._make: Callable[[], Any] | None = None     # what still has to be done for the value; may block
        self._end: Callable[[Point], Any] | None = None
        self._adapter: Any = None
        self._place: Any = None
        self._stream: Any = None
        self._back: Any = None      # the stream of the framework whose memory it is: it goes on after the lease
        self._timeout: tuple[float, Callable[[], None]] | None = None
        self._lock = threading.RLock()

    @property
    def value(self) -> Any:
        """What the target's framework uses: an array over the bytes, or a staged copy of them. Waits, the first time, for `after`.

        After `release` it is still there, stale perhaps and never dangling.
        """
        if self._timeout is not None:
            raise LeaseError("this lease is not held yet: another one forbids it", "async with waits for it on the event loop")
        if self._generation != _core.generation():
            raise ExchangeError("this lease was taken before fork: it is the parent's", "acquire another in the child")
        if self._make is not None:
            with self._lock:
                make, self._make = self._make, None
                if make is not None:
                    try:
                        self._value = make()
                    except BaseException:
                        self._abandon()
                        raise
        return self._value

    def _abandon(self) -> None:
        # Nothing was handed out: nothing to write back, nothing to order
        self.released, self._end, self._make = READY, None, None
        _core.ledger_remove(self._entry)

    def release(self, point: Any = None) -> Point:
        """End the access and say when it is over.

        Args:
            point: when the work that was given the value ends: a Point or anything with done() and wait(). None: what the target's
                stream has been given so far, or now where the target is the host.

        Returns that Point. Idempotent: the second call returns the first one's.
        """
        with self._lock:
            if self.released is not None:
                return self.released
            if self._timeout is not None:
                self._timeout = None       # never held
                self.released = READY
                return READY
            if self._generation != _core.generation():
                self.released = READY      # the parent's: its driver, its write-back, its ledger
                return READY
            end = points.as_point(point)   # a mistake ends nothing
            if self._make is not None and point is None:
                self._abandon()            # never looked at
                return READY
            self._make = None
            return self._finish(end, point is None)

    def _finish(self, end: Point, ask: bool) -> Point:
        finish, self._end = self._end, None
        try:
            try:
                if ask and self._adapter is not None and self._adapter.can("record"):
                    end = self._end_of_work()
            finally:
                if finish is not None and not end.done():
                    end = points.After(end, finish)        # the writer is still at work: write back when it has finished
                elif finish is not None:
                    finish(end)
        except BaseException as e:
            end = points.Failed(points.without_frames(e))
            raise
        finally:
            self.released = end
            try:
                points.note(self.tensor, self.access, end)
                if self.access != "read" and not self._broken and end.done() and end.error() is None:
                    points.rewritten(self.tensor)
            finally:
                _core.ledger_remove(self._entry)
        return end

    def _end_of_work(self) -> Point:
        """When what the target's streams were given is done: the one that was current when the lease began, and the one that is now."""
        if not callable(self._stream):
            return points.as_point(self._adapter.record(self._place, self._stream))
        streams = [s for s in dict.fromkeys(self._stream()) if s != -1]      # -1: the caller orders
        end = points.all_of([points.as_point(self._adapter.record(self._place, s)) for s in streams])
        if self._back is not None and streams != [self._back] and not end.done():
            self._adapter.wait(self._place, self._back, end)       # the framework whose memory it is goes on after the lease
        return end

    def __enter__(self) -> Any:
        """The value."""
        if self._timeout is not None:
            raise LeaseError("this lease is not held yet: another one forbids it", "async with waits for it on the event loop")
        if self.released is not None:
            raise LeaseError("this lease was released", "acquire another")
        return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release; an exception in flight stays the one that is raised."""
        if error is None:
            self.release()
            return
        self._broken = True
        try:
            self.release()
        except Exception as e:
            error.add_note(f"interop: releasing the lease failed too: {e!r}")

    async def __aenter__(self) -> Any:
        """The value; the event loop goes on while it is waited for."""
        import asyncio  # heavy, and whoever is here has it already

        if self._timeout is not None:
            await self._enter_later()
        if self._make is not None:
            try:
                await self.after
            except asyncio.CancelledError:
                self.release()
                raise
            except Exception as e:
                if self.access != "write":
                    self._abandon()
                    raise points.failed_write(e) from e
            await asyncio.to_thread(lambda: self.value)
        return self.__enter__()

    async def _enter_later(self) -> None:
        import asyncio

        seconds, enter = self._timeout or (0.0, lambda: None)
        self._timeout = None
        end = time.monotonic() + seconds
        while True:
            try:
                enter()
                return
            except LeaseError:
                if time.monotonic() >= end:
                    self.released = READY
                    raise
            await asyncio.sleep(0.002)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release off the event loop where write-back takes time."""
        if self._end is None:
            self.__exit__(kind, error, trace)
        else:
            import asyncio

            await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __del__(self) -> None:
        """A lease that was forgotten ends when nobody holds it."""
        if getattr(self, "released", READY) is None and not sys.is_finalizing():
            try:
                self.release()
            except BaseException as e:
                _core.report(e)

    def __repr__(self) -> str:
        state = "open" if self.released is None else "released"
        return f"Lease({self.access}, {self.tensor!r}, {state}{', staged' if self.staged else ''})"


def conflict(hold: Any) -> None:
    """Raise for a lease that stands in the way."""
    raise LeaseError(f"{hold} forbids this access", "release it first, or wait for it with timeout=")


def acquire(x: Any, target: Any, access: str, *, copy: bool | None = None, stream: Any = None, timeout: float | None = None) -> Lease:
    """Access to the memory of `x` in the form that `target` uses, until the lease ends.

    Args:
        x: anything that `as_tensor` takes.
        target: a framework or type (the value is its array), or a place (the value is a Tensor there).
        access: ``"read"``, ``"write"`` (the old contents are not fetched: fill it) or ``"read_write"``.
        copy: False refuses a staged copy, True forces one, None stages where the target cannot reach the memory.
        stream: of the target, on which the value will be used.
        timeout: seconds to wait while another lease forbids this one; None raises at once. Under a running event loop it is waited in
            ``async with``, not here.

    The bytes are leased, and what can be refused without touching the memory is, before this returns; what takes time (pending work,
    mapping, fetching) happens when `Lease.value` is first looked at, in ``with``, or without blocking the event loop in ``async with``.
    Whether memory can be mapped in place, only mapping it tells: with ``copy=False`` that refusal comes then.

    Raises:
        LeaseError: another lease forbids it; the holder is named.
        ExchangeError: the target cannot have the memory as asked.
        ValueError: `access` is none of the three.
    """
    if access not in _ACCESSES:
        raise ValueError(f"access {access!r}: must be one of {', '.join(_ACCESSES)}")
    if copy is not None and copy is not True and copy is not False:
        raise TypeError(f"copy {copy!r}: must be True, False or None")
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout {timeout!r}: seconds, not negative")
    _core.known_target(target)
    with _core.own_lease():     # only its metadata is read here
        t = _core.view_of(x)
    if t.readonly and access != "read":
        raise ExchangeError(f"read-only memory and access {access!r}", "acquire it for 'read'")
    t.allocation.check()
    lease = Lease(t, access)

    def enter() -> None:
        _enter(lease, t, access)
        try:
            t.allocation.check()        # again: now that it is leased nobody closes it
            lease.after = points.pending(t, access)
            _prepare(lease, t, target, copy, stream)
        except BaseException:
            lease._abandon()
            raise

    if timeout is not None and _in_event_loop():
        lease._timeout = (timeout, enter)
        try:
            enter()
            lease._timeout = None
        except LeaseError:
            if timeout <= 0:
                raise
        return lease
    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.0002
    while True:
        try:
            enter()
            return lease
        except LeaseError:
            if end is None or time.monotonic() >= end:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)


def map_tensor(t: Any, access: str, copy: bool | None, timeout: float | None) -> Lease:
    """``Tensor.map``."""
    return acquire(t, "numpy", access, copy=copy, timeout=timeout)


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _enter(lease: Lease, t: Any, access: str) -> None:
    space, lo, hi = _core.byte_span(t)
    a = t.allocation
    if a.atom > 1 and hi > lo:
        # what is flushed or fetched for these bytes carries their neighbours along; atoms count from the start of the memory object,
        # which is where the numbers of its root begin (and a page)
        lo, hi = lo // a.atom * a.atom, -(-hi // a.atom) * a.atom
    hold = _Hold(f"{t.dtype}{list(t.shape)} on {t.device}", access)
    against = _AGAINST[access] if hi > lo else 0
    while True:
        entry = int(_core.ledger_add(space, lo, hi, _core.READ_LEASE if access == "read" else _core.WRITE_LEASE, hold, against))
        if entry:
            lease._entry = entry
            lease.released = None
            return
        others = _core.ledger_find(space, lo, hi, against)
        if others:                  # else released between the two calls
            conflict(others[0][2])


def _prepare(lease: Lease, t: Any, target: Any, copy: bool | None, stream: Any) -> None:
    """Decide how the target gets the memory: aliased where it reaches it, else mapped, else staged; raise what is refused."""
    error = lease.after.error() if lease.after.done() else None
    if error is not None and lease.access != "write":
        raise points.failed_write(error) from error
    adapter, place = context_of(target)
    readonly = lease.access == "read"
    queue = target if adapter is not None and place is not None and place is not target and hasattr(place, "adapter") else None
    if queue is not None and copy is not True and _core.is_host(t):
        t = _shown(adapter, place, t)
    if queue is not None and copy is not True and _reaches(adapter, place, t):
        _on_queue(lease, t, adapter, place, queue, stream)
        return
    if adapter is not None and copy is not True and _reaches(adapter, place, t):
        # The target drives queues of its own over this very memory: a stream that was named is made to wait, else `after` says it
        lease._adapter, lease._place, lease._stream = adapter, place, stream
        if stream is not None and adapter.can("wait") and not lease.after.done() and not adapter.wait(place, stream, lease.after):
            lease.after.wait(points.HOST_TIMEOUT)
        if place is None:
            with _core.own_lease():
                lease._value = _core.to(t, target, copy=False, readonly=readonly)
            if adapter.can("queue_of"):         # its object says where it is used
                lease._place = t.allocation.context
                lease._stream = adapter.queue_of(lease._value) if stream is None else stream
        else:
            lease._value = t if not readonly or t.readonly else _core.as_tensor(t, readonly=True)
        return
    if adapter is not None and place is not None:
        if copy is False:
            raise ExchangeError(f"memory on {t.device} is not that of {place!r}", "copy=None copies it there and back")

        def there(staging: Any) -> Any:
            if queue is None:
                return staging
            lease._adapter, lease._place, lease._stream = adapter, place, queue
            with _core.own_lease():
                return _core.to(staging, target, copy=False, readonly=readonly)

        _hand_out(lease, lambda: _staged(lease, t, lambda: transfer.stage_at(t, place, lease.access), there), now=False)
        return

    if place is not None and place.name != "cpu":
        raise ExchangeError(f"memory on {t.device} is not that of {place}, and no adapter here reaches it",
                            "a framework that uses the device can: interop.to(x, 'torch', device=...)")
    if place is None and copy is not True and _on_its_stream(lease, t, target, copy, stream):
        return
    if _core.is_host(t):
        _core.check_stream(stream, t)

    def give(view: Any) -> Any:
        with _core.own_lease():
            return _core.to(view, target, copy=False, readonly=readonly)

    reason = "copy=True was asked for" if copy is True else f"{target} cannot use memory on {t.device} in place"
    if _core.is_host(t) and copy is not True:
        try:
            value = give(t)
        except ExchangeError as e:
            reason = e.reason
            if copy is False or (lease.access != "read" and _never_writes(target)):
                raise
        else:
            _hand_out(lease, lambda: value)
            return
    owner = None if _core.is_host(t) else t.allocation.adapter or adapter_of(t.device)
    if owner is not None and owner.can("map") and copy is not True and t.size:
        _hand_out(lease, lambda: _mapped(lease, owner, t, copy, give), now=False)
    elif copy is False and t.size:
        raise ExchangeError(f"memory on {t.device} cannot be reached by {target!r} in place", "copy=None stages it through host memory")
    else:
        _hand_out(lease, lambda: _staged(lease, t, lambda: transfer.stage(t, lease.access, str(target), reason), give), now=False)


def _shown(adapter: Any, place: Any, t: Any) -> Any:
    """Host memory as the place sees the very same bytes; `t` itself where it cannot, and is staged."""
    if not t.size or not adapter.can("import_handle") or not memory.importable("host", place).supported:
        return t
    try:
        return memory.import_pages(t, place)
    except ExchangeError:
        return t


def _on_queue(lease: Lease, t: Any, adapter: Any, place: Any, queue: Any, stream: Any) -> None:
    """A framework's own queue object as the target: its object over the memory, used on that queue, which waits at both ends."""
    queue = queue if stream is None else stream
    lease._adapter, lease._place, lease._stream = adapter, place, queue
    if not lease.after.done() and not (adapter.can("wait") and adapter.wait(place, queue, lease.after)):
        lease.after.wait(points.HOST_TIMEOUT)
    with _core.own_lease():
        lease._value = _core.to(t, queue, copy=False, readonly=lease.access == "read")


def _on_its_stream(lease: Lease, t: Any, target: Any, copy: bool | None, stream: Any) -> bool:
    """A framework that uses the device's memory itself: its stream waits at both ends, the host does not. False: it is none.

    Of a framework whose stream nobody knows (jax) the host waits before, and whoever releases has to know that it is done.
    """
    if _core.is_host(t):
        home = memory.home_of(target)
        if home is None:
            return False
        t = memory.import_pages(t, home)
    adapter = adapter_of(t.device)
    if adapter is None or not adapter.can("record") or not _core.accepts_device(target, t.device):
        return False

    def now() -> Any:
        return _core.target_stream(target, t.device) if stream is None else _core.stream_of(stream, t.device)

    def give(view: Any) -> Any:
        with _core.own_lease():
            return _core.to(view, target, copy=False, readonly=lease.access == "read", stream=stream)

    here = now()
    try:
        value = give(t)
    except ExchangeError as e:
        if copy is False:
            raise
        reason = e.reason
        _hand_out(lease, lambda: _staged(lease, t, lambda: transfer.stage_at(t, t.device, lease.access, reason), give), now=False)
        return True
    if here is None:
        _hand_out(lease, lambda: value)
        return True
    lease._value = value
    if not lease.after.done() and here != -1 and not (adapter.can("wait") and adapter.wait(t.device, here, lease.after)):
        lease.after.wait(points.HOST_TIMEOUT)
    lease._adapter, lease._place, lease._stream = adapter, t.device, lambda: (here, now())
    pending = _core.pending_stream(t)
    lease._back = pending if pending != -1 and adapter.can("wait") else None
    return True


def _never_writes(target: Any) -> bool:
    try:
        with _core.own_lease():
            _core.to(_core.host_tensor((1,), "uint8"), target, copy=False, readonly=False)
    except ExchangeError:
        return True
    return False


def _hand_out(lease: Lease, make: Callable[[], Any], now: bool = True) -> None:
    if now and lease.after.done() and lease.after.error() is None:
        lease._value = make()
        return

    def waited() -> Any:
        _wait_on_host(lease)
        return make()

    lease._make = waited


def _reaches(adapter: Any, place: Any, t: Any) -> bool:
    allocation = t.allocation
    return allocation.adapter is adapter and (place is None or allocation.context is place or place == t.device)


def _wait_on_host(lease: Lease) -> None:
    try:
        lease.after.wait(points.HOST_TIMEOUT)
    except TimeoutError:
        raise
    except Exception as e:
        if lease.access != "write":
            raise points.failed_write(e) from e


def _mapped(lease: Lease, owner: Any, t: Any, copy: bool | None, give: Callable[[Any], Any]) -> Any:
    mapped = transfer.map_in_place(owner, t, lease.access)
    if mapped is not None:
        view, end = mapped
        try:
            value = give(view)
        except BaseException as e:
            end(READY)
            if not isinstance(e, ExchangeError) or copy is False:
                raise
        else:
            lease._end = end
            return value
    if copy is False:
        raise ExchangeError(f"memory on {t.device} cannot be mapped so that views survive, and copy=False forbids staging", "copy=None")
    return _staged(lease, t, lambda: transfer.stage(t, lease.access, "the host", "a view could outlive the map"), give)


def _staged(lease: Lease, t: Any, make: Callable[[], Any], give: Callable[[Any], Any]) -> Any:
    staging = make()
    value = give(staging)
    lease.staged = True
    if lease.access != "read":
        lease._end = lambda point: transfer.write_back(t, staging, point)
    return value
