"""Plan sources from .safetensors files: no more than headers is read, and rules go by name."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

from shardmuon.tools import sources
from shardmuon.tools.sources import INDEX, read_source
from shardmuon.training.config import Model
from shardmuon.training.model import CausalLM, build
from tests.tools.listed import (
    ADAMW,
    MUON,
    SMALL,
    TERABYTE,
    TRANSPOSED,
    header,
    no_network,  # noqa: F401  (a fixture that acts by itself)
    refusal,
    routed,
    rows,
    rules,
    write,
)

# --- safetensors: what is read ----------------------------------------------------------------


def save(path: Path, model: nn.Module) -> Path:
    save_file({name: p.detach() for name, p in model.named_parameters()}, path)
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_our_own_model_from_its_file(tmp_path: Path, tied: bool) -> None:
    model = CausalLM(Model(vocab_size=300, dim=32, layers=2, heads=4, hidden=48, tied_head=tied))
    path = save(tmp_path / "weights.safetensors", model)
    found = rows(read_source(str(path)))
    assert found == routed(model)
    assert ("lm_head.weight" in found) is not tied


def test_names_of_wrappers_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {"_orig_mod.layers.0.up.weight": (4, 8)})
    assert rows(read_source(str(path))) == {"layers.0.up.weight": ((4, 8), MUON)}


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"layers.{number}.up.weight" for number in (10, 9, 2, 0, 11)]
    path = write(tmp_path / "w.safetensors", dict.fromkeys(names, (4, 8)))
    found = [each.name for each in read_source(str(path)).parameters]
    assert found == [f"layers.{number}.up.weight" for number in (0, 2, 9, 10, 11)]


class Counting(io.FileIO):
    """A file that counts the bytes that leave it, whatever is read through it."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        raw = super().read(-1 if size is None else size)
        assert raw is not None
        Counting.count += len(raw)
        return raw

    def readall(self) -> bytes:
        raw = super().readall()
        assert raw is not None
        Counting.count += len(raw)
        return raw

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        assert count is not None
        Counting.count += count
        return count


def counting_open(path: Path, mode: str, buffering: int = -1) -> io.FileIO | io.BufferedReader:
    """As the builtin: buffered unless told otherwise."""
    assert mode == "rb"
    return Counting(path) if buffering == 0 else io.BufferedReader(Counting(path))


def test_no_more_than_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"layers.{i}.up.weight": (2**18, 2**18) for i in range(4)}
    path = write(tmp_path / "huge.safetensors", shapes)
    size = path.stat().st_size
    os.truncate(path, TERABYTE)  # the rest is a hole
    monkeypatch.setattr(sources, "open", counting_open, raising=False)
    monkeypatch.setattr(Counting, "count", 0)
    source = read_source(str(path))
    assert {each.name: each.shape for each in source.parameters} == shapes
    assert Counting.count == size


def test_missing_data_is_not_missed(tmp_path: Path) -> None:
    model = build(SMALL, 0)
    path = save(tmp_path / "model.safetensors", model)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size > 8 + length
    os.truncate(path, 8 + length)
    assert rows(read_source(str(path))) == routed(model)
    os.truncate(path, 8 + length - 1)
    assert f"a header of {length} bytes, where {length - 1} follow" in refusal(path)


ENTRY = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
BROKEN = {
    "empty": (b"", "a header of 0 bytes"),
    "short length": (b"\x10\x00", "where 0 follow"),
    "length 0": (bytes(8) + b"{}", "a header of 0 bytes"),
    "length beyond the file": ((100).to_bytes(8, "little") + b"{}", "where 2 follow"),
    "another kind of file": (b"PK\x03\x04 an archive of a kind", "not a safetensors file"),
    "no JSON": (header({})[:8] + b"{[", "the header is not valid JSON"),
    "no text": (header({})[:8] + b"\xff\xfe", "the header is not valid JSON"),
    "deep": ((10**5).to_bytes(8, "little") + b"[" * 10**5, "the header is not valid JSON"),
    "list": ((2).to_bytes(8, "little") + b"[]", "the header is not a JSON object"),
    "no entry": (header({"a.weight": [4, 8]}), "a.weight: the header gives no dtype and shape"),
    "no shape": (header({"a.weight": {"dtype": "F32"}}), "a.weight: the header gives no"),
    "no dtype": (header({"a.weight": {"shape": [1]}}), "a.weight: the header gives no"),
    "negative": (header({"a.weight": ENTRY | {"shape": [4, -8]}}), "a.weight: the header gives no"),
    "true": (header({"a.weight": ENTRY | {"shape": [4, True]}}), "a.weight: the header gives no"),
    "fraction": (header({"a.weight": ENTRY | {"shape": [4, 8.0]}}), "a.weight: the header gives"),
    "metadata alone": (header({"__metadata__": {"format": "pt"}}), "no parameters"),
    "vectors alone": (header({"norm.weight": ENTRY | {"shape": [4]}}), "no parameter takes Muon"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers(tmp_path: Path, case: tuple[bytes, str]) -> None:
    content, part = case
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    assert part in refusal(path)


def test_an_absurd_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes((sources.HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, TERABYTE)
    assert f"at most {sources.HEADER_BYTES} are allowed" in refusal(path)


# --- safetensors: folders ---------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def indexed(folder: Path, **changes: str) -> Path:
    """A folder with two files and an index; `changes` puts a name into another file."""
    write(folder / FIRST, {"a.up.weight": (4, 8), "a.norm.weight": (8,)})
    write(folder / SECOND, {"a.down.weight": (8, 4)})
    places = {"a.up.weight": FIRST, "a.norm.weight": FIRST, "a.down.weight": SECOND}
    places |= {name.replace("_", "."): file for name, file in changes.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


TWO_FILES = {
    "a.up.weight": ((4, 8), MUON),
    "a.norm.weight": ((8,), ADAMW),
    "a.down.weight": ((8, 4), MUON),
}


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not a header")
    (tmp_path / "config.json").write_text("not JSON")
    assert rows(read_source(str(tmp_path))) == TWO_FILES


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (SECOND, f"puts a.up.weight into {SECOND}, which lacks it"),
        ("other.safetensors", "names other.safetensors, which is not there"),
        ("../other.safetensors", "expected a file's name"),
        ("", "which is not there"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tmp_path: Path, file: str, part: str) -> None:
    assert part in refusal(indexed(tmp_path, a_up_weight=file))


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[]", "no"])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "model.safetensors", {"a.up.weight": (4, 8)})
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / INDEX).unlink()
    assert rows(read_source(str(tmp_path))) == TWO_FILES
    write(tmp_path / "again.safetensors", {"a.up.weight": (4, 8)})
    assert "a.up.weight is in two files" in refusal(tmp_path)
    (tmp_path / "again.safetensors").write_bytes(b"short")
    assert f"{tmp_path}: again.safetensors: not a safetensors file" in refusal(tmp_path)


def test_the_whole_model_comes_before_other_files(tmp_path: Path) -> None:
    write(tmp_path / "adapter.safetensors", {"a.up.weight": (2, 8)})
    write(tmp_path / "model.safetensors", {"a.up.weight": (4, 8)})
    assert rows(read_source(str(tmp_path))) == {"a.up.weight": ((4, 8), MUON)}


# --- rules by name ----------------------------------------------------------------------------


NAMED: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("model.layers.0.self_attn.q_proj.weight", (8, 8), MUON),
    ("model.layers.0.self_attn.q_proj.bias", (8,), ADAMW),
    ("model.layers.0.input_layernorm.weight", (8,), ADAMW),
    ("model.embed_tokens.weight", (50, 8), ADAMW),
    ("bert.embeddings.token_type_embeddings.weight", (2, 8), ADAMW),
    ("vit.embeddings.position_embeddings", (1, 5, 8), ADAMW),
    ("tok_embeddings.weight", (50, 8), ADAMW),
    ("transformer.wpe.weight", (50, 8), ADAMW),
    ("embeddings_project.weight", (8, 4), MUON),
    ("lm_head.weight", (50, 8), ADAMW),
    ("output.weight", (50, 8), ADAMW),
    ("encoder.layer.0.attention.output.dense.weight", (8, 8), MUON),
    ("model.layers.0.mlp.gate.weight", (4, 8), ADAMW),
    ("model.layers.0.mlp.router.weight", (4, 8), ADAMW),
    ("model.layers.0.mlp.gate_proj.weight", (12, 8), MUON),
    ("model.layers.0.mlp.experts.7.up_proj.weight", (12, 8), MUON),
    ("model.layers.0.block_sparse_moe.experts.0.w1.weight", (12, 8), MUON),
    ("model.layers.0.mlp.experts.up_proj", (4, 12, 8), MUON),
    ("model.layers.0.mlp.experts.up_proj_bias", (4, 12), ADAMW),
    ("model.layers.0.mixer.A_log", (16, 4), ADAMW),
    ("model.layers.0.mixer.conv1d.weight", (16, 1, 4), ADAMW),
    ("visual.patch_embed.proj.weight", (8, 3, 2, 2), ADAMW),
    ("scale", (), ADAMW),
]


def test_rules_by_name_and_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {name: shape for name, shape, _ in NAMED})
    source = read_source(str(path))
    assert source.title == f"{path} (rules by name)"
    assert rows(source) == {name: (shape, keys) for name, shape, keys in NAMED}


def stored(tmp_path: Path, **weights: tuple[tuple[int, ...], int | None]) -> dict[str, bool]:
    """Linear layers with biases of the given lengths: which of them are transposed."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (shape, length) in weights.items():
        shapes[f"h.0.{name}.weight"] = shape
        if length is not None:
            shapes[f"h.0.{name}.bias"] = (length,)
    found = rules(read_source(str(write(tmp_path / "w.safetensors", shapes))))
    return {name: "transposed" in found[f"h.0.{name}.weight"] for name in weights}


def test_a_bias_as_long_as_a_row_shows_a_transposed_weight(tmp_path: Path) -> None:
    found = stored(tmp_path, c_fc=((8, 32), 32), c_proj=((8, 8), 8), plain=((8, 8), None))
    assert found == {"c_fc": True, "c_proj": True, "plain": False}
    found = stored(tmp_path, c_fc=((32, 8), 32), c_proj=((8, 8), 8), odd=((32, 8), 5))
    assert found == {"c_fc": False, "c_proj": False, "odd": False}


@pytest.mark.parametrize(
    ("fused", "down", "keys"),
    [
        ((4, 24, 8), (4, 8, 12), MUON),
        ((4, 8, 24), (4, 12, 8), TRANSPOSED),
        ((4, 16, 8), (4, 8, 8), MUON),
        ((4, 8, 16), (4, 8, 8), TRANSPOSED),
        ((4, 16, 16), (4, 16, 8), MUON),
        ((4, 16, 16), (4, 8, 16), TRANSPOSED),
        ((4, 24, 8), (4, 24, 8), MUON),
        ((4, 20, 24), (4, 12, 8), MUON),  # of no gated MLP
    ],
)
def test_how_stacks_are_stored(
    tmp_path: Path, fused: tuple[int, ...], down: tuple[int, ...], keys: dict[str, Any]
) -> None:
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    path = write(tmp_path / "w.safetensors", dict(zip(names, (fused, down), strict=True)))
    assert rules(read_source(str(path))) == dict.fromkeys(names, keys)


def mixed(folder: Path, **others: tuple[str, tuple[int, ...]]) -> Path:
    """A file with one matrix and tensors of other dtypes."""
    entries = {"a.up.weight": ENTRY}
    for name, (dtype, shape) in others.items():
        entries[name.replace("__", ".")] = {"dtype": dtype, "shape": list(shape)}
    path = folder / "w.safetensors"
    path.write_bytes(header(entries))
    return path


def test_buffers_and_scales_are_left_out(tmp_path: Path) -> None:
    path = mixed(
        tmp_path,
        h__0__attn__bias=("F32", (1, 1, 16, 16)),
        h__0__attn__masked_bias=("F32", ()),
        rotary_emb__inv_freq=("F32", (4,)),
        embeddings__position_ids=("I64", (1, 16)),
        causal__mask=("BOOL", (16, 16)),
        bn__num_batches_tracked=("I32", ()),
        a__down__weight=("F8_E4M3", (8, 4)),
        a__down__weight_scale_inv=("F32", (1, 1)),
        a__down__input_scale=("F32", (1,)),
        experts__gate_up_proj_scale_inv=("F32", (4, 1, 1)),
        logit_scale=("BF16", ()),
    )
    assert rules(read_source(str(path))) == {
        "a.up.weight": MUON,
        "a.down.weight": MUON,
        "logit_scale": ADAMW,
    }


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "U32"])
def test_packed_weights_are_refused(tmp_path: Path, dtype: str) -> None:
    path = mixed(tmp_path, a__down__qweight=(dtype, (8, 4)))
    assert f"a.down.qweight has dtype {dtype}, and packed weights" in refusal(path)
