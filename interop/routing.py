"""What happened to the bytes: `Route`, and `copy_guard`, which sees every copy that interop makes. Knows no framework."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from . import _core
from .errors import ExchangeError

_log = logging.getLogger("interop")
_MODES = ("allow", "log", "disallow")


@dataclass(frozen=True)
class Route:
    """How memory reached a target.

    Attributes:
        source: framework or type that it came from.
        target: framework, class or device that it went to.
        steps: ``("copy",)`` for what `copy_guard` collects.
        copied_bytes: bytes copied, 0 where the source did not say its size beforehand.
        refused: for each better way, ``(way, reason, remedy)``; remedy may be None.
    """

    source: str
    target: str
    steps: tuple[str, ...]
    copied_bytes: int
    refused: tuple[tuple[str, str, str | None], ...]

    def __str__(self) -> str:
        """One line: what, how much, why."""
        _, reason, remedy = self.refused[0]
        return f"{self.source} -> {self.target}: copied {self.copied_bytes:,} bytes because {reason}" + (f"; {remedy}" if remedy else "")


def _initial() -> tuple[str, list[Route]] | None:
    mode = os.environ.get("INTEROP_COPY_GUARD")
    if not mode:
        return None
    if mode not in _MODES:
        raise ValueError(f"INTEROP_COPY_GUARD={mode!r}: must be one of {', '.join(_MODES)}")
    return mode, []


#: The guards in force, innermost last. A context variable: threads and tasks have their own.
_guards: contextvars.ContextVar[tuple[tuple[str, list[Route]], ...]] = contextvars.ContextVar("interop_copy_guard", default=())
_process_guard = _initial()


@contextlib.contextmanager
def copy_guard(mode: str = "log", /) -> Iterator[list[Route]]:
    """See or forbid copies within the ``with`` block, also those made deep inside other libraries through interop.

    Args:
        mode: ``"allow"`` collects, ``"log"`` collects and logs to the logger ``interop``, ``"disallow"`` raises ExchangeError before a
            copy is made. The environment variable INTEROP_COPY_GUARD sets one for the whole program.

    Yields the list of `Route` s that copied. Guards nest; the strictest decides. A thread started inside has its own, empty, state.
    """
    if mode not in _MODES:
        raise ValueError(f"copy_guard mode {mode!r}: must be one of {', '.join(_MODES)}")
    routes: list[Route] = []
    token = _guards.set((*_guards.get(), (mode, routes)))
    try:
        yield routes
    finally:
        _guards.reset(token)


def note_copy(source: str, target: str, nbytes: int, reason: str, remedy: str | None) -> None:
    """A copy is about to be made. Called by the core."""
    guards = _guards.get()
    if _process_guard is not None:
        guards = (_process_guard, *guards)
    if not guards:
        return
    route = Route(source, target, ("copy",), nbytes, (("alias", reason, remedy),))
    if any(mode == "disallow" for mode, _ in guards):
        raise ExchangeError(f"copy_guard('disallow'): {route}")
    for mode, routes in guards:
        if routes is not (_process_guard or (None, None))[1]:       # the program-wide one only logs: it would grow for ever
            routes.append(route)
        if mode == "log":
            _log.warning("%s", route)


_core.set_note_copy(note_copy)
