"""The Muon rule, bit for bit that of `torch.optim.Muon` where that has the settings.

    M <- lerp(M, G, 1 - momentum)
    U <- lerp(G, M, momentum) if nesterov else M
    O <- NS(U)
    P <- P (1 - lr weight_decay) - lr scale(rows, cols) O

With `cautious_weight_decay` elements of P where O P < 0 do not decay (see `opposed`).

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/; `match_rms_adamw` scale: "Muon is
Scalable for LLM Training", arXiv 2502.16982; `spectral` scale: Jeremy Bernstein, "Deriving Muon",
https://jeremybernste.in/writing/deriving-muon, and "A Spectral Condition for Feature Learning",
arXiv 2310.17813.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon import limits
from shardmuon.groups import StateKind
from shardmuon.keys import (
    FLAG,
    FLOATS,
    Key,
    block,
    coefficients,
    count,
    dtype,
    name,
    number,
    or_none,
    sizes,
)
from shardmuon.orthogonalize import replay
from shardmuon.orthogonalize.coefficients import KELLER, schedule_of
from shardmuon.orthogonalize.newton_schulz import Team, newton_schulz_of_panels
from shardmuon.planning.matrix import AUTO
from shardmuon.rules import elementwise
from shardmuon.rules.base import Commit, Group, Shard, UpdateRule, opposed, wide

__all__ = ["MuonRule", "update_scale"]

_NS_DTYPES = tuple(getattr(torch, each) for each in limits.choices(limits.NsDtype))


def update_scale(rows: int, cols: int, adjust_lr_fn: str | None) -> float:
    """Factor on the orthogonalized update of a rows x cols matrix (the global shape).

    None and "original": sqrt(max(1, rows / cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols));
    "spectral": sqrt(rows / cols), which Megatron calls unit_rms_norm: its "spectral" is another.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1, rows / cols))


def momentum_now(group: Group) -> Any:
    """The momentum of this step: it rises in a line over the first `momentum_warmup` steps.

    Source: https://github.com/KellerJordan/modded-nanogpt, where it rises from 0.85 to 0.95 in 300.
    """
    steps, step = group["momentum_warmup"], group["step"]
    if step >= steps:
        return group["momentum"]
    start = group["momentum_start"]
    return start + (group["momentum"] - start) * (step / steps)


class MuonRule(UpdateRule):
    """State: `momentum_buffer`, the running average of gradients, in `momentum_dtype`."""

    keys = {
        "lr": Key(1e-3, number(limits.NotNegative)),
        "weight_decay": Key(0.1, number(limits.NotNegative)),
        "cautious_weight_decay": Key(False, FLAG),
        "momentum": Key(0.95, number(limits.Decay)),
        "momentum_warmup": Key(0, count(limits.CountOrZero)),
        "momentum_start": Key(0.85, number(limits.Decay)),
        "nesterov": Key(True, FLAG),
        "ns_coefficients": Key(KELLER, coefficients()),
        "eps": Key(1e-7, or_none(number(limits.NormFloor))),
        "ns_steps": Key(5, count(limits.NsSteps)),
        "ns_method": Key(AUTO, name(limits.Method)),
        "adjust_lr_fn": Key(None, or_none(name(limits.AdjustLr))),
        "ns_dtype": Key(None, or_none(dtype(_NS_DTYPES))),
        "ns_period": Key(1, count(limits.Count)),
        "ns_block": Key(None, or_none(block())),
        "momentum_dtype": Key(None, or_none(dtype(FLOATS))),
        "split_sizes": Key(None, or_none(sizes())),
        "num_heads": Key(None, or_none(count(limits.Count))),
        "transposed": Key(False, FLAG),
        "flatten": Key(False, FLAG),
        "step": Key(0, count(limits.CountOrZero)),
    }
    state = {"momentum_buffer": StateKind("parameter", "momentum_dtype")}
    shares = True
    prepare_keys = ("momentum", "momentum_warmup", "momentum_start", "step", "nesterov")
    owner_keys: tuple[str, ...] = ("ns_coefficients", "ns_steps", "ns_method", "eps", "ns_dtype")

    def prepare(self, shard: Shard, commit: Commit) -> Tensor:
        buffer = shard.state["momentum_buffer"]
        momentum = momentum_now(shard.group)
        gradient = wide(shard.gradient.to(buffer.dtype))
        average = torch.lerp(wide(buffer), gradient, 1 - momentum).to(buffer.dtype)
        commit.write(buffer, average)
        if not shard.group["nesterov"]:
            return average
        return torch.lerp(gradient, wide(average), momentum)

    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        schedule = schedule_of(group["ns_coefficients"], group["ns_steps"])
        return replay.orthogonalize(whole, schedule, group["eps"], group["ns_method"]), None

    def orthogonalize_panels(
        self, panels: Tensor, group: Group, whole: tuple[int, int], team: Team
    ) -> Tensor:
        schedule = schedule_of(group["ns_coefficients"], group["ns_steps"])
        tall = whole[0] > whole[1]
        return newton_schulz_of_panels(panels, schedule, group["eps"], panels.dtype, tall, team)

    def warm_up(self, whole: Tensor, group: Group) -> None:
        schedule = schedule_of(group["ns_coefficients"], group["ns_steps"])
        replay.warm_up(whole, schedule, group["eps"], group["ns_method"])

    def apply(self, shard: Shard, update: Tensor, row_stats: Tensor | None, commit: Commit) -> None:
        keep, scale = _factors(shard)
        whole = wide(shard.parameter)
        value = whole * keep
        if shard.group["cautious_weight_decay"]:
            value = torch.where(opposed(update, whole), whole, value)
        commit.write(shard.parameter, value.add_(update, alpha=scale))

    def prepare_all(
        self, shards: Sequence[Shard], places: Sequence[Tensor | None], commit: Commit
    ) -> None:
        together: list[elementwise.Preparation] = []
        for shard, place in zip(shards, places, strict=True):
            buffer, group = shard.state["momentum_buffer"], shard.group
            if elementwise.takes(buffer, shard.gradient, rows=True):
                decay, nesterov = float(momentum_now(group)), group["nesterov"]
                together.append(
                    elementwise.Preparation(shard.gradient, buffer, place, decay, nesterov)
                )
            else:
                super().prepare_all([shard], [place], commit)
        elementwise.prepare_many(together, commit)

    def apply_all(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Tensor],
        row_stats: Sequence[Tensor | None],
        commit: Commit,
    ) -> None:
        together: list[elementwise.Application] = []
        factors: dict[tuple[int, int, int], tuple[float, float]] = {}
        for shard, update, stats in zip(shards, updates, row_stats, strict=True):
            if stats is None and elementwise.takes(shard.parameter, rows=True):
                kind = id(shard.group), shard.rows, shard.cols
                if kind not in factors:
                    factors[kind] = _factors(shard)
                keep, scale = factors[kind]
                cautious = shard.group["cautious_weight_decay"]
                together.append(
                    elementwise.Application(shard.parameter, update, keep, scale, cautious)
                )
            else:
                super().apply_all([shard], [update], [stats], commit)
        elementwise.apply_many(together, commit)


def _factors(shard: Shard) -> tuple[float, float]:
    """What the parameter and what the update is multiplied by, before they are added."""
    group = shard.group
    lr = float(group["lr"])
    scale = update_scale(shard.rows, shard.cols, group["adjust_lr_fn"])
    return 1 - lr * float(group["weight_decay"]), -lr * scale
