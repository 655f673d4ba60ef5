"""Memory that crosses APIs and processes: Context, handles and who closes them, `wrap`, `empty`. The state is the core's Allocation.

Knows host memory and the contract; no framework and no driver by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import operator
import os
import struct
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._core import Allocation, Device, DType, Tensor
from .errors import ExchangeError
from .registry import adapter_of, context_of, expect, party_limits, place_of

if TYPE_CHECKING:
    from .contract import Adapter, Importable

PAGE = mmap.PAGESIZE
_F_SEAL_FUTURE_WRITE = 0x10     # linux/fcntl.h; Python 3.11 has no name for it
_RELEASING = 2.0                # seconds that closing a Context waits for a release in another thread
_EXT_DEV = 12                   # devices of many owners, told apart by name: a number says nothing of whose
_HOST_TRAITS = ("host_visible", "coherent", "cached")
#: Kinds of ExternalHandle -> (what `value` is, who closes it). SPEC M-HANDLE-FD.
KINDS: dict[str, tuple[str, str]] = {
    "opaque_fd": ("fd", "a successful import consumes it; else its holder closes it"),
    "dma_buf": ("fd", "a successful import consumes it; else its holder closes it"),
    "memfd": ("fd", "its holder closes it; a mapping keeps the memory by itself"),
    "host": ("address", "borrowed: the memory stays its owner's"),
}


class Context:
    """The live object in which handles are valid: a device with its queues, a driver's context. Adapters derive theirs.

    Attributes:
        device: the Device, one number among those of its adapter.
        adapter: who made it.
        capabilities: names of what it can do.
    """

    def __init__(self, device: Device, adapter: Adapter, capabilities: Iterable[str] = ()) -> None:
        """A context that is open."""
        self.device, self.adapter, self.capabilities = device, adapter, frozenset(capabilities)
        self.generation = _core.generation()
        self._allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._closed = False

    def adopt(self, allocation: Allocation) -> Allocation:
        """Count an allocation of this context: `close` is refused while it lives."""
        self._allocations.add(allocation)
        return allocation

    def allocation(self, handle: int, nbytes: int, *, free: Any = None, owner: Any = None, **more: Any) -> Allocation:
        """An Allocation of this context, for adapters: `free` gives the handle back, once; `more` as ``Allocation`` takes it."""
        self.check()
        return self.adopt(Allocation(handle, nbytes, self.device, owner=owner, on_release=free, context=self, adapter=self.adapter, **more))

    def check(self) -> None:
        """Raise where this context must not be used: closed, or made before a fork."""
        if self._closed:
            raise ExchangeError(f"this {self.adapter.name} context on {self.device} was closed", "open another")
        if self.generation != _core.generation():
            raise ExchangeError(f"this {self.adapter.name} context was made before fork: a child process owns no driver object",
                                "open one in the child, or start workers with the 'spawn' method")

    @property
    def closed(self) -> bool:
        """Whether `close` has run."""
        return self._closed

    def close(self) -> None:
        """Give the native objects back. Idempotent; ExchangeError while allocations of it live. Does nothing after fork."""
        if self._closed:
            return
        if self.generation != _core.generation():
            self._closed = True
            return
        _core.drain()
        _core.release_ready()
        waiting = _core.waiting_in(self)
        if waiting:
            raise ExchangeError(f"queued work of this {self.adapter.name} context still uses memory that was dropped", "wait for the work")
        alive = [a for a in self._allocations if not a.is_closed]
        if alive:
            raise ExchangeError(f"{len(alive)} allocation{'s' if len(alive) > 1 else ''} of this {self.adapter.name} context still live: "
                                f"{alive[0]!r}", "close or drop them first")
        end = time.monotonic() + _RELEASING
        while _core.releasing_in(self):         # memory that counts as closed, and whose handle another thread is just giving back
            if time.monotonic() > end:
                raise ExchangeError(f"another thread is giving memory of this {self.adapter.name} context back", "close it again")
            time.sleep(0.0002)
        self._closed = True
        self._close()

    def _close(self) -> None:
        """What the adapter's context has to give back."""

    def __enter__(self) -> Context:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        return f"<{self.adapter.name} context on {self.device}{', closed' if self._closed else ''}>"


@dataclass(frozen=True)
class NativeHandle:
    """A handle that is valid in this process and its Context only.

    Attributes:
        kind: ``"pointer"``, ``"cl_mem"``, ``"VkBuffer"``, or an adapter's own word.
        value: the number.
        context: where it is valid; None: the host.
    """

    kind: str
    value: int
    context: Any = None


@dataclass
class ExternalHandle:
    """An OS object that stands for a **whole** memory object and crosses Contexts or processes.

    It owns its descriptor: ``with`` closes what nobody took. `duplicate` makes one from a descriptor that stays yours.

    Attributes:
        kind: one of `KINDS`, which says who closes it.
        value: the descriptor, or the address of a host range.
        nbytes: size of the whole memory object, not of a tensor in it.
        offset: where the memory that is meant begins in it, in bytes.
        dedicated: Vulkan's dedicated allocation; an import must say the same.
        memory_type: the exporter's memory type index, or None.
        device_uuid, driver_uuid: 16 bytes each, or None: unknown, which is equal to nothing.
    """

    kind: str
    value: int
    nbytes: int
    offset: int = 0
    dedicated: bool = False
    memory_type: int | None = None
    device_uuid: bytes | None = None
    driver_uuid: bytes | None = None
    owner: Any = field(default=None, repr=False)
    consumed: bool = field(default=False, init=False)
    _token: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check what can be checked without the driver."""
        self.consumed = True            # until it is a handle: what cannot be one takes nothing
        for name, value, low in (("value", self.value, 0), ("nbytes", self.nbytes, 1), ("offset", self.offset, 0)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} {value!r}: an int")
            if not low <= value < 2**63:
                raise ValueError(f"{name} {value}: from {low} to 2**63 - 1")
        if self.memory_type is not None and (not isinstance(self.memory_type, int) or not 0 <= self.memory_type < 2**32):
            raise ValueError(f"memory_type {self.memory_type!r}: an index, or None")
        if not isinstance(self.dedicated, bool):
            raise TypeError(f"dedicated {self.dedicated!r}: True or False")
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.is_fd:
            if self.value >= 2**31:
                raise ValueError(f"value {self.value}: not a file descriptor")
            try:
                os.fstat(self.value)
            except OSError as e:
                raise ValueError(f"value {self.value}: not an open file descriptor ({e.strerror})") from None
        elif not self.value:
            raise ValueError("value 0: NULL is no memory")
        if self.offset >= self.nbytes:
            raise ValueError(f"offset {self.offset}: lies inside the {self.nbytes} bytes")
        for uuid in (self.device_uuid, self.driver_uuid):
            if uuid is not None and (not isinstance(uuid, bytes) or len(uuid) != 16):
                raise ValueError(f"UUID {uuid!r}: 16 bytes")
        # a driver that does not know says zeros: unknown, not equal to another unknown
        self.device_uuid = None if self.device_uuid == bytes(16) else self.device_uuid
        self.driver_uuid = None if self.driver_uuid == bytes(16) else self.driver_uuid
        self.consumed = False

    @property
    def is_fd(self) -> bool:
        """Whether `value` is a file descriptor."""
        return KINDS[self.kind][0] == "fd"

    @classmethod
    def duplicate(cls, kind: str, fd: int, nbytes: int, **fields: Any) -> ExternalHandle:
        """A handle with a descriptor of its own (close-on-exec); `fd` stays the caller's."""
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            return cls(kind, own, nbytes, **fields)
        except BaseException:
            os.close(own)
            raise

    def copy(self) -> ExternalHandle:
        """Another handle to the same memory object, closed on its own."""
        self._check()
        fields = {n: getattr(self, n) for n in ("offset", "dedicated", "memory_type", "device_uuid", "driver_uuid", "owner")}
        if self.is_fd:
            return ExternalHandle.duplicate(self.kind, self.value, self.nbytes, **fields)
        return ExternalHandle(self.kind, self.value, self.nbytes, **fields)

    def fileno(self) -> int:
        """The descriptor, still this handle's to close."""
        self._check()
        if not self.is_fd:
            raise ExchangeError(f"a {self.kind} handle has no file descriptor")
        return self.value

    def take(self) -> int:
        """The value, and with it the duty to close it: for a driver that consumes it."""
        self._check()
        self.consumed = True
        return self.value

    def close(self) -> None:
        """Close the descriptor unless it was taken. Idempotent."""
        self._token = None
        if not self.consumed:
            self.consumed = True
            if self.is_fd:
                with contextlib.suppress(OSError):      # closed behind our back: there is nothing left to give back
                    os.close(self.value)

    def _check(self) -> None:
        if self.consumed:
            raise ExchangeError(f"this {self.kind} handle was consumed or closed", "export another")

    def __enter__(self) -> ExternalHandle:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close what was not taken."""
        self.close()

    def __del__(self) -> None:
        """A descriptor that was forgotten is closed."""
        if not getattr(self, "consumed", True):
            self.close()

    def pack(self) -> tuple[bytes, list[int]]:
        """``(data, fds)`` for ``socket.send_fds``: everything about the memory, and the descriptor beside it."""
        fd = self.fileno()
        fields = {"kind": self.kind, "nbytes": self.nbytes, "offset": self.offset, "dedicated": self.dedicated,
                  "memory_type": self.memory_type, "device_uuid": _hex(self.device_uuid), "driver_uuid": _hex(self.driver_uuid)}
        body = json.dumps(fields).encode()
        return _PACKED.pack(b"IXH1", len(body)) + body, [fd]

    @classmethod
    def unpack(cls, data: bytes, fds: list[int]) -> ExternalHandle:
        """The other end of `pack`; takes over the descriptor that ``socket.recv_fds`` gave, unless it raises."""
        try:
            magic, n = _PACKED.unpack_from(data)
            if magic != b"IXH1" or len(fds) != 1 or len(data) != _PACKED.size + n:
                raise ValueError(f"{len(fds)} descriptors, magic {magic!r}, {len(data)} bytes")
            f = json.loads(data[_PACKED.size:_PACKED.size + n])
            if not isinstance(f, dict) or f.get("kind") not in KINDS or KINDS[f["kind"]][0] != "fd":
                raise ValueError("no fields of a descriptor")
            return cls(f["kind"], fds[0], f["nbytes"], f["offset"], f["dedicated"], f["memory_type"], _unhex(f["device_uuid"]),
                       _unhex(f["driver_uuid"]))
        except (struct.error, KeyError, TypeError, UnicodeDecodeError, ValueError, RecursionError) as e:
            raise ValueError(f"not a packed ExternalHandle: {e}") from None


_PACKED = struct.Struct("<4sI")


def _hex(uuid: bytes | None) -> str | None:
    return None if uuid is None else uuid.hex()


def _unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


# ---- import and export ----
def importable(kind: str, place: Any) -> Importable:
    """What importing such a handle at `place` takes: answered before anything is imported."""
    from .contract import Importable

    adapter, where = place_of(place)
    if adapter is None or not adapter.can("import_handle"):
        return Importable(False, f"nothing at {place} imports handles")
    answer: Importable = adapter.importable(kind, place=where)
    return answer


def import_handle(h: ExternalHandle, place: Any) -> Allocation:
    """The memory behind `h` in another Context. `h` stays its holder's: a duplicate is what the driver gets.

    Raises ExchangeError where `importable` says no; whatever the driver's refusal leaves is closed.
    """
    need = importable(h.kind, place)
    if not need.supported:
        raise ExchangeError(f"{h.kind} cannot be imported at {place}: {need.reason}")
    need.check(h)
    adapter, where = place_of(place)
    own = h.copy()
    try:
        allocation: Allocation = expect(adapter, "import_handle", adapter.import_handle(own, place=where), Allocation)
    finally:
        own.close()                 # unless the driver took it
    if isinstance(h.owner, Allocation):
        _core.join_root(allocation, h.owner)
    return allocation


def export(a: Allocation, kind: str) -> ExternalHandle:
    """``Allocation.export``: a handle of one of the kinds in ``Allocation.exports``; its holder closes it."""
    a.check()
    adapter = a.adapter or (adapter_of(a.device) if a.is_foreign else None)
    if kind not in a.exports and not (a.is_foreign and adapter is not None and kind in adapter.shares):
        kinds = ", ".join(sorted(a.exports)) or "none"
        raise ExchangeError(f"this allocation exports no {kind!r} (it exports: {kinds})",
                            "allocate it so: interop.empty(..., shared_with=['process'])" if not a.exports else None)
    if adapter is not None:
        if not adapter.can("export_handle"):
            raise ExchangeError(f"adapter {adapter.name} exports no handles")
        handle: ExternalHandle = expect(adapter, "export_handle", adapter.export_handle(a, kind), ExternalHandle)
        handle.owner = handle.owner or a        # an import of it in this process shares a's leases and Points
        return handle
    if kind == "host":
        handle = ExternalHandle("host", a.handle, a.nbytes, owner=a)
        handle._token = _core.hold_open(a)      # the address means something as long as the handle lives
        return handle
    pages = a.owner
    return ExternalHandle.duplicate("memfd", pages.fd, pages.size, offset=pages.offset + a.handle - pages.address, owner=a)


def exports_of(a: Allocation) -> tuple[str, ...]:
    """``Allocation.exports`` of somebody else's device memory: what its driver says. Called by the core."""
    adapter = adapter_of(a.device)
    if adapter is None or not adapter.can("exports_of"):
        return ()
    kinds = adapter.exports_of(a)
    if not isinstance(kinds, (tuple, list, set, frozenset)) or not set(kinds) <= KINDS.keys():
        raise TypeError(f"adapter {adapter.name}: exports_of returned {kinds!r}, not a tuple of kinds of ExternalHandle")
    return tuple(kinds)


def import_pages(t: Tensor, place: Any) -> Tensor:
    """Host memory as memory of a device that can see its pages: the same bytes, under the same leases. Called by the core.

    The pages stay registered with the device's driver until the tensor and what is made of it are gone.
    """
    if not t.size:
        return empty(t.shape, t.dtype, device=place)
    a = t.allocation
    there = import_handle(ExternalHandle("host", a.handle, a.nbytes, owner=a), place)
    out = there.tensor(t.shape, "uint8" if t.padded else t.dtype, strides=t.strides, byte_offset=_core.offset_in(t), readonly=t.readonly)
    return _core.as_padded(out, t.dtype) if t.padded else out


def host_view(t: Tensor) -> Tensor | None:
    """Host memory over the bytes of `t`, which its API lets the host touch at any time; None where it does not. Called by the core.

    As long as a view lives the memory is not closed. What was pending has been waited for.
    """
    a = t.allocation
    adapter = a.adapter or adapter_of(a.device)
    if adapter is None or not adapter.can("host_view") or t.layout != "strided":
        return None
    if not t.size:
        out: Tensor = _core.host_tensor(t.shape, t.dtype, t.padded)
        return out
    address = adapter.host_view(a)
    if address is None:
        return None
    if not isinstance(address, int) or not 0 < address < 2**57:
        raise TypeError(f"adapter {adapter.name}: host_view returned {address!r}, not an address of the host")
    pages = Allocation(address, a.nbytes, (1, 0), owner=a, root=a, readonly=a.readonly, lent=True, dies_at_fork=True)
    out = pages.tensor(t.shape, "uint8" if t.padded else t.dtype, strides=t.strides, byte_offset=_core.offset_in(t), readonly=t.readonly)
    return _core.as_padded(out, t.dtype) if t.padded else out


# ---- host pages ----
class Pages:
    """Whole pages of this process: anonymous, or of a memfd. Owns the mapping and its descriptor."""

    def __init__(self, size: int, fd: int | None, offset: int, readonly: bool, fork: bool) -> None:
        """Map them; takes over `fd`."""
        self.fd, self.size, self.offset = fd, size, offset
        base = offset // PAGE * PAGE
        prot = mmap.PROT_READ | (0 if readonly else mmap.PROT_WRITE)
        if fd is None:
            self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot)
        else:
            self._map = mmap.mmap(fd, size - base, mmap.MAP_SHARED, prot, offset=base)
        if not fork:
            # a page that a device has pinned must not turn copy-on-write under it
            self._map.madvise(mmap.MADV_DONTFORK)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data + offset - base

    def __del__(self) -> None:
        """The mapping goes by itself; the descriptor is ours."""
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


def _memfd(size: int) -> int:
    fd = os.memfd_create("interop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as e:
        os.close(fd)
        raise MemoryError(f"{size} bytes that other processes can map: {e.strerror}") from None
    return fd


def _wrap_memfd(h: ExternalHandle, nbytes: int, owner: Any, on_release: Any, readonly: bool) -> Allocation:
    fd = h.fileno()
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as e:
        raise ExchangeError(f"descriptor {fd} is no memfd: {e.strerror}; another process could truncate it under the mapping",
                            "map it yourself and wrap the address, with the mapping as owner") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ExchangeError("this memfd is not sealed against shrinking: whoever truncates it kills every process that reads it",
                            "fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)")
    size = os.fstat(fd).st_size
    if h.offset + nbytes > size:
        raise ValueError(f"{nbytes} bytes at {h.offset} do not lie in a memfd of {size} bytes")
    if seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE) and not readonly:
        raise ExchangeError("this memfd is sealed against writing", "readonly=True")
    pages = Pages(size, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), h.offset, readonly, fork=True)
    root = h.owner if isinstance(h.owner, Allocation) and nbytes <= h.owner.nbytes else None
    return Allocation(pages.address, nbytes, (1, 0), owner=pages if owner is None else _Both(pages, owner), on_release=on_release,
                      readonly=readonly, alignment=PAGE if not h.offset % PAGE else 1, traits=_HOST_TRAITS,
                      exports=("memfd", "host") if owner is None else ("host",), root=root, lent=root is not None)


class _Both:
    """Two owners of one piece of memory."""

    __slots__ = ("owner", "pages")

    def __init__(self, pages: Pages, owner: Any) -> None:
        self.pages, self.owner = pages, owner


# ---- wrap ----
def wrap(handle: Any, nbytes: int, *, device: Any, owner: Any, on_release: Any = None, readonly: bool = False) -> Allocation:
    """Memory that the application owns, as an Allocation: a camera's ring, a pinned block, a descriptor, a library's handle.

    Args:
        handle: an address or native handle as int, which is trusted; or an ExternalHandle (its descriptor is duplicated).
        nbytes: size of the whole memory, in bytes. Tensors are checked against it.
        device: where the bytes live: a Device or its spelling, or the Context in which the handle is valid.
        owner: kept alive until the memory is released; None where something else keeps it.
        on_release: called once, without arguments, when the last tensor, export and lease is gone; on a thread of the interpreter.
        readonly: every tensor of it is read-only.

    Returns an Allocation: ``.tensor(shape, dtype, strides= | row_pitch=, byte_offset=)`` makes views of parts of it.

    Raises:
        ValueError: a size or handle that cannot be. ExchangeError: a memfd that could shrink, or nobody who imports such a handle.
    """
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"nbytes {nbytes!r}: an int")
    if nbytes < 0:
        raise ValueError(f"nbytes {nbytes}: not negative")
    if on_release is not None and not callable(on_release):
        raise TypeError(f"on_release {on_release!r}: a function without arguments")
    adapter, where = place_of(device)
    if isinstance(handle, ExternalHandle):
        if handle.kind == "memfd" and adapter is None and _host_place(where):
            return _wrap_memfd(handle, nbytes, owner, on_release, readonly)
        imported = import_handle(handle, device)
        return Allocation(imported.handle, nbytes, imported.device, owner=_Both(imported, owner), on_release=on_release,  # type: ignore[arg-type]
                          context=imported.context, adapter=imported.adapter, readonly=readonly, root=imported, skip=imported.skip)
    if isinstance(handle, bool) or not hasattr(handle, "__index__"):
        raise TypeError(f"handle {handle!r}: an address or native handle as int, or an ExternalHandle")
    value = handle.__index__()
    if not 0 <= value < 2**64:
        raise ValueError(f"handle {value}: not a 64-bit address or handle")
    if value == 0 and nbytes:
        raise ValueError(f"handle 0 with {nbytes} bytes: NULL is no memory")
    context = where if isinstance(where, Context) else None
    place = context.device if context is not None else where
    host = _host_place(where)
    if host and value + nbytes > 2**64:
        raise ValueError(f"{nbytes} bytes from {value:#x} run past the address space")
    a = Allocation(value, nbytes, place, owner=owner, on_release=on_release, context=context, adapter=adapter, readonly=readonly,
                   traits=_HOST_TRAITS if host else (), exports=("host",) if host else ())
    return context.adopt(a) if context is not None else a


# ---- empty ----
def empty(shape: Any, dtype: Any, *, device: Any = None, shared_with: Iterable[Any] = (), alignment: int | None = None) -> Tensor:
    """Memory that everybody named can use in place; its contents are undefined.

    Args:
        shape: extents; an int for one dimension.
        dtype: anything that names a dtype.
        device: where the bytes live; None: the host.
        shared_with: frameworks and places that must see it without a copy, ``"process"`` for other processes.
        alignment: bytes, a power of two; raised to what the parties need.

    Raises ExchangeError naming the parties that cannot share such memory, and those that could.
    """
    kind = DType(dtype)
    extents = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(operator.index(s) for s in shape)
    if isinstance(shared_with, str):
        raise TypeError(f"shared_with={shared_with!r}: a sequence of parties, such as ['torch']")
    if alignment is not None and (alignment <= 0 or alignment & (alignment - 1)):
        raise ValueError(f"alignment {alignment}: a power of two")
    adapter, where = place_of("cpu" if device is None else device)
    parties = list(shared_with)
    _check_parties(parties, device, adapter)
    nbytes = _core.bytes_for(extents, kind)
    if adapter is not None:
        if not adapter.can("allocate"):
            raise ExchangeError(f"adapter {adapter.name} allocates no memory", "wrap memory that its own API allocated")
        if nbytes:
            made = adapter.allocate(nbytes, place=where, alignment=alignment or 1, shared_with=tuple(parties))
            allocation: Allocation = expect(adapter, "allocate", made, Allocation)
            wanted = where if isinstance(where, Device) else where.device
            if allocation.device != wanted or allocation.nbytes < nbytes:
                raise TypeError(f"adapter {adapter.name}: allocate gave {allocation!r} where {nbytes} bytes on {wanted} were asked for")
        else:                       # no driver is asked for nothing: OpenCL and Vulkan forbid empty buffers
            allocation = Allocation(0, 0, where if isinstance(where, Device) else where.device, adapter=adapter)
        return allocation.tensor(extents, kind)
    if device is not None and not _host_place(where):
        raise ExchangeError(f"interop allocates nothing on {device} and has no way of its own to copy there",
                            "a framework that uses the device can: interop.to(x, 'torch', device=...)")
    needed, whole_pages, imported = max(alignment or 1, _core.HOST_ALIGNMENT), False, False
    for party in parties:
        if party == "process":
            whole_pages = True
            continue
        limits = party_limits(party)
        needed = max(needed, limits.alignment)
        if limits.imports or home_of(party) is not None:
            whole_pages = imported = True
            needed = max(needed, PAGE)
    if not whole_pages:
        block = _core.host_tensor(extents, kind, False, needed)
        a = Allocation(block.ptr, nbytes, (1, 0), owner=block, alignment=needed, traits=_HOST_TRAITS, exports=("host",))
        return a.tensor(extents, kind)
    size = max(PAGE, -(-nbytes // PAGE) * PAGE)
    whole = size + (needed if needed > PAGE else 0)     # a mapping starts on a page: beyond that, room to start further in
    fd = _memfd(whole) if "process" in parties else None
    pages = Pages(whole, fd, 0, False, fork=not imported)
    address = -(-pages.address // needed) * needed
    a = Allocation(address, size, (1, 0), owner=pages, alignment=max(needed, PAGE), dies_at_fork=imported, traits=_HOST_TRAITS,
                   exports=("memfd", "host") if fd is not None else ("host",))
    for party in parties:
        _show_pages(a, party)
    return a.tensor(extents, kind)


def home_of(party: Any) -> Any:
    """The device on which a framework sees host memory that takes no memory of the host itself; None for all others."""
    if party == "process":
        return None
    adapter, where = context_of(party)
    if adapter is None or where is not None or not adapter.can("home") or 1 in (adapter.accepts.devices or (1,)):
        return None
    _core.known_target(party)       # not installed: says so
    return expect(adapter, "home", adapter.home(), Device)


def _show_pages(a: Allocation, party: Any) -> None:
    """Import the pages once for as long as they live, where that makes every later import cheap."""
    place = None if party == "process" else home_of(party) or context_of(party)[1]
    adapter, where = (None, None) if place is None else place_of(place)
    if adapter is None or not adapter.can("import_handle") or where in a.imports:
        return
    need = adapter.importable("host", place=where)
    if need.supported and need.keeps:
        with ExternalHandle("host", a.handle, a.nbytes) as handle:      # no owner: what the root imports does not hold the root
            a.imports[where] = expect(adapter, "import_handle", adapter.import_handle(handle, place=where), Allocation)


def _takes(limits: Any, adapter: Adapter, place: Any) -> bool:
    """Whether a framework's objects can lie in the memory of `place` itself."""
    where = place_of(place)[1]
    device = where if isinstance(where, Device) else where.device
    return limits.devices is not None and device.type in limits.devices and device.type != _EXT_DEV


def _of_host(limits: Any, here: Any, where: Any) -> bool:
    """Whether somebody uses memory of the host: such memory of a device is made where the host may touch it at any time."""
    return (where is None and (limits.devices is None or 1 in limits.devices)) or (here is None and _host_place(where))


def _host_place(where: Any) -> bool:
    return isinstance(where, Device) and where.name == "cpu"


def _check_parties(parties: list[Any], device: Any, adapter: Any) -> None:
    bad: list[str] = []
    good: list[str] = []
    for party in parties:
        if party == "process":
            (good if adapter is None or "process" in adapter.shares else bad).append("process")
            continue
        limits = party_limits(party)        # unknown names raise here
        here, where = context_of(party)
        name = str(party)
        if adapter is not None:
            ok = here is adapter or party == "interop" or bool(adapter.shares & limits.imports) or (
                where is None and _takes(limits, adapter, device)) or (
                adapter.can("host_view") and _of_host(limits, here, where))
        elif where is None or here is None:     # a framework, or the host itself
            home = home_of(party)
            ok = limits.devices is None or 1 in limits.devices or (home is not None and importable("host", home).supported)
        else:
            ok = "host" in limits.imports
        (good if ok else bad).append(name)
    if bad:
        raise ExchangeError(f"memory on {device or 'cpu'} cannot be shared with {', '.join(bad)}",
                            f"of those named, {', '.join(good)} could share it" if good else "leave them out, and copy: interop.copyto")
