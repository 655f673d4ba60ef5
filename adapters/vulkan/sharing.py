"""Memory objects that cross Contexts and processes as file descriptors: opaque ones, and dma-buf where the device has it.

An opaque descriptor means something to the same device and the same build of the driver only (Vulkan, External Memory Handle Types
Compatibility), which two UUIDs say; it is imported with the size, type and dedication that its exporter says.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Any

from interop.contract import ExchangeError, Importable

from . import api as vk
from . import memory
from .loader import VulkanError
from .memory import KINDS, Buffer, Memory

if TYPE_CHECKING:
    from interop import Allocation, ExternalHandle

    from .context import Context

_FDS = ("opaque_fd", "dma_buf")


def export(allocation: Allocation, kind: str) -> ExternalHandle:
    """A new descriptor of the whole memory object; `offset` says where the Allocation begins in it."""
    from interop import ExternalHandle

    buffer = memory.of(allocation, f"exporting as {kind}")
    m, c = buffer.memory, buffer.context
    if kind not in _FDS or kind not in m.exports:
        raise ExchangeError(f"this memory object was not made to be exported as {kind}",
                            "interop.empty(..., shared_with=['process']), or wrap_buffer(handle_types=[...]) where it was")
    c.check()
    fd = ctypes.c_int(-1)
    info = vk.VkMemoryGetFdInfoKHR(memory=m.handle, handleType=KINDS[kind][0])
    c.ok(c.vk.vkGetMemoryFdKHR(c.device_handle, info, ctypes.byref(fd)), "vkGetMemoryFdKHR")
    if fd.value < 0:            # lavapipe, of memory that was not allocated for it (measured.md A3)
        raise ExchangeError(f"vkGetMemoryFdKHR succeeded and gave descriptor {fd.value}: the memory object was not allocated for {kind}",
                            "VkExportMemoryAllocateInfo has to name the kind")
    try:
        os.set_inheritable(fd.value, False)
        return ExternalHandle(kind, fd.value, m.nbytes, offset=buffer.first, dedicated=m.dedicated, memory_type=m.kind.index,
                              device_uuid=c.device_uuid, driver_uuid=c.driver_uuid)
    except BaseException:
        os.close(fd.value)
        raise


def importable(context: Context, kind: str) -> Importable:
    """What importing a descriptor takes; memory types and sizes are the handle's to say."""
    extension = KINDS[kind][1]
    if not context.has(extension):
        there = extension in context.physical.extensions
        return Importable(False, f"{extension} {'was not enabled for this device' if there else 'is not on ' + context.physical.name}")
    says = memory.external(context, kind, memory.usage_of(context))
    if not says.importable:
        return Importable(False, f"{context.physical.name} imports no buffers as {kind}")
    types = frozenset(m.index for m in context.memory_types) if kind == "opaque_fd" else None
    return Importable(True, dedicated=says.dedicated_only, memory_types=types)


def import_fd(context: Context, handle: ExternalHandle) -> Allocation:
    """The memory behind a descriptor, from the handle's offset on, as one buffer. The descriptor is taken where this succeeds.

    Raises:
        ExchangeError: another device or driver, a size or type that does not fit, or what the driver refuses. Nothing is left then.
    """
    context.check()
    kind = handle.kind
    context.require(KINDS[kind][1], f"importing {kind}")
    if kind == "opaque_fd":
        _check_origin(context, handle)
    mode = os.fstat(handle.fileno()).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISDIR(mode):       # drivers read it, and may do so for ever
        raise ExchangeError(f"descriptor {handle.fileno()} is a pipe, a socket or a folder, and no memory")
    nbytes, offset = _meant(handle)
    types, usage = KINDS[kind][0], memory.usage_of(context)
    with contextlib.ExitStack() as undo:
        buffer = memory.create_buffer(context, nbytes, usage, types)
        undo.callback(context.vk.vkDestroyBuffer, context.device_handle, buffer, None)
        need = memory.need_of(context, buffer)
        if offset % need.alignment:
            raise ExchangeError(f"the memory begins {offset} bytes into its memory object, not at a multiple of {need.alignment}, "
                                "where a buffer can be bound", "export memory that has a memory object of its own")
        if offset + need.size > handle.nbytes:
            raise ExchangeError(f"a buffer of {nbytes} bytes takes {need.size} here, and the memory object has {handle.nbytes}, "
                                f"of which {offset} are before it", "let its exporter round the size up")
        if handle.dedicated and offset:
            raise ExchangeError(f"a dedicated allocation, and its memory begins at byte {offset}: dedicated memory has one buffer, at 0")
        chosen = _type(context, handle, need)
        fd = fcntl.fcntl(handle.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)
        chain: list[Any] = [vk.VkImportMemoryFdInfoKHR(handleType=types, fd=fd)]
        if handle.dedicated:
            chain.append(vk.VkMemoryDedicatedAllocateInfo(buffer=buffer))
        try:
            made = memory.allocate_memory(context, handle.nbytes, chosen, *chain)
        except BaseException as e:
            _close_unless_taken(fd, handle.fileno())
            if isinstance(e, VulkanError):
                raise _refused(context, handle, e) from e
            raise
        handle.close()              # consumed: the driver has a descriptor of its own (VkImportMemoryFdInfoKHR)
        undo.callback(context.vk.vkFreeMemory, context.device_handle, made, None)
        memory.bind(context, buffer, made, offset)
        undo.pop_all()
    # not exported again: that would take VkExportMemoryAllocateInfo beside the import, which few drivers have
    m = Memory(context, made, handle.nbytes, chosen, dedicated=handle.dedicated)
    return memory.allocation_of(Buffer(m, buffer, offset, nbytes, usage), alignment=need.alignment)


def _close_unless_taken(fd: int, original: int) -> None:
    """After a refusal. Drivers (lavapipe 22.3) close some of those that they refuse: then the number is nobody's, or another thread's."""
    with contextlib.suppress(OSError):
        if os.path.sameopenfile(fd, original):
            os.close(fd)


def _check_origin(context: Context, handle: ExternalHandle) -> None:
    from interop import Allocation

    ours = context.device_uuid
    if handle.device_uuid is None or handle.device_uuid != ours or not any(ours):
        raise ExchangeError(f"the descriptor is memory of device {_name(handle.device_uuid)}, and {context.device} is "
                            f"{_name(ours)}: device memory is shared on one and the same device only",
                            "set device_uuid of the handle, as its exporter says it" if handle.device_uuid is None else
                            "import it on the device that it is on, or copy: interop.copyto(...)")
    # CUDA and OpenCL name neither driver nor memory type; of Vulkan's memory both are part of what the descriptor means
    made_by_vulkan = handle.driver_uuid is not None or handle.memory_type is not None
    if made_by_vulkan and (handle.driver_uuid != context.driver_uuid or not any(context.driver_uuid)):
        raise ExchangeError(f"the descriptor is of driver {_name(handle.driver_uuid)}, and {context.device} is driven by "
                            f"{_name(context.driver_uuid)}: opaque descriptors mean something to one and the same build of a driver only",
                            "share through the host: interop.empty(..., device='cpu', shared_with=[...])")
    owner = handle.owner
    exported = memory.find(owner) if isinstance(owner, Allocation) else None
    if exported is not None and (exported.memory.nbytes, exported.memory.dedicated) != (handle.nbytes, handle.dedicated):
        m = exported.memory
        raise ExchangeError(f"the handle says {handle.nbytes} bytes{', dedicated' * handle.dedicated}, and the memory object has "
                            f"{m.nbytes}{', dedicated' * m.dedicated}: an import takes what was allocated",
                            "leave the fields as export gave them")


def _type(context: Context, handle: ExternalHandle, need: memory.Need) -> Any:
    bits = need.bits
    if handle.kind == "dma_buf":
        says = vk.VkMemoryFdPropertiesKHR()
        context.ok(context.vk.vkGetMemoryFdPropertiesKHR(context.device_handle, KINDS["dma_buf"][0], handle.fileno(), ctypes.byref(says)),
                   "vkGetMemoryFdPropertiesKHR")
        bits &= says.memoryTypeBits
    elif handle.memory_type is not None:
        index = handle.memory_type
        if not bits >> index & 1:
            raise ExchangeError(f"memory type {index}, which the descriptor has, is none that a buffer can have here "
                                f"(memoryTypeBits {bits:#x})")
        return context.memory_types[index]
    return memory.choose(context, bits, memory.FOR_DEVICE)


def _refused(context: Context, handle: ExternalHandle, e: VulkanError) -> ExchangeError:
    what = f"{context.physical.name} does not import this {handle.kind} of {handle.nbytes} bytes: {e.code or e.reason}"
    if e.code == "VK_ERROR_INVALID_EXTERNAL_HANDLE" and handle.driver_uuid is None:
        return ExchangeError(f"{what}; it is not said to be Vulkan's, and only some drivers import CUDA's or OpenCL's",
                             "allocate with Vulkan and import there")
    return type(e)(what, e.remedy, e.code)


def _meant(handle: ExternalHandle) -> tuple[int, int]:
    """``(nbytes, offset)`` of what a handle means within its memory object."""
    from interop import Allocation

    rest = handle.nbytes - handle.offset
    return min(rest, handle.owner.nbytes) if isinstance(handle.owner, Allocation) else rest, handle.offset


def _name(uuid: bytes | None) -> str:
    return "unknown" if uuid is None or not any(uuid) else uuid.hex()
