"""pyopencl's own ``allocator=`` hook: arrays whose memory others can share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import interop
from interop.contract import ExchangeError

from . import loader


def allocator(queue: Any, *, shared_with: Iterable[Any] = ()) -> Callable[[int], Any]:
    """What pyopencl calls for memory: ``cla.zeros(queue, shape, dtype, allocator=allocator(queue, shared_with=["torch"]))``.

    Args:
        queue: pyopencl's CommandQueue or Context.
        shared_with: as `interop.empty` takes it: the memory is such that they use it in place.

    Returns a function of a number of bytes that gives a pyopencl Buffer. Raises ExchangeError naming who cannot share such memory.
    """
    parties = tuple(shared_with)
    interop.empty((1,), "uint8", device=queue, shared_with=parties)         # refuses now what it would refuse later

    def allocate(nbytes: int) -> Any:
        if nbytes <= 0:
            raise ExchangeError(f"{nbytes} bytes: OpenCL has no empty buffers")
        t = interop.empty((int(nbytes),), "uint8", device=queue, shared_with=parties)
        data = loader.module().Buffer.from_int_ptr(t.handle, True)
        data._interop = t
        return data

    return allocate
