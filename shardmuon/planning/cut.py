"""Which matrices a parameter is made of: experts of a stack, parts of a fused weight, heads.

Owns the view of a parameter as matrices. A `Cut` says where in the parameter a matrix lies and how
it is turned; with the box of the parameter that a rank holds it gives the block of the matrix that
this rank holds. So stacks and fused weights are further rectangles, not further code paths, and so
are the panels into which a matrix is cut that several ranks orthogonalize together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from shardmuon.planning.layout import EMPTY, Block, Box, chunk

__all__ = ["Cut", "cut_parameter"]


@dataclass(frozen=True)
class Cut:
    """One matrix of a parameter.

    shape: global shape of the parameter: [rows, cols], a stack [experts, rows, cols], or with
    `flatten` [rows, ...], whose later dims together are the columns. transposed: the stored rows
    are the matrix's columns. expert: index in a stack. part: the matrix's rows among all rows;
    None for all. columns: likewise.
    """

    shape: tuple[int, ...]
    expert: int | None = None
    part: tuple[int, int] | None = None
    transposed: bool = False
    flatten: bool = False
    columns: tuple[int, int] | None = None

    @cached_property
    def unit(self) -> int:
        """Columns of the matrix for one index of the parameter's second dim."""
        return prod(self.shape[2:]) if self.flatten else 1

    @cached_property
    def _all(self) -> tuple[int, int]:
        """(rows, cols) of the whole expert or weight, as the matrix is turned."""
        if self.flatten:
            rows, cols = self.shape[0], prod(self.shape[1:])
        else:
            rows, cols = self.shape[-2:]
        return (cols, rows) if self.transposed else (rows, cols)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The parameter's shape with one column instead of all: an element for every row."""
        plane = 1 if self.flatten else len(self.shape) - 2
        columns = plane if self.transposed or self.flatten else plane + 1
        last = len(self.shape) if self.flatten else columns + 1
        return tuple(1 if columns <= dim < last else size for dim, size in enumerate(self.shape))

    @cached_property
    def part_rows(self) -> tuple[int, int]:
        """Rows of the matrix among all rows."""
        return self.part if self.part is not None else (0, self._all[0])

    @cached_property
    def part_cols(self) -> tuple[int, int]:
        """Columns of the matrix among all columns."""
        return self.columns if self.columns is not None else (0, self._all[1])

    @cached_property
    def rows(self) -> int:
        start, stop = self.part_rows
        return stop - start

    @cached_property
    def cols(self) -> int:
        start, stop = self.part_cols
        return stop - start

    def tiles(self, rows: int | None, cols: int | None) -> list[tuple[str, Cut]]:
        """The matrix in blocks of rows x cols (None: all) or less, with suffixes of ids."""
        return [
            (f"#{i},{j}", replace(self, part=part, columns=columns))
            for i, part in enumerate(_strips(*self.part_rows, rows))
            for j, columns in enumerate(_strips(*self.part_cols, cols))
        ]

    def panel(self, index: int, count: int) -> Cut:
        """Piece `index` of `count` along the longer side. Not for `flatten`."""
        if self.rows > self.cols:
            return replace(self, part=chunk(*self.part_rows, count, index))
        return replace(self, columns=chunk(*self.part_cols, count, index))

    @cached_property
    def box(self) -> Box:
        """Where the matrix lies in the parameter, one range per dim that is not flattened away."""
        rows, cols = self.part_rows, self.part_cols
        if self.flatten:
            return (rows, (0, self.shape[1]))
        plane = (cols, rows) if self.transposed else (rows, cols)
        return plane if self.expert is None else ((self.expert, self.expert + 1), *plane)

    def held(self, box: Box) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """(rows, cols) that `box` of the parameter holds of all rows and columns; None if none."""
        if self.expert is not None:
            first, last = box[0]
            if not first <= self.expert < last:
                return None
            box = box[1:]
        rows, cols = box[0], (box[1][0] * self.unit, box[1][1] * self.unit)
        return (cols, rows) if self.transposed else (rows, cols)

    def block(self, box: Box) -> Block:
        """The block of the matrix that lies in `box` of the parameter."""
        held = self.held(box)
        if held is None:
            return EMPTY
        row_start, row_stop = _overlap(held[0], self.part_rows)
        col_start, col_stop = _overlap(held[1], self.part_cols)
        if row_stop <= row_start or col_stop <= col_start:
            return EMPTY
        return Block(row_start, row_stop, col_start, col_stop)


def _strips(start: int, stop: int, size: int | None) -> list[tuple[int, int]]:
    """`start` to `stop` in pieces of `size`, the last one maybe smaller; one piece without."""
    step = size or max(1, stop - start)
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def _overlap(held: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    """What `held` has of `part`, counted from its start."""
    return max(held[0], part[0]) - part[0], min(held[1], part[1]) - part[0]


def cut_parameter(
    shape: Sequence[int],
    *,
    split_sizes: Sequence[int] | None = None,
    num_heads: int | None = None,
    transposed: bool = False,
    flatten: bool = False,
) -> list[tuple[str, Cut]]:
    """The matrices of a parameter of global `shape`, each with the suffix of its id.

    `[3]` for expert 3 of a stack, `.0` for the first of `split_sizes`, `.head0` for the first of
    `num_heads` equal parts. Raises ValueError if the sizes do not fit the shape.
    """
    shape = tuple(shape)
    whole = Cut(shape, transposed=transposed, flatten=flatten)
    dims = len(shape)
    if flatten and dims < 3:
        raise ValueError(f"flatten needs at least 3 dims, the shape is {shape}")
    if flatten and transposed:
        raise ValueError("flatten and transposed exclude each other")
    if not flatten and dims not in (2, 3):
        raise ValueError(f"a muon group takes matrices and stacks (2 or 3 dims), not shape {shape}")
    parts = _parts(whole.rows, split_sizes, num_heads)
    experts = range(shape[0]) if dims == 3 and not flatten else (None,)
    return [
        (
            ("" if expert is None else f"[{expert}]") + suffix,
            Cut(shape, expert, part, transposed, flatten),
        )
        for expert in experts
        for suffix, part in parts
    ]


def _parts(
    rows: int, split_sizes: Sequence[int] | None, num_heads: int | None
) -> list[tuple[str, tuple[int, int] | None]]:
    if split_sizes is not None and num_heads is not None:
        raise ValueError("split_sizes and num_heads exclude each other")
    if split_sizes is not None:
        if sum(split_sizes) != rows:
            raise ValueError(
                f"split_sizes {list(split_sizes)} add up to {sum(split_sizes)}, not to {rows} rows"
            )
        borders = [sum(split_sizes[:index]) for index in range(len(split_sizes) + 1)]
        return [(f".{index}", border) for index, border in enumerate(pairwise(borders))]
    if num_heads is not None:
        size, rest = divmod(rows, num_heads)
        if rest or not size:
            raise ValueError(f"num_heads {num_heads} does not divide {rows} rows")
        return [(f".head{i}", (i * size, (i + 1) * size)) for i in range(num_heads)]
    return [("", None)]
