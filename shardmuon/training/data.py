"""Tokens from files, and the order in which they are seen.

Owns which files are read, which are held out, and the pure function from (seed, step, place in the
batch) to a sample. Knows nothing of ranks beyond the places it is asked for; must not keep a
position, so that any step can be asked for at any time by any number of ranks.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmuon.training.config import Data
from shardmuon.training.load import ConfigError

__all__ = ["Corpus", "Tokens", "entropy_bits", "open_corpus", "split_files"]

FILE_END = 0
"""Byte put after each text file; text has no zero bytes of its own."""

_LOOK_TOKENS = 2**20


class Tokens:
    """Token ids in one or more arrays; a window never crosses from one array into the next."""

    def __init__(
        self, arrays: Sequence[NDArray[Any]], sequence_length: int, vocab_size: int
    ) -> None:
        """`arrays` are 1-D; a window is `sequence_length` inputs plus one more target."""
        self.length = sequence_length
        self.vocab_size = vocab_size
        self.arrays = [array for array in arrays if len(array) > sequence_length]
        self._ends = np.cumsum([len(a) - sequence_length for a in self.arrays]).tolist()

    @property
    def windows(self) -> int:
        """Number of places where a window can start."""
        return int(self._ends[-1]) if self._ends else 0

    def window(self, start: int) -> NDArray[np.int64]:
        """The ids [sequence_length + 1] of window `start`, counted over all arrays.

        Raises ValueError on an id outside the vocabulary, which would be read out of bounds.
        """
        which = bisect.bisect_right(self._ends, start)
        offset = start - (self._ends[which - 1] if which else 0)
        ids: NDArray[np.int64] = self.arrays[which][offset : offset + self.length + 1].astype(
            np.int64
        )
        if ids.max() >= self.vocab_size:
            raise ValueError(
                f"the data hold token {ids.max()}, "
                f"expected ids below model.vocab_size ({self.vocab_size})"
            )
        return ids

    def sample(self, seed: int, step: int, index: int) -> NDArray[np.int64]:
        """Sample `index` of the global batch of `step`: a pure function of its arguments."""
        mixed = _mix(_mix(_mix(seed) + step) + index)
        return self.window(mixed % self.windows)

    def spread(self, index: int, count: int) -> NDArray[np.int64]:
        """Sample `index` of `count` that lie evenly over all windows."""
        return self.window(index * self.windows // count)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and validation tokens.

    is_bytes: tokens are bytes of text, so that bits per byte has a meaning.
    fingerprint: hash of the names and sizes of all files; tells a resumed run that data changed.
    """

    train: Tokens
    validation: Tokens
    is_bytes: bool
    description: str
    fingerprint: str


def _mix(value: int) -> int:
    """Scramble 64 bits; splitmix64, http://prng.di.unimi.it/splitmix64.c (public domain)."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def split_files(names: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """(training, validation) names, both sorted; validation are those with the lowest hash.

    At least one name is held out, and at least one is left if there are two.
    """
    ranked = sorted(names, key=lambda name: (hashlib.sha256(name.encode()).hexdigest(), name))
    held = min(max(1, round(fraction * len(ranked))), max(1, len(ranked) - 1))
    return sorted(ranked[held:]), sorted(ranked[:held])


def entropy_bits(tokens: Tokens) -> float:
    """Order-0 entropy in bits per token: what a model that knows only frequencies can reach."""
    highest = max(int(array.max()) for array in tokens.arrays)
    counts = np.zeros(highest + 1, dtype=np.int64)
    for array in tokens.arrays:
        counts += np.bincount(array, minlength=highest + 1)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def open_corpus(config: Data, vocab_size: int) -> Corpus:
    """Find, split and open the files. Raises ConfigError if there are too few or too small."""
    root, train, validation = _find(config)
    streams = []
    for key, names in (("training", train), ("validation", validation)):
        if config.source == "tokens":
            arrays = [_map(root / name, config.token_dtype, vocab_size) for name in names]
        else:
            arrays = [_read_text([root / name for name in names])]
        stream = Tokens(arrays, config.sequence_length, vocab_size)
        if not stream.windows:
            raise ConfigError(
                f"data.files: the {len(names)} {key} files hold no sequence of "
                f"{config.sequence_length} + 1 tokens, expected more text or a shorter "
                "data.sequence_length"
            )
        streams.append(stream)
    sizes = [f"{name}:{(root / name).stat().st_size}" for name in (*train, *validation)]
    return Corpus(
        train=streams[0],
        validation=streams[1],
        is_bytes=config.source != "tokens",
        description=f"{config.source}: {len(train)} training files "
        f"({sum(map(len, streams[0].arrays)):,} tokens), {len(validation)} validation files "
        f"({sum(map(len, streams[1].arrays)):,} tokens)",
        fingerprint=hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:16],
    )


def _find(config: Data) -> tuple[Path, list[str], list[str]]:
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


def _glob(key: str, patterns: Sequence[str]) -> list[str]:
    """Sorted names of files that match; every pattern must match one."""
    names: set[str] = set()
    for pattern in patterns:
        found = [n for n in glob.glob(pattern, recursive=True) if Path(n).is_file()]
        if not found:
            raise ConfigError(f"{key}: no file matches '{pattern}', expected at least one")
        names.update(found)
    return sorted(names)


def _read_text(paths: Sequence[Path]) -> NDArray[np.uint8]:
    """The bytes of all files in one array, each file closed by FILE_END."""
    end = bytes([FILE_END])
    return np.frombuffer(b"".join(path.read_bytes() + end for path in paths), dtype=np.uint8)


def _map(path: Path, dtype: str, vocab_size: int) -> NDArray[Any]:
    """Memory-map token ids; looks at the first ones, to catch a wrong token_dtype early."""
    kind = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0 or path.stat().st_size % kind.itemsize:
        raise ConfigError(
            f"data.files: {path} has {path.stat().st_size} bytes, "
            f"expected a positive multiple of {kind.itemsize} for {dtype}"
        )
    array = np.memmap(path, dtype=kind, mode="r")
    highest = int(array[:_LOOK_TOKENS].max())
    if highest >= vocab_size:
        raise ConfigError(
            f"data.files: {path} holds token {highest}, "
            f"expected ids below model.vocab_size ({vocab_size}); is data.token_dtype right?"
        )
    return array
