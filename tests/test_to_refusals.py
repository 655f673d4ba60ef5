"""Objects of real frameworks whose memory is not what it seems: gradients, bits, sparse, meta, traced, deleted. Refused in plain words."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from support import aligned, jax, jnp, need, torch

import interop
from interop import ExchangeError
from interop.testing import Forged, Producer

TARGETS = ("interop", "numpy", "jax", "tvm_ffi")
ASK = {**{name: lambda x, name=name: interop.to(x, name) for name in TARGETS}, "as_tensor": interop.as_tensor,
    "copy": lambda x: interop.as_tensor(x, copy=True),
       "from_dlpack": interop.from_dlpack, "device": lambda x: interop.to(x, "numpy", device="cpu"),
       "like": lambda x: interop.to(x, like=np.zeros(1)), "readonly": lambda x: interop.to(x, "numpy", readonly=True)}  # fmt: skip


def plain(error: BaseException) -> None:
    """One readable line: no C++ frames."""
    first = str(error).splitlines()[0]
    assert 10 < len(first) < 200 and str(error).count("\n") == 0
    assert "Exception raised from" not in str(error)


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("kind", ["requires grad", "parameter", "computed", "subclass"])
def test_tensors_that_require_grad_are_refused_with_detach(kind: str, ask: str) -> None:
    """SPEC X-KW-9"""
    leaf = torch.ones(3, requires_grad=True)
    x = {"requires grad": leaf, "parameter": torch.nn.Parameter(torch.ones(3)), "computed": leaf * 2,
         "subclass": leaf.as_subclass(type("Mine", (torch.Tensor,), {}))}[kind]  # fmt: skip
    with pytest.raises(ExchangeError, match="requires grad") as e:
        ASK[ask](x)
    assert e.value.remedy == "use x.detach()"
    assert interop.as_tensor(x.detach()).ptr == x.data_ptr()


@pytest.mark.parametrize("ask", ASK)
def test_conjugate_tensors_are_refused_with_resolve_conj(ask: str) -> None:
    """SPEC X-KW-9"""
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with pytest.raises(ExchangeError, match="conjugate") as e:
        ASK[ask](x)
    assert e.value.remedy == "use x.resolve_conj()"
    assert interop.to(x.resolve_conj(), "numpy").tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize("ask", ASK)
def test_negated_tensors_are_refused_with_resolve_neg(ask: str) -> None:
    """SPEC X-KW-9"""
    x = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert x.is_neg()
    with pytest.raises(ExchangeError, match="negative bit") as e:
        ASK[ask](x)
    assert e.value.remedy == "use x.resolve_neg()"
    assert interop.to(x.resolve_neg(), "numpy").tolist() == [-2, 4]


def test_tensors_without_grad_pass_whatever_their_class() -> None:
    """SPEC X-KW-9"""
    mine = torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {}))
    for x in (torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.ones(3, requires_grad=True).detach(), mine):
        assert interop.as_tensor(x).ptr == x.data_ptr()


STRANGE = {
    "sparse": lambda: torch.eye(3).to_sparse(), "csr": lambda: torch.eye(3).to_sparse_csr(), "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "fake": lambda: fake(),
}  # fmt: skip


def fake() -> Any:
    with need("torch._subclasses.fake_tensor").FakeTensorMode():
        return torch.empty(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ask", ["interop", "numpy", "jax", "copy", "from_dlpack"])
@pytest.mark.parametrize("kind", STRANGE)
def test_torch_tensors_without_strided_memory_are_refused_in_one_plain_line(kind: str, ask: str) -> None:
    """SPEC X-TO-11"""
    x = STRANGE[kind]()
    with pytest.raises(ExchangeError) as e:
        ASK[ask](x)
    plain(e.value)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_torch_function_transforms_are_refused_inside(transform: str) -> None:
    """SPEC X-TO-11: inside them a tensor stands for another."""
    seen: list[BaseException] = []

    def f(x: Any) -> Any:
        with pytest.raises(ExchangeError) as e:
            interop.to(x, "numpy")
        seen.append(e.value)
        return (x * x).sum()

    getattr(torch.func, transform)(f)(torch.ones(2, 3) if transform == "vmap" else torch.ones(3))
    assert len(seen) == 1
    plain(seen[0])


def test_a_torch_fx_proxy_is_a_type_error() -> None:
    """SPEC X-KW-5: it has every attribute, and none of them is what it says."""
    seen = []

    def f(x: Any) -> Any:
        with pytest.raises(TypeError) as e:
            interop.as_tensor(x)
        seen.append(e.value)
        return x

    need("torch.fx").symbolic_trace(f)
    assert len(seen) == 1
    plain(seen[0])


@pytest.mark.parametrize("x", [MagicMock(), Mock(), Mock(spec=["__dlpack__", "__dlpack_device__"])], ids=["MagicMock", "Mock", "spec"])
def test_an_object_that_only_pretends_is_a_type_error(x: Any) -> None:
    """SPEC X-KW-5"""
    with pytest.raises(TypeError):
        interop.as_tensor(x)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "eval_shape"])
def test_jax_tracers_are_refused_and_the_error_names_tracing(transform: str) -> None:
    """SPEC X-TO-11: jax's own words, which say where."""
    seen = []

    def f(x: Any) -> Any:
        for ask in (
            interop.as_tensor,
            lambda x: interop.to(x, "numpy"),
            lambda x: interop.to(x, "torch"),
            lambda x: interop.to(x, "interop"),
        ):
            with pytest.raises((TypeError, ExchangeError), match=r"(?i)trace"):
                ask(x)
            seen.append(ask)
        return x.sum()

    if transform == "eval_shape":
        jax.eval_shape(f, jnp.ones(3))
    else:
        getattr(jax, transform)(f)(jnp.ones(3))
    assert len(seen) == 4


def test_a_deleted_jax_array_is_refused_and_says_so() -> None:
    """SPEC X-TO-11"""
    x = jnp.ones(3)
    x.delete()
    for ask in (interop.as_tensor, lambda x: interop.to(x, "torch", readonly=True)):
        with pytest.raises((ExchangeError, RuntimeError, ValueError), match="delete"):
            ask(x)


def test_a_donated_jax_array_is_refused_and_says_so() -> None:
    """SPEC X-TO-11"""
    x = jnp.ones(3)
    jax.jit(lambda v: v + 1, donate_argnums=0)(x).block_until_ready()
    if not x.is_deleted():
        pytest.skip("this jax does not donate on the CPU")
    with pytest.raises((ExchangeError, RuntimeError, ValueError), match=r"delete|donate"):
        interop.as_tensor(x)


def test_a_jax_random_key_is_refused_by_its_own_name() -> None:
    """SPEC X-TO-11: it is a jax.Array and has no memory to share."""
    with pytest.raises((ExchangeError, TypeError)) as e:
        interop.as_tensor(jax.random.key(0))
    assert "bytes-like" not in str(e.value)
    plain(e.value)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_jax_types_that_jax_does_not_export_are_refused(dtype: str) -> None:
    """SPEC X-TO-11"""
    with pytest.raises((ExchangeError, RuntimeError)) as e:
        interop.to(jnp.ones(8, dtype), "numpy")
    plain(e.value)


def test_an_error_of_a_users_from_dlpack_passes_unchanged() -> None:
    """SPEC X-TO-11"""

    class Mine:
        @classmethod
        def from_dlpack(cls, t: Any) -> Any:
            raise KeyError("mine")

    for words in ({}, {"readonly": True}, {"copy": True}):
        with pytest.raises(KeyError, match="mine"):
            interop.to(aligned([1.0]), Mine, **words)


def test_an_error_raised_while_another_is_handled_is_not_lost() -> None:
    """SPEC X-KW-3"""
    try:
        raise LookupError("first")
    except LookupError:
        with pytest.raises(ExchangeError) as e:
            interop.to(np.zeros(3, ">f4"), "torch")
    assert isinstance(e.value.__context__, (LookupError, ValueError))


def test_nothing_is_left_behind_by_a_refusal() -> None:
    """SPEC X-OWN-2: the deleter runs, and the source can be used again."""
    forged = Forged((4,), (17, 4, 1))
    for target in ("numpy", "torch"):
        with pytest.raises(ExchangeError):
            interop.to(Producer(forged), target)
    assert forged.deleted == forged.made == 2
