"""Resumable checkpoints that survive crashes, and moves to other ranks, layouts and libraries.

Knows models and optimizers, and must not know how a training run is configured: what else has to be
remembered comes in as JSON values. Names are loaded lazily, so that looking at folders imports no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.checkpointer import Checkpointer as Checkpointer
    from shardmuon.checkpoint.checkpointer import Found as Found
    from shardmuon.checkpoint.convert import from_torch as from_torch
    from shardmuon.checkpoint.convert import to_torch as to_torch
    from shardmuon.checkpoint.export import export_checkpoint as export_checkpoint
    from shardmuon.checkpoint.export import export_model as export_model
    from shardmuon.checkpoint.export import load_weights as load_weights
    from shardmuon.checkpoint.publish import CheckpointError as CheckpointError

_HOMES = {
    "CheckpointError": "publish",
    "Checkpointer": "checkpointer",
    "Found": "checkpointer",
    "export_checkpoint": "export",
    "export_model": "export",
    "from_torch": "convert",
    "load_weights": "export",
    "to_torch": "convert",
}

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Found",
    "export_checkpoint",
    "export_model",
    "from_torch",
    "load_weights",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardmuon.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"shardmuon.checkpoint.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
