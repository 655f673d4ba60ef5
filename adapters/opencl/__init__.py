"""OpenCL: buffers, images and SVM as tensors, and pyopencl's arrays that share with everything. Nothing is loaded before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adapter import ADAPTER

if TYPE_CHECKING:
    from .arrays import events
    from .context import Context, devices
    from .images import ImageNative, image_native, wrap_image
    from .kernel import Kernel
    from .memory import Native, native, wrap
    from .pool import allocator
    from .svm import svm_buffer

#: Public name -> the module that has it, imported when it is first asked for.
_WHERE = {"Context": "context", "ImageNative": "images", "Kernel": "kernel", "Native": "memory", "allocator": "pool", "devices": "context",
          "events": "arrays", "image_native": "images", "native": "memory", "svm_buffer": "svm", "wrap": "memory", "wrap_image": "images"}

__all__ = ["ADAPTER", "Context", "ImageNative", "Kernel", "Native", "allocator", "devices", "events", "image_native", "native",
           "svm_buffer", "wrap", "wrap_image"]


def __getattr__(name: str) -> Any:
    """The public names, whose modules are not imported before."""
    import importlib

    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = found
    return found
