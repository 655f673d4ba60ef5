"""A VkDevice with its queues: interop's own (`Context.open`) or the application's (`Context.wrap`). Knows no memory and no tensors.

What was made with the device is destroyed before it, and of the application's objects nothing ever is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import interop
from interop.contract import DeviceLostError, ExchangeError

from . import api as vk
from . import handles, loader, physical, timeline
from .buffers import wrap_buffer
from .commands import Recorder
from .instance import Instance, Listener
from .memory import Store
from .needs import EVERYTHING
from .queue import Queue
from .timeline import Timeline

if TYPE_CHECKING:
    from interop import Allocation
    from interop.contract import Adapter

#: Seconds that closing, and the end of the process, wait for queued work.
CLOSE_TIMEOUT = 2.0
#: Seconds that a submit waits for the application's lock.
LOCK_TIMEOUT = 60.0


class Context(interop.Context):
    """A device that is open. Use `open` or `wrap`.

    Attributes:
        vk: the functions of the device; `instance_table`: those of the instance and the physical device.
        device_handle: the VkDevice; 0 once closed. `instance_handle`, `physical_device`: the other two handles.
        physical: a `PhysicalDevice`: name, families, what could have been turned on.
        queues: the queues that it knows; `queue` is the first.
        extensions, features: what is turned on. `has` asks.
        api_version: what the device may be used as, packed.
        memory_types: a `MemoryType` for each, by index.
        limits: VkPhysicalDeviceLimits; the ones that matter here by name:
        atom: bytes that flush and invalidate are rounded to. `map_alignment`: of mapped pointers.
        host_pointer_alignment: what imported host pages are multiples of, address and size; 0: they cannot be imported.
        storage_alignment: what offsets of storage buffers in descriptors are multiples of. `max_storage_range`: their most bytes.
        max_allocation: bytes of the largest memory object.
        device_uuid, driver_uuid: 16 bytes; zeros: unknown, which equals nothing.
        lock: taken for every submit.
        owned: the device, and the instance, are interop's.
        lost: the DeviceLostError, once there was one.
        store: the memory that it knows, by handle.
        has_timelines, can_export_timelines: whether Points are on timeline semaphores, and whether those leave as descriptors.
    """

    #: Held here: at the very end the names of a module are None.
    _finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, adapter: Adapter | None, number: int, found: physical.PhysicalDevice, *, instance: int, device: int, table: Any,
                 queues: Sequence[tuple[int, int]], extensions: Iterable[str], features: Iterable[str] | None, api_version: int | None,
                 lock: Any = None, own_instance: Instance | None = None, owned: bool = False, keep: Any = None) -> None:
        """Takes over what is owned; else it stays the caller's also where this raises."""
        self.device_handle = 0                  # what `_close` looks at, should something here fail
        self._owned: dict[int, Callable[[], Any]] = {}
        self._keys = itertools.count(1)
        self._ending = threading.RLock()        # re-entrant: the collector may run in the midst of it
        self.lost: DeviceLostError | None = None
        self.queues: tuple[Queue, ...] = ()
        self._recorders: dict[int, Recorder] = {}
        self._made_in = loader.generation()
        self.store = Store()

        self.physical, self.instance_handle, self.instance_table = found, instance, found.table
        self.physical_device, self.vk = found.handle, table
        self.extensions, self.owned, self._own_instance, self._keep = frozenset(extensions), owned, own_instance, keep
        self._features_known = features is not None
        self.features = frozenset(features or ())
        self.api_version = found.api_version if api_version is None else min(api_version, found.api_version)
        if self.api_version < physical.OLDEST:
            raise ExchangeError(f"{found.name} is used as Vulkan {physical.spell(self.api_version)}; interop needs 1.1")
        self.lock: Any = threading.RLock() if lock is None else _Held(lock)

        limits = self.limits = found.limits
        self.memory_types = found.memory_types
        self.atom, self.map_alignment = int(limits.nonCoherentAtomSize), int(limits.minMemoryMapAlignment)
        self.storage_alignment, self.max_storage_range = int(limits.minStorageBufferOffsetAlignment), int(limits.maxStorageBufferRange)
        self.host_pointer_alignment = found.host_pointer_alignment if self.has("VK_EXT_external_memory_host") else 0
        self.max_allocation = found.max_allocation
        self.device_uuid, self.driver_uuid = found.device_uuid, found.driver_uuid
        self.has_timelines = "timelineSemaphore" in self.features
        self.can_export_timelines = (self.has_timelines and self.has("VK_KHR_external_semaphore_fd")
                                     and timeline.can_export(self.instance_table, self.physical_device))
        kinds = (("opaque_fd", "VK_KHR_external_memory_fd"), ("host", "VK_EXT_external_memory_host"),
                 ("dma_buf", "VK_EXT_external_memory_dma_buf"))
        can = {kind for kind, extension in kinds if self.has(extension)} | ({"timeline"} if self.has_timelines else set())
        super().__init__(interop.Device(f"vulkan:{number}"), adapter if adapter is not None else _default_adapter(), can)
        self.queues = tuple(Queue(self, handle, family) for handle, family in queues)
        self._by_handle = {q.handle: q for q in self.queues}
        self.device_handle = device             # from here on `__del__` closes it
        _open.add(self)

    # ---- making one ----
    @classmethod
    def open(cls, index: int | None = None, *, uuid: bytes | None = None, layers: Iterable[str] = (),
             instance_extensions: Iterable[str] = (), instance_next: Sequence[Any] = (), on_message: Listener | None = None,
             extensions: Iterable[str] | None = None, features: Iterable[str] | None = None, driver: Any = None,
             adapter: Adapter | None = None) -> Context:
        """An instance, a device and one queue that computes and copies, of interop's own.

        Args:
            index: the number in ``vulkan:N``, which is the order of vkEnumeratePhysicalDevices. None: 0, or the one with `uuid`.
            uuid: 16 bytes, VkPhysicalDeviceIDProperties.deviceUUID.
            layers, instance_extensions, instance_next, on_message: see `instance.Instance`.
            extensions, features: turn on at most these of what interop uses; None: all that the device has.
            driver: a `loader.Driver`, or what stands in for one.
            adapter: who it belongs to; None: interop's adapter of Vulkan.

        Raises:
            ExchangeError: no loader, no driver, no such device, or one that is older than Vulkan 1.1. VulkanError: a call failed.
        """
        if uuid is not None and (not isinstance(uuid, bytes) or len(uuid) != 16 or index is not None):
            raise TypeError(f"uuid {uuid!r}: 16 bytes, and no index beside it")
        instance = Instance(driver=driver, layers=layers, extensions=instance_extensions, next=instance_next, on_message=on_message)
        try:
            number, found = _chosen(instance.physical_devices(), index, uuid)
            return cls._open(instance, number, found, None if extensions is None else set(extensions),
                             None if features is None else set(features), adapter)
        except BaseException:
            instance.close()
            raise

    @classmethod
    def _open(cls, instance: Instance, number: int, found: physical.PhysicalDevice, only: set[str] | None, features: set[str] | None,
              adapter: Adapter | None) -> Context:
        version = min(instance.version, found.api_version)
        if version < physical.OLDEST:
            raise ExchangeError(f"{found.name} has Vulkan {physical.spell(found.api_version)}; interop needs 1.1")
        on = [f for f in physical.FEATURES if f in found.features and (features is None or f in features)]
        names = [e for e in EVERYTHING if e in found.extensions and (only is None or e in only)]
        names += [e for f in on for since, e in (physical.BROUGHT_BY[f],) if version < since and e not in names]
        family = found.compute_family()
        structs = [physical.FEATURES[f](**{f: vk.VK_TRUE}) for f in on]
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, pQueuePriorities=[1.0], queueCount=1)
        info = vk.VkDeviceCreateInfo(pNext=structs, pQueueCreateInfos=[queue], ppEnabledExtensionNames=names)
        out = vk.VkDevice()
        loader.check(instance.table.vkCreateDevice(found.handle, info, None, ctypes.byref(out)), "vkCreateDevice")
        device = handles.owned(out.value or 0, "vkCreateDevice")
        table = instance.driver.device(instance.handle, device, names)
        try:
            first = vk.VkQueue()
            table.vkGetDeviceQueue(device, family, 0, ctypes.byref(first))
            return cls(adapter, number, found, instance=instance.handle, device=device, table=table, owned=True, own_instance=instance,
                       queues=[(handles.owned(first.value or 0, "vkGetDeviceQueue"), family)], extensions=names, features=on,
                       api_version=version)
        except BaseException:
            table.vkDestroyDevice(device, None)
            raise

    @classmethod
    def wrap(cls, *, instance: Any = None, physical_device: Any = None, device: Any = None, queues: Iterable[tuple[Any, int]] | None = None,
             queue: Any = None, queue_family: int | None = None, extensions: Iterable[str] | None = None,
             features: Iterable[str] | None = None, api_version: int | None = None, lock: Any = None, get_instance_proc_addr: Any = None,
             get_device_proc_addr: Any = None, owner: Any = None, driver: Any = None, adapter: Adapter | None = None) -> Context:
        """The application's own device. Nothing of it is ever destroyed; close this before you destroy the device.

        Args:
            instance, physical_device, device: handles: ints, ctypes objects or cffi cdata.
            queues: ``[(VkQueue, queue family index)]``, the first is what interop submits to; or one by `queue` and `queue_family`.
            extensions: what vkCreateDevice was given, () for none.
            features: names of the features that were turned on, such as ``"timelineSemaphore"``. Without that one, Points are fences.
            api_version: of VkApplicationInfo; None: what the physical device has.
            lock: what you hold while you submit to these queues: anything with acquire and release, or ``with``. interop takes it for
                each of its own, so a thread that calls interop while holding it needs a re-entrant one (`threading.RLock`). None: nobody
                else submits, or holds `lock` of this Context while doing so.
            get_instance_proc_addr, get_device_proc_addr: where the functions come from: address, ctypes or cffi function; None: the loader.
            owner: kept alive as long as this.
            driver: what stands in for a `loader.Driver`.
            adapter: who it belongs to; None: interop's adapter of Vulkan.

        Raises:
            TypeError: something that cannot be asked of Vulkan was not given; it names what.
            ExchangeError: the instance does not have this physical device; Vulkan older than 1.1; no loader.
        """
        given = [("instance", instance), ("physical_device", physical_device), ("device", device), ("extensions", extensions)]
        if queues is None:
            given += [("queue", queue), ("queue_family", queue_family)]
        missing = [name for name, value in given if value is None]
        if missing:
            raise TypeError(f"Context.wrap needs {', '.join(missing)}: what a VkDevice was made with cannot be asked of it")
        given_queues = queues if queues is not None else [(queue, queue_family or 0)]
        pairs = [(handles.number(q, "queue"), int(family)) for q, family in given_queues]
        if not pairs:
            raise TypeError("Context.wrap needs at least one (queue, queue family) in queues")
        instance, device = handles.number(instance, "instance"), handles.number(device, "device")
        names = frozenset(e.decode() if isinstance(e, bytes) else str(e) for e in extensions or ())
        driver = driver if driver is not None else loader.Driver(get_instance_proc_addr, get_device_proc_addr)
        found = physical.PhysicalDevice(handles.number(physical_device, "physical_device"), driver.instance(instance))
        for _, family in pairs:
            if not 0 <= family < len(found.families):
                raise ValueError(f"queue family {family}: {found.name} has {len(found.families)}")
        number = _number_of(found, physical.of_instance(instance, found.table))
        return cls(adapter, number, found, instance=instance, device=device, table=driver.device(instance, device, names), queues=pairs,
                   extensions=names, features=features, api_version=api_version, lock=lock, keep=(owner, driver))

    # ---- asking ----
    @property
    def queue(self) -> Queue:
        """The queue that interop submits to."""
        return self.queues[0]

    def has(self, extension: str) -> bool:
        """Whether a device extension is turned on."""
        return extension in self.extensions

    def find_queue(self, queue: Any) -> Queue | None:
        """The `Queue` of a VkQueue (int, ctypes, cffi, or itself) that this Context knows; None: it does not."""
        if isinstance(queue, Queue):
            return queue if queue.context is self else None
        try:
            return self._by_handle.get(handles.number(queue, "queue"))
        except TypeError:
            return None

    def ok(self, result: int, what: str) -> int:
        """`loader.check` of a call of this device's; remembers it where the device is lost."""
        if result < 0:
            try:
                loader.check(result, what)
            except DeviceLostError as e:
                raise self.lose(e) from None
        return result

    def lose(self, error: DeviceLostError) -> DeviceLostError:
        """The device is lost: nothing on it is waited for any more. Gives the error back."""
        if self.lost is None:
            self.lost = DeviceLostError(str(error))
        return error

    def check_lost(self) -> None:
        """DeviceLostError where the device is lost."""
        if self.lost is not None:
            raise DeviceLostError(str(self.lost))

    @property
    def alive(self) -> bool:
        """Whether its objects may be destroyed by what the garbage collector finds: open, this process', and not at the very end."""
        return bool(self.device_handle) and not self._finalizing() and self._made_in == loader.generation()

    def require(self, extension: str, what: str) -> None:
        """ExchangeError where an extension is off that `what` takes."""
        if extension not in self.extensions:
            there = extension in self.physical.extensions
            raise ExchangeError(f"{what} takes {extension}, which {'was not enabled' if there else f'{self.physical.name} has not'}",
                                "vulkan.requirements(...) lists what your vkCreateDevice must enable" if there else None)

    # ---- semaphores ----
    def timeline(self, initial: int = 0, *, exportable: bool | None = None) -> Timeline:
        """A timeline semaphore that the application signals or waits for, and shares: `Timeline`.

        Args:
            initial: its first value.
            exportable: `Timeline.export` shall work: True or an ExchangeError; None: where the device can.
        """
        self._need_timelines()
        if exportable and not self.can_export_timelines:
            self.require("VK_KHR_external_semaphore_fd", "an exportable timeline")
            raise ExchangeError(f"{self.physical.name} exports no timeline semaphores", "wait on the host, or exportable=False")
        return Timeline(self, initial, exportable=self.can_export_timelines if exportable is None else exportable)

    def import_timeline(self, fd: int) -> Timeline:
        """The timeline semaphore behind a descriptor (VK_KHR_external_semaphore_fd, opaque) of the same device and driver.

        The descriptor stays the caller's.
        """
        self._need_timelines()
        self.require("VK_KHR_external_semaphore_fd", "importing a timeline")
        return Timeline(self, fd=fd)

    def _need_timelines(self) -> None:
        if not self.has_timelines:
            if not self._features_known:
                raise TypeError("Context.wrap was given no features: whether timelineSemaphore is on cannot be asked of a VkDevice; "
                                "pass features=['timelineSemaphore'] where it is")
            raise ExchangeError("timeline semaphores are not turned on for this device", "enable the feature timelineSemaphore")

    # ---- memory ----
    def wrap_buffer(self, buffer: Any, *, memory: Any, memory_size: int, memory_type: int, usage: int, owner: Any, memory_offset: int = 0,
                    nbytes: int | None = None, handle_types: Iterable[str] | int = (), dedicated: bool = False, mapped: Any = None,
                    ready: Any = None, host_ready: bool = False, readonly: bool = False) -> Allocation:
        """A VkBuffer of the application's, bound to its memory, as an Allocation. Nothing of it is ever destroyed or freed.

        Several buffers over one VkDeviceMemory share its leases and Points, byte by byte.

        Args:
            buffer, memory: handles: ints, ctypes objects or cffi cdata.
            memory_size, memory_offset, memory_type: allocationSize, memoryOffset and memoryTypeIndex.
            usage: VkBufferUsageFlags.
            owner: kept alive as long as the memory is used; None where something else keeps it.
            nbytes: VkBufferCreateInfo.size; None: as much of the memory as the driver says the buffer needs, which may be a little more.
            handle_types: what the memory was made to be exported as (VkExportMemoryAllocateInfo): kinds, or Vulkan's flags.
            dedicated: it is a dedicated allocation.
            mapped: where the application has mapped the first byte of the buffer, for as long as this is used. None: it has not, and does
                not while interop does: no memory is mapped twice.
            ready: when its contents are: a Point, or (VkSemaphore, value) of a timeline. None: now.
            host_ready: every submit of the application's that writes it ends with a barrier to HOST, so interop submits none before the
                host looks.
            readonly: all tensors of it are.

        Raises:
            TypeError, ValueError: what is said of the buffer cannot be, or is not what was said before.
            ExchangeError: `handle_types` takes an extension that is off.
        """
        return wrap_buffer(self, buffer, memory=memory, memory_size=memory_size, memory_type=memory_type, usage=usage, owner=owner,
                           memory_offset=memory_offset, nbytes=nbytes, handle_types=handle_types, dedicated=dedicated, mapped=mapped,
                           ready=ready, host_ready=host_ready, readonly=readonly)

    def wrap_image(self, image: Any, **said: Any) -> interop.Tensor:
        """The application's VkImage as a tensor of layout ``"vk-image"``; the keywords are those of `images.wrap_image`.

        They say memory, memory_size, memory_type, format, extent, layout, usage and owner, and where they are not the usual ones
        memory_offset, tiling, mip_levels, array_layers and readonly.
        """
        from . import images

        return images.wrap_image(self, image, **said)

    def image(self, extent: Sequence[int], format: int, usage: int | None = None) -> interop.Tensor:
        """A VkImage of interop's own, of layout ``"vk-image"``: `images.image`. `extent` is (width, height) or with depth."""
        from . import images

        return images.image(self, extent, format, usage)

    # ---- what it is made of ----
    def recorder(self, family: int) -> Recorder:
        """The command buffers of a queue family."""
        found = self._recorders.get(family)
        if found is None:
            found = self._recorders.setdefault(family, Recorder(self, family))
        return found

    def own(self, destroy: Callable[[], Any]) -> int:
        """Call ``destroy()`` when this closes, before the device goes and the newest first, unless `release` was called by then.

        It must not refer to the object that holds the key, so that `release` can be called from that one's ``__del__``.
        """
        key = next(self._keys)
        self._owned[key] = destroy
        return key

    def release(self, key: int) -> None:
        """Call what `own` was given, now; once, and not where this is closed, or a parent process'."""
        with self._ending:                      # the device is not destroyed between the look and the call
            destroy = self._owned.pop(key, None)
            if destroy is not None and self.alive:
                destroy()

    def wait_idle(self, timeout: float) -> bool:
        """Wait for what interop submitted to all queues; False: it was not done after `timeout` seconds."""
        end = time.monotonic() + timeout
        return all([q.wait_idle(max(end - time.monotonic(), 0)) for q in self.queues])

    # ---- the end ----
    def close(self) -> None:
        """Destroy what interop made, in order. Idempotent; does nothing after a fork.

        Raises:
            ExchangeError: memory of this Context is still alive, or work is not done after `CLOSE_TIMEOUT` seconds.
        """
        if not self._closed and self._made_in == loader.generation() and self.lost is None:
            if self.owned:                      # also what others submitted to a device of ours
                for q in self.queues:
                    with contextlib.suppress(ExchangeError, DeviceLostError):
                        q.mark()
            if not self.wait_idle(CLOSE_TIMEOUT):
                raise ExchangeError(f"queued work of this vulkan context on {self.device} was not done within {CLOSE_TIMEOUT} s",
                                    "wait for its Points, then close")
        super().close()

    def _close(self) -> None:
        with self._ending:
            self._destroy()

    def _destroy(self) -> None:
        for q in self.queues:
            q.close()
        while self._owned:
            self._owned.popitem()[1]()
        for r in self._recorders.values():
            r.close()
        device, self.device_handle = self.device_handle, 0
        if self.owned:
            self.vk.vkDestroyDevice(device, None)
            if self._own_instance is not None:
                self._own_instance.close()

    def __del__(self) -> None:
        """What nobody closed and nobody uses. What cannot be closed then leaks, on purpose."""
        if getattr(self, "device_handle", 0) and self.alive:
            with contextlib.suppress(Exception):
                self.close()


class _Held:
    """The application's lock, for ``with``. One that this thread holds already is an error after a while, not a hang."""

    __slots__ = ("_lock", "_native")

    def __init__(self, lock: Any) -> None:
        self._native = not callable(getattr(lock, "acquire", None)) or not callable(getattr(lock, "release", None))
        if self._native and not hasattr(lock, "__enter__"):
            raise TypeError(f"lock {lock!r} has neither acquire() and release() nor `with`")
        self._lock = lock

    def __enter__(self) -> None:
        if self._native:
            self._lock.__enter__()
            return
        try:
            got = self._lock.acquire(timeout=LOCK_TIMEOUT)
        except TypeError:                       # it knows no timeout
            got = self._lock.acquire()
        if got is False:
            raise TimeoutError(f"the lock of this Context was not free for {LOCK_TIMEOUT} s: a thread that calls interop while holding it "
                               "needs a re-entrant one (threading.RLock)")

    def __exit__(self, *exc: object) -> None:
        if self._native:
            self._lock.__exit__(*exc)
        else:
            self._lock.release()


def devices(driver: Any = None) -> list[dict[str, Any]]:
    """What ``vulkan:0``, ``vulkan:1``, ... are: name, kind, version, device_uuid, driver_uuid. Empty where there is no driver."""
    instance = Instance(driver=driver)
    try:
        return [{"name": p.name, "kind": p.kind, "version": physical.spell(p.api_version), "device_uuid": p.device_uuid,
                 "driver_uuid": p.driver_uuid} for p in instance.physical_devices()]
    finally:
        instance.close()


def _chosen(found: list[physical.PhysicalDevice], index: int | None, uuid: bytes | None) -> tuple[int, physical.PhysicalDevice]:
    if not found:
        raise ExchangeError("no Vulkan driver on this machine", "install the GPU's, or mesa-vulkan-drivers, which has one for the CPU")
    if uuid is not None:
        for i, p in enumerate(found):
            if p.device_uuid == uuid and any(uuid):     # zeros: unknown, which equals nothing
                return i, p
        raise ExchangeError(f"no Vulkan device has the UUID {uuid.hex()}: {', '.join(p.device_uuid.hex() for p in found)}")
    number = index or 0
    if not 0 <= number < len(found):
        raise ExchangeError(f"vulkan:{number}: this machine has {len(found)} Vulkan devices")
    return number, found[number]


def _number_of(wanted: physical.PhysicalDevice, found: list[physical.PhysicalDevice]) -> int:
    for i, p in enumerate(found):
        if p.handle == wanted.handle:
            return i
    for i, p in enumerate(found):
        if any(p.device_uuid) and (p.device_uuid, p.driver_uuid) == (wanted.device_uuid, wanted.driver_uuid):
            return i
    raise ExchangeError(f"physical_device {wanted.handle:#x} is none of the {len(found)} that the instance has")


def _default_adapter() -> Adapter:
    adapter: Adapter = importlib.import_module(".adapter", __package__).ADAPTER
    return adapter


_open: weakref.WeakSet[Context] = weakref.WeakSet()


def _at_exit() -> None:
    """Let queued work end before the process does. Not the application's devices: it may have destroyed them."""
    end = time.monotonic() + CLOSE_TIMEOUT
    for c in list(_open):
        if c.owned and not c.closed and c.alive and c.lost is None:
            with contextlib.suppress(Exception):
                c.wait_idle(max(end - time.monotonic(), 0))


atexit.register(_at_exit)
