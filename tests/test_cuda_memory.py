"""Memory of GPUs on the fake driver: who gives it, when it goes, how it leaves and comes in as a descriptor, the allocators."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import fake_cupy
import memkit
import numpy as np
import pytest
from cuda_kit import Rig, each_call_failing, host, rig, wait_for

import interop
from interop import ExchangeError, ExternalHandle
from interop.contract import DeviceLostError

GRANULE = 2 << 20
UNCHECKED = ("cuMemRetainAllocationHandle", "cuPointerGetAttributes", "cuMemGetInfo", "cuThreadExchangeStreamCaptureMode")


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


def living(cuda: Rig) -> list[str]:
    """What interop has of the driver, without what the tests made."""
    fake = cuda.fake
    return [r.kind for r in fake.ranges if not r.dead and not hasattr(r, "mine")] + ["chunk" for _ in fake.physical] + \
        ["import" for _ in fake.external]


def gone(cuda: Rig) -> bool:
    gc.collect()
    cuda.settle()
    return not living(cuda)


def exportable(n: int = 5000, device: int = 0) -> interop.Tensor:
    return interop.empty((n,), "u1", device=f"cuda:{device}", shared_with=["process"])


# ---- allocation ----
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("shared", [[], ["process"]])
@pytest.mark.parametrize("alignment", [None, 64, 4096, 8 << 20])
def test_memory_of_a_gpu_is_aligned_and_on_that_gpu(cuda: Rig, device: int, shared: Any, alignment: int | None) -> None:
    """SPEC G-ALLOC, M-EMPTY-ALIGN."""
    t = interop.empty((10, 10), "f4", device=f"cuda:{device}", shared_with=shared, alignment=alignment)
    assert t.device == f"cuda:{device}" and t.ptr % max(256, alignment or 1) == 0
    found = cuda.fake.find(t.ptr)
    assert found is not None and found.device == device and found.base + found.size >= t.ptr + 400
    del t
    assert gone(cuda)


def test_memory_of_a_gpu_may_be_used_by_every_stream_at_once(cuda: Rig, cp: Any) -> None:
    """SPEC G-ALLOC: the allocation itself is over, on a stream that never has work."""
    a, b, t = cuda.stream(), cuda.stream(), interop.empty((100,), "u1", device="cuda:0")
    for i, s in enumerate((a, b)):
        with cp.cuda.Stream(s), cuda.fake.counting() as calls:
            x = interop.to(t[50 * i:50 * i + 50], "cupy")
        assert not calls["cuStreamWaitEvent"] and not calls["cuEventRecord"]
        cuda.fake.launch(s, writes=[(x.data.ptr, 50)])


@pytest.mark.parametrize("users", [1, 2])
def test_memory_of_a_gpu_goes_when_every_stream_that_was_given_it_is_done(cuda: Rig, cp: Any, users: int) -> None:
    """SPEC G-ALLOC, X-STREAM-5: without waiting for the device."""
    fake, t = cuda.fake, interop.empty((100,), "u1", device="cuda:0")
    streams = [cuda.stream() for _ in range(users)]
    address, xs = t.ptr, []
    for i, s in enumerate(streams):
        with cp.cuda.Stream(s):
            xs.append(interop.to(t[10 * i:10 * i + 10], "cupy"))
        fake.launch(s, writes=[(address + 10 * i, 10)])
    before = fake.calls["cuMemFreeAsync"]
    del t
    xs.clear()
    gc.collect()
    for s in streams:
        assert fake.calls["cuMemFreeAsync"] == before
        fake.run(s)
        threading.Event().wait(0.01)
    wait_for(lambda: fake.calls["cuMemFreeAsync"] == before + 1, "it is never freed")
    assert not fake.calls["cuCtxSynchronize"]


def test_an_empty_array_asks_no_driver(cuda: Rig) -> None:
    """SPEC G-ALLOC, M-EMPTY-SHAPE."""
    t = interop.empty((0, 3), "f4", device="cuda:1")
    assert t.device == "cuda:1" and not cuda.fake.calls["cuMemAllocAsync"]


@pytest.mark.parametrize(("party", "ok"), [("cupy", True), ("process", True), ("numpy", False)])
def test_who_can_share_memory_of_a_gpu(cuda: Rig, cp: Any, party: str, ok: bool) -> None:
    """SPEC G-ALLOC, M-EMPTY-PARTY."""
    if ok:
        assert interop.empty((4,), "f4", device="cuda:0", shared_with=[party]).device == "cuda:0"
        return
    with pytest.raises(ExchangeError, match=f"cannot be shared with {party}"):
        interop.empty((4,), "f4", device="cuda:0", shared_with=["cupy", party])
    assert not living(cuda)


@pytest.mark.parametrize("shared", [[], ["process"]])
def test_memory_that_is_out_is_a_memory_error(cuda: Rig, shared: Any) -> None:
    """SPEC G-ALLOC: which says how much is left; nothing stays, and a smaller one works."""
    cuda.fake.capacity = 4 << 20
    with pytest.raises(MemoryError, match=r"cuda:0 has no 5242880 bytes left: \d+ of 4194304 are free"):
        interop.empty((5 << 20,), "u1", device="cuda:0", shared_with=shared)
    assert not living(cuda)
    assert interop.empty((1 << 20,), "u1", device="cuda:0", shared_with=shared).nbytes == 1 << 20


def test_memory_is_given_beside_a_capture_which_goes_on(cuda: Rig) -> None:
    """SPEC G-ALLOC, X-STREAM-6: allocated, exported, imported and freed."""
    with cuda.fake.capturing(cuda.stream()) as capture:
        a, b = interop.empty((100,), "u1", device="cuda:0"), exportable()
        with b.allocation.export("opaque_fd") as handle:
            c = interop.wrap(handle, 5000, device="cuda:0", owner=None)
        del a, b, c, handle
        assert gone(cuda) and not capture.invalid


@pytest.mark.parametrize("shared", [[], ["process"]])
def test_a_step_of_allocation_that_fails_is_undone(cuda: Rig, shared: Any) -> None:
    """SPEC G-ALLOC: whichever it is."""
    def allocate() -> None:
        interop.empty((5000,), "u1", device="cuda:0", shared_with=shared)

    def after(call: str, error: BaseException | None) -> None:
        assert error is not None or call in UNCHECKED or call == "cuStreamSynchronize", call      # the last one is of the release
        assert gone(cuda) and cuda.fake._stack == [], call
        cuda.fake._local.mode = 0
        allocate()
        assert gone(cuda), call

    with quiet():
        failed = each_call_failing(cuda.fake, allocate, after, spare=frozenset({"cuCtxPopCurrent", "cuMemFreeAsync", "cuMemRelease",
                                                                                "cuMemUnmap", "cuMemAddressFree"}) | ASK)
    assert {"cuMemAllocAsync"} <= set(failed) or {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"} <= set(failed)


#: Asked again where something is given back: of a driver that fails there it stays.
ASK = frozenset({"cuCtxGetCurrent", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Errors in releases, which go to sys.unraisablehook, are the driver's here."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


def test_memory_of_a_lost_device_is_dropped_in_silence(cuda: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-LOST, G-ALLOC."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    a, b = interop.empty((100,), "u1", device="cuda:0"), exportable()
    cuda.fake.lose(0)
    with pytest.raises((DeviceLostError, ExchangeError)):
        interop.empty((100,), "u1", device="cuda:0")
    del a, b
    gc.collect()
    assert said == []
    cuda.fake.lost.clear()
    for r in cuda.fake.ranges:
        r.mine = True       # type: ignore[attr-defined]


# ---- closing ----
def test_memory_is_not_closed_while_somebody_has_it(cuda: Rig, cp: Any) -> None:
    """SPEC G-ALLOC, M-ALLOC-CLOSE: an array of a framework, an export, a lease."""
    t = interop.empty((100,), "u1", device="cuda:0")
    x = interop.to(t, "cupy")
    with pytest.raises(ExchangeError):
        t.allocation.close()
    del x
    cuda.settle()
    capsule = t.__dlpack__(stream=-1, max_version=(1, 3))
    with pytest.raises(ExchangeError):
        t.allocation.close()
    del capsule
    lease = interop.acquire(t, "cupy", "write")
    with pytest.raises(ExchangeError):
        t.allocation.close()
    lease.release()
    del lease
    cuda.settle()

    def closed() -> bool:
        with contextlib.suppress(ExchangeError):
            t.allocation.close()
        return t.allocation.is_closed

    wait_for(closed, "something uses it for ever")


def test_memory_that_queued_work_uses_is_not_freed_under_it(cuda: Rig) -> None:
    """SPEC G-ALLOC: closed while a copy is queued, it is either refused or freed after the copy."""
    fake, t, s = cuda.fake, interop.empty((100,), "u1", device="cuda:0"), cuda.stream()
    fake.launch(s, writes=[(fake.make_memory(8), 8)])
    before = fake.calls["cuMemFreeAsync"]
    done = interop.copyto(t, np.ones(100, "u1"), stream=s)
    with contextlib.suppress(ExchangeError):
        t.allocation.close()
    assert not done.done() and fake.calls["cuMemFreeAsync"] == before
    fake.auto = True
    done.wait(10)


# ---- out and in by descriptor ----
def test_an_export_is_the_whole_chunk_with_offset_and_uuid(cuda: Rig) -> None:
    """SPEC G-EXPORT, G-UUID, M-HANDLE-EXPORT."""
    t = exportable(3 << 20, 1)
    assert set(t.allocation.exports) == {"opaque_fd"}
    with t.allocation.export("opaque_fd") as handle:
        assert (handle.nbytes, handle.offset, handle.device_uuid) == (2 * GRANULE, 0, cuda.fake.uuids[1])
        assert not os.get_inheritable(handle.value) and os.fstat(handle.value).st_size == handle.nbytes
        number = handle.value
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    with pytest.raises(ExchangeError, match="dma_buf"):
        t.allocation.export("dma_buf")


def test_what_comes_in_is_the_same_bytes(cuda: Rig) -> None:
    """SPEC G-IMPORT, M-HANDLE-IMPORT, M-HANDLE-FD: the caller's handle stays the caller's."""
    t = exportable()
    host(t)[:] = 3
    with t.allocation.export("opaque_fd") as handle:
        there = interop.wrap(handle, 5000, device="cuda:0", owner=None)
        assert handle.fileno() > 0
    u = there.tensor((5000,), "u1")
    assert u.ptr != t.ptr and (host(u) == 3).all()
    host(u)[7] = 9
    assert host(t)[7] == 9
    del t, handle                           # which knows what it is of
    gc.collect()
    assert host(u)[7] == 9                  # the memory goes with its last mapping
    del u, there
    assert gone(cuda)


def test_imports_share_leases_with_what_they_are_of(cuda: Rig, cp: Any) -> None:
    """SPEC G-IMPORT, M-HANDLE-ROOT."""
    t = exportable()
    with t.allocation.export("opaque_fd") as handle:
        u = interop.wrap(handle, 5000, device="cuda:0", owner=None).tensor((5000,), "u1")
    with interop.acquire(t, "cupy", "write"), pytest.raises(interop.LeaseError):
        interop.acquire(u, "cupy", "read")


def bare(handle: ExternalHandle, **changes: Any) -> ExternalHandle:
    """As another process would have it: without an owner."""
    fields = {n: getattr(handle, n) for n in ("nbytes", "offset", "dedicated", "device_uuid")} | changes
    return ExternalHandle.duplicate("opaque_fd", handle.fileno(), fields.pop("nbytes"), **fields)


@pytest.mark.parametrize("case", ["another GPU's", "none", "zeros", "imported on the other GPU"])
def test_a_descriptor_of_another_gpu_is_refused(cuda: Rig, case: str) -> None:
    """SPEC G-IMPORT, G-UUID: by UUID, without a driver call that would take it."""
    t = exportable()
    uuid = {"another GPU's": cuda.fake.uuids[1], "none": None, "zeros": bytes(16)}.get(case, cuda.fake.uuids[0])
    with t.allocation.export("opaque_fd") as handle, bare(handle, device_uuid=uuid) as other, cuda.fake.counting() as calls:
        with pytest.raises(ExchangeError, match="one and the same GPU"):
            interop.wrap(other, 5000, device="cuda:1" if case.startswith("imported") else "cuda:0", owner=None)
        assert other.fileno() > 0
    assert not calls["cuMemImportFromShareableHandle"] and not calls["cuImportExternalMemory"]


@pytest.mark.parametrize("nbytes", [4 * GRANULE, 1 << 40])
def test_a_descriptor_of_another_size_is_refused_and_nothing_stays(cuda: Rig, nbytes: int) -> None:
    """SPEC G-IMPORT."""
    t = exportable()
    before = memkit.fds()
    with t.allocation.export("opaque_fd") as handle, bare(handle, nbytes=nbytes) as other:
        with pytest.raises(ExchangeError, match="size of the whole memory object"):
            interop.wrap(other, 100, device="cuda:0", owner=None)
    assert memkit.fds() == before and sorted(living(cuda)) == ["chunk", "mapped", "reserved"]


@pytest.mark.parametrize("kind", ["memfd", "pipe", "socket"])
def test_a_descriptor_that_is_no_drivers_is_refused_by_what_it_is(cuda: Rig, kind: str) -> None:
    """SPEC G-IMPORT, M-HANDLE-FD: and stays the caller's."""
    import socket

    ends: list[Any] = list(os.pipe()) if kind == "pipe" else [os.memfd_create("x")] if kind == "memfd" else list(socket.socketpair())
    fd = ends[0] if isinstance(ends[0], int) else ends[0].fileno()
    before = memkit.fds()
    with ExternalHandle.duplicate("opaque_fd", fd, GRANULE, device_uuid=cuda.fake.uuids[0]) as handle:
        with pytest.raises(ExchangeError, match=f"it is a.*{kind}"):
            interop.wrap(handle, 100, device="cuda:0", owner=None)
        os.fstat(handle.fileno())
    assert memkit.fds() == before and not living(cuda)
    for end in ends:
        os.close(end) if isinstance(end, int) else end.close()


@pytest.mark.parametrize("dedicated", [False, True])
def test_memory_of_another_api_comes_in_and_is_unmapped_before_its_import_is_destroyed(cuda: Rig, dedicated: bool) -> None:
    """SPEC G-IMPORT: sizes that are no whole granules are another API's."""
    fake, fd = cuda.fake, os.memfd_create("vulkan")
    os.ftruncate(fd, 3 * 65536)
    fake.adopt(fd, 0)
    with ExternalHandle("opaque_fd", fd, 3 * 65536, offset=4096, dedicated=dedicated, device_uuid=fake.uuids[0]) as handle:
        a = interop.wrap(handle, 1000, device="cuda:0", owner=None)
        t = a.tensor((1000,), "u1")
        host(t)[:] = 5
        assert os.pread(handle.fileno(), 3, 4096) == b"\5\5\5" and os.pread(handle.fileno(), 1, 0) == b"\0"
    assert sorted(living(cuda)) == ["external", "import"]
    before = list(fake.calls)
    del t, a
    assert gone(cuda)
    assert [c for c in fake.calls if c not in before and "Pop" not in c] == ["cuMemFree", "cuDestroyExternalMemory"]


@pytest.mark.parametrize("api", ["CUDA", "another"])
def test_a_step_of_an_import_that_fails_is_undone(cuda: Rig, api: str) -> None:
    """SPEC G-IMPORT: whichever it is; no descriptor is lost and none is closed twice."""
    fake, t = cuda.fake, exportable()
    fd = os.memfd_create("vulkan")
    os.ftruncate(fd, 65536)
    fake.adopt(fd, 0)
    handle = t.allocation.export("opaque_fd")
    other = bare(handle) if api == "CUDA" else ExternalHandle.duplicate("opaque_fd", fd, 65536, device_uuid=fake.uuids[0])
    before, mine = memkit.fds(), sorted(living(cuda))

    def import_() -> None:
        interop.wrap(other, 100, device="cuda:0", owner=None)

    def after(call: str, error: BaseException | None) -> None:
        gc.collect()
        cuda.settle()
        assert sorted(living(cuda)) == mine and memkit.fds() == before and fake._stack == [], (call, error)
        import_()
        gc.collect()
        assert sorted(living(cuda)) == mine, call

    undo = frozenset({"cuCtxPopCurrent", "cuMemFree", "cuDestroyExternalMemory", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree"})
    failed = each_call_failing(fake, import_, after, spare=undo | ASK)
    assert {"cuMemImportFromShareableHandle"} <= set(failed)
    other.close()
    handle.close()
    os.close(fd)


def test_a_step_of_an_export_that_fails_leaves_no_descriptor(cuda: Rig) -> None:
    """SPEC G-EXPORT."""
    t, before = exportable(), memkit.fds()

    def export() -> None:
        t.allocation.export("opaque_fd").close()

    def after(call: str, error: BaseException | None) -> None:
        assert error is not None or call in UNCHECKED or call == "cuMemGetAddressRange", call       # `exports` takes a no
        assert memkit.fds() == before and sorted(living(cuda)) == ["chunk", "mapped", "reserved"], call
        export()

    failed = each_call_failing(cuda.fake, export, after, spare=frozenset({"cuMemRelease", "cuCtxPopCurrent"}) | ASK)
    assert {"cuMemExportToShareableHandle", "cuDeviceGetUuid"} <= set(failed)


# ---- memory of others ----
@pytest.mark.parametrize(("kind", "by"), [("device", "cudaMalloc"), ("pool", "cudaMallocAsync"), pytest.param(
    "managed", "managed", marks=pytest.mark.xfail(strict=True, reason="memory.export: no adapter answers for cuda_managed"))])
def test_memory_that_was_not_made_for_it_is_not_exported_and_the_error_says_why(cuda: Rig, kind: str, by: str) -> None:
    """SPEC G-EXPORT: how it was allocated, and what to allocate it with."""
    a = cuda.tensor(cuda.fake.make_memory(100, 0, kind), (100,), "u1", device=(13 if kind == "managed" else 2, 0), stream=-1).allocation
    assert not a.exports
    with pytest.raises(ExchangeError, match=rf"{by}.*mem_pool"):
        a.export("opaque_fd")


def chunks(cuda: Rig, *sizes: int, handles: int = 1) -> int:
    """Virtual memory as torch's expandable segments have it: several chunks in one reservation. The driver's calls, by hand."""
    fake, total = cuda.fake, sum(sizes)
    fake.cuInit(0)
    prop = fake.CUmemAllocationProp()
    prop.type, prop.location.type, prop.requestedHandleTypes = 1, 1, handles
    base = int(fake.cuMemAddressReserve(total, 0, 0, 0)[1])
    at = base
    for size in sizes:
        chunk = fake.cuMemCreate(size, prop, 0)[1]
        assert fake.cuMemMap(at, size, 0, chunk, 0)[0] == 0 and fake.cuMemRelease(chunk)[0] == 0
        at += size
    access = fake.CUmemAccessDesc()
    access.location.type, access.flags = 1, 3
    assert fake.cuMemSetAccess(base, total, [access], 1)[0] == 0
    return base


def test_virtual_memory_of_others_leaves_where_it_lies_in_one_chunk(cuda: Rig) -> None:
    """SPEC G-EXPORT: torch's expandable segments; the handle is the chunk, with the offset in it."""
    base = chunks(cuda, GRANULE, 2 * GRANULE)
    a = cuda.tensor(base + GRANULE + 512, (1000,), "u1", stream=-1).allocation
    assert set(a.exports) == {"opaque_fd"}
    with a.export("opaque_fd") as handle:
        assert (handle.nbytes, handle.offset) == (2 * GRANULE, 512)
    across = cuda.tensor(base + GRANULE - 100, (1000,), "u1", stream=-1).allocation
    assert not across.exports
    with pytest.raises(ExchangeError, match=r"spans 2 chunks.*mem_pool"):
        across.export("opaque_fd")
    with pytest.raises(ExchangeError, match="is on cuda:0, not on cuda:1"):
        cuda.tensor(base, (100,), "u1", device=(2, 1), stream=-1).allocation.export("opaque_fd")
    del a, across
    cuda.fake.cuMemUnmap(base, 3 * GRANULE)
    cuda.fake.cuMemAddressFree(base, 3 * GRANULE)


def test_virtual_memory_without_a_descriptor_handle_is_refused(cuda: Rig) -> None:
    """SPEC G-EXPORT."""
    base = chunks(cuda, GRANULE, handles=0)
    a = cuda.tensor(base, (1000,), "u1", stream=-1).allocation
    assert not a.exports
    with pytest.raises(ExchangeError, match="without a file descriptor handle"):
        a.export("opaque_fd")
    del a
    cuda.fake.cuMemUnmap(base, GRANULE)
    cuda.fake.cuMemAddressFree(base, GRANULE)


# ---- fork ----
def test_a_forked_child_is_told_and_drops_in_silence() -> None:
    """SPEC G-FORK, M-FORK: memory, imports, registrations and segments are the parent's; the parent goes on."""
    memkit.prints("""
from cuda_kit import rig
import fake_cupy
from interop.adapters.cuda.cupy_allocator import Segments
with rig() as cuda, fake_cupy.installed(cuda.fake):
    kept = [interop.empty((100,), "u1", device="cuda:0"), interop.empty((100,), "u1", device="cuda:0", shared_with=["process"])]
    n = np.zeros(5000, "u1")
    shown = interop.to(n, "cuda:0", copy=False)
    handle = kept[1].allocation.export("opaque_fd")
    s = Segments(cuda.adapter.driver, cuda.adapter.streams)
    block = s.malloc(1000, 0, None, 1)
    pid = os.fork()
    if pid == 0:
        for use in (lambda: interop.empty((1,), "u1", device="cuda:0"), lambda: interop.copyto(n[:100], kept[0]),
                    lambda: kept[1].allocation.export("opaque_fd")):
            try:
                use()
                print("no error", flush=True)
            except interop.ExchangeError as e:
                assert "fork" in str(e), e
        s.free(block)
        handle.close()
        del kept, shown, handle, use
        gc.collect()
        os._exit(7)
    assert os.waitpid(pid, 0)[1] >> 8 == 7
    s.free(block)
    cuda.fake.auto = True
    assert s.trim()
    handle.close()
    interop.copyto(kept[0], np.ones(100, "u1")).wait(5)
    del kept, shown, handle
    gc.collect()
print("ok")
""", "ok")
