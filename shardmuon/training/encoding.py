"""Token ids of documents, written once into a flat file and mapped from then on.

Owns the tokenizer and the cache. A file is named after a hash of all that its ids depend on, so
that a changed document or tokenizer makes another one. Ranks of one machine share it: the first
writes, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmuon.training.documents import Split
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError

__all__ = ["Encoded", "Tokenizer", "encode"]

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_TOGETHER = 256
"""Documents that the tokenizer gets at once; it uses several threads for them."""


class Tokenizer:
    """A `tokenizer.json`. end: id put after each document, None if there is none."""

    def __init__(self, config: Data, vocab_size: int) -> None:
        """Raises ConfigError if it cannot be read or has more ids than the model."""
        path = Path(config.tokenizer or "")
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if find_spec("tokenizers") is None:
            raise ConfigError("data.tokenizer: this takes tokenizers; pip install tokenizers")
        try:
            content = self.path.read_bytes()
            self._tokenizer: Any = import_module("tokenizers").Tokenizer.from_buffer(content)
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer: cannot read {self.path} ({error.strerror}); expected a"
                " tokenizer.json or a folder with one"
            ) from None
        except Exception as error:  # the package raises plain Exception
            raise ConfigError(f"data.tokenizer: {self.path} is no tokenizer ({error})") from None
        self.size = int(self._tokenizer.get_vocab_size())
        if self.size > vocab_size:
            raise ConfigError(
                f"data.tokenizer: {self.path} has {self.size} token ids, expected at most"
                f" {vocab_size}, as many as the model"
            )
        self.end = self._end(config.end_token)
        self.identity = f"{hashlib.sha256(content).hexdigest()}:{self.end}"

    def _end(self, wanted: str | None) -> int | None:
        if wanted is not None:
            found: int | None = self._tokenizer.token_to_id(wanted)
            if found is None:
                raise ConfigError(f"data.end_token: '{wanted}' is no token of {self.path}")
            return found
        known = (self._tokenizer.token_to_id(name) for name in _END_TOKENS)
        return next((token for token in known if token is not None), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with the end token behind them."""
        closed = [] if self.end is None else [self.end]
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*each.ids, *closed] for each in found]

    def ids(self, text: str) -> list[int]:
        """Ids of `text`, with no token before or behind."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def decoder(self) -> Callable[[int], bytes]:
        """A function that turns one id after another into text; some give it only together."""
        stream = import_module("tokenizers.decoders").DecodeStream(skip_special_tokens=False)
        return lambda token: (stream.step(self._tokenizer, token) or "").encode()


@dataclass(frozen=True)
class Encoded:
    """Mapped token ids of all documents of a side, and the bytes of their text (None of ids)."""

    ids: NDArray[Any]
    text_bytes: int | None


def encode(split: Split, tokenizer: Tokenizer | None, folder: Path, size: int) -> Encoded:
    """The ids of `split`, below `size`, from files in `folder` or written there now.

    Raises ConfigError on an id that is too large.
    """
    kind = np.dtype("<u2" if size <= 2**16 else "<u4")
    lines = [kind.str, tokenizer.identity if tokenizer else "", *split.identity, *split.stamps]
    name = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    path, facts_path = folder / f"{name}.bin", folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts_path.exists():
            print(f"token ids of {split.count:,} {split.unit} go to {path}", file=sys.stderr)
            pieces = _texts(split, tokenizer) if tokenizer else _ids(split)
            _write(path, facts_path, pieces, kind)
    facts = json.loads(facts_path.read_text(encoding="utf-8"))
    if facts["highest"] >= size:
        raise ConfigError(
            f"data.files: the {split.unit} hold token {facts['highest']}, expected ids below"
            f" {size}, as many as the model has"
        )
    return Encoded(
        np.memmap(path, dtype=kind, mode="r") if facts["tokens"] else np.empty(0, kind),
        facts["text_bytes"] if tokenizer else None,
    )


Piece = tuple[NDArray[Any], int]
"""(ids, bytes of the text they stand for)."""


def _texts(split: Split, tokenizer: Tokenizer) -> Iterator[Piece]:
    documents = split.read()
    while texts := list(itertools.islice(documents, _TOGETHER)):
        encoded = tokenizer.encode([text.decode(errors="replace") for text in texts])
        ids = np.array([i for each in encoded for i in each], dtype=np.int64)
        yield ids, sum(map(len, texts))


def _ids(split: Split) -> Iterator[Piece]:
    return ((ids, 0) for ids in split.read())


def _write(path: Path, facts_path: Path, pieces: Iterator[Piece], kind: np.dtype[Any]) -> None:
    """Write the ids as `kind`, then the facts that say that they are complete."""
    facts = {"tokens": 0, "text_bytes": 0, "highest": 0}
    with path.open("wb") as stream:
        for ids, length in pieces:
            if len(ids):
                facts["highest"] = max(facts["highest"], int(ids.max()))
                if ids.min() < 0 or facts["highest"] > np.iinfo(kind).max:
                    raise ConfigError(
                        f"data.files: the documents hold tokens from {ids.min()} to {ids.max()},"
                        f" expected ids from 0 to {np.iinfo(kind).max}"
                    )
            ids.astype(kind).tofile(stream)
            facts["tokens"] += len(ids)
            facts["text_bytes"] += length
    temporary = facts_path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(facts_path)
