"""Names of DLPack dtypes, and where NumPy's extension types live. Knows no tensors and imports ml_dtypes only on demand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

INT, UINT, FLOAT, OPAQUE, BFLOAT, COMPLEX, BOOL = range(7)

#: Codes whose width is part of the format: code -> (name, bits). DLPack 1.3 asks that the bits match.
_FIXED: dict[int, tuple[str, int]] = {
    BFLOAT: ("bfloat16", 16), BOOL: ("bool", 8),
    7: ("float8_e3m4", 8), 8: ("float8_e4m3", 8), 9: ("float8_e4m3b11fnuz", 8), 10: ("float8_e4m3fn", 8),
    11: ("float8_e4m3fnuz", 8), 12: ("float8_e5m2", 8), 13: ("float8_e5m2fnuz", 8), 14: ("float8_e8m0fnu", 8),
    15: ("float6_e2m3fn", 6), 16: ("float6_e3m2fn", 6), 17: ("float4_e2m1fn", 4),
}  # fmt: skip
#: Codes that come in several widths: code -> (prefix, widths that interop knows).
_SIZED: dict[int, tuple[str, tuple[int, ...]]] = {
    INT: ("int", (1, 2, 4, 8, 16, 32, 64)), UINT: ("uint", (1, 2, 4, 8, 16, 32, 64)),
    FLOAT: ("float", (16, 32, 64)), OPAQUE: ("opaque", (8, 16, 32, 64)), COMPLEX: ("complex", (32, 64, 128)),
}  # fmt: skip

#: name -> (code, bits), lanes 1.
BY_NAME: dict[str, tuple[int, int]] = {name: (code, bits) for code, (name, bits) in _FIXED.items()} | {
    f"{prefix}{bits}": (code, bits) for code, (prefix, widths) in _SIZED.items() for bits in widths
}
#: (code, bits) -> name.
NAMES: dict[tuple[int, int], str] = {key: name for name, key in BY_NAME.items()}
#: How NumPy and torch spell the same types where they differ from us.
_ALIASES = {"bool_": "bool", "half": "float16", "float": "float32", "double": "float64", "short": "int16",
            "int": "int32", "long": "int64", "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
            "float4_e2m1fn_x2": "float4_e2m1fnx2"}  # fmt: skip
_LANES = re.compile(r"(.+?)x([1-9][0-9]*)")


def parse(text: str) -> tuple[int, int, int]:
    """``"float32"`` -> ``(2, 32, 1)``, ``"float32x4"`` -> ``(2, 32, 4)``. ValueError on anything else."""
    name, lanes = text, 1
    if name not in BY_NAME and (m := _LANES.fullmatch(name)):
        name, lanes = m[1], int(m[2])
    if name not in BY_NAME or lanes > 0xFFFF:
        raise ValueError(f"unknown dtype {text!r}: known are {', '.join(sorted(BY_NAME))}, each with an optional xLANES")
    return *BY_NAME[name], lanes


def describe(code: int, bits: int, lanes: int) -> str:
    """The name of a dtype, or its three numbers where it has none."""
    name = NAMES.get((code, bits))
    if name is None or not 1 <= lanes <= 0xFFFF:
        return f"(code {code}, bits {bits}, lanes {lanes})"
    return name if lanes == 1 else f"{name}x{lanes}"


def coerce(x: Any) -> tuple[int, int, int]:
    """The dtype triple of anything that names one: str, np.float32, torch.float32, jnp.bfloat16, tf.int8, float, (2, 32, 1).

    TypeError where ``x`` names no dtype, ValueError where it names one that DLPack lacks.
    """
    if isinstance(x, str):
        try:
            return parse(x)
        except ValueError:
            if x.startswith(("<", ">", "=", "|")) or 2 <= len(x) <= 3:     # NumPy's typestrings: "<f4", "u1"
                try:
                    return from_numpy(np.dtype(x))
                except TypeError:
                    pass
            raise
    if isinstance(x, tuple) and len(x) == 3 and all(isinstance(i, int) for i in x):
        return x
    cls = type(x)
    if cls.__name__ == "dtype" and cls.__module__ == "torch":
        name = str(x).removeprefix("torch.")
        return parse(_ALIASES.get(name, name))
    if (other := getattr(x, "as_numpy_dtype", None)) is not None:      # TensorFlow
        return from_numpy(np.dtype(other))
    return from_numpy(_numpy(x))


def _numpy(x: Any) -> np.dtype[Any]:
    if x is None:                                                      # np.dtype(None) is float64
        raise TypeError("None is not a dtype")
    try:
        dtype: np.dtype[Any] = np.dtype(x)
    except TypeError as e:
        raise TypeError(f"{x!r} is not a dtype: {e}") from None
    return dtype


def from_numpy(dtype: np.dtype[Any]) -> tuple[int, int, int]:
    """The DLPack triple of a NumPy dtype. ValueError where there is none (structured, datetime, object, long double...)."""
    if not dtype.isnative:
        raise ValueError(f"NumPy dtype {dtype.str!r} is byte-swapped and DLPack means native byte order")
    if dtype.kind in "biufc" and dtype.num < 24 and dtype.name in BY_NAME:
        return *BY_NAME[dtype.name], 1
    if dtype.num >= 256 and dtype.name in BY_NAME:                     # registered by ml_dtypes
        return *BY_NAME[dtype.name], 1
    raise ValueError(f"NumPy dtype {dtype} has no DLPack equivalent")


def to_numpy(code: int, bits: int) -> np.dtype[Any]:
    """The NumPy dtype of one lane; extension types come from ml_dtypes.

    LookupError where NumPy has no such type; ImportError where ml_dtypes would have it and is not installed.
    """
    name = NAMES.get((code, bits))
    if name is None or code == OPAQUE or name == "complex32":
        raise LookupError(f"NumPy has no dtype for {describe(code, bits, 1)}")
    if code in (INT, UINT, FLOAT, COMPLEX, BOOL) and bits >= 8:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"NumPy holds {name} through the package ml_dtypes: pip install ml_dtypes") from None
    extension = getattr(ml_dtypes, name, None)
    if extension is None:
        raise LookupError(f"this ml_dtypes has no {name}; a newer one may: pip install -U ml_dtypes")
    dtype: np.dtype[Any] = np.dtype(extension)
    return dtype
