"""What several test files need: frameworks that may be missing, memory of a chosen alignment, fresh interpreters. No tests here.

`torch`, `jax`, `jnp`, `tvm_ffi`, `ml_dtypes` import on first use and skip the test that uses them where they are not installed.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import interop
from interop.testing import Forged, Producer

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no search for accelerators, no warning about them


class _Framework:
    """A module that is imported, or the test skipped, when an attribute of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(need(self._name), attribute)


def need(name: str) -> Any:
    """The module itself, for where an object will not do; skips the test where it is not installed."""
    return pytest.importorskip(name)


torch: Any = _Framework("torch")
jax: Any = _Framework("jax")
jnp: Any = _Framework("jax.numpy")
tvm_ffi: Any = _Framework("tvm_ffi")
ml_dtypes: Any = _Framework("ml_dtypes")

FRAMEWORKS = ("interop", "numpy", "torch", "jax", "tvm_ffi")


def aligned(values: Any, dtype: Any = None, *, alignment: int = 64, off: int = 0) -> np.ndarray[Any, Any]:
    """A writable array with these values, `off` bytes past a multiple of `alignment`."""
    values = np.asarray(values, dtype)
    raw = np.zeros(values.nbytes + 2 * alignment + off, "u1")
    start = -raw.ctypes.data % alignment + off
    out = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    assert out.nbytes == 0 or out.ctypes.data % alignment == off
    return out


def make(framework: str, array: Any) -> Any:
    """An object of the framework over, or for jax with a copy of, an aligned array. Made without interop wherever that is possible."""
    if framework == "numpy":
        return array
    if framework == "interop":
        return interop.as_tensor(array)
    if framework == "torch":
        return torch.from_numpy(array)
    if framework == "jax":
        x = jnp.array(array, copy=True)
        assert x.unsafe_buffer_pointer() % 64 == 0
        return x
    return tvm_ffi.from_dlpack(array)


def address(x: Any) -> int:
    """Where the first element lies, as the framework itself says."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    if isinstance(x, interop.Tensor):
        return int(x.ptr)
    if hasattr(x, "unsafe_buffer_pointer"):
        return int(x.unsafe_buffer_pointer())
    return int(x.data_ptr())


def peek(x: Any) -> bytes:
    """The bytes of a compact object, read from the memory as it is now, past anything that a framework may have cached."""
    t = x if isinstance(x, interop.Tensor) else interop.as_tensor(x)
    assert t.is_contiguous()
    return ctypes.string_at(address(x), t.nbytes)


def poke(x: Any, data: bytes) -> None:
    """Write to the first bytes of an object, also of one that does not want it."""
    ctypes.memmove(address(x), data, len(data))


def writable(x: Any) -> bool | None:
    """Whether the object says that it may be written through; None where it cannot say."""
    if isinstance(x, np.ndarray):
        return bool(x.flags.writeable)
    return not x.readonly if isinstance(x, interop.Tensor) else None


def forge(shape: Any = (4,), dtype: Any = "float32", device: Any = (1, 0), **fields: Any) -> interop.Tensor:
    """A Tensor over a forged capsule. `dtype` by interop's name; a handle or CUDA address is made up unless `data` is given."""
    d = interop.DType(dtype)
    if device[0] not in (1, 3, 11, 13):
        fields.setdefault("data", 0x7F0000001000)
    forged = Forged(shape, (d.code, d.bits, d.lanes), device=device, **fields)
    return interop.as_tensor(forged.capsule())


def producer(shape: Any = (4,), dtype: Any = (2, 32, 1), device: Any = (2, 0), **fields: Any) -> Producer:
    """An object with ``__dlpack__`` over forged memory, on CUDA by default."""
    if device[0] not in (1, 3, 11, 13):
        fields.setdefault("data", 0x7F0000001000)
    return Producer(Forged(shape, dtype, device=device, **fields))


def run(code: str, *, path: Any = (), ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that sees this checkout and the folders in `path`."""
    where = os.pathsep.join([str(ROOT), *map(str, path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": where, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if ok:
        assert done.returncode == 0, done.stderr
    return done


def elements(shape: Any) -> int:
    return math.prod(shape)
