"""Objects that speak an exchange protocol and nothing else, over `Forged` tensors: well-behaved, limited, or lying.

What a consumer may rely on is what the array API says of ``__dlpack__`` and ``__dlpack_device__``; these classes show
no other attribute that a consumer could use instead. Pure Python. It must not know any array library or the rest of
`interop`.

A consumer may remember per *type* which keywords are refused, so each signature is a type of its own: `producer_type`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from .forged import Forged

ALL_KEYWORDS: Final = ("stream", "max_version", "dl_device", "copy")
Versions = Literal["negotiate", "legacy", "versioned"]
Style = Literal["keyword", "positional"]


class _Absent:
    """Stands for "not given" and "leave out"; nothing else can be mistaken for it."""

    def __repr__(self) -> str:
        """A word for signatures and messages."""
        return "ABSENT"


ABSENT: Final = _Absent()


class _Speaker:
    """Answers ``__dlpack__``: notes the call, then fails, lies or gives a capsule."""

    _versions: Versions = "negotiate"

    def __init__(
        self,
        forged: Forged,
        *,
        error: BaseException | None = None,
        returns: object = ABSENT,
    ) -> None:
        self.forged = forged
        self.error = error
        self.returns = returns
        self.calls: list[dict[str, Any]] = []

    def _answer(self, given: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in given.items() if value is not ABSENT}
        self.calls.append(given)
        if self.error is not None:
            raise self.error
        if self.returns is not ABSENT:
            return self.returns
        versioned = self._versions == "versioned"
        if self._versions == "negotiate":
            # Array API: None or a major of 0 asks for a legacy capsule.
            asked = given.get("max_version")
            versioned = asked is not None and asked[0] >= 1
        return self.forged.capsule(versioned=versioned)


class Producer(_Speaker):
    """``__dlpack__`` with exactly these keywords, and ``__dlpack_device__``.

    ``Producer(forged, keywords=...)`` gives an instance of the type that `producer_type` has for that signature. Python
    itself refuses other keywords (TypeError, "unexpected keyword argument"); such a call does not reach `calls`.

    ``error``: raised inside the body. ``returns``: what to answer instead of a capsule. ``device``: what
    ``__dlpack_device__`` says, right or wrong, of any type; an exception is raised.
    `calls` holds the keywords of each call, only those that were given; `device_calls` counts the device questions.
    """

    def __new__(
        cls,
        forged: Forged,
        keywords: Iterable[str] = ALL_KEYWORDS,
        *,
        style: Style = "keyword",
        open_ended: bool = False,
        versions: Versions = "negotiate",
        **rest: Any,
    ) -> Producer:
        """Choose the type for the signature, unless called on such a type."""
        if cls is Producer:
            cls = producer_type(keywords, style=style, open_ended=open_ended, versions=versions)
        return object.__new__(cls)

    def __init__(
        self,
        forged: Forged,
        keywords: Iterable[str] = ALL_KEYWORDS,
        *,
        style: Style = "keyword",
        open_ended: bool = False,
        versions: Versions = "negotiate",
        device: object = ABSENT,
        error: BaseException | None = None,
        returns: object = ABSENT,
    ) -> None:
        """Speak for ``forged``; the signature arguments were used by ``__new__``."""
        super().__init__(forged, error=error, returns=returns)
        self.device = device
        self.device_calls = 0

    def __dlpack_device__(self) -> Any:
        """The device that the capsule will say, or the lie that was ordered."""
        self.device_calls += 1
        if isinstance(self.device, BaseException):
            raise self.device
        return self.forged.device if self.device is ABSENT else self.device


_types: dict[tuple[tuple[str, ...], Style, bool, Versions], type[Producer]] = {}
_serial = itertools.count()


def producer_type(
    keywords: Iterable[str] = ALL_KEYWORDS,
    *,
    style: Style = "keyword",
    open_ended: bool = False,
    versions: Versions = "negotiate",
    fresh: bool = False,
) -> type[Producer]:
    """The `Producer` type whose ``__dlpack__`` takes exactly ``keywords``.

    ``style``: keyword-only, as the array API has it, or also by position, as old producers do. ``open_ended``: takes
    ``**others`` besides. ``versions``: "negotiate" (versioned if ``max_version`` asks for major 1 or more), or always
    the same.
    The same arguments give the same type, which is what a cache per type should see; ``fresh`` gives one never seen.
    """
    key = (tuple(keywords), style, open_ended, versions)
    if fresh or key not in _types:
        made = type(f"Producer{next(_serial)}", (Producer,), {"_versions": versions, "__module__": __name__})
        made.__dlpack__ = _method(made.__qualname__, *key[:3])  # type: ignore[attr-defined]
        if fresh:
            return made
        _types[key] = made
    return _types[key]


def _method(owner: str, keywords: tuple[str, ...], style: Style, open_ended: bool) -> Callable[..., Any]:
    """Build ``__dlpack__`` with a real signature: only then is a refusal Python's own, word for word."""
    for name in keywords:
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be a keyword")
    parameters = ["self", *(["*"] if keywords and style == "keyword" else []), *(f"{name}=ABSENT" for name in keywords)]
    parameters += ["**others"] if open_ended else []
    given = ", ".join([*(f"{name!r}: {name}" for name in keywords), *(["**others"] if open_ended else [])])
    scope: dict[str, Any] = {"ABSENT": ABSENT, "__name__": __name__}
    exec(f"def __dlpack__({', '.join(parameters)}):\n    return self._answer({{{given}}})\n", scope)
    method: Callable[..., Any] = scope["__dlpack__"]
    method.__qualname__ = f"{owner}.__dlpack__"
    return method


class WithoutDevice(_Speaker):
    """Only ``__dlpack__``, no ``__dlpack_device__``: half a protocol, which some producers had."""

    def __dlpack__(
        self,
        *,
        stream: Any = ABSENT,
        max_version: Any = ABSENT,
        dl_device: Any = ABSENT,
        copy: Any = ABSENT,
    ) -> Any:
        """As `Producer` answers with all four keywords."""
        return self._answer({"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy})


class ArrayInterface:
    """Only ``__array_interface__`` (NumPy's dictionary protocol), with whatever dictionary is given."""

    def __init__(self, interface: Any, owner: object = None) -> None:
        """Show ``interface`` as it is, the very same object; keep ``owner`` alive."""
        self.__array_interface__ = interface
        self.owner = owner


class CudaArrayInterface:
    """Only ``__cuda_array_interface__`` (Numba's dictionary protocol), with whatever dictionary is given."""

    def __init__(self, interface: Any, owner: object = None) -> None:
        """Show ``interface`` as it is, the very same object; keep ``owner`` alive."""
        self.__cuda_array_interface__ = interface
        self.owner = owner


class Forwarder:
    """Passes the DLPack protocol on to another object, forcing some keywords: ``Forwarder(x, max_version=None)``.

    A keyword forced to `ABSENT` is left out. `calls` holds what the consumer asked, before anything was forced.
    """

    def __init__(self, target: Any, /, **forced: Any) -> None:
        """Speak for ``target``."""
        self.target = target
        self.forced = forced
        self.calls: list[dict[str, Any]] = []

    def __dlpack__(self, **given: Any) -> Any:
        """What the target answers to the forced question."""
        self.calls.append(given)
        asked = {name: value for name, value in {**given, **self.forced}.items() if value is not ABSENT}
        return self.target.__dlpack__(**asked)

    def __dlpack_device__(self) -> Any:
        """What the target says."""
        return self.target.__dlpack_device__()
