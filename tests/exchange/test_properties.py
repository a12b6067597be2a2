"""Random shapes, dtypes, placements, worlds and bucket sizes: the bits of a single rank."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardmuon
from tests import ranks
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, Problem, match, solve

WORLDS = [w for w in (2, 3, 4) if ranks.backend() == "gloo" or w <= ranks.capacity()] or [2]
SIDES = st.one_of(st.integers(1, 9), st.integers(10, 40))
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    shapes = draw(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=7))
    options: dict[str, Any] = {
        "lr": 0.02,
        "nesterov": draw(st.booleans()),
        "adjust_lr_fn": draw(st.sampled_from([None, "match_rms_adamw"])),
        "ns_dtype": torch.float32,
    }
    return Problem(
        shapes=shapes,
        dtypes=draw(st.lists(DTYPES, min_size=1, max_size=3)),
        placements=draw(st.lists(st.sampled_from(sorted(PLACEMENTS)), min_size=1, max_size=3)),
        steps=2,
        seed=draw(st.integers(0, 1000)),
        options=options,
        runtime=shardmuon.Runtime(
            deterministic=True,
            exchange=draw(st.sampled_from(["auto", "all_gather"])),
            bucket_bytes=draw(st.sampled_from([1, 500, 5000, 2**26])),
        ),
    )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(problem=problems(), world=st.sampled_from(WORLDS))
def test_any_layout_gives_the_bits_of_one_rank(pools: Worlds, problem: Problem, world: int) -> None:
    one = pools.run(1, solve, problem)[0]
    many = pools.run(world, solve, problem)
    assert match(many[0], one)
    assert sum(o.orthogonalized[-1] for o in many) == len(problem.shapes)
    for rank, outcome in enumerate(many):
        assert outcome.bytes_sent == outcome.planned_sent[rank]
        assert outcome.bytes_received == outcome.planned_received[rank]
