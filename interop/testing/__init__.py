"""Tools to test an implementation of DLPack with: look inside capsules, and feed hostile ones.

* `Capsule` reads a capsule without consuming it; `Consumed` is what a consumer holds, with the duty to delete once.
* `Forged` makes managed tensors with any value in any field, and counts what the consumer did with the deleter.
* `Producer`, `producer_type`, `WithoutDevice`, `Forwarder`, `ArrayInterface`, `CudaArrayInterface` speak one protocol.
* `exchange_table` calls the slots of a type's C exchange table; `ForgedTable` builds one.
* `NativeCapsule`, `ForgedNative`, `NativeProducer` do the same for the side channel, ``__interop_native__``.

Pure ctypes and standard library. Nothing here imports an array library or any other part of `interop`, so it can judge
all of them. It is meant for tests, also of other libraries: it trusts pointers and loads no safety net.

    >>> forged = Forged((2, 3), flags=READ_ONLY)
    >>> Capsule(forged.capsule()).readonly, forged.deleted
    (True, 1)
"""

from .abi import (
    BFLOAT,
    BOOL,
    COMPLEX,
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    EXCHANGE_API,
    EXT_DEV,
    FLOAT,
    FLOAT4_E2M1FN,
    HOST_DEVICES,
    INT,
    IS_COPIED,
    LEGACY,
    METAL,
    ONEAPI,
    OPAQUE_HANDLE,
    OPENCL,
    READ_ONLY,
    ROCM,
    ROCM_HOST,
    SUBBYTE_PADDED,
    UINT,
    USED_LEGACY,
    USED_VERSIONED,
    VERSIONED,
    VULKAN,
    WEBGPU,
    DLDataType,
    DLDevice,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPackExchangeAPI,
    DLPackExchangeAPIHeader,
    DLPackVersion,
    DLTensor,
    Malformed,
    TensorFields,
)
from .capsule import Capsule, Consumed, ManagedTensor, Spent, compact_strides
from .exchange import AllocatorError, ContractBroken, ExchangeTable, ForgedTable, exchange_table
from .forged import Forged, settle, strays
from .native import (
    NATIVE,
    NATIVE_FLAGS,
    NATIVE_READY,
    NATIVE_VERSION,
    USED_NATIVE,
    ConsumedNative,
    ForgedNative,
    InteropNativeV1,
    NativeCapsule,
    NativeProducer,
    native_fields,
    native_layout,
)
from .producers import (
    ABSENT,
    ALL_KEYWORDS,
    ArrayInterface,
    CudaArrayInterface,
    Forwarder,
    Producer,
    WithoutDevice,
    producer_type,
)

__all__ = [
    "ABSENT", "ALL_KEYWORDS", "BFLOAT", "BOOL", "COMPLEX", "CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "EXCHANGE_API", "EXT_DEV",
    "FLOAT", "FLOAT4_E2M1FN", "HOST_DEVICES", "INT", "IS_COPIED", "LEGACY", "METAL", "NATIVE", "NATIVE_FLAGS", "NATIVE_READY",
    "NATIVE_VERSION", "ONEAPI", "OPAQUE_HANDLE", "OPENCL", "READ_ONLY", "ROCM", "ROCM_HOST", "SUBBYTE_PADDED", "UINT",
    "USED_LEGACY", "USED_NATIVE", "USED_VERSIONED", "VERSIONED", "VULKAN", "WEBGPU", "AllocatorError", "ArrayInterface",
    "Capsule", "Consumed", "ConsumedNative", "ContractBroken", "CudaArrayInterface", "DLDataType", "DLDevice", "DLManagedTensor",
    "DLManagedTensorVersioned", "DLPackExchangeAPI", "DLPackExchangeAPIHeader", "DLPackVersion", "DLTensor", "ExchangeTable",
    "Forged", "ForgedNative", "ForgedTable", "Forwarder", "InteropNativeV1", "Malformed", "ManagedTensor", "NativeCapsule",
    "NativeProducer", "Producer", "Spent", "TensorFields", "WithoutDevice", "compact_strides", "exchange_table", "native_fields",
    "native_layout", "producer_type", "settle", "strays",
]  # fmt: skip
