"""Memory of another API behind a file descriptor, seen as CUDA device memory (CUDA driver API, external resource interoperability).

Knows descriptors and addresses: neither which API it was, nor what is made of the memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Any

from interop.contract import DeviceLostError

from .driver import Driver

if TYPE_CHECKING:
    from interop import ExternalHandle


class External:
    """One imported memory object and the one buffer mapped over all of it. Whoever holds it closes it, once all work on it is done.

    Attributes:
        device: ordinal of the GPU.
        address, nbytes: where the buffer is.
    """

    __slots__ = ("_driver", "_memory", "address", "device", "nbytes")

    def __init__(self, driver: Driver, device: int, memory: Any, address: int, nbytes: int) -> None:
        """Takes both over."""
        self._driver: Driver | None = driver
        self._memory, self.device, self.address, self.nbytes = memory, device, address, nbytes

    def close(self) -> None:
        """Free the buffer, then the memory object, in the order that cuDestroyExternalMemory asks for. Idempotent."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        with contextlib.suppress(DeviceLostError), driver.using(self.device) as cu, driver.relaxed():
            freed = cu.cuMemFree(self.address)
            destroyed = cu.cuDestroyExternalMemory(self._memory)
            driver.check(freed)
            driver.check(destroyed)


def import_fd(driver: Driver, device: int, handle: ExternalHandle) -> External:
    """All of the memory behind an opaque descriptor, which stays the caller's. CudaError; then nothing is left."""
    with driver.using(device) as cu, driver.relaxed():
        wanted = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        wanted.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        wanted.size = handle.nbytes
        wanted.flags = cu.CUDA_EXTERNAL_MEMORY_DEDICATED if handle.dedicated else 0
        fd = wanted.handle.fd = fcntl.fcntl(handle.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            memory = driver.check(cu.cuImportExternalMemory(wanted))
        except BaseException:
            _close_unless_taken(fd, handle.fileno())
            raise
        try:
            whole = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
            whole.offset, whole.size, whole.flags = 0, handle.nbytes, 0
            address = int(driver.check(cu.cuExternalMemoryGetMappedBuffer(memory, whole)))
        except BaseException:
            cu.cuDestroyExternalMemory(memory)
            raise
    return External(driver, device, memory, address, handle.nbytes)


def _close_unless_taken(fd: int, original: int) -> None:
    """After a refusal. The driver (580) has closed some of those that it refuses: then the number is nobody's, or another thread's."""
    with contextlib.suppress(OSError):
        if os.path.sameopenfile(fd, original):
            os.close(fd)
