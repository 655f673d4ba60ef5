"""A queue of a Context: submits in order, says when each is done, keeps what is submitted until then. Knows no memory and no tensors."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from interop.contract import DeviceLostError, ExchangeError, Point, as_point

from . import api as vk
from . import handles, timeline
from .commands import Commands, to_host
from .loader import VulkanError, generation
from .timeline import Timeline, TimelinePoint

if TYPE_CHECKING:
    from .context import Context

#: Seconds that the host waits for a Point that the queue cannot wait for, before it says so.
HOST_TIMEOUT = 60.0
_ROOM = 4           # commands, waits and signals of a submit that need no structs of their own
_HELD = 8           # submits that may be done and are still held: asking costs a call
_SPARE = 32         # fences and batches kept for reuse

Semaphore = Any     # (semaphore, value), or a binary semaphore: ints, ctypes, cffi, a Timeline


class FencePoint(Point):
    """When a submit is done, on a device without timeline semaphores. No queue can wait for it; the host does."""

    __slots__ = ("_armed", "_error", "_fence", "_over", "_queue")

    def __init__(self, queue: Queue, fence: int) -> None:
        """Takes the fence over, until nobody holds this."""
        self._queue, self._fence, self._over = queue, fence, False
        self._armed = False         # while vkQueueSubmit has the fence, nobody else may (Vulkan, Threading Behavior)
        self._error: BaseException | None = None

    def _poll(self) -> bool:
        if not self._over and self._armed:
            try:
                c = self._queue.usable()
                result = c.ok(c.vk.vkGetFenceStatus(c.device_handle, self._fence), "vkGetFenceStatus") if c is not None else vk.VK_SUCCESS
                self._over = result == vk.VK_SUCCESS
            except VulkanError:
                pass                # the driver could not say, for want of memory: the work goes on, and what it uses has to stay
            except (ExchangeError, DeviceLostError) as e:
                self._error, self._over = e.with_traceback(None), True
        return self._over

    def _block(self, seconds: float) -> None:
        try:
            c = self._queue.usable()
            if c is not None:
                fences = (vk.VkFence * 1)(self._fence)
                c.ok(c.vk.vkWaitForFences(c.device_handle, 1, fences, vk.VK_TRUE, int(max(seconds, 0) * 1e9)), "vkWaitForFences")
        except VulkanError:
            raise                   # to whoever waits; the Point is as pending as it was
        except (ExchangeError, DeviceLostError) as e:
            self._error, self._over = e.with_traceback(None), True

    def error(self) -> BaseException | None:
        """Why it can no longer be waited for."""
        return self._error

    def __del__(self) -> None:
        """The fence may be used anew: the queue held this while the work ran."""
        self._queue.reuse(self._fence)

    def __repr__(self) -> str:
        return f"FencePoint({self._fence:#x}{', done' if self._over else ''})"


class Queue:
    """A VkQueue that the Context knows.

    Attributes:
        context: whose it is.
        handle, family: the VkQueue and its family's index.
        timeline: what its Points are on; None where the device has no timeline semaphores: then they are fences.
        recorder: command buffers of its family.
    """

    def __init__(self, context: Context, handle: int, family: int) -> None:
        """Nothing is made before the first submit."""
        self.context, self.handle, self.family = context, handle, family
        self.recorder = context.recorder(family)
        self._timeline: Timeline | None = None
        self._last = 0                          # of the timeline: what the newest submit signals
        self._submitted: deque[tuple[Point, tuple[Any, ...]]] = deque()
        self._collecting, self._making = threading.Lock(), threading.Lock()
        self._batches: deque[_Batch] = deque()
        self._fences: set[int] = set()
        self._spare: deque[int] = deque()
        self._generation = generation()
        self._host_barrier: Commands | None = None

    @property
    def timeline(self) -> Timeline | None:
        """Made at first use, exportable where the device can."""
        if self._timeline is None and self.context.has_timelines and not self.context.closed:
            with self._making:
                if self._timeline is None:
                    self._timeline = Timeline(self.context, exportable=self.context.can_export_timelines)
        return self._timeline

    # ---- submit ----
    def record(self, fn: Callable[[int], Any], *, once: bool = True) -> Commands:
        """Commands for `submit`: ``fn(VkCommandBuffer)`` records them. See `commands.Recorder.record`."""
        return self.recorder.record(fn, once=once)

    def run(self, fn: Callable[[int], Any], *, waits: Iterable[Any] = (), signals: Iterable[Semaphore] = ()) -> Point:
        """`record` and `submit`."""
        return self.submit((self.recorder.record(fn),), waits, signals)

    def submit(self, commands: Iterable[Any] = (), waits: Iterable[Any] = (), signals: Iterable[Semaphore] = ()) -> Point:
        """One batch, under the Context's lock (Vulkan, Queue Submission).

        Args:
            commands: `Commands`, which are kept until they have run, or VkCommandBuffers of the caller's.
            waits: before any of the commands: Points, ``(semaphore, value)``, or binary semaphores. A Point that this device has no
                semaphore for is waited for on the host, at most 60 s.
            signals: after all of them: ``(semaphore, value)`` or binary semaphores.

        Returns:
            The Point at which the batch is done. Memory it uses is the caller's to keep: ``contract.keep_until(point, memory)``.

        Raises:
            DeviceLostError, VulkanError: nothing was submitted.
            TimeoutError: a Point was not reached in 60 s. What a Point failed with is raised as it is.
        """
        return self._submit(tuple(commands), self._waited(waits) if waits else [],
                            [self._pair(s, "signal") for s in signals] if signals else [])

    def wait_for(self, point: Point) -> None:
        """What is submitted later starts after `point`: one empty batch that waits, under the Context's lock."""
        waits = self._waited((point,))
        if waits:                               # else the host has waited
            self._submit((), waits, [])

    def mark(self, waits: Iterable[Any] = ()) -> Point:
        """When everything is done that the queue was given so far, whoever gave it: one empty batch that signals."""
        return self._submit((), self._waited(waits), [])

    def host_barrier(self, waits: Iterable[Any] = ()) -> Point:
        """When all of it is done, and what it wrote is visible to the host: one batch with a barrier to HOST (Vulkan, Host Access)."""
        if self._host_barrier is None:
            self._host_barrier = self.record(lambda buffer: to_host(self.context.vk, buffer), once=False)
        return self.submit((self._host_barrier,), waits)

    def _waited(self, waits: Iterable[Any]) -> list[tuple[int, int]]:
        out: dict[int, int] = {}
        for w in waits:
            for p in getattr(w, "parts", None) or (w,):
                if p is None or (not isinstance(p, (Point, Timeline)) and callable(getattr(p, "done", None))):
                    p = as_point(p)             # a Point of somebody else's
                if not isinstance(p, Point):
                    semaphore, value = self._pair(p, "wait")
                elif p.done():
                    error = p.error()
                    if error is not None:
                        raise error
                    continue
                elif isinstance(p, TimelinePoint) and p.timeline.context is self.context:
                    semaphore, value = p.timeline.handle, p.value
                else:
                    p.wait(HOST_TIMEOUT)
                    continue
                out[semaphore] = max(value, out.get(semaphore, 0))
        return list(out.items())

    def _pair(self, x: Semaphore, what: str) -> tuple[int, int]:
        if isinstance(x, (tuple, list)):
            semaphore, value = x
            return timeline.of_handle(self.context, semaphore, f"{what} semaphore"), int(value)
        return handles.number(x, f"{what} semaphore"), 0

    def _submit(self, commands: tuple[Any, ...], waits: list[tuple[int, int]], signals: list[tuple[int, int]]) -> Point:
        c = self.context
        c.check()
        c.check_lost()
        buffers = [x.use() if isinstance(x, Commands) else handles.number(x, "command buffer") for x in commands]
        own = self._timeline or self.timeline
        if len(self._submitted) > _HELD:
            self.collect()
        with c.lock:
            return self._locked(commands, buffers, waits, signals, own)

    def _locked(self, commands: tuple[Any, ...], buffers: list[int], waits: list[tuple[int, int]], signals: list[tuple[int, int]],
                own: Timeline | None) -> Point:
        c, fence = self.context, 0
        point: Point
        try:
            batch = self._batches.pop()
        except IndexError:
            batch = _Batch(_ROOM)
        if own is not None:
            value = self._last = self._last + 1
            signals.append((own.handle, value))
            point = TimelinePoint(own, value)
        else:
            fence = self._fence()
            point = FencePoint(self, fence)
        if len(buffers) > batch.room or len(waits) > batch.room or len(signals) > batch.room:
            batch = _Batch(max(len(buffers), len(waits), len(signals)))
        batch.fill(buffers, waits, signals, c.has_timelines)
        entry = (point, commands)
        if commands or own is None:
            self._submitted.append(entry)       # before the call: an interrupt behind it must not let go of what runs
        try:
            result = c.vk.vkQueueSubmit(self.handle, 1, batch.info, fence)
            if result:
                c.ok(result, "vkQueueSubmit")
        except BaseException as e:
            if isinstance(e, (ExchangeError, DeviceLostError)):
                self._not_submitted(entry, own)
            raise
        finally:
            if isinstance(point, FencePoint):
                point._armed = True
        if batch.room == _ROOM and len(self._batches) < _SPARE:
            self._batches.append(batch)
        return point

    def _not_submitted(self, entry: tuple[Point, tuple[Any, ...]], own: Timeline | None) -> None:
        if own is not None:
            self._last -= 1
        if self._submitted and self._submitted[-1] is entry:
            self._submitted.pop()
        for x in entry[1]:
            if isinstance(x, Commands):
                x.submitted = False
        if isinstance(entry[0], FencePoint):
            entry[0]._over = True               # nothing will signal it

    # ---- what is kept while work runs ----
    def collect(self) -> None:
        """Let go of what was submitted and has run. Never blocks."""
        if not self._collecting.acquire(blocking=False):
            return                              # another thread does it
        try:
            while self._submitted and self._submitted[0][0].done():
                self._submitted.popleft()
        finally:
            self._collecting.release()

    @property
    def pending(self) -> int:
        """How many submits are held because they may still run."""
        self.collect()
        return len(self._submitted)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all that interop submitted is done, in slices that let Ctrl-C in; False: it is not, after so many seconds.

        VulkanError: the driver cannot say, for want of memory.
        """
        end = time.monotonic() + timeout
        try:
            if self._timeline is not None:
                self._timeline.at(self._last).wait(timeout)
            for point, _ in list(self._submitted):
                point.wait(max(end - time.monotonic(), 0))
        except TimeoutError:
            return False
        except VulkanError:
            raise                               # nobody knows whether it is done
        except (ExchangeError, DeviceLostError):
            pass                                # lost: it never will be otherwise
        self.collect()
        return True

    # ---- fences ----
    def usable(self) -> Context | None:
        """The Context; None: it was closed, after all work was done. Raises where its device is lost or the parent process'."""
        c = self.context
        c.check_lost()
        if self._generation != generation():
            raise ExchangeError("this work was submitted before fork: a child process owns no driver object")
        return c if c.device_handle else None

    def _fence(self) -> int:
        c = self.context
        try:
            fence = self._spare.popleft()
        except IndexError:
            out = vk.VkFence()
            c.ok(c.vk.vkCreateFence(c.device_handle, vk.VkFenceCreateInfo(), None, ctypes.byref(out)), "vkCreateFence")
            self._fences.add(out.value)
            return handles.owned(out.value, "vkCreateFence")
        c.ok(c.vk.vkResetFences(c.device_handle, 1, (vk.VkFence * 1)(fence)), "vkResetFences")
        return fence

    def reuse(self, fence: int) -> None:
        """A fence that nobody asks about any more. Called by the garbage collector: takes no lock and raises nothing."""
        c = self.context
        if not c.alive or fence not in self._fences:
            return
        if len(self._spare) < _SPARE and c.lost is None:
            self._spare.append(fence)
        else:
            self._fences.discard(fence)
            c.vk.vkDestroyFence(c.device_handle, fence, None)

    def close(self) -> None:
        """Destroy what it made. Its work is done, or the device lost. The VkQueue is the device's."""
        self._submitted.clear()
        self._host_barrier = None
        self._spare.clear()
        fences, self._fences = self._fences, set()
        for fence in fences:
            self.context.vk.vkDestroyFence(self.context.device_handle, fence, None)
        if self._timeline is not None:
            self._timeline.reached = self._last     # Points that are asked later: the work is done
            self._timeline.close()

    def __repr__(self) -> str:
        return f"<Queue {self.handle:#x} of family {self.family}>"


class _Batch:
    """The structs of a submit, made once and filled in for each: making them takes longer than the call."""

    __slots__ = ("_binary", "_commands", "_counts", "_signal_values", "_signals", "_timeline", "_wait_values", "_waits", "info", "room")

    def __init__(self, room: int) -> None:
        """For at most `room` commands, waits and signals."""
        self.room = room
        self._commands, self._waits, self._signals = (vk.VkCommandBuffer * room)(), (vk.VkSemaphore * room)(), (vk.VkSemaphore * room)()
        self._wait_values, self._signal_values = (ctypes.c_uint64 * room)(), (ctypes.c_uint64 * room)()
        stages = (ctypes.c_uint32 * room)(*[vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT] * room)
        self._timeline = vk.VkTimelineSemaphoreSubmitInfo(pWaitSemaphoreValues=self._wait_values,
                                                          pSignalSemaphoreValues=self._signal_values)
        self.info = vk.VkSubmitInfo(pNext=self._timeline, pWaitSemaphores=self._waits, pWaitDstStageMask=stages,
                                    pCommandBuffers=self._commands, pSignalSemaphores=self._signals)
        self._binary = False
        self._counts = (-1, -1, -1)

    def fill(self, commands: list[int], waits: list[tuple[int, int]], signals: list[tuple[int, int]], timelines: bool) -> None:
        """Make it this submit."""
        info, values = self.info, self._timeline
        for i, x in enumerate(commands):
            self._commands[i] = x
        for i, (semaphore, value) in enumerate(waits):
            self._waits[i], self._wait_values[i] = semaphore, value
        for i, (semaphore, value) in enumerate(signals):
            self._signals[i], self._signal_values[i] = semaphore, value
        counts = len(commands), len(waits), len(signals)
        if counts != self._counts:
            self._counts = counts
            info.commandBufferCount = counts[0]
            info.waitSemaphoreCount = values.waitSemaphoreValueCount = counts[1]
            info.signalSemaphoreCount = values.signalSemaphoreValueCount = counts[2]
        if not timelines and not self._binary:
            info.pNext, self._binary = None, True      # the struct is of an extension that is off
