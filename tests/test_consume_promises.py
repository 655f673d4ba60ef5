"""What a consumer asks of a producer and must not forget: copy, device, stream. Producers are forged; no array library speaks here."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from support import run

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Forged, Producer, WithoutDevice, producer_type

LATEST = (1, 3)
SIGNATURES: list[tuple[str, ...]] = [
    (), ("stream",), ("max_version",), ("stream", "max_version"), ("stream", "max_version", "dl_device"),
    ("stream", "max_version", "copy"), ("dl_device", "copy"), it.ALL_KEYWORDS,
]  # fmt: skip
WITHOUT_STREAMS = [(it.CPU, 0), (it.CUDA_HOST, 0), (it.OPENCL, 0), (it.VULKAN, 0), (it.ONEAPI, 0), (it.METAL, 0)]


def fresh(forged: Forged, keywords: tuple[str, ...] = it.ALL_KEYWORDS, **rest: Any) -> Producer:
    """A producer of a type that nobody has seen, so that nothing is remembered of it."""
    return producer_type(keywords, fresh=True)(forged, **rest)


# --- promises: copy and dl_device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [s for s in SIGNATURES if "copy" not in s], ids=str)
def test_copy_false_is_never_dropped(keywords: tuple[str, ...]) -> None:
    """SPEC X-KW-4"""
    for _ in range(2):      # also not once the type is known
        producer = producer_type(keywords)(forged := Forged())
        with pytest.raises(ExchangeError, match="copy=False"):
            interop.as_tensor(producer, copy=False)
        assert producer.calls == [] and forged.made == 0


@pytest.mark.parametrize("keywords", [s for s in SIGNATURES if "copy" in s], ids=str)
def test_copy_false_reaches_the_producer(keywords: tuple[str, ...]) -> None:
    """SPEC X-KW-1, X-KW-4"""
    producer = fresh(forged := Forged(), keywords)
    assert interop.as_tensor(producer, copy=False).ptr == forged.data
    assert len(producer.calls) == 1 and producer.calls[0]["copy"] is False


def test_copy_false_refuses_what_was_copied_all_the_same() -> None:
    """SPEC X-KW-4, X-OWN-2"""
    forged = Forged(flags=it.IS_COPIED)
    with pytest.raises(ExchangeError, match="copy=False"):
        interop.as_tensor(fresh(forged), copy=False)
    assert forged.deletions == (1,)


@pytest.mark.parametrize("keywords", SIGNATURES, ids=str)
def test_copy_true_gives_fresh_memory_from_any_producer(keywords: tuple[str, ...]) -> None:
    """SPEC X-TO-6, X-GUARD-4; field report B08"""
    forged = Forged((3,), (it.UINT, 8, 1), data=b"abc", flags=it.READ_ONLY)
    t = interop.as_tensor(fresh(forged, keywords), copy=True)
    assert t.ptr != forged.data and t.copied and not t.readonly and bytes(t) == b"abc"
    assert forged.deletions == (1,)


def test_copy_true_is_content_with_the_producers_copy() -> None:
    """SPEC X-TO-6: once."""
    forged = Forged((3,), flags=it.IS_COPIED)
    t = interop.as_tensor(fresh(forged), copy=True)
    assert t.ptr == forged.data and t.copied


@pytest.mark.parametrize("keywords", [(), ("stream", "max_version"), ("stream", "max_version", "copy")], ids=str)
def test_a_device_is_never_dropped(keywords: tuple[str, ...]) -> None:
    """SPEC X-KW-4"""
    producer = fresh(forged := Forged(device=(it.CUDA, 0)), keywords)
    with pytest.raises(ExchangeError, match="dl_device"):
        interop.as_tensor(producer, device="cpu")
    assert producer.calls == [] and forged.made == 0


@pytest.mark.parametrize("arrives", [it.CPU, it.CUDA_HOST, it.ROCM_HOST, it.CUDA_MANAGED])
def test_who_asks_for_the_cpu_gets_any_memory_that_the_host_reads(arrives: int) -> None:
    """SPEC X-KW-1, X-KW-6; field report B10"""
    producer = fresh(Forged(device=(arrives, 0)), device=(it.CUDA, 0))
    t = interop.as_tensor(producer, device="cpu")
    assert t.device == (arrives, 0) and t.copied
    assert producer.calls == [{"max_version": LATEST, "dl_device": (1, 0)}]       # no stream: it has none on the CPU


@pytest.mark.parametrize("arrives", [(it.CUDA, 0), (it.OPENCL, 0), (it.ROCM, 0)], ids=str)
def test_a_producer_that_does_not_move_is_caught(arrives: tuple[int, int]) -> None:
    """SPEC X-KW-6, X-OWN-2"""
    forged = Forged(device=arrives)
    with pytest.raises(ExchangeError):
        interop.as_tensor(fresh(forged, device=(it.CUDA, 0)), device="cpu")
    assert forged.deletions == (1,)


def test_a_device_that_is_the_producers_own_is_not_sent() -> None:
    """SPEC X-KW-1"""
    producer = fresh(Forged(), it.ALL_KEYWORDS)
    interop.as_tensor(producer, device="cpu")
    assert producer.calls == [{"max_version": LATEST}]


def test_another_device_with_copy_false_is_refused_before_asking() -> None:
    """SPEC X-KW-4, X-TO-4"""
    producer = fresh(Forged(device=(it.CUDA, 0)))
    with pytest.raises(ExchangeError, match="copy=False"):
        interop.as_tensor(producer, device="cpu", copy=False)
    assert producer.calls == []


# --- __dlpack_device__ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "arrives"),
    [((1, 0), (2, 0)), ((2, 0), (1, 0)), ((2, 0), (2, 1)), ((4, 0), (7, 0)), ((4, 1), (4, 0)), ((2, 0), (13, 0)), ((1, 0), (4, 0))],
    ids=str,
)
def test_a_producer_that_lies_about_its_device_is_refused(says: Any, arrives: tuple[int, int]) -> None:
    """SPEC X-KW-6, X-OWN-2"""
    forged = Forged(device=arrives)
    with pytest.raises(ExchangeError, match="capsule"):
        interop.as_tensor(fresh(forged, device=says))
    assert forged.deletions == (1,)


@pytest.mark.parametrize("says", [1, 3, 11, 13])
@pytest.mark.parametrize("arrives", [1, 3, 11, 13])
def test_kinds_of_host_memory_stand_for_each_other(says: int, arrives: int) -> None:
    """SPEC X-KW-6; field report B54"""
    assert interop.as_tensor(fresh(Forged(device=(arrives, 0)), device=(says, 0))).device == (arrives, 0)


def test_without_a_device_question_the_capsule_decides() -> None:
    """SPEC X-KW-7"""
    assert interop.as_tensor(WithoutDevice(Forged(device=(it.VULKAN, 3)))).device == "vulkan:3"


class Kind(enum.IntEnum):
    CPU = 1
    CUDA = 2


class Indexed(enum.Enum):
    """As tvm_ffi or torch give it: no int, but `__index__`."""

    CPU = 1

    def __index__(self) -> int:
        return int(self.value)


@pytest.mark.parametrize("says", [(Kind.CPU, 0), (Indexed.CPU, 0), [1, 0], (1, None), (Kind.CPU, None), (1, 7)], ids=repr)
def test_odd_spellings_of_the_cpu_are_understood(says: Any) -> None:
    """SPEC X-DEV-2; paddle gives (IntEnum, None)"""
    assert interop.as_tensor(fresh(Forged(), device=says)).device == "cpu"


@pytest.mark.parametrize(
    "says",
    [None, 1, "cpu", (), (1,), (1, 0, 0), (1.0, 0), ("cpu", 0), (0, 0), (5, 0), (6, 0), (19, 0), (-1, 0), (250, 0), (2**40, 0), (2, None),
     (2, -1), (2, 2**31), (2, 2**64), (None, None), (True, 0), object()],
    ids=repr,
)  # fmt: skip
def test_a_device_that_is_none_is_refused_before_a_capsule_is_made(says: Any) -> None:
    """SPEC X-DEV-2, X-VALID-7"""
    producer = fresh(forged := Forged(), device=says)
    with pytest.raises((TypeError, ValueError, ExchangeError)):
        interop.as_tensor(producer)
    assert producer.calls == [] and forged.made == 0


@pytest.mark.parametrize("error", [AttributeError("inside"), TypeError("inside"), RuntimeError("inside"), BufferError("inside")], ids=repr)
def test_an_error_inside_the_device_question_is_passed_on(error: BaseException) -> None:
    """SPEC X-KW-3; field report B13"""
    producer = fresh(Forged(), device=error)
    with pytest.raises(type(error)) as caught:
        interop.as_tensor(producer)
    assert caught.value is error and producer.calls == []


# --- streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """Speaks ``__cuda_stream__``, by a method as its text says, or by an attribute as some have it."""

    def __init__(self, answer: Any, *, attribute: bool = False) -> None:
        self.__cuda_stream__ = answer if attribute else lambda: answer


@pytest.mark.parametrize("device", [(it.CUDA, 0), (it.CUDA, 3), (it.CUDA_MANAGED, 0)], ids=str)
def test_the_legacy_default_stream_is_said_aloud_on_cuda(device: tuple[int, int]) -> None:
    """SPEC X-STREAM-1, X-STREAM-4; field report B65: never 0."""
    producer = fresh(Forged(device=device))
    interop.as_tensor(producer)
    assert producer.calls == [{"max_version": LATEST, "stream": 1}]


def test_the_default_stream_of_rocm_is_none_or_zero() -> None:
    """SPEC X-STREAM-1"""
    producer = fresh(Forged(device=(it.ROCM, 0)))
    interop.as_tensor(producer)
    assert len(producer.calls) == 1 and producer.calls[0].get("stream") in (None, 0)


@pytest.mark.parametrize(
    ("device", "stream"),
    [(it.CUDA, n) for n in (-1, 1, 2, 3, 0x7F00_DEAD_BEE0, 2**63 - 1)] + [(it.ROCM, n) for n in (-1, 0, 3, 2**40)],
)
def test_the_callers_stream_is_sent(device: int, stream: int) -> None:
    """SPEC X-STREAM-1, X-STREAM-4"""
    producer = fresh(Forged(device=(device, 0)))
    interop.as_tensor(producer, stream=stream)
    assert producer.calls == [{"max_version": LATEST, "stream": stream}] and type(producer.calls[0]["stream"]) is int


@pytest.mark.parametrize("attribute", [False, True])
@pytest.mark.parametrize(("answer", "sent"), [((0, 0x1234), 0x1234), ((0, 0), 1), ((1, 7), 7)])
def test_a_stream_object_is_sent_as_its_address(answer: Any, sent: int, attribute: bool) -> None:
    """SPEC X-STREAM-1"""
    producer = fresh(Forged(device=(it.CUDA, 0)))
    interop.as_tensor(producer, stream=Stream(answer, attribute=attribute))
    assert producer.calls[0]["stream"] == sent


@pytest.mark.parametrize(
    ("device", "stream"),
    [(it.CUDA, n) for n in (0, -2, 2**63, 2**64, -(2**70))] + [(it.CUDA_MANAGED, 0)] + [(it.ROCM, n) for n in (1, 2, -3, 2**63)],
)
def test_a_number_that_is_no_stream_is_a_value_error_before_asking(device: int, stream: int) -> None:
    """SPEC X-STREAM-1; field report B65"""
    producer = fresh(forged := Forged(device=(device, 0)))
    with pytest.raises(ValueError, match="stream"):
        interop.as_tensor(producer, stream=stream)
    assert producer.calls == [] and forged.made == 0


@pytest.mark.parametrize(
    "stream",
    [True, False, 1.0, "1", b"1", object(), (0, 1), Stream(None), Stream(7), Stream((0, "x")), Stream((0, None))],
    ids=repr,
)
def test_an_object_that_is_no_stream_is_a_type_error_before_asking(stream: Any) -> None:
    """SPEC X-STREAM-1"""
    producer = fresh(forged := Forged(device=(it.CUDA, 0)))
    with pytest.raises((TypeError, ValueError)):
        interop.as_tensor(producer, stream=stream)
    assert producer.calls == [] and forged.made == 0


@pytest.mark.parametrize("answer", ["()", "(0,)", "[]", "{}"])
def test_a_malformed_stream_object_is_refused(answer: str) -> None:
    """SPEC X-STREAM-1. In a process of its own: too short a tuple has crashed it."""
    code = f"""
import interop, interop.testing as it
stream = type("Stream", (), {{"__cuda_stream__": lambda self: {answer}}})()
try:
    interop.as_tensor(it.Producer(it.Forged(device=(2, 0))), stream=stream)
except (TypeError, ValueError) as e:
    print("refused")
"""
    assert run(code).stdout == "refused\n"


@pytest.mark.parametrize("stream", [None, -1])
@pytest.mark.parametrize("device", WITHOUT_STREAMS, ids=str)
def test_no_stream_is_sent_where_memory_has_none(device: tuple[int, int], stream: Any) -> None:
    """SPEC X-KW-1, X-STREAM-2"""
    producer = fresh(Forged(device=device))
    interop.as_tensor(producer, stream=stream)
    assert producer.calls == [{"max_version": LATEST}]


@pytest.mark.parametrize("stream", [1, 2, 0x1234])
@pytest.mark.parametrize("device", WITHOUT_STREAMS, ids=str)
def test_a_stream_for_memory_without_streams_is_refused(device: tuple[int, int], stream: int) -> None:
    """SPEC X-STREAM-2"""
    producer = fresh(forged := Forged(device=device))
    with pytest.raises(ExchangeError, match="stream"):
        interop.as_tensor(producer, stream=stream)
    assert forged.deleted == forged.made


@pytest.mark.parametrize("keywords", [(), ("max_version",)], ids=str)
def test_a_producer_that_knows_no_streams_is_taken_to_use_the_default_one(keywords: tuple[str, ...]) -> None:
    """SPEC X-KW-2, X-STREAM-3"""
    t = interop.as_tensor(fresh(Forged(device=(it.CUDA, 0)), keywords))
    assert Capsule.of(t, max_version=LATEST, stream=1).shape == (4,)
    with pytest.raises(ExchangeError, match="stream"):
        t.__dlpack__(max_version=LATEST, stream=7)


@pytest.mark.parametrize("keywords", [(), ("max_version",)], ids=str)
def test_a_stream_that_the_producer_does_not_know_is_not_forgotten(keywords: tuple[str, ...]) -> None:
    """SPEC X-STREAM-3: here is no driver that could order the two."""
    for _ in range(2):
        forged = Forged(device=(it.CUDA, 0))
        with pytest.raises(ExchangeError, match="stream"):
            interop.as_tensor(producer_type(keywords)(forged), stream=7)
        assert forged.deleted == forged.made


@pytest.mark.parametrize(
    ("device", "stream"),
    [(it.CUDA, None), (it.CUDA, 2), (it.CUDA, 7), (it.CUDA_MANAGED, None), (it.ROCM, None), (it.ROCM, 0), (it.ROCM, 7)],
)
def test_what_arrived_on_a_stream_leaves_on_the_same_one(device: int, stream: Any) -> None:
    """SPEC X-STREAM-3, X-STREAM-4"""
    t = interop.as_tensor(fresh(forged := Forged(device=(device, 0))), stream=stream)
    assert Capsule.of(t, max_version=LATEST, stream=stream).data == forged.data
    assert Capsule.of(t[1:], max_version=LATEST, stream=stream).data == forged.data + 4


@pytest.mark.parametrize(("device", "came", "leaves"), [(it.CUDA, 7, None), (it.CUDA, 7, 8), (it.CUDA, None, 2), (it.ROCM, 7, None)])
def test_another_stream_is_never_ignored(device: int, came: Any, leaves: Any) -> None:
    """SPEC X-STREAM-3"""
    t = interop.as_tensor(fresh(Forged(device=(device, 0))), stream=came)
    for x in (t, t[1:]):
        with pytest.raises(ExchangeError, match="stream"):
            x.__dlpack__(max_version=LATEST, stream=leaves)


@pytest.mark.parametrize("device", [it.CUDA, it.ROCM])
def test_minus_one_asks_for_no_order_on_either_side(device: int) -> None:
    """SPEC X-STREAM-1"""
    t = interop.as_tensor(fresh(Forged(device=(device, 0))), stream=-1)
    for stream in (-1, 7, None):
        assert Capsule.of(t, max_version=LATEST, stream=stream).shape == (4,)
    t = interop.as_tensor(fresh(Forged(device=(device, 0))), stream=7)
    assert Capsule.of(t, max_version=LATEST, stream=-1).shape == (4,)


@pytest.mark.parametrize("error", [BufferError("capture under way"), TypeError("capture under way")], ids=repr)
def test_a_producer_that_cannot_order_says_so_itself(error: BaseException) -> None:
    """SPEC X-KW-3; field report B67"""
    producer = fresh(Forged(device=(it.CUDA, 0)), error=error)
    with pytest.raises(type(error)) as caught:
        interop.as_tensor(producer, stream=7)
    assert caught.value is error and len(producer.calls) == 1
