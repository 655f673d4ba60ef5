# Reading: from any object that has memory to a Tensor. One ladder; what a type refuses is remembered in its record.

cdef object _MAX_VERSION = (DLPACK_MAJOR, DLPACK_MINOR)
cdef object _KW_VERSION_ONLY = ("max_version",)
cdef str _S_DLPACK = "__dlpack__"
cdef object np_dtype = np.dtype

# ---- capsules ----
cdef Tensor consume_capsule(object capsule):
    """Take what is in a capsule: rename first, so that it is ours on every path (SPEC X-OWN), validate after."""
    cdef Tensor t = blank_tensor()
    cdef void* p = NULL
    cdef bint versioned = False
    with cython.critical_section(capsule):      # of two threads with one capsule, one wins
        if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
            p = PyCapsule_GetPointer(capsule, b"dltensor_versioned")
            PyCapsule_SetName(capsule, b"used_dltensor_versioned")
            versioned = True
        elif PyCapsule_IsValid(capsule, b"dltensor"):
            p = PyCapsule_GetPointer(capsule, b"dltensor")
            PyCapsule_SetName(capsule, b"used_dltensor")
    if p == NULL:
        refuse_capsule(capsule)
    if versioned:
        adopt(t, <DLManagedTensorVersioned*>p)
        if (<DLManagedTensorVersioned*>p).deleter == delete_block and (<Block*>p).owner != NULL:
            return recognised(t, (<Block*>p).owner)
        return t
    adopt_legacy(t, <DLManagedTensor*>p)
    if (<DLManagedTensor*>p).deleter == delete_legacy:
        return recognised(t, (<LegacyBlock*>p).owner)
    return t


cdef Tensor recognised(Tensor t, PyObject* owner):
    """What interop itself exported: a view of the tensor that was exported, so that no chain of hands grows, and a handle is known."""
    cdef Tensor out
    if not isinstance(<object>owner, Tensor):
        return t
    out = like_view(<Tensor>owner)
    out.dl = t.dl
    out.dl.ndim = 0
    out.dl.shape = NULL
    take_dims(out, t.dl.ndim, t.dl.shape, t.dl.strides)
    out.flags = t.flags
    return out


cdef refuse_capsule(object capsule):
    cdef const char* name = PyCapsule_GetName(capsule)
    text = "NULL" if name == NULL else (<bytes>name).decode("ascii", "backslashreplace")
    if text in ("used_dltensor", "used_dltensor_versioned"):
        raise ExchangeError(f"this capsule ({text}) was already consumed: a DLPack capsule can be used once",
                            "ask the producer for another: x.__dlpack__()")
    raise TypeError(f"a capsule named {text!r} is no DLPack tensor: 'dltensor' or 'dltensor_versioned' is wanted")


cdef Tensor consume_raw(object capsule):
    """A capsule that came by itself: of CUDA memory nobody vouches for what and where it is, so the driver is asked where it is here."""
    cdef Tensor t = consume_capsule(capsule)
    cdef int32_t kind = t.dl.device.device_type
    if t.alloc == NULL and _cuda_classify is not None and kind in (kDLCUDA, kDLCUDAHost, kDLCUDAManaged) \
            and not is_empty(t.dl.ndim, t.dl.shape):
        t.dl.device = (<Device>get_device(_cuda_classify(<uintptr_t>t.dl.data + t.dl.byte_offset, (kind, t.dl.device.device_id)))).dl
    return t


# ---- __dlpack__ ----
cdef object _REFUSES_ONE = __import__("re").compile(
    r"unexpected keyword argument:? ['`\"]?(\w+)|['`\"](\w+)['`\"] is an invalid keyword argument")
cdef object _REFUSES_ALL = __import__("re").compile(
    r"takes no keyword arguments|takes no arguments|takes \d+ positional arguments? but|takes (exactly|at most|from) |"
    r"incompatible function arguments|invalid keyword argument|unexpected keyword argument")


cdef object keyword_refused(e, dict sent):
    """Which of the keywords sent this TypeError says the producer does not know; None where it came from inside the producer.

    A parser speaks before any code of the producer's own has run. Where some has, only the words for one unknown keyword count: a
    wrapper passed on what it was given.
    """
    text = str(e)
    found = _REFUSES_ONE.search(text)
    if found is not None and (found[1] or found[2]) in sent:
        return found[1] or found[2]
    if e.__traceback__ is None or (e.__traceback__.tb_next is None and is_ours(e.__traceback__)):
        if _REFUSES_ALL.search(text) is not None:
            for name in ("max_version", "copy", "dl_device", "stream"):      # the newest first
                if name in sent:
                    return name
    return None


cdef bint is_ours(tb):
    return tb.tb_frame.f_code.co_filename.endswith(("_core.pyx", ".pxi"))


cdef dict _KW_BITS = {"max_version": KW_MAX_VERSION, "stream": KW_STREAM, "dl_device": KW_DEVICE, "copy": KW_COPY}


cdef object call_dlpack(x, TypeRecord r, stream, dl_device, copy):
    """``x.__dlpack__`` with the keywords that are needed and known. `stream`, `dl_device`, `copy`: None where not needed."""
    cdef PyObject* args[2]
    cdef int refused = r.refuses
    cdef dict kwargs
    if stream is None and dl_device is None and copy is None:
        # The common call, without a dict
        args[0] = <PyObject*>x
        args[1] = <PyObject*>_MAX_VERSION
        try:
            if refused & KW_MAX_VERSION:
                return PyObject_VectorcallMethod(_S_DLPACK, args, 1, NULL)
            return PyObject_VectorcallMethod(_S_DLPACK, args, 1, <PyObject*>_KW_VERSION_ONLY)
        except TypeError as e:
            if refused & KW_MAX_VERSION or keyword_refused(e, {"max_version": 0}) is None:
                raise
        capsule = x.__dlpack__()
        r.refuses |= KW_MAX_VERSION
        return capsule
    while True:
        kwargs = {}
        if not refused & KW_MAX_VERSION:
            kwargs["max_version"] = _MAX_VERSION
        if stream is not None and not refused & KW_STREAM:
            kwargs["stream"] = stream
        if dl_device is not None:
            kwargs["dl_device"] = dl_device
        if copy is not None:
            kwargs["copy"] = copy
        try:
            capsule = x.__dlpack__(**kwargs)
        except TypeError as e:
            name = keyword_refused(e, kwargs)
            if name is None:
                raise
            if name == "copy" or name == "dl_device":
                raise ExchangeError(f"{type(x).__name__}.__dlpack__ does not know {name}=, so it cannot promise {name}={kwargs[name]!r}",
                                    f"leave {name} out") from e
            refused |= _KW_BITS[name]
            continue
        r.refuses |= refused     # remembered only once a call has succeeded without them
        return capsule


cdef object _ONE = 1
cdef Device _CPU = get_device((kDLCPU, 0))


cdef object promised_device(x):
    """What ``__dlpack_device__`` says, or None where there is no such method."""
    cdef PyObject* found
    try:
        method = x.__dlpack_device__
    except AttributeError:
        return None
    pair = method()
    if PyTuple_CheckExact(pair) and PyTuple_GET_SIZE(pair) == 2:
        if <object>PyTuple_GET_ITEM(pair, 0) is _ONE:
            return _CPU          # its id says nothing (paddle: None)
        if PyLong_CheckExact(<object>PyTuple_GET_ITEM(pair, 0)) and PyLong_CheckExact(<object>PyTuple_GET_ITEM(pair, 1)):
            found = PyDict_GetItemWithError(_DEVICES, pair)  # the cache of Devices is by such pairs
            if found != NULL:
                return <Device>found
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{type(x).__name__}.__dlpack_device__ returned {pair!r}: it must be a pair (type, id)")
    kind, number = pair
    if number is None and _index(kind) == kDLCPU:
        return _CPU
    return get_device((kind, number))


cdef Tensor read_dlpack(x, TypeRecord r, Device device, copy, stream, Target g):
    """Through ``__dlpack__``; the device first, because it decides which stream is sent: the one that `g` will use the memory on."""
    cdef Tensor t
    cdef Device promised = promised_device(x)
    cdef object dl_device = None, sent = None
    if device is not None and promised is not None and device != promised:
        dl_device = tuple(device)
    if dl_device is None and promised is not None and has_streams(promised.dl.device_type):
        if stream is not None or promised.dl.device_type != kDLROCM or g is not None and g.table != NULL:
            sent = wanted_stream(g, promised.dl, stream)     # the default stream is said aloud (array API: never 0)
    elif stream is not None and stream_number(stream, kDLCPU) not in (None, -1):
        raise ExchangeError(f"stream {stream!r}: memory that arrives on {device or promised} has no streams", "leave stream out")
    capsule = call_dlpack_there(x, r, promised, sent, dl_device, copy)
    if not PyCapsule_CheckExact(capsule):
        raise TypeError(f"{type(x).__name__}.__dlpack__ returned {type(capsule).__name__}, not a capsule")
    t = consume_capsule(capsule)
    if dl_device is not None:
        check_arrival(t, device, x)
    elif promised is not None:
        check_arrival(t, promised, x)
    if has_streams(t.dl.device.device_type):
        t.stream = sent if sent is not None and not r.refuses & KW_STREAM else default_stream(t.dl.device.device_type)
    if copy is False and t.flags & DL_IS_COPIED:
        raise ExchangeError(f"{type(x).__name__}.__dlpack__ copied although copy=False forbids it")
    # a handle says neither its size nor when it is ready: what the side channel is for
    return t if addressable(t.dl.device.device_type) else join_native(t, x)


cdef object call_dlpack_there(x, TypeRecord r, Device there, stream, dl_device, copy):
    """With the producer's GPU current, which some producers take for granted (field report B56), and the caller's again afterwards."""
    if there is None or _cuda_enter is None or there.dl.device_type not in (kDLCUDA, kDLCUDAManaged):
        return call_dlpack(x, r, stream, dl_device, copy)
    before = _cuda_enter(there.dl.device_id)
    if before is None:           # it is, or there is only one
        return call_dlpack(x, r, stream, dl_device, copy)
    try:
        return call_dlpack(x, r, stream, dl_device, copy)
    finally:
        _cuda_leave(before)


cdef Tensor read_by_adapter(x, TypeRecord r, stream, Target g):
    """Through the adapter's quicker ``__dlpack__``, for objects that are probably where the last one was (jax on a GPU); None: not so."""
    cdef Tensor t
    cdef int64_t sent
    cdef Device here = r.last_device
    cdef int i
    for i in range(2):
        sent = wanted_stream(g, here.dl, stream)
        try:
            capsule = r.adapter.to_capsule(x, sent)      # looked up anew: adapters put jaxlib's own function there
        except (RuntimeError, ValueError):
            r.last_device = None                         # it may be on the host, where jaxlib knows no streams
            return None
        if not PyCapsule_CheckExact(capsule):
            raise TypeError(f"adapter {r.framework}: to_capsule returned {type(capsule).__name__}, not a capsule")
        t = consume_capsule(capsule)
        if t.dl.device.device_type == here.dl.device_type and t.dl.device.device_id == here.dl.device_id:
            t.stream = sent
            return t
        if not has_streams(t.dl.device.device_type):
            r.last_device = None
            return t
        here = r.last_device = device_of(t.dl.device)        # another GPU, whose streams are others
    raise ExchangeError(f"{source_name(x, r)} changes its device from one export to the next")


cdef Tensor read_attributes(x, TypeRecord r):
    cdef DLTensor d
    cdef int64_t dims[2 * MAX_NDIM]
    cdef uint64_t flags = 0
    cdef int64_t pending = borrow_attributes(x, r, &d, dims, &flags, MAX_NDIM)
    cdef Tensor t
    cdef _WithStream both
    if pending > 2 and r.current_stream is not None:     # not a default stream: its object may be dropped before the tensor
        both = _WithStream.__new__(_WithStream)
        both.memory = x
        both.holder = r.current_stream(device_of(d.device))
        t = over_object(both, &d, flags)
    else:
        t = over_object(x, &d, flags)
    t.stream = t.freed = pending
    return t


cdef int64_t borrow_attributes(x, TypeRecord r, DLTensor* d, int64_t* dims, uint64_t* flags, int room) except? -2:
    """Address, shape, strides (in bytes) and dtype as the object shows them; the device as ``__dlpack_device__`` says it.

    Returns the stream that is pending. `dims` has room for twice `room` numbers.
    """
    cdef int i, n
    cdef int64_t size
    cdef Device here = promised_device(x)
    if here is None:
        raise TypeError(f"{type(x).__name__} has no __dlpack_device__, which reads='attributes' needs")
    address = x
    for name in r.pointer:
        address = getattr(address, name)
    shape, steps, descr = getattr(x, r.shape_name), getattr(x, r.strides_name), getattr(x, r.dtype_name)
    if not isinstance(descr, np_dtype):
        raise TypeError(f"{type(x).__name__}.{r.dtype_name} is {descr!r}, not a NumPy dtype")
    if not PyTuple_CheckExact(shape) or not (steps is None or PyTuple_CheckExact(steps)):
        shape, steps = tuple(shape), None if steps is None else tuple(steps)
    n = <int>PyTuple_GET_SIZE(shape)
    if n > room or (steps is not None and PyTuple_GET_SIZE(steps) != n):
        raise ExchangeError(f"shape {shape} with strides {steps}: at most {MAX_NDIM} dimensions, and as many strides")
    d.dtype = dtype_of_descr(<NpyDescr*><PyObject*>descr, flags)
    size = element_bytes(d.dtype, flags[0])
    try:
        for i in range(n):
            dims[i] = <object>PyTuple_GET_ITEM(shape, i)
            if steps is not None:
                dims[n + i] = <object>PyTuple_GET_ITEM(steps, i)
                if dims[n + i] % size:
                    raise ExchangeError(f"strides {steps} bytes are not multiples of the {size}-byte elements")
                dims[n + i] = dims[n + i] // size
        d.data = <void*><uintptr_t>address
    except (OverflowError, TypeError) as e:
        raise ExchangeError(f"{type(x).__name__}: address {address!r}, shape {shape}, strides {steps}: {e}") from None
    if steps is None:
        compact_strides(n, dims, dims + n)
    d.device = here.dl
    d.ndim = n
    d.shape = dims
    d.strides = dims + n
    d.byte_offset = 0
    if not has_streams(here.dl.device_type):
        return STREAM_NONE
    return default_stream(here.dl.device_type) if r.current_stream is None else adapter_stream(r.stream_now, r.current_stream, here.dl)


cdef int check_arrival(Tensor t, Device wanted, x) except -1:
    cdef DLDevice d = t.dl.device
    if d.device_type == wanted.dl.device_type and (d.device_id == wanted.dl.device_id or host_accessible(d.device_type)):
        return 0
    # Whoever asks for the CPU gets any memory that the host can read (field report B10)
    if host_accessible(wanted.dl.device_type) and host_accessible(d.device_type):
        return 0
    raise ExchangeError(f"{type(x).__name__}: __dlpack_device__ or dl_device says {wanted} and the capsule says {device_of(d)}")


# ---- the exchange table of another type ----
cdef int borrow(PyObject* x, TypeRecord r, DLTensor* out) except -1:
    if r.table.dltensor_from_py_object_no_sync(<void*>x, out) != 0:
        raise_from_table(<object>x)
    check_guards(r, x, out.dtype.code)
    return 0


cdef raise_from_table(x):
    # The slot has set an error, or should have. Its class is the producer's; BufferError is what a refusal is here.
    if PyErr_Occurred() == NULL:
        raise ExchangeError(f"{type(x).__name__}: its exchange table failed without a reason")
    try:
        reraise()
    except (RuntimeError, ValueError) as e:      # how torch says no; anything else passes unchanged
        raise ExchangeError(f"{type(x).__name__} cannot be exported: {first_line(e)}") from e


cdef str first_line(e):
    # torch appends its C++ frames; they stay in the cause
    return str(e).partition("\n")[0]


cdef int reraise() except -1:
    return -1


cdef Tensor read_table(PyObject* x, TypeRecord r):
    cdef DLTensor d
    cdef DLManagedTensorVersioned* m = NULL
    cdef Tensor t
    if r.source == SRC_TABLE:
        borrow(x, r, &d)
        t = over_object(<object>x, &d, 0)
    else:
        t = blank_tensor()
        if r.table.managed_tensor_from_py_object_no_sync(<void*>x, &m) != 0:
            raise_from_table(<object>x)
        if m == NULL:
            raise ExchangeError(f"{type(<object>x).__name__}: its exchange table gave nothing")
        adopt(t, m)
        check_guards(r, x, t.dl.dtype.code)
    t.stream = t.freed = table_stream(r.table, t.dl.device)
    return t


# ---- buffers and array interfaces ----
cdef DLDataType dtype_of_format(const char* format, Py_ssize_t itemsize) except *:
    cdef DLDataType d
    cdef const char* f = format
    d.lanes = 1
    d.bits = <uint8_t>(itemsize * 8) if itemsize <= 16 else 0
    if f == NULL:
        f = b"B"
    if f[0] == c"=" or f[0] == c"@" or f[0] == c"<":
        f += 1                   # little-endian is native on every machine that this runs on, see the check at import
    elif (f[0] == c">" or f[0] == c"!") and itemsize == 1:
        f += 1
    if f[0] != 0 and f[1] == 0 and d.bits:
        if f[0] in (c"b", c"h", c"i", c"l", c"q", c"n"):
            d.code = kDLInt
            return d
        if f[0] in (c"B", c"H", c"I", c"L", c"Q", c"N", c"c"):
            d.code = kDLUInt
            return d
        if (f[0] == c"e" and itemsize == 2) or (f[0] == c"f" and itemsize == 4) or (f[0] == c"d" and itemsize == 8):
            d.code = kDLFloat
            return d
        if f[0] == c"?" and itemsize == 1:
            d.code = kDLBool
            return d
    elif f[0] == c"Z" and f[1] != 0 and f[2] == 0 and ((f[1] == c"f" and itemsize == 8) or (f[1] == c"d" and itemsize == 16)):
        d.code = kDLComplex
        return d
    name = "B" if format == NULL else (<bytes>format).decode("ascii", "replace")
    raise ExchangeError(f"buffer format {name!r} with {itemsize}-byte items has no DLPack dtype",
                        "exchange the bytes: memoryview(x).cast('B')")


cdef Tensor read_buffer(x):
    """Over the buffer protocol; the buffer stays open (and what it belongs to unresizable) until the tensor and its views are gone."""
    cdef _BufferTensor t = _BufferTensor.__new__(_BufferTensor)
    cdef DLTensor d
    cdef Py_ssize_t size
    cdef int i, n
    cdef int64_t strides[MAX_NDIM]
    PyObject_GetBuffer(x, &t.view, PyBUF_FULL_RO)
    n = t.view.ndim
    if n > MAX_NDIM:
        raise ExchangeError(f"ndim {n}: at most {MAX_NDIM}")
    if t.view.suboffsets != NULL:
        for i in range(n):
            if t.view.suboffsets[i] >= 0:
                raise ExchangeError("an indirect buffer (suboffsets) is not one piece of memory")
    size = t.view.itemsize
    if size <= 0:
        raise ExchangeError(f"buffer with {size}-byte items")
    d.dtype = dtype_of_format(t.view.format, size)
    if t.view.strides != NULL:
        for i in range(n):
            if t.view.strides[i] % size and t.view.shape[i] > 1:
                raise ExchangeError(f"stride {t.view.strides[i]} bytes is not a multiple of the {size}-byte items",
                                    "a contiguous copy is evenly spaced")
            strides[i] = t.view.strides[i] // size
    d.data = t.view.buf
    d.device.device_type = kDLCPU
    d.device.device_id = 0
    d.ndim = n
    d.shape = <int64_t*>t.view.shape
    d.strides = strides if t.view.strides != NULL else NULL
    d.byte_offset = 0
    take_tensor(t, &d, DL_READ_ONLY if t.view.readonly else 0)
    return t


class _Interface:
    """Shows NumPy an array interface and nothing else of the object behind it."""
    __slots__ = ("__array_interface__",)


cdef Tensor read_array_interface(x, interface):
    cdef DLTensor d
    cdef int64_t dims[2 * MAX_NDIM]
    cdef uint64_t flags = 0
    if not isinstance(interface, dict):
        raise TypeError(f"__array_interface__ of {type(x).__name__} is not a dict")
    holder = _Interface()
    holder.__array_interface__ = {k: v for k, v in interface.items() if v is not None}
    # NumPy checks the fields; its array is read and dropped, so that the collector sees from the tensor straight to x
    array = np.asarray(holder)
    if interface.get("mask") is not None:
        raise ExchangeError("__array_interface__ with a mask: DLPack cannot express it", "x.filled(value), or the data without its mask")
    if interface.get("version") != 3:
        raise ExchangeError(f"__array_interface__ version {interface.get('version')!r}: interop reads 3")
    if interface.get("data") is not None and not isinstance(interface["data"], tuple):
        check_within_buffer(array, interface["data"])
    if isinstance(interface.get("data"), tuple):
        read_array(<PyObject*>array, &d, dims, &flags)
        return over_object(x, &d, flags)
    return tensor_of_array(<PyObject*>array)        # a buffer, or no data: the array holds what NumPy made of it


cdef int check_within_buffer(array, data) except -1:
    # NumPy takes offset, shape and strides at their word
    cdef Tensor whole = read_buffer(memoryview(data).cast("B"))
    cdef DLTensor d
    cdef int64_t dims[2 * MAX_NDIM]
    cdef int64_t lo = 0, hi = 0
    cdef uint64_t flags = 0
    read_array(<PyObject*>array, &d, dims, &flags)
    check_extent(d.dtype, d.ndim, d.shape, d.strides)
    byte_range(&d, flags, &lo, &hi)
    first = <object><uint64_t><uintptr_t>d.data + lo - <object><uint64_t><uintptr_t>whole.dl.data
    if not is_empty(d.ndim, d.shape) and (first < 0 or first + (hi - lo) > whole.dl.shape[0]):
        raise ExchangeError(f"__array_interface__ describes bytes {first} to {first + (hi - lo)} of a buffer of {whole.dl.shape[0]}")
    return 0


cdef Tensor read_cuda_interface(x, interface, Device device, stream):
    """The CUDA array interface, versions 2 and 3 (field order and stream rules: Numba's CUDA Array Interface text)."""
    cdef DLTensor d
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef int i, n
    cdef Tensor t
    cdef int64_t size
    if not isinstance(interface, dict):
        raise TypeError(f"__cuda_array_interface__ of {type(x).__name__} is not a dict")
    try:
        dims, typestr, (address, readonly), version = interface["shape"], interface["typestr"], interface["data"], interface["version"]
        dims = tuple([_index(s) for s in dims])
        version = _index(version)
        steps = interface.get("strides")
        if steps is not None:
            steps = tuple([_index(s) for s in steps])
        address = 0 if address is None else _index(address)
    except (KeyError, TypeError, ValueError) as e:
        raise ExchangeError(f"__cuda_array_interface__ of {type(x).__name__} lacks a field or has a malformed one: {e!r}") from None
    if version < 2:
        raise ExchangeError(f"__cuda_array_interface__ version {version}: interop reads 2 and 3")
    if interface.get("mask") is not None:
        raise ExchangeError("__cuda_array_interface__ with a mask: DLPack cannot express it")
    try:
        d.dtype = coerce_dtype(typestr)
    except (TypeError, ValueError) as e:
        raise ExchangeError(f"__cuda_array_interface__ typestr {typestr!r}: {e}") from None
    n = len(dims)
    if n > MAX_NDIM:
        raise ExchangeError(f"ndim {n}: at most {MAX_NDIM}")
    if steps is not None and len(steps) != n:
        raise ExchangeError(f"strides {steps} for shape {dims}")
    size = element_bytes(d.dtype, 0)
    if is_packed(d.dtype, 0):
        raise ExchangeError(f"__cuda_array_interface__ typestr {typestr!r}: elements that share bytes")
    try:
        for i in range(n):
            shape[i] = dims[i]
            if steps is not None:
                if steps[i] % size:
                    raise ExchangeError(f"strides {steps} bytes are not multiples of the {size}-byte elements")
                strides[i] = steps[i] // size
        d.data = <void*><uintptr_t>address
    except (OverflowError, TypeError) as e:
        raise ExchangeError(f"__cuda_array_interface__ of {type(x).__name__}: {e}") from None
    d.device.device_type = kDLCUDA
    d.device.device_id = 0
    if _cuda_ops is None:
        if device is None or device.dl.device_type != kDLCUDA:
            raise ExchangeError("__cuda_array_interface__ does not say which GPU it is on, and no CUDA driver is here to ask",
                                "say device='cuda:0', or install cuda-bindings")
        d.device = device.dl
    elif d.data != NULL and _cuda_classify is not None:
        claimed = (kDLCUDA, 0) if device is None or device.dl.device_type != kDLCUDA else tuple(device)
        d.device = (<Device>get_device(_cuda_classify(<uintptr_t>d.data, claimed))).dl
    elif d.data != NULL:
        d.device.device_id = _cuda_ops.pointer_device(<uintptr_t>d.data)
    d.ndim = n
    d.shape = shape
    d.strides = strides if steps is not None else NULL
    d.byte_offset = 0
    t = over_object(x, &d, DL_READ_ONLY if readonly else 0)
    pending = interface.get("stream")
    # None: nothing to wait for. Before version 3 there was no such field: the legacy default stream is what was meant
    t.stream = STREAM_NONE if version >= 3 and pending is None else stream_number(1 if pending is None else pending, kDLCUDA)
    if t.stream != STREAM_NONE and not has_streams(t.dl.device.device_type):
        _cuda_ops.synchronize(0, t.stream)       # pinned memory: who takes it as the host's will wait for no stream
        t.stream = STREAM_NONE
    return t


cdef object instance_attribute(x, name):
    try:
        return getattr(x, name)
    except AttributeError:
        return None


cdef Tensor read_instance(x, TypeRecord r, Device device, copy, stream, Target g):
    """Nothing on the type says what it is; some objects answer for themselves."""
    if instance_attribute(x, "__dlpack__") is not None and not isinstance(x, type):
        return read_dlpack(x, r, device, copy, stream, g)
    interface = instance_attribute(x, "__cuda_array_interface__")
    if interface is not None and not isinstance(x, type):
        return read_cuda_interface(x, interface, device, stream)
    interface = instance_attribute(x, "__array_interface__")
    if interface is not None and not isinstance(x, type):
        return read_array_interface(x, interface)
    raise TypeError(f"{type(x).__module__}.{type(x).__qualname__} shares no memory: it has no __dlpack__, no buffer, no "
                    f"__array_interface__ and no __cuda_array_interface__" +
                    ("; np.asarray(x) makes an array of it" if isinstance(x, (list, tuple, int, float, complex)) else ""))
