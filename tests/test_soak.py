"""Long loops and foreign libraries: `make soak`. INTEROP_SOAK sets the number of conversions (1,000,000)."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import aligned, jnp, torch, tvm_ffi

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Forged, Producer, exchange_table

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
COUNT = int(os.environ.get("INTEROP_SOAK", "1000000"))
TABLE = exchange_table(interop.Tensor)


class Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2 returns, as far as it concerns us."""

    _fields_ = [*((f"unused{i}", ctypes.c_size_t) for i in range(7)), ("in_use", ctypes.c_size_t), ("rest", ctypes.c_size_t * 2)]


mallinfo2 = ctypes.CFUNCTYPE(Mallinfo2)(("mallinfo2", ctypes.CDLL(None)))


class Counts:
    """What a leak would move: references of what is shared, Python's blocks, C's bytes, and the process's pages."""

    def __init__(self, watched: list[Any]) -> None:
        shared = (None, True, 0, 1, interop.Tensor, interop.DType("float32"), interop.Device("cpu"), np.dtype("f4"), np.ndarray)
        self.watched = [*watched, *shared]

    def now(self) -> tuple[list[int], int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return [sys.getrefcount(x) for x in self.watched], sys.getallocatedblocks(), mallinfo2().in_use, pages

    def flat(self, work: Callable[[int], None], count: int) -> None:
        work(max(count // 50, 400))      # caches fill, arenas grow, and the forger keeps its last 256
        before = self.now()
        work(count)
        after = self.now()
        # What leaks, leaks with every conversion; None and the small numbers move a little by themselves
        more = [b - a for a, b in zip(before[0], after[0], strict=True)]
        assert max(more) < max(500, count // 10), more
        assert after[1] - before[1] < 2000, f"{after[1] - before[1]} Python blocks more"
        assert after[2] - before[2] < 2**20, f"{after[2] - before[2]} bytes of malloc more"
        assert after[3] - before[3] < 2**24, f"{after[3] - before[3]} bytes of memory more"


def repeated(convert: Callable[[Any], Any], x: Any) -> Callable[[int], None]:
    def work(n: int) -> None:
        for _ in range(n):
            convert(x)

    return work


def array() -> Any:
    return aligned(np.arange(8), np.float32)


SOURCES: dict[str, Callable[[], Any]] = {
    "numpy": array,
    "numpy, many dims": lambda: array().reshape((1,) * 12 + (8,)),
    "numpy subclass": lambda: array().view(type("Array", (np.ndarray,), {})),
    "interop": lambda: interop.as_tensor(array()),
    "torch": lambda: torch.arange(8.0),
    "jax": lambda: jnp.arange(8.0),
    "tvm_ffi": lambda: tvm_ffi.from_dlpack(array()),
    "buffer": lambda: bytearray(32),
    "read-only": lambda: bytes(32),
    "array interface": lambda: it.ArrayInterface((a := array()).__array_interface__, a),
}
TARGETS: dict[str, Callable[[Any], Any]] = {
    "as_tensor": interop.as_tensor,
    "from_dlpack": interop.from_dlpack,
    "numpy": lambda x: interop.to(x, "numpy"),
    "torch": lambda x: interop.to(x, "torch", readonly=True),
    "jax": lambda x: interop.to(x, "jax"),
    "np.asarray": lambda x: np.asarray(interop.as_tensor(x)),
}
#: What costs tens of microseconds is done less often, and still often enough to show a leak of one byte each.
SLOW = {"jax", "array interface"}


PAIRS = [(s, t) for s in SOURCES for t in TARGETS if not (t == "from_dlpack" and s in ("buffer", "read-only", "array interface"))]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_million_conversions_leave_nothing(source: str, target: str) -> None:
    """SPEC X-OWN-2, X-OWN-7, X-TO-9"""
    x = SOURCES[source]()
    count = COUNT // 10 if SLOW & {source, target} else COUNT
    Counts([x]).flat(repeated(TARGETS[target], x), count)


WIRES: dict[str, Callable[[Any], Any]] = {
    "versioned capsule, dropped": lambda t: t.__dlpack__(max_version=(1, 3)),
    "legacy capsule, dropped": lambda t: t.__dlpack__(),
    "versioned capsule, consumed": lambda t: interop.as_tensor(t.__dlpack__(max_version=(1, 3))),
    "legacy capsule, consumed": lambda t: interop.as_tensor(t.__dlpack__()),
    "np.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": lambda t: torch.from_dlpack(t),
    "memoryview": memoryview,
    "views": lambda t: t[None, ::-2][..., None].reshape(4, 1).permute(1, 0)[0, 1:].view("int32"),
    "copies": lambda t: interop.as_tensor(t, copy=True),
    "copied capsules": lambda t: t.__dlpack__(max_version=(1, 3), copy=True),
    "read-only": lambda t: interop.as_tensor(t, readonly=True),
    "attributes": lambda t: (t.shape, t.strides, t.dtype, t.device, t.nbytes, t.readonly, t.ptr),
}


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_million_exports_leave_nothing(wire: Any) -> None:
    """SPEC X-OWN-3"""
    a = array()
    Counts([a]).flat(repeated(wire, interop.as_tensor(a)), COUNT)


def test_many_exports_through_the_table_leave_nothing() -> None:
    """SPEC X-TABLE-3, X-TABLE-4, X-TABLE-6"""
    a = array()
    t = interop.as_tensor(a)

    def all_slots(_: Any) -> None:
        TABLE.to_py(TABLE.from_py(t))
        TABLE.to_py(TABLE.allocate((8,)))
        TABLE.borrow(t)

    Counts([a]).flat(repeated(all_slots, None), COUNT // 20)


def test_many_refusals_leave_nothing() -> None:
    """SPEC X-OWN-2"""
    forged = [Forged((2, -1)), Forged((1,) * 20, (99, 8, 1)), Forged(version=(2, 0)), Forged(device=(6, 0), version=None)]
    a = array()
    t = interop.as_tensor(a)

    def refuse(_: Any) -> None:
        for f in forged:
            try:
                interop.as_tensor(f.capsule())
            except ExchangeError:
                continue
            raise AssertionError(f)
        for keywords in ({"dl_device": (2, 0)}, {"stream": 7}, {"max_version": (-1, 0)}, {"copy": 3}):
            try:
                t.__dlpack__(**keywords)
            except (ExchangeError, ValueError, TypeError):
                continue
            raise AssertionError(keywords)

    Counts([a]).flat(repeated(refuse, None), COUNT // 100)
    assert all(f.made == f.deleted for f in forged)


def test_many_types_leave_nothing() -> None:
    """SPEC X-KW-8"""

    def learn(_: Any) -> None:
        interop.as_tensor(it.producer_type(("stream",), fresh=True)(Forged()))

    Counts([]).flat(repeated(learn, None), COUNT // 200)


def test_many_threads_for_long_leave_nothing() -> None:
    """SPEC X-LIFE-4, X-OWN-6"""
    a, forged = array(), Forged((8,))
    failures: list[BaseException] = []

    def work(n: int) -> None:
        def one() -> None:
            try:
                for _ in range(n // 8):
                    t = interop.as_tensor(a)
                    Capsule.of(t[1:], max_version=(1, 3)).consume().delete(gil=False)
                    interop.to(interop.as_tensor(Producer(forged)), "numpy")
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=one) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    Counts([a]).flat(work, COUNT // 20)
    assert failures == [] and forged.made == forged.deleted


# --- foreign libraries ------------------------------------------------------------------------------------------------


def shares(a: np.ndarray[Any, Any], look: Callable[[], Any]) -> None:
    """What is written into `a` is seen through `look`, twice, so that no copy made in between can pass."""
    for value in (7, 9):
        a.flat[1] = value
        assert np.asarray(look()).reshape(-1)[1] == value


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "float32", "float64"])
def test_pyarrow_both_ways(dtype: str) -> None:
    """SPEC X-KW-7, X-RO-1: arrow arrays are read-only."""
    pa = pytest.importorskip("pyarrow")
    column = pa.array(np.arange(9).astype(dtype))[2:]
    t = interop.as_tensor(column)
    assert (t.shape, t.dtype, t.readonly) == ((7,), dtype, True)
    assert t.ptr == column.buffers()[1].address + 2 * t.itemsize
    assert interop.to(column, "numpy").tolist() == column.to_pylist()
    with pytest.raises(ExchangeError, match="read-only"):
        interop.to(column, "torch", copy=False)
    del column
    assert interop.to(t, "numpy")[0] == 2      # arrow's memory lives on

    a = np.arange(6).astype(dtype)
    t = interop.as_tensor(a)
    buffer = pa.py_buffer(t)
    assert buffer.address == t.ptr and buffer.size == t.nbytes
    shares(a, lambda: np.frombuffer(buffer, dtype))
    for cls in (pa.Array, pa.Tensor):
        if hasattr(cls, "from_dlpack"):
            shares(a, cls.from_dlpack(t).to_numpy)


def test_pyarrow_refusals_are_its_own() -> None:
    """SPEC X-KW-3"""
    pa = pytest.importorskip("pyarrow")
    for column in (pa.array([1, None]), pa.array(["a"]), pa.array([True, False])):
        with pytest.raises((TypeError, ValueError, BufferError)):
            interop.as_tensor(column)
    for _ in range(1000):
        interop.as_tensor(pa.array([1, 2, 3]))
    pool = pa.total_allocated_bytes()
    for _ in range(10_000):
        interop.as_tensor(pa.array([1, 2, 3]))
    gc.collect()
    assert pa.total_allocated_bytes() <= pool


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float32", "float64", "bool"])
def test_onnxruntime_both_ways(dtype: str) -> None:
    """SPEC X-KW-7, X-TO-9"""
    ort = pytest.importorskip("onnxruntime")
    value = ort.OrtValue.ortvalue_from_numpy(np.ones((2, 3), dtype))
    t = interop.as_tensor(value)
    assert (t.shape, t.dtype, t.ptr) == ((2, 3), dtype, value.data_ptr())
    seen = interop.to(value, "numpy")
    seen[0, 1] = 0
    assert value.numpy()[0, 1] == 0
    del value
    assert seen.sum() == 5

    if hasattr(ort.OrtValue, "from_dlpack"):
        a = np.zeros((2, 3), dtype)
        t = interop.as_tensor(a)
        value = ort.OrtValue.from_dlpack(t)
        assert value.data_ptr() == t.ptr and tuple(value.shape()) == (2, 3)
        del t
        a[1, 1] = 1
        assert value.numpy()[1, 1] == 1


def test_onnxruntime_frees_what_it_took() -> None:
    """SPEC X-OWN-2"""
    ort = pytest.importorskip("onnxruntime")
    if not hasattr(ort.OrtValue, "from_dlpack"):
        pytest.skip("this onnxruntime has no OrtValue.from_dlpack")
    forged = Forged((8,))
    t = interop.as_tensor(forged.capsule())
    value = ort.OrtValue.from_dlpack(t)
    del t
    assert forged.deletions == (0,)
    del value
    gc.collect()
    assert forged.deletions == (1,)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "float16", "float32", "float64"])
def test_warp_both_ways(dtype: str) -> None:
    """SPEC X-KW-7, X-TO-9"""
    wp = pytest.importorskip("warp")
    wp.config.quiet = True
    x = wp.array(np.ones((3, 4), dtype), device="cpu")
    t = interop.as_tensor(x)
    assert (t.shape, t.dtype, t.device, t.ptr) == ((3, 4), dtype, "cpu", x.ptr)
    interop.to(x, "numpy")[1, 2] = 5
    assert x.numpy()[1, 2] == 5
    assert interop.to(x, torch.Tensor).data_ptr() == x.ptr

    a = np.zeros((3, 4), dtype)[::2]
    y = wp.from_dlpack(interop.as_tensor(a))
    assert y.ptr == a.ctypes.data and tuple(y.shape) == (2, 4)
    shares(a, lambda: y.numpy())


def test_warp_vectors_are_rows() -> None:
    """SPEC X-DT-5"""
    wp = pytest.importorskip("warp")
    x = wp.zeros(4, dtype=wp.vec3, device="cpu")
    assert interop.as_tensor(x).shape == (4, 3)


def test_drjit_both_ways() -> None:
    """SPEC X-KW-7, X-TO-9"""
    scalar = pytest.importorskip("drjit.scalar")
    x = scalar.TensorXf(np.ones((2, 3), np.float32))
    t = interop.as_tensor(x)
    assert (t.shape, t.dtype) == ((2, 3), "float32")
    assert interop.to(x, "numpy").tolist() == [[1.0] * 3] * 2
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    back = scalar.TensorXf(interop.as_tensor(a))
    assert interop.to(back, "numpy").tolist() == a.tolist()
    t = interop.as_tensor(scalar.ArrayXf([1, 2, 3]))      # its owner is gone at once
    gc.collect()
    assert interop.to(t, "numpy").tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool", "complex64"])
def test_tensorflow_both_ways(dtype: str) -> None:
    """SPEC X-KW-7, X-TO-9, X-DT-4"""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = pytest.importorskip("tensorflow")
    x = tf.cast(tf.constant([[1, 0, 1]] * 2), dtype)
    t = interop.as_tensor(x)
    assert (t.shape, t.dtype, t.device) == ((2, 3), dtype, "cpu")
    assert interop.to(x, "numpy").tolist() == x.numpy().tolist()
    assert interop.DType(x.dtype) == dtype

    a = aligned(np.ones(64), interop.DType(dtype).numpy_dtype)
    y = tf.experimental.dlpack.from_dlpack(interop.as_tensor(a).__dlpack__())
    a[1] = 0
    assert np.asarray(y)[1] == 0 and y.shape == (64,)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("pyarrow", lambda pa: pa.array(np.arange(8, dtype=np.float32))),
        ("onnxruntime", lambda ort: ort.OrtValue.ortvalue_from_numpy(np.arange(8, dtype=np.float32))),
        ("warp", lambda wp: wp.zeros(8, dtype=wp.float32, device="cpu")),
        ("drjit.scalar", lambda scalar: scalar.ArrayXf([1.0] * 8)),
        ("tensorflow", lambda tf: tf.ones(8)),
    ],
)
def test_many_conversions_of_foreign_objects_leave_nothing(name: str, make: Any) -> None:
    """SPEC X-OWN-2, X-OWN-7"""
    x = make(pytest.importorskip(name))
    Counts([x]).flat(repeated(interop.as_tensor, x), COUNT // 20)
    Counts([x]).flat(repeated(lambda x: interop.to(x, "numpy"), x), COUNT // 20)
