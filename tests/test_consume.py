"""Reading capsules and producers: names, versions, keywords, errors. Producers are forged; no array library speaks here."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from typing import Any

import pytest

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Forged, Forwarder, Producer, WithoutDevice, producer_type

LATEST = (1, 3)
KINDS = pytest.mark.parametrize("version", [None, LATEST], ids=["legacy", "versioned"])
SIGNATURES: list[tuple[str, ...]] = [
    (), ("stream",), ("max_version",), ("stream", "max_version"), ("stream", "max_version", "dl_device"),
    ("stream", "max_version", "copy"), ("dl_device", "copy"), it.ALL_KEYWORDS,
]  # fmt: skip


def fresh(forged: Forged, keywords: tuple[str, ...] = it.ALL_KEYWORDS, *, versions: Any = "negotiate", **rest: Any) -> Producer:
    """A producer of a type that nobody has seen, so that nothing is remembered of it."""
    return producer_type(keywords, versions=versions, fresh=True)(forged, **rest)


# --- capsules ---------------------------------------------------------------------------------------------------------


@KINDS
def test_a_raw_capsule_of_either_name_is_read(version: Any) -> None:
    """SPEC X-OWN-1, X-OWN-2"""
    forged = Forged((2, 3), (it.INT, 16, 1), version=version, strides=(1, 2))
    t = interop.as_tensor(forged.capsule())
    assert (t.shape, t.strides, t.dtype, t.device, t.ptr) == ((2, 3), (1, 2), "int16", (1, 0), forged.data)
    assert forged.deletions == (0,)
    del t
    assert forged.deletions == (1,)


@KINDS
def test_a_capsule_is_renamed_when_it_is_consumed(version: Any) -> None:
    """SPEC X-OWN-1"""
    capsule = Forged(version=version).capsule()
    t = interop.as_tensor(capsule)
    assert Capsule(capsule).name == ("used_dltensor" if version is None else "used_dltensor_versioned")
    del t


@KINDS
def test_a_refused_capsule_is_spent_and_freed_once(version: Any) -> None:
    """SPEC X-OWN-1, X-OWN-2"""
    forged = Forged((-1,), version=version)
    capsule = forged.capsule()
    with pytest.raises(ExchangeError):
        interop.as_tensor(capsule)
    assert Capsule(capsule).consumed and forged.deletions == (1,)
    del capsule
    assert forged.deletions == (1,)


@KINDS
def test_a_capsule_is_not_consumed_twice(version: Any) -> None:
    """SPEC X-OWN-4"""
    forged = Forged(version=version)
    capsule = forged.capsule()
    first = interop.as_tensor(capsule)
    with pytest.raises(ExchangeError, match="already consumed") as caught:
        interop.as_tensor(capsule)
    assert caught.value.remedy and forged.deletions == (0,)
    del first
    assert forged.deletions == (1,)


@pytest.mark.parametrize("name", ["dltensor_version", "DLTENSOR", "tensor", "used_", "arrow_array", "dlpack_exchange_api", "\xff", None])
def test_a_capsule_of_another_name_is_a_type_error_and_left_alone(name: str | None) -> None:
    """SPEC X-OWN-4"""
    forged = Forged()
    capsule = forged.capsule(name)
    before = Capsule(capsule).name
    with pytest.raises(TypeError, match="NULL" if name is None else "no DLPack tensor"):
        interop.as_tensor(capsule)
    assert Capsule(capsule).name == before and forged.deletions == (0,)


def test_two_capsules_of_one_producer_are_independent() -> None:
    """SPEC X-OWN-3"""
    forged = Forged()
    a, b = interop.as_tensor(Producer(forged)), interop.as_tensor(Producer(forged))
    del a
    assert forged.deletions == (1, 0) and b.ptr == forged.data


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", [0, 1, 2, 3, 4, 99, 2**32 - 1])
def test_any_minor_version_is_read(minor: int) -> None:
    """SPEC X-VER-2"""
    assert interop.as_tensor(Forged((3,), version=(1, minor)).capsule()).shape == (3,)


@pytest.mark.parametrize("bit", [3, 7, 31, 32, 63])
def test_unknown_flag_bits_are_ignored(bit: int) -> None:
    """SPEC X-VER-2"""
    t = interop.as_tensor(Forged((3,), version=(1, 9), flags=1 << bit).capsule())
    assert (t.readonly, t.copied, t.padded) == (False, False, False)


@pytest.mark.parametrize("version", [(0, 0), (0, 8), (2, 0), (3, 3), (2**32 - 1, 0)])
def test_another_major_version_is_refused_unread(version: tuple[int, int]) -> None:
    """SPEC X-VER-1"""
    forged = Forged((4,), version=version)
    capsule = forged.capsule()
    # An address that nobody can read: looking behind the version would crash.
    it.DLManagedTensorVersioned.from_address(Capsule(capsule).address).dl_tensor.shape = 8
    with pytest.raises(ExchangeError, match=f"{version[0]}\\.{version[1]}"):
        interop.as_tensor(capsule)
    assert forged.deletions == (1,)


# --- which keywords are sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", SIGNATURES, ids=str)
@pytest.mark.parametrize("style", ["keyword", "positional"])
def test_every_keyword_subset_is_served(keywords: tuple[str, ...], style: Any) -> None:
    """SPEC X-KW-2"""
    forged = Forged((5,))
    producer = producer_type(keywords, style=style, fresh=True)(forged)
    t = interop.as_tensor(producer)
    assert (t.shape, t.ptr) == ((5,), forged.data)
    assert producer.calls == [{"max_version": LATEST} if "max_version" in keywords else {}]
    del t
    assert forged.deletions == (1,)


def test_only_the_version_is_sent_where_nothing_else_is_needed() -> None:
    """SPEC X-KW-1"""
    producer = producer_type((), open_ended=True, fresh=True)(Forged())
    interop.as_tensor(producer)
    assert producer.calls == [{"max_version": LATEST}] and producer.device_calls == 1


@pytest.mark.parametrize("versions", ["legacy", "versioned"])
@pytest.mark.parametrize("keywords", [(), it.ALL_KEYWORDS], ids=str)
def test_a_producer_that_ignores_the_version_is_read(versions: Any, keywords: tuple[str, ...]) -> None:
    """SPEC X-VER-2; field report B03: `max_version` is taken and not looked at."""
    forged = Forged((2,), flags=it.READ_ONLY)
    t = interop.as_tensor(fresh(forged, keywords, versions=versions))
    assert t.shape == (2,) and t.readonly is (versions == "versioned")


def test_a_wrapper_around_a_limited_producer_is_served() -> None:
    """SPEC X-KW-2: the refusal comes from one level further in."""
    inner = fresh(Forged((2,)), ("stream",))
    assert interop.as_tensor(Forwarder(inner)).shape == (2,)
    assert inner.calls == [{}]


class InC:
    """``__dlpack__`` is a C function: its argument parser leaves no frame in the traceback, and neither does its body."""

    raise_error = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_char_p)(("PyErr_SetString", ctypes.pythonapi))

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), 0

    @property
    def __dlpack__(self) -> Any:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        # A ctypes function takes keywords and does not look at them; a slot wrapper refuses them.
        return functools.partial(self.raise_error, TypeError, answer) if isinstance(answer, bytes) else iter([answer]).__next__

    def __dlpack_device__(self) -> Any:
        return (1, 0)


@pytest.mark.parametrize(
    "text",
    [
        b"P.__dlpack__() takes no keyword arguments",
        b"__dlpack__(): incompatible function arguments. The following argument types are supported:\n    1. (self: P) -> capsule",
        b"__dlpack__() takes exactly one argument (2 given)",
        b"'max_version' is an invalid keyword argument for __dlpack__()",
    ],
)
def test_a_parser_in_c_that_refuses_keywords_is_asked_again(text: bytes) -> None:
    """SPEC X-KW-2"""
    forged = Forged((3,))
    producer = type("InC", (InC,), {})(text, forged.capsule())
    assert interop.as_tensor(producer).shape == (3,)
    assert producer.asked == 2


@pytest.mark.parametrize("copy", [None, False])
def test_a_type_error_in_the_body_of_a_c_producer_is_passed_on(copy: Any) -> None:
    """SPEC X-KW-3"""
    producer = type("InC", (InC,), {})(b"sparse tensors have no memory to share")
    with pytest.raises(TypeError, match=r"^sparse tensors have no memory to share$"):
        interop.as_tensor(producer, copy=copy)


class Spy:
    """Refuses what `refused` holds, the way Python does, and notes every call, refused or not."""

    def __init__(self, log: list[set[str]], refused: tuple[str, ...] = (), answer: Any = None, device: tuple[int, int] = (1, 0)) -> None:
        self.log, self.refused, self.device = log, refused, device
        self.answer = Forged(device=device).capsule if answer is None else answer

    def __dlpack__(self, **given: Any) -> Any:
        self.log.append(set(given))
        for name in given:
            if name in self.refused:
                raise TypeError(f"Spy.__dlpack__() got an unexpected keyword argument '{name}'")
        return self.answer()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_what_a_type_refuses_is_remembered_for_the_type() -> None:
    """SPEC X-KW-2"""
    log: list[set[str]] = []
    cls = type("Once", (Spy,), {})
    for _ in range(3):
        interop.as_tensor(cls(log, ("max_version",)))
    assert log == [{"max_version"}, set(), set(), set()]


def test_what_one_type_refuses_is_asked_of_another() -> None:
    """SPEC X-KW-2"""
    log: list[set[str]] = []
    interop.as_tensor(type("A", (Spy,), {})(log, ("max_version",)))
    interop.as_tensor(type("B", (Spy,), {})(log))
    assert log == [{"max_version"}, set(), {"max_version"}]


@pytest.mark.parametrize("device", [(1, 0), (2, 0)], ids=["cpu", "cuda"])
def test_nothing_is_remembered_of_a_call_that_failed(device: tuple[int, int]) -> None:
    """SPEC X-KW-2"""
    log: list[set[str]] = []
    cls = type("Failing", (Spy,), {})

    def fail() -> None:
        raise BufferError("not today")

    with pytest.raises(BufferError, match="not today"):
        interop.as_tensor(cls(log, ("max_version",), fail, device))
    interop.as_tensor(cls(log, (), None, device))
    assert "max_version" in log[0] and "max_version" not in log[1] and log[2] == log[0] and len(log) == 3


def test_what_is_remembered_is_forgotten_when_the_type_changes() -> None:
    """SPEC X-KW-8"""
    log: list[set[str]] = []
    cls = type("Changing", (Spy,), {})
    interop.as_tensor(cls(log, ("max_version",)))
    cls.__dlpack__ = lambda self, **given: Spy.__dlpack__(self, **given)  # type: ignore[method-assign]
    interop.as_tensor(cls(log))
    assert log == [{"max_version"}, set(), {"max_version"}]


def test_a_type_that_was_read_can_still_die() -> None:
    """SPEC X-KW-8"""
    cls = producer_type(fresh=True)
    interop.as_tensor(cls(Forged()))
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


# --- errors of the producer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TypeError, "unsupported operand type(s) for +: 'int' and 'str'"), (TypeError, ""), (TypeError, "the keyword 'max_version' is old"),
        (TypeError, "g() got an unexpected keyword argument 'other'"), (BufferError, "no"), (ValueError, "no"), (RuntimeError, "no"),
        (AttributeError, "no"), (KeyError, "no"), (MemoryError, ""), (KeyboardInterrupt, ""), (ExchangeError, "no"),
    ],
)  # fmt: skip
def test_an_error_inside_the_producer_is_passed_on_and_it_is_called_once(kind: type[BaseException], text: str, copy: Any) -> None:
    """SPEC X-KW-3"""
    error = kind(text)
    producer = fresh(Forged(), error=error)
    with pytest.raises(kind) as caught:
        interop.as_tensor(producer, copy=copy)
    assert caught.value is error and len(producer.calls) == 1


@pytest.mark.parametrize("value", [None, 3, b"dltensor", object(), [1], (1, 2)], ids=repr)
def test_what_comes_back_must_be_a_capsule(value: object) -> None:
    """SPEC X-KW-5"""
    producer = fresh(Forged(), returns=value)
    with pytest.raises(TypeError, match=f"returned {type(value).__name__}, not a capsule"):
        interop.as_tensor(producer)
    assert len(producer.calls) == 1


def test_a_producer_that_hands_out_a_used_capsule_is_refused() -> None:
    """SPEC X-OWN-4; field report B29"""
    forged = Forged()
    capsule = forged.capsule()
    first = interop.as_tensor(capsule)
    with pytest.raises(ExchangeError, match="already consumed"):
        interop.as_tensor(fresh(forged, returns=capsule))
    assert first.ptr == forged.data and forged.deletions == (0,)


@pytest.mark.parametrize("x", [object(), [1, 2, 3], 3, "text", None, Producer, it.WithoutDevice], ids=repr)
def test_what_shares_no_memory_is_a_type_error_that_says_so(x: Any) -> None:
    """SPEC X-KW-7; field report B12"""
    with pytest.raises(TypeError, match="shares no memory"):
        interop.as_tensor(x)


@pytest.mark.parametrize("x", [WithoutDevice(Forged()), Forged().capsule(), b"abc", object()], ids=lambda x: type(x).__name__)
def test_from_dlpack_takes_dlpack_objects_only(x: Any) -> None:
    """SPEC X-KW-10"""
    with pytest.raises(TypeError, match="__dlpack_device__"):
        interop.from_dlpack(x)


# --- what the capsule says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", range(8))
def test_flags_are_kept(flags: int) -> None:
    """SPEC X-RO-1, X-DT-6, X-GUARD-4"""
    t = interop.as_tensor(Forged((3,), (it.INT, 4, 1), flags=flags).capsule())
    assert (t.readonly, t.copied, t.padded) == (bool(flags & 1), bool(flags & 2), bool(flags & 4))
    assert t.nbytes == (3 if flags & it.SUBBYTE_PADDED else 2)


def test_a_legacy_capsule_is_writable() -> None:
    """SPEC X-RO-5; field report B02"""
    forged = Forged((3,), (it.UINT, 8, 1), version=None)
    t = interop.as_tensor(fresh(forged, ()))
    assert not t.readonly
    memoryview(t)[1] = 9
    assert bytes(forged.memory) == b"\0\x09\0"


@KINDS
def test_the_byte_offset_is_honoured(version: Any) -> None:
    """SPEC X-VALID-6; field reports B40, B41"""
    forged = Forged((2,), (it.UINT, 8, 1), data=b"abcdef", byte_offset=3, version=version)
    t = interop.as_tensor(fresh(forged))
    assert bytes(t) == b"de" and t.ptr == forged.data + 3


@KINDS
def test_null_strides_mean_row_major(version: Any) -> None:
    """SPEC X-VALID-3; field report B45"""
    t = interop.as_tensor(fresh(Forged((2, 3, 4), strides=None, version=version)))
    assert t.strides == (12, 4, 1)


def test_elements_that_share_an_address_are_read_only() -> None:
    """SPEC X-RO-6; field report B52"""
    assert interop.as_tensor(fresh(Forged((3, 4), strides=(0, 1)))).readonly
    assert not interop.as_tensor(fresh(Forged((1, 4), strides=(0, 1)))).readonly
