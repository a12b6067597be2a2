"""Exports: files that safetensors and transformers read, and a live model that stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardmuon import Muon, param_groups
from shardmuon.checkpoint import (
    Checkpointer,
    CheckpointError,
    export_checkpoint,
    export_model,
    load_weights,
)
from shardmuon.tools.command import main
from shardmuon.training import main as train
from shardmuon.training.config import Model
from shardmuon.training.load import load
from shardmuon.training.model import CausalLM, build, transformers_config
from tests import ranks
from tests.conftest import Worlds
from tests.problems import local, whole, world_mesh
from tests.training import launch

CONFIG = Model(
    vocab_size=300, dim=48, layers=2, heads=4, kv_heads=2, hidden=80, rope_theta=5e3, norm_eps=1e-4
)
TIED = Model(vocab_size=300, dim=48, layers=1, heads=4, kv_heads=4, hidden=80, tied_head=True)


def trained(model: nn.Module, steps: int = 2) -> Muon:
    """An optimizer that has taken steps with made gradients."""
    optimizer = Muon(param_groups(model), lr=0.05)
    for step in range(steps):
        step_once(model, optimizer, step)
    return optimizer


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.sin(p.detach() * (3 + step) + number)
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Path:
    checkpoints = Checkpointer(folder)
    path = checkpoints.save(7, model, optimizer)
    checkpoints.close()
    return path


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, each of which must be in one file only."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in tensors
            tensors[name] = tensor
    return tensors


def test_files_hold_the_weights_and_the_index_says_which(tmp_path: Path) -> None:
    model = build(CONFIG, 0)
    path = saved(tmp_path / "ck", model, trained(model))
    export_checkpoint(path, tmp_path / "out", file_bytes=40_000)
    out = tmp_path / "out"
    tensors, expected = read(out), dict(model.named_parameters())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in expected.values())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    for file in files:
        content = load_file(out / file)
        assert len(content) == 1 or sum(t.nbytes for t in content.values()) <= 40_000
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out"]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", build(TIED, 0), None)
    export_checkpoint(path, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert "lm_head.weight" not in read(tmp_path / "out")


@pytest.mark.parametrize("kind", ["muon", "adamw", "both"])
def test_optimizer_state_has_what_each_rule_needs(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    named = dict(model.named_parameters())
    if kind == "muon":
        for name in ("0.bias", "1.bias"):
            named[name].requires_grad_(False)
        groups: Any = [{"params": [(n, p) for n, p in named.items() if p.ndim == 2]}]
    elif kind == "adamw":
        groups = [{"params": list(named.items()), "algorithm": "adamw"}]
    else:
        groups = param_groups(model)
    optimizer = Muon(groups)
    step_once(model, optimizer, 0)
    path = saved(tmp_path / "ck", model, optimizer)
    export_checkpoint(path, tmp_path / "out", optimizer=True)
    tensors = read(tmp_path / "out" / "optimizer")
    expected = {
        f"{name}.{key}": value
        for name, p in named.items()
        for key, value in optimizer.state.get(p, {}).items()
    }
    assert expected
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].shape == value.shape
        assert torch.equal(tensors[name], value)
    groups_file = json.loads((tmp_path / "out" / "optimizer" / "groups.json").read_text())
    stated = {name for name, p in named.items() if p in optimizer.state}
    assert {n for group in groups_file for n in group["params"]} == stated


def test_a_damaged_checkpoint_or_a_taken_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", build(TIED, 0), None)
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken exists already"):
        export_checkpoint(path, tmp_path / "taken")
    data = path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum differs"):
        export_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", build(TIED, 0), None)
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model-00009.safetensors").write_text("half")
    export_checkpoint(path, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def _sharded() -> tuple[nn.Module, Muon]:
    mesh = world_mesh()
    model = build(CONFIG, 0).to(ranks.device())
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, trained(model)


def _export_live(folder: str, live: bool) -> list[Tensor]:
    """Parameters after a further step, with or without an export before."""
    model, optimizer = _sharded()
    before = {n: (p.dtype, p.data_ptr(), p.detach().clone()) for n, p in local_parts(model)}
    if live:
        export_model(model, folder, optimizer=optimizer, dtype=torch.bfloat16, file_bytes=20_000)
    for name, p in local_parts(model):
        dtype, pointer, value = before[name]
        assert (p.dtype, p.data_ptr()) == (dtype, pointer)
        assert torch.equal(p, value)
    step_once(model, optimizer, 5)
    return [p.cpu() for _, p in local_parts(model)]


def local_parts(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, local(p)) for n, p in model.named_parameters()]


def test_an_export_leaves_the_live_model_as_it_was(pools: Worlds, tmp_path: Path) -> None:
    with_export = pools.run(2, _export_live, str(tmp_path / "out"), True)
    without = pools.run(2, _export_live, str(tmp_path / "none"), False)
    for one, other in zip(with_export, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    tensors = read(tmp_path / "out")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    alone = build(CONFIG, 0)
    trained(alone)
    for name, p in alone.named_parameters():
        assert tensors[name].shape == p.shape
        torch.testing.assert_close(tensors[name].float(), p.detach(), atol=2e-2, rtol=2e-2)
    state = read(tmp_path / "out" / "optimizer")
    assert state["model.norm.weight.step"].item() == 2.0
    assert state["model.layers.0.mlp.up_proj.weight.momentum_buffer"].dtype == torch.float32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def _import(folder: str, wrong: bool) -> bool:
    model, _ = _sharded()
    if wrong:
        before = [p.clone() for _, p in local_parts(model)]
        with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
            load_weights(folder, model)
        return all(torch.equal(p, b) for (_, p), b in zip(local_parts(model), before, strict=True))
    load_weights(folder, model)
    values = {name: whole(p) for name, p in model.named_parameters()}
    expected = read(Path(folder))
    return all(torch.equal(values[name], expected[name].float()) for name in values)


def test_exported_weights_start_a_sharded_model(pools: Worlds, tmp_path: Path) -> None:
    model = build(CONFIG, 3)
    export_model(model, tmp_path / "out", dtype=torch.bfloat16, file_bytes=30_000)
    assert pools.run(2, _import, str(tmp_path / "out"), False) == [True, True]
    tied = CausalLM(CONFIG)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    export_model(tied, tmp_path / "tied")
    assert pools.run(2, _import, str(tmp_path / "tied"), True) == [True, True]


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_transformers_computes_the_same_logits(tmp_path: Path, config: Model) -> None:
    from transformers import LlamaForCausalLM

    model = build(config, 1)
    trained(model)
    texts = {"config.json": transformers_config(config, "float32")}
    export_model(model, tmp_path / "out", file_bytes=50_000, texts=texts)
    load: Any = LlamaForCausalLM.from_pretrained
    theirs, info = load(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=2e-5, rtol=1e-4)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(TIED, 0)
    run = tmp_path / "run"
    path = saved(run / "checkpoints", model, None)
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert {t.dtype for t in read(tmp_path / "out").values()} == {torch.bfloat16}
    assert main(["export", str(path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out2")]) == 1
    with pytest.raises(SystemExit) as stop:
        main(["export", str(path), str(tmp_path / "out3"), "--dtype", "int8"])
    assert stop.value.code == 2


def test_a_run_starts_from_exported_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    tiny = [str(launch.ROOT / "configs" / "tiny.yaml"), *launch.SMALL]
    still = ["optimizer.muon.lr=0", "optimizer.adamw.lr=0", "schedule.stop_at=1"]
    run = [*tiny, *launch.text_files(tmp_path / "text"), f"logging.directory={tmp_path / 'run'}"]
    config = load(run[0], run[1:])
    model = build(config.model, 3)  # the run itself would begin with other weights
    export_model(model, tmp_path / "out")
    assert train.main([*run, *still, f"checkpoint.weights={tmp_path / 'out'}"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    begun, ended = read(tmp_path / "out"), read(tmp_path / "again")
    assert all(torch.equal(begun[name], ended[name]) for name in begun)
    assert (tmp_path / "again" / "config.json").exists()
    capsys.readouterr()
    assert train.main([*run, f"checkpoint.weights={tmp_path}", "checkpoint.resume=none"]) == 2
    other = [f"logging.directory={tmp_path / 'other'}", f"checkpoint.weights={tmp_path}"]
    assert train.main([*run, *other]) == 2
    assert "expected a folder with .safetensors files" in capsys.readouterr().err
