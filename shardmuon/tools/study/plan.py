"""Which runs a study has, and which point is best: pure functions of its file and of results.

Owns the stages and the identity of a run. A run is known by its configuration alone, so that one
that is done is found again whatever the folder is, and whichever stage asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmuon.tools.study.config import Overrides, Study, configure, grid
from shardmuon.training.config import Config
from shardmuon.training.load import as_tree

__all__ = ["STAGES", "Best", "Numbers", "Task", "find_best", "plan"]

Numbers = Mapping[str, Any]
"""What is kept of a finished run; see `worker.py`."""

STAGES = ("sweep", "seeds", "drop_in", "variants", "shorter", "timing")
"""In the order in which they run; all but the first need the best points."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run. share: of the steps that the study's base has. point: its overrides of a sweep."""

    stage: str
    name: str
    seed: int
    point: Overrides
    config: Config
    share: float = 1.0

    @property
    def key(self) -> str:
        """Names the run: a hash of all that its numbers depend on."""
        tree = as_tree(self.config)
        del tree["logging"]["directory"], tree["data"]["cache"]
        tree["data"]["tokenizer"] = tree["data"]["tokenizer"] is not None
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def labels(self) -> dict[str, Any]:
        """What a reader of the results needs to know of it."""
        return {
            "stage": self.stage,
            "name": self.name,
            "seed": self.seed,
            "share": self.share,
            "point": dict(self.point),
        }


@dataclass(frozen=True, kw_only=True)
class Best:
    """The point of least validation loss, None if none is finite.

    border: the swept keys whose value is an end of their list, so that a wider sweep may find a
    better one.
    """

    point: dict[str, Any] | None
    loss: float | None
    border: list[str] = field(default_factory=list)


def find_best(values: Mapping[str, Sequence[Any]], losses: Sequence[float | None]) -> Best:
    """The best point of a sweep; losses are in the order of `grid`, None for a failed run."""
    found = [
        (loss, point) for loss, point in zip(losses, grid(values), strict=True) if loss is not None
    ]
    if not found:
        return Best(point=None, loss=None)
    loss, point = min(found, key=lambda each: each[0])
    border = [
        key
        for key, choices in values.items()
        if len(choices) > 1 and point[key] in (min(choices), max(choices))
    ]
    return Best(point=point, loss=loss, border=border)


def plan(study: Study, folder: Path, done: Mapping[str, Numbers]) -> dict[str, list[Task]]:
    """Tasks of each stage, as far as they are known: later ones wait for the sweep.

    folder: of the study. done: numbers of finished runs by key. Raises ConfigError, also for
    overrides that are only needed later.
    """
    make = _Maker(study, folder)
    for overrides in study.variants.values():
        configure(study, study.method, overrides)
    stages: dict[str, list[Task]] = {stage: [] for stage in STAGES}
    points = _sweep(study, make, done, stages["sweep"])
    if len(points) == len(study.sweep):
        _others(study, make, points, stages)
    return stages


def _sweep(
    study: Study, make: _Maker, done: Mapping[str, Numbers], tasks: list[Task]
) -> dict[str, Overrides]:
    """Append the tasks of the sweep; the best point of each method that is known."""
    points: dict[str, Overrides] = {}
    for name, values in study.sweep.items():
        if len(grid(values)) == 1:  # nothing to find
            points[name] = grid(values)[0]
            continue
        mine = [make("sweep", name, study.sweep_seed, name, point) for point in grid(values)]
        tasks += mine
        if all(task.key in done for task in mine):
            best = find_best(values, [done[task.key]["loss"] for task in mine])
            if best.point is not None:
                points[name] = best.point
    return points


def _others(
    study: Study, make: _Maker, points: dict[str, Overrides], stages: dict[str, list[Task]]
) -> None:
    """Append the tasks of all other stages, and add the points of drop-in methods."""
    for name in study.drop_in:
        points[name] = _copied(study, name, points)
        stages["drop_in"] += [make("drop_in", name, s, name, points[name]) for s in study.seeds]
    method, point = study.method, points[study.method]
    for seed in study.seeds:
        stages["seeds"] += [make("seeds", n, seed, n, points[n]) for n in study.sweep]
        for name, overrides in study.variants.items():
            task = make("variants", name, seed, method, {**point, **overrides})
            stages["variants"].append(task)
        for share in study.shorter:
            stages["shorter"].append(make("shorter", method, seed, method, point, share))
    for name in study.methods:
        stages["timing"].append(make.timing(name, name, points[name]))
    for name, overrides in study.variants.items():
        stages["timing"].append(make.timing(name, method, {**point, **overrides}))


def _copied(study: Study, name: str, points: Mapping[str, Overrides]) -> dict[str, Any]:
    """The point of a method that takes another's values."""
    drop_in = study.drop_in[name]
    theirs = points[drop_in.from_]
    tree = as_tree(configure(study, drop_in.from_, theirs))
    return {**theirs, **{to: _at(tree, key) for to, key in drop_in.copy.items()}}


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


@dataclass(frozen=True)
class _Maker:
    """Makes tasks with the settings that are the study's own."""

    study: Study
    folder: Path

    def __call__(
        self, stage: str, name: str, seed: int, method: str, point: Overrides, share: float = 1.0
    ) -> Task:
        config = _scaled(configure(self.study, method, point, self._own(), {"seed": seed}), share)
        return Task(stage=stage, name=name, seed=seed, point=point, config=config, share=share)

    def timing(self, name: str, method: str, point: Overrides) -> Task:
        """A run of some steps whose times count and whose loss does not."""
        settings = self.study.timing
        own = {
            "schedule.stop_at": settings.steps,
            "logging.every": settings.every,
            "evaluation.every": 0,
        }
        seed = self.study.sweep_seed
        config = configure(self.study, method, point, self._own(), own, {"seed": seed})
        return Task(stage="timing", name=name, seed=seed, point=point, config=config)

    def _own(self) -> Overrides:
        own: dict[str, Any] = {
            "checkpoint.every": 0,
            "checkpoint.final": False,
            "data.cache": str(self.folder / "cache"),
            "logging.progress": "none",
        }
        if self.study.tokenizer_bytes:
            own["data.tokenizer"] = str(self.folder / "tokenizer.json")
        return own


def _scaled(config: Config, share: float) -> Config:
    """The run with that share of its steps, and of each part of its schedule."""
    if share == 1.0:
        return config
    parts = {
        name: round(share * getattr(config.schedule, name))
        for name in ("steps", "warmup_steps", "decay_steps")
    }
    schedule = dataclasses.replace(config.schedule, **parts)
    return dataclasses.replace(config, schedule=schedule)
