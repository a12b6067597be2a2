"""The record of one matrix: where it lies, how it travels, what it costs.

Owns `Matrix`, the unit of planning, its panels, what matrices must share to travel together, and
the order of their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Block, Coordinate, Layout

__all__ = ["AUTO", "Matrix", "Panel", "lane", "natural_order", "panels_of"]

AUTO = "auto"
"""Method of a matrix for which none has been chosen yet."""

ROW_STAT_BYTES = 4  # one float32 per row


class Panel(NamedTuple):
    """That a record is piece `number` of `size` of matrix `of` [rows, cols], along its longer side.

    The owners of the pieces are a team: neighbours along mesh axis `axis`, which orthogonalize the
    matrix together.
    """

    of: str
    number: int
    size: int
    axis: int
    rows: int
    cols: int


@dataclass(frozen=True)
class Matrix:
    """One matrix to orthogonalize, described by its place in a parameter and its global shape.

    id: FQN (or `group.position` for unnamed parameters), and the suffix of its cut. cut: where it
    lies in the parameter. layout: how the mesh holds the parameter. wire_dtype: name of the dtype
    in which its blocks and updates travel; wire_bytes: per element.
    cost: FLOPs of its Newton-Schulz, or `cost.flops_in` the time measured for it. settings: what
    else must agree between ranks (canonical text).
    row_state: one float32 per row travels to the owner, with the blocks that begin a row.
    row_stats: one travels back with every block of the update. method, segments:
    how Newton-Schulz runs, see `planning.cost`; `AUTO` costs as much as "standard".
    may_share: its rule and method allow panels. panel: the record is one, and travels as a matrix
    does.
    """

    id: str
    cut: Cut
    layout: Layout
    wire_dtype: str
    wire_bytes: int
    cost: int
    settings: str = ""
    row_state: bool = False
    row_stats: bool = False
    method: str = "standard"
    segments: tuple[int, ...] = ()
    may_share: bool = False
    panel: Panel | None = None

    @property
    def whole_id(self) -> str:
        """Id of the matrix that the rule updates: its own, unless it is a panel."""
        return self.panel.of if self.panel else self.id

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(rows, cols) of that matrix."""
        return (self.panel.rows, self.panel.cols) if self.panel else (self.rows, self.cols)

    @property
    def rows(self) -> int:
        return self.cut.rows

    @property
    def cols(self) -> int:
        return self.cut.cols

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Global ranks that hold the whole matrix already."""
        return self.layout.holders(self.cut.shape, self.cut.box)

    @property
    def total_bytes(self) -> int:
        """Wire bytes of the whole matrix."""
        return self.rows * self.cols * self.wire_bytes

    @property
    def row_stat_elements(self) -> int:
        """Wire elements that carry one row's number."""
        return ROW_STAT_BYTES // self.wire_bytes

    def block_at(self, coordinate: Coordinate) -> Block:
        """The rectangle held by the rank at `coordinate` of its mesh."""
        return self.cut.block(self.layout.box(self.cut.shape, coordinate))


def lane(matrix: Matrix) -> tuple[object, ...]:
    """What matrices must share to travel in one message."""
    layout, team = matrix.layout, None
    if matrix.panel is not None:  # a team works on matrices of one kind at the same time
        _, _, size, axis, rows, cols = matrix.panel
        team = size, axis, rows, cols, matrix.settings, matrix.segments
    return layout.mesh, layout.sharded_axes, layout.replicated_axes, matrix.wire_dtype, team


def panels_of(matrix: Matrix, count: int, axis: int, cost: int) -> tuple[Matrix, ...]:
    """`matrix` as `count` panels for a team along `axis`. cost: of one panel."""
    return tuple(
        replace(
            matrix,
            id=f"{matrix.id}|{index}",
            cut=matrix.cut.panel(index, count),
            cost=cost,
            method="gram",
            panel=Panel(matrix.id, index, count, axis, matrix.rows, matrix.cols),
        )
        for index in range(count)
    )


def natural_order(name: str) -> tuple[list[Any], str]:
    """A key that sorts names with the numbers in them by value: layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)  # text and digits take turns
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name
