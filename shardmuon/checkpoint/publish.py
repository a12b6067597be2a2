"""Names, publication, inspection and removal of checkpoint folders.

Owns the rule of what a finished checkpoint is: a folder `step_00000010` that was written under a
temporary name and renamed once, with a manifest that was written last, lists every file with size
and checksum, and carries a checksum of itself. Torch-free, and free of ranks: one rank writes here,
any rank may read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from shardmuon.limits import show

__all__ = [
    "MANIFEST",
    "SEALING_KEYS",
    "CheckpointError",
    "FileRecord",
    "candidates",
    "final_path",
    "first_damaged",
    "open_temporary",
    "prune",
    "publish",
    "published",
    "read_manifest",
    "record_of",
    "sync_folder",
    "temporary_path",
    "unfinished",
]

MANIFEST = "manifest.json"
"""The JSON file of a checkpoint; written last, so that its absence marks an unfinished one."""
SEALING_KEYS = frozenset(("checksum", "files", "format"))
"""What `publish` adds to a manifest."""

FORMAT = 2
_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"step_\d{8,}\.(tmp|old)")
_CHUNK_BYTES = 1 << 18


class CheckpointError(Exception):
    """A checkpoint cannot be written, or is missing, damaged or does not fit; one line of text."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file's content."""

    size: int
    crc32: int


def final_path(root: Path, step: int) -> Path:
    """Published folder of the checkpoint after `step` optimizer steps."""
    return root / f"step_{step:08d}"


def temporary_path(root: Path, step: int) -> Path:
    """Where that checkpoint is written."""
    return final_path(root, step).with_suffix(".tmp")


def open_temporary(root: Path, step: int) -> Path:
    """Make an empty temporary folder for `step`. Leftovers of killed runs are removed."""
    for path in unfinished(root):
        _remove(path)
    temporary = temporary_path(root, step)
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, manifest: Mapping[str, Any], files: Mapping[str, FileRecord]) -> Path:
    """Write the manifest and give the folder its final name; returns the new path.

    files: what must be in the folder, by name. Everything is on disk before the rename, so that a
    published name survives a power cut whole. A checkpoint of the same step is replaced: whoever
    saves a step anew has found the old one unfit or has trained it again. It stays if this fails.
    """
    _compare_sizes(temporary, files)
    text = _seal({**manifest, "format": FORMAT, "files": {n: vars(r) for n, r in files.items()}})
    with (temporary / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(temporary)
    final, old = temporary.with_suffix(""), temporary.with_suffix(".old")
    if final.exists():
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    with suppress(OSError):
        _remove(old)
    return final


def published(root: Path) -> list[Path]:
    """All folders in `root` with a final name, oldest step first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def unfinished(root: Path) -> list[Path]:
    """What saves that did not end have left in `root`."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name))


def candidates(root: Path) -> list[tuple[Path, str | None]]:
    """Published checkpoints, newest first, each with what is wrong with it as far as seen cheaply.

    Looks at the manifest and at file sizes; `first_damaged` looks at contents.
    """
    found: list[tuple[Path, str | None]] = []
    for path in reversed(published(root)):
        try:
            read_manifest(path)
            found.append((path, None))
        except CheckpointError as error:
            found.append((path, str(error)))
    return found


def prune(root: Path, keep_last: int, step: int) -> list[Path]:
    """Remove what is older than the newest `keep_last` checkpoints up to `step`.

    Returns what was removed. Unfit checkpoints do not count as kept. Later steps are those of
    another attempt and are left alone.
    """
    fit = [path for path, wrong in candidates(root) if wrong is None and _step(path) <= step]
    if len(fit) < keep_last:
        return []
    oldest = _step(fit[keep_last - 1])
    removed = [path for path in published(root) if _step(path) < oldest]
    for path in removed:
        # Renamed first: a half-removed folder must not look published.
        doomed = path.with_suffix(".old")
        path.rename(doomed)
        _remove(doomed)
    return removed


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, every file there with its size.

    "files" is returned as FileRecords by name. Raises CheckpointError.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"no finished checkpoint at {path}, expected a folder with {MANIFEST}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error})") from None
    manifest = _unseal(path, text)
    manifest["files"] = _file_records(path, manifest.get("files"))
    _compare_sizes(path, manifest["files"])
    return manifest


def record_of(path: Path) -> FileRecord:
    """Size and checksum of the file as it is on disk."""
    with path.open("rb", buffering=0) as stream:
        return _record(stream)


def first_damaged(path: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> str | None:
    """What is wrong with the content of the first unfit file among `names`, or None."""
    for name in names:
        try:
            found = record_of(path / name)
        except OSError as error:
            return f"{path / name} cannot be read ({error})"
        if found != files[name]:
            return f"{path / name} does not have the content that was written (checksum differs)"
    return None


def _step(path: Path) -> int:
    """Of a published folder, by its name."""
    return int(path.name.removeprefix("step_"))


def _remove(path: Path) -> None:
    """Remove a folder; of a link only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _record(stream: RawIOBase) -> FileRecord:
    size = checksum = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))  # one, that stays in the processor's cache
    while count := stream.readinto(buffer):
        size += count
        checksum = zlib.crc32(buffer[:count], checksum)
    return FileRecord(size, checksum)


def _seal(manifest: Mapping[str, Any]) -> str:
    """JSON text with a checksum of all the rest, so that a damaged manifest is noticed too."""
    plain = json.loads(json.dumps(manifest, allow_nan=False))  # keys are text from here on
    body = json.dumps(plain, sort_keys=True)
    return json.dumps({"checksum": zlib.crc32(body.encode()), **plain}, indent=1)


def _unseal(path: Path, text: str) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not a checkpoint of format {FORMAT}")
    checksum = manifest.pop("checksum", None)
    if checksum != zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):
        raise CheckpointError(f"{path / MANIFEST} is damaged (checksum differs)")
    return manifest


def _file_records(path: Path, files: Any) -> dict[str, FileRecord]:
    """Records by name. A name that leads out of the folder is refused."""
    try:
        records = {name: _record_from(record) for name, record in files.items()}
    except (AttributeError, TypeError):
        raise CheckpointError(f"{path / MANIFEST} lists no files") from None
    for name in records:
        if Path(name).name != name or name in ("", ".", "..") or not _is_text(name):
            raise CheckpointError(
                f"{path / MANIFEST} names a file outside of its folder: {show(name)}"
            )
    return records


def _record_from(content: Any) -> FileRecord:
    record = FileRecord(**content)
    if type(record.size) is not int or type(record.crc32) is not int:
        raise TypeError(record)
    return record


def _is_text(name: str) -> bool:
    """Whether it can be a file's name: JSON can write any code, also 0 and halves of pairs."""
    return "\0" not in name and not any("\ud800" <= each <= "\udfff" for each in name)


def _compare_sizes(path: Path, files: Mapping[str, FileRecord]) -> None:
    for name, record in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{path / name} is missing") from None
        if size != record.size:
            raise CheckpointError(f"{path / name} has {size} bytes, {record.size} were written")


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
