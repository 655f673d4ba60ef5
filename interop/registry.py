"""Which adapters there are, and what a user's word for a target means. The Python face of the core's type cache; imports no framework."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import warnings
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import _core
from . import device as device_names

if TYPE_CHECKING:
    from .contract import Adapter

#: Adapters that come with interop: name -> module that registers it. Imported when the name is asked for.
_by_name: dict[str, Any] = {}
_by_type_name: dict[str, Any] = {}
_by_device: dict[str, Any] = {}
_SHIPPED = ("torch", "jax", "tvm_ffi", "cupy", "cuda", "vulkan", "opencl")
_READS = ("adapter", "dlpack", "buffer", "table", "attributes")
_plugins_loaded = False


def register(adapter: Adapter) -> None:
    """Make an adapter known. Checked here, so that a mistake is found now and not at the first conversion.

    Raises:
        TypeError: an attribute or method is missing or has the wrong type; the message names it.
        ValueError: another adapter, or interop itself, has this name, one of these types or this device.
    """
    _check_adapter(adapter)
    name = adapter.name
    if name in _by_name or name in ("interop", "numpy"):
        raise ValueError(f"an adapter named {name!r} is registered already")
    if device_names.known(name) and adapter.device != name:
        raise ValueError(f"{name!r} is the name of a device: an adapter of that name must own it (device = {name!r})")
    for t in adapter.types:
        if t in _by_type_name or t in _OWN_TYPES:
            owner = _by_type_name[t].name if t in _by_type_name else "numpy" if t.startswith("numpy") else "interop"
            raise ValueError(f"adapter {name!r}: {t} belongs to {owner!r}")
    if adapter.device and adapter.device in _by_device:
        raise ValueError(f"adapter {name!r}: devices named {adapter.device!r} belong to {_by_device[adapter.device].name!r}")
    if not adapter.exact:
        adapter.exact = adapter.types  # type: ignore[misc]
    if adapter.device:
        device_names.register(adapter.device)
        _by_device[adapter.device] = adapter
    _by_name[name] = adapter
    for t in adapter.types:
        _by_type_name[t] = adapter
    _core.forget_types()


_OWN_TYPES = ("numpy.ndarray", "interop.Tensor", "builtins.PyCapsule")
_MAX_GUARDS = 8
#: How the methods of an adapter are called: positional and keyword arguments, by name only.
_CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "to_tensor": (("x",), {}), "from_tensor": (("t",), {"place": None, "stream": None}), "place": (("obj",), {}),
    "limits": (("place",), {}), "allocate": (("nbytes",), {"place": None, "alignment": 1, "shared_with": ()}),
    "export_handle": (("allocation", "kind"), {}), "import_handle": (("handle",), {"place": None}),
    "importable": (("kind",), {"place": None}), "map": (("allocation", "access", "first", "nbytes"), {}),
    "copy": (("dst", "src", "stream"), {}), "wait": (("place", "stream", "point"), {}), "record": (("place", "stream"), {}),
    "to_device": (("x", "device"), {}), "native_fields": (("allocation",), {}), "fresh": (("t", "device"), {}),
    "home": ((), {}), "exports_of": (("allocation",), {}), "host_view": (("allocation",), {}), "queue_of": (("x",), {}),
    "current_stream": (("device",), {}), "stream_capsule": ((), {}), "to_capsule": (("x", "stream"), {}),
}  # fmt: skip


def _check_adapter(adapter: Any) -> None:
    from .contract import CAPABILITIES, Adapter, Attributes, Guard, Limits

    cls = type(adapter)

    def bad(attribute: str, want: str) -> TypeError:
        return TypeError(f"{cls.__qualname__}.{attribute} is {getattr(adapter, attribute, None)!r}: it must be {want}")

    if not isinstance(adapter, Adapter):
        raise TypeError(f"{cls.__qualname__} does not derive from interop.contract.Adapter")
    name = getattr(adapter, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise bad("name", "an identifier, such as 'torch'") if hasattr(adapter, "name") else TypeError(f"{cls.__qualname__} lacks name")
    for attribute in ("types", "exact"):
        value = getattr(adapter, attribute)
        if not isinstance(value, (tuple, list)) or not all(isinstance(t, str) and "." in t for t in value):
            raise bad(attribute, "a tuple of 'module.Qualname'")
    for attribute in ("module", "requires", "device"):
        if not isinstance(getattr(adapter, attribute), str):
            raise bad(attribute, "a str")
    if adapter.device and (not adapter.device.isidentifier() or adapter.device in ("cpu", "cuda_host", "rocm_host", "ext_dev")):
        raise bad("device", "a name such as 'acme', not one of the host's")
    if adapter.table is not None and not isinstance(adapter.table, str):
        raise bad("table", "the name of a type in the module, or None")
    if adapter.reads not in _READS:
        raise bad("reads", f"one of {', '.join(_READS)}")
    if not isinstance(adapter.guards, (tuple, list)) or not all(isinstance(g, Guard) for g in adapter.guards):
        raise bad("guards", "a tuple of contract.Guard")
    if len(adapter.guards) > _MAX_GUARDS:
        raise bad("guards", f"at most {_MAX_GUARDS} of them")
    limits = adapter.accepts
    if not isinstance(limits, Limits):
        raise bad("accepts", "a contract.Limits")
    for attribute in ("alignment", "granularity"):
        value = getattr(limits, attribute)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31 or value & (value - 1):
            raise TypeError(f"{cls.__qualname__}.accepts.{attribute} is {value!r}: it must be a power of two")
    for attribute in ("readonly", "writable", "negative_strides", "strided"):
        if not isinstance(getattr(limits, attribute), bool):
            raise TypeError(f"{cls.__qualname__}.accepts.{attribute} is {getattr(limits, attribute)!r}: it must be True or False")
    devices = limits.devices
    if devices is not None and (not isinstance(devices, frozenset) or not all(d in device_names.NAMES for d in devices)):
        raise TypeError(f"{cls.__qualname__}.accepts.devices is {limits.devices!r}: "
                        "it must be a frozenset of DLDeviceType numbers, or None")
    if adapter.reads == "adapter" and cls.to_tensor is Adapter.to_tensor:
        raise TypeError(f"{cls.__qualname__} lacks to_tensor(x), which reads='adapter' calls")
    if adapter.reads == "table" and adapter.table is None:
        raise TypeError(f"{cls.__qualname__} lacks table, which reads='table' needs")
    if adapter.reads == "attributes" and adapter.attributes is None:
        raise TypeError(f"{cls.__qualname__} lacks attributes, which reads='attributes' needs")
    if adapter.attributes is not None and not isinstance(adapter.attributes, Attributes):
        raise bad("attributes", "a contract.Attributes, or None")
    if cls.from_tensor is Adapter.from_tensor and adapter.table is None and (adapter.types or not adapter.device):
        raise TypeError(f"{cls.__qualname__} lacks from_tensor(t, *, place=None, stream=None)")
    for capability in CAPABILITIES:
        if not callable(getattr(adapter, capability, None) or int):
            raise bad(capability, "a method")
    for method, arguments in _CALLS.items():
        function = getattr(adapter, method, None)
        if function is not None and getattr(cls, method, None) is not getattr(Adapter, method, None):
            try:
                inspect.signature(function).bind(*arguments[0], **arguments[1])
            except TypeError as e:
                raise TypeError(f"{cls.__qualname__}.{method} cannot be called as interop calls it: {e}") from None


def unregister(name: str) -> None:
    """Forget an adapter; for tests and notebooks."""
    adapter = _by_name.pop(name)
    _by_device.pop(adapter.device, None)
    for t in adapter.types:
        _by_type_name.pop(t, None)
    _core.forget_types()


def names() -> list[str]:
    """What `interop.to` takes as a framework's name, installed or not."""
    return ["interop", "numpy", *_by_name]


def installed(name: str) -> bool:
    """Whether the framework behind an adapter can be imported, or its driver is here. Imports and opens nothing."""
    if name in ("interop", "numpy"):
        return True
    adapter = _by_name.get(name)
    says, lacks = missing(name)
    if says:
        return lacks is None
    module = name if adapter is None else adapter.module or adapter.name
    return _findable(module)


def missing(name: str) -> tuple[bool, str | None]:
    """``(says, what)``: whether an adapter knows what it takes beside modules, and what of that is not here."""
    adapter = _by_name.get(name)
    return (True, adapter.missing()) if adapter is not None and adapter.can("missing") else (False, None)


def load_plugins() -> bool:
    """Register what third parties offer: group ``interop.adapters``, each entry an Adapter, or a callable that gives or registers one.

    Once, when something is first unknown; one that is broken is warned of and does not hide the others. True where it looked.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return False
    _plugins_loaded = True
    for entry in entry_points(group="interop.adapters"):
        if entry.name in _by_name:
            continue
        try:
            found = entry.load()
            if callable(found):
                found = found()
            if found is not None and entry.name not in _by_name:
                register(found)
        except Exception as e:
            warnings.warn(f"interop: the adapter plug-in {entry.name} ({entry.value}) could not be loaded: {e!r}",
                          RuntimeWarning, stacklevel=2)
    return True


def requirement(name: str) -> str:
    """What to install for a framework that `names` lists."""
    adapter = _by_name.get(name)
    return name if adapter is None else adapter.requires or adapter.module or adapter.name


def resolve(key: Any) -> Any:
    """What a target means: a `_core.Target`. Called by the core once per key.

    Raises:
        ValueError: no such framework; the message has the near name.
        ImportError: the framework is known and not installed; the message says what to install.
        TypeError: the object names no target.
    """
    if isinstance(key, str):
        return _resolve_name(key)
    if isinstance(key, ModuleType):
        return _resolve_module(key)
    if isinstance(key, type):
        return _resolve_type(key)
    if isinstance(key, _core.Device):
        return _core.make_target("interop", "tensor", place=key)
    if (adapter := getattr(key, "adapter", None)) is not None and isinstance(getattr(key, "device", None), _core.Device):
        return _core.make_target("interop", "tensor", adapter=adapter, place=key.device, native_place=key)      # a Context
    load_plugins()
    for adapter in list(_by_name.values()):
        found = adapter.place(key)
        if found is not None:
            return _target(adapter, place=getattr(found, "device", found), native_place=key)
    raise TypeError(f"{key!r} names no target: give a framework's name or module, a type, or a device")


def _resolve_name(name: str) -> Any:
    if name in ("interop", "numpy"):
        return _core.make_target(name, "tensor" if name == "interop" else "numpy")
    if name in _by_name and (_by_name[name].types or _by_name[name].device != name):
        return _target(_by_name[name])
    if device_names.known(name.partition(":")[0]):
        return _core.make_target("interop", "tensor", place=_core.Device(name))
    load_plugins()
    if name in _by_name:
        return _target(_by_name[name])
    if name.isidentifier() and _findable(name):
        module = importlib.import_module(name)
        if hasattr(module, "from_dlpack"):
            return _core.make_target(name, "call", call=module.from_dlpack)
    known = [*names(), *device_names.NUMBERS]
    near = difflib.get_close_matches(name, known, 1)
    raise ValueError(f"unknown target {name!r}" + (f": did you mean {near[0]!r}?" if near else f": known are {', '.join(known)}, "
                     "and any module or class with from_dlpack"))


def _findable(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:         # a package above it
        return False


def _resolve_module(module: ModuleType) -> Any:
    root = module.__name__.partition(".")[0]
    if root not in _by_name and root not in ("interop", "numpy"):
        load_plugins()
    if root in ("interop", "numpy") or root in _by_name:
        return _resolve_name(root)
    if hasattr(module, "from_dlpack"):
        return _core.make_target(module.__name__, "call", call=module.from_dlpack)
    raise ValueError(f"module {module.__name__} has no from_dlpack and no adapter")


def _resolve_type(cls: type) -> Any:
    name = _core.framework_of_type(cls)
    if name is not None:
        spelled = f"{cls.__module__}.{cls.__qualname__}"
        if spelled not in (_by_name[name].types if name in _by_name else _OWN_TYPES):
            raise TypeError(f"{spelled} is a subclass of what {name} makes: ask for {name!r} and make the subclass of that")
        return _resolve_name(name)
    if callable(make := getattr(cls, "from_dlpack", None)):
        return _core.make_target(cls.__qualname__, "call", call=make)
    root = sys.modules.get(cls.__module__.partition(".")[0])
    if root is not None and hasattr(cls, "__dlpack__") and hasattr(root, "from_dlpack"):
        return _core.make_target(root.__name__, "call", call=root.from_dlpack)
    raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no target: neither it nor its package has from_dlpack, no adapter knows it")


def _target(adapter: Any, place: Any = None, native_place: Any = None) -> Any:
    name = adapter.module or adapter.name
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name.partition(".")[0]:
            raise
        raise ImportError(f"{adapter.name} is not installed: pip install {adapter.requires or name}", name=name) from None
    if adapter.table is not None:
        return _core.make_target(adapter.name, "table", adapter, getattr(module, adapter.table), place, native_place)
    return _core.make_target(adapter.name, "adapter", adapter, None, place, native_place)


device_names.find_more = load_plugins
_core.set_registry(_by_type_name, _by_name, resolve, load_plugins)


def load_shipped() -> None:
    """Register the adapters in `interop.adapters`. They are small and import no framework."""
    for name in _SHIPPED:
        importlib.import_module(f"interop.adapters.{name}")


def copies(device: Any) -> bool:
    """Whether an adapter copies memory of this device to and from the host."""
    adapter = adapter_of(device)
    return adapter is not None and bool(adapter.can("copy"))


def expect(adapter: Any, method: str, value: Any, kind: type) -> Any:
    """What a method of an adapter returned, if it is what the contract says; else a TypeError that names adapter and method."""
    if not isinstance(value, kind):
        raise TypeError(f"adapter {adapter.name}: {method} returned {value!r}, not {kind.__name__}")
    return value


# ---- memory: which adapter is asked for a device, a place, a party ----
def adapter_of(device: Any) -> Any:
    """The adapter whose devices these are, or None: host memory, or nobody's."""
    return _by_device.get(device.name)


def context_of(place: Any) -> tuple[Any, Any]:
    """``(adapter, where)`` of a place or target: `where` is its Context, or its Device; adapter None: the host, or a framework."""
    if isinstance(place, str) and (place in _by_name or not device_names.known(place.partition(":")[0])):
        return _by_name.get(place), None
    if isinstance(place, (str, tuple)):
        place = _core.Device(place)
    if isinstance(place, _core.Device):
        return adapter_of(place), place
    owner = getattr(place, "adapter", None)
    if owner is not None and isinstance(getattr(place, "device", None), _core.Device):
        return owner, place
    if isinstance(place, type):
        return _by_name.get(_core.framework_of_type(place) or ""), None
    if isinstance(place, ModuleType):
        return _by_name.get(place.__name__.partition(".")[0]), None
    for adapter in list(_by_name.values()):
        found = adapter.place(place)
        if found is not None:
            if getattr(found, "adapter", None) is not adapter:      # else a Context, which says more
                expect(adapter, "place", found, _core.Device)
                found = place if adapter.device else found
            return (adapter if adapter.device else None), found
    raise TypeError(f"{place!r} is no place: give a Device, its spelling, a Context, or a framework's device or queue")


def place_of(place: Any) -> tuple[Any, Any]:
    """`context_of` for what must be a place: a framework's name is none, and a misspelt one is not the CPU."""
    if isinstance(place, str):
        place = _core.Device(place)     # raises for what is none
    adapter, where = context_of(place)
    if where is None:
        raise TypeError(f"{place!r} is no place: give a Device, its spelling, a Context, or a framework's device or queue")
    return adapter, where


def party_limits(party: Any) -> Any:
    """The `Limits` of somebody who is to share memory: a framework's name or a place."""
    from .contract import Limits

    if isinstance(party, str) and party in ("interop", "numpy"):
        return Limits()
    if isinstance(party, str) and party in _by_name:
        return _by_name[party].accepts
    adapter, where = context_of(party)
    if adapter is not None:
        return expect(adapter, "limits", adapter.limits(where), Limits) if adapter.can("limits") else adapter.accepts
    if where is not None:
        return Limits()
    resolve(party)          # raises for what is unknown
    name = _core.framework_of_type(party) if isinstance(party, type) else None
    return _by_name[name].accepts if name in _by_name else Limits()
