"""VkImages as tensors of layout "vk-image": what they are, their VkImageLayout, copies. How texels lie is the driver's to know.

Nothing but `interop.copyto` moves their texels; views, maps and exports of such a tensor are refused by the core. An image's layout is
what whoever used it last left it in: interop puts it back after its copies, the application says what it did by `set_layout`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from interop.contract import ExchangeError, Point, opaque_tensor

from ..strided import Move, plan
from . import api as vk
from . import copies, handles, memory, ring

if TYPE_CHECKING:
    from interop import Tensor

    from .context import Context
    from .memory import Buffer
    from .queue import Queue

LAYOUT = "vk-image"
_SRC, _DST = vk.VK_IMAGE_USAGE_TRANSFER_SRC_BIT, vk.VK_IMAGE_USAGE_TRANSFER_DST_BIT
_COLOUR = vk.VK_IMAGE_ASPECT_COLOR_BIT
#: Numeric formats -> kinds of dtype. What the GPU makes of the numbers (0 to 1, sRGB) is its matter: the bytes are the same.
_KINDS = {"UNORM": "uint", "UINT": "uint", "USCALED": "uint", "SRGB": "uint", "SNORM": "int", "SINT": "int", "SSCALED": "int",
          "SFLOAT": "float"}
#: sRGB, whose alpha is not: that is how numbers are read, and all components lie alike.
_FORMATS = vk.FORMATS | {vk.VK_FORMAT_R8G8B8A8_SRGB: (4, "RGBA", 8, "SRGB"), vk.VK_FORMAT_B8G8R8A8_SRGB: (4, "BGRA", 8, "SRGB")}
_NAMES = {value: name for name, value in vars(vk).items() if name.startswith("VK_FORMAT_") and "_FEATURE_" not in name}


class ImageNative(NamedTuple):
    """A tensor's image as Vulkan's calls take it.

    Attributes:
        image: VkImage.
        format, extent, tiling, layout, usage, mip_levels, array_layers: as in VkImageCreateInfo; the layout is the one that it is in now.
        memory, memory_offset, memory_size: what it is bound to.
    """

    image: int
    format: int
    extent: tuple[int, int, int]
    tiling: int
    layout: int
    usage: int
    mip_levels: int
    array_layers: int
    memory: int
    memory_offset: int
    memory_size: int


class Image:
    """What is known of a VkImage; owner of its Allocation.

    Attributes:
        context: whose it is.
        native: `ImageNative`.
        owner: what the application gave.
        lock: held while its layout changes.
    """

    __slots__ = ("channels", "context", "dtype", "lock", "native", "owner", "texel")

    def __init__(self, context: Context, native: ImageNative, owner: Any) -> None:
        """ExchangeError for a format whose texels are no elements."""
        self.context, self.native, self.owner = context, native, owner
        self.dtype, self.channels, self.texel = elements_of(native.format)
        self.lock = threading.RLock()

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, if several) (depth, if several) height, width, channels."""
        width, height, depth = self.native.extent
        return (*(n for n in (self.native.array_layers, depth) if n > 1), height, width, self.channels)


def elements_of(format: int) -> tuple[str, int, int]:
    """``(dtype, channels, bytes of a texel)`` of a VkFormat, channels in memory's order. ExchangeError: its texels are none."""
    found = _FORMATS.get(format)
    if found is None or found[3] not in _KINDS or set(found[1]) - set("RGBA"):
        raise ExchangeError(f"{_NAMES.get(format, f'VkFormat {format}')}: its texels are no elements of one dtype",
                            "formats with equal components of 8, 16, 32 or 64 bits can be tensors")
    nbytes, components, bits, numeric = found
    return f"{_KINDS[numeric]}{bits}", len(components), nbytes


def wrap_image(context: Context, image: Any, *, memory: Any, memory_size: int, memory_offset: int = 0, memory_type: int, format: int,
               extent: Sequence[int], tiling: int = vk.VK_IMAGE_TILING_OPTIMAL, layout: int, usage: int, mip_levels: int = 1,
               array_layers: int = 1, owner: Any, readonly: bool = False) -> Tensor:
    """``Context.wrap_image``: the application's VkImage as a tensor of shape (height, width, channels), which is mip level 0.

    Args:
        context: whose it is.
        image, memory: VkImage and the VkDeviceMemory that it is bound to: ints, ctypes objects or cffi cdata.
        memory_size, memory_offset, memory_type: of VkMemoryAllocateInfo and vkBindImageMemory.
        format, extent, tiling, usage, mip_levels, array_layers: of VkImageCreateInfo; `extent` is (width, height) or with depth. Depth
            and layers come first in the shape where there are several.
        layout: VkImageLayout that it is in once what is pending is done; `set_layout` tells later changes.
        owner: kept alive as long as this.
        readonly: nobody copies into it through the tensor.

    Raises:
        ExchangeError: a format whose texels are no elements of one dtype. ValueError: what cannot be true of an image.
    """
    context.check()
    value, below = handles.number(image, "image"), handles.number(memory, "memory")
    size = _extent(extent)
    for name, given, least in (("memory_size", memory_size, 1), ("memory_offset", memory_offset, 0)):
        handles.count(given, name, least)
    for name, given, least in (("mip_levels", mip_levels, 1), ("array_layers", array_layers, 1), ("format", format, 0),
                               ("tiling", tiling, 0), ("usage", usage, 1)):
        handles.count(given, name, least, 2**32 - 1)
    if handles.count(memory_type, "memory_type") >= len(context.memory_types):
        raise ValueError(f"memory_type {memory_type}: {context.physical.name} has {len(context.memory_types)}")
    layout = _layout(layout)
    made = Image(context, ImageNative(value, format, size, tiling, layout, usage, mip_levels, array_layers, below, memory_offset,
                                      memory_size), owner)
    need = vk.VkMemoryRequirements()
    context.vk.vkGetImageMemoryRequirements(context.device_handle, value, ctypes.byref(need))
    texels = made.texel * array_layers * size[0] * size[1] * size[2]
    if texels > need.size:              # what is said of it cannot be, and copies would leave the memory
        raise ValueError(f"{_NAMES[format]} of extent {size} in {array_layers} layer(s) has {texels} bytes, and the image {need.size}")
    if memory_offset + need.size > memory_size:
        raise ValueError(f"the image needs {need.size} bytes of memory at {memory_offset}, and memory_size is {memory_size}")
    if not need.memoryTypeBits >> memory_type & 1:
        raise ValueError(f"memory_type {memory_type}: the image cannot be bound to it (memoryTypeBits {need.memoryTypeBits:#x})")
    return _tensor(made, need.size, None, readonly)


def image(context: Context, extent: Sequence[int], format: int, usage: int | None = None) -> Tensor:
    """``Context.image``: a VkImage of interop's own in the device's memory, optimal tiling, one level, VK_IMAGE_LAYOUT_UNDEFINED.

    Args:
        context: where.
        extent: (width, height), or with depth for a 3D image.
        format: VkFormat.
        usage: VkImageUsageFlags; copies are added. None: sampled, and storage where the format can be.
    """
    context.check()
    elements_of(handles.count(format, "format"))
    size = _extent(extent)
    if usage is not None:
        handles.count(usage, "usage", 0, 2**32 - 1)
    features = vk.VkFormatProperties()
    context.instance_table.vkGetPhysicalDeviceFormatProperties(context.physical_device, format, ctypes.byref(features))
    can = features.optimalTilingFeatures
    if usage is None:
        usage = ((vk.VK_IMAGE_USAGE_SAMPLED_BIT if can & vk.VK_FORMAT_FEATURE_SAMPLED_IMAGE_BIT else 0)
                 | (vk.VK_IMAGE_USAGE_STORAGE_BIT if can & vk.VK_FORMAT_FEATURE_STORAGE_IMAGE_BIT else 0))
    usage |= _SRC | _DST
    kind = vk.VK_IMAGE_TYPE_3D if size[2] > 1 else vk.VK_IMAGE_TYPE_2D
    _check_supported(context, format, kind, usage, size)
    info = vk.VkImageCreateInfo(imageType=kind, format=format, extent=vk.VkExtent3D(*size), mipLevels=1, arrayLayers=1,
                                samples=vk.VK_SAMPLE_COUNT_1_BIT, tiling=vk.VK_IMAGE_TILING_OPTIMAL, usage=usage,
                                sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE, initialLayout=vk.VK_IMAGE_LAYOUT_UNDEFINED)
    t, device, out = context.vk, context.device_handle, vk.VkImage()
    context.ok(t.vkCreateImage(device, info, None, ctypes.byref(out)), "vkCreateImage")
    value, below = handles.owned(out.value or 0, "vkCreateImage"), 0
    try:
        dedicated = vk.VkMemoryDedicatedRequirements()
        need = vk.VkMemoryRequirements2(pNext=dedicated)
        t.vkGetImageMemoryRequirements2(device, vk.VkImageMemoryRequirementsInfo2(image=value), ctypes.byref(need))
        nbytes, bits = need.memoryRequirements.size, need.memoryRequirements.memoryTypeBits
        alone = dedicated.requiresDedicatedAllocation or dedicated.prefersDedicatedAllocation
        chosen = memory.choose(context, bits, (vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0), nbytes)
        below = memory.allocate_memory(context, nbytes, chosen, *([vk.VkMemoryDedicatedAllocateInfo(image=value)] if alone else []))
        context.ok(t.vkBindImageMemory(device, value, below, 0), "vkBindImageMemory")
        made = Image(context, ImageNative(value, format, size, vk.VK_IMAGE_TILING_OPTIMAL, vk.VK_IMAGE_LAYOUT_UNDEFINED, usage, 1, 1,
                                          below, 0, nbytes), None)
        return _tensor(made, nbytes, functools.partial(_destroy, context, value, below), False)
    except BaseException:
        _destroy(context, value, below)
        raise


def _tensor(made: Image, nbytes: int, free: Callable[[], Any] | None, readonly: bool) -> Tensor:
    a = made.context.allocation(made.native.image, nbytes, free=free, owner=made, readonly=readonly)
    return opaque_tensor(a, made.shape, made.dtype, LAYOUT, readonly=readonly)


def _destroy(context: Context, value: int, below: int) -> None:
    if context.alive:
        context.vk.vkDestroyImage(context.device_handle, value, None)
        if below:
            context.vk.vkFreeMemory(context.device_handle, below, None)


def _check_supported(context: Context, format: int, kind: int, usage: int, size: tuple[int, int, int]) -> None:
    info = vk.VkPhysicalDeviceImageFormatInfo2(format=format, type=kind, tiling=vk.VK_IMAGE_TILING_OPTIMAL, usage=usage)
    says = vk.VkImageFormatProperties2()
    result = context.instance_table.vkGetPhysicalDeviceImageFormatProperties2(context.physical_device, info, ctypes.byref(says))
    if result == vk.VK_ERROR_FORMAT_NOT_SUPPORTED:
        raise ExchangeError(f"{context.physical.name} has no images of {_NAMES[format]} with usage {usage:#x}",
                            "another format, or less usage")
    context.ok(result, "vkGetPhysicalDeviceImageFormatProperties2")
    most = says.imageFormatProperties.maxExtent
    if any(n > m for n, m in zip(size, (most.width, most.height, most.depth), strict=True)):
        raise ExchangeError(f"extent {size}: {context.physical.name} has at most {(most.width, most.height, most.depth)} "
                            f"for {_NAMES[format]}")


def _extent(extent: Sequence[int]) -> tuple[int, int, int]:
    numbers = tuple(handles.count(n, "extent", 1, 2**31 - 1) for n in extent)
    if len(numbers) not in (2, 3):
        raise ValueError(f"extent {tuple(extent)}: (width, height) or (width, height, depth), each at least 1")
    return numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 1


# ---- of a tensor ----
def find(tensor: Tensor) -> Image | None:
    """The Image behind a tensor; None: it has none."""
    if getattr(tensor, "layout", None) != LAYOUT:
        return None
    found = tensor.allocation.owner
    return found if isinstance(found, Image) else None


def _of(tensor: Tensor) -> Image:
    found = find(tensor)
    if found is None:
        raise ExchangeError(f"{tensor!r} is no image of Vulkan's", "context.wrap_image(...) makes one a tensor")
    return found


def image_native(tensor: Tensor) -> ImageNative:
    """What descriptors, barriers and commands take of an image. Nothing is ordered or kept: `interop.acquire` does that."""
    found = _of(tensor)
    tensor.allocation.check()
    found.context.check()
    return found.native


def set_layout(tensor: Tensor, layout: int) -> None:
    """Say that the image is in this VkImageLayout once the work is done that it was acquired for. ValueError where that is none."""
    found = _of(tensor)
    with found.lock:
        found.native = found.native._replace(layout=_layout(layout))


def _layout(x: Any) -> int:
    """A VkImageLayout: those of the core are 0 to 8, those of extensions above 10**9 (Vulkan, Registered Extension Numbers)."""
    value = handles.count(x, "layout", 0, 2**31 - 1)
    if 8 < value < 10**9:
        raise ValueError(f"layout {value} is no VkImageLayout")
    return value


# ---- copies ----
def copy(dst: Tensor, src: Tensor, stream: Any) -> Point | Any:
    """`copies.copy` where one side or both are images: of a Context, with its buffers, its images and the host."""
    to, source = find(dst), find(src)
    if (to is None and dst.layout != "strided") or (source is None and src.layout != "strided"):
        return NotImplemented
    images = [i for i in (to, source) if i is not None]
    context = images[0].context
    context.check()
    context.check_lost()
    for i, usage, name in ((to, _DST, "DST"), (source, _SRC, "SRC")):
        if i is not None and not i.native.usage & usage:
            raise ExchangeError(f"the image {i.native.image:#x} was made with usage {i.native.usage:#x}, without "
                                f"VK_IMAGE_USAGE_TRANSFER_{name}_BIT", "make it for copies")
    if source is not None and source.native.layout == vk.VK_IMAGE_LAYOUT_UNDEFINED:
        raise ExchangeError("the image is in VK_IMAGE_LAYOUT_UNDEFINED: it has no contents",
                            "vulkan.set_layout(tensor, layout) where it has")
    if any(i.context is not context for i in images):
        return NotImplemented
    queue = copies.queue_of(context, stream)
    if to is not None and source is not None:
        return _between(queue, to, source)
    image, other, writes = (to, src, True) if to is not None else (images[0], dst, False)
    if other.device.name != "vulkan":
        if writes:
            return copies.send(queue, _bands(image, other, True))
        copies.receive(queue, _bands(image, other, False))
        return None
    buffer = memory.find(other.allocation)
    if buffer is None or buffer.context is not context:
        return NotImplemented
    return _with_buffer(queue, image, buffer, other, writes)


def _strides(image: Image, t: Tensor) -> tuple[int, int, int, int, int]:
    """Of layers, depth, rows, texels, channels, in elements; 0 where the tensor has no such dimension."""
    given = list(t.strides)
    tail = given[-3:]
    depth = given.pop(-4) if image.native.extent[2] > 1 else 0
    return given[0] if image.native.array_layers > 1 else 0, depth, tail[0], tail[1], tail[2]


def _bands(image: Image, host: Tensor, writes: bool) -> Iterator[tuple[Move, Callable[[int, int], Any]]]:
    """Rows of the image as they fit into a chunk: where they are on the host, and how they get from or to a chunk."""
    width, height, depth = image.native.extent
    layer_step, depth_step, *steps = _strides(image, host)
    packed, item = (width * image.channels, image.channels, 1), host.itemsize
    rows = max(1, ring.CHUNK // (width * image.texel))
    for layer in range(image.native.array_layers):
        for z in range(depth):
            for y in range(0, height, rows):
                n = min(rows, height - y)
                first = host.ptr + (layer * layer_step + z * depth_step + y * steps[0]) * item
                shape = (n, width, image.channels)
                move = plan(0, first, item, shape, packed, steps, 0) if writes else plan(first, 0, item, shape, steps, packed, 1)
                yield move, functools.partial(_band, image, writes, (layer, z, y, n))


def _band(image: Image, writes: bool, where: tuple[int, int, int, int], buffer: int, chunk: int) -> None:
    layer, z, y, rows = where
    region = _region(image, layer=layer, layers=1, z=z, depth=1, y=y, rows=rows)
    _record(image, writes, buffer, chunk, region)


def _region(image: Image, *, offset: int = 0, row_length: int = 0, image_height: int = 0, layer: int = 0, layers: int = 0, z: int = 0,
            depth: int = 0, y: int = 0, rows: int = 0) -> Any:
    n = image.native
    return vk.VkBufferImageCopy(
        bufferOffset=offset, bufferRowLength=row_length, bufferImageHeight=image_height,
        imageSubresource=vk.VkImageSubresourceLayers(_COLOUR, 0, layer, layers or n.array_layers), imageOffset=vk.VkOffset3D(0, y, z),
        imageExtent=vk.VkExtent3D(n.extent[0], rows or n.extent[1], depth or n.extent[2]))


def _record(image: Image, writes: bool, buffer: int, other: int, region: Any) -> None:
    """Record a copy between the image and a buffer, from the image's layout and back."""
    t, regions = image.context.vk, (vk.VkBufferImageCopy * 1)(region)
    with image.lock:
        layout, back = _enter(image, writes, buffer)
        if writes:
            t.vkCmdCopyBufferToImage(buffer, other, image.native.image, layout, 1, regions)
        else:
            t.vkCmdCopyImageToBuffer(buffer, image.native.image, layout, other, 1, regions)
        _leave(image, layout, back, buffer)


def _enter(image: Image, writes: bool, buffer: int) -> tuple[int, int]:
    """Record the way to a layout for copies; ``(that layout, the one to leave it in)``."""
    now = image.native.layout
    layout = vk.VK_IMAGE_LAYOUT_TRANSFER_DST_OPTIMAL if writes else vk.VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL
    if now == vk.VK_IMAGE_LAYOUT_GENERAL:
        layout = now
    _transition(image, now, layout, buffer)
    # nothing goes back to these two (VUID-VkImageMemoryBarrier-newLayout-01198)
    nowhere = now in (vk.VK_IMAGE_LAYOUT_UNDEFINED, vk.VK_IMAGE_LAYOUT_PREINITIALIZED)
    return layout, vk.VK_IMAGE_LAYOUT_GENERAL if nowhere else now


def _leave(image: Image, layout: int, back: int, buffer: int) -> None:
    _transition(image, layout, back, buffer)
    image.native = image.native._replace(layout=back)


def _transition(image: Image, old: int, new: int, buffer: int) -> None:
    if old == new:
        return
    everything = vk.VkImageSubresourceRange(_COLOUR, 0, vk.VK_REMAINING_MIP_LEVELS, 0, vk.VK_REMAINING_ARRAY_LAYERS)
    barrier = vk.VkImageMemoryBarrier(srcAccessMask=vk.VK_ACCESS_MEMORY_WRITE_BIT,
                                      dstAccessMask=vk.VK_ACCESS_MEMORY_READ_BIT | vk.VK_ACCESS_MEMORY_WRITE_BIT,
                                      oldLayout=old, newLayout=new, srcQueueFamilyIndex=vk.VK_QUEUE_FAMILY_IGNORED,
                                      dstQueueFamilyIndex=vk.VK_QUEUE_FAMILY_IGNORED, image=image.native.image, subresourceRange=everything)
    stage = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
    image.context.vk.vkCmdPipelineBarrier(buffer, stage, stage, 0, 0, None, 0, None, 1, (vk.VkImageMemoryBarrier * 1)(barrier))


def _with_buffer(queue: Queue, image: Image, buffer: Buffer, t: Tensor, writes: bool) -> Point:
    wanted = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT if writes else vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    if not buffer.usage & wanted:
        raise ExchangeError(f"the buffer {buffer.handle:#x} was made with usage {buffer.usage:#x}, not for this copy",
                            "make it with VK_BUFFER_USAGE_TRANSFER_SRC_BIT and _DST_BIT")
    region = _expressed(image, t)
    if region is not None:
        return copies.submit(queue, lambda commands: _record(image, writes, commands, buffer.handle, region))
    # strides that Vulkan has no words for: through packed memory
    from .commands import between

    scratch = ring.Scratch(queue.context, t.size * t.itemsize)
    packed = _packed(t.shape)
    move = (plan(0, t.byte_offset, t.itemsize, t.shape, packed, t.strides, 0) if writes
            else plan(t.byte_offset, 0, t.itemsize, t.shape, t.strides, packed, 1))

    def twice(commands: int) -> None:
        if writes:
            copies.copy_buffer(queue, commands, scratch.handle, buffer.handle, move)
            between(queue.context.vk, commands)
        _record(image, writes, commands, scratch.handle, _region(image))
        if not writes:
            between(queue.context.vk, commands)
            copies.copy_buffer(queue, commands, buffer.handle, scratch.handle, move)

    done = scratch.busy = copies.submit(queue, twice)
    ring.keep(queue.context, done, scratch)
    return done


def _expressed(image: Image, t: Tensor) -> Any:
    """The region of a buffer whose rows are texels without gaps; None: Vulkan cannot say it (Vulkan, VkBufferImageCopy)."""
    layer_step, depth_step, row_step, texel_step, channel_step = _strides(image, t)
    width, height, _ = image.native.extent
    c, planes = image.channels, depth_step or layer_step
    multiple = image.texel * (4 // image.texel if 4 % image.texel == 0 else 1 if image.texel % 4 == 0 else 4)
    if t.byte_offset % multiple or (channel_step != 1 and c > 1) or (texel_step != c and width > 1):
        return None
    row_step = row_step if height > 1 else width * c
    if row_step % c or row_step < width * c or (depth_step and layer_step):
        return None
    if planes and (planes % row_step or planes < height * row_step):
        return None
    return _region(image, offset=t.byte_offset, row_length=row_step // c, image_height=planes // row_step if planes else 0)


def _packed(shape: Sequence[int]) -> list[int]:
    steps, size = [], 1
    for n in reversed(shape):
        steps.append(size)
        size *= n
    return steps[::-1]


def _between(queue: Queue, to: Image, source: Image) -> Point | None:
    """Texels of the same size and number, as copyto has checked by dtype and shape."""
    if to.native.image == source.native.image:
        return None
    layers = vk.VkImageSubresourceLayers(_COLOUR, 0, 0, to.native.array_layers)
    region = vk.VkImageCopy(srcSubresource=layers, dstSubresource=layers, extent=vk.VkExtent3D(*to.native.extent))
    first, second = sorted((to, source), key=id)

    def record(commands: int) -> None:
        with first.lock, second.lock:
            (there, to_back), (here, source_back) = _enter(to, True, commands), _enter(source, False, commands)
            queue.context.vk.vkCmdCopyImage(commands, source.native.image, here, to.native.image, there, 1, (vk.VkImageCopy * 1)(region))
            _leave(to, there, to_back, commands)
            _leave(source, here, source_back, commands)

    return copies.submit(queue, record)
