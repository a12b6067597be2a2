"""Checkpoint folders: publication by rename, newest, removal, manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmuon.checkpoint import publish
from shardmuon.training import resume
from shardmuon.training.config import Checkpointing, Config, Logging, Model, Schedule
from shardmuon.training.load import ConfigError


def make(root: Path, step: int, **manifest: object) -> Path:
    temporary = publish.open_temporary(root, step)
    (temporary / "data").write_text(str(step))
    return publish.publish(temporary, {"step": step, "world_size": 2, **manifest})


def test_a_checkpoint_appears_by_one_rename(tmp_path: Path) -> None:
    temporary = publish.open_temporary(tmp_path, 10)
    assert temporary.name == "step_00000010.tmp"
    (temporary / "data").write_text("x")
    assert publish.published(tmp_path) == []
    final = publish.publish(temporary, {"step": 10})
    assert final.name == "step_00000010"
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000010"]
    assert publish.read_manifest(final)["step"] == 10


def test_leftovers_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (publish.open_temporary(tmp_path, 10) / "old").write_text("x")
    assert list(publish.open_temporary(tmp_path, 10).iterdir()) == []


def test_a_published_name_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path, 10)
    with pytest.raises(FileExistsError, match="exists already"):
        make(tmp_path, 10)
    assert (publish.final_path(tmp_path, 10) / "data").read_text() == "10"


def test_newest_is_by_number_and_finished(tmp_path: Path) -> None:
    assert publish.newest(tmp_path / "none") is None
    for step in (9, 100_000_000, 10):
        make(tmp_path, step)
    publish.open_temporary(tmp_path, 200_000_000)
    (tmp_path / "step_notes").mkdir()
    assert publish.newest(tmp_path) == tmp_path / "step_100000000"


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    assert publish.prune(tmp_path, 3) == paths[:1]
    assert publish.published(tmp_path) == paths[1:]
    assert publish.prune(tmp_path, 3) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}'])
def test_broken_manifests(tmp_path: Path, text: str) -> None:
    (tmp_path / publish.MANIFEST).write_text(text)
    with pytest.raises(publish.CheckpointError, match=r"manifest\.json"):
        publish.read_manifest(tmp_path)


def config(folder: Path, wanted: str = "auto", **sections: object) -> Config:
    base = {
        "logging": Logging(directory=str(folder)),
        "checkpoint": Checkpointing(resume=wanted),
        **sections,
    }
    return Config(**base)  # type: ignore[arg-type]


def saved(folder: Path, step: int = 10) -> Path:
    root = folder / "checkpoints"
    return make(root, step, **resume.extra(config(folder), "files", {"muon.0": 0.1}, step))


def test_auto_takes_the_newest_or_starts_anew(tmp_path: Path) -> None:
    assert resume.resolve(config(tmp_path), "files", 2) == resume.Resume()
    saved(tmp_path)
    newest = saved(tmp_path, 20)
    found = resume.resolve(config(tmp_path), "files", 2)
    assert found == resume.Resume(path=newest, step=20)


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


def test_other_ranks_or_another_model_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="written by 2 ranks, this run has 4"):
        resume.resolve(config(tmp_path), "files", 4)
    with pytest.raises(ConfigError, match=r"model\.layers: 4 -> 5"):
        resume.resolve(config(tmp_path, model=Model(layers=5)), "files", 2)


def test_changes_are_told(tmp_path: Path) -> None:
    saved(tmp_path)
    changed = config(tmp_path, schedule=Schedule(steps=600, stop_at=50))
    found = resume.resolve(changed, "other files", 2)
    assert found.changes[0] == "schedule.steps: 300 -> 600"
    assert found.changes[1].startswith("data: other files")
    assert len(found.changes) == 2


def test_manifest_is_json_with_what_a_run_needs(tmp_path: Path) -> None:
    manifest = json.loads((saved(tmp_path) / "manifest.json").read_text())
    assert manifest["schedule"] == {"next_step": 10, "lr": {"muon.0": 0.1}}
    assert manifest["data"] == {"next_step": 10, "seed": 0, "fingerprint": "files"}
    assert manifest["config"]["model"]["dim"] == 128
