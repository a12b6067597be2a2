"""Checkpoint folders: names, publication by rename, leftovers, removal, manifests."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from shardmuon.checkpoint import CheckpointError, publish


def write(root: Path, step: int, text: str | None = None) -> tuple[Path, dict[str, object]]:
    """A temporary folder with one file, and the records of its files."""
    temporary = publish.open_temporary(root, step)
    (temporary / "data").write_text(text or str(step))
    return temporary, {"data": publish.record_of(temporary / "data")}


def make(root: Path, step: int, text: str | None = None, **manifest: object) -> Path:
    temporary, files = write(root, step, text)
    return publish.publish(temporary, {"step": step, **manifest}, files)  # type: ignore[arg-type]


def seal(folder: Path, manifest: object) -> None:
    """Write a manifest whose checksum is right, whatever it says."""
    body = json.dumps(manifest, sort_keys=True)
    assert isinstance(manifest, dict)
    sealed = {**manifest, "checksum": zlib.crc32(body.encode())}
    (folder / publish.MANIFEST).write_text(json.dumps(sealed))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_by_one_rename(tmp_path: Path) -> None:
    temporary, files = write(tmp_path, 10)
    assert temporary.name == "step_00000010.tmp"
    assert publish.published(tmp_path) == []
    final = publish.publish(temporary, {"step": 10}, files)  # type: ignore[arg-type]
    assert final == publish.final_path(tmp_path, 10) == tmp_path / "step_00000010"
    assert names(tmp_path) == ["step_00000010"]
    manifest = publish.read_manifest(final)
    assert manifest == {"step": 10, "format": publish.FORMAT, "files": files}


def test_the_manifest_is_written_last_and_all_is_on_disk_before_the_rename(tmp_path: Path) -> None:
    temporary, files = write(tmp_path, 10)
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def recording_sync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def recording_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return rename(self, target)

    with patch.object(os, "fsync", recording_sync), patch.object(Path, "rename", recording_rename):
        publish.publish(temporary, {}, files)  # type: ignore[arg-type]
    assert done == [
        "sync manifest.json",
        "sync step_00000010.tmp",
        "rename step_00000010.tmp",
        f"sync {tmp_path.name}",
    ]


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    kept = make(tmp_path, 8)
    write(tmp_path, 9)
    (tmp_path / "step_00000007.old").mkdir()
    (tmp_path / "notes.tmp").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "step_00000006.old").symlink_to(elsewhere)
    assert [path.name for path in publish.unfinished(tmp_path)] == [
        "step_00000006.old",
        "step_00000007.old",
        "step_00000009.tmp",
    ]
    temporary = publish.open_temporary(tmp_path, 10)
    assert list(temporary.iterdir()) == []
    assert names(tmp_path) == sorted(["elsewhere", "notes.tmp", kept.name, temporary.name])


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = make(tmp_path, 10, "old")
    assert make(tmp_path, 10, "new") == path
    assert (path / "data").read_text() == "new"
    assert names(tmp_path) == [path.name]


def test_the_old_one_stays_if_it_cannot_be_replaced(tmp_path: Path) -> None:
    path = make(tmp_path, 10, "old")
    temporary, files = write(tmp_path, 10, "new")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self == temporary:
            raise OSError("the storage is gone")
        return rename(self, target)

    with patch.object(Path, "rename", failing), pytest.raises(OSError, match="storage is gone"):
        publish.publish(temporary, {}, files)  # type: ignore[arg-type]
    assert publish.candidates(tmp_path) == [(path, None)]
    assert (path / "data").read_text() == "old"


@pytest.mark.parametrize("harm", [os.remove, lambda path: os.truncate(path, 1)])
def test_an_incomplete_folder_is_not_published(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    temporary, files = write(tmp_path, 1234567)
    harm(temporary / "data")
    with pytest.raises(CheckpointError, match=r"step_01234567\.tmp/data"):
        publish.publish(temporary, {}, files)  # type: ignore[arg-type]
    assert publish.published(tmp_path) == []


def test_order_is_by_number(tmp_path: Path) -> None:
    assert publish.published(tmp_path / "none") == publish.unfinished(tmp_path / "none") == []
    for step in (9, 100_000_000, 99_999_999):
        make(tmp_path, step)
    publish.open_temporary(tmp_path, 200_000_000)
    (tmp_path / "step_notes").mkdir()
    (tmp_path / "step_0000001x").mkdir()
    found = [path.name for path in publish.published(tmp_path)]
    assert found == ["step_00000009", "step_99999999", "step_100000000"]
    newest_first = [(tmp_path / name, None) for name in reversed(found)]
    assert publish.candidates(tmp_path) == newest_first


def test_candidates_say_what_is_wrong(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[0] / "data").unlink()
    (paths[1] / "data").write_text("22")
    (paths[3] / publish.MANIFEST).unlink()
    reasons = dict(publish.candidates(tmp_path))
    assert list(reasons) == paths[::-1]
    assert reasons[paths[0]] == f"{paths[0]}/data is missing"
    assert reasons[paths[1]] == f"{paths[1]}/data has 2 bytes, 1 were written"
    assert reasons[paths[2]] is None
    assert str(reasons[paths[3]]).startswith(f"no finished checkpoint at {paths[3]}")


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 99_999_999, 100_000_000)]
    assert publish.prune(tmp_path, 3, 100_000_000) == paths[:1]
    assert names(tmp_path) == sorted(path.name for path in paths[1:])
    assert publish.prune(tmp_path, 3, 100_000_000) == []


def test_prune_counts_only_what_can_be_loaded(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    for path in (paths[0], paths[3]):
        (path / "data").unlink()
    assert publish.prune(tmp_path, 3, 5) == paths[:1]
    assert publish.prune(tmp_path, 2, 5) == [paths[1]]
    assert publish.published(tmp_path) == paths[2:]  # the unfit fourth is newer than what is kept


def test_prune_leaves_later_steps_alone(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3, 100_000_000)]
    assert publish.prune(tmp_path, 1, 2) == paths[:1]
    assert publish.published(tmp_path) == paths[1:]


def test_prune_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    there = make(tmp_path / "there", 1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / there.name).symlink_to(there)
    make(tmp_path / "here", 2)
    publish.prune(tmp_path / "here", 1, 2)
    assert names(tmp_path / "here") == ["step_00000002"]
    assert names(there) == ["data", publish.MANIFEST]


def test_damaged_manifests_are_noticed(tmp_path: Path) -> None:
    """Torn anywhere, or with a bit flipped anywhere."""
    numbers = [1, 2.5, None, True]
    path = make(tmp_path, 10, note="sphäre", numbers=numbers) / publish.MANIFEST
    sound = path.read_bytes()
    refused: list[str] = []
    for position in range(len(sound)):
        flipped = bytearray(sound)
        flipped[position] ^= 1 << position % 8
        for damaged in (sound[:position], flipped):
            path.write_bytes(damaged)
            try:
                manifest = publish.read_manifest(path.parent)
            except CheckpointError as error:
                refused.append(str(error))
            else:  # a space between values that became another one
                assert damaged == flipped
                assert (manifest["note"], manifest["numbers"]) == ("sphäre", numbers)
    assert len(refused) > 1.8 * len(sound)
    assert all(text.startswith(str(path)) for text in refused)
    path.write_bytes(sound)
    assert publish.read_manifest(path.parent)["step"] == 10


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\xff"])
def test_other_formats_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / publish.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        publish.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "../step_00000009/data"]
)
def test_files_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, 9)
    path = make(tmp_path, 10)
    record = {"size": 1, "crc32": 0}
    seal(path, {"format": publish.FORMAT, "files": {name: record}})
    with pytest.raises(CheckpointError, match="outside of its folder"):
        publish.read_manifest(path)


@pytest.mark.parametrize("files", [None, [], ["data"], {"data": 1}, {"data": {"size": 1}}])
def test_a_manifest_without_records_is_refused(tmp_path: Path, files: object) -> None:
    seal(tmp_path, {"format": publish.FORMAT, "files": files})
    with pytest.raises(CheckpointError, match="lists no files"):
        publish.read_manifest(tmp_path)


def test_keys_that_json_turns_into_text_are_sealed_as_text(tmp_path: Path) -> None:
    """Numbers sort otherwise than their texts."""
    path = make(tmp_path, 10, sizes={2: "a", 10: "b"})
    assert publish.read_manifest(path)["sizes"] == {"2": "a", "10": "b"}


def test_content_is_compared_by_checksum(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    files = publish.read_manifest(path)["files"]
    assert publish.first_damaged(path, files, ["data"]) is None
    (path / "data").write_text("11")
    assert publish.read_manifest(path)["files"] == files
    wrong = publish.first_damaged(path, files, ["data"])
    assert wrong == f"{path}/data does not have the content that was written (checksum differs)"
    assert publish.first_damaged(path, files, []) is None
    (path / "data").unlink()
    assert f"{path}/data cannot be read" in str(publish.first_damaged(path, files, ["data"]))
