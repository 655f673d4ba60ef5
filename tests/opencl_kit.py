"""What tests of OpenCL stand on: each platform at hand in turn, PoCL and rusticl, so that no rule is learnt from one driver.

    from opencl_kit import queue         # a fixture; every test that takes it runs on each platform, or skips with the reason
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

import pytest

os.environ.setdefault("RUSTICL_ENABLE", "llvmpipe")       # read by Mesa when the loader is first asked
#: What the tests call a platform -> how its name begins.
PLATFORMS = {"pocl": "Portable Computing Language", "rusticl": "rusticl"}
#: Runtimes that are only asked in `make soak`.
SOAK = {"intel": "Intel(R) OpenCL"}


@functools.cache
def device(name: str) -> Any:
    """pyopencl's first Device of a platform; a text where there is none, which says why."""
    try:
        import pyopencl as cl
    except ImportError:
        return "pyopencl is not installed"
    try:
        platforms = cl.get_platforms()
    except cl.Error as e:
        return f"no OpenCL platform: {e}"
    for p in platforms:
        if p.name.startswith((PLATFORMS | SOAK)[name]):
            try:
                found = p.get_devices()
            except cl.Error as e:
                return f"{p.name}: {e}"
            if found:
                return found[0]
    return f"no OpenCL platform named {(PLATFORMS | SOAK)[name]}"


def need_device(name: str) -> Any:
    """`device`, or skip."""
    found = device(name)
    if isinstance(found, str):
        pytest.skip(f"OpenCL: {found}")
    return found


@pytest.fixture(params=[*PLATFORMS, *(pytest.param(n, marks=pytest.mark.soak) for n in SOAK)])
def queue(request: pytest.FixtureRequest) -> Any:
    """A pyopencl CommandQueue in a context of its own, on each platform in turn."""
    import pyopencl as cl

    return cl.CommandQueue(cl.Context([need_device(request.param)]))


def references(mem: Any) -> int:
    """CL_MEM_REFERENCE_COUNT of a cl_mem, an int or pyopencl's object."""
    import ctypes

    from interop.adapters.opencl import loader

    handle = getattr(mem, "int_ptr", mem)
    return int(loader.info(loader.driver().clGetMemObjectInfo, handle, 0x1105, ctypes.c_uint32, "clGetMemObjectInfo"))


def collect() -> None:
    """What was retired on other threads, and garbage, is gone."""
    from interop import _core

    for _ in range(3):
        gc.collect()
        _core.drain()
        _core.release_ready()
