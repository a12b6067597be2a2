"""One rank of a job in which something goes wrong, and the small optimizer that meets it.

Owns the faults. The rank that has the fault gets it before a step that follows from the seed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardmuon

__all__ = ["LIMIT_S", "SILENT_S", "Orders", "work"]

STEPS = 12
LIMIT_S, SILENT_S = 2.0, 1.5
SHAPES = ((48, 16), (16, 48), (24, 24), (8, 40), (40, 8)) * 4


class Orders(NamedTuple):
    """What a rank is told. who: the rank with the fault. port: of the store that all share."""

    rank: int
    ranks: int
    port: int
    folder: str
    fault: str
    who: int
    seed: int


def work(orders: Orders) -> None:
    """Body of one process; ends with the exit code that train.py would have."""
    torch.set_num_threads(1)
    log = os.open(f"{orders.folder}/rank{orders.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _train(orders)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # as train.py does: the end of a process would wait for the others


def _train(orders: Orders) -> None:
    store = dist.TCPStore("127.0.0.1", orders.port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=orders.rank,
        world_size=orders.ranks,
        timeout=timedelta(seconds=120),
    )
    fault = orders.fault if orders.rank == orders.who else ""
    moment = random.Random(orders.seed).randrange(2, STEPS - 2)
    params = _parameters(fault)
    optimizer = shardmuon.Muon(params, lr=0.02, **_settings(fault))
    with shardmuon.Watchdog(LIMIT_S, SILENT_S):
        for step in range(STEPS):
            if step == moment:
                _strike(fault, orders.seed)
            for _, p in params:
                assert isinstance(p, DTensor)
                p.grad = _placed(torch.randn(p.to_local().shape), tuple(p.shape), p.device_mesh)
            optimizer.step()
            Path(orders.folder, f"rank{orders.rank}.steps").write_text(f"{step + 1}")
            time.sleep(0.01)
    dist.destroy_process_group()


def _strike(fault: str, seed: int) -> None:
    """What happens to this rank."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault in ("killed at any time", "stopped at any time"):
        number = signal.SIGKILL if fault.startswith("killed") else signal.SIGSTOP
        delay = random.Random(-seed).random() * 0.05
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "absent":
        time.sleep(3600)
    elif fault == "late":
        time.sleep(LIMIT_S / 2)
    elif fault == "raises":
        raise ValueError("this rank cannot read its data")
    elif fault == "leaves":
        dist.destroy_process_group()
        os._exit(0)


def _settings(fault: str) -> dict[str, Any]:
    runtime: dict[str, Any] = {"bucket_bytes": 8192}
    if fault == "other runtime":
        runtime["missing_grad"] = "zero"
    if fault == "other bucket size":
        runtime["bucket_bytes"] = 2048
    steps = 4 if fault == "other steps" else 5
    return {"runtime": shardmuon.Runtime(**runtime), "ns_steps": steps}


def _parameters(fault: str) -> list[tuple[str, nn.Parameter]]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    made = []
    for number, (rows, cols) in enumerate(SHAPES):
        wide = cols + (fault == "other shape" and number == 2)
        size = -(-rows // mesh.size())
        here = max(0, min(size, rows - size * mesh.get_rank()))
        name = f"w{number}" + "x" * (fault == "other name" and number == 2)
        made.append((name, nn.Parameter(_placed(torch.randn(here, wide), (rows, wide), mesh))))
    return made[::-1] if fault == "other order" else made


def _placed(local: torch.Tensor, shape: tuple[int, ...], mesh: Any) -> DTensor:
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
