"""`python -m shardmuon bench step`: optimizer steps and whole iterations, side by side.

Owns what is measured and how it is shown. Every optimizer gets a model of its own, made anew with
the same seed; times are medians on each rank, and the largest over ranks counts. Profiling comes
after all timing, because a process that has profiled once launches kernels more slowly.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardmuon.exchange import collectives
from shardmuon.muon import Muon
from shardmuon.planning.device import DEVICES
from shardmuon.planning.plan import Plan
from shardmuon.planning.report import table
from shardmuon.planning.simulation import simulate
from shardmuon.tools.profiling import record
from shardmuon.tools.subjects import RUNTIMES, Unfit, make_optimizers, make_subject
from shardmuon.tools.workloads import WORKLOADS, Workload
from shardmuon.training import place
from shardmuon.training.config import Mesh
from shardmuon.training.load import ConfigError
from shardmuon.training.place import Place

__all__ = ["Measured", "measured_loads", "run", "summary"]

FIRST, PROFILED = 3, 3
HEADER = ("optimizer", "step ms", "iteration ms", "peak GB", "first 3, s", "exposed", "imbalance")
NOTES = {
    "vanilla": "torch.optim.Muon on the DTensors as they are",
    "owner": "all matrices in one bucket, so that nothing hides the exchange",
    "overlap": "shardmuon with Runtime(overlap='backward')",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One optimizer: the largest values over ranks; None: not measured here.

    first_steps_s: the optimizer made and the first three iterations with it. peak_gb: 10^9 bytes
    that torch had allocated at once. exposed: share of a step in which only communication ran.
    imbalance, makespan_ms: what the plan promises of Newton-Schulz, the time by the device's model.
    measured_imbalance, measured_makespan_ms: of the time that ranks spent in it.
    """

    step_ms: float
    iteration_ms: float | None
    peak_gb: float | None
    first_steps_s: float
    exposed: float | None = None
    imbalance: float | None = None
    makespan_ms: float | None = None
    measured_imbalance: float | None = None
    measured_makespan_ms: float | None = None


def run(
    model: str,
    names: Sequence[str],
    steps: int,
    file: Path | None,
    replicate: int = 1,
    sequences: int | None = None,
) -> None:
    """Measure the optimizers called `names` on the workload `model` and print a table. Collective.

    steps: measured iterations after three that are not. file: where to write all numbers as JSON.
    replicate: replicas of the sharded model (HSDP). sequences: of a rank, None the workload's own.
    """
    workload = _workload(model, sequences)
    if place.ranks_started() % replicate:
        raise ConfigError(
            f"--replicate: got {replicate}, expected a divisor of the number of ranks, "
            f"{place.ranks_started()}"
        )
    mesh = Mesh(replicate=replicate)
    here = place.start(mesh, place.choose_device(mesh))
    say = print if here.first else _silent
    title = _title(model, workload, here, replicate)
    say(title)
    found: dict[str, Measured] = {}
    for name in names:
        result = _measure_or_skip(name, workload, here, steps)
        if isinstance(result, Measured):
            found[name] = result
            note = f" ({NOTES[name]})" if name in NOTES else ""
            say(f"measured {name}{note}", flush=True)
        else:
            say(f"skipped {name}: {result}", flush=True)
    for name, each in found.items():
        found[name] = replace(each, **_profiled(name, workload, here))
    lines = summary(found)
    say("\n" + "\n".join([*table(HEADER, _rows(found)), "", *lines]))
    if file is not None and here.first:
        results = {name: asdict(each) for name, each in found.items()}
        tree = {"model": model, "title": title, "ranks": here.ranks, "replicate": replicate}
        tree |= {"sequences": workload.sequences, "tokens": workload.tokens, "steps": steps}
        tree |= {"device": _device(here), "torch": torch.__version__}
        tree |= {"optimizers": results, "summary": lines}
        file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    collectives.barrier()
    collectives.stop()


def _workload(model: str, sequences: int | None) -> Workload:
    workload = WORKLOADS[model]
    if sequences is None:
        return workload
    if not workload.trains:
        raise ConfigError(f"--sequences: got {sequences}, expected none, {model} takes no tokens")
    return replace(workload, sequences=sequences)


def _silent(*_: object, **__: object) -> None:
    pass


def _title(model: str, workload: Workload, here: Place, replicate: int) -> str:
    batch = f"{workload.sequences} x {workload.tokens} tokens a rank"
    batch = batch if workload.trains else "parameters with made-up gradients"
    mesh = f" ({replicate}x{here.ranks // replicate})" if replicate > 1 else ""
    ranks = f"{here.ranks} rank(s){mesh}"
    return f"{model}, {batch}, {ranks} on {_device(here)}, torch {torch.__version__}"


def _device(here: Place) -> str:
    if here.device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} thread(s)"


def _measure_or_skip(name: str, workload: Workload, here: Place, steps: int) -> Measured | str:
    """What was measured, or why nothing was. Another package may fail in any way, on all ranks."""
    try:
        result: Measured | str = _measure(name, workload, here, steps)
    except Unfit as error:
        result = str(error)
    except Exception as error:
        if name in RUNTIMES:
            raise
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}".splitlines()[0]
    _forget(here)
    ranks: list[Measured | str] = collectives.gather_objects(result)
    texts = [each for each in ranks if isinstance(each, str)]
    return texts[0] if texts else _largest([each for each in ranks if isinstance(each, Measured)])


def _forget(here: Place) -> None:
    """Free what the last optimizer and its model held."""
    gc.collect()
    if here.device.type == "cuda":
        torch.cuda.empty_cache()


def _largest(ranks: Sequence[Measured]) -> Measured:
    """The largest value of each field over ranks."""
    trees = [asdict(each) for each in ranks]
    values: dict[str, Any] = {}
    for key in trees[0]:
        there = [tree[key] for tree in trees if tree[key] is not None]
        values[key] = max(there, default=None)
    return Measured(**values)


def _measure(name: str, workload: Workload, here: Place, steps: int) -> Measured:
    """One optimizer on this rank, on a model of its own."""
    clock = _Clock(here.device)
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    subject = make_subject(workload, here)
    subject.backward()  # libraries and process groups start here, at no optimizer's expense
    clock.settle()
    begin = time.perf_counter()
    subject.optimizers = make_optimizers(name, subject)
    for _ in range(FIRST):
        subject.iterate()
    clock.settle()
    first = time.perf_counter() - begin
    times = [_marked(clock, subject.iterate) for _ in range(steps)]
    clock.settle()
    peak = torch.cuda.max_memory_allocated() / 1e9 if clock.cuda else None
    plan = next((o.plan for o in subject.optimizers if isinstance(o, Muon)), None)
    return Measured(
        step_ms=statistics.median(clock.between(marks[1], marks[2]) for marks in times),
        iteration_ms=statistics.median(clock.between(marks[0], marks[2]) for marks in times)
        if workload.trains
        else None,
        peak_gb=peak,
        first_steps_s=first,
        imbalance=None if plan is None else plan.imbalance,
        makespan_ms=None if plan is None else _makespan_ms(plan, clock.cuda),
    )


def _makespan_ms(plan: Plan, cuda: bool) -> float:
    """Newton-Schulz of the busiest rank, as `python -m shardmuon plan` predicts it."""
    times = simulate(plan, DEVICES["h200" if cuda else "cpu"]).phase_ms("orthogonalize")
    return max(times.values(), default=0.0)


def _profiled(name: str, workload: Workload, here: Place) -> dict[str, float]:
    """What profiled steps add, means over them.

    Nothing without a GPU if phases have no names: the host then seems to compute while it waits.
    """
    if here.device.type != "cuda" and name not in RUNTIMES:
        return {}
    subject = make_subject(workload, here)
    subject.optimizers = make_optimizers(name, subject)
    for _ in range(FIRST):
        subject.iterate()
    with tempfile.TemporaryDirectory() as folder:
        found = record(subject, PROFILED, Path(folder) / "trace.json.gz")
    del subject
    _forget(here)
    times = found.summary()
    ranks = collectives.gather_objects((times.exposed_share, times.orthogonalize_ms))
    shares, busy_ms = zip(*ranks, strict=True)
    return {"exposed": max(shares), **measured_loads(busy_ms)}


def measured_loads(busy_ms: Sequence[float]) -> dict[str, float]:
    """Makespan and imbalance of the times that ranks took; nothing if no phase was named."""
    if not any(busy_ms):
        return {}
    makespan = max(busy_ms)
    imbalance = makespan * len(busy_ms) / sum(busy_ms)
    return {"measured_makespan_ms": makespan, "measured_imbalance": imbalance}


class _Clock:
    """Instants of the GPU's stream, or of the host without a GPU.

    Nothing waits between iterations, as in training, so the host may run ahead of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds; on a GPU only after `settle`."""
        return float(begin.elapsed_time(end)) if self.cuda else (end - begin) * 1e3

    def settle(self) -> None:
        """Wait for the GPU and for the other ranks."""
        if self.cuda:
            torch.cuda.synchronize()
        collectives.barrier()


def _marked(clock: _Clock, iterate: Callable[[Callable[[], object]], None]) -> list[Any]:
    """The instants before, between and after backward and step of one iteration."""
    marks: list[Any] = []
    iterate(lambda: marks.append(clock.now()))
    return marks


def _rows(found: dict[str, Measured]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{each.step_ms:.1f}",
            _text(each.iteration_ms, ".1f"),
            _text(each.peak_gb, ".1f"),
            f"{each.first_steps_s:.1f}",
            _text(each.exposed, ".1%"),
            _imbalances(each),
        )
        for name, each in found.items()
    ]


def _imbalances(each: Measured) -> str:
    """Planned and measured."""
    if each.imbalance is None:
        return "-"
    return f"{each.imbalance:.3f} / {_text(each.measured_imbalance, '.3f')}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary(found: dict[str, Measured]) -> list[str]:
    """shardmuon against vanilla and against AdamW, in two lines; '-' where one was not measured."""
    ours, vanilla, adamw = (found.get(name) for name in ("shardmuon", "vanilla", "adamw"))
    step = None if ours is None or vanilla is None else vanilla.step_ms / ours.step_ms
    overhead = _iterations(ours, adamw)
    return [
        f"shardmuon over vanilla: step {_text(step, '.2f')} times as fast, "
        f"iteration {_text(_iterations(vanilla, ours), '.2f')} times as fast",
        "iteration with shardmuon over AdamW's: "
        + _text(None if overhead is None else overhead - 1, "+.1%"),
    ]


def _iterations(a: Measured | None, b: Measured | None) -> float | None:
    """Iteration time of `a` over that of `b`."""
    if a is None or b is None or a.iteration_ms is None or b.iteration_ms is None:
        return None
    return a.iteration_ms / b.iteration_ms
