"""Schedules: which step takes which triple, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

import shardmuon
from shardmuon.orthogonalize.coefficients import (
    KELLER,
    MOST_GROWTH,
    PRESETS,
    Coefficients,
    schedule_of,
)

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


def test_segments_of_a_preset_serve_any_number_of_steps() -> None:
    assert [schedule_of("keller", steps).segments for steps in (1, 2, 3, 4, 8)] == [
        (1,),
        (2,),
        (3,),
        (3, 1),
        (3, 3, 2),
    ]
    assert schedule_of("polar_express", 5).segments == (2, 1, 2)
    assert schedule_of("polar_express", 4).segments == (2, 1, 1)
    for name, preset in PRESETS.items():
        for steps in range(1, 40 if len(preset.triples) == 1 else 6):
            schedule = schedule_of(name, steps)
            assert sum(schedule.segments) == steps
            assert tuple(triple for part in schedule.parts() for triple in part) == schedule.triples


@pytest.mark.parametrize(
    ("coefficients", "segments"),
    [
        ((3.0, -3.0, 1.0), (3, 3, 1)),
        ((1.9, -1.3, 0.4), (3, 3, 1)),
        ((6.0, -9.0, 4.0), (2, 2, 2, 1)),
        ((-13.0, 0.0, 0.0), (1,) * 7),
        ([(8.0, -20.0, 14.0)] + [(4.0, -3.0, 0.5)] * 6, (2, 2, 2, 1)),
    ],
)
def test_triples_without_a_name_get_cautious_segments(
    coefficients: Coefficients, segments: tuple[int, ...]
) -> None:
    schedule = schedule_of(coefficients, 7)
    assert schedule.segments == segments
    for part in schedule.parts():
        assert math.prod(a * a for a, _, _ in part[:-1]) <= MOST_GROWTH


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
