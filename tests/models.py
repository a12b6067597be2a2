"""A small model, sharded by FSDP2 or whole, with parameters of every kind.

Owns how tests build it, feed it and group its parameters. Hidden layers are nested, because a
linear layer directly under the root counts as an output head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardmuon
from tests import ranks

__all__ = ["Net", "backward", "groups", "make", "optimizer_of", "sharded", "spread_gradients"]


class Block(nn.Module):
    """Two uneven matrices, a norm, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 18)
        self.down = nn.Linear(18, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Embedding, two blocks, a matrix that forward uses only if asked, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spare = nn.ModuleDict({"proj": nn.Linear(8, 5, bias=False)})
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.use_spare = False

    @property
    def spare_weight(self) -> nn.Parameter:
        """The matrix that forward uses only if `use_spare` is set."""
        weight = self.spare["proj"].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x)
        loss = self.lm_head(x).square().mean()
        if self.use_spare:
            loss = loss + self.spare["proj"](x).square().mean()
        return loss  # type: ignore[no-any-return]


MATRICES = [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "down")]
MATRICES.append("spare.proj.weight")


def make(seed: int = 0) -> Net:
    """A whole model on the CPU whose values depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def sharded(mesh: DeviceMesh, seed: int = 0) -> Net:
    """The same model under `fully_shard`, on the rank's device."""
    model = make(seed).to(ranks.device())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, step: int) -> float:
    """Gradients of `step` from this rank's own tokens; returns the local loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 11, (4, 6), generator=generator)
    model.zero_grad()
    loss = model(tokens.to(ranks.device()))
    loss.backward()
    return float(loss.detach())


def spread_gradients(model: nn.Module, step: int) -> None:
    """Give every parameter a gradient that depends on its name's position and `step` alone."""
    for index, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        gradient = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = gradient


def groups(model: nn.Module, **muon: Any) -> shardmuon.ParamGroups:
    """Parameters sorted by the library's own rule."""
    return shardmuon.param_groups(model, muon={"lr": 0.02, **muon}, adamw={"lr": 0.01})


def optimizer_of(model: nn.Module, **muon: Any) -> shardmuon.Muon:
    """An optimizer over `groups(model)` with reproducible bits."""
    return shardmuon.Muon(groups(model, **muon), runtime=shardmuon.Runtime(deterministic=True))
