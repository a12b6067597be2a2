"""The time of a step is that of its slowest owner: no owner waits for another one in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardmuon
from shardmuon.exchange import collectives, pipeline
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.rules import RULES
from shardmuon.rules.base import Group
from shardmuon.rules.muon import MuonRule
from tests.conftest import Worlds
from tests.problems import Problem, build, set_gradients, world_mesh

LOAD_S = 1.0
"""Seconds that Newton-Schulz takes in all on the rank with the largest load."""

# Costs differ by a factor of 4,096, as those of 8192 x 8192 and 512 x 512 do.
ONE_LARGE = ((256, 256), *((16, 16),) * 30)
BALANCED = ((32, 32),) * 24


class Sleeping(MuonRule):
    """Takes as long as the plan says, and computes nothing."""

    def __init__(self, s_per_flop: float) -> None:
        self._s_per_flop = s_per_flop

    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows, cols = whole.shape
        time.sleep(self._s_per_flop * newton_schulz_flops(rows, cols, (group["ns_steps"],)))
        return whole, None


def problem_of(shapes: tuple[tuple[int, int], ...]) -> Problem:
    """One matrix of each owner in a bucket."""
    runtime = shardmuon.Runtime(deterministic=True, bucket_bytes=1)
    return Problem(shapes=shapes, seed=0, runtime=runtime)


def _times(problem: Problem) -> tuple[float, float]:
    """Seconds of a step (with the load of Newton-Schulz, without)."""
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    taken = []
    for step, load_s in enumerate((0.0, 0.0, LOAD_S)):  # the first is longer: plans are compared
        set_gradients(params, problem, step, mesh)
        rule = Sleeping(load_s / optimizer.plan.makespan)
        collectives.barrier()
        start = time.monotonic()
        with mock.patch.dict(RULES, {"muon": rule}):
            optimizer.step()
        taken.append(time.monotonic() - start)
    return taken[2], taken[1]


@pytest.mark.parametrize("shapes", [ONE_LARGE, BALANCED], ids=["one large", "balanced"])
def test_a_step_takes_as_long_as_its_largest_load(
    pools: Worlds, shapes: tuple[tuple[int, int], ...]
) -> None:
    for _ in range(2):  # a busy machine may stop a rank for a while
        times = pools.run(4, _times, problem_of(shapes))
        loaded, empty = (max(taken) for taken in zip(*times, strict=True))
        assert loaded >= LOAD_S
        if loaded <= 1.2 * (LOAD_S + empty):
            return
    pytest.fail(f"a step took {loaded:.2f} s, and {empty:.2f} s without its load of {LOAD_S} s")


def _report(problem: Problem) -> tuple[str, float]:
    plan = build(problem, world_mesh())[1].plan
    return plan.report(), plan.imbalance


def test_report_warns_of_a_matrix_above_the_mean(pools: Worlds) -> None:
    report, imbalance = pools.run(4, _report, problem_of(ONE_LARGE))[0]
    assert imbalance > 3.9
    assert f"imbalance {imbalance:.3f}" in report
    assert "warning: layer0.weight alone costs 3.9" in report
    report, imbalance = pools.run(4, _report, problem_of(BALANCED))[0]
    assert imbalance == 1.0
    assert "imbalance 1.000" in report
    assert "alone costs" not in report


class _Diary:
    """Notes in which stretch of the pipeline collectives start and are waited for.

    A stretch is `phase.bucket`, as named for profilers.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._stretch = ""

    @contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        self._stretch = name.removeprefix("shardmuon.")
        self.notes.append(f"{self._stretch} begin")
        yield
        self.notes.append(f"{self._stretch} end")

    def noting(self, what: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.notes.append(f"{self._stretch} {what}")
            return function(*args, **kwargs)

        return noted


def _diary(problem: Problem) -> tuple[list[str], int]:
    """(notes on the second step, number of buckets)."""
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    diary = _Diary()
    for step in range(2):
        set_gradients(params, problem, step, mesh)
        with ExitStack() as patches:
            if step:
                start = diary.noting("start", collectives.all_to_all)
                wait = diary.noting("wait", collectives.Work.wait)
                patches.enter_context(mock.patch.object(collectives, "all_to_all", start))
                patches.enter_context(mock.patch.object(collectives.Work, "wait", wait))
                patches.enter_context(mock.patch.object(pipeline, "record_function", diary.stretch))
            optimizer.step()
    assert torch.isfinite(params[0]).all()
    return diary.notes, len(optimizer.plan.buckets)


@pytest.mark.parametrize("shapes", [ONE_LARGE, BALANCED], ids=["one large", "balanced"])
def test_no_rank_waits_in_the_middle_of_newton_schulz(
    pools: Worlds, shapes: tuple[tuple[int, int], ...]
) -> None:
    for notes, buckets in pools.run(4, _diary, problem_of(shapes)):
        at = {note: place for place, note in enumerate(notes)}
        assert buckets > 3
        for k in range(buckets):
            begin, end = (at[f"orthogonalize.{k} {edge}"] for edge in ("begin", "end"))
            assert end == begin + 1  # no collective starts or is waited for in between
            assert at[f"gather.{k} start"] < at[f"gather.{k} wait"] < begin
            assert end < at[f"scatter.{k} start"] < at[f"scatter.{k} wait"]
            if k + 1 < buckets:
                assert at[f"gather.{k + 1} start"] < begin
                assert at[f"orthogonalize.{k + 1} end"] < at[f"scatter.{k} wait"]
