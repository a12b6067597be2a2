"""Buffers of collectives on eight GPUs, while memory of their sizes is taken and freed."""

from __future__ import annotations

import gc

import pytest
import torch

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.problems import Problem, assert_ranks_agree, build, set_gradients, whole, world_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ranks.backend() != "nccl", reason="needs ranks over NCCL"),
    pytest.mark.timeout(600),
]

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


def test_buffers_outlive_their_collectives(pools: Worlds) -> None:
    assert all(pools.run(8, _steps_with_churn, 500, limit_s=500.0))
