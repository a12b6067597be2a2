"""Matrices that a team of ranks orthogonalizes together: as exact as alone, on every layout.

A team is planned where the model of the device says that it pays. On the small matrices of a test
it does for a device whose links cost nothing, which stands in for the CPU here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardmuon
from shardmuon.exchange.teams import AxisTeam
from shardmuon.orthogonalize.coefficients import PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz, newton_schulz_of_panels
from shardmuon.planning import planner
from shardmuon.planning.device import DEVICES, Link, Rate
from shardmuon.planning.owners import Way
from shardmuon.tools import accuracy
from tests import ranks, reference
from tests.conftest import Worlds
from tests.grids import (
    Grid,
    Values,
    Weight,
    cut,
    mesh_of,
    placed,
    random,
    run,
    same_bits,
    solve_alone,
)
from tests.problems import local, world_mesh

FREE = replace(
    DEVICES["cpu"],
    rates={"standard": Rate(1.0, 0.0, 0.0), "gram": Rate(1.0, 0.0, 0.0)},
    near=Link(1e9, 0.0),
    far=Link(1e9, 0.0),
    host_ms=0.0,
    host_ms_per_matrix=0.0,
)
SHARED = shardmuon.Runtime(share_large=True)
# An update of a team differs from that of one rank by rounding, on a GPU by that of float16; a
# wrong panel changes parameters by some 4e-3.
NEAR = 2e-5 if ranks.backend() == "gloo" else 2e-4


def grid(mesh: tuple[int, ...], *weights: Weight, **runtime: Any) -> Grid:
    return Grid(
        mesh=mesh,
        weights=weights,
        options={"lr": 0.02, "ns_dtype": torch.float32},
        runtime=replace(SHARED, **runtime),
    )


WIDE, TALL = (24, 96), (96, 24)
SMALL = Weight(shape=(8, 6), letters="0")
TALL_OVER_BOTH = Weight(shape=TALL, letters="01")
GRIDS = {
    "rows": grid((4,), Weight(shape=WIDE, letters="0"), SMALL),
    "rows of a tall one": grid((4,), Weight(shape=TALL, letters="0"), SMALL),
    "columns": grid((4,), Weight(shape=WIDE, letters="1"), SMALL),
    "replicated": grid((4,), Weight(shape=WIDE, letters="R"), SMALL),
    "plain": grid((4,), Weight(shape=WIDE, letters="plain"), SMALL),
    "two large ones": grid((4,), *[Weight(shape=WIDE, letters="0")] * 2, bucket_bytes=10**6),
    "two kinds": grid((4,), Weight(shape=WIDE, letters="0"), Weight(shape=TALL, letters="0")),
    "small buckets": grid((4,), *[Weight(shape=WIDE, letters="0")] * 2, bucket_bytes=1),
    "odd sizes": grid((4,), Weight(shape=(7, 45), letters="0")),
    "hsdp": grid((2, 2), Weight(shape=WIDE, letters="R0")),
    "fsdp over tp": grid((2, 2), Weight(shape=WIDE, letters="s0"), TALL_OVER_BOTH),
    "all gather": grid((4,), Weight(shape=WIDE, letters="0"), exchange="all_gather"),
    "an expert": grid((4,), Weight(shape=(1, *WIDE), letters="1"), SMALL),
    "parts": grid(
        (4,), Weight(shape=(40, 96), letters="0", keys={"split_sizes": [32, 8]}), SMALL
    ),
    "transposed": grid((4,), Weight(shape=WIDE, letters="0", keys={"transposed": True})),
    "bfloat16": grid((4,), Weight(shape=WIDE, letters="0", dtype=torch.bfloat16)),
    "overlap": grid((4,), Weight(shape=WIDE, letters="0"), SMALL, overlap="backward"),
    "eight": grid((8,), Weight(shape=WIDE, letters="0"), Weight(shape=TALL, letters="0")),
    "eight in two axes": grid((2, 4), Weight(shape=WIDE, letters="s0"), TALL_OVER_BOTH),
    "a rank too many": grid((3,), Weight(shape=WIDE, letters="0"), Weight(shape=TALL, letters="1")),
}  # fmt: skip


@contextlib.contextmanager
def teams_of(size: int) -> Iterator[None]:
    """Plans of this process share with teams of `size`, whatever else they might."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", FREE)
        patch.setitem(DEVICES, "h200", FREE)
        patch.setattr(planner, "_ways", lambda *_: [Way(size)])
        yield


def solve(case: Grid, right: list[Values], team: int) -> tuple[str, list[int]]:
    """(what is wrong on this rank, matrices orthogonalized here) with teams of `team`."""
    with teams_of(team):
        return _solve(case, right, team)


def _solve(case: Grid, right: list[Values], team: int) -> tuple[str, list[int]]:
    params, optimizer, counts = run(case)
    panels = [matrix.panel for matrix, _ in optimizer.plan if matrix.panel]
    if not panels or {panel.size for panel in panels} != {team}:
        return f"no team of {team}: {optimizer.plan.owners()}", counts
    faults = []
    coordinate = mesh_of(case.mesh).get_coordinate()
    assert coordinate is not None
    for index, (weight, p) in enumerate(zip(case.weights, params, strict=True)):
        momentum = optimizer.state[p]["momentum_buffer"]
        parts = {
            kind: cut(whole, weight.letters, case.mesh, coordinate)
            for kind, whole in right[index].items()
        }
        if not same_bits(local(momentum), parts["momentum_buffer"]):
            faults.append(f"momentum of w{index}")
        held, expected = local(p).detach().cpu().float(), parts["parameter"].float()
        tolerance = 0.01 if weight.dtype == torch.bfloat16 else NEAR
        if held.numel() and not float((held - expected).abs().max()) < tolerance:
            faults.append(f"w{index} is off by {float((held - expected).abs().max())}")
    return "; ".join(faults), counts


# A team lies along one axis.
CASES = [(name, team) for name, case in GRIDS.items() for team in (2, 4) if team <= case.mesh[-1]]


@pytest.mark.parametrize(("name", "team"), CASES)
@pytest.mark.supports(
    "`share_large`: teams of ranks along a mesh axis, within rounding of one rank"
)
def test_a_team_updates_as_one_rank_does(pools: Worlds, name: str, team: int) -> None:
    case = GRIDS[name]
    (right,) = pools.run(1, solve_alone, [replace(case, runtime=shardmuon.Runtime())])
    found = pools.run(torch.Size(case.mesh).numel(), solve, case, right[0], team)
    assert [fault for fault, _ in found] == [""] * len(found)
    parts = sum(weight.parts() for weight in case.weights)
    assert [sum(step) for step in zip(*(counts for _, counts in found), strict=True)] == [
        parts
    ] * case.steps


def replicas_agree(team: int) -> list[float]:
    """Sums over all elements after a step of a replicated matrix that a team shares."""
    with teams_of(team):
        mesh = world_mesh()
        p = nn.Parameter(placed(random(WIDE, 0), "R", mesh))
        optimizer = shardmuon.Muon([("w", p)], runtime=SHARED)
        p.grad = placed(random(WIDE, 1), "R", mesh)
        optimizer.step()
        return local(p).detach().flatten().tolist()


def test_replicas_keep_equal_bits(pools: Worlds) -> None:
    first, *others = pools.run(4, replicas_agree, 4)
    assert all(other == first for other in others)


def panels_of(whole: Tensor, count: int, index: int) -> Tensor:
    return whole.tensor_split(count, dim=-1 if whole.size(-1) >= whole.size(-2) else -2)[index]


def iterate(shape: tuple[int, ...], dtype: str, eps: float | None) -> tuple[float, float]:
    """(largest error of this rank's panels, that of the gram method alone) against float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = world_mesh().get_group(0)
    team = AxisTeam(axis, size, rank, size, 60.0)
    whole = torch.stack([random(shape[1:], i) * 10.0 ** (3 * i) for i in range(shape[0])])
    schedule = schedule_of("keller", 5)
    tall = shape[1] > shape[2]
    kind = getattr(torch, dtype)
    mine = panels_of(whole, size, rank).contiguous().to(ranks.device(), kind)
    found = newton_schulz_of_panels(mine, schedule, eps, kind, tall, team).cpu()
    alone = newton_schulz(whole.to(ranks.device(), kind), schedule, eps, kind, "gram").cpu()
    right = torch.stack(
        [torch.from_numpy(reference.newton_schulz(each.double().numpy())) for each in whole]
    )
    pairs = ((found, panels_of(right, size, rank)), (alone, right))
    errors = [float((got.double() - good).abs().max()) for got, good in pairs]
    return errors[0], errors[1]


@pytest.mark.parametrize("shape", [(1, 24, 96), (3, 17, 40), (2, 96, 24), (1, 16, 16)])
@pytest.mark.parametrize("eps", [1e-7, None])
def test_panels_are_as_exact_as_the_gram_method(
    pools: Worlds, shape: tuple[int, ...], eps: float | None
) -> None:
    for mine, alone in pools.run(4, iterate, shape, "float32", eps):
        assert mine < max(2 * alone, 1e-5)


def errors_of_kinds(preset: str) -> dict[str, float]:
    """Errors over all panels by kind of matrix, in float32, on this rank's share of the kinds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    team = AxisTeam(world_mesh().get_group(0), size, rank, size, 60.0)
    schedule = schedule_of(preset, accuracy.STEPS)
    whole = torch.stack([accuracy.conditioned(kind, 48, 160) for kind in accuracy.KINDS])
    mine = panels_of(whole, size, rank).contiguous().float().to(ranks.device())
    found = newton_schulz_of_panels(mine, schedule, None, torch.float32, False, team).double()
    right = newton_schulz(whole, schedule, None, torch.float64).to(found.device)
    errors = torch.stack(
        [
            (found - panels_of(right, size, rank)).square().sum((1, 2)),
            panels_of(right, size, rank).square().sum((1, 2)),
        ]
    )
    dist.all_reduce(errors)
    relative = (errors[0] / errors[1]).sqrt().tolist()
    return dict(zip(accuracy.KINDS, relative, strict=True))


@pytest.mark.skipif(ranks.backend() == "nccl", reason="a GPU iterates in float16")
@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("world", [2, 4])
def test_panels_meet_the_bounds_of_every_kind(pools: Worlds, preset: str, world: int) -> None:
    for found in pools.run(world, errors_of_kinds, preset):
        for kind, error in found.items():
            bound = accuracy.bound(preset, kind, torch.float32, torch.float32)
            assert error < bound, (kind, error, bound)


def test_panels_of_zero_stay_zero(pools: Worlds) -> None:
    assert pools.run(2, zeros) == [[0.0], [0.0]]


def zeros() -> list[float]:
    team = AxisTeam(world_mesh().get_group(0), 2, dist.get_rank(), 2, 60.0)
    nothing = torch.zeros(1, 4, 6, device=ranks.device())
    schedule = schedule_of("keller", 5)
    made = [newton_schulz_of_panels(nothing, schedule, None, torch.float32, False, team)]
    return [float(each.abs().max()) for each in made]


def sums(sizes: Sequence[int]) -> list[tuple[bool, bool]]:
    """Whether totals and lists over teams of two are those of the members."""
    rank = dist.get_rank()
    team = AxisTeam(world_mesh().get_group(0), dist.get_world_size(), rank, 2, 60.0)
    first = rank - rank % 2
    result = []
    for size in sizes:
        if first + 1 >= dist.get_world_size():  # the last of three only attends
            for _ in range(3):
                team.attend((), torch.zeros(0, device=ranks.device()))
            continue
        values = [random((size,), r).to(ranks.device()) for r in (first, first + 1)]
        total = team.total(values[rank - first])
        everyones = team.everyones(values[rank - first])
        result.append(
            (same_bits(total, values[0] + values[1]), same_bits(everyones, torch.stack(values)))
        )
    return result


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_teams(pools: Worlds, world: int) -> None:
    for result in pools.run(world, sums, [0, 1, 2, 5, 1000]):
        assert all(total and listed for total, listed in result)


def test_no_team_with_deterministic() -> None:
    with pytest.raises(ValueError, match="share_large does not go with"):
        shardmuon.Runtime(share_large=True, deterministic=True)


def planned(**keys: Any) -> set[bool]:
    """Whether the matrices of a plan are panels, for a group with `keys`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", FREE)
        patch.setitem(DEVICES, "h200", FREE)
        p = nn.Parameter(placed(random(WIDE, 0), "0", world_mesh()))
        runtime = keys.pop("runtime", SHARED)
        optimizer = shardmuon.Muon([{"params": [("w", p)], **keys}], runtime=runtime)
        return {matrix.panel is not None for matrix, _ in optimizer.plan}


def which_are_shared() -> list[set[bool]]:
    float32 = {"ns_dtype": torch.float32}
    return [
        planned(**float32),
        planned(ns_method="gram", **float32),
        planned(ns_method="standard", **float32),
        planned(ns_method="symmetric", **float32),
        planned(runtime=shardmuon.Runtime(), **float32),
    ]


def test_only_what_may_take_the_gram_method_is_shared(pools: Worlds) -> None:
    expected = [{True}, {True}, {False}, {False}, {False}]
    assert pools.run(2, which_are_shared) == [expected] * 2
