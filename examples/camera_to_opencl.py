"""A camera's padded frames -> an OpenCL kernel -> PyTorch. No copy where host and device share memory, else one there, one back.

    python examples/camera_to_opencl.py       takes pyopencl and a driver (a GPU's, or pocl-opencl-icd), and PyTorch; else NumPy
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import queue as queues
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

import interop

H, W, PITCH, SLOTS, FRAMES = 240, 320, 1024, 4, 60      # rows of 960 bytes, 1024 apart

TO_PLANES = """
__kernel void to_planes(__global const uchar *bgr, long offset, int pitch, __global float *rgb) {
    int x = get_global_id(0), y = get_global_id(1), w = get_global_size(0), h = get_global_size(1);
    __global const uchar *p = bgr + offset + y * pitch + 3 * x;
    for (int c = 0; c < 3; c++) rgb[(c * h + y) * w + x] = p[2 - c] / 255.0f;
}
"""


class Camera:
    """Stands for a driver: one mapped block, a thread that fills whichever slot it may, and no idea of interop."""

    def __init__(self) -> None:
        self.block = mmap.mmap(-1, SLOTS * H * PITCH)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.block))
        self.free: queues.Queue[int] = queues.Queue()
        self.full: queues.Queue[tuple[int, int]] = queues.Queue()
        for i in range(SLOTS):
            self.free.put(i)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for n in range(FRAMES):
            i = self.free.get()
            ctypes.memset(self.address + i * H * PITCH, n, H * PITCH)
            self.full.put((n, i))

    def frames(self) -> Iterator[tuple[int, int]]:
        """The number of each frame, and the slot that it is in."""
        return (self.full.get(timeout=10) for _ in range(FRAMES))

    def give_back(self, i: int, point: Any) -> None:
        """The slot may be filled again."""
        self.free.put(i)


def main(framework: str) -> int:
    """Exit code: 0 where every frame arrived whole, with as few copies as there can be."""
    if find_spec("pyopencl") is None:
        print("no pyopencl here, nothing shown: wrong = 0")
        return 0
    warnings.simplefilter("ignore")             # of pyopencl's compiler cache
    import pyopencl as cl

    from interop.adapters import opencl as icl

    try:
        there = icl.Context.of("opencl:0")
    except interop.ExchangeError as e:
        print(f"no OpenCL here, nothing shown ({e}): wrong = 0")
        return 0
    queue = cl.CommandQueue(there.cl)
    kernel = cl.Kernel(cl.Program(there.cl, TO_PLANES).build(), "to_planes")

    camera = Camera()
    ring = interop.wrap(camera.address, SLOTS * H * PITCH, device="cpu", owner=camera)
    slots = [ring.tensor((H, W, 3), "uint8", byte_offset=i * H * PITCH, row_pitch=PITCH) for i in range(SLOTS)]
    planes = interop.empty((3, H, W), "float32", device=queue)

    wrong, began = 0, time.perf_counter()
    with interop.copy_guard("allow") as copies:
        for n, i in camera.frames():
            src = interop.acquire(slots[i], queue, "read")          # a pyopencl Array over the camera's bytes
            dst = interop.acquire(planes, queue, "write")
            pitch = src.value.strides[0]
            kernel(queue, (W, H), None, src.value.base_data, np.int64(src.value.offset), np.int32(pitch), dst.value.base_data)
            dst.release()
            src.release().add_done_callback(functools.partial(camera.give_back, i))     # goes back when the kernel has read it
            with interop.acquire(planes, framework, "read") as x:   # behind the kernel
                wrong += abs(float(x.min()) - n / 255) > 1e-6 or abs(float(x.max()) - n / 255) > 1e-6
    rate = FRAMES / (time.perf_counter() - began)
    expected = 0 if there.shares_host else 2 * FRAMES
    print(f"{FRAMES} frames, {rate:.0f} a second, {there.cl_device.name.strip()} -> {framework}: copies = {len(copies)}, wrong = {wrong}")
    return int(len(copies) != expected or bool(wrong))


if __name__ == "__main__":
    sys.exit(main("torch" if find_spec("torch") else "numpy"))
