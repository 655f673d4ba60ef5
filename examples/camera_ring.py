"""A camera fills a ring of padded frames that it owns; each frame is read in place and goes back when its lease ends. Nothing is copied.

    python examples/camera_ring.py            with PyTorch where it is installed, else with NumPy
    python examples/camera_ring.py numpy
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import interop

H, W, PITCH, SLOTS, FRAMES = 480, 640, 2048, 4, 60      # rows of 1920 bytes, 2048 apart


class Camera:
    """Stands for a driver: one mapped block, a thread that fills whichever slot it may, and no idea of interop."""

    def __init__(self) -> None:
        self.block = mmap.mmap(-1, SLOTS * H * PITCH)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.block))
        self.free: queue.Queue[int] = queue.Queue()
        self.full: queue.Queue[tuple[int, int]] = queue.Queue()
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

    def give_back(self, i: int) -> None:
        """The slot may be filled again."""
        self.free.put(i)


def main(target: str) -> int:
    """Exit code: 0 where every frame arrived whole, in place and without a copy."""
    camera = Camera()
    ring = interop.wrap(camera.address, SLOTS * H * PITCH, device="cpu", owner=camera)
    slots = [ring.tensor((H, W, 3), "uint8", byte_offset=i * H * PITCH, row_pitch=PITCH) for i in range(SLOTS)]

    wrong = 0
    with interop.copy_guard("allow") as copies:
        for n, i in camera.frames():
            lease = interop.acquire(slots[i], target, "read")
            with lease as frame:                                # the target's own array, over the camera's bytes
                in_place = interop.as_tensor(frame).ptr == slots[i].ptr
                wrong += not in_place or int(frame.min()) != n or int(frame.max()) != n
            # With a queue that still reads, release(point) says when: the slot goes back then, and not before
            lease.release().add_done_callback(lambda _, i=i: camera.give_back(i))
    print(f"{FRAMES} frames through {SLOTS} slots into {target}: copies = {len(copies)}, wrong = {wrong}")
    return int(bool(copies or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "torch" if find_spec("torch") else "numpy"))
