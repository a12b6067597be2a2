"""From the optimizer section to an optimizer over a model's parameters.

Owns the choice between Muon and AdamW with all else equal: the same routing decides which
parameters decay, and which matrices the update size is reported for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmuon.muon import Muon
from shardmuon.routing import ParamGroups, param_groups
from shardmuon.training.config import AdamWGroups, MuonGroups, OptimizerSection
from shardmuon.training.load import ConfigError

__all__ = ["Built", "build", "check", "group_lrs"]

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Built:
    """An optimizer, the matrices of hidden layers among its parameters, and its routing table."""

    optimizer: torch.optim.Optimizer
    matrices: list[Tensor]
    routing: str


def check(model: nn.Module, config: OptimizerSection) -> None:
    """Raise ConfigError if the settings do not fit the model; makes nothing."""
    try:
        _groups(model, config)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None


def build(
    model: nn.Module,
    config: OptimizerSection,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> Built:
    """Make the optimizer over the parameters as they are now: call it after sharding.

    mesh: over all ranks; parameters that are left plain are replicated over it.
    """
    groups = _groups(model, config)
    named = dict(model.named_parameters())
    matrices: list[Tensor] = [
        named[row.name] for row in groups.table if row.rule == config.muon.algorithm
    ]
    if config.name == "muon":
        muon = Muon(groups, mesh=mesh, runtime=config.runtime)
        return Built(optimizer=muon, matrices=matrices, routing=groups.report())
    # torch's fused AdamW takes plain tensors or DTensors, not both at once.
    alike = len({isinstance(p, DTensor) for p in named.values()}) == 1
    adamw = torch.optim.AdamW(_all_adamw(groups, config), fused=alike and device.type == "cuda")
    return Built(optimizer=adamw, matrices=matrices, routing="all parameters under AdamW")


def group_lrs(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Learning rate of each group, under its algorithm and position."""
    return {
        f"{group.get('algorithm', 'adamw')}.{position}": float(group["lr"])
        for position, group in enumerate(optimizer.param_groups)
    }


def _groups(model: nn.Module, config: OptimizerSection) -> ParamGroups:
    return param_groups(
        model,
        muon=_muon_settings(config.muon),
        adamw=_given(config.adamw),
        to_muon=config.to_muon,
        to_adamw=config.to_adamw,
    )


def _all_adamw(groups: ParamGroups, config: OptimizerSection) -> list[dict[str, Any]]:
    """The same groups with the matrices under AdamW too, where they decay."""
    settings = _given(config.adamw)
    ours = ("algorithm", "cautious_weight_decay")
    made = []
    for group in groups:
        is_matrices = group["algorithm"] == config.muon.algorithm
        keys = {"params": group["params"], **settings} if is_matrices else group
        made.append({key: value for key, value in keys.items() if key not in ours})
    return made


def _given(config: AdamWGroups) -> dict[str, Any]:
    """Without keys that are null: the rule has its own defaults, and no keys of other rules."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value is not None}


def _muon_settings(config: MuonGroups) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    if config.beta2 is None:
        del settings["beta2"]
    for key in ("ns_dtype", "momentum_dtype"):
        if settings[key] is not None:
            settings[key] = _TYPES[settings[key]]
    return settings
