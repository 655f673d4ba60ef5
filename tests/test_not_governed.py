"""What SPEC says that interop cannot hold, shown: so that nobody takes it for a promise, and a change is noticed."""

from __future__ import annotations

import numpy as np
from support import torch

import interop


def test_a_view_stays_where_the_memory_was_when_torch_replaces_it() -> None:
    """X-NOT-1: only the address is looked at, for what lies there may be gone."""
    t = torch.ones(4)
    view, before = interop.as_tensor(t), t.data_ptr()
    t.data = torch.zeros(8)
    assert (view.ptr, view.shape) == (before, (4,))
    assert t.data_ptr() != before


def test_a_read_only_view_does_not_stop_the_owner() -> None:
    """X-NOT-2."""
    a = np.zeros(3)
    view = interop.as_tensor(a, readonly=True)
    a[0] = 5
    assert np.asarray(view)[0] == 5
