# The ledger of who uses which bytes: leases and Points by byte interval, and what the layer above makes of a conflict.

# ---- the ledger ----
cdef enum:
    READ_LEASE = 1
    WRITE_LEASE = 2
    READ_POINT = 4
    WRITE_POINT = 8
    DENSE = 16                   # of a WRITE_POINT: every byte of the interval is written

cdef struct Entry:
    uint64_t id
    uint64_t space               # 0: addresses; else the serial number of an Allocation behind a handle
    int64_t lo
    int64_t hi
    int kind
    PyObject* object             # strong

cdef Entry* _entries = NULL
cdef int _room = 0
cdef uint64_t _next_id = 1
cdef uint64_t _next_space = 1


cdef inline bint overlaps(Entry* e, uint64_t space, int64_t lo, int64_t hi) noexcept nogil:
    return e.space == space and e.lo < hi and lo < e.hi and lo < hi and e.lo < e.hi      # no bytes: nothing to share


def ledger_find(uint64_t space, int64_t lo, int64_t hi, int kinds):
    """``[(id, kind, object)]`` of the entries of these kinds that touch bytes lo to hi of a space."""
    cdef int i, n = 0
    cdef list out
    cdef Entry* found
    if not _n_entries:
        return []
    # Copied before any Python object is made: making one may run the collector, and that may end a lease
    found = <Entry*>malloc(<size_t>_n_entries * sizeof(Entry))
    if found == NULL:
        raise MemoryError()
    for i in range(_n_entries):
        if _entries[i].kind & kinds and overlaps(&_entries[i], space, lo, hi):
            found[n] = _entries[i]
            Py_INCREF(<object>found[n].object)
            n += 1
    out = []
    try:
        for i in range(n):
            out.append((found[i].id, found[i].kind, <object>found[i].object))
    finally:
        for i in range(n):
            Py_DECREF(<object>found[i].object)
        free(found)
    return out


def ledger_add(uint64_t space, int64_t lo, int64_t hi, int kind, object, int against=0, uint64_t own=0):
    """Enter a use of bytes and return its id; 0, and nothing is entered, where an entry of the kinds `against` touches them,
    other than `own`.

    One step, so that of two threads that want the same bytes one gets them.
    """
    global _entries, _n_entries, _room, _next_id
    cdef int i
    cdef Entry* grown
    cdef Entry* e
    if against:
        for i in range(_n_entries):
            if _entries[i].kind & against and _entries[i].id != own and overlaps(&_entries[i], space, lo, hi):
                return 0
    if _n_entries == _room:
        grown = <Entry*>realloc(_entries, <size_t>(2 * _room + 8) * sizeof(Entry))
        if grown == NULL:
            raise MemoryError()
        _entries = grown
        _room = 2 * _room + 8
    e = &_entries[_n_entries]
    e.id = _next_id
    e.space = space
    e.lo = lo
    e.hi = hi
    e.kind = kind
    Py_INCREF(object)
    e.object = <PyObject*>object
    _n_entries += 1
    _next_id += 1
    return e.id


def ledger_remove(uint64_t id):
    """Strike an entry out. Unknown ids (struck out before) are fine."""
    global _n_entries
    cdef int i
    cdef PyObject* o
    for i in range(_n_entries):
        if _entries[i].id == id:
            o = _entries[i].object
            _n_entries -= 1
            _entries[i] = _entries[_n_entries]
            Py_DECREF(<object>o)
            return True
    return False


cdef from_space(uint64_t space):
    # An allocation is gone: nothing can ask for its bytes any more.
    cdef int i = 0
    while i < _n_entries:
        if _entries[i].space == space:
            ledger_remove(_entries[i].id)
            i = 0
        else:
            i += 1


def ledger_strike(object, made_good, uint64_t only=0):
    """Strike out every entry of an object, or `only` one. What of them is DENSE goes to ``made_good(space, lo, hi, id)`` first, if any."""
    cdef int i = 0
    cdef uint64_t id
    while i < _n_entries:
        if _entries[i].object != <PyObject*>object or (only and _entries[i].id != only):
            i += 1
            continue
        id = _entries[i].id
        if made_good is not None and _entries[i].kind & DENSE:
            made_good(_entries[i].space, _entries[i].lo, _entries[i].hi, id)
        ledger_remove(id)
        i = 0


def ledger_bounds(uint64_t id):
    """``(space, lo, hi, kind)`` of an entry, or None."""
    cdef int i
    for i in range(_n_entries):
        if _entries[i].id == id:
            return _entries[i].space, _entries[i].lo, _entries[i].hi, _entries[i].kind
    return None


def ledger_size():
    """How many entries there are; 0 when nothing is leased and nothing pending."""
    return _n_entries


# ---- reaching up ----
_up_conflict = None              # leases.conflict(tensor, object): raises LeaseError naming the holder
_up_ready = None                 # points.make_ready(entries, device, stream, allocation): waits for, or orders behind, pending writes
_up_queue = None                 # points.check_queue(allocation, device, stream): refuses what is no queue of the memory's Context
_up_map = None                   # leases.map_tensor(tensor, access, copy)
_up_move = None                  # transfer.move(tensor, place, source, target, reason, remedy, stream): a Tensor there, copied
_up_native = None                # native.capsule_of(tensor, max_version)
_up_export = None                # memory.export(allocation, kind)
_up_exports = None               # memory.exports_of(allocation): kinds that somebody else's memory can be exported as
_up_import = None                # memory.import_pages(tensor, device): host memory as the memory of a device, the same bytes
_up_host_view = None             # memory.host_view(tensor): a Tensor of the host over the same bytes, or None
_up_copies = None                # registry.copies(device): whether an adapter copies memory of that device
_up_copyto = None                # transfer.copy_on(dst, src, stream): into a framework's fresh array


def set_upward(*, conflict, ready, queue, map, move, native, export, exports, pages, host_view, copies, copyto):
    """The functions that the layer above fills in, once."""
    global _up_conflict, _up_ready, _up_queue, _up_map, _up_move, _up_native, _up_export
    global _up_exports, _up_import, _up_host_view, _up_copies, _up_copyto
    _up_conflict, _up_ready, _up_queue, _up_map, _up_move, _up_native, _up_export = conflict, ready, queue, map, move, native, export
    _up_exports, _up_import, _up_host_view, _up_copies, _up_copyto = exports, pages, host_view, copies, copyto


cdef extern from *:
    """
    static __thread int interop_inside_lease = 0;      /* this thread is making the value of a lease: its own entry is no conflict */
    """
    int interop_inside_lease


class own_lease:
    """``with own_lease():`` the ledger is not consulted by this thread: the lease that would forbid is its own."""
    __slots__ = ()

    def __enter__(self):
        global interop_inside_lease
        interop_inside_lease += 1

    def __exit__(self, *exc):
        global interop_inside_lease
        interop_inside_lease -= 1


cdef int check_bytes(DLTensor* d, uint64_t flags, PyObject* alloc, stream) except -1:
    """Called when the ledger is not empty: a write lease forbids, a pending write is waited for or ordered before `stream`."""
    cdef int64_t lo = 0, hi = 0
    cdef uint64_t space = 0
    cdef int i
    cdef bint met = False
    if interop_inside_lease:
        return 0
    byte_range(d, flags, &lo, &hi)
    place_range(d, alloc, &space, &lo, &hi)
    for i in range(_n_entries):
        met |= _entries[i].kind & (WRITE_LEASE | WRITE_POINT) != 0 and overlaps(&_entries[i], space, lo, hi)
    if not met:
        return 0
    found = ledger_find(space, lo, hi, WRITE_LEASE | WRITE_POINT)
    for _, kind, holder in found:
        if kind & WRITE_LEASE:
            _up_conflict(holder)
    _up_ready(found, device_of(d.device), stream,
              <object>alloc if alloc != NULL else None)
    return 0


cdef int may_read(DLTensor* d, uint64_t flags, PyObject* alloc, stream) except -1:
    """Before bytes are read or handed out: open, of this process, nobody writing, what is pending ordered."""
    if alloc != NULL:
        check_allocation(<Allocation>alloc)
    if _n_entries:
        check_bytes(d, flags, alloc, stream)
    return 0


cdef void byte_range(DLTensor* d, uint64_t flags, int64_t* lo, int64_t* hi) noexcept nogil:
    """Bytes that a view touches, relative to its `data`."""
    cdef int64_t low = 0, high = 1, width = <int64_t>d.dtype.bits * d.dtype.lanes
    cdef int i
    if flags & OPAQUE:
        lo[0] = d.byte_offset
        hi[0] = d.byte_offset + d.strides[0]
        return
    if is_empty(d.ndim, d.shape):
        lo[0] = hi[0] = d.byte_offset
        return
    for i in range(d.ndim):
        if d.shape[i] > 1:
            if d.strides[i] < 0:
                low += (d.shape[i] - 1) * d.strides[i]
            else:
                high += (d.shape[i] - 1) * d.strides[i]
    if width & 7 and flags & DL_SUBBYTE_PADDED:
        width = 8 * d.dtype.lanes
    lo[0] = <int64_t>d.byte_offset + (low * width >> 3)
    hi[0] = <int64_t>d.byte_offset + ((high * width + 7) >> 3)


_handles = {}                    # (device type, id, handle) -> WeakSet of the Allocations that have it


cdef object known_allocation(DLTensor* d):
    """The one live Allocation behind a handle; None where there is none, or several in different Contexts: then nobody can tell."""
    found = _handles.get((d.device.device_type, d.device.device_id, <uintptr_t>d.data))
    if found is None:
        return None
    # without a Context or an adapter nobody says whose numbers these are: equal ones are then not one memory
    alive = [a for a in found if not a.is_closed and (a.context is not None or a.adapter is not None)]
    if not alive or len({id(a.context) for a in alive}) > 1:
        return None
    return alive[0]


cdef int place_range(DLTensor* d, PyObject* alloc, uint64_t* space, int64_t* lo, int64_t* hi) except -1:
    # From "relative to data" to a range in the space that all views, imports and aliases of the bytes share.
    cdef int64_t shift
    if alloc != NULL and ((<Allocation>alloc).space or (<Allocation>alloc).imported or not addressable(d.device.device_type)):
        # also an import that is mapped elsewhere than its root: the root's bytes are what counts
        space[0] = (<Allocation>alloc).space
        shift = (<Allocation>alloc).origin
        if addressable(d.device.device_type):
            shift += <int64_t><uintptr_t>d.data - <int64_t>(<Allocation>alloc).value
    elif addressable(d.device.device_type):
        space[0] = 0
        shift = <int64_t><uintptr_t>d.data
    else:
        known = known_allocation(d)
        if known is not None:
            space[0] = (<Allocation>known).space
            shift = (<Allocation>known).origin
        else:
            # a handle that nobody vouches for: the handle itself is all there is to compare
            space[0] = (<uint64_t>1 << 63) | <uint64_t><uintptr_t>d.data
            shift = 0
    lo[0] += shift
    hi[0] += shift
    return 0


def byte_span(Tensor t not None):
    """``(space, lo, hi)``: which bytes a tensor touches, in the ledger's terms."""
    cdef int64_t lo = 0, hi = 0
    cdef uint64_t space = 0
    byte_range(&t.dl, t.flags, &lo, &hi)
    place_range(&t.dl, t.alloc, &space, &lo, &hi)
    return space, lo, hi
