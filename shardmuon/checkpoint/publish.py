"""Names, publication and removal of checkpoint folders.

Owns the rule that a folder with a final name is complete: it is written as `step_00000010.tmp` and
renamed once. Torch-free, and free of ranks: one rank calls it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "final_path",
    "newest",
    "open_temporary",
    "prune",
    "publish",
    "published",
    "read_manifest",
]

MANIFEST = "manifest.json"
"""The JSON file of a checkpoint; written last, so that its absence marks an unfinished one."""

FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint is missing, unfinished or does not fit; the text is one line."""


def final_path(root: Path, step: int) -> Path:
    """Published folder of the checkpoint after `step` optimizer steps."""
    return root / f"step_{step:08d}"


def open_temporary(root: Path, step: int) -> Path:
    """Make an empty temporary folder for `step`; a leftover of a killed run is removed."""
    temporary = final_path(root, step).with_suffix(".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, manifest: Mapping[str, Any]) -> Path:
    """Write the manifest and give the folder its final name; returns the new path.

    Everything is on disk before the rename, so that a published name survives a power cut whole.
    Raises FileExistsError if the name is taken.
    """
    final = temporary.with_suffix("")
    if final.exists():
        raise FileExistsError(f"checkpoint {final} exists already")
    text = json.dumps({"format": FORMAT, **manifest}, indent=1, allow_nan=False)
    (temporary / MANIFEST).write_text(text, encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    temporary.rename(final)
    _sync(final.parent)
    return final


def published(root: Path) -> list[Path]:
    """All published checkpoints in `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def newest(root: Path) -> Path | None:
    """The published checkpoint with the highest step, if there is one."""
    return next(reversed(published(root)), None)


def prune(root: Path, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` published checkpoints; returns what was removed."""
    removed = published(root)[:-keep_last]
    for path in removed:
        # Renamed first: a half-removed folder must not look published.
        doomed = path.with_suffix(".tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return removed


def read_manifest(path: Path) -> dict[str, Any]:
    """The JSON file of the checkpoint at `path`. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"no finished checkpoint at {path}, expected a folder with {MANIFEST}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not a checkpoint of format {FORMAT}")
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
