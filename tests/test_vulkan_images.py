"""Images of Vulkan's as tensors of a layout of their own. Real: lavapipe (or a GPU) under the validation layers."""

# ruff: noqa: F401, F811      fixtures come by import

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vulkan_kit import CountingDriver, vk_messages, vk_open

import interop
from interop import ExchangeError
from interop.adapters import vulkan as ivk
from interop.adapters.vulkan import api as vk
from interop.adapters.vulkan import images, ring
from interop.adapters.vulkan.context import Context

Open = Callable[..., Context]
RGBA8 = vk.VK_FORMAT_R8G8B8A8_UNORM
GENERAL, UNDEFINED, READ = vk.VK_IMAGE_LAYOUT_GENERAL, vk.VK_IMAGE_LAYOUT_UNDEFINED, vk.VK_IMAGE_LAYOUT_SHADER_READ_ONLY_OPTIMAL
COPIES = vk.VK_IMAGE_USAGE_TRANSFER_SRC_BIT | vk.VK_IMAGE_USAGE_TRANSFER_DST_BIT
SAMPLED = vk.VK_IMAGE_USAGE_SAMPLED_BIT


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def gpu(vk_open: Open, driver: CountingDriver) -> Context:
    return vk_open(driver=driver, adapter=None)


def pixels(*shape: int, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)


def back(t: Any) -> np.ndarray[Any, Any]:
    out = np.zeros(t.shape, str(t.dtype))
    interop.copyto(out, t).wait(10)
    return out


class Theirs:
    """An image that the application has made."""

    def __init__(self, c: Context, size: tuple[int, int, int] = (20, 10, 1), *, layers: int = 1, levels: int = 1, usage: int = COPIES,
                 format: int = RGBA8, kind: int = vk.VK_IMAGE_TYPE_2D, tiling: int = vk.VK_IMAGE_TILING_OPTIMAL,
                 initial: int = UNDEFINED) -> None:
        self.c, out, below = c, vk.VkImage(), vk.VkDeviceMemory()
        info = vk.VkImageCreateInfo(imageType=kind, format=format, extent=vk.VkExtent3D(*size), mipLevels=levels, arrayLayers=layers,
                                    samples=1, tiling=tiling, usage=usage, initialLayout=initial)
        c.ok(c.vk.vkCreateImage(c.device_handle, info, None, ctypes.byref(out)), "vkCreateImage")
        need = vk.VkMemoryRequirements()
        c.vk.vkGetImageMemoryRequirements(c.device_handle, out.value, ctypes.byref(need))
        memory = vk.VkMemoryAllocateInfo(allocationSize=need.size, memoryTypeIndex=0)
        c.ok(c.vk.vkAllocateMemory(c.device_handle, memory, None, ctypes.byref(below)), "vkAllocateMemory")
        c.ok(c.vk.vkBindImageMemory(c.device_handle, out.value, below.value, 0), "vkBindImageMemory")
        self.image, self.memory = out.value, below.value
        self.said = {"memory": below.value, "memory_size": need.size, "memory_type": 0, "format": format, "extent": size, "layout": initial,
                     "usage": usage, "array_layers": layers, "mip_levels": levels, "tiling": tiling, "owner": self}

    def wrap(self, **other: Any) -> interop.Tensor:
        return self.c.wrap_image(self.image, **(self.said | other))

    def __del__(self) -> None:
        if self.c.alive:
            self.c.vk.vkDestroyImage(self.c.device_handle, self.image, None)
            self.c.vk.vkFreeMemory(self.c.device_handle, self.memory, None)


# ---- what it is ----
def test_an_image_is_a_tensor_of_its_own_layout(gpu: Context) -> None:
    """SPEC V-IMAGE"""
    t = gpu.image((33, 17), RGBA8)
    assert (t.shape, str(t.dtype), t.layout, t.strides, str(t.device)) == ((17, 33, 4), "uint8", "vk-image", None, "vulkan:0")
    n = ivk.image_native(t)
    assert (n.extent, n.format, n.layout, n.mip_levels, n.array_layers) == ((33, 17, 1), RGBA8, UNDEFINED, 1, 1)
    assert n.image == t.handle and n.usage & COPIES == COPIES and n.memory_size >= 33 * 17 * 4


@pytest.mark.parametrize("use", [lambda t: t[0], lambda t: t.reshape(-1), lambda t: t.permute(2, 0, 1), lambda t: t.map().value,
                                 lambda t: interop.to(t, "numpy"), lambda t: t.__dlpack__(), lambda t: t.view("int8"), ivk.native])
def test_nothing_but_copyto_sees_the_texels(gpu: Context, use: Callable[[Any], Any]) -> None:
    t = gpu.image((8, 8), RGBA8)
    with pytest.raises((ExchangeError, BufferError)):
        use(t)


def test_formats_are_elements_or_refused_by_name(gpu: Context) -> None:
    """SPEC V-IMAGE-FORMAT"""
    of = images.elements_of
    assert of(vk.VK_FORMAT_R8_UNORM) == ("uint8", 1, 1) and of(vk.VK_FORMAT_B8G8R8A8_SRGB) == ("uint8", 4, 4)
    assert of(vk.VK_FORMAT_R16G16_SFLOAT) == ("float16", 2, 4) and of(vk.VK_FORMAT_R32_SINT) == ("int32", 1, 4)
    assert of(vk.VK_FORMAT_R8G8_SNORM) == ("int8", 2, 2) and of(vk.VK_FORMAT_R64_SFLOAT) == ("float64", 1, 8)
    for name in ("VK_FORMAT_R5G6B5_UNORM_PACK16", "VK_FORMAT_BC1_RGB_UNORM_BLOCK", "VK_FORMAT_D32_SFLOAT", "VK_FORMAT_D24_UNORM_S8_UINT",
                 "VK_FORMAT_S8_UINT", "VK_FORMAT_UNDEFINED", "VK_FORMAT_G8_B8_R8_3PLANE_420_UNORM"):
        with pytest.raises(ExchangeError, match=name):
            gpu.image((8, 8), getattr(vk, name))
    with pytest.raises(ExchangeError, match="VkFormat 123456"):
        gpu.image((8, 8), 123456)


@pytest.mark.parametrize("extent", [(0, 4), (4,), (1, 2, 3, 4), (4, -1)])
def test_an_extent_that_is_none(gpu: Context, extent: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="extent"):
        gpu.image(extent, RGBA8)


def test_more_than_the_device_has(gpu: Context) -> None:
    with pytest.raises(ExchangeError, match="at most"):
        gpu.image((1 << 20, 4), RGBA8)
    with pytest.raises(ExchangeError, match=r"no images of VK_FORMAT_R8G8B8_UNORM|no images of"):
        gpu.image((4, 4), vk.VK_FORMAT_R8G8B8_USCALED)


# ---- copies ----
@pytest.mark.parametrize("name", ["R8_UNORM", "R8G8_UINT", "R8G8B8A8_SNORM", "B8G8R8A8_UNORM", "R16_SFLOAT", "R16G16B16A16_UINT",
                                  "R32_SINT", "R32G32B32A32_SFLOAT", "B8G8R8A8_SRGB"])
def test_the_host_and_an_image(gpu: Context, name: str) -> None:
    """SPEC V-IMAGE-COPY"""
    t = gpu.image((13, 7), getattr(vk, f"VK_FORMAT_{name}"))
    a = pixels(*t.shape, dtype=str(t.dtype))
    interop.copyto(t, a).wait(10)
    np.testing.assert_array_equal(back(t), a)


def test_an_image_larger_than_a_chunk(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    t = gpu.image((1200, 1500), vk.VK_FORMAT_R16G16B16A16_SFLOAT)
    a = pixels(1500, 1200, 4, dtype="float16")
    interop.copyto(t, a).wait(10)
    np.testing.assert_array_equal(back(t), a)


@pytest.mark.parametrize("cut", [lambda x: x[::2], lambda x: x[:, :20], lambda x: x[::-1, ::-1], lambda x: x.transpose(1, 0, 2)[:, :20],
                                 lambda x: x[..., ::-1]])
def test_any_strides_on_the_host(gpu: Context, cut: Callable[[Any], Any]) -> None:
    a = cut(pixels(40, 40, 4))
    t = gpu.image(a.shape[1::-1], RGBA8)
    interop.copyto(t, a).wait(10)
    np.testing.assert_array_equal(back(t), a)
    out = cut(np.zeros((40, 40, 4), np.uint8))
    interop.copyto(out, t)
    np.testing.assert_array_equal(out, a)


@pytest.mark.parametrize("cut", [lambda x: x, lambda x: x[::2], lambda x: x[:, 3:23], lambda x: x[::-1], lambda x: x.permute(1, 0, 2),
                                 lambda x: x[:, :20, ::-1], lambda x: x[1:2, :1]])
def test_any_strides_in_a_buffer(gpu: Context, cut: Callable[[Any], Any]) -> None:
    a = pixels(40, 40, 4)
    whole = interop.empty(a.shape, "uint8", device=gpu)
    interop.copyto(whole, a).wait(10)
    part = cut(whole)
    expected = np.zeros(part.shape, np.uint8)
    interop.copyto(expected, part)
    t = gpu.image(part.shape[1::-1], RGBA8)
    interop.copyto(t, part).wait(10)
    np.testing.assert_array_equal(back(t), expected)
    interop.copyto(whole, np.zeros_like(a)).wait(10)
    interop.copyto(part, t).wait(10)
    out = np.zeros_like(expected)
    interop.copyto(out, part)
    np.testing.assert_array_equal(out, expected)
    assert int(interop.to(whole, "numpy").astype(int).sum()) == int(expected.astype(int).sum())         # and nothing beside it


def test_bytes_that_do_not_begin_on_a_texel(gpu: Context) -> None:
    raw = interop.empty(1 + 8 * 8, "uint8", device=gpu)
    a = pixels(65)
    interop.copyto(raw, a).wait(10)
    t = gpu.image((8, 8), vk.VK_FORMAT_R8_UNORM)
    interop.copyto(t, raw[1:].reshape(8, 8, 1)).wait(10)
    np.testing.assert_array_equal(back(t).ravel(), a[1:])


def test_depth_comes_first(gpu: Context) -> None:
    t = gpu.image((5, 4, 3), RGBA8)
    assert t.shape == (3, 4, 5, 4)
    a = pixels(*t.shape)
    interop.copyto(t, a).wait(10)
    np.testing.assert_array_equal(back(t), a)
    b = interop.empty(t.shape, "uint8", device=gpu)
    interop.copyto(b, t).wait(10)
    np.testing.assert_array_equal(interop.to(b, "numpy"), a)
    wide = interop.empty((3, 6, 8, 4), "uint8", device=gpu)
    interop.copyto(wide[:, 1:5, 2:7], t).wait(10)
    np.testing.assert_array_equal(interop.to(wide, "numpy")[:, 1:5, 2:7], a)


def test_layers_come_first(gpu: Context) -> None:
    t = Theirs(gpu, (6, 5, 1), layers=4).wrap()
    assert t.shape == (4, 5, 6, 4)
    a = pixels(*t.shape)
    interop.copyto(t, a[::-1]).wait(10)
    np.testing.assert_array_equal(back(t), a[::-1])
    b = interop.empty(t.shape, "uint8", device=gpu)
    interop.copyto(b, t).wait(10)
    np.testing.assert_array_equal(interop.to(b, "numpy"), a[::-1])


def test_between_images(gpu: Context) -> None:
    a = pixels(9, 9, 4)
    t, u = gpu.image((9, 9), RGBA8), images.image(gpu, (9, 9), vk.VK_FORMAT_B8G8R8A8_UNORM)
    interop.copyto(t, a).wait(10)
    interop.copyto(u, t).wait(10)
    interop.copyto(t, t)
    np.testing.assert_array_equal(back(u), a)
    np.testing.assert_array_equal(back(t), a)


def test_images_of_two_contexts_are_not_copied(gpu: Context, vk_open: Open) -> None:
    t, u = gpu.image((9, 9), RGBA8), images.image(vk_open(adapter=None), (9, 9), RGBA8)
    interop.copyto(t, pixels(9, 9, 4)).wait(10)
    with pytest.raises(ExchangeError):
        interop.copyto(u, t)


# ---- layouts ----
def test_an_image_is_left_in_the_layout_it_was_in(gpu: Context) -> None:
    """SPEC V-IMAGE-LAYOUT"""
    theirs = Theirs(gpu, usage=COPIES | SAMPLED)
    t, a = theirs.wrap(), pixels(10, 20, 4)
    interop.copyto(t, a).wait(10)
    assert ivk.image_native(t).layout == GENERAL            # nothing goes back to UNDEFINED
    np.testing.assert_array_equal(back(t), a)
    gpu.queue.run(lambda b: images._transition(images._of(t), GENERAL, READ, b)).wait(10)
    ivk.set_layout(t, READ)
    np.testing.assert_array_equal(back(t), a)
    interop.copyto(t, a[::-1]).wait(10)
    assert ivk.image_native(t).layout == READ
    np.testing.assert_array_equal(back(t), a[::-1])         # the layers compare what we say with what they know


def test_what_was_never_written_has_nothing_to_read(gpu: Context) -> None:
    t = gpu.image((8, 8), RGBA8)
    with pytest.raises(ExchangeError, match="UNDEFINED"):
        back(t)


def test_an_image_that_the_host_wrote(gpu: Context) -> None:
    theirs = Theirs(gpu, (16, 4, 1), tiling=vk.VK_IMAGE_TILING_LINEAR, initial=vk.VK_IMAGE_LAYOUT_PREINITIALIZED)
    where, lies = ctypes.c_void_p(), vk.VkSubresourceLayout()
    gpu.vk.vkGetImageSubresourceLayout(gpu.device_handle, theirs.image, vk.VkImageSubresource(1, 0, 0), ctypes.byref(lies))
    gpu.ok(gpu.vk.vkMapMemory(gpu.device_handle, theirs.memory, 0, vk.VK_WHOLE_SIZE, 0, ctypes.byref(where)), "vkMapMemory")
    a = pixels(4, 16, 4)
    for y in range(4):
        ctypes.memmove((where.value or 0) + lies.offset + y * lies.rowPitch, a[y].ctypes.data, 64)
    t = theirs.wrap()
    np.testing.assert_array_equal(back(t), a)
    assert ivk.image_native(t).layout == GENERAL


def test_what_the_application_draws_is_read(gpu: Context) -> None:
    t = Theirs(gpu).wrap(layout=GENERAL)

    def clear(b: int) -> None:
        found = images._of(t)
        images._transition(found, UNDEFINED, GENERAL, b)
        everything = vk.VkImageSubresourceRange(1, 0, 1, 0, 1)
        colour = vk.VkClearColorValue(float32=(1.0, 0.0, 0.0, 1.0))
        gpu.vk.vkCmdClearColorImage(b, t.handle, GENERAL, colour, 1, (vk.VkImageSubresourceRange * 1)(everything))
    with interop.acquire(t, gpu, "write"):
        lease_end = gpu.queue.run(clear)
    lease_end.wait(10)
    np.testing.assert_array_equal(back(t), np.broadcast_to(np.array([255, 0, 0, 255], np.uint8), (10, 20, 4)))


# ---- order, life ----
def test_an_image_copy_comes_after_what_is_pending(gpu: Context) -> None:
    t, line = gpu.image((8, 8), RGBA8), gpu.timeline()
    b = interop.empty((8, 8, 4), "uint8", device=gpu)
    interop.copyto(t, pixels(8, 8, 4)).wait(10)
    interop.acquire(t, gpu, "write").release(line.at(1))
    done = interop.copyto(b, t)
    assert not done.done()
    line.signal(1)
    done.wait(10)
    np.testing.assert_array_equal(interop.to(b, "numpy"), pixels(8, 8, 4))


def test_the_applications_image_stays_the_applications(gpu: Context, driver: CountingDriver) -> None:
    theirs = Theirs(gpu)
    seen, t = weakref.ref(theirs), theirs.wrap()
    del theirs
    gc.collect()
    assert seen() is not None
    calls = driver.calls["vkDestroyImage"]
    interop.copyto(t, pixels(10, 20, 4)).wait(10)
    del t
    gc.collect()
    assert seen() is None and driver.calls["vkDestroyImage"] == calls + 1       # Theirs.__del__


def test_images_of_ours_go(gpu: Context, driver: CountingDriver) -> None:
    before = dict(driver.live)
    for _ in range(20):
        gpu.image((64, 64), RGBA8)
    gc.collect()
    assert dict(driver.live) == before
    t = gpu.image((64, 64), RGBA8)
    with pytest.raises(ExchangeError, match="still live"):
        gpu.close()
    t.allocation.close()
    with pytest.raises(ExchangeError):
        ivk.image_native(t)


@pytest.mark.parametrize("step", ["vkCreateImage", "vkAllocateMemory", "vkBindImageMemory"])
def test_a_step_that_fails_leaves_nothing(gpu: Context, driver: CountingDriver, step: str) -> None:
    before = dict(driver.live)
    driver.fail_next(step, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)
    with pytest.raises(MemoryError):
        gpu.image((64, 64), RGBA8)
    assert dict(driver.live) == before


@pytest.mark.parametrize(("other", "match"), [({"memory_type": 99}, "memory_type"), ({"memory_size": 16}, "memory_size"),
                                              ({"mip_levels": 0}, "mip_levels"), ({"array_layers": 0}, "array_layers"),
                                              ({"extent": (1,)}, "extent"), ({"memory_offset": -4}, "memory_offset"),
                                              ({"extent": (4000, 5000)}, "and the image"), ({"array_layers": 10000}, "and the image"),
                                              ({"array_layers": 2**70}, "array_layers"), ({"layout": 99999}, "layout"),
                                              ({"layout": -1}, "layout"), ({"usage": 2**70}, "usage")])
def test_what_cannot_be_true_of_an_image(gpu: Context, other: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Theirs(gpu).wrap(**other)


@pytest.mark.parametrize("said", ["memory_size", "memory_offset", "mip_levels", "array_layers", "layout", "usage", "tiling", "format"])
@pytest.mark.parametrize("value", [float("nan"), 1.5, "x", None])
def test_what_is_no_number_of_an_image(gpu: Context, said: str, value: Any) -> None:
    with pytest.raises((TypeError, ExchangeError)):
        Theirs(gpu).wrap(**{said: value})
    t = gpu.image((4, 4), RGBA8)
    with pytest.raises(TypeError):
        ivk.set_layout(t, value)
    for x in (None, 5, object()):
        with pytest.raises(ExchangeError):
            ivk.image_native(x)


def test_images_that_are_not_for_copies(gpu: Context) -> None:
    with pytest.raises(ExchangeError, match="TRANSFER_SRC"):
        back(Theirs(gpu, usage=SAMPLED).wrap(layout=GENERAL))
    with pytest.raises(ExchangeError, match="TRANSFER_DST"):
        interop.copyto(Theirs(gpu, usage=SAMPLED).wrap(), pixels(10, 20, 4))
    with pytest.raises(ExchangeError, match="read-only"):
        interop.copyto(Theirs(gpu).wrap(readonly=True), pixels(10, 20, 4))
