"""Loss scaling: ranks skip a step together, and what they do with gradients comes in one order.

The right numbers come from the whole tensors in float64, in the process that runs the tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardmuon
from shardmuon.exchange import collectives
from tests import models, ranks, reference
from tests.conftest import Worlds
from tests.grids import PLAIN, mesh_of, placed
from tests.problems import digest, local, whole, world_mesh

Array = npt.NDArray[np.float64]
INF = float("inf")


def kind() -> str:
    """Kind of this rank's device, which a scaler wants to know."""
    return ranks.device().type


def make_scaler(init_scale: float = 2.0**16, **keys: Any) -> shardmuon.GradScaler:
    """A scaler with a scale, which torch makes when it first scales a loss."""
    scaler = shardmuon.GradScaler(kind(), init_scale=init_scale, **keys)
    scaler.scale(torch.zeros((), device=ranks.device()))
    return scaler


def agreed(value: Any) -> Any:
    """`value`, after all ranks have compared theirs."""
    if dist.is_initialized():
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, value)
        assert all(each == seen[0] for each in seen), seen
    return value


def held(optimizer: torch.optim.Optimizer) -> str:
    """Hash of this rank's parameters and state."""
    tensors = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            tensors += [local(p), *(local(state[key]) for key in sorted(state))]
    return digest(tensors)


# -- ranks agree ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Parameters of one kind of model. places: shape, letters, mesh, dtype of each."""

    places: tuple[tuple[tuple[int, ...], str, str, torch.dtype], ...]


F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {
    "one mesh": Layout((((10, 8), "0", "world", F32),)),
    "two meshes": Layout((((10, 8), "0", "world", F32), ((3, 16, 4), "0", "b", F32))),
    "the small mesh first": Layout(
        (((3, 16, 4), "1", "b", F32), ((10, 8), "0", "world", F32), ((6, 6), "0", "a", F32))
    ),
    "two dtypes": Layout((((10, 8), "0", "world", F32), ((3, 16, 4), "0", "b", BF16))),
    "the first dtype again": Layout(
        (((10, 8), "0", "world", F32), ((6, 4), "0", "a", BF16), ((3, 16, 4), "0", "b", F32))
    ),
    "plain beside": Layout((((10, 8), "0", "world", F32), ((6, 4), PLAIN, "world", F32))),
    "a replica": Layout((((10, 8), "0", "world", F32), ((6, 4), "R", "world", F32))),
    "stages": Layout((((10, 8), "0", "b", F32),)),
    "empty shards": Layout((((4, 8), "1", "world", F32), ((1, 9), "1", "b", F32))),
}


def _meshes() -> dict[str, Any]:
    grid = mesh_of((2, 2))
    return {"world": world_mesh(), "a": grid["a"], "b": grid["b"]}


def _build(layout: Layout, policy: Any) -> tuple[list[nn.Parameter], shardmuon.Muon]:
    meshes = _meshes()
    params = [
        nn.Parameter(placed(torch.ones(shape, dtype=dtype), letters, meshes[mesh]))
        for shape, letters, mesh, dtype in layout.places
    ]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    runtime = shardmuon.Runtime(deterministic=True, nonfinite=policy)
    return params, shardmuon.Muon(
        named, lr=0.02, ns_dtype=F32, mesh=meshes["world"], runtime=runtime
    )


def _set_gradients(params: Sequence[nn.Parameter], layout: Layout, time: int, scale: float) -> None:
    meshes = _meshes()
    for i, (p, (shape, letters, mesh, dtype)) in enumerate(zip(params, layout.places, strict=True)):
        rows = shape[0]
        values = reference.gradient(rows, p.numel() // rows, time + i)
        gradient = (torch.from_numpy(values).view(shape) * scale).to(dtype)
        p.grad = placed(gradient, letters, meshes[mesh])


def _overflow(name: str, policy: Any) -> tuple[list[float], str, str]:
    """Steps 0 and 2 are good, step 1 overflows on the last rank alone: scales and hashes.

    The hashes are those of this rank after the steps, and after good steps without a scaler.
    """
    layout = LAYOUTS[name]
    params, optimizer = _build(layout, policy)
    scaler, scales = make_scaler(growth_interval=2), []
    for step in range(3):
        _set_gradients(params, layout, step, scaler.get_scale())
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            gradient = params[-1].grad
            assert gradient is not None
            local(gradient).view(-1)[-1] = INF if policy == "error" else math.nan
        before = held(optimizer)
        issued = sum(collectives.calls.values())
        scaler.unscale_(optimizer)
        assert sum(collectives.calls.values()) == issued + 1
        scaler.step(optimizer)
        scaler.update()
        scales.append(agreed(scaler.get_scale()))
        assert (held(optimizer) == before) == (step == 1)
    assert optimizer.stats.steps_skipped == 0  # the optimizer has not seen the bad step
    params, other = _build(layout, policy)
    for step in (0, 2):
        _set_gradients(params, layout, step, 1.0)
        other.step()
    return scales, held(optimizer), held(other)


@pytest.mark.parametrize("policy", ["skip", "error"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_overflow_of_one_rank_stops_the_step_on_all(
    pools: Worlds, name: str, policy: str
) -> None:
    for scales, ours, right in pools.run(4, _overflow, name, policy, limit_s=20):
        assert scales == [2.0**16, 2.0**15, 2.0**15]
        assert ours == right


def _fewer_gradients(everywhere: bool, bad: bool) -> tuple[float, bool]:
    """Rank 3 (or all) has no gradient at all: scale, whether the step was taken."""
    layout = LAYOUTS["one mesh"]
    params, _ = _build(layout, "skip")
    # Not Muon, which refuses gradients on some ranks only.
    optimizer = torch.optim.SGD([*params, nn.Parameter(torch.ones(3))], lr=0.1, foreach=False)
    scaler = make_scaler()
    _set_gradients(params, layout, 0, scaler.get_scale())
    gradient = params[0].grad
    assert gradient is not None
    if dist.get_rank() == 0 and bad:
        local(gradient)[0, 0] = INF
    if dist.get_rank() == 3 or everywhere:
        params[0].grad = None
    before = local(params[0]).clone()
    scaler.step(optimizer)
    scaler.update()
    return agreed(scaler.get_scale()), not torch.equal(before, local(params[0]))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_ranks_without_gradients_agree_too(pools: Worlds, everywhere: bool, bad: bool) -> None:
    """torch's scaler hangs if one rank has none, and raises if all have."""
    answers = pools.run(4, _fewer_gradients, everywhere, bad, limit_s=20)
    for rank, (scale, stepped) in enumerate(answers):
        found = bad and not everywhere
        assert scale == (2.0**15 if found else 2.0**16)
        assert stepped == (not found and not everywhere and rank != 3)


def _stages() -> float:
    """Only the last stage has a loss; the first overflows."""
    mesh = mesh_of((2, 2))
    scaler = shardmuon.GradScaler(kind())
    p = nn.Parameter(placed(torch.ones(4, 6), "0", mesh["b"]))
    optimizer = shardmuon.Muon([(f"stage{mesh.get_local_rank('a')}", p)], lr=0.02)
    scaler.scale(torch.zeros((), device=ranks.device()))
    bad = dist.get_rank() == 0
    p.grad = placed(torch.full((4, 6), INF if bad else 1.0), "0", mesh["b"])
    before = held(optimizer)
    scaler.unscale_(optimizer)
    shardmuon.clip_grad_norm_(p, 1.0, pipeline=mesh["a"])
    scaler.step(optimizer)
    scaler.update()
    assert held(optimizer) == before
    return float(agreed(scaler.get_scale()))


def test_stages_of_a_pipeline_skip_together(pools: Worlds) -> None:
    assert pools.run(4, _stages) == [2.0**15] * 4


def _fused() -> tuple[float, bool]:
    """An optimizer that looks at inf itself gets what all ranks have found."""
    p = nn.Parameter(torch.ones(4, 6, device=ranks.device()))
    optimizer = torch.optim.AdamW([p], fused=True)
    scaler = make_scaler()
    p.grad = torch.ones_like(p)
    if dist.get_rank() == 1:
        p.grad[3, 5] = INF
    scaler.step(optimizer)
    scaler.update()
    return agreed(scaler.get_scale()), bool((p == 1).all())


def test_fused_optimizers_skip_together(pools: Worlds) -> None:
    assert pools.run(2, _fused) == [(2.0**15, True)] * 2


# -- one overflow in five steps ---------------------------------------------------------------


def _five_steps(bad_step: int | None, micro_steps: int, policy: Any) -> tuple[str, list[float]]:
    """On this rank: digest of parameters and momenta, scale after each step."""
    mesh = world_mesh()
    p = nn.Parameter(placed(torch.from_numpy(reference.weights(10, 8)).float(), "0", mesh))
    runtime = shardmuon.Runtime(deterministic=True, nonfinite=policy)
    optimizer = shardmuon.Muon([("w", p)], lr=0.02, runtime=runtime)
    scaler, scales = make_scaler(growth_interval=1000), []
    for step in range(1, 6):
        if bad_step is None and step == 2:
            continue
        for micro_step in range(micro_steps):
            values = torch.from_numpy(reference.gradient(10, 8, 10 * step + micro_step)).float()
            gradient = placed(values * scaler.get_scale(), "0", mesh)
            if (
                step == bad_step
                and micro_step == 0
                and dist.get_rank() == dist.get_world_size() - 1
            ):
                local(gradient)[-1, -1] = INF
            p.grad = gradient if p.grad is None else p.grad + gradient
        scaler.unscale_(optimizer)
        shardmuon.clip_grad_norm_(p, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(agreed(scaler.get_scale()))
    momentum = whole(optimizer.state[p]["momentum_buffer"])
    assert momentum.isfinite().all()
    assert momentum.any()
    return agreed(digest([whole(p), momentum])), scales


@pytest.mark.parametrize("policy", ["skip", "error"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("world", [1, 4])
def test_a_skipped_step_leaves_no_trace(
    pools: Worlds, world: int, micro_steps: int, policy: str
) -> None:
    """Steps 1, 3, 4 and 5 as if step 2 were not there. Scales are powers of two: exact."""
    with_bad = pools.run(world, _five_steps, 2, micro_steps, policy)
    without = pools.run(world, _five_steps, None, micro_steps, policy)
    assert [result for result, _ in with_bad] == [result for result, _ in without]
    assert with_bad[0][1] == [2.0**16, *[2.0**15] * 4]
    assert without[0][1] == [2.0**16] * 4


# -- the order --------------------------------------------------------------------------------

MICRO_STEPS, STEPS, MAX_NORM, SCALE = 3, 3, 0.7, 2.0**10
SHAPES = ((10, 8), (1, 64), (5, 7))


def _micro_gradients(step: int) -> list[list[Array]]:
    """[micro-step][parameter], before scaling; each for a mean over the micro-steps."""
    return [
        [reference.gradient(*shape, 10 * step + micro + i) for i, shape in enumerate(SHAPES)]
        for micro in range(MICRO_STEPS)
    ]


def _norm(arrays: Iterable[Array]) -> float:
    return float(np.sqrt(sum(float((a**2).sum()) for a in arrays)))


def right_order() -> list[tuple[Array, Array]]:
    """(parameter, momentum) after all steps: mean over micro-steps, clipped, then the rule."""
    rule = reference.Rule()
    state = [(reference.weights(*shape), np.zeros(shape)) for shape in SHAPES]
    for step in range(STEPS):
        micro = _micro_gradients(step)
        mean = [np.mean([each[i] for each in micro], axis=0) for i in range(len(SHAPES))]
        factor = min(1.0, MAX_NORM / (_norm(mean) + 1e-6))
        assert factor < 0.5
        state = [rule.step(p, m, g * factor) for (p, m), g in zip(state, mean, strict=True)]
    return state


def _steps_in_order(order: str) -> list[tuple[Tensor, Tensor]]:
    """Whole (parameter, momentum) by this rank's optimizer. order: "right", or what is wrong."""
    mesh = world_mesh()
    params = [
        nn.Parameter(placed(torch.from_numpy(reference.weights(*shape)).float(), letters, mesh))
        for shape, letters in zip(SHAPES, "010", strict=True)
    ]
    named = ((f"w{i}", p) for i, p in enumerate(params))
    optimizer = shardmuon.Muon(named, lr=0.02, ns_dtype=torch.float32)
    scaler = make_scaler(SCALE, growth_interval=2)
    for step in range(STEPS):
        for gradients in _micro_gradients(step):
            for p, g, letters in zip(params, gradients, "010", strict=True):
                scaled = torch.from_numpy(g).float() / MICRO_STEPS * scaler.get_scale()
                part = placed(scaled, letters, mesh)
                p.grad = part if p.grad is None else p.grad + part
            if order == "clip every micro-step":
                shardmuon.clip_grad_norm_(params, MAX_NORM * scaler.get_scale())
        if order == "clip before unscale":
            shardmuon.clip_grad_norm_(params, MAX_NORM)
        scaler.unscale_(optimizer)
        if order == "right":
            shardmuon.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2 * SCALE  # it grew, and nothing else did
    return [(whole(p), whole(optimizer.state[p]["momentum_buffer"])) for p in params]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_unscale_after_accumulation_then_clip_then_momentum_then_newton_schulz(
    pools: Worlds, world: int
) -> None:
    """The momentum shows the order: Newton-Schulz alone would not see a factor. Float32: 1e-5;
    what Newton-Schulz makes of it: 1e-4."""
    right = right_order()
    for answer in pools.run(world, _steps_in_order, "right"):
        for (p, m), (right_p, right_m) in zip(answer, right, strict=True):
            assert reference.relative_error(m.numpy(), right_m) < 1e-5
            assert reference.relative_error(p.numpy(), right_p) < 1e-4


@pytest.mark.parametrize("order", ["clip before unscale", "clip every micro-step", "no clip"])
def test_another_order_would_be_seen(pools: Worlds, order: str) -> None:
    (answer,) = pools.run(1, _steps_in_order, order)
    for (_, m), (_, right_m) in zip(answer, right_order(), strict=True):
        assert reference.relative_error(m.numpy(), right_m) > 1e-2


# -- a model ----------------------------------------------------------------------------------


def _half_precision_model(steps: int) -> tuple[list[float], int, str]:
    """FSDP2 in float16 from a scale that is too large: scales, steps taken, hash of weights."""
    net: Any = models.Net()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            values = torch.from_numpy(reference.weights(1, p.numel())).float()
            p.copy_(values.view(p.shape) * (0.3 + 0.01 * i))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(net.to(ranks.device()), mesh=world_mesh(), mp_policy=policy)
    net.spare_weight.requires_grad_(False)
    groups = shardmuon.param_groups(net, muon={"lr": 0.02}, adamw={"lr": 1e-3})
    optimizer = shardmuon.Muon(groups)
    scaler, scales, taken = shardmuon.GradScaler(kind(), init_scale=2.0**24), [], 0
    for step in range(steps):
        seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(11, (4, 6), generator=seed).to(ranks.device())
        scaler.scale(net(tokens).float()).backward()
        scaler.unscale_(optimizer)
        shardmuon.clip_grad_norm_(net.parameters(), 0.1)
        before = held(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = agreed(held(optimizer) != before)
        taken += changed
        scales.append(agreed(scaler.get_scale()))
    weights = [whole(p) for p in net.parameters()]
    assert all(w.isfinite().all() for w in weights)
    return scales, taken, agreed(digest(weights))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_model_in_half_precision_finds_its_scale(pools: Worlds, world: int) -> None:
    scales, taken, _ = pools.run(world, _half_precision_model, 14)[0]
    pairs = itertools.pairwise([2.0**24, *scales])
    skipped = sum(later < earlier for earlier, later in pairs)
    assert skipped >= 2
    assert taken == len(scales) - skipped >= 2


# -- as torch's -------------------------------------------------------------------------------


def _alone(scaler: torch.amp.GradScaler) -> tuple[list[float], str, dict[str, Any]]:
    p = nn.Parameter(torch.from_numpy(reference.weights(10, 8)).float())
    optimizer = shardmuon.Muon([("w", p)], lr=0.02)
    scales = []
    for step in range(6):
        g = torch.from_numpy(reference.gradient(10, 8, step)).float()
        scaler.scale((p * g).sum()).backward()
        if step in (1, 4):
            p.grad[3, 2] = INF  # type: ignore[index]
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, held(optimizer), scaler.state_dict()


def test_one_process_gives_the_bits_and_scales_of_torch() -> None:
    keys: dict[str, Any] = {"init_scale": 2.0**8, "growth_interval": 2, "backoff_factor": 0.25}
    ours = _alone(shardmuon.GradScaler("cpu", **keys))
    assert ours == _alone(torch.amp.GradScaler("cpu", **keys))
    assert len(set(ours[0])) > 2


def test_state_dicts_are_those_of_torch() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    theirs.scale(torch.ones(()))
    ours = shardmuon.GradScaler("cpu")
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 8.0
    assert ours.state_dict() == theirs.state_dict()


def _disabled() -> int:
    p = nn.Parameter(torch.ones(4, 4, device=ranks.device()))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = shardmuon.GradScaler(kind(), enabled=False)
    p.grad = torch.ones_like(p)
    before = sum(collectives.calls.values())
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not p.any()
    return sum(collectives.calls.values()) - before


def test_a_scaler_that_is_switched_off_does_nothing(pools: Worlds) -> None:
    assert pools.run(2, _disabled) == [0, 0]


def test_unscaling_twice_is_an_error_as_in_torch() -> None:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = shardmuon.Muon([p], lr=0.1)
    scaler = make_scaler()
    p.grad = torch.ones_like(p)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_gradients_that_cannot_be_scaled_are_refused() -> None:
    half = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    scaler = make_scaler()
    with pytest.raises(ValueError, match="gradients are float16"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        scaler.unscale_(torch.optim.SGD(embedding.parameters(), lr=0.1))
