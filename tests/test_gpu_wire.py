"""CUDA memory over the wire, on a real card: CuPy, PyTorch, JAX and raw pointers. `make test-gpu` runs it; elsewhere it skips."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import interop

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="no torch here")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
cp = pytest.importorskip("cupy", reason="no CuPy here")


@pytest.fixture(autouse=True, scope="module")
def warm():
    """What is compiled at the first call would be all the time that a slow kernel takes."""
    (cp.zeros(1 << 20, cp.float32) * 2).min()
    (torch.zeros(1 << 20, device="cuda") * 2).min()


@pytest.fixture
def jnp():
    jax = pytest.importorskip("jax", reason="no JAX here")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    return jax.numpy


def test_torch_to_cupy_shares_what_either_side_writes():
    """SPEC X-TO-4."""
    t = torch.arange(8, dtype=torch.float32, device="cuda")
    c = interop.to(t, "cupy")
    assert c.data.ptr == t.data_ptr()
    c[0] = 42
    cp.cuda.Device().synchronize()
    assert t[0].item() == 42


def test_cupy_to_torch_shares_what_either_side_writes():
    """SPEC X-TO-4."""
    c = cp.arange(8, dtype=cp.float32)
    t = interop.to(c, "torch")
    assert t.data_ptr() == c.data.ptr
    assert t.device.type == "cuda"
    t[1] = 7
    torch.cuda.synchronize()
    assert float(c[1]) == 7


def test_jax_and_torch_share_device_memory_both_ways(jnp):
    """SPEC X-TO-4."""
    j = jnp.arange(1024, dtype=jnp.float32)
    t = interop.to(j, "torch", readonly=True)
    assert t.data_ptr() == j.unsafe_buffer_pointer()
    back = interop.to(t, "jax", readonly=True)
    assert back.unsafe_buffer_pointer() == t.data_ptr()


def test_a_tensor_knows_its_gpu_and_refuses_the_host():
    """SPEC X-DEV-3."""
    t = interop.as_tensor(torch.ones(4, device="cuda"))
    assert str(t.device) == "cuda:0"
    for read in (np.asarray, memoryview, lambda x: interop.to(x, "numpy")):
        with pytest.raises((BufferError, TypeError)):
            read(t)


def test_device_cpu_copies_and_a_guard_sees_it():
    """SPEC X-TO-3."""
    t = torch.arange(1000, dtype=torch.int32, device="cuda")
    with interop.copy_guard("log") as routes:
        n = interop.to(t, "numpy", device="cpu")
    assert (n == np.arange(1000)).all()
    assert len(routes) == 1
    with interop.copy_guard("disallow"), pytest.raises(interop.ExchangeError):
        interop.to(t, "numpy", device="cpu")


def test_host_to_cuda_through_the_target_framework():
    """SPEC X-TO-3."""
    t = interop.to(np.arange(5), "torch", device="cuda:0")
    assert t.device.type == "cuda"
    assert t.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("side", [False, True], ids=["default", "side-stream"])
@pytest.mark.parametrize("reader", ["cupy", "torch"])
def test_a_reader_on_another_stream_waits_for_a_slow_writer(side, reader):
    """SPEC X-STREAM-3: without the wait the reader sees zeros."""
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        x += 1
        t = interop.as_tensor(x)
    if reader == "cupy":
        with cp.cuda.Stream(non_blocking=True) as s:
            y = interop.to(t, "cupy") * 2
            s.synchronize()
        assert float(y.min()) == 2
    else:
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            y = interop.to(t, "torch") * 2
        other.synchronize()
        assert y.min().item() == 2


def test_equal_streams_cost_no_driver_call(monkeypatch):
    """SPEC X-STREAM-3."""
    def fail(*a):
        raise AssertionError(a)

    from interop import _core

    class Ops:
        order = staticmethod(fail)
        pointer_device = staticmethod(fail)

    from interop.adapters import cuda
    _core.set_cuda_ops(Ops())
    try:
        t = torch.ones(4, device="cuda")
        interop.to(interop.to(t, "cupy"), "torch")
    finally:
        _core.set_cuda_ops(cuda.ADAPTER)


def test_capture_refuses_another_stream_before_it_harms_the_graph():
    """SPEC X-STREAM-3."""
    x = torch.zeros(16, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        t = interop.as_tensor(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        same = interop.to(interop.as_tensor(x), "torch")     # the capturing stream on both sides
        same += 1
        with pytest.raises(BufferError, match="captured"):
            interop.to(t, "torch")
    graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == 1


def test_cuda_array_interface_is_read_with_its_device_and_shown():
    """SPEC X-HOST-7."""
    class Plain:
        def __init__(self, c):
            self.c = c
            self.__cuda_array_interface__ = c.__cuda_array_interface__

    c = cp.arange(6, dtype=cp.float32).reshape(2, 3)
    t = interop.as_tensor(Plain(c))
    assert (str(t.device), t.ptr, t.shape) == ("cuda:0", c.data.ptr, (2, 3))
    again = cp.asarray(interop.as_tensor(torch.ones(3, device="cuda")))
    assert float(again.sum()) == 3


def test_pinned_memory_is_host_memory():
    """SPEC X-DEV-3."""
    p = torch.ones(4).pin_memory()
    n = interop.to(p, "numpy")
    n[0] = 5
    assert p[0].item() == 5


def test_managed_memory_is_read_by_numpy():
    """SPEC X-DEV-3."""
    with cp.cuda.using_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc):
        c = cp.arange(4, dtype=cp.float32)
    cp.cuda.Device().synchronize()
    n = interop.to(c, "numpy", device="cpu")
    assert n.tolist() == [0, 1, 2, 3]


def test_sharing_and_dropping_leaves_device_memory_flat():
    """SPEC X-OWN-3."""
    def cycle():
        t = torch.empty(1 << 20, device="cuda")
        interop.to(interop.to(t, "cupy"), "torch")

    cycle()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        cycle()
    assert torch.cuda.memory_allocated() == before


def test_memory_outlives_its_source():
    """SPEC X-TO-9."""
    c = interop.to(torch.full((1 << 22,), 3.0, device="cuda"), "cupy")
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.zeros(1 << 22, device="cuda")
    assert float(c.sum()) == 3.0 * (1 << 22)
    del junk
