"""External handles, descriptors, memory of other processes. SPEC M-HANDLE-*."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import toy
from memkit import PRELUDE, ROOT, clean_toy, fds

import interop
from interop import ExternalHandle, memory

PAGE = mmap.PAGESIZE


@pytest.fixture
def driver() -> Iterator[toy.Driver]:
    with clean_toy() as d:
        yield d


def memfd(size: int = PAGE, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# --- memfd --------------------------------------------------------------------------------------------------------------
def test_a_wrapped_memfd_is_the_same_pages(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-MEMFD"""
    fd = memfd(2 * PAGE)
    with ExternalHandle.duplicate("memfd", fd, 2 * PAGE, offset=100) as h:
        a = interop.wrap(h, 64, device="cpu", owner=None)
    with interop.acquire(a.tensor((64,), "uint8"), "numpy", "write") as x:
        x[:] = 9
    assert os.pread(fd, 66, 99) == b"\0" + b"\x09" * 64 + b"\0"
    os.close(fd)
    del a, x
    gc.collect()


def test_wrapping_takes_nothing_from_the_caller(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-FD: duplicated on entry, close-on-exec; the caller's stays open"""
    h = ExternalHandle("memfd", memfd(), PAGE)
    before = set(os.listdir("/proc/self/fd"))
    a = interop.wrap(h, PAGE, device="cpu", owner=None)
    assert not h.consumed
    assert os.fstat(h.value).st_size == PAGE
    for fd in set(os.listdir("/proc/self/fd")) - before:
        if os.path.exists(f"/proc/self/fd/{fd}"):
            assert fcntl.fcntl(int(fd), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    h.close()
    assert interop.to(a.tensor((4,), "uint8"), "numpy").tolist() == [0] * 4
    del a
    gc.collect()


@pytest.mark.parametrize(("seals", "readonly", "message"), [
    (0, False, "seal"), (fcntl.F_SEAL_GROW, False, "seal"), (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, False, "writing"),
    (fcntl.F_SEAL_SHRINK | 0x10, False, "writing"),
])
def test_a_memfd_that_could_shrink_or_is_not_writable_is_refused(driver: toy.Driver, seals: int, readonly: bool, message: str) -> None:
    """SPEC M-HANDLE-SEAL: whoever truncates a mapped file kills its readers; F_SEAL_FUTURE_WRITE (0x10) forbids writing too"""
    with ExternalHandle("memfd", memfd(seals=seals), PAGE) as h:
        with pytest.raises(interop.ExchangeError, match=message):
            interop.wrap(h, PAGE, device="cpu", owner=None, readonly=readonly)


@pytest.mark.parametrize("seals", [fcntl.F_SEAL_WRITE, 0x10])
def test_a_memfd_sealed_against_writing_can_be_read(driver: toy.Driver, seals: int) -> None:
    """SPEC M-HANDLE-SEAL"""
    with ExternalHandle("memfd", memfd(seals=fcntl.F_SEAL_SHRINK | seals), PAGE) as h:
        a = interop.wrap(h, PAGE, device="cpu", owner=None, readonly=True)
    assert not interop.to(a.tensor((4,), "uint8"), "numpy").flags.writeable
    del a
    gc.collect()


def test_a_regular_file_is_no_memfd(driver: toy.Driver, tmp_path: Any) -> None:
    """SPEC M-HANDLE-SEAL"""
    (tmp_path / "x").write_bytes(b"\0" * PAGE)
    with ExternalHandle("memfd", os.open(tmp_path / "x", os.O_RDWR), PAGE) as h:
        with pytest.raises(interop.ExchangeError, match="memfd"):
            interop.wrap(h, PAGE, device="cpu", owner=None)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, PAGE + 1), (1, PAGE), (PAGE - 1, 2)])
def test_the_size_of_a_memfd_is_checked(driver: toy.Driver, offset: int, nbytes: int) -> None:
    """SPEC M-HANDLE-MEMFD: against the file, not against what the handle says"""
    with ExternalHandle("memfd", memfd(), 10 * PAGE, offset) as h:
        with pytest.raises(ValueError):
            interop.wrap(h, nbytes, device="cpu", owner=None)


def test_a_memfd_is_not_host_memory_of_a_device_without_adapter(driver: toy.Driver) -> None:
    """SPEC M-WRAP-DEVICE: a handle never turns up on another device than was said"""
    with ExternalHandle("memfd", memfd(), PAGE) as h:
        with pytest.raises((interop.ExchangeError, ValueError)):
            interop.wrap(h, PAGE, device="opencl:0", owner=None)


# --- who closes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["", "import"])
def test_descriptors_balance_when_an_import_succeeds_or_fails(driver: toy.Driver, call: str) -> None:
    """SPEC M-HANDLE-FD: a successful import consumes the duplicate; a failed one leaves nothing open"""
    c = toy.Context()
    with ExternalHandle("opaque_fd", memfd(), PAGE) as h:
        before = fds()
        if call:
            driver.fail_next(call)
            with pytest.raises(toy.ToyError):
                interop.wrap(h, PAGE, device=c, owner=None)
        else:
            a = interop.wrap(h, PAGE, device=c, owner=None)
            assert fds() == before + 1
            del a
            gc.collect()
        assert fds() == before
        assert not h.consumed


def test_an_import_that_turns_out_too_small_is_given_back(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-FD: failure after the driver took it"""
    c = toy.Context()
    with ExternalHandle("opaque_fd", memfd(), PAGE) as h:
        with pytest.raises(ValueError):
            interop.wrap(h, PAGE + 1, device=c, owner=None)
    gc.collect()
    assert driver.handles == 0


def test_a_handle_closes_what_nobody_took(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-FD: with, close, forgotten"""
    before = fds()
    with ExternalHandle("dma_buf", memfd(), PAGE):
        assert fds() == before + 1
    assert fds() == before
    h = ExternalHandle("memfd", memfd(), PAGE)
    h.close()
    h.close()
    assert fds() == before
    h = ExternalHandle("memfd", memfd(), PAGE)
    del h
    gc.collect()
    assert fds() == before


def test_a_taken_handle_is_not_closed_again(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-FD"""
    with ExternalHandle("memfd", memfd(), PAGE) as h:
        fd = h.take()
        with pytest.raises(interop.ExchangeError, match="consumed"):
            h.take()
        with pytest.raises(interop.ExchangeError, match="consumed"):
            h.pack()
    assert os.fstat(fd).st_size == PAGE
    os.close(fd)


def test_export_and_import_join_two_contexts(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-IMPORT: same bytes, new handle"""
    one, two = toy.Context(0), toy.Context(0)
    t = interop.empty((PAGE,), "uint8", device=one, shared_with=[two])
    with t.allocation.export("opaque_fd") as h:
        a = interop.wrap(h, PAGE, device=two, owner=None)
    one.poke(t, b"\x05" * PAGE)
    assert two.peek(a.tensor((8,), "uint8")) == b"\x05" * 8
    assert a.context is two
    del a
    gc.collect()


def test_what_was_not_allocated_for_sharing_is_not_exported(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-EXPORT"""
    t = interop.empty((8,), "uint8", device=toy.Context())
    with pytest.raises(interop.ExchangeError, match="exports"):
        t.allocation.export("opaque_fd")
    assert driver.calls["export"] == 0


def test_what_an_import_takes_is_said_before_it_is_tried(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-QUERY: no driver call, the offending number in the message"""
    c = toy.Context()
    assert memory.importable("opaque_fd", c).size_alignment == PAGE
    assert memory.importable("host", c).pointer_alignment == PAGE
    assert not memory.importable("dma_buf", c).supported
    assert not memory.importable("memfd", "cuda:0").supported
    c.dedicated = True                                          # type: ignore[attr-defined]
    cases = [(ExternalHandle("opaque_fd", memfd(), PAGE), "dedicated"), (ExternalHandle("opaque_fd", memfd(), PAGE + 1), str(PAGE + 1)),
             (ExternalHandle("dma_buf", memfd(), PAGE), "dma_buf"), (ExternalHandle("host", 4097, PAGE), "0x1001")]
    for h, message in cases:
        with h, pytest.raises(interop.ExchangeError, match=message):
            interop.wrap(h, PAGE, device=c, owner=None)
    assert driver.calls["import"] == 0


@pytest.mark.parametrize("fields", [
    {"kind": "nonsense"}, {"value": -1}, {"nbytes": 0}, {"nbytes": -1}, {"offset": PAGE}, {"offset": -1}, {"device_uuid": b"x"},
])
def test_a_handle_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    """SPEC M-HANDLE-FIELDS"""
    with pytest.raises(ValueError):
        ExternalHandle(**{"kind": "host", "value": PAGE, "nbytes": PAGE, **fields})


def test_a_uuid_of_zeros_is_unknown() -> None:
    """SPEC M-HANDLE-UUID: equal to nothing"""
    h = ExternalHandle("host", PAGE, PAGE, device_uuid=bytes(16), driver_uuid=bytes(16))
    assert (h.device_uuid, h.driver_uuid) == (None, None)


# --- over a socket ------------------------------------------------------------------------------------------------------
def test_a_packed_handle_comes_back_whole() -> None:
    """SPEC M-HANDLE-PACK"""
    uuid = bytes(range(16))
    with ExternalHandle("opaque_fd", memfd(), PAGE, 8, True, 5, uuid, uuid) as h:
        data, sent = h.pack()
        with ExternalHandle.unpack(data, [os.dup(sent[0])]) as back:
            for name in ("kind", "nbytes", "offset", "dedicated", "memory_type", "device_uuid", "driver_uuid"):
                assert getattr(back, name) == getattr(h, name)


GOOD = {"kind": "memfd", "nbytes": PAGE, "offset": 0, "dedicated": False, "memory_type": None, "device_uuid": None, "driver_uuid": None}


def _packed(**fields: Any) -> bytes:
    import json
    import struct
    body = json.dumps({**GOOD, **fields}).encode()
    return struct.pack("<4sI", b"IXH1", len(body)) + body


@pytest.mark.parametrize("data", [
    b"", b"IXH1", b"IXH2" + _packed()[4:], _packed()[:-3], b"IXH1\xff\xff\xff\xff{}", _packed(kind=3), _packed(nbytes="x"),
    _packed(nbytes=1.5), _packed(nbytes=None), _packed(nbytes=2**70), _packed(offset=0.5), _packed(offset=-1), _packed(device_uuid="zz"),
    _packed(device_uuid=[1]), _packed(device_uuid="00"), _packed(dedicated="no"), _packed(memory_type="x"), _packed(memory_type=-1),
    b"IXH1\x02\0\0\0[]", b"IXH1\x01\0\0\0\xff",
], ids=range(20))
def test_hostile_bytes_are_refused_and_the_descriptor_is_still_ours(data: bytes) -> None:
    """SPEC M-HANDLE-PACK: what comes from another process may be anything"""
    fd = memfd()
    with pytest.raises(ValueError):
        ExternalHandle.unpack(data, [fd])
    gc.collect()
    os.close(fd)                # EBADF, were it closed twice


def _child(code: str, sock: socket.socket) -> subprocess.Popen[str]:
    prelude = f"import socket\nsock = socket.socket(fileno={sock.fileno()})\n"
    return subprocess.Popen([sys.executable, "-c", PRELUDE + prelude + code], pass_fds=[sock.fileno()], text=True, cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}, stderr=subprocess.PIPE)


RECEIVE = """
data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
h = interop.ExternalHandle.unpack(data, fds)
"""


def test_memory_from_empty_is_shared_with_another_process(driver: toy.Driver) -> None:
    """SPEC M-EMPTY-PROCESS; user job 13"""
    t = interop.empty((1024, 3), "float32", shared_with=["process", "torch"])
    x = interop.to(t, "numpy")
    x[:] = 1
    here, there = socket.socketpair()
    with here, there:
        child = _child(RECEIVE + """
with h:
    a = interop.wrap(h, h.nbytes, device="cpu", owner=None)
x = interop.to(a.tensor((1024, 3), "float32"), "numpy")
x += 1
sock.send(b"done")
""", there)
        with t.allocation.export("memfd") as h:
            data, sent = h.pack()
            socket.send_fds(here, [data], sent)
        assert here.recv(4) == b"done"
        assert (child.wait(20), child.stderr.read()) == (0, "")       # type: ignore[union-attr]
        child.stderr.close()                                          # type: ignore[union-attr]
    assert (x == 2).all()
    del x, t
    gc.collect()


def test_device_memory_is_imported_in_another_process(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-IMPORT"""
    c = toy.Context()
    t = interop.empty((PAGE,), "uint8", device=c, shared_with=["process"])
    here, there = socket.socketpair()
    with here, there:
        child = _child(RECEIVE + """
c = toy.Context()
with h:
    a = interop.wrap(h, h.nbytes, device=c, owner=None)
c.fill(a.tensor((16,), "uint8"), 7).wait(5)
a.close()
toy.driver.check()
sock.send(b"done")
""", there)
        with t.allocation.export("opaque_fd") as h:
            data, sent = h.pack()
            socket.send_fds(here, [data], sent)
        assert here.recv(4) == b"done"
        assert (child.wait(20), child.stderr.read()) == (0, "")       # type: ignore[union-attr]
        child.stderr.close()                                          # type: ignore[union-attr]
    assert c.peek(t)[:17] == b"\x07" * 16 + b"\0"


# --- recognising a handle -----------------------------------------------------------------------------------------------
def test_two_wraps_of_one_handle_share_leases(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-ROOT: one memory object, one ledger; so the simplest to_tensor, which wraps each time, is right"""
    c = toy.Context()
    b = toy.Buffer(c, (64,))
    one, two = (interop.wrap(b.handle, 64, device=c, owner=b).tensor((64,), "uint8") for _ in range(2))
    with one.map("write"):
        with pytest.raises(interop.LeaseError):
            two.map("read").value       # noqa: B018
    other = toy.Context()
    same_number = interop.empty((64,), "uint8", device=other)
    assert same_number.handle == b.handle
    with one.map("write"), same_number.map("write"):
        pass


def test_a_tensor_that_went_through_another_library_is_recognised(driver: toy.Driver) -> None:
    """SPEC M-HANDLE-ROOT: a live Allocation with the same device and value vouches for the handle"""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    c = toy.Context()
    t = interop.empty((64,), "uint8", device=c)
    back = interop.as_tensor(tvm_ffi.from_dlpack(t))
    assert back.handle == t.handle
    with t.map("write"):
        with pytest.raises(interop.LeaseError):
            back.map("read").value      # noqa: B018
    with back.map("write") as a:
        a[:] = 4
    assert c.peek(t) == b"\x04" * 64
    del back, a
    gc.collect()
