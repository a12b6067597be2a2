"""State dicts through torch's own functions: taken at any moment, loaded into other groups.

tests/optimizer/test_state.py and tests/exchange/test_saved_state.py have equal groups and training
that goes on; here are groups that are built otherwise, and what taking a state dict may touch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardmuon
from shardmuon.exchange import collectives
from tests import models, ranks
from tests.checkpoint.regrouped import ADAMW, EARLY, LATE, RUNTIME, Part, bits, settings, train
from tests.conftest import Worlds
from tests.grids import random
from tests.problems import digest, local, world_mesh

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()

OTHERS = [name for name, _ in models.make().named_parameters() if name not in models.MATRICES]

WHOLE: list[Part] = [
    (models.MATRICES, {"lr": 0.02, "momentum": 0.9}),
    (OTHERS, {**ADAMW, "lr": 0.01, "betas": (0.8, 0.9)}),
]
EMPTY: Part = ([], {**ADAMW, "lr": 0.3})


def muon(model: nn.Module, parts: Sequence[Part], named: bool = True) -> shardmuon.Muon:
    """An optimizer whose groups hold the parameters of these names."""
    params = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for names, keys in parts:
        group = {**keys, "params": [params[name] for name in names]}
        groups.append({**group, "param_names": list(names)} if named else group)
    return shardmuon.Muon(groups, runtime=RUNTIME)


def without_settings(parts: Sequence[Part]) -> list[Part]:
    """The same groups before a state dict has brought their settings."""
    return [(names, ADAMW if "algorithm" in keys else {}) for names, keys in parts]


Pair = tuple[models.Net, shardmuon.Muon]


def pair_of(parts: Sequence[Part], named: bool = True) -> Pair:
    model = models.make()
    return model, muon(model, parts, named)


def moved(source: Pair, target: Pair, options: StateDictOptions) -> None:
    """Weights and, by torch's functions, optimizer state."""
    taken = copy.deepcopy(get_optimizer_state_dict(*source, options=options))
    set_optimizer_state_dict(*target, taken, options=options)
    target[0].load_state_dict(source[0].state_dict())


# -- groups that are built otherwise --------------------------------------------------------------

SPLIT: list[Part] = [(OTHERS[3:], ADAMW), (LATE[::-1], {}), (OTHERS[:3], ADAMW), (EARLY, {})]
REORDERED: list[Part] = [(OTHERS[::-1], ADAMW), (models.MATRICES[::-1], {})]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("parts", [SPLIT, REORDERED], ids=["split", "reordered"])
def test_the_flat_form_loads_into_groups_that_are_built_otherwise(
    parts: list[Part], named: bool
) -> None:
    source, target = pair_of(WHOLE, named), pair_of(parts, named)
    train(*source, range(2))
    moved(source, target, FLAT)
    by_name = {
        name: {**group, "params": None}
        for (names, _), group in zip(WHOLE, settings(source[1]), strict=True)
        for name in names
    }
    for (names, _), group in zip(parts, settings(target[1]), strict=True):
        assert {**group, "params": None} == by_name[names[0]]
    assert bits(*target) == bits(*source)
    back = pair_of(without_settings(WHOLE), named)
    moved(target, back, FLAT)
    assert settings(back[1]) == settings(source[1])
    for pair in (source, target, back):
        train(*pair, range(2, 4))
    assert bits(*source) == bits(*target) == bits(*back)


@pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])
def test_loading_leaves_the_names_of_the_parameters(options: StateDictOptions) -> None:
    parts = REORDERED[::-1]
    source, target = pair_of(WHOLE), pair_of(parts)
    train(*source, range(1))
    moved(source, target, options)
    assert [group["param_names"] for group in target[1].param_groups] == [p[0] for p in parts]
    assert set(target[1].plan.owners()) == set(models.MATRICES)
    assert bits(*target) == bits(*source)
    unnamed = pair_of(parts, named=False)
    moved(source, unnamed, options)
    assert not any("param_names" in group for group in unnamed[1].param_groups)
    for pair in (source, target, unnamed):
        train(*pair, range(1, 2))
    assert bits(*source) == bits(*target) == bits(*unnamed)


def test_an_empty_group_keeps_its_settings_in_the_nested_form() -> None:
    source, target = pair_of([*WHOLE, EMPTY]), pair_of(without_settings([*WHOLE, EMPTY]))
    train(*source, range(2))
    moved(source, target, NESTED)
    assert settings(target[1]) == settings(source[1])
    assert settings(target[1])[2]["lr"] == 0.3
    for pair in (source, target):
        train(*pair, range(2, 3))
    assert bits(*source) == bits(*target)


def refusals() -> dict[str, tuple[list[Part], list[Part], StateDictOptions, str]]:
    """(groups saved, groups here, form, message)."""
    split_matrices = without_settings([(EARLY, {}), (LATE, {}), WHOLE[1]])
    split_others = without_settings([WHOLE[0], (OTHERS[:3], ADAMW), (OTHERS[3:], ADAMW)])
    empty = without_settings([*WHOLE, EMPTY])
    lost = r"no settings for group {}: torch cannot split .*flatten_optimizer_state_dict=True"
    return {
        "split muon": (WHOLE, split_matrices, NESTED, lost.format(0)),
        "split adamw": (WHOLE, split_others, NESTED, lost.format(1)),
        "another algorithm": (WHOLE, [(OTHERS, ADAMW), (models.MATRICES, ADAMW)], NESTED, "alg"),
        "empty group, nested": (WHOLE, empty, NESTED, "zero parameters"),
        # torch looks for the settings of a group under the name of its first parameter.
        "empty group, flat": (WHOLE, empty, FLAT, "list index out of range"),
        "missing, nested": ([(EARLY, {}), WHOLE[1]], WHOLE, NESTED, "blocks.1.up.weight"),
        "missing, flat": (
            [(EARLY, {}), WHOLE[1]],
            WHOLE,
            FLAT,
            "no momentum_buffer of blocks.1.up.weight",
        ),
    }


@pytest.mark.parametrize("what", refusals())
def test_what_torch_cannot_move_is_refused_with_nothing_changed(what: str) -> None:
    saved, here, options, message = refusals()[what]
    source, target = pair_of(saved), pair_of(here)
    train(*source, range(2))
    train(*target, range(1))
    taken = copy.deepcopy(get_optimizer_state_dict(*source, options=options))
    before = bits(*target), settings(target[1])
    with pytest.raises((ValueError, IndexError, KeyError, RuntimeError), match=message):
        set_optimizer_state_dict(*target, taken, options=options)
    assert (bits(*target), settings(target[1])) == before
    train(*target, range(1, 2))


def test_state_of_another_shape_is_refused_with_nothing_changed() -> None:
    model, optimizer = pair_of(WHOLE)
    train(model, optimizer, range(1))
    for key, kind in ((0, "momentum_buffer"), (7, "exp_avg_sq")):
        taken = copy.deepcopy(optimizer.state_dict())
        taken["state"][key][kind] = torch.ones(3, 5)
        before = bits(model, optimizer)
        with pytest.raises(ValueError, match=rf"{kind} of .* has shape \(3, 5\) in the state dict"):
            optimizer.load_state_dict(taken)
        assert bits(model, optimizer) == before


# -- taking one changes nothing -------------------------------------------------------------------


def _takers(model: nn.Module, optimizer: shardmuon.Muon) -> list[Callable[[], Any]]:
    """Every way to take a state dict that needs no other rank."""
    return [
        optimizer.state_dict,
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_optimizer_state_dict(model, optimizer, options=FLAT),
    ]


def _count_tensors(taken: dict[str, Any]) -> int:
    """Tensors of state in either form."""
    if "state" in taken:
        return sum(
            isinstance(v, Tensor) for entry in taken["state"].values() for v in entry.values()
        )
    return sum(key.startswith("state.") for key in taken)


def _take_on_one_rank() -> list[str]:
    """Before the first step, between backward and step, and while training; on rank 1 alone."""
    faults: list[str] = []
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    expected = len(models.MATRICES) + 3 * len(OTHERS)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    def take(moment: str) -> None:
        if dist.get_rank() == 0:
            return
        gradients = [(p.grad, None if p.grad is None else digest([local(p.grad)])) for p in every]
        before = bits(model, optimizer), settings(optimizer), len(steps), dict(collectives.calls)
        for taker in _takers(model, optimizer):
            if _count_tensors(taker()) != expected:
                faults.append(f"{moment}: state is not complete")
        after = bits(model, optimizer), settings(optimizer), len(steps), dict(collectives.calls)
        if after != before:
            faults.append(f"{moment}: something changed")
        if any(
            p.grad is not g or (g is not None and digest([local(g)]) != h)
            for p, (g, h) in zip(every, gradients, strict=True)
        ):
            faults.append(f"{moment}: gradients changed")

    every = list(model.parameters())
    take("new")
    for step in range(2):
        models.backward(model, step)
        take(f"after backward {step}")
        optimizer.step()
        take(f"after step {step}")
    model.zero_grad()
    take("without gradients")
    if len(steps) != 4:
        faults.append(f"{len(steps)} hooks of steps ran")
    return faults


def test_one_rank_takes_state_dicts_at_any_moment(pools: Worlds) -> None:
    assert pools.run(2, _take_on_one_rank) == [[], []]


def _flat_with_meshes() -> list[bool]:
    """The flat form of groups that name a mesh, into groups cut otherwise."""

    def build(cut: int, lr: float) -> tuple[nn.ParameterDict, shardmuon.Muon]:
        weights = [nn.Parameter(random((6, 4), index).to(ranks.device())) for index in range(3)]
        parts = [part for part in (weights[cut:], weights[:cut]) if part]
        groups = [{"params": part, "mesh": world_mesh()} for part in parts]
        holder = nn.ParameterDict({f"w{index}": p for index, p in enumerate(weights)})
        return holder, shardmuon.Muon(groups, lr=lr, runtime=RUNTIME)

    source, target = build(0, 0.02), build(2, 0.5)
    train(*source, range(2))
    set_optimizer_state_dict(
        *target, copy.deepcopy(get_optimizer_state_dict(*source, options=FLAT)), options=FLAT
    )
    target[0].load_state_dict(source[0].state_dict())
    for pair in (source, target):
        train(*pair, range(2, 3))
    meshes = [group["mesh"] for _, each in (source, target) for group in each.param_groups]
    return [bits(*source) == bits(*target), meshes == [world_mesh()] * 3]


def test_the_flat_form_loads_into_groups_with_a_mesh(pools: Worlds) -> None:
    assert pools.run(2, _flat_with_meshes) == [[True, True]] * 2
