# The DLPack 1.3 binary interface, declared once from the facts of its header (struct order, offsets, numbers).
# Knows nothing of Python objects: C and Cython authors may cimport it on its own.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_MINOR = 3

cdef enum:                       # DLDeviceType; 5 and 6 are unassigned
    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3
    kDLOpenCL = 4
    kDLVulkan = 7
    kDLMetal = 8
    kDLVPI = 9
    kDLROCM = 10
    kDLROCMHost = 11
    kDLExtDev = 12
    kDLCUDAManaged = 13
    kDLOneAPI = 14
    kDLWebGPU = 15
    kDLHexagon = 16
    kDLMAIA = 17
    kDLTrn = 18

cdef enum:                       # DLDataTypeCode
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLOpaqueHandle = 3
    kDLBfloat = 4
    kDLComplex = 5
    kDLBool = 6
    kDLFloat8_e3m4 = 7
    kDLFloat8_e8m0fnu = 14
    kDLFloat6_e2m3fn = 15
    kDLFloat6_e3m2fn = 16
    kDLFloat4_e2m1fn = 17

cdef enum:                       # DLManagedTensorVersioned.flags
    DL_READ_ONLY = 1
    DL_IS_COPIED = 2
    DL_SUBBYTE_PADDED = 4


cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void* manager_ctx
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor dl_tensor


ctypedef void (*DLSetError)(void* error_ctx, const char* kind, const char* message) noexcept nogil

cdef struct DLPackExchangeAPIHeader:
    DLPackVersion version
    DLPackExchangeAPIHeader* prev_api

cdef struct DLPackExchangeAPI:
    DLPackExchangeAPIHeader header
    int (*managed_tensor_allocator)(DLTensor*, DLManagedTensorVersioned**, void*, DLSetError) noexcept nogil
    int (*managed_tensor_from_py_object_no_sync)(void*, DLManagedTensorVersioned**) noexcept
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned*, void**) noexcept
    int (*dltensor_from_py_object_no_sync)(void*, DLTensor*) noexcept
    int (*current_work_stream)(int32_t, int32_t, void**) noexcept
