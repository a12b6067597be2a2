"""Symmetric products on Hopper: a persistent kernel in Gluon, Triton's lower level.

Owns who does what when inside a GPU. One program per processor. A producer warp fills a ring of
shared-memory stages; two warpgroups multiply from it, 64 rows each. A tile's numbers wait in
registers, rounded, and are stored (once as they are, once transposed) between the first products of
the next tile, so that the tensor cores work on. Tiles are 128 x 256, as large as registers allow,
for they move least from the L2 cache. These leave every other 128 x 128 block on the diagonal; such
blocks come last and even out the processors' loads, and there the upper 64 rows compute 64 columns
only.
"""

# ruff: noqa: PLR0913, RUF005, RUF059  (a kernel has no objects, and fewer operations on tuples)
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["symmetric_tiles"]

PART = gl.constexpr(64)  # rows of a warpgroup, depth of a stage, side of what is stored at a time
BLOCK = gl.constexpr(128)
STAGES = gl.constexpr(4)
BUFFERS = gl.constexpr(2)


def symmetric_tiles(
    a: Tensor, b: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float
) -> Tensor:
    """alpha a b^T + beta add + diagonal I; see `kernels.symmetric_tiles`."""
    n, r, k = a.shape
    out = a.new_empty(n, r, r)
    blocks = triton.cdiv(r, 128)
    wide = sum((i + 1) // 2 for i in range(blocks))
    even = (blocks + 1) // 2
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count

    def tiles(matrices):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return TensorDescriptor.from_tensor(matrices.flatten(0, 1), [128, 64], layout)

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    _kernel[(min(processors, n * (wide + even)),)](
        tiles(a),
        tiles(b),
        tiles(out if add is None else add),
        TensorDescriptor.from_tensor(out, [1, 64, 64], layout),
        float(alpha),
        float(beta),
        float(diagonal),
        r,
        max(4, triton.cdiv(k, 64)),  # the first 4 products of a tile store the one before
        n * wide,
        n * even,
        wide,
        even,
        HAS_ADD=add is not None,
        TYPE=gl.float16 if a.dtype == torch.float16 else gl.bfloat16,
        num_warps=4,
        maxnreg=168,
    )
    return out


@gluon.jit
def _wide(t, wide):
    """Matrix, row block and first column block of the t-th wide tile. Rows 2p - 1 and 2p hold p."""
    z = t // wide
    t = t % wide
    p = ((gl.sqrt(4.0 * t.to(gl.float32) + 1.0) + 1.0) * 0.5).to(gl.int32)
    p = gl.where(p * (p + 1) <= t, p + 1, p)
    p = gl.where(p * (p - 1) > t, p - 1, p)
    t -= p * (p - 1)
    return z, 2 * p - 1 + t // p, t % p * 2


@gluon.jit
def _load(a, b, add, ring, step, z, i, j, r, steps, BLOCKS: gl.constexpr, HAS_ADD: gl.constexpr):
    """Load a tile's operands, and then what is added to it, 128 columns to a stage."""
    left, right, full, empty = ring
    ADDS: gl.constexpr = BLOCKS if HAS_ADD else 0
    for q in range(steps + ADDS):
        s = step % STAGES
        ready = full.index(s)
        mbarrier.wait(empty.index(s), (step // STAGES & 1) ^ 1)
        if q < steps:
            mbarrier.expect(ready, (1 + BLOCKS) * BLOCK * PART * 2)
            tma.async_copy_global_to_shared(a, [z * r + i * BLOCK, q * PART], ready, left.index(s))
            for h in gl.static_range(BLOCKS):
                tma.async_copy_global_to_shared(
                    b,
                    [z * r + (j + h) * BLOCK, q * PART],
                    ready,
                    right.index(s).slice(h * BLOCK, BLOCK),
                )
        else:
            mbarrier.expect(ready, 2 * BLOCK * PART * 2)
            for h in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    add,
                    [z * r + i * BLOCK, (j + q - steps) * BLOCK + h * PART],
                    ready,
                    right.index(s).slice(h * BLOCK, BLOCK),
                )
        step += 1
    return step


@gluon.jit
def _halve(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def _send(out, staging, sent, x, z, row, column):
    buffer = staging.index(sent % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    gl.thread_barrier()
    buffer.reshape([PART, PART]).store(x)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [z, row * PART, column * PART], buffer)
    return sent + 1


@gluon.jit
def _store(out, staging, sent, x, z, row, column):
    """Store 64 x 64 numbers and their mirror image; nothing above the diagonal."""
    if column <= row:
        sent = _send(out, staging, sent, x, z, row, column)
        if column < row:
            sent = _send(out, staging, sent, x.permute(1, 0), z, column, row)
    return sent


@gluon.jit
def _round(x, source, row, column, scalars, HAS_ADD: gl.constexpr, TYPE: gl.constexpr):
    alpha, beta, diagonal = scalars
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    x = gl.convert_layout(x, LAYOUT) * alpha
    if HAS_ADD:
        x += beta * source.load(LAYOUT).to(gl.float32)
    if column == row:
        rows = gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
        x += gl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    return x.to(TYPE)


@gluon.jit
def _multiply(ring, step, acc, use_acc, GROUP: gl.constexpr):
    left, right, full, empty = ring
    s = step % STAGES
    mbarrier.wait(full.index(s), step // STAGES & 1)
    x = left.index(s).slice(GROUP * PART, PART)
    y = right.index(s).slice(0, acc.shape[1]).permute((1, 0))
    return warpgroup_mma(x, y, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _compute(
    out,
    staging,
    ring,
    state,
    tile,
    steps,
    scalars,
    PARTS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ADD: gl.constexpr,
    TYPE: gl.constexpr,
):
    """Compute 64 rows of a tile; meanwhile store those `before`, whose place is `at`.

    state: (products begun, blocks sent, before, at), returned as they are afterwards.
    """
    left, right, full, empty = ring
    step, sent, before, at = state
    z, i, j = tile
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS * PART, 16])
    acc = gl.zeros([PART, PARTS * PART], gl.float32, LAYOUT)
    for c in gl.static_range(PARTS):
        acc = _multiply(ring, step, acc, c > 0, GROUP)
        sent = _store(out, staging, sent, before[c], at[0], at[1], at[2] + c)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if c > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    for _ in range(PARTS, steps):
        acc = _multiply(ring, step, acc, True, GROUP)
        # The product before this one is done: its stage may be filled again.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    parts = (acc,)
    if PARTS >= 2:
        parts = _halve(acc)
    if PARTS == 4:
        parts = _halve(parts[0]) + _halve(parts[1])
    now = ()
    for c in gl.static_range(PARTS):
        s = step % STAGES
        if HAS_ADD and c % 2 == 0:
            mbarrier.wait(full.index(s), step // STAGES & 1)
        source = right.index(s).slice(c % 2 * BLOCK + GROUP * PART, PART)
        part = _round(parts[c], source, 2 * i + GROUP, 2 * j + c, scalars, HAS_ADD, TYPE)
        now = now + (part,)
        if HAS_ADD and (c % 2 == 1 or PARTS == 1):
            fence_async_shared()
            mbarrier.arrive(empty.index(s))
            step += 1
    return step, sent, now, (z, 2 * i + GROUP, 2 * j)


@gluon.jit
def _evens(wides):
    """(first diagonal block of this program, how many of the programs take two at once).

    Programs that get one wide tile less than others take the first blocks, two each.
    """
    here = gl.program_id(0)
    count = gl.num_programs(0)
    busy = wides % count
    free = count - busy
    return here - busy + gl.where(here < busy, count + free, 0), free


@gluon.jit
def _produce(a, b, add, ring, sizes, HAS_ADD: gl.constexpr):
    """Load all tiles of this program."""
    r, steps, wides, evens, wide, even = sizes
    count = gl.num_programs(0)
    first, free = _evens(wides)
    step = 0
    for t in range(gl.program_id(0), wides, count):
        z, i, j = _wide(t, wide)
        step = _load(a, b, add, ring, step, z, i, j, r, steps, 2, HAS_ADD)
    t = first
    while t < evens:
        i = t % even * 2
        step = _load(a, b, add, ring, step, t // even, i, i, r, steps, 1, HAS_ADD)
        t += gl.where(t < free, free, count)


@gluon.jit
def _consume(
    out,
    staging,
    ring,
    scalars,
    sizes,
    HAS_ADD: gl.constexpr,
    TYPE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute and store one warpgroup's rows of all tiles of this program."""
    r, steps, wides, evens, wide, even = sizes
    here = gl.program_id(0)
    count = gl.num_programs(0)
    first, free = _evens(wides)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    PARTS: gl.constexpr = 1 + GROUP
    zero = gl.zeros([PART, PART], TYPE, LAYOUT)
    nowhere = (here * 0, here * 0, here * 0 + 1)  # above the diagonal: nothing to store
    state = (here * 0, here * 0, (zero, zero, zero, zero), nowhere)
    for t in range(here, wides, count):
        tile = _wide(t, wide)
        state = _compute(out, staging, ring, state, tile, steps, scalars, 4, GROUP, HAS_ADD, TYPE)
    step, sent = _flush(out, staging, state, 4)
    rest = (zero,)
    if PARTS == 2:
        rest = (zero, zero)
    state = (step, sent, rest, nowhere)
    t = first
    while t < evens:
        i = t % even * 2
        tile = (t // even, i, i)
        state = _compute(
            out, staging, ring, state, tile, steps, scalars, PARTS, GROUP, HAS_ADD, TYPE
        )
        t += gl.where(t < free, free, count)
    _flush(out, staging, state, PARTS)
    tma.store_wait(0)


@gluon.jit
def _flush(out, staging, state, PARTS: gl.constexpr):
    """Store what the last tile left."""
    step, sent, before, at = state
    for c in gl.static_range(PARTS):
        sent = _store(out, staging, sent, before[c], at[0], at[1], at[2] + c)
    return step, sent


@gluon.jit(do_not_specialize=["r", "steps", "wides", "evens", "wide", "even"])
def _kernel(
    a,
    b,
    add,
    out,
    alpha,
    beta,
    diagonal,
    r,
    steps,
    wides,
    evens,
    wide,
    even,
    HAS_ADD: gl.constexpr,
    TYPE: gl.constexpr,
):
    left = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK, PART], a.layout)
    right = gl.allocate_shared_memory(TYPE, [STAGES, 2 * BLOCK, PART], a.layout)
    upper = gl.allocate_shared_memory(TYPE, [BUFFERS, 1, PART, PART], out.layout)
    lower = gl.allocate_shared_memory(TYPE, [BUFFERS, 1, PART, PART], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    ring = (left, right, full, empty)
    scalars = (alpha, beta, diagonal)
    sizes = (r, steps, wides, evens, wide, even)
    gl.warp_specialize(
        [
            (_consume, (out, upper, ring, scalars, sizes, HAS_ADD, TYPE, 0)),
            (_consume, (out, lower, ring, scalars, sizes, HAS_ADD, TYPE, 1)),
            (_produce, (a, b, add, ring, sizes, HAS_ADD)),
        ],
        [4, 1],
        [240, 24],
    )
