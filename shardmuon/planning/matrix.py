"""The record of one matrix: where it lies, how it travels, what it costs.

Owns `Matrix`, the unit of planning, what matrices must share to travel together, and the order of
their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Block, Coordinate, Layout

__all__ = ["AUTO", "Matrix", "lane", "natural_order"]

AUTO = "auto"
"""Method of a matrix for which none has been chosen yet."""

ROW_STAT_BYTES = 4  # one float32 per row


@dataclass(frozen=True)
class Matrix:
    """One matrix to orthogonalize, described by its place in a parameter and its global shape.

    id: FQN (or `group.position` for unnamed parameters), and the suffix of its cut. cut: where it
    lies in the parameter. layout: how the mesh holds the parameter. wire_dtype: name of the dtype
    in which its blocks and updates travel; wire_bytes: per element.
    cost: FLOPs of its Newton-Schulz. settings: what else must agree between ranks (canonical text).
    row_stats: the rule sends one float32 per row of the update along with it. method, segments:
    how Newton-Schulz runs, see `planning.cost`; `AUTO` costs as much as "standard".
    """

    id: str
    cut: Cut
    layout: Layout
    wire_dtype: str
    wire_bytes: int
    cost: int
    settings: str = ""
    row_stats: bool = False
    method: str = "standard"
    segments: tuple[int, ...] = ()

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
        """Wire elements that carry one row's statistic, 0 without."""
        return ROW_STAT_BYTES // self.wire_bytes if self.row_stats else 0

    def block_at(self, coordinate: Coordinate) -> Block:
        """The rectangle held by the rank at `coordinate` of its mesh."""
        return self.cut.block(self.layout.box(self.cut.shape, coordinate))


def lane(matrix: Matrix) -> tuple[object, ...]:
    """What matrices must share to travel in one message."""
    layout = matrix.layout
    return layout.mesh, layout.sharded_axes, layout.replicated_axes, matrix.wire_dtype


def natural_order(name: str) -> tuple[list[Any], str]:
    """A key that sorts names with the numbers in them by value: layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)  # text and digits take turns
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name
