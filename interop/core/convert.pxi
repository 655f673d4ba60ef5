# Conversion: a source borrowed onto the stack, what stands in the way of the target, and the target's way of making an object.

cdef struct Source:
    DLTensor dl
    uint64_t flags
    int64_t stream               # whose work is pending
    int64_t freed                # in whose order the memory is freed
    int64_t wanted               # the stream that the target will use it on; STREAM_UNKNOWN: not asked, or it has none
    PyObject* owner              # what keeps the memory: borrowed from the object itself, or from `keep`
    int64_t dims[2 * INLINE_DIMS]


cdef inline bint misaligned(DLTensor* t) noexcept nogil:
    return addressable(t.device.device_type) and \
        (<uintptr_t>t.data + t.byte_offset) & <uintptr_t>(component_bytes(t.dtype) - 1) and not is_empty(t.ndim, t.shape)


cdef inline Tensor read_as_is(PyObject* x, TypeRecord r):
    """A Tensor over `x` wherever it is, without copying and without asking its alignment."""
    cdef int source = r.source
    if source == SRC_NDARRAY:
        return tensor_of_array(x)
    if source == SRC_TENSOR:
        return <Tensor>x
    if source == SRC_TABLE or source == SRC_TABLE_OWNED:
        return read_table(x, r)
    return read_slow(<object>x, r, None, None, None)


cdef Tensor read_slow(x, TypeRecord r, Device device, copy, stream, Target g=None):
    # `g`: who will use it, where that is known: a producer with streams is told
    cdef int source = r.source
    if source == SRC_TENSOR or source == SRC_NDARRAY or source == SRC_TABLE or source == SRC_TABLE_OWNED:
        return read_as_is(<PyObject*>x, r)
    if source == SRC_NDARRAY_KIN:
        return tensor_of_array_subclass(x)
    if r.refused_scalar:
        raise ExchangeError(f"NumPy dtype {x.dtype} has no DLPack equivalent", "convert it to a number type")
    if r.n_guards and not (source == SRC_BUFFER and r.fallback_guards):
        check_guards(r, <PyObject*>x, -1)
    if r.immutable:
        return read_immutable(x, r, device, copy, stream, g)
    return read_generic(x, r, device, copy, stream, g)


cdef Tensor read_immutable(x, TypeRecord r, Device device, copy, stream, Target g):
    # A legacy capsule cannot say what the framework promises (jax, for dtypes that buffers do not have)
    cdef Tensor t = read_generic(x, r, device, copy, stream, g)
    t.flags |= DL_READ_ONLY      # nobody else has it yet
    return t


cdef Tensor read_generic(x, TypeRecord r, Device device, copy, stream, Target g):
    cdef int source = r.source
    cdef Tensor t
    if source == SRC_ATTRIBUTES:
        return read_attributes(x, r)
    if source == SRC_CAPSULE:
        return consume_raw(x)
    if source == SRC_ADAPTER:
        return expect_tensor(r, r.adapter.to_tensor(x))
    if source == SRC_BUFFER:
        if r.last_device is not None and (device is None or device is r.last_device):
            t = read_by_adapter(x, r, stream, g)         # which asks what the guards ask
            if t is not None:
                return t
        if device is None or host_accessible(device.dl.device_type):
            try:
                return read_buffer(x)
            except (BufferError, ValueError):        # jax: a dtype or a device that buffers do not have
                if find_on_type(type(x), "__dlpack__") is None:
                    raise
        check_guards(r, <PyObject*>x, -1)        # also those asked only here
        t = read_dlpack(x, r, device, copy, stream, g)
        if r.to_capsule is not None and has_streams(t.dl.device.device_type):
            r.last_device = device_of(t.dl.device)
        return t
    if source == SRC_DLPACK:
        return read_dlpack(x, r, device, copy, stream, g)
    return read_instance(x, r, device, copy, stream, g)


cdef Tensor expect_tensor(TypeRecord r, t):
    if not isinstance(t, Tensor):
        raise TypeError(f"adapter {r.framework}: to_tensor returned {type(t).__name__}, not a Tensor")
    return t


# ---- copies, and who is told of them ----
_note_copy = None                # routing.note_copy


def set_note_copy(function):
    """`routing.note_copy(source, target, nbytes, reason, remedy)`: counts the copy or, in a guard, raises before it is made."""
    global _note_copy
    _note_copy = function


cdef int note_copy(DLTensor* t, uint64_t flags, str source, str target, str reason, remedy) except -1:
    _note_copy(source, target, bytes_of(t.dtype, count(t.ndim, t.shape), flags), reason, remedy)
    return 0


cdef Tensor packed(DLTensor* t, uint64_t flags, str source, str target, str reason, remedy, int64_t alignment=HOST_ALIGNMENT):
    check_packable(t, flags)     # what would be refused is not counted
    note_copy(t, flags, source, target, reason, remedy)
    return pack(t, flags, alignment)


cdef Tensor repacked(Tensor t, str source, str target, str reason, remedy, int64_t alignment=HOST_ALIGNMENT):
    """A compact copy in the same memory: made by the host, or by the adapter of a device that copies within it."""
    cdef Tensor out
    if not host_accessible(t.dl.device.device_type):
        where = device_of(t.dl.device)
        if _up_copies(where):
            out = _up_move(t, (<Allocation>t.alloc).context if t.alloc != NULL and (<Allocation>t.alloc).context is not None else where,
                           source, target, reason, remedy)
            out.flags |= DL_IS_COPIED
            return out
    elif t.stream != STREAM_NONE:
        finish_for_host(&t.dl, t.stream)         # managed memory, which a stream is still writing
    return packed(&t.dl, t.flags, source, target, reason, remedy, alignment)


# ---- as_tensor ----
cdef inline Tensor quick_tensor(PyObject* x):
    cdef Tensor t
    if Py_TYPE(x) == &PyArray_Type:
        t = tensor_of_array(x)
    else:
        t = read_as_is(x, record_of(x))
    if misaligned(&t.dl):
        return align(t)
    return t


cdef Tensor align(Tensor t):
    return packed(&t.dl, t.flags, "misaligned memory", "interop", misaligned_reason(&t.dl), "allocate it aligned")


cdef str misaligned_reason(DLTensor* t):
    return (f"address {<uintptr_t>t.data + t.byte_offset:#x} is not a multiple of the {component_bytes(t.dtype)} bytes "
            f"that {dtype_of(t.dtype)} needs")


def as_tensor(x, /, *, device=None, copy=None, readonly=None, stream=None):
    """A `Tensor` over the memory of anything that has some.

    Read are: interop Tensors, NumPy arrays, objects with DLPack's C exchange table, ``__dlpack__``, the buffer protocol,
    ``__cuda_array_interface__`` (2, 3) or ``__array_interface__``, and raw DLPack capsules, which are consumed.

    Args:
        x: the object. It is kept alive, or its buffer open, until the tensor and everything made from it are gone.
        device: where the bytes must be. Another memory than theirs is reached by a copy, where there is one.
        copy: True always copies, False never (ExchangeError), None only where nothing else works (misaligned memory).
        readonly: True gives a read-only view; False copies memory that is read-only; None keeps the flag.
        stream: on CUDA and ROCm, the stream (as the array API numbers them) on which the memory will be used.

    Raises:
        ExchangeError: the memory cannot be had as asked; `reason` and `remedy` say why and what to do.
        TypeError: `x` shares no memory. An error raised inside a producer passes unchanged.
    """
    if device is None and copy is None and readonly is None and stream is None:
        return quick_tensor(<PyObject*>x)
    return tensor_as_asked(x, None if device is None else place_device(device), flag(copy, "copy"), flag(readonly, "readonly"), stream)


cdef object flag(value, str name):
    if value is not None and value is not True and value is not False:
        raise TypeError(f"{name} {value!r}: must be True, False or None")
    return value


cdef Device place_device(place):
    """The Device of a place: itself, its spelling, a pair, or a framework's own device object."""
    if isinstance(place, (Device, str, tuple)):
        return get_device(place)
    found = target_of(place)
    if found.place is None:
        raise TypeError(f"{place!r} is not a device")
    return found.place


cdef Tensor tensor_as_asked(x, Device device, copy, readonly, stream):
    cdef TypeRecord r = record_of(<PyObject*>x)
    cdef Tensor t
    if device is not None and r.source not in (SRC_TENSOR, SRC_NDARRAY, SRC_NDARRAY_KIN, SRC_CAPSULE):
        t = read_towards(x, r, device, copy, stream)
    else:
        t = read_slow(x, r, None, False if copy is False else None, stream)
    if device is not None and not same_memory(t.dl.device, device.dl):
        if copy is False:
            t = imported_at(t, device, device, f"memory on {device_of(t.dl.device)} and device={str(device)!r}")
    if device is not None and not same_memory(t.dl.device, device.dl):
        may_read(&t.dl, t.flags, t.alloc, None)
        here = device_of(t.dl.device)
        on = copying_stream(stream, here, device)
        t = _up_move(t, device, source_name(x, r), str(device), f"from {here} to {device}", "keep it where it is", on)
        t.flags |= DL_IS_COPIED
        copy = None
        if not has_streams(t.dl.device.device_type):
            stream = None
    if copy is False and t.flags & DL_IS_COPIED and r.source != SRC_TENSOR:
        raise ExchangeError(f"{type(x).__name__} arrived as a copy and copy=False forbids it")
    if stream is not None:
        number = stream_number(stream, t.dl.device.device_type)
        if number is not None:
            may_read(&t.dl, t.flags, t.alloc, number)
        if r.source == SRC_TENSOR:
            t = relabelled(t, t.flags & DL_READ_ONLY)     # what is pending is said of this view, not of the caller's
        settle_stream(t, stream)
    if copy is True:
        refuse_layout(t.flags, "a copy of itself")
    if copy is True or (readonly is False and t.flags & DL_READ_ONLY) or misaligned(&t.dl):
        may_read(&t.dl, t.flags, t.alloc, None)       # its bytes are about to be read
    if copy is True:
        if not (t.flags & DL_IS_COPIED) or r.source == SRC_TENSOR:
            t = repacked(t, source_name(x, r), "interop", "copy=True was asked for", None)
    elif misaligned(&t.dl):
        if copy is False:
            raise ExchangeError(misaligned_reason(&t.dl), "copy=None copies")
        t = align(t)
    if readonly is False and t.flags & DL_READ_ONLY:
        if copy is False:
            raise ExchangeError("the memory is read-only, readonly=False asks to write, and copy=False forbids a copy",
                                "copy=None copies; readonly=None keeps it read-only")
        t = repacked(t, source_name(x, r), "interop", "read-only memory, and readonly=False asks to write", "readonly=None")
    if readonly is True and not t.flags & DL_READ_ONLY:
        t = relabelled(t, DL_READ_ONLY)
    return t


cdef Tensor relabelled(Tensor base, uint64_t readonly):
    """The same view with the read-only flag set or cleared. Clearing takes somebody who vouches that nobody writes."""
    cdef Tensor t = like_view(base)
    take_dims(t, base.dl.ndim, base.dl.shape, base.dl.strides)
    t.flags = (base.flags & ~<uint64_t>DL_READ_ONLY) | readonly
    return t


cdef bint same_memory(DLDevice have, DLDevice want) noexcept:
    if have.device_type == want.device_type and have.device_id == want.device_id:
        return True
    return want.device_type == kDLCPU and host_accessible(have.device_type)


cdef str source_name(x, TypeRecord r):
    return r.framework if r.framework is not None else type(x).__qualname__


cdef Tensor read_towards(x, TypeRecord r, Device device, copy, stream):
    """Read `x` when its bytes are wanted on `device`; a producer that can cross by itself is asked to (dl_device)."""
    cdef Device here = promised_device(x)
    cdef Tensor t
    if here is None:
        return read_slow(x, r, device, False if copy is False else None, stream)
    if same_memory(here.dl, device.dl) or _up_copies(here):
        # where it is; what has to cross then, interop's own copies carry faster
        return read_slow(x, r, None, False if copy is False else None, stream)
    if copy is False:
        raise ExchangeError(f"{source_name(x, r)} is on {here} and device={str(device)!r} asks for another memory: that takes a copy, "
                            "which copy=False forbids", "leave copy out")
    check_guards(r, <PyObject*>x, -1)
    # Counted before it is made, so that a guard can forbid it; the size is not known yet without asking the object
    _note_copy(source_name(x, r), str(device), size_in_bytes(x), f"from {here} to {device}", "keep it where it is")
    t = read_dlpack(x, r, device, copy, stream, None)
    t.flags |= DL_IS_COPIED
    return t


cdef object size_in_bytes(x):
    n = getattr(x, "nbytes", 0)
    return n if isinstance(n, int) else 0


def from_dlpack(x, /, *, device=None, copy=None):
    """The array API's ``from_dlpack``: a `Tensor` from an object with ``__dlpack__`` and ``__dlpack_device__``.

    Args:
        x: the object. A raw capsule is not one: `as_tensor` takes it.
        device: where the bytes must be; None: where they are.
        copy: True always copies, False never, None only where it must be.

    Raises:
        TypeError: `x` does not speak DLPack.
        BufferError: it cannot be exchanged as asked (array API).
    """
    if instance_attribute(x, "__dlpack__") is None or instance_attribute(x, "__dlpack_device__") is None:
        raise TypeError(f"{type(x).__module__}.{type(x).__qualname__} has no __dlpack__ and __dlpack_device__; interop.as_tensor "
                        "also takes buffers, array interfaces and capsules")
    return tensor_as_asked(x, None if device is None else place_device(device), flag(copy, "copy"), None, None)


# ---- to ----
cdef enum:                       # what stands in the way of a target
    CLEAR = 0
    IS_READONLY = 1
    IS_NEGATIVE = 2
    IS_STRIDED = 3
    IS_UNALIGNED = 4
    IS_ELSEWHERE = 5


cdef int obstacle(Target g, DLTensor* t, uint64_t flags, bint promised) except -1:
    """The first reason why memory like `t` cannot be handed to `g` as it is. `promised`: the caller will only read."""
    cdef int i
    cdef int64_t seen
    if g.devices and not g.devices >> t.device.device_type & 1 and not (
            host_accessible(t.device.device_type) and g.devices >> kDLCPU & 1) and not (
            t.device.device_type == kDLCUDAManaged and g.devices >> kDLCUDA & 1):
        return IS_ELSEWHERE          # pinned and managed memory are the host's too, under other labels
    if g.own_device is not None and device_of(t.device).name != g.own_device:
        return IS_ELSEWHERE          # devices of other names may share the type (kDLExtDev), and their handles mean nothing there
    if flags & DL_READ_ONLY and not g.holds_readonly and not promised:
        return IS_READONLY
    if not g.negative:
        for i in range(t.ndim):
            if t.strides[i] < 0 and t.shape[i] > 1:
                return IS_NEGATIVE
    if not g.strided and not is_permuted_compact(t):
        return IS_STRIDED
    if addressable(t.device.device_type) and not is_empty(t.ndim, t.shape):
        seen = <int64_t>((<uintptr_t>t.data + t.byte_offset) & 0xffff)
        if seen & (g.alignment - 1) or (seen & (component_bytes(t.dtype) - 1) and g.kind != TO_NUMPY):
            return IS_UNALIGNED
    return CLEAR


cdef bint is_permuted_compact(DLTensor* t) noexcept nogil:
    # Whether some order of the dimensions makes it row-major: follow the strides 1, 1*shape, ... until all are used.
    cdef int64_t step = 1
    cdef uint64_t left = 0
    cdef int i, hits
    if is_empty(t.ndim, t.shape):
        return True
    for i in range(t.ndim):
        if t.shape[i] != 1:
            left |= (<uint64_t>1) << i
    while left:
        hits = 0
        for i in range(t.ndim):
            if left >> i & 1 and t.strides[i] == step:
                left &= ~((<uint64_t>1) << i)
                step *= t.shape[i]
                hits = 1
                break
        if not hits:
            return False
    return True


cdef tuple explain(int what, Target g, DLTensor* t):
    if what == IS_READONLY:
        return (f"the memory is read-only and {g.name} cannot hold that", "readonly=True promises that you only read; copy=None copies")
    if what == IS_NEGATIVE:
        return (f"negative strides {tuple_of(t.ndim, t.strides)}: {g.name} has none", "copy=None packs them")
    if what == IS_STRIDED:
        return (f"strides {tuple_of(t.ndim, t.strides)} with shape {tuple_of(t.ndim, t.shape)}: {g.name} takes memory without gaps only",
                "copy=None packs it")
    if what == IS_UNALIGNED:
        wanted = max(g.alignment, component_bytes(t.dtype))
        return (f"address {<uintptr_t>t.data + t.byte_offset:#x} is not a multiple of {wanted} bytes, which {g.name} needs to share it",
                "copy=None copies; allocate it aligned to avoid that")
    if host_accessible(t.device.device_type):
        return (f"memory on {device_of(t.device)}: {g.name} cannot use it", "device= says where it shall be copied")
    return (f"memory on {device_of(t.device)}: {g.name} cannot use it",
            "device='cpu' copies it to the host" if addressable(t.device.device_type) else "map it")


def to(x, target=None, /, *, like=None, device=None, copy=None, readonly=None, stream=None):
    """`x` as another framework's object over the same memory.

    ``to(x, "torch")``, ``to(x, torch)``, ``to(x, torch.Tensor)``, ``to(x, like=y)``; a device or place as the target, as in
    ``to(x, "cuda:0")``, gives a `Tensor` there. A class with ``from_dlpack`` is a target too, and so is a module that has it.

    Args:
        x: anything that `as_tensor` takes.
        target: name, module, type or place.
        like: instead of a target: the framework and the device of this object.
        device: where the bytes must end. Without it a framework's name never moves memory to another device.
        copy: True always copies, False never (ExchangeError with the reason), None only where sharing is impossible and a copy
            within the same memory helps: read-only or reversed memory for torch, unaligned or strided memory for jax.
        readonly: True promises to only read, so that read-only memory may be shared with frameworks that cannot say so; False asks
            to write: read-only memory is copied; None keeps the flag.
        stream: on CUDA and ROCm, the stream on which the result will be used, instead of the target's current one.

    Returns `x` itself where it already is what is asked for.
    """
    cdef Target g
    cdef TypeRecord r
    if like is not None:
        if target is not None:
            raise TypeError("give a target or like=, not both")
        return to_like(x, like, device, copy, readonly, stream)
    if target is None:
        raise TypeError("no target: interop.to(x, 'torch'), or like=y")
    g = target_of(target)
    r = record_of(<PyObject*>x)
    if device is None and copy is None and readonly is None and stream is None and g.place is None:
        if (r.exact and r.framework is g.name) or type(x) is g.cls:
            return x
        return convert(x, r, g, None, None, None)
    return convert_as_asked(x, r, g, device, flag(copy, "copy"), flag(readonly, "readonly"), stream)


cdef inline object convert(x, TypeRecord r, Target g, copy, readonly, stream):
    """The common way: nothing is moved to another device."""
    cdef Source s
    cdef Tensor t = None
    if r.source == SRC_NDARRAY and PyArray_NDIM(<NpyArray*><PyObject*>x) <= INLINE_DIMS:
        read_array(<PyObject*>x, &s.dl, s.dims, &s.flags)
        s.owner = <PyObject*>x
        s.stream = STREAM_NONE
    elif r.source == SRC_TABLE:
        borrow(<PyObject*>x, r, &s.dl)
        check_tensor(&s.dl)
        if s.dl.strides == NULL and s.dl.ndim:
            t = read_table(<PyObject*>x, r)
        else:
            s.flags = overlap_flag(s.dl.ndim, s.dl.shape, s.dl.strides)
            s.owner = <PyObject*>x
            s.stream = s.freed = table_stream(r.table, s.dl.device)
    elif r.source == SRC_ATTRIBUTES and not r.n_guards:
        s.flags = 0
        s.stream = borrow_attributes(x, r, &s.dl, s.dims, &s.flags, INLINE_DIMS) if len(getattr(x, r.shape_name)) <= INLINE_DIMS else \
            STREAM_UNKNOWN
        if s.stream == STREAM_UNKNOWN:
            t = read_attributes(x, r)
        else:
            check_tensor(&s.dl)
            s.flags |= overlap_flag(s.dl.ndim, s.dl.shape, s.dl.strides)
            s.owner = <PyObject*>x
            s.freed = s.stream
    else:
        # a stream is the consumer's: the producer is asked for it only where __dlpack__ is called
        t = read_slow(x, r, None, False if copy is False else None, stream, g)
        if copy is True and arrived_fresh(t, r):
            copy = None
    if t is not None:
        use(&s, t)
    return finish(&s, t, x, r, g, copy, readonly, stream)


cdef bint arrived_fresh(Tensor t, TypeRecord r) noexcept:
    # A copy that the producer made for this call, which nobody else holds
    return t.flags & DL_IS_COPIED != 0 and r.source != SRC_TENSOR


cdef inline void use(Source* s, Tensor t) noexcept:
    s.dl = t.dl
    s.flags = t.flags
    s.owner = <PyObject*>t
    s.stream = t.stream
    s.freed = t.freed


cdef object finish(Source* s, Tensor t, x, TypeRecord r, Target g, copy, readonly, stream):
    """From a borrowed source to the target's object; `t` keeps what is borrowed where the object itself does not."""
    cdef int what
    cdef bint promised = readonly is True
    if s.flags & OPAQUE and (g.kind != TO_TENSOR or copy is True):
        refuse_layout(s.flags, f"a {g.name} object" if g.kind != TO_TENSOR else "a copy of itself")
    what = obstacle(g, &s.dl, s.flags, promised)
    if what == IS_ELSEWHERE and copy is not True and g.imports_pages and host_accessible(s.dl.device.device_type):
        # the same bytes, seen by a device: no framework's name moves memory
        may_read(&s.dl, s.flags, t.alloc if t is not None else NULL, None)
        t = imported_for(g, tensor_of_source(s, t))
        use(s, t)
        what = obstacle(g, &s.dl, s.flags, promised)
    if not addressable(s.dl.device.device_type) and t is not None and copy is not True and \
            (what == IS_ELSEWHERE or g.kind == TO_NUMPY) and (not g.devices or g.devices >> kDLCPU & 1) and g.kind != TO_TENSOR:
        # memory behind a handle that the host may look at whenever it likes, by its API's own rules
        may_read(&s.dl, s.flags, t.alloc, None)
        view = _up_host_view(t)
        if view is not None:
            t = <Tensor?>view
            use(s, t)
            what = obstacle(g, &s.dl, s.flags, promised)
    s.wanted = STREAM_UNKNOWN
    if has_streams(s.dl.device.device_type) and (g.kind == TO_TABLE or g.current_stream is not None):
        s.wanted = wanted_stream(g, s.dl.device, stream)     # from the stream that is pending straight to the one that it is used on
        may_read(&s.dl, s.flags, t.alloc if t is not None else NULL, s.wanted)
    else:
        number = None if stream is None else stream_number(stream, s.dl.device.device_type)
        if g.orders and not host_accessible(s.dl.device.device_type):
            number = -1              # behind what is pending it is the target that orders what it makes
        may_read(&s.dl, s.flags, t.alloc if t is not None else NULL, number)
    if stream is not None and host_accessible(s.dl.device.device_type):
        check_host_stream(stream, s.dl.device)
    if readonly is False and not g.writable:
        raise ExchangeError(f"readonly=False asks to write and {g.name} arrays are never written to", "leave readonly out")
    if what == CLEAR and readonly is False and s.flags & DL_READ_ONLY:
        what = IS_READONLY
    if what != CLEAR or copy is True:
        reason, remedy = explain(what, g, &s.dl) if what != CLEAR else ("copy=True was asked for", None)
        if what == IS_ELSEWHERE or copy is False:
            raise ExchangeError(reason, remedy)
        t = repacked(tensor_of_source(s, t), source_name(x, r), g.name, reason, remedy, max(g.alignment, <int64_t>HOST_ALIGNMENT))
        use(s, t)
    if promised:
        s.flags |= DL_READ_ONLY
    return build(s, t, g, promised, stream)


cdef Tensor imported_for(Target g, Tensor t):
    home = g.place if g.place is not None else g.adapter.home()
    if not isinstance(home, Device) or host_accessible((<Device>home).dl.device_type):
        raise TypeError(f"adapter {g.name}: home() gave {home!r}, not a Device of a GPU")
    return _up_import(t, home)


cdef int check_host_stream(stream, DLDevice d) except -1:
    number = stream_number(stream, kDLCPU)
    if number is not None and number != -1 and not has_streams(d.device_type):
        raise ExchangeError(f"stream {number}: memory on {device_of(d)} has no streams", "leave stream out")
    return 0


cdef object build(Source* s, Tensor t, Target g, bint promised, stream):
    if g.kind == TO_TABLE or g.kind == TO_ADAPTER:
        if s.dl.device.device_type == kDLCUDAHost or s.dl.device.device_type == kDLROCMHost:
            # pinned memory is host memory, which frameworks of the host know by that name alone (field report B54)
            t = labelled(tensor_of_source(s, t), _CPU.dl)
            use(s, t)
        elif s.dl.device.device_type == kDLCUDAManaged and g.devices and not g.devices >> <int>kDLCUDAManaged & 1:
            # memory of a GPU for whoever knows GPUs, and of the host for whoever knows only that
            t = labelled_managed(s, t, g)
            use(s, t)
    if t is not None and t.alloc != NULL and g.kind != TO_TENSOR:
        t = counted(t)
        s.dl = t.dl              # shape and strides of the old one may go with it
        s.owner = <PyObject*>t
    if g.kind == TO_NUMPY:
        if s.stream != STREAM_NONE:
            finish_for_host(&s.dl, s.stream)
        return array_of(&s.dl, s.flags, s.owner)
    if g.kind == TO_TABLE:
        return through_table(s, g, stream)
    t = tensor_of_source(s, t)
    if g.kind == TO_TENSOR:
        if stream is not None:
            settle_stream(t, stream)
        return t
    if s.wanted != STREAM_UNKNOWN and has_streams(t.dl.device.device_type):
        order_streams(&t.dl, t.stream, s.wanted)
        if outlasts(t.dl.device, t.freed, s.wanted):
            t = used_on(t, s.wanted, stream_holder(g, t.dl.device) if stream is None else stream)
        elif s.wanted >= 0 and s.wanted != t.stream:
            t = relabelled(t, t.flags & DL_READ_ONLY)
            t.stream = s.wanted
    elif stream is not None and has_streams(t.dl.device.device_type):
        t = relabelled(t, t.flags & DL_READ_ONLY)        # what is pending is then said of this view, not of the caller's
        settle_stream(t, stream)
    if g.kind == TO_ADAPTER:
        # Who never writes, or was promised for, need not be told by a flag that its own import may not know
        if t.flags & DL_READ_ONLY and (not g.writable or not g.holds_readonly):
            t = relabelled(t, 0)
        if g.native_place is None and stream is None:
            return g.make(t)
        return g.make(t, place=g.native_place, stream=stream)
    if promised:
        try:
            return g.call(t)
        except BufferError:      # it knows the flag and cannot hold it; the caller's promise stands in
            return g.call(relabelled(t, 0))
    return g.call(t)


cdef Tensor labelled(Tensor base, DLDevice device):
    """The same view under another of the names of its memory."""
    cdef Tensor t = like_view(base)
    take_dims(t, base.dl.ndim, base.dl.shape, base.dl.strides)
    t.dl.device = device
    return t


cdef Tensor labelled_managed(Source* s, Tensor t, Target g):
    cdef DLDevice d = s.dl.device
    t = tensor_of_source(s, t)
    if g.devices >> <int>kDLCUDA & 1:
        d.device_type = kDLCUDA
        return labelled(t, d)
    if t.stream != STREAM_NONE:
        finish_for_host(&t.dl, t.stream)
    return labelled(t, _CPU.dl)


cdef Tensor tensor_of_source(Source* s, Tensor t):
    if t is None:
        if Py_TYPE(s.owner) == &PyArray_Type:
            t = tensor_of_array(s.owner)
        else:
            t = over_object(<object>s.owner, &s.dl, s.flags)
            t.stream = s.stream
            t.freed = s.freed
    if s.flags & DL_READ_ONLY and not t.flags & DL_READ_ONLY:
        t = relabelled(t, DL_READ_ONLY)
    return t


cdef object through_table(Source* s, Target g, stream):
    """The target's own exchange table makes the object. Whether it ran the deleter when it failed, the block's guard tells."""
    cdef void* out = NULL
    cdef Block* b
    cdef int rc
    cdef object owner = <object>s.owner
    if has_streams(s.dl.device.device_type):
        order_streams(&s.dl, s.stream, s.wanted)
        if outlasts(s.dl.device, s.freed, s.wanted):
            owner = stream_use(owner, stream, s.dl.device.device_id, s.wanted,
                               bytes_of(s.dl.dtype, count(s.dl.ndim, s.dl.shape), s.flags))
    b = export_block(&s.dl, s.flags & (DL_READ_ONLY | DL_SUBBYTE_PADDED), <PyObject*>owner)
    b.guard = 1
    rc = g.table.managed_tensor_to_py_object_no_sync(&b.v, &out)
    if rc == 0 and out != NULL:
        if not interop_cas(&b.guard, 1, 0):
            free_block(b)        # it took what it needed and deleted at once
        value = <object>out
        Py_DECREF(value)
        return value
    free_block(b)
    refuse_import(g, &s.dl)


cdef refuse_import(Target g, DLTensor* t):
    if PyErr_Occurred() == NULL:
        raise ExchangeError(f"{g.name} refused {dtype_of(t.dtype)} on {device_of(t.device)} without a reason")
    try:
        reraise()
    except ExchangeError:
        raise
    except Exception as e:
        raise ExchangeError(f"{g.name} cannot hold {dtype_of(t.dtype)} on {device_of(t.device)}: {first_line(e)}",
                            "interop.as_tensor(x).view(dtype) shows the bytes as a dtype that it knows") from e
