"""`python -m shardmuon bench scaling`: `bench step` on several numbers of ranks, in one table.

Owns the runs, which torchrun starts one after the other, and their files. Measures nothing itself:
a run that fails or hangs must not stop the others.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from shardmuon.tools import scaling_table
from shardmuon.tools.arguments import count, counts, names_among
from shardmuon.tools.workloads import OPTIMIZERS, PACKAGES, WORKLOADS
from shardmuon.training.load import ConfigError

__all__ = ["Options", "Run", "add_arguments", "options_of", "run", "runs"]

MODELS = ("gpt160m", "llama1b", "llama8b-half")
RANKS = (2, 4, 8)
COMPARED = ("adamw", "vanilla", "shardmuon")
END_S = 60.0  # torchrun kills ranks that have not ended 30 s after SIGTERM


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. ranks: None takes those of RANKS that find a GPU each.

    replicate: replicas of the model (HSDP), beside one. sequences: on each rank, None the model's
    own. seconds: after which a run is ended, as all are after `minutes`.
    """

    models: tuple[str, ...] = MODELS
    ranks: tuple[int, ...] | None = None
    replicate: tuple[int, ...] = (2,)
    sequences: int | None = None
    optimizers: tuple[str, ...] = COMPARED
    steps: int = 12
    seconds: int = 600
    minutes: int | None = None
    folder: Path = Path("runs/scaling")
    table: bool = False


@dataclass(frozen=True)
class Run:
    """A model on a mesh."""

    model: str
    ranks: int
    replicate: int
    sequences: int | None

    @property
    def name(self) -> str:
        """What its files are called."""
        shards = self.ranks // self.replicate
        mesh = f"{self.replicate}x{shards}" if self.replicate > 1 else str(shards)
        batch = "" if self.sequences is None else f"-batch{self.sequences}"
        return f"{self.model}-{mesh}{batch}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `options_of` reads."""
    start = Options()
    parser.add_argument("--models", type=names_among(*WORKLOADS), default=start.models)
    parser.add_argument("--ranks", type=counts, help="left out: those of 2,4,8 that find GPUs")
    parser.add_argument(
        "--replicate", type=counts, default=start.replicate, help="replicas in HSDP, beside FSDP"
    )
    parser.add_argument("--sequences", type=count, help="on each rank; left out: the model's own")
    parser.add_argument(
        "--optimizers", type=names_among(*OPTIMIZERS, *PACKAGES), default=start.optimizers
    )
    parser.add_argument("--steps", type=count, default=start.steps, help="measured iterations")
    parser.add_argument("--seconds", type=count, default=start.seconds, help="limit of each run")
    parser.add_argument("--minutes", type=count, help="limit of all; call again for what is left")
    parser.add_argument(
        "--folder", type=Path, default=start.folder, help="for numbers; what is there is not rerun"
    )
    parser.add_argument("--table", action="store_true", help="only the table of what is there")


def options_of(arguments: argparse.Namespace) -> Options:
    """What the arguments say."""
    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})


def run(options: Options) -> None:
    """Make all runs whose numbers are not there, and print the table of those that are.

    Raises ChildProcessError in the end if some failed.
    """
    failed = [] if options.table else _perform_all(options)
    found = scaling_table.read(options.folder)
    if found:
        print("\n".join(scaling_table.table(found)))
    if failed:
        raise ChildProcessError(f"{len(failed)} run(s) failed: {', '.join(failed)}")
    if not found:
        raise ConfigError(f"--folder: there are no numbers in {options.folder}")


def runs(options: Options, gpus: int) -> list[Run]:
    """In the order of the options. Without GPUs, ranks are processes on the CPU."""
    ranks = options.ranks or tuple(n for n in RANKS if not gpus or n <= gpus)
    if gpus and max(ranks, default=gpus + 1) > gpus:
        got = max(ranks, default="none")
        raise ConfigError(f"--ranks: got {got}, expected at most {gpus}, one per GPU")
    return [
        Run(model, n, replicas, options.sequences)
        for model in options.models
        for n in ranks
        for replicas in dict.fromkeys((1, *options.replicate))
        if replicas == 1 or (n % replicas == 0 and n > replicas)
    ]


def _perform_all(options: Options) -> list[str]:
    """Names of the runs that failed."""
    if "WORLD_SIZE" in os.environ:
        raise ConfigError("bench scaling starts torchrun itself, expected to be started without it")
    failed = []
    todo = runs(options, _gpus())
    options.folder.mkdir(parents=True, exist_ok=True)
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    for each in todo:
        if (options.folder / f"{each.name}.json").is_file():
            print(f"{each.name}: there already", flush=True)
            continue
        begin = time.monotonic()
        problem = _perform(each, options, min(options.seconds, end - begin))
        if problem is None:
            print(f"{each.name}: done in {time.monotonic() - begin:.0f} s", flush=True)
        else:
            failed.append(each.name)
            print(f"{each.name}: failed, {problem}", flush=True)
    print()
    return failed


def _gpus() -> int:
    from torch import cuda

    return cuda.device_count() if cuda.is_available() else 0


def _perform(each: Run, options: Options, limit_s: float) -> str | None:
    """What went wrong, None if the numbers are there now."""
    if limit_s <= 0:
        return "no time was left"
    draft = options.folder / f"{each.name}.part"
    draft.unlink(missing_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (
        (options.folder / f"{each.name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            _command(each, options, draft), stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"not done after {limit_s:.0f} s"
    if code or not draft.is_file():
        return f"exit code {code}; see {log.name}"
    draft.replace(options.folder / f"{each.name}.json")
    return None


def _command(each: Run, options: Options, file: Path) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", str(each.ranks), "-m", "shardmuon", "bench", "step", each.model]
    names = ",".join(options.optimizers)
    start += ["--optimizers", names, "--steps", str(options.steps)]
    start += [] if each.sequences is None else ["--sequences", str(each.sequences)]
    return [*start, "--replicate", str(each.replicate), "--json", str(file)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Through torchrun, whose ranks are in sessions of their own."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
