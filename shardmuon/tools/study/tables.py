"""The numbers of a study in Markdown: tables, and sentences that say what they show.

Owns the words. Everything is made from the study's JSON file alone, so that a page can be checked
against it; nothing is left out because it is unfavourable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmuon.tools.study.config import grid
from shardmuon.training.load import ConfigError

__all__ = ["insert", "pictures", "read", "settings", "tables", "with_tables"]

Whole = Mapping[str, Any]


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The studies in these JSON files. Raises ConfigError for one that is something else."""
    studies = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or "summary" not in found:
            raise ConfigError(f"{path} is no JSON file of a study")
        studies.append(found)
    return studies


def insert(page: Path, studies: Sequence[Whole]) -> None:
    """Put each study's tables between its marks in `page`. Raises ConfigError without marks."""
    page.write_text(with_tables(page.read_text(encoding="utf-8"), studies), encoding="utf-8")


def with_tables(text: str, studies: Sequence[Whole]) -> str:
    """The text of a page with the tables of these studies, in place of those that are there."""
    for each in studies:
        begin, end = (f"<!-- {word} of study {each['name']} -->" for word in ("begin", "end"))
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ConfigError(f"the page has no lines {begin} and {end}")
        text = f"{before}{begin}\n\n{tables(each)}\n\n{end}{after}"
    return text


def tables(whole: Whole) -> str:
    """All that is said of a study, without a heading."""
    parts = [_head(whole), _methods(whole), _sentences(whole)]
    if any(m["stage"] == "variants" for m in whole["summary"]["methods"].values()):
        parts.append(_variants(whole))
    if len(whole["summary"]["shorter"]["points"]) > 1:
        parts.append(_shorter(whole))
    parts += [
        f"![{text}](pictures/evidence-{whole['name']}-{kind}.svg)"
        for kind, text in pictures(whole).items()
    ]
    return "\n\n".join(parts)


def pictures(whole: Whole) -> dict[str, str]:
    """Kind -> what it shows, of the figures that there are numbers for."""
    name = whole["name"]
    stages = {run["stage"] for run in whole["runs"]}
    kinds = {
        "loss": (
            "seeds",
            f"Validation loss of {name} by step and by time, with the range of seeds",
        ),
        "sweep": ("sweep", f"Final validation loss of {name} for all points of the sweeps"),
        "variants": ("variants", f"Final validation loss of {name} with variants of Muon"),
    }
    return {kind: text for kind, (stage, text) in kinds.items() if stage in stages}


def settings(point: Mapping[str, Any] | None) -> str:
    """A point of a sweep in short: the last part of each key and its value."""
    if point is None:
        return "-"
    short = {key.removeprefix("optimizer."): value for key, value in point.items()}
    leaves = [key.rpartition(".")[2] for key in short]
    named = {
        (leaf if leaves.count(leaf) == 1 else key).replace("weight_decay", "decay"): value
        for leaf, (key, value) in zip(leaves, short.items(), strict=True)
    }
    return ", ".join(f"{key} {_plain(value)}" for key, value in named.items())


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- tables -----------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(whole: Whole) -> str:
    facts, study = whole["facts"], whole["study"]
    points, seeds = len(grid(next(iter(study["sweep"].values())))), study.get("seeds", (1, 2, 3))
    how = (
        f"a sweep of {points} points for each method, then {len(seeds)} other seeds at its best"
        f" point"
        if points > 1
        else f"no sweep: {len(seeds)} seeds at one point for each method"
    )
    text = (
        f"{facts['parameters']:,} parameters; {facts['steps']:,} steps of"
        f" {facts['tokens_per_step']:,} tokens; {how}. Text:"
        f" {facts['text']}, {facts['bytes_per_token']:.2f} bytes per token held out. Machine:"
        f" {'; '.join(facts['machine'])}."
    )
    if facts["missing"]:
        text += f" The study is not complete: {facts['missing']} runs are missing."
    return text


def _methods(whole: Whole) -> str:
    summary, study = whole["summary"], whole["study"]
    header = ["method", "settings", "validation loss", "bits per byte", "ms a step", "tokens/s"]
    header.append(f"steps to the final loss of {_baseline(whole)}")
    rows = []
    for name, found in summary["methods"].items():
        if found["stage"] == "variants":
            continue
        steps = "-"
        if name == study.get("method", "muon"):
            steps = _steps(summary["shorter"])
        elif name == _baseline(whole):
            steps = "100%"
        star = " *" if found.get("border") else ""
        drop_in = (study.get("drop_in") or {}).get(name)
        rows.append(
            [
                name,
                f"those of {drop_in['from']}" if drop_in else settings(found["point"]) + star,
                _spread(found["loss"], 4),
                _spread(found["bits_per_byte"], 4),
                _ms(whole, found),
                f"{found['tokens_per_s']:,}" if _timed(whole, found) else "-",
                steps,
            ]
        )
    note = "Losses in nats per token: mean ± half the range (number of seeds)."
    if any(found.get("border") for found in summary["methods"].values()):
        note += " *: at an end of its grid, see below."
    return f"{_table(header, rows)}\n\n{note}"


def _variants(whole: Whole) -> str:
    rows = [
        [name, _spread(found["loss"], 4), _difference(found["against"]), _ms(whole, found)]
        for name, found in whole["summary"]["methods"].items()
        if found["stage"] == "variants"
    ]
    method = whole["study"].get("method", "muon")
    header = ["variant", "validation loss", f"against {method}, seed by seed", "ms a step"]
    return _table(header, rows)


def _shorter(whole: Whole) -> str:
    method, shorter = whole["study"].get("method", "muon"), whole["summary"]["shorter"]
    target = shorter["target"]
    rows = [
        [
            f"{point['share']:.0%}",
            _spread(point, 4),
            "-" if None in (target, point["mean"]) else f"{point['mean'] - target:+.4f}",
        ]
        for point in shorter["points"]
    ]
    header = [f"steps of {method}", "validation loss", f"against {_baseline(whole)} with all steps"]
    return _table(header, rows)


def _baseline(whole: Whole) -> str:
    return str(whole["study"].get("baseline", "adamw"))


def _spread(found: Mapping[str, Any], digits: int) -> str:
    if found["mean"] is None:
        return "-" if not found["diverged"] else f"none of {found['diverged']} runs ended well"
    half = (found["high"] - found["low"]) / 2
    text = f"{found['mean']:.{digits}f} ± {half:.{digits}f} ({found['n']})"
    return text + (f", {found['diverged']} diverged or failed" if found["diverged"] else "")


def _timed(whole: Whole, found: Mapping[str, Any]) -> bool:
    return found["ms"] is not None and not whole["summary"]["timing"]["disturbed"]


def _ms(whole: Whole, found: Mapping[str, Any]) -> str:
    return f"{found['ms']['step']:.1f}" if _timed(whole, found) else "-"


def _steps(shorter: Mapping[str, Any]) -> str:
    if shorter["target"] is None or len(shorter["points"]) < 2:
        return "-"
    if shorter["share"] is None:
        return "not reached"
    return f"{'at most ' if shorter['at_most'] else ''}{shorter['share']:.0%}"


def _difference(found: Mapping[str, Any]) -> str:
    """The mean difference, and whether its sign is the same for all seeds."""
    if found["mean"] is None:
        return "-"
    if found["high"] < 0:
        word = "lower with every seed"
    elif found["low"] > 0:
        word = "higher with every seed"
    else:
        word = "no difference beyond seeds"
    return f"{found['mean']:+.4f}, {word}"


# --- sentences --------------------------------------------------------------------------------


def _sentences(whole: Whole) -> str:
    """What the numbers say, one line a fact, also where it is not what one hopes for."""
    methods = whole["summary"]["methods"]
    lines = [
        f"{name} against {found['against']['name']}: {_difference(found['against'])}"
        f" ({found['against']['n']} pairs)."
        for name, found in methods.items()
        if found["stage"] != "variants"
        and name != found["against"]["name"]
        and found["against"]["n"]
    ]
    lines += _cost(whole)
    if (timing := whole["summary"]["timing"])["disturbed"]:
        low, high = timing["forward_backward_ms"]
        lines.append(
            f"Times of a step are left out: forward and backward, the same work for all methods,"
            f" took {low:.0f} to {high:.0f} ms, so something else used the machine."
        )
    for name, found in methods.items():
        ends = [f"{key} ({_plain(found['point'][key])})" for key in found.get("border", ())]
        if ends:
            lines.append(
                f"The best point of {name} is at an end of its grid in {' and '.join(ends)}: a"
                " wider sweep may find a better one."
            )
    swept = [run for run in whole["runs"] if run["stage"] == "sweep" and run["loss"] is None]
    if swept:
        lines.append(f"Runs of the sweeps that diverged or failed: {len(swept)}.")
    return "\n".join(f"- {line}" for line in lines)


def _cost(whole: Whole) -> list[str]:
    """Steps and time for the baseline's final loss."""
    shorter, baseline = whole["summary"]["shorter"], _baseline(whole)
    method = whole["study"].get("method", "muon")
    if shorter["target"] is None or len(shorter["points"]) < 2:  # no runs of fewer steps
        return []
    if shorter["share"] is None:
        return [f"{method} does not reach the final loss of {baseline} in as many steps."]
    most = "at most " if shorter["at_most"] else ""
    seeds = [f"{share:.0%}" if share is not None else "not reached" for share in shorter["by_seed"]]
    lines = [
        f"{method} needs {most}{shorter['share']:.0%} of the steps of {baseline} for its final"
        f" loss, as runs with a schedule of that length show (seed by seed: {', '.join(seeds)})."
    ]
    if (share := shorter["time_share"]) is not None:
        won = "it wins" if share < 1 else "it does not win"
        lines.append(
            f"By the clock that is {most}{share:.0%} of the time of {baseline} on this machine:"
            f" {won} there."
        )
    return lines
