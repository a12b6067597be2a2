"""What a step says of itself, and that it has done all of its plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import shardmuon
from shardmuon import plans
from shardmuon.exchange.pipeline import Transit
from tests import ranks
from tests.conftest import Worlds
from tests.grids import random
from tests.problems import place, world_mesh

SHAPES = ((24, 16), (16, 24), (20, 20))


def optimizer() -> shardmuon.Muon:
    mesh = world_mesh() if dist.is_initialized() else None
    params = []
    for number, shape in enumerate(SHAPES):
        p = nn.Parameter(place(random(shape, number), mesh, Shard(0)))
        p.grad = place(random(shape, 10 + number), mesh, Shard(0))
        params.append((f"p{number}", p))
    return shardmuon.Muon(params, ns_dtype=torch.float32, runtime=shardmuon.Runtime(bucket_bytes=1))


def measured() -> list[shardmuon.StepStats]:
    made = optimizer()
    before = made.stats
    made.step()
    plain = made.stats
    made.measure_next_step()
    made.step()
    asked = made.stats
    made.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [before, plain, asked, made.stats]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_orthogonality_is_measured_once_for_each_request(pools: Worlds, world: int) -> None:
    for before, plain, asked, after in pools.run(world, measured):
        assert before.orthogonality_error is plain.orthogonality_error is None
        assert after.orthogonality_error is None
        if asked.matrices_orthogonalized:
            # Five steps of Keller's polynomial leave singular values between about 0.7 and 1.2.
            assert asked.orthogonality_error is not None
            assert 0.05 < asked.orthogonality_error < 0.5
        else:
            assert asked.orthogonality_error is None
        assert after.waited_s is not None
        assert (after.waited_s > 0) == (world > 1)


def skipping() -> str:
    """A step in which this rank leaves an update out."""
    made = optimizer()
    made.step()
    with pytest.MonkeyPatch.context() as patch:
        right = Transit._update

        def without_count(self: Transit, *arguments: object) -> None:
            right(self, *arguments)  # type: ignore[arg-type]
            self.tally.matrices_orthogonalized -= 1

        patch.setattr(Transit, "_update", without_count)
        try:
            made.step()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_matrix_that_was_left_out_is_an_error(pools: Worlds) -> None:
    (said,) = pools.run(1, skipping)
    assert "was to orthogonalize 3 matrices and orthogonalized 0" in said


def other_version() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(plans, "VERSIONS", ("torch 9.9.9", *plans.VERSIONS[1:]))
        try:
            optimizer().step()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.skipif(ranks.backend() == "nccl", reason="on GPUs prepare() shows the difference")
def test_another_version_of_torch_on_a_rank_is_an_error_on_all(pools: Worlds) -> None:
    first, second = pools.run(2, other_version)
    assert first == second
    assert "ranks 0 and 1 made different plans" in first
    assert "torch 9.9.9" in first
    assert f"torch {torch.__version__}" in first
