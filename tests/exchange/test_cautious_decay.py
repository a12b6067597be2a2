"""Cautious weight decay on several ranks has the bits of one, however the matrices are cut."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

import shardmuon
from tests import models
from tests.conftest import Worlds
from tests.exchange.test_overlap import everything, fsdp
from tests.grids import PLAIN, Grid, Weight, check, solve_alone
from tests.problems import (
    PLACEMENTS,
    Problem,
    assert_ranks_agree,
    digest,
    match,
    place,
    solve,
    world_mesh,
)

OPTIONS = {"lr": 0.05, "weight_decay": 2.0, "cautious_weight_decay": True}


@pytest.mark.parametrize("placement", ["rows", "columns", "replicate"])
@pytest.mark.parametrize("world", [2, 4])
def test_muon_has_the_bits_of_one_rank(pools: Worlds, world: int, placement: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    problem, plain = (
        Problem(dtypes=dtypes, placements=(placement,), options={**OPTIONS, **more})
        for more in ({}, {"cautious_weight_decay": False})
    )
    one = pools.run(1, solve, problem)[0]
    assert all(match(answer, one) for answer in pools.run(world, solve, problem))
    assert not match(pools.run(1, solve, plain)[0], one)


GRIDS = [
    Grid(
        mesh=mesh,
        weights=tuple(
            Weight(shape=shape, letters=letters, keys=keys, dtype=dtype)
            for letters in ("R0", "10", "s0", PLAIN)
            for shape, keys, dtype in (
                ((10, 8), {}, torch.float32),
                ((1, 64), {}, torch.bfloat16),
                ((3, 5, 7), {"adjust_lr_fn": "spectral"}, torch.float32),
                ((12, 5), {"split_sizes": [7, 5]}, torch.float32),
            )
        ),
        options=OPTIONS,
    )
    for mesh in ((2, 2), (1, 4))
]


def test_stacks_and_meshes_of_two_axes_have_the_bits_of_single_matrices(pools: Worlds) -> None:
    right = pools.run(1, solve_alone, GRIDS)[0]
    for answers in pools.run(4, check, GRIDS, right):
        assert [answer.fault for answer in answers] == ["", ""]


SHAPES: tuple[tuple[int, ...], ...] = ((33, 8), (8,), (3,), (1,), ())


def _adamw(placement: str) -> str:
    """Hash of whole parameters and moments after five steps; shards of small ones are empty."""
    mesh = world_mesh()

    def values(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    def how(value: torch.Tensor) -> Any:
        return PLACEMENTS[placement if value.ndim else "replicate"]

    params = [nn.Parameter(place(v, mesh, how(v))) for v in values(0)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = shardmuon.Muon([{"params": named, "algorithm": "adamw", **OPTIONS}])
    for step in range(1, 6):
        for p, g in zip(params, values(step), strict=True):
            p.grad = place(g, mesh, how(g))
        optimizer.step()
    state = [optimizer.state[p][key] for p in params for key in ("step", "exp_avg", "exp_avg_sq")]
    return digest(assert_ranks_agree([*params, *state]))


@pytest.mark.parametrize("placement", ["rows", "replicate"])
@pytest.mark.parametrize("world", [2, 4])
def test_adamw_has_the_bits_of_one_rank(pools: Worlds, world: int, placement: str) -> None:
    one = pools.run(1, _adamw, placement)
    assert pools.run(world, _adamw, placement) == one * world


How = Literal["none", "backward"]
Exchange = Literal["auto", "all_gather"]


def _train(overlap: How, exchange: Exchange, cautious: bool) -> str:
    """Hash of everything after three steps of a sharded model under Muon and AdamW."""
    model = fsdp()
    keys = {**OPTIONS, "cautious_weight_decay": cautious}
    groups = [{**group, **keys} for group in models.groups(model, ns_dtype=torch.float32)]
    runtime = shardmuon.Runtime(
        deterministic=True, bucket_bytes=600, overlap=overlap, exchange=exchange
    )
    optimizer = shardmuon.Muon(groups, runtime=runtime)
    for step in range(3):
        models.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


def test_neither_overlap_nor_the_exchange_shows(pools: Worlds) -> None:
    right = pools.run(2, _train, "none", "auto", True)
    assert pools.run(2, _train, "backward", "auto", True) == right
    assert pools.run(2, _train, "none", "all_gather", True) == right
    assert pools.run(2, _train, "none", "auto", False) != right
