"""What the tests of the memory model need: the toy driver checked afterwards, descriptors counted, pages looked at, fresh interpreters."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import toy

import interop
from interop import _core

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@contextlib.contextmanager
def clean_toy() -> Iterator[toy.Driver]:
    """The toy's driver, counting from zero; afterwards nothing leaked there, no descriptor did, and the ledger is as empty as before."""
    gc.collect()
    toy.driver.reset()
    before, entries, handles = fds(), _core.ledger_size(), toy.driver.handles
    yield toy.driver
    gc.collect()
    _core.release_ready()
    # interop's own threads may be at it: a release of theirs is on time within two seconds
    until(lambda: toy.driver.handles <= handles and fds() <= before and _core.ledger_size() <= entries, 2)
    toy.driver.check(handles)
    assert fds() <= before, f"{fds() - before} descriptors leaked"
    assert _core.ledger_size() <= entries, f"{_core.ledger_size()} ledger entries left"


def fds() -> int:
    """How many descriptors are open."""
    return len(os.listdir("/proc/self/fd"))


def readable(address: int) -> bool:
    """Whether the page at an address is mapped and readable; asking does not touch it."""
    with open("/proc/self/maps") as f:
        for line in f:
            where, mode = line.split()[:2]
            lo, hi = (int(x, 16) for x in where.split("-"))
            if lo <= address < hi:
                return mode[0] == "r"
    return False


def until(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.002)
    return bool(condition())


# The eventfd of the thread that releases is opened once, for good: before anybody counts descriptors
interop.wrap(1, 0, device="cpu", owner=None, on_release=int).close()

PRELUDE = """
import gc, os, signal, sys, threading, time
import numpy as np
import interop
import toy
"""


def run(code: str, *, seconds: float = 30, path: Any = (), prelude: str = PRELUDE, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees this checkout, the tests and the folders in `path`."""
    where = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *map(str, path)])
    quiet = ("-W", "ignore:This process:DeprecationWarning")     # Python 3.12 on fork beside threads: what these tests are about
    return subprocess.run([sys.executable, *quiet, "-c", prelude + code], cwd=ROOT, env={**os.environ, "PYTHONPATH": where, **env},
                          capture_output=True, text=True, timeout=seconds, check=False)


def prints(code: str, expected: str, **options: Any) -> None:
    """The code ends with exit code 0, without a word on stderr, having printed this."""
    done = run(code, **options)
    seen = (done.returncode, done.stdout.strip(), done.stderr[-1500:])
    assert seen == (0, expected, ""), f"exit code {seen[0]}, printed {seen[1]!r}, not {expected!r}\n{seen[2]}"
