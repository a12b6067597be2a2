"""A rule may send one number per row of the whole update along with it; every layout carries it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmuon.rules import RULES
from shardmuon.rules.base import Commit, Group, Shard
from shardmuon.rules.muon import MuonRule
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, Outcome, Problem, match, solve


class RowScaled(MuonRule):
    """Divides each row of the update by the norm of that row of the whole matrix."""

    row_stats = True

    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        update, _ = super().orthogonalize(whole, group, row_state)
        return update, update.float().norm(dim=-1)

    def apply(self, shard: Shard, update: Tensor, row_stats: Tensor | None, commit: Commit) -> None:
        assert row_stats is not None
        assert row_stats.dtype == torch.float32
        if update.numel():
            assert row_stats.shape == (update.size(0),)
            update = update / row_stats[:, None]
        super().apply(shard, update, None, commit)


def solve_scaled(problem: Problem) -> Outcome:
    with mock.patch.dict(RULES, {"muon": RowScaled()}):
        return solve(problem)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_of_the_whole_reach_every_shard(
    pools: Worlds, placement: str, ns_dtype: torch.dtype
) -> None:
    problem = Problem(placements=(placement,), options={"lr": 0.02, "ns_dtype": ns_dtype})
    alone = pools.run(1, solve_scaled, problem)[0]
    assert not match(alone, pools.run(1, solve, problem)[0])
    for outcome in pools.run(3, solve_scaled, problem):
        assert match(alone, outcome)
