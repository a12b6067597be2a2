"""Models that transformers makes from a folder are built, run, split and described as ours are."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shardmuon.training import architecture, place
from shardmuon.training.config import Compute, Config, Data, Mesh, Precision
from shardmuon.training.inputs import Model
from shardmuon.training.load import ConfigError
from shardmuon.training.place import Place
from tests.training.hugging_face import model_folder

ALONE = Place(device=torch.device("cpu"), rank=0, ranks=1, mesh=None)
TOKENS = torch.arange(48).view(2, 24) * 5 % 256


def of_folder(folder: Path, **sections: Any) -> architecture.Architecture:
    sections = {"data": Data(sequence_length=24), **sections}
    return architecture.find(Config(model=Model(path=str(folder)), **sections))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the mean loss of predicting TOKENS shifted by one."""
    scores = architecture.logits(model, TOKENS)
    F.cross_entropy(scores[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_random_weights_are_those_of_the_seed(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {}
    if kind == "gpt2":
        settings = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    found = of_folder(model_folder(tmp_path, kind, **settings))
    assert found.vocab_size == 300
    before = torch.get_rng_state()
    one, two, other = (found.build(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert not all(torch.equal(p, q) for p, q in pairs)
    assert len(architecture.blocks(one)) == 2
    assert one.training


def test_weights_in_the_folder_are_taken(tmp_path: Path) -> None:
    model_folder(tmp_path, weights=True)
    model = of_folder(tmp_path).build(seed=3)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(architecture.logits(model, TOKENS), plain(TOKENS).logits)


def test_a_checkpoint_needs_no_folder(tmp_path: Path) -> None:
    found = of_folder(model_folder(tmp_path, weights=True))
    config = {"model": {"path": str(tmp_path / "gone")}}
    again = architecture.of_manifest(
        json.loads(json.dumps({"config": config, "architecture": found.tree}))
    )
    assert again.vocab_size == 300
    model = again.build(0)
    model.load_state_dict(found.build(0).state_dict())
    assert torch.equal(
        architecture.logits(model, TOKENS), architecture.logits(found.build(0), TOKENS)
    )
    described = again.config_json("bfloat16")
    assert described["model_type"] == "llama"
    assert described["dtype"] == "bfloat16"


@pytest.mark.parametrize("ours", [True, False])
def test_recomputed_blocks_give_the_same_bits(tmp_path: Path, ours: bool) -> None:
    found = architecture.Architecture(model=Model(layers=2, dim=32, hidden=48))
    if not ours:
        found = of_folder(model_folder(tmp_path))
    plain, other = found.build(0), found.build(0)
    wanted = gradients(plain)
    calls = []
    place.spread(other, ALONE, Precision(), Compute(activation_checkpointing=True))
    for block in architecture.blocks(other):
        mlp: Any = block.mlp
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for name, gradient in gradients(other).items():
        assert torch.equal(gradient, wanted[name]), name
    assert len(calls) == 4  # each block once more than without
    other.eval()
    architecture.logits(other, TOKENS)
    assert len(calls) == 6


# Dynamo looks at .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ours", [True, False])
def test_compiled_blocks_agree(tmp_path: Path, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = architecture.Architecture(model=Model(layers=2, dim=32, hidden=48))
    if not ours:
        found = of_folder(model_folder(tmp_path))
    plain, other = found.build(0), found.build(0)
    wanted = gradients(plain)
    # The backend that generates no C++ takes seconds instead of half a minute.
    quick = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(nn.Module, "compile", quick)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    place.spread(other, ALONE, Precision(), Compute(compile=True))
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in other.named_parameters()] == names


def test_a_split_that_needs_more_than_two_styles_is_refused(tmp_path: Path) -> None:
    for name, kind in (("a", "llama"), ("b", "qwen3")):
        model_folder(tmp_path / name, kind)
    found = of_folder(tmp_path / "a", mesh=Mesh(tensor=2))
    assert architecture.tensor_plan(found.build(0)) == architecture._LLAMA_PLAN
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM splits its layers by replicated_with"):
        of_folder(tmp_path / "b", mesh=Mesh(tensor=2))
    with pytest.raises(ConfigError, match=r"expected a divisor of num_attention_heads \(4\)"):
        of_folder(tmp_path / "a", mesh=Mesh(tensor=3))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, r"cannot read .*config.json \(No such file"),
        ("{", "is no JSON object"),
        ("[]", "is no JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": "no-such"}', "makes no causal language model of model_type 'no-such'"),
        ('{"model_type": "mine", "auto_map": {}}', "comes with code of its own, never run here"),
        ('{"model_type": "vit"}', "makes no causal language model of model_type 'vit'"),
    ],
)
def test_a_folder_that_gives_no_model(tmp_path: Path, text: str | None, part: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=part):
        of_folder(tmp_path)


def test_sequences_longer_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    model_folder(tmp_path)
    with pytest.raises(ConfigError, match="expected at most 128, the max_position_embeddings"):
        of_folder(tmp_path, data=Data(sequence_length=129))


def test_keys_beside_a_path_are_refused() -> None:
    with pytest.raises(ValueError, match="dim: got 64 beside path, expected nothing"):
        Model(path="somewhere", dim=64)
