"""Settings that make no sense are refused at construction, with field and value in the message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from tests.conftest import Worlds
from tests.problems import PLACEMENTS, place, world_mesh

BAD: list[tuple[str, Any]] = [
    ("lr", -1),
    ("lr", float("nan")),
    ("lr", "0.1"),
    ("weight_decay", -0.1),
    ("momentum", 1.0),
    ("momentum", 1.5),
    ("momentum", -0.1),
    ("nesterov", "yes"),
    ("ns_steps", 0),
    ("ns_steps", -1),
    ("ns_steps", 100),
    ("ns_steps", 2.5),
    ("ns_coefficients", (3.4445, -4.7750)),
    ("ns_coefficients", (1.0, "x", 2.0)),
    ("eps", -1e-7),
    ("adjust_lr_fn", "match_rms"),
    ("ns_dtype", torch.float16),
    ("ns_dtype", "bfloat16"),
    ("momentum_dtype", torch.int32),
    ("cautious_weight_decay", 1),
    ("momentum_warmup", 1.5),
    ("ns_period", 0),
    ("ns_block", (1, 2, 3)),
    ("step", -1),
]
BAD_ADAMW: list[tuple[str, Any]] = [
    ("lr", -1),
    ("betas", (0.9,)),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.9)),
    ("eps", -1.0),
    ("weight_decay", -0.01),
    ("cautious_weight_decay", "yes"),
]


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 4))


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_value_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as error:
        shardmuon.Muon([matrix()], **{field: value})
    assert repr(value) in str(error.value)
    with pytest.raises(ValueError, match=field):
        shardmuon.Muon([{"params": [matrix()], field: value}])


@pytest.mark.parametrize(("field", "value"), BAD_ADAMW)
def test_bad_value_of_an_adamw_group_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as error:
        shardmuon.Muon([{"params": [matrix()], "algorithm": "adamw", field: value}])
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("adamw", "momentum"), ("adamw", "ns_steps"), ("adamw", "nesterov"), ("muon", "betas")],
)
def test_key_of_the_other_algorithm_is_refused(algorithm: str, key: str) -> None:
    group = {"params": [matrix()], "algorithm": algorithm, key: 0.9}
    with pytest.raises(ValueError, match=key):
        shardmuon.Muon([group])


@pytest.mark.parametrize(
    ("key", "near"),
    [("weight_decy", "weight_decay"), ("momentums", "momentum"), ("ns_step", "ns_steps")],
)
def test_misspelt_key_is_refused_with_the_right_one(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}.*{near}"):
        shardmuon.Muon([{"params": [matrix()], key: 0.1}])


def test_keys_of_frameworks_are_kept() -> None:
    group = {"params": [matrix()], "initial_lr": 0.1, "fused": None, "foreach": False}
    kept = shardmuon.Muon([group]).param_groups[0]
    assert (kept["initial_lr"], kept["foreach"]) == (0.1, False)


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.*sgd"):
        shardmuon.Muon([{"params": [matrix()], "algorithm": "sgd"}])


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 2, 2)])
def test_non_matrix_is_refused_by_name(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=r"layer\.weight"):
        shardmuon.Muon([("layer.weight", p)])


def test_complex_and_integer_parameters_are_refused_by_name() -> None:
    p = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"layer\.weight"):
        shardmuon.Muon([("layer.weight", p)])


def test_parameter_in_two_groups_is_refused() -> None:
    p = matrix()
    groups: list[dict[str, Any]] = [{"params": [p]}, {"params": [p], "algorithm": "adamw"}]
    with pytest.raises(ValueError, match="group"):
        shardmuon.Muon(groups)
    with pytest.raises(ValueError, match="twice"):
        shardmuon.Muon([p, p])


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        shardmuon.Muon([])


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        shardmuon.Muon([("weight", matrix()), ("module.weight", matrix())])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exchange", "ring"),
        ("bucket_bytes", 0),
        ("bucket_bytes", 1.5),
        ("missing_grad", "ignore"),
        ("nonfinite", "warn"),
        ("deterministic", 1),
        ("timeout_s", 0),
    ],
)
def test_bad_runtime_is_refused(field: str, value: Any) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field) as error:
        shardmuon.Runtime(**settings)
    assert repr(value) in str(error.value)


def test_zero_is_a_value_not_a_gap() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [matrix()], "lr": 0.0, "weight_decay": 0.0, "momentum": 0.0},
        {"params": [matrix()], "algorithm": "adamw", "weight_decay": 0.0, "betas": (0.0, 0.0)},
    ]
    muon, adamw = shardmuon.Muon(groups, weight_decay=0.3, momentum=0.4).param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.0, 0.0, 0.0)
    assert (adamw["weight_decay"], adamw["betas"]) == (0.0, (0.0, 0.0))


def test_adamw_groups_take_the_defaults_of_torch_not_of_the_constructor() -> None:
    optimizer = shardmuon.Muon(
        [{"params": [matrix()], "algorithm": "adamw"}], lr=0.5, weight_decay=0.7, eps=1e-3
    )
    group = optimizer.param_groups[0]
    defaults = torch.optim.AdamW([matrix()]).defaults
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert group[key] == defaults[key], key
    assert not {"momentum", "ns_steps", "nesterov"} & set(group)


def test_muon_groups_take_what_the_constructor_says() -> None:
    optimizer = shardmuon.Muon([{"params": [matrix()]}], lr=0.5, momentum=0.7, ns_steps=3)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["ns_steps"]) == (0.5, 0.7, 3)
    assert group["algorithm"] == "muon"
    assert "betas" not in group


def _construct(field: str, value: Any) -> None:
    p = nn.Parameter(place(torch.ones(10, 8), world_mesh(), PLACEMENTS["rows"]))
    shardmuon.Muon([("layer.weight", p)], **{field: value})


@pytest.mark.parametrize(("field", "value"), [("lr", -1), ("momentum", 1.0), ("ns_steps", 0)])
def test_bad_value_is_refused_on_all_ranks(pools: Worlds, field: str, value: Any) -> None:
    errors = pools.run_expecting_error(2, _construct, field, value)
    assert {e.type_name for e in errors} == {"ValueError"}
    assert all(field in e.message and repr(value) in e.message for e in errors)
