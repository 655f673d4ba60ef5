"""The end of the process: queued work is waited for, briefly, and what waited for it is released in order. Nothing else happens here."""

from __future__ import annotations

import atexit
import time

from . import _core

#: Seconds that the end of the process waits for queued work; what is still in use then leaks on purpose.
EXIT_TIMEOUT = 2.0


def at_exit() -> None:
    """Wait for what is queued, at most `EXIT_TIMEOUT`, and release it. Does nothing in a forked child: the work is its parent's."""
    if _core.generation():
        return
    _core.drain()
    end = time.monotonic() + EXIT_TIMEOUT
    while _core.release_ready() and time.monotonic() < end:
        time.sleep(0.005)
    _core.drain()


def install() -> None:
    """Once, at import."""
    atexit.register(at_exit)
