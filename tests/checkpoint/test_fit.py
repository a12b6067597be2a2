"""What a checkpoint does not fit is refused on all ranks, with every bit and setting as before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardmuon.checkpoint import CheckpointError
from tests import models, ranks
from tests.checkpoint.regrouped import (
    ADAMW,
    EARLY,
    LATE,
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
    settings,
    train,
    trained,
)
from tests.conftest import Worlds
from tests.problems import digest


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
