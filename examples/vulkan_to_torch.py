"""A compute shader fills a buffer, PyTorch reads the same bytes and writes to them, the shader reads that. Nothing is copied.

    python examples/vulkan_to_torch.py        takes Vulkan (a GPU's driver, or mesa-vulkan-drivers) and PyTorch; else NumPy
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import interop
from interop.adapters import vulkan as ivk

N = 1 << 16


def main(framework: str) -> int:
    """Exit code: 0 where both saw what the other wrote, without a copy."""
    try:
        gpu = ivk.Context.open()
    except interop.ExchangeError as e:
        print(f"no Vulkan here, nothing shown: {e}")
        return 0
    scale = ivk.Shader(gpu, Path(__file__).with_name("scale.spv").read_bytes(), push_constants=8)
    x = interop.empty((N,), "float32", device=gpu)
    y = interop.empty((N,), "float32", device=gpu)

    with interop.copy_guard("allow") as copies:
        scale(x, x, groups=(N // 64,), push=(0.0, 1.0))                             # x = 0, 1, 2, ...
        with interop.acquire(x, framework, "read_write") as array:                  # after the shader is done
            right = float(array[3]) == 3 and float(array[N - 1]) == N - 1
            array += 1                                                              # x = 1, 2, 3, ...
        done = scale(x, y, groups=(N // 64,), push=(2.0, 0.0), access=("read", "write"))      # y = 2 x
        out = interop.to(y, framework)                                              # a view; waits for the shader
        right = right and done.done() and float(out[0]) == 2 and float(out[N - 1]) == 2 * N
    print(f"{gpu.physical.name}: shader -> {framework} -> shader -> {framework}: {'right' if right else 'WRONG'}, copies = {len(copies)}")
    return int(not right or bool(copies))


if __name__ == "__main__":
    sys.exit(main("torch" if find_spec("torch") else "numpy"))
