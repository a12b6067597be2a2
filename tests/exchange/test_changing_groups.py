"""Parameters that are tied, tiny, replaced, frozen, thawed or added: the plan and state follow."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardmuon
from tests import models, ranks
from tests.conftest import Worlds
from tests.grids import placed, random
from tests.problems import assert_ranks_agree, digest, whole, world_mesh

RUNTIME = shardmuon.Runtime(deterministic=True)

# -- ties and vectors -----------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and head share one weight around a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8, bias=False))
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.lm_head(torch.tanh(self.hidden(self.embed(tokens))))
        return x.square().mean()


def _tied() -> tuple[str, list[str], int, list[bool]]:
    """Steps, a round trip of the state dict, a step: hash, names, states, whether still tied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tied().to(ranks.device())
    fully_shard(model, mesh=world_mesh())
    optimizer = models.optimizer_of(model)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    tied = []
    for step in range(3):
        models.spread_gradients(model, step)
        optimizer.step()
        tied.append(model.lm_head.weight is model.embed.weight)
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    values = list(model.parameters())
    state = [optimizer.state[p][key] for p in values for key in sorted(optimizer.state[p])]
    return digest(assert_ranks_agree([*values, *state])), names, len(optimizer.state), tied


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.supports("tied weights")
def test_tied_weights_are_one_parameter(pools: Worlds, world: int) -> None:
    ((right, *_),) = pools.run(1, _tied)
    for hashed, names, states, tied in pools.run(world, _tied):
        assert hashed == right
        assert sorted(names) == ["embed.weight", "hidden.0.weight"]
        assert states == 2
        assert all(tied)


def _short_vectors(folder: str) -> tuple[str, list[list[str]]]:
    """AdamW on vectors that leave shards empty: hash of whole values, keys of the state."""
    mesh = world_mesh()
    params = [nn.Parameter(placed(random((n,), n), "0", mesh)) for n in (1, 3, 5)]
    groups = [{"params": list(zip("abc", params, strict=True)), "algorithm": "adamw"}]
    optimizer = shardmuon.Muon(groups, runtime=RUNTIME)
    saved = optimizer.state_dict()
    if folder and dist.get_world_size() == 2:
        dcp.load(saved["state"], checkpoint_id=folder)
        optimizer.load_state_dict(saved)
    else:
        for step in range(3):
            for p in params:
                p.grad = placed(random(tuple(p.shape), 100 * step + len(p)), "0", mesh)
            optimizer.step()
    saved = optimizer.state_dict()
    if folder and dist.get_world_size() == 4:
        dcp.save(saved["state"], checkpoint_id=folder)
    keys = [sorted(entry) for _, entry in sorted(saved["state"].items())]
    state = [v for p in params for _, v in sorted(optimizer.state[p].items())]
    return digest(assert_ranks_agree(state if folder else [*params, *state])), keys


@pytest.mark.supports("empty shards in AdamW groups")
def test_empty_shards_in_the_adamw_part(pools: Worlds, shared_folder: str) -> None:
    ((right, names),) = pools.run(1, _short_vectors, "")
    for hashed, keys in pools.run(4, _short_vectors, ""):
        assert hashed == right
        assert keys == names == [["exp_avg", "exp_avg_sq", "step"]] * 3
    four = pools.run(4, _short_vectors, shared_folder)
    two = pools.run(2, _short_vectors, shared_folder)
    assert {hashed for hashed, _ in two} == {four[0][0]}


# -- groups that change ---------------------------------------------------------------------------


def _replaced(late: bool) -> str:
    """An optimizer over plain tensors whose groups then get DTensors, as frameworks do it."""
    mesh = world_mesh()
    shapes = [(10, 8), (5, 7), (3, 6, 4)]
    values = [random(shape, i) for i, shape in enumerate(shapes)]
    plain = [nn.Parameter(value.to(ranks.device())) for value in values]
    sharded = [nn.Parameter(placed(value, "0", mesh)) for value in values]
    named = [(f"w{i}", p) for i, p in enumerate(plain if late else sharded)]
    groups: list[dict[str, Any]] = [
        {"params": named[:1]},
        {"params": named[1:2], "algorithm": "adamw"},
        {"params": named[2:], "transposed": True},
    ]
    optimizer = shardmuon.Muon(groups, lr=0.02, mesh=mesh, runtime=RUNTIME)
    if late:
        optimizer.plan.report()  # a plan of the old tensors must not survive
        for group, p in zip(optimizer.param_groups, sharded, strict=True):
            group["params"] = [p]
        del plain, named, groups
        gc.collect()
    for step in range(3):
        for i, p in enumerate(sharded):
            p.grad = placed(random(shapes[i], 100 * step + i), "0", mesh)
        optimizer.step()
    assert set(optimizer.state) == set(sharded)
    state = [optimizer.state[p][key] for p in sharded for key in sorted(optimizer.state[p])]
    assert all(isinstance(t, DTensor) for t in state if t.ndim)
    return digest(assert_ranks_agree([*sharded, *state]))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.supports("parameters replaced after construction")
def test_parameters_replaced_before_the_first_step(pools: Worlds, world: int) -> None:
    (right,) = pools.run(1, _replaced, False)
    assert set(pools.run(world, _replaced, True)) == {right}


def _thawed() -> tuple[str, list[int]]:
    """One weight is frozen for two of four steps, and a group comes later: hash, counts."""
    mesh = world_mesh()
    shapes = [(10, 8), (5, 7), (3, 6, 4)]
    params = [nn.Parameter(placed(random(s, i), "0", mesh)) for i, s in enumerate(shapes)]
    params[0].requires_grad_(False)
    optimizer = shardmuon.Muon([("w0", params[0]), ("w1", params[1])], lr=0.02, runtime=RUNTIME)
    counts = []
    for step in range(6):
        if step == 2:
            params[0].requires_grad_(True)
        if step == 3:
            optimizer.add_param_group({"params": [("w2", params[2])], "num_heads": 2})
        if step == 5:
            params[1].requires_grad_(False)
            params[1].grad = None
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = placed(random(tuple(p.shape), step), "0", mesh)
        optimizer.step()
        counts.append(optimizer.stats.matrices_orthogonalized)
    state = [optimizer.state[p]["momentum_buffer"] for p in params]
    return digest(assert_ranks_agree([*params, *state])), counts


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.supports("parameters frozen, thawed and added")
def test_plans_follow_frozen_thawed_and_added_parameters(pools: Worlds, world: int) -> None:
    ((right, one),) = pools.run(1, _thawed)
    answers = pools.run(world, _thawed)
    assert {hashed for hashed, _ in answers} == {right}
    assert one == [1, 1, 2, 8, 8, 7]
    assert [sum(step) for step in zip(*(counts for _, counts in answers), strict=True)] == one


def _built_too_early(wrap: bool) -> bool:
    """The optimizer holds the parameters from before `fully_shard`: does the model train?"""
    model = models.make().to(ranks.device())
    optimizer = models.optimizer_of(model)
    if wrap:
        for block in model.blocks:
            fully_shard(block, mesh=world_mesh())
        fully_shard(model, mesh=world_mesh())
    before = [whole(p) for p in model.parameters()]
    models.spread_gradients(model, 0)
    optimizer.step()
    return all(not whole(p).equal(b) for p, b in zip(model.parameters(), before, strict=True))


def test_an_optimizer_built_before_fully_shard_says_so(pools: Worlds) -> None:
    for error in pools.run_expecting_error(2, _built_too_early, True):
        assert error.type_name in ("RuntimeError", "ValueError", "UserWarning")
    assert all(pools.run(1, _built_too_early, False))
