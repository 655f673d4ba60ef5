"""Views: indexing, permute, reshape and view(dtype), each against NumPy on the same memory, and what a Tensor will not do."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import aligned, forge, torch

import interop
from interop import ExchangeError, Tensor

quick = settings(max_examples=200, deadline=None, derandomize=True)
HUGE = 2**63 - 1
DTYPES = ("u1", "i2", "f4", "f8", "c16", "?")


@st.composite
def arrays(draw: Any, max_ndim: int = 8, dtypes: tuple[str, ...] = DTYPES) -> np.ndarray[Any, Any]:
    """Arrays of 0 to 8 dimensions with strides of every kind: permuted, reversed, with gaps, broadcast, of extents 0 and 1."""
    ndim = draw(st.integers(0, max_ndim))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4] if ndim < 5 else [1, 1, 2, 2, 0]), min_size=ndim, max_size=ndim))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1, -2])) for _ in shape]
    whole = [n * abs(s) for n, s in zip(shape, steps, strict=True)]
    a = np.arange(math.prod(whole)).astype(draw(st.sampled_from(dtypes))).reshape(whole)
    a = a[(*(slice(None, None, s) for s in steps), ...)].transpose(draw(st.permutations(range(ndim))))
    if ndim and a.shape[-1] and draw(st.integers(0, 5)) == 0:
        a = np.broadcast_to(a[..., :1], (*a.shape[:-1], 3))
    if draw(st.integers(0, 5)) == 0:
        a.flags.writeable = False
    return a


@st.composite
def indices(draw: Any, a: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """A basic index into `a` that NumPy accepts."""

    def one(n: int) -> Any:
        if n and draw(st.booleans()):
            return draw(st.sampled_from([int, np.int8, np.int64]))(draw(st.integers(-n, n - 1)))
        bound = st.none() | st.integers(-n - 2, n + 2) | st.sampled_from([HUGE, -HUGE - 1, 2**70, -(2**70)])
        step = st.none() | st.sampled_from([1, 2, 3, -1, -2, -3, HUGE, -HUGE, -HUGE - 1, 2**70, -(2**70)])
        return slice(draw(bound), draw(bound), draw(step))

    first = draw(st.integers(0, a.ndim))
    key = [one(n) for n in a.shape[:first]]
    if draw(st.booleans()):
        last = draw(st.integers(first, a.ndim))
        key += [Ellipsis, *(one(n) for n in a.shape[last:])]
    for _ in range(draw(st.integers(0, 2))):
        key.insert(draw(st.integers(0, len(key))), None)
    return tuple(key)


def same(t: Tensor, a: np.ndarray[Any, Any]) -> None:
    """`t` is what `a` is: shape, values, memory, strides where they count, read-only."""
    assert t.shape == a.shape and t.dtype == a.dtype and t.ndim == a.ndim and t.size == a.size and t.nbytes == a.nbytes
    n = np.asarray(t)
    assert n.tobytes() == a.tobytes()
    if a.size:
        assert t.ptr == a.ctypes.data and np.shares_memory(n, a)
        assert all(s * a.itemsize == b for s, b, extent in zip(t.strides, a.strides, a.shape, strict=True) if extent > 1)
        overlaps = any(s == 0 and extent > 1 for s, extent in zip(a.strides, a.shape, strict=True))
        assert t.readonly == (not a.flags.writeable or overlaps)


# ---- against NumPy ----
@quick
@given(st.data(), arrays())
def test_index_is_numpys_basic_index(data: Any, a: Any) -> None:
    """SPEC X-VIEW-1"""
    key = data.draw(indices(a))
    wanted = a[key] if any(k is Ellipsis for k in key) else a[(*key, ...)]  # '...' keeps NumPy from making a scalar
    same(interop.as_tensor(a)[key], wanted)


@quick
@given(st.data(), arrays())
def test_view_of_a_view_is_numpys(data: Any, a: Any) -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(a)
    for _ in range(3):
        key = (*data.draw(indices(a)), ...)
        key = key if sum(k is Ellipsis for k in key) == 1 else key[:-1]
        a, t = a[key], t[key]
    same(t, a)


@quick
@given(st.data(), arrays())
def test_permute_is_numpys_transpose(data: Any, a: Any) -> None:
    """SPEC X-VIEW-2"""
    axes = data.draw(st.permutations(range(a.ndim)))
    axes = [x - a.ndim if data.draw(st.booleans()) else x for x in axes]
    same(interop.as_tensor(a).permute(axes), a.transpose(axes))
    if len(axes) != 1:
        same(interop.as_tensor(a).permute(*axes), a.transpose(axes))


@quick
@given(st.data(), arrays(max_ndim=5))
@example(None, np.zeros((2, 0, 3)))
def test_reshape_is_a_view_exactly_where_numpy_has_one(data: Any, a: Any) -> None:
    """SPEC X-VIEW-3: the oracle is NumPy's own reshape with copy=False."""
    shape = [0, 4] if data is None else data.draw(st.sampled_from(_shapes(a.size)).flatmap(st.permutations))
    if data is not None and 0 not in shape and shape and data.draw(st.booleans()):
        shape[data.draw(st.integers(0, len(shape) - 1))] = -1
    t = interop.as_tensor(a)
    try:
        wanted = a.reshape(shape, copy=False)
    except ValueError:
        with pytest.raises(ExchangeError, match="copy"):
            t.reshape(shape)
        return
    same(t.reshape(shape), wanted)
    same(t.reshape(*shape), wanted)


def _shapes(size: int) -> list[list[int]]:
    if size == 0:
        return [[0], [0, 3], [2, 0, 1], [0, 0]]
    found = [[size], [1, size], [size, 1, 1]] + ([[]] if size == 1 else [])
    for a, b in itertools.product(range(1, size + 1), repeat=2):
        if size % (a * b) == 0:
            found.append([a, b, size // (a * b)])
    return found


@quick
@given(st.data(), arrays(max_ndim=4, dtypes=("u1", "i2", "f4", "f8", "c16")))
def test_view_as_another_dtype_is_numpys(data: Any, a: Any) -> None:
    """SPEC X-VIEW-4: also refused are bytes that do not start, or are not spaced, as the new type needs."""
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "i2", "u4", "f4", "f8", "c8", "c16"])))
    t = interop.as_tensor(a)
    try:
        wanted = a.view(dtype)
    except ValueError:
        with pytest.raises((ValueError, ExchangeError)):
            t.view(dtype)
        return
    uneven = any(s % dtype.itemsize for s, n in zip(wanted.strides, wanted.shape, strict=True) if n > 1)
    unaligned = a.ctypes.data % (dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize) != 0
    if a.size and (uneven or unaligned):
        with pytest.raises(ExchangeError):
            t.view(dtype)
        return
    same(t.view(dtype), wanted)


@quick
@given(arrays())
def test_contiguity_is_numpys(a: Any) -> None:
    """SPEC X-VIEW-6"""
    t = interop.as_tensor(a)
    assert t.is_contiguous() == t.is_contiguous("C") == a.flags.c_contiguous
    assert t.is_contiguous("F") == a.flags.f_contiguous


@quick
@given(arrays())
def test_len_and_iteration_are_numpys(a: Any) -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(a)
    if a.ndim == 0:
        for ask in (len, iter):
            with pytest.raises(TypeError, match="0-dimensional"):
                ask(t)
        return
    assert len(t) == len(a)
    for i, view in enumerate(t):
        same(view, a[i, ...])


# ---- the edges of it ----
def test_views_of_64_dimensions_work_and_65_are_an_index_error() -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(np.arange(2.0))[(None,) * 63]
    assert t.ndim == 64 and np.asarray(t).ndim == 64 and t[(0,) * 63].shape == (2,)
    for grow in (lambda: t[None], lambda: t[None, ...], lambda: t[..., None], lambda: t[(None,) * 70]):
        with pytest.raises(IndexError, match="64"):
            grow()
    with pytest.raises(ValueError, match="64"):
        t.reshape((1,) * 64 + (2,))


@pytest.mark.parametrize("index", [4, -5, 2**40, -(2**40), 2**63, 2**70, -(2**70), np.uint64(2**64 - 1)])
def test_integer_out_of_bounds_is_an_index_error_that_names_it(index: Any) -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(np.zeros((4, 3)))
    with pytest.raises(IndexError, match=str(int(index))):
        t[index]
    with pytest.raises(IndexError):
        t[:0][0]


def test_too_many_indices_are_an_index_error() -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(np.zeros((4, 3)))
    for key in ((0, 0, 0), (0, 0, slice(None)), (..., 0, 0, 0), (..., ...), (None, 0, 0, 0)):
        with pytest.raises(IndexError):
            t[key]
    with pytest.raises(IndexError):
        interop.as_tensor(np.float32(1))[0]


@pytest.mark.parametrize("key", [
    True, False, np.True_, [0, 1], [], np.array([0, 1]), np.array([True, False, True, False]), np.array(True), "a", 1.5, 1.0, object(),
        b"x", {},
    (0, [0]), (slice(None), np.array([0])), slice("a"), slice(1.5), slice(None, None, 1.0), np.float32(1), (0, True), ((0, 1), 1), 1j,
], ids=repr)  # fmt: skip
def test_anything_but_basic_indices_is_a_type_error(key: Any) -> None:
    """SPEC X-VIEW-1"""
    with pytest.raises(TypeError):
        interop.as_tensor(np.zeros((4, 3)))[key]


def test_type_error_of_an_index_says_where_fancy_indexing_is_to_be_had() -> None:
    """SPEC X-VIEW-1"""
    with pytest.raises(TypeError, match=r"interop\.to\(t, 'numpy'\)"):
        interop.as_tensor(np.zeros(3))[[0, 1]]


def test_tensors_of_other_frameworks_index_only_as_integers() -> None:
    """SPEC X-VIEW-1"""
    t = interop.as_tensor(np.arange(4.0))
    assert np.asarray(t[torch.tensor(2)]) == 2
    for key in (torch.tensor(True), torch.tensor([1]), torch.tensor(1.0), t, t[0]):
        with pytest.raises(TypeError):
            t[key]


def test_step_of_zero_is_a_value_error() -> None:
    """SPEC X-VIEW-1"""
    with pytest.raises(ValueError, match="zero"):
        interop.as_tensor(np.zeros(3))[::0]


def test_a_failing_index_method_passes_its_own_error_on() -> None:
    """SPEC X-VIEW-1"""

    class Index:
        def __index__(self) -> int:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        interop.as_tensor(np.zeros(3))[Index()]
    with pytest.raises(KeyError, match="mine"):
        interop.as_tensor(np.zeros(3))[Index() :]


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 1, 2), (0, 2), (0, -3), (-1, 1), (2**70, 0), ()])
def test_permute_takes_permutations_only(axes: Any) -> None:
    """SPEC X-VIEW-2"""
    with pytest.raises(ValueError, match="permutation"):
        interop.as_tensor(np.zeros((2, 3))).permute(axes)


@pytest.mark.parametrize(
    "shape", [(4,), (2, 4), (-1, 4), (-1, -1), (-2, 3), (-6,), (2**62, 4), (2**32, 2**32), (2**64,), (0,), (-1, 0), ()]
)
def test_reshape_to_another_number_of_elements_is_a_value_error(shape: Any) -> None:
    """SPEC X-VIEW-3"""
    with pytest.raises(ValueError):
        interop.as_tensor(np.zeros((2, 3))).reshape(shape)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.reshape(1.5),
        lambda t: t.reshape("6"),
        lambda t: t.reshape((2.0, 3)),
        lambda t: t.reshape(None),
        lambda t: t.permute("01"),
        lambda t: t.permute(1.0, 0),
        lambda t: t.permute(None),
        lambda t: t.view(None),
    ],
)
def test_malformed_arguments_of_views_are_type_errors(call: Any) -> None:
    """SPEC X-VIEW-3"""
    with pytest.raises(TypeError):
        call(interop.as_tensor(np.zeros((2, 3))))


def test_reshape_refusal_gives_reason_and_remedy() -> None:
    """SPEC X-VIEW-3"""
    t = interop.as_tensor(np.zeros((4, 6))[:, :3])
    with pytest.raises(ExchangeError) as e:
        t.reshape(-1)
    assert "(4, 3)" in e.value.reason and e.value.remedy is not None and "copy=True" in e.value.remedy
    assert interop.as_tensor(t, copy=True).reshape(-1).shape == (12,)


# ---- what a view keeps ----
def test_readonly_is_sticky_through_every_view() -> None:
    """SPEC X-RO-1"""
    a = aligned(np.arange(24.0).reshape(4, 6))
    t = interop.as_tensor(a, readonly=True)
    views = [t[1:], t[0], t[..., None], t[::-1, ::2], t[:0], t.permute(1, 0), t.reshape(24), t.view("uint8"), t[1:][0].view("i4"), *t]
    assert all(v.readonly and not np.asarray(v).flags.writeable for v in views)
    assert a.flags.writeable and not interop.as_tensor(a)[1:].readonly


def test_a_leaf_keeps_the_root_and_not_the_views_between() -> None:
    """SPEC X-OWN-7"""
    for source in (np.arange(100.0), bytearray(100), forge((100,))):
        root = interop.as_tensor(source)
        middle = root[10:]
        leaf = middle.reshape(9, 10)[2:, ::-1]
        gone = weakref.ref(middle)
        expected = np.array(leaf)
        del middle
        assert gone() is None
        del root, source
        assert np.array_equal(np.asarray(leaf), expected)


def test_memory_goes_with_the_last_view() -> None:
    """SPEC X-OWN-7"""

    class Array(np.ndarray[Any, Any]):
        pass

    for make in (lambda: np.arange(64.0).view(Array), lambda: np.arange(64.0)):
        a = make()
        gone = weakref.ref(a)
        leaf = interop.as_tensor(a)[1:][1:].permute(0).view("uint8")[8:]
        del a
        assert gone() is not None and leaf.shape == (488,)
        del leaf
        assert gone() is None


def test_views_keep_device_and_copied() -> None:
    """SPEC X-VIEW-5"""
    t = interop.as_tensor(np.arange(6.0), copy=True)
    assert t.copied and t[1:].copied and t[1:].device == "cpu"
    c = forge((4, 6), device=(2, 3))
    assert {str(v.device) for v in (c[1], c.permute(1, 0), c.reshape(-1), c.view("u1"), *c)} == {"cuda:3"}
    p = forge((8,), "int4", flags=interop.testing.SUBBYTE_PADDED)
    assert p.padded and p[1:].padded and p.reshape(2, 4).padded and p.nbytes == 8


# ---- elements that share bytes; handles ----
@pytest.mark.parametrize(
    ("dtype", "first", "offset"),
    [("int4", 2, 1), ("float4_e2m1fn", 4, 2), ("float6_e2m3fn", 4, 3), ("int1", 8, 1), ("uint2", 4, 1), ("int4x3", 2, 3)],
)
def test_packed_elements_are_sliced_where_whole_bytes_begin(dtype: str, first: int, offset: int) -> None:
    """SPEC X-DT-7"""
    t = forge((16,), dtype)
    assert t[first:].ptr == t.ptr + offset and t[first:].shape == (16 - first,)
    for key in (slice(1, None), 1, slice(first + 1, None), slice(None, None, -1)):
        if key == slice(None, None, -1) and dtype == "int1":
            key = slice(9, None)
        with pytest.raises(ExchangeError, match=r"does not start on a byte") as e:
            t[key]
        assert e.value.remedy
    assert t[1:1].shape == (0,) and t[:3].ptr == t.ptr and t[first::2].ptr == t.ptr + offset


def test_padded_sub_byte_elements_are_sliced_anywhere() -> None:
    """SPEC X-DT-6"""
    t = forge((16,), "int4", flags=interop.testing.SUBBYTE_PADDED)
    assert t[3:].ptr == t.ptr + 3 and t[::-1].ptr == t.ptr + 15 and t[5].ptr == t.ptr + 5


@pytest.mark.parametrize("kind", [4, 7, 8, 9, 12, 15, 16, 17, 18])
def test_views_over_a_handle_move_the_byte_offset_only(kind: int) -> None:
    """SPEC X-DEV-4"""
    t = forge((4, 6), "float32", device=(kind, 0), byte_offset=256)
    assert (t.handle, t.byte_offset) == (0x7F0000001000, 256)
    for view, offset in (
        (t[1], 280),
        (t[:, 2:], 264),
        (t[::-1, ::-1], 256 + 23 * 4),
        (t.reshape(24)[5:], 276),
        (t.view("u1")[0, 3:], 259),
        (t[4:], 256),
    ):
        assert (view.handle, view.byte_offset) == (0x7F0000001000, offset)
        with pytest.raises(AttributeError, match="handle"):
            _ = view.ptr


@pytest.mark.parametrize("kind", [1, 2, 3, 10, 11, 13, 14])
def test_views_of_addressable_memory_move_the_pointer(kind: int) -> None:
    """SPEC X-DEV-3"""
    t = forge((4, 6), "float32", device=(kind, 0), byte_offset=256)
    assert t[1, 2:].ptr == t.ptr + 32 and t[::-1].ptr == t.ptr + 72
    with pytest.raises(AttributeError, match="ptr"):
        _ = t.handle


def test_a_view_before_the_start_of_a_handle_is_refused() -> None:
    """SPEC X-VIEW-5"""
    t = forge((4,), "float32", device=(7, 0), strides=(-1,), byte_offset=8)
    assert t[2:].byte_offset == 0 and t[0].byte_offset == 8
    for key in (3, slice(3, None), slice(None, None, -1)):
        with pytest.raises(ExchangeError, match="before the start"):
            t[key]


def test_offsets_near_the_end_of_64_bits_do_not_wrap() -> None:
    """SPEC X-VALID-6"""
    with pytest.raises(ExchangeError, match="byte_offset"):
        forge((2**40,), "uint8", device=(7, 0), byte_offset=2**63 - 8)
    t = forge((8,), "uint8", device=(7, 0), byte_offset=2**63 - 8)
    assert t[3].byte_offset == 2**63 - 5
    assert t[::-1].byte_offset == 2**63 - 1


def test_huge_extents_are_sliced_without_overflow() -> None:
    """SPEC X-VALID-4"""
    t = forge((2**53, 16), "float32", device=(2, 0), data=2**20)
    assert t[2**52 : 2**52 + 1].ptr == 2**20 + 2**52 * 64
    assert t[:: 2**51].shape == (4, 16) and t[:: 2**51].strides == (2**55, 1)
    assert t[:: -(2**51)].strides == (-(2**55), 1)
    with pytest.raises(ValueError):
        t.reshape(2**60, 2)
    assert t.view("uint8").shape == (2**53, 64)
