"""Meshes of several axes: one result for every mesh, placement and exchange kind, bit by bit."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardmuon
from tests import ranks, reference
from tests.conftest import Worlds
from tests.grids import mesh_of
from tests.problems import SHAPES, assert_ranks_agree, digest, whole

Exchange = Literal["auto", "all_gather"]
PLACES: dict[str, Placement] = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}
LAYOUTS = [
    ((2, 2), "R0"),
    ((2, 2), "0R"),
    ((2, 2), "R1"),
    ((2, 2), "01"),
    ((2, 2), "10"),
    ((2, 2), "00"),
    ((2, 2), "11"),
    ((2, 2), "RR"),
    ((1, 4), "0R"),
    ((4, 1), "00"),
    ((2, 2, 2), "R01"),
    ((2, 2, 2), "RR0"),
    ((2, 2, 2), "0R1"),
    ((2, 2, 2), "001"),
]


def train(
    mesh: DeviceMesh | None, letters: str, exchange: Exchange, bucket_bytes: int = 2**26
) -> tuple[str, list[int]]:
    """(hash of whole parameters and momenta after three steps, this rank's step counts)."""
    placements = [PLACES[letter] for letter in letters]

    def placed(value: Tensor) -> Tensor:
        value = value.float().to(ranks.device())
        return distribute_tensor(value, mesh, placements) if mesh is not None else value

    params = [nn.Parameter(placed(torch.from_numpy(reference.weights(*s)))) for s in SHAPES]
    runtime = shardmuon.Runtime(exchange=exchange, bucket_bytes=bucket_bytes, deterministic=True)
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    optimizer = shardmuon.Muon(named, lr=0.02, ns_dtype=torch.float32, runtime=runtime)
    counts = []
    for step in range(3):
        for shape, p in zip(SHAPES, params, strict=True):
            p.grad = placed(torch.from_numpy(reference.gradient(*shape, step)))
        optimizer.step()
        counts.append(optimizer.stats.matrices_orthogonalized)
    rank = torch.distributed.get_rank() if mesh is not None else 0
    assert optimizer.stats.bytes_sent == optimizer.plan.bytes_sent().get(rank, 0)
    assert optimizer.stats.bytes_received == optimizer.plan.bytes_received().get(rank, 0)
    if mesh is not None:
        check_collectives(optimizer, mesh, letters)
    state = [optimizer.state[p]["momentum_buffer"] for p in params]
    for p, momentum in zip(params, state, strict=True):
        if isinstance(p, DTensor) and isinstance(momentum, DTensor):
            assert momentum.placements == p.placements == tuple(placements)
    # Replicas must hold the same bits, not only the first one that full_tensor reads.
    found = [*params, *state]
    return digest(assert_ranks_agree(found) if mesh is not None else found), counts


def check_collectives(optimizer: shardmuon.Muon, mesh: DeviceMesh, letters: str) -> None:
    """Two per sharded axis and one per replicated one in each bucket, and the header."""
    axes = [letter for letter, size in zip(letters, mesh.shape, strict=True) if size > 1]
    replicated = axes.count("R")
    per_bucket = 2 * (len(axes) - replicated) + replicated
    buckets = len(optimizer.plan.buckets)
    assert optimizer.stats.collectives == buckets * per_bucket + len(axes)


def on_mesh(
    shape: tuple[int, ...], letters: str, exchange: Exchange, bucket_bytes: int
) -> tuple[str, list[int]]:
    return train(mesh_of(shape), letters, exchange, bucket_bytes)


def on_one_rank() -> tuple[str, list[int]]:
    return train(None, "", "auto")


@pytest.fixture(scope="module")
def right(pools: Worlds) -> str:
    """What one rank without a mesh computes."""
    return pools.run(1, on_one_rank)[0][0]


@pytest.mark.parametrize(("exchange", "bucket_bytes"), [("auto", 2000), ("all_gather", 2**26)])
@pytest.mark.parametrize(("shape", "letters"), LAYOUTS)
@pytest.mark.supports(
    "meshes of two and three axes: HSDP, both dims sharded, one dim sharded twice"
)
def test_every_mesh_gives_the_bits_of_one_process(
    pools: Worlds,
    right: str,
    shape: tuple[int, ...],
    letters: str,
    exchange: Exchange,
    bucket_bytes: int,
) -> None:
    world = math.prod(shape)
    answers = pools.run(world, on_mesh, shape, letters, exchange, bucket_bytes)
    assert {found for found, _ in answers} == {right}
    # Each matrix once per step over all ranks, replicas included.
    totals = [sum(counts) for counts in zip(*(c for _, c in answers), strict=True)]
    assert totals == [len(SHAPES)] * 3


class Parallel(nn.Module):
    """A column-parallel and a row-parallel layer, uneven over two ranks each way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 24, bias=False)
        self.down = nn.Linear(24, 18, bias=False)


def parallel_step(shape: tuple[int, ...] | None) -> tuple[str, list[str]]:
    """Real `parallelize_module` and `fully_shard`: hash after three steps, and placements."""
    model = Parallel().to(ranks.device())
    for index, weight in enumerate(model.parameters()):
        rows, cols = weight.shape
        values = torch.from_numpy(reference.weights(rows, cols)).float()
        weight.data.copy_(values + index)
    if shape is not None:
        names = ("replicate", "shard", "tp")[-len(shape) :]
        mesh = init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh[names[:-1]])
    params = dict(model.named_parameters())
    runtime = shardmuon.Runtime(deterministic=True)
    optimizer = shardmuon.Muon(params.items(), lr=0.02, ns_dtype=torch.float32, runtime=runtime)
    for step in range(3):
        for p in params.values():
            rows, cols = p.shape
            gradient = torch.from_numpy(reference.gradient(rows, cols, step)).float()
            p.grad = placed_like(gradient.to(ranks.device()), p)
        optimizer.step()
    state = [optimizer.state[p]["momentum_buffer"] for p in params.values()]
    placements = [str(getattr(p, "placements", "plain")) for p in params.values()]
    return digest([whole(t) for t in (*params.values(), *state)]), placements


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2), (4, 2)])
@pytest.mark.supports(
    "FSDP2 over tensor parallelism, also with replicas (`parallelize_module`, `fully_shard`)"
)
def test_tensor_parallel_under_fsdp_gives_the_bits_of_one_process(
    pools: Worlds, shape: tuple[int, ...]
) -> None:
    right, _ = pools.run(1, parallel_step, None)[0]
    answers = pools.run(math.prod(shape), parallel_step, shape)
    assert all("StridedShard" in placements[0] for _, placements in answers)
    assert {found for found, _ in answers} == {right}
