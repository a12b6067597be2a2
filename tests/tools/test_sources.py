"""Sources of a plan: what known names, configurations and transformers list; mistakes."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from shardmuon.planning.models import MODELS
from shardmuon.routing import param_groups
from shardmuon.tools.sources import Listed, read_source
from shardmuon.tools.workloads import WORKLOADS
from shardmuon.training import architecture
from shardmuon.training.config import Model
from shardmuon.training.model import build
from tests.tools.listed import (
    ADAMW,
    MUON,
    SMALL,
    TRANSPOSED,
    Rows,
    no_network,  # noqa: F401  (a fixture that acts by itself)
    refusal,
    routed,
    rows,
    rules,
    write,
)

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


def test_algorithms_of_a_configuration(tmp_path: Path) -> None:
    text = "optimizer: {muon: {algorithm: normuon}, adamw: {algorithm: lion}}\n"
    plain = rules(read_source(str(configuration(tmp_path, SECTION))))
    found = rules(read_source(str(configuration(tmp_path, SECTION + text))))
    assert plain.keys() == found.keys()
    others = {"muon": {"algorithm": "normuon"}, "adamw": {"algorithm": "lion"}}
    assert found == {name: others[keys["algorithm"]] for name, keys in plain.items()}


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
    monkeypatch.setattr(architecture, "find_spec", lambda _: None)
    assert refusal(tmp_path).endswith("pip install 'shardmuon[hf]'")
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
