"""What tests of Vulkan stand on: a Context under the validation layers, counters of what lives, failures on demand on a real driver.

    from vulkan_kit import vk_context, vk_open
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan import loader
from interop.adapters.vulkan.context import Context
from interop.adapters.vulkan.instance import Instance
from interop.contract import Adapter, ExchangeError

LAYER = "VK_LAYER_KHRONOS_validation"
#: Message ids, or parts of them, that the layers of Debian 12 (1.3.239) say of correct programs -> why they are wrong.
FALSE_POSITIVES: dict[str, str] = {
    # it times out in vkWaitSemaphores itself, which another thread's wait or a slow machine brings about, and blames the semaphore
    "UNASSIGNED-VkSemaphore-state-timeout": "said where its own bookkeeping of a timeline is behind the driver's",
}

_ERROR, _WARNING = vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT, vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT


class Messages:
    """What the validation layers said: errors, and warnings of the synchronisation checks."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, str, str]] = []

    def __call__(self, severity: int, types: int, name: str, text: str) -> None:
        self.all.append((severity, types, name, text))

    @property
    def bad(self) -> list[str]:
        """Those that fail a test."""
        return [f"{name}: {text}" for severity, _, name, text in self.all
                if (severity & _ERROR or (severity & _WARNING and "SYNC-" in name + text))
                and not any(known in name for known in FALSE_POSITIVES)]

    def take(self) -> list[str]:
        """`bad`, which is then forgotten: for tests that are about an error."""
        out = self.bad
        self.all.clear()
        return out


class CountingTable:
    """A real table that counts calls and objects, and fails on demand."""

    def __init__(self, table: Any, driver: CountingDriver) -> None:
        self._table, self._driver = table, driver

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._table, name)
        driver = self._driver

        @functools.wraps(function, assigned=(), updated=())
        def called(*args: Any) -> Any:
            driver.calls[name] += 1
            for before in driver.before.get(name, ()):
                before(*args)
            failing = driver.failing.get(name)
            if failing:
                return failing.pop(0)
            result = function(*args)
            driver.count(name, result, args)
            return result

        called.__name__ = name
        setattr(self, name, called)
        return called


class CountingDriver:
    """A `loader.Driver` whose tables count.

    Attributes:
        calls: by function.
        live: objects by kind, such as ``"Buffer"``, ``"Memory"``, ``"Semaphore"``.
        before: function -> what is called with its arguments first.
    """

    def __init__(self, driver: Any = None) -> None:
        self._driver = driver if driver is not None else loader.Driver()
        self.calls: collections.Counter[str] = collections.Counter()
        self.live: collections.Counter[str] = collections.Counter()
        self.failing: dict[str, list[int]] = {}
        self.before: dict[str, list[Callable[..., Any]]] = {}
        self.table = CountingTable(self._driver.table, self)

    def instance(self, *args: Any) -> Any:
        return CountingTable(self._driver.instance(*args), self)

    def device(self, *args: Any) -> Any:
        return CountingTable(self._driver.device(*args), self)

    def fail_next(self, name: str, result: int, times: int = 1) -> None:
        """The next calls of a function do nothing and return this VkResult."""
        self.failing.setdefault(name, []).extend([result] * times)

    def count(self, name: str, result: Any, args: tuple[Any, ...]) -> None:
        if isinstance(result, int) and result < 0:
            return
        for prefix, step in (("vkCreate", 1), ("vkAllocate", 1), ("vkDestroy", -1), ("vkFree", -1)):
            if name.startswith(prefix) and not (step < 0 and args[1 if len(args) > 2 else 0] in (None, 0)):
                kind = name.removeprefix(prefix).removesuffix("s")
                if kind in ("CommandBuffer", "DescriptorSet"):
                    continue                    # these go with their pool
                self.live[kind] += step
                if not self.live[kind]:
                    del self.live[kind]


class TestAdapter(Adapter):
    """Stands in where a test is about a Context and nothing else."""

    __test__ = False
    name = "vulkan"


@functools.cache
def why_not() -> str | None:
    """Why Vulkan cannot be tested here; None: it can."""
    try:
        instance = Instance(layers=[LAYER])
    except ExchangeError as e:
        return str(e)
    try:
        return None if instance.physical_devices() else "no Vulkan driver"
    finally:
        instance.close()


def need_vulkan() -> None:
    """Skip the test where there is no loader, driver or validation layer; the reason says which."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"Vulkan: {reason}")


def open_checked(messages: Messages, **options: Any) -> Context:
    """`Context.open` under the validation layers with synchronisation validation; what they say goes to `messages`."""
    sync = vk.VkValidationFeaturesEXT(pEnabledValidationFeatures=[vk.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT])
    options.setdefault("adapter", TestAdapter())
    return Context.open(layers=[LAYER], instance_extensions=["VK_EXT_validation_features"], instance_next=[sync], on_message=messages,
                        **options)


@pytest.fixture
def vk_messages() -> Messages:
    """What the layers said to this test's Contexts."""
    return Messages()


@pytest.fixture
def vk_open(vk_messages: Messages) -> Iterator[Callable[..., Context]]:
    """`Context.open` with the same arguments, as often as wanted. In the end all are closed, and the layers must have said nothing.

    Objects that leaked count: vkDestroyDevice names them (VUID-vkDestroyDevice-device-05137, -00378).
    """
    need_vulkan()
    opened: list[Context] = []

    def make(*args: Any, **options: Any) -> Context:
        opened.append(open_checked(vk_messages, **({"index": args[0]} if args else {}), **options))
        return opened[-1]

    yield make
    gc.collect()
    for c in reversed(opened):
        if c.lost is None:
            c.close()
        else:
            with contextlib.suppress(ExchangeError):
                c.close()
    assert not vk_messages.bad, "\n".join(vk_messages.bad)


@pytest.fixture
def vk_context(vk_open: Callable[..., Context]) -> Context:
    """A Context of vulkan:0 under the validation layers."""
    return vk_open()


def fds() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def leaves_no_fds(slack: int = 0) -> Iterator[None]:
    """Inside it, as many descriptors are closed as were opened."""
    gc.collect()
    before = fds()
    yield
    gc.collect()
    assert fds() <= before + slack, f"{fds() - before} file descriptors more than before"


def buffer_of(context: Context, size: int, usage: int = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT) -> tuple[int, int, int]:
    """A raw ``(VkBuffer, VkDeviceMemory, address)``, mapped, for tests below the memory model; `drop_buffer` gives it back."""
    t, device = context.vk, context.device_handle
    usage |= vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    buffer, memory, address = vk.VkBuffer(), vk.VkDeviceMemory(), ctypes.c_void_p()
    context.ok(t.vkCreateBuffer(device, vk.VkBufferCreateInfo(size=size, usage=usage), None, ctypes.byref(buffer)), "vkCreateBuffer")
    need = vk.VkMemoryRequirements()
    t.vkGetBufferMemoryRequirements(device, buffer.value, ctypes.byref(need))
    kind = next(m.index for m in context.memory_types if need.memoryTypeBits >> m.index & 1 and m.host_visible and m.coherent)
    info = vk.VkMemoryAllocateInfo(allocationSize=need.size, memoryTypeIndex=kind)
    context.ok(t.vkAllocateMemory(device, info, None, ctypes.byref(memory)), "vkAllocateMemory")
    context.ok(t.vkBindBufferMemory(device, buffer.value, memory.value, 0), "vkBindBufferMemory")
    context.ok(t.vkMapMemory(device, memory.value, 0, need.size, 0, ctypes.byref(address)), "vkMapMemory")
    return buffer.value, memory.value, address.value or 0


def drop_buffer(context: Context, buffer: int, memory: int) -> None:
    """The end of `buffer_of`."""
    context.vk.vkDestroyBuffer(context.device_handle, buffer, None)
    context.vk.vkFreeMemory(context.device_handle, memory, None)
