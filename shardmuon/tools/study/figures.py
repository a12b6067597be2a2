"""The figures of a study, from its JSON file.

Owns what is drawn: means over seeds as lines, their range as a band, each seed as a dot. Times are
steps times the time of a step that was taken alone, for runs side by side have no honest clock.
Needs matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmuon.tools.plot_runs import COLOURS, new_figure, tidy
from shardmuon.tools.study.config import grid
from shardmuon.tools.study.tables import pictures

__all__ = ["draw"]

Whole = Mapping[str, Any]
_SHOWN_FROM = 0.15
"""Share of the steps whose loss ends the axis: the first fall would hide the rest."""


def draw(whole: Whole, folder: Path, suffix: str = "svg") -> list[Path]:
    """Write the figures that `pictures` names into `folder`, which is made; their paths.

    Raises ConfigError without matplotlib.
    """
    makers = {"loss": _loss, "sweep": _sweep, "variants": _variants}
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for kind in pictures(whole):
        path = folder / f"evidence-{whole['name']}-{kind}.{suffix}"
        _save(makers[kind](whole), path)
        paths.append(path)
    return paths


def _save(figure: Any, path: Path) -> None:
    """The same bytes for the same numbers: no date, and ids that are not random."""
    from matplotlib import rc_context

    dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, **dated)


def _colours(whole: Whole) -> dict[str, str]:
    """The baseline is blue, the method under study vermilion, the others follow."""
    study, methods = whole["study"], whole["summary"]["methods"]
    first = [study.get("baseline", "adamw"), study.get("method", "muon")]
    names = first + [n for n, m in methods.items() if m["stage"] != "variants" and n not in first]
    return dict(zip(names, COLOURS, strict=False))


def _runs(whole: Whole, name: str, *stages: str) -> list[Mapping[str, Any]]:
    return [r for r in whole["runs"] if r["name"] == name and r["stage"] in stages and r["loss"]]


# --- loss -------------------------------------------------------------------------------------


def _loss(whole: Whole) -> Any:
    """Over steps (tokens on top) and over time."""
    methods = whole["summary"]["methods"]
    believed = not whole["summary"]["timing"]["disturbed"]
    timed = [n for n in _colours(whole) if believed and n in methods and methods[n]["ms"]]
    figure = new_figure(11.6 if timed else 6.4, 4.8)
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    tops, bottoms = [], []
    for name, colour in _colours(whole).items():
        runs = _runs(whole, name, "seeds", "drop_in")
        if not runs:
            continue
        top, bottom = _curves(panels[0], runs, 1.0, colour, _legend(name, methods[name]["loss"]))
        tops.append(top)
        bottoms.append(bottom)
        if name in timed:
            _curves(panels[1], runs, methods[name]["ms"]["step"] / 1e3, colour, None)
    _ends(panels, whole)
    room = (max(tops) - min(bottoms)) * 0.06
    panels[0].set_ylim(min(bottoms) - room, max(tops) + room)
    panels[0].set_ylabel("validation loss, nats per token")
    panels[0].set_xlabel("optimizer step")
    _tokens_on_top(panels[0], whole["facts"]["tokens_per_step"])
    if timed:
        panels[1].set_xlabel("seconds of training, each method alone on the machine")
    for axes in panels:
        tidy(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper left",
        ncols=2,
        frameon=False,
        alignment="left",
        title=f"{whole['name']}: mean of the seeds, and their range as a band",
    )
    return figure


def _legend(name: str, loss: Mapping[str, Any]) -> str:
    half = (loss["high"] - loss["low"]) / 2
    return f"{name}: {loss['mean']:.4f} ± {half:.4f} ({loss['n']} seeds)"


def _curves(
    axes: Any, runs: Sequence[Mapping[str, Any]], unit: float, colour: str, label: str | None
) -> tuple[float, float]:
    """Draw one method; its training loss early on, and its least loss."""
    xs, mean, low, high = _band([run["validation"] for run in runs])
    axes.fill_between([x * unit for x in xs], low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(
        [x * unit for x in xs], mean, color=colour, linewidth=1.8, marker="o", ms=3.5, label=label
    )
    steps, losses, _, _ = _band([run["curve"] for run in runs])
    early = next(y for x, y in zip(steps, losses, strict=True) if x >= _SHOWN_FROM * steps[-1])
    return early, min(low)


def _band(
    curves: Sequence[Sequence[Sequence[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """(places, mean, least, most) of curves that share their places."""
    xs = list(curves[0][0])
    ys = [list(each) for each in zip(*(curve[1] for curve in curves), strict=False)]
    xs = xs[: len(ys)]
    means = [statistics.fmean(each) for each in ys]
    return xs, means, [min(each) for each in ys], [max(each) for each in ys]


def _ends(panels: Sequence[Any], whole: Whole) -> None:
    """The baseline's final loss, and where shorter runs of the method ended."""
    study, summary = whole["study"], whole["summary"]
    baseline, method = study.get("baseline", "adamw"), study.get("method", "muon")
    target, colours = summary["shorter"]["target"], _colours(whole)
    if target is not None:
        for number, axes in enumerate(panels):
            label = None if number else f"{baseline}, final loss"
            axes.axhline(target, color=colours[baseline], lw=0.9, linestyle="--", label=label)
    runs = _runs(whole, method, "shorter")
    ms = summary["methods"][method]["ms"]
    for axes, unit in zip(panels, (1.0, (ms or {}).get("step", 0.0) / 1e3), strict=False):
        axes.plot(
            [run["share"] * whole["facts"]["steps"] * unit for run in runs],
            [run["loss"] for run in runs],
            linestyle="none",
            marker="D",
            ms=4.5,
            markerfacecolor="none",
            color=colours[method],
            label=f"{method}, ends of shorter runs" if runs and axes is panels[0] else None,
        )


def _tokens_on_top(axes: Any, tokens: int) -> None:
    unit = tokens / 1e6
    top = axes.secondary_xaxis("top", functions=(lambda x: x * unit, lambda x: x / unit))
    top.set_xlabel("tokens, millions")


# --- sweep ------------------------------------------------------------------------------------


def _sweep(whole: Whole) -> Any:
    """A panel per method: the first key of its grid along the axis, a line for each of the rest."""
    sweep = whole["study"]["sweep"]
    figure = new_figure(1.0 + 4.4 * len(sweep), 4.0)
    panels = figure.subplots(1, len(sweep), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, sweep.items(), strict=True):
        key, *others = values
        found = {_key(r["point"]): r["loss"] for r in whole["runs"] if _is_swept(r, name)}
        for number, rest in enumerate(grid({other: values[other] for other in others})):
            line = [(x, _key({key: x, **rest})) for x in sorted(values[key])]
            label = ", ".join(f"{k.rpartition('.')[2]} {v:g}" for k, v in rest.items())
            losses = [(x, found[point]) for x, point in line if point in found]
            _line(axes, losses, COLOURS[number % len(COLOURS)], label)
        _best_mark(axes, whole["summary"]["methods"].get(name, {}), key)
        _log_axis(axes, sorted(values[key]), key)
        axes.set_title(name)
        if others:
            axes.legend(frameon=False)
        tidy(axes)
    panels[0].set_ylabel("final validation loss, nats per token")
    return figure


def _line(axes: Any, losses: Sequence[tuple[float, float | None]], colour: str, label: str) -> None:
    """One line of a sweep; a run without a loss is named where it would be."""
    kept = [(x, y) for x, y in losses if y is not None]
    axes.plot([x for x, _ in kept], [y for _, y in kept], "o-", color=colour, label=label)
    for x in (x for x, y in losses if y is None):
        axes.text(
            x,
            0.98,
            "diverged",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            va="top",
            ha="center",
            color=colour,
        )


def _is_swept(run: Mapping[str, Any], name: str) -> bool:
    return (run["stage"], run["name"]) == ("sweep", name)


def _key(point: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(point.items()))


def _best_mark(axes: Any, found: Mapping[str, Any], key: str) -> None:
    if found.get("point"):
        place = found["point"][key], found["sweep_loss"]
        axes.plot(*place, marker="o", ms=12, color="none", markeredgecolor="black")


def _log_axis(axes: Any, ticks: Sequence[float], key: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(key)
    room = (ticks[-1] / ticks[0]) ** 0.15 if len(ticks) > 1 else 2.0
    axes.set_xlim(ticks[0] / room, ticks[-1] * room)


# --- variants ---------------------------------------------------------------------------------


def _variants(whole: Whole) -> Any:
    """A row per variant with a dot for each seed; behind them the range of the method itself."""
    summary, method = whole["summary"]["methods"], whole["study"].get("method", "muon")
    names = [method, *(n for n, m in summary.items() if m["stage"] == "variants")]
    figure = new_figure(7.6, 1.5 + 0.42 * len(names))
    axes = figure.subplots()
    colour = _colours(whole)[method]
    base = summary[method]["loss"]
    if base["mean"] is not None:
        axes.axvspan(base["low"], base["high"], color=colour, alpha=0.2, linewidth=0)
        axes.axvline(base["mean"], color=colour, linewidth=0.9)
    for row, name in enumerate(names):
        losses = [run["loss"] for run in _runs(whole, name, "seeds", "variants")]
        shade = colour if name == method else COLOURS[0]
        axes.plot(losses, [row] * len(losses), "o", color=shade, ms=5, alpha=0.7)
        if losses:
            axes.plot(statistics.fmean(losses), row, "|", color="black", ms=15)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(
        "final validation loss, nats per token: a dot for each seed, a tick for the mean"
    )
    tidy(axes)
    return figure
