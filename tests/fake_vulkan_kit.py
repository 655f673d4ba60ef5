"""What tests on the fake driver of Vulkan stand on.

    from fake_vulkan_kit import fake_open, fills
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_vulkan import Config, FakeVulkan
from vulkan_kit import fds

import interop
from interop import _core
from interop.adapters.vulkan import ring
from interop.adapters.vulkan.context import Context


@pytest.fixture
def fake_open() -> Iterator[Callable[..., tuple[Context, FakeVulkan]]]:
    """``(Context, FakeVulkan)`` of a configuration. In the end it closes, nothing is left, and nothing forbidden was done."""
    opened: list[tuple[Context, FakeVulkan]] = []
    _warm()
    gc.collect()
    before = fds()

    def make(config: Config | str = "lavapipe", **options: Any) -> tuple[Context, FakeVulkan]:
        fake = FakeVulkan(config)
        opened.append((Context.open(driver=fake, **options), fake))
        return opened[-1]

    yield make
    for c, fake in reversed(opened):
        fake.hold = False
        settle()
        c.close()
        fake.check()
        assert not fake.live, fake.live
    opened.clear()
    settle()
    assert fds() <= before, f"{fds() - before} file descriptors are left: {named_fds()}"


@functools.cache
def _warm() -> None:
    """What a process opens once, such as the pipes of libraries that are imported now."""
    with contextlib.suppress(ImportError):
        import vulkan_object  # noqa: F401
    c = Context.open(driver=FakeVulkan())
    t = interop.empty((10,), "uint32", device=c, shared_with=["process"])
    with t.allocation.export("opaque_fd") as h:
        interop.memory.import_handle(h, c)
    back(t)
    c.queue.mark().wait(5)


def named_fds() -> list[str]:
    """What the descriptors of this process are."""
    out = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            out.append(os.readlink(f"/proc/self/fd/{fd}"))
    return out


def settle() -> None:
    """What is done and was dropped goes."""
    gc.collect()
    for _ in range(2):
        _core.drain()
        _core.release_ready()


def numbers(*shape: int, dtype: str = "uint32") -> np.ndarray[Any, Any]:
    return np.arange(1, int(np.prod(shape)) + 1).reshape(shape).astype(dtype)


def there(c: Any, a: Any) -> interop.Tensor:
    """A new tensor of the Context with these contents."""
    t = interop.empty(a.shape, str(a.dtype), device=c)
    interop.copyto(t, a)
    return t


def back(t: Any) -> np.ndarray[Any, Any]:
    out = np.zeros(t.shape, str(t.dtype))
    interop.copyto(out, t).wait(10)
    return out


def _counted(c: Context, fake: FakeVulkan) -> collections.Counter[str]:
    """What lives beside the chunks of the ring."""
    made = ring.of(c).made
    return fake.live - collections.Counter(Buffer=made, Memory=made)


@contextlib.contextmanager
def nothing_left(c: Context, fake: FakeVulkan, what: str = "") -> Iterator[None]:
    """As many objects and descriptors after it as before, beside what a Context keeps for reuse."""
    kept = {"CommandPool", "Semaphore", "Fence", "DescriptorPool"}
    settle()
    before, open_before = _counted(c, fake), fds()
    yield
    c.wait_idle(5)
    ring.sweep(c)
    settle()
    more = {k: n - before[k] for k, n in _counted(c, fake).items() if k not in kept and n > before[k]}
    assert not more, f"{what}: {more}"
    assert fds() <= open_before
