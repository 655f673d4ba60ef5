"""A compute shader over tensors: storage buffers, push constants, specialisation. As little as examples, tests and delegates need."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import interop
from interop.contract import ExchangeError, Point, point

from . import api as vk
from . import commands, copies, handles, memory, ring
from .buffers import native

if TYPE_CHECKING:
    from interop import Lease, Tensor

    from .context import Context

_MAGIC = 0x07230203
_STORAGE = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_SETS = 16              # descriptor sets of a pool; one more pool where all are in use
_DECORATE, _BINDING, _DESCRIPTOR_SET = 71, 33, 34      # SPIR-V, OpDecorate and its decorations
_ENTRY_POINT, _GL_COMPUTE, _FUNCTION_END, _VARIABLE, _PUSH_CONSTANT = 15, 5, 56, 59, 9     # SPIR-V, Instructions and Storage Class
_NOTHING = point(done=lambda: True)


class Shader:
    """A compute pipeline whose descriptor set 0 is storage buffers. Calling it dispatches.

    Attributes:
        context: whose it is.
        bindings: how many tensors it takes.
        push_constants: bytes of them.
    """

    def __init__(self, context: Context, spirv: bytes, *, entry: str = "main", bindings: int | None = None, push_constants: int = 0,
                 specialization: Mapping[int, Any] | None = None) -> None:
        """Make the pipeline.

        Args:
            context: where it runs.
            spirv: SPIR-V of a compute shader, of the machine's byte order.
            entry: its entry point.
            bindings: storage buffers of set 0, binding 0 onwards; None: as many as the code declares.
            push_constants: bytes, a multiple of 4.
            specialization: constant id -> number: int and bool are 32 bits, float too; NumPy's scalars are what they are.

        Raises:
            ValueError: no SPIR-V, a part of it, no such entry point, or more push constants than the device has. VulkanError: the driver
                refuses.
        """
        if not hasattr(context, "memory_types"):
            raise TypeError(f"context {context!r}: a Context of Vulkan's")
        context.check()
        ring.sweep(context)
        code = _read(spirv, entry)
        self.bindings = code.bindings if bindings is None else handles.count(bindings, "bindings")
        handles.count(push_constants, "push_constants")
        if code.pushes and not push_constants:
            raise ValueError("push_constants 0: the code has a block of them")
        most = int(context.limits.maxPushConstantsSize)
        if push_constants % 4 or not 0 <= push_constants <= most:
            raise ValueError(f"push_constants {push_constants}: a multiple of 4, at most {most} (maxPushConstantsSize)")
        if code.bindings > self.bindings:
            raise ValueError(f"bindings {self.bindings}: the code declares {code.bindings} in set 0")
        most = int(context.limits.maxPerStageDescriptorStorageBuffers)
        if self.bindings > most:
            raise ValueError(f"bindings {self.bindings}: {context.physical.name} has at most {most} (maxPerStageDescriptorStorageBuffers)")
        self.context, self.push_constants = context, push_constants
        if specialization is not None and not isinstance(specialization, Mapping):
            raise TypeError(f"specialization {specialization!r}: a dict of ids and numbers")
        self._made = _Made(context, spirv, entry, self.bindings, push_constants, specialization or {})
        self._lock = threading.Lock()
        self._flying: deque[tuple[Point, int]] = deque()        # dispatches, and the descriptor set of each
        self._spare: list[int] = []

    def __call__(self, *tensors: Tensor, groups: Sequence[int] = (1, 1, 1), push: Any = b"", access: str | Sequence[str] | None = None,
                 stream: Any = None, waits: Iterable[Any] = ()) -> Point:
        """Dispatch once. The tensors are leased until the Point, which is noted on them: whoever uses them next comes after it.

        Args:
            tensors: memory of the Context, one for each binding.
            groups: (x, y, z) work groups, fewer dimensions are 1.
            push: the push constants: bytes, or numbers, which are packed as 32 bits each (NumPy's scalars as they are).
            access: ``"read"``, ``"write"`` or ``"read_write"``, one for all or one for each; None: read_write, read where read-only.
            stream: VkQueue to run on, one that the Context knows; None: its first.
            waits: Points and semaphores to wait for beside what is pending on the tensors, as `Queue.submit` takes them.

        Raises:
            ExchangeError: memory of another Context; an offset or size that no descriptor takes. LeaseError: somebody uses a tensor.
        """
        c = self.context
        c.check()
        queue = copies.queue_of(c, stream)
        if not c.physical.families[queue.family][0] & vk.VK_QUEUE_COMPUTE_BIT:
            raise ExchangeError(f"{queue!r} does not compute", "give a stream that does")
        x, y, z = _groups(c, groups)
        constants = packed(push)
        if len(constants) != self.push_constants:
            raise ValueError(f"push: {len(constants)} bytes, and the shader takes {self.push_constants}")
        if len(tensors) != self.bindings:
            raise TypeError(f"{len(tensors)} tensors, and the shader has {self.bindings} bindings")
        for t in tensors:
            if not isinstance(t, interop.Tensor):
                raise TypeError(f"{t!r} is no Tensor: interop.to(x, context) makes one")
        wanted = _accesses(tensors, access)
        infos = [self._info(t, a) for t, a in zip(tensors, wanted, strict=True)]
        leases = _leased(c, tensors, wanted)
        done: Point = _NOTHING
        try:
            with self._lock:
                chosen = self._set()
                try:
                    self._write(chosen, infos)
                    made, t = self._made, c.vk

                    def record(buffer: int) -> None:
                        commands.between(t, buffer)
                        t.vkCmdBindPipeline(buffer, vk.VK_PIPELINE_BIND_POINT_COMPUTE, made.pipeline)
                        if self.bindings:
                            t.vkCmdBindDescriptorSets(buffer, vk.VK_PIPELINE_BIND_POINT_COMPUTE, made.layout, 0, 1,
                                                      (vk.VkDescriptorSet * 1)(chosen), 0, None)
                        if constants:
                            t.vkCmdPushConstants(buffer, made.layout, vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(constants), constants)
                        t.vkCmdDispatch(buffer, x, y, z)
                        copies.after(t, buffer)

                    done = made.last[queue.handle] = queue.run(record, waits=[*(lease.after for lease in leases), *waits])
                finally:
                    self._flying.append((done, chosen))
        finally:
            for lease in leases:
                lease.release(done)
        return done

    def _info(self, t: Tensor, access: str) -> Any:
        c = self.context
        buffer = memory.find(t.allocation) if t.layout == "strided" and t.device.name == "vulkan" else None
        if buffer is None or buffer.context is not c:
            raise ExchangeError(f"{t!r} is no buffer of this Context", "interop.to(x, context) imports or copies it there")
        n = native(t, write=access != "read")
        if not n.usage & vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT:
            raise ExchangeError(f"the buffer {n.handle:#x} was made with usage {n.usage:#x}, without VK_BUFFER_USAGE_STORAGE_BUFFER_BIT")
        # whole words, where the buffer has them: shaders read bytes by fours
        size = min(n.size + -n.size % 4, buffer.nbytes - n.offset)
        return vk.VkDescriptorBufferInfo(buffer=n.handle, offset=n.offset, range=size)

    # ---- descriptor sets ----
    def _set(self) -> int:
        while self._flying and self._flying[0][0].done():
            self._spare.append(self._flying.popleft()[1])
        if not self._spare:
            self._spare.extend(self._made.sets())
        return self._spare.pop()

    def _write(self, chosen: int, infos: list[Any]) -> None:
        if not infos:
            return
        table = (vk.VkDescriptorBufferInfo * len(infos))(*infos)
        write = vk.VkWriteDescriptorSet(dstSet=chosen, dstBinding=0, descriptorCount=len(infos), descriptorType=_STORAGE, pBufferInfo=table)
        # one write runs on into the bindings that follow (Vulkan, consecutive binding updates)
        self.context.vk.vkUpdateDescriptorSets(self.context.device_handle, 1, (vk.VkWriteDescriptorSet * 1)(write), 0, None)

    def __del__(self) -> None:
        """The pipeline goes when the last dispatches are done."""
        for done, _ in getattr(self, "_flying", ()):
            if self.context.alive and not done.done():
                ring.keep(self.context, done, self._made)

    def __repr__(self) -> str:
        return f"<Shader of {self.bindings} buffers on {self.context.device}>"


class _Made:
    """The Vulkan objects of a Shader. They go when nobody holds this, or with the Context."""

    __slots__ = ("__weakref__", "_bindings", "_context", "_key", "_objects", "last", "layout", "pipeline", "sets_layout")

    def __init__(self, context: Context, spirv: bytes, entry: str, bindings: int, push: int, constants: Mapping[int, Any]) -> None:
        self._context, self._bindings = context, bindings
        t, device = context.vk, context.device_handle
        self._objects: list[tuple[str, int]] = []
        self.last: dict[int, Point] = {}                # VkQueue -> its newest dispatch
        self._key = context.own(functools.partial(_destroy, t, device, self._objects))
        try:
            slots = [vk.VkDescriptorSetLayoutBinding(binding=i, descriptorType=_STORAGE, descriptorCount=1,
                                                     stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT) for i in range(bindings)]
            self.sets_layout = self._create("DescriptorSetLayout", vk.VkDescriptorSetLayoutCreateInfo(pBindings=slots))
            ranges = [vk.VkPushConstantRange(vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, push)] if push else []
            self.layout = self._create("PipelineLayout", vk.VkPipelineLayoutCreateInfo(pSetLayouts=[self.sets_layout],
                                                                                       pPushConstantRanges=ranges))
            code = (ctypes.c_uint32 * (len(spirv) // 4)).from_buffer_copy(spirv)
            module = self._create("ShaderModule", vk.VkShaderModuleCreateInfo(codeSize=len(spirv), pCode=code))
            try:
                self.pipeline = self._compile(module, entry, constants)
            finally:
                self._objects.remove(("ShaderModule", module))
                t.vkDestroyShaderModule(device, module, None)
        except BaseException:
            context.release(self._key)
            raise

    def _create(self, kind: str, info: Any) -> int:
        c, out = self._context, ctypes.c_uint64()
        c.ok(getattr(c.vk, f"vkCreate{kind}")(c.device_handle, info, None, ctypes.byref(out)), f"vkCreate{kind}")
        self._objects.append((kind, handles.owned(out.value, f"vkCreate{kind}")))
        return out.value

    def _compile(self, module: int, entry: str, constants: Mapping[int, Any]) -> int:
        entries, data = [], b""
        for number, value in constants.items():
            handles.count(number, "specialization id", 0, 2**32 - 1)
            one = packed([value])
            entries.append(vk.VkSpecializationMapEntry(number, len(data), len(one)))
            data += one
        stage = vk.VkPipelineShaderStageCreateInfo(
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=entry,
            **({"pSpecializationInfo": vk.VkSpecializationInfo(pMapEntries=entries, pData=data, dataSize=len(data))} if entries else {}))
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=self.layout, basePipelineIndex=-1)
        c, out = self._context, (vk.VkPipeline * 1)()
        c.ok(c.vk.vkCreateComputePipelines(c.device_handle, 0, 1, (vk.VkComputePipelineCreateInfo * 1)(info), None, out),
             "vkCreateComputePipelines")
        self._objects.append(("Pipeline", handles.owned(out[0], "vkCreateComputePipelines")))
        return int(out[0])

    def sets(self) -> list[int]:
        """The descriptor sets of one more pool."""
        c = self._context
        n = _SETS if self._bindings else 1
        sizes = [vk.VkDescriptorPoolSize(_STORAGE, n * max(self._bindings, 1))]
        pool = self._create("DescriptorPool", vk.VkDescriptorPoolCreateInfo(maxSets=n, pPoolSizes=sizes))
        out = (vk.VkDescriptorSet * n)()
        info = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[self.sets_layout] * n)
        c.ok(c.vk.vkAllocateDescriptorSets(c.device_handle, info, out), "vkAllocateDescriptorSets")
        return list(out)

    def __del__(self) -> None:
        """Gone where no dispatch is on its way; else its Context destroys them when it closes."""
        if getattr(self, "_key", 0) and self._context.alive and all([p.done() for p in self.last.values()]):
            self._context.release(self._key)


def _destroy(table: Any, device: int, objects: list[tuple[str, int]]) -> None:
    while objects:
        kind, handle = objects.pop()
        getattr(table, f"vkDestroy{kind}")(device, handle, None)


def packed(values: Any) -> bytes:
    """Push constants or specialisation constants as bytes: ints, bools and floats of 32 bits, NumPy's scalars and arrays as they are.

    ValueError for an int that 32 bits do not hold. TypeError for what is no number.
    """
    if isinstance(values, (bytes, bytearray, memoryview)):
        return bytes(values)
    out = b""
    for v in values:
        if isinstance(v, (np.bool_, bool)):
            out += struct.pack("=I", bool(v))
        elif isinstance(v, (np.generic, np.ndarray)):
            out += v.tobytes()
        elif isinstance(v, int):
            if not -2**31 <= v < 2**32:
                raise ValueError(f"{v} has no 32 bits: numpy.int64 or numpy.uint64 says that it shall have 64")
            out += struct.pack("=i" if v < 0 else "=I", v)
        elif isinstance(v, float):
            try:
                out += struct.pack("=f", v)
            except OverflowError:
                raise ValueError(f"{v} has no 32 bits: numpy.float64 says that it shall have 64") from None
        else:
            raise TypeError(f"{v!r} is no number")
    return out


class _Code(NamedTuple):
    """What SPIR-V says of itself: how many bindings it declares in set 0 (the highest, and one), whether it has push constants."""

    bindings: int
    pushes: bool


def _read(spirv: bytes, entry: str) -> _Code:
    """Look through it. ValueError where it is no SPIR-V, was cut off, or has no compute shader of that name: drivers crash on those."""
    if not isinstance(spirv, (bytes, bytearray)) or len(spirv) % 4 or len(spirv) < 20:
        raise ValueError("spirv: bytes, a multiple of 4, at least a header (SPIR-V, Physical Layout)")
    words = np.frombuffer(spirv, np.uint32)
    if words[0] != _MAGIC:
        raise ValueError(f"spirv: its first word is {int(words[0]):#x}, not {_MAGIC:#x} (SPIR-V, Magic Number)")
    binding: dict[int, int] = {}
    elsewhere: set[int] = set()
    entries: list[str] = []
    pushes, at, op = False, 5, 0
    while at < len(words):
        count, op = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        if not count or at + count > len(words):
            raise ValueError(f"spirv: the instruction at word {at} has {count} words, and {len(words) - at} are left")
        if op == _DECORATE and count == 4:
            what, value = int(words[at + 2]), int(words[at + 3])
            if what == _BINDING:
                binding[int(words[at + 1])] = value
            elif what == _DESCRIPTOR_SET and value:
                elsewhere.add(int(words[at + 1]))
        elif op == _ENTRY_POINT and count > 3 and words[at + 1] == _GL_COMPUTE:
            entries.append(words[at + 3:at + count].tobytes().split(b"\0")[0].decode("utf-8", "replace"))
        elif op == _VARIABLE and count > 3 and words[at + 3] == _PUSH_CONSTANT:
            pushes = True
        at += count
    if op != _FUNCTION_END:
        raise ValueError("spirv: it does not end with the end of a function: it was cut off, or has no code")
    if entry not in entries:
        raise ValueError(f"entry {entry!r}: the code has {', '.join(entries) or 'no'} compute shader(s)")
    return _Code(max((b + 1 for v, b in binding.items() if v not in elsewhere), default=0), pushes)


def _groups(context: Context, groups: Sequence[int]) -> tuple[int, int, int]:
    given = tuple(handles.count(n, "groups") for n in ((groups,) if isinstance(groups, int) else groups))
    x, y, z = (*given, 1, 1, 1)[:3]
    most = tuple(context.limits.maxComputeWorkGroupCount)
    if len(given) > 3 or any(not 0 <= n <= m for n, m in zip((x, y, z), most, strict=True)):
        raise ValueError(f"groups {groups}: one to three numbers, at most {most} (maxComputeWorkGroupCount)")
    return x, y, z


def _accesses(tensors: Sequence[Tensor], access: str | Sequence[str] | None) -> list[str]:
    if access is None:
        return ["read" if t.readonly else "read_write" for t in tensors]
    out = [access] * len(tensors) if isinstance(access, str) else list(access)
    if len(out) != len(tensors):
        raise ValueError(f"access {access!r}: one for each of {len(tensors)} tensors")
    return out


def _leased(context: Context, tensors: Sequence[Tensor], accesses: Sequence[str]) -> list[Lease]:
    """A lease for each, one for those that are the same bytes; all or none."""
    merged: dict[tuple[Any, ...], tuple[Tensor, str]] = {}
    for t, access in zip(tensors, accesses, strict=True):
        n = native(t)
        key = (n.handle, n.offset, n.size)
        before = merged.get(key)
        merged[key] = (t, access) if before is None else (before[0], access if access == before[1] else "read_write")
    out: list[Lease] = []
    try:
        for t, access in merged.values():
            out.append(interop.acquire(t, context, access))
    except BaseException:
        for lease in out:
            lease.release(_NOTHING)
        raise
    return out
