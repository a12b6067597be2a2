"""The timeline of one step over all ranks as a PNG: a row per rank and stream, coloured by phase.

Owns the drawing. Needs matplotlib, which is no dependency of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from shardmuon.planning.simulation import Span
from shardmuon.tools.timeline import COMMUNICATION, REST, Timeline

__all__ = ["draw", "drawable", "planned_rows", "rows"]

# Colours of Okabe and Ito, which colour-blind readers can tell apart: jfly.uni-koeln.de/color
COLOURS = {
    "header": "#999999",
    "prepare": "#56B4E9",
    "gather": "#F0E442",
    "orthogonalize": "#0072B2",
    "scatter": "#E69F00",
    "apply": "#009E73",
    "elements": "#CC79A7",
    COMMUNICATION: "#D55E00",
    REST: "#DDDDDD",
}
NAMES = {REST: "other"}

Bars = dict[str, list[tuple[float, float]]]
"""(start, length) in ms, by phase."""


def drawable() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def rows(ranks: Sequence[Timeline]) -> dict[str, Bars]:
    """Bars of one step by row, from the start of each rank's step on.

    On a GPU a row is a stream, and collectives have a colour of their own; on the host, a phase.
    """
    out: dict[str, Bars] = {}
    for rank, timeline in enumerate(ranks):
        origin = timeline.windows[0][0]
        for span in sorted(timeline.spans, key=lambda span: (_order(span.row), span.start)):
            talks = span.communicates and not timeline.on_host
            phase = COMMUNICATION if talks else span.phase
            bars = out.setdefault(f"rank {rank}, {NAMES.get(span.row, span.row)}", {})
            extent = (span.start - origin) / 1e3, (span.stop - span.start) / 1e3
            bars.setdefault(phase, []).append(extent)
    return out


def _order(row: str) -> tuple[int, int, str]:
    """Phases in the order of a step, streams by number."""
    phases = list(COLOURS)
    last = row.rpartition(" ")[2]
    number = int(last) if last.isdecimal() else 0
    return (phases.index(row) if row in phases else len(phases), number, row)


def planned_rows(spans: Sequence[Span], ranks: Sequence[int]) -> dict[str, Bars]:
    """Bars of a simulated step: of each rank its own work, and what its link carries."""
    out: dict[str, Bars] = {}
    for rank in ranks:
        for row in ("work", "link"):
            out[f"rank {rank}, {row}"] = {}
    for span in spans:
        if span.rank in ranks:
            row = "link" if span.phase in ("header", "gather", "scatter") else "work"
            bars = out[f"rank {span.rank}, {row}"]
            bars.setdefault(span.phase, []).append((span.start, span.stop - span.start))
    return out


def draw(lanes: Mapping[str, Bars], title: str, path: Path) -> None:
    """Write the picture of one step to `path`, as PNG or what else its suffix says."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.6 + 0.32 * len(lanes)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for height, bars in enumerate(lanes.values()):
        for phase, extents in bars.items():
            axes.broken_barh(extents, (height - 0.4, 0.8), facecolors=COLOURS[phase])
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.4, -0.6)  # the first row on top
    names = [name.partition(",")[0] for name in lanes]
    for height in range(1, len(names)):
        if names[height] != names[height - 1]:
            axes.axhline(height - 0.5, color="black", linewidth=0.8)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("ms since the start of each rank's optimizer step")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    present = {phase for bars in lanes.values() for phase in bars}
    keys = [Patch(color=COLOURS[p], label=NAMES.get(p, p)) for p in COLOURS if p in present]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)
