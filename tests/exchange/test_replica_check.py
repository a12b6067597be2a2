"""Replicas that started from other weights, or have parted, are found when one asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardmuon
from tests import models, ranks
from tests.conftest import Worlds
from tests.grids import mesh_of
from tests.problems import local, world_mesh


def _hsdp(seed_of_second: int) -> None:
    """An HSDP model; replica 1 draws its weights with its own seed."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(seed_of_second if dist.get_rank() >= 2 else 1)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5)).to(ranks.device())
    fully_shard(model, mesh=mesh)
    groups: list[dict[str, Any]] = [
        {"params": [("a", model[0].weight), ("b", model[1].weight)]},
        {"params": [("x", model[0].bias), ("y", model[1].bias)], "algorithm": "adamw"},
    ]
    shardmuon.Muon(groups).check_replicas()


def test_replicas_from_other_seeds_are_found(pools: Worlds) -> None:
    pools.run(4, _hsdp, 1)
    errors = pools.run_expecting_error(4, _hsdp, 2)
    assert {e.type_name for e in errors} == {"RuntimeError"}
    assert {e.message for e in errors} == {errors[0].message}
    assert "different values of 4 parameters, the first is a;" in errors[0].message


def _one_bit(kind: str) -> None:
    """Rank 1 changes a plain replicated tensor in one place, or swaps two of its values."""
    weight = nn.Parameter(torch.arange(12.0, device=ranks.device()).view(3, 4))
    other = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16, device=ranks.device()))
    optimizer = shardmuon.Muon([("w", weight), ("o", other)], mesh=world_mesh())
    optimizer.check_replicas()
    if dist.get_rank() == 1:
        with torch.no_grad():
            if kind == "bit":
                weight[2, 3] = torch.nextafter(weight[2, 3], weight[2, 3] + 1)
            else:
                weight[0] = weight[0].flip(0)
    optimizer.check_replicas()


@pytest.mark.parametrize("kind", ["bit", "order"])
def test_one_bit_or_another_order_is_found_and_named(pools: Worlds, kind: str) -> None:
    errors = pools.run_expecting_error(2, _one_bit, kind)
    assert {e.message for e in errors} == {errors[0].message}
    assert "the first is w;" in errors[0].message


def _sharded() -> bool:
    """Sharded parameters have no replicas, so shards that differ are no fault."""
    model = models.make().to(ranks.device())
    fully_shard(model, mesh=world_mesh())
    optimizer = models.optimizer_of(model)
    with torch.no_grad():
        for p in model.parameters():
            local(p).add_(dist.get_rank())
    optimizer.check_replicas()
    return True


def test_shards_are_not_replicas(pools: Worlds) -> None:
    assert all(pools.run(2, _sharded))
