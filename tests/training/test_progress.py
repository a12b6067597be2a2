"""What a run shows: rows of blocks, the view at several widths, lines, and a real terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardmuon.training import progress, sparks
from shardmuon.training.live import Live
from shardmuon.training.load import ConfigError, as_tree, load
from shardmuon.training.progress import Lines, Pace, Silent, choose
from shardmuon.training.view import View, layout
from tests.training import launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")
NUMBERS = {
    "loss": 1.5,
    "tokens_per_s": 12345.0,
    "lr": {"muon.0": 0.02, "adamw.1": 0.004, "adamw.2": 0.004},
    "grad_norm": 0.25,
    "memory_bytes": 3.2e9,
    "seconds": {"forward_backward": 0.3, "optimizer": 0.1, "step": 0.42},
}
EVALUATION = {"loss": 2.0, "bits_per_byte": 2.885}


def start(ranks: int = 2, loads: Sequence[int] | None = (7, 7)) -> dict[str, Any]:
    return {"config": as_tree(load(TINY)), "ranks": ranks, "loads_flops": loads}


def filled(ranks: int, loads: Sequence[int] | None) -> View:
    view = View()
    view.write("start", 0, start(ranks, loads))
    for step in range(1, 200):
        view.write("train", step, NUMBERS | {"loss": 6 - step / 50})
        view.pace.advance(step)
    view.write("evaluate", 100, EVALUATION)
    view.events.append((100, "saved " + 30 * "folder/"))
    return view


def text_of(view: View, width: int, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(layout(view, width, height))
    return console.export_text().splitlines()


def test_a_chart_falls_with_its_values() -> None:
    rows, top, bottom = sparks.chart([8.0, 6.0, 4.0, 2.0], 10, 1)
    assert (rows, top, bottom) == (["█▆▃▁"], 8.0, 2.0)
    assert sparks.chart([16.0, 12.0, 1.0], 3, 2)[0] == ["█▄ ", "██▁"]
    assert sparks.chart([], 5, 2)[0] == ["", ""]
    assert sparks.chart([1.0, 1.0], 5, 1)[0] == ["▁▁"]


def test_the_first_fall_does_not_flatten_the_rest() -> None:
    values = [100.0] + [2.0 - n / 20 for n in range(19)]
    rows, top, _ = sparks.chart(values, 20, 1)
    assert top < 2
    assert len(set(rows[0])) > 6


def test_many_values_become_means_of_neighbours() -> None:
    series = sparks.Series(most=4)
    for number in range(8):
        series.add(float(number))
    series.add(float("nan"))
    assert series.means == [0.5, 2.5, 4.5, 6.5]
    for number in range(100_000):
        series.add(float(number))
    assert len(series.means) <= 4


def test_loads_of_many_ranks_share_cells() -> None:
    assert sparks.heat_row([8, 4, 0, 8], 10) == "█▄·█"
    assert sparks.heat_row([1] * 1000 + [0] * 24, 64).endswith("█·")
    assert sparks.bar(0.5, 5) == "██▌"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("ranks", [1, 2, 1024])
def test_the_view_fits(width: int, ranks: int) -> None:
    lines = text_of(filled(ranks, [10 + n % 3 for n in range(ranks)]), width)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 24
    text = "\n".join(lines)
    for part in (
        "step 199 of 250",
        f"{ranks:,} rank",
        "2.0200",
        "12,345 tokens/s",
        "gradient norm 0.25",
        "memory 3.2 GB",
        "muon 2.00e-02  adamw 4.00e-03",
        "forward+backward 300 ms",
        "optimizer 100 ms",
        "2.0000 (2.885 bits per byte)",
        "saved folder/",
    ):
        assert part in text, part
    assert ("rank loads" in text) == (ranks > 1)


def test_the_view_of_a_low_terminal_is_short() -> None:
    assert len(text_of(filled(2, [1, 1]), 80, height=14)) <= 14


def test_the_view_before_the_first_step_and_without_muon() -> None:
    view = View()
    view.write("start", 0, start(4, None))
    text = "\n".join(text_of(view, 80))
    assert "the first step is under way" in text
    assert "rank loads" not in text


def test_a_loss_that_is_not_finite_is_shown() -> None:
    view = filled(2, None)
    view.write("train", 200, NUMBERS | {"loss": None, "grad_norm": None})
    assert "nan" in "\n".join(text_of(view, 80))


def test_prints_and_warnings_stay_whole_and_the_cursor_visible() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40)
    live = Live(console)
    live.write("start", 0, start())
    print("a print of the library")
    print("somewhere.py:1: UserWarning: a warning", file=sys.stderr)  # as warnings do
    live.write("train", 10, NUMBERS)
    live.advance(10)
    live.say(10, "saved here")
    # Already now: a process that is killed restores nothing.
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    live.close()
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\na print of the library\n" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", written)
    assert "somewhere.py:1: UserWarning: a warning" in written
    assert "saved here" in written[written.rindex("step 10 of") :]


def test_a_narrower_terminal_begins_on_a_clean_screen() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    live = Live(console)
    live.write("start", 0, start())
    console.width = 60
    live.close()
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" in written
    last = written[written.rindex("\x1b[2J") :]
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).splitlines()
    assert max(map(len, rows)) <= 60


@pytest.mark.parametrize(
    ("setting", "first", "kind"),
    [
        ("live", True, "live"),
        ("auto", True, "lines"),
        ("none", True, "none"),
        ("live", False, "none"),
    ],
)
def test_choice(setting: Any, first: bool, kind: str) -> None:
    assert choose(setting, first) == kind


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"TERM": "xterm"}, "live"),
        ({"TERM": "xterm", "CI": "false"}, "live"),
        ({"TERM": "xterm", "CI": "true"}, "lines"),
        ({"TERM": "dumb"}, "lines"),
        ({}, "lines"),
    ],
)
def test_choice_on_a_terminal(
    variables: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert choose("auto", True) == kind
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert choose("auto", True) == "lines"


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    assert choose("auto", True) == "lines"
    progress.check("auto")
    with pytest.raises(ConfigError, match=r"needs rich: pip install 'shardmuon\[train\]'"):
        progress.check("live")


def test_pace_leaves_the_first_step_out() -> None:
    now = [0.0]
    pace = Pace(0, 10, clock=lambda: now[0])
    assert pace.eta() == "-"
    for step, moment in ((1, 100.0), (2, 110.0), (3, 120.0)):
        now[0] = moment
        pace.advance(step)
    assert pace.eta() == "1:10"
    assert progress.clock_text(3 * 86400 + 3723) == "3 d 1:02:03"


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.write("start", 10, start())
    lines.advance(11)
    lines.write("train", 11, NUMBERS)
    lines.write("evaluate", 11, EVALUATION)
    lines.say(11, "saved here")
    lines.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 11/250  loss 1.500  tok/s 12,345  lr 2.00e-02  gnorm 0.25  ETA -",
        "step 11  validation loss 2.0000 (2.885 bits per byte)",
        "step 11  saved here",
    ]


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    silent.write("train", 1, NUMBERS)
    silent.advance(1)
    silent.say(1, "x")
    silent.close()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def in_terminal(command: Sequence[str], columns: int) -> tuple[str, int]:
    """(all that the command wrote to a terminal of its own, its exit code)."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.chdir(launch.ROOT)
        os.environ.update(TERM="xterm-256color", OMP_NUM_THREADS="1", CI="")
        for name in ("COLUMNS", "LINES", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        os.execv(command[0], list(command))
    written = b""
    while True:
        try:
            some = os.read(terminal, 65536)
        except OSError:  # Linux says so when the last process has closed the terminal
            break
        if not some:
            break
        written += some
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return written.decode(), os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_on_a_real_terminal(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and when training ends by an error: the last numbers stay, the cursor is visible."""
    (tmp_path / "text").mkdir()
    script = "train.py"
    if fails:
        script = str(tmp_path / "failing.py")
        Path(script).write_text(
            "import sys\nfrom shardmuon.training import loop, main\n"
            "def save(self): raise OSError('the disk is gone')\n"
            "loop.Trainer.save = save\nsys.exit(main.main(sys.argv[1:]))\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    small = [*launch.SMALL, *launch.text_files(tmp_path / "text")]
    command = [sys.executable, script, TINY, *small, f"logging.directory={tmp_path / 'run'}"]
    written, code = in_terminal(command, columns=72)
    assert code == (1 if fails else 0), written
    drawn = written[written.rindex("rank loads" if "rank loads" in written else "lr  ") :]
    assert ("OSError: the disk is gone" if fails else "train longer") in drawn
    last = written[written.rindex("step 3 of 6" if fails else "step 6 of 6   ") :]
    assert "tokens/s" in last
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "it/s" not in written
