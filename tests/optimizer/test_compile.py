"""Beside `torch.compile`: a step compiles nothing, whatever changes, and takes effect at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import shardmuon

# torch 2.11 itself uses what it deprecates when its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

SHAPES = ((6, 4), (4, 6), (5, 5), (3, 7))
LATE = 2
STEPS = 10


def loss_of(params: list[nn.Parameter]) -> Tensor:
    values = [(p * torch.arange(1.0, p.size(1) + 1)).tanh().square().sum() for p in params]
    return torch.stack(values).sum()


def train(forward: Callable[[list[nn.Parameter]], Tensor]) -> tuple[list[Tensor], list[Any]]:
    """(parameters after each step, what torch.compile had counted by then)."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    muon, rest = named[:-1], named[-1:]
    groups: list[dict[str, Any]] = [
        {"params": muon},
        {"params": rest, "algorithm": "adamw"},
    ]
    optimizer = shardmuon.Muon(groups)
    values, counted = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        forward(params).backward()
        if step == 0:
            params[LATE].grad = None
        before = [p.detach().clone() for p in params]
        optimizer.step()
        optimizer.zero_grad()
        moved = [not p.equal(b) for p, b in zip(params, before, strict=True)]
        assert moved == [step > 0 or i != LATE for i in range(len(params))]
        values += [p.detach().clone() for p in params]
        counted.append({kind: dict(numbers) for kind, numbers in counters.items() if numbers})
    return values, counted


def test_steps_beside_a_compiled_model_compile_nothing() -> None:
    counters.clear()
    right, counted = train(loss_of)
    assert counted == [{}] * STEPS
    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    values, counted = train(compiled)
    assert all(v.equal(r) for v, r in zip(values, right, strict=True))
    assert counted[0]["stats"]["unique_graphs"] == 1
    assert counted == counted[:1] * STEPS
    counters.clear()
    torch._dynamo.reset()


def test_a_changed_rate_counts_from_the_next_step_on() -> None:
    p = nn.Parameter(torch.eye(3, 4))
    optimizer = shardmuon.Muon([("w", p)], momentum=0.0, nesterov=False, weight_decay=0.0)
    moves = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.5**step
        p.grad = torch.eye(3, 4)
        before = p.detach().clone()
        optimizer.step()
        moves.append(float((before - p.detach()).norm()) * 2**step)
    torch.testing.assert_close(moves, moves[:1] * STEPS, rtol=1e-4, atol=0.0)


def test_a_compiled_caller_does_not_look_into_the_step() -> None:
    torch._dynamo.reset()
    counters.clear()
    p = nn.Parameter(torch.eye(3, 4))
    optimizer = shardmuon.Muon([("w", p)])

    @torch.compile(backend="eager")
    def train_once() -> None:
        optimizer.step()

    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        p.grad = torch.eye(3, 4)
        before = p.detach().clone()
        train_once()
        assert not p.equal(before)
    assert counters["stats"]["unique_graphs"] <= 1
    counters.clear()
    torch._dynamo.reset()
