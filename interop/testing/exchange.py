"""The DLPack C exchange table: call the slots of a real one, or forge one.

`exchange_table` wraps the table that a type offers, each slot as a Python method that also checks the slot's contract.
`ForgedTable` builds a table of any version with Python callables behind its slots. Pure ctypes. It must not know any
array library or the rest of `interop`. The contracts are those that the DLPack 1.3 header states for
``DLPackExchangeAPI``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from . import abi
from .abi import DLPackExchangeAPI, DLPackExchangeAPIHeader, DLTensor, Malformed, TensorFields
from .capsule import Consumed
from .forged import Forged

#: Slot names used here, and the fields of the C struct.
SLOTS: Final = {
    "allocate": "managed_tensor_allocator",
    "from_py": "managed_tensor_from_py_object_no_sync",
    "to_py": "managed_tensor_to_py_object_no_sync",
    "borrow": "dltensor_from_py_object_no_sync",
    "stream": "current_work_stream",
}
_MAX_CHAIN = 64

_P, _INT = ctypes.c_void_p, ctypes.c_int
_SET_ERROR = ctypes.CFUNCTYPE(None, _P, ctypes.c_char_p, ctypes.c_char_p)
# For calling: PYFUNCTYPE keeps the GIL, which these slots need, and raises the exception that a slot sets.
_FROM_PY = ctypes.PYFUNCTYPE(_INT, ctypes.py_object, _P)
_TO_PY = ctypes.PYFUNCTYPE(_INT, _P, _P)
_STREAM = ctypes.PYFUNCTYPE(_INT, ctypes.c_int32, ctypes.c_int32, _P)
_ALLOCATE = ctypes.PYFUNCTYPE(_INT, _P, _P, _P, _SET_ERROR)
_ALLOCATE_WITHOUT_GIL = ctypes.CFUNCTYPE(_INT, _P, _P, _P, _SET_ERROR)
# For being called: SetError comes as an address, so that NULL can be told.
_ALLOCATE_BACK = ctypes.CFUNCTYPE(_INT, _P, _P, _P, _P)


class ContractBroken(AssertionError):
    """A slot did what the header forbids: -1 without an exception, success without a result, and so on."""


class AllocatorError(Exception):
    """The allocator refused: the ``kind`` and ``message`` that it gave to SetError."""

    def __init__(self, kind: str, message: str) -> None:
        """Keep both."""
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class ExchangeTable:
    """A table read from its address. Only header fields are read while the major version is not 1."""

    def __init__(self, address: int, owner: object = None) -> None:
        """Read the table at ``address``; ``owner`` is kept."""
        if not address:
            raise Malformed("the exchange table is NULL")
        self.address, self._owner = address, owner

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the header."""
        header = DLPackExchangeAPIHeader.from_address(self.address)
        return header.version.major, header.version.minor

    @property
    def previous(self) -> ExchangeTable | None:
        """The table for an older version that this one links to."""
        address = DLPackExchangeAPIHeader.from_address(self.address).prev_api
        return ExchangeTable(address, self._owner) if address else None

    @property
    def chain(self) -> tuple[tuple[int, int], ...]:
        """Versions from this table back; Malformed if the chain does not end."""
        versions: list[tuple[int, int]] = []
        table: ExchangeTable | None = self
        while table is not None:
            if len(versions) == _MAX_CHAIN:
                raise Malformed(f"the chain of tables has more than {_MAX_CHAIN} links: a loop?")
            versions.append(table.version)
            table = table.previous
        return tuple(versions)

    def at_major(self, major: int) -> ExchangeTable | None:
        """The first table of the chain with that major version."""
        for _ in self.chain:  # also proves that the walk ends
            pass
        table: ExchangeTable | None = self
        while table is not None and table.version[0] != major:
            table = table.previous
        return table

    @property
    def slots(self) -> dict[str, int]:
        """Address per slot (see `SLOTS`), 0 for NULL."""
        if self.version[0] != abi.MAJOR:
            raise Malformed(f"exchange table {self.version}: the layout behind the header is unknown; see at_major")
        table = DLPackExchangeAPI.from_address(self.address)
        return {slot: getattr(table, field) or 0 for slot, field in SLOTS.items()}

    def _slot(self, name: str) -> int:
        address = self.slots[name]
        if not address:
            raise NotImplementedError(f"slot {SLOTS[name]} is NULL")
        return address

    def from_py(self, value: object) -> Consumed:
        """Export ``value``, which must be of the type that the table was found on. Owned result; no synchronisation."""
        out = ctypes.c_void_p()
        _succeeded("from_py", _FROM_PY(self._slot("from_py"))(value, ctypes.addressof(out)), out)
        return Consumed(out.value or 0, versioned=True)

    def to_py(self, managed: Consumed) -> Any:
        """Make the framework's object out of ``managed``, which is gone afterwards, also if the slot fails."""
        out = ctypes.c_void_p()
        slot = self._slot("to_py")
        _succeeded("to_py", _TO_PY(slot)(managed.hand_over(), ctypes.addressof(out)), out)
        result = ctypes.cast(out, ctypes.py_object).value  # takes a reference of its own...
        abi.decref_address(out)  # ...so the one that the slot gave goes back
        return result

    def borrow(self, value: object) -> TensorFields:
        """The fields of the borrowed view of ``value``, copied at once: its pointers are good only until we return."""
        tensor = DLTensor()
        _succeeded("borrow", _FROM_PY(self._slot("borrow"))(value, ctypes.addressof(tensor)))
        return abi.tensor_fields(tensor)

    def stream(self, device: tuple[int, int]) -> int:
        """The framework's current stream on ``device``; 0 for NULL."""
        out = ctypes.c_void_p()
        _succeeded("stream", _STREAM(self._slot("stream"))(*device, ctypes.addressof(out)))
        return out.value or 0

    def allocate(
        self,
        shape: Sequence[int],
        dtype: tuple[int, int, int] = (abi.FLOAT, 32, 1),
        device: tuple[int, int] = (abi.CPU, 0),
        *,
        ndim: int | None = None,
        gil: bool = True,
    ) -> Consumed:
        """Have a tensor allocated, with the GIL held or not. AllocatorError with what SetError was told.

        Only dtype, ndim, shape and device of the prototype count; the rest is NULL or 0.
        """
        said: list[tuple[str, str]] = []

        def set_error(context: int | None, kind: bytes | None, message: bytes | None) -> None:
            if context != token:
                said.append(("", f"error_ctx came back as {context}"))
            said.append(((kind or b"").decode(errors="replace"), (message or b"").decode(errors="replace")))

        array = (ctypes.c_int64 * len(shape))(*shape)
        token = ctypes.addressof(array)  # any address that only we know
        prototype = DLTensor(
            device=abi.DLDevice(*device),
            dtype=abi.DLDataType(*dtype),
            ndim=len(shape) if ndim is None else ndim,
            shape=ctypes.addressof(array),
        )
        out = ctypes.c_void_p()
        slot = (_ALLOCATE if gil else _ALLOCATE_WITHOUT_GIL)(self._slot("allocate"))
        code = slot(ctypes.addressof(prototype), ctypes.addressof(out), token, _SET_ERROR(set_error))
        if code == -1 and len(said) == 1:
            raise AllocatorError(*said[0])
        if code != 0 or said or not out.value:
            raise ContractBroken(f"allocate returned {code}, result {out.value}, SetError calls {said}")
        return Consumed(out.value, versioned=True)

    def __repr__(self) -> str:
        """Versions and the slots that are filled."""
        filled = ", ".join(name for name, at in self.slots.items() if at) if self.version[0] == abi.MAJOR else "unknown"
        return f"<ExchangeTable {' <- '.join(f'{major}.{minor}' for major, minor in self.chain)} slots: {filled}>"


def _succeeded(slot: str, code: int, out: ctypes.c_void_p | None = None) -> None:
    """What remains to be checked when the slot came back without an exception."""
    if code != 0:
        raise ContractBroken(f"{slot} returned {code} and set no exception")
    if out is not None and not out.value:
        raise ContractBroken(f"{slot} returned 0 and no result")


def exchange_table(source: Any) -> ExchangeTable:
    """The table of a type (its ``__dlpack_c_exchange_api__``) or of such a capsule; AttributeError if there is none."""
    if type(source) is not abi.CapsuleType:
        if not isinstance(source, type):
            # DLPack: the table is looked up on the type, so that consumers may remember it per type.
            raise TypeError(f"expected a type or a capsule, not an instance of {type(source).__name__}")
        source = getattr(source, abi.EXCHANGE_ATTRIBUTE)
    return ExchangeTable(abi.capsule_pointer(source, abi.EXCHANGE_API.encode()), source)


class ForgedTable:
    """An exchange table over Python callables. Tables are static by contract, so each one lives for ever.

    Slots (None leaves one NULL, against the contract for all but ``borrow``):

    * ``from_py(obj) -> Forged``, ``borrow(obj) -> Forged``; or ``"raise"``: the slot returns -1 with ``error`` set.
    * ``to_py(Consumed) -> object``.
    * ``stream(device) -> int``, or just the number.
    * ``allocate(fields) -> Forged``. An exception goes to SetError: its type's name and its text.

    A ctypes callback cannot leave a Python exception behind. So when one of the first four callables raises, the slot
    returns -1 with *no* exception set (contract broken, worth testing), and the exception is kept in `errors`. A proper
    failure is ``"raise"``: that slot is the C function ``PyObject_AsFileDescriptor``, which asks the object for
    ``fileno()`` and passes on what that raises; `attach` and `make_type` provide the method.
    `calls` notes (slot, argument) of each call, for ``to_py`` the struct's address.
    """

    def __init__(
        self,
        *,
        version: tuple[int, int] = (abi.MAJOR, abi.MINOR),
        previous: ForgedTable | None = None,
        from_py: Callable[[Any], Forged] | Literal["raise"] | None = None,
        to_py: Callable[[Consumed], object] | None = None,
        borrow: Callable[[Any], Forged] | Literal["raise"] | None = None,
        stream: Callable[[tuple[int, int]], int] | int | None = 0,
        allocate: Callable[[TensorFields], Forged] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Build the table; ``previous`` becomes its ``prev_api``."""
        self.calls: list[tuple[str, Any]] = []
        self.errors: list[BaseException] = []
        self.error = BufferError("forged refusal") if error is None else error
        self._kept: list[Any] = [previous]
        self._table = table = DLPackExchangeAPI()
        table.header.version = abi.DLPackVersion(*version)
        table.header.prev_api = previous.address if previous else None
        if from_py is not None:
            table.managed_tensor_from_py_object_no_sync = self._exporting("from_py", from_py)
        if borrow is not None:
            table.dltensor_from_py_object_no_sync = self._exporting("borrow", borrow)
        if to_py is not None:
            table.managed_tensor_to_py_object_no_sync = self._importing(to_py)
        if stream is not None:
            table.current_work_stream = self._streaming(stream)
        if allocate is not None:
            table.managed_tensor_allocator = self._allocating(allocate)
        abi.immortal(self)
        self.capsule: Any = abi.capsule_new(self.address, abi.static_name(abi.EXCHANGE_API), None)

    @property
    def address(self) -> int:
        """Address of the C struct."""
        return ctypes.addressof(self._table)

    def attach(self, cls: type) -> type:
        """Offer the table on ``cls`` and return it."""
        setattr(cls, abi.EXCHANGE_ATTRIBUTE, self.capsule)
        table = self

        def fileno(self: object) -> int:
            table.calls.append(("raise", self))
            raise table.error

        if _REFUSE in self.slots.values():
            cls.fileno = fileno  # type: ignore[attr-defined]
        return cls

    def make_type(self, name: str = "Tabled", bases: tuple[type, ...] = (), **namespace: Any) -> type:
        """A new class that offers the table; with ``bases=(SomeProducer,)`` it also has a slow path."""
        return self.attach(type(name, bases, namespace))

    @property
    def slots(self) -> dict[str, int]:
        """Address per slot, 0 for NULL, whatever the version says."""
        return {slot: getattr(self._table, field) or 0 for slot, field in SLOTS.items()}

    def _keep(self, callback: Any) -> int:
        self._kept.append(callback)
        return abi.function_address(callback)

    def _guarded(self, slot: str, argument: Any, work: Callable[[], None]) -> int:
        self.calls.append((slot, argument))
        try:
            work()
        except BaseException as error:
            self.errors.append(error)
            return -1
        return 0

    def _exporting(self, slot: str, function: Callable[[Any], Forged] | Literal["raise"]) -> int:
        if not callable(function):
            return _REFUSE

        def export(value: Any, out: int) -> int:
            def work() -> None:
                forged = function(value)
                if slot == "from_py":
                    ctypes.c_void_p.from_address(out).value = forged.loose(versioned=True).hand_over()
                    return
                if forged not in self._kept:  # what is borrowed must live as long as the consumer may look
                    self._kept.append(forged)
                ctypes.memmove(out, ctypes.addressof(forged.lend()), ctypes.sizeof(DLTensor))

            return self._guarded(slot, value, work)

        return self._keep(_FROM_PY(export))

    def _importing(self, function: Callable[[Consumed], object]) -> int:
        def import_(managed: int, out: int) -> int:
            def work() -> None:
                result = function(Consumed(managed, versioned=True))
                abi.incref(result)
                ctypes.c_void_p.from_address(out).value = id(result)

            return self._guarded("to_py", managed, work)

        return self._keep(_TO_PY(import_))

    def _streaming(self, function: Callable[[tuple[int, int]], int] | int) -> int:
        def current(kind: int, number: int, out: int) -> int:
            def work() -> None:
                value = function((kind, number)) if callable(function) else function
                ctypes.c_void_p.from_address(out).value = value

            return self._guarded("stream", (kind, number), work)

        return self._keep(_STREAM(current))

    def _allocating(self, function: Callable[[TensorFields], Forged]) -> int:
        def allocate(prototype: int, out: int, context: int | None, set_error: int) -> int:
            fields = abi.tensor_fields(DLTensor.from_address(prototype))
            self.calls.append(("allocate", fields))
            try:
                made = function(fields).loose(versioned=True)
            except BaseException as error:
                self.errors.append(error)
                _SET_ERROR(set_error)(context, type(error).__name__.encode(), str(error).encode())
                return -1
            ctypes.c_void_p.from_address(out).value = made.hand_over()
            return 0

        return self._keep(_ALLOCATE_BACK(allocate))


_REFUSE: Final = abi.function_address(ctypes.pythonapi.PyObject_AsFileDescriptor)
