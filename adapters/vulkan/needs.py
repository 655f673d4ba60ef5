"""What a VkDevice must have turned on before its memory can be shared: for the application's own vkCreateDevice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import handles, physical
from .loader import Driver

FD = ("VK_KHR_external_memory", "VK_KHR_external_memory_fd")
SEMAPHORE = ("VK_KHR_external_semaphore", "VK_KHR_external_semaphore_fd")
HOST = ("VK_KHR_external_memory", "VK_EXT_external_memory_host")
TIMELINE = ("VK_KHR_timeline_semaphore",)
DMA_BUF = (*FD, "VK_EXT_external_memory_dma_buf")

#: Everything that interop uses, in the order in which it is turned on.
EVERYTHING = tuple(dict.fromkeys((*HOST, *FD, *SEMAPHORE, *TIMELINE, "VK_EXT_external_memory_dma_buf")))
#: Core since 1.1 or 1.2: only an application that asked for an older version in VkApplicationInfo needs them, and they never harm.
IN_CORE = frozenset({"VK_KHR_external_memory", "VK_KHR_external_semaphore", "VK_KHR_timeline_semaphore"})
#: The same for the instance.
INSTANCE = ("VK_KHR_get_physical_device_properties2", "VK_KHR_external_memory_capabilities", "VK_KHR_external_semaphore_capabilities")

_HOST = frozenset({"host", "cpu", "numpy", "torch", "jax", "cuda_host"})
_DEVICE = frozenset({"process", "opaque_fd", "vulkan", "cuda", "cuda_managed", "torch", "cupy", "jax", "opencl", "pyopencl", "rocm"})
_DMA_BUF = frozenset({"dma_buf", "opencl", "pyopencl"})


@dataclass(frozen=True)
class Requirements:
    """What to add to VkDeviceCreateInfo, and then to give to ``Context.wrap``.

    Attributes:
        device_extensions: for ppEnabledExtensionNames: those of the wanted that this device has.
        instance_extensions: for VkInstanceCreateInfo, where VkApplicationInfo asks for Vulkan 1.0 only.
        features: names of members to turn on, such as ``"timelineSemaphore"`` of VkPhysicalDeviceTimelineSemaphoreFeatures.
        missing: extensions and features that would be used and that this device has not; sharing is then by the host, or a copy.
    """

    device_extensions: tuple[str, ...]
    instance_extensions: tuple[str, ...]
    features: tuple[str, ...]
    missing: tuple[str, ...]


def requirements(physical_device: Any, *, instance: Any, shared_with: Iterable[Any] = (), get_instance_proc_addr: Any = None,
                 driver: Any = None) -> Requirements:
    """What the application's vkCreateDevice must enable so that memory of this device can be shared.

    Args:
        physical_device, instance: VkPhysicalDevice and VkInstance: ints, ctypes objects or cffi cdata.
        shared_with: with whom, as in ``interop.empty``: names of frameworks or devices, places, ``"process"``. Nothing: with everybody.
        get_instance_proc_addr: where the functions come from, if not from the loader.
        driver: what stands in for a `loader.Driver`.

    Raises:
        TypeError: a handle is none. ExchangeError: there is no loader.
    """
    driver = driver if driver is not None else Driver(get_instance_proc_addr)
    table = driver.instance(handles.number(instance, "instance"))
    return of_device(physical.PhysicalDevice(handles.number(physical_device, "physical_device"), table), shared_with)


def of_device(device: physical.PhysicalDevice, shared_with: Iterable[Any] = ()) -> Requirements:
    """`requirements` of a PhysicalDevice."""
    wanted = _wanted([shared_with] if isinstance(shared_with, str) else list(shared_with))
    there = tuple(e for e in EVERYTHING if e in wanted and e in device.extensions)
    there += tuple(e for f in physical.FEATURES if f in device.features for since, e in (physical.BROUGHT_BY[f],)
                   if device.api_version < since and e not in there)
    missing = [e for e in EVERYTHING if e in wanted and e not in device.extensions and e not in IN_CORE]
    missing += [f for f in physical.FEATURES if f not in device.features]
    return Requirements(there, INSTANCE, tuple(f for f in physical.FEATURES if f in device.features), tuple(missing))


def _wanted(parties: list[Any]) -> set[str]:
    out = set(TIMELINE)
    for party in parties:
        device = getattr(party, "device", party)
        name = str(device).partition(":")[0].lower()
        known = False
        for group, extensions in ((_HOST, HOST), (_DEVICE, (*FD, *SEMAPHORE)), (_DMA_BUF, DMA_BUF)):
            if name in group:
                known = True
                out.update(extensions)
        if not known:
            out.update(EVERYTHING)
    return out if parties else set(EVERYTHING)
