"""Any manifest and any index of a checkpoint: CheckpointError or ConfigError, or taken whole.

Checksums are made right again, as a forger would, so that what is behind them is tried. What is
refused must leave model, optimizer and random numbers as they were; what is taken must train.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import resource
import warnings
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardmuon.checkpoint import Checkpointer, CheckpointError, export_checkpoint, publish
from shardmuon.checkpoint.storage import INDEX
from shardmuon.training import resume
from shardmuon.training.config import Checkpointing, Config, Logging
from shardmuon.training.load import ConfigError
from tests import models
from tests.fuzz.inputs import (
    JSON,
    LIMIT_S,
    attempt,
    bits,
    fuzz,
    mutated,
    scribbled,
    snapshot,
    take_a_step,
)

pytestmark = pytest.mark.timeout(LIMIT_S)

STEP = 2
SPARE_BYTES = 1 << 32


def _pair(seed: int) -> tuple[models.Net, Any]:
    model = models.make(seed)
    return model, models.optimizer_of(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as train.py writes it, of a model that has taken a step."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    model, optimizer = _pair(0)
    take_a_step(optimizer)
    extra = resume.extra(_config(root), None, "files", {"muon.0": 0.1}, STEP)
    with closing(Checkpointer(root)) as checkpoints:
        return checkpoints.save(STEP, model, optimizer, extra)


def _config(root: Path, wanted: str = "auto") -> Config:
    return Config(
        logging=Logging(directory=str(root.parent)), checkpoint=Checkpointing(resume=wanted)
    )


@cache
def _sound(path: Path) -> tuple[dict[str, Any], bytes, Any]:
    """(manifest, index as bytes, index as a record) before anything was changed."""
    content = (path / INDEX).read_bytes()
    manifest = json.loads((path / publish.MANIFEST).read_text())
    return manifest, content, pickle.load(io.BytesIO(content))


def _write(path: Path, manifest: Any, index: bytes) -> None:
    """Put them in place with sizes and checksums that are right, as far as there are any."""
    (path / INDEX).write_bytes(index)
    if isinstance(manifest, dict):
        manifest = json.loads(json.dumps(manifest))  # keys are text from here on
        manifest.pop("checksum", None)
        files = manifest.get("files")
        if isinstance(files, dict) and INDEX in files:
            files[INDEX] = vars(publish.record_of(path / INDEX))
        body = json.dumps(manifest, sort_keys=True)
        manifest["checksum"] = zlib.crc32(body.encode())
    (path / publish.MANIFEST).write_text(json.dumps(manifest))


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """A pickle may ask for any amount; it is to fail here and not in the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _use(kind: str, path: Path) -> None:
    """Resume, look and load; compare, or train."""
    root = path.parent
    for wanted in ("auto", str(path)):
        attempt(
            f"{kind}: resume",
            lambda wanted=wanted: resume.resolve(_config(root, wanted), "files", 1),  # type: ignore[misc]
            ConfigError,
            CheckpointError,
        )
    model, optimizer = _pair(1)
    before = snapshot(optimizer), [bits(p) for p in model.parameters()], torch.get_rng_state()
    with warnings.catch_warnings(), closing(Checkpointer(root)) as checkpoints:
        warnings.simplefilter("ignore")
        checkpoints.newest()
        with _bounded_memory():
            taken = attempt(
                f"{kind}: load", lambda: checkpoints.load(path, model, optimizer), CheckpointError
            )
        if not taken:
            after = snapshot(optimizer), [bits(p) for p in model.parameters()]
            assert after == before[:2]
            assert torch.equal(torch.get_rng_state(), before[2])
        take_a_step(optimizer)


NEAR = st.sampled_from(
    [
        {"dtype": "load"},
        {"dtype": "float32"},
        {"tuple": [0.9, 2]},
        {"tuple": 3},
        "adamw",
        "blocks.0.up.weight",
        "AAAA",
        {"cpu": "AAAA"},
        {"0": {"cpu": "?"}},
        -1,
        0.5,
        "../x",
        {"size": -1, "crc32": 0},
    ]
)


@fuzz(few=60, share=0.06)
@given(st.data())
def test_manifests(saved: Path, data: st.DataObject) -> None:
    manifest, index, _ = _sound(saved)
    part = data.draw(st.sampled_from([None, "groups", "groups", "random", "files", "config"]))
    junk = st.one_of(JSON, NEAR)
    if part is None:
        changed = data.draw(mutated(manifest, junk))
    else:
        changed = {**manifest, part: data.draw(mutated(manifest[part], junk))}
    _write(saved, copy.deepcopy(changed), index)
    _use("manifests", saved)


@fuzz(few=20, share=0.02)
@given(st.data())
def test_manifests_as_text(saved: Path, data: st.DataObject) -> None:
    manifest, index, _ = _sound(saved)
    _write(saved, copy.deepcopy(manifest), index)
    content = (saved / publish.MANIFEST).read_bytes()
    tokens = (b"{", b"}", b"[" * 3000, b'"', b"1e999", b"-1", b"NaN", b"9" * 5000, b"\xff", b"\0")
    (saved / publish.MANIFEST).write_bytes(data.draw(scribbled(content, tokens)))
    _use("manifests as text", saved)


SIZES = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 8, 18, 2**40, -1, 2**62]), max_size=3).map(torch.Size),
    st.sampled_from([torch.Size([18, 8]), torch.Size([8, 18]), torch.Size([9, 8])]),
)
RECORDS = st.one_of(
    SIZES,
    SIZES,
    st.builds(ChunkStorageMetadata, SIZES, SIZES),
    st.builds(MetadataIndex, st.sampled_from(["model.x", "x"]), SIZES),
    st.builds(
        _StorageInfo,
        st.sampled_from(["__0_0.distcp", INDEX, "../x", "/x", ""]),
        st.sampled_from([0, 1, -1, 10**6, 2**62, 0.5]),
        st.sampled_from([0, 1, 1500, 2**62]),
    ),
    st.sampled_from([torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]),
    st.builds(StorageMeta),
    st.builds(lambda: TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])),
    st.sampled_from([0, 1, -1, 7, 512, 2**40, "__0_0.distcp", "../x"]),
    JSON,
)


@fuzz(few=60, share=0.06)
@given(st.data())
def test_indexes(saved: Path, data: st.DataObject) -> None:
    manifest, _, record = _sound(saved)
    part = data.draw(st.sampled_from([None, "state_dict_metadata", "storage_data"]))
    if part is None:
        changed = data.draw(mutated(record, RECORDS))
    else:
        changed = copy.copy(record)
        setattr(changed, part, data.draw(mutated(getattr(record, part), RECORDS)))
    try:
        content = pickle.dumps(changed)
    except Exception:  # what cannot be written is no file
        return
    _write(saved, copy.deepcopy(manifest), content)
    _use("indexes", saved)


@fuzz(few=60, share=0.06)
@given(st.data())
def test_indexes_as_bytes(saved: Path, data: st.DataObject) -> None:
    manifest, index, _ = _sound(saved)
    tokens = (b"R", b".", b"0", b"N", b"h\x01", b"(", b"K\x09", b"\x8f", b"\x93", b"}", b"]")
    _write(saved, copy.deepcopy(manifest), data.draw(scribbled(index, tokens)))
    _use("indexes as bytes", saved)


def test_what_was_not_mutated_is_taken_and_exported(saved: Path, tmp_path: Path) -> None:
    manifest, index, record = _sound(saved)
    assert isinstance(record, Metadata)
    _write(saved, copy.deepcopy(manifest), index)
    assert resume.resolve(_config(saved.parent), "files", 1).step == STEP
    model, optimizer = _pair(1)
    with closing(Checkpointer(saved.parent)) as checkpoints:
        checkpoints.load(saved, model, optimizer)
    export_checkpoint(saved, tmp_path / "exported")
