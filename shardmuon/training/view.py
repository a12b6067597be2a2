"""The live view of a run: its numbers, and how they are laid out in so many columns.

Owns what the view says. A `View` takes records; `layout` turns it into rich's renderables without
touching it. Draws nothing itself: `live.py` owns the terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardmuon.training import sparks
from shardmuon.training.progress import Pace, clock_text, last_step, validation_text

__all__ = ["View", "layout"]

_LABEL = 11  # columns of the names on the left
_LOW = 16  # rows of a terminal below which only the most important lines are shown
_EVENTS = 3
_OTHER = "bright_black"
_SPLIT = (("forward_backward", "forward+backward", "blue"), ("optimizer", "optimizer", "yellow"))


class View:
    """The newest numbers of a run and the course of its loss."""

    def __init__(self) -> None:
        self.folder = ""
        self.steps = 0
        self.ranks = 1
        self.pace = Pace(0, 0)
        self.loads: Sequence[float] = ()
        self.losses = sparks.Series()
        self.train: Mapping[str, Any] = {}
        self.evaluation: tuple[int, Mapping[str, Any]] | None = None
        self.best: tuple[int, float] | None = None
        self.events: deque[tuple[int, str]] = deque(maxlen=_EVENTS)

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Take one record of the run; the first is its start."""
        if event == "start":
            config = numbers["config"]
            self.folder, self.steps = config["logging"]["directory"], config["schedule"]["steps"]
            self.ranks, self.loads = numbers["ranks"], numbers.get("loads_flops") or ()
            self.pace = Pace(step, last_step(config))
        elif event == "train":
            self.train = numbers
            self.losses.add(_number(numbers["loss"]))
        elif event == "evaluate":
            loss = _number(numbers["loss"])
            self.evaluation = step, numbers
            if self.best is None or loss < self.best[1]:
                self.best = step, loss


def layout(view: View, width: int, height: int = 24) -> RenderableType:
    """The view in at most `width` columns and, if they are enough for it, `height` rows."""
    low = height < _LOW
    lines: list[RenderableType] = [_head(view, width), _bar(view, width), ""]
    rows = Table.grid(padding=(0, 1, 0, 0))
    rows.add_column(width=_LABEL, style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    room = width - _LABEL - 2
    for name, value in _rows(view, room, chart_rows=1 if low else 3):
        rows.add_row(name, value)
    lines.append(rows)
    if view.events and not low:
        lines += ["", *(_event(step, text, width) for step, text in view.events)]
    # What another process prints begins on a line of its own.
    return Group(*lines, "")


def _head(view: View, width: int) -> Text:
    ranks = f"{view.ranks:,} rank" + ("s" if view.ranks > 1 else "")
    place = f"step {view.pace.done:,} of {view.steps:,}   {ranks}"
    left = Text().append(view.folder, style="bold")
    left.truncate(max(8, width - len(place) - 3), overflow="ellipsis")
    left.pad_right(max(1, width - len(left) - len(place)))
    return left.append(place)


def _bar(view: View, width: int) -> Text:
    share = view.pace.done / view.steps if view.steps else 0.0
    text = f" {share:4.0%}  {clock_text(view.pace.elapsed_s)} so far, {view.pace.eta()} to go"
    room = max(4, width - len(text) - 1)
    filled = sparks.bar(share, room)
    line = Text().append(filled, style="cyan").append("─" * (room - len(filled)), style="dim")
    return line.append(text)


def _rows(view: View, room: int, chart_rows: int) -> list[tuple[str, RenderableType]]:
    if not view.train:
        return [("", "the first step is under way"), *_loads(view, room)]
    train = view.train
    rates = "  ".join(f"{name.partition('.')[0]} {lr:.2e}" for name, lr in _rates(train).items())
    facts = (
        f"{train['tokens_per_s']:,.0f} tokens/s",
        f"gradient norm {_number(train['grad_norm']):.2f}",
        f"memory {train['memory_bytes'] / 1e9:.1f} GB",
    )
    return [
        ("loss", _loss(view, room, chart_rows)),
        ("validation", _validation(view, room)),
        ("step time", _split(train["seconds"], room)),
        ("speed", _flow(facts, room)),
        ("lr", Text(rates)),
        *_loads(view, room),
    ]


def _rates(train: Mapping[str, Any]) -> dict[str, float]:
    """The learning rate of the first group of each algorithm."""
    rates: dict[str, float] = {}
    for name, lr in train["lr"].items():
        rates.setdefault(name.partition(".")[0], lr)
    return rates


def _loss(view: View, room: int, chart_rows: int) -> Text:
    """The newest loss, beside it the course of it with the largest and smallest number shown."""
    newest = f"{_number(view.train['loss']):.4f}  "
    rows, top, bottom = sparks.chart(view.losses.means, room - len(newest) - 8, chart_rows)
    text = Text().append(newest, style="bold")
    for number, row in enumerate(rows):
        if number:
            text.append("\n" + " " * len(newest))
        text.append(row, style="cyan")
        if number == 0 and len(view.losses.means) > 1:
            text.append(f" {top:.2f}", style="dim")
        elif number == len(rows) - 1 and len(view.losses.means) > 1:
            text.append(f" {bottom:.2f}", style="dim")
    return text


def _validation(view: View, room: int) -> Text:
    if view.evaluation is None or view.best is None:
        return Text("not yet", style="dim")
    step, numbers = view.evaluation
    shown = validation_text(_number(numbers["loss"]), numbers["bits_per_byte"])
    facts = [shown.removeprefix("loss "), f"step {step:,}"]
    if view.best[0] != step:
        facts.append(f"best {view.best[1]:.4f} at step {view.best[0]:,}")
    text = _flow(facts, room)
    text.stylize("bold", 0, len(facts[0].partition(" ")[0]))
    return text


def _split(seconds: Mapping[str, float], room: int) -> Text:
    """Mean time of a step and a bar of its phases, with their names under it."""
    whole = seconds["step"] or 1e-9
    head = f"{_ms(whole)}  "
    text = Text().append(head, style="bold")
    cells = min(48, room - len(head))
    parts = [(name, seconds.get(key, 0.0), colour) for key, name, colour in _SPLIT]
    rest = max(0.0, whole - sum(part for _, part, _ in parts))
    for _, part, colour in parts:
        text.append("█" * round(cells * part / whole), style=colour)
    text.append("█" * max(0, cells + len(head) - len(text)), style=_OTHER)
    parts.append(("other", rest, _OTHER))
    names = _flow([f"■ {name} {_ms(part)}" for name, part, _ in parts], room)
    for name, _, colour in parts:
        at = names.plain.index(f"■ {name}")
        names.stylize(colour, at, at + 1)
    return text.append("\n").append(names)


def _loads(view: View, room: int) -> list[tuple[str, RenderableType]]:
    """Each rank's share of Newton-Schulz, from the optimizer's plan."""
    loads = view.loads
    if len(loads) < 2 or not sum(loads):
        return []
    mean = sum(loads) / len(loads)
    idle = sum(load == 0 for load in loads)
    row = sparks.heat_row(loads, min(64, room))
    shared = f" ({len(loads) // len(row)} or more ranks a cell)" if len(row) < len(loads) else ""
    facts = [
        f"least {min(loads) / mean:.2f}, most {max(loads) / mean:.2f} of the mean{shared}",
        *([f"{idle:,} without work"] if idle else []),
    ]
    text = Text().append(row, style="magenta").append("\n").append(_flow(facts, room))
    return [("rank loads", text)]


def _event(step: int, text: str, width: int) -> Text:
    line = Text().append(f"step {step:,}".ljust(_LABEL + 1), style="dim").append(text)
    line.truncate(width, overflow="ellipsis")
    return line


def _flow(facts: Sequence[str], room: int) -> Text:
    """The facts side by side, on more lines where they do not fit."""
    lines = [""]
    for fact in facts:
        joined = f"{lines[-1]}   {fact}" if lines[-1] else fact
        if len(joined) <= room:
            lines[-1] = joined
        else:
            lines.append(fact)
    return Text("\n".join(line for line in lines if line))


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def _number(value: float | None) -> float:
    """Numbers that are not finite are null in metrics.jsonl."""
    return float("nan") if value is None else value
