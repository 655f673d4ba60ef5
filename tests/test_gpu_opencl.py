"""OpenCL on an NVIDIA GPU: what only a device with memory of its own can prove. Run by `make test-gpu`; nothing of it has been run yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import interop
from interop import ExchangeError
from interop.adapters import opencl as icl
from interop.memory import importable

pytestmark = pytest.mark.gpu
cl = pytest.importorskip("pyopencl")
cla = pytest.importorskip("pyopencl.array")


@pytest.fixture
def queue() -> Any:
    """On NVIDIA's platform; some container images need a one-line ICD file naming libnvidia-opencl.so.1."""
    try:
        found = [d for p in cl.get_platforms() if p.name.startswith("NVIDIA") for d in p.get_devices()]
    except cl.Error as e:
        pytest.skip(f"no OpenCL platform: {e}")
    if not found:
        pytest.skip("no NVIDIA OpenCL platform")
    return cl.CommandQueue(cl.Context(found[:1]))


def test_the_device_has_memory_of_its_own(queue: Any) -> None:
    c = icl.Context.of(queue)
    assert not c.unified and not c.concurrent_host and not importable("host", c).supported
    with pytest.raises(ExchangeError):
        interop.to(interop.empty((4096,), "uint8", alignment=4096), c, copy=False)


def test_a_map_is_staged_and_counted(queue: Any) -> None:
    a = cla.arange(queue, 1 << 20, dtype=np.float32)
    with interop.copy_guard("allow") as copies, interop.acquire(a, "numpy", "read_write") as x:
        assert x[-1] == (1 << 20) - 1
        x += 1
    assert sum(r.copied_bytes for r in copies) == 8 << 20 and a.get()[0] == 1
    with pytest.raises(ExchangeError):
        interop.to(a, "numpy")


@pytest.mark.parametrize("cut", [(slice(None), slice(None)), (slice(1, 60, 2), slice(3, 50)), (slice(None, None, -1), slice(0, 64, 3))])
def test_copies_of_any_strides(queue: Any, cut: Any) -> None:
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    t, back, want = interop.empty((64, 64), "float32", device=queue), np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
    interop.copyto(t, back)
    interop.copyto(t[cut], x[cut])
    want[cut] = x[cut]
    interop.copyto(back, t)
    assert np.array_equal(back, want)


def test_a_kernel_and_torch_take_turns(queue: Any) -> None:
    add = icl.Kernel("__kernel void add(__global float *x, float v) { x[get_global_id(0)] += v; }", "add", device=queue)
    t = interop.empty((1 << 16,), "float32", device=queue)
    interop.copyto(t, np.zeros(1 << 16, np.float32))
    for _ in range(3):
        add(t, 1.0, size=1 << 16, queue=queue)
        with interop.acquire(t, "numpy", "read_write") as x:
            x *= 2
    assert (interop.to(t, queue).get() == 14).all()
