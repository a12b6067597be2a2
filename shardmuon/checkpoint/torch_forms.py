"""The forms that torch gives to optimizer state, and what of them fits one of our groups.

Owns the reading of state dicts of `torch.optim.Muon` and `torch.optim.AdamW`: who is in them, which
settings a group of ours may take, and which part of a tensor this rank holds. Changes nothing and
never communicates. Everything that does not fit is a ValueError; `label` says in which file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import StateDict

from shardmuon.checkpoint.contents import some
from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import layout_of, local
from shardmuon.groups import (
    ADAMW,
    MUON,
    OTHER_RULES,
    STRUCTURAL_KEYS,
    check_keys,
    check_settings,
    clean_fqn,
    plain,
)
from shardmuon.limits import show

__all__ = ["OURS", "Saved", "match", "own_part", "read", "settings_for", "split"]

OURS = (
    *STRUCTURAL_KEYS,
    *("ns_dtype", "ns_method", "momentum_dtype", "cautious_weight_decay", "mesh"),
    *("step", "momentum_warmup", "momentum_start", "ns_period", "ns_block"),
)
"""Group keys that torch does not have: neither written nor taken."""
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Not taken either: who is in the group, and by which kernel torch computes."""
_CLASSES = {MUON: ("ns_coefficients", "torch.optim.Muon"), ADAMW: ("betas", "torch.optim.AdamW")}
"""A group key by which a class is known. SGD too has a `momentum_buffer`, but it holds a sum."""


class Saved(NamedTuple):
    """What a file says of one parameter: its name or None, its group's settings, its state."""

    name: str | None
    settings: Mapping[str, Any]
    state: Mapping[str, Any]


def read(label: str, file: StateDict) -> list[Saved]:
    """The parameters of a file, in its order: `state_dict()`, or by FQN nested or flattened."""
    if not isinstance(file, Mapping):
        raise ValueError(f"{label} is not an optimizer's state dict, but {show(file)}")
    if "param_groups" not in file:
        file = _nest(label, file)
    states, groups = _sections(label, file)
    saved = []
    for group in groups:
        keys = group["params"]
        names = keys if all(isinstance(key, str) for key in keys) else group.get("param_names")
        if names is not None and not _are_texts(names):
            raise ValueError(f"{label} has a group with param_names={show(names)}")
        if names is not None and len(names) != len(keys):
            raise ValueError(f"{label} has a group of {len(keys)} parameters, {len(names)} names")
        settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
        for name, key in zip(names or [None] * len(keys), keys, strict=True):
            saved.append(Saved(name, settings, states.pop(key, {})))
    if states:
        raise ValueError(f"{label} has state of parameters in no group: {some(states)}")
    return saved


def _sections(label: str, file: StateDict) -> tuple[dict[Any, Any], list[Mapping[str, Any]]]:
    """(state, groups) of a file that has the form of one."""
    states, groups = file.get("state"), file["param_groups"]
    if not isinstance(states, Mapping) or not isinstance(groups, list | tuple):
        raise ValueError(f"{label} needs a dict of state and a list of param_groups")
    for key, state in states.items():
        if not isinstance(state, Mapping) or not all(isinstance(kind, str) for kind in state):
            raise ValueError(f"{label} has no dict as state of {show(key)}")
    for group in groups:
        keys = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(keys, list | tuple) or not all(isinstance(k, int | str) for k in keys):
            raise ValueError(f"{label} has a group without a list of params: {show(group)}")
        if not all(isinstance(key, str) for key in group):
            raise ValueError(f"{label} has a group with a key that is no text: {show(group)}")
    return dict(states), list(groups)


def _are_texts(names: object) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _nest(label: str, file: StateDict) -> StateDict:
    """The nested form of keys `state.<fqn>.<key>` and `param_groups.<fqn>.<key>`.

    Only the FQN has dots.
    """
    sections: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for text, value in file.items():
        section, _, rest = str(text).partition(".")
        fqn, _, key = rest.rpartition(".")
        if section not in sections or not fqn:
            raise ValueError(f"{label} is not an optimizer's state dict: it has the key {text!r}")
        sections[section].setdefault(fqn, {})[key] = value
    groups = [{**keys, "params": [fqn]} for fqn, keys in sections["param_groups"].items()]
    return {"state": sections["state"], "param_groups": groups}


def split(saved: Sequence[Saved], algorithm: str) -> list[Saved]:
    """Of a file of both optimizers, the parameters of one."""
    key = _CLASSES[ADAMW][0]
    return [each for each in saved if (key in each.settings) == (algorithm == ADAMW)]


def match(
    label: str, saved: Sequence[Saved], named: Mapping[str, Tensor], fqns: Mapping[Tensor, str]
) -> dict[Tensor, Saved]:
    """What the file says of each of our parameters: by name, or by order if it has no names.

    named: the model's parameters, tied ones under each name. fqns: those to be loaded, in order.
    """
    if all(each.name is None for each in saved):
        if len(saved) != len(fqns):
            raise ValueError(
                f"{label} has {len(saved)} parameters (without names), the optimizer {len(fqns)}"
            )
        return dict(zip(fqns, saved, strict=True))
    matched: dict[Tensor, Saved] = {}
    unexpected = []
    for each in saved:
        parameter = named.get(clean_fqn(each.name or ""))
        if parameter is None or parameter not in fqns or parameter in matched:
            unexpected.append(each.name or "one without a name")
        else:
            matched[parameter] = each
    missing = [fqn for parameter, fqn in fqns.items() if parameter not in matched]
    problems = (("lacks", missing), ("has unexpected or repeated", unexpected))
    text = " and ".join(f"{verb} {some(names)}" for verb, names in problems if names)
    if text:
        raise ValueError(f"{label} {text}")
    return matched


def settings_for(
    label: str, group: Mapping[str, Any], fqns: Sequence[str], saved: Sequence[Saved]
) -> dict[str, Any]:
    """What `group`, whose parameters are `fqns`, takes from the torch groups of `saved`."""
    theirs = saved[0].settings
    for fqn, each in zip(fqns, saved, strict=True):
        for key in sorted(theirs.keys() | each.settings.keys()):
            one, other = (plain(s.get(key, "absent")) for s in (theirs, each.settings))
            if one != other:
                raise ValueError(
                    f"{label}: {key} is {one!r} for {fqns[0]} and {other!r} for {fqn}, which are in"
                    " one group here"
                )
    _check_rule(f"{label}: {fqns[0]}", group, theirs)
    dropped = (*OURS, *OTHER_RULES)
    settings = {key: copy.deepcopy(v) for key, v in theirs.items() if key not in dropped}
    try:
        check_keys(settings, group["algorithm"])
        check_settings({**group, **settings})
    except ValueError as error:
        raise ValueError(f"{label}: {fqns[0]}: {error}") from None
    return settings


def _check_rule(name: str, group: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse another class's group, another rule, and matrices that are cut otherwise."""
    key, class_name = _CLASSES[group["algorithm"]]
    if key not in theirs:
        raise ValueError(f"{name} is in a group with {sorted(theirs)}, not that of {class_name}")
    for key, value in OTHER_RULES.items():
        if isinstance(theirs.get(key), int) and bool(theirs[key]) is value:
            raise ValueError(f"{name} has {key}={value}, which is not supported")
    for key in STRUCTURAL_KEYS:
        if key in theirs and plain(theirs[key]) != plain(group.get(key)):
            raise ValueError(f"{name} has {key}={theirs[key]!r}, its group here {group.get(key)!r}")


def own_part(name: str, parameter: Tensor, value: Any) -> Tensor:
    """What this rank holds of `value`, state of the shape of `parameter`. Shares memory.

    value: plain and whole, or a DTensor placed like `parameter`.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {kind}")
    if value.shape != parameter.shape:
        shapes = f"{tuple(value.shape)}, expected {tuple(parameter.shape)}"
        raise ValueError(f"{name} has shape {shapes}")
    if value.layout != torch.strided or value.is_meta != parameter.is_meta:
        raise ValueError(f"{name} is {value.layout} on {value.device}")
    if isinstance(value, DTensor):
        theirs, ours = (
            (t.placements, t.device_mesh) if isinstance(t, DTensor) else "a plain tensor"
            for t in (value, parameter)
        )
        if theirs != ours:
            raise ValueError(f"{name} is placed as {theirs}, the parameter as {ours}")
        return local(value)
    if not isinstance(parameter, DTensor):
        return value.detach()
    layout = layout_of(name, parameter, None)
    box = layout.box(parameter.shape, layout.mesh.coordinates[collectives.rank()])
    return value.detach()[tuple(slice(start, stop) for start, stop in box)]
