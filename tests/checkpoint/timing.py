"""Times saving and loading beside plain DCP: `python -m tests.checkpoint.timing`.

Every number is a ratio of medians of runs that took turns in one session. What is compared: this
library's save and load with `dcp.save` and `dcp.load` of the same tensors, and what an asynchronous
save takes from the training loop with a copy of the state.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardmuon import Muon, param_groups
from shardmuon.checkpoint import Checkpointer
from shardmuon.checkpoint.contents import collect
from tests.problems import local
from tests.ranks import RankPools

WIDTH = 2048


def model_of(gigabytes: float) -> nn.Module:
    """Sharded linear layers; with their momentum in float32 they make that many 10^9 bytes."""
    layers = max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * 4 * 2)))
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def seconds(act: Callable[[], object]) -> float:
    """Until the slowest rank is done."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - start


def measure(gigabytes: float, folder: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by what was done, and bytes that this rank wrote."""
    model = model_of(gigabytes)
    optimizer = Muon(param_groups(model))
    root = Path(folder)
    sync, back = Checkpointer(root / "a"), Checkpointer(root / "b", read_back=True)
    later = Checkpointer(root / "c", asynchronous=True)
    tensors = dict(collect(model, optimizer).tensors)
    later.save(0, model, optimizer)  # makes the host memory, once
    later.wait()
    copies = {key: local(tensor).clone() for key, tensor in tensors.items()}
    times: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(act))

    def one_round(step: int) -> None:
        plain, ours = root / f"plain{step}", root / "a" / f"step_{step:08d}"
        note("dcp.save", lambda: dcp.save(tensors, checkpoint_id=plain))
        note("save", lambda: sync.save(step, model, optimizer))
        note("save, read-back", lambda: back.save(step, model, optimizer))
        note("dcp.load", lambda: dcp.load(tensors, checkpoint_id=plain))
        note("load", lambda: sync.load(ours, model, optimizer))
        note("copy", lambda: [copies[key].copy_(local(tensors[key])) for key in copies])
        note("save, async", lambda: later.save(step, model, optimizer))
        later.wait()
        mine = f"__{dist.get_rank()}_0.distcp"
        times["bytes"] = [float(os.path.getsize(ours / mine))]
        times["dcp bytes"] = [float(os.path.getsize(plain / mine))]
        dist.barrier()
        if dist.get_rank() == 0:
            for path in (plain, *root.glob(f"[abc]/step_{step:08d}")):
                shutil.rmtree(path)
        dist.barrier()

    for step in range(1, rounds + 1):
        one_round(step)
    for each in (sync, back, later):
        each.close()
    return times


PAIRS = (
    ("save", "dcp.save"),
    ("save, read-back", "dcp.save"),
    ("load", "dcp.load"),
    ("save, async", "copy"),
    ("bytes", "dcp bytes"),
)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 10^9 bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args()
    print("| ranks | what | median | beside | median | ratio |\n|---|---|---|---|---|---|")
    for ranks in options.ranks:
        pools = RankPools()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            answers = pools.run(ranks, measure, options.gb, folder, options.rounds, limit_s=3600.0)
        pools.stop()
        for one, other in PAIRS:
            a, b = (statistics.median(answers[0][name]) for name in (one, other))
            print(f"| {ranks} | {one} | {a:.4g} | {other} | {b:.4g} | {a / b:.3f} |", flush=True)


if __name__ == "__main__":
    main()
