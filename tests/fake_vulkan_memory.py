"""The fake driver's buffers and memory: real bytes, lazily there, so that 6 GiB cost nothing. What is queued is `fake_vulkan_queue`'s."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from interop.adapters.vulkan import api as vk

_OPAQUE, _HOST = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT, vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
_VISIBLE, _COHERENT = 2, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_RW, _SHARED, _PRIVATE, _ANONYMOUS, _NORESERVE = 3, 1, 2, 0x20, 0x4000


def mapped(size: int, fd: int = -1) -> int:
    """Zeros that are there when they are touched, or a file's bytes; the address."""
    flags = _SHARED if fd >= 0 else _PRIVATE | _ANONYMOUS
    at = _libc.mmap(None, size, _RW, flags | _NORESERVE, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"mmap of {size} bytes")
    return int(at)


class Backing:
    """The bytes of a memory object, as memory has them. `cache`: what the device wrote and has not made available to the host."""

    def __init__(self, size: int, *, fd: int = -1, address: int = 0, visible: bool = True) -> None:
        self.size, self.fd, self.visible, self.users, self.pages = size, fd, visible, 1, bool(address)
        self.address = address or mapped(size, fd)
        self.cache: list[tuple[int, bytes, Any]] = []

    def read(self, at: int, n: int) -> bytes:
        if not self.users:
            return bytes(n)             # freed, which was said then
        out = bytearray(ctypes.string_at(self.address + at, n))
        for lo, data, _ in self.cache:
            first, last = max(lo, at), min(lo + len(data), at + n)
            if first < last:
                out[first - at:last - at] = data[first - lo:last - lo]
        return bytes(out)

    def write(self, at: int, data: bytes, queue: Any) -> None:
        if not self.users:
            return
        if self.visible:
            self.cache.append((at, data, queue))
        else:
            ctypes.memmove(self.address + at, data, len(data))

    def show(self, queue: Any) -> None:
        """What this queue wrote, or all (None), is available to the host."""
        left = []
        for entry in self.cache:
            if queue in (None, entry[2]):
                ctypes.memmove(self.address + entry[0], entry[1], len(entry[1]))
            else:
                left.append(entry)
        self.cache = left

    def drop(self) -> None:
        self.users -= 1
        if not self.users:
            if self.fd >= 0:
                os.close(self.fd)
            if not self.pages:
                _libc.munmap(self.address, self.size)


class Memory:
    """Functions of buffers and memory."""

    def __init__(self: Any) -> None:
        self.backings: list[Backing] = []
        self.shared: dict[tuple[int, int], Backing] = {}    # of descriptors: (device, inode)

    # ---- buffers ----
    def vkCreateBuffer(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        i, more = info[0], self.chain(info[0])
        if not i.size:
            self.blame("VUID-VkBufferCreateInfo-size-00912", "size 0")
        if not i.usage:
            self.blame("VUID-VkBufferCreateInfo-None-09499", "usage 0")
        external = more.get("VkExternalMemoryBufferCreateInfo")
        d = self.get(device, "Device")
        if i.usage & vk.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT and "bufferDeviceAddress" not in d.features:
            self.blame("VUID-VkBufferCreateInfo-usage", "a device address, and the feature is off")
        out[0] = self.make("Buffer", d, size=i.size, usage=i.usage, external=external.handleTypes if external else 0, memory=None,
                           offset=0).handle
        return 0

    def vkDestroyBuffer(self: Any, device: int, buffer: int, _: Any) -> None:
        self.get(device, "Device")
        self.end(buffer, "Buffer")

    def vkGetBufferMemoryRequirements2(self: Any, device: int, info: Any, out: Any) -> None:
        b, c = self.get(info[0].buffer, "Buffer"), self.config
        r = out[0].memoryRequirements
        r.size, r.alignment = -(-b.size // c.size_multiple) * c.size_multiple, c.alignment
        r.memoryTypeBits = (1 << len(c.types)) - 1
        dedicated = self.chain(out[0]).get("VkMemoryDedicatedRequirements")
        if dedicated is not None:
            dedicated.requiresDedicatedAllocation = c.dedicated == "requires" and b.external != _HOST
            dedicated.prefersDedicatedAllocation = bool(c.dedicated) and b.external != _HOST

    def vkGetBufferDeviceAddress(self: Any, device: int, info: Any) -> int:
        b = self.get(info[0].buffer, "Buffer")
        if not b.usage & vk.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT or b.memory is None:
            self.blame("VUID-VkBufferDeviceAddressInfo-buffer-02601", f"{b}")
        return (1 << 40) + b.memory.handle * (1 << 20) + b.offset

    def vkBindBufferMemory(self: Any, device: int, buffer: int, memory: int, offset: int) -> int:
        b, m, c = self.get(buffer, "Buffer"), self.get(memory, "Memory"), self.config
        need = -(-b.size // c.size_multiple) * c.size_multiple
        if b.memory is not None:
            self.blame("VUID-vkBindBufferMemory-buffer-07459", f"{b} is bound")
        if offset % c.alignment:
            self.blame("VUID-vkBindBufferMemory-None-10739", f"offset {offset}, alignment {c.alignment}")
        if offset + need > m.size:
            self.blame("VUID-vkBindBufferMemory-None-10741", f"{need} bytes at {offset} of {m.size}")
        if c.dedicated == "requires" and b.external != _HOST and m.dedicated != buffer:
            self.blame("VUID-vkBindBufferMemory-buffer-01444", f"{b} takes a dedicated allocation")
        if m.dedicated and (m.dedicated != buffer or offset):
            self.blame("VUID-vkBindBufferMemory-memory-01508", f"{m} is dedicated to {m.dedicated:#x}")
        if (m.exports or m.imported) and not b.external & (m.exports or m.imported):
            self.blame("VUID-vkBindBufferMemory-memory-02726", f"{b} was made for {b.external:#x}, {m} for {m.exports or m.imported:#x}")
        b.memory, b.offset = m, offset
        m.bound.append(b)
        return 0

    # ---- memory ----
    def vkAllocateMemory(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        d, i, more, c = self.get(device, "Device"), info[0], self.chain(info[0]), self.config
        size, flags = i.allocationSize, c.types[i.memoryTypeIndex][0]
        fd, pages = more.get("VkImportMemoryFdInfoKHR"), more.get("VkImportMemoryHostPointerInfoEXT")
        exports = more["VkExportMemoryAllocateInfo"].handleTypes if "VkExportMemoryAllocateInfo" in more else 0
        dedicated = more.get("VkMemoryDedicatedAllocateInfo")
        alone = (dedicated.buffer or dedicated.image or 0) if dedicated else 0
        if not size:
            self.blame("VUID-VkMemoryAllocateInfo-pNext-01874", "allocationSize 0")
        if size > c.heaps[c.types[i.memoryTypeIndex][1]]:
            self.blame("VUID-vkAllocateMemory-pAllocateInfo-01713", f"{size} bytes, more than the heap")
        if size > c.max_allocation:
            return vk.VK_ERROR_OUT_OF_DEVICE_MEMORY
        if alone:
            b = self.objects[alone]
            if b.kind == "Buffer" and -(-b.size // c.size_multiple) * c.size_multiple != size:
                self.blame("VUID-VkMemoryDedicatedAllocateInfo-buffer-01965", f"{size} bytes for {b.size}")
        if exports and "VK_KHR_external_memory_fd" not in d.extensions:
            self.blame("extension", "VkExportMemoryAllocateInfo")
        visible, kind = bool(flags & _VISIBLE), 0
        if fd is not None:
            backing, kind = self._take(fd.fd, size, i.memoryTypeIndex, bool(alone), d), fd.handleType
        elif pages is not None:
            backing, kind = self._pages(pages.pHostPointer, size, i.memoryTypeIndex, d), pages.handleType
        else:
            number = os.memfd_create("fake vulkan", os.MFD_CLOEXEC) if exports else -1
            if exports:
                os.ftruncate(number, size)
            backing = Backing(size, fd=number, visible=visible)
            if exports:
                s = os.fstat(number)
                self.shared[s.st_dev, s.st_ino] = backing
                backing.said = size, i.memoryTypeIndex, bool(alone)    # type: ignore[attr-defined]
        if backing not in self.backings:
            self.backings.append(backing)
        out[0] = self.make("Memory", d, size=size, type=i.memoryTypeIndex, flags=flags, exports=exports, imported=kind, dedicated=alone,
                           backing=backing, bound=[], mapped=0, host=0).handle
        return 0

    def _take(self: Any, fd: int, size: int, kind: int, alone: bool, device: Any) -> Backing:
        from fake_vulkan import Refused

        if "VK_KHR_external_memory_fd" not in device.extensions:
            self.blame("extension", "VkImportMemoryFdInfoKHR")
        s = os.fstat(fd)
        found = self.shared.get((s.st_dev, s.st_ino))
        if found is None:
            raise Refused(vk.VK_ERROR_INVALID_EXTERNAL_HANDLE)
        if found.said != (size, kind, alone):           # type: ignore[attr-defined]
            self.blame("VUID-VkMemoryAllocateInfo-allocationSize-01742", f"said {(size, kind, alone)}, is {found.said}")  # type: ignore[attr-defined]
        os.close(fd)                                    # it is the driver's now
        found.users += 1
        return found

    def _pages(self: Any, address: int, size: int, kind: int, device: Any) -> Backing:
        from fake_vulkan import Refused

        c = self.config
        if "VK_EXT_external_memory_host" not in device.extensions:
            self.blame("extension", "VkImportMemoryHostPointerInfoEXT")
        if address % c.page or size % c.page:
            self.blame("VUID-VkMemoryAllocateInfo-allocationSize-01745", f"{size} bytes at {address:#x}, pages of {c.page}")
        if not self._page_types() >> kind & 1:
            self.blame("VUID-VkMemoryAllocateInfo-memoryTypeIndex-01744", f"type {kind}")
        for b in self.backings:
            if b.pages and b.users and b.address < address + size and address < b.address + b.size and not c.overlap:
                raise Refused(vk.VK_ERROR_INVALID_EXTERNAL_HANDLE)
        return Backing(size, address=address)

    def _page_types(self: Any) -> int:
        c = self.config
        coherent = sum(1 << i for i, (f, _) in enumerate(c.types) if f & _COHERENT and f & _VISIBLE)
        return coherent if c.page_types is None else c.page_types

    def vkFreeMemory(self: Any, device: int, memory: int, _: Any) -> None:
        self.get(device, "Device")
        m = self.end(memory, "Memory")
        if m is None:
            return
        for b in m.bound:
            if b.alive and b.busy:
                self.blame("VUID-vkFreeMemory-memory-00677", f"{b} in {m} is in use")
        if m.host:
            _libc.munmap(m.host, m.size)
        m.backing.drop()
        if not m.backing.users:
            self.backings.remove(m.backing)

    def vkMapMemory(self: Any, device: int, memory: int, offset: int, size: int, flags: int, out: Any) -> int:
        m = self.get(memory, "Memory")
        if m.mapped:
            self.blame("VUID-vkMapMemory-memory-00678", f"{m} is mapped")
        if not m.flags & _VISIBLE:
            self.blame("VUID-vkMapMemory-memory-00682", f"{m} is not host-visible")
        if offset >= m.size or (size != vk.VK_WHOLE_SIZE and offset + size > m.size):
            self.blame("VUID-vkMapMemory-offset-00679", f"{size} at {offset} of {m.size}")
        if not m.flags & _COHERENT and not m.host:
            m.host = mapped(m.size)
        m.mapped = (m.host or m.backing.address) + offset
        out[0] = m.mapped
        return 0

    def vkUnmapMemory(self: Any, device: int, memory: int) -> None:
        m = self.get(memory, "Memory")
        if not m.mapped:
            self.blame("VUID-vkUnmapMemory-memory-00689", f"{m} is not mapped")
        m.mapped = 0

    def _ranges(self: Any, count: int, ranges: Any) -> Any:
        for i in range(count):
            r, atom = ranges[i], self.config.atom
            m = self.get(r.memory, "Memory")
            if not m.mapped:
                self.blame("VUID-VkMappedMemoryRange-memory-00684", f"{m} is not mapped")
            end = m.size if r.size == vk.VK_WHOLE_SIZE else r.offset + r.size
            if r.offset % atom or (end % atom and end != m.size) or end > m.size:
                self.blame("VUID-VkMappedMemoryRange-size-01390", f"{r.offset} to {end} of {m.size}, atoms of {atom}")
            yield m, r.offset, end - r.offset

    def vkFlushMappedMemoryRanges(self: Any, device: int, count: int, ranges: Any) -> int:
        for m, at, n in self._ranges(count, ranges):
            if m.host:
                ctypes.memmove(m.backing.address + at, m.host + at, n)
        return 0

    def vkInvalidateMappedMemoryRanges(self: Any, device: int, count: int, ranges: Any) -> int:
        for m, at, n in self._ranges(count, ranges):
            if m.host:
                ctypes.memmove(m.host + at, m.backing.address + at, n)
        return 0

    # ---- descriptors and pages ----
    def vkGetMemoryFdKHR(self: Any, device: int, info: Any, out: Any) -> int:
        m = self.get(info[0].memory, "Memory")
        if not m.exports & info[0].handleType:
            self.blame("VUID-VkMemoryGetFdInfoKHR-handleType-00671", f"{m} was not made for it")
            return vk.VK_ERROR_TOO_MANY_OBJECTS
        out[0] = os.dup(m.backing.fd)
        return 0

    def vkGetMemoryHostPointerPropertiesEXT(self: Any, device: int, kind: int, address: int, out: Any) -> int:
        if address % self.config.page:
            self.blame("VUID-vkGetMemoryHostPointerPropertiesEXT-pHostPointer-01753", f"{address:#x}")
        out[0].memoryTypeBits = self._page_types()
        return 0
