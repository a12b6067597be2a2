"""Checkpoints of either algorithm, of torch's own AdamW, and of models that are wrapped or tied."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import models, ranks
from tests.checkpoint.regrouped import (
    ADAMW,
    TABLES,
    VECTORS,
    WHOLE,
    Part,
    adamw,
    bits,
    fresh,
    load,
    muon,
    save,
    train,
    trained,
)
from tests.conftest import Worlds
from tests.exchange.test_changing_groups import Tied
from tests.problems import assert_ranks_agree, world_mesh


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
