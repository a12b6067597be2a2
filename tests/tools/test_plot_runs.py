"""Runs side by side: medians of settled steps, labels, pictures, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmuon.tools import command, plot_runs
from shardmuon.training.load import as_tree, load
from shardmuon.training.metrics import MetricsFile
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")


def write_run(folder: Path, optimizer_ms: list[float], *overrides: str, from_step: int = 0) -> Path:
    metrics = MetricsFile(folder / "metrics.jsonl")
    config = as_tree(load(TINY, [*overrides, f"logging.directory={folder}"]))
    metrics.write("start", from_step, {"elapsed_s": 0.0, "config": config})
    for number, milliseconds in enumerate(optimizer_ms, start=1):
        seconds = {"forward_backward": 0.5, "optimizer": milliseconds / 1e3, "step": 0.6}
        numbers = {"elapsed_s": number * 1.5, "loss": 5.0 / number, "memory_bytes": 2e9}
        metrics.write("train", from_step + number, numbers | {"seconds": seconds})
    last = {"elapsed_s": len(optimizer_ms) * 1.5, "loss": 1.25, "bits_per_byte": None}
    metrics.write("evaluate", from_step + len(optimizer_ms), last)
    metrics.close()
    return folder


def test_rows_hold_medians_without_the_first_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [900.0, 10.0, 30.0, 20.0])
    header, _, row = plot_runs.compare(plot_runs.read_runs([run])).splitlines()
    assert header.split()[:2] == ["run", "steps"]
    assert row.split()[1:] == ["4", "1.2500", "-", "500.0", "20.0", "600.0", "2.00"]


def test_labels_say_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0], "seed=1")
    b = write_run(tmp_path / "b", [1.0], "seed=2", "checkpoint.every=7")
    assert plot_runs.labels(plot_runs.read_runs([a, b])) == [f"{a} (seed=1)", f"{b} (seed=2)"]
    assert plot_runs.labels(plot_runs.read_runs([a])) == [str(a)]
    c = write_run(tmp_path / "c", [1.0], "seed=1", "optimizer.name=adamw", "optimizer.muon.lr=1")
    names = plot_runs.labels(plot_runs.read_runs([a, c]))
    assert names == [f"{a} (optimizer.name=muon)", f"{c} (optimizer.name=adamw)"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("by", ["time", "all"])
def test_pictures_of_runs_that_were_interrupted(
    tmp_path: Path, suffix: str, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", [1.0] * 8)
    write_run(run, [1.0] * 20, from_step=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')
    other = write_run(tmp_path / "b", [1.0] * 5, "optimizer.name=adamw")
    out = tmp_path / f"x.{suffix}"
    arguments = ["plot", str(run), str(other), "--by", by, "--out", str(out), "--log"]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    begin = b"\x89PNG" if suffix == "png" else b"<?xml"
    assert out.read_bytes().startswith(begin)


def test_the_axis_has_a_unit_of_the_right_size(tmp_path: Path) -> None:
    runs = plot_runs.read_runs([write_run(tmp_path / "a", [1.0] * 300)])
    assert plot_runs._unit(runs, "time") == (60.0, "training time, minutes")
    assert plot_runs._unit(runs, "tokens") == (1e3, "tokens, thousands")
    assert plot_runs._unit(runs, "step") == (1.0, "optimizer step")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere"], "no run at nowhere/metrics.jsonl"),
        (["a", "--out", "x.jpeg"], "expected a name that ends in .png or .svg"),
    ],
)
def test_refusals(
    arguments: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), [1.0])
    assert command.main(["plot", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_without_matplotlib_the_table_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot_runs, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), [1.0])
    assert command.main(["plot", "a", "--table"]) == 0
    assert command.main(["plot", "a"]) == 2
    assert "pip install 'shardmuon[plot]'" in capsys.readouterr().err
