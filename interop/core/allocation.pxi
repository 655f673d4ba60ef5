# Allocation: the root bytes that tensors view. State only: what it means to wait, to map or to copy, the layer above knows.

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
    cdef frozenset kinds                 # of ExternalHandle that export() makes; None: of others' memory, not asked yet
    cdef readonly dict imports           # what other Contexts made of these bytes; released before the root
    cdef readonly bint readonly
    cdef readonly object skip            # int: where in what the handle names these bytes begin
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
                 readonly=False, traits=(), exports=(), Allocation root=None, root_offset=0, lent=False, dies_at_fork=False, atom=1,
                 skip=0):
        """`root`: the Allocation whose bytes this one is an import of; they share leases and Points, `root_offset` bytes in. `lent`:
        while this one lives, the root cannot be closed. `dies_at_fork`: a child must not touch it. `atom`: the bytes that
        the host and the device exchange together at least (Vulkan's nonCoherentAtomSize where memory is not coherent). `skip`: the
        bytes begin so far into what the handle names, which could not be made to begin with them; tensors' byte_offset counts it.
        """
        global _next_space
        self.dl = get_device(device).dl
        if not 0 <= nbytes < 2**63:
            raise ValueError(f"nbytes {nbytes}: must be from 0 to 2**63 - 1")
        if skip and (addressable(self.dl.device_type) or not 0 < skip < 2**63 - nbytes):
            raise ValueError(f"skip {skip}: bytes from the beginning of a handle, not negative")
        self.nbytes = nbytes
        self.value = value
        self.skip = skip
        self.owner = owner
        self.on_release = on_release
        self.context = context
        self.adapter = adapter
        self.alignment = alignment if alignment is not None else ((value & -value) if value and addressable(self.dl.device_type) else 1)
        self.readonly = readonly
        self.atom = root.atom if root is not None else atom
        self.traits = frozenset(traits)
        self.kinds = frozenset(exports)
        self.imports = {}
        self.generation = interop_generation
        self.dies_at_fork = dies_at_fork or context is not None
        self.imported = root is not None
        if on_release is not None and interop_wake_fd < 0:
            begin_releasing()
        if root is not None:
            if root_offset < 0 or root_offset + nbytes > root.nbytes:
                raise ValueError(f"an import of {nbytes} bytes at {root_offset} does not lie in its root of {root.nbytes} bytes")
            self.space = root.space      # 0, also for a handle, where the root is ranked by its addresses
            self.origin = root.origin + root.skip + root_offset - skip       # of what the handle names
            if lent:
                self.lender = root
                root.lent += 1
        elif addressable(self.dl.device_type):
            self.origin = <int64_t>value
        else:
            key = (self.dl.device_type, self.dl.device_id, value)
            same = [a for a in _handles.setdefault(key, _WeakSet())
                    if not a.is_closed and a.context is context and a.adapter is adapter and (context, adapter) != (None, None)]
            for a in same:
                if not (<Allocation>a).foreign and nbytes + skip > a.nbytes + a.skip:
                    raise ValueError(f"nbytes {nbytes}: handle {value:#x} is known, and names {a.nbytes + a.skip - skip} bytes")
            if same:                             # one memory object, wrapped again: the same leases and Points
                self.space = (<Allocation>same[0]).space
                self.origin = (<Allocation>same[0]).origin
            else:
                waiting = [w for w in _later if w.handle == (key, adapter) and w.context is context] if context is not None else []
                if waiting:                      # let go and wrapped again while queued work still uses it
                    self.space, self.origin = waiting[0].place
                else:
                    self.space = _next_space
                    _next_space += 1
                self.owns_space = True
            _handles.setdefault(key, _WeakSet()).add(self)
        self.closed = False

    @property
    def device(self):
        """Where the bytes live."""
        return device_of(self.dl)

    @property
    def exports(self):
        """Kinds of ExternalHandle that `export` makes; of somebody else's device memory its driver is asked."""
        if self.kinds is None:
            self.kinds = frozenset(_up_exports(self))
        return self.kinds

    @property
    def handle(self):
        """A NativeHandle's value: address of the first byte, or the native handle."""
        return self.value

    @property
    def lent_out(self):
        """How many exports (arrays of frameworks, capsules, buffers) are alive; while any is, `close` refuses."""
        return self.lent

    @property
    def is_foreign(self):
        """Whether the memory is somebody else's, seen through a tensor of theirs."""
        return self.foreign

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
        lo = self.origin + self.skip
        return self.space, lo, min(lo + self.nbytes, 2**63 - 1)

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
            for id, kind, point in ledger_find(space, lo, hi, READ_POINT | WRITE_POINT):
                if not is_over(point):
                    raise ExchangeError(f"queued work still uses this allocation of {self.nbytes} bytes", "wait for it: point.wait()")
            for _, kind, holder in ledger_find(space, lo, hi, READ_LEASE | WRITE_LEASE):
                _up_conflict(holder)
            # Last, and no Python runs between this and the release: what was exported meanwhile counts
            if self.lent:
                raise ExchangeError(f"{self.lent} export{'s' if self.lent > 1 else ''} of this allocation of {self.nbytes} bytes "
                                    "still use it", "drop the arrays, capsules and buffers made from its tensors")
        release_allocation(self)

    def __del__(self):
        release_allocation(self)

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
    d.byte_offset = offset + a.skip
    if addressable(a.dl.device_type) and (a.value + <uint64_t>offset) % <uint64_t>component_bytes(dtype.dl) and not is_empty(n, dims):
        raise ValueError(f"byte_offset {offset}: the first {dtype} would lie at {a.value + <uint64_t>offset:#x}, "
                         f"not a multiple of {component_bytes(dtype.dl)} bytes")
    if readonly is False and a.readonly:
        raise ValueError("the allocation is read-only: readonly=False cannot be had")
    t = over_object(a, &d, DL_READ_ONLY if a.readonly or readonly else 0)
    t.alloc = <PyObject*>a
    return t
