"""A renderer with its own VkDevice, made by the package `vulkan`, fills a ring of three frames; PyTorch reads each. Nothing is copied.

The renderer submits by itself. A frame is written when the renderer's timeline reaches its number, and written again only after whoever
reads it is done: `lease.after` has what to wait for.

    python examples/renderer_to_torch.py      takes Vulkan, the package vulkan, and PyTorch; else NumPy
"""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from typing import Any

import interop
from interop.adapters import vulkan as ivk  # never plain `vulkan`: that is the renderer's package

H, W, FRAMES = 240, 320, 12


class Renderer:
    """Stands for yours: a device, a queue, and commands that draw frame n, which here is n everywhere."""

    def __init__(self, vk: Any) -> None:
        self.vk = vk
        app = vk.VkApplicationInfo(pApplicationName="renderer", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        self.instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
        self.physical = vk.vkEnumeratePhysicalDevices(self.instance)[0]
        need = ivk.requirements(self.physical, instance=self.instance)
        self.extensions, self.family, self.lock = list(need.device_extensions), 0, threading.Lock()
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=self.family, queueCount=1, pQueuePriorities=[1.0])
        on = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=1)
        self.device = vk.vkCreateDevice(self.physical, vk.VkDeviceCreateInfo(
            pNext=on, queueCreateInfoCount=1, pQueueCreateInfos=[queue], enabledExtensionCount=len(self.extensions),
            ppEnabledExtensionNames=self.extensions), None)
        self.queue = vk.vkGetDeviceQueue(self.device, self.family, 0)
        self.pool = vk.vkCreateCommandPool(self.device, vk.VkCommandPoolCreateInfo(queueFamilyIndex=self.family), None)

    def draw(self, target: ivk.Native, n: int, wait: list[tuple[int, int]], signal: tuple[int, int]) -> None:
        vk = self.vk
        commands = vk.vkAllocateCommandBuffers(self.device, vk.VkCommandBufferAllocateInfo(
            commandPool=self.pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1))[0]
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT))
        vk.vkCmdFillBuffer(commands, target.handle, target.offset, target.size, n * 0x01010101)
        vk.vkEndCommandBuffer(commands)
        values = vk.VkTimelineSemaphoreSubmitInfo(waitSemaphoreValueCount=len(wait), pWaitSemaphoreValues=[v for _, v in wait],
                                                  signalSemaphoreValueCount=1, pSignalSemaphoreValues=[signal[1]])
        stages = [vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT] * len(wait)
        submit = vk.VkSubmitInfo(pNext=values, waitSemaphoreCount=len(wait), pWaitSemaphores=[s for s, _ in wait], pWaitDstStageMask=stages,
                                 commandBufferCount=1, pCommandBuffers=[commands], signalSemaphoreCount=1, pSignalSemaphores=[signal[0]])
        with self.lock:
            vk.vkQueueSubmit(self.queue, 1, [submit], None)


def main(framework: str) -> int:
    """Exit code: 0 where every frame arrived whole, in place and without a copy."""
    try:
        import vulkan
    except (ImportError, OSError) as e:
        print(f"nothing shown: this takes the Python package vulkan (pip install vulkan) and a Vulkan loader: {e}")
        return 0
    try:
        mine = Renderer(vulkan)
    except vulkan.VkErrorIncompatibleDriver:
        print("no Vulkan here, nothing shown: there is a loader and no driver")
        return 0
    gpu = ivk.Context.wrap(instance=mine.instance, physical_device=mine.physical, device=mine.device, queue=mine.queue, lock=mine.lock,
                           queue_family=mine.family, extensions=mine.extensions, features=["timelineSemaphore"])
    ring = [interop.empty((H, W, 4), "uint8", device=gpu) for _ in range(3)]
    rendered, wrong = gpu.timeline(), 0                         # yours, too: .handle is a VkSemaphore
    with interop.copy_guard("allow") as copies:
        for n in range(1, FRAMES + 1):
            frame = ring[n % 3]
            lease = interop.acquire(frame, gpu, "write")        # my queue, driven by me: nothing is submitted for me
            mine.draw(ivk.native(frame), n, lease.after.native() if not lease.after.done() else [], (rendered.handle, n))
            lease.release(rendered.at(n))                       # written once the semaphore reaches n
            with interop.acquire(frame, framework, "read") as x:
                wrong += int(x.min()) != n or int(x.max()) != n
    print(f"{gpu.physical.name}: {FRAMES} frames through a ring of 3 into {framework}: copies = {len(copies)}, wrong = {wrong}")
    return int(bool(copies or wrong))


if __name__ == "__main__":
    sys.exit(main("torch" if find_spec("torch") else "numpy"))
