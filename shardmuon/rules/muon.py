"""The Muon rule, bit for bit that of `torch.optim.Muon`.

    M <- lerp(M, G, 1 - momentum)
    U <- lerp(G, M, momentum) if nesterov else M
    O <- NS(U)
    P <- P (1 - lr weight_decay) - lr scale(rows, cols) O

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/; `match_rms_adamw` scale: "Muon is
Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon.orthogonalize import replay
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import Team, newton_schulz_of_panels
from shardmuon.rules import elementwise
from shardmuon.rules.base import Commit, Group, Shard, UpdateRule, wide

__all__ = ["MuonRule", "update_scale"]


def update_scale(rows: int, cols: int, adjust_lr_fn: str | None) -> float:
    """Factor on the orthogonalized update of a rows x cols matrix (the global shape).

    None and "original": sqrt(max(1, rows / cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols)).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


class MuonRule(UpdateRule):
    """State: `momentum_buffer`, the running average of gradients, in `momentum_dtype`."""

    shares = True
    prepare_keys = ("momentum", "nesterov")

    def init_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        dtype = group["momentum_dtype"] or parameter.dtype
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=dtype, requires_grad=False)}

    def prepare(self, shard: Shard, commit: Commit) -> Tensor:
        buffer = shard.state["momentum_buffer"]
        momentum = shard.group["momentum"]
        gradient = wide(shard.gradient.to(buffer.dtype))
        average = torch.lerp(wide(buffer), gradient, 1 - momentum).to(buffer.dtype)
        commit.write(buffer, average)
        if not shard.group["nesterov"]:
            return average
        return torch.lerp(gradient, wide(average), momentum)

    def orthogonalize(self, whole: Tensor, group: Group) -> tuple[Tensor, Tensor | None]:
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
        value = wide(shard.parameter) * keep
        commit.write(shard.parameter, value.add_(update, alpha=scale))

    def prepare_all(
        self, shards: Sequence[Shard], places: Sequence[Tensor | None], commit: Commit
    ) -> None:
        together: list[elementwise.Preparation] = []
        for shard, place in zip(shards, places, strict=True):
            buffer, group = shard.state["momentum_buffer"], shard.group
            if elementwise.takes(buffer, shard.gradient, rows=True):
                decay, nesterov = float(group["momentum"]), group["nesterov"]
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
                together.append(elementwise.Application(shard.parameter, update, keep, scale))
            else:
                super().apply_all([shard], [update], [stats], commit)
        elementwise.apply_many(together, commit)


def _factors(shard: Shard) -> tuple[float, float]:
    """What the parameter and what the update is multiplied by, before they are added."""
    group = shard.group
    lr = float(group["lr"])
    scale = update_scale(shard.rows, shard.cols, group["adjust_lr_fn"])
    return 1 - lr * float(group["weight_decay"]), -lr * scale
