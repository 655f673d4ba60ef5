"""PyTorch. Read and made through the exchange table on torch.Tensor; the table skips checks that `__dlpack__` has: they are the guards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, Guard, Limits, register

if TYPE_CHECKING:
    from interop import Device, Tensor


class TorchAdapter(Adapter):
    """torch.Tensor and its subclasses; of those only Parameter shares the fast path, the others may override what export means."""

    name = "torch"
    types = ("torch.Tensor",)
    exact = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
    reads = "table"
    table = "Tensor"
    guards = (
        Guard("requires_grad", "the tensor requires grad: autograd would not see what is done to the shared memory", "use x.detach()"),
        Guard("is_neg", "the tensor has its negative bit set: the memory holds the negated values", "use x.resolve_neg()"),
        Guard("is_conj", "the tensor has its conjugate bit set: the memory holds the conjugated values", "use x.resolve_conj()", True),
    )
    # Read-only is ignored and negative strides abort the process (measured, torch 2.13). Devices: of some others it makes tensors whose
    # "pointer" is the handle; pinned memory (3, 11) it knows as the CPU's.
    accepts = Limits(readonly=False, negative_strides=False, devices=frozenset({1, 2, 3, 8, 10, 11, 14}))

    def place(self, obj: Any) -> Device | None:
        """A torch.device."""
        cls = type(obj)
        if cls.__module__ != "torch" or cls.__name__ != "device":
            return None
        from interop import Device

        kind = {"cpu": "cpu", "cuda": "cuda", "xpu": "oneapi", "mps": "metal"}.get(obj.type)
        if kind is None:
            return None
        index = obj.index
        if index is None and kind == "cuda":
            import torch

            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return Device(f"{kind}:{index or 0}")

    def fresh(self, t: Tensor, device: Device) -> Any:
        """An empty tensor on a device, in torch's own memory: its caching allocator's, on a GPU."""
        import torch

        dtype = getattr(torch, _SPELLED.get(t.dtype.name, t.dtype.name), None)
        if not isinstance(dtype, torch.dtype) or t.dtype.bits * t.dtype.lanes < 8 or t.padded:
            raise self.refuse(f"torch has no {t.dtype}", "interop.as_tensor(x).view('uint8') shows the bytes")
        return torch.empty(t.shape, dtype=dtype, device=_spelled(device))

    def to_device(self, x: Any, device: Device) -> Any:
        """A copy of the tensor on another device, made by torch on its current stream."""
        return x.to(_spelled(device))


#: Where torch spells a dtype of DLPack's differently.
_SPELLED = {"float4_e2m1fnx2": "float4_e2m1fn_x2"}


def _spelled(device: Device) -> str:
    return "cpu" if device.name == "cpu" else f"{_TORCH_NAMES.get(device.name, device.name)}:{device.id}"


_TORCH_NAMES = {"cuda_managed": "cuda", "rocm": "cuda", "oneapi": "xpu", "metal": "mps"}


def mem_pool(device: Any = None) -> Any:
    """A ``torch.cuda.MemPool`` whose tensors can be exported to other APIs and processes: ``with mem_pool(): x = torch.empty(...)``.

    Args:
        device: ordinal or torch.device; None: the current one.

    Entered, it is where this thread's allocations on the device come from; ``torch.cuda.use_mem_pool`` takes it too. Its memory is
    mapped in granules of 2 MiB (CUDA driver API, virtual memory management) and stays until the last tensor is gone.

    Raises ExchangeError where torch has no CUDA or no pools, or there is no driver.
    """
    from .cuda import torch_pool

    return torch_pool.mem_pool(device)


register(TorchAdapter())
