"""Names of DLPack devices. A table and nothing else: which physical device one is, an adapter knows."""

from __future__ import annotations

#: DLDeviceType number -> the name that interop prints (DLPack 1.3; 5 and 6 are unassigned).
NAMES: dict[int, str] = {
    1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi", 10: "rocm", 11: "rocm_host",
    12: "ext_dev", 13: "cuda_managed", 14: "oneapi", 15: "webgpu", 16: "hexagon", 17: "maia", 18: "trn",
}  # fmt: skip
NUMBERS: dict[str, int] = {name: number for number, name in NAMES.items()}


def parse(text: str) -> tuple[int, int]:
    """``"cuda:1"`` -> ``(2, 1)``; the id defaults to 0. ValueError names the known devices."""
    name, colon, index = text.partition(":")
    number = NUMBERS.get(name)
    if number is None:
        raise ValueError(f"unknown device {text!r}: the name before ':' must be one of {', '.join(NUMBERS)}")
    if colon and not (index.isascii() and index.isdigit() and int(index) < 2**31):
        raise ValueError(f"device {text!r}: what follows ':' must be a device number from 0 to 2**31 - 1")
    return number, int(index) if colon else 0
