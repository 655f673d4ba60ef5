"""Command buffers, recorded once or to be kept, each in a pool of its own, so that threads record without a lock."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interop.contract import ExchangeError

from . import api as vk
from . import handles
from .loader import generation

if TYPE_CHECKING:
    from .context import Context

_SPARE = 32         # command buffers kept for reuse in each family; more were in flight at once only for a moment


class Commands:
    """A recorded command buffer. Goes back for reuse when nobody holds it, which a submit does until its work is done.

    Attributes:
        handle: the VkCommandBuffer.
        once: it is good for one submit.
    """

    __slots__ = ("__weakref__", "_pool", "_recorder", "handle", "once", "submitted")

    def __init__(self, recorder: Recorder, pool: int, handle: int, once: bool) -> None:
        """`Recorder.record` makes it."""
        self._recorder, self._pool, self.handle, self.once, self.submitted = recorder, pool, handle, once, False

    def use(self) -> int:
        """The handle, for a submit; ExchangeError where it was recorded for one and has had it."""
        if self.once:
            if self.submitted:
                raise ExchangeError("these commands were recorded for one submit and have been submitted", "record(fn, once=False)")
            self.submitted = True
        return self.handle

    def __del__(self) -> None:
        """Back to the recorder."""
        self._recorder.give_back(self._pool, self.handle)

    def __repr__(self) -> str:
        return f"<Commands {self.handle:#x}{', submitted' if self.submitted else ''}>"


class Recorder:
    """The command buffers of one queue family of a Context."""

    def __init__(self, context: Context, family: int) -> None:
        """Nothing is made yet."""
        self._context, self.family = context, family
        self._spare: deque[tuple[int, int]] = deque()
        self._pools: set[int] = set()
        self._generation = generation()

    @property
    def made(self) -> int:
        """How many command buffers there are now, in use and spare."""
        return len(self._pools)

    def record(self, fn: Callable[[int], Any], *, once: bool = True) -> Commands:
        """Begin a command buffer, call ``fn(VkCommandBuffer)``, end it.

        Args:
            fn: records. What it raises is passed on, and the command buffer is reused.
            once: for one submit; False: for any number, also while earlier ones run (VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT).
        """
        c = self._context
        c.check()
        t = c.vk
        try:
            pool, buffer = self._spare.pop()
        except IndexError:
            pool, buffer = self._make()
        out = Commands(self, pool, buffer, once)
        info = _ONCE if once else _OFTEN
        # VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT: beginning it anew resets it
        spoiled = True
        try:
            c.ok(t.vkBeginCommandBuffer(buffer, info), "vkBeginCommandBuffer")
            try:
                fn(buffer)
            except BaseException:
                spoiled = t.vkEndCommandBuffer(buffer) < 0
                raise
            c.ok(t.vkEndCommandBuffer(buffer), "vkEndCommandBuffer")
            spoiled = False
        finally:
            if spoiled:                 # in a state that nobody knows: not to be used again
                self._drop(pool)
        return out

    def _make(self) -> tuple[int, int]:
        c = self._context
        flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT | vk.VK_COMMAND_POOL_CREATE_TRANSIENT_BIT
        pool = vk.VkCommandPool()
        info = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=self.family)
        c.ok(c.vk.vkCreateCommandPool(c.device_handle, info, None, ctypes.byref(pool)), "vkCreateCommandPool")
        try:
            buffers = (vk.VkCommandBuffer * 1)()
            which = vk.VkCommandBufferAllocateInfo(commandPool=pool.value, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1)
            c.ok(c.vk.vkAllocateCommandBuffers(c.device_handle, which, buffers), "vkAllocateCommandBuffers")
        except BaseException:
            c.vk.vkDestroyCommandPool(c.device_handle, pool.value, None)
            raise
        self._pools.add(pool.value)
        return pool.value, handles.owned(buffers[0] or 0, "vkAllocateCommandBuffers")

    def give_back(self, pool: int, buffer: int) -> None:
        """A command buffer that nobody uses. Called by the garbage collector: takes no lock and raises nothing."""
        c = self._context
        if not c.alive or pool not in self._pools:
            return
        if len(self._spare) < _SPARE:
            self._spare.append((pool, buffer))
        else:
            self._drop(pool)

    def _drop(self, pool: int) -> None:
        self._pools.discard(pool)
        self._context.vk.vkDestroyCommandPool(self._context.device_handle, pool, None)

    def close(self) -> None:
        """Destroy all pools; nothing recorded from them may be running."""
        pools, self._pools = self._pools, set()
        self._spare.clear()
        for pool in pools:
            self._context.vk.vkDestroyCommandPool(self._context.device_handle, pool, None)


_ONCE = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
_OFTEN = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT)
_TO_HOST = (vk.VkMemoryBarrier * 1)(vk.VkMemoryBarrier(srcAccessMask=vk.VK_ACCESS_MEMORY_WRITE_BIT,
                                                       dstAccessMask=vk.VK_ACCESS_HOST_READ_BIT | vk.VK_ACCESS_HOST_WRITE_BIT))
_BETWEEN = (vk.VkMemoryBarrier * 1)(vk.VkMemoryBarrier(srcAccessMask=vk.VK_ACCESS_MEMORY_WRITE_BIT,
                                                       dstAccessMask=vk.VK_ACCESS_MEMORY_READ_BIT | vk.VK_ACCESS_MEMORY_WRITE_BIT))


def to_host(table: Any, buffer: int) -> None:
    """Record: what was written before is visible to the host once the submit is done (Vulkan, Host Access)."""
    table.vkCmdPipelineBarrier(buffer, vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT, 0, 1, _TO_HOST,
                               0, None, 0, None)


def between(table: Any, buffer: int) -> None:
    """Record: commands that come later start after those before, and see what they wrote."""
    table.vkCmdPipelineBarrier(buffer, vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, 0, 1, _BETWEEN,
                               0, None, 0, None)
