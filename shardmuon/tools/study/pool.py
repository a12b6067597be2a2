"""Long-lived processes that take one run of a study after another.

Owns the processes: they are spawned once, so that imports and a GPU's context are paid once, and
one that dies fails its run and is replaced. Knows nothing of stages.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from shardmuon.tools.study.plan import Numbers, Task
from shardmuon.tools.study.worker import serve

__all__ = ["Pool"]


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    pipe: Connection
    task: Task | None = None


class Pool:
    """`with Pool(count, folder):` has `count` processes, whose runs write below `folder`."""

    def __init__(self, count: int, folder: Path) -> None:
        self._count, self._folder = count, folder
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            if error is None and worker.process.is_alive():
                worker.pipe.send(None)
                worker.process.join(30)
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()

    def run(
        self,
        tasks: Sequence[Task],
        at_most: int,
        may_start: Callable[[Task], bool],
        take: Callable[[Task, Numbers], None],
    ) -> None:
        """Perform `tasks` in their order, `at_most` at once; `take` gets each result.

        may_start: asked before each; after the first "no" only those that run are finished.
        """
        waiting = list(reversed(tasks))
        while True:
            busy = [worker for worker in self._workers if worker.task is not None]
            while waiting and len(busy) < min(at_most, self._count):
                if not may_start(waiting[-1]):
                    waiting.clear()
                    break
                busy.append(self._start(waiting.pop()))
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe in ready:
                    assert worker.task is not None
                    task, worker.task = worker.task, None
                    take(task, self._receive(worker))

    def _start(self, task: Task) -> _Worker:
        idle = next((worker for worker in self._workers if worker.task is None), None)
        worker = idle or self._spawn()
        directory = str(self._folder / "runs" / str(worker.number))
        logging = dataclasses.replace(task.config.logging, directory=directory)
        worker.pipe.send(dataclasses.replace(task.config, logging=logging))
        worker.task = task
        return worker

    def _spawn(self) -> _Worker:
        number = min(set(range(self._count)) - {worker.number for worker in self._workers})
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, number), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        worker = _Worker(number, process, ours)
        self._workers.append(worker)
        return worker

    def _receive(self, worker: _Worker) -> dict[str, Any]:
        try:
            numbers: dict[str, Any] = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            self._workers.remove(worker)
            code = worker.process.exitcode
            return {"status": "failed", "error": f"its process ended with {code}", "loss": None}
        return numbers
