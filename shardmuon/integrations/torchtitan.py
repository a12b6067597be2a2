"""Muon in torchtitan's list of optimizers, and the override that brings it into a run.

Owns what becomes of a torchtitan configuration. torchtitan has no registry of optimizers, so its
container is replaced by a subclass, through torchtitan's own overrides:
`--override.imports shardmuon.integrations.torchtitan.use_muon`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import override

from shardmuon.groups import ADAMW, MUON
from shardmuon.muon import Muon
from shardmuon.routing import param_groups

__all__ = ["MuonContainer", "use_muon"]

NAME = "Muon"
_BF16_STATES = "fused_opt_states_bf16"


class MuonContainer(OptimizersContainer):
    """torchtitan's container with one `shardmuon.Muon` for each part of the model.

    Hidden matrices, as `shardmuon.param_groups` finds them, take Muon. All else takes AdamW with
    the settings of the groups that torchtitan was given. A group may also ask for the optimizer
    "Muon" by name and say its `algorithm`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """muon: group keys of the hidden matrices. to_muon, to_adamw: patterns of names."""

        muon: dict[str, Any] = field(default_factory=dict)
        to_muon: list[str] = field(default_factory=list)
        to_adamw: list[str] = field(default_factory=list)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Raises ValueError if no parameter takes Muon, or a setting is refused."""
        if config.implementation == _BF16_STATES:
            raise ValueError(f"implementation: {_BF16_STATES!r} is for torch's AdamW alone")
        others = [_in_muon(group) for group in config.param_groups]
        groups = [_hidden(config, model_parts), *others]
        kept = {each.name: getattr(config, each.name) for each in fields(config)}
        routed = type(config)(**{**kept, "param_groups": groups})
        super().__init__(routed, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == NAME:
            return Muon
        return OptimizersContainer._resolve_optimizer_factory(name)


def _hidden(config: MuonContainer.Config, model_parts: Sequence[nn.Module]) -> ParamGroupConfig:
    """The group of all matrices that take Muon, by their names."""
    names = [
        row.name
        for part in model_parts
        for row in param_groups(part, to_muon=config.to_muon, to_adamw=config.to_adamw).table
        if row.rule == MUON
    ]
    # Wrappers may stand between the parts of a name.
    exact = "|".join(r"\.(?:_\w+\.)*".join(map(re.escape, name.split("."))) for name in names)
    return ParamGroupConfig(
        pattern=rf"^(?:_\w+\.)*(?:{exact})$",
        optimizer_name=NAME,
        optimizer_kwargs={"algorithm": MUON, **config.muon},
    )


def _in_muon(group: ParamGroupConfig) -> ParamGroupConfig:
    """A group of torchtitan's AdamW as one of ours, so that one step refuses or takes both."""
    if group.optimizer_name != "AdamW":
        return group
    return ParamGroupConfig(
        pattern=group.pattern,
        optimizer_name=NAME,
        optimizer_kwargs={"algorithm": ADAMW, **group.optimizer_kwargs},
    )


@override(target=OptimizersContainer.Config, exact=True, description="shardmuon")
def use_muon(
    config: OptimizersContainer.Config,
    *,
    muon: Mapping[str, Any] | None = None,
    to_muon: Sequence[str] = (),
    to_adamw: Sequence[str] = (),
) -> MuonContainer.Config:
    """The same configuration with hidden matrices under Muon; see `MuonContainer`."""
    kept = {each.name: getattr(config, each.name) for each in fields(config)}
    return MuonContainer.Config(
        **kept, muon=dict(muon or {}), to_muon=list(to_muon), to_adamw=list(to_adamw)
    )
