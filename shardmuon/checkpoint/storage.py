"""Reading and writing the data files of a checkpoint with torch.distributed.checkpoint (DCP).

Owns what DCP does not do itself: checksums taken while files are written, and a look at its
pickled index that cannot run code. A checkpoint holds nothing but tensors.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from shardmuon.checkpoint.publish import CheckpointError, FileRecord

__all__ = ["Index", "Reader", "SnapshotPlanner", "Writer"]

INDEX = ".metadata"
"""DCP's pickled file: shapes, dtypes, and where in which file each piece lies."""

Index = Mapping[str, TensorStorageMetadata]

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


class Writer(FileSystemWriter):
    """DCP's writer into `folder`; `files` has the record of every file this rank has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs: _RecordingFileSystem = _RecordingFileSystem()

    @property
    def files(self) -> dict[str, FileRecord]:
        """By name. Complete once DCP has returned."""
        return self.fs.files

    def storage_meta(self) -> StorageMeta:
        """Nothing: where and when a checkpoint was written is no business of its index."""
        return StorageMeta()


class SnapshotPlanner(DefaultSavePlanner):
    """Plans by the live tensors' shapes and placements, and writes this rank's copies of them."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of what this rank holds of a tensor; always one block."""
        return self._copies[index.fqn]


class Reader(FileSystemReader):
    """DCP's reader of `folder` that believes nothing: `files` are the only ones it may open."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read without running code. Raises CheckpointError."""
        path = self._folder / INDEX
        try:
            with path.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
            if not isinstance(metadata, Metadata):
                raise CheckpointError(f"{path} does not hold DCP's metadata")
            self._check(metadata)
        except CheckpointError:
            raise
        except Exception as error:  # damage can end in any of them
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error})"
            ) from None
        metadata.storage_meta = StorageMeta()
        return metadata

    def index(self) -> Index:
        """Shape and dtype of every tensor."""
        return cast(Index, self.read_metadata().state_dict_metadata)

    def _check(self, metadata: Metadata) -> None:
        for name, kind in metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):
                raise CheckpointError(f"{self._folder}: {name} is not a tensor")
        for place in (metadata.storage_data or {}).values():
            if place.relative_path not in self._files:
                raise CheckpointError(
                    f"{self._folder}: the index leads to {place.relative_path!r}, which is not"
                    " among the checkpoint's files"
                )
            if place.transform_descriptors:
                raise CheckpointError(f"{self._folder}: transformed files are not supported")


class _IndexUnpickler(pickle.Unpickler):
    """Finds exactly the names that DCP writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # an enum's member in the pickles of some Python 3.11
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _memory_format(kind: object, name: str) -> Any:
    """Stands for getattr where an index is read."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


class _RecordingFileSystem(FileSystem):
    """Takes size and checksum of what is written, while it is written."""

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _RecordingStream(raw)
            yield cast(io.IOBase, stream)
        self.files[Path(path).name] = FileRecord(stream.size, stream.checksum)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _RecordingStream:
    """A file that is only appended to."""

    def __init__(self, raw: io.IOBase) -> None:
        self._raw = raw
        self.size = self.checksum = 0

    def write(self, data: bytes) -> int:
        written: int = self._raw.write(data)
        self.size += written
        self.checksum = zlib.crc32(data, self.checksum)
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
