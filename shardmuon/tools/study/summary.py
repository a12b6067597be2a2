"""What the runs of a study say together: means and spreads over seeds, and comparisons.

Owns the arithmetic. Comparisons are of runs with the same seed, which have the same first weights
and the same order of data. Input and output are plain trees, as in the study's JSON file.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardmuon.tools.study.config import grid
from shardmuon.tools.study.plan import find_best

__all__ = ["crossing", "spread", "summarize"]

Runs = Sequence[Mapping[str, Any]]

MOST_APART = 1.2
"""Forward and backward are the same work for all methods: where their times are further apart than
this ratio, something else used the machine, and no time of a step is to be believed."""


def summarize(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a study's file: what its tables and sentences say."""
    study, runs = whole["study"], whole["runs"]
    method, baseline = study.get("method", "muon"), study.get("baseline", "adamw")
    swept = {name: _swept(runs, name, values) for name, values in study["sweep"].items()}
    names = [(name, "seeds") for name in study["sweep"]]
    names += [(name, "drop_in") for name in study.get("drop_in") or {}]
    names += [(name, "variants") for name in study.get("variants") or {}]
    methods = {}
    for name, stage in names:
        mine = _of(runs, stage, name)
        other = method if stage == "variants" else baseline
        methods[name] = {
            "stage": stage,
            **swept.get(name, {"point": mine[0]["point"] if mine else None}),
            "loss": spread([r["loss"] for r in mine]),
            "bits_per_byte": spread([r.get("bits_per_byte") for r in mine]),
            "against": {"name": other, **_paired(mine, _of(runs, "seeds", other))},
            **_pace(runs, name, whole["facts"]["tokens_per_step"]),
        }
    shorter, timing = _shorter(runs, method, baseline), _timing(methods)
    pair = None if timing["disturbed"] else (methods[method]["ms"], methods[baseline]["ms"])
    return {
        "methods": methods,
        "timing": timing,
        "shorter": {**shorter, "time_share": _time_share(shorter["share"], pair)},
    }


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, least and most of those that are there, how many, and how many are not."""
    found = [value for value in values if value is not None]
    return {
        "mean": _round(statistics.fmean(found)) if found else None,
        "low": min(found, default=None),
        "high": max(found, default=None),
        "n": len(found),
        "diverged": len(values) - len(found),
    }


def crossing(points: Sequence[tuple[float, float]], target: float) -> tuple[float | None, bool]:
    """The least share at which the loss is down to `target`, and whether it is only a bound.

    points: (share, loss) in the order of shares; losses between two are those of a straight line.
    (None, False) if none is low enough; a bound if the least share already is.
    """
    before: tuple[float, float] | None = None
    for share, loss in points:
        if loss <= target:
            if before is None:
                return share, True
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (share - before[0]), False
        before = share, loss
    return None, False


def _of(runs: Runs, stage: str, name: str) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["stage"] == stage and run["name"] == name]


def _swept(runs: Runs, name: str, values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    if len(grid(values)) == 1:
        return {"point": grid(values)[0], "border": []}
    losses = [run["loss"] for run in _of(runs, "sweep", name)]
    if len(losses) < len(grid(values)):
        return {"point": None}
    best = find_best(values, losses)
    return {"point": best.point, "border": best.border, "sweep_loss": best.loss}


def _paired(mine: Runs, theirs: Runs) -> dict[str, Any]:
    """Spread of the differences of losses, of runs with the same seed."""
    other = {run["seed"]: run["loss"] for run in theirs}
    pairs = [(run["loss"], other.get(run["seed"])) for run in mine]
    found = spread([a - b for a, b in pairs if a is not None and b is not None])
    return {key: _round(value) for key, value in found.items() if key != "diverged"}


def _pace(runs: Runs, name: str, tokens: int) -> dict[str, Any]:
    times = [run.get("ms") for run in _of(runs, "timing", name)]
    if not times or times[0] is None:
        return {"ms": None, "tokens_per_s": None}
    return {"ms": times[0], "tokens_per_s": round(1e3 * tokens / times[0]["step"])}


def _shorter(runs: Runs, method: str, baseline: str) -> dict[str, Any]:
    """How many of the baseline's steps the method needs for the baseline's final loss."""
    own = [*_of(runs, "shorter", method), *_of(runs, "seeds", method)]
    base = {run["seed"]: run["loss"] for run in _of(runs, "seeds", baseline)}
    shares = sorted({run["share"] for run in own})
    at = {share: spread([r["loss"] for r in own if r["share"] == share]) for share in shares}
    target = spread(list(base.values()))["mean"]
    by_seed = []
    for seed, loss in base.items():
        mine = sorted((r["share"], r["loss"]) for r in own if r["seed"] == seed and r["loss"])
        by_seed.append(_round(crossing(mine, loss)[0]) if mine and loss is not None else None)
    means = [(share, found["mean"]) for share, found in at.items() if found["mean"] is not None]
    share, bound = crossing(means, target) if target is not None else (None, False)
    return {
        "points": [{"share": share, **found} for share, found in at.items()],
        "target": target,
        "share": _round(share),
        "at_most": bound,
        "by_seed": by_seed,
    }


def _timing(methods: Mapping[str, Any]) -> dict[str, Any]:
    """The range of forward and backward over methods, and whether the times were disturbed."""
    times = [m["ms"]["forward_backward"] for m in methods.values() if m["ms"] is not None]
    low, high = min(times, default=None), max(times, default=None)
    disturbed = low is not None and high is not None and high > MOST_APART * low
    return {"forward_backward_ms": [low, high], "disturbed": disturbed}


def _time_share(share: float | None, pair: tuple[Any, Any] | None) -> float | None:
    """The share of the baseline's time; None if its parts are not known."""
    if share is None or pair is None or None in pair:
        return None
    found: float = round(share * pair[0]["step"] / pair[1]["step"], 5)
    return found


def _round(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
