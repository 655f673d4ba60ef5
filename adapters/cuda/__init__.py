"""CUDA: memory, streams and copies through the driver API. `adapter` has the contract's face, the other modules a noun each.

Nothing is imported, and no context made, before memory on a GPU, or two different streams, ask for it.
"""

from __future__ import annotations

from .adapter import ADAPTER

__all__ = ["ADAPTER"]
