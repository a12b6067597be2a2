"""Who reads right after `step` reads finished values, also where ranks are slow by turns."""

from __future__ import annotations

import time
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shardmuon
from shardmuon.rules.base import Group
from shardmuon.rules.muon import MuonRule
from tests import models, ranks
from tests.conftest import Worlds
from tests.problems import digest, local, whole, world_mesh

STEPS = 3


class Slow(MuonRule):
    """Muon that takes its time on some ranks, so that others are ahead of them."""

    def orthogonalize(
        self, whole: Tensor, group: Group, row_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if dist.is_initialized() and dist.get_rank() % 2:
            time.sleep(0.01)
        return super().orthogonalize(whole, group, row_state)


def _forward(model: nn.Module) -> float:
    """Loss on tokens that are the same on all ranks."""
    tokens = torch.arange(24).view(4, 6) % 11
    with torch.no_grad():
        loss = float(model(tokens.to(ranks.device())))
    if isinstance(model, FSDPModule):
        model.reshard()  # the root module keeps its parameters whole for a backward
    return loss


def _steps(model: models.Net, settings: dict[str, Any]) -> list[tuple[str, str, float]]:
    """After each step hashes of (local parameters and norms, local state), and the loss."""
    model.use_spare = True
    runtime = shardmuon.Runtime(deterministic=True, bucket_bytes=1, **settings)
    optimizer = shardmuon.Muon(models.groups(model), runtime=runtime)
    seen = []
    with mock.patch.dict("shardmuon.rules.RULES", {"muon": Slow()}):
        for step in range(STEPS):
            models.spread_gradients(model, step)
            optimizer.step()
            mine = [local(p) for p in model.parameters()]
            early = digest([*mine, *(p.norm() for p in mine)])
            state = optimizer.state_dict()["state"]
            kept = digest([local(v) for i in sorted(state) for _, v in sorted(state[i].items())])
            seen.append((early, kept, _forward(model)))
    return seen


def _read_at_once(kind: Literal["auto", "all_gather"]) -> tuple[list[tuple[str, str, float]], str]:
    """(what this rank saw step by step, hash of the whole parameters at the end)."""
    model = models.sharded(world_mesh())
    seen = _steps(model, {"exchange": kind})
    return seen, digest([whole(p) for _, p in sorted(model.named_parameters())])


@pytest.mark.parametrize("world", [2, 4])
def test_norms_state_and_forward_right_after_a_step_are_final(pools: Worlds, world: int) -> None:
    overlapped = pools.run(world, _read_at_once, "auto")
    assert overlapped == pools.run(world, _read_at_once, "all_gather")
    if ranks.backend() != "gloo":
        return  # this process computes on the CPU
    alone = models.make()
    losses = [loss for _, _, loss in _steps(alone, {})]
    right = digest([whole(p) for _, p in sorted(alone.named_parameters())])
    for seen, values in overlapped:
        assert [loss for _, _, loss in seen] == losses
        assert values == right
