"""Runs over two nodes, and the files that start them: `python -m tests.faults.nodes`, in short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import jobs, nodes
from tests.faults.agents import free_port
from tests.faults.trial import records

LAUNCH = jobs.ROOT / "configs" / "launch"
QUICK = ["worker killed", "node lost, not replaced"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> nodes.Reference:
    """A run that was left alone."""
    return nodes.prepare(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", QUICK)
def test_losses_are_those_of_an_unbroken_run(
    name: str, reference: nodes.Reference, tmp_path: Path
) -> None:
    outcome = nodes.play(name, reference, tmp_path / "run")
    logs = "\n".join(log.read_text() for log in (tmp_path / "run").glob("node*.log"))
    assert not outcome.wrong, f"{outcome}\n{logs}"


@pytest.mark.parametrize("name", ["torchrun.sh", "train.sbatch"])
def test_launch_files_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / name)], check=True, timeout=20)
    assert os.access(LAUNCH / name, os.X_OK)


def _stubs(folder: Path) -> None:
    """`srun` and `scontrol` of a cluster of this machine alone; requeues are written down."""
    srun = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\necho $$ > "$AGENT"\nexec "$@"\n'
    scontrol = (
        '#!/bin/bash\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$ASKED"; fi\n'
    )
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def _submit(folder: Path, *arguments: str, start: int = 0) -> subprocess.Popen[bytes]:
    """Run the batch script as Slurm would on one node with two ranks."""
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "AGENT": str(folder / "agent"),
        "ASKED": str(folder / "asked"),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": "77",
        "SLURM_RESTART_COUNT": str(start),
        "PORT": str(free_port()),
        "RANKS": "2",
        "LOCAL_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(jobs.ROOT),
    }
    script = [str(LAUNCH / "train.sbatch"), str(folder / "run"), *arguments]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            script, stdout=log, stderr=subprocess.STDOUT, cwd=jobs.ROOT, env=environment
        )


def test_the_batch_script_asks_to_go_on_after_a_signal_only(
    reference: nodes.Reference, tmp_path: Path
) -> None:
    _stubs(tmp_path)
    run = tmp_path / "run"
    endless = jobs.tiny(reference.data, run, "schedule.steps=100000", "checkpoint.every=0")
    job = _submit(tmp_path, *endless)
    try:
        deadline = time.monotonic() + 120
        while len(records(run)) < 4 and job.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        # To the processes of the step, as Slurm does: not to the script.
        os.kill(int((tmp_path / "agent").read_text()), signal.SIGUSR1)
        assert job.wait(120) == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "asked").read_text() == "requeue 77\n"
        step = json.loads((run / "preempted").read_text())["step"]
        again = _submit(tmp_path, *endless, f"schedule.stop_at={step + 2}", start=1)
        assert again.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            os.kill(int((tmp_path / "agent").read_text()), signal.SIGTERM)
            job.wait(120)
    begun = [r["step"] for r in records(run) if r["event"] == "start"]
    assert begun == [0, step]
    assert records(run)[-1]["step"] == step + 2
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert not (run / "preempted").exists()


def test_the_batch_script_ends_with_an_error_where_the_run_does(tmp_path: Path) -> None:
    _stubs(tmp_path)
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 3\n")
    job = _submit(tmp_path, "none.yaml")
    assert job.wait(60) == 3
    assert not (tmp_path / "asked").exists()
