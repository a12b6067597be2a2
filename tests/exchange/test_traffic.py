"""What a step sends: how many collectives, how many bytes, and what never communicates."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import shardmuon
from shardmuon.exchange import collectives
from tests import ranks
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, Problem, build, set_gradients, solve, whole, world_mesh

MODEL = ((10, 8), (5, 7), (64, 24), (18, 48), (33, 17), (1, 64))


def problem_of(placement: str, exchange: str, bucket_bytes: int) -> Problem:
    settings: dict[str, Any] = {"exchange": exchange, "bucket_bytes": bucket_bytes}
    runtime = shardmuon.Runtime(deterministic=True, **settings)
    # The first step also compares plans; the second is like all later ones.
    return Problem(shapes=MODEL, placements=(placement,), runtime=runtime, steps=2)


def _calls(problem: Problem) -> tuple[int, dict[str, int], int, int]:
    """Buckets, our own count by kind, stats' count and torch's count for the second step."""
    mesh = world_mesh()
    params, optimizer = build(problem, mesh)
    set_gradients(params, problem, 0, mesh)
    optimizer.step()
    set_gradients(params, problem, 1, mesh)
    before = Counter(collectives.calls)
    with CommDebugMode() as mode:
        optimizer.step()
    counted = dict(collectives.calls - before)
    return (
        len(optimizer.plan.buckets),
        counted,
        optimizer.stats.collectives,
        mode.get_total_counts(),
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_of_a_step(
    pools: Worlds, placement: str, bucket_bytes: int, world: int
) -> None:
    for exchange in ("auto", "all_gather"):
        problem = problem_of(placement, exchange, bucket_bytes)
        for buckets, counted, reported, seen in pools.run(world, _calls, problem):
            assert counted.pop("all_reduce") == 1
            if exchange == "all_gather" or placement == "replicate":
                assert set(counted) == {"all_gather"}
                assert counted["all_gather"] <= 2 * buckets
            else:
                assert set(counted) == {"all_to_all"}
                assert counted["all_to_all"] <= 2 * buckets
            total = sum(counted.values()) + 1
            assert reported == total
            assert seen == total


def test_one_rank_makes_no_collective(pools: Worlds) -> None:
    _, counted, reported, seen = pools.run(1, _calls, problem_of("rows", "auto", 2**26))[0]
    assert (sum(counted.values()), reported, seen) == (0, 0, 0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("exchange", ["auto", "all_gather"])
@pytest.mark.parametrize("bucket_bytes", [4000, 2**26])
def test_bytes_are_those_that_the_plan_predicts(
    pools: Worlds, placement: str, exchange: Literal["auto", "all_gather"], bucket_bytes: int
) -> None:
    outcomes = pools.run(3, solve, problem_of(placement, exchange, bucket_bytes))
    for rank, outcome in enumerate(outcomes):
        assert outcome.bytes_sent == outcome.planned_sent[rank]
        assert outcome.bytes_received == outcome.planned_received[rank]
    sent = sum(o.bytes_sent for o in outcomes)
    assert sent == sum(o.bytes_received for o in outcomes) > 0


def test_owner_exchange_moves_each_foreign_block_twice(pools: Worlds) -> None:
    outcomes = pools.run(4, solve, problem_of("rows", "auto", 2**26))
    blocks = 0  # elements that their owner does not hold
    for index, (rows, cols) in enumerate(MODEL):
        owner = outcomes[0].owners[f"layer{index}.weight"]
        piece = -(-rows // 4)
        held = max(0, min(rows, piece * (owner + 1)) - piece * owner)
        blocks += (rows - held) * cols
    wire_bytes = 2 if ranks.backend() == "nccl" else 4  # bf16 on GPUs, float32 on CPUs
    assert sum(o.bytes_sent for o in outcomes) == 2 * wire_bytes * blocks
    gathered = pools.run(4, solve, problem_of("rows", "all_gather", 2**26))
    assert sum(o.bytes_sent for o in gathered) > sum(o.bytes_sent for o in outcomes)


def _everything_without_others() -> int:
    """Rank 0 alone reads, plans and loads; then all ranks step."""
    mesh = world_mesh()
    problem = problem_of("rows", "auto", 2**26)
    params, optimizer = build(problem, mesh)
    before = sum(collectives.calls.values())
    if dist.get_rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
        print(optimizer.plan.report(), optimizer.stats)
    made = sum(collectives.calls.values()) - before
    set_gradients(params, problem, 0, mesh)
    optimizer.step()
    return made


def test_reading_planning_and_loading_need_no_other_rank(pools: Worlds) -> None:
    assert pools.run(2, _everything_without_others) == [0, 0]


def _add_group_alone() -> str:
    mesh = world_mesh()
    problem = problem_of("rows", "auto", 2**26)
    params, optimizer = build(problem, mesh)
    extra = torch.nn.Parameter(torch.ones(3, 3))
    if dist.get_rank() == 0:
        shardmuon.Muon([torch.nn.Parameter(torch.ones(3, 3))]).add_param_group({"params": [extra]})
    set_gradients(params, problem, 0, mesh)
    optimizer.prepare()
    optimizer.step()
    return str(whole(params[0]).sum())


def test_adding_a_group_needs_no_other_rank(pools: Worlds) -> None:
    first, second = pools.run(2, _add_group_alone)
    assert first == second


def _leftovers() -> bool:
    """A reader right after the step sees finished values: no handle is outstanding."""
    mesh = world_mesh()
    problem = problem_of("rows", "auto", 1)
    params, optimizer = build(problem, mesh)
    equal = True
    for step in range(10):
        set_gradients(params, problem, step, mesh)
        optimizer.step()
        early = [whole(p) for p in params]
        dist.barrier()
        equal &= all(e.equal(whole(p)) for e, p in zip(early, params, strict=True))
    return equal


def test_values_are_final_when_step_returns(pools: Worlds) -> None:
    assert all(pools.run(3, _leftovers))
