"""`trace` as a user starts it, and what `bench` and `trace` refuse."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from shardmuon.tools import command, picture
from tests.training import launch


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on two ranks; a module takes the place of the script."""
    return launch.train("shardmuon", *arguments, ranks=2, script=Path("-m"))


def cells(output: str, first: str) -> dict[str, list[str]]:
    """Cells by the first one of each row of the table whose header starts with `first`."""
    lines = output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{first}  "))
    end = lines.index("", begin)
    rows = [re.split(r"  +", line) for line in lines[begin + 2 : end]]
    return {row[0]: row[1:] for row in rows}


def test_trace_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "trace"
    done = start("trace", "tiny", "--steps", "2", "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    names = ["trace-rank0.json.gz", "trace-rank1.json.gz"]
    assert sorted(path.name for path in folder.glob("trace*")) == names
    for name in names:
        with gzip.open(folder / name, "rt") as file:
            events = json.load(file)["traceEvents"]
        found = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        for range_ in ("tools.step", "shardmuon.prepare.0", "shardmuon.orthogonalize.0"):
            assert found.count(range_) == 2, range_
    rows = cells(done.stdout, "rank")
    assert list(rows) == ["0", "1"]
    for step, schulz, share, planned, talk, _, exposed, _ in rows.values():
        assert 0 < float(schulz) < float(step)
        assert 0 <= float(exposed) <= float(talk) < float(step)
        assert planned == "50.0%"
        assert share.endswith("%")
    shares = [float(row[2].removesuffix("%")) for row in rows.values()]
    assert sum(shares) == pytest.approx(100, abs=0.11)
    if picture.drawable():
        assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert done.stdout.endswith(f"{folder / 'timeline.png'}\n")


def test_a_rank_alone_without_matplotlib_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture, "drawable", lambda: False)
    assert command.main(["trace", "tiny", "--steps", "1", "--folder", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[-1].startswith("no timeline.png: matplotlib is not installed; pip")
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank0.json.gz"]
    assert cells(output, "rank")["0"][3] == "100.0%"


REFUSED = {
    "model": (["bench", "step", "llama2b"], "invalid choice: 'llama2b'"),
    "traced model": (["trace", "llama2b"], "invalid choice: 'llama2b'"),
    "no model": (["bench", "step"], "required: model"),
    "no kind": (["bench"], "required: what"),
    "optimizer": (["bench", "step", "tiny", "--optimizers", "adamw,sgd"], "got 'sgd', expected"),
    "steps": (["trace", "tiny", "--steps", "0"], "must be at least 1, got 0"),
    "no number": (["trace", "tiny", "--steps", "many"], "invalid count value: 'many'"),
    "ranks": (["bench", "scaling", "--ranks", "2,0"], "must be at least 1, got 0"),
    "scaled model": (["bench", "scaling", "--models", "tiny,big"], "got 'big', expected names"),
    "folder": (["bench", "step", "tiny", "--json", "no/such.json"], "there is no folder no"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_code_2(
    case: tuple[list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, part = case
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err


def test_replicas_that_do_not_divide_the_ranks_are_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["bench", "step", "tiny", "--replicate", "2"]) == 2
    message = "--replicate: got 2, expected a divisor of the number of ranks, 1\n"
    assert capsys.readouterr().err == f"shardmuon bench: error: {message}"


def test_a_model_that_does_not_exist_names_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["bench", "step", "llama2b"])
    message = capsys.readouterr().err
    assert all(name in message for name in ("llama1b", "llama8b-half", "gpt160m", "qwen3-moe"))


SHOWN = re.compile(r"^    .*-m shardmuon (.+)$", re.MULTILINE)
PAGES = sorted([*launch.ROOT.glob("*.md"), *(launch.ROOT / "docs").rglob("*.md")])


def test_the_commands_that_pages_show_are_understood() -> None:
    texts = [text for page in PAGES for text in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert len(texts) >= 8
    for text in texts:
        command._parser().parse_args(shlex.split(text, comments=True))
