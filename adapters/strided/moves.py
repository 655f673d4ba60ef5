"""Moves: what a copy between two strided layouts comes down to, in bytes. Arithmetic only: knows no driver, no tensor and no memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: (how many, bytes from one to the next in the destination, and in the source).
Axis = tuple[int, int, int]


class Move(NamedTuple):
    """Runs of `unit` contiguous bytes, repeated along axes.

    Attributes:
        dst, src: addresses of the first byte of the first run.
        unit: bytes of a run.
        axes: outermost first; each has two or more runs, and no two neighbours could be one. Without axes it is one contiguous run.
    """

    dst: int
    src: int
    unit: int
    axes: tuple[Axis, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        size = self.unit
        for n, _, _ in self.axes:
            size *= n
        return size

    @property
    def word(self) -> int:
        """The largest of 1, 2, 4, 8, 16 bytes in which all of it can be moved, aligned on both sides."""
        bits = self.dst | self.src | self.unit | 16
        for _, d, s in self.axes:
            bits |= d | s               # of a negative number too, the lowest bit that is set is that of its size
        return bits & -bits

    def gather(self, base: int) -> Move:
        """The same runs to packed memory at `base`, in the order of the axes."""
        return simplified(base, self.src, self.unit, [(n, p, s) for (n, _, s), p in zip(self.axes, self._packed(), strict=True)])

    def scatter(self, base: int) -> Move:
        """The runs out of packed memory at `base`, as `gather` left them."""
        return simplified(self.dst, base, self.unit, [(n, d, p) for (n, d, _), p in zip(self.axes, self._packed(), strict=True)])

    def _packed(self) -> list[int]:
        steps, size = [], self.unit
        for n, _, _ in reversed(self.axes):
            steps.append(size)
            size *= n
        return steps[::-1]

    def span(self, side: int) -> tuple[int, int]:
        """First byte and end of what is touched; `side` 0 is the destination, 1 the source."""
        lo = (self.dst, self.src)[side]
        hi = lo + self.unit
        for axis in self.axes:
            reach = (axis[0] - 1) * axis[1 + side]
            lo, hi = lo + min(reach, 0), hi + max(reach, 0)
        return lo, hi

    @property
    def overlaps(self) -> bool:
        """Whether bytes of one side may be bytes of the other, at other places: order would matter."""
        (a, b), (c, d) = self.span(0), self.span(1)
        return a < d and c < b

    @property
    def is_nothing(self) -> bool:
        """Whether each byte goes to where it is."""
        return self.dst == self.src and all(d == s for _, d, s in self.axes)

    def pieces(self, limit: int, align: int = 1) -> Iterator[Move]:
        """The same in parts of at most `limit` bytes, none much smaller than need be; inner axes stay whole where they fit.

        Where one run is cut, the cuts are at multiples of `align` in the destination; `limit` is one.
        """
        k, size = len(self.axes), self.unit
        while k and size * self.axes[k - 1][0] <= limit:
            k -= 1
            size *= self.axes[k][0]
        if size > limit:
            for d, s in self._starts(k):
                first = limit - d % align
                edges = [0, *range(first, self.unit, limit), self.unit]
                for lo, hi in itertools.pairwise(edges):
                    yield Move(d + lo, s + lo, hi - lo)
            return
        if not k:
            yield self
            return
        n, dstep, sstep = self.axes[k - 1]
        parts = -(-n // (limit // size))
        for d, s in self._starts(k - 1):
            for i in range(parts):
                lo, hi = n * i // parts, n * (i + 1) // parts
                yield simplified(d + lo * dstep, s + lo * sstep, self.unit, [(hi - lo, dstep, sstep), *self.axes[k:]])

    def _starts(self, k: int) -> Iterator[tuple[int, int]]:
        """Where the parts begin that differ in the index along the first `k` axes."""
        for index in itertools.product(*(range(n) for n, _, _ in self.axes[:k])):
            yield (self.dst + sum(i * a[1] for i, a in zip(index, self.axes, strict=False)),
                   self.src + sum(i * a[2] for i, a in zip(index, self.axes, strict=False)))

    def outer(self, k: int) -> Iterator[Move]:
        """One Move for each index along the first `k` axes."""
        for d, s in self._starts(k):
            yield Move(d, s, self.unit, self.axes[k:])


def simplified(dst: int, src: int, unit: int, axes: Sequence[Axis]) -> Move:
    """The Move with as few axes as these have: what is one run, or one even step, becomes one."""
    out: list[Axis] = []
    for n, d, s in axes:
        if n == 1:
            continue
        if out and out[-1][1] == n * d and out[-1][2] == n * s:
            out[-1] = (out[-1][0] * n, d, s)
        else:
            out.append((n, d, s))
    if out and out[-1][1] == unit == out[-1][2]:
        unit *= out.pop()[0]
    return Move(dst, src, unit, tuple(out))


def plan(dst: int, src: int, itemsize: int, shape: Sequence[int], dst_strides: Sequence[int], src_strides: Sequence[int],
         lead: int = 0) -> Move:
    """The Move for elements of `itemsize` bytes with strides in elements; every extent is at least 1.

    The axes come in the order in which they lie in memory on the side `lead` (0 destination, 1 source), forwards there: packing on that
    side is then as cheap as it can be, and the other side has the work.
    """
    axes: list[Axis] = []
    for n, d, s in zip(shape, dst_strides, src_strides, strict=True):
        if n == 1:
            continue
        d, s = d * itemsize, s * itemsize
        if ((d, s)[lead] or (s, d)[lead]) < 0:      # run through it from its other end
            dst, src, d, s = dst + d * (n - 1), src + s * (n - 1), -d, -s
        axes.append((n, d, s))
    axes.sort(key=lambda a: (abs((a[1], a[2])[lead] or (a[2], a[1])[lead]), a[0]), reverse=True)
    return simplified(dst, src, itemsize, axes)
