"""What the author of an adapter uses: `Adapter`, `Guard`, `Limits`, `register`. Knows no framework and none of the core's insides.

An adapter teaches interop one framework: which types are its own, what stands in the way of reading them, what it can hold. Where the
framework has DLPack's C exchange table (the *fast-path record*: a capsule of C function pointers that export, lend and import), the
adapter names the type that carries it and no Python runs on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ExchangeError
from .registry import register

if TYPE_CHECKING:
    from . import Device, Tensor

__all__ = ["Adapter", "ExchangeError", "Guard", "Limits", "register"]


@dataclass(frozen=True)
class Guard:
    """An object whose `attribute` is true (or, where it is a method, returns true) is not exported.

    Guards are asked in C: a getset descriptor or a method without arguments costs a C call, anything else an attribute lookup.

    Attributes:
        attribute: name on the type, such as ``"requires_grad"`` or ``"is_conj"``.
        reason: why such an object cannot leave.
        remedy: what its owner can do.
        complex_only: asked only of complex tensors.
    """

    attribute: str
    reason: str
    remedy: str
    complex_only: bool = False


@dataclass(frozen=True)
class Limits:
    """What memory a framework's objects can hold in place.

    Attributes:
        readonly: it can express that memory is not written to.
        writable: what it makes may be written to (jax: never).
        negative_strides: it takes them.
        strided: it takes gaps and broadcasts; False: only a permutation of row-major memory.
        alignment: bytes that the address must be a multiple of before memory is shared.
        devices: DLDeviceType numbers that it takes, None: whatever it says when asked.
    """

    readonly: bool = True
    writable: bool = True
    negative_strides: bool = True
    strided: bool = True
    alignment: int = 1
    devices: frozenset[int] | None = None


class Adapter:
    """One framework. Subclass it, set `name` and `types`, write `from_tensor`, call `register`.

    Attributes:
        name: what users write in ``interop.to(x, name)``.
        types: ``"module.Qualname"`` of its classes, matched along the MRO; the framework is not imported for it.
        exact: the types of which an object counts as already converted, and whose exchange table may be used for reading (a subclass
            may mean something else by the same memory). Default: `types`.
        module: what to import when the framework is asked for by name. Default: `name`.
        requires: what to install, for the message when that import fails. Default: `module`.
        reads: ``"adapter"`` (`to_tensor`), ``"dlpack"``, ``"buffer"`` (then DLPack) or ``"table"``.
        table: name of the type within `module` whose exchange table makes objects; None: `from_tensor` does.
        guards: what is refused before reading.
        accepts: what can be held in place.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[tuple[str, ...]] = ()
    module: ClassVar[str] = ""
    requires: ClassVar[str] = ""
    reads: ClassVar[str] = "dlpack"
    table: ClassVar[str | None] = None
    guards: ClassVar[tuple[Guard, ...]] = ()
    accepts: ClassVar[Limits] = Limits()

    def to_tensor(self, x: Any) -> Tensor:
        """A Tensor over `x`; used where `reads` is ``"adapter"``."""
        raise TypeError(f"adapter {self.name} reads its objects itself: it needs to_tensor")

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """The framework's object over the memory of `t`, which satisfies `accepts`. Keeps `t` alive as long as it lives.

        `place` is what `place()` was given, where the target was the framework's own device; `stream` what the user gave.
        """
        raise TypeError(f"adapter {self.name} cannot make objects: it needs from_tensor")

    def place(self, obj: Any) -> Device | None:
        """The Device that one of the framework's own device, context or queue objects stands for, or None: not ours."""
        return None

    def refuse(self, reason: str, remedy: str | None = None) -> ExchangeError:
        """An error to raise: ``raise self.refuse("a file mapping cannot adopt memory", remedy="interop.copyto(...)")``."""
        return ExchangeError(f"{self.name}: {reason}", remedy)
