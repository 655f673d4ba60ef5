"""The examples run as they stand, each in a fresh interpreter, and say what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: File and arguments -> what it prints, which the exit code alone would not prove.
EXAMPLES = {
    "camera_ring.py": "copies = 0, wrong = 0",
    "camera_ring.py numpy": "into numpy: copies = 0, wrong = 0",
    "share_with_process.py": "bytes written there and read here: right",
    "vulkan_to_torch.py": "right, copies = 0",
    "opencl_to_torch.py": "right, copies = 0",
    "camera_to_opencl.py": "wrong = 0",
    "renderer_to_torch.py": "copies = 0, wrong = 0",
    "my_adapter.py": "same handle: True; maps open: 0",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.mark.parametrize("command", EXAMPLES)
def test_example_runs(command: str) -> None:
    name, *arguments = command.split()
    done = run(str(ROOT / "examples" / name), *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert EXAMPLES[command] in done.stdout


def test_every_example_is_run() -> None:
    assert {p.name for p in ROOT.joinpath("examples").glob("*.py")} == {command.split()[0] for command in EXAMPLES}


def test_the_adapter_is_short() -> None:
    """SPEC A-SMALL"""
    text = (ROOT / "examples" / "my_adapter.py").read_text("utf-8")
    adapter = text[text.index("class VaultAdapter"):text.index("register(VaultAdapter())")]
    assert len(adapter.strip().splitlines()) < 25
