"""Replicated weights: HSDP, plain tensors over a mesh or process group, DistributedDataParallel.

Every matrix is orthogonalized once over all ranks, and its replicas take the bits of that one run.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardmuon
from shardmuon.orthogonalize import replay
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from tests import models, ranks
from tests.conftest import Worlds
from tests.grids import PLAIN, mesh_of, placed, random
from tests.problems import assert_ranks_agree, digest, local, momenta, whole, world_mesh

MATRICES = ((10, 8), (5, 7), (64, 24), (18, 48), (1, 64), (33, 17))
RUNTIME = shardmuon.Runtime(deterministic=True)


@contextmanager
def counted(noise: float = 0.0) -> Iterator[list[int]]:
    """Counts the matrices that this rank orthogonalizes, and adds noise to each result."""
    calls = [0]

    # In the place of what may replay a graph, which calls no function.
    def disturbed(matrix: Tensor, schedule: Any, eps: float | None, method: str) -> Tensor:
        calls[0] += 1 if matrix.ndim == 2 else len(matrix)
        update = newton_schulz(matrix, schedule, eps, matrix.dtype, method)
        return update + noise * torch.randn_like(update)

    with mock.patch.object(replay, "orthogonalize", disturbed):
        yield calls


def _noisy_replica(
    mesh_shape: tuple[int, ...], letters: str, exchange: Any
) -> tuple[list[int], list[list[str]], int]:
    """NS calls of each of three steps, hashes of this rank's shards after each, owners in use."""
    mesh = mesh_of(mesh_shape)
    params = [
        nn.Parameter(placed(random(shape, i), letters, mesh)) for i, shape in enumerate(MATRICES)
    ]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    runtime = shardmuon.Runtime(exchange=exchange, bucket_bytes=4000)
    optimizer = shardmuon.Muon(named, lr=0.02, mesh=mesh, runtime=runtime)
    counts, hashes = [], []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    with counted(noise=1e-2 if coordinate[0] == 1 else 0.0) as calls:
        # What one rank added in the first step, the others would miss in all later ones.
        for step in range(3):
            for i, (shape, p) in enumerate(zip(MATRICES, params, strict=True)):
                p.grad = placed(random(shape, 100 * step + i), letters, mesh)
            calls[0] = 0
            optimizer.step()
            counts.append(calls[0])
            hashes.append([digest([local(t) for t in (*params, *momenta(optimizer, params))])])
    return counts, hashes, len(set(optimizer.plan.owners().values()))


REPLICATED = [
    ((2, 2), "R0"),
    ((2, 2), "R1"),
    ((2, 2), "RR"),
    ((2,), "R"),
    ((4,), "R"),
    ((2, 2, 2), "R01"),
    ((2, 2, 2), "RR0"),
    ((2,), PLAIN),
    ((4,), PLAIN),
    ((2, 2), PLAIN),
]


@pytest.mark.parametrize(("mesh", "letters"), REPLICATED)
@pytest.mark.parametrize("exchange", ["auto", "all_gather"])
def test_replicas_stay_equal_when_one_computes_otherwise(
    pools: Worlds, mesh: tuple[int, ...], letters: str, exchange: str
) -> None:
    world = math.prod(mesh)
    answers = pools.run(world, _noisy_replica, mesh, letters, exchange)
    totals = [sum(step) for step in zip(*(counts for counts, _, _ in answers), strict=True)]
    assert totals == [len(MATRICES)] * 3
    assert {owners for _, _, owners in answers} == {min(world, len(MATRICES))}
    # Ranks that hold the same shards: those that differ along replicated axes only.
    copies = 1
    for size, letter in zip(mesh, "R" * len(mesh) if letters == PLAIN else letters, strict=True):
        copies *= size if letter == "R" else 1
    shards = world // copies
    for rank, (_, hashes, _) in enumerate(answers):
        assert hashes == answers[rank % shards][1]


def _hsdp_model() -> tuple[str, list[int], dict[str, int], list[str]]:
    """A real model: hash of whole tensors after three steps, counts, owners, what stood still."""
    mesh = mesh_of((2, dist.get_world_size() // 2)) if dist.get_world_size() > 1 else mesh_of((1,))
    model = models.make().to(ranks.device())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = models.optimizer_of(model)
    start = {name: whole(p) for name, p in model.named_parameters()}
    counts = []
    for step in range(3):
        models.spread_gradients(model, step)
        optimizer.step()
        counts.append(optimizer.stats.matrices_orthogonalized)
    still = [name for name, p in model.named_parameters() if whole(p).equal(start[name])]
    hashed = digest(assert_ranks_agree(list(model.parameters())))
    return hashed, counts, dict(optimizer.plan.owners()), still


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.supports("HSDP models (`fully_shard` on two axes)")
def test_hsdp_model_gives_the_bits_of_one_rank(pools: Worlds, world: int) -> None:
    ((one, *_),) = pools.run(1, _hsdp_model)
    answers = pools.run(world, _hsdp_model)
    assert {hashed for hashed, *_ in answers} == {one}
    totals = [sum(step) for step in zip(*(counts for _, counts, _, _ in answers), strict=True)]
    assert totals == [len(models.MATRICES)] * 3
    for _, _, owners, still in answers:
        assert owners == answers[0][2]
        assert sorted(owners) == sorted(models.MATRICES)
        assert set(owners.values()) <= set(range(world))
        assert still == []


# -- plain tensors --------------------------------------------------------------------------------


def _as_mesh(kind: str) -> DeviceMesh | dist.ProcessGroup | None:
    """What to pass as `mesh`: all mean all ranks."""
    if kind == "mesh":
        return world_mesh()
    if kind == "mesh of two axes":
        return mesh_of((2, dist.get_world_size() // 2))
    if kind == "default group":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if kind == "new group":
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup)
        return group
    return None


def _plain(kind: str, per_group: bool) -> tuple[str, int, bool]:
    """Plain tensors and a stack: hash after three steps, count, bytes as planned."""
    shapes = (*MATRICES, (3, 6, 4))
    params = [nn.Parameter(random(shape, i).to(ranks.device())) for i, shape in enumerate(shapes)]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    mesh = _as_mesh(kind)
    groups: list[dict[str, Any]] = [{"params": named[:3]}, {"params": named[3:]}]
    if per_group:
        for group in groups:
            group["mesh"] = mesh
        mesh = None
    optimizer = shardmuon.Muon(groups, lr=0.02, mesh=mesh, runtime=RUNTIME)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = random(shapes[i], 100 * step + i).to(p.device)
        optimizer.step()
    stats, plan, rank = optimizer.stats, optimizer.plan, ranks_rank()
    as_planned = stats.bytes_sent == plan.bytes_sent().get(rank, 0)
    as_planned &= stats.bytes_received == plan.bytes_received().get(rank, 0)
    hashed = digest(assert_ranks_agree([*params, *momenta(optimizer, params)]))
    return hashed, stats.matrices_orthogonalized, as_planned


def ranks_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("kind", ["mesh", "mesh of two axes", "default group", "new group"])
def test_plain_tensors_share_the_work_of_a_mesh_or_group(
    pools: Worlds, kind: str, per_group: bool
) -> None:
    ((one, *_),) = pools.run(1, _plain, "nothing", False)
    answers = pools.run(4, _plain, kind, per_group)
    assert {hashed for hashed, _, _ in answers} == {one}
    assert sum(count for _, count, _ in answers) == len(MATRICES) + 3
    assert all(as_planned for _, _, as_planned in answers)


def _default_and_own_mesh() -> tuple[list[str], dict[str, int], int]:
    """One group with the constructor's mesh (all), one with a mesh of its own (two ranks)."""
    pair = mesh_of((2, 2))["b"]
    params = [nn.Parameter(random(shape, i).to(ranks.device())) for i, shape in enumerate(MATRICES)]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    groups: list[dict[str, Any]] = [
        {"params": named[:3]},
        {"params": named[3:], "mesh": pair, "weight_decay": 0.0},
    ]
    optimizer = shardmuon.Muon(groups, lr=0.02, mesh=world_mesh(), runtime=RUNTIME)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = random(MATRICES[i], 100 * step + i).to(p.device)
        optimizer.step()
    owners, members = dict(optimizer.plan.owners()), pair.mesh.tolist()
    assert all(owners[f"w{i}"] in members for i in (3, 4, 5))
    hashed = [digest([p]) for p in params]
    return hashed, owners, optimizer.stats.matrices_orthogonalized


@pytest.mark.supports("`mesh=` in a group")
def test_a_mesh_in_a_group_overrides_the_default(pools: Worlds) -> None:
    answers = pools.run(4, _default_and_own_mesh)
    assert all(hashed == answers[0][0] for hashed, _, _ in answers)
    assert len({owners[f"w{i}"] for _, owners, _ in answers for i in range(3)}) > 1
    assert sum(count for *_, count in answers) == 3 + 2 * 3


def _saved_with_a_mesh(kind: str) -> bool:
    """A state dict of groups with a mesh: safe to load, and the running mesh stays."""
    p = nn.Parameter(random((6, 4), 0).to(ranks.device()))
    groups: list[dict[str, Any]] = [{"params": [("w", p)], "mesh": _as_mesh(kind)}]
    optimizer = shardmuon.Muon(groups, lr=0.02, runtime=RUNTIME)
    p.grad = random((6, 4), 1).to(p.device)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = shardmuon.Muon(groups, lr=0.02, runtime=RUNTIME)
    again.load_state_dict(saved)
    p.grad = random((6, 4), 2).to(p.device)
    again.step()
    shared = again.stats.bytes_sent + again.stats.bytes_received > 0
    assert_ranks_agree([p, *momenta(again, [p])])
    return shared


@pytest.mark.parametrize("kind", ["mesh", "default group"])
def test_state_dicts_hold_no_mesh(pools: Worlds, kind: str) -> None:
    assert all(pools.run(2, _saved_with_a_mesh, kind))


@pytest.mark.parametrize("mesh", ["world", 4, ("a", "b"), object()])
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    p = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match="mesh"):
        shardmuon.Muon([p], mesh=mesh)
    with pytest.raises(ValueError, match="mesh"):
        shardmuon.Muon([{"params": [p], "mesh": mesh}])


# -- DistributedDataParallel ----------------------------------------------------------------------


def _ddp(share: bool) -> tuple[str, str, int, list[str]]:
    """Three steps of DDP; hash of parameters, that of one process, count, names in the plan."""
    model = models.make().to(ranks.device())
    twin = models.make().to(ranks.device())
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    mesh = ddp.process_group if share else None
    groups = shardmuon.param_groups(ddp, muon={"lr": 0.02}, adamw={"lr": 0.01})
    optimizer = shardmuon.Muon(groups, mesh=mesh, runtime=RUNTIME)
    alone = models.optimizer_of(twin)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* are plain tensors", UserWarning)
        for step in range(3):
            models.backward(ddp, step)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.clone()
            optimizer.step()
            alone.step()
    hashed = digest(assert_ranks_agree(list(model.parameters())))
    count = optimizer.stats.matrices_orthogonalized
    return hashed, digest(list(twin.parameters())), count, sorted(optimizer.plan.owners())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.supports("DDP models (`mesh=` takes DDP's process group)")
def test_ddp_shares_the_work_of_its_group(pools: Worlds, world: int, share: bool) -> None:
    used = len(models.MATRICES) - 1  # forward leaves one without a gradient
    answers = pools.run(world, _ddp, share)
    for hashed, alone, _, names in answers:
        assert hashed == alone
        assert names == sorted(models.MATRICES)
    counts = [count for _, _, count, _ in answers]
    assert sum(counts) in ((used, used + 1) if share else (used * world, (used + 1) * world))


def _grows_without(share: bool) -> float:
    model = models.make().to(ranks.device())
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    groups = shardmuon.param_groups(ddp, muon={"lr": 0.02}, adamw={"lr": 0.01})
    optimizer = shardmuon.Muon(groups, mesh=ddp.process_group if share else None)
    losses = []
    for _ in range(20):
        losses.append(models.backward(ddp, 0))
        optimizer.step()
    return losses[-1] / losses[0]


def test_ddp_training_lowers_the_loss(pools: Worlds) -> None:
    assert all(ratio < 0.5 for ratio in pools.run(2, _grows_without, True))
