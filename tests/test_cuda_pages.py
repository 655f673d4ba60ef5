"""Host memory shown to GPUs in place, on the fake driver: what is registered, for how long, and leases over it."""

from __future__ import annotations

import gc
import itertools
import mmap
import random
import threading
from collections.abc import Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_kit import ASKED, Rig, each_call_failing, rig, wait_for
from fake_cuda import CUresult
from support import aligned

import interop
from interop import ExchangeError, _core

K = mmap.PAGESIZE


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


@pytest.fixture
def base() -> Iterator[int]:
    """The address of 64 pages of this test's own."""
    keep = np.zeros(65 * K, "u1")
    yield -(-keep.ctypes.data // K) * K
    assert keep.size            # it lives until here


def registered(cuda: Rig) -> list[tuple[int, int]]:
    """What the driver has registered, by address."""
    return sorted((r.base, r.size) for r in cuda.fake.ranges if r.kind == "registered" and not r.dead)


def gone(cuda: Rig) -> bool:
    gc.collect()
    cuda.settle()
    return not registered(cuda) and len(cuda.adapter.memory.pages) == 0


# ---- in place ----
@pytest.mark.parametrize("off", [0, 1, 7, 4095])
def test_numpy_memory_is_shown_to_cupy_in_place(cuda: Rig, cp: Any, off: int) -> None:
    """SPEC G-PAGES: the same bytes, registered to the byte, for as long as the array lives."""
    n = aligned(np.arange(5000, dtype="u1"), alignment=K, off=off)
    with interop.copy_guard("disallow"):
        x = interop.to(n, "cupy")
    assert x.data.ptr == n.ctypes.data and registered(cuda) == [(n.ctypes.data, 5000)]
    x.host()[3] = 77
    assert n[3] == 77
    del x
    assert gone(cuda)


@pytest.mark.parametrize("dtype", ["f4", "c16", "?"])
def test_views_of_numpy_memory_keep_shape_and_strides(cuda: Rig, cp: Any, dtype: str) -> None:
    """SPEC G-PAGES: also reversed and transposed ones."""
    n = np.arange(120).astype(dtype).reshape(4, 5, 6)
    for view in (n[:, ::2], n[::-1], n.T, n[1:, 2:3, ::-3], n[:0], n[0, 0, 0, None]):
        x = interop.to(view, "cupy")
        assert x.shape == view.shape and (x.host() == view).all()
        assert view.ndim == 1 or not view.size or x.strides == view.strides
    del x
    assert gone(cuda)


@pytest.mark.parametrize("target", ["cuda:0", "cuda:1", "cupy"])
def test_copy_false_shows_host_memory_to_any_gpu(cuda: Rig, cp: Any, target: str) -> None:
    """SPEC G-PAGES, X-TO-4: with device= and copy=False."""
    n = np.arange(1000, dtype="i4")
    x = interop.to(n, "cupy", device="cuda:1", copy=False) if target == "cupy" else interop.to(n, target, copy=False)
    address, device = (x.data.ptr, x.data.device_id) if target == "cupy" else (x.ptr, x.device.id)
    assert address == n.ctypes.data and device == (0 if target == "cuda:0" else 1) and len(registered(cuda)) == 1
    del x
    assert gone(cuda)


def test_a_kernel_and_a_copy_of_the_driver_reach_registered_memory(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES: the fake objects to work with memory that is not registered."""
    cuda.fake.auto = True
    n = aligned(np.arange(5000, dtype="u1"))
    d, staged = interop.empty((5000,), "u1", device="cuda:0"), cuda.fake.staged
    with cp.cuda.Stream(cuda.stream()) as s:
        x = interop.to(n, "cupy")
        cuda.fake.launch(s.ptr, writes=[(x.data.ptr, 5000)])
        interop.copyto(d, x).wait(5)
    assert cuda.fake.staged == staged and not cuda.fake.calls["cuMemHostAlloc"]


def test_read_only_memory_is_not_shown_to_who_may_write(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES, X-TO-5: CuPy gets a copy, or nothing."""
    cuda.fake.auto = True
    n = np.arange(100)
    n.flags.writeable = False
    with pytest.raises(ExchangeError, match="read-only"):
        interop.to(n, "cupy", copy=False)
    x = interop.to(n, "cupy")
    assert x.data.ptr != n.ctypes.data and (x.host() == n).all()
    assert interop.to(n, "cuda:0", copy=False).readonly
    del x
    assert gone(cuda)


def test_memory_that_was_registered_once_is_counted(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES."""
    n = np.zeros(5000, "u1")
    xs = [interop.to(n, "cupy"), interop.to(n, "cupy"), interop.to(n, "cuda:1", copy=False)]
    assert cuda.fake.calls["cuMemHostRegister"] == 1
    while xs:
        assert len(registered(cuda)) == 1
        xs.pop()
        gc.collect()
        cuda.settle()
    assert gone(cuda)


# ---- ranges ----
def test_of_overlapping_ranges_the_gaps_alone_are_added(cuda: Rig, base: int) -> None:
    """SPEC G-PAGES: and each goes when nobody uses it."""
    pages = cuda.adapter.memory.pages
    a = pages.register(0, base + 100, 100)
    b = pages.register(0, base + 300, 3 * K)
    c = pages.register(0, base, 5 * K)
    assert registered(cuda) == [(base, 100), (base + 100, 100), (base + 200, 100), (base + 300, 3 * K), (base + 300 + 3 * K, 2 * K - 300)]
    assert c.pointer == base
    c.close()
    assert registered(cuda) == [(base + 100, 100), (base + 300, 3 * K)]
    d = pages.register(0, base + 150, 10)
    a.close()
    assert registered(cuda)[0] == (base + 100, 100)
    d.close()
    d.close()
    b.close()
    assert not registered(cuda)


def test_two_arrays_in_one_page_do_not_touch_each_other(cuda: Rig, cp: Any, base: int) -> None:
    """SPEC G-PAGES: to the byte, because CUDA refuses to copy what begins in a registration and ends beyond it."""
    whole = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * K).from_address(base))
    a, b = interop.to(whole[:100], "cupy"), interop.to(whole[100:300], "cupy")
    assert registered(cuda) == [(base, 100), (base + 100, 200)]
    del a
    gc.collect()
    assert registered(cuda) == [(base + 100, 200)] and b.data.ptr == base + 100
    del b, whole
    assert gone(cuda)


def test_random_registrations_cover_what_is_used_and_nothing_else(cuda: Rig, base: int) -> None:
    """SPEC G-PAGES."""
    pages, r = cuda.adapter.memory.pages, random.Random(0)
    live: list[tuple[int, int, Any]] = []
    for _ in range(300):
        if live and r.random() < 0.5:
            live.pop(r.randrange(len(live)))[2].close()
        else:
            low, n = r.randrange(40 * K), r.randrange(1, 3 * K)
            live.append((low, n, pages.register(r.randrange(2), base + low, n)))
        have = registered(cuda)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(have))
        assert len(have) == len(pages)
        for low, n, g in live:
            assert g.pointer == base + low
            assert sum(max(0, min(a + m, base + low + n) - max(a, base + low)) for a, m in have) == n
        for a, m in have:                                   # nothing without a user
            assert any(a < base + low + n and base + low < a + m for low, n, _ in live)
    for _, _, g in live:
        g.close()
    assert not registered(cuda)


def test_threads_register_at_the_same_time(cuda: Rig, base: int) -> None:
    """SPEC G-PAGES."""
    pages, errors = cuda.adapter.memory.pages, []

    def many(k: int) -> None:
        try:
            r = random.Random(k)
            for _ in range(80):
                low, n = r.randrange(40 * K), r.randrange(1, 9 * K)
                g = pages.register(0, base + low, n)
                assert sum(max(0, min(a + m, base + low + n) - max(a, base + low)) for a, m in registered(cuda)) == n
                g.close()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=many, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and gone(cuda)


# ---- other people's registrations ----
def others(cuda: Rig, address: int, n: int) -> Any:
    """Another library registers memory."""
    r = cuda.fake._add("registered", n, address, 0)
    r.mine = True
    return r


def test_what_another_library_registered_is_used_where_all_of_it_is(cuda: Rig, base: int) -> None:
    """SPEC G-PAGES: and is left registered."""
    pages = cuda.adapter.memory.pages
    r, also = others(cuda, base, 4 * K), others(cuda, base + 4 * K, K)
    for low, n in ((0, 4 * K), (5, 2 * K), (4 * K - 1, 1), (3 * K, 2 * K)):
        g = pages.register(0, base + low, n)
        assert len(pages) == 0 and g.pointer == base + low
        g.close()
    assert not cuda.fake.calls["cuMemHostUnregister"]
    for x in (r, also):
        cuda.fake.ranges.remove(x)


@pytest.mark.parametrize(("low", "n"), [(2 * K, 4 * K), (-1, 10), (4 * K - 1, 2), (-K, 6 * K)])
def test_what_another_library_registered_in_part_is_refused(cuda: Rig, base: int, low: int, n: int) -> None:
    """SPEC G-PAGES: with the reason, and nothing stays registered."""
    r = others(cuda, base + 2 * K, 4 * K)
    with pytest.raises(ExchangeError, match="another library has registered a part of it"):
        cuda.adapter.memory.pages.register(0, base + 2 * K + low, n)
    assert registered(cuda) == [(base + 2 * K, 4 * K)]
    cuda.fake.ranges.remove(r)


def test_a_gap_that_another_library_has_is_filled_by_it(cuda: Rig, base: int) -> None:
    """SPEC G-PAGES: interop's own ranges around it are counted, it is not."""
    pages, a = cuda.adapter.memory.pages, cuda.adapter.memory.pages.register(0, base, K)
    r = others(cuda, base + K, K)
    b = pages.register(0, base + 10, 2 * K - 20)
    assert len(pages) == 1
    b.close()
    a.close()
    assert registered(cuda) == [(base + K, K)]
    cuda.fake.ranges.remove(r)


# ---- what cannot be ----
@pytest.mark.parametrize("what", ["read-only", "nothing", "a hole", "device memory", "no range"])
def test_what_cuda_cannot_register_is_refused_with_the_reason(cuda: Rig, base: int, what: str) -> None:
    """SPEC G-PAGES: the driver only says no; nothing stays registered."""
    pages, keep = cuda.adapter.memory.pages, []
    address, n, match = base, 4 * K, ""
    if what == "read-only":
        keep.append(mmap.mmap(-1, 4 * K, prot=mmap.PROT_READ))
        address, match = np.frombuffer(keep[0], "u1").ctypes.data, "mapped read-only"
    elif what == "nothing":
        address, match = 0x5000, "nothing is mapped at 0x5000"
    elif what == "a hole":
        match = "ulimit"
    elif what == "device memory":
        address, match = cuda.fake.make_memory(4 * K, 1), "it is device memory of cuda:1"
    else:
        n, match = 0, "no range"
    cuda.fake.fail_next("cuMemHostRegister", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(ExchangeError, match=match):
        pages.register(0, address, n)
    cuda.fake._failing.clear()
    assert not registered(cuda) and len(pages) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_a_registration_that_fails_is_undone(cuda: Rig, base: int, overlap: bool) -> None:
    """SPEC G-PAGES: whichever it is."""
    pages = cuda.adapter.memory.pages
    kept = [pages.register(0, base + 2 * K, K), pages.register(1, base + 4 * K, K)] if overlap else []
    before = registered(cuda)

    def register() -> None:
        pages.register(0, base, 6 * K).close()

    def after(call: str, error: BaseException | None) -> None:
        assert error is not None or call in ("cuThreadExchangeStreamCaptureMode", "cuPointerGetAttributes"), call
        assert registered(cuda) == before and cuda.fake._stack == [], call
        cuda.fake._local.mode = 0

    # asked again where it is unregistered: of a driver that fails there the range stays
    spare = ASKED | {"cuMemHostUnregister", "cuThreadExchangeStreamCaptureMode"}
    failed = each_call_failing(cuda.fake, register, after, spare)
    assert failed.count("cuMemHostRegister") == (3 if overlap else 1) and "cuMemHostGetDevicePointer" in failed
    for g in kept:
        g.close()


def test_registering_beside_a_capture_leaves_it_whole(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES, X-STREAM-6."""
    n = np.zeros(100, "u1")
    with cuda.fake.capturing(cuda.stream()) as capture:
        x = interop.to(n, "cupy")
        del x
        assert gone(cuda) and not capture.invalid


# ---- memory made for both ----
def test_memory_made_for_cupy_stays_registered_and_is_cheap_to_show(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES, M-EMPTY-PAGES."""
    t = interop.empty((64, 64), "f4", shared_with=["cupy"])
    assert t.device == "cpu" and t.ptr % K == 0 and len(registered(cuda)) == 1
    np.asarray(t)[:] = 5
    with cuda.fake.counting() as calls:
        for _ in range(3):
            x = interop.to(t, "cupy")
            assert x.data.ptr == t.ptr and (x.host() == 5).all()
            del x
            gc.collect()
    assert not calls["cuMemHostRegister"] and not calls["cuMemHostUnregister"]
    del t
    assert gone(cuda)


def test_memory_of_the_host_goes_after_the_gpu_is_done_with_it(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES, X-STREAM-5: unregistered and unmapped, the card would fault."""
    fake = cuda.fake
    t, s = interop.empty((K,), "u1", shared_with=["cupy"]), cuda.stream()
    with cp.cuda.Stream(s):
        x = interop.to(t, "cupy")
    fake.launch(s, writes=[(x.data.ptr, K)])
    del x, t
    gc.collect()
    assert len(registered(cuda)) == 1
    fake.run()
    wait_for(lambda: gone(cuda), "it is never let go")


@pytest.mark.parametrize("made", ["numpy", "empty"])
def test_a_lease_of_host_memory_on_the_gpu_orders_both_ends(cuda: Rig, cp: Any, made: str) -> None:
    """SPEC G-PAGES, L-ORDER: the host comes after the GPU's work, and nobody waits before that."""
    fake, s = cuda.fake, cuda.stream()
    t = interop.empty((K,), "u1", shared_with=["cupy"]) if made == "empty" else interop.as_tensor(aligned(np.zeros(K, "u1")))
    with cp.cuda.Stream(s):
        with interop.acquire(t, "cupy", "write") as x:
            assert x.data.ptr == t.ptr
            view = x.host()
            fake.launch(s, lambda: view.fill(8), writes=[(x.data.ptr, K)])
            with pytest.raises(interop.LeaseError):
                t.map("read")
        assert fake.queued == 1
    del x
    fake.auto = True
    with t.map("read") as m:
        assert (m == 8).all()


def test_two_gpu_frameworks_lease_host_memory_one_after_the_other(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES, L-ORDER: on two streams; a race, if the second did not wait."""
    fake, a, b = cuda.fake, cuda.stream(), cuda.stream()
    t = interop.empty((K,), "u1", shared_with=["cupy"])
    for s, access in ((a, "write"), (b, "read_write"), (a, "read")):
        with cp.cuda.Stream(s), interop.acquire(t, "cupy", access) as x:
            fake.launch(s, **{"reads" if access == "read" else "writes": [(x.data.ptr, K)]})
    assert fake.queued == 3
    del x


def test_host_memory_is_refused_to_a_gpu_where_nobody_registers(cuda: Rig, cp: Any) -> None:
    """SPEC G-PAGES: a GPU that cannot; the error says so and nothing is copied unasked."""
    for attributes in cuda.fake.attributes:
        attributes[99] = 0
    with pytest.raises(ExchangeError):
        interop.to(np.zeros(100, "u1"), "cupy")
    with pytest.raises(ExchangeError, match="cupy"):
        interop.empty((100,), "u1", shared_with=["cupy"])
    assert _core.is_host(interop.empty((100,), "u1"))
