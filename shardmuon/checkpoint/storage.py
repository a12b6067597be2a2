"""Reading and writing the data files of a checkpoint with torch.distributed.checkpoint (DCP).

Owns what DCP does not do itself: checksums taken while files are written, and a look at its
pickled index that cannot run code. A checkpoint holds nothing but tensors.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    WriteItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future as TorchFuture

from shardmuon.checkpoint.index import check_index
from shardmuon.checkpoint.publish import CheckpointError, FileRecord

__all__ = ["Index", "Planner", "Reader", "Writer"]

INDEX = ".metadata"
"""DCP's pickled file: shapes, dtypes, and where in which file each piece lies."""

_SYNC_BYTES = 1 << 25

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


class Planner(DefaultSavePlanner):
    """Plans by the live tensors' shapes and placements; every block is written row-major.

    copies: what to write instead of what this rank holds of the tensors, by key.
    """

    def __init__(self, copies: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's block of a tensor; always one."""
        if self._copies is None:
            return super().lookup_object(index)
        return self._copies[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The block as it is written, in an order that `Reader` relies on."""
        return object.contiguous()


class Reader(FileSystemReader):
    """DCP's reader of `folder` that believes nothing: `files` are the only ones it may open."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files
        self._chunks: dict[tuple[str, torch.Size], tuple[torch.Size, torch.dtype]] = {}
        self._starts: dict[tuple[str, torch.Size], int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read without running code. Raises CheckpointError."""
        path = self._folder / INDEX
        try:
            with path.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
            if not isinstance(metadata, Metadata):
                raise CheckpointError(f"{path} does not hold DCP's metadata")
            check_index(self._folder, metadata, self._files)
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

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note shape and dtype of every saved block."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        for name, kind in cast(Index, metadata.state_dict_metadata).items():
            for chunk in kind.chunks:
                self._chunks[name, chunk.offsets] = (chunk.sizes, kind.properties.dtype)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Find where the numbers of all blocks begin, so that no rank reads if one cannot.

        Raises CheckpointError.
        """
        for name, items in self._by_file(plan).items():
            with (self._folder / name).open("rb", buffering=0) as file:
                for item in items:
                    sizes, dtype = self._chunks[_key(item)]
                    if _key(item) not in self._starts:
                        start = self._data_start(file, item, math.prod(sizes) * dtype.itemsize)
                        self._starts[_key(item)] = start
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read what the plan asks for, straight into its place where that is possible.

        DCP's own way makes a new tensor of every block, and takes several times as long.
        """
        for name, wanted in self._by_file(plan).items():
            with (self._folder / name).open("rb", buffering=0) as file:
                for item in wanted:
                    target = planner.resolve_tensor(item).detach()
                    self._read(file, item, target)
                    planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        """The items of a plan in the order in which they lie."""
        items = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        by_file: dict[str, list[ReadItem]] = {}
        for item in items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        return by_file

    def _read(self, file: FileIO, item: ReadItem, target: Tensor) -> None:
        """Read a box of a saved block into `target`, which has the box's shape."""
        sizes, dtype = self._chunks[_key(item)]
        shape = tuple(sizes) or (1,)
        first, count = tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        file.seek(self._starts[_key(item)] + first[0] * row_bytes)
        rows = shape[1:] == count[1:]
        if rows and target.dtype == dtype and target.is_contiguous() and target.is_cpu:
            _fill(file, target.reshape(-1).view(torch.uint8))
            return
        size = count[0] * row_bytes
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu")
        _fill(file, self._staging[:size])
        block = self._staging[:size].view(dtype).view(count[0], *shape[1:])
        for dim in range(1, len(shape)):
            block = block.narrow(dim, first[dim], count[dim])
        target.copy_(block.reshape(target.shape))

    def _data_start(self, file: FileIO, item: ReadItem, size: int) -> int:
        """Where in the file the numbers of a block begin: torch.save writes a zip, uncompressed."""
        place, name = self.storage_data[item.storage_index], item.storage_index.fqn
        try:
            with ZipFile(io.BufferedReader(_Part(file, place.offset, place.length))) as archive:
                data = next(e for e in archive.infolist() if e.filename.endswith("/data/0"))
            file.seek(place.offset + data.header_offset)
            name_length, extra_length = struct.unpack("<26xHH", file.read(30))
        except Exception as error:  # damage can end in any of them
            raise CheckpointError(
                f"{self._folder}: no block of {name} lies at {place.offset} in"
                f" {place.relative_path} ({type(error).__name__}: {error})"
            ) from None
        before = data.header_offset + 30 + name_length + extra_length
        if data.compress_type != ZIP_STORED or data.file_size != size:
            raise CheckpointError(f"{self._folder}: {name} has {data.file_size} bytes, not {size}")
        if before + size > place.length:
            raise CheckpointError(f"{self._folder}: a block of {name} ends too early")
        return int(place.offset + before)


def _key(item: ReadItem) -> tuple[str, torch.Size]:
    """Of the saved block that an item reads from."""
    saved = item.storage_index
    assert saved.offset is not None
    return saved.fqn, saved.offset


class _Part(io.RawIOBase):
    """`length` bytes of a file from `start` on, as a file of their own."""

    def __init__(self, file: FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = self._file.readinto(view)
        self._at += count
        return count


def _fill(file: FileIO, target: Tensor) -> None:
    """Fill the bytes [n] uint8 of `target` from where `file` stands."""
    view = memoryview(target.numpy().data)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise EOFError(f"{file.name} ends too early")
        view = view[count:]


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
        with super().create_stream(path, mode) as raw, closing(_RecordingStream(raw)) as stream:
            yield cast(io.IOBase, stream)
        self.files[Path(path).name] = FileRecord(stream.size, stream.checksum)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _RecordingStream:
    """A file that is only appended to, and goes to disk while it is written.

    Without the second the disk would idle until the end, and then all would wait for it.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._thread = ThreadPoolExecutor(1, "sync")
        self._sync: Future[None] | None = None
        self._waiting = 0
        self.size = self.checksum = 0

    def write(self, data: bytes) -> int:
        written: int = self._raw.write(data)
        self.size += written
        self._waiting += written
        if self._waiting >= _SYNC_BYTES and (self._sync is None or self._sync.done()):
            self._wait()
            self._raw.flush()
            self._sync = self._thread.submit(os.fdatasync, self.fileno())
            self._waiting = 0
        self.checksum = zlib.crc32(data, self.checksum)
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def close(self) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._raw.close()

    def _wait(self) -> None:
        """Until what was begun is on disk. The system tells of a failed write only once."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.result()
