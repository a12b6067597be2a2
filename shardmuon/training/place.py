"""Where this process runs: device, ranks and mesh; and a model spread over them.

Owns the start of the process group, the mesh, tensor parallelism and the FSDP2 wrapping. Must not
know optimizers or data.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardmuon.exchange import collectives
from shardmuon.training import architecture
from shardmuon.training.config import Compute, Mesh, Precision
from shardmuon.training.load import ConfigError

__all__ = [
    "Place",
    "autocast",
    "axes",
    "choose_device",
    "launcher",
    "nodes_started",
    "python",
    "ranks_started",
    "settle",
    "spread",
    "start",
]

_AS_IT_IS = Compute()
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PORT = 29400
"""Where torchrun's rendezvous listens unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among all. `mesh` is over all ranks, None in one process.

    tensor: ranks of a tensor-parallel group. They take the same data, and all groups have the same
    size: a mean over all ranks is the mean over the data.
    """

    device: torch.device
    rank: int
    ranks: int
    mesh: DeviceMesh | None
    tensor: int = 1

    @property
    def first(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` shares of a batch this rank takes."""
        return self.rank // self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of shares that a batch is cut into."""
        return self.ranks // self.tensor


def ranks_started() -> int:
    """Ranks that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher() -> str:
    """The command that starts as many ranks again, by this interpreter: no PATH is assumed.

    On several nodes it is for each of them, and they meet at the node of the first rank: workers
    are not told where they met.
    """
    if "WORLD_SIZE" not in os.environ:
        return python()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks_started()))
    meeting = "--standalone"
    if local != ranks_started():
        head = os.environ.get("MASTER_ADDR", "HOST")
        meeting = f"--nnodes {ranks_started() // local} "
        meeting += f"--rdzv-backend c10d --rdzv-endpoint {head}:{_PORT}"
    return f"{python()} -m torch.distributed.run {meeting} --nproc-per-node {local}"


def python() -> str:
    """This interpreter as one types it, for commands that are printed."""
    return sys.executable.removeprefix(f"{os.getcwd()}/")


def nodes_started() -> int:
    """Nodes that torchrun started ranks on."""
    return ranks_started() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks_started()))


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
    """Make the process group if torchrun started more than one rank, and the mesh."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if ranks_started() > 1:
        # The watchdog speaks first: it knows more than the process group.
        timeout_s = config.timeout_s + config.silent_s
        collectives.start("nccl" if cuda else "gloo", timeout_s, device if cuda else None)
    return settle(config, device)


def settle(config: Mesh, device: torch.device) -> Place:
    """Make the mesh over the ranks of the process group, if there is one."""
    rank, ranks = collectives.rank(), collectives.world_size()
    if ranks == 1:
        return Place(device=device, rank=0, ranks=1, mesh=None)
    sizes = axes(config, ranks)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Place(device=device, rank=rank, ranks=ranks, mesh=mesh, tensor=config.tensor)


def axes(config: Mesh, ranks: int) -> dict[str, int]:
    """Name and size of each axis of the mesh, the outermost first; axes of one rank are left out.

    Except one: FSDP2 replicates only over a mesh that also has an axis to shard over.
    """
    shard = ranks // (config.replicate * config.tensor)
    sizes = {"replicate": config.replicate, "shard": shard, "tensor": config.tensor}
    kept = {name for name, size in sizes.items() if size > 1}
    if "replicate" in kept:
        kept.add("shard")
    return {name: size for name, size in sizes.items() if name in kept}


def spread(
    model: nn.Module, place: Place, precision: Precision, compute: Compute = _AS_IT_IS
) -> nn.Module:
    """Move the model to its device and shard it, in place: each block alone, then the rest.

    Tensor parallelism comes first: FSDP2 then shards each rank's part of a matrix further.
    """
    model.to(place.device)
    if compute.activation_checkpointing:
        architecture.recompute_activations(model)
    if compute.compile:
        for block in architecture.blocks(model):
            block.compile()
    if place.mesh is None:
        return model
    names = place.mesh.mesh_dim_names or ()
    if "tensor" in names:
        _split_blocks(model, place.mesh["tensor"])
    over = tuple(name for name in names if name != "tensor")
    if not over:
        return model
    mesh = place.mesh[over]
    policy = MixedPrecisionPolicy(
        param_dtype=_TYPES[precision.compute], reduce_dtype=_TYPES[precision.reduce]
    )
    for block in architecture.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _split_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` some heads and some hidden channels of every block.

    The input becomes a DTensor once per attention and MLP, so that its gradient is summed over
    ranks once and not once per projection.
    """
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan: dict[str, ParallelStyle] = {
        name: styles[style]() for name, style in architecture.tensor_plan(model).items()
    }
    for name in {name.rpartition(".")[0] for name in plan}:
        plan[name] = _WholeInput()
    for block in architecture.blocks(model):
        # No source rank: all ranks built the same weights, so that none must be sent.
        parallelize_module(block, mesh, plan, src_data_rank=None)


class _WholeInput(ParallelStyle):
    """Makes what a module is given first, or as `hidden_states`, a DTensor that all ranks hold."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wrap(
            module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def whole(value: Tensor) -> Tensor:
                return DTensor.from_local(value, device_mesh, (Replicate(),))

            if inputs:
                return (whole(inputs[0]), *inputs[1:]), named
            return inputs, {**named, "hidden_states": whole(named["hidden_states"])}

        module.register_forward_pre_hook(wrap, with_kwargs=True)
        return module


def autocast(
    model: nn.Module, device: torch.device, precision: Precision
) -> AbstractContextManager[object]:
    """Context of the forward pass: FSDP2 casts by its own policy, a plain model by autocast."""
    if isinstance(model, FSDPModule) or precision.compute == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision.compute])
