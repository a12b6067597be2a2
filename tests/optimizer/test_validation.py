"""What no argument, no group, no file and nobody later may set.

tests/optimizer/test_settings.py has the ranges of single settings; here is what a parameter may be,
what `load_state_dict` and the user may change, and that a refusal leaves everything as it was.
tests/fuzz draws such input at random.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shardmuon
from shardmuon import limits
from shardmuon.keys import FLOATS
from shardmuon.orthogonalize.coefficients import PRESETS
from shardmuon.orthogonalize.newton_schulz import METHODS
from shardmuon.training.config import MuonGroups
from tests.conftest import Worlds
from tests.fuzz.inputs import snapshot, take_a_step
from tests.problems import PLACEMENTS, place, world_mesh


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (3, 4)))


def pair() -> shardmuon.Muon:
    """A muon group of matrices and an adamw group of a vector, after a step."""
    groups: list[dict[str, Any]] = [
        {"params": [("a", matrix()), ("b", matrix(4, 3))]},
        {"params": [("c", matrix(5))], "algorithm": "adamw"},
    ]
    optimizer = shardmuon.Muon(groups)
    take_a_step(optimizer)
    return optimizer


# -- settings that would train on without a sense ------------------------------------------------

SENSELESS: list[tuple[str, Any]] = [
    ("lr", -1),
    ("momentum", 1.0),
    ("momentum", -0.1),
    ("ns_steps", 0),
    ("ns_steps", -1),
    ("adjust_lr_fn", "match_adamw"),
    ("ns_coefficients", (3.4445, -4.7750)),
]


@pytest.mark.parametrize(("field", "value"), SENSELESS)
def test_senseless_settings_are_refused_at_construction(field: str, value: Any) -> None:
    for build in (
        lambda: shardmuon.Muon([matrix()], **{field: value}),
        lambda: shardmuon.Muon([{"params": [matrix()], field: value}]),
        lambda: shardmuon.param_groups(nn.Sequential(nn.Linear(3, 4)), muon={field: value}),
    ):
        with pytest.raises(ValueError, match=field) as caught:
            build()
        assert repr(value) in str(caught.value)


def _construct(field: str, value: Any) -> None:
    p = nn.Parameter(place(torch.ones(10, 8), world_mesh(), PLACEMENTS["rows"]))
    shardmuon.Muon([("layer.weight", p)], **{field: value})


def test_senseless_settings_are_refused_on_all_ranks(pools: Worlds) -> None:
    for field, value in SENSELESS:
        errors = pools.run_expecting_error(2, _construct, field, value)
        assert {error.type_name for error in errors} == {"ValueError"}
        assert all(field in e.message and repr(value) in e.message for e in errors)


def test_a_parameter_that_is_given_twice_is_named() -> None:
    p = matrix()
    with pytest.raises(ValueError, match=r"given twice, as one and as two; tied weights"):
        shardmuon.Muon([("one", p), ("two", p)])
    groups: list[dict[str, Any]] = [
        {"params": [("one", p)]},
        {"params": [("two", p)], "algorithm": "adamw"},
    ]
    with pytest.raises(ValueError, match="given twice, as one and as two"):
        shardmuon.Muon(groups)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"given twice, as 0\.weight and as 1\.weight"):
        shardmuon.Muon(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match=r"given twice, as 0\.0 and as 0\.1"):
        shardmuon.Muon([p, p])


# -- flattened parameters, and zero as a value ----------------------------------------------------


class Flat(nn.Module):
    """What FSDP1 makes of a model: one parameter of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self._flat_param = matrix(100)


@pytest.mark.parametrize("model", [Flat(), nn.Sequential(nn.LayerNorm(4), nn.Embedding(4, 4))])
def test_a_model_without_matrices_is_an_error_that_names_the_cause(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no parameter takes Muon.*FSDP1.*to_muon"):
        shardmuon.param_groups(model)


def test_zeros_are_kept() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    zero = {"lr": 0.0, "weight_decay": 0.0}
    groups = shardmuon.param_groups(model, muon={**zero, "momentum": 0.0}, adamw={**zero, "eps": 0})
    muon, adamw = shardmuon.Muon(groups, lr=0.3, weight_decay=0.3, momentum=0.4).param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.0, 0.0, 0.0)
    assert (adamw["lr"], adamw["weight_decay"], adamw["eps"]) == (0.0, 0.0, 0)


# -- values that only look right ------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("lr", True),
    ("lr", 10**400),
    ("lr", 1e31),
    ("lr", torch.tensor(float("inf"))),
    ("lr", torch.tensor(1j)),
    ("lr", torch.tensor(True)),
    ("lr", torch.ones(2)),
    ("lr", torch.empty((), device="meta")),
    ("momentum", float("nan")),
    ("weight_decay", "0.1"),
    ("nesterov", 1),
    ("ns_steps", True),
    ("ns_coefficients", [(1.0, 2.0, float("inf"))]),
    ("ns_coefficients", [1e200, 1.0, 1.0]),
    ("ns_coefficients", {}),
    ("eps", 0.0),
    ("eps", 1e-50),
    ("ns_method", ["gram"]),
    ("adjust_lr_fn", ()),
    ("momentum_dtype", torch.float8_e4m3fn),
    ("num_heads", 2.0),
    ("split_sizes", "12"),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_values_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got "):
        shardmuon.Muon([{"params": [matrix()], field: value}])


@pytest.mark.parametrize("coefficients", [(0, 0, 0), (1e30, -1e30, 1e30), [(0.0, 1.0, 1.0)] * 5])
def test_coefficients_in_range_make_a_step(coefficients: Any) -> None:
    """Where the gram method starts anew is computed from them."""
    take_a_step(shardmuon.Muon([matrix()], ns_coefficients=coefficients))


@pytest.mark.parametrize(
    ("keys", "near"),
    [
        ({"algorithm": "Muon"}, "did you mean 'muon'"),
        ({"algorithm": ["muon"]}, r"algorithm must be one of \['adamw', "),
        ({"ns_method": "standart"}, "did you mean 'standard'"),
        ({"ns_coefficients": "polar-express"}, "did you mean 'polar_express'"),
        ({"adjust_lr_fn": "match_rms"}, "did you mean 'match_rms_adamw'"),
        ({"nesterv": True}, "did you mean nesterov"),
        ({3: 4}, "group keys must be text, got 3"),
    ],
)
def test_unknown_names_come_with_the_nearest(keys: dict[Any, Any], near: str) -> None:
    with pytest.raises(ValueError, match=near):
        shardmuon.Muon([{"params": [matrix()], **keys}])


def test_unknown_patterns_come_with_the_nearest_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"'0\.0\.wieght' .*to_muon.*did you mean '0\.0\.weight'"):
        shardmuon.param_groups(model, to_muon=["0.0.wieght"])
    with pytest.raises(TypeError, match=r"to_adamw must be a list of patterns, got '\*'"):
        shardmuon.param_groups(model, to_adamw="*")
    with pytest.raises(ValueError, match="muon: algorithm 'adamw' is not one for matrices"):
        shardmuon.param_groups(model, muon={"algorithm": "adamw"})
    with pytest.raises(ValueError, match="is not one for single elements"):
        shardmuon.param_groups(model, adamw={"algorithm": "normuon"})
    with pytest.raises(ValueError, match="adamw: group key momentum does not belong"):
        shardmuon.param_groups(model, adamw={"momentum": 0.9})


@pytest.mark.parametrize(
    ("key", "value"), [("amsgrad", True), ("maximize", True), ("decoupled_weight_decay", False)]
)
def test_another_rule_of_torch_is_refused_not_ignored(key: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"{key}={value} is not supported"):
        shardmuon.Muon([{"params": [matrix()], "algorithm": "adamw", key: value}])
    shardmuon.Muon([{"params": [matrix()], "algorithm": "adamw", key: not value}])


# -- parameters -----------------------------------------------------------------------------------

PARAMETERS: dict[str, tuple[Any, str]] = {
    "complex": (nn.Parameter(torch.ones(3, 4, dtype=torch.complex64)), "dtype torch.complex64"),
    "integer": (torch.ones(3, 4, dtype=torch.int32), "dtype torch.int32"),
    "bool": (torch.ones(3, 4, dtype=torch.bool), "dtype torch.bool"),
    "float8": (torch.ones(3, 4).to(torch.float8_e5m2), "dtype torch.float8_e5m2"),
    "sparse": (torch.ones(3, 4).to_sparse(), "layout torch.sparse_coo"),
    "0-d": (matrix(1).detach().sum(), r"not shape \(\)"),
    "1-d": (matrix(7), r"not shape \(7,\)"),
    "4-d": (matrix(2, 2, 2, 2), r"not shape \(2, 2, 2, 2\)"),
    "lazy": (nn.parameter.UninitializedParameter(), "has no shape yet"),
}


@pytest.mark.parametrize(("parameter", "message"), PARAMETERS.values(), ids=list(PARAMETERS))
def test_parameters_that_a_muon_group_cannot_take(parameter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"layer\.weight.*{message}"):
        shardmuon.Muon([("layer.weight", parameter)])
    optimizer = pair()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("layer.weight", parameter)]})
    assert snapshot(optimizer) == before


def test_parameters_on_two_devices_are_refused_by_name() -> None:
    elsewhere = nn.Parameter(torch.empty(3, 4, device="meta"))
    message = "one is on cpu and two on meta"
    with pytest.raises(ValueError, match=message):
        shardmuon.Muon([("one", matrix()), ("two", elsewhere)])
    groups: list[dict[str, Any]] = [
        {"params": [("one", matrix())]},
        {"params": [("two", elsewhere)], "algorithm": "adamw"},
    ]
    with pytest.raises(ValueError, match=message):
        shardmuon.Muon(groups)
    shardmuon.Muon([("two", elsewhere)])
    frozen = nn.Parameter(torch.empty(3, 4, device="meta"), requires_grad=False)
    optimizer = shardmuon.Muon([("one", matrix()), ("two", frozen)])
    take = optimizer.plan.owners()
    assert list(take) == ["one"]
    frozen.requires_grad_(True)
    with pytest.raises(ValueError, match=message):  # seen when the plan is made anew
        optimizer.prepare()


@pytest.mark.parametrize(
    ("group", "kind", "message"),
    [
        ({"lr": 0.1}, ValueError, "needs the key 'params', got \\['lr'\\]"),
        ({"params": {"w": 1}}, ValueError, "params must be an ordered iterable"),
        ({"params": 3}, ValueError, "params must be an ordered iterable"),
        ({"params": [()]}, TypeError, r"\(name, tensor\) pairs, got \(\)"),
        ({"params": [(1, torch.ones(3, 4))]}, TypeError, r"\(name, tensor\) pairs, got \(1,"),
        ({"params": [None]}, TypeError, "pairs, got None"),
        ({"params": [torch.ones(3, 4)], "param_names": []}, ValueError, "0 names for 1"),
        ({"params": [torch.ones(3, 4)], "param_names": [1]}, ValueError, r"list of text, got \[1"),
        ({"params": [torch.ones(3, 4)], "mesh": "x"}, ValueError, "mesh must be"),
        ("w", TypeError, "must be a dict, got 'w'"),
    ],
)
def test_what_is_no_group_is_refused_and_not_kept(
    group: Any, kind: type[Exception], message: str
) -> None:
    optimizer = shardmuon.Muon([matrix()])
    before = snapshot(optimizer)
    with pytest.raises(kind, match=message):
        optimizer.add_param_group(group)
    assert snapshot(optimizer) == before


# -- settings that come later ---------------------------------------------------------------------

FILES: dict[str, tuple[Any, str]] = {
    "lr": (lambda s: s["param_groups"][0].update(lr=-1), "group 0 .*lr must be .*got -1"),
    "ns_steps": (lambda s: s["param_groups"][0].update(ns_steps=0), "ns_steps must be .*got 0"),
    "schedule": (
        lambda s: s["param_groups"][0].update(ns_coefficients="you", ns_steps=7),
        "do not fit: 7 steps",
    ),
    "betas": (lambda s: s["param_groups"][1].update(betas=(0.9, 2)), r"group 1 .*betas must be"),
    "algorithm": (
        lambda s: s["param_groups"][0].update(algorithm="muon2"),
        "group 0 has algorithm='muon', the state dict 'muon2'; did you mean 'muon'",
    ),
    "misspelt": (lambda s: s["param_groups"][0].update(momentun=0.1), "did you mean momentum"),
    "other key": (lambda s: s["param_groups"][1].update(ns_steps=3), "ns_steps does not belong"),
    "maximize": (lambda s: s["param_groups"][1].update(maximize=True), "maximize=True is not"),
    "no groups": (lambda s: s.pop("param_groups"), "no state dict of an optimizer"),
    "one group": (lambda s: s["param_groups"].pop(), "has 1 parameter groups, expected 2"),
    "too many": (lambda s: s["param_groups"][0]["params"].append(9), "has 3 parameters"),
    "twice": (lambda s: s["param_groups"][0].update(params=[0, 0]), "the parameter 0, expected"),
    "nobody's": (lambda s: s["state"].update({99: {}}), "1 parameters in no group, .* is 99"),
    "no dict": (lambda s: s["state"].update({0: [1]}), r"the state of a must be a dict, got \[1"),
    "kind": (lambda s: s["state"][0].update(exp_avg=torch.ones(3, 4)), "a has state .*exp_avg"),
    "part": (lambda s: s["state"][2].pop("exp_avg"), r"c has state \['step', 'exp_avg_sq'\]"),
    "number": (lambda s: s["state"][0].update(momentum_buffer=0.5), "momentum_buffer of a must be"),
    "integer": (
        lambda s: s["state"][0].update(momentum_buffer=torch.ones(3, 4, dtype=torch.int32)),
        "floating-point tensor in the state dict, got torch.int32",
    ),
    "elsewhere": (
        lambda s: s["state"][0].update(momentum_buffer=torch.empty(3, 4, device="meta")),
        "momentum_buffer of a is torch.strided on meta",
    ),
    "negative step": (lambda s: s["state"][2].update(step=-1), r"step of c must be .*got -1"),
    "steps": (lambda s: s["state"][2].update(step=torch.ones(2)), "step of c must be one number"),
}


@pytest.mark.parametrize(("edit", "message"), FILES.values(), ids=list(FILES))
def test_a_file_that_does_not_fit_is_refused_before_anything_changes(
    edit: Any, message: str
) -> None:
    saved = copy.deepcopy(pair().state_dict())
    saved["state"][0]["momentum_buffer"].fill_(7)
    saved["param_groups"][1]["lr"] = 0.7
    edit(saved)
    optimizer = pair()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_a_warning_that_is_an_error_leaves_everything_as_it_was() -> None:
    saved = copy.deepcopy(pair().state_dict())
    saved["state"][0]["momentum_buffer"] = torch.ones(3, 4, dtype=torch.float64)
    optimizer = pair()
    before = snapshot(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"cast from torch\.float64 to torch\.float32"):
            optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_empty_state_in_a_file_starts_anew_and_a_counter_may_be_a_number() -> None:
    saved = copy.deepcopy(pair().state_dict())
    saved["state"][0] = {}
    saved["state"][2]["step"] = 5
    optimizer = pair()
    optimizer.load_state_dict(saved)
    a, c = optimizer.param_groups[0]["params"][0], optimizer.param_groups[1]["params"][0]
    assert not optimizer.state[a]["momentum_buffer"].any()
    assert torch.equal(optimizer.state[c]["step"], torch.tensor(5.0))
    take_a_step(optimizer)


def _load_whole() -> str:
    mesh = world_mesh()
    p = nn.Parameter(place(torch.ones(10, 8), mesh, PLACEMENTS["rows"]))
    optimizer = shardmuon.Muon([("w", p)])
    whole = shardmuon.Muon([("w", matrix(10, 8))], mesh=mesh).state_dict()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="momentum_buffer of w is placed as") as caught:
        optimizer.load_state_dict(whole)
    assert snapshot(optimizer) == before
    return str(caught.value)


def test_a_whole_tensor_is_not_taken_for_a_shard(pools: Worlds) -> None:
    for message in pools.run(2, _load_whole):
        assert "from_torch" in message


LATER: list[tuple[str, Any]] = [
    ("lr", -1.0),
    ("lr", "0.1"),
    ("momentum", 1.5),
    ("ns_steps", 0),
    ("eps", -1),
    ("ns_method", "fast"),
    ("split_sizes", [1, 1]),
    ("ns_coefficients", [(1.5, -0.5, 0.0)] * 4),
]


@pytest.mark.parametrize(("field", "value"), LATER)
def test_what_the_user_writes_into_a_group_is_seen_by_the_next_step(field: str, value: Any) -> None:
    optimizer = pair()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0][field] = value
    before = snapshot(optimizer)
    for act in (optimizer.step, optimizer.prepare, lambda: optimizer.plan):
        with pytest.raises(ValueError, match=field):
            act()
        assert snapshot(optimizer) == before


def test_groups_keep_their_keys_and_algorithm() -> None:
    optimizer = pair()
    del optimizer.param_groups[0]["momentum"]
    with pytest.raises(ValueError, match="a group lacks momentum"):
        optimizer.step()
    optimizer = pair()
    optimizer.param_groups[0]["algorithm"] = "sgd"
    with pytest.raises(ValueError, match=r"algorithm must be .*got 'sgd'"):
        optimizer.step()


def _one_rank_writes(field: str, value: Any) -> None:
    import torch.distributed as dist

    p = nn.Parameter(place(torch.ones(10, 8), world_mesh(), PLACEMENTS["rows"]))
    optimizer = shardmuon.Muon([("w", p)])
    p.grad = torch.ones_like(p)
    if dist.get_rank() == 1:
        optimizer.param_groups[0][field] = value
    before = snapshot(optimizer)
    try:
        optimizer.step()
    finally:
        assert snapshot(optimizer) == before


@pytest.mark.parametrize(("field", "value"), [("lr", -1), ("ns_steps", 0)])
def test_what_one_rank_writes_is_refused_on_all(pools: Worlds, field: str, value: Any) -> None:
    errors = pools.run_expecting_error(2, _one_rank_writes, field, value)
    assert len(errors) == 2
    assert any(field in error.message for error in errors)
    assert {error.type_name for error in errors} <= {"ValueError", "RuntimeError"}


# -- written once ---------------------------------------------------------------------------------


def test_names_of_methods_and_presets_are_those_that_exist() -> None:
    assert set(limits.choices(limits.Method)) == {"auto", *METHODS}
    assert set(limits.choices(limits.Preset)) == set(PRESETS)
    assert {getattr(torch, name) for name in limits.choices(limits.NsDtype)} <= set(FLOATS)


@pytest.mark.parametrize("field", ["lr", "weight_decay", "momentum", "ns_steps", "eps"])
def test_the_configuration_and_the_optimizer_have_the_same_bounds(field: str) -> None:
    hint = MuonGroups.__annotations__[field].split(" | ")[0]
    bounds = limits.range_of(getattr(limits, hint))
    for bound, is_open in ((bounds.low, bounds.low_open), (bounds.high, bounds.high_open)):
        assert bound is not None
        for taken in (lambda v: MuonGroups(**{field: v}), lambda v: _takes(field, v)):
            if is_open:
                with pytest.raises(ValueError, match=field):
                    taken(bound)
            else:
                taken(bound)
    assert get_args(getattr(limits, hint))[0] in (int, float)


def _takes(field: str, value: Any) -> shardmuon.Muon:
    return shardmuon.Muon([matrix()], **{field: value})
