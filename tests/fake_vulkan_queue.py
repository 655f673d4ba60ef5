"""The fake driver's commands, submits, semaphores and fences. Work runs when the host waits, or one submit after each question."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from interop.adapters.vulkan import api as vk

_ALL, _HOST = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
_DEVICE = vk.VK_ACCESS_MEMORY_READ_BIT | vk.VK_ACCESS_MEMORY_WRITE_BIT


class Submit:
    """One batch on its way."""

    def __init__(self, queue: Any, commands: list[Any], waits: list[tuple[Any, int]], signals: list[tuple[Any, int]], fence: Any) -> None:
        self.queue, self.commands, self.waits, self.signals, self.fence = queue, commands, waits, signals, fence
        self.uses = [*(o for c in commands for o in (c, *c.uses)), *(s for s, _ in (*waits, *signals)), *([fence] if fence else [])]


class Queues:
    """Functions of queues and of what they run."""

    def __init__(self: Any) -> None:
        self.queues: list[Any] = []

    # ---- pools and recording ----
    def vkCreateCommandPool(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("CommandPool", self.get(device, "Device"), family=info[0].queueFamilyIndex, buffers=[]).handle
        return 0

    def vkDestroyCommandPool(self: Any, device: int, pool: int, _: Any) -> None:
        gone = self.end(pool, "CommandPool")
        for b in gone.buffers if gone else ():
            if b.busy:
                self.blame("VUID-vkDestroyCommandPool-commandPool-00041", f"{b} is pending")
            b.alive = False

    def vkAllocateCommandBuffers(self: Any, device: int, info: Any, out: Any) -> int:
        pool = self.get(info[0].commandPool, "CommandPool")
        for i in range(info[0].commandBufferCount):
            made = self.make("CommandBuffer", pool, state="initial", work=[], uses=[], once=False, often=False)
            pool.buffers.append(made)
            out[i] = made.handle
        return 0

    def vkBeginCommandBuffer(self: Any, buffer: int, info: Any) -> int:
        b = self.get(buffer, "CommandBuffer")
        if b.busy or b.state == "recording":
            self.blame("VUID-vkBeginCommandBuffer-commandBuffer-00049", f"{b} is {'pending' if b.busy else b.state}")
        b.state, b.work, b.uses = "recording", [], []
        b.once = bool(info[0].flags & vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        b.often = bool(info[0].flags & vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT)
        return 0

    def vkEndCommandBuffer(self: Any, buffer: int) -> int:
        b = self.get(buffer, "CommandBuffer")
        if b.state != "recording":
            self.blame("VUID-vkEndCommandBuffer-commandBuffer-00059", f"{b} is {b.state}")
        b.state = "executable"
        return 0

    def record(self: Any, buffer: int, work: Callable[[Any], None], *uses: Any) -> Any:
        b = self.get(buffer, "CommandBuffer")
        if b.state != "recording":
            self.blame("commandBuffer-recording", f"{b} is {b.state}")
        b.work.append(work)
        for o in uses:
            b.uses.extend((o, o.memory) if getattr(o, "memory", None) is not None else (o,))
        return b

    def ranged(self: Any, buffer: int, at: int, n: int, usage: int, what: str) -> Any:
        """A buffer that a command uses from `at` on."""
        b = self.get(buffer, "Buffer")
        if b.memory is None or not b.memory.alive:
            raise AssertionError(f"{what}: {b} has no memory")
        if not b.usage & usage:
            self.blame(f"VUID-{what}-usage", f"{b} was made with {b.usage:#x}")
        if not n or at + n > b.size:
            self.blame(f"VUID-{what}-size", f"{n} bytes at {at} of {b.size}")
        return b

    def vkCmdCopyBuffer(self: Any, buffer: int, src: int, dst: int, count: int, regions: Any) -> None:
        source, to = self.get(src, "Buffer"), self.get(dst, "Buffer")
        moves = [(r.srcOffset, r.dstOffset, r.size) for r in (regions[i] for i in range(count))]
        for s, d, n in moves:
            self.ranged(src, s, n, vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT, "vkCmdCopyBuffer-src")
            self.ranged(dst, d, n, vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT, "vkCmdCopyBuffer-dst")
        if source.memory.backing is to.memory.backing and count <= 64:
            reads = [(source.offset + s, source.offset + s + n) for s, _, n in moves]
            if any(to.offset + d < hi and lo < to.offset + d + n for lo, hi in reads for _, d, n in moves):
                self.blame("VUID-vkCmdCopyBuffer-pRegions-00117", "regions overlap in memory")

        def run(queue: Any) -> None:
            for s, _, n in moves:
                self.touch(queue, source, s, n, False)
            data = [source.memory.backing.read(source.offset + s, n) for s, _, n in moves]
            for (_, d, n), chunk in zip(moves, data, strict=True):
                self.touch(queue, to, d, n, True, fresh=count > 64)
                to.memory.backing.write(to.offset + d, chunk, queue)

        self.record(buffer, run, source, to)

    def vkCmdFillBuffer(self: Any, buffer: int, dst: int, at: int, n: int, word: int) -> None:
        to = self.ranged(dst, at, n, vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT, "vkCmdFillBuffer")
        if at % 4 or n % 4:
            self.blame("VUID-vkCmdFillBuffer-dstOffset-00025", f"{n} bytes at {at}")

        def run(queue: Any) -> None:
            self.touch(queue, to, at, n, True)
            to.memory.backing.write(to.offset + at, word.to_bytes(4, "little") * (n // 4), queue)

        self.record(buffer, run, to)

    def vkCmdPipelineBarrier(self: Any, buffer: int, src: int, dst: int, flags: int, n: int, barriers: Any, n_buffers: int,
                             buffers: Any, n_images: int, images: Any) -> None:
        masks = [(barriers[i].srcAccessMask, barriers[i].dstAccessMask) for i in range(n)]
        changes = []
        for i in range(n_images):
            m = images[i]
            masks.append((m.srcAccessMask, m.dstAccessMask))
            changes.append((self.get(m.image, "Image"), m.oldLayout, m.newLayout))
        if src & _HOST and not src & _ALL:
            self.blame("barrier", "from the host: a submit does that")

        def run(queue: Any) -> None:
            for before, after in masks:
                if dst & _HOST and after & vk.VK_ACCESS_HOST_READ_BIT and before & vk.VK_ACCESS_MEMORY_WRITE_BIT and src & _ALL:
                    for b in self.backings:
                        b.show(queue)
                if src & _ALL and dst & _ALL and before & vk.VK_ACCESS_MEMORY_WRITE_BIT and after & _DEVICE == _DEVICE:
                    queue.touched.clear()
            for image, old, new in changes:
                self.transition(image, old, new)

        self.record(buffer, run, *(c[0] for c in changes))

    def touch(self: Any, queue: Any, b: Any, at: int, n: int, write: bool, fresh: bool = False) -> None:
        """A command reads or writes; what it comes after without a barrier must not touch the same bytes."""
        if fresh:
            return
        lo = b.offset + at
        for backing, first, last, wrote in queue.touched:
            if backing is b.memory.backing and first < lo + n and lo < last and (write or wrote):
                self.blame("SYNC-HAZARD", f"{b}: bytes {lo} to {lo + n} {'written' if write else 'read'} with no barrier after a "
                           f"{'write' if wrote else 'read'}")
        queue.touched.append((b.memory.backing, lo, lo + n, write))

    # ---- submits ----
    def vkQueueSubmit(self: Any, queue: int, count: int, infos: Any, fence: int) -> int:
        q = self.get(queue, "Queue")
        f = self.get(fence, "Fence") if fence else None
        if f is not None and (f.signaled or f.busy):
            self.blame("VUID-vkQueueSubmit-fence-00063", f"{f} is {'signalled' if f.signaled else 'in use'}")
        for k in range(count):
            i, more = infos[k], self.chain(infos[k])
            values = more.get("VkTimelineSemaphoreSubmitInfo")
            if values is not None and "timelineSemaphore" not in q.parent.features:
                self.blame("VUID-VkSubmitInfo-pNext", "timeline values, and the feature is off")
            waits = [(self.get(i.pWaitSemaphores[n], "Semaphore"), values.pWaitSemaphoreValues[n] if values else 0)
                     for n in range(i.waitSemaphoreCount)]
            signals = [(self.get(i.pSignalSemaphores[n], "Semaphore"), values.pSignalSemaphoreValues[n] if values else 0)
                       for n in range(i.signalSemaphoreCount)]
            commands = [self.get(i.pCommandBuffers[n], "CommandBuffer") for n in range(i.commandBufferCount)]
            for c in commands:
                if c.state != "executable":
                    self.blame("VUID-vkQueueSubmit-pCommandBuffers-00070", f"{c} is {c.state}")
                if c.busy and not c.often:
                    self.blame("VUID-vkQueueSubmit-pCommandBuffers-00071", f"{c} is pending")
                if c.parent.family != q.family:
                    self.blame("VUID-vkQueueSubmit-pCommandBuffers-00074", f"{c} is of family {c.parent.family}")
                for o in c.uses:
                    if not o.alive:
                        self.blame("VUID-vkQueueSubmit-commandBuffer", f"{c} uses {o}, which was destroyed")
                if c.once:
                    c.state = "invalid"
            for s, value in signals:
                pending = [v for x in self.queues for w in x.work for t, v in w.signals if t is s]
                if s.timeline and value <= max([s.value, *pending]):
                    self.blame("VUID-VkSubmitInfo-pSignalSemaphores-03242", f"{s} is signalled with {value}, and is at {s.value} {pending}")
            made = Submit(q, commands, waits, signals, f if k == count - 1 else None)
            for o in made.uses:
                o.busy += 1
            q.work.append(made)
        self.changed.notify_all()
        return 0

    def _can_run(self, s: Submit) -> bool:
        return all(w.value >= value if w.timeline else w.value for w, value in s.waits)

    def run_one(self: Any) -> bool:
        """The device does one submit more, if it can; whether it did."""
        if self.hold or self.lost:
            return False
        for q in self.queues:
            if q.work and self._can_run(q.work[0]):
                s = q.work[0]
                for w, _ in s.waits:
                    if not w.timeline:
                        w.value = 0
                if s.waits:
                    q.touched.clear()
                for c in s.commands:
                    for work in c.work:
                        work(q)
                q.work.popleft()
                self._finish(s)
                for sem, value in s.signals:
                    sem.value = value if sem.timeline else 1
                if s.fence is not None:
                    s.fence.signaled = True
                self.changed.notify_all()
                return True
        return False

    def run_all(self: Any) -> None:
        """The device does all that it can."""
        with self.lock:
            while self.run_one():
                pass

    def _finish(self, s: Submit) -> None:
        for o in s.uses:
            o.busy -= 1

    def _asked(self: Any) -> None:
        """A question was answered: the device goes on by one submit."""
        for q in self.queues:
            if not q.work:
                q.touched.clear()           # the host knows that it is done
        self.run_one()

    def _until(self: Any, ready: Callable[[], bool], seconds: float) -> bool:
        from fake_vulkan import Refused

        end = time.monotonic() + min(seconds, 1e6)
        while not ready():
            if self.lost:
                raise Refused(vk.VK_ERROR_DEVICE_LOST)
            if self.run_one():
                continue
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.changed.wait(min(left, 0.05))
        for q in self.queues:
            if not q.work:
                q.touched.clear()
        return True

    # ---- fences ----
    def vkCreateFence(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("Fence", self.get(device, "Device"), signaled=bool(info[0].flags & 1)).handle
        return 0

    def vkDestroyFence(self: Any, device: int, fence: int, _: Any) -> None:
        self.end(fence, "Fence")

    def vkResetFences(self: Any, device: int, count: int, fences: Any) -> int:
        for i in range(count):
            f = self.get(fences[i], "Fence")
            if f.busy:
                self.blame("VUID-vkResetFences-pFences-01123", f"{f} is in use")
            f.signaled = False
        return 0

    def vkGetFenceStatus(self: Any, device: int, fence: int) -> int:
        answer = self.get(fence, "Fence").signaled
        self._asked()
        return 0 if answer else vk.VK_NOT_READY

    def vkWaitForFences(self: Any, device: int, count: int, fences: Any, every: int, timeout: int) -> int:
        found = [self.get(fences[i], "Fence") for i in range(count)]
        return 0 if self._until(lambda: all(f.signaled for f in found), timeout / 1e9) else vk.VK_TIMEOUT

    # ---- semaphores ----
    def vkCreateSemaphore(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        d, more = self.get(device, "Device"), self.chain(info[0])
        kind = more.get("VkSemaphoreTypeCreateInfo")
        if kind is not None and kind.semaphoreType and "timelineSemaphore" not in d.features:
            self.blame("VUID-VkSemaphoreTypeCreateInfo-timelineSemaphore-03252", "the feature is off")
        timeline = bool(kind and kind.semaphoreType)
        out[0] = self.make("Semaphore", d, timeline=timeline, value=kind.initialValue if timeline else 0,
                           exports="VkExportSemaphoreCreateInfo" in more).handle
        return 0

    def vkDestroySemaphore(self: Any, device: int, semaphore: int, _: Any) -> None:
        self.end(semaphore, "Semaphore")

    def vkGetSemaphoreCounterValue(self: Any, device: int, semaphore: int, out: Any) -> int:
        out[0] = self.get(semaphore, "Semaphore").value
        self._asked()
        return 0

    def vkWaitSemaphores(self: Any, device: int, info: Any, timeout: int) -> int:
        i = info[0]
        found = [(self.get(i.pSemaphores[k], "Semaphore"), i.pValues[k]) for k in range(i.semaphoreCount)]
        return 0 if self._until(lambda: all(s.value >= v for s, v in found), timeout / 1e9) else vk.VK_TIMEOUT

    def vkSignalSemaphore(self: Any, device: int, info: Any) -> int:
        s = self.get(info[0].semaphore, "Semaphore")
        if info[0].value <= s.value:
            self.blame("VUID-VkSemaphoreSignalInfo-value-03258", f"{info[0].value}, and it is at {s.value}")
        s.value = info[0].value
        self.changed.notify_all()
        return 0

    def vkGetSemaphoreFdKHR(self: Any, device: int, info: Any, out: Any) -> int:
        if not self.get(info[0].semaphore, "Semaphore").exports:
            self.blame("VUID-VkSemaphoreGetFdInfoKHR-handleType-01132", "not made for it")
        out[0] = os.memfd_create("fake semaphore", os.MFD_CLOEXEC)
        return 0

    def vkImportSemaphoreFdKHR(self: Any, device: int, info: Any) -> int:
        os.close(info[0].fd)
        return 0


