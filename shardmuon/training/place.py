"""Where this process runs: device, ranks and mesh; and a model spread over them.

Owns the start of the process group and the FSDP2 wrapping. Must not know optimizers or data.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardmuon.exchange import collectives
from shardmuon.training.config import Mesh, Precision
from shardmuon.training.load import ConfigError
from shardmuon.training.model import CausalLM

__all__ = [
    "Place",
    "autocast",
    "choose_device",
    "launcher",
    "ranks_started",
    "spread",
    "start",
]

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among all. `mesh` is 1-D over all ranks, None in one process."""

    device: torch.device
    rank: int
    ranks: int
    mesh: DeviceMesh | None

    @property
    def first(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0


def ranks_started() -> int:
    """Ranks that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher() -> str:
    """The command that starts as many ranks again, by this interpreter: no PATH is assumed."""
    python = sys.executable.removeprefix(f"{os.getcwd()}/")
    if "WORLD_SIZE" not in os.environ:
        return python
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks_started()))
    nodes = "--standalone" if local == ranks_started() else f"--nnodes {ranks_started() // local}"
    return f"{python} -m torch.distributed.run {nodes} --nproc-per-node {local}"


def choose_device(config: Mesh) -> torch.device:
    """The device of this process. Raises ConfigError if it is not there; starts nothing."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"mesh.device: got '{config.device}' with {torch.cuda.device_count()} GPUs, "
            f"expected at least {local_rank + 1}, one per rank of this machine"
        )
    return torch.device("cuda", local_rank)


def start(config: Mesh, device: torch.device) -> Place:
    """Make the process group and the mesh if torchrun started more than one rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = ranks_started()
    if ranks == 1:
        return Place(device=device, rank=0, ranks=1, mesh=None)
    cuda = device.type == "cuda"
    collectives.start("nccl" if cuda else "gloo", config.timeout_s, device if cuda else None)
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return Place(device=device, rank=collectives.rank(), ranks=ranks, mesh=mesh)


def spread(model: CausalLM, place: Place, precision: Precision) -> nn.Module:
    """Move the model to its device and shard it, in place: each block alone, then the rest."""
    model.to(place.device)
    if place.mesh is None:
        return model
    policy = MixedPrecisionPolicy(
        param_dtype=_TYPES[precision.compute], reduce_dtype=_TYPES[precision.reduce]
    )
    for block in model.model.layers:
        fully_shard(block, mesh=place.mesh, mp_policy=policy)
    fully_shard(model, mesh=place.mesh, mp_policy=policy)
    return model


def autocast(
    model: nn.Module, device: torch.device, precision: Precision
) -> AbstractContextManager[object]:
    """Context of the forward pass: FSDP2 casts by its own policy, a plain model by autocast."""
    if isinstance(model, FSDPModule) or precision.compute == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision.compute])
