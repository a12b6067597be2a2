"""What a `torch.optim.Optimizer` promises: signatures, closures, hooks, schedulers, groups."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmuon
from tests import models, reference
from tests.problems import digest
from tests.reference import Rule, relative_error


def matrix(rows: int = 10, cols: int = 8) -> nn.Parameter:
    p = nn.Parameter(torch.from_numpy(reference.weights(rows, cols)).float())
    p.grad = torch.from_numpy(reference.gradient(rows, cols, 0)).float()
    return p


def test_overridden_methods_keep_the_signatures_of_the_base() -> None:
    base = torch.optim.Optimizer
    assert issubclass(shardmuon.Muon, base)
    overridden = [
        name
        for name, value in vars(shardmuon.Muon).items()
        if inspect.isfunction(value) and name != "__init__" and hasattr(base, name)
    ]
    assert "step" in overridden
    for name in overridden:
        ours = inspect.signature(getattr(shardmuon.Muon, name)).parameters.values()
        theirs = inspect.signature(getattr(base, name)).parameters.values()
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs], name


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    before = p.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float(before.square().sum()))
    assert optimizer.step(closure=closure) is not None
    assert not p.equal(before)
    assert optimizer.step() is None


def test_step_hooks_run_and_may_change_nothing_else() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    seen: list[str] = []

    def before(*_: Any) -> None:
        seen.append("pre")

    def after(*_: Any) -> None:
        seen.append("post")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.step()
    assert seen == ["pre", "post"]


def test_state_dict_hooks_run() -> None:
    optimizer = shardmuon.Muon([matrix()])
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "loaded"]


def test_zero_grad() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is not None
    assert not p.grad.any()
    optimizer.zero_grad()
    assert p.grad is None


def test_schedulers_drive_every_group() -> None:
    p, q, vector = matrix(), matrix(5, 7), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [
        {"params": [p], "lr": 0.02},
        {"params": [q], "lr": 0.04},
        {"params": [vector], "algorithm": "adamw", "lr": 0.1},
    ]
    optimizer = shardmuon.Muon(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    weight = reference.weights(10, 8)
    m = reference.gradient(10, 8, 0) * 0
    for step in range(3):
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(
            [0.02 / (1 + step), 0.04 / (1 + step), 0.1 / (1 + step)]
        )
        p.grad = torch.from_numpy(reference.gradient(10, 8, step)).float()
        weight, m = Rule(lr=0.02 / (1 + step)).step(weight, m, reference.gradient(10, 8, step))
        vector.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
    assert relative_error(p.detach(), weight) < 1e-4
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.02, 0.04, 0.1]


def test_learning_rate_may_be_a_tensor() -> None:
    p, q = matrix(), matrix()
    shardmuon.Muon([p], lr=torch.tensor(0.02)).step()
    shardmuon.Muon([q], lr=0.02).step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-7)


def test_settings_of_a_group_are_live() -> None:
    p, q = matrix(), matrix()
    ours = shardmuon.Muon([p], lr=0.1, momentum=0.5)
    ours.param_groups[0].update(lr=0.02, momentum=0.95, nesterov=False, ns_steps=4)
    ours.step()
    shardmuon.Muon([q], lr=0.02, nesterov=False, ns_steps=4).step()
    assert digest([p.detach()]) == digest([q.detach()])


def test_groups_added_later_are_stepped() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([("first", p)], lr=0.02)
    optimizer.step()
    late, vector = matrix(64, 24), nn.Parameter(torch.ones(5))
    before_plan = optimizer.plan.digest
    optimizer.add_param_group({"params": [("late", late)]})
    optimizer.add_param_group({"params": [("bias", vector)], "algorithm": "adamw"})
    assert "momentum_buffer" in optimizer.state[late]
    assert "exp_avg" in optimizer.state[vector]
    assert set(optimizer.plan.owners()) == {"first", "late"}
    assert optimizer.plan.digest != before_plan
    vector.grad = torch.ones(5)
    optimizer.step()
    right, _ = Rule().golden(64, 24, steps=1)
    assert relative_error(late.detach(), right) < 1e-4
    assert vector.lt(1).all()
    assert optimizer.param_groups[1]["lr"] == 0.02
    assert optimizer.param_groups[2]["lr"] == 1e-3


def test_group_refused_later_leaves_the_optimizer_usable() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([("first", p)])
    with pytest.raises(ValueError, match="bias"):
        optimizer.add_param_group({"params": [("bias", nn.Parameter(torch.ones(5)))]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_frozen_parameter_stays_and_thaws() -> None:
    p, q = matrix(), matrix(5, 7)
    optimizer = shardmuon.Muon([p, q])
    p.requires_grad_(False)
    p.grad = None
    frozen = p.detach().clone()
    optimizer.step()
    assert p.equal(frozen)
    p.requires_grad_(True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not p.equal(frozen)


def test_step_without_any_gradient_is_harmless() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    before = digest([p.detach() for p in model.parameters()])
    with pytest.warns(UserWarning, match="no gradient on any parameter"):
        optimizer.step()
    optimizer.step()  # said once
    assert digest([p.detach() for p in model.parameters()]) == before


def test_empty_group_is_harmless() -> None:
    p = matrix()
    groups: list[dict[str, Any]] = [
        {"params": [p]},
        {"params": [], "algorithm": "adamw", "lr": 5e-4},
        {"params": [], "momentum": 0.5},
    ]
    optimizer = shardmuon.Muon(groups)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 5e-4, 1e-3]
    assert optimizer.param_groups[2]["momentum"] == 0.5


def test_step_runs_without_autograd() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    optimizer.step()
    assert p.is_leaf
    assert p.requires_grad
    assert torch.is_grad_enabled()


def test_matrices_that_share_one_gradient_pattern_of_many_dtypes() -> None:
    params = [nn.Parameter(torch.ones(4, 6).to(t)) for t in (torch.float32, torch.bfloat16)]
    optimizer = shardmuon.Muon(params, lr=0.1)
    for p in params:
        p.grad = torch.from_numpy(reference.gradient(4, 6, 0)).to(p.dtype)
    optimizer.step()
    difference: Tensor = params[0].detach() - params[1].detach().float()
    assert float(difference.abs().max()) < 0.02


def test_dropped_optimizer_frees_its_parameters() -> None:
    p = matrix()
    optimizer = shardmuon.Muon([p])
    optimizer.step()
    ghost = weakref.ref(p)
    del p, optimizer
    gc.collect()
    assert ghost() is None


def test_repr_names_the_settings() -> None:
    text = repr(shardmuon.Muon([matrix()], lr=0.25))
    assert "Muon" in text
    assert "0.25" in text


def test_nothing_left_to_train_is_harmless() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = shardmuon.Muon([p])
    p.requires_grad_(False)
    for _ in range(2):  # with a new plan, and with a known one
        optimizer.step()
    assert p.eq(1).all()
