"""Leases: who may use which bytes, and what conversion may do meanwhile. Maps and order: test_maps. SPEC L-*."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import toy
from memkit import clean_toy

import interop
from interop import LeaseError


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


@pytest.fixture(params=["host", "foreign", "toy"])
def t(request: pytest.FixtureRequest, driver: toy.Driver) -> Iterator[interop.Tensor]:
    """Eight rows of sixteen bytes: interop's memory, somebody else's, a device's."""
    if request.param == "host":
        yield interop.empty((8, 16), "uint8")
    elif request.param == "foreign":
        yield interop.as_tensor(np.zeros((8, 16), "u1"))
    else:
        device = interop.empty((8, 16), "uint8", device=toy.Context())
        yield device
        gc.collect()
        device.allocation.close()


# --- conflicts ----------------------------------------------------------------------------------------------------------
def test_many_read_at_once(t: interop.Tensor) -> None:
    """SPEC L-EXCL"""
    leases = [t.map("read") for _ in range(5)]
    assert all(lease.value.shape == (8, 16) for lease in leases)
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("first", ["read", "write", "read_write"])
@pytest.mark.parametrize("second", ["read", "write", "read_write"])
def test_a_writer_is_alone(t: interop.Tensor, first: str, second: str) -> None:
    """SPEC L-EXCL"""
    lease = t.map(first)
    if first == second == "read":
        t.map(second).release()
    else:
        with pytest.raises(LeaseError):
            t.map(second)
    lease.release()
    t.map(second).release()


def test_the_holder_is_named(t: interop.Tensor) -> None:
    """SPEC L-NAME: access, what, thread"""
    holder = threading.Thread(target=lambda: keep.append(t[2:4].map("write")), name="the-painter")
    keep: list[interop.Lease] = []
    holder.start()
    holder.join()
    with pytest.raises(LeaseError, match=r"write lease on uint8\[2, 16\].*the-painter"):
        t.map("read")
    keep.pop().release()


def test_rows_do_not_collide_and_overlaps_do(t: interop.Tensor) -> None:
    """SPEC L-BYTES: one writer per byte interval; user job 14"""
    rows = [t[i].map("write") for i in range(8)]
    for i, lease in enumerate(rows):
        lease.value[:] = i
    for lease in rows:
        lease.release()
    with t[2:5].map("write"):
        for other in (t, t[4:], t[:3], t[3, 5:6], t.reshape(-1)[2 * 16:2 * 16 + 1], t[::-1], t.permute(1, 0)):
            with pytest.raises(LeaseError):
                other.map("read")
        for other in (t[:2], t[5:], t.reshape(-1)[:32], t[7, ::-1]):
            other.map("read_write").release()
    with t.map("read") as a:
        assert a[:, 0].tolist() == list(range(8))


def test_an_empty_view_touches_nothing(t: interop.Tensor) -> None:
    """SPEC L-BYTES"""
    empty = t[4:][:0].map("write")
    t.map("write").release()
    with t.map("write"):
        t[3:][:0].map("write").release()
    empty.release()


def test_host_memory_is_matched_by_address(driver: toy.Driver) -> None:
    """SPEC L-HOST: also between objects that know nothing of each other"""
    x = np.zeros((4, 8), "u1")
    a = interop.wrap(x.ctypes.data, 32, device="cpu", owner=x)
    with interop.acquire(x[1], "numpy", "write"):
        with pytest.raises(LeaseError):
            interop.acquire(memoryview(x), "numpy", "read")
        with pytest.raises(LeaseError):
            a.tensor((1,), "uint8", byte_offset=15).map()
        a.tensor((1,), "uint8", byte_offset=16).map("write").release()


def test_a_refused_lease_leaves_nothing_behind(t: interop.Tensor) -> None:
    """SPEC L-EXCL"""
    with pytest.raises(interop.ExchangeError):
        interop.acquire(interop.as_tensor(t, readonly=True), "numpy", "write")
    with pytest.raises(ValueError, match="nonsense"):
        interop.acquire(t, "nonsense", "write")
    with pytest.raises(ValueError, match="access"):
        t.map("wirte")
    t.map("write").release()


def test_timeout_waits_for_the_holder(t: interop.Tensor) -> None:
    """SPEC L-WAIT"""
    lease = t.map("write")
    threading.Timer(0.1, lease.release).start()
    with t.map("write", timeout=10):
        pass
    lease = t.map("read")
    start = time.monotonic()
    with pytest.raises(LeaseError, match="read lease"):
        t.map("write", timeout=0.1)
    assert 0.1 <= time.monotonic() - start < 3
    lease.release()


def test_of_many_threads_each_row_has_one_writer(t: interop.Tensor) -> None:
    """SPEC L-EXCL: the check and the entry are one step"""
    inside, clashes, done = [0] * 8, [], [0]

    def work(seed: int) -> None:
        for i in range(40):
            row = (seed * 7 + i * 3) % 8
            try:
                with t[row].map("read_write") as a:
                    inside[row] += 1
                    if inside[row] != 1:
                        clashes.append(row)
                    a += 1
                    inside[row] -= 1
                    done[0] += 1
            except LeaseError:
                pass
    with t.map("write") as a:
        a[:] = 0
    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    with t.map() as a:
        assert int(a[:, 0].sum()) == done[0]


# --- conversion while leased --------------------------------------------------------------------------------------------
def _tvm(x: Any) -> Any:
    return pytest.importorskip("tvm_ffi").from_dlpack(x)


def _torch(x: Any) -> Any:
    return pytest.importorskip("torch").from_numpy(x)


def _jax(x: Any) -> Any:
    return pytest.importorskip("jax.numpy").from_dlpack(x, copy=None)


def _aligned() -> np.ndarray[Any, Any]:
    raw = np.zeros(192, "u1")
    return raw[-raw.ctypes.data % 64:][:64]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to numpy": lambda x: interop.to(x, "numpy"),
    "to torch": lambda x: interop.to(x, "torch"),
    "to jax": lambda x: interop.to(x, "jax", readonly=True),
    "to tvm_ffi": lambda x: interop.to(x, "tvm_ffi"),
    "to interop": lambda x: interop.to(x, "interop"),
    "to a device": lambda x: interop.to(x, "numpy", device="cpu"),
    "to a place": lambda x: interop.to(x, "cpu"),
    "like": lambda x: interop.to(x, like=np.zeros(1)),
    "copy=True": lambda x: interop.to(x, "numpy", copy=True),
    "readonly=True": lambda x: interop.to(x, "numpy", readonly=True),
    "as_tensor copy": lambda x: interop.as_tensor(x, copy=True),
    "as_tensor device copy": lambda x: interop.as_tensor(x, device="cpu", copy=True),
    "from_dlpack copy": lambda x: interop.from_dlpack(x, copy=True),
    "to another memory": lambda x: interop.to(x, toy.Context()),
}
EXPORTS: dict[str, Callable[[Any], Any]] = {
    "dlpack": lambda t: t.__dlpack__(max_version=(1, 3)),
    "legacy": lambda t: t.__dlpack__(),
    "dlpack copy": lambda t: t.__dlpack__(max_version=(1, 3), copy=True),
    "stream -1": lambda t: t.__dlpack__(stream=-1),
    "buffer": memoryview,
    "asarray": np.asarray,
    "array": np.array,
    "array interface": lambda t: t.__array_interface__,
    "np.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": lambda t: pytest.importorskip("torch").from_dlpack(t),
    "jnp.from_dlpack": lambda t: pytest.importorskip("jax.numpy").from_dlpack(t),
    "C table": lambda t: pytest.importorskip("tvm_ffi").from_dlpack(t),
    "native": lambda t: t.__interop_native__(),
}


@pytest.mark.parametrize("source", [interop.as_tensor, lambda x: x, _torch, _tvm, memoryview],
                         ids=["interop", "numpy", "torch", "tvm_ffi", "buffer"])
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_no_conversion_while_somebody_writes(driver: toy.Driver, source: Any, convert: Any) -> None:
    """SPEC L-CONVERT: on every path, whatever object the bytes are seen through; the same object handed back is no conversion"""
    x = _aligned()
    other = source(x)
    lease = interop.as_tensor(x[8:16]).map("write")
    try:
        out = convert(other)
    except LeaseError as e:
        assert "write lease" in str(e)      # noqa: PT017
    except TypeError:
        assert isinstance(other, memoryview)
    else:
        # the object itself, or a description of the memory, which is checked when it is used
        assert out is other or (isinstance(out, interop.Tensor) and not out.copied)
    lease.release()
    try:
        convert(other)
    except TypeError:
        assert isinstance(other, memoryview)


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_no_export_while_somebody_writes(export: Any) -> None:
    """SPEC L-CONVERT"""
    x = _aligned()
    tensor = interop.as_tensor(x)
    lease = interop.as_tensor(x[8:16]).map("write")
    with pytest.raises((LeaseError, AttributeError)):
        export(tensor)
    export(tensor[:8])
    lease.release()
    export(tensor)


@pytest.mark.parametrize("source", [_jax], ids=["jax"])
def test_no_conversion_of_a_jax_array_over_leased_memory(driver: toy.Driver, source: Any) -> None:
    """SPEC L-CONVERT"""
    x = _aligned()
    j = source(x)
    if j.unsafe_buffer_pointer() != x.ctypes.data:
        pytest.skip("jax copied")
    with interop.as_tensor(x).map("write"):
        for target in ("numpy", "torch"):
            with pytest.raises(LeaseError):
                interop.to(j, target, readonly=True)


def test_readers_do_not_forbid_conversion(t: interop.Tensor) -> None:
    """SPEC L-CONVERT"""
    with t.map("read"):
        interop.to(t, "toy" if t.device.name == "toy" else "numpy")


# --- the end of a lease -------------------------------------------------------------------------------------------------
def test_release_is_idempotent_and_gives_the_same_point(t: interop.Tensor) -> None:
    """SPEC L-RELEASE"""
    lease = t.map("write")
    lease.value[:] = 1
    p = lease.release()
    assert lease.release() is p
    assert p.done()
    assert "released" in repr(lease)
    with pytest.raises(LeaseError, match="released"):
        lease.__enter__()


def test_a_lease_never_looked_at_writes_nothing_back(t: interop.Tensor) -> None:
    """SPEC L-RELEASE: its value was never handed out"""
    with t.map("write") as a:
        a[:] = 5
    lease = t.map("write", copy=True)
    lease.release()
    with t.map() as a:
        assert (a == 5).all()


def test_a_dropped_lease_is_released(t: interop.Tensor) -> None:
    """SPEC L-DROP"""
    lease = t.map("write", copy=True)
    lease.value[:] = 3
    del lease
    gc.collect()
    with t.map("read") as a:
        assert (a == 3).all()


def test_an_error_in_the_block_stays_the_one_raised(driver: toy.Driver) -> None:
    """SPEC L-ERROR: that of the release is a note on it"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    with pytest.raises(ZeroDivisionError) as caught:
        with t.map("write") as a:
            a[:] = 1
            driver.fail_next("flush")
            1 / 0       # noqa: B018
    assert any("flush failed" in note for note in caught.value.__notes__)
    t.map("write").release()


def test_an_error_in_the_release_is_raised_once_and_the_lease_is_over(driver: toy.Driver) -> None:
    """SPEC L-ERROR: later readers are told that the write failed"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    lease = t.map("write")
    lease.value[:] = 1
    driver.fail_next("flush")
    with pytest.raises(toy.ToyError):
        lease.release()
    lease.release()
    with pytest.raises(interop.ExchangeError, match="last write"):
        t.map("read").value     # noqa: B018
    with t.map("write") as a:
        a[:] = 2
    with t.map("read") as a:
        assert (a == 2).all()


def test_a_map_that_fails_leaves_no_lease(driver: toy.Driver) -> None:
    """SPEC L-ERROR"""
    c = toy.Context()
    t = interop.empty((16,), "uint8", device=c)
    for call in ("map", "invalidate"):
        driver.fail_next(call)
        with pytest.raises(toy.ToyError):
            t.map("read_write").value       # noqa: B018
        t.map("write").release()
        gc.collect()
        assert c.maps == 0


def test_misaligned_memory_is_not_written_to_a_copy() -> None:
    """SPEC L-VALUE: what is leased is the object's own memory, or it is an error"""
    x = np.zeros(33, "u1")[1:].view("<f4")
    try:
        with interop.acquire(x, "numpy", "write") as a:
            a[:] = 7
    except interop.ExchangeError:
        return
    assert (x == 7).all()


def test_a_producer_that_copies_is_not_written_to(driver: toy.Driver) -> None:
    """SPEC L-VALUE: nothing written through a lease is lost"""
    from interop.testing import IS_COPIED, Forged, Producer
    with pytest.raises(interop.ExchangeError):
        interop.acquire(Producer(Forged((4,), flags=IS_COPIED)), "numpy", "write").value     # noqa: B018


def test_writing_through_a_framework_that_never_writes_is_refused() -> None:
    """SPEC L-VALUE"""
    pytest.importorskip("jax")
    with pytest.raises(interop.ExchangeError, match="jax"):
        interop.acquire(interop.as_tensor(_aligned()), "jax", "write").value      # noqa: B018


# --- async --------------------------------------------------------------------------------------------------------------
def test_async_with_does_not_block_the_loop(driver: toy.Driver) -> None:
    """SPEC L-ASYNC: neither a conflict nor pending work"""
    c = toy.Context()
    c.queue.stuck = True
    t = interop.empty((16,), "uint8", device=c)
    first = interop.acquire(t, c, "write")
    p, ticks = c.fill(t, 7), []

    async def main() -> None:
        async def tick() -> None:
            for i in range(30):
                ticks.append(i)
                if i == 5:
                    first.release(p)
                if i == 15:
                    c.queue.run()
                await asyncio.sleep(0.002)
        other = asyncio.create_task(tick())
        async with t.map("read", timeout=5) as a:
            assert (a == 7).all()
            assert ticks[-1] >= 15
        await other
    asyncio.run(asyncio.wait_for(main(), 20))
    c.queue.stuck = False


def test_a_cancelled_async_lease_is_released(driver: toy.Driver) -> None:
    """SPEC L-ASYNC; user job 14"""
    c = toy.Context()
    c.queue.stuck = True
    t = interop.empty((16,), "uint8", device=c)
    first = interop.acquire(t, c, "write")
    first.release(c.fill(t, 7))

    async def use() -> None:
        async with t.map("read_write"):
            raise AssertionError("entered")

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(use(), 0.05)
    asyncio.run(main())
    c.queue.stuck = False
    c.queue.run()
    t.map("write").release()


def test_an_async_writer_writes_back(t: interop.Tensor) -> None:
    """SPEC L-ASYNC"""
    async def main() -> None:
        async with interop.acquire(t, "numpy", "write", copy=True) as a:
            a[:] = 4
    asyncio.run(main())
    with t.map() as a:
        assert (a == 4).all()
