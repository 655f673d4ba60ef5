"""The fake CUDA driver: that it answers as a card does, that it sees what it is there to see, that its names are the real ones.

`MEASURED` was read off an H200 (CUDA 13.0, cuda-bindings 13.3); marked `gpu`, the card is asked again.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda_kernels
import fake_cuda_names as names
import pytest
from fake_cuda import FUNCTIONS, CUresult, FakeCuda, Violation

from interop.adapters.cuda import driver as adapter_driver

N = 4096
CHUNK = 2 << 20


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """With device 0 current, as an application has it."""
    fake = FakeCuda()
    fake.cuInit(0)
    fake.cuCtxPushCurrent(fake.cuDevicePrimaryCtxRetain(0)[1])
    yield fake
    fake.stop()
    fake.close()


def objections(fake: FakeCuda) -> str:
    said = "; ".join(fake.violations)
    fake.violations.clear()
    return said


# ---- the same questions to the fake and to a card ----
def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def said(result: tuple[Any, ...]) -> str:
    return str(result[0].name.removeprefix("CUDA_").removeprefix("ERROR_"))


def elsewhere(f: Callable[[], Any]) -> Any:
    """On a thread that has no current context."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(f()))
    thread.start()
    thread.join()
    return box[0]


def prop(cu: Any) -> Any:
    p = cu.CUmemAllocationProp()
    p.type, p.location.type, p.location.id = (cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
                                              cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0)
    p.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return p


class Card:
    """What the questions are asked with. Everything of it belongs to device 0 and is never given back."""

    def __init__(self, cu: Any) -> None:
        self.cu = cu
        ok(cu.cuInit(0))
        self.context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))
        ok(cu.cuCtxPushCurrent(self.context))
        self.stream, self.event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(2))
        self.pages = mmap.mmap(-1, 2 * N)
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def calls(self) -> dict[str, Callable[[], Any]]:
        cu, s, e, h = self.cu, self.stream, self.event, self.host
        d, m, p, a = ok(cu.cuMemAlloc(N)), ok(cu.cuMemAlloc(16)), ok(cu.cuMemHostAlloc(16, 0)), ok(cu.cuMemAllocAsync(64, s))
        gone = ok(cu.cuEventCreate(2))
        type_ = [cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE]
        return {
            "event create": lambda: cu.cuEventCreate(2), "event query": lambda: cu.cuEventQuery(e),
            "event destroy": lambda: cu.cuEventDestroy(gone), "record": lambda: cu.cuEventRecord(e, s),
            "record legacy": lambda: cu.cuEventRecord(e, 1), "wait": lambda: cu.cuStreamWaitEvent(s, e, 0),
            "stream create": lambda: cu.cuStreamCreate(1), "stream query": lambda: cu.cuStreamQuery(s),
            "stream query legacy": lambda: cu.cuStreamQuery(1), "is capturing": lambda: cu.cuStreamIsCapturing(s),
            "is capturing legacy": lambda: cu.cuStreamIsCapturing(1), "alloc": lambda: cu.cuMemAlloc(16), "free": lambda: cu.cuMemFree(m),
            "host alloc": lambda: cu.cuMemHostAlloc(16, 0), "free host": lambda: cu.cuMemFreeHost(p),
            "register": lambda: cu.cuMemHostRegister(h, N, 0), "alloc async": lambda: cu.cuMemAllocAsync(64, s),
            "free async": lambda: cu.cuMemFreeAsync(a, s), "copy": lambda: cu.cuMemcpyDtoDAsync(d, int(d) + 64, 16, s),
            "what is it": lambda: cu.cuPointerGetAttributes(1, type_, d), "retain handle": lambda: cu.cuMemRetainAllocationHandle(d),
            "create": lambda: cu.cuMemCreate(CHUNK, prop(cu), 0), "reserve": lambda: cu.cuMemAddressReserve(CHUNK, 0, 0, 0),
            "pop": lambda: cu.cuCtxPopCurrent(),
        }  # fmt: skip


def without_context(card: Card) -> dict[str, str]:
    out = {}
    for name, f in card.calls().items():
        out[name] = said(elsewhere(f))
    card.cu.cuMemHostUnregister(card.host)
    return out


def beside_capture(card: Card, *, relaxed: bool = False, blocking: bool = False) -> dict[str, str]:
    """Of another stream, from another thread. What it says, or !what where it broke the capture."""
    cu, out = card.cu, {}
    calls = card.calls()
    calls.pop("pop")
    for name, f in calls.items():
        s = ok(cu.cuStreamCreate(0 if blocking else 1))
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))

        def ask(f: Callable[[], Any] = f) -> Any:
            ok(cu.cuCtxPushCurrent(card.context))
            cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode(2 if relaxed else 0))
            return f()
        answer = said(elsewhere(ask))
        broken = int(ok(cu.cuStreamIsCapturing(s))) == 2
        assert (said(cu.cuStreamEndCapture(s)) != "SUCCESS") == broken
        out[name] = "!" * broken + answer
        cu.cuStreamDestroy(s)
    cu.cuMemHostUnregister(card.host)
    return out


def in_capture(card: Card) -> dict[str, str]:
    cu, out = card.cu, {}
    outside, inside = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
    ok(cu.cuEventRecord(outside, card.stream))
    for name, f in {"query": cu.cuStreamQuery, "synchronize": cu.cuStreamSynchronize, "ask": cu.cuStreamIsCapturing,
                    "wait for outside": lambda s: cu.cuStreamWaitEvent(s, outside, 0), "query event": lambda s: cu.cuEventQuery(inside),
                    "device-wide": lambda s: cu.cuCtxSynchronize()}.items():  # fmt: skip
        s = ok(cu.cuStreamCreate(1))
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        ok(cu.cuEventRecord(inside, s))
        answer = said(f(s))
        out[name] = "!" * (int(ok(cu.cuStreamIsCapturing(s))) == 2) + answer
        cu.cuStreamEndCapture(s)
    return out


def pointers(card: Card) -> dict[str, list[Any]]:
    """Type, device, managed, start, size, whether in a pool, handle types; whether the singular form knows it."""
    cu, out = card.cu, {}
    asked = "MEMORY_TYPE DEVICE_ORDINAL IS_MANAGED RANGE_START_ADDR RANGE_SIZE MEMPOOL_HANDLE ALLOWED_HANDLE_TYPES"
    attributes = [getattr(cu.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + a) for a in asked.split()]
    va, handle = ok(cu.cuMemAddressReserve(4 * CHUNK, 0, 0, 0)), ok(cu.cuMemCreate(CHUNK, prop(cu), 0))
    ok(cu.cuMemMap(int(va) + CHUNK, CHUNK, 0, handle, 0))
    ok(cu.cuMemHostRegister(card.host + 100, 300, 0))
    pool = ok(cu.cuMemAllocAsync(N, card.stream))
    for name, (base, offset) in {
        "device": (ok(cu.cuMemAlloc(N)), 16), "managed": (ok(cu.cuMemAllocManaged(N, 1)), 16), "pinned": (ok(cu.cuMemHostAlloc(N, 0)), 16),
        "registered": (card.host + 100, 16), "beside registered": (card.host, 16), "pool": (pool, 16), "reserved": (va, 16),
        "mapped": (va, CHUNK + 16), "nobody": (0x1000, 0)}.items():  # fmt: skip
        at = int(base) + offset
        kind, device, managed, start, size, in_pool, types = ok(cu.cuPointerGetAttributes(7, attributes, at))
        assert {said(cu.cuPointerGetAttribute(a, at)) for a in attributes} == {"SUCCESS" if kind else "INVALID_VALUE"}
        out[name] = [kind, device, managed, int(start) and int(start) - int(base), size, bool(int(in_pool)), types]
    ok(cu.cuMemHostUnregister(card.host + 100))
    return out


def rules(card: Card) -> dict[str, Any]:
    cu, h, out = card.cu, card.host, {}
    for name, f in {
        "register": lambda: cu.cuMemHostRegister(h, 2 * N, 0), "register again": lambda: cu.cuMemHostRegister(h, N, 0),
        "unregister within": lambda: cu.cuMemHostUnregister(h + N), "unregister": lambda: cu.cuMemHostUnregister(h),
        "unregister again": lambda: cu.cuMemHostUnregister(h), "register odd": lambda: cu.cuMemHostRegister(h + 100, 300, 0),
        "register on its page": lambda: cu.cuMemHostRegister(h + 2000, 300, 0), "unregister page": lambda: cu.cuMemHostUnregister(h),
        "device pointer of nothing": lambda: cu.cuMemHostGetDevicePointer(h, 0), "create odd": lambda: cu.cuMemCreate(N, prop(cu), 0),
        "too much": lambda: cu.cuMemAlloc(1 << 60), "granularity": lambda: cu.cuMemGetAllocationGranularity(prop(cu), 0),
        "query nothing": lambda: cu.cuEventQuery(cu.cuEventCreate(2)[1])}.items():  # fmt: skip
        out[name] = said(f())
    cu.cuMemHostUnregister(h + 100), cu.cuMemHostUnregister(h + 2000)
    fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    va, handle = ok(cu.cuMemAddressReserve(CHUNK, 0, 0, 0)), ok(cu.cuMemCreate(CHUNK, prop(cu), 0))
    ok(cu.cuMemMap(va, CHUNK, 0, handle, 0))
    out["free while mapped"] = [said(cu.cuMemAddressFree(va, CHUNK)), said(cu.cuMemFree(va)), said(cu.cuMemUnmap(va, CHUNK // 2))]
    description = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    description.type, description.size = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, CHUNK
    for name, mine in {"memory": lambda: int(ok(cu.cuMemExportToShareableHandle(handle, fd_type, 0))),
                       "a pipe": lambda: os.pipe()[0]}.items():  # fmt: skip
        fd = mine()
        result = cu.cuMemImportFromShareableHandle(fd, fd_type)
        out["import " + name] = [said(result), is_open(fd)]
        if not int(result[0]):
            cu.cuMemRelease(result[1])
        description.handle.fd = fd
        result = cu.cuImportExternalMemory(description)
        out["import external " + name] = [said(result), is_open(fd)]
        if not int(result[0]):
            buffer = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
            buffer.size = CHUNK
            p = ok(cu.cuExternalMemoryGetMappedBuffer(result[1], buffer))
            out["external"] = [said(cu.cuMemRetainAllocationHandle(p)), said(cu.cuMemFree(p)),
                               said(cu.cuDestroyExternalMemory(result[1]))]
    out["let go"] = [said(cu.cuMemRelease(handle)), said(cu.cuMemUnmap(va, CHUNK)), said(cu.cuMemAddressFree(va, CHUNK))]
    return out


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _same(answer: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(", "), answer)


_ALL = ("event create, event query, event destroy, record, record legacy, wait, stream create, stream query, stream query legacy, "
        "is capturing, is capturing legacy, alloc, free, host alloc, free host, register, alloc async, free async, copy, what is it, "
        "create, reserve")
_BREAKS = "event query, stream query, stream query legacy, alloc, free, host alloc, free host, register, alloc async, free async"
_PLAIN = _same("SUCCESS", _ALL) | {"retain handle": "INVALID_VALUE"}
MEASURED: dict[str, tuple[Callable[[Card], Any], dict[str, Any]]] = {
    "without context": (without_context, _PLAIN | _same(
        "INVALID_CONTEXT", "event create, record legacy, stream create, stream query legacy, is capturing legacy, alloc, host alloc, "
        "register, pop")),
    "beside a capture": (beside_capture, _PLAIN | _same("!STREAM_CAPTURE_UNSUPPORTED", _BREAKS)),
    "beside a capture, relaxed": (lambda card: beside_capture(card, relaxed=True), _PLAIN),
    "beside a blocking capture, relaxed": (
        lambda card: beside_capture(card, relaxed=True, blocking=True),
        _PLAIN | _same("!STREAM_CAPTURE_IMPLICIT", "record legacy, stream query legacy")
        | _same("STREAM_CAPTURE_IMPLICIT", "is capturing legacy")),
    "in a capture": (in_capture, {
        "query": "!STREAM_CAPTURE_UNSUPPORTED", "synchronize": "!STREAM_CAPTURE_UNSUPPORTED", "ask": "SUCCESS",
        "wait for outside": "!STREAM_CAPTURE_ISOLATION", "query event": "!CAPTURED_EVENT", "device-wide": "!STREAM_CAPTURE_UNSUPPORTED"}),
    "pointers": (pointers, {
        "device": [2, 0, False, 0, N, False, 0], "managed": [2, 0, True, 0, N, False, 0], "pinned": [1, 0, False, 0, N, False, 0],
        "registered": [1, 0, False, 0, 300, False, 0], "beside registered": [0, 0, False, 0, 0, False, 0],
        "pool": [2, 0, False, 0, N, True, 0], "reserved": [0, 0, False, 0, 4 * CHUNK, False, 0],
        "mapped": [2, 0, False, 0, 4 * CHUNK, False, 1], "nobody": [0, 0, False, 0, 0, False, 0]}),
    "rules": (rules, {
        "register": "SUCCESS", "register again": "HOST_MEMORY_ALREADY_REGISTERED", "unregister within": "INVALID_VALUE",
        "unregister": "SUCCESS", "unregister again": "HOST_MEMORY_NOT_REGISTERED", "register odd": "SUCCESS",
        "register on its page": "SUCCESS", "unregister page": "HOST_MEMORY_NOT_REGISTERED", "device pointer of nothing": "INVALID_VALUE",
        "create odd": "INVALID_VALUE", "too much": "OUT_OF_MEMORY", "granularity": "SUCCESS", "query nothing": "SUCCESS",
        "free while mapped": ["INVALID_VALUE"] * 3, "import memory": ["SUCCESS", True], "import external memory": ["SUCCESS", False],
        "external": ["INVALID_VALUE", "SUCCESS", "SUCCESS"], "import a pipe": ["UNKNOWN", True],
        "import external a pipe": ["UNKNOWN", False],       # closed although refused
        "let go": ["SUCCESS"] * 3}),
}  # fmt: skip


@pytest.mark.parametrize("questions", MEASURED)
def test_it_answers_as_a_card_does(questions: str) -> None:
    ask, expected = MEASURED[questions]
    assert ask(Card(FakeCuda())) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("questions", MEASURED)
def test_a_card_answers_so(questions: str) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    ask, expected = MEASURED[questions]
    try:
        ok(driver.cuInit(0))
    except (RuntimeError, AssertionError):
        pytest.skip("no CUDA driver here")
    assert ask(Card(driver)) == expected
    driver.cuCtxPopCurrent()


def test_its_names_and_values_are_those_of_cuda_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert [f for f in FUNCTIONS if not callable(getattr(driver, f, None))] == []
    for name, enum in names.ENUMS.items():
        real = getattr(driver, name)
        assert {k: int(v) for k, v in enum.__members__.items()} == {k: int(getattr(real, k)) for k in enum.__members__}, name
    for name, bag in names.STRUCTS.items():
        real = dir(getattr(driver, name))
        assert [f for f in bag._fields if f not in real] == [], name
    assert {k: int(getattr(driver, k)) for k in names.CONSTANTS} == names.CONSTANTS
    assert [code for code in adapter_driver._LOST if not hasattr(driver.CUresult, code)] == []


# ---- what it is there to see ----
def test_work_runs_when_told_and_in_the_order_of_its_stream(fake: FakeCuda) -> None:
    a, b, ran = fake.make_stream(), fake.make_stream(), []
    for stream, name in ((a, 1), (b, 2), (a, 3)):
        fake.launch(stream, lambda name=name: ran.append(name))
    assert ran == [] and fake.queued == 3
    assert fake.run(a, n=1) == 1 and ran == [1]
    fake.run()
    assert ran == [1, 2, 3]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("legacy_first", [False, True])
def test_the_legacy_stream_orders_blocking_streams_and_no_others(fake: FakeCuda, blocking: bool, legacy_first: bool) -> None:
    data, s = fake.make_memory(N), fake.make_stream(blocking=blocking)
    first, then = (1, s) if legacy_first else (s, 1)
    fake.launch(first, writes=[(data, N)])
    fake.launch(then, reads=[(data, N)])
    assert ("data race" in objections(fake)) == (not blocking)
    assert fake.run(then) == (0 if blocking else 1)


@pytest.mark.parametrize("kinds", ["rr", "rw", "wr", "ww"])
def test_two_streams_that_touch_the_same_bytes_race_unless_both_read(fake: FakeCuda, kinds: str) -> None:
    data, streams = fake.make_memory(N), (fake.make_stream(), fake.make_stream())
    for s, kind in zip(streams, kinds, strict=True):
        fake.launch(s, **{"reads" if kind == "r" else "writes": [(data, N)]})
    assert ("data race" in objections(fake)) == (kinds != "rr")


def test_other_bytes_do_not_race(fake: FakeCuda) -> None:
    data = fake.make_memory(N)
    for i in range(2):
        fake.launch(fake.make_stream(), writes=[(data + i * 64, 64)])
    assert not fake.violations


def test_what_the_host_has_seen_to_be_over_is_ordered(fake: FakeCuda) -> None:
    data, a, b = fake.make_memory(N), fake.make_stream(), fake.make_stream()
    fake.launch(a, writes=[(data, N)])
    assert said(fake.cuStreamQuery(a)) == "NOT_READY"
    fake.run()                                              # it ran, and the host does not know
    fake.launch(b, reads=[(data, N)])
    assert "data race" in objections(fake)
    assert said(fake.cuStreamSynchronize(a)) == "SUCCESS"
    fake.launch(b, reads=[(data, N)])
    assert not fake.violations


def test_order_goes_through_a_third_stream(fake: FakeCuda) -> None:
    data, streams = fake.make_memory(N), [fake.make_stream() for _ in range(3)]
    event = ok(fake.cuEventCreate(2))
    fake.launch(streams[0], writes=[(data, N)])
    for first, then in itertools.pairwise(streams):
        fake.cuEventRecord(event, first), fake.cuStreamWaitEvent(then, event, 0)
    fake.launch(streams[2], writes=[(data, N)])
    assert not fake.violations
    assert fake.run(streams[2]) == 0 and fake.run() == 2


def test_use_after_free_is_seen(fake: FakeCuda) -> None:
    s, data = fake.make_stream(), int(ok(fake.cuMemAlloc(N)))
    fake.launch(s, reads=[(data, N)])
    fake.cuMemFree(data)
    assert "cuMemFree of memory" in objections(fake)        # while it is used
    assert fake.peek(data, 2) == b"\xdb\xdb"
    fake.launch(s, reads=[(data, N)])
    assert "use after free" in objections(fake)
    assert said(fake.cuMemFree(data)) == "INVALID_VALUE"
    assert "already" in objections(fake)


def test_memory_of_a_pool_is_ordered_by_streams(fake: FakeCuda) -> None:
    a, b = fake.make_stream(), fake.make_stream()
    data = int(ok(fake.cuMemAllocAsync(N, a)))
    fake.launch(b, writes=[(data, N)])
    assert "data race" in objections(fake)                  # used before it is there
    fake.cuMemFreeAsync(data, a)
    assert "data race" in objections(fake)                  # freed while b uses it
    fake.launch(a, reads=[(data, N)])
    assert "use after free" in objections(fake)


def test_device_wide_and_synchronous_calls_are_objected_to(fake: FakeCuda) -> None:
    data, host = fake.make_memory(N), ctypes.create_string_buffer(N)
    fake.cuCtxSynchronize()
    assert "device-wide" in objections(fake)
    fake.cuMemcpyDtoH(ctypes.addressof(host), data, N)
    assert "synchronous copy" in objections(fake)


def test_a_call_fails_on_demand_and_does_nothing(fake: FakeCuda) -> None:
    fake.fail_next("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, times=2)
    with pytest.raises(Violation, match="never failed"):
        fake.check()
    assert [fake.cuMemAlloc(N) for _ in range(2)] == [(CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)] * 2
    fake.check()
    assert int(fake.cuMemAlloc(N)[0]) == 0 and fake.calls["cuMemAlloc"] == 3


def test_an_event_belongs_to_its_device(fake: FakeCuda) -> None:
    event = ok(fake.cuEventCreate(2))
    assert said(fake.cuEventRecord(event, fake.make_stream(1))) == "INVALID_HANDLE"
    assert "not" in objections(fake)


@pytest.mark.parametrize("kind", ["memory", "handle", "external"])
def test_what_is_left_is_named(fake: FakeCuda, kind: str) -> None:
    left = fake.cuMemAlloc(N) if kind == "memory" else fake.cuMemCreate(CHUNK, prop(fake), 0)
    if kind == "external":
        description = names.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        description.type, description.size, description.handle.fd = 1, CHUNK, ok(fake.cuMemExportToShareableHandle(left[1], 1, 0))
        ok(fake.cuImportExternalMemory(description))
        fake.cuMemRelease(left[1])
    with pytest.raises(Violation, match={"memory": "device", "handle": "allocation handle", "external": "external memory"}[kind]):
        fake.check()


# ---- what it does ----
def test_copies_move_bytes_once_they_run(fake: FakeCuda) -> None:
    s, a, b, far = fake.make_stream(), fake.make_memory(N), fake.make_memory(N), fake.make_memory(N, 1)
    pinned = fake.make_memory(N, kind="pinned")
    fake.poke(pinned, b"twelve bytes")
    fake.cuDevicePrimaryCtxRetain(1)
    fake.cuMemcpyHtoDAsync(a, pinned, 12, s), fake.cuMemcpyDtoDAsync(b, a, 12, s)
    fake.cuMemcpyPeerAsync(far, fake.context(1), b, fake.context(0), 12, s)
    assert fake.peek(far, 4) == bytes(4)
    fake.run()
    assert fake.peek(far, 12) == b"twelve bytes"
    assert not fake.violations and not fake.staged


def test_pageable_host_memory_is_staged(fake: FakeCuda) -> None:
    s, data, host = fake.make_stream(), fake.make_memory(N), ctypes.create_string_buffer(b"before")
    fake.cuMemcpyHtoDAsync(data, ctypes.addressof(host), 6, s)
    host.value = b"after"
    fake.cuMemcpyDtoHAsync(ctypes.addressof(host), data, 6, s)      # returns when it is there
    assert host.raw[:6] == b"before" and fake.staged == 2
    fake.cuMemcpyDtoDAsync(data, ctypes.addressof(host), 6, s)
    assert "nobody registered" in objections(fake)


def test_boxes_are_copied_row_by_row(fake: FakeCuda) -> None:
    s, src, dst = fake.make_stream(), fake.make_memory(N), fake.make_memory(N)
    fake.poke(src, bytes(range(256)))
    c = names.CUDA_MEMCPY3D()
    c.srcMemoryType = c.dstMemoryType = names.CUmemorytype.CU_MEMORYTYPE_DEVICE
    c.srcDevice, c.srcPitch, c.srcHeight, c.srcXInBytes, c.srcY, c.srcZ = src, 8, 4, 1, 1, 1
    c.dstDevice, c.dstPitch, c.dstHeight = dst, 2, 2
    c.WidthInBytes, c.Height, c.Depth = 2, 2, 2
    ok((*fake.cuMemcpy3DAsync(c, s), None))
    fake.run()
    assert list(fake.peek(dst, 8)) == [41, 42, 49, 50, 73, 74, 81, 82]
    c.srcPitch = 2
    assert said(fake.cuMemcpy3DAsync(c, s)) == "INVALID_VALUE"


def test_kernels_are_python_functions(fake: FakeCuda) -> None:
    data, s, seen = fake.make_memory(N), fake.make_stream(), []

    def kernel(params: Any, grid: Any, block: Any) -> Any:
        seen.append((params, grid, block))
        return (lambda: fake.poke(data, b"ran")), [], [(data, 3)]
    fake.kernels["k"] = kernel
    module = ok(fake.cuModuleLoadData(b"ptx"))
    assert said(fake.cuModuleGetFunction(module, b"other")) == "NOT_FOUND"
    fake.cuLaunchKernel(ok(fake.cuModuleGetFunction(module, b"k")), 4, 1, 1, 256, 1, 1, 0, s, "raw", 0)
    assert seen == [("raw", (4, 1, 1), (256, 1, 1))] and fake.peek(data, 3) == bytes(3)
    fake.run()
    assert fake.peek(data, 3) == b"ran"


@pytest.mark.parametrize("mistake", ["", "blocks", "reciprocal", "address"])
def test_the_kernels_of_pack_move_words_as_they_are_launched(fake: FakeCuda, mistake: str) -> None:
    fake_cuda_kernels.install(fake)
    src, dst, rows = fake.make_memory(4 * N), fake.make_memory(4 * N), 700
    fake.poke(src, os.urandom(4 * N))
    magic, shift = (1, 2) if mistake == "reciprocal" else (1, 1)           # by 2
    raw = struct.pack("=QQIIII", dst, src + (mistake == "address"), 2 * rows, 2, 0, 0)
    raw += struct.pack("=IIIIqq", 2, magic, shift, 0, 4, 4 * rows) + struct.pack("=IIIIqq", rows, 1, 10, 0, 8, 4)
    arguments = ctypes.create_string_buffer(raw, 288)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    f = ok(fake.cuModuleGetFunction(ok(fake.cuModuleLoadData(b"ptx")), b"linear_4"))
    fake.cuLaunchKernel(f, 1 if mistake == "blocks" else 2, 1, 1, 256, 1, 1, 0, 1, ctypes.addressof(params), 0)
    fake.run()
    a, b = (memoryview(fake.peek(x, 8 * rows)).cast("I").tolist() for x in (src, dst))
    if mistake in ("", "blocks"):
        right = [w for pair in zip(a[:rows], a[rows:], strict=True) for w in pair]
        assert b == (right[:1024] + [0] * (2 * rows - 1024) if mistake else right)
    said = objections(fake)
    assert {"": "", "blocks": "", "reciprocal": "do not divide", "address": "misaligned"}[mistake] in said and bool(said) == (
        mistake in ("reciprocal", "address"))


def test_virtual_memory_is_the_same_bytes_wherever_it_is_mapped(fake: FakeCuda) -> None:
    s, handle = fake.make_stream(), ok(fake.cuMemCreate(CHUNK, prop(fake), 0))
    here, there = (int(ok(fake.cuMemAddressReserve(CHUNK, 0, 0, 0))) for _ in range(2))
    for base in (here, there):
        fake.cuMemMap(base, CHUNK, 0, handle, 0)
    fake.launch(s, reads=[(here, 1)])
    assert "no device has access" in objections(fake)
    access = names.CUmemAccessDesc()
    access.location.type, access.flags = 1, 3
    assert said(fake.cuMemSetAccess(here, CHUNK, [access], 1)) == "SUCCESS"
    fake.launch(s, lambda: fake.poke(here, b"x"), writes=[(here, 1)])
    fake.run()
    assert fake.peek(there, 1) == b"x" and not fake.violations
    fake.cuMemRelease(handle)
    for base in (here, there):
        fake.cuMemUnmap(base, CHUNK), fake.cuMemAddressFree(base, CHUNK)
    fake.check()


def test_a_thread_runs_the_work(fake: FakeCuda) -> None:
    ran = threading.Event()
    fake.start()
    fake.launch(1, ran.set)
    assert ran.wait(10)


def test_a_forked_child_is_stopped(fake: FakeCuda) -> None:
    child = os.fork()
    if child == 0:
        try:
            fake.cuMemAlloc(1)
        except Violation:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
