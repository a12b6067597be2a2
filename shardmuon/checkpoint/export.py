"""Weights and optimizer state as safetensors files that other libraries read, and weights back.

Owns the Hugging Face convention: one `model.safetensors`, or `model-00001-of-00002.safetensors` and
so on with an index that says which file holds which tensor. An export reads a checkpoint: each rank
reads the tensors of one file at a time, whole, and writes that file, so that memory is bounded by
the size of a file and no tensor of a running model is touched. The folder appears by one rename,
after every file was read back and compared.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from shardmuon.checkpoint import publish
from shardmuon.checkpoint.checkpointer import Checkpointer
from shardmuon.checkpoint.contents import check_names, check_shapes, collect
from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.checkpoint.storage import Index, Reader
from shardmuon.checkpoint.together import Ranks

__all__ = ["DEFAULT_FILE_BYTES", "export_checkpoint", "export_model", "load_weights"]

DEFAULT_FILE_BYTES = 5 * 10**9
_WEIGHTS, _STATE = "model", "optimizer"


@dataclass(frozen=True)
class _File:
    """An output file. name: relative to the folder. keys: of its tensors in the checkpoint, by the
    names they have in the file. dtype: what floating-point tensors are cast to, or None."""

    name: str
    keys: Mapping[str, str]
    bytes: int
    dtype: torch.dtype | None


def export_model(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = DEFAULT_FILE_BYTES,
    texts: Mapping[str, Any] | None = None,
) -> Path:
    """Export a live model, collectively; its tensors are read and nothing else.

    Writes a checkpoint of what is exported beside `folder`, exports that, and removes it: each rank
    writes what it holds. Arguments are those of `export_checkpoint`.
    """
    folder = Path(folder)
    with closing(Checkpointer(folder.with_name(f"{folder.name}.sharded"))) as checkpoints:
        try:
            return export_checkpoint(
                checkpoints.save(0, model, optimizer),
                folder,
                optimizer=optimizer is not None,
                dtype=dtype,
                file_bytes=file_bytes,
                texts=texts,
            )
        finally:
            if checkpoints.ranks.first:
                shutil.rmtree(checkpoints.root, ignore_errors=True)


def export_checkpoint(
    path: str | Path,
    folder: str | Path,
    *,
    optimizer: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = DEFAULT_FILE_BYTES,
    texts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the weights of the checkpoint at `path` into the new folder `folder`; returns it.

    Works in one process, or collectively on all ranks, which share the files between them.

    Args:
        path: a checkpoint written by `Checkpointer`.
        folder: must not exist. Tied weights appear once, under the first of their names.
        optimizer: also write optimizer state, into the folder `optimizer` below, with keys
            `FQN.STATE` and dtypes as they are, and the groups' settings as `groups.json`.
        dtype: of floating-point weights; None keeps theirs.
        file_bytes: largest size of a file, unless one tensor alone is larger.
        texts: further JSON files by name, such as `config.json`.

    Raises CheckpointError on all ranks if the checkpoint is damaged, `folder` exists, or a file
    reads back otherwise than it was written.
    """
    path, folder = Path(path), Path(folder)
    temporary = folder.with_name(f"{folder.name}.tmp")
    with closing(Checkpointer(path.parent)) as checkpoints:
        ranks, what = checkpoints.ranks, f"export to {folder}"
        manifest, reader = checkpoints.open(path)
        index = reader.index()
        shares = [_files(index, _WEIGHTS, "", dtype, file_bytes)]
        further = dict(texts or {})
        if optimizer:
            shares.append(_files(index, _STATE, "optimizer/", None, file_bytes))
            further["optimizer/groups.json"] = manifest["groups"]
        for files in shares:
            further |= _index_of(files)
        mine = [file for files in shares for file in files][ranks.rank :: ranks.count]
        ranks.together(what, lambda: _start(folder, temporary) if ranks.first else None)
        ranks.together(what, lambda: _write_files(reader, index, temporary, mine))
        ranks.together(what, lambda: _end(folder, temporary, further) if ranks.first else None)
    return folder


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Load safetensors files under the names of `model` into it, in place; collective.

    Each rank reads its shards only. Files of other dtypes are cast. Raises CheckpointError on all
    ranks, before anything is changed, if names or shapes do not fit.
    """
    folder = Path(folder)
    with closing(Ranks(timeout_s=1800.0)) as ranks:
        reader = HuggingFaceStorageReader(str(folder))

        def prepare() -> dict[str, Tensor]:
            if not any(folder.glob("*.safetensors")):
                raise CheckpointError(f"no safetensors files in {folder}")
            index = cast(Index, reader.read_metadata().state_dict_metadata)
            found = {k.removeprefix("model."): v for k, v in collect(model, None).tensors.items()}
            check_names(found.keys() - index.keys(), index.keys() - found.keys())
            check_shapes(found, index)
            return found

        tensors = ranks.together(f"load {folder}", prepare)
        ranks.dcp(
            f"load {folder}",
            lambda: dcp.load(
                tensors,
                storage_reader=reader,
                process_group=ranks.group,
                no_dist=ranks.group is None,
            ),
        )


def _files(
    index: Index, kind: str, place: str, dtype: torch.dtype | None, limit: int
) -> list[_File]:
    """All tensors of a kind, in the order of their names, cut into files of at most `limit`."""
    chunks: list[tuple[dict[str, str], int]] = []
    for key in sorted(key for key in index if key.startswith(f"{kind}.")):
        size = index[key].size.numel() * _dtype(index, key, dtype).itemsize
        if not chunks or chunks[-1][1] + size > limit:
            chunks.append(({}, 0))
        keys, total = chunks[-1]
        keys[key.removeprefix(f"{kind}.")] = key
        chunks[-1] = (keys, total + size)
    count = len(chunks)
    return [
        _File(
            f"{place}{kind}" + (f"-{n:05d}-of-{count:05d}" if count > 1 else "") + ".safetensors",
            keys,
            total,
            dtype,
        )
        for n, (keys, total) in enumerate(chunks, 1)
    ]


def _dtype(index: Index, key: str, wanted: torch.dtype | None) -> torch.dtype:
    saved = index[key].properties.dtype
    return wanted if wanted is not None and saved.is_floating_point else saved


def _index_of(files: Sequence[_File]) -> dict[str, Any]:
    """The index of several files as JSON by file name; one file needs none."""
    if len(files) < 2:
        return {}
    name = files[0].name.partition("-")[0] + ".safetensors.index.json"
    where = {key: Path(file.name).name for file in files for key in file.keys}
    return {name: {"metadata": {"total_size": sum(f.bytes for f in files)}, "weight_map": where}}


def _start(folder: Path, temporary: Path) -> None:
    if folder.exists():
        raise CheckpointError(f"{folder} exists already")
    if temporary.exists():
        shutil.rmtree(temporary)  # of an export that did not end
    (temporary / "optimizer").mkdir(parents=True)


def _write_files(reader: Reader, index: Index, folder: Path, files: Sequence[_File]) -> None:
    for file in files:
        whole = {key: _empty(index, key) for key in file.keys.values()}
        dcp.load(whole, storage_reader=reader, no_dist=True)
        _write(
            folder / file.name,
            {
                name: whole.pop(key).to(_dtype(index, key, file.dtype))
                for name, key in file.keys.items()
            },
        )


def _empty(index: Index, key: str) -> Tensor:
    return torch.empty(index[key].size, dtype=index[key].properties.dtype, device="cpu")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file and compare what is on disk with it."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    for name, tensor in load_file(path).items():
        if tensor.dtype != tensors[name].dtype or not _same_bits(tensor, tensors[name]):
            raise CheckpointError(f"{path} does not read back as it was written, in {name}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of numbers that are not equal to themselves."""
    flat = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _end(folder: Path, temporary: Path, texts: Mapping[str, Any]) -> None:
    for name, value in texts.items():
        with (temporary / name).open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
    if not any((temporary / "optimizer").iterdir()):
        (temporary / "optimizer").rmdir()
    temporary.rename(folder)
    publish.sync_folder(folder.parent)
