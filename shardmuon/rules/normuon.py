"""NorMuon: every row of the orthogonalized update is divided by its own running size.

    O <- the update of Muon
    v <- lerp(v, mean over columns of O O, 1 - beta2)        one number per row
    S <- O / (sqrt(v) + 1e-10)
    O <- S ||O|| / ||S||                                      Frobenius norms

Then as Muon does. Rows are output neurons as nn.Linear stores them; the norm of the whole stays
what it was, so learning rates of Muon serve. The rows' averages travel to the owner with the
blocks, and back with the updates. Source: Li et al., "NorMuon: Making Muon more efficient and
scalable", arXiv 2510.05491, with the norm as in the authors' code,
https://github.com/zichongli5/NorMuon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon import limits
from shardmuon.groups import StateKind
from shardmuon.keys import Key, number
from shardmuon.rules.base import Commit, Group, Shard
from shardmuon.rules.muon import MuonRule

__all__ = ["NorMuonRule"]

_SMALLEST = 1e-10


class NorMuonRule(MuonRule):
    """State: that of Muon, and `row_average` in float32, of one element for every row."""

    keys = {**MuonRule.keys, "beta2": Key(0.95, number(limits.Decay))}
    state = {**MuonRule.state, "row_average": StateKind("rows", torch.float32)}
    row_state = "row_average"
    row_stats = True
    shares = False
    owner_keys = (*MuonRule.owner_keys, "beta2")

    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert row_state is not None
        update = super().orthogonalize(whole, group, None)[0].float()
        squares = update.square().mean(dim=-1)
        average = torch.lerp(row_state, squares, 1 - group["beta2"])
        scaled = update / (average.sqrt() + _SMALLEST).unsqueeze(-1)
        before, after = (
            torch.linalg.vector_norm(each, dim=(-2, -1), keepdim=True) for each in (update, scaled)
        )
        return scaled * (before / (after + _SMALLEST)), average

    def apply(self, shard: Shard, update: Tensor, row_stats: Tensor | None, commit: Commit) -> None:
        _keep(shard, row_stats, commit)
        super().apply(shard, update, None, commit)

    def apply_all(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Tensor],
        row_stats: Sequence[Tensor | None],
        commit: Commit,
    ) -> None:
        for shard, stats in zip(shards, row_stats, strict=True):
            _keep(shard, stats, commit)
        super().apply_all(shards, updates, [None] * len(shards), commit)


def _keep(shard: Shard, row_stats: Tensor | None, commit: Commit) -> None:
    """Write the new averages on the ranks where rows begin."""
    average = shard.state["row_average"]
    if row_stats is not None and average.numel():
        commit.write(average, row_stats.unsqueeze(-1))
