"""A fake accelerator, in pure Python and ctypes, and its adapter: what the memory model is proven on, and how an adapter is written.

The upper half is "the vendor's library": handles that are small ints, an address space that the host cannot see, a queue whose work runs
later, host windows that may be incoherent, descriptors. It fails on demand, counts every call and objects to what a real driver would make
undefined: those `Violation` s are raised and also kept, because whoever calls may swallow them. The lower half, from `ToyAdapter` on, is on
`interop.contract` alone.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import interop
from interop.contract import Adapter, Importable, Limits, Mapped, point, register

PAGE = mmap.PAGESIZE
ATOM = 64                       # flush and invalidate move whole atoms

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class ToyError(RuntimeError):
    """What the toy's driver says when it fails."""


class Violation(AssertionError):
    """Something that on a real driver would be undefined behaviour."""


# ---- the vendor's library --------------------------------------------------------------------------------------------
class Driver:
    """Everything that exists once: counters, failures on demand, what is open."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.reset()

    def reset(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.moved: collections.Counter[str] = collections.Counter()       # bytes, by way
        self.violations: list[str] = []
        self._failing: dict[str, list[BaseException]] = {}
        self.blocks: dict[tuple[int, int], Block] = getattr(self, "blocks", {})

    def fail_next(self, call: str, error: BaseException | None = None, times: int = 1) -> None:
        """The next calls of this name fail."""
        self._failing.setdefault(call, []).extend([error or ToyError(f"{call} failed on demand")] * times)

    def enter(self, call: str) -> None:
        if os.getpid() != self.pid:
            self.violate(f"{call} in a forked child")
        self.calls[call] += 1
        failing = self._failing.get(call)
        if failing:
            raise failing.pop(0)

    def violate(self, what: str) -> None:
        self.violations.append(what)
        raise Violation(what)

    # what a test asks in the end
    @property
    def handles(self) -> int:
        return len(self.blocks)

    def check(self, handles: int = 0) -> None:
        """Nothing leaked beyond the handles that there were, nothing illegal happened."""
        assert not self.violations, self.violations
        assert self.handles <= handles, f"{self.handles - handles} handles leaked: {list(self.blocks)}"


driver = Driver()


class Block:
    """Memory of the device: pages of a memfd, or of the host where it was imported from there."""

    def __init__(self, context: Context, handle: int, nbytes: int, fd: int | None, *, exportable: bool = False, host: int = 0) -> None:
        self.context, self.handle, self.nbytes, self.exportable = context, handle, nbytes, exportable
        self.busy = self.maps = self.window = 0
        self.fd = fd
        self.size = -(-nbytes // PAGE) * PAGE
        self.base = host or _map(self.size, self.fd)
        self.host = host
        self.bytes = memoryview((ctypes.c_ubyte * nbytes).from_address(self.base)).cast("B")

    def open_window(self) -> int:
        """Where the host sees it: other pages of the same file, or, incoherent, pages of their own."""
        if not self.window:
            self.window = self.host or _map(self.size, self.fd if self.context.coherent else None)
            if not self.context.coherent:
                ctypes.memset(self.window, 0xCD, self.size)
        return self.window

    def close_window(self) -> None:
        if self.window and not self.host:
            _libc.munmap(self.window, self.size)
        self.window = 0

    def close(self) -> None:
        self.close_window()
        self.bytes.release()
        if not self.host:
            _libc.munmap(self.base, self.size)
        if self.fd is not None:
            os.close(self.fd)


def _map(size: int, fd: int | None) -> int:
    flags = mmap.MAP_SHARED if fd is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1 if fd is None else fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise ToyError(f"mmap: {os.strerror(ctypes.get_errno())}")
    return int(address)


class Queue:
    """Work in order, executed when `run` is called, when the host waits for it, or by a thread after `start`."""

    def __init__(self, context: Context) -> None:
        self.context = weakref.proxy(context)
        self.work: collections.deque[tuple[str, Callable[[], Any] | None, Any, list[Block], _Fence]] = collections.deque()
        self.changed = threading.Condition(threading.RLock())
        self.stuck = False              # the host's waiting does not make it go on
        self._thread: threading.Thread | None = None
        self._stop = False

    def submit(self, name: str, function: Callable[[], Any], *blocks: Block, keep: Any = None) -> _Fence:
        """Enqueue; `keep` lives until it has run."""
        driver.enter("submit")
        with self.changed:
            for b in blocks:
                b.busy += 1
            fence = _Fence(self)
            self.work.append((name, lambda k=keep: function(), None, list(blocks), fence))
            self.changed.notify_all()
        return fence

    def wait_for(self, p: interop.Point) -> None:
        """What comes later starts only after `p`."""
        driver.enter("queue_wait")
        with self.changed:
            self.work.append(("wait", None, p, [], _Fence(self)))

    def record(self) -> _Fence:
        driver.enter("record")
        with self.changed:
            fence = _Fence(self)
            if not self.work:
                fence.finished = True
            else:
                self.work.append(("fence", lambda: None, None, [], fence))
        return fence

    def run(self, n: int | None = None) -> int:
        """Execute up to n pieces of work; stops at a wait that is not over. How many pieces were executed."""
        executed = 0
        while n is None or executed < n:
            with self.changed:
                if not self.work:
                    break
                name, function, p, blocks, fence = self.work[0]
                if p is not None:
                    if not p.done():
                        break
                    self.work.popleft()
                    continue
                self.work.popleft()
                try:
                    driver.enter("execute")
                    function()          # type: ignore[misc]
                except BaseException as e:
                    fence.error = e
                for b in blocks:
                    b.busy -= 1
                fence.finished = True
                executed += name != "fence"
                function = None
                self.changed.notify_all()
        return executed

    def start(self) -> None:
        """A thread runs it from here on."""
        def loop() -> None:
            while not self._stop:
                self.run()
                with self.changed:
                    self.changed.wait(0.001)
        self._stop = False
        self._thread = threading.Thread(target=loop, name="toy-queue", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        if self._thread is not None:
            self._thread.join()
        self._thread = None


class _Fence:
    """The vendor's kind of event."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.finished, self.error = queue, False, None

    def signalled(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.finished

    def wait(self, seconds: float) -> None:
        driver.calls["host_wait"] += 1
        if not self.queue.stuck:
            self.queue.run()
        with self.queue.changed:
            if not self.finished:
                self.queue.changed.wait(seconds)


class Context(interop.Context):
    """A device that was opened: its memory, its queue, and how its host windows behave.

    Args:
        flavour: of `map`: ``"flush"`` (host writes can be flushed while mapped), ``"outlives"`` (the window stays readable after unmap),
            ``"unmap"`` (only unmap makes writes visible, and the window is gone), ``None`` (cannot be mapped).
        coherent: the window is the memory itself; else a cache, of which flush and invalidate move whole atoms.
        copies, peer, waits: it has copy commands, also to other contexts; its queue can wait for Points.
    """

    def __init__(self, index: int = 0, *, flavour: str | None = "flush", coherent: bool = True, copies: bool = True, peer: bool = True,
                 waits: bool = True) -> None:
        super().__init__(interop.Device(f"toy:{index}"), ADAPTER)
        self.flavour, self.coherent, self.copies, self.peer, self.waits = flavour, coherent, copies, peer, waits
        self.queue = Queue(self)
        self.numbers = itertools.count(1)       # handles mean something in one context only

    @property
    def atom(self) -> int:
        """What a flush or an invalidate carries along."""
        return ATOM if self.flavour == "flush" and not self.coherent else 1

    # -- memory
    def allocate(self, nbytes: int, *, exportable: bool = False) -> int:
        driver.enter("allocate")
        fd = os.memfd_create("toy", os.MFD_CLOEXEC)
        os.ftruncate(fd, -(-nbytes // PAGE) * PAGE)
        return self._add(nbytes, fd, exportable=exportable)

    def _add(self, nbytes: int, fd: int | None, **fields: Any) -> int:
        with driver.lock:
            handle = next(self.numbers)
            driver.blocks[id(self), handle] = Block(self, handle, nbytes, fd, **fields)
        return handle

    def block(self, handle: int, why: str) -> Block:
        b = driver.blocks.get((id(self), handle))
        if b is None:
            driver.violate(f"{why}: handle {handle} was freed, or is of another context")
        return b                                # type: ignore[return-value]

    def free(self, handle: int) -> None:
        driver.enter("free")
        with driver.lock:
            b = self.block(handle, "free")
            if b.busy:
                driver.violate(f"free: handle {handle} is used by {b.busy} pieces of queued work")
            if b.maps:
                driver.violate(f"free: handle {handle} is mapped {b.maps} times")
            if self.closed:
                driver.violate("free: the context was closed")
            b.close()
            del driver.blocks[id(self), handle]

    def _close(self) -> None:
        driver.enter("close_context")
        if self.queue.work:
            driver.violate("close_context: its queue has work")

    @property
    def maps(self) -> int:
        """How many maps of this context are open."""
        return sum(b.maps for (owner, _), b in driver.blocks.items() if owner == id(self))

    # -- host windows
    def map(self, handle: int) -> int:
        driver.enter("map")
        with driver.lock:
            b = self.block(handle, "map")
            b.maps += 1
            return b.open_window()

    def unmap(self, handle: int, access: str, first: int, nbytes: int) -> None:
        driver.enter("unmap")
        with driver.lock:
            b = self.block(handle, "unmap")
            if b.maps <= 0:
                driver.violate(f"unmap: handle {handle} is not mapped")
            if not self.coherent and self.flavour != "flush" and access != "read":
                self._move(b, first, nbytes, "flushed")
            b.maps -= 1
            if not b.maps and self.flavour != "outlives":
                b.close_window()

    def flush(self, handle: int, first: int, nbytes: int) -> None:
        self._range("flush", handle, first, nbytes, "flushed")

    def invalidate(self, handle: int, first: int, nbytes: int) -> None:
        self._range("invalidate", handle, first, nbytes, "invalidated")

    def _range(self, call: str, handle: int, first: int, nbytes: int, counter: str) -> None:
        driver.enter(call)
        with driver.lock:
            b = self.block(handle, call)
            if not b.maps:
                driver.violate(f"{call}: handle {handle} is not mapped")
            if first % ATOM or (nbytes % ATOM and first + nbytes != b.nbytes) or first + nbytes > b.nbytes or first < 0:
                driver.violate(f"{call}: bytes {first} to {first + nbytes} of {b.nbytes} are no whole atoms")
            self._move(b, first, nbytes, counter)

    def _move(self, b: Block, first: int, nbytes: int, counter: str) -> None:
        driver.moved[counter] += nbytes
        if not self.coherent:
            device, host = b.base + first, b.window + first
            ctypes.memmove(device, host, nbytes) if counter == "flushed" else ctypes.memmove(host, device, nbytes)

    # -- descriptors
    def export_fd(self, handle: int) -> int:
        driver.enter("export")
        b = self.block(handle, "export")
        if not b.exportable or b.fd is None:
            driver.violate(f"export: handle {handle} was not allocated exportable")
        return os.dup(b.fd)                     # type: ignore[arg-type]

    def import_fd(self, fd: int, nbytes: int) -> int:
        """Owns `fd` from here on, unless it fails."""
        driver.enter("import")
        return self._add(nbytes, fd, exportable=True)

    def import_host(self, address: int, nbytes: int) -> int:
        driver.enter("import")
        if address % PAGE or nbytes % PAGE:
            driver.violate("import: host memory that is no whole pages")
        return self._add(nbytes, None, host=address)

    # -- kernels, which the vendor's users write
    def fill(self, t: Any, value: int) -> interop.Point:
        """Enqueue: every byte of a compact Tensor or Buffer becomes `value`."""
        b, first, n = self.block(t.handle, "kernel"), t.byte_offset, t.nbytes

        def work() -> None:
            b.bytes[first:first + n] = bytes([value]) * n
        return _point(self.queue.submit("fill", work, b))

    def add(self, t: Any, value: int) -> interop.Point:
        """Enqueue: every byte grows by `value`."""
        b, first, n = self.block(t.handle, "kernel"), t.byte_offset, t.nbytes

        def work() -> None:
            b.bytes[first:first + n] = bytes((x + value) & 255 for x in b.bytes[first:first + n])
        return _point(self.queue.submit("add", work, b))

    def peek(self, t: Any) -> bytes:
        """The bytes of a compact Tensor or Buffer as the device has them now."""
        return bytes(self.block(t.handle, "peek").bytes[t.byte_offset:t.byte_offset + t.nbytes])

    def poke(self, t: Any, data: bytes) -> None:
        """Put bytes into the device's memory, past everything."""
        self.block(t.handle, "poke").bytes[t.byte_offset:t.byte_offset + len(data)] = data


class Buffer:
    """The vendor's array: shape and dtype over a handle. Frees it unless it was made over somebody's."""

    def __init__(self, context: Context, shape: tuple[int, ...], dtype: str = "uint8", handle: int | None = None, offset: int = 0,
                 keep: Any = None) -> None:
        self.context, self.shape, self.dtype, self.byte_offset, self.keep = context, tuple(shape), dtype, offset, keep
        self.nbytes = math.prod(shape) * interop.DType(dtype).itemsize
        self.owns = handle is None
        self.handle = context.allocate(self.nbytes) if handle is None else handle
        self.root: weakref.ref[interop.Allocation] | None = None

    def __del__(self) -> None:
        if getattr(self, "owns", False) and os.getpid() == driver.pid:
            self.context.free(self.handle)


# ---- the adapter -----------------------------------------------------------------------------------------------------
def _point(fence: _Fence) -> interop.Point:
    """Any kind of fence is a Point."""
    return point(done=fence.signalled, wait=fence.wait, native=lambda: [fence],
                 stream_wait=lambda stream: isinstance(stream, Queue) and (stream.wait_for(_point(fence)) or True))


class ToyAdapter(Adapter):
    """interop's adapter for the toy. Every capability is one method."""

    name, types, module, reads, device = "toy", ("toy.Buffer",), "toy", "adapter", "toy"
    accepts = Limits(readonly=False, devices=frozenset({12}))
    shares = frozenset({"opaque_fd", "memfd", "process"})

    def __init__(self) -> None:
        self._default: dict[Any, Context] = {}

    def context(self, place: Any) -> Context:
        """The Context of a place; a Device means the one that is opened for it on first use."""
        if isinstance(place, Context):
            place.check()
            return place
        device = place if place is not None else interop.Device("toy:0")
        if device not in self._default or self._default[device].closed:
            self._default[device] = Context(int(str(device).partition(":")[2]))
        return self._default[device]

    # -- objects
    def to_tensor(self, b: Buffer) -> interop.Tensor:
        root = b.keep.allocation if isinstance(b.keep, interop.Tensor) else b.root() if b.root is not None else None
        if root is None:
            root = interop.Allocation(b.handle, b.nbytes, b.context.device, owner=b, context=b.context, adapter=self,
                                      atom=b.context.atom)
            b.root = weakref.ref(b.context.adopt(root))
        return root.tensor(b.shape, b.dtype, byte_offset=b.byte_offset)

    def from_tensor(self, t: interop.Tensor, *, place: Any = None, stream: Any = None) -> Buffer:
        if not t.is_contiguous():
            raise self.refuse(f"strides {t.strides}: buffers are compact", remedy="copy it first")
        return Buffer(t.allocation.context, t.shape, str(t.dtype), t.handle, t.byte_offset, keep=t)

    # -- memory
    def limits(self, place: Any) -> Limits:
        return Limits(imports={"opaque_fd", "memfd", "host"}, exports={"opaque_fd", "memfd"}, alignment=PAGE, granularity=PAGE)

    def importable(self, kind: str, *, place: Any) -> Importable:
        if kind == "opaque_fd":
            return Importable(True, size_alignment=PAGE, dedicated=getattr(place, "dedicated", False))
        return super().importable(kind, place=place)

    def allocate(self, nbytes: int, *, place: Any, alignment: int, shared_with: tuple[Any, ...]) -> interop.Allocation:
        context = self.context(place)
        return self._own(context, context.allocate(nbytes, exportable=bool(shared_with)), nbytes, bool(shared_with))

    def _own(self, context: Context, handle: int, nbytes: int, exportable: bool) -> interop.Allocation:
        return context.allocation(handle, nbytes, free=functools.partial(context.free, handle), alignment=ATOM, atom=context.atom,
                                  exports=("opaque_fd", "memfd") if exportable else ())

    def export_handle(self, a: interop.Allocation, kind: str) -> interop.ExternalHandle:
        size = -(-a.nbytes // PAGE) * PAGE
        return interop.ExternalHandle(kind, self.context(a.context).export_fd(a.handle), size)

    def import_handle(self, h: interop.ExternalHandle, *, place: Any) -> interop.Allocation:
        context = self.context(place)
        if h.kind == "host":
            return self._own(context, context.import_host(h.value, h.nbytes), h.nbytes, False)
        handle = context.import_fd(h.value, h.nbytes)
        h.take()                                # only now: a refused descriptor is closed by whoever holds it
        return self._own(context, handle, h.nbytes, True)

    def map(self, a: interop.Allocation, access: str, first: int, nbytes: int) -> Mapped:
        context = self.context(a.context)
        if context.flavour is None:
            return NotImplemented
        address = context.map(a.handle)
        if context.flavour != "flush" and not context.coherent:
            b = context.block(a.handle, "map")
            ctypes.memmove(address + first, b.base + first, nbytes)       # such an API fetches when it maps

        def whole_atoms(move: Callable[[int, int, int], None], first: int, nbytes: int) -> None:
            start, end = first // ATOM * ATOM, min(-(-(first + nbytes) // ATOM) * ATOM, a_bytes)
            move(handle, start, end - start)

        handle, a_bytes = a.handle, a.nbytes
        address += first
        unmap = functools.partial(context.unmap, handle, access, first, nbytes)
        if context.flavour == "flush":
            return Mapped(address, unmap, flush=functools.partial(whole_atoms, context.flush),
                          invalidate=functools.partial(whole_atoms, context.invalidate))
        return Mapped(address, unmap, outlives_unmap=context.flavour == "outlives")

    # -- order
    def wait(self, place: Any, stream: Any, p: interop.Point) -> bool:
        context = self.context(place)
        if context.waits:
            context.queue.wait_for(p)
        return context.waits

    def record(self, place: Any, stream: Any) -> interop.Point:
        return _point(self.context(place).queue.record())

    def copy(self, dst: interop.Tensor, src: interop.Tensor, stream: Any) -> Any:
        contexts = [self.context(t.allocation.context or t.device) for t in (dst, src) if t.device.name == "toy"]
        if not all(c.copies for c in contexts) or (len({id(c) for c in contexts}) > 1 and not all(c.peer for c in contexts)):
            return NotImplemented
        to, source = _Side(dst, contexts[0]), _Side(src, contexts[-1])
        driver.enter("copy")
        step = math.gcd(to.run, source.run)

        def work() -> None:
            for a, b in zip(to.pieces(step), source.pieces(step), strict=True):
                ctypes.memmove(a, b, step)
        way = "d2d" if to.block and source.block else "upload" if to.block else "download"
        driver.moved[way] += dst.nbytes
        return _point(contexts[0].queue.submit("copy", work, *[s.block for s in (to, source) if s.block], keep=(dst, src)))


class _Side:
    """One end of a copy command: runs of bytes, in row-major order."""

    def __init__(self, t: interop.Tensor, context: Context) -> None:
        self.block = context.block(t.handle, "copy") if t.device.name == "toy" else None
        self.first = self.block.base + t.byte_offset if self.block else t.ptr
        if t.is_contiguous():
            self.run, self.offsets = max(t.nbytes, 1), [0] if t.nbytes else []
            return
        size, k = t.itemsize, t.ndim
        self.run = size
        while k and (t.shape[k - 1] == 1 or t.strides[k - 1] * size == self.run):
            self.run *= t.shape[k - 1]
            k -= 1
        self.offsets = [sum(i * s * size for i, s in zip(at, t.strides, strict=False))
                        for at in itertools.product(*map(range, t.shape[:k]))]

    def pieces(self, step: int) -> list[int]:
        return [self.first + o + i for o in self.offsets for i in range(0, self.run, step)]


ADAPTER = ToyAdapter()
register(ADAPTER)
