"""Pools of worker processes that play ranks, one pool per world size, started when first needed.

Owns the processes, their process groups (gloo, or NCCL with SHARDMUON_TEST_BACKEND=nccl) and the
watchdog: a case that does not return in time fails, prints every rank's stack and costs the pool
its processes. Knows nothing of the library; a case is an importable function plus picklable
arguments.

One pool per world size, because a one-axis device mesh over all ranks uses the default group:
a smaller mesh inside a larger pool would test another thing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankFailure", "RankPools", "RankTimeout", "backend", "capacity", "device"]

T = TypeVar("T")

LIMIT_S = 60.0
"""Seconds a case may take unless it says otherwise."""
GRACE_S = 4.0
"""Seconds the other ranks get to return once one rank has raised."""
GROUP_TIMEOUT_S = 300.0
"""Longer than any case, so that the watchdog speaks before the process group does."""

_PRELOAD = [
    "numpy",
    "torch",
    "torch._dynamo",  # the first optimizer or DTensor of a process imports it, for seconds
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "pytest",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class RankError:
    """What one rank raised: the exception's class name, its text, and the traceback as text."""

    rank: int
    type_name: str
    message: str
    traceback: str


class RankFailure(AssertionError):
    """Some rank raised or died; the text holds every error and every hung rank's stack."""

    def __init__(self, errors: list[RankError], notes: str = "") -> None:
        self.errors = errors
        parts = [f"rank {e.rank}: {e.type_name}: {e.message}\n{e.traceback}" for e in errors]
        super().__init__("\n".join([*parts, notes]))


class RankTimeout(AssertionError):
    """Some rank did not return in time; the text holds every rank's stack."""


def backend() -> str:
    """Backend of all pools: "gloo", or "nccl" if the environment asks for it."""
    return os.environ.get("SHARDMUON_TEST_BACKEND", "gloo")


def ranks_per_gpu() -> int:
    """Ranks that share one GPU, 1 unless the environment says otherwise."""
    return int(os.environ.get("SHARDMUON_TEST_RANKS_PER_GPU", "1"))


def capacity() -> int:
    """Largest world that NCCL can serve on this machine's GPUs, 0 with gloo."""
    return torch.cuda.device_count() * ranks_per_gpu() if backend() == "nccl" else 0


def device() -> torch.device:
    """Device of the calling rank's tensors; the CPU in the process that runs the tests."""
    if backend() == "nccl" and dist.is_initialized():
        return _gpu(dist.get_rank())
    return torch.device("cpu")


def _gpu(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


def _serve(rank: int, world: int, folder: str, connection: Connection) -> None:
    """Body of one worker: join the group, then run cases until the parent hangs up."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    if backend() == "nccl":
        torch.cuda.set_device(_gpu(rank))
        if ranks_per_gpu() > 1:
            # NCCL refuses two ranks on one GPU of a host; ranks of "other hosts" use sockets.
            os.environ["NCCL_HOSTID"] = f"rank{rank}"
    dist.init_process_group(
        backend(),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        device_id=_gpu(rank) if backend() == "nccl" else None,
    )
    connection.send_bytes(pickle.dumps(None))
    while True:
        gc.collect()
        gc.freeze()  # what lives on, modules above all, makes every later collection slow
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone: no goodbye to ranks that are gone too
        connection.send_bytes(_answer(rank, message))


def _answer(rank: int, message: bytes) -> bytes:
    """Run one pickled (function, arguments) and pickle what came of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function, arguments = pickle.loads(message)
            return pickle.dumps(function(*arguments))
    except BaseException as error:  # DCP's errors do not derive from Exception
        trace = traceback.format_exc()
        return pickle.dumps(RankError(rank, type(error).__name__, str(error), trace))


class _Pool:
    """The processes of one world size; after a failure `alive` is False and it must be replaced."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="shardmuon-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        with _environment(_ENVIRONMENT):
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, world, self._folder.name, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        self._collect(time.monotonic() + 2 * LIMIT_S)

    def call(
        self, function: Callable[..., T], arguments: tuple[object, ...], limit_s: float
    ) -> Any:
        """Answers of all ranks in rank order, RankError objects included; may kill the pool."""
        message = pickle.dumps((function, arguments))
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank shows when it is read
                connection.send_bytes(message)
        return self._collect(time.monotonic() + limit_s)

    def _collect(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.world:
            waiting = [c for r, c in enumerate(self._connections) if r not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(answers)
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], RankError):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [answers[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.alive = False
            self._processes[rank].join(1)
            text = f"process ended with exit code {self._processes[rank].exitcode}"
            return RankError(rank, "ProcessDied", text, self._log(rank))

    def _give_up(self, answers: dict[int, Any]) -> None:
        hung = [rank for rank in range(self.world) if rank not in answers]
        stacks = self._stacks()
        self.stop()
        notes = f"ranks that did not return: {hung}\n{stacks}"
        errors = [a for a in answers.values() if isinstance(a, RankError)]
        if errors:
            raise RankFailure(errors, notes)
        raise RankTimeout(notes)

    def _stacks(self) -> str:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handler runs in each process as soon as it is scheduled
        return "\n".join(f"--- rank {r} ---\n{self._log(r)}" for r in range(self.world))

    def _log(self, rank: int) -> str:
        return Path(self._folder.name, f"rank{rank}.log").read_text(errors="replace")[-8000:]

    def stop(self) -> None:
        """Kill this pool's processes; only these."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


class RankPools:
    """All pools of a test session: `run` sends a case to every rank of a world."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def run(
        self, world: int, function: Callable[..., T], *arguments: object, limit_s: float = LIMIT_S
    ) -> list[T]:
        """Results of `function(*arguments)` in rank order.

        RankFailure if any rank raised, RankTimeout if any hung; both restart the pool.
        """
        answers = self._call(world, function, arguments, limit_s)
        errors = [a for a in answers if isinstance(a, RankError)]
        if errors:
            self._drop(world)
            raise RankFailure(errors)
        return answers

    def run_expecting_error(
        self, world: int, function: Callable[..., Any], *arguments: object, limit_s: float = LIMIT_S
    ) -> list[RankError]:
        """What each rank raised, in rank order; AssertionError if a rank returned or hung."""
        answers = self._call(world, function, arguments, limit_s)
        calm = [rank for rank, a in enumerate(answers) if not isinstance(a, RankError)]
        if calm:
            self._drop(world)
            raise AssertionError(f"no error on ranks {calm} of {world}")
        return answers

    def _call(
        self, world: int, function: Callable[..., Any], arguments: tuple[object, ...], limit: float
    ) -> list[Any]:
        pool = self._pools.get(world)
        if pool is None or not pool.alive:
            self._drop(world)
            pool = self._pools[world] = _Pool(world)
        answers: list[Any] = pool.call(function, arguments, limit)
        return answers

    def _drop(self, world: int) -> None:
        pool = self._pools.pop(world, None)
        if pool is not None:
            pool.stop()

    def stop(self) -> None:
        """End all pools."""
        for world in list(self._pools):
            self._drop(world)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
