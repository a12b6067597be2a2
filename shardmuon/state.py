"""State of a parameter as its rule declares it: made anew, and checked before it is loaded.

Owns the shape, placement and dtype of every kind of state. Local.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardmuon.exchange.blocks import local, zeros_like
from shardmuon.groups import ALGORITHMS, StateKind, cuts_of

__all__ = ["new_counter", "new_state", "shape_of"]


def new_state(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Zeros of every kind, placed like `parameter`."""
    kinds = ALGORITHMS[group["algorithm"]].state
    return {name: _zeros(kind, parameter, group) for name, kind in kinds.items()}


def _zeros(kind: StateKind, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    if kind.form == "counter":
        return new_counter(parameter)
    shape = shape_of(kind, parameter, group)
    return zeros_like(parameter, shape, kind.dtype_for(parameter, group))


def new_counter(parameter: Tensor) -> Tensor:
    """A counter at zero: where the fused kernels of torch read it, as torch itself does it."""
    device = local(parameter).device
    place = device if device.type == "cuda" else torch.device("cpu")
    return torch.zeros((), dtype=torch.float32, device=place)


def shape_of(kind: StateKind, parameter: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
    """Global shape of a kind of state of `parameter`."""
    if kind.form == "counter":
        return ()
    if kind.form == "rows":
        _, cut = cuts_of(parameter, group)[0]
        return cut.row_shape
    return tuple(parameter.shape)
