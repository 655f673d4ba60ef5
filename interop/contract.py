"""What the author of an adapter uses: `Adapter`, `Guard`, `Limits`, `register`. Knows no framework and none of the core's insides.

An adapter teaches interop one framework: which types are its own, what stands in the way of reading them, what it can hold. Where the
framework has DLPack's C exchange table (the *fast-path record*: a capsule of C function pointers that export, lend and import), the
adapter names the type that carries it and no Python runs on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ._core import hold_open, opaque_tensor, pending_stream, ready_on, retire_address, stream_idle, stream_of
from .errors import DeviceLostError, ExchangeError
from .points import Point, as_point, failed_write, keep_until, note, pending, point
from .registry import party_limits, register

if TYPE_CHECKING:
    from . import Tensor

__all__ = [
    "Adapter",
    "Attributes",
    "DeviceLostError",
    "ExchangeError",
    "Guard",
    "Importable",
    "Limits",
    "Mapped",
    "Point",
    "as_point",
    "failed_write",
    "get_include",
    "hold_open",
    "keep_until",
    "note",
    "opaque_tensor",
    "party_limits",
    "pending",
    "pending_stream",
    "point",
    "ready_on",
    "register",
    "retire_address",
    "set_cuda_driver",
    "stream_idle",
    "stream_of",
]

#: Optional methods of an adapter; each one is a capability. `Adapter.can` says which are there.
CAPABILITIES = ("allocate", "export_handle", "import_handle", "map", "copy", "wait", "record", "limits", "to_device",
                "native_fields", "fresh", "current_stream", "stream_capsule", "to_capsule", "home", "exports_of",
                "host_view", "missing", "queue_of")


@dataclass(frozen=True)
class Guard:
    """An object whose `attribute` is true (or, where it is a method, returns true) is not exported.

    Guards are asked in C: a getset descriptor or a method without arguments costs a C call, anything else an attribute lookup.

    Attributes:
        attribute: name on the type, such as ``"requires_grad"`` or ``"is_conj"``.
        reason: why such an object cannot leave.
        remedy: what its owner can do.
        complex_only: asked only of complex tensors.
        fallback_only: asked only where the buffer protocol has refused already (``reads="buffer"``).
    """

    attribute: str
    reason: str
    remedy: str
    complex_only: bool = False
    fallback_only: bool = False


@dataclass(frozen=True)
class Attributes:
    """Where an array shows its memory as plain attributes, which costs less to read than ``__dlpack__`` (`Adapter.reads`).

    The device is what ``__dlpack_device__`` says, and pending is the work of `Adapter.current_stream`.

    Attributes:
        pointer: path to the address of the first element, an int: ``"data.ptr"``.
        shape: extents.
        strides: in bytes, as NumPy counts them.
        dtype: a NumPy dtype.
    """

    pointer: str
    shape: str = "shape"
    strides: str = "strides"
    dtype: str = "dtype"


@dataclass(frozen=True)
class Limits:
    """What memory a framework's objects, or a place, can hold in place, and what handles it takes and gives.

    Attributes:
        readonly: it can express that memory is not written to.
        writable: what it makes may be written to (jax: never).
        negative_strides: it takes them.
        strided: it takes gaps and broadcasts; False: only a permutation of row-major memory.
        alignment: bytes that the address must be a multiple of before memory is shared.
        granularity: bytes that the size must be a multiple of before memory is imported.
        devices: DLDeviceType numbers that it takes, None: whatever it says when asked.
        imports, exports: kinds of `ExternalHandle`.
    """

    readonly: bool = True
    writable: bool = True
    negative_strides: bool = True
    strided: bool = True
    alignment: int = 1
    granularity: int = 1
    devices: frozenset[int] | None = None
    imports: frozenset[str] | set[str] = frozenset()
    exports: frozenset[str] | set[str] = frozenset()


@dataclass(frozen=True)
class Importable:
    """What importing a kind of handle takes, said before it is tried.

    Attributes:
        supported: whether this kind can be imported there at all.
        reason: why not.
        pointer_alignment, size_alignment: bytes; of host ranges, and of the size of the memory object.
        dedicated: it must be a dedicated allocation.
        memory_types: the memory types that it may have, None: any.
        keeps: while one import of host pages lives, another costs nearly nothing, so memory that is made to be shared gets one at once.
    """

    supported: bool
    reason: str = ""
    pointer_alignment: int = 1
    size_alignment: int = 1
    dedicated: bool = False
    memory_types: frozenset[int] | None = None
    keeps: bool = False

    def check(self, h: Any) -> None:
        """ExchangeError where `h` does not fit; the message has the number that does not."""
        if h.kind == "host" and h.value % self.pointer_alignment:
            raise ExchangeError(f"address {h.value:#x} is not a multiple of {self.pointer_alignment}, which importing it takes",
                                "interop.empty(..., shared_with=[place]) is aligned")
        if h.nbytes % self.size_alignment:
            raise ExchangeError(f"a memory object of {h.nbytes} bytes is not a multiple of {self.size_alignment}, which importing it takes")
        if self.dedicated and not h.dedicated:
            raise ExchangeError("only a dedicated allocation can be imported there", "allocate it dedicated")
        if self.memory_types is not None and h.memory_type is not None and h.memory_type not in self.memory_types:
            raise ExchangeError(f"memory type {h.memory_type} is none of {sorted(self.memory_types)}")


@dataclass(frozen=True)
class Mapped:
    """What `Adapter.map` returns: where the host sees the bytes that were asked for.

    Attributes:
        address: of the first of them.
        unmap: ends the map. Called once, from a thread of the interpreter.
        flush: ``flush(first, nbytes)`` makes host writes visible to the device while still mapped; counted from the start of the
            allocation and exact: rounding to what the device can flush is the adapter's. None: `unmap` does.
        invalidate: ``invalidate(first, nbytes)`` makes device writes visible to the host. None: `map` did.
        outlives_unmap: the pages stay readable after `unmap` as long as the allocation lives, so that views only go stale.
    """

    address: int
    unmap: Callable[[], Any]
    flush: Callable[[int, int], Any] | None = None
    invalidate: Callable[[int, int], Any] | None = None
    outlives_unmap: bool = False


class Adapter:
    """One framework. Subclass it, set `name` and `types`, write `from_tensor`, call `register`.

    Attributes:
        name: what users write in ``interop.to(x, name)``.
        types: ``"module.Qualname"`` of its classes, matched along the MRO; the framework is not imported for it.
        exact: the types of which an object counts as already converted, and whose exchange table may be used for reading (a subclass
            may mean something else by the same memory). Default: `types`.
        module: what to import when the framework is asked for by name. Default: `name`.
        requires: what to install, for the message when that import fails. Default: `module`.
        reads: ``"adapter"`` (`to_tensor`), ``"dlpack"``, ``"buffer"`` (then DLPack), ``"table"``, or ``"attributes"``.
        attributes: which, for the last.
        table: name of the type within `module` whose exchange table makes objects; None: `from_tensor` does.
        guards: what is refused before reading.
        accepts: what can be held in place.
        device: name of its devices where they are its own, such as ``"acme"``: ``acme:0`` is then a Device (DLPack's kDLExtDev with a
            number registered for it) or, for DLPack's own types, one of their names.
        shares: kinds of `ExternalHandle` that its allocations can be exported as; ``"process"`` where other processes can have them.
        orders: its `from_tensor` takes memory behind a handle that work is still pending on, and puts what it makes behind that
            (`pending`); else it gets memory that is ready.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[tuple[str, ...]] = ()
    module: ClassVar[str] = ""
    requires: ClassVar[str] = ""
    reads: ClassVar[str] = "dlpack"
    attributes: ClassVar[Attributes | None] = None
    table: ClassVar[str | None] = None
    guards: ClassVar[tuple[Guard, ...]] = ()
    accepts: ClassVar[Limits] = Limits()
    device: ClassVar[str] = ""
    shares: ClassVar[frozenset[str]] = frozenset()
    orders: ClassVar[bool] = False

    # Each further method is one capability; none is required, and what is missing is asked for by `can`:
    #   limits(place) -> Limits                              what a place imports, exports and needs
    #   allocate(nbytes, *, place, alignment, shared_with) -> Allocation
    #   export_handle(allocation, kind) -> ExternalHandle
    #   import_handle(handle, *, place) -> Allocation        handle.take() once the driver has taken it
    #   map(allocation, access, first, nbytes) -> Mapped | NotImplemented     so many bytes from there; may come while others are mapped.
    #       A lease maps in place where the Mapped has flush (which may do nothing) or outlives_unmap; else interop stages
    #   copy(dst, src, stream) -> Point | None | NotImplemented     any strides; each side is the host's or its own. None: done.
    #       An error that is exactly ExchangeError is a refusal, before anything was written; after any other `dst` counts as spoiled
    #   wait(place, stream, point) -> bool                   make a queue wait for a Point; False: cannot. ExchangeError: no such
    #       queue, also where the Point is done. `stream` is whatever form the API's users have, and the number of ``__dlpack__``
    #   record(place, stream) -> Point                       when what the queue was given so far is done
    #   to_device(x, device) -> object                       the framework's own copy to another device
    #   fresh(t, device) -> object                           an array of the framework's own there, shaped like t, not initialised
    #   current_stream(device) -> int                        as the array API numbers it: what the framework's work runs on now. Objects
    #       are made of memory that is ready on it, so `from_tensor` orders nothing
    #   stream_capsule() -> capsule | None                   the same in C, named ``intptr_t (void)``, where there is one device
    #   to_capsule(x, stream) -> capsule                     a quicker ``x.__dlpack__(stream=stream)``; beside reads="buffer"
    #   home() -> Device                                     where host pages are shown to a framework that takes no memory of the host
    #   host_view(allocation) -> address | None              where the host may touch the memory at any time, without a lease
    #   exports_of(allocation) -> kinds                      what memory of others, on this adapter's devices, can be exported as
    #   queue_of(x) -> object | None                         the framework's own queue that its object is used on, where its objects say so
    #   missing() -> str | None                              what is not here and how to get it, where that is no module: doctor asks
    #   native_fields(allocation) -> dict                    what the side channel says of it: some of `interop.native.ADAPTER_FIELDS`

    def can(self, capability: str) -> bool:
        """Whether this adapter has one of `CAPABILITIES`."""
        return callable(getattr(self, capability, None))

    def importable(self, kind: str, *, place: Any) -> Importable:
        """What importing a kind of handle at `place` takes. From `limits`, unless an adapter knows more."""
        limits: Limits = self.limits(place) if self.can("limits") else self.accepts  # type: ignore[attr-defined]
        if kind not in limits.imports:
            kinds = ", ".join(sorted(limits.imports)) or "nothing"
            return Importable(False, f"{self.name} imports {kinds}")
        return Importable(True, "", limits.alignment, limits.granularity)

    def to_tensor(self, x: Any) -> Tensor:
        """A Tensor over `x`; used where `reads` is ``"adapter"``."""
        raise TypeError(f"adapter {self.name} reads its objects itself: it needs to_tensor")

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """The framework's object over the memory of `t`, which satisfies `accepts`. Keeps `t` alive as long as it lives.

        `place` is what `place()` was given, where the target was the framework's own device; `stream` what the user gave.
        """
        raise TypeError(f"adapter {self.name} cannot make objects: it needs from_tensor")

    def place(self, obj: Any) -> Any:
        """The Device that one of the framework's own device, context or queue objects stands for, or its `Context`; None: not ours.

        With a Context, such an object is a place and, in `interop.acquire`, a queue: the value is the framework's object on it, `wait`
        and `record` are asked about it.
        """
        return None

    def refuse(self, reason: str, remedy: str | None = None) -> ExchangeError:
        """An error to raise: ``raise self.refuse("a file mapping cannot adopt memory", remedy="interop.copyto(...)")``."""
        return ExchangeError(f"{self.name}: {reason}", remedy)


def set_cuda_driver(driver: Any) -> None:
    """Who answers for CUDA. The adapter that comes with interop does, through cuda-bindings; an application may put its own here.

    Streams are numbered as the array API does. It has ``pointer_device(address) -> id``, ``order(device, first, then)`` and
    ``synchronize(device, stream)``, and may have ``own_stream(device) -> stream`` (a stream of interop's), ``keep(device, stream,
    memory)`` (hold memory until what the stream was given is done), ``idle(device, stream) -> bool``,
    ``classify(address, claimed) -> (DLDeviceType, id)``, and ``enter(device) -> token | None`` with ``leave(token)`` (make a GPU
    current; None: it is).
    """
    from . import _core

    _core.set_cuda_ops(driver)


def get_include() -> str:
    """The folder of ``interop_native.h``, for C and C++ authors: the path that belongs behind ``-I``."""
    import os

    return os.path.join(os.path.dirname(__file__), "include")
