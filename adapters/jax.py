"""JAX. Arrays are immutable: read-only on every path. On the CPU they are read through the buffer protocol, which waits for them.

jax's own from_dlpack spends most of its time in Python around one jaxlib function. That function is called directly where this jaxlib has
it and its result is what was asked for; the public way stands behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interop.contract import Adapter, Guard, Limits, pending_stream, register, stream_idle

if TYPE_CHECKING:
    from interop import Device, ExchangeError, Tensor

#: jaxlib aliases CPU memory only from this alignment on and silently copies below it (measured, jaxlib 0.10).
_ALIGNMENT = 64
_CPU, _CUDA = 1, 2


class JaxAdapter(Adapter):
    """jax.Array, which is jaxlib's ArrayImpl."""

    name = "jax"
    types = ("jaxlib._jax.ArrayImpl", "jaxlib.xla_extension.ArrayImpl", "jax.jaxlib._jax.Array", "jax.Array")
    reads = "buffer"
    accepts = Limits(readonly=True, writable=False, negative_strides=False, strided=False, alignment=_ALIGNMENT,
                     devices=frozenset({1, 2, 3, 10, 11}))

    guards = (Guard("is_deleted", "the array was deleted or donated: its memory is gone", "keep a reference that is not donated",
                    fallback_only=True),)

    def __init__(self) -> None:
        """Nothing is looked up before the first conversion."""
        self._direct: Any = None
        self._devices: dict[int, Any] = {}

    def from_tensor(self, t: Tensor, *, place: Any = None, stream: Any = None) -> Any:
        """A jax.Array over `t`, of its very dtype: ExchangeError rather than jax's silent copy or its narrowing of 64-bit types."""
        if t.padded:
            raise self.refuse(f"jax imports no {t.dtype}", "interop.as_tensor(x).view('uint8') shows the bytes")
        direct = self._direct
        if direct is None:
            direct = self._direct = _find_direct()
        if not direct:
            return self._public(t)
        kind, number = t.__dlpack_device__()
        try:
            if kind == _CUDA:
                here, on = self._devices.get(number) or self._device(t.device), pending_stream(t)
                if on < 0 or stream_idle((kind, number), on):        # nothing is pending: a stream that is said costs jaxlib 10 us
                    return direct(t.__dlpack__(stream=-1), here, None, False, _CUDA)
                ready = here.get_stream_for_external_ready_events()
                return direct(t.__dlpack__(stream=ready), here, ready, False, _CUDA)
            if kind != _CPU:
                return self._public(t)
            x = direct(t.__dlpack__(), self._devices.get(-1) or self._device(t.device), None, False, _CPU)
        except RuntimeError as e:
            raise self._refusal(t, e) from e
        if x.unsafe_buffer_pointer() == t.ptr or not t.size:
            return x
        return self._public(t)

    def _device(self, device: Device) -> Any:
        number = -1 if device.name == "cpu" else device.id
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = self._find(device)
        return found

    def _find(self, device: Device) -> Any:
        import jax

        try:
            for d in jax.devices("cuda" if device.name == "cuda" else device.name):
                if device.name == "cpu" or d.local_hardware_id == device.id:
                    return d
        except RuntimeError as e:
            raise self.refuse(f"jax sees no {device}: {str(e).partition(chr(10))[0]}", "pip install jax[cuda13]") from None
        raise self.refuse(f"jax sees no {device}", "jax.devices() shows what it sees")

    def to_capsule(self, x: Any, stream: int) -> Any:
        """jaxlib's export, without jax's checks in Python around it: `stream` is made to wait for the array.

        After the first call jaxlib's function stands in its place.
        """
        export = _find_export()
        self.to_capsule = export  # type: ignore[method-assign]
        return export(x, stream)

    def _public(self, t: Tensor) -> Any:
        import jax

        try:
            x = jax.dlpack.from_dlpack(t, copy=False)
        except (TypeError, ValueError, RuntimeError) as e:
            raise self._refusal(t, e) from e
        if str(x.dtype) != t.dtype.name:
            raise self.refuse(f"jax would convert {t.dtype} to {x.dtype}", 'jax.config.update("jax_enable_x64", True)')
        if t.size and hasattr(x, "unsafe_buffer_pointer") and x.unsafe_buffer_pointer() != t.ptr:
            raise self.refuse(f"jax copied {t.dtype} {t.shape} instead of sharing it", f"align the memory to {_ALIGNMENT} bytes")
        return x

    def _refusal(self, t: Tensor, e: Exception) -> ExchangeError:
        return self.refuse(f"jax cannot hold {t.dtype} {t.shape} on {t.device}: {str(e).partition(chr(10))[0]}")

    def place(self, obj: Any) -> Device | None:
        """A jax.Device."""
        if type(obj).__module__ not in ("jaxlib._jax", "jaxlib.xla_extension") or type(obj).__name__ != "Device":
            return None
        from interop import Device

        kind = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "rocm"}.get(obj.platform)
        return None if kind is None else Device(f"{kind}:{0 if kind == 'cpu' else obj.local_hardware_id}")

    def to_device(self, x: Any, device: Device) -> Any:
        """A copy on another device, made by jax."""
        import jax

        return jax.device_put(x, self._find(device))


def _find_direct() -> Any:
    """jaxlib's function behind from_dlpack, or False where it is another one than we know."""
    try:
        from jaxlib import _jax

        function = _jax.dlpack_managed_tensor_to_buffer
        return function if "dl_device_type" in (function.__doc__ or "") else False
    except (ImportError, AttributeError):
        return False


def _find_export() -> Any:
    """jaxlib's function behind ``__dlpack__``, or that method."""
    try:
        from jaxlib import _jax

        return _jax.buffer_to_dlpack_managed_tensor
    except (ImportError, AttributeError):
        return lambda x, stream: x.__dlpack__(stream=stream)


register(JaxAdapter())
