"""metrics.jsonl: its form, runs that were interrupted, and trackers that fail."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmuon.training.metrics import MetricsFile, Recorder, history, read


def write(path: Path, *records: tuple[str, int, dict[str, Any]]) -> None:
    """One process that adds these records."""
    file = MetricsFile(path)
    for event, step, numbers in records:
        file.write(event, step, numbers)
    file.close()


def start(step: int, batch: int = 4) -> tuple[str, int, dict[str, Any]]:
    config = {"data": {"batch_sequences": batch, "sequence_length": 100}}
    return "start", step, {"elapsed_s": 0.0, "config": config}


def train(step: int, elapsed_s: float, loss: float = 0.0) -> tuple[str, int, dict[str, Any]]:
    return "train", step, {"elapsed_s": elapsed_s, "loss": loss}


def test_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    write(
        path,
        ("train", 1, {"loss": 2.5, "lr": {"muon.0": 0.1, "x": math.nan}}),
        ("evaluate", 1, {"loss": math.inf}),
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "train", "step": 1, "loss": 2.5, "lr": {"muon.0": 0.1, "x": None}}
    assert lines[1]["loss"] is None


def test_reading_keeps_the_last_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(train(step, 0.0, step + 0.3) for step in (1, 2, 3)), ("evaluate", 9, {}))
    write(path, *(train(step, 0.0, step + 0.2) for step in (3, 4)), ("evaluate", 9, {}))
    assert [record["loss"] for record in read(path, "train")] == [1.3, 2.3, 3.2, 4.2]


def test_time_and_tokens_add_up_over_restarts(tmp_path: Path) -> None:
    """Checkpoint at step 15, killed after step 30; then twice as large batches from there."""
    path = tmp_path / "metrics.jsonl"
    write(path, start(0), train(10, 20.0), train(20, 40.0), train(30, 60.0))
    write(path, start(15, batch=8), train(20, 7.0), train(30, 17.0))
    kept = [r for r in history(path) if r["event"] == "train"]
    assert [r["step"] for r in kept] == [10, 20, 30]
    assert [r["time_s"] for r in kept] == [20.0, 37.0, 47.0]
    assert [r["tokens"] for r in kept] == [4000, 6000 + 5 * 800, 6000 + 15 * 800]


def test_a_restart_at_the_end_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, start(0), train(10, 20.0), ("evaluate", 10, {"elapsed_s": 25.0}))
    write(path, start(10), train(20, 5.0))
    write(path, start(10), train(20, 6.0))
    assert [(r["step"], r["time_s"]) for r in history(path) if r["event"] != "start"] == [
        (10, 20.0),
        (10, 25.0),
        (20, 31.0),
    ]


def test_a_run_that_continues_another_folders_counts_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, start(100), train(101, 2.0))
    assert [(r["time_s"], r["tokens"]) for r in history(path)] == [(0.0, 40_000), (2.0, 40_400)]


def test_a_line_that_was_cut_off_is_left_out_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, start(0), train(1, 1.0))
    with path.open("a") as file:
        file.write('{"event": "train", "st')
    assert [r["step"] for r in history(path)] == [0, 1]
    write(path, start(1), train(2, 1.0))
    assert [r["step"] for r in history(path)] == [0, 1, 1, 2]


def test_a_file_without_a_start_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(1, 1.0))
    with pytest.raises(ValueError, match='expected a line with "event": "start" first'):
        history(tmp_path / "metrics.jsonl")


class Kept:
    """Keeps what it gets, until it is to fail."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.fails_at = fails_at

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        if step == self.fails_at:
            raise OSError("the network is gone")
        assert numbers["elapsed_s"] >= 0
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_an_optional_tracker_that_fails_warns_once_and_is_left_out() -> None:
    file, bad, good = Kept(), Kept(fails_at=2), Kept()
    records = Recorder([file], [bad, good])
    records.write("train", 1, loss=1.0)
    with pytest.warns(UserWarning, match="Kept gets no more numbers .* OSError: the network"):
        records.write("train", 2, loss=1.0)
    records.write("train", 3, loss=1.0)
    records.close()
    assert file.steps == good.steps == [1, 2, 3, -1]
    assert bad.steps == [1]


def test_the_file_of_metrics_may_not_fail_in_silence() -> None:
    with pytest.raises(OSError, match="the network is gone"):
        Recorder([Kept(fails_at=1)]).write("train", 1)
