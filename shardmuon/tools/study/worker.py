"""A process that trains one run of a study after another.

Owns how a run is performed in a process that goes on living, and what is kept of it: `status`
("done", "diverged" or "failed", with `error`), the final validation `loss` in nats per token and
`bits_per_byte`, `curve` and `validation` as [steps, losses], the median `ms` of a step and of its
two parts, `steps` and `seconds` of the whole run.
"""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardmuon.training import metrics, run
from shardmuon.training.config import Config

__all__ = ["perform", "serve", "thin"]

CURVE_POINTS = 60
_NOT_FINITE = re.compile(r"\b(nan|inf)\b|finite", re.IGNORECASE)


def serve(pipe: Any, number: int) -> None:
    """Perform the configurations that come through `pipe`, until None comes.

    number: of this worker; workers spread over the GPUs of the machine.
    """
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    os.environ["LOCAL_RANK"] = str(number % max(1, gpus))
    while (config := pipe.recv()) is not None:
        pipe.send(perform(config))


def perform(config: Config) -> dict[str, Any]:
    """Train one run in its folder, which is removed in the end; its numbers. Does not raise."""
    folder = Path(config.logging.directory)
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    error = None
    try:
        run.run(run.prepare(config), ())
    except Exception as problem:  # of any type: one run must not end a study
        error = f"{type(problem).__name__}: {problem}"
    numbers = _numbers(folder / "metrics.jsonl", error)
    shutil.rmtree(folder, ignore_errors=True)
    if config.compute.compile:
        torch._dynamo.reset()  # else graphs of earlier models count towards its limits
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {**numbers, "seconds": round(time.perf_counter() - began, 1)}


def _numbers(path: Path, error: str | None) -> dict[str, Any]:
    train = metrics.read(path, "train") if path.exists() else []
    evaluations = metrics.read(path, "evaluate") if path.exists() else []
    last = evaluations[-1] if evaluations and error is None else {}
    loss = last.get("loss")
    first = train[0]["loss"] if train else None
    if error is not None and not _NOT_FINITE.search(error):
        status = "failed"
    elif loss is None or (first is not None and loss > first):
        status = "diverged"
    else:
        status = "done"
    return {
        "status": status,
        "error": error,
        "loss": _rounded(loss) if status == "done" else None,
        "bits_per_byte": _rounded(last.get("bits_per_byte")) if status == "done" else None,
        "steps": train[-1]["step"] if train else 0,
        "curve": thin([(r["step"], r["loss"]) for r in train], CURVE_POINTS),
        "validation": [
            [r["step"] for r in evaluations],
            [_rounded(r["loss"]) for r in evaluations],
        ],
        "ms": _times(train),
    }


def thin(points: Sequence[tuple[int, float | None]], most: int) -> list[list[float]]:
    """[steps, losses]: means of neighbours, so that at most `most` are left."""
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    size = max(1, math.ceil(len(finite) / most))
    groups = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [
        [round(statistics.fmean(x for x, _ in group), 1) for group in groups],
        [round(statistics.fmean(y for _, y in group), 4) for group in groups],
    ]


def _times(train: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Medians in ms over records after the first tenth, in which kernels warm up."""
    settled = train[len(train) // 10 + 1 :]
    if not settled:
        return None
    return {
        name: round(1e3 * statistics.median(r["seconds"][name] for r in settled), 2)
        for name in ("step", "forward_backward", "optimizer")
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
