"""Where Vulkan's functions come from: the loader, or the caller's vkGetInstanceProcAddr. Errors are exceptions. Knows no device.

A `Table` has functions as attributes. Whatever has the same attributes may stand in for one: the tests' fake drivers do.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from interop.contract import DeviceLostError, ExchangeError

from . import api as vk
from . import handles

#: The loader's name on Linux, as LoaderInterfaceArchitecture.md has it.
LIBRARY = "libvulkan.so.1"

_OUT_OF_MEMORY = frozenset({-1, -2, -1000069000, -12, -1000161000})     # host, device, pool, fragmented pool, fragmentation
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def generation() -> int:
    """How many forks lie between this process and the one that imported this: objects of an older one are not ours."""
    return _forks


class VulkanError(ExchangeError):
    """What the driver refused; `code` is its own name for it, such as ``"VK_ERROR_INVALID_EXTERNAL_HANDLE"``, or a number as text."""

    code: str

    def __init__(self, reason: str = "", remedy: str | None = None, code: str = "") -> None:
        """Keep the code beside reason and remedy."""
        super().__init__(reason, remedy)
        self.code = code


class OutOfMemory(VulkanError, MemoryError):
    """Memory of the host, of the device or of a pool has run out (VK_ERROR_OUT_OF_..., VK_ERROR_FRAGMENTATION)."""


def check(result: int, what: str) -> int:
    """The VkResult of a call named `what`, where it is no error: VK_SUCCESS, VK_TIMEOUT, VK_NOT_READY, VK_INCOMPLETE and the like.

    Raises:
        DeviceLostError: VK_ERROR_DEVICE_LOST.
        OutOfMemory: a MemoryError and a VulkanError.
        VulkanError: any other negative code, known or not (Vulkan, Return Codes).
    """
    if result < 0:
        _raise(result, what)
    return result


def _raise(result: int, what: str) -> NoReturn:
    code = vk.RESULTS.get(result, str(result))
    if result == vk.VK_ERROR_DEVICE_LOST:
        raise DeviceLostError(f"{what}: VK_ERROR_DEVICE_LOST; nothing on this VkDevice can be waited for")
    if result in _OUT_OF_MEMORY:
        raise OutOfMemory(f"{what}: {code}", "close or drop what is no longer needed", code)
    raise VulkanError(f"{what}: {code}", code=code)


class Table:
    """Functions as attributes, looked up at first use. A call releases the GIL.

    An attribute is an ExchangeError where the driver has no such function, an AttributeError where `api` does not declare it.
    """

    def __init__(self, find: Callable[[bytes], int], what: str, extensions: Iterable[str] = ()) -> None:
        """`find` gives the address of a function by name, or 0; `extensions` are those that are enabled; `what` is for errors."""
        self._find, self._what, self._extensions = find, what, frozenset(extensions)

    def __getattr__(self, name: str) -> Any:
        """Look up, once."""
        declared = vk.FUNCTIONS.get(name)
        if declared is None:
            raise AttributeError(f"{name}: adapters/vulkan/api.py declares no such function (tools/generate_vulkan.py)")
        # Under the name of an extension that is on, a function is there for certain. Under the core's only if the version is high enough,
        # which nobody can ask of a device that somebody else made, and the pointer is not NULL where it is not.
        enabled = [alias for extension, alias in declared.aliases.items() if extension in self._extensions]
        for spelling in (*enabled, name, *declared.aliases.values()):
            address = self._find(spelling.encode())
            if address:
                function = ctypes.CFUNCTYPE(declared.restype, *declared.argtypes)(address)
                setattr(self, name, function)
                return function
        raise ExchangeError(f"{name}: {self._what} has no such function",
                            f"it comes with {declared.since}{''.join(f' or {e}' for e in declared.aliases)}")

    def __repr__(self) -> str:
        return f"<Table of {self._what}>"


class Driver:
    """Tables by handle: of a loader, or of the functions that the caller gave.

    A fake driver has ``table``, ``instance(handle)`` and ``device(instance, handle, extensions)`` which give objects with the functions.
    """

    def __init__(self, get_instance_proc_addr: Any = None, get_device_proc_addr: Any = None) -> None:
        """Functions as an address, a ctypes function or cffi's; None: the loader's. ExchangeError: there is no loader."""
        if get_instance_proc_addr is None:
            get_instance_proc_addr = _library().vkGetInstanceProcAddr
        self._keep = get_instance_proc_addr, get_device_proc_addr
        find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        self._get = find(handles.address(get_instance_proc_addr, "get_instance_proc_addr"))
        self._get_device = None if get_device_proc_addr is None else find(handles.address(get_device_proc_addr, "get_device_proc_addr"))
        self.table: Any = Table(lambda name: self._get(None, name) or 0, "the Vulkan loader")

    def instance(self, instance: int, extensions: Iterable[str] = ()) -> Any:
        """The functions of a VkInstance and its physical devices."""
        return Table(lambda name: self._get(instance, name) or 0, "this VkInstance", extensions)

    def device(self, instance: int, device: int, extensions: Iterable[str] = ()) -> Any:
        """The functions of a VkDevice, past the loader's dispatch."""
        get = self._get_device
        if get is None:
            found = self._get(instance, b"vkGetDeviceProcAddr")
            if not found:
                raise ExchangeError("vkGetInstanceProcAddr gives no vkGetDeviceProcAddr", "pass get_device_proc_addr=")
            get = type(self._get)(found)
        return Table(lambda name: get(device, name) or 0, "this VkDevice", extensions)


_lock = threading.Lock()
_loaded: list[Any] = []


def _library() -> Any:
    with _lock:
        if not _loaded:
            try:
                _loaded.append(ctypes.CDLL(LIBRARY))
            except OSError:
                raise ExchangeError(f"no Vulkan loader: {LIBRARY} is not on this machine",
                                    "install libvulkan1 (Debian, Ubuntu) or vulkan-loader, and a driver") from None
        return _loaded[0]


def missing() -> str | None:
    """Why there is no loader; None: there is. Loads it; says nothing of drivers."""
    try:
        _library()
    except ExchangeError as e:
        return str(e)
    return None


def enumerate_all(function: Callable[..., Any], item: Any, *first: Any) -> list[Any]:
    """What a function gives that is asked twice, for the count and for the array; again while it says VK_INCOMPLETE."""
    count = ctypes.c_uint32()
    what = getattr(function, "__name__", "vkEnumerate")
    while True:
        check(function(*first, ctypes.byref(count), None) or 0, what)
        array = (item * count.value)()
        if check(function(*first, ctypes.byref(count), array) or 0, what) != vk.VK_INCOMPLETE:
            return list(array[:count.value])
