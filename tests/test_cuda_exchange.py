"""Tensors on a GPU go from one framework to another: whose stream is told, what is ordered, how long memory stays. On the fake driver."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import fake_cupy
import pytest
from cuda_kit import Rig, injecting, rig, wait_for, work
from support import producer

import interop
from interop import ExchangeError, _core, registry
from interop.adapters.cuda.adapter import CudaAdapter
from interop.contract import Adapter
from interop.testing import Capsule, Consumed, Forged, ForgedTable, Producer, exchange_table

N = 64
U8 = (1, 8, 1)


@pytest.fixture
def cuda() -> Iterator[Rig]:
    """interop's adapter on a fake driver of two devices; in the end nothing illegal has happened there and nothing is left."""
    with rig() as made:
        yield made


@pytest.fixture
def cp(cuda: Rig) -> Iterator[Any]:
    """A small CuPy on the same driver."""
    with fake_cupy.installed(cuda.fake) as cupy:
        yield cupy


def made(cuda: Rig, device: Any = (2, 0), **more: Any) -> Producer:
    """A producer of device memory that notes how it is asked."""
    address = cuda.fake.make_memory(N, device[1], "managed" if device[0] == 13 else "device")
    return producer((N,), U8, device, data=address, **more)


def ordered(cuda: Rig, first: int, then: int) -> bool:
    """Whether all that one stream was given comes before what the other is given next."""
    a, b = (cuda.fake.streams[s] for s in (first, then))
    return all(b.clock.get(key, 0) >= tick for key, tick in a.clock.items())


class Table:
    """A framework of the exchange table: its objects hold Consumed tensors, its current stream is `now`."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.name = f"tabled{next(_serial)}"
        self.forged: dict[Any, Forged] = {}
        self.table = ForgedTable(from_py=lambda x: self.forged[x], borrow=lambda x: self.forged[x], to_py=self._make,
                                 stream=lambda _: self.now)
        self.type = self.table.make_type("Array", __module__=self.name)
        module = types.ModuleType(self.name)
        module.Array = self.type  # type: ignore[attr-defined]
        sys.modules[self.name] = module
        adapter = type(self.name, (Adapter,), {"name": self.name, "types": (f"{self.name}.Array",), "reads": "table", "table": "Array"})
        registry.register(adapter())

    def _make(self, managed: Consumed) -> Any:
        x = self.type()
        x.managed = managed      # type: ignore[attr-defined]
        return x

    def array(self, address: int, device: Any = (2, 0)) -> Any:
        x = self.type()
        self.forged[x] = Forged((N,), U8, device=device, data=address)
        return x

    def close(self) -> None:
        registry.unregister(self.name)
        del sys.modules[self.name]


_serial = itertools.count()
Make = Callable[[int], Table]


@pytest.fixture
def tabled() -> Iterator[Callable[[int], Table]]:
    """Makes frameworks of the exchange table, each with a current stream."""
    made: list[Table] = []

    def make(now: int) -> Table:
        made.append(Table(now))
        return made[-1]

    yield make
    for t in made:
        t.close()


# ---- whose stream the producer is told ----
@pytest.mark.parametrize("device", [0, 1])
def test_a_producer_is_told_the_targets_current_stream(cuda: Rig, cp: Any, device: int) -> None:
    """SPEC X-STREAM-4."""
    p, s = made(cuda, (2, device)), cp.cuda.Stream(cuda.stream(device), device)
    with s:
        x = interop.to(p, "cupy")
    assert p.calls[-1]["stream"] == s.ptr
    assert x.data.device_id == device
    assert cuda.adapter.streams.made == {}          # nobody needed one of interop's


def test_a_frameworks_null_stream_is_told_as_the_legacy_one(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-4, X-STREAM-1: never 0."""
    p = made(cuda)
    interop.to(p, "cupy")
    assert p.calls[-1]["stream"] == 1


@pytest.mark.parametrize("device", [0, 1])
def test_a_bare_tensor_is_made_ready_on_interops_own_stream(cuda: Rig, device: int) -> None:
    """SPEC X-STREAM-4."""
    p = made(cuda, (2, device))
    t = interop.as_tensor(p)
    own = cuda.streams.made[device]
    assert p.calls[-1]["stream"] == own == _core.pending_stream(t)
    assert cuda.fake.streams[own].device == device and not cuda.fake.streams[own].blocking


@pytest.mark.parametrize("how", ["number", "object"])
@pytest.mark.parametrize("target", ["cupy", None])
def test_a_producer_is_told_the_users_stream(cuda: Rig, cp: Any, how: str, target: str | None) -> None:
    """SPEC X-STREAM-4, X-STREAM-1: before any other."""
    p, number = made(cuda), cuda.stream()
    stream: Any = number if how == "number" else type("Stream", (), {"__cuda_stream__": (0, number)})()
    with cp.cuda.Stream(cuda.stream()):
        x = interop.to(p, "cupy", stream=stream) if target else interop.as_tensor(p, stream=stream)
    assert p.calls[-1]["stream"] == number
    assert target or _core.pending_stream(x) == number


def test_a_producer_is_told_the_current_stream_of_a_target_with_a_table(cuda: Rig, tabled: Make) -> None:
    """SPEC X-STREAM-4: which is what its table says, and then nothing is ordered."""
    framework, p = tabled(cuda.stream()), made(cuda)
    for n in (0, 1):
        cuda.streams.driver.context(n)
    cuda.adapter.enter(1)                           # the devices are counted
    cuda.adapter.leave(None)
    with cuda.fake.counting() as calls:
        x = interop.to(p, framework.name)
    assert p.calls[-1]["stream"] == framework.now
    assert {c for c in framework.table.calls if c[0] == "stream"} == {("stream", (2, 0))}
    assert not work(calls)
    x.managed.delete()


# ---- what is ordered, and what that costs ----
def test_equal_streams_cost_no_driver_call_from_framework_to_framework(cuda: Rig, cp: Any, tabled: Make) -> None:
    """SPEC X-STREAM-3: no record, no wait, no event, and nothing to keep when it is dropped."""
    with cp.cuda.Stream(cuda.stream()) as s:
        t = interop.as_tensor(cp.empty((N,), "u1"))
        framework = tabled(s.ptr)
        with cuda.fake.counting() as calls:
            a, b = interop.to(t, "cupy"), interop.to(t, framework.name)
            b.managed.delete()
            del a
        assert not work(calls)


@pytest.mark.parametrize("device", [0, 1])
def test_different_streams_cost_one_record_and_one_wait_from_one_straight_to_the_other(cuda: Rig, cp: Any, device: int) -> None:
    """SPEC X-STREAM-4: never the device or the host, and no stream of interop's between them."""
    fake, a, b = cuda.fake, cp.cuda.Stream(cuda.stream(device), device), cp.cuda.Stream(cuda.stream(device), device)
    with cp.cuda.Device(device), a:
        c = cp.empty((N,), "u1")
        fake.launch(a.ptr, lambda: fake.poke(c.data.ptr, b"slow"), writes=[(c.data.ptr, N)])
        t = interop.as_tensor(c)
    with b:
        first = interop.to(t, "cupy")               # the event and the context are made
        with fake.counting() as calls:
            x = interop.to(t, "cupy")
    assert work(calls) == {"cuEventRecord": 1, "cuStreamWaitEvent": 1}
    assert ordered(cuda, a.ptr, b.ptr) and cuda.streams.made == {}
    seen: list[bytes] = []
    fake.launch(b.ptr, lambda: seen.append(fake.peek(x.data.ptr, 4)), reads=[(x.data.ptr, N)])
    fake.run(b.ptr)
    assert seen == []                               # it waits for the writer
    fake.run()
    assert seen == [b"slow"]
    del first


@pytest.mark.parametrize("way", ["cupy to table", "table to cupy", "table to table", "table to Tensor to cupy"])
def test_work_goes_straight_from_a_frameworks_stream_to_anothers(cuda: Rig, cp: Any, way: str, tabled: Make) -> None:
    """SPEC X-STREAM-4."""
    fake, a, b = cuda.fake, cuda.stream(), cuda.stream()
    first, then = tabled(a), tabled(b)
    x: Any
    if way.startswith("cupy"):
        with cp.cuda.Stream(a):
            x = interop.as_tensor(cp.empty((N,), "u1"))
        address = x.ptr
    else:
        address = fake.make_memory(N)
        x = first.array(address)
        if "Tensor" in way:
            x = interop.as_tensor(x)
            assert _core.pending_stream(x) == a
    fake.launch(a, writes=[(address, N)])
    with cp.cuda.Stream(b), fake.counting() as calls:
        y = interop.to(x, "cupy" if way.endswith("cupy") else then.name)
    assert (calls["cuEventRecord"], calls["cuStreamWaitEvent"]) == (1, 1)
    fake.launch(b, reads=[(address, N)])            # a race, if it were not ordered
    assert ordered(cuda, a, b) and cuda.streams.made == {}
    if hasattr(y, "managed"):
        y.managed.delete()


def test_without_the_order_the_fake_sees_the_race_between_frameworks(cuda: Rig, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: this is one with an order() that does nothing."""
    monkeypatch.setattr(cuda.adapter, "order", lambda *a: None)
    a, b = cuda.stream(), cuda.stream()
    with cp.cuda.Stream(a):
        t = interop.as_tensor(cp.empty((N,), "u1"))
        cuda.fake.launch(a, writes=[(t.ptr, N)])
    with cp.cuda.Stream(b):
        interop.to(t, "cupy")
    cuda.fake.launch(b, reads=[(t.ptr, N)])
    assert "data race" in cuda.fake.violations[0]
    del t
    gc.collect()
    cuda.fake.violations.clear()


@pytest.mark.parametrize("target", ["cupy", "table"])
def test_a_users_stream_stands_in_for_the_targets_current_one(cuda: Rig, cp: Any, target: str, tabled: Make) -> None:
    """SPEC X-STREAM-4."""
    fake, a, current, given = cuda.fake, cuda.stream(), cuda.stream(), cuda.stream()
    with cp.cuda.Stream(a):
        t = interop.as_tensor(cp.empty((N,), "u1"))
        fake.launch(a, writes=[(t.ptr, N)])
    with cp.cuda.Stream(current):
        x = interop.to(t, "cupy" if target == "cupy" else tabled(current).name, stream=given)
    assert ordered(cuda, a, given) and not fake.streams[current].clock
    if target == "table":
        x.managed.delete()


# ---- how long memory stays ----
def handed_over(cuda: Rig, cp: Any, how: str, tabled: Make | None = None) -> tuple[Any, int, int]:
    """CuPy's memory, freed in the order of its own stream, with a consumer on another: what the consumer has, its stream, the address."""
    with cp.cuda.Stream(cuda.stream()):
        c = cp.empty((N,), "u1")
        t = interop.as_tensor(c)
    address, theirs = c.data.ptr, cuda.stream()
    del c
    if how == "capsule":
        return Capsule(t.__dlpack__(stream=theirs, max_version=(1, 3))).consume(), theirs, address
    if how == "cupy":
        with cp.cuda.Stream(theirs):
            return interop.to(t, "cupy"), theirs, address
    if how == "table" and tabled is not None:
        return interop.to(t, tabled(theirs).name).managed, theirs, address
    table = exchange_table(interop.Tensor)
    return table.from_py(t), table.stream((2, 0)), address


HOW = ["cupy", "capsule", "table", "Tensor's table"]


def drop(x: list[Any]) -> None:
    """The consumer lets go."""
    if hasattr(x[0], "delete"):
        x[0].delete()
    x.clear()
    gc.collect()


@pytest.mark.parametrize("how", HOW)
def test_memory_stays_until_the_stream_that_uses_it_is_done(cuda: Rig, cp: Any, how: str, tabled: Make) -> None:
    """SPEC X-STREAM-5 (of Tensor's own table: X-TABLE-7): dropped while the consumer's work is queued, freed after it."""
    fake = cuda.fake
    x, theirs, address = handed_over(cuda, cp, how, tabled)
    fake.launch(theirs, writes=[(address, N)])
    held = [x]
    del x
    drop(held)
    assert fake.calls["cuMemFreeAsync"] == 0 and fake.find(address) is not None
    fake.run()
    wait_for(lambda: fake.calls["cuMemFreeAsync"] == 1, "it is never freed")
    assert not fake.violations


@pytest.mark.parametrize("how", HOW)
def test_without_keeping_it_the_fake_sees_the_use_after_free(cuda: Rig, cp: Any, how: str, tabled: Make) -> None:
    """The test above can fail: this is it with a driver that keeps nothing."""
    fake, dumb = cuda.fake, CudaAdapter(table=cuda.fake)
    dumb.keep = None  # type: ignore[method-assign, assignment]
    _core.set_cuda_ops(dumb)
    x, theirs, address = handed_over(cuda, cp, how, tabled)
    fake.launch(theirs, writes=[(address, N)])
    held = [x]
    del x
    drop(held)
    assert fake.calls["cuMemFreeAsync"] == 1
    assert "data race: cuMemFreeAsync" in fake.violations[0]
    fake.violations.clear()


def test_memory_dropped_early_is_used_after_it_was_freed(cuda: Rig, cp: Any) -> None:
    """The fake sees the other half too: work that is given to a stream after the memory has gone."""
    x, theirs, address = handed_over(cuda, cp, "cupy")
    del x
    gc.collect()
    cuda.settle()
    wait_for(lambda: cuda.fake.calls["cuMemFreeAsync"] == 1, "it is never freed")
    cuda.fake.launch(theirs, writes=[(address, N)])
    assert "use after free" in cuda.fake.violations[0]
    cuda.fake.violations.clear()


@pytest.mark.parametrize("how", ["cupy", "capsule"])
def test_equal_streams_need_nothing_kept(cuda: Rig, cp: Any, how: str) -> None:
    """SPEC X-STREAM-5: whoever frees does it in the order of that stream; no event, no waiting thread."""
    fake = cuda.fake
    with cp.cuda.Stream(cuda.stream()) as s:
        t = interop.as_tensor(cp.empty((N,), "u1"))
        held = [interop.to(t, "cupy") if how == "cupy" else Capsule(t.__dlpack__(stream=s.ptr, max_version=(1, 3))).consume()]
        fake.launch(s.ptr, writes=[(t.ptr, N)])
        del t
        drop(held)
    assert fake.calls["cuMemFreeAsync"] == 1 and fake.calls["cuEventRecord"] == 0
    assert not fake.violations


def test_no_ordering_keeps_nothing(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-5, X-STREAM-1: -1 says that the consumer orders by itself."""
    with cp.cuda.Stream(cuda.stream()):
        t = interop.as_tensor(cp.empty((N,), "u1"))
    held = [Capsule(t.__dlpack__(stream=-1, max_version=(1, 3))).consume()]
    del t
    drop(held)
    assert cuda.fake.calls["cuMemFreeAsync"] == 1 and cuda.fake.calls["cuEventRecord"] == 0


def test_memory_stays_for_each_of_several_consumers(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-5: the last stream that is done lets it go."""
    fake, a, b = cuda.fake, cuda.stream(), cuda.stream()
    with cp.cuda.Stream(cuda.stream()):
        t = interop.as_tensor(cp.empty((N,), "u1"))
    address = t.ptr
    for s in (a, b):
        with cp.cuda.Stream(s):
            x = interop.to(t, "cupy")
        fake.launch(s, reads=[(address, N)])
        del x
    del t
    gc.collect()
    fake.run(a)
    assert not threading.Event().wait(0.02) and fake.calls["cuMemFreeAsync"] == 0
    fake.run()
    wait_for(lambda: fake.calls["cuMemFreeAsync"] == 1, "it is never freed")


@pytest.mark.parametrize("gil", [True, False])
def test_a_deleter_on_a_foreign_thread_calls_no_driver(cuda: Rig, cp: Any, gil: bool) -> None:
    """SPEC X-STREAM-5: the release is interop's, on an interpreter thread, never in a driver's callback."""
    fake = cuda.fake
    x, theirs, address = handed_over(cuda, cp, "capsule")
    fake.launch(theirs, writes=[(address, N)])
    with injecting(fake, frozenset()) as calls:
        if gil:
            x.delete_from_pthread()
        else:
            thread = threading.Thread(target=x.delete, kwargs={"gil": False})
            thread.start()
            thread.join()
        fake.run()
        wait_for(lambda: fake.calls["cuMemFreeAsync"] == 1, "it is never freed")
        assert not any(isinstance(t, threading._DummyThread) for t in calls.threads)
        assert "cuEventRecord" in calls.seen


def test_keeping_memory_uses_the_device_that_it_is_on(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-5, X-STREAM-7: and the current device is the caller's afterwards."""
    fake, a, b = cuda.fake, cp.cuda.Stream(cuda.stream(1), 1), cp.cuda.Stream(cuda.stream(1), 1)
    with fake.current_device(0):
        with cp.cuda.Device(1), a:
            t = interop.as_tensor(cp.empty((N,), "u1"))
        with b:
            x = interop.to(t, "cupy")
        fake.launch(b.ptr, writes=[(t.ptr, N)], device=1)
        del x, t
        gc.collect()
        assert fake._stack == [0] and fake.calls["cuMemFreeAsync"] == 0
        fake.run()
    wait_for(lambda: fake.calls["cuMemFreeAsync"] == 1, "it is never freed")


# ---- Tensor's own exchange table ----
def test_tensors_table_gives_memory_ready_on_interops_own_stream(cuda: Rig) -> None:
    """SPEC X-TABLE-7: behind what was pending, for one record and one wait."""
    fake, table, s = cuda.fake, exchange_table(interop.Tensor), cuda.stream()
    t = interop.as_tensor(made(cuda), stream=s)
    fake.launch(s, writes=[(t.ptr, N)])
    own = table.stream((2, 0))
    with fake.counting() as calls:
        got = table.from_py(t)
    assert own == cuda.streams.made[0] and ordered(cuda, s, own)
    assert (calls["cuEventRecord"], calls["cuStreamWaitEvent"]) == (1, 1)
    fake.launch(own, reads=[(t.ptr, N)])
    got.delete()


def test_tensors_table_lends_what_interops_own_stream_frees(cuda: Rig, cp: Any) -> None:
    """SPEC X-TABLE-5, X-STREAM-5: a kernel launched there while the object lives needs nothing kept. Other memory is refused, because
    nobody would see when the borrower lets go.
    """
    fake, table = cuda.fake, exchange_table(interop.Tensor)
    own = table.stream((2, 0))
    with cp.cuda.Stream(own):
        t = interop.as_tensor(cp.empty((N,), "u1"))
    assert table.borrow(t)["data"] == t.ptr
    fake.launch(own, writes=[(t.ptr, N)])
    with cp.cuda.Stream(cuda.stream()):
        other = interop.as_tensor(cp.empty((N,), "u1"))
    with pytest.raises(ExchangeError, match="managed_tensor_from_py_object_no_sync"):
        table.borrow(other)


def test_the_current_stream_of_tensors_table_is_that_of_the_device(cuda: Rig) -> None:
    """SPEC X-TABLE-7: the same each time, another on another device, none for the host."""
    table = exchange_table(interop.Tensor)
    found = [table.stream((2, n)) for n in (0, 1, 0, 1)]
    assert found[:2] == found[2:] == [cuda.streams.made[0], cuda.streams.made[1]]
    assert table.stream((1, 0)) == 0
    assert [cuda.fake.streams[s].device for s in found[:2]] == [0, 1]


def test_tensors_table_refuses_memory_of_a_captured_stream(cuda: Rig) -> None:
    """SPEC X-TABLE-7, X-STREAM-6: interop's own stream is no part of anybody's capture."""
    s = cuda.stream()
    t = interop.as_tensor(made(cuda), stream=s)
    cuda.streams.own(0)
    with cuda.fake.capturing(s) as capture:
        with pytest.raises(ExchangeError, match="captured"):
            exchange_table(interop.Tensor).from_py(t)
        assert not capture.invalid


def test_what_comes_in_through_tensors_table_is_ready_on_the_stream_that_it_names(cuda: Rig, cp: Any) -> None:
    """SPEC X-TABLE-7: a caller orders its work before `current_work_stream` and gives; later consumers come after that stream."""
    fake, table, theirs, b = cuda.fake, exchange_table(interop.Tensor), cuda.stream(), cuda.stream()
    address = fake.make_memory(N)
    fake.launch(theirs, writes=[(address, N)])
    cuda.streams.order(0, theirs, table.stream((2, 0)))
    t = table.to_py(Capsule(Forged((N,), U8, device=(2, 0), data=address).capsule()).consume())
    with cp.cuda.Stream(b):
        interop.to(t, "cupy")
    assert ordered(cuda, theirs, b)


# ---- capture ----
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_equal_streams_are_shared_in_a_capture_without_a_driver_call(cuda: Rig, cp: Any, mode: int, tabled: Make) -> None:
    """SPEC X-STREAM-6: also -1."""
    with cp.cuda.Stream(cuda.stream()) as s:
        t = interop.as_tensor(cp.empty((N,), "u1"))
        with cuda.fake.capturing(s.ptr, mode) as capture, cuda.fake.counting() as calls:
            x = interop.to(t, "cupy")
            t.__dlpack__(stream=s.ptr, max_version=(1, 3))
            t.__dlpack__(stream=-1, max_version=(1, 3))
            y = interop.to(t, tabled(s.ptr).name)
            y.managed.delete()
        assert not work(calls) and not capture.invalid
        del x


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize("target", ["cupy", "table", "__dlpack__"])
def test_different_streams_are_refused_in_a_capture_which_goes_on(cuda: Rig, cp: Any, which: str, target: str, tabled: Make) -> None:
    """SPEC X-STREAM-6: before a call that would touch it; the refusal names what to do."""
    fake, a, b = cuda.fake, cuda.stream(), cuda.stream()
    cuda.streams.driver.context(0)
    t = interop.as_tensor(made(cuda), stream=a)
    with fake.capturing(a if which == "source" else b) as capture, cp.cuda.Stream(b), fake.counting() as calls:
        with pytest.raises(ExchangeError, match="same stream on both sides"):
            if target == "__dlpack__":
                t.__dlpack__(stream=b, max_version=(1, 3))
            else:
                interop.to(t, "cupy" if target == "cupy" else tabled(b).name)
        assert not capture.invalid and not capture.work
    assert not work(calls)


def test_dropping_in_a_capture_leaves_it_whole_and_memory_goes_when_it_is_over(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-5, X-STREAM-6: when the stream is done can be asked only then."""
    p, theirs = made(cuda), cuda.stream()
    with cp.cuda.Stream(theirs):
        x = interop.to(interop.as_tensor(p, stream=cuda.stream()), "cupy")
    with cuda.fake.capturing(theirs) as capture:
        del x
        gc.collect()
        asked = cuda.fake.calls["cuStreamIsCapturing"]
        wait_for(lambda: cuda.fake.calls["cuStreamIsCapturing"] > asked + 2 or p.forged.deleted, "nobody asks")
        assert not capture.invalid and not capture.work
    wait_for(lambda: p.forged.deleted == 1, "it is never let go")


def test_what_waits_beside_a_capture_leaves_it_whole(cuda: Rig, cp: Any) -> None:
    """SPEC X-STREAM-6: interop's threads ask for others while somebody captures globally."""
    fake, p, theirs = cuda.fake, made(cuda), cuda.stream()
    with cp.cuda.Stream(theirs):
        x = interop.to(interop.as_tensor(p, stream=cuda.stream()), "cupy")
    fake.launch(theirs, writes=[(p.forged.data, N)])
    with fake.capturing(cuda.stream()) as capture:
        del x
        gc.collect()
        assert p.forged.deleted == 0
        fake.run()
        wait_for(lambda: p.forged.deleted == 1, "it is never freed")
        assert not capture.invalid


# ---- the producer's device ----
class Insists:
    """A producer that takes for granted that its device is current, as some do."""

    def __init__(self, cuda: Rig, device: int, error: BaseException | None = None) -> None:
        self.fake, self.device, self.error = cuda.fake, device, error
        self.forged = Forged((N,), U8, device=(2, device), data=cuda.fake.make_memory(N, device))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(self, **keywords: Any) -> Any:
        assert self.fake._stack[-1:] == [self.device]
        if self.error is not None:
            raise self.error
        return self.forged.capsule()


@pytest.mark.parametrize("current", [None, 0, 1])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("target", ["interop", "cupy"])
def test_a_producer_is_asked_with_its_device_current(cuda: Rig, cp: Any, device: int, current: int | None, target: str) -> None:
    """SPEC X-STREAM-7."""
    fake, p = cuda.fake, Insists(cuda, device)
    if current is not None:
        fake.current_device(current).__enter__()
    before = list(fake._stack)
    interop.to(p, target)
    assert fake._stack == before
    fake._stack.clear()


@pytest.mark.parametrize("current", [None, 0, 1])
@pytest.mark.parametrize("error", [ValueError("no"), BufferError("no"), KeyboardInterrupt()])
def test_the_callers_device_is_current_again_after_an_error(cuda: Rig, current: int | None, error: BaseException) -> None:
    """SPEC X-STREAM-7."""
    fake, p = cuda.fake, Insists(cuda, 1, error=error)
    if current is not None:
        fake.current_device(current).__enter__()
    before = list(fake._stack)
    with pytest.raises(type(error)):
        interop.as_tensor(p)
    assert fake._stack == before
    fake._stack.clear()


def test_a_producer_on_the_only_device_costs_no_question() -> None:
    """SPEC X-STREAM-7: with one GPU there is nothing to enter."""
    with rig(1) as cuda:
        cuda.adapter.own_stream(0)
        interop.as_tensor(made(cuda), stream=7)
        with cuda.fake.counting() as calls:
            interop.as_tensor(made(cuda), stream=7)
        assert not calls
