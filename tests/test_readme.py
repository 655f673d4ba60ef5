"""The examples in README.md run as they stand, each in a fresh interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_readme_has_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example: str, tmp_path: Path) -> None:
    missing = [m for m in re.findall(r"^import (\w+)", example, re.MULTILINE) if find_spec(m) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}: pip install {missing[0]}")
    script = tmp_path / "example.py"
    script.write_text(example, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
