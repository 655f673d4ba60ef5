"""interop: tensor memory shared between frameworks and GPU APIs without copying.

``interop.to(x, "torch")`` gives another framework's object over the same bytes, ``interop.as_tensor(x)`` a neutral `Tensor` that speaks
every exchange protocol. Importing this imports NumPy and nothing heavier.
"""

from __future__ import annotations

try:
    import _interpreters  # type: ignore[import-not-found]     # typeshed knows neither in 3.11
except ImportError:
    try:
        import _xxsubinterpreters as _interpreters  # type: ignore[import-not-found]
    except ImportError:
        _interpreters = None
if _interpreters is not None and _interpreters.get_current() != _interpreters.get_main():
    # one set of static types and one GIL is what the core and its deleters are built on
    raise ImportError("interop does not work in a sub-interpreter: import it in the main one, or use processes")

try:
    from . import _core
except ImportError as e:
    if e.name != f"{__name__}._core" and not (e.name == __name__ and "'_core'" in str(e)):
        raise
    raise ImportError("interop is not built in this folder: run `make demo` in the checkout, or `pip install -e .`; what `pip install .` "
                      "installed is found from any other folder") from None

from . import leases, memory, native, points, registry, shutdown, transfer
from ._core import Allocation, Device, DType, Tensor, as_tensor, from_dlpack, kind, to
from .decorators import accepts
from .errors import DeviceLostError, ExchangeError, LeaseError
from .leases import Lease, acquire
from .memory import Context, ExternalHandle, NativeHandle, empty, wrap
from .points import Point
from .routing import Route, copy_guard
from .transfer import copyto

_core.set_upward(conflict=leases.conflict, ready=points.make_ready, queue=points.check_queue, map=leases.map_tensor, move=transfer.move,
                 native=native.capsule_of, export=memory.export, exports=memory.exports_of, pages=memory.import_pages,
                 host_view=memory.host_view,
                 copies=registry.copies, copyto=transfer.copy_on)
shutdown.install()
registry.load_shipped()

__all__ = [
    "Allocation",
    "Context",
    "DType",
    "Device",
    "DeviceLostError",
    "ExchangeError",
    "ExternalHandle",
    "Lease",
    "LeaseError",
    "NativeHandle",
    "Point",
    "Route",
    "Tensor",
    "accepts",
    "acquire",
    "as_tensor",
    "copy_guard",
    "copyto",
    "empty",
    "from_dlpack",
    "kind",
    "to",
    "wrap",
]
__version__ = "0.1.0"
