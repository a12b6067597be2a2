"""Coefficients of the Newton-Schulz polynomials, with their sources."""

from __future__ import annotations

__all__ = ["KELLER", "Triple"]

Triple = tuple[float, float, float]

KELLER: Triple = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's quintic a x + b x^3 + c x^5, https://kellerjordan.github.io/posts/muon/ and the
default of torch.optim.Muon. It trades convergence to 1 for a steep slope at 0: after five steps
singular values lie between about 0.7 and 1.2."""
