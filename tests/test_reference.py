"""The reference against golden values that were computed elsewhere, and against torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.reference import Rule, gradient, newton_schulz, relative_error, scale, weights


class Golden(NamedTuple):
    """Facts of a 10x8 matrix after three steps with lr 0.02, momentum 0.95 and decay 0.1."""

    adjust_lr_fn: str
    nesterov: bool
    norm: float
    first: float
    last: float
    momentum_norm: float
    change_norm: float

    def options(self) -> dict[str, Any]:
        """Settings of the optimizer."""
        return {"lr": 0.02, "adjust_lr_fn": self.adjust_lr_fn, "nesterov": self.nesterov}

    def check(self, p: npt.ArrayLike, m: npt.ArrayLike, tolerance: float) -> None:
        """Compare parameter and momentum; relative, absolute on single elements."""
        weight, momentum = (np.asarray(x, dtype=np.float64) for x in (p, m))
        change = weight - weights(10, 8)
        norms = [float(np.linalg.norm(x)) for x in (weight, momentum, change)]
        right = [self.norm, self.momentum_norm, self.change_norm]
        assert norms == pytest.approx(right, rel=tolerance)
        elements = [weight[0, 0], weight[-1, -1]]
        assert elements == pytest.approx([self.first, self.last], abs=tolerance)


GOLDEN = [
    Golden("original", True, 6.307510, -0.006189, -0.435244, 0.829799, 0.173359),
    Golden("original", False, 6.308663, -0.007495, -0.433324, 0.829799, 0.172842),
    Golden("match_rms_adamw", True, 6.305568, -0.003501, -0.433992, 0.829799, 0.102863),
]
NS_GOLDEN = [
    (10, 8, 2.520404, 0.170152),
    (5, 7, 1.863067, 0.553489),
    (64, 24, 4.059965, 0.112504),
]


@pytest.mark.parametrize("golden", GOLDEN)
def test_three_steps_give_the_golden_values(golden: Golden) -> None:
    rule = Rule(adjust_lr_fn=golden.adjust_lr_fn, nesterov=golden.nesterov)
    golden.check(*rule.golden(10, 8), tolerance=1e-5)


@pytest.mark.parametrize(("rows", "cols", "norm", "first"), NS_GOLDEN)
def test_newton_schulz_gives_the_golden_values(
    rows: int, cols: int, norm: float, first: float
) -> None:
    update = newton_schulz(gradient(rows, cols, 0))
    assert np.linalg.norm(update) == pytest.approx(norm, abs=1e-6)
    assert update[0, 0] == pytest.approx(first, abs=1e-6)


def test_last_element_of_the_tall_matrix() -> None:
    assert newton_schulz(gradient(10, 8, 0))[-1, -1] == pytest.approx(-0.065001, abs=1e-6)


def test_newton_schulz_is_that_of_torch_up_to_bfloat16() -> None:
    # Not the deterministic matrices: their small singular values amplify bfloat16's rounding.
    matrix = np.random.default_rng(0).standard_normal((24, 48))
    theirs = _zeropower_via_newtonschulz(
        torch.from_numpy(matrix), (3.4445, -4.7750, 2.0315), 5, 1e-7
    )
    assert relative_error(theirs.double().numpy(), newton_schulz(matrix)) < 5e-2


@pytest.mark.parametrize(
    ("rows", "cols", "original", "match", "spectral"),
    [
        (4096, 1024, 2.0, 12.8, 2.0),
        (1024, 4096, 1.0, 12.8, 0.5),
        (1024, 1024, 1.0, 6.4, 1.0),
        (64, 1, 8.0, 1.6, 8.0),
        (18, 2304, 1.0, 9.6, 0.0883883),
    ],
)
def test_scales(rows: int, cols: int, original: float, match: float, spectral: float) -> None:
    assert scale(rows, cols, None) == scale(rows, cols, "original") == pytest.approx(original)
    assert scale(rows, cols, "match_rms_adamw") == pytest.approx(match)
    assert scale(rows, cols, "spectral") == pytest.approx(spectral)


def test_zero_matrix_stays_zero() -> None:
    assert not newton_schulz(np.zeros((3, 5))).any()
