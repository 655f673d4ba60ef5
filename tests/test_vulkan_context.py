"""Contexts of Vulkan, their queues, Points and timelines. Real: lavapipe (or a GPU) under the validation layers, the package ``vulkan``."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import need, run
from vulkan_kit import (
    CountingDriver,
    Messages,
    TestAdapter,
    buffer_of,
    drop_buffer,
    leaves_no_fds,
    need_vulkan,
    open_checked,
    vk_context,
    vk_messages,
    vk_open,
)

import interop
from interop import DeviceLostError, ExchangeError
from interop.adapters.vulkan import Context, context, requirements
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan.context import devices
from interop.adapters.vulkan.loader import VulkanError
from interop.adapters.vulkan.queue import FencePoint, Queue
from interop.adapters.vulkan.timeline import TimelinePoint
from interop.contract import point

Open = Callable[..., Context]


class Semaphore:
    """A lock of somebody's, which knows no timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


def fill(context: Context, buffer: int, size: int, word: int) -> Callable[[int], None]:
    """Records a fill."""
    return lambda commands: context.vk.vkCmdFillBuffer(commands, buffer, 0, size, word)


def word(address: int) -> int:
    """The first 32 bits there."""
    return ctypes.c_uint32.from_address(address).value


@pytest.fixture
def counted(vk_open: Open) -> tuple[Context, CountingDriver]:
    """A Context whose calls and objects are counted."""
    driver = CountingDriver()
    return vk_open(driver=driver), driver


@pytest.fixture(params=["timelines", "fences"])
def either(request: pytest.FixtureRequest, vk_open: Open) -> Context:
    """A Context with timeline semaphores, and one where the feature is off."""
    return vk_open(features=None if request.param == "timelines" else ())


# ---- the kit itself ----
def test_the_layers_are_heard(vk_context: Context, vk_messages: Messages) -> None:
    made = vk.VkBuffer()
    vk_context.vk.vkCreateBuffer(vk_context.device_handle, vk.VkBufferCreateInfo(size=0, usage=32), None, ctypes.byref(made))
    vk_context.vk.vkDestroyBuffer(vk_context.device_handle, made.value, None)
    assert any("VkBufferCreateInfo-size-00912" in m for m in vk_messages.take())


def test_a_hazard_is_heard(vk_context: Context, vk_messages: Messages) -> None:
    buffer, memory, _ = buffer_of(vk_context, 256)
    try:
        def twice(commands: int) -> None:
            fill(vk_context, buffer, 256, 1)(commands)
            fill(vk_context, buffer, 256, 2)(commands)
        vk_context.queue.run(twice).wait(10)
    finally:
        drop_buffer(vk_context, buffer, memory)
    assert any("SYNC-HAZARD-WRITE-AFTER-WRITE" in m for m in vk_messages.take())


def test_what_leaks_is_heard(vk_messages: Messages) -> None:
    need_vulkan()
    c = open_checked(vk_messages)
    c.vk.vkCreateFence(c.device_handle, vk.VkFenceCreateInfo(), None, ctypes.byref(vk.VkFence()))
    c.close()
    assert any("VkFence" in m for m in vk_messages.take())


# ---- opening ----
def test_an_open_context_says_what_the_device_is(vk_context: Context) -> None:
    c = vk_context
    assert str(c.device) == "vulkan:0" and c.memory_types and c.atom >= 1 and c.storage_alignment >= 1
    assert len(c.device_uuid) == len(c.driver_uuid) == 16 and c.max_allocation >= 2**30
    assert c.owned and not c.closed and c.lost is None and c.queue.family in range(len(c.physical.families))


def test_only_extensions_that_are_there_are_turned_on(vk_context: Context) -> None:
    assert vk_context.extensions <= vk_context.physical.extensions
    assert vk_context.has("VK_KHR_external_memory_fd") and "opaque_fd" in vk_context.capabilities


def test_fewer_extensions_can_be_asked_for(vk_open: Open) -> None:
    c = vk_open(extensions=())
    assert not c.extensions and c.host_pointer_alignment == 0 and c.has_timelines
    with pytest.raises(ExchangeError, match=r"VK_KHR_external_memory_fd, which was not enabled"):
        c.require("VK_KHR_external_memory_fd", "exporting")


def test_a_device_is_found_by_uuid(vk_context: Context, vk_open: Open) -> None:
    other = vk_open(uuid=vk_context.device_uuid)
    assert other.device == vk_context.device and other.device_handle != vk_context.device_handle


def test_a_uuid_that_no_device_has_is_refused(vk_open: Open) -> None:
    with pytest.raises(ExchangeError, match="no Vulkan device has the UUID 0101"):
        vk_open(uuid=b"\1" * 16)
    with pytest.raises(ExchangeError, match="no Vulkan device has the UUID 0000"):
        vk_open(uuid=bytes(16))


def test_a_number_that_no_device_has_is_refused(vk_open: Open) -> None:
    with pytest.raises(ExchangeError, match="vulkan:99: this machine has"):
        vk_open(99)


def test_a_layer_that_is_missing_is_named() -> None:
    need_vulkan()
    with pytest.raises(ExchangeError, match="VK_LAYER_nobody"):
        Context.open(layers=["VK_LAYER_nobody"], adapter=TestAdapter())


def test_devices_are_listed_in_the_order_that_numbers_them(vk_context: Context) -> None:
    assert devices()[vk_context.device.id]["device_uuid"] == vk_context.device_uuid


@pytest.mark.parametrize("call", ["vkCreateInstance", "vkCreateDevice", "vkEnumeratePhysicalDevices"])
def test_opening_that_fails_leaves_nothing(call: str) -> None:
    need_vulkan()
    driver = CountingDriver()
    driver.fail_next(call, vk.VK_ERROR_OUT_OF_HOST_MEMORY)
    with pytest.raises(MemoryError):
        Context.open(driver=driver, adapter=TestAdapter())
    assert not driver.live


def test_closing_gives_everything_back(counted: tuple[Context, CountingDriver]) -> None:
    c, driver = counted
    c.queue.host_barrier().wait(10)
    c.timeline(3)
    c.close()
    c.close()
    assert not driver.live and c.closed


def test_a_dropped_context_gives_everything_back() -> None:
    need_vulkan()
    driver = CountingDriver()
    c = Context.open(driver=driver, adapter=TestAdapter())
    waiting = c.queue.run(lambda commands: None)
    kept = [c, c.timeline(2), waiting]
    kept.append(kept)
    del c, waiting, kept
    gc.collect()
    assert not driver.live


def test_a_point_outlives_its_dropped_context(vk_messages: Messages) -> None:
    need_vulkan()
    done = open_checked(vk_messages).queue.run(lambda commands: None)
    gc.collect()
    done.wait(10)
    del done
    gc.collect()
    assert not vk_messages.bad


def test_a_closed_context_says_so(vk_context: Context) -> None:
    vk_context.close()
    with pytest.raises(ExchangeError, match="was closed"):
        vk_context.queue.submit()
    with pytest.raises(ExchangeError, match="was closed"):
        vk_context.queue.record(lambda commands: None)
    with pytest.raises(ExchangeError, match="was closed"):
        vk_context.timeline()


def test_closing_is_refused_while_memory_lives(vk_context: Context) -> None:
    memory = vk_context.allocation(7, 64)
    with pytest.raises(ExchangeError, match="1 allocation"):
        vk_context.close()
    memory.close()


def test_closing_is_refused_while_work_waits(vk_context: Context) -> None:
    gate = vk_context.timeline()
    vk_context.queue.submit(waits=[gate.at(1)])
    with pytest.raises(ExchangeError, match="was not done within"):
        vk_context.close()
    gate.signal(1)


def test_a_lost_device_can_be_closed(vk_messages: Messages) -> None:
    need_vulkan()
    driver = CountingDriver()
    c = open_checked(vk_messages, driver=driver)
    p = c.queue.run(lambda commands: None)
    driver.fail_next("vkQueueSubmit", vk.VK_ERROR_DEVICE_LOST)
    with pytest.raises(DeviceLostError):
        c.queue.submit()
    c.vk.vkDeviceWaitIdle(c.device_handle)              # it is not really lost
    assert p.done() and isinstance(p.error(), DeviceLostError)
    with pytest.raises(DeviceLostError):
        c.queue.submit()
    c.close()
    assert not driver.live


# ---- submitting ----
def test_submitted_commands_run(either: Context) -> None:
    buffer, memory, address = buffer_of(either, 256)
    try:
        either.queue.run(fill(either, buffer, 256, 0xABCD))
        either.queue.host_barrier().wait(10)
        assert word(address) == 0xABCD
    finally:
        drop_buffer(either, buffer, memory)


def test_points_are_timelines_where_the_device_has_them(vk_open: Open) -> None:
    with_them, without = vk_open(), vk_open(features=())
    p = with_them.queue.submit()
    assert isinstance(p, TimelinePoint) and with_them.queue.timeline is not None
    assert p.native() == [(with_them.queue.timeline.handle, p.value)]
    q = without.queue.submit()
    assert isinstance(q, FencePoint) and without.queue.timeline is None
    with pytest.raises(ExchangeError, match="no native form"):
        q.native()


def test_work_waits_for_a_point(vk_context: Context) -> None:
    gate = vk_context.timeline()
    p = vk_context.queue.submit(waits=[gate.at(5)])
    q = vk_context.queue.mark()
    assert not p.done()
    gate.signal(4)
    with pytest.raises(TimeoutError, match=r"not reached within 0\.05 s"):
        p.wait(0.05)
    gate.signal(5)
    q.wait(10)
    assert p.done() and p.error() is None


def test_work_waits_for_a_semaphore_and_value_and_signals_another(vk_context: Context) -> None:
    gate, done = vk_context.timeline(), vk_context.timeline()
    p = vk_context.queue.submit(waits=[(gate.handle, 2), (gate, 1)], signals=[(done, 9)])
    assert done.value == 0
    gate.signal(2)
    p.wait(10)
    assert done.value == 9 and done.at(9).done()


def test_binary_semaphores_order_two_submits(either: Context) -> None:
    out = vk.VkSemaphore()
    either.ok(either.vk.vkCreateSemaphore(either.device_handle, vk.VkSemaphoreCreateInfo(), None, ctypes.byref(out)), "vkCreateSemaphore")
    either.queue.submit(signals=[out.value])
    either.queue.submit(waits=[out]).wait(10)
    either.vk.vkDestroySemaphore(either.device_handle, out.value, None)


def test_a_point_that_the_device_does_not_know_is_waited_for_on_the_host(either: Context) -> None:
    asked: list[float] = []
    foreign = point(done=lambda: bool(asked), wait=asked.append)
    either.queue.submit(waits=[foreign]).wait(10)
    assert asked


def test_a_point_of_another_context_is_waited_for_on_the_host(vk_open: Open) -> None:
    a, b = vk_open(), vk_open()
    gate = a.timeline()
    threading.Timer(0.05, gate.signal, (1,)).start()
    b.queue.submit(waits=[gate.at(1)]).wait(10)
    assert gate.value == 1


def test_a_failed_point_is_not_waited_for_in_silence(vk_context: Context) -> None:
    def fails() -> bool:
        raise ValueError("the camera is gone")

    with pytest.raises(ValueError, match="camera"):
        vk_context.queue.submit(waits=[point(done=fails)])


def test_a_submit_may_have_many_waits_and_commands(vk_context: Context) -> None:
    gates = [vk_context.timeline() for _ in range(20)]
    commands = [vk_context.queue.record(lambda commands: None) for _ in range(20)]
    p = vk_context.queue.submit(commands, [g.at(1) for g in gates], [(g, 2) for g in gates])
    for g in gates:
        g.signal(1)
    p.wait(10)
    assert [g.value for g in gates] == [2] * 20


def test_the_lock_is_held_during_a_submit(vk_context: Context) -> None:
    class Lock:
        held, times = False, 0

        def acquire(self) -> None:
            self.held, self.times = True, self.times + 1

        def release(self) -> None:
            self.held = False

    lock, seen = Lock(), []
    driver = CountingDriver()
    c = wrapped(vk_context, driver=driver, lock=lock)
    driver.before["vkQueueSubmit"] = [lambda *args: seen.append(lock.held)]
    c.queue.submit().wait(10)
    c.queue.mark().wait(10)
    assert seen == [True, True] and not lock.held
    c.close()


@pytest.mark.parametrize("lock", [threading.Lock, threading.RLock, Semaphore])
def test_a_queue_waits_under_the_lock(vk_context: Context, lock: Callable[[], Any]) -> None:
    """V-QUEUE"""
    held = lock()
    c = wrapped(vk_context, lock=held)
    gate = c.timeline()
    assert gate.at(1).stream_wait(c.queue.handle)
    after = c.queue.mark()
    assert not after.done()
    gate.signal(1)
    after.wait(10)
    c.close()


def test_a_lock_that_this_thread_holds_is_an_error_and_no_hang(vk_context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-QUEUE"""
    monkeypatch.setattr(context, "LOCK_TIMEOUT", 0.05)
    lock = threading.Lock()
    c = wrapped(vk_context, lock=lock)
    with lock, pytest.raises(TimeoutError, match="re-entrant"):
        c.queue.mark()
    c.queue.mark().wait(10)
    c.close()
    again = threading.RLock()
    c = wrapped(vk_context, lock=again)
    with again:
        c.queue.mark().wait(10)
    c.close()


def test_a_queue_that_is_not_known_cannot_be_made_to_wait(vk_context: Context) -> None:
    gate = vk_context.timeline()
    assert not gate.at(1).stream_wait(12345)
    assert not gate.at(1).stream_wait("a queue")
    assert not gate.at(1).stream_wait(None)
    gate.signal(1)
    assert gate.at(1).stream_wait(12345)


def test_commands_for_one_submit_are_good_for_one(vk_context: Context) -> None:
    once = vk_context.queue.record(lambda commands: None)
    vk_context.queue.submit([once]).wait(10)
    with pytest.raises(ExchangeError, match="recorded for one submit"):
        vk_context.queue.submit([once])


def test_kept_commands_may_be_submitted_while_they_run(either: Context) -> None:
    kept = either.queue.record(lambda commands: None, once=False)
    for _ in range(50):
        p = either.queue.submit([kept])
    p.wait(10)


def test_recording_that_fails_leaves_nothing(counted: tuple[Context, CountingDriver]) -> None:
    c, driver = counted

    def wrong(commands: int) -> None:
        raise ZeroDivisionError

    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            c.queue.run(wrong)
    assert c.queue.recorder.made == 1 and driver.calls["vkQueueSubmit"] == 0
    c.queue.run(lambda commands: None).wait(10)


@pytest.mark.parametrize("features", [None, ()], ids=["timelines", "fences"])
def test_a_submit_that_fails_can_be_repeated(features: Any, vk_open: Open) -> None:
    driver = CountingDriver()
    c = vk_open(driver=driver, features=features)
    commands = c.queue.record(lambda commands: None)
    driver.fail_next("vkQueueSubmit", vk.VK_ERROR_OUT_OF_HOST_MEMORY)
    with pytest.raises(MemoryError):
        c.queue.submit([commands])
    assert c.queue.pending == 0
    c.queue.submit([commands]).wait(10)


@pytest.mark.parametrize("call", ["vkCreateCommandPool", "vkAllocateCommandBuffers", "vkBeginCommandBuffer", "vkEndCommandBuffer"])
def test_recording_that_the_driver_refuses_leaves_nothing(call: str, counted: tuple[Context, CountingDriver]) -> None:
    c, driver = counted
    driver.fail_next(call, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)
    with pytest.raises(MemoryError):
        c.queue.record(lambda commands: None)
    assert driver.live["CommandPool"] == c.queue.recorder.made
    c.queue.run(lambda commands: None).wait(10)


def test_ten_thousand_submits_leave_as_much_as_one(vk_open: Open) -> None:
    for features in (None, ()):
        driver = CountingDriver()
        c = Context.open(driver=driver, features=features, adapter=TestAdapter())
        with leaves_no_fds():
            for i in range(10_000):
                p = c.queue.run(lambda commands: None)
                if i % 16 == 0:
                    p.wait(10)
            p.wait(10)
            c.queue.collect()
            assert c.queue.pending == 0 and c.queue.recorder.made <= 40
            assert driver.live["CommandPool"] <= 40 and driver.live["Fence"] <= 40
            assert driver.live["Semaphore"] == (1 if features is None else 0)
        del p
        c.close()
        assert not driver.live


def test_threads_submit_at_once(either: Context) -> None:
    points: list[Any] = []

    def many() -> None:
        for _ in range(200):
            points.append(either.queue.run(lambda commands: None))

    threads = [threading.Thread(target=many) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for p in points:
        p.wait(10)
    assert len(points) == 1200 and either.queue.pending == 0


# ---- waiting ----
def test_waiting_lets_other_threads_run(vk_context: Context) -> None:
    gate = vk_context.timeline()
    beats = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            beats.append(time.monotonic())

    t = threading.Thread(target=beat)
    t.start()
    with pytest.raises(TimeoutError):
        gate.at(1).wait(0.4)
    stop.set()
    t.join()
    assert len(beats) >= 10


def test_ctrl_c_ends_a_wait(vk_context: Context) -> None:
    gate = vk_context.timeline()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        gate.at(1).wait(20)


def test_points_of_a_lost_device_fail_at_once(vk_open: Open) -> None:
    driver = CountingDriver()
    c = vk_open(driver=driver)
    p = c.timeline().at(1)
    driver.fail_next("vkWaitSemaphores", vk.VK_ERROR_DEVICE_LOST)
    with pytest.raises(DeviceLostError):
        p.wait(20)
    assert c.lost is not None and c.queue.wait_idle(20)


def test_a_counter_that_a_driver_sets_to_the_highest_is_a_lost_device(vk_open: Open) -> None:
    driver = CountingDriver()
    c = vk_open(driver=driver)
    t = c.timeline()
    t.at(1).done()

    class Lost:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def vkGetSemaphoreCounterValue(self, device: int, semaphore: int, out: Any) -> int:
            out._obj.value = 2**64 - 1
            return 0

    real, c.vk = c.vk, Lost()
    p = t.at(1)
    assert p.done() and isinstance(p.error(), DeviceLostError)
    c.vk = real


# ---- timelines ----
def test_a_timeline_only_grows(vk_context: Context) -> None:
    t = vk_context.timeline(5)
    assert t.value == 5 and t.at(5).done()
    with pytest.raises(ExchangeError, match="value 5: the timeline is at 5"):
        t.signal(5)


@pytest.mark.parametrize("bad", [-1, 2**64 - 1, 1.5, None], ids=repr)
def test_a_value_that_a_timeline_cannot_have_is_refused(bad: Any, vk_context: Context) -> None:
    with pytest.raises(ValueError, match="value"):
        vk_context.timeline().at(bad)


def test_a_closed_timeline_says_so(vk_context: Context) -> None:
    t = vk_context.timeline()
    p = t.at(1)
    t.close()
    t.close()
    assert p.done() and "was closed" in str(p.error())


def test_a_timeline_goes_when_it_is_closed_and_else_with_its_context(counted: tuple[Context, CountingDriver]) -> None:
    c, driver = counted
    c.timeline().close()
    assert "Semaphore" not in driver.live
    c.timeline()
    gc.collect()
    assert driver.live["Semaphore"] == 1        # a submit of the application's may use it yet
    c.close()
    assert not driver.live


def test_a_timeline_is_exported_only_where_the_device_can(vk_context: Context) -> None:
    if vk_context.can_export_timelines:
        fd = vk_context.timeline(exportable=True).export()
        assert not os.get_inheritable(fd)
        os.close(fd)
        return
    with pytest.raises(ExchangeError, match="VK_KHR_external_semaphore_fd"):
        vk_context.timeline(exportable=True)
    with pytest.raises(ExchangeError, match="not exported"):
        vk_context.timeline().export()
    with pytest.raises(ExchangeError, match="VK_KHR_external_semaphore_fd"):
        vk_context.import_timeline(0)


def test_a_timeline_crosses_contexts_as_a_descriptor(vk_open: Open) -> None:
    a, b = vk_open(), vk_open()
    if not a.can_export_timelines:
        pytest.skip("the device exports no timeline semaphores")
    ours = a.timeline()
    with leaves_no_fds(slack=2):
        fd = ours.export()
        theirs = b.import_timeline(fd)
        os.close(fd)
        ours.signal(7)
        theirs.at(7).wait(10)


def test_a_timeline_without_the_feature_is_refused(vk_open: Open) -> None:
    with pytest.raises(ExchangeError, match="not turned on"):
        vk_open(features=()).timeline()


# ---- the application's device ----
def wrapped(c: Context, **options: Any) -> Context:
    """The device of another Context as if it were the application's."""
    given: dict[str, Any] = {"instance": c.instance_handle, "physical_device": c.physical_device, "device": c.device_handle,
                             "queue": c.queue.handle, "queue_family": c.queue.family, "extensions": c.extensions,
                             "features": c.features, "adapter": TestAdapter()}
    return Context.wrap(**{**given, **options})


def test_what_a_wrap_needs_and_did_not_get_is_named(vk_context: Context) -> None:
    for name in ("instance", "physical_device", "device", "queue", "queue_family", "extensions"):
        with pytest.raises(TypeError, match=rf"needs {name}:"):
            wrapped(vk_context, **{name: None})


def test_a_wrapped_device_is_left_as_it_was(vk_context: Context) -> None:
    driver = CountingDriver()
    c = wrapped(vk_context, driver=driver)
    c.queue.run(lambda commands: None).wait(10)
    c.close()
    assert not driver.live and driver.calls["vkDestroyDevice"] == driver.calls["vkDestroyInstance"] == 0
    vk_context.queue.submit().wait(10)


def test_a_wrapped_device_has_its_own_number_and_identity(vk_context: Context) -> None:
    c = wrapped(vk_context)
    assert c.device == vk_context.device and c.device_uuid == vk_context.device_uuid and c is not vk_context and not c.owned
    c.close()


def test_several_queues_may_be_given(vk_context: Context) -> None:
    q = vk_context.queue
    c = wrapped(vk_context, queues=[(q.handle, q.family)], queue=None, queue_family=None)
    assert c.find_queue(q.handle) is c.queue and c.find_queue(q.handle + 1) is None and c.find_queue(q) is None
    c.close()
    with pytest.raises(ValueError, match="queue family 99"):
        wrapped(vk_context, queues=[(q.handle, 99)])
    with pytest.raises(TypeError, match="at least one"):
        wrapped(vk_context, queues=[])


def test_whether_timelines_are_on_is_asked_of_the_application(vk_context: Context) -> None:
    c = wrapped(vk_context, features=None)
    assert isinstance(c.queue.submit(), FencePoint)
    with pytest.raises(TypeError, match=r"features=\['timelineSemaphore'\]"):
        c.timeline()
    c.close()


def test_a_version_that_is_too_old_is_refused(vk_context: Context) -> None:
    with pytest.raises(ExchangeError, match=r"used as Vulkan 1\.0\.0; interop needs 1\.1"):
        wrapped(vk_context, api_version=1 << 22)


def test_a_lock_that_is_none_is_refused(vk_context: Context) -> None:
    with pytest.raises(TypeError, match="acquire"):
        wrapped(vk_context, lock=5)


def test_the_callers_functions_are_used(vk_context: Context) -> None:
    lib = ctypes.CDLL("libvulkan.so.1")
    asked: list[bytes] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    real = kind(ctypes.cast(lib.vkGetInstanceProcAddr, ctypes.c_void_p).value or 0)

    @kind
    def mine(instance: int, name: bytes) -> int:
        asked.append(name)
        return real(instance, name) or 0

    c = wrapped(vk_context, get_instance_proc_addr=mine)
    c.queue.submit().wait(10)
    c.close()
    assert b"vkGetPhysicalDeviceProperties" in asked and b"vkGetDeviceProcAddr" in asked


@pytest.fixture
def theirs() -> Iterator[Any]:
    """An application that made its device with the package ``vulkan``, as job 4 of user-code.md does."""
    need_vulkan()
    v = need("vulkan")

    class Theirs:
        vk = v
        instance = v.vkCreateInstance(v.VkInstanceCreateInfo(pApplicationInfo=v.VkApplicationInfo(apiVersion=v.VK_MAKE_VERSION(1, 2, 0))),
                                      None)
        physical_device = v.vkEnumeratePhysicalDevices(instance)[0]
        requirements = requirements(physical_device, instance=instance, shared_with=["torch"])
        extensions = requirements.device_extensions
        device = v.vkCreateDevice(physical_device, v.VkDeviceCreateInfo(
            pNext=v.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=1), queueCreateInfoCount=1,
            pQueueCreateInfos=[v.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])],
            enabledExtensionCount=len(extensions), ppEnabledExtensionNames=list(extensions)), None)
        queue = v.vkGetDeviceQueue(device, 0, 0)

        def wrap(self, **options: Any) -> Context:
            return Context.wrap(instance=self.instance, physical_device=self.physical_device, device=self.device, queue=self.queue,
                                queue_family=0, extensions=self.extensions, features=["timelineSemaphore"], adapter=TestAdapter(),
                                **options)

    yield Theirs()
    v.vkDestroyDevice(Theirs.device, None)
    v.vkDestroyInstance(Theirs.instance, None)


def test_a_device_of_the_package_vulkan_is_wrapped(theirs: Any) -> None:
    lock = threading.Lock()
    with theirs.wrap(lock=lock) as c:
        rendered = c.timeline()
        v = theirs.vk
        semaphore = v.ffi.cast("VkSemaphore", rendered.handle)
        values = v.VkTimelineSemaphoreSubmitInfo(signalSemaphoreValueCount=1, pSignalSemaphoreValues=[4])
        with lock:
            v.vkQueueSubmit(theirs.queue, 1, [v.VkSubmitInfo(pNext=values, signalSemaphoreCount=1, pSignalSemaphores=[semaphore])], None)
        rendered.at(4).wait(10)
        assert rendered.at(4).stream_wait(theirs.queue)
        c.queue.mark().wait(10)


def test_requirements_are_what_the_device_has_of_what_sharing_takes(theirs: Any) -> None:
    ask = lambda *who: requirements(theirs.physical_device, instance=theirs.instance, shared_with=who)  # noqa: E731
    everything, numpy, process = ask(), ask("numpy"), ask("process")
    assert "timelineSemaphore" in everything.features
    assert "VK_EXT_external_memory_host" in numpy.device_extensions and "VK_KHR_external_memory_fd" not in numpy.device_extensions
    assert "VK_KHR_external_memory_fd" in process.device_extensions and "VK_EXT_external_memory_host" not in process.device_extensions
    assert set(numpy.device_extensions) | set(process.device_extensions) <= set(everything.device_extensions) | set(everything.missing)
    assert set(ask("somebody else").device_extensions) == set(everything.device_extensions)
    assert requirements(theirs.physical_device, instance=theirs.instance, shared_with="numpy") == numpy


# ---- processes ----
def test_a_forked_child_is_told_and_does_nothing(vk_open: Open) -> None:
    driver = CountingDriver()
    c = vk_open(driver=driver)
    t, p = c.timeline(), c.queue.run(lambda commands: None)
    p.wait(10)
    q = t.at(1)
    before = dict(driver.calls)
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(ExchangeError, match="before fork"):
                c.queue.submit()
            assert q.done() and "before fork" in str(q.error())
            c.close()
            del t, p, q, c
            gc.collect()
            code = 0 if dict(driver.calls) == before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_ends_with_work_in_flight() -> None:
    need_vulkan()
    code = """
import interop
from interop.contract import Adapter
from interop.adapters.vulkan import Context
class A(Adapter): name = "vulkan"
c = Context.open(adapter=A())
gate = c.timeline()
for i in range(100):
    c.queue.run(lambda commands: None)
c.queue.run(lambda commands: None, waits=[gate.at(1)])
"""
    start = time.monotonic()
    run(code)
    assert time.monotonic() - start < 20


# ---- what hostile callers found ----
def test_a_closed_timeline_is_no_wait(vk_context: Context) -> None:
    line = vk_context.timeline()
    line.close()
    for waits in ([(line, 1)], [line.at(1)]):
        with pytest.raises(ExchangeError, match="closed"):
            vk_context.queue.submit(waits=waits)


@pytest.mark.parametrize("value", [-1, 2**64 - 1, 2**64, 1.5, None])
def test_a_timeline_is_signalled_with_numbers_that_it_can_have(vk_context: Context, value: Any) -> None:
    line = vk_context.timeline()
    with pytest.raises(ValueError):
        line.signal(value)
    line.signal(1)
    assert line.value == 1 and vk_context.lost is None


def test_points_of_others_are_waited_for(vk_context: Context) -> None:
    """SPEC P-THIRD"""
    class Theirs:
        over = False

        def done(self) -> bool:
            return self.over

        def wait(self, timeout: float | None = None) -> None:
            self.over = True

    theirs = Theirs()
    vk_context.queue.submit(waits=[theirs, None]).wait(10)
    assert theirs.over


@pytest.mark.parametrize("layers", [[5], "VK_LAYER_KHRONOS_validation", [b"x"], ["a\0b"]])
def test_names_are_names(layers: Any) -> None:
    need_vulkan()
    with pytest.raises(TypeError, match="layers"):
        Context.open(layers=layers)
