"""Meshes other than one over all ranks: none, plain replicas, parts of the world, several at once.

Matrices are orthogonalized once per mesh that holds them, whoever built the parameters and how.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.problems import (
    PLACEMENTS,
    SHAPES,
    Problem,
    assert_ranks_agree,
    build,
    digest,
    gradients,
    momenta,
    place,
    set_gradients,
    solve,
    solve_alone,
    whole,
    world_mesh,
)

RUNTIME = shardmuon.Runtime(deterministic=True)


def plain(tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(ranks.device()) for t in tensors]


def _replicated_plain_tensors(share: bool) -> tuple[str, int, int]:
    """Every rank holds all tensors, as under DDP; `share` passes the mesh."""
    problem = Problem(steps=3)
    weights = plain([p.detach() for p in build(problem)[0]])
    params = [nn.Parameter(w) for w in weights]
    named = list(zip(problem.names(), params, strict=True))
    mesh = world_mesh() if share else None
    optimizer = shardmuon.Muon(named, lr=0.02, mesh=mesh, runtime=RUNTIME)
    with warnings.catch_warnings():
        if not share:
            warnings.filterwarnings("ignore", "5 matrices .* are plain tensors", UserWarning)
        for step in range(3):
            for p, g in zip(params, gradients(problem, step), strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
    hashed = digest(assert_ranks_agree([*params, *momenta(optimizer, params)]))
    return hashed, optimizer.stats.matrices_orthogonalized, optimizer.stats.bytes_sent


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.supports("plain tensors replicated on several ranks, with `mesh=` and without")
def test_plain_replicas_give_the_bits_of_one_process(
    pools: Worlds, world: int, share: bool
) -> None:
    one = pools.run(1, solve, Problem(steps=3))[0]
    answers = pools.run(world, _replicated_plain_tensors, share)
    assert {hashed for hashed, _, _ in answers} == {digest(one.params + one.momenta)}
    counts = [count for _, count, _ in answers]
    if share:
        assert sum(counts) == len(SHAPES)
    else:
        assert counts == [len(SHAPES)] * world
        assert all(sent == 0 for _, _, sent in answers)


@pytest.mark.supports("plain tensors in one process without a process group")
def test_one_process_without_a_group_gives_the_same_bits(pools: Worlds) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("this process computes on the CPU")
    alone, one = solve_alone(Problem()), pools.run(1, solve, Problem())[0]
    assert digest(alone.params + alone.momenta) == digest(one.params + one.momenta)
    assert alone.orthogonalized == [len(SHAPES)] * 3


def _unshared_work_is_reported() -> None:
    optimizer = shardmuon.Muon([("w", nn.Parameter(torch.ones(3, 4)))])
    print(optimizer.plan.report())


def test_plain_tensors_on_several_ranks_warn(pools: Worlds) -> None:
    errors = pools.run_expecting_error(2, _unshared_work_is_reported)
    assert {e.type_name for e in errors} == {"UserWarning"}
    assert all("mesh" in e.message for e in errors)


def _plain_and_sharded() -> str:
    """A plain matrix beside two DTensors in one group, and the same in an AdamW group."""
    mesh = world_mesh()
    problem = Problem(shapes=((10, 8), (5, 7), (18, 48)))
    params = [nn.Parameter(p.detach()) for p in build(problem, mesh)[0]]
    params[1] = nn.Parameter(whole(params[1]).to(ranks.device()))
    vectors = [
        nn.Parameter(torch.ones(6, device=ranks.device())),
        nn.Parameter(place(torch.ones(6), mesh, PLACEMENTS["rows"])),
    ]
    groups: list[dict[str, Any]] = [
        {"params": list(zip(problem.names(), params, strict=True))},
        {"params": list(zip("ab", vectors, strict=True)), "algorithm": "adamw"},
    ]
    optimizer = shardmuon.Muon(groups, lr=0.02, mesh=mesh, runtime=RUNTIME)
    for step in range(3):
        set_gradients(params, problem, step, mesh)
        params[1].grad = gradients(problem, step)[1].to(ranks.device())
        for vector in vectors:
            vector.grad = torch.ones_like(vector) * step
        optimizer.step()
    return digest(assert_ranks_agree([*params, *vectors, *momenta(optimizer, params)]))


@pytest.mark.supports("plain tensors and DTensors in one group")
def test_plain_and_sharded_parameters_in_one_group(pools: Worlds) -> None:
    (one,) = pools.run(1, _plain_and_sharded)
    assert set(pools.run(3, _plain_and_sharded)) == {one}


def _parts_of_the_world() -> tuple[list[Tensor], dict[str, int], list[int], int]:
    """Matrices on this rank's half of four ranks; others on all four."""
    mesh = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("half", "inner"))
    inner, everyone = mesh["inner"], world_mesh()
    half = Problem(shapes=((10, 8), (5, 7), (64, 24), (3, 3)), placements=("rows", "columns"))
    full = Problem(shapes=((18, 48), (1, 64), (7, 9)))
    meshes = (inner, everyone)
    params = [build(problem, m)[0] for problem, m in zip((half, full), meshes, strict=True)]
    named = [
        (f"{label}{i}", p)
        for label, some in zip(("half", "full"), params, strict=True)
        for i, p in enumerate(some)
    ]
    optimizer = shardmuon.Muon(named, lr=0.02, runtime=RUNTIME)
    for step in range(3):
        set_gradients(params[0], half, step, inner)
        set_gradients(params[1], full, step, everyone)
        optimizer.step()
    values = [whole(p) for some in params for p in some]
    members = [int(r) for r in inner.mesh.flatten().tolist()]
    counted = optimizer.stats.matrices_orthogonalized
    return values, dict(optimizer.plan.owners()), members, counted


@pytest.mark.supports("meshes over a part of the ranks (owners and updates)")
def test_each_matrix_has_one_owner_in_its_own_mesh(pools: Worlds) -> None:
    answers = pools.run(4, _parts_of_the_world)
    right = pools.run(
        1, solve, Problem(shapes=((10, 8), (5, 7), (64, 24), (3, 3), (18, 48), (1, 64), (7, 9)))
    )[0]
    for values, owners, members, _ in answers:
        assert digest(values) == digest(right.params)
        assert len(owners) == 7
        for name, owner in owners.items():
            assert owner in (members if name.startswith("half") else range(4))
    full_owners = [{n: o for n, o in a[1].items() if n.startswith("full")} for a in answers]
    assert all(owners == full_owners[0] for owners in full_owners)
    # Both halves run their own four matrices; the three of the world run once.
    assert sum(counted for *_, counted in answers) == 2 * 4 + 3


def _rebuilt_meshes() -> bool:
    """Meshes and optimizers made and dropped in turn: none may get another one's groups."""
    right: dict[str, str] = {}
    for turn in range(6):
        layout = ("rows", "columns", "replicate")[turn % 3]
        mesh = world_mesh()
        if turn % 2:
            mesh = init_device_mesh(
                ranks.device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b")
            )["a"]
        problem = Problem(shapes=((10, 8), (5, 7)), placements=(layout,))
        params, optimizer = build(problem, mesh)
        set_gradients(params, problem, 0, mesh)
        optimizer.step()
        hashed = digest(assert_ranks_agree(params))
        if right.setdefault("all", hashed) != hashed:
            return False
        del params, optimizer, mesh
        gc.collect()
    return True


@pytest.mark.supports("meshes that are deleted and made again")
def test_rebuilt_meshes_do_not_meet_old_groups(pools: Worlds) -> None:
    assert all(pools.run(4, _rebuilt_meshes))


def _many_steps_with_churn() -> bool:
    """Allocations of the buffers' sizes between and after steps; ranks compare every step."""
    shapes = [(10, 8), (33, 17), (64, 24), (5, 7)] * 2
    problem = Problem(shapes=shapes, seed=1, runtime=shardmuon.Runtime(bucket_bytes=4000))
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    for step in range(50):
        set_gradients(params, problem, step, mesh)
        optimizer.step()
        churn = [
            torch.full((rows * cols,), float("nan"), device=ranks.device()) for rows, cols in shapes
        ]
        assert_ranks_agree(params)
        del churn
        gc.collect()
    return all(bool(p.isfinite().all()) for p in map(whole, params))


def test_buffers_outlive_their_collectives(pools: Worlds) -> None:
    assert all(pools.run(4, _many_steps_with_churn))
