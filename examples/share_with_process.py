"""Memory that another process writes: a memfd goes through a socket, both sides see the same pages, nothing is copied.

python examples/share_with_process.py
"""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np

import interop

SHAPE, DTYPE = (1024, 1024), "float32"


def parent() -> int:
    """Allocate, hand the descriptor over, wait, read. Exit code: 0 where the child's numbers are there."""
    t = interop.empty(SHAPE, DTYPE, shared_with=["process"])
    here, there = socket.socketpair()
    with here, there:
        child = subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=[there.fileno()])
        there.close()
        with t.allocation.export("memfd") as handle:            # the descriptor in it is closed again here: the child has its own
            data, fds = handle.pack()                           # kind, size, offset ... as bytes, and the descriptor beside them
            socket.send_fds(here, [data], fds)
        done = here.recv(4)                                     # what orders the two: leases are of one process
        code = child.wait(timeout=30)
    with t.map("read") as a:
        right = bool((a == np.arange(SHAPE[1], dtype=DTYPE)).all())
    print(f"child: {done!r}, exit code {code}; {t.nbytes:,} bytes written there and read here: {'right' if right else 'WRONG'}")
    return int(done != b"done" or code != 0 or not right)


def child(fd: int) -> int:
    """Take the descriptor, map the memory, write."""
    with socket.socket(fileno=fd) as sock:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        with interop.ExternalHandle.unpack(data, list(fds)) as handle:
            memory = interop.wrap(handle, handle.nbytes, device="cpu", owner=None)
        with memory.tensor(SHAPE, DTYPE).map("write") as a:     # bounds are checked against the file, not against what we were told
            a[:] = np.arange(SHAPE[1], dtype=DTYPE)
        sock.sendall(b"done")
    return 0


if __name__ == "__main__":
    sys.exit(child(int(sys.argv[1])) if len(sys.argv) > 1 else parent())
