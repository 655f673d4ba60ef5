"""The side channel as ctypes: a second, independent statement of ``interop_native.h``; forge one with any field, read one, consume one.

For tests, also of other libraries that implement ``__interop_native__``. Pure ctypes. It must not know any array library or the rest of
`interop`: the core, the C header and this are compared with each other, so none may be made from another.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from . import abi
from .abi import Malformed
from .capsule import Consumed, Spent
from .forged import _DESTRUCTOR, Forged, _aligned, _at, _pinned, _Record, _step, settle

NATIVE, USED_NATIVE = "interop_native_v1", "used_interop_native_v1"
NATIVE_VERSION = (1, 0)

#: Flag bits by the names that the mapping twin uses; the two HAS_ bits have none there.
NATIVE_FLAGS = {
    "readonly": 1 << 0, "host_visible": 1 << 1, "coherent": 1 << 2, "cached": 1 << 3, "dedicated": 1 << 4, "handle_is_pointer": 1 << 5,
    "partial": 1 << 6,
}  # fmt: skip
HAS_DEVICE_UUID, HAS_DRIVER_UUID = 1 << 7, 1 << 8
#: Kinds of readiness, by number.
NATIVE_READY = ("ready", "host", "timeline", "cl_event", "cuda_event", "stream")
WAIT_DONE, WAIT_TIMEOUT, WAIT_FAILED, WAIT_INTERRUPTED = 0, 1, -1, -2

_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)  # without the GIL: a wait may be long


class InteropNativeV1(ctypes.Structure):
    """``InteropNativeV1`` of version 1.0; pointers are raw addresses so that NULL shows."""

    _fields_ = [
        ("version", abi.DLPackVersion),
        ("struct_size", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("flags", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("memory_nbytes", ctypes.c_uint64),
        ("memory_offset", ctypes.c_uint64),
        ("memory_type", ctypes.c_int32),
        ("queue_family", ctypes.c_uint32),
        ("context", ctypes.c_uint64),
        ("physical_device", ctypes.c_uint64),
        ("instance", ctypes.c_uint64),
        ("queue", ctypes.c_uint64),
        ("device_uuid", ctypes.c_uint8 * 16),
        ("driver_uuid", ctypes.c_uint8 * 16),
        ("ready_kind", ctypes.c_uint32),
        ("ready_padding", ctypes.c_uint32),
        ("ready_handle", ctypes.c_uint64),
        ("ready_value", ctypes.c_uint64),
        ("wait", ctypes.c_void_p),
        ("wait_ctx", ctypes.c_void_p),
        ("reserved", ctypes.c_uint64 * 8),
    ]


def native_layout() -> dict[str, int]:
    """``{field: offset}`` of the struct, and its size under ``"sizeof"``."""
    offsets: dict[str, int] = {name: getattr(InteropNativeV1, name).offset for name, *_ in InteropNativeV1._fields_}
    return {**offsets, "sizeof": ctypes.sizeof(InteropNativeV1)}


def native_fields(struct: InteropNativeV1) -> dict[str, Any]:
    """Every field copied out, as stored: flags and kinds as numbers, UUIDs and `reserved` as they lie, pointers as addresses."""
    out: dict[str, Any] = {name: getattr(struct, name) for name, *_ in InteropNativeV1._fields_}
    out["version"] = (struct.version.major, struct.version.minor)
    for name in ("owner", "deleter", "wait", "wait_ctx"):
        out[name] = out[name] or 0
    for name in ("device_uuid", "driver_uuid"):
        out[name] = bytes(out[name])
    out["reserved"] = tuple(out["reserved"])
    return out


class ForgedNative:
    """A side-channel struct to order, with any value in any field. Each `capsule` call makes a fresh one.

    Keywords are the struct's fields; what is not given is what version 1.0 says when nothing is known, but for `struct_size`, which is
    right, and `handle` and `nbytes`, which are a plausible opaque handle. Integers are stored modulo the width of their field.
    ``flags`` may be names, ``ready_kind`` a name, UUIDs 16 bytes (their flag is then set too, where ``flags`` is no number).
    ``wait`` is an address, or a function of ``timeout_ns``.

    ``deleter``: ``"count"``, a C function that counts (see `Forged`; it scribbles over the first six bytes), or ``"null"``.
    """

    def __init__(self, *, deleter: Literal["count", "null"] = "count", **fields: Any) -> None:
        """Describe it; no struct is made yet."""
        unknown = set(fields) - {name for name, *_ in InteropNativeV1._fields_}
        if unknown:
            raise TypeError(f"InteropNativeV1 has no field {', '.join(sorted(unknown))}")
        self.deleter = deleter
        self.fields: dict[str, Any] = {
            "version": NATIVE_VERSION, "struct_size": ctypes.sizeof(InteropNativeV1), "device_type": abi.EXT_DEV, "handle": 0xD00D0000,
            "nbytes": 64, "memory_type": -1, "queue_family": 0xFFFFFFFF, "flags": (), **fields,
        }  # fmt: skip
        self._callback: Any = None
        self._records: deque[_NativeRecord] = deque()

    def fill(self, struct: InteropNativeV1) -> None:
        """Write the fields into `struct`, whose memory the caller owns; not the deleter."""
        given = dict(self.fields)
        flags, kind, wait = given.pop("flags"), given.pop("ready_kind", 0), given.pop("wait", None)
        struct.version = abi.DLPackVersion(*given.pop("version"))
        for name in ("device_uuid", "driver_uuid", "reserved"):
            value = given.pop(name, None)
            if value is not None:
                getattr(struct, name)[:] = list(value)
        for name, value in given.items():
            setattr(struct, name, value)
        if not isinstance(flags, int):
            flags = sum(NATIVE_FLAGS[name] for name in flags)
            flags |= HAS_DEVICE_UUID if self.fields.get("device_uuid") is not None else 0
            flags |= HAS_DRIVER_UUID if self.fields.get("driver_uuid") is not None else 0
        struct.flags = flags
        struct.ready_kind = NATIVE_READY.index(kind) if isinstance(kind, str) else kind
        if callable(wait):
            if self._callback is None:
                function = wait
                self._callback = _WAIT(lambda _, timeout_ns: function(timeout_ns))
                abi.immortal(self._callback)  # who holds the struct may call it after we are gone
            wait = abi.function_address(self._callback)
        struct.wait = wait

    def capsule(self, name: str | None = NATIVE) -> Any:
        """Make a capsule around a fresh struct; its destructor calls the deleter unless the name begins with ``used_``."""
        settle()
        record = _NativeRecord(self)
        self._records.append(record)
        capsule = abi.capsule_new(record.address, None if name is None else abi.static_name(name), _DESTRUCTOR)
        abi.capsule_set_context(capsule, record.deleter)
        record.capsule = capsule
        _pinned[record.address] = record
        return capsule

    @property
    def deletions(self) -> tuple[int, ...]:
        """How often the deleter has run on each struct made, oldest first; capsules that nobody else holds are dropped first."""
        settle()
        return tuple(record.deletions() for record in self._records)

    @property
    def deleted(self) -> int:
        """The same over all."""
        return sum(self.deletions)

    def __repr__(self) -> str:
        """The fields that were ordered."""
        return f"<ForgedNative {self.fields}>"


class _NativeRecord(_Record):
    """One forged struct; see `_Record` for how its deletions are told."""

    def __init__(self, forged: ForgedNative) -> None:
        self.versioned, self.kind, self.owner, self.memory = True, forged.deleter, forged, None
        self.capsule: object = None
        self.log: list[int] = []
        self.settled = False
        self._block = _aligned(ctypes.sizeof(InteropNativeV1))
        self.address = _at(self._block)
        struct = InteropNativeV1.from_address(self.address)
        forged.fill(struct)
        self.deleter = abi.function_address(_step) if self.kind == "count" else 0
        struct.deleter = self.deleter or None
        self._first = self._mark() if self.kind == "count" else 0


class NativeCapsule:
    """A side-channel capsule, looked at and not consumed. Its fields raise `Spent` once somebody has taken the struct."""

    def __init__(self, capsule: object) -> None:
        """Keep it; TypeError for anything else."""
        if type(capsule) is not abi.CapsuleType:
            raise TypeError(f"expected a capsule, got {type(capsule).__name__}; NativeCapsule.of(x) asks x for one")
        self.capsule: Any = capsule

    @classmethod
    def of(cls, producer: Any, /, *, max_version: tuple[int, int] = NATIVE_VERSION) -> NativeCapsule:
        """Ask ``producer.__interop_native__`` for a capsule and look at it."""
        return cls(producer.__interop_native__(max_version=max_version))

    @property
    def name(self) -> str | None:
        """The capsule's name now; None for a NULL name."""
        name: bytes | None = abi.capsule_name(self.capsule)
        return None if name is None else name.decode("utf-8", "backslashreplace")

    @property
    def consumed(self) -> bool:
        """Whether somebody has taken the struct out (the name says so)."""
        return self.name == USED_NATIVE

    @property
    def address(self) -> int:
        """Address of the struct."""
        if self.name != NATIVE:
            raise Spent(f"capsule {self.name!r}: only its name can be read")
        return int(abi.capsule_pointer(self.capsule, NATIVE.encode()))

    @property
    def fields(self) -> dict[str, Any]:
        """`native_fields` of the struct. Malformed where its major version or size is not that of version 1."""
        return _fields_at(self.address)

    def consume(self) -> ConsumedNative:
        """Take the struct out: rename first, return the owner. Spent if too late."""
        address = self.address
        abi.capsule_set_name(self.capsule, abi.static_name(USED_NATIVE))
        return ConsumedNative(address)

    def __repr__(self) -> str:
        """The name."""
        return f"<NativeCapsule {self.name!r}>"


class ConsumedNative(Consumed):
    """A side-channel struct that we own: `delete`, `delete_from_pthread` or `hand_over` once; nothing happens by itself."""

    def __init__(self, address: int) -> None:
        """Own the struct at `address`."""
        super().__init__(address, versioned=True)

    @property
    def deleter(self) -> int:
        """Address of the deleter, 0 for NULL."""
        return int(InteropNativeV1.from_address(self.address).deleter or 0)

    @property
    def native(self) -> dict[str, Any]:
        """`native_fields` of the struct."""
        return _fields_at(self.address)

    def wait(self, timeout_ns: int) -> int:
        """Call its wait function without the GIL; Malformed where that is NULL."""
        struct = InteropNativeV1.from_address(self.address)
        if not struct.wait:
            raise Malformed("wait is NULL")
        return int(_WAIT(struct.wait)(struct.wait_ctx, timeout_ns))

    def _describe(self) -> str:
        return NATIVE


def _fields_at(address: int) -> dict[str, Any]:
    struct = InteropNativeV1.from_address(address)
    if struct.version.major != 1 or struct.struct_size < ctypes.sizeof(InteropNativeV1):
        raise Malformed(f"version {struct.version.major}.{struct.version.minor} with {struct.struct_size} bytes: not the layout of 1.0")
    return native_fields(struct)


class NativeProducer:
    """Speaks DLPack by `forged`, and `said` by ``__interop_native__``: a ForgedNative, a mapping, None, any other object to return."""

    def __init__(self, forged: Forged, said: ForgedNative | Mapping[str, Any] | type[BaseException] | object) -> None:
        """Nothing is made yet. A class of exception is raised."""
        self.forged, self.said = forged, said
        self.asked: list[tuple[int, int]] = []

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        """A capsule of the kind that is asked for."""
        return self.forged.capsule(versioned=max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        """What the forged tensor says."""
        return self.forged.device

    def __interop_native__(self, *, max_version: tuple[int, int]) -> Any:
        """What was given, made where it has to be."""
        self.asked.append(max_version)
        if isinstance(self.said, type) and issubclass(self.said, BaseException):
            raise self.said("ordered by a test")
        return self.said.capsule() if isinstance(self.said, ForgedNative) else self.said
