"""The smallest adapter for memory behind handles: two methods, and `map` as the one capability. Leases, copies and frameworks follow.

    python examples/my_adapter.py

tests/toy.py is a whole device and its adapter: a queue, allocation, descriptors, memory that is not coherent.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np

import interop
from interop.contract import Adapter, Limits, Mapped, register


# ---- somebody's library: memory behind a number, seen by the host only between `vault_map` and `vault_unmap`
class Block:
    """The library's array, of bytes."""

    def __init__(self, nbytes: int = 0, handle: int = 0, keep: Any = None) -> None:
        self.handle, self.nbytes, self.keep = handle or vault_new(nbytes), nbytes, keep


_vault: dict[int, np.ndarray[Any, Any]] = {}
maps_open = 0


def vault_new(nbytes: int) -> int:
    """A handle."""
    _vault[len(_vault) + 1] = np.zeros(nbytes, np.uint8)
    return len(_vault)


def vault_map(handle: int) -> int:
    """The address at which the host sees it."""
    global maps_open
    maps_open += 1
    return int(_vault[handle].ctypes.data)


def vault_unmap(handle: int) -> None:
    """The address is not to be used any more."""
    global maps_open
    maps_open -= 1


# ---- the adapter
class VaultAdapter(Adapter):
    """Vault memory: how a Block is read and made, and how the host sees one."""

    name, types, module, reads, device = "vault", (f"{__name__}.Block",), __name__, "adapter", "vault"
    accepts = Limits(readonly=False, devices=frozenset({12}))        # kDLExtDev: devices that DLPack has no name for

    def to_tensor(self, x: Block) -> interop.Tensor:
        """A view of all of it."""
        return interop.wrap(x.handle, x.nbytes, device="vault:0", owner=x).tensor(x.nbytes, "uint8")

    def from_tensor(self, t: interop.Tensor, *, place: Any = None, stream: Any = None) -> Block:
        """A Block over the same handle."""
        if t.device.name != self.device or t.byte_offset or not t.is_contiguous():
            raise self.refuse("a Block is a whole piece of vault memory", "interop.copyto into one")
        return Block(t.nbytes, t.handle, keep=t)

    def map(self, allocation: interop.Allocation, access: str, first: int, nbytes: int) -> Mapped:
        """Coherent, so nothing to flush; having `flush` at all says that the pages may stay mapped while a view lives."""
        address = vault_map(allocation.handle) + first
        return Mapped(address, partial(vault_unmap, allocation.handle), flush=lambda first, nbytes: None)


register(VaultAdapter())        # or an entry point in the group "interop.adapters"


# ---- what its users have now
def main() -> int:
    """Exit code: 0 where everything arrived."""
    block = Block(16)
    interop.copyto(block, np.arange(16, dtype=np.uint8))                    # through a map: the library knows nothing of NumPy
    t = interop.as_tensor(block)
    with interop.copy_guard("disallow"), interop.acquire(t[4:8], "numpy", "read_write") as a:
        a += 100                                                            # in place, in the vault
    seen = _vault[block.handle].tolist()
    same = interop.to(t, "vault").handle == block.handle
    del a                                                                   # the last view: now the pages are unmapped
    print(f"{t.device}: {seen}; same handle: {same}; maps open: {maps_open}")
    return int(seen != [0, 1, 2, 3, 104, 105, 106, 107, *range(8, 16)] or not same or maps_open != 0)


if __name__ == "__main__":
    sys.exit(main())
