"""What a checkpoint holds of a model and an optimizer, by parameter name.

Owns the keys (`model.FQN`, `optimizer.FQN.STATE`), the JSON form of group settings, and how they
come back into groups that may be built otherwise: everything is matched by name, nothing by
position. Reads and changes tensors of this rank only; no collective.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.checkpoint.storage import Index
from shardmuon.groups import STRUCTURAL_KEYS, clean_fqn
from shardmuon.muon import Muon

__all__ = [
    "Contents",
    "change_groups",
    "check_shapes",
    "collect",
    "decode",
    "encode",
    "forget_state",
    "group_changes",
    "groups_of",
    "random_state",
    "restore_random",
    "some",
    "targets",
]

Groups = Sequence[Mapping[str, Any]]
"""Per group `params` (FQNs) and `settings` (JSON values); as in a manifest."""

_NOT_SETTINGS = ("params", "param_names", "mesh")  # which tensors, and where ranks are
_KEPT = (*STRUCTURAL_KEYS, "momentum_dtype")  # what the tensors here are made by
_SHOWN = 8


@dataclass(frozen=True)
class Contents:
    """Tensors by key, sharing the memory of model and optimizer.

    aliases: further names of tied weights, with the name under which each is stored.
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    groups: Groups


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Contents:
    """Everything to be saved. Raises CheckpointError for what cannot be."""
    named, aliases = _named_tensors(model)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named.items()}
    if optimizer is None:
        return Contents(tensors, aliases, [])
    if isinstance(optimizer, Muon):
        optimizer.state_dict()  # makes state for parameters that a framework has put in since
    for name, parameter in _members(optimizer, named):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"optimizer state {key} of {name} is a {type(value).__name__}; a checkpoint"
                    " holds only tensors"
                )
            tensors[f"optimizer.{name}.{key}"] = value.detach()
    return Contents(tensors, aliases, groups_of(optimizer, named))


def targets(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, index: Index
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(tensors to be overwritten by those of a checkpoint, by key; state to be set to zero).

    Makes state where the optimizer has none yet, frozen parameters included. Raises CheckpointError
    if names or shapes do not fit. Warns of casts, of parameters that had no state when it was saved
    (they start anew) and of saved state whose parameters the optimizer does not hold now.
    """
    if optimizer is not None:
        _make_state(model, optimizer, index)
    found = collect(model, optimizer).tensors
    saved = {key for key in index if optimizer is not None or key.startswith("model.")}
    held = {_owner(key) for key in found if key.startswith("optimizer.")}
    known = {_owner(key) for key in saved if key.startswith("optimizer.")}
    anew = {
        k for k in found.keys() - saved if k.startswith("optimizer.") and _owner(k) not in known
    }
    left = {k for k in saved - found.keys() if k.startswith("optimizer.") and _owner(k) not in held}
    missing, unexpected = found.keys() - saved - anew, saved - found.keys() - left
    if missing or unexpected:
        raise CheckpointError(
            f"it does not fit; missing: {some(missing)}; unexpected: {some(unexpected)}"
        )
    wanted = {key: tensor for key, tensor in found.items() if key not in anew}
    check_shapes(wanted, index)
    casts = [
        f"{key} from {index[key].properties.dtype} to {tensor.dtype}"
        for key, tensor in wanted.items()
        if index[key].properties.dtype != tensor.dtype
    ]
    for text, keys in (
        ("cast while loading", casts),
        ("no saved state, starts anew", anew),
        ("saved state of parameters that the optimizer does not hold", left),
    ):
        if keys:
            warnings.warn(f"{text}: {some(keys)}", stacklevel=2)
    return wanted, [found[key] for key in anew]


def groups_of(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON values."""
    names = {tensor: name for name, tensor in named.items()}
    return [
        {
            "params": [_name_of(parameter, names) for parameter in group["params"]],
            "settings": {k: encode(k, v) for k, v in group.items() if k not in _NOT_SETTINGS},
        }
        for group in optimizer.param_groups
    ]


def forget_state(optimizer: torch.optim.Optimizer, before: Collection[Tensor]) -> None:
    """Drop the state that `targets` has made for a load that fails; `before` had some already."""
    for parameter in optimizer.state.keys() - before:
        del optimizer.state[parameter]


def group_changes(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Groups, settings: bool
) -> list[dict[str, Any]]:
    """The settings that every group has to take for its parameters to have what they had.

    A group may hold parameters of several saved groups if their settings are equal. Keys that the
    checkpoint does not have keep their values; an empty group follows the saved empty group of its
    algorithm at the same place among those. settings: False leaves all settings as they are.
    Raises CheckpointError if the way in which a parameter is updated or cut would change, or if
    the settings of a group's parameters differ.
    """
    current = groups_of(optimizer, _named_tensors(model)[0])
    settings_of = {name: group["settings"] for group in saved for name in group["params"]}
    empty = [group["settings"] for group in saved if not group["params"]]
    changes: list[dict[str, Any]] = []
    for number, now in enumerate(current):
        names = [name for name in now["params"] if name in settings_of]
        olds = [settings_of[name] for name in names]
        if not now["params"]:
            olds = _same_kind(empty, now["settings"])[:1]
        for name, old in zip(names, olds, strict=False):
            _compare_structure(name, old, now["settings"])
        if settings:
            _compare_settings(number, names, olds)
        changes.append(dict(olds[0]) if olds and settings else {})
        if not now["params"] and olds:
            empty.remove(olds[0])
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


def random_state() -> dict[str, str]:
    """This rank's generator states as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {kind: base64.b64encode(s.numpy().tobytes()).decode() for kind, s in states.items()}


def restore_random(states: Mapping[str, str]) -> None:
    """Undo `random_state`; a kind of device that is not here is left out."""
    for kind, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


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
    """The group setting that `encode` was given; one-element tensors come back as numbers."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict) and "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return value


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters and persistent buffers by FQN, further names of tied ones)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward pass without backward leaves the root's whole parameters registered, which
            # are not those that the optimizer holds.
            module.reshard()
    named: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        name = clean_fqn(raw)
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"model state {name} is a {type(value).__name__}; a checkpoint holds only tensors"
            )
        if name in named:
            raise CheckpointError(f"two tensors of the model have the name {name}, one as {raw}")
        if id(value) in names:
            aliases[name] = names[id(value)]
        else:
            names[id(value)] = name
            named[name] = value
    return named, aliases


def _members(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(FQN, parameter) of all parameters of the optimizer."""
    names = {tensor: name for name, tensor in named.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield _name_of(parameter, names), parameter


def _name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the"
            " model; build the optimizer after the model is wrapped"
        )
    return names[parameter]


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer, index: Index) -> None:
    """Make state for the parameters that have some in the checkpoint and none here."""
    saved = {_owner(key) for key in index if key.startswith("optimizer.")}
    members = _members(optimizer, _named_tensors(model)[0])
    wanted = [p for name, p in members if f"optimizer.{name}" in saved and p not in optimizer.state]
    if isinstance(optimizer, Muon):
        optimizer.make_state(wanted)
    elif wanted:
        _take_hidden_step(model, optimizer, wanted)


def _take_hidden_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Sequence[Tensor]
) -> None:
    """Make state of another optimizer in the only public way, by a step with lr 0.

    torch takes it if there is neither state nor gradient; what there is comes back afterwards.
    """
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    kept = dict(optimizer.state)
    optimizer.state.clear()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        get_optimizer_state_dict(model, optimizer)
        kept.update({p: optimizer.state[p] for p in wanted if p in optimizer.state})
    finally:
        optimizer.state.clear()
        optimizer.state.update(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _owner(key: str) -> str:
    """The key of an optimizer state without the name of the state."""
    return key.rpartition(".")[0]


def check_shapes(tensors: Mapping[str, Tensor], index: Index) -> None:
    """CheckpointError unless every tensor has the shape that `index` gives under its name."""
    for key, tensor in tensors.items():
        if index[key].size != tensor.shape:
            raise CheckpointError(
                f"{key} has shape {tuple(index[key].size)} in it, {tuple(tensor.shape)} here"
            )


def _same_kind(
    groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    return [g for g in groups if g.get("algorithm") == settings.get("algorithm")]


def _compare_structure(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for key in STRUCTURAL_KEYS:
        now = _plain(decode(new.get(key)))
        before = _plain(decode(old.get(key, new.get(key))))
        if before != now:
            raise CheckpointError(f"{name} has {key}={before!r} in it, {now!r} here")


def _plain(value: Any) -> Any:
    """Lists and tuples alike."""
    return list(value) if isinstance(value, tuple) else value


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


def some(names: Iterable[str]) -> str:
    """The first of `names` in their order, as text."""
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more if listed else "none"
