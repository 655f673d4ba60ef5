"""Reading through the exchange table of another type. Tables are forged: any version, any slot missing, failing in any way."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
from support import run

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Forged, ForgedTable, Producer, producer_type


def table(forged: Forged, **slots: Any) -> ForgedTable:
    """A complete table, all of whose exports are `forged`; slots given replace those."""
    complete: dict[str, Any] = {"from_py": lambda x: forged, "to_py": lambda owned: owned, "borrow": lambda x: forged, "stream": 0}
    return ForgedTable(**{**complete, **slots})


def slow() -> tuple[type[Producer], Forged]:
    """A type that speaks ``__dlpack__``, to see whether a table was passed over; and what it answers."""
    return producer_type(fresh=True), Forged((7,))


def read(made: ForgedTable) -> interop.Tensor:
    return interop.as_tensor(made.make_type()())


# --- how it is read ---------------------------------------------------------------------------------------------------


def test_a_tensor_is_borrowed_where_the_table_lends() -> None:
    """SPEC X-KW-7, X-OWN-7"""
    forged = Forged((2, 3), (it.INT, 32, 1))
    made = table(forged)
    cls = made.make_type()
    x = cls()
    t = interop.as_tensor(x)
    assert (t.shape, t.dtype, t.ptr) == ((2, 3), "int32", forged.data)
    assert made.calls == [("borrow", x)] and forged.made == 0


def test_the_lender_lives_as_long_as_the_tensor_and_its_views() -> None:
    """SPEC X-OWN-7"""
    made = table(Forged())
    x = made.make_type()()
    gone = weakref.ref(x)
    view = interop.as_tensor(x)[1:]
    made.calls.clear()      # the forger keeps what it was called with
    del x
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_without_a_lending_slot_the_tensor_is_owned() -> None:
    """SPEC X-KW-7, X-OWN-2"""
    forged = Forged((2, 3), flags=it.READ_ONLY | it.IS_COPIED)
    made = table(forged, borrow=None)
    t = read(made)
    view = t[1:]
    assert [slot for slot, _ in made.calls] == ["from_py"]
    assert (t.ptr, t.readonly, t.copied) == (forged.data, True, True)
    del t
    assert forged.deletions == (0,)
    del view
    assert forged.deletions == (1,)


@pytest.mark.parametrize("borrow", [True, False])
def test_the_table_goes_before_dlpack(borrow: bool) -> None:
    """SPEC X-KW-7"""
    cls, unwanted = slow()
    wanted = Forged((2,))
    table(wanted, **({} if borrow else {"borrow": None})).attach(cls)
    assert interop.as_tensor(cls(unwanted)).ptr == wanted.data
    assert unwanted.made == 0


@pytest.mark.parametrize("strides", ["compact", None])
@pytest.mark.parametrize("borrow", [True, False])
def test_offset_and_null_strides_are_read_as_from_a_capsule(borrow: bool, strides: Any) -> None:
    """SPEC X-VALID-3, X-VALID-6"""
    forged = Forged((1, 2), (it.UINT, 8, 1), data=b"abcd", byte_offset=2, strides=strides)
    t = read(table(forged, **({} if borrow else {"borrow": None})))
    assert bytes(t) == b"cd" and t.strides == (2, 1)
    assert bytes(interop.to(table(forged, **({} if borrow else {"borrow": None})).make_type()(), "numpy")) == b"cd"


# --- which table counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["from_py", "to_py", "stream"])
def test_a_table_that_lacks_a_required_slot_is_passed_over(missing: str) -> None:
    """SPEC X-VER-5"""
    cls, wanted = slow()
    made = table(Forged((2,)), **{missing: None})
    made.attach(cls)
    assert interop.as_tensor(cls(wanted)).ptr == wanted.data
    assert made.calls == []


def test_the_allocator_is_not_needed_for_reading() -> None:
    """SPEC X-KW-7: tvm_ffi's stand-in table has none."""
    made = table(forged := Forged((2,)))
    assert not made.slots["allocate"]
    assert read(made).ptr == forged.data


@pytest.mark.parametrize("minor", [0, 1, 9, 2**32 - 1])
def test_any_minor_version_of_a_table_is_used(minor: int) -> None:
    """SPEC X-VER-2, X-VER-5"""
    assert read(table(forged := Forged(), version=(1, minor))).ptr == forged.data


@pytest.mark.parametrize("major", [0, 2, 2**32 - 1])
def test_a_table_of_another_major_version_is_passed_over(major: int) -> None:
    """SPEC X-VER-5"""
    cls, wanted = slow()
    made = table(Forged((2,)), version=(major, 0))
    made.attach(cls)
    assert interop.as_tensor(cls(wanted)).ptr == wanted.data
    assert made.calls == []


def test_a_newer_table_and_nothing_else_is_refused() -> None:
    """SPEC X-VER-5, X-KW-7"""
    with pytest.raises(TypeError, match="shares no memory"):
        read(table(Forged(), version=(2, 0)))


def test_an_older_table_behind_newer_ones_is_found() -> None:
    """SPEC X-VER-5"""
    old = table(forged := Forged((3,)))
    middle = table(Forged(), version=(2, 5), previous=old)
    newest = table(Forged(), version=(3, 0), previous=middle)
    assert read(newest).ptr == forged.data
    assert newest.calls == [] and middle.calls == []


def test_a_chain_of_tables_that_bites_its_tail_ends() -> None:
    """SPEC X-VER-5: passed over, not followed for ever."""
    code = """
import ctypes, interop, interop.testing as it
made = it.ForgedTable(version=(2, 0))
made._table.header.prev_api = made.address
cls = it.producer_type(fresh=True)
made.attach(cls)
import signal; signal.alarm(10)
print(interop.as_tensor(cls(it.Forged((3,)))).shape)
"""
    done = run(code, ok=False)
    assert (done.returncode, done.stdout) == (0, "(3,)\n")


@pytest.mark.parametrize("attribute", ["__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"])
def test_the_integer_of_dlpack_1_2_is_not_taken(attribute: str) -> None:
    """SPEC X-VER-5; field report B94"""
    cls, wanted = slow()
    made = table(Forged((2,)))
    setattr(cls, attribute, made.address)
    assert interop.as_tensor(cls(wanted)).ptr == wanted.data
    assert made.calls == []


@pytest.mark.parametrize("value", [None, b"dlpack_exchange_api", Forged().capsule("dlpack_exchange_api_v2"), Forged().capsule(None)])
def test_what_is_not_a_table_is_passed_over(value: object) -> None:
    """SPEC X-VER-5; field report B94: the capsule's name is checked."""
    cls, wanted = slow()
    cls.__dlpack_c_exchange_api__ = value  # type: ignore[attr-defined]
    assert interop.as_tensor(cls(wanted)).ptr == wanted.data


def test_a_table_on_the_instance_is_not_a_table() -> None:
    """SPEC X-KW-7; field report B94"""
    cls, wanted = slow()
    made = table(Forged((2,)))
    x = cls(wanted)
    x.__dlpack_c_exchange_api__ = made.capsule  # type: ignore[attr-defined]
    assert interop.as_tensor(x).ptr == wanted.data
    assert made.calls == []


def test_an_instance_does_not_hide_the_table_of_its_type() -> None:
    """SPEC X-KW-7"""
    x = table(forged := Forged()).make_type()()
    x.__dlpack_c_exchange_api__ = None
    assert interop.as_tensor(x).ptr == forged.data


def test_a_subclass_inherits_the_table() -> None:
    """SPEC X-KW-7"""
    cls = table(forged := Forged((2,))).attach(slow()[0])
    assert interop.as_tensor(type("Sub", (cls,), {})(Forged())).ptr == forged.data


def test_a_subclass_that_redefines_dlpack_means_its_own() -> None:
    """SPEC X-KW-7"""
    made = table(Forged((2,)))
    wanted = Forged((3,))
    base = made.attach(slow()[0])
    sub = type("Sub", (base,), {"__dlpack__": lambda self, **given: wanted.capsule()})
    deep = type("Deep", (sub,), {})
    for cls in (sub, deep):
        assert interop.as_tensor(cls(Forged())).ptr == wanted.data
        assert interop.to(cls(Forged()), "numpy").ctypes.data == wanted.data
    assert made.calls == []


def test_a_subclass_with_a_table_of_its_own_means_that() -> None:
    """SPEC X-KW-7"""
    wanted = Forged((3,))
    base = table(Forged((2,))).attach(slow()[0])
    sub = table(wanted).attach(type("Sub", (base,), {"__dlpack__": None}))
    assert interop.as_tensor(sub(Forged())).ptr == wanted.data


def test_a_table_that_comes_later_is_seen() -> None:
    """SPEC X-KW-8"""
    cls, first = slow()
    assert interop.as_tensor(cls(first)).ptr == first.data
    table(second := Forged()).attach(cls)
    assert interop.as_tensor(cls(first)).ptr == second.data
    del cls.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    assert interop.as_tensor(cls(first)).ptr == first.data


def test_a_type_with_a_table_can_still_die() -> None:
    """SPEC X-KW-8"""
    made = table(Forged())
    cls = made.make_type()
    interop.as_tensor(cls())
    made.calls.clear()
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


# --- failing slots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["borrow", "from_py"])
@pytest.mark.parametrize("convert", [interop.as_tensor, lambda x: interop.to(x, "numpy")], ids=["as_tensor", "to"])
@pytest.mark.parametrize("kind", [BufferError, TypeError, ExchangeError, KeyboardInterrupt, MemoryError])
def test_an_error_of_a_slot_is_passed_on_and_the_slot_is_called_once(slot: str, convert: Any, kind: type[BaseException]) -> None:
    """SPEC X-KW-3"""
    error = kind("no")
    made = table(Forged(), **({"borrow": "raise"} if slot == "borrow" else {"borrow": None, "from_py": "raise"}), error=error)
    with pytest.raises(kind) as caught:
        convert(made.make_type()())
    assert caught.value is error and len(made.calls) == 1


@pytest.mark.parametrize("slot", ["borrow", "from_py"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, NotImplementedError, OSError])
def test_a_refusal_of_another_class_shows_its_cause(slot: str, kind: type[Exception]) -> None:
    """SPEC X-KW-3; field report B09: torch says RuntimeError. The error itself, or a refusal that it caused."""
    error = kind("sparse")
    made = table(Forged(), **({"borrow": "raise"} if slot == "borrow" else {"borrow": None, "from_py": "raise"}), error=error)
    with pytest.raises((ExchangeError, kind), match="sparse") as caught:
        read(made)
    assert error in (caught.value, caught.value.__cause__) and len(made.calls) == 1


@pytest.mark.parametrize("slot", ["borrow", "from_py"])
def test_a_slot_that_fails_is_not_answered_by_dlpack(slot: str) -> None:
    """SPEC X-KW-3: what the table refuses is refused."""
    cls, unwanted = slow()
    table(Forged(), **({"borrow": "raise"} if slot == "borrow" else {"borrow": None, "from_py": "raise"})).attach(cls)
    with pytest.raises(BufferError, match="forged refusal"):
        interop.as_tensor(cls(unwanted))
    assert unwanted.made == 0


def broken(*_: Any) -> Any:
    raise ValueError("stays inside")


@pytest.mark.parametrize("slots", [{"borrow": broken}, {"borrow": None, "from_py": broken}], ids=["borrow", "from_py"])
@pytest.mark.parametrize("convert", [interop.as_tensor, lambda x: interop.to(x, "numpy")], ids=["as_tensor", "to"])
def test_a_slot_that_fails_without_an_error_is_refused(slots: Any, convert: Any) -> None:
    """SPEC X-KW-3: a broken contract gives no SystemError."""
    made = table(Forged(), **slots)
    with pytest.raises(ExchangeError, match="without a reason"):
        convert(made.make_type()())
    assert len(made.errors) == 1


@pytest.mark.parametrize("borrow", [True, False])
def test_a_stream_slot_that_fails_frees_what_was_exported(borrow: bool) -> None:
    """SPEC X-OWN-2, X-STREAM-3"""
    forged = Forged(device=(it.CUDA, 0))
    made = table(forged, stream=broken, **({} if borrow else {"borrow": None}))
    with pytest.raises(ExchangeError):
        read(made)
    assert forged.deleted == forged.made == (0 if borrow else 1)


@pytest.mark.parametrize("version", [(0, 8), (2, 0)])
def test_an_owned_tensor_of_another_major_version_is_refused(version: Any) -> None:
    """SPEC X-VER-1, X-OWN-2"""
    forged = Forged(version=version)
    with pytest.raises(ExchangeError, match=f"{version[0]}\\.{version[1]}"):
        read(table(forged, borrow=None))
    assert forged.deletions == (1,)


def test_a_failing_table_keeps_no_reference() -> None:
    """SPEC X-OWN-7"""
    made = table(Forged((-1,)))
    x = made.make_type()()
    made.calls.clear()
    before = sys.getrefcount(x)
    for _ in range(5):
        with pytest.raises(ExchangeError):
            interop.as_tensor(x)
    made.calls.clear()
    gc.collect()
    after = sys.getrefcount(x)
    assert after == before


# --- streams of a table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize(
    ("device", "current", "number"), [(it.CUDA, 7, 7), (it.CUDA, 0, 1), (it.CUDA_MANAGED, 9, 9), (it.ROCM, 0, 0), (it.ROCM, 5, 5)]
)
def test_the_current_stream_of_the_table_is_remembered(device: int, current: int, number: int, borrow: bool) -> None:
    """SPEC X-STREAM-1, X-STREAM-4; NULL is the default stream."""
    made = table(Forged(device=(device, 3)), stream=current, **({} if borrow else {"borrow": None}))
    t = read(made)
    assert made.calls[-1] == ("stream", (device, 3))
    assert Capsule.of(t, max_version=(1, 3), stream=number).shape == (4,)
    with pytest.raises(ExchangeError, match="stream"):
        t.__dlpack__(max_version=(1, 3), stream=number + 77)


@pytest.mark.parametrize("device", [it.CPU, it.CUDA_HOST, it.OPENCL, it.VULKAN])
def test_memory_without_streams_is_not_asked_for_one(device: int) -> None:
    """SPEC X-STREAM-2"""
    made = table(Forged(device=(device, 0)))
    read(made)
    assert [slot for slot, _ in made.calls] == ["borrow"]
