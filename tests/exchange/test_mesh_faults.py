"""Meshes that overlap: what goes wrong on one reaches the ranks of the others, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardmuon
from tests.conftest import Worlds
from tests.grids import mesh_of, placed
from tests.problems import assert_ranks_agree, digest, local, world_mesh

SHAPES = {"everyone": (10, 8), "half": (4, 6, 5), "across": (9, 4)}


def _fault(kind: str, policy: Any) -> tuple[str, str, int, int]:
    """A gradient of one mesh is bad on rank 3: error, whether all changed, skipped, NS after it."""
    meshes = {
        "everyone": world_mesh(),
        "half": mesh_of((2, 2))["b"],
        "across": mesh_of((2, 2))["a"],
    }
    params = {
        name: nn.Parameter(placed(torch.ones(shape), "0", meshes[name]))
        for name, shape in SHAPES.items()
        if kind != "two meshes" or name != "across"
    }
    runtime = shardmuon.Runtime(deterministic=True, nonfinite=policy)
    optimizer = shardmuon.Muon(params.items(), lr=0.02, runtime=runtime)
    optimizer.prepare()
    before = digest([local(p) for p in params.values()])
    error = ""
    for step in range(2):
        for name, p in params.items():
            p.grad = placed(torch.ones(SHAPES[name]), "0", meshes[name])
        if step == 0 and dist.get_rank() == 3:
            if kind == "missing":
                params["half"].grad = None
            else:
                local(params["half"].grad)[..., 0] = float("nan")  # type: ignore[arg-type]
        try:
            optimizer.step()
            optimizer.check()  # where a GPU says what a step has found
        except RuntimeError as raised:
            error = str(raised)
        if step == 0:
            assert digest([local(p) for p in params.values()]) == before
    after = digest([local(p) for p in params.values()])
    assert after != before
    assert_ranks_agree([params["everyone"]])
    return error, after, optimizer.stats.steps_skipped, optimizer.stats.matrices_orthogonalized


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("two meshes", "skip"),
        ("two meshes", "error"),
        ("nan", "skip"),
        ("nan", "error"),
        ("missing", "error"),
    ],
)
def test_a_fault_on_one_mesh_stops_the_step_on_all_that_it_meets(
    pools: Worlds, kind: str, policy: str
) -> None:
    answers = pools.run(4, _fault, kind, policy, limit_s=20)
    for error, _, skipped, _ in answers:
        assert bool(error) == (policy == "error")
        assert skipped == (1 if policy == "skip" else 0)
    matrices = {"two meshes": 1 + 2 * 4}.get(kind, 1 + 2 * 4 + 2)
    assert sum(count for *_, count in answers) == matrices


def _refused_plan() -> None:
    """Rank 3 alone cannot plan a weight of its half."""
    half = mesh_of((2, 2))["b"]
    dense = nn.Parameter(placed(torch.ones(10, 8), "0", world_mesh()))
    expert = nn.Parameter(placed(torch.ones(4, 6, 5), "0", half))
    optimizer = shardmuon.Muon([("dense", dense), ("net.expert", expert)], lr=0.02)
    dense.grad, expert.grad = torch.ones_like(dense), torch.ones_like(expert)
    if dist.get_rank() == 3:
        expert.grad = None
        optimizer.param_groups[0]["params"][1] = nn.Parameter(
            placed(torch.ones(4, 6, 5), "1", half)
        )
        optimizer.param_groups[0]["params"][1].grad = placed(torch.ones(4, 6, 5), "0", half)
    optimizer.step()


def test_plans_that_differ_on_one_mesh_are_an_error_on_all_ranks(pools: Worlds) -> None:
    errors = pools.run_expecting_error(4, _refused_plan, limit_s=20)
    assert {e.type_name for e in errors} <= {"RuntimeError", "ValueError"}


def _orthogonal() -> tuple[dict[str, int], int]:
    """Weights on rows and on columns of a mesh of ranks, in uneven numbers: owners, NS here."""
    mesh = mesh_of((2, 2))
    params = {
        f"{axis}{i}": nn.Parameter(placed(torch.ones(8 + i, 6), "0", mesh[axis]))
        for axis, number in (("a", 3), ("b", 4))
        for i in range(number)
    }
    optimizer = shardmuon.Muon(params.items(), lr=0.02)
    optimizer.prepare()
    for name, p in params.items():
        p.grad = placed(torch.ones(tuple(p.shape)), "0", mesh[name[0]])
    optimizer.step()
    return dict(optimizer.plan.owners()), optimizer.stats.matrices_orthogonalized


def test_meshes_that_cross_are_planned_alike(pools: Worlds) -> None:
    answers = pools.run(4, _orthogonal)
    for axis, pairs in (("a", [(0, 2), (1, 3)]), ("b", [(0, 1), (2, 3)])):
        for pair in pairs:
            one, other = (
                {n: o for n, o in answers[rank][0].items() if n.startswith(axis)} for rank in pair
            )
            assert one == other
            assert set(one.values()) <= set(pair)
    assert sum(count for _, count in answers) == 2 * 3 + 2 * 4
