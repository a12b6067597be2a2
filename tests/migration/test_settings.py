"""Groups by shape, refusals, defaults, AdamW groups, and state that is carried over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardmuon import Muon, migration, param_groups
from shardmuon.checkpoint import from_torch
from tests.migration import others
from tests.migration.others import ADAM, Adam, Other, gradient
from tests.reference import Array, weights


class Model(nn.Module):
    """A tall, a wide and a square matrix, an embedding and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.up = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)
        self.mix = nn.Linear(16, 16, bias=False)


def start(model: nn.Module) -> None:
    for p in model.parameters():
        with torch.no_grad():
            p.copy_(torch.from_numpy(weights(p.shape[0], p.numel() // p.shape[0])).view(p.shape))


def give(model: nn.Module, t: int) -> None:
    for p in model.parameters():
        values = gradient(p.shape[0], p.numel() // p.shape[0], t)
        p.grad = torch.from_numpy(values).float().view(p.shape)


def as_array(tensor: Tensor) -> Array:
    value: Array = tensor.detach().double().numpy()
    return value.reshape(value.shape[0], -1)


def test_one_group_for_each_factor_and_the_report_says_who_is_where() -> None:
    model = Model()
    moved = migration.from_dion(lr=0.01, weight_decay=0.1, adjust_lr=None)
    groups = moved.groups(param_groups(model))
    muon = {tuple(n for n, _ in g["params"]): g for g in groups if g["algorithm"] == "muon"}
    assert set(muon) == {("up.weight",), ("down.weight", "mix.weight")}
    tall = muon["up.weight",]
    assert tall["lr"] == pytest.approx(0.01 * (16 / 48) ** 0.5)
    assert tall["weight_decay"] == pytest.approx(0.1 / (16 / 48) ** 0.5)
    assert muon["down.weight", "mix.weight"]["lr"] == 0.01
    vectors = [g for g in groups if g["algorithm"] == "adamw" and g["params"][0][1].ndim == 1]
    assert [g["weight_decay"] for g in vectors] == [0.0]
    assert all(g["lr"] == 0.01 and g["betas"] == (0.9, 0.95) for g in vectors)
    Muon(groups)


def test_lion_groups_of_dion_are_lion_groups_here() -> None:
    model = Model()
    moved = migration.from_dion(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, rest="lion")
    optimizer = Muon(moved.groups(param_groups(model)))
    rest = [group for group in optimizer.param_groups if group["algorithm"] != "muon"]
    assert {group["algorithm"] for group in rest} == {"lion"}
    assert [group["weight_decay"] for group in rest] == [0.1, 0.0]
    assert all(group["lr"] == 0.01 and group["betas"] == (0.9, 0.98) for group in rest)
    states = {name: {"momentum": p} for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"embed\.weight has algorithm='lion'"):
        moved.states(optimizer, states)


def test_where_one_setting_serves_all_shapes_muon_gives_it() -> None:
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([p], **migration.from_moonlight(lr=2e-4).muon)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["adjust_lr_fn"]) == (
        2e-4,
        0.1,
        "match_rms_adamw",
    )
    for moved in (migration.from_dion(adjust_lr=None), migration.from_keller()):
        with pytest.raises(ValueError, match="give your groups to groups"):
            _ = moved.muon


def test_cautious_decay_of_dion_is_that_of_both_algorithms() -> None:
    for cautious in (True, False):
        for group in migration.from_dion(cautious_wd=cautious).groups(param_groups(Model())):
            assert group["cautious_weight_decay"] is cautious


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_spectral_is_their_unit_rms_norm_and_not_their_spectral(factor: float) -> None:
    """One group for tall, wide and square matrices; an extra factor goes to lr and decay."""
    moved = migration.from_megatron(
        1e-3, 0.1, muon_scale_mode="unit_rms_norm", muon_extra_scale_factor=factor
    )
    groups = [g for g in moved.groups(param_groups(Model())) if g["algorithm"] == "muon"]
    assert [[name for name, _ in g["params"]] for g in groups] == [
        ["up.weight", "down.weight", "mix.weight"]
    ]
    for keys in (*groups, moved.muon):
        assert keys["adjust_lr_fn"] == "spectral"
        assert (keys["lr"], keys["weight_decay"]) == (1e-3 * factor, 0.1 / factor)
    dion = migration.from_dion(lr=0.02).muon
    assert (dion["lr"], dion["weight_decay"], dion["adjust_lr_fn"]) == (0.02, 0.01, "spectral")
    assert migration.from_megatron(1e-3).muon["adjust_lr_fn"] == "match_rms_adamw"


def test_torch_defaults_stay_what_they_are() -> None:
    theirs = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    ours = migration.from_torch().muon
    for key, value in theirs.items():
        if key not in ("params", "adjust_lr_fn"):
            assert ours[key] == value, key
    assert ours["adjust_lr_fn"] == "original"  # what None means
    assert ours["ns_dtype"] == torch.bfloat16


def test_groups_of_keller_with_use_muon() -> None:
    model = Model()
    start(model)
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if n in ("up.weight", "down.weight", "mix.weight")]
    rest = [p for n, p in named.items() if n not in ("up.weight", "down.weight", "mix.weight")]
    theirs = [
        {"params": matrices, "use_muon": True, "lr": 0.05, "weight_decay": 0.01},
        {"params": rest, "use_muon": False, "weight_decay": 0.02},
    ]
    before = [dict(group) for group in theirs]
    optimizer = Muon(
        [
            {**g, "ns_dtype": torch.float32} if g.get("algorithm") != "adamw" else g
            for g in migration.keller_groups(theirs)
        ]
    )
    assert theirs == before
    rule = Other(
        lr=0.05,
        decay=0.01,
        mu=0.95,
        nesterov=True,
        triples=list(others.KELLER) * 5,
        scale=others.original,
        sums=False,
    )
    adam = replace(ADAM, decay=0.02)
    for t in range(4):
        give(model, t)
        optimizer.step()
    for name, p in named.items():
        shape = (p.shape[0], p.numel() // p.shape[0])
        given = [gradient(*shape, t) for t in range(4)]
        kind: Any = rule if any(p is m for m in matrices) else adam
        right = kind.run(weights(*shape), given)[0]
        change = np.linalg.norm(right - weights(*shape))
        error = np.linalg.norm(as_array(p) - right) / change
        assert error < 3e-4, name  # lr 3e-4 changes float32 weights by some 1e-3 only


def test_convolutions_of_keller_take_the_scale_of_their_kernel() -> None:
    conv = nn.Parameter(torch.ones(64, 2, 3, 3))
    (group,) = migration.from_keller(lr=0.02).groups([{"params": [conv], "flatten": True}])
    assert group["lr"] == pytest.approx(0.02 / (64 / 18) ** 0.5)
    plain = migration.from_dion(lr=0.02, adjust_lr=None)
    (group,) = plain.groups([{"params": [conv], "flatten": True}])
    assert group["lr"] == pytest.approx(0.02 / (64 / 18) ** 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: migration.from_dion(adjust_lr="rms"), "adjust_lr must be one of"),
        (lambda: migration.from_dion(rest="lions"), "rest must be one of.*did you mean 'lion'"),
        (
            lambda: migration.from_dion(rest="lion", cautious_wd=True),
            "cautious_wd=True cannot be mapped with rest='lion'",
        ),
        (lambda: migration.from_dion(mu=1.5), "momentum must be a number in"),
        (lambda: migration.from_torch(adjust_lr_fn="spectral"), "adjust_lr_fn of torch.optim.Muon"),
        (lambda: migration.from_keller(adam={"amsgrad": True}), "'amsgrad', which cannot be"),
        (lambda: migration.keller_groups([{"params": []}]), "has use_muon and params"),
        (
            lambda: migration.keller_groups([{"params": [], "use_muon": True, "betas": 1}]),
            "'betas', which cannot be mapped",
        ),
        (
            lambda: migration.from_megatron(1e-3, tensor_model_parallel_size=2),
            "muon_tp_mode='blockwise' cannot be mapped with tensor parallelism",
        ),
        (lambda: migration.from_megatron(1e-3, muon_tp_mode="both"), "muon_tp_mode must be one of"),
        (
            lambda: migration.from_megatron(1e-3, decoupled_weight_decay=False),
            "decoupled_weight_decay=False cannot be mapped",
        ),
        (
            lambda: migration.from_megatron(1e-3, muon_scale_mode="spectrl"),
            "did you mean 'spectral'",
        ),
        (
            lambda: migration.from_emerging_optimizers(weight_decay_method="independent"),
            "weight_decay_method='independent' cannot be mapped",
        ),
        (lambda: migration.from_emerging_optimizers(extra_scale_factor=0), "must be above 0"),
        (
            lambda: migration.from_emerging_optimizers(coefficient_type="newton"),
            "coefficient_type must be one of",
        ),
        (lambda: migration.from_emerging_optimizers(fp32_matmul_prec="low"), "fp32_matmul_prec"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_groups_that_contradict_the_source_are_refused() -> None:
    p = nn.Parameter(torch.ones(4, 6))
    dion = migration.from_dion(adjust_lr=None)
    with pytest.raises(ValueError, match=r"a muon group has lr, momentum, which dion\.Muon sets"):
        dion.groups([{"params": [p], "momentum": 0.9, "lr": 1.0}])
    fused = nn.Parameter(torch.ones(12, 2))
    with pytest.raises(ValueError, match=r"qkv is made of matrices .*8x2 0.5, 2x2 1.*dion.Muon"):
        dion.groups([{"params": [("qkv", fused)], "split_sizes": [8, 2, 2]}])
    (equal,) = dion.groups([{"params": [("qkv", nn.Parameter(torch.ones(16, 2)))], "num_heads": 2}])
    assert equal["lr"] == pytest.approx(0.01 * 0.5)
    (spectral,) = migration.from_dion().groups([{"params": [fused], "split_sizes": [8, 2, 2]}])
    assert spectral["lr"] == 0.01
    with pytest.raises(ValueError, match="bias: a muon group takes matrices"):
        dion.groups([{"params": [("bias", nn.Parameter(torch.ones(3)))]}])
    adamw = {"params": [p], "algorithm": "adamw"}
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon has no AdamW"):
        migration.from_torch().groups([adamw])
    assert migration.from_torch().groups([{**adamw, "lr": 1e-3}]) == [{**adamw, "lr": 1e-3}]


@pytest.mark.parametrize("names", ["moonlight", "dion", "dion cautious", "keller"])
def test_a_run_of_another_optimizer_is_continued(names: str) -> None:
    """Their state after three steps, loaded here, gives their next three steps."""
    model = Model()
    start(model)
    decay, triples = 0.1, list(others.KELLER) * 5
    matrix = Other(
        lr=0.01, decay=decay, mu=0.9, nesterov=True, triples=triples, scale=others.moonlight
    )
    adam = Adam(lr=0.01, betas=(0.9, 0.95), eps=1e-8, decay=decay, early_eps=True)
    moved = migration.from_moonlight(lr=0.01, wd=decay, momentum=0.9)
    if "dion" in names:
        cautious = "cautious" in names
        moved = migration.from_dion(
            mu=0.9,
            weight_decay=decay,
            cautious_wd=cautious,
            nesterov=True,
            adjust_lr="rms_norm",
            use_polar_express=False,
        )
        matrix = replace(matrix, triples=others.YOU, cautious=cautious)
        adam = replace(adam, early_eps=False, cautious=cautious)
    elif names == "keller":
        adam = replace(adam, eps=1e-10, early_eps=False)
        moved = migration.from_keller(0.01, decay, 0.9, adam={"lr": 0.01, "weight_decay": decay})
        matrix = replace(matrix, sums=False, scale=others.original)
    states: dict[str, dict[str, Any]] = {}
    right: dict[str, Array] = {}
    for name, p in model.named_parameters():
        shape = (p.shape[0], p.numel() // p.shape[0])
        given = [gradient(*shape, t) for t in range(6)]
        is_matrix = p.ndim == 2 and not name.startswith("embed")
        kind: Any = matrix if is_matrix else replace(adam, decay=decay if p.ndim == 2 else 0.0)
        half, full = kind.run(weights(*shape), given[:3]), kind.run(weights(*shape), given)
        right[name] = full[0]
        with torch.no_grad():
            p.copy_(torch.from_numpy(half[0]).view(p.shape))
        tensors = [torch.from_numpy(value).float().view(p.shape) for value in half[1:]]
        states[name] = _their_state(names, tensors)
    groups = moved.groups(param_groups(model))
    for group in groups:
        if group["algorithm"] == "muon":
            group["ns_dtype"] = torch.float32
    optimizer = Muon(groups)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    files = moved.states(optimizer, states, step=3)
    from_torch(model, optimizer, *files)
    assert settings == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    for t in range(3, 6):
        give(model, t)
        optimizer.step()
    for name, p in model.named_parameters():
        error = np.linalg.norm(as_array(p) - right[name]) / np.linalg.norm(right[name])
        assert error < 1e-6, (name, error)


def _their_state(names: str, tensors: list[Tensor]) -> dict[str, Any]:
    """State of a parameter under the keys of that implementation."""
    if "dion" in names:
        return dict(zip(("momentum", "variance"), tensors, strict=False))
    if len(tensors) == 1:
        return {"momentum_buffer": tensors[0], "use_muon": True}
    keys = ("moment1", "moment2") if names == "moonlight" else ("exp_avg", "exp_avg_sq")
    return {"step": 3, **dict(zip(keys, tensors, strict=True))}


def test_state_that_is_missing_is_refused_by_name() -> None:
    model = Model()
    moved = migration.from_moonlight()
    optimizer = Muon(moved.groups(param_groups(model)))
    with pytest.raises(ValueError, match=r"there is no state of up\.weight"):
        moved.states(optimizer, {})
    empty: dict[str, dict[str, Any]] = {name: {} for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"state of up\.weight has none of momentum_buffer"):
        moved.states(optimizer, empty)
    for state in empty.values():
        state["momentum_buffer"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"embed\.weight has no step of AdamW; pass step="):
        moved.states(optimizer, empty)
    with pytest.raises(ValueError, match="parameters without names"):
        moved.states(Muon([nn.Parameter(torch.ones(2, 2))]), {})
