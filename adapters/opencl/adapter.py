"""The adapter of OpenCL's memory and of pyopencl's objects, on `interop.contract`. Knows no other framework.

Importing this imports no pyopencl and opens no driver: each capability brings what it takes when it is first asked for.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, ExchangeError, Importable, Limits, Mapped, Point, party_limits, register

if TYPE_CHECKING:
    from interop import Allocation, ExternalHandle, Tensor

    from .context import Context, Contexts

_OPENCL = 4
_HOSTS = frozenset({1, 3, 11})
_PLACES = ("CommandQueue", "Context", "Device")


class OpenCLAdapter(Adapter):
    """Memory on ``opencl:N``. A place is a pyopencl CommandQueue or Context, a `Context`, or a Device: the one opened for that number."""

    name = "opencl"
    device = "opencl"
    module = "pyopencl"
    requires = "pyopencl"
    types = ("pyopencl.array.Array", "pyopencl._cl.Buffer", "pyopencl._cl.PooledBuffer", "pyopencl._cl.Image",
             "pyopencl._cl.SVM", "pyopencl._cl.SVMAllocation", "pyopencl._cl.PooledSVM")
    exact = ("pyopencl.array.Array",)
    reads = "adapter"
    orders = True
    # Arrays are always writable, as far as they know
    accepts = Limits(readonly=False, devices=frozenset({_OPENCL}))

    def __init__(self) -> None:
        """Nothing is opened yet."""
        self._contexts: Contexts | None = None

    # ---- places ----
    def context(self, place: Any) -> Context:
        """The Context of a place; ExchangeError where there is no driver, TypeError where it is no place."""
        from . import context, loader

        if isinstance(place, context.Context):
            place.check()
            return place
        if self._contexts is None:
            self._contexts = context.Contexts()
        cl = loader.module()
        if isinstance(place, cl.CommandQueue):
            return self._contexts.get(self, place.context, place.device)
        if isinstance(place, cl.Context):
            return self._contexts.get(self, place, place.devices[0])
        if isinstance(place, cl.Device):
            return self._contexts.default(self, context.number_of(place))
        from interop import Device

        device = Device(place if place is not None else "opencl:0")
        if device.name != "opencl":
            raise ExchangeError(f"{device} is no OpenCL device")
        return self._contexts.default(self, device.id)

    def place(self, obj: Any) -> Any:
        """The Context of a pyopencl CommandQueue, Context or Device."""
        kind = type(obj)
        if kind.__name__ not in _PLACES or not kind.__module__.startswith("pyopencl"):
            return None
        return self.context(obj)

    def forget(self, context: Context) -> None:
        """A Context was closed."""
        if self._contexts is not None:
            self._contexts.forget(context)

    def missing(self) -> str | None:
        """pyopencl, where it is not installed. Imports nothing."""
        if "pyopencl" in sys.modules or importlib.util.find_spec("pyopencl") is not None:
            return None
        return "pip install pyopencl"

    # ---- objects ----
    def to_tensor(self, x: Any) -> Tensor:
        """A Tensor over an Array, a Buffer (its bytes), an Image (layout "cl-image"), or fine-grained SVM."""
        from . import arrays

        return arrays.to_tensor(x)

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """A pyopencl.array.Array over `t` on the queue of `place` or `stream`, with the events to wait for."""
        from . import arrays

        return arrays.from_tensor(t, place, stream)

    def queue_of(self, x: Any) -> Any:
        """The CommandQueue of an Array; None: it has none."""
        return getattr(x, "queue", None)

    # ---- memory ----
    def limits(self, place: Any) -> Limits:
        """What a Context imports."""
        c = self.context(place)
        return Limits(devices=frozenset({_OPENCL}), alignment=c.data_alignment, imports=frozenset({"host"} if c.unified else ()))

    def importable(self, kind: str, *, place: Any) -> Importable:
        """What importing a kind of handle takes."""
        from . import memory

        if kind != "host":
            return Importable(False, f"OpenCL imports pages of the host, not {kind}")
        return memory.importable(self.context(place))

    def allocate(self, nbytes: int, *, place: Any, alignment: int, shared_with: tuple[Any, ...]) -> Allocation:
        """A cl_mem; memory of the host's where frameworks of the host shall see it, aligned as they need it."""
        from . import memory

        host = False
        for party in shared_with:
            if party not in ("interop", "process"):
                limits = party_limits(party)
                if limits.devices is None or limits.devices & _HOSTS:
                    host, alignment = True, max(alignment, limits.alignment)
        queue = place if type(place).__name__ == "CommandQueue" else None
        return memory.allocate(self.context(place), nbytes, host=host, alignment=alignment, queue=queue)

    def import_handle(self, handle: ExternalHandle, *, place: Any) -> Allocation:
        """Pages of the host as a cl_mem over them."""
        from . import memory

        return memory.import_pages(self.context(place), handle)

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
        """Make a queue wait for a Point on cl_events of its context; False for any other."""
        if point.done() and point.error() is None:
            return True
        return point.stream_wait(self.context(place).find_queue(_queue(stream)))

    def record(self, place: Any, stream: Any) -> Point:
        """When what a queue was given so far, by whomever, is done."""
        from . import queues

        c = self.context(place)
        return queues.mark(c.driver, c.find_queue(_queue(stream)), c.handle)

    # ---- the side channel ----
    def native_fields(self, allocation: Allocation) -> dict[str, Any]:
        """Where the cl_mem is valid."""
        from . import memory

        mem = memory.known(allocation)
        if mem is None:
            return {}
        c = mem.context
        return {"context": c.handle, "physical_device": c.device_handle, "instance": int(c.cl_device.platform.int_ptr), "queue": mem.queue}


def _queue(stream: Any) -> Any:
    """A queue; None for a context or device of pyopencl's, which is a place and no queue."""
    return None if type(stream).__name__ in ("Context", "Device") else stream


ADAPTER = OpenCLAdapter()
register(ADAPTER)
