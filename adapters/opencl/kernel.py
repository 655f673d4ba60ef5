"""A kernel over tensors: as little as examples, tests and delegates need. Leases, orders and launches; pyopencl compiles."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import interop
from interop.contract import ExchangeError, Point, as_point, point

from . import loader, memory, queues
from .context import HOST_TIMEOUT, Context

if TYPE_CHECKING:
    from interop import Lease, Tensor

_NOTHING = point(done=lambda: True)


class Kernel:
    """A ``__kernel`` of OpenCL C. Calling it launches once.

    Attributes:
        context: where it runs.
        name: of the function.
    """

    def __init__(self, source: str, name: str, *, device: Any = None, options: Sequence[str] = ()) -> None:
        """Compile.

        Args:
            source: OpenCL C.
            name: the ``__kernel`` function.
            device: a queue or context of pyopencl's, a Context, or a Device; None: ``opencl:0``.
            options: of the compiler, one by one: ``["-cl-fast-relaxed-math", "-DN=4"]``.

        Raises:
            ExchangeError: it does not compile; the message has the build log.
            TypeError: options in one string.
        """
        if isinstance(options, str) or not all([isinstance(o, str) for o in options]):
            raise TypeError(f"options {options!r}: a sequence of strings")
        self.context = c = Context.of(device)
        self.name = name
        cl = loader.module()
        try:
            program = cl.Program(c.cl, source).build(options=list(options), devices=[c.cl_device])
            self._kernel = cl.Kernel(program, name)
        except cl.Error as e:
            raise ExchangeError(f"kernel {name}: {str(e).strip()}") from e
        self._queue = cl.CommandQueue.from_int_ptr(c.queue, True)
        self._lock = threading.Lock()       # arguments are the kernel's until it is enqueued (OpenCL, clSetKernelArg)

    def __call__(self, *args: Any, size: Sequence[int] | int, local: Sequence[int] | None = None, queue: Any = None,
                 access: Sequence[str] | None = None, waits: Iterable[Any] = ()) -> Point:
        """Launch once. Tensors are leased until it is enqueued, and the Point is noted on them: whoever uses them next comes after it.

        Args:
            args: Tensors, pyopencl Arrays or Buffers of this context for ``__global`` pointers; NumPy scalars; ints and floats are 32 bits.
            size: global work size. local: work-group size.
            queue: pyopencl's CommandQueue to run on, of the same context; None: interop's own.
            access: ``"read"``, ``"write"`` or ``"read_write"``, one for all or one for each tensor; None: read_write, read where read-only.
            waits: Points to come after, beside what is pending on the tensors.

        Raises:
            ExchangeError: memory of another context, read-only memory to be written, mapped memory; an offset at which no cl_mem begins;
                arguments or sizes that the driver refuses.
            LeaseError: somebody uses a tensor. TypeError, ValueError: sizes that are none.
        """
        c = self.context
        c.check()
        found = c.find_queue(queue)
        tensors = {i: interop.as_tensor(a) for i, a in enumerate(args) if isinstance(a, interop.Tensor) or hasattr(a, "int_ptr")
                   or hasattr(a, "base_data")}
        grid, group = _sizes(size, "size"), None if local is None else _sizes(local, "local")
        if group is not None and len(group) != len(grid):
            raise ValueError(f"local {local!r}: as many dimensions as size {size!r}")
        if access is None:
            wanted = ["read" if t.readonly else "read_write" for t in tensors.values()]
        else:
            wanted = [access] * len(tensors) if isinstance(access, str) else list(access)
        if len(wanted) != len(tensors):
            raise ValueError(f"access {access!r}: one for each of {len(tensors)} tensors")
        values: list[Any] = [a if i in tensors else _scalar(a) for i, a in enumerate(args)]
        for (i, t), a in zip(tensors.items(), wanted, strict=True):
            values[i] = self._buffer(t, a)
        leases = _leased(c, list(zip(tensors.values(), wanted, strict=True)))
        done: Point = _NOTHING
        try:
            after = [as_point(p) for p in (*(lease.after for lease in leases), *waits)]
            ready = [e for p in after for e in queues.split(p, c.handle, HOST_TIMEOUT)]
            if ready:
                queues.barrier(c.driver, found, ready)
            cl = loader.module()
            on = self._queue if found == c.queue else cl.CommandQueue.from_int_ptr(found, True)
            with self._lock:
                try:
                    self._kernel.set_args(*values)
                    launched = cl.enqueue_nd_range_kernel(on, self._kernel, grid, group)
                except cl.Error as e:
                    raise ExchangeError(f"kernel {self.name}: {str(e).strip()}",
                                        "its parameters, the size of each argument and of the work groups have to fit") from e
            done = queues.point_of(c.driver, int(launched.int_ptr), c.handle)
        finally:
            for lease in leases:
                lease.release(done)
        return done

    def _buffer(self, t: Tensor, access: str) -> Any:
        """pyopencl's Buffer that begins with the tensor; a sub-buffer where it begins inside (OpenCL, clCreateSubBuffer)."""
        c = self.context
        mem = memory.find(t.allocation) if t.layout == "strided" and t.device.name == "opencl" else None
        if mem is None or mem.context.handle != c.handle:
            raise ExchangeError(f"{t!r} is no memory of this cl_context", "interop.to(x, queue) imports or copies it there")
        n = memory.native(t, write=access != "read")
        if access != "read" and mem.flags & memory.READ_ONLY:
            raise ExchangeError(f"the cl_mem {n.handle:#x} was made with CL_MEM_READ_ONLY: kernels only read it")
        cl = loader.module()
        whole = cl.Buffer.from_int_ptr(n.handle, True)
        if not t.byte_offset:
            return whole
        if t.byte_offset % c.base_alignment:
            raise ExchangeError(f"byte_offset {t.byte_offset}: a kernel's pointer begins at multiples of {c.base_alignment} bytes "
                                "(CL_DEVICE_MEM_BASE_ADDR_ALIGN)", "pass the whole memory, and the offset as a number")
        return whole.get_sub_region(t.byte_offset, mem.nbytes - t.byte_offset)

    def __repr__(self) -> str:
        return f"<Kernel {self.name} on {self.context.device}>"


def _sizes(x: Any, what: str) -> tuple[int, ...]:
    """One to three positive numbers (OpenCL, clEnqueueNDRangeKernel)."""
    try:
        given = (operator.index(x),) if hasattr(x, "__index__") else tuple([operator.index(n) for n in x])
    except TypeError:
        raise TypeError(f"{what} {x!r}: an int, or one to three of them") from None
    if not 1 <= len(given) <= 3 or not all([0 < n < 2**63 for n in given]):
        raise ValueError(f"{what} {x!r}: one to three numbers, each at least 1")
    return given


def _scalar(a: Any) -> Any:
    if isinstance(a, (np.generic, bytes)):
        return a
    if isinstance(a, bool):
        raise TypeError(f"{a!r}: OpenCL has no bool arguments; numpy.int32 is one of 32 bits")
    if isinstance(a, int):
        if not -2**31 <= a < 2**32:
            raise ValueError(f"{a} has no 32 bits: numpy.int64 or numpy.uint64 says that it shall have 64")
        return np.int32(a) if a < 2**31 else np.uint32(a)
    if isinstance(a, float):
        return np.float32(a)
    raise TypeError(f"{a!r} is no tensor of OpenCL's and no number")


def _leased(c: Context, tensors: Sequence[tuple[Tensor, str]]) -> list[Lease]:
    """A lease for each, one for those that are the same bytes; all or none."""
    merged: dict[Any, tuple[Tensor, str]] = {}
    for t, access in tensors:
        key = (t.handle, *memory.touched(t))
        before = merged.get(key)
        merged[key] = (t, access) if before is None or before[1] == access else (t, "read_write")
    out: list[Lease] = []
    try:
        for t, access in merged.values():
            out.append(interop.acquire(t, t.allocation.context, access))
    except BaseException:
        for lease in out:
            lease.release(_NOTHING)
        raise
    return out
