"""Reading host memory: buffers, NumPy arrays of every kind, array interfaces; and `__cuda_array_interface__`. The rest is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from support import aligned, need

import interop
from interop import ExchangeError, as_tensor
from interop.testing import ArrayInterface, CudaArrayInterface

NAMES = {"b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32", "l": "int64", "L": "uint64", "q": "int64",
         "Q": "uint64", "f": "float32", "d": "float64"}  # fmt: skip


def refused(x: Any, words: str, **how: Any) -> ExchangeError:
    with pytest.raises(ExchangeError, match=words) as e:
        as_tensor(x, **how)
    return e.value


# ---- buffers ----
def test_bytes_are_read_only_and_bytearray_is_not() -> None:
    """SPEC X-RO-1"""
    data = bytearray(b"abc")
    for x, readonly in (
        (b"abc", True),
        (data, False),
        (memoryview(data), False),
        (memoryview(data).toreadonly(), True),
        (memoryview(b"abc"), True),
    ):
        t = as_tensor(x)
        assert (t.shape, t.dtype, t.readonly, np.asarray(t).tolist()) == ((3,), "uint8", readonly, [97, 98, 99])
    np.asarray(as_tensor(data))[0] = 120
    assert data == b"xbc"


@pytest.mark.parametrize("code", NAMES)
def test_array_module_shares_its_memory(code: str) -> None:
    """SPEC X-HOST-5"""
    x = array.array(code, [1, 2, 3])
    t = as_tensor(x)
    assert t.dtype == NAMES[code] and t.ptr == x.buffer_info()[0] and not t.readonly
    np.asarray(t)[1] = 7
    assert x.tolist() == [1, 7, 3]


def test_mmap_shares_its_pages_and_cannot_be_closed_meanwhile() -> None:
    """SPEC X-HOST-5"""
    m = mmap.mmap(-1, 4096)
    t = as_tensor(m)
    assert t.nbytes == 4096 and not t.readonly
    np.asarray(t)[5] = 9
    assert m[5] == 9
    view = t[1:]
    del t
    with pytest.raises(BufferError):
        m.close()
    del view
    m.close()


CTYPES = [
    (ctypes.c_float * 4, "float32", (4,)), ((ctypes.c_int16 * 3) * 2, "int16", (2, 3)), (ctypes.c_bool * 2, "bool", (2,)),
    (ctypes.c_double, "float64", ()),
    (ctypes.c_uint8 * 0, "uint8", (0,)), (ctypes.c_long * 2, "int64", (2,)), (ctypes.c_char * 3, "uint8", (3,)), (ctypes.c_size_t * 2,
    "uint64", (2,)),
    (((ctypes.c_int8 * 2) * 2) * 2, "int8", (2, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "dtype", "shape"), CTYPES, ids=lambda x: getattr(x, "__name__", None))
def test_ctypes_arrays_share_their_memory(cls: Any, dtype: str, shape: Any) -> None:
    """SPEC X-HOST-5"""
    x = cls()
    t = as_tensor(x)
    assert (t.dtype, t.shape, t.readonly) == (dtype, shape, False)
    assert t.size == 0 or t.ptr == ctypes.addressof(x)


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_float)]


class Swapped(ctypes.BigEndianStructure):
    _fields_ = [("a", ctypes.c_int)]


@pytest.mark.parametrize("x", [
    Pair(), (Pair * 2)(), Swapped(), (ctypes.c_int32.__ctype_be__ * 3)(), (ctypes.c_longdouble * 2)(), (ctypes.c_void_p * 2)(),
        (ctypes.py_object * 1)(1),
    (ctypes.c_wchar * 2)(), array.array("u", "ab"), memoryview(bytearray(16)).cast("P"), memoryview(np.zeros(2, "f4,i4")),
    memoryview(np.zeros(2, ">f4")),
    memoryview(np.zeros(2, ">i2")), memoryview(np.zeros(2, "g")), memoryview(np.array(["ab"])), memoryview(np.array([b"ab"])),
    memoryview(np.zeros(2, "V3")),
    memoryview(np.array([{}])), np.longdouble(1), np.str_("ab"), np.void(b"abc"),
], ids=lambda x: f"{type(x).__name__}-{memoryview(x).format}")  # fmt: skip
def test_buffer_formats_without_a_dtype_are_refused_by_name_with_a_remedy(x: Any) -> None:
    """SPEC X-HOST-6"""
    e = refused(x, "format|dtype")
    assert repr(memoryview(x).format) in e.reason or str(getattr(x, "dtype", "?")) in e.reason
    assert e.remedy


def test_a_one_byte_type_has_no_byte_order() -> None:
    """SPEC X-HOST-6"""
    assert as_tensor((ctypes.c_uint8.__ctype_be__ * 3)()).dtype == "uint8"


@pytest.mark.parametrize("form", ["c", "gaps", "reversed", "2-d"])
def test_memoryviews_keep_shape_and_strides(form: str) -> None:
    """SPEC X-HOST-6"""
    m = memoryview(bytearray(range(24)))
    m = {"c": m.cast("h"), "gaps": m[3::5], "reversed": m.cast("i")[::-1], "2-d": m.cast("B").cast("H", (3, 4))}[form]
    t = as_tensor(m)
    assert t.shape == m.shape and np.asarray(t).tolist() == m.tolist()
    assert tuple(s * t.itemsize for s in t.strides) == m.strides


def test_indirect_buffers_are_refused() -> None:
    """SPEC X-HOST-6"""
    tb = need("_testbuffer")
    x = tb.ndarray(list(range(6)), shape=[2, 3], format="B", flags=tb.ND_PIL)
    assert memoryview(x).suboffsets
    refused(x, "suboffsets")


def test_strides_that_are_no_multiple_of_the_item_are_refused() -> None:
    """SPEC X-HOST-6"""
    records = np.zeros(4, [("x", "f4"), ("y", "u1")])
    for x in (memoryview(records["x"]), records["x"]):
        e = refused(x, "5|multiple")
        assert e.remedy and "copy" in e.remedy
    assert as_tensor(records["x"][:1]).shape == (1,)  # the stride of one element says nothing


def test_a_refused_buffer_is_closed_again() -> None:
    """SPEC X-HOST-5"""
    data = bytearray(16)
    m = memoryview(data).cast("P")
    refused(m, "format")
    m.release()
    data.append(1)


def test_bytearray_cannot_be_resized_while_a_tensor_view_or_export_lives() -> None:
    """SPEC X-HOST-5"""
    data = bytearray(8)
    alive: list[Any] = [as_tensor(data)]
    alive.append(alive[0][2:])
    alive.append(np.asarray(alive[1]))
    alive.append(alive[1].__dlpack__(max_version=(1, 0)))
    while alive:
        with pytest.raises(BufferError):
            data.append(1)
        del alive[0]
    data.append(1)
    assert len(data) == 9


def test_a_closed_source_passes_its_own_error_on() -> None:
    """SPEC X-KW-3"""
    m = memoryview(b"abc")
    m.release()
    with pytest.raises(ValueError, match="released"):
        as_tensor(m)


# ---- NumPy's kinds of array ----
@pytest.mark.parametrize(
    "dtype", ["f4,i4", [("x", "u1")], "O", "M8[ns]", "m8[s]", "S3", "U2", "V4", "g", "G", ">f4", ">i8", ">c8"], ids=str
)
def test_numpy_dtypes_without_a_dlpack_equivalent_are_refused_by_name_with_a_remedy(dtype: Any) -> None:
    """SPEC X-DT-3"""
    a = np.zeros(2, dtype)
    for x in (a, a.view(np.matrix) if a.dtype.kind != "V" else a.view(np.recarray)):
        with pytest.raises(ExchangeError) as e:
            as_tensor(x)
        assert str(a.dtype) in e.value.reason or repr(a.dtype.str) in e.value.reason
        assert e.value.remedy and ("astype" in e.value.remedy or "view('uint8')" in e.value.remedy)


def test_masked_arrays_are_refused_with_both_remedies() -> None:
    """SPEC X-HOST-8"""
    for x in (np.ma.array([1, 2], mask=[0, 1]), np.ma.masked, np.ma.array([1.0, 2.0])):
        e = refused(x, "mask")
        assert e.remedy and "filled" in e.remedy and ".data" in e.remedy
        with pytest.raises(ExchangeError):
            interop.to(x, "torch")


def test_other_subclasses_are_read_as_the_array_that_they_are(tmp_path: Any) -> None:
    """SPEC X-HOST-8"""
    memmap = np.memmap(tmp_path / "x", "f4", "w+", shape=(2, 3))
    for x in (np.asmatrix(np.ones((2, 3))), memmap, memmap[1:], np.ones((2, 3)).view(type("Mine", (np.ndarray,), {}))):
        t = as_tensor(x)
        assert t.shape == x.shape and t.ptr == x.ctypes.data and interop.kind(x) == "numpy"
        n = interop.to(x, "numpy")
        assert type(n) is np.ndarray and np.shares_memory(n, x)
    assert as_tensor(np.memmap(tmp_path / "x", "f4", "r")).readonly


def test_a_subclass_that_speaks_dlpack_itself_is_asked() -> None:
    """SPEC X-TO-8"""

    class Own(np.ndarray[Any, Any]):
        def __dlpack__(self, **kw: Any) -> Any:
            return np.full(2, 9.0).__dlpack__(**kw)

    assert np.asarray(as_tensor(np.zeros(3).view(Own))).tolist() == [9, 9]


@pytest.mark.parametrize(
    "value", [np.float32(2.5), np.int8(3), np.bool_(True), np.complex128(1 + 2j), np.float16(1)], ids=lambda x: type(x).__name__
)
def test_numpy_scalars_are_read_only_tensors_of_no_dimension(value: Any) -> None:
    """SPEC X-RO-1"""
    t = as_tensor(value)
    assert (t.shape, t.dtype, t.readonly) == ((), value.dtype, True) and np.asarray(t) == value


@pytest.mark.parametrize("value", [np.datetime64("2020-01-01"), np.timedelta64(3, "s")])
def test_numpy_scalars_without_a_dtype_are_refused(value: Any) -> None:
    """SPEC X-DT-3"""
    with pytest.raises((ExchangeError, TypeError)):
        as_tensor(value)


@pytest.mark.parametrize("x", [[1, 2], (1.0,), 3, 2.5, 1j, None, "text", object(), {1: 2}, range(3), np.ndarray, int, dict], ids=repr)
def test_objects_without_memory_are_a_type_error_that_says_so(x: Any) -> None:
    """SPEC X-KW-7"""
    with pytest.raises(TypeError, match=r"shares no memory.*__dlpack__") as e:
        as_tensor(x)
    assert ("np.asarray" in str(e.value)) == isinstance(x, (list, tuple, int, float, complex))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "i2"])
def test_unaligned_arrays_are_copied_or_refused_but_never_shared(dtype: str) -> None:
    """SPEC X-VALID-8"""
    a = aligned(np.arange(5), dtype, off=1)
    t = as_tensor(a)
    assert t.copied and t.ptr % 64 == 0 and not t.readonly and np.asarray(t).tolist() == a.tolist()
    e = refused(a, "multiple of", copy=False)
    assert hex(a.ctypes.data) in e.reason and e.remedy
    assert interop.to(a, "numpy") is a and np.asarray(as_tensor(np.zeros(0, dtype))).size == 0


def test_complex_numbers_align_like_their_parts() -> None:
    """SPEC X-VALID-8"""
    a = aligned(np.arange(3), "c8", off=4)
    assert not as_tensor(a, copy=False).copied and as_tensor(a).ptr == a.ctypes.data


def test_overlapping_elements_make_a_tensor_read_only() -> None:
    """SPEC X-RO-6"""
    a = np.lib.stride_tricks.as_strided(np.zeros(3), (4, 3), (0, 8))
    assert a.flags.writeable and as_tensor(a).readonly and not np.asarray(as_tensor(a)).flags.writeable
    assert not as_tensor(a[:1]).readonly and not as_tensor(a[0]).readonly


# ---- cycles ----
def test_an_owner_that_holds_its_own_tensor_is_collected() -> None:
    """SPEC X-OWN-8"""
    kinds: list[Any] = [np.zeros(3).view(type("Array", (np.ndarray,), {})), type("Bytes", (bytearray,), {})(8),
                        ArrayInterface(np.zeros(3).__array_interface__, np.zeros(3)), CudaArrayInterface(cai())]  # fmt: skip
    alive = []
    while kinds:
        x = kinds.pop()
        x.tensor = as_tensor(x, **({"device": "cuda:0"} if isinstance(x, CudaArrayInterface) else {}))
        alive.append(weakref.ref(x))
        del x
    gc.collect()
    assert [type(ref()).__name__ for ref in alive if ref() is not None] == []


# ---- array interfaces ----
def test_array_interface_shares_memory_and_keeps_its_owner() -> None:
    """SPEC X-KW-7"""
    a = aligned(np.arange(6, dtype="i2").reshape(2, 3))[:, ::-1]
    for readonly in (False, True):
        i = dict(a.__array_interface__, data=(a.ctypes.data, readonly))
        x = ArrayInterface(i, a)
        gone = weakref.ref(x)
        t = as_tensor(x)
        del x
        assert (t.shape, t.strides, t.dtype, t.ptr, t.readonly) == ((2, 3), (3, -1), "int16", a.ctypes.data, readonly)
        assert gone() is not None
        del t
        assert gone() is None


@pytest.mark.parametrize("typestr", [">f4", "|O8", "<M8[ns]", "|V5", "<f16"])
def test_array_interface_without_a_dlpack_dtype_is_refused(typestr: str) -> None:
    """SPEC X-DT-3"""
    a = np.zeros(40, "u1")
    with pytest.raises((ExchangeError, ValueError)):
        as_tensor(ArrayInterface({"version": 3, "shape": (2,), "typestr": typestr, "data": (a.ctypes.data, False)}, a))


@pytest.mark.parametrize(
    "interface", [{}, 3, {"shape": (2,)}, {"version": 3, "shape": (-2,), "typestr": "<f4", "data": (64, False)}, "text"]
)
def test_malformed_array_interface_is_an_error(interface: Any) -> None:
    """SPEC X-KW-7"""
    with pytest.raises((BufferError, TypeError, ValueError)):
        as_tensor(ArrayInterface(interface))


# ---- __cuda_array_interface__ ----
def cai(**fields: Any) -> dict[str, Any]:
    return {"shape": (2, 3), "typestr": "<f4", "data": (0x7F0000001000, False), "version": 3, **fields}


@pytest.mark.parametrize("version", [2, 3])
def test_cuda_array_interface_is_read(version: int) -> None:
    """SPEC X-HOST-7"""
    for readonly in (False, True):
        x = CudaArrayInterface(cai(version=version, data=(0x7F0000001000, readonly), strides=(4, 8)))
        t = as_tensor(x, device="cuda:1")
        assert (t.shape, t.strides, t.dtype, t.ptr, t.readonly, t.device) == ((2, 3), (1, 2), "float32", 0x7F0000001000, readonly, "cuda:1")
    assert as_tensor(CudaArrayInterface(cai(strides=None)), device="cuda:0").strides == (3, 1)
    assert as_tensor(CudaArrayInterface(cai(shape=(0,), data=(0, False))), device="cuda:0").shape == (0,)


@pytest.mark.parametrize(("fields", "pending"), [({"version": 2}, 1), ({}, None), ({"stream": None}, None), ({"stream": 1}, 1),
    ({"stream": 2}, 2),
                                                 ({"stream": 0x5000}, 0x5000)])  # fmt: skip
def test_stream_of_a_cuda_array_interface_is_remembered(fields: Any, pending: Any) -> None:
    """SPEC X-STREAM-4: version 2 had no field for it and meant the legacy default stream; None means nothing is pending."""
    t = as_tensor(CudaArrayInterface(cai(**fields)), device="cuda:0")
    assert t.__cuda_array_interface__["stream"] == pending


def test_device_of_a_cuda_array_interface_is_asked_for_where_nobody_knows_it() -> None:
    """SPEC X-HOST-7"""
    e = refused(CudaArrayInterface(cai()), "which GPU")
    assert e.remedy and "device=" in e.remedy
    with pytest.raises(BufferError):
        as_tensor(CudaArrayInterface(cai()), device="cpu")


@pytest.mark.parametrize("bad", [
    {"version": 1}, {"mask": object()}, {"typestr": ">f4"}, {"typestr": "|O8"}, {"typestr": "<f16"}, {"typestr": 3}, {"shape": None},
    {"shape": 3}, {"data": None},
    {"data": 5}, {"data": ("x", False)}, {"data": (-1, False)}, {"data": (2**64, False)}, {"data": (0, False)}, {"shape": (-1,)},
    {"shape": (2**63,)},
    {"shape": ("a",)}, {"shape": (1,) * 65}, {"strides": (4,)}, {"strides": (5, 4)}, {"strides": ("a", 4)}, {"strides": 4},
    {"strides": (2**70, 4)},
    {"version": None}, {"version": "3"}, {"stream": 0}, {"stream": "x"}, {"stream": True}, {"shape": (2**40, 2**40)},
], ids=str)  # fmt: skip
def test_malformed_cuda_array_interface_is_refused(bad: Any) -> None:
    """SPEC X-HOST-7"""
    with pytest.raises((ValueError, TypeError) if "stream" in bad else BufferError) as e:  # a stream is the user's affair, X-STREAM-1
        as_tensor(CudaArrayInterface(cai(**bad)), device="cuda:0")
    assert "which GPU" not in str(e.value)


@pytest.mark.parametrize("field", ["shape", "typestr", "data", "version"])
def test_cuda_array_interface_that_lacks_a_field_is_refused_by_its_name(field: str) -> None:
    """SPEC X-HOST-7"""
    fields = cai()
    del fields[field]
    with pytest.raises(BufferError, match=field):
        as_tensor(CudaArrayInterface(fields), device="cuda:0")
    for nothing in (3, [], "text"):
        with pytest.raises((TypeError, BufferError)):
            as_tensor(CudaArrayInterface(nothing), device="cuda:0")
