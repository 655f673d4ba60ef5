# What a DLTensor's metadata must satisfy before anything is computed from it: small checks, each with its own message.
# Pointers are trusted, nothing else is (SPEC X-VALID).

cdef enum:
    MAX_NDIM = 64                # NumPy 2 and torch stop here too


cdef int check_version(DLPackVersion v) except -1:
    if v.major != DLPACK_MAJOR:
        raise ExchangeError(f"DLPack {v.major}.{v.minor} capsule: interop reads major version {DLPACK_MAJOR}",
                            f"ask the producer for max_version=({DLPACK_MAJOR}, {DLPACK_MINOR})")
    return 0


cdef int check_dtype(DLDataType d) except -1:
    if not known_dtype(d):
        raise ExchangeError(f"unsupported dtype (code {d.code}, bits {d.bits}, lanes {d.lanes}): DLPack 1.3 has no such code "
                            f"with these bits, and lanes start at 1", "view the source as an integer type of the same width")
    return 0


cdef int check_device(DLDevice d) except -1:
    if not known_device(d.device_type):
        raise ExchangeError(f"unknown device type {d.device_type}: DLPack 1.3 has none of that number, and it is not taken for the CPU")
    if d.device_id < 0:
        raise ExchangeError(f"device id {d.device_id} of {_device_names.NAMES[d.device_type]}: ids start at 0")
    return 0


cdef int check_shape(int32_t ndim, const int64_t* shape) except -1:
    cdef int i
    if ndim < 0 or ndim > MAX_NDIM:
        raise ExchangeError(f"ndim {ndim}: must be from 0 to {MAX_NDIM}")
    if ndim > 0 and shape == NULL:
        raise ExchangeError(f"shape is NULL with ndim {ndim}")
    for i in range(ndim):
        if shape[i] < 0:
            raise ExchangeError(f"extent {shape[i]} of dimension {i}: extents are not negative")
    return 0


cdef inline bint is_empty(int32_t ndim, const int64_t* shape) noexcept nogil:
    cdef int i
    for i in range(ndim):
        if shape[i] == 0:
            return True
    return False


cdef int check_extent(DLDataType d, int32_t ndim, const int64_t* shape, const int64_t* strides) except -1:
    # The number of bits, and the distance to the farthest element in bits, fit int64: what everything later is computed with.
    cdef int64_t n = 1, width = <int64_t>d.bits * d.lanes, step = 0, low = 0, high = 0
    cdef int i
    cdef bint bad = False
    for i in range(ndim):
        if shape[i] > 1:
            bad |= mul_overflow(n, shape[i], &n)
    bad |= mul_overflow(n, width, &n)
    if strides != NULL and not is_empty(ndim, shape):
        for i in range(ndim):
            if shape[i] > 1:
                bad |= mul_overflow(shape[i] - 1, strides[i], &step)
                if step < 0:
                    bad |= add_overflow(low, step, &low)
                else:
                    bad |= add_overflow(high, step, &high)
        bad |= mul_overflow(low, width, &low) | mul_overflow(high, width, &high)
    if bad:
        raise ExchangeError(f"shape {tuple([shape[i] for i in range(ndim)])} with {width}-bit elements: "
                            "its size does not fit in 64 bits")
    return 0


cdef int check_data(DLTensor* t) except -1:
    # After check_extent: the distances below fit in 60 bits.
    cdef uint64_t first, limit
    cdef int64_t low = 0, high = 0, width = <int64_t>t.dtype.bits * t.dtype.lanes
    cdef int i
    if t.byte_offset >> 63:
        raise ExchangeError(f"byte_offset {t.byte_offset}: a wrapped negative number")
    if t.data == NULL and not is_empty(t.ndim, t.shape):
        raise ExchangeError("data is NULL and the tensor is not empty")
    if addressable(t.device.device_type) and <uint64_t><uintptr_t>t.data + t.byte_offset < t.byte_offset:
        raise ExchangeError(f"data {<uint64_t><uintptr_t>t.data:#x} + byte_offset {t.byte_offset} runs past the address space")
    if is_empty(t.ndim, t.shape):
        return 0
    # The first and the last byte exist: as addresses, or within the 63 bits of an offset into a handle
    for i in range(t.ndim):
        if t.strides == NULL or t.strides[i] >= 0:
            continue
        low += (t.shape[i] - 1) * t.strides[i]
    if t.strides == NULL:
        high = count(t.ndim, t.shape) - 1
    else:
        for i in range(t.ndim):
            if t.strides[i] > 0:
                high += (t.shape[i] - 1) * t.strides[i]
    low = (low * width) >> 3
    high = (high * width + width - 1) >> 3
    first = t.byte_offset if not addressable(t.device.device_type) else <uint64_t><uintptr_t>t.data + t.byte_offset
    limit = (<uint64_t>1 << 63) - 1 if not addressable(t.device.device_type) else ~<uint64_t>0
    if host_accessible(t.device.device_type):
        limit = (<uint64_t>1 << 57) - 1      # no process has memory there
        if first > limit:
            raise ExchangeError(f"data {<uint64_t><uintptr_t>t.data:#x} + byte_offset {t.byte_offset}: no process has memory there")
    if <uint64_t>(-low) > first or <uint64_t>high > limit - first:
        raise ExchangeError(f"byte_offset {t.byte_offset} from {<uint64_t><uintptr_t>t.data:#x}, and strides that reach from byte {low} to "
                            f"{high} of there: outside the address space, or of what an offset can say")
    return 0


cdef inline bint plainly_fine(DLTensor* t) noexcept nogil:
    # Most tensors: few and small numbers, for which one pass shows that nothing can be wrong. Says no when in doubt.
    cdef int i
    cdef uint64_t seen = 0
    cdef int64_t step
    if t.ndim <= 0 or t.ndim > 4 or t.shape == NULL or t.data == NULL or t.byte_offset >> 40:
        return False
    for i in range(t.ndim):
        seen |= <uint64_t>t.shape[i]                     # a negative number has its top bit set
        if t.strides != NULL:
            step = t.strides[i]
            seen |= <uint64_t>(step if step >= 0 else -step)
    # (2**13)**4 elements of at most 2**12 bits, 255 * 16, or 4 steps of 2**26 elements: far from 2**63
    return seen < 1 << 13 and t.dtype.lanes <= 16 and 0 < <uint64_t><uintptr_t>t.data >> 32 < 1 << 16


cdef int check_tensor(DLTensor* t) except -1:
    if not plainly_fine(t):
        check_shape(t.ndim, t.shape)
        check_dtype(t.dtype)
        check_device(t.device)
        check_extent(t.dtype, t.ndim, t.shape, t.strides)
        check_data(t)
        return 0
    if not known_dtype(t.dtype):
        check_dtype(t.dtype)
    if not known_device(t.device.device_type) or t.device.device_id < 0:
        check_device(t.device)
    return 0


cdef inline void compact_strides(int32_t ndim, const int64_t* shape, int64_t* strides) noexcept nogil:
    # Row-major. Empty extents count as 1, so that strides of an empty tensor stay meaningful.
    cdef int64_t step = 1
    cdef int i
    for i in range(ndim - 1, -1, -1):
        strides[i] = step
        if shape[i] > 1:
            step *= shape[i]


cdef inline int64_t component_bytes(DLDataType d) noexcept nogil:
    # What a pointer must be a multiple of: one component (half a complex number, one lane), 1 for sub-byte types.
    if d.code == kDLComplex:
        return d.bits // 16
    return d.bits // 8 if d.bits >= 8 else 1


cdef inline bint is_compact(int32_t ndim, const int64_t* shape, const int64_t* strides, bint fortran) noexcept nogil:
    cdef int64_t step = 1
    cdef int i, k
    if is_empty(ndim, shape):
        return True
    for k in range(ndim):
        i = k if fortran else ndim - 1 - k
        if shape[i] != 1 and strides[i] != step:
            return False
        step *= shape[i]
    return True


cdef int64_t count(int32_t ndim, const int64_t* shape) noexcept nogil:
    cdef int64_t n = 1
    cdef int i
    for i in range(ndim):
        n *= shape[i]
    return n


cdef int64_t bytes_of(DLDataType d, int64_t n, uint64_t flags) noexcept nogil:
    # Packed sub-byte types share bytes; the padded flag gives every lane its own (DLPack 1.1, IS_SUBBYTE_TYPE_PADDED).
    if flags & DL_SUBBYTE_PADDED and d.bits < 8:
        return n * d.lanes
    return <int64_t>((<uint64_t>n * d.bits * d.lanes + 7) // 8)


cdef inline bint is_packed(DLDataType d, uint64_t flags) noexcept nogil:
    # Elements that are not whole bytes: no byte address, no byte stride.
    return (d.bits * d.lanes) & 7 and not flags & DL_SUBBYTE_PADDED


cdef inline int64_t element_bytes(DLDataType d, uint64_t flags) noexcept nogil:
    # Only for types that are not packed.
    if flags & DL_SUBBYTE_PADDED and d.bits < 8:
        return d.lanes
    return d.bits * d.lanes // 8
