"""From YAML text to a checked configuration, and the one line that bad input gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmuon.limits import Range
from shardmuon.runtime import Runtime
from shardmuon.training.config import Config, Data, Mesh, Model, MuonGroups, Schedule
from shardmuon.training.load import ConfigError, as_tree, differences, load
from shardmuon.training.optimizers import build
from tests import models

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load_and_have_a_header(path: Path) -> None:
    config = load(path)
    config.check_ranks(2)
    assert path.read_text().startswith("# ")
    assert config.logging.directory == f"runs/{path.stem}"


def test_tiny_configurations_differ_in_the_optimizer_alone() -> None:
    muon, adamw = (as_tree(load(CONFIGS / f"{name}.yaml")) for name in ("tiny", "adamw-tiny"))
    keys = {line.split(".")[0] for line in differences(muon, adamw)}
    assert keys == {"optimizer", "logging"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2e-5", 2e-5), ("1E+2", 100.0), ("1.0e-4", 1e-4), (".5", 0.5), ("3", 3.0)],
)
def test_numbers_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    """PyYAML alone reads `1e-4` as text."""
    config = load(write(tmp_path, f"optimizer:\n  muon:\n    lr: {text}\n"))
    assert config.optimizer.muon.lr == value
    assert type(config.optimizer.muon.lr) is float


def test_cautious_decay_of_torchs_adamw_is_refused(tmp_path: Path) -> None:
    """Under Muon both kinds of groups take it."""
    text = "optimizer:\n  adamw: {cautious_weight_decay: true}\n"
    assert load(write(tmp_path, text)).optimizer.adamw.cautious_weight_decay
    message = refusal(tmp_path, text, "optimizer.name=adamw")
    assert "optimizer.adamw.cautious_weight_decay: got true with name 'adamw'" in message


def test_zeros_are_kept(tmp_path: Path) -> None:
    """Zero is a value, not an unset key."""
    text = """
optimizer:
  muon: {weight_decay: 0.0, momentum: 0}
  adamw: {weight_decay: 0}
schedule: {warmup_steps: 0}
"""
    config = load(write(tmp_path, text))
    assert config.optimizer.muon.weight_decay == 0.0
    assert config.optimizer.muon.momentum == 0.0
    assert config.optimizer.adamw.weight_decay == 0.0
    assert config.schedule.warmup_steps == 0


def test_sections_left_out_or_empty_take_their_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "model:\nseed: 0\n")) == Config()


def test_runtime_is_the_librarys_own(tmp_path: Path) -> None:
    text = "optimizer:\n  runtime: {exchange: all_gather, bucket_bytes: 1024, timeout_s: 5}\n"
    expected = Runtime(exchange="all_gather", bucket_bytes=1024, timeout_s=5.0)
    assert load(write(tmp_path, text)).optimizer.runtime == expected


BAD = {
    "text for a number": (
        'optimizer:\n  muon:\n    lr: "abc"\n',
        ["run.yaml", "optimizer.muon.lr", "'abc' (text)", "expected a number"],
    ),
    "quoted number": ('optimizer: {muon: {lr: "1e-4"}}\n', ["'1e-4' (text)"]),
    "unknown at top": (
        "learning_rate: 1\n",
        ["run.yaml: learning_rate: unknown key", "expected one of model, data"],
    ),
    "dash for underscore": ("num-steps: 3\n", ["num-steps: unknown key", "nearest valid key"]),
    "misspelt": (
        "schedule: {warmup_step: 3}\n",
        ["schedule.warmup_step: unknown key", "schedule.warmup_steps"],
    ),
    "wrong section": ("momentum: 0.9\n", ["the nearest valid key is optimizer.muon.momentum"]),
    "bad indent": ("model:\n  dim: 64\n layers: 2\n", ["line 3, column 2", "equally indented"]),
    "tab": ("model:\n\tdim: 64\n", ["line 2"]),
    "empty file": ("", ["the file is empty"]),
    "only comments": ("# nothing\n", ["the file is empty"]),
    "a list": ("- 1\n", ["got a list"]),
    "twice": ("seed: 1\nseed: 2\n", ["line 2", "key 'seed' twice"]),
    "section as number": ("model: 3\n", ["model: got '3' (a whole number)", "a section"]),
    "number as section": ("seed: {a: 1}\n", ["seed: got a section", "a whole number"]),
    "fraction for whole": ("schedule: {steps: 10.5}\n", ["schedule.steps: got '10.5'"]),
    "exponent for whole": ("schedule: {steps: 1e3}\n", ["schedule.steps", "a whole number"]),
    "bool for number": ("optimizer: {muon: {lr: true}}\n", ["(true/false)", "a number"]),
    "off is text": ("model: {tied_head: off}\n", ["'off' (text)", "true or false"]),
    "number for text": ("logging: {directory: 7}\n", ["logging.directory", "expected text"]),
    "null": ("seed: null\n", ["seed: got nothing (null)"]),
    "choice": ("optimizer: {name: adam}\n", ["optimizer.name", "one of muon, adamw"]),
    "out of range": ("optimizer: {muon: {momentum: 1.5}}\n", ["got 1.5", "in [0, 1)"]),
    "negative": ("optimizer: {adamw: {lr: -1}}\n", ["optimizer.adamw.lr", "in [0, 1e+30]"]),
    "not finite": ("optimizer: {muon: {lr: .inf}}\n", ["optimizer.muon.lr: got inf"]),
    "zero count": ("optimizer: {muon: {ns_steps: 0}}\n", ["got 0", "in [1, 99]"]),
    "two coefficients": (
        "optimizer: {muon: {ns_coefficients: [1, 2]}}\n",
        ["ns_coefficients: got 2 values, expected 3"],
    ),
    "no list": ("data: {source: text, files: a.txt}\n", ["data.files", "expected a list"]),
    "item": ("optimizer: {adamw: {betas: [0.9, x]}}\n", ["betas[1]: got 'x'"]),
    "item out of range": ("optimizer: {adamw: {betas: [0.9, 1.0]}}\n", ["betas: got 1.0"]),
    "key of another rule": (
        "optimizer: {muon: {beta2: 0.9}}\n",
        ["optimizer.muon.beta2: got 0.9 with algorithm 'muon', expected null: only 'normuon'"],
    ),
    "key of AdamW": (
        "optimizer: {adamw: {algorithm: lion, eps: 1e-8}}\n",
        ["optimizer.adamw.eps: got 1e-08 with algorithm 'lion', expected null: only 'adamw'"],
    ),
    "rule": ("optimizer: {muon: {algorithm: lion}}\n", ["muon.algorithm", "muon, normuon"]),
    "Lion for all": (
        "optimizer: {name: adamw, adamw: {algorithm: lion}}\n",
        ["optimizer.adamw.algorithm: got 'lion' with name 'adamw', expected 'adamw'"],
    ),
    "runtime": ("optimizer: {runtime: {bucket_bytes: 0}}\n", ["optimizer.runtime.bucket_bytes"]),
    "runtime choice": ("optimizer: {runtime: {exchange: x}}\n", ["one of auto, all_gather"]),
    "heads": ("model: {dim: 100, heads: 3}\n", ["model.heads: got 3 for dim 100"]),
    "kv heads": ("model: {kv_heads: 3}\n", ["model.kv_heads: got 3"]),
    "clipping after blocks have left": (
        "optimizer: {runtime: {overlap: backward}}\n",
        ["clipping.max_norm: got 1.0, expected null with optimizer.runtime.overlap: backward"],
    ),
    "heads over ranks": (
        "mesh: {tensor: 3}\n",
        ["mesh.tensor: got 3, expected a divisor of model.heads (4)"],
    ),
    "kv heads over ranks": (
        "mesh: {tensor: 4}\n",
        ["mesh.tensor: got 4, expected a divisor of model.kv_heads (2)"],
    ),
    "channels over ranks": (
        "mesh: {tensor: 2}\nmodel: {hidden: 99}\n",
        ["mesh.tensor: got 2, expected a divisor of model.hidden (99)"],
    ),
    "no replica": (
        "mesh: {replicate: 0}\n",
        ["mesh.replicate: got 0", "a whole number in [1, 2147483647]"],
    ),
    "small vocabulary": ("model: {vocab_size: 100}\n", ["model.vocab_size: got 100"]),
    "no files": ("data: {source: text}\n", ["data.files: got none"]),
    "files without source": ("data: {files: [a]}\n", ["data.files", "source 'stdlib'"]),
    "warm-up too long": ("schedule: {steps: 5}\n", ["schedule.warmup_steps: got 20"]),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_input_names_file_key_value_and_expectation(
    tmp_path: Path, case: tuple[str, list[str]]
) -> None:
    """What YAML readers alone would take for something else."""
    text, parts = case
    message = refusal(tmp_path, text)
    for part in ["run.yaml", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("text", "muon", "rest"),
    [
        ("seed: 1", {}, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        (
            "optimizer: {muon: {algorithm: normuon}, adamw: {algorithm: lion}}",
            {"beta2": 0.95},
            {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        ),
        (
            "optimizer: {muon: {algorithm: normuon, beta2: 0.9},"
            " adamw: {algorithm: lion, lr: 0.5, weight_decay: 0.25}}",
            {"beta2": 0.9},
            {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25},
        ),
    ],
)
def test_groups_get_the_keys_of_their_algorithm(
    tmp_path: Path, text: str, muon: dict[str, Any], rest: dict[str, Any]
) -> None:
    section = load(write(tmp_path, text)).optimizer
    matrices, tables, vectors = build(
        models.make(), section, torch.device("cpu")
    ).optimizer.param_groups
    assert matrices["algorithm"] == section.muon.algorithm
    assert {key: matrices[key] for key in ("beta2",) if key in matrices} == muon
    for group, decay in ((tables, rest["weight_decay"]), (vectors, 0.0)):
        assert group["algorithm"] == section.adamw.algorithm
        settings = {k: v for k, v in group.items() if k in ("lr", "betas", "eps", "weight_decay")}
        assert settings == {**rest, "weight_decay": decay}


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "x").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "x")


def test_overrides_are_typed_as_the_file_is(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3\n")
    arguments = [
        "optimizer.muon.lr=1e-4",
        "clipping.max_norm=null",
        "optimizer.adamw.betas=[0.8, 0]",
        "logging.directory=a=b",
        "seed=0",
    ]
    config = load(path, arguments)
    assert config.optimizer.muon.lr == 1e-4
    assert config.clipping.max_norm is None
    assert config.optimizer.adamw.betas == (0.8, 0.0)
    assert config.logging.directory == "a=b"
    assert config.seed == 0


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("seed", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("optimizer..lr=3", "expected key.path=value"),
        ("optimizer.muon.learning_rate=3", "optimizer.muon.learning_rate: unknown key"),
        ("seed.x=3", "seed is not a section"),
        ("optimizer.muon.lr=abc", "optimizer.muon.lr: got 'abc'"),
        ("data.files=[a", "not valid YAML"),
    ],
)
def test_bad_overrides(tmp_path: Path, argument: str, part: str) -> None:
    message = refusal(tmp_path, "seed: 3\n", argument)
    assert message.startswith("command line: ")
    assert part in message


def test_a_tree_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    import yaml

    config = Config(data=Data(source="text", files=("a", "b")), seed=7)
    assert load(write(tmp_path, yaml.safe_dump(as_tree(config)))) == config


def test_differences_name_key_paths() -> None:
    old, new = as_tree(Config()), as_tree(Config(seed=4, model=Model(dim=64)))
    assert differences(old, new) == ["model.dim: 128 -> 64", "seed: 0 -> 4"]
    assert differences(old, old) == []


def test_sections_check_themselves_without_a_file() -> None:
    with pytest.raises(ValueError, match=r"lr: got -1, expected a number in \[0, 1e\+30\]"):
        MuonGroups(lr=-1)
    with pytest.raises(ValueError, match="warmup_steps: got 30 steps"):
        Schedule(steps=25, kind="stable", warmup_steps=10, decay_steps=20)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "fits"), [(1, 1, True), (2, 4, True), (3, 1, False), (2, 3, False)]
)
def test_batch_must_divide(ranks: int, accumulation: int, fits: bool) -> None:
    tree = as_tree(Config())
    assert tree["data"]["batch_sequences"] == 32
    from shardmuon.training.config import Accumulation

    config = Config(accumulation=Accumulation(steps=accumulation))
    if fits:
        config.check_ranks(ranks)
        assert config.micro_batch_sequences(ranks) == 32 // (ranks * accumulation)
        return
    with pytest.raises(ValueError, match=r"data.batch_sequences: got 32, expected a multiple"):
        config.check_ranks(ranks)


@pytest.mark.parametrize(
    ("ranks", "mesh", "text"),
    [
        (4, Mesh(replicate=2, tensor=2), None),
        (64, Mesh(tensor=2), None),
        (64, Mesh(), "expected a multiple of ranks x accumulation.steps = 64 x 1 = 64"),
        (6, Mesh(tensor=2), "expected a multiple of ranks / mesh.tensor x accumulation.steps = 3"),
        (6, Mesh(replicate=4), "mesh.replicate: got 6 ranks, expected a multiple of"),
        (2, Mesh(replicate=2, tensor=2), "replicate x tensor = 2 x 2 = 4"),
        (3, Mesh(tensor=2), "mesh.tensor: got 3 ranks, expected a multiple of"),
    ],
)
def test_ranks_must_fit_the_mesh(ranks: int, mesh: Mesh, text: str | None) -> None:
    config = Config(mesh=mesh)
    if text is None:
        config.check_ranks(ranks)
        return
    with pytest.raises(ValueError, match=re.escape(text)):
        config.check_ranks(ranks)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Range(low=1), "at least 1"),
        (Range(low=0, low_open=True), "above 0"),
        (Range(high=3), "at most 3"),
        (Range(high=3, high_open=True), "below 3"),
        (Range(low=0, high=1, high_open=True), "in [0, 1)"),
    ],
)
def test_ranges_in_words(limits: Range, text: str) -> None:
    assert str(limits) == text
