"""Copies between two GPUs: packed on the one, moved by cuMemcpyPeerAsync, unpacked on the other. Knows no host memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from interop.contract import ExchangeError, Point, pending_stream, ready_on

from ..strided import Move
from .driver import Driver
from .pack import Packer
from .streams import Streams

if TYPE_CHECKING:
    from interop import Tensor

_PER_THREAD = 2
_TEMPORARY = 256 << 20      # bytes of a temporary; what is larger goes in pieces


class Peers:
    """The copies of one driver that involve two GPUs."""

    def __init__(self, driver: Driver, streams: Streams, packer: Packer) -> None:
        """Nothing is made."""
        self.driver, self.streams, self.packer = driver, streams, packer

    def copy(self, move: Move, dst: Tensor, src: Tensor, given: int | None) -> Point:
        """Do `move` between the devices of two tensors.

        Each side works on a stream of its own device: `given`, on the device that it belongs to, else what is pending there, else
        interop's own. The transfer runs on the destination's, and neither goes on before it is over.
        """
        here, there = dst.device.id, src.device.id
        theirs = given is not None and given > _PER_THREAD and self._device_of(given, here) == there
        arrive = self._stream(dst, None if theirs else given)
        leave = self._stream(src, given if theirs else None)
        for device, stream in ((here, arrive), (there, leave)):
            with self.driver.using(device):
                if self.streams.capturing(stream):
                    raise ExchangeError(f"stream {stream:#x} is being captured: a copy between two GPUs takes streams of both",
                                        "copy before the capture")
        ready_on(dst, arrive)
        ready_on(src, leave)
        for piece in move.pieces(_TEMPORARY) if move.axes else (move,):
            self.transfer(piece, here, arrive, there, leave)
        done = self._order(here, arrive, there, leave)
        pending = pending_stream(src)
        if pending > 0 and pending != leave:        # nor may the framework of the source write to it before
            self._order(here, arrive, src.device.id, pending)
        return done

    def transfer(self, move: Move, here: int, arrive: int, there: int, leave: int) -> None:
        """One piece, from device `there` on stream `leave` to device `here` on stream `arrive`."""
        driver, packer = self.driver, self.packer
        with contextlib.ExitStack() as temporaries:
            first, last = move.src, move.dst
            if move.gather(0).axes:
                first = temporaries.enter_context(packer.temporary(there, move.nbytes, leave))
                with driver.using(there):
                    packer.enqueue(move.gather(first), there, leave)
                # before the temporary goes back to its stream, which the other one still reads
                temporaries.callback(self._order, here, arrive, there, leave)
            if move.scatter(0).axes:
                last = temporaries.enter_context(packer.temporary(here, move.nbytes, arrive))
            self._order(there, leave, here, arrive)
            with driver.using(here) as cu:
                driver.check(cu.cuMemcpyPeerAsync(last, driver.context(here), first, driver.context(there), move.nbytes, arrive))
                if last != move.dst:
                    packer.enqueue(move.scatter(last), here, arrive)

    def _order(self, first_device: int, first: int, device: int, then: int) -> Point:
        """What `first` has been given, before what `then` is given from now on. Streams 1 and 2 are those of the device beside them."""
        point = self.streams.record(first_device, first)
        event = point.native()
        with self.driver.using(device) as cu:
            self.driver.check(cu.cuStreamWaitEvent(then, event, 0))
        return point

    def _stream(self, t: Tensor, given: int | None) -> int:
        pending = pending_stream(t)
        return given or (pending if pending > 0 else self.streams.own(t.device.id))

    def _device_of(self, stream: int, default: int) -> int:
        driver = self.driver
        with driver.using(default) as cu:
            context = int(driver.check(cu.cuStreamGetCtx(stream)))
        return next((d for d in (default, *range(driver.count())) if int(driver.context(d)) == context), default)
