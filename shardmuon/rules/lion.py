"""Lion for parameters that are not matrices: steps of one size, by the sign of an average.

    U <- sign(beta1 M + (1 - beta1) G)
    P <- P (1 - lr weight_decay) - lr U
    M <- beta2 M + (1 - beta2) G

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675; defaults as
in the authors' code, https://github.com/google/automl/tree/master/lion. Runs on local tensors: Lion
is elementwise, so a shard needs nothing from other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmuon import limits
from shardmuon.groups import StateKind
from shardmuon.keys import Key, number, pair
from shardmuon.rules.base import Commit, ElementRule, ElementShard, Group, wide

__all__ = ["LionRule"]

_BATCH_ELEMENTS = 2**20
"""A GPU takes longer than a launch for more than these, so that joining them gains nothing."""


class LionRule(ElementRule):
    """State: `exp_avg`, the average of gradients, in the parameter's dtype."""

    keys = {
        "lr": Key(1e-4, number(limits.NotNegative)),
        "betas": Key((0.9, 0.99), pair(limits.Decay)),
        "weight_decay": Key(0.0, number(limits.NotNegative)),
    }
    state = {"exp_avg": StateKind("parameter")}

    def step(self, shards: Sequence[ElementShard], group: Group, commit: Commit) -> None:
        """On a GPU small parameters go together; every element has the same bits either way."""
        full = [shard for shard in shards if shard.parameter.numel()]
        for batch in _batches(full):
            if len(batch) == 1:
                _advance(batch[0], group, commit)
            else:
                _advance_together(batch, group, commit)


def _batches(shards: Sequence[ElementShard]) -> Iterator[list[ElementShard]]:
    """Shards that are updated as one: of equal dtypes, on a GPU, and small."""
    open_ones: dict[object, list[ElementShard]] = {}
    elements: dict[object, int] = {}
    for shard in shards:
        size = shard.parameter.numel()
        if not shard.parameter.is_cuda or size > _BATCH_ELEMENTS:
            yield [shard]
            continue
        kind = shard.parameter.dtype, shard.gradient.dtype
        if elements.get(kind, 0) + size > _BATCH_ELEMENTS:
            yield open_ones.pop(kind)
            elements[kind] = 0
        open_ones.setdefault(kind, []).append(shard)
        elements[kind] = elements.get(kind, 0) + size
    yield from open_ones.values()


def _advance_together(shards: Sequence[ElementShard], group: Group, commit: Commit) -> None:
    """Update copies that lie one behind the other, and copy the results back."""
    parameters = [shard.parameter for shard in shards]
    averages = [shard.state["exp_avg"] for shard in shards]
    joined = ElementShard(
        _flat(parameters),
        _flat([shard.gradient for shard in shards]),
        {"exp_avg": _flat(averages)},
    )
    _advance(joined, group, commit)
    for targets, flat in ((parameters, joined.parameter), (averages, joined.state["exp_avg"])):
        parts = flat.split([target.numel() for target in targets])
        views = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
        torch._foreach_copy_(targets, views)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _advance(shard: ElementShard, group: Group, commit: Commit) -> None:
    """Every operation rounds once, so that no kernel can give an element other bits."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    buffer = shard.state["exp_avg"]
    gradient, average = wide(shard.gradient.to(buffer.dtype)), wide(buffer)
    update = _mixed(average, gradient, beta1).sign_()
    commit.write(buffer, _mixed(average, gradient, beta2))
    value = wide(shard.parameter) * (1 - lr * decay)
    commit.write(shard.parameter, value.sub_(update.mul_(lr)))


def _mixed(average: Tensor, gradient: Tensor, beta: float) -> Tensor:
    return (average * beta).add_(gradient * (1 - beta))
