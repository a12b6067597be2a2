"""The Triton kernel that scales, rounds and turns matrices in one pass. Imported only where needed.

torch's own kernels reach a third of the memory's speed where dtypes differ, and less where rows and
columns change places.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["scaled_copy"]

SIDE = 64


def scaled_copy(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [n, r, c] of any strides times factors (n float32), as a contiguous tensor of `dtype`."""
    n, r, c = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    _kernel[(triton.cdiv(c, SIDE), triton.cdiv(r, SIDE), n)](
        x,
        x if factors is None else factors.contiguous(),
        out,
        r,
        c,
        *x.stride(),
        HAS_FACTORS=factors is not None,
        TYPE=types[dtype],
        SIDE=SIDE,
    )
    return out


@triton.jit
def _kernel(  # noqa: PLR0913  (a kernel has no objects)
    x,
    factors,
    out,
    r,
    c,
    of_matrix,
    of_row,
    of_column,
    HAS_FACTORS: tl.constexpr,
    TYPE: tl.constexpr,
    SIDE: tl.constexpr,
):
    z = tl.program_id(2).to(tl.int64)
    i = (tl.program_id(1) * SIDE + tl.arange(0, SIDE))[:, None].to(tl.int64)
    j = (tl.program_id(0) * SIDE + tl.arange(0, SIDE))[None, :].to(tl.int64)
    exist = (i < r) & (j < c)
    block = tl.load(x + z * of_matrix + i * of_row + j * of_column, mask=exist, other=0.0)
    block = block.to(tl.float32)
    if HAS_FACTORS:
        block *= tl.load(factors + z)
    tl.store(out + z * r * c + i * c + j, block.to(TYPE), mask=exist)
