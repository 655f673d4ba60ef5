"""Strided copies as runs of bytes: what the adapters of CUDA, OpenCL and Vulkan share. Knows no driver and no tensor."""

from __future__ import annotations

from .host import HUGE, advise_huge, host_move
from .moves import Axis, Move, plan, simplified

__all__ = ["HUGE", "Axis", "Move", "advise_huge", "host_move", "plan", "simplified"]
