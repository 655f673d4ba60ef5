"""What is installed, what is missing and how to get it. Imports no framework: versions come from package metadata."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from . import __version__, registry, tables

_DISTRIBUTION = "dlpack-interop"
#: Beside the adapters: what widens what interop can do, as (module, what for, how to get it).
_COMPANIONS = (
    ("ml_dtypes", "bfloat16, fp8, fp6, fp4, int4 in NumPy", "pip install ml_dtypes"),
    ("rich", "tables in colour", "pip install rich"),
)
#: How their makers want them installed; interop never pulls them in.
_INSTALL = {"torch": "see pytorch.org/get-started", "jax": "pip install jax"}


def doctor() -> int:
    """Print what is here and what is missing. 0, or 1 where another package named interop stands in the way."""
    rows = [
        ["python", "yes", platform.python_version(), f"{platform.python_implementation()} on {platform.system()} {platform.machine()}"],
        ["interop", "yes", __version__, f"compiled core in {Path(__file__).parent}"],
        ["numpy", "yes", metadata.version("numpy"), "the one dependency"],
        *(_adapter_row(name) for name in registry.names() if name not in ("interop", "numpy")),
        *(_row(*c) for c in _COMPANIONS),
    ]
    strangers = [*foreign()]
    notes = [f"another package named interop: {s}" for s in strangers]
    if mode := os.environ.get("INTEROP_COPY_GUARD"):
        notes.append(f"INTEROP_COPY_GUARD={mode}: every copy in this process is seen")
    tables.show("interop doctor", ["what", "here", "version", "remark"], rows, notes)
    return 1 if strangers else 0


def _adapter_row(name: str) -> list[str]:
    says, missing = registry.missing(name)
    if not says:
        return _row(name, "adapter", _remedy(name))
    return [name, "missing" if missing else "yes", "", f"adapter; {missing}" if missing else "adapter"]


def _row(module: str, purpose: str, install: str) -> list[str]:
    if not registry.installed(module):
        return [module, "missing", "", f"{purpose}; {install}"]
    return [module, "yes", version(module) or "?", purpose]


def _remedy(name: str) -> str:
    return _INSTALL.get(name) or f"pip install {registry.requirement(name)}"


def version(module: str, owners: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """The version of the distribution that brings a top-level module, without importing it; None where nothing says."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        names = (metadata.packages_distributions() if owners is None else owners).get(module)
        return metadata.version(names[0]) if names else None


def foreign() -> Iterator[str]:
    """Other packages that are imported as ``interop``, before or behind ours, each with the way out."""
    ours = Path(__file__).resolve().parent
    for entry in sys.path:
        for place in (Path(entry or ".", "interop"), Path(entry or ".", "interop.py")):
            if (place.suffix or (place / "__init__.py").is_file()) and place.is_file() | place.is_dir() and place.resolve() != ours:
                yield f"{place} would be imported in our place where it comes first on sys.path"
    for name in metadata.packages_distributions().get("interop", ()):
        if name.lower().replace("_", "-") != _DISTRIBUTION:
            yield f"distribution {name} {metadata.version(name)}: pip uninstall {name}"
