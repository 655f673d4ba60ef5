"""interop.empty: memory that everybody named can use. SPEC M-EMPTY-*."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import toy
from memkit import clean_toy

import interop


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


# --- empty --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("alignment", [1, 64, 256, 4096, 1 << 16])
@pytest.mark.parametrize("shared", [(), ("torch", "jax", "numpy"), ("process",)], ids=str)
def test_empty_is_aligned_as_asked(alignment: int, shared: tuple[str, ...]) -> None:
    """SPEC M-EMPTY-ALIGN"""
    t = interop.empty((3, 5), "float32", alignment=alignment, shared_with=shared)
    assert t.ptr % max(alignment, 64) == 0
    assert (t.shape, str(t.dtype), t.readonly, t.is_contiguous()) == ((3, 5), "float32", False, True)


@pytest.mark.parametrize("alignment", [0, -1, 3, 48])
def test_empty_refuses_an_alignment_that_is_no_power_of_two(alignment: int) -> None:
    """SPEC M-EMPTY-ALIGN"""
    with pytest.raises(ValueError, match="power of two"):
        interop.empty((3,), "u1", alignment=alignment)


def test_what_is_shared_with_a_device_is_whole_pages(driver: toy.Driver) -> None:
    """SPEC M-EMPTY-PAGES: pointer and size; field report B87"""
    c = toy.Context()
    t = interop.empty((100,), "uint8", shared_with=[c, "torch"])
    assert t.ptr % 4096 == 0
    assert t.allocation.nbytes % 4096 == 0
    with t.allocation.export("host") as h:
        a = interop.wrap(h, t.allocation.nbytes, device=c, owner=t)
    c.poke(a.tensor((100,), "uint8"), b"\x07" * 100)
    assert (interop.to(t, "numpy") == 7).all()
    del a
    gc.collect()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), 7, (2, 3)])
@pytest.mark.parametrize("place", ["cpu", "process", "toy"])
def test_any_shape_can_be_had_and_mapped(driver: toy.Driver, shape: Any, place: str) -> None:
    """SPEC M-EMPTY-SHAPE: also none at all"""
    t = interop.empty(shape, "int16", device=toy.Context() if place == "toy" else None,
                      shared_with=("process",) if place == "process" else ())
    assert t.shape == ((shape,) if isinstance(shape, int) else shape)
    with t.map("write") as a:
        assert a.shape == t.shape
        a[...] = 3
    del a
    t.allocation.close()


@pytest.mark.parametrize(("shape", "dtype", "error"), [
    ((-1,), "u1", ValueError), ((2**62, 4), "u1", ValueError), ((2**60,), "f8", ValueError), ((3,), "nonsense", (ValueError, TypeError)),
    ((2.5,), "u1", (TypeError, AttributeError)),
])
def test_empty_refuses_shapes_that_cannot_be(shape: Any, dtype: str, error: Any) -> None:
    """SPEC M-EMPTY-SHAPE"""
    with pytest.raises(error):
        interop.empty(shape, dtype)


def test_an_unknown_party_is_an_error_with_the_near_name() -> None:
    """SPEC M-EMPTY-PARTY"""
    with pytest.raises(ValueError, match="torch"):
        interop.empty((3,), "u1", shared_with=["torhc"])
    with pytest.raises(TypeError, match="sequence"):
        interop.empty((3,), "u1", shared_with="torch")


def test_parties_that_cannot_share_are_named(driver: toy.Driver) -> None:
    """SPEC M-EMPTY-PARTY"""
    with pytest.raises(interop.ExchangeError, match="numpy"):
        interop.empty((3,), "u1", device=toy.Context(), shared_with=["numpy"])


def test_memory_from_empty_can_be_written_anywhere() -> None:
    """SPEC M-EMPTY-ALIGN: a page that is not there would kill the process here"""
    t = interop.empty((3 * 4096 + 5,), "uint8", shared_with=["process"])
    ctypes.memset(t.ptr, 7, t.nbytes)
    assert (interop.to(t, "numpy") == 7).all()
