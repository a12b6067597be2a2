"""Conversion refuses what does not fit, by name and with nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from shardmuon.checkpoint.convert import from_torch, to_torch
from shardmuon.groups import ALGORITHMS, MUON
from tests import models
from tests.checkpoint.torch_pair import (
    LATE,
    Edit,
    everything,
    filled,
    forms,
    ours,
    parts,
    theirs,
    train,
    trained,
)


def rename(state: dict[str, Any], old: str, new: str) -> None:
    for group in state["param_groups"]:
        group["param_names"] = [new if name == old else name for name in group["param_names"]]


def in_groups(state: dict[str, Any], **keys: Any) -> None:
    for group in state["param_groups"]:
        group.update(keys)


def without(state: dict[str, Any], key: str) -> None:
    for group in state["param_groups"]:
        del group[key]


MATRIX, TABLE = "blocks.1.up.weight", "lm_head.weight"

REFUSED: dict[str, tuple[str, Edit, str]] = {
    "missing and unexpected": (
        "muon",
        lambda s: rename(s, MATRIX, "other"),
        f"muon_state lacks {MATRIX} and has unexpected or repeated other",
    ),
    "twice": (
        "muon",
        lambda s: rename(s, MATRIX, "spare.proj.weight"),
        "unexpected or repeated spare.proj.weight",
    ),
    "of the other algorithm": ("muon", lambda s: rename(s, MATRIX, TABLE), f"unexpected.*{TABLE}"),
    "many": (
        "adamw",
        lambda s: s["param_groups"].append(
            {"params": [*range(90, 100)], "param_names": [f"x{n}" for n in range(10)]}
        ),
        "adamw_state has unexpected or repeated x0, x1, x2, x3, x4, x5, x6, x7 and 2 more$",
    ),
    "names of a part": (
        "muon",
        lambda s: s["param_groups"][0].pop("param_names"),
        "unexpected or repeated one without a name",
    ),
    "too few names": ("muon", lambda s: s["param_groups"][0]["param_names"].pop(), "2 names"),
    "too few without names": (
        "muon",
        lambda s: s.update(state={}, param_groups=[{"params": [0, 1]}]),
        r"muon_state has 2 parameters \(without names\), the optimizer 5",
    ),
    "state of nobody": ("muon", lambda s: s["state"].update({99: {}}), "in no group: 99"),
    "shape": (
        "muon",
        lambda s: s["state"][0].update(momentum_buffer=torch.zeros(8, 18)),
        rf"{MATRIX} momentum_buffer has shape \(8, 18\), expected \(18, 8\)",
    ),
    "vector's shape": (
        "adamw",
        lambda s: s["state"][3].update(exp_avg=torch.zeros(1)),
        r"exp_avg has shape \(1,\), expected",
    ),
    "not a tensor": (
        "muon",
        lambda s: s["state"][0].update(momentum_buffer=None),
        f"{MATRIX} momentum_buffer must be a floating-point tensor, got NoneType",
    ),
    "quantized": (
        "adamw",
        lambda s: s["state"][0].update(exp_avg=torch.zeros(11, 8, dtype=torch.int8)),
        "must be a floating-point tensor, got torch.int8",
    ),
    "step": (
        "adamw",
        lambda s: s["state"][0].update(step=None),
        f"{TABLE} step must be one number",
    ),
    "steps": (
        "adamw",
        lambda s: s["state"][0].update(step=torch.zeros(2)),
        f"{TABLE} step must be one number",
    ),
    "missing state": (
        "adamw",
        lambda s: s["state"][0].pop("exp_avg"),
        rf"{TABLE} has state \['exp_avg_sq', 'step'\], expected",
    ),
    "unknown state": ("muon", lambda s: s["state"][0].update(x=1), f"{MATRIX} has state.*'x'"),
    "amsgrad": ("adamw", lambda s: in_groups(s, amsgrad=True), f"{TABLE} has amsgrad=True"),
    "maximize": ("adamw", lambda s: in_groups(s, maximize=True), f"{TABLE} has maximize=True"),
    "Adam": (
        "adamw",
        lambda s: in_groups(s, decoupled_weight_decay=False),
        f"{TABLE} has decoupled_weight_decay=False",
    ),
    "SGD": (
        "muon",
        lambda s: without(s, "ns_coefficients"),
        rf"{MATRIX} is in a group with .*, not that of torch\.optim\.Muon",
    ),
    "out of range": (
        "muon",
        lambda s: in_groups(s, momentum=1.5),
        rf"muon_state: {MATRIX}: momentum must be a number in \[0, 1\), got 1.5",
    ),
    "structure": (
        "muon",
        lambda s: in_groups(s, split_sizes=[9, 9]),
        rf"{MATRIX} has split_sizes=\[9, 9\], its group here None",
    ),
    "algorithm": ("adamw", lambda s: in_groups(s, algorithm="muon"), "algorithm='muon'"),
    "another dict": (
        "muon",
        lambda s: s.update({MATRIX: s.pop("param_groups")}, state=0),
        "muon_state is not an optimizer's state dict: it has the key 'state'",
    ),
    "nothing": ("muon", lambda s: s.clear(), "muon_state has 0 parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_from_torch_refuses_and_changes_nothing(case: str) -> None:
    which, edit, text = REFUSED[case]
    model, pair = trained(steps=1)
    optimizer = filled(model)
    before = everything(model, optimizer)
    muon, adamw = forms(model, pair, "named")
    edit(muon if which == "muon" else adamw)
    with pytest.raises(ValueError, match=text):
        from_torch(model, optimizer, muon, adamw)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [("lr", 0.5, 0.25), ("ns_steps", 4, 5), ("initial_lr", 1.0, None)],
)
@pytest.mark.parametrize("form", ["named", "nested", "flat"])
def test_two_values_for_one_group_are_refused(form: str, key: str, one: Any, other: Any) -> None:
    model = models.make()
    pair = theirs(model)
    groups: list[dict[str, Any]] = [{"params": [each]} for each in parts(model)[0][1]]
    groups += [{"params": parts(model)[2][1]}]
    muon = torch.optim.Muon(groups)
    for group in muon.param_groups[1:]:
        group[key] = one
    muon.param_groups[0].update({} if other is None else {key: other})
    train(model, [muon, pair[1]], range(1))
    optimizer = filled(model)
    before = everything(model, optimizer)
    there = "'absent'" if other is None else other
    text = f"{key} is {there} for {LATE[0]} and {one} for {LATE[1]}"
    with pytest.raises(ValueError, match=text):
        from_torch(model, optimizer, *forms(model, (muon, pair[1]), form))
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("muon", "rest", "text"),
    [
        ({"algorithm": "normuon"}, {}, r"blocks\.0\.up\.weight has algorithm='normuon'"),
        ({}, {"algorithm": "lion"}, r"embed_tokens\.weight has algorithm='lion'"),
    ],
)
def test_rules_that_torch_does_not_have_are_refused_and_change_nothing(
    muon: dict[str, Any], rest: dict[str, Any], text: str
) -> None:
    model, pair = trained(steps=1)
    optimizer = shardmuon.Muon(shardmuon.param_groups(model, muon=muon, adamw=rest))
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=text):
        to_torch(model, optimizer)
    states = forms(model, pair, "named")
    for given in (states, [states[0], None], [None, states[1]], [None, None]):
        with pytest.raises(ValueError, match=text):
            from_torch(model, optimizer, *given)
    assert everything(model, optimizer) == before


def test_swapped_states_are_refused() -> None:
    model, pair = trained(steps=1)
    optimizer = filled(model)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="muon_state lacks"):
        from_torch(model, optimizer, *reversed(forms(model, pair, "named")))
    assert everything(model, optimizer) == before
    holder = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 3))})
    other = torch.optim.AdamW(holder.named_parameters())
    with pytest.raises(
        ValueError, match=r"w is in a group with .*, not that of torch\.optim\.Muon"
    ):
        from_torch(holder, shardmuon.Muon(holder.named_parameters()), other.state_dict())


def test_the_model_must_hold_the_parameters() -> None:
    model, pair = trained(steps=1)
    optimizer = ours(model)
    states = forms(model, pair, "named")
    other = models.make()
    with pytest.raises(ValueError, match=r"the model does not have these .*: blocks\.0\.down"):
        from_torch(other, optimizer, *states)
    with pytest.raises(ValueError, match="the model does not have these"):
        to_torch(other, ours(model, named=False))


def test_names_must_be_unique_without_their_wrappers() -> None:
    inner = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, 2))})
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, 2))})
    model.add_module("module", inner)
    optimizer = shardmuon.Muon([("a", model["a"])])
    with pytest.raises(ValueError, match="two parameters of the name a"):
        to_torch(model, optimizer)


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [
        ("split_sizes", [2, 4], (6, 4)),
        ("num_heads", 3, (6, 4)),
        ("transposed", True, (6, 4)),
        ("flatten", True, (6, 2, 2)),
        ("stack", None, (2, 6, 4)),
        ("ns_coefficients", "polar_express", (6, 4)),
        ("ns_coefficients", [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)] * 3, (6, 4)),
        ("eps", None, (6, 4)),
        ("adjust_lr_fn", "spectral", (6, 4)),
        ("cautious_weight_decay", True, (6, 4)),
    ],
)
def test_to_torch_refuses_what_torch_cannot_express(
    key: str, value: Any, shape: tuple[int, ...]
) -> None:
    model = nn.ParameterDict({"odd": nn.Parameter(torch.ones(shape))})
    structure = {key: value} if key in ALGORITHMS[MUON].keys else {}
    optimizer = shardmuon.Muon([{"params": list(model.named_parameters()), **structure}])
    with pytest.raises(ValueError, match=f"odd .*{key}.*torch.optim.Muon"):
        to_torch(model, optimizer)


def test_to_torch_refuses_cautious_decay_of_adamw_too() -> None:
    model = nn.ParameterDict({"odd": nn.Parameter(torch.ones(3))})
    group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
    optimizer = shardmuon.Muon([{**group, "cautious_weight_decay": True}])
    with pytest.raises(ValueError, match=r"odd .*cautious_weight_decay=True.*torch\.optim\.AdamW"):
        to_torch(model, optimizer)
    optimizer.param_groups[0]["cautious_weight_decay"] = False
    _, adamw = to_torch(model, optimizer)
    assert adamw is not None
    assert "cautious_weight_decay" not in adamw["param_groups"][0]


def test_to_torch_spells_out_a_preset_of_one_triple() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3, 3))})
    optimizer = shardmuon.Muon(list(model.named_parameters()), ns_coefficients="cubic")
    muon, _ = to_torch(model, optimizer)
    assert muon is not None
    assert muon["param_groups"][0]["ns_coefficients"] == (1.5, -0.5, 0.0)
    assert "ns_method" not in muon["param_groups"][0]
