"""Copies: the one visible way between memories that cannot be shared, and the staging of maps. Knows leases' bytes, not leases."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from . import _core, points, routing
from .contract import Mapped
from .errors import ExchangeError, LeaseError
from .points import READY, Point
from .registry import adapter_of

#: Below this many bytes a second thread costs more than it brings (measured: `python -m interop bench copyto`).
PARALLEL_FROM = 8 << 20
_pool: ThreadPoolExecutor | None = None
_pool_generation = 0


def copyto(dst: Any, src: Any, /, *, stream: Any = None, progress: Callable[[int, int], Any] | None = None) -> Point:
    """Copy the elements of `src` into `dst`: same shape and dtype, any strides, any two memories that an adapter or the host connects.

    Args:
        dst: written in place; anything that `as_tensor` takes, not read-only.
        src: the source. Overlap with `dst` is fine on the host.
        stream: the queue or stream to copy on, where a device is involved.
        progress: called as ``progress(bytes_done, bytes_in_all)`` on this thread, for host copies of several blocks.

    Returns the Point at which the copy is complete; host copies are complete when this returns.

    Raises:
        ValueError: shapes or dtypes differ. ExchangeError: read-only destination, or nobody can copy between the two. LeaseError.
    """
    with _core.own_lease():
        to, source = _core.view_of(dst), _core.view_of(src)
    if to.shape != source.shape:
        raise ValueError(f"shape {source.shape} does not fit into {to.shape}: copyto does not broadcast")
    if to.dtype != source.dtype or to.padded != source.padded:
        raise ValueError(f"dtype {source.dtype} is not {to.dtype}: copyto moves bytes and converts nothing")
    if to.readonly:
        raise ExchangeError("the destination is read-only", "copy into memory that may be written")
    for t in (to, source):
        t.allocation.check()
    if not to.size:
        return READY
    reading = _hold(source, _core.READ_LEASE, _core.WRITE_LEASE, 0)
    try:
        writing = _hold(to, _core.WRITE_LEASE, _core.WRITE_LEASE | _core.READ_LEASE, reading)
        try:
            return _copy(to, source, stream, progress)
        finally:
            _core.ledger_remove(writing)
    finally:
        _core.ledger_remove(reading)


def copy_on(dst: Any, src: Any, stream: Any) -> None:
    """`copyto` into a framework's fresh array. Called by the core.

    On the framework's own stream nobody waits: what the framework does next comes after it. Elsewhere the host does.
    """
    to = _core.view_of(dst)
    done = copyto(to, src, stream=stream)
    if _core.pending_stream(to) == -1:
        done.wait(points.HOST_TIMEOUT)


def _hold(t: Any, kind: int, against: int, own: int) -> int:
    """Lease the bytes for the time of the call; `own` is the entry of the other side, which may overlap."""
    space, lo, hi = _core.byte_span(t)
    while True:
        entry = int(_core.ledger_add(space, lo, hi, kind, f"a copy of {t!r}", against, own))
        if entry:
            return entry
        for id, _, hold in _core.ledger_find(space, lo, hi, against):
            if id != own:
                raise LeaseError(f"{hold} forbids this copy", "release it first")


def _copy(to: Any, source: Any, stream: Any, progress: Callable[[int, int], Any] | None) -> Point:
    """Ordered after what is pending on both, noted on both."""
    if not to.size:
        return READY
    written = points.pending(source, "read")
    error = written.error() if written.done() else None
    if error is not None:
        raise points.failed_write(error) from error
    overwritten = points.pending(to, "write")
    before = points.all_of([overwritten if not overwritten.done() else READY, written])
    if _core.is_host(to) and _core.is_host(source):
        before.wait(points.HOST_TIMEOUT)
        for t in (to, source):
            _core.check_stream(stream, t)
            _core.finish_on_host(t)
        with _core.own_lease():
            host_copy(to, source, progress)
        points.rewritten(to)
        return READY
    done = _device_copy(to, source, stream, before)
    points.note(to, "write", done)
    if done.done() and done.error() is None:
        points.rewritten(to)
    points.note(source, "read", done)
    return done


def _side(t: Any) -> Any:
    """Who copies and maps its memory: None for the host's, _NOBODY where no adapter knows it."""
    return None if _core.is_host(t) else t.allocation.adapter or adapter_of(t.device) or _NOBODY


class _Nobody:
    """Stands for memory that no adapter knows: can nothing."""

    def can(self, capability: str) -> bool:
        return False


_NOBODY: Any = _Nobody()


@contextlib.contextmanager
def _spoils(to: Any) -> Iterator[None]:
    """What fails in here may have written half: whoever reads `to` next is told. A plain ExchangeError is a refusal: nothing was begun."""
    try:
        yield
    except Exception as e:
        if type(e) is ExchangeError:
            raise
        points.note(to, "write", points.Failed(points.without_frames(e)))
        raise


def _device_copy(to: Any, source: Any, stream: Any, before: Point) -> Point:
    sides = [_side(to), _side(source)]
    for adapter in dict.fromkeys(a for a in sides if a is not None):
        # an adapter is asked for what it knows: its own memory, and the host's
        if not adapter.can("copy") or any(a is not None and a is not adapter for a in sides):
            continue
        own = to if sides[0] is adapter else source
        place = own.allocation.context or own.device
        if not before.done() and not (adapter.can("wait") and adapter.wait(place, stream, before)):
            before.wait(points.HOST_TIMEOUT)
        with _spoils(to):
            done = adapter.copy(to, source, stream)
        if done is not NotImplemented:
            return points.as_point(done)
    before.wait(points.HOST_TIMEOUT)
    ends: list[Callable[[Point], Any]] = []
    try:
        views = []
        for t, adapter, access in ((to, sides[0], "write"), (source, sides[1], "read")):
            if _core.is_host(t):
                views.append(t)
                continue
            mapped = _map(adapter, t, access) if adapter.can("map") else None
            if mapped is None:
                raise ExchangeError(f"nobody copies between {source.device} and {to.device}: "
                                    "no adapter of the two has copy or map for them",
                                    "copy with the frameworks that own the memory")
            ends.append(_ending(mapped, access))
            views.append(_over(mapped, t, access))
        with _core.own_lease(), _spoils(to):
            host_copy(views[0], views[1], None)
    finally:
        views = []
        with _spoils(to), contextlib.ExitStack() as stack:      # all of them, also where one raises
            for end in ends:
                stack.callback(end, READY)
    return READY


def move(t: Any, place: Any, source: str, target: str, reason: str, remedy: str | None, stream: Any = None) -> Any:
    """A compact copy of `t` in the memory of `place` (a Device or a Context), which may be its own. Called by the core."""
    out = _like(t, place)                               # refuses where nobody allocates
    for side in (t, out):
        adapter = _side(side)
        if adapter is not None and not (adapter.can("copy") or adapter.can("map")):
            raise ExchangeError(f"interop has no way of its own to copy from {t.device} to {place}",
                                "a framework that uses the device can: interop.to(x, 'torch', device=...)")
    routing.note_copy(source, target, t.nbytes, reason, remedy)
    _copy(out, t, stream, None).wait(points.HOST_TIMEOUT)
    return out


# ---- host to host ----
def host_copy(to: Any, source: Any, progress: Callable[[int, int], Any] | None) -> None:
    """Element by element whatever the strides; large ones in blocks, on as many threads as help."""
    a, b = _core.raw_view(to), _core.raw_view(source)
    if a.nbytes < PARALLEL_FROM or np.may_share_memory(a, b):
        np.copyto(a, b)
        if progress is not None:
            progress(a.nbytes, a.nbytes)
        return
    blocks = _blocks(a, b)
    futures = [_threads().submit(np.copyto, x, y) for x, y in blocks]
    done = 0
    try:
        for (x, _), future in zip(blocks, futures, strict=True):
            future.result()
            done += x.nbytes
            if progress is not None:
                progress(done, a.nbytes)
    finally:
        # also after an error nobody writes any more when this returns
        for future in futures:
            future.cancel()
        wait(futures)


def _blocks(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    # Along the dimension in which the destination steps farthest: each thread writes memory of its own.
    axis = max((i for i in range(a.ndim) if a.shape[i] > 1), key=lambda i: abs(a.strides[i]))
    parts = min(a.shape[axis], max(2, -(-a.nbytes // (4 << 20))))
    edges = [a.shape[axis] * i // parts for i in range(parts + 1)]
    cut: tuple[Any, ...] = (slice(None),) * axis
    return [(a[(*cut, slice(lo, hi))], b[(*cut, slice(lo, hi))]) for lo, hi in itertools.pairwise(edges)]


def _threads() -> ThreadPoolExecutor:
    global _pool, _pool_generation
    if _pool is None or _pool_generation != _core.generation():     # a forked child has none of the threads
        _pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), thread_name_prefix="interop-copy")
        _pool_generation = _core.generation()
    return _pool


# ---- maps ----
class _Map(NamedTuple):
    """A map of bytes `first` to `first + nbytes` of an allocation."""

    mapped: Mapped
    first: int
    nbytes: int


def _map(adapter: Any, t: Any, access: str) -> _Map | None:
    """Map the bytes that `t` touches; None where the adapter cannot map this memory."""
    _, lo, hi = _core.byte_span(t)
    first = lo - t.allocation.span()[1]
    mapped = adapter.map(t.allocation, access, first, hi - lo)
    if mapped is NotImplemented:
        return None
    if not isinstance(mapped, Mapped):
        raise TypeError(f"adapter {adapter.name}: map returned {type(mapped).__name__}, not contract.Mapped or NotImplemented")
    try:
        # What is not written between the elements goes back with them, so it has to be there also for "write"
        if mapped.invalidate is not None and (access != "write" or not _fills(t, hi - lo)):
            mapped.invalidate(first, hi - lo)
    except BaseException:
        mapped.unmap()
        raise
    return _Map(mapped, first, hi - lo)


def _fills(t: Any, nbytes: int) -> bool:
    return bool(t.nbytes == nbytes == t.allocation.nbytes)


def _over(m: _Map, t: Any, access: str, *, on_release: Any = None, lent: bool = False) -> Any:
    pages = _core.Allocation(m.mapped.address, m.nbytes, (1, 0), owner=t.allocation, root=t.allocation, root_offset=m.first,
                             on_release=on_release, readonly=access == "read", lent=lent, dies_at_fork=t.allocation.context is not None)
    dtype = "uint8" if t.padded else t.dtype
    view = pages.tensor(t.shape, dtype, strides=t.strides, byte_offset=_core.offset_in(t) - m.first, readonly=access == "read")
    return _core.as_padded(view, t.dtype) if t.padded else view


def _ending(m: _Map, access: str, unmap: bool = True) -> Callable[[Point], Any]:
    def end(point: Point) -> None:
        try:
            point.wait(points.HOST_TIMEOUT)
            if access != "read" and m.mapped.flush is not None:
                m.mapped.flush(m.first, m.nbytes)
        finally:
            if unmap:
                m.mapped.unmap()

    return end


def map_in_place(adapter: Any, t: Any, access: str) -> tuple[Any, Callable[[Point], Any]] | None:
    """A host Tensor over the mapped bytes of `t`, and what ends the access; None where views could dangle: then stage.

    The pages stay mapped until the last view is gone, and the allocation cannot be closed before. That takes an API that can flush
    without unmapping, or whose pages outlive the unmap; of any other the bytes are staged.
    """
    m = _map(adapter, t, access)
    if m is None:
        return None
    if m.mapped.flush is None and not m.mapped.outlives_unmap:
        m.mapped.unmap()
        return None
    outlives = m.mapped.outlives_unmap
    try:
        view = _over(m, t, access, on_release=None if outlives else m.mapped.unmap, lent=True)
    except BaseException:
        if outlives:
            m.mapped.unmap()        # else the release of the pages has done it
        raise
    return view, _ending(m, access, unmap=outlives)


# ---- staging ----
def stage(t: Any, access: str, target: str, reason: str) -> Any:
    """A compact host Tensor for the elements of `t`; unless they are only written, it holds them, and only them are moved.

    The way back is counted here too: a guard that forbids copies must not find out when what was written would be lost.
    """
    fetch = access != "write"
    _note_staging(t, access, target, reason)
    out = _core.host_tensor(t.shape, t.dtype, t.padded)
    if fetch and t.size:
        _copy_unleased(out, t)
    return out


def _like(t: Any, place: Any) -> Any:
    from .memory import empty

    if t.padded:
        return _core.as_padded(empty(t.shape, "uint8", device=place), t.dtype)
    return empty(t.shape, t.dtype, device=place)


def _note_staging(t: Any, access: str, target: str, reason: str) -> None:
    ways = 2 if access == "read_write" else 1
    routing.note_copy(str(t.device), target, ways * t.nbytes, reason, "allocate it where both can reach it: interop.empty(shared_with=)")


def stage_at(t: Any, place: Any, access: str, reason: str | None = None) -> Any:
    """A compact Tensor at a place, another or its own, for the elements of `t`."""
    out = _like(t, place)
    fetch = access != "write"
    _note_staging(t, access, str(place), reason or f"memory on {t.device} is not that of {place}")
    if fetch and t.size:
        _copy_unleased(out, t)
    return out


def write_back(t: Any, staging: Any, point: Point) -> None:
    """What was written to the staging memory goes to `t`, once, when `point` is reached."""
    point.wait(points.HOST_TIMEOUT)
    if t.size:
        _copy_unleased(t, staging)


def _copy_unleased(to: Any, source: Any) -> None:
    with _core.own_lease():
        if _core.is_host(to) and _core.is_host(source):
            host_copy(to, source, None)
        else:
            _device_copy(to, source, None, READY).wait(points.HOST_TIMEOUT)
