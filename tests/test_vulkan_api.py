"""Vulkan's declarations, tables of functions, results and handles. No device is opened; real parts: vk.xml, the loader, cffi."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
from support import ROOT, need

from interop import DeviceLostError, ExchangeError
from interop.adapters.vulkan import ADAPTER, handles, loader
from interop.adapters.vulkan import api as vk

STRUCTS = sorted(name for name, x in vars(vk).items() if isinstance(x, type) and issubclass(x, vk.Struct) and x is not vk.Struct)


# ---- declarations ----
def test_the_committed_declarations_are_what_the_registry_gives() -> None:
    need("vulkan_object")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate_vulkan
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert generate_vulkan.generated() == generate_vulkan.TARGET.read_text(), "run python tools/generate_vulkan.py"


def test_structs_are_laid_out_as_a_c_compiler_does_it() -> None:
    ffi = need("vulkan").ffi
    compared = 0
    for name in STRUCTS:
        try:
            kind = ffi.typeof(name)
        except ffi.error:
            continue                            # newer than that package
        ours = getattr(vk, name)
        theirs = {field: f.offset for field, f in kind.fields}
        assert ctypes.sizeof(ours) == ffi.sizeof(kind), name
        assert {n: getattr(ours, n).offset for n, *_ in ours._fields_} == theirs, name
        compared += 1
    assert compared > 80


def test_constants_are_those_of_another_binding() -> None:
    theirs = need("vulkan")
    same = [n for n, v in vars(vk).items() if n.startswith("VK_") and isinstance(v, int) and isinstance(getattr(theirs, n, None), int)]
    assert len(same) > 300
    # that package keeps VK_WHOLE_SIZE and the like as signed numbers, and lost the sign of some errors
    assert [n for n in same if (getattr(vk, n) - getattr(theirs, n)) % 2**32 and not n.startswith("VK_ERROR")] == []


def test_a_struct_fills_in_its_type() -> None:
    assert vk.VkBufferCreateInfo(size=64).sType == 12
    assert vk.VkMemoryAllocateInfo().sType == 5


def test_a_member_that_a_struct_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="sise"):
        vk.VkBufferCreateInfo(sise=64)
    info = vk.VkBufferCreateInfo()
    with pytest.raises(AttributeError, match="sise"):
        info.sise = 64


def test_a_list_becomes_an_array_with_its_count() -> None:
    info = vk.VkBufferCreateInfo(pQueueFamilyIndices=[3, 5])
    assert info.queueFamilyIndexCount == 2 and info.pQueueFamilyIndices[:2] == [3, 5]


def test_an_empty_list_is_a_null_pointer() -> None:
    info = vk.VkBufferCreateInfo(pQueueFamilyIndices=[])
    assert info.queueFamilyIndexCount == 0 and not info.pQueueFamilyIndices


def test_names_may_be_text_or_bytes() -> None:
    info = vk.VkDeviceCreateInfo(ppEnabledExtensionNames=["VK_A", b"VK_B"])
    assert info.enabledExtensionCount == 2 and info.ppEnabledExtensionNames[:2] == [b"VK_A", b"VK_B"]


def test_a_struct_may_be_given_where_one_is_pointed_to() -> None:
    app = vk.VkApplicationInfo(pApplicationName="x", apiVersion=7)
    info = vk.VkInstanceCreateInfo(pApplicationInfo=app)
    assert info.pApplicationInfo.contents.apiVersion == 7


def test_bytes_behind_a_void_pointer_are_kept() -> None:
    info = vk.VkSpecializationInfo(pMapEntries=[vk.VkSpecializationMapEntry(0, 0, 4)], dataSize=4, pData=b"\1\2\3\4")
    gc.collect()
    assert ctypes.string_at(info.pData, 4) == b"\1\2\3\4" and info.mapEntryCount == 1


def chained(info: Any) -> list[int]:
    """The sTypes along a chain."""
    out, at = [], info.pNext
    while at:
        base = vk.VkBaseOutStructure.from_address(at)
        out.append(base.sType)
        at = base.pNext
    return out


def test_a_chain_is_in_the_order_given() -> None:
    dedicated, export, flags = vk.VkMemoryDedicatedAllocateInfo(), vk.VkExportMemoryAllocateInfo(), vk.VkMemoryAllocateFlagsInfo()
    info = vk.VkMemoryAllocateInfo(pNext=[dedicated, export])
    vk.chain(info, flags)
    assert chained(info) == [dedicated.sType, export.sType, flags.sType]


def test_chains_join() -> None:
    tail = vk.VkExportMemoryAllocateInfo(pNext=vk.VkMemoryAllocateFlagsInfo())
    info = vk.VkMemoryAllocateInfo(pNext=vk.VkMemoryDedicatedAllocateInfo())
    vk.chain(info, tail)
    assert len(chained(info)) == 3


def test_a_chain_lives_as_long_as_its_first_struct() -> None:
    class Watched(vk.VkMemoryDedicatedAllocateInfo):    # type: ignore[misc]
        __slots__ = ("__weakref__",)

    info = vk.VkMemoryAllocateInfo(pNext=Watched(buffer=5))
    there = weakref.ref(info._keep[0].struct)
    gc.collect()
    assert there() is not None
    del info
    gc.collect()
    assert there() is None


# ---- results ----
@pytest.mark.parametrize("code", [c for c in vk.RESULTS if c < 0], ids=vk.RESULTS.get)
def test_a_failing_result_is_an_error_that_names_it(code: int) -> None:
    with pytest.raises((ExchangeError, DeviceLostError), match=vk.RESULTS[code]) as caught:
        loader.check(code, "vkSomething")
    assert "vkSomething" in str(caught.value)
    if code != vk.VK_ERROR_DEVICE_LOST:
        assert isinstance(caught.value, loader.VulkanError) and caught.value.code == vk.RESULTS[code]


@pytest.mark.parametrize("code", [vk.VK_ERROR_OUT_OF_HOST_MEMORY, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY, vk.VK_ERROR_OUT_OF_POOL_MEMORY])
def test_running_out_is_a_memory_error(code: int) -> None:
    with pytest.raises(MemoryError):
        loader.check(code, "vkAllocateMemory")


def test_a_lost_device_is_a_device_lost_error() -> None:
    with pytest.raises(DeviceLostError):
        loader.check(vk.VK_ERROR_DEVICE_LOST, "vkQueueSubmit")


def test_a_result_that_nobody_knows_is_named_by_number() -> None:
    with pytest.raises(loader.VulkanError, match="-1000999999") as caught:
        loader.check(-1000999999, "vkSomething")
    assert caught.value.code == "-1000999999"


@pytest.mark.parametrize("code", [vk.VK_SUCCESS, vk.VK_TIMEOUT, vk.VK_NOT_READY, vk.VK_INCOMPLETE])
def test_a_result_that_is_no_error_is_returned(code: int) -> None:
    assert loader.check(code, "vkSomething") == code


# ---- tables ----
def table(found: dict[str, Any], extensions: tuple[str, ...] = ()) -> Any:
    """A Table over Python functions, with their names in `asked`."""
    asked: list[str] = []

    def find(name: bytes) -> int:
        asked.append(name.decode())
        return ctypes.cast(found[asked[-1]], ctypes.c_void_p).value or 0 if asked[-1] in found else 0

    out = loader.Table(find, "this fake", extensions)
    out.__dict__["asked"] = asked
    return out


def idle(name: str, result: int = 0) -> Any:
    """A C function that returns `result`."""
    f = vk.FUNCTIONS[name]
    return ctypes.CFUNCTYPE(f.restype, *f.argtypes)(lambda *args: result)


def test_a_function_is_looked_up_once() -> None:
    t = table({"vkDeviceWaitIdle": idle("vkDeviceWaitIdle", 7)})
    assert t.vkDeviceWaitIdle(1) == t.vkDeviceWaitIdle(1) == 7
    assert t.asked == ["vkDeviceWaitIdle"]


def test_a_function_that_the_driver_has_not_says_what_brings_it() -> None:
    with pytest.raises(ExchangeError, match=r"vkGetMemoryFdKHR.*VK_KHR_external_memory_fd"):
        table({}).vkGetMemoryFdKHR  # noqa: B018
    with pytest.raises(ExchangeError, match="VK_VERSION_1_2 or VK_KHR_timeline_semaphore"):
        table({}).vkWaitSemaphores  # noqa: B018


def test_a_function_of_an_extension_that_is_on_goes_by_its_name() -> None:
    both = {"vkWaitSemaphores": idle("vkWaitSemaphores", 1), "vkWaitSemaphoresKHR": idle("vkWaitSemaphores", 2)}
    assert table(both, ("VK_KHR_timeline_semaphore",)).vkWaitSemaphores(1, None, 0) == 2
    assert table(both).vkWaitSemaphores(1, None, 0) == 1


def test_a_function_that_is_not_declared_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="generate_vulkan"):
        table({}).vkCmdDraw  # noqa: B018


def test_without_a_loader_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LIBRARY", "libvulkan-missing.so.1")
    monkeypatch.setattr(loader, "_loaded", [])
    with pytest.raises(ExchangeError, match=r"no Vulkan loader.*install libvulkan1"):
        loader.Driver()
    assert "install libvulkan1" in (ADAPTER.missing() or "")


def test_importing_the_adapter_loads_no_driver() -> None:
    code = ("import interop.adapters.vulkan as v, sys; maps = open('/proc/self/maps').read(); "
            "assert 'libvulkan' not in maps; assert 'interop.adapters.vulkan.api' not in sys.modules; v.requirements; "
            "assert 'libvulkan' not in open('/proc/self/maps').read()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- handles ----
def test_a_handle_may_be_an_int_or_ctypes() -> None:
    assert handles.number(5) == handles.number(ctypes.c_uint64(5)) == handles.number(ctypes.c_void_p(5)) == 5


def test_a_handle_may_be_of_the_package_vulkan() -> None:
    ffi = need("vulkan").ffi
    buffer = ffi.cast("VkBuffer", 0x20000000002)
    assert handles.number(buffer) == 0x20000000002
    assert handles.number(ffi.new("VkBuffer*", buffer)) == 0x20000000002


def test_an_address_of_a_function_may_be_a_ctypes_function() -> None:
    f = idle("vkDeviceWaitIdle")
    assert handles.address(f, "f") == ctypes.cast(f, ctypes.c_void_p).value


@pytest.mark.parametrize("bad", [None, 0, -1, 2**64, "text", True, 1.5, ctypes.c_void_p(), ctypes.c_uint64(0), object()], ids=repr)
def test_what_is_no_handle_is_a_type_error_that_names_it(bad: Any) -> None:
    with pytest.raises(TypeError, match="the buffer"):
        handles.number(bad, "the buffer")


def test_a_null_pointer_of_cffi_is_refused() -> None:
    ffi = need("vulkan").ffi
    with pytest.raises(TypeError, match="VK_NULL_HANDLE"):
        handles.number(ffi.NULL, "the buffer")
