"""A Vulkan driver in pure Python: ``Context.open(driver=FakeVulkan(config))``. Its bytes are real, its device and its rules are not.

It has what lavapipe has not: memory that is not coherent, other alignments and atoms, dedicated memory, pages imported once, 1.1 devices,
a loss on demand, every failing VkResult. Work that is submitted runs *later*, when the host waits for it, or one submit after each
question: a missing wait reads old bytes. What the device wrote reaches memory that the host sees by a barrier to HOST only, and the
host's copy of memory that is not coherent by flush and invalidate only. What the specification forbids is collected in `violations`, and
`check` raises for it. Functions are called through ctypes with the declared types, as a driver's are.

The nouns: `fake_vulkan_memory` (buffers, memory, maps, descriptors, pages), `fake_vulkan_queue` (commands, submits, semaphores, fences),
`fake_vulkan_objects` (images, pipelines, descriptor sets).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fake_vulkan_memory import Memory
from fake_vulkan_objects import Objects
from fake_vulkan_queue import Queues

from interop.adapters.vulkan import api as vk

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
EXTENSIONS = frozenset({
    "VK_KHR_external_memory", "VK_KHR_external_memory_fd", "VK_EXT_external_memory_host", "VK_KHR_external_semaphore",
    "VK_KHR_external_semaphore_fd", "VK_KHR_timeline_semaphore"})
_FEATURES = {"timelineSemaphore": vk.VkPhysicalDeviceTimelineSemaphoreFeatures,
             "bufferDeviceAddress": vk.VkPhysicalDeviceBufferDeviceAddressFeatures}
_STRUCTS = {s._stype_: s for s in vars(vk).values() if isinstance(s, type) and issubclass(s, vk.Struct) and s._stype_ >= 0}
#: Return VK_ERROR_DEVICE_LOST once the device is lost (vk.xml, errorcodes).
LOSABLE = frozenset({"vkQueueSubmit", "vkQueueWaitIdle", "vkDeviceWaitIdle", "vkWaitForFences", "vkGetFenceStatus",
                     "vkGetSemaphoreCounterValue", "vkWaitSemaphores"})
#: Whose parameter must not be used by two threads at once (Vulkan, Threading Behavior).
_EXTERNALLY_SYNCHRONISED = {"vkQueueSubmit": 0, "vkMapMemory": 1, "vkUnmapMemory": 1, "vkFreeMemory": 1, "vkDestroyBuffer": 1,
                            "vkBeginCommandBuffer": 0, "vkEndCommandBuffer": 0, "vkDestroyCommandPool": 1, "vkDestroyFence": 1}


@dataclass(frozen=True)
class Config:
    """What the device is. Memory types are ``(flags, heap)``.

    Attributes:
        alignment, size_multiple: of VkMemoryRequirements of buffers.
        dedicated: ``""``, ``"prefers"`` or ``"requires"``.
        overlap: host pages that are imported may be imported again.
        page_types: memoryTypeBits of host pages; None: those of coherent types.
    """

    types: tuple[tuple[int, int], ...] = ((LOCAL | VISIBLE | COHERENT | CACHED, 0),)
    heaps: tuple[int, ...] = (1 << 36,)
    alignment: int = 64
    size_multiple: int = 64
    atom: int = 64
    storage_alignment: int = 16
    max_storage_range: int = 1 << 27
    max_allocation: int = 1 << 35
    page: int = 4096
    extensions: frozenset[str] = EXTENSIONS
    features: frozenset[str] = frozenset({"timelineSemaphore"})
    api_version: int = (1 << 22) | (3 << 12)
    families: tuple[tuple[int, int], ...] = ((0b1111, 1),)
    dedicated: str = ""
    overlap: bool = True
    page_types: int | None = None
    device_uuid: bytes = field(default=uuid.uuid5(uuid.NAMESPACE_OID, "fake device").bytes)
    driver_uuid: bytes = field(default=uuid.uuid5(uuid.NAMESPACE_OID, "fake driver").bytes)


#: Devices by the name that tests give them.
CONFIGS = {
    "lavapipe": Config(),
    "discrete": Config(types=((0, 1), (LOCAL, 0),
                               (VISIBLE | COHERENT, 1), (VISIBLE | COHERENT | CACHED, 1), (LOCAL | VISIBLE | COHERENT, 0)),
                       heaps=(1 << 36, 1 << 36), alignment=256, size_multiple=256, features=frozenset(_FEATURES)),
    "incoherent": Config(types=((LOCAL | VISIBLE | CACHED, 0), (VISIBLE | COHERENT, 0)), atom=256, alignment=256, size_multiple=64),
    "coarse": Config(alignment=4096, size_multiple=4096, atom=256, storage_alignment=256),
    "dedicated": Config(dedicated="requires"),
    "old": Config(api_version=(1 << 22) | (1 << 12), features=frozenset(), extensions=EXTENSIONS - {"VK_KHR_timeline_semaphore"}),
    "strict pages": Config(page=65536, overlap=False),
}


class Refused(Exception):
    """A call ends with this VkResult."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Obj:
    """A Vulkan object; what it is made of are attributes."""

    def __init__(self, kind: str, handle: int, parent: Obj | None, **more: Any) -> None:
        self.kind, self.handle, self.parent, self.alive = kind, handle, parent, True
        self.busy = 0               # submits that are not done and use it
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.kind} has no {name}")

    def __repr__(self) -> str:
        return f"{self.kind} {self.handle:#x}"


class Functions:
    """What a Table is: functions as attributes, with the types of `api.FUNCTIONS`."""

    def __init__(self, fake: FakeVulkan) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Any:
        declared = vk.FUNCTIONS.get(name)
        if declared is None:
            raise AttributeError(name)
        made = ctypes.CFUNCTYPE(declared.restype, *declared.argtypes)(self._fake._called(name, declared.restype))
        setattr(self, name, made)
        return made


class FakeVulkan(Memory, Queues, Objects):
    """The driver.

    Attributes:
        calls: how often each function was called. `log`: their names in order, while it is a list.
        violations: what the specification forbids and was done.
        hold: the device does nothing.
        kernels: entry point -> ``f(groups, push constants, NumPy arrays of the bindings)``.
    """

    def __init__(self, config: Config | str = "lavapipe") -> None:
        self.config = CONFIGS[config] if isinstance(config, str) else config
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.pid, self.in_child = os.getpid(), mmap.mmap(-1, 4096)      # shared with children
        self.calls: collections.Counter[str] = collections.Counter()
        self.log: list[str] | None = None
        self.violations: list[str] = []
        self.failing: dict[str, list[list[int]]] = {}
        self.objects: dict[int, Obj] = {}
        self.lost = self.hold = False
        self.kernels: dict[str, Any] = {}
        self._numbers = itertools.count(0x10000, 0x10)
        self._gate, self._inside = threading.Lock(), collections.Counter[int]()
        self.physical = self.make("PhysicalDevice", None)
        self.table = Functions(self)
        Memory.__init__(self)
        Queues.__init__(self)

    # ---- what a loader.Driver has ----
    def instance(self, instance: int, extensions: Any = ()) -> Functions:
        return Functions(self)

    def device(self, instance: int, device: int, extensions: Any = ()) -> Functions:
        return Functions(self)

    # ---- for tests ----
    def fail_next(self, name: str, result: int, times: int = 1, skip: int = 0) -> None:
        """After `skip` calls that work, the next ones do nothing and return this VkResult. A loss is one from then on."""
        self.failing.setdefault(name, []).append([skip, times, result])

    def lose(self) -> None:
        """The device is lost: what was queued never runs."""
        with self.lock:
            self.lost = True
            for q in self.queues:
                while q.work:
                    self._finish(q.work.popleft())
            self.changed.notify_all()

    @property
    def live(self) -> collections.Counter[str]:
        """Objects by kind, such as ``"Buffer"``, ``"Memory"``, ``"Semaphore"``; those that go with another are left out."""
        quiet = {"PhysicalDevice", "Queue", "CommandBuffer", "DescriptorSet"}
        return collections.Counter(o.kind for o in self.objects.values() if o.alive and o.kind not in quiet)

    def check(self) -> None:
        """AssertionError for what was done that the specification forbids."""
        if self.in_child[0]:
            self.violations.append("a forked child called the driver")
        assert not self.violations, "\n".join(self.violations)

    def take(self) -> list[str]:
        """`violations`, which are then forgotten."""
        out, self.violations = self.violations, []
        return out

    def blame(self, rule: str, text: str = "") -> None:
        """Something that the specification forbids."""
        self.violations.append(f"{rule}: {text}")

    # ---- calls ----
    def _called(self, name: str, restype: Any) -> Any:
        function, at = getattr(self, name), _EXTERNALLY_SYNCHRONISED.get(name)

        def called(*args: Any) -> Any:
            if os.getpid() != self.pid:
                self.in_child[0] = 1
                return 0
            with self._alone(name, args[at] if at is not None else None), self.lock:
                self.calls[name] += 1
                if self.log is not None:
                    self.log.append(name)
                try:
                    planned = self._planned(name)
                    return planned if planned else function(*args) or 0
                except Refused as e:
                    return e.code
                except BaseException:
                    self.violations.append(f"{name}: {traceback.format_exc()}")
                    return vk.VK_ERROR_UNKNOWN if restype is ctypes.c_int32 else 0

        return called

    def _planned(self, name: str) -> int:
        for plan in self.failing.get(name, ()):
            if plan[0]:
                plan[0] -= 1
                return 0
            if plan[1]:
                plan[1] -= 1
                if plan[2] == vk.VK_ERROR_DEVICE_LOST:
                    self.lose()
                return plan[2]
        return vk.VK_ERROR_DEVICE_LOST if self.lost and name in LOSABLE else 0

    @contextlib.contextmanager
    def _alone(self, name: str, handle: int | None) -> Iterator[None]:
        if handle is None:
            yield
            return
        with self._gate:
            self._inside[handle] += 1
            if self._inside[handle] > 1:
                self.blame("threading", f"{name}: two threads use {handle:#x} at once")
        try:
            if name == "vkQueueSubmit":
                threading.Event().wait(0)       # lets another thread in that should not be
            yield
        finally:
            with self._gate:
                self._inside[handle] -= 1

    # ---- objects ----
    def make(self, kind: str, parent: Obj | None, **more: Any) -> Obj:
        made = Obj(kind, next(self._numbers), parent, **more)
        self.objects[made.handle] = made
        return made

    def get(self, handle: int | None, kind: str) -> Obj:
        """The object; what is none, or gone, ends the call as a violation."""
        found = self.objects.get(handle or 0)
        if found is None or found.kind != kind:
            raise AssertionError(f"{handle or 0:#x} is no {kind} but {found}")
        if not found.alive:
            raise AssertionError(f"{found} was destroyed")
        return found

    def end(self, handle: int | None, kind: str) -> Obj | None:
        """Destroy; None: it is VK_NULL_HANDLE."""
        if not handle:
            return None
        found = self.get(handle, kind)
        if found.busy:
            self.blame("in-use", f"{found} is destroyed while work that uses it is queued")
        found.alive = False
        return found

    def chain(self, struct: Any) -> dict[str, Any]:
        """The structs of a pNext chain by name."""
        out: dict[str, Any] = {}
        at = struct.pNext
        while at:
            kind = _STRUCTS[vk.VkBaseOutStructure.from_address(at).sType]
            found = kind.from_address(at)
            out[kind.__name__] = found
            at = found.pNext
        return out

    @staticmethod
    def listed(count: Any, array: Any, items: list[Any]) -> int:
        """The way of the functions that are asked twice."""
        if not array:
            count[0] = len(items)
            return 0
        n = min(count[0], len(items))
        for i in range(n):
            array[i] = items[i]
        count[0] = n
        return vk.VK_INCOMPLETE if n < len(items) else 0

    # ---- instance and physical device ----
    def vkEnumerateInstanceVersion(self, out: Any) -> int:
        out[0] = (1 << 22) | (3 << 12)
        return 0

    def vkEnumerateInstanceLayerProperties(self, count: Any, out: Any) -> int:
        return self.listed(count, out, [])

    def vkCreateInstance(self, info: Any, _: Any, out: Any) -> int:
        if info[0].enabledLayerCount:
            return vk.VK_ERROR_LAYER_NOT_PRESENT
        out[0] = self.make("Instance", None).handle
        return 0

    def vkDestroyInstance(self, instance: int, _: Any) -> None:
        gone = self.end(instance, "Instance")
        if any(o.alive for o in self.objects.values() if o.parent is gone):
            self.blame("VUID-vkDestroyInstance-instance-00629", "devices are alive")

    def vkEnumeratePhysicalDevices(self, instance: int, count: Any, out: Any) -> int:
        self.get(instance, "Instance")
        return self.listed(count, out, [self.physical.handle])

    def vkEnumerateDeviceExtensionProperties(self, device: int, layer: Any, count: Any, out: Any) -> int:
        found = [vk.VkExtensionProperties(extensionName=e.encode(), specVersion=1) for e in sorted(self.config.extensions)]
        return self.listed(count, out, found)

    def vkGetPhysicalDeviceProperties(self, device: int, out: Any) -> None:
        c, p = self.config, out[0]
        p.apiVersion, p.deviceName, p.deviceType = c.api_version, b"fake", 2
        limits = p.limits
        limits.nonCoherentAtomSize, limits.minMemoryMapAlignment = c.atom, 64
        limits.minStorageBufferOffsetAlignment, limits.maxStorageBufferRange = c.storage_alignment, c.max_storage_range
        limits.maxPushConstantsSize, limits.maxPerStageDescriptorStorageBuffers = 128, 8
        for i in range(3):
            limits.maxComputeWorkGroupCount[i] = 65535

    def vkGetPhysicalDeviceProperties2(self, device: int, out: Any) -> None:
        c = self.config
        for name, s in self.chain(out[0]).items():
            if name == "VkPhysicalDeviceIDProperties":
                s.deviceUUID[:], s.driverUUID[:] = c.device_uuid, c.driver_uuid
            elif name == "VkPhysicalDeviceMaintenance3Properties":
                s.maxMemoryAllocationSize = c.max_allocation
            elif name == "VkPhysicalDeviceExternalMemoryHostPropertiesEXT":
                if "VK_EXT_external_memory_host" not in c.extensions:
                    self.blame("pNext", f"{name} of an extension that the device has not")
                s.minImportedHostPointerAlignment = c.page

    def vkGetPhysicalDeviceFeatures2(self, device: int, out: Any) -> None:
        for feature, struct in _FEATURES.items():
            found = self.chain(out[0]).get(struct.__name__)
            if found is not None:
                setattr(found, feature, feature in self.config.features)

    def vkGetPhysicalDeviceMemoryProperties(self, device: int, out: Any) -> None:
        p = out[0]
        p.memoryTypeCount, p.memoryHeapCount = len(self.config.types), len(self.config.heaps)
        for i, (flags, heap) in enumerate(self.config.types):
            p.memoryTypes[i].propertyFlags, p.memoryTypes[i].heapIndex = flags, heap
        for i, size in enumerate(self.config.heaps):
            p.memoryHeaps[i].size = size

    def vkGetPhysicalDeviceQueueFamilyProperties(self, device: int, count: Any, out: Any) -> None:
        self.listed(count, out, [vk.VkQueueFamilyProperties(queueFlags=f, queueCount=n) for f, n in self.config.families])

    def vkGetPhysicalDeviceExternalBufferProperties(self, device: int, info: Any, out: Any) -> None:
        opaque, host = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT, vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
        only = 1 if self.config.dedicated else 0
        out[0].externalMemoryProperties.externalMemoryFeatures = {opaque: 6 | only, host: 4}.get(info[0].handleType, 0)

    def vkGetPhysicalDeviceExternalSemaphoreProperties(self, device: int, info: Any, out: Any) -> None:
        out[0].externalSemaphoreFeatures = 3 if "VK_KHR_external_semaphore_fd" in self.config.extensions else 0

    # ---- device ----
    def vkCreateDevice(self, physical: int, info: Any, _: Any, out: Any) -> int:
        i = info[0]
        names = frozenset(i.ppEnabledExtensionNames[k].decode() for k in range(i.enabledExtensionCount))
        if names - self.config.extensions:
            return vk.VK_ERROR_EXTENSION_NOT_PRESENT
        chain = self.chain(i)
        on = frozenset(f for f, s in _FEATURES.items() if s.__name__ in chain and getattr(chain[s.__name__], f))
        if on - self.config.features:
            return vk.VK_ERROR_FEATURE_NOT_PRESENT
        instance = next(o for o in reversed(self.objects.values()) if o.kind == "Instance" and o.alive)
        out[0] = self.make("Device", instance, extensions=names, features=on).handle
        return 0

    def vkDestroyDevice(self, device: int | None, _: Any) -> None:
        gone = self.end(device, "Device")
        left = [o for o in self.objects.values() if o.parent is gone and o.alive and o.kind != "Queue"]
        if left:
            self.blame("VUID-vkDestroyDevice-device-05137", f"alive: {left}")
        for q in self.queues:
            if q.parent is gone:
                q.alive = False
                if q.work:
                    self.blame("VUID-vkDestroyDevice-device", "work is queued")

    def vkGetDeviceQueue(self, device: int, family: int, index: int, out: Any) -> None:
        owner = self.get(device, "Device")
        found = next((q for q in self.queues if q.parent is owner and (q.family, q.index) == (family, index)), None)
        if found is None:
            found = self.make("Queue", owner, family=family, index=index, work=collections.deque(), touched=[])
            self.queues.append(found)
        out[0] = found.handle

    def vkDeviceWaitIdle(self, device: int) -> int:
        self._until(lambda: not any(q.work for q in self.queues), 1e9)
        return 0

    def vkQueueWaitIdle(self, queue: int) -> int:
        return self.vkDeviceWaitIdle(0)
