"""Tokens of all documents, and the order in which they are seen.

Owns the pure function from (seed, step, place in the batch) to a sample. Knows nothing of ranks
beyond the places it is asked for; must not keep a position, so that any step can be asked for at
any time by any number of ranks.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmuon.training import documents
from shardmuon.training.documents import Split, cache_folder
from shardmuon.training.encoding import Tokenizer, encode
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError

__all__ = ["Corpus", "Tokens", "entropy_bits", "open_corpus"]

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

    is_bytes: tokens are bytes of text. bytes_per_token: of the validation text, so that bits per
    byte compare models with other tokenizers; None where the text is not known.
    fingerprint: hash of the names and sizes of all files; tells a resumed run that data changed.
    """

    train: Tokens
    validation: Tokens
    is_bytes: bool
    bytes_per_token: float | None
    description: str
    fingerprint: str


def _mix(value: int) -> int:
    """Scramble 64 bits; splitmix64, http://prng.di.unimi.it/splitmix64.c (public domain)."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def entropy_bits(tokens: Tokens) -> float:
    """Order-0 entropy in bits per token: what a model that knows only frequencies can reach."""
    highest = max(int(array.max()) for array in tokens.arrays)
    counts = np.zeros(highest + 1, dtype=np.int64)
    for array in tokens.arrays:
        counts += np.bincount(array, minlength=highest + 1)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def open_corpus(config: Data, vocab_size: int) -> Corpus:
    """Find, split and open the documents. Raises ConfigError if there are too few or too small."""
    tokenizer = Tokenizer(config, vocab_size) if config.tokenizer is not None else None
    splits = documents.find(config)
    sides = [_open(config, split, tokenizer, vocab_size) for split in splits]
    for name, split, side in zip(("training", "validation"), splits, sides, strict=True):
        if not side.tokens.windows:
            raise ConfigError(
                f"data.files: the {split.count} {name} {split.unit} hold no sequence of "
                f"{config.sequence_length} + 1 tokens, expected more text or a shorter "
                "data.sequence_length"
            )
    lines = [line for split in splits for line in split.identity]
    lines += [tokenizer.identity] if tokenizer else []
    train, validation = (
        f"{split.count:,} {name} {split.unit} ({sum(map(len, side.tokens.arrays)):,} tokens)"
        for name, split, side in zip(("training", "validation"), splits, sides, strict=True)
    )
    return Corpus(
        train=sides[0].tokens,
        validation=sides[1].tokens,
        is_bytes=sides[0].is_bytes,
        bytes_per_token=sides[1].bytes_per_token,
        description=f"{config.source}: {train}, {validation}",
        fingerprint=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    )


@dataclass(frozen=True)
class _Side:
    tokens: Tokens
    is_bytes: bool
    bytes_per_token: float | None


def _open(config: Data, split: Split, tokenizer: Tokenizer | None, vocab_size: int) -> _Side:
    """The tokens of one side: mapped files, bytes in memory, or ids from the cache."""
    if config.source == "tokens":
        arrays = [_map(path, config.token_dtype, vocab_size) for path in split.paths]
        return _Side(Tokens(arrays, config.sequence_length, vocab_size), False, None)
    if tokenizer is None and not split.holds_ids:
        text = _joined(split.read())
        return _Side(Tokens([text], config.sequence_length, vocab_size), True, 1.0)
    if tokenizer is not None and split.holds_ids:
        raise ConfigError("data.tokenizer: got one, but the column holds token ids already")
    encoded = encode(split, tokenizer, cache_folder(config), vocab_size)
    known = encoded.text_bytes is not None and len(encoded.ids) > 0
    return _Side(
        Tokens([encoded.ids], config.sequence_length, vocab_size),
        False,
        (encoded.text_bytes or 0) / len(encoded.ids) if known else None,
    )


def _joined(texts: Iterable[bytes]) -> NDArray[np.uint8]:
    """The bytes of all texts in one array, each closed by FILE_END."""
    end = bytes([FILE_END])
    return np.frombuffer(b"".join(text + end for text in texts), dtype=np.uint8)


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
