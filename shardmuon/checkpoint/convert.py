"""State between `shardmuon.Muon` and torch's pair of optimizers, `torch.optim.Muon` and AdamW.

Owns the two conversions, and that loading checks everything before it changes anything. Never
communicates: each rank converts what it holds. Reads and writes no files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, StateDict

from shardmuon.checkpoint.contents import reshard, some
from shardmuon.checkpoint.torch_forms import (
    OURS,
    Saved,
    match,
    own_part,
    read,
    settings_for,
    split,
)
from shardmuon.entries import parameter_names
from shardmuon.exchange.blocks import local
from shardmuon.groups import ADAMW, ALGORITHMS, MUON, STRUCTURAL_KEYS, clean_fqn
from shardmuon.muon import Muon
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.state_dicts import counter

__all__ = ["from_torch", "to_torch"]

_CLASSES: dict[str, Callable[..., Optimizer]] = {MUON: torch.optim.Muon, ADAMW: torch.optim.AdamW}


class _Members(NamedTuple):
    """One of our groups, and the FQN of each of its parameters."""

    group: dict[str, Any]
    fqns: list[str]


def to_torch(model: nn.Module, optimizer: Muon) -> tuple[StateDict | None, StateDict | None]:
    """The state of `optimizer` as state dicts of `torch.optim.Muon` and `torch.optim.AdamW`. Local.

    Returns (muon, adamw), each None where there is no group of that kind: what these classes would
    return for the same parameters in groups of the same order, with `param_names` from the model.
    Tensors are the optimizer's own, as in torch's state dicts: dtype, bits and placement are as
    they are here, and later steps change them. Keys that torch does not have (ns_dtype,
    ns_method, momentum_dtype, algorithm, mesh, step) are left out: torch orthogonalizes in bf16,
    and its `load_state_dict` casts momentum to the parameter's dtype.

    model: holds all parameters of `optimizer`; one under FSDP2 is resharded.

    Raises ValueError, with the parameter and the key, for what `torch.optim.Muon` cannot express:
    split_sizes, num_heads, transposed, flatten, stacks of matrices, a triple per step, eps=None,
    adjust_lr_fn="spectral", momentum_warmup, ns_period; for cautious_weight_decay=True, in adamw
    groups too; and for groups of other algorithms than muon and adamw.
    """
    optimizer.state_dict()  # makes state that is still missing; has no other effect
    groups = _name_groups(_parameters(model), optimizer)
    muon, adamw = (_pack(algorithm, groups, optimizer) for algorithm in (MUON, ADAMW))
    return muon, adamw


def from_torch(
    model: nn.Module,
    optimizer: Muon,
    muon_state: StateDict | None = None,
    adamw_state: StateDict | None = None,
) -> None:
    """Load states of `torch.optim.Muon` and `torch.optim.AdamW` into `optimizer`, in place. Local.

    muon_state, adamw_state: None leaves the groups of that algorithm as they are; else one of

    - the `state_dict()` of an optimizer of named parameters;
    - a `state_dict()` without names: its parameters are taken in the order of our groups of that
      algorithm. Only their number and shapes are checked. That the order is the same is the
      caller's promise, as with torch's own `load_state_dict`;
    - what `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns, nested or
      flattened. One that holds both optimizers is given as both.

    Names are compared without what wrappers put in. Each tensor has the parameter's global shape.
    It is plain and whole, or a DTensor on the mesh and with the placements of our parameter; each
    rank copies its own part, bits unchanged. A parameter that has no state yet gets zeros, which is
    what torch starts from.

    Settings of a group (lr, betas, also keys such as initial_lr) come from the file; keys that it
    lacks keep their values. Never taken are how parameters are cut, ns_dtype, momentum_dtype, and
    torch's choice of kernel (foreach, fused, capturable, differentiable). For the bits of
    `torch.optim.Muon` set `ns_dtype=torch.bfloat16`, which is not the default on a CPU.

    model: holds all parameters of `optimizer`; one under FSDP2 is resharded.

    Raises ValueError, by name and with nothing changed, if parameters are missing or unexpected, if
    a shape, a placement, a setting or the kind of state does not fit, if one of our groups would
    need two values of a setting, or if one has another algorithm than muon and adamw. A cast to the
    dtype that state has here is a warning.
    """
    optimizer.state_dict()  # makes state that is still missing; has no other effect
    named = _parameters(model)
    groups = _name_groups(named, optimizer)
    changes = _Changes(optimizer)
    for algorithm, file in ((MUON, muon_state), (ADAMW, adamw_state)):
        if file is None:
            continue
        label = f"{algorithm}_state"
        saved = read(label, file)
        if muon_state is adamw_state:
            saved = split(saved, algorithm)
        ours = [members for members in groups if members.group["algorithm"] == algorithm]
        fqns = {p: n for group, names in ours for p, n in zip(group["params"], names, strict=True)}
        matched = match(label, saved, named, fqns)
        for members in ours:
            changes.plan(label, members, [matched[p] for p in members.group["params"]])
    changes.make()


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by FQN; a tied one under each of its names."""
    reshard(model)
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if named.setdefault(clean_fqn(name), parameter) is not parameter:
            raise ValueError(f"the model has two parameters of the name {clean_fqn(name)}")
    return named


def _name_groups(named: Mapping[str, Tensor], optimizer: Muon) -> list[_Members]:
    """All groups with the FQNs that the model gives; of a tied parameter the first.

    ValueError for a parameter that is not the model's, or an algorithm that is not torch's.
    """
    fqns: dict[Tensor, str] = {}
    for fqn, parameter in named.items():
        fqns.setdefault(parameter, fqn)
    groups = optimizer.param_groups
    unknown = [
        name
        for group, names in zip(groups, parameter_names(groups), strict=True)
        for parameter, name in zip(group["params"], names, strict=True)
        if parameter not in fqns
    ]
    if unknown:
        raise ValueError(
            f"the model does not have these parameters of the optimizer: {some(unknown)}; build the"
            " optimizer after the model is wrapped"
        )
    members = [_Members(group, [fqns[p] for p in group["params"]]) for group in groups]
    for group, names in members:
        if group["algorithm"] not in _CLASSES:
            raise ValueError(
                f"{names[0] if names else 'a group'} has algorithm={group['algorithm']!r}, for"
                " which torch has no optimizer; use shardmuon.checkpoint.Checkpointer"
            )
    return members


def _pack(algorithm: str, groups: Sequence[_Members], optimizer: Muon) -> StateDict | None:
    """State dict of a real optimizer of torch that is given our settings and our state."""
    dicts = []
    for group, fqns in groups:
        if group["algorithm"] != algorithm:
            continue
        _check_cautious(group, fqns)
        if algorithm == MUON:
            _check_expressible(group, fqns)
        settings = {key: value for key, value in group.items() if key not in OURS}
        if algorithm == MUON:
            settings["ns_coefficients"] = _single_triple(group, fqns)
        # Names as a key, not in pairs: torch takes no empty group beside pairs.
        dicts.append({**settings, "params": list(group["params"]), "param_names": list(fqns)})
    if not dicts:
        return None
    twin = _CLASSES[algorithm](dicts)
    for group in twin.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                twin.state[parameter] = dict(optimizer.state[parameter])
    return twin.state_dict()


def _single_triple(group: Mapping[str, Any], fqns: Sequence[str]) -> Any:
    """The coefficients as torch takes them, one triple for all steps."""
    given = group["ns_coefficients"]
    schedule = schedule_of(given, group["ns_steps"])
    if len(set(schedule.triples)) > 1 or schedule.margin != 1.0:
        raise ValueError(
            f"{fqns[0] if fqns else 'a group'} has ns_coefficients={given!r};"
            " torch.optim.Muon has one triple for all steps"
        )
    return schedule.triples[0] if isinstance(given, str) else given


def _check_cautious(group: Mapping[str, Any], fqns: Sequence[str]) -> None:
    if group["cautious_weight_decay"]:
        class_name = "torch.optim.Muon" if group["algorithm"] == MUON else "torch.optim.AdamW"
        raise ValueError(
            f"{fqns[0] if fqns else 'a group'} has cautious_weight_decay=True, which {class_name}"
            " does not have"
        )


def _check_expressible(group: Mapping[str, Any], fqns: Sequence[str]) -> None:
    who = fqns[0] if fqns else "a group"
    if group["eps"] is None:
        raise ValueError(f"{who} has eps=None, torch.optim.Muon needs a number")
    if group["adjust_lr_fn"] == "spectral":  # which torch takes for a factor of 1, in silence
        raise ValueError(f"{who} has adjust_lr_fn='spectral', which torch.optim.Muon does not have")
    for key in ("momentum_warmup", "ns_period"):
        if group[key] != ALGORITHMS[MUON].defaults[key]:
            raise ValueError(f"{who} has {key}={group[key]!r}; torch.optim.Muon does not have it")
    for fqn, parameter in zip(fqns, group["params"], strict=True):
        for key in STRUCTURAL_KEYS:
            if key != "algorithm" and group[key]:
                raise ValueError(
                    f"{fqn} has {key}={group[key]!r}, which torch.optim.Muon does not have"
                )
        if parameter.ndim != 2:
            raise ValueError(
                f"{fqn} is a stack of shape {tuple(parameter.shape)}; torch.optim.Muon takes"
                " matrices of 2 dims only"
            )


class _Changes:
    """All changes of one call: planned and checked group by group, then made at once."""

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parts: dict[Tensor, dict[str, Tensor]] = {}  # by parameter; no part: zeros
        self._casts: set[str] = set()

    def plan(self, label: str, members: _Members, saved: Sequence[Saved]) -> None:
        """Check what the file says of a group's parameters. Raises ValueError."""
        group, fqns = members
        if not fqns:
            return  # the file's settings belong to its parameters
        self._settings.append((group, settings_for(label, group, fqns, saved)))
        for fqn, parameter, each in zip(fqns, group["params"], saved, strict=True):
            expected = ALGORITHMS[group["algorithm"]].state.keys()
            if each.state and each.state.keys() != expected:
                raise ValueError(
                    f"{label}: {fqn} has state {sorted(each.state)}, expected {sorted(expected)}"
                )
            dtype = group.get("momentum_dtype") or parameter.dtype
            self._parts[parameter] = {
                key: _counter(f"{label}: {fqn} {key}", value)
                if key == "step"
                else own_part(f"{label}: {fqn} {key}", parameter, value)
                for key, value in each.state.items()
            }
            self._casts |= {
                f"{key} was cast from {part.dtype} to {dtype}"
                for key, part in self._parts[parameter].items()
                if key != "step" and part.dtype != dtype
            }

    def make(self) -> None:
        """Write everything. Warns before: a warning may be made an error."""
        if self._casts:
            warnings.warn("; ".join(sorted(self._casts)), stacklevel=3)
        # Frozen parameters may have no state here, and keep none if the file has none either.
        self._optimizer.make_state(p for p, parts in self._parts.items() if parts)
        with torch.no_grad():
            for parameter, parts in self._parts.items():
                for key, target in self._optimizer.state.get(parameter, {}).items():
                    if parts:
                        local(target).copy_(parts[key])
                    else:
                        local(target).zero_()
        for group, settings in self._settings:
            # A tensor is replaced, as torch does: groups may share one, and need two values now.
            group.update(settings)


def _counter(name: str, value: Any) -> Tensor:
    """A step counter as a tensor []."""
    try:
        return counter(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
