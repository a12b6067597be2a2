"""Momentum that rises in the first steps, against the formula and against momentum set by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardmuon
from tests import reference
from tests.conftest import Worlds
from tests.grids import Grid, Weight, check, solve_alone
from tests.reference import Rule, relative_error

WARMUP = {"momentum_warmup": 4, "momentum_start": 0.5}
RISING = (0.5, 0.6, 0.7, 0.8, 0.9, 0.9)
"""Momentum of steps 0, 1, ... that ends at 0.9."""


def _optimizer(**keys: Any) -> tuple[nn.Parameter, shardmuon.Muon]:
    p = nn.Parameter(torch.from_numpy(reference.weights(10, 8)).float())
    return p, shardmuon.Muon([{"params": [p], "momentum": 0.9, "lr": 0.02, **keys}])


def _train(p: nn.Parameter, optimizer: shardmuon.Muon, steps: range) -> None:
    for step in steps:
        p.grad = torch.from_numpy(reference.gradient(10, 8, step)).float()
        optimizer.step()


def test_it_follows_the_formula() -> None:
    p, optimizer = _optimizer(**WARMUP)
    right, m = reference.weights(10, 8), np.zeros((10, 8))
    for step, momentum in enumerate(RISING):
        _train(p, optimizer, range(step, step + 1))
        right, m = Rule(momentum=momentum).step(right, m, reference.gradient(10, 8, step))
        assert relative_error(p.detach().numpy(), right) < 1e-4
        assert relative_error(optimizer.state[p]["momentum_buffer"].numpy(), m) < 1e-4


def test_it_is_momentum_set_by_hand_to_the_bit() -> None:
    p, optimizer = _optimizer(**WARMUP)
    other, by_hand = _optimizer()
    for step in range(len(RISING)):
        by_hand.param_groups[0]["momentum"] = 0.5 + (0.9 - 0.5) * (step / 4) if step < 4 else 0.9
        _train(p, optimizer, range(step, step + 1))
        _train(other, by_hand, range(step, step + 1))
        assert torch.equal(p, other)


def test_a_loaded_run_goes_on_where_it_was() -> None:
    p, optimizer = _optimizer(**WARMUP)
    _train(p, optimizer, range(2))
    twin, loaded = _optimizer(**WARMUP)
    twin.data.copy_(p.data)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((p, optimizer), (twin, loaded)):
        _train(each, its, range(2, 5))
    assert torch.equal(p, twin)


def test_a_refused_step_is_not_counted() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = shardmuon.Muon([p], runtime=shardmuon.Runtime(nonfinite="skip"))
    for value, counted in ((torch.inf, 0), (1.0, 1), (torch.nan, 1)):
        p.grad = torch.full((3, 4), value)
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == counted


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_bits_of_one_process(pools: Worlds, world: int) -> None:
    weights = tuple(Weight(shape=(10, 7), letters=each, keys=WARMUP) for each in "01R")
    grid = Grid(mesh=(world,), weights=weights, steps=5)
    (right,) = pools.run(1, solve_alone, [grid])
    assert [answer.fault for (answer,) in pools.run(world, check, [grid], right)] == [""] * world


@pytest.mark.parametrize(("key", "value"), [("momentum_warmup", -1), ("momentum_start", 1.0)])
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        _optimizer(**{key: value})
