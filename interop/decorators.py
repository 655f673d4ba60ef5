"""For library authors: functions that take any framework's arrays and give back the caller's. Knows conversion and nothing below it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ._core import as_tensor, kind, to
from .device import EXTENSIONS, NUMBERS
from .registry import names

P = ParamSpec("P")
R = TypeVar("R")


def accepts(*parameters: str, inside: str | Mapping[str, str] = "numpy") -> Callable[[Callable[P, R]], Callable[P, Any]]:
    """Let a function take arrays of any framework and return them in the framework, and on the device, of the first one.

    ``@accepts("img", "kernel", inside={"cpu": "numpy", "cuda": "cupy"})``: the named parameters arrive as the framework given for their
    device; array results go back as `img` came. Nothing is copied that can be shared, and nothing changes its device.

    Args:
        parameters: names of the array parameters; None passes through.
        inside: the framework to compute in, or one per device type.

    Raises:
        TypeError: at decoration, where a name is not a parameter or `inside` is malformed.
        ExchangeError: at the call, where the arrays are on different devices or none is given for theirs.
    """
    if not parameters or not all(isinstance(p, str) for p in parameters):
        raise TypeError("accepts takes the names of the array parameters: @accepts('img', 'kernel')")
    if not isinstance(inside, (str, Mapping)):
        raise TypeError(f"inside={inside!r}: a framework's name, or a mapping from device type to name")
    table = {"": inside} if isinstance(inside, str) else dict(inside)
    known = {"", *NUMBERS, *EXTENSIONS}
    if not table or not all(k in known and isinstance(v, str) for k, v in table.items()):
        raise TypeError(f"inside={inside!r}: a framework's name, or a mapping from device type to name")

    def decorate(function: Callable[P, R]) -> Callable[P, Any]:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} returns before it has its result: accepts takes plain functions")
        signature = inspect.signature(function)
        unknown = [p for p in parameters if p not in signature.parameters]
        if unknown:
            raise TypeError(f"{function.__qualname__} has no parameter {unknown[0]!r}")

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = {name: x for name in parameters if (x := bound.arguments.get(name)) is not None}
            if not given:
                return function(*bound.args, **bound.kwargs)
            tensors = {name: as_tensor(x) for name, x in given.items()}
            first = next(iter(given))
            device = _where(tensors[first])
            for name, t in tensors.items():
                if _where(t) != device:
                    raise _mixed(function, first, device, name, _where(t))
            framework = _framework(table, device, function)
            for name, x in given.items():
                bound.arguments[name] = to(tensors[name] if kind(x) is None else x, framework)
            return _back(function(*bound.args, **bound.kwargs), given[first])

        return wrapper

    return decorate


_HOST = ("cpu", "cuda_host", "rocm_host", "cuda_managed")


def _where(t: Any) -> str:
    return "cpu" if t.device.name in _HOST else str(t.device)


def _framework(table: Mapping[str, str], device: str, function: Callable[..., Any]) -> str:
    from .errors import ExchangeError

    name = table.get("") or table.get(device.partition(":")[0])
    if name is None:
        raise ExchangeError(f"{function.__qualname__} computes on {', '.join(table)} and was given memory on {device}",
                            "copy it there first: interop.to(x, framework, device=...)")
    return name


def _mixed(function: Callable[..., Any], a: str, at: str, b: str, there: str) -> Exception:
    from .errors import ExchangeError

    return ExchangeError(f"{function.__qualname__}: {a} is on {at} and {b} on {there}", f"bring {b} to {at} first")


def _back(result: Any, first: Any) -> Any:
    if type(result) in (tuple, list):
        return type(result)(_back(r, first) for r in result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_back(r, first) for r in result))
    if isinstance(result, dict):
        return {k: _back(v, first) for k, v in result.items()}
    if kind(result) in names() and getattr(result, "shape", None) is not None:
        return to(result, like=first)
    return result
