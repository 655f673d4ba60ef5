"""The contract of adapters: a small one written here, what registration checks, guards, limits, the fast path by a table."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from support import address, aligned, forge, make

import interop
from interop import ExchangeError, copy_guard, registry
from interop.contract import Adapter, Guard, Limits, register
from interop.registry import unregister
from interop.testing import Forged, ForgedTable


class Block:
    """A framework of one class, with its own memory: bytes and a shape."""

    readonly = False

    def __init__(self, memory: Any, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape


class BlockAdapter(Adapter):
    """An adapter of a framework that knows nothing of DLPack: job 9."""

    name, module, requires, types = "block", "test_registry", "block-sdk", (f"{Block.__module__}.Block",)
    reads = "adapter"

    def to_tensor(self, x: Any) -> Any:
        return interop.as_tensor(x.memory).reshape(x.shape)

    def from_tensor(self, t: Any, *, place: Any = None, stream: Any = None) -> Any:
        return Block(np.asarray(t), t.shape)


@pytest.fixture
def using() -> Any:
    """Register adapters for one test: ``using(BlockAdapter, guards=...)``."""
    names = []

    def use(cls: type[Adapter] = BlockAdapter, **fields: Any) -> Adapter:
        adapter = type(cls.__name__, (cls,), fields)()
        register(adapter)
        names.append(adapter.name)
        return adapter

    yield use
    for name in names:
        unregister(name)


@pytest.fixture
def block(using: Any) -> Block:
    using()
    return Block(aligned(np.arange(6, dtype="f4")), (2, 3))


# ---- an adapter in use ----
def test_a_small_adapter_gives_its_framework_every_other_one(block: Block) -> None:
    """SPEC X-TO-16: memory shared both ways, by name, type and like."""
    assert interop.kind(block) == "block"
    for name in ("numpy", "torch", "jax", "interop", "tvm_ffi"):
        y = interop.to(block, name, copy=False)
        assert address(y) == block.memory.ctypes.data and tuple(y.shape) == (2, 3)
        x = make(name, block.memory)
        for back in (interop.to(x, "block", readonly=True), interop.to(x, Block, readonly=True), interop.to(x, like=block, readonly=True)):
            assert type(back) is Block and back.memory.ctypes.data == address(x)
    interop.to(block, "numpy")[0, 0] = 41
    assert block.memory[0] == 41 and interop.to(block, "block") is block and interop.to(block, like=block) is block


def test_an_adapters_refusal_and_its_errors_arrive(using: Any) -> None:
    """SPEC X-TO-11"""

    class Refusing(BlockAdapter):
        def to_tensor(self, x: Any) -> Any:
            raise KeyError("mine")

        def from_tensor(self, t: Any, *, place: Any = None, stream: Any = None) -> Any:
            raise self.refuse("it cannot adopt memory", remedy="use copyto")

    using(Refusing)
    with pytest.raises(ExchangeError) as e:
        interop.to(np.zeros(3), "block")
    assert "block" in e.value.reason and "cannot adopt" in e.value.reason and e.value.remedy == "use copyto"
    with pytest.raises(KeyError, match="mine"):
        interop.as_tensor(Block(b"", (0,)))


def test_to_tensor_must_return_a_tensor(using: Any) -> None:
    """SPEC X-TO-16"""
    using(to_tensor=lambda self, x: x.memory)
    with pytest.raises(TypeError, match=r"block.*to_tensor.*ndarray"):
        interop.as_tensor(Block(np.zeros(3), (3,)))


def test_subclasses_belong_to_the_framework_and_are_not_taken_for_it(block: Block) -> None:
    """SPEC X-TO-8"""
    special = type("Special", (Block,), {})(block.memory, (2, 3))
    assert interop.kind(special) == "block" and interop.to(special, "numpy").shape == (2, 3)
    assert type(interop.to(special, "block")) is Block and interop.to(special, "block") is not special


def test_an_exact_list_says_which_subclasses_are_the_framework_too(using: Any) -> None:
    """SPEC X-TO-2"""
    special = type("Special", (Block,), {"__module__": Block.__module__})(np.zeros(6), (6,))
    using(exact=(f"{Block.__module__}.Block", f"{Block.__module__}.Special"))
    assert interop.to(special, "block") is special


def test_a_place_is_asked_of_every_adapter(using: Any) -> None:
    """SPEC X-TO-1"""

    class Queue:
        pass

    class Placed(BlockAdapter):
        def place(self, obj: Any) -> Any:
            return interop.Device("cpu") if isinstance(obj, Queue) else None

        def from_tensor(self, t: Any, *, place: Any = None, stream: Any = None) -> Any:
            made = Block(np.asarray(t), t.shape)
            made.place = place  # type: ignore[attr-defined]
            return made

    using(Placed)
    q = Queue()
    a = aligned(np.arange(3.0))
    made = interop.to(a, q)
    assert type(made) is Block and made.place is q and np.shares_memory(made.memory, a)
    assert interop.to(a, "numpy", device=q) is a


# ---- registration ----
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"name": 3}, "name"), ({"name": ""}, "name"), ({"name": "two words"}, "name"), ({"types": "test.Block"}, "types"),
    ({"types": ("Block",)}, "types"),
    ({"types": (3,)}, "types"), ({"types": 3}, "types"), ({"exact": "test.Block"}, "exact"), ({"exact": (3,)}, "exact"),
    ({"reads": "magic"}, "reads"), ({"reads": None}, "reads"),
    ({"to_tensor": Adapter.to_tensor}, "to_tensor"), ({"from_tensor": Adapter.from_tensor}, "from_tensor"), ({"guards": (3,)}, "guards"),
    ({"guards": "requires_grad"}, "guards"),
    ({"guards": (Guard("a", "b", "c"),) * 9}, "guards"), ({"accepts": {"readonly": False}}, "accepts"), ({"accepts": Limits(alignment=0)},
    "alignment"),
    ({"accepts": Limits(alignment=3)}, "alignment"), ({"accepts": Limits(alignment="64")}, "alignment"),
    ({"accepts": Limits(devices={1})}, "devices"), ({"table": 3}, "table"),
    ({"module": 3}, "module"), ({"requires": 3}, "requires"), ({"reads": "table", "table": None}, "table"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "word"), MISTAKES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_mistake_is_found_at_registration_and_named(fields: Any, word: str) -> None:
    """SPEC X-TO-16: and nothing of the adapter is left."""
    before = registry.names()
    try:
        with pytest.raises((TypeError, ValueError), match=word):
            register(type("Wrong", (BlockAdapter,), fields)())
        assert registry.names() == before and interop.kind(Block(b"", (0,))) is None
    finally:
        for name in set(registry.names()) - set(before):
            unregister(name)


@pytest.mark.parametrize("nothing", [None, 3, object(), BlockAdapter, "block"], ids=repr)
def test_only_adapters_are_registered(nothing: Any) -> None:
    """SPEC X-TO-16"""
    with pytest.raises(TypeError):
        register(nothing)


@pytest.mark.parametrize("name", ["torch", "jax", "numpy", "interop", "block", "cpu"])
def test_a_name_that_is_taken_is_never_overwritten(name: str, using: Any) -> None:
    """SPEC X-TO-16: neither that of a framework nor "cpu", which it would hide."""
    using()
    before = registry.names()
    try:
        with pytest.raises(ValueError, match=name):
            register(type("Second", (BlockAdapter,), {"name": name, "types": ("test_registry.Other",)})())
        assert registry.names() == before and type(interop.to(np.zeros(3), "block")) is Block
    finally:
        for left in set(registry.names()) - set(before):
            unregister(left)


def test_a_type_that_is_taken_is_never_overwritten(using: Any) -> None:
    """SPEC X-TO-16"""
    using()
    before = registry.names()
    for taken in (BlockAdapter.types[0], "torch.Tensor", "numpy.ndarray"):
        try:
            with pytest.raises(ValueError, match=taken):
                register(type("Second", (BlockAdapter,), {"name": "second", "types": ("test_registry.Other", taken)})())
            assert registry.names() == before
        finally:
            for left in set(registry.names()) - set(before):
                unregister(left)
    using(BlockAdapter, name="third", types=("test_registry.Other",))  # the failed ones left nothing behind


def test_registering_and_unregistering_take_effect_at_once() -> None:
    """SPEC X-KW-8: also for types and names that were asked about before."""
    x = Block(np.zeros(3), (3,))
    for _ in range(3):
        assert interop.kind(x) is None
        with pytest.raises(TypeError):
            interop.as_tensor(x)
        with pytest.raises(ValueError):
            interop.to(np.zeros(3), "block")
        register(BlockAdapter())
        assert interop.kind(x) == "block" and interop.as_tensor(x).shape == (3,) and type(interop.to(np.zeros(3), "block")) is Block
        unregister("block")
    with pytest.raises(KeyError):
        unregister("block")


# ---- guards ----
class Flagged(Block):
    __module__ = Block.__module__
    slow = property(lambda self: self.flag)

    def asked(self) -> Any:
        return self.flag


@pytest.mark.parametrize("attribute", ["flag", "slow", "asked"], ids=["attribute", "property", "method"])
@pytest.mark.parametrize("reads", ["adapter", "dlpack", "buffer"])
def test_guards_are_attributes_properties_or_methods(attribute: str, reads: str, using: Any) -> None:
    """SPEC X-KW-9"""
    using(guards=(Guard(attribute, "it is flagged", "unflag it"),), reads=reads, types=("test_registry.Flagged", "test_registry.Block"))
    cls = (
        Flagged
        if reads == "adapter"
        else type("Flagged", (Flagged,), {"__dlpack__": lambda s, **k: s.memory.__dlpack__(**k), "__dlpack_device__": lambda s: (1, 0)})
    )
    x = cls(aligned(np.zeros(3)), (3,))
    for truth in (True, 1, "yes", [0]):
        x.flag = truth
        for ask in (
            interop.as_tensor,
            lambda x: interop.to(x, "torch"),
            lambda x: interop.as_tensor(x, copy=True),
            lambda x: interop.to(x, "numpy", readonly=True),
        ):
            with pytest.raises(ExchangeError, match="it is flagged") as e:
                ask(x)
            assert e.value.remedy == "unflag it"
        assert interop.to(x, "block", device=None) is not None if type(x) is Block else True
    for falsehood in (False, 0, None, ""):
        x.flag = falsehood
        assert interop.as_tensor(x).shape == (3,)


def test_a_guard_that_raises_passes_its_error_on(using: Any) -> None:
    """SPEC X-KW-3"""
    using(guards=(Guard("broken", "r", "m"),))
    x = type("Broken", (Block,), {"broken": property(lambda self: 1 / 0)})(np.zeros(3), (3,))
    with pytest.raises(ZeroDivisionError):
        interop.as_tensor(x)
    assert interop.as_tensor(Block(np.zeros(3), (3,))).shape == (3,)  # a type without the attribute is not guarded


# ---- limits ----
LIMITS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "readonly": ({"readonly": False}, lambda: np.broadcast_to(aligned(np.arange(3.0)), (2, 3)), "read-only"),
    "negative": ({"negative_strides": False}, lambda: aligned(np.arange(6.0))[::-1], "negative"), "strided": ({"strided": False},
    lambda: aligned(np.arange(6.0))[::2], "strides"),
    "alignment 64": ({"alignment": 64}, lambda: aligned(np.arange(6.0), off=8), "64"), "alignment 4096": ({"alignment": 4096},
    lambda: aligned(np.arange(6.0), alignment=4096, off=64), "4096"),
    "all": ({"readonly": False, "negative_strides": False, "strided": False, "alignment": 256}, lambda: aligned(np.arange(8.0),
    off=8)[::-2], "negative|strides"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_what_is_beyond_a_limit_is_refused_or_copied_within_all_of_them(case: str, using: Any) -> None:
    """SPEC X-TO-4, X-TO-5"""
    limits, array, words = LIMITS[case]
    given = []
    using(accepts=Limits(**limits), from_tensor=lambda self, t, **k: given.append(t) or Block(np.asarray(t), t.shape))
    a = array()
    with pytest.raises(ExchangeError, match=words) as e:
        interop.to(a, "block", copy=False)
    assert e.value.remedy and not given
    with copy_guard("allow") as routes:
        made = interop.to(a, "block")
    (t,) = given
    assert len(routes) == 1 and np.array_equal(made.memory, a) and t.copied and not t.readonly and t.is_contiguous()
    assert t.ptr % limits.get("alignment", 1) == 0


def test_what_is_within_the_limits_is_shared(using: Any) -> None:
    """SPEC X-TO-4"""
    using(accepts=Limits(readonly=False, negative_strides=False, strided=False, alignment=64))
    a = aligned(np.arange(24.0).reshape(2, 3, 4))
    for view in (a, a.T, a.transpose(1, 0, 2), a.reshape(4, 6), a[:0], a[:, :, :1][:1, :1]):
        made = interop.to(view, "block", copy=False)
        assert not view.size or made.memory.ctypes.data == a.ctypes.data


def test_devices_that_are_not_taken_are_refused_also_with_a_copy(using: Any) -> None:
    """SPEC X-TO-3"""
    using(accepts=Limits(devices=frozenset({7})), from_tensor=lambda self, t, **k: t)
    for copy in (None, False, True):
        with pytest.raises(ExchangeError, match="block cannot use"):
            interop.to(np.zeros(3), "block", copy=copy)
    there = forge(device=(7, 0))
    assert interop.to(there, "block").handle == there.handle


def test_a_framework_that_never_writes_makes_read_only_memory(using: Any) -> None:
    """SPEC X-RO-4"""
    using(accepts=Limits(writable=False))
    with pytest.raises(ExchangeError, match="block"):
        interop.to(np.zeros(3), "block", readonly=False)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    assert interop.to(frozen, "block", copy=False).memory.ctypes.data == frozen.ctypes.data


# ---- the fast path: an exchange table ----
@pytest.fixture
def tabled(using: Any, monkeypatch: Any) -> Any:
    """A framework whose class has an exchange table; its objects lie over `forged`."""
    module = types.ModuleType("tabled")
    forged = Forged((4,), (2, 32, 1))
    table = ForgedTable(from_py=lambda x: forged, borrow=lambda x: forged, to_py=lambda managed: ("made", managed))
    module.Array = table.make_type("Array", __module__="tabled")  # type: ignore[attr-defined]
    module.forged, module.calls, module.errors = forged, table.calls, table.errors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tabled", module)

    class Tabled(Adapter):
        name, types, reads, table = "tabled", ("tabled.Array",), "table", "Array"
        guards = (Guard("flag", "it is flagged", "unflag it"),)

    using(Tabled)
    return module


def test_a_table_reads_without_asking_for_anything_else(tabled: Any) -> None:
    """SPEC X-KW-7"""
    x = tabled.Array()
    t = interop.as_tensor(x)
    assert t.ptr == tabled.forged.data and {slot for slot, _ in tabled.calls} <= {"borrow", "stream"} and not tabled.errors
    assert interop.kind(x) == "tabled" and interop.to(x, "torch").data_ptr() == t.ptr
    x.flag = True
    with pytest.raises(ExchangeError, match="it is flagged"):
        interop.to(x, "numpy")


def test_a_table_makes_objects_and_owns_what_it_was_given(tabled: Any) -> None:
    """SPEC X-OWN-2"""
    a = aligned(np.arange(4, dtype="f4"))
    before = sys.getrefcount(a)
    word, managed = interop.to(a, "tabled")
    held = sys.getrefcount(a)
    assert held == before + 1 and word == "made" and managed.data == address(a) and managed.shape == (4,)
    managed.delete()
    assert sys.getrefcount(a) == before


def test_a_table_that_fails_to_make_leaves_nothing_behind(using: Any, monkeypatch: Any) -> None:
    """SPEC X-OWN-2: whether or not the failing slot ran the deleter."""
    for i, to_py in enumerate((lambda managed: 1 / 0, lambda managed: (managed.delete(), 1 / 0))):
        module = types.ModuleType(f"failing{i}")
        module.Array = ForgedTable(from_py=lambda x: Forged(), borrow=lambda x: Forged(), to_py=to_py).make_type(
            "Array", __module__=module.__name__
        )  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        using(Adapter, name=module.__name__, types=(f"failing{i}.Array",), reads="table", table="Array")
        a = aligned(np.arange(4, dtype="f4"))
        before = sys.getrefcount(a)
        with pytest.raises(ExchangeError, match=f"failing{i} refused"):
            interop.to(a, module.__name__)
        assert sys.getrefcount(a) == before
