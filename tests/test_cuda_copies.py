"""Copies to, from and between GPUs on the fake driver: every layout, whose stream, what comes before and after."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_kit import Rig, host, rig, strided, submitted, work
from support import aligned

import interop
from interop import ExchangeError, _core
from interop.adapters.cuda import pack
from interop.contract import DeviceLostError

D0, D1, PIN, MANAGED, PAGE = "cuda:0", "cuda:1", "pinned", "managed", "pageable"
DTYPES = [np.dtype(x) for x in ("u1", "?", "i2", "f4", "f8", "c16")]


@pytest.fixture
def cuda() -> Iterator[Rig]:
    """interop's adapter on a fake driver of two devices; in the end nothing illegal has happened there and nothing is left."""
    with rig() as made:
        made.fake.auto = True
        yield made


@pytest.fixture
def cp(cuda: Rig) -> Iterator[Any]:
    """A small CuPy on the same driver."""
    with fake_cupy.installed(cuda.fake) as cupy:
        yield cupy


class Side:
    """One side of a copy: a Tensor over a part of memory whose every byte is random. `view` is the part, `all` the bytes."""

    def __init__(self, cuda: Rig, kind: str, shape: Any, dtype: Any, strides: Any = None, before: int = 0, after: int = 0,
                 stream: Any = -1) -> None:
        dtype = np.dtype(dtype)
        if strides is None:
            strides = np.empty(shape, dtype).strides if 0 not in shape else (0,) * len(shape)
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if 0 not in shape else []
        first = before - sum(min(r, 0) for r in reach)
        size = first + sum(max(r, 0) for r in reach) + dtype.itemsize + after
        device = 1 if kind == D1 else 0
        if kind == PAGE:
            self.all = np.empty(size, "u1")
            address = self.all.ctypes.data
        else:
            kinds = {PIN: "pinned", MANAGED: "managed"}
            address = cuda.fake.make_memory(size, device, kinds.get(kind, "device"))
            self.all = strided(address, (size,), "u1")
        self.all[:] = np.random.default_rng(size).integers(0, 2 if dtype.kind == "b" else 256, size, dtype="u1")
        self.view = strided(address + first, shape, dtype, strides)
        self.place = (tuple(shape), dtype, first, tuple(strides))
        if kind == PAGE:
            self.tensor = interop.as_tensor(np.ndarray(tuple(shape), dtype, self.all, first, tuple(strides)))
        else:
            steps = [s // dtype.itemsize for s in strides]
            label = {PIN: (3, 0), MANAGED: (13, 0)}.get(kind, (2, device))
            if kind == PIN:
                stream = None
            self.tensor = cuda.tensor(address + first, tuple(shape), dtype, device=label, strides=steps, stream=stream)

    def expected(self, values: Any) -> bytes:
        """All the bytes, with these values in the part."""
        out = self.all.copy()
        shape, dtype, first, strides = self.place
        np.ndarray(shape, dtype, out, first, strides)[...] = values
        return out.tobytes()


def layout(r: random.Random, shape: list[int], itemsize: int, broadcast: bool) -> list[int]:
    """Random strides in bytes: permuted, padded, stepped, reversed, on demand broadcast."""
    if r.random() < 0.3:
        return list(np.empty(shape, np.dtype(f"V{itemsize}")).strides)
    order, strides = list(range(len(shape))), [0] * len(shape)
    if r.random() < 0.5:
        r.shuffle(order)
    for i in reversed(order):
        step = r.choice([1, 1, 1, 2, -1, -2])
        strides[i] = step * itemsize
        itemsize *= shape[i] * abs(step) + r.choice([0, 0, 1, 3])
    return [0 if broadcast and r.random() < 0.15 else s for s in strides]


# ---- layouts ----
@pytest.mark.parametrize("seed", range(12))
def test_random_copies_equal_numpys_and_touch_no_other_byte(cuda: Rig, seed: int) -> None:
    """SPEC G-COPY, C-DEVICE: any strides, any two memories, on any stream; a pageable source has been read when copyto returns."""
    r = random.Random(seed)
    users = {D0: cuda.stream(0), D1: cuda.stream(1)}
    for _ in range(30):
        ndim = r.randint(0, 5)
        shape = [r.randint(1, [1, 3000, 70, 20, 7, 5][ndim]) for _ in range(ndim)]
        dtype, kinds = r.choice(DTYPES), [PAGE, PAGE]
        while not {D0, D1} & set(kinds) or (MANAGED in kinds and D1 in kinds):
            kinds = [r.choice([D0, D1, PIN, MANAGED, PAGE]) for _ in range(2)]
        sides = [Side(cuda, k, shape, dtype, layout(r, shape, dtype.itemsize, i == 1), r.randint(0, 3) * dtype.itemsize, r.randint(0, 9),
                      r.choice([-1, users.get(k, users[D0])])) for i, k in enumerate(kinds)]
        dst, src = sides
        expected = dst.expected(src.view)
        stream = r.choice([None, None, 1, 2, users[r.choice([k for k in kinds if k in users])]])
        done = interop.copyto(dst.tensor, src.tensor, stream=stream)
        if kinds[1] == PAGE:
            src.all[:] = 0
        if kinds[0] != PAGE:
            done.wait(10)
        assert dst.all.tobytes() == expected, (kinds, shape, dtype, dst.place, src.place, stream)
    assert cuda.fake.calls["cuMemAllocAsync"] == cuda.fake.calls["cuMemFreeAsync"]


@pytest.mark.parametrize("src", [D0, D1, PAGE, PIN])
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16"])
@pytest.mark.parametrize("shape", [(64, 48), (3, 40, 37), (1, 33, 2, 35)])
def test_transposes_of_every_itemsize(cuda: Rig, dtype: str, shape: Any, src: str) -> None:
    """SPEC G-COPY: the kernel that goes through tiles, with edges that are none's multiple."""
    a = Side(cuda, D0, shape, dtype)
    item = np.dtype(dtype).itemsize
    steps, size = [], item
    for n in shape:                                         # the fastest axis first
        steps.append(size)
        size *= n
    b = Side(cuda, src, shape, dtype, steps)
    expected = a.expected(b.view)
    interop.copyto(a.tensor, b.tensor).wait(10)
    assert a.all.tobytes() == expected


@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PAGE), (PAGE, D0), (D1, D0), (PIN, D0), (D0, MANAGED)])
def test_more_axes_than_a_launch_takes(cuda: Rig, kinds: Any) -> None:
    """SPEC G-COPY."""
    shape = (2,) * 11
    steps = np.empty((3,) * 11, "i2").strides
    dst, src = (Side(cuda, k, shape, "i2", [s if i else -s for s in steps], 2) for i, k in enumerate(kinds))
    expected = dst.expected(src.view)
    interop.copyto(dst.tensor, src.tensor).wait(10)
    assert dst.all.tobytes() == expected


@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PAGE), (PAGE, D0), (D1, D0), (D0, D1)])
@pytest.mark.parametrize("strides", [(0, 4), (4, 0), (0, 0), (-40, -4), (-4, 40), (8, -80)])
def test_broadcast_and_reversed_sources(cuda: Rig, kinds: Any, strides: Any) -> None:
    """SPEC G-COPY."""
    dst, src = Side(cuda, kinds[0], (10, 10), "f4"), Side(cuda, kinds[1], (10, 10), "f4", strides)
    expected = dst.expected(src.view)
    interop.copyto(dst.tensor, src.tensor).wait(10)
    assert dst.all.tobytes() == expected


@pytest.mark.parametrize(("to", "source"), [(1, 0), (0, 1), (7, 0), (0, 7)])
def test_a_copy_within_itself_is_as_if_through_a_third_place(cuda: Rig, to: int, source: int) -> None:
    """SPEC G-COPY: the third place goes back in the stream's order."""
    whole = Side(cuda, D0, (1000,), "u1")
    t, before = whole.tensor, whole.all.copy()
    interop.copyto(t[to:to + 990], t[source:source + 990]).wait(10)
    before[to:to + 990] = before[source:source + 990].copy()
    assert (whole.all == before).all()
    interop.copyto(t, t[::-1]).wait(10)
    assert (whole.all == before[::-1]).all()
    assert cuda.fake.calls["cuMemAllocAsync"] == 2 == cuda.fake.calls["cuMemFreeAsync"]


def test_a_copy_onto_itself_is_nothing(cuda: Rig) -> None:
    """SPEC G-COPY."""
    t = Side(cuda, D0, (10, 10), "f4").tensor
    with submitted(cuda.fake) as given:
        interop.copyto(t[:, ::2], t[:, ::2]).wait(10)
    assert given == []


def test_elements_that_share_bytes_are_copied_contiguous_only(cuda: Rig) -> None:
    """SPEC G-COPY."""
    address, view = cuda.memory(np.zeros(64, "u1"))
    t = cuda.tensor(address, (31,), "int4")
    h = _core.host_tensor((31,), "int4")
    raw = strided(h.ptr, (16,), "u1")
    raw[:] = np.arange(16)
    interop.copyto(t, h).wait(10)
    assert (view[:16] == np.arange(16)).all() and not view[16:].any()
    raw[:] = 0
    interop.copyto(h, t).wait(10)
    assert (raw == np.arange(16)).all()
    wide = cuda.tensor(address, (4, 8), "int4")
    with pytest.raises(ExchangeError, match="share bytes"):
        interop.copyto(wide[:, :4], _core.host_tensor((4, 4), "int4"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32x3", "uint8x3"])
def test_dtypes_that_numpy_has_not_are_bytes(cuda: Rig, dtype: str) -> None:
    """SPEC G-COPY: any dtype."""
    size = interop.DType(dtype).bits * interop.DType(dtype).lanes // 8
    address, view = cuda.memory(np.zeros(20 * size, "u1"))
    h = _core.host_tensor((10,), dtype)
    raw = strided(h.ptr, (10 * size,), "u1")
    raw[:] = np.arange(10 * size)
    t = cuda.tensor(address, (10,), dtype, strides=(2,))
    interop.copyto(t, h).wait(10)
    assert (view.reshape(10, 2, size)[:, 0] == raw.reshape(10, size)).all() and not view.reshape(10, 2, size)[:, 1].any()
    raw[:] = 0
    interop.copyto(h, t[::-1]).wait(10)
    assert (raw.reshape(10, size) == view.reshape(10, 2, size)[::-1, 0]).all()


@pytest.mark.parametrize("kinds", [(D0, PAGE), (PAGE, D0), (D0, D0), (D0, D1)])
def test_an_empty_copy_asks_the_driver_nothing(cuda: Rig, kinds: Any) -> None:
    """SPEC G-COPY, C-DEVICE."""
    dst, src = (Side(cuda, k, (3, 0), "f4").tensor for k in kinds)
    with cuda.fake.counting() as calls:
        assert interop.copyto(dst, src).done()
    assert not work(calls)


@pytest.mark.parametrize("way", ["in", "out"])
def test_memory_of_which_a_part_is_registered_is_copied(cuda: Rig, cp: Any, way: str) -> None:
    """SPEC G-COPY, G-PAGES: the part is interop's own registration, a small array's."""
    a = aligned(np.arange(4096 * 4, dtype="u1"), alignment=4096)
    d = Side(cuda, D0, (4096 * 4,), "u1")
    part = interop.to(a[:4096], "cupy")
    try:
        interop.copyto(*((d.tensor, a) if way == "in" else (a, d.tensor))).wait(10)
        assert cuda.fake.violations == [] and (d.all == a).all()
    finally:
        cuda.fake.violations.clear()
        del part


@pytest.mark.parametrize("way", ["in", "out"])
def test_strided_memory_of_which_a_part_is_registered_is_copied(cuda: Rig, cp: Any, way: str) -> None:
    """SPEC G-COPY, G-PAGES: through the ring, where the host's side is the host's to read."""
    a = aligned(np.arange(4096 * 4, dtype="u1"), alignment=4096)
    d = Side(cuda, D0, (4096 * 2,), "u1")
    part = interop.to(a[:4096], "cupy")
    interop.copyto(*((d.tensor, a[::2]) if way == "in" else (a[::2], d.tensor))).wait(10)
    assert (d.all == a[::2]).all()
    del part


# ---- into a framework's own memory ----
@pytest.mark.parametrize("device", [0, 1])
def test_to_with_a_device_copies_into_the_frameworks_own_memory_on_its_stream(cuda: Rig, cp: Any, device: int) -> None:
    """SPEC G-COPY-TO: and what the framework does next comes after it, without anybody waiting."""
    fake, n = cuda.fake, np.arange(24, dtype="f4").reshape(4, 6)
    fake.auto = False
    with cp.cuda.Stream(cuda.stream(device), device) as s, submitted(fake) as given:
        x = interop.to(n, "cupy", device=f"cuda:{device}")
    assert type(x) is cp.ndarray and x.data.device_id == device and x.data.mem.__class__.__name__ == "Memory"
    assert {stream for _, stream in given} == {s.ptr}
    n[:] = 0
    seen: list[Any] = []
    fake.launch(s.ptr, lambda: seen.append(x.host().copy()), reads=[(x.data.ptr, 96)])
    assert fake.queued and not fake.calls["cuStreamQuery"]
    fake.run()
    assert (seen[0] == np.arange(24).reshape(4, 6)).all()


def test_to_with_a_device_is_a_copy_that_guards_see(cuda: Rig, cp: Any) -> None:
    """SPEC G-COPY-TO, C-TO, X-GUARD-1."""
    n = np.arange(6, dtype="i4")
    with interop.copy_guard("log") as routes:
        x = interop.to(n, "cupy", device="cuda:0")
        back = interop.to(x, "numpy", device="cpu")
    assert (back == n).all() and [r.copied_bytes for r in routes] == [24, 24]
    with interop.copy_guard("disallow"), pytest.raises(ExchangeError):
        interop.to(n, "cupy", device="cuda:0")
    with pytest.raises(ExchangeError, match="copy=False"):
        interop.to(x, "cupy", device="cuda:1", copy=False)
    assert interop.to(x, "cupy", device="cuda:0") is x


@pytest.mark.parametrize("dtype", ["u1", "f8", "c16", "?"])
def test_arrays_cross_between_two_gpus_and_come_back(cuda: Rig, cp: Any, dtype: str) -> None:
    """SPEC G-COPY-TO, G-COPY."""
    n = np.arange(60).reshape(5, 12).astype(dtype)
    x = interop.to(n, "cupy", device="cuda:0")
    y = interop.to(interop.as_tensor(x).permute(1, 0)[::-1], "cupy", device="cuda:1")
    assert y.data.device_id == 1
    assert (interop.to(y, "numpy", device="cpu") == n.T[::-1]).all()


def test_a_place_gives_a_tensor_of_interops_memory(cuda: Rig, cp: Any) -> None:
    """SPEC C-TO, G-COPY: complete when it returns, and it says copied."""
    n = np.arange(24, dtype="i8").reshape(4, 6)[:, ::-2]
    for place in ("cuda:0", "cuda:1"):
        t = interop.to(n, place)
        assert t.copied and t.device == place and (host(t) == n).all()
        assert (interop.to(interop.to(t, "cuda:1"), "numpy", device="cpu") == n).all()


@pytest.mark.parametrize("target", ["cupy", "cuda:1"])
def test_pending_writes_come_before_a_copy_to_another_memory(cuda: Rig, cp: Any, target: str) -> None:
    """SPEC C-TO: also those of a copy that is still queued."""
    fake = cuda.fake
    with cp.cuda.Stream(cuda.stream()) as s:
        x = cp.empty((100,), "u1")
        fake.launch(s.ptr, lambda: x.host().fill(9), writes=[(x.data.ptr, 100)])
        y = interop.to(x, target, device="cuda:1" if target == "cupy" else None)
    fake.run()
    assert (host(y) == 9).all()


# ---- maps and leases that stage ----
@pytest.mark.parametrize("step", [1, 2, -1])
def test_a_map_fetches_and_writes_back_the_elements_of_the_view_alone(cuda: Rig, cp: Any, step: int) -> None:
    """SPEC G-COPY, L-STAGE: ordered behind the framework's work, and before its next."""
    fake, s = cuda.fake, cp.cuda.Stream(cuda.stream())
    with s:
        x = cp.empty((4, 100), "i2")
        x.host()[...] = np.arange(400).reshape(4, 100)
        t = interop.as_tensor(x)
        fake.launch(s.ptr, lambda: x.host().__imul__(2), writes=[(x.data.ptr, 800)])
        expected = (np.arange(400) * 2).reshape(4, 100)
        with t[1:3, ::step].map("read") as m:
            assert (m == expected[1:3, ::step]).all()
        with t[1:3, ::step].map("read_write") as m:
            m += 1
        expected[1:3, ::step] += 1
        seen: list[Any] = []
        fake.launch(s.ptr, lambda: seen.append(x.host().copy()), reads=[(x.data.ptr, 800)])
        fake.run()
        assert (seen[0] == expected).all()
        with t.map("write") as m:
            m[...] = 3
        fake.run()
        assert (x.host() == 3).all()


# ---- whose stream ----
@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PAGE), (PAGE, D0), (D0, PIN), (PIN, D0), (MANAGED, D0), (D0, MANAGED)])
@pytest.mark.parametrize("which", ["given", "the destination's", "the source's", "interop's"])
def test_a_copy_runs_on_the_stream_that_is_given_else_the_pending_one_else_interops(cuda: Rig, kinds: Any, which: str) -> None:
    """SPEC G-COPY."""
    user, to, source = cuda.stream(), cuda.stream(), cuda.stream()
    pending = {"given": (to, source), "the destination's": (to, source), "the source's": (-1, source), "interop's": (-1, -1)}[which]
    dst, src = (Side(cuda, k, (9, 5), "f4", (40, 8), stream=s) for k, s in zip(kinds, pending, strict=True))
    has = [k in (D0, MANAGED) for k in kinds]
    with submitted(cuda.fake) as given:
        interop.copyto(dst.tensor, src.tensor, stream=user if which == "given" else None).wait(10)
    own = cuda.streams.made.get(0)
    wanted = user if which == "given" else to if has[0] and pending[0] > 0 else source if has[1] and pending[1] > 0 else own
    assert {s for _, s in given} == {wanted}


@pytest.mark.parametrize("bad", [0, -1, -7])
def test_a_stream_that_is_none_is_refused(cuda: Rig, bad: int) -> None:
    """SPEC G-COPY, X-STREAM-1."""
    dst, src = Side(cuda, D0, (5,), "f4"), Side(cuda, PAGE, (5,), "f4")
    with pytest.raises(ValueError, match="stream"):
        interop.copyto(dst.tensor, src.tensor, stream=bad)
    assert not dst.tensor.allocation.is_closed and (cuda.fake.queued == 0)


@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PAGE), (PAGE, D0), (D0, PIN), (PIN, D0), (D1, D0), (D0, D1)])
@pytest.mark.parametrize("stream", [None, "user"])
@pytest.mark.parametrize("layouts", ["contiguous", "strided"])
def test_a_copy_comes_after_pending_work_and_before_what_its_framework_does_next(cuda: Rig, kinds: Any, stream: Any, layouts: str) -> None:
    """SPEC G-COPY: a race, if anything were not ordered. Nothing waits for a device."""
    fake, made = cuda.fake, []
    fake.auto = kinds[0] in (PAGE, PIN)                     # the host waits there, and knows then that all of it is over
    for k in kinds:
        s = cuda.stream(1 if k == D1 else 0)
        side = Side(cuda, k, (30, 20), "u1", None if layouts == "contiguous" else (40, 2), stream=s if k in (D0, D1) else -1)
        if k in (D0, D1):
            fake.launch(s, lambda side=side: side.view.__setitem__(..., 7), writes=[(side.all.ctypes.data, side.all.nbytes)])
        made.append((side, s))
    dst, src = (side for side, _ in made)
    given = None if stream is None else cuda.stream(1 if kinds[0] == D1 else 0)
    done = interop.copyto(dst.tensor, src.tensor, stream=given)
    for k, (side, s) in zip(kinds, made, strict=True):      # the frameworks go on
        if k in (D0, D1) and given is None:
            fake.launch(s, lambda side=side: side.view.__setitem__(..., 1), writes=[(side.all.ctypes.data, side.all.nbytes)])
    if fake.auto:
        done.wait(10)
        assert (dst.view == 7).all()
    fake.run()
    assert not any(c in fake.calls for c in ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"))


def test_a_copy_from_another_gpu_to_managed_memory_with_pending_work(cuda: Rig) -> None:
    """SPEC G-COPY: each side is pending on a stream of its own GPU."""
    dst, src = Side(cuda, MANAGED, (30, 20), "u1", (40, 2), stream=cuda.stream(0)), Side(cuda, D1, (30, 20), "u1", stream=cuda.stream(1))
    expected = dst.expected(src.view)
    try:
        interop.copyto(dst.tensor, src.tensor).wait(10)
        assert dst.all.tobytes() == expected and cuda.fake.violations == []
    finally:
        cuda.fake.violations.clear()


def test_a_copy_to_another_gpu_comes_before_what_the_managed_sources_framework_does_next(cuda: Rig) -> None:
    """SPEC G-COPY: as it does where both are device memory, or on one GPU."""
    s = cuda.stream(0)
    dst, src = Side(cuda, D1, (30, 20), "u1", stream=cuda.stream(1)), Side(cuda, MANAGED, (30, 20), "u1", stream=s)
    cuda.fake.auto = False
    interop.copyto(dst.tensor, src.tensor)
    cuda.fake.launch(s, writes=[(src.tensor.ptr, 600)])
    wrong = list(cuda.fake.violations)
    cuda.fake.violations.clear()
    assert wrong == []


# ---- into a graph ----
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PIN), (PIN, D0), (MANAGED, D0)])
def test_a_copy_on_a_captured_stream_becomes_part_of_the_graph(cuda: Rig, kinds: Any, mode: int) -> None:
    """SPEC G-COPY, X-STREAM-6: what the card reaches; it runs with the graph."""
    s = cuda.stream()
    dst, src = (Side(cuda, k, (9, 5), "f4", (40, 8), stream=s) for k in kinds)
    interop.copyto(dst.tensor, src.tensor, stream=s).wait(10)         # the kernels are loaded
    before = dst.all.tobytes()
    src.all[:] += 1
    with cuda.fake.capturing(s, mode) as capture:
        interop.copyto(dst.tensor, src.tensor, stream=s)
        assert not capture.invalid and len(capture.work) == 1
    assert dst.all.tobytes() == before
    capture.work[0][1]()
    assert (dst.view == src.view).all()


@pytest.mark.parametrize("kinds", [(D0, PAGE), (PAGE, D0), (D1, D0), (D0, D1)])
def test_a_copy_that_a_graph_cannot_hold_is_refused_and_the_capture_goes_on(cuda: Rig, kinds: Any) -> None:
    """SPEC G-COPY, X-STREAM-6: pageable memory, and two GPUs."""
    s = cuda.stream()
    dst, src = (Side(cuda, k, (9, 5), "f4", (40, 8), stream=s if k == D0 else -1) for k in kinds)
    with cuda.fake.capturing(s) as capture:
        with pytest.raises(ExchangeError, match="captured"):
            interop.copyto(dst.tensor, src.tensor, stream=s)
        assert not capture.invalid and not capture.work
    dst, src = (Side(cuda, k, (9, 5), "f4", (40, 8)) for k in kinds)
    expected = dst.expected(src.view)
    interop.copyto(dst.tensor, src.tensor).wait(10)
    assert dst.all.tobytes() == expected


@pytest.mark.parametrize("kinds", [(D0, D0), (D0, PAGE), (PAGE, D0), (D1, D0), (D0, PIN)])
@pytest.mark.parametrize("first", [True, False])
def test_copies_beside_a_capture_leave_it_whole(cuda: Rig, kinds: Any, first: bool) -> None:
    """SPEC X-STREAM-6: also the first ones, which load kernels and allocate chunks and temporaries."""
    dst, src = (Side(cuda, k, (300, 500), "f4", (4000, 8)) for k in kinds)
    if not first:
        interop.copyto(dst.tensor, src.tensor).wait(10)
    expected = dst.expected(src.view)
    with cuda.fake.capturing(cuda.stream()) as capture:
        done = interop.copyto(dst.tensor, src.tensor)
        done.wait(10)
        assert not capture.invalid and not capture.work
    assert dst.all.tobytes() == expected


def test_an_overlapping_copy_is_captured_with_its_temporary(cuda: Rig) -> None:
    """SPEC G-COPY: the graph allocates and frees it."""
    s, whole = cuda.stream(), Side(cuda, D0, (100,), "u1")
    with cuda.fake.capturing(s) as capture:
        interop.copyto(whole.tensor[1:], whole.tensor[:-1], stream=s)
        assert [name for name, _ in capture.work] == ["cuMemAllocAsync", "cuMemcpyAsync", "cuMemcpyAsync", "cuMemFreeAsync"]
        assert not capture.invalid


# ---- the rest ----
def test_a_copy_on_a_lost_device_says_so(cuda: Rig) -> None:
    """SPEC G-LOST, G-COPY."""
    dst, src = Side(cuda, D0, (100,), "u1"), Side(cuda, PAGE, (100,), "u1")
    interop.copyto(dst.tensor, src.tensor).wait(10)
    cuda.fake.lose(0)
    for a, b in ((dst, src), (src, dst)):
        with pytest.raises(DeviceLostError):
            interop.copyto(a.tensor, b.tensor)
    cuda.fake.lost.clear()


def test_the_kernels_are_those_of_their_source() -> None:
    """SPEC G-COPY: pack.ptx says from which pack.cu it was made; tools/ptx.py makes it anew."""
    source = Path(pack.PTX).with_name("pack.cu").read_bytes()
    said = re.search(rb"[0-9a-f]{64}", pack.PTX.read_bytes().split(b"\n", 1)[0])
    assert said is not None and said.group().decode() == hashlib.sha256(source).hexdigest()


def test_the_kernels_that_are_launched_are_in_the_ptx() -> None:
    """SPEC G-COPY."""
    text = pack.PTX.read_text("ascii")
    names = {f"{kind}_{word}" for kind in ("linear", "transpose") for word in (1, 2, 4, 8, 16)}
    assert names <= set(re.findall(r"\.entry\s+(\w+)", text))


def numbers() -> Iterator[int]:
    yield from range(1, 300)
    yield from (2**k + d for k in range(8, 31) for d in (-1, 0, 1) if 2**k + d < 2**30)


def test_the_reciprocals_divide_every_index_that_a_launch_has() -> None:
    """SPEC G-COPY: checked where a quotient changes, which is where a wrong one would show."""
    check: Callable[[int, int], bool] = lambda i, n: ((i * pack._reciprocal(n)[0] >> 32) + i) >> pack._reciprocal(n)[1] == i // n  # noqa: E731
    for n in numbers():
        top = (2**31 - 1) // n * n
        assert pack._reciprocal(n)[0] < 2**32 and all(check(i, n) for i in (0, 1, n - 1, n, n + 1, top - 1, top, 2**31 - 1)), n
