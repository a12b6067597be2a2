"""The table of `python -m shardmuon bench scaling`, from the files that `bench step` wrote.

Owns its columns and their arithmetic. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmuon.tools.workloads import OPTIMIZERS, PACKAGES, WORKLOADS
from shardmuon.training.load import ConfigError

__all__ = ["read", "table"]

COLUMNS = (
    "over AdamW",
    "exposed",
    "imbalance: planned / measured",
    "Newton-Schulz ms: predicted / measured",
    "step / predicted",
    "step falls to",
)


def read(folder: Path) -> list[Mapping[str, Any]]:
    """What `bench step` wrote, by model, batch, ranks and replicas."""
    found = []
    for path in folder.glob("*.json"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            key = [list(WORKLOADS).index(tree["model"])]
            key += [tree[name] for name in ("sequences", "ranks", "replicate")]
            found.append((key, path.name, tree))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} was not written by bench step: {error}") from error
    return [tree for *_, tree in sorted(found, key=lambda each: each[:2])]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: a line for each machine that the numbers are from, and a row for each of them."""
    there = {name for tree in found for name in tree["optimizers"]}
    names = [name for name in (*OPTIMIZERS, *PACKAGES) if name in there]
    several = " / ".join(names)
    times = (f"step ms: {several}", f"iteration ms: {several}")
    header = ("model", "tokens a rank", "ranks", "mesh", *times, *COLUMNS)
    first: dict[tuple[str, int], Mapping[str, Any]] = {}
    for tree in found:
        first.setdefault((tree["model"], tree["sequences"]), tree)
    rows = [_row(tree, first[tree["model"], tree["sequences"]], names) for tree in found]
    where = [f"{t['device']}, torch {t['torch']}, {t['steps']} steps" for t in found]
    return [*dict.fromkeys(where), "", *_markdown(header, rows)]


def _row(
    tree: Mapping[str, Any], first: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, ...]:
    """first: the run of this model and batch with the fewest ranks."""
    measured: Mapping[str, Mapping[str, Any]] = tree["optimizers"]
    ours, adamw = measured.get("shardmuon", {}), measured.get("adamw", {})
    ranks, replicas = tree["ranks"], tree["replicate"]
    over = _ratio(ours.get("iteration_ms"), adamw.get("iteration_ms"))
    falls = _ratio(ours.get("step_ms"), first["optimizers"].get("shardmuon", {}).get("step_ms"))
    ideal = first["ranks"] / ranks
    return (
        tree["model"],
        f"{tree['sequences']} x {tree['tokens']}" if tree["sequences"] else "-",
        str(ranks),
        f"HSDP {replicas} x {ranks // replicas}" if replicas > 1 else "FSDP",
        " / ".join(_text(measured.get(name, {}).get("step_ms"), ".1f") for name in names),
        " / ".join(_text(measured.get(name, {}).get("iteration_ms"), ".1f") for name in names),
        "-" if over is None else f"{(over - 1) * 100:+.1f} %",
        "-" if ours.get("exposed") is None else f"{ours['exposed'] * 100:.1f} %",
        _pair(ours, "imbalance", ".3f"),
        _pair(ours, "makespan_ms", ".2f"),
        _text(_ratio(ours.get("step_ms"), ours.get("makespan_ms")), ".2f"),
        "-" if falls is None else f"{falls:.2f} ({ideal:.2f})",
    )


def _pair(ours: Mapping[str, Any], key: str, form: str) -> str:
    """What the plan promised and what was measured."""
    if ours.get(key) is None:
        return "-"
    return f"{ours[key]:{form}} / {_text(ours.get(f'measured_{key}'), form)}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |".replace(" --- ", "---") for cells in lines]
