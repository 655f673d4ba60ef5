"""The fake driver's images, pipelines and descriptor sets. Texels lie row by row; a kernel is a Python function by its entry point."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from interop.adapters.vulkan import api as vk


class Objects:
    """Functions of images and shaders."""

    # ---- images ----
    def vkGetPhysicalDeviceFormatProperties(self: Any, device: int, format: int, out: Any) -> None:
        out[0].optimalTilingFeatures = out[0].linearTilingFeatures = 0xFFFF if format in vk.FORMATS else 0

    def vkGetPhysicalDeviceImageFormatProperties2(self: Any, device: int, info: Any, out: Any) -> int:
        if info[0].format not in vk.FORMATS:
            return vk.VK_ERROR_FORMAT_NOT_SUPPORTED
        most = out[0].imageFormatProperties.maxExtent
        most.width = most.height = most.depth = 4096
        return 0

    def vkCreateImage(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        i = info[0]
        out[0] = self.make("Image", self.get(device, "Device"), extent=(i.extent.width, i.extent.height, i.extent.depth),
                           layers=i.arrayLayers, texel=vk.FORMATS[i.format][0], usage=i.usage, layout=i.initialLayout, memory=None,
                           offset=0).handle
        return 0

    def vkDestroyImage(self: Any, device: int, image: int, _: Any) -> None:
        self.end(image, "Image")

    def _image_size(self: Any, i: Any) -> int:
        w, h, d = i.extent
        n = w * h * d * i.layers * i.texel
        return -(-n // self.config.alignment) * self.config.alignment

    def vkGetImageMemoryRequirements(self: Any, device: int, image: int, out: Any) -> None:
        r = out[0]
        r.size, r.alignment = self._image_size(self.get(image, "Image")), self.config.alignment
        r.memoryTypeBits = (1 << len(self.config.types)) - 1

    def vkGetImageMemoryRequirements2(self: Any, device: int, info: Any, out: Any) -> None:
        self.vkGetImageMemoryRequirements(device, info[0].image, [out[0].memoryRequirements])
        dedicated = self.chain(out[0]).get("VkMemoryDedicatedRequirements")
        if dedicated is not None:
            dedicated.requiresDedicatedAllocation = self.config.dedicated == "requires"

    def vkBindImageMemory(self: Any, device: int, image: int, memory: int, offset: int) -> int:
        i, m = self.get(image, "Image"), self.get(memory, "Memory")
        if offset % self.config.alignment or offset + self._image_size(i) > m.size:
            self.blame("VUID-vkBindImageMemory-size-01049", f"at {offset} of {m.size}")
        if self.config.dedicated == "requires" and m.dedicated != image:
            self.blame("VUID-vkBindImageMemory-image-01445", f"{i} takes a dedicated allocation")
        i.memory, i.offset = m, offset
        m.bound.append(i)
        return 0

    def transition(self: Any, image: Any, old: int, new: int) -> None:
        if old not in (image.layout, vk.VK_IMAGE_LAYOUT_UNDEFINED):
            self.blame("VUID-VkImageMemoryBarrier-oldLayout-01197", f"{image} is in {image.layout}, not {old}")
        if new in (vk.VK_IMAGE_LAYOUT_UNDEFINED, vk.VK_IMAGE_LAYOUT_PREINITIALIZED):
            self.blame("VUID-VkImageMemoryBarrier-newLayout-01198", f"{new}")
        image.layout = new

    def _in(self: Any, image: Any, layout: int, right: int) -> None:
        if image.layout != layout or layout not in (right, vk.VK_IMAGE_LAYOUT_GENERAL):
            self.blame("imageLayout", f"{image} is in {image.layout}, the copy says {layout}")

    def _rows(self, image: Any, r: Any) -> list[tuple[int, int, int]]:
        """(offset in the buffer, in the image, bytes) of each row of a VkBufferImageCopy."""
        width, height, depth = image.extent
        e, o, layers = r.imageExtent, r.imageOffset, r.imageSubresource
        length, tall = r.bufferRowLength or e.width, r.bufferImageHeight or e.height
        out = []
        for layer in range(layers.layerCount):
            for z in range(e.depth):
                for y in range(e.height):
                    plane = layer * e.depth + z
                    there = (((layers.baseArrayLayer + layer) * depth + o.z + z) * height + o.y + y) * width + o.x
                    out.append((r.bufferOffset + (plane * tall + y) * length * image.texel, there * image.texel, e.width * image.texel))
        return out

    def _image_copy(self: Any, commands: int, buffer: int, image: int, layout: int, regions: Any, n: int, writes: bool) -> None:
        i, b = self.get(image, "Image"), self.get(buffer, "Buffer")
        rows = [row for k in range(n) for row in self._rows(i, regions[k])]
        usage = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT if writes else vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        for at, _, size in rows:
            self.ranged(buffer, at, size, usage, "image copy")
        for k in range(n):
            if regions[k].bufferOffset % i.texel or regions[k].bufferOffset % 4:
                self.blame("VUID-bufferOffset", f"{regions[k].bufferOffset}")

        def run(queue: Any) -> None:
            self._in(i, layout, vk.VK_IMAGE_LAYOUT_TRANSFER_DST_OPTIMAL if writes else vk.VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL)
            for at, there, size in rows:
                self.touch(queue, b, at, size, not writes)
                if writes:
                    i.memory.backing.write(i.offset + there, b.memory.backing.read(b.offset + at, size), queue)
                else:
                    b.memory.backing.write(b.offset + at, i.memory.backing.read(i.offset + there, size), queue)

        self.record(commands, run, i, b)

    def vkCmdCopyBufferToImage(self: Any, commands: int, buffer: int, image: int, layout: int, n: int, regions: Any) -> None:
        self._image_copy(commands, buffer, image, layout, regions, n, True)

    def vkCmdCopyImageToBuffer(self: Any, commands: int, image: int, layout: int, buffer: int, n: int, regions: Any) -> None:
        self._image_copy(commands, buffer, image, layout, regions, n, False)

    # ---- shaders ----
    def vkCreateDescriptorSetLayout(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("DescriptorSetLayout", self.get(device, "Device"), n=info[0].bindingCount).handle
        return 0

    def vkCreatePipelineLayout(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("PipelineLayout", self.get(device, "Device")).handle
        return 0

    def vkCreateShaderModule(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("ShaderModule", self.get(device, "Device")).handle
        return 0

    def vkCreateComputePipelines(self: Any, device: int, cache: int, n: int, infos: Any, _: Any, out: Any) -> int:
        self.get(infos[0].stage.module, "ShaderModule")
        out[0] = self.make("Pipeline", self.get(device, "Device"), entry=infos[0].stage.pName.decode()).handle
        return 0

    def vkCreateDescriptorPool(self: Any, device: int, info: Any, _: Any, out: Any) -> int:
        out[0] = self.make("DescriptorPool", self.get(device, "Device"), sets=[]).handle
        return 0

    def vkAllocateDescriptorSets(self: Any, device: int, info: Any, out: Any) -> int:
        pool = self.get(info[0].descriptorPool, "DescriptorPool")
        for i in range(info[0].descriptorSetCount):
            made = self.make("DescriptorSet", pool, infos=[])
            pool.sets.append(made)
            out[i] = made.handle
        return 0

    def vkDestroyDescriptorPool(self: Any, device: int, pool: int, _: Any) -> None:
        gone = self.end(pool, "DescriptorPool")
        for s in gone.sets if gone else ():
            if s.busy:
                self.blame("VUID-vkDestroyDescriptorPool-descriptorPool-00303", f"{s} is in use")
            s.alive = False

    def vkDestroyDescriptorSetLayout(self: Any, device: int, x: int, _: Any) -> None:
        self.end(x, "DescriptorSetLayout")

    def vkDestroyPipelineLayout(self: Any, device: int, x: int, _: Any) -> None:
        self.end(x, "PipelineLayout")

    def vkDestroyShaderModule(self: Any, device: int, x: int, _: Any) -> None:
        self.end(x, "ShaderModule")

    def vkDestroyPipeline(self: Any, device: int, x: int, _: Any) -> None:
        self.end(x, "Pipeline")

    def vkUpdateDescriptorSets(self: Any, device: int, n: int, writes: Any, copies: int, _: Any) -> None:
        for k in range(n):
            w = writes[k]
            s = self.get(w.dstSet, "DescriptorSet")
            if s.busy:
                self.blame("VUID-vkUpdateDescriptorSets-None-03047", f"{s} is in use")
            s.infos = []
            for i in range(w.descriptorCount):
                d = w.pBufferInfo[i]
                b = self.ranged(d.buffer, d.offset, d.range, vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT, "descriptor")
                if d.offset % self.config.storage_alignment or d.range > self.config.max_storage_range:
                    self.blame("VUID-VkWriteDescriptorSet-descriptorType-00328", f"{d.range} bytes at {d.offset}")
                s.infos.append((b, d.offset, d.range))

    def vkCmdBindPipeline(self: Any, commands: int, point: int, pipeline: int) -> None:
        b = self.record(commands, lambda queue: None, self.get(pipeline, "Pipeline"))
        b.pipeline, b.set, b.push = self.objects[pipeline], None, b""

    def vkCmdBindDescriptorSets(self: Any, commands: int, point: int, layout: int, first: int, n: int, sets: Any, m: int, _: Any) -> None:
        s = self.get(sets[0], "DescriptorSet")
        b = self.record(commands, lambda queue: None, s, *(x[0] for x in s.infos))
        b.set = s

    def vkCmdPushConstants(self: Any, commands: int, layout: int, stage: int, at: int, n: int, data: int) -> None:
        b = self.record(commands, lambda queue: None)
        b.push = ctypes.string_at(data, n)

    def vkCmdDispatch(self: Any, commands: int, x: int, y: int, z: int) -> None:
        b = self.get(commands, "CommandBuffer")
        kernel, chosen, push = self.kernels[b.pipeline.entry], b.set, b.push

        def run(queue: Any) -> None:
            infos = chosen.infos if chosen is not None else []
            data = [np.frombuffer(i.memory.backing.read(i.offset + at, n), np.uint8).copy() for i, at, n in infos]
            before = [d.copy() for d in data]
            kernel((x, y, z), push, data)
            for (i, at, n), new, old in zip(infos, data, before, strict=True):
                wrote = bool((new != old).any())
                self.touch(queue, i, at, n, wrote)
                if wrote:
                    i.memory.backing.write(i.offset + at, new.tobytes(), queue)

        self.record(commands, run)
