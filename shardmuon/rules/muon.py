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

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.rules.base import Commit, Group, Shard, wide

__all__ = ["MuonRule", "update_scale"]


def update_scale(rows: int, cols: int, adjust_lr_fn: str | None) -> float:
    """Factor on the orthogonalized update of a rows x cols matrix (the global shape).

    None and "original": sqrt(max(1, rows / cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols)).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


class MuonRule:
    """State: `momentum_buffer`, the running average of gradients, in `momentum_dtype`."""

    row_stats = False

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
        update = newton_schulz(whole, schedule, group["eps"], whole.dtype, group["ns_method"])
        return update, None

    def apply(self, shard: Shard, update: Tensor, row_stats: Tensor | None, commit: Commit) -> None:
        group = shard.group
        lr = float(group["lr"])
        scaled_lr = lr * update_scale(shard.rows, shard.cols, group["adjust_lr_fn"])
        value = wide(shard.parameter) * (1 - lr * group["weight_decay"])
        commit.write(shard.parameter, value.add_(update, alpha=-scaled_lr))
