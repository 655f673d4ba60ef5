"""Names of DLPack devices. A table and nothing else: which physical device one is, an adapter knows."""

from __future__ import annotations

from collections.abc import Callable

#: DLDeviceType number -> the name that interop prints (DLPack 1.3; 5 and 6 are unassigned).
NAMES: dict[int, str] = {
    1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi", 10: "rocm", 11: "rocm_host",
    12: "ext_dev", 13: "cuda_managed", 14: "oneapi", 15: "webgpu", 16: "hexagon", 17: "maia", 18: "trn",
}  # fmt: skip
NUMBERS: dict[str, int] = {name: number for number, name in NAMES.items()}


#: Names of devices that DLPack does not know: each is kDLExtDev with a block of numbers of its own.
EXTENSIONS: dict[str, int] = {}
EXT_DEV = 12
#: Asked once before a name is unknown: `registry` looks among the plug-ins.
find_more: Callable[[], object] | None = None
_BLOCK = 1 << 16


def register(name: str) -> None:
    """Make ``name:0`` a device. DLPack's own names are known already; of others each gets 65536 numbers of kDLExtDev."""
    if name not in NUMBERS:
        EXTENSIONS.setdefault(name, (len(EXTENSIONS) + 1) * _BLOCK)


def known(name: str) -> bool:
    """Whether it is the name of a kind of device."""
    return name in NUMBERS or name in EXTENSIONS


def spell(number: int, index: int) -> tuple[str, int]:
    """``(name, number among its kind)`` of a DLDevice."""
    if number == EXT_DEV and index >= _BLOCK:
        for name, first in EXTENSIONS.items():
            if first <= index < first + _BLOCK:
                return name, index - first
    return NAMES[number], index


def parse(text: str) -> tuple[int, int]:
    """``"cuda:1"`` -> ``(2, 1)``; the id defaults to 0. ValueError names the known devices."""
    name, colon, index = text.partition(":")
    if not known(name) and find_more is not None:
        find_more()
    number = NUMBERS.get(name)
    first = 0
    if number is None and name in EXTENSIONS:
        number, first = EXT_DEV, EXTENSIONS[name]
    if number is None:
        raise ValueError(f"unknown device {text!r}: the name before ':' must be one of {', '.join([*NUMBERS, *EXTENSIONS])}")
    limit = _BLOCK if first else 2**31
    if colon and not (index.isascii() and index.isdigit() and int(index) < limit):
        raise ValueError(f"device {text!r}: what follows ':' must be a device number from 0 to {limit - 1}")
    return number, first + (int(index) if colon else 0)
