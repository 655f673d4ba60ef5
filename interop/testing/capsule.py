"""Look inside a DLPack capsule, and play the consumer by hand.

`Capsule` reads every field without consuming; `Consumed` is what a consumer holds afterwards: the managed tensor and
the duty to call its deleter once, with the GIL, without it, or from a thread that Python has never seen. Pure ctypes.
It must not know any array library or the rest of `interop`: it is the witness that core and adapters are judged by.
Metadata is not trusted (`Malformed`); pointers are, because nothing can check them.
"""

from __future__ import annotations

import builtins
import ctypes
import itertools
import math
import threading
from types import TracebackType
from typing import Any

from . import abi
from .abi import DLManagedTensor, DLManagedTensorVersioned, DLTensor, Malformed, TensorFields

_KNOWN = (abi.LEGACY, abi.VERSIONED, abi.USED_LEGACY, abi.USED_VERSIONED)
_DELETER_WITH_GIL = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_DELETER_WITHOUT_GIL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# CDLL, not PyDLL: the GIL must be free while we join, or a deleter that takes it would never finish.
_libc = ctypes.CDLL(None)
_pthread_create = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(("pthread_create", _libc))
_pthread_join = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(("pthread_join", _libc))


class Spent(AttributeError):
    """The tensor is no longer ours to read: consumed by somebody else, handed over, or deleted."""


class ManagedTensor:
    """The fields of a managed tensor, read where they lie. `Capsule` and `Consumed` say when that is allowed."""

    @property
    def versioned(self) -> bool:
        """Whether the struct is a DLManagedTensorVersioned."""
        raise NotImplementedError

    @property
    def address(self) -> int:
        """Address of the managed tensor; Spent when it may not be touched."""
        raise NotImplementedError

    def _head(self) -> DLManagedTensorVersioned | DLManagedTensor:
        return (DLManagedTensorVersioned if self.versioned else DLManagedTensor).from_address(self.address)

    def _tensor(self) -> DLTensor:
        version = self.version
        # DLPack: with another major nothing beyond the flags keeps its place.
        if version is not None and version[0] != abi.MAJOR:
            raise Malformed(f"DLPack {version[0]}.{version[1]}: the layout behind the flags is unknown")
        tensor: DLTensor = self._head().dl_tensor
        return tensor

    @property
    def version(self) -> tuple[int, int] | None:
        """(major, minor); None for a legacy tensor, which carries none."""
        head = self._head()
        return (head.version.major, head.version.minor) if isinstance(head, DLManagedTensorVersioned) else None

    @property
    def flags(self) -> int:
        """The raw flag bits; 0 for a legacy tensor, which carries none."""
        head = self._head()
        return int(head.flags) if isinstance(head, DLManagedTensorVersioned) else 0

    @property
    def readonly(self) -> bool:
        """READ_ONLY is set. A legacy tensor cannot say, so False."""
        return bool(self.flags & abi.READ_ONLY)

    @property
    def copied(self) -> bool:
        """IS_COPIED is set: until the deleter runs the consumer is the only owner."""
        return bool(self.flags & abi.IS_COPIED)

    @property
    def padded(self) -> bool:
        """IS_SUBBYTE_TYPE_PADDED is set: each element of a sub-byte type takes whole bytes."""
        return bool(self.flags & abi.SUBBYTE_PADDED)

    @property
    def manager_ctx(self) -> int:
        """The producer's private pointer, 0 for NULL."""
        return int(self._head().manager_ctx or 0)

    @property
    def deleter(self) -> int:
        """Address of the deleter, 0 for NULL."""
        return int(self._head().deleter or 0)

    @property
    def has_deleter(self) -> bool:
        """The deleter is not NULL (DLPack allows NULL)."""
        return self.deleter != 0

    @property
    def device(self) -> tuple[int, int]:
        """(device type, device id)."""
        device = self._tensor().device
        return device.device_type, device.device_id

    @property
    def dtype(self) -> tuple[int, int, int]:
        """(code, bits, lanes)."""
        dtype = self._tensor().dtype
        return dtype.code, dtype.bits, dtype.lanes

    @property
    def ndim(self) -> int:
        """The number of dimensions as stored, negative if so forged."""
        return int(self._tensor().ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in elements. A NULL shape is fine for ndim 0 only; otherwise Malformed."""
        tensor = self._tensor()
        shape = abi.extents(tensor.shape, tensor.ndim)
        if shape is None and tensor.ndim != 0:
            raise Malformed(f"shape is NULL although ndim is {tensor.ndim}")
        return shape or ()

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Strides in elements as stored; None for NULL, which means compact row-major (before DLPack 1.2)."""
        tensor = self._tensor()
        return abi.extents(tensor.strides, tensor.ndim)

    @property
    def data(self) -> int:
        """``data`` as stored, without the byte offset: an address or a handle; 0 for NULL."""
        return int(self._tensor().data or 0)

    @property
    def byte_offset(self) -> int:
        """Bytes from ``data`` to the first element."""
        return int(self._tensor().byte_offset)

    @property
    def size(self) -> int:
        """The number of elements; Malformed when an extent is negative."""
        shape = self.shape
        if min(shape, default=0) < 0:
            raise Malformed(f"shape {shape} has a negative extent")
        return math.prod(shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the elements fill when compact: sub-byte types packed, unless the padded flag is set."""
        size = self.size
        _, bits, lanes = self.dtype
        return size * lanes * -(-bits // 8) if self.padded else -(-size * bits * lanes // 8)

    @property
    def contiguous(self) -> bool:
        """Whether the strides are compact row-major. Extents of 1 may have any stride, and so may an empty tensor."""
        shape, strides = self.shape, self.strides
        if strides is None or 0 in shape:
            return True
        return all(n == 1 or s == c for n, s, c in zip(shape, strides, compact_strides(shape), strict=True))

    def fields(self) -> TensorFields:
        """All fields of the DLTensor as plain values."""
        return abi.tensor_fields(self._tensor())

    def bytes(self) -> builtins.bytes:
        """Copy the elements out, row-major and compact. Host-accessible device types only (1, 3, 11, 13)."""
        if self.device[0] not in abi.HOST_DEVICES:
            raise Malformed(f"{abi.device_text(self.device)}: data is not an address that the host can read")
        nbytes = self.nbytes
        if nbytes == 0:
            return b""
        if not self.data:
            raise Malformed(f"data is NULL although the tensor has {nbytes} bytes")
        first = self.data + self.byte_offset
        if self.contiguous:
            return ctypes.string_at(first, nbytes)
        _, bits, lanes = self.dtype
        if bits * lanes % 8 and not self.padded:
            raise Malformed("a packed sub-byte type can be read only where it is contiguous")
        strides = self.strides
        assert strides is not None  # NULL strides are contiguous
        return _gather(first, self.shape, strides, nbytes // self.size)

    def _describe(self) -> str:
        parts = [f"v{v[0]}.{v[1]}" if (v := self.version) else "legacy"]
        try:
            tensor = self.fields()
        except Malformed as error:
            parts.append(f"<{error}>")
        else:
            parts += [abi.dtype_text(tensor["dtype"]), f"shape={tensor['shape']}", f"strides={tensor['strides']}"]
            parts += [abi.device_text(tensor["device"]), f"data={tensor['data']:#x}"]
            parts += [f"+{tensor['byte_offset']}"] if tensor["byte_offset"] else []
        parts += [f"flags={abi.flags_text(self.flags)}"] if self.flags else []
        parts += [] if self.has_deleter else ["no deleter"]
        return " ".join(parts)


class Capsule(ManagedTensor):
    """A capsule, looked at and not consumed. Attributes are read when asked for, so `consumed` is always the truth.

    Any capsule is accepted. The fields of one that is consumed, or whose name is not DLPack's, raise `Spent`
    (an AttributeError): after consumption the struct belongs to another and may be gone.
    """

    def __init__(self, capsule: object) -> None:
        """Keep ``capsule``; TypeError for anything else (call ``__dlpack__`` yourself, or use `Capsule.of`)."""
        if type(capsule) is not abi.CapsuleType:
            raise TypeError(f"expected a capsule, got {type(capsule).__name__}; Capsule.of(x) asks x for one")
        self.capsule: Any = capsule

    @classmethod
    def of(cls, producer: Any, /, **keywords: Any) -> Capsule:
        """Ask ``producer.__dlpack__(**keywords)`` for a capsule and look at it."""
        return cls(producer.__dlpack__(**keywords))

    @property
    def name(self) -> str | None:
        """The capsule's name now; None for a NULL name."""
        name: builtins.bytes | None = abi.capsule_name(self.capsule)
        return None if name is None else name.decode("utf-8", "backslashreplace")

    @property
    def consumed(self) -> bool:
        """Whether somebody has taken the tensor out (the name says so)."""
        return self.name in (abi.USED_LEGACY, abi.USED_VERSIONED)

    @property
    def versioned(self) -> bool:
        """Whether the name promises a DLManagedTensorVersioned; also known after consumption."""
        return self.name in (abi.VERSIONED, abi.USED_VERSIONED)

    @property
    def address(self) -> int:
        """Address of the managed tensor."""
        name = self.name
        if name not in (abi.LEGACY, abi.VERSIONED):
            why = "is consumed" if name in _KNOWN else "is not a DLPack tensor"
            raise Spent(f"capsule {name!r} {why}: only its name can be read")
        return int(abi.capsule_pointer(self.capsule, name.encode()))

    def consume(self) -> Consumed:
        """Take the tensor out: rename to ``used_...`` first, as DLPack asks; return the owner. Spent if too late."""
        address, versioned = self.address, self.versioned
        abi.capsule_set_name(self.capsule, abi.static_name(abi.USED_VERSIONED if versioned else abi.USED_LEGACY))
        return Consumed(address, versioned=versioned)

    def __repr__(self) -> str:
        """Name and fields, also of malformed tensors."""
        return f"<Capsule {self.name!r}{f' {self._describe()}' if self.name in _KNOWN[:2] else ''}>"


class Consumed(ManagedTensor):
    """A managed tensor that we own. Nothing happens by itself: without `delete` it leaks, so that tests see who calls.

    As a context manager it deletes at the end what is still owned then.
    """

    def __init__(self, address: int, *, versioned: bool) -> None:
        """Own the managed tensor at ``address``."""
        if not address:
            raise Malformed("the managed tensor is NULL")
        self._at, self._versioned, self._gone = address, versioned, ""
        self._once = threading.Lock()

    @property
    def versioned(self) -> bool:
        """Whether the struct is a DLManagedTensorVersioned."""
        return self._versioned

    @property
    def owned(self) -> bool:
        """Whether the deleter is still ours to call."""
        return not self._gone

    @property
    def address(self) -> int:
        """Address of the managed tensor."""
        if self._gone:
            raise Spent(f"the managed tensor was {self._gone}")
        return self._at

    def _give_up(self, how: str) -> tuple[int, int]:
        with self._once:
            if self._gone:
                raise RuntimeError(f"the managed tensor was already {self._gone}; its deleter may run only once")
            deleter = self.deleter
            self._gone = how
        return self._at, deleter

    def hand_over(self) -> int:
        """Give the struct and the duty to delete it to C code; returns its address."""
        return self._give_up("handed over")[0]

    def delete(self, *, gil: bool = True) -> None:
        """Call the deleter (nothing to call if NULL) holding the GIL or not. RuntimeError the second time.

        With the GIL, an exception that the deleter leaves behind is raised: DLPack deleters must leave none.
        """
        address, deleter = self._give_up("deleted")
        if deleter:
            (_DELETER_WITH_GIL if gil else _DELETER_WITHOUT_GIL)(deleter)(address)

    def delete_from_pthread(self) -> None:
        """Call the deleter on a fresh OS thread that has no Python thread state, and wait for it.

        The deleter itself is the start routine: ``void *(*)(void *)`` and ``void (*)(T *)`` are called alike on x86-64
        and AArch64, and nobody looks at the result. So not a line of Python runs on that thread, unless the deleter
        asks for it.
        """
        address, deleter = self._give_up("deleted")
        if not deleter:
            return
        thread = ctypes.c_void_p()  # pthread_t is an unsigned long or a pointer: both fit
        error = _pthread_create(ctypes.addressof(thread), None, deleter, address)
        if error:
            raise OSError(error, "pthread_create failed; the deleter did not run")
        error = _pthread_join(thread, None)
        if error:
            raise OSError(error, "pthread_join failed")

    def __enter__(self) -> Consumed:
        """Return self."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Delete what is still owned."""
        if self.owned:
            self.delete()

    def __repr__(self) -> str:
        """Fields while owned, otherwise what became of it."""
        return f"<Consumed {self._gone or self._describe()}>"


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements for ``shape``."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _gather(first: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bytes:
    """Copy strided elements one after the other, whole runs at a time where the inner dimensions are compact."""
    run, inner = itemsize, len(shape)
    while inner and (shape[inner - 1] == 1 or strides[inner - 1] * itemsize == run):
        inner -= 1
        run *= shape[inner]
    outer = itertools.product(*(range(n) for n in shape[:inner]))
    steps = [s * itemsize for s in strides[:inner]]
    return b"".join(
        ctypes.string_at(first + sum(i * s for i, s in zip(index, steps, strict=True)), run) for index in outer
    )
