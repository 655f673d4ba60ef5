"""The CUDA driver, as far as exchange needs it: whose GPU a pointer is on, and work of one stream before another's. Through cuda-bindings.

No framework and no tensors here. Nothing is imported, and no context made, before a pointer or two different streams ask for it.
"""

from __future__ import annotations

import time
from typing import Any

from interop.contract import ExchangeError, set_cuda_driver


class Driver:
    """What the core asks of CUDA. Errors of the driver become ExchangeError with its own name for them."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._cuda: Any = None
        self._contexts: dict[int, Any] = {}

    def _load(self) -> Any:
        if self._cuda is None:
            try:
                from cuda.bindings import driver
            except ImportError:
                raise ExchangeError("which GPU a pointer is on and the order of streams take the CUDA driver",
                                    "pip install cuda-bindings; or say device='cuda:0' and use one stream on both sides") from None
            self._check(driver.cuInit(0))
            self._cuda = driver
        return self._cuda

    def _check(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error) != 0:
            raise ExchangeError(f"CUDA driver: {error.name}")
        return values[0] if len(values) == 1 else values

    def pointer_device(self, address: int) -> int:
        """The ordinal of the GPU that device memory is on (cuPointerGetAttribute, DEVICE_ORDINAL)."""
        cuda = self._load()
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(self._check(cuda.cuPointerGetAttribute(attribute, address)))

    def order(self, device: int, first: int, then: int) -> None:
        """What `first` has been given so far, before what `then` is given from now on: one record, one wait, no host.

        Streams are numbered as the array API does: 1 the legacy default stream, 2 the per-thread one, else a handle. Refused during graph
        capture, where a wait would invalidate the graph or be missing from it.
        """
        cuda = self._load()
        self._check(cuda.cuCtxPushCurrent(self._context(cuda, device)))
        try:
            for stream in (first, then):
                # a legacy stream cannot be asked while another one captures globally; that question's error is the answer
                error, status, *_ = cuda.cuStreamIsCapturing(stream)
                if int(error) or int(status):
                    raise ExchangeError(f"stream {stream:#x} is being captured: work of stream {first:#x} cannot be ordered in a graph",
                                        "use the same stream on both sides, or pass stream=-1 and order it yourself")
            event = self._check(cuda.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            try:
                self._check(cuda.cuEventRecord(event, first))
                self._check(cuda.cuStreamWaitEvent(then, event, 0))
            finally:
                cuda.cuEventDestroy(event)       # the driver keeps it until the wait has been done
        finally:
            cuda.cuCtxPopCurrent()

    def synchronize(self, device: int, stream: int) -> None:
        """Wait on the host until what `stream` has been given is done. TimeoutError after a minute; Ctrl-C gets in."""
        cuda = self._load()
        self._check(cuda.cuCtxPushCurrent(self._context(cuda, device)))
        try:
            not_ready = cuda.CUresult.CUDA_ERROR_NOT_READY
            end, pause = time.monotonic() + 60, 0.00005
            while (error := cuda.cuStreamQuery(stream)[0]) == not_ready:
                if time.monotonic() > end:
                    raise TimeoutError(f"stream {stream:#x} was not finished within 60 s")
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005)
            self._check((error, None))
        finally:
            cuda.cuCtxPopCurrent()

    def _context(self, cuda: Any, device: int) -> Any:
        # The primary context, which the frameworks use; retained once and never released: they may be gone before us
        if device not in self._contexts:
            self._contexts[device] = self._check(cuda.cuDevicePrimaryCtxRetain(self._check(cuda.cuDeviceGet(device))))
        return self._contexts[device]


DRIVER = Driver()
set_cuda_driver(DRIVER)
