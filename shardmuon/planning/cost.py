"""What it costs to orthogonalize a matrix, in floating-point operations.

Owns the FLOP formulas per Newton-Schulz method. A cost is of the *global* shape: the owner runs
the whole matrix whatever the layout.
"""

from __future__ import annotations

__all__ = ["newton_schulz_flops"]


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """FLOPs of `steps` standard iterations on a rows x cols matrix.

    With n = min and m = max of the two: A = X X^T takes 2 n n m, A A takes 2 n n n and the last
    product 2 n n m, hence n^2 (4 m + 2 n) a step (a multiply-add counts as two).
    """
    short, long = min(rows, cols), max(rows, cols)
    return steps * short * short * (4 * long + 2 * short)
