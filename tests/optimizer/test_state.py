"""State on one process: made at construction, kept by parameter, copied and loaded like torch's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardmuon
from tests import models
from tests.problems import digest

ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = []
    for p in model.parameters():
        tensors += [p.detach(), *(v for _, v in sorted(optimizer.state[p].items()))]
    return digest(tensors)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.spread_gradients(model, step)
        optimizer.step()


def test_state_exists_from_construction() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        assert set(state) == ({"momentum_buffer"} if name in models.MATRICES else ADAMW_STATE)
        for key, value in state.items():
            assert value.shape == (() if key == "step" else p.shape)
            assert not value.any()
            assert not value.requires_grad
    assert all(optimizer.state[p]["step"].dtype == torch.float32 for p in [model.lm_head.weight])


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_dtype_is_configured_or_that_of_the_parameter(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None
) -> None:
    p = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    optimizer = shardmuon.Muon([p], momentum_dtype=momentum_dtype)
    for step in range(2):
        assert optimizer.state[p]["momentum_buffer"].dtype == (momentum_dtype or dtype)
        p.grad = torch.full_like(p, 0.1 * (step + 1))
        optimizer.step()


def test_float32_momentum_of_bfloat16_parameters_survives_loading() -> None:
    model = nn.Sequential(nn.Linear(5, 4, bias=False)).to(torch.bfloat16)
    optimizer = shardmuon.Muon(model.named_parameters(), momentum_dtype=torch.float32)
    train(model, optimizer, range(3))
    other = copy.deepcopy(model)
    fresh = shardmuon.Muon(other.named_parameters(), momentum_dtype=torch.float32)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fingerprint(other, fresh) == fingerprint(model, optimizer)
    train(model, optimizer, range(3, 5))
    train(other, fresh, range(3, 5))
    assert fingerprint(other, fresh) == fingerprint(model, optimizer)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_model_and_optimizer_continue_alike(way: str) -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    train(model, optimizer, range(2))
    pair: Any = (model, optimizer)
    if way == "deepcopy":
        twin, twin_optimizer = copy.deepcopy(pair)
    elif way == "pickle":
        twin, twin_optimizer = pickle.loads(pickle.dumps(pair))
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        twin, twin_optimizer = torch.load(file, weights_only=False)
    assert fingerprint(twin, twin_optimizer) == fingerprint(model, optimizer)
    before = fingerprint(model, optimizer)
    train(twin, twin_optimizer, range(2, 4))
    assert fingerprint(model, optimizer) == before, "the copy shares tensors with the original"
    train(model, optimizer, range(2, 4))
    assert fingerprint(twin, twin_optimizer) == fingerprint(model, optimizer)
    assert twin_optimizer.plan.digest == optimizer.plan.digest


def test_state_dict_has_the_form_of_torch() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    count = len(list(model.parameters()))
    assert sorted(saved["state"]) == list(range(count))
    assert sorted(i for g in saved["param_groups"] for i in g["params"]) == list(range(count))
    assert "runtime" not in repr(saved["param_groups"]).lower()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    optimizer.load_state_dict(loaded)


@pytest.mark.parametrize("keyword", [True, False])
def test_loading_continues_bit_by_bit(keyword: bool) -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    fresh = models.optimizer_of(twin)
    if keyword:
        fresh.load_state_dict(state_dict=saved)
    else:
        fresh.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    train(twin, fresh, range(3, 5))
    assert fingerprint(twin, fresh) == fingerprint(model, optimizer)


def test_settings_come_from_the_file_but_not_what_a_group_is() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    saved = shardmuon.Muon([p], lr=0.5, momentum=0.5, ns_steps=3).state_dict()
    optimizer = shardmuon.Muon([p], lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(saved))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["ns_steps"]) == (0.5, 0.5, 3)
    adamw = shardmuon.Muon([{"params": [p], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="algorithm"):
        adamw.load_state_dict(copy.deepcopy(saved))
    assert adamw.param_groups[0]["algorithm"] == "adamw"
    assert set(adamw.state[p]) == ADAMW_STATE


def test_other_number_of_parameters_is_refused_and_nothing_changes() -> None:
    p, q = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5, 4))
    saved = shardmuon.Muon([p, q]).state_dict()
    optimizer = shardmuon.Muon([p], lr=0.3)
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_flat_and_nested_forms_load_without_ranks() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin = copy.deepcopy(model)
    fresh = models.optimizer_of(twin)
    set_optimizer_state_dict(twin, fresh, saved)
    assert fingerprint(twin, fresh) == fingerprint(model, optimizer)


def test_state_dict_after_a_backward_without_step_is_complete() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    models.backward(model, 0)
    gradients = [p.grad for p in model.parameters()]
    before = fingerprint(model, optimizer)
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert fingerprint(model, optimizer) == before
    assert all(g is p.grad for g, p in zip(gradients, model.parameters(), strict=True))


def test_replaced_tensors_get_new_state_and_old_ones_are_let_go() -> None:
    old, new = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = shardmuon.Muon([("w", old)])
    optimizer.param_groups[0]["params"][0] = new
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0]
    assert set(optimizer.state) == {new}
    new.grad = torch.ones_like(new)
    optimizer.step()
    assert not new.eq(1).all()
    assert old.eq(1).all()


def test_replacing_a_tensor_that_has_been_stepped_is_an_error() -> None:
    old, new = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer = shardmuon.Muon([("w", old)])
    old.grad = torch.ones_like(old)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = new
    with pytest.raises(RuntimeError):
        optimizer.state_dict()


def test_hidden_step_of_frameworks_is_harmless() -> None:
    model = models.make()
    optimizer = models.optimizer_of(model)
    optimizer.state.clear()
    before = digest([p.detach() for p in model.parameters()])
    get_optimizer_state_dict(model, optimizer)
    assert digest([p.detach() for p in model.parameters()]) == before
    train(model, optimizer, range(1))
    assert digest([p.detach() for p in model.parameters()]) != before
