# Allocation: the root bytes that tensors view; the ledger of who uses which bytes; the queue of what is released later.
# State only. What it means to wait, to map or to copy, the layer above knows; it is reached through the `_up_*` functions.

# ---- fork ----
cdef extern from *:
    """
    #include <pthread.h>
    static unsigned int interop_generation = 0;        /* counts forks seen from inside: the child owns no driver object */
    static int interop_n_entries = 0;                  /* of the ledger: leases and Points of the parent do not bind the child */
    static void interop_forked(void) { interop_generation++; interop_n_entries = 0; }
    static void interop_watch_fork(void) { pthread_atfork(NULL, NULL, interop_forked); }

    /* Objects that cannot be released where they are: pushed from any thread, with or without the GIL, never blocking. */
    typedef struct interop_node { struct interop_node *next; PyObject *object; } interop_node;
    static interop_node *interop_retired = NULL;
    static int (*interop_drain_call)(void *) = NULL;     /* set below */
    static void interop_retire(PyObject *o) {
        interop_node *n = (interop_node *)malloc(sizeof *n);
        if (!n) return;                                  /* leaks one reference rather than run code here */
        n->object = o;
        n->next = __atomic_load_n(&interop_retired, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&interop_retired, &n->next, n, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
        if (interop_drain_call && Py_IsInitialized() && !interop_finalizing()) Py_AddPendingCall(interop_drain_call, NULL);
    }
    static interop_node *interop_take_retired(void) { return __atomic_exchange_n(&interop_retired, NULL, __ATOMIC_ACQUIRE); }
    """
    unsigned int interop_generation
    int _n_entries "interop_n_entries"
    int (*interop_drain_call)(void*) noexcept
    void interop_watch_fork()
    ctypedef struct interop_node:
        interop_node* next
        PyObject* object
    void interop_retire(PyObject*) noexcept nogil
    interop_node* interop_take_retired() noexcept nogil

interop_watch_fork()


cdef int drain_call(void* unused) noexcept:
    # A pending call of the interpreter, on its main thread.
    try:
        drain()
    except BaseException as e:
        _report(e)
    return 0


def report(e):
    """Show an error that nobody can be given, as Python shows those of finalizers."""
    _report(e)


cdef _report(e):
    cdef PyObject* a = NULL
    cdef PyObject* b = NULL
    cdef PyObject* c = NULL
    kind = type(e)
    trace = e.__traceback__
    PyErr_Fetch(&a, &b, &c)
    Py_INCREF(kind)
    Py_INCREF(e)
    if trace is not None:
        Py_INCREF(trace)
    PyErr_Restore(<PyObject*>kind, <PyObject*>e, <PyObject*>trace if trace is not None else NULL)
    PyErr_WriteUnraisable("interop, while releasing")
    PyErr_Restore(a, b, c)


interop_drain_call = drain_call


def drain():
    """Give back what was retired from threads that could not. Returns how many references."""
    cdef interop_node* n = interop_take_retired()
    cdef interop_node* next
    cdef int count = 0
    while n != NULL:
        next = n.next
        Py_DECREF(<object>n.object)
        free(n)
        n = next
        count += 1
    return count


def retire_address():
    """Address of ``void retire(PyObject *)``: takes over one reference, from any thread, without the GIL. For drivers' callbacks."""
    return <uintptr_t>&interop_retire


def generation():
    """How many forks this process is away from the one that imported interop."""
    return interop_generation


# ---- the ledger ----
cdef enum:
    READ_LEASE = 1
    WRITE_LEASE = 2
    READ_POINT = 4
    WRITE_POINT = 8

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


def ledger_strike(object):
    """Strike out every entry of an object."""
    cdef int i = 0
    while i < _n_entries:
        if _entries[i].object == <PyObject*>object:
            ledger_remove(_entries[i].id)
            i = 0
        else:
            i += 1


def ledger_bounds(uint64_t id):
    """``(space, lo, hi, kind)`` of an entry, or None."""
    cdef int i
    for i in range(_n_entries):
        if _entries[i].id == id:
            return _entries[i].space, _entries[i].lo, _entries[i].hi, _entries[i].kind
    return None


def ledger_object(uint64_t id):
    """The object of an entry, or None."""
    cdef int i
    for i in range(_n_entries):
        if _entries[i].id == id:
            return <object>_entries[i].object
    return None


def ledger_size():
    """How many entries there are; 0 when nothing is leased and nothing pending."""
    return _n_entries


# ---- reaching up ----
_up_conflict = None              # leases.conflict(tensor, object): raises LeaseError naming the holder
_up_ready = None                 # points.make_ready(entries, device, stream): waits for, or orders behind, pending writes
_up_map = None                   # leases.map_tensor(tensor, access, copy)
_up_move = None                  # transfer.move(tensor, place): a Tensor there, copied
_up_native = None                # native.capsule_of(tensor, max_version)
_up_export = None                # memory.export(allocation, kind)


def set_upward(conflict, ready, map, move, native, export):
    """The functions that the layer above fills in, once."""
    global _up_conflict, _up_ready, _up_map, _up_move, _up_native, _up_export
    _up_conflict, _up_ready, _up_map, _up_move, _up_native, _up_export = conflict, ready, map, move, native, export


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


cdef int check_bytes(DLTensor* d, PyObject* alloc, stream) except -1:
    """Called when the ledger is not empty: a write lease forbids, a pending write is waited for or ordered before `stream`."""
    cdef int64_t lo = 0, hi = 0
    cdef uint64_t space = 0
    cdef int i
    cdef bint met = False
    if interop_inside_lease:
        return 0
    byte_range(d, 0, &lo, &hi)
    place_range(d, alloc, &space, &lo, &hi)
    for i in range(_n_entries):
        met |= _entries[i].kind & (WRITE_LEASE | WRITE_POINT) != 0 and overlaps(&_entries[i], space, lo, hi)
    if not met:
        return 0
    found = ledger_find(space, lo, hi, WRITE_LEASE | WRITE_POINT)
    for _, kind, holder in found:
        if kind == WRITE_LEASE:
            _up_conflict(holder)
    _up_ready([(id, point) for id, _, point in found], device_of(d.device), stream)
    return 0


cdef int may_read(DLTensor* d, PyObject* alloc, stream) except -1:
    """Before bytes are read or handed out: open, of this process, nobody writing, what is pending ordered."""
    if alloc != NULL:
        check_allocation(<Allocation>alloc)
    if _n_entries:
        check_bytes(d, alloc, stream)
    return 0


cdef void byte_range(DLTensor* d, uint64_t flags, int64_t* lo, int64_t* hi) noexcept nogil:
    """Bytes that a view touches, relative to its `data`."""
    cdef int64_t low = 0, high = 1, width = <int64_t>d.dtype.bits * d.dtype.lanes
    cdef int i
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
    if alloc != NULL and ((<Allocation>alloc).space or not addressable(d.device.device_type)):
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


from weakref import WeakKeyDictionary as _WeakKeyDictionary, WeakSet as _WeakSet, ref as _weak


# ---- Allocation ----
@cython.no_gc_clear
cdef class Allocation:
    """One memory object: the root bytes, what owns them and what they can do. Made by `wrap`, `empty` and adapters.

    Every tensor over it holds it; it holds its Context and its owner. `close` frees it at once, the last reference otherwise.
    """
    cdef readonly object nbytes          # int: size of the whole memory object
    cdef readonly object context         # a Context; None: plain host memory
    cdef readonly object owner           # kept until release; may be None
    cdef readonly object alignment       # int, bytes
    cdef readonly frozenset traits       # "host_visible", "coherent", "cached", "pinned", ...
    cdef readonly frozenset exports      # kinds of ExternalHandle that export() makes
    cdef readonly dict imports           # what other Contexts made of these bytes; released before the root
    cdef readonly bint readonly
    cdef readonly object atom            # int: bytes that the host and the device can only exchange together; leases are of whole ones
    cdef readonly object adapter         # who maps, copies and exports it; None: plain host memory
    cdef object on_release
    cdef DLDevice dl
    cdef uint64_t value
    cdef uint64_t space
    cdef int64_t origin
    cdef Py_ssize_t lent                 # exports that are alive
    cdef bint closed
    cdef bint owns_space         # the serial number is its own, not its root's
    cdef Allocation lender       # the root, as long as this map or import counts as an export of it
    cdef bint imported           # of a root: what is said of the bytes is said of the root's
    cdef bint foreign            # somebody else's memory, seen through a tensor: not ours to close
    cdef bint dies_at_fork       # pages that a child does not inherit
    cdef unsigned int generation
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.closed = True       # until it is one: what cannot be made releases nothing

    def __init__(self, uint64_t value, nbytes, device, *, owner=None, on_release=None, context=None, adapter=None, alignment=None,
                 readonly=False, traits=(), exports=(), Allocation root=None, root_offset=0, lent=False, dies_at_fork=False, atom=1):
        """`root`: the Allocation whose bytes this one is an import of; they share leases and Points, `root_offset` bytes in. `lent`:
        while this one lives, the root cannot be closed. `dies_at_fork`: a child must not touch it. `atom`: the bytes that
        the host and the device exchange together at least (Vulkan's nonCoherentAtomSize where memory is not coherent).
        """
        global _next_space
        self.dl = get_device(device).dl
        if not 0 <= nbytes < 2**63:
            raise ValueError(f"nbytes {nbytes}: must be from 0 to 2**63 - 1")
        self.nbytes = nbytes
        self.value = value
        self.owner = owner
        self.on_release = on_release
        self.context = context
        self.adapter = adapter
        self.alignment = alignment if alignment is not None else ((value & -value) if value and addressable(self.dl.device_type) else 1)
        self.readonly = readonly
        self.atom = root.atom if root is not None else atom
        self.traits = frozenset(traits)
        self.exports = frozenset(exports)
        self.imports = {}
        self.generation = interop_generation
        self.dies_at_fork = dies_at_fork or context is not None
        self.imported = root is not None
        if root is not None and lent:
            self.lender = root
            root.lent += 1
        if root is not None:
            if root_offset < 0 or root_offset + nbytes > root.nbytes:
                raise ValueError(f"an import of {nbytes} bytes at {root_offset} does not lie in its root of {root.nbytes} bytes")
            self.space = root.space      # 0, also for a handle, where the root is ranked by its addresses
            self.origin = root.origin + root_offset
        elif addressable(self.dl.device_type):
            self.origin = <int64_t>value
        else:
            key = (self.dl.device_type, self.dl.device_id, value)
            same = [a for a in _handles.setdefault(key, _WeakSet())
                    if not a.is_closed and a.context is context and a.adapter is adapter and (context, adapter) != (None, None)]
            if same:                             # one memory object, wrapped again: the same leases and Points
                self.space = (<Allocation>same[0]).space
                self.origin = (<Allocation>same[0]).origin
            else:
                self.space = _next_space
                self.owns_space = True
                _next_space += 1
            _handles[key].add(self)
        self.closed = False

    @property
    def device(self):
        """Where the bytes live."""
        return device_of(self.dl)

    @property
    def handle(self):
        """A NativeHandle's value: address of the first byte, or the native handle."""
        return self.value

    @property
    def lent_out(self):
        """How many exports (arrays of frameworks, capsules, buffers) are alive; while any is, `close` refuses."""
        return self.lent

    @property
    def is_closed(self):
        """Whether the memory has been given back."""
        return self.closed

    def tensor(self, shape, dtype, *, strides=None, row_pitch=None, byte_offset=0, readonly=None):
        """A Tensor over part of these bytes.

        Args:
            shape: extents; an int for one dimension.
            dtype: anything that names a dtype.
            strides: in elements, as many as extents; default row-major.
            row_pitch: bytes from one step of the first dimension to the next, instead of strides: the rest is row-major. A multiple of
                the item size, at least one row (camera frames, padded images).
            byte_offset: of the first element.
            readonly: True for a read-only view; False is an error on read-only memory.

        Raises ValueError where the view would reach outside the allocation.
        """
        return allocation_view(self, shape, get_device(self.device), get_dtype(dtype), strides, row_pitch, byte_offset, readonly)

    def export(self, kind):
        """An `ExternalHandle` to the whole memory object, of one of the kinds in `exports`; whoever holds it closes it."""
        return _up_export(self, kind)

    def check(self):
        """Raise where this memory must not be used any more: closed, or made before a fork that it does not survive."""
        check_allocation(self)

    def span(self):
        """``(space, lo, hi)`` of the whole allocation."""
        return self.space, self.origin, min(self.origin + self.nbytes, 2**63 - 1)

    def close(self):
        """Give the memory back now. Idempotent.

        Raises LeaseError while a lease is held, ExchangeError while exports are alive or work is queued that uses the memory.
        """
        if self.closed:
            return
        if self.foreign:
            raise ExchangeError("this memory is somebody else's: interop only looks at it", "drop the tensors and arrays over it")
        if self.generation == interop_generation:
            space, lo, hi = self.span()
            for _, kind, holder in ledger_find(space, lo, hi, READ_LEASE | WRITE_LEASE):
                _up_conflict(holder)
            if self.lent:
                raise ExchangeError(f"{self.lent} export{'s' if self.lent > 1 else ''} of this allocation of {self.nbytes} bytes "
                                    "still use it", "drop the arrays, capsules and buffers made from its tensors")
            for id, kind, point in ledger_find(space, lo, hi, READ_POINT | WRITE_POINT):
                if not point.done():
                    raise ExchangeError(f"queued work still uses this allocation of {self.nbytes} bytes", "wait for it: point.wait()")
        release_allocation(self, True)

    def __del__(self):
        release_allocation(self, False)

    def __repr__(self):
        parts = [f"{self.nbytes} bytes", str(self.device), f"{'address' if addressable(self.dl.device_type) else 'handle'}={self.value:#x}"]
        if self.readonly:
            parts.append("readonly")
        if self.traits:
            parts.append("|".join(sorted(self.traits)))
        if self.closed:
            parts.append("closed")
        return f"Allocation({', '.join(parts)})"

    def __reduce_ex__(self, protocol):
        raise TypeError("an Allocation is memory of this process; export(kind) gives a handle that crosses")


cdef release_allocation(Allocation a, bint now):
    """Once: imports first, then the owner is told, then let go. What is still used by queued work waits for it."""
    cdef object release
    if a.closed:
        return
    a.closed = True
    if interop_finalizing() or (a.generation != interop_generation
                                and (a.dies_at_fork or a.adapter is not None or a.on_release is not None)):
        # the parent's, whose second release this would be; or too late for anybody's driver: leaks on purpose
        if a.owner is not None:
            Py_INCREF(a.owner)
        if a.context is not None:
            Py_INCREF(a.context)
        return
    if a.lender is not None:
        a.lender.lent -= 1
        a.lender = None
    pending = []
    for id, _, p in ledger_find(*a.span(), READ_POINT | WRITE_POINT):
        if not p.done():
            pending.append(p)
        elif not a.foreign and not a.imported:
            ledger_remove(id)    # the bytes that it speaks of are gone
    if a.owns_space:
        from_space(a.space)
    imports = list(a.imports.values())
    a.imports.clear()
    release = a.on_release
    a.on_release = None
    work = _Release(imports, release, a.owner, a.context, pending)
    a.owner = None
    if pending:
        _later.append(work)
        for p in pending:        # whichever is last runs it; a look at the others costs little
            p.add_done_callback(_release_later)
    elif interop_foreign_thread:
        # a thread that Python does not know: no callback of the user's runs here
        Py_INCREF(work)
        interop_retire(<PyObject*>work)
    else:
        work.run()


class _Release:
    """What has to happen when memory goes: in order, exactly once, never raising into whoever dropped the last reference."""
    __slots__ = ("imports", "callback", "owner", "context", "points", "done")

    def __init__(self, imports, callback, owner, context, points):
        self.imports, self.callback, self.owner, self.context, self.points, self.done = imports, callback, owner, context, points, False

    def ready(self):
        return all([p.done() for p in self.points])

    def run(self):
        if self.done:
            return
        self.done = True
        for i in reversed(self.imports):
            try:
                i.close()
            except BaseException as e:
                _report(e)
        self.imports = ()
        if self.callback is not None:
            try:
                self.callback()
            except BaseException as e:
                _report(e)
        self.callback = self.owner = self.context = None
        for point in self.points:
            ledger_strike(point)
        self.points = ()

    def __del__(self):
        self.run()


cdef list _later = []            # releases that wait for queued work


def _release_later(point):
    release_ready()


def waiting_in(context):
    """How many releases of a Context wait for queued work."""
    return len([w for w in _later if w.context is context])


def release_ready():
    """Run the releases whose work has finished; how many still wait."""
    if _later:
        waiting = [w for w in _later if not w.ready()]
        ready = [w for w in _later if w not in waiting]
        _later[:] = waiting
        for w in ready:
            w.run()
    return len(_later)


cdef int check_allocation(Allocation a) except -1:
    if a.closed:
        raise ExchangeError(f"this memory of {a.nbytes} bytes on {a.device} was closed", "make the tensor anew")
    if a.generation != interop_generation and a.dies_at_fork:
        raise ExchangeError(f"this memory on {a.device} was made before fork: a child process owns no driver object",
                            "make it in the child, or start workers with the 'spawn' method")
    return 0


cdef Tensor allocation_view(Allocation a, shape, Device device, DType dtype, strides, row_pitch, byte_offset, readonly):
    cdef int64_t dims[MAX_NDIM]
    cdef int64_t steps[MAX_NDIM]
    cdef int64_t lo = 0, hi = 0, row
    cdef int n, i
    cdef Tensor t
    cdef DLTensor d
    cdef bint packed
    check_allocation(a)
    extents = (_index(shape),) if hasattr(shape, "__index__") else tuple([_index(s) for s in shape])
    n = len(extents)
    if n > MAX_NDIM:
        raise ValueError(f"{n} dimensions: at most {MAX_NDIM}")
    for i in range(n):
        if not 0 <= extents[i] < 2**63:
            raise ValueError(f"shape {extents}: extents are not negative")
        dims[i] = extents[i]
    packed = is_packed(dtype.dl, 0)
    if strides is not None and row_pitch is not None:
        raise TypeError("give strides or row_pitch, not both")
    if strides is not None:
        steps_ = tuple([_index(s) for s in strides])
        if len(steps_) != n:
            raise ValueError(f"strides {steps_} for shape {extents}: one for each extent, in elements")
        for i in range(n):
            if not -2**63 <= steps_[i] < 2**63:
                raise ValueError(f"strides {steps_}: beyond 64 bits")
            steps[i] = steps_[i]
    else:
        compact_strides(n, dims, steps)
    d.data = <void*><uintptr_t>a.value
    d.device = a.dl
    d.ndim = n
    d.dtype = dtype.dl
    d.shape = dims
    d.strides = steps
    try:
        check_extent(dtype.dl, n, dims, steps)
    except ExchangeError as e:
        raise ValueError(str(e)) from None
    if row_pitch is not None:
        if n == 0 or packed:
            raise ValueError("row_pitch needs at least one dimension and whole-byte elements")
        row = element_bytes(dtype.dl, 0)
        pitch = _index(row_pitch)
        width = steps[0] * row if dims[0] > 1 or n > 1 else row
        if pitch % row:
            raise ValueError(f"row_pitch {pitch} is not a multiple of the {row}-byte {dtype}: strides count elements")
        if pitch < width:
            raise ValueError(f"row_pitch {pitch} is less than a row of {width} bytes")
        if pitch >= 2**62:
            raise ValueError(f"row_pitch {pitch} reaches outside the allocation of {a.nbytes} bytes")
        steps[0] = pitch // row
        try:
            check_extent(dtype.dl, n, dims, steps)
        except ExchangeError as e:
            raise ValueError(str(e)) from None
    offset = _index(byte_offset)
    if not 0 <= offset <= a.nbytes:
        raise ValueError(f"byte_offset {offset} lies outside the allocation of {a.nbytes} bytes")
    d.byte_offset = 0
    byte_range(&d, 0, &lo, &hi)
    first, last = offset + <object>lo, offset + <object>hi       # beyond 64 bits, where it must be
    if not is_empty(n, dims) and (first < 0 or last > a.nbytes):
        raise ValueError(f"shape {extents} of {dtype} at byte {offset} touches bytes {first} to {last} "
                         f"of an allocation of {a.nbytes} bytes")
    d.byte_offset = offset
    if addressable(a.dl.device_type) and (a.value + <uint64_t>offset) % <uint64_t>component_bytes(dtype.dl) and not is_empty(n, dims):
        raise ValueError(f"byte_offset {offset}: the first {dtype} would lie at {a.value + <uint64_t>offset:#x}, "
                         f"not a multiple of {component_bytes(dtype.dl)} bytes")
    if readonly is False and a.readonly:
        raise ValueError("the allocation is read-only: readonly=False cannot be had")
    t = over_object(a, &d, DL_READ_ONLY if a.readonly or readonly else 0)
    t.alloc = <PyObject*>a
    return t


# ---- exports that count ----
@cython.no_gc_clear
@cython.final
@cython.internal
cdef class _Export:
    """As long as one is alive, the allocation cannot be closed."""
    cdef Allocation allocation

    def __dealloc__(self):
        self.allocation.lent -= 1


cdef Tensor counted(Tensor t):
    """The same view for somebody outside to hold."""
    cdef _Export token
    cdef Tensor out
    cdef Allocation a = <Allocation>t.alloc
    check_allocation(a)
    token = _Export.__new__(_Export)
    token.allocation = a
    a.lent += 1
    out = blank_object_tensor(token)
    copy_view(out, t)
    return out


cdef copy_view(Tensor out, Tensor t):
    out.dl = t.dl
    out.dl.ndim = 0
    out.dl.shape = NULL
    take_dims(out, t.dl.ndim, t.dl.shape, t.dl.strides)
    out.flags = t.flags
    out.stream = t.stream
    out.alloc = t.alloc


cdef inline Tensor lend(Tensor t, stream):
    """Before a tensor leaves: nobody may be writing, what is pending is ordered, and the export is counted where there is a close()."""
    may_read(&t.dl, t.alloc, stream)
    return counted(t) if t.alloc != NULL else t


# ---- the allocation of a foreign tensor ----
_foreign = _WeakKeyDictionary()  # root Tensor -> weak Allocation


cdef Tensor root_of(Tensor t):
    cdef object owner
    while True:
        if isinstance(t, _ObjectTensor):
            owner = (<_ObjectTensor>t).keep
        else:
            owner = <object>t.held if not t.owns and t.held != NULL else None
        if not isinstance(owner, Tensor):
            return t
        t = <Tensor>owner


cdef object allocation_of(Tensor t):
    """The Allocation behind a tensor; for memory of others one is made when it is asked for, on the root, and all views see it."""
    cdef Tensor root
    cdef int64_t lo = 0, hi = 0
    cdef Allocation a
    if t.alloc != NULL:
        return <object>t.alloc
    root = root_of(t)
    ref = _foreign.get(root)
    found = ref() if ref is not None else None
    if found is not None:
        return found
    byte_range(&root.dl, root.flags, &lo, &hi)
    if addressable(root.dl.device.device_type):
        a = Allocation(<uint64_t>(<int64_t><uintptr_t>root.dl.data + lo), hi - lo, device_of(root.dl.device), owner=root,
                       readonly=bool(root.flags & DL_READ_ONLY))
    else:
        # the size behind a foreign handle is not known: as far as this view reaches
        known = known_allocation(&root.dl)
        a = Allocation(<uint64_t><uintptr_t>root.dl.data, max(hi, 0), device_of(root.dl.device), owner=root,
                       readonly=bool(root.flags & DL_READ_ONLY), root=known if known is not None and hi <= known.nbytes else None,
                       context=None if known is None else known.context, adapter=None if known is None else known.adapter)
        if known is None:
            a.space = (<uint64_t>1 << 63) | <uint64_t><uintptr_t>root.dl.data
    a.foreign = True
    _foreign[root] = _weak(a)
    return a


# ---- what the layer above asks of a tensor ----
def view_of(x):
    """A Tensor over `x` where it lies, aligned or not; ExchangeError where the producer only gives a copy."""
    cdef TypeRecord r = record_of(<PyObject*>x)
    cdef Tensor t = read_as_is(<PyObject*>x, r)
    if arrived_fresh(t, r):
        raise ExchangeError(f"{type(x).__name__} gives a copy of its memory: what is written there is lost",
                            "copy it: interop.as_tensor(x)")
    return t


def known_target(target):
    """Raise for what names no target."""
    target_of(target)


def is_host(Tensor t not None):
    """Whether the host can read its memory where it is."""
    return host_accessible(t.dl.device.device_type)


def join_root(Allocation a not None, Allocation root not None):
    """Make `a` an import of `root`: the same bytes from the first one on, so the same leases and Points. It keeps the root open."""
    if a is root or a.lender is not None or a.nbytes > root.nbytes:
        return
    a.space = root.space
    a.origin = root.origin
    a.owns_space = False
    a.imported = True
    a.lender = root
    root.lent += 1


def hold_open(Allocation a not None):
    """An object that, as long as it lives, counts as an export of `a`."""
    cdef _Export token
    check_allocation(a)
    token = _Export.__new__(_Export)
    token.allocation = a
    a.lent += 1
    return token


def check_stream(stream, Tensor t not None):
    """Raise for a stream that memory of the host cannot have."""
    check_host_stream(stream, t.dl.device)


def has_allocation(Tensor t not None):
    """Whether an Allocation of interop's keeps the memory, rather than somebody else's object."""
    return t.alloc != NULL


def in_context(Tensor t not None, context):
    """Whether the memory is valid in this very Context."""
    return t.alloc != NULL and (<Allocation>t.alloc).context is context


def offset_in(Tensor t not None):
    """Bytes from the start of its Allocation to its first element."""
    cdef Allocation a = allocation_of(t)
    if addressable(t.dl.device.device_type):
        return <int64_t>(<uintptr_t>t.dl.data - a.value) + <int64_t>t.dl.byte_offset
    return t.dl.byte_offset


def raw_view(Tensor t not None):
    """A host tensor as a NumPy array of its bytes, element by element; packed types as the run of bytes that they share."""
    if not host_accessible(t.dl.device.device_type):
        refuse_host(t.dl.device)
    if t.alloc != NULL:
        check_allocation(<Allocation>t.alloc)
    if is_packed(t.dl.dtype, t.flags):
        if not is_compact(t.dl.ndim, t.dl.shape, t.dl.strides, False):
            raise ExchangeError(f"dtype {dtype_of(t.dl.dtype)} with strides: elements that share bytes are only copied whole")
        return raw_bytes(t)
    size = element_bytes(t.dl.dtype, t.flags)
    return based(raw_array(&t.dl, size, np.dtype(f"V{size}") if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")), t)


cdef raw_bytes(Tensor t):
    cdef cnp.npy_intp n = bytes_of(t.dl.dtype, count(t.dl.ndim, t.dl.shape), t.flags)
    descr = np.dtype("u1")
    Py_INCREF(descr)
    return based(PyArray_NewFromDescr(&PyArray_Type, <NpyDescr*><PyObject*>descr, 1, &n, NULL, <char*>t.dl.data + t.dl.byte_offset,
                                      NPY_ARRAY_BEHAVED, NULL), t)


cdef based(array, Tensor t):
    Py_INCREF(t)
    PyArray_SetBaseObject(<NpyArray*><PyObject*>array, <PyObject*>t)
    return array


def host_tensor(shape, dtype, padded=False, alignment=64):
    """A Tensor over fresh host memory, not zeroed."""
    cdef int64_t dims[MAX_NDIM]
    cdef int i, n
    cdef DLDataType d = get_dtype(dtype).dl
    cdef Block* b
    n = take_shape(shape, dims)
    check_extent(d, n, dims, NULL)
    b = allocate_block(d, n, dims, DL_SUBBYTE_PADDED if padded else 0, alignment)
    if b == NULL:
        raise MemoryError(f"{bytes_of(d, count(n, dims), 0)} bytes of host memory")
    return adopt(blank_tensor(), &b.v)


cdef int take_shape(shape, int64_t* dims) except -1:
    cdef int i
    extents = tuple(shape)
    if len(extents) > MAX_NDIM:
        raise ValueError(f"{len(extents)} dimensions: at most {MAX_NDIM}")
    for i in range(len(extents)):
        if not 0 <= extents[i] < 2**63:
            raise ValueError(f"shape {extents}: extents are from 0 to 2**63 - 1")
        dims[i] = extents[i]
    return <int>len(extents)


def as_padded(Tensor t not None, dtype):
    """One byte per element, read as a sub-byte dtype with the padded flag: what NumPy and ml_dtypes hold."""
    cdef DType d = get_dtype(dtype)
    cdef Tensor out = like_view(t)
    if d.dl.bits >= 8 or d.dl.lanes != 1 or t.dl.dtype.bits != 8:
        raise ExchangeError(f"{d} with a byte for each lane cannot be made of {dtype_of(t.dl.dtype)}")
    take_dims(out, t.dl.ndim, t.dl.shape, t.dl.strides)
    out.dl.dtype = d.dl
    out.flags |= DL_SUBBYTE_PADDED
    return out


def bytes_for(shape, dtype):
    """Bytes of a compact tensor. ValueError where they do not fit in 64 bits."""
    cdef int64_t dims[MAX_NDIM]
    cdef DLDataType d = get_dtype(dtype).dl
    cdef int n = take_shape(shape, dims)
    try:
        check_extent(d, n, dims, NULL)
    except ExchangeError as e:
        raise ValueError(str(e)) from None
    return bytes_of(d, count(n, dims), 0)


globals().update(READ_LEASE=READ_LEASE, WRITE_LEASE=WRITE_LEASE, READ_POINT=READ_POINT, WRITE_POINT=WRITE_POINT,
                 HOST_ALIGNMENT=HOST_ALIGNMENT)
