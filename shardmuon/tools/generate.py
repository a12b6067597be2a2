"""Text from a checkpoint of `train.py`: `python -m shardmuon generate RUN`.

Owns how a checkpoint becomes a model that writes, and how tokens are drawn. One process; no cache
of keys and values, since a sample is for looking at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmuon.checkpoint import Checkpointer, CheckpointError
from shardmuon.checkpoint.publish import read_manifest
from shardmuon.training import architecture
from shardmuon.training.encoding import Tokenizer
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError

__all__ = ["Drawing", "Writer", "draw", "open_writer", "run"]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn. temperature: 0 takes the likeliest. top_k: of that many, 0 of all."""

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A trained model with its way from text to tokens and back.

    window: tokens that it has learned to look at. decoder: makes a function that turns one token
    after another into text. end: the token that ends a document, or None.
    """

    model: nn.Module
    window: int
    encode: Callable[[str], list[int]]
    decoder: Callable[[], Callable[[int], bytes]]
    end: int | None

    def write(self, prompt: str, count: int, drawing: Drawing) -> Iterator[bytes]:
        """At most `count` more tokens after `prompt`, each as it is drawn; UTF-8 in pieces."""
        ids = self.encode(prompt)
        if not ids:
            raise ConfigError("--prompt: got no token, expected some text to begin with")
        device = next(self.model.parameters()).device
        decode = self.decoder()
        generator = torch.Generator().manual_seed(drawing.seed)
        for _ in range(count):
            seen = torch.tensor([ids[-self.window :]], device=device)
            with torch.no_grad():
                scores = architecture.logits(self.model, seen)[0, -1]
            drawn = draw(scores.float().cpu(), drawing, generator)
            if drawn == self.end:
                return
            ids.append(drawn)
            yield decode(drawn)


def draw(scores: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    """A token id by its logit in `scores` [V] float32 on the CPU."""
    if drawing.temperature == 0:
        return int(scores.argmax())
    if 0 < drawing.top_k < len(scores):
        least = scores.topk(drawing.top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    chances = torch.softmax(scores / drawing.temperature, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))


def open_writer(path: Path) -> Writer:
    """The model of the checkpoint at `path`, on a GPU if there is one.

    Raises CheckpointError if it cannot be loaded, ConfigError if `train.py` did not write it.
    """
    manifest = read_manifest(path)
    if "config" not in manifest:
        raise ConfigError(f"{path} was not written by train.py, which knows how text was encoded")
    settings: dict[str, Any] = manifest["config"]["data"]
    kept = ("source", "tokenizer", "end_token", "sequence_length")
    named = settings["source"] not in ("stdlib", "installed")
    data = Data(files=("-",) * named, **{k: settings[k] for k in kept})
    found = architecture.of_manifest(manifest)
    if not data.is_bytes and data.tokenizer is None:
        raise ConfigError(f"{path} was trained on token ids whose tokenizer is not known")
    tokenizer = Tokenizer(data, found.vocab_size) if data.tokenizer else None
    model = found.build(seed=0)
    with closing(Checkpointer(path.parent)) as checkpoints:
        checkpoints.load(path, model)
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return Writer(
        model=model,
        window=data.sequence_length,
        encode=tokenizer.ids if tokenizer else lambda text: list(text.encode()),
        decoder=tokenizer.decoder if tokenizer else lambda: lambda token: bytes([token % 256]),
        end=0 if tokenizer is None else tokenizer.end,
    )


def run(path: Path, prompt: str, count: int, drawing: Drawing) -> None:
    """Print `prompt` and what the model writes after it, as it comes."""
    try:
        writer = open_writer(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    sys.stdout.buffer.write(prompt.encode())
    for piece in writer.write(prompt, count, drawing):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")
