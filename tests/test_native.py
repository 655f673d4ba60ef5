"""The side channel, ``__interop_native__``: its layout, ownership, versions, readiness, mapping twin, and how it joins DLPack.

A C library that is compiled here (native_client.c, with interop_native.h and nothing else of interop) produces and consumes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import interop
from interop import _core, contract, native, points, registry
from interop import testing as it
from interop.testing import Forged, ForgedNative, NativeCapsule, NativeProducer

HERE = Path(__file__).resolve().parent
EXT = (it.EXT_DEV, 0)
HANDLE = 0xD00D0000


def clean() -> None:
    for _ in range(3):
        gc.collect()


def device_tensor(elements: int = 4, *, byte_offset: int = 0, device: tuple[int, int] = EXT, data: int = HANDLE, **more: Any) -> Forged:
    return Forged((elements,), device=device, data=data, byte_offset=byte_offset, **more)


def owned(nbytes: int = 64, device: str = "ext_dev:0", handle: int = HANDLE, **more: Any) -> interop.Allocation:
    return interop.Allocation(handle, nbytes, device, **more)


class Gate:
    """A piece of work that ends when it is told to, and the Point of that."""

    def __init__(self, form: Any = None) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.point = points.point(done=self._done, wait=lambda seconds: self.over.wait(seconds), native=form)

    def _done(self) -> bool:
        if self.over.is_set() and self.error is not None:
            raise self.error
        return self.over.is_set()


# ---- the C library -----------------------------------------------------------------------------------------------------------------


class Seen(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("device_type", "device_id", "memory_type")),
        *((name, ctypes.c_uint32) for name in ("ready_kind", "queue_family")),
        *((name, ctypes.c_uint64) for name in ("flags", "handle", "nbytes", "memory", "memory_nbytes", "memory_offset", "context",
                                               "struct_size")),
        *((name, ctypes.c_int) for name in ("looked", "waited")),
        *((name, ctypes.c_uint8) for name in ("first", "last")),
    ]


def build(folder: Path) -> Path:
    library = folder / "native_client.so"
    subprocess.run(
        [shutil.which("gcc") or "gcc", "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden",
         "-isystem", sysconfig.get_path("include"), "-isystem", sysconfig.get_path("platinclude"), "-I", contract.get_include(),
         str(HERE / "native_client.c"), "-o", str(library), "-lpthread"],
        check=True,
    )
    return library


def load(library: Path) -> ctypes.PyDLL:
    lib = ctypes.PyDLL(str(library))
    lib.device_new.restype = ctypes.c_void_p
    lib.device_new.argtypes = [ctypes.c_uint64, ctypes.c_int]
    lib.device_handle.restype = ctypes.c_uint64
    for name in ("device_handle", "device_finish", "device_fail", "device_free", "device_references", "device_natives_deleted",
                 "device_tensors_deleted", "device_waits"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    lib.make_native.restype = lib.make_dlpack.restype = lib.consume_native.restype = ctypes.py_object
    lib.make_native.argtypes = [ctypes.c_void_p]
    lib.make_dlpack.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64]
    lib.consume_native.argtypes = [ctypes.py_object, ctypes.POINTER(Seen), ctypes.c_int]
    lib.wait_with_error.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.native_layout.restype = lib.native_constants.restype = ctypes.c_char_p
    return lib


@pytest.fixture(scope="module")
def client_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    return build(tmp_path_factory.mktemp("native_client"))


@pytest.fixture(scope="module")
def client(client_library: Path) -> ctypes.PyDLL:
    return load(client_library)


class ClientBuffer:
    """An object of the C library: DLPack and the side channel, both made in C."""

    def __init__(self, client: ctypes.PyDLL, nbytes: int, *, elements: int, byte_offset: int = 0, done: bool = True) -> None:
        self.client, self.elements, self.byte_offset = client, elements, byte_offset
        self.device = client.device_new(nbytes, done)

    def __dlpack__(self, *, max_version: Any = None, **_: Any) -> Any:
        return self.client.make_dlpack(self.device, self.elements, self.byte_offset)

    def __dlpack_device__(self) -> tuple[int, int]:
        return EXT

    def __interop_native__(self, *, max_version: Any) -> Any:
        return self.client.make_native(self.device)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.client, f"device_{name}")
        return lambda: function(self.device)


@pytest.fixture
def buffer(client: ctypes.PyDLL) -> Iterator[Callable[..., ClientBuffer]]:
    made: list[ClientBuffer] = []

    def make(nbytes: int, **keywords: Any) -> ClientBuffer:
        made.append(ClientBuffer(client, nbytes, **keywords))
        return made[-1]

    yield make
    clean()
    for b in made:
        assert b.references() == 1, "something still holds the memory"
        b.free()


# ---- layout: N-ABI -----------------------------------------------------------------------------------------------------------------


def pairs(text: bytes) -> dict[str, int]:
    return {name: int(value) for name, _, value in (word.partition("=") for word in text.decode().split())}


def test_header_core_and_inspector_agree_on_every_offset(client: ctypes.PyDLL) -> None:
    """N-ABI-1."""
    header = pairs(client.native_layout())
    assert header["sizeof"] == 264 and len(header) == 28
    assert header == it.native_layout() == _core.native_layout()


def test_header_and_inspector_agree_on_every_constant(client: ctypes.PyDLL) -> None:
    """N-ABI-2."""
    constants = pairs(client.native_constants())
    assert {"readonly" if name == "READ_ONLY" else name.lower(): constants[name] for name in (
        "READ_ONLY", "HOST_VISIBLE", "COHERENT", "CACHED", "DEDICATED", "HANDLE_IS_POINTER", "PARTIAL")} == it.NATIVE_FLAGS
    assert (constants["HAS_DEVICE_UUID"], constants["HAS_DRIVER_UUID"]) == (1 << 7, 1 << 8)
    kinds = ("READY", "HOST_WAIT", "TIMELINE", "CL_EVENT", "CUDA_EVENT", "BY_STREAM")
    assert [constants[name] for name in kinds] == list(range(len(it.NATIVE_READY)))
    assert [constants[f"WAIT_{name}"] for name in ("DONE", "TIMEOUT", "FAILED", "INTERRUPTED")] == [0, 1, -1, -2]
    assert (constants["MAJOR"], constants["MINOR"]) == it.NATIVE_VERSION and constants["V1_SIZE"] == 264


@pytest.mark.parametrize(("compiler", "standard"), [("gcc", "c99"), ("gcc", "c11"), ("gcc", "c17"), ("g++", "c++11"), ("g++", "c++20")])
def test_header_compiles_by_itself_without_a_warning(tmp_path: Path, compiler: str, standard: str) -> None:
    """N-ABI-3."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    source = tmp_path / ("use.cpp" if compiler == "g++" else "use.c")
    source.write_text('#include "interop_native.h"\n#include "interop_native.h"\n'
                      "int use(InteropNativeV1 *n);\n"
                      "int use(InteropNativeV1 *n) {\n"
                      "    interop_native_init(n);\n"
                      "    return interop_native_readable(n) + interop_native_wait(n, 0);\n}\n")
    subprocess.run([compiler, f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fsyntax-only",
                    "-I", contract.get_include(), str(source)], check=True)


def test_get_include_has_the_header() -> None:
    """N-ABI-4."""
    folder = Path(contract.get_include())
    assert folder == Path(interop.__file__).parent / "include"
    assert "InteropNativeV1" in (folder / "interop_native.h").read_text()


@pytest.mark.parametrize("name", list(it.NATIVE_FLAGS))
def test_core_reads_each_flag_as_the_inspector_writes_it(name: str) -> None:
    """N-ABI-2."""
    forged = ForgedNative(flags=it.NATIVE_FLAGS[name])
    assert _core.read_native(forged.capsule())["flags"] == {name}


def test_our_capsule_has_a_zero_tail_and_the_size_of_version_one() -> None:
    """N-ABI-5."""
    fields = NativeCapsule.of(interop.as_tensor(np.zeros(3))).fields
    assert fields["version"] == (1, 0) and fields["struct_size"] == 264
    assert fields["reserved"] == (0,) * 8 and fields["ready_padding"] == 0


# ---- what we say: N-SAY ------------------------------------------------------------------------------------------------------------


def test_host_memory_of_others_is_described_as_far_as_it_is_known() -> None:
    """N-SAY-1."""
    array = np.arange(12, dtype=np.float32)
    said = NativeCapsule.of(interop.as_tensor(array)[4:8]).fields
    assert (said["device_type"], said["device_id"]) == (it.CPU, 0)
    assert (said["handle"], said["nbytes"]) == (array.ctypes.data, 48)
    flags = it.NATIVE_FLAGS
    assert said["flags"] == sum(flags[n] for n in ("host_visible", "coherent", "cached", "handle_is_pointer", "partial"))
    assert (said["memory_type"], said["queue_family"], said["ready_kind"], said["wait"]) == (-1, 0xFFFFFFFF, 0, 0)


def test_whole_allocation_is_described_from_any_view() -> None:
    """N-SAY-2."""
    a = owned(4096, traits=("host_visible", "dedicated", "pinned"))
    said = native.describe(a.tensor((4,), "float32", byte_offset=1024))
    assert (said["handle"], said["nbytes"], said["flags"]) == (HANDLE, 4096, {"host_visible", "dedicated"})


def test_readonly_of_view_and_of_allocation_is_said() -> None:
    """N-SAY-3."""
    assert "readonly" in native.describe(owned().tensor(4, "float32", readonly=True))["flags"]
    assert "readonly" in native.describe(owned(readonly=True).tensor(4, "float32"))["flags"]
    assert "readonly" not in native.describe(owned().tensor(4, "float32"))["flags"]


class Toy(contract.Adapter):
    name = "native_toy"
    device = "native_toy"
    types = ("nobody.Array",)
    extra: dict[str, Any]

    def from_tensor(self, t: Any, *, place: Any = None, stream: Any = None) -> Any:
        return t

    def native_fields(self, allocation: Any) -> dict[str, Any]:
        return self.extra


@pytest.fixture
def toy() -> Iterator[Toy]:
    adapter = Toy()
    registry.register(adapter)
    yield adapter
    registry.unregister(adapter.name)


def test_adapter_fills_in_what_only_it_knows(toy: Toy) -> None:
    """N-SAY-4."""
    toy.extra = {"memory": 7, "memory_nbytes": 1 << 20, "memory_offset": 512, "memory_type": 2, "queue_family": 0, "context": 9,
                 "physical_device": 10, "instance": 11, "queue": 12, "device_uuid": b"d" * 16, "driver_uuid": b"v" * 16}
    t = owned(device="native_toy:1", adapter=toy).tensor(4, "float32")
    assert set(toy.extra) == set(native.ADAPTER_FIELDS)
    assert toy.extra.items() <= native.describe(t).items()
    stored = NativeCapsule.of(t).fields
    assert stored["device_uuid"] == b"d" * 16 and stored["flags"] >> 7 == 3


def test_adapter_that_fills_in_something_else_is_told(toy: Toy) -> None:
    """N-SAY-4."""
    toy.extra = {"handle": 1}
    with pytest.raises(TypeError, match="native_fields returned handle"):
        native.describe(owned(device="native_toy:1", adapter=toy).tensor(4, "float32"))


# ---- ownership: N-OWN --------------------------------------------------------------------------------------------------------------


class Owner:
    gone = 0

    def __del__(self) -> None:
        Owner.gone += 1


@pytest.fixture
def lent_memory() -> Iterator[tuple[interop.Allocation, interop.Tensor]]:
    a = owned()
    yield a, a.tensor(4, "float32")
    assert a.lent_out == 0
    a.close()


def test_unconsumed_capsule_lets_go(lent_memory: Any) -> None:
    """N-OWN-1."""
    a, t = lent_memory
    capsule = t.__interop_native__()
    assert a.lent_out == 1
    with pytest.raises(interop.ExchangeError, match="1 export"):
        a.close()
    del capsule
    assert a.lent_out == 0


def test_consumed_capsule_lets_go_of_nothing(lent_memory: Any) -> None:
    """N-OWN-1, N-OWN-2."""
    a, t = lent_memory
    capsule = NativeCapsule.of(t)
    taken = capsule.consume()
    assert capsule.name == "used_interop_native_v1" and capsule.consumed
    del capsule
    assert a.lent_out == 1
    taken.delete()


@pytest.mark.parametrize("how", ["gil", "no gil", "pthread"])
def test_our_deleter_runs_from_anywhere(lent_memory: Any, how: str) -> None:
    """N-OWN-3."""
    taken = NativeCapsule.of(lent_memory[1]).consume()
    if how == "pthread":
        taken.delete_from_pthread()
    else:
        taken.delete(gil=how == "gil")


def test_description_keeps_the_memory_until_its_owner_goes() -> None:
    """N-OWN-4."""
    Owner.gone = 0
    said = native.describe(owned(owner=Owner()).tensor(4, "float32"))
    clean()
    assert Owner.gone == 0
    owner = said.pop("owner")
    said.clear()
    clean()
    assert Owner.gone == 0 and "InteropNativeV1" in repr(owner)
    del owner
    clean()
    assert Owner.gone == 1


def test_wait_function_keeps_what_it_needs() -> None:
    """N-OWN-4."""
    forged = ForgedNative(wait=lambda timeout_ns: int(timeout_ns == 0), ready_kind="host")
    wait = _core.read_native(forged.capsule())["wait"]
    clean()
    assert (wait(0), wait(5), forged.deleted) == (1, 0, 0)
    del wait
    assert forged.deletions == (1,)


def test_reading_runs_the_deleter_once_when_the_owner_goes() -> None:
    """N-OWN-2."""
    forged = ForgedNative()
    capsule = forged.capsule()
    said = _core.read_native(capsule)
    assert NativeCapsule(capsule).consumed
    del capsule
    assert forged.deleted == 0
    del said
    assert forged.deletions == (1,)


def test_capsule_is_read_once() -> None:
    """N-OWN-2."""
    forged = ForgedNative()
    capsule = forged.capsule()
    kept = _core.read_native(capsule)
    with pytest.raises(interop.ExchangeError, match="already consumed"):
        _core.read_native(capsule)
    assert forged.deleted == 0
    del kept
    assert forged.deletions == (1,)


def test_of_many_threads_one_reads() -> None:
    """N-OWN-2."""
    forged = ForgedNative()
    for _ in range(50):
        capsule, won = forged.capsule(), []

        def read(capsule: Any = capsule, won: list[Any] = won) -> None:
            with contextlib.suppress(interop.ExchangeError):
                won.append(_core.read_native(capsule)["handle"])

        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert won == [HANDLE]
        del capsule
    assert set(forged.deletions) == {1}


@pytest.mark.parametrize("name", ["dltensor", "interop_native_v2", None, ""])
def test_capsule_with_another_name_is_a_type_error_and_stays_whole(name: str | None) -> None:
    """N-OWN-2."""
    forged = ForgedNative()
    capsule = forged.capsule(name)
    with pytest.raises(TypeError, match="is no side channel"):
        _core.read_native(capsule)
    assert NativeCapsule(capsule).name == name and forged.deleted == 0


def test_null_deleter_means_nothing_to_free() -> None:
    """N-OWN-5."""
    said = _core.read_native(ForgedNative(deleter="null", nbytes=5).capsule())
    assert said["nbytes"] == 5
    del said


def test_error_that_is_pending_survives_our_destructor() -> None:
    """N-OWN-3."""
    def fail() -> None:
        kept = NativeCapsule.of(owned(owner=Owner()).tensor(4, "float32"))
        assert not kept.consumed
        raise LookupError("mine")

    Owner.gone = 0
    with pytest.raises(LookupError, match="mine"):
        fail()
    clean()
    assert Owner.gone == 1


def test_refused_while_somebody_writes() -> None:
    """N-OWN-6."""
    t = interop.as_tensor(np.zeros(4))
    with t.map("write"):
        with pytest.raises(interop.LeaseError, match="write lease"):
            t.__interop_native__()
    assert NativeCapsule.of(t).fields["nbytes"] == 32


def test_refused_after_close() -> None:
    """N-OWN-6."""
    a = owned()
    t = a.tensor(4, "float32")
    a.close()
    with pytest.raises(interop.ExchangeError, match="was closed"):
        t.__interop_native__()


# ---- hostile fields: N-VALID -------------------------------------------------------------------------------------------------------

WAIT = {"wait": lambda timeout_ns: 0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": (0, 0)}, "side channel 0.0"),
    ({"version": (2, 0)}, "side channel 2.0"),
    ({"version": (2**32 - 1, 2**32 - 1)}, "interop reads major version 1"),
    ({"struct_size": 0}, "struct_size 0"),
    ({"struct_size": 263}, "struct_size 263"),
    ({"device_type": 0}, "unknown device type 0"),
    ({"device_type": 5}, "unknown device type 5"),
    ({"device_type": -1}, "unknown device type -1"),
    ({"device_type": 2**31 - 1}, "unknown device type"),
    ({"device_id": -1}, "device id -1"),
    ({"handle": 0}, "handle 0 with 64 bytes"),
    ({"nbytes": 2**63}, "nbytes 9223372036854775808: a wrapped negative"),
    ({"nbytes": 2**64 - 1}, "nbytes"),
    ({"memory_nbytes": 2**64 - 1}, "memory_nbytes"),
    ({"memory_offset": 2**64 - 1}, "memory_offset"),
    ({"memory_nbytes": 63}, "do not lie in a memory object of 63 bytes"),
    ({"memory_nbytes": 100, "memory_offset": 37}, "64 bytes at memory_offset 37"),
    ({"memory_nbytes": 100, "memory_offset": 2**63 - 1}, "memory_offset 9223372036854775807"),
    ({"memory_type": -2}, "memory_type -2"),
    ({"memory_type": -(2**31)}, "memory_type"),
    ({"device_type": it.CPU}, "handle_is_pointer is not set for memory on"),
    ({"device_type": it.CUDA}, "handle_is_pointer is not set for memory on"),
    ({"device_type": it.OPENCL, "flags": ("handle_is_pointer",)}, "whose handles are opaque"),
    ({"device_type": it.VULKAN, "flags": ("handle_is_pointer",)}, "whose handles are opaque"),
    ({"device_type": it.CPU, "flags": ("handle_is_pointer",), "handle": 2**64 - 8}, "past the address space"),
    ({"ready_kind": "host"}, "without a wait function"),
    ({"ready_kind": "timeline", "ready_handle": 1}, "without a wait function"),
    ({"ready_kind": 6}, "ready_kind 6 without a wait function"),
    ({"ready_kind": 2**32 - 1}, "without a wait function"),
    ({"ready_kind": "timeline", **WAIT}, "timeline with ready_handle 0"),
    ({"ready_kind": "cl_event", **WAIT}, "cl_event with ready_handle 0"),
    ({"ready_kind": "cuda_event", **WAIT}, "cuda_event with ready_handle 0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_impossible_field_is_refused_and_the_deleter_runs_once(fields: dict[str, Any], message: str) -> None:
    """N-VALID-1, N-OWN-2."""
    forged = ForgedNative(**fields)
    capsule = forged.capsule()
    with pytest.raises(interop.ExchangeError, match=message):
        _core.read_native(capsule)
    assert forged.deletions == (1,)
    assert NativeCapsule(capsule).consumed


@pytest.mark.parametrize(
    ("fields", "message"), [r for r in REFUSED if "struct_size" not in r[0]], ids=lambda v: v if isinstance(v, str) else "")
def test_impossible_field_of_a_mapping_is_refused_by_the_same_check(fields: dict[str, Any], message: str) -> None:
    """N-VALID-1, N-MAP-2."""
    said = {"device_type": it.EXT_DEV, "device_id": 0, "handle": HANDLE, "nbytes": 64, **fields}
    with pytest.raises(interop.ExchangeError, match=message):
        _core.read_native_mapping(said, None)


FINE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"version": (1, 7), "struct_size": 2**63}, {"version": (1, 7)}),
    ({"flags": 2**64 - 1 - (1 << 5)}, {"flags": set(it.NATIVE_FLAGS) - {"handle_is_pointer"}}),
    ({"device_type": it.EXT_DEV, "flags": ("handle_is_pointer",)}, {"flags": {"handle_is_pointer"}}),
    ({"handle": 0, "nbytes": 0}, {"handle": 0, "nbytes": 0}),
    ({"handle": 2**64 - 1, "nbytes": 2**63 - 1}, {"handle": 2**64 - 1, "nbytes": 2**63 - 1}),
    ({"device_type": it.CPU, "flags": ("handle_is_pointer",), "handle": 2**64 - 65}, {"handle": 2**64 - 65}),
    ({"memory_nbytes": 100, "memory_offset": 36}, {"memory_offset": 36}),
    ({"memory_type": 2**31 - 1, "queue_family": 2**32 - 2}, {"memory_type": 2**31 - 1, "queue_family": 2**32 - 2}),
    ({}, {"memory_type": None, "queue_family": None, "device_uuid": None, "driver_uuid": None, "wait": None, "ready_kind": "ready"}),
    ({"device_uuid": b"\0" * 16, "driver_uuid": b"\0" * 16}, {"device_uuid": None, "driver_uuid": None}),
    ({"flags": 0, "device_uuid": b"x" * 16}, {"device_uuid": None}),
    ({"device_uuid": b"x" * 16, "driver_uuid": b"y" * 16}, {"device_uuid": b"x" * 16, "driver_uuid": b"y" * 16}),
    ({"ready_kind": 6, **WAIT}, {"ready_kind": "host"}),
    ({"ready_kind": "stream", "queue": 2}, {"ready_kind": "stream", "queue": 2}),
    ({"ready_kind": "ready", "ready_handle": 3, "ready_value": 2**64 - 1}, {"ready_kind": "ready", "ready_value": 2**64 - 1}),
    ({"ready_padding": 2**32 - 1, "reserved": [2**64 - 1] * 8, "owner": 2**64 - 1, "wait_ctx": 2**64 - 1}, {"nbytes": 64}),
]


@pytest.mark.parametrize(("fields", "said"), FINE)
def test_odd_field_that_means_something_is_read(fields: dict[str, Any], said: dict[str, Any]) -> None:
    """N-VALID-2, N-VER-2."""
    forged = ForgedNative(**fields)
    assert said.items() <= _core.read_native(forged.capsule()).items()
    assert forged.deletions == (1,)


# ---- versions: N-VER ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(1, 0), (1, 9), (2, 0), (10**30, 0), [1, 0], (np.int64(1), 0)])
def test_consumer_that_reads_one_or_later_gets_one(wanted: Any) -> None:
    """N-VER-1."""
    assert NativeCapsule.of(interop.as_tensor(np.zeros(1)), max_version=wanted).fields["version"] == (1, 0)


def test_version_defaults_to_one() -> None:
    """N-VER-1."""
    assert NativeCapsule(interop.as_tensor(np.zeros(1)).__interop_native__()).fields["version"] == (1, 0)


@pytest.mark.parametrize(("wanted", "error"), [
    ((0, 9), interop.ExchangeError), ((-1, 0), ValueError), ((1, -1), ValueError), (None, TypeError), (1, TypeError), ((1,), TypeError),
    ((1, 0, 0), TypeError), (("1", "0"), TypeError), ((1.0, 0), TypeError),
])  # fmt: skip
def test_version_that_cannot_be_given_is_refused(wanted: Any, error: type[Exception]) -> None:
    """N-VER-1."""
    with pytest.raises(error, match="max_version"):
        interop.as_tensor(np.zeros(1)).__interop_native__(max_version=wanted)


def test_of_another_major_only_the_head_is_read() -> None:
    """N-VER-3: the struct ends behind its head, at the end of a page; reading on would crash."""
    code = """
import ctypes, mmap, sys
from interop import _core, ExchangeError
from interop.testing import abi
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
page = mmap.PAGESIZE
base = libc.mmap(None, 2 * page, 3, 0x22, -1, 0)
assert libc.mprotect(base + page, page, 0) == 0
calls = []
deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
at = base + page - 32
ctypes.c_uint32.from_address(at).value = 2
ctypes.c_void_p.from_address(at + 24).value = abi.function_address(deleter)
capsule = abi.capsule_new(at, abi.static_name("interop_native_v1"), None)
try:
    _core.read_native(capsule)
except ExchangeError as e:
    assert "side channel 2.0" in str(e), e
else:
    sys.exit("was read")
assert calls == [at], calls
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(Path(interop.__file__).parents[1])})


# ---- readiness: N-READY ------------------------------------------------------------------------------------------------------------


def busy(device: str, gate: Gate, access: str = "write", **more: Any) -> interop.Tensor:
    t = owned(device=device, **more).tensor(4, "float32")
    points.note(t, access, gate.point)
    return t


@pytest.mark.parametrize(("device", "form", "kind", "handle", "value"), [
    ("ext_dev:0", None, "host", 0, 0),
    ("vulkan:0", [(0x5E, 41)], "timeline", 0x5E, 41),
    ("vulkan:0", [(0x5E, 41), (0x5F, 1)], "host", 0, 0),
    ("vulkan:0", None, "host", 0, 0),
    ("opencl:0", 0xE7, "cl_event", 0xE7, 0),
    ("cuda:0", [0xCE], "cuda_event", 0xCE, 0),
    ("opencl:0", object(), "host", 0, 0),
])  # fmt: skip
def test_pending_work_is_said_in_the_form_that_the_api_has(device: str, form: Any, kind: str, handle: int, value: int) -> None:
    """N-READY-1."""
    gate = Gate(form)
    said = native.describe(busy(device, gate))
    assert (said["ready_kind"], said["ready_handle"], said["ready_value"]) == (kind, handle, value)
    assert (said["wait"](0), said["wait"](1_000_000)) == (1, 1)
    threading.Timer(0.05, gate.over.set).start()
    assert (said["wait"](-1), said["wait"](0)) == (0, 0)


def test_making_one_does_not_wait() -> None:
    """N-READY-1."""
    gate, started = Gate(), time.monotonic()
    NativeCapsule.of(busy("ext_dev:0", gate))
    assert time.monotonic() - started < 5 and not gate.over.is_set()
    gate.over.set()


def test_reads_count_for_who_could_write_only() -> None:
    """N-READY-2."""
    gate = Gate()
    t = busy("ext_dev:0", gate, "read")
    assert native.describe(t)["ready_kind"] == "host"
    assert native.describe(interop.as_tensor(t, readonly=True))["ready_kind"] == "ready"
    gate.over.set()
    assert native.describe(t)["ready_kind"] == "ready"


def test_only_the_bytes_of_the_tensor_count() -> None:
    """N-READY-2."""
    gate = Gate()
    a = owned()
    points.note(a.tensor(4, "float32"), "write", gate.point)
    assert native.describe(a.tensor(4, "float32", byte_offset=16))["ready_kind"] == "ready"
    gate.over.set()


def test_failed_write_is_refused() -> None:
    """N-READY-3."""
    gate = Gate()
    gate.error = RuntimeError("lost")
    t = busy("ext_dev:0", gate)
    gate.over.set()
    with pytest.raises(interop.ExchangeError, match=r"last write to this memory failed: RuntimeError\('lost'\)"):
        t.__interop_native__()


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_work_that_fails_later_fails_the_wait(error: type[Exception]) -> None:
    """N-READY-3."""
    gate = Gate()
    said = native.describe(busy("ext_dev:0", gate))
    gate.error = error("its own")
    gate.over.set()
    assert said["wait"](-1) == -1


def test_interrupt_comes_back_to_python(client: ctypes.PyDLL) -> None:
    """N-READY-4: a C caller has nowhere to put a KeyboardInterrupt; it is raised when Python code runs again."""
    class Interrupted(points.Point):
        def _poll(self) -> bool:
            raise KeyboardInterrupt

    t = owned().tensor(4, "float32")
    taken = NativeCapsule(_core.native_capsule(t, native.describe(t) | {"ready_kind": "host"}, Interrupted())).consume()
    with pytest.raises(KeyboardInterrupt):
        rc = taken.wait(0)
        assert rc == -2
        for _ in range(1000):
            time.sleep(0)
    taken.delete()


def test_wait_keeps_an_error_that_is_pending(client: ctypes.PyDLL) -> None:
    """N-READY-4."""
    gate = Gate()
    taken = NativeCapsule.of(busy("ext_dev:0", gate)).consume()
    assert client.wait_with_error(taken.address, 0) == 1
    gate.over.set()
    assert client.wait_with_error(taken.address, -1) == 0
    taken.delete()


def test_memory_on_a_stream_says_so() -> None:
    """N-READY-5: without a driver nothing can be waited for; DLPack's stream argument orders it."""
    said = native.describe(interop.as_tensor(it.Producer(device_tensor(device=(it.CUDA, 0), data=0x10000)), stream=7))
    assert (said["ready_kind"], said["queue"], said["wait"]) == ("stream", 7, None)
    assert said["device_type"] == it.CUDA and said["handle"] == 0x10000


@pytest.mark.parametrize(("kind", "form"), [("timeline", [(8, 9)]), ("cl_event", 8), ("cuda_event", 8), ("host", None)])
def test_point_of_a_description_has_its_native_form(kind: str, form: Any) -> None:
    """N-READY-6."""
    state = [1]
    forged = ForgedNative(ready_kind=kind, ready_handle=8, ready_value=9, wait=lambda timeout_ns: state[0])
    p = native.readiness(_core.read_native(forged.capsule()))
    assert not p.done()
    if form is None:
        with pytest.raises(interop.ExchangeError, match="no native form"):
            p.native()
    else:
        assert p.native() == form
    state[0] = 0
    p.wait(1)
    assert p.done() and forged.deletions == (1,), "a Point that is done holds nothing"


def test_point_waits_in_the_producer_s_function_and_keeps_the_struct() -> None:
    """N-READY-6."""
    asked: list[int] = []

    def wait(timeout_ns: int) -> int:
        asked.append(timeout_ns)
        return 1 if len(asked) < 4 else 0

    forged = ForgedNative(ready_kind="host", wait=wait)
    p = native.readiness(_core.read_native(forged.capsule()))
    assert forged.deleted == 0
    p.wait(10)
    assert 0 in asked and max(asked) > 1_000_000
    assert forged.deletions == (1,)


@pytest.mark.parametrize(("rc", "done"), [(1, False), (-2, False), (-1, True), (-77, True), (5, True)])
def test_failure_of_a_wait_is_the_error_of_its_point(rc: int, done: bool) -> None:
    """N-READY-6."""
    p = native.readiness(_core.read_native(ForgedNative(ready_kind="host", wait=lambda timeout_ns: rc).capsule()))
    assert p.done() is done
    if done:
        with pytest.raises(interop.ExchangeError, match=f"failed with {rc}"):
            p.wait(1)


# ---- the mapping twin: N-MAP -------------------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "version": (1, 0), "device_type": it.VULKAN, "device_id": 2, "flags": {"readonly", "host_visible", "coherent", "cached", "dedicated"},
    "handle": 1, "nbytes": 2, "memory": 3, "memory_nbytes": 40, "memory_offset": 5, "memory_type": 6, "queue_family": 7, "context": 8,
    "physical_device": 9, "instance": 10, "queue": 11, "device_uuid": bytes(range(16)), "driver_uuid": bytes(range(16, 32)),
    "ready_kind": "timeline", "ready_handle": 12, "ready_value": 13,
}  # fmt: skip


class Says:
    def __init__(self, said: Any) -> None:
        self.said = said

    def __interop_native__(self, *, max_version: Any) -> Any:
        return self.said


def without(said: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in names}


def test_struct_and_mapping_say_the_same() -> None:
    """N-MAP-1."""
    def wait(timeout_ns: int) -> int:
        return 0

    struct = native.describe(Says(ForgedNative(**EVERYTHING, wait=wait).capsule()))
    mapping = native.describe(Says(EVERYTHING | {"wait": wait}))
    assert without(struct, "wait", "owner") == without(mapping, "wait", "owner") == EVERYTHING
    assert struct["wait"](0) == mapping["wait"](0) == 0
    assert list(struct) == list(mapping)


def test_description_is_itself_a_mapping_twin() -> None:
    """N-MAP-1."""
    said = native.describe(interop.as_tensor(np.zeros(5)))
    assert native.describe(Says(said)) == said


def test_mapping_needs_four_fields_and_the_rest_is_unknown() -> None:
    """N-MAP-2."""
    least = {"device_type": it.OPENCL, "device_id": 0, "handle": 5, "nbytes": 6}
    assert without(native.describe(Says(least)), "owner") == without(native.describe(Says(ForgedNative(**least).capsule())), "owner")
    for name in least:
        with pytest.raises(interop.ExchangeError, match=f"lacks {name}"):
            native.describe(Says(without(least, name)))


def test_mapping_may_use_the_numbers_of_the_header() -> None:
    """N-MAP-3."""
    said = native.describe(Says(EVERYTHING | {"flags": 0b11, "ready_kind": 0, "memory_type": -1, "queue_family": 0xFFFFFFFF}))
    assert said["flags"] == {"readonly", "host_visible"}
    assert (said["ready_kind"], said["memory_type"], said["queue_family"]) == ("ready", None, None)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("flags", {"read_only"}, "unknown flag 'read_only'"), ("flags", "readonly", "flags 'readonly': a set"),
    ("flags", {3}, "unknown flag 3"), ("flags", None, "flags None"), ("flags", -1, "flags -1"),
    ("flags", True, "flags True"), ("flags", 2**64, "flags"),
    ("ready_kind", "soon", "ready_kind 'soon'"), ("ready_kind", -1, "ready_kind -1"), ("ready_kind", 1.5, "ready_kind 1.5"),
    ("handle", "5", "handle '5': must be an int"), ("handle", -1, "handle -1"), ("handle", 2**64, "handle"),
    ("handle", True, "handle True"), ("nbytes", 2.0, "nbytes 2.0"), ("device_type", 2**31, "device_type"),
    ("queue_family", 2**32, "queue_family"),
    ("memory_type", 2**31, "memory_type"), ("device_uuid", b"short", "device_uuid b'short': 16 bytes"),
    ("driver_uuid", "0123456789abcdef", "driver_uuid"), ("version", 1, "version 1: must be a pair"), ("version", (1, -1), "version"),
    ("wait", 5, "wait 5: a function"),
])  # fmt: skip
def test_malformed_mapping_is_refused(field: str, value: Any, message: str) -> None:
    """N-MAP-2."""
    with pytest.raises(interop.ExchangeError, match=message):
        native.describe(Says(without(EVERYTHING, "ready_kind", "ready_handle") | {field: value}))


def test_flag_names_of_a_later_minor_version_are_ignored() -> None:
    """N-MAP-4, N-VER-2."""
    said = without(EVERYTHING, "ready_kind") | {"version": (1, 1), "flags": {"readonly", "sparkling"}, "unheard_of": object()}
    assert native.describe(Says(said))["flags"] == {"readonly"}


def test_owner_of_a_mapping_is_what_it_names_else_the_object() -> None:
    """N-MAP-5."""
    least = {"device_type": it.EXT_DEV, "device_id": 0, "handle": 5, "nbytes": 6}
    x, keeper = Says(least), object()
    assert native.describe(x)["owner"] is x
    assert native.describe(Says(least | {"owner": keeper}))["owner"] is keeper


@pytest.mark.parametrize(("x", "error", "message"), [
    (object(), TypeError, "has no __interop_native__"), (Says(None), interop.ExchangeError, "nothing to say"),
    (Says(5), TypeError, "neither a capsule nor a mapping"), (Says([1]), TypeError, "neither a capsule nor a mapping"),
])  # fmt: skip
def test_describe_says_what_is_wrong_with_the_object(x: Any, error: type[Exception], message: str) -> None:
    """N-MAP-6."""
    with pytest.raises(error, match=message):
        native.describe(x)


# ---- joined to DLPack: N-JOIN ------------------------------------------------------------------------------------------------------


def test_handle_gets_its_size_context_and_traits() -> None:
    """N-JOIN-1."""
    said = ForgedNative(nbytes=4096, context=77, flags=("host_visible", "dedicated"), memory=5, memory_nbytes=8192, memory_offset=1024)
    forged = device_tensor(byte_offset=64)
    producer = NativeProducer(forged, said)
    t = interop.as_tensor(producer)
    assert (t.handle, t.byte_offset, t.shape) == (HANDLE, 64, (4,))
    a = t.allocation
    assert (a.nbytes, a.handle, a.device, a.traits) == (4096, HANDLE, "ext_dev:0", {"host_visible", "dedicated"})
    assert a.owner.fields["context"] == 77 and a.context is None
    assert t[1:].allocation is a and producer.asked == [(1, 0)]
    assert _core.offset_in(t) == 64
    again = native.describe(t[2:])
    assert (again["nbytes"], again["context"], again["memory"], again["memory_nbytes"], again["memory_offset"]) == (4096, 77, 5, 8192, 1024)


def test_both_parts_are_kept_and_given_back_once() -> None:
    """N-JOIN-2."""
    forged, said = device_tensor(), ForgedNative()
    t = interop.as_tensor(NativeProducer(forged, said))
    view, a = t[1:3], t.allocation
    del t
    clean()
    assert (forged.deleted, said.deleted) == (0, 0)
    capsule = view.__dlpack__(max_version=(1, 0))
    del view
    clean()
    assert (forged.deleted, said.deleted, a.lent_out) == (0, 0, 1)
    del capsule
    clean()
    assert (forged.deleted, said.deleted) == (0, 0)
    del a
    clean()
    assert (forged.deletions, said.deletions) == ((1,), (1,))


def test_library_without_the_side_channel_gets_a_plain_capsule() -> None:
    """N-JOIN-3."""
    t = interop.as_tensor(NativeProducer(device_tensor(byte_offset=8), ForgedNative(nbytes=4096)))
    plain = it.Capsule.of(t, max_version=(1, 3))
    assert (plain.device, plain.data, plain.byte_offset, plain.shape) == (EXT, HANDLE, 8, (4,))


@pytest.mark.parametrize("said", [None, BufferError, interop.ExchangeError])
def test_producer_with_nothing_to_say_is_read_as_plain_dlpack(said: Any) -> None:
    """N-JOIN-4."""
    forged = device_tensor(byte_offset=16)
    t = interop.as_tensor(NativeProducer(forged, said))
    assert (t.handle, t.allocation.nbytes) == (HANDLE, 32)
    del t
    clean()
    assert forged.deletions == (1,)


def test_plain_producer_is_read_as_before() -> None:
    """N-JOIN-4."""
    t = interop.as_tensor(it.Producer(device_tensor()))
    assert (t.handle, t.allocation.nbytes) == (HANDLE, 16)


def test_error_inside_the_producer_passes() -> None:
    """N-JOIN-4."""
    forged = device_tensor()
    with pytest.raises(ZeroDivisionError):
        interop.as_tensor(NativeProducer(forged, ZeroDivisionError))
    assert forged.deletions == (1,)


def test_memory_with_an_address_is_not_asked() -> None:
    """N-JOIN-5."""
    producer = NativeProducer(Forged((4,)), ZeroDivisionError)
    assert interop.as_tensor(producer).shape == (4,)
    assert producer.asked == []


@pytest.mark.parametrize(("tensor", "said", "message"), [
    ({}, {"nbytes": 15}, "does not lie in the 15 bytes"),
    ({"byte_offset": 49}, {}, "at byte 49 does not lie in the 64 bytes"),
    ({"byte_offset": 2**40}, {}, "does not lie"),
    ({"strides": (2**56,)}, {}, "does not lie"),
    ({"data": 5}, {}, "handle 0x5 and the side channel 0xd00d0000"),
    ({}, {"device_id": 1}, "DLPack says ext_dev:0 and the side channel ext_dev:1"),
    ({}, {"device_type": it.VULKAN}, "the side channel vulkan:0"),
    ({}, {"version": (2, 0)}, "side channel 2.0"),
    ({}, {"struct_size": 8}, "struct_size 8"),
])  # fmt: skip
def test_the_two_must_agree_and_a_refusal_frees_both(tensor: dict[str, Any], said: dict[str, Any], message: str) -> None:
    """N-JOIN-6."""
    forged, native_ = device_tensor(**tensor), ForgedNative(**said)
    with pytest.raises(interop.ExchangeError, match=message):
        interop.as_tensor(NativeProducer(forged, native_))
    clean()
    assert (forged.deletions, native_.deletions) == ((1,), (1,))


@pytest.mark.parametrize("tensor", [{"byte_offset": 48}, {"byte_offset": 60, "strides": (-5,)}])
def test_tensor_that_just_fits_is_taken(tensor: dict[str, Any]) -> None:
    """N-JOIN-6."""
    assert interop.as_tensor(NativeProducer(device_tensor(**tensor), ForgedNative())).byte_offset == tensor["byte_offset"]


def test_empty_tensor_needs_no_handle() -> None:
    """N-JOIN-6."""
    t = interop.as_tensor(NativeProducer(device_tensor(0, data=0), ForgedNative()))
    assert t.size == 0 and t.allocation.nbytes == 64


def test_readonly_of_either_makes_it_readonly() -> None:
    """N-JOIN-7."""
    assert interop.as_tensor(NativeProducer(device_tensor(), ForgedNative(flags=("readonly",)))).readonly
    assert interop.as_tensor(NativeProducer(device_tensor(flags=it.READ_ONLY), ForgedNative())).readonly
    assert not interop.as_tensor(NativeProducer(device_tensor(), ForgedNative())).readonly


def test_pending_work_of_the_producer_is_waited_for() -> None:
    """N-JOIN-8."""
    state = [1]
    t = interop.as_tensor(NativeProducer(device_tensor(), ForgedNative(ready_kind="host", wait=lambda timeout_ns: state[0])))
    assert not points.pending(t, "read").done()
    threading.Timer(0.05, state.__setitem__, (0, 0)).start()
    t.__dlpack__(max_version=(1, 0))
    assert state == [0] and points.pending(t, "read").done()


def test_failed_work_of_the_producer_is_refused_when_it_is_used() -> None:
    """N-JOIN-8."""
    t = interop.as_tensor(NativeProducer(device_tensor(), ForgedNative(ready_kind="host", wait=lambda timeout_ns: -1)))
    with pytest.raises(interop.ExchangeError, match="last write to this memory failed"):
        t.__dlpack__()


def test_memory_described_twice_is_one_allocation() -> None:
    """N-JOIN-9."""
    said, first, second = ForgedNative(context=5), device_tensor(), device_tensor(2, byte_offset=8)
    a = interop.as_tensor(NativeProducer(first, said))
    b = interop.as_tensor(NativeProducer(second, said))
    assert a.allocation is b.allocation
    gate = Gate()
    points.note(a, "write", gate.point)
    assert not points.pending(b, "read").done()
    gate.over.set()
    other = interop.as_tensor(NativeProducer(first, ForgedNative(context=6)))
    assert other.allocation is not a.allocation
    a.allocation.close()
    assert interop.as_tensor(NativeProducer(first, said)).allocation.is_closed is False
    del a, b, other
    clean()
    assert set(first.deletions + second.deletions + said.deletions) == {1}


def test_without_a_context_equal_handles_are_not_taken_for_one() -> None:
    """N-JOIN-9: a VkBuffer means something in its VkDevice only."""
    x = NativeProducer(device_tensor(), ForgedNative())
    assert interop.as_tensor(x).allocation is not interop.as_tensor(x).allocation


class Wrapper:
    """Somebody's object around one of our tensors."""

    def __init__(self, t: interop.Tensor) -> None:
        self.t = t

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.t.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.t.__dlpack_device__()

    def __interop_native__(self, *, max_version: Any) -> Any:
        return self.t.__interop_native__(max_version=max_version)


def test_our_own_memory_is_recognised_when_it_comes_back() -> None:
    """N-JOIN-10."""
    a = owned()
    back = interop.as_tensor(Wrapper(a.tensor(4, "float32", byte_offset=16)))
    assert back.allocation is a and back.byte_offset == 16
    assert native.allocation_from(Wrapper(back)) is a
    del back
    clean()
    assert a.lent_out == 0
    a.close()


def test_allocation_from_needs_no_dlpack() -> None:
    """N-JOIN-11."""
    state = [1]
    said = ForgedNative(nbytes=128, ready_kind="timeline", ready_handle=3, ready_value=4, wait=lambda timeout_ns: state[0])
    a = native.allocation_from(Says(said.capsule()))
    t = a.tensor((2, 4), "float32", byte_offset=96)
    assert points.pending(t, "read").native() == [(3, 4)]
    state[0] = 0
    assert points.pending(t, "read").done()
    with pytest.raises(ValueError, match="allocation of 128 bytes"):
        a.tensor((2, 5), "float32", byte_offset=96)
    del a, t
    clean()
    assert said.deletions == (1,)


def test_allocation_from_an_address() -> None:
    """N-JOIN-11."""
    block = ctypes.create_string_buffer(b"abcdefgh")
    a = native.allocation_from(Says({"device_type": it.CPU, "device_id": 0, "flags": {"handle_is_pointer"}, "nbytes": 8,
                                     "handle": ctypes.addressof(block), "owner": block}))
    assert bytes(a.tensor(3, "uint8", byte_offset=2).__buffer__(0) if sys.version_info >= (3, 12) else memoryview(  # type: ignore[arg-type]
        a.tensor(3, "uint8", byte_offset=2))) == b"cde"
    assert a.owner.fields["owner"] is block


# ---- C on the other side: N-C ------------------------------------------------------------------------------------------------------


def test_memory_of_a_c_library_is_taken_whole(buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-1."""
    x = buffer(1024, elements=8, byte_offset=512)
    t = interop.as_tensor(x)
    assert (t.handle, t.byte_offset, t.shape, t.dtype) == (x.handle(), 512, (8,), "float32")
    a = t.allocation
    assert (a.nbytes, a.traits) == (1024, {"dedicated"})
    fields = a.owner.fields
    assert (fields["memory"], fields["memory_nbytes"], fields["memory_offset"], fields["memory_type"]) == (0xABC, 1024 + 4096, 256, 3)
    assert (fields["queue_family"], fields["context"], fields["device_uuid"], fields["driver_uuid"]) == (1, 0xC0, b"0123456789abcdef", None)
    assert points.pending(t, "write").done() and x.references() == 3
    del t, a, fields
    clean()
    assert (x.references(), x.natives_deleted(), x.tensors_deleted()) == (1, 1, 1)


def test_work_of_a_c_library_is_waited_for(buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-1."""
    x = buffer(64, elements=4, done=False)
    t = interop.as_tensor(x)
    pending = points.pending(t, "read")
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(0.01)
    threading.Timer(0.05, x.finish).start()
    t.__dlpack__(max_version=(1, 0))
    assert pending.done() and x.waits() > 2


def test_failed_work_of_a_c_library_is_refused(buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-1."""
    x = buffer(64, elements=4, done=False)
    t = interop.as_tensor(x)
    x.fail()
    with pytest.raises(interop.ExchangeError, match="failed"):
        t.__dlpack__(max_version=(1, 0))


def test_c_library_whose_tensor_is_too_large_is_refused_and_freed(buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-1."""
    x = buffer(64, elements=17)
    with pytest.raises(interop.ExchangeError, match="does not lie in the 64 bytes"):
        interop.as_tensor(x)
    clean()
    assert (x.references(), x.natives_deleted(), x.tensors_deleted()) == (1, 1, 1)


def test_c_library_frees_what_nobody_took(buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-1."""
    x = buffer(64, elements=4)
    x.__interop_native__(max_version=(1, 0))
    assert (x.references(), x.natives_deleted()) == (1, 1)


def test_c_library_produces_without_interop(client_library: Path) -> None:
    """N-C-1."""
    code = """
import ctypes, sys
lib = ctypes.PyDLL(sys.argv[1])
lib.device_new.restype = ctypes.c_void_p
lib.device_new.argtypes = [ctypes.c_uint64, ctypes.c_int]
lib.make_native.restype = ctypes.py_object
lib.make_native.argtypes = lib.device_references.argtypes = [ctypes.c_void_p]
d = lib.device_new(64, 1)
capsule = lib.make_native(d)
assert 'interop_native_v1' in repr(capsule) and lib.device_references(d) == 2
del capsule
assert lib.device_references(d) == 1 and not any(m.partition('.')[0] == 'interop' for m in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(client_library)], check=True)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another thread"])
def test_c_library_consumes_ours(client: ctypes.PyDLL, elsewhere: bool) -> None:
    """N-C-2."""
    block = interop.empty(4096, "uint8", shared_with=["process"])
    array = interop.to(block, "numpy")
    array[:] = 7
    array[-1] = 9
    a, seen = block.allocation, Seen()
    del array
    client.consume_native(block[100:200], ctypes.byref(seen), elsewhere)
    assert (seen.device_type, seen.device_id, seen.handle, seen.nbytes, seen.struct_size) == (it.CPU, 0, a.handle, 4096, 264)
    assert (seen.looked, seen.waited, seen.first, seen.last) == (0, 0, 7, 9)
    assert seen.flags == sum(it.NATIVE_FLAGS[n] for n in ("host_visible", "coherent", "cached", "handle_is_pointer"))
    assert (seen.memory_type, seen.queue_family, seen.ready_kind) == (-1, 0xFFFFFFFF, 0)
    assert a.lent_out == 0
    a.close()


def test_c_library_waits_for_ours(client: ctypes.PyDLL) -> None:
    """N-C-2."""
    gate, seen = Gate(), Seen()
    t = busy("ext_dev:0", gate)
    threading.Timer(0.05, gate.over.set).start()
    client.consume_native(t, ctypes.byref(seen), True)
    assert (seen.ready_kind, seen.looked, seen.waited) == (1, 1, 0)
    assert t.allocation.lent_out == 0


def test_c_library_gets_our_refusal(client: ctypes.PyDLL) -> None:
    """N-C-2."""
    t = interop.as_tensor(np.zeros(4))
    with t.map("write"), pytest.raises(interop.LeaseError):
        client.consume_native(t, ctypes.byref(Seen()), False)


def test_chain_from_c_through_interop_to_c(client: ctypes.PyDLL, buffer: Callable[..., ClientBuffer]) -> None:
    """N-C-3."""
    x, seen = buffer(256, elements=4, byte_offset=32, done=False), Seen()
    t = interop.as_tensor(x)
    threading.Timer(0.05, x.finish).start()
    client.consume_native(t, ctypes.byref(seen), True)
    assert (seen.handle, seen.nbytes, seen.memory, seen.memory_nbytes, seen.memory_offset, seen.context) == (
        x.handle(), 256, 0xABC, 256 + 4096, 256, 0xC0)
    assert (seen.looked, seen.waited, seen.memory_type, seen.queue_family) == (1, 0, 3, 1)
