"""A rule under a `Commit` that does not write: what a GPU does, where the host knows too late.

On a CPU a refused step never reaches the rule, so that only this shows a write past the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardmuon
from shardmuon.rules import RULES, Commit, Shard
from tests.grids import random

__all__ = ["assert_kept"]


def assert_kept(keys: Mapping[str, Any]) -> None:
    """Nothing changes in a refused step of the rule of a group with `keys`; all does in another."""
    p = nn.Parameter(random((6, 4), 0))
    optimizer = shardmuon.Muon([{**keys, "params": [p]}])
    p.grad = random((6, 4), 1)
    optimizer.step()
    held = [p.detach(), *optimizer.state[p].values()]
    group = optimizer.param_groups[0]
    before = [tensor.clone() for tensor in held]
    for commit in (Commit(torch.tensor(False)), Commit(writes=False)):
        _advance(p.detach(), optimizer.state[p], group, commit)
        assert all(map(torch.equal, held, before)), commit
    _advance(p.detach(), optimizer.state[p], group, Commit(torch.tensor(True)))
    assert not any(map(torch.equal, held, before))


def _advance(p: Tensor, state: Mapping[str, Tensor], group: Any, commit: Commit) -> None:
    """One step of a matrix on one rank, by the rule's own parts."""
    rule = RULES[group["algorithm"]]
    shard = Shard(p, random((6, 4), 2), state, {**group, "ns_method": "standard"}, 6, 4)
    rows = state[rule.row_state].squeeze(-1).clone() if rule.row_state else None
    update, stats = rule.orthogonalize(rule.prepare(shard, commit).clone(), shard.group, rows)
    rule.apply_all([shard], [update.reshape(-1)], [stats], commit)
