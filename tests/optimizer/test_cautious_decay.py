"""Cautious weight decay on one process: against the float64 reference, its mask, and its refusals.

Where an update turns its sign by rounding, an element decays or not; the matrices here have no
update that small, so float32 agrees with float64 as it does under plain decay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmuon
from shardmuon.rules import ELEMENT_RULES, ElementShard
from shardmuon.rules.base import Commit, Shard, opposed
from shardmuon.rules.muon import MuonRule
from shardmuon.state import new_state
from tests import reference
from tests.problems import SHAPES, Problem, digest, solve_alone
from tests.reference import AdamW, Rule, relative_error

CAUTIOUS: dict[str, Any] = {"cautious_weight_decay": True}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensor(array: reference.Array) -> Tensor:
    return torch.from_numpy(array).float()


def under_adamw(steps: int, dtype: torch.dtype = torch.float32, **keys: Any) -> list[Tensor]:
    """Parameters of SHAPES, a vector and a scalar after `steps`."""
    params = [nn.Parameter(tensor(reference.weights(*shape)).to(dtype)) for shape in SHAPES]
    params += [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.tensor(2.0).to(dtype))]
    optimizer = shardmuon.Muon([{"params": params, "algorithm": "adamw", **keys}])
    for step in range(steps):
        for p in params:
            rows, cols = (p.shape[0], p.shape[1]) if p.ndim == 2 else (1, p.numel())
            p.grad = tensor(reference.gradient(rows, cols, step)).view(p.shape).to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.1, 3.0])
def test_muon_follows_the_reference(nesterov: bool, weight_decay: float) -> None:
    keys: dict[str, Any] = {"lr": 0.05, "nesterov": nesterov, "weight_decay": weight_decay}
    outcome = solve_alone(Problem(steps=5, options={**keys, **CAUTIOUS}))
    for shape, p in zip(SHAPES, outcome.params, strict=True):
        right, _ = Rule(**keys, cautious=True).golden(*shape, steps=5)
        plain, _ = Rule(**keys).golden(*shape, steps=5)
        assert relative_error(p, right) < 1e-4
        assert relative_error(plain, right) > 1e-2 * weight_decay


def test_adamw_follows_the_reference() -> None:
    keys: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.5}
    results = under_adamw(5, **keys, **CAUTIOUS)
    for shape, p in zip(SHAPES, results, strict=False):
        given = [reference.gradient(*shape, t) for t in range(5)]
        right, plain = (
            AdamW(**keys, cautious=cautious).run(reference.weights(*shape), given)
            for cautious in (True, False)
        )
        assert relative_error(p, right) < 1e-5
        assert relative_error(plain, right) > 1e-2


def test_the_reference_without_the_mask_is_torchs_adamw() -> None:
    keys: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.5}
    p = nn.Parameter(torch.from_numpy(reference.weights(10, 8)))
    optimizer = torch.optim.AdamW([p], **keys)
    given = [reference.gradient(10, 8, t) for t in range(5)]
    for g in given:
        p.grad = torch.from_numpy(g)
        optimizer.step()
    right = AdamW(**keys).run(reference.weights(10, 8), given)
    assert relative_error(p.detach().numpy(), right) < 1e-12


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_decay_it_is_off_to_the_bit(dtype: torch.dtype) -> None:
    keys: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0}
    one, other = (under_adamw(3, dtype, **keys, **more) for more in ({}, CAUTIOUS))
    assert digest(one) == digest(other)
    one, other = (
        solve_alone(Problem(dtypes=(dtype,), options={**keys, **more})).params
        for more in ({}, CAUTIOUS)
    )
    assert digest(one) == digest(other)


def test_off_is_the_default_and_what_constructors_say_is_not_adamws() -> None:
    for keys, right in (({}, [False, False]), (CAUTIOUS, [True, False])):
        groups: list[dict[str, Any]] = [
            {"params": [nn.Parameter(torch.ones(2, 3))]},
            {"params": [nn.Parameter(torch.ones(2, 3))], "algorithm": "adamw"},
        ]
        made = shardmuon.Muon(groups, **keys).param_groups
        assert [group["cautious_weight_decay"] for group in made] == right


def test_zeros_decay_and_small_numbers_keep_their_signs() -> None:
    small = 1e-30
    update = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, small, -small])
    parameter = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 0.0, small, small])
    right = [False, True, True, False, False, False, False, True]
    assert opposed(update, parameter).tolist() == right
    assert (update * parameter)[-1] == 0  # what a product would not tell


def one_shard(dtype: torch.dtype) -> tuple[Shard, Tensor]:
    """A parameter of ones, minus ones and zeros under decay 0.5, and its update."""
    parameter = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0]]).to(dtype)
    update = torch.tensor([[1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0]])
    group = {"lr": 0.5, "weight_decay": 1.0, "adjust_lr_fn": None, **CAUTIOUS}
    return Shard(parameter, parameter, {}, group, 1, 7), update


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_muon_decays_what_the_update_moves_towards_zero(
    dtype: torch.dtype, wire: torch.dtype
) -> None:
    shard, update = one_shard(dtype)
    MuonRule().apply(shard, update.to(wire), None, Commit())
    assert shard.parameter.tolist() == [[0.0, 1.5, 0.5, -1.5, 0.0, -0.5, -0.5]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tensors", [False, True])
def test_adamw_decays_what_the_update_moves_towards_zero(dtype: torch.dtype, tensors: bool) -> None:
    """The first step of AdamW is lr times the sign of the gradient."""
    shard, update = one_shard(dtype)
    p = nn.Parameter(shard.parameter.clone())
    lr, decay = (torch.tensor(x) if tensors else x for x in (0.5, 1.0))
    keys = {"lr": lr, "weight_decay": decay, "eps": 1e-4}  # a smaller one is 0 in float16
    optimizer = shardmuon.Muon([{"params": [p], "algorithm": "adamw", **keys, **CAUTIOUS}])
    p.grad = update.to(dtype)
    optimizer.step()
    right = torch.tensor([[0.0, 1.5, 0.5, -1.5, 0.0, -0.5, -0.5]]).double()
    torch.testing.assert_close(p.detach().double(), right, atol=1e-2, rtol=0)


def test_an_update_lost_to_rounding_still_says_where_to_decay() -> None:
    """In bfloat16 a parameter of 256 does not feel a step of 0.01, but a decay of 3."""
    p = nn.Parameter(torch.tensor([256.0, 256.0], dtype=torch.bfloat16))
    keys = {"lr": 0.01, "weight_decay": 3 / 2.56}
    optimizer = shardmuon.Muon([{"params": [p], "algorithm": "adamw", **keys, **CAUTIOUS}])
    p.grad = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    optimizer.step()
    assert p.tolist() == [253.0, 256.0]


def test_where_all_decay_adamw_is_torchs_up_to_rounding() -> None:
    start = torch.rand(50, generator=torch.Generator().manual_seed(0)) + 1
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    keys: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    one = shardmuon.Muon([{"params": [ours], "algorithm": "adamw", **keys, **CAUTIOUS}])
    two = torch.optim.AdamW([theirs], **keys)
    for _ in range(5):
        for p, optimizer in ((ours, one), (theirs, two)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("taken", [True, False])
def test_a_refused_step_decays_nothing(taken: bool) -> None:
    """As on GPUs, where the word comes from the device."""
    commit = Commit(torch.tensor(taken))
    shard, update = one_shard(torch.float32)
    before = shard.parameter.clone()
    MuonRule().apply(shard, update.fill_(1.0 if taken else float("nan")), None, commit)
    assert torch.equal(shard.parameter, before) == (not taken)


@pytest.mark.parametrize("taken", [True, False])
def test_a_refused_step_of_adamw_decays_nothing(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's single-tensor AdamW knows no refusal, so that its fused one runs here, as on GPUs."""
    monkeypatch.setattr("shardmuon.rules.adamw.adamw", fused)
    p = torch.tensor([1.0, -1.0])
    state = new_state(p, {"algorithm": "adamw"})
    group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1.0, **CAUTIOUS}
    gradient = torch.tensor([1.0, 1.0 if taken else float("inf")])
    shard = ElementShard(p, gradient, state)
    ELEMENT_RULES["adamw"].step([shard], group, Commit(torch.tensor(taken)))
    right = torch.tensor([0.0, -1.5]) if taken else torch.tensor([1.0, -1.0])
    torch.testing.assert_close(p, right)
    assert float(state["step"]) == taken


def fused(*args: Any, **options: Any) -> None:
    from torch.optim.adamw import adamw

    adamw(*args, **{**options, "fused": True})


def test_settings_are_saved_and_old_files_lack_them() -> None:
    def optimizer(cautious: bool) -> shardmuon.Muon:
        groups: list[dict[str, Any]] = [
            {"params": [nn.Parameter(torch.ones(2, 3))]},
            {"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"},
        ]
        for group in groups:
            group["cautious_weight_decay"] = cautious
        return shardmuon.Muon(groups)

    ours = optimizer(False)
    saved = optimizer(True).state_dict()
    ours.load_state_dict(saved)
    assert [group["cautious_weight_decay"] for group in ours.param_groups] == [True, True]
    for group in saved["param_groups"]:
        del group["cautious_weight_decay"]
    for cautious in (False, True):
        again = optimizer(cautious)
        again.load_state_dict(saved)
        assert [g["cautious_weight_decay"] for g in again.param_groups] == [cautious] * 2
        p = again.param_groups[0]["params"][0]
        p.grad = torch.ones_like(p)
        again.param_groups[1]["params"][0].grad = torch.ones(3)
        again.step()
        assert np.isfinite(p.detach().numpy()).all()
