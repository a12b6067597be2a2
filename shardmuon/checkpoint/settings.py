"""Settings of parameter groups as JSON values, and back into groups that may be built otherwise.

Owns which settings a checkpoint has and takes: by the names of a group's parameters, never by its
position. Looks at no tensor but a one-element lr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.groups import ALGORITHMS, STRUCTURAL_KEYS, check_keys, check_settings, plain
from shardmuon.limits import show

__all__ = ["Groups", "change_groups", "decode", "encode", "group_changes", "groups_of", "name_of"]

Groups = Sequence[Mapping[str, Any]]
"""Per group `params` (FQNs) and `settings` (JSON values); as in a manifest."""

_NOT_SETTINGS = ("params", "param_names", "mesh")  # which tensors, and where ranks are
_PROGRESS = ("step",)  # no setting, but how far training has come
_KEPT = (*STRUCTURAL_KEYS, "momentum_dtype")  # what the tensors here are made by


def groups_of(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON values."""
    names = {tensor: name for name, tensor in named.items()}
    return [
        {
            "params": [name_of(parameter, names) for parameter in group["params"]],
            "settings": {k: encode(k, v) for k, v in group.items() if k not in _NOT_SETTINGS},
        }
        for group in optimizer.param_groups
    ]


def group_changes(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], saved: Groups, settings: bool
) -> list[dict[str, Any]]:
    """The settings that every group has to take for its parameters to have what they had.

    A group may hold parameters of several saved groups if their settings are equal. Keys that the
    checkpoint does not have keep their values; an empty group follows the saved empty group of its
    algorithm at the same place among those. settings: False leaves all but the number of steps
    taken as they are.
    Raises CheckpointError if the way in which a parameter is updated or cut would change, if the
    settings of a group's parameters differ, or if one is out of range.
    """
    current = groups_of(optimizer, named)
    settings_of = {name: group["settings"] for group in saved for name in group["params"]}
    empty = [group["settings"] for group in saved if not group["params"]]
    changes: list[dict[str, Any]] = []
    for number, now in enumerate(current):
        names = [name for name in now["params"] if name in settings_of]
        olds, same = [settings_of[name] for name in names], []
        if not now["params"]:
            olds = same = _same_kind(empty, now["settings"])[:1]
        for name, old in zip(names, olds, strict=False):
            _compare_structure(name, old, now["settings"])
        if not settings:
            olds = [{key: old[key] for key in _PROGRESS if key in old} for old in olds]
        _compare_settings(number, names, olds)
        changes.append(dict(olds[0]) if olds else {})
        _check_values(optimizer.param_groups[number], changes[-1])
        if not now["params"] and same:
            empty.remove(same[0])
    return changes


def change_groups(optimizer: torch.optim.Optimizer, changes: Groups) -> None:
    """Give every group its `group_changes`."""
    pairs = list(zip(optimizer.param_groups, changes, strict=True))
    for group, change in pairs:
        for key, value in change.items():
            if key not in _KEPT:
                # Compiled steps and schedulers hold a tensor, but groups that differ may share it.
                same = all(c.get(key) == value for g, c in pairs if g.get(key) is group.get(key))
                _assign(group, key, decode(value), in_place=same)


def encode(key: str, value: Any) -> Any:
    """A group setting as a JSON value that `decode` turns back. Raises CheckpointError."""
    if isinstance(value, tuple):
        return {"tuple": [encode(key, item) for item in value]}
    if isinstance(value, list):
        return [encode(key, item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"optimizer group setting {key}={value!r} has no JSON form")


def decode(value: Any) -> Any:
    """The group setting that `encode` was given; one-element tensors come back as numbers.

    Raises CheckpointError for what it cannot have given.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"} and isinstance(value["tuple"], list):
        return tuple(decode(item) for item in value["tuple"])
    name = value["dtype"] if value.keys() == {"dtype"} else None
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{show(value)} is no group setting")
    return dtype


def name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    """FQN of a parameter of the optimizer. Raises CheckpointError if the model does not have it."""
    if parameter not in names:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the"
            " model; build the optimizer after the model is wrapped"
        )
    return names[parameter]


def _same_kind(
    groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    return [g for g in groups if g.get("algorithm") == settings.get("algorithm")]


def _compare_structure(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for key in STRUCTURAL_KEYS:
        now = plain(decode(new.get(key)))
        before = plain(decode(old.get(key, new.get(key))))
        if before != now:
            raise CheckpointError(f"{name} has {key}={before!r} in it, {now!r} here")


def _check_values(group: Mapping[str, Any], change: Mapping[str, Any]) -> None:
    """CheckpointError unless the group can take these values.

    Of other optimizers all that is known is that a number stays one.
    """
    taken = {key: decode(value) for key, value in change.items() if key not in _KEPT}
    algorithm = group.get("algorithm")
    try:
        if algorithm in ALGORITHMS:
            check_keys(taken, algorithm)
            check_settings({**group, **taken})
        for key, value in taken.items():
            if _is_number(plain(group.get(key))) and not _is_number(value):
                raise ValueError(f"{key} must be a number, got {show(value)}")
    except ValueError as error:
        raise CheckpointError(f"a group in it cannot be taken: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, float) or type(value) is int


def _compare_settings(number: int, names: Sequence[str], olds: Groups) -> None:
    for name, old in zip(names, olds, strict=False):
        for key in old.keys() | olds[0].keys():
            one, other = olds[0].get(key), old.get(key)
            if one != other:
                raise CheckpointError(
                    f"group {number} joins parameters that had different settings: {key} was"
                    f" {one!r} for {names[0]}, {other!r} for {name}; load with settings=False to"
                    " keep the group's own"
                )


def _assign(group: dict[str, Any], key: str, value: Any, in_place: bool) -> None:
    if not isinstance(group.get(key), Tensor):
        group[key] = value
    elif in_place:
        group[key].fill_(value)
    else:
        group[key] = torch.full_like(group[key], value)
