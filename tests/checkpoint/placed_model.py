"""A model with parameters of every kind in any layout, and all that its checkpoints must hold.

Owns how the model is placed over the ranks of a pool, its groups (in either order), gradients that
depend on a parameter's name alone, and the bits of all whole tensors by name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardmuon
from tests import models, ranks
from tests.grids import random
from tests.problems import assert_ranks_agree, digest

__all__ = ["Bits", "Pair", "Zoo", "bits", "make", "train"]

Bits = dict[str, str]
"""Hash of each whole tensor: parameters and buffers by name, state by name and key."""


class Zoo(nn.Module):
    """Embedding, two blocks of uneven matrices, five experts, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(5, 6, 10))})
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.register_buffer("positions", torch.randn(7))


Pair = tuple[Zoo, shardmuon.Muon]

# Axes by layout; the sizes are those of the pools that the tests use, the last axis is "tp".
_MESHES: dict[str, dict[int, tuple[int, ...]]] = {
    "fsdp": {1: (1,), 2: (2,), 3: (3,), 8: (8,)},
    "hsdp": {4: (2, 2), 8: (4, 2)},
    "tp": {4: (2, 2), 8: (2, 2, 2)},
}
_NAMES = {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "tp": ("replicate", "shard", "tp")}


@functools.cache
def _mesh(layout: str) -> DeviceMesh:
    shape = _MESHES[layout][dist.get_world_size()]
    names = _NAMES[layout][-len(shape) :]
    return init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)


def _place(model: Zoo, layout: str) -> None:
    """Spread the model by torch's own functions: `plain`, `fsdp`, `hsdp`, or `tp` under either."""
    if layout == "plain":
        return
    mesh = _mesh(layout)
    if layout == "tp":
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        stack = distribute_tensor(model.experts["up"].detach(), mesh["tp"], [Shard(0)])
        model.experts["up"] = nn.Parameter(stack)
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if layout == "tp":
        assert "_StridedShard" in str(getattr(model.experts["up"], "placements", ""))


def _groups(model: Zoo, settings: bool) -> list[dict[str, Any]]:
    """Without `settings`, what a group is and nothing of what a checkpoint brings."""
    named = dict(model.named_parameters())
    muon = [name for name in named if name.startswith("blocks") and named[name].ndim == 2]
    rounded = ["experts.up", "blocks.1.down.weight"]
    vectors = [name for name in named if named[name].ndim == 1]
    parts: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
        ([name for name in muon if name not in rounded], {}, {"lr": 0.02}),
        (
            rounded,
            {"algorithm": "normuon", "momentum_dtype": torch.bfloat16},
            {"lr": 0.03, "momentum": 0.9, "beta2": 0.8},
        ),
        (["embed_tokens.weight"], {"algorithm": "adamw"}, {"lr": 0.01}),
        (["lm_head.weight"], {"algorithm": "lion"}, {"lr": 0.002, "betas": (0.8, 0.9)}),
        (vectors, {"algorithm": "adamw"}, {"lr": 0.005, "betas": (0.8, 0.9), "weight_decay": 0.0}),
    ]
    return [
        {"params": [(name, named[name]) for name in names], **kind, **(keys if settings else {})}
        for names, kind, keys in parts
    ]


def make(layout: str, *, fresh: bool = False) -> Pair:
    """Model and optimizer.

    fresh: what loads a checkpoint: with other values, and its groups and their parameters reversed
    and without settings.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(fresh))
        model = Zoo().to(ranks.device() if layout != "plain" or dist.is_initialized() else "cpu")
    _place(model, layout)
    groups = _groups(model, not fresh)
    if fresh:
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    runtime = shardmuon.Runtime(deterministic=True)
    return model, shardmuon.Muon(groups, ns_dtype=torch.float32, runtime=runtime)


def train(pair: Pair, steps: range) -> None:
    """Steps with gradients that depend on the parameter's name and the number of the step."""
    model, optimizer = pair
    for step in steps:
        for index, (_, p) in enumerate(sorted(model.named_parameters())):
            gradient = random(tuple(p.shape), 100 * step + index).to(p.device)
            if isinstance(p, DTensor):
                mesh, places = p.device_mesh, p.placements
                gradient = distribute_tensor(gradient, mesh, places, src_data_rank=None)
            p.grad = gradient
        optimizer.step()


def bits(pair: Pair) -> Bits:
    """Of everything; an error if ranks have other bits for the same whole tensor."""
    model, optimizer = pair
    tensors: dict[str, Tensor] = dict(model.named_buffers())
    for name, p in model.named_parameters():
        tensors[name] = p
        tensors.update({f"{name}.{key}": value for key, value in optimizer.state[p].items()})
    names = sorted(tensors)
    values = assert_ranks_agree([tensors[name] for name in names])
    return {name: digest([value]) for name, value in zip(names, values, strict=True)}
