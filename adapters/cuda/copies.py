"""Copies between the host, a GPU and another GPU, any strides. Knows tensors' geometry and streams; no framework, no leases.

Three ways, by what the card reaches:

* Both sides (device, pinned, managed): one copy, or one kernel, on a stream; a Point is returned.
* One side is pageable: pieces of it go through the ring of pinned chunks. Where the layouts differ the host's side is left as contiguous
  as it is and the device packs, straight from and into the chunks. A copy to the device returns when the source has been read, one to
  the host when it is done.
* Two GPUs: see `peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from interop.contract import DeviceLostError, ExchangeError, Point, pending_stream, ready_on

from ..strided import HUGE, Move, advise_huge, host_move, plan
from .driver import CudaError, Driver
from .pack import Packer
from .peers import Peers
from .ring import Chunk, Ring, shares
from .streams import Streams

if TYPE_CHECKING:
    from interop import Tensor

_PER_THREAD = 2
_DRIVERS_IN = 64 << 10      # up to here the driver takes pageable bytes at once, whatever the stream is at; beyond, it waits for the stream
_DRIVERS_OUT = 16 << 20     # up to here its one thread is as fast as several: waking them costs what they save
_HUGE_FROM = 8 << 20        # bytes of a host destination for which huge pages are asked


class Copies:
    """The copies of one driver."""

    def __init__(self, driver: Driver, streams: Streams) -> None:
        """Nothing is allocated or loaded."""
        self.driver = driver
        self.streams = streams
        self.ring = Ring(driver)
        self._packer = Packer(driver)
        self._peers = Peers(driver, streams, self._packer)

    def close(self) -> None:
        """Give back the pinned memory that is not in use. A later copy takes it anew."""
        self.ring.close()

    def copy(self, dst: Tensor, src: Tensor, stream: int | None) -> Point | None:
        """Copy `src` to `dst`: equal shape and dtype, at least one element.

        Args:
            stream: what the copy runs on; None: what the destination's framework has pending, else the source's, else interop's own.

        Returns when it is complete; None: it is, or the stream is being captured and the graph's launches say.
        """
        given = stream
        if given == -1:
            raise ValueError("stream -1: a copy runs on a stream; 1 is the legacy default one, 2 the per-thread one, else a CUstream")
        devices = [t.device.id for t in (dst, src) if t.device.name == "cuda"]
        if len(devices) == 2 and devices[0] != devices[1]:
            return self._peers.copy(_plan(dst, src, [None, None], 0), dst, src, given)
        device = devices[0] if devices else next(t for t in (dst, src) if t.device.name == "cuda_managed").device.id
        # a stream of another GPU, on managed memory of that one, is none to copy on here
        pending = [pending_stream(t) if t.device.id == device or pending_stream(t) <= 0 else -1 for t in (dst, src)]
        queue = given or next((s for s in pending if s > 0), 0) or self.streams.own(device)
        with self.driver.using(device):
            captured = self.streams.capturing(queue)
            reached = [self._reached(t) for t in (dst, src)]
            if captured and None in reached:
                raise ExchangeError(f"stream {queue:#x} is being captured: a copy from or to pageable memory is work of the host's",
                                    "use pinned memory, or copy before the capture")
            for t in (dst, src):
                if pending_stream(t) > 0 and t.device.id != device:
                    self.streams.record(t.device.id, pending_stream(t)).wait_on(device, queue)
                else:
                    ready_on(t, queue)
            if None in reached:
                return self._pageable(dst, src, reached, device, queue)
            self._direct(_plan(dst, src, reached, 1 if src.device.name != "cuda" else 0), device, queue)
            if captured:
                return None
            done = self.streams.record(device, queue)
            for t in (dst, src):        # managed memory of another GPU: its framework goes on there
                if pending_stream(t) > 0 and t.device.id != device:
                    done.wait_on(t.device.id, pending_stream(t))
            if given is None and queue != pending[1] > 0 and src.device.id == device:
                self.streams.order(device, queue, pending[1])       # nor may its framework overwrite or reuse the source before
            return done

    def _reached(self, t: Tensor) -> int | None:
        """The address at which the current device reaches the memory; None where it is pageable, or partly so."""
        if t.device.name == "cuda":
            return t.ptr
        lo, hi = _plan(t, t, [None, None], 0).span(0)
        cu = self.driver.cu
        of = cu.CUpointer_attribute
        wanted = [of.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, of.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, of.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                  of.CU_POINTER_ATTRIBUTE_DEVICE_POINTER]
        try:
            kind, first, nbytes, address = self.driver.check(cu.cuPointerGetAttributes(len(wanted), wanted, lo))
        except CudaError:
            return None
        if not int(kind) or not int(address or 0) or hi > int(first or lo) + int(nbytes or 0):
            return None         # nobody's, or it goes on in memory that is not the same allocation
        return t.ptr + int(address) - lo

    def _registered(self, t: Tensor) -> bool:
        """Whether the memory begins in a registration that it leaves: CUDA refuses to copy such a range itself."""
        cu = self.driver.cu
        first = _plan(t, t, [None, None], 0).span(0)[0]
        error, values = cu.cuPointerGetAttributes(1, [cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE], first)
        return int(error) == 0 and bool(int(values[0]))

    # ---- what the card reaches ----
    def _direct(self, move: Move, device: int, stream: int) -> None:
        if move.is_nothing:
            return
        if not move.overlaps:
            self._packer.enqueue(move, device, stream)
            return
        with self._packer.temporary(device, move.nbytes, stream) as base:
            self._packer.enqueue(move.gather(base), device, stream)
            self._packer.enqueue(move.scatter(base), device, stream)

    # ---- pageable memory ----
    def _pageable(self, dst: Tensor, src: Tensor, reached: list[int | None], device: int, queue: int) -> Point | None:
        to_host = reached[0] is None
        move = _plan(dst, src, reached, 0 if to_host else 1)
        host = dst if to_host else src
        if not move.axes and move.nbytes <= (_DRIVERS_OUT if to_host else _DRIVERS_IN) and not self._registered(host):
            return self._drivers(move, to_host, device, queue)
        lane = queue
        if queue == _PER_THREAD:        # it means another stream on each thread
            lane = self.streams.own(device)
            self.streams.order(device, queue, lane)
        lo, hi = move.span(0)
        if to_host and hi - lo == move.nbytes >= _HUGE_FROM:
            advise_huge(lo, hi)

        def work(pieces: Iterator[Move], stopped: Callable[[], bool]) -> None:
            with self.driver.using(device), self.driver.relaxed():
                for piece in pieces:
                    (self._empty if to_host else self._fill)(piece, device, lane, stopped)

        limit, threads = shares(move.nbytes, bool((move.scatter(0) if to_host else move.gather(0)).axes))
        # no two threads fault the same huge page
        self.ring.run(move.pieces(limit, limit if to_host and limit % HUGE == 0 else 1), threads, work)
        if to_host:
            return None
        if lane != queue:
            self.streams.order(device, lane, queue)
        return self.streams.record(device, queue)

    def _drivers(self, move: Move, to_host: bool, device: int, stream: int) -> Point | None:
        """The driver's own way through pageable memory. It reads the source before it returns, and has written to the host by then."""
        if to_host:
            self.streams.synchronize(device, stream)        # which it would do too, without a timeout and deaf to Ctrl-C
        with self.driver.relaxed():
            self._packer.enqueue(move, device, stream)
        return None if to_host else self.streams.record(device, stream)

    def _fill(self, piece: Move, device: int, stream: int, stopped: Callable[[], bool]) -> None:
        """Host to device: the host gathers into a chunk, the device scatters out of it."""
        chunk = self.ring.take(stopped)
        try:
            host_move(piece.gather(chunk.address))
            self._enqueue(chunk, piece.scatter(chunk.address), device, stream)
        finally:
            self.ring.give(chunk)

    def _empty(self, piece: Move, device: int, stream: int, stopped: Callable[[], bool]) -> None:
        """Device to host, the same way."""
        chunk = self.ring.take(stopped)
        try:
            self._enqueue(chunk, piece.gather(chunk.address), device, stream)
            self.ring.wait(chunk, stopped)
            host_move(piece.scatter(chunk.address))
        finally:
            self.ring.give(chunk)

    def _enqueue(self, chunk: Chunk, move: Move, device: int, stream: int) -> None:
        try:
            self._packer.enqueue(move, device, stream)
        finally:
            try:
                self.ring.given(chunk, device, stream)      # also of what was enqueued before an error
            except DeviceLostError:
                raise                                       # the card does nothing with it any more
            except BaseException:
                chunk.stream = device, stream               # no event says when the card is done with it: the stream does
                raise


def _plan(dst: Tensor, src: Tensor, reached: list[int | None], lead: int) -> Move:
    to, source = (t.ptr if address is None else address for t, address in zip((dst, src), reached, strict=True))
    if dst.is_contiguous() and src.is_contiguous():
        return Move(to, source, dst.nbytes)
    if not _is_packed(dst):
        return plan(to, source, dst.itemsize, dst.shape, dst.strides, src.strides, lead)
    raise ExchangeError(f"dtype {dst.dtype} with strides: elements that share bytes are only copied whole")


def _is_packed(t: Tensor) -> bool:
    return bool(t.dtype.bits * t.dtype.lanes % 8) and not t.padded
