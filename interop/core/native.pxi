# The side channel: the struct InteropNativeV1 beside DLPack, made and read. State and checks; what goes into it, native.py decides.
# Its mapping twin is read by filling the same struct, so that there is one validator.

cdef dict _NATIVE_FLAGS = {
    "readonly": INTEROP_NATIVE_READ_ONLY, "host_visible": INTEROP_NATIVE_HOST_VISIBLE, "coherent": INTEROP_NATIVE_COHERENT,
    "cached": INTEROP_NATIVE_CACHED, "dedicated": INTEROP_NATIVE_DEDICATED, "handle_is_pointer": INTEROP_NATIVE_HANDLE_IS_POINTER,
    "partial": INTEROP_NATIVE_PARTIAL,
}                                # the two HAS_ bits are not among them: a UUID that is not there is None
cdef tuple _NATIVE_READY = ("ready", "host", "timeline", "cl_event", "cuda_event", "stream")
cdef object _LARGEST_SIZE = 2**63 - 1
cdef uint32_t NO_QUEUE_FAMILY = 0xFFFFFFFF


# ---- making ----
cdef struct NativeBlock:
    InteropNativeV1 v            # first: a pointer to it is a pointer to the block
    PyObject* tensor             # strong: keeps the memory, and counts as an export where that is counted
    PyObject* point              # strong, or NULL: what `wait` waits for


cdef void delete_native(InteropNativeV1* v) noexcept nogil:
    cdef NativeBlock* b = <NativeBlock*>v
    cdef PyObject* tensor = b.tensor
    cdef PyObject* point = b.point
    free(b)
    interop_drop(point)
    interop_drop(tensor)         # last: it may run anything


cdef void native_gone(PyObject* capsule) noexcept:
    # Destructor of our capsules: frees what nobody has taken. interop_drop keeps an error that is pending.
    cdef const char* name = capsule_name(capsule)
    if name != NULL and name[0] != c"u":
        delete_native(<InteropNativeV1*>capsule_pointer(capsule, name))


cdef extern from "Python.h":
    bint Py_IsInitialized() noexcept nogil
    void PyErr_SetInterrupt() noexcept


cdef int native_wait(void* ctx, int64_t timeout_ns) noexcept nogil:
    if not Py_IsInitialized() or interop_finalizing():
        return INTEROP_NATIVE_WAIT_FAILED
    with gil:
        return wait_on_point(<object>(<NativeBlock*>ctx).point, timeout_ns)


cdef int wait_on_point(point, int64_t timeout_ns) noexcept:
    cdef PyObject* t = NULL
    cdef PyObject* v = NULL
    cdef PyObject* tb = NULL
    cdef int rc = INTEROP_NATIVE_WAIT_DONE
    PyErr_Fetch(&t, &v, &tb)     # the caller's, which is none of our business
    try:
        try:
            point.wait(None if timeout_ns < 0 else timeout_ns / 1e9)
        except TimeoutError as e:
            e.__traceback__ = None
            # work that failed with a TimeoutError of its own is over
            rc = INTEROP_NATIVE_WAIT_FAILED if point.done() else INTEROP_NATIVE_WAIT_TIMEOUT
    except KeyboardInterrupt:
        PyErr_SetInterrupt()     # raised again as soon as Python code runs: a C caller has nowhere to put it
        rc = INTEROP_NATIVE_WAIT_INTERRUPTED
    except BaseException as e:
        # Points keep their error: with our frames in it, and through them the callers' variables, that would be a cycle through C
        e.__traceback__ = None
        rc = INTEROP_NATIVE_WAIT_FAILED
    PyErr_Restore(t, v, tb)
    return rc


def native_lend(Tensor t not None, wait=False):
    """`t` as an export holds it: refused while somebody writes; pending writes are waited for only where `wait` says so."""
    return lend(t, None if wait else -1)


def is_addressable(Device device not None):
    """Whether memory there is an address and not a handle."""
    return addressable(device.dl.device_type)


def native_capsule(Tensor t not None, dict fields not None, point=None):
    """A capsule ``interop_native_v1`` with `fields` (of the mapping twin), holding `t`; `wait` waits for `point`."""
    cdef NativeBlock* b = <NativeBlock*>malloc(sizeof(NativeBlock))
    cdef PyObject* p
    if b == NULL:
        raise MemoryError()
    try:
        fill_native(&b.v, fields)
        check_native(&b.v, point is not None)
    except BaseException:
        free(b)
        raise
    b.v.version.minor = INTEROP_NATIVE_MINOR
    b.v.owner = b
    b.v.deleter = delete_native
    b.tensor = <PyObject*>t
    Py_INCREF(t)
    b.point = NULL
    if point is not None:
        b.point = <PyObject*>point
        Py_INCREF(point)
        b.v.wait = native_wait
        b.v.wait_ctx = b
    p = new_capsule(b, b"interop_native_v1", native_gone)
    if p == NULL:
        delete_native(&b.v)
        raise MemoryError()
    return steal(p)


# ---- reading ----
@cython.no_gc
@cython.final
@cython.internal
cdef class _NativeOwner:
    """What a consumer holds: the struct, and the duty to call its deleter once."""
    cdef InteropNativeV1* v

    def __dealloc__(self):
        cdef InteropNativeV1* v = self.v
        self.v = NULL
        if v != NULL and v.deleter != NULL:
            v.deleter(v)

    def __repr__(self):
        return f"<owner of an InteropNativeV1 at {<uintptr_t>self.v:#x}>"


@cython.final
@cython.internal
cdef class _NativeWait:
    """The producer's wait function, and what keeps it valid. Called without the GIL."""
    cdef _NativeOwner owner

    def __call__(self, int64_t timeout_ns):
        cdef InteropNativeV1* v = self.owner.v
        cdef int rc
        with nogil:
            rc = v.wait(v.wait_ctx, timeout_ns)
        return rc


def read_native(capsule):
    """What a capsule ``interop_native_v1`` says, as a dict with the fields of the mapping twin. The capsule is spent, also by a refusal.

    ``owner`` in it keeps the memory; the producer's deleter runs when that goes.
    """
    cdef _NativeOwner owner = _NativeOwner.__new__(_NativeOwner)
    cdef InteropNativeV1* v
    if not PyCapsule_CheckExact(capsule):
        raise TypeError(f"{type(capsule).__name__}: a capsule named 'interop_native_v1' is wanted")
    with cython.critical_section(capsule):      # of two threads with one capsule, one wins
        if PyCapsule_IsValid(capsule, b"interop_native_v1"):
            owner.v = <InteropNativeV1*>PyCapsule_GetPointer(capsule, b"interop_native_v1")
            PyCapsule_SetName(capsule, b"used_interop_native_v1")
    if owner.v == NULL:
        refuse_native_capsule(capsule)
    v = owner.v
    check_native_head(v)
    check_native(v, v.wait != NULL)
    wait = None
    if v.wait != NULL:
        wait = _NativeWait.__new__(_NativeWait)
        (<_NativeWait>wait).owner = owner
    return fields_of_native(v, wait, owner)


cdef refuse_native_capsule(capsule):
    cdef const char* name = PyCapsule_GetName(capsule)
    text = "NULL" if name == NULL else (<bytes>name).decode("ascii", "backslashreplace")
    if text == "used_interop_native_v1":
        raise ExchangeError("this side-channel capsule was already consumed: it can be used once",
                            "ask the producer for another: x.__interop_native__()")
    raise TypeError(f"a capsule named {text!r} is no side channel: 'interop_native_v1' is wanted")


def read_native_mapping(mapping, owner):
    """The mapping twin, checked as the struct is, every field present. `owner` keeps the memory where the mapping names nobody."""
    cdef InteropNativeV1 v
    fill_native(&v, mapping)
    wait = mapping.get("wait")
    if wait is not None and not callable(wait):
        raise ExchangeError(f"wait {wait!r}: a function of one argument, timeout_ns, or None")
    check_native_head(&v)
    check_native(&v, wait is not None)
    kept = mapping.get("owner")
    return fields_of_native(&v, wait, owner if kept is None else kept)


cdef dict fields_of_native(const InteropNativeV1* v, wait, owner):
    return {
        "version": (v.version.major, v.version.minor),
        "device_type": v.device_type,
        "device_id": v.device_id,
        "flags": frozenset([name for name, bit in _NATIVE_FLAGS.items() if v.flags & <uint64_t>bit]),
        "handle": v.handle,
        "nbytes": v.nbytes,
        "memory": v.memory,
        "memory_nbytes": v.memory_nbytes,
        "memory_offset": v.memory_offset,
        "memory_type": None if v.memory_type < 0 else v.memory_type,
        "queue_family": None if v.queue_family == NO_QUEUE_FAMILY else v.queue_family,
        "context": v.context,
        "physical_device": v.physical_device,
        "instance": v.instance,
        "queue": v.queue,
        "device_uuid": uuid_of(v.device_uuid, v.flags & INTEROP_NATIVE_HAS_DEVICE_UUID),
        "driver_uuid": uuid_of(v.driver_uuid, v.flags & INTEROP_NATIVE_HAS_DRIVER_UUID),
        # of a kind that a later minor version brought, the wait function is what we understand
        "ready_kind": _NATIVE_READY[v.ready_kind] if v.ready_kind <= INTEROP_NATIVE_BY_STREAM else "host",
        "ready_handle": v.ready_handle,
        "ready_value": v.ready_value,
        "wait": wait,
        "owner": owner,
    }


cdef object uuid_of(const uint8_t* bytes_, uint64_t there):
    # A driver that does not know says zeros: unknown, and not equal to another unknown.
    value = (<const char*>bytes_)[:16]
    return value if there and value != bytes(16) else None


# ---- the checks, each with its own message ----
cdef int check_native_head(const InteropNativeV1* v) except -1:
    if v.version.major != INTEROP_NATIVE_MAJOR:
        raise ExchangeError(f"side channel {v.version.major}.{v.version.minor}: interop reads major version {INTEROP_NATIVE_MAJOR}",
                            f"ask for max_version=({INTEROP_NATIVE_MAJOR}, {INTEROP_NATIVE_MINOR})")
    if v.struct_size < INTEROP_NATIVE_V1_SIZE:
        raise ExchangeError(f"struct_size {v.struct_size}: version 1 has at least {INTEROP_NATIVE_V1_SIZE} bytes",
                            "set it to sizeof(InteropNativeV1)")
    return 0


cdef int check_native(const InteropNativeV1* v, bint can_wait) except -1:
    """Everything but the pointers, which are trusted."""
    cdef DLDevice d
    d.device_type = v.device_type
    d.device_id = v.device_id
    check_device(d)
    check_native_pointer(v)
    check_native_sizes(v)
    if v.memory_type < -1:
        raise ExchangeError(f"memory_type {v.memory_type}: an index, or -1 where it is not said")
    check_native_ready(v, can_wait)
    return 0


cdef int check_native_pointer(const InteropNativeV1* v) except -1:
    cdef bint pointer = v.flags & INTEROP_NATIVE_HANDLE_IS_POINTER
    if addressable(v.device_type):
        if not pointer:
            raise ExchangeError(f"handle_is_pointer is not set for memory on {_device_names.NAMES[v.device_type]}, which has an address",
                                "set it")
        if v.handle + v.nbytes < v.handle:
            raise ExchangeError(f"{v.nbytes} bytes from handle {v.handle:#x} run past the address space")
    elif pointer and v.device_type in (kDLOpenCL, kDLVulkan, kDLMetal, kDLWebGPU):
        raise ExchangeError(f"handle_is_pointer is set for memory on {_device_names.NAMES[v.device_type]}, whose handles are opaque",
                            "memory that has an address leaves as the device that it is addressable on")
    return 0


cdef int check_native_sizes(const InteropNativeV1* v) except -1:
    for name, size in (("nbytes", v.nbytes), ("memory_nbytes", v.memory_nbytes), ("memory_offset", v.memory_offset)):
        if size > _LARGEST_SIZE:
            raise ExchangeError(f"{name} {size}: a wrapped negative number")
    if v.handle == 0 and v.nbytes:
        raise ExchangeError(f"handle 0 with {v.nbytes} bytes: NULL is no memory")
    if v.memory_nbytes and v.memory_offset + v.nbytes > v.memory_nbytes:
        raise ExchangeError(f"{v.nbytes} bytes at memory_offset {v.memory_offset} do not lie in a memory object of {v.memory_nbytes} bytes")
    return 0


cdef int check_native_ready(const InteropNativeV1* v, bint can_wait) except -1:
    if v.ready_kind == INTEROP_NATIVE_READY or v.ready_kind == INTEROP_NATIVE_BY_STREAM:
        return 0
    if not can_wait:
        raise ExchangeError(f"ready_kind {v.ready_kind} without a wait function: the host could never tell when it is ready",
                            "give wait, or finish the work and say READY")
    if v.ready_handle == 0 and INTEROP_NATIVE_TIMELINE <= v.ready_kind <= INTEROP_NATIVE_CUDA_EVENT:
        raise ExchangeError(f"ready_kind {_NATIVE_READY[v.ready_kind]} with ready_handle 0: NULL is no semaphore and no event")
    return 0


# ---- the mapping into the struct ----
cdef int fill_native(InteropNativeV1* v, mapping) except -1:
    cdef uint64_t flags
    memset(v, 0, sizeof(InteropNativeV1))
    major, minor = native_version(mapping.get("version", (INTEROP_NATIVE_MAJOR, INTEROP_NATIVE_MINOR)))
    v.version.major = major
    v.version.minor = minor
    v.struct_size = sizeof(InteropNativeV1)
    if major != INTEROP_NATIVE_MAJOR:
        return 0                 # the head alone means something
    v.device_type = native_number(mapping, "device_type", -2**31, 2**31, None)
    v.device_id = native_number(mapping, "device_id", -2**31, 2**31, None)
    v.handle = native_number(mapping, "handle", 0, 2**64, None)
    v.nbytes = native_number(mapping, "nbytes", 0, 2**64, None)
    v.memory = native_number(mapping, "memory", 0, 2**64, 0)
    v.memory_nbytes = native_number(mapping, "memory_nbytes", 0, 2**64, 0)
    v.memory_offset = native_number(mapping, "memory_offset", 0, 2**64, 0)
    v.memory_type = native_number(mapping, "memory_type", -2**31, 2**31, -1)
    v.queue_family = native_number(mapping, "queue_family", 0, 2**32, NO_QUEUE_FAMILY)
    v.context = native_number(mapping, "context", 0, 2**64, 0)
    v.physical_device = native_number(mapping, "physical_device", 0, 2**64, 0)
    v.instance = native_number(mapping, "instance", 0, 2**64, 0)
    v.queue = native_number(mapping, "queue", 0, 2**64, 0)
    v.ready_handle = native_number(mapping, "ready_handle", 0, 2**64, 0)
    v.ready_value = native_number(mapping, "ready_value", 0, 2**64, 0)
    kind = mapping.get("ready_kind", "ready")
    if isinstance(kind, str):
        if kind not in _NATIVE_READY:
            raise ExchangeError(f"ready_kind {kind!r}: must be one of {', '.join(_NATIVE_READY)}, or a number")
        v.ready_kind = _NATIVE_READY.index(kind)
    else:
        v.ready_kind = native_number(mapping, "ready_kind", 0, 2**32, 0)
    flags = native_flags(mapping.get("flags", ()), minor)
    flags &= ~<uint64_t>(INTEROP_NATIVE_HAS_DEVICE_UUID | INTEROP_NATIVE_HAS_DRIVER_UUID)
    flags |= native_uuid(mapping, "device_uuid", v.device_uuid, INTEROP_NATIVE_HAS_DEVICE_UUID)
    flags |= native_uuid(mapping, "driver_uuid", v.driver_uuid, INTEROP_NATIVE_HAS_DRIVER_UUID)
    v.flags = flags
    return 0


cdef object native_number(mapping, name, low, end, default):
    value = mapping.get(name)
    if value is None:
        if default is None:
            raise ExchangeError(f"the side channel's mapping lacks {name}", "device_type, device_id, handle and nbytes are always there")
        return default
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ExchangeError(f"{name} {value!r}: must be an int")
    number = _index(value)
    if not low <= number < end:
        raise ExchangeError(f"{name} {number}: must be from {low} to {end - 1}")
    return number


cdef tuple native_version(version):
    try:
        major, minor = version
        major, minor = _index(major), _index(minor)
    except (TypeError, ValueError):
        raise ExchangeError(f"version {version!r}: must be a pair of ints") from None
    if not (0 <= major < 2**32 and 0 <= minor < 2**32):
        raise ExchangeError(f"version {version!r}: two 32-bit numbers")
    return major, minor


cdef uint64_t native_flags(flags, minor) except? 1:
    cdef uint64_t out = 0
    if hasattr(flags, "__index__") and not isinstance(flags, bool):
        number = _index(flags)
        if not 0 <= number < 2**64:
            raise ExchangeError(f"flags {number}: a 64-bit number")
        return number
    if isinstance(flags, (str, bytes)) or not hasattr(flags, "__iter__"):
        raise ExchangeError(f"flags {flags!r}: a set of names, or a number")
    for name in flags:
        bit = _NATIVE_FLAGS.get(name) if isinstance(name, str) else None
        if bit is not None:
            out |= <uint64_t>bit
        elif minor <= INTEROP_NATIVE_MINOR:
            # in 1.0 it can only be a slip, and the bit that was meant may be the one that forbids writing
            raise ExchangeError(f"unknown flag {name!r}", f"known are {', '.join(_NATIVE_FLAGS)}")
    return out


cdef int native_uuid(mapping, name, uint8_t* to, int bit) except -1:
    value = mapping.get(name)
    if value is None:
        return 0
    if not isinstance(value, (bytes, bytearray)) or len(value) != 16:
        raise ExchangeError(f"{name} {value!r}: 16 bytes, or None")
    memcpy(to, <const char*>value, 16)
    return bit


# ---- joining DLPack and the side channel ----
_native_join = None              # native.join(tensor, x, method)


def set_native_join(join):
    """`native.join`, called for objects on handle devices that have the method."""
    global _native_join
    _native_join = join


cdef Tensor join_native(Tensor t, x):
    """`t` came from `x` by DLPack and is a handle: with what the side channel says, where `x` has one."""
    method = instance_attribute(x, "__interop_native__")
    return t if method is None else <Tensor?>_native_join(t, x, method)


def native_source(owner):
    """The Tensor behind a description that interop itself made, in this process; else None."""
    cdef InteropNativeV1* v
    if not isinstance(owner, _NativeOwner):
        return None
    v = (<_NativeOwner>owner).v
    return <object>(<NativeBlock*>v).tensor if v.deleter == delete_native else None


def tensor_within(Allocation a not None, Tensor t not None, readonly=False):
    """`t` again, as a view of `a`, which it is checked to lie in. Keeps both."""
    cdef DLTensor d = t.dl
    cdef int64_t lo = 0, hi = 0
    cdef Tensor out
    check_allocation(a)
    if d.device.device_type != a.dl.device_type or d.device.device_id != a.dl.device_id:
        raise ExchangeError(f"DLPack says {device_of(d.device)} and the side channel {device_of(a.dl)}")
    if not is_empty(d.ndim, d.shape):
        if <uint64_t><uintptr_t>d.data != a.value:
            raise ExchangeError(f"DLPack says handle {<uintptr_t>d.data:#x} and the side channel {a.value:#x}",
                                "both mean the memory object; the tensor's offset in it is byte_offset")
        # the offset apart: it may be anything below 2**63, and the sum must not wrap
        d.byte_offset = 0
        byte_range(&d, t.flags, &lo, &hi)
        if t.dl.byte_offset > <uint64_t>(a.nbytes + a.skip) or lo + <int64_t>t.dl.byte_offset < a.skip or \
                hi > a.nbytes + a.skip - <int64_t>t.dl.byte_offset:
            raise ExchangeError(f"shape {t.shape} of {t.dtype} at byte {t.dl.byte_offset} does not lie in the {a.nbytes} bytes "
                                "that the side channel says")
    out = over_object((a, t), &t.dl, t.flags | (DL_READ_ONLY if readonly else 0))
    out.stream = t.stream
    out.alloc = <PyObject*>a
    return out


# ---- for tests ----
def native_layout():
    """``{field: offset}`` of the struct as this core was compiled, with its size under ``"sizeof"``."""
    cdef InteropNativeV1 v
    cdef uintptr_t at = <uintptr_t>&v
    return {
        "version": <uintptr_t>&v.version - at, "struct_size": <uintptr_t>&v.struct_size - at, "owner": <uintptr_t>&v.owner - at,
        "deleter": <uintptr_t>&v.deleter - at, "device_type": <uintptr_t>&v.device_type - at,
        "device_id": <uintptr_t>&v.device_id - at, "flags": <uintptr_t>&v.flags - at, "handle": <uintptr_t>&v.handle - at,
        "nbytes": <uintptr_t>&v.nbytes - at, "memory": <uintptr_t>&v.memory - at, "memory_nbytes": <uintptr_t>&v.memory_nbytes - at,
        "memory_offset": <uintptr_t>&v.memory_offset - at, "memory_type": <uintptr_t>&v.memory_type - at,
        "queue_family": <uintptr_t>&v.queue_family - at, "context": <uintptr_t>&v.context - at,
        "physical_device": <uintptr_t>&v.physical_device - at, "instance": <uintptr_t>&v.instance - at, "queue": <uintptr_t>&v.queue - at,
        "device_uuid": <uintptr_t>v.device_uuid - at, "driver_uuid": <uintptr_t>v.driver_uuid - at,
        "ready_kind": <uintptr_t>&v.ready_kind - at, "ready_padding": <uintptr_t>&v.ready_padding - at,
        "ready_handle": <uintptr_t>&v.ready_handle - at, "ready_value": <uintptr_t>&v.ready_value - at, "wait": <uintptr_t>&v.wait - at,
        "wait_ctx": <uintptr_t>&v.wait_ctx - at, "reserved": <uintptr_t>v.reserved - at, "sizeof": sizeof(InteropNativeV1),
    }
