"""Every variant on one process against its formulas in float64: 1e-4, as float32 steps allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmuon
from shardmuon.rules import Commit, ElementShard, LionRule
from shardmuon.rules.lion import _advance_together
from tests.grids import Weight, matrices, random
from tests.reference import relative_error
from tests.refused import assert_kept
from tests.variants import ELEMENTS, MATRICES, Variant

STEPS = 4

SHAPES: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "tall": ((64, 24), {}),
    "wide": ((18, 48), {}),
    "one row": ((1, 64), {}),
    "one column": ((7, 1), {}),
    "stack": ((3, 10, 8), {}),
    "fused": ((18, 8), {"split_sizes": [4, 14]}),
    "heads": ((12, 9), {"num_heads": 3}),
    "transposed": ((8, 10), {"transposed": True}),
    "transposed and fused": ((8, 10), {"transposed": True, "split_sizes": [3, 7]}),
    "flattened": ((6, 2, 3), {"flatten": True}),
}


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    return random(shape, 100 + step)


def solved(shape: tuple[int, ...], keys: Mapping[str, Any]) -> dict[str, Tensor]:
    """A parameter and its state after all steps."""
    p = nn.Parameter(random(shape, 0))
    optimizer = shardmuon.Muon([{**keys, "params": [p]}])
    for step in range(STEPS):
        p.grad = gradient(shape, step)
        optimizer.step()
    return {"parameter": p.detach(), **optimizer.state[p]}


def array(tensor: Tensor) -> Any:
    return tensor.double().numpy()


def columns(weight: Weight, rows: Tensor) -> list[Tensor]:
    """What each matrix has of one number per row."""
    keys = dict(weight.keys)
    flat = keys.pop("flatten", False)
    if keys.get("transposed"):
        rows, keys = rows.mT, {**keys, "transposed": False}
    return matrices(
        Weight(shape=tuple(rows.shape), letters="", keys=keys), rows.flatten(1) if flat else rows
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("variant", MATRICES.values(), ids=MATRICES)
def test_each_matrix_follows_the_formulas(variant: Variant, name: str) -> None:
    shape, structure = SHAPES[name]
    weight = Weight(shape=shape, letters="", keys=structure)
    found = solved(shape, {**variant.keys, **structure})
    starts = matrices(weight, random(shape, 0))
    given = [matrices(weight, gradient(shape, step)) for step in range(STEPS)]
    for index, start in enumerate(starts):
        right = variant.right(array(start), [array(each[index]) for each in given], variant.keys)
        assert found.keys() == right.keys()
        for kind, value in right.items():
            whole = found[kind]
            parts = (matrices if whole.shape == shape else columns)(weight, whole)
            assert relative_error(array(parts[index]), value) < 1e-4, kind


@pytest.mark.parametrize("shape", [(9,), (), (6, 5), (2, 3, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("variant", ELEMENTS.values(), ids=ELEMENTS)
def test_each_element_follows_the_formulas(variant: Variant, shape: tuple[int, ...]) -> None:
    found = solved(shape, variant.keys)
    given = [array(gradient(shape, step)) for step in range(STEPS)]
    right = variant.right(array(random(shape, 0)), given, variant.keys)
    assert found.keys() == right.keys()
    for kind, value in right.items():
        assert found[kind].shape == shape
        assert np.allclose(array(found[kind]), value, rtol=1e-4, atol=1e-7), kind


def test_lion_in_bfloat16_rounds_each_result_once() -> None:
    """With factors that float32 does exactly and bfloat16 does not."""
    keys = {"lr": 0.125, "weight_decay": 0.25, "betas": (0.5, 0.75), "algorithm": "lion"}
    start, gradient, average = (random((40,), seed).bfloat16() for seed in range(3))
    p = nn.Parameter(start.clone())
    optimizer = shardmuon.Muon([{**keys, "params": [p]}])
    optimizer.state[p]["exp_avg"].copy_(average)
    p.grad = gradient
    optimizer.step()
    g, m = gradient.float(), average.float()
    right = start.float() * (1 - 0.125 * 0.25) - 0.125 * (0.5 * m + 0.5 * g).sign()
    assert torch.equal(p.detach(), right.bfloat16())
    assert torch.equal(optimizer.state[p]["exp_avg"], (0.75 * m + 0.25 * g).bfloat16())


@pytest.mark.parametrize("name", MATRICES)
def test_what_a_gpu_refuses_later_changes_nothing(name: str) -> None:
    assert_kept(MATRICES[name].keys)


@pytest.mark.parametrize("word", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_over_many_has_the_bits_of_one_by_one(dtype: torch.dtype, word: bool | None) -> None:
    """What a GPU does with small parameters, here on a CPU; some are no contiguous memory."""

    def make(shape: tuple[int, ...], seed: int) -> Tensor:
        value = random(shape, seed).to(dtype)
        return value.mT if len(shape) == 2 else value

    def shards() -> list[ElementShard]:
        shapes = [(17,), (33, 5), (1, 1), (2, 3, 4), ()]
        return [
            ElementShard(make(s, 3 * i), make(s, 3 * i + 1), {"exp_avg": make(s, 3 * i + 2)})
            for i, s in enumerate(shapes)
        ]

    commit = Commit(None if word is None else torch.tensor(word))
    together, single = shards(), shards()
    if word is False:
        together[1].gradient.fill_(float("nan"))
    _advance_together(together, ELEMENTS["lion"].keys, commit)
    if word is not False:
        LionRule().step(single, ELEMENTS["lion"].keys, commit)
    for mine, right in zip(together, single, strict=True):
        assert torch.equal(mine.parameter, right.parameter)
        assert torch.equal(mine.state["exp_avg"], right.state["exp_avg"])


@pytest.mark.parametrize("tensors", [True, False])
def test_settings_of_lion_may_be_tensors(tensors: bool) -> None:
    make = torch.tensor if tensors else float
    p = nn.Parameter(torch.ones(3))
    settings = {"lr": make(0.5), "betas": (make(0.5), make(0.0)), "weight_decay": make(0.25)}
    optimizer = shardmuon.Muon([{"params": [p], "algorithm": "lion", **settings}])
    p.grad = torch.tensor([2.0, -3.0, 0.0])
    optimizer.step()
    assert p.tolist() == [0.375, 1.375, 0.875]
    assert optimizer.state[p]["exp_avg"].tolist() == [2.0, -3.0, 0.0]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"algorithm": "lion", "eps": 1e-8}, "eps does not belong to algorithm 'lion'"),
        ({"algorithm": "lion", "betas": (0.9, 1.0)}, "betas must be two numbers, each"),
        ({"algorithm": "lions"}, "did you mean 'lion'"),
        ({"algorithm": "normuon", "beta2": 1.0}, r"beta2 must be a number in \[0, 1\)"),
        ({"beta2": 0.9}, "beta2 does not belong to algorithm 'muon'"),
    ],
)
def test_keys_are_those_of_the_rule(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shardmuon.Muon([{"params": [nn.Parameter(torch.ones(2, 3))], **keys}])


def test_a_state_dict_of_another_shape_or_rule_is_refused() -> None:
    variant = MATRICES["normuon"]
    p = nn.Parameter(random((4, 6), 0))
    optimizer = shardmuon.Muon([{**variant.keys, "params": [("w", p)]}])
    for wrong, text in (
        (torch.zeros(4, 6), r"row_average of w has shape \(4, 6\).*which takes \(4, 1\)"),
        (torch.zeros(6, 1), r"row_average of w has shape \(6, 1\).*which takes \(4, 1\)"),
        (torch.zeros(4), r"row_average of w has shape \(4,\)"),
    ):
        taken = optimizer.state_dict()
        taken["state"][0] = {**taken["state"][0], "row_average": wrong}
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(taken)
    plain = shardmuon.Muon([("w", nn.Parameter(random((4, 6), 0)))])
    with pytest.raises(ValueError, match="has algorithm='normuon', the state dict 'muon'"):
        optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state[p]["row_average"].any()


@pytest.mark.parametrize(
    ("keys", "per_row", "per_element"),
    [
        ({}, 0, 4),
        ({"algorithm": "normuon"}, 4, 4),
        ({"algorithm": "lion"}, 0, 4),
        ({"algorithm": "adamw"}, 0, 8),
    ],
)
def test_bytes_of_state(keys: dict[str, Any], per_row: int, per_element: int) -> None:
    rows, cols = 12, 7
    p = nn.Parameter(torch.ones(rows, cols))
    optimizer = shardmuon.Muon([{"params": [p], **keys}])
    counters = sum(value.nbytes for kind, value in optimizer.state[p].items() if kind == "step")
    found = sum(value.nbytes for value in optimizer.state[p].values()) - counters
    assert found == per_row * rows + per_element * rows * cols
