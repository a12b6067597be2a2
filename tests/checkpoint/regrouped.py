"""Optimizers of the small model by parts of its names, to be saved and loaded without ranks.

Owns how groups are made of lists of names, and what of a model and an optimizer is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardmuon
from shardmuon.checkpoint import Checkpointer
from tests import models
from tests.problems import digest, local

__all__ = [
    "ADAMW",
    "EARLY",
    "LATE",
    "RUNTIME",
    "TABLES",
    "VECTORS",
    "WHOLE",
    "Part",
    "adamw",
    "bits",
    "fresh",
    "load",
    "muon",
    "save",
    "settings",
    "train",
    "trained",
]

EARLY, LATE = models.MATRICES[:2], models.MATRICES[2:]
TABLES = ["embed_tokens.weight", "lm_head.weight"]
VECTORS = [n for n, p in models.make().named_parameters() if p.ndim == 1]
ADAMW: dict[str, Any] = {"algorithm": "adamw"}
RUNTIME = shardmuon.Runtime(deterministic=True)

Part = tuple[Sequence[str], dict[str, Any]]
WHOLE: list[Part] = [
    (models.MATRICES, {"lr": 0.02, "momentum": 0.9}),
    ([*TABLES, *VECTORS], {**ADAMW, "lr": 0.01, "betas": (0.8, 0.9)}),
]


def muon(model: nn.Module, parts: Sequence[Part], **options: Any) -> shardmuon.Muon:
    """An optimizer whose groups hold the parameters of these names, without names of their own."""
    named = dict(model.named_parameters())
    groups = [{**keys, "params": [named[name] for name in names]} for names, keys in parts]
    return shardmuon.Muon(groups, runtime=RUNTIME, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.spread_gradients(model, step)
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hash of this rank's part of every tensor, by name."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, p in model.named_parameters():
        tensors.update({f"{name}.{k}": v for k, v in optimizer.state.get(p, {}).items()})
    return {name: digest([local(tensor)]) for name, tensor in tensors.items()}


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All group keys but which tensors they are for."""
    left = ("params", "param_names")
    return [{k: v for k, v in g.items() if k not in left} for g in optimizer.param_groups]


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    keeper = Checkpointer(folder)
    path = keeper.save(1, model, optimizer)
    keeper.close()
    return path


def load(path: Path, *pair: Any, **options: Any) -> dict[str, Any]:
    keeper = Checkpointer(path.parent)
    try:
        return keeper.load(path, *pair, **options)
    finally:
        keeper.close()


def trained(parts: Sequence[Part] = WHOLE, **options: Any) -> tuple[models.Net, shardmuon.Muon]:
    model = models.make()
    optimizer = muon(model, parts, **options)
    train(model, optimizer, range(2))
    return model, optimizer


def fresh(parts: Sequence[Part] = WHOLE, **options: Any) -> tuple[models.Net, shardmuon.Muon]:
    model = models.make(seed=1)
    return model, muon(model, parts, **options)


def adamw(seed: int = 0, lr: float = 0.01) -> tuple[models.Net, torch.optim.AdamW]:
    model = models.make(seed)
    return model, torch.optim.AdamW(model.named_parameters(), lr=lr)
