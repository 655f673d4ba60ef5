"""Compute shaders over tensors. Real: lavapipe (or a GPU) under the validation layers; SPIR-V is compiled from GLSL by glslangValidator."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import functools
import gc
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import aligned, need
from test_vulkan_memory import COHERENT, VISIBLE, pretend
from vulkan_kit import CountingDriver, vk_messages, vk_open

import interop
from interop import ExchangeError, LeaseError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan.context import Context
from interop.adapters.vulkan.queue import Queue
from interop.adapters.vulkan.shader import packed
from interop.contract import point

Open = Callable[..., Context]

ADD = """layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
layout(push_constant) uniform P { uint n; uint k; };
void main() { uint i = gl_GlobalInvocationID.x; if (i < n) a[i] += i * k; }"""
FILL = """layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { float a[]; };
layout(push_constant) uniform P { float x; };
void main() { uint i = gl_GlobalInvocationID.x; if (i < a.length()) a[i] = x; }"""
SUM = """layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) writeonly buffer C { float c[]; };
void main() { uint i = gl_GlobalInvocationID.x; if (i < c.length()) c[i] = a[i] + b[i]; }"""
SPECIAL = """layout(local_size_x_id = 0) in;
layout(constant_id = 1) const float f = 0; layout(constant_id = 2) const int n = 0; layout(constant_id = 3) const bool yes = false;
layout(set = 0, binding = 0) buffer A { float a[]; };
void main() { a[0] = f; a[1] = n; a[2] = yes ? 1 : 0; a[3] = gl_WorkGroupSize.x; }"""
NOTHING = "layout(local_size_x = 1) in; void main() {}"


@functools.cache
def spirv(source: str) -> bytes:
    """SPIR-V of a compute shader's GLSL."""
    compiler = shutil.which("glslangValidator")
    if compiler is None:
        pytest.skip("glslangValidator is not installed (glslang-tools)")
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder, "a.comp"), Path(folder, "a.spv")
        text.write_text("#version 450\n" + source)
        subprocess.run([compiler, "-V", text, "-o", out], check=True, stdout=subprocess.DEVNULL)
        return out.read_bytes()


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def gpu(vk_open: Open, driver: CountingDriver) -> Context:
    return vk_open(driver=driver, adapter=None)


def floats(c: Any, *shape: int, value: float = 0) -> interop.Tensor:
    t = interop.empty(shape, "float32", device=c)
    interop.copyto(t, np.full(shape, value, np.float32)).wait(10)
    return t


def groups(t: Any) -> tuple[int]:
    return (-(-t.size // 64),)


# ---- the same bytes ----
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_what_the_shader_writes_a_framework_reads(gpu: Context, framework: str) -> None:
    """SPEC V-SHADER"""
    need(framework)
    t, fill = floats(gpu, 1000), ivk.Shader(gpu, spirv(FILL), push_constants=4)
    fill(t, groups=groups(t), push=[1.0]).wait(10)
    with interop.copy_guard("disallow"):
        x = interop.to(t, framework)
    assert float(x[0]) == float(x[999]) == 1
    fill(t, groups=groups(t), push=[2.5]).wait(10)
    again = interop.to(t, framework)
    assert float(again[999]) == 2.5
    if framework != "jax":                      # whose arrays never change, as far as it knows
        assert float(x[999]) == 2.5


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_a_framework_writes_the_shader_reads(gpu: Context, framework: str) -> None:
    need(framework)
    a, b, out = floats(gpu, 100), floats(gpu, 100, value=2), floats(gpu, 100)
    with interop.acquire(a, framework, "write") as x:
        x[:] = 40
    ivk.Shader(gpu, spirv(SUM))(a, b, out, groups=groups(a), access=["read", "read", "write"])
    assert (interop.to(out, "numpy") == 42).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_memory_of_a_framework_is_a_storage_buffer(gpu: Context, framework: str) -> None:
    x = aligned(np.ones(1024, np.float32), alignment=4096)
    t = interop.to(need("torch").from_numpy(x) if framework == "torch" else x, gpu, copy=False)
    ivk.Shader(gpu, spirv(FILL), push_constants=4)(t, groups=groups(t), push=[7.0]).wait(10)
    assert (x == 7).all()


def test_read_only_memory_is_read(gpu: Context) -> None:
    a = aligned(np.full(1024, 40, np.float32), alignment=4096)
    a.flags.writeable = False
    t, b, out = interop.to(a, gpu, copy=False), floats(gpu, 1024, value=2), floats(gpu, 1024)
    ivk.Shader(gpu, spirv(SUM))(t, b, out, groups=groups(b), access=["read", "read", "write"])
    assert (interop.to(out, "numpy") == 42).all()
    with pytest.raises(ExchangeError, match="read-only"):
        ivk.Shader(gpu, spirv(FILL), push_constants=4)(t, push=[1.0], access="read_write")


# ---- order ----
def test_dispatches_come_one_after_the_other(gpu: Context) -> None:
    """SPEC V-SHADER-ORDER"""
    t, add = interop.empty(500, "uint32", device=gpu), ivk.Shader(gpu, spirv(ADD), push_constants=8)
    interop.copyto(t, np.zeros(500, np.uint32)).wait(10)
    for _ in range(50):
        add(t, groups=(8,), push=(500, 3))
    np.testing.assert_array_equal(interop.to(t, "numpy"), np.arange(500) * 150)


def test_the_point_is_pending_on_the_tensors(gpu: Context) -> None:
    t, fill, line = floats(gpu, 100), ivk.Shader(gpu, spirv(FILL), push_constants=4), gpu.timeline()
    done = fill(t, groups=(2,), push=[3.0], waits=[(line.handle, 1)])
    assert not done.done()
    lease = interop.acquire(t, gpu, "read")
    assert not lease.after.done()
    line.signal(1)
    done.wait(10)
    lease.release(done)
    assert (interop.to(t, "numpy") == 3).all()


def test_it_waits_for_what_is_pending(gpu: Context) -> None:
    t, fill, line = floats(gpu, 100, value=1), ivk.Shader(gpu, spirv(FILL), push_constants=4), gpu.timeline()
    interop.acquire(t, gpu, "read").release(line.at(1))
    done = fill(t, groups=(2,), push=[3.0])
    assert not done.done()
    line.signal(1)
    done.wait(10)


def test_a_lease_of_others_forbids_it(gpu: Context) -> None:
    t, fill = floats(gpu, 100), ivk.Shader(gpu, spirv(FILL), push_constants=4)
    with interop.acquire(t, gpu, "read"):
        with pytest.raises(LeaseError):
            fill(t, push=[1.0])
    fill(t, push=[1.0]).wait(10)
    interop.acquire(t, gpu, "write").release(fill(floats(gpu, 8), push=[1.0]))


def test_one_tensor_for_two_bindings(gpu: Context) -> None:
    t = floats(gpu, 64, value=3)
    ivk.Shader(gpu, spirv(SUM))(t, t, t).wait(10)
    assert (interop.to(t, "numpy") == 6).all()
    u = floats(gpu, 128, value=1)
    with pytest.raises(LeaseError):
        ivk.Shader(gpu, spirv(SUM))(u, u[64:], t)           # parts of one another, written
    ivk.Shader(gpu, spirv(SUM))(u, u[64:], t, access=["read", "read", "write"]).wait(10)


class Frames:
    """A ring of three; each frame is filled with its number and read slowly, in two halves, by a thread that says when it is done."""

    def __init__(self, c: Context) -> None:
        self.c, self.ring = c, [floats(c, 4096) for _ in range(3)]
        self.fill = ivk.Shader(c, spirv(FILL), push_constants=4)
        self.written = [threading.Event() for _ in range(20)]
        self.torn: list[int] = []

    def read(self, n: int, view: np.ndarray[Any, Any], over: threading.Event) -> None:
        first = view[:2048].copy()
        self.written[n + 3].wait(0.1)                       # time for whoever does not wait
        if not (first == n).all() or not (view[2048:] == n).all():
            self.torn.append(n)
        over.set()

    def run(self, frames: int) -> list[int]:
        threads = []
        for n in range(frames):
            f = self.ring[n % 3]
            self.fill(f, groups=(64,), push=[float(n)], access="write").wait(10)
            self.written[n].set()
            lease, over = interop.acquire(f, "numpy", "read"), threading.Event()
            threads.append(threading.Thread(target=self.read, args=(n, lease.value, over)))
            threads[-1].start()
            lease.release(point(done=over.is_set))          # read until then, not any longer held
        for th in threads:
            th.join(10)
        return self.torn


def test_a_ring_of_three_frames(gpu: Context) -> None:
    """SPEC V-SHADER-ORDER"""
    assert Frames(gpu).run(9) == []


def test_a_ring_that_does_not_wait_tears(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_waited", lambda self, waits: [])
    assert Frames(gpu).run(9)


# ---- what it is given ----
def test_specialisation(gpu: Context) -> None:
    t = floats(gpu, 4)
    ivk.Shader(gpu, spirv(SPECIAL), specialization={0: 32, 1: 1.5, 2: -7, 3: True})(t).wait(10)
    assert list(interop.to(t, "numpy")) == [1.5, -7, 1, 32]


def test_constants_as_bytes() -> None:
    assert packed([1, -1, 2.0, True, np.uint8(3)]) == b"\x01\0\0\0" + b"\xff" * 4 + b"\0\0\0@" + b"\x01\0\0\0" + b"\x03"
    assert packed(b"abcd") == b"abcd" and packed(np.float64([1])) == np.float64(1).tobytes()
    with pytest.raises(ValueError, match="32 bits"):
        packed([2**32])
    with pytest.raises(TypeError, match="no number"):
        packed(["a"])


def test_a_shader_of_nothing(gpu: Context) -> None:
    s = ivk.Shader(gpu, spirv(NOTHING))
    assert s.bindings == 0
    s(groups=1).wait(10)


def test_bindings_are_counted(gpu: Context) -> None:
    s = ivk.Shader(gpu, spirv(SUM))
    assert s.bindings == 3
    with pytest.raises(TypeError, match="2 tensors, and the shader has 3"):
        s(floats(gpu, 4), floats(gpu, 4))
    with pytest.raises(ValueError, match="declares 3"):
        ivk.Shader(gpu, spirv(SUM), bindings=2)


@pytest.mark.parametrize("code", [b"", b"abc", bytes(20), bytes(64), "text", spirv.__name__.encode() * 10])
def test_what_is_no_spirv(gpu: Context, code: Any) -> None:
    with pytest.raises(ValueError, match="spirv"):
        ivk.Shader(gpu, code)


def test_spirv_that_ends_early(gpu: Context) -> None:
    code = spirv(FILL)
    with pytest.raises(ValueError, match="are left"):
        ivk.Shader(gpu, code[:20] + b"\xff\xff\xff\xff" + code[24:])


def test_push_constants_are_checked(gpu: Context) -> None:
    s = ivk.Shader(gpu, spirv(FILL), push_constants=4)
    with pytest.raises(ValueError, match="8 bytes, and the shader takes 4"):
        s(floats(gpu, 4), push=[1, 2])
    for n in (3, 1 << 20, -4):
        with pytest.raises(ValueError, match="push_constants"):
            ivk.Shader(gpu, spirv(FILL), push_constants=n)


@pytest.mark.parametrize("n", [(-1,), (1 << 40,), (1, 1, 1, 1)])
def test_groups_are_checked(gpu: Context, n: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        ivk.Shader(gpu, spirv(NOTHING))(groups=n)


def test_offsets_are_checked(gpu: Context) -> None:
    """SPEC V-SHADER-DESCRIPTOR"""
    t, s = floats(gpu, 1024), ivk.Shader(gpu, spirv(FILL), push_constants=4)
    step = gpu.storage_alignment // 4
    s(t[step:2 * step], push=[5.0]).wait(10)
    a = interop.to(t, "numpy")
    assert not a[:step].any() and (a[step:2 * step] == 5).all() and not a[2 * step:].any()
    with pytest.raises(ExchangeError, match="minStorageBufferOffsetAlignment"):
        s(t[1:], push=[5.0])
    gpu.max_storage_range = 1024
    with pytest.raises(ExchangeError, match="maxStorageBufferRange"):
        s(t, push=[5.0])


def test_memory_of_others_is_refused(gpu: Context, vk_open: Open) -> None:
    s = ivk.Shader(gpu, spirv(FILL), push_constants=4)
    for t in (floats(vk_open(adapter=None), 8), interop.as_tensor(np.zeros(8, np.float32))):
        with pytest.raises(ExchangeError, match="no buffer of this Context"):
            s(t, push=[5.0])
    with pytest.raises(ExchangeError, match="VkQueue"):
        s(floats(gpu, 8), push=[1.0], stream=77)


def test_an_empty_tensor_is_refused(gpu: Context) -> None:
    with pytest.raises(ExchangeError):
        ivk.Shader(gpu, spirv(FILL), push_constants=4)(interop.empty((0,), "float32", device=gpu), push=[1.0])


# ---- what is kept, what goes ----
def test_descriptor_sets_are_used_again(gpu: Context, driver: CountingDriver) -> None:
    """SPEC V-SHADER-KEEP"""
    t, fill = floats(gpu, 64), ivk.Shader(gpu, spirv(FILL), push_constants=4)
    for n in range(500):
        fill(t, push=[float(n)]).wait(10)
    assert driver.calls["vkCreateDescriptorPool"] == 1
    assert (interop.to(t, "numpy") == 499).all()


def test_sets_of_dispatches_in_flight_are_not_touched(gpu: Context, driver: CountingDriver) -> None:
    ts, fill, line = [floats(gpu, 64) for _ in range(40)], ivk.Shader(gpu, spirv(FILL), push_constants=4), gpu.timeline()
    for n, t in enumerate(ts):
        done = fill(t, push=[float(n)], waits=[(line.handle, 1)])
    line.signal(1)
    done.wait(10)
    assert all((interop.to(t, "numpy") == n).all() for n, t in enumerate(ts))
    assert driver.calls["vkCreateDescriptorPool"] == 3


def test_a_shader_that_is_dropped_while_it_runs(gpu: Context, driver: CountingDriver) -> None:
    t, fill, line = floats(gpu, 64), ivk.Shader(gpu, spirv(FILL), push_constants=4), gpu.timeline()
    done = fill(t, push=[2.0], waits=[(line.handle, 1)])
    view = interop.acquire(t, gpu, "read")
    del fill, t
    gc.collect()
    assert driver.live["ComputePipeline"] or driver.live["Pipeline"] or driver.live["PipelineLayout"]
    line.signal(1)
    done.wait(10)
    assert (interop.to(view.tensor, "numpy") == 2).all()
    view.release(done)
    ivk.Shader(gpu, spirv(NOTHING))                         # whoever comes by next lets go of it
    gc.collect()
    assert not driver.live["PipelineLayout"] and not driver.live["DescriptorPool"]


def test_tensors_stay_while_it_runs(gpu: Context, driver: CountingDriver) -> None:
    fill, line, t = ivk.Shader(gpu, spirv(FILL), push_constants=4), gpu.timeline(), floats(gpu, 64)
    done = fill(t, push=[2.0], waits=[(line.handle, 1)])
    before = driver.live["Buffer"]
    del t
    gc.collect()
    assert driver.live["Buffer"] == before
    line.signal(1)
    done.wait(10)


@pytest.mark.parametrize("step", ["vkCreateDescriptorSetLayout", "vkCreatePipelineLayout", "vkCreateShaderModule",
                                  "vkCreateComputePipelines"])
def test_a_step_that_fails_leaves_nothing(gpu: Context, driver: CountingDriver, step: str) -> None:
    before = dict(driver.live)
    driver.fail_next(step, vk.VK_ERROR_OUT_OF_HOST_MEMORY)
    with pytest.raises(MemoryError):
        ivk.Shader(gpu, spirv(FILL), push_constants=4)
    gc.collect()
    assert dict(driver.live) == before


@pytest.mark.parametrize("step", ["vkQueueSubmit", "vkCreateDescriptorPool", "vkAllocateDescriptorSets", "vkBeginCommandBuffer"])
def test_a_dispatch_that_fails_holds_nothing(gpu: Context, driver: CountingDriver, step: str) -> None:
    t, fill = floats(gpu, 64), ivk.Shader(gpu, spirv(FILL), push_constants=4)
    driver.fail_next(step, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)
    with pytest.raises(MemoryError):
        fill(t, push=[1.0])
    fill(t, push=[3.0]).wait(10)
    assert (interop.to(t, "numpy") == 3).all()


def test_fences_do_where_there_are_no_timelines(vk_open: Open) -> None:
    c = vk_open(features=(), adapter=None)
    t, fill = floats(c, 64), ivk.Shader(c, spirv(FILL), push_constants=4)
    for n in range(40):
        fill(t, push=[float(n)])
    assert (interop.to(t, "numpy") == 39).all()


def test_threads_share_a_shader(gpu: Context) -> None:
    fill, wrong = ivk.Shader(gpu, spirv(FILL), push_constants=4), []

    def work(k: int) -> None:
        t = floats(gpu, 64)
        for n in range(50):
            fill(t, push=[float(100 * k + n)])
        if not (interop.to(t, "numpy") == 100 * k + 49).all():
            wrong.append(k)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for th in threads:
        th.start()
    for th in threads:
        th.join(60)
    assert not wrong


def test_a_context_that_closes_while_a_dropped_shader_ran(vk_open: Open) -> None:
    for _ in range(20):
        c = vk_open(adapter=None)
        t, fill = floats(c, 1 << 18), ivk.Shader(c, spirv(FILL), push_constants=4)
        fill(t, groups=groups(t), push=[1.0])
        del t, fill
        gc.collect()
        c.queue.mark().wait(10)
        interop.empty((4,), "float32", device=c)
        gc.collect()
        for _ in range(200):
            try:
                c.close()
                break
            except ExchangeError:                           # memory that was dropped is released on a thread of interop's
                threading.Event().wait(0.005)
        assert c.closed


# ---- what hostile callers found ----
def test_code_that_was_cut_off_is_refused(gpu: Context) -> None:
    """SPEC V-SHADER: drivers crash on it."""
    code = spirv(FILL)
    for part in (len(code) // 2 // 4 * 4, len(code) - 4, 20):
        with pytest.raises(ValueError):
            ivk.Shader(gpu, code[:part], push_constants=4)
    with pytest.raises(ValueError, match="nope"):
        ivk.Shader(gpu, code, entry="nope", push_constants=4)
    with pytest.raises(ValueError, match="push_constants 0"):
        ivk.Shader(gpu, code)


def test_arguments_that_are_none(gpu: Context) -> None:
    """SPEC V-SHADER"""
    code, t = spirv(FILL), floats(gpu, 16)
    for context in (None, 5, "vulkan:0"):
        with pytest.raises(TypeError, match="context"):
            ivk.Shader(context, code, push_constants=4)
    for constants in (5, [1]):
        with pytest.raises(TypeError, match="specialization"):
            ivk.Shader(gpu, code, push_constants=4, specialization=constants)
    fill = ivk.Shader(gpu, code, push_constants=4)
    for x in (None, 5, np.zeros(4)):
        with pytest.raises(TypeError, match="no Tensor"):
            fill(x, push=[1.0])
    with pytest.raises(TypeError, match="groups"):
        fill(t, groups=(1.5,), push=[1.0])
    with pytest.raises(ValueError, match="32 bits"):
        fill(t, push=[1e300])
