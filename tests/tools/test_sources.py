"""Sources of a plan: what each kind lists, that no weights are read, and what is refused."""

from __future__ import annotations

import io
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import save_file
from torch import nn

from shardmuon.groups import STRUCTURAL_KEYS
from shardmuon.planning.models import MODELS
from shardmuon.routing import param_groups
from shardmuon.tools import sources
from shardmuon.tools.sources import INDEX, Listed, Source, read_source
from shardmuon.tools.workloads import WORKLOADS
from shardmuon.training.config import Model
from shardmuon.training.load import ConfigError
from shardmuon.training.model import CausalLM, build

SMALL = Model(vocab_size=300, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
MUON, ADAMW = {"algorithm": "muon"}, {"algorithm": "adamw"}
TRANSPOSED = {"algorithm": "muon", "transposed": True}
TERABYTE = 2**40


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any attempt fails the test, even where the error is caught."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        tried.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not tried


Rows = dict[str, tuple[tuple[int, ...], dict[str, Any]]]


def rows(source: Source) -> Rows:
    """Shape and keys by name; names must be unique."""
    found = {each.name: (each.shape, dict(each.keys)) for each in source.parameters}
    assert len(found) == len(source.parameters)
    return found


def rules(source: Source) -> dict[str, dict[str, Any]]:
    return {each.name: dict(each.keys) for each in source.parameters}


def routed(model: nn.Module) -> Rows:
    """What `param_groups` makes of a model that is there."""
    return {
        name: (
            tuple(parameter.shape),
            {key: group[key] for key in STRUCTURAL_KEYS if key in group},
        )
        for group in param_groups(model)
        for name, parameter in group["params"]
    }


def header(tensors: Mapping[str, Any]) -> bytes:
    """The first bytes of a safetensors file, without any data."""
    raw = json.dumps(tensors).encode()
    return len(raw).to_bytes(8, "little") + raw


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> Path:
    entries = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    path.write_bytes(header({"__metadata__": {"format": "pt"}, **entries}))
    return path


def refusal(source: object) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(ConfigError) as caught:
        read_source(str(source))
    message = str(caught.value)
    assert message.startswith(str(source))
    assert "\n" not in message
    return message


# --- known names ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_is_its_matrices(name: str) -> None:
    found = rows(read_source(name))
    assert all(keys == MUON for _, keys in found.values())
    wanted: Counter[tuple[int, ...]] = Counter()
    for count, *shape in MODELS[name]:
        wanted[tuple(shape)] += count
    assert Counter(shape for shape, _ in found.values()) == wanted


def test_names_of_known_matrices_say_the_layer() -> None:
    names = [each.name for each in read_source("llama3-8b").parameters]
    assert len(names) == 32 * 7
    assert names[3 * 7 : 4 * 7] == [
        "layers.3.4096x4096.0",
        "layers.3.4096x4096.1",
        "layers.3.1024x4096.0",
        "layers.3.1024x4096.1",
        "layers.3.14336x4096.0",
        "layers.3.14336x4096.1",
        "layers.3.4096x14336.0",
    ]


def test_counts_without_layers_give_names_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "odd", ((2, 4, 8), (3, 8, 8), (1, 4, 8)))
    names = [each.name for each in read_source("odd").parameters]
    assert names == ["4x8.0", "4x8.1", "8x8.0", "8x8.1", "8x8.2", "4x8.2"]


def test_a_workload_is_listed_as_it_is_routed() -> None:
    tiny = WORKLOADS["tiny"].model
    assert isinstance(tiny, Model)
    source = read_source("tiny")
    assert source.title == "tiny"
    assert rows(source) == routed(build(tiny, 0))
    names = [each.name for each in source.parameters]
    assert names == [row.name for row in param_groups(build(tiny, 0)).table]


def test_stacks_of_a_workload() -> None:
    found = rows(read_source("qwen3-moe"))
    assert found["layers.3.experts.down_proj"] == ((128, 2048, 768), MUON)
    assert found["layers.3.gate.weight"] == ((128, 2048), ADAMW)
    assert Counter(keys["algorithm"] for _, keys in found.values()) == {"muon": 28, "adamw": 4}


def test_a_known_name_comes_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    write(Path("tiny/model.safetensors"), {"layers.0.up.weight": (4, 8)})
    assert len(read_source("tiny").parameters) > 1
    assert len(read_source("./tiny").parameters) == 1


# --- training configurations ------------------------------------------------------------------

SECTION = "model: {vocab_size: 300, dim: 32, layers: 2, heads: 4, kv_heads: 2, hidden: 48}\n"


def configuration(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_training_configuration(tmp_path: Path) -> None:
    path = configuration(tmp_path, SECTION)
    source = read_source(str(path))
    assert source.title == str(path)
    assert rows(source) == routed(build(SMALL, 0))


def test_patterns_of_a_configuration(tmp_path: Path) -> None:
    text = 'optimizer: {to_muon: [lm_head.weight], to_adamw: ["*.0.self_attn.*"]}\n'
    found = rules(read_source(str(configuration(tmp_path, SECTION + text))))
    assert found["lm_head.weight"] == MUON
    for part in "qkvo":
        assert found[f"model.layers.0.self_attn.{part}_proj.weight"] == ADAMW
        assert found[f"model.layers.1.self_attn.{part}_proj.weight"] == MUON


def test_a_configuration_takes_no_memory(tmp_path: Path) -> None:
    # A matrix of 2^50 bytes is no machine's: where it were made, this would fail at once.
    path = configuration(tmp_path, f"model: {{dim: {2**24}, heads: 4, kv_heads: 4}}\n")
    found = rows(read_source(str(path)))
    assert found["model.layers.3.self_attn.o_proj.weight"] == ((2**24, 2**24), MUON)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optimizer: {name: adamw}\n", "optimizer.name: got 'adamw', expected 'muon'"),
        ("optimizer: {to_muon: [nothing]}\n", "pattern 'nothing' matches no parameter"),
        ('optimizer: {to_adamw: ["*"]}\n', "no parameter takes Muon"),
        ("model: {width: 3}\n", "model.width: unknown key"),
        ("just text\n", "expected sections"),
        ("", "the file is empty"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(configuration(tmp_path, text))


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


# --- transformers -----------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 12}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}


def saved(folder: Path, model_type: str, **settings: Any) -> nn.Module:
    """A model of transformers with small random weights, saved into `folder`."""
    library: Any = transformers  # its annotations are incomplete
    made = library.AutoModelForCausalLM.from_config(
        library.AutoConfig.for_model(model_type, **settings)
    )
    made.save_pretrained(folder)
    assert isinstance(made, nn.Module)
    return made


def both_ways(folder: Path) -> tuple[Rows, Rows]:
    """A saved model by its headers and by its config.json; the second path is named."""
    by_names = read_source(str(folder))
    by_module = read_source(str(folder / "config.json"))
    assert by_names.title == f"{folder} (rules by name)"
    assert by_module.title.startswith(f"{folder / 'config.json'} (")
    assert by_module.title.endswith("ForCausalLM)") or by_module.title.endswith("LMHeadModel)")
    return rows(by_names), rows(by_module)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", SIZES),
        ("llama", SIZES | {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", SIZES),
        ("gpt2", SIZES | GPT2),
        ("gpt_oss", SIZES | MOE),
    ],
    ids=["llama", "tied", "qwen3", "gpt2", "gpt_oss"],
)
def test_headers_agree_with_modules(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    model = saved(tmp_path, model_type, **settings)
    by_names, by_module = both_ways(tmp_path)
    assert by_module == routed(model)
    assert by_names == by_module


def test_what_is_stored_transposed_is_known_both_ways(tmp_path: Path) -> None:
    saved(tmp_path / "gpt2", "gpt2", **SIZES | GPT2)
    saved(tmp_path / "gpt_oss", "gpt_oss", **SIZES | MOE)
    for found in both_ways(tmp_path / "gpt2"):
        assert found["transformer.h.1.attn.c_attn.weight"] == ((16, 48), TRANSPOSED)
        assert found["transformer.h.1.attn.c_proj.weight"] == ((16, 16), TRANSPOSED)
        assert sum(keys == TRANSPOSED for _, keys in found.values()) == 8
    for found in both_ways(tmp_path / "gpt_oss"):
        assert found["model.layers.1.mlp.experts.gate_up_proj"] == ((4, 16, 48), TRANSPOSED)
        assert found["model.layers.1.mlp.experts.down_proj"] == ((4, 24, 16), TRANSPOSED)
        assert found["model.layers.1.self_attn.q_proj.weight"] == ((16, 16), MUON)


@pytest.mark.parametrize(("model_type", "hidden"), [("mixtral", 24), ("qwen3_moe", 12)])
def test_experts_are_single_in_files_and_stacked_in_modules(
    tmp_path: Path, model_type: str, hidden: int
) -> None:
    saved(tmp_path, model_type, **SIZES | MOE)
    by_names, by_module = both_ways(tmp_path)
    # Mixtral's files call the layer block_sparse_moe, its module mlp.
    by_names = {k.replace("block_sparse_moe", "mlp"): row for k, row in by_names.items()}
    single = {name: by_names.pop(name) for name in list(by_names) if ".experts." in name}
    stacks = {name: by_module.pop(name) for name in list(by_module) if ".experts." in name}
    assert by_names == by_module
    assert by_names["model.layers.1.mlp.gate.weight"] == ((4, 16), ADAMW)
    assert all(keys == MUON for _, keys in (*single.values(), *stacks.values()))
    shapes = Counter(shape for shape, _ in single.values())
    assert shapes == {(hidden, 16): 2 * 4 * 2, (16, hidden): 2 * 4}
    assert {shape for shape, _ in stacks.values()} == {(4, 2 * hidden, 16), (4, 16, hidden)}
    assert sum(prod(s) for s, _ in single.values()) == sum(prod(s) for s, _ in stacks.values())


def config(folder: Path, **settings: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


def test_a_config_alone_takes_no_memory(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 2**24, "num_attention_heads": 2**20, "head_dim": 16}
    config(tmp_path, model_type="llama", **sizes)
    source = read_source(str(tmp_path))  # a folder with nothing else
    assert source.title == f"{tmp_path} (LlamaForCausalLM)"
    found = rows(source)
    assert found["model.layers.1.self_attn.q_proj.weight"] == ((2**24, 2**24), MUON)
    assert found["model.embed_tokens.weight"] == ((61, 2**24), ADAMW)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, "config.json has no model_type"),
        ({"model_type": 3}, "config.json has no model_type"),
        ({"model_type": "nothing"}, "no causal language model of model_type 'nothing'"),
        ({"model_type": "t5"}, "no causal language model of model_type 't5'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "someone/else--own.Config"}},
            "model_type 'own' comes with code of its own, never run here",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, settings: dict[str, Any], part: str) -> None:
    assert part in refusal(config(tmp_path, **settings))
    assert part in refusal(tmp_path)


def test_code_beside_a_config_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('was run')\n")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config(tmp_path, model_type="llama", auto_map=code, **SIZES)
    assert read_source(str(tmp_path)).title.endswith("(LlamaForCausalLM)")
    config(tmp_path, model_type="own", auto_map=code)
    assert "never run here" in refusal(tmp_path)


@pytest.mark.parametrize(("text", "part"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_a_config_that_is_no_object(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert part in refusal(tmp_path)


def test_without_transformers_a_config_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path, model_type="llama", **SIZES)
    monkeypatch.setattr(sources, "find_spec", lambda _: None)
    assert refusal(tmp_path).endswith("pip install transformers")
    write(tmp_path / "model.safetensors", {"a.up.weight": (4, 8)})  # headers need nothing
    assert read_source(str(tmp_path)).parameters == (Listed("a.up.weight", (4, 8), MUON),)


# --- other mistakes ---------------------------------------------------------------------------


def test_a_misspelt_name_says_the_nearest() -> None:
    assert refusal("lama3-8b").endswith("no known model; the nearest is llama3-8b")
    assert "gpt160m, gpt2-124m" in refusal("no/such/path")
    assert "no such file" in refusal("")


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    assert "no .safetensors file and no config.json" in refusal(tmp_path)
    assert "got neither a file nor a folder" in refusal("/dev/null")
    assert "cannot be read (File name too long)" in refusal("a" * 300)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02\xff")
    assert "cannot be read (not UTF-8 text)" in refusal(tmp_path / "pytorch_model.bin")
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert "cannot be read (No such file or directory)" in refusal(tmp_path)
