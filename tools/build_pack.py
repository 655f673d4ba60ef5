"""Build ``adapters/cuda/pack.ptx`` from ``pack.cu`` with NVRTC: ``python tools/build_pack.py``. Takes cuda-bindings and NVRTC, no GPU.

The PTX is for the oldest architecture that this NVRTC knows (each newer GPU's driver compiles it for itself), and asks for an old PTX
version, so that older drivers load it. Its first line has the SHA-256 of its source: a test compares that without NVRTC.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "adapters" / "cuda"
#: PTX 7.0 came with CUDA 11.0 and knows every instruction used here; NVRTC writes its own, newest version.
PTX_VERSION = "7.0"


def check(result: tuple[Any, ...]) -> Any:
    """What an NVRTC call returned; RuntimeError where there is an error."""
    if int(result[0]):
        raise RuntimeError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) == 2 else None


def compiled(source: bytes) -> bytes:
    """The PTX of a CUDA source."""
    from cuda.bindings import nvrtc

    *_, architectures = nvrtc.nvrtcGetSupportedArchs()
    options = [f"--gpu-architecture=compute_{min(architectures)}".encode(), b"--std=c++17"]
    program = check(nvrtc.nvrtcCreateProgram(source, b"pack.cu", 0, None, None))
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result[0]):
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(log.decode(errors="replace"))
        ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))
    return ptx.rstrip(b"\0")


def main() -> int:
    """Write pack.ptx beside its source."""
    source = (FOLDER / "pack.cu").read_bytes()
    ptx = re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", compiled(source).decode())
    ptx = re.sub(r"(?m)^//.*\n", "", ptx).strip()       # its comments name the build that made it
    digest = hashlib.sha256(source).hexdigest()
    (FOLDER / "pack.ptx").write_text(f"// pack.cu sha256 {digest}; built by tools/build_pack.py\n{ptx}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
