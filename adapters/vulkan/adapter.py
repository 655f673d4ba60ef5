"""The adapter of Vulkan's memory: who allocates, shares, maps, copies and orders it, on `interop.contract`. Knows no framework.

Importing this imports no declarations and opens no loader: each capability brings what it takes when it is first asked for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, ExchangeError, Importable, Limits, Mapped, Point, party_limits, register

if TYPE_CHECKING:
    from interop import Allocation, Device, ExternalHandle, Tensor

    from .context import Context
    from .queue import Queue

_VULKAN = 7
#: DLDeviceTypes whose memory is the host's.
_HOSTS = frozenset({1, 3, 11})


class VulkanAdapter(Adapter):
    """Memory on ``vulkan:N``, interop's and the application's.

    A place is a `Context`, or a Device: that means the one Context which is opened for that number on first use and then kept.
    """

    name = "vulkan"
    device = "vulkan"
    accepts = Limits(devices=frozenset({_VULKAN}))
    shares = frozenset({"opaque_fd", "process"})

    def __init__(self) -> None:
        """Nothing is opened yet."""
        self._lock = threading.Lock()
        self.contexts: dict[int, Context] = {}

    def context(self, place: Any) -> Context:
        """The Context of a place; ExchangeError where it is none, closed, or there is no driver."""
        from .context import Context

        if isinstance(place, Context):
            place.check()
            return place
        device = _device(place)
        if device.name != "vulkan":
            raise ExchangeError(f"{device} is no Vulkan device")
        with self._lock:
            found = self.contexts.get(device.id)
            if found is None or not _usable(found):
                found = self.contexts[device.id] = Context.open(device.id)
            return found

    def missing(self) -> str | None:
        """The loader, where there is none. Loads it, and looks for no driver."""
        from . import loader

        return loader.missing()

    # ---- memory ----
    def limits(self, place: Any) -> Limits:
        """What a Context imports and exports."""
        c = self.context(place)
        kinds = c.capabilities & {"opaque_fd", "dma_buf", "host"}
        return Limits(devices=frozenset({_VULKAN}), alignment=max(c.host_pointer_alignment, 1), imports=kinds, exports=kinds - {"host"})

    def importable(self, kind: str, *, place: Any) -> Importable:
        """What importing a kind of handle takes. Of host pages any address and size are fine: the pages around are imported."""
        from . import memory, pages, sharing

        c = self.context(place)
        if kind == "host":
            return pages.importable(c)
        return sharing.importable(c, kind) if kind in memory.KINDS else Importable(False, f"Vulkan imports no {kind}")

    def allocate(self, nbytes: int, *, place: Any, alignment: int, shared_with: tuple[Any, ...]) -> Allocation:
        """A memory object with a buffer over it: of the kind that the host sees where it shall, exportable where others shall have it."""
        from . import memory

        c = self.context(place)
        kinds = ("opaque_fd",) if any([_takes_descriptors(c, p) for p in shared_with]) else ()
        wanted = memory.FOR_HOST if any([_is_host(p) for p in shared_with]) else memory.FOR_DEVICE
        return memory.allocate(c, nbytes, kinds=kinds, wanted=wanted, alignment=alignment)

    def export_handle(self, allocation: Allocation, kind: str) -> ExternalHandle:
        """A descriptor of the memory object that an Allocation lies in."""
        from . import sharing

        return sharing.export(allocation, kind)

    def import_handle(self, handle: ExternalHandle, *, place: Any) -> Allocation:
        """The memory behind a descriptor, or pages of the host, as a buffer."""
        from . import pages, sharing

        c = self.context(place)
        if handle.kind == "host":
            return pages.import_pages(c, handle)
        if handle.kind not in ("opaque_fd", "dma_buf"):
            raise ExchangeError(f"Vulkan imports opaque_fd, dma_buf and host, not {handle.kind}")
        return sharing.import_fd(c, handle)

    # ---- the host ----
    def map(self, allocation: Allocation, access: str, first: int, nbytes: int) -> Mapped | Any:
        """`maps.map_allocation`."""
        from . import maps

        return maps.map_allocation(allocation, access, first, nbytes)

    def host_view(self, allocation: Allocation) -> int | None:
        """`maps.view_of`."""
        from . import maps

        return maps.view_of(allocation)

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> Point | Any:
        """`copies.copy`."""
        from . import copies

        return copies.copy(dst, src, stream)

    # ---- order ----
    def wait(self, place: Any, stream: Any, point: Point) -> bool:
        """Make a queue wait for a Point: on the device where it is on a semaphore of the same Context, else on the host."""
        queue = self._queue(place, stream)
        if not point.done() or point.error() is not None:
            queue.wait_for(point)
        return True

    def record(self, place: Any, stream: Any) -> Point:
        """When what a queue was given so far, by whomever, is done."""
        return self._queue(place, stream).mark()

    def _queue(self, place: Any, stream: Any) -> Queue:
        c = self.context(place)
        if stream is None:
            return c.queue
        found = c.find_queue(stream)
        if found is None:
            raise ExchangeError(f"stream {stream!r} is no VkQueue that this Context knows", "Context.wrap(queues=[(queue, family), ...])")
        return found

    # ---- the side channel ----
    def native_fields(self, allocation: Allocation) -> dict[str, Any]:
        """The memory object below a buffer, and where all of it is valid."""
        from . import memory

        buffer = memory.find(allocation)
        if buffer is None:
            return {}
        m, c = buffer.memory, buffer.context
        return {"memory": m.handle, "memory_nbytes": m.nbytes, "memory_offset": buffer.offset, "memory_type": m.kind.index,
                "queue_family": c.queue.family, "context": c.device_handle, "physical_device": c.physical_device,
                "instance": c.instance_handle, "queue": c.queue.handle, "device_uuid": _known(c.device_uuid),
                "driver_uuid": _known(c.driver_uuid)}


def _usable(c: Context) -> bool:
    try:
        c.check()
    except ExchangeError:
        return False
    return c.lost is None


def _known(uuid: bytes) -> bytes | None:
    return uuid if any(uuid) else None


def _device(place: Any) -> Device:
    from interop import Device

    found = place if place is not None else "vulkan:0"
    return Device(getattr(found, "device", found))


def _takes_descriptors(context: Context, party: Any) -> bool:
    """Whether somebody has to be given a descriptor; ExchangeError where that cannot be, and nothing else would do."""
    if party in ("process", context) or party == "interop":
        needed = party == "process"
    else:
        limits = party_limits(party)
        needed = "opaque_fd" in limits.imports
        if not needed and not _is_host(party):      # frameworks of several devices: those of a GPU take it by its API
            return context.has("VK_KHR_external_memory_fd") and bool((limits.devices or frozenset()) - _HOSTS - {_VULKAN})
    if needed:
        context.require("VK_KHR_external_memory_fd", f"sharing with {party}")
    return bool(needed)


def _is_host(party: Any) -> bool:
    """Whether somebody uses memory of the host and of nobody else."""
    from interop import Device

    if party in ("interop", "process"):
        return False
    if party == "numpy" or getattr(party, "__name__", None) == "numpy":
        return True
    if isinstance(party, Device) or (isinstance(party, str) and party.partition(":")[0] in ("cpu", "cuda_host", "rocm_host")):
        return Device(party).name in ("cpu", "cuda_host", "rocm_host")
    devices = party_limits(party).devices
    return devices is not None and devices <= _HOSTS


ADAPTER = VulkanAdapter()
register(ADAPTER)
