"""Variants on one GPU: few launches with the bits of many, refused steps, and no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Muon, Runtime
from shardmuon.rules import Commit, ElementShard, LionRule
from tests.reference import relative_error
from tests.variants import ELEMENTS, MATRICES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = ((1,), (5, 3), (0, 4), (64, 48), (300,), (3, 7, 5), (2048, 600), ())
WHOLES = ((128, 128), (256, 64), (64, 256), (1, 64), (128, 128))
HALVES = (torch.float32, torch.bfloat16)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def shards(parameter: torch.dtype, gradient: torch.dtype) -> list[ElementShard]:
    return [
        ElementShard(
            values(shape, 3 * i, parameter),
            values(shape, 3 * i + 1, gradient),
            {"exp_avg": values(shape, 3 * i + 2, parameter)},
        )
        for i, shape in enumerate(SHAPES)
    ]


def results(some: Sequence[ElementShard]) -> list[Tensor]:
    return [tensor for s in some for tensor in (s.parameter, s.state["exp_avg"])]


@pytest.mark.parametrize("word", [None, True, False])
@pytest.mark.parametrize("gradient", HALVES)
@pytest.mark.parametrize("parameter", HALVES)
def test_lion_over_many_has_the_bits_of_one_by_one(
    parameter: torch.dtype, gradient: torch.dtype, word: bool | None
) -> None:
    commit = Commit(None if word is None else torch.tensor(word, device="cuda"))
    group = ELEMENTS["lion"].keys
    together, single = shards(parameter, gradient), shards(parameter, gradient)
    before = [tensor.clone() for tensor in results(together)]
    LionRule().step(together, group, commit)
    for shard in single:
        LionRule().step([shard], group, commit)
    assert all(map(torch.equal, results(together), results(single)))
    unchanged = [torch.equal(a, b) for a, b in zip(results(together), before, strict=True)]
    assert all(unchanged) if word is False else not all(unchanged)


def test_lion_needs_few_launches() -> None:
    some = [
        ElementShard(values((64,), i), values((64,), i + 1), {"exp_avg": values((64,), i + 2)})
        for i in range(200)
    ]
    rule, group, commit = LionRule(), ELEMENTS["lion"].keys, Commit()
    rule.step(some, group, commit)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        rule.step(some, group, commit)
        torch.cuda.synchronize()
    assert 0 < sum(event.device_type.name == "CUDA" for event in profile.events()) < 60


def trained(shapes: Sequence[tuple[int, ...]], keys: Any, seeds: Sequence[int]) -> list[Tensor]:
    """Parameters and their state after three steps, each with values of its own seed."""
    params = [nn.Parameter(values(s, seed)) for s, seed in zip(shapes, seeds, strict=True)]
    optimizer = Muon([{**keys, "params": params}], runtime=Runtime(deterministic=True))
    for step in range(3):
        for p, seed in zip(params, seeds, strict=True):
            p.grad = values(tuple(p.shape), 100 * (step + 1) + seed)
        optimizer.step()
    optimizer.check()
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]


VARIANTS = {**MATRICES, **ELEMENTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_parameter_alone_has_the_bits_that_it_has_in_a_group(name: str) -> None:
    keys = VARIANTS[name].keys
    seeds = range(len(WHOLES))
    together = trained(WHOLES, keys, seeds)
    alone = [t for s, seed in zip(WHOLES, seeds, strict=True) for t in trained([s], keys, [seed])]
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("name", MATRICES)
def test_batches_of_equal_shapes_follow_the_formulas(name: str) -> None:
    """Three matrices of one shape are one batch; float32 products, summed in any order: 1e-4."""
    variant = MATRICES[name]
    keys = {**variant.keys, "ns_dtype": torch.float32}
    starts, gradients = ([values((96, 64), seed) for seed in (s, s + 1, s + 2)] for s in (0, 10))
    params = [nn.Parameter(start.clone()) for start in starts]
    optimizer = Muon([{**keys, "params": params}])
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    for p, start, gradient in zip(params, starts, gradients, strict=True):
        given = [gradient.double().cpu().numpy()]
        right = variant.right(start.double().cpu().numpy(), given, variant.keys)
        for kind, value in {"parameter": p.detach(), **optimizer.state[p]}.items():
            assert relative_error(value.cpu().numpy(), right[kind]) < 1e-4, kind


def pair(name: str, nonfinite: Any) -> tuple[list[nn.Parameter], Muon]:
    matrices = [nn.Parameter(values(shape, i)) for i, shape in enumerate(WHOLES)]
    rest = [nn.Parameter(values(shape, i)) for i, shape in enumerate(SHAPES)]
    groups: list[dict[str, Any]] = [
        {**MATRICES[name].keys, "params": matrices},
        {**ELEMENTS["lion"].keys, "params": rest},
    ]
    return [*matrices, *rest], Muon(groups, runtime=Runtime(nonfinite=nonfinite))


def give(params: Sequence[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = values(tuple(p.shape), 1000 * (step + 1) + i)


@pytest.mark.parametrize("spoiled", [1, -2])
@pytest.mark.parametrize("name", MATRICES)
def test_a_refused_step_changes_nothing(name: str, spoiled: int) -> None:
    params, optimizer = pair(name, "skip")
    give(params, 0)
    optimizer.step()
    before = [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]
    give(params, 1)
    gradient = params[spoiled].grad
    assert gradient is not None
    gradient.view(-1)[0] = float("nan")
    optimizer.step()
    after = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after))
    give(params, 2)
    optimizer.step()
    assert optimizer.stats.steps_skipped == 1
    assert all(p.isfinite().all() for p in params)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("nonfinite", ["error", "skip", "allow"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_host_waits_for_no_step_of_a_known_plan(name: str, nonfinite: Any) -> None:
    params, optimizer = pair(name, nonfinite)
    for step in range(4):
        give(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    optimizer.check()
