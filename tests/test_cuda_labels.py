"""What memory of CUDA's is called where it goes: pinned and managed memory, pointers nobody vouches for, and what needs no driver."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_kit import Rig, rig
from fake_cuda import CUresult
from support import forge, producer

import interop
from interop import ExchangeError, _core
from interop.adapters.cuda.adapter import CudaAdapter
from interop.contract import Adapter, DeviceLostError, Limits
from interop.testing import Capsule, CudaArrayInterface, Forged, NativeCapsule

N = 64
U8 = (1, 8, 1)
HOST = frozenset({1, 3})        # a framework of the host, which knows pinned memory as the CPU's
KINDS = {"device": (2, 1), "managed": (13, 1), "pinned": (3, 0), "registered": (3, 0), "pool": (2, 1)}


@pytest.fixture
def cuda() -> Iterator[Rig]:
    """interop's adapter on a fake driver of two devices; in the end nothing illegal has happened there and nothing is left."""
    with rig() as made:
        yield made


@pytest.fixture
def cp(cuda: Rig) -> Iterator[Any]:
    """A small CuPy on the same driver."""
    with fake_cupy.installed(cuda.fake) as cupy:
        yield cupy


@pytest.fixture
def framework() -> Iterator[Any]:
    """Makes frameworks that take memory of some devices only; what they are given is the Tensor itself."""
    names = []

    def make(devices: Any, stream: int | None = None) -> str:
        name = f"takes{len(names)}"
        body: dict[str, Any] = {"name": name, "types": (f"{name}.Array",), "accepts": Limits(devices=frozenset(devices)),
                                "module": "sys", "from_tensor": lambda self, t, *, place=None, stream=None: t}
        if stream is not None:
            body["current_stream"] = lambda self, device: stream
        interop.registry.register(type(name, (Adapter,), body)())
        names.append(name)
        return name

    yield make
    for name in names:
        interop.registry.unregister(name)


def labelled(cuda: Rig, kind: str, stream: int | None = None) -> tuple[interop.Tensor, Any]:
    """A Tensor of pinned or managed memory, with zeros; and the bytes."""
    address, view = cuda.memory(np.zeros(N, "u1"), 0, kind)
    return cuda.tensor(address, (N,), "u1", device=(13 if kind == "managed" else 3, 0), stream=stream), view


# ---- pinned and managed memory ----
@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_memory_that_the_host_reads_leaves_as_the_cpus_where_the_cpu_is_asked_for(cuda: Rig, kind: str) -> None:
    """SPEC G-HOST: the same bytes, and by its own name where nobody asks."""
    t, view = labelled(cuda, kind, cuda.stream() if kind == "managed" else None)
    x = np.from_dlpack(t, device="cpu")
    x[3] = 7
    assert view[3] == 7
    assert Capsule(t.__dlpack__(dl_device=(1, 0), max_version=(1, 3))).device == (1, 0)
    assert Capsule(t.__dlpack__(max_version=(1, 3), **({"stream": -1} if kind == "managed" else {}))).device[0] == t.device.type
    assert t.__dlpack_device__() == (t.device.type, 0)


def test_the_host_gets_managed_memory_when_the_call_returns(cuda: Rig) -> None:
    """SPEC G-HOST: stream None, so the stream that wrote it has finished; and no other."""
    fake, s, other = cuda.fake, cuda.stream(), cuda.stream()
    t, view = labelled(cuda, "managed", s)
    fake.launch(other, writes=[(fake.make_memory(8), 8)])
    for way in (lambda: np.from_dlpack(t, device="cpu"), lambda: interop.to(t, "numpy"), lambda: np.asarray(t),
                lambda: t.__dlpack__(dl_device=(1, 0), max_version=(1, 3))):
        fake.launch(s, lambda: view.__setitem__(0, view[0] + 1), writes=[(t.ptr, N)])
        before, fake.auto = int(view[0]), True
        way()
        assert int(view[0]) == before + 1
    assert fake.queued == 1                                 # the other stream's


def test_a_stream_beside_the_cpu_is_the_consumers_to_order_by(cuda: Rig) -> None:
    """SPEC G-HOST: nothing is waited for on the host then."""
    fake, s, theirs = cuda.fake, cuda.stream(), cuda.stream()
    t, _ = labelled(cuda, "managed", s)
    fake.launch(s, writes=[(t.ptr, N)])
    capsule = t.__dlpack__(dl_device=(1, 0), stream=theirs, max_version=(1, 3))
    assert Capsule(capsule).device == (1, 0)
    assert fake.queued == 1
    fake.launch(theirs, reads=[(t.ptr, N)])                 # ordered, or the fake would see a race
    t.__dlpack__(dl_device=(1, 0), stream=-1, max_version=(1, 3))


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_frameworks_of_the_host_get_the_cpus_name(cuda: Rig, framework: Any, kind: str) -> None:
    """SPEC G-HOST: finished when the call returns."""
    fake, s = cuda.fake, cuda.stream()
    t, view = labelled(cuda, kind, s if kind == "managed" else None)
    if kind == "managed":
        fake.launch(s, lambda: view.fill(5), writes=[(t.ptr, N)])
        fake.auto = True
    x = interop.to(t, framework(HOST))
    assert x.device == "cpu" and x.ptr == t.ptr
    assert kind != "managed" or (view == 5).all()
    assert t.device.type == (13 if kind == "managed" else 3)        # the caller's keeps its name


def test_pinned_memory_goes_to_who_takes_the_cpus_memory_alone(cuda: Rig, framework: Any) -> None:
    """SPEC G-HOST."""
    t, _ = labelled(cuda, "pinned")
    assert interop.to(t, framework({1})).device == "cpu"


def test_managed_memory_goes_to_frameworks_of_cuda_as_cudas(cuda: Rig, framework: Any) -> None:
    """SPEC G-HOST: ordered on the framework's stream, nothing waits on the host."""
    fake, s, theirs = cuda.fake, cuda.stream(), cuda.stream()
    t, _ = labelled(cuda, "managed", s)
    fake.launch(s, writes=[(t.ptr, N)])
    x = interop.to(t, framework({1, 2}, theirs))
    assert x.device == "cuda:0" and x.ptr == t.ptr
    assert fake.queued == 1 and _core.pending_stream(x) == theirs
    fake.launch(theirs, reads=[(t.ptr, N)])
    fake.run()


def test_managed_memory_keeps_its_name_for_who_knows_it(cuda: Rig, framework: Any, cp: Any) -> None:
    """SPEC G-HOST."""
    t, _ = labelled(cuda, "managed", 1)
    assert interop.to(t, framework({1, 2, 13})).device == "cuda_managed:0"
    assert interop.to(t, "cupy").data.ptr == t.ptr


def test_a_producer_of_managed_memory_is_told_the_stream_of_who_takes_it_as_cudas(cuda: Rig, framework: Any) -> None:
    """SPEC G-HOST, X-STREAM-4."""
    theirs = cuda.stream()
    p = producer((N,), U8, (13, 0), data=cuda.fake.make_memory(N, 0, "managed"))
    x = interop.to(p, framework({1, 2}, theirs))
    assert p.calls[-1]["stream"] == theirs and x.device == "cuda:0"


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_the_side_channel_keeps_the_label(cuda: Rig, kind: str) -> None:
    """SPEC G-HOST."""
    t, _ = labelled(cuda, kind, cuda.stream() if kind == "managed" else None)
    fields = NativeCapsule.of(t).fields
    assert fields["device_type"] == t.device.type


def test_managed_memory_without_a_driver_is_refused_to_the_host(cuda: Rig) -> None:
    """SPEC G-HOST, X-STREAM-3: what cannot be waited for is not handed over."""
    t, _ = labelled(cuda, "managed", cuda.stream())
    _core.set_cuda_ops(None)
    with pytest.raises(ExchangeError, match="no driver"):
        np.from_dlpack(t, device="cpu")
    assert not cuda.fake.calls["cuStreamQuery"]


# ---- pointers that nobody vouches for ----
@pytest.mark.parametrize("claimed", [(2, 0), (2, 1), (3, 0), (13, 0)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_raw_capsule_is_called_what_its_memory_is(cuda: Rig, kind: str, claimed: tuple[int, int]) -> None:
    """SPEC G-POINTER: whatever the capsule said."""
    if kind == "registered":
        keep = np.zeros(N, "u1")
        address = keep.ctypes.data
        r = cuda.fake._add("registered", N, address, 1)
        r.mine = True
    else:
        address = cuda.fake.make_memory(N, 1, kind)
    t = forge((N - 8,), "uint8", claimed, data=address, byte_offset=8)
    assert (t.device.type, t.device.id) == KINDS[kind] and t.ptr == address + 8


@pytest.mark.parametrize("kind", ["device", "managed", "pinned", "pool"])
def test_an_array_interface_is_called_what_its_memory_is(cuda: Rig, kind: str) -> None:
    """SPEC G-POINTER."""
    address = cuda.fake.make_memory(N, 1, kind)
    x = CudaArrayInterface({"shape": (N,), "typestr": "|u1", "data": (address, False), "version": 3, "stream": None})
    t = interop.as_tensor(x)
    assert (t.device.type, t.device.id) == KINDS[kind]


@pytest.mark.parametrize("what", ["host memory", "nothing", "freed memory", "beyond the end"])
@pytest.mark.parametrize("how", ["capsule", "interface"])
def test_an_address_that_cuda_does_not_know_is_refused(cuda: Rig, what: str, how: str) -> None:
    """SPEC G-POINTER: and what was given is let go."""
    keep = np.zeros(N, "u1")
    address = keep.ctypes.data if what == "host memory" else 0x1234_0000
    if what in ("freed memory", "beyond the end"):
        address = cuda.fake.make_memory(N)
        if what == "freed memory":
            with cuda.fake.current_device(0):
                cuda.fake.cuInit(0)
                cuda.fake.cuMemFree(address)
        else:
            address += N
    forged = Forged((N,), U8, device=(2, 0), data=address)
    given: Any = forged.capsule() if how == "capsule" else CudaArrayInterface(
        {"shape": (N,), "typestr": "|u1", "data": (address, False), "version": 3, "stream": None})
    with pytest.raises(ExchangeError, match=f"{address:#x} is not known to CUDA"):
        interop.as_tensor(given)
    del given
    gc.collect()
    assert how != "capsule" or forged.deleted == 1


def test_memory_of_producers_is_not_asked_about(cuda: Rig) -> None:
    """SPEC G-POINTER: they vouch for it."""
    s = cuda.stream()
    interop.as_tensor(producer((N,), U8, (2, 0), data=cuda.fake.make_memory(N)), stream=s)
    assert not cuda.fake.calls["cuPointerGetAttributes"]


def test_an_empty_capsule_has_no_memory_to_ask_about(cuda: Rig) -> None:
    """SPEC G-POINTER."""
    assert forge((0,), "uint8", (2, 1), data=0).device == "cuda:1"
    assert not cuda.fake.calls


# ---- without a driver ----
class NoLibrary:
    """cuda-bindings on a machine without libcuda."""

    def cuInit(self, flags: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so")


@pytest.fixture(params=["no cuda-bindings", "no libcuda", "no device"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaAdapter]:
    """The adapter where there is no driver to load, asked by the core all the same."""
    fake = None
    if request.param == "no cuda-bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        table: Any = None
    elif request.param == "no libcuda":
        table = NoLibrary()
    else:
        from fake_cuda import FakeCuda

        fake = table = FakeCuda(0)
    adapter = CudaAdapter(table)
    _core.set_cuda_ops(adapter)
    yield adapter
    _core.set_cuda_ops(None)
    if fake is not None:
        fake.close()


def test_equal_streams_work_without_a_driver(missing: CudaAdapter) -> None:
    """SPEC G-DRIVER: also -1, and a bare Tensor on the legacy default stream."""
    p = producer((N,), U8, (2, 0))
    t = interop.as_tensor(p, stream=7)
    assert Capsule(t.__dlpack__(stream=7, max_version=(1, 3))).device == (2, 0)
    t.__dlpack__(stream=-1, max_version=(1, 3))
    bare = interop.as_tensor(p)
    assert p.calls[-1]["stream"] == 1 == _core.pending_stream(bare)
    bare.__dlpack__(stream=1, max_version=(1, 3))


def test_different_streams_are_refused_without_a_driver(missing: CudaAdapter) -> None:
    """SPEC G-DRIVER, X-STREAM-3."""
    t = interop.as_tensor(producer((N,), U8, (2, 0)), stream=7)
    with pytest.raises(ExchangeError):
        t.__dlpack__(stream=9, max_version=(1, 3))


def test_a_label_is_trusted_without_a_driver(missing: CudaAdapter) -> None:
    """SPEC G-POINTER."""
    for device in ((2, 1), (13, 0), (3, 0)):
        data = np.zeros(N, "u1")
        t = forge((N,), "uint8", device, data=data.ctypes.data)
        assert (t.device.type, t.device.id) == device
        t.__dlpack__(stream=-1 if device[0] != 3 else None, max_version=(1, 3))


def test_an_array_interface_says_where_it_is_without_a_driver() -> None:
    """SPEC G-POINTER: by device=, or it is refused."""
    x = CudaArrayInterface({"shape": (N,), "typestr": "|u1", "data": (0x7F00_0000_0000, False), "version": 3, "stream": None})
    with pytest.raises(ExchangeError, match="no CUDA driver is here to ask"):
        interop.as_tensor(x)
    assert interop.as_tensor(x, device="cuda:1").device == "cuda:1"


def test_memory_is_asked_for_by_name_where_there_is_no_driver(missing: CudaAdapter) -> None:
    """SPEC G-DRIVER: nobody allocates there, which is what the error says."""
    assert not missing.can("allocate") and not missing.can("copy")
    with pytest.raises(ExchangeError, match=r"cuda"):
        missing.streams.own(0)


def test_what_only_describes_asks_the_driver_nothing(cuda: Rig) -> None:
    """SPEC G-DRIVER: nor does an export on the stream that is pending."""
    s = cuda.stream()
    t = interop.as_tensor(producer((N,), U8, (2, 0), data=cuda.fake.make_memory(N)), stream=s)
    with cuda.fake.counting() as calls:
        repr(t), t[:4].reshape(2, 2), t.__dlpack_device__(), interop.kind(t), t.__dlpack__(stream=s, max_version=(1, 3))
    assert not calls


@pytest.mark.parametrize("code", [
    "ASSERT",
    "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "HARDWARE_STACK_ERROR",
    "LAUNCH_TIMEOUT"])  # fmt: skip
def test_errors_after_which_a_context_is_unusable_say_so(cuda: Rig, code: str) -> None:
    """SPEC G-LOST: device-side asserts, which frameworks raise for an index that is out of range, are such ones (CUresult 710)."""
    s = cuda.stream()
    cuda.streams.own(0)
    cuda.fake.lose(0, CUresult["CUDA_ERROR_" + code])
    with pytest.raises(DeviceLostError, match=code):
        cuda.streams.record(0, s)
    cuda.fake.lost.clear()
