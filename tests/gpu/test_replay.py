"""Graphs give the bits of the calls that they replace, and methods are chosen in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import shardmuon
from shardmuon.orthogonalize import choice, replay
from shardmuon.orthogonalize.choice import Problem, choose_methods
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from shardmuon.planning.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

KELLER_5 = schedule_of("keller", 5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(4, 128, 320), (4, 320, 128), (136, 200), (200, 136)])
def test_a_graph_gives_the_same_bits(method: str, shape: tuple[int, ...]) -> None:
    replay.clear()
    torch.manual_seed(0)
    first, second = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    replay.warm_up(torch.zeros_like(first), KELLER_5, 1e-7, method)
    assert len(replay._replays) == 1
    results = [replay.orthogonalize(x, KELLER_5, 1e-7, method) for x in (first, second, first)]
    expected = [newton_schulz(x, KELLER_5, 1e-7, torch.bfloat16, method) for x in (first, second)]
    for result, right in zip(results, (*expected, expected[0]), strict=True):
        assert result.shape == right.shape
        assert torch.equal(result, right)
    replay.clear()


def test_graphs_keep_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    replay.clear()
    monkeypatch.setattr(replay, "MOST_BYTES", 3 * 2 * 2 * 64 * 64)
    for batch in range(1, 6):
        x = torch.zeros(batch, 64, 64, device="cuda", dtype=torch.bfloat16)
        replay.warm_up(x, KELLER_5, 1e-7, "standard")
        assert sum(r.nbytes for r in replay._replays.values()) <= replay.MOST_BYTES
    assert not replay._replays  # the last alone is too large
    replay.clear()


def test_large_batches_make_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    replay.clear()
    monkeypatch.setattr(replay, "MOST_ELEMENTS", 100)
    replay.warm_up(torch.zeros(64, 64, device="cuda"), KELLER_5, 1e-7, "standard")
    assert not replay._replays


def test_choosing_for_a_model_takes_two_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path))
    device = torch.device("cuda", 0)
    for shapes in MODELS.values():
        problems = {
            Problem(2, min(r, c), max(r, c), "bfloat16", KELLER_5.segments) for _, r, c in shapes
        }
        start = time.monotonic()
        chosen = choose_methods(problems, device)
        took = time.monotonic() - start
        # The budget, and one measurement that had begun before its end.
        assert took < choice.BUDGET_S + 1.5
        assert set(chosen) == problems
        assert {answer.method for answer in chosen.values()} <= set(METHODS)
        monkeypatch.setattr(choice, "measure", None)  # the cache answers, or a guess
        start = time.monotonic()
        assert set(choose_methods(problems, device, budget_s=0.0)) == problems
        assert time.monotonic() - start < 0.1
        monkeypatch.undo()
        monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path))


def test_an_optimizer_chooses_and_shows_its_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path))
    torch.manual_seed(0)
    value = torch.randn(1024, 4096, device="cuda")
    results = {}
    for method in ("auto", *METHODS):
        p = torch.nn.Parameter(value.clone())
        optimizer = shardmuon.Muon([("w", p)], lr=0.1, ns_method=method)
        p.grad = torch.sin(value * 3)
        optimizer.step()
        results[method] = p.detach()
        chosen = [matrix.method for matrix, _ in optimizer.plan]
        if method == "auto":
            assert chosen[0] in METHODS
            assert chosen[0] in optimizer.plan.report()
            auto = chosen[0]
    assert torch.equal(results["auto"], results[auto])
    assert len(list(tmp_path.iterdir())) == 1
