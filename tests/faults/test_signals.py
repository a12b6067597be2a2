"""Runs that are asked to stop: one rank is told, all save, and the next start goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import files, jobs
from tests.faults.trial import Reference, records
from tests.training import launch

STEPS = 12
STOP = 6
MARKER = "preempted"
FORGET = ["checkpoint.every=0", f"schedule.steps={STEPS}"]
"""No checkpoint but at the end, so that it is the signal's."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few text files."""
    folder = tmp_path_factory.mktemp("data")
    launch.text_files(folder)
    return folder


def _signal_in_step_six(number: int, *ranks: int) -> None:
    """Let this rank, if it is among `ranks`, get a signal when it begins its sixth step."""
    from shardmuon.training import loop

    original = loop.Trainer._train_step

    def step(self: loop.Trainer, logged: bool) -> loop.StepResult:
        if self.step == STOP - 1 and self.place.rank in ranks:
            os.kill(os.getpid(), number)
        return original(self, logged)

    loop.Trainer._train_step = step  # type: ignore[method-assign]


def term_on_rank_one(rank: int) -> None:
    """SIGTERM to the rank that writes nothing."""
    _signal_in_step_six(signal.SIGTERM, 1)


def usr1_on_rank_zero(rank: int) -> None:
    """SIGUSR1 to the rank that writes."""
    _signal_in_step_six(signal.SIGUSR1, 0)


def term_on_all_and_no_end_of_the_save(rank: int) -> None:
    """SIGTERM and its echo to both ranks, and storage that hangs at the end of the save."""
    from shardmuon.checkpoint import publish

    def publish_and_hang(temporary: Path, *_: Any) -> Path:
        time.sleep(jobs.LIMIT_S)
        return temporary

    for _ in range(2):
        _signal_in_step_six(signal.SIGTERM, 0, 1)
    publish.publish = publish_and_hang  # type: ignore[assignment]


def losses(folder: Path) -> dict[int, Any]:
    """Numbers of each training step that do not depend on the clock."""
    trained = [r for r in records(folder) if r["event"] == "train"]
    steps = [r["step"] for r in trained]
    assert len(set(steps)) == len(steps)
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in trained}


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    """A run on two ranks that nobody stops, and its folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    return Reference(2, STEPS, data, folder), folder


@pytest.mark.parametrize(
    ("tell", "saves"), [(term_on_rank_one, "false"), (usr1_on_rank_zero, "true")]
)
def test_a_signal_to_one_rank_stops_all(
    tell: Callable[[int], None],
    saves: str,
    data: Path,
    unbroken: tuple[Reference, Path],
    tmp_path: Path,
) -> None:
    arguments = jobs.tiny(data, tmp_path, *FORGET, f"checkpoint.async={saves}")
    stopped = jobs.Job(arguments, 2, tmp_path / "logs", tell)
    assert stopped.finish() == [0, 0], stopped.log()
    assert json.loads((tmp_path / MARKER).read_text()) == {"step": STOP}
    assert [files.step_of(path) for path in files.folders(tmp_path / "checkpoints")] == [STOP]
    assert max(losses(tmp_path)) == STOP
    assert "stopped by a signal" in stopped.log()

    resumed = jobs.Job(arguments, 2, tmp_path / "logs")
    assert resumed.finish() == [0, 0], resumed.log()
    assert not (tmp_path / MARKER).exists()
    reference, folder = unbroken
    assert losses(tmp_path) == losses(folder)
    last = files.folders(tmp_path / "checkpoints")[-1]
    assert files.step_of(last) == STEPS
    assert files.same(files.read(last), reference.at(STEPS))


def test_a_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    arguments = jobs.tiny(data, tmp_path, *FORGET)
    job = jobs.Job(arguments, 2, tmp_path / "logs", term_on_all_and_no_end_of_the_save)
    deadline = time.monotonic() + 180
    written = tmp_path / "checkpoints" / f"step_{STOP:08d}.tmp" / files.INDEX
    while job.running and not written.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert written.exists(), job.log()
    assert not job.join((0, 1), 1.5)  # the echo has not ended them; its time is over now
    told = time.monotonic()
    job.send(signal.SIGUSR1, 0, 1)
    assert job.join((0, 1), 60)
    assert time.monotonic() - told < 10
    assert [process.exitcode for process in job.processes] == [128 + signal.SIGUSR1] * 2
    assert not (tmp_path / MARKER).exists()
    assert files.folders(tmp_path / "checkpoints") == []


def start_torchrun(data: Path, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun with two ranks of a run that would take hours."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "300"]
    endless = ["schedule.steps=100000", "checkpoint.every=0"]
    script = [str(jobs.ROOT / "train.py"), *jobs.tiny(data, folder, *endless)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*torchrun, *options, "--nproc-per-node", "2", *script],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)},
        )


def test_torchrun_passes_signals_on(data: Path, tmp_path: Path) -> None:
    """Twice at once, because most of the time is imports; each is told in another way."""
    numbers = {tmp_path / number.name: number for number in (signal.SIGTERM, signal.SIGUSR1)}
    for folder in numbers:
        folder.mkdir()
    launchers = {folder: start_torchrun(data, folder) for folder in numbers}
    try:
        for folder, launcher in launchers.items():
            deadline = time.monotonic() + 180
            while launcher.poll() is None and len(records(folder)) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            launcher.send_signal(numbers[folder])
        for folder, launcher in launchers.items():
            # torchrun says no more than that there was a signal; that is what the marker is for.
            assert launcher.wait(120) == 1, (folder / "log").read_text()
            step = json.loads((folder / MARKER).read_text())["step"]
            newest = files.folders(folder / "checkpoints")[-1]
            assert files.step_of(newest) == step == max(losses(folder))
            assert len(list(newest.glob("*.distcp"))) == 2
    finally:
        for launcher in launchers.values():
            # First in good order: torchrun leaves its ranks behind when it is killed.
            launcher.terminate()
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
