"""Device memory that can leave as a file descriptor: one physical chunk, mapped at one range of addresses (cuMemCreate, cuMemMap).

Knows chunks and mappings only: not who asks for them, nor what is made of them (CUDA driver API, virtual memory management).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from interop.contract import DeviceLostError, ExchangeError

from .driver import Driver


class Mapping:
    """One chunk of a GPU's memory at its addresses. Whoever holds it closes it, once all work on it is done.

    Attributes:
        device: ordinal of the GPU that it belongs to; only that GPU has access.
        address, nbytes: where it is mapped; a whole number of the device's granules.
    """

    __slots__ = ("_driver", "address", "device", "nbytes")

    def __init__(self, driver: Driver, device: int, address: int, nbytes: int) -> None:
        """Takes the range over."""
        self._driver: Driver | None = driver
        self.device, self.address, self.nbytes = device, address, nbytes

    def close(self) -> None:
        """Unmap it; the memory goes with the last descriptor and mapping of it. Idempotent; nothing on a lost device."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        with contextlib.suppress(DeviceLostError), driver.using(self.device) as cu, driver.relaxed():
            unmapped = cu.cuMemUnmap(self.address, self.nbytes)
            freed = cu.cuMemAddressFree(self.address, self.nbytes)
            driver.check(unmapped)
            driver.check(freed)


def granule(driver: Driver, device: int) -> int:
    """What the size of a chunk on a device must be a multiple of, in bytes (cuMemGetAllocationGranularity; 2 MiB on today's GPUs)."""
    cu = driver.cu
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(driver.check(cu.cuMemGetAllocationGranularity(_properties(cu, device), least)))


def create(driver: Driver, device: int, nbytes: int, alignment: int = 1) -> Mapping:
    """At least `nbytes` of new memory, whose address is a multiple of `alignment` (a power of two). CudaError; then nothing is left."""
    step = granule(driver, device)
    size = -(-nbytes // step) * step
    with driver.using(device) as cu, driver.relaxed():
        chunk = driver.check(cu.cuMemCreate(size, _properties(cu, device), 0))
        try:
            return _map(driver, device, chunk, size, max(alignment, step))
        finally:
            cu.cuMemRelease(chunk)          # the mapping keeps the memory


def extent(driver: Driver, device: int, address: int) -> tuple[int, int]:
    """``(base, nbytes)`` of the one mapping around an address. The pointer's own range is that of the reservation, which may hold many."""
    with driver.using(device) as cu:
        base, size = driver.check(cu.cuMemGetAddressRange(address))
    return int(base), int(size)


def export_fd(driver: Driver, device: int, address: int) -> int:
    """A descriptor, close-on-exec and the caller's, of the chunk that `address` lies in. CudaError where it was not made for that."""
    with driver.using(device) as cu, driver.relaxed():
        chunk = driver.check(cu.cuMemRetainAllocationHandle(address))
        try:
            fd = int(driver.check(cu.cuMemExportToShareableHandle(chunk, _posix(cu), 0)))
        finally:
            cu.cuMemRelease(chunk)
    os.set_inheritable(fd, False)
    return fd


def import_fd(driver: Driver, device: int, fd: int, nbytes: int) -> Mapping:
    """The chunk of `nbytes` behind a descriptor of cuMemExportToShareableHandle. The descriptor stays the caller's.

    CudaError where the driver refuses it: another API's memory, another size. ExchangeError where it is another GPU's.
    """
    with driver.using(device) as cu, driver.relaxed():
        chunk = driver.check(cu.cuMemImportFromShareableHandle(fd, _posix(cu)))
        try:
            where = driver.check(cu.cuMemGetAllocationPropertiesFromHandle(chunk)).location
            if int(where.type) == int(cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE) and int(where.id) != device:
                raise ExchangeError(f"the memory behind descriptor {fd} is on cuda:{int(where.id)}, not on cuda:{device}")
            return _map(driver, device, chunk, nbytes, 0)
        finally:
            cu.cuMemRelease(chunk)


def _map(driver: Driver, device: int, chunk: Any, size: int, alignment: int) -> Mapping:
    cu = driver.cu
    with contextlib.ExitStack() as undo:
        address = int(driver.check(cu.cuMemAddressReserve(size, alignment, 0, 0)))
        undo.callback(cu.cuMemAddressFree, address, size)
        driver.check(cu.cuMemMap(address, size, 0, chunk, 0))
        undo.callback(cu.cuMemUnmap, address, size)
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.check(cu.cuMemSetAccess(address, size, [access], 1))
        undo.pop_all()
    return Mapping(driver, device, address, size)


def _properties(cu: Any, device: int) -> Any:
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = _posix(cu)
    return wanted


def _posix(cu: Any) -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
