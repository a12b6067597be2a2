"""The campaign of kills in small, and proof that it sees damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from shardmuon.checkpoint import CheckpointError, publish
from shardmuon.training import main
from tests.faults import campaign, files, jobs
from tests.faults.trial import Setting
from tests.training import launch

STEPS = 12

pytestmark = pytest.mark.timeout(400)


def test_killed_runs_come_to_the_same_end(tmp_path: Path) -> None:
    """Saves in the foreground, read back, and in the background."""
    small = campaign.Campaign(tmp_path / "runs", seed=0, steps=STEPS)
    while len(small.outcomes) < 2 or (small.kills < 3 and len(small.outcomes) < 8):
        asynchronous = len(small.outcomes) % 2 == 1
        setting = Setting(asynchronous=asynchronous, read_back=not asynchronous, steps=STEPS)
        small.run(setting, kills=2)
        assert small.problems == []
    assert small.kills > 0
    assert all(fault.resumed for outcome in small.outcomes for fault in outcome.faults)
    assert sum(outcome.compared for outcome in small.outcomes) > 0
    text = campaign.table_of_faults(small.outcomes) + campaign.table_of_runs(small.outcomes)
    assert "| sync" in text
    assert "| async" in text


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints after 1 and 2 steps of a run in this process."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "data").mkdir()
    launch.text_files(folder / "data")
    settings = ["schedule.steps=2", "schedule.warmup_steps=0", "schedule.decay_steps=0"]
    arguments = jobs.tiny(folder / "data", folder, *settings, "checkpoint.every=1")
    assert main.main(arguments) == 0
    return folder / "checkpoints"


def fitness(path: Path) -> bool:
    """What the library says of a checkpoint."""
    try:
        recorded = publish.read_manifest(path)["files"]
    except CheckpointError:
        return False
    return publish.first_damaged(path, recorded, recorded) is None


@pytest.mark.parametrize("kind", list(files.DAMAGES))
def test_every_damage_is_seen(kind: str, checkpoints: Path, tmp_path: Path) -> None:
    for seed in range(10):
        root = tmp_path / str(seed)
        shutil.copytree(checkpoints, root)
        newest = files.folders(root)[-1]
        before = files.read(newest)
        unfit = files.damage(newest, kind, random.Random(seed))
        assert fitness(newest) == (not unfit)
        assert [files.step_of(path) for path in files.folders(root)] == [1, 2]
        if not unfit:
            assert files.same(before, files.read(newest))
            assert [path.suffix for path in files.leftovers(root)] == [".tmp"]


def test_other_bits_are_seen(checkpoints: Path) -> None:
    one, two = (files.read(path) for path in files.folders(checkpoints))
    assert not files.same(one, two)
    name, tensor = next(iter(two.tensors.items()))
    nearly = files.Content({**two.tensors, name: tensor.clone()}, two.facts)
    assert files.same(two, nearly)
    nearly.tensors[name].view(-1)[0].mul_(1 + 2**-23)
    assert not files.same(two, nearly)
