"""Checkpoints load by name into groups that are built otherwise; what does not fit changes nothing.

Without ranks, except where wrappers or a verdict of all ranks are the subject.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardmuon
from shardmuon.checkpoint import Checkpointer, CheckpointError
from tests import models, ranks
from tests.conftest import Worlds
from tests.exchange.test_changing_groups import Tied
from tests.problems import assert_ranks_agree, digest, local, world_mesh

EARLY, LATE = models.MATRICES[:2], models.MATRICES[2:]
TABLES = ["embed_tokens.weight", "lm_head.weight"]
VECTORS = [n for n, p in models.make().named_parameters() if p.ndim == 1]
ADAMW: dict[str, Any] = {"algorithm": "adamw"}
RUNTIME = shardmuon.Runtime(deterministic=True)

Part = tuple[Sequence[str], dict[str, Any]]
WHOLE: list[Part] = [
    (models.MATRICES, {"lr": 0.02, "momentum": 0.9}),
    ([*TABLES, *VECTORS], {**ADAMW, "lr": 0.01, "betas": (0.8, 0.9)}),
]


def muon(model: nn.Module, parts: Sequence[Part], **options: Any) -> shardmuon.Muon:
    """An optimizer whose groups hold the parameters of these names, without names of their own."""
    named = dict(model.named_parameters())
    groups = [{**keys, "params": [named[name] for name in names]} for names, keys in parts]
    return shardmuon.Muon(groups, runtime=RUNTIME, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.spread_gradients(model, step)
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hash of this rank's part of every tensor, by name."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, p in model.named_parameters():
        tensors.update({f"{name}.{k}": v for k, v in optimizer.state.get(p, {}).items()})
    return {name: digest([local(tensor)]) for name, tensor in tensors.items()}


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All group keys but which tensors they are for."""
    left = ("params", "param_names")
    return [{k: v for k, v in g.items() if k not in left} for g in optimizer.param_groups]


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    keeper = Checkpointer(folder)
    path = keeper.save(1, model, optimizer)
    keeper.close()
    return path


def load(path: Path, *pair: Any, **options: Any) -> dict[str, Any]:
    keeper = Checkpointer(path.parent)
    try:
        return keeper.load(path, *pair, **options)
    finally:
        keeper.close()


def trained(parts: Sequence[Part] = WHOLE, **options: Any) -> tuple[models.Net, shardmuon.Muon]:
    model = models.make()
    optimizer = muon(model, parts, **options)
    train(model, optimizer, range(2))
    return model, optimizer


def fresh(parts: Sequence[Part] = WHOLE, **options: Any) -> tuple[models.Net, shardmuon.Muon]:
    model = models.make(seed=1)
    return model, muon(model, parts, **options)


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


# -- what does not fit ----------------------------------------------------------------------------


class Wider(models.Net):
    """Names as saved, one matrix of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.spare["proj"] = nn.Linear(8, 6, bias=False)


class Renamed(models.Net):
    """One name more and one less than saved."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.lm_head
        del self.lm_head


OTHER: dict[str, tuple[type[models.Net], list[Part], str]] = {
    "shape": (
        Wider,
        WHOLE,
        r"model.spare.proj.weight has shape \(5, 8\) in it, \(6, 8\) here",
    ),
    "names": (
        Renamed,
        [WHOLE[0], (["embed_tokens.weight", "head.weight", *VECTORS], ADAMW)],
        r"it does not fit; missing: model.head.weight; unexpected: model.lm_head.weight",
    ),
    "algorithm": (
        models.Net,
        [(EARLY, {}), (LATE + TABLES + VECTORS, ADAMW)],
        r"blocks.1.up.weight has algorithm='muon' in it, 'adamw' here",
    ),
    "cut": (
        models.Net,
        [(LATE + EARLY[1:], {}), (EARLY[:1], {"split_sizes": (9, 9)}), WHOLE[1]],
        r"blocks.0.up.weight has split_sizes=None in it, \[9, 9\] here",
    ),
}


def _refused(path: str, make: type[models.Net], parts: list[Part]) -> str:
    """The message; everything must be as before, and no state made that there was not."""
    with torch.random.fork_rng(devices=[]):
        model = make().to(ranks.device())
    model.embed_tokens.weight.requires_grad_(False)
    optimizer = muon(model, parts)
    for value in (value for state in optimizer.state.values() for value in state.values()):
        value.fill_(3)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    before = bits(model, optimizer), repr(settings(optimizer)), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError) as caught:
        load(Path(path), model, optimizer)
    after = bits(model, optimizer), repr(settings(optimizer)), torch.get_rng_state().tolist()
    assert after == before
    return str(caught.value)


@pytest.mark.parametrize(("make", "parts", "message"), OTHER.values(), ids=list(OTHER))
def test_what_does_not_fit_is_refused_with_nothing_changed(
    shared_folder: str, make: type[models.Net], parts: list[Part], message: str
) -> None:
    path = save(shared_folder, *trained())
    assert re.search(message, _refused(str(path), make, parts))


def _refused_on_one_rank(path: str) -> list[str]:
    fits = dist.get_rank() == 0
    return [
        _refused(path, models.Net if fits else make, WHOLE if fits else parts)
        for make, parts, _ in OTHER.values()
    ]


def test_what_does_not_fit_on_one_rank_is_refused_on_all(pools: Worlds, shared_folder: str) -> None:
    path = save(shared_folder, *trained())
    for errors in pools.run(2, _refused_on_one_rank, str(path)):
        for error, (*_, message) in zip(errors, OTHER.values(), strict=True):
            assert re.search(f"rank 1: .*{message}", error)


class Colliding(nn.Module):
    """Two parameters that have one name once the wrappers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.weight = nn.Parameter(torch.ones(3))


def test_names_that_wrappers_make_equal_are_refused(shared_folder: str) -> None:
    with pytest.raises(CheckpointError, match="two tensors of the model have the name weight"):
        save(shared_folder, Colliding())


# -- what a checkpoint holds ----------------------------------------------------------------------


def test_weights_only(shared_folder: str) -> None:
    model, optimizer = trained()
    path = save(shared_folder, model)
    other, again = fresh()
    before = bits(other, again)
    with pytest.raises(CheckpointError, match="holds no optimizer state; load it without"):
        load(path, other, again)
    assert bits(other, again) == before
    load(path, other)
    train(other, again, range(2))
    start = models.make()
    start.load_state_dict(model.state_dict())
    right = muon(start, WHOLE)
    train(start, right, range(2))
    assert bits(other, again) == bits(start, right)
    full = save(shared_folder, model, optimizer)
    last, untouched = fresh()
    load(full, last)
    assert bits(last, untouched).items() >= {
        (name, digest([value])) for name, value in model.state_dict().items()
    }
    assert not any(value.any() for state in untouched.state.values() for value in state.values())


@pytest.mark.parametrize("kind", ["muon", "adamw", "both"])
def test_each_kind_of_state_by_itself(shared_folder: str, kind: str) -> None:
    every = models.MATRICES + TABLES + VECTORS
    keys = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
    kinds: dict[str, list[Part]] = {
        "muon": WHOLE[:1],
        "adamw": [(every, ADAMW)],
        "both": WHOLE,
    }
    parts = kinds[kind]
    model, optimizer = trained(parts)
    path = save(shared_folder, model, optimizer)
    other, again = fresh(parts)
    load(path, other, again)
    assert bits(other, again) == bits(model, optimizer)
    for group in again.param_groups:
        assert all(again.state[p].keys() == keys[group["algorithm"]] for p in group["params"])
    for pair in ((model, optimizer), (other, again)):
        train(*pair, range(2, 3))
    assert bits(other, again) == bits(model, optimizer)


# -- torch's optimizers ---------------------------------------------------------------------------


def adamw(seed: int = 0, lr: float = 0.01) -> tuple[models.Net, torch.optim.AdamW]:
    model = models.make(seed)
    return model, torch.optim.AdamW(model.named_parameters(), lr=lr)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("moment", ["new", "gradients", "some state", "all state"])
def test_adamw_of_torch_goes_on(shared_folder: str, steps: int, moment: str) -> None:
    model, optimizer = adamw()
    train(model, optimizer, range(steps))
    path = save(shared_folder, model, optimizer)
    other, again = adamw(1, lr=0.9)
    if moment != "new":
        models.spread_gradients(other, 7)
    if moment.endswith("state"):
        other.spare_weight.grad = other.spare_weight.grad if moment == "all state" else None
        again.step()
    gradients = [p.grad for p in other.parameters()]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load(path, other, again)
    told = [str(each.message) for each in seen if "starts anew" in str(each.message)]
    assert len(told) == len(seen) == int(steps == 0 and moment.endswith("state"))
    assert all(p.grad is g for p, g in zip(other.parameters(), gradients, strict=True))
    if not told:
        assert bits(other, again) == bits(model, optimizer)
    for pair in ((model, optimizer), (other, again)):
        train(*pair, range(steps, steps + 2))
    assert bits(other, again) == bits(model, optimizer)


def test_adamw_of_torch_without_some_gradients_goes_on(shared_folder: str) -> None:
    model, optimizer = adamw()
    models.backward(model, 0)  # forward leaves one matrix out
    optimizer.step()
    other, again = adamw(1)
    load(save(shared_folder, model, optimizer), other, again)
    assert other.spare_weight not in again.state
    for pair in ((model, optimizer), (other, again)):
        train(*pair, range(1, 3))
    assert bits(other, again) == bits(model, optimizer)


def test_a_refused_load_leaves_no_state_in_adamw_of_torch(shared_folder: str) -> None:
    model, optimizer = adamw()
    train(model, optimizer, range(2))
    path = save(shared_folder, model, optimizer)
    other = Wider()
    again = torch.optim.AdamW(other.parameters())
    before = bits(other, again)
    with pytest.raises(CheckpointError, match=r"shape \(5, 8\) in it, \(6, 8\) here"):
        load(path, other, again)
    assert not again.state
    assert bits(other, again) == before


# -- names ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """What `torch.compile` makes of a model, as far as names go."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def _wrapped(folder: str) -> list[list[str]]:
    """Save under DDP; load under DDP of a compiled model, and of one with a compiled block."""
    answers: list[list[str]] = []
    path = None
    for wrap in ("nothing", "model", "block"):
        model = models.make(seed=len(answers)).to(ranks.device())
        optimizer = muon(model, WHOLE, mesh=world_mesh())
        if wrap == "block":
            model.blocks[1] = Wrapped(model.blocks[1])
        outer = DistributedDataParallel(Wrapped(model) if wrap == "model" else model)
        if path is None:
            train(model, optimizer, range(2))
            path = save(folder, outer, optimizer)
        else:
            load(path, outer, optimizer)
        train(model, optimizer, range(2, 3))
        assert_ranks_agree(list(model.parameters()))
        answers.append(list(bits(model, optimizer).values()))
    return answers


def test_wrapped_models_are_known_by_their_own_names(pools: Worlds, shared_folder: str) -> None:
    for first, *others in pools.run(2, _wrapped, shared_folder):
        assert others == [first, first]


def _tied(folder: str) -> tuple[list[dict[str, str]], list[bool], dict[str, str]]:
    answers, tied, aliases = [], [], {}
    path = None
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Tied().to(ranks.device())
        fully_shard(model, mesh=world_mesh())
        optimizer = models.optimizer_of(model)
        if path is None:
            train(model, optimizer, range(2))
            path = save(folder, model, optimizer)
        else:
            aliases = load(path, model, optimizer)["aliases"]
        tied.append(model.lm_head.weight is model.embed.weight)
        train(model, optimizer, range(2, 3))
        tied.append(model.lm_head.weight is model.embed.weight)
        answers.append(bits(model, optimizer))
    return answers, tied, aliases


def test_tied_weights_are_saved_once_and_stay_tied(pools: Worlds, shared_folder: str) -> None:
    for (saved, loaded), tied, aliases in pools.run(2, _tied, shared_folder):
        assert saved == loaded
        assert all(tied)
        assert aliases == {"lm_head.weight": "embed.weight"}
