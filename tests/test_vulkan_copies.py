"""Copies of Vulkan's memory through copyto. Real: lavapipe (or a GPU) under the validation layers; staging is forced, or the memory said
not to be cached, since lavapipe's is all visible."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import aligned
from test_vulkan_memory import COHERENT, VISIBLE, pretend
from vulkan_kit import CountingDriver, buffer_of, drop_buffer, vk_messages, vk_open

import interop
from interop import DeviceLostError, ExchangeError
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan import commands, copies, ring
from interop.adapters.vulkan.context import Context
from interop.contract import point

Open = Callable[..., Context]
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def gpu(vk_open: Open, driver: CountingDriver) -> Context:
    return vk_open(driver=driver, adapter=None)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "FORCED", True)


@pytest.fixture(params=["maps", "staged"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ring, "FORCED", request.param == "staged")
    return str(request.param)


def there(c: Any, a: Any) -> interop.Tensor:
    """A new tensor of the Context with these contents."""
    t = interop.empty(a.shape, a.dtype, device=c)
    interop.copyto(t, a).wait(10)
    return t


def back(t: Any) -> np.ndarray[Any, Any]:
    out = np.empty(t.shape, str(t.dtype))
    interop.copyto(out, t).wait(10)
    return out


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)


def held(c: Context, t: Any) -> Any:
    """Somebody's work that writes `t` and ends when the timeline that is returned reaches 1."""
    line = c.timeline()
    interop.acquire(t, c, "write").release(line.at(1))
    return line


# ---- any strides, any direction ----
VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x, "rows": lambda x: x[1:5], "columns": lambda x: x[:, 2:7], "every second": lambda x: x[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1], "one": lambda x: x[3:4, 3:4],
}


def transposed(x: Any) -> Any:
    return x.T if isinstance(x, np.ndarray) else x.permute(*range(x.ndim)[::-1])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_strided_copies_go_both_ways(gpu: Context, way: str, view: str, turned: bool) -> None:
    """SPEC V-COPY"""
    a = numbers(8, 9, 3)
    cut = VIEWS[view] if not turned else lambda x: transposed(VIEWS[view](x))
    expected = np.zeros_like(a)
    t = there(gpu, expected)
    part = np.ascontiguousarray(cut(a))
    interop.copyto(cut(t), part)
    cut(expected)[...] = part
    np.testing.assert_array_equal(back(t), expected)
    np.testing.assert_array_equal(back(cut(t)), part)
    other = np.zeros_like(a)
    interop.copyto(cut(other), cut(t)).wait(10)
    np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_copies_within_a_context(gpu: Context, way: str, view: str) -> None:
    a, cut = numbers(8, 9, 3), VIEWS[view]
    src, dst, expected = there(gpu, a), there(gpu, np.zeros_like(a)), np.zeros_like(a)
    done = interop.copyto(cut(dst), cut(src))
    done.wait(10)
    cut(expected)[...] = cut(a)
    np.testing.assert_array_equal(back(dst), expected)


def test_random_layouts(gpu: Context, way: str) -> None:
    random = np.random.default_rng(5)
    for _ in range(60):
        shape = tuple(random.integers(1, 7, random.integers(1, 5)))
        dtype = str(random.choice(["uint8", "int16", "float32", "complex128"]))
        a = numbers(*shape, dtype=dtype)
        t, expected = there(gpu, np.zeros(shape, dtype)), np.zeros(shape, dtype)
        order = random.permutation(len(shape))
        index = tuple(slice(None, None, int(random.choice([1, 2, -1]))) for _ in shape)
        x, y = t.permute(*map(int, order))[index], np.transpose(expected, order)[index]
        source = np.transpose(a, order)[index]
        interop.copyto(x, source if random.random() < 0.5 else there(gpu, np.ascontiguousarray(source)))
        y[...] = source
        np.testing.assert_array_equal(back(t), expected)
        np.testing.assert_array_equal(back(x), y)


def test_a_broadcast_source(gpu: Context, way: str) -> None:
    t = there(gpu, numbers(4, 5))
    row = np.broadcast_to(np.arange(5, dtype=np.float32), (4, 5))
    interop.copyto(t, row)
    np.testing.assert_array_equal(back(t), row)


def test_packed_elements_are_copied_whole_only(gpu: Context, way: str) -> None:
    a = interop.empty((4, 6), "int4")
    t, u = interop.empty((4, 6), "int4", device=gpu), interop.empty((4, 6), "int4", device=gpu)
    with a.view("uint8").map("write") as bytes_of_a:
        bytes_of_a[...] = np.arange(12).reshape(4, 3)
    interop.copyto(t, a)
    interop.copyto(u, t)
    b = interop.empty((4, 6), "int4")
    interop.copyto(b, u)
    np.testing.assert_array_equal(interop.to(b.view("uint8"), "numpy").ravel(), np.arange(12))


# ---- which way ----
def test_what_the_host_sees_is_copied_by_the_host(gpu: Context, driver: CountingDriver) -> None:
    """SPEC V-COPY-HOST"""
    a = numbers(1000, 30)
    t = there(gpu, a)
    np.testing.assert_array_equal(back(t), a)
    assert not driver.calls["vkCmdCopyBuffer"] and driver.live["Memory"] == 1


def test_memory_that_is_not_cached_is_written_through_and_read_by_the_device(gpu: Context, driver: CountingDriver) -> None:
    pretend(gpu, VISIBLE | COHERENT)
    a = numbers(1000, 30)
    t = there(gpu, a)
    assert not driver.calls["vkCmdCopyBuffer"]
    np.testing.assert_array_equal(back(t), a)
    assert driver.calls["vkCmdCopyBuffer"] == 1


def test_staging_is_reused(gpu: Context, driver: CountingDriver, staged: None) -> None:
    """SPEC V-COPY-RING"""
    a = np.random.default_rng(1).integers(0, 255, 30 << 20, np.uint8)
    t = there(gpu, a)
    for _ in range(3):
        assert (back(t) == a).all()
        interop.copyto(t, a).wait(10)
    assert driver.live["Memory"] <= 1 + ring.CHUNKS and driver.calls["vkAllocateMemory"] <= 1 + ring.CHUNKS


def test_threads_share_the_ring(gpu: Context, driver: CountingDriver, staged: None) -> None:
    wrong = []

    def work(seed: int) -> None:
        a = np.random.default_rng(seed).integers(0, 255, 9 << 20, np.uint8)
        for _ in range(3):
            if not (back(there(gpu, a)) == a).all():
                wrong.append(seed)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for th in threads:
        th.start()
    for th in threads:
        th.join(60)
    assert not wrong and not any(th.is_alive() for th in threads)


def test_scattered_elements_go_through_the_host(gpu: Context, driver: CountingDriver, staged: None) -> None:
    a = numbers(600, 500)
    t, u = there(gpu, a), interop.empty((500, 600), "float32", device=gpu)
    before = driver.calls["vkCmdCopyBuffer"]
    interop.copyto(u, t.permute(1, 0)).wait(10)
    assert driver.calls["vkCmdCopyBuffer"] - before < 10
    np.testing.assert_array_equal(back(u), a.T)


def test_a_ring_does_not_keep_its_context(vk_open: Open, staged: None) -> None:
    c = Context.open()
    seen = weakref.ref(c)
    t = there(c, numbers(10))
    back(t)
    del t, c
    for _ in range(20):
        gc.collect()
        if seen() is None:
            break
        threading.Event().wait(0.05)
    assert seen() is None


# ---- two Contexts ----
def test_between_contexts_the_host_copies(vk_open: Open) -> None:
    """SPEC V-COPY-CONTEXTS"""
    a, one, two = numbers(5, 5), vk_open(adapter=None), vk_open(adapter=None)
    t, u = there(one, a), there(two, np.zeros_like(a))
    assert copies.copy(u, t, None) is NotImplemented
    interop.copyto(u, t)
    np.testing.assert_array_equal(back(u), a)


# ---- overlap ----
@pytest.mark.parametrize("shift", [1, 3, -1, -3])
def test_overlapping_copies_are_as_if_from_a_copy(gpu: Context, driver: CountingDriver, way: str, shift: int) -> None:
    """SPEC V-COPY-OVERLAP"""
    a = numbers(40, 3, dtype="int32")
    t, expected = there(gpu, a), a.copy()
    ahead, behind = (slice(shift, None), slice(None, -shift)) if shift > 0 else (slice(None, shift), slice(-shift, None))
    interop.copyto(t[ahead], t[behind]).wait(10)
    expected[ahead] = a[behind]
    np.testing.assert_array_equal(back(t), expected)


def test_what_is_copied_to_itself_stays(gpu: Context, driver: CountingDriver, staged: None) -> None:
    a = numbers(7)
    t = there(gpu, a)
    before = driver.calls["vkQueueSubmit"]
    interop.copyto(t, t)
    assert driver.calls["vkQueueSubmit"] == before
    np.testing.assert_array_equal(back(t), a)


def test_scratch_goes_when_the_copy_is_done(gpu: Context, driver: CountingDriver, staged: None) -> None:
    t = there(gpu, numbers(1000))
    for _ in range(10):
        interop.copyto(t[1:], t[:-1]).wait(10)
    back(t)
    assert driver.live["Memory"] == 2               # its own, and one chunk


def test_two_buffers_over_the_same_memory_overlap(gpu: Context, staged: None) -> None:
    t = there(gpu, np.arange(1024, dtype=np.int32))
    source = interop.adapters.vulkan.native(t)              # type: ignore[attr-defined]
    again = vk.VkBuffer()
    gpu.ok(gpu.vk.vkCreateBuffer(gpu.device_handle, vk.VkBufferCreateInfo(size=4096, usage=source.usage), None, ctypes.byref(again)), "")
    gpu.ok(gpu.vk.vkBindBufferMemory(gpu.device_handle, again.value, source.memory, 0), "")
    try:
        kind = gpu.store.memories[source.memory].kind.index
        other = gpu.wrap_buffer(again.value, memory=source.memory, memory_size=source.memory_size, memory_type=kind, usage=source.usage,
                                owner=t).tensor(1024, "int32")
        interop.copyto(other[1:], t[:-1]).wait(10)
        np.testing.assert_array_equal(back(t)[1:], np.arange(1023))
        del other
        gc.collect()
    finally:
        gpu.vk.vkDestroyBuffer(gpu.device_handle, again.value, None)


# ---- order ----
def test_a_copy_comes_after_what_is_pending(gpu: Context, staged: None) -> None:
    """SPEC V-COPY-ORDER"""
    t, u = there(gpu, numbers(100)), there(gpu, np.zeros(100, np.float32))
    line = held(gpu, t)
    done = interop.copyto(u, t)
    assert not done.done()
    line.signal(1)
    done.wait(10)
    np.testing.assert_array_equal(back(u), numbers(100))


def test_a_host_copy_waits_for_what_is_pending(gpu: Context, way: str) -> None:
    t, over, out = there(gpu, numbers(100)), threading.Event(), np.zeros(100, np.float32)
    interop.acquire(t, gpu, "write").release(point(done=over.is_set))
    threading.Timer(0.1, over.set).start()
    interop.copyto(out, t)
    assert over.is_set()
    np.testing.assert_array_equal(out, numbers(100))


def test_a_write_comes_after_reads(gpu: Context, way: str) -> None:
    t, over = there(gpu, numbers(100)), threading.Event()
    interop.acquire(t, gpu, "read").release(point(done=over.is_set))
    threading.Timer(0.1, over.set).start()
    interop.copyto(t, np.zeros(100, np.float32)).wait(10)
    assert over.is_set() and not back(t).any()


def test_a_named_queue(gpu: Context, way: str) -> None:
    a, t, other = numbers(50), interop.empty(50, "float32", device=gpu), interop.empty(64 << 20, "uint8", device=gpu)

    def work(buffer: int) -> None:                          # what the queue was given before, and no Point of the tensors tells
        for _ in range(8):
            gpu.vk.vkCmdFillBuffer(buffer, other.handle, 0, other.nbytes, 7)
            commands.between(gpu.vk, buffer)
    before = gpu.queue.run(work)
    interop.copyto(t, a, stream=gpu.queue.handle).wait(10)
    assert before.done()
    np.testing.assert_array_equal(back(t), a)


def test_a_queue_that_nobody_knows(gpu: Context, way: str) -> None:
    t = interop.empty(50, "float32", device=gpu)
    with pytest.raises(ExchangeError, match="VkQueue"):
        interop.copyto(t, np.zeros(50, np.float32), stream=12345)


def test_memory_stays_while_a_copy_is_queued(gpu: Context, driver: CountingDriver, staged: None) -> None:
    t, u = there(gpu, numbers(100)), there(gpu, np.zeros(100, np.float32))
    line = held(gpu, t)
    done = interop.copyto(u, t)
    before = driver.live["Buffer"]
    del t, u
    gc.collect()
    assert driver.live["Buffer"] == before
    line.signal(1)
    done.wait(10)


def test_fences_do_where_there_are_no_timelines(vk_open: Open, way: str) -> None:
    c = vk_open(features=(), adapter=None)
    a = numbers(6, 7)
    t = there(c, a)
    u = interop.empty((7, 6), "float32", device=c)
    interop.copyto(u, t.permute(1, 0)).wait(10)
    np.testing.assert_array_equal(back(u), a.T)


# ---- refusals and failures ----
def test_a_buffer_that_is_not_for_copies(gpu: Context, way: str) -> None:
    made, below = vk.VkBuffer(), vk.VkDeviceMemory()
    only = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    gpu.ok(gpu.vk.vkCreateBuffer(gpu.device_handle, vk.VkBufferCreateInfo(size=256, usage=only), None, ctypes.byref(made)), "")
    info = vk.VkMemoryAllocateInfo(allocationSize=256, memoryTypeIndex=0)
    gpu.ok(gpu.vk.vkAllocateMemory(gpu.device_handle, info, None, ctypes.byref(below)), "")
    gpu.ok(gpu.vk.vkBindBufferMemory(gpu.device_handle, made.value, below.value, 0), "")
    try:
        t = gpu.wrap_buffer(made.value, memory=below.value, memory_size=256, memory_type=0, usage=only, owner=None).tensor(64, "int32")
        a = np.arange(64, dtype=np.int32)
        if way == "staged":
            with pytest.raises(ExchangeError, match="TRANSFER_DST"):
                interop.copyto(t, a)
        else:
            interop.copyto(t, a)
            interop.copyto(t[1:], t[:-1])
            np.testing.assert_array_equal(back(t), np.maximum(a - 1, 0))
        del t
        gc.collect()
    finally:
        drop_buffer(gpu, made.value, below.value)


def test_a_submit_that_fails_half_way(gpu: Context, driver: CountingDriver, staged: None) -> None:
    a = interop.empty(9 << 20, "uint8")
    interop.copyto(a, np.ones(9 << 20, np.uint8))
    t = there(gpu, a)
    calls = driver.calls["vkQueueSubmit"]

    def second(*_: Any) -> None:
        if driver.calls["vkQueueSubmit"] == calls + 2:
            driver.fail_next("vkQueueSubmit", vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)
    driver.before["vkQueueSubmit"] = [second]
    with pytest.raises(MemoryError):
        interop.copyto(t, a)
    with pytest.raises(ExchangeError, match="last write"):
        back(t)
    driver.before.clear()
    interop.copyto(t, a).wait(10)
    assert back(t).all()


def test_memory_for_staging_that_runs_out(gpu: Context, driver: CountingDriver, staged: None) -> None:
    t = interop.empty(100, "float32", device=gpu)
    driver.fail_next("vkAllocateMemory", vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)
    with pytest.raises(MemoryError):
        interop.copyto(t, numbers(100))
    assert driver.live["Buffer"] == 1
    interop.copyto(t, numbers(100)).wait(10)


def test_a_lost_device_copies_nothing(gpu: Context, driver: CountingDriver, staged: None) -> None:
    t = there(gpu, numbers(100))
    driver.fail_next("vkQueueSubmit", vk.VK_ERROR_DEVICE_LOST)
    with pytest.raises(DeviceLostError):
        back(t)
    with pytest.raises(DeviceLostError):
        copies.copy(t, interop.as_tensor(numbers(100)), None)


def test_read_only_memory_is_read_and_not_written(gpu: Context, way: str) -> None:
    a = aligned(numbers(64, 64))
    a.flags.writeable = False
    t = interop.to(a, gpu, copy=False)
    np.testing.assert_array_equal(back(t), a)
    with pytest.raises(ExchangeError, match="read-only"):
        interop.copyto(t, a)
