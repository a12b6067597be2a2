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
from torch.distributed.tensor import Shard

import shardmuon
from tests.conftest import Worlds
from tests.problems import (
    Problem,
    assert_ranks_agree,
    build,
    digest,
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


@pytest.fixture(scope="module")
def normal_steps(pools: Worlds) -> list[str]:
    """What four ranks hold after the steps 0 and 2; no setting for faults changes good steps."""
    return pools.run(4, _two_steps, problem_with())


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
    pools: Worlds, normal_steps: list[str], missing: Missing, warm: bool
) -> None:
    reports = pools.run(4, _missing, problem_with(), missing, warm)
    assert {r.error for r in reports} == {"RuntimeError"}
    assert all("gradient" in r.message for r in reports)
    assert all(all(r.unchanged) for r in reports)
    if warm:
        assert [r.next_step for r in reports] == normal_steps


@pytest.mark.parametrize("missing", SOME_RANKS)
def test_missing_gradients_can_count_as_zeros(pools: Worlds, missing: Missing) -> None:
    problem = problem_with(missing_grad="zero")
    reports = pools.run(4, _missing, problem, missing, True)
    zeroed = pools.run(4, _zeroed, problem, missing, True)
    assert {r.error for r in reports} == {""}
    assert [r.next_step for r in reports] == [r.next_step for r in zeroed]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("without", [(1,), (0, 2), (3,), ALL])
@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
def test_parameter_without_any_gradient_is_left_alone(
    pools: Worlds, world: int, without: tuple[int, ...], bucket_bytes: int
) -> None:
    problem = problem_with(bucket_bytes=bucket_bytes)
    reports = pools.run(world, _missing, problem, dict.fromkeys(range(world), without), True)
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
    pools: Worlds,
    normal_steps: list[str],
    value: float,
    index: int,
    mode: Literal["error", "skip"],
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
    assert [r.next_step for r in reports] == normal_steps


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
