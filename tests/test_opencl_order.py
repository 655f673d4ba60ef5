"""OpenCL's order, maps, copies and kernels. Real: PoCL and rusticl; devices with memory of their own by saying so."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from opencl_kit import collect, need_device, queue, references
from support import need

import interop
from interop import ExchangeError, LeaseError
from interop.adapters import opencl as icl
from interop.adapters.opencl import memory, queues
from interop.contract import point

cl = pytest.importorskip("pyopencl")
cla = pytest.importorskip("pyopencl.array")
ADD = "__kernel void add(__global float *x, float v) { x[get_global_id(0)] += v; }"


@pytest.fixture
def apart(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The queue of a device that interop takes for one with memory of its own."""
    c = icl.Context.of(queue)
    monkeypatch.setattr(c, "unified", False)
    monkeypatch.setattr(c, "concurrent_host", False)
    return queue


@pytest.fixture
def strict(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The queue of a device that uses the host's memory, by the standard and no more."""
    monkeypatch.setattr(icl.Context.of(queue), "concurrent_host", False)
    return queue


def gated(queue: Any, a: Any) -> Any:
    """A user event; the last write of the Array waits for it."""
    gate = cl.UserEvent(queue.context)
    a.add_event(cl.enqueue_fill_buffer(queue, a.base_data, np.float32(5), 0, a.nbytes, wait_for=[gate]))
    return gate


def open_later(gate: Any, seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: gate.set_status(cl.command_execution_status.COMPLETE))
    timer.start()
    return timer


# ---- events and Points ----
def test_an_array_s_events_are_waited_for(queue: Any) -> None:
    """O-EVENTS."""
    a = cla.zeros(queue, 100, np.float32)
    queue.finish()
    timer = open_later(gated(queue, a))
    assert interop.to(a, "numpy")[99] == 5
    timer.join()


def test_events_are_noted_once_and_described_without_waiting(queue: Any) -> None:
    """O-EVENTS."""
    a = cla.zeros(queue, 100, np.float32)
    gate = gated(queue, a)
    t = [interop.as_tensor(a) for _ in range(5)]
    lease = interop.acquire(a, "numpy", "read")
    assert not lease.after.done() and len({x.allocation for x in t}) == 1
    gate.set_status(cl.command_execution_status.COMPLETE)
    assert lease.value[0] == 5
    lease.release()


def test_events_go_along_to_an_array_on_a_queue(queue: Any) -> None:
    """O-EVENTS, O-TO."""
    a = cla.zeros(queue, 100, np.float32)
    gate = gated(queue, a)
    t = interop.as_tensor(a)
    b = interop.to(t, cl.CommandQueue(queue.context))
    assert b.events
    gate.set_status(cl.command_execution_status.COMPLETE)
    assert b.get()[0] == 5


def test_a_point_outlives_the_tensor_that_it_was_noted_on(queue: Any) -> None:
    """O-EVENTS. Users of pyopencl hold Buffers, not Allocations."""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 400)
    with interop.acquire(b, queue, "write") as array:
        gate = cl.UserEvent(queue.context)
        cl.enqueue_fill_buffer(queue, array.base_data, np.float32(5), 0, 400, wait_for=[gate])
    del array
    collect()
    timer = open_later(gate)
    assert interop.to(b, "numpy").view(np.float32)[99] == 5
    timer.join()


def test_a_lease_by_name_ends_when_the_array_s_queue_has_done_its_work(queue: Any) -> None:
    """O-QUEUE."""
    a = cla.zeros(queue, 100, np.float32)
    queue.finish()
    lease = interop.acquire(a, "opencl", "write")
    gate = cl.UserEvent(queue.context)
    cl.enqueue_fill_buffer(queue, lease.value.base_data, np.float32(5), 0, 400, wait_for=[gate])
    done = lease.release()
    assert not done.done()
    gate.set_status(cl.command_execution_status.COMPLETE)
    assert interop.to(a, "numpy")[99] == 5


def test_a_complete_event_is_held_as_long_as_its_point(queue: Any) -> None:
    """O-WAIT. The watcher's thread and another's look at the same one, and PoCL dies of an event that is gone."""
    event = cl.enqueue_marker(queue)
    p = queues.point_of(icl.Context.of(queue).driver, event.int_ptr, queue.context.int_ptr)
    p.wait(10)
    count = event.get_info(cl.event_info.REFERENCE_COUNT)
    assert p.done() and p.handle == 0
    del p
    collect()
    assert event.get_info(cl.event_info.REFERENCE_COUNT) == count - 1


def test_a_queue_waits_and_not_the_host(queue: Any) -> None:
    """O-QUEUE."""
    a = cla.zeros(queue, 100, np.float32)
    gate, second = gated(queue, a), cl.CommandQueue(queue.context)
    lease = interop.acquire(a, second, "read_write")
    out = np.zeros(100, np.float32)
    copied = cl.enqueue_copy(second, out, lease.value.base_data, is_blocking=False)
    done = lease.release()
    assert not done.done()
    gate.set_status(cl.command_execution_status.COMPLETE)
    done.wait(10)
    assert copied.command_execution_status == cl.command_execution_status.COMPLETE and out[50] == 5


def test_an_out_of_order_queue_is_ordered_too() -> None:
    """O-QUEUE. rusticl 22.3 has none."""
    d = need_device("pocl")
    c = cl.Context([d])
    q = cl.CommandQueue(c, properties=cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE)
    t = interop.empty((1000,), "float32", device=q)
    interop.copyto(t, np.zeros(1000, np.float32))
    add = icl.Kernel(ADD, "add", device=q)
    for _ in range(20):
        p = add(t, 1.0, size=1000, queue=q)
    p.wait(10)
    assert interop.to(t, "numpy")[7] == 20


def test_a_point_of_another_context_is_waited_for_by_the_host(queue: Any) -> None:
    """O-CROSS."""
    other = cl.CommandQueue(cl.Context([queue.device]))
    p = queues.mark(icl.Context.of(queue).driver, queue.int_ptr, queue.context.int_ptr)
    gate = cl.UserEvent(queue.context)
    held = queues.point_of(icl.Context.of(queue).driver, gate.int_ptr, queue.context.int_ptr)
    assert held.stream_wait(other) is False and held.stream_wait(queue) is True
    p.wait(10)
    with pytest.raises(ExchangeError, match="another cl_context"):
        icl.ADAPTER.wait(icl.Context.of(queue), other, held)
    gate.set_status(cl.command_execution_status.COMPLETE)


@pytest.mark.parametrize("stream", [1, 2, 0, 4095])
def test_a_stream_that_is_no_queue_is_refused(queue: Any, stream: int) -> None:
    """O-QUEUE."""
    t = interop.empty((4,), "float32", device=queue)
    with pytest.raises(ExchangeError, match="no cl_command_queue"):
        interop.copyto(t, np.zeros(4, np.float32), stream=stream)
    with pytest.raises(TypeError):
        interop.copyto(t, np.zeros(4, np.float32), stream="q")


def test_work_that_failed_is_told(queue: Any) -> None:
    """O-FAIL."""
    gate = cl.UserEvent(queue.context)
    p = queues.point_of(icl.Context.of(queue).driver, gate.int_ptr, queue.context.int_ptr)
    t = interop.empty((4,), "float32", device=queue)
    interop.acquire(t, icl.Context.of(queue), "write").release(p)
    gate.set_status(-5)
    with pytest.raises(ExchangeError, match="failed"):
        interop.to(t, "numpy")
    with pytest.raises(ExchangeError):
        p.wait(1)


def test_a_wait_ends_in_time(queue: Any) -> None:
    """O-WAIT."""
    gate = cl.UserEvent(queue.context)
    p = queues.point_of(icl.Context.of(queue).driver, gate.int_ptr, queue.context.int_ptr)
    with pytest.raises(TimeoutError):
        p.wait(0.05)
    assert p.native() == gate.int_ptr
    gate.set_status(cl.command_execution_status.COMPLETE)
    p.wait(5)
    with pytest.raises(ExchangeError, match="complete"):
        p.native()


def test_events_of_points_are_pyopencl_s(queue: Any) -> None:
    """O-NATIVE-EVENTS."""
    gate = cl.UserEvent(queue.context)
    p = queues.point_of(icl.Context.of(queue).driver, gate.int_ptr, queue.context.int_ptr)
    assert icl.events(p) == [gate]
    gate.set_status(cl.command_execution_status.COMPLETE)
    assert icl.events(p) == [] and icl.events(point(done=lambda: True)) == []


# ---- maps ----
def test_a_map_goes_to_a_queue_of_interop_s(queue: Any) -> None:
    """O-MAP."""
    t = interop.empty((100,), "float32", device=queue)
    c = icl.Context.of(queue)
    assert c.queue != queue.int_ptr
    with interop.copy_guard("disallow"), t.map("write") as w:
        w[:] = 4
    assert (interop.to(t, queue).get() == 4).all()
    with t[10:20].map("read") as r:
        assert r.shape == (10,) and not r.flags.writeable and r[0] == 4


def test_the_host_writes_after_kernels_that_read(queue: Any) -> None:
    """O-READS. They are in nobody's list of events."""
    a = cla.zeros(queue, 1000, np.float32)
    queue.finish()
    gate = cl.UserEvent(queue.context)
    out = np.ones(1000, np.float32)
    copied = cl.enqueue_copy(queue, out, a.base_data, is_blocking=False, wait_for=[gate])      # waits for itself when dropped
    timer = open_later(gate)
    with interop.acquire(a, "numpy", "read_write") as x:
        x[:] = 9
    queue.finish()
    timer.join()
    copied.wait()
    assert not out.any() and a.get()[0] == 9


def test_nothing_is_launched_on_what_is_mapped_for_writing(queue: Any) -> None:
    """O-MAPPED."""
    t = interop.empty((100,), "float32", device=queue)
    add = icl.Kernel(ADD, "add", device=queue)
    with t.map("write"), pytest.raises(LeaseError):
        add(t, 1.0, size=100)
    with t.map("read"), pytest.raises(LeaseError):
        add(t, 1.0, size=100)
    with t.map("read"):
        add(t, 1.0, size=100, access=["read"]).wait(10)
    with t.map("write"), pytest.raises(LeaseError):
        interop.to(t, queue)
    with t.map("write"), pytest.raises(LeaseError):
        t.__dlpack__()


def test_by_the_standard_a_map_stays_until_its_last_view_is_gone(strict: Any) -> None:
    """O-MAPPED, O-MAP."""
    t = interop.empty((100,), "float32", device=strict)
    add = icl.Kernel(ADD, "add", device=strict)
    with t.map("write") as w:
        w[:] = 4
    assert memory.of(t.allocation, "test").written == 1
    with pytest.raises(ExchangeError, match="mapped for writing"):
        add(t, 1.0, size=100)
    with pytest.raises(ExchangeError, match="mapped for writing"):
        icl.native(t)
    del w
    collect()
    add(t, 1.0, size=100).wait(10)
    with t.map("read") as r:
        assert (r == 5).all()
    with pytest.raises(ExchangeError):
        interop.to(t, "numpy")              # no view without a lease


def test_a_map_that_copies_is_counted(apart: Any) -> None:
    """O-SHADOW."""
    t = interop.empty((100,), "float32", device=apart)
    with interop.copy_guard("allow") as copies, t.map("read_write") as w:
        w[:] = 3
    assert [r.copied_bytes for r in copies] == [800]
    with pytest.raises(ExchangeError), t.map("read", copy=False):
        pass
    out = np.zeros(100, np.float32)
    interop.copyto(out, t)
    assert (out == 3).all()


def test_buffers_that_forbid_the_host_are_not_mapped(queue: Any) -> None:
    """O-HOST-FLAGS."""
    mf = cl.mem_flags
    t = interop.as_tensor(cl.Buffer(queue.context, mf.READ_WRITE | mf.HOST_NO_ACCESS, 64))
    with pytest.raises(ExchangeError, match="forbid the host"), t.map("read"):
        pass
    with pytest.raises(ExchangeError):
        interop.to(t, "numpy")
    r = interop.as_tensor(cl.Buffer(queue.context, mf.READ_WRITE | mf.HOST_READ_ONLY, 64))
    with r.map("read"):
        pass
    with pytest.raises(ExchangeError, match="forbid the host"), r.map("write"):
        pass


# ---- copies ----
SHAPES = [((7, 5), (slice(None), slice(None))), ((8, 9), (slice(1, 7), slice(0, 9, 2))), ((4, 5, 6), (slice(None, None, -1), slice(1, 4))),
          ((3, 1, 4), (slice(None), slice(None), slice(None, None, 3))), ((5,), (slice(2, 3),))]


@pytest.mark.parametrize(("shape", "cut"), SHAPES)
@pytest.mark.parametrize("where", ["here", "apart"])
def test_copies_of_any_strides(queue: Any, monkeypatch: pytest.MonkeyPatch, shape: Any, cut: Any, where: str) -> None:
    """O-COPY, O-COPY-RECT."""
    if where == "apart":
        for name in ("unified", "concurrent_host"):
            monkeypatch.setattr(icl.Context.of(queue), name, False)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    full = interop.empty(shape, "float32", device=queue)
    interop.copyto(full, np.zeros(shape, np.float32))
    interop.copyto(full[cut], x[cut])                       # host -> device, into gaps
    want = np.zeros(shape, np.float32)
    want[cut] = x[cut]
    back = np.zeros(shape, np.float32)
    interop.copyto(back, full)
    assert np.array_equal(back, want)
    twin = interop.empty(shape, "float32", device=queue)
    interop.copyto(twin, np.zeros(shape, np.float32))
    interop.copyto(twin[cut], full[cut]).wait(10)           # within a context
    part = np.zeros_like(x)[cut]
    interop.copyto(part, twin[cut])                         # device -> host, out of gaps
    assert np.array_equal(part, x[cut])
    interop.copyto(back, twin)
    assert np.array_equal(back, want)


@pytest.mark.parametrize("where", ["here", "apart"])
def test_overlapping_copies_are_as_if_through_a_third_place(queue: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """O-COPY-OVERLAP."""
    if where == "apart":
        for name in ("unified", "concurrent_host"):
            monkeypatch.setattr(icl.Context.of(queue), name, False)
    t = interop.empty((100,), "float32", device=queue)
    x = np.arange(100, dtype=np.float32)
    interop.copyto(t, x)
    interop.copyto(t[10:], t[:90]).wait(10)
    out = np.zeros(100, np.float32)
    interop.copyto(out, t)
    assert np.array_equal(out[10:], x[:90]) and np.array_equal(out[:10], x[:10])


def test_between_contexts_the_host_copies(queue: Any) -> None:
    """O-COPY-CONTEXTS."""
    other = cl.CommandQueue(cl.Context([queue.device]))
    a = cla.arange(queue, 100, dtype=np.float32)
    b = interop.empty((100,), "float32", device=other)
    interop.copyto(b, a)
    assert interop.to(b, other).get()[99] == 99


def test_a_copy_into_an_array_comes_before_its_queue_s_next_kernel(queue: Any) -> None:
    """O-COPY-QUEUE."""
    a, src = cla.zeros(queue, 1 << 16, np.float32), cla.zeros(queue, 1 << 16, np.float32) + 7
    interop.copyto(a, src)
    assert ((a + 1).get() == 8).all()


# ---- kernels ----
def test_a_kernel_takes_views_that_begin_where_a_cl_mem_can(queue: Any) -> None:
    """O-KERNEL."""
    c = icl.Context.of(queue)
    n = c.base_alignment
    t = interop.empty((n,), "float32", device=queue)
    interop.copyto(t, np.zeros(n, np.float32))
    add = icl.Kernel(ADD, "add", device=queue)
    add(t[n // 4:], 2.0, size=n // 2).wait(10)
    h = interop.to(t, "numpy")
    assert h[n // 4 - 1] == 0 and h[n // 4] == 2
    with pytest.raises(ExchangeError, match="begins at multiples of"):
        add(t[1:], 2.0, size=4)


def test_what_a_kernel_cannot_take_is_refused(queue: Any) -> None:
    """O-KERNEL."""
    add = icl.Kernel(ADD, "add", device=queue)
    t = interop.empty((4,), "float32", device=queue)
    ro = interop.as_tensor(t, readonly=True)
    with pytest.raises(ExchangeError, match="read-only"):
        add(ro, 1.0, size=4, access=["read_write"])
    with pytest.raises(ExchangeError, match="no memory of this cl_context"):
        add(interop.as_tensor(np.zeros(4, np.float32)), 1.0, size=4)
    with pytest.raises(ValueError, match="no 32 bits"):
        add(t, 2**40, size=4)
    with pytest.raises(TypeError):
        add(t, object(), size=4)
    with pytest.raises(ExchangeError, match="kernel nope"):
        icl.Kernel("__kernel void nope(", "nope", device=queue)
    const = interop.as_tensor(cl.Buffer(queue.context, cl.mem_flags.READ_ONLY, 16)).view("float32")
    with pytest.raises(ExchangeError, match="CL_MEM_READ_ONLY"):
        add(const, 1.0, size=4)


def test_a_ring_of_the_host_reaches_a_kernel_in_place(queue: Any) -> None:
    """O-ACQUIRE."""
    ring = interop.empty((4, 4096), "uint8", shared_with=[queue])
    rows = interop.to(ring, "numpy")
    rows[:] = np.arange(4, dtype=np.uint8)[:, None]
    out = np.zeros(4096, np.uint8)
    with interop.copy_guard("disallow"):
        lease = interop.acquire(ring[2], queue, "read")
        src = lease.value
        assert type(src) is cla.Array and src.offset == 8192 and src.queue == queue
        cl.enqueue_copy(queue, out, src.base_data, src_offset=src.offset, is_blocking=False)
        lease.release().wait(10)
    assert (out == 2).all()


def test_the_side_channel_says_the_context(queue: Any) -> None:
    """O-SAY."""
    from interop.native import describe

    said = describe(interop.as_tensor(cla.zeros(queue, 4, np.float32)))
    assert (said["context"], said["physical_device"], said["queue"]) == (queue.context.int_ptr, queue.device.int_ptr, queue.int_ptr)


def test_one_block_for_all(queue: Any) -> None:
    """O-PAGES."""
    torch = need("torch")
    block = interop.empty((1024,), "float32", shared_with=[queue])
    n, t = interop.to(block, "numpy"), interop.to(block, "torch")
    d = interop.to(block, icl.Context.of(queue), copy=False)
    n[:] = 1
    t += 1
    icl.Kernel(ADD, "add", device=queue)(d, 1.0, size=1024, queue=queue).wait(10)
    assert (n == 3).all() and bool((t == 3).all()) and torch is not None


# ---- what hostile callers found ----
def test_a_kernel_runs_on_the_queue_that_is_named_by_its_number(queue: Any) -> None:
    """O-KERNEL, O-QUEUE: behind what that queue was made to wait for."""
    copy = icl.Kernel("__kernel void f(__global const float *a, __global float *b) { b[get_global_id(0)] = a[get_global_id(0)]; }", "f",
                      device=queue)
    a, b = cla.zeros(queue, 100, np.float32), cla.zeros(queue, 100, np.float32)
    queue.finish()
    timer = open_later(gated(queue, a))
    copy(a, b, size=100, queue=queue.int_ptr, access=["read", "write"]).wait(10)
    timer.join()
    assert (interop.to(b, "numpy") == 5).all()


def test_an_event_is_held_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-WAIT: two threads ask at once, and the one that is told "complete" takes nothing from the other."""
    asked, go, released = threading.Event(), threading.Event(), []

    class Driver:
        def clGetEventInfo(self, event: int, what: int, size: int, out: Any, needed: Any) -> int:
            if threading.current_thread().name == "slow":
                asked.set()
                go.wait(10)
            assert not released
            out._obj.value = 0
            return 0

        def clReleaseEvent(self, event: int) -> int:
            released.append(event)
            return 0

    p = queues.EventPoint(4096, 1, driver=Driver())
    slow = threading.Thread(target=p.done, name="slow")
    slow.start()
    assert asked.wait(10) and p.done() and not released
    go.set()
    slow.join()
    assert p.handle == 0
    del p, slow
    collect()
    assert released == [4096]


@pytest.mark.parametrize("bad", [{"size": -1}, {"size": 0}, {"size": "x"}, {"size": (float("nan"),)}, {"size": (None,)}, {"size": 2**64},
                                 {"size": ()}, {"size": (1, 1, 1, 1)}, {"size": 4, "local": (-1,)}, {"size": 4, "local": ()},
                                 {"size": 4, "local": (2, 2)}, {"size": 4, "local": "x"}], ids=str)
def test_sizes_are_sizes(queue: Any, bad: Any) -> None:
    """O-KERNEL"""
    k, a = icl.Kernel(ADD, "add", device=queue), cla.zeros(queue, 8, np.float32)
    with pytest.raises((TypeError, ValueError)):
        k(a, 1.0, **bad)
    k(a, 1.0, size=8).wait(10)


@pytest.mark.parametrize("arguments", [(1.0, "array"), (5, 1.0), ("array", np.complex128(1)), ("array", b"x"), ("array",)], ids=str)
def test_arguments_that_do_not_fit_are_refused(queue: Any, arguments: Any) -> None:
    """O-KERNEL"""
    k, a = icl.Kernel(ADD, "add", device=queue), cla.zeros(queue, 8, np.float32)
    with pytest.raises((ExchangeError, TypeError, ValueError)):
        k(*[a if x == "array" else x for x in arguments], size=8)
    interop.acquire(a, "numpy", "write").release()          # no lease is left


def test_options_in_one_string_are_refused(queue: Any) -> None:
    for options in ("-DX=1", [5]):
        with pytest.raises(TypeError, match="options"):
            icl.Kernel(ADD, "add", device=queue, options=options)


def test_points_of_others_are_waited_for(queue: Any) -> None:
    """SPEC P-THIRD"""
    class Theirs:
        over = False

        def done(self) -> bool:
            return self.over

        def wait(self, timeout: float | None = None) -> None:
            self.over = True

    theirs, k, a = Theirs(), icl.Kernel(ADD, "add", device=queue), cla.zeros(queue, 8, np.float32)
    k(a, 1.0, size=8, waits=[theirs, None]).wait(10)
    assert theirs.over
    for x in ("x", [], a):
        with pytest.raises(TypeError):
            icl.events(x)


@pytest.mark.parametrize("first", [0, 30, 1])
def test_strided_copies_within_one_cl_mem(queue: Any, first: int) -> None:
    """O-COPY: any strides; within one cl_mem OpenCL wants equal pitches of a rectangle."""
    x = np.arange(256, dtype="u1")
    t = interop.empty(256, "u1", device=queue)
    interop.copyto(t, x).wait(10)
    a = t.allocation
    interop.copyto(a.tensor((4,), "u1", strides=(2,), byte_offset=100), a.tensor((4,), "u1", byte_offset=first)).wait(10)
    x[100:108:2] = x[first:first + 4]
    np.testing.assert_array_equal(interop.to(t, "numpy", device="cpu"), x)


def test_a_cl_mem_that_is_wrapped_twice_stays_known(queue: Any) -> None:
    """O-WRAP"""
    b = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 256)
    x = icl.wrap(b, context=queue.context).tensor((64,), "float32")
    y = icl.wrap(b, context=queue.context, readonly=True).tensor((64,), "float32")
    assert icl.native(x).handle == icl.native(y).handle == b.int_ptr
    del y
    collect()
    assert icl.native(x).handle == b.int_ptr
    y = icl.wrap(b, context=queue.context, readonly=True).tensor((64,), "float32")
    del x
    collect()
    assert icl.native(y).handle == b.int_ptr


def test_empty_arrays_come_and_go(queue: Any) -> None:
    """O-EMPTY"""
    t = interop.to(np.ones((0, 3), "f4"), icl.Context.of(queue))
    assert t.shape == (0, 3) and interop.to(t, "numpy", device="cpu").shape == (0, 3)


@pytest.mark.parametrize("x", [None, 5, np.zeros(4)])
def test_what_is_no_svm_is_refused(queue: Any, x: Any) -> None:
    """O-SVM"""
    with pytest.raises(TypeError):
        icl.svm_buffer(x, queue)
    with pytest.raises(TypeError):
        icl.svm.fine(x)
