"""interop: tensor memory shared between frameworks and GPU APIs without copying.

``interop.to(x, "torch")`` gives another framework's object over the same bytes, ``interop.as_tensor(x)`` a neutral `Tensor` that speaks
every exchange protocol. Importing this imports NumPy and nothing heavier.
"""

from __future__ import annotations

try:
    from . import _core
except ModuleNotFoundError as e:
    if e.name != f"{__name__}._core":
        raise
    raise ImportError("interop is not built: run `make demo` in its checkout, or `pip install -e .`") from None

from . import registry, routing
from ._core import Device, DType, Tensor, as_tensor, from_dlpack, kind, to
from .decorators import accepts
from .errors import DeviceLostError, ExchangeError, LeaseError
from .routing import Route, copy_guard

registry.load_shipped()

__all__ = [
    "DType",
    "Device",
    "DeviceLostError",
    "ExchangeError",
    "LeaseError",
    "Route",
    "Tensor",
    "accepts",
    "as_tensor",
    "copy_guard",
    "from_dlpack",
    "kind",
    "to",
]
__version__ = "0.1.0"
