"""Saves that fail or do not end, damaged checkpoints, and what the next run makes of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shardmuon.checkpoint import Checkpointer, publish
from tests.checkpoint.saving import Job, full_disk, names, no_manifest, no_rename, refused
from tests.conftest import Worlds

SECOND, FOURTH = "step_00000002", "step_00000004"


def train_and_save(folder: str, steps: tuple[int, ...]) -> dict[int, str]:
    """Save after these steps; this rank's bits of each."""
    job, bits = Job(), {}
    with closing(Checkpointer(folder)) as checkpoints:
        for step in steps:
            job.train(step - job.step)
            checkpoints.save(step, *job.parts)
            bits[step] = job.bits()
    return bits


@pytest.fixture(scope="module")
def original(
    pools: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[int, str]]]:
    """(a folder with checkpoints of steps 2 and 4 from two ranks, bits of each rank)."""
    folder = tmp_path_factory.mktemp("original") / "root"
    bits = pools.run(2, train_and_save, str(folder), (2, 4))
    assert names(folder) == [SECOND, FOURTH]
    return folder, bits


@pytest.fixture
def sound(original: tuple[Path, list[dict[int, str]]], tmp_path: Path) -> Path:
    """A copy of that folder, to be damaged."""
    return Path(shutil.copytree(original[0], tmp_path / "root"))


@pytest.fixture
def bits(original: tuple[Path, list[dict[int, str]]]) -> list[dict[int, str]]:
    """What the checkpoints in `sound` hold, by rank and step."""
    return original[1]


def flip(path: Path, position: int = -1) -> None:
    """Flip a bit in the middle of a file, or elsewhere."""
    content = bytearray(path.read_bytes())
    content[position if position >= 0 else len(content) // 2] ^= 16
    path.write_bytes(content)


def unfinish(path: Path) -> None:
    """What is left of a save that was killed before its mark."""
    (path / publish.MANIFEST).unlink()
    path.rename(path.with_suffix(".tmp"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "cut": (lambda path: os.truncate(path / "__0_0.distcp", 5000), "has 5000 bytes"),
    "no file of rank 1": (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "unfinished": (unfinish, "its save did not end"),
    "no mark": (lambda path: (path / publish.MANIFEST).unlink(), "no finished checkpoint at"),
    "bit of rank 0": (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp does not have"),
    "bit of rank 1": (lambda path: flip(path / "__1_0.distcp", 70), "__1_0.distcp does not have"),
    "bit of the index": (lambda path: flip(path / ".metadata"), ".metadata does not have"),
    "bit of the mark": (lambda path: flip(path / publish.MANIFEST), "manifest.json is damaged"),
}


def resume(folder: str) -> dict[str, Any]:
    """What a new run does: look, load, train on, save step 4 again."""
    job = Job(seed=1)
    before = job.bits()
    with closing(Checkpointer(folder)) as checkpoints:
        explicit = refused(lambda: checkpoints.load(f"{folder}/{FOURTH}", *job.parts))
        assert job.bits() == before, "a load that fails changes nothing"
        found = checkpoints.newest()
        assert found.path is not None
        job.step = checkpoints.load(found.path, *job.parts)["step"]
        loaded = job.bits()
        job.train(2)
        checkpoints.save(job.step, *job.parts)
        again = checkpoints.newest()
    return {
        "explicit": explicit,
        "found": found,
        "loaded": loaded,
        "again": again,
        "saved": job.bits(),
    }


@pytest.mark.parametrize("name", DAMAGES)
def test_an_unfit_checkpoint_is_passed_over_and_replaced(
    pools: Worlds, sound: Path, bits: list[dict[int, str]], name: str
) -> None:
    harm, reason = DAMAGES[name]
    harm(sound / FOURTH)
    answers = pools.run(2, resume, str(sound))
    for rank, answer in enumerate(answers):
        assert answer["explicit"] == answers[0]["explicit"]
        assert answer["found"] == answers[0]["found"]
        assert answer["found"].path == sound / SECOND
        assert answer["loaded"] == bits[rank][2]
        assert answer["again"].path == sound / FOURTH
        assert answer["again"].skipped == ()
        assert answer["saved"] == bits[rank][4]
    (skipped,) = answers[0]["found"].skipped
    assert skipped.startswith(FOURTH)
    assert reason in skipped.partition(" is skipped: ")[2]
    explicit = answers[0]["explicit"]
    assert explicit.startswith(f"cannot open {sound}/{FOURTH}: rank ")
    assert reason in explicit or "no finished checkpoint at" in explicit
    assert names(sound) == [SECOND, FOURTH]


def look(folder: str) -> tuple[Any, str]:
    """The newest checkpoint and this rank's bits of it."""
    job = Job(seed=1)
    with closing(Checkpointer(folder)) as checkpoints:
        found = checkpoints.newest()
        if found.path is not None:
            checkpoints.load(found.path, *job.parts)
    return found, job.bits()


def test_nothing_usable_is_said_too(pools: Worlds, sound: Path) -> None:
    for name in (SECOND, FOURTH):
        (sound / name / ".metadata").unlink()
    (one, _), (other, _) = pools.run(2, look, str(sound))
    assert one == other
    assert one.path is None
    assert [line.split()[0] for line in one.skipped] == [FOURTH, SECOND]


def die_between_data_and_mark(folder: str, victim: int) -> None:
    """In a save of step 4 one rank dies once the data files are there."""
    job = Job()
    job.train(4)
    here = dist.get_rank() == victim

    def die(*_: object) -> None:
        assert names(Path(folder, f"{FOURTH}.tmp")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        os._exit(9)

    mark: tuple[Any, str] = (publish, "publish") if victim == 0 else (Checkpointer, "_manifest")
    with patch.object(*mark, die) if here else nullcontext():
        Checkpointer(folder).save(4, *job.parts)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_between_data_and_mark(pools: Worlds, sound: Path, victim: int) -> None:
    shutil.rmtree(sound / FOURTH)
    errors = pools.run_expecting_error(2, die_between_data_and_mark, str(sound), victim)
    assert errors[victim].type_name == "ProcessDied"
    assert errors[1 - victim].type_name == "CheckpointError"
    assert "is gone" in errors[1 - victim].message
    left = [SECOND, f"{FOURTH}.tmp"] if victim == 0 else [SECOND]  # the first rank cleans up
    assert names(sound) == left
    answers = pools.run(2, look, str(sound))
    for found, _ in answers:
        assert found == answers[0][0]
        assert found.path == sound / SECOND
        assert [line.split()[0] for line in found.skipped] == left[1:]
    assert names(sound) == left
    pools.run(2, train_and_save, str(sound), (4,))
    assert names(sound) == [SECOND, FOURTH]


def fail_to_save(folder: str, fault: str) -> dict[str, Any]:
    """Fail to save step 4 anew with other values, and try again."""
    job = Job(seed=5)
    job.train(4)
    with closing(Checkpointer(folder)) as checkpoints:
        with FAULTS[fault][0]():
            text = refused(lambda: checkpoints.save(4, *job.parts))
        left = names(folder) if dist.get_rank() == 0 else None
        kept = look(folder)
        checkpoints.save(4, *job.parts)
    return {"text": text, "left": left, "kept": kept, "saved": job.bits(), "again": look(folder)}


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "data of rank 1": (
        lambda: full_disk(1),
        "rank 1: OSError: [Errno 28] No space left on device",
    ),
    "data of rank 0": (
        lambda: full_disk(0),
        "rank 0: OSError: [Errno 28] No space left on device",
    ),
    "manifest": (no_manifest, "rank 0: OSError: [Errno 122] Disk quota exceeded"),
    "rename": (no_rename, "rank 0: OSError: [Errno 5] Input/output error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_on_one_rank_fails_on_all(
    pools: Worlds, sound: Path, bits: list[dict[int, str]], fault: str
) -> None:
    answers = pools.run(2, fail_to_save, str(sound), fault)
    assert answers[0]["left"] == [SECOND, FOURTH]
    for rank, answer in enumerate(answers):
        assert answer["text"] == f"cannot save step 4 to {sound}: {FAULTS[fault][1]}"
        found, kept = answer["kept"]
        assert (found.path, found.skipped) == (sound / FOURTH, ())
        assert kept == bits[rank][4]
        found, again = answer["again"]
        assert (found.path, found.skipped) == (sound / FOURTH, ())
        assert again == answer["saved"] != kept
    assert names(sound) == [SECOND, FOURTH]


def save_odd_state(folder: str) -> str:
    """One rank holds something that no checkpoint can hold."""
    job = Job()
    job.train(1)
    state = next(iter(job.optimizer.state.values()))
    if dist.get_rank() == 1:
        state["note"] = "text"
    with closing(Checkpointer(folder)) as checkpoints:
        text = refused(lambda: checkpoints.save(1, *job.parts))
        assert not any(Path(folder).iterdir())
        state.pop("note", None)
        checkpoints.save(1, *job.parts)
    return text


def test_state_that_cannot_be_saved_on_one_rank(pools: Worlds, shared_folder: str) -> None:
    one, other = pools.run(2, save_odd_state, shared_folder)
    assert one == other
    assert one.startswith("cannot save: rank 1: optimizer state note of")
    assert "is a str; a checkpoint holds only tensors" in one


def save_refused(root: str) -> str:
    job = Job()
    with closing(Checkpointer(root)) as checkpoints:
        return refused(lambda: checkpoints.save(1, *job.parts))


def test_a_file_in_the_way_of_the_folder(pools: Worlds, shared_folder: str) -> None:
    Path(shared_folder, "file").write_text("x")
    for root in ("file", "file/below"):
        texts = pools.run(2, save_refused, f"{shared_folder}/{root}")
        assert texts[0] == texts[1]
        assert "rank 0: NotADirectoryError" in texts[0]
    assert Path(shared_folder, "file").read_text() == "x"


def test_a_folder_that_cannot_be_written(pools: Worlds, shared_folder: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser writes into read-only folders")
    Path(shared_folder).chmod(0o555)
    texts = pools.run(2, save_refused, shared_folder)
    Path(shared_folder).chmod(0o755)
    assert texts[0] == texts[1]
    assert "rank 0: PermissionError" in texts[0]


def change_before_verification(folder: str, read_back: bool) -> tuple[str | None, Any]:
    """A byte of rank 1's file changes once it is written."""
    job, verify = Job(), publish.first_damaged

    def spoil(path: Path) -> None:
        if dist.get_rank() == 1:
            flip(path / "__1_0.distcp")

    def spoil_and_verify(path: Path, *arguments: Any) -> str | None:
        spoil(path)
        return verify(path, *arguments)

    with closing(Checkpointer(folder, read_back=read_back)) as checkpoints:
        text = None
        if read_back:
            with patch.object(publish, "first_damaged", spoil_and_verify):
                text = refused(lambda: checkpoints.save(1, *job.parts))
        else:
            spoil(checkpoints.save(1, *job.parts))
        return text, checkpoints.newest()


def test_reading_back_notices_what_the_storage_has_changed(
    pools: Worlds, shared_folder: str
) -> None:
    (one, found), (other, _) = pools.run(2, change_before_verification, shared_folder, True)
    assert one == other
    assert one is not None
    assert "rank 1: " in one
    assert "__1_0.distcp does not have the content that was written" in one
    assert (found.path, names(shared_folder)) == (None, [])


def test_without_reading_back_the_next_look_notices(pools: Worlds, shared_folder: str) -> None:
    (_, one), (_, other) = pools.run(2, change_before_verification, shared_folder, False)
    assert one == other
    assert one.path is None
    assert "__1_0.distcp does not have the content that was written" in one.skipped[0]


def keep_one(folder: str) -> list[list[str]]:
    """What is in the folder when a checkpoint is published, and after each of three saves."""
    job, seen, publish_ = Job(), [], publish.publish

    def watching(*arguments: Any) -> Path:
        seen.append(names(folder))
        path = publish_(*arguments)
        seen.append(names(folder))
        return path

    with (
        closing(Checkpointer(folder, keep_last=1)) as checkpoints,
        patch.object(publish, "publish", watching),
    ):
        checkpoints.save(2, *job.parts)
        with full_disk(1):
            refused(lambda: checkpoints.save(4, *job.parts))
        seen.append(names(folder))
        checkpoints.save(4, *job.parts)
        seen.append(names(folder))
    return seen


def test_older_ones_go_after_the_new_one_is_there(pools: Worlds, shared_folder: str) -> None:
    assert pools.run(2, keep_one, shared_folder)[0] == [
        [f"{SECOND}.tmp"],
        [SECOND],
        [SECOND],  # the save of step 4 has failed
        [SECOND, f"{FOURTH}.tmp"],
        [SECOND, FOURTH],
        [FOURTH],
    ]


def three_saves(folder: str) -> bool:
    """Every checkpoint has its own optimizer state."""
    job, momenta = Job(), {}
    with closing(Checkpointer(folder)) as checkpoints:
        for step in (2, 4, 6):
            job.train(2)
            checkpoints.save(step, *job.parts)
            momenta[step] = job.momentum()
        assert len(set(momenta.values())) == 3
        for step in (2, 6, 4):
            fresh = Job(seed=1)
            checkpoints.load(publish.final_path(Path(folder), step), *fresh.parts)
            assert fresh.momentum() == momenta[step]
    return True


def test_nothing_is_outside_of_the_folders_of_steps(pools: Worlds, shared_folder: str) -> None:
    assert all(pools.run(2, three_saves, shared_folder))
    files = {str(p.relative_to(shared_folder)) for p in Path(shared_folder).rglob("*")}
    folders = {SECOND, FOURTH, "step_00000006"}
    inside = (".metadata", "__0_0.distcp", "__1_0.distcp", publish.MANIFEST)
    assert files == folders | {f"{folder}/{name}" for folder in folders for name in inside}


def weights_only(folder: str) -> tuple[str, bool]:
    """Save without an optimizer; load with one, then without."""
    job, other = Job(), Job(seed=1)
    job.train(2)
    other.train(1)
    before, momentum = other.bits(), other.momentum()
    with closing(Checkpointer(folder)) as checkpoints:
        path = checkpoints.save(2, job.model)
        text = refused(lambda: checkpoints.load(path, *other.parts))
        assert other.bits() == before
        checkpoints.load(path, other.model)
    assert other.momentum() == momentum
    ours, theirs = job.model.state_dict(), other.model.state_dict()
    return text, all(ours[name].equal(theirs[name]) for name in ours)


def test_weights_alone_are_no_optimizer_state(pools: Worlds, shared_folder: str) -> None:
    for text, equal in pools.run(2, weights_only, shared_folder):
        assert "holds no optimizer state; load it without an optimizer" in text
        assert equal


def save_extra(folder: str) -> list[str]:
    job = Job()
    with closing(Checkpointer(folder)) as checkpoints:
        wrong: list[dict[str, Any]] = [
            {"step": 1},
            {"checksum": 1},
            {"x": {1}},
            {"x": float("nan")},
        ]
        texts = [refused(lambda e=extra: checkpoints.save(1, *job.parts, e)) for extra in wrong]  # type: ignore[misc]
        assert not any(Path(folder).iterdir())
        path = checkpoints.save(1, *job.parts, {"sizes": {2: (1, 2), 10: None}})
        assert checkpoints.load(path, *job.parts)["sizes"] == {"2": [1, 2], "10": None}
    return texts


def test_what_else_is_remembered_must_be_json(pools: Worlds, shared_folder: str) -> None:
    one, other = pools.run(2, save_extra, shared_folder)
    assert one == other
    assert "extra has keys that a manifest has of its own: step" in one[0]
    assert "extra has keys that a manifest has of its own: checksum" in one[1]
    assert "not JSON serializable" in one[2]
    assert "not JSON compliant" in one[3]


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0, expected at least 1"):
        Checkpointer(tmp_path, keep_last=0)
