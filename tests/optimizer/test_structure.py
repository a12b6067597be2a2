"""Group keys that say which matrices a parameter consists of: checked, named, compared on load."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardmuon

MISTAKES: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((18, 48), {"split_sizes": [5, 7, 7]}, "split_sizes"),
    ((18, 48), {"split_sizes": [24, 24]}, "split_sizes"),
    ((18, 48), {"split_sizes": [9, 9], "transposed": True}, "split_sizes"),
    ((18, 48), {"split_sizes": [18, 0]}, "split_sizes"),
    ((18, 48), {"split_sizes": [20, -2]}, "split_sizes"),
    ((18, 48), {"split_sizes": []}, "split_sizes"),
    ((18, 48), {"split_sizes": 9}, "split_sizes"),
    ((18, 48), {"split_sizes": [9.0, 9.0]}, "split_sizes"),
    ((3, 18, 48), {"split_sizes": [3]}, "split_sizes"),
    ((18, 48), {"num_heads": 4}, "num_heads"),
    ((18, 48), {"num_heads": 0}, "num_heads"),
    ((18, 48), {"num_heads": -1}, "num_heads"),
    ((18, 48), {"num_heads": True}, "num_heads"),
    ((18, 48), {"num_heads": 5, "transposed": True}, "num_heads"),
    ((18, 48), {"transposed": 1}, "transposed"),
    ((18, 48), {"flatten": "yes"}, "flatten"),
]


@pytest.mark.parametrize(("shape", "keys", "field"), MISTAKES)
def test_sizes_that_do_not_add_up_are_refused(
    shape: tuple[int, ...], keys: dict[str, Any], field: str
) -> None:
    p = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=field) as caught:
        shardmuon.Muon([{"params": [("net.weight", p)], **keys}])
    assert repr(keys[field]) in str(caught.value)
    if field != "flatten" and isinstance(keys[field], list) and sum(keys[field]) not in (0, 18):
        assert "net.weight" in str(caught.value)


def test_parts_and_heads_exclude_each_other() -> None:
    keys = {"split_sizes": [9, 9], "num_heads": 2}
    with pytest.raises(ValueError, match=r"net\.weight.*split_sizes.*num_heads"):
        shardmuon.Muon([{"params": [("net.weight", nn.Parameter(torch.ones(18, 48)))], **keys}])


@pytest.mark.parametrize("keys", [{"split_sizes": [18]}, {"num_heads": 2}, {"transposed": True}])
def test_structure_is_no_key_of_adamw(keys: dict[str, Any]) -> None:
    group = {"params": [nn.Parameter(torch.ones(18, 48))], "algorithm": "adamw", **keys}
    with pytest.raises(ValueError, match=next(iter(keys))):
        shardmuon.Muon([group])


@pytest.mark.parametrize("shape", [(6,), (), (4, 3, 2, 2)])
def test_what_is_neither_matrix_nor_stack_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"net\.weight") as caught:
        shardmuon.Muon([("net.weight", nn.Parameter(torch.ones(shape)))])
    assert str(shape) in str(caught.value)


def test_ids_name_experts_parts_and_heads() -> None:
    def params(*shape: int, name: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, nn.Parameter(torch.ones(shape)))]

    groups: list[dict[str, Any]] = [
        {"params": params(2, 6, 4, name="experts")},
        {"params": params(6, 4, name="qkv"), "split_sizes": [2, 4]},
        {"params": params(6, 4, name="q"), "num_heads": 3},
        {"params": params(2, 6, 4, name="up"), "split_sizes": [3, 3]},
        {"params": params(6, 4, 3, name="conv"), "flatten": True},
    ]
    names = set(shardmuon.Muon(groups).plan.owners())
    right = {"experts[0]", "experts[1]", "qkv.0", "qkv.1", "q.head0", "q.head1", "q.head2"}
    right |= {"up[0].0", "up[0].1", "up[1].0", "up[1].1", "conv"}
    assert names == right


def _optimizer(**keys: Any) -> tuple[nn.Parameter, shardmuon.Muon]:
    p = nn.Parameter(torch.ones(6, 6, 2))
    optimizer = shardmuon.Muon([{"params": [("w", p)], **keys}])
    p.grad = torch.ones(6, 6, 2)
    return p, optimizer


LOADS: list[dict[str, Any]] = [
    {"split_sizes": [2, 4]},
    {"num_heads": 2},
    {"transposed": True},
    {"flatten": True},
]


@pytest.mark.parametrize("keys", LOADS)
def test_structure_is_compared_on_load_and_never_overwritten(keys: dict[str, Any]) -> None:
    _, optimizer = _optimizer(**keys)
    optimizer.step()
    saved = optimizer.state_dict()
    (field,) = keys
    for others in ({}, {"split_sizes": [3, 3]}, {"num_heads": 3}):
        if field in others:
            continue
        p, other = _optimizer(**others)
        before = dict(other.param_groups[0])
        with pytest.raises(ValueError, match=r"split_sizes|num_heads|transposed|flatten"):
            other.load_state_dict(saved)
        assert {k: before[k] for k in keys} == {k: other.param_groups[0][k] for k in keys}
        assert not other.state[p]["momentum_buffer"].any()
    p, same = _optimizer(**keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(saved)
    assert same.state[p]["momentum_buffer"].any()
    # A tuple and a list of the same sizes are the same structure.
    if field == "split_sizes":
        _, again = _optimizer(split_sizes=tuple(keys[field]))
        again.load_state_dict(saved)
