"""Memory that copies pass through: a few chunks that the host sees, used over and over, and scratch that lasts for one copy.

Where the host sees the memory itself nothing passes through here (measured.md I: staging halves the speed). Knows Contexts, no tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from interop.contract import Point

from . import api as vk
from . import handles, memory
from .queue import HOST_TIMEOUT

if TYPE_CHECKING:
    from .context import Context

#: Bytes of a chunk, and chunks that a Context can have; they are allocated when first needed, and kept until it closes.
CHUNK = 4 << 20
CHUNKS = 4
#: Pass through here also where the host sees the memory: what tests do on a device all of whose memory it sees.
FORCED = False

_USAGE = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
# coherent memory that the host sees is on every device (Vulkan, Device Memory Properties); cached, where there is a choice
_COHERENT = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
_VISIBLE = (_COHERENT | vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT, _COHERENT)


_NOBODY: deque[tuple[Point, Any]] = deque()


class Scratch:
    """A buffer that goes when nobody holds this, or with its Context. One of a ring goes with the Context, which it does not keep alive.

    Attributes:
        handle, nbytes: the VkBuffer and its size.
        address: where the host sees it; 0: it does not.
        busy: when the device is done with what was last put there.
    """

    __slots__ = ("__weakref__", "_context", "_key", "address", "busy", "handle", "nbytes")

    def __init__(self, context: Context, nbytes: int, *, visible: bool = False) -> None:
        """`visible`: the host sees it, and it is of a ring. VulkanError or OutOfMemory where there is no memory for it."""
        self._context = None if visible else context
        self._key, self.nbytes, self.address = 0, nbytes, 0
        self.busy: Point | None = None
        t, device = context.vk, context.device_handle
        self.handle = memory.create_buffer(context, nbytes, _USAGE)
        below = 0
        try:
            need = memory.need_of(context, self.handle)
            kind = memory.choose(context, need.bits, _VISIBLE if visible else memory.FOR_DEVICE, need.size)
            alone = [vk.VkMemoryDedicatedAllocateInfo(buffer=self.handle)] if need.dedicated else []
            below = memory.allocate_memory(context, need.size, kind, *alone)
            memory.bind(context, self.handle, below, 0)
            if visible:
                out = ctypes.c_void_p()
                context.ok(t.vkMapMemory(device, below, 0, vk.VK_WHOLE_SIZE, 0, ctypes.byref(out)), "vkMapMemory")
                self.address = handles.owned(out.value or 0, "vkMapMemory")
        except BaseException:
            _destroy(t, device, self.handle, below)
            raise
        self._key = context.own(functools.partial(_destroy, t, device, self.handle, below))

    def __del__(self) -> None:
        """Gone where no queue uses it any more; else its Context destroys it when it closes."""
        context = getattr(self, "_context", None)
        if context is not None and self._key and context.alive and (self.busy is None or self.busy.done()):
            context.release(self._key)


def _destroy(table: Any, device: int, buffer: int, below: int) -> None:
    table.vkDestroyBuffer(device, buffer, None)
    if below:
        table.vkFreeMemory(device, below, None)


class Ring:
    """The chunks of a Context."""

    def __init__(self) -> None:
        """Nothing is allocated."""
        self._free: deque[Scratch] = deque()
        self._lock = threading.Lock()
        self.made = 0

    def take(self, context: Context) -> Scratch:
        """A chunk that may be written to; TimeoutError after `HOST_TIMEOUT`.

        Whoever holds one does not wait for another: two that did so could wait for each other.
        """
        end = time.monotonic() + HOST_TIMEOUT
        while True:
            chunk = self.take_now(context)
            if chunk is not None:
                return chunk
            context.check_lost()
            if time.monotonic() > end:
                raise TimeoutError(f"no chunk of staging memory was free within {HOST_TIMEOUT:.0f} s")
            time.sleep(0.0001)

    def take_now(self, context: Context) -> Scratch | None:
        """`take`; None where all are in use."""
        for _ in range(len(self._free)):
            try:
                chunk = self._free.popleft()            # atomic, and the one that has been busy for longest
            except IndexError:
                break
            if chunk.busy is None or chunk.busy.done():
                chunk.busy = None
                return chunk
            self._free.append(chunk)
        with self._lock:
            if self.made == CHUNKS:
                return None
            self.made += 1
        try:
            return Scratch(context, CHUNK, visible=True)
        except BaseException:
            with self._lock:
                self.made -= 1
            raise

    def give(self, chunk: Scratch) -> None:
        """Take a chunk back; it is used again when it is not `busy` any more."""
        self._free.append(chunk)


def keep(context: Context, until: Point, thing: Any) -> None:
    """Hold `thing` until a Point is done and `sweep` comes by, or the Context closes.

    Not `contract.keep_until`, which lets go on a thread of its own: that could destroy what it holds while the device goes.
    """
    sweep(context)
    vars(context).setdefault("_kept", deque()).append((until, thing))


def sweep(context: Context) -> None:
    """Let go of what was kept and is not used any more. Never blocks."""
    kept: deque[tuple[Point, Any]] = vars(context).get("_kept", _NOBODY)
    with contextlib.suppress(IndexError):           # another thread took the last
        while kept and kept[0][0].done():
            kept.popleft()


def of(context: Context) -> Ring:
    """The ring of a Context, which holds it: what is busy in it refers back to the Context."""
    ring: Ring | None = vars(context).get("_ring")
    return ring if ring is not None else vars(context).setdefault("_ring", Ring())      # in one step: threads get the same one
