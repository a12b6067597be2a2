"""Any arguments of `Muon`, `Runtime` and `param_groups` are refused by ValueError or TypeError.

What is taken must train, and what is refused must leave an optimizer as it was.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardmuon
from tests import models
from tests.fuzz.inputs import JUNK, LIMIT_S, WORDS, attempt, fuzz, rarely, snapshot, take_a_step

pytestmark = pytest.mark.timeout(LIMIT_S)

SHAPES: list[tuple[int, ...]] = [(3, 4), (6, 2), (2, 4, 3)]
OTHER_SHAPES: list[tuple[int, ...]] = [(5,), (), (0, 4), (4, 3, 2, 2), (1, 1), (0,), (3, 0, 2)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHER_DTYPES = [torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn]
VALID: dict[str, list[Any]] = {
    "lr": [0.0, 0.1, 1, torch.tensor(0.1), torch.tensor([0.1]), 1e30],
    "weight_decay": [0.0, 0.1, 1e30, torch.tensor(0.1)],
    "cautious_weight_decay": [True, False],
    "momentum": [0.0, 0.9, 0.9999999],
    "nesterov": [True, False],
    "ns_coefficients": [
        "keller",
        "you",
        "cubic",
        (3, -4, 2.0),
        [(1.5, -0.5, 0.0)] * 5,
        (0, 0, 0),
        (1e30, 1e30, -1e30),
    ],
    "eps": [None, 1e-7, 1e-30, 1.0],
    "ns_steps": [1, 2, 5, 99],
    "ns_method": ["auto", "standard", "symmetric", "gram"],
    "adjust_lr_fn": [None, "original", "match_rms_adamw", "spectral"],
    "ns_dtype": [None, torch.float32, torch.bfloat16],
    "momentum_dtype": [None, torch.float32, torch.bfloat16, torch.float64],
    "momentum_warmup": [0, 3],
    "momentum_start": [0.0, 0.5],
    "ns_period": [1, 2],
    "ns_block": [None, (1, None), (2, 3), [None, 2]],
    "step": [0, 1, 7],
    "algorithm": ["muon", "normuon"],
    "beta2": [0.0, 0.9],
}
STRUCTURE: dict[str, list[Any]] = {
    "split_sizes": [None, [1, 2], (3, 3), [2, 2]],
    "num_heads": [None, 1, 2, 3],
    "transposed": [True, False],
    "flatten": [True, False],
}
ADAMW: dict[str, list[Any]] = {
    "lr": VALID["lr"],
    "betas": [(0.9, 0.99), [0, 0.5]],
    "eps": [0, 1e-8],
    "weight_decay": VALID["weight_decay"],
    "cautious_weight_decay": [True, False],
}
STRANGE_KEYS = ["weight_decy", "initial_lr", "amsgrad", "maximize", "betas", "foreach", 3, None]


@st.composite
def tensors(draw: st.DrawFn, any_shape: bool) -> Any:
    """Mostly a parameter that a group can take."""
    if rarely(draw, 25):
        return draw(st.one_of(JUNK, st.builds(nn.parameter.UninitializedParameter)))
    shapes = SHAPES + OTHER_SHAPES if any_shape or rarely(draw, 10) else SHAPES
    shape, dtype = draw(st.sampled_from(shapes)), draw(st.sampled_from(DTYPES))
    if rarely(draw, 25):
        dtype = draw(st.sampled_from(OTHER_DTYPES))
    tensor: Tensor = torch.ones(shape, device="meta" if rarely(draw, 25) else "cpu").to(dtype)
    odd = draw(st.sampled_from(range(25)))
    if odd == 24 and tensor.ndim == 2 and dtype == torch.float32 and not tensor.is_meta:
        return tensor.to_sparse()
    if odd == 23 and dtype.is_floating_point:
        return tensor.requires_grad_().clone()  # not a leaf
    if odd >= 20 and tensor.ndim == 2:
        tensor = tensor.mT
    wanted = dtype.is_floating_point or dtype.is_complex
    return nn.Parameter(tensor, requires_grad=wanted and odd != 19)


@st.composite
def settings_of(draw: st.DrawFn, valid: dict[str, list[Any]]) -> dict[Any, Any]:
    """Some of the keys, mostly with values that are allowed."""
    keys = draw(st.lists(st.sampled_from(list(valid)), max_size=4, unique=True))
    spoilt = draw(st.sampled_from(keys)) if keys and rarely(draw, 4) else None
    chosen: dict[Any, Any] = {
        key: draw(JUNK if key == spoilt else st.sampled_from(valid[key])) for key in keys
    }
    if rarely(draw, 20):
        chosen[draw(st.one_of(st.sampled_from(STRANGE_KEYS), WORDS))] = draw(JUNK)
    return chosen


@st.composite
def group_dicts(draw: st.DrawFn, used: list[Any], named: bool) -> Any:
    """A group of new parameters, or of some in `used`; these are added to it."""
    adamw = draw(st.booleans())
    structured = {**VALID, **STRUCTURE} if rarely(draw, 4) else VALID
    group = draw(settings_of({**ADAMW, "algorithm": ["adamw"]} if adamw else structured))
    if adamw and not rarely(draw, 20):
        group["algorithm"] = "adamw"
    chosen = draw(st.lists(tensors(adamw), min_size=1, max_size=3))
    if used and rarely(draw, 15):
        chosen.append(draw(st.sampled_from(used)))
    first = len(used)
    used.extend(chosen)
    params: Any = [(f"w{first + at}", p) for at, p in enumerate(chosen)] if named else chosen
    spoil = draw(st.sampled_from(range(60)))
    if spoil == 59:
        params = draw(JUNK)
    elif spoil == 58:
        params = [*params, draw(st.one_of(JUNK, st.tuples(JUNK, st.just(chosen[0]))))]
    elif spoil == 57:
        group["param_names"] = draw(JUNK)
    elif spoil == 56:
        group["mesh"] = draw(JUNK)
    if spoil != 55:
        group["params"] = params
    return draw(JUNK) if spoil == 54 else group


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any], list[Any]]:
    """(params, keyword arguments, groups that are added later)."""
    used: list[Any] = []
    named = draw(st.booleans())
    groups: Any = draw(st.lists(group_dicts(used, named), min_size=1, max_size=2))
    if rarely(draw, 20):
        groups = draw(st.one_of(JUNK, st.just(iter(used)), st.just(used)))
    keywords = draw(settings_of(VALID))
    if rarely(draw, 20):
        keywords[draw(st.sampled_from(["runtime", "mesh"]))] = draw(JUNK)
    later = draw(st.lists(group_dicts(used, named), max_size=1))
    return groups, {str(key): value for key, value in keywords.items()}, later


@fuzz(few=250, share=0.3)
@given(calls())
def test_groups_and_arguments(call: tuple[Any, dict[str, Any], list[Any]]) -> None:
    groups, keywords, later = call
    made: list[shardmuon.Muon] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not attempt(
            "arguments of Muon",
            lambda: made.append(shardmuon.Muon(groups, **keywords)),
            ValueError,
            TypeError,
        ):
            return
        (optimizer,) = made
        for group in later:
            before = snapshot(optimizer)
            if not attempt(
                "add_param_group",
                lambda group=group: optimizer.add_param_group(group),  # type: ignore[misc]
                ValueError,
                TypeError,
            ):
                assert snapshot(optimizer) == before
        before = snapshot(optimizer)
        # What only the plan can say of a layout is a ValueError there.
        if attempt("plan", lambda: optimizer.plan, ValueError):
            take_a_step(optimizer)
        else:
            assert snapshot(optimizer) == before


@fuzz(few=60, share=0.05)
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(shardmuon.Runtime)]),
        st.one_of(JUNK, st.sampled_from(["auto", "all_gather", "error", "skip", True, 1, 0.5])),
        max_size=3,
    )
)
def test_runtime(fields: dict[str, Any]) -> None:
    made: list[shardmuon.Runtime] = []
    if attempt("Runtime", lambda: made.append(shardmuon.Runtime(**fields)), ValueError):
        optimizer = shardmuon.Muon([nn.Parameter(torch.ones(3, 4))], runtime=made[0])
        if made[0].overlap == "none":
            take_a_step(optimizer)


@fuzz(few=60, share=0.05)
@given(st.data())
def test_param_groups(data: st.DataObject) -> None:
    patterns = st.one_of(
        st.lists(st.sampled_from(["blocks.*", "spare*", "lm_head.weight", "*.bias", "no"])), JUNK
    )
    arguments: dict[str, Any] = {
        "muon": st.one_of(st.none(), settings_of({**VALID, **STRUCTURE}), JUNK),
        "adamw": st.one_of(st.none(), settings_of(ADAMW), JUNK),
        "to_muon": patterns,
        "to_adamw": patterns,
    }
    names = data.draw(st.lists(st.sampled_from(list(arguments)), max_size=2, unique=True))
    drawn = {name: data.draw(arguments[name]) for name in names}
    odd = data.draw(st.sampled_from(range(20))) == 19
    model: Any = data.draw(JUNK) if odd else models.make()
    made: list[shardmuon.ParamGroups] = []
    if attempt(
        "param_groups",
        lambda: made.append(shardmuon.param_groups(model, **drawn)),
        ValueError,
        TypeError,
    ):
        attempt("Muon of param_groups", lambda: shardmuon.Muon(made[0]), ValueError)
