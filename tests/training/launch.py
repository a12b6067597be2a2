"""Runs of `train.py` for tests: as a user starts it, or by the ranks of a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardmuon.exchange import collectives
from shardmuon.training import run
from shardmuon.training.load import load
from tests import ranks

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90

SMALL = [
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=48",
    "data.sequence_length=32",
    "data.batch_sequences=8",
    "accumulation.steps=2",
    "schedule.steps=6",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=3",
    "evaluation.every=3",
    "evaluation.sequences=5",
    "checkpoint.every=3",
    "logging.every=1",
    "mesh.timeout_s=60",
]


def text_files(folder: Path) -> list[str]:
    """Overrides that train on a few short files instead of the standard library."""
    for source in ("launch.py", "test_data.py", "test_config.py"):
        (folder / source).write_bytes((Path(__file__).parent / source).read_bytes())
    return ["data.source=text", f"data.files=[{folder}/*.py]"]


def train(
    *arguments: str, ranks: int = 2, script: Path = ROOT / "train.py"
) -> subprocess.CompletedProcess[str]:
    """Run the script on `ranks` ranks through torchrun, or alone; never hangs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script), *arguments]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def train_as_rank(config: str, overrides: Sequence[str]) -> None:
    """A whole run by the ranks of the pool; they have a process group already and keep it."""
    device = ranks.device()
    environment = {
        "RANK": collectives.rank(),
        "LOCAL_RANK": device.index or 0,
        "WORLD_SIZE": collectives.world_size(),
    }
    wanted = load(config, [f"mesh.device={device.type}", *overrides])
    wanted.check_ranks(collectives.world_size())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        patch.setattr(collectives, "start", lambda *_: None)
        patch.setattr(collectives, "stop", lambda: None)
        run.run(run.prepare(wanted), [])


def final_tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, by their path."""
    dcp_to_torch_save(checkpoint, scratch / "whole.pt")
    flat: dict[str, torch.Tensor] = {}

    def collect(where: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat[where] = value
            return
        for key, item in value.items():
            collect(f"{where}/{key}", item)

    collect("", torch.load(scratch / "whole.pt", weights_only=True))
    return flat
