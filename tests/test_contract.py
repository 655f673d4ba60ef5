"""The contract for adapters: the smallest one, each capability alone, registration, devices, targets, entry points. SPEC A-*."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memkit import prints

import interop
from interop import registry
from interop.contract import Adapter, Limits, Mapped, register


class Buffer:
    """Somebody's array: integer handle, size."""

    def __init__(self, data: bytearray) -> None:
        self.data = data


Buffer.__module__ = "acme"
sys.modules["acme"] = types.ModuleType("acme")


class Smallest(Adapter):
    name, types, reads = "acme", ("acme.Buffer",), "adapter"

    def to_tensor(self, b: Buffer) -> interop.Tensor:
        return interop.as_tensor(b.data)

    def from_tensor(self, t: interop.Tensor, *, place: Any = None, stream: Any = None) -> Buffer:
        out = Buffer(bytearray())
        out.data = memoryview(t)        # type: ignore[assignment]
        return out


@pytest.fixture
def use() -> Iterator[Any]:
    names: list[str] = []

    def add(adapter: Adapter) -> Adapter:
        register(adapter)
        names.append(adapter.name)
        return adapter
    yield add
    for n in names:
        registry.unregister(n)


def variant(name: str = "acme2", **members: Any) -> Adapter:
    return type("Variant", (Smallest,), {"name": name, "types": (f"{name}.Buffer",), **members})()


# --- small --------------------------------------------------------------------------------------------------------------
def test_the_smallest_adapter_is_short_and_works(use: Any) -> None:
    """SPEC A-SMALL: two methods, under 25 lines"""
    assert len(inspect.getsource(Smallest).splitlines()) < 25
    use(Smallest())
    b = Buffer(bytearray(8))
    x = interop.to(b, "numpy")
    x[2] = 7
    assert b.data[2] == 7
    assert interop.kind(b) == "acme"
    back = interop.to(x, "acme")
    assert isinstance(back, Buffer)
    back.data[3] = 9
    assert x[3] == 9
    assert interop.to(b, "acme") is b
    with interop.acquire(b, "numpy", "read_write") as a:
        a[:] = 1
    interop.copyto(b, np.full(8, 2, "u1"))
    assert b.data == bytes([2]) * 8


CAPABILITIES = ("allocate", "export_handle", "import_handle", "map", "copy", "wait", "record", "limits")


@pytest.mark.parametrize("missing", [None, *CAPABILITIES])
def test_each_capability_is_optional(use: Any, missing: str | None) -> None:
    """SPEC A-OPTIONAL: what is missing is an ExchangeError or another way, never an AttributeError"""
    store = bytearray(64)
    pinned = np.frombuffer(store, "u1")
    members: dict[str, Any] = {
        "device": "acme3", "shares": frozenset({"memfd"}),
        "allocate": lambda self, nbytes, *, place, alignment, shared_with: interop.Allocation(5, nbytes, "acme3:0", adapter=self,
                                                                                              exports=("memfd",)),
        "export_handle": lambda self, a, kind: interop.ExternalHandle("host", pinned.ctypes.data, 64),
        "import_handle": lambda self, h, *, place: interop.Allocation(6, h.nbytes, "acme3:0", adapter=self),
        "map": lambda self, a, access, first, nbytes: Mapped(pinned.ctypes.data + first, lambda: None, flush=lambda first, n: None),
        "copy": lambda self, dst, src, stream: NotImplemented,
        "wait": lambda self, place, stream, point: False,
        "record": lambda self, place, stream: None,
        "limits": lambda self, place: Limits(imports={"host"}, alignment=4096),
    }
    if missing:
        del members[missing]
    adapter = use(variant("acme3", **members))
    for capability in CAPABILITIES:
        assert adapter.can(capability) == (capability != missing)
    t = interop.Allocation(5, 64, "acme3:0", adapter=adapter).tensor((64,), "uint8")
    steps = [
        lambda: interop.empty((8,), "uint8", device="acme3:0"), lambda: interop.empty((8,), "uint8", shared_with=["acme3:0"]),
        lambda: interop.empty((8,), "uint8", device="acme3:0", shared_with=["process"]),
        lambda: interop.empty((8,), "uint8", device="acme3:0").allocation.export("memfd"),
        lambda: interop.wrap(interop.ExternalHandle("host", 4096, 4096), 64, device="acme3:0", owner=None),
        lambda: t.map("read").value, lambda: interop.copyto(t, np.zeros(64, "u1")), lambda: interop.to(np.zeros(4), "acme3:0"),
        lambda: interop.acquire(t, "acme3:0", "write").release(), lambda: repr(t),
    ]
    for step in steps:
        with contextlib.suppress(interop.ExchangeError):
            step()


def test_refuse_gives_an_error_with_the_adapters_name() -> None:
    """SPEC A-REFUSE"""
    e = Smallest().refuse("cannot", remedy="do that")
    assert isinstance(e, interop.ExchangeError)
    assert (e.reason, e.remedy) == ("acme: cannot", "do that")


# --- registration -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("members", "message"), [
    ({"name": "not a name"}, "name"), ({"name": 3}, "name"), ({"types": "acme2.Buffer"}, "types"), ({"types": ("Buffer",)}, "types"),
    ({"reads": "magic"}, "reads"), ({"to_tensor": Adapter.to_tensor}, "to_tensor"), ({"from_tensor": Adapter.from_tensor}, "from_tensor"),
    ({"device": "acme:0"}, "device"), ({"device": 3}, "device"), ({"map": 3}, "map"), ({"copy": "yes"}, "copy"),
])
def test_mistakes_are_found_at_registration_and_named(members: dict[str, Any], message: str) -> None:
    """SPEC A-VALID: nothing is registered then"""
    before = registry.names()
    with pytest.raises(TypeError, match=message):
        register(variant(**{"name": "acme2", **members}) if "name" not in members else type("V", (Smallest,), members)())
    assert registry.names() == before


@pytest.mark.parametrize(("members", "message"), [
    ({"map": lambda self, a: None, "device": "acme2"}, "map"), ({"copy": lambda self: None}, "copy"),
    ({"to_tensor": lambda self: None}, "to_tensor"), ({"from_tensor": lambda self, t: None}, "from_tensor"),
    ({"import_handle": lambda self, h: None}, "import_handle"),
])
def test_a_method_that_cannot_be_called_as_the_contract_says_is_found(members: dict[str, Any], message: str) -> None:
    """SPEC A-VALID: signatures too"""
    try:
        with pytest.raises(TypeError, match=message):
            register(variant(**members))
    finally:
        if "acme2" in registry.names():
            registry.unregister("acme2")


def test_what_is_no_adapter_is_refused() -> None:
    """SPEC A-VALID"""
    for bad in (object(), Smallest, "acme"):
        with pytest.raises(TypeError):
            register(bad)       # type: ignore[arg-type]


@pytest.mark.parametrize("members", [{"name": "acme"}, {"name": "numpy"}, {"name": "interop"}, {"name": "torch"},
                                     {"types": ("acme.Buffer",)}, {"types": ("torch.Tensor",)},
                                     {"device": "acmedev"}, {"device": "cpu"}, {"device": "cuda"}])
def test_nothing_is_overwritten_silently(use: Any, members: dict[str, Any]) -> None:
    """SPEC A-NAME"""
    use(type("First", (Smallest,), {"device": "acmedev"})())
    if members.get("device") == "cuda":
        pytest.skip("cuda belongs to an adapter of interop's own once there is one")
    before = registry.names()
    with pytest.raises((ValueError, TypeError)):
        register(variant(**{"name": "acme2", **members}) if "name" not in members
                 else type("V", (Smallest,), {"types": ("x.Y",), **members})())
    assert registry.names() == before


def test_a_refused_registration_claims_nothing(use: Any) -> None:
    """SPEC A-NAME: neither its device nor its types"""
    use(Smallest())
    with pytest.raises(ValueError):
        register(type("V", (Smallest,), {"device": "acmefree", "name": "acme9"})())      # its type is taken
    use(variant("acme9", device="acmefree"))


def test_a_late_adapter_is_used_for_objects_seen_before(use: Any) -> None:
    """SPEC A-LATE"""
    b = Buffer(bytearray(4))
    with pytest.raises(TypeError):
        interop.as_tensor(b)
    assert interop.kind(b) is None
    use(Smallest())
    assert interop.as_tensor(b).nbytes == 4


# --- devices ------------------------------------------------------------------------------------------------------------
def test_a_device_of_ones_own_has_a_number_of_kdlextdev(use: Any) -> None:
    """SPEC A-DEVICE: two libraries side by side; the number leads back to the name"""
    use(variant("acme5", device="acme5"))
    use(variant("acme6", device="acme6"))
    a, b = interop.Device("acme5:0"), interop.Device("acme6:0")
    assert a != b
    assert interop.Device("acme5:1") != a
    pairs = set()
    for d in (a, b, interop.Device("acme5:7")):
        t = interop.wrap(9, 16, device=d, owner=None).tensor((16,), "uint8")
        number, index = t.__dlpack_device__()
        assert number == 12
        pairs.add(index)
        assert interop.Device((number, index)) == d
        assert str(interop.Device((number, index))) == str(d)
        assert str(t.device) == str(d)
        with pytest.raises(AttributeError):
            t.ptr       # noqa: B018
    assert len(pairs) == 3
    assert str(interop.Device("acme5")) == "acme5:0"


@pytest.mark.parametrize("bad", ["acme5:-1", "acme5:65536", "acme5:x", "acme5:", "acme5:99999999999"])
def test_device_numbers_have_bounds(use: Any, bad: str) -> None:
    """SPEC A-DEVICE"""
    use(variant("acme5", device="acme5"))
    with pytest.raises(ValueError):
        interop.Device(bad)


def test_a_capsule_keeps_the_device(use: Any) -> None:
    """SPEC A-DEVICE"""
    use(variant("acme5", device="acme5"))
    t = interop.wrap(9, 16, device="acme5:3", owner=None).tensor((4,), "uint8", byte_offset=8)
    back = interop.as_tensor(t.__dlpack__(max_version=(1, 3)))
    assert (str(back.device), back.handle, back.byte_offset) == ("acme5:3", 9, 8)
    assert interop.from_dlpack(t).handle == 9


# --- targets ------------------------------------------------------------------------------------------------------------
def test_an_unknown_target_gives_the_near_name(use: Any) -> None:
    """SPEC A-TARGET"""
    use(Smallest())
    with pytest.raises(ValueError, match="acme"):
        interop.to(np.zeros(3), "acne")
    with pytest.raises(ValueError, match="torch"):
        interop.to(np.zeros(3), "torhc")


def test_a_framework_that_is_not_installed_says_what_to_install(use: Any) -> None:
    """SPEC A-TARGET"""
    use(variant("acme7", module="acme_missing", requires="acme-sdk>=2"))
    with pytest.raises(ImportError, match=r"pip install acme-sdk>=2"):
        interop.to(np.zeros(3), "acme7")


@pytest.mark.parametrize("target", [3, 2.5, object(), None, [], {}])
def test_what_names_no_target_is_a_type_error(target: Any) -> None:
    """SPEC A-TARGET"""
    with pytest.raises(TypeError):
        interop.to(np.zeros(3), target)
    with pytest.raises(TypeError):
        interop.acquire(np.zeros(3), target, "read").value      # noqa: B018


def test_an_adapters_mistake_is_told_with_its_name(use: Any) -> None:
    """SPEC A-BLAME"""
    use(variant("acme8", types=("acme.Buffer",), to_tensor=lambda self, b: 3))
    with pytest.raises(TypeError, match=r"acme8.*to_tensor.*int"):
        interop.as_tensor(Buffer(bytearray(3)))


# --- entry points -------------------------------------------------------------------------------------------------------
def _install(folder: Any, name: str, code: str) -> None:
    (folder / f"{name}_plugin.py").write_text(code)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[interop.adapters]\n{name} = {name}_plugin:Plugin\n")


PLUGIN = """
import interop, types, sys
from interop.contract import Adapter
class Thing:
    def __init__(self): self.data = bytearray(4)
Thing.__module__ = "{0}_plugin"
class Plugin(Adapter):
    name, types, reads, module, device = "{0}", ("{0}_plugin.Thing",), "adapter", "{0}_plugin", "{0}"
    def to_tensor(self, b): return interop.as_tensor(b.data)
    def from_tensor(self, t, *, place=None, stream=None): return t
    def allocate(self, nbytes, *, place, alignment, shared_with): return interop.Allocation(3, nbytes, place, adapter=self)
"""


@pytest.mark.parametrize(("use", "expected"), [
    ("interop.to(np.zeros(3), 'plug'); print('used')", "used"),
    ("print(interop.empty((3,), 'u1', device='plug:0').device)", "plug:0"),
    ("print(interop.Device('plug:1'))", "plug:1"),
    ("import plug_plugin; print(interop.as_tensor(plug_plugin.Thing()).nbytes)", "4"),
    ("import plug_plugin; print(interop.kind(plug_plugin.Thing()))", "plug"),
    ("print('plug_plugin' in sys.modules)", "False"),
])
def test_adapters_are_found_by_entry_point_when_they_are_needed(tmp_path: Any, use: str, expected: str) -> None:
    """SPEC A-ENTRY: by name, by device, by an object of theirs; not before"""
    _install(tmp_path, "plug", PLUGIN.format("plug"))
    prints(use, expected, path=[tmp_path], prelude="import sys\nimport numpy as np\nimport interop\n")


def test_a_broken_entry_point_does_not_stop_the_others(tmp_path: Any) -> None:
    """SPEC A-ENTRY: it is reported, once"""
    from memkit import run
    _install(tmp_path, "aaa", "raise RuntimeError('broken plugin')")
    _install(tmp_path, "plug", PLUGIN.format("plug"))
    done = run("interop.to(np.zeros(3), 'plug'); interop.to(np.zeros(3), 'plug'); print('used')", path=[tmp_path],
               prelude="import sys\nimport numpy as np\nimport interop\n")
    assert done.stdout == "used\n", done.stderr
    assert done.stderr.count("RuntimeError: broken plugin") <= 1
