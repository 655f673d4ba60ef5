"""The benchmark: each conversion against what its user would call today. Rows are data; nothing here is a test.

Ours and theirs are `timeit` statements over the same objects in one process. They take turns, so that a slow moment of the machine hits
both, and the ratio is that of the minima: the medians move by a factor of two with the machine's mood (measured.md H), the minima do not.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import interop

from . import bench_vulkan, health, tables

_BUDGET = 2e-3          # seconds that one statement runs in one round
_ALIGNMENT = 64         # what jax asks for before it shares memory


@dataclass(frozen=True)
class Other:
    """What a user would call today.

    Attributes:
        name: as the user writes it.
        statement: the same over the names of `names_for`, bound so that neither side pays for a module's attributes.
        times: how many times faster ours has to be, or None: shown only.
        within_ns: where calling the framework itself is the best there is, how much more ours may take.
        needs: the modules without which it is left out of the row.
    """

    name: str
    statement: str
    times: float | None = None
    within_ns: float | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One conversion. `statement` is ours, `needs` the modules without which the row is skipped, `make` gives names that it alone uses.

    `gpu`: it takes a CUDA device. `why_not` says why the row cannot run here, None: it can.
    """

    name: str
    statement: str
    others: tuple[Other, ...]
    needs: tuple[str, ...] = ()
    make: Callable[[], dict[str, Any]] | None = None
    gpu: bool = False
    why_not: Callable[[], str | None] = lambda: None


def _large(step: int) -> dict[str, Any]:
    """Two arrays of 64 MiB, 4096 rows; of `step` elements one is theirs. Written to, so that all pages are there."""
    dst, src = (np.ones((4096, 4096 * step), np.float32)[:, ::step] for _ in range(2))
    return {"dst": dst, "src": src}


_NP, _TORCH, _TVM = "np.from_dlpack", "torch.from_dlpack", "tvm_ffi.from_dlpack"

ROWS: tuple[Row, ...] = (
    Row("numpy -> Tensor", "as_tensor(a)",
        (Other(_NP, "np_from_dlpack(a)", 3.5), Other(_TVM, "tvm_from_dlpack(a)", 4.5, needs=("tvm_ffi",)))),
    Row("torch -> Tensor", "as_tensor(t)", (Other(_TVM, "tvm_from_dlpack(t)", 1.5),), ("torch", "tvm_ffi")),
    Row("jax -> Tensor", "as_tensor(j)", (Other(_TVM, "tvm_from_dlpack(j)", 4.0),), ("jax", "tvm_ffi")),
    Row("torch -> numpy", "to(t, 'numpy')", (Other(_NP, "np_from_dlpack(t)", 10.0), Other("t.numpy()", "t.numpy()", 3.0)), ("torch",)),
    Row("numpy -> torch", "to(a, 'torch')",
        (Other(_TORCH, "torch_from_dlpack(a)", 2.5), Other("torch.from_numpy", "torch_from_numpy(a)", 1.1)), ("torch",)),
    Row("jax -> torch, readonly=True", "to(j, 'torch', readonly=True)", (Other(_TORCH, "torch_from_dlpack(j)", 4.0),), ("jax", "torch")),
    Row("jax -> numpy", "to(j, 'numpy')", (Other(_NP, "np_from_dlpack(j)", 4.0), Other("np.asarray", "np_asarray(j)", 1.15)), ("jax",)),
    Row("numpy -> jax", "to(aligned, 'jax')", (Other("jax.dlpack.from_dlpack", "jax_from_dlpack(aligned)", 6.0),), ("jax",)),
    Row("torch -> jax", "to(aligned_t, 'jax')", (Other("jax.dlpack.from_dlpack", "jax_from_dlpack(aligned_t)", 6.0),), ("jax", "torch")),
    Row("Tensor.__dlpack__", "tensor.__dlpack__(max_version=version)",
        (Other("a.__dlpack__", "a.__dlpack__(max_version=version)", 1.0),)),
    Row("Tensor -> numpy", "to(tensor, 'numpy')", (Other(_NP, "np_from_dlpack(tensor)"), Other("np.asarray", "np_asarray(tensor)"))),
    Row("Tensor -> torch", "to(tensor, 'torch')", (Other(_TORCH, "torch_from_dlpack(tensor)"),), ("torch",)),
    Row("Tensor -> jax", "to(aligned_tensor, 'jax')", (Other("jax.dlpack.from_dlpack", "jax_from_dlpack(aligned_tensor)"),), ("jax",)),
    Row("tvm_ffi -> numpy", "to(v, 'numpy')", (Other(_NP, "np_from_dlpack(v)", within_ns=60),), ("tvm_ffi",)),
    Row("tvm_ffi -> torch", "to(v, 'torch')", (Other(_TORCH, "torch_from_dlpack(v)", within_ns=60),), ("tvm_ffi", "torch")),
    Row("numpy -> tvm_ffi", "to(a, 'tvm_ffi')", (Other(_TVM, "tvm_from_dlpack(a)", within_ns=60),), ("tvm_ffi",)),
    Row("torch -> torch, the same", "to(t, 'torch')", (Other("torch.as_tensor", "torch_as_tensor(t)", within_ns=60),), ("torch",)),
    Row("copyto, 64 MiB", "copyto(dst, src)", (Other("np.copyto", "np_copyto(dst, src)", 0.9),), make=lambda: _large(1)),
    Row("copyto, 64 MiB, every second element", "copyto(dst, src)", (Other("np.copyto", "np_copyto(dst, src)", 0.9),),
        make=lambda: _large(2)),
    Row("kind", "kind(a)", (Other("isinstance", "isinstance(a, ndarray)", within_ns=60),)),
)  # fmt: skip


# ---- on OpenCL ----
def _opencl(nbytes: int) -> Callable[[], dict[str, Any]]:
    """A pyopencl Array of so many bytes on ``opencl:0``, and NumPy's of the same size."""
    def make() -> dict[str, Any]:
        cl, cla = import_module("pyopencl"), import_module("pyopencl.array")
        queue = cl.CommandQueue(import_module("interop.adapters.opencl").Context.of("opencl:0").cl)
        x = cla.zeros(queue, nbytes // 4, np.float32)
        queue.finish()
        x.events.clear()
        return {"x": x, "host": np.zeros(nbytes // 4, np.float32), "queue": queue, "acquire": interop.acquire}

    return make


OPENCL_ROWS = tuple(
    row for n, size in ((4096, "4 KiB"), (1 << 20, "1 MiB"), (256 << 20, "256 MiB")) for row in (
        Row(f"OpenCL: Array -> numpy, {size}", "to(x, 'numpy')", (Other("Array.get", "x.get()"),), ("pyopencl",), make=_opencl(n)),
        Row(f"OpenCL: written by the host, {size}", "with acquire(x, 'numpy', 'write') as a: pass",
            (Other("Array.set", "x.set(host)"),), ("pyopencl",), make=_opencl(n)),
    ))
ROWS += OPENCL_ROWS


# ---- on Vulkan: lavapipe where there is nothing else ----
_MAP = Other("vulkan: vkMapMemory, np.frombuffer, vkUnmapMemory", "their_map()", 5.0)
VULKAN_ROWS = (
    Row("Vulkan: a VkBuffer as a Tensor, exported", "wrapped(made, memory, size).__dlpack__()", (_MAP,)),
    Row("Vulkan: 1 MiB of the host as a VkBuffer", "to(host, c, copy=False)",
        (Other("vulkan: the five calls", "their_import()", 5.0),)),
    Row("Vulkan: Tensor -> numpy", "to(shown, 'numpy')", (_MAP,)),
    Row("Vulkan: Tensor -> numpy, submits of others unknown", "to(unsaid, 'numpy')", (_MAP,)),
    Row("Vulkan: map for writing", "with shown.map('write') as m: pass", (_MAP,)),
    Row("Vulkan: submit and wait", "submit(commands).wait()",
        (Other("cffi: submit, wait, reset", "raw_submit()", 0.77), Other("vulkan: submit, wait, reset", "package_submit()", 1.0))),
)  # fmt: skip
ROWS += tuple(replace(row, needs=("vulkan", "cffi"), make=bench_vulkan.names, why_not=bench_vulkan.why_not) for row in VULKAN_ROWS)


# ---- on a GPU ----
def _copies(nbytes: int) -> Callable[[], dict[str, Any]]:
    """Pageable and pinned host memory and memory of the GPU, of so many bytes; `sync` is the end of every copy, ours and theirs."""
    def make() -> dict[str, Any]:
        cp = import_module("cupy")
        pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        host = np.ones(nbytes, np.uint8)
        pinned[:] = 1
        return {"host": host, "pinned": pinned, "gpu": cp.ones(nbytes, np.uint8), "asarray": cp.asarray, "asnumpy": cp.asnumpy,
                "sync": cp.cuda.get_current_stream().synchronize, "memcpy": cp.cuda.runtime.memcpyAsync, "nbytes": nbytes}  # fmt: skip

    return make


def _gpu_names() -> dict[str, Any]:
    torch, cp = import_module("torch"), import_module("cupy")
    return {"tg": torch.ones(4, 8, device="cuda"), "cg": cp.ones((4, 8), np.float32), "cupy_from_dlpack": cp.from_dlpack,
            "cupy_asarray": cp.asarray, "torch_as_tensor": torch.as_tensor, "torch_from_dlpack": torch.from_dlpack}  # fmt: skip


def _other_stream() -> dict[str, Any]:
    torch = import_module("torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        return _gpu_names() | {"held": interop.as_tensor(torch.ones(4, 8, device="cuda"))}


def _jax_names() -> dict[str, Any]:
    jax = import_module("jax")
    j = jax.device_put(np.ones((4, 8), np.float32), jax.devices("cuda")[0])
    return _gpu_names() | {"jg": j, "jax_from_dlpack": jax.dlpack.from_dlpack}


_MIB = 1 << 20
_SIZES = ((64 * _MIB, "64 MiB"), (1024 * _MIB, "1 GiB"))
GPU_ROWS = (
    Row("GPU: torch -> cupy", "to(tg, 'cupy')",
        (Other("cupy.from_dlpack", "cupy_from_dlpack(tg)", 4.0), Other("cupy.asarray", "cupy_asarray(tg)", 1.0)), make=_gpu_names),
    Row("GPU: cupy -> torch", "to(cg, 'torch')",
        (Other(_TORCH, "torch_from_dlpack(cg)", 4.0), Other("torch.as_tensor", "torch_as_tensor(cg)", 1.0)), make=_gpu_names),
    Row("GPU: torch -> torch, from another stream", "to(held, 'torch')", (Other(_TORCH, "torch_from_dlpack(held)"),), make=_other_stream),
    Row("GPU: jax -> torch, readonly=True", "to(jg, 'torch', readonly=True)", (Other(_TORCH, "torch_from_dlpack(jg)", 5.0),), ("jax",),
        make=_jax_names),
    Row("GPU: torch -> jax", "to(tg, 'jax')", (Other("jax.dlpack.from_dlpack", "jax_from_dlpack(tg)", 5.0),), ("jax",), make=_jax_names),
    *(Row(f"GPU: numpy -> cupy by copy, {name}", "to(host, 'cupy', device='cuda:0'); sync()",
          (Other("cupy.asarray", "asarray(host); sync()", 2.5),), make=_copies(n)) for n, name in _SIZES),
    *(Row(f"GPU: cupy -> numpy by copy, {name}", "to(gpu, 'numpy', device='cpu')",
          (Other("cupy.asnumpy", "asnumpy(gpu)", 2.5),), make=_copies(n)) for n, name in _SIZES),
    Row("GPU: copyto from pinned memory, 64 MiB", "copyto(gpu, pinned); sync()",
        (Other("cudaMemcpyAsync", "memcpy(gpu.data.ptr, pinned.ctypes.data, nbytes, 1, 0); sync()", 0.95),), make=_copies(64 * _MIB)),
    Row("GPU: copyto into pinned memory, 64 MiB", "copyto(pinned, gpu).wait()",
        (Other("cudaMemcpyAsync", "memcpy(pinned.ctypes.data, gpu.data.ptr, nbytes, 2, 0); sync()", 0.95),), make=_copies(64 * _MIB)),
)  # fmt: skip


def _gpu() -> str | None:
    """The name of the first CUDA device, where torch and CuPy are here to be measured on it."""
    if any(find_spec(m) is None for m in ("torch", "cupy")):
        return None
    torch = import_module("torch")
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Timing:
    """Nanoseconds for one call: the fastest round, and the middle one."""

    fastest: float
    median: float


@dataclass(frozen=True)
class Result:
    """A row that ran: `times[0]` is ours, the rest belong to ``row.others`` in their order."""

    row: Row
    times: tuple[Timing, ...]

    def ratio(self, i: int) -> float:
        """How many times faster ours is than other `i`."""
        return self.times[i + 1].fastest / self.times[0].fastest

    def verdict(self, i: int) -> str:
        """``"ok"`` or ``"short"`` of what is wanted against other `i`, ``""`` where nothing is."""
        other = self.row.others[i]
        if other.within_ns is not None:
            return "ok" if self.times[0].fastest - self.times[i + 1].fastest <= other.within_ns else "short"
        if other.times is not None:
            return "ok" if self.ratio(i) >= other.times else "short"
        return ""


def bench(filters: Sequence[str] = (), *, form: str = "table", quick: bool = False) -> int:
    """Run the rows whose name contains one of `filters`; print them as a ``"table"``, ``"markdown"`` or ``"json"``.

    0; 1 where no row has such a name.
    """
    every = [*ROWS, *(replace(row, gpu=True) for row in GPU_ROWS)]
    rows = [row for row in every if not filters or any(f.lower() in row.name.lower() for f in filters)]
    if not rows:
        print(f"no row is named like {', '.join(filters)}: there are {'; '.join(r.name for r in every)}", file=sys.stderr)
        return 1
    card = _gpu() if any(row.gpu for row in rows) else None
    if card is None:
        rows = [row for row in rows if not row.gpu]
        if not rows:
            print("these rows need a CUDA device, torch and cupy", file=sys.stderr)
            return 1
    missing = {row.name: absent for row in rows if (absent := _absent(row))}
    missing |= {f"{row.name}, {o.name}": absent for row in rows if row.name not in missing for o in row.others if (absent := _absent(o))}
    runnable = [replace(row, others=tuple(o for o in row.others if not _absent(o))) for row in rows if not _absent(row)]
    present = {m for row in runnable for needs in (row.needs, *(o.needs for o in row.others)) for m in needs}
    names = names_for(present)
    results = [measure(row, names, rounds=7 if quick else 25) for row in runnable]
    if form == "json":
        print(json.dumps(_record(results, missing, present) | ({"gpu": card} if card else {}), indent=2))
    elif form == "markdown":
        print(tables.markdown(["conversion", ">ns", "what users call today", ">ns", ">ratio", ">wanted"], _brief(results)), end="")
    else:
        _print(results, missing, present, card)
    return 0


def _absent(part: Row | Other) -> list[str]:
    """Modules that are not installed, or the one reason why it cannot run."""
    modules = [m for m in part.needs if find_spec(m) is None]
    reason = part.why_not() if not modules and isinstance(part, Row) else None
    return modules if reason is None else [reason]


def names_for(modules: set[str]) -> dict[str, Any]:
    """What the statements speak of: small float32 arrays over the same memory, and functions bound to plain names."""
    raw = np.zeros(4 * 8 * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned = raw[start:start + 4 * 8 * 4].view(np.float32).reshape(4, 8)
    a = np.ones((4, 8), np.float32)
    tensor = interop.as_tensor(a)
    names: dict[str, Any] = {
        "as_tensor": interop.as_tensor, "to": interop.to, "kind": interop.kind, "a": a, "aligned": aligned, "tensor": tensor,
        "aligned_tensor": interop.as_tensor(aligned), "version": (1, 0), "ndarray": np.ndarray,
        "np_from_dlpack": np.from_dlpack, "np_asarray": np.asarray,
        "copyto": interop.copyto, "np_copyto": np.copyto,
    }  # fmt: skip
    if "torch" in modules:
        torch = import_module("torch")
        names |= {"t": torch.ones(4, 8), "aligned_t": torch.from_numpy(aligned), "torch_from_dlpack": torch.from_dlpack,
                  "torch_from_numpy": torch.from_numpy, "torch_as_tensor": torch.as_tensor}  # fmt: skip
    if "jax" in modules:
        jax = import_module("jax")
        here = jax.devices("cpu")[0]           # also where jax's own choice would be a GPU
        names |= {"j": jax.device_put(np.ones((4, 8), np.float32), here).block_until_ready(), "jax_from_dlpack": jax.dlpack.from_dlpack}
    if "tvm_ffi" in modules:
        tvm_from_dlpack: Callable[[Any], Any] = import_module("tvm_ffi").from_dlpack
        names |= {"v": tvm_from_dlpack(a), "tvm_from_dlpack": tvm_from_dlpack}
    return names


def measure(row: Row, names: Mapping[str, Any], rounds: int) -> Result:
    """Time all statements of a row in turns."""
    known = {**names, **(row.make() if row.make is not None else {})}
    timers = [timeit.Timer(s, globals=known) for s in (row.statement, *(o.statement for o in row.others))]
    loops = [_loops(timer) for timer in timers]
    seen: list[list[float]] = [[] for _ in timers]
    for i in range(rounds):
        for k in range(len(timers)):
            k = (i + k) % len(timers)          # nobody always follows the same neighbour
            seen[k].append(timers[k].timeit(loops[k]) / loops[k] * 1e9)
    return Result(row, tuple(Timing(min(s), statistics.median(s)) for s in seen))


def _loops(timer: timeit.Timer) -> int:
    timer.timeit(1)                            # first calls learn types, import and compile
    if timer.timeit(1) > _BUDGET:              # a copy of many bytes: one is enough
        return 1
    timer.timeit(100)
    once = timer.timeit(100) / 100
    return max(20, int(_BUDGET / once))


def _versions(modules: set[str]) -> dict[str, str]:
    return {m: health.version(m) or "?" for m in sorted(modules | {"numpy"})}


def _record(results: Sequence[Result], missing: Mapping[str, list[str]], modules: set[str]) -> dict[str, Any]:
    return {
        "interop": interop.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": _versions(modules),
        "rows": [
            {
                "name": r.row.name,
                "ours": {"statement": r.row.statement, "min_ns": r.times[0].fastest, "median_ns": r.times[0].median},
                "others": [
                    {"name": o.name, "statement": o.statement, "min_ns": r.times[i + 1].fastest, "median_ns": r.times[i + 1].median,
                     "ratio": r.ratio(i), "wanted_ratio": o.times, "wanted_within_ns": o.within_ns, "verdict": r.verdict(i)}
                    for i, o in enumerate(r.row.others)
                ],
            }
            for r in results
        ],
        "skipped": [{"name": name, "missing": absent, "install": _install(absent)} for name, absent in missing.items()],
    }  # fmt: skip


def _install(modules: Sequence[str]) -> str:
    if any(" " in m for m in modules):
        return modules[0]                   # no module: a driver
    return "pip install " + " ".join({"tvm_ffi": "apache-tvm-ffi"}.get(m, m) for m in modules)


def _print(results: Sequence[Result], missing: Mapping[str, list[str]], modules: set[str], card: str | None) -> None:
    cells = []
    for r in results:
        for i, o in enumerate(r.row.others):
            ours, theirs = r.times[0], r.times[i + 1]
            cells.append([r.row.name if i == 0 else "", _ns(ours.fastest), _ns(ours.median), o.name, _ns(theirs.fastest),
                          _ns(theirs.median), f"{r.ratio(i):.2f}x", _wanted(o), r.verdict(i)])  # fmt: skip
    cells += [[name, "", "", _install(absent), "", "", "", "", "skipped"] for name, absent in missing.items()]
    columns = ["conversion", ">ours: min", ">median", "today", ">min", ">median", ">ratio", ">wanted", "verdict"]
    versions = ", ".join(f"{m} {v}" for m, v in _versions(modules).items())
    tables.show("Nanoseconds for one call; float32, of shape (4, 8) unless the row says its size; ratio of the minima", columns, cells,
                [f"Python {platform.python_version()}, {versions}" + (f", {card}" if card else "")])  # fmt: skip


def _brief(results: Sequence[Result]) -> list[list[str]]:
    return [
        [r.row.name if i == 0 else "", _ns(r.times[0].fastest), f"`{o.name}`", _ns(r.times[i + 1].fastest), f"{r.ratio(i):.1f}x",
         _wanted(o) + (" (short)" if r.verdict(i) == "short" else "")]
        for r in results for i, o in enumerate(r.row.others)
    ]  # fmt: skip


def _wanted(o: Other) -> str:
    return f"+{o.within_ns:.0f} ns" if o.within_ns is not None else f"{o.times}x" if o.times is not None else ""


def _ns(t: float) -> str:
    return f"{t:,.0f}"
