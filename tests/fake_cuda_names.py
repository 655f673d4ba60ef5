"""Names of the CUDA driver API as cuda-bindings spells them: enums with their real values, structs that are bags of attributes, handles.

What the fake and the adapter use and no more. `test_fake_cuda` compares all of it with cuda-bindings where that is installed.
"""

from __future__ import annotations

import enum
from typing import Any


def _enum(name: str, prefix: str, **values: int) -> Any:
    return enum.IntEnum(name, {prefix + k: v for k, v in values.items()}, module=__name__)


CUresult = _enum(
    "CUresult", "CUDA_", SUCCESS=0, ERROR_INVALID_VALUE=1, ERROR_OUT_OF_MEMORY=2, ERROR_NOT_INITIALIZED=3, ERROR_DEVICE_UNAVAILABLE=46,
    ERROR_NO_DEVICE=100, ERROR_INVALID_DEVICE=101, ERROR_INVALID_IMAGE=200, ERROR_INVALID_CONTEXT=201, ERROR_MAP_FAILED=205,
    ERROR_ALREADY_MAPPED=208, ERROR_NO_BINARY_FOR_GPU=209, ERROR_NOT_MAPPED=211, ERROR_ECC_UNCORRECTABLE=214,
    ERROR_PEER_ACCESS_UNSUPPORTED=217, ERROR_INVALID_PTX=218, ERROR_NVLINK_UNCORRECTABLE=220, ERROR_UNSUPPORTED_PTX_VERSION=222,
    ERROR_OPERATING_SYSTEM=304, ERROR_INVALID_HANDLE=400, ERROR_NOT_FOUND=500, ERROR_NOT_READY=600, ERROR_ILLEGAL_ADDRESS=700,
    ERROR_LAUNCH_OUT_OF_RESOURCES=701, ERROR_LAUNCH_TIMEOUT=702, ERROR_PEER_ACCESS_ALREADY_ENABLED=704, ERROR_CONTEXT_IS_DESTROYED=709,
    ERROR_ASSERT=710, ERROR_HOST_MEMORY_ALREADY_REGISTERED=712, ERROR_HOST_MEMORY_NOT_REGISTERED=713, ERROR_HARDWARE_STACK_ERROR=714,
    ERROR_ILLEGAL_INSTRUCTION=715, ERROR_MISALIGNED_ADDRESS=716, ERROR_INVALID_ADDRESS_SPACE=717, ERROR_INVALID_PC=718,
    ERROR_LAUNCH_FAILED=719, ERROR_NOT_PERMITTED=800, ERROR_NOT_SUPPORTED=801, ERROR_SYSTEM_NOT_READY=802,
    ERROR_STREAM_CAPTURE_UNSUPPORTED=900, ERROR_STREAM_CAPTURE_INVALIDATED=901, ERROR_STREAM_CAPTURE_ISOLATION=905,
    ERROR_STREAM_CAPTURE_IMPLICIT=906, ERROR_CAPTURED_EVENT=907, ERROR_STREAM_CAPTURE_WRONG_THREAD=908, ERROR_UNKNOWN=999,
)
CUdevice_attribute = _enum(
    "CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_", MAX_THREADS_PER_BLOCK=1, MAX_GRID_DIM_X=5, MAX_GRID_DIM_Y=6, MAX_GRID_DIM_Z=7,
    WARP_SIZE=10, MAX_PITCH=11, MULTIPROCESSOR_COUNT=16, INTEGRATED=18, CAN_MAP_HOST_MEMORY=19, PCI_BUS_ID=33, PCI_DEVICE_ID=34,
    UNIFIED_ADDRESSING=41, PCI_DOMAIN_ID=50, COMPUTE_CAPABILITY_MAJOR=75, COMPUTE_CAPABILITY_MINOR=76, MANAGED_MEMORY=83,
    PAGEABLE_MEMORY_ACCESS=88, CONCURRENT_MANAGED_ACCESS=89, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM=91,
    HOST_REGISTER_SUPPORTED=99, PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES=100, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST=101,
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103, GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=110,
    READ_ONLY_HOST_REGISTER_SUPPORTED=113, MEMORY_POOLS_SUPPORTED=115, MEMPOOL_SUPPORTED_HANDLE_TYPES=119, DMA_BUF_SUPPORTED=124,
)
#: What each fake device answers; those that are left out are 0.
ATTRIBUTES = {
    1: 1024, 5: 2**31 - 1, 6: 65535, 7: 65535, 10: 32, 11: 2**31 - 1, 16: 132, 19: 1, 41: 1, 75: 9, 83: 1, 89: 1, 91: 1, 99: 1, 102: 1,
    103: 1, 110: 1, 113: 1, 115: 1, 119: 1, 124: 1,
}  # fmt: skip
CUpointer_attribute = _enum(
    "CUpointer_attribute", "CU_POINTER_ATTRIBUTE_", CONTEXT=1, MEMORY_TYPE=2, DEVICE_POINTER=3, HOST_POINTER=4, IS_MANAGED=8,
    DEVICE_ORDINAL=9, RANGE_START_ADDR=11, RANGE_SIZE=12, MAPPED=13, ALLOWED_HANDLE_TYPES=14, MEMPOOL_HANDLE=17,
)
CUmemorytype = _enum("CUmemorytype", "CU_MEMORYTYPE_", HOST=1, DEVICE=2, ARRAY=3, UNIFIED=4)
CUstream_flags = _enum("CUstream_flags", "CU_STREAM_", DEFAULT=0, NON_BLOCKING=1)
CUevent_flags = _enum("CUevent_flags", "CU_EVENT_", DEFAULT=0, BLOCKING_SYNC=1, DISABLE_TIMING=2, INTERPROCESS=4)
CUstreamCaptureMode = _enum("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_", GLOBAL=0, THREAD_LOCAL=1, RELAXED=2)
CUstreamCaptureStatus = _enum("CUstreamCaptureStatus", "CU_STREAM_CAPTURE_STATUS_", NONE=0, ACTIVE=1, INVALIDATED=2)
CUmemAllocationHandleType = _enum("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_", NONE=0, POSIX_FILE_DESCRIPTOR=1, WIN32=2, FABRIC=8)
CUmemLocationType = _enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_", INVALID=0, DEVICE=1, HOST=2, HOST_NUMA=3)
CUmemAllocationType = _enum("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_", INVALID=0, PINNED=1, MANAGED=2)
CUmemAccess_flags = _enum("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_", NONE=0, READ=1, READWRITE=3)
CUmemAllocationGranularity_flags = _enum("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_", MINIMUM=0, RECOMMENDED=1)
CUmemAttach_flags = _enum("CUmemAttach_flags", "CU_MEM_ATTACH_", GLOBAL=1, HOST=2, SINGLE=4)
CUexternalMemoryHandleType = _enum("CUexternalMemoryHandleType", "CU_EXTERNAL_MEMORY_HANDLE_TYPE_", OPAQUE_FD=1, DMABUF_FD=9)

CONSTANTS = {
    "CU_MEMHOSTALLOC_PORTABLE": 1, "CU_MEMHOSTALLOC_DEVICEMAP": 2, "CU_MEMHOSTALLOC_WRITECOMBINED": 4, "CU_MEMHOSTREGISTER_PORTABLE": 1,
    "CU_MEMHOSTREGISTER_DEVICEMAP": 2, "CU_MEMHOSTREGISTER_IOMEMORY": 4, "CU_MEMHOSTREGISTER_READ_ONLY": 8, "CU_STREAM_LEGACY": 1,
    "CU_STREAM_PER_THREAD": 2, "CUDA_EXTERNAL_MEMORY_DEDICATED": 1,
}  # fmt: skip
ENUMS = {name: value for name, value in list(globals().items()) if isinstance(value, enum.EnumMeta)}


class Pointer:
    """A CUdeviceptr, CUdevice or generic allocation handle: has int(), is no index and equals no int, as in cuda-bindings."""

    __slots__ = ("value",)

    def __init__(self, value: Any = 0) -> None:
        self.value = int(value)

    def __int__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value   # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.value))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.value:#x}>"


class Handle(Pointer):
    """A CUstream, CUevent, CUcontext and the like: also an index, so that f"{stream:#x}" is fine of int(stream) alone."""

    __slots__ = ()

    def __index__(self) -> int:
        return self.value


class _Bag:
    """A struct: the attributes of the real one, which alone can be set."""

    _fields: tuple[str, ...] = ()

    def __init__(self) -> None:
        for f in self._fields:
            object.__setattr__(self, f, _NESTED[f]() if f in _NESTED else 0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        object.__setattr__(self, name, value)


def _struct(name: str, fields: str) -> Any:
    return type(name, (_Bag,), {"_fields": tuple(fields.split())})


_ends = "{0}XInBytes {0}Y {0}MemoryType {0}Host {0}Device {0}Array {0}Pitch"
_deep = _ends + " {0}Z {0}LOD {0}Height"
CUmemLocation = _struct("CUmemLocation", "type id")
CUmemAllocationProp = _struct("CUmemAllocationProp", "type requestedHandleTypes location win32HandleMetaData allocFlags")
CUmemAccessDesc = _struct("CUmemAccessDesc", "location flags")
CUDA_MEMCPY2D = _struct("CUDA_MEMCPY2D", f"{_ends.format('src')} {_ends.format('dst')} WidthInBytes Height")
CUDA_MEMCPY3D = _struct("CUDA_MEMCPY3D", f"{_deep.format('src')} {_deep.format('dst')} WidthInBytes Height Depth")
CUDA_MEMCPY3D_PEER = _struct("CUDA_MEMCPY3D_PEER",
                             f"{_deep.format('src')} srcContext {_deep.format('dst')} dstContext WidthInBytes Height Depth")
CUDA_EXTERNAL_MEMORY_HANDLE_DESC = _struct("CUDA_EXTERNAL_MEMORY_HANDLE_DESC", "type handle size flags")
CUDA_EXTERNAL_MEMORY_BUFFER_DESC = _struct("CUDA_EXTERNAL_MEMORY_BUFFER_DESC", "offset size flags")
_NESTED = {"location": CUmemLocation, "handle": _struct("handle", "fd win32 nvSciBufObject"),
           "allocFlags": _struct("allocFlags", "compressionType gpuDirectRDMACapable usage reserved")}
STRUCTS = {name: value for name, value in list(globals().items()) if isinstance(value, type) and value.__base__ is _Bag}
