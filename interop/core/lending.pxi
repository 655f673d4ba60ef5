# Exports that count against close(), the Allocation behind a foreign tensor, and what the layer above asks of a tensor.

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
    out.freed = t.freed
    out.alloc = t.alloc


cdef inline Tensor lend(Tensor t, stream):
    """Before a tensor leaves: nobody may be writing, what is pending is ordered, and the export is counted where there is a close()."""
    refuse_layout(t.flags, "an export")
    may_read(&t.dl, t.flags, t.alloc, stream)
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
        if not host_accessible(root.dl.device.device_type):
            a.kinds = None
    else:
        # the size behind a foreign handle is not known: as far as this view reaches
        known = known_allocation(&root.dl)
        skip = 0 if known is None else known.skip
        a = Allocation(<uint64_t><uintptr_t>root.dl.data, max(hi - skip, 0), device_of(root.dl.device), owner=root, skip=skip,
                       readonly=bool(root.flags & DL_READ_ONLY), root=known if known is not None and hi - skip <= known.nbytes else None,
                       context=None if known is None else known.context, adapter=None if known is None else known.adapter)
        if known is None:
            a.space = (<uint64_t>1 << 63) | <uint64_t><uintptr_t>root.dl.data
    a.foreign = True
    _foreign[root] = _weak(a)
    return a


# ---- layouts with a name ----
def opaque_tensor(Allocation a not None, shape, dtype, str layout not None, int64_t byte_offset=0, nbytes=None, bint readonly=False):
    """A Tensor whose elements lie as `layout` means it, in `nbytes` of `a` from `byte_offset` on; for adapters of images and tiles."""
    cdef Tensor t
    cdef int number
    extents = tuple([_index(s) for s in shape])
    if not extents or layout == "strided":
        raise ValueError(f"layout {layout!r} with shape {extents}: a name of its own, and at least one extent")
    size = a.nbytes - byte_offset if nbytes is None else nbytes
    if byte_offset < 0 or size < 0 or byte_offset + size > a.nbytes:
        raise ValueError(f"{size} bytes at {byte_offset} do not lie in an allocation of {a.nbytes}")
    t = allocation_view(a, (0,) + extents[1:], get_device(a.device), get_dtype(dtype), None, None, 0, True if readonly else None)
    if layout not in _layouts:
        if len(_layouts) == 64:
            raise ValueError(f"layout {layout!r}: there are 64 names already")
        _layouts.append(layout)
    number = _layouts.index(layout)
    t.dl.shape[0] = extents[0]
    t.dl.byte_offset = byte_offset + a.skip
    t.dl.strides[0] = size
    t.flags |= OPAQUE | <uint64_t>number << 41
    return t


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
    a.origin = root.origin + root.skip - a.skip
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
    return t.dl.byte_offset - a.skip


def raw_view(Tensor t not None):
    """A host tensor as a NumPy array of its bytes, element by element; packed types as the run of bytes that they share."""
    refuse_layout(t.flags, "its bytes, element by element,")
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


globals().update(READ_LEASE=READ_LEASE, WRITE_LEASE=WRITE_LEASE, READ_POINT=READ_POINT, WRITE_POINT=WRITE_POINT, DENSE=DENSE,
                 HOST_ALIGNMENT=HOST_ALIGNMENT)
