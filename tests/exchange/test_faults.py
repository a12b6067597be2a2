"""What goes wrong in a step: missing or non-finite gradients, unsupported layouts, other plans.

Whatever goes wrong, all ranks do the same: the same error, or the same result, and no rank hangs.
A refused step changes nothing, and the next good step is a normal one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.problems import (
    PLACEMENTS,
    Problem,
    assert_ranks_agree,
    build,
    digest,
    gradients,
    local,
    momenta,
    place,
    set_gradients,
    whole,
    world_mesh,
)

SHAPES = ((10, 8), (13, 7), (18, 48))  # no rank of 4 is empty
Missing = Mapping[int, tuple[int, ...]]
"""Rank -> positions of parameters without gradient."""


@dataclass(frozen=True)
class Report:
    """What a rank saw: the error's type and text, whether anything changed, hashes of the whole."""

    error: str
    message: str
    unchanged: list[bool]
    after: str
    next_step: str
    skipped: int


def problem_with(**settings: Any) -> Problem:
    runtime = shardmuon.Runtime(deterministic=True, **settings)
    return Problem(shapes=SHAPES, runtime=runtime, options={"lr": 0.02})


def vector_group() -> tuple[nn.Parameter, dict[str, Any]]:
    """A vector of 10 elements for AdamW."""
    vector = nn.Parameter(place(torch.linspace(-1, 1, 10), world_mesh(), Shard(0)))
    return vector, {"params": [("bias", vector)], "algorithm": "adamw", "lr": 0.1}


def everything(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Copies of a parameter and its state, per parameter: this rank's part."""
    return [
        [local(p).clone(), *(local(v).clone() for v in optimizer.state[p].values())] for p in params
    ]


def attempt(problem: Problem, prepare: Any, *, warm: bool = True) -> Report:
    """Step normally, step after `prepare(params)` spoilt the gradients, step normally again."""
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    vector, group = vector_group()
    optimizer.add_param_group(group)

    def give(step: int) -> None:
        set_gradients(params, problem, step, mesh)
        vector.grad = place(torch.linspace(1, 2, 10) + step, mesh, Shard(0))

    if warm:
        give(0)
        optimizer.step()
    give(1)
    prepare([*params, vector])
    before = everything([*params, vector], optimizer)
    error, message = "", ""
    try:
        optimizer.step()
        optimizer.check()
    except Exception as caught:  # the type is what is compared
        error, message = type(caught).__name__, str(caught)
    after = everything([*params, vector], optimizer)
    unchanged = [digest(b) == digest(a) for b, a in zip(before, after, strict=True)]
    hash_after = digest(assert_ranks_agree([*params, vector]))
    skipped = optimizer.stats.steps_skipped
    give(2)
    optimizer.step()
    hash_next = digest(assert_ranks_agree([*params, vector, *momenta(optimizer, params)]))
    return Report(error, message, unchanged, hash_after, hash_next, skipped)


def remove_gradients(missing: Missing) -> Any:
    def prepare(params: list[nn.Parameter]) -> None:
        for index in missing.get(dist.get_rank(), ()):
            params[index].grad = None

    return prepare


def _missing(problem: Problem, missing: Missing, warm: bool) -> Report:
    return attempt(problem, remove_gradients(missing), warm=warm)


def _zeroed(problem: Problem, missing: Missing, warm: bool) -> Report:
    """The same with zeros where `_missing` has no gradient."""

    def prepare(params: list[nn.Parameter]) -> None:
        for index in missing.get(dist.get_rank(), ()):
            gradient = params[index].grad
            assert gradient is not None
            local(gradient).zero_()

    return attempt(problem, prepare, warm=warm)


def _two_steps(problem: Problem) -> str:
    """Hash after the normal steps 0 and 2 only."""
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    vector, group = vector_group()
    optimizer.add_param_group(group)
    for step in (0, 2):
        set_gradients(params, problem, step, mesh)
        vector.grad = place(torch.linspace(1, 2, 10) + step, mesh, Shard(0))
        optimizer.step()
    return digest(assert_ranks_agree([*params, vector, *momenta(optimizer, params)]))


ALL = (0, 1, 2, 3)
SOME_RANKS: list[Missing] = [
    {2: (1,), 3: (1,)},
    {3: ALL},
    {0: (0,)},
    {1: (3,)},
    {0: (0,), 1: (1,), 2: (2,)},
]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("missing", SOME_RANKS)
def test_gradient_missing_on_some_ranks_is_the_same_error_on_all(
    pools: Worlds, missing: Missing, warm: bool
) -> None:
    reports = pools.run(4, _missing, problem_with(), missing, warm)
    assert {r.error for r in reports} == {"RuntimeError"}
    assert all("gradient" in r.message for r in reports)
    assert all(all(r.unchanged) for r in reports)
    if warm:
        right = pools.run(4, _two_steps, problem_with())
        assert [r.next_step for r in reports] == right


@pytest.mark.parametrize("missing", SOME_RANKS)
def test_missing_gradients_can_count_as_zeros(pools: Worlds, missing: Missing) -> None:
    problem = problem_with(missing_grad="zero")
    reports = pools.run(4, _missing, problem, missing, True)
    zeroed = pools.run(4, _zeroed, problem, missing, True)
    assert {r.error for r in reports} == {""}
    assert [r.next_step for r in reports] == [r.next_step for r in zeroed]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("without", [(1,), (0, 2), (3,), ALL])
def test_parameter_without_any_gradient_is_left_alone(
    pools: Worlds, world: int, without: tuple[int, ...]
) -> None:
    reports = pools.run(
        world, _missing, problem_with(), {rank: without for rank in range(world)}, True
    )
    for report in reports:
        assert report.error == ""
        assert [i for i in ALL if report.unchanged[i]] == list(without)


def test_everywhere_missing_gradients_count_as_zeros_if_asked(pools: Worlds) -> None:
    problem = problem_with(missing_grad="zero")
    missing = {0: (1,), 1: (1,)}
    reports = pools.run(2, _missing, problem, missing, True)
    zeroed = pools.run(2, _zeroed, problem, missing, True)
    assert [(r.error, r.next_step) for r in reports] == [("", r.next_step) for r in zeroed]


def _empty_shard(drop: bool) -> str:
    mesh = world_mesh()
    problem = Problem(shapes=((5, 7), (10, 8)), runtime=shardmuon.Runtime(deterministic=True))
    params, optimizer = build(problem, mesh)
    for step in range(3):
        set_gradients(params, problem, step, mesh)
        if drop and local(params[0]).numel() == 0:
            params[0].grad = None
        optimizer.step()
    if dist.get_rank() == 3:
        assert local(params[0]).numel() == 0
    return digest(assert_ranks_agree([*params, *momenta(optimizer, params)]))


def test_empty_shard_needs_no_gradient(pools: Worlds) -> None:
    assert pools.run(4, _empty_shard, True) == pools.run(4, _empty_shard, False)


def _poisoned(problem: Problem, rank: int, index: int, value: float) -> Report:
    def prepare(params: list[nn.Parameter]) -> None:
        gradient = params[index].grad
        assert gradient is not None
        if dist.get_rank() == rank:
            local(gradient).view(-1)[-1] = value

    return attempt(problem, prepare)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("mode", ["error", "skip"])
def test_nonfinite_gradient_of_one_rank_changes_nothing_anywhere(
    pools: Worlds, value: float, index: int, mode: Literal["error", "skip"]
) -> None:
    problem = problem_with(nonfinite=mode)
    reports = pools.run(4, _poisoned, problem, 3, index, value)
    errors = {r.error for r in reports}
    assert len(errors) == 1
    assert (errors == {""}) == (mode == "skip")
    if mode == "error":
        assert all("finite" in r.message for r in reports)
    assert all(all(r.unchanged) for r in reports)
    assert [r.skipped for r in reports] == [1 if mode == "skip" else 0] * 4
    assert [r.next_step for r in reports] == pools.run(4, _two_steps, problem)


def _allowed() -> list[bool]:
    mesh = world_mesh()
    problem = problem_with(nonfinite="allow")
    params, optimizer = build(problem, mesh)
    set_gradients(params, problem, 0, mesh)
    gradient = params[0].grad
    assert gradient is not None
    if dist.get_rank() == 1:
        local(gradient)[0, 0] = float("inf")
    optimizer.step()
    return [bool(whole(p).isfinite().all()) for p in params]


def test_nonfinite_gradient_can_be_allowed(pools: Worlds) -> None:
    assert pools.run(2, _allowed) == [[False, True, True]] * 2


def test_nonfinite_gradient_without_ranks() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    skipping = shardmuon.Muon([p], runtime=shardmuon.Runtime(nonfinite="skip"))
    raising = shardmuon.Muon([p])
    p.grad = torch.full((3, 4), float("nan"))
    skipping.step()
    with pytest.raises(Exception, match="finite"):
        raising.step()
    assert skipping.stats.steps_skipped == 1
    assert p.eq(1).all()
    assert not skipping.state[p]["momentum_buffer"].any()
    assert not raising.state[p]["momentum_buffer"].any()


def _plan_of(kind: str) -> None:
    device, size = ranks.device(), dist.get_world_size()
    if kind == "partial":
        mesh = world_mesh()
        weight = DTensor.from_local(torch.ones(6, 4, device=device), mesh, [Partial()])
    else:
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("a", "b"))
        block = torch.ones(3, 2, device=device)
        weight = DTensor.from_local(block, mesh, [Shard(0), Shard(1)])
    optimizer = shardmuon.Muon([("net.weight", nn.Parameter(weight))])
    print(optimizer.plan.report())


@pytest.mark.parametrize(("kind", "world"), [("partial", 2), ("two axes", 4)])
def test_unsupported_placement_is_refused_by_name(pools: Worlds, kind: str, world: int) -> None:
    errors = pools.run_expecting_error(world, _plan_of, kind)
    assert {e.type_name for e in errors} == {"ValueError"}
    for error in errors:
        assert "net.weight" in error.message
        assert "Partial" in error.message or "Shard" in error.message


def _foreign_gradient(kind: str) -> float:
    """Step once from a gradient that is placed unlike its parameter; distance to the right one."""
    mesh = world_mesh()
    problem = Problem(shapes=((10, 8),), steps=1)
    params, optimizer = build(problem, mesh)
    right, other = build(problem, mesh)
    set_gradients(right, problem, 0, mesh)
    other.step()
    (gradient,) = gradients(problem, 0, mesh)
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if kind == "partial":
        part = full / dist.get_world_size()
        params[0].grad = DTensor.from_local(part, mesh, [Partial()])
    else:
        params[0].grad = DTensor.from_local(full, mesh, [Replicate()])
    optimizer.step()
    return float((whole(params[0]) - whole(right[0])).norm())


@pytest.mark.parametrize("kind", ["partial", "replicate"])
def test_gradient_with_another_placement_is_reduced_or_refused(pools: Worlds, kind: str) -> None:
    try:
        distances = pools.run(2, _foreign_gradient, kind)
    except ranks.RankFailure as failure:
        assert {e.type_name for e in failure.errors} <= {"ValueError", "RuntimeError"}
        assert [e.rank for e in failure.errors] == [0, 1]
        assert all("layer0.weight" in e.message for e in failure.errors)
    else:
        assert max(distances) < 1e-5


def _plans_that_differ(kind: str) -> None:
    mesh, first = world_mesh(), dist.get_rank() == 0
    p = nn.Parameter(place(torch.ones(10, 8), mesh, PLACEMENTS["rows"]))
    q = nn.Parameter(place(torch.ones(6, 6), mesh, PLACEMENTS["rows"]))
    named = [("a.weight", p), ("b.weight", q)]
    settings: dict[str, Any] = {}
    if kind == "names" and first:
        named = [("c.weight", p), ("b.weight", q)]
    if kind == "count" and first:
        named = named[:1]
    if kind == "settings" and first:
        settings["ns_steps"] = 4
    if kind == "runtime" and first:
        settings["runtime"] = shardmuon.Runtime(bucket_bytes=1)
    optimizer = shardmuon.Muon(named, **settings)
    for parameter in (p, q):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", ["names", "count", "settings", "runtime"])
def test_plans_that_differ_are_an_error_on_all_ranks(pools: Worlds, kind: str) -> None:
    errors = pools.run_expecting_error(2, _plans_that_differ, kind, limit_s=30)
    assert len({e.type_name for e in errors}) == 1
    assert {e.type_name for e in errors} <= {"RuntimeError", "ValueError"}
    if kind == "names":
        assert all("c.weight" in e.message or "a.weight" in e.message for e in errors)
