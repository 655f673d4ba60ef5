"""The allocators of exportable memory on the fake driver: segments and their blocks; what CuPy's and torch's pools ask for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_kit import Rig, rig
from fake_cuda import CUresult

from interop import ExchangeError
from interop.adapters.cuda import cupy_allocator, torch_pool
from interop.adapters.cuda.cupy_allocator import Segments


@pytest.fixture
def cuda() -> Iterator[Rig]:
    """interop's adapter on a fake driver of two devices; in the end nothing illegal has happened there and nothing is left."""
    with rig() as made:
        yield made


@pytest.fixture
def cp(cuda: Rig) -> Iterator[Any]:
    """A small CuPy on the same driver."""
    with fake_cupy.installed(cuda.fake) as cupy:
        yield cupy


@pytest.fixture
def segments(cuda: Rig) -> Iterator[Segments]:
    """Segments of 4 MiB, which are empty in the end."""
    made = Segments(cuda.adapter.driver, cuda.adapter.streams, 4 << 20)
    yield made
    cuda.settle()
    made.trim()
    assert made.total(0) == made.total(1) == 0


def test_small_blocks_share_a_segment_of_whole_granules_and_large_ones_have_their_own(cuda: Rig, segments: Segments) -> None:
    """SPEC G-POOL."""
    s = cuda.stream()
    small = [segments.malloc(n, 0, None, s) for n in (1, 1000, 513)]
    assert segments.total(0) == 4 << 20 and len({p - p % (4 << 20) for p in small}) <= 2
    assert all(p % 512 == 0 for p in small) and sorted(small) == small and small[1] - small[0] == 512
    large = segments.malloc((2 << 20) + 1, 0, None, s)
    assert segments.total(0) == 8 << 20
    a = cuda.tensor(small[2], (513,), "u1", stream=-1).allocation
    with a.export("opaque_fd") as handle:
        assert (handle.nbytes, handle.offset) == (4 << 20, small[2] - small[0])
    del a
    for p in (*small, large):
        segments.free(p)


@pytest.mark.parametrize("number", [1, 2, "user"])
def test_a_block_is_handed_out_again_when_its_stream_is_done(cuda: Rig, segments: Segments, number: Any) -> None:
    """SPEC G-POOL: on any stream then; a race, if it were earlier."""
    fake, s, other = cuda.fake, cuda.stream() if number == "user" else number, cuda.stream()
    a = segments.malloc(1000, 0, None, s)
    fake.launch(s, writes=[(a, 1000)])
    segments.free(a)
    assert segments.trim() == 0                             # memory stays mapped while work may use it
    b = segments.malloc(1000, 0, None, other)
    assert b != a
    fake.launch(other, writes=[(b, 1000)])
    fake.run()
    c = segments.malloc(1000, 0, None, other)
    assert c == a
    fake.launch(other, writes=[(c, 1000)])
    for p in (b, c):
        segments.free(p)


def test_a_block_of_a_captured_stream_stays_until_it_can_be_asked_about(cuda: Rig, segments: Segments) -> None:
    """SPEC G-POOL, X-STREAM-6."""
    s = cuda.stream()
    a = segments.malloc(1000, 0, None, s)
    with cuda.fake.capturing(s) as capture:
        segments.free(a)
        assert segments.malloc(1000, 0, None, cuda.stream()) != a and not capture.invalid
    cuda.fake.auto = True
    assert segments.malloc(1000, 0, None, s) == a
    for p in list(segments._blocks):
        segments.free(p)


def test_memory_that_is_out_is_asked_of_the_streams_and_then_of_the_driver_again(cuda: Rig, segments: Segments) -> None:
    """SPEC G-POOL: the host waits for blocks that come back, and only here."""
    fake, s = cuda.fake, cuda.stream()
    a = segments.malloc(3 << 20, 0, None, s)
    fake.launch(s, writes=[(a, 100)])
    segments.free(a)
    fake.fail_next("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    fake.auto = True
    b = segments.malloc(3 << 20, 0, None, s)
    assert segments.total(0) == 4 << 20 and fake.queued == 0
    segments.free(b)
    fake.fail_next("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY, 2)
    with pytest.raises(ExchangeError, match="OUT_OF_MEMORY"):
        segments.malloc(8 << 20, 0, None, s)


def test_holes_join_and_threads_share_segments(cuda: Rig, segments: Segments) -> None:
    """SPEC G-POOL: nothing is handed out twice, and in the end every segment is whole again."""
    cuda.fake.start()
    errors: list[BaseException] = []
    live: dict[int, int] = {}

    def many(k: int) -> None:
        try:
            r, mine, s = np.random.default_rng(k), [], cuda.stream()
            for _ in range(60):
                if mine and r.random() < 0.5:
                    p = mine.pop(int(r.integers(len(mine))))
                    del live[p]
                    segments.free(p)
                else:
                    n = int(r.integers(1, 400_000))
                    p = segments.malloc(n, 0, None, s)
                    assert not any(q < p + n and p < q + m for q, m in list(live.items()))
                    live[p] = n
                    mine.append(p)
            for p in mine:
                del live[p]
                segments.free(p)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=many, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


def test_cupys_allocator_asks_for_cupy_and_for_bytes(cuda: Rig, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-POOL."""
    with pytest.raises(ValueError, match="segment 0"):
        cupy_allocator.allocator(0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ExchangeError, match="cupy is not installed"):
        cupy_allocator.allocator()


def test_torchs_pool_says_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC G-POOL: no torch, or one without CUDA."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExchangeError, match="torch is not installed"):
        torch_pool.mem_pool()
    monkeypatch.undo()
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        with pytest.raises(ExchangeError, match="without CUDA"):
            torch_pool.mem_pool()
