"""Ranks of train.py as processes that can be killed, each started in a moment.

Owns the processes: they are forked from a server that has imported torch, see the environment that
torchrun would give them, write to log files and end by themselves after a time limit. Signals go
only to processes started here.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["LIMIT_S", "Job", "tiny"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
"""Seconds after which a rank prints its stacks and ends."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one has died."""

_PRELOAD = [
    "shardmuon.training.run",
    "torch._dynamo",
    "tests.faults.jobs",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    # As under torchrun, the store lives with whoever starts the ranks: no port is guessed.
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def tiny(data: Path, folder: Path, *more: str) -> list[str]:
    """Arguments of train.py for a very small run in `folder` on the text files in `data`."""
    return [
        str(ROOT / "configs" / "tiny.yaml"),
        "model.dim=32",
        "model.layers=1",
        "model.heads=2",
        "model.kv_heads=1",
        "model.hidden=48",
        "data.source=text",
        f"data.files=[{data}/*.py]",
        "data.sequence_length=32",
        "data.batch_sequences=4",
        "schedule.steps=40",
        "schedule.warmup_steps=2",
        "schedule.decay_steps=6",
        "evaluation.every=0",
        "evaluation.sequences=8",
        "logging.every=1",
        f"logging.directory={folder}",
        "mesh.timeout_s=120",
        "checkpoint.timeout_s=120",
        *more,
    ]


class Job:
    """`ranks` processes that run `train.py ARGUMENTS`; more than one make a process group.

    before: called in every process with its rank first; must be importable.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        logs: Path,
        before: Callable[[int], None] | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.ranks, self.logs = ranks, logs
        self.started = time.monotonic()
        # A port of its own for every start: the kernel chooses a free one.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            process = context.Process(
                target=_rank,
                args=(rank, ranks, self._store.port, list(arguments), str(logs), before),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    @property
    def running(self) -> bool:
        """True as long as no rank has ended."""
        return all(process.is_alive() for process in self.processes)

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to some of the ranks, all at once."""
        for rank in ranks:
            pid = self.processes[rank].pid
            # The number of a process that has ended may be somebody else's by now.
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, number)

    def kill(self, *victims: int) -> bool:
        """SIGKILL to `victims`, then end the rest as torchrun does; True if SIGTERM was enough."""
        self.send(signal.SIGKILL, *victims)
        self.join(victims, LIMIT_S)
        others = [rank for rank in range(self.ranks) if rank not in victims]
        self.send(signal.SIGTERM, *others)
        calm = self.join(others, GRACE_S)
        self.send(signal.SIGKILL, *others)
        self.join(others, LIMIT_S)
        return calm

    def join(self, ranks: Sequence[int], limit_s: float) -> bool:
        """Wait for these ranks; True if all have ended in time."""
        deadline = time.monotonic() + limit_s
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return not any(self.processes[rank].is_alive() for rank in ranks)

    def finish(self, limit_s: float = LIMIT_S + 20) -> list[int | None]:
        """Exit codes of all ranks, once all have ended.

        The others are killed once one has failed, and all of them after the limit.
        """
        deadline = time.monotonic() + limit_s
        alive = list(self.processes)
        while alive:
            wait([process.sentinel for process in alive], max(0.0, deadline - time.monotonic()))
            failed = any(p.exitcode not in (None, 0) for p in self.processes)
            if failed or time.monotonic() >= deadline:
                self.join(range(self.ranks), GRACE_S)
                self.stop()
            alive = [process for process in self.processes if process.is_alive()]
        return [process.exitcode for process in self.processes]

    def stop(self) -> None:
        """Kill what is left."""
        everyone = range(self.ranks)
        self.send(signal.SIGKILL, *everyone)
        self.join(everyone, LIMIT_S)

    def log(self, rank: int = 0) -> str:
        """What a rank has printed, this start and earlier ones with the same folder."""
        path = self.logs / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def _rank(
    rank: int,
    ranks: int,
    port: int,
    arguments: list[str],
    logs: str,
    before: Callable[[int], None] | None,
) -> None:
    """Body of one process."""
    log = os.open(f"{logs}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=log)
    os.environ.update(_ENVIRONMENT)
    if ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({k: str(v) for k, v in {**numbers, "MASTER_PORT": port}.items()})
    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects make every later collection slow
    if before is not None:
        before(rank)
    from shardmuon.training.main import main

    sys.exit(main(arguments))
