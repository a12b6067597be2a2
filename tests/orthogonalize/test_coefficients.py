"""Schedules: which step takes which triple, and what is refused."""

from __future__ import annotations

import pytest
import torch

import shardmuon
from shardmuon.orthogonalize.coefficients import KELLER, PRESETS, schedule_of

TRIPLES = [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]


def test_one_triple_serves_any_number_of_steps() -> None:
    assert schedule_of(KELLER, 7).triples == (KELLER,) * 7
    assert schedule_of(KELLER, 3) == schedule_of("keller", 3)
    assert schedule_of("cubic", 31).triples == ((1.5, -0.5, 0.0),) * 31


def test_several_triples_are_taken_in_order() -> None:
    assert schedule_of(TRIPLES, 1).triples == (TRIPLES[0],)
    assert schedule_of(TRIPLES, 2).triples == tuple(TRIPLES)
    assert schedule_of("polar_express", 5).margin == 1.02
    assert schedule_of("you", 5).margin == 1.0


@pytest.mark.parametrize("coefficients", ["polar_express", "you", TRIPLES])
def test_steps_beyond_the_last_triple_are_refused(coefficients: object) -> None:
    with pytest.raises(ValueError, match="6 steps, but there are triples for"):
        schedule_of(coefficients, 6)  # type: ignore[arg-type]


def test_the_optimizer_refuses_what_does_not_fit() -> None:
    p = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="ns_coefficients and ns_steps do not fit: 7 steps"):
        shardmuon.Muon([p], ns_coefficients="you", ns_steps=7)
    with pytest.raises(ValueError, match="ns_coefficients must be three numbers"):
        shardmuon.Muon([p], ns_coefficients="quintic")
    with pytest.raises(ValueError, match="ns_method must be one of"):
        shardmuon.Muon([p], ns_method="fast")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_bring_singular_values_near_one(name: str) -> None:
    """From 0.3 on, where even the slow ones have arrived after their steps."""
    schedule = schedule_of(name, 5)
    values = torch.linspace(0.3, 1.0, 200, dtype=torch.float64) / schedule.margin
    for a, b, c in schedule.triples:
        values = a * values + b * values**3 + c * values**5
    low, high = {"keller": (0.68, 1.21), "cubic": (0.98, 1.0)}.get(name, (0.85, 1.15))
    assert low <= values.min()
    assert values.max() <= high
