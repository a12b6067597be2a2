"""`overlap="backward"`: the bits of no overlap, buckets that leave early, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardmuon
from shardmuon.exchange import collectives
from tests import models, ranks
from tests.conftest import Worlds
from tests.grids import mesh_of
from tests.problems import digest, whole, world_mesh

How = Literal["none", "backward"]
HOWS: tuple[How, How] = ("none", "backward")
BUCKET = 600  # bytes: about one matrix of the model


def runtime(overlap: How, **settings: Any) -> shardmuon.Runtime:
    return shardmuon.Runtime(deterministic=True, bucket_bytes=BUCKET, overlap=overlap, **settings)


def optimizer_of(model: nn.Module, overlap: How, **settings: Any) -> shardmuon.Muon:
    groups = models.groups(model, ns_dtype=torch.float32)  # so that buckets hold as many anywhere
    return shardmuon.Muon(groups, runtime=runtime(overlap, **settings))


def everything(model: nn.Module, optimizer: shardmuon.Muon) -> str:
    """Hash of all whole parameters and states."""
    values: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        values += [p, *(v for _, v in sorted(optimizer.state[p].items()))]
    return digest([whole(value) for value in values])


def matrix(model: nn.Module, block: int) -> nn.Parameter:
    """One of the two matrices of a block."""
    return dict(model.named_parameters())[f"blocks.{block}.up.weight"]


def fsdp() -> models.Net:
    model = models.sharded(world_mesh())
    model.spare_weight.requires_grad_(False)
    return model


def fsdp_with_late_one() -> models.Net:
    """The first matrix by name has its gradient last, so that all wait for the step."""
    model = models.sharded(world_mesh())
    model.use_spare = True
    return model


def fsdp_with_unused_one() -> models.Net:
    """The first matrix by name never has a gradient."""
    return models.sharded(world_mesh())


def hsdp() -> models.Net:
    model = models.make().to(ranks.device())
    mesh = mesh_of((2, dist.get_world_size() // 2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel() -> models.Net:
    """FSDP2 over tensor parallel blocks: strided shards, and two hops for some matrices."""
    model = models.make().to(ranks.device())
    shape = dist.get_world_size() // 2, 2
    mesh = init_device_mesh(ranks.device().type, shape, mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def plain_steps(model: models.Net, optimizer: shardmuon.Muon) -> None:
    for step in range(4):
        models.backward(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        optimizer.step()


def accumulated(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """Two micro-steps a step, the gradients reduced in the second."""
    assert isinstance(model, FSDPModule)
    for step in range(3):
        total = 0.0
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            tokens = torch.arange(12).view(2, 6) * (1 + step + micro) % 11
            loss = model(tokens.to(ranks.device()))
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def left_out(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """Some backward passes are followed by no step."""
    for step in range(6):
        models.backward(model, step)
        if step not in (2, 3):
            optimizer.step()


def by_hand(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """Gradients that no backward has made, in between."""
    for step in range(5):
        if step % 2:
            models.spread_gradients(model, step)
        else:
            models.backward(model, step)
        optimizer.step()


def frozen(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """A new plan in the middle, known only when the step comes."""
    for step in range(5):
        if step == 2:
            matrix(model, 0).requires_grad_(False)
        models.backward(model, step)
        optimizer.step()


def reloaded(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """State comes from a state dict between two steps."""
    for step in range(2):
        models.backward(model, step)
        optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {k: {n: v.clone() for n, v in s.items()} for k, s in saved["state"].items()}
    for step in range(2, 6):
        models.backward(model, step)
        optimizer.step()
        if step == 3:
            optimizer.load_state_dict(saved)


def skipped(model: models.Net, optimizer: shardmuon.Muon) -> None:
    """A step is skipped because of a gradient that one rank's batch has spoiled."""
    for step in range(5):
        model.zero_grad()
        loss = model(torch.arange(6, device=ranks.device())[None] + step % 3)
        (loss * (float("nan") if step == 2 and dist.get_rank() == 0 else 1.0)).backward()
        optimizer.step()
    optimizer.check()
    assert optimizer.stats.steps_skipped == 1


Way = Callable[[models.Net, shardmuon.Muon], None]


def results(build: Callable[[], models.Net], way: Way, settings: dict[str, Any]) -> list[str]:
    """Hashes of everything, without and with overlap."""
    answers = []
    for overlap in HOWS:
        model = build()
        optimizer = optimizer_of(model, overlap, **settings)
        way(model, optimizer)
        answers.append(everything(model, optimizer))
    return answers


WAYS: list[tuple[Callable[[], models.Net], Way, int, dict[str, Any]]] = [
    (fsdp, plain_steps, 1, {}),
    (fsdp, plain_steps, 2, {}),
    (fsdp, plain_steps, 3, {}),
    (fsdp, plain_steps, 2, {"exchange": "all_gather"}),
    (fsdp, plain_steps, 2, {"missing_grad": "zero"}),
    (fsdp_with_late_one, plain_steps, 2, {}),
    (fsdp_with_unused_one, plain_steps, 2, {}),
    (hsdp, plain_steps, 4, {}),
    (tensor_parallel, plain_steps, 4, {}),
    (fsdp, accumulated, 2, {}),
    (fsdp, left_out, 2, {}),
    (fsdp, by_hand, 2, {}),
    (fsdp, frozen, 2, {}),
    (fsdp, reloaded, 2, {}),
    (fsdp, skipped, 2, {"nonfinite": "skip"}),
]


@pytest.mark.parametrize(
    ("build", "way", "world", "settings"),
    WAYS,
    ids=[f"{b.__name__}-{w.__name__}-{n}-{'-'.join(s)}" for b, w, n, s in WAYS],
)
def test_bits_are_those_without_overlap(
    pools: Worlds, build: Any, way: Way, world: int, settings: dict[str, Any]
) -> None:
    for without, with_overlap in pools.run(world, results, build, way, settings):
        assert with_overlap == without


def _departures() -> tuple[list[set[str]], list[list[str]], int, int]:
    """Gradients still to come at each exchange of a backward; the plan; exchanges of the step."""
    model = fsdp()
    optimizer = optimizer_of(model, "backward")
    models.backward(model, 0)
    optimizer.step()
    weights = {name: p for name, p in model.named_parameters() if name in models.MATRICES[:4]}
    missing: list[set[str]] = []
    original = collectives.all_to_all

    def watching(*arguments: Any) -> Any:
        missing.append({name for name, p in weights.items() if p.grad is None})
        return original(*arguments)

    with mock.patch.object(collectives, "all_to_all", watching):
        models.backward(model, 1)
        early = len(missing)
        optimizer.step()
    order = [[matrix.id for matrix in bucket.matrices] for bucket in optimizer.plan.buckets]
    return missing[:early], order, len(missing), optimizer.stats.collectives


def test_buckets_leave_while_earlier_layers_are_to_come(pools: Worlds) -> None:
    for missing, order, exchanges, collectives_of_step in pools.run(2, _departures):
        assert len(order) >= 2
        assert len(missing) == len(order)
        assert all(name.startswith("blocks.1") for name in order[0])
        assert missing[0] == {"blocks.0.up.weight", "blocks.0.down.weight"}
        assert missing[-1] == set()
        assert exchanges == 2 * len(order)
        assert collectives_of_step == exchanges + 1  # the header


def clip(model: models.Net, optimizer: shardmuon.Muon) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zero(model: models.Net, optimizer: shardmuon.Muon) -> None:
    optimizer.zero_grad(set_to_none=False)


def replace_gradients(model: models.Net, optimizer: shardmuon.Muon) -> None:
    models.spread_gradients(model, 7)


def change_momentum(model: models.Net, optimizer: shardmuon.Muon) -> None:
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.5


def load(model: models.Net, optimizer: shardmuon.Muon) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def change_state(model: models.Net, optimizer: shardmuon.Muon) -> None:
    optimizer.state[matrix(model, 1)]["momentum_buffer"].mul_(2)


def another_backward(model: models.Net, optimizer: shardmuon.Muon) -> None:
    model(torch.arange(6, device=ranks.device())[None]).backward()


def on_one_rank(model: models.Net, optimizer: shardmuon.Muon) -> None:
    if dist.get_rank() == 1:
        change_momentum(model, optimizer)


def _refused(change: Way) -> tuple[list[str], bool, list[str]]:
    """What two steps after a change say, that nothing changed, and hashes of training on."""
    hashes, texts, unchanged = [], [], True
    for overlap in HOWS:
        model = fsdp()
        optimizer = optimizer_of(model, overlap)
        models.backward(model, 0)
        optimizer.step()
        models.backward(model, 1)
        if overlap == "backward":
            momenta = [group.get("momentum") for group in optimizer.param_groups]
            change(model, optimizer)
            before = [whole(p) for p in model.parameters()]
            try:
                optimizer.step()
                optimizer.check()
            except (ValueError, RuntimeError) as error:
                texts.append(str(error))
            after = [whole(p) for p in model.parameters()]
            unchanged = all(map(torch.equal, after, before))
            for group, momentum in zip(optimizer.param_groups, momenta, strict=True):
                if momentum is not None:
                    group["momentum"] = momentum
        if change is change_state:  # back by a power of two: the same bits
            optimizer.state[matrix(model, 1)]["momentum_buffer"].div_(
                2 if overlap == "backward" else 1
            )
        for step in range(2, 4):
            models.backward(model, step)
            optimizer.step()
        hashes.append(everything(model, optimizer))
    return texts, unchanged, hashes


REFUSED: dict[Way, str] = {
    clip: "a gradient changed",
    zero: "a gradient changed",
    replace_gradients: "a gradient changed",
    change_momentum: "state or settings changed",
    load: "state or settings changed",
    change_state: "state or settings changed",
    another_backward: "several backward passes",
    on_one_rank: "",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_was_changed_since_backward_is_refused_and_then_all_is_well(
    pools: Worlds, change: Way
) -> None:
    for texts, unchanged, hashes in pools.run(2, _refused, change):
        (text,) = texts
        assert REFUSED[change] in text
        assert unchanged
        assert hashes[0] == hashes[1]


def _refusal_of_plain_tensors() -> str:
    optimizer = shardmuon.Muon(
        [("w", nn.Parameter(torch.ones(4, 6, device=ranks.device())))],
        mesh=world_mesh(),
        runtime=runtime("backward"),
    )
    with pytest.raises(ValueError, match="DDP") as caught:
        optimizer.plan  # noqa: B018
    return str(caught.value)


def test_replicated_plain_tensors_are_refused_by_name(pools: Worlds) -> None:
    texts = pools.run(2, _refusal_of_plain_tensors)
    assert all(text.startswith("w: ") for text in texts)


class Experts(nn.Module):
    """A stack of matrices, which one bucket does not hold."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stack = nn.Parameter(torch.randn(9, 8, 6, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("erc,c->er", self.stack, x).tanh().sum()


def _stacks() -> tuple[list[list[Tensor]], int, int]:
    """Values after steps without and with overlap; buckets; collectives of the last backward."""
    values = []
    for overlap in HOWS:
        model = Experts().to(ranks.device())
        fully_shard(model, mesh=world_mesh())
        optimizer = shardmuon.Muon(
            model.named_parameters(), lr=0.1, ns_dtype=torch.float32, runtime=runtime(overlap)
        )
        for step in range(4):
            started = sum(collectives.calls.values())
            model(torch.ones(6, device=ranks.device()) * step).backward()
            started = sum(collectives.calls.values()) - started
            optimizer.step()
            optimizer.zero_grad()
        optimizer.check()
        values.append([whole(model.stack), whole(optimizer.state[model.stack]["momentum_buffer"])])
    return values, len(optimizer.plan.buckets), started


def test_experts_of_one_stack_travel_in_several_buckets(pools: Worlds) -> None:
    for (without, with_overlap), buckets, started in pools.run(2, _stacks):
        assert buckets > 1
        assert started == buckets
        assert all(map(torch.equal, with_overlap, without))


def _lets_go() -> bool:
    """Hooks keep neither optimizer nor state alive."""
    model = fsdp()
    optimizer = optimizer_of(model, "backward")
    for step in range(2):
        models.backward(model, step)
        optimizer.step()
    buffer = weakref.ref(optimizer.state[matrix(model, 0)]["momentum_buffer"])
    del optimizer
    gc.collect()
    models.backward(model, 2)
    return buffer() is None


def test_hooks_do_not_keep_the_optimizer_alive(pools: Worlds) -> None:
    assert all(pools.run(2, _lets_go))


def test_one_process_needs_no_group() -> None:
    weight = nn.Parameter(torch.eye(3, 4))
    optimizer = shardmuon.Muon([("w", weight)], runtime=runtime("backward"))
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.stats.collectives == 0
