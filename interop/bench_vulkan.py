"""What the Vulkan rows of the benchmark speak of: a device made by the package ``vulkan``, as a user's is, which interop wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

import interop

_BUFFER = 1 << 14           # bytes; a (64, 64) float32
_HOST = 1 << 20
_HOST_POINTER = 0x80        # VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
_FOREVER = 10**10           # ns


def why_not() -> str | None:
    """Why these rows cannot run here; None: they can."""
    try:
        found = import_module("interop.adapters.vulkan.context").devices()
    except interop.ExchangeError as e:
        return str(e)
    return None if found else "no Vulkan driver: install mesa-vulkan-drivers, or the GPU's"


class _Application:
    """A device, buffers and commands by the package's own calls."""

    def __init__(self) -> None:
        vk = self.vk = import_module("vulkan")
        ivk = import_module("interop.adapters.vulkan")
        app = vk.VkApplicationInfo(pApplicationName="interop bench", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
        physical = vk.vkEnumeratePhysicalDevices(instance)[0]
        extensions = list(ivk.requirements(physical, instance=instance).device_extensions)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        on = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=1)
        self.device = vk.vkCreateDevice(physical, vk.VkDeviceCreateInfo(
            pNext=on, queueCreateInfoCount=1, pQueueCreateInfos=[queue], enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions), None)
        self.queue = vk.vkGetDeviceQueue(self.device, 0, 0)
        self.usage = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
        self.context = ivk.Context.wrap(instance=instance, physical_device=physical, device=self.device, queue=self.queue, queue_family=0,
                                        extensions=extensions, features=["timelineSemaphore"])
        self.kind = next(m.index for m in self.context.memory_types if m.host_visible and m.coherent and m.cached)

    def buffer(self) -> tuple[Any, Any, int]:
        """``(VkBuffer, VkDeviceMemory, allocationSize)``, host-visible."""
        vk = self.vk
        made = vk.vkCreateBuffer(self.device, vk.VkBufferCreateInfo(size=_BUFFER, usage=self.usage, sharingMode=0), None)
        size = vk.vkGetBufferMemoryRequirements(self.device, made).size
        memory = vk.vkAllocateMemory(self.device, vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=self.kind), None)
        vk.vkBindBufferMemory(self.device, made, memory, 0)
        return made, memory, size

    def wrapped(self, made: Any, memory: Any, size: int, host_ready: bool = True) -> interop.Tensor:
        a = self.context.wrap_buffer(made, memory=memory, memory_size=size, memory_type=self.kind, usage=self.usage, owner=None,
                                     host_ready=host_ready)
        out: interop.Tensor = a.tensor((64, 64), "float32")
        return out

    def maps(self, made: Any, memory: Any, size: int) -> Callable[[], Any]:
        """Map, an array, unmap: the array is good for nothing then."""
        vk, device = self.vk, self.device

        def theirs() -> Any:
            vk.vkGetBufferMemoryRequirements(device, made)
            pointer = vk.vkMapMemory(device, memory, 0, size, 0)
            out = np.frombuffer(pointer, np.float32, 64 * 64)
            vk.vkUnmapMemory(device, memory)
            return out

        return theirs

    def imports(self, host: np.ndarray[Any, Any]) -> Callable[[], Any]:
        """A buffer over host pages, and its end."""
        vk, device, usage = self.vk, self.device, self.usage
        address = vk.ffi.cast("void*", host.ctypes.data)

        def theirs() -> None:
            external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=_HOST_POINTER)
            made = vk.vkCreateBuffer(device, vk.VkBufferCreateInfo(pNext=external, size=_HOST, usage=usage, sharingMode=0), None)
            vk.vkGetBufferMemoryRequirements(device, made)
            info = vk.VkImportMemoryHostPointerInfoEXT(handleType=_HOST_POINTER, pHostPointer=address)
            memory = vk.vkAllocateMemory(device, vk.VkMemoryAllocateInfo(pNext=info, allocationSize=_HOST, memoryTypeIndex=self.kind), None)
            vk.vkBindBufferMemory(device, made, memory, 0)
            vk.vkDestroyBuffer(device, made, None)
            vk.vkFreeMemory(device, memory, None)

        return theirs

    def submits(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Submit, wait, reset: by the package, and by the loader's functions through cffi on structs made before."""
        vk, device, queue = self.vk, self.device, self.queue
        pool = vk.vkCreateCommandPool(device, vk.VkCommandPoolCreateInfo(queueFamilyIndex=0), None)
        commands = vk.vkAllocateCommandBuffers(device, vk.VkCommandBufferAllocateInfo(commandPool=pool, level=0, commandBufferCount=1))[0]
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT))
        vk.vkEndCommandBuffer(commands)
        fence = vk.vkCreateFence(device, vk.VkFenceCreateInfo(), None)
        info = vk.VkSubmitInfo(commandBufferCount=1, pCommandBuffers=[commands])

        def package() -> None:
            vk.vkQueueSubmit(queue, 1, [info], fence)
            vk.vkWaitForFences(device, 1, [fence], True, _FOREVER)
            vk.vkResetFences(device, 1, [fence])

        ffi = import_module("cffi").FFI()
        ffi.cdef("""int vkQueueSubmit(void*, uint32_t, void*, uint64_t); int vkResetFences(void*, uint32_t, uint64_t*);
                    int vkWaitForFences(void*, uint32_t, uint64_t*, uint32_t, uint64_t);""")
        lib = ffi.dlopen("libvulkan.so.1")

        def number(handle: Any) -> int:
            return int(vk.ffi.cast("uintptr_t", handle))

        here, there, batch = [ffi.cast("void*", number(x)) for x in (queue, device, vk.ffi.addressof(info))]
        fences = ffi.new("uint64_t[1]", [number(fence)])

        def raw() -> None:
            lib.vkQueueSubmit(here, 1, batch, fences[0])
            lib.vkWaitForFences(there, 1, fences, 1, _FOREVER)
            lib.vkResetFences(there, 1, fences)

        return package, raw


@functools.cache
def names() -> dict[str, Any]:
    """The names in the statements of `bench.VULKAN_ROWS`."""
    user = _Application()
    c = user.context
    made, memory, size = user.buffer()
    pages = np.zeros(_HOST + 4096, np.uint8)
    host = pages[-pages.ctypes.data % 4096:][:_HOST]
    package, raw = user.submits()
    commands = (c.queue.record(lambda buffer: None, once=False),)
    return {
        "c": c, "made": made, "memory": memory, "size": size, "wrapped": user.wrapped, "host": host,
        "shown": user.wrapped(*user.buffer()), "unsaid": user.wrapped(*user.buffer(), host_ready=False),
        "their_map": user.maps(made, memory, size), "their_import": user.imports(host), "package_submit": package, "raw_submit": raw,
        "submit": c.queue.submit, "commands": commands,
    }  # fmt: skip
