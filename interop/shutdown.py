"""Where and when things are released: a thread for what cannot be released where it is, and the end of the process.

Queued work is then waited for, briefly, and what waited for it is released in order.
"""

from __future__ import annotations

import atexit
import os
import threading
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


def start_releasing() -> int:
    """Start the thread that gives back what drivers' callbacks and foreign threads retired; returns the eventfd that wakes it."""
    fd = os.eventfd(0, os.EFD_CLOEXEC)

    def run() -> None:
        while True:
            os.read(fd, 8)
            _core.drain()

    threading.Thread(target=run, name="interop-release", daemon=True).start()
    return fd


def install() -> None:
    """Once, at import."""
    _core.set_release_thread(start_releasing)
    atexit.register(at_exit)
