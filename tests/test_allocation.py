"""Allocations: wrap, views and their bounds, close, ownership. SPEC M-ALLOC-*, M-WRAP-*, M-RETIRE."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import toy
from memkit import clean_toy, run, until

import interop
from interop.testing import Capsule


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


class Owner:
    """Holds bytes; can be referred to weakly."""

    def __init__(self, nbytes: int = 4096) -> None:
        self.array = np.zeros(nbytes, "u1")
        self.address = self.array.ctypes.data


def ring(nbytes: int = 4096, **more: Any) -> tuple[Owner, interop.Allocation]:
    o = Owner(nbytes)
    return o, interop.wrap(o.address, nbytes, device="cpu", owner=o, **more)


# --- wrap ---------------------------------------------------------------------------------------------------------------
def test_a_wrapped_pointer_is_the_memory_itself() -> None:
    """SPEC M-WRAP-PTR"""
    o, a = ring()
    t = a.tensor((16,), "float32", byte_offset=64)
    interop.to(t, "numpy")[3] = 5
    assert o.array[76:80].view("f4")[0] == 5
    assert (a.nbytes, a.handle, str(a.device), t.ptr) == (4096, o.address, "cpu", o.address + 64)


def test_a_camera_ring_is_one_allocation_with_padded_tensors() -> None:
    """SPEC M-WRAP-RING; user job 6"""
    h, w, pitch, slot = 4, 5, 32, 160
    o, a = ring(3 * slot)
    slots = [a.tensor((h, w, 3), "uint8", byte_offset=i * slot, row_pitch=pitch) for i in range(3)]
    for i, t in enumerate(slots):
        assert t.strides == (pitch, 3, 1)
        interop.to(t, "numpy")[...] = i + 1
        assert t.allocation is a
    rows = o.array.reshape(3, slot // pitch, pitch)
    for i in range(3):
        assert (rows[i, :h, :w * 3] == i + 1).all()
        assert (rows[i, :, w * 3:] == 0).all()
    assert (rows[:, h:] == 0).all()


def test_the_last_row_needs_no_padding() -> None:
    """SPEC M-ALLOC-BOUNDS: what is touched counts"""
    _, a = ring(3 * 32 + 15)
    assert a.tensor((4, 5, 3), "uint8", row_pitch=32).shape == (4, 5, 3)
    with pytest.raises(ValueError):
        a.tensor((4, 5, 3), "uint8", row_pitch=32, byte_offset=1)


@pytest.mark.parametrize(("shape", "dtype", "more"), [
    ((4097,), "uint8", {}),
    ((4096,), "uint8", {"byte_offset": 1}),
    ((1,), "uint8", {"byte_offset": 4096}),
    ((1,), "uint8", {"byte_offset": -1}),
    ((1,), "uint8", {"byte_offset": 2**63}),
    ((1,), "uint8", {"byte_offset": 2**64}),
    ((2**62,), "float64", {}),
    ((2**32, 2**32), "uint8", {}),
    ((2, 2), "uint8", {"strides": (2**62, 1)}),
    ((2, 2), "uint8", {"strides": (2**63 - 1, 2**63 - 1)}),
    ((2,), "uint8", {"strides": (-1,)}),
    ((2,), "uint8", {"strides": (-(2**63),)}),
    ((3, 4), "uint8", {"row_pitch": 2**62}),
    ((3, 4), "uint8", {"row_pitch": 2**61}),
    ((3, 4), "uint8", {"row_pitch": 2**64}),
    ((3, 4), "uint8", {"row_pitch": 3}),
    ((3, 4), "uint8", {"row_pitch": -8}),
    ((3, 4), "float32", {"row_pitch": 17}),
    ((), "uint8", {"row_pitch": 1}),
    ((-1,), "uint8", {}),
    ((2,), "uint8", {"strides": (1, 1)}),
    ((1,), "float32", {"byte_offset": 2}),
    ((1,) * 65, "uint8", {}),
])
def test_a_view_outside_the_allocation_is_refused(shape: Any, dtype: str, more: dict[str, Any]) -> None:
    """SPEC M-ALLOC-BOUNDS: ValueError, never an overflow"""
    _, a = ring()
    with pytest.raises(ValueError):
        a.tensor(shape, dtype, **more)


@pytest.mark.parametrize(("offset", "n"), [(2**63 - 2, 2**62), (2**62, 2**62 + 1), (2**63 - 1, 1), (2**63 - 2, 2)])
def test_bounds_hold_where_offset_and_size_overflow_together(driver: toy.Driver, offset: int, n: int) -> None:
    """SPEC M-ALLOC-BOUNDS: handle memory can claim any size"""
    a = interop.wrap(7, 2**63 - 1, device="toy:0", owner=None)
    with pytest.raises(ValueError):
        a.tensor((n,), "uint8", byte_offset=offset)


def test_reversed_views_inside_are_fine() -> None:
    """SPEC M-ALLOC-BOUNDS"""
    o, a = ring()
    o.array[:4] = 1, 2, 3, 4
    t = a.tensor((4,), "uint8", strides=(-1,), byte_offset=3)
    assert interop.to(t, "numpy").tolist() == [4, 3, 2, 1]


def test_strides_and_row_pitch_exclude_each_other() -> None:
    """SPEC M-ALLOC-BOUNDS"""
    with pytest.raises(TypeError, match="not both"):
        ring()[1].tensor((2, 2), "uint8", strides=(2, 1), row_pitch=2)


@pytest.mark.parametrize(("args", "error"), [
    ((0, 1), ValueError), ((-1, 1), ValueError), ((2**64, 1), ValueError), ((2**64 - 1, 8), ValueError), ((4096, -1), ValueError),
    ((4096, 2**63), ValueError), ((4096, 1.5), TypeError), ((4096, True), TypeError), (("x", 1), TypeError), ((True, 1), TypeError),
    ((None, 1), TypeError),
])
def test_wrap_refuses_sizes_and_handles_that_cannot_be(args: tuple[Any, Any], error: type[Exception]) -> None:
    """SPEC M-WRAP-ARGS"""
    with pytest.raises(error):
        interop.wrap(*args, device="cpu", owner=None)


@pytest.mark.parametrize("device", ["nonsense:0", "nonsense", "torch", 3.5])
def test_wrap_and_empty_refuse_an_unknown_device(device: Any) -> None:
    """SPEC M-WRAP-DEVICE: never the CPU by default; field report B59"""
    o = Owner()
    with pytest.raises((ValueError, TypeError)):
        interop.wrap(o.address, 64, device=device, owner=o)
    with pytest.raises((ValueError, TypeError)):
        interop.empty((3,), "uint8", device=device)


@pytest.mark.parametrize("device", ["cuda:0", "vulkan:0", "opencl:0"])
def test_empty_refuses_a_device_that_nobody_allocates_on(device: str) -> None:
    """SPEC M-EMPTY-DEVICE: the bytes are never put somewhere else"""
    try:
        t = interop.empty((3,), "uint8", device=device)
    except interop.ExchangeError:
        return
    assert str(t.device) == device


def test_readonly_memory_gives_readonly_tensors() -> None:
    """SPEC M-WRAP-RO"""
    _, a = ring(readonly=True)
    t = a.tensor((4,), "uint8")
    assert t.readonly
    assert not interop.to(t, "numpy").flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        a.tensor((4,), "uint8", readonly=False)
    with pytest.raises(interop.ExchangeError):
        t.map("write")


# --- release ------------------------------------------------------------------------------------------------------------
def test_on_release_runs_once_when_the_last_tensor_export_and_lease_is_gone() -> None:
    """SPEC M-RETIRE"""
    seen: list[int] = []
    _, a = ring(on_release=lambda: seen.append(1))
    t = a.tensor((16,), "uint8")
    view, array, lease = t[2:], interop.to(t, "numpy"), t.map("read")
    for _ in range(3):
        gc.collect()
        assert seen == []
        if _ == 0:
            del a, t
        elif _ == 1:
            del view, array
    del lease
    gc.collect()
    assert seen == [1]


def test_the_owner_lives_until_release() -> None:
    """SPEC M-RETIRE"""
    o, a = ring()
    alive, t = weakref.ref(o), a.tensor((4,), "uint8")
    del o, a
    assert alive() is not None
    del t
    gc.collect()
    assert alive() is None


def test_an_owner_that_holds_its_tensor_is_collected() -> None:
    """SPEC M-RETIRE: a cycle through the owner is no leak"""
    seen: list[int] = []
    o, a = ring(on_release=lambda: seen.append(1))
    o.tensor = a.tensor((4,), "uint8")         # type: ignore[attr-defined]
    alive = weakref.ref(o)
    del o, a
    gc.collect()
    assert (alive(), seen) == (None, [1])


def test_an_error_in_on_release_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC M-RETIRE"""
    reported: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", reported.append)
    _, a = ring(on_release=lambda: 1 / 0)
    a.close()
    assert [r.exc_type for r in reported] == [ZeroDivisionError]


def test_the_report_of_such_an_error_reaches_stderr() -> None:
    """SPEC M-RETIRE: through Python's own hook"""
    done = run("""
x = np.zeros(8)
interop.wrap(x.ctypes.data, 64, device="cpu", owner=x, on_release=lambda: 1 / 0).close()
print("on")
""")
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "TypeError" not in done.stderr


def test_a_deleter_on_a_foreign_thread_leaves_on_release_to_the_interpreter() -> None:
    """SPEC M-RETIRE: a pthread that Python does not know runs no callback"""
    seen: list[str] = []
    gone = threading.Event()
    _, a = ring(on_release=lambda: (seen.append(threading.current_thread().name), gone.set()))
    consumed = Capsule(a.tensor((4,), "uint8").__dlpack__(max_version=(1, 3))).consume()
    del a
    consumed.delete_from_pthread()
    assert until(gone.is_set)
    assert seen == ["interop-release"]


def test_a_deleter_on_a_python_thread_runs_on_release_there() -> None:
    """SPEC M-RETIRE"""
    seen: list[int] = []
    _, a = ring(on_release=lambda: seen.append(threading.get_ident()))
    consumed = Capsule(a.tensor((4,), "uint8").__dlpack__(max_version=(1, 3))).consume()
    del a
    thread = threading.Thread(target=consumed.delete)
    thread.start()
    thread.join()
    assert until(lambda: seen == [thread.ident])


# --- close --------------------------------------------------------------------------------------------------------------
def test_close_releases_now_and_once() -> None:
    """SPEC M-ALLOC-CLOSE: idempotent"""
    seen: list[int] = []
    _, a = ring(on_release=lambda: seen.append(1))
    t = a.tensor((4,), "uint8")
    a.close()
    a.close()
    assert seen == [1]
    del t, a
    gc.collect()
    assert seen == [1]


USES = {
    "numpy": lambda t: interop.to(t, "numpy"),
    "asarray": np.asarray,
    "buffer": memoryview,
    "capsule": lambda t: t.__dlpack__(max_version=(1, 3)),
    "legacy capsule": lambda t: t.__dlpack__(),
    "torch": lambda t: interop.to(t, "torch"),
    "jax": lambda t: interop.to(t, "jax", readonly=True),
    "tvm_ffi": lambda t: pytest.importorskip("tvm_ffi").from_dlpack(t),
    "torch.from_dlpack": lambda t: pytest.importorskip("torch").from_dlpack(t),
    "array interface": lambda t: np.asarray(type("A", (), {"__array_interface__": t.__array_interface__, "t": t})()),
    "view of an array": lambda t: interop.to(t, "numpy")[1:],
    "slot": lambda t: interop.to(t[1:].reshape(-1), "numpy"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_close_is_refused_while_an_export_is_alive(use: Any) -> None:
    """SPEC M-ALLOC-CLOSE; field report B26"""
    o, a = ring(8192)
    t = a.tensor((64,), "uint8", byte_offset=-o.address % 64)
    try:
        out = use(t)
    except AttributeError:      # the array interface cannot be counted: not offering it is right too
        return
    with pytest.raises(interop.ExchangeError, match="export"):
        a.close()
    del out
    gc.collect()
    a.close()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_tensors_of_closed_memory_refuse(use: Any) -> None:
    """SPEC M-ALLOC-CLOSE"""
    o, a = ring(8192)
    t = a.tensor((64,), "uint8", byte_offset=-o.address % 64)
    view = t[2:]
    a.close()
    for x in (t, view):
        with pytest.raises((interop.ExchangeError, AttributeError), match=r"closed|interface"):
            use(x)
    with pytest.raises(interop.ExchangeError, match="closed"):
        t.map()
    with pytest.raises(interop.ExchangeError, match="closed"):
        interop.copyto(t, np.zeros(64, "u1"))
    with pytest.raises(interop.ExchangeError, match="closed"):
        interop.as_tensor(t, copy=True)
    with pytest.raises(interop.ExchangeError, match="closed"):
        a.tensor((1,), "uint8")
    with pytest.raises(interop.ExchangeError, match="closed"):
        a.export("host")
    assert "closed" in repr(a)
    assert repr(t)


def test_close_is_refused_while_a_lease_is_held() -> None:
    """SPEC M-ALLOC-CLOSE: LeaseError names the holder"""
    _, a = ring()
    lease = a.tensor((8,), "uint8").map("write")
    with pytest.raises(interop.LeaseError, match="write lease"):
        a.close()
    lease.release()
    del lease
    a.close()


def test_close_is_refused_while_queued_work_uses_the_memory(driver: toy.Driver) -> None:
    """SPEC M-ALLOC-CLOSE; field report B31"""
    c = toy.Context()
    t, (_, a) = interop.empty((16,), "uint8", device=c), ring()
    interop.copyto(t, a.tensor((16,), "uint8"))
    for root in (t.allocation, a):
        with pytest.raises(interop.ExchangeError, match="queued"):
            root.close()
    c.queue.run()
    t.allocation.close()
    a.close()


@pytest.mark.parametrize("direction", ["to the device", "from the device"])
def test_host_memory_is_released_after_the_queued_work_that_uses_it(driver: toy.Driver, direction: str) -> None:
    """SPEC M-RETIRE: also where the memory is the host's; field report B21"""
    c, seen = toy.Context(), []
    t = interop.empty((16,), "uint8", device=c)
    _, a = ring(on_release=lambda: seen.append(1))
    host = a.tensor((16,), "uint8")
    # as an adapter whose queue keeps no Tensor alive
    lease = interop.acquire(host, "interop", "read" if direction == "to the device" else "write")
    p = c.fill(t, 1)
    lease.release(p)
    del lease, host, a
    gc.collect()
    assert seen == []
    c.queue.run()
    interop._core.release_ready()
    assert seen == [1]


def test_device_memory_is_freed_after_the_queued_work_that_uses_it(driver: toy.Driver) -> None:
    """SPEC M-RETIRE; field report B31"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    lease = interop.acquire(t, c, "write")
    lease.release(c.fill(t, 1))
    del lease, t
    gc.collect()
    assert driver.calls["free"] == 0
    c.queue.run()
    assert until(lambda: driver.calls["free"] == 1), "nobody looked again after the work had finished"


def test_a_context_is_not_closed_while_memory_of_it_waits_for_queued_work(driver: toy.Driver) -> None:
    """SPEC M-RETIRE: Tensor -> Allocation -> Context, also while work is queued"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    lease = interop.acquire(t, c, "write")
    lease.release(c.fill(t, 1))
    del lease, t
    with pytest.raises(interop.ExchangeError):
        c.close()
    c.queue.run()
    c.close()
    assert driver.calls["free"] == 1


def test_a_context_is_not_closed_while_allocations_live(driver: toy.Driver) -> None:
    """SPEC M-ALLOC-CONTEXT"""
    with toy.Context() as c:
        t = interop.empty((16,), "uint8", device=c)
        with pytest.raises(interop.ExchangeError, match="still live"):
            c.close()
        t.allocation.close()
    assert c.closed
    c.close()
    with pytest.raises(interop.ExchangeError, match="closed"):
        interop.empty((4,), "uint8", device=c)
    assert driver.calls["close_context"] == 1


# --- identity -----------------------------------------------------------------------------------------------------------
def test_views_share_their_allocation() -> None:
    """SPEC M-ALLOC-ROOT"""
    for t in (ring()[1].tensor((4, 4), "uint8"), interop.as_tensor(np.zeros((4, 4))), interop.as_tensor(bytearray(16)).reshape(4, 4)):
        a = t.allocation
        assert t.allocation is a
        assert all(v.allocation is a for v in (t[1:], t.permute(1, 0), t[2][1:], t.reshape(-1), t.view("uint8")))


def test_the_allocation_of_foreign_memory_is_as_large_as_its_root() -> None:
    """SPEC M-ALLOC-ROOT"""
    x = np.zeros((4, 4), "f4")
    t = interop.as_tensor(x)
    a = t[1].allocation
    assert (a.handle, a.nbytes) == (x.ctypes.data, 64)
    t = interop.as_tensor(x[::-1, ::2])
    assert (t.allocation.handle, t.allocation.nbytes) == (x.ctypes.data, 4 * 16 - 4)


def test_foreign_memory_that_was_closed_stays_closed() -> None:
    """SPEC M-ALLOC-CLOSE: or close() is refused there; never a tensor that does not know"""
    t = interop.as_tensor(np.zeros(4))
    try:
        t.allocation.close()
    except interop.ExchangeError:
        return
    gc.collect()
    with pytest.raises(interop.ExchangeError, match="closed"):
        interop.to(t, "numpy")


def test_closing_a_context_waits_for_a_release_in_another_thread() -> None:
    """SPEC M-ALLOC-CONTEXT: memory that counts as closed may be half given back, and the device must not go before that."""
    order: list[str] = []
    entered, go = threading.Event(), threading.Event()

    class Slow(interop.Context):
        def _close(self) -> None:
            order.append("device")

    c = Slow(interop.Device("toy:0"), toy.ADAPTER)

    def free() -> None:
        entered.set()
        go.wait(10)
        order.append("memory")

    held = [c.allocation(7, 64, free=free)]
    thread = threading.Thread(target=held.pop)
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.05, go.set).start()
    c.close()
    thread.join()
    assert order == ["memory", "device"]
