"""CuPy. Read through `__dlpack__`; made from a pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, Limits, register

if TYPE_CHECKING:
    from interop import Device, Tensor

_CUDA, _CUDA_MANAGED = 2, 13


class CupyAdapter(Adapter):
    """cupy.ndarray."""

    name = "cupy"
    types = ("cupy.ndarray", "cupy._core.core.ndarray")
    requires = "cupy-cuda13x"
    # CuPy arrays are always writable
    accepts = Limits(readonly=False, devices=frozenset({_CUDA, _CUDA_MANAGED}))

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """A cupy.ndarray over `t`, ordered by CuPy's own stream handover."""
        import cupy

        return cupy.from_dlpack(t)

    def place(self, obj: Any) -> Device | None:
        """A cupy.cuda.Device."""
        if type(obj).__module__ != "cupy.cuda.device" or type(obj).__name__ != "Device":
            return None
        from interop import Device

        return Device(f"cuda:{obj.id}")


register(CupyAdapter())
