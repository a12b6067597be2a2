"""Elementwise work over many tensors: one launch for all, where a GPU is.

Owns which tensors go together and the tables of addresses that a launch reads. What it computes is
`MuonRule.prepare` and `MuonRule.apply`, to the bit; those remain the definition and do the rest.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon.orthogonalize.products import has_kernels
from shardmuon.rules.base import Commit

__all__ = [
    "Application",
    "Preparation",
    "apply_many",
    "bit_sum",
    "has_nonfinite",
    "prepare_many",
    "takes",
]

_HALVES = (torch.float32, torch.bfloat16, torch.float16)


class Preparation(NamedTuple):
    """Advance `momentum` by `gradient` and write the update into `place`, if it travels at all.

    Gradient and momentum of one shape, with contiguous rows; the place is flat. All on one GPU.
    """

    gradient: Tensor
    momentum: Tensor
    place: Tensor | None
    decay: float
    nesterov: bool


class Application(NamedTuple):
    """parameter <- parameter keep + update scale, in float32, rounded once. The update is flat.

    cautious: elements whose update has the opposite sign are not multiplied by `keep`.
    """

    parameter: Tensor
    update: Tensor
    keep: float
    scale: float
    cautious: bool = False


def takes(*tensors: Tensor, rows: bool = False) -> bool:
    """Whether a kernel can work on these together; rows: only rows need be contiguous."""
    for tensor in tensors:  # a loop, because a step asks hundreds of times
        if not (tensor.is_cuda and tensor.dtype in _HALVES):
            return False
        by_rows = rows and tensor.ndim == 2 and tensor.stride(1) == 1
        if not (by_rows or tensor.is_contiguous()):
            return False
    return has_kernels(tensors[0].device)


def prepare_many(preparations: Sequence[Preparation], commit: Commit) -> None:
    """Run `preparations`, one launch for those of one kind."""
    if not preparations:
        return
    from shardmuon.rules.kernels import BLOCK, prepare_kernel

    kinds: dict[tuple[Any, ...], list[Preparation]] = defaultdict(list)
    for each in preparations:
        wire = each.momentum.dtype if each.place is None else each.place.dtype
        kind = (each.gradient.dtype, each.momentum.dtype, wire, each.decay, each.nesterov)
        kinds[kind].append(each)
    for (_, _, wire, _, _), same in kinds.items():
        first = same[0]
        shapes = tuple(_rows(each.momentum, each.gradient) for each in same)
        table = [
            [each.gradient.data_ptr() for each in same],
            [each.momentum.data_ptr() for each in same],
            [0 if each.place is None else each.place.data_ptr() for each in same],
            [width for _, width in shapes],
            [
                _row_stride(each.gradient, rows)
                for each, (rows, _) in zip(same, shapes, strict=True)
            ],
            [
                _row_stride(each.momentum, rows)
                for each, (rows, _) in zip(same, shapes, strict=True)
            ],
            [width if rows > 1 else 0 for rows, width in shapes],
        ]
        device = first.momentum.device
        blocks = _blocks(shapes, BLOCK, device)
        prepare_kernel[(len(blocks),)](
            _on(device, _host(table)),
            blocks,
            _guard(commit, blocks),
            len(same),
            first.decay,
            1 - first.decay,
            NESTEROV=first.nesterov,
            WRITES=commit.writes,
            GUARDED=commit.accepted is not None,
            GRADIENT=_triton_type(first.gradient.dtype),
            MOMENTUM=_triton_type(first.momentum.dtype),
            WIRE=_triton_type(wire),
            ALIGNED=_is_aligned(table[:3], table[4:]),
            BLOCK=BLOCK,
        )


def apply_many(applications: Sequence[Application], commit: Commit) -> None:
    """Run `applications`, one launch for those of one kind."""
    if not applications:
        return
    from shardmuon.rules.kernels import BLOCK, apply_kernel

    kinds: dict[tuple[Any, ...], list[Application]] = defaultdict(list)
    for each in applications:
        kinds[each.parameter.dtype, each.update.dtype, each.cautious].append(each)
    for same in kinds.values():
        first = same[0]
        shapes = tuple(_rows(each.parameter) for each in same)
        table = [
            [each.parameter.data_ptr() for each in same],
            [each.update.data_ptr() for each in same],
            [width for _, width in shapes],
            [
                _row_stride(each.parameter, rows)
                for each, (rows, _) in zip(same, shapes, strict=True)
            ],
            [width if rows > 1 else 0 for rows, width in shapes],
        ]
        factors = [[each.keep for each in same], [each.scale for each in same]]
        device = first.parameter.device
        blocks = _blocks(shapes, BLOCK, device)
        apply_kernel[(len(blocks),)](
            _on(device, _host(table)),
            _on(device, _host(factors, torch.float32)),
            blocks,
            _guard(commit, blocks),
            len(same),
            GUARDED=commit.accepted is not None,
            PARAMETER=_triton_type(first.parameter.dtype),
            UPDATE=_triton_type(first.update.dtype),
            CAUTIOUS=first.cautious,
            ALIGNED=_is_aligned(table[:2], table[3:]),
            BLOCK=BLOCK,
        )


def has_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """bool []: some element is inf or nan. tensors: at least one, as `takes` wants them."""
    found = torch.zeros((), dtype=torch.bool, device=tensors[0].device)
    _scan(tensors, found, "nonfinite_kernel")
    return found


def bit_sum(tensors: Sequence[Tensor]) -> Tensor:
    """int64 []: the bits of all elements as integers, added up (wrapping): a cheap fingerprint.

    Zero on the CPU for no tensors.
    """
    full = [tensor for tensor in tensors if tensor.numel()]
    total = torch.zeros((), dtype=torch.int64, device=full[0].device if full else None)
    if full and takes(*full):
        _scan(full, total, "bit_sum_kernel")
        return total
    for tensor in full:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        total += tensor.view(integers).sum(dtype=torch.int64)
    return total


def _scan(tensors: Sequence[Tensor], result: Tensor, kernel: str) -> None:
    """Run a kernel that reads tensors and writes one number, one launch per dtype."""
    from shardmuon.rules import kernels

    device = tensors[0].device
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype].append(tensor)
    for dtype, same in kinds.items():
        sizes = tuple(tensor.numel() for tensor in same)
        addresses = [tensor.data_ptr() for tensor in same]
        blocks = _blocks(tuple((1, size) for size in sizes), kernels.BLOCK, device)
        getattr(kernels, kernel)[(len(blocks),)](
            _on(device, _host([addresses, sizes])),
            blocks,
            result,
            len(same),
            TYPE=_triton_type(dtype),
            ALIGNED=all(address % 16 == 0 for address in addresses),
            BLOCK=kernels.BLOCK,
        )


def _host(numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    """On the CPU, whatever the user's default device is."""
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def _on(device: torch.device, table: Tensor) -> Tensor:
    """A copy on the GPU, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _guard(commit: Commit, other: Tensor) -> Tensor:
    """What a kernel reads to learn whether the step is taken; anything where it need not ask."""
    return other if commit.accepted is None else commit.accepted


def _rows(*tensors: Tensor) -> tuple[int, int]:
    """(rows, width) as which a kernel sees tensors of one shape: one row if it can."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return 1, tensors[0].numel()
    rows, width = tensors[0].shape
    return rows, width


def _row_stride(tensor: Tensor, rows: int) -> int:
    return tensor.stride(0) if rows > 1 else 0


def _is_aligned(addresses: list[list[int]], strides: list[list[int]]) -> bool:
    """Whether all rows start at multiples of 16 bytes, in any of the dtypes."""
    starts = all(address % 16 == 0 for row in addresses for address in row)
    return starts and all(stride % 8 == 0 for row in strides for stride in row)


@functools.lru_cache(maxsize=256)
def _blocks(shapes: tuple[tuple[int, int], ...], block: int, device: torch.device) -> Tensor:
    """int32 [blocks, 2]: the tensor that each block of a launch works on, and its number there."""
    counts = _host([rows * -(-width // block) for rows, width in shapes])
    tensors = torch.repeat_interleave(torch.arange(len(shapes), device="cpu"), counts)
    starts = torch.cumsum(counts, 0) - counts
    numbers = torch.arange(len(tensors), device="cpu") - starts[tensors]
    return torch.stack([tensors, numbers], dim=1).to(torch.int32).to(device)


def _triton_type(dtype: torch.dtype) -> object:
    import triton.language as tl

    return getattr(tl, {torch.float32: "float32", torch.bfloat16: "bfloat16"}.get(dtype, "float16"))
