"""Who is freed when: deleters once on every path and in every order, the collector, reused objects, threads. Processes: test_process.py."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import run, torch

import interop
from interop import ExchangeError
from interop import testing as it
from interop.testing import Capsule, Consumed, Forged, ForgedTable, Producer, exchange_table

TABLE = exchange_table(interop.Tensor)
KINDS = pytest.mark.parametrize("version", [None, (1, 3)], ids=["legacy", "versioned"])
DELETERS = pytest.mark.parametrize("deleter", ["count", "python"])


def references(x: Any) -> int:
    gc.collect()
    return sys.getrefcount(x) - 1      # less the argument's own


# --- every order ------------------------------------------------------------------------------------------------------


@KINDS
@DELETERS
@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=lambda o: "".join(map(str, o)))
def test_every_order_of_dropping_frees_once_and_last(order: tuple[int, ...], version: Any, deleter: Any) -> None:
    """SPEC X-OWN-2, X-OWN-3, X-OWN-7"""
    forged = Forged((4,), version=version, deleter=deleter)
    producer = Producer(forged)
    capsule = producer.__dlpack__(**({} if version is None else {"max_version": (1, 3)}))
    t = interop.as_tensor(capsule)
    things: list[Any] = [producer, capsule, t, t[1:], t.__dlpack__(max_version=(1, 3))]
    del producer, capsule, t
    holders = {2, 3, 4}
    for i in order:
        things[i] = None
        holders.discard(i)
        assert forged.deletions == ((0,) if holders else (1,))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda o: "".join(map(str, o)))
def test_an_array_lives_as_long_as_anything_made_from_it(order: tuple[int, ...]) -> None:
    """SPEC X-OWN-7, X-TO-9"""
    array = np.arange(6.0).reshape(2, 3)
    gone = weakref.ref(array)
    t = interop.as_tensor(array)
    owned = Capsule.of(t, max_version=(1, 3)).consume()
    things: list[Any] = [array, t, t[1:].permute(1, 0), owned]
    del array, t, owned
    for n, i in enumerate(order):
        assert gone() is not None
        if i == 3:
            things[3].delete()
        things[i] = None
        assert (gone() is None) is (n == 3)


@KINDS
def test_chains_of_reexports_free_the_source_last(version: Any) -> None:
    """SPEC X-OWN-2, X-OWN-7"""
    forged = Forged((4,), version=version)
    chain = [interop.as_tensor(forged.capsule())]
    for i in range(20):
        chain.append(interop.as_tensor(chain[-1].__dlpack__(max_version=(1, 3) if i % 2 else None))[::1])
    random.Random(1).shuffle(chain)
    while chain:
        assert forged.deletions == (0,)
        chain.pop()
    assert forged.deletions == (1,)


def test_a_very_long_chain_of_reexports_can_be_dropped() -> None:
    """SPEC X-OWN-2: without a stack frame for each link."""
    code = """
import interop, numpy, weakref
array = numpy.zeros(3)
gone = weakref.ref(array)
t = interop.as_tensor(array)
del array
for _ in range(300_000):
    t = interop.as_tensor(t.__dlpack__())
del t
assert gone() is None
"""
    assert run(code, ok=False).returncode == 0


@pytest.mark.parametrize(
    "convert", [lambda t: interop.to(t, "numpy"), np.from_dlpack, lambda t: np.asarray(memoryview(t)), np.asarray], ids=range(4)
)
@KINDS
def test_foreign_arrays_keep_the_source(version: Any, convert: Any) -> None:
    """SPEC X-TO-9, X-OWN-2"""
    forged = Forged((4,), version=version)
    array = convert(interop.as_tensor(forged.capsule()))
    part = array[1:]
    del array
    gc.collect()
    assert forged.deletions == (0,)
    del part
    assert forged.deletions == (1,)


def test_torch_keeps_the_source() -> None:
    """SPEC X-TO-9, X-OWN-2"""
    forged = Forged((4,))
    x = interop.to(Producer(forged), torch.Tensor)
    part = x[1:]
    del x
    assert forged.deletions == (0,)
    del part
    assert forged.deletions == (1,)


# --- what the deleter may be ------------------------------------------------------------------------------------------


@KINDS
def test_a_null_deleter_is_nothing_to_call(version: Any) -> None:
    """SPEC X-OWN-5"""
    forged = Forged((2,), version=version, deleter="null")
    t = interop.as_tensor(forged.capsule())
    view, capsule = t[1:], t.__dlpack__(max_version=(1, 3))
    del t, view, capsule
    with pytest.raises(ExchangeError):
        interop.as_tensor(Forged((-1,), version=version, deleter="null").capsule())
    assert forged.deleted == 0


@KINDS
def test_a_deleter_that_frees_its_struct_is_called_once_and_nothing_read_after(version: Any) -> None:
    """SPEC X-OWN-2; field report B19: a second call would be a double free."""
    for _ in range(300):
        t = interop.as_tensor(Forged((3, 2), version=version, data=bytes(24), deleter="free").capsule())
        view = t[1:]
        del t
        assert bytes(view) == bytes(16)
        del view
        with pytest.raises(ExchangeError):
            interop.as_tensor(Forged((3, -1), version=version, deleter="free").capsule())


@DELETERS
def test_an_error_on_its_way_up_survives_the_deleter(deleter: Any) -> None:
    """SPEC X-OWN-6"""
    forged = Forged(deleter=deleter)

    def fail() -> None:
        t = interop.as_tensor(forged.capsule())
        capsule = t.__dlpack__(max_version=(1, 3))
        assert t.ndim == 1 and capsule
        del t
        raise KeyError("on its way")

    with pytest.raises(KeyError, match="on its way"):
        fail()
    assert forged.deletions == (1,)


def test_an_error_that_is_pending_in_c_survives_the_drop() -> None:
    """SPEC X-OWN-6: the capsule dies inside a C function that has set an error already."""
    array = np.zeros(3)
    before = references(array)
    with pytest.raises(TypeError, match="int\\(\\) argument"):
        int(interop.as_tensor(array).__dlpack__())
    with pytest.raises(TypeError):
        int([interop.as_tensor(array)])      # type: ignore[call-overload]
    assert references(array) == before


def test_a_weak_reference_callback_may_use_interop() -> None:
    """SPEC X-OWN-6: dropping may run anything, also another drop."""
    seen: list[Any] = []
    owner = type("Owner", (np.ndarray,), {})((4,), "u1")
    t = interop.as_tensor(owner)
    ref = weakref.ref(owner, lambda _: seen.append(interop.as_tensor(np.arange(3))))
    del owner
    del t
    assert ref() is None and len(seen) == 1 and seen[0].shape == (3,)


# --- threads ----------------------------------------------------------------------------------------------------------


@KINDS
def test_the_last_reference_may_go_in_another_thread(version: Any) -> None:
    """SPEC X-OWN-6, X-LIFE-4"""
    forged = Forged(version=version, deleter="python")
    box = [interop.as_tensor(forged.capsule())]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert forged.deletions == (1,) and forged.deleter_threads != (threading.get_ident(),)


EXPORTS: dict[str, Callable[[interop.Tensor], Consumed]] = {
    "legacy": lambda t: Capsule.of(t).consume(),
    "versioned": lambda t: Capsule.of(t, max_version=(1, 3)).consume(),
    "copy": lambda t: Capsule.of(t, max_version=(1, 3), copy=True).consume(),
    "table": TABLE.from_py,
    "allocated": lambda t: TABLE.allocate(t.shape),
}


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
@pytest.mark.parametrize(
    "delete", [Consumed.delete, lambda owned: owned.delete(gil=False), Consumed.delete_from_pthread], ids=["gil", "nogil", "pthread"]
)
def test_our_deleters_may_be_called_from_anywhere(export: Any, delete: Any) -> None:
    """SPEC X-OWN-6, X-OWN-2; field report B22"""
    array = np.arange(5, dtype=np.float32)
    before = references(array)
    t = interop.as_tensor(array)
    for source in (t, t[1:]):
        owned = export(source)
        view_and_tensor = references(array)
        delete(owned)
        assert references(array) <= view_and_tensor
    del t, source
    assert references(array) == before


@pytest.mark.parametrize("name", ["legacy", "versioned", "table"])
def test_a_pthread_that_knows_no_python_frees_what_was_consumed(name: str) -> None:
    """SPEC X-OWN-6: our deleter runs the producer's, with the interpreter lock, on that thread."""
    forged = Forged((4,), deleter="python")
    EXPORTS[name](interop.as_tensor(forged.capsule())).delete_from_pthread()
    assert forged.deletions == (1,) and forged.deleter_threads != (threading.get_ident(),)


@pytest.mark.parametrize("consume", [interop.as_tensor, lambda c: interop.to(c, "numpy")], ids=["as_tensor", "to"])
@KINDS
def test_of_two_threads_with_one_capsule_one_wins(version: Any, consume: Any) -> None:
    """SPEC X-OWN-4, X-LIFE-4"""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            forged = Forged(version=version)
            capsule = forged.capsule()
            start = threading.Barrier(2)
            outcomes: list[Any] = []

            def work(capsule: Any = capsule, start: Any = start, outcomes: Any = outcomes) -> None:
                start.wait()
                try:
                    outcomes.append(consume(capsule))
                except Exception as e:
                    outcomes.append(e)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            losers = [o for o in outcomes if isinstance(o, Exception)]
            assert len(outcomes) == 2 and len(losers) == 1 and isinstance(losers[0], ExchangeError)
            outcomes.clear()
            losers.clear()
            threads.clear()
            del work
            assert forged.deletions == (1,)
    finally:
        sys.setswitchinterval(interval)


def test_many_threads_make_and_drop_at_once() -> None:
    """SPEC X-LIFE-4; field report B34"""
    array = np.arange(24.0).reshape(2, 3, 4)
    forged = Forged((4,))
    before = references(array)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                t = interop.as_tensor(array)
                assert t[1].shape == (3, 4) and t.permute(2, 0, 1).shape == (4, 2, 3)
                assert interop.as_tensor(t.__dlpack__()).ptr == array.ctypes.data
                assert interop.as_tensor(Producer(forged)).shape == (4,)
                assert interop.to(t, "numpy").shape == (2, 3, 4)
                interop.as_tensor(bytearray(8))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        gc.collect()
    for thread in threads:
        thread.join()
    assert failures == [] and references(array) == before
    assert forged.made == forged.deleted == 1200


# --- the garbage collector --------------------------------------------------------------------------------------------


class Speaks:
    """A Python class with DLPack: the capsule owns the array, not the object."""

    def __init__(self) -> None:
        self.array = np.zeros(3)

    def __dlpack__(self, **given: Any) -> Any:
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Array(np.ndarray):
    """Has a ``__dict__``."""


class Bytes(bytearray):
    """Has the buffer protocol and a ``__dict__``."""


class Interface:
    def __init__(self) -> None:
        self.array = np.zeros(3)
        self.__array_interface__ = self.array.__array_interface__


OWNERS: dict[str, Callable[[], Any]] = {
    "dlpack": Speaks,
    "ndarray subclass": lambda: np.zeros(3).view(Array),
    "buffer": lambda: Bytes(8),
    "table": lambda: (made := ForgedTable(borrow=lambda x: Forged(), from_py=lambda x: Forged(), to_py=lambda o: o)).make_type(made=made)(),
    "array interface": Interface,
    "torch": lambda: torch.zeros(3),
    "torch parameter": lambda: torch.nn.Parameter(torch.zeros(3), requires_grad=False),
}


@pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize(
    "hold", [lambda t: t, lambda t: t[1:], lambda t: [t[1:][:1]], lambda t: interop.as_tensor(t, readonly=True)], ids=range(4)
)
def test_an_object_that_holds_a_tensor_over_itself_is_collected(make: Any, hold: Any) -> None:
    """SPEC X-OWN-8"""
    x = make()
    x.tensor = hold(interop.as_tensor(x))
    if hasattr(x, "made"):
        x.made.calls.clear()      # the forger notes what it was called with, for ever
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_tensors_over_arrays_and_capsules_are_not_tracked() -> None:
    """SPEC X-OWN-8"""
    t, u = interop.as_tensor(np.zeros(3)), interop.as_tensor(Forged().capsule())
    assert not any(map(gc.is_tracked, (t, u, t[1:], u[1:])))


def test_weak_references_to_a_tensor_die_with_it() -> None:
    """SPEC X-HOST-9"""
    for make in (lambda: np.zeros(3), lambda: Forged().capsule(), lambda: bytearray(4), lambda: np.zeros(3).view(Array)):
        said: list[int] = []
        t = interop.as_tensor(make())
        a, b = weakref.ref(t), weakref.ref(t, lambda _, said=said: said.append(1))
        assert a() is t
        del t
        assert a() is None and b() is None and said == [1]
        # the object's place is taken again: the old references must not see the new tenant
        u = [interop.as_tensor(make()) for _ in range(5)]
        assert a() is None and len(u) == 5


# --- reused objects ---------------------------------------------------------------------------------------------------


def test_a_reused_tensor_remembers_nothing() -> None:
    """SPEC X-OWN-2, X-VALID-1"""
    ordinary = np.zeros(3, np.int16)
    odd = [
        lambda: interop.as_tensor(Forged((3,), (it.INT, 4, 1), flags=7, byte_offset=1).capsule()),
        lambda: interop.as_tensor(Forged((1,) * 64).capsule()),
        lambda: interop.as_tensor(Forged((2,) * 9, device=(it.VULKAN, 5), byte_offset=9).capsule()),
        lambda: interop.as_tensor(Forged(None, device=(it.CUDA, 1)).capsule(), stream=9),
        lambda: interop.as_tensor(np.zeros((1,) * 30)),
        lambda: interop.as_tensor(np.zeros((2,) * 8).view(Array))[0, ::-1],
        lambda: interop.as_tensor(np.broadcast_to(np.zeros(2), (3, 2)))[None, ..., None],
        lambda: interop.as_tensor(bytearray(5))[::-2],
    ]
    for make in odd:
        for subclass in (False, True):
            crowd = [make() for _ in range(70)]
            del crowd
            for t in [interop.as_tensor(ordinary.view(Array) if subclass else ordinary) for _ in range(80)]:
                assert (t.shape, t.strides, t.dtype, t.device, t.byte_offset) == ((3,), (1,), "int16", "cpu", 0)
                assert (t.readonly, t.copied, t.padded, t.ptr) == (False, False, False, ordinary.ctypes.data)
                assert Capsule.of(t, max_version=(1, 3)).flags == 0


def test_a_view_of_a_view_holds_the_root_and_not_the_view() -> None:
    """SPEC X-OWN-7"""
    for make in (lambda: np.zeros(9), lambda: np.zeros(9).view(Array), lambda: bytearray(9), lambda: Forged((9,)).capsule()):
        first = interop.as_tensor(make())[1:]
        gone = weakref.ref(first)
        second = first[1:]
        del first
        assert gone() is None and second.shape == (7,)


# --- nothing adds up --------------------------------------------------------------------------------------------------


def refuse(t: interop.Tensor) -> None:
    with pytest.raises(ExchangeError):
        t.__dlpack__(dl_device=(2, 0))


LOOPS: dict[str, Callable[[Any], Any]] = {
    "as_tensor": interop.as_tensor,
    "capsule": lambda a: interop.as_tensor(a.__dlpack__(max_version=(1, 3))),
    "legacy": lambda a: interop.as_tensor(a.__dlpack__()),
    "from_dlpack": interop.from_dlpack,
    "reexport": lambda a: interop.as_tensor(interop.as_tensor(a).__dlpack__()),
    "unconsumed": lambda a: interop.as_tensor(a).__dlpack__(max_version=(1, 3)),
    "table": lambda a: TABLE.from_py(interop.as_tensor(a)).delete(),
    "to numpy": lambda a: interop.to(interop.as_tensor(a), "numpy"),
    "asarray": lambda a: np.asarray(interop.as_tensor(a)),
    "to torch": lambda a: interop.to(a, torch.Tensor),
    "views": lambda a: interop.as_tensor(a)[1:].permute(0).view("uint8")[::-1],
    "copy": lambda a: interop.as_tensor(a, copy=True),
    "buffer": lambda a: interop.as_tensor(memoryview(a)),
    "metadata": lambda a: (lambda t: (t.dtype, t.device, t.shape, t.strides, repr(t), t.readonly))(interop.as_tensor(a)),
    "refused": lambda a: refuse(interop.as_tensor(a)),
    "readonly": lambda a: interop.as_tensor(a, readonly=True),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_references_stay_flat(loop: Any) -> None:
    """SPEC X-OWN-2, X-OWN-3, X-OWN-7"""
    array = np.zeros(4, np.float32)
    watched = [array, array.dtype, None, interop.DType("float32"), interop.Device("cpu"), interop.Tensor, np.dtype("f4"), (1, 3), 0, True]
    n = 10_000 if loop is not LOOPS["refused"] else 1000

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(x) for x in watched]

    for _ in range(100):
        loop(array)
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(n):
        loop(array)
    after = counts()
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), list(zip(before, after, strict=True))
    assert abs(sys.getallocatedblocks() - blocks) < 500


class Mallinfo2(ctypes.Structure):
    _fields_ = [*((f"unused{i}", ctypes.c_size_t) for i in range(7)), ("in_use", ctypes.c_size_t), ("rest", ctypes.c_size_t * 2)]


def test_c_memory_stays_flat() -> None:
    """SPEC X-OWN-2: also of shapes that do not fit into the object, and of refusals."""
    mallinfo2 = ctypes.CFUNCTYPE(Mallinfo2)(("mallinfo2", ctypes.CDLL(None)))
    array = np.zeros((1,) * 20)

    def work() -> None:
        for _ in range(2000):
            t = interop.as_tensor(array)
            assert interop.as_tensor(t.__dlpack__())[None].ndim == 21
            with pytest.raises(ExchangeError):
                t.__dlpack__(dl_device=(2, 0))
            interop.as_tensor(t, copy=True)
            np.asarray(t)
            with memoryview(t) as m:
                assert m.ndim == 20

    work()
    gc.collect()
    before = mallinfo2().in_use
    work()
    gc.collect()
    assert mallinfo2().in_use - before < 200_000
