"""cl_mem images as tensors of layout "cl-image": what they are, and copies of them. How texels lie is the driver's to know.

Nothing but `interop.copyto` moves their texels; views, maps and exports of such a tensor are refused. Knows no pyopencl beside its Image.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from interop.contract import ExchangeError, Point, keep_until, opaque_tensor, pending

from ..strided import host_move, plan
from . import copies, loader, maps, memory, queues
from .context import HOST_TIMEOUT, Context
from .memory import Mem

if TYPE_CHECKING:
    from interop import Tensor

LAYOUT = "cl-image"
_D2, _D3, _D2_ARRAY, _D1, _D1_ARRAY, _D1_BUFFER = 0x10F1, 0x10F2, 0x10F3, 0x10F4, 0x10F5, 0x10F6
_FORMAT, _ELEMENT, _ROW, _SLICE, _WIDTH, _HEIGHT, _DEPTH, _LAYERS, _SAMPLES = (*range(0x1110, 0x1118), 0x111A)
#: cl_channel_order -> its name, from CL_R on.
_ORDERS = dict(enumerate(("R", "A", "RG", "RA", "RGB", "RGBA", "BGRA", "ARGB", "INTENSITY", "LUMINANCE", "Rx", "RGx", "RGBx", "DEPTH",
                          "DEPTH_STENCIL", "sRGB", "sRGBx", "sRGBA", "sBGRA", "ABGR"), 0x10B0))
_SINGLE = {"INTENSITY": 1, "LUMINANCE": 1, "DEPTH": 1}
#: cl_channel_type -> its name and dtype; "" where a channel is no element of its own.
_TYPES = {0x10D0: ("SNORM_INT8", "int8"), 0x10D1: ("SNORM_INT16", "int16"), 0x10D2: ("UNORM_INT8", "uint8"),
          0x10D3: ("UNORM_INT16", "uint16"), 0x10D4: ("UNORM_SHORT_565", ""), 0x10D5: ("UNORM_SHORT_555", ""),
          0x10D6: ("UNORM_INT_101010", ""), 0x10D7: ("SIGNED_INT8", "int8"), 0x10D8: ("SIGNED_INT16", "int16"),
          0x10D9: ("SIGNED_INT32", "int32"), 0x10DA: ("UNSIGNED_INT8", "uint8"), 0x10DB: ("UNSIGNED_INT16", "uint16"),
          0x10DC: ("UNSIGNED_INT32", "uint32"), 0x10DD: ("HALF_FLOAT", "float16"), 0x10DE: ("FLOAT", "float32"),
          0x10DF: ("UNORM_INT24", ""), 0x10E0: ("UNORM_INT_101010_2", "")}  # fmt: skip


class ImageNative(NamedTuple):
    """A tensor's image as OpenCL's calls take it.

    Attributes:
        handle: cl_mem.
        kind: CL_MEM_OBJECT_IMAGE2D and its like.
        order, type: cl_channel_order and cl_channel_type of its cl_image_format.
        extent: (width, height, depth) in texels, 1 where it has no such dimension.
        layers: images of an array; 0 for all else.
        row_pitch, slice_pitch: CL_IMAGE_ROW_PITCH and _SLICE_PITCH in bytes, as the driver says them; it alone reads by them.
    """

    handle: int
    kind: int
    order: int
    type: int
    extent: tuple[int, int, int]
    layers: int
    row_pitch: int
    slice_pitch: int


class Image(Mem):
    """What is known of a cl_mem that is an image.

    Attributes:
        native: `ImageNative`.
        dtype, channels, texel: of its elements; how many make a texel, and the bytes of one.
        over: the cl_mem that it is over; 0: none. shared: its texels may be bytes of that one's, or of the host's.
    """

    __slots__ = ("channels", "dtype", "native", "over", "shared", "texel")

    def __init__(self, context: Context, native: ImageNative, nbytes: int, flags: int, element: int, over: int) -> None:
        """ExchangeError for a format whose texels are no elements; then nothing is known."""
        self.native, self.over, self.shared, self.texel = native, over, bool(over or flags & memory.USE_HOST_PTR), element
        self.dtype, self.channels = elements_of(native.order, native.type, element)
        super().__init__(context, native.handle, nbytes, flags)

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers of an array) (depth of a 3D image) (height, where it is not 1D) width, channels."""
        (width, height, depth), kind = self.native.extent, self.native.kind
        first = (self.native.layers,) if kind in (_D1_ARRAY, _D2_ARRAY) else (depth,) if kind == _D3 else ()
        return (*first, *(() if kind in (_D1, _D1_ARRAY, _D1_BUFFER) else (height,)), width, self.channels)

    @property
    def region(self) -> tuple[int, int, int]:
        """All of it, as commands take it."""
        width, height, depth = self.native.extent
        layers = self.native.layers
        return (width, layers, 1) if self.native.kind == _D1_ARRAY else (width, height, max(layers, depth))


def elements_of(order: int, type: int, element: int) -> tuple[str, int]:
    """``(dtype, channels)`` of a cl_image_format whose texels have `element` bytes, channels in memory's order.

    Raises ExchangeError with the format's name: its texels are no elements of one dtype (OpenCL, Image Format Descriptor).
    """
    name, (kind, dtype) = _ORDERS.get(order, f"{order:#x}"), _TYPES.get(type, (f"{type:#x}", ""))
    channels = _SINGLE.get(name, len(name.removeprefix("s")))
    bits = int("".join(c for c in dtype if c.isdigit()) or 0)
    if not dtype or "x" in name or name == "DEPTH_STENCIL" or channels * bits != element * 8:
        raise ExchangeError(f"image format CL_{name}, CL_{kind} of {element} bytes: its texels are no elements of one dtype",
                            "formats with equal channels of 8, 16 or 32 bits can be tensors")
    return dtype, channels


def wrap_image(image: Any, *, context: Any = None, queue: Any = None, owner: Any = None, retain: bool = True,
               readonly: bool = False) -> Tensor:
    """A cl_mem image of the application's as a tensor of shape (height, width, channels), mip level 0 (OpenCL, Image Objects).

    The height is missing in 1D images; the layers of an array and the depth of a 3D image come first. `interop.copyto` copies it.

    Args:
        image: pyopencl's Image, or a cl_mem as int, which is trusted.
        context: of the cl_mem: a pyopencl Context or CommandQueue, or a Context; needed for an int without a queue.
        queue: pyopencl's CommandQueue that it is used on, which interop's copies then use too.
        owner: kept until the cl_mem is destroyed, also where others hold that.
        retain: False: takes over the caller's reference.
        readonly: nobody copies into it through this tensor.

    Raises:
        ExchangeError: it is of another cl_context; it is no image; a format whose texels are no elements of one dtype; several samples.
        TypeError, ValueError: what cannot be a cl_mem.
    """
    handle = memory.handle_of(image)
    place = next((p for p in (context, queue) if p is not None), None)
    if place is None:
        if not hasattr(image, "get_info"):
            raise TypeError("a cl_mem as int says no context: wrap_image(image, context=...)")
        place = image.get_info(loader.module().mem_info.CONTEXT)
    c = Context.of(queue if queue is not None else place)
    if c.handle != Context.of(place).handle:
        raise ExchangeError("queue and context: the queue is of another cl_context")
    c.check()
    keep, theirs = _behind(image)
    keeps = [k for k in (keep, owner) if k is not None]
    with c.store.lock:
        a = c.store.allocations.get(handle)
        found = memory.known(a) if a is not None and not a.is_closed else None
        if a is None or not isinstance(found, Image):
            memory.check_home(c, handle)
            found, more = _read(c, handle, queue)
            a = memory.enter(found, queue=queue, owner=owner if owner is not None else None if isinstance(image, int) else image, **more)
        found.seen_with(queue)
        for k in keeps:
            memory.keep_for(c, handle, k)
        if not retain:
            c.driver.clReleaseMemObject(handle)
    locked = readonly or theirs
    return opaque_tensor(a, found.shape, found.dtype, LAYOUT, readonly=locked)


def _behind(image: Any) -> tuple[Any, bool]:
    """`arrays.behind`; nothing of an int."""
    if isinstance(image, int):
        return None, False
    from . import arrays

    return arrays.behind(image)


def _read(c: Context, handle: int, queue: Any) -> tuple[Image, dict[str, Any]]:
    """What the driver says of an image, which is retained; and what its Allocation shares with that of the buffer that it is over."""
    kind = memory.ask(c, handle, memory.TYPE, ctypes.c_uint32)
    if kind not in (_D2, _D3, _D2_ARRAY, _D1, _D1_ARRAY, _D1_BUFFER):
        raise ExchangeError(f"the cl_mem {handle:#x} is no image (CL_MEM_TYPE {kind:#x})", "opencl.wrap(mem, context=...) takes a buffer")

    def say(what: int, number: Any = ctypes.c_size_t) -> int:
        return loader.info(c.driver.clGetImageInfo, handle, what, number, "clGetImageInfo") or 0

    if (samples := say(_SAMPLES, ctypes.c_uint32)) > 1:
        raise ExchangeError(f"the image {handle:#x} has {samples} samples a texel: no command copies those", "resolve it in a kernel")
    form = say(_FORMAT, ctypes.c_uint64)            # cl_image_format: two cl_uint
    width = say(_WIDTH)
    height = say(_HEIGHT) if kind in (_D2, _D3, _D2_ARRAY) else 1       # elsewhere drivers say 0, or 1
    depth = say(_DEPTH) if kind == _D3 else 1
    layers = say(_LAYERS) if kind in (_D1_ARRAY, _D2_ARRAY) else 0
    native = ImageNative(handle, kind, form & 0xFFFFFFFF, form >> 32, (width, height, depth), layers, say(_ROW), say(_SLICE))
    nbytes, flags = memory.ask(c, handle, memory.SIZE), memory.ask(c, handle, memory.FLAGS, ctypes.c_uint64)
    parent = memory.ask(c, handle, memory.PARENT, ctypes.c_void_p)
    more: dict[str, Any] = {}
    element = say(_ELEMENT)
    elements_of(native.order, native.type, element)
    if parent:                              # the leases and Points of the bytes that it is over
        over = memory.ask(c, parent, memory.TYPE, ctypes.c_uint32) == memory.BUFFER
        root = memory.wrap_handle(c, parent, queue=queue) if over else wrap_image(parent, context=c).allocation
        nbytes = min(nbytes, root.nbytes)
        more = {"root": root, "root_offset": 0, "lent": True}
    loader.check(c.driver.clRetainMemObject(handle), "clRetainMemObject")
    return Image(c, native, nbytes, flags, element, parent), more


# ---- of a tensor ----
def find(t: Tensor) -> Image | None:
    """The Image behind a tensor; None: it has none."""
    found = memory.known(t.allocation) if t.layout == LAYOUT else None
    return found if isinstance(found, Image) else None


def image_native(tensor: Tensor) -> ImageNative:
    """What kernels and commands take of an image. Nothing is ordered or kept: `interop.acquire` does that.

    Raises ExchangeError: the tensor is no image of OpenCL's; its memory is closed, or was made before a fork.
    """
    found = find(tensor)
    if found is None:
        raise ExchangeError(f"{tensor!r} is no image of OpenCL's", "opencl.wrap_image(image) makes one a tensor")
    tensor.allocation.check()
    found.context.check()
    return found.native


# ---- copies ----
def copy(dst: Tensor, src: Tensor, stream: Any) -> Point | Any:
    """`copies.copy` where one side or both are images: with the host, with buffers and images of the cl_context, any strides there.

    NotImplemented: of two cl_contexts, or flags forbid the host; nobody else can then, and `maps.map_allocation` says why.
    """
    sides: list[Mem | None] = []
    for t in (dst, src):
        m = find(t) if t.layout == LAYOUT else memory.find(t.allocation) if t.layout == "strided" and t.device.name == "opencl" else None
        if m is None and (t.layout != "strided" or t.device.name == "opencl"):
            return NotImplemented
        sides.append(m)
    to, source = sides
    there = [m for m in sides if m is not None]
    c = there[0].context
    if there[-1].context.handle != c.handle:
        return NotImplemented
    c.check()
    if (to is None and maps.forbids(there[0], "read")) or (source is None and maps.forbids(there[0], "write")):
        return NotImplemented
    for m, write in ((to, True), (source, False)):
        if m is not None:
            memory.check_unmapped(m, write)
    queue = copies.queue_for(c, stream, sorted(there, key=lambda m: not isinstance(m, Image)))
    before = pending(dst, "write"), pending(src, "read")        # held: their events are valid as long as they are there
    waits = [e for p in before for e in queues.split(p, c.handle, HOST_TIMEOUT)]
    if to is source:
        return copies.submit(c, queue, waits, iter(()))
    if isinstance(to, Image):
        if isinstance(source, Image):
            return copies.submit(c, queue, waits, _between(c, queue, to, source, dst.nbytes))
        if source is not None:
            return _with_buffer(queue, waits, to, source, src, True)
        _send(queue, waits, to, src)
        return None
    assert isinstance(source, Image)
    if to is not None:
        return _with_buffer(queue, waits, source, to, dst, False)
    _receive(queue, waits, source, dst)
    return None


def _packed(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1:]) for i in range(len(shape))]


def _pitches(image: Image, t: Tensor) -> tuple[int, int] | None:
    """``(row_pitch, slice_pitch)`` that say how a tensor of the host's lies; None: there are none (OpenCL, clEnqueueReadImage)."""
    if t.is_contiguous():
        return 0, 0
    width, height, depth = image.region
    row = width * image.channels
    if image.native.kind not in (_D2, _D3, _D2_ARRAY) or (image.channels > 1 and t.strides[-1] != 1) \
            or (width > 1 and t.strides[-2] != image.channels):
        return None
    row_step = t.strides[-3] if height > 1 else row
    slice_step = t.strides[0] if depth > 1 else row_step * height
    if row_step < row or slice_step < row_step * height:
        return None
    return row_step * t.itemsize, slice_step * t.itemsize if image.native.kind != _D2 else 0


def _hosted(queue: int, image: Image, pitches: tuple[int, int], address: int, writes: bool) -> Iterator[int]:
    driver = image.context.driver
    f = driver.clEnqueueWriteImage if writes else driver.clEnqueueReadImage
    yield f(queue, image.handle, 0, _origin(), loader.sizes(*image.region), *pitches, address, 0, None, None)


def _origin() -> Any:
    """The first texel: of mip level 0, which is the number behind the last coordinate."""
    return loader.sizes(0, 0, 0, 0)


def _wait(done: Point, *kept: Any) -> None:
    try:
        done.wait(HOST_TIMEOUT)
    except TimeoutError:
        keep_until(done, *kept)             # the queue still has them
        raise


def _send(queue: int, waits: list[int], image: Image, src: Tensor) -> None:
    from interop import _core

    pitches, held = None if image.shared else _pitches(image, src), src
    if pitches is None:
        held, pitches = _core.host_tensor((src.nbytes,), "uint8"), (0, 0)
        pending(src, "read").wait(HOST_TIMEOUT)
        host_move(plan(held.ptr, src.ptr, src.itemsize, src.shape, _packed(src.shape), src.strides, 0))
    _wait(copies.submit(image.context, queue, waits, _hosted(queue, image, pitches, held.ptr, True)), held)


def _receive(queue: int, waits: list[int], image: Image, dst: Tensor) -> None:
    from interop import _core

    pitches = None if image.shared else _pitches(image, dst)
    held = dst if pitches is not None else _core.host_tensor((dst.nbytes,), "uint8")
    _wait(copies.submit(image.context, queue, waits, _hosted(queue, image, pitches or (0, 0), held.ptr, False)), held)
    if pitches is None:
        host_move(plan(dst.ptr, held.ptr, dst.itemsize, dst.shape, dst.strides, _packed(dst.shape), 1))


def _texels(queue: int, image: Image, buffer: int, offset: int, writes: bool) -> int:
    """Between the image and packed texels of a buffer (OpenCL, clEnqueueCopyImageToBuffer)."""
    driver, region = image.context.driver, loader.sizes(*image.region)
    if image.native.kind == _D1_BUFFER:         # its texels are those bytes; PoCL 3.1 dies of the commands for images
        (a, i), (b, j) = ((buffer, offset), (image.over, 0))[::1 if writes else -1]
        return int(driver.clEnqueueCopyBuffer(queue, a, b, i, j, image.native.extent[0] * image.texel, 0, None, None))
    if writes:
        return int(driver.clEnqueueCopyBufferToImage(queue, buffer, image.handle, offset, _origin(), region, 0, None, None))
    return int(driver.clEnqueueCopyImageToBuffer(queue, image.handle, buffer, _origin(), region, offset, 0, None, None))


def _direct(queue: int, image: Image, buffer: int, offset: int, writes: bool) -> Iterator[int]:
    yield _texels(queue, image, buffer, offset, writes)


def _with_buffer(queue: int, waits: list[int], image: Image, buffer: Mem, t: Tensor, writes: bool) -> Point | None:
    c = image.context
    if t.is_contiguous() and t.byte_offset % image.texel == 0 and not image.shared:
        return copies.submit(c, queue, waits, _direct(queue, image, buffer.handle, t.byte_offset, writes))
    packed = _packed(t.shape)
    move = (plan(0, t.byte_offset, t.itemsize, t.shape, packed, t.strides, 0) if writes
            else plan(t.byte_offset, 0, t.itemsize, t.shape, t.strides, packed, 1))
    if copies.many(move) and c.unified and not any(maps.forbids(m, "read_write") for m in (image, buffer)):
        _by_hand(queue, waits, image, t, writes)
        return None
    return copies.submit(c, queue, waits, _by_scratch(c, queue, image, buffer, move, t.nbytes, writes))


def _by_scratch(c: Context, queue: int, image: Image, buffer: Mem, move: Any, nbytes: int, writes: bool) -> Iterator[int]:
    """Strides that commands on images have no words for, and bytes that may be the image's: through packed memory of the device's."""
    memory.check_size(c, nbytes)
    scratch = memory.create(c, memory.READ_WRITE, nbytes)
    try:
        if writes:
            yield from copies.within(c, queue, scratch, buffer.handle, move)
        else:
            yield _texels(queue, image, scratch, 0, False)
        queues.barrier(c.driver, queue, [])
        if writes:
            yield _texels(queue, image, scratch, 0, True)
        else:
            yield from copies.within(c, queue, buffer.handle, scratch, move)
    finally:
        c.driver.clReleaseMemObject(scratch)        # the commands keep it (OpenCL, clReleaseMemObject)


def _by_hand(queue: int, waits: list[int], image: Image, t: Tensor, writes: bool) -> None:
    """So many runs that the host steps through the buffer faster, which it sees where it is."""
    from interop import _core

    held = _core.host_tensor((t.nbytes,), "uint8")
    first, last = memory.touched(t)
    if writes:
        pending(t, "read").wait(HOST_TIMEOUT)
    else:
        _wait(copies.submit(image.context, queue, waits, _hosted(queue, image, (0, 0), held.ptr, False)), held)
    mapped = maps.map_allocation(t.allocation, "read" if writes else "read_write", first, last - first)
    try:
        at = mapped.address + t.byte_offset - first
        if writes:
            host_move(plan(held.ptr, at, t.itemsize, t.shape, _packed(t.shape), t.strides, 0))
        else:
            host_move(plan(at, held.ptr, t.itemsize, t.shape, t.strides, _packed(t.shape), 1))
    finally:
        mapped.unmap()                                      # which hands over what was written
    if writes:
        _wait(copies.submit(image.context, queue, waits, _hosted(queue, image, (0, 0), held.ptr, True)), held)


def _between(c: Context, queue: int, to: Image, source: Image, nbytes: int) -> Iterator[int]:
    """Texels of the same size and number, as copyto has checked by dtype and shape; of another format or kind by their bytes."""
    a, b = to.native, source.native
    if (a.kind, a.order, a.type) == (b.kind, b.order, b.type) and not (to.shared or source.shared):
        yield c.driver.clEnqueueCopyImage(queue, source.handle, to.handle, _origin(), _origin(), loader.sizes(*to.region), 0, None, None)
        return
    memory.check_size(c, nbytes)
    scratch = memory.create(c, memory.READ_WRITE, nbytes)
    try:
        yield _texels(queue, source, scratch, 0, False)
        queues.barrier(c.driver, queue, [])
        yield _texels(queue, to, scratch, 0, True)
    finally:
        c.driver.clReleaseMemObject(scratch)
