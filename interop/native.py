"""The side channel: what a DLPack capsule cannot carry. Placeholder module: see native.pxi."""

from __future__ import annotations

from typing import Any


def capsule_of(t: Any, max_version: Any) -> Any:
    """Filled in by the next commit."""
    raise AttributeError("__interop_native__")
