"""The data files: checksums taken while they are written, and an index that cannot run code."""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
)

from shardmuon.checkpoint import Checkpointer, CheckpointError, publish
from shardmuon.checkpoint.storage import INDEX, Reader, Writer
from tests import models


def save(root: Path, step: int = 2) -> Path:
    """A checkpoint of a model and an optimizer that has taken a step."""
    model = models.make()
    optimizer = models.optimizer_of(model)
    models.spread_gradients(model, 0)
    optimizer.step()
    with closing(Checkpointer(root)) as checkpoints:
        return checkpoints.save(step, model, optimizer)


def load(path: Path) -> nn.Module:
    model = models.make(1)
    with closing(Checkpointer(path.parent)) as checkpoints:
        checkpoints.load(path, model)
    return model


def reader(path: Path) -> Reader:
    return Reader(path, publish.read_manifest(path)["files"])


def reseal(path: Path) -> None:
    """Give the checkpoint the checksums of the files as they are now, as a forger would."""
    manifest = json.loads((path / publish.MANIFEST).read_text())
    del manifest["checksum"]
    for name in manifest["files"]:
        manifest["files"][name] = vars(publish.record_of(path / name))
    body = json.dumps(manifest, sort_keys=True)
    sealed = {**manifest, "checksum": zlib.crc32(body.encode())}
    (path / publish.MANIFEST).write_text(json.dumps(sealed))


def forge(path: Path, index: object) -> None:
    """Replace the index by a pickle of something else, with checksums that are right."""
    content = index if isinstance(index, bytes) else pickle.dumps(index)
    (path / INDEX).write_bytes(content)
    reseal(path)


class Planted:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls `module.name`, where `name` may have dots, with one string."""
    text = b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(s.encode())]) + s.encode() for s in (module, name)
    )
    call = pickle.STACK_GLOBAL + pickle.UNICODE + argument.encode() + b"\n" + pickle.TUPLE1
    return pickle.PROTO + b"\x04" + text + call + pickle.REDUCE + pickle.STOP


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "system": (lambda marker: Planted(os.system, f"touch {marker}"), "posix.system"),
    "eval": (lambda marker: Planted(eval, f"open({str(marker)!r}, 'w').close()"), "builtins.eval"),
    "mkdir": (lambda marker: Planted(os.mkdir, str(marker)), "posix.mkdir"),
    "torch function": (lambda marker: Planted(torch.save, 1, str(marker)), "torch.serialization"),
    "other class": (lambda marker: marker, "pathlib"),
    "dotted": (
        lambda marker: by_name("torch.serialization", "os.system", f"touch {marker}"),
        r"torch\.serialization\.os\.system",
    ),
    "dotted dtype": (
        lambda marker: by_name("torch", "float32.__class__", "x"),
        r"torch\.float32\.__class__",
    ),
    "getattr": (lambda marker: Planted(getattr, Metadata, "__init__"), "__init__ of"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_index_is_refused_by_name_and_does_not_run(tmp_path: Path, name: str) -> None:
    path, marker = save(tmp_path / "root"), tmp_path / "marker"
    make, named = PLANTED[name]
    forge(path, make(marker))
    with pytest.raises(CheckpointError, match=named):
        reader(path).read_metadata()
    with pytest.raises(CheckpointError, match=named):
        load(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["system", "eval", "mkdir", "torch function", "dotted"])
def test_the_planted_ones_would_run_elsewhere(tmp_path: Path, name: str) -> None:
    planted = PLANTED[name][0](tmp_path / "marker")
    pickle.loads(planted if isinstance(planted, bytes) else pickle.dumps(planted))
    assert (tmp_path / "marker").exists()


def test_it_does_not_run_inside_of_a_sound_index_either(tmp_path: Path) -> None:
    path, marker = save(tmp_path / "root"), tmp_path / "marker"
    metadata = reader(path).read_metadata()
    metadata.planner_data = Planted(os.system, f"touch {marker}")
    forge(path, metadata)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        load(path)
    assert not marker.exists()


def test_other_objects_than_an_index_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    for wrong in (None, {"model.x": 1}, StorageMeta()):
        forge(path, wrong)
        with pytest.raises(CheckpointError, match="does not hold DCP's metadata"):
            load(path)


def test_items_must_be_tensors(tmp_path: Path) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    key = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[key] = StorageMeta()  # type: ignore[assignment]
    forge(path, metadata)
    with pytest.raises(CheckpointError, match=f"{key} is not a tensor"):
        load(path)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    forge(path, metadata)
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, which no checkpoint needs"):
        load(path)


@pytest.mark.parametrize("target", ["../evil", "{tmp}/evil", "step_00000002/../evil", "other"])
def test_the_index_leads_only_to_files_of_the_manifest(tmp_path: Path, target: str) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    place = next(iter(metadata.storage_data.values()))
    for copy in (path.parent / "evil", path / "other"):
        copy.write_bytes((path / place.relative_path).read_bytes())
    place.relative_path = target.format(tmp=tmp_path)
    forge(path, metadata)
    with pytest.raises(CheckpointError, match="not among the checkpoint's files"):
        load(path)


@pytest.mark.parametrize("wrong", [["x"], 1])
def test_places_of_another_kind_are_refused(tmp_path: Path, wrong: object) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = wrong
    forge(path, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read|the index leads to"):
        load(path)
    metadata.storage_data = {"model": 1}
    forge(path, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        load(path)


def test_transformed_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    forge(path, metadata)
    with pytest.raises(CheckpointError, match="transformed files are not supported"):
        load(path)


def test_a_truncated_index_is_one_clear_error(tmp_path: Path) -> None:
    """Cut anywhere, whatever the checksums say."""
    path = save(tmp_path)
    sound, look = (path / INDEX).read_bytes(), reader(path)
    for length in range(0, len(sound), 41):
        (path / INDEX).write_bytes(sound[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            look.read_metadata()
    forge(path, sound[: len(sound) // 2])
    with pytest.raises(CheckpointError, match=r"rank 0: .*\.metadata cannot be read"):
        load(path)


def test_a_flipped_bit_in_the_index_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path)
    sound = (path / INDEX).read_bytes()
    for position in (0, len(sound) // 3, len(sound) - 1):
        flipped = bytearray(sound)
        flipped[position] ^= 4
        (path / INDEX).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"\.metadata does not have the content"):
            load(path)


def test_a_missing_index_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path)
    look = reader(path)
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        load(path)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        look.index()


def test_checksums_taken_while_writing_are_those_of_the_files(tmp_path: Path) -> None:
    path = save(tmp_path)
    files = publish.read_manifest(path)["files"]
    assert sorted(files) == sorted(p.name for p in path.iterdir() if p.name != publish.MANIFEST)
    for name, record in files.items():
        content = (path / name).read_bytes()
        assert record == publish.FileRecord(len(content), zlib.crc32(content)), name
    with patch.object(publish, "_CHUNK_BYTES", 100):
        assert publish.first_damaged(path, files, files) is None


def test_writes_of_every_kind_are_counted(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with writer.fs.create_stream(tmp_path / "a", "wb") as stream:
        for piece in (b"abc", bytearray(b"de"), memoryview(b"fghi"), memoryview(b"").cast("I")):
            stream.write(piece)
        stream.write(memoryview(b"12345678").cast("I"))  # items of four bytes
        assert stream.tell() == 17
        stream.flush()
    writer.fs.rename(tmp_path / "a", tmp_path / "b")
    assert writer.files == {"b": publish.record_of(tmp_path / "b")}
    assert (tmp_path / "b").read_bytes() == b"abcdefghi12345678"


def test_a_checkpoint_does_not_say_where_and_when_it_was_written(tmp_path: Path) -> None:
    """So that equal states give equal files."""
    one, other = save(tmp_path / "one"), save(tmp_path / "other", step=3)
    assert publish.read_manifest(one)["files"] == publish.read_manifest(other)["files"]
    metadata = pickle.load(io.BytesIO((one / INDEX).read_bytes()))
    assert metadata.storage_meta == StorageMeta()
    for path in one.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_an_index_by_a_python_that_pickles_enums_by_name(tmp_path: Path) -> None:
    """3.11.2 and its neighbours pickle an enum's member as a call of getattr."""

    def by_getattr(self: Any, protocol: object) -> tuple[Any, ...]:
        return getattr, (type(self), self.name)

    with patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_getattr):
        path = save(tmp_path)
    assert b"getattr" in (path / INDEX).read_bytes()
    loaded, model = load(path), models.make()
    assert not any(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )
    properties = next(iter(reader(path).index().values())).properties
    assert properties.memory_format == torch.contiguous_format
