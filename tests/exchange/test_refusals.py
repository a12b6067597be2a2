"""Layouts and plans that cannot work: refused by name, on all ranks, before any data moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.problems import (
    PLACEMENTS,
    Problem,
    build,
    digest,
    local,
    place,
    set_gradients,
    world_mesh,
)

FOREIGN: dict[str, Placement] = {"partial": Partial(), "columns": Shard(1)}
"""Placements of gradients that do not fit a parameter with sharded rows."""


def _plan_of(kind: str) -> None:
    device, size = ranks.device(), dist.get_world_size()
    if kind == "partial":
        mesh = world_mesh()
        weight = DTensor.from_local(torch.ones(6, 4, device=device), mesh, [Partial()])
    else:
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("a", "b"))
        block = torch.ones(3, 2, device=device)
        foreign = _StridedShard(0, split_factor=3)  # no axis has three ranks
        weight = DTensor.from_local(block, mesh, [foreign, Shard(0)], run_check=False)
    optimizer = shardmuon.Muon([("net.weight", nn.Parameter(weight))])
    print(optimizer.plan.report())


@pytest.mark.parametrize(("kind", "world"), [("partial", 2), ("split factor", 4)])
def test_unsupported_placement_is_refused_by_name(pools: Worlds, kind: str, world: int) -> None:
    errors = pools.run_expecting_error(world, _plan_of, kind)
    assert {e.type_name for e in errors} == {"ValueError"}
    for error in errors:
        assert "net.weight" in error.message
        assert "Partial" in error.message or "Shard" in error.message


def _foreign(kind: str, mesh: DeviceMesh) -> DTensor:
    """A gradient [10, 8] of two ranks that is placed so."""
    block = torch.ones(10, 4 if kind == "columns" else 8, device=ranks.device())
    return DTensor.from_local(block, mesh, [FOREIGN[kind]], run_check=False)


def _foreign_gradient(kind: str) -> None:
    """Step with gradients that are placed unlike their parameter, on all ranks."""
    mesh = world_mesh()
    params, optimizer = build(Problem(shapes=((10, 8),)), mesh)
    params[0].grad = _foreign(kind, mesh)
    optimizer.step()


@pytest.mark.parametrize("kind", FOREIGN)
def test_gradient_with_another_placement_is_refused_by_name(pools: Worlds, kind: str) -> None:
    errors = pools.run_expecting_error(2, _foreign_gradient, kind)
    assert {e.type_name for e in errors} <= {"ValueError", "RuntimeError"}
    assert all("layer0.weight" in e.message for e in errors)


def _whole_gradient() -> tuple[str, str]:
    """Steps with gradients cut as the parameter is, and with ones that every rank holds whole."""
    mesh = world_mesh()
    problem = Problem(shapes=((11, 8),))
    digests = []
    for kind in (Shard(0), Replicate()):
        params, optimizer = build(problem, mesh)
        for step in range(2):
            set_gradients(params, problem, step, mesh)
            whole = params[0].grad.full_tensor()  # type: ignore[union-attr]
            params[0].grad = distribute_tensor(whole, mesh, [kind])
            optimizer.step()
        digests.append(digest([local(params[0]), *map(local, optimizer.state[params[0]].values())]))
    return digests[0], digests[1]


def test_a_gradient_that_every_rank_holds_is_cut_as_its_parameter(pools: Worlds) -> None:
    for one, other in pools.run(4, _whole_gradient):
        assert one == other


def _bad_gradient_of_one_rank(kind: str) -> bool:
    """Rank 0 alone has a gradient that cannot be used: does anything change?"""
    mesh = world_mesh()
    problem = Problem(shapes=((10, 8),))
    params, optimizer = build(problem, mesh)
    set_gradients(params, problem, 0, mesh)
    optimizer.step()
    if dist.get_rank() == 0:
        params[0].grad = _foreign(kind, mesh)
    before = digest([local(params[0])])
    try:
        optimizer.step()
        optimizer.check()  # where a GPU says what a step has found
    finally:
        assert digest([local(params[0])]) == before
    return True


@pytest.mark.parametrize("kind", FOREIGN)
def test_unusable_gradient_of_one_rank_is_an_error_on_all(pools: Worlds, kind: str) -> None:
    errors = pools.run_expecting_error(2, _bad_gradient_of_one_rank, kind, limit_s=30)
    assert {e.type_name for e in errors} <= {"RuntimeError", "ValueError"}
    assert any("layer0.weight" in e.message for e in errors)


def _layout_unknown_to_one_rank() -> None:
    """Planning refuses a placement of rank 0 alone, which must not leave others waiting."""
    mesh = world_mesh()
    p = nn.Parameter(place(torch.ones(10, 8), mesh, PLACEMENTS["rows"]))
    if dist.get_rank() == 0:
        block = torch.ones(10, 8, device=ranks.device())
        p = nn.Parameter(DTensor.from_local(block, mesh, [Partial()], run_check=False))
    optimizer = shardmuon.Muon([("layer0.weight", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_layout_refused_by_one_rank_is_an_error_on_all(pools: Worlds) -> None:
    errors = pools.run_expecting_error(2, _layout_unknown_to_one_rank, limit_s=30)
    assert any("layer0.weight" in e.message for e in errors)


def _plans_that_differ(kind: str, call: str) -> None:
    mesh, first = world_mesh(), dist.get_rank() == 0
    p = nn.Parameter(place(torch.ones(10, 8), mesh, PLACEMENTS["rows"]))
    q = nn.Parameter(place(torch.ones(6, 6), mesh, PLACEMENTS["rows"]))
    named = [("a.weight", p), ("b.weight", q)]
    # Where the method is open, ranks compare their plans before anything else.
    settings: dict[str, Any] = {"ns_method": "standard"}
    if kind == "names" and first:
        named = [("c.weight", p), ("b.weight", q)]
    if kind == "count" and first:
        named = named[:1]
    if kind == "settings" and first:
        settings["ns_steps"] = 4
    if kind == "runtime" and first:
        settings["runtime"] = shardmuon.Runtime(nonfinite="skip")
    if kind == "exchange" and first:
        settings["runtime"] = shardmuon.Runtime(exchange="all_gather")
    optimizer = shardmuon.Muon(named, **settings)
    for parameter in (p, q):
        parameter.grad = torch.ones_like(parameter)
    getattr(optimizer, call)()


@pytest.mark.parametrize("call", ["step", "prepare"])
@pytest.mark.parametrize("kind", ["names", "count", "settings", "runtime", "exchange"])
def test_plans_that_differ_are_an_error_on_all_ranks(pools: Worlds, kind: str, call: str) -> None:
    errors = pools.run_expecting_error(2, _plans_that_differ, kind, call, limit_s=30)
    assert len({e.type_name for e in errors}) == 1
    assert {e.type_name for e in errors} <= {"RuntimeError", "ValueError"}
    if ranks.backend() == "nccl" and call == "step":  # others may be in the exchange already
        assert all("optimizer.prepare()" in e.message for e in errors)
    elif kind == "names":
        assert all("c.weight" in e.message or "a.weight" in e.message for e in errors)
