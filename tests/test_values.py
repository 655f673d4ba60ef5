"""DType and Device: names, conversions from every framework's own, and what is refused. They describe; no memory is touched."""

from __future__ import annotations

import copy
import enum
import pickle
from typing import Any

import numpy as np
import pytest
from support import jnp, ml_dtypes, torch

import interop
from interop import Device, DType
from interop.testing import abi

# Written out from the DLPack 1.3 header, not taken from interop's tables.
NUMPY_TYPES = {
    "bool": (6, 8), "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "uint16": (1, 16),
    "uint32": (1, 32), "uint64": (1, 64), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "complex64": (5, 64),
    "complex128": (5, 128),
}  # fmt: skip
EXTENSIONS = {
    "bfloat16": (4, 16), "float8_e3m4": (7, 8), "float8_e4m3": (8, 8), "float8_e4m3b11fnuz": (9, 8), "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8),
    "float6_e2m3fn": (15, 6), "float6_e3m2fn": (16, 6), "float4_e2m1fn": (17, 4), "int4": (0, 4), "uint4": (1, 4), "int2": (0, 2),
    "uint2": (1, 2),
}  # fmt: skip
BARE = {"complex32": (5, 32), "int1": (0, 1), "uint1": (1, 1), "opaque8": (3, 8), "opaque16": (3, 16), "opaque32": (3, 32),
        "opaque64": (3, 64)}  # fmt: skip
TYPES = NUMPY_TYPES | EXTENSIONS | BARE
TORCH_TYPES = (*NUMPY_TYPES, "complex32", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
               "float8_e8m0fnu")  # fmt: skip


# ---- DType ----
@pytest.mark.parametrize("name", TYPES)
def test_dtype_name_and_triple_are_two_spellings(name: str) -> None:
    """SPEC X-DT-1"""
    d = DType(name)
    assert (d.code, d.bits, d.lanes) == (*TYPES[name], 1)
    assert d.name == str(d) == name
    assert DType((*TYPES[name], 1)).name == name
    assert DType(d) == d == DType((d.code, d.bits, d.lanes))


@pytest.mark.parametrize("lanes", [2, 4, 16, 65535])
@pytest.mark.parametrize("name", TYPES)
def test_dtype_with_lanes_round_trips_through_its_name(name: str, lanes: int) -> None:
    """SPEC X-DT-1"""
    d = DType((*TYPES[name], lanes))
    assert d.name == f"{name}x{lanes}"
    assert (DType(d.name).code, DType(d.name).bits, DType(d.name).lanes) == (*TYPES[name], lanes)
    assert d != DType(name)


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_dtype_equals_and_comes_from_numpys(name: str) -> None:
    """SPEC X-DT-2"""
    for spelling in (np.dtype(name), np.dtype(name).type, np.dtype(name).str):
        assert DType(spelling).name == name
        assert DType(name) == spelling
        assert spelling == DType(name)
    assert DType("int8" if name != "int8" else "uint8") != np.dtype(name)


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_dtype_equals_and_comes_from_torchs(name: str) -> None:
    """SPEC X-DT-2"""
    theirs = getattr(torch, name)
    assert DType(theirs).name == name
    assert DType(name) == theirs
    assert theirs == DType(name)
    assert DType("opaque8") != theirs


def test_torchs_pair_of_fp4_has_two_lanes() -> None:
    """SPEC X-DT-2"""
    d = DType(torch.float4_e2m1fn_x2)
    assert (d.code, d.bits, d.lanes, d.itemsize) == (17, 4, 2, 1)


@pytest.mark.parametrize("name", ["quint8", "qint8", "qint32", "bits8", "int3", "uint7"])
def test_torch_types_that_dlpack_lacks_are_value_errors(name: str) -> None:
    """SPEC X-DT-1"""
    with pytest.raises(ValueError, match=name):
        DType(getattr(torch, name))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int4", "uint2", "float8_e4m3fn", "bool_", "complex64"])
def test_dtype_equals_and_comes_from_jaxs(name: str) -> None:
    """SPEC X-DT-2"""
    theirs = getattr(jnp, name)
    assert DType(theirs).name == name.removesuffix("_")
    assert DType(theirs) == theirs
    assert DType(jnp.dtype(theirs)) == DType(theirs)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_dtype_equals_comes_from_and_becomes_ml_dtypes(name: str) -> None:
    """SPEC X-DT-2"""
    theirs = getattr(ml_dtypes, name)
    assert DType(theirs).name == DType(np.dtype(theirs)).name == name
    assert DType(name) == theirs
    assert np.dtype(DType(name)) == np.dtype(theirs)


@pytest.mark.parametrize(("python", "name"), [(float, "float64"), (int, "int64"), (bool, "bool"), (complex, "complex128")])
def test_dtype_comes_from_pythons_number_types(python: type, name: str) -> None:
    """SPEC X-DT-2"""
    assert DType(python).name == name


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_numpy_takes_a_dtype_where_it_wants_one(name: str) -> None:
    """SPEC X-DT-4"""
    assert np.dtype(DType(name)) is np.dtype(name)
    assert np.zeros(2, DType(name)).dtype == name
    assert DType(name).numpy_dtype == np.dtype(name)


@pytest.mark.parametrize("name", [name for name in BARE if "int" not in name])
def test_numpy_has_no_dtype_for_these_and_the_error_names_them(name: str) -> None:
    """SPEC X-DT-4"""
    with pytest.raises(TypeError, match=name):
        np.dtype(DType(name))
    with pytest.raises(TypeError, match=name):
        _ = DType(name).numpy_dtype


@pytest.mark.parametrize(("spelling", "itemsize"), [
    ("float32", 4), ("complex64", 8), ("complex128", 16), ("bool", 1), ("int4", 1), ("int1", 1), ("float6_e2m3fn", 1), ("float32x4", 16),
    ("float4_e2m1fnx2", 1), ("int4x3", 2), ("float6_e2m3fnx4", 3),
])  # fmt: skip
def test_itemsize_is_bytes_rounded_up(spelling: str, itemsize: int) -> None:
    """SPEC X-DT-1"""
    assert DType(spelling).itemsize == itemsize


@pytest.mark.parametrize("bad", [
    "float33", "float", "abc", "", "f3", "float32x0", "float32x", "float32x65536", "float32x4x2", "x4", " float32", "FLOAT32", "bfloat",
    "int3",
    "float4", "bool8", "<U4", "O", "V4", "M8[ns]", "m8[s]", "float128", ">f4", "!f4", ">i8", "b1,f4", "4f4",
])  # fmt: skip
def test_strings_that_name_no_dlpack_dtype_are_value_errors(bad: str) -> None:
    """SPEC X-DT-1"""
    with pytest.raises(ValueError):
        DType(bad)


@pytest.mark.parametrize("bad", [
    np.dtype("f4,i4"), np.dtype([("x", "u1")]), np.dtype("O"), np.dtype("M8[ns]"), np.dtype("m8[s]"), np.dtype("S3"), np.dtype("U2"),
    np.dtype("V4"), np.longdouble, np.clongdouble, np.dtype(">f4"), np.dtype(("f4", (2,))), np.dtypes.StringDType(),
], ids=str)  # fmt: skip
def test_numpy_dtypes_that_dlpack_lacks_are_value_errors(bad: Any) -> None:
    """SPEC X-DT-3"""
    with pytest.raises(ValueError):
        DType(bad)


@pytest.mark.parametrize("triple", [
    (2, 33, 1), (2, 0, 1), (2, 32, 0), (2, 32, -1), (2, 32, 65536), (256, 8, 1), (-1, 8, 1), (18, 8, 1), (255, 255, 65535), (6, 1, 1), (6,
    16, 1),
    (4, 32, 1), (4, 8, 1), (17, 8, 1), (15, 8, 1), (7, 6, 1), (0, 128, 1), (0, 3, 1), (5, 16, 1), (5, 256, 1), (3, 4, 1), (2, 8, 1), (2,
    2**70, 1),
])  # fmt: skip
def test_triples_of_no_dlpack_dtype_are_value_errors(triple: Any) -> None:
    """SPEC X-DT-1: bits must match the code, lanes start at 1."""
    with pytest.raises(ValueError, match="dtype"):
        DType(triple)


@pytest.mark.parametrize("bad", [None, object(), (2, 32), (2, 32, 1, 1), (2.0, 32, 1), ("float", 32, 1), 3, 1.5, b"\xff", Device("cpu")],
                         ids=repr)  # fmt: skip
def test_what_is_no_dtype_is_a_type_error(bad: Any) -> None:
    """SPEC X-DT-1"""
    with pytest.raises(TypeError):
        DType(bad)


@pytest.mark.parametrize("other", [None, object(), [], "nonsense", (2, 33, 1), 7, np.dtype("O"), Device("cpu")], ids=repr)
def test_comparison_with_anything_else_is_false_and_raises_nothing(other: Any) -> None:
    """SPEC X-DT-2"""
    assert not DType("float32") == other  # noqa: SIM201
    assert DType("float32") != other


def test_equal_dtypes_hash_alike_and_different_ones_are_told_apart() -> None:
    """SPEC X-DT-2"""
    made = [DType(name) for name in TYPES] + [DType((*pair, 1)) for pair in TYPES.values()]
    assert len(set(made)) == len(TYPES)
    assert len({hash(d) for d in made}) == len(TYPES)
    assert {DType("float32"): 1}[interop.as_tensor(np.zeros(1, "f4")).dtype] == 1


@pytest.mark.parametrize("spelling", ["float32", "bfloat16", "int4x3"])
def test_dtype_survives_pickle_copy_and_eval_of_its_repr(spelling: str) -> None:
    """SPEC X-DT-2"""
    d = DType(spelling)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(d, protocol)) == d
    assert copy.deepcopy(d) == copy.copy(d) == d
    assert eval(repr(d), {"DType": DType}) == d and spelling in repr(d)


def test_dtype_and_device_are_immutable_and_final() -> None:
    """SPEC X-DT-2"""
    for value, field in ((DType("float32"), "bits"), (Device("cuda:1"), "id")):
        with pytest.raises(AttributeError):
            setattr(value, field, 8)
        with pytest.raises(AttributeError):
            value.anything = 1  # type: ignore[union-attr]
        with pytest.raises(TypeError):
            type("Sub", (type(value),), {})


@pytest.mark.parametrize("cls", [DType, Device])
def test_dtype_and_device_need_a_value(cls: Any) -> None:
    """SPEC X-DT-1"""
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        cls.__new__(cls)


# ---- Device ----
@pytest.mark.parametrize("number", [0, 3, 2**31 - 1])
@pytest.mark.parametrize("kind", abi.DEVICE_NAMES)
def test_every_dlpack_device_has_one_value_and_three_spellings(kind: int, number: int) -> None:
    """SPEC X-DEV-2"""
    if kind == abi.CPU and number:
        pytest.skip("host memory has one device: see below")
    name = abi.DEVICE_NAMES[kind]
    d = Device(f"{name}:{number}")
    assert d == Device((kind, number)) == Device(kind, number) == Device([kind, number]) == Device(d)
    assert (d.type, d.id, d.name, tuple(d)) == (kind, number, name, (kind, number))
    assert Device(str(d)) == d == str(d) and d == (kind, number)
    assert eval(repr(d), {"Device": Device}) == d
    assert pickle.loads(pickle.dumps(d)) == copy.deepcopy(d) == d
    assert hash(d) == hash(Device((kind, number))) and {(kind, number): "x"}[d] == "x"  # type: ignore[index]


def test_device_number_defaults_to_zero() -> None:
    """SPEC X-DEV-2"""
    assert Device("cuda") == Device("cuda:0") and str(Device("cuda")) == "cuda:0"
    assert str(Device("cpu")) == str(Device("cpu:0")) == "cpu"


def test_devices_that_print_alike_are_equal() -> None:
    """SPEC X-DEV-2: host memory has no number, whatever a producer says."""
    for d in (Device("cpu:3"), Device((1, 3)), interop.as_tensor(_at_cpu(3)).device):
        assert Device(str(d)) == d
        assert eval(repr(d), {"Device": Device}) == d


def _at_cpu(number: int) -> Any:
    from interop.testing import Forged

    return Forged(device=(1, number)).capsule()


@pytest.mark.parametrize(
    "bad", [(0, 0), (5, 0), (6, 0), (19, 0), (99, 0), (-1, 0), (2**31, 0), (-(2**31), 0), (2**70, 0), (2, -1), (2, 2**31), (2, 2**70)]
)
def test_unknown_device_numbers_are_value_errors_and_never_the_cpu(bad: Any) -> None:
    """SPEC X-DEV-1"""
    with pytest.raises(ValueError, match="device"):
        Device(bad)


@pytest.mark.parametrize("bad", ["", "gpu", "CUDA", " cpu", "cpu ", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cuda:1.0", "cuda:٣",
    "cuda:2147483648",
                                 "cuda: 1", "cuda:+1", ":0", "mps", "float32", "torch"])  # fmt: skip
def test_unknown_device_strings_are_value_errors_that_quote_them(bad: str) -> None:
    """SPEC X-DEV-1"""
    with pytest.raises(ValueError) as e:
        Device(bad)
    assert repr(bad) in str(e.value)


@pytest.mark.parametrize("bad", [None, 2, True, object(), (2,), (2, 0, 0), (2.0, 0), ("cuda", 0), (2, True), (True, 0), (2, None),
    b"cuda", {2: 0}, {2, 0}],
                         ids=repr)  # fmt: skip
def test_what_is_no_device_is_a_type_error(bad: Any) -> None:
    """SPEC X-DEV-1"""
    with pytest.raises(TypeError):
        Device(bad)


def test_device_types_may_come_as_enum_members() -> None:
    """SPEC X-DEV-2: torch, jax and tvm_ffi answer __dlpack_device__ with enums."""

    class DLDeviceType(enum.IntEnum):
        kDLCUDA = 2

    assert Device((DLDeviceType.kDLCUDA, np.int64(1))) == "cuda:1"


def test_devices_differ_by_type_and_by_number() -> None:
    """SPEC X-DEV-2"""
    made = {Device((kind, number)) for kind in abi.DEVICE_NAMES if kind != abi.CPU for number in (0, 1)} | {Device("cpu")}
    assert len(made) == 2 * len(abi.DEVICE_NAMES) - 1
    assert Device("cuda:0") != Device("cuda:1") and Device("cuda") != Device("cuda_managed")
    assert Device("cuda:0") != "cuda:1" and Device("cuda:0") != (2, 1) and Device("cuda:0") != "nonsense" and Device("cuda:0") != 2
