"""Memory of Vulkan's: allocated, wrapped, mapped, viewed. Real: lavapipe (or a GPU) under the validation layers.

What lavapipe has not, memory that is not coherent or not cached, it is said to have: `pretend`.
"""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import need, run
from vulkan_kit import CountingDriver, leaves_no_fds, vk_messages, vk_open

import interop
from interop import DeviceLostError, ExchangeError, LeaseError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan import maps, memory
from interop.adapters.vulkan.adapter import ADAPTER
from interop.adapters.vulkan.context import Context

Open = Callable[..., Context]
VISIBLE, COHERENT, CACHED, LOCAL = 2, 4, 8, 1


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def gpu(vk_open: Open, driver: CountingDriver) -> Context:
    """A Context of interop's adapter, whose calls and objects are counted."""
    return vk_open(driver=driver, adapter=None)


def pretend(c: Context, flags: int, atom: int | None = None) -> None:
    """The device's memory types have these flags."""
    c.memory_types = tuple(dataclasses.replace(m, flags=flags) for m in c.memory_types)
    c.atom = atom or c.atom


def fill(c: Context, t: interop.Tensor, word: int) -> interop.Point:
    """The device writes this word all over a compact tensor."""
    return c.queue.run(lambda b: c.vk.vkCmdFillBuffer(b, t.handle, t.byte_offset, t.nbytes, word))


def kept(driver: CountingDriver) -> tuple[int, int]:
    """How many buffers and memory objects there are."""
    return driver.live["Buffer"], driver.live["Memory"]


class Raw:
    """A VkDeviceMemory of the application's with buffers in it."""

    def __init__(self, c: Context, size: int, *spans: tuple[int, int], exportable: bool = False) -> None:
        self.c, _t, _d = c, c.vk, c.device_handle
        self.buffers = [self._buffer(n, exportable) for _, n in spans]
        needs = [memory.need_of(c, b) for b in self.buffers]
        self.size = max([size, *[offset + need.size for (offset, _), need in zip(spans, needs, strict=True)]])
        self.type = memory.choose(c, needs[0].bits, memory.FOR_HOST).index
        more = [vk.VkExportMemoryAllocateInfo(handleTypes=1)] if exportable else []
        self.memory = memory.allocate_memory(c, self.size, c.memory_types[self.type], *more)
        for b, (offset, _) in zip(self.buffers, spans, strict=True):
            memory.bind(c, b, self.memory, offset)
        self.usage = memory.USAGE
        self.mapped = 0

    def _buffer(self, n: int, exportable: bool) -> int:
        return memory.create_buffer(self.c, n, memory.usage_of(self.c), 1 if exportable else 0)

    def map(self) -> int:
        out = ctypes.c_void_p()
        self.c.ok(self.c.vk.vkMapMemory(self.c.device_handle, self.memory, 0, self.size, 0, ctypes.byref(out)), "vkMapMemory")
        self.mapped = out.value or 0
        return self.mapped

    def wrap(self, i: int = 0, **more: Any) -> interop.Allocation:
        given: dict[str, Any] = {"memory": self.memory, "memory_size": self.size, "memory_type": self.type, "usage": self.usage,
                                 "owner": None}
        return self.c.wrap_buffer(self.buffers[i], **(given | more))

    def close(self) -> None:
        for b in self.buffers:
            self.c.vk.vkDestroyBuffer(self.c.device_handle, b, None)
        self.c.vk.vkFreeMemory(self.c.device_handle, self.memory, None)


# ---- places ----
def test_importing_the_adapter_opens_nothing() -> None:
    """V-LAZY."""
    run("import sys, interop.adapters.vulkan.adapter\n"
        "assert 'interop.adapters.vulkan.api' not in sys.modules and 'interop.adapters.vulkan.loader' not in sys.modules\n"
        "assert 'libvulkan' not in open('/proc/self/maps').read()\n")


def test_a_device_means_the_one_context_of_its_number(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-CONTEXT."""
    monkeypatch.setattr(ADAPTER, "contexts", {0: gpu})
    t = interop.empty((4,), "float32", device="vulkan:0")
    assert t.allocation.context is gpu and ADAPTER.context("vulkan:0") is gpu and ADAPTER.context(interop.Device("vulkan:0")) is gpu
    with pytest.raises(ExchangeError, match="cuda:0 is no Vulkan device"):
        ADAPTER.context("cuda:0")


def test_a_default_context_that_was_closed_is_opened_anew(vk_open: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-CONTEXT."""
    first, second = vk_open(adapter=None), vk_open(adapter=None)
    first.close()
    monkeypatch.setattr(ADAPTER, "contexts", {0: first})
    monkeypatch.setattr(Context, "open", classmethod(lambda cls, index: second))
    assert ADAPTER.context("vulkan:0") is second


# ---- allocation ----
def test_empty_is_one_buffer_over_one_memory_object(gpu: Context, driver: CountingDriver) -> None:
    """V-ALLOC."""
    t = interop.empty((10, 3), "float32", device=gpu)
    a, m = t.allocation, memory.of(t.allocation, "test").memory
    assert driver.live["Buffer"] == driver.live["Memory"] == 1 and a.nbytes == m.nbytes >= 256 and not a.nbytes % 256
    assert t.byte_offset == 0 and t.handle == a.handle and a.context is gpu and str(t.device) == "vulkan:0"
    assert t[2:].byte_offset == 24 and t[2:].handle == t.handle
    assert a.traits >= {"host_visible", "coherent", "cached"} and a.atom == 1
    del t, a, m
    assert not driver.live["Buffer"] and not driver.live["Memory"] and not gpu.store.buffers and not gpu.store.memories


def test_nothing_is_made_for_zero_bytes(gpu: Context, driver: CountingDriver) -> None:
    """V-ALLOC."""
    t = interop.empty((0, 3), "float32", device=gpu)
    assert t.size == 0 and driver.calls["vkCreateBuffer"] == driver.calls["vkAllocateMemory"] == 0
    with pytest.raises(ExchangeError, match="no empty buffers"):
        memory.allocate(gpu, 0)


def types(c: Context, *flags: int, heap_size: int = 1 << 40) -> None:
    c.memory_types = tuple(memory.MemoryType(i, f, 0, heap_size) for i, f in enumerate(flags))


#: The H200's (measured.md G).
H200 = (0, LOCAL, VISIBLE | COHERENT, VISIBLE | COHERENT | CACHED, LOCAL | VISIBLE | COHERENT)


@pytest.mark.parametrize(("wanted", "bits", "index"), [
    (memory.FOR_DEVICE, 0b11111, 1), (memory.FOR_HOST, 0b11111, 3), (memory.FOR_HOST, 0b10111, 2), (memory.FOR_HOST, 0b10001, 4),
    (memory.FOR_DEVICE, 0b01100, 2), ((0,), 0b11111, 0)])
def test_a_memory_type_has_at_least_the_flags_that_are_wanted_most(gpu: Context, wanted: Any, bits: int, index: int) -> None:
    """V-TYPE (field report B84)."""
    types(gpu, *H200)
    assert memory.choose(gpu, bits, wanted).index == index


def test_one_type_that_is_everything_is_taken_for_the_device(gpu: Context) -> None:
    """V-TYPE: a GPU with the host's memory."""
    types(gpu, LOCAL, VISIBLE | COHERENT, LOCAL | VISIBLE | COHERENT | CACHED)
    assert memory.choose(gpu, 0b111, memory.FOR_DEVICE).index == 2


def test_types_that_mean_more_are_never_chosen(gpu: Context) -> None:
    """V-TYPE."""
    types(gpu, LOCAL | 0x20, LOCAL | 0x10, LOCAL | 0x40, LOCAL)
    assert memory.choose(gpu, 0b1111, memory.FOR_DEVICE).index == 3


def test_no_type_is_an_error_that_lists_them(gpu: Context) -> None:
    """V-TYPE."""
    types(gpu, LOCAL)
    with pytest.raises(ExchangeError, match=r"no memory type with the flags 0xe .* memoryTypeBits 0x1: its types have 0: 0x1"):
        memory.choose(gpu, 1, memory.FOR_HOST)


def test_a_heap_that_is_too_small_is_passed_over_or_said(gpu: Context) -> None:
    """V-SIZE."""
    gpu.memory_types = (memory.MemoryType(0, LOCAL, 0, 1000), memory.MemoryType(1, LOCAL, 1, 5000))
    assert memory.choose(gpu, 0b11, memory.FOR_DEVICE, 2000).index == 1
    with pytest.raises(MemoryError, match=r"6000 bytes: no heap .* has more than 5000"):
        memory.choose(gpu, 0b11, memory.FOR_DEVICE, 6000)


def test_more_than_a_memory_object_holds_is_refused_with_both_numbers(gpu: Context, driver: CountingDriver) -> None:
    """V-SIZE."""
    gpu.max_allocation = 1 << 20
    with pytest.raises(ExchangeError, match=r"1048577 bytes: .* at most 1048576 \(maxMemoryAllocationSize\)"):
        interop.empty((1 << 20) + 1, "uint8", device=gpu)
    assert not driver.calls["vkCreateBuffer"]
    with pytest.raises(ExchangeError, match="maxMemoryAllocationSize"):
        interop.empty(1 << 59, "uint8", device=gpu)


def test_memory_for_frameworks_of_the_host_is_for_the_host(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-TYPE."""
    asked: list[Any] = []
    monkeypatch.setattr(memory, "allocate", lambda c, n, **more: asked.append((more["wanted"], more["kinds"])) or NotImplemented)
    for shared in ((), ("numpy",), ("cpu",), (np,), ("process",), (gpu,), ("torch",)):
        ADAPTER.allocate(64, place=gpu, alignment=1, shared_with=shared)
    fd = ("opaque_fd",)
    assert asked == [(memory.FOR_DEVICE, ()), (memory.FOR_HOST, ()), (memory.FOR_HOST, ()), (memory.FOR_HOST, ()), (memory.FOR_DEVICE, fd),
                     (memory.FOR_DEVICE, ()), (memory.FOR_DEVICE, fd)]


@pytest.mark.parametrize("call", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory"])
def test_a_step_that_fails_leaves_nothing(gpu: Context, driver: CountingDriver, call: str) -> None:
    """V-UNDO."""
    for code, kind in ((vk.VK_ERROR_OUT_OF_DEVICE_MEMORY, MemoryError), (vk.VK_ERROR_OUT_OF_HOST_MEMORY, MemoryError),
                       (-1000011001, ExchangeError)):
        driver.fail_next(call, code)
        with pytest.raises(kind, match=call):
            interop.empty((100,), "uint8", device=gpu, shared_with=["process"])
        assert not driver.live["Buffer"] and not driver.live["Memory"] and not gpu.store.buffers and not gpu.store.memories
    interop.empty((100,), "uint8", device=gpu)


def test_a_lost_device_is_said_as_that(gpu: Context, driver: CountingDriver) -> None:
    """V-UNDO."""
    driver.fail_next("vkAllocateMemory", vk.VK_ERROR_DEVICE_LOST)
    with pytest.raises(DeviceLostError):
        interop.empty((100,), "uint8", device=gpu)
    assert not driver.live["Buffer"] and gpu.lost is not None


def test_a_driver_that_wants_dedicated_memory_gets_it(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-ALLOC (field report B75)."""
    need_of, chains = memory.need_of, []
    monkeypatch.setattr(memory, "need_of", lambda c, b: need_of(c, b)._replace(dedicated=True))
    make = memory.allocate_memory
    monkeypatch.setattr(memory, "allocate_memory", lambda c, n, k, *chain: chains.append(chain) or make(c, n, k, *chain))
    t = interop.empty((100,), "uint8", device=gpu, shared_with=["process"])
    dedicated = next(x for x in chains[0] if isinstance(x, vk.VkMemoryDedicatedAllocateInfo))
    assert dedicated.buffer == t.handle and "dedicated" in t.allocation.traits
    with t.allocation.export("opaque_fd") as h:
        assert h.dedicated and h.nbytes == t.allocation.nbytes


def test_a_context_with_memory_is_not_closed(gpu: Context) -> None:
    """V-LEAK."""
    t = interop.empty((4,), "uint8", device=gpu)
    with pytest.raises(ExchangeError, match="1 allocation of this vulkan context still live"):
        gpu.close()
    t.allocation.close()
    with pytest.raises(ExchangeError, match="closed"):
        ivk.native(t)
    gpu.close()


def test_1000_allocations_leave_nothing(gpu: Context, driver: CountingDriver) -> None:
    """V-LEAK."""
    gc.collect()
    before = kept(driver)
    with leaves_no_fds():
        for i in range(1000):
            t = interop.empty((256,), "uint8", device=gpu, shared_with=["process"])
            fill(gpu, t, i)
            interop.to(t, "numpy")
            with t.map("read_write") as m:
                m[0] = 1
            with t.allocation.export("opaque_fd"):
                pass
            del t, m
    assert kept(driver) == before and driver.live["CommandPool"] <= 33 and not gpu.store.buffers and not gpu.store.memories


def test_memory_waits_for_work_that_was_said_to_use_it(gpu: Context, driver: CountingDriver) -> None:
    """V-LEAK: dropped while a Point is pending, freed when it is done."""
    gate = gpu.timeline()
    t = interop.empty((256,), "uint8", device=gpu)
    interop.acquire(t, gpu, "write").release(gate.at(1))
    del t
    gc.collect()
    assert driver.live["Memory"] == 1
    gate.signal(1)
    for _ in range(500):
        if not driver.live["Memory"]:
            break
        interop._core.release_ready()
        __import__("time").sleep(0.002)
    assert not driver.live["Memory"] and not driver.live["Buffer"]


# ---- native ----
def test_native_is_what_a_descriptor_takes(gpu: Context) -> None:
    """V-NATIVE."""
    t = interop.empty((64, 4), "float32", device=gpu)
    whole, part = ivk.native(t), ivk.native(t[4:8])
    m = memory.of(t.allocation, "test").memory
    assert whole[:3] == (t.handle, 0, 1024) and part[:3] == (t.handle, 64, 64)
    assert (whole.memory, whole.memory_offset, whole.memory_size) == (m.handle, 0, m.nbytes) and whole.usage & memory.USAGE == memory.USAGE
    assert part.address == (whole.address + 64 if whole.address else 0)
    assert bool(whole.address) == ("bufferDeviceAddress" in gpu.features)
    info = vk.VkDescriptorBufferInfo(*whole[:3])
    assert (info.buffer, info.offset, info.range) == whole[:3]


def test_native_covers_the_bytes_that_strides_touch(gpu: Context) -> None:
    """V-NATIVE."""
    t = interop.empty((64, 4), "float32", device=gpu)
    assert ivk.native(t[::-1]) == ivk.native(t) and ivk.native(t[:, ::3]).size == 1024
    assert ivk.native(t[4::60, 1:2], descriptor=False)[1:3] == (68, 4)


def test_an_offset_that_no_descriptor_takes_is_refused(gpu: Context) -> None:
    """V-NATIVE."""
    t = interop.empty((64,), "float32", device=gpu)
    with pytest.raises(ExchangeError, match=rf"byte_offset 12 is not a multiple of {gpu.storage_alignment} \(minStorage"):
        ivk.native(t[3:])
    assert ivk.native(t[3:], descriptor=False).offset == 12


def test_a_range_that_no_descriptor_takes_is_refused_with_numbers(gpu: Context) -> None:
    """V-NATIVE."""
    t = interop.empty((64,), "float32", device=gpu)
    gpu.max_storage_range = 128
    with pytest.raises(ExchangeError, match=r"256 bytes are more than the 128 .* \(maxStorageBufferRange\)"):
        ivk.native(t)
    assert ivk.native(t[:32]).size == 128 and ivk.native(t, descriptor=False).size == 256


def test_empty_and_foreign_tensors_are_no_descriptors(gpu: Context) -> None:
    """V-NATIVE."""
    t = interop.empty((4,), "float32", device=gpu)
    with pytest.raises(ExchangeError, match="touches no bytes"):
        ivk.native(t[:0])
    foreign = interop.wrap(12345, 64, device="vulkan:0", owner=None).tensor((4,), "float32")
    with pytest.raises(ExchangeError, match="0x3039 is of no Context"):
        ivk.native(foreign)
    with pytest.raises(ExchangeError):
        ivk.native(interop.as_tensor(np.zeros(4)))


def test_a_read_only_handle_is_not_for_writing(gpu: Context) -> None:
    """V-READONLY."""
    t = interop.as_tensor(interop.empty((4,), "float32", device=gpu), readonly=True)
    assert ivk.native(t).size == 16
    with pytest.raises(ExchangeError, match="read-only: its buffer is not for writing"):
        ivk.native(t, write=True)


# ---- wrap_buffer ----
@pytest.fixture
def raw(gpu: Context) -> Any:
    made: list[Raw] = []

    def make(*args: Any, **more: Any) -> Raw:
        made.append(Raw(gpu, *args, **more))
        return made[-1]

    yield make
    gc.collect()
    for r in made:
        r.close()


def test_a_wrapped_buffer_stays_the_applications(gpu: Context, driver: CountingDriver, raw: Any) -> None:
    """V-WRAP."""
    class Owner:
        pass
    owner = Owner()
    alive = weakref.ref(owner)
    r = raw(1024, (0, 1024))
    live = kept(driver)
    a = r.wrap(owner=owner)
    del owner
    t = a.tensor((256,), "uint32")
    fill(gpu, t, 7).wait(5)
    assert (interop.to(t, "numpy") == 7).all() and alive() is not None and ivk.native(t).memory == r.memory
    assert ctypes.c_uint32.from_address(interop.to(t, "numpy").ctypes.data).value == 7
    del a, t
    gc.collect()
    assert alive() is None and kept(driver) == live and not driver.calls["vkFreeMemory"] and not driver.calls["vkDestroyBuffer"]
    assert driver.calls["vkMapMemory"] == driver.calls["vkUnmapMemory"] == 1


def test_a_size_that_was_not_said_is_what_the_driver_needs(raw: Any) -> None:
    """V-WRAP."""
    r = raw(4096, (0, 1000))
    assert 1000 <= r.wrap().nbytes <= 1024 and r.wrap(nbytes=None).nbytes == r.wrap().nbytes
    gc.collect()
    assert r.wrap(nbytes=1000).nbytes == 1000


@pytest.mark.parametrize(("said", "error", "match"), [
    ({"memory_size": 512}, ValueError, "needs 1024 bytes of memory at 0, and memory_size is 512"),
    ({"nbytes": 4096}, ValueError, "nbytes 4096: the buffer needs 1024"),
    ({"memory_offset": 5}, ValueError, "memory_offset 5: .* multiples of"),
    ({"memory_type": 99}, ValueError, "memory_type 99"),
    ({"memory_offset": -1}, ValueError, "memory_offset -1"),
    ({"memory_size": 1.5}, TypeError, "memory_size 1.5: an int"),
    ({"usage": 0}, ValueError, "usage 0"),
    ({"memory": None}, TypeError, "memory None is no Vulkan handle"),
    ({"handle_types": "opaque_fd"}, TypeError, "a sequence of kinds"),
    ({"handle_types": ["win32"]}, ValueError, "'win32' is none of opaque_fd, dma_buf"),
    ({"handle_types": ["dma_buf"]}, ExchangeError, "takes VK_EXT_external_memory_dma_buf")])
def test_what_cannot_be_said_of_a_buffer(gpu: Context, raw: Any, said: dict[str, Any], error: type[Exception], match: str) -> None:
    """V-WRAP."""
    if "dma_buf" in str(said) and gpu.has("VK_EXT_external_memory_dma_buf"):
        pytest.skip("this device has dma-buf")
    r = raw(1024, (0, 1024))
    with pytest.raises(error, match=match):
        r.wrap(**said)
    assert not gpu.store.buffers and not gpu.store.memories


def test_a_buffer_is_the_same_whenever_it_is_wrapped(gpu: Context, raw: Any) -> None:
    """V-WRAP."""
    r = raw(4096, (0, 1024))
    one, two = r.wrap(), r.wrap()
    with one.tensor(4, "uint8").map("read_write"), pytest.raises(LeaseError):
        two.tensor(4, "uint8").map("read")
    with pytest.raises(ValueError, match="is known as"):
        r.wrap(nbytes=512)
    with pytest.raises(ValueError, match=r"said differently now|is known as"):
        r.wrap(memory_size=8192)
    one.close()
    assert two.tensor(4, "uint8").size and gpu.store.buffers
    two.close()
    assert not gpu.store.buffers and not gpu.store.memories


def test_buffers_of_one_memory_object_share_leases_by_bytes(raw: Any) -> None:
    """V-WRAP-SHARED."""
    r = raw(8192, (0, 4096), (1024, 1024), (4096, 4096))
    whole, inner, other = r.wrap(0), r.wrap(1, memory_offset=1024), r.wrap(2, memory_offset=4096)
    with inner.tensor(1024, "uint8").map("read_write") as m:
        m[:] = 9
        with pytest.raises(LeaseError):
            whole.tensor(4096, "uint8").map("read")
        with whole.tensor(1024, "uint8").map("read_write"), other.tensor(4096, "uint8").map("read_write"):
            pass
    with whole.tensor(4096, "uint8").map("read") as m:
        assert (m[1024:2048] == 9).all()


def test_a_memory_object_is_mapped_once_for_all_its_buffers(driver: CountingDriver, raw: Any) -> None:
    """V-MAP, V-WRAP-SHARED: VUID-vkMapMemory-memory-00678."""
    r = raw(8192, (0, 4096), (4096, 4096))
    a, b = r.wrap(0), r.wrap(1, memory_offset=4096)
    first, second = a.tensor(4096, "uint8").map("read_write"), b.tensor(4096, "uint8").map("read_write")
    x, y = first.value, second.value
    assert y.ctypes.data - x.ctypes.data == 4096 and driver.calls["vkMapMemory"] == 1
    first.release()
    second.release()
    del first, second, x
    gc.collect()
    assert driver.calls["vkUnmapMemory"] == 0 and y[0] is not None
    del y
    gc.collect()
    assert driver.calls["vkUnmapMemory"] == 1


def test_a_buffer_over_memory_of_interops_keeps_that_open(gpu: Context) -> None:
    """V-WRAP-SHARED."""
    t = interop.empty((4096,), "uint8", device=gpu)
    n = ivk.native(t)
    mine = memory.create_buffer(gpu, 1024, memory.usage_of(gpu))
    memory.bind(gpu, mine, n.memory, 2048)
    a = gpu.wrap_buffer(mine, memory=n.memory, memory_size=n.memory_size, memory_offset=2048,
                        memory_type=memory.of(t.allocation, "").memory.kind.index, usage=memory.USAGE, owner=None)
    with pytest.raises(ExchangeError, match="still use it"):
        t.allocation.close()
    with t[2048:].map("read_write") as m, pytest.raises(LeaseError):
        m[:] = 3
        a.tensor(4, "uint8").map("read")
    assert interop.to(a.tensor(4, "uint8"), "numpy").tolist() == [3] * 4
    del a, m
    gc.collect()
    t.allocation.close()
    gpu.vk.vkDestroyBuffer(gpu.device_handle, mine, None)


def test_contents_that_are_ready_later_are_waited_for(gpu: Context, raw: Any) -> None:
    """V-WRAP-READY."""
    gate = gpu.timeline()
    r = raw(1024, (0, 1024))
    for ready in (gate.at(1), (gate.handle, 1)):
        a = r.wrap(ready=ready)
        lease = interop.acquire(a.tensor(4, "uint8"), gpu, "read")
        assert not lease.after.done()
        assert dict([ready] if isinstance(ready, tuple) else ready.native()) == dict(lease.after.native())
        lease.release()
    gate.signal(1)
    assert interop.to(a.tensor(4, "uint8"), "numpy").shape == (4,)
    gpu.wait_idle(5)


def test_memory_that_the_application_has_mapped_is_not_mapped(driver: CountingDriver, raw: Any) -> None:
    """V-WRAP-MAPPED."""
    r = raw(8192, (0, 4096), (4096, 4096))
    base = r.map()
    a = r.wrap(1, memory_offset=4096, mapped=base + 4096)
    with a.tensor(4096, "uint8").map("read_write") as m:
        assert m.ctypes.data == base + 4096
    b = r.wrap(0)                       # in the same memory object: mapped too
    assert interop.to(b.tensor(4, "uint8"), "numpy").ctypes.data == base
    with pytest.raises(ValueError, match="known to be mapped at"):
        r.wrap(0, mapped=base + 64)
    assert driver.calls["vkMapMemory"] == 1
    del a, b, m
    gc.collect()
    assert driver.calls["vkUnmapMemory"] == 0


def test_an_exportable_buffer_of_the_applications_is_exported(vk_open: Open, raw: Any) -> None:
    """V-WRAP, V-EXPORT."""
    r = raw(8192, (0, 4096), (4096, 4096), exportable=True)
    a = r.wrap(1, memory_offset=4096, handle_types=["opaque_fd"])
    assert a.exports == {"opaque_fd"} and r.wrap(0, handle_types=1).exports == {"opaque_fd"}
    a.tensor(4, "uint8").map("read_write").value[:] = 5
    other = vk_open(adapter=None)
    with a.export("opaque_fd") as h:
        assert (h.offset, h.nbytes) == (4096, r.size)
        there = interop.memory.import_handle(h, other)
    assert interop.to(there.tensor(4, "uint8"), "numpy").tolist() == [5] * 4


def test_an_applications_device_is_wrapped_and_shared(vk_open: Open) -> None:
    """V-CONTEXT, V-WRAP: two Contexts over one VkDevice are two."""
    c = vk_open(adapter=None)
    mine = Context.wrap(instance=c.instance_handle, physical_device=c.physical_device, device=c.device_handle,
                        queue=c.queue.handle, queue_family=c.queue.family, extensions=c.extensions, features=c.features)
    t = interop.empty((4,), "uint8", device=mine)
    assert t.allocation.context is mine and t.device == c.device and memory.find(t.allocation) is not None
    with pytest.raises(ExchangeError):
        interop.to(t, c, copy=False)
    del t
    gc.collect()
    mine.close()


# ---- maps ----
@pytest.mark.parametrize(("first", "nbytes", "atom", "size", "expected"), [
    (0, 60, 1, 64, (0, 60)), (0, 60, 64, 64, (0, 64)), (0, 60, 64, 60, (0, 60)), (96, 10, 256, 4096, (0, 256)),
    (250, 10, 256, 4096, (0, 512)),
    (924, 36, 64, 960, (896, 64)), (924, 36, 256, 960, (768, 192)), (128, 0, 64, 256, (128, 0)), (127, 2, 128, 300, (0, 256)),
    (256, 44, 128, 300, (256, 44)), (2**32 + 5, 1, 64, 2**33, (2**32, 64))])
def test_ranges_are_whole_atoms_within_the_memory(first: int, nbytes: int, atom: int, size: int, expected: tuple[int, int]) -> None:
    """V-ATOM (field report B81)."""
    assert maps.atoms(first, nbytes, atom, size) == expected


@pytest.mark.parametrize("atom", [1, 64, 128, 256])
def test_ranges_cover_what_was_asked_for(atom: int) -> None:
    """V-ATOM (field report B81)."""
    for size in (60, 64, 256, 960, 1000):
        for first in range(0, size, 7):
            for nbytes in (1, 36, size - first):
                if first + nbytes > size:
                    continue
                start, n = maps.atoms(first, nbytes, atom, size)
                assert start <= first and first + nbytes <= start + n <= size and not start % atom and (not n % atom or start + n == size)


@pytest.mark.parametrize("atom", [64, 256])
def test_memory_that_is_not_coherent_is_flushed_and_invalidated(gpu: Context, driver: CountingDriver, atom: int) -> None:
    """V-ATOM (field reports B81, B83)."""
    pretend(gpu, VISIBLE | CACHED, atom)
    t = interop.empty((1000,), "uint8", device=gpu)
    assert t.allocation.atom == atom and t.allocation.traits == {"host_visible", "cached"}
    seen: dict[str, list[tuple[int, int]]] = {}
    for name in ("vkFlushMappedMemoryRanges", "vkInvalidateMappedMemoryRanges"):
        driver.before[name] = [lambda d, n, r, name=name: seen.setdefault(name, []).append((r[0].offset, r[0].size))]
    with t[300:400].map("read_write") as m:
        m[:] = 4
    span = maps.atoms(300, 100, atom, 1024)
    assert seen == {"vkInvalidateMappedMemoryRanges": [span], "vkFlushMappedMemoryRanges": [span]}
    seen.clear()
    with t.map("read") as m:
        assert m[300] == 4
    assert list(seen) == ["vkInvalidateMappedMemoryRanges"]
    with pytest.raises(ExchangeError):
        interop.to(t, "numpy")          # V-HOST-VIEW: only by a lease


def test_leases_are_of_whole_atoms(gpu: Context) -> None:
    """V-ATOM."""
    pretend(gpu, VISIBLE | CACHED, 256)
    t = interop.empty((1024,), "uint8", device=gpu)
    with t[:10].map("read_write"):
        with pytest.raises(LeaseError):
            t[100:110].map("read")
        with t[256:300].map("read"):
            pass


def test_write_combined_memory_is_never_read_through(gpu: Context, driver: CountingDriver) -> None:
    """V-WRITE-COMBINED: 0.03 GB/s (measured.md G)."""
    pretend(gpu, LOCAL | VISIBLE | COHERENT)
    t = interop.empty((64,), "uint8", device=gpu)
    for access in ("read", "read_write"):
        assert ADAPTER.map(t.allocation, access, 0, 64) is NotImplemented
    assert ADAPTER.host_view(t.allocation) is None and not driver.calls["vkMapMemory"]
    with t.map("write") as m:
        m[:] = 3
    assert driver.calls["vkMapMemory"] == 1
    pretend(gpu, LOCAL | VISIBLE | COHERENT | CACHED)


def test_memory_that_the_host_cannot_see_is_not_mapped(gpu: Context, driver: CountingDriver) -> None:
    """V-MAP (field report B84)."""
    pretend(gpu, LOCAL)
    t = interop.empty((64,), "uint8", device=gpu)
    for access in ("read", "write", "read_write"):
        assert ADAPTER.map(t.allocation, access, 0, 64) is NotImplemented
    assert not t.allocation.traits and not driver.calls["vkMapMemory"]
    with pytest.raises(ExchangeError):
        interop.to(t, "numpy")


def test_a_map_that_fails_leaves_nothing_mapped(gpu: Context, driver: CountingDriver) -> None:
    """V-MAP."""
    t = interop.empty((64,), "uint8", device=gpu)
    driver.fail_next("vkMapMemory", vk.VK_ERROR_MEMORY_MAP_FAILED)
    with pytest.raises(ExchangeError, match="vkMapMemory: VK_ERROR_MEMORY_MAP_FAILED"):
        interop.to(t, "numpy")
    m = memory.of(t.allocation, "test").memory
    assert m.pins == 0 and not m.address
    assert interop.to(t, "numpy").size == 64 and m.pins == 1


def test_a_map_of_a_handle_that_nobody_knows_is_none() -> None:
    """V-MAP."""
    foreign = interop.wrap(12345, 64, device="vulkan:0", owner=None)
    assert ADAPTER.map(foreign, "read", 0, 64) is NotImplemented and ADAPTER.host_view(foreign) is None
    assert ADAPTER.native_fields(foreign) == {}


# ---- views of the host ----
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_frameworks_of_the_host_see_coherent_memory(gpu: Context, target: str) -> None:
    """V-HOST-VIEW: by address, and by writing on the device."""
    need(target)
    t = interop.empty((64, 4), "float32", device=gpu)
    fill(gpu, t, 0x3F800000).wait(5)
    x = interop.to(t, target)
    y = interop.to(t[8:], target)
    address = {"numpy": lambda a: a.ctypes.data, "torch": lambda a: a.data_ptr(), "jax": lambda a: a.unsafe_buffer_pointer()}[target]
    assert address(y) - address(x) == 128 and np.asarray(x).tolist() == [[1.0] * 4] * 64
    fill(gpu, t, 0x40000000).wait(5)
    assert np.asarray(interop.to(t, "numpy"))[63, 3] == 2.0 and ctypes.c_float.from_address(address(x)).value == 2.0
    if target != "jax":
        x[0, 0] = 5
        out = interop.empty((64, 4), "float32", device=gpu)
        whole = (vk.VkBufferCopy * 1)(vk.VkBufferCopy(size=1024))
        gpu.queue.run(lambda b: gpu.vk.vkCmdCopyBuffer(b, t.handle, out.handle, 1, whole)).wait(5)
        assert interop.to(out, "numpy")[0, 0] == 5


def test_a_view_outlives_its_tensor_and_keeps_the_memory(gpu: Context, driver: CountingDriver) -> None:
    """V-HOST-VIEW."""
    t = interop.empty((64,), "uint8", device=gpu)
    x = interop.to(t, "numpy")
    x[:] = 6
    with pytest.raises(ExchangeError, match="still use it"):
        t.allocation.close()
    del t
    gc.collect()
    assert x.sum() == 6 * 64 and driver.live["Memory"] == 1
    del x
    gc.collect()
    assert not driver.live["Memory"]


def test_a_view_waits_for_the_last_write(gpu: Context) -> None:
    """V-HOST-VIEW."""
    t = interop.empty((1 << 22,), "uint32", device=gpu)
    with interop.acquire(t, gpu, "write"):
        for word in range(5):
            done = fill(gpu, t, word)
    assert (interop.to(t, "numpy") == 4).all() and done.done()


def test_a_read_only_tensor_gives_a_read_only_view(gpu: Context) -> None:
    """V-HOST-VIEW."""
    t = interop.as_tensor(interop.empty((64,), "uint8", device=gpu), readonly=True)
    assert not interop.to(t, "numpy").flags.writeable


def test_what_the_device_wrote_is_made_visible_once(gpu: Context, driver: CountingDriver) -> None:
    """V-BARRIER."""
    t = interop.empty((64,), "uint8", device=gpu)
    interop.to(t, "numpy")
    assert not driver.calls["vkQueueSubmit"]           # nothing was submitted yet
    fill(gpu, t, 1)
    interop.to(t, "numpy")
    assert driver.calls["vkQueueSubmit"] == 2 and driver.calls["vkCmdPipelineBarrier"] == 1
    with t.map("read"):
        pass
    interop.to(t[:8], "numpy")
    assert driver.calls["vkQueueSubmit"] == 2
    fill(gpu, t, 1).wait(5)
    with t.map("read") as m:
        assert m[0] == 1
    assert driver.calls["vkQueueSubmit"] == 4


def test_without_timelines_the_barrier_is_always_submitted(vk_open: Open) -> None:
    """V-BARRIER."""
    driver = CountingDriver()
    c = vk_open(driver=driver, features=(), adapter=None)
    t = interop.empty((64,), "uint8", device=c)
    interop.to(t, "numpy")
    interop.to(t, "numpy")
    assert driver.calls["vkQueueSubmit"] == 2


def test_no_barrier_is_submitted_for_who_submits_their_own(gpu: Context, driver: CountingDriver, raw: Any) -> None:
    """V-BARRIER."""
    r = raw(1024, (0, 1024))
    t = r.wrap(host_ready=True).tensor(1024, "uint8")
    fill(gpu, t, 1).wait(5)
    interop.to(t, "numpy")
    with t.map("read"):
        pass
    assert driver.calls["vkQueueSubmit"] == 1


def test_of_an_applications_submits_nobody_knows(vk_open: Open) -> None:
    """V-BARRIER."""
    c = vk_open(adapter=None)
    driver = CountingDriver()
    mine = Context.wrap(instance=c.instance_handle, physical_device=c.physical_device, device=c.device_handle, driver=driver,
                        queue=c.queue.handle, queue_family=c.queue.family, extensions=c.extensions, features=c.features)
    t = interop.empty((64,), "uint8", device=mine)
    interop.to(t, "numpy")
    interop.to(t, "numpy")
    assert driver.calls["vkQueueSubmit"] == 2
    del t
    gc.collect()
    mine.close()


# ---- order, and the side channel ----
def test_streams_are_queues_that_the_context_knows(gpu: Context) -> None:
    """V-QUEUE."""
    gate = gpu.timeline()
    assert ADAPTER.wait(gpu, gpu.queue.handle, gate.at(1)) is True
    end = ADAPTER.record(gpu, None)
    assert not end.done()
    gate.signal(1)
    end.wait(5)
    for call in (lambda: ADAPTER.record(gpu, 12345), lambda: ADAPTER.wait(gpu, 12345, gate.at(9))):
        with pytest.raises(ExchangeError, match="stream 12345 is no VkQueue that this Context knows"):
            call()


def test_a_lease_on_its_own_context_is_the_handle_with_order(gpu: Context) -> None:
    """V-QUEUE: user-code job 4."""
    rendered = gpu.timeline()
    f = interop.empty((64,), "uint32", device=gpu)
    mine = interop.acquire(f, gpu, "write")
    assert mine.value.handle == f.handle and mine.after.done()
    gpu.queue.submit([gpu.queue.record(lambda b: gpu.vk.vkCmdFillBuffer(b, f.handle, 0, 256, 3))], signals=[(rendered.handle, 1)])
    mine.release(rendered.at(1))
    with interop.acquire(f, "numpy", "read") as x:
        assert (x == 3).all()
    again = interop.acquire(f, gpu, "write")
    assert again.after.done()
    again.release()


def test_the_side_channel_says_the_memory_object(gpu: Context) -> None:
    """V-SAY."""
    t = interop.empty((64,), "uint32", device=gpu)
    said, m = interop.native.describe(t), memory.of(t.allocation, "test").memory
    assert (said["handle"], said["memory"], said["memory_nbytes"], said["memory_offset"]) == (t.handle, m.handle, m.nbytes, 0)
    assert (said["memory_type"], said["context"], said["queue"]) == (m.kind.index, gpu.device_handle, gpu.queue.handle)
    assert (said["device_uuid"], said["driver_uuid"]) == (gpu.device_uuid, gpu.driver_uuid)
    assert said["physical_device"] == gpu.physical_device and said["instance"] == gpu.instance_handle
    assert said["flags"] >= {"host_visible", "coherent", "cached"} and "handle_is_pointer" not in said["flags"]


def test_a_handle_that_went_through_another_library_is_known(gpu: Context) -> None:
    """V-NATIVE: tvm_ffi passes any device on."""
    need("tvm_ffi")
    t = interop.empty((64,), "uint32", device=gpu)
    import tvm_ffi
    back = interop.as_tensor(tvm_ffi.from_dlpack(t))
    assert back.handle == t.handle and ivk.native(back) == ivk.native(t)
    assert interop.to(back, "numpy").ctypes.data == interop.to(t, "numpy").ctypes.data


def test_a_forked_child_gets_an_error(gpu: Context) -> None:
    """V-CONTEXT."""
    t = interop.empty((64,), "uint32", device=gpu)
    pid = os.fork()
    if not pid:
        try:
            ivk.native(t)
        except ExchangeError as e:
            os._exit(0 if "before fork" in str(e) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
