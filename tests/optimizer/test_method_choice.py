"""`ns_method="auto"`: one answer per mesh, seen in the plan, and never a method that was not asked.

A GPU is needed to have a choice at all; here the entries say that there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardmuon
from shardmuon import entries, methods
from shardmuon.orthogonalize.choice import Answer, Problem
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.planning.cost import flops_in
from tests import ranks
from tests.conftest import Worlds
from tests.problems import whole, world_mesh

SHAPES = {"square": (24, 24), "wide": (8, 40), "tall": (40, 8)}


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    mesh = world_mesh()
    made = []
    for name, shape in SHAPES.items():
        whole = torch.randn(shape, generator=generator)
        made.append((name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))))
        made[-1][1].grad = distribute_tensor(torch.cos(whole * 3), mesh, [Shard(0)])
    return made


def open_choice(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, str], ms: float | None = None
) -> list[set[Problem]]:
    """Leave "auto" open; rank r would choose `answers[r]`. Returns what this rank is asked."""
    asked: list[set[Problem]] = []

    def choose(problems: Iterable[Problem], device: torch.device) -> dict[Problem, Answer]:
        asked.append(set(problems))
        answer = answers[dist.get_rank()]
        if answer == "fails":
            raise RuntimeError("the device is gone")
        return dict.fromkeys(asked[-1], Answer(answer, ms))

    monkeypatch.setattr(entries, "_method", lambda entry, dtype: entry.group["ns_method"])
    monkeypatch.setattr(methods, "choose_methods", choose)
    return asked


def one_answer(prepare: bool) -> tuple[list[set[Problem]], list[str], str, list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = open_choice(monkeypatch, {0: "gram", 1: "symmetric"})
        optimizer = shardmuon.Muon(parameters(), lr=0.1)
        assert {matrix.method for matrix, _ in optimizer.plan} == {"auto"}
        if prepare:
            optimizer.prepare()
        optimizer.step()
        optimizer.step()
        chosen = [matrix.method for matrix, _ in optimizer.plan]
        values = [whole(p) for p in optimizer.param_groups[0]["params"]]
        return asked, chosen, optimizer.plan.report(), values


def costs(ms: float) -> dict[str, int]:
    """Costs in the plan if the first rank's measurement took `ms` for each batch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        open_choice(monkeypatch, {0: "gram", 1: "symmetric"}, ms * (1 + dist.get_rank()))
        optimizer = shardmuon.Muon(parameters(), lr=0.1)
        optimizer.prepare()
        return {matrix.id: matrix.cost for matrix, _ in optimizer.plan}


def test_measured_times_of_the_first_rank_are_the_costs(pools: Worlds) -> None:
    first, second = pools.run(2, costs, 0.5)
    # A batch holds what an owner will have of a kind: here one of each.
    assert first == second == dict.fromkeys(SHAPES, flops_in(0.5))


def forced(method: str) -> list[torch.Tensor]:
    optimizer = shardmuon.Muon(parameters(), lr=0.1, ns_method=method)
    optimizer.step()
    optimizer.step()
    return [whole(p) for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("prepare", [True, False])
def test_all_ranks_take_the_first_rank_s_answer(pools: Worlds, prepare: bool) -> None:
    answers = pools.run(2, one_answer, prepare)
    expected = pools.run(2, forced, "gram")[0]
    segments = schedule_of("keller", 5).segments
    dtype = "bfloat16" if ranks.backend() == "nccl" else "float32"
    problems = {
        Problem(1, 24, 24, dtype, segments),
        Problem(1, 8, 40, dtype, segments),
    }
    assert answers[0][0] == [problems]  # once, although two steps were taken
    assert answers[1][0] == []
    for _, chosen, report, values in answers:
        assert chosen == ["gram"] * 3
        assert report.count("gram") == 3
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def a_device_that_fails() -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        open_choice(monkeypatch, {0: "fails", 1: "gram"})
        optimizer = shardmuon.Muon(parameters(), lr=0.1)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)


def test_a_measurement_that_fails_is_the_same_error_everywhere(pools: Worlds) -> None:
    texts = pools.run(2, a_device_that_fails)
    assert texts == ["rank 0 could not measure Newton-Schulz: RuntimeError: the device is gone"] * 2


def deterministic() -> set[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = open_choice(monkeypatch, {0: "gram", 1: "gram"})
        runtime = shardmuon.Runtime(deterministic=True)
        optimizer = shardmuon.Muon(parameters(), runtime=runtime)
        optimizer.step()
        assert not asked
        return {matrix.method for matrix, _ in optimizer.plan}


def test_deterministic_means_standard(pools: Worlds) -> None:
    assert pools.run(2, deterministic) == [{"standard"}] * 2


def test_on_a_cpu_auto_is_standard_and_costs_no_collective() -> None:
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = shardmuon.Muon([("w", p)])
    assert optimizer.param_groups[0]["ns_method"] == "auto"
    assert [matrix.method for matrix, _ in optimizer.plan] == ["standard"]


def test_the_load_is_that_of_the_method() -> None:
    p = nn.Parameter(torch.ones(100, 400))
    loads = {
        method: shardmuon.Muon([("w", p)], ns_method=method).plan.makespan
        for method in ("auto", "standard", "symmetric", "gram")
    }
    unit = 100**3
    assert loads == {
        "auto": (20 * 4 + 10) * unit,
        "standard": (20 * 4 + 10) * unit,
        "symmetric": (15 * 4 + 5) * unit,
        "gram": (6 * 4 + 14) * unit,
    }
