"""Metadata that lies: every bit but the pointers. A refusal that frees once, or a tensor that says no more than it was told."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Forged, ForgedTable, WithoutDevice, exchange_table

ADDRESSABLE = {1, 2, 3, 10, 11, 13, 14}
HOST = {1, 3, 11, 13}
DEVICES = {*range(1, 19)} - {5, 6}
WIDTHS: dict[int, Any] = {
    it.INT: {1, 2, 4, 8, 16, 32, 64}, it.UINT: {1, 2, 4, 8, 16, 32, 64}, it.FLOAT: {16, 32, 64}, it.OPAQUE_HANDLE: {8, 16, 32, 64},
    it.BFLOAT: {16}, it.COMPLEX: {32, 64, 128}, it.BOOL: {8}, **{code: {8} for code in range(7, 15)}, 15: {6}, 16: {6}, 17: {4},
}  # fmt: skip
TABLE = exchange_table(interop.Tensor)


def tabled(forged: Forged, borrow: bool) -> Any:
    made = ForgedTable(from_py=lambda x: forged, to_py=lambda owned: owned, borrow=(lambda x: forged) if borrow else None)
    return made.make_type()()


#: Every way in; each must refuse what any other refuses.
WAYS: dict[str, Callable[[Forged], Any]] = {
    "legacy": lambda f: interop.as_tensor(f.capsule(versioned=False)),
    "versioned": lambda f: interop.as_tensor(f.capsule(versioned=True)),
    "producer": lambda f: interop.as_tensor(WithoutDevice(f)),
    "from_dlpack": lambda f: interop.from_dlpack(it.Producer(f)),
    "from_py": lambda f: interop.as_tensor(tabled(f, False)),
    "borrow": lambda f: interop.as_tensor(tabled(f, True)),
    "to_py": lambda f: TABLE.to_py(f.loose(versioned=True)),
    "to numpy": lambda f: interop.to(WithoutDevice(f), "numpy"),
    "borrow to numpy": lambda f: interop.to(tabled(f, True), "numpy"),
    "copy": lambda f: interop.as_tensor(f.capsule(), copy=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
#: Those that give a Tensor over the same memory.
alias_ways = pytest.mark.parametrize("way", list(WAYS.values())[:7], ids=list(WAYS)[:7])


def refused(way: Callable[[Forged], Any], forged: Forged, match: str | None = None) -> None:
    """`way` refuses, and what it was handed is freed exactly once."""
    with pytest.raises((ExchangeError, ValueError), match=match):
        way(forged)
    assert set(forged.deletions) <= {1}


# --- one field at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [-1, -(2**31), 65, 66, 1024, 2**20, 2**31 - 1])
@ways
def test_ndim_outside_0_to_64(way: Any, ndim: int) -> None:
    """SPEC X-VALID-1; field report B51"""
    refused(way, Forged((3,), ndim=ndim), f"ndim {ndim}")


@pytest.mark.parametrize("ndim", [0, 1, 5, 6, 7, 63, 64])
@alias_ways
def test_ndim_up_to_64(way: Any, ndim: int) -> None:
    """SPEC X-VALID-1"""
    assert way(Forged((1,) * ndim)).ndim == ndim


@pytest.mark.parametrize("ndim", [1, 2, 64])
@ways
def test_no_shape(way: Any, ndim: int) -> None:
    """SPEC X-VALID-2"""
    refused(way, Forged(None, ndim=ndim), "shape is NULL")


@alias_ways
def test_a_scalar_needs_no_shape_and_no_strides(way: Any) -> None:
    """SPEC X-VALID-2"""
    t = way(Forged(None, strides=None))
    assert (t.shape, t.strides, t.nbytes) == ((), (), 4)


@pytest.mark.parametrize("shape", [(-1,), (2, -1), (-1, 2), (-(2**63),), (0, -1), (-1, -1), (1, 1, 1, 1, -5), (-4, -(2**62))], ids=str)
@ways
def test_negative_extents(way: Any, shape: tuple[int, ...]) -> None:
    """SPEC X-VALID-2"""
    refused(way, Forged(shape, data=64), "extent -")


@pytest.mark.parametrize(
    "shape",
    [(2**32, 2**32, 16), (2**63 - 1,), (2**62, 2), (2**32, 2**32), (2**31, 2**31, 2**31), (3,) * 64, (2**58,),
     (2**21, 2**21, 2**21), (2**16,) * 5],
    ids=str,
)  # fmt: skip
@ways
def test_products_that_overflow(way: Any, shape: tuple[int, ...]) -> None:
    """SPEC X-VALID-4; field report B51: (2**32, 2**32, 16) wraps to 0."""
    refused(way, Forged(shape, data=64), "64 bits")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2,), (2**62,)), ((2,), (-(2**63),)), ((2,), (2**63 - 1,)), ((3,), (2**62,)), ((2, 2), (2**57, 2**57)),
     ((2, 2), (-(2**57), -(2**57) - 1)), ((2**30,), (2**40,)), ((2,) * 5, (2**62,) * 5)],
    ids=str,
)  # fmt: skip
@ways
def test_strides_that_overflow(way: Any, shape: Any, strides: Any) -> None:
    """SPEC X-VALID-4"""
    refused(way, Forged(shape, strides=strides, data=64), "64 bits")


@pytest.mark.parametrize("byte_offset", [2**64 - 4, 2**63, 2**64 - 1, 2**63 + 8])
@pytest.mark.parametrize("device", [(1, 0), (4, 0)], ids=str)
@alias_ways
def test_a_wrapped_byte_offset(way: Any, byte_offset: int, device: Any) -> None:
    """SPEC X-VALID-6; field report B41"""
    refused(way, Forged((4,), byte_offset=byte_offset, data=2**20, device=device), "byte_offset")


@alias_ways
def test_an_address_beyond_the_address_space(way: Any) -> None:
    """SPEC X-VALID-6"""
    refused(way, Forged((4,), byte_offset=2**62, data=2**64 - 64), "address space")


@alias_ways
def test_a_handle_with_an_offset_is_no_address(way: Any) -> None:
    """SPEC X-VALID-6, X-DEV-4"""
    t = way(Forged((4,), byte_offset=2**62, data=2**64 - 64, device=(it.VULKAN, 0)))
    assert (t.handle, t.byte_offset) == (2**64 - 64, 2**62)


@pytest.mark.parametrize("code", [*range(18), 18, 19, 31, 127, 128, 255])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 80, 128, 255])
def test_only_known_widths_of_known_codes(code: int, bits: int) -> None:
    """SPEC X-VALID-7, X-DT-1"""
    for name, way in WAYS.items():
        forged = Forged((4,), (code, bits, 1))
        if bits not in WIDTHS.get(code, ()):
            refused(way, forged, "dtype")
        elif "numpy" not in name:
            t = way(forged)
            assert (t.dtype.code, t.dtype.bits) == (code, bits)


@pytest.mark.parametrize("dtype", [(it.FLOAT, 32, 0), (it.BOOL, 8, 0), (it.INT, 4, 0), (0, 0, 0), (it.FLOAT, 0, 4)], ids=str)
@ways
def test_no_lanes_or_no_bits(way: Any, dtype: Any) -> None:
    """SPEC X-VALID-7; field report B39"""
    refused(way, Forged((4,), dtype), "dtype")


@pytest.mark.parametrize("device", [0, 5, 6, 19, 20, 99, 250, -1, -(2**31), 2**31 - 1, 257])
@ways
def test_unknown_devices_are_not_taken_for_the_cpu(way: Any, device: int) -> None:
    """SPEC X-VALID-7; field report B59"""
    refused(way, Forged(device=(device, 0)), "device")


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("number", [-1, -(2**31)])
def test_negative_device_numbers(device: int, number: int) -> None:
    """SPEC X-VALID-7, X-DEV-1"""
    for way in WAYS.values():
        refused(way, Forged(device=(device, number)), "id")


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_every_known_device_is_kept_as_it_is(device: int) -> None:
    """SPEC X-DEV-5"""
    for way in list(WAYS.values())[:7]:
        assert way(Forged(device=(device, 7))).device == known((device, 7))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("device", [(1, 0), (2, 0), (4, 0), (7, 0)], ids=str)
@alias_ways
def test_no_data(way: Any, shape: Any, device: Any) -> None:
    """SPEC X-VALID-5"""
    refused(way, Forged(shape, data=0, device=device), "data is NULL")
    refused(way, Forged(shape, data=0, byte_offset=4096, device=device), "data is NULL")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1, 8, 0, 128), (0,) * 64], ids=str)
@pytest.mark.parametrize("data", [0, 64, 2**64 - 64])
@pytest.mark.parametrize("device", [(1, 0), (2, 0), (4, 0), (7, 0)], ids=str)
@alias_ways
def test_empty_tensors_with_and_without_data(way: Any, shape: Any, data: int, device: Any) -> None:
    """SPEC X-VALID-5; field report B43"""
    forged = Forged(shape, data=data, device=device)
    t = way(forged)
    assert (t.shape, t.size, t.nbytes, t.device) == (shape, 0, 0, device)
    assert t.is_contiguous("C") and t.is_contiguous("F")
    del t
    assert set(forged.deletions) <= {1}


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0,), (2**63 - 1,)), ((0, 5), (-(2**63), 2**62)), ((1,), (-(2**63),)), ((1, 4), (2**62, 1)), ((4, 1), (1, -(2**63))),
     ((2, 0, 2), (2**62,) * 3)],
    ids=str,
)  # fmt: skip
@alias_ways
def test_strides_that_reach_nothing_may_say_anything(way: Any, shape: Any, strides: Any) -> None:
    """SPEC X-VALID-3, X-EXP-2: and are gone when the tensor leaves."""
    t = way(Forged(shape, strides=strides, data=64))
    assert t.shape == shape
    capsule = Capsule.of(t, max_version=(1, 3))
    assert capsule.strides == tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
    assert t[...].shape == shape and t.permute(range(len(shape))[::-1]).shape == shape[::-1]
    assert interop.to(t, "numpy").shape == shape


def test_a_hostile_tensor_does_not_spoil_the_next() -> None:
    """SPEC X-OWN-2: what a refused tensor left in reused objects."""
    for _ in range(200):
        with pytest.raises(ExchangeError):
            interop.as_tensor(Forged((2, -1), flags=7).capsule())
        with pytest.raises(ExchangeError):
            interop.as_tensor(Forged((1,) * 64, (99, 0, 0), flags=7).capsule())
        t = interop.as_tensor(Forged((3,)).capsule())
        assert (t.shape, t.strides, t.readonly, t.padded, t.copied, t.byte_offset) == ((3,), (1,), False, False, False, 0)


@pytest.mark.parametrize(
    "make", [lambda: interop.Tensor.__new__(interop.Tensor), interop.Tensor, lambda: type("S", (interop.Tensor,), {})()], ids=range(3)
)
def test_a_tensor_over_nothing_cannot_be_made(make: Any) -> None:
    """SPEC X-VALID-7: a Tensor without memory, dtype and device would be exported."""
    with pytest.raises(TypeError):
        make()


# --- all fields at once, against a model of the rules ------------------------------------------------------------------


def around(*values: int, low: int, high: int) -> st.SearchStrategy[int]:
    near = sorted({v + d for v in values for d in (-1, 0, 1) if low <= v + d <= high})
    return st.one_of(st.sampled_from(near), st.integers(low, high))


EDGES = (0, 2**8, 2**16, 2**31, 2**32, 2**53, 2**57, 2**60, 2**62, 2**63 - 1)
extents = st.one_of(st.integers(0, 5), st.integers(1, 5), around(*EDGES, low=-2, high=2**63 - 1))
steps = st.one_of(st.integers(-8, 40), st.integers(0, 40), around(*EDGES, *(-e for e in EDGES), low=-(2**63), high=2**63 - 1))
dtypes = st.one_of(
    st.sampled_from([(c, b, 1) for c, widths in WIDTHS.items() for b in widths]),
    st.tuples(st.integers(0, 20), st.sampled_from([4, 6, 8, 16, 32, 64, 128]), st.sampled_from([0, 1, 2, 3, 4, 65535])),
)
devices = st.one_of(st.just((1, 0)), st.tuples(st.integers(-1, 20), st.sampled_from([0, 0, 1, -1, 2**31 - 1])))
offsets = st.one_of(st.just(0), st.integers(0, 64), around(2**32, 2**62, 2**63, 2**64 - 8, low=0, high=2**64 - 1))
addresses = st.one_of(st.just(2**20), st.sampled_from([0, 64, 2**47, 2**64 - 64, 2**64 - 1]))


@st.composite
def tensors(draw: Any) -> Forged:
    shape = tuple(draw(st.lists(extents, max_size=draw(st.sampled_from([2, 4, 8, 70])))))
    strides = draw(st.one_of(st.none(), st.just("compact"), st.lists(steps, min_size=len(shape), max_size=len(shape))))
    return Forged(shape, draw(dtypes), strides=strides, data=draw(addresses), device=draw(devices), byte_offset=draw(offsets),
                  version=(1, draw(st.integers(0, 5))), flags=draw(st.integers(0, 15)))  # fmt: skip


def known(device: tuple[int, int]) -> tuple[int, int]:
    """There is one CPU, whatever number a producer gives it."""
    return (1, 0) if device[0] == 1 else device


def end_of(kind: int) -> int:
    """Where addresses, or offsets into a handle, end."""
    return 2**57 if kind in HOST else 2**64 if kind in ADDRESSABLE else 2**63


def reach(shape: Any, strides: Any) -> tuple[int, int]:
    """The lowest and the highest element, counted from the first."""
    far = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if 0 not in shape else []
    return sum(f for f in far if f < 0), sum(f for f in far if f > 0)


def allowed(f: Forged) -> bool | None:
    """What SPEC X-VALID says; None where it leaves both open."""
    shape, (code, bits, lanes), (kind, number) = f.shape or (), f.dtype, f.device
    if not 0 <= f.ndim <= 64 or min(shape, default=0) < 0 or kind not in DEVICES or number < 0:
        return False
    if bits not in WIDTHS.get(code, ()) or lanes < 1 or f.byte_offset >= 2**63:
        return False
    if kind in ADDRESSABLE and f.data + f.byte_offset >= 2**64:
        return False
    # An empty tensor with absurd other extents has no bits; whether it is one, the rules do not say.
    full = math.prod(n for n in shape if n > 1) * bits * lanes < 2**63
    if 0 in shape:
        return True if full else None
    low, high = reach(shape, it.compact_strides(shape) if f.strides is None else f.strides)
    width = bits * lanes
    if not (f.data != 0 and full and low * width >= -(2**63) and high * width < 2**63):
        return False
    first = f.byte_offset + (f.data if kind in ADDRESSABLE else 0)
    return first + (low * width >> 3) >= 0 and first + (high * width + width - 1 >> 3) < end_of(kind)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(tensors())
def test_what_is_accepted_is_what_the_rules_allow(forged: Forged) -> None:
    """SPEC X-VALID-1, X-VALID-2, X-VALID-3, X-VALID-4, X-VALID-5, X-VALID-6, X-VALID-7"""
    expected = allowed(forged)
    try:
        t = TABLE.to_py(forged.loose())       # this way reads no memory, also where the address is misaligned
    except ExchangeError:
        assert not expected
        assert forged.deletions == (1,)
        return
    assert expected is not False
    assert (t.shape, t.ndim, t.size) == (forged.shape, forged.ndim, math.prod(forged.shape or ()))
    assert t.device == known(forged.device)
    assert (t.dtype.code, t.dtype.bits, t.dtype.lanes) == forged.dtype
    _, bits, lanes = forged.dtype
    padded = bits < 8 and forged.flags & it.SUBBYTE_PADDED
    assert t.nbytes == (t.size * lanes if padded else -(-t.size * bits * lanes // 8))
    assert repr(t) and t._repr_html_()
    del t
    assert forged.deletions == (1,)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(tensors(), st.data())
def test_no_view_leaves_its_tensor(forged: Forged, data: Any) -> None:
    """SPEC X-VIEW-5, X-VIEW-1: in exact arithmetic, also at the edge of 64 bits."""
    assume(allowed(forged) and (forged.dtype[1] >= 8) and 0 not in (forged.shape or ()))
    t = TABLE.to_py(forged.loose())
    key: list[Any] = []
    for n in t.shape:
        bound = st.one_of(st.none(), st.integers(-(2**63), 2**63), st.integers(-6, 6))
        step = st.one_of(st.none(), st.integers(-4, 4).filter(bool), st.sampled_from([2**62, -(2**62), 2**63 - 1, 2**64]))
        key.append(data.draw(st.one_of(st.integers(-n, n - 1), st.builds(slice, bound, bound, step))))
    shape, strides, first = [], [], 0
    for k, n, s in zip(key, t.shape, t.strides, strict=True):
        if isinstance(k, int):
            first += (k % n) * s
            continue
        chosen = range(*k.indices(n))
        shape.append(len(chosen))
        strides.append(s * chosen.step)
        first += chosen.start * s if chosen else 0
    item = t.nbytes // t.size
    try:
        v = t[tuple(key)]
    except ExchangeError:      # an offset into a handle that no 63-bit number can say
        assert t.device.type not in ADDRESSABLE and not 0 <= t.byte_offset + first * item < 2**63
        return
    assert v.shape == tuple(shape)
    if 0 in shape:
        return
    moved = (v.ptr - t.ptr if forged.device[0] in ADDRESSABLE else v.byte_offset - t.byte_offset) % 2**64
    assert moved == first * item % 2**64
    assert all(a == b for a, b, n in zip(v.strides, strides, shape, strict=True) if n > 1)
    low, high = reach(t.shape, t.strides)
    inside = reach(v.shape, v.strides)
    assert low <= first + inside[0] and first + inside[1] <= high


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(tensors(), st.sampled_from([None, (1, 0), (1, 3)]))
def test_what_leaves_is_what_came(forged: Forged, max_version: Any) -> None:
    """SPEC X-EXP-1, X-EXP-2, X-EXP-3, X-DEV-4, X-DT-5, X-OWN-3"""
    assume(allowed(forged))
    t = TABLE.to_py(forged.loose())
    try:
        capsule = Capsule.of(t, max_version=max_version)
    except ExchangeError:
        assert (max_version != (1, 3) and (t.readonly or t.padded)) or forged.ndim == 64
        return
    lanes = forged.dtype[2] if forged.dtype[1] >= 8 else 1
    extra = (lanes,) if lanes > 1 else ()
    shape = (*t.shape, *extra)
    assert (capsule.shape, capsule.device, capsule.dtype[:2]) == (shape, known(forged.device), forged.dtype[:2])
    expected = [n and s * lanes for n, s in zip(t.shape, t.strides, strict=True)] + [1] * len(extra)
    assert capsule.strides is not None or not shape
    assert 0 in shape or all(a == b for a, b, n in zip(capsule.strides or (), expected, shape, strict=True) if n > 1)
    where = (capsule.data + capsule.byte_offset) % 2**64
    assert where == (forged.data + forged.byte_offset) % 2**64 or (0 in shape and forged.device[0] in ADDRESSABLE and where == 0)
    del t
    assert forged.deletions == (0,)
    del capsule
    assert forged.deletions == (1,)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(min_size=80, max_size=80),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=64, max_size=64),
    st.integers(0, 3),
    st.booleans(),
)
def test_random_bytes_never_crash(raw: bytes, numbers: list[int], ndim: int, likely: bool) -> None:
    """SPEC X-VALID-1, X-VALID-7, X-VER-1: only the pointers are put right, and now and then what would be refused first."""
    forged = Forged([n % 7 for n in numbers], strides=numbers, ndim=64, data=64, deleter="python")
    owned = forged.loose()
    managed = it.DLManagedTensorVersioned.from_address(owned.address)
    deleter, shape, strides = managed.deleter, managed.dl_tensor.shape, managed.dl_tensor.strides
    ctypes.memmove(owned.address, raw, 80)
    managed.deleter, managed.dl_tensor.shape, managed.dl_tensor.strides = deleter, shape, strides
    if likely:
        managed.version, managed.dl_tensor.ndim = it.DLPackVersion(1, 3), ndim
        managed.dl_tensor.device, managed.dl_tensor.dtype = it.DLDevice(raw[5] % 19, 0), it.DLDataType(raw[4] % 18, 8, 1)
    try:
        t = TABLE.to_py(owned)
    except ExchangeError:
        pass
    else:
        assert repr(t) and t.nbytes >= 0 and t.size >= 0
        if t.device.type in HOST:
            with contextlib.suppress(ExchangeError):     # a dtype that NumPy lacks
                assert interop.to(t, "numpy").shape == t.shape
        del t
    assert len(forged.deleter_threads) == 1
