"""Whole runs of train.py: learning, resume in the same bits, and the end of a failing rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmuon.training import main, metrics
from tests.ranks import RankPools
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")

pytestmark = pytest.mark.timeout(180)


def numbers(folder: Path, event: str, *keys: str) -> dict[int, list[Any]]:
    """The numbers of each step that do not depend on the clock."""
    records = metrics.read(folder / "metrics.jsonl", event)
    return {record["step"]: [record[key] for key in keys] for record in records}


def assert_same_run(straight: Path, resumed: Path, scratch: Path, from_step: int) -> None:
    for event, keys in (
        ("train", ("loss", "grad_norm", "update_rms", "lr")),
        ("evaluate", ("loss", "bits_per_byte")),
    ):
        whole = numbers(straight, event, *keys)
        part = numbers(resumed, event, *keys)
        steps = [step for step in whole if step > from_step]
        assert steps
        assert [part[step] for step in steps] == [whole[step] for step in steps]
    last = "checkpoints/step_00000006"
    left, right = (launch.final_tensors(folder / last, scratch) for folder in (straight, resumed))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_resume_on_two_ranks_is_bit_identical(pools: RankPools, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    common = [*launch.SMALL, *launch.text_files(tmp_path / "text")]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pools.run(2, launch.train_as_rank, TINY, [*common, f"logging.directory={straight}"])
    half = straight / "checkpoints" / "step_00000003"
    more = [f"logging.directory={resumed}", f"checkpoint.resume={half}"]
    pools.run(2, launch.train_as_rank, TINY, [*common, *more])
    assert min(numbers(resumed, "train")) == 4
    assert_same_run(straight, resumed, tmp_path, 3)


@pytest.mark.parametrize(("optimizer", "tied"), [("muon", "true"), ("adamw", "false")])
def test_stop_and_resume_alone(
    tmp_path: Path, optimizer: str, tied: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    common = [
        TINY,
        *launch.SMALL,
        *launch.text_files(tmp_path / "text"),
        f"model.tied_head={tied}",
        f"optimizer.name={optimizer}",
        "checkpoint.every=0",
    ]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main.main([*common, f"logging.directory={straight}"]) == 0
    assert main.main([*common, f"logging.directory={stopped}", "schedule.stop_at=4"]) == 0
    out = capsys.readouterr().out
    assert "schedule.stop_at=null checkpoint.resume=auto" in out
    torch.manual_seed(99)  # a resumed run must not depend on what was drawn before
    assert main.main([*common, f"logging.directory={stopped}"]) == 0
    assert_same_run(straight, stopped, tmp_path, 0)
    out = capsys.readouterr().out
    assert f"resuming from {stopped / 'checkpoints' / 'step_00000004'} after step 4" in out
    assert "train longer" in out


def test_finished_run_starts_nothing_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    arguments = [
        TINY,
        *launch.SMALL,
        *launch.text_files(tmp_path / "text"),
        f"logging.directory={tmp_path / 'run'}",
        "checkpoint.keep_last=1",
    ]
    assert main.main(arguments) == 0
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == ["step_00000006"]
    before = numbers(tmp_path / "run", "train", "loss", "tokens_per_s")
    assert main.main(arguments) == 0
    assert numbers(tmp_path / "run", "train", "loss", "tokens_per_s") == before
    assert main.main([*arguments, "checkpoint.resume=none"]) == 2
    assert "holds step_00000006" in capsys.readouterr().err


def test_output_and_metrics_of_a_muon_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    folder = tmp_path / "run"
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    assert main.main([*arguments, f"logging.directory={folder}"]) == 0
    out = capsys.readouterr().out
    for part in (
        "order-0 entropy of the validation text",
        "model.layers.0.self_attn.q_proj.weight",
        "step 6/6  loss",
        "bits per byte",
        str(folder / "metrics.jsonl"),
        str(folder / "checkpoints" / "step_00000006"),
        "checkpoint.resume=auto",
    ):
        assert part in out
    record = metrics.read(folder / "metrics.jsonl", "train")[-1]
    assert set(record["seconds"]) == {"step", "forward_backward", "optimizer"}
    for key in ("loss", "grad_norm", "update_rms", "tokens_per_s", "memory_bytes"):
        assert record[key] > 0
    assert [name.split(".")[0] for name in record["lr"]] == ["muon", "adamw", "adamw"]
    start = metrics.read(folder / "metrics.jsonl", "start")[0]
    assert start["config"]["schedule"]["steps"] == 6
    assert start["ranks"] == 1


def test_other_rules_of_a_configuration_train(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    folder = tmp_path / "run"
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    arguments += [f"logging.directory={folder}", "optimizer.muon.algorithm=normuon"]
    arguments += ["optimizer.adamw.algorithm=lion", "optimizer.adamw.lr=4e-4"]
    assert main.main(arguments) == 0
    record = metrics.read(folder / "metrics.jsonl", "train")[-1]
    assert [name.split(".")[0] for name in record["lr"]] == ["normuon", "lion", "lion"]
    assert record["update_rms"] > 0


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_it_learns(tmp_path: Path, name: str) -> None:
    """Alone, in seconds: far from the shipped configurations, yet below the order-0 entropy."""
    arguments = [
        TINY,
        *launch.SMALL,
        f"optimizer.name={name}",
        "schedule.steps=80",
        "schedule.decay_steps=30",
        "data.batch_sequences=32",
        "accumulation.steps=1",
        "evaluation.every=0",
        "evaluation.sequences=64",
        "checkpoint.every=0",
        "logging.every=20",
        "logging.progress=none",
        f"logging.directory={tmp_path}",
    ]
    assert main.main(arguments) == 0
    bits = numbers(tmp_path, "evaluate", "bits_per_byte")[80][0]
    assert bits < 4.3
    losses = [loss for (loss,) in numbers(tmp_path, "train", "loss").values()]
    assert losses[-1] < losses[0] - 2


def test_accumulation_gives_the_same_losses(tmp_path: Path) -> None:
    """Same samples in the same step; sums of gradients differ in their last bits."""
    (tmp_path / "text").mkdir()
    found = []
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
        overrides = [f"accumulation.steps={steps}", f"logging.directory={folder}"]
        assert main.main([*arguments, *overrides]) == 0
        found.append([v[0] for v in numbers(folder, "train", "loss").values()])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_bf16_alone_trains(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    overrides = ["precision.compute=bfloat16", f"logging.directory={tmp_path / 'run'}"]
    assert main.main([*arguments, *overrides]) == 0
    losses = [v[0] for v in numbers(tmp_path / "run", "train", "loss").values()]
    assert losses[-1] < losses[0]


def test_a_failing_rank_ends_all_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    started = time.monotonic()
    result = launch.train(
        TINY,
        *launch.SMALL,
        *launch.text_files(tmp_path / "text"),
        f"logging.directory={tmp_path / 'run'}",
        script=Path(launch.__file__).with_name("failing_rank.py"),
    )
    assert result.returncode != 0
    assert "[rank 1] Traceback" in result.stderr
    assert "OSError: the disk of this rank is gone" in result.stderr
    assert time.monotonic() - started < 60
    assert len(numbers(tmp_path / "run", "train")) == 2


def test_manifest_holds_group_settings(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    assert main.main([*arguments, f"logging.directory={tmp_path / 'run'}"]) == 0
    path = tmp_path / "run" / "checkpoints" / "step_00000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    algorithms = [group["settings"]["algorithm"] for group in manifest["groups"]]
    assert algorithms == ["muon", "adamw", "adamw"]
    assert manifest["groups"][0]["settings"]["weight_decay"] == 0.1
    assert "model.layers.0.mlp.up_proj.weight" in manifest["groups"][0]["params"]


def test_a_run_that_resumes_elsewhere_at_its_end_has_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path / "text")]
    assert main.main([*arguments, f"logging.directory={tmp_path / 'run'}"]) == 0
    last = tmp_path / "run" / "checkpoints" / "step_00000006"
    other = [f"logging.directory={tmp_path / 'other'}", f"checkpoint.resume={last}"]
    assert main.main([*arguments, *other]) == 0
    assert (tmp_path / "other" / "checkpoints" / last.name / "manifest.json").exists()


def test_a_run_that_nobody_continues_leaves_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [TINY, *launch.SMALL, *launch.text_files(tmp_path), "checkpoint.every=0"]
    arguments += ["checkpoint.final=false", f"logging.directory={tmp_path / 'run'}"]
    for _ in range(2):  # one process can train one run after another
        assert main.main(arguments) == 0
    assert numbers(tmp_path / "run", "train", "loss").keys() == set(range(1, 7))
    assert not list((tmp_path / "run").rglob("step*"))
    out = capsys.readouterr().out
    assert "metrics  " in out
    assert "checkpoint  " not in out
    assert "resume  " not in out
