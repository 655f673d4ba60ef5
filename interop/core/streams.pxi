# Streams of CUDA and ROCm: their numbers, whose is used, what comes before what, and memory that its user's stream is not done with.

cdef enum:
    STREAM_UNKNOWN = -2          # Source.wanted: the target has not been asked

# Filled by the CUDA adapter when it is there (contract.set_cuda_driver). The second line are None where a driver does not have them.
_cuda_ops = None
_cuda_own_stream = _cuda_keep = _cuda_classify = _cuda_enter = _cuda_leave = _cuda_idle = None


def set_cuda_ops(ops):
    """Who answers for CUDA: `contract.set_cuda_driver` says what it has; None: nobody."""
    global _cuda_ops, _cuda_own_stream, _cuda_keep, _cuda_classify, _cuda_enter, _cuda_leave, _cuda_idle
    _cuda_ops = ops
    _cuda_idle = getattr(ops, "idle", None)
    _cuda_own_stream = getattr(ops, "own_stream", None)
    _cuda_keep = getattr(ops, "keep", None)
    _cuda_classify = getattr(ops, "classify", None)
    _cuda_enter, _cuda_leave = getattr(ops, "enter", None), getattr(ops, "leave", None)


# ---- numbers ----
cdef inline int64_t default_stream(int32_t kind) noexcept nogil:
    # What None means in the array API: the legacy default stream, which ROCm calls 0
    return 0 if kind == kDLROCM else 1


cdef object stream_number(stream, int32_t kind):
    """A stream as the number that the array API wants for `kind`, or None. Takes ints and objects with ``__cuda_stream__``."""
    if stream is None:
        return None
    if not addressable(kind) and not hasattr(stream, "__index__"):
        return stream                # a queue object of the device's own API, which its adapter knows
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        stream = cuda_stream_of(stream, protocol)
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream {stream!r}: an int as the array API numbers streams, or an object with __cuda_stream__")
    number = _index(stream)
    if number < -1 or number >= 2**63:
        raise ValueError(f"stream {number}: must be -1 (no ordering) or a stream")
    if kind in (kDLCUDA, kDLCUDAManaged) and number == 0:
        raise ValueError("stream 0 is ambiguous on CUDA: 1 is the legacy default stream, 2 the per-thread one (array API)")
    if kind == kDLROCM and number in (1, 2):
        raise ValueError(f"stream {number} is not defined on ROCm: 0 is its default stream (array API)")
    return number


cdef object cuda_stream_of(stream, protocol):
    """The handle in ``__cuda_stream__``: a pair (version, address), or a method that returns one. 0 is the legacy default stream, 1."""
    pair = protocol() if callable(protocol) else protocol
    try:
        version, address = pair
        version, address = _index(version), _index(address)
    except (TypeError, ValueError):
        raise TypeError(f"__cuda_stream__ of {type(stream).__name__} gave {pair!r}: it must be a pair (version, address)") from None
    if address < 0:
        raise ValueError(f"__cuda_stream__ of {type(stream).__name__} gave address {address}")
    return address or 1


def stream_of(stream, device):
    """A stream, in any form that users give, as the array API's number on `device`; None stays None."""
    return stream_number(stream, get_device(device).dl.device_type)


# ---- whose ----
cdef int64_t own_stream(DLDevice d) except? -2:
    """interop's own stream on a device; the default one where no driver makes streams."""
    if d.device_type == kDLROCM or _cuda_own_stream is None:
        return default_stream(d.device_type)
    made = _cuda_own_stream(d.device_id)
    return default_stream(d.device_type) if made is None else made


cdef int64_t table_stream(DLPackExchangeAPI* table, DLDevice d) except? -2:
    """The current stream of the framework that has this exchange table."""
    cdef void* stream = NULL
    if not has_streams(d.device_type):
        return STREAM_NONE
    if table.current_work_stream(d.device_type, d.device_id, &stream) != 0:
        raise_from_table(None)
    if stream == NULL:
        return default_stream(d.device_type)
    return <int64_t><intptr_t>stream


cdef int64_t adapter_stream(stream_function now, current_stream, DLDevice d) except? -2:
    """The current stream of a framework whose adapter says so (contract: `stream_capsule`, `current_stream`)."""
    cdef int64_t address
    if now != NULL:
        address = now()
        if not address and PyErr_Occurred() != NULL:
            reraise()
        return address if address else default_stream(d.device_type)
    number = stream_number(current_stream(device_of(d)), d.device_type)
    if number is None:
        return default_stream(d.device_type)
    if number < 0:
        raise ValueError(f"an adapter's current_stream gave {number}: it must be a stream, as the array API numbers them")
    return number


cdef int64_t framework_stream(Target g, DLDevice d) except? -2:
    """The stream that the target's framework will use the memory on; ours where nobody knows."""
    if g is not None:
        if d.device_type == kDLCUDAManaged and g.devices and not g.devices >> <int>kDLCUDAManaged & 1:
            d.device_type = kDLCUDA          # the label under which it will have the memory
        if g.table != NULL:
            return table_stream(g.table, d)
        if g.current_stream is not None:
            return adapter_stream(g.stream_now, g.current_stream, d)
    return own_stream(d)


cdef int64_t wanted_stream(Target g, DLDevice d, stream) except? -2:
    """`stream`, which the user gave, or the one that the target will use."""
    number = stream_number(stream, d.device_type)
    return framework_stream(g, d) if number is None else number


def stream_idle(device, stream):
    """Whether all work that a stream was given is done; False where nobody can say."""
    return _cuda_idle is not None and bool(_cuda_idle((<Device>get_device(device)).dl.device_id, stream))


def target_stream(target, device):
    """The stream on which `target` uses memory of `device` from now on (its framework's current one), or None: it has none."""
    cdef Device d = get_device(device)
    cdef Target g = target_of(target)
    if not has_streams(d.dl.device_type) or (g.table == NULL and g.current_stream is None):
        return None
    return framework_stream(g, d.dl)


def accepts_device(target, device):
    """Whether a framework's adapter says that its objects can lie in the memory of a device."""
    return bool(target_of(target).devices >> (<Device>get_device(device)).dl.device_type & 1)


# ---- order ----
cdef int order_streams(DLTensor* t, int64_t pending, int64_t wanted) except -1:
    if wanted == -1 or pending == STREAM_NONE or pending == wanted:
        return 0                 # equal streams cost nothing
    if _cuda_ops is None or t.device.device_type == kDLROCM:
        raise ExchangeError(f"work on stream {pending:#x} of {device_of(t.device)} must be finished before stream {wanted:#x} reads, "
                            "and interop has no driver here to order them",
                            "use the same stream on both sides, or synchronise and pass stream=-1")
    _cuda_ops.order(t.device.device_id, pending, wanted)
    return 0


cdef settle_stream(Tensor t, stream):
    # What the caller will use: pending work is ordered before it, and it is what is pending from here on.
    number = stream_number(stream, t.dl.device.device_type)
    if has_streams(t.dl.device.device_type):
        order_streams(&t.dl, t.stream, number)
        if number != -1 and number != t.stream:
            t.stream = number
    elif number is not None and number != -1:
        raise ExchangeError(f"stream {number}: memory on {device_of(t.dl.device)} has no streams that interop knows", "leave stream out")


def finish_on_host(Tensor t not None):
    """Work that is pending on memory which the host reads too is over when this returns."""
    if t.stream != STREAM_NONE:
        finish_for_host(&t.dl, t.stream)


def ready_on(Tensor t not None, stream):
    """Work that is pending on the memory of `t` comes before what `stream` (array API number) is given from now on."""
    number = stream_number(stream, t.dl.device.device_type)
    if number is not None and has_streams(t.dl.device.device_type):
        order_streams(&t.dl, t.stream, number)


def pending_stream(Tensor t not None):
    """The stream whose work is pending on the memory of `t`; -1: none, or nobody said."""
    return t.stream


cdef int finish_for_host(DLTensor* d, int64_t stream) except -1:
    """Managed memory is read by the host once the stream that wrote it has finished."""
    if not host_accessible(d.device.device_type):
        return 0
    if _cuda_ops is None:
        raise ExchangeError(f"work on stream {stream:#x} of {device_of(d.device)} must be finished before the host reads, "
                            "and interop has no driver here to wait for it", "synchronise, and take it with stream=-1")
    _cuda_ops.synchronize(d.device.device_id, stream)
    return 0


# ---- memory that its user's stream is not done with ----
@cython.no_gc_clear
@cython.final
@cython.internal
cdef class _StreamUse:
    """Keeps memory for a consumer whose stream is not the one in whose order it is freed.

    When the consumer lets go, what its stream was given may still run; the memory then waits for that, and for nothing else (field
    report B33). Where the two are one stream none of this is needed: whoever frees does it in the order of that stream.
    """
    cdef object memory
    cdef object holder           # the framework's own object for the stream, which keeps that from being destroyed
    cdef int64_t stream
    cdef int64_t nbytes
    cdef int32_t device
    cdef unsigned int generation

    def __dealloc__(self):
        # In tp_dealloc and not in a finalizer, which the collector may run while somebody in the same cycle still uses the memory
        cdef _StreamUse again
        if self.memory is None:
            return
        if interop_finalizing() or self.generation != interop_generation:
            Py_INCREF(self.memory)       # the parent's, or too late for anybody's driver: leaks on purpose
        elif interop_foreign_thread:
            # a thread that Python does not know may be a driver's callback, in which no driver is called
            again = stream_use(self.memory, self.holder, self.device, self.stream, self.nbytes)
            Py_INCREF(again)
            interop_retire(<PyObject*>again)
        else:
            try:
                _cuda_keep(self.device, self.stream, self.nbytes, (self.memory, self.holder))
            except BaseException as e:
                _report(e)


@cython.no_gc_clear
@cython.final
@cython.internal
cdef class _WithStream:
    """Memory, and the framework's own object for the stream that is pending on it."""
    cdef object memory
    cdef object holder


cdef _StreamUse stream_use(memory, holder, int32_t device, int64_t stream, int64_t nbytes):
    cdef _StreamUse use = _StreamUse.__new__(_StreamUse)
    use.memory = memory
    use.holder = holder
    use.device = device
    use.stream = stream
    use.nbytes = nbytes
    use.generation = interop_generation
    return use


cdef inline bint outlasts(DLDevice d, int64_t freed, int64_t wanted) noexcept:
    """Whether memory that is freed in the order of `freed` may be freed while a consumer's work on `wanted` still uses it."""
    return wanted != freed and wanted >= 0 and _cuda_keep is not None and \
        (d.device_type == kDLCUDA or d.device_type == kDLCUDAManaged)


cdef object stream_holder(Target g, DLDevice d):
    """What keeps the current stream of the target's framework from being destroyed; None where its streams live for ever."""
    if g is None or g.current_stream is None:
        return None
    stream = g.current_stream(device_of(d))
    return None if PyLong_CheckExact(stream) else stream


cdef Tensor used_on(Tensor t, int64_t wanted, holder):
    """The same view for a consumer that uses it on `wanted`: ready there already, and kept until that stream is done with it."""
    cdef Tensor out = blank_object_tensor(stream_use(t, holder, t.dl.device.device_id, wanted, bytes_of_tensor(t)))
    copy_view(out, t)
    out.stream = out.freed = wanted
    return out


cdef inline int64_t bytes_of_tensor(Tensor t):
    return bytes_of(t.dl.dtype, count(t.dl.ndim, t.dl.shape), t.flags)
