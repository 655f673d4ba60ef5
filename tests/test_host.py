"""Tensors as the host sees them: the buffer protocol, the array protocols, the CUDA array interface. For reading see test_host_reading."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import struct
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from support import aligned, forge, ml_dtypes, producer, run, writable
from test_values import EXTENSIONS, NUMPY_TYPES, TYPES

import interop
from interop import ExchangeError
from interop.testing import SUBBYTE_PADDED, Forged

FORMATS = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "lq", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "LQ",
           "float16": "e", "float32": "f", "float64": "d", "complex64": ("Zf",), "complex128": ("Zd",)}  # fmt: skip
SIMPLE, WRITABLE, FORMAT, ND, STRIDES = 0, 1, 4, 8, 0x18
C, F, ANY, INDIRECT = 0x38, 0x58, 0x98, 0x118
LAYOUTS = {
    "c": lambda a: a, "f": lambda a: a.T, "gaps": lambda a: a[:, ::2], "reversed": lambda a: a[::-1], "row": lambda a: a[1],
    "column": lambda a: a[:, 1],
    "0-d": lambda a: a[1, 1, ...], "empty": lambda a: a[:0], "empty column": lambda a: a[:, :0], "one row": lambda a: a[:1].T,
    "broadcast": lambda a: a[None],
    "one": lambda a: a[1:2, ::3][:, :1],
}  # fmt: skip


class PyBuffer(ctypes.Structure):
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape",
                ctypes.POINTER(ctypes.c_ssize_t)),
                ("strides", ctypes.POINTER(ctypes.c_ssize_t)), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]  # fmt: skip


_get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int)(("PyObject_GetBuffer", ctypes.pythonapi))
_release = ctypes.PYFUNCTYPE(None, ctypes.POINTER(PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def ask(x: Any, flags: int) -> dict[str, Any] | None:
    """What PyObject_GetBuffer fills in, or None where it raises BufferError or, as NumPy does, ValueError."""
    view = PyBuffer()
    try:
        _get(x, view, flags)
    except (BufferError, ValueError):
        return None
    n = x.ndim
    shape, strides = (None if not field else tuple(field[:n]) for field in (view.shape, view.strides))
    if strides:  # those of extents of 1, and of an empty buffer, are arbitrary
        strides = tuple(s if view.len and k > 1 else 0 for s, k in zip(strides, x.shape, strict=True))
    assert view.buf and (view.ndim == n or view.shape is None or isinstance(x, np.ndarray))
    said = {"len": view.len, "itemsize": view.itemsize, "readonly": bool(view.readonly), "format": view.format is not None,
            "shape": shape, "strides": strides, "buf": view.buf if view.len else 0}  # fmt: skip
    _release(view)
    return said


# ---- the buffer protocol ----
@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_buffer_has_format_and_values_of_the_dtype(name: str) -> None:
    """SPEC X-HOST-1"""
    a = aligned([[0, 1, 1], [1, 0, 0]], name)
    m = memoryview(interop.as_tensor(a)[:, ::-1])
    assert m.format in tuple(FORMATS[name]) and m.itemsize == a.itemsize == struct.calcsize(
        m.format.replace("Zf", "ff").replace("Zd", "dd")
    )
    assert (m.shape, m.strides, m.ndim) == ((2, 3), (3 * a.itemsize, -a.itemsize), 2)
    assert np.array(m).tobytes() == a[:, ::-1].tobytes() and np.asarray(m).dtype == a.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("readonly", [False, True])
def test_every_buffer_request_is_answered_as_numpy_answers_it(layout: str, readonly: bool) -> None:
    """SPEC X-HOST-1: success, and which fields are filled in, for every combination of flags (0-d: no shape, no strides, PEP 3118)."""
    a = LAYOUTS[layout](aligned(np.arange(12.0).reshape(4, 3)))
    if readonly:
        a.flags.writeable = False
    t = interop.as_tensor(a)
    differing = []
    for shape, extra in itertools.product([SIMPLE, ND, STRIDES, C, F, ANY, INDIRECT], [0, WRITABLE, FORMAT, WRITABLE | FORMAT]):
        ours, theirs = ask(t, shape | extra), ask(a, shape | extra)
        if ours != theirs:
            differing.append((hex(shape | extra), ours, theirs))
    assert not differing


@pytest.mark.parametrize("name", [*EXTENSIONS, "complex32", "float32x4", "opaque64"])
def test_dtypes_that_buffers_lack_are_a_buffer_error_that_names_them(name: str) -> None:
    """SPEC X-HOST-1"""
    for flags in (0, SUBBYTE_PADDED):
        with pytest.raises(BufferError, match=name):
            memoryview(forge((8,), name, flags=flags))


@pytest.mark.parametrize("device", [(2, 0), (4, 0), (7, 1), (10, 0), (14, 0), (12, 0)], ids=str)
def test_memory_that_the_host_cannot_read_is_a_buffer_error_that_names_the_device(device: Any) -> None:
    """SPEC X-HOST-1"""
    t = forge(device=device)
    for _ in range(3):
        with pytest.raises(BufferError, match=str(t.device)):
            memoryview(t)
    assert sys.getrefcount(t) == 2


@pytest.mark.parametrize("device", [(1, 0), (3, 0), (11, 0), (13, 0)], ids=str)
def test_memory_that_the_host_reads_is_a_buffer(device: Any) -> None:
    """SPEC X-DEV-3"""
    t = forge((3,), "int16", device=device, data=struct.pack("3h", 7, 8, 9))
    assert memoryview(t).tolist() == [7, 8, 9] and np.asarray(t).tolist() == [7, 8, 9]


def test_writable_buffers_of_readonly_tensors_are_refused() -> None:
    """SPEC X-RO-1"""
    t = interop.as_tensor(bytes(8))
    assert memoryview(t).readonly
    with pytest.raises(BufferError, match="read-only"):
        _get(t, PyBuffer(), WRITABLE)
    with pytest.raises((TypeError, BufferError)):
        io.BytesIO(b"12345678").readinto(t)  # type: ignore[arg-type]


def test_consumers_of_plain_bytes_take_a_compact_tensor() -> None:
    """SPEC X-HOST-1"""
    a = aligned(np.arange(5, dtype="i4"))
    t = interop.as_tensor(a)
    assert hashlib.sha256(t).digest() == hashlib.sha256(a).digest()
    assert io.BytesIO(bytes(range(20))).readinto(t) == 20 and a.tobytes() == bytes(range(20))
    with pytest.raises(BufferError, match="contiguous"):
        hashlib.sha256(t[::2])
    assert np.frombuffer(t, "i4").tolist() == a.tolist() and memoryview(t).cast("B").nbytes == 20


def test_an_open_buffer_keeps_tensor_and_memory() -> None:
    """SPEC X-OWN-7"""

    class Array(np.ndarray[Any, Any]):
        pass

    a = np.arange(3.0).view(Array)
    gone = weakref.ref(a)
    m = memoryview(interop.as_tensor(a)[1:])
    del a
    assert gone() is not None and m.tolist() == [1.0, 2.0]
    m.release()
    assert gone() is None


# ---- np.asarray of anything ----
DEVICES = [(1, 0), (2, 0), (3, 0), (4, 0), (7, 0), (10, 0), (11, 0), (12, 0), (13, 0), (14, 0)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_asarray_is_an_array_of_the_right_dtype_or_an_error_and_never_of_objects(device: Any, lanes: int) -> None:
    """SPEC X-HOST-2: every dtype, packed and padded, on every kind of device."""
    for name, flags in itertools.product(TYPES, (0, SUBBYTE_PADDED)):
        t = forge((2, 8), (*TYPES[name], lanes), device=device, flags=flags)
        for convert in (
            np.asarray,
            np.array,
            np.asanyarray,
            np.ascontiguousarray,
            np.atleast_1d,
            lambda x: np.array([x, x]),
            lambda x: np.stack([x]),
        ):
            try:
                a = convert(t)
            except (BufferError, TypeError):
                continue
            assert device[0] in (1, 3, 11, 13)
            assert a.dtype == interop.DType(name).numpy_dtype, (name, flags, a.dtype)
            assert a.shape[-1] == (8 if lanes == 1 else lanes)


@pytest.mark.parametrize("name", [*NUMPY_TYPES, *EXTENSIONS])
def test_asarray_shares_memory_of_every_dtype_that_numpy_or_ml_dtypes_have(name: str) -> None:
    """SPEC X-DT-4"""
    assert ml_dtypes.bfloat16
    t = forge((2, 3), name, flags=SUBBYTE_PADDED)
    a = np.asarray(t)
    assert a.dtype == np.dtype(interop.DType(name)) and a.dtype.name == name and a.shape == (2, 3)
    assert a.ctypes.data == t.ptr and a.flags.writeable


def test_vectors_become_a_trailing_axis() -> None:
    """SPEC X-DT-5"""
    t = forge((3, 2), "float32x4", strides=(1, 3), data=np.arange(24, dtype="f4").tobytes())
    a = np.asarray(t)
    assert (a.shape, a.strides, a.dtype) == ((3, 2, 4), (16, 48, 4), "float32") and a[1, 1].tolist() == [16, 17, 18, 19]


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "float4_e2m1fn", "float6_e2m3fn"])
def test_packed_elements_are_refused_and_their_bytes_can_be_had(name: str) -> None:
    """SPEC X-DT-6"""
    t = forge((8,), name, data=bytes(range(8)))
    with pytest.raises(BufferError, match="share bytes") as e:
        np.asarray(t)
    assert isinstance(e.value, ExchangeError) and e.value.remedy and "view('uint8')" in e.value.remedy
    assert np.asarray(t.view("uint8")).tolist() == list(range(t.nbytes))


def test_without_ml_dtypes_extension_types_are_refused_with_what_to_install() -> None:
    """SPEC X-DT-4"""
    done = run(
        """
        import sys
        sys.modules["ml_dtypes"] = None
        import numpy as np, interop
        from interop.testing import Forged, SUBBYTE_PADDED
        for dtype in ((4, 16, 1), (10, 8, 1), (0, 4, 1), (17, 4, 1)):
            t = interop.as_tensor(Forged((4,), dtype, flags=SUBBYTE_PADDED).capsule())
            for convert in (np.asarray, np.array, lambda t: interop.to(t, "numpy")):
                try:
                    print("made", convert(t).dtype)
                except BufferError as e:
                    print("pip install ml_dtypes" in str(e))
            assert np.asarray(t.view("uint8")).dtype == "uint8"
        try:
            np.dtype(interop.DType("bfloat16"))
        except (TypeError, ImportError) as e:
            print("pip install ml_dtypes" in str(e))
    """.replace("\n        ", "\n")
    )
    assert done.stdout.split() == ["True"] * 13


@pytest.mark.parametrize("layout", LAYOUTS)
def test_asarray_keeps_shape_strides_memory_and_writability(layout: str) -> None:
    """SPEC X-HOST-2"""
    a = LAYOUTS[layout](aligned(np.arange(12.0).reshape(4, 3)))
    for readonly in (None, True):
        t = interop.as_tensor(a, readonly=readonly)
        for n in (np.asarray(t), t.__array__(), interop.to(t, "numpy")):
            assert n.tobytes() == a.tobytes() and n.shape == a.shape and type(n) is np.ndarray
            assert n.flags.writeable is (writable(t) is True) is (readonly is None)
            assert not a.size or (n.ctypes.data == a.ctypes.data and n.strides == a.strides)


def test_array_of_a_tensor_keeps_its_memory() -> None:
    """SPEC X-TO-9"""
    forged = Forged((3,), (2, 32, 1))
    a = np.asarray(interop.as_tensor(forged.capsule()))[1:]
    b = interop.to(interop.as_tensor(a), "numpy")
    del a
    assert forged.deleted == 0
    del b
    assert forged.deleted == 1


# ---- __array__ ----
def test_array_method_follows_numpys_rules_for_dtype_and_copy() -> None:
    """SPEC X-HOST-3"""
    a = aligned(np.arange(3, dtype="f4"))
    t = interop.as_tensor(a, readonly=True)
    for same in (t.__array__(), t.__array__("f4"), t.__array__(np.float32, copy=None), t.__array__(copy=False), np.array(t, copy=False)):
        assert np.shares_memory(same, a) and not same.flags.writeable
    for other in (
        t.__array__(copy=True),
        t.__array__("f4", copy=True),
        t.__array__("f8"),
        t.__array__("i2", copy=True),
        np.array(t),
        np.asarray(t, "f8"),
    ):
        assert not np.shares_memory(other, a) and other.flags.writeable and other.tolist() == [0, 1, 2]
    assert t.__array__("f8").dtype == "f8" and np.asarray(t, "i2").dtype == "i2"
    assert np.shares_memory(t.__array__(interop.DType("float32")), a)


def test_array_method_with_copy_false_refuses_another_dtype_as_a_value_error() -> None:
    """SPEC X-HOST-3"""
    t = interop.as_tensor(np.arange(3, dtype="f4"))
    with pytest.raises(ValueError, match="float64"):
        t.__array__("f8", copy=False)
    with pytest.raises(ValueError):
        np.asarray(t, "f8", copy=False)
    with pytest.raises(TypeError):
        t.__array__("nonsense")


# ---- the array interfaces ----
def test_array_interface_describes_the_memory() -> None:
    """SPEC X-HOST-4"""
    a = aligned(np.arange(12, dtype="c8").reshape(3, 4))[:, ::-2]
    for readonly in (False, True):
        i = interop.as_tensor(a, readonly=readonly or None).__array_interface__
        assert (i["version"], i["shape"], i["typestr"], i["data"]) == (3, (3, 2), "<c8", (a.ctypes.data, readonly)) and i[
            "strides"
        ] == a.strides
    assert [interop.as_tensor(np.zeros(1, n)).__array_interface__["typestr"] for n in NUMPY_TYPES] == [np.dtype(n).str for n in NUMPY_TYPES]


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", (1, 0)), ("int4", (1, 0)), ("float32x2", (1, 0)), ("complex32", (1, 0)),
    ("float32", (2, 0)),
                                               ("float32", (7, 0)), ("float32", (14, 0))])  # fmt: skip
def test_array_interface_is_absent_where_it_cannot_describe(dtype: str, device: Any) -> None:
    """SPEC X-HOST-4"""
    assert not hasattr(forge((4,), dtype, device=device), "__array_interface__")


@pytest.mark.parametrize("device", [(2, 1), (13, 0)], ids=str)
def test_cuda_array_interface_describes_the_memory(device: Any) -> None:
    """SPEC X-HOST-4: version 3, fields as Numba's text has them."""
    data = {} if device[0] == 2 else {"data": bytes(100)}
    t = forge((3, 4), "float32", device=device, strides=(8, 2), byte_offset=8, flags=1, **data)
    i = t.__cuda_array_interface__
    assert (i["version"], i["shape"], i["typestr"], i["data"], i["strides"]) == (3, (3, 4), "<f4", (t.ptr, True), (32, 8))
    assert t.ptr == 0x7F0000001008 or device[0] == 13
    assert not forge((3,), device=(2, 0)).__cuda_array_interface__["data"][1]


def test_cuda_array_interface_of_every_numpy_dtype_has_numpys_typestr() -> None:
    """SPEC X-HOST-4"""
    for name in NUMPY_TYPES:
        assert forge((3,), name, device=(2, 0)).__cuda_array_interface__["typestr"] == np.dtype(name).str


def test_cuda_array_interface_says_the_stream_that_work_is_pending_on() -> None:
    """SPEC X-STREAM-4: a capsule says nothing of streams; a producer was asked to be ready on the one that was sent."""
    assert forge(device=(2, 0)).__cuda_array_interface__["stream"] is None
    assert interop.as_tensor(producer()).__cuda_array_interface__["stream"] == 1
    x = producer()
    t = interop.as_tensor(x, stream=0x1234)
    assert t.__cuda_array_interface__["stream"] == 0x1234 and x.calls[-1]["stream"] == 0x1234
    assert t[1:].__cuda_array_interface__["stream"] == 0x1234


def test_cuda_array_interface_of_an_empty_tensor_has_address_0() -> None:
    """SPEC X-HOST-4: "the pointer is 0 for zero-size arrays" (Numba's text)."""
    assert forge((0, 3), device=(2, 0), data=0).__cuda_array_interface__["data"][0] == 0
    assert forge((4, 3), device=(2, 0))[:0].__cuda_array_interface__["data"][0] == 0


@pytest.mark.parametrize(("dtype", "device"), [("float32", (1, 0)), ("float32", (3, 0)), ("float32", (10, 0)), ("float32", (7, 0)),
    ("bfloat16", (2, 0)),
                                               ("int4", (2, 0)), ("float32x2", (2, 0))])  # fmt: skip
def test_cuda_array_interface_is_absent_elsewhere(dtype: str, device: Any) -> None:
    """SPEC X-HOST-4"""
    assert not hasattr(forge((4,), dtype, device=device), "__cuda_array_interface__")
