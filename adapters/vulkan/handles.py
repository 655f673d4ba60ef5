"""Handles of others as ints: whatever binding made them. Knows no Vulkan call."""

from __future__ import annotations

import ctypes
import importlib
import operator
from typing import Any

from interop.contract import ExchangeError

_POINTERS: tuple[Any, ...] = (ctypes._Pointer, getattr(ctypes, "_CFuncPtr"))    # noqa: B009      typeshed hides it


def number(x: Any, what: str = "handle") -> int:
    """The handle as an int, from an int, a ctypes object, or cffi's cdata (the package ``vulkan``'s).

    Args:
        x: the handle.
        what: what to call it in an error.

    Raises:
        TypeError: None, VK_NULL_HANDLE, or an object that is no handle.
    """
    if type(x) is int:
        value: Any = x
    elif isinstance(x, ctypes._SimpleCData):
        value = x.value or 0
    elif isinstance(x, _POINTERS):
        value = ctypes.cast(x, ctypes.c_void_p).value or 0
    elif type(x).__module__ == "_cffi_backend":
        value = _of_cffi(x, what)
    elif x is not None and hasattr(x, "__index__") and not isinstance(x, bool):
        value = operator.index(x)
    else:
        raise TypeError(f"{what} {x!r} is no Vulkan handle: an int, a ctypes object or cffi cdata")
    if not isinstance(value, int) or not 0 < value < 2**64:
        raise TypeError(f"{what} {x!r} is {'VK_NULL_HANDLE' if not value else 'no 64-bit number'}: an object of Vulkan's is needed")
    return value


def _of_cffi(x: Any, what: str) -> int:
    try:
        ffi = importlib.import_module("_cffi_backend").FFI()        # the object comes from it, so it is there
        kind = ffi.typeof(x)
        if kind.kind == "pointer" and kind.item.kind in ("pointer", "primitive") and kind.item.cname not in ("void", "char"):
            x = x[0]                # VkBuffer*, as ffi.new gives it: what is meant is in it
        return int(ffi.cast("uintptr_t", x))
    except (ImportError, TypeError, ValueError) as e:
        raise TypeError(f"{what} {x!r} is no Vulkan handle: {e}") from None


def address(x: Any, what: str) -> int:
    """The address of a function: an int, a ctypes function, or cffi's function pointer; TypeError else."""
    return number(x, what)


def owned(value: int, what: str) -> int:
    """A handle that a driver has just made; ExchangeError where it says success and gives none."""
    if not value:
        raise ExchangeError(f"{what} succeeded and gave VK_NULL_HANDLE")
    return value


def names(x: Any, what: str) -> list[str]:
    """A sequence of names as a list; TypeError for one in a string, which would be taken apart, and for what is no name."""
    if isinstance(x, (str, bytes)):
        raise TypeError(f"{what} {x!r}: a sequence of names, such as [{x!r}]")
    out = list(x)
    for name in out:
        if not isinstance(name, str) or "\0" in name:
            raise TypeError(f"{what}: {name!r} is no name")
    return out


def count(x: Any, what: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """An int in a range; TypeError for what is none (a float too), ValueError for one outside."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        raise TypeError(f"{what} {x!r}: an int")
    value = int(x.__index__())
    if not least <= value <= most:
        raise ValueError(f"{what} {value}: from {least} to {most}")
    return value
