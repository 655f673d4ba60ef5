"""The inspector against real capsules of NumPy and torch, and the forger against NumPy: they judge the rest."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop import testing as it
from interop.testing import Capsule, Consumed, Forged, Forwarder, Producer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        (it.DLPackVersion, 8, {"major": 0, "minor": 4}),
        (it.DLDevice, 8, {"device_type": 0, "device_id": 4}),
        (it.DLDataType, 4, {"code": 0, "bits": 1, "lanes": 2}),
        (it.DLTensor, 48, dict(data=0, device=8, ndim=16, dtype=20, shape=24, strides=32, byte_offset=40)),
        (it.DLManagedTensor, 64, {"dl_tensor": 0, "manager_ctx": 48, "deleter": 56}),
        (it.DLManagedTensorVersioned, 80, dict(version=0, manager_ctx=8, deleter=16, flags=24, dl_tensor=32)),
        (it.DLPackExchangeAPIHeader, 16, {"version": 0, "prev_api": 8}),
        (it.DLPackExchangeAPI, 56, {"header": 0, "managed_tensor_allocator": 16, "current_work_stream": 48}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_struct_has_the_size_and_offsets_of_the_header(struct: Any, size: int, offsets: dict[str, int]) -> None:
    assert ctypes.sizeof(struct) == size
    assert {name: getattr(struct, name).offset for name in offsets} == offsets


# --- reading ----------------------------------------------------------------------------------------------------------


def test_reads_every_field_of_a_versioned_numpy_capsule() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[1:, ::-2]
    capsule = Capsule.of(array, max_version=(1, 3))
    assert (capsule.name, capsule.versioned, capsule.consumed) == ("dltensor_versioned", True, False)
    assert capsule.version is not None and capsule.version[0] == 1
    assert (capsule.flags, capsule.readonly, capsule.copied, capsule.padded) == (0, False, False, False)
    assert capsule.device == (it.CPU, 0)
    assert capsule.dtype == (it.INT, 16, 1)
    assert (capsule.ndim, capsule.shape, capsule.strides) == (2, (3, 3), (6, -2))
    assert capsule.data + capsule.byte_offset == array.ctypes.data
    assert capsule.has_deleter and capsule.nbytes == 18 and capsule.size == 9 and not capsule.contiguous
    assert capsule.bytes() == array.tobytes()
    assert "int16 shape=(3, 3)" in repr(capsule) and "cpu:0" in repr(capsule)


def test_reads_a_legacy_numpy_capsule() -> None:
    array = np.arange(6, dtype=np.complex64).reshape(2, 3)
    capsule = Capsule.of(array)
    assert (capsule.name, capsule.versioned, capsule.version, capsule.flags) == ("dltensor", False, None, 0)
    assert capsule.dtype == (it.COMPLEX, 64, 1)
    assert capsule.contiguous and capsule.bytes() == array.tobytes()


def test_flags_of_readonly_and_copied_arrays() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert Capsule.of(array, max_version=(1, 0)).readonly
    copied = Capsule.of(array, max_version=(1, 0), copy=True)
    assert copied.copied and copied.data != array.ctypes.data
    assert "IS_COPIED" in repr(copied)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.T, lambda t: t[1:, ::2], lambda t: t[:0], lambda t: t[1, 1]])
def test_bytes_of_torch_views_are_row_major(torch: Any, view: Any) -> None:
    tensor = view(torch.arange(20, dtype=torch.float64).reshape(4, 5))
    capsule = Capsule.of(tensor, max_version=(1, 3))
    assert capsule.shape == tuple(tensor.shape)
    assert capsule.bytes() == tensor.contiguous().numpy().tobytes()


def test_bfloat16_of_torch(torch: Any) -> None:
    assert Capsule.of(torch.ones(3, dtype=torch.bfloat16)).dtype == (it.BFLOAT, 16, 1)


def test_only_the_name_is_left_after_somebody_consumed() -> None:
    capsule = Capsule.of(np.arange(4))
    kept = np.from_dlpack(Producer(Forged(), returns=capsule.capsule))
    assert capsule.consumed and capsule.name == "used_dltensor" and not capsule.versioned
    for field in ("shape", "flags", "data", "version"):
        with pytest.raises(it.Spent, match="is consumed"):
            getattr(capsule, field)
    assert repr(capsule) == "<Capsule 'used_dltensor'>"
    assert kept.tolist() == [0, 1, 2, 3]


def test_refuses_what_is_no_capsule() -> None:
    with pytest.raises(TypeError, match="expected a capsule, got ndarray"):
        Capsule(np.zeros(3))


@pytest.mark.parametrize(
    ("forged", "field", "message"),
    [
        (Forged(None, ndim=1), "shape", "NULL although ndim is 1"),
        (Forged((3,), ndim=-1), "shape", "ndim is -1"),
        (Forged((3,), ndim=2**31 - 1), "strides", "ndim is 2147483647"),
        (Forged((-3,)), "nbytes", "negative"),
        (Forged((3,), version=(2, 0)), "shape", "2.0"),
        (Forged((3,), data=0), "bytes", "NULL"),
        (Forged((3,), device=(it.VULKAN, 0)), "bytes", "vulkan:0"),
    ],
)
def test_hostile_metadata_is_malformed_and_still_has_a_repr(forged: Forged, field: str, message: str) -> None:
    capsule = Capsule(forged.capsule())
    assert repr(capsule) and repr(forged)
    with pytest.raises(it.Malformed, match=message):
        value = getattr(capsule, field)
        value()


def test_foreign_major_still_shows_what_keeps_its_place() -> None:
    capsule = Capsule(Forged(version=(2, 7), flags=9).capsule())
    assert (capsule.version, capsule.flags, capsule.has_deleter) == ((2, 7), 9, True)


@pytest.mark.parametrize(("flags", "nbytes"), [(0, 2), (it.SUBBYTE_PADDED, 3)])
def test_sub_byte_sizes(flags: int, nbytes: int) -> None:
    assert Capsule(Forged((3,), (it.INT, 4, 1), flags=flags).capsule()).nbytes == nbytes


# --- consuming --------------------------------------------------------------------------------------------------------


def references(array: Any) -> int:
    gc.collect()
    return sys.getrefcount(array)


@pytest.mark.parametrize("keywords", [{}, {"max_version": (1, 0)}], ids=["legacy", "versioned"])
@pytest.mark.parametrize(
    "delete",
    [Consumed.delete, lambda owned: owned.delete(gil=False), Consumed.delete_from_pthread],
    ids=["gil", "nogil", "pthread"],
)
def test_consumed_numpy_tensor_is_deleted_once(keywords: dict[str, Any], delete: Any) -> None:
    array = np.arange(5)
    before = references(array)
    capsule = Capsule.of(array, **keywords)
    owned = capsule.consume()
    assert capsule.consumed and owned.shape == (5,) and owned.data == array.ctypes.data
    del capsule
    assert references(array) == before + 1
    delete(owned)
    assert references(array) == before
    with pytest.raises(RuntimeError, match="already deleted"):
        delete(owned)
    with pytest.raises(it.Spent):
        owned.data  # noqa: B018
    assert repr(owned) == "<Consumed deleted>"


def test_consuming_twice_is_refused() -> None:
    capsule = Capsule.of(np.arange(5))
    with capsule.consume(), pytest.raises(it.Spent, match="is consumed"):
        capsule.consume()


def test_context_manager_deletes_what_is_still_owned() -> None:
    forged = Forged()
    with forged.loose() as owned:
        assert owned.owned
    assert forged.deleted == 1 and not owned.owned


def test_torch_tensor_deleted_from_a_pthread(torch: Any) -> None:
    owned = Capsule.of(torch.zeros(3), max_version=(1, 3)).consume()
    owned.delete_from_pthread()
    assert not owned.owned


# --- forging ----------------------------------------------------------------------------------------------------------


def test_numpy_reads_and_writes_forged_memory() -> None:
    forged = Forged((2, 3), (it.INT, 32, 1))
    array = np.from_dlpack(Producer(forged))
    assert array.shape == (2, 3) and array.flags.writeable
    array[1, 2] = 7
    assert forged.memory.cast("i").tolist() == [0, 0, 0, 0, 0, 7]
    forged.memory.cast("i")[0] = 5
    assert array[0, 0] == 5
    assert (forged.made, forged.deleted) == (1, 0)
    del array
    assert forged.deleted == 1


def test_memory_outlives_the_forger() -> None:
    array = np.from_dlpack(Producer(Forged((3,), (it.UINT, 8, 1), data=b"abc")))
    gc.collect()
    it.settle()
    assert array.tobytes() == b"abc"


@pytest.mark.parametrize(("offset", "shift"), [(0, 2), (2, 0)])
def test_negative_strides_and_byte_offset_reach_the_right_bytes(offset: int, shift: int) -> None:
    forged = Forged((3,), (it.UINT, 8, 1), strides=(-1,), byte_offset=offset, data=b"abc")
    # data + byte_offset is the first element; the lowest one lies where the memory begins.
    assert forged.data == ctypes.addressof(ctypes.c_char.from_buffer(forged.memory)) + shift
    assert np.from_dlpack(Producer(forged)).tobytes() == Capsule(forged.capsule()).bytes() == b"cba"


def test_caller_provided_memory() -> None:
    source = np.arange(4, dtype=np.float32)
    forged = Forged((4,), data=source.ctypes.data, owner=source)
    array = np.from_dlpack(Producer(forged))
    array[0] = 9
    assert source[0] == 9
    with pytest.raises(AttributeError, match="given by the caller"):
        forged.memory  # noqa: B018


@pytest.mark.parametrize("deleter", ["count", "python"])
@pytest.mark.parametrize("version", [None, (1, 3)], ids=["legacy", "versioned"])
class TestCountingDeleters:
    """What is counted, for the C function and for the callback."""

    def test_dropped_capsule_is_deleted_once(self, deleter: Any, version: Any) -> None:
        forged = Forged(version=version, deleter=deleter)
        capsule = forged.capsule()
        assert forged.deleted == 0
        del capsule
        assert forged.deleted == 1

    def test_consumed_capsule_is_not_deleted_by_its_destructor(self, deleter: Any, version: Any) -> None:
        forged = Forged(version=version, deleter=deleter)
        owned = Capsule(forged.capsule()).consume()
        assert forged.deleted == 0
        owned.delete()
        assert forged.deleted == 1

    def test_pthread(self, deleter: Any, version: Any) -> None:
        forged = Forged(version=version, deleter=deleter)
        forged.loose().delete_from_pthread()
        assert forged.deleted == 1
        if deleter == "python":
            assert forged.deleter_threads != (threading.get_ident(),)

    def test_second_call_is_seen(self, deleter: Any, version: Any) -> None:
        forged = Forged(version=version, deleter=deleter)
        forged.loose().delete()
        owned = forged.loose()
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(owned.deleter)
        address = owned.hand_over()
        call(address)
        call(address)
        assert forged.deletions == (1, 2) and forged.deleted == 3

    def test_many_threads(self, deleter: Any, version: Any) -> None:
        forged = Forged(version=version, deleter=deleter)

        def work() -> None:
            for _ in range(100):
                forged.loose().delete(gil=False)
                np.from_dlpack(Producer(forged))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert forged.made == 800 and forged.deleted == 800


def test_counts_survive_many_tensors() -> None:
    forged = Forged((2,))
    alive = [np.from_dlpack(Producer(forged)) for _ in range(1000)]
    assert (forged.made, forged.deleted) == (1000, 0)
    alive.clear()
    assert forged.deleted == 1000
    for _ in range(1000):
        forged.capsule()
    assert (forged.made, forged.deleted) == (2000, 2000)


def test_python_deleter_leaves_nonsense_behind() -> None:
    forged = Forged((3,), deleter="python")
    owned = forged.loose()
    tensor = it.DLManagedTensorVersioned.from_address(owned.address).dl_tensor
    owned.delete()
    assert (tensor.data, tensor.shape, tensor.ndim) == (None, None, -1)


def test_capsule_dying_while_an_error_unwinds_does_not_eat_the_error() -> None:
    forged = Forged()
    with pytest.raises(TypeError, match="int\\(\\) argument"):
        int(forged.capsule())
    assert forged.deleted == 1


def test_null_deleter() -> None:
    forged = Forged((2,), deleter="null")
    array = np.from_dlpack(Producer(forged))
    assert array.tolist() == [0, 0]
    capsule = Capsule(forged.capsule())
    assert not capsule.has_deleter and "no deleter" in repr(capsule)
    capsule.consume().delete_from_pthread()
    assert forged.deleted == 0


def test_free_deleter_carries_its_own_copy() -> None:
    forged = Forged((4,), (it.UINT, 8, 1), data=b"wxyz", deleter="free")
    array = np.from_dlpack(Producer(forged))
    assert array.tobytes() == b"wxyz"
    array[0] = 0
    assert bytes(forged.memory) == b"wxyz"
    forged.loose().delete_from_pthread()
    with pytest.raises(RuntimeError, match="not counted"):
        forged.deleted  # noqa: B018


@pytest.mark.parametrize("name", ["dltensor", "dltensor_versioned", "used_dltensor", "tensor", "", None])
def test_any_name(name: str | None) -> None:
    forged = Forged()
    capsule = Capsule(forged.capsule(name))
    assert capsule.name == (name if name != "" else "dltensor_versioned")
    del capsule
    assert forged.deleted == (0 if name == "used_dltensor" else 1)


def test_fields_are_stored_as_ordered() -> None:
    forged = Forged(
        (2**40, -1), (99, 3, 0), strides=None, data=0xDEAD, device=(77, -5), byte_offset=2**64 - 4, flags=2**63
    )
    capsule = Capsule(forged.capsule())
    assert capsule.fields() == {
        "data": 0xDEAD, "device": (77, -5), "dtype": (99, 3, 0), "ndim": 2, "shape": (2**40, -1), "strides": None,
        "byte_offset": 2**64 - 4,
    }  # fmt: skip
    assert capsule.flags == 2**63


def test_numpy_refusal_leaves_the_capsule_to_its_destructor() -> None:
    forged = Forged((3,), (it.FLOAT, 32, 2))
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(Producer(forged))
    assert forged.deletions == (1,)


@pytest.mark.parametrize("deleter", ["free", "count"])
def test_alive_at_exit(torch: Any, deleter: str) -> None:
    script = (
        "import torch, numpy, interop.testing as it\n"
        f"f = it.Forged(deleter={deleter!r})\n"
        "t = torch.from_dlpack(it.Producer(f)); n = numpy.from_dlpack(it.Producer(f)); c = f.capsule()\n"
        "import builtins; builtins.keep = (t, n, c)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- producers --------------------------------------------------------------------------------------------------------


def test_producer_notes_the_keywords_that_were_given() -> None:
    producer = Producer(Forged())
    np.from_dlpack(producer)
    assert len(producer.calls) == 1
    assert producer.calls[0]["max_version"] == (1, 0)
    producer.__dlpack__(stream=None)
    assert producer.calls[1] == {"stream": None}


@pytest.mark.parametrize("keywords", [(), ("stream",), ("stream", "max_version")])
def test_keyword_limited_producer_is_refused_by_python_itself(keywords: tuple[str, ...]) -> None:
    producer = Producer(Forged(), keywords)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'copy'"):
        producer.__dlpack__(copy=True)
    assert producer.calls == []
    assert Capsule.of(producer, **dict.fromkeys(keywords)).name == "dltensor"
    assert np.from_dlpack(producer).shape == (4,)  # NumPy tries again without keywords


def test_positional_stream() -> None:
    producer = Producer(Forged(), ("stream",), style="positional")
    producer.__dlpack__(-1)
    assert producer.calls == [{"stream": -1}]
    with pytest.raises(TypeError, match="positional"):
        Producer(Forged()).__dlpack__(-1)


def test_open_ended_producer() -> None:
    producer = Producer(Forged(), (), open_ended=True)
    producer.__dlpack__(anything=1)
    assert producer.calls == [{"anything": 1}]


def test_one_type_per_signature() -> None:
    kind = it.producer_type(("stream",))
    assert type(Producer(Forged(), ("stream",))) is kind is it.producer_type(("stream",))
    assert it.producer_type(("copy",)) is not kind
    assert it.producer_type(("stream",), fresh=True) is not kind
    assert isinstance(kind(Forged()), Producer)


@pytest.mark.parametrize(
    ("versions", "asked", "name"),
    [
        ("negotiate", None, "dltensor"),
        ("negotiate", (0, 8), "dltensor"),
        ("negotiate", (1, 0), "dltensor_versioned"),
        ("negotiate", (2, 0), "dltensor_versioned"),
        ("legacy", (1, 0), "dltensor"),
        ("versioned", None, "dltensor_versioned"),
    ],
)
def test_version_negotiation(versions: Any, asked: Any, name: str) -> None:
    assert Capsule.of(Producer(Forged(), versions=versions), max_version=asked).name == name


def test_errors_and_lies() -> None:
    error = TypeError("from the body")
    producer = Producer(Forged(), error=error)
    with pytest.raises(TypeError) as caught:
        producer.__dlpack__()
    assert caught.value is error and producer.calls == [{}]
    assert Producer(Forged(), device=(2, 1)).__dlpack_device__() == (2, 1)
    assert Producer(Forged(), device="cpu").__dlpack_device__() == "cpu"
    with pytest.raises(BufferError):
        Producer(Forged(), device=BufferError()).__dlpack_device__()
    assert Producer(Forged(), returns=3).__dlpack__() == 3


def test_without_device() -> None:
    producer = it.WithoutDevice(Forged())
    assert not hasattr(producer, "__dlpack_device__")
    assert Capsule.of(producer, max_version=(1, 0)).versioned and producer.calls == [{"max_version": (1, 0)}]


def test_forwarder_forces_and_drops_keywords() -> None:
    producer = Producer(Forged())
    forwarder = Forwarder(producer, max_version=None, dl_device=it.ABSENT)
    assert not Capsule.of(forwarder, max_version=(1, 0), dl_device=(1, 0), copy=False).versioned
    assert forwarder.calls == [{"max_version": (1, 0), "dl_device": (1, 0), "copy": False}]
    assert producer.calls == [{"max_version": None, "copy": False}]
    assert forwarder.__dlpack_device__() == (1, 0)


def test_array_interfaces_show_only_the_dictionary() -> None:
    source = np.arange(3)
    array = np.asarray(it.ArrayInterface(source.__array_interface__, source))
    array[0] = 8
    assert source[0] == 8
    shown = {"version": 3}
    assert it.CudaArrayInterface(shown).__cuda_array_interface__ is shown


# --- the exchange table -----------------------------------------------------------------------------------------------


def test_torch_table(torch: Any) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")
    table = it.exchange_table(torch.Tensor)
    assert table.version[0] == 1 and table.chain[0] == table.version and table.at_major(2) is None
    assert all(table.slots.values())
    assert "from_py" in repr(table)

    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    with table.from_py(tensor) as owned:
        assert (owned.shape, owned.strides, owned.device) == ((3, 2), (1, 3), (it.CPU, 0))
        assert owned.data + owned.byte_offset == tensor.data_ptr()
    borrowed = table.borrow(tensor)
    assert (borrowed["shape"], borrowed["dtype"]) == ((3, 2), (it.FLOAT, 32, 1))
    assert table.stream((it.CPU, 0)) == 0

    back = table.to_py(table.from_py(tensor))
    assert type(back) is torch.Tensor and back.data_ptr() == tensor.data_ptr()
    count = sys.getrefcount(back)  # not inside an assert: pytest keeps references there
    assert count == 2

    with pytest.raises((TypeError, RuntimeError, BufferError, ValueError)):
        table.from_py(torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (2, 2), check_invariants=True))


@pytest.mark.parametrize("gil", [True, False])
def test_torch_allocator(torch: Any, gil: bool) -> None:
    table = it.exchange_table(torch.Tensor)
    with table.allocate((2, 3), (it.FLOAT, 64, 1), gil=gil) as owned:
        assert (owned.shape, owned.dtype, owned.nbytes) == ((2, 3), (it.FLOAT, 64, 1), 48)
    with pytest.raises(it.AllocatorError) as caught:
        table.allocate((2,), (99, 8, 1), gil=gil)
    assert caught.value.kind and caught.value.message


def test_to_py_takes_forged_tensors(torch: Any) -> None:
    forged = Forged((4,))
    tensor = it.exchange_table(torch.Tensor).to_py(forged.loose())
    tensor[1] = 3
    assert forged.memory.cast("f")[1] == 3 and forged.deleted == 0
    del tensor
    assert forged.deleted == 1


def test_table_is_asked_of_the_type() -> None:
    with pytest.raises(TypeError, match="expected a type"):
        it.exchange_table(3)
    with pytest.raises(AttributeError):
        it.exchange_table(int)
    with pytest.raises(ValueError):
        it.exchange_table(Forged().capsule())


def test_forged_table_round_trip() -> None:
    forged = Forged((2, 2))
    forger = it.ForgedTable(
        from_py=lambda obj: forged,
        borrow=lambda obj: forged,
        to_py=lambda owned: owned,
        stream=lambda device: device[1] + 100,
        allocate=lambda fields: Forged(fields["shape"], fields["dtype"]),
    )
    cls = forger.make_type()
    table = it.exchange_table(cls)
    value = cls()
    with table.from_py(value) as owned:
        assert owned.shape == (2, 2)
    assert forged.deleted == 1
    assert table.borrow(value)["data"] == forged.data
    assert forged.made == 1
    assert table.stream((it.CUDA, 3)) == 103
    with table.to_py(forged.loose()) as owned:
        assert owned.shape == (2, 2)
    with table.allocate((5,), gil=False) as owned:
        assert owned.shape == (5,)
    assert [slot for slot, _ in forger.calls] == ["from_py", "borrow", "stream", "to_py", "allocate"]
    assert forger.errors == []


def test_forged_table_fails_properly_and_improperly() -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("kept aside")

    forger = it.ForgedTable(from_py="raise", borrow=broken, allocate=broken, error=BufferError("cannot"))
    table = it.exchange_table(cls := forger.make_type())
    with pytest.raises(BufferError, match="cannot"):
        table.from_py(cls())
    with pytest.raises(it.ContractBroken, match="set no exception"):
        table.borrow(cls())
    with pytest.raises(it.AllocatorError, match="ValueError: kept aside"):
        table.allocate((1,))
    with pytest.raises(NotImplementedError, match="to_py_object_no_sync is NULL"):
        table.to_py(Forged().loose())
    assert len(forger.errors) == 2


def test_forged_table_chain() -> None:
    old = it.ForgedTable(from_py=lambda obj: Forged())
    new = it.ForgedTable(version=(2, 0), previous=it.ForgedTable(version=(3, 1), previous=old))
    table = it.exchange_table(new.make_type())
    assert table.chain == ((2, 0), (3, 1), (1, 3))
    with pytest.raises(it.Malformed, match="layout behind the header"):
        table.slots  # noqa: B018
    found = table.at_major(1)
    assert found is not None and found.address == old.address and "2.0 <- 3.1 <- 1.3" in repr(table)


def test_no_other_library_is_imported() -> None:
    package = str(Path(it.__file__).parent)
    script = (
        "import sys, types\n"
        "sys.modules['interop'] = stub = types.ModuleType('interop'); stub.__path__ = [sys.argv[1]]\n"
        "import interop.testing\n"
        "print(sorted(m for m in sys.modules if m.startswith(('numpy', 'torch', 'jax', 'interop.'))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(package).parent)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = ["abi", "capsule", "exchange", "forged", "native", "producers"]
    assert done.stdout.strip() == repr(["interop.testing", *(f"interop.testing.{name}" for name in names)])
