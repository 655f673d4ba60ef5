"""Host memory that GPUs can use: which ranges are registered with CUDA, for how many users, and under which address a GPU sees them.

CUDA registers a byte once and unregisters exactly the range that was registered (cuMemHostRegister), while requests overlap as they
like: so each range is counted. Ranges are not rounded to pages: CUDA refuses copies that begin in a registration and run past its end
(measured on driver 580), and so a neighbour in the same page would not be copied any more, by anybody. For the same reason memory should
be registered whole, before parts of it: what is registered piece by piece can be used by kernels, but copied by pieces only.
Knows addresses only, no tensors and nobody's handles.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import os
import threading
from dataclasses import dataclass
from typing import Any

from interop.contract import DeviceLostError, ExchangeError

from . import pointers
from .driver import CudaError, Driver

_MEMORY = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")       # mappings with these names are memory, not files


@dataclass(slots=True)
class _Range:
    """Bytes as they were registered, and how many Registrations lie in them."""

    start: int
    end: int
    device: int
    users: int = 0


class Registration:
    """One user's share of registered memory.

    Attributes:
        pointer: the device address of the first byte asked for; the bytes are contiguous from there.
    """

    __slots__ = ("_pages", "_ranges", "pointer")

    def __init__(self, pages: Pages, ranges: tuple[_Range, ...], pointer: int) -> None:
        """Counted already."""
        self._pages, self._ranges, self.pointer = pages, ranges, pointer

    def close(self) -> None:
        """Let the memory go; what nobody else uses is unregistered. Idempotent, from any thread, also from within a destructor."""
        ranges, self._ranges = self._ranges, ()
        if ranges:
            self._pages._leave(ranges)


class Pages:
    """All host memory that this process has registered through one driver."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is registered yet."""
        self._driver = driver
        self._ranges: list[_Range] = []         # by address; they do not overlap
        self._lock = threading.Lock()
        self._left: collections.deque[tuple[_Range, ...]] = collections.deque()
        self._pid = 0           # of the process that registers

    def __len__(self) -> int:
        """How many ranges are registered."""
        return len(self._ranges)

    def register(self, device: int, address: int, nbytes: int) -> Registration:
        """Make `nbytes` of host memory at `address` usable by a GPU, in place.

        What is registered here is counted, what another library registered is used as it is: it must leave it so for as long as it is in
        use. Raises ExchangeError where CUDA cannot take the memory; nothing is registered then that was not before.
        """
        if not address or nbytes <= 0 or address + nbytes > 2**64:
            raise ExchangeError(f"{nbytes} bytes at {address:#x} are no range of host memory")
        with self._driver.using(device) as cu, self._driver.relaxed():
            try:
                with self._lock:
                    self._pid = os.getpid()
                    return self._register(cu, device, address, address + nbytes)
            finally:
                self._settle()

    def _register(self, cu: Any, device: int, low: int, high: int) -> Registration:
        at = bisect.bisect_right(self._ranges, low, key=lambda r: r.start)
        if at and self._ranges[at - 1].end > low:
            at -= 1
        stop = bisect.bisect_left(self._ranges, high, key=lambda r: r.start)
        known = self._ranges[at:stop]
        made: list[_Range] = []
        try:
            for start, until in _gaps(known, low, high):
                new = self._pin(cu, device, start, until)
                if new is not None:
                    made.append(new)
            used = sorted([*known, *made], key=lambda r: r.start)
            pointer = self._pointer(cu, low, [max(r.start, low) for r in used])
        except BaseException:
            for r in reversed(made):
                cu.cuMemHostUnregister(r.start)
            raise
        self._ranges[at:stop] = used
        for r in used:
            r.users += 1
        return Registration(self, tuple(used), pointer)

    def _pin(self, cu: Any, device: int, start: int, until: int) -> _Range | None:
        """Register a gap; None where another library has done so, for all of it."""
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            self._driver.check(cu.cuMemHostRegister(start, until - start, flags))
        except CudaError as e:
            if self._pinned(start, until):
                return None
            raise self._refusal(e, start, until) from None
        return _Range(start, until, device)

    def _pinned(self, address: int, end: int) -> bool:
        """Whether CUDA knows all these bytes as host memory."""
        while address < end:
            try:
                there = pointers.classify(self._driver, address)
            except ExchangeError:
                return False
            if there.kind != "pinned" or there.base + there.nbytes <= address:
                return False
            address = there.base + there.nbytes
        return True

    def _pointer(self, cu: Any, first: int, starts: list[int]) -> int:
        """The device address of `first`, where all ranges are as far from their host addresses."""
        shifts = {int(self._driver.check(cu.cuMemHostGetDevicePointer(s, 0))) - s for s in {first, *starts}}
        if len(shifts) > 1:
            raise ExchangeError(f"the memory from {first:#x} on was registered piece by piece, and the device sees the pieces apart",
                                "register all of the memory before parts of it")
        return first + shifts.pop()

    def _refusal(self, e: CudaError, start: int, until: int) -> ExchangeError:
        what = f"host memory {start:#x} to {until:#x} cannot be registered with CUDA"
        if e.code == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED":
            return ExchangeError(f"{what}: another library has registered a part of it",
                                 "let it register all of the memory or none of it")
        with contextlib.suppress(ExchangeError):
            there = pointers.classify(self._driver, start)
            if there.kind != "pinned":
                return ExchangeError(f"{what}: it is {there.kind} memory of cuda:{there.device}", f"device='cuda:{there.device}'")
        reason, remedy = _obstacle(start, until)
        return ExchangeError(f"{what}: {reason or e.code}", remedy)

    # ---- letting go ----
    def _leave(self, ranges: tuple[_Range, ...]) -> None:
        if os.getpid() != self._pid:
            return                          # a forked child: the registration is the parent's
        self._left.append(ranges)
        errors = self._settle()
        if errors:
            raise errors[0]

    def _settle(self) -> list[ExchangeError]:
        """Count those who left. Never waits: a destructor may run in the thread that holds the lock, which does this on its way out."""
        errors: list[ExchangeError] = []
        while self._left and self._lock.acquire(blocking=False):
            try:
                errors += [e for e in map(self._count_down, self._taken()) if e is not None]
            finally:
                self._lock.release()
        return errors

    def _taken(self) -> list[_Range]:
        taken: list[_Range] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.extend(self._left.popleft())
        return taken

    def _count_down(self, r: _Range) -> ExchangeError | None:
        r.users -= 1
        if r.users:
            return None
        self._ranges.remove(r)
        try:
            with self._driver.using(r.device) as cu, self._driver.relaxed():
                self._driver.check(cu.cuMemHostUnregister(r.start))
        except DeviceLostError:
            return None
        except ExchangeError as e:
            return e
        return None


def _gaps(known: list[_Range], low: int, high: int) -> list[tuple[int, int]]:
    """What from `low` to `high` lies in none of the ranges."""
    gaps = []
    for r in known:
        if r.start > low:
            gaps.append((low, r.start))
        low = max(low, r.end)
    if low < high:
        gaps.append((low, high))
    return gaps


def _obstacle(start: int, until: int) -> tuple[str, str | None]:
    """What the kernel says of pages that could not be registered: ``(reason, remedy)``, an empty reason where nothing is odd."""
    odd: tuple[str, str] | None = None
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, _, *path = line.split(maxsplit=5)
            low, high = (int(x, 16) for x in span.split("-"))
            if high <= start:
                continue
            if low > start:
                break
            if "w" not in access:
                return f"{start:#x} is mapped read-only", "map it writable, or copy: interop.copyto(...)"
            name = path[0].strip() if path else ""
            if name.startswith("/") and not name.startswith(_MEMORY):
                odd = odd or (f"{max(start, low):#x} is a mapping of {name}, which CUDA does not pin",
                              "read it into memory, or share a memfd: interop.empty(..., shared_with=['process'])")
            start = high
            if start >= until:
                return odd or ("", "ulimit -l says how much memory may be locked")
    return f"nothing is mapped at {start:#x}", "give the range that the memory really has"
