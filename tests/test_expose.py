"""What interop's own exports look like, field by field and keyword by keyword: capsules of both kinds and the exchange table."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import AllocatorError, Capsule, Consumed, Forged, exchange_table

TABLE = exchange_table(interop.Tensor)
LATEST = (1, 3)


def forge(shape: Any = (4,), dtype: Any = (it.FLOAT, 32, 1), **fields: Any) -> interop.Tensor:
    return interop.as_tensor(Forged(shape, dtype, **fields).capsule())


def exported(t: interop.Tensor, **keywords: Any) -> Capsule:
    return Capsule.of(t, **{"max_version": LATEST, **keywords})


# --- max_version ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, (0, 0), (0, 8), (0, 99)], ids=str)
def test_without_major_1_the_capsule_is_legacy(asked: Any) -> None:
    """SPEC X-VER-3; field report B03"""
    capsule = exported(interop.as_tensor(np.zeros(3)), max_version=asked)
    assert (capsule.name, capsule.version) == ("dltensor", None)
    assert Capsule.of(interop.as_tensor(np.zeros(3))).name == "dltensor"


@pytest.mark.parametrize(
    ("asked", "given"),
    [((1, 0), (1, 0)), ((1, 1), (1, 1)), ((1, 3), (1, 3)), ((1, 4), (1, 3)), ((1, 99), (1, 3)), ((1, 2**31), (1, 3)), ((2, 0), (1, 3)),
     ((2**40, 5), (1, 3)), ((2**70, 0), (1, 3)), ((1, 2**70), (1, 3))],
    ids=str,
)  # fmt: skip
def test_the_version_is_the_newest_that_both_know(asked: Any, given: Any) -> None:
    """SPEC X-VER-3"""
    capsule = exported(interop.as_tensor(np.zeros(3)), max_version=asked)
    assert (capsule.name, capsule.version) == ("dltensor_versioned", given)


@pytest.mark.parametrize("asked", [[1, 3], (np.int64(1), np.int32(3)), (True, 0)], ids=repr)
def test_a_version_may_be_any_pair_of_integers(asked: Any) -> None:
    """SPEC X-VER-4"""
    assert exported(interop.as_tensor(np.zeros(3)), max_version=asked).versioned


@pytest.mark.parametrize(
    "asked",
    [1, 1.3, "1.3", "13", (), (1,), (1, 3, 0), (1.0, 3), ("1", "3"), (None, None), (1, None), (-1, 0), (1, -1), object(), {}],
    ids=repr,
)
def test_a_malformed_version_is_refused(asked: Any) -> None:
    """SPEC X-VER-4"""
    array = np.zeros(3)
    t = interop.as_tensor(array)
    with pytest.raises((TypeError, ValueError)):
        t.__dlpack__(max_version=asked)


# --- the other keywords -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", ["max_version", "stream", "dl_device", "copy"])
def test_keyword_names_are_compared_by_content(keyword: str) -> None:
    """SPEC X-EXP-6: strings made at run time, which are not interned."""
    name = "".join(list(keyword))
    assert name is not keyword
    value = {"max_version": (1, 1), "stream": -1, "dl_device": (1, 0), "copy": True}[keyword]
    capsule = Capsule.of(interop.as_tensor(np.zeros(3)), **{name: value})
    assert capsule.version == ((1, 1) if keyword == "max_version" else None)
    with pytest.raises((TypeError, ValueError, ExchangeError)):
        interop.as_tensor(np.zeros(3)).__dlpack__(**{"".join(list(keyword)): "nonsense"})


@pytest.mark.parametrize("given", [{"device": (1, 0)}, {"Copy": True}, {"max_versio": LATEST}, {"": 1}, {"stream ": None}], ids=str)
def test_unknown_keywords_are_a_type_error(given: dict[str, Any]) -> None:
    """SPEC X-EXP-6"""
    with pytest.raises(TypeError, match="unexpected keyword"):
        interop.as_tensor(np.zeros(3)).__dlpack__(**given)


@pytest.mark.parametrize("given", [(None,), (-1,), (None, LATEST)])
def test_positional_arguments_are_a_type_error(given: Any) -> None:
    """SPEC X-EXP-6"""
    with pytest.raises(TypeError):
        interop.as_tensor(np.zeros(3)).__dlpack__(*given)


@pytest.mark.parametrize("copy", [None, False])
def test_without_copy_the_bytes_are_shared(copy: Any) -> None:
    """SPEC X-EXP-4"""
    array = np.arange(6.0).reshape(2, 3)[:, ::-1]
    capsule = exported(interop.as_tensor(array), copy=copy)
    assert (capsule.data, capsule.copied, capsule.strides) == (array.ctypes.data, False, (3, -1))


@pytest.mark.parametrize("max_version", [None, LATEST])
@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3)[:, ::-1], np.broadcast_to(np.int8(3), (2, 2)), np.zeros((0, 3)), np.full((), 7, "f4"), np.ones((1,) * 9)],
    ids=lambda a: str(a.shape),
)
def test_copy_true_gives_fresh_compact_writable_memory(array: Any, max_version: Any) -> None:
    """SPEC X-EXP-4; field report B08"""
    capsule = exported(interop.as_tensor(array), copy=True, max_version=max_version)
    assert capsule.bytes() == array.tobytes() and capsule.contiguous and not capsule.readonly
    assert capsule.copied is (max_version is not None) and (capsule.data != array.ctypes.data or array.size == 0)
    assert capsule.data % 64 == 0


def test_a_copy_does_not_hold_its_source() -> None:
    """SPEC X-EXP-4, X-OWN-2"""
    forged = Forged((4,))
    capsule = exported(interop.as_tensor(forged.capsule()), copy=True)
    assert forged.deletions == (1,) and capsule.shape == (4,)


@pytest.mark.parametrize("device", [(it.CUDA, 0), (it.OPENCL, 0), (it.VULKAN, 0)], ids=str)
def test_copy_true_is_refused_where_interop_cannot_copy(device: Any) -> None:
    """SPEC X-EXP-4"""
    with pytest.raises(ExchangeError, match=r"copy|no (Vulkan|OpenCL) driver"):
        exported(forge(device=device), copy=True)


@pytest.mark.parametrize("copy", [0, 1, "yes", "", (), 2.0, object()], ids=repr)
def test_copy_that_is_no_flag_is_a_type_error(copy: Any) -> None:
    """SPEC X-EXP-4, X-TO-13"""
    with pytest.raises(TypeError, match="copy"):
        exported(interop.as_tensor(np.zeros(3)), copy=copy)


@pytest.mark.parametrize("device", [it.CPU, it.CUDA_HOST, it.ROCM_HOST, it.CUDA_MANAGED, it.CUDA, it.VULKAN])
@pytest.mark.parametrize("max_version", [None, LATEST])
def test_the_tensors_own_device_may_be_asked_for(device: int, max_version: Any) -> None:
    """SPEC X-EXP-5"""
    t = forge(device=(device, 2))
    kept = (device, 0 if device == it.CPU else 2)        # there is one CPU
    for asked in ((device, 2), [device, 2], interop.Device((device, 2))):
        assert exported(t, dl_device=asked, max_version=max_version).device == kept


@pytest.mark.parametrize("device", [it.CUDA_HOST, it.ROCM_HOST, it.CUDA_MANAGED])
@pytest.mark.parametrize("copy", [None, False])
def test_memory_that_the_host_reads_leaves_for_the_cpu(device: int, copy: Any) -> None:
    """SPEC X-EXP-5; field report B10"""
    forged = Forged(device=(device, 0))
    capsule = exported(interop.as_tensor(forged.capsule()), dl_device=(1, 0), copy=copy)
    assert capsule.data == forged.data and capsule.device[0] in it.HOST_DEVICES


@pytest.mark.parametrize(
    ("device", "asked"),
    [((1, 0), (2, 0)), ((1, 0), (3, 0)), ((2, 0), (1, 0)), ((2, 0), (2, 1)), ((2, 0), (13, 0)), ((4, 0), (1, 0)), ((4, 0), (4, 1)),
     ((3, 0), (2, 0))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("max_version", [None, LATEST])
@pytest.mark.parametrize("copy", [None, False])
def test_another_device_is_refused(device: Any, asked: Any, max_version: Any, copy: Any) -> None:
    """SPEC X-EXP-5; field report B09: BufferError, also in a legacy capsule."""
    forged = Forged(device=device)
    t = interop.as_tensor(forged.capsule())
    with pytest.raises(BufferError, match="dl_device"):
        exported(t, dl_device=asked, max_version=max_version, copy=copy)
    del t
    assert forged.deletions == (1,)


@pytest.mark.parametrize(
    "asked", [1, "cuda", (), (1,), (1, 0, 0), (1.0, 0), ("1", 0), (None, 0), (1, None), (99, 0), (0, 0), (-1, 0), object()], ids=repr
)
def test_a_malformed_device_is_refused(asked: Any) -> None:
    """SPEC X-EXP-5"""
    with pytest.raises((TypeError, ValueError, BufferError)):
        exported(interop.as_tensor(np.zeros(3)), dl_device=asked)


@pytest.mark.parametrize("device", [it.CPU, it.CUDA_HOST, it.OPENCL, it.VULKAN, it.ONEAPI])
def test_memory_without_streams_takes_no_stream(device: int) -> None:
    """SPEC X-STREAM-2"""
    t = forge(device=(device, 0))
    for stream in (None, -1):
        assert exported(t, stream=stream).shape == (4,)
    for stream in (0, 1, 2, 0x1234):
        with pytest.raises(BufferError, match="stream"):
            exported(t, stream=stream)


@pytest.mark.parametrize("stream", [-2, 2**64, True, "1", 1.0, object()], ids=repr)
def test_a_malformed_stream_is_refused(stream: Any) -> None:
    """SPEC X-STREAM-1"""
    for device in ((1, 0), (2, 0)):
        with pytest.raises((TypeError, ValueError)):
            exported(forge(device=device), stream=stream)


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t[1:], lambda t: t[::-1].reshape(3, 1), lambda t: interop.as_tensor(t.__dlpack__(max_version=LATEST))]
)
def test_read_only_is_said(view: Any) -> None:
    """SPEC X-RO-1; field report B52"""
    for t in (forge((3,), flags=it.READ_ONLY), interop.as_tensor(b"abc"), interop.as_tensor(np.broadcast_to(np.zeros(1), (3,)))):
        assert exported(view(t), max_version=(1, 0)).flags == it.READ_ONLY
        assert exported(view(t)).flags == it.READ_ONLY


def test_read_only_does_not_leave_in_a_legacy_capsule() -> None:
    """SPEC X-RO-2; field report B52"""
    t = interop.as_tensor(b"abc")
    for asked in (None, (0, 8)):
        with pytest.raises(ExchangeError, match="read-only") as caught:
            exported(t, max_version=asked)
        assert caught.value.remedy
    assert exported(t, max_version=None, copy=True).bytes() == b"abc"


def test_padding_is_said_and_does_not_leave_where_it_cannot_be() -> None:
    """SPEC X-DT-6: the flag came with DLPack 1.1; to 1.0 it is an unknown bit, and the elements would be read as packed."""
    t = forge((3,), (it.INT, 4, 1), flags=it.SUBBYTE_PADDED)
    for x in (t, t[1:]):
        assert exported(x).flags == exported(x, max_version=(1, 1)).flags == it.SUBBYTE_PADDED
        for asked in (None, (0, 8), (1, 0)):
            with pytest.raises(ExchangeError, match="padded"):
                exported(x, max_version=asked)
    assert exported(forge((3,), (it.INT, 4, 1)), max_version=None).nbytes == 2


def test_that_a_source_was_copied_is_not_passed_on() -> None:
    """SPEC X-EXP-4: IS_COPIED says that the consumer is the only owner; here the Tensor is another."""
    t = forge(flags=it.IS_COPIED)
    assert t.copied and exported(t).flags == 0
    with TABLE.from_py(t) as owned:
        assert owned.flags == 0


# --- the tensor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_version", [None, LATEST])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 1), (0,), (2, 0, 3), (1,) * 7, (2,) * 10], ids=str)
def test_shape_and_strides_are_always_there(shape: Any, max_version: Any) -> None:
    """SPEC X-EXP-1; field report B45"""
    for t in (forge(shape, strides=None), interop.as_tensor(np.zeros(shape, np.float32))):
        capsule = exported(t, max_version=max_version)
        assert (capsule.shape, capsule.strides) == (shape, it.compact_strides(shape) if 0 not in shape else capsule.strides)
        assert capsule.strides is not None and capsule.contiguous


@pytest.mark.parametrize(
    ("shape", "strides", "leaves"),
    [((1,), (99,), (1,)), ((1, 4), (-7, 1), (4, 1)), ((4, 1), (1, 0), (1, 1)), ((2, 1, 3), (10, 77, 1), (10, 3, 1)),
     ((1, 1, 1), (5, 6, 7), (1, 1, 1)),
     ((0,), (9,), (1,)), ((3, 0), (0, 0), (1, 1)), ((0, 3), (-1, -1), (3, 1)), ((2, 1), (-5, 9), (-5, 1))],
    ids=str,
)  # fmt: skip
def test_strides_that_mean_nothing_are_row_major(shape: Any, strides: Any, leaves: Any) -> None:
    """SPEC X-EXP-2; field report B43"""
    t = forge(shape, strides=strides)
    assert exported(t).strides == exported(t, max_version=None).strides == leaves


@pytest.mark.parametrize("device", [1, 2, 3, 10, 11, 13, 14])
def test_data_of_an_empty_tensor_is_null(device: int) -> None:
    """SPEC X-EXP-3; field report B43"""
    for t in (forge((0, 3), data=64, byte_offset=8, device=(device, 0)), forge((4,), device=(device, 0))[4:]):
        capsule = exported(t)
        assert (capsule.data, capsule.byte_offset, capsule.device, capsule.nbytes) == (0, 0, (device, 0), 0)


@pytest.mark.parametrize("device", [1, 2, 3, 10, 11, 13, 14])
def test_the_offset_is_in_the_pointer_where_memory_is_addressed(device: int) -> None:
    """SPEC X-DEV-4; field report B41"""
    forged = Forged((4,), byte_offset=8, device=(device, 0))
    t = interop.as_tensor(forged.capsule())
    for x, first in ((t, 8), (t[1:], 12), (t[::-1], 20), (t[2], 16)):
        for capsule in (exported(x), exported(x, max_version=None)):
            assert (capsule.data - forged.data, capsule.byte_offset) == (first, 0)


@pytest.mark.parametrize("device", [(4, 0), (7, 0), (8, 1), (9, 0), (12, 0), (15, 2), (16, 0), (17, 0), (18, 0)], ids=str)
def test_a_handle_is_never_added_to(device: Any) -> None:
    """SPEC X-DEV-4, X-DEV-5; field report B61"""
    t = forge((4, 2), data=0xABC0, byte_offset=8, device=device)
    for x, first in ((t, 8), (t[1:], 16), (t[::-1], 32), (t[3, 1], 36), (t.permute(1, 0), 8), (t[:0], 8)):
        for capsule in (exported(x), exported(x, max_version=None)):
            assert (capsule.data, capsule.byte_offset, capsule.device) == (0xABC0, first, device)


@pytest.mark.parametrize(("shape", "strides"), [((10,), (1,)), ((2, 3), (1, 2)), ((), ()), ((3,), (-1,))], ids=str)
def test_lanes_leave_as_an_axis(shape: Any, strides: Any) -> None:
    """SPEC X-DT-5; field report B39"""
    capsule = exported(forge(shape, (it.FLOAT, 32, 4), strides=strides))
    assert (capsule.dtype, capsule.shape) == ((it.FLOAT, 32, 1), (*shape, 4))
    assert capsule.strides == (*(s * 4 for s in strides), 1)


def test_lanes_do_not_leave_where_there_is_no_room_for_their_axis() -> None:
    """SPEC X-DT-5, X-VALID-1: 65 dimensions would be refused by every consumer, interop among them."""
    with pytest.raises(ExchangeError):
        exported(forge((1,) * 64, (it.FLOAT, 32, 4)))


def test_the_device_question_is_answered_by_two_ints() -> None:
    """SPEC X-EXP-7"""
    for device in ((1, 0), (2, 3), (7, 1)):
        pair = forge(device=device).__dlpack_device__()
        assert pair == device and type(pair) is tuple and all(type(n) is int for n in pair)


def test_exports_are_independent() -> None:
    """SPEC X-OWN-3; field report B29"""
    forged = Forged((4,))
    t = interop.as_tensor(forged.capsule())
    a, b, c = exported(t), exported(t, max_version=None), exported(t)
    assert len({a.address, b.address, c.address}) == 3 and a.shape == b.shape
    owned = a.consume()
    shape = (ctypes.c_int64 * 4).from_address(it.DLManagedTensorVersioned.from_address(owned.address).dl_tensor.shape)
    shape[0] = 2        # a consumer's to change
    assert (b.shape, c.shape, t.shape) == ((4,), (4,), (4,))
    del t, a, b, c
    assert forged.deletions == (0,)
    owned.delete()
    assert forged.deletions == (1,)


def test_a_tensor_does_not_pass_for_a_number() -> None:
    """SPEC X-HOST-9: `int` and `float` read buffers as text, so they must be told."""
    t = interop.as_tensor(np.frombuffer(b"12", "u1"))
    for convert in (int, float, complex, bool, round):
        with pytest.raises(TypeError):
            convert(t)


# --- the exchange table -----------------------------------------------------------------------------------------------


def test_the_table_is_complete_and_stays() -> None:
    """SPEC X-TABLE-1; field report B94"""
    assert (TABLE.version, TABLE.chain) == (LATEST, (LATEST,)) and all(TABLE.slots.values())
    assert it.Capsule(interop.Tensor.__dlpack_c_exchange_api__).name == it.EXCHANGE_API
    for t in (forge(), interop.as_tensor(bytearray(2)), interop.as_tensor(np.zeros(3).view(np.matrix))):
        assert exchange_table(type(t)).address == TABLE.address


TENSORS: dict[str, Any] = {
    "plain": lambda: forge((2, 3)), "read-only": lambda: forge(flags=it.READ_ONLY),
    "padded": lambda: forge((3,), (it.INT, 4, 1), flags=4),
    "offset": lambda: forge(byte_offset=8), "handle": lambda: forge(device=(it.VULKAN, 1), data=64, byte_offset=8),
    "empty": lambda: forge((0, 3), data=64),
    "size 1": lambda: forge((1, 4), strides=(-9, 1)), "scalar": lambda: forge(()), "lanes": lambda: forge((3,), (it.FLOAT, 32, 4)),
    "reversed": lambda: interop.as_tensor(np.arange(6.0))[::-2],
    "many dims": lambda: forge((2,) * 9), "buffer": lambda: interop.as_tensor(bytearray(4)), "packed": lambda: forge((5,), (it.INT, 4, 1)),
}  # fmt: skip


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_the_table_exports_what_dlpack_exports(make: Any) -> None:
    """SPEC X-TABLE-4"""
    t = make()
    capsule = exported(t)
    with TABLE.from_py(t) as owned:
        assert owned.fields() == capsule.fields() and (owned.flags, owned.version) == (capsule.flags, capsule.version)


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("read-only", "padded")])
def test_what_is_lent_is_what_is_exported(name: str) -> None:
    """SPEC X-TABLE-4, X-TABLE-5: or refused, where a DLTensor that points into the object cannot be the same."""
    t = TENSORS[name]()
    try:
        lent = TABLE.borrow(t)
    except BufferError:
        assert name in ("lanes", "size 1", "empty")
        return
    expected = exported(t).fields()
    for fields in (lent, expected):      # a scalar may say NULL
        fields["shape"], fields["strides"] = fields["shape"] or (), fields["strides"] or ()
    assert lent == expected


def test_read_only_and_padded_tensors_are_not_lent() -> None:
    """SPEC X-TABLE-5"""
    for name in ("read-only", "padded"):
        with pytest.raises(BufferError, match=name):
            TABLE.borrow(TENSORS[name]())


@pytest.mark.parametrize("value", [None, 3, np.zeros(3), object(), interop.Tensor, b"abc"], ids=lambda v: type(v).__name__)
def test_the_slots_take_tensors_only(value: Any) -> None:
    """SPEC X-TABLE-2"""
    for slot in (TABLE.from_py, TABLE.borrow):
        with pytest.raises(TypeError):
            slot(value)


@pytest.mark.parametrize("device", [it.CUDA, it.CUDA_MANAGED, it.ROCM])
def test_memory_with_streams_does_not_pass_through_the_table(device: int) -> None:
    """SPEC X-TABLE-7, X-TABLE-2"""
    t = forge(device=(device, 0))
    for call in (lambda: TABLE.from_py(t), lambda: TABLE.borrow(t), lambda: TABLE.stream((device, 0))):
        with pytest.raises(BufferError, match="__dlpack__"):
            call()


@pytest.mark.parametrize("device", [(1, 0), (3, 0), (4, 0), (7, 1)], ids=str)
def test_memory_without_streams_has_a_null_stream(device: Any) -> None:
    """SPEC X-TABLE-1"""
    assert TABLE.stream(device) == 0


def test_to_py_takes_a_tensor_over() -> None:
    """SPEC X-TABLE-3"""
    forged = Forged((2, 3), flags=it.READ_ONLY)
    t = TABLE.to_py(forged.loose())
    assert type(t) is interop.Tensor and (t.shape, t.readonly, t.ptr) == ((2, 3), True, forged.data)
    assert forged.deletions == (0,)
    del t
    assert forged.deletions == (1,)


@pytest.mark.parametrize("fields", [{"version": (2, 0)}, {"ndim": -1}, {"dtype": (99, 8, 1)}, {"device": (0, 0)}, {"data": 0}], ids=str)
def test_to_py_takes_a_tensor_over_also_where_it_fails(fields: Any) -> None:
    """SPEC X-TABLE-3, X-TABLE-2"""
    forged = Forged(**fields)
    with pytest.raises(BufferError):
        TABLE.to_py(forged.loose())
    assert forged.deletions == (1,)


def test_a_failing_slot_leaves_null_behind() -> None:
    """SPEC X-TABLE-2"""
    slot = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    out = ctypes.c_void_p(0xDEAD)
    with pytest.raises(BufferError):
        slot(TABLE.slots["to_py"])(Forged((-1,)).loose().hand_over(), ctypes.addressof(out))
    assert out.value is None
    out = ctypes.c_void_p(0xDEAD)
    with pytest.raises(TypeError):
        slot(TABLE.slots["from_py"])(id(None), ctypes.addressof(out))
    assert out.value is None


@pytest.mark.parametrize("gil", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [((2, 3), (it.FLOAT, 32, 1), 24), ((), (it.COMPLEX, 128, 1), 16), ((0, 5), (it.INT, 8, 1), 0), ((3,), (it.INT, 4, 1), 2),
     ((2,) * 9, (it.BOOL, 8, 1), 512), ((3,), (it.FLOAT, 32, 4), 48)],
    ids=str,
)  # fmt: skip
def test_the_allocator_gives_aligned_row_major_memory(shape: Any, dtype: Any, nbytes: int, gil: bool) -> None:
    """SPEC X-TABLE-6"""
    with TABLE.allocate(shape, dtype, gil=gil) as owned:
        assert (owned.shape, owned.dtype, owned.device, owned.nbytes, owned.flags) == (shape, dtype, (1, 0), nbytes, 0)
        assert owned.contiguous and owned.data % 64 == 0 and owned.byte_offset == 0 and owned.version == LATEST
        if nbytes:
            ctypes.memset(owned.data, 0xAA, nbytes)
            assert owned.bytes() == b"\xaa" * nbytes


@pytest.mark.parametrize("gil", [True, False])
@pytest.mark.parametrize(
    ("prototype", "kind"),
    [(fields, "BufferError") for fields in (
        {"device": (2, 0)}, {"device": (0, 0)}, {"device": (-1, 0)}, {"dtype": (99, 8, 1)}, {"dtype": (2, 32, 0)}, {"ndim": -1},
        {"ndim": 65}, {"shape": (-1,)}, {"shape": (2**32, 2**32, 16)}, {"shape": (2**62,), "dtype": (0, 64, 4)},
    )] + [({"shape": (2**57,), "dtype": (0, 8, 1)}, "MemoryError")],
    ids=str,
)  # fmt: skip
def test_the_allocator_refuses_through_set_error(prototype: Any, kind: str, gil: bool) -> None:
    """SPEC X-TABLE-6, X-TABLE-2"""
    with pytest.raises(AllocatorError) as caught:
        TABLE.allocate(**{"shape": (4,), **prototype}, gil=gil)
    assert caught.value.kind == kind and caught.value.message


def test_the_allocator_works_on_many_threads_without_the_lock() -> None:
    """SPEC X-TABLE-6"""
    made: list[Consumed] = []
    threads = [threading.Thread(target=lambda: made.extend(TABLE.allocate((n + 1,), gil=False) for n in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 200 and len({owned.data for owned in made}) == 200
    for owned in made:
        owned.delete_from_pthread()
