"""Maps of device memory: what is moved, when, and what stays readable; the order of queues and leases. SPEC L-MAP, L-STAGE, L-ORDER."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import toy
from memkit import clean_toy, readable

import interop
from interop import points

FLAVOURS = {
    "flush": {"flavour": "flush"}, "flush, incoherent": {"flavour": "flush", "coherent": False},
    "outlives": {"flavour": "outlives"}, "outlives, incoherent": {"flavour": "outlives", "coherent": False},
    "unmap": {"flavour": "unmap"}, "unmap, incoherent": {"flavour": "unmap", "coherent": False},
    "unmap, map only": {"flavour": "unmap", "copies": False},
    "unmap, map only, incoherent": {"flavour": "unmap", "copies": False, "coherent": False},
    "no map": {"flavour": None}, "no wait": {"flavour": "flush", "waits": False},
}


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


@pytest.fixture(params=FLAVOURS.values(), ids=FLAVOURS)
def c(request: pytest.FixtureRequest, driver: toy.Driver) -> toy.Context:
    return toy.Context(**request.param)


def made(c: toy.Context, shape: Any = (300,), dtype: str = "uint8") -> interop.Tensor:
    t = interop.empty(shape, dtype, device=c)
    c.poke(t, bytes(i % 251 for i in range(t.nbytes)))
    return t


# --- contents -----------------------------------------------------------------------------------------------------------
def test_a_read_map_shows_the_bytes(c: toy.Context) -> None:
    """SPEC L-MAP"""
    t = made(c, (5, 60))
    with t[1:, 3:7].map("read") as a:
        assert not a.flags.writeable
        assert a.tolist() == np.frombuffer(c.peek(t), "u1").reshape(5, 60)[1:, 3:7].tolist()


@pytest.mark.parametrize("access", ["write", "read_write"])
def test_what_is_written_arrives_and_the_rest_stays(c: toy.Context, access: str) -> None:
    """SPEC L-MAP: also where the view starts in the middle of a cache line that the device has written"""
    t = made(c)
    with t[:1].map("read"):                       # the host's cache has seen the old bytes
        pass
    c.poke(t, bytes(7 for _ in range(300)))
    with t[100:130].map(access) as a:
        if access == "read_write":
            assert (a == 7).all()
        a[:] = 9
    assert c.peek(t) == b"\x07" * 100 + b"\x09" * 30 + b"\x07" * 170


def test_a_second_map_sees_what_the_device_wrote_meanwhile(c: toy.Context) -> None:
    """SPEC L-MAP: field report B83"""
    t = made(c)
    with t.map("read_write") as a:
        a[:] = 1
    c.poke(t, b"\x02" * 300)
    with t.map("read") as a:
        assert (a == 2).all()


def test_write_back_happens_once(c: toy.Context) -> None:
    """SPEC L-RELEASE: what the device writes afterwards is not overwritten by a second release or by dropping"""
    t = made(c)
    lease = t.map("write")
    lease.value[:] = 1
    lease.release()
    c.poke(t, b"\x02" * 300)
    lease.release()
    lease.__exit__(None, None, None)
    del lease
    gc.collect()
    assert c.peek(t) == b"\x02" * 300


def test_reading_writes_nothing_back(c: toy.Context, driver: toy.Driver) -> None:
    """SPEC L-STAGE"""
    t = made(c)
    with t.map("read", copy=True):
        c.poke(t, b"\x02" * 300)
    assert c.peek(t) == b"\x02" * 300
    assert driver.moved["upload"] == driver.moved["flushed"] == 0


@pytest.mark.parametrize("access", ["read", "write", "read_write"])
def test_only_what_the_access_and_the_view_need_is_moved(driver: toy.Driver, access: str) -> None:
    """SPEC L-STAGE"""
    c = toy.Context(flavour=None)
    t = made(c, (10, 30))
    with t[2:5, ::3].map(access) as a:
        assert a.shape == (3, 10)
    assert driver.moved["download"] == (30 if access != "write" else 0)
    assert driver.moved["upload"] == (30 if access != "read" else 0)


def test_memory_that_cannot_be_mapped_is_staged_by_copies(driver: toy.Driver) -> None:
    """SPEC L-STAGE: an adapter may have map and still not map this memory; field report B84"""
    c = toy.Context(flavour=None)
    t = made(c)
    lease = t.map("read_write")
    lease.value[:] += 1
    assert lease.staged
    lease.release()
    assert c.peek(t)[:3] == b"\x01\x02\x03"
    with pytest.raises(interop.ExchangeError):
        t.map("read", copy=False).value     # noqa: B018


def test_staging_is_seen_by_copy_guard(driver: toy.Driver) -> None:
    """SPEC L-STAGE"""
    t = made(toy.Context(flavour=None))
    with interop.copy_guard("allow") as copies, t.map("read_write") as a:
        a[:] = 0
    assert [r.copied_bytes for r in copies] == [600]       # there and back, counted when it is staged
    with interop.copy_guard("disallow"), pytest.raises(interop.ExchangeError, match="copy_guard"):
        t.map("read").value     # noqa: B018


def test_a_map_in_place_copies_nothing(driver: toy.Driver) -> None:
    """SPEC L-MAP"""
    c = toy.Context()
    t = made(c)
    with interop.copy_guard("disallow"), t.map("read_write", copy=False) as a:
        a[:] = 3
    assert c.peek(t) == b"\x03" * 300
    assert driver.calls["copy"] == 0


def test_flush_and_invalidate_name_only_the_view(driver: toy.Driver) -> None:
    """SPEC L-MAP: the adapter rounds to its atoms; field report B81"""
    c = toy.Context(coherent=False)
    t = made(c, (1000,))
    with t[130:190].map("read") as a:
        assert a[0] == 130
    assert driver.moved["invalidated"] == 64
    with t[990:].map("read_write") as a:
        a[:] = 1
    assert driver.moved["flushed"] == 40            # 960 to the end


# --- views that outlive the map -----------------------------------------------------------------------------------------
def test_views_are_stale_perhaps_and_dangling_never(c: toy.Context, driver: toy.Driver) -> None:
    """SPEC L-STALE: the pages stay readable while a view lives, and no longer"""
    t = made(c)
    with t.map("read") as a:
        where = a.ctypes.data
    for _ in range(2):
        assert readable(where)
        assert ctypes.string_at(where, 3) == b"\x00\x01\x02"
        t.map("read").release()
        with t.map("write") as b:
            b[:3] = 0, 1, 2
    del a, b
    gc.collect()
    assert c.maps == 0


def test_views_stay_readable_when_the_tensor_and_the_lease_are_gone(c: toy.Context, driver: toy.Driver) -> None:
    """SPEC L-STALE"""
    lease = made(c).map("read")
    a = lease.value[5:10]
    lease.release()
    del lease
    gc.collect()
    assert readable(a.ctypes.data)
    assert a.tolist() == [5, 6, 7, 8, 9]
    del a
    gc.collect()
    assert driver.handles == 0


def test_memory_with_views_of_an_ended_map_is_not_closed_under_them(c: toy.Context) -> None:
    """SPEC L-STALE: close is refused, or the pages stay"""
    t = made(c)
    lease = t.map("read")
    a = lease.value
    where = a.ctypes.data
    lease.release()
    try:
        t.allocation.close()
    except interop.ExchangeError as e:
        assert "export" in str(e)       # noqa: PT017
    if not readable(where):             # an assertion about `a` would read it
        pytest.fail("the pages are gone")
    assert a[3] == 3


def test_a_second_lease_survives_the_end_of_the_first_view(driver: toy.Driver) -> None:
    """SPEC L-MAP: dropping the pages of one map ends no other lease and forgets no pending work"""
    c = toy.Context()
    c.queue.stuck = True
    t = made(c)
    reader = t[:100].map("read")
    reader.value        # noqa: B018
    writer = interop.acquire(t[100:200], c, "write")
    other = interop.acquire(t[200:], c, "write")
    other.release(c.fill(t[200:], 1))
    reader.release()
    del reader
    gc.collect()
    with pytest.raises(interop.LeaseError):
        t[100:200].map("read")
    assert not points.pending(t[200:], "read").done()
    writer.release(points.READY)
    c.queue.run()


def test_two_maps_at_once(c: toy.Context, driver: toy.Driver) -> None:
    """SPEC L-MAP: an adapter is asked to map what is mapped already"""
    t = made(c)
    if c.atom > 1:
        with t[:150].map("write"), pytest.raises(interop.LeaseError):
            t[150:].map("write")            # a flush of either carries bytes of the other along
    cut = 128 if c.atom > 1 else 150
    one, two = t[:cut].map("write"), t[cut:].map("write")
    one.value[:] = 1
    two.value[:] = 2
    one.release()
    two.release()
    assert c.peek(t) == b"\x01" * cut + b"\x02" * (300 - cut)
    del one, two
    gc.collect()
    assert c.maps == 0


@pytest.mark.parametrize("fail", ["map", "unmap", "flush", "invalidate", "copy", "submit"])
@pytest.mark.parametrize("access", ["read", "write", "read_write"])
def test_a_driver_call_that_fails_leaves_no_map_no_lease_no_handle(c: toy.Context, driver: toy.Driver, fail: str, access: str,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L-ERROR"""
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    t = made(c)
    driver.fail_next(fail)
    try:
        with t.map(access) as a:
            if access != "read":
                a[:] = 1
        del a
    except (toy.ToyError, interop.ExchangeError):
        pass
    gc.collect()
    driver._failing.clear()
    with t.map("write") as a:
        a[:] = 2
    assert c.peek(t) == b"\x02" * 300
    del a
    gc.collect()
    if fail != "unmap":
        assert c.maps == 0
    elif c.maps:
        driver.blocks[id(c), t.handle].maps = 0     # an unmap that failed stays mapped: nothing else can be done


# --- targets ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["numpy", "torch", "interop"])
def test_frameworks_get_their_own_arrays_over_mapped_memory(c: toy.Context, target: str) -> None:
    """SPEC L-TARGET"""
    pytest.importorskip(target)
    t = made(c)
    lease = interop.acquire(t[10:20], target, "read_write")
    assert interop.kind(lease.value) == target
    interop.to(lease.value, "numpy")[...] if target != "interop" else None
    with np.testing.suppress_warnings():
        v = lease.value if target != "interop" else None
        if v is not None:
            v[:] = 5
    lease.release()
    if target != "interop":
        assert c.peek(t)[9:21] == b"\x09" + b"\x05" * 10 + b"\x14"


def test_a_reversed_view_reaches_torch_through_staging(c: toy.Context) -> None:
    """SPEC L-TARGET: what the framework cannot hold in place is staged, not refused"""
    torch = pytest.importorskip("torch")
    t = made(c)
    with interop.acquire(t[9::-1], torch.Tensor, "read_write") as x:
        assert x.tolist() == list(range(9, -1, -1))
        x += 1
    assert c.peek(t)[:11] == bytes(range(1, 11)) + b"\x0a"


@pytest.mark.parametrize("target", ["context", "device", "name", "type"])
def test_the_devices_own_targets_alias(driver: toy.Driver, target: str) -> None:
    """SPEC L-TARGET: a place gives a Tensor there, the framework's name or type its own object; nothing is mapped or copied"""
    c = toy.Context(1)
    t = made(c)
    with interop.acquire(t, {"context": c, "device": "toy:1", "name": "toy", "type": toy.Buffer}[target], "read_write") as x:
        assert isinstance(x, interop.Tensor if target in ("context", "device") else toy.Buffer)
        assert x.handle == t.handle
    assert driver.calls["map"] == driver.calls["copy"] == 0


def test_host_memory_is_staged_on_the_device(driver: toy.Driver) -> None:
    """SPEC L-TARGET: copy=None stages where the target cannot reach the memory, in either direction"""
    c = toy.Context()
    x = np.arange(10, dtype="u1")
    with interop.acquire(x, c, "read_write") as t:
        assert t.device == c.device
        c.add(t, 1)
    assert x.tolist() == list(range(1, 11))


def test_memory_of_one_context_is_not_another_ones(driver: toy.Driver) -> None:
    """SPEC L-TARGET: the same device is not enough"""
    one, two = toy.Context(0), toy.Context(0)
    t = made(one)
    try:
        with interop.acquire(t, two, "read") as x:
            assert x.allocation.context is two
    except interop.ExchangeError:
        pass
    u = interop.to(t, two)
    two.queue.run()
    assert u.allocation.context is two
    assert two.peek(u) == one.peek(t)


# --- order --------------------------------------------------------------------------------------------------------------
def _reads_after_a_queued_write(c: toy.Context) -> bool:
    t = made(c)
    lease = interop.acquire(t, c, "write")
    lease.release(c.fill(t, 7))
    with t.map("read") as a:
        return bool((a == 7).all())


def test_a_reader_after_a_queued_write_sees_it(c: toy.Context) -> None:
    """SPEC L-ORDER"""
    assert _reads_after_a_queued_write(c)


def test_without_the_wait_it_would_not(driver: toy.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L-ORDER: the toy is slow enough for the test above to mean something"""
    monkeypatch.setattr(points, "pending", lambda *_: points.READY)
    c = toy.Context()
    assert not _reads_after_a_queued_write(c)
    c.queue.run()


def test_a_released_read_delays_the_next_writer(driver: toy.Driver) -> None:
    """SPEC L-ORDER: a kernel that still reads gets the old bytes"""
    c = toy.Context()
    src, dst = made(c, (16,)), made(c, (16,))
    c.poke(src, b"\x01" * 16)
    lease = interop.acquire(src, c, "read")
    lease.release(interop.copyto(dst, src))
    with src.map("write") as a:
        a[:] = 9
    assert c.peek(dst) == b"\x01" * 16


def test_after_says_what_a_queue_of_my_own_must_wait_for(driver: toy.Driver) -> None:
    """SPEC L-ORDER; user job 4"""
    one, two = toy.Context(0), toy.Context(1)
    t = made(one)
    first = interop.acquire(t, one, "write")
    p = one.fill(t, 1)
    first.release(p)
    mine = interop.acquire(t, one, "read_write")
    assert not mine.after.done()
    assert mine.after.native() == p.native()
    two.queue.wait_for(mine.after)                  # my own queue, driven by me
    seen: list[bytes] = []
    fence = two.queue.submit("mine", lambda: seen.append(one.peek(t)))
    two.queue.run()
    assert seen == []
    mine.release(toy._point(fence))
    one.queue.run()
    two.queue.run()
    assert seen == [b"\x01" * 300]
    assert points.pending(t, "write").done()


def test_release_without_a_point_means_what_the_queue_was_given(driver: toy.Driver) -> None:
    """SPEC L-ORDER"""
    c = toy.Context()
    c.queue.stuck = True
    t = made(c)
    with interop.acquire(t, c, "write"):
        c.fill(t, 4)
    assert not points.pending(t, "read").done()
    c.queue.stuck = False
    with t.map("read") as a:
        assert (a == 4).all()


def test_a_named_stream_is_made_to_wait_and_the_host_where_it_cannot(driver: toy.Driver) -> None:
    """SPEC L-ORDER"""
    for waits in (True, False):
        one, two = toy.Context(0), toy.Context(0, waits=waits)
        host = interop.as_tensor(np.zeros(300, "u1"))
        t, u = made(one), made(two)
        interop.copyto(host, t)
        interop.copyto(u, host)
        two.queue.run()
        one.queue.run()
        two.queue.run()
        assert two.peek(u) == one.peek(t)


def test_release_with_a_point_of_somebody_elses(driver: toy.Driver) -> None:
    """SPEC L-ORDER: anything with done() and wait(); nonsense ends the lease too"""
    import threading

    class Fence:
        def __init__(self) -> None:
            self.event = threading.Event()
            self.done, self.wait = self.event.is_set, self.event.wait
    t, f = made(toy.Context()), Fence()
    interop.acquire(t, t.allocation.context, "write").release(f)
    assert not points.pending(t, "read").done()
    f.event.set()
    with t.map("read"):
        pass
    lease = t.map("write")
    lease.value[:] = 1
    with pytest.raises(TypeError, match="done"):
        lease.release(object())
    lease.release()         # the mistake has ended nothing
    t.map("write").release()


def test_a_point_given_to_a_lease_that_was_not_looked_at_counts(driver: toy.Driver) -> None:
    """SPEC L-ORDER: who has an alias of his own needs no value"""
    c = toy.Context()
    c.queue.stuck = True
    t = made(c)
    interop.acquire(t, c, "write").release(c.fill(t, 1))
    lease = t.map("write")
    lease.release(c.fill(t, 2))
    c.queue.run(1)
    assert not points.pending(t, "read").done()
    c.queue.run()
