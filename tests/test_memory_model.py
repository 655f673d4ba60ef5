"""Random interleavings of everything, against a model of bytes and a table of leases; and threads. SPEC M-*, L-*, C-*, P-*."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from memkit import clean_toy, prints

import interop

N = 96
spans = st.tuples(st.integers(0, N - 1), st.integers(1, 40)).map(lambda p: (p[0], min(N, p[0] + p[1])))
contexts = st.sampled_from([
    {}, {"coherent": False}, {"flavour": "outlives"}, {"flavour": "unmap"}, {"copies": False}, {"flavour": "unmap", "copies": False},
    {"waits": False},
])


class Model:
    """What one allocation should hold: bytes, who leases which, whether it is open."""

    def __init__(self, tensor: Any, context: Any) -> None:
        self.tensor, self.context, self.open = tensor, context, True
        self.bytes = np.zeros(N, "u1")
        self.leases: dict[int, tuple[int, int, str, Any]] = {}

    def atoms(self, lo: int, hi: int) -> tuple[int, int]:
        """A lease is of whole atoms: what a flush or a fetch carries along."""
        atom = 1 if self.context is None else self.context.atom
        return lo // atom * atom, min(N, -(-hi // atom) * atom)

    def conflict(self, lo: int, hi: int, writes: bool, lease: bool = True) -> bool:
        if lease:
            lo, hi = self.atoms(lo, hi)
        held = [(*self.atoms(a, b), access) for a, b, access, _ in self.leases.values()]
        return any(a < hi and lo < b and (writes or access != "read") for a, b, access in held)


class Memory(RuleBasedStateMachine):
    """Host memory and device memory, wrapped, mapped, copied, worked on by queues, and dropped."""

    memories = Bundle("memories")

    def __init__(self) -> None:
        super().__init__()
        self.guard = clean_toy()
        self.guard.__enter__()
        self.released: list[int] = []
        self.expected = 0
        self.models: list[Model] = []
        self.number = 0

    @initialize(options=contexts)
    def open_context(self, options: Any) -> None:
        self.context = toy.Context(**options)

    @rule(target=memories, device=st.booleans())
    def make(self, device: bool) -> Any:
        if len(self.models) >= 4:
            return multiple()
        if device:
            m = Model(interop.empty((N,), "uint8", device=self.context), self.context)
            self.context.poke(m.tensor, bytes(N))
        else:
            x = np.zeros(N, "u1")
            self.expected += 1
            a = interop.wrap(x.ctypes.data, N, device="cpu", owner=x, on_release=lambda: self.released.append(1))
            m = Model(a.tensor((N,), "uint8"), None)
        self.models.append(m)
        return m

    def forbidden(self, m: Model, lo: int, hi: int, writes: bool, lease: bool = True) -> Any:
        if not m.open:
            return pytest.raises(interop.ExchangeError, match="closed")
        return pytest.raises(interop.LeaseError) if m.conflict(lo, hi, writes, lease) else contextlib.nullcontext()

    @rule(m=memories, span=spans, access=st.sampled_from(["read", "write", "read_write"]), staged=st.sampled_from([None, True]))
    def lease(self, m: Model, span: Any, access: str, staged: Any) -> None:
        lo, hi = span
        with self.forbidden(m, lo, hi, access != "read"):
            lease = m.tensor[lo:hi].map(access, copy=staged)
            if access != "write":
                assert lease.value.tolist() == m.bytes[lo:hi].tolist()
            else:
                lease.value[:] = m.bytes[lo:hi]         # a write lease is to be filled
            m.leases[self.number] = (lo, hi, access, lease)
            self.number += 1

    def some(self, m: Model, data: Any) -> Any:
        return data.draw(st.sampled_from(sorted(m.leases))) if m.leases else None

    @rule(m=memories, data=st.data(), value=st.integers(0, 255))
    def write_through_a_lease(self, m: Model, data: Any, value: int) -> None:
        key = self.some(m, data)
        if key is not None and m.leases[key][2] != "read":
            lo, hi, _, lease = m.leases[key]
            lease.value[:] = value
            m.bytes[lo:hi] = value

    @rule(m=memories, data=st.data(), drop=st.booleans())
    def end_a_lease(self, m: Model, data: Any, drop: bool) -> None:
        key = self.some(m, data)
        if key is not None:
            lease = m.leases.pop(key)[3]
            if not drop:
                lease.release()
                lease.release()

    @rule(m=memories, span=spans, value=st.integers(0, 255))
    def kernel(self, m: Model, span: Any, value: int) -> None:
        lo, hi = span
        if m.context is not None:
            with self.forbidden(m, lo, hi, True):
                lease = interop.acquire(m.tensor[lo:hi], m.context, "read_write")
                m.context.queue.wait_for(lease.after)
                lease.release(m.context.add(m.tensor[lo:hi], value))
                m.bytes[lo:hi] += np.uint8(value)

    @rule(n=st.integers(1, 3))
    def run_queue(self, n: int) -> None:
        self.context.queue.run(n)

    @rule(a=memories, b=memories, span=spans, shift=st.integers(0, N))
    def copy(self, a: Model, b: Model, span: Any, shift: int) -> None:
        lo, hi = span
        lo2 = min(shift, N - (hi - lo))
        hi2 = lo2 + hi - lo
        if a is b and a.context is not None:
            return
        refused = not (a.open and b.open) or a.conflict(lo, hi, True, False) or b.conflict(lo2, hi2, False, False)
        with pytest.raises(interop.ExchangeError) if refused else contextlib.nullcontext():
            interop.copyto(a.tensor[lo:hi], b.tensor[lo2:hi2])
            a.bytes[lo:hi] = b.bytes[lo2:hi2].copy()

    @rule(m=memories, span=spans)
    def convert(self, m: Model, span: Any) -> None:
        lo, hi = span
        with self.forbidden(m, lo, hi, False, False):
            t = m.tensor[lo:hi]
            x = interop.to(t, "numpy") if m.context is None else np.asarray(interop.to(t, "cpu"))
            assert x.tolist() == m.bytes[lo:hi].tolist()

    @rule(m=memories)
    def close(self, m: Model) -> None:
        m.tensor.allocation.context and self.context.queue.run()
        try:
            m.tensor.allocation.close()
            m.open = False
        except interop.LeaseError:
            assert m.leases
        except interop.ExchangeError as e:
            assert "export" in str(e) or "queued" in str(e)     # noqa: PT017
        if m.leases and m.open is False:
            raise AssertionError("closed under a lease")

    @rule()
    def collect(self) -> None:
        gc.collect()

    @invariant()
    def nothing_illegal(self) -> None:
        assert not toy.driver.violations, toy.driver.violations

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.context.queue.run()
            for m in self.models:
                for *_, lease in m.leases.values():
                    lease.release()
                if m.open and m.context is not None:
                    assert m.context.peek(m.tensor) == m.bytes.tobytes()
                m.leases.clear()
                m.tensor = lease = None         # hypothesis still holds some of the models
        gc.collect()
        interop._core.release_ready()
        assert len(self.released) == self.expected
        self.guard.__exit__(None, None, None)


TestMemory = Memory.TestCase
# Without shrinking: each example collects garbage several times, and what interleaved is printed anyway
TestMemory.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck),
                               phases=[Phase.explicit, Phase.reuse, Phase.generate], report_multiple_bugs=False)


# --- threads ------------------------------------------------------------------------------------------------------------
def test_threads_on_one_allocation() -> None:
    """SPEC L-EXCL, L-ORDER: eight threads, two seconds; nothing is lost, nothing illegal, nothing leaks"""
    with clean_toy() as driver:
        c = toy.Context()
        c.queue.start()
        t = interop.empty((16, 64), "uint8", device=c)
        c.poke(t, bytes(1024))
        counts, errors, stop = [0] * 16, [], time.monotonic() + 2

        def work(seed: int) -> None:
            r = random.Random(seed)
            try:
                while time.monotonic() < stop:
                    row = r.randrange(16)
                    try:
                        what = r.randrange(4)
                        if what == 0:
                            with t[row].map("read_write") as a:
                                a += 1
                                counts[row] += 1
                        elif what == 1:
                            lease = interop.acquire(t[row], c, "read_write")
                            lease.release(c.add(t[row], 1))
                            counts[row] += 1
                            del lease
                        elif what == 2:
                            with t[row].map("read") as a:
                                assert len(set(a.tolist())) == 1
                        else:
                            assert len(set(np.asarray(interop.to(t[row], "cpu")).tolist())) == 1
                        a = None
                    except interop.LeaseError:
                        pass
            except BaseException as e:
                errors.append(e)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        c.queue.run()
        c.queue.stop()
        assert not errors, errors[:3]
        assert not driver.violations
        assert [c.peek(t[i])[0] for i in range(16)] == [n % 256 for n in counts]
        assert sum(counts) > 20
        errors.clear()
        t = None


def test_the_ledger_survives_collections_in_its_midst() -> None:
    """SPEC L-DROP: a lease in a cycle may be collected while the ledger is looked through"""
    prints("""
gc.set_threshold(1)
x = np.zeros(4096, "u1")
t = interop.as_tensor(x)
class Cycle: pass
from interop import _core
for i in range(3000):
    for j in range(4):
        c = Cycle(); c.me = c
        c.lease = t[j * 8:j * 8 + 8].map("read") if i % 2 else t[100 + j:101 + j].map("read")
        del c
    _core.ledger_find(*_core.byte_span(t), 15)
    t.map("read").release()
gc.set_threshold(700); gc.collect()
print(_core.ledger_size())
""", "0")


def test_a_fork_in_the_middle() -> None:
    """SPEC M-FORK: leases, queued work and exports alive; the parent goes on as if nothing had been"""
    prints("""
c = toy.Context()
host = np.zeros(64, "u1")
t = interop.empty((64,), "uint8", device=c)
a = interop.empty((64,), "uint8", device=c)
lease = t[:8].map("write"); lease.value[:] = 1
interop.copyto(a, np.full(64, 5, "u1"))
exported = interop.to(a, "toy")
capsule = a.__dlpack__(max_version=(1, 3))
pid = os.fork()
if pid == 0:
    del lease, exported, capsule, t, a, c
    gc.collect()
    y = interop.empty((8,), "uint8")
    with y.map("write") as v: v[:] = 3
    assert interop.to(y, "numpy").tolist() == [3] * 8
    os._exit(len(toy.driver.violations))
print(os.waitpid(pid, 0)[1])
lease.release()
c.queue.run()
assert c.peek(t)[:8] == bytes([1]) * 8 and c.peek(a) == bytes([5]) * 64
del lease, exported, capsule, t, a
gc.collect()
toy.driver.check()
""", "0")
