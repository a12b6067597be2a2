"""Which checkpoint a run continues from, and what it says has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardmuon.checkpoint import publish
from shardmuon.training import resume
from shardmuon.training.config import Checkpointing, Config, Logging, Model, Schedule
from shardmuon.training.load import ConfigError

NOTHING: dict[str, object] = {"groups": [], "aliases": {}, "random": {}}
"""What else `Checkpointer` writes into a manifest."""


def config(folder: Path, wanted: str = "auto", **sections: object) -> Config:
    base = {
        "logging": Logging(directory=str(folder)),
        "checkpoint": Checkpointing(resume=wanted),
        **sections,
    }
    return Config(**base)  # type: ignore[arg-type]


def saved(folder: Path, step: int = 10) -> Path:
    """A checkpoint as two ranks publish it, but for its tensors."""
    temporary = publish.open_temporary(folder / "checkpoints", step)
    (temporary / "data").write_text(str(step))
    extra = resume.extra(config(folder), None, "files", {"muon.0": 0.1}, step)
    files = {"data": publish.record_of(temporary / "data")}
    return publish.publish(temporary, {**extra, **NOTHING, "step": step, "world_size": 2}, files)


def test_auto_takes_the_newest_or_starts_anew(tmp_path: Path) -> None:
    assert resume.resolve(config(tmp_path), "files", 2) == resume.Resume()
    saved(tmp_path)
    newest = saved(tmp_path, 20)
    found = resume.resolve(config(tmp_path), "files", 2)
    assert found == resume.Resume(path=newest, step=20)


def test_auto_passes_over_what_is_incomplete(tmp_path: Path) -> None:
    usable = saved(tmp_path)
    (saved(tmp_path, 20) / "data").unlink()
    (saved(tmp_path, 30) / "manifest.json").unlink()
    publish.open_temporary(tmp_path / "checkpoints", 40)
    assert resume.resolve(config(tmp_path), "files", 2).path == usable
    (usable / "data").write_text("cut")
    assert resume.resolve(config(tmp_path), "files", 2) == resume.Resume()


def test_none_starts_anew_but_never_over_checkpoints(tmp_path: Path) -> None:
    assert resume.resolve(config(tmp_path, "none"), "files", 2) == resume.Resume()
    saved(tmp_path)
    with pytest.raises(ConfigError, match="holds step_00000010"):
        resume.resolve(config(tmp_path, "none"), "files", 2)


def test_an_explicit_path_must_be_a_finished_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert resume.resolve(config(tmp_path / "new", str(path)), "files", 2).step == 10
    for wrong in (tmp_path, tmp_path / "none", publish.open_temporary(tmp_path, 30)):
        with pytest.raises(publish.CheckpointError, match="no finished checkpoint at"):
            resume.resolve(config(tmp_path, str(wrong)), "files", 2)
    (path / "data").unlink()
    with pytest.raises(publish.CheckpointError, match=f"{path}/data is missing"):
        resume.resolve(config(tmp_path, str(path)), "files", 2)


def test_an_explicit_path_must_be_of_a_training_run(tmp_path: Path) -> None:
    path = publish.publish(
        publish.open_temporary(tmp_path, 3), {**NOTHING, "step": 3, "world_size": 1}, {}
    )
    with pytest.raises(ConfigError, match=r"was not written by train\.py"):
        resume.resolve(config(tmp_path, str(path)), "files", 1)


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.layers: 4 -> 5"):
        resume.resolve(config(tmp_path, model=Model(layers=5)), "files", 2)


def test_changes_are_told(tmp_path: Path) -> None:
    saved(tmp_path)
    changed = config(tmp_path, schedule=Schedule(steps=600, stop_at=50))
    found = resume.resolve(changed, "other files", 4)
    assert found.changes[:2] == ("schedule.steps: 300 -> 600", "ranks: 2 -> 4")
    assert found.changes[2].startswith("data: other files")
    assert len(found.changes) == 3


def test_at_reads_the_checkpoint_that_was_chosen(tmp_path: Path) -> None:
    older = saved(tmp_path)
    saved(tmp_path, 20)
    found = resume.at(older, config(tmp_path), "files", 2)
    assert found == resume.Resume(path=older, step=10)


def test_manifest_is_json_with_what_a_run_needs(tmp_path: Path) -> None:
    manifest = json.loads((saved(tmp_path) / "manifest.json").read_text())
    assert manifest["schedule"] == {"next_step": 10, "lr": {"muon.0": 0.1}}
    assert manifest["data"] == {"next_step": 10, "seed": 0, "fingerprint": "files"}
    assert manifest["config"]["model"]["dim"] == 128


def test_a_models_folder_may_be_moved_but_not_left_out(tmp_path: Path) -> None:
    def of_folder(path: str | None) -> Config:
        return replace(config(tmp_path), model=Model(path=path))

    temporary = publish.open_temporary(tmp_path / "checkpoints", 10)
    (temporary / "data").write_text("")
    extra = resume.extra(of_folder("old"), {}, "files", {"muon.0": 0.1}, 10)
    files = {"data": publish.record_of(temporary / "data")}
    publish.publish(temporary, {**extra, **NOTHING, "step": 10, "world_size": 2}, files)
    found = resume.resolve(of_folder("new"), "files", 2)
    assert found.changes == ("model.path: old -> new",)
    with pytest.raises(ConfigError, match=r"does not fit, model\.path: old -> None"):
        resume.resolve(of_folder(None), "files", 2)
