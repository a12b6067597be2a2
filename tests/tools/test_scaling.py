"""`bench scaling`: which runs there are, how they go on when some fail, and what the table says."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmuon.tools import bench_scaling, command, scaling_table
from shardmuon.tools.bench_scaling import Options, Run, runs
from shardmuon.training.load import ConfigError
from tests.training import launch


def test_every_model_on_every_mesh() -> None:
    names = [each.name for each in runs(Options(models=("tiny", "small")), gpus=0)]
    meshes = ["2", "4", "2x2", "8", "2x4"]
    assert names == [f"{model}-{mesh}" for model in ("tiny", "small") for mesh in meshes]


@pytest.mark.parametrize(
    ("gpus", "names"),
    [(2, ["tiny-2"]), (5, ["tiny-2", "tiny-4", "tiny-2x2"]), (16, ["tiny-2", "tiny-4"])],
)
def test_as_many_gpus_as_there_are(gpus: int, names: list[str]) -> None:
    assert [each.name for each in runs(Options(models=("tiny",)), gpus)][: len(names)] == names


def test_replicas_must_divide_the_ranks_and_leave_shards() -> None:
    options = Options(models=("tiny",), ranks=(1, 4, 6), replicate=(1, 2, 3, 4))
    names = ["tiny-1", "tiny-4", "tiny-2x2", "tiny-6", "tiny-2x3", "tiny-3x2"]
    assert [each.name for each in runs(options, gpus=8)] == names


@pytest.mark.parametrize(
    ("ranks", "gpus", "part"),
    [((2, 16), 8, "got 16, expected at most 8, one per GPU"), (None, 1, "got none, expected at")],
)
def test_no_two_ranks_share_a_gpu(ranks: tuple[int, ...] | None, gpus: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        runs(Options(ranks=ranks), gpus)


def numbers(ranks: int, replicate: int, step_ms: float, **ours: float) -> dict[str, Any]:
    """What `bench step` writes, as far as the table reads it."""
    empty = dict.fromkeys(("exposed", "imbalance", "makespan_ms"))
    optimizers = {
        "adamw": {"step_ms": 2.0, "iteration_ms": 100.0, **empty},
        "shardmuon": {"step_ms": step_ms, "iteration_ms": 98.0 + step_ms, **empty, **ours},
    }
    tree = {"model": "tiny", "ranks": ranks, "replicate": replicate, "steps": 12}
    tree |= {"sequences": 2, "tokens": 32}
    return {**tree, "device": "A GPU", "torch": "2.13", "optimizers": optimizers}


EXPECTED = [
    "tiny, -, 8, HSDP 2 x 4, 2.0 / 500.0 / 5.0, 100.0 / - / 103.0, +3.0 %, -, -, -, -, 1.00 (1.00)",
    "gpt160m, 2 x 32, 2, FSDP, 2.0 / - / 16.0, 100.0 / - / 114.0, +14.0 %, -, -, -, -, 1.00 (1.00)",
    "gpt160m, 2 x 32, 8, FSDP, 2.0 / - / 4.0, 100.0 / - / 102.0, +2.0 %, 12.5 %, 1.020 / 1.100, "
    "3.20 / 3.50, 1.25, 0.25 (0.25)",
    "gpt160m, 4 x 32, 8, FSDP, 2.0 / - / 3.0, 100.0 / - / 101.0, +1.0 %, -, -, -, -, 1.00 (1.00)",
]


def test_the_table(tmp_path: Path) -> None:
    promised = {"imbalance": 1.02, "makespan_ms": 3.2}
    found = {"measured_imbalance": 1.1, "measured_makespan_ms": 3.5, "exposed": 0.125}
    trees = [numbers(8, 2, 5.0), numbers(8, 1, 4.0, **promised, **found), numbers(2, 1, 16.0)]
    trees[0]["optimizers"]["vanilla"] = {"step_ms": 500.0, "iteration_ms": None}
    trees.append(numbers(8, 1, 3.0))
    trees[0]["sequences"] = 0
    trees[3]["sequences"] = 4
    trees[2]["model"] = trees[1]["model"] = trees[3]["model"] = "gpt160m"
    trees[2]["torch"] = "2.11"
    for number, tree in enumerate(trees):
        (tmp_path / f"{number}.json").write_text(json.dumps(tree))
    (tmp_path / "tiny-4.part").write_text("{")  # of a run that was interrupted
    lines = scaling_table.table(scaling_table.read(tmp_path))
    assert lines[:3] == ["A GPU, torch 2.13, 12 steps", "A GPU, torch 2.11, 12 steps", ""]
    cells = [line.strip("| ").split(" | ") for line in lines[3:]]
    assert cells[0][4:6] == [
        f"{of} ms: adamw / vanilla / shardmuon" for of in ("step", "iteration")
    ]
    assert len({len(row) for row in [cells[0], *cells[2:]]}) == 1
    assert cells[2:] == [row.split(", ") for row in EXPECTED]


def test_a_table_without_shardmuon_has_empty_cells() -> None:
    tree = numbers(2, 1, 16.0)
    del tree["optimizers"]["shardmuon"]
    row = scaling_table.table([tree])[-1]
    assert row == "| tiny | 2 x 32 | 2 | FSDP | 2.0 | 100.0 | - | - | - | - | - | - |"


def test_files_of_other_commands_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "scaling", "--table", "--folder", str(tmp_path)]
    assert command.main(asked) == 2
    assert "there are no numbers in" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text('{"ranks": 2}')
    assert command.main(asked) == 2
    assert "plan.json was not written by bench step" in capsys.readouterr().err


SCRIPTS = {"2": "exit(3)", "4": "import time; time.sleep(60)", "2x2": "print('no file')"}


def test_a_run_that_fails_or_hangs_stops_no_other_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def pretend(each: Run, _: Options, file: Path) -> list[str]:
        made.append(each.name)
        tree = json.dumps(numbers(each.ranks, each.replicate, 5.0))
        script = SCRIPTS.get(
            each.name.removeprefix("tiny-"), f"open({str(file)!r}, 'w').write({tree!r})"
        )
        return [sys.executable, "-c", script]

    monkeypatch.setattr(bench_scaling, "_command", pretend)
    monkeypatch.setattr(bench_scaling, "_gpus", lambda: 0)
    options = Options(models=("tiny",), seconds=5, folder=tmp_path / "new" / "folder")
    with pytest.raises(ChildProcessError, match=r"3 run\(s\) failed: tiny-2, tiny-4, tiny-2x2"):
        bench_scaling.run(options)
    output = capsys.readouterr().out
    assert f"tiny-2: failed, exit code 3; see {options.folder / 'tiny-2.log'}\n" in output
    assert "tiny-4: failed, not done after 5 s\n" in output
    assert "tiny-2x2: failed, exit code 0; see" in output
    assert re.search(r"^tiny-2x4: done in \d+ s$", output, re.MULTILINE)
    assert output.count("\n| tiny | 2 x 32 | 8 |") == 2
    assert made == ["tiny-2", "tiny-4", "tiny-2x2", "tiny-8", "tiny-2x4"]
    made.clear()
    monkeypatch.setattr(sys.modules[__name__], "SCRIPTS", {})
    bench_scaling.run(replace(options, ranks=(8, 4)))
    assert made == ["tiny-4", "tiny-2x2"]
    output = capsys.readouterr().out
    assert output.startswith("tiny-8: there already\ntiny-2x4: there already\ntiny-4: done in")
    assert output.count("\n| tiny |") == 4


def test_after_the_minutes_no_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_scaling, "_gpus", lambda: 0)
    monkeypatch.setattr(time, "monotonic", iter([0.0, 60.0]).__next__)
    options = Options(models=("tiny",), ranks=(2,), sequences=3, minutes=1, folder=tmp_path)
    with pytest.raises(ChildProcessError, match="tiny-2-batch3"):
        bench_scaling.run(options)
    assert "tiny-2-batch3: failed, no time was left\n" in capsys.readouterr().out


def test_the_batch_is_that_of_the_command() -> None:
    each, file = Run("tiny", 4, 2, 3), Path("numbers.json")
    line = " ".join(bench_scaling._command(each, Options(steps=7), file))
    assert "--standalone --nproc-per-node 4 -m shardmuon bench step tiny --optimizers" in line
    assert line.endswith("--steps 7 --sequences 3 --replicate 2 --json numbers.json")


def test_it_is_not_started_by_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main(["bench", "scaling"]) == 2
    assert "starts torchrun itself" in capsys.readouterr().err


def test_bench_scaling_on_two_ranks(tmp_path: Path) -> None:
    done = launch.train(
        *("shardmuon", "bench", "scaling", "--models", "tiny", "--ranks", "2", "--steps", "3"),
        *("--optimizers", "adamw,shardmuon", "--folder", str(tmp_path)),
        *("--seconds", str(launch.TIMEOUT_S - 10)),
        ranks=1,
        script=Path("-m"),
    )
    log = (tmp_path / "tiny-2.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert "Warning" not in done.stderr + log
    found = json.loads((tmp_path / "tiny-2.json").read_text())
    assert [found[key] for key in ("model", "ranks", "replicate", "steps")] == ["tiny", 2, 1, 3]
    assert list(found["optimizers"]) == ["adamw", "shardmuon"]
    for name, each in found["optimizers"].items():
        assert 0 < each["step_ms"] < each["iteration_ms"], name
        assert each["first_steps_s"] > 0
        assert each["peak_gb"] is None
        ours = name == "shardmuon"
        assert each["imbalance"] == (1.0 if ours else None)
        for key in ("exposed", "makespan_ms", "measured_makespan_ms", "measured_imbalance"):
            assert (each[key] is not None) == ours, (name, key)
    ours = found["optimizers"]["shardmuon"]
    assert 0 < ours["exposed"] < 1
    assert 1 <= ours["measured_imbalance"] <= 2
    assert min(ours["makespan_ms"], ours["measured_makespan_ms"]) > 0
    assert_text(log, found)
    assert done.stdout.splitlines()[0].startswith("tiny-2: done in ")
    row = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert row[:4] == ["tiny", "2 x 32", "2", "FSDP"]
    assert row[4].endswith(f" / {ours['step_ms']:.1f}")
    assert row[8] == f"1.000 / {ours['measured_imbalance']:.3f}"


def assert_text(log: str, found: dict[str, Any]) -> None:
    """What `bench step` prints says the same as its file."""
    ours, adamw = (found["optimizers"][name] for name in ("shardmuon", "adamw"))
    rows = {line.split("  ")[0]: re.split(r"  +", line) for line in log.splitlines()}
    assert rows["shardmuon"][1] == f"{ours['step_ms']:.1f}"
    assert rows["shardmuon"][-1] == f"1.000 / {ours['measured_imbalance']:.3f}"
    assert rows["adamw"][3:] == ["-", rows["adamw"][4], "-", "-"]
    assert "measured adamw\nmeasured shardmuon\n" in log
    first, second = found["summary"]
    assert first == "shardmuon over vanilla: step - times as fast, iteration - times as fast"
    over = ours["iteration_ms"] / adamw["iteration_ms"] - 1
    assert second == f"iteration with shardmuon over AdamW's: {over:+.1%}"
    assert f"{first}\n{second}\n" in log
