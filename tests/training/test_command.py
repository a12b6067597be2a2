"""Exit codes and messages of the command line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from shardmuon.exchange import collectives
from shardmuon.training import main, run
from shardmuon.training.load import load
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No runs of the user's to resume; bad input ends before a process group is asked for."""
    monkeypatch.chdir(tmp_path)

    def start(*_: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(collectives, "start", start)
    monkeypatch.setattr(main, "_HEAD_START_S", 0.0)


CASES = {
    "no file": ([], "usage: train.py CONFIG"),
    "override first": (["seed=3"], "usage: train.py CONFIG"),
    "missing file": (["none.yaml"], "none.yaml: cannot be read"),
    "unknown key": ([TINY, "num-steps=3"], "num-steps: unknown key; the nearest valid key is"),
    "wrong type": ([TINY, "optimizer.muon.lr=abc"], "optimizer.muon.lr: got 'abc' (text)"),
    "out of range": ([TINY, "optimizer.muon.momentum=1.0"], "expected a number in [0, 1)"),
    "batch": ([TINY, "data.batch_sequences=9"], "ranks x accumulation.steps = 2 x 1 = 2"),
    "ranks": ([TINY, "mesh.ranks=3"], "mesh.ranks: got 3, but torchrun started 2"),
    "replicas": ([TINY, "mesh.replicate=4"], "mesh.replicate: got 2 ranks, expected a multiple of"),
    "tensor": ([TINY, "mesh.tensor=3"], "mesh.tensor: got 3, expected a divisor of model.heads"),
    "data": ([TINY, "data.source=text", "data.files=[no/*.txt]"], "no file matches 'no/*.txt'"),
    "resume": ([TINY, "checkpoint.resume=no/such"], "no finished checkpoint at no/such"),
    "pattern": ([TINY, "optimizer.to_adamw=['*nothing*']"], "*nothing*"),
    "no matrix": ([TINY, "optimizer.to_adamw=['*']"], "optimizer: no parameter takes Muon"),
}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_line_and_code_2(
    case: tuple[list[str], str],
    rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    arguments, part = case
    assert main.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"train\.py: error: [^\n]*\n", captured.err)
    assert part in captured.err


def test_missing_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")
    assert main.main([TINY, "mesh.device=cuda"]) == 2
    assert "GPUs, expected at least 100" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "docs/configuration.md" in capsys.readouterr().out


def test_bad_configuration_is_refused_without_torch() -> None:
    code = "import sys; sys.argv = ['train.py', 'none.yaml']; import runpy\n"
    code += "try: runpy.run_path('train.py', run_name='__main__')\n"
    code += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    import subprocess

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=launch.ROOT, check=True
    )
    assert result.stdout == "2 False\n"


def test_under_torchrun_one_rank_speaks_for_all() -> None:
    result = launch.train(TINY, "data.batch_sequences=9")
    assert result.returncode != 0
    assert result.stderr.count("train.py: error: ") == 1
    assert re.search(r"exitcode *: 2 ", result.stderr)


def test_alone_the_exit_code_is_2() -> None:
    result = launch.train(TINY, "schedule.step=3", ranks=1)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "train.py: error: command line: schedule.step: unknown key; "
        "the nearest valid key is schedule.steps"
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["c.yaml", "seed=1"], "c.yaml seed=1 checkpoint.resume=auto"),
        (["c.yaml", "checkpoint.resume=none"], "c.yaml checkpoint.resume=auto"),
        (["c.yaml", "seed=1", "seed=2"], "c.yaml seed=2 checkpoint.resume=auto"),
        (["c.yaml", "data.files=[a, b]"], "c.yaml 'data.files=[a, b]' checkpoint.resume=auto"),
    ],
)
def test_resume_command(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "executable", f"{os.getcwd()}/.venv/bin/python")
    command = run.resume_command(load(TINY), arguments)
    assert command == f".venv/bin/python train.py {expected}"


def test_resume_command_lifts_an_early_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/bin/python3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    config = load(TINY, ["schedule.stop_at=3"])
    command = run.resume_command(config, [TINY, "schedule.stop_at=3"])
    assert command == (
        "/opt/bin/python3 -m torch.distributed.run --nnodes 2 --rdzv-backend c10d "
        f"--rdzv-endpoint node7:29400 --nproc-per-node 2 train.py {TINY} "
        "schedule.stop_at=null checkpoint.resume=auto  # on each of 2 nodes"
    )


def test_configurations_are_where_the_readme_says() -> None:
    assert {p.stem for p in Path(TINY).parent.glob("*.yaml")} >= {
        "tiny",
        "adamw-tiny",
        "gpt-124m",
    }
