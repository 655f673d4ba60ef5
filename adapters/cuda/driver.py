"""The CUDA driver API as the other modules here call it: errors are exceptions, a device is current for the length of a block.

Through cuda-bindings, or any table with its functions (the tests have one). Nothing is loaded, and no context made, before the first
call. Knows no tensors and no streams of anybody's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

from interop.contract import DeviceLostError, ExchangeError

#: Errors after which the context is gone: nothing on it can be waited for (CUDA driver API, CUresult).
_LOST = frozenset("CUDA_ERROR_" + name for name in (
    "ASSERT", "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
    "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE", "NVLINK_UNCORRECTABLE"))


class CudaError(ExchangeError):
    """What the driver refused; `code` is its own name for it, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``."""

    code: str

    def __init__(self, reason: str = "", remedy: str | None = None, code: str = "") -> None:
        """Keep the code beside reason and remedy."""
        super().__init__(reason, remedy)
        self.code = code


_loaded: weakref.WeakSet[Driver] = weakref.WeakSet()


def _leave_behind() -> None:
    # In a forked child
    for driver in list(_loaded):
        driver._table, driver.forked = None, True


os.register_at_fork(after_in_child=_leave_behind)


class Driver:
    """One table of driver functions and the primary contexts of its devices.

    Attributes:
        cu: the table, loaded and initialised; also the place of its enums and structs.
        forked: whether this is a child of the process that loaded it, which owns none of its objects.
        ok: its CUDA_SUCCESS: the very object nearly always comes back, and comparing by identity is what costs nothing.
    """

    def __init__(self, table: Any = None) -> None:
        """`table`: what stands in for ``cuda.bindings.driver``; None: that, when it is first asked for."""
        self._given = table
        self._table: Any = None
        self.ok: Any = None
        self._contexts: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}      # of the same contexts: as an int each costs as much as a call
        self.forked = False

    @property
    def cu(self) -> Any:
        """The table. ExchangeError where there is no driver, or in a process forked after it was used."""
        if self._table is None:
            self._load()
        return self._table

    def _load(self) -> None:
        if self.forked:
            raise ExchangeError("CUDA was used before fork: a child process owns no driver object",
                                "start workers with the 'spawn' method")
        table = self._given
        if table is None:
            try:
                table = importlib.import_module("cuda.bindings.driver")
            except ImportError:
                raise ExchangeError("this takes the CUDA driver, and cuda-bindings is not installed", "pip install cuda-bindings") from None
        try:
            self.check(table.cuInit(0))         # as often as one likes
        except RuntimeError as e:               # cuda-bindings: there is no libcuda
            raise ExchangeError(f"no CUDA driver on this machine: {e}") from None
        self.ok = table.CUresult.CUDA_SUCCESS
        self._table = table
        _loaded.add(self)

    def available(self) -> bool:
        """Whether there is a driver with at least one device. Loads it."""
        try:
            return self.count() > 0
        except ExchangeError:
            return False

    def check(self, result: tuple[Any, ...]) -> Any:
        """What a call of the table returned, without its error code; CudaError or DeviceLostError where there is an error."""
        error = result[0]
        if error is not self.ok and int(error) != 0:
            self._raise(error)
        return result[1] if len(result) == 2 else result[1:]

    def _raise(self, error: Any) -> None:
        name = getattr(error, "name", str(error))
        if name in _LOST:
            raise DeviceLostError(f"CUDA driver: {name}; the device's context is unusable from here on")
        raise CudaError(f"CUDA driver: {name}", code=name)

    def count(self) -> int:
        """How many devices this process sees (CUDA_VISIBLE_DEVICES has been applied)."""
        return int(self.check(self.cu.cuDeviceGetCount()))

    def attribute(self, device: int, name: str) -> int:
        """``CU_DEVICE_ATTRIBUTE_<name>`` of a device."""
        cu = self.cu
        which = getattr(cu.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(self.check(cu.cuDeviceGetAttribute(which, self.handle(device))))

    def handle(self, device: int) -> Any:
        """The CUdevice of an ordinal; ExchangeError where there is none."""
        cu = self.cu
        if not 0 <= device < self.count():
            raise ExchangeError(f"cuda:{device}: this process sees {self.count()} CUDA devices")
        return self.check(cu.cuDeviceGet(device))

    def uuid(self, device: int) -> bytes:
        """16 bytes: which physical device it is, or which MIG instance of one (cuDeviceGetUuid_v2)."""
        cu = self.cu
        get = getattr(cu, "cuDeviceGetUuid_v2", None) or cu.cuDeviceGetUuid
        return bytes(self.check(get(self.handle(device))).bytes)[:16]

    def context(self, device: int) -> Any:
        """The primary context, which the frameworks use too. Retained once and kept: they may be gone before us."""
        found = self._contexts.get(device)
        if found is None:
            cu = self.cu
            # No lock: a destructor may come to this very line while it is held. Retaining once more than needed is only counted
            found = self._contexts.setdefault(device, self.check(cu.cuDevicePrimaryCtxRetain(self.handle(device))))
        return found

    @contextlib.contextmanager
    def using(self, device: int) -> Iterator[Any]:
        """Make the device's primary context current, and what was current before again, also after an error. Gives the table."""
        cu = self.cu
        entered = self.enter(device)
        try:
            yield cu
        finally:
            if entered:
                self.leave()

    def enter(self, device: int) -> bool | None:
        """Make the device current; True where `leave` has to follow, None where it is."""
        wanted = self._numbers.get(device)
        if wanted is None:
            wanted = self._numbers[device] = int(self.context(device))
        cu = self.cu
        if int(self.check(cu.cuCtxGetCurrent())) == wanted:
            return None
        self.check(cu.cuCtxPushCurrent(self._contexts[device]))
        return True

    def leave(self) -> None:
        """What was current before `enter` is so again."""
        self.cu.cuCtxPopCurrent()

    def relaxed(self) -> _Relaxed:
        """Calls that are forbidden while another thread captures a graph globally do not break that capture here.

        For what touches no stream that could be captured: allocation, registration, asking an event (CUDA driver API,
        cuThreadExchangeStreamCaptureMode).
        """
        return _Relaxed(self)


class _Relaxed:
    __slots__ = ("_before", "_driver")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        cu = self._driver.cu
        self._before = self._driver.check(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def __exit__(self, *exc: object) -> None:
        self._driver.cu.cuThreadExchangeStreamCaptureMode(self._before)
