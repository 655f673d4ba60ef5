# What interop knows of a Python type: how to read its objects, what stands in the way, which framework it belongs to. And of a
# target: what it can hold. Found once, remembered by type pointer and version tag, without keeping the type alive.

cdef enum:                       # TypeRecord.source: how objects of the type are read
    SRC_OBJECT = 0               # nothing on the type: look at the instance
    SRC_TENSOR = 1
    SRC_NDARRAY = 2
    SRC_NDARRAY_KIN = 3
    SRC_TABLE = 4                # the C exchange table, borrowing
    SRC_TABLE_OWNED = 5          # the C exchange table, from_py
    SRC_BUFFER = 6               # the buffer protocol, then __dlpack__
    SRC_DLPACK = 7
    SRC_CAPSULE = 8
    SRC_ADAPTER = 9              # adapter.to_tensor(x)
    SRC_ATTRIBUTES = 10          # pointer, shape, strides and dtype as attributes

cdef enum:                       # keywords of __dlpack__ that a type turned out not to know
    KW_MAX_VERSION = 1
    KW_STREAM = 2
    KW_DEVICE = 4
    KW_COPY = 8

cdef enum:                       # Target.kind
    TO_TENSOR = 0
    TO_NUMPY = 1
    TO_TABLE = 2
    TO_ADAPTER = 3
    TO_CALL = 4

cdef enum:
    MAX_GUARDS = 8

cdef struct GuardSlot:
    interop_unary call           # NULL: by attribute
    void* closure
    bint complex_only


ctypedef intptr_t (*stream_function)() noexcept


cdef stream_function function_of(adapter) except? NULL:
    """The C function in `adapter.stream_capsule()`: the current stream of the current device, without a frame of Python."""
    give = getattr(adapter, "stream_capsule", None)
    capsule = None if give is None else give()
    if capsule is None:
        return NULL
    if not PyCapsule_IsValid(capsule, b"intptr_t (void)"):
        raise TypeError(f"adapter {adapter.name}: stream_capsule gave {capsule!r}, not a capsule named 'intptr_t (void)'")
    return <stream_function>PyCapsule_GetPointer(capsule, b"intptr_t (void)")


cdef class Target:
    """Where a conversion ends: a framework (or one class), and optionally a device."""
    cdef readonly str name
    cdef int kind
    cdef DLPackExchangeAPI* table
    cdef object adapter          # contract.Adapter, for TO_TABLE too
    cdef object call
    cdef object cls              # the class whose from_dlpack `call` is
    cdef object make             # adapter.from_tensor, bound once
    cdef object current_stream   # adapter.current_stream, bound once, or None
    cdef stream_function stream_now      # adapter.stream_capsule, or NULL
    cdef object fresh            # adapter.fresh, bound once, or None
    cdef bint orders             # adapter.orders: its from_tensor takes memory whose work is pending
    cdef bint imports_pages      # it takes CUDA memory and none of the host's: pages of the host are shown to the GPU
    cdef Device place            # a place target: crossing to it has been asked for
    cdef object native_place     # the framework's own object for it
    # what it can hold (contract.Limits)
    cdef bint holds_readonly
    cdef bint writable           # whether what it makes may be written through
    cdef bint negative
    cdef bint strided
    cdef int64_t alignment
    cdef uint32_t devices        # bit of each DLDeviceType that it takes; 0: whatever it says when asked
    cdef str own_device          # the name of the only devices whose memory it takes, or None

    def __init__(self, str name, int kind, adapter=None, call=None, Device place=None, limits=None, native_place=None):
        self.name = name
        self.kind = kind
        self.adapter = adapter
        self.call = call
        self.cls = getattr(call, "__self__", None) if kind == TO_CALL and isinstance(getattr(call, "__self__", None), type) else None
        self.make = None if adapter is None else adapter.from_tensor
        self.current_stream = getattr(adapter, "current_stream", None)
        self.stream_now = function_of(adapter)
        self.fresh = getattr(adapter, "fresh", None)
        self.orders = getattr(adapter, "orders", False)
        self.place = place
        self.native_place = native_place
        self.holds_readonly = self.writable = self.negative = self.strided = True
        self.alignment = 1
        if kind == TO_CALL:
            self.holds_readonly = False      # whether its import keeps the flag, nobody knows: read-only memory takes a promise or a copy
        if limits is not None:
            self.holds_readonly = limits.readonly or kind == TO_TENSOR      # a Tensor holds the flag, whatever objects of the framework do
            self.writable = limits.writable
            self.negative = limits.negative_strides
            self.strided = limits.strided
            self.alignment = limits.alignment
            for d in limits.devices or ():
                self.devices |= <uint32_t>1 << <int>d
        self.imports_pages = self.devices >> kDLCUDA & 1 and not self.devices >> kDLCPU & 1 and getattr(adapter, "home", None) is not None
        if kind == TO_ADAPTER and adapter.device and self.devices >> kDLExtDev & 1:
            self.own_device = adapter.device


cdef class TypeRecord:
    cdef int source
    cdef DLPackExchangeAPI* table
    cdef object adapter
    cdef str framework           # name of the adapter that the type belongs to, or None
    cdef bint exact              # whether an object of it is returned as it is when its framework is the target
    cdef int refuses
    cdef bint immutable          # nobody writes to objects of this type
    cdef bint refused_scalar     # a NumPy scalar of a dtype that DLPack lacks
    cdef int n_guards
    cdef GuardSlot guards[MAX_GUARDS]
    cdef tuple guard_objects
    cdef bint fallback_guards    # all of them are for the fallback of the buffer protocol
    cdef object to_capsule       # adapter.to_capsule, bound once, or None
    cdef Device last_device      # where the last object was that the buffer protocol refused: the next is looked for there first
    cdef tuple pointer           # SRC_ATTRIBUTES: the path to the address, and the names of the rest
    cdef str shape_name
    cdef str strides_name
    cdef str dtype_name
    cdef object current_stream   # adapter.current_stream, bound once, or None
    cdef stream_function stream_now      # adapter.stream_capsule, or NULL


# ---- the cache ----
cdef enum:
    CACHE_SETS = 256
    CACHE_WAYS = 4

cdef struct CacheSlot:
    PyTypeObject* type
    unsigned int tag
    PyObject* record             # strong

cdef CacheSlot _cache[CACHE_SETS][CACHE_WAYS]
cdef unsigned int _cache_clock = 0


cdef inline TypeRecord record_of(PyObject* x):
    cdef PyTypeObject* tp = Py_TYPE(x)
    cdef CacheSlot* slots = _cache[(<uintptr_t>tp >> 5) & (CACHE_SETS - 1)]
    cdef unsigned int tag = interop_type_tag(tp)
    cdef int i
    if slots[0].type == tp and slots[0].tag == tag and tag:      # nearly always
        return <TypeRecord>slots[0].record
    if tag:
        for i in range(1, CACHE_WAYS):
            if slots[i].type == tp and slots[i].tag == tag:
                return <TypeRecord>slots[i].record
    return learn(tp, slots)


cdef TypeRecord learn(PyTypeObject* tp, CacheSlot* slots):
    cdef TypeRecord r = describe_type(<object>tp)
    cdef unsigned int tag = interop_type_tag(tp)     # looking attributes up has given it one
    cdef int i, way
    cdef PyObject* old
    global _cache_clock
    if not tag:
        return r
    way = _cache_clock & (CACHE_WAYS - 1)
    for i in range(CACHE_WAYS):
        if slots[i].type == tp or slots[i].type == NULL:
            way = i
            break
    else:
        _cache_clock += 1
    old = slots[way].record
    Py_INCREF(r)
    slots[way].type = tp
    slots[way].tag = tag
    slots[way].record = <PyObject*>r
    Py_XDECREF(old)
    return r


def forget_types():
    """Drop all that was learnt of types; `registry` calls it when an adapter joins."""
    cdef int i, k
    cdef PyObject* k_
    cdef PyObject* t_
    for i in range(CACHE_SETS):
        for k in range(CACHE_WAYS):
            _cache[i][k].type = NULL
    _targets.clear()
    for i in range(64):
        k_, t_ = _recent[i].key, _recent[i].target
        _recent[i].key = _recent[i].target = NULL
        Py_XDECREF(k_)
        Py_XDECREF(t_)


# ---- adapters, as the registry gives them ----
cdef dict _by_type_name = {}     # "module.qualname" -> adapter
cdef dict _by_name = {}          # adapter.name -> adapter
cdef dict _targets = {}          # what the user names a target by -> Target
_resolve_target = None           # registry.resolve


def set_registry(dict by_type_name, dict by_name, resolve, find_plugins):
    """`registry` owns these tables; the core reads them."""
    global _by_type_name, _by_name, _resolve_target, _find_plugins
    _by_type_name, _by_name, _resolve_target, _find_plugins = by_type_name, by_name, resolve, find_plugins


cdef adapter_for(cls):
    found = registered_for(cls)
    if found is None and _find_plugins is not None and cls.__module__.partition(".")[0] not in _NO_PLUGINS and _find_plugins():
        found = registered_for(cls)
    return found


cdef registered_for(cls):
    for base in cls.__mro__:
        found = _by_type_name.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None


# Types of these are not looked for among the plug-ins, which costs an import of each
cdef frozenset _NO_PLUGINS = frozenset(("builtins", "numpy", "array", "mmap", "ctypes", "_ctypes", "interop"))
_find_plugins = None             # registry.load_plugins: True where it loaded any


cdef TypeRecord describe_type(cls):
    cdef TypeRecord r = TypeRecord()
    cdef bint own = False
    if issubclass(cls, Tensor):
        r.source = SRC_TENSOR
        r.framework = "interop"
        r.exact = True
        return r
    if cls is np.ndarray:
        r.source = SRC_NDARRAY
        r.framework = "numpy"
        r.exact = True
        return r
    if cls.__name__ == "PyCapsule" and cls.__module__ == "builtins":
        r.source = SRC_CAPSULE
        return r
    adapter = adapter_for(cls)
    dlpack = find_on_type(cls, "__dlpack__")
    if issubclass(cls, np.generic):
        # a datetime or a string would pass as bytes
        try:
            _dtypes.from_numpy(np.dtype(cls))
        except (TypeError, ValueError) as e:
            r.refused_scalar = True
    if adapter is not None:
        r.adapter = adapter
        r.framework = adapter.name
        r.exact = own = f"{cls.__module__}.{cls.__qualname__}" in adapter.exact
        r.immutable = not adapter.accepts.writable
        r.guard_objects = tuple(adapter.guards)
        bind_guards(r, cls)
        r.to_capsule = getattr(adapter, "to_capsule", None)
        r.current_stream = getattr(adapter, "current_stream", None)
        r.stream_now = function_of(adapter)
        if adapter.reads == "adapter":
            r.source = SRC_ADAPTER
            return r
        if adapter.reads == "attributes" and own:
            a = adapter.attributes
            r.source = SRC_ATTRIBUTES
            r.pointer = tuple([_intern(n) for n in a.pointer.split(".")])
            r.shape_name, r.strides_name, r.dtype_name = _intern(a.shape), _intern(a.strides), _intern(a.dtype)
            return r
        if adapter.reads == "buffer" and PyType_HasBuffer(cls):
            r.source = SRC_BUFFER
            return r
        if adapter.reads == "table" and own:
            r.table = table_on(cls)
    else:
        if issubclass(cls, np.ndarray) and dlpack is np.ndarray.__dict__["__dlpack__"]:
            r.source = SRC_NDARRAY_KIN
            r.framework = "numpy"
            return r
        if overrides_last(cls):
            r.table = table_on(cls)
    if r.table != NULL:
        r.source = SRC_TABLE if r.table.dltensor_from_py_object_no_sync != NULL else SRC_TABLE_OWNED
    elif dlpack is not None:
        r.source = SRC_DLPACK
    elif PyType_HasBuffer(cls):
        r.source = SRC_BUFFER
    return r


from sys import intern as _intern


cdef extern from *:
    """
    static int interop_has_buffer(PyObject *type) {
        PyBufferProcs *b = ((PyTypeObject *)type)->tp_as_buffer;
        return b && b->bf_getbuffer;
    }
    """
    bint PyType_HasBuffer "interop_has_buffer"(object)


cdef find_on_type(cls, name):
    cdef PyObject* found = _PyType_Lookup(<PyTypeObject*><PyObject*>cls, name)
    return None if found == NULL else <object>found


cdef bint overrides_last(cls):
    # A class that redefines __dlpack__ below the one with the table means its own, not the inherited table.
    for base in cls.__mro__:
        if "__dlpack_c_exchange_api__" in base.__dict__:
            return True
        if "__dlpack__" in base.__dict__:
            return False
    return False


cdef DLPackExchangeAPI* table_on(cls) except? NULL:
    """The exchange table on a type, of a major version that we read, or NULL. Older ones hang behind newer ones as prev_api."""
    cdef DLPackExchangeAPIHeader* h
    cdef DLPackExchangeAPI* api
    cdef int steps = 0
    capsule = find_on_type(cls, "__dlpack_c_exchange_api__")
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return NULL              # also the int of DLPack 1.2: not taken without being asked (field report B94)
    h = <DLPackExchangeAPIHeader*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    while h != NULL and h.version.major != DLPACK_MAJOR and steps < 64:      # a chain that bites its tail ends too
        h = h.prev_api
        steps += 1
    api = <DLPackExchangeAPI*>h
    if steps == 64 or api == NULL or api.managed_tensor_from_py_object_no_sync == NULL or api.managed_tensor_to_py_object_no_sync == NULL \
            or api.current_work_stream == NULL:
        return NULL
    return api


# ---- guards ----
cdef bind_guards(TypeRecord r, cls):
    cdef int i
    if len(r.guard_objects) > MAX_GUARDS:
        raise ValueError(f"adapter {r.framework}: at most {MAX_GUARDS} guards")
    r.n_guards = len(r.guard_objects)
    r.fallback_guards = all([g.fallback_only for g in r.guard_objects])
    for i in range(r.n_guards):
        guard = r.guard_objects[i]
        descr = find_on_type(cls, guard.attribute)
        r.guards[i].complex_only = guard.complex_only
        r.guards[i].call = NULL
        if descr is not None:
            r.guards[i].call = interop_c_getter(<PyObject*>descr, &r.guards[i].closure)


cdef inline int check_guards(TypeRecord r, PyObject* x, int code) except -1:
    # `code` is the dtype code where it is known, else -1: then every guard is asked.
    cdef int i
    for i in range(r.n_guards):
        if r.guards[i].complex_only and code >= 0 and code != kDLComplex:
            continue
        if r.guards[i].call != NULL:
            value = r.guards[i].call(x, r.guards[i].closure)
        else:
            value = getattr(<object>x, r.guard_objects[i].attribute, False)
            if callable(value):
                value = value()
        if value is not False and value:
            guard = r.guard_objects[i]
            raise ExchangeError(guard.reason, guard.remedy)
    return 0


# ---- targets ----
cdef Target _INTEROP = Target("interop", TO_TENSOR)
cdef Target _NUMPY = Target("numpy", TO_NUMPY)


cdef struct KeySlot:             # both strong, so that an address cannot come to mean another object
    PyObject* key
    PyObject* target

cdef KeySlot _recent[64]         # by address of the key: literals are one object each


cdef inline Target target_of(key):
    cdef KeySlot* slot = &_recent[(<uintptr_t><PyObject*>key >> 4) & 63]
    if slot.key == <PyObject*>key:
        return <Target>slot.target
    return look_up_target(key, slot)


cdef Target look_up_target(key, KeySlot* slot):
    cdef Target t = find_target(key)
    cdef PyObject* old_key
    cdef PyObject* old_target
    if _targets.get(key) is t:
        Py_INCREF(key)
        Py_INCREF(t)
        old_key, old_target = slot.key, slot.target
        slot.key = <PyObject*>key
        slot.target = <PyObject*>t
        Py_XDECREF(old_key)
        Py_XDECREF(old_target)
    return t


cdef Target find_target(key):
    cdef PyObject* found = PyDict_GetItemWithError(_targets, key)
    if found != NULL:
        return <Target>found
    return new_target(key)


cdef Target new_target(key):
    cdef Target t = _resolve_target(key)
    if t.adapter is not None and t.kind == TO_TABLE:
        t.table = table_on(t.call)
        t.call = None
        if t.table == NULL:
            t.kind = TO_ADAPTER
    if isinstance(key, str) or t.kind != TO_CALL:
        if t.native_place is None:
            return _targets.setdefault(key, t)
    return t


def make_target(name, kind, adapter=None, call=None, place=None, native_place=None):
    """For `registry`: kind is "tensor", "numpy", "table" (call = the type that has it), "adapter" or "call"."""
    if kind == "tensor" and place is None:
        return _INTEROP
    if kind == "numpy" and place is None:
        return _NUMPY
    code = {"tensor": TO_TENSOR, "numpy": TO_NUMPY, "table": TO_TABLE, "adapter": TO_ADAPTER, "call": TO_CALL}[kind]
    return Target(name, code, adapter, call, place, None if adapter is None else adapter.accepts, native_place)


def framework_of_type(cls):
    """The name of the adapter that a type belongs to, or None."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, Tensor):
        return "interop"
    if issubclass(cls, np.ndarray):
        return "numpy"
    adapter = adapter_for(cls)
    return None if adapter is None else adapter.name


def kind(x, /):
    """The framework that `x` belongs to ("numpy", "torch", "jax", "interop"...), or None. Imports nothing."""
    return record_of(<PyObject*>x).framework
