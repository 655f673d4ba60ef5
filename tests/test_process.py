"""The ends of a process: shutdown with tensors alive, fork, sub-interpreters. Each in a process of its own; quiet and exit code 0."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support import need, run

PRELUDE = """
import sys, gc, weakref, builtins
import numpy as np
import interop
from interop import testing as it
from interop.testing import Capsule, Forged, Producer
"""
THREAD = "import threading; threading.Thread(target=lambda: None).start()"
quiet = pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit", THREAD])


def clean(code: str, expected: str = "") -> None:
    done = run(PRELUDE + code, ok=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


# --- shutdown ---------------------------------------------------------------------------------------------------------

ALIVE = {
    "tensor over numpy": "keep = interop.as_tensor(np.zeros(3))",
    "numpy over tensor": "keep = interop.to(interop.as_tensor(bytearray(8)), 'numpy')",
    "view": "keep = interop.as_tensor(np.zeros(9))[1:]",
    "capsule": "keep = interop.as_tensor(np.zeros(3)).__dlpack__(max_version=(1, 3))",
    "legacy capsule": "keep = interop.as_tensor(np.zeros(3)).__dlpack__()",
    "forged, C deleter": "keep = interop.as_tensor(Forged().capsule())",
    "forged, free": "keep = interop.as_tensor(Forged(deleter='free').capsule())",
    "forged, legacy": "keep = interop.as_tensor(Forged(version=None).capsule())",
    "buffer": "keep = interop.as_tensor(bytearray(8))",
    "array subclass": "keep = interop.as_tensor(np.zeros(3).view(type('A', (np.ndarray,), {})))",
    "cycle": "class A(bytearray): pass\nkeep = A(8); keep.t = interop.as_tensor(keep)",
    "object with a finalizer": (
        "class A:\n"
        "    def __init__(self): self.a = np.zeros(3)\n"
        "    def __dlpack__(self, **k): return self.a.__dlpack__(**k)\n"
        "    def __dlpack_device__(self): return (1, 0)\n"
        "    def __del__(self): interop.as_tensor(self.a) if interop is not None else None\n"
        "x = A(); keep = interop.as_tensor(x); x.t = keep"
    ),
    "copy": "keep = interop.as_tensor(np.zeros(3), copy=True)",
    "allocated": "keep = it.exchange_table(interop.Tensor).to_py(it.exchange_table(interop.Tensor).allocate((3,)))",
    "consumed by nobody": "keep = it.exchange_table(interop.Tensor).from_py(interop.as_tensor(np.zeros(3)))",
}


@pytest.mark.parametrize("place", ["{}", "{}\nbuiltins.keep = keep"])
@pytest.mark.parametrize("alive", ALIVE.values(), ids=ALIVE)
def test_what_is_alive_at_exit_makes_no_noise(alive: str, place: str) -> None:
    """SPEC X-LIFE-1; field report B22"""
    clean(place.format(alive))


@quiet
def test_every_ending_is_quiet(ending: str) -> None:
    """SPEC X-LIFE-1"""
    clean("\n".join(a.replace("keep", f"keep{i}") for i, a in enumerate(ALIVE.values())) + "\n" + ending)


FOREIGN = {
    "torch": """
import torch
keep, back, more = interop.to(np.zeros(3), 'torch'), interop.as_tensor(torch.zeros(3)), interop.to(torch.ones(2), 'numpy')
""",
    "torch from dlpack": """
import torch
keep, torch.keep = torch.from_dlpack(interop.as_tensor(np.zeros(3))), torch.from_dlpack(Producer(Forged()))
""",
    "tvm_ffi": """
import tvm_ffi
tvm_ffi.keep = keep = tvm_ffi.from_dlpack(interop.as_tensor(np.zeros(3)))
back = interop.as_tensor(keep)
""",
    "jax": """
import jax.numpy as jnp
keep = interop.to(np.zeros(16, 'f4'), 'jax')
jnp.keep = back = interop.as_tensor(jnp.zeros(3))
""",
    "torch and tvm_ffi": """
import torch, tvm_ffi
a = interop.to(Producer(Forged()), 'torch'); b = tvm_ffi.from_dlpack(interop.as_tensor(a)); c = interop.to(b, 'numpy')
torch.keep, tvm_ffi.keep, np.keep, builtins.keep, interop.keep = a, b, c, [a, b, c], interop.as_tensor(c)
""",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_objects_alive_at_exit_make_no_noise(name: str) -> None:
    """SPEC X-LIFE-1; field report B32"""
    for module in ("torch", "tvm_ffi", "jax"):
        if module in FOREIGN[name]:
            need(module)
    clean(FOREIGN[name])


def test_a_deleter_called_after_the_end_does_nothing() -> None:
    """SPEC X-LIFE-1, X-OWN-6; field report B22: C code frees what it holds when no interpreter is left."""
    clean("""
import ctypes
owned = Capsule.of(interop.as_tensor(np.zeros(3)), max_version=(1, 3)).consume()
legacy = Capsule.of(interop.as_tensor(np.zeros(3))).consume()
table = it.exchange_table(interop.Tensor).from_py(interop.as_tensor(np.zeros(3)))
libc = ctypes.CDLL(None)
for x in (owned, legacy, table):
    # glibc runs these after Py_Finalize; the deleter gets the struct as its argument
    libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
    deleter = x.deleter
    assert libc.__cxa_atexit(deleter, x.hand_over(), None) == 0
""")


def test_a_thread_that_still_holds_a_tensor_at_exit() -> None:
    """SPEC X-LIFE-1"""
    clean("""
import threading, time
def work():
    while True:
        t = interop.as_tensor(np.zeros(3)); u = interop.as_tensor(t.__dlpack__()); del t, u
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""")


def test_tensors_die_in_atexit_handlers_too() -> None:
    """SPEC X-LIFE-1"""
    clean("""
import atexit
forged = Forged()
box = [interop.as_tensor(forged.capsule()), interop.as_tensor(np.zeros(3)).__dlpack__()]
def late():
    box.clear()
    assert forged.deleted == 1
    assert interop.as_tensor(np.arange(3)).shape == (3,)
    print("done")
atexit.register(late)
""", "done\n")


# --- fork -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="no fork here")
def test_a_forked_child_uses_and_drops_what_it_inherited() -> None:
    """SPEC X-LIFE-2"""
    clean("""
import os, threading
forged = Forged((4,), (it.UINT, 8, 1), data=b"abcd")
array = np.arange(4)
things = [interop.as_tensor(forged.capsule()), interop.as_tensor(array)[1:], interop.as_tensor(bytearray(4)),
          interop.as_tensor(array).__dlpack__(), interop.to(Producer(forged), "numpy"), interop.as_tensor(array, copy=True)]
def use(things):
    assert bytes(things[0]) == b"abcd" and things[1].shape == (3,)
    for _ in range(200):
        assert interop.as_tensor(interop.as_tensor(array).__dlpack__())[1:].shape == (3,)
    owned = Capsule.of(things[1], max_version=(1, 3)).consume()
    owned.delete_from_pthread()
    del owned
    things.clear()
    gc.collect()
    assert forged.deleted == 2
for _ in range(2):
    child = os.fork()
    if child == 0:
        use(things)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert forged.deleted == 0
use(things)
""")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_workers_convert(method: str, tmp_path: Any) -> None:
    """SPEC X-LIFE-2"""
    (tmp_path / "work.py").write_text("""
import numpy as np, interop, sys, multiprocessing
def convert(n):
    return interop.to(interop.as_tensor(np.full(n, n)), "numpy").sum().item()
if __name__ == "__main__":
    alive = [interop.as_tensor(np.zeros(n)) for n in range(100)]
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(convert, range(5)))
""")
    done = run(f"import runpy, sys; sys.argv[1:] = [{method!r}]; sys.path.insert(0, {str(tmp_path)!r})\n"
               f"runpy.run_path({str(tmp_path / 'work.py')!r}, run_name='__main__')" if method == "fork" else
               f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(tmp_path / 'work.py')!r}, {method!r}]))", ok=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 4, 9, 16]\n", "")


# --- sub-interpreters -------------------------------------------------------------------------------------------------

SUB = """
import sys, warnings
sys.path[:] = {path!r}
warnings.simplefilter("ignore")
try:
    import interop
except ImportError as e:
    print("refused:", e)
else:
    print("imported")
"""


@pytest.mark.parametrize("first", ["import interop", "import numpy", ""])
def test_a_sub_interpreter_is_refused_clearly(first: str) -> None:
    """Issue 2: "Sub-interpreters are refused clearly" (SPEC X-LIFE-3), also where interop is in no other interpreter."""
    code = f"""
import sys
{first}
try:
    import _interpreters as sub
except ImportError:
    import _xxsubinterpreters as sub
which = sub.create()
sub.run_string(which, {SUB!r}.format(path=sys.path))
sub.destroy(which)
"""
    done = run(code, ok=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:") and "interpreter" in done.stdout
