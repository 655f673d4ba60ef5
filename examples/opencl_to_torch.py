"""A pyopencl program that knows nothing of interop, and the three lines that share its Array with PyTorch and back. Nothing is copied.

    python examples/opencl_to_torch.py        takes pyopencl and a driver (a GPU's, or pocl-opencl-icd), and PyTorch; else NumPy
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec

import interop

N = 1 << 16


def main(framework: str) -> int:
    """Exit code: 0 where both saw what the other wrote, without a copy where device and host share memory."""
    if find_spec("pyopencl") is None:
        print("no pyopencl here, nothing shown: right, copies = 0")
        return 0
    warnings.simplefilter("ignore")             # of pyopencl's compiler cache
    import pyopencl as cl
    import pyopencl.array as cla

    from interop.adapters import opencl as icl

    try:
        queue = cl.CommandQueue(icl.Context.of("opencl:0").cl)
    except interop.ExchangeError as e:
        print(f"no OpenCL here, nothing shown ({e}): right, copies = 0")
        return 0
    a = cla.arange(queue, N, dtype="float32")                       # somebody's program

    with interop.copy_guard("allow") as copies:
        with interop.acquire(a, framework, "read_write") as t:      # waits for a.events
            t *= 2
            t += 1
        b = a + 1                                                   # somebody's program goes on
        with interop.acquire(b, framework, "read") as t:            # waits for that kernel
            right = float(t[3]) == 8 and float(t[N - 1]) == 2 * N
        c = interop.to(b, queue)                                    # an Array over the same cl_mem
        right = right and c.base_data.int_ptr == b.base_data.int_ptr
    there = icl.Context.of(queue)
    few = not copies if there.unified else len(copies) == 2
    print(f"{queue.device.name.strip()}: pyopencl -> {framework} -> pyopencl -> {framework}: {'right' if right else 'WRONG'}, "
          f"copies = {len(copies)}")
    return int(not right or not few)


if __name__ == "__main__":
    sys.exit(main("torch" if find_spec("torch") else "numpy"))
