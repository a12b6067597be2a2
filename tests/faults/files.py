"""What lies in a folder of checkpoints: reading it back without the library, and damaging it.

Owns the judgement of a checkpoint that does not rest on the code under test: its tensors as plain
torch reads them, and which folders were damaged here.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = [
    "DAMAGES",
    "INDEX",
    "MANIFEST",
    "Content",
    "Identity",
    "damage",
    "folders",
    "identity",
    "leftovers",
    "read",
    "same",
    "step_of",
]

MANIFEST = "manifest.json"
INDEX = ".metadata"

Identity = tuple[str, int, int]


@dataclass(frozen=True)
class Content:
    """All of a checkpoint that must not depend on faults: tensors by key, and JSON values."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def folders(root: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    found = [path for path in _entries(root) if path.suffix == ""]
    return sorted(found, key=step_of)


def leftovers(root: Path) -> list[Path]:
    """Temporary folders, of saves under way or that did not end."""
    return [path for path in _entries(root) if path.suffix == ".tmp"]


def _entries(root: Path) -> list[Path]:
    return [path for path in root.glob("step_*") if path.is_dir()] if root.is_dir() else []


def step_of(path: Path) -> int:
    """The step in a folder's name."""
    return int(path.stem.removeprefix("step_"))


def identity(path: Path) -> Identity:
    """Tells a folder from another one of the same name, which may even get the same inode."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ("", 0, 0)
    return (path.name, status.st_ino, status.st_mtime_ns)


def read(path: Path) -> Content:
    """Read a checkpoint with plain DCP, in this process alone."""
    reader = FileSystemReader(path)
    wanted: dict[str, Tensor] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), key
        wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    facts = {key: manifest[key] for key in ("step", "groups", "random", "schedule", "data")}
    return Content(wanted, facts)


def same(left: Content, right: Content) -> bool:
    """Equal in every bit, of zeros and NaNs too."""
    if left.facts != right.facts or left.tensors.keys() != right.tensors.keys():
        return False
    return all(_same_bits(value, right.tensors[key]) for key, value in left.tensors.items())


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.reshape(-1).contiguous().view(torch.uint8),
        right.reshape(-1).contiguous().view(torch.uint8),
    )


def damage(path: Path, kind: str, dice: random.Random) -> bool:
    """Do what `kind` says to the newest checkpoint, which is at `path`; True if it is unfit now."""
    return DAMAGES[kind](path, dice)


def _truncate(path: Path, dice: random.Random) -> bool:
    file = _data_file(path, dice)
    with file.open("r+b") as stream:
        stream.truncate(dice.randrange(file.stat().st_size))
    return True


def _flip(file: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


def _flip_data(path: Path, dice: random.Random) -> bool:
    _flip(_data_file(path, dice), dice)
    return True


def _flip_index(path: Path, dice: random.Random) -> bool:
    _flip(path / INDEX, dice)
    return True


def _flip_manifest(path: Path, dice: random.Random) -> bool:
    """A bit whose flip changes what the JSON says; `1e-05` and `1E-05` say the same."""
    before = (path / MANIFEST).read_bytes()
    while True:
        _flip(path / MANIFEST, dice)
        try:
            if json.loads((path / MANIFEST).read_bytes()) != json.loads(before):
                return True
        except ValueError:
            return True
        (path / MANIFEST).write_bytes(before)


def _delete(path: Path, dice: random.Random) -> bool:
    dice.choice([_data_file(path, dice), path / INDEX, path / MANIFEST]).unlink()
    return True


def _leave_temporary(path: Path, dice: random.Random) -> bool:
    """What a kill between the last write and the rename leaves: all is there but the name."""
    later = path.with_name(f"step_{step_of(path) + dice.choice([1, 2, 3]):08d}.tmp")
    shutil.copytree(path, later, dirs_exist_ok=True)
    if dice.random() < 0.5:
        _data_file(later, dice).write_bytes(b"")
    return False


def _data_file(path: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(path.glob("*.distcp")))


DAMAGES: dict[str, Callable[[Path, random.Random], bool]] = {
    "data file truncated": _truncate,
    "bit flipped in a data file": _flip_data,
    "bit flipped in the manifest": _flip_manifest,
    "bit flipped in `.metadata`": _flip_index,
    "file deleted": _delete,
    "`.tmp` folder left": _leave_temporary,
}
"""What can happen to the newest checkpoint while nobody trains."""
