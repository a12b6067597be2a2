"""The optimizer's plan: names, balance, digest, independence of order, bucket bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from tests import models
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, Problem, build, place, solve, world_mesh

SHAPES = ((64, 24), (64, 24), (10, 8), (18, 48), (5, 7), (64, 24), (33, 65), (1, 64), (64, 1))


def matrix(rows: int = 3, cols: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, cols))


def test_names_are_fqns_or_group_and_position() -> None:
    named = shardmuon.Muon([("layer.weight", matrix()), ("module.other.weight", matrix())])
    assert set(named.plan.owners()) == {"layer.weight", "other.weight"}
    compiled = shardmuon.Muon([("_orig_mod.a._checkpoint_wrapped_module.weight", matrix())])
    assert set(compiled.plan.owners()) == {"a.weight"}
    groups: list[dict[str, Any]] = [
        {"params": [matrix(), matrix()]},
        {"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"},
        {"params": [matrix()]},
    ]
    assert set(shardmuon.Muon(groups).plan.owners()) == {"0.0", "0.1", "2.0"}


def test_plan_of_one_process() -> None:
    optimizer = models.optimizer_of(models.make())
    plan = optimizer.plan
    assert dict(plan.owners()) == dict.fromkeys(models.MATRICES, 0)
    assert plan.imbalance == 1.0
    assert set(plan.loads()) == {0}
    assert plan.loads()[0] > 0
    assert plan.bytes_sent() == plan.bytes_received() == {0: 0}
    report = plan.report()
    assert all(name in report for name in models.MATRICES)


def test_plan_is_kept_until_its_inputs_change() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([("a", p)])
    plan = optimizer.plan
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.plan is plan
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.plan is plan
    optimizer.param_groups[0]["ns_steps"] = 3
    assert optimizer.plan.digest != plan.digest
    optimizer.add_param_group({"params": [("b", matrix())]})
    assert set(optimizer.plan.owners()) == {"a", "b"}


def test_live_ns_steps_take_effect() -> None:
    results = []
    for late in (True, False):
        p = nn.Parameter(torch.eye(3, 4))
        optimizer = shardmuon.Muon([p], ns_steps=5 if late else 2)
        if late:
            optimizer.prepare()
            optimizer.param_groups[0]["ns_steps"] = 2
        p.grad = torch.arange(12.0).view(3, 4)
        optimizer.step()
        results.append(p.detach().clone())
    assert results[0].equal(results[1])


def _facts(order: list[int], split: int) -> tuple[dict[str, int], str, float, dict[int, int]]:
    mesh = world_mesh()
    params = [nn.Parameter(place(torch.ones(s), mesh, PLACEMENTS["rows"])) for s in SHAPES]
    named = [(f"layer{i}.weight", params[i]) for i in order]
    groups = [{"params": part} for part in (named[:split], named[split:]) if part]
    plan = shardmuon.Muon(groups).plan
    return dict(plan.owners()), plan.digest, plan.imbalance, plan.loads()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_plan_does_not_depend_on_the_order_of_named_parameters(pools: Worlds, world: int) -> None:
    order = list(range(len(SHAPES)))
    shuffled = [4, 0, 8, 2, 6, 1, 5, 3, 7]
    answers = pools.run(world, _facts, order, len(order))
    assert all(answer == answers[0] for answer in answers)
    for other in (shuffled, order[::-1]):
        assert pools.run(world, _facts, other, len(order)) == answers
    owners, _, imbalance, loads = answers[0]
    assert len(owners) == len(SHAPES)
    assert set(owners.values()) <= set(range(world))
    assert imbalance == pytest.approx(max(loads.values()) * world / sum(loads.values()))
    assert imbalance >= 1.0


def test_digest_tells_plans_apart(pools: Worlds) -> None:
    order = list(range(len(SHAPES)))
    whole, fewer = (pools.run(2, _facts, o, 99)[0][1] for o in (order, order[:-1]))
    other_world = pools.run(3, _facts, order, 99)[0][1]
    assert len({whole, fewer, other_world}) == 3


def test_big_matrices_are_spread(pools: Worlds) -> None:
    owners, _, imbalance, _ = pools.run(3, _facts, list(range(len(SHAPES))), 99)[0]
    equal = [owners[f"layer{i}.weight"] for i in (0, 1, 5)]
    assert imbalance < 2.0
    assert len(set(equal)) > 1


def _bucket_loads(problem: Problem) -> list[dict[int, list[int]]]:
    """Bucket by bucket: wire bytes of the whole matrices that each owner receives."""
    _, optimizer = build(problem, world_mesh())
    buckets = []
    for bucket in optimizer.plan.buckets:
        owned: dict[int, list[int]] = {}
        for each, owner in zip(bucket.matrices, bucket.owners, strict=True):
            owned.setdefault(owner, []).append(each.total_bytes)
        buckets.append(owned)
    return buckets


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 8000, 2**26])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bucket_bytes_bound_what_an_owner_receives(
    pools: Worlds, bucket_bytes: int, world: int
) -> None:
    runtime = shardmuon.Runtime(bucket_bytes=bucket_bytes)
    options: dict[str, Any] = {"ns_dtype": torch.float32}
    problem = Problem(shapes=SHAPES, runtime=runtime, options=options)
    answers = pools.run(world, _bucket_loads, problem)
    assert all(answer == answers[0] for answer in answers)
    for owned in answers[0]:
        for sizes in owned.values():
            assert sum(sizes) <= bucket_bytes or len(sizes) == 1
    total = sum(sum(sizes) for owned in answers[0] for sizes in owned.values())
    assert total == 4 * sum(rows * cols for rows, cols in SHAPES)


def test_prepare_may_be_called_first(pools: Worlds) -> None:
    assert all(pools.run(2, _prepared_first))


def _prepared_first() -> bool:
    problem = Problem(steps=2)
    _, optimizer = build(problem, world_mesh())
    optimizer.prepare()
    digest = optimizer.plan.digest
    optimizer.prepare()
    return optimizer.plan.digest == digest == solve(problem).plan_digest


def test_prepare_without_ranks() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    optimizer.prepare()
    optimizer.check()
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.check()
    assert optimizer.stats.matrices_orthogonalized == 1


def test_a_layout_that_is_refused_is_refused_again() -> None:
    """The plan that was good before does not stand in for it."""
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = shardmuon.Muon([("w", weight)])
    assert len(optimizer.plan) == 1
    wrong = nn.Parameter(torch.ones(4, 3, 2).transpose(1, 2))
    optimizer.add_param_group({"params": [("conv", wrong)], "flatten": True})
    for _ in range(2):
        with pytest.raises(ValueError, match="conv"):
            optimizer.plan  # noqa: B018
