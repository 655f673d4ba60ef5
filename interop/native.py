"""The side channel: what DLPack cannot carry, said and read. Sizes, contexts, the memory object below a handle, and when it is ready.

Policy over the core's struct (``include/interop_native.h`` says what each field means): which fields a tensor of ours gets, and what an
Allocation is made of when somebody else fills them in. Knows the contract and Points; no framework and no driver by name.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import _core, points
from ._core import Allocation, Device, Tensor
from .errors import ExchangeError
from .points import READY, Point
from .registry import adapter_of

MAJOR, MINOR = 1, 0
#: Flags of the side channel that are traits of an Allocation too.
_TRAITS = frozenset({"host_visible", "coherent", "cached", "dedicated"})
_HOST_TRAITS = {"cpu": _TRAITS - {"dedicated"}, "cuda_host": _TRAITS - {"dedicated"}, "rocm_host": _TRAITS - {"dedicated"},
                "cuda_managed": frozenset({"host_visible"})}
#: Kinds of readiness whose native form is a handle that a Point carries, by the device that it belongs to.
_EVENTS = {"opencl": "cl_event", "cuda": "cuda_event", "cuda_managed": "cuda_event"}
#: Fields that only an adapter can fill in (contract: `native_fields`).
ADAPTER_FIELDS = ("memory", "memory_nbytes", "memory_offset", "memory_type", "queue_family", "context", "physical_device", "instance",
                  "queue", "device_uuid", "driver_uuid")


class Described:
    """The owner of an Allocation that somebody else's side channel described.

    Attributes:
        fields: what it said; ``fields["owner"]`` keeps the memory.
        tensor: what DLPack said, where it did: as long as the memory is used through the Allocation, neither is given back.
    """

    __slots__ = ("fields", "tensor")

    def __init__(self, fields: Mapping[str, Any], tensor: Tensor | None) -> None:
        """Keep both."""
        self.fields, self.tensor = fields, tensor


# ---- giving ----
def capsule_of(t: Tensor, max_version: Any) -> Any:
    """``Tensor.__interop_native__``: a capsule ``interop_native_v1`` that describes the memory of `t` and holds it.

    Refused as an export is: while somebody writes, after close, where the last write failed. Pending work is not waited for where a
    Point can say when it ends.

    Raises:
        ExchangeError: refused, or `max_version` is below 1.0. TypeError, ValueError: `max_version` is no version.
    """
    check_version(max_version)
    streams = _core.pending_stream(t) != -1
    lent = _core.native_lend(t, streams)        # work on a stream is not ours to wait for, so what is ours is waited for now
    allocation = t.allocation
    allocation.check()
    fields = fields_of(allocation)
    if t.readonly:
        fields["flags"] |= {"readonly"}
    point = READY if streams else _pending(t)
    if streams:
        fields.update(ready_kind="stream", queue=_core.pending_stream(t))
    elif point is not READY:
        fields.update(_ready_fields(point, t.device))
    return _core.native_capsule(lent, fields, None if point is READY else point)


def check_version(max_version: Any) -> None:
    """Whether 1.0, all that we have, is what the consumer can read."""
    try:
        major, minor = max_version
        major, minor = major.__index__(), minor.__index__()
    except (TypeError, ValueError, AttributeError):
        raise TypeError(f"max_version {max_version!r}: must be a pair of ints") from None
    if major < 0 or minor < 0:
        raise ValueError(f"max_version {max_version!r}: versions are not negative")
    if major < MAJOR:
        raise ExchangeError(f"max_version {max_version!r}: the side channel starts at {MAJOR}.{MINOR}", f"max_version=({MAJOR}, {MINOR})")


def fields_of(allocation: Allocation) -> dict[str, Any]:
    """What is known of an Allocation, as the mapping twin, without readiness."""
    fields: dict[str, Any] = {}
    flags: set[str] = set(allocation.traits & _TRAITS)
    if isinstance(allocation.owner, Described):
        given = allocation.owner.fields
        fields.update((name, given[name]) for name in ADAPTER_FIELDS)
        flags |= given["flags"] & {"partial", "handle_is_pointer"}
    elif isinstance(allocation.owner, Tensor):
        flags |= {"partial"} | _HOST_TRAITS.get(allocation.device.name, frozenset())       # made for memory of somebody else
    adapter = allocation.adapter or adapter_of(allocation.device)
    if adapter is not None and adapter.can("native_fields"):
        more = adapter.native_fields(allocation)
        unknown = set(more) - set(ADAPTER_FIELDS)
        if unknown:
            raise TypeError(f"adapter {adapter.name}: native_fields returned {', '.join(sorted(unknown))}: known are "
                            f"{', '.join(ADAPTER_FIELDS)}")
        fields.update(more)
    if _core.is_addressable(allocation.device):
        flags |= {"handle_is_pointer"}
    if allocation.readonly:
        flags |= {"readonly"}
    device_type, device_id = allocation.device
    fields.update(device_type=device_type, device_id=device_id, flags=flags, handle=allocation.handle,
                  nbytes=allocation.nbytes + allocation.skip)
    return fields


def _pending(t: Tensor) -> Point:
    """When the memory may be used: its last write for readers, and its last reads too for whoever could write."""
    span = _core.byte_span(t)
    writes = points.prune(_core.ledger_find(*span, _core.WRITE_POINT))
    for _, _, p in writes:
        if p.done() and (error := p.error()) is not None:
            raise points.failed_write(error)
    reads = [] if t.readonly else points.prune(_core.ledger_find(*span, _core.READ_POINT))
    return points.all_of([p for _, _, p in writes] + [p for _, _, p in reads if not p.done()])


def _ready_fields(p: Point, device: Device) -> dict[str, Any]:
    try:
        form = p.native()
    except ExchangeError:
        return {"ready_kind": "host"}
    if isinstance(form, list) and len(form) == 1:
        form = form[0]
    if device.name == "vulkan" and isinstance(form, tuple) and len(form) == 2:
        return {"ready_kind": "timeline", "ready_handle": int(form[0]), "ready_value": int(form[1])}
    if device.name in _EVENTS and isinstance(form, int):
        return {"ready_kind": _EVENTS[device.name], "ready_handle": form}
    return {"ready_kind": "host"}       # several at once, or a form that has no name here


# ---- taking ----
def describe(x: Any) -> dict[str, Any]:
    """What the side channel of `x` says, whichever of its two forms `x` gives: a dict with every field of the mapping twin.

    Fields are named as in ``interop_native.h``. ``flags`` is a set of names, ``ready_kind`` a name, UUIDs are bytes or None, and
    ``memory_type`` and ``queue_family`` None where they are not said. ``wait(timeout_ns)`` returns what the C function returns.
    ``owner`` keeps the memory: as long as it lives every handle is valid.

    Raises:
        TypeError: `x` has no side channel. ExchangeError: what it says cannot be; its struct is freed.
    """
    method = getattr(x, "__interop_native__", None)
    if method is None:
        raise TypeError(f"{type(x).__module__}.{type(x).__qualname__} has no __interop_native__")
    said = method(max_version=(MAJOR, MINOR))
    if said is None:
        raise ExchangeError(f"{type(x).__name__}.__interop_native__ has nothing to say")
    return _read(said, x)


def _read(said: Any, x: Any) -> dict[str, Any]:
    fields: dict[str, Any]
    if isinstance(said, Mapping):
        fields = _core.read_native_mapping(said, x)
        return fields
    if type(said).__name__ != "PyCapsule":
        raise TypeError(f"{type(x).__name__}.__interop_native__ returned {type(said).__name__}, neither a capsule nor a mapping")
    fields = _core.read_native(said)
    return fields


def allocation_from(x: Any) -> Allocation:
    """The memory that the side channel of `x` describes, whole: ``.tensor(shape, dtype)`` views it. Its pending work is noted.

    Where interop itself made the description it is that very Allocation, with its Context. Raises as `describe` does.
    """
    fields = describe(x)
    a, point = _allocation(fields, None)
    if not point.done() or point.error() is not None:
        points.note(a.tensor((a.nbytes,), "uint8"), "write", point)
    return a


def join(t: Tensor, x: Any, method: Callable[..., Any]) -> Tensor:
    """`t`, which DLPack gave for `x`, over an Allocation with what the side channel says. Called by the core, for handles only.

    Where the producer has nothing to say, or nothing in a version that we read, DLPack's word alone is as good as it was.
    """
    try:
        said = method(max_version=(MAJOR, MINOR))
    except BufferError:
        return t
    if said is None:
        return t
    fields = _read(said, x)
    a, point = _allocation(fields, t)
    out: Tensor = _core.tensor_within(a, t, "readonly" in fields["flags"])
    points.note(out, "write", point)
    return out


#: One memory object, one Allocation: what is described twice while the first still lives is the same. By device, context, handle, size.
_known: weakref.WeakValueDictionary[tuple[int, ...], Allocation] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _allocation(fields: dict[str, Any], t: Tensor | None) -> tuple[Allocation, Point]:
    source = _core.native_source(fields["owner"])
    if source is not None:
        return source.allocation, READY     # its Points are in the ledger already
    point = readiness(fields)
    device = Device(fields["device_type"], fields["device_id"])
    key = (*device, fields["context"], fields["handle"], fields["nbytes"])
    with _lock:
        found = _known.get(key) if fields["context"] else None      # a handle means nothing without its context
        if found is None or found.is_closed:
            found = Allocation(fields["handle"], fields["nbytes"], device, owner=Described(fields, t),
                               readonly="readonly" in fields["flags"], traits=fields["flags"] & _TRAITS)
            if fields["context"]:
                _known[key] = found
    return found, point


def readiness(fields: Mapping[str, Any]) -> Point:
    """When the described memory may be used, as a Point. Its native form is the semaphore or event, where there is one."""
    kind, wait = fields["ready_kind"], fields["wait"]
    if kind in ("ready", "stream"):
        return READY        # by stream: `__dlpack__` has ordered it
    native: Any = None
    if kind == "timeline":
        native = [(fields["ready_handle"], fields["ready_value"])]
    elif kind != "host":
        native = fields["ready_handle"]
    device = Device(fields["device_type"], fields["device_id"])

    def look(timeout_ns: int) -> bool:
        rc = wait(timeout_ns)
        if rc in (0, 1, -2):        # done, not yet, a signal came in: whoever waits looks again
            return bool(rc == 0)
        raise ExchangeError(f"the producer's wait for memory on {device} failed with {rc!r}", "make the memory anew")

    return points.point(done=lambda: look(0), wait=lambda seconds: look(int(seconds * 1e9)), native=native)


_core.set_native_join(join)
