"""The Triton kernel for symmetric products. Imported only where Triton and a Hopper GPU are.

Owns tile shapes and their order. A tile of the lower triangle is computed once and stored twice,
the second time transposed. Both operands are read along their rows, so that no load is strided.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["symmetric_tiles"]

TILE, DEPTH = 128, 64
# From this many rows on, tiles of 128 x 256 move a quarter less from the L2 cache, which limits
# large products; below, too many of them would lie half above the diagonal.
WIDE_ROWS = 3072


def symmetric_tiles(
    a: Tensor, b: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float
) -> Tensor:
    """alpha a b^T + beta add + diagonal I. a, b: [n, r, k] contiguous; the product is symmetric."""
    n, r, k = a.shape
    out = a.new_empty(n, r, r)
    wide = r >= WIDE_ROWS
    blocks = triton.cdiv(r, TILE)
    per = sum(i // 2 + 1 for i in range(blocks)) if wide else blocks * (blocks + 1) // 2
    columns = 2 * TILE if wide else TILE
    _kernel[(n * per,)](
        TensorDescriptor.from_tensor(a, [1, TILE, DEPTH]),
        TensorDescriptor.from_tensor(b, [1, columns, DEPTH]),
        TensorDescriptor.from_tensor(out if add is None else add, [1, TILE, TILE]),
        TensorDescriptor.from_tensor(out, [1, TILE, TILE]),
        alpha,
        beta,
        diagonal,
        k,
        per,
        HAS_ADD=add is not None,
        WIDE=wide,
        TILE=TILE,
        DEPTH=DEPTH,
        TYPE=tl.float16 if a.dtype == torch.float16 else tl.bfloat16,
        num_warps=8 if wide else 4,
        num_stages=3 if wide else 5,
    )
    return out


@triton.jit
def _place(t, WIDE: tl.constexpr):
    """Row block and column block of the t-th tile; column blocks of wide tiles are pairs."""
    if WIDE:
        p = ((tl.sqrt(4.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        p = tl.where((p + 1) * (p + 2) <= t, p + 1, p)
        p = tl.where(p * (p + 1) > t, p - 1, p)
        rest = t - p * (p + 1)
        return 2 * p + rest // (p + 1), rest % (p + 1)
    else:
        i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
        i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
        return i, t - i * (i + 1) // 2


@triton.jit
def _store(  # noqa: PLR0913  (a kernel has no objects)
    out, add, acc, z, i, j, alpha, beta, diagonal, HAS_ADD, TILE: tl.constexpr, TYPE: tl.constexpr
):
    """Store a square tile and its mirror image; nothing above the diagonal."""
    if j <= i:
        x = acc * alpha
        if HAS_ADD:
            x += beta * add.load([z, i * TILE, j * TILE]).reshape(TILE, TILE).to(tl.float32)
        if i == j:
            rows = tl.arange(0, TILE)
            x += tl.where(rows[:, None] == rows[None, :], diagonal, 0.0)
        x = x.to(TYPE)
        out.store([z, i * TILE, j * TILE], x.reshape(1, TILE, TILE))
        if i != j:
            out.store([z, j * TILE, i * TILE], x.T.reshape(1, TILE, TILE))


@triton.jit
def _kernel(  # noqa: PLR0913
    a,
    b,
    add,
    out,
    alpha,
    beta,
    diagonal,
    k,
    per,
    HAS_ADD: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    tile = tl.program_id(0)
    z = tile // per
    i, j = _place(tile % per, WIDE)
    COLUMNS: tl.constexpr = 2 * TILE if WIDE else TILE
    acc = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        left = a.load([z, i * TILE, start]).reshape(TILE, DEPTH)
        right = b.load([z, j * COLUMNS, start]).reshape(COLUMNS, DEPTH)
        acc = tl.dot(left, right.T, acc)
    if WIDE:
        first, second = acc.reshape(TILE, 2, TILE).permute(0, 2, 1).split()
        _store(out, add, first, z, i, 2 * j, alpha, beta, diagonal, HAS_ADD, TILE, TYPE)
        _store(out, add, second, z, i, 2 * j + 1, alpha, beta, diagonal, HAS_ADD, TILE, TYPE)
    else:
        _store(out, add, acc, z, i, j, alpha, beta, diagonal, HAS_ADD, TILE, TYPE)
