"""Update rules beside Muon and AdamW: their group keys, and their right answers in float64.

Owns the list of variants that tests go through, one entry each, and the formulas, written from the
papers in numpy. Imports neither torch nor the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.reference import Array, newton_schulz, scale

__all__ = ["ELEMENTS", "MATRICES", "Values", "Variant"]

Values = dict[str, Array]
"""A parameter under `parameter`, and its state by key."""

Steps = Callable[[Array, Iterable[Array], Mapping[str, Any]], Values]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A rule with settings. keys: of a group. right: what steps from zero state come to."""

    keys: Mapping[str, Any]
    right: Steps


def _normuon(p: Array, gradients: Iterable[Array], keys: Mapping[str, Any]) -> Values:
    """arXiv 2510.05491, with the norm of the whole kept as in the authors' code."""
    mu, beta2 = keys["momentum"], keys["beta2"]
    m, v = np.zeros_like(p), np.zeros((p.shape[0], 1))
    for g in gradients:
        m = mu * m + (1 - mu) * g
        o = newton_schulz((1 - mu) * g + mu * m if keys.get("nesterov", True) else m)
        v = beta2 * v + (1 - beta2) * (o * o).mean(axis=1, keepdims=True)
        s = o / (np.sqrt(v) + 1e-10)
        o = s * np.linalg.norm(o) / np.linalg.norm(s)
        factor = keys["lr"] * scale(p.shape[0], p.shape[1], keys.get("adjust_lr_fn"))
        p = p * (1 - keys["lr"] * keys["weight_decay"]) - factor * o
    return {"parameter": p, "momentum_buffer": m, "row_average": v}


def _lion(p: Array, gradients: Iterable[Array], keys: Mapping[str, Any]) -> Values:
    """arXiv 2302.06675, program 1."""
    beta1, beta2 = keys["betas"]
    m = np.zeros_like(p)
    for g in gradients:
        update = np.sign(beta1 * m + (1 - beta1) * g)
        p = p - keys["lr"] * (update + keys["weight_decay"] * p)
        m = beta2 * m + (1 - beta2) * g
    return {"parameter": p, "exp_avg": m}


_STEP = {"lr": 0.02, "weight_decay": 0.1}
_NORMUON = {**_STEP, "algorithm": "normuon", "momentum": 0.9, "beta2": 0.8}

MATRICES = {
    "normuon": Variant(keys=_NORMUON, right=_normuon),
    "normuon-rms": Variant(
        keys={**_NORMUON, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, right=_normuon
    ),
}
"""Of whole matrices."""

ELEMENTS = {
    "lion": Variant(keys={**_STEP, "algorithm": "lion", "betas": (0.9, 0.95)}, right=_lion),
}
"""Of single elements."""
