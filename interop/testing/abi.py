"""The DLPack 1.3 ABI as ctypes, and the few functions of the C API that deal with capsules.

For the inspector and the forger in this package only. It must not know NumPy, any other array library, or the rest of
`interop`: it is the second, independent statement of the ABI that the core is tested against, so sharing a declaration
with the core would let one mistake hide in both.

Field order, types and values are facts of the DLPack header (``dlpack/dlpack.h``, version 1.3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypedDict

MAJOR, MINOR = 1, 3

# Device types (``DLDeviceType``). 5 and 6 were never assigned.
CPU, CUDA, CUDA_HOST, OPENCL = 1, 2, 3, 4
VULKAN, METAL, VPI, ROCM, ROCM_HOST, EXT_DEV, CUDA_MANAGED, ONEAPI, WEBGPU, HEXAGON, MAIA, TRN = range(7, 19)
DEVICE_NAMES = {
    CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cuda_host", OPENCL: "opencl", VULKAN: "vulkan", METAL: "metal", VPI: "vpi",
    ROCM: "rocm", ROCM_HOST: "rocm_host", EXT_DEV: "ext_dev", CUDA_MANAGED: "cuda_managed", ONEAPI: "oneapi",
    WEBGPU: "webgpu", HEXAGON: "hexagon", MAIA: "maia", TRN: "trn",
}  # fmt: skip
#: Device types whose ``data`` is an address that the host may dereference.
HOST_DEVICES = frozenset({CPU, CUDA_HOST, ROCM_HOST, CUDA_MANAGED})

# Type codes (``DLDataTypeCode``).
INT, UINT, FLOAT, OPAQUE_HANDLE, BFLOAT, COMPLEX, BOOL = range(7)
(
    FLOAT8_E3M4, FLOAT8_E4M3, FLOAT8_E4M3B11FNUZ, FLOAT8_E4M3FN, FLOAT8_E4M3FNUZ, FLOAT8_E5M2, FLOAT8_E5M2FNUZ,
    FLOAT8_E8M0FNU, FLOAT6_E2M3FN, FLOAT6_E3M2FN, FLOAT4_E2M1FN,
) = range(7, 18)  # fmt: skip
CODE_NAMES = (
    "int", "uint", "float", "handle", "bfloat", "complex", "bool", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn",
)  # fmt: skip

# Flags of a versioned tensor (``DLPACK_FLAG_BITMASK_*``).
READ_ONLY, IS_COPIED, SUBBYTE_PADDED = 1 << 0, 1 << 1, 1 << 2
FLAG_NAMES = {READ_ONLY: "READ_ONLY", IS_COPIED: "IS_COPIED", SUBBYTE_PADDED: "SUBBYTE_PADDED"}

# Capsule names. Consumers compare them by content.
LEGACY, VERSIONED = "dltensor", "dltensor_versioned"
USED_LEGACY, USED_VERSIONED = "used_dltensor", "used_dltensor_versioned"
EXCHANGE_API = "dlpack_exchange_api"
EXCHANGE_ATTRIBUTE = "__dlpack_c_exchange_api__"


class DLPackVersion(ctypes.Structure):
    """Version of the ABI a struct was written for."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class DLDevice(ctypes.Structure):
    """Device type and number. The type is a C enum of 32 bits."""

    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    """Type code, bits of one lane, lanes."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    """The tensor itself. Strides count elements; ``shape`` and ``strides`` are raw addresses so that NULL shows."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    """What a ``dltensor`` capsule points to."""

    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """What a ``dltensor_versioned`` capsule points to. Only what comes before ``dl_tensor`` stays put across majors."""

    _fields_ = [
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


class DLPackExchangeAPIHeader(ctypes.Structure):
    """Head of the exchange table: all that may be read while the major version is unknown."""

    _fields_ = [("version", DLPackVersion), ("prev_api", ctypes.c_void_p)]


class DLPackExchangeAPI(ctypes.Structure):
    """The exchange table; slots are raw addresses here so that NULL shows."""

    _fields_ = [
        ("header", DLPackExchangeAPIHeader),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    ]


class TensorFields(TypedDict):
    """Every field of a DLTensor, copied out; NULL pointers read as 0 (data) or None (shape, strides)."""

    data: int
    device: tuple[int, int]
    dtype: tuple[int, int, int]
    ndim: int
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    byte_offset: int


class Malformed(ValueError):
    """The metadata cannot be read safely or means nothing (NULL shape, negative or absurd ndim, unknown major...)."""


# More dimensions than any producer has; an inspector that believed a forged ndim would read stray memory.
_MAX_NDIM = 1024


def extents(address: int | None, ndim: int) -> tuple[int, ...] | None:
    """The ``ndim`` int64 at ``address``; None for NULL."""
    if not address:
        return None
    if not 0 <= ndim <= _MAX_NDIM:
        raise Malformed(f"ndim is {ndim}: outside 0..{_MAX_NDIM}, so shape and strides are not read")
    return tuple((ctypes.c_int64 * ndim).from_address(address))


def tensor_fields(tensor: DLTensor) -> TensorFields:
    """Copy a DLTensor out into plain values; Malformed where its pointers cannot be followed."""
    return {
        "data": tensor.data or 0,
        "device": (tensor.device.device_type, tensor.device.device_id),
        "dtype": (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        "ndim": tensor.ndim,
        "shape": extents(tensor.shape, tensor.ndim),
        "strides": extents(tensor.strides, tensor.ndim),
        "byte_offset": tensor.byte_offset,
    }


def device_text(device: tuple[int, int]) -> str:
    """Name a device, ``cuda:0``; unknown types by number, ``device 99:0``."""
    return f"{DEVICE_NAMES.get(device[0], f'device {device[0]}')}:{device[1]}"


def dtype_text(dtype: tuple[int, int, int]) -> str:
    """Name a dtype, ``float32`` or ``float32x4``; what has no name is spelled out, ``(code 99, 8 bits, 1 lanes)``."""
    code, bits, lanes = dtype
    if code >= len(CODE_NAMES) or not bits or not lanes:
        return f"(code {code}, {bits} bits, {lanes} lanes)"
    expected = {BOOL: 8, FLOAT4_E2M1FN: 4, FLOAT6_E2M3FN: 6, FLOAT6_E3M2FN: 6}.get(code, 8 if code > BOOL else None)
    return f"{CODE_NAMES[code]}{'' if bits == expected else bits if expected is None else f':{bits}'}" + (
        f"x{lanes}" if lanes != 1 else ""
    )


def flags_text(flags: int) -> str:
    """Name the flag bits, ``READ_ONLY|0x8``; ``0`` for none."""
    named = [name for bit, name in FLAG_NAMES.items() if flags & bit]
    rest = flags & ~sum(FLAG_NAMES)
    return "|".join([*named, hex(rest)] if rest else named) or "0"


# --- the C API --------------------------------------------------------------------------------------------------------
# Own prototypes, never attributes of ctypes.pythonapi: those objects are shared by the whole process, and setting
# argtypes on them changes them under everybody else. PYFUNCTYPE keeps the GIL and raises what the function set.


def _c_api(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    return function


incref = _c_api("Py_IncRef", None, ctypes.py_object)
decref_address = _c_api("Py_DecRef", None, ctypes.c_void_p)
capsule_new = _c_api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
capsule_name = _c_api("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
capsule_set_name = _c_api("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
capsule_pointer = _c_api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
capsule_set_context = _c_api("PyCapsule_SetContext", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)


# The type of a capsule has no public name before Python 3.13.
_probe = ctypes.create_string_buffer(1)
CapsuleType: type = type(capsule_new(ctypes.addressof(_probe), None, None))

_names: dict[str, ctypes.Array[ctypes.c_char]] = {}


def immortal(value: object) -> None:
    """Never free ``value``: C code keeps a raw pointer to it that may outlive this module and even the interpreter."""
    incref(value)


def static_name(name: str) -> int:
    """Address of a C string that lives for ever; capsules keep a pointer to their name, not a copy."""
    if name not in _names:
        _names[name] = ctypes.create_string_buffer(name.encode())
        immortal(_names[name])
    return ctypes.addressof(_names[name])


def function_address(function: Any) -> int:
    """Entry point of a ctypes function or callback."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
