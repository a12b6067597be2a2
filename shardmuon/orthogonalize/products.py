"""Products of matrices whose result is known to be symmetric.

Owns which of two ways computes them: a kernel that computes one half and writes both, or torch. The
kernel needs Triton, which comes with CUDA builds of torch, and is imported when first used.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

__all__ = ["kernel_takes", "symmetric_product"]


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

    a, b: [n, r, k] contiguous, one dtype. add: [n, r, r] symmetric. Returns a new [n, r, r]. Sums
    are float32 and rounded once. By the kernel the result is exactly symmetric outside of the
    square tiles on the diagonal.
    """
    if kernel_takes(a):
        from shardmuon.orthogonalize.kernels import symmetric_tiles

        return symmetric_tiles(a, b, alpha, add, beta, diagonal)
    if add is None:
        out = torch.bmm(a, b.mT)
        out = out if alpha == 1.0 else out.mul_(alpha)
    else:
        out = torch.baddbmm(add, a, b.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def kernel_takes(a: Tensor) -> bool:
    """Whether the kernel computes products of matrices like `a`.

    Its loads want rows that start at multiples of 16 bytes, on a GPU that has tensor descriptors.
    """
    return (
        a.is_cuda
        and a.dtype in (torch.float16, torch.bfloat16)
        and a.size(-1) % 8 == 0
        and a.size(-2) % 8 == 0
        and a.numel() > 0
        and _has_kernel(a.device.index or 0)
    )


@functools.cache
def _has_kernel(device: int) -> bool:
    found = importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device)[0] >= 9
