"""interop.to: copy=, readonly= and stream=, and memory that a framework cannot hold as it lies: refused, or repacked and seen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support import FRAMEWORKS, address, aligned, forge, jax, jnp, make, ml_dtypes, need, peek, producer, torch, writable

import interop
from interop import ExchangeError, copy_guard
from interop.testing import IS_COPIED, Forged, Forwarder, Producer

HOLDS_READONLY = {"interop", "numpy", "jax"}  # torch and tvm_ffi have no flag for it: what they make can be written to


# ---- the truth table of copy= and readonly= ----
def sources() -> dict[str, Any]:
    a = aligned(np.arange(12, dtype="f4"))
    frozen = a.view()
    frozen.flags.writeable = False
    made = {name: make(name, a) for name in FRAMEWORKS}
    return {**made, "numpy-ro": frozen, "interop-ro": interop.as_tensor(a, readonly=True), "capsule-ro": Producer(Forged((12,), flags=1))}


def expected(source: str, target: str, copy: Any, readonly: Any) -> str:
    """What DESIGN section 3 says: "alias", "copy" or "refuse"."""
    frozen = source.endswith("-ro") or source == "jax"
    if readonly is False and target == "jax":
        return "refuse"
    if copy is True:
        return "copy"
    if frozen and (readonly is False or (readonly is None and target not in HOLDS_READONLY)):
        return "refuse" if copy is False else "copy"
    return "alias"


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", [*FRAMEWORKS, "numpy-ro", "interop-ro", "capsule-ro"])
def test_copy_and_readonly_do_what_the_table_says(source: str, target: str) -> None:
    """SPEC X-RO-3, X-RO-4, X-TO-4, X-TO-5, X-TO-6"""
    wrong = []
    for copy, readonly in itertools.product((None, True, False), repeat=2):
        x = sources()[source]
        before = interop.as_tensor(x)
        at = before.ptr
        with copy_guard("allow") as routes:
            try:
                y = interop.to(x, target, copy=copy, readonly=readonly)
            except ExchangeError as e:
                got, y = "refuse", None
                assert e.reason  # noqa: PT017
            else:
                got = "alias" if address(y) == at else "copy"
        if got != expected(source, target, copy, readonly) or len(routes) != (got == "copy"):
            wrong.append((f"copy={copy} readonly={readonly}", got, len(routes), "wanted", expected(source, target, copy, readonly)))
            continue
        may_write = None if y is None else writable(y)
        if may_write is not None and y is not x:
            frozen = got == "alias" and (source.endswith("-ro") or source == "jax")
            assert may_write == (not frozen and readonly is not True), (copy, readonly)
        assert y is None or peek(y) == peek(before)
    assert not wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int8"])
def test_jax_arrays_are_read_only_on_every_path(dtype: str) -> None:
    """SPEC X-RO-5: whatever protocol their dtype makes interop read them by."""
    j = jnp.ones(16, dtype)
    assert interop.as_tensor(j).readonly and interop.as_tensor(j)[1:].readonly
    assert not interop.to(j, "numpy").flags.writeable
    assert interop.to(j, "interop").readonly and interop.as_tensor(j, device="cpu").readonly
    with pytest.raises(ExchangeError):
        interop.to(j, "torch", copy=False)
    t = interop.to(j, "torch")
    assert address(t) != address(j)
    assert address(interop.to(j, "torch", readonly=True)) == address(j)


def test_refusals_give_a_short_reason_and_name_both_remedies() -> None:
    """SPEC X-TO-4: job 2."""
    j = jnp.ones(4)
    with pytest.raises(ExchangeError) as e:
        interop.to(j, "torch", copy=False)
    assert "read-only" in e.value.reason and "torch" in e.value.reason
    assert e.value.remedy and "readonly=True" in e.value.remedy and "copy=None" in e.value.remedy
    with pytest.raises(ExchangeError, match="jax"):
        interop.to(np.ones(4), "jax", readonly=False)


def test_a_legacy_capsule_is_writable() -> None:
    """SPEC X-RO-5"""
    a = aligned(np.arange(4.0))
    assert interop.to(Forwarder(a, max_version=None), "numpy").flags.writeable


def test_a_tensor_that_was_copied_once_obeys_copy_like_any_other() -> None:
    """SPEC X-TO-4, X-TO-6: its flag tells of the past, not of this call."""
    t = interop.as_tensor(aligned(np.arange(6, dtype="f4")), copy=True)
    for words in ({}, {"device": "cpu"}):
        for target in FRAMEWORKS:
            assert address(interop.to(t, target, copy=True, **words)) != t.ptr
        assert interop.as_tensor(t, copy=True, **words).ptr != t.ptr and interop.as_tensor(t, copy=False, **words) is t
        for target in ("torch", "jax"):
            with pytest.raises(ExchangeError, match="negative"):
                interop.to(t[::-1], target, copy=False, **words)


@pytest.mark.parametrize("words", [{}, {"device": "cpu"}], ids=["", "device"])
def test_what_a_producer_copied_for_this_call_is_not_copied_again(words: dict[str, Any]) -> None:
    """SPEC X-TO-6: "once"; and copy=False refuses what arrives as a copy, whatever asks for it."""
    for target in ("numpy", "interop", "torch"):
        p = Producer(Forged((16,), flags=IS_COPIED))
        assert address(interop.to(p, target, copy=True, **words)) == p.forged.data
        with pytest.raises(ExchangeError, match="cop"):
            interop.to(p, target, copy=False, **words)
    assert interop.as_tensor(p, copy=True, **words).ptr == p.forged.data


# ---- memory that lies otherwise ----
LAYOUTS = {
    "reversed": lambda: aligned(np.arange(6, dtype="f4"))[::-1], "gaps": lambda: aligned(np.arange(12, dtype="f4").reshape(3, 4))[:, ::2],
    "rows": lambda: aligned(np.arange(12, dtype="f4").reshape(3, 4))[:, :3], "flipped": lambda: aligned(np.arange(12,
    dtype="f4").reshape(3, 4))[::-1, ::-1],
    "unaligned": lambda: aligned(np.arange(6, dtype="f4"), off=2), "aligned to 4": lambda: aligned(np.arange(6, dtype="f4"), off=4),
    "offset": lambda: aligned(np.arange(6, dtype="f4"))[1:], "column-major": lambda: aligned(np.arange(12, dtype="f4").reshape(3, 4)).T,
    "permuted": lambda: aligned(np.arange(24, dtype="f4").reshape(2, 3, 4)).transpose(1, 0, 2),
    "broadcast": lambda: np.broadcast_to(aligned(np.arange(3, dtype="f4")), (4, 3)),
    "one": lambda: aligned(np.arange(6, dtype="f4"))[:1][::-1], "empty": lambda: aligned(np.arange(6, dtype="f4"))[:0][::-1],
}  # fmt: skip
#: target -> layouts that it cannot hold in place.
CANNOT = {
    "interop": {"unaligned"}, "numpy": set(), "torch": {"reversed", "flipped", "unaligned", "broadcast"},
    "jax": {"reversed", "flipped", "gaps", "rows", "unaligned", "aligned to 4", "offset", "broadcast"},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", CANNOT)
def test_memory_is_shared_as_it_lies_or_refused_or_repacked_and_seen(target: str, layout: str) -> None:
    """SPEC X-TO-4, X-TO-5, X-GUARD-1"""
    a = LAYOUTS[layout]()
    for x in (a, interop.to(a, "numpy").view(type("Kin", (np.ndarray,), {})), Producer2(a)):
        if layout not in CANNOT[target]:
            y = interop.to(x, target, copy=False)
            assert a.size == 0 or address(y) == a.ctypes.data
        else:
            with pytest.raises(ExchangeError) as e:
                interop.to(x, target, copy=False)
            assert e.value.remedy and len(e.value.reason.splitlines()[0]) < 200
            with copy_guard("allow") as routes:
                y = interop.to(x, target)
            assert len(routes) == 1 and routes[0].copied_bytes == a.nbytes and routes[0].refused[0][1] == e.value.reason
            assert address(y) != a.ctypes.data and address(y) % 64 == 0
            assert target != "interop" or y.copied
        assert np.array_equal(np.asarray(interop.as_tensor(y)), a) and tuple(y.shape) == a.shape


class Producer2:
    """A NumPy array that shows nothing but DLPack, so that it is read as a stranger's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **words: Any) -> Any:
        return self.array.__dlpack__(**words)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_reversed_memory_never_reaches_torch() -> None:
    """SPEC X-TO-5: torch 2.13 ends the process on negative strides; so does its own from_dlpack."""
    a = aligned(np.arange(24.0).reshape(2, 3, 4))
    for view in (a[::-1], a[:, ::-1], a[..., ::-1], a[::-1, ::-1, ::-1], a[..., :1][::-1], a[:1][::-1]):
        for x in (view, interop.as_tensor(view), memoryview(view)):
            assert np.array_equal(interop.to(x, "torch").numpy(), view)


def test_torch_tensors_with_gaps_reach_jax_by_a_copy_only() -> None:
    """SPEC X-TO-5"""
    t = torch.arange(24.0).reshape(4, 6)
    for view in (t[:, ::2], t[1:, 1:], t.expand(2, 4, 6), t[:, :1]):
        with pytest.raises(ExchangeError):
            interop.to(view, "jax", copy=False)
        assert np.array_equal(np.asarray(interop.to(view, "jax")), view.numpy())


# ---- dtypes arrive as they left ----
PLAIN = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_every_plain_dtype_arrives_unchanged(target: str, dtype: str) -> None:
    """SPEC X-TO-10: also 64-bit types into jax without x64."""
    a = aligned([0, 1, 1, 0, 1], dtype)
    y = interop.to(a, target, copy=False)
    t = interop.as_tensor(y)
    assert t.dtype == dtype and t.ptr == a.ctypes.data
    assert target == "tvm_ffi" or str(y.dtype).removeprefix("torch.") == dtype  # tvm_ffi has no word for complex types
    assert target != "jax" or not jax.config.jax_enable_x64


EXOTIC = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.mark.parametrize("dtype", EXOTIC)
@pytest.mark.parametrize(("source", "target"), [(s, t) for s in ("torch", "jax", "numpy", "interop") for t in FRAMEWORKS])
def test_small_floats_keep_their_type_and_bytes(source: str, target: str, dtype: str) -> None:
    """SPEC X-DT-4, X-TO-10"""
    raw = aligned(np.arange(64, dtype="u1"))
    a = raw.view(getattr(ml_dtypes, dtype))
    x = {"torch": lambda: torch.from_numpy(raw).view(getattr(torch, dtype)), "jax": lambda: jnp.asarray(a), "numpy": lambda: a,
         "interop": lambda: interop.as_tensor(a)}[source]()  # fmt: skip
    y = interop.to(x, target, readonly=True)
    assert interop.as_tensor(y).dtype == dtype and peek(y) == raw.tobytes() and address(y) == address(x)


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2"])
def test_types_of_torch_alone_reach_what_holds_them_and_are_refused_elsewhere(dtype: str) -> None:
    """SPEC X-TO-11"""
    x = torch.arange(64, dtype=torch.uint8).view(getattr(torch, dtype))
    t = interop.as_tensor(x)
    back = interop.to(t, "torch")
    assert back.dtype is x.dtype and back.shape == x.shape and back.data_ptr() == x.data_ptr()
    for target in ("numpy", "jax"):
        for copy in (None, False):
            with pytest.raises(ExchangeError) as e:
                interop.to(x, target, copy=copy)
            assert len(str(e.value).splitlines()[0]) < 300


@pytest.mark.parametrize("flags", [0, 4], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "opaque64", "int4x2", "int1"]
)
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_what_a_framework_has_no_type_for_is_refused_not_reinterpreted(target: str, dtype: str, flags: int) -> None:
    """SPEC X-TO-11"""
    t = forge((8,), dtype, flags=flags)
    try:
        y = interop.to(t, target)
    except ExchangeError as e:
        assert "\n" not in str(e) or len(str(e).splitlines()[0]) < 300  # noqa: PT017
        return
    assert interop.as_tensor(y).dtype.bits == t.dtype.bits and interop.as_tensor(y).nbytes == t.nbytes


def test_the_padded_flag_means_nothing_for_whole_bytes() -> None:
    """SPEC X-DT-6: DLPack gives it a meaning for sub-byte types only."""
    t = forge((8,), "float32", flags=4)
    assert not t.padded
    for target in FRAMEWORKS:
        assert address(interop.to(t, target, copy=False)) == t.ptr
    assert np.from_dlpack(Forwarder(t, max_version=None)).shape == (8,)


def test_vectors_arrive_as_a_trailing_axis() -> None:
    """SPEC X-DT-5"""
    t = forge((8,), "float32x4")
    for target in ("numpy", "torch", "jax"):
        assert tuple(interop.to(t, target).shape) == (8, 4)


# ---- other memory ----
@pytest.mark.parametrize("device", [(2, 0), (4, 0), (7, 0), (10, 0), (12, 0), (14, 0)], ids=str)
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_memory_elsewhere_never_comes_to_the_host_by_a_frameworks_name(target: str, device: Any) -> None:
    """SPEC X-TO-3"""
    p = producer(device=device)
    for copy in (None, False, True):
        try:
            y = interop.to(p, target, copy=copy)
        except ExchangeError as e:
            assert interop.Device(device).name in str(e).lower()  # noqa: PT017
        else:  # torch wraps what it has no driver for, too
            assert target == "torch" and copy is not True and y.device.type != "cpu" and y.data_ptr() == p.forged.data
    assert all("dl_device" not in call for call in p.calls)


def test_the_refusal_to_cross_names_the_way_to_cross() -> None:
    """SPEC X-TO-3"""
    with pytest.raises(ExchangeError) as e:
        interop.to(producer(), "numpy")
    assert e.value.remedy and "device='cpu'" in e.value.remedy
    with pytest.raises(ExchangeError) as e:
        interop.to(producer(device=(7, 0)), "numpy")
    assert e.value.remedy and "map" in e.value.remedy


class Crossing(Producer):
    """A CUDA producer that brings its data to the host when it is asked to, as torch and cupy do."""

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        self.calls.append({"dl_device": dl_device, "copy": copy, "stream": stream})
        return self.there.capsule() if dl_device == (1, 0) else self.forged.capsule()


def crossing() -> Any:
    p = Crossing(Forged((4,), device=(2, 0), data=0x7F0000001000))
    p.there = Forged((4,), flags=IS_COPIED)
    return p


@pytest.mark.parametrize("ask", [lambda p: interop.to(p, "numpy", device="cpu"), lambda p: interop.to(p, "cpu"),
    lambda p: interop.as_tensor(p, device="cpu"),
                                 lambda p: interop.to(p, "torch", device=interop.Device("cpu")), lambda p: interop.from_dlpack(p,
                                 device=(1, 0)),
                                 lambda p: interop.to(p, like=interop.as_tensor(np.zeros(1)))])  # fmt: skip
def test_device_cpu_asks_the_producer_to_cross_and_the_copy_is_seen(ask: Any) -> None:
    """SPEC X-TO-3, X-GUARD-1"""
    p = crossing()
    with copy_guard("allow") as routes:
        y = ask(p)
    assert tuple(y.shape) == (4,) and address(y) == p.there.data
    assert [call["dl_device"] for call in p.calls] == [(1, 0)] and len(routes) == 1
    assert "cuda:0" in routes[0].refused[0][1] and "cpu" in routes[0].refused[0][1]


def test_crossing_with_copy_false_is_refused_before_the_producer_is_asked() -> None:
    """SPEC X-TO-4"""
    p = crossing()
    for ask in (lambda: interop.to(p, "numpy", device="cpu", copy=False), lambda: interop.as_tensor(p, device="cpu", copy=False)):
        with pytest.raises(ExchangeError, match="copy"):
            ask()
    assert not p.calls


def test_a_handle_travels_to_a_library_that_takes_any_device() -> None:
    """SPEC X-DEV-5"""
    t = forge((4, 6), device=(7, 1), byte_offset=256)
    y = interop.to(t[1:], need("tvm_ffi"))
    back = interop.as_tensor(y)
    assert (back.device, back.shape, back.handle + back.byte_offset) == ("vulkan:1", (3, 6), t.handle + 256 + 24)


@pytest.mark.parametrize("device", [(3, 0), (11, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_pinned_memory_is_host_memory_to_every_framework(target: str, device: Any) -> None:
    """SPEC X-DEV-3, X-KW-6"""
    t = forge((4,), device=device, data=np.arange(4, dtype="f4").tobytes(), owner=None)
    y = interop.to(t, target, copy=False)
    assert address(y) == t.ptr and np.asarray(interop.as_tensor(y)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_a_device_that_is_not_there_is_refused_in_one_line(target: str) -> None:
    """SPEC X-TO-11"""
    if torch.cuda.is_available():
        pytest.skip("it is there")
    for x in (np.ones(3), torch.ones(3), jnp.ones(3)):
        with pytest.raises(ExchangeError) as e:
            interop.to(x, target, device="cuda:0")
        assert "cuda:0" in str(e.value) and "\n" not in str(e.value)


# ---- stream= on memory without streams ----
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_host_memory_takes_no_stream_but_none_and_minus_one(source: str, target: str) -> None:
    """SPEC X-STREAM-2: a stream that means nothing is refused for every pair, not ignored."""
    x = make(source, aligned(np.arange(4, dtype="f4")))
    for stream in (None, -1, np.int64(-1)):
        assert interop.to(x, target, stream=stream) is not None
    wrong = []
    for stream, error in (
        (0, ExchangeError),
        (1, ExchangeError),
        (0x5000, ExchangeError),
        ("x", TypeError),
        (1.5, TypeError),
        (True, TypeError),
        (-2, ValueError),
    ):
        try:
            interop.to(x, target, stream=stream)
        except error:
            continue
        except Exception as e:
            wrong.append((stream, e))
        else:
            wrong.append((stream, "accepted"))
    assert not wrong
