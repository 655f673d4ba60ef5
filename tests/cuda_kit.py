"""What tests of adapters/cuda need: interop's adapter on a fake driver in place of the real one, views of memory, faults. No tests."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fake_cuda_kernels
import memkit
import numpy as np
from fake_cuda import CUresult, FakeCuda

import interop
from interop import _core, registry
from interop.adapters import cuda
from interop.adapters.cuda.adapter import CudaAdapter
from interop.testing import Forged, Producer

#: Questions: whether a stream is captured, what is current. They are no work.
ASKED = frozenset({"cuStreamIsCapturing", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"})


class Rig:
    """A fake driver with interop's adapter on it.

    Attributes:
        fake, adapter: the two.
        pinned: blocks of pinned memory that may be left in the end.
    """

    def __init__(self, devices: int = 2) -> None:
        self.fake = FakeCuda(devices)
        self.first, self.pinned = _entry(), 0
        self.adapter = CudaAdapter(table=self.fake)
        fake_cuda_kernels.install(self.fake)

    @property
    def streams(self) -> Any:
        return self.adapter.streams

    def stream(self, device: int = 0) -> int:
        """A stream of the application's."""
        return self.fake.make_stream(device)

    def memory(self, values: Any, device: int = 0, kind: str = "device") -> tuple[int, np.ndarray[Any, Any]]:
        """Memory of the application's with these values: its address, and the bytes as the fake has them."""
        values = np.asarray(values)
        address = self.fake.make_memory(max(values.nbytes, 1), device, kind)
        view = strided(address, values.shape, values.dtype)
        view[...] = values
        return address, view

    def tensor(self, address: int, shape: Any, dtype: Any, *, device: Any = (2, 0), strides: Any = None, stream: Any = None,
               owner: Any = None) -> interop.Tensor:
        """A Tensor of CUDA memory that a producer made ready on `stream`; `strides` in elements."""
        d = interop.DType(np.dtype(dtype).name if not isinstance(dtype, str) else dtype)
        forged = Forged(shape, (d.code, d.bits, d.lanes), device=device, data=address, owner=owner,
                        **({} if strides is None else {"strides": strides}))
        return interop.as_tensor(Producer(forged), stream=stream)

    def settle(self) -> None:
        """Let everything that is queued run, and what waits for it go."""
        self.fake.auto = True           # whoever polls in the background gets on
        self.fake.run()
        _core.drain()
        _core.release_ready()

    def wrong(self, entries: int, fds: int) -> str:
        """What is wrong or left; empty when nothing is."""
        self.settle()
        self._prune()
        try:
            self.fake.check(pinned=self.pinned)
        except AssertionError as e:
            return str(e)
        if _core.ledger_size() > entries:
            return f"{_core.ledger_size() - entries} ledger entries left"
        more = memkit.fds() - fds
        return f"{more} descriptors left" if more > 0 else ""


    def _prune(self) -> None:
        """Strike out what is over, as any look at those bytes does: a Point that ends while it is noted is left in the ledger."""
        for id in range(self.first, _entry()):
            where = _core.ledger_bounds(id)
            if where is not None and where[3] & (_core.READ_POINT | _core.WRITE_POINT):
                for _, _, p in _core.ledger_find(*where[:3], where[3]):
                    if p.done():
                        _core.ledger_strike(p, None)


def _entry() -> int:
    """The number of the next entry in the ledger."""
    id = int(_core.ledger_add(0, 0, 1, _core.READ_POINT, None))
    _core.ledger_remove(id)
    return id


@contextlib.contextmanager
def rig(devices: int = 2, *, check: bool = True) -> Iterator[Rig]:
    """interop's adapter on a fake driver until the block ends; then nothing illegal has happened and nothing is left."""
    made = Rig(devices)
    fds, entries = memkit.fds(), _core.ledger_size()
    registry.unregister("cuda")
    registry.register(made.adapter)
    _core.set_cuda_ops(made.adapter)
    try:
        yield made
        made.fake.stop()
        gc.collect()
        made.settle()
        made.adapter.copies.close()
        if check:
            end, wrong = time.monotonic() + 2, made.wrong(entries, fds)
            while wrong and not made.fake.violations and time.monotonic() < end:     # interop's threads are at it
                time.sleep(0.002)
                wrong = made.wrong(entries, fds)
            if wrong:
                raise AssertionError(wrong)
    finally:
        made.fake.stop()
        made.settle()
        registry.unregister("cuda")
        registry.register(cuda.ADAPTER)
        _core.set_cuda_ops(None)        # conftest puts the real one back
        made.fake.close()


def strided(address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
    """An array over memory at an address, with strides in bytes, also negative ones."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    if strides is None:
        strides = compact(shape, dtype.itemsize)
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + dtype.itemsize
    raw = (ctypes.c_ubyte * (high - low)).from_address(address + low)
    return np.ndarray(tuple(shape), dtype, raw, -low, tuple(strides))


def compact(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    out: list[int] = []
    for n in reversed(shape):
        out.insert(0, itemsize)
        itemsize *= n
    return tuple(out)


def host(x: Any) -> np.ndarray[Any, Any]:
    """The bytes of a fake CuPy array or of a Tensor, as they are now."""
    if isinstance(x, interop.Tensor):
        size = x.itemsize
        return strided(x.ptr, x.shape, x.dtype.numpy_dtype, [s * size for s in x.strides])
    return strided(x.data.ptr, x.shape, x.dtype, x.strides)


def work(calls: Any) -> dict[str, int]:
    """Calls without the questions."""
    return {k: v for k, v in calls.items() if k not in ASKED}


class Faults:
    """Makes the n-th call of a fake driver fail, or notes who calls what. Put on with `injecting`."""

    def __init__(self, fake: FakeCuda, spare: frozenset[str]) -> None:
        self.fake, self.spare = fake, spare
        self.at: int | None = None
        self.code = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.seen: list[str] = []
        self.threads: list[threading.Thread] = []
        self.failed = ""

    def start(self, at: int | None) -> None:
        """From here on count, and let call number `at` fail."""
        self.at, self.seen, self.failed, self.threads = at, [], "", []

    def enter(self, call: str, f: Callable[..., Any], args: tuple[Any, ...], outs: int) -> tuple[Any, ...]:
        if call not in self.spare:
            self.seen.append(call)
            self.threads.append(threading.current_thread())
            if self.at is not None and len(self.seen) == self.at + 1:
                self.failed, self.at = call, None
                return self.code, *[None] * outs
        return FakeCuda.enter(self.fake, call, f, args, outs)


#: What gives something back. Of these a driver that fails leaves what it was asked to give back: nobody can do anything about it.
UNDO = frozenset({
    "cuCtxPopCurrent", "cuMemFree", "cuMemFreeHost", "cuMemFreeAsync", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree",
    "cuDestroyExternalMemory", "cuMemHostUnregister", "cuEventDestroy", "cuStreamDestroy", "cuGetErrorName",
})  # fmt: skip


@contextlib.contextmanager
def injecting(fake: FakeCuda, spare: frozenset[str] = UNDO) -> Iterator[Faults]:
    """Faults on a fake driver, until the block ends."""
    faults = Faults(fake, spare)
    fake.enter = faults.enter           # type: ignore[method-assign]
    try:
        yield faults
    finally:
        del fake.enter                  # type: ignore[method-assign]


def each_call_failing(fake: FakeCuda, operation: Callable[[], Any], after: Callable[[str, BaseException | None], None],
                      spare: frozenset[str] = UNDO) -> list[str]:
    """Do an operation again and again, the first time whole, then with its first driver call failing, its second and so on.

    `after` is told which call it was and what was raised (None: nothing). Returns the names of the calls that were made to fail.
    """
    done = []
    with injecting(fake, spare) as faults:
        faults.start(None)
        operation()
        for i in range(10_000):
            faults.start(i)
            error: BaseException | None = None
            try:
                operation()
            except (interop.ExchangeError, interop.DeviceLostError, MemoryError) as e:
                error = e.with_traceback(None)
                e.__context__ = None
            call, faults.at = faults.failed, None
            if not call:
                return done
            done.append(call)
            after(call, error)
    raise AssertionError("it never ends")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 3.0) -> None:
    """Wait for something that another thread does; AssertionError where it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


@contextlib.contextmanager
def submitted(fake: FakeCuda) -> Iterator[list[tuple[str, int]]]:
    """What a fake driver is given in the block: ``(name, stream)``, waits and records left out."""
    out: list[tuple[str, int]] = []

    def submit(s: Any, name: str, *args: Any, **more: Any) -> Any:
        if name not in ("wait", "record"):
            out.append((name, s.handle))
        return FakeCuda.submit(fake, s, name, *args, **more)

    fake.submit = submit                # type: ignore[method-assign]
    try:
        yield out
    finally:
        del fake.submit                 # type: ignore[method-assign]
