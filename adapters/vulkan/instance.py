"""A VkInstance of interop's own, with what the driver and its layers have to say. Knows no device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from interop.contract import ExchangeError

from . import api as vk
from . import handles, physical
from .loader import Driver, VulkanError, check, enumerate_all

#: The version that interop is written for: what is newer is not used, what is older is asked for by name.
WANTED = (1 << 22) | (3 << 12)

Listener = Callable[[int, int, str, str], Any]


class Instance:
    """Made, used and destroyed by whoever holds it.

    Attributes:
        handle: the VkInstance.
        table: its functions.
        driver: where they come from.
        version: what was asked for: what its devices may be used as, packed.
    """

    def __init__(self, *, driver: Any = None, layers: Iterable[str] = (), extensions: Iterable[str] = (), next: Sequence[Any] = (),
                 on_message: Listener | None = None) -> None:
        """Create it.

        Args:
            driver: a `loader.Driver`, or what stands in for one; None: the machine's loader.
            layers: names; one that is missing is an ExchangeError.
            extensions: instance extensions beside interop's.
            next: structs for the pNext chain of VkInstanceCreateInfo.
            on_message: called with (severity, types, message id, text) of VK_EXT_debug_utils, on whatever thread calls Vulkan; what it
                raises is printed and goes no further.

        Raises:
            ExchangeError: no loader, no driver that is new enough, or a layer or extension that is not there.
        """
        self.driver = driver if driver is not None else Driver()
        table = self.driver.table
        self.handle = self._messenger = 0
        layers, wanted = handles.names(layers, "layers"), handles.names(extensions, "instance_extensions")
        if on_message is not None and "VK_EXT_debug_utils" not in wanted:
            wanted.append("VK_EXT_debug_utils")
        version = ctypes.c_uint32()
        check(table.vkEnumerateInstanceVersion(ctypes.byref(version)), "vkEnumerateInstanceVersion")
        if version.value < physical.OLDEST:
            raise ExchangeError(f"the Vulkan loader is version {physical.spell(version.value)}; interop needs 1.1",
                                "install a newer libvulkan1")
        self.version = min(version.value, WANTED)
        chain = list(next)
        # the messenger of the pNext chain hears what is said while the instance is made and destroyed
        self._callback = _listener(on_message) if on_message is not None else None
        messages = self._messages()
        if messages is not None:
            chain.append(messages)
        app = vk.VkApplicationInfo(pApplicationName="interop", pEngineName="interop", apiVersion=self.version)
        info = vk.VkInstanceCreateInfo(pNext=chain, pApplicationInfo=app, ppEnabledLayerNames=layers, ppEnabledExtensionNames=wanted)
        out = vk.VkInstance()
        try:
            check(table.vkCreateInstance(info, None, ctypes.byref(out)), "vkCreateInstance")
        except VulkanError as e:
            raise _explained(e, table, layers) from None
        self.handle = handles.owned(out.value or 0, "vkCreateInstance")
        self.extensions = frozenset(wanted)
        self.table: Any = self.driver.instance(self.handle, self.extensions)
        if messages is not None:
            made = vk.VkDebugUtilsMessengerEXT()
            check(self.table.vkCreateDebugUtilsMessengerEXT(self.handle, self._messages(), None, ctypes.byref(made)),
                  "vkCreateDebugUtilsMessengerEXT")
            self._messenger = made.value

    def _messages(self) -> Any:
        if self._callback is None:
            return None
        warning, error = vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT, vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT
        kinds = (vk.VK_DEBUG_UTILS_MESSAGE_TYPE_GENERAL_BIT_EXT | vk.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
                 | vk.VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT)
        return vk.VkDebugUtilsMessengerCreateInfoEXT(messageSeverity=warning | error, messageType=kinds, pfnUserCallback=self._callback)

    def physical_devices(self) -> list[physical.PhysicalDevice]:
        """In the order that numbers them."""
        return physical.of_instance(self.handle, self.table)

    def close(self) -> None:
        """Destroy it. Idempotent; its devices must be gone."""
        handle, self.handle = self.handle, 0
        if handle:
            if self._messenger:
                self.table.vkDestroyDebugUtilsMessengerEXT(handle, self._messenger, None)
                self._messenger = 0
            self.table.vkDestroyInstance(handle, None)


def _listener(on_message: Listener) -> Any:
    def called(severity: int, types: int, data: Any, user: Any) -> int:
        d = data.contents
        name = (d.pMessageIdName or b"").decode(errors="replace")
        on_message(severity, types, name, (d.pMessage or b"").decode(errors="replace"))
        return 0                # VK_FALSE: the call goes on
    return vk.PFN_vkDebugUtilsMessengerCallbackEXT(called)


def _explained(e: VulkanError, table: Any, layers: list[str]) -> ExchangeError:
    if e.code == "VK_ERROR_INCOMPATIBLE_DRIVER":
        return ExchangeError("no Vulkan driver on this machine (vkCreateInstance: VK_ERROR_INCOMPATIBLE_DRIVER)",
                             "install the GPU's, or mesa-vulkan-drivers, which has one for the CPU")
    if e.code == "VK_ERROR_LAYER_NOT_PRESENT":
        there = {x.layerName.decode() for x in enumerate_all(table.vkEnumerateInstanceLayerProperties, vk.VkLayerProperties)}
        return ExchangeError(f"no Vulkan layer {', '.join(sorted(set(layers) - there))} on this machine", "install vulkan-validationlayers")
    return e
