"""AdamW for parameters that are not matrices, by torch's own functional implementation.

Runs on local tensors: AdamW is elementwise, so a shard needs nothing from other ranks. Fused on
CUDA, single-tensor on CPU (torch's own default there), so on CPU it is bit-equal to
`torch.optim.AdamW`.

With `cautious_weight_decay` torch's function takes the step with weight_decay 0, to P', and then

    P <- P' - lr weight_decay P_old    where not u P_old < 0 (see `opposed`), else P'

The sign of AdamW's update u is that of its first moment after the step, whatever the rounding of
the parameter. P_old is a copy of one local parameter at a time, on GPUs too, so that little memory
is needed. Half-precision parameters are rounded twice, as torch does on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardmuon import limits
from shardmuon.groups import StateKind
from shardmuon.keys import FLAG, Key, number, pair
from shardmuon.rules.base import Commit, ElementRule, ElementShard, Group, opposed, wide

__all__ = ["AdamWRule"]


class AdamWRule(ElementRule):
    """State: `step`, the number of steps taken, and the averages `exp_avg` and `exp_avg_sq`."""

    # The defaults of torch.optim.AdamW, which differ from Muon's.
    keys = {
        "lr": Key(1e-3, number(limits.NotNegative)),
        "betas": Key((0.9, 0.999), pair(limits.Decay)),
        "eps": Key(1e-8, number(limits.NotNegative)),
        "weight_decay": Key(0.01, number(limits.NotNegative)),
        "cautious_weight_decay": Key(False, FLAG),
    }
    state = {
        "step": StateKind("counter"),
        "exp_avg": StateKind("parameter"),
        "exp_avg_sq": StateKind("parameter"),
    }

    def step(self, shards: Sequence[ElementShard], group: Group, commit: Commit) -> None:
        """Empty shards only count: kernels do not take them.

        The counter is part of the state and must not differ between ranks.
        """
        refused = None if commit.accepted is None else (~commit.accepted).float()
        full = []
        for shard in shards:
            if shard.parameter.numel():
                full.append(shard)
            else:
                shard.state["step"].add_(1 if refused is None else 1 - refused)
        cautious = _is_cautious(group)
        on_gpu = [shard for shard in full if shard.parameter.is_cuda]
        if on_gpu and not cautious:
            _run(on_gpu, group, group["weight_decay"], refused)
        for shard in full:  # one by one: torch frees temporaries when it returns
            if cautious:
                _run_cautiously(shard, group, commit, refused)
            elif not shard.parameter.is_cuda:
                _run([shard], group, group["weight_decay"], refused)


def _is_cautious(group: Group) -> bool:
    """A decay of 0 is torch's own step. What a tensor holds is not asked: it may be on a GPU."""
    decay = group["weight_decay"]
    return group["cautious_weight_decay"] and (isinstance(decay, Tensor) or decay != 0)


def _run_cautiously(
    shard: ElementShard, group: Group, commit: Commit, refused: Tensor | None
) -> None:
    old = shard.parameter.clone()
    _run([shard], group, 0.0, refused)
    factor = group["lr"] * group["weight_decay"]
    if isinstance(factor, Tensor):
        factor = factor.reshape(())
    stepped = wide(shard.parameter)
    decayed = stepped - factor * wide(old)
    commit.write(
        shard.parameter, torch.where(opposed(shard.state["exp_avg"], old), stepped, decayed)
    )


def _run(shards: Sequence[ElementShard], group: Group, decay: Any, refused: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [s.parameter for s in shards],
        [s.gradient.to(s.parameter.dtype) for s in shards],
        [s.state["exp_avg"] for s in shards],
        [s.state["exp_avg_sq"] for s in shards],
        [],
        [s.state["step"] for s in shards],
        foreach=False,
        fused=shards[0].parameter.is_cuda,
        found_inf=refused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=decay,
        eps=group["eps"],
        maximize=False,
    )
