"""The pool of ranks itself: results, errors, hung ranks, recovery."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.conftest import Worlds


def _sum_of_ranks(offset: int) -> float:
    tensor = torch.tensor([float(dist.get_rank() + offset)], device=ranks.device())
    dist.all_reduce(tensor)
    return float(tensor)


def _raise_on(failing: tuple[int, ...]) -> int:
    if dist.get_rank() in failing:
        raise KeyError("what went wrong")
    return dist.get_rank()


def _raise_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("what went wrong")
    dist.barrier()


def _sleep_on_rank_one(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


def _warn() -> None:
    warnings.warn("careless", stacklevel=1)


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_rank_order(pools: Worlds, world: int) -> None:
    expected = float(sum(range(world)) + 10 * world)
    assert pools.run(world, _sum_of_ranks, 10) == [expected] * world
    assert pools.run(world, _raise_on, ()) == list(range(world))


def test_error_of_one_rank_reaches_the_parent_with_its_traceback(pools: Worlds) -> None:
    with pytest.raises(ranks.RankFailure, match=r"rank 1: KeyError.*\n(.*\n)*.*_raise_on") as info:
        pools.run(2, _raise_on, (1,))
    assert [error.rank for error in info.value.errors] == [1]


def test_expected_errors_are_returned_per_rank(pools: Worlds) -> None:
    errors = pools.run_expecting_error(2, _raise_on, (0, 1))
    assert [(e.rank, e.type_name) for e in errors] == [(0, "KeyError"), (1, "KeyError")]
    assert all("what went wrong" in e.message for e in errors)
    with pytest.raises(AssertionError, match=r"no error on ranks \[0\]"):
        pools.run_expecting_error(2, _raise_on, (1,))


def test_error_in_one_rank_ends_the_case_though_others_wait(pools: Worlds) -> None:
    started = time.monotonic()
    with pytest.raises(ranks.RankFailure, match="what went wrong") as info:
        pools.run(2, _raise_while_others_wait)
    assert time.monotonic() - started < 3 * ranks.GRACE_S
    assert "did not return: [0]" in str(info.value)
    assert pools.run(2, _sum_of_ranks, 0) == [1.0, 1.0]


def test_hung_rank_fails_in_time_and_shows_its_stack(pools: Worlds) -> None:
    started = time.monotonic()
    with pytest.raises(ranks.RankTimeout, match="_sleep_on_rank_one"):
        pools.run(2, _sleep_on_rank_one, 120.0, limit_s=1.0)
    assert time.monotonic() - started < 15
    assert pools.run(2, _sum_of_ranks, 0) == [1.0, 1.0]


def test_dead_rank_is_an_error(pools: Worlds) -> None:
    with pytest.raises(ranks.RankFailure, match="exit code 3"):
        pools.run(2, _die)
    assert pools.run(2, _sum_of_ranks, 0) == [1.0, 1.0]


def test_warnings_are_errors_in_ranks(pools: Worlds) -> None:
    assert [e.type_name for e in pools.run_expecting_error(1, _warn)] == ["UserWarning"]
