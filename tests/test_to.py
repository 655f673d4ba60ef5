"""interop.to: what may be named as a target, when the object itself comes back, and that every pair of frameworks shares memory."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from support import FRAMEWORKS, address, aligned, elements, forge, jax, jnp, make, need, peek, poke, producer, torch, tvm_ffi

import interop
from interop import Device, ExchangeError, Tensor
from interop.contract import Adapter, register
from interop.registry import unregister

CLASSES: dict[str, Any] = {
    "interop": lambda: Tensor, "numpy": lambda: np.ndarray, "torch": lambda: torch.Tensor, "jax": lambda: jax.Array,
    "tvm_ffi": lambda: tvm_ffi.Tensor,
}  # fmt: skip


@pytest.fixture
def x() -> Any:
    return aligned(np.arange(12, dtype="f4").reshape(3, 4))


# ---- targets ----
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_name_module_type_and_like_give_the_same_class(name: str, x: Any) -> None:
    """SPEC X-TO-1"""
    cls = CLASSES[name]()
    for source in (x, interop.as_tensor(x), torch.from_numpy(x)):
        for y in (
            interop.to(source, name),
            interop.to(source, need(name)),
            interop.to(source, cls),
            interop.to(source, like=make(name, x.copy())),
        ):
            assert isinstance(y, cls) and tuple(y.shape) == (3, 4) and address(y) == x.ctypes.data


def test_submodules_name_their_framework(x: Any) -> None:
    """SPEC X-TO-1"""
    assert isinstance(interop.to(x, need("jax.numpy")), jax.Array) and interop.to(x, np.linalg) is x
    assert isinstance(interop.to(x, need("torch.nn")), torch.Tensor) and isinstance(interop.to(x, interop.contract), Tensor)


def test_a_class_with_from_dlpack_is_a_target(x: Any) -> None:
    """SPEC X-TO-1: job 3 of the users' own code; what it returns is given back as it is."""

    class Image:
        @classmethod
        def from_dlpack(cls, source: Any) -> Image:
            self = cls()
            self.array = np.from_dlpack(source)
            return self

    image = interop.to(x, Image)
    assert type(image) is Image and np.shares_memory(image.array, x)
    assert np.shares_memory(interop.to(x, like=image).array, x)


def test_a_module_with_from_dlpack_is_a_target_by_name_and_itself(x: Any, monkeypatch: Any) -> None:
    """SPEC X-TO-1"""
    module = types.ModuleType("somelib")
    module.from_dlpack = lambda source: ("made", np.from_dlpack(source))  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name="somelib")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "somelib", module)
    for target in (module, "somelib"):
        word, array = interop.to(x, target)
        assert word == "made" and np.shares_memory(array, x)


@pytest.mark.parametrize("place", ["cpu", "cpu:0", Device("cpu"), Device((1, 0))], ids=repr)
def test_a_place_gives_a_tensor_there(place: Any, x: Any) -> None:
    """SPEC X-TO-1"""
    for source in (x, torch.from_numpy(x), interop.as_tensor(x)):
        t = interop.to(source, place)
        assert type(t).__name__ == "Tensor" and t.device == "cpu" and t.ptr == x.ctypes.data and not t.copied


def test_a_frameworks_own_device_object_gives_its_own_array_there(x: Any) -> None:
    """SPEC X-TO-1"""
    assert address(interop.to(x, torch.device("cpu"))) == address(interop.to(x, jax.devices("cpu")[0])) == x.ctypes.data
    assert isinstance(interop.to(x, torch.device("cpu")), torch.Tensor) and isinstance(interop.to(x, jax.devices("cpu")[0]), jax.Array)


@pytest.mark.parametrize("device", ["cpu", Device("cpu"), (1, 0)], ids=repr)
def test_device_cpu_is_where_host_memory_already_is(device: Any, x: Any) -> None:
    """SPEC X-TO-3"""
    for name in ("interop", "numpy", "torch", "jax"):
        assert address(interop.to(x, name, device=device)) == address(interop.to(x, name, device=device, copy=False)) == x.ctypes.data
    assert address(interop.to(x, "torch", device=torch.device("cpu"))) == x.ctypes.data


@pytest.mark.parametrize(("typo", "meant"), [("pytroch", "torch"), ("torhc", "torch"), ("nunpy", "numpy"), ("jaxx", "jax"), ("cupi",
    "cupy"), ("interp", "interop"),
                                             ("vulcan", "vulkan"), ("cuda_mangaed", "cuda_managed")])  # fmt: skip
def test_unknown_names_are_a_value_error_with_the_nearest_one(typo: str, meant: str, x: Any) -> None:
    """SPEC X-TO-1"""
    with pytest.raises(ValueError, match=f"unknown target '{typo}'.*did you mean '{meant}'"):
        interop.to(x, typo)


@pytest.mark.parametrize("name", ["", "qqqqqqqq", "json", "os.path", "gpu:0", "cuda:x", "torch.Tensor", "a b", "é"])
def test_names_like_nothing_are_a_value_error(name: str, x: Any) -> None:
    """SPEC X-TO-1"""
    with pytest.raises(ValueError):
        interop.to(x, name)


@pytest.mark.parametrize("target", [object(), 3, 1.5, [], b"torch", ("torch",), dict, int, lambda t: t], ids=repr)
def test_objects_that_name_no_target_are_a_type_error(target: Any, x: Any) -> None:
    """SPEC X-TO-1"""
    with pytest.raises(TypeError):
        interop.to(x, target)


def test_a_module_without_from_dlpack_is_a_value_error(x: Any) -> None:
    """SPEC X-TO-1"""
    with pytest.raises(ValueError, match="json has no from_dlpack"):
        interop.to(x, need("json"))


def test_a_framework_that_is_not_installed_says_what_to_install(x: Any) -> None:
    """SPEC X-TO-1"""

    class Ghost(Adapter):
        name, module, requires, types = "ghost", "no_such_module_ghost", "ghost-sdk>=2", ("no_such_module_ghost.Array",)

        def from_tensor(self, t: Any, *, place: Any = None, stream: Any = None) -> Any:
            return t

    register(Ghost())
    try:
        for _ in range(2):
            with pytest.raises(ImportError, match=r"ghost is not installed: pip install ghost-sdk>=2"):
                interop.to(x, "ghost")
    finally:
        unregister("ghost")


def test_malformed_arguments_are_type_errors(x: Any) -> None:
    """SPEC X-TO-13, X-TO-7"""
    for words in (
        {"copy": 1},
        {"copy": 0},
        {"copy": "no"},
        {"readonly": 1},
        {"readonly": "yes"},
        {"device": 3},
        {"device": 1.5},
        {"nonsense": 1},
    ):
        with pytest.raises(TypeError):
            interop.to(x, "torch", **words)
        with pytest.raises(TypeError):
            interop.as_tensor(x, **words)
    for call in (lambda: interop.to(x), lambda: interop.to(), lambda: interop.to(x, "torch", like=x), lambda: interop.to(x, None),
                 lambda: interop.to(x, "torch", "cpu"), lambda: interop.to(x=x, target="torch"), lambda: interop.to(x,
                 like=None)):  # fmt: skip
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
        interop.to(x, "cpu", device="cuda:0")


@pytest.mark.parametrize("like", [[1, 2], object(), 3, "torch"], ids=repr)
def test_like_something_that_is_no_array_is_a_type_error(like: Any, x: Any) -> None:
    """SPEC X-TO-7"""
    with pytest.raises(TypeError):
        interop.to(x, like=like)


def test_like_takes_the_device_too() -> None:
    """SPEC X-TO-7: memory on the host does not become like memory elsewhere without a copy."""
    x = np.zeros(4, "f4")
    for like in (forge(device=(2, 0)), forge(device=(7, 0))):
        with pytest.raises(ExchangeError, match=str(like.device)):
            interop.to(x, like=like, copy=False)
    there = forge(device=(7, 0))
    assert interop.to(there, like=forge(device=(7, 0))) is there


def test_a_subclass_of_a_target_type_is_not_quietly_made_something_else(x: Any) -> None:
    """SPEC X-TO-8: to(x, np.matrix) either gives a matrix or says that it cannot."""
    for cls in (np.matrix, np.memmap, torch.nn.Parameter):
        try:
            y = interop.to(x, cls)
        except (TypeError, ExchangeError):
            continue
        assert isinstance(y, cls)


# ---- the same object ----
@pytest.mark.parametrize("name", ["interop", "numpy", "torch", "jax"])
def test_what_already_is_asked_for_comes_back_itself(name: str, x: Any) -> None:
    """SPEC X-TO-2"""
    y = make(name, x)
    for words in ({}, {"copy": False}, {"copy": None}, {"device": "cpu"}, {"readonly": True}, {"device": "cpu", "copy": False}):
        for target in (name, need(name), CLASSES[name](), type(y)):
            assert interop.to(y, target, **words) is y, (target, words)
        assert interop.to(y, like=y, **words) is y
    assert name == "jax" or interop.to(y, name, readonly=False) is y


@pytest.mark.parametrize("name", ["interop", "numpy", "torch", "jax"])
def test_copy_true_is_never_the_same_object_nor_the_same_memory(name: str, x: Any) -> None:
    """SPEC X-TO-6"""
    y = make(name, x)
    z = interop.to(y, name, copy=True)
    assert isinstance(z, CLASSES[name]()) and address(z) != address(y) and peek(z) == peek(y)


def test_subclasses_do_not_come_back_themselves(x: Any) -> None:
    """SPEC X-TO-8: their class may mean something else by the memory."""
    m = np.asmatrix(x)
    assert type(interop.to(m, "numpy")) is np.ndarray and np.shares_memory(interop.to(m, "numpy"), x)
    t = torch.from_numpy(x).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert type(interop.to(t, "torch")) is torch.Tensor and address(interop.to(t, "torch")) == x.ctypes.data
    p = torch.nn.Parameter(torch.from_numpy(x), requires_grad=False)
    assert interop.to(p, "torch") is p


def test_as_tensor_of_a_tensor_is_that_tensor(x: Any) -> None:
    """SPEC X-TO-15"""
    t = interop.as_tensor(x)
    assert interop.as_tensor(t) is t and interop.as_tensor(t, copy=False) is t and interop.as_tensor(t, device="cpu") is t
    assert interop.as_tensor(t, readonly=True) is not t and interop.as_tensor(t, readonly=True).readonly and not t.readonly
    assert interop.as_tensor(t, copy=True).copied and not t.copied


# ---- kind ----
def test_kind_names_the_framework_and_reads_nothing(x: Any) -> None:
    """SPEC X-TO-12"""
    for name in ("interop", "numpy", "torch", "jax"):
        assert interop.kind(make(name, x)) == name
    assert interop.kind(np.asmatrix(x)) == "numpy" and interop.kind(torch.nn.Parameter(torch.ones(1))) == "torch"
    p = producer()
    for nothing in (p, 3, "torch", None, [], object(), np.ndarray, bytearray(3), memoryview(b"")):
        assert interop.kind(nothing) is None
    assert not p.calls and p.device_calls == 0
    assert interop.kind(torch.ones(1, requires_grad=True)) == "torch"


# ---- every pair shares memory ----
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_what_one_side_writes_the_other_reads(source: str, target: str, x: Any) -> None:
    """SPEC X-TO-4, X-TO-10: by address, and by writing on either side, past what jax says of mutability."""
    s = make(source, x)
    t = interop.to(s, target, copy=False, readonly=True if source == "jax" else None)
    assert isinstance(t, CLASSES[target]()) and address(t) == address(s)
    assert tuple(t.shape) == (3, 4) and interop.DType(interop.as_tensor(t).dtype) == "float32"
    assert peek(t) == peek(s) == x.tobytes()
    poke(s, np.full(12, 7, "f4").tobytes())
    assert np.array(interop.as_tensor(t)).tolist() == [[7.0] * 4] * 3
    poke(t, np.full(12, 9, "f4").tobytes())
    assert np.array(interop.as_tensor(s)).tolist() == [[9.0] * 4] * 3


def test_writing_through_the_frameworks_own_ways(x: Any) -> None:
    """SPEC X-TO-4"""
    t, n, i = interop.to(x, "torch"), interop.to(torch.from_numpy(x), "numpy"), interop.as_tensor(x)
    t[0, 0] = 41
    n[1, 1] = 42
    np.asarray(i)[2, 2] = 43
    assert (x[0, 0], x[1, 1], x[2, 2]) == (41, 42, 43) and (t[1, 1], t[2, 2]) == (42, 43)
    j = interop.to(x, "jax")
    x[0, 1] = 44
    assert float(j[0, 1]) == 44


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0, 3), (1, 1, 1), (2, 3, 4), (2,) * 10], ids=str)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_every_shape_arrives(shape: Any, target: str) -> None:
    """SPEC X-TO-10"""
    a = aligned(np.arange(elements(shape), dtype="i4").reshape(shape))
    for source in FRAMEWORKS:
        y = interop.to(make(source, a), target, readonly=True)
        assert tuple(y.shape) == shape and np.array_equal(np.asarray(interop.as_tensor(y)), a)


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_the_result_keeps_the_memory_when_every_other_name_is_gone(target: str) -> None:
    """SPEC X-TO-9"""
    from interop.testing import Forged, Producer

    forged = Forged((4,), (2, 32, 1))
    y = interop.to(Producer(forged), target)
    assert forged.deleted == 0 and tuple(y.shape) == (4,)
    z = interop.to(y, "numpy")
    del y
    assert forged.deleted == 0
    del z
    assert forged.deleted == 1


def test_a_chain_through_every_framework_is_one_memory(x: Any) -> None:
    """SPEC X-TO-4: job 2 of the users' own code, the long way round."""
    y: Any = x
    for name in ("torch", "interop", "tvm_ffi", "numpy", "interop", "torch", "jax"):
        y = interop.to(y, name, copy=False)
    assert address(y) == x.ctypes.data
    b = interop.to(y, "numpy")
    assert not b.flags.writeable and np.shares_memory(x, b) and isinstance(y, jnp.ndarray)
