"""What DCP's index of a checkpoint may say: blocks that make up whole tensors, inside of its files.

Owns the check of everything that a load or an export relies on, so that an index that is damaged or
made up is refused before memory is taken or a tensor is changed. Reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.limits import show

__all__ = ["check_index"]


def check_index(folder: Path, metadata: Metadata, files: Collection[str]) -> None:
    """CheckpointError unless `metadata` describes whole tensors in `files` of `folder`."""
    if not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{folder}: the index has no tensors")
    if not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{folder}: the index has no places")
    places = _Places(folder, metadata.storage_data, files)
    for name, kind in metadata.state_dict_metadata.items():
        tensor = _checked(folder, name, kind)
        for chunk in tensor.chunks:
            places.check(name, chunk, tensor.properties.dtype)


class _Places:
    """Where the index says that blocks lie."""

    def __init__(self, folder: Path, places: dict[Any, Any], files: Collection[str]) -> None:
        self._folder, self._places = folder, places
        self._sizes: dict[str, int] = {}
        for place in places.values():
            if not isinstance(place.relative_path, str) or place.relative_path not in files:
                raise CheckpointError(
                    f"{folder}: the index leads to {show(place.relative_path)}, which is not"
                    " among the checkpoint's files"
                )
            if place.transform_descriptors:
                raise CheckpointError(f"{folder}: transformed files are not supported")

    def check(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> None:
        """CheckpointError unless the block has a place that is large enough, inside of its file."""
        place = self._places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise CheckpointError(f"{self._folder}: the index has no place for a block of {name}")
        numbers = (place.offset, place.length)
        least = prod(chunk.sizes) * dtype.itemsize
        if (
            not all(type(number) is int and number >= 0 for number in numbers)
            or place.length < least
            or place.offset + place.length > self._size(place.relative_path)
        ):
            raise CheckpointError(
                f"{self._folder}: {name} has a block of {show(least)} bytes, and its place, from"
                f" {show(place.offset)} on for {show(place.length)} bytes, is not in"
                f" {place.relative_path}"
            )

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            self._sizes[name] = (self._folder / name).stat().st_size
        return self._sizes[name]


def _checked(folder: Path, name: object, kind: object) -> TensorStorageMetadata:
    """`kind`, if it describes a tensor."""
    if not isinstance(name, str) or not isinstance(kind, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: {show(name)[1:-1]} is not a tensor")
    known = isinstance(kind.properties, TensorProperties)
    if not known or not isinstance(kind.properties.dtype, torch.dtype):
        raise CheckpointError(f"{folder}: {name} has no dtype")
    if not _is_shape(kind.size) or not isinstance(kind.chunks, list):
        raise CheckpointError(f"{folder}: {name} has no shape")
    if not _are_whole(kind.size, kind.chunks):
        raise CheckpointError(f"{folder}: the blocks of {name} do not make up {tuple(kind.size)}")
    return kind


def _is_shape(size: object) -> bool:
    return isinstance(size, torch.Size) and all(length >= 0 for length in size)


def _are_whole(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the blocks cover a tensor of this size, each element once."""
    for chunk in chunks:
        if not (_is_shape(chunk.offsets) and _is_shape(chunk.sizes)):
            return False
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        parts = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(start + length > whole for start, length, whole in parts):
            return False
    full = [chunk for chunk in chunks if prod(chunk.sizes)]
    return sum(prod(chunk.sizes) for chunk in full) == prod(size) and not _overlap(full)


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two blocks have an element in common.

    Goes along the dim in which they begin at the most places, and compares only those that are open
    at the same time.
    """
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].offsets))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return True  # numbers without a dim
    open_ones: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        open_ones = [o for o in open_ones if o.offsets[along] + o.sizes[along] > start]
        if any(_meet(chunk, other) for other in open_ones):
            return True
        open_ones.append(chunk)
    return False


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + b_length and b < a + a_length
        for a, a_length, b, b_length in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )
