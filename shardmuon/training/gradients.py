"""Sizes of gradients and updates over all ranks, and clipping.

Owns arithmetic on the local shards with one small all-reduce, instead of DTensor arithmetic, which
would redistribute. Every parameter is either sharded over all ranks or whole in one process, so
that the sum over ranks counts each element once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon.exchange import collectives

__all__ = ["UpdateSize", "clip_", "global_norm", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(locals_: Sequence[Tensor]) -> Tensor:
    """Root of the sum of squares over all tensors and ranks: a 0-d float32 tensor."""
    norms = torch._foreach_norm(list(locals_), 2, dtype=torch.float32)
    return collectives.all_reduce_sum_(torch.stack(norms).square().sum()).sqrt()


def clip_(parameters: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`.

    Returns the norm before, 0-d float32 on the device. The factor is that of
    `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    norm = global_norm(grads)
    if max_norm is not None:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class UpdateSize:
    """Root mean square of what one optimizer step changed in some parameters.

    Copies the local shards when made; lives only around a step that is logged.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before = [local(p).detach().clone() for p in parameters]

    def rms(self) -> float:
        """After the step: RMS over all elements of all parameters on all ranks."""
        changes = [
            local(p).detach() - b for p, b in zip(self._parameters, self._before, strict=True)
        ]
        elements = sum(p.numel() for p in self._parameters)
        return float(global_norm(changes)) / math.sqrt(max(1, elements))
