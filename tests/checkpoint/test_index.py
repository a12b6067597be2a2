"""Manifests and indexes that were made up, with right checksums, are refused; nothing changes."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from shardmuon.checkpoint import Checkpointer, CheckpointError, publish
from shardmuon.training import resume
from shardmuon.training.config import Checkpointing, Config, Logging
from shardmuon.training.load import ConfigError
from tests import models
from tests.checkpoint.test_storage import forge, reader, reseal, save
from tests.fuzz.inputs import snapshot

KEY = "model.blocks.0.up.weight"  # [18, 8]


def refused(path: Path) -> str:
    """What `load` says; model, optimizer and random numbers must stay."""
    model = models.make(1)
    optimizer = models.optimizer_of(model)
    before = snapshot(optimizer), torch.get_rng_state().tolist()
    with closing(Checkpointer(path.parent)) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.load(path, model, optimizer)
    assert (snapshot(optimizer), torch.get_rng_state().tolist()) == before
    return str(error.value)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


BLOCKS: dict[str, list[ChunkStorageMetadata]] = {
    "none": [],
    "too few": [chunk((0, 0), (9, 8))],
    "one twice": [chunk((0, 0), (9, 8)), chunk((0, 0), (9, 8))],
    "overlap by rows": [chunk((0, 0), (9, 8)), chunk((8, 0), (9, 8))],
    "overlap by columns": [chunk((0, 0), (18, 4)), chunk((0, 3), (18, 4))],
    "hole and overlap": [
        chunk((0, 0), (9, 4)),
        chunk((0, 4), (9, 4)),
        chunk((9, 0), (9, 4)),
        chunk((8, 4), (9, 4)),
    ],
    "outside": [chunk((9, 0), (18, 8))],
    "before": [chunk((-1, 0), (18, 8))],
    "other dims": [chunk((0,), (144,))],
}


@pytest.mark.parametrize("chunks", BLOCKS.values(), ids=list(BLOCKS))
def test_blocks_must_cover_a_tensor_once(
    tmp_path: Path, chunks: list[ChunkStorageMetadata]
) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    metadata.state_dict_metadata[KEY].chunks = chunks  # type: ignore[union-attr]
    forge(path, metadata)
    assert f"the blocks of {KEY} do not make up (18, 8)" in refused(path)


def test_blocks_that_cover_it_once_are_taken_in_any_order(tmp_path: Path) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    tensor = metadata.state_dict_metadata[KEY]
    tensor.chunks = [chunk((9, 0), (9, 8)), chunk((0, 4), (9, 4)), chunk((0, 0), (9, 4))]  # type: ignore[union-attr]
    place = metadata.storage_data.pop(MetadataIndex(KEY, torch.Size((0, 0))))
    for each in tensor.chunks:  # type: ignore[union-attr]
        metadata.storage_data[MetadataIndex(KEY, each.offsets)] = place
    forge(path, metadata)
    assert KEY in reader(path).index()
    # The bytes there are those of the whole tensor, which no block has.
    assert f"{KEY} has 576 bytes, not 144" in refused(path)


def _edit_place(metadata: Metadata, **values: Any) -> None:
    vars(metadata.storage_data[MetadataIndex(KEY, torch.Size((0, 0)))]).update(values)


def _drop_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex(KEY, torch.Size((0, 0)))]


def _set_dtype(metadata: Metadata, dtype: Any) -> None:
    metadata.state_dict_metadata[KEY].properties.dtype = dtype  # type: ignore[union-attr]


PLACES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "none": (_drop_place, f"no place for a block of {KEY}"),
    "before the file": (lambda m: _edit_place(m, offset=-1), "from -1 on"),
    "behind the file": (lambda m: _edit_place(m, offset=2**62), f"from {2**62} on"),
    "too long": (lambda m: _edit_place(m, length=10**9), "for 1000000000 bytes"),
    "too short": (lambda m: _edit_place(m, length=575), "a block of 576 bytes"),
    "no number": (lambda m: _edit_place(m, offset=0.5), "from 0.5 on"),
    "elsewhere": (lambda m: _edit_place(m, length=600), f"no block of {KEY} lies at"),
    "no dtype": (lambda m: _set_dtype(m, "float32"), f"{KEY} has no dtype"),
    "complex": (lambda m: _set_dtype(m, torch.complex32), "which cannot become torch.float32"),
}


@pytest.mark.parametrize(("edit", "message"), PLACES.values(), ids=list(PLACES))
def test_blocks_must_lie_in_the_files(
    tmp_path: Path, edit: Callable[[Metadata], None], message: str
) -> None:
    path = save(tmp_path)
    metadata = reader(path).read_metadata()
    edit(metadata)
    forge(path, metadata)
    assert message in refused(path)


def test_a_block_must_end_before_its_place_does(tmp_path: Path) -> None:
    """The directory of a zip may lead to another part of it."""
    path = save(tmp_path)
    place = reader(path).read_metadata().storage_data[MetadataIndex(KEY, torch.Size((0, 0)))]
    file = path / place.relative_path
    content = bytearray(file.read_bytes())
    block = bytes(content[place.offset : place.offset + place.length])
    at = next(
        start
        for start in (n for n in range(len(block)) if block.startswith(b"PK\x01\x02", n))
        if block[start + 46 :].startswith(b"archive/data/0") or b"/data/0" in block[start:][:80]
    )
    struct.pack_into("<I", content, place.offset + at + 42, place.length - 60)
    file.write_bytes(content)
    reseal(path)
    assert f"block of {KEY}" in refused(path)


# -- manifests ------------------------------------------------------------------------------------


def rewrite(path: Path, **parts: Any) -> None:
    """Change parts of the manifest; None takes one out."""
    manifest = json.loads((path / publish.MANIFEST).read_text())
    manifest = {k: v for k, v in {**manifest, **parts}.items() if v is not None}
    del manifest["checksum"]
    body = json.dumps(manifest, sort_keys=True)
    sealed = {**manifest, "checksum": zlib.crc32(body.encode())}
    (path / publish.MANIFEST).write_text(json.dumps(sealed))


MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"step": None}, r"has step=None, expected a whole number in \[0, "),
    "negative step": ({"step": -1}, "has step=-1"),
    "huge step": ({"step": 10**40}, "has step=1000"),
    "text": ({"world_size": "2"}, "has world_size='2'"),
    "no ranks": ({"world_size": 0}, "has world_size=0"),
    "no groups": ({"groups": None}, "has groups=None, expected a list of groups"),
    "group": ({"groups": [{"params": "x", "settings": {}}]}, "has groups="),
    "settings": ({"groups": [{"params": [], "settings": 3}]}, "has groups="),
    "aliases": ({"aliases": {"a": 1}}, "has aliases="),
    "random": ({"random": {"0": ["cpu"]}}, "has random="),
}


@pytest.mark.parametrize(("parts", "message"), MANIFESTS.values(), ids=list(MANIFESTS))
def test_a_manifest_of_another_form_is_refused_and_passed_over(
    tmp_path: Path, parts: dict[str, Any], message: str
) -> None:
    root = tmp_path / "checkpoints"
    older, path = save(root, 2), save(root, 4)
    rewrite(path, **parts)
    assert re.search(message, refused(path))
    with closing(Checkpointer(root)) as checkpoints:
        found = checkpoints.newest()
    assert found.path == older
    assert re.search(message, found.skipped[0])
    config = Config(
        logging=Logging(directory=str(tmp_path)), checkpoint=Checkpointing(resume=str(path))
    )
    with pytest.raises(CheckpointError, match=message):
        resume.resolve(config, "files", 1)


@pytest.mark.parametrize("parts", [{"config": [1], "data": {}}, {"config": {}, "data": 3}])
def test_a_manifest_without_a_run_is_not_resumed(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = save(tmp_path)
    rewrite(path, **parts)
    with pytest.raises(ConfigError, match=r"was not written by train\.py"):
        resume.at(path, Config(), "files", 1)


@pytest.mark.parametrize("text", ["?", "AAAA", ""])
def test_random_numbers_are_looked_at_before_anything_changes(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    rewrite(path, random={"0": {"cpu": text}})
    assert "it has no state of random numbers" in refused(path)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "range": ({"lr": -1}, "lr must be a number in"),
    "kind": ({"nesterov": "yes"}, "nesterov must be a bool, got 'yes'"),
    "function": ({"ns_dtype": {"dtype": "load"}}, "{'dtype': 'load'} is no group setting"),
    "nothing": ({"ns_dtype": {}}, "{} is no group setting"),
    "other key": ({"betas": {"tuple": [0.9, 0.9]}}, "betas does not belong to algorithm 'muon'"),
    "list": ({"eps": {"tuple": 3}}, "{'tuple': 3} is no group setting"),
}


@pytest.mark.parametrize(("keys", "message"), SETTINGS.values(), ids=list(SETTINGS))
def test_settings_of_a_manifest_are_those_that_a_group_can_have(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = save(tmp_path)
    groups = json.loads((path / publish.MANIFEST).read_text())["groups"]
    for group in groups:
        if group["settings"]["algorithm"] == "muon":
            group["settings"].update(keys)
    rewrite(path, groups=groups)
    assert message in refused(path)


def test_other_optimizers_keep_their_numbers(tmp_path: Path) -> None:
    model = models.make()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.5)
    with closing(Checkpointer(tmp_path)) as checkpoints:
        path = checkpoints.save(1, model, adamw)
        groups = json.loads((path / publish.MANIFEST).read_text())["groups"]
        groups[0]["settings"]["lr"] = "0.1"
    rewrite(path, groups=groups)
    message = r"lr must be a number, got '0\.1'"
    with (
        closing(Checkpointer(tmp_path)) as checkpoints,
        pytest.raises(CheckpointError, match=message),
    ):
        checkpoints.load(path, model, adamw)
    assert adamw.param_groups[0]["lr"] == 0.5


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    for name in ("\ud800", "a\0b", "../x"):
        path = save(tmp_path)
        rewrite(path, files={name: {"size": 1, "crc32": 1}})
        with pytest.raises(CheckpointError, match="names a file outside"):
            publish.read_manifest(path)
    rewrite(path, files={"x": {"size": "1", "crc32": 1}})
    with pytest.raises(CheckpointError, match="lists no files"):
        publish.read_manifest(path)
    (path / publish.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        publish.read_manifest(path)
