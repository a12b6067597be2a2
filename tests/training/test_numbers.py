"""Gradient norm, clipping, update size, metrics and what the user sees."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from shardmuon.training import gradients
from shardmuon.training.metrics import MetricsFile, PhaseTimer, memory_bytes, read
from shardmuon.training.progress import Progress, choose

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


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    file.write("train", 1, loss=2.5, lr={"muon.0": 0.1, "x": math.nan})
    file.write("evaluate", 1, loss=math.inf)
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "train", "step": 1, "loss": 2.5, "lr": {"muon.0": 0.1, "x": None}}
    assert lines[1]["loss"] is None


def test_reading_keeps_the_last_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2, 3), (3, 4)):
        file = MetricsFile(path)
        for step in steps:
            file.write("train", step, loss=step + len(steps) / 10)
        file.write("evaluate", 9, loss=0)
        file.close()
    assert [record["loss"] for record in read(path, "train")] == [1.3, 2.3, 3.2, 4.2]


def test_other_ranks_write_nothing() -> None:
    file = MetricsFile(None)
    file.write("train", 1, loss=1.0)
    file.close()


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


@pytest.mark.parametrize(
    ("setting", "first", "kind"),
    [("bar", True, "bar"), ("auto", True, "lines"), ("none", True, "none"), ("bar", False, "none")],
)
def test_choice_of_progress(setting: str, first: bool, kind: str) -> None:
    assert choose(setting, first) == kind  # type: ignore[arg-type]


def test_lines_show_step_numbers_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("lines", 10, 12)
    progress.advance()
    progress.show({"loss": "1.5", "tok/s": "10"})
    progress.say("hello")
    progress.close()
    out = capsys.readouterr().out
    assert out == "step 11/12  loss 1.5  tok/s 10  ETA 0:00\nhello\n"


def test_bar_shows_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("bar", 10, 12)
    progress.advance()
    progress.show({"loss": "1.5"})
    progress.say("hello")
    progress.close()
    captured = capsys.readouterr()
    assert "11/12" in captured.err
    assert "loss=1.5" in captured.err
    assert "hello" in captured.err
    assert captured.out == ""


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("none", 0, 2)
    progress.advance()
    progress.show({"loss": "1.5"})
    progress.say("hello")
    progress.close()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
