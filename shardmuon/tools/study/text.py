"""The tokenizer of a study, made from its own training text.

Owns how it is made: byte-level byte pairs, as GPT-2 has them, from the first files of the training
side, whose order is random. Held-out text has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from shardmuon.training import documents
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError

__all__ = ["END", "make_tokenizer"]

END = "<|endoftext|>"


def make_tokenizer(config: Data, vocab_size: int, most_bytes: int, path: Path) -> None:
    """Write a tokenizer.json of at most `vocab_size` ids to `path`. Raises ConfigError."""
    if find_spec("tokenizers") is None:
        raise ConfigError("tokenizer_bytes: this takes tokenizers; pip install tokenizers")
    package = import_module("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(config, most_bytes), trainer)
    temporary = path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    temporary.replace(path)


def _texts(config: Data, most_bytes: int) -> Iterator[str]:
    train, _ = documents.find(config)
    taken = 0
    for text in train.read():
        if taken >= most_bytes:
            return
        taken += len(text)
        yield text.decode(errors="replace")
