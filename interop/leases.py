"""Leases: access to memory for a while, with the ordering that needs at both ends. A host map is a lease.

Many readers or one writer per byte (the core's ledger decides in one step). Knows Points and the contract's map, copy, record and wait;
no framework by name.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from types import TracebackType
from typing import Any

from . import _core, points, transfer
from .errors import ExchangeError, LeaseError
from .points import READY, Point
from .registry import adapter_of, context_of

_ACCESSES = ("read", "write", "read_write")
#: What forbids a new lease of each kind.
_AGAINST = {"read": _core.WRITE_LEASE, "write": _core.WRITE_LEASE | _core.READ_LEASE, "read_write": _core.WRITE_LEASE | _core.READ_LEASE}


class _Hold:
    """What the ledger keeps of a lease: enough to name the holder, nothing that keeps the lease alive."""

    __slots__ = ("access", "lease", "thread", "what")

    def __init__(self, what: str, access: str) -> None:
        self.what, self.access, self.thread = what, access, threading.current_thread().name
        self.lease: weakref.ref[Lease] | None = None

    def __str__(self) -> str:
        return f"a {self.access} lease on {self.what}, taken in thread {self.thread!r}"


class Lease:
    """Access to memory until `release`. A context manager, also an asynchronous one, whose target is `value`.

    Attributes:
        value: what the target's framework uses: an array over the bytes, or a staged copy of them.
        access: ``"read"``, ``"write"`` or ``"read_write"``.
        after: the Point that must be reached before the bytes are used by a queue that you drive yourself; for host values it was
            waited for already.
        tensor: the Tensor that is leased.
        staged: whether `value` is a copy that `release` writes back.
    """

    __slots__ = ("__weakref__", "_adapter", "_end", "_entry", "_lock", "_place", "_stream", "_view", "access", "after", "released",
                 "staged", "tensor", "value")

    def __init__(self, tensor: Any, access: str, entry: int, after: Point) -> None:
        """Made by `acquire` and ``Tensor.map``."""
        self.tensor, self.access, self._entry, self.after = tensor, access, entry, after
        self.value: Any = None
        self.staged = False
        self.released: Point | None = None
        self._view: Any = None
        self._end: Any = None
        self._adapter: Any = None
        self._place: Any = None
        self._stream: Any = None
        self._lock = threading.Lock()

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
            return self._finish(point, failed=None)

    def _finish(self, point: Any, failed: BaseException | None) -> Point:
        end: Point = READY
        try:
            end = points.as_point(point)
            if point is None and self._adapter is not None and self._adapter.can("record"):
                end = points.as_point(self._adapter.record(self._place, self._stream))
            if self._end is not None:
                end = points.all_of([end, points.as_point(self._end(end))])
        except BaseException as e:
            end = points.Failed(e)
            raise
        finally:
            self.released = end
            self._end = None
            if self.access != "read":
                points.forget_writes(self.tensor)
            points.note(self.tensor, self.access, end)
            _core.ledger_remove(self._entry)
            if self.staged or self._view is not None:
                self._view = None
        return end

    def __enter__(self) -> Any:
        """The value."""
        if self.released is not None:
            raise LeaseError("this lease was released", "acquire another")
        return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release; an exception in flight stays the one that is raised."""
        if error is None:
            self.release()
            return
        try:
            self.release()
        except Exception as e:
            error.add_note(f"interop: releasing the lease failed too: {e!r}")

    async def __aenter__(self) -> Any:
        """The value."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release off the event loop where write-back takes time."""
        if self._end is None:
            self.__exit__(kind, error, trace)
        else:
            await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __del__(self) -> None:
        """A lease that was forgotten ends when nobody holds it."""
        if getattr(self, "released", READY) is None:
            try:
                self.release()
            except BaseException as e:
                _core.report(e)

    def __repr__(self) -> str:
        state = "open" if self.released is None else "released"
        return f"Lease({self.access}, {self.tensor!r}, {state}{', staged' if self.staged else ''})"


class Acquiring:
    """What `acquire` gives: the lease itself, at once; awaited or used with ``async with``, one that does not block the event loop."""


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
        timeout: seconds to wait while another lease forbids this one; None raises at once.

    Raises:
        LeaseError: another lease forbids it; the holder is named.
        ExchangeError: the target cannot have the memory as asked.
        ValueError: `access` is none of the three.
    """
    if access not in _ACCESSES:
        raise ValueError(f"access {access!r}: must be one of {', '.join(_ACCESSES)}")
    with _core.own_lease():     # only its metadata is read here
        t = _core.as_tensor(x)
    if t.readonly and access != "read":
        raise ExchangeError(f"read-only memory and access {access!r}", "acquire it for 'read'")
    allocation = t.allocation
    allocation.check()
    entry = _enter(t, access, timeout)
    lease = Lease(t, access, entry, READY)
    try:
        lease.after = points.pending(t, access)
        _core.ledger_object(entry).lease = weakref.ref(lease)
        _fill(lease, x, t, target, copy, stream)
    except BaseException:
        lease.released = READY      # nothing was handed out: there is nothing to write back
        _core.ledger_remove(entry)
        raise
    return lease


def map_tensor(t: Any, access: str, copy: bool | None, timeout: float | None) -> Lease:
    """``Tensor.map``."""
    return acquire(t, "numpy", access, copy=copy, timeout=timeout)


def _enter(t: Any, access: str, timeout: float | None) -> int:
    space, lo, hi = _core.byte_span(t)
    kind = _core.READ_LEASE if access == "read" else _core.WRITE_LEASE
    hold = _Hold(f"{t.dtype}{list(t.shape)} on {t.device}", access)
    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.0002
    while True:
        entry = int(_core.ledger_add(space, lo, hi, kind, hold, _AGAINST[access] if hi > lo else 0))
        if entry:
            return entry
        if end is None or time.monotonic() >= end:
            others = _core.ledger_find(space, lo, hi, _AGAINST[access])
            if not others:
                continue
            conflict(others[0][2])
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)


def _fill(lease: Lease, x: Any, t: Any, target: Any, copy: bool | None, stream: Any) -> None:
    """Give the lease its value: aliased where the target reaches the memory, else mapped, else staged."""
    read_only = lease.access == "read"
    adapter, place = context_of(target)
    if adapter is not None and _reaches(adapter, place, t):
        # The target runs queues of its own over this very memory: order them, or leave `after` to whoever drives them
        lease._adapter, lease._place, lease._stream = adapter, place, stream
        if adapter.can("wait") and not lease.after.done():
            adapter.wait(place, stream, lease.after)
        lease.value = t if not read_only or t.readonly else _core.as_tensor(t, readonly=True)
        return
    _wait_on_host(lease)
    host = _core.is_host(t)
    if host and copy is not True:
        with _core.own_lease():
            try:
                lease.value = _core.to(t, target, copy=False, readonly=True if read_only else None)
                return
            except ExchangeError:
                if copy is False:
                    raise
    _stage(lease, t, target, copy, host)


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
            raise ExchangeError(f"the last write to this memory failed: {e!r}", "write it again") from e


def _stage(lease: Lease, t: Any, target: Any, copy: bool | None, host: bool) -> None:
    adapter = None if host else t.allocation.adapter or adapter_of(t.device)
    if not host and copy is not True and adapter is not None and adapter.can("map"):
        mapped = transfer.map_in_place(adapter, t, lease.access)
        if mapped is not None:
            view, lease._end = mapped
            with _core.own_lease():
                lease.value = _core.to(view, target, copy=False, readonly=True if lease.access == "read" else None)
            return
    if copy is False:
        raise ExchangeError(f"memory on {t.device} cannot be reached by {target!r} in place" if not host else
                            f"{target!r} cannot use this memory in place", "copy=None stages it through host memory")
    staging = transfer.stage(t, fetch=lease.access != "write", target=str(target))
    with _core.own_lease():
        lease.value = _core.to(staging, target, copy=False, readonly=True if lease.access == "read" else None)
    lease.staged = True
    if lease.access != "read":
        lease._end = lambda point: transfer.write_back(t, staging, point)
