"""Learning rate over the steps."""

from __future__ import annotations

import pytest
import torch

from shardmuon.training import schedule
from shardmuon.training.config import Schedule

COSINE = Schedule(steps=100, kind="cosine", warmup_steps=10, final=0.2)
STABLE = Schedule(steps=100, kind="stable", warmup_steps=10, decay_steps=20, final=0.2)


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        (COSINE, 0, 0.1),
        (COSINE, 4, 0.5),
        (COSINE, 9, 1.0),
        (COSINE, 10, 1.0),
        (COSINE, 55, 0.6),
        (COSINE, 100, 0.2),
        (COSINE, 500, 0.2),
        (STABLE, 0, 0.1),
        (STABLE, 10, 1.0),
        (STABLE, 80, 1.0),
        (STABLE, 90, 0.6),
        (STABLE, 99, 0.24),
        (STABLE, 100, 0.2),
        (STABLE, 500, 0.2),
        (Schedule(steps=10, kind="stable", warmup_steps=0, decay_steps=0), 9, 1.0),
        (Schedule(steps=10, warmup_steps=0), 0, 1.0),
        (Schedule(steps=10, warmup_steps=10), 9, 1.0),
    ],
)
def test_factor(config: Schedule, step: int, expected: float) -> None:
    assert schedule.factor(config, step) == pytest.approx(expected)


def rates(first: int, last: int) -> list[list[float]]:
    """Learning rates of two groups at each step of a run that starts at `first`."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.3}, {"params": [weights[1]], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    scheduler = schedule.build(optimizer, COSINE, first)
    seen = []
    for _ in range(first, last):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def test_every_group_is_scaled_from_its_own_peak() -> None:
    for step, (first, second) in enumerate(rates(0, 30)):
        assert first == 0.3 * schedule.factor(COSINE, step)
        assert second == 0.01 * schedule.factor(COSINE, step)


@pytest.mark.parametrize("start", [1, 7, 29])
def test_a_resumed_schedule_continues_exactly(start: int) -> None:
    assert rates(start, 30) == rates(0, 30)[start:]
