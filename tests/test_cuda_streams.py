"""adapters/cuda: driver.py, streams.py and pointers.py on the fake driver. What only a card can show is in test_gpu_*.py."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import memkit
import pytest
from fake_cuda import CUresult, FakeCuda
from support import producer

import interop
from interop import _core
from interop.adapters.cuda import streams as streams_module
from interop.adapters.cuda.adapter import CudaAdapter
from interop.adapters.cuda.driver import CudaError, Driver
from interop.adapters.cuda.pointers import classify
from interop.adapters.cuda.streams import EventPoint, Streams
from interop.contract import DeviceLostError, ExchangeError, keep_until

LARGE = 1 << 30            # bytes that wait for no others
N = 256
OWN, USER = "own", "user"       # interop's stream on the device, one of the application's
PAIRS = list(itertools.permutations((1, 2, OWN, USER), 2))
ASKED = frozenset({"cuStreamIsCapturing", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"})


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """A driver of two devices; in the end nothing illegal has happened on it and nothing is left."""
    fake = FakeCuda()
    yield fake
    fake.stop()
    gc.collect()
    try:
        fake.check()
    finally:
        fake.close()


@pytest.fixture
def adapter(fake: FakeCuda) -> Iterator[CudaAdapter]:
    """interop's adapter on it, which the core asks too."""
    adapter = CudaAdapter(table=fake)
    _core.set_cuda_ops(adapter)
    yield adapter
    _core.set_cuda_ops(None)


@pytest.fixture
def streams(adapter: CudaAdapter) -> Streams:
    return adapter.streams


def number(streams: Streams, fake: FakeCuda, which: Any, device: int = 0) -> int:
    return streams.own(device) if which == OWN else fake.make_stream(device) if which == USER else int(which)


def work(calls: Any) -> dict[str, int]:
    """Without the questions: whether it is captured, which device is current."""
    return {k: v for k, v in calls.items() if k not in ASKED}


# ---- order, through the core ----
def tensor(fake: FakeCuda, stream: int) -> interop.Tensor:
    """CUDA memory whose producer was asked to make it ready on `stream`."""
    return interop.as_tensor(producer((N,), (1, 8, 1), data=fake.make_memory(N)), stream=stream)


def test_equal_streams_cost_no_driver_call(fake: FakeCuda, adapter: CudaAdapter) -> None:
    """SPEC X-STREAM-3."""
    a = fake.make_stream()
    t = tensor(fake, a)
    with fake.counting() as calls:
        capsule = t.__dlpack__(stream=a, max_version=(1, 3))
    assert not calls
    del capsule


def test_no_order_is_asked_for_and_none_is_made(fake: FakeCuda, adapter: CudaAdapter) -> None:
    """SPEC X-STREAM-1: -1."""
    t = tensor(fake, 7)
    with fake.counting() as calls:
        t.__dlpack__(stream=-1, max_version=(1, 3))
    assert not calls


def test_different_streams_cost_one_record_and_one_wait(fake: FakeCuda, adapter: CudaAdapter) -> None:
    """SPEC X-STREAM-3: and nothing waits on the host or for the device."""
    first, then = fake.make_stream(), fake.make_stream()
    t = tensor(fake, first)
    t.__dlpack__(stream=then, max_version=(1, 3))           # makes the context and the event
    with fake.counting() as calls:
        capsule = t.__dlpack__(stream=then, max_version=(1, 3))
    del capsule                                             # what that costs is counted elsewhere
    assert work(calls) == {"cuEventRecord": 1, "cuStreamWaitEvent": 1}
    assert calls["cuStreamIsCapturing"] == 2


def test_a_reader_on_the_exports_stream_comes_after_the_writer(fake: FakeCuda, adapter: CudaAdapter) -> None:
    """SPEC X-STREAM-3."""
    first, then = fake.make_stream(), fake.make_stream()
    t, seen = tensor(fake, first), []
    fake.launch(first, lambda: fake.poke(t.ptr, b"written"), writes=[(t.ptr, 7)])
    t.__dlpack__(stream=then, max_version=(1, 3))
    fake.launch(then, lambda: seen.append(fake.peek(t.ptr, 7)), reads=[(t.ptr, 7)])
    assert fake.run(then) == 0                              # it waits
    fake.run()
    assert seen == [b"written"]


# ---- order, directly ----
@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_a_slow_writer_comes_before_the_reader(fake: FakeCuda, streams: Streams, first: Any, then: Any) -> None:
    data, seen = fake.make_memory(N), []
    a, b = number(streams, fake, first), number(streams, fake, then)
    fake.launch(a, lambda: fake.poke(data, b"slow"), writes=[(data, N)])
    streams.order(0, a, b)
    fake.launch(b, lambda: seen.append(fake.peek(data, 4)), reads=[(data, N)])
    fake.run(b)
    assert seen == []
    fake.run()
    assert seen == [b"slow"]


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_without_order_the_fake_sees_the_race(fake: FakeCuda, streams: Streams, monkeypatch: pytest.MonkeyPatch, first: Any,
                                              then: Any) -> None:
    """The test above can fail: this is it with an order() that does nothing."""
    monkeypatch.setattr(Streams, "order", lambda *a: None)
    data = fake.make_memory(N)
    a, b = number(streams, fake, first), number(streams, fake, then)
    fake.launch(a, writes=[(data, N)])
    streams.order(0, a, b)
    fake.launch(b, reads=[(data, N)])
    if {first, then} == {1, 2}:                             # the driver's own rule orders these two
        assert not fake.violations
        return
    assert len(fake.violations) == 1 and "data race" in fake.violations[0]
    fake.violations.clear()


def test_order_covers_what_came_before_and_nothing_later(fake: FakeCuda, streams: Streams) -> None:
    data = fake.make_memory(N)
    a, b = fake.make_stream(), fake.make_stream()
    streams.order(0, a, b)
    fake.launch(a, writes=[(data, N)])
    fake.launch(b, reads=[(data, N)])
    assert "data race" in fake.violations.pop()


def test_order_on_another_device_leaves_the_current_one(fake: FakeCuda, streams: Streams) -> None:
    """SPEC G-CONTEXT."""
    data = fake.make_memory(N, device=1)
    with fake.current_device(0):
        fake.launch(1, writes=[(data, N)], device=1)
        streams.order(1, 1, streams.own(1))
        assert int(fake.cuCtxGetCurrent()[1]) == fake.context(0)
    fake.launch(streams.own(1), reads=[(data, N)])
    fake.run()
    assert int(fake.cuCtxGetCurrent()[1]) == 0


FAILING = ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuCtxPushCurrent"]


@pytest.mark.parametrize(("call", "current"), [c for c in itertools.product(FAILING, [None, 0, 1]) if c != ("cuCtxPushCurrent", 0)])
def test_order_restores_the_current_device_whatever_fails(fake: FakeCuda, streams: Streams, call: str, current: int | None) -> None:
    """SPEC G-CONTEXT."""
    a, b = fake.make_stream(), fake.make_stream()
    streams.driver.context(0)
    with contextlib.ExitStack() as block:
        if current is not None:
            block.enter_context(fake.current_device(current))
        before = list(fake._stack)
        fake.fail_next(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(ExchangeError):
            streams.order(0, a, b)
        assert fake._stack == before
        streams.order(0, a, b)                              # and it goes on as if nothing had been
        assert fake._stack == before
    assert len(fake.events) == 1


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_fails_at_first_is_asked_again(fake: FakeCuda, call: str) -> None:
    streams = Streams(Driver(fake))
    fake.fail_next(call, CUresult.CUDA_ERROR_SYSTEM_NOT_READY)
    with pytest.raises(CudaError, match="SYSTEM_NOT_READY") as e:
        streams.own(0)
    assert e.value.code == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert streams.own(0) == streams.own(0)


def test_events_are_reused_and_do_not_leak(fake: FakeCuda, streams: Streams) -> None:
    a, b = fake.make_stream(), fake.make_stream()
    for _ in range(10_000):
        streams.order(0, a, b)
    assert fake.calls["cuEventCreate"] == len(fake.events) == 1


def test_events_are_reused_on_their_own_device(fake: FakeCuda, streams: Streams) -> None:
    for device in (1, 0, 1, 0):
        streams.order(device, 1, streams.own(device))
    assert sorted(e.device for e in fake.events.values()) == [0, 1]


def test_an_event_that_is_reused_does_not_move_the_waits_for_it(fake: FakeCuda, streams: Streams) -> None:
    data = fake.make_memory(N)
    a, b, c, d = (fake.make_stream() for _ in range(4))
    fake.launch(a, writes=[(data, N)])
    streams.order(0, a, b)
    streams.order(0, c, d)                                  # records the same event anew, elsewhere
    fake.launch(b, reads=[(data, N)])
    assert fake.run(b) == 0
    assert len(fake.events) == 1


def test_points_beyond_the_pool_destroy_their_events(fake: FakeCuda, streams: Streams) -> None:
    points = [streams.record(0, 1) for _ in range(100)]
    assert len(fake.events) == 100
    points.clear()
    assert len(fake.events) == streams_module._SPARE


def test_interops_own_stream_is_non_blocking_and_made_once(fake: FakeCuda, streams: Streams) -> None:
    assert streams.own(0) == streams.own(0) != streams.own(1)
    assert not fake.streams[streams.own(0)].blocking
    assert fake.calls["cuStreamCreate"] == 2


# ---- capture ----
@pytest.mark.parametrize("side", ["first", "then"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_order_with_a_captured_stream_is_refused_and_the_capture_goes_on(fake: FakeCuda, streams: Streams, side: str, mode: int) -> None:
    a, b = fake.make_stream(), fake.make_stream()
    streams.order(0, a, b)
    with fake.capturing(a if side == "first" else b, mode) as capture:
        with fake.counting() as calls, pytest.raises(ExchangeError, match="captured"):
            streams.order(0, a, b)
        assert set(calls) <= ASKED
    assert not capture.invalid
    streams.order(0, a, b)


def test_order_with_the_legacy_stream_is_refused_while_a_blocking_one_is_captured(fake: FakeCuda, streams: Streams) -> None:
    a = fake.make_stream(blocking=True)
    with fake.capturing(a) as capture, fake.counting() as calls, pytest.raises(ExchangeError, match="captured"):
        streams.order(0, 1, streams.own(0))
    assert not capture.invalid
    assert not {"cuEventRecord", "cuStreamWaitEvent"} & set(calls)


def test_order_of_other_streams_goes_on_beside_a_capture(fake: FakeCuda, streams: Streams) -> None:
    a, b, c = (fake.make_stream() for _ in range(3))
    with fake.capturing(c) as capture:
        streams.order(0, a, b)
    assert not capture.invalid


def test_a_point_is_asked_beside_a_capture_of_another_thread(fake: FakeCuda, streams: Streams) -> None:
    a, c = fake.make_stream(), fake.make_stream()
    fake.launch(a)
    p, seen = streams.record(0, a), []
    with fake.capturing(c) as capture:
        thread = threading.Thread(target=lambda: seen.append(p.done()))
        thread.start()
        thread.join()
        seen.append(p.done())
    assert seen == [False, False]
    assert not capture.invalid
    assert fake.run() == 1 and p.done()


def test_no_point_is_recorded_in_a_capture_and_none_is_waited_for(fake: FakeCuda, streams: Streams) -> None:
    a, c = fake.make_stream(), fake.make_stream()
    fake.launch(a)
    p = streams.record(0, a)
    with fake.capturing(c) as capture:
        with pytest.raises(ExchangeError, match="captured"):
            streams.record(0, c)
        assert p.stream_wait(c) is False
    assert not capture.invalid


def test_memory_dropped_in_a_capture_is_asked_about_after_it(fake: FakeCuda, streams: Streams) -> None:
    """SPEC X-STREAM-6 (field report B28)."""
    c, memory = fake.make_stream(), Memory()
    gone = weakref.ref(memory)
    with fake.capturing(c) as capture:
        streams.keep(0, c, LARGE, memory)
        del memory
        time.sleep(0.02)
        assert gone() is not None
    assert not capture.invalid
    assert memkit.until(lambda: gone() is None)


def test_small_pieces_wait_for_one_event_together(fake: FakeCuda, streams: Streams) -> None:
    """SPEC X-STREAM-5."""
    a, pieces = fake.make_stream(), [Memory() for _ in range(64)]
    gone = [weakref.ref(p) for p in pieces]
    with fake.counting() as calls:
        while pieces:
            streams.keep(0, a, 100, pieces.pop())
        assert memkit.until(lambda: not any(g() for g in gone))
    assert calls["cuEventRecord"] <= 4


@pytest.mark.parametrize("blocking", [False, True])
def test_waiting_for_a_stream_in_a_capture_is_refused_and_the_capture_goes_on(fake: FakeCuda, streams: Streams, blocking: bool) -> None:
    """The stream itself, or the legacy one beside a capture of a blocking stream."""
    c = fake.make_stream(blocking=blocking)
    with fake.capturing(c) as capture:
        with pytest.raises(ExchangeError):
            streams.synchronize(0, 1 if blocking else c)
        assert not capture.invalid


# ---- Points ----
def test_a_point_is_done_when_the_work_before_it_ran(fake: FakeCuda, streams: Streams) -> None:
    """SPEC P-STREAM."""
    a = fake.make_stream()
    fake.launch(a)
    p = streams.record(0, a)
    fake.launch(a)
    assert isinstance(p, EventPoint)
    assert not p.done() and p.native() in fake.events and "cuda:0" in repr(p)
    fake.run(a, n=1)
    assert p.done() and p.error() is None and p.native() == 0 and "done" in repr(p)
    assert fake.queued == 1


def test_the_host_waits_for_a_point(fake: FakeCuda, streams: Streams) -> None:
    a, ran = fake.make_stream(), []
    fake.launch(a, lambda: ran.append(1))
    p = streams.record(0, a)
    with pytest.raises(TimeoutError):
        p.wait(0.01)
    fake.start()
    p.wait(10)
    assert ran == [1]


@pytest.mark.parametrize("then", [1, 2, OWN, USER])
def test_a_stream_waits_for_a_point(fake: FakeCuda, streams: Streams, then: Any) -> None:
    """SPEC P-STREAM."""
    data, a, b = fake.make_memory(N), fake.make_stream(), number(streams, fake, then)
    fake.launch(a, writes=[(data, N)])
    p = streams.record(0, a)
    with fake.counting() as calls:
        assert p.stream_wait(b) is True
    assert work(calls) == {"cuStreamWaitEvent": 1}
    fake.launch(b, reads=[(data, N)])
    assert fake.run(b) == 0
    assert fake.run() == 2


def test_a_point_that_is_done_asks_nothing_of_a_stream(fake: FakeCuda, streams: Streams) -> None:
    """SPEC P-STREAM."""
    p = streams.record(0, 1)
    assert p.done()
    with fake.counting() as calls:
        assert p.stream_wait(1) is True
    assert not calls


def test_a_stream_of_another_device_waits_for_a_point(fake: FakeCuda, streams: Streams) -> None:
    data, a, b = fake.make_memory(N), fake.make_stream(0), fake.make_stream(1)
    fake.launch(a, writes=[(data, N)])
    assert streams.record(0, a).stream_wait(b)
    fake.launch(b, reads=[(data, N)], device=1)


@pytest.mark.parametrize("code", ["ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE", "CONTEXT_IS_DESTROYED"])
def test_a_point_fails_when_the_device_is_lost(fake: FakeCuda, streams: Streams, code: str) -> None:
    """SPEC G-LOST."""
    a = fake.make_stream()
    fake.launch(a)
    p = streams.record(0, a)
    fake.lose(0, CUresult["CUDA_ERROR_" + code])
    assert p.done()
    assert isinstance(p.error(), DeviceLostError) and code in str(p.error())
    assert p.error().__traceback__ is None      # type: ignore[union-attr]
    with pytest.raises(DeviceLostError, match=code):
        p.wait(1)
    assert p.stream_wait(1) is False
    assert p.native() == 0


def test_order_on_a_lost_device_says_so(fake: FakeCuda, streams: Streams) -> None:
    """SPEC G-LOST."""
    a, b = fake.make_stream(), fake.make_stream()
    streams.order(0, a, b)
    fake.lose()
    with pytest.raises(DeviceLostError):
        streams.order(0, a, b)


@pytest.mark.parametrize("asking", ["done", "stream_wait"])
def test_a_point_may_be_asked_by_several_threads(fake: FakeCuda, streams: Streams, monkeypatch: pytest.MonkeyPatch, asking: str) -> None:
    """One finds it done, and gives the event back, while another is about to ask."""
    a = fake.make_stream()
    fake.launch(a)
    p = streams.record(0, a)
    call = "cuThreadExchangeStreamCaptureMode" if asking == "done" else "cuStreamIsCapturing"
    real = getattr(fake, call)

    def between(*args: Any) -> Any:
        monkeypatch.setattr(fake, call, real)
        fake.run()
        thread = threading.Thread(target=p.done)
        thread.start()
        thread.join()
        return real(*args)
    monkeypatch.setattr(fake, call, between)
    assert p.done() if asking == "done" else p.stream_wait(1)
    assert p.error() is None


def test_the_default_stream_that_waits_is_the_one_of_the_place(fake: FakeCuda, adapter: CudaAdapter) -> None:
    """SPEC P-STREAM: a Point of one GPU, waited for on stream 1 of another."""
    data, a = fake.make_memory(N), fake.make_stream(0)
    fake.launch(a, writes=[(data, N)])
    p = adapter.record(interop.Device("cuda:0"), a)
    if not adapter.wait(interop.Device("cuda:1"), 1, p):
        fake.cuEventSynchronize(p.native())                 # then the host does
    fake.launch(1, reads=[(data, N)], device=1)
    assert not fake.violations


def test_a_forked_child_drops_points_in_silence() -> None:
    memkit.prints("""
from fake_cuda import FakeCuda
from interop.adapters.cuda.driver import Driver
from interop.adapters.cuda.streams import Streams
fake = FakeCuda()
streams, a = Streams(Driver(fake)), fake.make_stream()
fake.launch(a)
points = [streams.record(0, a) for _ in range(40)]
child = os.fork()
if child == 0:
    points.clear()
    os._exit(0)
print(os.waitpid(child, 0)[1])
""", "0")


def test_a_refused_query_fails_the_point_and_not_the_caller(fake: FakeCuda, streams: Streams) -> None:
    p = streams.record(0, 1)
    fake.fail_next("cuEventQuery", CUresult.CUDA_ERROR_UNKNOWN)
    assert p.done() and isinstance(p.error(), CudaError)


def test_a_point_fails_where_the_capture_mode_cannot_be_changed(fake: FakeCuda, streams: Streams) -> None:
    p = streams.record(0, 1)
    fake.fail_next("cuThreadExchangeStreamCaptureMode", CUresult.CUDA_ERROR_UNKNOWN)
    assert p.done() and isinstance(p.error(), CudaError)


def test_a_record_that_fails_keeps_the_event(fake: FakeCuda, streams: Streams) -> None:
    fake.fail_next("cuEventRecord", CUresult.CUDA_ERROR_INVALID_HANDLE)
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        streams.record(0, 1)
    streams.record(0, 1)
    assert len(fake.events) == 1


# ---- the host waits for a stream ----
def test_the_host_waits_for_a_stream_and_for_no_other(fake: FakeCuda, streams: Streams) -> None:
    a, b, ran = fake.make_stream(), fake.make_stream(), []
    for stream, name in ((a, "a"), (b, "b"), (a, "a"), (a, "a")):
        fake.launch(stream, functools.partial(ran.append, name))
    fake.auto = True
    streams.synchronize(0, a)
    assert ran == ["a", "a", "a"]
    assert "cuStreamSynchronize" not in fake.calls


def test_the_host_waits_for_a_stream_beside_a_capture(fake: FakeCuda, streams: Streams) -> None:
    a, c = fake.make_stream(), fake.make_stream()
    fake.launch(a)
    fake.auto = True
    with fake.capturing(c) as capture:
        streams.synchronize(0, a)
    assert not capture.invalid


def test_a_stream_that_never_ends_is_a_timeout(fake: FakeCuda, streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HOST_TIMEOUT", 0.02)
    a = fake.make_stream()
    fake.launch(a)
    with pytest.raises(TimeoutError, match="stream"):
        streams.synchronize(0, a)
    assert fake._stack == []


def test_waiting_for_a_lost_device_says_so(fake: FakeCuda, streams: Streams) -> None:
    """SPEC G-LOST."""
    a = fake.make_stream()
    streams.synchronize(0, a)
    fake.lose()
    with pytest.raises(DeviceLostError):
        streams.synchronize(0, a)


def test_a_stream_is_idle_once_its_work_ran_and_unknown_in_a_capture(fake: FakeCuda, streams: Streams) -> None:
    a = fake.make_stream()
    assert streams.idle(0, a)
    fake.launch(a)
    assert not streams.idle(0, a)
    fake.run()
    assert streams.idle(0, a)
    with fake.capturing(a) as capture:
        assert not streams.idle(0, a)
    assert not capture.invalid


# ---- memory that queued work uses ----
class Memory:
    """Somebody's memory, which tells who let it go."""

    def __init__(self) -> None:
        self.where: list[int] = []

    def __del__(self) -> None:
        self.where.append(threading.get_ident())


def test_memory_is_held_until_the_streams_work_ran_and_released_elsewhere(fake: FakeCuda, streams: Streams) -> None:
    a, memory = fake.make_stream(), Memory()
    where = memory.where
    fake.launch(a)
    streams.keep(0, a, LARGE, memory)
    del memory
    time.sleep(0.02)
    assert where == []
    fake.run()
    assert memkit.until(lambda: where)
    assert where != [threading.get_ident()]


def test_memory_is_let_go_at_once_where_nothing_is_queued(fake: FakeCuda, streams: Streams) -> None:
    memory = Memory()
    where = memory.where
    streams.keep(0, fake.make_stream(), LARGE, memory)
    del memory
    assert where == [threading.get_ident()]


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuCtxPushCurrent"])
def test_keeping_memory_raises_nothing(fake: FakeCuda, streams: Streams, call: str) -> None:
    streams.driver.context(0)
    fake.fail_next(call, CUresult.CUDA_ERROR_INVALID_HANDLE)
    streams.keep(0, 1, LARGE, object())


def test_memory_of_a_lost_device_is_let_go(fake: FakeCuda, streams: Streams) -> None:
    """SPEC G-LOST."""
    a, memory = fake.make_stream(), Memory()
    where = memory.where
    fake.launch(a)
    keep_until(streams.record(0, a), memory)
    del memory
    fake.lose()
    assert memkit.until(lambda: where)


# ---- devices ----
def test_a_device_that_is_not_there_is_named(fake: FakeCuda) -> None:
    with pytest.raises(ExchangeError, match="cuda:2: this process sees 2"):
        Driver(fake).context(2)


def test_threads_share_one_context(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, together, get = Driver(fake), threading.Barrier(8), fake.cuDeviceGet
    monkeypatch.setattr(fake, "cuDeviceGet", lambda *a: (together.wait(10), get(*a))[1])
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(driver.context(0))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(map(id, seen))) == 1         # retained more than once perhaps, which the driver counts
    driver.context(0)
    assert fake.calls["cuDevicePrimaryCtxRetain"] <= 8


def test_the_current_device_is_not_made_current_again(fake: FakeCuda) -> None:
    driver = Driver(fake)
    driver.context(0)
    with fake.current_device(0), fake.counting() as calls, driver.using(0):
        pass
    assert calls == {"cuCtxGetCurrent": 1}


@pytest.mark.parametrize("current", [None, 0, 1])
def test_the_core_enters_a_device_and_leaves_it(fake: FakeCuda, adapter: CudaAdapter, current: int | None) -> None:
    """SPEC G-CONTEXT."""
    with contextlib.ExitStack() as block:
        if current is not None:
            block.enter_context(fake.current_device(current))
        before = list(fake._stack)
        token = adapter.enter(1)
        assert fake._stack[-1] == 1
        assert (token is None) == (current == 1)
        if token is not None:
            adapter.leave(token)
        assert fake._stack == before


def test_the_only_device_need_not_be_entered() -> None:
    fake = FakeCuda(1)
    adapter = CudaAdapter(table=fake)
    adapter.enter(0)
    with fake.counting() as calls:
        assert adapter.enter(0) is None
    assert not calls


def test_a_device_is_its_uuid_whatever_its_number(fake: FakeCuda) -> None:
    """SPEC G-UUID."""
    turned = Driver(FakeCuda(visible=(1, 0)))
    driver = Driver(fake)
    assert len(driver.uuid(0)) == 16
    assert [driver.uuid(0), driver.uuid(1)] == [turned.uuid(1), turned.uuid(0)]


def test_a_machine_without_a_gpu_has_no_driver() -> None:
    """SPEC G-DRIVER."""
    assert not Driver(FakeCuda(0)).available()
    broken = FakeCuda()
    broken.fail_next("cuInit", CUresult.CUDA_ERROR_NO_DEVICE)
    assert not Driver(broken).available()
    assert Driver(FakeCuda()).available()


def test_importing_interop_and_exchange_on_the_host_load_no_driver() -> None:
    """SPEC G-DRIVER."""
    memkit.prints("""
import numpy as np
interop.to(np.ones(3), "numpy", copy=True)
interop.copyto(np.ones(3), np.zeros(3))
print(any(name.split(".")[0] == "cuda" for name in sys.modules))
""", "False")


def test_attributes_are_asked_by_name(fake: FakeCuda) -> None:
    fake.attributes[1][102] = 0
    driver = Driver(fake)
    assert [driver.attribute(d, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") for d in (0, 1)] == [1, 0]


def test_relaxed_mode_ends_with_its_block(fake: FakeCuda) -> None:
    driver = Driver(fake)
    with pytest.raises(KeyError), driver.relaxed():
        assert fake._local.mode == 2
        raise KeyError
    assert fake._local.mode == 0


def test_a_forked_child_gets_a_clear_error_and_touches_nothing(fake: FakeCuda, streams: Streams) -> None:
    """SPEC G-FORK."""
    a = fake.make_stream()
    fake.launch(a)
    p = streams.record(0, a)
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            errors = [type(p.error()).__name__ for _ in range(p.done())]
            for ask in (lambda: streams.order(0, 1, a), lambda: streams.record(0, a), lambda: streams.synchronize(0, a)):
                try:
                    ask()
                except ExchangeError as e:
                    errors.append("spawn" if "before fork" in str(e) and "spawn" in str(e) else repr(e))
            streams.keep(0, a, LARGE, object())
            os.write(say, " ".join(errors).encode())
        finally:
            os._exit(0)
    os.close(say)
    os.waitpid(child, 0)
    with open(said) as f:
        assert f.read() == "ExchangeError spawn spawn spawn"
    assert not p.done()


# ---- pointers ----
def _mapped(fake: FakeCuda, exportable: bool = True) -> tuple[int, int]:
    """Reservation and handle of virtual memory with two chunks, the second one mapped."""
    prop = fake.CUmemAllocationProp()       # type: ignore[attr-defined]
    prop.type, prop.location.type, prop.location.id, prop.requestedHandleTypes = 1, 1, 1, int(exportable)
    size = 2 << 20
    handle, base = fake.cuMemCreate(size, prop, 0)[1], int(fake.cuMemAddressReserve(2 * size, 0, 0, 0)[1])
    assert not fake.cuMemMap(base + size, size, 0, handle, 0)[0]
    access = fake.CUmemAccessDesc()         # type: ignore[attr-defined]
    access.location.type, access.location.id, access.flags = 1, 1, 3
    assert not fake.cuMemSetAccess(base + size, size, [access], 1)[0]
    return base, int(handle)


@pytest.mark.parametrize("kind", ["device", "managed", "pinned", "pool", "registered"])
def test_a_pointer_is_told_by_where_it_lies(fake: FakeCuda, kind: str) -> None:
    """SPEC G-POINTER."""
    driver, base = Driver(fake), fake.make_memory(4096, 1, kind)
    p = classify(driver, base + 100)
    assert (p.kind, p.device, p.base, p.nbytes, p.exportable) == ("pinned" if kind == "registered" else kind, 1, base, 4096, False)
    assert p.dl_type == {"pinned": 3, "registered": 3, "managed": 13}.get(kind, 2)


@pytest.mark.parametrize("exportable", [False, True])
def test_virtual_memory_is_told_and_whether_it_can_be_exported(fake: FakeCuda, exportable: bool) -> None:
    """SPEC G-POINTER."""
    driver = Driver(fake)
    driver.context(0)
    base, handle = _mapped(fake, exportable)
    p = classify(driver, base + (2 << 20) + 64)
    assert (p.kind, p.device, p.exportable, p.dl_type) == ("virtual", 1, exportable, 2)
    assert (p.base, p.nbytes) == (base + (2 << 20), 2 << 20)        # of the mapping: the reservation may hold many
    assert fake.physical[handle].references == 1            # the question left nothing behind
    fake.cuMemUnmap(base + (2 << 20), 2 << 20), fake.cuMemRelease(handle), fake.cuMemAddressFree(base, 4 << 20)


@pytest.mark.parametrize("what", ["host", "nobody", "null", "freed"])
def test_an_address_that_is_not_cudas_is_refused_by_value(fake: FakeCuda, what: str) -> None:
    """SPEC G-POINTER."""
    driver = Driver(fake)
    address = {"host": id(fake), "nobody": 0x1000, "null": 0, "freed": fake.make_memory(64)}[what]
    if what == "freed":
        with driver.using(0):
            fake.cuMemFree(address)
    with pytest.raises(ExchangeError, match=f"{address:#x} is not"):
        classify(driver, address)


def test_a_refused_question_about_a_pointer_is_an_exchange_error(fake: FakeCuda) -> None:
    fake.fail_next("cuPointerGetAttributes", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(ExchangeError, match="is not CUDA's"):
        classify(Driver(fake), 0x1000)


def test_asking_about_a_pointer_needs_no_current_device(fake: FakeCuda) -> None:
    driver, base = Driver(fake), fake.make_memory(64)
    with fake.counting() as calls:
        assert classify(driver, base).kind == "device"
    assert "cuCtxPushCurrent" not in calls
