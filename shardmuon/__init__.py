"""Distributed Muon for PyTorch FSDP2: each rank orthogonalizes the whole matrices that it owns.

The public names, and nothing else. Loaded lazily, so that planning alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardmuon.version import __version__

if TYPE_CHECKING:
    from shardmuon.clipping import clip_grad_norm_ as clip_grad_norm_
    from shardmuon.clipping import grad_norm as grad_norm
    from shardmuon.muon import Muon as Muon
    from shardmuon.muon import StepStats as StepStats
    from shardmuon.orthogonalize.checks import orthogonality_error as orthogonality_error
    from shardmuon.orthogonalize.checks import singular_value_range as singular_value_range
    from shardmuon.planning.plan import Plan as Plan
    from shardmuon.qk_clip import HeadRows as HeadRows
    from shardmuon.qk_clip import QKHeads as QKHeads
    from shardmuon.qk_clip import qk_clip_ as qk_clip_
    from shardmuon.routing import ParamGroups as ParamGroups
    from shardmuon.routing import param_groups as param_groups
    from shardmuon.runtime import Runtime as Runtime
    from shardmuon.scaling import GradScaler as GradScaler
    from shardmuon.watchdog import Watchdog as Watchdog

_HOMES = {
    "GradScaler": "shardmuon.scaling",
    "HeadRows": "shardmuon.qk_clip",
    "Muon": "shardmuon.muon",
    "ParamGroups": "shardmuon.routing",
    "Plan": "shardmuon.planning.plan",
    "QKHeads": "shardmuon.qk_clip",
    "Runtime": "shardmuon.runtime",
    "StepStats": "shardmuon.muon",
    "Watchdog": "shardmuon.watchdog",
    "clip_grad_norm_": "shardmuon.clipping",
    "grad_norm": "shardmuon.clipping",
    "orthogonality_error": "shardmuon.orthogonalize.checks",
    "param_groups": "shardmuon.routing",
    "qk_clip_": "shardmuon.qk_clip",
    "singular_value_range": "shardmuon.orthogonalize.checks",
}

__all__ = [
    "GradScaler",
    "HeadRows",
    "Muon",
    "ParamGroups",
    "Plan",
    "QKHeads",
    "Runtime",
    "StepStats",
    "Watchdog",
    "__version__",
    "clip_grad_norm_",
    "grad_norm",
    "orthogonality_error",
    "param_groups",
    "qk_clip_",
    "singular_value_range",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardmuon' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
