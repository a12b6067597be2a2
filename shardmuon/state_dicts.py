"""What an optimizer's state dict must be to be loaded into given groups.

Owns the checks that come before anything is changed: form, structure, settings, and the state of
every parameter. Reads and changes no state of the optimizer; local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon.entries import parameter_names
from shardmuon.exchange.blocks import local, planning_mesh
from shardmuon.groups import (
    ADAMW,
    ALGORITHMS,
    MUON,
    STRUCTURAL_KEYS,
    check_keys,
    check_settings,
    plain,
    updates_matrices,
)
from shardmuon.limits import advice, show
from shardmuon.state import shape_of

__all__ = ["casts_in", "check_state_dict", "counter"]

_NOT_SETTINGS = ("params", "param_names", "mesh", "momentum_dtype")

Groups = Sequence[Mapping[str, Any]]


def check_state_dict(groups: Groups, state_dict: Any) -> None:
    """ValueError, naming group or parameter, if `state_dict` does not fit `groups`."""
    saved = _saved_groups(groups, state_dict)
    for number, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        _check_structure(number, group, theirs)
        _check_group_settings(number, group, theirs)
    _check_state(groups, saved, state_dict["state"])


def casts_in(groups: Groups, state_dict: Mapping[str, Any]) -> list[str]:
    """How state of matrices in a state dict that fits will be cast, in words."""
    casts = set()
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        if not updates_matrices(group):
            continue
        kinds = ALGORITHMS[group["algorithm"]].state
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            for kind, value in state_dict["state"].get(key, {}).items():
                dtype = kinds[kind].dtype_for(parameter, group)
                if value.dtype != dtype:
                    casts.add(f"{kind} was cast from {value.dtype} to {dtype}")
    return sorted(casts)


def counter(value: Any) -> Tensor:
    """A step counter as a tensor []; in torch's older files it is a number. ValueError if none."""
    number = value
    if isinstance(value, Tensor):
        real = value.numel() == 1 and not value.is_complex() and not value.is_meta
        number = local(value).item() if real else None
    # float32 counts no further than that in steps of one.
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 2**24:
        raise ValueError(f"must be one number in [0, {2**24}], got {show(value)}")
    return torch.tensor(float(number), device="cpu")


def _saved_groups(groups: Groups, state_dict: Any) -> list[Mapping[str, Any]]:
    """The file's groups, of which there are as many as ours, each with as many parameters."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no state dict of an optimizer: it needs state and param_groups")
    saved = state_dict["param_groups"]
    if not isinstance(saved, list | tuple) or not isinstance(state_dict["state"], Mapping):
        raise ValueError("param_groups of a state dict must be a list, and state a dict")
    if len(saved) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved)} parameter groups, expected {len(groups)}"
        )
    seen: set[Any] = set()
    for number, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        keys = theirs.get("params") if isinstance(theirs, Mapping) else None
        if not isinstance(keys, list | tuple):
            raise ValueError(f"group {number} of the state dict has no list of params")
        if len(keys) != len(group["params"]):
            raise ValueError(
                f"group {number} of the state dict has {len(keys)} parameters, expected"
                f" {len(group['params'])}"
            )
        for key in keys:
            if not isinstance(key, int | str) or key in seen:
                raise ValueError(
                    f"group {number} of the state dict has the parameter {show(key)},"
                    " expected a number or a name that comes once"
                )
            seen.add(key)
    return list(saved)


def _check_structure(number: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a file whose groups are of another kind; torch's own files do not say theirs."""
    if not saved.keys() - {"params"}:
        raise ValueError(
            f"the state dict has no settings for group {number}: torch cannot split a saved"
            " group in the nested form; use"
            " StateDictOptions(flatten_optimizer_state_dict=True), or shardmuon.checkpoint"
        )
    theirs = {"algorithm": ADAMW if "betas" in saved else MUON, **saved}
    for key in STRUCTURAL_KEYS:
        here, there = group.get(key), theirs.get(key, group.get(key))
        if type(plain(there)) is not type(plain(here)) or plain(there) != plain(here):
            near = advice(there, ALGORITHMS) if key == "algorithm" else ""
            raise ValueError(
                f"group {number} has {key}={here!r}, the state dict {show(there)}{near}"
            )


def _check_group_settings(number: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse settings that a group could not have been made with."""
    taken = {key: value for key, value in saved.items() if key not in _NOT_SETTINGS}
    try:
        check_keys(taken, group["algorithm"])
        check_settings({**group, **taken})
    except ValueError as error:
        raise ValueError(f"group {number} of the state dict: {error}") from None


def _check_state(
    groups: Groups, saved: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]
) -> None:
    known: set[Any] = set()
    for group, names, theirs in zip(groups, parameter_names(groups), saved, strict=True):
        for parameter, name, key in zip(group["params"], names, theirs["params"], strict=True):
            known.add(key)
            _check_state_of(name, parameter, group, states.get(key, {}))
    others = [key for key in states if key not in known]
    if others:
        raise ValueError(
            f"the state dict has state of {len(others)} parameters in no group, the first is"
            f" {show(others[0])}"
        )


def _check_state_of(name: str, parameter: Tensor, group: Mapping[str, Any], state: Any) -> None:
    """Refuse state of another kind, and what torch's flat form puts in for state it lacks."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of {name} must be a dict, got {show(state)}")
    for kind, value in state.items():
        if isinstance(value, dict):
            raise ValueError(f"the state dict has no {kind} of {name}")
    kinds = ALGORITHMS[group["algorithm"]].state
    if state and state.keys() != kinds.keys():
        raise ValueError(
            f"{name} has state {show(list(state))} in the state dict, expected {sorted(kinds)}"
        )
    for kind, value in state.items():
        if kinds[kind].form == "counter":
            try:
                counter(value)
            except ValueError as error:
                raise ValueError(f"{kind} of {name} {error}") from None
        else:
            shape = shape_of(kinds[kind], parameter, group)
            _check_tensor(f"{kind} of {name}", parameter, shape, value)


def _check_tensor(label: str, parameter: Tensor, shape: tuple[int, ...], value: Any) -> None:
    """Refuse what is not a tensor of numbers placed like the parameter."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{label} must be a floating-point tensor in the state dict, got {kind}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{label} has shape {tuple(value.shape)} in the state dict, the parameter"
            f" {tuple(parameter.shape)}"
            + (f", which takes {shape}" if shape != tuple(parameter.shape) else "")
        )
    if value.layout != torch.strided or value.is_meta != parameter.is_meta:
        raise ValueError(f"{label} is {value.layout} on {value.device} in the state dict")
    theirs, ours = _place(value), _place(parameter)
    if theirs != ours:
        raise ValueError(
            f"{label} is placed as {theirs} in the state dict, the parameter as {ours}; whole"
            " tensors load with shardmuon.checkpoint.from_torch, others with"
            " torch.distributed.checkpoint"
        )


def _place(tensor: Tensor) -> object:
    """How a DTensor lies; equal for equal meshes that were made twice."""
    if not isinstance(tensor, DTensor):
        return "a plain tensor"
    mesh = planning_mesh(tensor.device_mesh)
    return tensor.placements, mesh.ranks, mesh.shape
