"""The AdamW part: torch's own arithmetic at the learning rate as given, on whole and on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardmuon
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, assert_ranks_agree, digest, place, world_mesh

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (33, 8),
    "lm_head.weight": (33, 8),
    "norm.weight": (8,),
    "bias": (3,),
    "scalar_like": (1,),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2},
    {"weight_decay": 0.0, "lr": 0.1},
]


def values(step: int | None) -> list[Tensor]:
    """Weights (None) or gradients of a step."""
    seed = 0 if step is None else step + 1
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def run_torch(settings: dict[str, Any], steps: int = 5) -> list[Tensor]:
    params = [nn.Parameter(v) for v in values(None)]
    optimizer = torch.optim.AdamW(params, foreach=False, **settings)
    for step in range(steps):
        for p, g in zip(params, values(step), strict=True):
            p.grad = g
        optimizer.step()
    state = [optimizer.state[p] for p in params]
    return [
        *(p.detach() for p in params),
        *(s[key] for s in state for key in ("step", "exp_avg", "exp_avg_sq")),
    ]


@pytest.mark.parametrize("settings", SETTINGS)
def test_bit_equal_to_torch(settings: dict[str, Any]) -> None:
    params = [nn.Parameter(v) for v in values(None)]
    group = {"params": list(zip(SHAPES, params, strict=True)), "algorithm": "adamw", **settings}
    matrix = nn.Parameter(torch.ones(4, 3))
    optimizer = shardmuon.Muon([group, {"params": [("hidden", matrix)]}], lr=0.7, eps=0.1)
    for step in range(5):
        for p, g in zip(params, values(step), strict=True):
            p.grad = g
        matrix.grad = torch.ones(4, 3)
        optimizer.step()
    state = [optimizer.state[p] for p in params]
    ours = [
        *(p.detach() for p in params),
        *(s[key] for s in state for key in ("step", "exp_avg", "exp_avg_sq")),
    ]
    assert digest(ours) == digest(run_torch(settings))


def _on_shards(settings: dict[str, Any], placement: str) -> tuple[str, list[list[str]]]:
    mesh = world_mesh()
    params = [nn.Parameter(place(v, mesh, PLACEMENTS[placement])) for v in values(None)]
    group = {"params": list(zip(SHAPES, params, strict=True)), "algorithm": "adamw", **settings}
    optimizer = shardmuon.Muon([group])
    for step in range(5):
        for p, g in zip(params, values(step), strict=True):
            p.grad = place(g, mesh, PLACEMENTS[placement])
        optimizer.step()
    state = [optimizer.state[p] for p in params]
    tensors = [
        *params,
        *(s[key] for s in state for key in ("step", "exp_avg", "exp_avg_sq")),
    ]
    return digest(assert_ranks_agree(tensors)), [sorted(s) for s in state]


@pytest.mark.parametrize("placement", ["rows", "replicate"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("world", [2, 4])
def test_shards_even_empty_ones_give_the_bits_of_the_whole(
    pools: Worlds, world: int, placement: str, settings: dict[str, Any]
) -> None:
    (one, _), *_ = pools.run(1, _on_shards, settings, placement)
    answers = pools.run(world, _on_shards, settings, placement)
    assert {a for a, _ in answers} == {one}
    assert all(keys == answers[0][1] for _, keys in answers)


def _missing_vector_gradient() -> list[float]:
    """Counters of a used and an unused vector after three steps."""
    mesh = world_mesh()
    used = nn.Parameter(place(torch.ones(5), mesh, Shard(0)))
    unused = nn.Parameter(place(torch.ones(5), mesh, Shard(0)))
    groups = [{"params": [("used", used), ("unused", unused)], "algorithm": "adamw"}]
    optimizer = shardmuon.Muon(groups)
    for _ in range(3):
        used.grad = torch.ones_like(used)
        optimizer.step()
    assert dist.get_world_size() == mesh.size()
    return [float(optimizer.state[p]["step"]) for p in (used, unused)]


def test_counter_of_an_unused_parameter_stays(pools: Worlds) -> None:
    assert pools.run(2, _missing_vector_gradient) == [[3.0, 0.0]] * 2


def test_parameter_without_gradient_is_skipped_like_in_torch() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = shardmuon.Muon([{"params": [p], "algorithm": "adamw", "weight_decay": 0.5}])
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    assert p.eq(1).all()
    assert float(optimizer.state[p]["step"]) == 0.0


def test_only_adamw_groups_work() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = shardmuon.Muon([{"params": [("w", p)], "algorithm": "adamw", "lr": 0.1}])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.stats.matrices_orthogonalized == 0
    assert dict(optimizer.plan.owners()) == {}
    assert p.lt(1).all()
