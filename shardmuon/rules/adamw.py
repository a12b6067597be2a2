"""AdamW for parameters that are not matrices, by torch's own functional implementation.

Runs on local tensors: AdamW is elementwise, so a shard needs nothing from other ranks. Fused on
CUDA, single-tensor on CPU (torch's own default there), so on CPU it is bit-equal to
`torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardmuon.rules.base import Commit, Group

__all__ = ["ElementShard", "adamw_step", "init_adamw_state"]


class ElementShard(NamedTuple):
    """Local tensors of one AdamW parameter, equal shapes, maybe empty; `step` is [] float32."""

    parameter: Tensor
    gradient: Tensor
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def init_adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """`step` 0 and zero moments placed like `parameter`. No collective."""
    # The fused kernel reads the counter on the device; elsewhere torch keeps it on the host.
    device = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def adamw_step(shards: Sequence[ElementShard], group: Group, commit: Commit) -> None:
    """Advance parameters, moments and counters of one group in place.

    Empty shards only count: kernels do not take them, but the counter is part of the state and
    must not differ between ranks.
    """
    refused = None if commit.accepted is None else (~commit.accepted).float()
    full = []
    for shard in shards:
        if shard.parameter.numel():
            full.append(shard)
        else:
            shard.step.add_(1 if refused is None else 1 - refused)
    on_gpu = [shard for shard in full if shard.parameter.is_cuda]
    if on_gpu:
        _run(on_gpu, group, True, refused)
    for shard in full:
        if not shard.parameter.is_cuda:  # one by one: torch frees temporaries when it returns
            _run([shard], group, False, refused)


def _run(shards: Sequence[ElementShard], group: Group, fused: bool, refused: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [s.parameter for s in shards],
        [s.gradient.to(s.parameter.dtype) for s in shards],
        [s.exp_avg for s in shards],
        [s.exp_avg_sq for s in shards],
        [],
        [s.step for s in shards],
        foreach=False,
        fused=fused,
        found_inf=refused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
