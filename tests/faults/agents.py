"""A torchrun agent and its workers as a node of a run, which can be lost.

Owns the processes: signals go only to an agent started here and to its children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults import jobs

__all__ = ["Node", "free_port"]


class Node:
    """One torchrun agent and the workers that it starts; ends with `stop`."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, **settings: str) -> None:
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
        environment = {
            **inherited,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(jobs.ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **settings,
        }
        with log.open("a") as out:
            self.agent = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment
            )

    def workers(self) -> dict[int, int]:
        """Number of the process by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if _parent(entry) == self.agent.pid and (rank := _rank(entry)) is not None:
                    found[rank] = int(entry.name)
        return found

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to workers."""
        workers = self.workers()
        for rank in ranks:
            os.kill(workers[rank], number)

    def lose(self) -> None:
        """End agent and workers as a node that loses power does."""
        workers = self.workers().values()
        self.agent.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()

    def stop(self) -> None:
        """Leave nothing behind."""
        if self.agent.poll() is None:
            self.lose()


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _rank(entry: Path) -> int | None:
    """The rank of a process; None if it is none."""
    for variable in (entry / "environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == b"RANK":
            return int(value)
    return None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
