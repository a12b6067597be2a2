"""Sums over a team: neighbours along a mesh axis that orthogonalize matrices together.

Owns how a team talks. It uses the axis's own process group, so that no group has to be made: all
ranks of the axis take part in every exchange, and those that have nothing to say send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon.exchange import collectives
from shardmuon.exchange.activity import during

__all__ = ["AxisTeam"]


class AxisTeam:
    """The team of the rank at position `here` of an axis of `size` ranks, in teams of `count`.

    A rank at the end of the axis that is in no team only attends.
    """

    def __init__(
        self, group: collectives.Group, size: int, here: int, count: int, timeout_s: float | None
    ) -> None:
        first = here - here % count
        self.index = here - first
        self._group = group
        self._members = range(first, first + count)
        self._size = size
        self._timeout_s = timeout_s

    def everyones(self, x: Tensor) -> Tensor:
        """`x` of each member, [members, *x.shape]."""
        count = len(self._members)
        sizes = [x.numel()] * count
        return self._exchange(x.flatten().repeat(count), sizes, sizes).view(count, *x.shape)

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` over the members, in float32 at least and rounded once.

        Each member sums one part, in the order of the members, and sends it to all: so all have
        the same bits.
        """
        flat = x.flatten()
        count = len(self._members)
        parts = [len(part) for part in flat.tensor_split(count)]
        mine = [parts[self.index]] * count
        wide = torch.promote_types(x.dtype, torch.float32)
        summed = self._exchange(flat, parts, mine).view(count, -1).sum(0, dtype=wide).to(x.dtype)
        return self._exchange(summed.repeat(count), mine, parts).view(x.shape)

    def attend(self, segments: Sequence[int], nothing: Tensor) -> None:
        """Take part in what the others exchange for matrices of which this rank has no panel."""
        none = [0] * len(self._members)
        for _ in range(1 + 2 * len(segments)):
            self._exchange(nothing, none, none)

    def _exchange(self, send: Tensor, outwards: list[int], inwards: list[int]) -> Tensor:
        """Elements to and from each member, in their order."""
        with during("sums of a team", waits=True):
            received, work = collectives.all_to_all(
                send, self._splits(outwards), self._splits(inwards), self._group
            )
            work.wait(self._timeout_s)
        return received

    def _splits(self, sizes: list[int]) -> list[int]:
        splits = [0] * self._size
        for position, size in zip(self._members, sizes, strict=True):
            if position < self._size:  # the team at the end of the axis may be incomplete
                splits[position] = size
        return splits
