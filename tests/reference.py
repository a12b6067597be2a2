"""The update rule in float64 numpy, in one process, written from the formulas alone.

Owns the test matrices and the right answers. Imports neither torch nor the library, so that an
error in the library cannot hide here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "AdamW",
    "Rule",
    "decayed",
    "gradient",
    "newton_schulz",
    "relative_error",
    "scale",
    "weights",
]

Array = npt.NDArray[np.float64]

QUINTIC = (3.4445, -4.7750, 2.0315)


def _grid(rows: int, cols: int) -> tuple[Array, Array]:
    i, j = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    return i.astype(np.float64), j.astype(np.float64)


def gradient(rows: int, cols: int, step: float) -> Array:
    """Gradient [rows, cols] of step 0, 1, ..: cos(0.7 i + 1.3 j + 0.11 i j + 0.5 step)."""
    i, j = _grid(rows, cols)
    return np.cos(0.7 * i + 1.3 * j + 0.11 * i * j + 0.5 * step)


def weights(rows: int, cols: int) -> Array:
    """Initial weights [rows, cols]: sin(0.3 i - 0.9 j + 0.05 i j)."""
    i, j = _grid(rows, cols)
    return np.sin(0.3 * i - 0.9 * j + 0.05 * i * j)


def newton_schulz(
    matrix: Array,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
) -> Array:
    """Approximate orthogonal factor of `matrix` [rows, cols]."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(float(np.linalg.norm(x)), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def scale(rows: int, cols: int, mode: str | None) -> float:
    """Shape factor on the update; None means "original"."""
    if mode == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if mode == "spectral":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def decayed(p: Array, u: Array, factor: float, cautious: bool) -> Array:
    """`p` less `factor` times itself; cautious: only where the update `u` and `p` do not oppose."""
    return p - factor * (np.where(u * p >= 0, p, 0.0) if cautious else p)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Muon's settings; `run` applies them. Defaults are those of the golden values."""

    lr: float = 0.02
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: str | None = None
    eps: float = 1e-7
    cautious: bool = False

    def step(self, p: Array, m: Array, g: Array) -> tuple[Array, Array]:
        """One step from parameter `p`, momentum `m` and gradient `g`: the new (p, m)."""
        beta = self.momentum
        m = beta * m + (1 - beta) * g
        u = (1 - beta) * g + beta * m if self.nesterov else m
        o = newton_schulz(u, eps=self.eps)
        p = decayed(p, o, self.lr * self.weight_decay, self.cautious)
        return p - self.lr * scale(p.shape[0], p.shape[1], self.adjust_lr_fn) * o, m

    def run(self, p: Array, gradients: Iterable[Array]) -> tuple[Array, Array]:
        """Steps with `gradients` from parameter `p` and zero momentum: the last (p, m)."""
        m = np.zeros_like(p)
        for g in gradients:
            p, m = self.step(p, m, g)
        return p, m

    def golden(self, rows: int, cols: int, steps: int = 3) -> tuple[Array, Array]:
        """`run` on the deterministic weights and gradients of one shape."""
        return self.run(weights(rows, cols), (gradient(rows, cols, t) for t in range(steps)))


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW's settings; `run` applies them."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    cautious: bool = False

    def run(self, p: Array, gradients: Iterable[Array]) -> Array:
        """The parameter after steps with `gradients` from zero moments."""
        m, v = np.zeros_like(p), np.zeros_like(p)
        b1, b2 = self.betas
        for t, g in enumerate(gradients, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + self.eps)
            p = decayed(p, u, self.lr * self.weight_decay, self.cautious) - self.lr * u
        return p


def relative_error(value: npt.ArrayLike, right: Array) -> float:
    """Frobenius norm of the difference over that of `right`."""
    difference = np.asarray(value, dtype=np.float64) - right
    return float(np.linalg.norm(difference) / np.linalg.norm(right))
