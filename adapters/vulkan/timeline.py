"""Timeline semaphores, and Points on them: (VkSemaphore, value). Knows the Context only as who has the device and its functions."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from typing import TYPE_CHECKING, Any

from interop.contract import DeviceLostError, ExchangeError, Point

from . import api as vk
from . import handles
from .loader import VulkanError, generation

if TYPE_CHECKING:
    from .context import Context

_OPAQUE_FD = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT


class TimelinePoint(Point):
    """When a timeline semaphore reaches a value. Of work that interop submitted, or of the user's own submit."""

    __slots__ = ("_error", "_over", "timeline", "value")

    def __init__(self, timeline: Timeline, value: int) -> None:
        """`Timeline.at` makes it."""
        self.timeline, self.value = timeline, value
        self._over = False
        self._error: BaseException | None = None

    def _poll(self) -> bool:
        if not self._over:
            timeline = self.timeline
            try:
                self._over = self.value <= timeline.reached or self.value <= timeline.ask()
            except VulkanError:
                pass                # the driver could not say, for want of memory: the work goes on, and what it uses has to stay
            except (ExchangeError, DeviceLostError) as e:       # nobody can say any more, so nothing is to be waited for
                self._error, self._over = e.with_traceback(None), True
        return self._over

    def _block(self, seconds: float) -> None:
        try:
            self.timeline.block(self.value, seconds)
        except VulkanError:
            raise                   # to whoever waits; the Point is as pending as it was
        except (ExchangeError, DeviceLostError) as e:
            self._error, self._over = e.with_traceback(None), True

    def error(self) -> BaseException | None:
        """Why it can no longer be waited for: the device is lost, the timeline closed, the process forked."""
        return self._error

    def native(self) -> list[tuple[int, int]]:
        """``[(VkSemaphore, value)]``, for the wait semaphores of a submit on the same VkDevice."""
        return [(self.timeline.handle, self.value)]

    def stream_wait(self, stream: Any) -> bool:
        """One empty batch that waits, on a VkQueue (an int, or a `Queue`) that the Context knows; False on any other.

        It is submitted under the Context's lock.
        """
        if self._poll():
            return self._error is None
        queue = self.timeline.context.find_queue(stream)
        if queue is None:
            return False
        queue.wait_for(self)
        return True

    def __repr__(self) -> str:
        return f"TimelinePoint({self.timeline.handle:#x}, {self.value}{', done' if self._over else ''})"


class Timeline:
    """A timeline semaphore (Vulkan 1.2, or VK_KHR_timeline_semaphore): a number that only grows.

    Attributes:
        context: the Context that it is of.
        handle: the VkSemaphore.
        exportable: whether `export` works.
        reached: the highest value that it is known to have had; `value` asks.
    """

    def __init__(self, context: Context, initial: int = 0, *, exportable: bool = False, fd: int | None = None) -> None:
        """Use ``Context.timeline`` or ``Context.import_timeline``."""
        context.check()
        self.context, self.exportable, self.reached = context, exportable, initial
        self.handle = 0
        self._generation = generation()
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=initial)
        info = vk.VkSemaphoreCreateInfo(pNext=kind)
        if exportable:
            vk.chain(info, vk.VkExportSemaphoreCreateInfo(handleTypes=_OPAQUE_FD))
        out = vk.VkSemaphore()
        context.ok(context.vk.vkCreateSemaphore(context.device_handle, info, None, ctypes.byref(out)), "vkCreateSemaphore")
        self.handle = handles.owned(out.value, "vkCreateSemaphore")
        self._key = context.own(functools.partial(context.vk.vkDestroySemaphore, context.device_handle, self.handle, None))
        if fd is not None:
            try:
                self._import(fd)
            except BaseException:
                self.close()
                raise

    def _import(self, fd: int) -> None:
        c = self.context
        own = os.dup(fd)                    # close-on-exec; the driver owns it once it has taken it, the caller's stays the caller's
        info = vk.VkImportSemaphoreFdInfoKHR(semaphore=self.handle, handleType=_OPAQUE_FD, fd=own)
        try:
            c.ok(c.vk.vkImportSemaphoreFdKHR(c.device_handle, info), "vkImportSemaphoreFdKHR")
        except BaseException:
            os.close(own)
            raise

    @property
    def value(self) -> int:
        """What it is now (vkGetSemaphoreCounterValue). DeviceLostError after a loss."""
        return self.ask()

    def ask(self) -> int:
        """`value`; also keeps it as `reached`."""
        self._usable()
        out, c = ctypes.c_uint64(), self.context
        result = c.vk.vkGetSemaphoreCounterValue(c.device_handle, self.handle, ctypes.byref(out))
        if result:
            c.ok(result, "vkGetSemaphoreCounterValue")
        value = out.value
        if value == 0xFFFFFFFFFFFFFFFF:         # what drivers set it to when they lose the device
            raise c.lose(DeviceLostError(f"the timeline semaphore {self.handle:#x} was set to 2**64 - 1: the VkDevice is lost"))
        if value > self.reached:
            self.reached = value
        return value

    def _usable(self) -> None:
        c = self.context
        c.check_lost()
        if self._generation != generation():
            raise ExchangeError("this timeline was made before fork: a child process owns no driver object")
        if not self.handle or not c.device_handle:
            raise ExchangeError("this timeline was closed")

    def at(self, value: int) -> TimelinePoint:
        """The Point at which it has reached `value`: of work that signals it, whoever submits that, now or later."""
        if not isinstance(value, int) or not 0 <= value < 2**64 - 1:
            raise ValueError(f"value {value!r}: an int from 0 to 2**64 - 2")
        return TimelinePoint(self, value)

    def signal(self, value: int) -> None:
        """Set it from the host (vkSignalSemaphore). ExchangeError where it is there already: it only grows."""
        now = self.ask()
        if not isinstance(value, int) or not 0 <= value < 2**64 - 1:
            raise ValueError(f"value {value!r}: an int from 0 to 2**64 - 2")
        if value <= now:
            raise ExchangeError(f"value {value}: the timeline is at {now} and only grows")
        c = self.context
        info = vk.VkSemaphoreSignalInfo(semaphore=self.handle, value=value)
        c.ok(c.vk.vkSignalSemaphore(c.device_handle, info), "vkSignalSemaphore")

    def block(self, value: int, seconds: float) -> None:
        """Wait on the host until `value` is reached, at most `seconds`, without the GIL. Returns either way (vkWaitSemaphores)."""
        self._usable()
        c = self.context
        wait = vk.VkSemaphoreWaitInfo(pSemaphores=[self.handle], pValues=[value])
        result = c.ok(c.vk.vkWaitSemaphores(c.device_handle, wait, int(max(seconds, 0) * 1e9)), "vkWaitSemaphores")
        if result == vk.VK_SUCCESS and value > self.reached and value > self.ask():
            time.sleep(0.0005)              # allowed where the device is being lost: do not spin

    def export(self) -> int:
        """A new file descriptor of the semaphore (VK_KHR_external_semaphore_fd), opaque, close-on-exec; the caller's to close."""
        if not self.exportable:
            can = self.context.can_export_timelines
            raise ExchangeError("this timeline was not made exportable" if can else "timelines of this device are not exported: it lacks "
                                "VK_KHR_external_semaphore_fd, or that for timelines", "context.timeline(exportable=True)" if can else None)
        self._usable()
        c, fd = self.context, ctypes.c_int(-1)
        info = vk.VkSemaphoreGetFdInfoKHR(semaphore=self.handle, handleType=_OPAQUE_FD)
        c.ok(c.vk.vkGetSemaphoreFdKHR(c.device_handle, info, ctypes.byref(fd)), "vkGetSemaphoreFdKHR")
        if fd.value < 0:
            raise ExchangeError("vkGetSemaphoreFdKHR succeeded and gave no descriptor")
        os.set_inheritable(fd.value, False)
        return fd.value

    def close(self) -> None:
        """Destroy it now. Idempotent. No queue may have work left that waits for it or signals it (Vulkan, vkDestroySemaphore).

        One that is only dropped goes with its Context: nobody knows whether the application's submits still use it.
        """
        if self.handle:
            self.handle = 0
            self.context.release(self._key)

    def __repr__(self) -> str:
        return f"<Timeline {self.handle:#x}, {'closed' if not self.handle else f'at {self.reached} or more'}>"


def of_handle(context: Context, semaphore: Any, what: str = "semaphore") -> int:
    """A VkSemaphore as an int: a Timeline of the same Context, or any handle."""
    if isinstance(semaphore, Timeline):
        if semaphore.context is not context:
            raise ExchangeError(f"{what}: the timeline is another Context's")
        semaphore._usable()
        return semaphore.handle
    return handles.number(semaphore, what)


def can_export(table: Any, physical_device: int) -> bool:
    """Whether the device gives a descriptor of a timeline semaphore (vkGetPhysicalDeviceExternalSemaphoreProperties)."""
    kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE)
    info = vk.VkPhysicalDeviceExternalSemaphoreInfo(pNext=kind, handleType=_OPAQUE_FD)
    out = vk.VkExternalSemaphoreProperties()
    table.vkGetPhysicalDeviceExternalSemaphoreProperties(physical_device, info, ctypes.byref(out))
    return bool(out.externalSemaphoreFeatures & vk.VK_EXTERNAL_SEMAPHORE_FEATURE_EXPORTABLE_BIT)
