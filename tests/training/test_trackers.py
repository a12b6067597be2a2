"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl, also over a restart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardmuon.training import main, metrics, trackers
from shardmuon.training.config import Logging
from shardmuon.training.load import ConfigError
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")


def test_names_and_what_is_left_out() -> None:
    numbers = {"loss": 2.5, "lr": {"muon.0": 0.1}, "a": None, "b": math.inf, "c": True, "n": 3}
    found = trackers.scalars("train", numbers)
    assert found == {"train/loss": 2.5, "train/lr/muon.0": 0.1, "train/n": 3}
    assert trackers.scalars("evaluate", {"loss": 1.0}) == {"validation/loss": 1.0}


def test_a_resumed_run_continues_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import (
        event_accumulator,
    )

    (tmp_path / "text").mkdir()
    folder = tmp_path / "run"
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    arguments += [f"logging.directory={folder}", "logging.tensorboard=true"]
    assert main.main([*arguments, "schedule.stop_at=4", "checkpoint.every=3"]) == 0
    (folder / "checkpoints" / "step_00000004" / "manifest.json").unlink()
    assert main.main(arguments) == 0
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    for tag, event in (("train/loss", "train"), ("validation/loss", "evaluate")):
        expected = [
            (r["step"], pytest.approx(r["loss"]))
            for r in metrics.history(folder / "metrics.jsonl")
            if r["event"] == event
        ]
        assert [(e.step, e.value) for e in events.Scalars(tag)] == expected
    assert {"train/lr/muon.0", "train/seconds/optimizer"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(("key", "value"), [("tensorboard", True), ("wandb", "project")])
def test_a_missing_package_is_refused(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    config = Logging(**{key: value})
    with pytest.raises(ConfigError, match=rf"logging.{key}: needs {key}: pip install 'shardmuon\["):
        trackers.check(config)
    trackers.check(Logging())


def test_a_folder_named_like_a_package_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not trackers._is_installed("some_tracker")
    assert trackers._is_installed("json")


def test_a_tracker_that_cannot_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(trackers, "TensorBoard", fail)
    with pytest.warns(UserWarning, match="could not start, .* OSError: no room"):
        assert trackers.start(Logging(directory=str(tmp_path), tensorboard=True), 0, {}) == []


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.done = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, numbers: dict[str, Any]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.done = True


def test_wandb_keeps_its_id_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for wandb.init: what is asked of it, not what it does."""
    import wandb

    ids, made = [], FakeRun()

    def init(**arguments: Any) -> FakeRun:
        ids.append(arguments["id"])
        assert arguments["project"] == "mine"
        assert arguments["resume"] == "allow"
        return made

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        tracker = trackers.WandB("mine", tmp_path / "run", {"seed": 1})
        tracker.write("start", 0, {"ranks": 2})
        tracker.write("train", 3, {"loss": 1.5})
        tracker.close()
    assert ids[0] == ids[1]
    assert made.logged == [{"step": 3, "train/loss": 1.5}] * 2
    assert made.done
