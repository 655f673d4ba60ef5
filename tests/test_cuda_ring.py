"""Copies through pageable memory on the fake driver: chunks and threads, and what errors, Ctrl-C and time leave behind: nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_kit import ASKED, UNDO, Rig, each_call_failing, rig, strided
from fake_cuda import CUresult
from memkit import until

import interop
from interop import ExchangeError, _core
from interop.adapters.cuda import copies, ring
from interop.contract import DeviceLostError

MIB = 1 << 20
CALLS = ["cuMemHostAlloc", "cuMemcpyAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """interop's adapter on a fake driver; chunks and pieces are small, and several threads take part also on a small machine."""
    monkeypatch.setattr(ring, "THREADS", 4)
    monkeypatch.setattr(ring, "CHUNK", 64 << 10)
    monkeypatch.setattr(ring, "CHUNKS", 6)
    monkeypatch.setattr(ring, "INLINE", 128 << 10)
    monkeypatch.setattr(ring, "_PIPELINED", 16 << 10)
    monkeypatch.setattr(ring, "_PACKED", 16 << 10)
    monkeypatch.setattr(copies, "_DRIVERS_IN", 4 << 10)
    monkeypatch.setattr(copies, "_DRIVERS_OUT", 4 << 10)
    with rig() as made:
        made.fake.auto = True
        yield made


def device(cuda: Rig, n: int, on: int = 0, stream: Any = -1) -> tuple[interop.Tensor, np.ndarray[Any, Any]]:
    address = cuda.fake.make_memory(n, on)
    return cuda.tensor(address, (n,), "u1", device=(2, on), stream=stream), strided(address, (n,), "u1")


def random_bytes(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype="u1")


def chunks(cuda: Rig) -> tuple[int, int]:
    """How many chunks there are, and how many of them nobody holds."""
    r = cuda.adapter.copies.ring
    return r._made, len(r._free)


def whole(cuda: Rig) -> bool:
    """Nobody holds a chunk, and no temporary is left."""
    cuda.fake.run()
    a, b = chunks(cuda)
    return a == b and not [r for r in cuda.fake.ranges if r.kind == "pool" and not r.dead]


@pytest.mark.parametrize("n", [1, 5000, 65536, 65537, 200_001, 1_000_003])
def test_pageable_memory_of_every_size_goes_in_and_out(cuda: Rig, n: int) -> None:
    """SPEC G-COPY: a source may be overwritten when the call returns; a destination is written when it does."""
    t, view = device(cuda, n)
    h = random_bytes(n)
    done = interop.copyto(t, h)
    sent = h.copy()
    h[:] = 0
    done.wait(20)
    assert (view == sent).all()
    interop.copyto(h, t)
    assert (h == sent).all()
    assert chunks(cuda)[0] <= 6 and whole(cuda)


@pytest.mark.parametrize("n", [300_000, 1_000_000])
def test_a_queued_copy_in_waits_for_nobody_but_its_chunks(cuda: Rig, n: int) -> None:
    """SPEC G-COPY: behind work that is still queued the copy is queued too, as far as chunks go."""
    s = cuda.stream()
    t, view = device(cuda, n, stream=s)
    cuda.fake.auto = False
    cuda.fake.launch(s, lambda: view.fill(1), writes=[(t.ptr, n)])
    if n < 6 * (64 << 10):
        h = random_bytes(n)
        done = interop.copyto(t, h)
        assert not done.done() and cuda.fake.queued > 1
        cuda.fake.run()
        assert (view == h).all()
    else:
        cuda.fake.start()
        h = random_bytes(n)
        interop.copyto(t, h).wait(20)
        assert (view == h).all()


@pytest.mark.parametrize("stream", [None, 1, 2, "user"])
def test_the_ring_works_on_every_stream(cuda: Rig, stream: Any) -> None:
    """SPEC G-COPY: also on the per-thread one, which is another in each of the ring's threads."""
    t, view = device(cuda, 700_000)
    h = random_bytes(700_000)
    on = cuda.stream() if stream == "user" else stream
    cuda.fake.launch(on or 1, lambda: view.fill(0), writes=[(t.ptr, 700_000)]) if stream else None
    interop.copyto(t, h, stream=on).wait(20)
    assert (view == h).all()
    if stream:
        cuda.fake.launch(on, lambda: view.__iadd__(1), writes=[(t.ptr, 700_000)])
    out = np.zeros_like(h)
    interop.copyto(out, t, stream=on)
    assert (out == h + (1 if stream else 0)).all()


@pytest.mark.parametrize("way", ["in", "out"])
def test_threads_copy_at_the_same_time(cuda: Rig, way: str) -> None:
    """SPEC G-COPY: the chunks are for all."""
    cuda.fake.start()
    errors: list[BaseException] = []

    def many(k: int) -> None:
        try:
            r = np.random.RandomState(k)
            for _ in range(4):
                n = int(r.randint(1, 600_000))
                t, view = device(cuda, n, k % 2)
                h = random_bytes(n, k)
                if way == "in":
                    interop.copyto(t, h).wait(20)
                else:
                    view[:] = h
                    h = np.zeros_like(h)
                    interop.copyto(h, t)
                assert (view == h).all()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=many, args=(k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    cuda.fake.stop()
    assert whole(cuda)


def test_chunks_are_kept_for_later_and_given_back_on_demand(cuda: Rig) -> None:
    """SPEC G-COPY: pinned memory is made when it is first needed."""
    t, _ = device(cuda, 300_000)
    assert chunks(cuda) == (0, 0)
    interop.copyto(t, random_bytes(300_000)).wait(20)
    made = cuda.fake.calls["cuMemHostAlloc"]
    interop.copyto(t, random_bytes(300_000)).wait(20)
    assert made and cuda.fake.calls["cuMemHostAlloc"] <= 6
    cuda.adapter.copies.close()
    assert chunks(cuda) == (0, 0) and cuda.fake.calls["cuMemHostAlloc"] == cuda.fake.calls["cuMemFreeHost"]
    interop.copyto(t, random_bytes(300_000)).wait(20)


def test_chunks_that_the_card_uses_are_not_given_back(cuda: Rig) -> None:
    """SPEC G-COPY: the fake would say that they were freed in use."""
    cuda.fake.auto = False
    t, view = device(cuda, 50_000)
    h = random_bytes(50_000)
    interop.copyto(t, h)
    cuda.adapter.copies.close()
    assert chunks(cuda)[0] > 0
    cuda.fake.run()
    assert (view == h).all()


# ---- errors ----
def shapes(cuda: Rig, way: str) -> tuple[Any, Any, Any, Any]:
    """Destination, source, and NumPy views of both, for one of the ways that a copy can go."""
    shape = (50, 400)

    def side(on: int | None, kind: str = "device", plain: bool = False) -> tuple[Any, Any]:
        if on is None:
            view = np.zeros((50, 800), "i2")[:, :400] if not plain else np.zeros(shape, "i2")
            return view, view
        address = cuda.fake.make_memory(50 * 1600, on, kind)
        view = strided(address, shape, "i2", None if plain else (1600, 4))
        label = {"device": (2, on), "pinned": (3, 0), "managed": (13, on)}[kind]
        return cuda.tensor(address, shape, "i2", device=label, strides=[s // 2 for s in view.strides]), view

    to, source = {
        "small in": ((0, "device", True), (None, "", True)), "in": ((0,), (None,)), "out": ((None,), (0,)),
        "small out": ((None, "", True), (0, "device", True)), "pinned in": ((0,), (0, "pinned")), "managed out": ((0, "managed"), (0,)),
        "device": ((0,), (0, "device", True)), "device whole": ((0, "device", True), (0, "device", True)),
        "peers": ((1,), (0,)), "peers whole": ((1, "device", True), (0, "device", True)),
    }[way]  # fmt: skip
    (a, av), (b, bv) = side(*to), side(*source)
    bv[...] = np.arange(20000).reshape(shape)
    return a, b, av, bv


WAYS = ["small in", "in", "out", "small out", "pinned in", "managed out", "device", "device whole", "peers", "peers whole"]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_fails_leaves_nothing_behind_whichever_it_is(cuda: Rig, way: str, warm: bool) -> None:
    """SPEC G-COPY, C-ERROR: chunks, temporaries and events go back, the device that was current is, and a later copy works."""
    fake = cuda.fake
    ring.THREADS = 1                                        # the calls of one thread come in one order
    dst, src, view, values = shapes(cuda, way)
    cuda.pinned = 99                                        # a chunk that cannot be asked about is left to its fate
    kept: list[tuple[int, Any]] = []

    def copy() -> None:
        interop.copyto(dst, src).wait(10)

    def after(call: str, error: BaseException | None) -> None:
        assert error is not None or call in ("cuEventQuery", "cuPointerGetAttributes", "cuThreadExchangeStreamCaptureMode"), call
        if way == "peers" and call.startswith(("cuEvent", "cuStreamWait")):
            fake.violations.clear()                         # a temporary whose order could not be had goes back all the same
        assert not fake.violations, call
        assert whole(cuda), call
        assert fake._stack == [], call
        fake._local.mode = 0
        view[...] = 0
        copy()
        assert (view == values).all(), call
        if not warm:
            cuda.adapter.copies.close()
            cuda.adapter.copies._packer._functions.clear()
            for n in (0, 1):
                kept.extend((n, event) for event in cuda.streams._spare.pop(n, []))

    # asked again where a temporary is given back: of a driver that fails there it stays
    spare = UNDO | (ASKED | {"cuThreadExchangeStreamCaptureMode"} if way == "peers" else set())
    failed = each_call_failing(fake, copy, after, spare)
    assert "cuEventRecord" in failed or way == "small out"
    for n, event in kept:
        cuda.streams.reuse(n, event)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_error_in_one_of_several_threads_ends_the_copy_in_all(cuda: Rig, way: str, call: str, times: int) -> None:
    """SPEC G-COPY: it is that error which is raised, and nobody writes any more when it is."""
    n = 900_000
    t, view = device(cuda, n)
    h = random_bytes(n)
    view[:] = 7
    sides = (t, h) if way == "in" else (h, t)
    cuda.fake.fail_next(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY, times)
    cuda.pinned = times if call == "cuEventQuery" else 0     # a chunk that cannot be asked about is left to its fate
    try:
        interop.copyto(*sides).wait(20)
    except ExchangeError as e:
        raised = str(e)
    else:
        raised = "OUT_OF_MEMORY"
    assert "OUT_OF_MEMORY" in raised
    cuda.fake._failing.clear()
    kept = h.copy()
    assert whole(cuda) and (h == kept).all()
    view[:] = 3
    cuda.fake.run()
    interop.copyto(*sides).wait(20)
    assert (h == view).all()


def test_a_chunk_whose_work_could_not_be_recorded_is_not_used_again_before_that_is_done(cuda: Rig) -> None:
    """SPEC G-COPY: another copy's bytes would go through it meanwhile."""
    fake, n = cuda.fake, 10_000
    fake.auto = False
    a, view_a = device(cuda, n, stream=cuda.stream())
    b, view_b = device(cuda, n, stream=cuda.stream())
    view_a[:], first, then = 1, np.zeros(n, "u1"), np.full(n, 2, "u1")
    fake.fail_next("cuEventCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(ExchangeError):
        interop.copyto(first, a)
    interop.copyto(b, then)
    wrong = list(fake.violations)
    fake.violations.clear()
    fake.run()
    assert wrong == [] and (view_b == 2).all()


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_device_that_is_lost_in_the_middle_ends_the_copy(cuda: Rig, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-COPY, G-LOST: it says so, at once."""
    t, _ = device(cuda, 900_000)
    h, count, move = random_bytes(900_000), [0], copies.host_move

    def losing(m: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            cuda.fake.lose(0)
        move(m)

    monkeypatch.setattr(copies, "host_move", losing)
    with pytest.raises(DeviceLostError):
        interop.copyto(*((t, h) if way == "in" else (h, t)))
    cuda.fake.lost.clear()
    cuda.fake.run()
    monkeypatch.setattr(copies, "host_move", move)
    interop.copyto(t, h).wait(20)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_card_that_is_never_done_is_a_timeout(cuda: Rig, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-COPY, P-WAIT: for a chunk, or for the last piece."""
    monkeypatch.setattr(ring, "HOST_TIMEOUT", 0.05)
    cuda.fake.auto = False
    t, view = device(cuda, 900_000)
    h = random_bytes(900_000)
    with pytest.raises(TimeoutError):
        interop.copyto(*((t, h) if way == "in" else (h, t)))
    cuda.fake.auto = True
    assert whole(cuda)
    view[:] = 0
    interop.copyto(t, h).wait(20)
    assert (view == h).all()


def test_chunks_are_given_back_beside_those_of_a_lost_device(cuda: Rig) -> None:
    """SPEC G-COPY, G-LOST: another GPU goes on, with all its chunks."""
    cuda.pinned = 99
    a, _ = device(cuda, 50_000, 0)
    cuda.fake.auto = False
    interop.copyto(a, random_bytes(50_000))
    cuda.fake.lose(0)
    for _ in range(2):
        cuda.adapter.copies.close()
    assert chunks(cuda) == (0, 0)


def test_a_ring_goes_on_for_another_device_where_one_is_lost(cuda: Rig) -> None:
    """SPEC G-COPY, G-LOST: a chunk of the lost one is left to its fate and another made."""
    cuda.pinned = 99
    a, _ = device(cuda, 50_000, 0)
    b, view = device(cuda, 900_000, 1)
    cuda.fake.auto = False
    interop.copyto(a, random_bytes(50_000))
    cuda.fake.lose(0)
    cuda.fake.auto = True
    h = random_bytes(900_000)
    interop.copyto(b, h).wait(20)
    assert (view == h).all() and chunks(cuda)[0] <= 6
    cuda.fake.lost.clear()


# ---- Ctrl-C ----
@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_ends_the_copy_and_leaves_nothing(cuda: Rig, way: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-COPY, C-ERROR: no thread writes to the caller's memory any more when it is raised."""
    t, view = device(cuda, 900_000)
    h, count, move, here = random_bytes(900_000), [0], copies.host_move, threading.get_ident()

    def interrupted(m: Any) -> None:
        if threading.get_ident() == here:
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt
        move(m)

    monkeypatch.setattr(copies, "host_move", interrupted)
    sides = (t, h) if way == "in" else (h, t)
    try:
        interop.copyto(*sides)
    except KeyboardInterrupt:
        assert count[0] == at
    else:
        assert count[0] < at                                # the other threads had it all
    kept = h.copy()
    monkeypatch.setattr(copies, "host_move", move)
    assert whole(cuda) and (h == kept).all()
    interop.copyto(t, h).wait(20)
    assert (view == h).all()


@pytest.mark.parametrize("way", ["in", "out"])
def test_ctrl_c_gets_in(cuda: Rig, way: str) -> None:
    """SPEC G-COPY, P-WAIT: while the card is not done."""
    cuda.fake.auto = False
    t, _ = device(cuda, 900_000)
    h = random_bytes(900_000)
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            interop.copyto(*((t, h) if way == "in" else (h, t))).wait(20)
    finally:
        timer.join()
    cuda.fake.auto = True
    assert whole(cuda)
    interop.copyto(t, h).wait(20)


def test_a_copy_that_ends_while_it_is_noted_leaves_no_entry(cuda: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC P-LEDGER: finished Points are struck out."""
    t, _ = device(cuda, 100)
    cuda.fake.auto = False
    entries, span, struck = _core.ledger_size(), _core.byte_span, _core.ledger_strike
    over = threading.Event()
    monkeypatch.setattr(_core, "ledger_strike", lambda p, *more: (struck(p, *more), over.set()))

    def ends(x: Any) -> Any:
        if cuda.fake.queued:                                # the entries of the call itself are there by now
            cuda.fake.auto = True
            over.wait(5)
        return span(x)

    monkeypatch.setattr(_core, "byte_span", ends)
    interop.copyto(t[::2], random_bytes(50)).wait(10)
    monkeypatch.undo()
    until(lambda: _core.ledger_size() <= entries, 0.3)
    assert _core.ledger_size() <= entries


def test_a_failed_copy_is_told_to_readers_of_its_destination(cuda: Rig) -> None:
    """SPEC G-COPY, P-LEDGER: until it has been written again."""
    t = interop.empty((9000,), "u1", device="cuda:0")
    h = random_bytes(9000)
    cuda.fake.fail_next("cuMemHostAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(ExchangeError):
        interop.copyto(t, h)
    with pytest.raises(ExchangeError, match="last write"):
        interop.copyto(np.zeros_like(h), t)
    interop.copyto(t, h).wait(10)
    out = np.zeros_like(h)
    interop.copyto(out, t)
    assert (out == h).all()
