"""What holds for every test file. What some of them need is in support.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take addresses out of ids made by ``ids=repr``: the processes of one run (pytest-xdist) must agree on every name."""
    plain = metafunc.parametrize

    def parametrize(*args: Any, ids: Any = None, **kwargs: Any) -> None:
        plain(*args, ids=_without_addresses(ids) if callable(ids) else ids, **kwargs)

    metafunc.parametrize = parametrize  # type: ignore[method-assign]


def _without_addresses(name: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def named(value: Any) -> Any:
        text = name(value)
        return re.sub(r" at 0x[0-9a-f]+", "", text) if isinstance(text, str) else text

    return named
