"""A torch memory pool whose tensors can leave as file descriptors. Knows torch's pools and the C allocator beside it, no tensors."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from interop.contract import ExchangeError


def mem_pool(device: Any = None) -> Any:
    """A pool of exportable memory: ``with mem_pool(): x = torch.empty(..., device="cuda")``.

    Keep the pool and enter it again to use its memory again; tensors outlive it. As with torch.cuda.use_mem_pool it holds for the thread
    that enters it. torch takes 2 MiB at once for what is below 1 MiB, 20 MiB below 10 MiB, and so on (torch, CUDA memory management);
    each such segment is one memory object.

    Args:
        device: a torch.device, its spelling or an ordinal; None: torch's current device.

    Returns a torch.cuda.MemPool that is also its own context manager.
    Raises ExchangeError where torch has no CUDA or no pools (before 2.5).
    """
    torch = _torch()
    where = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
    if where.type != "cuda":
        raise ExchangeError(f"{where}: a pool of GPU memory is on a CUDA device", 'mem_pool(device="cuda:0")')
    index = torch.cuda.current_device() if where.index is None else where.index
    with torch.cuda.device(index):          # a MemPool belongs to the device that is current when it is made
        return _pool_type()(index)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ExchangeError("torch is not installed", "pip install torch") from None
    if torch.version.cuda is None:
        raise ExchangeError(f"torch {torch.__version__} was built without CUDA", "install a CUDA build of torch")
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
        raise ExchangeError(f"torch {torch.__version__} has no memory pools", "install torch 2.5 or newer")
    return torch


@functools.cache
def _allocator() -> Any:
    """The C allocator as torch holds it. For ever: memory of a pool that is gone is still freed through it."""
    try:
        library = importlib.import_module("._vmm", __package__).__file__
    except ImportError:
        raise ExchangeError("interop's allocator for torch is not built", "run make demo, or pip install .") from None
    return _torch().cuda.memory.CUDAPluggableAllocator(library, "interop_cuda_alloc", "interop_cuda_free")


@functools.cache
def _pool_type() -> Any:
    torch = _torch()

    class MemPool(torch.cuda.MemPool):      # type: ignore[misc, name-defined]
        """A torch.cuda.MemPool of exportable memory, entered with ``with``."""

        def __init__(self, device: int) -> None:
            """Of one device."""
            super().__init__(_allocator().allocator())
            self._device = device
            self._entered: list[Any] = []

        def __enter__(self) -> Any:
            """Allocations of this thread come from here."""
            use = torch.cuda.use_mem_pool(self, self._device)
            use.__enter__()
            self._entered.append(use)       # of several threads, which one takes which does not matter: they are alike
            return self

        def __exit__(self, *error: Any) -> None:
            """As before."""
            self._entered.pop().__exit__(*error)

    return MemPool
