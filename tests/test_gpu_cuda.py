"""CUDA on a real card: order between streams, keep-alive, copies, host pages, allocators. `make test-gpu` runs it; elsewhere it skips."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import interop
import interop.testing
from interop import _core
from interop.adapters import cuda
from interop.adapters import cupy as icupy
from interop.adapters import torch as itorch
from interop.adapters.cuda import pointers

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="no torch here")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
cp = pytest.importorskip("cupy", reason="no CuPy here")
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")      # before memkit, which is for the CPU's tests too
from memkit import ROOT, fds, until  # noqa: E402

N = 1 << 20
SLOW = 400_000_000                  # clock ticks: about 0.2 s
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")


@pytest.fixture
def jnp():
    jax = pytest.importorskip("jax", reason="no JAX here")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    return jax.numpy


@pytest.fixture(autouse=True)
def first_gpu():
    """JAX, when it starts on two GPUs, leaves the second one current."""
    torch.cuda.set_device(0)


@pytest.fixture(autouse=True, scope="module")
def warm():
    """What each reader and writer compiles at its first call would be all the time that a slow kernel takes."""
    for writes, reads in itertools.product((torch_writes, cupy_writes), (torch_reads, cupy_reads)):
        with writes(True) as x:
            reads(x)


# ---- a writer that is slow, on each framework's stream ----
@contextlib.contextmanager
def torch_writes(side):
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        x += 1
        yield x


@contextlib.contextmanager
def cupy_writes(side):
    stream = cp.cuda.Stream(non_blocking=True) if side else cp.cuda.Stream.null
    x = cp.zeros(N, cp.float32)
    cp.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr) if side else torch.cuda.default_stream()):
            torch.cuda._sleep(SLOW)
        x += 1
        yield x


@contextlib.contextmanager
def jax_writes(side):
    import jax

    x = jax.numpy.zeros(N, jax.numpy.float32)
    a = jax.numpy.ones((4096, 4096), jax.numpy.float32)
    slow = jax.jit(lambda x, a: x + 1 + 0 * jax.lax.fori_loop(0, 60, lambda i, b: b @ a * 1e-4, a)[0, 0])
    slow.lower(x, a).compile()
    yield slow(x, a)


WRITERS = {"torch": torch_writes, "cupy": cupy_writes, "jax": jax_writes}


# ---- a reader on each framework's stream ----
def torch_reads(t):
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        y = interop.to(t, "torch", readonly=True) * 2
    other.synchronize()
    return float(y.min()), float(y.max())


def cupy_reads(t):
    with cp.cuda.Stream(non_blocking=True) as s:
        y = interop.to(t, "cupy", readonly=True) * 2
        s.synchronize()
    return float(y.min()), float(y.max())


def jax_reads(t):
    y = interop.to(t, "jax", readonly=True) * 2
    return float(y.min()), float(y.max())


READERS = {"torch": torch_reads, "cupy": cupy_reads, "jax": jax_reads}


@pytest.mark.parametrize("through", ["directly", "Tensor"])
@pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(WRITERS, READERS)))
def test_a_reader_on_another_stream_waits_for_a_slow_writer(writer, reader, side, through, jnp):
    """SPEC X-STREAM-3, X-STREAM-4: without the order the reader sees zeros."""
    with WRITERS[writer](side) as x:
        # the same framework on both sides gets its own object back, whose order is its own business
        t = interop.as_tensor(x) if through == "Tensor" or writer == reader else x
        seen = READERS[reader](t)
    assert seen == (2, 2)


def test_the_proof_fails_without_the_order(monkeypatch):
    """The mutant of the test above: what it sees when nobody orders the streams."""
    monkeypatch.setattr(cuda.ADAPTER, "order", lambda *a: None)
    with torch_writes(True) as x:
        assert cupy_reads(x) != (2, 2)


def test_the_host_waits_for_nobody_when_streams_differ():
    """SPEC X-STREAM-3."""
    with torch_writes(True) as x:
        t = interop.as_tensor(x)
        ended = torch.cuda.Event()
        ended.record()
        with cp.cuda.Stream(non_blocking=True):
            interop.to(t, "cupy")
        assert not ended.query()


# ---- keep-alive ----
def test_memory_waits_for_the_stream_that_still_uses_it():
    """SPEC X-STREAM-5 (field report B33): dropped while another stream reads, the block is not handed out again before it has."""
    x = torch.full((N,), 3.0, device="cuda")
    torch.cuda.synchronize()
    address = x.data_ptr()
    side = cp.cuda.Stream(non_blocking=True)
    with side:
        c = interop.to(x, "cupy")
        with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            torch.cuda._sleep(SLOW)
        y = c * 2
    del x, c
    gc.collect()
    again = torch.zeros(N, device="cuda")                   # the allocator's first choice would be the same block
    assert again.data_ptr() != address
    side.synchronize()
    assert float(y.min()) == 6
    del again

    def handed_out():
        return torch.zeros(N, device="cuda").data_ptr() == address

    assert until(handed_out), "the block never came back"


def test_a_consumer_of_a_capsule_is_waited_for_too():
    """SPEC X-STREAM-5."""
    x = torch.full((N,), 3.0, device="cuda")
    address = x.data_ptr()
    side = torch.cuda.Stream()
    t = interop.as_tensor(x)
    with torch.cuda.stream(side):
        y = torch.from_dlpack(t)                            # asks for its current stream through __dlpack__
        torch.cuda._sleep(SLOW)
        z = y * 2
    del x, t, y
    gc.collect()
    assert torch.zeros(N, device="cuda").data_ptr() != address
    side.synchronize()
    assert z.min().item() == 6


PAIRS = {
    "torch-cupy": lambda: interop.to(torch.empty(N, device="cuda"), "cupy"),
    "cupy-torch": lambda: interop.to(cp.empty(N, cp.float32), "torch"),
    "torch-jax": lambda: interop.to(torch.empty(N, device="cuda"), "jax"),
    "torch-Tensor-torch": lambda: interop.to(interop.as_tensor(torch.empty(N, device="cuda")), "torch"),
}


@pytest.mark.parametrize("side", [False, True], ids=["same-stream", "other-stream"])
@pytest.mark.parametrize("pair", PAIRS)
def test_sharing_and_dropping_leaves_device_memory_and_descriptors_flat(pair, side, jnp):
    """SPEC X-OWN-3."""
    def cycles(n):
        with torch.cuda.stream(torch.cuda.Stream() if side and pair.startswith("torch") else torch.cuda.default_stream()):
            for _ in range(n):
                PAIRS[pair]()
        torch.cuda.synchronize()
        gc.collect()

    cycles(200)
    until(lambda: _core.release_ready() == 0)
    free, open_before = torch.cuda.mem_get_info()[0], fds()
    cycles(5000)
    until(lambda: _core.release_ready() == 0)
    assert free - torch.cuda.mem_get_info()[0] <= 64 << 20
    assert fds() <= open_before


# ---- capture ----
def test_capture_and_replay_with_a_shared_block():
    """SPEC X-STREAM-3, X-STREAM-6."""
    x, y = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        with cp.cuda.ExternalStream(stream.cuda_stream):
            c = interop.to(x, "cupy")                       # the capturing stream on both sides: nothing is asked of the driver
            c += 1
        interop.copyto(y, x, stream=torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (x[0].item(), y[0].item()) == (3, 3)


def test_points_of_others_do_not_break_a_capture():
    """SPEC X-STREAM-6: interop's threads ask events while somebody captures globally."""
    x = torch.full((N,), 3.0, device="cuda")
    side = cp.cuda.Stream(non_blocking=True)
    with side:
        c = interop.to(x, "cupy")
        with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            torch.cuda._sleep(SLOW)
    del x, c                                                # from here on a thread of interop's looks at an event
    z = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            z += 1
            threading.Event().wait(0.002)
    graph.replay()
    torch.cuda.synchronize()
    assert z[0].item() == 50


def test_pageable_copies_are_refused_in_a_capture_and_leave_it_whole():
    """SPEC X-STREAM-6."""
    x = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(BufferError, match="captur"):
            interop.copyto(x, np.zeros(16, np.float32), stream=torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == 1


# ---- what memory it is ----
class Plain:
    """Nothing but the CUDA array interface: nobody vouches."""

    def __init__(self, c):
        self.c = c
        self.__cuda_array_interface__ = c.__cuda_array_interface__


def test_pointers_are_told_apart():
    """SPEC G-POINTER."""
    device = cp.arange(4, dtype=cp.float32)
    with cp.cuda.using_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc):
        managed = cp.arange(4, dtype=cp.float32)
    with cp.cuda.using_allocator(cp.cuda.MemoryAsyncPool().malloc):
        pool = cp.arange(4, dtype=cp.float32)
    pinned = torch.ones(4).pin_memory()
    kinds = [pointers.classify(cuda.ADAPTER.driver, p) for p in (device.data.ptr, managed.data.ptr, pool.data.ptr, pinned.data_ptr())]
    assert [k.kind for k in kinds] == ["device", "managed", "pool", "pinned"]
    assert str(interop.as_tensor(Plain(managed)).device) == "cuda_managed:0"
    assert str(interop.as_tensor(Plain(pool)).device) == "cuda:0"
    with pytest.raises(BufferError, match="not"):
        pointers.classify(cuda.ADAPTER.driver, np.ones(1 << 16).ctypes.data)


def test_managed_memory_goes_to_torch_and_numpy_and_back():
    """SPEC X-DEV-3, G-POINTER."""
    with cp.cuda.using_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc):
        c = cp.arange(4, dtype=cp.float32)
    t = interop.to(c, "torch")
    assert t.is_cuda and t.data_ptr() == c.data.ptr
    n = interop.to(c, "numpy")
    assert n.ctypes.data == c.data.ptr and n.tolist() == [0, 1, 2, 3]
    capsule = interop.testing.Capsule(interop.as_tensor(c).__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
    assert capsule.device == (1, 0)


def test_memory_of_a_stream_ordered_pool_is_shared_like_any_other():
    """SPEC X-TO-4 (field report B58)."""
    with cp.cuda.using_allocator(cp.cuda.MemoryAsyncPool().malloc):
        c = cp.arange(8, dtype=cp.float32)
        t = interop.to(c, "torch")
    assert t.data_ptr() == c.data.ptr and t.sum().item() == 28


def test_the_device_is_known_by_its_uuid():
    """SPEC G-UUID."""
    ours = cuda.ADAPTER.driver.uuid(0)
    theirs = torch.cuda.get_device_properties(0).uuid
    assert ours.hex() == str(theirs).replace("-", "")


# ---- copies ----
SHAPES = [(5,), (3, 4, 5), (1 << 22,), (1000, 1030), (7, 1 << 18)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_host_and_device_copy_both_ways(shape):
    """SPEC G-COPY."""
    n = np.random.default_rng(0).integers(0, 255, shape).astype(np.int32)
    c = cp.zeros(shape, cp.int32)
    interop.copyto(c, n).wait()
    assert (cp.asnumpy(c) == n).all()
    back = np.zeros(shape, np.int32)
    interop.copyto(back, c).wait()
    assert (back == n).all()


@pytest.mark.parametrize("step", [2, -1, 3])
def test_strided_copies_touch_the_elements_alone(step):
    """SPEC G-COPY."""
    n = np.arange(6 * 1000 * 8, dtype=np.float32).reshape(6, 1000, 8)
    c = cp.zeros((6, 1000, 8), cp.float32)
    interop.copyto(c[:, ::step], n[:, ::step]).wait()
    want = np.zeros_like(n)
    want[:, ::step] = n[:, ::step]
    assert (cp.asnumpy(c) == want).all()
    out = np.zeros_like(n)
    interop.copyto(out.transpose(2, 0, 1)[::step], interop.as_tensor(c).permute(2, 0, 1)[::step]).wait()
    want2 = np.zeros_like(n)
    want2.transpose(2, 0, 1)[::step] = want.transpose(2, 0, 1)[::step]
    assert (out == want2).all()
    d = cp.zeros((1000, 6, 8), cp.float32)
    interop.copyto(d, interop.as_tensor(c).permute(1, 0, 2)).wait()
    assert (cp.asnumpy(d) == want.transpose(1, 0, 2)).all()


def test_a_copy_into_torch_memory_comes_before_what_torch_does_next():
    """SPEC G-COPY: on torch's own stream, without a wait of the host's."""
    side = torch.cuda.Stream()
    n = np.full(1 << 24, 5, np.float32)
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 24, device="cuda")
        torch.cuda._sleep(SLOW)
        interop.copyto(x, n)
        y = x * 2
    side.synchronize()
    assert (y.min().item(), y.max().item()) == (10, 10)


def test_device_names_move_memory_into_the_frameworks_own_allocator():
    """SPEC X-TO-3."""
    before = torch.cuda.memory_allocated()
    t = interop.to(np.arange(1 << 20, dtype=np.float32), "torch", device="cuda:0")
    assert torch.cuda.memory_allocated() >= before + (4 << 20)
    assert t[12345].item() == 12345
    c = interop.to(np.arange(1 << 20, dtype=np.float32), "cupy", device="cuda:0")
    assert float(c[54321]) == 54321
    n = interop.to(t, "numpy", device="cpu")
    assert (n == np.arange(1 << 20)).all()
    back = interop.to(c, "torch", device="cpu")
    assert not back.is_cuda and back[54321].item() == 54321


def test_jax_arrays_cross_both_ways(jnp):
    """SPEC X-TO-3."""
    j = interop.to(np.arange(1 << 20, dtype=np.float32), "jax", device="cuda:0")
    assert next(iter(j.devices())).platform == "gpu" and float(j[777]) == 777
    n = interop.to(j, "numpy", device="cpu")
    assert (n == np.arange(1 << 20)).all()


def test_a_map_of_device_memory_is_staged_and_written_back():
    """SPEC L-STAGE."""
    c = cp.arange(1000, dtype=cp.float32)
    with interop.as_tensor(c).map("read_write") as n:
        assert n[999] == 999
        n += 1
    assert float(c[0]) == 1


# ---- memory of interop's ----
def test_empty_on_a_gpu_is_shared_by_torch_and_cupy_and_freed_in_order():
    """SPEC G-ALLOC."""
    t = interop.empty((1 << 20,), "float32", device="cuda:0", shared_with=["torch", "cupy"])
    x, c = interop.to(t, "torch"), interop.to(t, "cupy")
    assert x.data_ptr() == c.data.ptr == t.ptr
    x.fill_(4)
    with interop.acquire(t, "cupy", "read") as y:
        assert float(y.sum()) == 4 * (1 << 20)
    with pytest.raises(BufferError):
        t.allocation.close()
    del x, c, y
    gc.collect()
    torch.cuda.synchronize()
    assert until(lambda: t.allocation.lent_out == 0)
    t.allocation.close()


def test_leases_order_frameworks_on_the_gpu_without_the_host():
    """SPEC L-ORDER: torch's slow write, then CuPy's read, each on its own stream, in a ring of one frame."""
    t = interop.empty((N,), "float32", device="cuda:0")
    mine, yours = torch.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    sums = []
    for i in range(3):
        with torch.cuda.stream(mine), interop.acquire(t, "torch", "write") as x:
            torch.cuda._sleep(SLOW // 4)
            x.fill_(i)
        with yours, interop.acquire(t, "cupy", "read") as c:
            sums.append(c.sum())
    yours.synchronize()
    assert [float(s) for s in sums] == [0, N, 2 * N]


def test_exportable_memory_crosses_by_descriptor_within_the_process():
    """SPEC G-EXPORT, M-HANDLE-FD."""
    before = fds()
    t = interop.empty((1 << 20,), "float32", device="cuda:0", shared_with=["process"])
    assert "opaque_fd" in t.allocation.exports
    interop.to(t, "cupy")[...] = 7
    cp.cuda.Device().synchronize()
    with t.allocation.export("opaque_fd") as h:
        other = interop.wrap(h, t.nbytes, device="cuda:0", owner=None)
        assert float(interop.to(other.tensor(t.shape, "float32"), "torch").sum()) == 7 * (1 << 20)
    del other, h, t
    gc.collect()
    assert until(lambda: fds() <= before)


def test_memory_of_torch_says_why_it_cannot_be_exported():
    """SPEC G-EXPORT."""
    a = interop.as_tensor(torch.ones(8, device="cuda")).allocation
    assert a.exports == frozenset()
    with pytest.raises(BufferError, match=r"cudaMalloc.*mem_pool"):
        a.export("opaque_fd")


def test_arrays_made_with_the_allocators_can_be_exported():
    """SPEC G-EXPORT."""
    with itorch.mem_pool():
        x = torch.full((1 << 20,), 2.0, device="cuda")
    pool = icupy.allocator()
    with cp.cuda.using_allocator(pool):
        c = cp.full(1 << 20, 3, cp.float32)
        small = [cp.full(16, i, cp.float32) for i in range(1000)]
    torch.cuda.synchronize()
    for array, value in ((x, 2), (c, 3), (small[500], 500)):
        t = interop.as_tensor(array)
        with t.allocation.export("opaque_fd") as h:
            other = interop.wrap(h, t.nbytes, device="cuda:0", owner=None)
            seen = interop.to(other.tensor(t.shape, "float32"), "torch")
            assert (seen.min().item(), seen.max().item()) == (value, value)


EXPANDABLE = """
import torch, interop
small = torch.ones(1 << 20, device="cuda")
big = torch.ones(1 << 25, device="cuda")
h = interop.as_tensor(small).allocation.export("opaque_fd")
a = interop.wrap(h, small.nbytes, device="cuda:0", owner=None)
print(interop.to(a.tensor(small.shape, "float32"), "torch").sum().item())
try:
    interop.as_tensor(big).allocation.export("opaque_fd")
except BufferError as e:
    print("chunks" in str(e))
"""


def test_expandable_segments_export_what_lies_in_one_chunk():
    """SPEC G-EXPORT."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["1048576.0", "True"], done.stderr[-2000:]


# ---- host pages ----
def test_numpy_memory_is_shown_to_cupy_in_place():
    """SPEC G-PAGES."""
    n = np.arange(100_000, dtype=np.float32)
    c = interop.to(n, "cupy")
    c += 1
    cp.cuda.Device().synchronize()
    assert n[0] == 1 and n[-1] == 100_000
    n[0] = 50
    assert float(c[0]) == 50
    parts = [interop.to(n[i:i + 500], "cupy") for i in range(0, 5000, 250)]        # overlapping pages and ranges
    assert [float(p[0]) for p in parts[1:3]] == [251, 501]
    del c, parts
    gc.collect()
    assert until(lambda: len(cuda.ADAPTER.memory.pages) == 0)


def test_pages_made_for_both_stay_registered():
    """SPEC G-ALLOC."""
    t = interop.empty((1080, 1920, 4), "uint8", device="cpu", shared_with=["cupy", "numpy"])
    n, c = interop.to(t, "numpy"), interop.to(t, "cupy")
    n[...] = 9
    assert int(c.sum()) == 9 * t.size
    c[...] = 1
    cp.cuda.Device().synchronize()
    assert n.min() == n.max() == 1


def test_copy_false_shows_host_memory_to_a_gpu():
    """SPEC X-TO-3."""
    n = np.arange(1000, dtype=np.float32)
    t = interop.to(n, "torch", device="cuda:0", copy=False)
    assert t.is_cuda
    t += 1
    torch.cuda.synchronize()
    assert n[0] == 1


def test_a_lease_of_host_memory_on_the_gpu_ends_when_the_gpu_is_done():
    """SPEC L-ORDER."""
    n = np.zeros(N, np.float32)
    with interop.acquire(n, "cupy", "write") as c:
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.cuda._sleep(SLOW)
        c.fill(3)
    with interop.as_tensor(n).map("read") as a:
        assert a.min() == a.max() == 3


# ---- two GPUs ----
@TWO
@pytest.mark.parametrize("target", ["torch", "cupy"])
def test_the_current_device_is_left_as_it_was(target):
    """SPEC X-STREAM-7 (field reports B55, B56)."""
    torch.cuda.set_device(0)
    x = torch.ones(N, device="cuda:1")
    with cp.cuda.Device(1):
        c = cp.ones(N, cp.float32)
    for a in (x, c, interop.as_tensor(x)):
        y = interop.to(a, target)
        t = interop.as_tensor(y)
        assert str(t.device) == "cuda:1"
        assert torch.cuda.current_device() == 0 == cp.cuda.runtime.getDevice()
    with pytest.raises(BufferError):
        interop.to(x, "numpy")
    assert torch.cuda.current_device() == 0


@TWO
def test_copies_between_two_gpus():
    """SPEC G-COPY."""
    x = torch.arange(N, dtype=torch.float32, device="cuda:1").reshape(1024, 1024)
    t = interop.to(x, "torch", device="cuda:0")
    assert t.device.index == 0 and (t.cpu() == x.cpu()).all()
    out = torch.zeros(1024, 1024, device="cuda:0")
    interop.copyto(out, interop.as_tensor(x).permute(1, 0)).wait()
    assert (out.cpu() == x.cpu().T).all()
    assert torch.cuda.current_device() == 0


REORDERED = """
import torch, interop
from interop.adapters import cuda
from interop.adapters import cupy as icupy
from interop.adapters import torch as itorch
from interop.adapters.cuda import pointers
x = torch.ones(4, device="cuda:1")
print(interop.as_tensor(x).device, cuda.ADAPTER.driver.uuid(1).hex())
"""


@TWO
def test_reordered_devices_keep_their_uuid():
    """SPEC G-UUID (field report B55)."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1,0"}
    done = subprocess.run([sys.executable, "-c", REORDERED], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["cuda:1", cuda.ADAPTER.driver.uuid(0).hex()], done.stderr[-2000:]
