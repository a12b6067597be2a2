"""Profiled iterations of a subject, as a Chrome trace in a file.

Owns the use of torch's profiler.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardmuon.exchange import collectives
from shardmuon.tools import timeline
from shardmuon.tools.subjects import Subject

__all__ = ["record"]


def record(subject: Subject, steps: int, path: Path) -> timeline.Timeline:
    """Profile `steps` iterations, after one that warms the profiler up. Collective.

    Writes `path`, which ends in .json.gz, and returns what it says.
    """
    activities = [ProfilerActivity.CPU]
    if subject.place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    collectives.barrier()
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        acc_events=True,  # else some versions warn that they keep one cycle, which is all there is
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + steps):
            subject.iterate()
            if subject.place.device.type == "cuda":
                torch.cuda.synchronize()  # no step runs into the profiler's start or end
            profiler.step()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    return timeline.read(trace["traceEvents"])
