"""What interop remembers of types, what it imports and when, and adapters that are installed as plug-ins."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import run, torch

import interop
from interop.testing import Forged, Producer


# ---- what is remembered of types ----
def test_a_type_that_is_patched_after_first_use_is_seen() -> None:
    """SPEC X-KW-8: also when a base is patched."""
    one, two = Forged((1,)), Forged((2,))
    base = type("Base", (), {"__dlpack__": lambda self, **k: one.capsule(), "__dlpack_device__": lambda self: (1, 0)})
    x = type("Derived", (base,), {})()
    assert interop.as_tensor(x).shape == (1,)
    base.__dlpack__ = lambda self, **k: two.capsule()  # type: ignore[attr-defined]
    assert interop.as_tensor(x).shape == (2,)
    type(x).__dlpack__ = lambda self, **k: one.capsule()
    assert interop.as_tensor(x).shape == (1,)
    del type(x).__dlpack__, base.__dlpack__  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="shares no memory"):
        interop.as_tensor(x)
    x.__class__ = type("Other", (), {"__array_interface__": np.zeros(3).__array_interface__})
    assert interop.as_tensor(x).shape == (3,)


def test_a_keyword_learnt_to_be_unknown_is_tried_again_after_a_patch() -> None:
    """SPEC X-KW-2, X-KW-8"""
    asked = []
    cls = type("Old", (), {"__dlpack__": lambda self: Forged().capsule(), "__dlpack_device__": lambda self: (1, 0)})
    interop.as_tensor(cls())
    cls.__dlpack__ = lambda self, max_version=None: asked.append(max_version) or Forged().capsule()  # type: ignore[attr-defined]
    interop.as_tensor(cls())
    assert asked == [(1, 3)]


def test_a_type_made_where_another_was_freed_is_not_taken_for_it(request: Any) -> None:
    """SPEC X-KW-8"""
    seen = set()
    gc.collect()
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # what is there already need not be searched 300 times
    for i in range(300):
        forged = Forged((i % 7,))
        fields = [{"__dlpack__": lambda self, f=forged, **k: f.capsule(), "__dlpack_device__": lambda self: (1, 0)},
                  {"__array_interface__": np.zeros(i % 7).__array_interface__}, {}][i % 3]  # fmt: skip
        cls = type("Cls", (bytearray,) if i % 2 and i % 3 == 2 else (), fields)
        seen.add(id(cls))
        x = cls()
        if i % 3 < 2:
            assert interop.as_tensor(x).shape == (i % 7,)
        elif i % 2:
            assert interop.as_tensor(x).shape == (0,)
        else:
            with pytest.raises(TypeError):
                interop.as_tensor(x)
        del x, cls, fields
        gc.collect()
    assert len(seen) < 300  # addresses were reused: otherwise this shows nothing


def test_types_are_not_kept_alive() -> None:
    """SPEC X-KW-8"""
    cls = type("Cls", (), {"__dlpack__": lambda self, **k: Forged().capsule(), "__dlpack_device__": lambda self: (1, 0)})
    interop.as_tensor(cls())
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


def test_more_types_than_are_remembered_still_work() -> None:
    """SPEC X-KW-8"""
    xs = [
        type(f"C{i}", (), {"__dlpack__": lambda self, i=i, **k: Forged((i,)).capsule(), "__dlpack_device__": lambda self: (1, 0)})()
        for i in range(3000)
    ]
    for _ in range(2):
        assert [interop.as_tensor(x).shape[0] for x in xs] == list(range(3000))


# ---- nothing heavy; plug-ins ----
def test_import_imports_numpy_and_no_framework() -> None:
    """SPEC X-LIFE-3"""
    heavy = "torch jax jaxlib tvm_ffi ml_dtypes cupy cuda tensorflow pyopencl vulkan rich ctypes.util asyncio"
    done = run(f"import sys, interop; print([m for m in '{heavy}'.split() if m in sys.modules]); import numpy as np;"
               "interop.to(interop.as_tensor(np.zeros(3)), 'numpy'); interop.kind(3); interop.Device('cuda'); interop.DType('f4');"
               "print([m for m in ('torch', 'jax', 'ml_dtypes') if m in sys.modules])")  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def plugin(folder: Path, name: str, code: str) -> None:
    folder.joinpath(f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(f"[interop.adapters]\n{name} = {name}:{'AcmeAdapter' if 'class' in code else 'nothing'}\n")


ACME = """
import numpy as np
from interop.contract import Adapter
class Buffer:
    def __init__(self, a): self.a = a
class AcmeAdapter(Adapter):
    name, types, reads = "acme", ("acme.Buffer",), "adapter"
    def to_tensor(self, x):
        import interop
        return interop.as_tensor(x.a)
    def from_tensor(self, t, *, place=None, stream=None):
        return Buffer(np.asarray(t))
"""


@pytest.mark.parametrize("use", [
    "type(interop.to(np.zeros(3), 'acme')).__name__", "type(interop.to(np.zeros(3), acme)).__name__",
    "type(interop.to(np.zeros(3), acme.Buffer)).__name__",
    "len(interop.as_tensor(acme.Buffer(np.zeros(3)))) and 'Buffer'",
    "interop.to(acme.Buffer(np.zeros(3)), 'numpy').shape == (3,) and 'Buffer'",
    "type(interop.to(np.zeros(3), like=acme.Buffer(0))).__name__",
], ids=["name", "module", "type", "as_tensor", "source", "like"])  # fmt: skip
def test_an_installed_plug_in_is_found_by_whatever_is_asked_first(use: str, tmp_path: Path) -> None:
    """SPEC X-TO-1: entry point group "interop.adapters"."""
    plugin(tmp_path, "acme", ACME)
    assert (
        run(
            f"import interop, sys; assert 'acme' not in sys.modules; import numpy as np, acme; print({use})", path=[tmp_path]
        ).stdout.strip()
        == "Buffer"
    )


def test_a_broken_plug_in_does_not_hide_the_others(tmp_path: Path) -> None:
    """SPEC X-TO-1: whichever is found first."""
    plugin(tmp_path, "acme", ACME)
    for broken in ("aaa_broken", "zzz_broken"):
        plugin(tmp_path, broken, "raise RuntimeError('broken plug-in')\n")
    code = (
        "import numpy as np, interop\nx = np.zeros(3)\n"
        "print(type(interop.to(x, 'acme')).__name__, type(interop.to(x, 'numpy')).__name__)\n"
        "try: interop.to(x, 'nonsense')\nexcept ValueError as e: print('ValueError')"
    )
    done = run(code, path=[tmp_path])
    assert done.stdout.split() == ["Buffer", "ndarray", "ValueError"] and "broken" in done.stderr


def test_forged_producers_are_read_alike_whatever_was_read_before() -> None:
    """SPEC X-KW-8: no order of types spoils another."""
    kinds = [
        lambda: np.zeros(3, "f4"),
        lambda: torch.zeros(3),
        lambda: Producer(Forged((3,))),
        lambda: bytearray(3),
        lambda: interop.as_tensor(np.zeros(3)),
    ]
    for order in itertools.permutations(range(len(kinds)), 3):
        assert [interop.as_tensor(kinds[i]()).shape for i in order] == [(3,)] * 3
