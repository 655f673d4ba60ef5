"""CuPy. Read from its plain attributes and made from a pointer: its own from_dlpack takes ten times as long.

CuPy arrays live on a GPU, so memory of the host is shown to them by registering its pages (contract: `home`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, Attributes, Limits, register

if TYPE_CHECKING:
    from interop import Device, Tensor

_CUDA, _CUDA_MANAGED = 2, 13
_PER_THREAD = 2


class CupyAdapter(Adapter):
    """cupy.ndarray."""

    name = "cupy"
    types = ("cupy.ndarray", "cupy._core.core.ndarray")
    requires = "cupy-cuda13x"
    reads = "attributes"
    attributes = Attributes(pointer="data.ptr")
    # CuPy arrays are always writable
    accepts = Limits(readonly=False, devices=frozenset({_CUDA, _CUDA_MANAGED}))

    def __init__(self) -> None:
        """Nothing is looked up before the first conversion."""
        self._cupy: Any = None
        self._devices = 0
        self._stream: Any = None
        self._dtypes: dict[str, Any] = {}       # NumPy's, by our names, as they are met

    def _load(self) -> Any:
        try:
            import cupy
        except ModuleNotFoundError:
            raise ImportError(f"cupy is not installed: pip install {self.requires}", name="cupy") from None
        try:
            self._devices = cupy.cuda.runtime.getDeviceCount()
        except RuntimeError as e:       # CUDARuntimeError
            raise self.refuse(f"CuPy finds no GPU: {e}", "python -m interop doctor") from None
        self._stream = cupy.cuda.get_current_stream
        self._cupy = cupy               # last: other threads look at it
        return cupy

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """A cupy.ndarray over `t`, which is ready on CuPy's current stream; the array's memory object holds it."""
        cupy = self._cupy or self._load()
        name = t.dtype.name
        cuda, dtype = cupy.cuda, self._dtypes.get(name) or self._dtype(t)
        if t.is_contiguous():
            return cupy.ndarray(t.shape, dtype, cuda.MemoryPointer(cuda.UnownedMemory(t.ptr, t.nbytes, t, t.device.id), 0))
        size = t.itemsize
        steps = [(n - 1) * s * size for n, s in zip(t.shape, t.strides, strict=True)]
        before, after = -sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + size
        memory = cuda.UnownedMemory(t.ptr - before, before + after, t, t.device.id)
        return cupy.ndarray(t.shape, dtype, cuda.MemoryPointer(memory, before), tuple([s * size for s in t.strides]))

    def _dtype(self, t: Tensor) -> Any:
        try:
            if t.padded or t.dtype.bits < 8:
                raise LookupError
            found = self._dtypes[t.dtype.name] = t.dtype.numpy_dtype
            return found
        except (LookupError, ImportError, TypeError):
            raise self.refuse(f"NumPy's dtypes, which CuPy uses, have no {t.dtype}",
                              "interop.as_tensor(x).view('uint8') shows the bytes") from None

    def current_stream(self, device: Device) -> Any:
        """CuPy's current stream on a GPU: 1 for a null stream, else the object, without which CuPy destroys the stream."""
        cupy = self._cupy or self._load()
        if self._devices > 1 and cupy.cuda.runtime.getDevice() != device.id:
            with cupy.cuda.Device(device.id):
                stream = self._stream()
        else:
            stream = self._stream()
        return _Stream(stream) if stream.ptr > _PER_THREAD else stream.ptr or 1

    def stream_capsule(self) -> Any:
        """CuPy's own C function for it, which its .pxd offers to Cython; None with several GPUs, or a CuPy that has none such."""
        cupy = self._cupy or self._load()
        capsule = getattr(sys.modules.get("cupy.cuda.stream"), "__pyx_capi__", {}).get("get_current_stream_ptr")
        return capsule if self._devices == 1 and cupy is not None and '"intptr_t (void)"' in repr(capsule) else None

    def fresh(self, t: Tensor, device: Device) -> Any:
        """An empty array on a GPU, from CuPy's current allocator."""
        cupy = self._cupy or self._load()
        with cupy.cuda.Device(device.id):
            return cupy.empty(t.shape, self._dtype(t))

    def home(self) -> Device:
        """CuPy's current GPU."""
        from interop import Device

        return Device(_CUDA, (self._cupy or self._load()).cuda.runtime.getDevice())

    def place(self, obj: Any) -> Device | None:
        """A cupy.cuda.Device."""
        if type(obj).__module__ != "cupy.cuda.device" or type(obj).__name__ != "Device":
            return None
        from interop import Device

        return Device(f"cuda:{obj.id}")


def allocator(segment: int = 32 << 20) -> Any:
    """CuPy memory that can be exported to other APIs and processes: ``with cupy.cuda.using_allocator(allocator()): x = cupy.empty(...)``.

    Args:
        segment: bytes taken from the driver at once, in which small arrays lie together; rounded up to granules of 2 MiB.

    Returns what CuPy calls for memory: one for each size of segment, with ``free_all()`` (give back what no array uses),
    ``segment_bytes()`` and ``pool`` (CuPy's MemoryPool in front). Raises ExchangeError where CuPy or the driver is missing.
    """
    from .cuda import cupy_allocator

    return cupy_allocator.allocator(segment)


class _Stream:
    """CuPy's stream object with its number; older CuPy has no ``__cuda_stream__``."""

    __slots__ = ("__cuda_stream__", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream, self.__cuda_stream__ = stream, (0, stream.ptr)


ADAPTER = CupyAdapter()
register(ADAPTER)
