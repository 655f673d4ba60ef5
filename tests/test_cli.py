"""`python -m interop`: what a person types. The numbers of `bench` are never judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def interop(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", "interop", *arguments], env=env, capture_output=True, text=True, timeout=110, check=False)


def test_doctor_names_what_is_here_and_how_to_get_what_is_not() -> None:
    done = interop("doctor")
    assert done.returncode == 0
    for word in ("python", "numpy", "torch", "jax", "cupy"):
        assert word in done.stdout


def test_bench_gives_minima_medians_and_ratios_as_json() -> None:
    pytest.importorskip("tvm_ffi")
    done = interop("bench", "--quick", "--json", "numpy -> Tensor")
    assert done.returncode == 0, done.stderr
    text = json.dumps(json.loads(done.stdout))
    for word in ("min", "median", "ratio"):
        assert word in text


def test_demo_proves_every_pair_or_fails() -> None:
    done = interop("demo", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_command_is_an_error() -> None:
    assert interop("frobnicate").returncode == 2
