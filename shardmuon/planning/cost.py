"""What it costs to orthogonalize a matrix, in floating-point operations.

Owns the FLOP formulas of the Newton-Schulz methods, and how measured times compare with them. A
cost is of the *global* shape: the owner runs the whole matrix whatever the layout.
"""

from __future__ import annotations

__all__ = ["flops_in", "newton_schulz_flops", "panel_flops"]

# An H200 on large matrices (docs/benchmarks.md). Only ratios of costs matter, so any rate does.
FLOPS_PER_MS = 650_000_000_000


def newton_schulz_flops(
    rows: int, cols: int, segments: tuple[int, ...], method: str = "standard"
) -> int:
    """FLOPs of Newton-Schulz on one rows x cols matrix; a multiply-add counts as two.

    segments: steps between two starts of the gram method; their sum is the number of steps.

    With n = min and m = max of the two, a full product with the matrix is 2 n n m, a product of two
    n x n matrices 2 n n n, and a symmetric result takes half of either.
    standard: three full products a step. symmetric: two of them are halves. gram: per segment of L
    steps a symmetric and a full product with the matrix, and 4 L - 3 symmetric n x n ones.
    """
    n, m = min(rows, cols), max(rows, cols)
    steps = sum(segments)
    if method == "standard":
        return steps * n * n * (4 * m + 2 * n)
    if method == "symmetric":
        return steps * n * n * (3 * m + n)
    return panel_flops(n, m, segments)


def panel_flops(short: int, width: int, segments: tuple[int, ...]) -> int:
    """FLOPs of the gram method on `width` of the longer side of a matrix.

    The products of two square matrices are those of the whole: every rank of a team does them.
    """
    steps, starts = sum(segments), len(segments)
    return short * short * (3 * width * starts + short * (4 * steps - 3 * starts))


def flops_in(ms: float) -> int:
    """What a time costs beside costs in FLOPs: those that a fast GPU does in it."""
    return max(1, round(ms * FLOPS_PER_MS))
