"""A CUDA driver in pure Python: a table with the functions of `cuda.bindings.driver`, for `CudaAdapter(table=fake)`.

It counts every call, fails on demand, and objects to what a driver would make undefined, wrong or slow: data races, use after free,
calls without a context, broken captures, device-wide waits. What it objects to is kept in `violations`; `check()` raises at the end. The
call itself returns what a real driver would: how those behave was measured, and `test_fake_cuda` asks fake and card the same questions.

Work is queued and runs only when told to: `run()`, a host wait, a query while `auto` is set, or the thread of `start()`. Whether two
pieces of work that touch the same bytes are ordered is decided when they are queued, by vector clocks: it needs no unlucky moment.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fake_cuda_names as names
from fake_cuda_memory import Memory, Refused, number
from fake_cuda_names import CUresult, CUstreamCaptureStatus, Handle, Pointer

_GLOBAL, _RELAXED = 0, 2

#: Need a current context whatever they are given (measured; others only for streams 0, 1 and 2).
_CONTEXT = frozenset({
    "cuStreamCreate", "cuEventCreate", "cuMemAlloc", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemHostRegister", "cuCtxGetDevice",
    "cuModuleLoadData", "cuImportExternalMemory", "cuCtxSynchronize", "cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD",
    "cuMemGetInfo",
})  # fmt: skip
#: Forbidden while somebody captures, unless the thread is in relaxed mode (measured: they invalidate the capture).
_UNSAFE = frozenset({
    "cuEventQuery", "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize", "cuMemAlloc", "cuMemAllocManaged", "cuMemFree",
    "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister", "cuMemAllocAsync", "cuMemFreeAsync",
    "cuImportExternalMemory", "cuDestroyExternalMemory",
})  # fmt: skip
_DEVICE_WIDE = ("cuCtxSynchronize", "cuDevicePrimaryCtxReset")


class Item:
    """One piece of work in a stream, or a mark: `function` None. Done once it ran."""

    __slots__ = ("clock", "deps", "done", "function", "name", "ranges", "stream", "tick")

    def __init__(self, stream: Stream, name: str, function: Any, deps: list[Item], clock: dict[Any, int], ranges: list[Any]) -> None:
        self.stream, self.name, self.function, self.deps, self.clock, self.ranges = stream, name, function, deps, clock, ranges
        self.done, self.tick = False, clock[stream.key]


class Stream:
    def __init__(self, handle: int, device: int, blocking: bool, key: Any) -> None:
        self.handle, self.device, self.blocking, self.key, self.alive = handle, device, blocking, key, True
        self.queue: collections.deque[Item] = collections.deque()
        self.clock: dict[Any, int] = {}
        self.last: Item | None = None
        self.capture: Capture | None = None

    def __str__(self) -> str:
        return f"stream {self.handle:#x} of cuda:{self.device}"


class Event:
    def __init__(self, handle: int, device: int) -> None:
        self.handle, self.device, self.item, self.capture = handle, device, None, None
        self.clock: dict[Any, int] = {}

    item: Item | None
    capture: Capture | None


class Capture:
    def __init__(self, origin: Stream, mode: int) -> None:
        self.origin, self.mode, self.thread, self.invalid = origin, mode, threading.get_ident(), False
        self.streams, self.work = {origin}, []

    work: list[tuple[str, Any]]


class CUdevice(Pointer):
    __slots__ = ()


class CUcontext(Handle):
    __slots__ = ()


class CUstream(Handle):
    __slots__ = ()


class CUevent(Handle):
    __slots__ = ()


class Violation(AssertionError):
    """Raised where going on makes no sense: in a forked child, and by `check`."""


class FakeCuda(Memory):
    """The table. `devices` GPUs; `visible`: which of them, in which order, as CUDA_VISIBLE_DEVICES would have it.

    Attributes:
        calls: how often each function was called. `counting()` gives those of a block.
        violations: what a driver would not have stood for.
        auto: a query makes the device do one more piece of the work that it asks about.
        kernels: name -> ``f(params, grid, block)``, called by cuLaunchKernel with what it was given, while that is valid; returns
            ``(work, reads, writes)``, the latter two lists of ``(address, nbytes)``.
        lost: device -> the error that everything on it gives from now on.
    """

    def __init__(self, devices: int = 2, *, visible: Sequence[int] | None = None) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.calls: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.kernels: dict[str, Callable[..., Any]] = {}
        self.lost: dict[int, Any] = {}
        self.auto = False
        self.capacity = 1 << 36
        self.uuids = [uuid.uuid5(uuid.NAMESPACE_OID, f"fake-cuda-{i}").bytes for i in (range(devices) if visible is None else visible)]
        self.attributes = [dict(names.ATTRIBUTES) for _ in self.uuids]
        self._failing: dict[str, list[Any]] = {}
        self._numbers = itertools.count(0x10000, 0x10)
        self._local = threading.local()
        self._initialised = False
        self._retained: collections.Counter[int] = collections.Counter()
        self.streams: dict[Any, Stream] = {}
        self.events: dict[int, Event] = {}
        self.captures: list[Capture] = []
        self._functions: dict[int, str] = {}
        self._accesses: list[tuple[int, int, bool, Item]] = []
        self._host: dict[Any, int] = {}         # what the host has seen to be over
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._init_memory()

    # ---- what a test uses ----
    def fail_next(self, call: str, code: Any, times: int = 1) -> None:
        """The next calls of this name return this error and do nothing."""
        assert hasattr(self, call), call
        self._failing.setdefault(call, []).extend([code] * times)

    def violate(self, what: str) -> None:
        self.violations.append(what)

    @contextlib.contextmanager
    def counting(self) -> Iterator[collections.Counter[str]]:
        """The calls of the block, by name."""
        before, out = self.calls.copy(), collections.Counter[str]()
        yield out
        out.update(self.calls - before)

    def context(self, device: int) -> int:
        """The number of a primary context."""
        return 0xC0DE00 + device

    def make_stream(self, device: int = 0, *, blocking: bool = False) -> int:
        """A user's stream, not counted as a call."""
        with self.lock:
            handle = self.number()
            self.streams[handle] = Stream(handle, device, blocking, handle)
            return handle

    def make_memory(self, n: int, device: int = 0, kind: str = "device") -> int:
        """A user's memory, not counted as a call. `check` does not miss it."""
        r = self._add(kind, n, device=device)
        r.mine = True                           # type: ignore[attr-defined]
        return r.base

    def launch(self, stream: Any, function: Callable[[], Any] | None = None, reads: Any = (), writes: Any = (), *, device: int = 0,
               name: str = "kernel") -> Item | None:
        """A user's kernel: not counted. `reads`, `writes`: lists of ``(address, nbytes)``; `device`: whose default stream 1 and 2 are."""
        with self.lock, self.current_device(device):
            return self.submit(self.stream(stream, name), name, function or (lambda: None), reads, writes)

    @contextlib.contextmanager
    def current_device(self, device: int) -> Iterator[None]:
        """A context that the application itself has made current on this thread; not counted."""
        self._stack.append(device)
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def capturing(self, stream: int, mode: int = _GLOBAL) -> Iterator[Capture]:
        """A capture of the application's; not counted. `invalid` says what became of it."""
        s = self.streams[stream]
        capture = s.capture = Capture(s, mode)
        self.captures.append(capture)
        try:
            yield capture
        finally:
            self._end_capture(capture)

    def run(self, stream: Any = None, n: int | None = None, *, device: int = 0) -> int:
        """Execute up to n pieces of work that nothing holds back, of one stream or of all, newest stream first; how many it were."""
        with self.lock, self.current_device(device):
            only = None if stream is None else [self.stream(stream, "run")]
            executed, progress = 0, True
            while progress:
                progress = False
                for s in only or list(reversed(self.streams.values())):
                    while s.queue and all(d.done for d in s.queue[0].deps):
                        if s.queue[0].function is not None:
                            if n is not None and executed >= n:
                                return executed
                            executed += 1
                        self._execute(s)
                        progress = True
            return executed

    @property
    def queued(self) -> int:
        """How many pieces of work have not run yet."""
        return sum(i.function is not None for s in self.streams.values() for i in s.queue)

    def start(self) -> None:
        """A thread runs the work from here on."""
        def loop() -> None:
            while not self._stop.wait(0.001):
                self.run()
        self._stop.clear()
        self._thread = threading.Thread(target=loop, name="fake-cuda", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def lose(self, device: int = 0, code: Any = CUresult.CUDA_ERROR_LAUNCH_FAILED) -> None:
        """The context is gone, as after a kernel that ran wild."""
        self.lost[device] = code

    def check(self, *, events: int | None = None, pinned: int = 0) -> None:
        """Nothing illegal happened and nothing is left but streams, `events` events (by default a pool for each device) and `pinned` blocks
        of pinned memory.
        """
        if self.violations:
            raise Violation("; ".join(self.violations))
        ranges = [r for r in self.ranges if not r.dead and not hasattr(r, "mine")]
        ranges = [r for r in ranges if r.kind != "pinned"] + [r for r in ranges if r.kind == "pinned"][pinned:]
        left = [f"{r.kind} {r.base:#x}" for r in ranges]
        left += [f"allocation handle {h:#x}" for h in self.physical] + [f"external memory {h:#x}" for h in self.external]
        allowed = 32 * len(self.uuids) if events is None else events
        if left or len(self.events) > allowed or self.captures or any(self._failing.values()):
            raise Violation(f"left: {left}, {len(self.events)} events, {len(self.captures)} captures; never failed: {self._failing}")

    # ---- inside ----
    def number(self) -> int:
        return next(self._numbers)

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.mode = [], _GLOBAL
        return self._local.stack                # type: ignore[no-any-return]

    def current(self) -> int:
        if not self._stack:
            raise Refused("INVALID_CONTEXT")
        return self._stack[-1]

    def device_of(self, context: Any) -> int:
        device = number(context) - self.context(0)
        if not 0 <= device < len(self.uuids) or not self._retained[device]:
            self.violate(f"context {number(context):#x} was not retained")
            raise Refused("INVALID_CONTEXT")
        return device

    def enter(self, call: str, f: Callable[..., Any], args: tuple[Any, ...], outs: int) -> tuple[Any, ...]:
        if os.getpid() != self.pid:
            raise Violation(f"{call} in a forked child")
        with self.lock:
            self.calls[call] += 1
            try:
                if self._failing.get(call):
                    return self._failing[call].pop(0), *[None] * outs
                if not self._initialised and call != "cuInit":
                    raise Refused("NOT_INITIALIZED")
                if call in _CONTEXT and not self._stack:
                    self.violate(f"{call} without a current context")
                    raise Refused("INVALID_CONTEXT")
                if call in _CONTEXT and self._stack[-1] in self.lost:
                    return self.lost[self._stack[-1]], *[None] * outs
                if call in _UNSAFE or call in _DEVICE_WIDE:
                    self._break_captures(call)
                value = f(self, *args)
            except Refused as e:
                return e.code, *[None] * outs
            return (CUresult.CUDA_SUCCESS, *((value,) if outs == 1 else value or ()))

    def _break_captures(self, call: str) -> None:
        mode, me = (self._stack, self._local.mode)[1], threading.get_ident()
        hit = [c for c in self.captures if not c.invalid and (call in _DEVICE_WIDE or (mode != _RELAXED and (
            (c.thread == me and c.mode != _RELAXED) or (c.thread != me and c.mode == mode == _GLOBAL))))]  # fmt: skip
        if hit:
            for c in hit:
                self._invalidate(c, call)
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")

    def _invalidate(self, c: Capture, why: str) -> None:
        if not c.invalid:
            self.violate(f"{why} invalidated the capture of {c.origin}")
        c.invalid = True

    def stream(self, handle: Any, what: str, *, asking: bool = False) -> Stream:
        """The Stream behind a number; `asking`: only whether it is being captured."""
        n = number(handle)
        if n in (0, 1, 2):
            if not self._stack:
                self.violate(f"{what}: stream {n} without a current context")
            device = self.current()
            key = (device, threading.get_ident()) if n == 2 else (device, 1)
            s = self.streams.setdefault(key, Stream(max(n, 1), device, n == 2, key))
            if n != 2:
                hit = [c for c in self.captures if any(t.blocking and t.device == device for t in c.streams)]
                for capture in [] if asking else hit:
                    self._invalidate(capture, f"{what} on the legacy stream")
                if hit:
                    raise Refused("STREAM_CAPTURE_IMPLICIT")
        elif n not in self.streams:
            self.violate(f"{what}: there is no stream {n:#x}")
            raise Refused("INVALID_HANDLE")
        else:
            s = self.streams[n]
            if not s.alive:
                self.violate(f"{what}: {s} was destroyed")
                raise Refused("INVALID_HANDLE")
        if s.device in self.lost:
            raise _lost(self.lost[s.device])
        return s

    def event(self, handle: Any, what: str) -> Event:
        e = self.events.get(number(handle))
        if e is None:
            self.violate(f"{what}: there is no event {number(handle):#x}")
            raise Refused("INVALID_HANDLE")
        if e.device in self.lost:
            raise _lost(self.lost[e.device])
        return e

    def submit(self, s: Stream, name: str, function: Callable[[], Any] | None = None, reads: Any = (), writes: Any = (),
               after: Item | None = None, clock: dict[Any, int] | None = None) -> Item | None:
        """Queue something. None: it became part of a graph."""
        if s.capture is not None:
            if s.capture.invalid:
                raise Refused("STREAM_CAPTURE_INVALIDATED")
            s.capture.work.append((name, function))
            return None
        before = [s, *self._implicit(s)]
        seen: dict[Any, int] = {}
        for known in [self._host, clock or {}, *[b.clock for b in before]]:
            for key, tick in known.items():
                seen[key] = max(tick, seen.get(key, 0))
        seen[s.key] = seen.get(s.key, 0) + 1
        deps = [i for i in (after, *[b.last for b in before]) if i is not None and not i.done]
        ranges = [(int(lo), int(lo) + int(n), w) for w, given in ((False, reads), (True, writes)) for lo, n in given if n]
        item = Item(s, name, function, deps, seen, ranges)
        before_touch = len(self.violations)
        for lo, hi, _ in ranges:
            self.touch(name, lo, hi)
        if len(self.violations) > before_touch:
            item.function = lambda: None        # a device would fault; this process shall not
        for lo, hi, w in ranges:
            self._race(item, lo, hi, w)
        s.clock, s.last = seen, item
        s.queue.append(item)
        self._settle()
        return item

    def _implicit(self, s: Stream) -> list[Stream]:
        """The streams that it waits for unasked: the legacy one for all blocking ones of its device, and they for it."""
        if s.handle == 1:
            return [o for o in self.streams.values() if o.blocking and o.device == s.device]
        legacy = self.streams.get((s.device, 1))
        return [legacy] if s.blocking and legacy is not None else []

    def _race(self, item: Item, lo: int, hi: int, write: bool) -> None:
        if len(self._accesses) > 256:
            self._accesses = [a for a in self._accesses if self._host.get(a[3].stream.key, 0) < a[3].tick]
        for a, b, wrote, other in self._accesses:
            if a < hi and lo < b and (write or wrote) and other is not item and item.clock.get(other.stream.key, 0) < other.tick:
                did, has = "writes" if write else "reads", "writes" if wrote else "reads"
                self.violate(f"data race: {item.name} on {item.stream} {did} {max(a, lo):#x} to {min(b, hi):#x}, which {other.name} "
                             f"on {other.stream} {has}, and nothing orders the two")
        self._accesses.append((lo, hi, write, item))

    def unfinished(self, lo: int, hi: int) -> list[Item]:
        """Queued work that uses some of these bytes."""
        return [i for s in self.streams.values() for i in s.queue if any(a < hi and lo < b for a, b, _ in i.ranges)]

    def _execute(self, s: Stream) -> None:
        item = s.queue.popleft()
        if item.function is not None and s.device not in self.lost:
            item.function()
        item.done, item.function, item.deps = True, None, []

    def _settle(self) -> None:
        """Marks that nothing is before are reached: the device needs no telling."""
        progress = True
        while progress:
            progress = False
            for s in self.streams.values():
                while s.queue and s.queue[0].function is None and all(d.done for d in s.queue[0].deps):
                    self._execute(s)
                    progress = True

    def _advance(self, item: Item) -> None:
        """One piece of what the item waits for, or it."""
        while True:
            head = item.stream.queue[0]
            blocker = next((d for d in head.deps if not d.done), None)
            if blocker is None:
                return self._execute(item.stream)
            item = blocker

    def finish(self, item: Item | None) -> None:
        """The host waits for it, and knows then that it is over."""
        while item is not None and not item.done:
            self._advance(item)
        self._observe(item.clock if item is not None else {})

    def _observe(self, clock: dict[Any, int]) -> None:
        for key, tick in clock.items():
            self._host[key] = max(tick, self._host.get(key, 0))

    def _poll(self, item: Item | None) -> None:
        if item is not None:
            if self.auto and not item.done:
                self._advance(item)
            self._settle()
            if not item.done:
                raise Refused("NOT_READY")
            self._observe(item.clock)

    # ---- devices and contexts ----
    def cuInit(self, flags: int) -> None:
        self._initialised = True

    def cuDriverGetVersion(self) -> int:
        return 13000

    def cuGetErrorName(self, code: Any) -> bytes:
        return CUresult(code).name.encode()

    def cuDeviceGetCount(self) -> int:
        return len(self.uuids)

    def cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < len(self.uuids):
            raise Refused("INVALID_DEVICE")
        return CUdevice(ordinal)

    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return b"Fake GPU"[:length]

    def cuDeviceGetUuid(self, device: Any) -> Any:
        return type("CUuuid", (), {"bytes": self.uuids[int(device)]})()

    def cuDeviceGetAttribute(self, attribute: int, device: Any) -> int:
        return self.attributes[int(device)].get(int(names.CUdevice_attribute(attribute)), 0)

    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> int:
        return int(int(device) != int(peer))

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> None:
        self.device_of(context)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self._retained[int(device)] += 1
        return CUcontext(self.context(int(device)))

    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        self._retained[int(device)] -= 1

    def cuCtxPushCurrent(self, context: Any) -> None:
        self._stack.append(self.device_of(context))

    def cuCtxPopCurrent(self) -> Any:
        if not self._stack:
            self.violate("cuCtxPopCurrent without a current context")
            raise Refused("INVALID_CONTEXT")
        return CUcontext(self.context(self._stack.pop()))

    def cuCtxSetCurrent(self, context: Any) -> None:
        self._stack[-1:] = [self.device_of(context)] if number(context) else []

    def cuCtxGetCurrent(self) -> Any:
        return CUcontext(self.context(self._stack[-1]) if self._stack else 0)

    def cuCtxGetDevice(self) -> Any:
        return CUdevice(self.current())

    def cuCtxSynchronize(self) -> None:
        self.violate("device-wide sync: cuCtxSynchronize")

    def cuDevicePrimaryCtxReset(self, device: Any) -> None:
        self.violate("device-wide sync: cuDevicePrimaryCtxReset")

    # ---- streams and events ----
    def cuStreamCreate(self, flags: int) -> Any:
        return CUstream(self.make_stream(self.current(), blocking=not int(flags) & 1))

    def cuStreamDestroy(self, stream: Any) -> None:
        self.stream(stream, "cuStreamDestroy").alive = False

    def cuStreamGetCtx(self, stream: Any) -> Any:
        return CUcontext(self.context(self.stream(stream, "cuStreamGetCtx", asking=True).device))

    def cuStreamQuery(self, stream: Any) -> None:
        self._poll(self._waitable(stream, "cuStreamQuery").last)

    def cuStreamSynchronize(self, stream: Any) -> None:
        self.finish(self._waitable(stream, "cuStreamSynchronize").last)

    def _waitable(self, stream: Any, what: str) -> Stream:
        s = self.stream(stream, what)
        if s.capture is not None:
            self._invalidate(s.capture, what)
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")
        return s

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        s, e = self.stream(stream, "cuStreamWaitEvent"), self.event(event, "cuStreamWaitEvent")
        if e.capture is not None and e.capture in self.captures:
            if s.capture is None:               # it joins
                s.capture = e.capture
                e.capture.streams.add(s)
        elif s.capture is not None:
            self._invalidate(s.capture, "a wait for an event outside")
            raise Refused("STREAM_CAPTURE_ISOLATION")
        elif e.item is not None:
            self.submit(s, "wait", after=e.item, clock=e.clock)

    def cuEventCreate(self, flags: int) -> Any:
        handle = self.number()
        self.events[handle] = Event(handle, self.current())
        return CUevent(handle)

    def cuEventDestroy(self, event: Any) -> None:
        del self.events[self.event(event, "cuEventDestroy").handle]

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        e, s = self.event(event, "cuEventRecord"), self.stream(stream, "cuEventRecord")
        if e.device != s.device:
            self.violate(f"cuEventRecord: the event is of cuda:{e.device}, and {s} is not")
            raise Refused("INVALID_HANDLE")
        item = self.submit(s, "record")
        e.capture, e.item, e.clock = s.capture, item, item.clock if item is not None else {}

    def cuEventQuery(self, event: Any) -> None:
        self._poll(self._outside(event, "cuEventQuery").item)

    def cuEventSynchronize(self, event: Any) -> None:
        self.finish(self._outside(event, "cuEventSynchronize").item)

    def _outside(self, event: Any, what: str) -> Event:
        e = self.event(event, what)
        if e.capture is not None:
            self._invalidate(e.capture, f"{what} of its event")
            raise Refused("CAPTURED_EVENT")
        return e

    # ---- capture ----
    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        before = (self._stack, self._local.mode)[1]
        self._local.mode = int(mode)
        return names.CUstreamCaptureMode(before)

    def cuStreamIsCapturing(self, stream: Any) -> Any:
        c = self.stream(stream, "cuStreamIsCapturing", asking=True).capture
        return CUstreamCaptureStatus(0 if c is None else 2 if c.invalid else 1)

    def cuStreamBeginCapture(self, stream: Any, mode: int) -> None:
        s = self.stream(stream, "cuStreamBeginCapture")
        if s.handle == 1 or s.capture is not None:
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")
        s.capture = Capture(s, int(mode))
        self.captures.append(s.capture)

    def cuStreamEndCapture(self, stream: Any) -> Any:
        c = self.stream(stream, "cuStreamEndCapture").capture
        if c is None:
            raise Refused("INVALID_VALUE")
        if c.mode != _RELAXED and c.thread != threading.get_ident():
            raise Refused("STREAM_CAPTURE_WRONG_THREAD")
        self._end_capture(c)
        if c.invalid:
            raise Refused("STREAM_CAPTURE_INVALIDATED")
        return Handle(self.number())

    def _end_capture(self, c: Capture) -> None:
        self.captures.remove(c)
        for s in c.streams:
            s.capture = None

    def cuGraphDestroy(self, graph: Any) -> None:
        pass

    # ---- kernels ----
    def cuModuleLoadData(self, image: Any) -> Any:
        return Handle(self.number())

    def cuModuleUnload(self, module: Any) -> None:
        pass

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        if name.decode() not in self.kernels:
            raise Refused("NOT_FOUND")
        handle = self.number()
        self._functions[handle] = name.decode()
        return Handle(handle)

    def cuLaunchKernel(self, f: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: Any, params: Any,
                       extra: Any) -> None:
        s = self.stream(stream, "cuLaunchKernel")
        if not self._stack or s.device != self._stack[-1]:
            self.violate(f"cuLaunchKernel on {s}, whose context is not current")
            raise Refused("INVALID_CONTEXT")
        if min(gx, gy, gz, bx, by, bz) < 1 or bx * by * bz > 1024 or max(gy, gz) > 65535:
            raise Refused("INVALID_VALUE")
        name = self._functions[number(f)]
        work, reads, writes = self.kernels[name](params, (gx, gy, gz), (bx, by, bz))
        self.submit(s, name, work, reads, writes)


def _lost(code: Any) -> Refused:
    e = Refused("UNKNOWN")
    e.code = code
    return e


def _entry(call: str, f: Callable[..., Any]) -> Callable[..., Any]:
    outs = {"None": 0}.get(inspect.signature(f).return_annotation, 2 if call in ("cuMemGetAddressRange", "cuMemGetInfo") else 1)

    @functools.wraps(f)
    def entry(self: FakeCuda, *args: Any) -> tuple[Any, ...]:
        return self.enter(call, f, args, outs)
    return entry


#: Every function of the table.
FUNCTIONS = sorted(n for n in dir(FakeCuda) if n.startswith("cu") and n[2:3].isupper())
for _name in FUNCTIONS:
    setattr(FakeCuda, _name, _entry(_name, getattr(FakeCuda, _name)))
for _name, _value in {**names.ENUMS, **names.STRUCTS, **names.CONSTANTS}.items():
    setattr(FakeCuda, _name, _value)
