# Conversion with a place: whether the memory is there, and how it gets there where it is not.

cdef object convert_as_asked(x, TypeRecord r, Target g, device, copy, readonly, stream):
    cdef Device wanted
    cdef Tensor t
    cdef Source s
    cdef Target there
    if device is not None and g.adapter is not None and g.place is None and not isinstance(device, (Device, str, tuple)):
        there = target_of(device)
        if there.adapter is g.adapter:       # device= is an object of the framework's own, such as a queue: that is the target
            return convert_as_asked(x, r, there, None, copy, readonly, stream)
    wanted = g.place if device is None else place_device(device)
    if g.place is not None and device is not None and g.place != wanted:
        raise ValueError(f"target {g.name} is on {g.place} and device={str(wanted)!r}")
    if copy is not True and r.exact and r.framework is g.name and stream is None and \
            (g.kind != TO_TENSOR or g.native_place is None) and is_there(x, r, g, wanted, readonly) and on_queue(x, g):
        return x
    if wanted is None:
        return convert(x, r, g, copy, readonly, stream)
    if r.source in (SRC_TENSOR, SRC_NDARRAY, SRC_NDARRAY_KIN, SRC_CAPSULE):
        t = read_slow(x, r, None, None, stream)
    else:
        t = read_crossing(x, r, g, wanted, copy, stream)
    use(&s, t)
    if (same_memory(t.dl.device, wanted.dl) or is_managed_there(t.dl.device, wanted.dl, g)) \
            and (g.kind != TO_TENSOR or g.native_place is None or in_context(t, g.native_place)):
        # one device is not enough where the target is a Context: a handle is valid in its own alone
        return finish(&s, t, x, r, g, None if copy is True and arrived_fresh(t, r) else copy, readonly, stream)
    return cross(t, x, r, g, wanted, copy, readonly, stream)


cdef bint on_queue(x, Target g) except -1:
    # a queue object says more than its device: the object is there if it is used on that very queue
    if g.native_place is None or not g.adapter.device:
        return True
    ask = getattr(g.adapter, "queue_of", None)
    return ask is not None and ask(x) == g.native_place


cdef bint is_managed_there(DLDevice have, DLDevice want, Target g) noexcept:
    # managed memory of a GPU is at home there for a framework that knows GPUs
    return have.device_type == kDLCUDAManaged and want.device_type == kDLCUDA and have.device_id == want.device_id \
        and g.devices >> kDLCUDA & 1


cdef Tensor read_crossing(x, TypeRecord r, Target g, Device wanted, copy, stream):
    # Towards the host a producer crosses by itself; towards a device the target's framework may be able to.
    if wanted.dl.device_type == kDLCPU:
        return read_towards(x, r, wanted, copy, stream)
    return read_slow(x, r, None, False if copy is False else None, stream, g)


cdef object cross(Tensor t, x, TypeRecord r, Target g, Device wanted, copy, readonly, stream):
    """To another memory, which has been asked for: by a copy of interop's where it can make one, else by the target's framework."""
    cdef Source s
    cdef str name = source_name(x, r)
    cdef bint ours
    here = device_of(t.dl.device)
    place = g.native_place if g.native_place is not None and (g.kind == TO_TENSOR or g.adapter.device) else wanted
    if copy is False:
        t = imported_at(t, wanted, place, f"{name} is on {here} and {wanted} was asked for")
        use(&s, t)
        return finish(&s, t, x, r, g, copy, readonly, stream)
    may_read(&t.dl, t.flags, t.alloc, None)
    ours = host_accessible(wanted.dl.device_type) or _up_copies(wanted)
    on = copying_stream(stream, here, wanted)
    if ours and g.fresh is not None and g.devices >> wanted.dl.device_type & 1:
        # in the framework's own memory, on its own stream
        out = checked_fresh(g, t, wanted)
        note_copy(&t.dl, t.flags, name, g.name, f"from {here} to {wanted}", "keep it where it is")
        _up_copyto(out, t, on)
        return out
    if g.kind == TO_TENSOR or ours:
        t = _up_move(t, place, name, str(wanted), f"from {here} to {wanted}", "keep it where it is", on)
        t.flags |= DL_IS_COPIED
        if g.kind == TO_TENSOR:
            return t
        use(&s, t)
        return finish(&s, t, x, r, g, None, readonly, None if host_accessible(t.dl.device.device_type) else stream)
    if g.adapter is None or getattr(g.adapter, "to_device", None) is None:
        raise ExchangeError(f"interop has no way of its own to copy from {here} to {wanted} yet",
                            "a framework that uses the device can: interop.to(x, 'torch', device=...)")
    note_copy(&t.dl, t.flags, name, g.name, f"from {here} to {wanted}", "keep it where it is")
    use(&s, t)
    value = finish(&s, t, x, r, g, None, True, stream)       # only read on the way
    try:
        return g.adapter.to_device(value, wanted)
    except (RuntimeError, ValueError, AssertionError) as e:
        raise ExchangeError(f"{g.name} cannot copy from {here} to {wanted}: {first_line(e)}") from e


cdef object copying_stream(stream, Device here, Device there):
    """The number of the stream that a copy runs on; None: whoever copies chooses. With -1 the order is the caller's, not the stream."""
    cdef Device d = there if has_streams(there.dl.device_type) else here
    number = stream_number(stream, d.dl.device_type)
    if number is not None and number != -1 and not has_streams(d.dl.device_type):
        raise ExchangeError(f"stream {number}: neither {here} nor {there} has streams that interop knows", "leave stream out")
    return None if number == -1 else number


cdef object checked_fresh(Target g, Tensor t, Device wanted):
    cdef Tensor made
    out = g.fresh(t, wanted)
    try:
        made = read_as_is(<PyObject*>out, record_of(<PyObject*>out))
    except TypeError:
        raise TypeError(f"adapter {g.name}: fresh returned {out!r}, which shares no memory") from None
    if not same_memory(made.dl.device, wanted.dl) or tuple_of(made.dl.ndim, made.dl.shape) != tuple_of(t.dl.ndim, t.dl.shape) \
            or dtype_of(made.dl.dtype) != dtype_of(t.dl.dtype) or made.flags & DL_READ_ONLY:
        raise TypeError(f"adapter {g.name}: fresh returned {made!r} where {t!r} was to be copied to {wanted}")
    return out


cdef Tensor imported_at(Tensor t, Device wanted, place, str what):
    """copy=False and another device: its driver may see the very pages, where they are the host's."""
    if not host_accessible(t.dl.device.device_type) or t.dl.device.device_type == kDLCUDAManaged or not _up_copies(wanted):
        raise ExchangeError(f"{what}: that takes a copy, which copy=False forbids", "leave copy out")
    may_read(&t.dl, t.flags, t.alloc, None)
    try:
        return _up_import(t, place)
    except ExchangeError as e:
        if isinstance(e, MemoryError):
            raise
        raise ExchangeError(f"{what}, copy=False forbids a copy, and in place it cannot be had there: {e.reason}", e.remedy) from e


cdef bint is_there(x, TypeRecord r, Target g, Device wanted, readonly) except -1:
    """Whether `x`, of the target's own type, already satisfies device and readonly."""
    cdef Device here
    if readonly is False and g.holds_readonly:
        if not g.writable or read_as_is(<PyObject*>x, r).flags & DL_READ_ONLY:
            return False
    if wanted is None:
        return True
    here = promised_device(x)
    if here is None:
        here = device_of(read_as_is(<PyObject*>x, r).dl.device)
    return here == wanted


cdef object to_like(x, like, device, copy, readonly, stream):
    cdef TypeRecord r = record_of(<PyObject*>like)
    cdef Target g
    cdef Device there
    if r.framework is not None:
        g = target_of(r.framework)
    else:
        g = target_of(type(like))
        if type(x) is type(like) and device is None and copy is not True and readonly is None and stream is None:
            return x
    if device is None:
        there = promised_device(like)
        # host memory of any kind is at home on the CPU
        device = there if there is not None and not host_accessible(there.dl.device_type) else get_device("cpu")
    return convert_as_asked(x, record_of(<PyObject*>x), g, device, flag(copy, "copy"), flag(readonly, "readonly"), stream)
