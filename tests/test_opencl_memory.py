"""OpenCL's memory as tensors: Arrays, Buffers, cl_mem handles, host pages, lifetimes. Real: PoCL and rusticl."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opencl_kit import collect, device, need_device, queue, references
from support import ROOT, need

import interop
from interop import ExchangeError, LeaseError
from interop.adapters import opencl as icl
from interop.memory import importable

cl = pytest.importorskip("pyopencl")
cla = pytest.importorskip("pyopencl.array")
ADD = "__kernel void add(__global float *x, float v) { x[get_global_id(0)] += v; }"


def aligned(nbytes: int, to: int = 4096, off: int = 0) -> np.ndarray[Any, Any]:
    raw = np.zeros(nbytes + to + off, np.uint8)
    start = -raw.ctypes.data % to + off
    return raw[start:start + nbytes]


def run(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    import os

    environment = os.environ | {"PYTHONPATH": str(ROOT), "RUSTICL_ENABLE": "llvmpipe"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=environment, check=False)


# ---- lazy ----
def test_importing_interop_and_the_adapter_opens_nothing() -> None:
    """O-LAZY."""
    done = run("import sys, interop\nfrom interop.adapters import opencl\n"
               "assert 'pyopencl' not in sys.modules\n"
               "assert not any('OpenCL' in line or 'pocl' in line for line in open('/proc/self/maps'))\nprint('right')")
    assert done.stdout.strip() == "right", done.stderr


def test_there_is_one_loader(queue: Any) -> None:
    """O-LOADER."""
    icl.Context.of(queue).queue  # noqa: B018
    loaders = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libOpenCL" in line}
    assert len(loaders) == 1


def test_devices_are_numbered_as_the_loader_lists_them(queue: Any) -> None:
    """O-NUMBER."""
    c = icl.Context.of(queue)
    there = icl.devices()
    assert there[c.device.id]["name"] == queue.device.name.strip() and c.device.name == "opencl"
    assert interop.as_tensor(cla.zeros(queue, 3, np.float32)).device == c.device
    with pytest.raises(ExchangeError, match="this machine has"):
        interop.empty((1,), "uint8", device="opencl:99")


def test_a_context_is_that_of_the_pyopencl_object(queue: Any) -> None:
    """O-CONTEXT."""
    c = icl.Context.of(queue)
    assert icl.Context.of(queue.context) is c and icl.Context.of(c) is c
    assert icl.Context.of(cl.CommandQueue.from_int_ptr(queue.int_ptr)) is c
    assert icl.Context.of(cl.Context([queue.device])) is not c


# ---- reading ----
def test_an_array_is_a_tensor_over_the_same_cl_mem(queue: Any) -> None:
    """O-ARRAY."""
    a = cla.arange(queue, 24, dtype=np.float32).reshape(4, 6)
    t = interop.as_tensor(a)
    assert (t.handle, t.shape, t.dtype.name, t.byte_offset) == (a.base_data.int_ptr, (4, 6), "float32", 0)
    v = a[1:, ::2]
    w = interop.as_tensor(v)
    assert (w.handle, w.shape, w.strides, w.byte_offset) == (t.handle, (3, 3), (6, 2), 24)
    assert w.allocation is t.allocation
    assert np.array_equal(interop.to(v, "numpy"), np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::2])


def test_a_buffer_is_its_bytes(queue: Any) -> None:
    """O-ARRAY."""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 100)
    t = interop.as_tensor(b)
    assert (t.shape, t.dtype.name, t.handle) == ((100,), "uint8", b.int_ptr)
    assert interop.kind(b) == "opencl" and interop.to(b, queue).base_data.int_ptr == b.int_ptr


def test_an_empty_array_has_no_memory(queue: Any) -> None:
    """O-EMPTY."""
    t = interop.as_tensor(cla.empty(queue, (0, 3), np.float32))
    assert t.shape == (0, 3) and t.handle == 0
    assert interop.to(interop.empty((0, 3), "float32", device=queue), queue).shape == (0, 3)
    with pytest.raises(ExchangeError, match="touches no bytes"):
        icl.native(interop.empty((5,), "uint8", device=queue)[:0])


def test_strides_that_fall_between_elements_are_refused(queue: Any) -> None:
    """O-ARRAY."""
    data = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 64)
    with pytest.raises(ExchangeError, match="no multiples of the 4-byte"):
        interop.as_tensor(cla.Array(queue, (4,), np.float32, data=data, strides=(6,)))
    with pytest.raises(ValueError, match="touches bytes"):
        interop.as_tensor(cla.Array(queue, (40,), np.float32, data=data))


# ---- making ----
def test_a_tensor_is_an_array_on_the_queue_asked_for(queue: Any) -> None:
    """O-TO."""
    t = interop.empty((4, 6), "float32", device=queue)
    for a in (interop.to(t, queue), interop.to(t, "opencl", device=queue), interop.to(t, "opencl", stream=queue)):
        assert type(a) is cla.Array and a.queue == queue and a.base_data.int_ptr == t.handle
    v = interop.to(t[1:, ::2], queue)
    assert (v.offset, v.strides, v.shape) == (24, (24, 8), (3, 3))
    assert interop.as_tensor(v).strides == (6, 2)


def test_an_array_is_itself_on_its_own_queue_only(queue: Any) -> None:
    """O-TO, O-FOREIGN, X-TO-2."""
    a = cla.zeros(queue, 8, np.float32)
    assert interop.to(a, queue) is a and interop.to(a, "opencl") is a
    second, other = cl.CommandQueue(queue.context), cl.CommandQueue(cl.Context([queue.device]))
    b = interop.to(a, second)
    assert b is not a and b.queue == second and b.base_data.int_ptr == a.base_data.int_ptr
    with pytest.raises(ExchangeError, match="another cl_context"):
        interop.to(a, other)


def test_host_memory_moves_to_a_queue_that_is_named_and_not_for_a_framework_s_name(queue: Any) -> None:
    """O-TO, X-TO-3."""
    x = np.arange(12, dtype=np.float32)
    with interop.copy_guard("allow") as copies:
        assert np.array_equal(interop.to(x, queue).get(), x)
    assert [r.copied_bytes for r in copies] == [48]
    with pytest.raises(ExchangeError):
        interop.to(x, "opencl")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_writes_are_seen_on_both_sides(queue: Any, framework: str) -> None:
    """O-HOST-VIEW, O-KERNEL."""
    if framework == "torch":
        need("torch")
    a = cla.arange(queue, 1000, dtype=np.float32)
    h = interop.to(a, framework)
    h += 1
    add = icl.Kernel(ADD, "add", device=queue)
    add(a, 10.0, size=1000, queue=queue).wait(10)
    assert float(h[5]) == 16 and a.get()[999] == 1010


def test_jax_sees_what_is_aligned_for_it(queue: Any) -> None:
    """O-HOST-VIEW."""
    need("jax")
    t = interop.empty((64,), "float32", device=queue)
    interop.to(t, "numpy")[:] = 3
    j = interop.to(t, "jax", readonly=True, copy=False)
    assert float(j.sum()) == 192


def test_a_view_of_an_array_keeps_the_memory(queue: Any) -> None:
    """O-TO."""
    owner = aligned(4096).view(np.float32)
    owner[:] = 7
    part = interop.to(owner, queue, copy=False)[10:20]
    alive = weakref.ref(owner)
    del owner
    collect()
    assert alive() is not None or part.get()[0] == 7
    assert part.get()[0] == 7


# ---- native, wrap ----
def test_native_says_handle_offset_and_size(queue: Any) -> None:
    """O-NATIVE."""
    t = interop.empty((4, 6), "float32", device=queue)
    assert icl.native(t[1:, ::2]) == (t.handle, 24, 68)
    ro = interop.as_tensor(t, readonly=True)
    assert icl.native(ro).size == 96
    with pytest.raises(ExchangeError, match="read-only"):
        icl.native(ro, write=True)


def test_a_raw_cl_mem_is_wrapped_and_stays_the_callers(queue: Any) -> None:
    """O-WRAP."""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4096)
    before = references(b)
    a = icl.wrap(b.int_ptr, context=queue)
    assert (a.nbytes, a.handle) == (4096, b.int_ptr) and icl.wrap(b.int_ptr, context=queue.context) is a
    t = a.tensor((8, 4), "float32", row_pitch=64)
    interop.to(t, "numpy")[:] = 2
    assert np.array_equal(interop.to(t, "numpy")[3], [2, 2, 2, 2])
    del a, t
    collect()
    assert references(b) == before


def test_a_reference_can_be_handed_over(queue: Any) -> None:
    """O-WRAP."""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 64)
    twin = cl.Buffer.from_int_ptr(b.int_ptr, True)
    before = references(b)
    a = icl.wrap(cl.Buffer.from_int_ptr(b.int_ptr, True).int_ptr, context=queue)
    del a
    collect()
    assert references(b) == before and twin.size == 64


def test_a_cl_mem_of_another_context_is_refused(queue: Any) -> None:
    """O-FOREIGN."""
    other = cl.CommandQueue(cl.Context([queue.device]))
    b = cl.Buffer(other.context, cl.mem_flags.READ_WRITE, 64)
    with pytest.raises(ExchangeError, match="of another cl_context"):
        icl.wrap(b, context=queue)
    t = interop.as_tensor(b)
    with pytest.raises(ExchangeError, match="another cl_context"):
        interop.to(t, queue)
    with pytest.raises(ExchangeError, match="no memory of this cl_context"):
        icl.Kernel(ADD, "add", device=queue)(t, 1.0, size=4)
    with pytest.raises(ExchangeError, match="another cl_context"):
        interop.copyto(interop.empty((64,), "uint8", device=queue), np.zeros(64, np.uint8), stream=other)


@pytest.mark.parametrize("bad", [0, 7, -1, True, 2**64, 1.5, "x"])
def test_what_is_no_cl_mem_is_an_error(queue: Any, bad: Any) -> None:
    """O-WRAP."""
    with pytest.raises((TypeError, ValueError)):
        icl.wrap(bad, context=queue)


def test_a_sub_buffer_shares_the_leases_of_its_parent(queue: Any) -> None:
    """O-SUB."""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 8192)
    sub = b.get_sub_region(4096, 1024)
    whole, part = interop.as_tensor(b), interop.as_tensor(sub)
    with interop.acquire(part, "numpy", "write") as w:
        w[:] = 9
        with pytest.raises(LeaseError):
            interop.acquire(whole, "numpy", "read")
        interop.acquire(whole[:4096], "numpy", "read").release()
    assert interop.to(whole, "numpy")[4096] == 9


# ---- host pages ----
def test_host_memory_is_a_cl_mem_over_the_same_bytes(queue: Any) -> None:
    """O-PAGES."""
    h = aligned(4096).view(np.float32)
    t = interop.to(h, icl.Context.of(queue), copy=False)
    icl.Kernel(ADD, "add", device=queue)(t, 5.0, size=1024, queue=queue).wait(10)
    assert h[1000] == 5
    h[:] = 1
    assert interop.to(t, queue).get()[3] == 1


def test_misaligned_host_memory_is_refused_with_the_number(queue: Any) -> None:
    """O-PAGES."""
    h = aligned(400, 4096, 16)
    with pytest.raises(ExchangeError, match="not a multiple of"):
        interop.to(h, icl.Context.of(queue), copy=False)
    assert interop.to(interop.empty((100,), "float32", shared_with=[queue]), icl.Context.of(queue), copy=False).size == 100


def test_a_device_with_memory_of_its_own_takes_no_pages(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-PAGES-SHARED."""
    c = icl.Context.of(queue)
    monkeypatch.setattr(c, "unified", False)
    assert "memory of its own" in importable("host", c).reason
    monkeypatch.setattr(c, "unified", True)
    monkeypatch.setattr(c, "_shares", False)
    assert "copies CL_MEM_USE_HOST_PTR" in importable("host", c).reason
    with pytest.raises(ExchangeError):
        interop.to(aligned(4096), c, copy=False)


def test_read_only_pages_are_not_written(queue: Any) -> None:
    """O-PAGES."""
    h = aligned(4096)
    h.flags.writeable = False
    t = interop.to(h, icl.Context.of(queue), copy=False)
    assert t.readonly
    with pytest.raises(ExchangeError, match="read-only"):
        icl.native(t, write=True)
    with pytest.raises(ExchangeError, match="read-only"):
        interop.acquire(t, queue, "write")


def test_the_owner_lives_until_the_cl_mem_dies(queue: Any) -> None:
    """O-OWNER."""

    class Block:
        def __init__(self) -> None:
            self.array = aligned(4096)

    block = Block()
    alive = weakref.ref(block)
    a = interop.wrap(block.array.ctypes.data, 4096, device="cpu", owner=block)
    t = interop.to(a.tensor((4096,), "uint8"), icl.Context.of(queue), copy=False)
    client = cl.Buffer.from_int_ptr(t.handle, True)          # knows nothing of interop
    with pytest.raises(ExchangeError, match="still use it"):
        a.close()
    del t, a, block
    collect()
    assert alive() is not None
    out = np.ones(16, np.uint8)
    cl.enqueue_copy(queue, out, client)
    assert not out.any()
    del client
    queue.finish()
    collect()
    assert alive() is None


def test_a_rebuilt_buffer_does_not_lose_its_hostbuf(queue: Any) -> None:
    """O-OWNER."""

    class Kept(np.ndarray[Any, Any]):
        pass

    h = aligned(4096).view(Kept)
    alive = weakref.ref(h)
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=h)
    interop.as_tensor(b)
    twin = cl.Buffer.from_int_ptr(b.int_ptr, True)
    del b, h
    collect()
    assert alive() is not None
    del twin
    queue.finish()
    collect()
    assert alive() is None


# ---- the end ----
def test_a_thousand_cycles_leave_nothing(queue: Any) -> None:
    """O-LEAK."""
    c = icl.Context.of(queue)
    h = aligned(4096).view(np.float32)

    def cycle() -> None:
        a = interop.to(interop.empty((64,), "float32", device=queue), queue)
        with interop.acquire(a, "numpy", "write") as x:
            x[:] = 1
        interop.to(h, c, copy=False)
        interop.copyto(a, h[:64])

    for _ in range(20):
        cycle()
    queue.finish()
    collect()
    mems, objects = len(c.store.mems), len(gc.get_objects())
    for _ in range(1000):
        cycle()
    queue.finish()
    collect()
    assert len(c.store.mems) <= mems and len(c.store.points) <= 2
    assert len(gc.get_objects()) < objects + 200
    assert sys.getrefcount(h) < 10


def test_a_context_is_closed_when_nothing_of_it_lives(queue: Any) -> None:
    """O-CLOSE."""
    c = icl.Context.of(queue)
    t = interop.empty((4,), "uint8", device=c)
    with pytest.raises(ExchangeError, match="still live"):
        c.close()
    del t
    collect()
    c.close()
    c.close()
    with pytest.raises(ExchangeError, match="closed"):
        interop.empty((4,), "uint8", device=c)
    assert icl.Context.of(queue) is not c


EXIT = """
import sys, time, numpy as np, pyopencl as cl, pyopencl.array as cla, interop
from interop.adapters import opencl as icl
d = [d for p in cl.get_platforms() if p.name.startswith({name!r}) for d in p.get_devices()][0]
q = cl.CommandQueue(cl.Context([d]))
k = icl.Kernel('__kernel void f(__global float *x, int n) {{ float s = 0; for (int i = 0; i < n; i++) s += sin(s + i); '
               'x[get_global_id(0)] = s; }}', 'f', device=q)
a = cla.zeros(q, 64, np.float32)
held = [k(a, 200000, size=64, queue=q) for _ in range(4)]
t = interop.as_tensor(a)
print('queued')
"""


@pytest.mark.parametrize("name", ["pocl", "rusticl"])
def test_the_process_ends_with_work_queued(name: str) -> None:
    """O-EXIT."""
    from opencl_kit import PLATFORMS

    need_device(name)
    done = run(EXIT.format(name=PLATFORMS[name]))
    assert (done.returncode, done.stdout.strip()) == (0, "queued"), done.stderr


def test_a_forked_child_owns_nothing() -> None:
    """O-FORK."""
    need_device("pocl")
    done = run("""
import os, numpy as np, pyopencl as cl, pyopencl.array as cla, interop
q = cl.CommandQueue(cl.create_some_context(interactive=False))
a = cla.zeros(q, 64, np.float32)
t = interop.as_tensor(a)
n = interop.to(a, 'numpy')
q.finish()
pid = os.fork()
if pid == 0:
    try:
        for f in (lambda: interop.to(t, 'numpy'), lambda: interop.empty(3, 'uint8', device=q), lambda: interop.as_tensor(a)):
            try:
                f()
                os._exit(2)
            except interop.ExchangeError as e:
                assert 'fork' in str(e), e
        del t
        os._exit(0)
    except BaseException as e:
        print(e, flush=True)
        os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), a.get()[0])
""")
    assert done.stdout.split() == ["0", "0.0"], done.stdout + done.stderr


# ---- allocator, SVM ----
def test_pyopencl_s_allocator_hook_makes_memory_that_is_shared(queue: Any) -> None:
    """O-ALLOCATOR."""
    a = cla.arange(queue, 100, dtype=np.float32, allocator=icl.allocator(queue, shared_with=[]))
    assert interop.to(a, "numpy")[99] == 99
    b = a + 1
    assert interop.to(b, "numpy")[0] == 1
    with pytest.raises(ExchangeError, match="empty"):
        icl.allocator(queue)(0)


def test_fine_grained_svm_is_the_host_s_and_coarse_is_not() -> None:
    """O-SVM."""
    q = cl.CommandQueue(cl.Context([need_device("pocl")]))
    flags = cl.svm_mem_flags.READ_WRITE
    coarse = cl.SVMAllocation(q.context, 4096, 128, flags, queue=q)
    with pytest.raises(ExchangeError, match="mapped"):
        interop.as_tensor(coarse)
    from interop.adapters.opencl import svm

    fine = svm.fine(cl.SVMAllocation(q.context, 4096, 128, flags | cl.svm_mem_flags.SVM_FINE_GRAIN_BUFFER, queue=q))
    t = interop.as_tensor(fine)
    assert str(t.device) == "cpu" and t.ptr == fine.svm_ptr
    over = icl.svm_buffer(fine, q).tensor((1024,), "float32")
    interop.to(t, "numpy")[:] = 0
    icl.Kernel(ADD, "add", device=q)(over, 2.0, size=1024).wait(10)
    assert interop.to(t, "numpy").view(np.float32)[7] == 2
