"""A physical device: who it is, its memory types, limits, queue families, extensions. Only asks; makes nothing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from interop.contract import ExchangeError

from . import api as vk
from .loader import VulkanError, enumerate_all

#: The oldest Vulkan that has external memory and properties2 in its core.
OLDEST = (1 << 22) | (1 << 12)

#: Feature -> the struct that it is a member of. These are what interop asks for and turns on.
FEATURES: dict[str, Any] = {
    "timelineSemaphore": vk.VkPhysicalDeviceTimelineSemaphoreFeatures,
    "bufferDeviceAddress": vk.VkPhysicalDeviceBufferDeviceAddressFeatures,
}
#: Feature -> (the core version that has it, the extension that does before).
BROUGHT_BY = {"timelineSemaphore": ((1 << 22) | (2 << 12), "VK_KHR_timeline_semaphore"),
              "bufferDeviceAddress": ((1 << 22) | (2 << 12), "VK_KHR_buffer_device_address")}


def spell(version: int) -> str:
    """``1.3.230`` of a packed version (Vulkan, Version Numbers)."""
    return f"{version >> 22 & 0x7f}.{version >> 12 & 0x3ff}.{version & 0xfff}"


@dataclass(frozen=True)
class MemoryType:
    """One of ``VkPhysicalDeviceMemoryProperties.memoryTypes``.

    Attributes:
        index: its number.
        flags: VkMemoryPropertyFlagBits.
        heap: which heap it is of.
        heap_size: bytes of that heap.
    """

    index: int
    flags: int
    heap: int
    heap_size: int

    @property
    def device_local(self) -> bool:
        """Quickest for the device."""
        return bool(self.flags & vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)

    @property
    def host_visible(self) -> bool:
        """It can be mapped."""
        return bool(self.flags & vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT)

    @property
    def coherent(self) -> bool:
        """Mapped, it needs no flush and no invalidate."""
        return bool(self.flags & vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT)

    @property
    def cached(self) -> bool:
        """The host reads it through its caches; else reading is some thousand times slower (measured.md G)."""
        return bool(self.flags & vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT)


class PhysicalDevice:
    """A VkPhysicalDevice of an instance. What it says is asked when it is first needed.

    Attributes:
        handle: the VkPhysicalDevice.
        table: the functions of its instance.
    """

    def __init__(self, handle: int, table: Any) -> None:
        """Asks nothing yet."""
        self.handle, self.table = handle, table

    @cached_property
    def properties(self) -> Any:
        """VkPhysicalDeviceProperties."""
        out = vk.VkPhysicalDeviceProperties()
        self.table.vkGetPhysicalDeviceProperties(self.handle, ctypes.byref(out))
        return out

    @property
    def limits(self) -> Any:
        """VkPhysicalDeviceLimits."""
        return self.properties.limits

    @property
    def name(self) -> str:
        """What the driver calls it. Not an identity."""
        return str(self.properties.deviceName.decode(errors="replace"))

    @property
    def api_version(self) -> int:
        """The highest Vulkan that it has, packed."""
        return int(self.properties.apiVersion)

    @property
    def kind(self) -> str:
        """``"discrete"``, ``"integrated"``, ``"virtual"``, ``"cpu"`` or ``"other"``."""
        return {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}.get(self.properties.deviceType, "other")

    def asked(self, struct: Any) -> Any:
        """A struct that extends VkPhysicalDeviceProperties2, filled in. Its extension or version must be there."""
        more = struct()
        self.table.vkGetPhysicalDeviceProperties2(self.handle, ctypes.byref(vk.VkPhysicalDeviceProperties2(pNext=more)))
        return more

    @cached_property
    def _ids(self) -> tuple[bytes, bytes]:
        if self.api_version < OLDEST:
            return bytes(16), bytes(16)
        ids = self.asked(vk.VkPhysicalDeviceIDProperties)
        return bytes(ids.deviceUUID), bytes(ids.driverUUID)

    @property
    def device_uuid(self) -> bytes:
        """16 bytes: which physical device it is, across APIs and processes (Vulkan, VkPhysicalDeviceIDProperties). Zeros: unknown."""
        return self._ids[0]

    @property
    def driver_uuid(self) -> bytes:
        """16 bytes: which driver, in which build. Memory crosses between Vulkan devices only where this is equal too."""
        return self._ids[1]

    @cached_property
    def extensions(self) -> frozenset[str]:
        """The device extensions that it has."""
        found = enumerate_all(self.table.vkEnumerateDeviceExtensionProperties, vk.VkExtensionProperties, self.handle, None)
        return frozenset(e.extensionName.decode() for e in found)

    @cached_property
    def memory_types(self) -> tuple[MemoryType, ...]:
        """All of them, by index."""
        out = vk.VkPhysicalDeviceMemoryProperties()
        self.table.vkGetPhysicalDeviceMemoryProperties(self.handle, ctypes.byref(out))
        return tuple(MemoryType(i, t.propertyFlags, t.heapIndex, out.memoryHeaps[t.heapIndex].size)
                     for i, t in enumerate(out.memoryTypes[:out.memoryTypeCount]))

    @cached_property
    def families(self) -> tuple[tuple[int, int], ...]:
        """``(VkQueueFlagBits, number of queues)`` of each queue family."""
        found = enumerate_all(self.table.vkGetPhysicalDeviceQueueFamilyProperties, vk.VkQueueFamilyProperties, self.handle)
        return tuple((f.queueFlags, f.queueCount) for f in found)

    @cached_property
    def features(self) -> frozenset[str]:
        """Those of `FEATURES` that it can have turned on."""
        structs = {name: struct() for name, struct in FEATURES.items() if self.brings(name, self.extensions)}
        if self.api_version >= OLDEST and structs:
            both = vk.VkPhysicalDeviceFeatures2(pNext=list(structs.values()))
            self.table.vkGetPhysicalDeviceFeatures2(self.handle, ctypes.byref(both))
        return frozenset(name for name, s in structs.items() if getattr(s, name))

    def brings(self, feature: str, extensions: frozenset[str]) -> bool:
        """Whether the version or one of these extensions has a feature."""
        since, extension = BROUGHT_BY[feature]
        return self.api_version >= since or extension in extensions

    @cached_property
    def max_allocation(self) -> int:
        """Bytes of the largest VkDeviceMemory (maxMemoryAllocationSize, Vulkan 1.1)."""
        return int(self.asked(vk.VkPhysicalDeviceMaintenance3Properties).maxMemoryAllocationSize)

    @cached_property
    def host_pointer_alignment(self) -> int:
        """What address and size of imported host pages are multiples of; 0 where VK_EXT_external_memory_host is not there."""
        if "VK_EXT_external_memory_host" not in self.extensions:
            return 0
        return int(self.asked(vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT).minImportedHostPointerAlignment)

    def compute_family(self) -> int:
        """The first queue family that computes, which implies that it copies (Vulkan, VkQueueFlagBits)."""
        for family, (flags, count) in enumerate(self.families):
            if flags & vk.VK_QUEUE_COMPUTE_BIT and count:
                return family
        raise ExchangeError(f"{self.name} has no queue family that computes")

    def __repr__(self) -> str:
        return f"<PhysicalDevice {self.name}, Vulkan {spell(self.api_version)}>"


def of_instance(instance: int, table: Any) -> list[PhysicalDevice]:
    """All that an instance sees, in its order, which is what numbers ``vulkan:N``. None where there is no driver."""
    try:
        found = enumerate_all(table.vkEnumeratePhysicalDevices, ctypes.c_void_p, instance)
    except VulkanError as e:
        if e.code == "VK_ERROR_INITIALIZATION_FAILED":     # what loaders say where no driver is installed
            return []
        raise
    return [PhysicalDevice(handle, table) for handle in found]
