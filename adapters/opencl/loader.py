"""OpenCL's entry points: those of the ICD loader that pyopencl has mapped, never of a second one. Knows no tensors.

pyopencl's wheel brings a loader of its own, and a cl_mem of one loader's is nothing to another's (measured.md I). What is asked of the
extension module is found in the loader that it was linked to, whichever that is.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from interop.contract import ExchangeError

_H, _U, _N, _L, _P = c_void_p, c_uint32, c_size_t, c_uint64, c_void_p
_WAIT = (_U, _P, _P)                    # num_events_in_wait_list, event_wait_list, event
#: Function -> argument types (OpenCL 3.0 API). They return cl_int, and those of `_GIVES` a handle.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "clRetainMemObject": (_H,), "clReleaseMemObject": (_H,), "clGetMemObjectInfo": (_H, _U, _N, _P, _P),
    "clSetMemObjectDestructorCallback": (_H, _P, _P), "clCreateBuffer": (_H, _L, _N, _P, _P), "clCreateSubBuffer": (_H, _L, _U, _P, _P),
    "clCreateBufferWithProperties": (_H, _P, _L, _N, _P, _P), "clGetImageInfo": (_H, _U, _N, _P, _P),
    "clCreateCommandQueue": (_H, _H, _L, _P), "clRetainCommandQueue": (_H,), "clReleaseCommandQueue": (_H,),
    "clGetCommandQueueInfo": (_H, _U, _N, _P, _P), "clFlush": (_H,), "clGetDeviceInfo": (_H, _U, _N, _P, _P),
    "clRetainEvent": (_H,), "clReleaseEvent": (_H,), "clGetEventInfo": (_H, _U, _N, _P, _P),
    "clEnqueueMarkerWithWaitList": (_H, *_WAIT), "clEnqueueBarrierWithWaitList": (_H, *_WAIT),
    "clEnqueueMapBuffer": (_H, _H, _U, _L, _N, _N, *_WAIT, _P), "clEnqueueUnmapMemObject": (_H, _H, _P, *_WAIT),
    "clEnqueueMapImage": (_H, _H, _U, _L, _P, _P, _P, _P, *_WAIT, _P),
    "clEnqueueReadBuffer": (_H, _H, _U, _N, _N, _P, *_WAIT), "clEnqueueWriteBuffer": (_H, _H, _U, _N, _N, _P, *_WAIT),
    "clEnqueueReadBufferRect": (_H, _H, _U, _P, _P, _P, _N, _N, _N, _N, _P, *_WAIT),
    "clEnqueueWriteBufferRect": (_H, _H, _U, _P, _P, _P, _N, _N, _N, _N, _P, *_WAIT),
    "clEnqueueCopyBuffer": (_H, _H, _H, _N, _N, _N, *_WAIT), "clEnqueueCopyBufferRect": (_H, _H, _H, _P, _P, _P, _N, _N, _N, _N, *_WAIT),
    "clEnqueueReadImage": (_H, _H, _U, _P, _P, _N, _N, _P, *_WAIT), "clEnqueueWriteImage": (_H, _H, _U, _P, _P, _N, _N, _P, *_WAIT),
    "clEnqueueCopyImageToBuffer": (_H, _H, _H, _P, _P, _N, *_WAIT), "clEnqueueCopyBufferToImage": (_H, _H, _H, _N, _P, _P, *_WAIT),
    "clEnqueueCopyImage": (_H, _H, _H, _P, _P, _P, *_WAIT),
    "clEnqueueFillBuffer": (_H, _H, _P, _N, _N, _N, *_WAIT), "clGetExtensionFunctionAddressForPlatform": (_H, c_char_p),
}  # fmt: skip
_GIVES = {"clCreateBuffer", "clCreateSubBuffer", "clCreateBufferWithProperties", "clCreateCommandQueue", "clEnqueueMapBuffer",
          "clEnqueueMapImage", "clGetExtensionFunctionAddressForPlatform"}  # fmt: skip
#: Errors of the driver that mean that memory ran out.
_NO_MEMORY = {-4: "CL_MEM_OBJECT_ALLOCATION_FAILURE", -5: "CL_OUT_OF_RESOURCES", -6: "CL_OUT_OF_HOST_MEMORY"}
_generation = 0


class OpenCLError(ExchangeError):
    """A call of OpenCL's failed; `code` is the cl_int."""

    def __init__(self, reason: str, remedy: str | None = None, code: int = 0) -> None:
        """As an ExchangeError, with the code."""
        super().__init__(reason, remedy)
        self.code = code


class OutOfMemory(OpenCLError, MemoryError):
    """No memory left for it."""


class Driver:
    """The functions, as attributes. AttributeError where the loader does not have one."""

    def __init__(self, library: Any = None) -> None:
        """Of pyopencl's loader, unless a library is given."""
        self._library = library if library is not None else ctypes.CDLL(module()._cl.__file__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self._library, name)
        function.argtypes = _FUNCTIONS[name]
        function.restype = c_void_p if name in _GIVES else c_int32
        setattr(self, name, function)
        return function


def module() -> Any:
    """The module pyopencl; ImportError that says how to get it."""
    try:
        import pyopencl
    except ModuleNotFoundError:
        raise ImportError("pyopencl is not installed: pip install pyopencl", name="pyopencl") from None
    return pyopencl


_driver: Any = None


def driver() -> Any:
    """The one Driver."""
    global _driver
    if _driver is None:
        _driver = Driver()
    return _driver


def check(code: int, what: str) -> None:
    """Raise for a cl_int that is no success."""
    if code >= 0:
        return
    name = _NO_MEMORY.get(code)
    if name is not None:
        raise OutOfMemory(f"{what} failed: {name}", "free memory, or allocate less at once", code)
    try:
        name = f"CL_{module().status_code.to_string(code)}"
    except Exception:
        name = f"error {code}"
    raise OpenCLError(f"{what} failed: {name} ({code})", None, code)


def info(function: Any, handle: int, what: int, kind: Any, name: str) -> Any:
    """One value of a clGet...Info, as a ctypes `kind`."""
    out = kind()
    check(function(handle, what, ctypes.sizeof(out), ctypes.byref(out), None), name)
    return out.value


def made(result: int | None, code: c_int32, what: str) -> int:
    """The handle that a call gave; raise where it gave none."""
    check(code.value, what)
    if not result:
        raise OpenCLError(f"{what} succeeded and gave nothing")
    return int(result)


def wait_list(events: list[int]) -> tuple[int, Any]:
    """``(number, array)`` as enqueueing functions take them."""
    return (len(events), (c_void_p * len(events))(*events)) if events else (0, None)


def sizes(*numbers: int) -> Any:
    """size_t[]."""
    return (c_size_t * len(numbers))(*numbers)


def generation() -> int:
    """How many forks this process is away from the one that imported this: a child owns no object of a driver."""
    return _generation


def alive(made_in: int) -> bool:
    """Whether objects of that generation may be released by what the garbage collector finds."""
    return made_in == _generation and not sys.is_finalizing()


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)
__all__ = ["Driver", "OpenCLError", "OutOfMemory", "alive", "check", "driver", "generation", "info", "made", "module", "sizes",
           "wait_list"]
