# Views of a Tensor: new metadata over the same memory. Nothing here reads or writes the memory.

cdef int shift_view(Tensor t, int64_t elements) except -1:
    # Move the start by so many elements; packed types only by whole bytes.
    cdef int64_t bits
    if is_packed(t.dl.dtype, t.flags):
        bits = elements * t.dl.dtype.bits * t.dl.dtype.lanes
        if bits & 7:
            raise ExchangeError(f"element {elements} of a packed {dtype_of(t.dl.dtype)} does not start on a byte",
                                "index where whole bytes begin, or copy to a padded type first")
        bits >>= 3
    else:
        bits = elements * element_bytes(t.dl.dtype, t.flags)
    if addressable(t.dl.device.device_type):
        t.dl.data = <char*>t.dl.data + bits
    elif <int64_t>t.dl.byte_offset + bits < 0:
        raise ExchangeError(f"byte_offset {<int64_t>t.dl.byte_offset + bits}: a view before the start of the handle")
    else:
        t.dl.byte_offset += bits
    return 0


cdef Tensor index_view(Tensor base, key):
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef int64_t start, step, n, offset = 0, extent
    cdef int axis = 0, out = 0, given = 0, i
    cdef bint expanded = False
    cdef Tensor t
    keys = tuple(key) if isinstance(key, tuple) else (key,)      # once: a subclass may say something else the second time
    for k in keys:
        if k is not None and k is not Ellipsis:
            given += 1
    if given > base.dl.ndim:
        raise IndexError(f"{given} indices for {base.dl.ndim} dimensions")
    for k in keys:
        if k is Ellipsis:
            if expanded:
                raise IndexError("an index can have one '...' only")
            expanded = True
            for i in range(base.dl.ndim - given):
                if out >= MAX_NDIM:
                    raise IndexError(f"more than {MAX_NDIM} dimensions")
                shape[out] = base.dl.shape[axis]
                strides[out] = base.dl.strides[axis]
                axis += 1
                out += 1
            continue
        if k is None:
            if out >= MAX_NDIM:
                raise IndexError(f"more than {MAX_NDIM} dimensions")
            shape[out] = 1
            strides[out] = 1
            out += 1
            continue
        extent = base.dl.shape[axis]
        if isinstance(k, slice):
            first, last, by = k.indices(extent)
            n = len(range(first, last, by))
            start = first if n else 0
            step = by if n > 1 else 1        # a step that is never taken may be of any size
            if out >= MAX_NDIM:
                raise IndexError(f"more than {MAX_NDIM} dimensions")
            shape[out] = n
            strides[out] = base.dl.strides[axis] * step
            if n:
                offset += start * base.dl.strides[axis]
            out += 1
        else:
            if isinstance(k, bool) or not hasattr(type(k), "__index__") or getattr(k, "shape", ()) != () \
                    or str(getattr(k, "dtype", "")).endswith("bool"):
                raise TypeError(f"index {k!r}: a view is made by integers, slices, '...' and None; "
                                "interop.to(t, 'numpy') has the rest")
            i_ = _index(k)
            if not -extent <= i_ < extent:
                raise IndexError(f"index {i_} is out of bounds for dimension {axis} of extent {extent}")
            offset += (i_ if i_ >= 0 else i_ + extent) * base.dl.strides[axis]
        axis += 1
    while axis < base.dl.ndim:
        if out >= MAX_NDIM:
            raise IndexError(f"more than {MAX_NDIM} dimensions")
        shape[out] = base.dl.shape[axis]
        strides[out] = base.dl.strides[axis]
        axis += 1
        out += 1
    t = like_view(base)
    take_dims(t, out, shape, strides)
    if not is_empty(out, shape):
        shift_view(t, offset)
    return t


cdef Tensor permute_view(Tensor base, axes):
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef int i, n = base.dl.ndim
    cdef Tensor t
    order = tuple([_index(a) for a in axes])
    if sorted([a + n if a < 0 else a for a in order]) != list(range(n)):
        raise ValueError(f"axes {order}: must be a permutation of the {n} dimensions")
    for i in range(n):
        a = order[i]
        shape[i] = base.dl.shape[a + n if a < 0 else a]
        strides[i] = base.dl.strides[a + n if a < 0 else a]
    t = like_view(base)
    take_dims(t, n, shape, strides)
    return t


cdef Tensor reshape_view(Tensor base, wanted):
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef int64_t old_shape[MAX_NDIM]
    cdef int64_t old_strides[MAX_NDIM]
    cdef int64_t total = count(base.dl.ndim, base.dl.shape), known = 1, a, b
    cdef int n, m = 0, i, j, k, oi, ni, oj, nj, hole = -1
    cdef Tensor t
    dims = tuple([_index(d) for d in wanted])
    n = len(dims)
    if n > MAX_NDIM:
        raise ValueError(f"{n} dimensions: at most {MAX_NDIM}")
    for i in range(n):
        if dims[i] == -1:
            if hole >= 0:
                raise ValueError(f"shape {dims}: one extent may be -1")
            hole = i
        elif not 0 <= dims[i] < 2**63:
            raise ValueError(f"shape {dims}: extents are not negative")
        else:
            shape[i] = dims[i]
            if mul_overflow(known, shape[i], &known):
                raise ValueError(f"shape {dims} does not have {total} elements")
    if hole >= 0:
        if known == 0 or total % known:
            raise ValueError(f"shape {dims}: {total} elements do not divide")
        shape[hole] = total // known
    elif known != total:
        raise ValueError(f"shape {dims} does not have {total} elements")
    if total == 0 or is_compact(base.dl.ndim, base.dl.shape, base.dl.strides, False):
        compact_strides(n, shape, strides)
    else:
        # Runs of old dimensions that lie evenly are regrouped into runs of new ones with the same product; extents of 1 say nothing.
        for i in range(base.dl.ndim):
            if base.dl.shape[i] != 1:
                old_shape[m] = base.dl.shape[i]
                old_strides[m] = base.dl.strides[i]
                m += 1
        oi = ni = 0
        while oi < m and ni < n:
            oj = oi + 1
            nj = ni + 1
            a = old_shape[oi]
            b = shape[ni]
            while a != b:
                if a < b:
                    a *= old_shape[oj]
                    oj += 1
                else:
                    b *= shape[nj]
                    nj += 1
            for k in range(oi, oj - 1):
                if old_strides[k] != old_strides[k + 1] * old_shape[k + 1]:
                    raise ExchangeError(f"shape {base.shape} with strides {base.strides} has no view of shape {dims}",
                                        "copy first: interop.as_tensor(t, copy=True).reshape(...)")
            strides[nj - 1] = old_strides[oj - 1]
            for k in range(nj - 1, ni, -1):
                strides[k - 1] = strides[k] * shape[k]
            oi = oj
            ni = nj
        for k in range(ni, n):   # trailing extents of 1
            strides[k] = 1
    t = like_view(base)
    take_dims(t, n, shape, strides)
    return t


cdef Tensor dtype_view(Tensor base, DType dtype):
    cdef int64_t old = element_bits(base.dl.dtype, base.flags), new = element_bits(dtype.dl, 0), bits
    cdef bint empty
    cdef uint64_t flags = base.flags & ~<uint64_t>DL_SUBBYTE_PADDED
    cdef int64_t shape[MAX_NDIM]
    cdef int64_t strides[MAX_NDIM]
    cdef int64_t unit
    cdef int n = base.dl.ndim, i
    cdef Tensor t
    for i in range(n):
        shape[i] = base.dl.shape[i]
        strides[i] = base.dl.strides[i]
    if old != new:
        if n == 0:
            raise ValueError(f"a 0-dimensional {dtype_of(base.dl.dtype)} has no view as {dtype}: the sizes differ")
        empty = is_empty(n, shape)
        if not empty and shape[n - 1] > 1 and strides[n - 1] != 1:
            raise ExchangeError(f"stride {strides[n - 1]} of the last dimension: a view as {dtype}, of another size, needs 1")
        if mul_overflow(shape[n - 1], old, &bits):
            raise ValueError("the view would have too many elements")
        if bits % new:
            raise ValueError(f"the last dimension, {shape[n - 1]} of {dtype_of(base.dl.dtype)}, does not divide into {dtype}")
        shape[n - 1] = bits // new
        for i in range(n - 1):
            if mul_overflow(strides[i], old, &bits):
                raise ValueError("the view would reach too far")
            if bits % new and shape[i] > 1 and not empty:
                raise ExchangeError(f"stride {strides[i]} of dimension {i} does not fall on whole elements of {dtype}: no such view")
            strides[i] = bits // new
        strides[n - 1] = 1
        if is_empty(n, shape):
            compact_strides(n, shape, strides)
    unit = component_bytes(dtype.dl)
    if addressable(base.dl.device.device_type) and (<uintptr_t>base.dl.data + base.dl.byte_offset) % unit and not is_empty(n, shape):
        raise ExchangeError(f"address {base.ptr:#x} is not a multiple of {unit} bytes, which {dtype} needs",
                            "copy first: interop.as_tensor(t, copy=True)")
    t = like_view(base)
    t.dl.dtype = dtype.dl
    t.flags = flags
    check_extent(dtype.dl, n, shape, strides)
    take_dims(t, n, shape, strides)
    return t


cdef int64_t element_bits(DLDataType d, uint64_t flags) noexcept nogil:
    if flags & DL_SUBBYTE_PADDED and d.bits < 8:
        return 8 * d.lanes
    return d.bits * d.lanes
