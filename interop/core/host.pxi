# Tensors as the host sees them: Python's buffer protocol, NumPy's array protocols, the CUDA array interface, packing copies.

cdef char* _FORMATS[128]         # struct-module format of [code * 8 + log2(bits)], NULL where the buffer protocol has none
_FORMATS[kDLInt * 8 + 3] = b"b"
_FORMATS[kDLInt * 8 + 4] = b"h"
_FORMATS[kDLInt * 8 + 5] = b"i"
_FORMATS[kDLInt * 8 + 6] = b"q"
_FORMATS[kDLUInt * 8 + 3] = b"B"
_FORMATS[kDLUInt * 8 + 4] = b"H"
_FORMATS[kDLUInt * 8 + 5] = b"I"
_FORMATS[kDLUInt * 8 + 6] = b"Q"
_FORMATS[kDLFloat * 8 + 4] = b"e"
_FORMATS[kDLFloat * 8 + 5] = b"f"
_FORMATS[kDLFloat * 8 + 6] = b"d"
_FORMATS[kDLComplex * 8 + 6] = b"Zf"
_FORMATS[kDLComplex * 8 + 7] = b"Zd"
_FORMATS[kDLBool * 8 + 3] = b"?"


cdef char* format_of(DLDataType d) noexcept nogil:
    cdef int log = 0
    cdef int bits = d.bits
    if d.code > kDLBool or d.lanes != 1:
        return NULL
    while bits > 1:
        bits >>= 1
        log += 1
    return _FORMATS[d.code * 8 + log]


cdef int fill_buffer(Tensor t, Py_buffer* view, int flags) except -1:
    cdef DLTensor* d = &t.dl
    cdef char* format = format_of(d.dtype)
    cdef int n = d.ndim, i
    cdef Py_ssize_t size
    cdef Py_ssize_t* dims
    cdef bint c, f
    view.obj = None
    t = lend(t, None)
    d = &t.dl
    if not host_accessible(d.device.device_type):
        refuse_host(d.device)
    if format == NULL:
        raise ExchangeError(f"dtype {dtype_of(d.dtype)}: the buffer protocol has no format for it",
                            "interop.to(t, 'numpy'), or t.view('uint8') for the bytes")
    if flags & PyBUF_WRITABLE and t.flags & DL_READ_ONLY:
        raise ExchangeError("the tensor is read-only and a writable buffer was asked for")
    c = is_compact(n, d.shape, d.strides, False)
    f = is_compact(n, d.shape, d.strides, True)
    if not c and (flags & PyBUF_STRIDES != PyBUF_STRIDES or flags & PyBUF_C_CONTIGUOUS == PyBUF_C_CONTIGUOUS
                  or (not f and (flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS))) \
            and not (f and flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS):
        raise ExchangeError(f"strides {t.strides}: a contiguous buffer was asked for")
    if not f and flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS:
        raise ExchangeError(f"strides {t.strides}: a column-major buffer was asked for")
    size = element_bytes(d.dtype, t.flags)
    if t.stream != STREAM_NONE:
        finish_for_host(d, t.stream)
    dims = <Py_ssize_t*>malloc(2 * (n + 1) * sizeof(Py_ssize_t))
    if dims == NULL:
        raise MemoryError()
    for i in range(n):
        dims[i] = d.shape[i]
        dims[n + i] = d.strides[i] * size
    view.internal = dims
    view.buf = <char*>d.data + d.byte_offset if d.data != NULL else <char*>dims   # empty: any address that is not NULL
    view.len = count(n, d.shape) * size
    view.itemsize = size
    view.readonly = 1 if t.flags & DL_READ_ONLY else 0
    view.ndim = n
    view.format = format if flags & PyBUF_FORMAT else NULL
    view.shape = dims if flags & PyBUF_ND and n else NULL        # PEP 3118: NULL where there is nothing to say
    view.strides = dims + n if flags & PyBUF_STRIDES == PyBUF_STRIDES and n else NULL
    view.suboffsets = NULL
    view.obj = t
    return 0


cdef object as_array(Tensor t, dtype, copy):
    t = lend(t, None)
    if t.stream != STREAM_NONE:
        finish_for_host(&t.dl, t.stream)
    array = array_of_tensor(t)
    if dtype is not None and np.dtype(dtype) != array.dtype:
        if copy is False:
            raise ValueError(f"dtype {np.dtype(dtype)} was asked for and the tensor has {array.dtype}: only a copy has it")
        note_copy(&t.dl, t.flags, "interop", "numpy", f"dtype {np.dtype(dtype)} was asked for", None)
        return array.astype(dtype)
    if copy:
        note_copy(&t.dl, t.flags, "interop", "numpy", "copy=True was asked for", None)
        return array.copy()
    return array


cdef object array_interface(Tensor t):
    if not host_accessible(t.dl.device.device_type) or is_packed(t.dl.dtype, t.flags) or t.dl.dtype.lanes > 1 \
            or format_of(t.dl.dtype) == NULL or t.alloc != NULL:
        # A dict of numbers counts as no export, so what can be closed is shown through the buffer protocol only.
        # np.asarray goes on to __array__, which knows ml_dtypes or says what is wrong
        raise AttributeError(f"__array_interface__ cannot describe {dtype_of(t.dl.dtype)} on {device_of(t.dl.device)}")
    return interface_of(t)


cdef object interface_of(Tensor t):
    may_read(&t.dl, t.flags, t.alloc, None)
    cdef int64_t size = element_bytes(t.dl.dtype, t.flags)
    kind = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}[t.dl.dtype.code]
    return {"version": 3, "shape": t.shape, "typestr": f"{'|' if size == 1 else '<'}{kind}{size}",
            "data": (t.ptr, t.readonly), "strides": tuple([s * size for s in t.strides])}


cdef object cuda_array_interface(Tensor t):
    if t.dl.device.device_type not in (kDLCUDA, kDLCUDAManaged) or format_of(t.dl.dtype) == NULL or t.alloc != NULL:
        # as with __array_interface__: a dict counts as no export
        raise AttributeError(f"__cuda_array_interface__ cannot describe {dtype_of(t.dl.dtype)} on {device_of(t.dl.device)}")
    interface = interface_of(t)
    if is_empty(t.dl.ndim, t.dl.shape):
        interface["data"] = (0, interface["data"][1])
    # Version 3 forbids 0 and reads None as "no synchronisation needed"
    interface["stream"] = t.stream if t.stream > 0 else None
    return interface


cdef int check_packable(DLTensor* t, uint64_t flags) except -1:
    if not host_accessible(t.device.device_type):
        raise ExchangeError(f"interop copies memory on {device_of(t.device)} only to another place",
                            "interop.to(x, 'cpu') copies it to the host where an adapter can; or let its own framework copy it")
    if is_packed(t.dtype, flags) and not is_compact(t.ndim, t.shape, t.strides, False):
        raise ExchangeError(f"dtype {dtype_of(t.dtype)} with strides: elements that share bytes are only copied whole")
    return 0


cdef Tensor pack(DLTensor* t, uint64_t flags, int64_t alignment=HOST_ALIGNMENT):
    """A compact row-major copy in fresh host memory, aligned to 64 bytes; marked copied, writable. NumPy moves the bytes."""
    cdef Tensor out = blank_tensor()
    cdef uint64_t keep = flags & DL_SUBBYTE_PADDED
    cdef int64_t size
    cdef Block* b
    check_packable(t, flags)
    b = allocate_block(t.dtype, t.ndim, t.shape, keep, alignment)
    if b == NULL:
        raise MemoryError(f"{bytes_of(t.dtype, count(t.ndim, t.shape), keep)} bytes of host memory")
    adopt(out, &b.v)
    if not is_empty(t.ndim, t.shape):
        if is_packed(t.dtype, flags):
            memcpy(out.dl.data, <char*>t.data + t.byte_offset, <size_t>bytes_of(t.dtype, count(t.ndim, t.shape), flags))
        else:
            size = element_bytes(t.dtype, flags)
            copy_elements(&out.dl, t, size)
    out.flags |= DL_IS_COPIED
    return out


cdef copy_elements(DLTensor* to, DLTensor* source, int64_t size):
    # As bytes: a dtype that NumPy lacks is copied like any other.
    cdef DLDataType raw
    descr = np.dtype(f"V{size}") if size not in (1, 2, 4, 8) else np.dtype(f"u{size}")
    np.copyto(raw_array(to, size, descr), raw_array(source, size, descr))


cdef raw_array(DLTensor* t, int64_t size, descr):
    cdef cnp.npy_intp shape[MAX_NDIM]
    cdef cnp.npy_intp strides[MAX_NDIM]
    cdef int i
    for i in range(t.ndim):
        shape[i] = t.shape[i]
        strides[i] = t.strides[i] * size
    Py_INCREF(descr)
    return PyArray_NewFromDescr(&PyArray_Type, <NpyDescr*><PyObject*>descr, t.ndim, shape, strides, <char*>t.data + t.byte_offset,
                                NPY_ARRAY_WRITEABLE, NULL)
