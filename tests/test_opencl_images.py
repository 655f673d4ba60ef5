"""OpenCL's images as tensors of a layout of their own. Real: PoCL and rusticl, the images made by the loader itself."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opencl_kit import collect, need_device, queue, references
from support import ROOT

import interop
from interop import ExchangeError
from interop.adapters import opencl as icl
from interop.adapters.opencl import copies, images, loader

cl = pytest.importorskip("pyopencl")
READ_WRITE, USE_HOST_PTR, HOST_WRITE_ONLY, HOST_READ_ONLY, HOST_NO_ACCESS = 1, 8, 128, 256, 512
D2, D3, D2_ARRAY, D1, D1_ARRAY, D1_BUFFER = 0x10F1, 0x10F2, 0x10F3, 0x10F4, 0x10F5, 0x10F6
R, RG, RGBA, BGRA = 0x10B0, 0x10B2, 0x10B5, 0x10B6
UNORM8, UINT8, INT16, UINT32, HALF, FLOAT = 0x10D2, 0x10DA, 0x10D8, 0x10DC, 0x10DD, 0x10DE


class Descriptor(ctypes.Structure):
    """cl_image_desc."""

    _fields_ = [("kind", ctypes.c_uint32), *((n, ctypes.c_size_t) for n in ("width", "height", "depth", "layers", "row", "slice")),
                ("levels", ctypes.c_uint32), ("samples", ctypes.c_uint32), ("over", ctypes.c_void_p)]


def make(queue: Any, size: tuple[int, ...] = (20, 10), *, order: int = RGBA, type: int = UINT8, kind: int = D2, layers: int = 0,
         flags: int = READ_WRITE, row: int = 0, over: Any = None, host: int | None = None) -> Any:
    """A pyopencl Image; skips where the driver has no such one."""
    create = ctypes.CDLL(cl._cl.__file__).clCreateImage
    create.restype, create.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint64, *[ctypes.c_void_p] * 4]
    width, height, depth = (*size, 0, 0)[:3]
    descriptor = Descriptor(kind, width, height, depth, layers, row, 0, 0, 0, None if over is None else over.int_ptr)
    code = ctypes.c_int32()
    out = create(queue.context.int_ptr, flags, (ctypes.c_uint32 * 2)(order, type), ctypes.byref(descriptor), host, ctypes.byref(code))
    if code.value:
        pytest.skip(f"clCreateImage says {code.value}")
    return cl.Image.from_int_ptr(out, False)


def pixels(*shape: int, dtype: Any = "uint8") -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(1, 100, shape).astype(str(dtype))


def back(t: Any) -> np.ndarray[Any, Any]:
    out = np.zeros(t.shape, str(t.dtype))
    interop.copyto(out, t).wait(10)
    return out


def numbers(queue: Any, a: np.ndarray[Any, Any]) -> Any:
    """A tensor over a cl_mem with these numbers."""
    t = interop.empty(a.shape, str(a.dtype), device=queue)
    interop.copyto(t, a).wait(10)
    return t


@pytest.fixture(params=["here", "apart"])
def where(request: pytest.FixtureRequest, queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The queue, also of a device that interop takes for one with memory of its own."""
    if request.param == "apart":
        for name in ("unified", "concurrent_host"):
            monkeypatch.setattr(icl.Context.of(queue), name, False)
    return queue


# ---- what it is ----
def test_an_image_is_a_tensor_of_its_own_layout(queue: Any) -> None:
    """O-IMAGE-TENSOR."""
    image = make(queue, (33, 17))
    t = interop.as_tensor(image)
    assert (t.shape, str(t.dtype), t.layout, t.strides, t.device.name) == ((17, 33, 4), "uint8", "cl-image", None, "opencl")
    n = icl.image_native(t)
    assert n[:6] == (image.int_ptr, D2, RGBA, UINT8, (33, 17, 1), 0) and n.row_pitch >= 33 * 4 and isinstance(n, icl.ImageNative)
    for other in (icl.wrap_image(image, queue=queue), icl.wrap_image(image.int_ptr, context=queue.context), interop.to(image, "interop")):
        assert other.allocation is t.allocation and other.shape == t.shape
    with pytest.raises(ExchangeError, match="no image"):
        icl.image_native(numbers(queue, pixels(4)))


@pytest.mark.parametrize(("kind", "size", "layers", "shape"), [
    (D1, (7,), 0, (7, 4)), (D2, (6, 5), 0, (5, 6, 4)), (D3, (6, 5, 3), 0, (3, 5, 6, 4)), (D2_ARRAY, (6, 5), 3, (3, 5, 6, 4)),
    (D1_ARRAY, (6,), 3, (3, 6, 4)), (D2, (1, 1), 0, (1, 1, 4)), (D2_ARRAY, (6, 5), 1, (1, 5, 6, 4))])
@pytest.mark.parametrize("cut", [False, True])
def test_images_of_every_kind(where: Any, kind: int, size: tuple[int, ...], layers: int, shape: tuple[int, ...], cut: bool) -> None:
    """O-IMAGE-TENSOR, O-IMAGE-COPY."""
    t = icl.wrap_image(make(where, size, kind=kind, layers=layers), queue=where)
    assert t.shape == shape
    wide = (slice(None), slice(None, None, -1), slice(1, -1))[-len(shape) + 1:] if cut else ...
    room = tuple(n + 2 * cut if i == len(shape) - 2 else n for i, n in enumerate(shape))
    a = pixels(*room)
    interop.copyto(t, a[wide]).wait(10)
    np.testing.assert_array_equal(back(t), a[wide])
    out = np.zeros(room, np.uint8)
    interop.copyto(out[wide], t)
    assert np.array_equal(out[wide], a[wide]) and out.astype(int).sum() == a[wide].astype(int).sum()
    b = numbers(where, np.zeros(room, np.uint8))
    part = b[wide]
    interop.copyto(part, t).wait(10)
    np.testing.assert_array_equal(back(b), out)
    other = icl.wrap_image(make(where, size, kind=kind, layers=layers), queue=where)
    interop.copyto(other, part).wait(10)
    np.testing.assert_array_equal(back(other), a[wide])


@pytest.mark.parametrize("use", [lambda t: t[0], lambda t: t.reshape(-1), lambda t: t.permute(2, 0, 1), lambda t: t.map().value,
                                 lambda t: interop.to(t, "numpy"), lambda t: t.__dlpack__(), lambda t: t.view("int8"), icl.native,
                                 lambda t: interop.to(t, "opencl"), lambda t: interop.to(t, "opencl", copy=True),
                                 lambda t: icl.native(t.allocation.tensor((4,), "uint8")),
                                 lambda t: t.allocation.tensor((4,), "uint8").map("read").value,
                                 lambda t: interop.copyto(np.zeros(4, np.uint8), t.allocation.tensor((4,), "uint8")),
                                 lambda t: interop.to(t.allocation.tensor((4,), "uint8"), "numpy"),
                                 lambda t: interop.to(t.allocation.tensor((4,), "uint8"), "opencl"),
                                 lambda t: icl.wrap(t.handle, context=t.device)])
def test_nothing_but_copyto_sees_the_texels(queue: Any, use: Callable[[Any], Any]) -> None:
    """O-IMAGE-STRIDED."""
    t = interop.as_tensor(make(queue))
    with pytest.raises((ExchangeError, BufferError)):
        use(t)


def test_an_image_is_no_buffer_and_a_buffer_no_image(queue: Any) -> None:
    """O-IMAGE-STRIDED."""
    with pytest.raises(ExchangeError, match="wrap_image"):
        icl.wrap(make(queue), context=queue)
    with pytest.raises(ExchangeError, match="is no image"):
        icl.wrap_image(cl.Buffer(queue.context, READ_WRITE, 64))
    with pytest.raises(TypeError, match="context="):
        icl.wrap_image(make(queue).int_ptr)
    for wrong, error in ((True, TypeError), ("x", TypeError), (7, ValueError)):
        with pytest.raises(error):
            icl.wrap_image(wrong, context=queue)
    with pytest.raises(ExchangeError, match="no memory of this cl_context"):
        icl.Kernel("__kernel void f(__global uchar *x) { x[0] = 0; }", "f", device=queue)(make(queue), size=1)


@pytest.mark.parametrize(("order", "type", "element", "expected"), [
    (R, UNORM8, 1, ("uint8", 1)), (0x10B1, 0x10D0, 1, ("int8", 1)), (RG, INT16, 4, ("int16", 2)), (RGBA, HALF, 8, ("float16", 4)),
    (0x10C2, UNORM8, 4, ("uint8", 4)), (0x10BD, FLOAT, 4, ("float32", 1)), (0x10B8, FLOAT, 4, ("float32", 1)),
    (0x10C3, UINT8, 4, ("uint8", 4)), (0x10B4, 0x10D4, 2, "CL_RGB, CL_UNORM_SHORT_565"), (0x10B4, 0x10D6, 4, "UNORM_INT_101010"),
    (0x10BE, 0x10DF, 4, "DEPTH_STENCIL"), (0x10BC, UNORM8, 4, "RGBx"), (0x10B4, UNORM8, 4, "CL_RGB, CL_UNORM_INT8 of 4"),
    (0x1234, UINT8, 1, "0x1234"), (R, 0x4321, 1, "0x4321")])
def test_formats_are_elements_or_refused_by_name(order: int, type: int, element: int, expected: Any) -> None:
    """O-IMAGE-FORMAT."""
    if isinstance(expected, tuple):
        assert images.elements_of(order, type, element) == expected
    else:
        with pytest.raises(ExchangeError, match=expected):
            images.elements_of(order, type, element)


def test_a_refused_format_leaves_nothing(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-IMAGE-FORMAT, O-IMAGE-LIFE. Neither platform has such a format: one is said to be."""
    monkeypatch.setitem(images._TYPES, UINT8, ("UNSIGNED_INT8", ""))
    image = make(queue)
    for _ in range(2):
        with pytest.raises(ExchangeError, match="CL_RGBA, CL_UNSIGNED_INT8"):
            interop.as_tensor(image)
    assert references(image) == 1 and image.int_ptr not in icl.Context.of(queue).store.mems


@pytest.mark.parametrize(("order", "type"), [(R, UNORM8), (RG, UINT8), (RGBA, INT16), (R, UINT32), (RGBA, FLOAT), (RGBA, HALF),
                                             (BGRA, UNORM8)])
def test_the_host_and_an_image(where: Any, order: int, type: int) -> None:
    """O-IMAGE-COPY, O-IMAGE-FORMAT."""
    t = interop.as_tensor(make(where, (13, 7), order=order, type=type))
    a = pixels(*t.shape, dtype=t.dtype)
    interop.copyto(t, a).wait(10)
    np.testing.assert_array_equal(back(t), a)


CUTS = [lambda x: x, lambda x: x[::2], lambda x: x[:, 3:23], lambda x: x[::-1], lambda x: x[:, :20, ::-1], lambda x: x[1:2, :1]]


@pytest.mark.parametrize("cut", CUTS)
def test_any_strides_on_the_host_and_in_a_buffer(where: Any, cut: Callable[[Any], Any]) -> None:
    """O-IMAGE-COPY."""
    a = pixels(40, 40, 4)
    part = cut(a)
    t = interop.as_tensor(make(where, part.shape[1::-1]))
    interop.copyto(t, part).wait(10)
    out, b = np.zeros_like(a), numbers(where, np.zeros_like(a))
    interop.copyto(cut(out), t)
    interop.copyto(cut(b), t).wait(10)
    for got in (out, back(b)):
        assert np.array_equal(cut(got), part) and got.astype(int).sum() == part.astype(int).sum()
    u = interop.as_tensor(make(where, part.shape[1::-1]))
    interop.copyto(u, cut(numbers(where, a))).wait(10)
    np.testing.assert_array_equal(back(u), part)


def test_a_row_that_is_said_many_times(queue: Any) -> None:
    """O-IMAGE-COPY."""
    row = pixels(1, 20, 4)
    t = interop.as_tensor(make(queue))
    interop.copyto(t, np.broadcast_to(row, t.shape)).wait(10)
    np.testing.assert_array_equal(back(t), np.broadcast_to(row, t.shape))


def test_bytes_that_do_not_begin_on_a_texel(queue: Any) -> None:
    """O-IMAGE-COPY."""
    a = pixels(1 + 800)
    t, raw = interop.as_tensor(make(queue)), numbers(queue, a)
    interop.copyto(t, raw[1:].reshape(10, 20, 4)).wait(10)
    np.testing.assert_array_equal(back(t).ravel(), a[1:])
    interop.copyto(raw[:800].reshape(10, 20, 4), t).wait(10)
    np.testing.assert_array_equal(back(raw), np.append(a[1:], a[-1:]))


def test_many_runs(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-IMAGE-COPY."""
    monkeypatch.setattr(copies, "RECTS", 8)
    a = pixels(10, 20, 4)
    t, b = interop.as_tensor(make(where)), numbers(where, np.zeros((10, 20, 8), np.uint8))
    interop.copyto(t, a).wait(10)
    interop.copyto(b[:, :, ::-2], t).wait(10)
    want = np.zeros((10, 20, 8), np.uint8)
    want[:, :, ::-2] = a
    np.testing.assert_array_equal(back(b), want)
    u = interop.as_tensor(make(where))
    interop.copyto(u, b[:, :, ::-2]).wait(10)
    np.testing.assert_array_equal(back(u), a)


def test_between_images(queue: Any) -> None:
    """O-IMAGE-COPY."""
    a = pixels(3, 9, 8, 4)
    t, same, other, array = (interop.as_tensor(make(queue, (8, 9, 3), kind=D3, type=type, order=order) if order else
                                               make(queue, (8, 9), kind=D2_ARRAY, layers=3))
                             for type, order in ((UINT8, RGBA), (UINT8, RGBA), (UNORM8, BGRA), (0, 0)))
    interop.copyto(t, a).wait(10)
    interop.copyto(same, t).wait(10)
    interop.copyto(other, same).wait(10)
    interop.copyto(array, other).wait(10)
    interop.copyto(t, t).wait(10)
    for x in (t, same, other, array):
        np.testing.assert_array_equal(back(x), a)


def test_shape_and_dtype_are_those_of_the_image(queue: Any) -> None:
    """O-IMAGE-COPY."""
    t = interop.as_tensor(make(queue))
    for wrong in (pixels(20, 10, 4), pixels(10, 20, 4, dtype="int8"), pixels(10, 20)):
        with pytest.raises(ValueError, match=r"shape|dtype"):
            interop.copyto(t, wrong)


def test_two_contexts(queue: Any) -> None:
    """O-IMAGE-CONTEXT."""
    other = cl.CommandQueue(cl.Context([queue.device]))
    image = make(queue)
    t, u, b = interop.as_tensor(image), interop.as_tensor(make(other)), numbers(other, pixels(10, 20, 4))
    interop.copyto(t, pixels(10, 20, 4)).wait(10)
    for to, source in ((u, t), (b, t), (t, b)):
        with pytest.raises(ExchangeError, match="is an image"):
            interop.copyto(to, source)
    np.testing.assert_array_equal(back(t), pixels(10, 20, 4))            # nothing was spoiled
    np.testing.assert_array_equal(back(b), pixels(10, 20, 4))
    for said in ({"context": other.context}, {"queue": other}, {"context": queue, "queue": other}):
        with pytest.raises(ExchangeError, match="another cl_context"):
            icl.wrap_image(image, **said)
    with pytest.raises(ExchangeError, match="another cl_context"):
        interop.copyto(t, pixels(10, 20, 4), stream=other)


# ---- order ----
def gate_on(queue: Any) -> tuple[Any, Any]:
    """A user event, and an event that waits for it."""
    gate = cl.UserEvent(queue.context)
    return gate, cl.enqueue_marker(queue, wait_for=[gate])


@pytest.mark.parametrize("properties", [0, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_a_copy_comes_after_what_is_pending(queue: Any, properties: int, strided: bool) -> None:
    """O-IMAGE-ORDER."""
    try:
        on = cl.CommandQueue(queue.context, queue.device, properties)
    except cl.Error as e:
        pytest.skip(str(e))
    t, a = icl.wrap_image(make(queue), queue=on), pixels(10, 20, 4)
    b = numbers(queue, np.zeros((10, 20, 8), np.uint8))[..., ::2] if strided else numbers(queue, np.zeros_like(a))
    interop.copyto(t, a).wait(10)
    gate = cl.UserEvent(queue.context)
    with interop.acquire(t, icl.Context.of(queue), "write") as lease:
        assert lease is not None
        done = cl.enqueue_fill_image(queue, cl.Image.from_int_ptr(t.handle, True), np.full(4, 7, np.uint32), (0, 0, 0), (20, 10, 1),
                                     wait_for=[gate])
    from interop.adapters.opencl import queues
    from interop.contract import note

    note(t, "write", queues.point_of(loader.driver(), done.int_ptr, queue.context.int_ptr))
    lease = interop.acquire(t, icl.Context.of(queue), "read")
    assert lease.value.layout == "cl-image" and not lease.after.done()
    lease.release()
    copied = interop.copyto(b, t)
    same = interop.copyto(t, t)
    assert not copied.done() and not same.done()
    gate.set_status(cl.command_execution_status.COMPLETE)
    copied.wait(10)
    assert (back(b) == 7).all() and (back(t) == 7).all()


def test_the_host_waits_too(queue: Any) -> None:
    """O-IMAGE-ORDER."""
    import threading

    t, b = interop.as_tensor(make(queue)), numbers(queue, pixels(10, 20, 4))
    interop.copyto(t, np.zeros((10, 20, 4), np.uint8)).wait(10)
    gate, event = gate_on(queue)
    from interop.adapters.opencl import queues
    from interop.contract import note

    note(b, "write", queues.point_of(loader.driver(), event.int_ptr, queue.context.int_ptr))
    copied = interop.copyto(t, b)
    assert not copied.done()
    timer = threading.Timer(0.1, lambda: gate.set_status(cl.command_execution_status.COMPLETE))
    timer.start()
    np.testing.assert_array_equal(back(t), pixels(10, 20, 4))
    timer.join()


def test_a_copy_goes_to_the_queue_that_was_said(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-IMAGE-ORDER."""
    seen: list[int] = []
    real = copies.submit
    monkeypatch.setattr(copies, "submit", lambda c, q, *rest: (seen.append(q), real(c, q, *rest))[1])
    image, second = make(queue), cl.CommandQueue(queue.context)
    t = interop.as_tensor(image)
    interop.copyto(t, pixels(10, 20, 4))
    icl.wrap_image(image, queue=queue)
    interop.copyto(t, pixels(10, 20, 4))
    interop.copyto(t, pixels(10, 20, 4), stream=second)
    assert seen == [icl.Context.of(queue).queue, queue.int_ptr, second.int_ptr]


# ---- other memory, flags, life ----
@pytest.mark.parametrize("kind", [D1_BUFFER, D2])
def test_an_image_over_a_buffer(queue: Any, kind: int) -> None:
    """O-IMAGE-SHARED."""
    b = numbers(queue, pixels(64 * 4 * 4))
    over = cl.Buffer.from_int_ptr(b.handle, True)
    t = interop.as_tensor(make(queue, (64,) if kind == D1_BUFFER else (64, 4), kind=kind, over=over, row=0 if kind == D1_BUFFER else 256))
    first = pixels(64 * 4 * 4)[:t.size].reshape(t.shape)
    np.testing.assert_array_equal(back(t), first)
    with interop.acquire(b, icl.Context.of(queue), "write"), pytest.raises(interop.LeaseError):
        interop.copyto(t, first)
    part = b[4:4 + t.size].reshape(t.shape) if t.size < 1000 else b.reshape(t.shape)[:, ::-1]
    want = pixels(64 * 4 * 4)
    (want[4:4 + t.size].reshape(t.shape) if t.size < 1000 else want.reshape(t.shape)[:, ::-1])[...] = first
    interop.copyto(part, t).wait(10)
    np.testing.assert_array_equal(back(b), want)
    interop.copyto(t, numbers(queue, np.ascontiguousarray(first[..., ::-1]))).wait(10)
    np.testing.assert_array_equal(back(t), first[..., ::-1])
    u = interop.as_tensor(make(queue, (64,) if kind == D1_BUFFER else (64, 4), kind=D1 if kind == D1_BUFFER else D2))
    interop.copyto(u, t).wait(10)
    np.testing.assert_array_equal(back(u), first[..., ::-1])


def test_an_image_over_the_host_s_memory(queue: Any) -> None:
    """O-IMAGE-SHARED."""
    raw = np.zeros(10 * 20 * 4 + 4096, np.uint8)
    h = raw[-raw.ctypes.data % 4096:][:800].reshape(10, 20, 4)
    h[...] = a = pixels(10, 20, 4)
    image = make(queue, flags=READ_WRITE | USE_HOST_PTR, host=h.ctypes.data)
    t = icl.wrap_image(image, owner=raw)
    np.testing.assert_array_equal(back(t), a)
    interop.copyto(t, h[::-1]).wait(10)
    np.testing.assert_array_equal(back(t), a[::-1])


@pytest.mark.parametrize(("flag", "reads", "writes"), [(HOST_NO_ACCESS, False, False), (HOST_READ_ONLY, True, False),
                                                       (HOST_WRITE_ONLY, False, True)])
def test_images_that_forbid_the_host(queue: Any, flag: int, reads: bool, writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-IMAGE-FLAGS."""
    t, a = interop.as_tensor(make(queue, flags=READ_WRITE | flag)), pixels(10, 20, 4)
    b, u, out = numbers(queue, a), interop.as_tensor(make(queue)), np.zeros_like(a)
    monkeypatch.setattr(copies, "RECTS", 1)
    interop.copyto(t, b[:, ::-1]).wait(10)
    for allowed, to, source in ((reads, out, t), (writes, t, np.ascontiguousarray(a[:, ::-1]))):
        if allowed:
            interop.copyto(to, source).wait(10)
        else:
            with pytest.raises(ExchangeError, match="forbid the host"):
                interop.copyto(to, source)
    interop.copyto(u, t).wait(10)
    np.testing.assert_array_equal(back(u), a[:, ::-1])


def test_a_read_only_tensor_is_not_written(queue: Any) -> None:
    """O-IMAGE-FLAGS."""
    image = make(queue)
    t = icl.wrap_image(image, readonly=True)
    with pytest.raises(ExchangeError, match="read-only"):
        interop.copyto(t, pixels(10, 20, 4))
    interop.copyto(interop.as_tensor(image), pixels(10, 20, 4)).wait(10)
    np.testing.assert_array_equal(back(t), pixels(10, 20, 4))


class Owner:
    pass


def test_nothing_is_left(queue: Any) -> None:
    """O-IMAGE-LIFE."""
    image, owner = make(queue), Owner()
    seen, mems = weakref.ref(owner), icl.Context.of(queue).store.mems
    b = numbers(queue, pixels(10, 20, 4))
    before = set(mems)
    t = icl.wrap_image(image, queue=queue, owner=owner)
    for _ in range(10):
        interop.copyto(icl.wrap_image(image.int_ptr, context=queue), b[:, ::-1]).wait(10)
        interop.copyto(b[:, ::-1], interop.as_tensor(image)).wait(10)
        back(t)
    assert references(image) == 2
    del owner, t
    queue.finish()
    collect()
    assert set(mems) == before and references(image) == 1 and seen() is not None
    del image
    collect()
    assert seen() is None


def test_a_reference_is_taken_over(queue: Any) -> None:
    """O-IMAGE-LIFE."""
    image = make(queue)
    loader.driver().clRetainMemObject(image.int_ptr)
    t = icl.wrap_image(image.int_ptr, context=queue, retain=False)
    assert references(image) == 2
    del t
    collect()
    assert references(image) == 1


def test_a_closed_image(queue: Any) -> None:
    """O-IMAGE-LIFE."""
    t = interop.as_tensor(make(queue))
    t.allocation.close()
    for use in (icl.image_native, back):
        with pytest.raises(ExchangeError):
            use(t)


FORK = """
import os, warnings, numpy as np, pyopencl as cl, interop
warnings.simplefilter('ignore')
from interop.adapters import opencl
q = cl.CommandQueue(cl.create_some_context(interactive=False))
image = cl.Image(q.context, 1, cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.UNSIGNED_INT8), shape=(20, 10))
t, a = interop.as_tensor(image), np.ones((10, 20, 4), np.uint8)
interop.copyto(t, a).wait(10)
pid = os.fork()
if pid == 0:
    try:
        for f in (lambda: interop.copyto(a, t), lambda: opencl.image_native(t), lambda: opencl.wrap_image(image)):
            try:
                f()
                os._exit(2)
            except interop.ExchangeError as e:
                assert 'fork' in str(e), e
        del t
        os._exit(0)
    except BaseException as e:
        print(e, flush=True)
        os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), interop.copyto(a, t).done())
"""


def test_a_forked_child_owns_no_image() -> None:
    """O-IMAGE-LIFE."""
    need_device("pocl")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stdout.split() == ["0", "True"], done.stdout + done.stderr
