"""Managed tensors with any field set to any value, for feeding to consumers; and the count of their deletions.

Pure ctypes. It must not know any array library or the rest of `interop`. Nothing here checks that a tensor makes sense:
that is the consumer's job, and the point.

Two facts of ctypes shape this module (both measured on CPython 3.11):

* **A ctypes callback cannot keep a pending exception.** Entered while one is set, even ``PyErr_Fetch`` fails, and one
  set on the way out is printed and dropped; the caller then sees "error return without exception set". But capsules
  die, and deleters run, exactly while a consumer's error unwinds. So the default deleter is a C function, and every
  capsule made here is also held by us until nobody else has it: `settle` then lets go, when nothing is pending. Its
  destructor is real; only its hour is ours.
* **A C function needs no GIL, no thread state and no interpreter**, so it can be called at any time from anywhere.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from . import abi
from .abi import DLManagedTensor, DLManagedTensorVersioned, DLTensor
from .capsule import Consumed, compact_strides

Deleter = Literal["count", "python", "null", "free"]

_libc = ctypes.CDLL(None)
_malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", _libc))

# The "count" deleter: a libc function of one pointer that leaves a countable mark in the struct and needs nothing else.
# POSIX jrand48 advances the 48-bit generator state that it is pointed at; the steps from the first six bytes as we
# wrote them to what stands there now are the number of calls. (The generator has full period, so no step is lost.)
_step = _libc.jrand48
_MOST_STEPS = 64

_ALIGNMENT = 64  # what JAX wants in order not to copy; nobody keeps the 256 of the header
_LARGEST = 1 << 26  # a shape that needs more is taken for hostile, and gets a token piece of memory


def _generator(state: int) -> int:
    """One step of POSIX's linear congruential generator."""
    return (state * 0x5DEECE66D + 0xB) & 0xFFFFFFFFFFFF


class Forged:
    """A managed tensor to order. Each `capsule` or `loose` call makes a fresh struct over the same memory.

    Integers are stored modulo the width of their field. Memory, when not given, is zeroed, 64-byte aligned, and just
    large enough for shape, strides and byte_offset; for a shape that no memory could hold it is 64 bytes.

    ``shape``, ``strides``: a sequence, or None for NULL; strides default to compact row-major. ``ndim`` defaults to the
    length of the shape; with a larger one the arrays are padded, so that reading them is defined.
    ``data``: None for own memory, bytes for own memory with that content (from the lowest address), or an int that is
    exported as it is (0 for NULL, a handle, the address of memory that ``owner`` keeps alive).
    ``version``: None makes legacy tensors. ``device``, ``dtype``, ``byte_offset``, ``flags``: as stored.

    ``deleter``:

    * ``"count"``: a C function that counts; callable from anywhere at any time. It scribbles over the first six bytes.
    * ``"python"``: a ctypes callback that counts, takes the GIL, notes its thread in `deleter_threads`, and turns the
      struct into nonsense, so that who reads it afterwards is found out. It loses an exception that is pending when it
      is called (module text), and cannot run after finalization.
    * ``"null"``: NULL. Nobody says when the memory is free, so it is kept for ever.
    * ``"free"``: libc's ``free``; struct, extents and a copy of the bytes lie in one malloc block. Not counted. A
      second call is a real double free.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = (4,),
        dtype: tuple[int, int, int] = (abi.FLOAT, 32, 1),
        *,
        strides: Sequence[int] | Literal["compact"] | None = "compact",
        data: int | bytes | bytearray | memoryview | None = None,
        device: tuple[int, int] = (abi.CPU, 0),
        ndim: int | None = None,
        byte_offset: int = 0,
        version: tuple[int, int] | None = (abi.MAJOR, abi.MINOR),
        flags: int = 0,
        deleter: Deleter = "count",
        owner: object = None,
    ) -> None:
        """Describe the tensor; no struct is made yet."""
        self.shape = None if shape is None else tuple(shape)
        self.strides: tuple[int, ...] | None = None
        if strides is not None:
            self.strides = compact_strides(self.shape or ()) if isinstance(strides, str) else tuple(strides)
        self.dtype, self.device, self.byte_offset = dtype, device, byte_offset
        self.ndim = len(self.shape or ()) if ndim is None else ndim
        self.version, self.flags, self.deleter, self.owner = version, flags, deleter, owner
        self._memory: memoryview | None = None
        if isinstance(data, int):
            self.data = data
        else:
            low, high = self._span()
            content = b"" if data is None else bytes(data)
            self._memory = _aligned(max(high - low, len(content)))
            self._memory[: len(content)] = content
            self.data = _at(self._memory) - low
        self._records: deque[_Record] = deque()
        self._lent: _Record | None = None
        self._retired = 0
        self._pruning = threading.Lock()

    def _span(self) -> tuple[int, int]:
        """First and last byte that the elements touch, counted from ``data``; a token span for nonsense."""
        shape = self.shape or ()
        strides = compact_strides(shape) if self.strides is None else self.strides
        _, bits, lanes = self.dtype
        if self.ndim != len(shape) or len(strides) != len(shape) or min(shape, default=0) < 0:
            return 0, _ALIGNMENT
        if 0 in shape:
            return 0, 0
        item = lanes * -(-bits // 8) if bits >= 8 or self.flags & abi.SUBBYTE_PADDED else lanes * bits / 8
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low = math.floor(sum(r for r in reach if r < 0) * item)
        high = math.ceil((sum(r for r in reach if r > 0) + 1) * item)
        low, high = min(0, low + self.byte_offset), high + self.byte_offset
        return (low, high) if high - low <= _LARGEST else (0, _ALIGNMENT)

    @property
    def memory(self) -> memoryview:
        """The own memory, as writable bytes from the lowest address; AttributeError when ``data`` was an address."""
        if self._memory is None:
            raise AttributeError("the data address was given by the caller: there is no memory of our own")
        return self._memory

    @property
    def made(self) -> int:
        """How many structs were made so far."""
        return self._retired + len(self._records)

    @property
    def deleted(self) -> int:
        """How often the deleter has run, over all structs made; capsules that nobody else holds are dropped first."""
        return self._retired + sum(self.deletions)

    @property
    def deletions(self) -> tuple[int, ...]:
        """The same for each struct, oldest first: anything above 1 is a consumer's double call.

        Only the last 256 are listed apart.
        """
        if self.deleter == "free":
            raise RuntimeError("deleter 'free' is libc's: it is not counted")
        settle()
        counts = tuple(record.deletions() for record in list(self._records))
        if -1 in counts:
            raise RuntimeError("a struct was written over by somebody else: its deletions cannot be told")
        return counts

    @property
    def deleter_threads(self) -> tuple[int, ...]:
        """Thread identities on which the ``"python"`` deleter has run, oldest struct first."""
        settle()
        return tuple(thread for record in list(self._records) for thread in record.log)

    def capsule(self, name: str | None = "", *, versioned: bool | None = None) -> Any:
        """Make a capsule around a fresh struct; its destructor calls the deleter unless the name begins with ``used_``.

        ``name``: any; empty for the right one, None for NULL. ``versioned`` overrides the kind of struct
        (a legacy description made versioned says 1.3).
        """
        record = self._record(versioned)
        if name == "":
            name = abi.VERSIONED if record.versioned else abi.LEGACY
        capsule = abi.capsule_new(record.address, None if name is None else abi.static_name(name), _DESTRUCTOR)
        # The destructor finds the deleter here and not in the struct: the name need not tell which struct that is.
        abi.capsule_set_context(capsule, record.deleter)
        record.capsule = capsule
        _pinned[record.address] = record
        return capsule

    def loose(self, *, versioned: bool | None = None) -> Consumed:
        """A fresh struct without any capsule, as its owner sees it: for the slots of an exchange table."""
        record = self._record(versioned)
        _pinned[record.address] = record
        return Consumed(record.address, versioned=record.versioned)

    def lend(self) -> DLTensor:
        """A DLTensor whose shape and strides live as long as this object: for an exchange table's borrowing slot."""
        if self._lent is None:
            self._lent = _Record(self, True)  # nobody deletes what is lent, so it is not counted among those made
        tensor: DLTensor = DLManagedTensorVersioned.from_address(self._lent.address).dl_tensor
        return tensor

    def _record(self, versioned: bool | None) -> _Record:
        if len(_pinned) > _threshold.value:
            settle()
            _threshold.value = 64 + 2 * len(_pinned)
        record = _Record(self, self.version is not None if versioned is None else versioned)
        with self._pruning:
            self._records.append(record)
            while len(self._records) > 256 and self._records[0].settled:
                self._retired += self._records.popleft().deletions()
        return record

    def __repr__(self) -> str:
        """The description, as stored."""
        kind = "legacy" if self.version is None else f"v{self.version[0]}.{self.version[1]}"
        return (
            f"<Forged {kind} {abi.dtype_text(self.dtype)} shape={self.shape} strides={self.strides} "
            f"ndim={self.ndim} {abi.device_text(self.device)} data={self.data:#x} +{self.byte_offset} "
            f"flags={abi.flags_text(self.flags)} deleter={self.deleter!r}>"
        )


class _Record:
    """One struct with its extents: what a deleter gets. Lives until deleted, and then a while, to see second calls."""

    def __init__(self, forged: Forged, versioned: bool) -> None:
        self.versioned, self.kind = versioned, forged.deleter
        self.memory, self.owner = forged._memory, forged.owner
        self.capsule: object = None
        self.log: list[int] = []  # appended to by the callback: append is atomic, so no lock that it could dead-lock on
        self.settled = False
        struct = DLManagedTensorVersioned if versioned else DLManagedTensor
        shape, strides = _padded(forged.shape, forged.ndim, 1), _padded(forged.strides, forged.ndim, 0)
        parts = [ctypes.sizeof(struct), 8 * len(shape or ()), 8 * len(strides or ())]
        copy = bytes(forged._memory) if forged.deleter == "free" and forged._memory is not None else b""
        # The copy starts on a boundary of its own; malloc alone promises only 16 bytes.
        size = sum(parts) + _ALIGNMENT + len(copy)
        if forged.deleter == "free":
            self.address = _malloc(size)
            if not self.address:
                raise MemoryError(size)
            ctypes.memset(self.address, 0, size)
        else:
            self._block = _aligned(size)
            self.address = _at(self._block)
        self.deleter = _DELETERS[forged.deleter]
        managed = struct.from_address(self.address)
        if isinstance(managed, DLManagedTensorVersioned):
            managed.version = abi.DLPackVersion(*(forged.version or (abi.MAJOR, abi.MINOR)))
            managed.flags = forged.flags
        managed.manager_ctx = None
        managed.deleter = self.deleter or None
        tensor: DLTensor = managed.dl_tensor
        tensor.data = forged.data
        if copy and forged._memory is not None:
            target = -(-(self.address + sum(parts)) // _ALIGNMENT) * _ALIGNMENT
            ctypes.memmove(target, copy, len(copy))
            tensor.data = forged.data - _at(forged._memory) + target
        tensor.device = abi.DLDevice(*forged.device)
        tensor.dtype = abi.DLDataType(*forged.dtype)
        tensor.ndim = forged.ndim
        tensor.byte_offset = forged.byte_offset
        tensor.shape = self._store(shape, parts[0])
        tensor.strides = self._store(strides, parts[0] + parts[1])
        if self.kind == "python":
            _by_address[self.address] = self
        self._first = self._mark() if self.kind == "count" else 0

    def _store(self, values: tuple[int, ...] | None, offset: int) -> int | None:
        if values is None:
            return None
        array = (ctypes.c_int64 * len(values)).from_address(self.address + offset)
        array[:] = list(values)
        return int(self.address + offset)  # not NULL for ndim 0 either: None was the way to ask for that

    def _mark(self) -> int:
        low, middle, high = (ctypes.c_uint16 * 3).from_address(self.address)
        return int(low | middle << 16 | high << 32)

    def deletions(self) -> int:
        """How often the deleter has run on this struct; -1 if that can no longer be told."""
        if self.kind != "count":
            return len(self.log)
        state, now = self._first, self._mark()
        for count in range(_MOST_STEPS):
            if state == now:
                return count
            state = _generator(state)
        return -1


def settle() -> None:
    """Drop the capsules that only we hold (their destructors run now) and forget the structs that are done with.

    Called by everything here that counts or makes; a test calls it itself only to have memory back early.
    """
    for address, record in list(_pinned.items()):
        # Two references: the record's and the argument's. A capsule that somebody else has counts more.
        if record.capsule is not None and sys.getrefcount(record.capsule) <= 2:
            record.capsule = None
        if record.capsule is None and (record.kind == "free" or record.deletions() > 0):
            record.settled = True
            # A "free" block's address may already be another record's, so only our own entry goes.
            if _pinned.get(address) is record:
                del _pinned[address]
            if record.kind != "free":
                _quarantine.append(record)


class _Threshold:
    value = 64


_threshold: Final = _Threshold()
#: Structs that C code may still use, whatever becomes of the Forged that made them.
_pinned: dict[int, _Record] = {}
#: Structs done with, kept a little longer: a second call of the deleter should be counted, not crash.
_quarantine: deque[_Record] = deque(maxlen=256)
_by_address: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
#: Addresses on which the ``"python"`` deleter ran although no struct of ours lies there (a very late second call).
strays: list[int] = []


def _make_callbacks() -> tuple[int, int]:
    """The capsule destructor and the "python" deleter, immortal. Cells hold what they need, for globals die earlier."""
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
    # The name is passed back by address: NULL, and any bytes, must survive the trip.
    name_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 2)(("PyCapsule_GetPointer", ctypes.pythonapi))
    context_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("PyCapsule_GetContext", ctypes.pythonapi))
    call = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
    records, log_stray, thread, versioned_struct, legacy_struct = (
        _by_address, strays.append, threading.get_ident, DLManagedTensorVersioned, DLManagedTensor,
    )  # fmt: skip

    # The capsule comes as an address: as a py_object it would gain a reference, lose it, and die a second time.
    def destroy(capsule: int) -> None:
        deleter = context_of(capsule)
        if deleter and not (name_of(capsule) or b"").startswith(b"used_"):
            call(deleter)(pointer_of(capsule, name_at(capsule)))

    def delete(managed: int) -> None:
        record = records.get(managed)
        if record is None:
            log_stray(managed)
            return
        if not record.log:
            struct = versioned_struct if record.versioned else legacy_struct
            tensor = struct.from_address(managed).dl_tensor
            tensor.data, tensor.shape, tensor.strides, tensor.ndim = None, None, None, -1
        record.log.append(thread())

    destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(destroy)
    # CFUNCTYPE: a deleter may come from a thread without the GIL; ctypes takes it.
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(delete)
    abi.immortal(destructor)
    abi.immortal(deleter)
    return abi.function_address(destructor), abi.function_address(deleter)


_DESTRUCTOR, _python_deleter = _make_callbacks()
_DELETERS: dict[Deleter, int] = {
    "count": abi.function_address(_step),
    "python": _python_deleter,
    "null": 0,
    "free": abi.function_address(_libc.free),
}


@atexit.register
def _at_exit() -> None:
    """Release what can be released, and leak the rest on purpose: C code may still hold it during finalization."""
    settle()
    abi.immortal(_pinned)


def _padded(values: Sequence[int] | None, ndim: int, filler: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    return tuple(values) + (filler,) * (min(ndim, 1024) - len(values))


def _aligned(size: int) -> memoryview:
    raw = ctypes.create_string_buffer(max(size, 1) + _ALIGNMENT)
    start = -ctypes.addressof(raw) % _ALIGNMENT
    return memoryview(raw).cast("B")[start : start + size]


def _at(view: memoryview) -> int:
    """Address of a view's first byte, also of an empty one's (which ctypes refuses to overlay)."""
    raw: Any = view.obj
    return ctypes.addressof(raw) + -ctypes.addressof(raw) % _ALIGNMENT
