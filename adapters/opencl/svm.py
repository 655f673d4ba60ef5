"""Shared virtual memory: fine-grained leaves as the host's, coarse only inside a map, or as a cl_mem over it (OpenCL, SVM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import interop
from interop.contract import ExchangeError

if TYPE_CHECKING:
    from interop import Allocation, Tensor

_USES_SVM = "opencl.svm_buffer(svm, queue) is a cl_mem over it"


def _is_fine(x: Any) -> bool:
    """Whether interop knows that it is fine-grained: pyopencl's objects do not say; arrays of its `fsvm_empty` are ndarrays already."""
    from . import loader

    flags = getattr(x, "_interop_flags", None)
    return bool(flags is not None and int(flags) & int(loader.module().svm_mem_flags.SVM_FINE_GRAIN_BUFFER))


def to_tensor(x: Any) -> Tensor:
    """Bytes on the CPU, of memory that is known to be fine-grained (`fine`). Everything else is refused."""
    if not _is_fine(x):
        raise ExchangeError("SVM that is not known to be fine-grained is the host's only while it is mapped, and its address is no cl_mem",
                            f"map it: svm.map_rw(queue); {_USES_SVM}; opencl.svm.fine(svm) says that it is fine-grained")
    return interop.wrap(int(x.svm_ptr), int(x.size), device="cpu", owner=x).tensor((int(x.size),), "uint8")


def fine(x: Any) -> Any:
    """The caller's word that an SVMAllocation was made with SVM_FINE_GRAIN_BUFFER; the object itself."""
    from . import loader

    if not hasattr(x, "svm_ptr"):
        raise TypeError(f"{x!r} is no SVMAllocation of pyopencl's")
    x._interop_flags = loader.module().svm_mem_flags.SVM_FINE_GRAIN_BUFFER
    return x


def of_array(x: Any) -> Tensor:
    """A pyopencl Array over SVM, on the CPU where that is fine-grained. What its events say is waited for."""
    base = to_tensor(x.base_data).allocation
    for e in x.events:
        e.wait()
    item = x.dtype.itemsize
    return base.tensor(x.shape, x.dtype, strides=tuple(s // item for s in x.strides), byte_offset=int(x.offset))


def svm_buffer(x: Any, context: Any) -> Allocation:
    """A cl_mem over SVM, coarse or fine (CL_MEM_USE_HOST_PTR on an SVM pointer shares it, OpenCL 2.0 clCreateBuffer); holds `x`.

    ExchangeError where its address is not aligned as the device asks.
    """
    from . import memory
    from .context import Context

    c = Context.of(context)
    if not hasattr(x, "svm_ptr"):
        raise TypeError(f"{x!r} is no SVMAllocation of pyopencl's; of an ndarray over SVM nobody can tell")
    address, nbytes = int(x.svm_ptr), int(x.size)
    memory.check_size(c, nbytes)
    if address % c.data_alignment:
        raise ExchangeError(f"address {address:#x} is not a multiple of {c.data_alignment}")
    flags = memory.READ_WRITE | memory.USE_HOST_PTR
    return memory.adopt(c, memory.create(c, flags, nbytes, address), nbytes, flags, owner=x)
