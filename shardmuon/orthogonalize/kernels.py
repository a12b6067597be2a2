"""The Triton kernel for symmetric products. Imported only where Triton is.

Owns tile shapes, their order and two ways to read and write matrices: tensor descriptors, which
Hopper GPUs have and which want aligned rows, and pointers, for all else. A tile of the lower
triangle is computed once and stored twice, the second time transposed.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["symmetric_tiles", "symmetric_tiles_by_pointers"]

TILE, DEPTH = 128, 64
# From this many rows on, tiles of 128 x 256 move a quarter less from the L2 cache, which limits
# large products; below, too many of them would lie half above the diagonal.
WIDE_ROWS = 3072


def symmetric_tiles(
    a: Tensor, b: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float
) -> Tensor:
    """alpha a b^T + beta add + diagonal I, by tensor descriptors. a, b: [n, r, k]; add: [n, r, r].

    All contiguous, r and k multiples of 8, the first element at a multiple of 16 bytes.
    """
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
        POINTERS=False,
        WIDE=wide,
        TILE=TILE,
        DEPTH=DEPTH,
        TYPE=tl.float16 if a.dtype == torch.float16 else tl.bfloat16,
        num_warps=8 if wide else 4,
        num_stages=3 if wide else 5,
    )
    return out


def symmetric_tiles_by_pointers(
    a: Tensor, b: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float
) -> Tensor:
    """The same by pointers: any r, k and strides."""
    n, r, k = a.shape
    out = a.new_empty(n, r, r)
    blocks = triton.cdiv(r, TILE)
    per = blocks * (blocks + 1) // 2
    _kernel[(n * per,)](
        _matrices(a),
        _matrices(b),
        _matrices(out if add is None else add),
        _matrices(out),
        alpha,
        beta,
        diagonal,
        k,
        per,
        HAS_ADD=add is not None,
        POINTERS=True,
        WIDE=False,
        TILE=TILE,
        DEPTH=DEPTH,
        TYPE=tl.float16 if a.dtype == torch.float16 else tl.bfloat16,
        num_warps=8,
        num_stages=3,  # at most 96 KiB of shared memory; GPUs of capability 8.0 on have 99 or more
    )
    return out


def _matrices(x: Tensor) -> tuple[object, ...]:
    """What `_addresses` reads: a pointer, three strides, rows and columns."""
    return (x, *x.stride(), x.size(1), x.size(2))


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
def _addresses(x, z, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of a block are, and which of them exist. Offsets can exceed 32 bits."""
    start, of_matrix, of_row, of_column, rows, columns = x
    i = row + tl.arange(0, HEIGHT)[:, None]
    j = column + tl.arange(0, WIDTH)[None, :]
    offsets = z.to(tl.int64) * of_matrix + i.to(tl.int64) * of_row + j.to(tl.int64) * of_column
    return start + offsets, (i < rows) & (j < columns)


@triton.jit
def _load(x, z, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, POINTERS: tl.constexpr):
    """The block of matrix z that starts at this row and column; zeros beyond the matrix."""
    if POINTERS:
        addresses, exist = _addresses(x, z, row, column, HEIGHT, WIDTH)
        return tl.load(addresses, mask=exist, other=0.0)
    else:
        return x.load([z, row, column]).reshape(HEIGHT, WIDTH)


@triton.jit
def _store(x, z, row, column, block, POINTERS: tl.constexpr):
    """Write a block; nothing beyond the matrix."""
    HEIGHT: tl.constexpr = block.shape[0]
    WIDTH: tl.constexpr = block.shape[1]
    if POINTERS:
        addresses, exist = _addresses(x, z, row, column, HEIGHT, WIDTH)
        tl.store(addresses, block, mask=exist)
    else:
        x.store([z, row, column], block.reshape(1, HEIGHT, WIDTH))


@triton.jit
def _finish(  # noqa: PLR0913  (a kernel has no objects)
    out,
    add,
    acc,
    z,
    i,
    j,
    alpha,
    beta,
    diagonal,
    HAS_ADD: tl.constexpr,
    POINTERS: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Store a square tile and its mirror image; nothing above the diagonal."""
    if j <= i:
        x = acc * alpha
        if HAS_ADD:
            x += beta * _load(add, z, i * TILE, j * TILE, TILE, TILE, POINTERS).to(tl.float32)
        if i == j:
            rows = tl.arange(0, TILE)
            x += tl.where(rows[:, None] == rows[None, :], diagonal, 0.0)
        x = x.to(TYPE)
        _store(out, z, i * TILE, j * TILE, x, POINTERS)
        if i != j:
            _store(out, z, j * TILE, i * TILE, x.T, POINTERS)


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
    POINTERS: tl.constexpr,
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
        left = _load(a, z, i * TILE, start, TILE, DEPTH, POINTERS)
        right = _load(b, z, j * COLUMNS, start, COLUMNS, DEPTH, POINTERS)
        acc = tl.dot(left, right.T, acc)
    if WIDE:
        first, second = acc.reshape(TILE, 2, TILE).permute(0, 2, 1).split()
        _finish(out, add, first, z, i, 2 * j, alpha, beta, diagonal, HAS_ADD, POINTERS, TILE, TYPE)
        _finish(
            out, add, second, z, i, 2 * j + 1, alpha, beta, diagonal, HAS_ADD, POINTERS, TILE, TYPE
        )
    else:
        _finish(out, add, acc, z, i, j, alpha, beta, diagonal, HAS_ADD, POINTERS, TILE, TYPE)
