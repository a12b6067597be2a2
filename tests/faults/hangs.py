"""Jobs in which a rank dies, stops, stays away or differs: `python -m tests.faults.hangs`.

Owns how jobs are run, what must come of each fault, and the table of what did. A job is some
processes over gloo; the store is this process's, as torchrun's agent keeps it, and so outlives any
rank. Nothing may hang: a job that is not over in time is one that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardmuon.planning.report import table
from shardmuon.watchdog import EXIT_CODE
from tests.faults import worker
from tests.faults.worker import LIMIT_S, SILENT_S, Orders

__all__ = ["EXPECTED", "Job", "faults_of", "run"]

# Beside what the watchdog takes: starting, and a machine with few cores.
START_S, SLACK_S = 30.0, 10.0
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "tests.faults.worker"]


class Expected(NamedTuple):
    """What must come of a fault.

    others, itself: exit codes of the other ranks and of the one with the fault; negative: signals.
    seconds: from the fault to the end of the last of the others. text: in the log of some rank.
    """

    others: frozenset[int]
    itself: frozenset[int]
    seconds: float
    text: str = ""


def _ends(seconds: float, itself: int, text: str = "", *, by_watchdog: bool) -> Expected:
    """The others end with an error; gloo's own word counts where a connection breaks."""
    others = {1, EXIT_CODE} if by_watchdog else {1}
    return Expected(frozenset(others), frozenset({itself}), seconds, text)


_DIFFER = Expected(frozenset({1}), frozenset({1}), 0.0, "made different plans; first difference")
EXPECTED = {
    "none": Expected(frozenset({0}), frozenset({0}), 0.0),
    "late": Expected(frozenset({0}), frozenset({0}), 0.0),
    "killed": _ends(SILENT_S, -signal.SIGKILL, by_watchdog=True),
    "killed at any time": _ends(SILENT_S, -signal.SIGKILL, by_watchdog=True),
    "stopped": _ends(LIMIT_S, -signal.SIGSTOP, "watchdog ends the job", by_watchdog=True),
    "stopped at any time": _ends(
        LIMIT_S, -signal.SIGSTOP, "watchdog ends the job", by_watchdog=True
    ),
    "absent": _ends(LIMIT_S, EXIT_CODE, "outside of an optimizer step", by_watchdog=True),
    "raises": _ends(SILENT_S, 1, "this rank cannot read its data", by_watchdog=True),
    "leaves": _ends(LIMIT_S, 0, by_watchdog=True),
    "other runtime": _DIFFER,
    "other bucket size": _DIFFER,
    "other steps": _DIFFER,
    "other shape": _DIFFER,
    "other name": _DIFFER,
    "other order": Expected(frozenset({0}), frozenset({0}), 0.0),
}
"""Named parameters may come in any order: the plan does not depend on it."""


class Job(NamedTuple):
    """What came of a job. codes: exit codes by rank, None: still there in the end.

    seconds: from the last step that the rank with the fault has done to the end of the others.
    """

    fault: str
    who: int
    codes: tuple[int | None, ...]
    seconds: float
    logs: tuple[str, ...]


def run(fault: str, ranks: int, who: int, seed: int) -> Job:
    """Run one job to its end, or for as long as it may take; leaves no process behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    with tempfile.TemporaryDirectory(prefix="shardmuon-job-") as folder:
        processes = [
            context.Process(
                target=worker.work,
                args=(Orders(rank, ranks, store.port, folder, fault, who, seed),),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        others = [process for rank, process in enumerate(processes) if rank != who]
        deadline = time.monotonic() + START_S + EXPECTED[fault].seconds + SLACK_S
        for process in others:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = time.time()
        last_step = _last_step(Path(folder, f"rank{who}.steps"))
        codes = tuple(_end(process, deadline) for process in processes)
        logs = tuple(Path(folder, f"rank{rank}.log").read_text() for rank in range(ranks))
    return Job(fault, who, codes, ended - last_step if last_step else 0.0, logs)


def _last_step(file: Path) -> float:
    """When a rank finished its last step; 0 if it did none."""
    return file.stat().st_mtime if file.exists() else 0.0


def _end(process: multiprocessing.process.BaseProcess, deadline: float) -> int | None:
    """Exit code; a process that stands still has that of its signal, one that runs has None."""
    process.join(min(2.0, max(0.1, deadline - time.monotonic())))
    if process.exitcode is not None or process.pid is None:
        return process.exitcode
    stopped = _is_stopped(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return -signal.SIGSTOP if stopped else None


def _is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0] == "T"


def faults_of(job: Job) -> list[str]:
    """What is wrong with a job; nothing if all came as it must."""
    expected = EXPECTED[job.fault]
    wrong = []
    for rank, code in enumerate(job.codes):
        allowed = expected.itself if rank == job.who else expected.others
        if code not in allowed:
            wrong.append(f"rank {rank} ended with {code}, expected {sorted(allowed)}")
    if expected.seconds and job.seconds > expected.seconds + SLACK_S:
        wrong.append(f"the others took {job.seconds:.1f} s to end")
    if expected.text and not any(expected.text in log for log in job.logs):
        wrong.append(f"no rank said {expected.text!r}")
    return wrong


def campaign(jobs: int, seed: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """(rows of the table, what was wrong) of that many jobs, every fault as often as others."""
    rng = random.Random(seed)
    found: dict[tuple[str, int], list[tuple[Job, list[str]]]] = defaultdict(list)
    for number in range(jobs):
        fault = [*EXPECTED][number % len(EXPECTED)]
        ranks = 8 if number // len(EXPECTED) % 3 == 2 else 4
        job = run(fault, ranks, rng.randrange(ranks), rng.randrange(2**30))
        wrong = faults_of(job)
        found[fault, ranks].append((job, wrong))
        for text in wrong:
            print(f"{fault} on {ranks} ranks, rank {job.who}: {text}\n" + "\n".join(job.logs))
    rows = [_row(fault, ranks, results) for (fault, ranks), results in sorted(found.items())]
    return rows, [text for results in found.values() for _, wrong in results for text in wrong]


def _row(fault: str, ranks: int, results: Sequence[tuple[Job, list[str]]]) -> tuple[str, ...]:
    codes = sorted(
        {str(code) for job, _ in results for r, code in enumerate(job.codes) if r != job.who}
    )
    longest = max(job.seconds for job, _ in results) if EXPECTED[fault].seconds else 0.0
    return (
        fault,
        str(ranks),
        str(len(results)),
        " or ".join(codes),
        f"{longest:.1f}" if longest else "-",
        str(sum(bool(wrong) for _, wrong in results)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hangs")
    parser.add_argument("--jobs", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, wrong = campaign(options.jobs, options.seed)
    header = ("fault of one rank", "ranks", "jobs", "others end with", "seconds at most", "wrong")
    print("\n".join(table(header, rows)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
