"""The user's default device reaches no tensor of ours: all it could make is a wrong place."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

import shardmuon
from tests import models, ranks
from tests.conftest import Worlds
from tests.problems import digest, local


def _train(default: str | None) -> list[str]:
    """Two clipped steps, and state taken and loaded, with `default` as default device."""
    mesh = dist.init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    model = models.sharded(mesh)
    optimizer = models.optimizer_of(model)
    gradients = []
    for step in range(2):
        models.spread_gradients(model, step)
        gradients.append([p.grad for p in model.parameters()])
    place = torch.device(default) if default else contextlib.nullcontext()
    with place:
        optimizer.prepare()
        for each in gradients:
            for p, gradient in zip(model.parameters(), each, strict=True):
                p.grad = gradient
            shardmuon.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.measure_next_step()
            optimizer.step()
        optimizer.check_replicas()
        optimizer.load_state_dict(optimizer.state_dict())
        late = shardmuon.Muon(models.groups(model))
        assert not any(value.is_meta for state in late.state.values() for value in state.values())
    held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return [digest([local(tensor.detach())]) for tensor in held]


def test_steps_and_state_do_not_see_it(pools: Worlds) -> None:
    assert pools.run(2, _train, "meta") == pools.run(2, _train, None)
