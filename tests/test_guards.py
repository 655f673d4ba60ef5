"""copy_guard and Route: every copy is seen, or forbidden before it is made. And `accepts`, for functions that take any kind of array."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from typing import Any

import numpy as np
import pytest
from support import address, aligned, forge, jnp, make, producer, run, torch

import interop
from interop import ExchangeError, Route, accepts, copy_guard
from interop.testing import Forged, Producer


def reversed_() -> Any:
    """What torch cannot hold in place: 24 bytes."""
    return aligned(np.arange(6, dtype="f4"))[::-1]


# ---- what is seen ----
def test_a_route_says_source_target_bytes_reason_and_remedy() -> None:
    """SPEC X-GUARD-1: job 11."""
    with copy_guard("log") as routes:
        interop.to(reversed_(), "torch")
    (r,) = routes
    assert isinstance(r, Route) and (r.source, r.target, r.steps, r.copied_bytes) == ("numpy", "torch", ("copy",), 24)
    ((way, reason, remedy),) = r.refused
    assert way == "alias" and "negative strides" in reason and remedy and "copy=None" in remedy
    assert str(r).count("\n") == 0 and all(word in str(r) for word in ("numpy -> torch", "24 bytes", reason))
    with pytest.raises(AttributeError):
        r.copied_bytes = 0  # type: ignore[misc]


def copies() -> dict[str, Any]:
    unaligned, frozen = aligned(np.arange(6, dtype="f4"), off=1), aligned(np.arange(6, dtype="f4"))
    frozen.flags.writeable = False
    t = interop.as_tensor(aligned(np.arange(6, dtype="f4")))
    return {
        "copy=True": lambda: interop.as_tensor(frozen, copy=True), "to copy=True": lambda: interop.to(frozen, "numpy", copy=True),
        "unaligned": lambda: interop.as_tensor(unaligned),
        "readonly=False": lambda: interop.as_tensor(frozen, readonly=False), "read-only to torch": lambda: interop.to(frozen, "torch"),
        "reversed to torch": lambda: interop.to(reversed_(), "torch"), "gaps to jax": lambda: interop.to(aligned(np.zeros((3, 4)))[:,
        ::2], "jax"),
        "unaligned to jax": lambda: interop.to(unaligned, "jax"), "jax to torch": lambda: interop.to(jnp.ones(6), "torch"),
        "dlpack copy": lambda: t.__dlpack__(copy=True),
        "from_dlpack": lambda: interop.from_dlpack(t, copy=True), "np.from_dlpack": lambda: np.from_dlpack(t, copy=True),
        "torch copy": lambda: interop.to(torch.ones(6), "torch", copy=True),
    }  # fmt: skip


@pytest.mark.parametrize("case", copies())
def test_every_copy_is_seen_once_and_can_be_forbidden(case: str) -> None:
    """SPEC X-GUARD-1, X-GUARD-2"""
    with copy_guard("allow") as routes:
        copies()[case]()
    assert [r.steps for r in routes] == [("copy",)] and routes[0].copied_bytes in (24, 48) and routes[0].refused[0][1]
    with copy_guard("disallow") as routes:
        with pytest.raises(ExchangeError, match=r"copy_guard\('disallow'\)"):
            copies()[case]()
    assert routes == []


def test_sharing_is_not_seen() -> None:
    """SPEC X-GUARD-1"""
    a = aligned(np.arange(6, dtype="f4"))
    with copy_guard("disallow") as routes:
        for source in ("numpy", "torch", "interop", "tvm_ffi"):
            for target in ("numpy", "torch", "jax", "interop"):
                interop.to(make(source, a), target)
        interop.as_tensor(a)[::2].permute(0)
        np.asarray(interop.as_tensor(a))
    assert routes == []


def test_a_library_in_between_is_seen_through() -> None:
    """SPEC X-GUARD-1: the copy is made where somebody else asks our Tensor for it."""
    t = interop.as_tensor(aligned(np.arange(6, dtype="f4")))
    with copy_guard("allow") as routes:
        torch.from_dlpack(t, copy=True)
    assert len(routes) == 1


def test_disallow_raises_before_memory_is_allocated() -> None:
    """SPEC X-GUARD-2: a copy of 16 TiB would end otherwise."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1), (2**41,), (0,))
    for ask in (
        lambda: interop.to(huge, "torch"),
        lambda: interop.as_tensor(huge, copy=True),
        lambda: interop.as_tensor(huge).__dlpack__(copy=True),
    ):
        with copy_guard("disallow"), pytest.raises(ExchangeError, match=r"disallow.*17,592,186,044,416 bytes"):
            ask()


def test_disallow_raises_before_a_producer_is_asked_to_cross() -> None:
    """SPEC X-GUARD-2"""
    p = producer()
    with copy_guard("disallow"), pytest.raises(ExchangeError, match="disallow"):
        interop.to(p, "numpy", device="cpu")
    assert not p.calls


def test_disallow_consumes_nothing_that_it_does_not_own() -> None:
    """SPEC X-OWN-2: a producer's capsule that had been taken is freed when the copy is forbidden."""
    forged = Forged((4,), (2, 32, 1), flags=1)
    with copy_guard("disallow"), pytest.raises(ExchangeError):
        interop.to(Producer(forged), "torch")
    assert forged.deleted == forged.made == 1


# ---- scopes ----
def test_guards_nest_and_the_strictest_decides() -> None:
    """SPEC X-GUARD-2"""
    with copy_guard("allow") as outer:
        with copy_guard("disallow") as inner:
            with copy_guard("allow") as innermost:
                with pytest.raises(ExchangeError):
                    interop.to(reversed_(), "torch")
        assert outer == inner == innermost == []
        with copy_guard("log") as logged:
            interop.to(reversed_(), "torch")
        interop.to(reversed_(), "torch")
        assert (len(outer), len(logged)) == (2, 1)
    interop.to(reversed_(), "torch")
    assert len(outer) == 2


def test_a_guard_ends_with_its_block_also_by_an_error() -> None:
    """SPEC X-GUARD-3"""
    with pytest.raises(KeyError):
        with copy_guard("disallow"):
            raise KeyError
    assert interop.to(reversed_(), "torch") is not None


def test_a_thread_started_inside_is_not_guarded_and_not_seen() -> None:
    """SPEC X-GUARD-3"""
    done: list[Any] = []
    with copy_guard("disallow") as routes:
        t = threading.Thread(target=lambda: done.append(interop.to(reversed_(), "torch")))
        t.start()
        t.join()
    assert len(done) == 1 and routes == []


def test_tasks_have_guards_of_their_own() -> None:
    """SPEC X-GUARD-3"""

    async def strict() -> str:
        with copy_guard("disallow"):
            await asyncio.sleep(0)
            try:
                interop.to(reversed_(), "torch")
            except ExchangeError:
                return "refused"
        return "copied"

    async def free() -> str:
        await asyncio.sleep(0)
        interop.to(reversed_(), "torch")
        return "copied"

    async def main() -> list[str]:
        return await asyncio.gather(strict(), free(), strict(), free())

    assert asyncio.run(main()) == ["refused", "copied", "refused", "copied"]


@pytest.mark.parametrize("mode", ["", "LOG", "forbid", None, 3, True])
def test_an_unknown_mode_is_an_error_that_names_the_modes(mode: Any) -> None:
    """SPEC X-GUARD-2"""
    with pytest.raises((ValueError, TypeError), match=r"allow.*log.*disallow"):
        with copy_guard(mode):
            pass


def test_log_writes_one_warning_per_copy_to_the_logger_interop(caplog: Any) -> None:
    """SPEC X-GUARD-2"""
    with caplog.at_level(logging.WARNING, "interop"):
        with copy_guard("allow"):
            interop.to(reversed_(), "torch")
        assert not caplog.records
        with copy_guard("log") as routes:
            interop.to(reversed_(), "torch")
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [("interop", logging.WARNING, str(routes[0]))]


CODE = """
import numpy as np, interop
try:
    interop.as_tensor(np.arange(6, dtype="f4"), copy=True)
    print("copied")
except interop.ExchangeError as e:
    print("refused", e)
"""


@pytest.mark.parametrize(("mode", "out", "err"), [("disallow", "refused copy_guard('disallow')", ""), ("log", "copied",
    "copied 24 bytes"), ("allow", "copied", ""),
                                                  ("", "copied", "")])  # fmt: skip
def test_the_environment_sets_a_guard_for_the_whole_program(mode: str, out: str, err: str) -> None:
    """SPEC X-GUARD-3: job 11, "no code change"."""
    done = run(CODE, INTEROP_COPY_GUARD=mode)
    assert done.stdout.startswith(out) and (err in done.stderr if err else not done.stderr)


def test_the_environments_guard_holds_in_threads_too() -> None:
    """SPEC X-GUARD-3"""
    code = "import threading\ndef f():\n" + CODE.replace("\n", "\n ") + "\nt = threading.Thread(target=f); t.start(); t.join()"
    assert run(code, INTEROP_COPY_GUARD="disallow").stdout.startswith("refused")


def test_an_unknown_mode_in_the_environment_is_an_error_that_names_the_variable() -> None:
    """SPEC X-GUARD-3"""
    done = run("import interop", INTEROP_COPY_GUARD="never", ok=False)
    assert done.returncode and "INTEROP_COPY_GUARD='never'" in done.stderr and "disallow" in done.stderr


def test_copied_is_what_the_tensor_says() -> None:
    """SPEC X-GUARD-4"""
    a = aligned(np.arange(6, dtype="f4"))
    assert not interop.as_tensor(a).copied and interop.as_tensor(a, copy=True).copied
    assert interop.as_tensor(Producer(Forged(flags=2))).copied and interop.as_tensor(aligned(np.zeros(3), off=1)).copied


# ---- accepts ----
@accepts("img", "kernel")
def blur(img: Any, kernel: Any = None, *, sigma: float = 1.0) -> Any:
    """Doc."""
    assert type(img) is np.ndarray and (kernel is None or type(kernel) is np.ndarray)
    return img * 2 if kernel is None else img * kernel.sum() * sigma


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "interop"])
def test_results_come_back_as_the_first_array_came(name: str) -> None:
    """SPEC X-TO-14: job 8."""
    img = make(name, aligned(np.arange(4, dtype="f4")))
    for call in (
        lambda: blur(img, np.ones(2, "f4")),
        lambda: blur(kernel=torch.ones(2), img=img),
        lambda: blur(img, kernel=jnp.ones(2), sigma=1),
    ):
        y = call()
        assert interop.kind(y) == name and np.asarray(interop.as_tensor(y)).tolist() == [0, 2, 4, 6]
    assert interop.kind(blur(img)) == name and interop.kind(blur(img, None)) == name


def test_parameters_arrive_over_the_callers_memory() -> None:
    """SPEC X-TO-14"""
    seen = {}

    @accepts("x", inside="torch")
    def f(x: Any) -> Any:
        seen["at"] = x.data_ptr()
        x += 1
        return x

    a = aligned(np.arange(3.0))
    y = f(a)
    assert seen["at"] == a.ctypes.data and np.shares_memory(y, a) and a.tolist() == [1, 2, 3]


def test_results_in_containers_come_back_too_and_the_rest_is_left_alone() -> None:
    """SPEC X-TO-14"""
    Pair = collections.namedtuple("Pair", "a n")
    x = torch.ones(3)
    results = {
        "tuple": (np.ones(1), 3, None), "list": [np.ones(1), "s"], "dict": {"a": np.ones(1), "n": 3}, "nested": ([np.ones(1)],
        {"d": (np.ones(1),)}),
        "namedtuple": Pair(np.ones(1), 3), "scalar": 2.5, "none": None, "text": "abc", "bytes": b"abc",
    }  # fmt: skip

    @accepts("x")
    def f(x: Any, which: str) -> Any:
        return results[which]

    got = {which: f(x, which) for which in results}
    assert isinstance(got["tuple"][0], torch.Tensor) and got["tuple"][1:] == (3, None) and type(got["tuple"]) is tuple
    assert isinstance(got["list"][0], torch.Tensor) and got["list"][1] == "s" and isinstance(got["dict"]["a"], torch.Tensor)
    assert isinstance(got["nested"][0][0], torch.Tensor) and isinstance(got["nested"][1]["d"][0], torch.Tensor)
    assert type(got["namedtuple"]) is Pair and isinstance(got["namedtuple"].a, torch.Tensor)
    assert [got[w] for w in ("scalar", "none", "text", "bytes")] == [2.5, None, "abc", b"abc"]


def test_without_arrays_nothing_is_converted() -> None:
    """SPEC X-TO-14"""

    @accepts("a", "b")
    def f(a: Any = None, b: Any = None) -> Any:
        return np.ones(1)

    assert type(f()) is np.ndarray and type(f(None, b=None)) is np.ndarray
    assert isinstance(f(None, torch.ones(1)), torch.Tensor)


def test_the_wrapped_function_keeps_its_name_and_signature_errors() -> None:
    """SPEC X-TO-14"""
    assert blur.__name__ == "blur" and blur.__doc__ == "Doc."
    with pytest.raises(TypeError, match="nonsense"):
        blur(np.ones(1), nonsense=1)
    with pytest.raises(TypeError, match="img"):
        blur()
    with pytest.raises(TypeError, match="shares no memory"):
        blur([1, 2])


def test_methods_and_read_only_inputs() -> None:
    """SPEC X-TO-14"""

    class Filter:
        @accepts("x", inside="torch")
        def __call__(self, x: Any) -> Any:
            assert isinstance(x, torch.Tensor)
            return x + 1

    frozen = np.zeros(3, "f4")
    frozen.flags.writeable = False
    for x in (frozen, jnp.zeros(3)):
        assert interop.kind(Filter()(x)) == interop.kind(x) and np.asarray(x).tolist() == [0, 0, 0]


def test_mistakes_are_found_at_decoration() -> None:
    """SPEC X-TO-14"""
    for make_ in (lambda: accepts("y")(lambda x: x), lambda: accepts(), lambda: accepts("x", inside=3), lambda: accepts("x",
        inside={"cpu": 3}),
                  lambda: accepts(3)(lambda x: x), lambda: accepts(lambda x: x)):  # fmt: skip
        with pytest.raises(TypeError):
            make_()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match=r"f has no parameter 'image'|no parameter 'image'"):

        @accepts("image")
        def f(img: Any) -> Any:
            return img


def test_arrays_on_different_devices_are_refused_by_name() -> None:
    """SPEC X-TO-14"""
    for a, b in ((np.ones(2), forge(device=(7, 0))), (forge(device=(2, 0)), forge(device=(2, 1))), (forge(device=(7, 1)), np.ones(2))):
        with pytest.raises(ExchangeError, match=r"img.*kernel") as e:
            blur(a, b)
        assert str(interop.as_tensor(b).device) in str(e.value)


def test_inside_says_the_framework_per_device() -> None:
    """SPEC X-TO-14"""

    @accepts("x", inside={"cpu": "torch", "vulkan": "interop"})
    def f(x: Any) -> Any:
        return type(x)

    assert f(np.ones(2)) is torch.Tensor
    assert issubclass(f(forge(device=(7, 1))), interop.Tensor)
    with pytest.raises(ExchangeError, match=r"cpu, vulkan.*cuda:0"):
        f(forge(device=(2, 0)))


def test_guards_hold_inside() -> None:
    """SPEC X-KW-9"""
    with pytest.raises(ExchangeError, match="requires grad"):
        blur(torch.ones(3, requires_grad=True))
    assert address(torch.ones(1)) != 0
