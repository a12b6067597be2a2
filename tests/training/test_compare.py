"""Runs side by side: medians of settled steps, the last evaluation, and missing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmuon.training.compare import compare, main
from shardmuon.training.metrics import MetricsFile


def write_run(folder: Path, optimizer_ms: list[float]) -> Path:
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step, milliseconds in enumerate(optimizer_ms, start=1):
        seconds = {"forward_backward": 0.5, "optimizer": milliseconds / 1e3, "step": 0.6}
        metrics.write("train", step, seconds=seconds, memory_bytes=2e9)
    metrics.write("evaluate", len(optimizer_ms), loss=1.25, bits_per_byte=None)
    metrics.close()
    return folder


def test_rows_hold_medians_without_the_first_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [900.0, 10.0, 30.0, 20.0])
    header, _, row = compare([run]).splitlines()
    assert header.split()[:2] == ["run", "steps"]
    assert row.split()[1:] == ["4", "1.2500", "-", "500.0", "20.0", "600.0", "2.00"]


def test_a_folder_without_metrics_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"compare: no run at {tmp_path}/metrics.jsonl\n"
