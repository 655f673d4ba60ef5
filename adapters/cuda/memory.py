"""Memory of GPUs as Allocations: who gives it, how it leaves and comes in as a descriptor, what can be said of somebody else's.

Knows handles and addresses. Knows no tensors, no framework, and not how a chunk is mapped or a page registered.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, DeviceLostError, ExchangeError, Limits, party_limits

from . import external, pointers, virtual
from .driver import CudaError, Driver
from .pages import Pages
from .streams import Streams

if TYPE_CHECKING:
    from interop import Allocation, ExternalHandle

#: Every address that CUDA allocates is a multiple of so many bytes (CUDA C programming guide, device memory accesses).
_ALIGNMENT = 256
_KINDS = {"device": "allocated with cudaMalloc or imported", "pool": "allocated from a cudaMallocAsync pool", "managed": "managed memory",
          "pinned": "host memory"}
_POOLED = "allocate with interop.empty(..., shared_with=[...]), cupy.allocator or torch.mem_pool"


class Memory:
    """The memory of one driver's GPUs."""

    def __init__(self, driver: Driver, streams: Streams) -> None:
        """Nothing is asked of the driver yet."""
        self._driver = driver
        self._streams = streams
        self._idle: dict[int, int] = {}
        self.pages = Pages(driver)

    def limits(self, device: int) -> Limits:
        """What a GPU imports and exports. Host memory may have any address and size."""
        fd = {"opaque_fd"} if self._driver.attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED") else set()
        host = {"host"} if self._driver.attribute(device, "HOST_REGISTER_SUPPORTED") else set()
        return Limits(devices=frozenset({2, 13}), imports=frozenset(fd | host), exports=frozenset(fd))

    # ---- allocation ----
    def allocate(self, adapter: Adapter, nbytes: int, device: int, alignment: int, shared_with: tuple[Any, ...]) -> Allocation:
        """New memory on a GPU, with undefined contents; exportable where anybody in `shared_with` takes a descriptor.

        What is exportable is a whole number of granules (2 MiB each), and the Allocation is as large. MemoryError where memory is out.
        """
        try:
            if any(_takes_descriptors(p) for p in shared_with):
                chunk = virtual.create(self._driver, device, nbytes, alignment)
                return _allocation(chunk.address, chunk.nbytes, device, adapter, chunk.close, exports=("opaque_fd",))
            address, free = self._pooled(nbytes, device, alignment)
        except CudaError as e:
            if e.code == "CUDA_ERROR_OUT_OF_MEMORY":
                raise MemoryError(f"cuda:{device} has no {nbytes} bytes left{self._left(device)}") from None
            raise
        return _allocation(address, nbytes, device, adapter, free, alignment=max(alignment, _ALIGNMENT))

    def _pooled(self, nbytes: int, device: int, alignment: int) -> tuple[int, Callable[[], None]]:
        """``(address, free)`` of memory from the device's pool.

        Taken and given back on a stream that never has any work: what it waits for is the allocation alone. Whoever frees has seen to
        it that nobody's work needs the memory.
        """
        driver = self._driver
        size = nbytes if alignment <= _ALIGNMENT else nbytes + alignment
        with driver.using(device) as cu, driver.relaxed():
            stream = self._idle_stream(device, cu)
            raw = int(driver.check(cu.cuMemAllocAsync(size, stream)))
            try:
                driver.check(cu.cuStreamSynchronize(stream))
            except BaseException:
                cu.cuMemFreeAsync(raw, stream)
                raise

        def free() -> None:
            with contextlib.suppress(DeviceLostError), driver.using(device) as cu, driver.relaxed():
                driver.check(cu.cuMemFreeAsync(raw, stream))
                driver.check(cu.cuStreamSynchronize(stream))        # only then can other allocators have it

        return -(-raw // alignment) * alignment, free

    def _idle_stream(self, device: int, cu: Any) -> int:
        found = self._idle.get(device)
        if found is None:
            made = self._driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
            found = self._idle.setdefault(device, int(made))
            if found != int(made):      # another thread was first
                cu.cuStreamDestroy(made)
        return found

    def _left(self, device: int) -> str:
        try:
            with self._driver.using(device) as cu, self._driver.relaxed():
                free, total = self._driver.check(cu.cuMemGetInfo())
        except (ExchangeError, DeviceLostError):
            return ""
        return f": {int(free)} of {int(total)} are free"

    # ---- export ----
    def export(self, allocation: Allocation, kind: str) -> ExternalHandle:
        """A descriptor of the whole chunk that an allocation lies in, somebody else's too; `offset` says where in it.

        ExchangeError where the memory was not made for that, or lies in several chunks.
        """
        if kind != "opaque_fd":
            raise ExchangeError(f"memory of a GPU is exported as 'opaque_fd', not as {kind!r}")
        device, address = allocation.device.id, allocation.handle
        base, size, exportable, reason = self.recognise(device, address, allocation.nbytes)
        if not exportable:
            raise ExchangeError(reason)
        uuid = self._driver.uuid(device)
        return _handle(virtual.export_fd(self._driver, device, address), size, address - base, uuid)

    def recognise(self, device: int, address: int, nbytes: int) -> tuple[int, int, bool, str]:
        """``(base, size, exportable, reason)`` of anybody's memory: the one chunk around it, whether it can leave, and why not.

        ExchangeError where CUDA does not know the address.
        """
        there = pointers.classify(self._driver, address)
        base, size = there.base, there.nbytes
        if there.kind != "virtual":
            by = _KINDS[there.kind]
            return base, size, False, f"the memory at {address:#x} is {by}: cannot be exported; {_POOLED}"
        if there.device != device:
            return base, size, False, f"the memory at {address:#x} is on cuda:{there.device}, not on cuda:{device}"
        if not there.exportable:
            return base, size, False, f"the memory at {address:#x} was made without a file descriptor handle: cannot be exported; {_POOLED}"
        base, size = virtual.extent(self._driver, device, address)
        if address + nbytes > base + size:
            count = -(-(address + nbytes - base) // size)
            return base, size, False, (f"the memory of {nbytes} bytes at {address:#x} spans {count} chunks of {size} bytes: "
                                       "torch's expandable segments; allocate inside torch.mem_pool or cupy.allocator")
        return base, size, True, ""

    def exports_of(self, allocation: Allocation) -> tuple[str, ...]:
        """The kinds that memory of others can be exported as."""
        if not allocation.handle:
            return ()
        with contextlib.suppress(ExchangeError):
            if self.recognise(allocation.device.id, allocation.handle, allocation.nbytes)[2]:
                return ("opaque_fd",)
        return ()

    # ---- import ----
    def import_handle(self, adapter: Adapter, handle: ExternalHandle, device: int) -> Allocation:
        """The memory behind a descriptor of CUDA's or Vulkan's, or host pages, as memory of a GPU: from the handle's offset on.

        A descriptor takes the same GPU on both sides, told by UUID. One that interop exported in this process is as large as what was
        exported then, not as the chunk around it.
        """
        if handle.kind == "host":
            return self._import_host(adapter, handle, device)
        if handle.kind != "opaque_fd":
            raise ExchangeError(f"a GPU imports opaque_fd and host, not {handle.kind}")
        self._check_uuid(handle, device)
        size, offset = _meant(handle)
        memory = self._open(handle, device)
        handle.close()              # consumed: the driver has the memory, or a descriptor of its own
        return _allocation(memory.address + offset, size, device, adapter, memory.close, alignment=None)

    def _open(self, handle: ExternalHandle, device: int) -> virtual.Mapping | external.External:
        """Map a descriptor. Nothing on it says which API made it, so each way is tried.

        Measured on driver 580: either way opens either API's memory; the first takes whole granules of the exact size only.
        """
        try:
            return virtual.import_fd(self._driver, device, handle.fileno(), handle.nbytes)
        except CudaError as e:
            first = e
        try:
            return external.import_fd(self._driver, device, handle)
        except CudaError as e:
            raise ExchangeError(f"cuda:{device} cannot import a descriptor of {handle.nbytes} bytes, as CUDA's own memory {first.code}, "
                                f"as another API's {e.code}{_unlikely(handle.fileno())}",
                                "nbytes must be the size of the whole memory object") from None

    def _import_host(self, adapter: Adapter, handle: ExternalHandle, device: int) -> Allocation:
        size, offset = _meant(handle)
        registered = self.pages.register(device, handle.value + offset, size)
        return _allocation(registered.pointer, size, device, adapter, registered.close, alignment=None, owner=handle.owner,
                           traits=("pinned",))

    def _check_uuid(self, handle: ExternalHandle, device: int) -> None:
        theirs, ours = handle.device_uuid, self._driver.uuid(device)
        if theirs is None or theirs != ours or ours == bytes(16):
            raise ExchangeError(f"the descriptor is memory of GPU {_name(theirs)}, and cuda:{device} is GPU {_name(ours)}: "
                                "device memory is shared on one and the same GPU only",
                                "set device_uuid of the handle, as its exporter says it" if theirs is None else
                                "import it on the GPU that it is on, or copy: interop.copyto(...)")


def _meant(handle: ExternalHandle) -> tuple[int, int]:
    """``(nbytes, offset)`` of what a handle means within its memory object."""
    from interop import Allocation

    rest = handle.nbytes - handle.offset
    return min(rest, handle.owner.nbytes) if isinstance(handle.owner, Allocation) else rest, handle.offset


def _name(uuid: bytes | None) -> str:
    return "unknown" if uuid is None or uuid == bytes(16) else uuid.hex()


def _unlikely(fd: int) -> str:
    """What a descriptor is that is no driver's, as the end of a sentence; empty where it may be one."""
    kinds = {stat.S_IFREG: "a file or memfd", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    kind = kinds.get(stat.S_IFMT(os.fstat(fd).st_mode))
    return "" if kind is None else f": it is {kind}"


def _takes_descriptors(party: Any) -> bool:
    return party == "process" or "opaque_fd" in party_limits(party).imports


def _allocation(address: int, nbytes: int, device: int, adapter: Adapter, free: Callable[[], None], *, alignment: int | None = _ALIGNMENT,
                **more: Any) -> Allocation:
    """Memory that goes by `free`, which is called here where there can be no Allocation."""
    from interop import Allocation, Device

    try:
        return Allocation(address, nbytes, Device(f"cuda:{device}"), on_release=free, adapter=adapter, alignment=alignment,
                          dies_at_fork=True, **more)
    except BaseException:
        free()
        raise


def _handle(fd: int, nbytes: int, offset: int, uuid: bytes) -> ExternalHandle:
    """A handle that owns `fd`, which is closed where there can be none."""
    from interop import ExternalHandle

    try:
        return ExternalHandle("opaque_fd", fd, nbytes, offset=offset, device_uuid=uuid)
    except BaseException:
        os.close(fd)
        raise
