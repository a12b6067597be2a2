"""What a step takes beside parameters, gradients and state: never more than the plan says.

Gloo's threads may let go of a buffer a moment after the wait for it, so the least peak of several
equal steps counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardmuon
from shardmuon.rules import RULES
from tests import grids, ranks
from tests.conftest import Worlds
from tests.exchange.test_row_statistics import RowScaled
from tests.grids import Weight
from tests.memory import LiveBytes
from tests.problems import PLACEMENTS, Problem, build, local, set_gradients, world_mesh

pytestmark = pytest.mark.skipif(
    ranks.backend() != "gloo", reason="kernels and graphs of a GPU take memory that is not counted"
)

SIDE = 128
WHOLE = 4 * SIDE * SIDE  # bytes of one float32 matrix
NUMBERS = 20_000  # bytes of headers and of single numbers, which no plan counts
STEPS = 3


def test_storages_are_counted_once_and_until_they_are_freed() -> None:
    there = torch.ones(10)
    with LiveBytes() as memory:
        first = torch.ones(1000)
        second = first + 1
        view = second.view(10, 100)[2]
        there.add_(1)
        del first, second
        assert (memory.live, memory.peak, memory.largest) == (4000, 8000, 4000)
        del view
        assert memory.live == 0


def _measured(
    optimizer: shardmuon.Muon, before_step: Callable[[int], object]
) -> tuple[int, int, int]:
    """(least peak of several steps, bytes that stay, the plan's bound) of this rank."""
    peaks, left = [], 0
    for number in range(STEPS):
        before_step(number)
        with LiveBytes() as memory:
            optimizer.step()
        deadline = time.monotonic() + 5
        while memory.live and time.monotonic() < deadline:
            time.sleep(0.001)
        peaks.append(memory.peak)
        left = max(left, memory.live)
    rank = dist.get_rank()
    return min(peaks), left, optimizer.plan.transient_bytes([rank])[rank]


def _peak(problem: Problem) -> tuple[int, int, int]:
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    return _measured(optimizer, lambda step: set_gradients(params, problem, step, mesh))


def equal_matrices(
    count: int, placement: str, exchange: str, in_bucket: int, overlap: str = "none"
) -> Problem:
    """`count` matrices in buckets with `in_bucket` of each owner."""
    settings: dict[str, Any] = {"exchange": exchange, "bucket_bytes": in_bucket * WHOLE}
    settings["overlap"] = overlap
    return Problem(
        shapes=((SIDE, SIDE),) * count,
        placements=(placement,),
        seed=0,
        options={"lr": 0.02, "ns_dtype": torch.float32},
        runtime=shardmuon.Runtime(deterministic=True, **settings),
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_thirteen_matrices_on_four_ranks_are_never_all_in_one_place(
    pools: Worlds, placement: str
) -> None:
    few, many = (
        pools.run(4, _peak, equal_matrices(count, placement, "auto", 1)) for count in (13, 26)
    )
    for (peak, left, bound), (peak_of_many, left_of_many, _) in zip(few, many, strict=True):
        assert WHOLE < peak <= bound + NUMBERS < 13 * WHOLE
        assert peak_of_many <= bound + NUMBERS
        assert left == left_of_many == 0
    # Twice as many matrices make more buckets, not more buckets in flight.
    assert (
        max(p for p, _, _ in many)
        <= max(p for p, _, _ in few)
        + 2
        * WHOLE
        * (
            placement == "replicate"  # one owner more takes part in each bucket
        )
        + NUMBERS
    )


@pytest.mark.parametrize(("exchange", "in_bucket"), [("auto", 2), ("all_gather", 100)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_larger_buckets_take_what_the_plan_says(
    pools: Worlds, placement: str, exchange: Literal["auto", "all_gather"], in_bucket: int
) -> None:
    for peak, left, bound in pools.run(
        4, _peak, equal_matrices(13, placement, exchange, in_bucket)
    ):
        # The bound takes equal matrices as one batch, which they are on a GPU only.
        assert 0.5 * bound < peak <= bound + NUMBERS
        assert left == 0


@pytest.mark.parametrize("in_bucket", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_buckets_that_leave_early_are_all_in_flight(
    pools: Worlds, placement: str, in_bucket: int
) -> None:
    late, early = (
        pools.run(4, _peak, equal_matrices(13, placement, "auto", in_bucket, overlap))
        for overlap in ("none", "backward")
    )
    for (_, _, usual), (peak, left, bound) in zip(late, early, strict=True):
        assert 0.5 * bound < peak <= bound + NUMBERS
        assert left == 0
        assert bound >= usual
        assert (bound > usual) == (placement != "replicate" and in_bucket == 1)


BF16: Mapping[str, Any] = {"dtype": torch.bfloat16}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Weight, ...]]] = {
    "two sharded axes": (
        (2, 2),
        (Weight(shape=(96, 130), letters="01"), Weight(shape=(210, 64), letters="10")),
    ),
    "one dim cut twice": (
        (2, 2),
        (Weight(shape=(96, 130), letters="00"), Weight(shape=(96, 130), letters="s0")),
    ),
    "replicas of shards": (
        (2, 2),
        tuple(Weight(shape=(90, 70 + i), letters="R0") for i in range(6)),
    ),
    "replicas of columns and rows": (
        (2, 2),
        (Weight(shape=(90, 170), letters="R1"), Weight(shape=(190, 70), letters="0R")),
    ),
    "whole on every rank": ((4,), tuple(Weight(shape=(90, 70), letters="plain") for _ in "abcde")),
    "stacks": (
        (4,),
        (Weight(shape=(8, 50, 64), letters="0"), Weight(shape=(3, 64, 50), letters="1")),
    ),
    "one large among small": (
        (4,),
        (
            Weight(shape=(160, 160), letters="0"),
            *(Weight(shape=(40, 40 + i), letters="01"[i % 2]) for i in range(9)),
        ),
    ),
    "half precision": (
        (4,),
        (
            Weight(shape=(128, 64), letters="0", **BF16),
            Weight(shape=(64, 128), letters="1", **BF16),
            Weight(shape=(1, 4096), letters="0", **BF16),
        ),
    ),
}


def _peak_of_layout(
    name: str, settings: Mapping[str, Any], options: Mapping[str, Any], without: int
) -> tuple[int, int, int]:
    """As `_measured`. without: every such parameter has no gradient on any rank, 0 for none."""
    shape, weights = LAYOUTS[name]
    mesh = grids.mesh_of(shape)

    def values(seed: int) -> list[torch.Tensor]:
        return [
            grids.placed(grids.random(w.shape, 99 * seed + i).to(w.dtype), w.letters, mesh)
            for i, w in enumerate(weights)
        ]

    params = [nn.Parameter(value) for value in values(0)]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    runtime = shardmuon.Runtime(**settings)
    optimizer = shardmuon.Muon(named, lr=0.02, mesh=mesh, runtime=runtime, **options)

    def gradients(step: int) -> None:
        for i, (p, gradient) in enumerate(zip(params, values(step + 1), strict=True)):
            p.grad = None if without and i % without == 0 else gradient

    peak, left, bound = _measured(optimizer, gradients)
    absent = [local(p).nbytes for p in params if p.grad is None]  # zeros stand for these
    return peak, left, bound + sum(absent)


def _peaks_of_layout(
    name: str, options: Mapping[str, Any], without: int = 0
) -> list[tuple[int, int, int]]:
    """One answer for each exchange and bucket size."""
    return [
        _peak_of_layout(name, {"exchange": kind, "bucket_bytes": size}, options, without)
        for kind, size in (("auto", 1), ("auto", 40_000), ("all_gather", 1))
    ]


def assert_within_bounds(answers: list[list[tuple[int, int, int]]]) -> None:
    for peak, left, bound in (one for rank in answers for one in rank):
        assert 0 < peak <= bound + NUMBERS
        assert left == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_takes_more_than_the_plan_says(pools: Worlds, name: str) -> None:
    dtype = torch.bfloat16 if name == "half precision" else torch.float32
    assert_within_bounds(pools.run(4, _peaks_of_layout, name, {"ns_dtype": dtype}))


@pytest.mark.parametrize("method", ["symmetric", "gram"])
def test_no_method_takes_more_than_the_plan_says(pools: Worlds, method: str) -> None:
    options = {"ns_dtype": torch.float32, "ns_method": method, "ns_coefficients": "polar_express"}
    answers = pools.run(4, _peaks_of_layout, "one large among small", options)
    assert_within_bounds(answers)


def test_buckets_that_are_passed_over_do_not_raise_the_peak(pools: Worlds) -> None:
    options = {"ns_dtype": torch.float32}
    assert_within_bounds(pools.run(4, _peaks_of_layout, "one large among small", options, 2))


def _peaks_with_statistics(name: str) -> list[tuple[int, int, int]]:
    with mock.patch.dict(RULES, {"muon": RowScaled()}):
        return _peaks_of_layout(name, {"ns_dtype": torch.float32})


def test_row_statistics_are_in_the_bound(pools: Worlds) -> None:
    assert_within_bounds(pools.run(4, _peaks_with_statistics, "two sharded axes"))


def _peak_of_vectors(count: int) -> tuple[int, int, int]:
    """As `_measured`, for an AdamW part of float32 tensors of WHOLE bytes on each rank."""
    mesh = world_mesh()

    def values() -> list[torch.Tensor]:
        shape = (SIDE * mesh.size(), SIDE)
        return [grids.placed(torch.ones(shape), "0", mesh) for _ in range(count)]

    params = [nn.Parameter(value) for value in values()]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    optimizer = shardmuon.Muon([{"params": named, "algorithm": "adamw"}])

    def gradients(step: int) -> None:
        for p, gradient in zip(params, values(), strict=True):
            p.grad = gradient * (step + 1)

    peak, left, bound = _measured(optimizer, gradients)
    assert bound == 0
    return peak, left, count


def test_adamw_on_many_tensors_takes_the_memory_of_two(pools: Worlds) -> None:
    for peak, left, count in pools.run(2, _peak_of_vectors, 200):
        assert peak <= 2 * WHOLE + 100 * count
        assert left == 0
