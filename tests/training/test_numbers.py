"""Gradient norm, clipping, update size, phase times and memory."""

from __future__ import annotations

import math

import pytest
import torch

from shardmuon.training import gradients
from shardmuon.training.timing import PhaseTimer, memory_bytes

CPU = torch.device("cpu")


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 5), (7,), (0, 3))]
    for weight in made:
        weight.grad = torch.randn_like(weight)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 100.0, None])
def test_clipping_equals_torch(max_norm: float | None) -> None:
    ours, theirs = weights(), weights()
    norm, _ = gradients.clip_(ours, max_norm)
    limit = math.inf if max_norm is None else max_norm
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    torch.testing.assert_close(norm, expected)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_parameters_without_gradient_are_left_alone() -> None:
    made = weights()
    made[0].grad = None
    gradients.clip_(made, 0.1)
    assert made[0].grad is None


def test_update_size_is_the_root_mean_square_change() -> None:
    made = weights()
    size = gradients.UpdateSize(made)
    with torch.no_grad():
        made[0].add_(3.0)
    assert size.rms() == pytest.approx(math.sqrt(20 * 9 / 27))


def test_timer_gives_means_and_forgets() -> None:
    timer = PhaseTimer(CPU)
    for _ in range(3):
        with timer.phase("outer"), timer.phase("inner"):
            sum(range(1000))
    means = timer.take()
    assert 0 < means["inner"] <= means["outer"] < 1
    assert timer.take() == {}


def test_memory_is_in_bytes() -> None:
    assert 50e6 < memory_bytes(CPU) < 50e9
