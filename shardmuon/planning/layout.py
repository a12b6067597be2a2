"""Where the pieces of a matrix lie: meshes, splits and the rectangle that each rank holds.

Owns the one description that covers every layout: on a mesh, each axis either replicates a
parameter or splits one of its dims, so every rank holds one `Box` of it, and of each matrix in it
one rectangle (a `Block`, maybe empty). The rule of splitting is torch's (`torch.chunk`, FSDP2): the
first ranks get `ceil(length / parts)`, later ones less or nothing, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["EMPTY", "Block", "Box", "Coordinate", "Layout", "Mesh", "Split", "chunk"]

Coordinate = tuple[int, ...]


class Block(NamedTuple):
    """Half-open row and column ranges of a matrix. Empty if either range is."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        return self.col_stop - self.col_start

    @property
    def numel(self) -> int:
        return self.rows * self.cols


EMPTY = Block(0, 0, 0, 0)

Box = tuple[tuple[int, int], ...]
"""Half-open ranges of a parameter, one per dim."""


class Split(NamedTuple):
    """Mesh axis `axis` splits tensor dim `dim`."""

    axis: int
    dim: int


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Range of piece `index` when [start, stop) is cut into `parts`, ceil-first, unpadded."""
    length = stop - start
    size = -(-length // parts)
    return start + min(length, size * index), start + min(length, size * (index + 1))


@dataclass(frozen=True)
class Mesh:
    """Global ranks laid out row-major over named axes."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"mesh shape {self.shape} has an axis without ranks")
        if prod(self.shape) != len(self.ranks):
            raise ValueError(f"mesh shape {self.shape} does not hold {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"mesh names a rank twice: {self.ranks}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def coordinates(self) -> dict[int, Coordinate]:
        """Coordinate of each global rank."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Global rank at `coordinate`."""
        index = 0
        for size, position in zip(self.shape, coordinate, strict=True):
            index = index * size + position
        return self.ranks[index]


@dataclass(frozen=True)
class Layout:
    """How a mesh holds a parameter: `splits` in the order of the cuts; other axes replicate."""

    mesh: Mesh
    splits: tuple[Split, ...] = ()

    def __post_init__(self) -> None:
        axes = [split.axis for split in self.splits]
        if len(set(axes)) != len(axes):
            raise ValueError(f"a mesh axis may split only one dim: {self.splits}")
        if any(not 0 <= axis < self.mesh.ndim for axis in axes):
            raise ValueError(f"a mesh of {self.mesh.ndim} axes cannot split by {self.splits}")

    @cached_property
    def sharded_axes(self) -> tuple[int, ...]:
        """Axes along which blocks travel to their owner, in mesh order; size 1 moves nothing."""
        axes = {split.axis for split in self.splits}
        return tuple(a for a, size in enumerate(self.mesh.shape) if a in axes and size > 1)

    @cached_property
    def replicated_axes(self) -> tuple[int, ...]:
        """Axes along which updates are all-gathered, in mesh order."""
        axes = {split.axis for split in self.splits}
        return tuple(a for a, size in enumerate(self.mesh.shape) if a not in axes and size > 1)

    def box(self, shape: Sequence[int], coordinate: Coordinate) -> Box:
        """What the rank at `coordinate` holds of a parameter of global `shape`."""
        ranges = [(0, length) for length in shape]
        for axis, dim in self.splits:
            ranges[dim] = chunk(*ranges[dim], self.mesh.shape[axis], coordinate[axis])
        return tuple(ranges)

    def holders(self, shape: Sequence[int], box: Box) -> tuple[int, ...]:
        """Ranks that hold all of `box`; none if it is cut."""
        ranges = [(0, length) for length in shape]
        choices: list[Sequence[int]] = [range(size) for size in self.mesh.shape]
        for axis, dim in self.splits:
            start, stop = ranges[dim]
            size = -(-(stop - start) // self.mesh.shape[axis])
            position = (box[dim][0] - start) // size if size else 0
            ranges[dim] = chunk(start, stop, self.mesh.shape[axis], position)
            if box[dim][1] > ranges[dim][1]:
                return ()
            choices[axis] = (position,)
        return tuple(self.mesh.rank_at(coordinate) for coordinate in product(*choices))

    def describe(self) -> str:
        """Short text such as `(R, S0) on 2x4`, for reports."""
        kinds = {split.axis: f"S{split.dim}" for split in self.splits}
        placements = ", ".join(kinds.get(axis, "R") for axis in range(len(self.mesh.shape)))
        return f"({placements}) on {'x'.join(map(str, self.mesh.shape))}"
