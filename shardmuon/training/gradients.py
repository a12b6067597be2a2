"""Clipping in a training run, and the size of updates.

Owns what a run adds to the library's own norm: a number that travels with it, and the change that
a step makes. How elements are counted is `shardmuon.clipping`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardmuon import clipping
from shardmuon.exchange.blocks import local

__all__ = ["UpdateSize", "clip_"]


@torch.no_grad()
def clip_(
    parameters: Sequence[Tensor], max_norm: float | None, wish: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `shardmuon.clip_grad_norm_`, or only its norm, and the sum of all ranks' `wish` with it.

    Both are float32 [] on the device.
    """
    gradients = clipping.count_gradients(parameters)
    norm, wishes = clipping.total_norm(gradients, wish=wish)
    if max_norm is not None:
        clipping.scale_(gradients.parts, norm, max_norm)
    return norm, wishes


class UpdateSize:
    """Root mean square of what one optimizer step changed in some parameters.

    Copies the local shards when made; lives only around a step that is logged.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before = [local(p).clone() for p in parameters]

    def rms(self) -> float:
        """After the step: RMS over all elements of all parameters on all ranks."""
        changes = [local(p) - b for p, b in zip(self._parameters, self._before, strict=True)]
        norm, _ = clipping.total_norm(replace(clipping.count(self._parameters), parts=changes))
        elements = sum(p.numel() for p in self._parameters)
        return float(norm) / math.sqrt(max(1, elements))
