"""Every VkResult that a function may fail with, at every call of a scenario, and device loss: clear errors, nothing leaked. Fake driver."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import functools
import gc
import mmap
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_vulkan import FakeVulkan
from fake_vulkan_kit import back, fake_open, nothing_left, numbers, settle, there
from vulkan_kit import fds

import interop
from interop import DeviceLostError, ExchangeError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import Context, images, maps, memory, ring
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan.loader import OutOfMemory, VulkanError

Open = Callable[..., tuple[Context, FakeVulkan]]
OOM, LOST = {-1, -2, -12, -1000069000, -1000161000}, -4
#: OpEntryPoint GLCompute "main", OpFunctionEnd
SPIRV = struct.pack("<11I", 0x07230203, 0x10000, 0, 1, 0, 5 << 16 | 15, 5, 1, 0x6E69616D, 0, 1 << 16 | 56)


@functools.cache
def codes() -> dict[str, list[int]]:
    """Function -> the error codes that it may return (vk.xml)."""
    vulkan_object = pytest.importorskip("vulkan_object")
    registry = vulkan_object.get_vulkan_object()
    by_name = {name: number for number, name in vk.RESULTS.items()}
    out = {}
    for name in vk.FUNCTIONS:
        command = registry.commands.get(name)
        if command is not None:
            out[name] = [by_name[e] for e in command.errorCodes or () if by_name.get(e, 0) < 0]
    del registry, command, vulkan_object
    gc.collect()
    gc.freeze()         # each of the many collections below would look at all that is imported by now
    return out


def alloc(c: Context) -> Any:
    t = interop.empty((100,), "uint32", device=c, shared_with=["process"])
    with t.allocation.export("opaque_fd") as h:
        interop.memory.import_handle(h, c)


def copies(c: Context) -> Any:
    t, u = there(c, numbers(100)), interop.empty((100,), "uint32", device=c)
    interop.copyto(u, t)
    interop.copyto(u[1:], u[:-1])
    back(u)


def mapping(c: Context) -> Any:
    t = interop.empty((100,), "uint32", device=c)
    with t.map("write") as m:
        m[:] = 1
    with t.map("read_write") as m:
        m[:] += 1
    c.queue.mark().wait(5)
    with t.map("read") as m:
        assert m[0] == 2


def pages(c: Context) -> Any:
    block = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    t = interop.to(block, c, copy=False)
    with t.map("read"):
        pass


def image(c: Context) -> Any:
    made = images.image(c, (16, 8), vk.VK_FORMAT_R8G8B8A8_UNORM)
    a = numbers(8, 16, 4, dtype="uint8")
    interop.copyto(made, a)
    out = np.zeros_like(a)
    interop.copyto(out, made)


def shader(c: Context) -> Any:
    s = ivk.Shader(c, SPIRV, bindings=1)
    t = there(c, numbers(64))
    s(t)
    back(t)


def timelines(c: Context) -> Any:
    line = c.timeline(exportable=True)
    import os
    try:
        fd = line.export()
        try:
            c.import_timeline(fd).close()
        finally:
            os.close(fd)
        line.signal(1)
        line.at(1).wait(5)
    finally:
        line.close()


SCENARIOS = {"alloc": ("lavapipe", alloc), "alloc dedicated": ("dedicated", alloc), "copies": ("discrete", copies),
             "copies by fences": ("old", copies), "maps": ("incoherent", mapping), "maps by fences": ("old", mapping),
             "pages": ("coarse", pages), "image": ("discrete", image), "shader": ("discrete", shader), "timelines": ("lavapipe", timelines)}


@pytest.fixture
def run() -> Callable[[Any, Context, FakeVulkan], None]:
    def go(scenario: Any, c: Context, f: FakeVulkan) -> None:
        f.kernels["main"] = lambda groups, push, data: None
        scenario(c)
    return go


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_failing_result_is_a_clear_error_and_leaves_nothing(name: str, fake_open: Open, run: Any) -> None:
    """V-UNDO, V-LEAK, V-SHADER-KEEP: each call of each function, with each code that is no loss; the Context is usable afterwards."""
    config, scenario = SCENARIOS[name]
    c, f = fake_open(config)
    f.log = []
    run(scenario, c, f)
    called, f.log = f.log, None
    known = codes()
    tried = 0
    for function in dict.fromkeys(called):
        if function.startswith("vkGetSemaphoreCounterValue") or function.startswith("vkGetFenceStatus"):
            places = [0]
        else:
            places = sorted({0, 1, called.count(function) // 2, called.count(function) - 1})
        for code in known.get(function, ()):
            if code == LOST or (code not in OOM and code not in (-13, -1000072003, -5, -10)):
                continue
            for skip in places if code in (-1, -2) else [0]:
                f.failing.clear()
                settle()
                with nothing_left(c, f, f"{function} {code} {skip}"):
                    f.fail_next(function, code, skip=skip)
                    said = ""
                    try:
                        run(scenario, c, f)
                    except (ExchangeError, MemoryError) as e:
                        tried, said, kind = tried + 1, str(e), type(e)
                    if said:
                        assert function in said or vk.RESULTS[code] in said, (function, code, said)
                        # what the layer above wraps says the code in words
                        assert code not in OOM or issubclass(kind, MemoryError) or "failed" in said or "in place" in said, said
                    f.failing.clear()
                    c.wait_idle(5)
                assert not f.violations, (function, code, skip, f.violations[:3])
                assert c.lost is None
                run(scenario, c, f)
    assert tried


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_loss_at_any_call_is_said_and_ends_well(name: str, fake_open: Open, run: Any) -> None:
    """V-UNDO: DeviceLostError, no hang, and the Context can be closed with nothing left."""
    config, scenario = SCENARIOS[name]
    c, f = fake_open(config)
    f.log = []
    run(scenario, c, f)
    called, f.log = f.log, None
    known = codes()
    functions = [n for n in dict.fromkeys(called) if LOST in known.get(n, ())]
    for function in functions:
        for skip in sorted({0, called.count(function) // 2}):
            settle()
            before = fds()
            lost = FakeVulkan(config)
            d = Context.open(driver=lost)
            lost.fail_next(function, LOST, skip=skip)
            said = ""
            try:
                run(scenario, d, lost)
            except DeviceLostError:
                pass
            except ExchangeError as e:
                said = str(e)
            assert not said or "DeviceLostError" in said, (function, skip, said)       # of what was written last
            settle()
            if lost.lost:
                with pytest.raises(DeviceLostError):
                    d.queue.mark()
            d.close()
            settle()
            lost.check()
            assert not lost.live, (function, skip, lost.live)
            assert fds() <= before
            del d


@pytest.mark.parametrize("call", ["vkCreateInstance", "vkEnumeratePhysicalDevices", "vkEnumerateDeviceExtensionProperties",
                                  "vkCreateDevice"])
def test_opening_that_fails_leaves_nothing(call: str) -> None:
    """V-UNDO."""
    for code in codes()[call]:
        f = FakeVulkan()
        f.fail_next(call, code)
        with pytest.raises((ExchangeError, MemoryError, DeviceLostError)):
            Context.open(driver=f)
        assert not f.live, (code, f.live)
        f.check()
