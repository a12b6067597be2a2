"""AdamW for parameters that are not matrices, by torch's own functional implementation.

Runs on local tensors: AdamW is elementwise, so a shard needs nothing from other ranks. Fused on
CUDA, single-tensor on CPU (torch's own default there), so on CPU it is bit-equal to
`torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from shardmuon import limits
from shardmuon.groups import StateKind
from shardmuon.keys import Key, number, pair
from shardmuon.rules.base import Commit, ElementRule, ElementShard, Group

__all__ = ["AdamWRule"]


class AdamWRule(ElementRule):
    """State: `step`, the number of steps taken, and the averages `exp_avg` and `exp_avg_sq`."""

    # The defaults of torch.optim.AdamW, which differ from Muon's.
    keys = {
        "lr": Key(1e-3, number(limits.NotNegative)),
        "betas": Key((0.9, 0.999), pair(limits.Decay)),
        "eps": Key(1e-8, number(limits.NotNegative)),
        "weight_decay": Key(0.01, number(limits.NotNegative)),
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
        [s.state["exp_avg"] for s in shards],
        [s.state["exp_avg_sq"] for s in shards],
        [],
        [s.state["step"] for s in shards],
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
