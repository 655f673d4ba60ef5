"""Which adapters there are, and what a user's word for a target means. The Python face of the core's type cache; imports no framework."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
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
_SHIPPED = ("torch", "jax", "cupy", "cuda")
_READS = ("adapter", "dlpack", "buffer", "table")
_entry_points_loaded = False


def register(adapter: Adapter) -> None:
    """Make an adapter known. Checked here, so that a mistake is found now and not at the first conversion.

    Raises:
        TypeError: a required attribute or method is missing or has the wrong type; the message names it.
        ValueError: another adapter has this name or one of these types.
    """
    cls = type(adapter)
    name = getattr(adapter, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{cls.__qualname__}.name is {name!r}: it must be an identifier, such as 'torch'")
    # an adapter of its own overrides the method; the base only says what is missing
    from .contract import Adapter

    if not isinstance(adapter, Adapter):
        raise TypeError(f"{cls.__qualname__} does not derive from interop.contract.Adapter")
    if isinstance(adapter.types, str) or not all(isinstance(t, str) and "." in t for t in adapter.types):
        raise TypeError(f"{cls.__qualname__}.types is {adapter.types!r}: it must be a tuple of 'module.Qualname'")
    if adapter.reads not in _READS:
        raise TypeError(f"{cls.__qualname__}.reads is {adapter.reads!r}: it must be one of {', '.join(_READS)}")
    if adapter.reads == "adapter" and cls.to_tensor is Adapter.to_tensor:
        raise TypeError(f"{cls.__qualname__} lacks to_tensor(x), which reads='adapter' calls")
    if cls.from_tensor is Adapter.from_tensor and adapter.table is None:
        raise TypeError(f"{cls.__qualname__} lacks from_tensor(t, *, place=None, stream=None)")
    if name in _by_name or name in ("interop", "numpy"):
        raise ValueError(f"an adapter named {name!r} is registered already")
    taken = [t for t in adapter.types if t in _by_type_name]
    if taken:
        raise ValueError(f"adapter {name!r}: {taken[0]} belongs to adapter {_by_type_name[taken[0]].name!r}")
    if not adapter.exact:
        adapter.exact = adapter.types  # type: ignore[misc]
    _by_name[name] = adapter
    for t in adapter.types:
        _by_type_name[t] = adapter
    _core.forget_types()


def unregister(name: str) -> None:
    """Forget an adapter; for tests and notebooks."""
    adapter = _by_name.pop(name)
    for t in adapter.types:
        _by_type_name.pop(t, None)
    _core.forget_types()


def names() -> list[str]:
    """What `interop.to` takes as a framework's name, installed or not."""
    return ["interop", "numpy", *_by_name]


def installed(name: str) -> bool:
    """Whether the framework behind an adapter can be imported. Does not import it."""
    if name in ("interop", "numpy"):
        return True
    adapter = _by_name.get(name)
    module = name if adapter is None else adapter.module or adapter.name
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _load_entry_points() -> None:
    # Third parties: group "interop.adapters", each entry an Adapter or a callable that registers. Only read once something is unknown.
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry in entry_points(group="interop.adapters"):
        if entry.name in _by_name:
            continue
        found = entry.load()
        if callable(found):
            found = found()
        if found is not None and entry.name not in _by_name:
            register(found)


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
    _load_entry_points()
    for adapter in list(_by_name.values()):
        device = adapter.place(key)
        if device is not None:
            return _target(adapter, place=device, native_place=key)
    raise TypeError(f"{key!r} names no target: give a framework's name or module, a type, or a device")


def _resolve_name(name: str) -> Any:
    if name in ("interop", "numpy"):
        return _core.make_target(name, "tensor" if name == "interop" else "numpy")
    if name in _by_name:
        return _target(_by_name[name])
    if name.partition(":")[0] in device_names.NUMBERS:
        return _core.make_target("interop", "tensor", place=_core.Device(name))
    _load_entry_points()
    if name in _by_name:
        return _target(_by_name[name])
    if name.isidentifier() and importlib.util.find_spec(name) is not None:
        module = importlib.import_module(name)
        if hasattr(module, "from_dlpack"):
            return _core.make_target(name, "call", call=module.from_dlpack)
    known = [*names(), *device_names.NUMBERS]
    near = difflib.get_close_matches(name, known, 1)
    raise ValueError(f"unknown target {name!r}" + (f": did you mean {near[0]!r}?" if near else f": known are {', '.join(known)}, "
                     "and any module or class with from_dlpack"))


def _resolve_module(module: ModuleType) -> Any:
    root = module.__name__.partition(".")[0]
    if root in ("interop", "numpy") or root in _by_name:
        return _resolve_name(root)
    if hasattr(module, "from_dlpack"):
        return _core.make_target(module.__name__, "call", call=module.from_dlpack)
    raise ValueError(f"module {module.__name__} has no from_dlpack and no adapter")


def _resolve_type(cls: type) -> Any:
    name = _core.framework_of_type(cls)
    if name is not None:
        return _resolve_name(name)
    if callable(getattr(cls, "from_dlpack", None)):
        return _core.make_target(cls.__qualname__, "call", call=cls.from_dlpack)
    root = sys.modules.get(cls.__module__.partition(".")[0])
    if root is not None and hasattr(root, "from_dlpack"):
        return _core.make_target(root.__name__, "call", call=root.from_dlpack)
    raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no target: it has no from_dlpack, nor has its package, and no adapter knows it")


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


_core.set_registry(_by_type_name, _by_name, resolve)


def load_shipped() -> None:
    """Register the adapters in `interop.adapters`. They are small and import no framework."""
    for name in _SHIPPED:
        importlib.import_module(f"interop.adapters.{name}")
