"""Vulkan: buffers, images and memory of VkDevices as tensors. Nothing is loaded before a Context is opened or wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adapter import ADAPTER

if TYPE_CHECKING:
    from .buffers import Native, native
    from .context import Context
    from .images import ImageNative, image_native, set_layout
    from .needs import Requirements, requirements
    from .shader import Shader

#: Public name -> the module that has it, imported when it is first asked for.
_WHERE = {"Context": "context", "ImageNative": "images", "Native": "buffers", "Requirements": "needs", "Shader": "shader",
          "image_native": "images", "native": "buffers", "requirements": "needs", "set_layout": "images"}

__all__ = ["ADAPTER", "Context", "ImageNative", "Native", "Requirements", "Shader", "image_native", "native", "requirements", "set_layout"]


def __getattr__(name: str) -> Any:
    """The public names, whose modules are not imported before."""
    import importlib

    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = found
    return found
