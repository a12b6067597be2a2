"""One job per framework: a worker module whose cases run one after another on every rank.

Importing a framework takes seconds on every rank, so all its cases share one start of torchrun.
The worker calls `serve(CASES)`; a test asks for the job once (a module-scoped fixture around
`run`) and looks at what single cases returned. A case returns what JSON can hold; one that raises
ends the job at once on all ranks, and the cases after it count as not run.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "run", "serve"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
_FOLDER = "SHARDMUON_TEST_JOB"

Case = Callable[[Path], Any]
"""Gets a folder that all ranks share, a new one for each case; runs on every rank."""


@dataclass(frozen=True)
class Job:
    """What every rank's cases returned, and all that the job printed."""

    ranks: int
    outcomes: Mapping[str, list[Any]]
    log: str

    def results(self, case: str) -> list[Any]:
        """A copy of what `case` returned, by rank; AssertionError with the log if it did not."""
        results = self.outcomes.get(case, [])
        assert len(results) == self.ranks, f"{case} did not end on all ranks:\n{self.log}"
        return copy.deepcopy(results)

    def same(self, case: str) -> Any:
        """What `case` returned, the same on all ranks."""
        first, *others = self.results(case)
        assert all(other == first for other in others), f"{case}: ranks differ:\n{self.log}"
        return first


def run(
    module: str,
    ranks: int,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    limit_s: float = LIMIT_S,
) -> Job:
    """Run `python -m module` on `ranks` ranks under torchrun (alone without it for `ranks` 0)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    started = max(ranks, 1)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.Popen(
            [python, *(launcher if ranks else []), "-m", module],
            cwd=ROOT,
            env=_environment(folder, environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            log, _ = done.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            done.terminate()  # torchrun ends its ranks
            log, _ = done.communicate(timeout=40)
            log = f"not done after {limit_s} s\n{log}"
        return Job(started, _collect(Path(folder), started), log)


def serve(cases: Sequence[Case]) -> None:
    """Body of a worker: run all cases, and write what each returned. Warnings are errors."""
    rank = int(os.environ.get("RANK", "0"))
    top = Path(os.environ[_FOLDER])
    for case in cases:
        name = case.__name__
        folder = top / name
        folder.mkdir(exist_ok=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = case(folder)
        except BaseException:
            traceback.print_exc()
            print(f"rank {rank} failed in case {name}", flush=True)
            sys.stderr.flush()
            os._exit(1)  # a normal end would wait for the other ranks
        (top / f"{name}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def _environment(folder: str, more: Mapping[str, str]) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        **{key: value for key, value in os.environ.items() if key not in ours},
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        _FOLDER: folder,
        **more,
    }


def _collect(top: Path, ranks: int) -> dict[str, list[Any]]:
    outcomes: dict[str, list[Any]] = {}
    for rank in range(ranks):
        for path in top.glob(f"*.{rank}.json"):
            text = path.read_text(encoding="utf-8")
            outcomes.setdefault(path.name.partition(".")[0], []).append(json.loads(text))
    return outcomes
