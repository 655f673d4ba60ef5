"""What a CUDA pointer is, asked of the driver where nobody vouches for it: which memory, on which GPU, from which allocator."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from interop.contract import ExchangeError

from . import virtual
from .driver import CudaError, Driver

_CUDA, _CUDA_HOST, _CUDA_MANAGED = 2, 3, 13        # DLDeviceType


@dataclass(frozen=True)
class Pointer:
    """One address of CUDA's.

    Attributes:
        kind: ``"device"``, ``"pinned"`` (host memory that CUDA allocated or registered), ``"managed"``, ``"pool"`` (cudaMallocAsync) or
            ``"virtual"`` (cuMemMap).
        device: ordinal of the GPU that it belongs to; for pinned memory, the one whose context registered it.
        base, nbytes: the range that it lies in: the allocation, or for virtual memory the one mapping (a tensor may span several).
        exportable: whether the memory was made to be exported as a file descriptor.
    """

    kind: str
    device: int
    base: int
    nbytes: int
    exportable: bool = False

    @property
    def dl_type(self) -> int:
        """DLPack's device type for it."""
        return {"pinned": _CUDA_HOST, "managed": _CUDA_MANAGED}.get(self.kind, _CUDA)


_ATTRIBUTES = ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "RANGE_START_ADDR", "RANGE_SIZE", "MEMPOOL_HANDLE", "ALLOWED_HANDLE_TYPES")


def classify(driver: Driver, address: int) -> Pointer:
    """What memory an address is (cuPointerGetAttributes). ExchangeError where CUDA does not know it: plain host memory, or nobody's."""
    cu = driver.cu
    wanted = [getattr(cu.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + a) for a in _ATTRIBUTES]
    try:
        values: list[Any] = driver.check(cu.cuPointerGetAttributes(len(wanted), wanted, address))
    except CudaError as e:
        raise ExchangeError(f"address {address:#x} is not CUDA's: {e.reason}") from None
    kind, device, managed, base, size, pool, handles = values
    if not int(kind):
        raise ExchangeError(f"address {address:#x} is not known to CUDA: it is host memory that nobody registered, or nothing",
                            "device='cpu', if it is the host's")
    name = "device"
    exportable = False
    if managed:
        name = "managed"
    elif int(kind) == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST):
        name = "pinned"
    elif int(pool or 0):
        name = "pool"
    elif _is_virtual(driver, address):
        name = "virtual"
        with contextlib.suppress(CudaError):        # memory that nobody may access yet has none
            base, size = virtual.extent(driver, int(device), address)       # what was asked for is the whole reservation
        exportable = bool(int(handles or 0) & int(cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
    return Pointer(name, int(device), int(base or address), int(size or 0), exportable)


def _is_virtual(driver: Driver, address: int) -> bool:
    """Whether cuMemMap put it there: its handle can be retained, which no other memory has (measured.md G)."""
    cu = driver.cu
    error, handle = cu.cuMemRetainAllocationHandle(address)
    if int(error):
        return False
    cu.cuMemRelease(handle)
    return True
