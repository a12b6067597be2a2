"""Whole runs on files in Hugging Face's formats: every mesh gives the numbers of one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from shardmuon.tools import command
from shardmuon.training import main, metrics
from shardmuon.training.config import Mesh
from tests.conftest import Worlds
from tests.training import hugging_face
from tests.training.launch import ROOT
from tests.training.test_layouts import Numbers, numbers

RECOMPUTE = "compute.activation_checkpointing=true"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train a Llama from its weights on rows of text through a tokenizer."""
    top = tmp_path_factory.mktemp("files")
    model = hugging_face.model_folder(top / "model", weights=True)
    rows = hugging_face.dataset(top / "rows", {"text": hugging_face.TEXTS})
    tokenizer = hugging_face.tokenizer_file(top / "tokenizer.json")
    data = f"source: dataset, files: [{rows}], tokenizer: {tokenizer}, cache: {top}/cache"
    return [
        f"model={{path: {model}}}",
        f"data={{{data}, sequence_length: 32, batch_sequences: 8}}",
    ]


@pytest.fixture(scope="module")
def right(
    pools: Worlds, files: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Numbers, Path]:
    """The numbers of one rank, and its folder."""
    folder = tmp_path_factory.mktemp("one")
    return numbers(pools, 1, Mesh(), files, folder), folder


@pytest.mark.parametrize(
    ("world", "mesh", "more"),
    [(2, Mesh(), []), (2, Mesh(tensor=2), [RECOMPUTE])],
)
def test_every_mesh_gives_the_numbers_of_one_rank(
    pools: Worlds,
    right: tuple[Numbers, Path],
    files: list[str],
    tmp_path: Path,
    world: int,
    mesh: Mesh,
    more: list[str],
) -> None:
    found = numbers(pools, world, mesh, [*files, *more], tmp_path)
    for key, values in right[0].items():
        assert found[key] == pytest.approx(values, rel=1e-5), key


def test_its_export_is_a_folder_of_transformers(
    right: tuple[Numbers, Path], tmp_path: Path
) -> None:
    target = tmp_path / "export"
    auto: Any = transformers.AutoModelForCausalLM
    assert command.main(["export", str(right[1]), str(target)]) == 0
    model, info = auto.from_pretrained(target, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info.values())


def test_the_configuration_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "stories.yaml").write_text(example, encoding="utf-8")
    model = hugging_face.model_folder(
        tmp_path / "models" / "llama", weights=True, max_position_embeddings=256
    )
    hugging_face.tokenizer_file(model / "tokenizer.json")
    hugging_face.dataset(tmp_path / "data" / "stories", {"text": 9 * hugging_face.TEXTS})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    short = ["schedule.stop_at=2", "evaluation.sequences=2", "logging.progress=none"]
    assert main.main(["stories.yaml", *short, "mesh.device=cpu"]) == 0
    assert len(metrics.read(Path("runs/stories/metrics.jsonl"), "evaluate")) == 1
