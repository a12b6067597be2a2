"""Small files in Hugging Face's formats, made anew: model folders, tokenizers and datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = ["END", "TEXTS", "dataset", "model_folder", "tokenizer_file"]

END = "<|endoftext|>"
TEXTS = [
    f"def add_{i}(a, b):\n    return a + b + {i}  # ünïcode\n" * (1 + i % 3) for i in range(40)
]

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def model_folder(
    folder: Path, kind: str = "llama", *, weights: bool = False, **settings: Any
) -> Path:
    """A folder with a config.json, and with random weights if asked to."""
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 300, **_SIZES, **settings})
    if not weights:
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(7)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder


def tokenizer_file(path: Path, *, end: str | None = END) -> Path:
    """A byte-pair tokenizer of 300 ids over bytes, at `path`."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[] if end is None else [end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(path))
    return path


def dataset(folder: Path, columns: dict[str, list[Any]], validation: int = 0) -> Path:
    """A dataset on disk; the last `validation` rows, if any, are a split of their own."""
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict(columns)
    if validation:
        first = len(made) - validation
        made = datasets.DatasetDict(
            train=made.select(range(first)), validation=made.select(range(first, len(made)))
        )
    made.save_to_disk(folder)
    return folder
