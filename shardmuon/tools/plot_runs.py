"""Runs side by side: a text table, and a picture of their losses.

Owns what is compared and how it is drawn. Reads metrics.jsonl alone, so that running runs can be
looked at too. The picture needs matplotlib. Step times are medians over logged steps after the
first tenth, in which kernels and communicators warm up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmuon.planning.report import table
from shardmuon.training import metrics
from shardmuon.training.load import ConfigError, differences

__all__ = [
    "AXES",
    "COLOURS",
    "Run",
    "compare",
    "draw",
    "labels",
    "new_figure",
    "read_runs",
    "tidy",
]

AXES = {"step": "optimizer step", "tokens": "tokens", "time": "training time"}
_HEADER = ("run", "steps", "val loss", "bits/byte", "fwd+bwd ms", "optimizer ms", "step ms", "GB")
# Colours of Okabe and Ito, which colour-blind readers can tell apart: jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":")
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is left of a run: its configuration and its records in order."""

    folder: Path
    config: dict[str, Any]
    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders. Raises ConfigError for one that holds no steps."""
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> Run:
    path = folder / "metrics.jsonl"
    try:
        records = metrics.history(path)
    except OSError:
        raise ConfigError(f"no run at {path}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    by_event = {name: [r for r in records if r["event"] == name] for name in ("train", "evaluate")}
    if not by_event["train"]:
        raise ConfigError(f"{path}: no step is recorded yet")
    config = [r for r in records if r["event"] == "start"][-1]["config"]
    return Run(
        folder=folder,
        config=config,
        train=by_event["train"],
        evaluations=by_event["evaluate"],
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Each run's folder and, in brackets, the settings in which it differs from the others."""
    names: list[list[str]] = [[] for _ in runs]
    different = {
        line.partition(": ")[0]
        for run in runs[1:]
        for line in differences(runs[0].config, run.config)
    }
    unused = ["logging.", "checkpoint."]
    if "optimizer.name" in different:  # some runs have no Muon
        unused.append("optimizer.muon.")
    different = {key for key in different if not key.startswith(tuple(unused))}
    for key in sorted(different)[:_MOST_NAMED]:
        for run, parts in zip(runs, names, strict=True):
            parts.append(f"{key}={_at(run.config, key)}")
    more = ["..."] if len(different) > _MOST_NAMED else []
    return [
        f"{run.folder}" + (f" ({', '.join([*parts, *more])})" if parts else "")
        for run, parts in zip(runs, names, strict=True)
    ]


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def compare(runs: Sequence[Run]) -> str:
    """A table with one row per run."""
    return "\n".join(table(_HEADER, [_row(run) for run in runs]))


def _row(run: Run) -> tuple[str, ...]:
    settled = run.train[len(run.train) // 10 + 1 :] or run.train
    last: dict[str, Any] = run.evaluations[-1] if run.evaluations else {}
    return (
        str(run.folder),
        str(run.train[-1]["step"]),
        _number(last.get("loss"), 4),
        _number(last.get("bits_per_byte"), 3),
        *(_median_ms(settled, name) for name in ("forward_backward", "optimizer", "step")),
        f"{max(record['memory_bytes'] for record in run.train) / 1e9:.2f}",
    )


def _median_ms(records: Sequence[dict[str, Any]], name: str) -> str:
    return f"{1e3 * statistics.median(record['seconds'][name] for record in records):.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. Raises ConfigError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'shardmuon[plot]'")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def tidy(axes: Any) -> None:
    """A faint grid, and no frame at the top and on the right."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[Run], by: Sequence[str], path: Path, log: bool = False) -> None:
    """Write the picture to `path`, one panel for each of `by` (keys of AXES).

    Thin lines are training losses, thick ones with dots validation losses. log: both axes of the
    loss and of what it is drawn over are logarithmic. Raises ConfigError without matplotlib.
    """
    figure = new_figure(1.2 + 5.2 * len(by), 4.4)
    panels = figure.subplots(1, len(by), sharey=True, squeeze=False)[0]
    names = labels(runs)
    for axes, axis in zip(panels, by, strict=True):
        _panel(axes, runs, names, axis, log)
    panels[0].set_ylabel("loss, nats per token")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper left",
        frameon=False,
        title="thin: training   thick: validation",
        alignment="left",
    )
    figure.savefig(path)


def _panel(axes: Any, runs: Sequence[Run], names: Sequence[str], axis: str, log: bool) -> None:
    unit, name = _unit(runs, axis)
    for number, (run, label) in enumerate(zip(runs, names, strict=True)):
        look = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": _DASHES[number // len(COLOURS) % len(_DASHES)],
        }
        axes.plot(*_points(run.train, axis, unit), linewidth=0.9, alpha=0.55, **look)
        xs, ys = _points(run.evaluations, axis, unit)
        axes.plot(xs, ys, linewidth=2.0, marker="o", markersize=4, label=label, **look)
        if ys:
            axes.annotate(
                f"{ys[-1]:.3f}",
                (xs[-1], ys[-1]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                color=look["color"],
            )
    axes.set_xlabel(name)
    axes.margins(x=0.09)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for place in (axes.xaxis, axes.yaxis):
            place.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")  # losses seldom span a power of ten
    tidy(axes)


def _points(
    records: Sequence[dict[str, Any]], axis: str, unit: float
) -> tuple[list[float], list[float]]:
    """Places and losses; a loss that was not finite leaves a gap."""
    key = {"step": "step", "tokens": "tokens", "time": "time_s"}[axis]
    xs = [record[key] / unit for record in records]
    if any(math.isnan(x) for x in xs):
        raise ConfigError("the records have no elapsed_s: plot --by step or --by tokens")
    return xs, [math.nan if r["loss"] is None else r["loss"] for r in records]


def _unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    """(size of the unit, name of the axis with it), after the largest number."""
    most = {
        "step": 0.0,
        "tokens": max(run.train[-1]["tokens"] for run in runs),
        "time": max(run.train[-1]["time_s"] for run in runs),
    }[axis]
    units = {
        "step": [(1.0, "")],
        "tokens": [(1e9, ", billions"), (1e6, ", millions"), (1e3, ", thousands"), (1.0, "")],
        "time": [(3600.0, ", hours"), (60.0, ", minutes"), (1.0, ", seconds")],
    }[axis]
    size, name = next(((s, n) for s, n in units if most >= 2 * s), units[-1])
    return size, AXES[axis] + name
