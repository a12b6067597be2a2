"""The rules of other Muon implementations, in float64 numpy, written from their formulas.

Owns the right answers of the migration tests. Imports neither torch nor the library. Where the
formulas are from is said in `shardmuon/migration/sources.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ADAM", "AOL", "KELLER", "NVIDIA_EXPRESS", "YOU", "Adam", "Other", "gradient"]

Array = npt.NDArray[np.float64]
Triples = Sequence[tuple[float, float, float]]

KELLER: Triples = [(3.4445, -4.7750, 2.0315)]
YOU: Triples = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
EXPRESS: Triples = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7098828382687081, 0.42323551169305323),
]
NVIDIA_EXPRESS: Triples = [
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
]
AOL: Triples = [
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
]


def gradient(rows: int, cols: int, step: int) -> Array:
    """Gradient [rows, cols] of a step, normal numbers: those of low rank would magnify rounding."""
    return np.random.default_rng([rows, cols, step]).standard_normal((rows, cols))


def orthogonalize(matrix: Array, triples: Triples, divisor: Callable[[float], float]) -> Array:
    """Newton-Schulz with one triple per step, after division by `divisor` of the norm."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / divisor(float(np.linalg.norm(x)))
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@dataclass(frozen=True, kw_only=True)
class Other:
    """One rule for matrices. scale: of (rows, cols). margin: factor on the norm.

    sums: M <- mu M + G and G + mu M; else the averages of both. clamps: the norm is at least eps,
    else eps is added. cautious: decay spares elements that the update makes larger.
    """

    lr: float
    decay: float
    mu: float
    nesterov: bool
    triples: Triples
    scale: Callable[[int, int], float]
    sums: bool = True
    eps: float = 1e-7
    margin: float = 1.0
    clamps: bool = False
    cautious: bool = False

    def _divisor(self, norm: float) -> float:
        wide = norm * self.margin
        return max(wide, self.eps) if self.clamps else wide + self.eps

    def step(self, p: Array, m: Array, g: Array) -> tuple[Array, Array]:
        """Parameter and momentum after a step with gradient `g`."""
        if self.sums:
            m = self.mu * m + g
            u = g + self.mu * m if self.nesterov else m
        else:
            m = self.mu * m + (1 - self.mu) * g
            u = (1 - self.mu) * g + self.mu * m if self.nesterov else m
        update = orthogonalize(u, self.triples, self._divisor)
        decays = update * p >= 0 if self.cautious else np.ones_like(p)
        p = p * (1 - self.lr * self.decay * decays)
        return p - self.lr * self.scale(*p.shape) * update, m

    def run(self, p: Array, gradients: Sequence[Array], m: Array | None = None) -> list[Array]:
        """[parameter, momentum] after all gradients, from momentum `m` or zero."""
        m = np.zeros_like(p) if m is None else m
        for g in gradients:
            p, m = self.step(p, m, g)
        return [p, m]


def original(rows: int, cols: int) -> float:
    return math.sqrt(max(1.0, rows / cols))


def moonlight(rows: int, cols: int) -> float:
    return 0.2 * math.sqrt(max(rows, cols))


def aspect(rows: int, cols: int) -> float:
    return math.sqrt(rows / cols)


def spectral(rows: int, cols: int) -> float:
    return math.sqrt(max(rows, cols))


def one(rows: int, cols: int) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Adam:
    """AdamW. early_eps: eps is added before the second moment's bias correction.

    cautious: as of `Other`.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    early_eps: bool = False
    cautious: bool = False

    def run(self, p: Array, gradients: Sequence[Array], done: int = 0) -> list[Array]:
        """[parameter, first moment, second moment] after all gradients, from zero moments."""
        one, two = np.zeros_like(p), np.zeros_like(p)
        b1, b2 = self.betas
        for t, g in enumerate(gradients, done + 1):
            one = b1 * one + (1 - b1) * g
            two = b2 * two + (1 - b2) * g * g
            root = math.sqrt(1 - b2**t)
            denominator = (
                (np.sqrt(two) + self.eps) / root
                if self.early_eps
                else (np.sqrt(two) / root + self.eps)
            )
            decays = one * p >= 0 if self.cautious else np.ones_like(p)
            p = p * (1 - self.lr * self.decay * decays)
            p = p - self.lr * one / (1 - b1**t) / denominator
        return [p, one, two]


ADAM = Adam(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, decay=0.0)
