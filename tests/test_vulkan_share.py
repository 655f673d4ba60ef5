"""Vulkan's memory between Contexts and processes, and host pages as Vulkan's. Real: lavapipe (or a GPU) under the validation layers."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import gc
import mmap
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import ROOT, need
from test_vulkan_memory import driver, fill, gpu, kept
from vulkan_kit import CountingDriver, Messages, leaves_no_fds, vk_messages, vk_open

import interop
from interop import ExchangeError, LeaseError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan import memory, pages, sharing
from interop.adapters.vulkan.adapter import ADAPTER
from interop.adapters.vulkan.context import Context
from interop.memory import ExternalHandle, import_handle

Open = Callable[..., Context]
INVALID_HANDLE = vk.VK_ERROR_INVALID_EXTERNAL_HANDLE


@pytest.fixture
def other(vk_open: Open) -> Context:
    """Another Context of the same device."""
    return vk_open(adapter=None)


def shared(c: Context, n: int = 1000) -> interop.Tensor:
    return interop.empty((n,), "uint32", device=c, shared_with=["process"])


def paged(nbytes: int, off: int = 0) -> np.ndarray[Any, Any]:
    """Bytes of pages of their own, which go when the array does."""
    m = mmap.mmap(-1, -(-(nbytes + off) // mmap.PAGESIZE) * mmap.PAGESIZE)
    return np.frombuffer(m, np.uint8)[off:off + nbytes]


# ---- export ----
def test_a_descriptor_says_everything_of_the_memory_object(gpu: Context) -> None:
    """V-EXPORT."""
    t = shared(gpu)
    m = memory.of(t.allocation, "test").memory
    assert t.allocation.exports == {"opaque_fd"}
    with leaves_no_fds(), t[10:].allocation.export("opaque_fd") as h:
        assert (h.nbytes, h.offset, h.dedicated, h.memory_type) == (m.nbytes, 0, m.dedicated, m.kind.index)
        assert (h.device_uuid, h.driver_uuid) == (gpu.device_uuid, gpu.driver_uuid) and not os.get_inheritable(h.fileno())


def test_memory_that_was_not_made_for_it_is_not_exported(gpu: Context) -> None:
    """V-EXPORT."""
    t = interop.empty((10,), "uint8", device=gpu)
    with pytest.raises(ExchangeError, match="exports no 'opaque_fd'"):
        t.allocation.export("opaque_fd")
    with pytest.raises(ExchangeError, match="was not made to be exported"):
        sharing.export(t.allocation, "opaque_fd")


def test_a_driver_that_gives_no_descriptor_is_found_out(gpu: Context, driver: CountingDriver) -> None:
    """V-EXPORT: lavapipe says success and gives -1 (measured.md A3)."""
    t = shared(gpu)
    driver.fail_next("vkGetMemoryFdKHR", vk.VK_SUCCESS)
    with leaves_no_fds(), pytest.raises(ExchangeError, match="succeeded and gave descriptor -1"):
        t.allocation.export("opaque_fd")
    driver.fail_next("vkGetMemoryFdKHR", vk.VK_ERROR_TOO_MANY_OBJECTS)
    with pytest.raises(ExchangeError, match="vkGetMemoryFdKHR: VK_ERROR_TOO_MANY_OBJECTS"):
        t.allocation.export("opaque_fd")


def test_a_device_without_the_extension_says_so(vk_open: Open, gpu: Context) -> None:
    """V-EXPORT, V-IMPORT."""
    bare = vk_open(adapter=None, extensions=())
    with pytest.raises(ExchangeError, match="VK_KHR_external_memory_fd, which was not enabled"):
        interop.empty((10,), "uint8", device=bare, shared_with=["process"])
    assert not ADAPTER.limits(bare).imports and not ADAPTER.limits(bare).exports
    with shared(gpu).allocation.export("opaque_fd") as h, pytest.raises(ExchangeError, match="VK_KHR_external_memory_fd was not enabled"):
        import_handle(h, bare)


# ---- import ----
def test_two_contexts_share_memory_by_descriptor(gpu: Context, other: Context) -> None:
    """V-IMPORT: written in one, read in the other, both ways."""
    t = shared(gpu)
    with leaves_no_fds(), t.allocation.export("opaque_fd") as h:
        there = import_handle(h, other)
        os.fstat(h.fileno())            # the holder's is untouched
        x = there.tensor(t.shape, t.dtype)
        assert x.handle != t.handle and there.context is other and there.nbytes == t.allocation.nbytes
        fill(gpu, t, 11).wait(5)
        assert (interop.to(x, "numpy") == 11).all()
        fill(other, x, 12).wait(5)
        assert (interop.to(t, "numpy") == 12).all()
        del x, there
        gc.collect()                    # lavapipe holds its descriptor as long as the import lives


def test_an_import_shares_leases_and_points(gpu: Context, other: Context) -> None:
    """V-IMPORT."""
    t = shared(gpu)
    with t.allocation.export("opaque_fd") as h:
        x = import_handle(h, other).tensor(t.shape, t.dtype)
    with t[:10].map("read_write"):
        with pytest.raises(LeaseError):
            x[5:6].map("read")
        with x[10:].map("read_write"):
            pass
    with pytest.raises(ExchangeError, match="still use it"):
        t.allocation.close()
    gate = gpu.timeline()
    interop.acquire(t, gpu, "write").release(gate.at(1))
    assert not interop.acquire(x, other, "read").after.done()
    gate.signal(1)


def test_an_import_outlives_what_was_exported(gpu: Context, other: Context) -> None:
    """V-IMPORT."""
    t = shared(gpu)
    interop.to(t, "numpy")[:] = 5
    with t.allocation.export("opaque_fd") as h:
        h.owner = None                  # as from another process
        x = import_handle(h, other).tensor(t.shape, t.dtype)
    del t, h
    gc.collect()
    assert (interop.to(x, "numpy") == 5).all()


def changed(h: ExternalHandle, **fields: Any) -> ExternalHandle:
    out = h.copy()
    for name, value in fields.items():
        setattr(out, name, value)
    return out


@pytest.mark.parametrize(("fields", "match"), [
    ({"device_uuid": None}, "memory of device unknown, and vulkan:0"),
    ({"device_uuid": b"\1" * 16}, "memory of device 0101.* same device only"),
    ({"driver_uuid": None}, "of driver unknown"),
    ({"driver_uuid": b"\2" * 16}, "of driver 0202.* same build"),
    ({"nbytes": 8192}, "the handle says 8192 bytes, and the memory object has 4096"),
    ({"nbytes": 2048}, "the handle says 2048 bytes, and the memory object has 4096"),
    ({"dedicated": True}, "the handle says 4096 bytes, dedicated, and the memory object has 4096"),
    ({"memory_type": 77}, "memory type 77"),
    ({"offset": 100, "owner": None}, "begins 100 bytes into its memory object, not at a multiple of"),
    ({"offset": 256, "owner": None, "dedicated": True}, "dedicated memory has one buffer")])
def test_a_handle_that_is_of_something_else_is_refused(gpu: Context, other: Context, driver: CountingDriver, fields: dict[str, Any],
                                                       match: str) -> None:
    """V-IMPORT (field reports B75, B77)."""
    t = shared(gpu, 1024)
    with leaves_no_fds(), t.allocation.export("opaque_fd") as h, changed(h, **fields) as bad:
        with pytest.raises(ExchangeError, match=match):
            import_handle(bad, other)
        os.fstat(bad.fileno())
        assert not other.store.buffers and not other.store.memories


@pytest.mark.parametrize("call", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory"])
def test_an_import_that_fails_leaves_nothing(gpu: Context, vk_open: Open, call: str) -> None:
    """V-IMPORT, V-UNDO (field report B72)."""
    driver = CountingDriver()
    other = vk_open(adapter=None, driver=driver)
    with shared(gpu).allocation.export("opaque_fd") as h, leaves_no_fds():
        for code in (INVALID_HANDLE, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY):
            driver.fail_next(call, code)
            with pytest.raises(ExchangeError, match="VK_ERROR"):
                import_handle(h, other)
            assert kept(driver) == (0, 0)
        a = import_handle(h, other)
        assert kept(driver) == (1, 1)
        del a
        gc.collect()


def test_a_descriptor_that_is_not_vulkans_is_tried_and_the_driver_refuses(gpu: Context, vk_messages: Messages) -> None:
    """V-IMPORT (field report B76)."""
    fd = os.memfd_create("not vulkan's")
    os.ftruncate(fd, 8192)
    with leaves_no_fds(), ExternalHandle.duplicate("opaque_fd", fd, 4096, device_uuid=gpu.device_uuid) as h:
        if gpu.physical.kind != "cpu":
            pytest.skip("asked of lavapipe, which looks")
        with pytest.raises(ExchangeError, match="VK_ERROR_INVALID_EXTERNAL_HANDLE; it is not said to be Vulkan's"):
            import_handle(h, gpu)
    os.close(fd)
    assert all("VK_ERROR_INVALID_EXTERNAL_HANDLE" in m and "lavapipe" in m for m in vk_messages.take())     # the driver's own words


def test_memory_crosses_to_a_spawned_process(gpu: Context) -> None:
    """V-EXPORT, V-IMPORT: another process' device writes, ours sees it."""
    t = shared(gpu)
    fill(gpu, t, 41).wait(5)
    here, there = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(there.fileno())], pass_fds=[there.fileno()],
                             env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    there.close()
    with here, t.allocation.export("opaque_fd") as h:
        data, fds = h.pack()
        socket.send_fds(here, [data], fds)
        here.settimeout(60)
        assert here.recv(10) == b"41"
    assert child.wait(60) == 0
    assert (interop.to(t, "numpy") == 42).all()


CHILD = """
import socket, sys, interop
from interop.adapters import vulkan
from interop.memory import ExternalHandle, import_handle
sock = socket.socket(fileno=int(sys.argv[1]))
data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
c = vulkan.Context.open()
with ExternalHandle.unpack(data, fds) as h:
    t = import_handle(h, c).tensor((1000,), "uint32")
sock.send(str(interop.to(t, "numpy")[999]).encode())
c.queue.run(lambda b: c.vk.vkCmdFillBuffer(b, t.handle, 0, t.nbytes, 42)).wait(10)
"""


def test_1000_shares_leave_nothing(gpu: Context, other: Context, driver: CountingDriver) -> None:
    """V-LEAK."""
    before = kept(driver)
    with leaves_no_fds():
        for _ in range(1000):
            t = shared(gpu, 64)
            with t.allocation.export("opaque_fd") as h:
                a = import_handle(h, other)
            del t, h, a
    gc.collect()
    assert kept(driver) == before
    assert not any([*gpu.store.buffers, *gpu.store.memories, *other.store.buffers, *other.store.memories])


def test_dma_buf_is_refused_where_it_is_not(gpu: Context) -> None:
    """V-DMA-BUF."""
    if gpu.has("VK_EXT_external_memory_dma_buf"):
        pytest.skip("this device has dma-buf")
    need_of = ADAPTER.importable("dma_buf", place=gpu)
    assert not need_of.supported and "VK_EXT_external_memory_dma_buf is not on" in need_of.reason
    fd = os.memfd_create("x")
    with ExternalHandle("dma_buf", fd, 4096) as h:
        with pytest.raises(ExchangeError, match="VK_EXT_external_memory_dma_buf"):
            import_handle(h, gpu)
        with pytest.raises(ExchangeError, match="importing dma_buf takes VK_EXT_external_memory_dma_buf"):
            sharing.import_fd(gpu, h)
    with pytest.raises(ExchangeError, match="takes VK_EXT_external_memory_dma_buf"):
        memory.allocate(gpu, 64, kinds=["dma_buf"])


def test_a_kind_that_vulkan_has_not_is_refused(gpu: Context) -> None:
    """V-IMPORT."""
    assert not ADAPTER.importable("memfd", place=gpu).supported


# ---- host pages ----
def test_an_array_is_the_devices_memory(gpu: Context) -> None:
    """V-PAGES: NumPy writes, the device reads; the device writes, NumPy reads."""
    x = paged(8192).view(np.uint32)
    t = interop.to(x, gpu, copy=False)
    assert t.allocation.context is gpu and t.shape == x.shape and not t.readonly and t.allocation.nbytes == 8192
    fill(gpu, t[:1024], 21).wait(5)
    assert x[:1024].tolist() == [21] * 1024 and not x[1024:].any()
    x[:] = 22
    out = interop.empty(x.shape, "uint32", device=gpu)
    copy = (vk.VkBufferCopy * 1)(vk.VkBufferCopy(srcOffset=t.byte_offset, size=8192))
    gpu.queue.run(lambda b: gpu.vk.vkCmdCopyBuffer(b, t.handle, out.handle, 1, copy)).wait(5)
    assert (interop.to(out, "numpy") == 22).all()


@pytest.mark.parametrize("off", [0, 16, 48, 64, 2000, 2240, 4032, 4080])
def test_an_array_may_begin_anywhere(gpu: Context, off: int) -> None:
    """V-PAGES: the neighbours in its pages are not touched (measured.md A2)."""
    whole = paged(3 * 4096)
    x = whole[off:off + 5000]
    t = interop.to(x, gpu, copy=False)
    fill(gpu, t, 0x07070707).wait(5)
    assert (x == 7).all() and not whole[:off].any() and not whole[off + 5000:].any()
    y = interop.to(t[100:], "numpy")
    assert y.ctypes.data == x.ctypes.data + 100
    with t[8:].map("read_write") as m:
        assert m.ctypes.data == x.ctypes.data + 8
    n = ivk.native(t, descriptor=False)
    assert (n.offset, n.size) == (t.byte_offset, 5000) and t.byte_offset == off % 64
    assert n.memory_size == -(-(off + 5000) // 4096) * 4096


@pytest.mark.parametrize("off", [5, 16, 4095])
def test_where_a_buffer_begins_is_never_wrong(gpu: Context, off: int) -> None:
    """V-PAGES: the right bytes, or a refusal."""
    x = paged(4096 + 8192)[off:off + 100]
    t = interop.to(x, gpu, copy=False)
    assert interop.to(t, "numpy").ctypes.data == x.ctypes.data


def test_strides_and_parts_are_kept(gpu: Context) -> None:
    """V-PAGES."""
    x = paged(4096).view(np.uint32).reshape(32, 32)
    first = 1
    t = interop.to(x[::2, first:31], gpu, copy=False)
    assert t.strides == (64, 1) and interop.to(t, "numpy").ctypes.data == x[:, first:].ctypes.data
    x[2, first] = 77
    assert interop.to(t, "numpy")[1, 0] == 77


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_memory_of_other_frameworks_is_imported(gpu: Context, framework: str) -> None:
    """V-PAGES."""
    lib = need(framework)
    x = lib.arange(4096, dtype=lib.float32) if framework == "torch" else lib.numpy.arange(4096, dtype="float32")
    t = interop.as_tensor(x)
    there = interop.to(x, gpu, copy=False)
    assert there.readonly == (framework == "jax")
    assert interop.to(interop.as_tensor(there, readonly=True), "numpy").ctypes.data == t.ptr


def test_an_array_lives_as_long_as_its_import(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES (field report B79): freeing it would crash the device's threads."""
    x = paged(8192)
    alive = weakref.ref(x.base)
    t = interop.to(x, gpu, copy=False)
    del x
    gc.collect()
    assert alive() is not None
    fill(gpu, t, 1).wait(5)
    del t
    gc.collect()
    assert alive() is None and kept(driver) == (0, 0) and not gpu.store.pages


def test_an_import_shares_the_leases_of_the_array(gpu: Context) -> None:
    """V-PAGES."""
    h = interop.as_tensor(paged(8192))
    t = interop.to(h, gpu, copy=False)
    with h[:100].map("read_write"), pytest.raises(LeaseError):
        interop.acquire(t[50:60], gpu, "read")
    gate = gpu.timeline()
    interop.acquire(t[4096:], gpu, "write").release(gate.at(1))
    assert interop.acquire(h[:4096], "numpy", "read").after.done()
    assert not interop.acquire(h[5000:5001], "numpy", "read").after.done()
    gate.signal(1)


def test_pages_that_are_imported_are_not_imported_again(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES-COUNT."""
    x = paged(4 * 4096)
    a, b = interop.to(x, gpu, copy=False), interop.to(x[4096:8192], gpu, copy=False)
    assert kept(driver) == (2, 1) and ivk.native(a).memory == ivk.native(b).memory and len(gpu.store.pages) == 1
    del a
    gc.collect()
    fill(gpu, b, 0x01010101).wait(5)
    assert x[4096:8192].all() and not x[:4096].any() and kept(driver) == (1, 1)
    del b
    gc.collect()
    assert kept(driver) == (0, 0) and not gpu.store.pages


def test_pages_that_nobody_keeps_any_more_are_imported_anew(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES-COUNT: others may have been mapped there since; on a GPU the import still has the old ones."""
    x = paged(4 * 4096)
    whole = interop.to(x, gpu, copy=False)
    part = interop.to(x[4096:8192], gpu, copy=False)
    del whole
    gc.collect()
    again = interop.to(x[8192:], gpu, copy=False)
    assert kept(driver) == (2, 2) and len(gpu.store.pages) == 2
    same = interop.to(x[4096:8192], gpu, copy=False)
    assert ivk.native(same).memory == ivk.native(part).memory != ivk.native(again).memory


def test_pages_that_overlap_are_imported_beside_each_other(gpu: Context) -> None:
    """V-PAGES-COUNT."""
    x = paged(4 * 4096)
    a, b = interop.to(x[:8192], gpu, copy=False), interop.to(x[4096:], gpu, copy=False)
    fill(gpu, a, 0x01010101).wait(5)
    fill(gpu, b, 0x02020202).wait(5)
    assert (x[:4096] == 1).all() and (x[4096:] == 2).all()


def test_a_driver_that_imports_no_pages_twice_is_said(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES-COUNT."""
    x = paged(4 * 4096)
    a = interop.to(x[:8192], gpu, copy=False)
    driver.fail_next("vkAllocateMemory", INVALID_HANDLE)
    with pytest.raises(ExchangeError, match=r"overlap with .* does not import pages twice"):
        interop.to(x[4096:], gpu, copy=False)
    assert kept(driver) == (1, 1) and len(gpu.store.pages) == 1 and a.size


def test_a_read_only_array_is_never_for_writing(gpu: Context) -> None:
    """V-PAGES-READONLY, V-READONLY."""
    x = paged(4096)
    x.flags.writeable = False
    t = interop.to(x, gpu, copy=False)
    assert t.readonly and t.allocation.readonly and not ivk.native(t).usage & vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    with pytest.raises(ExchangeError, match="not for writing"):
        ivk.native(t, write=True)
    with pytest.raises(ExchangeError, match="read-only"):
        interop.acquire(t, gpu, "write")
    assert not interop.to(t, "numpy").flags.writeable


def test_empty_arrays_import_nothing(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES."""
    t = interop.to(np.zeros((0, 3), "float32"), gpu, copy=False)
    assert t.shape == (0, 3) and kept(driver) == (0, 0)


def test_a_device_without_host_import_says_so(vk_open: Open) -> None:
    """V-PAGES-REFUSED."""
    bare = vk_open(adapter=None, extensions=())
    with pytest.raises(ExchangeError, match="VK_EXT_external_memory_host was not enabled"):
        interop.to(paged(4096), bare, copy=False)


@pytest.mark.parametrize(("call", "code"), [("vkCreateBuffer", vk.VK_ERROR_OUT_OF_HOST_MEMORY), ("vkAllocateMemory", INVALID_HANDLE),
                                            ("vkGetMemoryHostPointerPropertiesEXT", INVALID_HANDLE),
                                            ("vkBindBufferMemory", vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)])
def test_pages_that_the_driver_refuses_leave_nothing(gpu: Context, driver: CountingDriver, call: str, code: int) -> None:
    """V-PAGES-REFUSED, V-UNDO."""
    x = paged(4096)
    interop.to(x, gpu, copy=False)
    gc.collect()
    driver.fail_next(call, code)
    with pytest.raises(ExchangeError, match=vk.RESULTS[code]):
        interop.to(x, gpu, copy=False)
    assert kept(driver) == (0, 0) and not gpu.store.pages and not gpu.store.memories


def test_no_coherent_type_is_refused(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES-REFUSED."""
    gpu.memory_types = tuple(memory.MemoryType(m.index, 2 | 8, m.heap, m.heap_size) for m in gpu.memory_types)
    with pytest.raises(ExchangeError, match="no memory type with the flags 0xe or 0x6"):
        interop.to(paged(4096), gpu, copy=False)
    assert kept(driver) == (0, 0) and not gpu.store.pages


@pytest.mark.parametrize(("address", "nbytes", "alignment", "expected"), [
    (4096, 4096, 4096, (4096, 8192)), (5000, 10, 4096, (4096, 8192)), (8191, 2, 4096, (4096, 12288)),
    (65536, 65536, 65536, (65536, 131072)), (100, 10, 64, (64, 128)), (8192 + 64, 64, 64, (8256, 8320))])
def test_the_pages_around_memory(address: int, nbytes: int, alignment: int, expected: tuple[int, int]) -> None:
    """V-PAGES (field report B79)."""
    assert pages.around(address, nbytes, alignment) == expected


@pytest.mark.parametrize(("address", "nbytes"), [(65536 + 4096, 4096), (65536, 4096), (65536, 65537)])
def test_larger_pages_than_the_hosts_have_to_be_full(address: int, nbytes: int) -> None:
    """V-PAGES-REFUSED: what else is in them nobody knows."""
    with pytest.raises(ExchangeError, match=r"pages of 65536 bytes \(minImportedHostPointerAlignment\)"):
        pages.around(address, nbytes, 65536)


def test_memory_of_interops_is_imported_at_once_and_counted(gpu: Context, driver: CountingDriver) -> None:
    """V-PAGES-COUNT: empty(device="cpu", shared_with=[context])."""
    h = interop.empty((5000,), "uint8", shared_with=[gpu])
    assert len(gpu.store.pages) == 1
    t = interop.to(h, gpu, copy=False)
    assert kept(driver) == (2, 1)
    fill(gpu, t, 0x05050505).wait(5)
    assert (interop.to(h, "numpy") == 5).all()
    del t, h
    gc.collect()
    assert kept(driver) == (0, 0)


def test_two_contexts_import_the_same_pages(gpu: Context, other: Context) -> None:
    """V-PAGES."""
    x = paged(4096)
    a, b = interop.to(x, gpu, copy=False), interop.to(x, other, copy=False)
    assert a.allocation.context is gpu and b.allocation.context is other
    fill(gpu, a, 0x03030303).wait(5)
    assert (interop.to(b, "numpy") == 3).all()


def test_1000_imports_of_pages_leave_nothing(gpu: Context, driver: CountingDriver) -> None:
    """V-LEAK."""
    x = paged(8192)
    with leaves_no_fds():
        for i in range(1000):
            t = interop.to(x, gpu, copy=False)
            y = interop.to(x[: 64 * (1 + i % 32)], gpu, copy=False)
            del t, y
    assert kept(driver) == (0, 0) and not gpu.store.pages and not gpu.store.buffers and not gpu.store.memories


# ---- streams of a capsule ----
@pytest.mark.parametrize("pending", [False, True])
def test_a_capsule_is_ordered_before_the_queue_of_its_consumer(gpu: Context, pending: bool) -> None:
    """V-QUEUE: one batch that waits, and no wait of the host's."""
    t = interop.empty(64, "uint8", device=gpu)
    gate = gpu.timeline()
    if pending:
        with interop.acquire(t, gpu, "write") as _:
            pass
        interop.acquire(t, gpu, "write").release(gate.at(1))
    t.__dlpack__(stream=gpu.queue.handle, max_version=(1, 3))
    after = gpu.queue.mark()
    if pending:
        assert not after.done()
        gate.signal(1)
    after.wait(10)


def test_a_capsule_for_a_queue_of_nobody_is_refused(gpu: Context) -> None:
    """V-QUEUE"""
    t = interop.empty(64, "uint8", device=gpu)
    for stream in (1, 2, 12345):
        with pytest.raises(ExchangeError, match="no VkQueue"):
            t.__dlpack__(stream=stream)
    t.__dlpack__(stream=-1)
    t.__dlpack__()


@pytest.mark.parametrize("party", ["numpy", "cpu", "torch", "jax"])
def test_memory_that_the_host_is_to_see_is_such(gpu: Context, party: str) -> None:
    """V-TYPE"""
    if party not in ("numpy", "cpu"):
        need(party)
    t = interop.empty(100, "float32", device=gpu, shared_with=[party])
    assert t.allocation.traits >= {"host_visible", "coherent"}
    interop.copyto(t, np.arange(100, dtype="float32")).wait(5)
    assert interop.to(t, "numpy")[99] == 99


# ---- what hostile callers found ----
def test_a_known_handle_is_not_larger_than_it_is(gpu: Context) -> None:
    """SPEC M-WRAP-*: what is misdeclared would be read and written beyond its end."""
    x = interop.empty(64, "float32", device=gpu)
    with pytest.raises(ValueError, match="256 bytes"):
        interop.wrap(ivk.native(x).handle, 10**6, device=gpu, owner=None)
    assert interop.wrap(ivk.native(x).handle, 256, device=gpu, owner=x).nbytes == 256


def test_a_refused_copy_spoils_nothing(gpu: Context) -> None:
    """V-COPY"""
    x = interop.empty(4, "float32", device=gpu)
    interop.copyto(x, np.ones(4, "f4")).wait(5)
    with pytest.raises(ExchangeError):
        interop.copyto(x, np.zeros(4, "f4"), stream=5)
    assert (interop.to(x, "numpy") == 1).all()


def test_a_pipe_is_no_memory(gpu: Context) -> None:
    """V-IMPORT: a driver would read it for ever."""
    read, write = os.pipe()
    try:
        handle = ExternalHandle.duplicate("opaque_fd", read, 4096, device_uuid=gpu.device_uuid, driver_uuid=gpu.driver_uuid, memory_type=0)
        with handle, pytest.raises(ExchangeError, match="pipe"):
            import_handle(handle, gpu)
    finally:
        os.close(read)
        os.close(write)


def test_empty_arrays_come_and_go(gpu: Context) -> None:
    """V-ALLOC"""
    v = interop.to(np.ones((0, 3), "f4"), gpu)
    assert v.shape == (0, 3) and v.device == gpu.device
    assert interop.to(v, "numpy").shape == (0, 3) and interop.to(v, "numpy", device="cpu").shape == (0, 3)
