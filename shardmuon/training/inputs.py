"""The sections of the configuration that say what is trained, and on which data.

Owns their keys like `config.py`, of whose tree they are part. Must not read files or import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from shardmuon.limits import Bytes, Count, Positive, Range, show
from shardmuon.training.ranges import Section

__all__ = ["Data", "Model"]


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """A Llama-style transformer, or any causal language model of transformers.

    path: folder with a config.json of transformers. The model is what transformers makes of it,
        and starts from the .safetensors files there, if there are any. The keys below must then be
        left out. null is a Llama-style transformer with the keys below.
    vocab_size: number of token ids; 256 or more for bytes.
    dim: width of the residual stream.
    layers: number of transformer blocks.
    heads: attention heads; each has dim / heads channels, which must be even.
    kv_heads: key and value heads, shared by groups of heads; must divide `heads`.
    hidden: width of the gated MLP.
    tied_head: use the embedding matrix as the output head.
    rope_theta: base of the rotary position frequencies.
    norm_eps: added to the mean square in RMSNorm.
    init_std: standard deviation of initial weights; output projections are divided by
        sqrt(2 layers) on top.
    """

    path: str | None = None
    vocab_size: Count = 256
    dim: Count = 128
    layers: Count = 4
    heads: Count = 4
    kv_heads: Count = 2
    hidden: Count = 384
    tied_head: bool = False
    rope_theta: Positive = 10000.0
    norm_eps: Positive = 1e-5
    init_std: Positive = 0.02

    def check(self) -> None:
        if self.path is not None:
            self._check_alone()
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"heads: got {self.heads} for dim {self.dim}, "
                "expected dim / heads to be an even whole number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: got {self.kv_heads}, expected a divisor of heads ({self.heads})"
            )

    def _check_alone(self) -> None:
        if not self.path:
            raise ValueError("path: got '', expected a folder or null")
        for field in fields(self):
            if field.name != "path" and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name}: got {show(getattr(self, field.name))} beside path, expected "
                    "nothing: the folder's config.json says what the model is"
                )


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Where tokens come from. Training and validation share no file, and no row of a dataset.

    source: "stdlib" reads the Python standard library's own .py files; "installed" also reads
        sources and documentation of installed packages, without files that are generated or like
        one read before; "text" reads `files`; "dataset" reads a folder that
        `save_to_disk` of Hugging Face's datasets wrote; "tokens" maps `files` as flat binary token
        ids, without a header.
    files: glob patterns (`**` allowed) for "text" and "tokens"; the one folder of a "dataset".
    validation_files: glob patterns of the files to validate on; empty takes a share of `files`.
    validation_fraction: share of files held out, chosen by a hash of their names, when
        `validation_files` is empty. At least one file is held out. Of a dataset without a split
        called validation or test, rows at equal distances; of "installed", share of bytes.
    packages: for "installed": names in site-packages, or "stdlib"; empty takes all.
    max_bytes: for "installed": bytes of both sides together, so that machines with other packages
        have as much text; null takes all.
    tokenizer: a tokenizer.json, or a folder with one, that turns text into token ids, once: they
        are kept in `cache`. null takes the bytes of the text.
    end_token: token of `tokenizer` put after each file or row; null takes the usual one that the
        tokenizer has, if any. Bytes end with a zero.
    column: of a dataset, with text or with lists of token ids.
    cache: folder for token ids of a tokenizer or dataset, and for which files were chosen of those
        installed; null is
        $XDG_CACHE_HOME/shardmuon/tokens, else ~/.cache/shardmuon/tokens.
    token_dtype: integer type of the ids in "tokens" files, little-endian.
    sequence_length: tokens that the model sees at once.
    batch_sequences: sequences in one optimizer step, over all ranks and accumulation steps.
    """

    source: Literal["stdlib", "installed", "text", "dataset", "tokens"] = "stdlib"
    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: Annotated[float, Range(low=0, high=1, low_open=True, high_open=True)] = (
        0.05
    )
    packages: tuple[str, ...] = ()
    max_bytes: Bytes | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    column: str = "text"
    cache: str | None = None
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    sequence_length: Count = 256
    batch_sequences: Count = 32

    def check(self) -> None:
        if not self.takes_files and (self.files or self.validation_files):
            raise ValueError(f"files: got patterns, expected none with source '{self.source}'")
        if self.takes_files and not self.files:
            raise ValueError(f"files: got none, expected patterns for source '{self.source}'")
        if self.source == "dataset" and (len(self.files) > 1 or self.validation_files):
            raise ValueError("files: got several, expected the one folder of a dataset")
        if self.source == "tokens" and self.tokenizer is not None:
            raise ValueError("tokenizer: got one, expected null with source 'tokens'")
        for key in ("packages", "max_bytes"):
            if getattr(self, key) and self.source != "installed":
                raise ValueError(f"{key}: got a value, expected none with source '{self.source}'")
        if self.end_token is not None and self.tokenizer is None:
            raise ValueError("end_token: got one, expected null without a tokenizer")

    @property
    def takes_files(self) -> bool:
        """Whether `files` say what to read."""
        return self.source not in ("stdlib", "installed")

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are the bytes of text; rows of a dataset may turn out to hold ids."""
        return self.source != "tokens" and self.tokenizer is None
