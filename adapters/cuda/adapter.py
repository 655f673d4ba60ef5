"""The adapter of CUDA memory: who allocates, copies, imports, exports and orders it, on `interop.contract`. Knows no framework."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, ExchangeError, Importable, Limits, Point, register, set_cuda_driver, stream_of

from . import copies, memory, pointers
from .driver import Driver
from .streams import CaptureError, EventPoint, Streams

if TYPE_CHECKING:
    from interop import Allocation, Device, ExternalHandle, Tensor

_CUDA, _CUDA_MANAGED = 2, 13


class CudaAdapter(Adapter):
    """Memory on ``cuda:N``, whoever allocated it. Also what the core asks of a driver (`contract.set_cuda_driver`)."""

    name = "cuda"
    device = "cuda"
    module = "cuda.bindings.driver"
    requires = "cuda-bindings"
    accepts = Limits(devices=frozenset({_CUDA, _CUDA_MANAGED}))
    shares = frozenset({"opaque_fd", "process"})

    def __init__(self, table: Any = None) -> None:
        """`table`: as `driver.Driver` takes it."""
        self.driver = Driver(table)
        self.streams = Streams(self.driver)
        self.memory = memory.Memory(self.driver, self.streams)
        self.copies = copies.Copies(self.driver, self.streams)

        # asked by the core, whose every frame on the way counts
        self.order, self.synchronize = self.streams.order, self.streams.synchronize
        self.idle, self.keep = self.streams.idle, self.streams.keep
        self._usable: bool | None = None
        self._devices = 0

    def can(self, capability: str) -> bool:
        """Whether there is a driver to do it; loads it."""
        if self._usable is None:
            self._usable = self.driver.available()
        return self._usable and super().can(capability)

    # ---- what the core asks (contract.set_cuda_driver) ----
    def pointer_device(self, address: int) -> int:
        """The ordinal of the GPU that an address is on."""
        return pointers.classify(self.driver, address).device

    def classify(self, address: int, claimed: tuple[int, int]) -> tuple[int, int]:
        """What memory an address is, as DLPack's pair; what was claimed, where there is no driver to ask."""
        if not self.can("limits"):
            return claimed
        found = pointers.classify(self.driver, address)
        return found.dl_type, 0 if found.kind == "pinned" else found.device

    def own_stream(self, device: int) -> int | None:
        """`Streams.own`; None where there is no driver."""
        found = self.streams.made.get(device)
        if found is None and self.can("record"):
            found = self.streams.own(device)
        return found

    def enter(self, device: int) -> Any:
        """Make a GPU current; what `leave` takes, or None: it is, or there is only one."""
        if not self._devices:
            self._devices = self.driver.count() if self.can("limits") else 1
        return None if self._devices == 1 else self.driver.enter(device)

    def leave(self, token: Any) -> None:
        """What was current before `enter` is so again."""
        self.driver.leave()

    # ---- capabilities ----
    def limits(self, place: Any) -> Limits:
        """What a GPU imports and exports."""
        return self.memory.limits(_ordinal(place))

    def importable(self, kind: str, *, place: Any) -> Importable:
        """From `limits`; pages of the host that are registered once stay so, and importing them again only counts them."""
        need = super().importable(kind, place=place)
        return replace(need, keeps=True) if kind == "host" else need

    def allocate(self, nbytes: int, *, place: Any, alignment: int, shared_with: tuple[Any, ...]) -> Allocation:
        """Device memory; exportable where somebody else than this process' CUDA shall see it."""
        return self.memory.allocate(self, nbytes, _ordinal(place), alignment, shared_with)

    def export_handle(self, allocation: Allocation, kind: str) -> ExternalHandle:
        """A file descriptor of memory that was made for it."""
        return self.memory.export(allocation, kind)

    def import_handle(self, handle: ExternalHandle, *, place: Any) -> Allocation:
        """The memory behind a file descriptor, or pages of the host, as device memory."""
        return self.memory.import_handle(self, handle, _ordinal(place))

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> Point | None:
        """Any strides, any two of host, pinned, managed and device memory, one GPU or two."""
        return self.copies.copy(dst, src, stream_of(stream, _device(dst, src)))

    def exports_of(self, allocation: Allocation) -> tuple[str, ...]:
        """What memory of others can be exported as: virtual memory in one piece that was made for it."""
        return self.memory.exports_of(allocation)

    def record(self, place: Any, stream: Any) -> Point | None:
        """When what a stream was given so far is done; None: interop's own stream.

        Of a captured stream that is now: the graph's launches are not known here, and memory that a graph uses is its owner's to keep.
        """
        device, number = _ordinal(place), stream_of(stream, _place(place))
        if number == -1:
            return None
        try:
            return self.streams.record(device, self.streams.own(device) if number is None else number)
        except CaptureError:
            return None

    def wait(self, place: Any, stream: Any, point: Point) -> bool:
        """Make a stream wait for a Point of CUDA's."""
        number = stream_of(stream, _place(place))
        parts: list[Any] = [p for p in getattr(point, "parts", (point,)) if not p.done()]
        if number is None or number == -1 or not all(isinstance(p, EventPoint) for p in parts):
            return False
        return all([p.wait_on(_ordinal(place), number) for p in parts])


def _device(*tensors: Tensor) -> Device:
    return next(t.device for t in tensors if t.device.name in ("cuda", "cuda_managed"))


def _ordinal(place: Any) -> int:
    device = _place(place)
    if device.name not in ("cuda", "cuda_managed"):
        raise ExchangeError(f"{device} is no CUDA device")
    return device.id


def _place(place: Any) -> Device:
    device: Device = getattr(place, "device", place)
    return device


ADAPTER = CudaAdapter()
register(ADAPTER)
set_cuda_driver(ADAPTER)
