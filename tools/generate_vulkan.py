"""Write ``adapters/vulkan/api.py`` from Khronos' registry: ``python tools/generate_vulkan.py``. Takes the package vulkan-object.

What is declared is exactly what `COMMANDS`, `STRUCTS`, `ENUMS` and `EXTENSIONS` name, and what those are made of. The package ships
vk.xml, so nothing is downloaded; ``--check`` says whether the committed file is what would be written.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "adapters" / "vulkan" / "api.py"

# ruff: noqa: SIM905      words in a block of text are what a list this long is edited as
COMMANDS = """
vkGetInstanceProcAddr vkGetDeviceProcAddr vkCreateInstance vkDestroyInstance vkEnumerateInstanceVersion
vkEnumerateInstanceExtensionProperties vkEnumerateInstanceLayerProperties vkEnumeratePhysicalDevices vkEnumerateDeviceExtensionProperties
vkGetPhysicalDeviceProperties vkGetPhysicalDeviceProperties2 vkGetPhysicalDeviceFeatures2 vkGetPhysicalDeviceMemoryProperties
vkGetPhysicalDeviceMemoryProperties2 vkGetPhysicalDeviceQueueFamilyProperties vkGetPhysicalDeviceFormatProperties
vkGetPhysicalDeviceImageFormatProperties2 vkGetPhysicalDeviceExternalBufferProperties vkGetPhysicalDeviceExternalSemaphoreProperties
vkCreateDebugUtilsMessengerEXT vkDestroyDebugUtilsMessengerEXT vkSetDebugUtilsObjectNameEXT
vkCreateDevice vkDestroyDevice vkGetDeviceQueue vkDeviceWaitIdle vkQueueWaitIdle vkQueueSubmit
vkCreateBuffer vkDestroyBuffer vkGetBufferMemoryRequirements vkGetBufferMemoryRequirements2 vkBindBufferMemory vkGetBufferDeviceAddress
vkAllocateMemory vkFreeMemory vkMapMemory vkUnmapMemory vkFlushMappedMemoryRanges vkInvalidateMappedMemoryRanges
vkGetMemoryFdKHR vkGetMemoryFdPropertiesKHR vkGetMemoryHostPointerPropertiesEXT
vkCreateImage vkDestroyImage vkGetImageMemoryRequirements vkGetImageMemoryRequirements2 vkBindImageMemory vkGetImageSubresourceLayout
vkCreateImageView vkDestroyImageView vkCreateSampler vkDestroySampler
vkCreateCommandPool vkDestroyCommandPool vkResetCommandPool vkTrimCommandPool vkAllocateCommandBuffers vkFreeCommandBuffers
vkBeginCommandBuffer vkEndCommandBuffer vkResetCommandBuffer
vkCmdCopyBuffer vkCmdCopyBufferToImage vkCmdCopyImageToBuffer vkCmdCopyImage vkCmdUpdateBuffer vkCmdFillBuffer vkCmdClearColorImage
vkCmdPipelineBarrier
vkCreateFence vkDestroyFence vkResetFences vkGetFenceStatus vkWaitForFences
vkCreateSemaphore vkDestroySemaphore vkGetSemaphoreCounterValue vkWaitSemaphores vkSignalSemaphore
vkGetSemaphoreFdKHR vkImportSemaphoreFdKHR
vkCreateDescriptorSetLayout vkDestroyDescriptorSetLayout vkCreateDescriptorPool vkDestroyDescriptorPool vkResetDescriptorPool
vkAllocateDescriptorSets vkFreeDescriptorSets vkUpdateDescriptorSets
vkCreatePipelineLayout vkDestroyPipelineLayout vkCreateShaderModule vkDestroyShaderModule vkCreateComputePipelines vkDestroyPipeline
vkCmdBindPipeline vkCmdBindDescriptorSets vkCmdPushConstants vkCmdDispatch
""".split()

#: Beside what the commands mention: what goes into a pNext chain or behind a void pointer.
STRUCTS = """
VkApplicationInfo VkPhysicalDeviceIDProperties VkPhysicalDeviceDriverProperties VkPhysicalDeviceExternalMemoryHostPropertiesEXT
VkPhysicalDeviceMaintenance3Properties VkPhysicalDevicePCIBusInfoPropertiesEXT VkPhysicalDeviceSubgroupProperties
VkPhysicalDeviceTimelineSemaphoreFeatures VkPhysicalDeviceBufferDeviceAddressFeatures VkPhysicalDeviceSynchronization2Features
VkPhysicalDevice16BitStorageFeatures VkPhysicalDevice8BitStorageFeatures VkPhysicalDeviceShaderFloat16Int8Features
VkMemoryDedicatedRequirements VkMemoryDedicatedAllocateInfo VkExportMemoryAllocateInfo VkImportMemoryFdInfoKHR
VkImportMemoryHostPointerInfoEXT VkMemoryAllocateFlagsInfo VkExternalMemoryBufferCreateInfo VkExternalMemoryImageCreateInfo
VkPhysicalDeviceExternalImageFormatInfo VkExternalImageFormatProperties
VkSemaphoreTypeCreateInfo VkExportSemaphoreCreateInfo VkTimelineSemaphoreSubmitInfo VkMemoryBarrier VkBufferMemoryBarrier
VkImageMemoryBarrier VkValidationFeaturesEXT VkDebugUtilsMessengerCreateInfoEXT VkBaseOutStructure
""".split()

#: Beside what the structs mention. VkStructureType is written into each struct instead.
ENUMS = """
VkResult VkImageLayout VkFormat VkQueueFlagBits VkPhysicalDeviceType VkAccessFlagBits VkPipelineStageFlagBits VkMemoryPropertyFlagBits
VkMemoryHeapFlagBits VkFormatFeatureFlagBits VkSemaphoreWaitFlagBits
""".split()
SKIPPED_ENUMS = {"VkStructureType", "VkDynamicState", "VkInternalAllocationType", "VkSystemAllocationScope"}

#: Whose values of enums are wanted; those of the core versions always are.
EXTENSIONS = {"VK_KHR_external_memory_fd", "VK_EXT_external_memory_dma_buf", "VK_EXT_external_memory_host", "VK_KHR_external_semaphore_fd",
              "VK_EXT_debug_utils", "VK_EXT_validation_features", "VK_EXT_queue_family_foreign", "VK_EXT_image_drm_format_modifier"}
CONSTANTS = ("VK_TRUE", "VK_FALSE", "VK_WHOLE_SIZE", "VK_UUID_SIZE", "VK_QUEUE_FAMILY_IGNORED", "VK_QUEUE_FAMILY_EXTERNAL",
             "VK_QUEUE_FAMILY_FOREIGN_EXT", "VK_REMAINING_MIP_LEVELS", "VK_REMAINING_ARRAY_LAYERS")

PLAIN = {"char": "c_char", "int": "c_int", "float": "c_float", "double": "c_double", "size_t": "c_size_t", "uint8_t": "c_uint8",
         "uint16_t": "c_uint16", "uint32_t": "c_uint32", "int32_t": "c_int32", "int64_t": "c_int64", "uint64_t": "c_uint64",
         "VkBool32": "c_uint32", "VkDeviceSize": "c_uint64", "VkDeviceAddress": "c_uint64", "VkFlags": "c_uint32",
         "VkFlags64": "c_uint64", "VkSampleMask": "c_uint32", "PFN_vkVoidFunction": "c_void_p"}
#: Nobody allocates for the driver here.
OPAQUE = {"VkAllocationCallbacks"}

IMPORTS = "<imports>"
HEADER = '''\
"""Vulkan as ctypes sees it: constants, handles, structs, functions. GENERATED by tools/generate_vulkan.py from vk.xml {version}.

A struct fills in its own ``sType``, and the count beside a pointer that was given a list. What is pointed to may be a struct, a list
(made an array), bytes or str; it lives as long as the struct that was given it. ``pNext`` takes a struct, or several, which are chained.
A name that the struct has not is an AttributeError. Handles are ints.
"""

# ruff: noqa: D101, RUF012

from __future__ import annotations

import ctypes
from collections.abc import Sequence
{imports}
from typing import Any, ClassVar, NamedTuple

#: Of the registry that this was generated from.
HEADER_VERSION = "{version}"


class Function(NamedTuple):
    """How a function is called, and what brings it.

    Attributes:
        level: ``"global"``, ``"instance"`` or ``"device"``: which handle it is resolved with.
        restype, argtypes: as ctypes takes them. Structs may be passed as they are; what comes back is passed as ``ctypes.byref(x)``.
        since: the core version that has it, or the extension that brings it.
        aliases: extension -> the name that this function has in it.
    """

    level: str
    restype: Any
    argtypes: tuple[Any, ...]
    since: str
    aliases: dict[str, str]


class Struct(ctypes.Structure):
    """What all structs have in common."""

    __slots__ = ("_keep",)
    _stype_: ClassVar[int] = -1                     # VkStructureType; -1: it has none
    _points_: ClassVar[dict[str, Any]] = {{}}         # pointer member -> what it points to; None: void
    _counts_: ClassVar[dict[str, str]] = {{}}         # pointer member -> the member that says how many

    def __init__(self, *values: Any, pNext: Struct | Sequence[Struct] | None = None, **members: Any) -> None:
        """Members by name; of structs without sType also in their order, where they are plain numbers."""
        if self._points_:
            for name in self._points_.keys() & members.keys():
                members[name] = self._pointed(name, members[name], members)
        if self._stype_ < 0:
            super().__init__(*values, **members)
        else:
            if values:
                raise TypeError(f"{{type(self).__name__}} takes its members by name")
            super().__init__(self._stype_, **members)
            if pNext is not None:
                chain(self, *(pNext if isinstance(pNext, (list, tuple)) else (pNext,)))

    def _pointed(self, name: str, value: Any, members: dict[str, Any]) -> Any:
        item = self._points_[name]
        if isinstance(value, (list, tuple)):
            count = self._counts_.get(name)
            if count is not None:
                members.setdefault(count, len(value))
            if not value:
                return None
            if item is c_char_p:
                value = [v.encode() if isinstance(v, str) else v for v in value]
            return (item * len(value))(*value)
        if item is None and value is not None and not isinstance(value, int):
            # void: ctypes takes an address and keeps nothing alive
            held = ctypes.create_string_buffer(value, len(value)) if isinstance(value, bytes) else value
            self._keep = (*getattr(self, "_keep", ()), held)
            return ctypes.addressof(held)
        if item is c_char_p and isinstance(value, str):
            return value.encode()
        if item is not None and item is not c_char_p and isinstance(value, item):
            return ctypes.pointer(value)
        return value

    def __repr__(self) -> str:
        """Its members."""
        return f"{{type(self).__name__}}({{', '.join(f'{{name}}={{getattr(self, name)!r}}' for name, *_ in self._fields_)}})"


def chain(info: Any, *structs: Any) -> Any:
    """`info`, at the end of whose pNext chain are now `structs`, each behind the one before. `info` keeps them alive."""
    last = info
    while getattr(last, "_keep", ()) and isinstance(last._keep[0], _Next):
        last = last._keep[0].struct
    for s in structs:
        last.pNext = ctypes.addressof(s)
        last._keep = (_Next(s), *getattr(last, "_keep", ()))
        last = s
        while getattr(last, "_keep", ()) and isinstance(last._keep[0], _Next):
            last = last._keep[0].struct
    return info


class _Next(NamedTuple):
    struct: Any


class Union(ctypes.Union):
    """What all unions have in common."""

'''


class Writer:
    """Collects what is reachable from the lists and writes it in an order in which everything is known before it is used."""

    def __init__(self, registry: Any) -> None:
        """`registry`: a VulkanObject."""
        self.vk = registry
        self.structs: list[str] = []
        self.handles: set[str] = set()
        self.enums: set[str] = set(ENUMS)
        self.callbacks: list[str] = []
        self.blocks: dict[str, str] = {}
        self.aliases: dict[str, list[Any]] = {}
        for c in registry.commands.values():
            if c.alias:
                self.aliases.setdefault(c.alias, []).append(c)

    # ---- types ----
    def ctype(self, name: str, declaration: str, arrays: list[str]) -> str:
        """The ctypes expression of a member or parameter."""
        depth = declaration.count("*")
        if name == "void" or name in OPAQUE:
            out, depth = "c_void_p", depth - 1
        elif name == "char" and depth:
            out, depth = "c_char_p", depth - 1
        else:
            out = self.base(name)
        out = "POINTER(" * depth + out + ")" * depth
        for extent in reversed(arrays):
            constant = self.vk.constants.get(extent)
            out = f"{out} * {constant.value if constant else int(extent)}"
        return out

    def base(self, name: str) -> str:
        """The ctypes expression of a type, which is declared before what asks."""
        if name in PLAIN:
            return PLAIN[name]
        if name in self.vk.handles:
            self.handles.add(name)
            return name
        if name in self.vk.structs:
            self.struct(name)
            return name
        if name in self.vk.flags:
            flags = self.vk.flags[name]
            if flags.bitmaskName:
                self.enums.add(flags.bitmaskName)
            return "c_uint64" if flags.bitWidth == 64 else "c_uint32"
        if name in self.vk.bitmasks:
            self.enums.add(name)
            return "c_uint64" if self.vk.bitmasks[name].bitWidth == 64 else "c_uint32"
        if name in self.vk.enums:
            self.enums.add(name)
            return "c_int32"
        if name in self.vk.funcPointers:
            self.callback(name)
            return name
        raise KeyError(f"{name}: no type of the registry's")

    def callback(self, name: str) -> None:
        """A function pointer that the driver calls."""
        if name not in self.callbacks:
            f = self.vk.funcPointers[name]
            args = [self.ctype(p.type, p.cDeclaration, []) for p in f.params]
            self.blocks[name] = f"{name} = CFUNCTYPE({', '.join([self.base(f.returnType), *args])})"
            self.callbacks.append(name)
            self.structs.append(name)

    def struct(self, name: str) -> None:
        """A struct, after those that it has or points to."""
        if name in self.blocks:
            return
        self.blocks[name] = ""
        s = self.vk.structs[name]
        if name == "VkBaseOutStructure":
            fields = [("sType", "c_int32"), ("pNext", "c_void_p")]
        else:
            fields = []
            for m in s.members:
                if m.bitFieldWidth:
                    raise ValueError(f"{name}.{m.name}: bit fields are not declared here")
                fields.append((m.name, self.ctype(m.type, m.cDeclaration, m.fixedSizeArray)))
        points, counts = {}, {}
        own = {m.name for m in s.members}
        for m in s.members:
            if not m.pointer or m.name == "pNext" or m.type.startswith("PFN_"):
                continue
            item = self.ctype(m.type, m.cDeclaration.replace("*", "", 1), m.fixedSizeArray) if m.type not in ("void", "char") else \
                "None" if m.type == "void" else "c_char_p"
            points[m.name] = item
            first = (m.length or "").split(",")[0]
            if first in own and not s.returnedOnly:
                counts[m.name] = first
        stype = next((f.value for f in self.vk.enums["VkStructureType"].fields if f.name == s.sType), None) if s.sType else None
        lines = [f"class {name}({'Union' if s.union else 'Struct'}):"]
        if not s.union:
            lines.append("    __slots__ = ()")
        if stype is not None:
            lines.append(f"    _stype_ = {stype}")
        if points and not s.union:
            lines.append(wrapped("    _points_ = {", [f'"{k}": {v}' for k, v in points.items()], "}"))
        if counts and not s.union:
            lines.append(wrapped("    _counts_ = {", [f'"{k}": "{v}"' for k, v in counts.items()], "}"))
        lines.append(wrapped("    _fields_ = (", [f'("{n}", {t})' for n, t in fields] + ([""] if len(fields) == 1 else []), ")"))
        self.blocks[name] = "\n".join(lines)
        self.structs.append(name)

    # ---- what is written ----
    def function(self, name: str) -> str:
        """One entry of FUNCTIONS."""
        c = self.vk.commands[name]
        args = [self.ctype(p.type, p.cDeclaration, p.fixedSizeArray) for p in c.params]
        returns = "None" if c.returnType == "void" else self.base(c.returnType)
        first = c.params[0].type
        level = "device" if first in ("VkDevice", "VkQueue", "VkCommandBuffer") else \
            "instance" if first in ("VkInstance", "VkPhysicalDevice") else "global"
        if name in ("vkGetInstanceProcAddr", "vkGetDeviceProcAddr", "vkSetDebugUtilsObjectNameEXT"):
            level = {"vkGetInstanceProcAddr": "global"}.get(name, "instance" if name == "vkGetDeviceProcAddr" else "device")
        since = c.version.name if c.version else c.extensions[0] if c.extensions else "VK_VERSION_1_0"
        aliases = {e: a.name for a in self.aliases.get(name, ()) for e in a.extensions}
        tuple_of = f"({', '.join(args)},)" if len(args) == 1 else f"({', '.join(args)})"
        pairs = ", ".join(f'"{k}": "{v}"' for k, v in sorted(aliases.items()))
        return wrapped(f'    "{name}": Function(', [f'"{level}"', returns, tuple_of, f'"{since}"', f"{{{pairs}}}"], "),")

    def values(self, name: str) -> list[tuple[str, int]]:
        """Constants of an enum or a bitmask: the core's, and those of the extensions in use."""
        e = self.vk.enums.get(name)
        fields = e.fields if e else self.vk.bitmasks[name].flags
        if name == "VkResult":
            return [(f.name, f.value) for f in fields]
        return [(f.name, f.value) for f in fields
                if any(r.startswith("VK_VERSION") or r in EXTENSIONS for r in f.definingRequirements)
                or (not f.definingRequirements
                    and (f.name.rpartition("_")[2] not in self.vk.vendorTags or any(x in EXTENSIONS for x in f.extensions)))]

    def formats(self) -> list[str]:
        """Entries of FORMATS: what can be an array's elements."""
        out = []
        core = {n for n, _ in self.values("VkFormat")}
        for f in self.vk.formats.values():
            bits = {c.bits for c in f.components}
            kinds = {c.numericFormat for c in f.components}
            plain = f.name in core and not (f.compressed or f.chroma or f.planes or f.packed)
            if plain and len(bits) == len(kinds) == f.texelsPerBlock == 1 and f.blockSize * 8 == len(f.components) * int(*bits):
                names = "".join(c.type for c in f.components)
                out.append(f'    {f.name}: ({f.blockSize}, "{names}", {int(*bits)}, "{kinds.pop()}"),')
        return out

    def text(self) -> str:
        """The whole module."""
        functions = [self.function(n) for n in COMMANDS]
        for name in STRUCTS:
            self.struct(name)
        out = [HEADER.format(version=self.vk.headerVersionComplete, imports=IMPORTS)]
        for n in CONSTANTS:
            value = self.vk.constants[n].value
            out.append(f"{n} = {hex(value) if value > 255 else value}")
        for name in sorted(self.enums - SKIPPED_ENUMS):
            known = name in self.vk.bitmasks
            values = self.values(name)
            if values:
                out += ["", f"# {name}", *(f"{n} = {hex(v) if known else v}" for n, v in values)]
        out += ["", "#: VkResult -> its name.", "RESULTS: dict[int, str] = {",
                *(f'    {v}: "{n}",' for n, v in self.values("VkResult")), "}"]
        out += ["", "#: VkFormat -> (bytes of a texel, its components, bits of each, numeric format): those whose components are alike.",
                "FORMATS: dict[int, tuple[int, str, int, str]] = {", *self.formats(), "}"]
        out += ["", "# Handles: dispatchable ones are pointers, the others 64 bits"]
        for name in sorted(self.handles):
            out.append(f"{name} = {'c_void_p' if self.vk.handles[name].dispatchable else 'c_uint64'}")
        before = False
        for name in self.structs:
            is_class = self.blocks[name].startswith("class")
            out += ["", "", self.blocks[name]] if is_class or before else ["", self.blocks[name]]
            before = is_class
        out += ["", "", "FUNCTIONS: dict[str, Function] = {", *functions, "}"]
        body = "\n".join(out) + "\n"
        names = [n for n in ("CFUNCTYPE", "POINTER", *sorted(set(PLAIN.values()) | {"c_char_p"})) if re.search(rf"\b{n}\b", body)]
        return body.replace(IMPORTS, f"from ctypes import {', '.join(sorted(names, key=natural))}")


def wrapped(head: str, parts: list[str], tail: str) -> str:
    """``head part, part, ... tail`` on as many lines of 140 columns as it takes."""
    one = head + ", ".join(parts).rstrip(" ") + tail
    if len(one) <= 140:
        return one
    glued = [p.replace(" ", "\0") for p in parts]
    if max(map(len, glued)) > 100:
        glued = [p.replace(",\0", ", ") for p in glued]
    body = textwrap.fill(", ".join(glued), 130, break_long_words=False, break_on_hyphens=False)
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    return head + "\n" + textwrap.indent(body.replace("\0", " "), indent) + tail


def natural(name: str) -> tuple[bool, list[str]]:
    """How ruff sorts imports: constants first, numbers by value."""
    return not name.isupper(), [x.zfill(3) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def generated() -> str:
    """What api.py should be."""
    from vulkan_object import get_vulkan_object

    return Writer(get_vulkan_object()).text()


def main() -> int:
    """Write api.py, or compare it (``--check``)."""
    text = generated()
    if "--check" in sys.argv[1:]:
        same = TARGET.exists() and TARGET.read_text() == text
        print("current" if same else f"{TARGET} is not current: run python tools/generate_vulkan.py")
        return 0 if same else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
