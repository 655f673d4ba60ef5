"""What holds for every test file. What some of them need is in support.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interop import _core
from interop.adapters import cuda, opencl, vulkan
from interop.contract import ExchangeError

# A shell that starts us in the background has SIGINT ignored, and Python then raises no KeyboardInterrupt: some tests are about it
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_cuda_driver(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forged CUDA memory never reaches a real driver, which would follow its pointers and streams. Tests marked `gpu` mean it."""
    if request.node.get_closest_marker("gpu") is not None:
        yield
        return
    _core.set_cuda_ops(None)
    usable, cuda.ADAPTER._usable = cuda.ADAPTER._usable, False
    yield
    cuda.ADAPTER._usable = usable
    _core.set_cuda_ops(cuda.ADAPTER)


@pytest.fixture(autouse=True)
def no_vulkan_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``vulkan:0`` opens a driver only in the tests that are about it: elsewhere it is a device that nobody serves."""
    if request.path.name.startswith("test_vulkan") or request.node.get_closest_marker("gpu") is not None:
        return

    def context(place: Any) -> Any:
        raise ExchangeError(f"{place}: no Vulkan driver for this test")

    monkeypatch.setattr(vulkan.ADAPTER, "context", context)


@pytest.fixture(autouse=True)
def no_opencl_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``opencl:0`` opens a driver only in the tests that are about it."""
    if "opencl" in request.path.name or request.node.get_closest_marker("gpu") is not None:
        return

    def context(place: Any) -> Any:
        raise ExchangeError(f"{place}: no OpenCL driver for this test")

    monkeypatch.setattr(opencl.ADAPTER, "context", context)


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
