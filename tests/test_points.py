"""Points: when is it ready. SPEC P-*."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import toy
from memkit import clean_toy, until

import interop
from interop import points
from interop.contract import point


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


class Fence:
    """Something of a third party's."""

    def __init__(self) -> None:
        self.event, self.error, self.asked = threading.Event(), None, 0

    def done(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.event.is_set()

    def wait(self, timeout: float | None = None) -> None:
        self.event.wait(timeout)

    def point(self, **more: Any) -> interop.Point:
        return point(done=self.done, wait=self.wait, **more)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    return seen


# --- done and wait ------------------------------------------------------------------------------------------------------
def test_a_point_is_done_once_its_fence_is() -> None:
    """SPEC P-DONE"""
    f = Fence()
    p = f.point()
    assert not p.done()
    f.event.set()
    assert p.done()
    p.wait()
    p.wait(0)


def test_a_finished_fence_is_not_asked_again() -> None:
    """SPEC P-DONE: what its functions hold is let go"""
    f = Fence()
    f.event.set()
    p = f.point()
    assert [p.done() for _ in range(5)] == [True] * 5
    assert f.asked == 1


def test_wait_returns_when_another_thread_signals() -> None:
    """SPEC P-WAIT"""
    f = Fence()
    threading.Timer(0.05, f.event.set).start()
    start = time.monotonic()
    f.point().wait(10)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("timeout", [0, 0.05, 0.25])
def test_wait_gives_up_after_its_timeout(timeout: float) -> None:
    """SPEC P-WAIT: TimeoutError names the point"""
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="pending"):
        Fence().point().wait(timeout)
    assert timeout <= time.monotonic() - start < timeout + 2


def test_a_point_without_a_wait_function_is_polled() -> None:
    """SPEC P-WAIT"""
    f = Fence()
    threading.Timer(0.05, f.event.set).start()
    point(done=f.done).wait(10)


def test_waiting_lets_other_threads_run() -> None:
    """SPEC P-WAIT: the GIL is released"""
    f, n = Fence(), 0
    waiter = threading.Thread(target=f.point().wait)
    waiter.start()
    for _ in range(1000):
        n += 1      # noqa: SIM113
    f.event.set()
    waiter.join(5)
    assert not waiter.is_alive()


@pytest.mark.parametrize("with_wait", [True, False])
def test_ctrl_c_ends_a_wait(with_wait: bool) -> None:
    """SPEC P-WAIT: KeyboardInterrupt gets in within slices of 100 ms"""
    f = Fence()
    p = f.point() if with_wait else point(done=f.done)
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        p.wait(20)
    assert time.monotonic() - start < 3
    assert not p.done()


# --- failing ------------------------------------------------------------------------------------------------------------
def test_a_failed_point_is_done_and_gives_its_error_to_every_waiter() -> None:
    """SPEC P-FAIL"""
    f = Fence()
    p = f.point()
    f.error = RuntimeError("device lost")
    assert p.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"):
            p.wait()
    assert p.error() is f.error


def test_an_error_raised_by_the_wait_function_is_the_points() -> None:
    """SPEC P-FAIL"""
    def wait(seconds: float) -> None:
        raise OSError("gone")
    p = point(done=lambda: False, wait=wait)
    with pytest.raises(OSError, match="gone"):
        p.wait(5)
    assert p.done()


def test_a_timeout_inside_the_wait_function_is_no_failure() -> None:
    """SPEC P-FAIL: a fence that says TimeoutError is simply asked again"""
    f = Fence()

    def wait(seconds: float) -> None:
        if not f.event.wait(0.001):
            raise TimeoutError
    threading.Timer(0.05, f.event.set).start()
    point(done=f.done, wait=wait).wait(5)


# --- callbacks ----------------------------------------------------------------------------------------------------------
def test_a_callback_on_a_finished_point_runs_at_once() -> None:
    """SPEC P-CALL"""
    f, seen = Fence(), []
    f.event.set()
    p = f.point()
    p.add_done_callback(seen.append)
    assert seen == [p]


def test_each_callback_runs_once_when_the_point_is_reached() -> None:
    """SPEC P-CALL"""
    f, seen = Fence(), []
    p = f.point()
    for i in range(3):
        p.add_done_callback(lambda _, i=i: seen.append(i))
    p.add_done_callback(seen.append)
    time.sleep(0.02)
    assert seen == []
    f.event.set()
    assert until(lambda: len(seen) == 4)
    time.sleep(0.02)
    assert seen == [0, 1, 2, p]


def test_the_same_callback_given_twice_runs_twice() -> None:
    """SPEC P-CALL"""
    f, seen = Fence(), []
    p = f.point()
    p.add_done_callback(seen.append)
    p.add_done_callback(seen.append)
    f.event.set()
    assert until(lambda: len(seen) == 2)


@pytest.mark.parametrize(("early", "error"), [(True, ValueError("mine")), (False, ValueError("mine")), (False, SystemExit(3))])
def test_an_error_in_a_callback_is_reported_and_the_others_still_run(early: bool, error: BaseException, unraisable: list[Any]) -> None:
    """SPEC P-CALL: reported through sys.unraisablehook, never raised"""
    f, seen = Fence(), []
    p = f.point()

    def bad(_: interop.Point) -> None:
        raise error
    if early:
        f.event.set()
    p.add_done_callback(bad)
    p.add_done_callback(seen.append)
    f.event.set()
    assert until(lambda: seen == [p])
    assert [u.exc_value for u in unraisable] == [error]
    later = Fence()                     # and the thread that looks at points lives on
    q = later.point()
    q.add_done_callback(seen.append)
    later.event.set()
    assert until(lambda: seen == [p, q])


def test_a_point_whose_polling_raises_does_not_stop_the_callbacks_of_others(unraisable: list[Any]) -> None:
    """SPEC P-CALL: a Point of somebody's own may be broken"""
    class Broken(interop.Point):
        fail = False

        def _poll(self) -> bool:
            if self.fail:
                raise RuntimeError("broken")
            return False
    broken, f, seen = Broken(), Fence(), []
    broken.add_done_callback(seen.append)
    p = f.point()
    p.add_done_callback(seen.append)
    broken.fail = True
    time.sleep(0.02)
    f.event.set()
    assert until(lambda: p in seen, 2)


def test_callbacks_of_a_failed_point_run_too() -> None:
    """SPEC P-CALL"""
    f, seen = Fence(), []
    p = f.point()
    p.add_done_callback(lambda q: seen.append(q.error()))
    f.error = RuntimeError("x")
    assert until(lambda: seen == [f.error])


# --- all ----------------------------------------------------------------------------------------------------------------
def test_all_of_is_done_when_all_are() -> None:
    """SPEC P-ALL"""
    a, b = Fence(), Fence()
    p = points.all_of([a.point(), b.point()])
    a.event.set()
    assert not p.done()
    with pytest.raises(TimeoutError):
        p.wait(0.02)
    b.event.set()
    assert p.done()
    p.wait()


def test_all_of_nothing_and_of_finished_points_is_ready() -> None:
    """SPEC P-ALL"""
    f = Fence()
    f.event.set()
    assert points.all_of([]).done()
    assert points.all_of([f.point(), points.READY]) is points.READY


def test_all_of_fails_with_the_first_error_after_all_are_done() -> None:
    """SPEC P-ALL: an early failure does not free memory that the others still use"""
    a, b = Fence(), Fence()
    a.error = ValueError("first")
    p = points.all_of([a.point(), b.point()])
    assert not p.done()
    b.event.set()
    with pytest.raises(ValueError, match="first"):
        p.wait()


def test_the_native_forms_of_all_are_one_list() -> None:
    """SPEC P-NATIVE"""
    f = Fence()
    p = points.all_of([f.point(native=[("s", 1)]), f.point(native=lambda: [("t", 2)]), f.point(native="event")])
    assert p.native() == [("s", 1), ("t", 2), "event"]


def test_a_point_without_native_form_says_so() -> None:
    """SPEC P-NATIVE"""
    with pytest.raises(interop.ExchangeError, match="no native form"):
        Fence().point().native()


# --- await --------------------------------------------------------------------------------------------------------------
def test_awaiting_a_point_lets_the_event_loop_go_on() -> None:
    """SPEC P-AWAIT"""
    f, ticks = Fence(), []

    async def tick() -> None:
        for _ in range(5):
            ticks.append(1)
            await asyncio.sleep(0.005)
        f.event.set()

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(tick(), _awaiting(f.point())), 5)
    asyncio.run(main())
    assert len(ticks) == 5


async def _awaiting(p: interop.Point) -> None:
    await p


def test_awaiting_a_failed_point_raises_its_error() -> None:
    """SPEC P-AWAIT"""
    f = Fence()
    p = f.point()

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, setattr, f, "error", RuntimeError("lost"))
        await p
    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(main())


def test_cancelling_an_await_leaves_the_point_and_the_loop_in_order() -> None:
    """SPEC P-AWAIT"""
    f = Fence()
    p = f.point()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaiting(p), 0.02)
    asyncio.run(main())
    f.event.set()               # after its loop was closed
    p.wait(5)
    assert until(lambda: points._watcher._queue.empty())


# --- third parties ------------------------------------------------------------------------------------------------------
def test_anything_with_done_and_wait_is_a_point() -> None:
    """SPEC P-THIRD"""
    f = Fence()
    p = points.as_point(f)
    assert not p.done()
    f.event.set()
    p.wait(1)


@pytest.mark.parametrize("bad", [3, object(), "x", threading.Event()])
def test_what_has_neither_is_refused(bad: object) -> None:
    """SPEC P-THIRD"""
    with pytest.raises(TypeError, match="done"):
        points.as_point(bad)


@pytest.mark.parametrize("bad", [{"done": 3}, {"done": bool, "wait": 3}])
def test_point_takes_functions(bad: dict[str, Any]) -> None:
    """SPEC P-THIRD"""
    with pytest.raises(TypeError, match="function"):
        point(**bad)


def test_stream_wait_goes_through_the_function_given_until_the_point_is_reached() -> None:
    """SPEC P-STREAM"""
    f, streams = Fence(), []
    p = f.point(stream_wait=lambda s: streams.append(s) or s != "foreign")
    assert p.stream_wait("mine")
    assert not p.stream_wait("foreign")
    f.event.set()
    assert p.stream_wait("foreign")
    assert streams == ["mine", "foreign"]


def test_a_point_that_knows_no_streams_says_so() -> None:
    """SPEC P-STREAM: the caller then waits on the host"""
    f = Fence()
    assert not f.point().stream_wait("any")
    assert not points.all_of([f.point(stream_wait=lambda s: True), f.point()]).stream_wait("any")


# --- last write, last reads ---------------------------------------------------------------------------------------------
def test_views_and_aliases_see_the_last_write(driver: toy.Driver) -> None:
    """SPEC P-LEDGER: by bytes of the allocation"""
    c = toy.Context()
    t = interop.empty((4, 64), "uint8", device=c)
    alias = interop.as_tensor(interop.to(t, "toy"))
    lease = interop.acquire(t[1], c, "write")
    lease.release(c.fill(t[1], 7))
    for view in (t, t[1], t[1:3], t.reshape(-1)[64:65], alias, t.allocation.tensor((1,), "uint8", byte_offset=127)):
        assert not points.pending(view, "read").done(), view
    for view in (t[0], t[2:], t.allocation.tensor((64,), "uint8", byte_offset=128)):
        assert points.pending(view, "read").done(), view
    c.queue.run()
    assert points.pending(t, "read").done()


def test_reads_hold_up_writers_and_not_readers(driver: toy.Driver) -> None:
    """SPEC P-LEDGER"""
    c = toy.Context()
    t, host = interop.empty((64,), "uint8", device=c), np.zeros(64, "u1")
    interop.copyto(host, t)
    assert points.pending(t, "read").done()
    assert not points.pending(t, "write").done()
    assert not points.pending(interop.as_tensor(host), "read").done()
    c.queue.run()


def test_finished_points_leave_the_ledger(driver: toy.Driver) -> None:
    """SPEC P-LEDGER; field report B91"""
    c = toy.Context()
    t = interop.empty((64,), "uint8", device=c)
    for _ in range(50):
        lease = interop.acquire(t, c, "write")
        lease.release(c.fill(t, 1))
        c.queue.run()
    assert interop._core.ledger_size() <= 2


def test_a_read_that_failed_does_not_stand_in_the_way_of_writers(driver: toy.Driver) -> None:
    """SPEC P-LEDGER: only a failed write leaves contents undefined"""
    c = toy.Context()
    t = interop.empty((64,), "uint8", device=c)
    lease = interop.acquire(t, c, "read")
    lease.release(points.Failed(RuntimeError("reader died")))
    with t.map("read_write") as a:
        a[:] = 1
    assert c.peek(t) == bytes([1]) * 64


def test_a_failed_write_is_told_to_readers_until_a_write_succeeds(driver: toy.Driver) -> None:
    """SPEC P-LEDGER"""
    c = toy.Context()
    t = interop.empty((64,), "uint8", device=c)
    driver.fail_next("execute")
    lease = interop.acquire(t, c, "write")
    lease.release(c.fill(t, 1))
    c.queue.run()
    with pytest.raises(interop.ExchangeError, match="last write"):
        t.map("read")
    with pytest.raises(interop.ExchangeError, match="last write"):
        interop.copyto(np.zeros(64, "u1"), t)
    with t.map("write") as a:
        a[:] = 2
    with t.map("read") as a:
        assert (a == 2).all()


def test_copyto_makes_memory_good_whose_last_write_failed(driver: toy.Driver) -> None:
    """SPEC P-LEDGER: the remedy in the message, "write it again", works with copyto"""
    c = toy.Context()
    t = interop.empty((64,), "uint8", device=c)
    driver.fail_next("execute")
    lease = interop.acquire(t, c, "write")
    lease.release(c.fill(t, 1))
    c.queue.run()
    interop.copyto(t, np.full(64, 3, "u1")).wait(5)
    with t.map("read") as a:
        assert (a == 3).all()
