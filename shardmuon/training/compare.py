"""Runs side by side: `python -m shardmuon.training.compare RUN [RUN ...]`.

Owns the reading of finished runs. Step times are medians over logged steps after the first tenth,
in which kernels and communicators warm up. Torch-free numbers in, one text table out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardmuon.planning.report import table
from shardmuon.training import metrics

__all__ = ["compare", "main"]

_HEADER = ("run", "steps", "val loss", "bits/byte", "fwd+bwd ms", "optimizer ms", "step ms", "GB")


def compare(folders: Sequence[Path]) -> str:
    """A table with one row per run folder. Raises FileNotFoundError without its metrics."""
    return "\n".join(table(_HEADER, [_row(folder) for folder in folders]))


def _row(folder: Path) -> tuple[str, ...]:
    path = folder / "metrics.jsonl"
    train, evaluations = metrics.read(path, "train"), metrics.read(path, "evaluate")
    settled = train[len(train) // 10 + 1 :] or train
    last: dict[str, Any] = evaluations[-1] if evaluations else {}
    return (
        str(folder),
        str(train[-1]["step"]),
        _number(last.get("loss"), 4),
        _number(last.get("bits_per_byte"), 3),
        *(_median_ms(settled, name) for name in ("forward_backward", "optimizer", "step")),
        f"{max(record['memory_bytes'] for record in train) / 1e9:.2f}",
    )


def _median_ms(records: Sequence[dict[str, Any]], name: str) -> str:
    return f"{1e3 * statistics.median(record['seconds'][name] for record in records):.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main(arguments: Sequence[str]) -> int:
    """Print the table; exit code 2 and one line if a folder holds no metrics."""
    try:
        print(compare([Path(name) for name in arguments]))
    except FileNotFoundError as error:
        print(f"compare: no run at {error.filename}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
