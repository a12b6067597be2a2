"""How the learning rate moves over the steps.

Owns the factor on every group's peak learning rate. Pure functions of the step, so that a resumed
run needs nothing but the step it is at.
"""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from shardmuon.training.config import Schedule

__all__ = ["build", "factor"]


def factor(config: Schedule, step: int) -> float:
    """Share of the peak learning rate for optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "cosine":
        rest = max(1, config.steps - config.warmup_steps)
        done = min(1.0, (step - config.warmup_steps) / rest)
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done))
    left = config.steps - step
    if config.decay_steps == 0 or left >= config.decay_steps:
        return 1.0
    return config.final + (1 - config.final) * max(0.0, left / config.decay_steps)


def build(optimizer: torch.optim.Optimizer, config: Schedule, step: int) -> LambdaLR:
    """Scheduler that stands before step `step`; sets every group's lr from its own peak.

    The groups' lr must hold the peaks. They are kept as `initial_lr`, torch's key for them.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, lambda s: factor(config, s), last_epoch=step - 1 if step else -1)
