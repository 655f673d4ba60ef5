"""pyopencl's Arrays and Buffers as Tensors, and Tensors as Arrays. Events go along in both directions; nothing waits for a queue."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from interop.contract import ExchangeError, Point, failed_write, note, pending

from . import loader, memory
from . import queues as ev
from .context import HOST_TIMEOUT, Context

if TYPE_CHECKING:
    from interop import Tensor


# ---- reading ----
def to_tensor(x: Any) -> Tensor:
    """A Tensor over an Array, a Buffer, an Image, or fine-grained SVM."""
    name = type(x).__name__
    if hasattr(x, "base_data"):
        return _from_array(x)
    if name.startswith("SVM"):
        from . import svm

        return svm.to_tensor(x)
    if name == "Image":
        from . import images

        return images.wrap_image(x)
    return _from_buffer(x)


def _from_buffer(x: Any) -> Tensor:
    c = Context.of(x.get_info(loader.module().mem_info.CONTEXT))
    a = _wrap(c, x, None)
    t: Tensor = a.tensor((a.nbytes,), "uint8")
    return t


def _wrap(c: Context, data: Any, queue: Any) -> Any:
    """The Allocation of a pyopencl buffer. What it was made over lives as long as the cl_mem, though a rebuilt Buffer does not say so."""
    keep, readonly = behind(data)
    a = memory.wrap_handle(c, int(data.int_ptr), queue=queue, owner=data, keep=keep, readonly=readonly)
    mem = memory.find(a)
    if mem is not None and mem.source is None:
        mem.source, mem.address = data, getattr(data, "_interop_address", 0)
    return a


def behind(data: Any) -> tuple[Any, bool]:
    """``(what is still to be kept for it, whether that is read-only)``: the memory of the host that a pyopencl object was made over."""
    host = getattr(data, "hostbuf", None)
    keep = None
    if host is not None and not getattr(data, "_interop_kept", False):
        keep = host
        with contextlib.suppress(AttributeError):
            data._interop_kept = True
    return keep, not getattr(getattr(host, "flags", None), "writeable", True)


def _from_array(x: Any) -> Tensor:
    from interop import Allocation

    from .adapter import ADAPTER

    queue, data = x.queue, x.base_data
    if type(data).__name__.startswith("SVM"):
        from . import svm

        return svm.of_array(x)
    c = Context.of(queue if queue is not None else x.context)
    if data is None or not x.size:
        return Allocation(0, 0, c.device, adapter=ADAPTER).tensor(x.shape, x.dtype)
    item = x.dtype.itemsize
    if any(s % item for s in x.strides):
        raise ExchangeError(f"strides {tuple(x.strides)} in bytes are no multiples of the {item}-byte {x.dtype}: strides count elements")
    kept = getattr(data, "_interop", None)
    a = kept.allocation if kept is not None and not kept.allocation.is_closed and kept.allocation.context is not None \
        and kept.allocation.context.handle == c.handle else _wrap(c, data, queue)
    mem = memory.find(a)
    if mem is not None:
        mem.seen_with(queue)
    strides = tuple(s // item for s in x.strides)
    # pyopencl's views may say any stride along an extent of 1
    t: Tensor = a.tensor(x.shape, x.dtype, strides=tuple(s if n > 1 else 1 for n, s in zip(x.shape, strides, strict=True)),
                 byte_offset=int(x.offset))
    for e in x.events:
        _note(c, t, int(e.int_ptr))
    return t


def _note(c: Context, t: Tensor, event: int) -> None:
    """What an Array's contents depend on is its last write, once."""
    a = t.allocation
    with c.store.lock:
        p = c.store.points.get(event)
        if p is None or p.handle != event:
            p = c.store.points[event] = ev.point_of(c.driver, event, c.handle)
        if id(a) in p.noted:
            return
        p.noted.add(id(a))
    note(t, "write", p)


# ---- making ----
def from_tensor(t: Tensor, place: Any, stream: Any) -> Any:
    """An Array over the memory of `t`, on the queue of `place` or `stream`; ``.events`` is what must be waited for.

    Its Buffer holds `t`, so that views of the Array do too.
    """
    cl = loader.module()
    import pyopencl.array as cla

    queue = _queue(cl, stream) or _queue(cl, place)
    c = t.allocation.context
    dtype = t.dtype.numpy_dtype
    if not t.size:
        where = queue if queue is not None else Context.of(place if place is not None else t.device).cl
        return cla.Array(where, t.shape, dtype)
    mem = memory.of(t.allocation, "a pyopencl.Array")
    if not isinstance(c, Context):
        raise ExchangeError(f"the memory of {t!r} is of no cl_context that interop knows", "opencl.wrap(mem, context=...)")
    c.check()
    memory.check_unmapped(mem, not t.readonly)
    if queue is not None:
        found = c.find_queue(queue)
    else:
        queue, found = mem.keeper, mem.queue
        _same_context(c, place)
    mem.seen_with(queue)
    after = pending(t, "write")
    waits = _waits(after, c)
    data = cl.MemoryObject.from_int_ptr(mem.handle, True) if not hasattr(cl, "Buffer") else cl.Buffer.from_int_ptr(mem.handle, True)
    data._interop = t
    listed = [cl.Event.from_int_ptr(e, True) for e in waits]
    item = t.itemsize
    return cla.Array(queue if found else c.cl, t.shape, dtype, data=data, offset=t.byte_offset, strides=tuple(s * item for s in t.strides),
                     events=listed)


def _same_context(c: Context, place: Any) -> None:
    """A context of pyopencl's was the place: it must be the memory's."""
    if place is not None and hasattr(place, "int_ptr") and Context.of(place).handle != c.handle:
        raise ExchangeError(f"the memory on {c.device} is of another cl_context than the one asked for")


def _queue(cl: Any, x: Any) -> Any:
    if x is None or isinstance(x, cl.CommandQueue):
        return x
    if isinstance(x, int) and not isinstance(x, bool) and x != -1:
        return cl.CommandQueue.from_int_ptr(ev.queue_handle(x), True)
    return None


def _waits(after: Point, c: Context) -> list[int]:
    try:
        return ev.split(after, c.handle, HOST_TIMEOUT)
    except TimeoutError:
        raise
    except Exception as e:
        raise failed_write(e) from e


def events(x: Any) -> list[Any]:
    """What must be waited for before a Point's memory is used, as pyopencl Events: of ``lease.after``, or of what `release` returned.

    The host waits for Points that are no events. Raises what the work failed with.
    """
    cl = loader.module()
    out: list[Any] = []
    for p in ev.parts(x):
        if isinstance(p, ev.EventPoint) and p.handle:
            out.append(cl.Event.from_int_ptr(p.handle, True))
        else:
            p.wait(HOST_TIMEOUT)
    return out
