"""copyto and copies to other memories. SPEC C-*."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from memkit import clean_toy, until

import interop
from interop import transfer


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


# --- host to host -------------------------------------------------------------------------------------------------------
@st.composite
def strided(draw: Any) -> tuple[Any, ...]:
    """A shape, and for each of two sides a step and an axis order."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    sides = []
    for _ in range(2):
        steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
        sides.append((steps, draw(st.permutations(range(len(shape))))))
    return shape, sides, draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16", "?"]))


def _view(shape: tuple[int, ...], steps: list[int], order: list[int], dtype: str, fill: int) -> tuple[np.ndarray[Any, Any], ...]:
    whole = (np.arange(int(np.prod([n * abs(s) for n, s in zip(shape, steps, strict=True)], dtype=int))) * fill).astype(dtype)
    view = whole.reshape([shape[i] * abs(steps[i]) for i in order]).transpose([order.index(i) for i in range(len(shape))])
    return view[(*(slice(None, None, s) for s in steps), ...)], whole


@settings(max_examples=150, deadline=None)
@given(strided())
def test_strided_to_strided_is_what_numpy_does(case: Any) -> None:
    """SPEC C-HOST: and nothing else is touched"""
    shape, sides, dtype = case
    (src, _), (dst, whole), (expected, expected_whole) = (
        _view(shape, *side, dtype, fill) for side, fill in zip([*sides, sides[1]], (1, 0, 0), strict=True))
    interop.copyto(dst, src).wait(0)
    np.copyto(expected, src)
    assert whole.tobytes() == expected_whole.tobytes()


def test_overlap_is_as_if_copied_first() -> None:
    """SPEC C-OVERLAP"""
    x = np.arange(20, dtype="i4")
    interop.copyto(x[2:], x[:-2])
    assert x.tolist() == [0, 1, *range(18)]
    x = np.arange(20, dtype="i4")
    interop.copyto(x, x[::-1])
    assert x.tolist() == list(range(19, -1, -1))


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[::2, ::-1], lambda x: x.T, lambda x: x[:, :1]],
                         ids=["plain", "strided", "T", "thin"])
def test_large_copies_are_whole(make: Any) -> None:
    """SPEC C-LARGE: in blocks on several threads"""
    src = make(np.random.default_rng(0).integers(0, 255, (2048, 8192), "u1"))
    dst = make(np.zeros((2048, 8192), "u1"))
    interop.copyto(dst, src)
    assert (dst == src).all()


def test_progress_grows_to_the_whole() -> None:
    """SPEC C-PROGRESS"""
    n = 3 * transfer.PARALLEL_FROM
    src, seen = np.ones(n, "u1"), []
    interop.copyto(np.zeros(n, "u1"), src, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})
    assert seen[-1] == (n, n)
    assert {t for _, t in seen} == {n}


def test_both_sides_are_leased_during_the_copy() -> None:
    """SPEC C-LEASE: nobody writes to the source or uses the destination meanwhile"""
    n = 2 * transfer.PARALLEL_FROM
    src, dst, refused = np.ones(n, "u1"), np.zeros(n, "u1"), []

    def progress(done: int, total: int) -> None:
        interop.acquire(src, "numpy", "read").release()
        for x, access in ((dst, "read"), (dst, "write"), (src, "write")):
            with pytest.raises(interop.LeaseError, match="copy"):
                interop.acquire(x, "numpy", access)
            refused.append(access)
    interop.copyto(dst, src, progress=progress)
    assert refused
    interop.acquire(dst, "numpy", "write").release()


def test_an_error_in_progress_ends_the_copy_in_order() -> None:
    """SPEC C-PROGRESS: when copyto has raised, nothing writes to the destination any more"""
    n = 8 * transfer.PARALLEL_FROM
    src, dst = np.ones(n, "u1"), np.zeros(n, "u1")

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        interop.copyto(dst, src, progress=progress)
    dst[:] = 0
    assert not dst.any()
    interop.copyto(dst, src)
    assert dst.all()


@pytest.mark.parametrize(("dst", "src"), [((3,), (4,)), ((3,), (1, 3)), ((3, 1), (3,)), ((3,), ()), ((2, 0), (0, 2))])
def test_shapes_must_be_equal(dst: Any, src: Any) -> None:
    """SPEC C-SHAPE"""
    with pytest.raises(ValueError, match="shape"):
        interop.copyto(np.zeros(dst), np.zeros(src))


def test_dtypes_must_be_equal() -> None:
    """SPEC C-DTYPE"""
    with pytest.raises(ValueError, match=r"float32.*int32|int32.*float32"):
        interop.copyto(np.zeros(3, "f4"), np.zeros(3, "i4"))


def test_a_readonly_destination_is_refused() -> None:
    """SPEC C-READONLY"""
    x = np.zeros(3)
    x.flags.writeable = False
    for dst in (x, b"abc", interop.as_tensor(np.zeros(3), readonly=True), np.broadcast_to(np.zeros(1), (3,))):
        with pytest.raises(interop.ExchangeError, match="read-only"):
            interop.copyto(dst, np.zeros(3, "u1") if isinstance(dst, bytes) else np.zeros(3))


def test_a_lease_forbids(driver: toy.Driver) -> None:
    """SPEC C-LEASE"""
    x, y = np.zeros(8), np.ones(8)
    with interop.as_tensor(x[:2]).map("read"):
        interop.copyto(y, x)
        with pytest.raises(interop.LeaseError):
            interop.copyto(x, y)
    with interop.as_tensor(x[:2]).map("write"):
        with pytest.raises(interop.LeaseError):
            interop.copyto(y, x)
        interop.copyto(x[2:], y[2:])


def test_misaligned_memory_is_copied_where_it_lies() -> None:
    """SPEC C-HOST"""
    raw = np.zeros(33, "u1")
    x = raw[1:].view("<f4")
    interop.copyto(np.zeros(8, "f4"), x)
    interop.copyto(x, np.full(8, 2, "f4"))
    assert (x == 2).all()


# --- devices ------------------------------------------------------------------------------------------------------------
WAYS = {"copy": {}, "map only": {"copies": False}, "map only, incoherent": {"copies": False, "coherent": False},
        "unmap only": {"copies": False, "flavour": "unmap"},
        "unmap only, incoherent": {"copies": False, "flavour": "unmap", "coherent": False},
        "outlives": {"copies": False, "flavour": "outlives", "coherent": False}}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def c(request: pytest.FixtureRequest, driver: toy.Driver) -> toy.Context:
    return toy.Context(**request.param)


def test_host_to_device_and_back(c: toy.Context) -> None:
    """SPEC C-DEVICE"""
    t = interop.empty((6, 10), "int16", device=c)
    x, y = np.arange(60, dtype="i2").reshape(6, 10), np.zeros((6, 10), "i2")
    interop.copyto(t, x)
    interop.copyto(y, t).wait(5)
    assert (x == y).all()


def test_strided_parts_of_a_device_tensor(c: toy.Context) -> None:
    """SPEC C-DEVICE: the bytes around stay as they are"""
    t = interop.empty((6, 10), "uint8", device=c)
    c.poke(t, bytes(range(60)))
    interop.copyto(t[1:5, 2:8:3], np.full((4, 2), 99, "u1")).wait(5)
    expected = np.arange(60, dtype="u1").reshape(6, 10)
    expected[1:5, 2:8:3] = 99
    assert c.peek(t) == expected.tobytes()
    out = np.zeros((10, 6), "u1")
    interop.copyto(out, t.permute(1, 0)).wait(5)
    assert (out == expected.T).all()


@pytest.mark.parametrize("peer", [True, False])
def test_between_two_devices(c: toy.Context, peer: bool) -> None:
    """SPEC C-DEVICE: with NotImplemented from the adapter through host maps"""
    other = toy.Context(1, peer=peer)
    a, b = interop.empty((64,), "uint8", device=c), interop.empty((64,), "uint8", device=other)
    c.poke(a, bytes(range(64)))
    interop.copyto(b, a).wait(5)
    assert other.peek(b) == bytes(range(64))


def test_a_copy_on_a_queue_is_not_waited_for(driver: toy.Driver) -> None:
    """SPEC C-POINT: the point says when; user job 14"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    p = interop.copyto(t, np.ones(16, "u1"))
    assert not p.done()
    assert driver.calls["host_wait"] == 0
    c.queue.run()
    assert p.done()


def test_a_queued_copy_keeps_what_it_reads(driver: toy.Driver) -> None:
    """SPEC C-POINT"""
    c = toy.Context()
    t = interop.empty((1 << 20,), "uint8", device=c)
    interop.copyto(t, np.full(1 << 20, 5, "u1"))
    gc.collect()
    np.zeros(1 << 20, "u1")
    c.queue.run()
    assert c.peek(t) == b"\x05" * (1 << 20)


def test_a_finished_copy_keeps_nothing(driver: toy.Driver) -> None:
    """SPEC C-POINT: host memory that was read is let go when the copy is done, whether or not anybody asks for those bytes again"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    x = np.ones(16, "u1")
    alive = weakref.ref(x)
    p = interop.copyto(t, x)
    del x
    c.queue.run()
    p.wait()
    del p
    gc.collect()
    assert until(lambda: alive() is None, 2)


def test_a_copy_from_memory_whose_last_write_failed_is_refused(driver: toy.Driver) -> None:
    """SPEC C-POINT"""
    c = toy.Context()
    a, b = (interop.empty((16,), "uint8", device=c) for _ in range(2))
    driver.fail_next("execute")
    interop.copyto(a, np.zeros(16, "u1"))
    c.queue.run()
    with pytest.raises(interop.ExchangeError, match="last write"):
        interop.copyto(b, a).wait(5)


def test_nobody_can_copy_is_a_clear_error(driver: toy.Driver) -> None:
    """SPEC C-NOBODY"""
    from interop.testing import Forged
    alien = interop.as_tensor(Forged((4,), (1, 8, 1), device=(7, 0), data=0x7F0000001000).capsule())
    for dst, src in ((np.zeros(4, "u1"), alien), (alien, np.zeros(4, "u1")), (interop.empty((4,), "uint8", device=toy.Context()), alien)):
        with pytest.raises(interop.ExchangeError, match="vulkan:0"):
            interop.copyto(dst, src)
    deaf = toy.Context(copies=False, flavour=None)
    with pytest.raises(interop.ExchangeError, match="toy:0"):
        interop.copyto(np.zeros(4, "u1"), interop.empty((4,), "uint8", device=deaf))


@pytest.mark.parametrize("fail", ["copy", "submit", "map", "flush", "invalidate"])
def test_a_copy_that_fails_leaves_nothing_behind(c: toy.Context, driver: toy.Driver, fail: str) -> None:
    """SPEC C-ERROR: no map, no lease"""
    t, x = interop.empty((16,), "uint8", device=c), np.ones(16, "u1")
    for dst, src in ((t, x), (x, t)):
        driver.fail_next(fail)
        with contextlib.suppress(toy.ToyError, interop.ExchangeError):
            interop.copyto(dst, src)
        driver._failing.clear()
    c.queue.run()
    gc.collect()
    assert c.maps == 0
    x[:] = 1
    interop.copyto(t, x).wait(5)
    assert c.peek(t) == x.tobytes()


# --- to another memory --------------------------------------------------------------------------------------------------
def test_to_a_place_copies_in_sight(c: toy.Context) -> None:
    """SPEC C-TO"""
    x = np.arange(12, dtype="u1").reshape(3, 4)
    with interop.copy_guard("allow") as copies:
        t = interop.to(x, c)
    assert t.copied
    assert t.allocation.context is c
    assert c.peek(t) == x.tobytes()
    assert [r.copied_bytes for r in copies] == [12]
    with interop.copy_guard("disallow"), pytest.raises(interop.ExchangeError, match="copy_guard"):
        interop.to(x, c)
    with pytest.raises(interop.ExchangeError):
        interop.to(x, c, copy=False)


def test_to_a_device_by_name(driver: toy.Driver) -> None:
    """SPEC C-TO"""
    x = np.arange(12, dtype="u1")
    t = interop.to(x, "toy:1")
    assert str(t.device) == "toy:1"
    assert toy.ADAPTER.context(t.device).peek(t) == x.tobytes()
    del t
    gc.collect()


@pytest.mark.parametrize("target", ["numpy", "torch", "interop"])
def test_to_a_framework_on_the_host(c: toy.Context, target: str) -> None:
    """SPEC C-TO: a name alone moves nothing; with device= the copy is seen"""
    pytest.importorskip(target)
    b = toy.Buffer(c, (12,))
    c.poke(b, bytes(range(12)))
    for x in (b, interop.as_tensor(b)):
        if target != "interop":
            with pytest.raises(interop.ExchangeError):
                interop.to(x, target)
        with interop.copy_guard("allow") as copies:
            y = interop.to(x, target, device="cpu")
        assert interop.kind(y) == target
        assert np.asarray(y).tolist() == list(range(12))
        assert [r.copied_bytes for r in copies] == [12]
        with pytest.raises(interop.ExchangeError):
            interop.to(x, target, device="cpu", copy=False)
        with interop.copy_guard("disallow"), pytest.raises(interop.ExchangeError, match="copy_guard"):
            interop.to(x, target, device="cpu")


def test_as_tensor_with_a_device_copies(c: toy.Context) -> None:
    """SPEC C-TO"""
    b = toy.Buffer(c, (12,))
    c.poke(b, bytes(range(12)))
    t = interop.as_tensor(b, device="cpu")
    assert t.copied
    assert np.asarray(t).tolist() == list(range(12))


def test_the_copy_is_ordered_after_queued_writes(driver: toy.Driver) -> None:
    """SPEC C-TO"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    interop.acquire(t, c, "write").release(c.fill(t, 7))
    assert np.asarray(interop.to(t, "cpu")).tolist() == [7] * 16


def test_padded_elements_stay_padded(driver: toy.Driver) -> None:
    """SPEC C-DTYPE: sub-byte elements with a byte each do not become packed on the way"""
    from interop.testing import SUBBYTE_PADDED, Forged
    forged = Forged((6,), (0, 4, 1), flags=SUBBYTE_PADDED)
    t = interop.as_tensor(forged.capsule())
    assert t.padded
    forged.memory[:6] = bytes([1, 2, 3, 4, 5, 6])
    c = toy.Context()
    try:
        u = interop.to(t, c)
    except (interop.ExchangeError, ValueError):
        return
    assert u.padded
    assert c.peek(u) == bytes([1, 2, 3, 4, 5, 6])
