"""State dicts of sharded models through torch's own functions: complete, placed, loadable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import shardmuon
from tests import models, reference
from tests.conftest import Worlds
from tests.problems import (
    PLACEMENTS,
    Problem,
    assert_ranks_agree,
    build,
    digest,
    local,
    momenta,
    place,
    set_gradients,
    whole,
    world_mesh,
)
from tests.reference import Rule, relative_error

ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash of all whole parameters and state; the same on all ranks or an error."""
    tensors: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        tensors += [p, *(v for _, v in sorted(optimizer.state[p].items()))]
    return digest(assert_ranks_agree(tensors))


def restore(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `dcp.save` of model and optimizer wrote."""
    saved: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save model and optimizer as DCP users do."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def _placed_like_parameters(placement: str) -> list[bool]:
    mesh = world_mesh()
    problem = Problem(shapes=((10, 8), (5, 7)), placements=(placement,))
    params, optimizer = build(problem, mesh)
    checks = []
    for moment in range(2):
        for p, m in zip(params, momenta(optimizer, params), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(m, DTensor)
            checks += [m.shape == p.shape, m.stride() == p.stride(), m.device_mesh == p.device_mesh]
            checks += [m.placements == p.placements, m.full_tensor().shape == p.shape]
            checks.append(m.to_local().shape == p.to_local().shape)
            checks.append(bool(m.to_local().any()) == (moment == 1 and m.to_local().numel() > 0))
        set_gradients(params, problem, 0, mesh)
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    checks += [isinstance(entry["momentum_buffer"], DTensor) for entry in saved.values()]
    return checks


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world", [3, 4])
def test_state_of_uneven_shards_is_placed_like_the_parameter(
    pools: Worlds, placement: str, world: int
) -> None:
    for checks in pools.run(world, _placed_like_parameters, placement):
        assert all(checks)


FULL_SHAPES = ((10, 8), (5, 7), (64, 24), (18, 48), (1, 64))


def _full_momenta() -> list[Tensor]:
    mesh = world_mesh()
    holder = nn.Module()
    for i, (rows, cols) in enumerate(FULL_SHAPES):
        weight = torch.from_numpy(reference.weights(rows, cols)).float()
        holder.register_parameter(f"w{i}", nn.Parameter(place(weight, mesh, PLACEMENTS["rows"])))
    optimizer = shardmuon.Muon(holder.named_parameters(), lr=0.02)
    for step in range(3):
        set_gradients(list(holder.parameters()), Problem(shapes=FULL_SHAPES), step, mesh)
        optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    state: Any = get_optimizer_state_dict(holder, optimizer, options=options)["state"]
    return [state[f"w{i}"]["momentum_buffer"].cpu() for i in range(len(FULL_SHAPES))]


def test_full_state_dict_holds_what_every_rank_knows(pools: Worlds) -> None:
    for buffers in pools.run(4, _full_momenta):
        assert float(buffers[0].norm()) == pytest.approx(0.829799, rel=1e-5)
        for buffer, shape in zip(buffers, FULL_SHAPES, strict=True):
            _, right = Rule().golden(*shape)
            assert relative_error(buffer, right) < 1e-5


def _save_after_one_step(folder: str) -> tuple[int, int, bool]:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    models.backward(model, 0)
    optimizer.step()
    save(folder, model, optimizer)
    before = fingerprint(model, optimizer)
    other = models.sharded(world_mesh(), seed=1)
    fresh = models.optimizer_of(other)
    restore(folder, other, fresh)
    named = dict(model.named_parameters())
    buffers = [optimizer.state[named[name]]["momentum_buffer"] for name in models.MATRICES]
    held = sum(local(b).numel() for b in buffers)
    return held, sum(b.numel() for b in buffers), fingerprint(other, fresh) == before


@pytest.mark.parametrize("world", [2, 4])
def test_distributed_save_holds_each_element_once(
    pools: Worlds, shared_folder: str, world: int
) -> None:
    answers = pools.run(world, _save_after_one_step, shared_folder)
    assert sum(held for held, _, _ in answers) == answers[0][1]
    assert max(held for held, _, _ in answers) < 1.5 * answers[0][1] / world + 30
    assert all(equal for _, _, equal in answers)


def state_keys(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: set(entry) for name, entry in state.items()}


def _late_parameter(folder: str, resume: bool) -> tuple[list[dict[str, set[str]]], str, bool]:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    keys = [state_keys(model, optimizer)]
    models.backward(model, 0)
    optimizer.step()
    keys.append(state_keys(model, optimizer))
    idle = optimizer.state[model.spare_weight]["momentum_buffer"]
    still = not local(idle).any()
    if resume:
        save(folder, model, optimizer)
        model = models.sharded(world_mesh(), seed=7)
        optimizer = models.optimizer_of(model)
        restore(folder, model, optimizer)
    model.use_spare = True
    for step in (1, 2):
        models.backward(model, step)
        optimizer.step()
    return keys, fingerprint(model, optimizer), still


def test_state_does_not_depend_on_which_gradients_came(pools: Worlds, shared_folder: str) -> None:
    expected = {
        name: {"momentum_buffer"} if name in models.MATRICES else ADAMW_STATE
        for name, _ in models.make().named_parameters()
    }
    straight = pools.run(2, _late_parameter, shared_folder, False)
    resumed = pools.run(2, _late_parameter, shared_folder, True)
    for keys, _, still in (*straight, *resumed):
        assert keys == [expected, expected]
        assert still
    assert [s[1] for s in straight] == [r[1] for r in resumed]


def _state_dict_before_any_step() -> tuple[bool, list[str], bool]:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    models.backward(model, 0)
    kept = {n: None if p.grad is None else p.grad for n, p in model.named_parameters()}
    copies = {n: None if g is None else local(g).clone() for n, g in kept.items()}
    before = fingerprint(model, optimizer)
    keys = state_keys(model, optimizer)
    same = fingerprint(model, optimizer) == before
    for name, p in model.named_parameters():
        gradient, copy = p.grad, copies[name]
        same &= gradient is kept[name]
        if gradient is not None and copy is not None:
            same &= bool(local(gradient).equal(copy))
    steps = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
    return same, sorted(keys), steps == {0.0}


def test_state_dict_before_the_first_step_changes_nothing(pools: Worlds) -> None:
    names = sorted(name for name, _ in models.make().named_parameters())
    assert pools.run(2, _state_dict_before_any_step) == [(True, names, True)] * 2


def _train(folder: str, resume: bool) -> tuple[list[float], str, str]:
    model = models.sharded(world_mesh())
    optimizer = models.optimizer_of(model)
    losses, at_half = [], ""
    for step in range(8):
        if step == 4:
            at_half = fingerprint(model, optimizer)
            if resume:
                save(folder, model, optimizer)
                model = models.sharded(world_mesh(), seed=5)
                optimizer = models.optimizer_of(model)
                restore(folder, model, optimizer)
                at_half = fingerprint(model, optimizer)
        losses.append(models.backward(model, step))
        optimizer.step()
    return losses[4:], at_half, fingerprint(model, optimizer)


def test_resumed_training_repeats_every_bit(pools: Worlds, shared_folder: str) -> None:
    straight = pools.run(2, _train, shared_folder, False)
    assert pools.run(2, _train, shared_folder, True) == straight


def _construct(model: nn.Module, how: str) -> shardmuon.Muon:
    matrices = {n: p for n, p in model.named_parameters() if n in models.MATRICES}
    if how == "parameters":
        return shardmuon.Muon(list(matrices.values()), lr=0.02)
    if how == "named":
        return shardmuon.Muon(list(matrices.items()), lr=0.02)
    if how == "plain groups":
        values = list(matrices.values())
        return shardmuon.Muon([{"params": values[:2]}, {"params": values[2:]}], lr=0.02)
    return models.optimizer_of(model)


def _round_trip(how: str, folder: str) -> tuple[bool, list[str]]:
    results = []
    keys: list[str] = []
    for seed in (0, 1):
        model = models.sharded(world_mesh(), seed=seed)
        for name, p in model.named_parameters():
            p.requires_grad_(how == "groups" or name in models.MATRICES)
        optimizer = _construct(model, how)
        if seed == 0:
            model.use_spare = True
            for step in range(2):
                models.spread_gradients(model, step)
                optimizer.step()
            save(folder, model, optimizer)
        else:
            restore(folder, model, optimizer)
        keys = sorted(state_keys(model, optimizer))
        named = dict(model.named_parameters())
        state = [optimizer.state[named[n]]["momentum_buffer"] for n in models.MATRICES]
        results.append(digest(assert_ranks_agree(state)))
    return results[0] == results[1], keys


@pytest.mark.parametrize("how", ["parameters", "named", "plain groups", "groups"])
def test_every_way_to_construct_saves_and_loads(
    pools: Worlds, shared_folder: str, how: str
) -> None:
    for equal, keys in pools.run(2, _round_trip, how, shared_folder):
        assert equal
        assert set(models.MATRICES) <= set(keys)


def _groups_added_later(folder: str) -> tuple[bool, bool, bool, bool, bool]:
    """Two matrices, then a third and a vector; freeze the first; save; load into one of all."""
    mesh = world_mesh()
    shapes = ((10, 8), (5, 7), (64, 24))
    problem = Problem(shapes=shapes)
    holder = nn.Module()
    for i, (rows, cols) in enumerate(shapes):
        weight = torch.from_numpy(reference.weights(rows, cols)).float()
        holder.register_parameter(f"w{i}", nn.Parameter(place(weight, mesh, PLACEMENTS["rows"])))
    vector = nn.Parameter(place(torch.ones(10), mesh, PLACEMENTS["rows"]))
    holder.register_parameter("bias", vector)
    named = dict(holder.named_parameters())
    matrices = [named[f"w{i}"] for i in range(3)]
    settings: dict[str, Any] = {"lr": 0.02, "ns_dtype": torch.float32}
    optimizer = shardmuon.Muon([("w0", matrices[0]), ("w1", matrices[1])], **settings)
    set_gradients(matrices, problem, 0, mesh)
    optimizer.step()
    set_gradients(matrices, problem, 1, mesh)
    optimizer.step()
    untouched = relative_error(whole(matrices[2]), reference.weights(64, 24)) < 1e-6
    optimizer.add_param_group({"params": [("w2", matrices[2])]})
    optimizer.add_param_group({"params": [("bias", vector)], "algorithm": "adamw"})
    frozen = whole(matrices[0])
    matrices[0].requires_grad_(False)
    for step in range(3):
        set_gradients(matrices, problem, step, mesh)
        vector.grad = torch.ones_like(vector)
        matrices[0].grad = None
        optimizer.step()
    right, _ = Rule().golden(64, 24, steps=3)
    moved = relative_error(whole(matrices[2]), right) < 1e-4
    still = whole(matrices[0]).equal(frozen)
    planned = set(optimizer.plan.owners()) >= {"w1", "w2"}
    matrices[0].requires_grad_(True)
    save(folder, holder, optimizer)
    before = fingerprint(holder, optimizer)
    groups: list[dict[str, Any]] = [
        {"params": [("w0", matrices[0]), ("w1", matrices[1])]},
        {"params": [("w2", matrices[2])]},
        {"params": [("bias", vector)], "algorithm": "adamw"},
    ]
    fresh = shardmuon.Muon(groups, **settings)
    restore(folder, holder, fresh)
    return untouched, moved, still, planned, fingerprint(holder, fresh) == before


def test_groups_can_be_added_and_frozen_between_steps(pools: Worlds, shared_folder: str) -> None:
    assert pools.run(4, _groups_added_later, shared_folder) == [(True,) * 5] * 4


def _through_state_dict() -> bool:
    """The plain `state_dict` and `load_state_dict` on each rank, without torch's helpers."""
    results = []
    for reload in (False, True):
        model = models.sharded(world_mesh())
        optimizer = models.optimizer_of(model)
        models.spread_gradients(model, 0)
        optimizer.step()
        if reload:
            saved = optimizer.state_dict()
            optimizer = models.optimizer_of(model)
            optimizer.load_state_dict(state_dict=saved)
        models.spread_gradients(model, 1)
        optimizer.step()
        results.append(fingerprint(model, optimizer))
    return results[0] == results[1]


def test_plain_state_dict_of_shards_loads(pools: Worlds) -> None:
    assert all(pools.run(2, _through_state_dict))
