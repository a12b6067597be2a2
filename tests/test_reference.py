"""The reference against golden values that were computed elsewhere, and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.reference import Rule, gradient, newton_schulz, relative_error, scale, weights

# adjust_lr_fn, nesterov -> norm of P, P[0,0], P[-1,-1], norm of M, norm of P - W; 10x8, 3 steps.
GOLDEN = [
    ("original", True, 6.307510, -0.006189, -0.435244, 0.829799, 0.173359),
    ("original", False, 6.308663, -0.007495, -0.433324, 0.829799, 0.172842),
    ("match_rms_adamw", True, 6.305568, -0.003501, -0.433992, 0.829799, 0.102863),
]
NS_GOLDEN = [
    (10, 8, 2.520404, 0.170152),
    (5, 7, 1.863067, 0.553489),
    (64, 24, 4.059965, 0.112504),
]


@pytest.mark.parametrize(("mode", "nesterov", "norm", "first", "last", "m_norm", "moved"), GOLDEN)
def test_three_steps_give_the_golden_values(
    mode: str, nesterov: bool, norm: float, first: float, last: float, m_norm: float, moved: float
) -> None:
    p, m = Rule(adjust_lr_fn=mode, nesterov=nesterov).golden(10, 8)
    got = [np.linalg.norm(p), p[0, 0], p[-1, -1], np.linalg.norm(m)]
    assert got == pytest.approx([norm, first, last, m_norm], abs=1e-6)
    assert np.linalg.norm(p - weights(10, 8)) == pytest.approx(moved, abs=1e-6)


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
    matrix = gradient(10, 8, 0)
    theirs = _zeropower_via_newtonschulz(
        torch.from_numpy(matrix), (3.4445, -4.7750, 2.0315), 5, 1e-7
    )
    assert relative_error(theirs.double().numpy(), newton_schulz(matrix)) < 5e-2


@pytest.mark.parametrize(
    ("rows", "cols", "original", "match"),
    [
        (4096, 1024, 2.0, 12.8),
        (1024, 4096, 1.0, 12.8),
        (1024, 1024, 1.0, 6.4),
        (64, 1, 8.0, 1.6),
        (18, 2304, 1.0, 9.6),
    ],
)
def test_scales(rows: int, cols: int, original: float, match: float) -> None:
    assert scale(rows, cols, None) == scale(rows, cols, "original") == pytest.approx(original)
    assert scale(rows, cols, "match_rms_adamw") == pytest.approx(match)


def test_zero_matrix_stays_zero() -> None:
    assert not newton_schulz(np.zeros((3, 5))).any()
