"""Pictures of docs/concepts.md as SVG, drawn from plans: `python -m docs.draw`.

Owns the drawing. The plans are made by the library for models that are not there, and the timeline
is its simulation of a step. The same program gives the same bytes. Each picture brings its own
light ground, so that it can be read on dark pages too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.cut import Cut
from shardmuon.planning.device import DEVICES
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.models import MODELS
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import make_plan
from shardmuon.planning.simulation import simulate

__all__ = ["PICTURES", "ownership", "phases", "timeline", "write"]

FOLDER = Path(__file__).parent / "pictures"
GROUND, INK, RULE, PALE = "#f6f7f9", "#1f2430", "#c4c9d4", "#e4e7ee"
# Colours of Okabe and Ito, which colour-blind readers can tell apart; those of tools/picture.py.
PHASES = {
    "prepare": "#56B4E9",
    "gather": "#F0E442",
    "orthogonalize": "#0072B2",
    "scatter": "#E69F00",
    "apply": "#009E73",
}
OF_RANK = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
SEGMENTS = (3, 2)
MIB = 2**20


class Canvas:
    """Marks of one picture; coordinates in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.marks: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = "none") -> None:
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2"'
            f' fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: int = 13,
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
            f' fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        self.marks.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"'
            ' stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        width, height = self.size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img"'
            ' font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"'
            f' markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
            *self.marks,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _plan(shapes: Iterable[tuple[str, int, int]], ranks: int, bucket_bytes: int | None) -> Plan:
    """FSDP2 over `ranks` ranks: each matrix sharded by rows."""
    layout = Layout(Mesh(tuple(range(ranks)), (ranks,)), (Split(0, 0),))
    matrices = [
        Matrix(
            name,
            Cut((rows, cols)),
            layout,
            "bfloat16",
            2,
            newton_schulz_flops(rows, cols, SEGMENTS, "gram"),
            method="gram",
            segments=SEGMENTS,
        )
        for name, rows, cols in shapes
    ]
    return make_plan(matrices, bucket_bytes=bucket_bytes)


def block_plan() -> Plan:
    """One block of a model of width 1024 with fused attention, on four ranks."""
    block = [("qkv", 3072, 1024), ("proj", 1024, 1024), ("up", 4096, 1024), ("down", 1024, 4096)]
    return _plan(block, 4, None)


def ownership() -> str:
    """Left, what each rank holds of each matrix; right, who orthogonalizes it whole."""
    plan = block_plan()
    loads = plan.loads()
    rows = sorted(plan, key=lambda pair: pair[0].id)
    canvas = Canvas(760, 96 + 92 * len(rows), "Every rank holds a part; one rank owns the whole")
    canvas.text(24, 30, "sharded by rows over 4 ranks", bold=True)
    canvas.text(430, 30, "owner, with the whole matrix", bold=True)
    for number, (matrix, owner) in enumerate(rows):
        top = 48 + 92 * number
        canvas.text(24, top + 42, matrix.id, bold=True)
        canvas.text(24, top + 58, f"{matrix.rows} x {matrix.cols}", size=11)
        for rank in plan.ranks:
            block = matrix.block_at((rank,))
            y = top + 78 * block.row_start / matrix.rows
            height = 78 * block.rows / matrix.rows
            canvas.box(130, y, 150, height - 2, OF_RANK[rank])
            canvas.text(
                205,
                y + height / 2 + 4,
                f"rank {rank}",
                anchor="middle",
                size=11,
                fill="white" if rank in (0, 2) else INK,
            )
            canvas.arrow(286, y + height / 2, 424, top + 39, INK)
        canvas.box(430, top, 150, 76, OF_RANK[owner])
        canvas.text(
            505,
            top + 43,
            f"rank {owner}",
            anchor="middle",
            bold=True,
            fill="white" if owner in (0, 2) else INK,
        )
        canvas.text(596, top + 36, f"{matrix.cost / 1e9:.0f} GFLOP", size=12)
        canvas.text(596, top + 52, "of Newton-Schulz", size=11)
    words = ", ".join(f"rank {rank} {load / 1e9:.0f}" for rank, load in sorted(loads.items()))
    canvas.text(24, canvas.size[1] - 16, f"GFLOP a step: {words}", size=12)
    return canvas.svg()


def phases() -> str:
    """The five phases of one bucket of two matrices on two ranks, from a plan."""
    plan = _plan([("A", 1024, 1024), ("B", 1024, 1024)], 2, None)
    owned = {owner: matrix.id for matrix, owner in plan}
    canvas = Canvas(760, 330, "The five phases of a step")
    steps = {
        "prepare": ("momentum and gradient", "to the block that is sent"),
        "gather": ("blocks travel", "to the owners"),
        "orthogonalize": ("Newton-Schulz on", "whole matrices"),
        "scatter": ("updates travel", "back"),
        "apply": ("decay and update", "of the own rows"),
    }
    for number, (phase, words) in enumerate(steps.items()):
        x = 84 + 134 * number
        canvas.box(x, 20, 122, 26, PHASES[phase])
        dark = phase in ("orthogonalize", "apply")
        canvas.text(x + 61, 38, phase, anchor="middle", bold=True, fill="white" if dark else INK)
        for line, text in enumerate(words):
            canvas.text(x + 61, 292 + 16 * line, text, anchor="middle", size=11)
    for rank in plan.ranks:
        top = 66 + 106 * rank
        canvas.text(20, top + 44, f"rank {rank}", bold=True)
        for number, phase in enumerate(steps):
            x = 84 + 134 * number
            if phase in ("prepare", "apply"):
                _halves(canvas, x + 14, top, rank)
            elif phase == "orthogonalize":
                canvas.box(x + 32, top + 8, 58, 74, OF_RANK[rank])
                canvas.text(
                    x + 61,
                    top + 50,
                    owned[rank],
                    anchor="middle",
                    size=18,
                    bold=True,
                    fill="white" if rank == 0 else INK,
                )
    for number, phase in ((1, "gather"), (3, "scatter")):
        x = 84 + 134 * number
        for start in (0, 1):
            for stop in (0, 1):
                y, to_y = 110 + 106 * start, 110 + 106 * stop
                canvas.arrow(x + 8, y, x + 114, to_y, OF_RANK[start if phase == "gather" else stop])
    return canvas.svg()


def _halves(canvas: Canvas, x: float, top: float, rank: int) -> None:
    """The rows that `rank` holds of A and B, in the place that they have in the whole."""
    for index, name in enumerate("AB"):
        left = x + 50 * index
        canvas.box(left, top + 8, 42, 74, PALE, RULE)
        canvas.box(left, top + 8 + 37 * rank, 42, 37, OF_RANK[rank])
        canvas.text(
            left + 21,
            top + 32 + 37 * rank,
            name,
            anchor="middle",
            bold=True,
            fill="white" if rank == 0 else INK,
        )


def timeline_plan() -> Plan:
    """Llama 3 of 1 billion parameters on four ranks, in buckets small enough to be seen."""
    shapes = [
        (f"{kind}.{number}", rows, cols)
        for kind, (count, rows, cols) in enumerate(MODELS["llama3-1b"])
        for number in range(count)
    ]
    return _plan(shapes, 4, 96 * MIB)


def timeline() -> str:
    """A simulated step: each rank's own work, and what its link carries meanwhile."""
    plan = timeline_plan()
    simulation = simulate(plan, DEVICES["h200"])
    end = max(span.stop for span in simulation.spans)
    left, wide, tall = 112, 616, 20
    height = 92 + 54 * len(plan.ranks)
    canvas = Canvas(760, height, "A step in time: exchange runs beside the work")
    scale = wide / end
    x = float(left)
    for phase, colour in PHASES.items():
        canvas.box(x, 16, 14, 14, colour)
        canvas.text(x + 20, 28, phase, size=12)
        x += 32 + 8 * len(phase) + 12
    for rank in plan.ranks:
        for row, name in enumerate(("work", "link")):
            y = 48 + 54 * rank + 24 * row
            canvas.text(20, y + 15, f"rank {rank}, {name}", size=12)
            canvas.box(left, y, wide, tall, PALE)
    for span in simulation.spans:
        if span.phase in PHASES:
            y = 48 + 54 * span.rank + (24 if span.phase in ("gather", "scatter") else 0)
            width = max(0.6, (span.stop - span.start) * scale)
            canvas.box(left + span.start * scale, y, width, tall, PHASES[span.phase])
    _axis(canvas, left, height - 40, scale, end)
    return canvas.svg()


def _axis(canvas: Canvas, left: float, y: float, scale: float, end: float) -> None:
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50) if end / s <= 10)
    for number in range(int(end / step) + 1):
        x = left + number * step * scale
        canvas.box(x, y, 1, 6, INK)
        canvas.text(x, y + 20, f"{number * step:g} ms", anchor="middle", size=11)


PICTURES = {"ownership": ownership, "phases": phases, "timeline": timeline}


def write(folder: Path = FOLDER, names: Sequence[str] = tuple(PICTURES)) -> None:
    """Write the pictures into `folder`."""
    for name in names:
        (folder / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")


if __name__ == "__main__":
    write()
