"""The standard Newton-Schulz iteration, in torch's own arithmetic.

Owns one function, bit-equal to `torch.optim.Muon` on one matrix, and its batched form for GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import Triple

__all__ = ["newton_schulz"]


def newton_schulz(
    matrix: Tensor, coefficients: Triple, steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Approximate orthogonal factor of each matrix.

    matrix: [rows, cols] or a batch [n, rows, cols], any floating dtype; not changed.
    Returns a tensor of the same shape in `dtype`, column-major where rows > cols.

    x is transposed if tall, divided by its Frobenius norm (at least `eps`), then `steps` times
    A = x x^T, x <- a x + (b A + c A A) x. The cast comes before the norm (torch's order). A zero
    matrix gives zero. A 2-D matrix runs the calls that torch.optim.Muon makes, so equal input in
    equal memory format gives equal bits; the batched calls may differ in the last bits.
    """
    a, b, c = coefficients
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(dtype, copy=True)
    x = x.mT if tall else x
    if matrix.ndim == 2:
        x.div_(x.norm().clamp(min=eps))
        for _ in range(steps):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
    else:
        x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps))
        for _ in range(steps):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
