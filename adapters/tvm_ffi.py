"""tvm_ffi, which passes every device type through. It refuses the read-only flag in a capsule and drops it everywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, Limits, register

if TYPE_CHECKING:
    from interop import Tensor


class TvmFfiAdapter(Adapter):
    """tvm_ffi.Tensor."""

    name = "tvm_ffi"
    types = ("tvm_ffi.core.Tensor",)
    requires = "apache-tvm-ffi"
    accepts = Limits(readonly=False)

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """A tvm_ffi.Tensor over `t`."""
        import tvm_ffi

        return tvm_ffi.from_dlpack(t)


register(TvmFfiAdapter())
