"""Checkpoints load by name into groups that are built otherwise; schedules and freezing go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardmuon.checkpoint import Checkpointer, CheckpointError
from tests import models
from tests.checkpoint.regrouped import (
    ADAMW,
    EARLY,
    LATE,
    TABLES,
    VECTORS,
    WHOLE,
    Part,
    bits,
    fresh,
    load,
    muon,
    save,
    settings,
    train,
    trained,
)

# -- groups that are built otherwise --------------------------------------------------------------

SPLIT: list[Part] = [
    (VECTORS[::-1], {**ADAMW, "lr": 0.5}),
    (LATE[::-1], {}),
    (TABLES, ADAMW),
    (EARLY, {"lr": 0.7}),
]


def test_split_and_merged_groups_take_the_settings_of_their_parameters(shared_folder: str) -> None:
    model, optimizer = trained()
    other, split = fresh(SPLIT)
    load(save(shared_folder, model, optimizer), other, split)
    assert bits(other, split) == bits(model, optimizer)
    table, matrix = settings(optimizer)[1], settings(optimizer)[0]
    assert settings(split) == [table, matrix, table, matrix]
    last, merged = fresh([(keys, values) for keys, values in WHOLE[::-1]])
    load(save(shared_folder, other, split), last, merged)
    assert settings(merged) == [table, matrix]
    for pair in ((model, optimizer), (other, split), (last, merged)):
        train(*pair, range(2, 4))
    assert bits(model, optimizer) == bits(other, split) == bits(last, merged)


def test_a_group_cannot_take_two_settings(shared_folder: str) -> None:
    rest = (TABLES + VECTORS, ADAMW)
    parts: list[Part] = [(EARLY, {"lr": 0.02}), (LATE, {"lr": 0.03}), rest]
    model, optimizer = trained(parts)
    path = save(shared_folder, model, optimizer)
    other, merged = fresh(
        [(models.MATRICES, {"lr": 0.7}), (TABLES + VECTORS, {**ADAMW, "lr": 0.5})]
    )
    before = bits(other, merged), settings(merged)
    with pytest.raises(CheckpointError, match=r"group 0 .* lr was 0\.02 for blocks.0.up.* 0\.03"):
        load(path, other, merged)
    assert (bits(other, merged), settings(merged)) == before
    load(path, other, merged, settings=False)
    assert bits(other, merged) == bits(model, optimizer)
    counted = merged.param_groups[0]["step"], optimizer.param_groups[0]["step"]
    assert counted[0] == counted[1] > 0  # how far training has come is no setting
    merged.param_groups[0]["step"] = 0
    assert settings(merged) == before[1]


def test_empty_groups_keep_their_settings(shared_folder: str) -> None:
    def parts(lr: float) -> list[Part]:
        return [
            (models.MATRICES, {"lr": lr, "momentum": 0.9, "ns_steps": 4, "adjust_lr_fn": None}),
            ([], {"lr": 2 * lr, "ns_steps": 3}),
            ([*TABLES, *VECTORS], {**ADAMW, "lr": 1e-3}),
            ([], {**ADAMW, "lr": lr / 4, "betas": (0.5, 0.5)}),
        ]

    model, optimizer = trained(parts(0.02))
    path = save(shared_folder, model, optimizer)
    other, again = fresh(parts(0.4))
    load(path, other, again)
    assert settings(again) == settings(optimizer)
    last, moved = fresh([*parts(0.4)[::-1], ([], {**ADAMW, "lr": 0.3})])
    load(path, last, moved)
    assert settings(moved)[:4] == settings(optimizer)[::-1]
    assert settings(moved)[4]["lr"] == 0.3
    for pair in ((model, optimizer), (other, again), (last, moved)):
        train(*pair, range(2, 3))
    assert bits(model, optimizer) == bits(other, again) == bits(last, moved)


def test_keys_that_others_add_are_carried_and_new_ones_stay(shared_folder: str) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0].update(initial_lr=0.1, tag="hidden", span=(1, [2, None], True))
    del optimizer.param_groups[1]["eps"]
    other, again = fresh()
    again.param_groups[0]["since"] = 7
    load(save(shared_folder, model, optimizer), other, again)
    assert settings(again)[0] == {**settings(optimizer)[0], "since": 7}
    assert settings(again)[1] == {**settings(optimizer)[1], "eps": 1e-8}
    again.param_groups[0]["tag"] = object()
    with pytest.raises(CheckpointError, match="setting tag=<object"):
        save(shared_folder, other, again)


def test_what_tensors_are_made_by_does_not_come_from_a_checkpoint(shared_folder: str) -> None:
    model, optimizer = trained(momentum_dtype=torch.bfloat16)
    path = save(shared_folder, model, optimizer)
    other, again = fresh()
    with pytest.warns(UserWarning, match="cast while loading: .*bfloat16 to torch.float32"):
        load(path, other, again)
    assert again.param_groups[0]["momentum_dtype"] is None
    weights = [dict(each.named_parameters())[EARLY[0]] for each in (other, model)]
    found, saved = again.state[weights[0]], optimizer.state[weights[1]]
    assert found["momentum_buffer"].equal(saved["momentum_buffer"].float())
    half = models.make(seed=2).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="cast while loading: model.*float32 to torch.bfloat16"):
        load(path, half)
    assert half.lm_head.weight.equal(model.lm_head.weight.bfloat16())


# -- learning rates -------------------------------------------------------------------------------


def _factor(step: int) -> float:
    """Warm-up over 3 steps, then a cosine over 10."""
    angle = torch.tensor(torch.pi * min(step - 3, 10) / 10, dtype=torch.float64)
    return (step + 1) / 4 if step < 3 else float(1 + torch.cos(angle)) / 2


def _sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])


def _rates(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range
) -> list[list[float]]:
    """lr of every group in each of `steps`."""
    rates = []
    for step in steps:
        rates.append([group["lr"] for group in optimizer.param_groups])
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["built again", "loaded"])
def test_schedules_go_on(shared_folder: str, kind: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer, done: int) -> Any:
        if kind == "loaded":
            return _sequence(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _factor, last_epoch=done - 1)

    model = models.make()
    optimizer = muon(model, WHOLE)
    scheduler = schedule(optimizer, 0)
    _rates(model, optimizer, scheduler, range(4))
    keeper = Checkpointer(shared_folder)
    path = keeper.save(4, model, optimizer, {"scheduler": scheduler.state_dict()})
    right = _rates(model, optimizer, scheduler, range(4, 10))
    assert len({tuple(rates) for rates in right}) == 6
    other, again = fresh([(names, {**keys, "lr": 0.9}) for names, keys in WHOLE])
    if kind == "loaded":  # its constructor sets lr, so it comes before the optimizer's settings
        scheduler = schedule(again, 0)
        scheduler.load_state_dict(keeper.load(path, other, again)["scheduler"])
    else:
        keeper.load(path, other, again)
        scheduler = schedule(again, 4)
    assert _rates(other, again, scheduler, range(4, 10)) == right
    keeper.close()


@pytest.mark.parametrize("kind", ["muon", "AdamW"])
def test_a_tensor_lr_stays_the_same_tensor(shared_folder: str, kind: str) -> None:
    def build(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        rate = torch.tensor(lr)
        if kind == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=rate)
        return muon(model, [(names, {**keys, "lr": rate}) for names, keys in WHOLE])

    model, other = models.make(), models.make(seed=1)
    optimizer, again = build(model, 0.25), build(other, 0.5)
    train(model, optimizer, range(2))
    rates = [group["lr"] for group in again.param_groups]
    load(save(shared_folder, model, optimizer), other, again)
    assert all(group["lr"] is r for group, r in zip(again.param_groups, rates, strict=True))
    assert {float(rate) for rate in rates} == {0.25}
    for pair in ((model, optimizer), (other, again)):
        train(*pair, range(2, 3))
    assert bits(model, optimizer) == bits(other, again)


def test_groups_that_share_a_tensor_lr_part_if_they_must(shared_folder: str) -> None:
    model, optimizer = trained()  # 0.02 and 0.01
    shared = torch.tensor(0.5)
    other, again = fresh([(names, {**keys, "lr": shared}) for names, keys in WHOLE])
    load(save(shared_folder, model, optimizer), other, again)
    rates = [group["lr"] for group in again.param_groups]
    assert [float(rate) for rate in rates] == [pytest.approx(0.02), pytest.approx(0.01)]
    assert rates[1] is shared


# -- parameters frozen and thawed -----------------------------------------------------------------


FREEZABLE = ["spare.proj.weight", "blocks.1.up.bias"]


def _freeze(model: models.Net, frozen: bool) -> None:
    for name in FREEZABLE:
        model.get_parameter(name).requires_grad_(not frozen)


def test_parameters_frozen_since_keep_their_state(shared_folder: str) -> None:
    model, optimizer = trained()
    _freeze(model, True)
    other = models.make(seed=1)
    _freeze(other, True)
    again = muon(other, WHOLE)
    assert other.spare_weight not in again.state
    load(save(shared_folder, model, optimizer), other, again)
    assert again.state[other.spare_weight]["momentum_buffer"].any()
    assert bits(other, again) == bits(model, optimizer)
    for each, own in ((model, optimizer), (other, again)):
        _freeze(each, False)
        train(each, own, range(2, 3))
    assert bits(other, again) == bits(model, optimizer)


def test_parameters_thawed_since_start_anew(shared_folder: str) -> None:
    model = models.make()
    _freeze(model, True)
    optimizer = muon(model, WHOLE)
    models.spread_gradients(model, 0)
    optimizer.step()
    other, again = fresh()
    train(other, again, range(1))  # anew is not what this has left
    with pytest.warns(UserWarning, match=r"starts anew: .*spare.proj.weight.momentum_buffer"):
        load(save(shared_folder, model, optimizer), other, again)
    for name in FREEZABLE:
        state = again.state[other.get_parameter(name)]
        assert not any(value.any() for value in state.values())
    _freeze(model, False)
    for pair in ((model, optimizer), (other, again)):
        train(*pair, range(1, 2))
    assert bits(other, again) == bits(model, optimizer)


def test_state_of_parameters_that_are_not_optimized_now_is_left(shared_folder: str) -> None:
    model, optimizer = trained()
    other, again = fresh([(LATE, {}), WHOLE[1]])
    with pytest.warns(UserWarning, match=r"does not hold: optimizer.blocks.0.down.weight.mom"):
        load(save(shared_folder, model, optimizer), other, again)
    saved, found = bits(model, optimizer), bits(other, again)
    assert saved.keys() - found.keys() == {f"{name}.momentum_buffer" for name in EARLY}
    assert found.items() <= saved.items()
