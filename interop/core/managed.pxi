# Blocks of memory that DLPack hands around: one allocation with struct, shape and strides, freed by one deleter (SPEC X-OWN).

cdef enum:
    HOST_ALIGNMENT = 64          # what jax asks for before it aliases; a cache line


cdef struct Block:
    # The managed struct comes first, so that a pointer to it is a pointer to the block.
    DLManagedTensorVersioned v
    int guard                    # see interop_cas: lets us learn whether a foreign importer ran the deleter
    PyObject* owner
    void* memory                 # host memory that goes with the block, or NULL
    int64_t dims[1]              # 2 * ndim follow

cdef struct LegacyBlock:
    DLManagedTensor m
    PyObject* owner
    int64_t dims[1]


cdef void free_block(Block* b) noexcept nogil:
    cdef PyObject* owner = b.owner
    free(b.memory)
    free(b)
    interop_drop(owner)          # last: it may run anything


cdef void delete_block(DLManagedTensorVersioned* m) noexcept nogil:
    cdef Block* b = <Block*>m
    if interop_cas(&b.guard, 1, 2):
        return                   # inside a call of ours into a foreign importer: the caller frees
    free_block(b)


cdef void delete_legacy(DLManagedTensor* m) noexcept nogil:
    cdef LegacyBlock* b = <LegacyBlock*>m
    cdef PyObject* owner = b.owner
    free(b)
    interop_drop(owner)


cdef inline bint expands(DLDataType d) noexcept nogil:
    # Vector types of whole bytes leave as a trailing axis, which every consumer knows (field report B39).
    return d.lanes > 1 and d.bits >= 8


cdef void fill_export(DLTensor* to, const DLTensor* t, int64_t* dims) noexcept nogil:
    # What a consumer may rely on: strides always there, canonical where an extent makes them irrelevant, the offset folded into
    # addressable pointers, NULL data when empty.
    cdef int i
    cdef int extra = expands(t.dtype)
    cdef int n = t.ndim + extra
    cdef int64_t lanes = t.dtype.lanes if extra else 1
    cdef bint empty = is_empty(t.ndim, t.shape)
    to[0] = t[0]
    to.ndim = n
    to.shape = dims if n else NULL
    to.strides = dims + n if n else NULL
    for i in range(t.ndim):
        dims[i] = t.shape[i]
        dims[n + i] = t.strides[i] * lanes
    if extra:
        dims[n - 1] = lanes
        dims[2 * n - 1] = 1
        to.dtype.lanes = 1
    if empty:
        compact_strides(n, to.shape, to.strides)
    else:
        for i in range(n - 1, -1, -1):
            if dims[i] == 1:
                dims[n + i] = 1 if i == n - 1 else dims[i + 1] * dims[n + i + 1]
    if addressable(t.device.device_type):
        to.data = NULL if empty else <char*>t.data + t.byte_offset
        to.byte_offset = 0


cdef bint canonical(const DLTensor* t) noexcept nogil:
    # Whether fill_export would leave the strides as they are.
    cdef int i
    if is_empty(t.ndim, t.shape):
        return is_compact_exactly(t)
    for i in range(t.ndim):
        if t.shape[i] == 1 and t.strides[i] != (1 if i == t.ndim - 1 else t.shape[i + 1] * t.strides[i + 1]):
            return False
    return True


cdef bint is_compact_exactly(const DLTensor* t) noexcept nogil:
    cdef int64_t step = 1
    cdef int i
    for i in range(t.ndim - 1, -1, -1):
        if t.strides[i] != step:
            return False
        if t.shape[i] > 1:
            step *= t.shape[i]
    return True


cdef Block* blank_block(int ndim) noexcept nogil:
    cdef Block* b = <Block*>malloc(sizeof(Block) + 2 * <size_t>ndim * sizeof(int64_t))
    if b == NULL:
        return NULL
    b.v.version.major = DLPACK_MAJOR
    b.v.version.minor = DLPACK_MINOR
    b.v.manager_ctx = NULL
    b.v.deleter = delete_block
    b.v.flags = 0
    b.guard = 0
    b.owner = NULL
    b.memory = NULL
    return b


cdef int check_room(const DLTensor* t) except -1:
    if t.ndim == MAX_NDIM and expands(t.dtype):
        raise ExchangeError(f"ndim {t.ndim} and one more for the lanes: {MAX_NDIM} is the most")
    return 0


cdef Block* export_block(const DLTensor* t, uint64_t flags, PyObject* owner) except NULL:
    """An owned versioned export of `t`, holding a new reference to `owner`."""
    check_room(t)
    cdef Block* b = blank_block(t.ndim + 1)
    if b == NULL:
        raise MemoryError()
    fill_export(&b.v.dl_tensor, t, b.dims)
    b.v.flags = flags
    b.owner = owner
    Py_INCREF(<object>owner)
    return b


cdef LegacyBlock* export_legacy(const DLTensor* t, PyObject* owner) except NULL:
    check_room(t)
    cdef LegacyBlock* b = <LegacyBlock*>malloc(sizeof(LegacyBlock) + 2 * (<size_t>t.ndim + 1) * sizeof(int64_t))
    if b == NULL:
        raise MemoryError()
    fill_export(&b.m.dl_tensor, t, b.dims)
    b.m.manager_ctx = NULL
    b.m.deleter = delete_legacy
    b.owner = owner
    Py_INCREF(<object>owner)
    return b


cdef void capsule_gone(PyObject* capsule) noexcept:
    # Destructor of our capsules: runs the deleter iff nobody consumed it, which a consumer says by renaming. An error that is pending
    # stays pending. The GIL is held.
    cdef PyObject* t = NULL
    cdef PyObject* v = NULL
    cdef PyObject* tb = NULL
    cdef const char* name = capsule_name(capsule)
    cdef PyObject* owner
    cdef void* p
    if name == NULL or name[0] == c"u":
        return
    p = capsule_pointer(capsule, name)
    if strcmp(name, b"dltensor_versioned") == 0:
        owner = (<Block*>p).owner
        free((<Block*>p).memory)
    else:
        owner = (<LegacyBlock*>p).owner
    free(p)
    if owner.ob_refcnt > 1:      # nearly always: nothing runs
        Py_DECREF(<object>owner)
        return
    PyErr_Fetch(&t, &v, &tb)
    Py_DECREF(<object>owner)
    PyErr_Restore(t, v, tb)


cdef Block* allocate_block(DLDataType dtype, int ndim, const int64_t* shape, uint64_t flags,
                           size_t alignment=HOST_ALIGNMENT) noexcept nogil:
    """A compact row-major block with its own host memory, aligned as asked, not zeroed; NULL without memory. `shape` is checked."""
    cdef Block* b = blank_block(ndim)
    cdef DLTensor* t
    if b == NULL:
        return NULL
    t = &b.v.dl_tensor
    b.memory = interop_aligned_alloc(alignment, <size_t>bytes_of(dtype, count(ndim, shape), flags))
    if b.memory == NULL:
        free(b)
        return NULL
    t.data = b.memory
    t.device.device_type = kDLCPU
    t.device.device_id = 0
    t.ndim = ndim
    t.dtype = dtype
    t.byte_offset = 0
    t.shape = b.dims if ndim else NULL
    t.strides = b.dims + ndim if ndim else NULL
    if ndim:
        memcpy(b.dims, shape, ndim * sizeof(int64_t))
        compact_strides(ndim, shape, b.dims + ndim)
    b.v.flags = flags
    return b
