"""Buffers of collectives while memory of their sizes is taken and freed, and groups when new."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardmuon
from shardmuon.exchange import collectives
from tests import ranks
from tests.conftest import Worlds
from tests.problems import (
    Problem,
    assert_ranks_agree,
    build,
    place,
    set_gradients,
    whole,
    world_mesh,
)

SHAPES = [(128, 128), (256, 64), (64, 512), (100, 36), (33, 17)] * 8


def _steps_with_churn(steps: int) -> bool:
    """Ranks compare their parameters after every step."""
    problem = Problem(shapes=SHAPES, seed=1, runtime=shardmuon.Runtime(bucket_bytes=1 << 17))
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    for step in range(steps):
        set_gradients(params, problem, step, mesh)
        optimizer.step()
        churn = [
            torch.full((rows * cols,), float("nan"), device=ranks.device())
            for rows, cols in SHAPES
            for _ in range(2)
        ]
        assert_ranks_agree(params)
        del churn
        gc.collect()
    return all(bool(p.isfinite().all()) for p in map(whole, params))


@pytest.mark.timeout(600)
def test_buffers_outlive_their_collectives(pools: Worlds) -> None:
    """On eight GPUs many steps; elsewhere a few, for gloo's threads."""
    world, steps = (8, 500) if ranks.backend() == "nccl" else (2, 50)
    assert all(pools.run(world, _steps_with_churn, steps, limit_s=500.0))


def _first_calls(overlap: Any) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    """Collectives of constructing, and then kind and ranks of those of the first two steps."""
    mesh = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("data", "expert"))
    everywhere = world_mesh()
    dense = [nn.Parameter(place(torch.eye(8 + i), everywhere, Shard(0))) for i in range(3)]
    experts = [nn.Parameter(place(torch.eye(8 + i), mesh["expert"], Shard(0))) for i in range(3)]
    params = [*dense, *experts]
    calls: list[tuple[str, tuple[int, ...]]] = []

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            group = named.get("group") or next(a for a in arguments if collectives.is_group(a))
            calls.append((name, tuple(dist.get_process_group_ranks(group))))
            return original(*arguments, **named)

        return mock.patch.object(dist, name, call)

    before = sum(collectives.calls.values())
    runtime = shardmuon.Runtime(overlap=overlap, bucket_bytes=300)
    optimizer = shardmuon.Muon([(f"w{i}", p) for i, p in enumerate(params)], runtime=runtime)
    built = sum(collectives.calls.values()) - before
    with noting("all_reduce"), noting("all_to_all_single"):
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    return built, calls


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_ranks_use_new_groups_in_the_same_order(pools: Worlds, overlap: str) -> None:
    """No warm-up is needed: the first collective of a step is the header's, on each group."""
    answers = pools.run(4, _first_calls, overlap)
    assert [built for built, _ in answers] == [0] * 4
    everyone = [calls for _, calls in answers]
    assert all(calls[0][0] == "all_reduce" for calls in everyone)
    assert {len(group) for calls in everyone for _, group in calls} == {2, 4}
    for one, calls in enumerate(everyone):
        for other, others in enumerate(everyone):
            shared = [
                [call for call in each if {one, other} <= set(call[1])] for each in (calls, others)
            ]
            assert shared[0] == shared[1]
