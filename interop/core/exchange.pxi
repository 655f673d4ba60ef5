# The C exchange table of Tensor (DLPack 1.3): what __dlpack__ does, for callers in C. "No sync" in its names means: the tensor is
# ready on the stream that current_work_stream returns.

cdef int table_allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* ctx, DLSetError set_error) noexcept nogil:
    # May be called without the GIL; failure is said through set_error alone.
    cdef Block* b
    cdef int64_t nbytes = 1
    cdef int i
    out[0] = NULL
    if prototype.device.device_type != kDLCPU:
        set_error(ctx, b"BufferError", b"interop allocates host memory here, not memory on another device")
        return -1
    if not known_dtype(prototype.dtype) or prototype.ndim < 0 or prototype.ndim > MAX_NDIM \
            or (prototype.ndim > 0 and prototype.shape == NULL):
        set_error(ctx, b"BufferError", b"prototype with an unknown dtype, a bad ndim or no shape")
        return -1
    nbytes = <int64_t>prototype.dtype.bits * prototype.dtype.lanes
    for i in range(prototype.ndim):
        if prototype.shape[i] < 0 or (prototype.shape[i] > 1 and mul_overflow(nbytes, prototype.shape[i], &nbytes)):
            set_error(ctx, b"BufferError", b"prototype with a negative extent or a size beyond 64 bits")
            return -1
    b = allocate_block(prototype.dtype, prototype.ndim, prototype.shape, 0)
    if b == NULL:
        set_error(ctx, b"MemoryError", b"not enough host memory")
        return -1
    out[0] = &b.v
    return 0


cdef int table_from_py(void* x, DLManagedTensorVersioned** out) except -1:
    cdef Tensor t
    out[0] = NULL
    t = <Tensor?><object>x
    t = lend(ready_for_table(t), None)
    out[0] = &export_block(&t.dl, t.flags & (DL_READ_ONLY | DL_SUBBYTE_PADDED), <PyObject*>t).v
    return 0


cdef int table_to_py(DLManagedTensorVersioned* m, void** out) except -1:
    # Ours from the first line on, also when it fails: DLPack says "steals".
    cdef Tensor t = blank_tensor()
    out[0] = NULL
    adopt(t, m)
    if has_streams(t.dl.device.device_type) and has_driver(t.dl.device):
        t.stream = own_stream(t.dl.device)       # the caller has made it ready on what current_work_stream gave
    Py_INCREF(t)
    out[0] = <void*>t
    return 0


cdef int table_borrow(void* x, DLTensor* out) except -1:
    cdef Tensor t = <Tensor?><object>x
    if ready_for_table(t) is not t:
        raise ExchangeError(f"memory on {device_of(t.dl.device)} that another stream than interop's own frees is not lent: nobody would "
                            "keep it for the work that is given to that stream", "take it with managed_tensor_from_py_object_no_sync")
    lend(t, None)                # borrowed: valid until control returns, so nothing is counted
    out[0] = t.dl
    if addressable(t.dl.device.device_type):
        out.data = <char*>t.dl.data + t.dl.byte_offset if not is_empty(t.dl.ndim, t.dl.shape) else NULL
        out.byte_offset = 0
    if not canonical(&t.dl):
        raise ExchangeError(f"strides {t.strides} of extents that make them irrelevant leave as canonical ones, which a borrowed DLTensor "
                            "has no room for", "take it with managed_tensor_from_py_object_no_sync")
    if expands(t.dl.dtype):
        raise ExchangeError("a vector type leaves with an axis more, which a borrowed DLTensor has no room for",
                            "take it with managed_tensor_from_py_object_no_sync")
    if t.flags & DL_READ_ONLY:
        raise ExchangeError("a read-only tensor cannot be lent as a DLTensor, which has no flag for it",
                            "take it with managed_tensor_from_py_object_no_sync")
    if t.flags & DL_SUBBYTE_PADDED:
        raise ExchangeError("padded sub-byte elements cannot be lent as a DLTensor, which has no flag for them")
    return 0


cdef int table_stream_slot(int32_t kind, int32_t number, void** out) except -1:
    # interop's own stream: the one on which what the other slots give is ready
    cdef DLDevice d
    out[0] = NULL
    if has_streams(kind):
        d.device_type = kind
        d.device_id = number
        check_driver(d)
        out[0] = <void*><intptr_t>own_stream(d)
    return 0


cdef Tensor ready_for_table(Tensor t):
    """Ready on interop's own stream, and kept until that stream is done with it."""
    cdef int64_t own
    if not has_streams(t.dl.device.device_type):
        return t
    check_driver(t.dl.device)
    own = own_stream(t.dl.device)
    order_streams(&t.dl, t.stream, own)
    return used_on(t, own, None) if outlasts(t.dl.device, t.freed, own) else t


cdef bint has_driver(DLDevice d) except -1:
    return _cuda_own_stream is not None and d.device_type != kDLROCM and _cuda_own_stream(d.device_id) is not None


cdef int check_driver(DLDevice d) except -1:
    if not has_driver(d):
        raise ExchangeError(f"memory on {device_of(d)} is ordered by streams, and interop has no driver here to make one of its own",
                            "take the tensor through __dlpack__(stream=...)")
    return 0


cdef DLPackExchangeAPI _table
_table.header.version.major = DLPACK_MAJOR
_table.header.version.minor = DLPACK_MINOR
_table.header.prev_api = NULL
_table.managed_tensor_allocator = table_allocate
# The slots are declared noexcept because C calls them: an error stays pending and -1 goes out, as the contract wants.
_table.managed_tensor_from_py_object_no_sync = <int (*)(void*, DLManagedTensorVersioned**) noexcept>table_from_py
_table.managed_tensor_to_py_object_no_sync = <int (*)(DLManagedTensorVersioned*, void**) noexcept>table_to_py
_table.dltensor_from_py_object_no_sync = <int (*)(void*, DLTensor*) noexcept>table_borrow
_table.current_work_stream = <int (*)(int32_t, int32_t, void**) noexcept>table_stream_slot


cdef extern from *:
    """
    static int interop_set_type_attribute(PyObject *type, PyObject *name, PyObject *value) {
        int rc = PyDict_SetItem(((PyTypeObject *)type)->tp_dict, name, value);
        PyType_Modified((PyTypeObject *)type);
        return rc;
    }
    """
    int interop_set_type_attribute(object, object, object) except -1

interop_set_type_attribute(Tensor, "__dlpack_c_exchange_api__", PyCapsule_New(&_table, b"dlpack_exchange_api", NULL))
