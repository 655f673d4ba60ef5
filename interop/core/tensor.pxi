# Tensor: the state, how it is made and how it goes. What it can do stands in the class body and leads to the pieces that follow.

cdef enum:
    INLINE_DIMS = 6              # shape and strides up to here live in the object itself

cdef enum:                       # what `Tensor.managed` points to
    OWNS_NOTHING = 0
    OWNS_VERSIONED = 1
    OWNS_LEGACY = 2

cdef extern from *:
    """
    #define INTEROP_OPAQUE ((uint64_t)1 << 40)
    """
    # In Tensor.flags, beside DLPack's: a layout that shape and strides do not describe. strides[0] then holds the bytes that it lies in,
    # and six bits of flags further up the number of its name.
    uint64_t OPAQUE "INTEROP_OPAQUE"

cdef list _layouts = []          # names of layouts, by number


cdef str layout_name(uint64_t flags):
    return _layouts[<int>(flags >> 41) & 63] if flags & OPAQUE else "strided"


cdef int refuse_layout(uint64_t flags, str what) except -1:
    if flags & OPAQUE:
        raise ExchangeError(f"a tensor of layout {layout_name(flags)!r} has no strides: {what} cannot be had of it",
                            "interop.copyto(interop.empty(...), t) copies it into strided memory where its adapter can")
    return 0

cdef enum:
    # Tensor.stream, beside the numbers that the array API gives a stream on this device
    STREAM_NONE = -1             # nothing is pending, or nobody said


@cython.no_gc
cdef class Tensor:
    """An n-dimensional view of memory that something else owns: shape, strides (in elements), dtype, device, byte_offset.

    Made by `interop.as_tensor` and its kin, never directly. Immutable, compared and hashed by identity, weakly referable. It speaks
    DLPack, on the host also the buffer protocol and NumPy's array interface, on CUDA the CUDA array interface.
    """
    cdef DLTensor dl
    cdef uint64_t flags          # DL_READ_ONLY | DL_IS_COPIED | DL_SUBBYTE_PADDED
    cdef PyObject* held          # strong: an ndarray, or the root Tensor of a view. NULL where `managed` or a subclass owns
    cdef void* managed
    cdef int owns
    cdef int64_t stream          # whose work is pending: it is ready on this one
    cdef int64_t freed           # in whose order the memory is freed when its owner lets go; STREAM_NONE: nobody said
    cdef PyObject* alloc         # the Allocation below, kept alive by what this tensor holds; NULL: memory of somebody else
    cdef int64_t dims[2 * INLINE_DIMS]
    cdef object __weakref__

    def __init__(self, *args, **kwargs):
        raise TypeError("a Tensor is a view of memory that exists: make one with interop.as_tensor(x)")

    def __dealloc__(self):
        let_go(self)             # of _BufferTensor and of Python subclasses; the common types go through drop_tensor

    # ---- what it is ----
    @property
    def shape(self):
        """Extents, outermost first."""
        return tuple_of(self.dl.ndim, self.dl.shape)

    @property
    def strides(self):
        """Distance between neighbours along each dimension, in elements (as DLPack has it; NumPy counts bytes). None: see `layout`."""
        if self.flags & OPAQUE:
            return None
        return tuple_of(self.dl.ndim, self.dl.strides)

    @property
    def dtype(self):
        """An `interop.DType`."""
        return dtype_of(self.dl.dtype)

    @property
    def device(self):
        """An `interop.Device`: where the bytes live."""
        return device_of(self.dl.device)

    @property
    def ndim(self):
        """Number of dimensions."""
        return self.dl.ndim

    @property
    def size(self):
        """Number of elements."""
        return count(self.dl.ndim, self.dl.shape)

    @property
    def itemsize(self):
        """Bytes of one element, rounded up where elements share bytes."""
        return max(1, element_bytes(self.dl.dtype, self.flags)) if not is_packed(self.dl.dtype, self.flags) \
            else (self.dl.dtype.bits * self.dl.dtype.lanes + 7) // 8

    @property
    def nbytes(self):
        """Bytes of all elements, without gaps: ceil(size * bits * lanes / 8), or a byte a lane where sub-byte types are padded."""
        return bytes_of(self.dl.dtype, count(self.dl.ndim, self.dl.shape), self.flags)

    @property
    def byte_offset(self):
        """Bytes from `ptr - byte_offset` or from the start of `handle` to the first element."""
        return self.dl.byte_offset

    @property
    def readonly(self):
        """Whether this view must not be written through. Sticky: views and exports keep it."""
        return bool(self.flags & DL_READ_ONLY)

    @property
    def copied(self):
        """Whether the bytes were copied to make this tensor, by us or by its producer."""
        return bool(self.flags & DL_IS_COPIED)

    @property
    def padded(self):
        """Whether each element of a sub-byte dtype has a byte of its own (DLPack's IS_SUBBYTE_TYPE_PADDED)."""
        return bool(self.flags & DL_SUBBYTE_PADDED)

    @property
    def layout(self):
        """``"strided"``: shape and strides describe it. Another name (``"vk-image"``): only its API knows where an element lies.

        Then strides is None, and every view, export, buffer and map is refused; `copyto` copies where an adapter can.
        """
        return layout_name(self.flags)

    @property
    def ptr(self):
        """Address of the first element. AttributeError on devices whose memory is a handle."""
        if not addressable(self.dl.device.device_type):
            raise AttributeError(f"memory on {device_of(self.dl.device)} is a handle, not an address: use .handle and .byte_offset")
        return <uintptr_t>self.dl.data + self.dl.byte_offset if self.dl.data != NULL else 0

    @property
    def handle(self):
        """The native handle as an int (a cl_mem, a VkBuffer). AttributeError where memory is addressable: use `ptr`."""
        if addressable(self.dl.device.device_type):
            raise AttributeError(f"memory on {device_of(self.dl.device)} has an address: use .ptr")
        return <uintptr_t>self.dl.data

    def is_contiguous(self, order="C"):
        """Whether the elements lie without gaps, row-major ("C") or column-major ("F"). Empty tensors are both."""
        if order not in ("C", "F"):
            raise ValueError(f"order {order!r}: must be 'C' or 'F'")
        if self.flags & OPAQUE:
            return False
        return is_compact(self.dl.ndim, self.dl.shape, self.dl.strides, order == "F")

    @property
    def allocation(self):
        """The `Allocation` behind this view: the root bytes, their owner, their close()."""
        return allocation_of(self)

    def map(self, access="read", *, copy=None, timeout=None):
        """A `Lease` whose value is an ndarray over this tensor: a view where the host can see the memory, else a staged copy.

        Args:
            access: ``"read"``, ``"write"`` (what was there is not fetched: fill it) or ``"read_write"``.
            copy: False refuses staging, True forces it, None stages where it must.
            timeout: seconds to wait for a conflicting lease; None: raise LeaseError at once.
        """
        return _up_map(self, access, copy, timeout)

    # ---- views ----
    def __len__(self):
        if self.dl.ndim == 0:
            raise TypeError("len() of a 0-dimensional tensor")
        return self.dl.shape[0]

    def __bool__(self):
        raise TypeError("a Tensor has no truth value: it describes memory; interop.to(t, 'numpy') computes")

    def __getitem__(self, key):
        refuse_layout(self.flags, "an element or slice")
        return index_view(self, key)

    def __iter__(self):
        if self.dl.ndim == 0:
            raise TypeError("iteration over a 0-dimensional tensor")
        refuse_layout(self.flags, "an element or slice")
        return (index_view(self, i) for i in range(self.dl.shape[0]))

    def reshape(self, *shape):
        """A view of another shape, one extent may be -1. ExchangeError where only a copy could have it."""
        refuse_layout(self.flags, "another shape")
        return reshape_view(self, shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape)

    def permute(self, *axes):
        """A view with the dimensions in another order."""
        refuse_layout(self.flags, "another order of dimensions")
        return permute_view(self, axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes)

    def view(self, dtype, /):
        """The same bytes as another dtype; the last dimension grows or shrinks where the sizes differ (as NumPy does)."""
        refuse_layout(self.flags, "another dtype")
        return dtype_view(self, get_dtype(dtype))

    # ---- the exchange protocols ----
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A capsule with this tensor (array API ``__dlpack__``). See SPEC, Exposing.

        Without ``max_version=(1, ...)`` it is a legacy capsule, which read-only and padded tensors cannot leave in. ``dl_device`` may
        name this device, or the CPU for memory that the host can read. BufferError for what cannot be exported as asked.
        """
        return expose(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        """The pair (DLDeviceType, id)."""
        return (self.dl.device.device_type, self.dl.device.device_id)

    def __getbuffer__(self, Py_buffer* view, int flags):
        fill_buffer(self, view, flags)

    def __releasebuffer__(self, Py_buffer* view):
        free(view.internal)

    def __array__(self, dtype=None, *, copy=None):
        """A NumPy array over the same bytes; a conversion of dtype copies, unless ``copy=False`` forbids."""
        return as_array(self, dtype, copy)

    def __interop_native__(self, *, max_version=(1, 0)):
        """A capsule ``interop_native_v1`` with what DLPack cannot carry: handles, sizes, UUIDs, readiness. See SPEC, Side channel."""
        return _up_native(self, max_version)

    @property
    def __array_interface__(self):
        """NumPy's array interface, version 3. Host memory only."""
        return array_interface(self)

    @property
    def __cuda_array_interface__(self):
        """The CUDA array interface, version 3. CUDA and managed memory only."""
        return cuda_array_interface(self)

    # ---- being an object ----
    def __repr__(self):
        parts = [str(self.shape), str(self.dtype), str(self.device)]
        if self.flags & OPAQUE:
            parts.append(f"layout={self.layout!r}")
        elif not is_compact(self.dl.ndim, self.dl.shape, self.dl.strides, False):
            parts.append(f"strides={self.strides}")
        if self.readonly:
            parts.append("readonly")
        if self.copied:
            parts.append("copied")
        if (name := owner_name(self)) is not None:
            parts.append(f"owner={name}")
        return f"Tensor({', '.join(parts)})"

    def _repr_html_(self):
        rows = (("shape", self.shape), ("dtype", self.dtype), ("device", self.device), ("strides", self.strides),
                ("nbytes", f"{self.nbytes:,}"), ("readonly", self.readonly), ("copied", self.copied), ("owner", owner_name(self)))
        cells = "".join(f"<tr><th style='text-align:left'>{k}</th><td><code>{_escape(str(v))}</code></td></tr>" for k, v in rows)
        return f"<table><caption>interop.Tensor</caption>{cells}</table>"

    def __reduce_ex__(self, protocol):
        raise TypeError("a Tensor is not pickled: it describes memory of this process; interop.to(t, 'numpy') gives values that pickle")

    def __array_ufunc__(self, *args, **kwargs):
        return no_arithmetic()

    def __add__(self, other): return no_arithmetic()
    def __sub__(self, other): return no_arithmetic()
    def __mul__(self, other): return no_arithmetic()
    def __truediv__(self, other): return no_arithmetic()
    def __floordiv__(self, other): return no_arithmetic()
    def __mod__(self, other): return no_arithmetic()
    def __matmul__(self, other): return no_arithmetic()
    def __radd__(self, other): return no_arithmetic()
    def __rsub__(self, other): return no_arithmetic()
    def __rmul__(self, other): return no_arithmetic()
    def __rtruediv__(self, other): return no_arithmetic()
    def __rfloordiv__(self, other): return no_arithmetic()
    def __rmod__(self, other): return no_arithmetic()
    def __rmatmul__(self, other): return no_arithmetic()
    def __pow__(self, other, modulo): return no_arithmetic()
    def __rpow__(self, other, modulo): return no_arithmetic()
    def __divmod__(self, other): return no_arithmetic()
    def __and__(self, other): return no_arithmetic()
    def __or__(self, other): return no_arithmetic()
    def __xor__(self, other): return no_arithmetic()
    def __lshift__(self, other): return no_arithmetic()
    def __rshift__(self, other): return no_arithmetic()
    def __rdivmod__(self, other): return no_arithmetic()
    def __rand__(self, other): return no_arithmetic()
    def __ror__(self, other): return no_arithmetic()
    def __rxor__(self, other): return no_arithmetic()
    def __rlshift__(self, other): return no_arithmetic()
    def __rrshift__(self, other): return no_arithmetic()
    def __neg__(self): return no_arithmetic()
    def __pos__(self): return no_arithmetic()
    def __invert__(self): return no_arithmetic()
    def __abs__(self): return no_arithmetic()
    # int() and float() would otherwise read the buffer as text
    def __index__(self): return no_arithmetic()
    def __int__(self): return no_arithmetic()
    def __float__(self): return no_arithmetic()
    def __complex__(self): return no_arithmetic()
    def __round__(self, ndigits=None): return no_arithmetic()
    def __contains__(self, value): return no_arithmetic()
    def __lt__(self, other): return no_arithmetic()
    def __le__(self, other): return no_arithmetic()
    def __gt__(self, other): return no_arithmetic()
    def __ge__(self, other): return no_arithmetic()

    def __eq__(self, other):
        return True if self is other else NotImplemented

    def __hash__(self):
        return <Py_hash_t>(<uintptr_t><PyObject*>self >> 4)

    def __setitem__(self, key, value):
        raise TypeError("a Tensor is not written to: interop.copyto(t[key], x) copies, interop.to(t, 'numpy')[key] = x computes")


cdef class _ObjectTensor(Tensor):
    # Over memory of a Python object that the garbage collector may have to see through: x.tensor = as_tensor(x) must not leak.
    cdef object keep


@cython.no_gc_clear              # the view is released when the tensor goes, not while something still reads through it
cdef class _BufferTensor(Tensor):
    # Over a buffer that is held open until the tensor goes.
    cdef object _                # nothing: makes Cython give the type a collector, which traverse_buffer then is
    cdef Py_buffer view

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef int traverse_buffer(PyObject* o, visit_function visit, void* arg) noexcept:
    # tp_traverse of _BufferTensor: an object that holds a tensor over its own buffer must be found.
    cdef PyObject* exporter = interop_exporter(&(<_BufferTensor>o).view)
    return visit(exporter, arg) if exporter != NULL else 0


cdef PyObject* refuse_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) except NULL:
    # tp_new as Python sees it; the core makes tensors by blank_tensor.
    raise TypeError("a Tensor is a view of memory that exists: make one with interop.as_tensor(x)")


# ---- making and dropping, without the detours of generated code: this is most of what a conversion costs ----
cdef PyObject* _spare[64]
cdef PyObject* _spare_objects[64]
cdef int _n_spare = 0
cdef int _n_spare_objects = 0


cdef inline Tensor blank_tensor():
    """A Tensor that owns nothing yet; its dims are still to be filled."""
    global _n_spare
    cdef Tensor t
    if _n_spare:
        _n_spare -= 1
        t = <Tensor>interop_revive(_spare[_n_spare], <PyTypeObject*>Tensor)
        t.dl.shape = NULL
        t.dl.data = NULL
        t.dl.ndim = 0
        t.held = NULL
        t.owns = OWNS_NOTHING
        t.alloc = NULL
        t.flags = 0
        t.freed = STREAM_NONE
        return t
    t = Tensor.__new__(Tensor)
    t.freed = STREAM_NONE
    return t


cdef inline _ObjectTensor blank_object_tensor(object keep):
    global _n_spare_objects
    cdef _ObjectTensor t
    if _n_spare_objects:
        _n_spare_objects -= 1
        t = <_ObjectTensor>interop_revive(_spare_objects[_n_spare_objects], <PyTypeObject*>_ObjectTensor)
        t.dl.shape = NULL
        t.dl.data = NULL
        t.dl.ndim = 0
        t.alloc = NULL
        t.flags = 0
        t.freed = STREAM_NONE
        t.keep = keep
        PyObject_GC_Track(<PyObject*>t)
        return t
    t = _ObjectTensor.__new__(_ObjectTensor)
    t.freed = STREAM_NONE
    t.keep = keep
    return t


cdef inline void let_go(Tensor t) noexcept:
    if t.dl.shape != NULL and t.dl.shape != t.dims:
        free(t.dl.shape)
    if t.owns:
        release_managed(t)
    elif t.held != NULL:
        Py_DECREF(<object>t.held)


cdef void drop_tensor(PyObject* o) noexcept:
    # tp_dealloc of Tensor. `o` is cast for each use: a Cython variable would count references of an object that has none.
    global _n_spare
    cdef PyObject* held = NULL
    interop_clear_weakrefs(o)
    if (<Tensor>o).dl.shape != NULL and (<Tensor>o).dl.shape != (<Tensor>o).dims:
        free((<Tensor>o).dl.shape)
    if (<Tensor>o).owns:
        release_managed_of((<Tensor>o).managed, (<Tensor>o).owns)
    else:
        held = (<Tensor>o).held
    if Py_TYPE(o) == <PyTypeObject*>Tensor and _n_spare < INTEROP_REUSE:
        _spare[_n_spare] = o
        _n_spare += 1
    else:
        PyType_FreeObject(o)
    Py_XDECREF(held)             # last: it may run anything


cdef void drop_object_tensor(PyObject* o) noexcept:
    # tp_dealloc of _ObjectTensor.
    global _n_spare_objects
    cdef PyObject* keep
    PyObject_GC_UnTrack(o)
    interop_clear_weakrefs(o)
    if (<Tensor>o).dl.shape != NULL and (<Tensor>o).dl.shape != (<Tensor>o).dims:
        free((<Tensor>o).dl.shape)
    keep = take_keep(o)
    if Py_TYPE(o) == <PyTypeObject*>_ObjectTensor and _n_spare_objects < INTEROP_REUSE:
        _spare_objects[_n_spare_objects] = o
        _n_spare_objects += 1
    else:
        PyType_FreeObject(o)
    Py_XDECREF(keep)


cdef inline PyObject* take_keep(PyObject* o) noexcept:
    # The reference moves to the caller; None takes its place.
    cdef PyObject* keep = <PyObject*>(<_ObjectTensor>o).keep
    Py_INCREF(<object>keep)
    (<_ObjectTensor>o).keep = None
    return keep


# One public name: which of the three it is, concerns the garbage collector alone
(<PyTypeObject*>Tensor).tp_name = b"interop.Tensor"
(<PyTypeObject*>_ObjectTensor).tp_name = b"interop.Tensor"
(<PyTypeObject*>_BufferTensor).tp_name = b"interop.Tensor"
(<PyTypeObject*>DType).tp_name = b"interop.DType"
(<PyTypeObject*>Device).tp_name = b"interop.Device"

interop_set_slots(Tensor, NULL, refuse_new)
interop_set_slots(_ObjectTensor, NULL, refuse_new)
interop_set_slots(_BufferTensor, traverse_buffer, refuse_new)

interop_set_dealloc(Tensor, drop_tensor)
interop_set_dealloc(_ObjectTensor, drop_object_tensor)

from html import escape as _escape


cdef no_arithmetic():
    raise TypeError("a Tensor does not compute: it describes memory. interop.to(t, 'numpy') or interop.to(t, 'torch') does")


cdef owner_name(Tensor t):
    cdef object owner = owner_of(t)
    if owner is None:
        return None
    cls = type(owner)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


cdef class _StreamUse            # in streams.pxi
cdef class _WithStream


cdef owner_of(Tensor t):
    if t.alloc != NULL:
        return (<Allocation>t.alloc).owner
    if isinstance(t, _ObjectTensor):
        owner = (<_ObjectTensor>t).keep
    elif isinstance(t, _BufferTensor):
        owner = <object>(<_BufferTensor>t).view.obj
    elif t.held != NULL:
        owner = <object>t.held
    else:
        return None
    if isinstance(owner, _StreamUse):
        owner = (<_StreamUse>owner).memory
    elif isinstance(owner, _WithStream):
        owner = (<_WithStream>owner).memory
    return owner_of(<Tensor>owner) if isinstance(owner, Tensor) else owner


cdef void release_managed(Tensor t) noexcept:
    release_managed_of(t.managed, t.owns)


cdef void release_managed_of(void* managed, int owns) noexcept:
    cdef DLManagedTensorVersioned* v
    cdef DLManagedTensor* m
    cdef PyObject* a = NULL
    cdef PyObject* b = NULL
    cdef PyObject* c = NULL
    PyErr_Fetch(&a, &b, &c)      # a deleter may run Python, and an error may be on its way up
    if owns == OWNS_VERSIONED:
        v = <DLManagedTensorVersioned*>managed
        if v.deleter != NULL:
            v.deleter(v)
    else:
        m = <DLManagedTensor*>managed
        if m.deleter != NULL:
            m.deleter(m)
    PyErr_Restore(a, b, c)


cdef tuple_of(int n, const int64_t* values):
    cdef int i
    return tuple([values[i] for i in range(n)])


cdef inline int take_dims(Tensor t, int ndim, const int64_t* shape, const int64_t* strides) except -1:
    # Room for shape and strides in the object, or beside it; NULL strides mean row-major.
    cdef int64_t* dims = t.dims
    cdef int i
    t.dl.ndim = ndim
    if ndim > INLINE_DIMS:
        dims = <int64_t*>malloc(2 * ndim * sizeof(int64_t))
        if dims == NULL:
            t.dl.ndim = 0
            raise MemoryError()
    t.dl.shape = dims
    t.dl.strides = dims + ndim
    if shape != NULL:
        for i in range(ndim):    # few: a call to memcpy costs more
            dims[i] = shape[i]
        if strides != NULL:
            for i in range(ndim):
                dims[ndim + i] = strides[i]
        else:
            compact_strides(ndim, shape, dims + ndim)
    return 0


cdef inline uint64_t overlap_flag(int ndim, const int64_t* shape, const int64_t* strides) noexcept nogil:
    # Elements that share an address are never written through (field report B52; NumPy's broadcast_to says the same).
    cdef int i
    for i in range(ndim):
        if strides[i] == 0 and shape[i] > 1:
            return 0 if is_empty(ndim, shape) else DL_READ_ONLY
    return 0


cdef int take_tensor(Tensor t, DLTensor* d, uint64_t flags) except -1:
    """Fill `t`, which already owns what keeps the memory, from foreign metadata. The one validator of every path."""
    check_tensor(d)
    t.dl = d[0]
    t.dl.ndim = 0
    t.dl.shape = NULL
    take_dims(t, d.ndim, d.shape, d.strides)
    t.flags = flags | overlap_flag(d.ndim, t.dl.shape, t.dl.strides)
    if d.dtype.bits >= 8:
        t.flags &= ~<uint64_t>DL_SUBBYTE_PADDED      # says nothing of whole bytes
    if d.device.device_type == kDLCPU:
        t.dl.device.device_id = 0
    t.stream = STREAM_NONE
    return 0


cdef Tensor adopt(Tensor t, DLManagedTensorVersioned* m):
    """Make the blank `t` own `m` from here on, also if this raises."""
    t.managed = m
    t.owns = OWNS_VERSIONED
    check_version(m.version)
    take_tensor(t, &m.dl_tensor, m.flags & (DL_READ_ONLY | DL_IS_COPIED | DL_SUBBYTE_PADDED))
    return t


cdef Tensor adopt_legacy(Tensor t, DLManagedTensor* m):
    t.managed = m
    t.owns = OWNS_LEGACY
    take_tensor(t, &m.dl_tensor, 0)
    return t


cdef Tensor over_object(object owner, DLTensor* d, uint64_t flags):
    """A Tensor over memory that `owner` keeps; `d` is validated."""
    cdef _ObjectTensor t = blank_object_tensor(owner)
    take_tensor(t, d, flags)
    return t


cdef Tensor like_view(Tensor base):
    """An empty shell over the memory of `base`: same owner, device, dtype, flags, stream; dims still to be taken."""
    cdef Tensor t
    cdef object root
    if isinstance(base, _ObjectTensor):
        root = (<_ObjectTensor>base).keep
        t = blank_object_tensor(root if isinstance(root, Tensor) else base)
    elif isinstance(base, _BufferTensor):
        t = blank_object_tensor(base)
    else:
        t = blank_tensor()
        root = <object>base.held if base.held != NULL and isinstance(<object>base.held, Tensor) else base
        Py_INCREF(root)
        t.held = <PyObject*>root
    t.dl = base.dl
    t.dl.ndim = 0
    t.dl.shape = NULL
    t.dl.strides = NULL
    t.flags = base.flags
    t.stream = base.stream
    t.freed = base.freed
    t.alloc = base.alloc
    return t
