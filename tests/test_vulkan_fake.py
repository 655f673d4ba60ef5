"""Vulkan's memory on a fake driver, which has what lavapipe has not. Proof: fake; one scenario asks lavapipe the same questions."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import dataclasses
import gc
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_vulkan import CACHED, COHERENT, CONFIGS, LOCAL, VISIBLE, Config, FakeVulkan
from fake_vulkan_kit import back, fake_open, nothing_left, numbers, settle, there
from vulkan_kit import need_vulkan, vk_messages, vk_open

import interop
from interop import DeviceLostError, ExchangeError, LeaseError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import Context, copies, maps, memory, ring, sharing
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan.queue import FencePoint

Open = Callable[..., tuple[Context, FakeVulkan]]
ALL = sorted(CONFIGS)


# ---- the fake itself ----
def scenario(c: Context) -> list[Any]:
    """What a driver is asked and what it answers, as far as two devices with the same memory answer alike."""
    out: list[Any] = []
    t = there(c, numbers(64, 4))
    u = interop.empty((64, 4), "uint32", device=c, shared_with=["process"])
    out.append(interop.copyto(u, t).done() in (True, False))
    out.append(back(u[::-1]).sum())
    with u.map("read_write") as m:
        m[0] = 9
    out.append(back(u)[0].tolist())
    out.append(sorted(u.allocation.traits))
    with u.allocation.export("opaque_fd") as h:
        out.append((h.kind, h.nbytes, h.offset, h.dedicated, h.memory_type))
        v = interop.memory.import_handle(h, c)
    out.append(v.tensor((64, 4), "uint32").map("read").value[0].tolist())
    pages = np.frombuffer(mmap.mmap(-1, 8192), np.uint32)
    w = interop.to(pages, c, copy=False)
    interop.copyto(w[:4], t[0])
    out.append(back(w[:5]).tolist())
    line = c.timeline(3)
    line.signal(7)
    out.append((line.value, line.at(7).done(), line.at(8).done()))
    for call in (lambda: ivk.native(t[:, 1:]), lambda: interop.to(t, c, copy=False).map("x")):
        try:
            call()
        except Exception as e:
            out.append((type(e).__name__, str(e).split(":")[0]))
    return out


@pytest.fixture
def answers(vk_open: Any) -> tuple[Config, list[Any]]:
    """What lavapipe is, and answers; before anybody counts descriptors."""
    real = vk_open(adapter=None)
    m = real.memory_types
    if len(m) != 1 or m[0].flags != 15:
        pytest.skip("not a device with one type of memory")
    return Config(atom=real.atom, storage_alignment=real.storage_alignment), scenario(real)


def test_the_fake_answers_as_a_driver_does(answers: tuple[Config, list[Any]], fake_open: Open) -> None:
    """V-ALLOC, V-EXPORT, V-IMPORT, V-PAGES, V-MAP: the same questions to the fake and to lavapipe."""
    assert scenario(fake_open(answers[0])[0]) == answers[1]


@pytest.mark.parametrize(("call", "rule"), [
    (lambda c, f: c.vk.vkDestroyBuffer(c.device_handle, 12345, None), "is no Buffer"),
    (lambda c, f: c.vk.vkUnmapMemory(c.device_handle, memory.allocate(c, 64).handle), "is no Memory"),
    (lambda c, f: memory.create_buffer(c, 0, 1), "size-00912"),
])
def test_the_fake_objects(fake_open: Open, call: Any, rule: str) -> None:
    """V-LEAK: what is forbidden is said."""
    c, f = fake_open()
    with pytest.raises(AssertionError, match=rule):
        try:
            made = call(c, f)
            if made:
                c.vk.vkDestroyBuffer(c.device_handle, made, None)
        finally:
            f.check()
    f.take()


def test_the_fake_sees_what_is_destroyed_in_use(fake_open: Open) -> None:
    """V-LEAK."""
    c, f = fake_open()
    b = memory.create_buffer(c, 256, memory.USAGE)
    below = memory.allocate_memory(c, 256, c.memory_types[0])
    memory.bind(c, b, below, 0)
    f.hold = True
    c.queue.run(lambda commands: c.vk.vkCmdFillBuffer(commands, b, 0, 256, 1))
    c.vk.vkDestroyBuffer(c.device_handle, b, None)
    assert "in-use" in f.take()[0]
    f.hold = False
    c.wait_idle(5)
    c.vk.vkFreeMemory(c.device_handle, below, None)


def test_the_fake_sees_a_missing_barrier(fake_open: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-COPY: two copies of the same bytes, one after the other, with the barriers and without."""
    c, f = fake_open()
    monkeypatch.setattr(ring, "FORCED", True)
    t, u, v = (there(c, numbers(64)) for _ in range(3))
    interop.copyto(u, t)
    interop.copyto(v, u)
    c.wait_idle(5)
    f.check()
    f.hold = True
    monkeypatch.setattr(copies, "submit", lambda queue, record, waits=(): queue.run(record, waits=waits))
    monkeypatch.setattr("interop.adapters.vulkan.queue.Queue.wait_for", lambda self, p: None)
    interop.copyto(u, t)
    interop.copyto(v, u)
    f.hold = False
    c.wait_idle(5)
    assert any("SYNC-HAZARD" in x for x in f.take())


# ---- every device ----
@pytest.mark.parametrize("config", ALL)
def test_copies_go_every_way(fake_open: Open, config: str) -> None:
    """V-COPY, V-COPY-HOST, V-COPY-RING, V-ATOM."""
    c, f = fake_open(config)
    a = numbers(100, 7)
    with nothing_left(c, f):
        t = there(c, a)
        u = interop.empty((100, 7), "uint32", device=c)
        interop.copyto(u, t)
        interop.copyto(t[::2], u[::-2])
        assert (back(u) == a).all() and (back(t)[::2] == a[::-2]).all() and (back(t)[1::2] == a[1::2]).all()
        interop.copyto(t[1:], t[:-1])
        assert (back(t)[2::2] == a[1:-2:2]).all()
        del t, u
    f.check()


@pytest.mark.parametrize("config", ALL)
def test_maps_see_and_are_seen(fake_open: Open, config: str) -> None:
    """V-MAP, V-ATOM, V-BARRIER (field report B83): what a map writes the device reads, and the other way round."""
    c, _f = fake_open(config)
    t, u = there(c, numbers(1000)), interop.empty((1000,), "uint32", device=c)
    with t[100:200].map("read_write") as m:
        assert m[0] == 101
        m[:] += 1000
    interop.copyto(u, t)
    with u.map("read") as m:
        assert m[99] == 100 and m[100] == 1101 and m[199] == 1200 and m[200] == 201
    with u[5:6].map("write") as m:
        m[:] = 7
    assert back(u)[4:7].tolist() == [5, 7, 7]


@pytest.mark.parametrize("missing", ["vkFlushMappedMemoryRanges", "vkInvalidateMappedMemoryRanges", "show"])
def test_the_fake_shows_what_is_forgotten(fake_open: Open, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """V-ATOM, V-BARRIER: without it the bytes are wrong."""
    c, _f = fake_open("incoherent" if missing != "show" else "lavapipe")
    monkeypatch.setattr(ring, "FORCED", missing == "show")
    t = there(c, numbers(256))
    if missing == "show":
        monkeypatch.setattr(maps, "show", lambda context: None)
        monkeypatch.setattr(copies, "after", lambda table, buffer: None)
        u = interop.empty((256,), "uint32", device=c)
        interop.copyto(u, t).wait(5)
        with u.map("read") as m:
            assert m[0] == 0
        return
    setattr(c.vk, missing, lambda *args: 0)
    with t.map("read_write") as m:
        m[:] = 9
    monkeypatch.setattr(ring, "FORCED", True)       # the device reads, and writes
    if missing == "vkFlushMappedMemoryRanges":
        assert back(t)[0] == 1
    else:
        interop.copyto(t, numbers(256)).wait(5)
        with t.map("read") as m:
            assert m[0] == 9
    delattr(c.vk, missing)


@pytest.mark.parametrize("config", ALL)
def test_host_views_are_of_coherent_memory(fake_open: Open, config: str) -> None:
    """V-HOST-VIEW."""
    c, _f = fake_open(config)
    if config in ("discrete", "incoherent"):
        t = there(c, numbers(4))
        with pytest.raises(ExchangeError):
            interop.to(t, "numpy")
        with t.map("read") as m:
            assert m.tolist() == [1, 2, 3, 4]
    if config != "incoherent":
        u = memory.allocate(c, 16, wanted=memory.FOR_HOST).tensor((4,), "uint32")
        interop.to(u, "numpy")[:] = 5
        assert back(u).tolist() == [5] * 4
        del u


@pytest.mark.parametrize("config", ALL)
def test_memory_crosses_as_a_descriptor(fake_open: Open, config: str) -> None:
    """V-EXPORT, V-IMPORT, V-ALLOC (field report B75): dedicated, in whole steps, of the same type."""
    c, f = fake_open(config)
    with nothing_left(c, f):
        t = interop.empty((10,), "uint32", device=c, shared_with=["process"])
        with t.allocation.export("opaque_fd") as h:
            assert h.dedicated == (CONFIGS[config].dedicated != "") and h.nbytes == t.allocation.nbytes
            a = interop.memory.import_handle(h, c)
        assert memory.of(a, "test").memory.nbytes == memory.of(t.allocation, "test").memory.nbytes
        del t, a, h


@pytest.mark.parametrize("config", ALL)
def test_whole_pages_are_imported(fake_open: Open, config: str) -> None:
    """V-PAGES, V-PAGES-COUNT, V-PAGES-REFUSED (field report B79)."""
    c, f = fake_open(config)
    page = CONFIGS[config].page
    own = interop.empty((page // 2,), "uint32", device="cpu", alignment=page)
    a = interop.to(own, "numpy")
    a[:] = 3
    t = interop.to(own, c, copy=False)
    u = there(c, numbers(8))
    interop.copyto(t[:8], u)
    with t.map("read"):
        pass
    assert a[:9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 3]
    again = interop.to(own[:16], c, copy=False)
    assert f.calls["vkGetMemoryHostPointerPropertiesEXT"] == 1
    del t, again, u
    settle()


def test_pages_that_overlap_are_refused_where_the_driver_does(fake_open: Open) -> None:
    """V-PAGES-COUNT."""
    c, f = fake_open(Config(overlap=False))
    block = np.frombuffer(mmap.mmap(-1, 4 * 4096), np.uint8)
    t = interop.to(block[:8192], c, copy=False)
    with pytest.raises(ExchangeError, match="overlap with"):
        interop.to(block[4096:], c, copy=False)
    assert f.live["Memory"] == f.live["Buffer"] == 1
    del t


def test_pages_larger_than_the_hosts_have_to_be_full(fake_open: Open) -> None:
    """V-PAGES-REFUSED."""
    c, f = fake_open("strict pages")
    block = np.frombuffer(mmap.mmap(-1, 3 * 65536), np.uint8)
    at = -block.ctypes.data % 65536
    with pytest.raises(ExchangeError, match="65536"):
        interop.to(block[at + 4096:at + 65536], c, copy=False)
    t = interop.to(block[at:at + 65536], c, copy=False)
    assert f.live["Memory"] == 1
    del t


@pytest.mark.parametrize("config", ALL)
def test_images_are_copied(fake_open: Open, config: str) -> None:
    """V-IMAGE, V-IMAGE-COPY, V-IMAGE-LAYOUT."""
    from interop.adapters.vulkan import images

    c, _f = fake_open(config)
    image = images.image(c, (16, 8), vk.VK_FORMAT_R8G8B8A8_UNORM)
    a = numbers(8, 16, 4, dtype="uint8")
    interop.copyto(image, a)
    out = np.zeros_like(a)
    interop.copyto(out, image)
    assert (out == a).all()
    t = interop.empty((8, 16, 4), "uint8", device=c)
    interop.copyto(t, image)
    assert (back(t) == a).all()
    del image, t


@pytest.mark.parametrize("config", ALL)
def test_a_shader_runs(fake_open: Open, config: str) -> None:
    """V-SHADER, V-SHADER-ORDER."""
    c, f = fake_open(config)

    def add(groups: Any, push: bytes, data: list[Any]) -> None:
        data[0].view(np.uint32)[:] += np.frombuffer(push, np.uint32)[0]

    f.kernels["main"] = add
    import struct

    entry = 5 << 16 | 15, 5, 1, 0x6E69616D, 0, 1 << 16 | 56         # OpEntryPoint GLCompute "main", OpFunctionEnd
    spirv = struct.pack("<11I", 0x07230203, 0x10000, 0, 1, 0, *entry)
    shader = ivk.Shader(c, spirv, bindings=1, push_constants=4)
    t = there(c, numbers(64))
    for _ in range(3):
        shader(t, groups=(1,), push=[5])
    assert back(t).tolist() == [*range(16, 80)]
    del shader, t


def test_a_device_without_timelines_has_fences(fake_open: Open) -> None:
    """V-QUEUE."""
    c, f = fake_open("old")
    t, u = there(c, numbers(64)), interop.empty((64,), "uint32", device=c)
    done = interop.copyto(u[::2], t[::2])
    p = c.queue.mark()
    assert isinstance(p, FencePoint) and f.calls["vkCreateSemaphore"] == 0
    p.wait(5)
    done.wait(5)


# ---- sizes ----
HUGE = 6 << 30


@pytest.mark.parametrize("config", ["lavapipe", "discrete", "incoherent"])
def test_offsets_near_four_gib_are_64_bits(fake_open: Open, config: str) -> None:
    """V-NATIVE, V-COPY, V-ATOM: a buffer of 6 GiB, most of which nobody touches."""
    c, _f = fake_open(config)
    t = interop.empty((HUGE,), "uint8", device=c)
    base = 1 << 32
    for at in (base - 256, base, base + 256):
        n = ivk.native(t[at:at + 16])
        assert (n.offset, n.size) == (at, 16) and n.address in (0, ivk.native(t, descriptor=False).address + at)
    for k, at in enumerate(range(base - 8, base + 9)):
        a = np.array([k + 1], np.uint8)
        interop.copyto(t[at:at + 1], a)
    assert back(t[base - 8:base + 9]).tolist() == [*range(1, 18)]
    with t[base - 2:base + 2].map("read_write") as m:
        assert m.tolist() == [7, 8, 9, 10]
        m[:] = 99
    small = interop.empty((17,), "uint8", device=c)
    interop.copyto(small, t[base - 8:base + 9])
    assert back(small).tolist() == [1, 2, 3, 4, 5, 6, 99, 99, 99, 99, 11, 12, 13, 14, 15, 16, 17]
    interop.copyto(t[base + 100:base + 117], small)
    assert back(t[base + 99:base + 103]).tolist() == [0, 1, 2, 3]
    del t, small


def test_what_no_memory_object_holds_is_refused(fake_open: Open) -> None:
    """V-SIZE."""
    c, f = fake_open(Config(max_allocation=1 << 32, heaps=(1 << 31,)))
    with pytest.raises(ExchangeError, match="maxMemoryAllocationSize"):
        interop.empty(((1 << 32) + 1,), "uint8", device=c)
    with pytest.raises(MemoryError, match="no heap"):
        interop.empty((1 << 31) + 1, "uint8", device=c)
    t = interop.empty((0, 5), "uint8", device=c)
    assert not f.calls["vkAllocateMemory"] and not f.live["Buffer"] and t.size == 0


# ---- endings ----
def test_a_forked_child_calls_nothing(fake_open: Open) -> None:
    """V-CONTEXT."""
    c, f = fake_open()
    t = there(c, numbers(16))
    line = c.timeline()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for call in (lambda: back(t), lambda: interop.empty((4,), "uint8", device=c), lambda: line.at(1).wait(1), c.queue.mark):
                try:
                    call()
                    os._exit(2)
                except (ExchangeError, TimeoutError):
                    pass
            del t, line
            c.close()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    f.check()


def test_closing_waits_for_what_is_in_flight_and_says_so(fake_open: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-LEAK."""
    c, f = fake_open()
    monkeypatch.setattr("interop.adapters.vulkan.context.CLOSE_TIMEOUT", 0.05)
    c.queue.mark()
    f.hold = True
    with pytest.raises(ExchangeError, match="not done within"):
        c.close()
    f.hold = False
    c.close()
    c.close()
    assert not f.live


def test_a_handle_of_another_context_is_refused(fake_open: Open) -> None:
    """V-IMPORT, V-CONTEXT."""
    c, _f = fake_open()
    d, g = fake_open(dataclasses.replace(CONFIGS["lavapipe"], device_uuid=b"\x01" * 16))
    t = interop.empty((64,), "uint8", device=c, shared_with=["process"])
    with t.allocation.export("opaque_fd") as h, pytest.raises(ExchangeError, match="one and the same device only"):
        interop.memory.import_handle(h, d)
    assert not g.live["Memory"]
    interop.copyto(interop.empty((64,), "uint8", device=d), t)


@pytest.mark.parametrize(("config", "call"), [("discrete", "vkGetSemaphoreCounterValue"), ("discrete", "vkWaitSemaphores"),
                                              ("old", "vkGetFenceStatus"), ("old", "vkWaitForFences")])
def test_a_driver_that_cannot_say_has_not_finished(fake_open: Open, monkeypatch: pytest.MonkeyPatch, config: str, call: str) -> None:
    """V-PENDING, V-LEAK: a question that fails for want of memory does not end the work, and what that uses stays."""
    c, f = fake_open(config)
    monkeypatch.setattr(ring, "FORCED", True)
    t = there(c, numbers(64))
    c.wait_idle(5)
    f.hold = True
    p = interop.copyto(t[1:], t[:-1])
    f.fail_next(call, vk.VK_ERROR_OUT_OF_HOST_MEMORY, times=3)
    del t
    settle()
    ring.sweep(c)
    assert not p.done() and p.error() is None
    with pytest.raises((MemoryError, TimeoutError)):
        p.wait(0.05)
    f.fail_next(call, vk.VK_ERROR_OUT_OF_HOST_MEMORY, times=20)
    if "Wait" in call:
        with pytest.raises(MemoryError):
            c.close()
    f.failing.clear()
    f.hold = False
    p.wait(5)
    assert not f.violations
