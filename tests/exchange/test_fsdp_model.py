"""A real model under `fully_shard`: the result of one process, from equal and real gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardmuon
from tests import models, ranks, reference
from tests.conftest import Worlds
from tests.problems import assert_ranks_agree, digest, whole, world_mesh
from tests.reference import Rule, relative_error


def _steps_from_equal_gradients() -> tuple[str, int, int]:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    for step in range(3):
        models.spread_gradients(model, step)
        optimizer.step()
    values: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        values += [p, *(v for _, v in sorted(optimizer.state[p].items()))]
    hashed = digest(assert_ranks_agree(values))
    return hashed, optimizer.stats.matrices_orthogonalized, len(optimizer.plan)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.supports("FSDP2 models (`fully_shard`)")
def test_sharded_model_repeats_the_bits_of_one_rank(pools: Worlds, world: int) -> None:
    (one, _, _), *_ = pools.run(1, _steps_from_equal_gradients)
    answers = pools.run(world, _steps_from_equal_gradients)
    assert {hashed for hashed, _, _ in answers} == {one}
    assert sum(count for _, count, _ in answers) == len(models.MATRICES)
    assert {planned for _, _, planned in answers} == {len(models.MATRICES)}


def test_sharded_model_repeats_the_bits_of_plain_tensors(pools: Worlds) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("this process computes on the CPU")
    model = models.make()
    optimizer = models.optimizer_of(model)
    for step in range(3):
        models.spread_gradients(model, step)
        optimizer.step()
    values: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        values += [p, *(v for _, v in sorted(optimizer.state[p].items()))]
    hashed = digest([whole(v) for v in values])
    assert pools.run(2, _steps_from_equal_gradients)[0][0] == hashed


def _linear_with_own_data() -> tuple[Tensor, Tensor, Tensor]:
    """Weight before, mean gradient over the ranks, weight after one step."""
    weight = torch.from_numpy(reference.weights(10, 8)).float()
    inputs = torch.from_numpy(reference.gradient(6, 8, dist.get_rank())).float().to(ranks.device())
    plain = nn.Linear(8, 10, bias=False).to(ranks.device())
    plain.weight.data.copy_(weight)
    plain(inputs).square().sum().backward()
    mean = plain.weight.grad
    assert mean is not None
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    plain.weight.grad = None
    fully_shard(plain, mesh=world_mesh())
    optimizer = shardmuon.Muon(plain.named_parameters(), lr=0.02, ns_dtype=torch.float32)
    plain(inputs).square().sum().backward()
    optimizer.step()
    return weight, mean.cpu(), whole(plain.weight)


@pytest.mark.parametrize("world", [2, 4])
def test_real_backward_uses_the_mean_gradient(pools: Worlds, world: int) -> None:
    for weight, mean, after in pools.run(world, _linear_with_own_data):
        right, _ = Rule().run(weight.double().numpy(), [mean.double().numpy()])
        assert relative_error(after, right) < 1e-4


def _after_a_forward() -> bool:
    """The optimizer is made after a forward pass, when FSDP2 has swapped parameters once."""
    model = models.sharded(world_mesh())
    models.backward(model, 0)
    optimizer = models.optimizer_of(model)
    before = [whole(p) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    after = [whole(p) for p in model.parameters() if p.grad is not None]
    return all(not b.equal(a) for b, a in zip(before, after, strict=True))


def test_optimizer_made_after_a_forward_updates_the_model(pools: Worlds) -> None:
    assert all(pools.run(2, _after_a_forward))


def _loss_falls() -> bool:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    losses = []
    for _ in range(20):
        losses.append(models.backward(model, 0))
        optimizer.step()
    return losses[-1] < 0.5 * losses[0]


def test_training_lowers_the_loss(pools: Worlds) -> None:
    assert all(pools.run(2, _loss_falls))
