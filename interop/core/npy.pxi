# NumPy arrays through NumPy's C API: read into a DLTensor, made from one.

cdef DLDataType NP_DTYPE[32]     # by NumPy's type number; bits 0: none
cdef dict _NP_EXTENSIONS = {}    # type number of a registered dtype (ml_dtypes) -> DType
cdef PyObject* _NP_DESCRS[56]    # np.dtype of [code * 8 + log2(bits)] for NumPy's own types, NULL: none
memset(_NP_DESCRS, 0, sizeof(_NP_DESCRS))
cdef dict _NP_DESCRS_EXTRA = {}  # packed (code, bits, 1) -> np.dtype from ml_dtypes
cdef object _MASKED = None

for _d in np.typecodes["All"]:
    _dt = np.dtype(_d)
    if _dt.num < 32:
        try:
            _c, _b, _l = _dtypes.from_numpy(_dt)
        except ValueError:
            continue
        NP_DTYPE[_dt.num].code = _c
        NP_DTYPE[_dt.num].bits = _b
        NP_DTYPE[_dt.num].lanes = 1
        _dt = np.dtype(_dt.name)
        Py_INCREF(_dt)           # for ever, as NumPy's own are
        _NP_DESCRS[_c * 8 + log2(_b)] = <PyObject*>_dt
del _d, _dt, _c, _b, _l


cdef DLDataType np_extension(NpyDescr* descr, uint64_t* flags) except *:
    # The slow half of dtype reading: extension types, and the refusals.
    cdef DLDataType d
    dtype = <object><PyObject*>descr     # not the attribute, which a subclass may have changed
    found = _NP_EXTENSIONS.get(dtype.num) if dtype.num >= 256 else None
    if found is None:
        try:
            found = get_dtype(_dtypes.from_numpy(dtype))
        except ValueError as e:
            raise ExchangeError(str(e), "convert with x.astype(...), or exchange x.view('uint8')") from None
        if dtype.num >= 256:
            _NP_EXTENSIONS[dtype.num] = found
    d = (<DType>found).dl
    if d.bits < 8:
        flags[0] |= DL_SUBBYTE_PADDED    # NumPy gives each element its byte
    return d


cdef inline DLDataType dtype_of_descr(NpyDescr* descr, uint64_t* flags) except *:
    if <unsigned int>descr.type_num < 32 and NP_DTYPE[descr.type_num].bits and PyArray_ISNBO(descr.byteorder):
        return NP_DTYPE[descr.type_num]
    return np_extension(descr, flags)


cdef inline int read_array(PyObject* a, DLTensor* t, int64_t* dims, uint64_t* flags) except -1:
    """The metadata of an ndarray; `dims` has room for 2 * ndim numbers. NumPy vouches for shape and strides."""
    cdef NpyDescr* descr = PyArray_DESCR(<NpyArray*>a)
    cdef int n = PyArray_NDIM(<NpyArray*>a), i, shift
    cdef int64_t size = PyDataType_ELSIZE(descr), bytes = 0, zero = 0
    cdef cnp.npy_intp* shape
    cdef cnp.npy_intp* strides
    cdef uint64_t f = 0
    if <unsigned int>descr.type_num < 32 and NP_DTYPE[descr.type_num].bits and PyArray_ISNBO(descr.byteorder):
        t.dtype = NP_DTYPE[descr.type_num]
    else:
        t.dtype = np_extension(descr, &f)
    shape = PyArray_DIMS(<NpyArray*>a)
    strides = PyArray_STRIDES(<NpyArray*>a)
    if not PyArray_FLAGS(<NpyArray*>a) & NPY_ARRAY_WRITEABLE:
        f |= DL_READ_ONLY
    t.data = PyArray_DATA(<NpyArray*>a)
    t.device.device_type = kDLCPU
    t.device.device_id = 0
    t.ndim = n
    t.shape = dims
    t.strides = dims + n
    t.byte_offset = 0
    shift = log2(size)           # every dtype here has 1, 2, 4, 8 or 16 bytes
    for i in range(n):
        dims[i] = shape[i]
        dims[n + i] = strides[i] >> shift
        if shape[i] > 1:
            bytes |= strides[i]
            zero |= strides[i] == 0
    if bytes & (size - 1):
        raise ExchangeError(f"strides {(<object>a).strides} bytes are not multiples of the {size}-byte elements: "
                            "DLPack counts strides in elements", "x.copy() is evenly spaced")
    if zero:
        f |= overlap_flag(n, dims, dims + n)
    flags[0] = f
    return 0


cdef Tensor tensor_of_array(PyObject* a):
    """A Tensor over an exact ndarray. Alignment is checked by whoever needs it."""
    cdef Tensor t = blank_tensor()
    if PyArray_NDIM(<NpyArray*>a) > INLINE_DIMS:
        take_dims(t, PyArray_NDIM(<NpyArray*>a), NULL, NULL)
        read_array(a, &t.dl, t.dl.shape, &t.flags)
    else:
        read_array(a, &t.dl, t.dims, &t.flags)
    t.stream = STREAM_NONE
    Py_INCREF(<object>a)
    t.held = a
    return t


cdef Tensor tensor_of_array_subclass(object a):
    """ndarray's descendants carry attributes, so the collector must see through them; a mask cannot be expressed."""
    cdef _ObjectTensor t
    global _MASKED
    if _MASKED is None:
        _MASKED = np.ma.MaskedArray
    if isinstance(a, _MASKED):
        raise ExchangeError("a masked array's mask cannot be expressed in DLPack", "x.filled(value), or x.data to ignore the mask")
    t = blank_object_tensor(a)
    take_dims(t, PyArray_NDIM(<NpyArray*><PyObject*>a), NULL, NULL)
    read_array(<PyObject*>a, &t.dl, t.dl.shape, &t.flags)
    t.stream = STREAM_NONE
    return t


cdef inline object descr_for(DLDataType d, uint64_t flags):
    # NumPy's dtype of one lane, or the reason why not.
    cdef PyObject* found = NULL
    if d.code <= kDLBool and d.bits >= 8:
        found = _NP_DESCRS[d.code * 8 + log2(d.bits)]
    return <object>found if found != NULL else rare_descr(d, flags)


cdef object rare_descr(DLDataType d, uint64_t flags):
    cdef DLDataType one = d
    one.lanes = 1
    found = _NP_DESCRS_EXTRA.get(pack_dtype(one))
    if found is None:
        try:
            found = _dtypes.to_numpy(d.code, d.bits)
        except LookupError as e:
            raise ExchangeError(str(e), "read the bytes: interop.as_tensor(x).view('uint8')") from None
        except ImportError as e:
            raise ExchangeError(str(e), "pip install ml_dtypes") from None
        _NP_DESCRS_EXTRA[pack_dtype(one)] = found
    if d.bits < 8 and not flags & DL_SUBBYTE_PADDED:
        raise ExchangeError(f"dtype {dtype_of(d)}: its elements share bytes and NumPy has only padded ones",
                            "read the bytes: interop.as_tensor(x).view('uint8')")
    return found


cdef object array_of(DLTensor* t, uint64_t flags, PyObject* base):
    """An ndarray over `t`, holding `base`. ExchangeError where the host cannot read it or NumPy lacks the dtype."""
    cdef cnp.npy_intp shape[MAX_NDIM]
    cdef cnp.npy_intp strides[MAX_NDIM]
    cdef int n = t.ndim, i
    cdef int64_t size, step
    cdef int given = NPY_ARRAY_WRITEABLE
    cdef object descr, array
    cdef void* data
    cdef bint compact = True
    if not host_accessible(t.device.device_type):
        refuse_host(t.device)
    descr = descr_for(t.dtype, flags)
    size = element_bytes(t.dtype, flags)
    data = <char*>t.data + t.byte_offset
    step = 1
    for i in range(n - 1, -1, -1):
        shape[i] = t.shape[i]
        strides[i] = t.strides[i] * size
        compact &= t.strides[i] == step
        step *= t.shape[i]
    if t.dtype.lanes > 1:
        if n == MAX_NDIM:
            raise ExchangeError(f"ndim {n} and one more for the lanes: NumPy stops at {MAX_NDIM}")
        shape[n] = t.dtype.lanes
        strides[n] = size // t.dtype.lanes
        n += 1
    if flags & DL_READ_ONLY:
        given = 0
    if not <uintptr_t>data & <uintptr_t>(component_bytes(t.dtype) - 1):
        given |= NPY_ARRAY_ALIGNED
    if step == 0:
        data = NULL              # empty: NumPy brings its own, of no bytes
    Py_INCREF(descr)             # NewFromDescr takes one; without strides it knows at once that the array is contiguous
    array = PyArray_NewFromDescr(&PyArray_Type, <NpyDescr*><PyObject*>descr, n, shape, NULL if compact or step == 0 else strides, data,
                                 given, NULL)
    if step == 0 and flags & DL_READ_ONLY:
        array.flags.writeable = False
    Py_INCREF(<object>base)      # SetBaseObject takes one
    PyArray_SetBaseObject(<NpyArray*><PyObject*>array, base)
    return array


cdef refuse_host(DLDevice d):
    device = device_of(d)
    raise ExchangeError(f"memory on {device} cannot be read by the host",
                        "device='cpu' copies" if addressable(d.device_type) else "map it: with interop.as_tensor(x).map() as a")


cdef object array_of_tensor(Tensor t):
    return array_of(&t.dl, t.flags, <PyObject*>t)
