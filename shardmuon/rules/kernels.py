"""Triton kernels that update many tensors in one launch. Imported only where Triton and a GPU are.

Owns the arithmetic, which is torch's to the bit: sums of a product are fused where torch's own
kernels fuse them. Tensors come as addresses in a table, as rows of equal width, and a row is cut
into blocks of `BLOCK` elements; block i of the launch works on block `places[2 i + 1]` of tensor
`places[2 i]`. Contiguous tensors are one row.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "apply_kernel", "bit_sum_kernel", "nonfinite_kernel", "prepare_kernel"]

BLOCK = 2048


@triton.jit
def _lerp(start, end, weight):
    """torch.lerp in float32: from the nearer end."""
    step = end - start
    near = tl.fma(weight, step, start)
    far = tl.fma(-step, 1.0 - weight, end)
    return tl.where(tl.abs(weight) < 0.5, near, far)


@triton.jit
def _pointer(table, row, number, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address `tensor` in a row of the table, which has `number` columns."""
    address = tl.load(table + row * number + tensor)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(TYPE))


@triton.jit
def _block(table, places, row, number, BLOCK: tl.constexpr):
    """(tensor, offsets, mask) of this program; sizes are in row `row` of the table."""
    tensor = tl.load(places + 2 * tl.program_id(0))
    first = tl.load(places + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    return tensor, offsets, offsets < tl.load(table + row * number + tensor)


@triton.jit
def _row_block(table, places, row, number, BLOCK: tl.constexpr):
    """(tensor, row of the tensor, columns, mask) of this program; widths are in row `row`."""
    tensor = tl.load(places + 2 * tl.program_id(0))
    width = tl.load(table + row * number + tensor)
    block = tl.load(places + 2 * tl.program_id(0) + 1).to(tl.int64)
    blocks = (width + BLOCK - 1) // BLOCK
    columns = block % blocks * BLOCK + tl.arange(0, BLOCK)
    return tensor, block // blocks, columns, columns < width


@triton.jit
def _row_start(table, row, number, tensor, ALIGNED: tl.constexpr):
    """Elements between two rows of a tensor; these are in row `row` of the table."""
    stride = tl.load(table + row * number + tensor)
    if ALIGNED:
        stride = tl.multiple_of(stride, 8)
    return stride


@triton.jit
def prepare_kernel(  # noqa: PLR0913
    table,
    places,
    accepted,
    number,
    momentum,
    weight,
    NESTEROV: tl.constexpr,
    WRITES: tl.constexpr,
    GUARDED: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTUM: tl.constexpr,
    WIRE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the table: gradient, momentum, place of the update on the wire (0: none); width;
    elements from row to row of each of the three.

    weight: 1 - momentum, subtracted in double precision as torch is given it.
    """
    tensor, row, columns, mask = _row_block(table, places, 3, number, BLOCK)
    gradients = _pointer(table, 0, number, tensor, GRADIENT, ALIGNED)
    momenta = _pointer(table, 1, number, tensor, MOMENTUM, ALIGNED)
    wire = _pointer(table, 2, number, tensor, WIRE, ALIGNED)
    gradients += row * _row_start(table, 4, number, tensor, ALIGNED)
    momenta += row * _row_start(table, 5, number, tensor, ALIGNED)
    wire += row * _row_start(table, 6, number, tensor, ALIGNED)
    gradient = tl.load(gradients + columns, mask).to(MOMENTUM).to(tl.float32)
    old = tl.load(momenta + columns, mask).to(tl.float32)
    new = _lerp(old, gradient, weight).to(MOMENTUM)
    if WRITES:
        write = mask
        if GUARDED:
            write = mask & (tl.load(accepted) != 0)
        tl.store(momenta + columns, new, write)
    update = new
    if NESTEROV:
        update = _lerp(gradient, new.to(tl.float32), momentum)
    travels = tl.load(table + 2 * number + tensor) != 0
    tl.store(wire + columns, update.to(WIRE), mask & travels)


@triton.jit
def apply_kernel(  # noqa: PLR0913
    table,
    factors,
    places,
    accepted,
    number,
    GUARDED: tl.constexpr,
    PARAMETER: tl.constexpr,
    UPDATE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the table: parameter, update; width; elements from row to row of each of the two.

    Rows of `factors`: on the parameter, on the update. CAUTIOUS: the first does not act where the
    two have opposite signs.
    """
    tensor, row, columns, mask = _row_block(table, places, 2, number, BLOCK)
    parameters = _pointer(table, 0, number, tensor, PARAMETER, ALIGNED)
    updates = _pointer(table, 1, number, tensor, UPDATE, ALIGNED)
    parameters += row * _row_start(table, 3, number, tensor, ALIGNED)
    updates += row * _row_start(table, 4, number, tensor, ALIGNED)
    keep = tl.load(factors + tensor)
    scale = tl.load(factors + number + tensor)
    whole = tl.load(parameters + columns, mask).to(tl.float32)
    value = whole * keep
    update = tl.load(updates + columns, mask).to(tl.float32)
    if CAUTIOUS:
        opposed = ((update > 0) & (whole < 0)) | ((update < 0) & (whole > 0))
        value = tl.where(opposed, whole, value)
    write = mask
    if GUARDED:
        write = mask & (tl.load(accepted) != 0)
    tl.store(parameters + columns, tl.fma(scale, update, value).to(PARAMETER), write)


@triton.jit
def _elements(
    table, places, number, TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's block of a tensor, zeros beyond it. Rows of the table: tensor, size."""
    tensor, offsets, mask = _block(table, places, 1, number, BLOCK)
    return tl.load(_pointer(table, 0, number, tensor, TYPE, ALIGNED) + offsets, mask, other=0)


@triton.jit
def nonfinite_kernel(
    table,
    places,
    found,
    number,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sets `found` if an element is inf or nan. The table is that of `_elements`."""
    values = _elements(table, places, number, TYPE, ALIGNED, BLOCK).to(tl.float32)
    bad = tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 0)
    tl.store(found, bad != 0, bad != 0)  # all who write, write the same


@triton.jit
def bit_sum_kernel(
    table,
    places,
    total,
    number,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the bits of all elements, as integers, to `total`. The table is that of `_elements`."""
    values = _elements(table, places, number, TYPE, ALIGNED, BLOCK)
    if tl.float32 == TYPE:
        bits = values.to(tl.int32, bitcast=True)
    else:
        bits = values.to(tl.int16, bitcast=True)
    tl.atomic_add(total, tl.sum(bits.to(tl.int64), 0))
