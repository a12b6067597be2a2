"""Parameters on any mesh with the deterministic gradients of the reference, and their right norm.

The right numbers come from the whole tensors in float64, apart from the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import reference
from tests.grids import PLAIN, mesh_of, placed
from tests.problems import world_mesh

__all__ = ["Piece", "right_norm", "same_everywhere"]


@dataclass(frozen=True)
class Piece:
    """One parameter. mesh: "world", or the shape of a mesh, and one of its axes if it is on that.

    time: None for a parameter without a gradient, else that of the reference's gradients.
    """

    shape: tuple[int, ...]
    letters: str = PLAIN
    mesh: str | tuple[int, ...] = "world"
    axis: str = ""
    dtype: torch.dtype = torch.float32
    time: float | None = 0.0

    def whole(self) -> Tensor:
        """The whole gradient on the host, in its dtype."""
        rows = self.shape[0]
        values = reference.gradient(rows, math.prod(self.shape[1:]), self.time or 0.0)
        return torch.from_numpy(values).view(self.shape).to(self.dtype)

    def place(self, value: Tensor) -> Tensor:
        """This rank's part of `value`."""
        mesh = world_mesh() if isinstance(self.mesh, str) else mesh_of(self.mesh)
        return placed(value, self.letters, mesh[self.axis] if self.axis else mesh)

    def parameter(self) -> nn.Parameter:
        """On this rank, with its gradient."""
        made = nn.Parameter(self.place(torch.zeros(self.shape, dtype=self.dtype)))
        if self.time is not None:
            made.grad = self.place(self.whole())
        return made


def right_norm(pieces: Sequence[Piece], norm_type: float = 2.0) -> float:
    """Norm of the whole gradients, from the definition."""
    values = [
        np.abs(piece.whole().double().numpy()).ravel() for piece in pieces if piece.time is not None
    ]
    flat = np.concatenate([np.zeros(1), *values])
    if norm_type == math.inf:
        return float(flat.max())
    return float(np.sum(flat**norm_type) ** (1 / norm_type))


def same_everywhere(norm: Tensor) -> float:
    """The value of a norm, after all ranks have compared its bits."""
    assert type(norm) is Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    value = float(norm)
    if dist.is_initialized():
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, np.float32(value).tobytes())
        assert len(set(seen)) == 1, seen
    return value
