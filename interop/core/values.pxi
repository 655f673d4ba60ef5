# Device and DType: plain values with names. Their tables are in device.py and dtypes.py.

cdef inline uint32_t pack_dtype(DLDataType d) noexcept nogil:
    return (<uint32_t>d.code) | (<uint32_t>d.bits << 8) | (<uint32_t>d.lanes << 16)


cdef object _BLANK = object()
cdef dict _DTYPES = {}           # packed triple -> DType: equal dtypes are one object
cdef dict _DEVICES = {}          # (type, id) -> Device


@cython.final
cdef class DType:
    """A DLPack dtype: `code`, `bits` and `lanes` (DLPack 1.3, DLDataTypeCode).

    ``DType("float32")``, ``DType(np.float32)``, ``DType(torch.float32)`` and ``DType((2, 32, 1))`` are equal, also to what they
    were made from (as with NumPy's dtypes, the hashes of those then differ). ``np.dtype(d)`` works where NumPy has the type.
    """
    cdef DLDataType dl
    cdef str _name

    def __cinit__(self, x, /):
        if x is not _BLANK:      # made by dtype_of, which fills it in
            if x is None:
                raise TypeError("None is not a dtype")
            self.dl = coerce_dtype(x)
            self._name = _dtypes.describe(self.dl.code, self.dl.bits, self.dl.lanes)

    @property
    def code(self):
        """DLDataTypeCode: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 7... fp8, fp6, fp4."""
        return self.dl.code

    @property
    def bits(self):
        """Bits of one lane; both parts of a complex number together."""
        return self.dl.bits

    @property
    def lanes(self):
        """Elements of a vector type; 1 for scalars."""
        return self.dl.lanes

    @property
    def name(self):
        """Such as ``"float32"``, ``"bfloat16"`` or ``"float32x4"``."""
        return self._name

    @property
    def itemsize(self):
        """Bytes that hold one element, rounded up: a packed int4 says 1, and two of them share that byte."""
        return (self.dl.bits * self.dl.lanes + 7) // 8

    @property
    def numpy_dtype(self):
        """NumPy's dtype of one lane. TypeError where NumPy and ml_dtypes have none."""
        try:
            return _dtypes.to_numpy(self.dl.code, self.dl.bits)
        except LookupError as e:
            raise TypeError(str(e)) from None

    @property
    def __numpy_dtype__(self):
        """NumPy's protocol behind ``np.dtype(self)`` (NumPy 2.4)."""
        return self.numpy_dtype

    def __eq__(self, other):
        cdef DLDataType d
        try:
            d = (<DType>other).dl if isinstance(other, DType) else coerce_dtype(other)
            return pack_dtype(self.dl) == pack_dtype(d)
        except (TypeError, ValueError):
            return NotImplemented

    def __hash__(self):
        return hash((self.dl.code, self.dl.bits, self.dl.lanes))

    def __repr__(self):
        return f"DType({self._name!r})"

    def __str__(self):
        return self._name

    def __reduce__(self):
        return DType, ((self.dl.code, self.dl.bits, self.dl.lanes),)


cdef bint known_dtype(DLDataType d) noexcept nogil:
    # Asked for every import: arithmetic, no table lookup.
    cdef int b = d.bits
    if d.lanes < 1:
        return False
    if d.code == kDLFloat:
        return b == 32 or b == 64 or b == 16
    if d.code <= kDLUInt:
        return b > 0 and b <= 64 and (b & (b - 1)) == 0
    if d.code == kDLOpaqueHandle:
        return b >= 8 and b <= 64 and (b & (b - 1)) == 0
    if d.code == kDLBfloat:
        return b == 16
    if d.code == kDLComplex:
        return b == 64 or b == 128 or b == 32
    if d.code == kDLBool:
        return b == 8
    if d.code <= kDLFloat8_e8m0fnu:
        return b == 8
    if d.code <= kDLFloat6_e3m2fn:
        return b == 6
    return d.code == kDLFloat4_e2m1fn and b == 4


cdef DType dtype_of(DLDataType d):
    cdef PyObject* found = PyDict_GetItemWithError(_DTYPES, pack_dtype(d))
    if found != NULL:
        return <DType>found
    cdef DType self = DType.__new__(DType, _BLANK)
    self.dl = d
    self._name = _dtypes.describe(d.code, d.bits, d.lanes)
    return _DTYPES.setdefault(pack_dtype(d), self)


cdef DType get_dtype(x):
    return <DType>x if isinstance(x, DType) else dtype_of(coerce_dtype(x))


cdef DLDataType coerce_dtype(x):
    cdef DLDataType d
    if isinstance(x, DType):
        return (<DType>x).dl
    code, bits, lanes = _dtypes.coerce(x)
    if not (0 <= code <= 255 and 0 <= bits <= 255 and 0 <= lanes <= 65535):
        raise ValueError(f"dtype {(code, bits, lanes)}: code and bits are 8-bit, lanes 16-bit numbers")
    d.code = code
    d.bits = bits
    d.lanes = lanes
    if not known_dtype(d):
        raise ValueError(f"unknown dtype {(code, bits, lanes)}: DLPack 1.3 has no such code with these bits")
    return d


@cython.final
cdef class Device:
    """Where memory lives, as DLPack says it: a type and a number. Written ``cpu``, ``cuda:0``, ``vulkan:1``.

    Equal to another Device, to the pair ``(type, id)`` and to its own spelling. Which physical device it is, it cannot say.
    """
    cdef DLDevice dl

    def __cinit__(self, x, id=None, /):
        if x is not _BLANK:
            self.dl = get_device(x if id is None else (x, id)).dl

    @property
    def type(self):
        """DLDeviceType: 1 cpu, 2 cuda, 4 opencl, 7 vulkan..."""
        return self.dl.device_type

    @property
    def id(self):
        """The number among devices of this type; 0 for host memory."""
        return self.dl.device_id

    @property
    def index(self):
        """The number as it is written: 1 of ``acme:1``, whose `id` lies in a block of numbers registered for the name."""
        return _device_names.spell(self.dl.device_type, self.dl.device_id)[1]

    @property
    def name(self):
        """The type's name: ``"cpu"``, ``"cuda"``..."""
        return _device_names.spell(self.dl.device_type, self.dl.device_id)[0]

    def __iter__(self):
        return iter((self.dl.device_type, self.dl.device_id))

    def __eq__(self, other):
        if isinstance(other, Device):
            return self.dl.device_type == (<Device>other).dl.device_type and self.dl.device_id == (<Device>other).dl.device_id
        if isinstance(other, tuple):
            return tuple(self) == other
        if isinstance(other, str):
            try:
                return self == get_device(other)
            except ValueError:
                return False
        return NotImplemented

    def __hash__(self):
        return hash((self.dl.device_type, self.dl.device_id))

    def __str__(self):
        name, number = _device_names.spell(self.dl.device_type, self.dl.device_id)
        return name if self.dl.device_type == kDLCPU else f"{name}:{number}"

    def __repr__(self):
        return f"Device({str(self)!r})"

    def __reduce__(self):
        return Device, (tuple(self),)


cdef bint known_device(int32_t t) noexcept nogil:
    return 1 <= t <= 18 and t != 5 and t != 6


cdef bint host_accessible(int32_t t) noexcept nogil:
    # What the CPU may read and write through the pointer (field report B54): plain, pinned and managed memory.
    return t == kDLCPU or t == kDLCUDAHost or t == kDLROCMHost or t == kDLCUDAManaged


cdef bint addressable(int32_t t) noexcept nogil:
    # Where `data` is a pointer and may be added to. Everywhere else it is a handle (DESIGN: handles are not pointers).
    return host_accessible(t) or t == kDLCUDA or t == kDLROCM or t == kDLOneAPI


cdef bint has_streams(int32_t t) noexcept nogil:
    return t == kDLCUDA or t == kDLCUDAManaged or t == kDLROCM


cdef Device device_of(DLDevice d):
    if d.device_type == kDLCPU:
        d.device_id = 0          # there is one, whatever a producer wrote
    key = (d.device_type, d.device_id)
    cdef PyObject* found = PyDict_GetItemWithError(_DEVICES, key)
    if found != NULL:
        return <Device>found
    cdef Device self = Device.__new__(Device, _BLANK)
    self.dl = d
    return _DEVICES.setdefault(key, self)


cdef Device get_device(x):
    cdef DLDevice d
    if isinstance(x, Device):
        return <Device>x
    if isinstance(x, str):
        kind, number = _device_names.parse(x)
    elif isinstance(x, (tuple, list)) and len(x) == 2:
        kind, number = x
    else:
        raise TypeError(f"{x!r} is not a device: give 'cuda:0', (2, 0) or an interop.Device")
    if isinstance(kind, bool) or isinstance(number, bool):
        raise TypeError(f"device {x!r}: type and id are integers")
    # enum members of other libraries (torch, jax, tvm_ffi) are integers by __index__
    try:
        kind, number = _index(kind), _index(number)
    except TypeError:
        raise TypeError(f"device {x!r}: type and id are integers") from None
    if not (-2**31 <= kind < 2**31) or not known_device(kind):
        raise ValueError(f"unknown device type {kind}: DLPack 1.3 has {', '.join(map(str, _device_names.NAMES))}")
    if not 0 <= number < 2**31:
        raise ValueError(f"device {x!r}: the id must be from 0 to 2**31 - 1")
    d.device_type = kind
    d.device_id = number
    return device_of(d)


import operator as _operator
_index = _operator.index
