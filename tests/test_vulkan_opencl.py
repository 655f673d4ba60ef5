"""One block of host memory, written in turn by NumPy, PyTorch, OpenCL and Vulkan, and read by all. Real drivers."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opencl_kit import queue
from support import ROOT, need
from vulkan_kit import Messages, vk_messages, vk_open

import interop
from interop.adapters import opencl as icl
from interop.adapters import vulkan as ivk

pytest.importorskip("pyopencl")
N = 4096


def test_one_block_for_numpy_torch_opencl_and_vulkan(queue: Any, vk_open: Callable[..., Any]) -> None:
    """O-PAGES, V-PAGES."""
    need("torch")
    gpu = vk_open(adapter=None)
    block = interop.empty((N,), "float32", shared_with=[queue, gpu])
    n, t = interop.to(block, "numpy"), interop.to(block, "torch")
    c, v = interop.to(block, icl.Context.of(queue), copy=False), interop.to(block, gpu, copy=False)
    add = icl.Kernel("__kernel void add(__global float *x, float y) { x[get_global_id(0)] += y; }", "add", device=queue)
    scale = ivk.Shader(gpu, (ROOT / "examples" / "scale.spv").read_bytes(), push_constants=8)

    def all_see(value: float) -> bool:
        out = np.zeros(N, np.float32)
        interop.copyto(out, interop.to(c, queue))
        seen = [float(n[7]), float(t[7]), float(out[7])]
        interop.copyto(out, v)
        return [*seen, float(out[7])] == [value] * 4

    with interop.copy_guard("disallow"):
        for _ in range(2):
            with interop.acquire(block, "numpy", "write") as a:
                a[:] = 1
            assert all_see(1)
            with interop.acquire(block, "torch", "read_write") as x:
                x += 1
            assert all_see(2)
            add(c, 1.0, size=N, queue=queue)                    # 3
            scale(v, v, groups=(N // 64,), push=(2.0, 0.0)).wait(10)      # after the kernel: 6
            assert all_see(6)
            add(c, 1.0, size=N, queue=queue).wait(10)
            assert all_see(7)
