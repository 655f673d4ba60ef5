# Making: a Tensor as a capsule. One exporter for both kinds; every keyword is honoured or refused.

cdef expose(Tensor t, stream, max_version, dl_device, copy):
    cdef DLDevice d = t.dl.device
    cdef bint versioned = False
    cdef int minor = 0
    cdef uint64_t flags
    cdef Tensor source = t
    cdef int64_t wanted
    cdef Block* b
    cdef LegacyBlock* m
    cdef PyObject* p
    if max_version is not None:
        versioned, minor = wanted_version(max_version)
    if dl_device is not None and check_wanted_device(t, dl_device) and d.device_type != kDLCPU:
        t = for_host(t, None if copy is True else stream)      # pinned or managed memory, under the name that was asked for
        stream = None
        d = t.dl.device
    if copy is not None and copy is not True and copy is not False:
        raise TypeError(f"copy {copy!r}: must be True, False or None (array API)")
    wanted = STREAM_NONE
    if stream is not None or has_streams(d.device_type):
        wanted = order_export(t, stream)
    source = lend(t, wanted if has_streams(d.device_type) else stream)     # -1 waits for nothing, and is refused all the same while
    if outlasts(d, t.freed, wanted):                                       # somebody writes
        source = used_on(source, wanted, None)
    flags = t.flags & (DL_READ_ONLY | DL_SUBBYTE_PADDED)
    if copy is True:
        source = repacked(t, "interop", "capsule", "copy=True was asked for", None)
        flags = (source.flags & DL_SUBBYTE_PADDED) | DL_IS_COPIED
    if flags & DL_SUBBYTE_PADDED and source.dl.dtype.bits < 8 and (not versioned or minor < 1):
        raise ExchangeError("padded sub-byte elements leave with a flag that DLPack has since 1.1",
                            "ask with max_version=(1, 1) or newer")
    if versioned:
        b = export_block(&source.dl, flags, <PyObject*>source)
        b.v.version.minor = minor
        p = new_capsule(b, b"dltensor_versioned", capsule_gone)
        if p == NULL:
            free_block(b)
            raise MemoryError()
        return steal(p)
    if flags & DL_READ_ONLY:
        raise ExchangeError("a read-only tensor cannot leave in a legacy capsule, which has no flag for it",
                            "ask with max_version=(1, 0) or newer, or share it by interop.to(x, target, readonly=True)")
    m = export_legacy(&source.dl, <PyObject*>source)
    p = new_capsule(m, b"dltensor", capsule_gone)
    if p == NULL:
        delete_legacy(&m.m)
        raise MemoryError()
    return steal(p)


cdef inline object steal(PyObject* p):
    # From an owned pointer to an object.
    value = <object>p
    Py_DECREF(value)
    return value


cdef (bint, int) wanted_version(max_version) except *:
    cdef long major, minor
    if PyTuple_CheckExact(max_version) and PyTuple_GET_SIZE(max_version) == 2 \
            and PyLong_CheckExact(<object>PyTuple_GET_ITEM(max_version, 0)) \
            and PyLong_CheckExact(<object>PyTuple_GET_ITEM(max_version, 1)):
        major = small_int(PyTuple_GET_ITEM(max_version, 0))
        minor = small_int(PyTuple_GET_ITEM(max_version, 1))
    else:
        try:
            a, b = max_version
            a, b = _index(a), _index(b)
        except (TypeError, ValueError):
            raise TypeError(f"max_version {max_version!r}: must be a pair of ints or None") from None
        major = small_int(<PyObject*>a)
        minor = small_int(<PyObject*>b)
    if major < 0 or minor < 0:
        raise ValueError(f"max_version {max_version!r}: versions are not negative")
    if major < DLPACK_MAJOR:
        return False, 0
    # A later major: the newest that we know, which the consumer then judges
    return True, DLPACK_MINOR if major > DLPACK_MAJOR or minor > DLPACK_MINOR else minor


cdef inline long small_int(PyObject* n) except? -1:
    # Beyond 64 bits counts as the largest version there is; negative as negative.
    cdef int overflow = 0
    cdef long value = PyLong_AsLongAndOverflow(<object>n, &overflow)
    return value if not overflow else (2**31 if overflow > 0 else -2)


cdef bint check_wanted_device(Tensor t, dl_device) except -1:
    """Whether the host was asked for; refused where the memory is not on what was asked for."""
    cdef Device wanted = get_device(dl_device if isinstance(dl_device, (tuple, Device)) else tuple(dl_device))
    cdef DLDevice d = t.dl.device
    if wanted.dl.device_type == d.device_type and wanted.dl.device_id == d.device_id:
        return False
    if wanted.dl.device_type == kDLCPU and host_accessible(d.device_type):
        return True
    raise ExchangeError(f"this tensor is on {device_of(d)} and dl_device asks for {wanted}",
                        f"interop.to(t, {str(wanted)!r}) copies where an adapter can")


cdef Tensor for_host(Tensor t, stream):
    """Memory that the host reads too, as the CPU's. A stream is the consumer's, who orders by it; None: finished when this returns."""
    number = stream_number(stream, t.dl.device.device_type)
    if t.stream != STREAM_NONE and number is None:
        finish_for_host(&t.dl, t.stream)
    elif number is not None and has_streams(t.dl.device.device_type):
        order_streams(&t.dl, t.stream, number)
    elif number is not None and number != -1:
        raise ExchangeError(f"stream {number}: memory on {device_of(t.dl.device)} has no streams that interop knows", "pass None or -1")
    t = labelled(t, _CPU.dl)
    t.stream = t.freed = STREAM_NONE
    return t


cdef int64_t order_export(Tensor t, stream) except? -2:
    """Make the memory ready on the consumer's stream (array API: it is a stream of the producer's device); the stream, or -1."""
    cdef int32_t kind = t.dl.device.device_type
    number = stream_number(stream, kind)
    if not has_streams(kind):
        if number is not None and number != -1:
            # of a device with handles: a queue, before which `lend` puts what is pending
            _up_queue(<object>t.alloc if t.alloc != NULL else None, device_of(t.dl.device), number)
        return STREAM_NONE
    if number is None:
        number = default_stream(kind)
    order_streams(&t.dl, t.stream, number)
    return number
