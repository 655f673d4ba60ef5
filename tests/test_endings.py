"""Fork and the end of the process, with device memory alive: each in a process of its own. SPEC M-FORK, M-EXIT."""

from __future__ import annotations

import time

import pytest
from memkit import prints

# --- fork ---------------------------------------------------------------------------------------------------------------
FORK = """
def forked(work):
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            work()
            gc.collect()
        except BaseException as e:
            import traceback; traceback.print_exc(); code = 1
        if toy.driver.violations: print(toy.driver.violations, file=sys.stderr); code = 2
        os._exit(code)
    code = os.waitpid(pid, 0)[1]
    print(code)
def refused(f):
    try: f()
    except interop.ExchangeError as e: assert "fork" in str(e), e
    else: raise AssertionError("not refused")
c = toy.Context()
"""


@pytest.mark.parametrize("work", [
    "global t; del t",
    "refused(lambda: t.map().value)",
    "refused(lambda: t.allocation.export('opaque_fd'))",
    "refused(lambda: interop.copyto(np.zeros(64, 'u1'), t))",
    "refused(lambda: interop.acquire(t, c, 'write'))",
    "refused(lambda: interop.empty((4,), 'u1', device=c))",
    "refused(lambda: interop.to(t, 'cpu'))",
    "t.allocation.close()",
    "c.close()",
])
def test_the_child_of_a_fork_owns_no_driver_object(work: str) -> None:
    """SPEC M-FORK: no driver call; use says "made before fork" """
    prints(FORK + f"""
t = interop.empty((64,), "uint8", device=c, shared_with=["process"])
def work(): {work}
forked(work)
del t; gc.collect(); toy.driver.check()
""", "0")


@pytest.mark.parametrize("make", [
    "t.map('read_write')", "t.map('write')", "interop.acquire(t, c, 'write')", "interop.to(t, 'toy')", "t.__dlpack__(max_version=(1, 3))",
    "interop.as_tensor(toy.Buffer(c, (4,)))", "toy.Buffer(c, (4,))", "t[2:]", "t.map('read', copy=True)",
])
def test_what_the_child_drops_stays_the_parents(make: str) -> None:
    """SPEC M-FORK: deleters, maps and write-backs of an older generation do nothing"""
    prints(FORK + f"""
t = interop.empty((64,), "uint8", device=c)
x = {make}
v = getattr(x, "value", None)
def work():
    global x, v, t
    del x, v, t
forked(work)
del x, v, t; gc.collect(); toy.driver.check()
""", "0")


def test_an_owner_with_a_driver_object_is_not_finalized_in_the_child() -> None:
    """SPEC M-FORK: the owner of context memory is leaked there, its finalizer may call the driver"""
    prints(FORK + """
class Owner:
    def __del__(self): toy.driver.enter("free of the owner")
t = interop.wrap(7, 64, device=c, owner=Owner()).tensor((64,), "uint8")
def work():
    global t
    del t
forked(work)
""", "0")


def test_on_release_does_not_run_in_the_child() -> None:
    """SPEC M-FORK"""
    prints(FORK + """
x = np.zeros(64, "u1")
a = interop.wrap(x.ctypes.data, 64, device="cpu", owner=x, on_release=lambda: print("released", flush=True))
def work():
    global a
    a.close(); del a
forked(work)
a.close()
""", "0\nreleased")


def test_leases_and_pending_work_of_the_parent_do_not_bind_the_child() -> None:
    """SPEC M-FORK: the child has a copy of host memory, and nobody there would ever release or finish"""
    prints(FORK + """
x = np.zeros(64, "u1")
lease = interop.as_tensor(x).map("write")
y = np.zeros(64, "u1")
interop.copyto(interop.empty((64,), "uint8", device=c), y)
z = np.zeros(64, "u1")
interop.copyto(z, interop.empty((64,), "uint8", device=c))
interop.points.HOST_TIMEOUT = 3.0
def work():
    for a in (x, y, z):
        with interop.as_tensor(a).map("write") as v: v[:] = 1
        interop.to(a, "interop"); np.asarray(interop.as_tensor(a))
forked(work)
c.queue.run()
""", "0")


def test_host_pages_that_a_device_shares_are_refused_in_the_child_not_a_crash() -> None:
    """SPEC M-FORK: pages that are not inherited must not be touched"""
    prints(FORK + """
t = interop.empty((64,), "uint8", shared_with=[c])
def work():
    refused(lambda: interop.to(t, "numpy"))
    refused(lambda: memoryview(t))
    refused(lambda: t.map().value)
forked(work)
""", "0")


def test_callbacks_and_copies_work_in_the_child() -> None:
    """SPEC M-FORK: threads are started anew"""
    prints(FORK + """
from interop.contract import point
never = point(done=lambda: False); never.add_done_callback(print)
big = np.ones(1 << 24, "u1"); out = np.zeros(1 << 24, "u1")
interop.copyto(out, big)
def work():
    e = threading.Event(); seen = []
    p = point(done=e.is_set); p.add_done_callback(seen.append); e.set()
    end = time.monotonic() + 5
    while not seen and time.monotonic() < end: time.sleep(0.01)
    assert seen == [p]
    out[:] = 0; interop.copyto(out, big); assert out.all()
forked(work)
""", "0")


# --- the end of the process ---------------------------------------------------------------------------------------------
EXITS = {
    "tensor": "keep = interop.empty((64,), 'uint8', device=c)",
    "lease": "t = interop.empty((64,), 'uint8', device=c); keep = t.map('write'); keep.value",
    "lease on the host": "keep = interop.as_tensor(np.zeros(4)).map('write')",
    "queued work": "t = interop.empty((64,), 'uint8', device=c); interop.copyto(t, np.zeros(64, 'u1'))",
    "queued work, dropped": "t = interop.empty((64,), 'uint8', device=c); "
                            "l = interop.acquire(t, c, 'write'); l.release(c.fill(t, 1)); del t, l",
    "array": "t = interop.empty((64,), 'uint8', device=c); keep = t.map('read').value",
    "callback": "from interop.contract import point; point(done=lambda: False).add_done_callback(print)",
    "buffer": "keep = interop.to(interop.empty((64,), 'uint8', device=c), 'toy')",
}


@pytest.mark.parametrize("queue", ["", "c.queue.stuck = True", "c.queue.start()"])
@pytest.mark.parametrize("alive", EXITS.values(), ids=EXITS)
def test_the_process_ends_quietly_and_soon(alive: str, queue: str) -> None:
    """SPEC M-EXIT: about two seconds at most, exit code 0, no driver call once the interpreter is finalizing; field report B32"""
    start = time.monotonic()
    prints(f"""
def enter(call, enter=toy.driver.enter, finalizing=sys.is_finalizing, write=os.write):
    if finalizing(): write(2, f"{{call}} while finalizing\\n".encode())
    enter(call)
toy.driver.enter = enter
c = toy.Context()
{queue}
{alive}
""", "")
    assert time.monotonic() - start < 8


def test_memory_that_waits_for_queued_work_is_freed_at_exit_once_that_is_done() -> None:
    """SPEC M-EXIT"""
    prints("""
c = toy.Context(); c.queue.start()
t = interop.empty((64,), "uint8", device=c)
lease = interop.acquire(t, c, "write")
c.queue.submit("slow", lambda: time.sleep(0.3))
lease.release(c.fill(t, 1))
def enter(call, enter=toy.driver.enter):
    enter(call)
    if call == "free": print("freed", flush=True)
toy.driver.enter = enter
del t, lease
print("end", flush=True)
""", "end\nfreed")
