"""Sizes of gradients and updates over all ranks, and clipping.

Owns arithmetic on the local shards with one small all-reduce, instead of DTensor arithmetic, which
would redistribute and refuses parameters of several meshes. A replicated element lies on several
ranks, the same number for all elements of a tensor: dividing by it, the sum over all ranks counts
each element once on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmuon.exchange import collectives

__all__ = ["UpdateSize", "clip_", "copies", "global_norm", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: Tensor) -> int:
    """Ranks of the run that hold each element of `tensor`, a part of the model.

    Axes that are not of the tensor's own mesh replicate it, as do all for a plain tensor.
    """
    parts = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return collectives.world_size() // parts


def global_norm(
    locals_: Sequence[Tensor], held: Sequence[int], wish: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Root of the sum of squares of all elements, each counted once: a 0-d float32 tensor.

    locals_: this rank's parts. held: of each, the number of `copies`. wish: any number; its sum
    over all ranks, 0-d float32, is the second result and costs no collective of its own.
    """
    norms = torch._foreach_norm(list(locals_), 2, dtype=torch.float32)
    squares = torch._foreach_mul(norms, norms)
    torch._foreach_div_(squares, [float(count) for count in held])
    total = torch.stack(squares).sum()
    sums = collectives.all_reduce_sum_(torch.stack((total, torch.full_like(total, wish))))
    return sums[0].sqrt(), sums[1]


def clip_(
    parameters: Sequence[Tensor], max_norm: float | None, wish: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale all gradients in place so that their global norm is at most `max_norm`.

    Returns the norm before, 0-d float32 on the device, and the sum of all ranks' `wish`. The factor
    is that of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
    """
    whole = [p.grad for p in parameters if p.grad is not None]
    grads = [local(grad) for grad in whole]
    norm, wishes = global_norm(grads, [copies(grad) for grad in whole], wish)
    if max_norm is not None:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm, wishes


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
        norm, _ = global_norm(changes, [copies(p) for p in self._parameters])
        elements = sum(p.numel() for p in self._parameters)
        return float(norm) / math.sqrt(max(1, elements))
