"""Which documents are trained on and which are held out: files, or rows of a dataset.

Owns how they are found and split. A document is text as UTF-8 bytes, or token ids; what becomes of
it is `encoding.py`'s and `data.py`'s matter.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmuon.training import installed
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError

__all__ = ["Split", "cache_folder", "find", "split_files"]

_VALIDATION_SPLITS = ("validation", "valid", "test")
_ROWS = 1000
"""Rows of a dataset that are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The documents of one side, read anew by every call of `read`.

    unit: "files" or "rows". holds_ids: `read` gives arrays of token ids, else UTF-8 text.
    paths: of files. identity: lines that say which documents they are; stamps: further ones that
    change when a document is written again.
    """

    count: int
    unit: str
    read: Callable[[], Iterator[Any]]
    identity: tuple[str, ...]
    stamps: tuple[str, ...]
    paths: tuple[Path, ...] = ()
    holds_ids: bool = False


def find(config: Data) -> tuple[Split, Split]:
    """(training, validation) documents. Raises ConfigError if there are too few."""
    if config.source == "dataset":
        return _find_dataset(config)
    if config.source == "installed":
        return _find_installed(config)
    root, train, validation = _find_files(config)
    first, second = (_files(names, [root / n for n in names]) for names in (train, validation))
    return first, second


def cache_folder(config: Data) -> Path:
    """Where `config` keeps token ids and choices of files."""
    if config.cache is not None:
        return Path(config.cache)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardmuon" / "tokens"


def _files(names: Sequence[str], places: Sequence[Path]) -> Split:
    """names: that tell the files apart wherever they lie."""
    paths = tuple(places)
    stats = [path.stat() for path in paths]
    return Split(
        count=len(paths),
        unit="files",
        read=lambda: (path.read_bytes() for path in paths),
        identity=tuple(f"{n}:{s.st_size}" for n, s in zip(names, stats, strict=True)),
        stamps=tuple(str(s.st_mtime_ns) for s in stats),
        paths=paths,
    )


# --- files ------------------------------------------------------------------------------------


def split_files(names: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """(training, validation) names, both sorted; validation are those with the lowest hash.

    At least one name is held out, and at least one is left if there are two.
    """
    ranked = sorted(names, key=lambda name: (hashlib.sha256(name.encode()).hexdigest(), name))
    held = min(max(1, round(fraction * len(ranked))), max(1, len(ranked) - 1))
    return sorted(ranked[held:]), sorted(ranked[:held])


def _find_files(config: Data) -> tuple[Path, list[str], list[str]]:
    """(folder, training names, validation names); names are relative to the folder."""
    if config.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        names = [
            path.relative_to(root).as_posix()
            for path in root.rglob("*.py")
            if not skipped.intersection(path.relative_to(root).parts)
        ]
        if len(names) < 2:
            raise ConfigError(
                f"data.source: the standard library at {root} has {len(names)} source files; "
                "expected source 'text' with data.files"
            )
        return root, *split_files(names, config.validation_fraction)
    names = _glob("data.files", config.files)
    if config.validation_files:
        held = set(_glob("data.validation_files", config.validation_files))
        train, validation = [n for n in names if n not in held], sorted(held)
        if not train:
            raise ConfigError("data.files: all files are validation files, expected others too")
        return Path(), train, validation
    if len(names) < 2:
        raise ConfigError(
            f"data.files: {len(names)} file matches {', '.join(config.files)}; "
            "expected at least 2, one of them to validate on"
        )
    return Path(), *split_files(names, config.validation_fraction)


def _find_installed(config: Data) -> tuple[Split, Split]:
    wish = installed.Wish(
        packages=config.packages,
        fraction=config.validation_fraction,
        most_bytes=config.max_bytes,
    )
    files, choice = installed.choose(wish, cache_folder(config))
    train, validation = (
        _files(names, [files[name] for name in names])
        for names in (choice.train, choice.validation)
    )
    return train, validation


def _glob(key: str, patterns: Sequence[str]) -> list[str]:
    """Sorted names of files that match; every pattern must match one."""
    names: set[str] = set()
    for pattern in patterns:
        found = [n for n in glob.glob(pattern, recursive=True) if Path(n).is_file()]
        if not found:
            raise ConfigError(f"{key}: no file matches '{pattern}', expected at least one")
        names.update(found)
    return sorted(names)


# --- datasets ---------------------------------------------------------------------------------


def _find_dataset(config: Data) -> tuple[Split, Split]:
    if find_spec("datasets") is None:
        raise ConfigError("data.source: 'dataset' takes datasets; pip install 'shardmuon[hf]'")
    (name,) = config.files
    try:
        loaded = import_module("datasets").load_from_disk(name)
    except Exception as error:  # of any type, from formats of many versions
        raise ConfigError(
            f"data.files: '{name}' cannot be read as a dataset ({error}); expected a folder that"
            " save_to_disk wrote"
        ) from None
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    about = [(path.relative_to(name), path.stat()) for path in files]
    identity = [config.column, *(f"{path}:{s.st_size}" for path, s in about)]
    stamps = tuple(str(s.st_mtime_ns) for _, s in about)
    train, validation = (
        _rows(rows, config.column, (f"{side} {config.validation_fraction}", *identity), stamps)
        for side, rows in _sides(loaded, name, config.validation_fraction).items()
    )
    return train, validation


def _sides(loaded: Any, name: str, fraction: float) -> dict[str, Any]:
    """Rows to train and to validate on, of a dataset or of a dict of them."""
    if isinstance(loaded, dict):
        if "train" not in loaded:
            raise ConfigError(f"data.files: '{name}' has splits {sorted(loaded)}, expected 'train'")
        for other in _VALIDATION_SPLITS:
            if other in loaded:
                return {"train": loaded["train"], other: loaded[other]}
        loaded = loaded["train"]
    count = len(loaded)
    held = min(max(1, round(fraction * count)), count - 1)
    if held < 1:
        raise ConfigError(f"data.files: '{name}' has {count} rows, expected at least 2")
    chosen = [index * count // held for index in range(held)]
    rest = sorted(set(range(count)) - set(chosen))
    return {"train": loaded.select(rest), "held out": loaded.select(chosen)}


def _rows(rows: Any, column: str, identity: tuple[str, ...], stamps: tuple[str, ...]) -> Split:
    if column not in rows.column_names:
        raise ConfigError(
            f"data.column: got '{column}', expected one of {', '.join(rows.column_names)}"
        )
    kind = str(rows.features[column])
    text = "string" in kind and "List" not in kind
    if not text and not ("int" in kind and "List" in kind):
        raise ConfigError(
            f"data.column: '{column}' holds {kind}, expected text or lists of token ids"
        )

    def tables() -> Iterator[Any]:
        for table in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
            yield table[column]

    def texts() -> Iterator[bytes]:
        return ((row or "").encode() for part in tables() for row in part.to_pylist())

    def ids() -> Iterator[NDArray[Any]]:
        return (np.asarray(chunk.flatten()) for part in tables() for chunk in part.chunks)

    return Split(
        count=len(rows),
        unit="rows",
        read=texts if text else ids,
        identity=identity,
        stamps=stamps,
        holds_ids=not text,
    )
