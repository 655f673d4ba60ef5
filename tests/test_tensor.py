"""What a Tensor is not: a number, a container of values, something to pickle or to make by hand; and how it shows itself."""

from __future__ import annotations

import copy
import operator
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from support import forge

import interop
from interop import Tensor

BINARY = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.matmul,
    operator.lshift,
          operator.rshift, operator.and_, operator.or_, operator.xor, divmod, operator.iadd, operator.imul)  # fmt: skip


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_arithmetic_is_a_type_error_that_names_interop_to(op: Any) -> None:
    """SPEC X-HOST-9"""
    t = interop.as_tensor(np.arange(3.0))
    for other in (t, 1, 2.5, np.float32(2), np.arange(3.0)):
        for pair in ((t, other), (other, t)):
            with pytest.raises(TypeError, match=r"interop\.to"):
                op(*pair)


@pytest.mark.parametrize(
    "op", [operator.neg, operator.pos, operator.invert, abs, bool, float, int, complex, operator.index, round, np.sin, np.sum, np.negative]
)
def test_a_tensor_is_no_number(op: Any) -> None:
    """SPEC X-HOST-9"""
    with pytest.raises(TypeError, match=r"interop\.to"):
        op(interop.as_tensor(np.arange(1)))


@pytest.mark.parametrize("op", [operator.lt, operator.le, operator.gt, operator.ge])
def test_a_tensor_has_no_order(op: Any) -> None:
    """SPEC X-HOST-9"""
    t = interop.as_tensor(np.arange(3.0))
    for other in (t, 1, np.arange(3.0)):
        with pytest.raises(TypeError):
            op(t, other)


def test_equality_hash_and_weak_references_are_of_the_object() -> None:
    """SPEC X-HOST-9"""
    a = np.arange(3.0)
    t, u = interop.as_tensor(a), interop.as_tensor(a)
    assert t == t and t != u and (t == u) is False and len({t, u, t}) == 2 and t != a.tolist()
    ref = weakref.ref(t)
    assert ref() is t
    del t
    assert ref() is None


def test_membership_does_not_compare_values_silently() -> None:
    """SPEC X-HOST-9: `1.0 in t` would always be False, by identity."""
    with pytest.raises(TypeError):
        _ = 1.0 in interop.as_tensor(np.arange(3.0))


@pytest.mark.parametrize("how", [pickle.dumps, lambda t: pickle.dumps(t, 0), copy.copy, copy.deepcopy])
def test_pickling_and_copying_are_type_errors_that_name_interop_to(how: Any) -> None:
    """SPEC X-HOST-9"""
    with pytest.raises(TypeError, match=r"interop\.to"):
        how(interop.as_tensor(np.arange(3.0)))


def test_a_tensor_is_not_made_by_calling_its_type() -> None:
    """SPEC X-HOST-9"""

    class Sub(Tensor):
        pass

    for cls in (Tensor, Sub, type(interop.as_tensor(bytearray(3)))):
        for args in ((), (np.zeros(3),), (3, 4)):
            with pytest.raises(TypeError, match="as_tensor"):
                cls(*args)


def test_a_tensor_is_not_made_by_new_either() -> None:
    """SPEC X-HOST-9"""
    for cls in (Tensor, type("Sub", (Tensor,), {}), type(interop.as_tensor(bytearray(3)))):
        with pytest.raises(TypeError):
            cls.__new__(cls)


def test_attributes_are_read_only_and_items_are_not_assigned() -> None:
    """SPEC X-HOST-9"""
    t = interop.as_tensor(np.arange(3.0))
    for name in ("shape", "readonly", "ptr", "dtype", "anything"):
        with pytest.raises(AttributeError):
            setattr(t, name, 1)
    with pytest.raises(TypeError):
        t[0] = 1  # type: ignore[index]


# ---- showing ----
def test_repr_says_shape_dtype_device_and_what_is_unusual() -> None:
    """SPEC X-HOST-10"""
    a = np.zeros((2, 3), "f4")
    assert repr(interop.as_tensor(a)) == "Tensor((2, 3), float32, cpu, owner=numpy.ndarray)"
    assert "strides=(1, 3)" in repr(interop.as_tensor(a).permute(1, 0))
    assert "readonly" in repr(interop.as_tensor(a, readonly=True)) and "copied" in repr(interop.as_tensor(a, copy=True))
    assert "vulkan:1" in repr(forge((3,), "bfloat16", device=(7, 1))) and "bfloat16" in repr(forge((3,), "bfloat16", device=(7, 1)))


def test_html_is_escaped() -> None:
    """SPEC X-HOST-10: a class made in a function has '<locals>' in its name."""

    class Owner(bytearray):
        pass

    html = interop.as_tensor(Owner(4))._repr_html_()
    assert "&lt;locals&gt;" in html and "<locals>" not in html and "uint8" in html


def test_showing_never_touches_the_memory() -> None:
    """SPEC X-HOST-10: the address is not mapped; reading it would end the process."""
    for device in ((1, 0), (2, 0), (7, 0)):
        t = forge((1000, 1000), device=device, data=0x1000)
        assert "1000" in repr(t) and "1000" in t._repr_html_() and "1000" in str(t)
