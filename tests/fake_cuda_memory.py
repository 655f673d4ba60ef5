"""The memory of the fake CUDA driver: who has which bytes, virtual memory, imports, what a pointer is, copies. See fake_cuda.

All of it is host memory underneath, so that copies are really executed. Freed memory is overwritten and its address not given out again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import fake_cuda_names as names
from fake_cuda_names import CUresult, Handle, Pointer

PAGE = mmap.PAGESIZE
GRANULARITY = 2 << 20           # of virtual memory, as on every GPU that has it
POISON = 0xDB
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000      # MAP_NORESERVE
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Refused(Exception):
    """What a function of the table raises to return this CUresult."""

    def __init__(self, code: str) -> None:
        self.code = CUresult["CUDA_ERROR_" + code]


class CUdeviceptr(Pointer):
    __slots__ = ()


class CUmemGenericAllocationHandle(Pointer):
    __slots__ = ()


class Range:
    """Bytes that somebody has. `kind`: device, managed, pinned, registered, pool, reserved, mapped or external."""

    def __init__(self, kind: str, base: int, size: int, device: int, **more: Any) -> None:
        self.kind, self.base, self.size, self.device = kind, base, size, device
        self.dead = ""                          # who ended it
        self.accessible = kind != "mapped"      # to the device: cuMemSetAccess
        self.parent: Any = None                 # of a mapping: its reservation; of an external buffer: the import
        self.physical: Physical | None = None
        self.__dict__.update(more)


class Physical:
    """What cuMemCreate made: a file."""

    def __init__(self, fd: int, size: int, device: int, exportable: bool) -> None:
        self.fd, self.size, self.device, self.exportable, self.references, self.maps = fd, size, device, exportable, 1, 0


class External:
    def __init__(self, fd: int, size: int, device: int) -> None:
        self.fd, self.size, self.device = fd, size, device


def pages(size: int, fd: int = -1, at: int = 0, offset: int = 0) -> int:
    """Map them: of a file, or zeroed."""
    flags = (mmap.MAP_SHARED if fd >= 0 else _ANONYMOUS) | (_MAP_FIXED if at else 0)
    address = _libc.mmap(at or None, -(-size // PAGE) * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise Refused("OUT_OF_MEMORY")
    return int(address)


def number(x: Any) -> int:
    return 0 if x is None else int(x)


class Memory:
    """Half of FakeCuda. `api` marks what belongs to the table: see there."""

    def _init_memory(self) -> None:
        self.ranges: list[Range] = []           # the living and, last, the dead
        self.physical: dict[int, Physical] = {}
        self.external: dict[int, External] = {}
        self.inodes: dict[int, int] = {}        # files that this driver takes for memory of its own kind -> device
        self._maps: list[tuple[int, int]] = []
        self.closed = False
        self.staged = 0                         # copies that touched pageable host memory

    # ---- bookkeeping ----
    def find(self, address: int, *, dead: bool = False) -> Range | None:
        """Whose byte it is; the mapping rather than its reservation."""
        hits = [r for r in self.ranges if r.base <= address < r.base + r.size and (dead or not r.dead)]
        hits.sort(key=lambda r: (bool(r.dead), r.kind == "reserved"))
        return hits[0] if hits else None

    def touch(self, what: str, lo: int, hi: int) -> None:
        """A device is about to get work with these bytes."""
        r = self.find(lo, dead=True)
        if r is None:
            self.violate(f"{what}: {lo:#x} is host memory that nobody registered, or nothing")
        elif r.dead:
            self.violate(f"use after free: {what} of {r.kind} memory at {lo:#x}, which {r.dead} ended")
        elif r.kind == "reserved" or not r.accessible:
            self.violate(f"{what}: no device has access to {lo:#x}")
        elif hi > r.base + r.size and (r.kind != "mapped" or self.find(r.base + r.size) in (None, r.parent)):
            self.violate(f"{what}: {lo:#x} to {hi:#x} is beyond the {r.size} bytes at {r.base:#x}")

    def _add(self, kind: str, size: int, base: int = 0, device: int | None = None, **more: Any) -> Range:
        if size <= 0:
            raise Refused("INVALID_VALUE")
        if size > self.capacity:
            raise Refused("OUT_OF_MEMORY")
        r = Range(kind, base or self._pages(size), size, self.current() if device is None else device, **more)
        self.ranges.insert(0, r)
        return r

    def _end(self, r: Range, what: str, poison: bool = True) -> None:
        for item in self.unfinished(r.base, r.base + r.size):
            self.violate(f"{what} of memory at {r.base:#x} that {item.name} on {item.stream} still uses")
        r.dead = what
        if poison and not self.closed:
            ctypes.memset(r.base, POISON, r.size)
        self.ranges.remove(r)
        self.ranges.append(r)

    def _exact(self, address: Any, *kinds: str, otherwise: str = "INVALID_VALUE", what: str = "") -> Range:
        r = self.find(number(address), dead=True)
        if r is not None and r.dead and r.base == number(address) and r.kind in kinds:
            self.violate(f"{what}: {r.base:#x} was ended by {r.dead} already")
        if r is None or r.dead or r.base != number(address) or r.kind not in kinds:
            raise Refused(otherwise)
        return r

    def adopt(self, fd: int, device: int = 0) -> int:
        """Take a file, such as the memfd of another fake driver, for memory that can be imported."""
        self.inodes[os.fstat(fd).st_ino] = device
        return fd

    def close(self) -> None:
        """Give all pages back. What is freed later only counts; nobody may look into this memory any more."""
        self.closed = True
        for p in [*self.physical.values(), *self.external.values()]:
            os.close(p.fd)
        self.physical.clear(), self.external.clear()
        for base, size in self._maps:
            _libc.munmap(base, -(-size // PAGE) * PAGE)
        self._maps.clear()

    def _pages(self, size: int, fd: int = -1, offset: int = 0) -> int:
        base = pages(size, fd, 0, offset)
        self._maps.append((base, size))
        return base

    def poke(self, address: Any, data: bytes) -> None:
        """Put bytes there, past every rule."""
        ctypes.memmove(number(address), data, len(data))

    def peek(self, address: Any, n: int) -> bytes:
        return ctypes.string_at(number(address), n)

    # ---- allocation ----
    def cuMemAlloc(self, size: int) -> Any:
        return CUdeviceptr(self._add("device", size).base)

    def cuMemAllocManaged(self, size: int, flags: int) -> Any:
        return CUdeviceptr(self._add("managed", size).base)

    def cuMemFree(self, address: Any) -> None:
        if number(address):
            r = self._exact(address, "device", "managed", "pool", "external", what="cuMemFree")
            self._end(r, "cuMemFree", r.kind != "external")

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return self._add("pinned", size).base       # cuda-bindings gives an int here

    def cuMemFreeHost(self, address: Any) -> None:
        self._end(self._exact(address, "pinned", what="cuMemFreeHost"), "cuMemFreeHost")

    def cuMemHostRegister(self, address: Any, size: int, flags: int) -> None:
        lo = number(address)
        if size <= 0 or not lo:
            raise Refused("INVALID_VALUE")
        if any(r.base < lo + size and lo < r.base + r.size for r in self.ranges if not r.dead):
            raise Refused("HOST_MEMORY_ALREADY_REGISTERED")
        # the host has these pages again
        self.ranges[:] = [r for r in self.ranges if not (r.dead and r.base < lo + size and lo < r.base + r.size)]
        self._add("registered", size, lo, flags=flags)

    def cuMemHostUnregister(self, address: Any) -> None:
        r = self.find(number(address))
        if r is None or r.kind != "registered":
            raise Refused("HOST_MEMORY_NOT_REGISTERED")
        if r.base != number(address):
            raise Refused("INVALID_VALUE")
        self._end(r, "cuMemHostUnregister", poison=False)
        self.ranges.remove(r)                       # from here on it is plain host memory

    def cuMemHostGetDevicePointer(self, address: Any, flags: int) -> Any:
        r = self.find(number(address))
        if r is None or r.kind not in ("pinned", "registered"):
            raise Refused("INVALID_VALUE")
        return CUdeviceptr(address)

    def cuMemAllocAsync(self, size: int, stream: Any) -> Any:
        s = self.stream(stream, "cuMemAllocAsync")
        r = self._add("pool", size, device=s.device)
        self.submit(s, "cuMemAllocAsync", writes=[(r.base, size)])
        return CUdeviceptr(r.base)

    def cuMemFreeAsync(self, address: Any, stream: Any) -> None:
        s = self.stream(stream, "cuMemFreeAsync")
        r = self._exact(address, "pool", "device", what="cuMemFreeAsync")
        self.submit(s, "cuMemFreeAsync", lambda: self.closed or ctypes.memset(r.base, POISON, r.size), writes=[(r.base, r.size)])
        r.dead = "cuMemFreeAsync"

    def cuMemGetInfo(self) -> Any:
        used = sum(r.size for r in self.ranges if not r.dead and r.device == self.current() and r.kind in ("device", "managed", "pool"))
        return self.capacity - used, self.capacity

    # ---- virtual memory ----
    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> int:
        self._device_of(prop.location)
        return GRANULARITY

    def _device_of(self, location: Any) -> int:
        if int(location.type) != names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE or not 0 <= int(location.id) < len(self.uuids):
            raise Refused("INVALID_DEVICE")
        return int(location.id)

    def _physical(self, handle: Any) -> Physical:
        p = self.physical.get(number(handle))
        if p is None or p.references <= 0:
            self.violate(f"allocation handle {number(handle):#x} was released, or never made")
            raise Refused("INVALID_VALUE")
        return p

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        device = self._device_of(prop.location)
        if size <= 0 or size % GRANULARITY or int(prop.type) != names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED:
            raise Refused("INVALID_VALUE")
        if size > self.capacity:
            raise Refused("OUT_OF_MEMORY")
        fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.adopt(fd, device)
        return self._new_physical(Physical(fd, size, device, bool(int(prop.requestedHandleTypes) & 1)))

    def _new_physical(self, p: Physical) -> Any:
        key = self.number()
        self.physical[key] = p
        return CUmemGenericAllocationHandle(key)

    def cuMemRelease(self, handle: Any) -> None:
        p = self._physical(handle)
        p.references -= 1
        self._forget_physical()

    def _forget_physical(self) -> None:
        for key, p in list(self.physical.items()):
            if p.references <= 0 and not p.maps and not self.closed:
                os.close(p.fd)
                del self.physical[key]

    def cuMemRetainAllocationHandle(self, address: Any) -> Any:
        r = self.find(number(address))
        if r is None or r.physical is None:
            raise Refused("INVALID_VALUE")
        r.physical.references += 1
        return CUmemGenericAllocationHandle(next(k for k, p in self.physical.items() if p is r.physical))

    def cuMemAddressReserve(self, size: int, alignment: int, address: Any, flags: int) -> Any:
        if size <= 0 or size % GRANULARITY or alignment % GRANULARITY:
            raise Refused("INVALID_VALUE")
        step = max(alignment, GRANULARITY)
        base = self._pages(size + step)             # the kernel aligns to its own pages only; what lies before stays unused
        return CUdeviceptr(self._add("reserved", size, -(-base // step) * step, -1).base)

    def cuMemAddressFree(self, address: Any, size: int) -> None:
        r = next((r for r in self.ranges if r.base == number(address) and r.kind == "reserved" and not r.dead), None)
        if r is None or r.size != size or any(m.parent is r for m in self.ranges if not m.dead):
            raise Refused("INVALID_VALUE")
        self._end(r, "cuMemAddressFree", poison=False)

    def cuMemMap(self, address: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        p, lo = self._physical(handle), number(address)
        r = self.find(lo)
        if r is None or r.kind != "reserved" or lo % GRANULARITY or offset or not 0 < size <= p.size or lo + size > r.base + r.size:
            raise Refused("INVALID_VALUE")
        if any(m.base < lo + size and lo < m.base + m.size for m in self.ranges if m.parent is r and not m.dead):
            raise Refused("INVALID_VALUE")
        self.ranges[:] = [m for m in self.ranges if not (m.dead and m.parent is r and m.base < lo + size and lo < m.base + m.size)]
        pages(size, p.fd, lo)
        p.maps += 1
        self._add("mapped", size, lo, p.device, parent=r, physical=p)

    def _mapped(self, address: Any, size: int) -> list[Range]:
        lo = number(address)
        found = sorted((r for r in self.ranges if r.kind == "mapped" and not r.dead and lo <= r.base < lo + size), key=lambda r: r.base)
        if not found or found[0].base != lo or sum(r.size for r in found) != size:
            raise Refused("INVALID_VALUE")
        return found

    def cuMemUnmap(self, address: Any, size: int) -> None:
        for r in self._mapped(address, size):
            self._end(r, "cuMemUnmap", poison=False)
            if not self.closed:
                pages(r.size, at=r.base)
            r.physical.maps -= 1                    # type: ignore[union-attr]
        self._forget_physical()

    def cuMemSetAccess(self, address: Any, size: int, descriptions: Any, count: int) -> None:
        if len(descriptions) != count:
            raise Refused("INVALID_VALUE")
        for d in descriptions:
            self._device_of(d.location)
            for r in self._mapped(address, size):
                r.accessible = int(d.flags) == names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def cuMemExportToShareableHandle(self, handle: Any, kind: int, flags: int) -> int:
        p = self._physical(handle)
        if int(kind) != 1 or not p.exportable:
            raise Refused("INVALID_VALUE")
        return os.dup(p.fd)

    def cuMemImportFromShareableHandle(self, fd: Any, kind: int) -> Any:
        """The descriptor stays the caller's, whether it works or not (measured)."""
        if int(kind) != 1:
            raise Refused("INVALID_VALUE")
        device = self._device_of_file(int(fd))
        return self._new_physical(Physical(os.dup(int(fd)), os.fstat(int(fd)).st_size, device, True))

    def _device_of_file(self, fd: int) -> int:
        try:
            return self.inodes[os.fstat(fd).st_ino]
        except (OSError, KeyError):
            raise Refused("UNKNOWN") from None

    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        p, out = self._physical(handle), names.CUmemAllocationProp()
        out.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        out.location.type, out.location.id = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, p.device
        out.requestedHandleTypes = names.CUmemAllocationHandleType(int(p.exportable))
        return out

    # ---- external memory ----
    def cuImportExternalMemory(self, description: Any) -> Any:
        """The descriptor is closed even where it is refused, but for nonsense in the description (measured, CUDA 13.0)."""
        if int(description.type) != names.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD or not description.size:
            raise Refused("INVALID_VALUE")
        fd = int(description.handle.fd)
        try:
            self._device_of_file(fd)
            key, mine = self.number(), os.dup(fd)
        finally:
            try:
                os.close(fd)
            except OSError:
                self.violate(f"cuImportExternalMemory: {fd} is no open descriptor")
        self.external[key] = External(mine, int(description.size), self.current())
        return Handle(key)

    def cuExternalMemoryGetMappedBuffer(self, handle: Any, description: Any) -> Any:
        e = self._external(handle)
        offset, size = int(description.offset), int(description.size)
        if size <= 0 or offset % PAGE or offset + size > min(e.size, os.fstat(e.fd).st_size):
            raise Refused("INVALID_VALUE")
        return CUdeviceptr(self._add("external", size, self._pages(size, e.fd, offset), e.device, parent=e).base)

    def _external(self, handle: Any) -> External:
        e = self.external.get(number(handle))
        if e is None:
            self.violate(f"external memory {number(handle):#x} was destroyed, or never imported")
            raise Refused("INVALID_HANDLE")
        return e

    def cuDestroyExternalMemory(self, handle: Any) -> None:
        e = self._external(handle)
        for r in [r for r in self.ranges if r.parent is e and not r.dead]:
            r.accessible = False                    # may still be freed, and nothing else
        os.close(e.fd)
        del self.external[number(handle)]

    # ---- what is it ----
    def _attribute(self, attribute: int, address: int, r: Range | None) -> Any:
        name = names.CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_")
        known = r is not None and r.kind != "reserved"
        whole = r.parent if r is not None and r.kind == "mapped" else r       # of virtual memory: the reservation (measured)
        if name == "MEMORY_TYPE":
            return (1 if r.kind in ("pinned", "registered") else 2) if known else 0
        if name == "DEVICE_ORDINAL":
            return r.device if known else 0
        if name == "IS_MANAGED":
            return known and r.kind == "managed"
        if name == "RANGE_START_ADDR":
            return CUdeviceptr(whole.base if whole else 0)
        if name == "RANGE_SIZE":
            return whole.size if whole else 0
        if name == "MEMPOOL_HANDLE":
            return Handle(0x9001 if known and r.kind == "pool" else 0)
        if name == "ALLOWED_HANDLE_TYPES":
            return int(known and r.physical is not None and r.physical.exportable)
        if name in ("DEVICE_POINTER", "HOST_POINTER"):
            return CUdeviceptr(address if known else 0)
        raise Refused("INVALID_VALUE")

    def cuPointerGetAttribute(self, attribute: int, address: Any) -> Any:
        r = self.find(number(address))
        if r is None or r.kind == "reserved":
            raise Refused("INVALID_VALUE")
        return self._attribute(attribute, number(address), r)

    def cuPointerGetAttributes(self, count: int, attributes: Any, address: Any) -> Any:
        """Of what CUDA does not know: zeros and SUCCESS (measured)."""
        if len(attributes) < count:
            raise Refused("INVALID_VALUE")
        return [self._attribute(a, number(address), self.find(number(address))) for a in attributes[:count]]

    def cuMemGetAddressRange(self, address: Any) -> Any:
        r = self.find(number(address))
        if r is None or r.kind == "reserved" or not r.accessible:
            raise Refused("NOT_FOUND")
        return CUdeviceptr(r.base), r.size

    # ---- copies ----
    def _copy(self, what: str, rows: list[tuple[int, int]], n: int, stream: Any, host: tuple[bool, bool] = (False, False)) -> None:
        """Enqueue rows of n bytes, (dst, src) each. `host`: whether dst and src may be pageable; such a copy is staged, as CUDA does."""
        s = self.stream(stream, what)
        if n <= 0 or not rows:
            return
        pageable = [host[i] and self.find(rows[0][i]) is None for i in (0, 1)]
        reads, writes = ([] if pageable[1] else [(src, n) for _, src in rows]), ([] if pageable[0] else [(dst, n) for dst, _ in rows])
        self.staged += any(pageable)
        work: Callable[[], Any]
        if pageable[1]:
            held = [ctypes.string_at(src, n) for _, src in rows]

            def work() -> None:
                for (dst, _), data in zip(rows, held, strict=True):
                    ctypes.memmove(dst, data, n)
        else:
            def work() -> None:
                for dst, src in rows:
                    ctypes.memmove(dst, src, n)
        item = self.submit(s, what, work, reads, writes)
        if pageable[0] and item is not None:
            self.finish(item)                       # CUDA returns only when it is done

    def cuMemcpyAsync(self, dst: Any, src: Any, n: int, stream: Any) -> None:
        self._copy("cuMemcpyAsync", [(number(dst), number(src))], n, stream, (True, True))

    def cuMemcpyDtoDAsync(self, dst: Any, src: Any, n: int, stream: Any) -> None:
        self._copy("cuMemcpyDtoDAsync", [(number(dst), number(src))], n, stream)

    def cuMemcpyHtoDAsync(self, dst: Any, src: Any, n: int, stream: Any) -> None:
        self._copy("cuMemcpyHtoDAsync", [(number(dst), number(src))], n, stream, (False, True))

    def cuMemcpyDtoHAsync(self, dst: Any, src: Any, n: int, stream: Any) -> None:
        self._copy("cuMemcpyDtoHAsync", [(number(dst), number(src))], n, stream, (True, False))

    def cuMemcpyPeerAsync(self, dst: Any, dst_context: Any, src: Any, src_context: Any, n: int, stream: Any) -> None:
        for address, context in ((dst, dst_context), (src, src_context)):
            r = self.find(number(address))
            if r is not None and r.device != self.device_of(context):
                self.violate(f"cuMemcpyPeerAsync: {number(address):#x} is not of context {number(context):#x}")
        self._copy("cuMemcpyPeerAsync", [(number(dst), number(src))], n, stream)

    def cuMemcpy2DAsync(self, c: Any, stream: Any) -> None:
        self._box("cuMemcpy2DAsync", c, stream, 1)

    def cuMemcpy3DAsync(self, c: Any, stream: Any) -> None:
        self._box("cuMemcpy3DAsync", c, stream, int(c.Depth))

    def cuMemcpy3DPeerAsync(self, c: Any, stream: Any) -> None:
        self._box("cuMemcpy3DPeerAsync", c, stream, int(c.Depth))

    def _box(self, what: str, c: Any, stream: Any, depth: int) -> None:
        ends, host = [], []
        for side in ("dst", "src"):
            def field(name: str, side: str = side) -> int:
                return number(getattr(c, side + name, 0))
            kind, pitch, height = field("MemoryType"), field("Pitch"), field("Height")
            if kind not in (1, 2, 4) or not c.WidthInBytes + field("XInBytes") <= (pitch or 2**31) <= 2**31 or \
                    (depth > 1 and height < c.Height + field("Y")):
                raise Refused("INVALID_VALUE")
            base = field("Host" if kind == 1 else "Device") + field("XInBytes")
            ends.append([base + ((z + field("Z")) * height + y + field("Y")) * pitch for z in range(depth) for y in range(int(c.Height))])
            host.append(kind != 2)
        self._copy(what, list(zip(*ends, strict=True)), int(c.WidthInBytes), stream, (host[0], host[1]))

    def cuMemsetD8Async(self, dst: Any, value: int, n: int, stream: Any) -> None:
        s = self.stream(stream, "cuMemsetD8Async")
        self.submit(s, "cuMemsetD8Async", lambda: ctypes.memset(number(dst), value, n), writes=[(number(dst), n)])

    def _synchronous(self, what: str, dst: Any, src: Any, n: int, host: tuple[bool, bool]) -> None:
        self.violate(f"synchronous copy: {what}")
        self._copy(what, [(number(dst), number(src))], n, 1, host)
        self.finish(self.stream(1, what).last)

    def cuMemcpy(self, dst: Any, src: Any, n: int) -> None:
        self._synchronous("cuMemcpy", dst, src, n, (True, True))

    def cuMemcpyHtoD(self, dst: Any, src: Any, n: int) -> None:
        self._synchronous("cuMemcpyHtoD", dst, src, n, (False, True))

    def cuMemcpyDtoH(self, dst: Any, src: Any, n: int) -> None:
        self._synchronous("cuMemcpyDtoH", dst, src, n, (True, False))

    def cuMemcpyDtoD(self, dst: Any, src: Any, n: int) -> None:
        self._synchronous("cuMemcpyDtoD", dst, src, n, (False, False))
