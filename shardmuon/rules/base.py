"""The interfaces of rules: to the exchange for whole matrices, to the engine for all else.

A rule for matrices sees a local `Shard` before and after the exchange and one whole matrix in
between; one for elements sees local tensors only. Neither sees ranks, meshes or buckets, and so
inherits every layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon.groups import StateKind
from shardmuon.keys import Keys
from shardmuon.orthogonalize.newton_schulz import Team

__all__ = ["Commit", "ElementRule", "ElementShard", "Shard", "UpdateRule", "opposed", "wide"]

Group = Mapping[str, Any]


class Shard(NamedTuple):
    """This rank's block of one matrix: plain local tensors, any of them may be empty.

    parameter: [block rows, block cols]. gradient: likewise, its own dtype, never written.
    state: local tensors by state key. group: the live parameter group. rows, cols: global shape.
    """

    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    group: Group
    rows: int
    cols: int


@dataclass(frozen=True)
class Commit:
    """Writes results, unless the ranks agreed not to take this step.

    accepted: None if the host already knows that the step is taken; else a bool tensor [] on the
    device. A refused step *selects* the old values: multiplying by zero would keep NaN.
    writes: False while it is not yet time to take the step, and nothing may change.
    """

    accepted: Tensor | None = None
    writes: bool = True

    def write(self, target: Tensor, value: Tensor) -> None:
        """Set `target` to `value` (rounded to its dtype) in place."""
        if not self.writes:
            return
        if self.accepted is not None:
            value = torch.where(self.accepted, value.to(target.dtype), target)
        target.copy_(value)


class ElementShard(NamedTuple):
    """Local tensors of one parameter under an `ElementRule`, equal shapes, maybe empty.

    state: local tensors by state key; a counter is [] float32.
    """

    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class ElementRule(ABC):
    """One way to update parameters element by element, which needs nothing of other ranks.

    keys, state: as in `UpdateRule`.
    """

    keys: Keys
    state: Mapping[str, StateKind]

    @abstractmethod
    def step(self, shards: Sequence[ElementShard], group: Group, commit: Commit) -> None:
        """Advance parameters and state of one group in place."""


class UpdateRule(ABC):
    """One way to update a matrix through an orthogonalized whole.

    keys: of the groups that take the rule. state: of each parameter, by name; zeros at first.
    row_state: name of state in float32, of form "rows", that `orthogonalize` gets. row_stats:
    `orthogonalize` also returns one float32 per row, which then reaches `apply`. shares: a team can
    orthogonalize a matrix in panels, under the gram method. prepare_keys: keys that `prepare`
    reads; owner_keys: those that `orthogonalize` reads.
    """

    keys: Keys
    state: Mapping[str, StateKind]
    row_state: str | None = None
    row_stats = False
    shares = False
    prepare_keys: tuple[str, ...] = ()
    owner_keys: tuple[str, ...] = ()

    @abstractmethod
    def prepare(self, shard: Shard, commit: Commit) -> Tensor:
        """Advance the state and return this block of the matrix to orthogonalize.

        The block is the same whether `commit` writes or not.
        """

    @abstractmethod
    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """whole: fresh [rows, cols] or [n, rows, cols] in the wire dtype; may be overwritten.

        row_state: float32 [..., rows], None for a rule without. Returns the update in the shape of
        `whole` and, with `row_stats`, float32 [..., rows].
        """

    def orthogonalize_panels(
        self, panels: Tensor, group: Group, whole: tuple[int, int], team: Team
    ) -> Tensor:
        """This rank's panels [n, rows, cols] of the updates of matrices of shape `whole`.

        All ranks of `team` call it with their panels of the same matrices; only with `shares`.
        """
        raise NotImplementedError

    @abstractmethod
    def apply(self, shard: Shard, update: Tensor, row_stats: Tensor | None, commit: Commit) -> None:
        """Write the parameter. update: [block rows, block cols]; row_stats: [block rows]."""

    def warm_up(self, whole: Tensor, group: Group) -> None:  # noqa: B027  (nothing to warm up)
        """Get ready to `orthogonalize` tensors like `whole`: compile kernels, capture graphs."""

    def prepare_all(
        self, shards: Sequence[Shard], places: Sequence[Tensor | None], commit: Commit
    ) -> None:
        """`prepare` each shard and write its block into its place.

        places: 1-D, contiguous, in the wire dtype and on the device of the exchange, which is the
        shard's own if that is a GPU; None where the block does not travel. A rule may do better
        than one shard after the other, with the same bits.
        """
        for shard, place in zip(shards, places, strict=True):
            block = self.prepare(shard, commit)
            if place is not None:
                place.view(block.shape).copy_(block)

    def apply_all(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Tensor],
        row_stats: Sequence[Tensor | None],
        commit: Commit,
    ) -> None:
        """`apply` to each shard its update: 1-D, contiguous, on its device; see `prepare_all`."""
        for shard, update, stats in zip(shards, updates, row_stats, strict=True):
            self.apply(shard, update.view(shard.parameter.shape), stats, commit)


def opposed(update: Tensor, parameter: Tensor) -> Tensor:
    """bool: where cautious weight decay spares the parameter, because the update makes it larger.

    update: what is subtracted from the parameter, or anything of the same signs. Spared is where
    u P < 0, so zeros of either are not ("Cautious Weight Decay", arXiv 2510.12402). Signs are
    multiplied, since a product of small numbers may be zero.
    """
    return torch.sign(update) * torch.sign(parameter) < 0


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in float32 if it is bf16 or fp16, itself otherwise.

    Elementwise bf16 kernels give other bits on a shard than on the whole (vector body and scalar
    tail round differently); computing in float32 and rounding once does not.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
