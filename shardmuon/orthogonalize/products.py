"""Products of matrices whose result is known to be symmetric.

Owns which of three ways computes them: a kernel that computes one half and writes both, with tensor
descriptors or with pointers, or torch. The kernel needs Triton, which comes with CUDA builds of
torch, and is imported when first used.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

__all__ = ["KERNEL_VERSION", "symmetric_product", "way_of"]

KERNEL_VERSION = 1  # raised with every change of the kernel's speed: old measurements are then void


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    add: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """alpha a b^T + beta add + diagonal I, for a product that is symmetric but for rounding.

    a, b: [n, r, k], one dtype, any strides. add: [n, r, r] symmetric. Returns a new [n, r, r].
    By the kernel sums are float32 and rounded once, and the result is exactly symmetric outside of
    the square tiles on the diagonal.
    """
    way = way_of(a, b) if add is None else way_of(a, b, add)
    if way != "torch":
        from shardmuon.orthogonalize import kernels

        by_descriptors = way == "descriptors"
        tiles = kernels.symmetric_tiles if by_descriptors else kernels.symmetric_tiles_by_pointers
        with torch.cuda.device_of(a):  # Triton launches on the current device
            return tiles(a, b, alpha, add, beta, diagonal)
    if add is None:
        out = torch.bmm(a, b.mT)
        out = out if alpha == 1.0 else out.mul_(alpha)
    else:
        out = torch.baddbmm(add, a, b.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def way_of(*operands: Tensor) -> str:
    """Which way computes a product of these: "descriptors", "pointers" or "torch".

    Kernels take half precision from compute capability 8.0 on. Tensor descriptors came with 9.0 and
    want rows that start at multiples of 16 bytes, those of the result too. GPUs from 12.0 on have
    them, but not the 160 KiB of shared memory that tiles by descriptors take.
    """
    a = operands[0]
    if a.dtype not in (torch.float16, torch.bfloat16) or not a.numel():
        return "torch"
    major = _capability(a.device)
    if 9 <= major < 12 and a.size(-2) % 8 == 0 and all(map(_is_aligned, operands)):
        return "descriptors"
    return "pointers" if major >= 8 else "torch"


def _is_aligned(x: Tensor) -> bool:
    starts = (x.data_ptr() // x.element_size(), *x.stride()[:-1])
    return x.is_contiguous() and all(start % 8 == 0 for start in starts)


@functools.cache
def _capability(device: torch.device) -> int:
    """Major compute capability of a GPU that Triton kernels run on, else 0."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0
    found = importlib.util.find_spec("triton") is not None
    return torch.cuda.get_device_capability(device)[0] if found else 0
