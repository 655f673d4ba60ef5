# The struct of the side channel for Cython, declared from include/interop_native.h, which says what each field means.
# Knows nothing of Python objects. A test compares its layout with the C header's and with the one in interop.testing.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef enum:
    INTEROP_NATIVE_MAJOR = 1
    INTEROP_NATIVE_MINOR = 0
    INTEROP_NATIVE_V1_SIZE = 264

cdef enum:                       # flags
    INTEROP_NATIVE_READ_ONLY = 1
    INTEROP_NATIVE_HOST_VISIBLE = 2
    INTEROP_NATIVE_COHERENT = 4
    INTEROP_NATIVE_CACHED = 8
    INTEROP_NATIVE_DEDICATED = 16
    INTEROP_NATIVE_HANDLE_IS_POINTER = 32
    INTEROP_NATIVE_PARTIAL = 64
    INTEROP_NATIVE_HAS_DEVICE_UUID = 128
    INTEROP_NATIVE_HAS_DRIVER_UUID = 256

cdef enum:                       # ready_kind
    INTEROP_NATIVE_READY = 0
    INTEROP_NATIVE_HOST_WAIT = 1
    INTEROP_NATIVE_TIMELINE = 2
    INTEROP_NATIVE_CL_EVENT = 3
    INTEROP_NATIVE_CUDA_EVENT = 4
    INTEROP_NATIVE_BY_STREAM = 5

cdef enum:                       # what wait returns
    INTEROP_NATIVE_WAIT_DONE = 0
    INTEROP_NATIVE_WAIT_TIMEOUT = 1
    INTEROP_NATIVE_WAIT_FAILED = -1
    INTEROP_NATIVE_WAIT_INTERRUPTED = -2


cdef struct InteropNativeVersion:
    uint32_t major
    uint32_t minor

cdef struct InteropNativeV1:
    InteropNativeVersion version
    uint64_t struct_size
    void* owner
    void (*deleter)(InteropNativeV1*) noexcept nogil
    int32_t device_type
    int32_t device_id
    uint64_t flags
    uint64_t handle
    uint64_t nbytes
    uint64_t memory
    uint64_t memory_nbytes
    uint64_t memory_offset
    int32_t memory_type
    uint32_t queue_family
    uint64_t context
    uint64_t physical_device
    uint64_t instance
    uint64_t queue
    uint8_t[16] device_uuid
    uint8_t[16] driver_uuid
    uint32_t ready_kind
    uint32_t ready_padding
    uint64_t ready_handle
    uint64_t ready_value
    int (*wait)(void*, int64_t) noexcept nogil
    void* wait_ctx
    uint64_t[8] reserved
