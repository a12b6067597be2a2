"""How orthogonal a matrix is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["orthogonality_error", "singular_value_range"]


def orthogonality_error(x: Tensor) -> float:
    """||X X^T - I|| / sqrt(n), n the shorter side: the root mean square of sigma^2 - 1.

    x: [rows, cols], any floating dtype, computed in float64. 0 for an empty matrix.
    """
    wide = x.detach().double()
    wide = wide.mT if wide.size(-2) > wide.size(-1) else wide
    if not wide.numel():
        return 0.0
    eye = torch.eye(wide.size(-2), dtype=torch.float64, device=wide.device)
    return float(torch.linalg.matrix_norm(wide @ wide.mT - eye)) / math.sqrt(wide.size(-2))


def singular_value_range(x: Tensor) -> tuple[float, float]:
    """(smallest, largest) singular value. x: [rows, cols], any floating dtype; (0, 0) if empty."""
    if not x.numel():
        return 0.0, 0.0
    values = torch.linalg.svdvals(x.detach().double())
    return float(values[-1]), float(values[0])
