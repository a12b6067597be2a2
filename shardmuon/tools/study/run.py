"""`python -m shardmuon study FILE`: trains all runs of a study, and keeps their numbers.

Owns the study's folder: `results.jsonl` has a line for each run that is done, so that a study which
is started again goes on with the runs that are missing; `tokenizer.json` and `cache/` are made
once. What the numbers mean is `summary.py`'s matter.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardmuon.tools.study import text
from shardmuon.tools.study.config import Study, load_study
from shardmuon.tools.study.plan import STAGES, Numbers, Task, plan
from shardmuon.tools.study.pool import Pool
from shardmuon.tools.study.summary import summarize
from shardmuon.tools.study.tables import settings
from shardmuon.training import run as training
from shardmuon.training.load import ConfigError, as_tree

__all__ = ["Options", "run"]

_PHASES: tuple[tuple[str, ...], ...] = (("sweep",), STAGES[1:-1], ("timing",))
"""Stages whose runs go on side by side; those that are timed have the machine for themselves."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a study is run.

    workers: processes that train side by side. minutes: after which no run is started that would
    not end in time; None has no limit. folder: of the study. out: file for the numbers.
    """

    workers: int
    minutes: float | None
    folder: Path
    out: Path


def run(path: Path, options: Options) -> bool:
    """Run what is missing of the study at `path`; whether it is complete. Raises ConfigError."""
    clock = _Clock(options.minutes)
    study, tree = load_study(path)
    options.folder.mkdir(parents=True, exist_ok=True)
    facts = _prepare(study, options.folder)
    results = _Results(options.folder / "results.jsonl", facts)
    complete = True
    with Pool(options.workers, options.folder) as pool:
        for stages in _PHASES:
            planned = plan(study, options.folder, results.numbers)
            tasks = _distinct([task for stage in stages for task in planned[stage]])
            missing = [task for task in tasks if task.key not in results.numbers]
            at_most = 1 if stages == ("timing",) else options.workers
            progress = _Progress(len(missing), results, clock)
            pool.run(missing, at_most, lambda task: clock.allows(task, results), progress.take)
            complete = all(task.key in results.numbers for task in tasks)
            _write(options.out, path.stem, study, tree, results)
            if not complete:
                break
    print(f"wrote {options.out}" + ("" if complete else "; start it again to go on"))
    return complete


def _distinct(tasks: Sequence[Task]) -> list[Task]:
    return list({task.key: task for task in reversed(tasks)}.values())[::-1]


def _prepare(study: Study, folder: Path) -> dict[str, Any]:
    """Make the tokenizer, encode the text and check the first run; what the study is about."""
    tokenizer = folder / "tokenizer.json"
    task = next(task for tasks in plan(study, folder, {}).values() for task in tasks)
    if study.tokenizer_bytes and not tokenizer.exists():
        print(f"making {tokenizer}", flush=True)
        data = dataclasses.replace(task.config.data, tokenizer=None)
        text.make_tokenizer(data, task.config.model.vocab_size, study.tokenizer_bytes, tokenizer)
    prepared = training.prepare(task.config)
    config, corpus = prepared.config, prepared.corpus
    print(f"{sum(p.numel() for p in prepared.model.parameters()):,} parameters", flush=True)
    print(corpus.description, flush=True)
    return {
        "parameters": sum(p.numel() for p in prepared.model.parameters()),
        "tokens_per_step": config.data.batch_sequences * config.data.sequence_length,
        "steps": config.schedule.steps,
        "text": corpus.description,
        "fingerprint": corpus.fingerprint,
        "bytes_per_token": corpus.bytes_per_token,
        "config": _without_places(as_tree(config)),
        "machine": _machine(prepared.device),
    }


def _without_places(tree: dict[str, Any]) -> dict[str, Any]:
    """The configuration without folders of this machine, in place."""
    tree["data"]["cache"] = None
    if tree["data"]["tokenizer"] is not None:
        tree["data"]["tokenizer"] = Path(tree["data"]["tokenizer"]).name
    return tree


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


class _Results:
    """results.jsonl: facts of each start, and the numbers of each run by its key.

    Failed runs are kept, but are run again by the next start.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Raises ConfigError if results are there that are of other text."""
        self._path = path
        self.numbers: dict[str, Numbers] = {}
        self.starts: list[dict[str, Any]] = []
        for record in _lines(path):
            if "key" not in record:
                self.starts.append(record)
            elif record["status"] != "failed":
                self.numbers[record["key"]] = record
        old = self.starts[-1]["fingerprint"] if self.starts else facts["fingerprint"]
        if old != facts["fingerprint"]:
            raise ConfigError(
                f"{path} has results on other text ({old}, now {facts['fingerprint']}); expected"
                " the same packages and tokenizer.json, or another --folder"
            )
        self._add(facts)
        self.starts.append(facts)

    def add(self, task: Task, numbers: Numbers) -> None:
        """Keep the numbers of a run, at once."""
        record = {"key": task.key, **task.labels, **numbers}
        self.numbers[task.key] = record
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file; the last may be torn."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class _Clock:
    """When to stop: no run is started that would not end in time, as the slowest so far tells."""

    def __init__(self, minutes: float | None) -> None:
        self.began = time.monotonic()
        self._limit_s = math.inf if minutes is None else 60 * minutes

    def allows(self, task: Task, results: _Results) -> bool:
        """Whether `task` may start."""
        paces = [
            each["seconds"] / each["steps"]
            for each in results.numbers.values()
            if each["stage"] != "timing" and each.get("seconds") and each.get("steps", 0) > 1
        ]
        steps = min(task.config.schedule.stop_at or math.inf, task.config.schedule.steps)
        expected_s = max(paces[-16:], default=0.0) * steps
        return time.monotonic() - self.began + expected_s < self._limit_s


@dataclass
class _Progress:
    """Keeps and prints results as they come."""

    count: int
    results: _Results
    clock: _Clock
    done: int = 0

    def take(self, task: Task, numbers: Numbers) -> None:
        """Take one result."""
        self.done += 1
        self.results.add(task, numbers)
        share = "" if task.share == 1 else f", {task.share:g} of the steps"
        said = f"loss {numbers['loss']:.4f}" if numbers["loss"] is not None else numbers["status"]
        if numbers["status"] == "failed":
            said += f": {numbers['error']}"
        print(
            f"[{time.monotonic() - self.clock.began:6.0f} s] {self.done}/{self.count}"
            f" {task.stage}: {task.name} ({settings(task.point)}{share}, seed {task.seed}): {said}"
            f" ({numbers.get('seconds') or 0:.0f} s)",
            flush=True,
        )


def _write(out: Path, name: str, study: Study, tree: Mapping[str, Any], results: _Results) -> None:
    """The numbers of the study so far, one run a line. Failed runs are counted, too."""
    planned = plan(study, out.parent, results.numbers)
    runs = [
        {**results.numbers[task.key], **task.labels}
        for stage in STAGES
        for task in planned[stage]
        if task.key in results.numbers
    ]
    missing = sum(len(tasks) for tasks in planned.values()) - len(runs)
    machines = list(dict.fromkeys(start["machine"] for start in results.starts))
    facts = {**results.starts[-1], "machine": machines, "missing": missing}
    whole = {"name": name, "study": tree, "facts": facts, "runs": runs}
    whole["summary"] = summarize(whole)
    lines = [f"{json.dumps(key)}: {_text(key, value)}" for key, value in whole.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def _text(key: str, value: Any) -> str:
    if key != "runs":
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
