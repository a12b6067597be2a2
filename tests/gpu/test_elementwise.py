"""One launch for many tensors computes what the rule computes one by one, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmuon.rules import elementwise
from shardmuon.rules.base import Commit, Shard, UpdateRule
from shardmuon.rules.muon import MuonRule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = ((1, 1), (3, 5), (64, 48), (7, 300), (33, 65), (128, 4096))
HALVES = (torch.float32, torch.bfloat16)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, place: str = "alone") -> Tensor:
    """Random. place: "shifted": at an address that is no multiple of 16 bytes; "columns": some of
    a wider tensor, whose rows start at multiples of 16 bytes; "odd columns": which do not.
    """
    if "columns" in place:
        odd = place.startswith("odd")
        rows, width = shape
        wider = tensor((rows, -(-width // 8) * 8 + (17 if odd else 16)), dtype, seed)
        return wider[:, 8 + odd :][:, :width]
    generator = torch.Generator("cuda").manual_seed(seed)
    flat = torch.randn(1 + shape[0] * shape[1], generator=generator, device="cuda").to(dtype)
    part = flat[1:] if place == "shifted" else flat[1:].clone()
    return part.view(shape)


def shards(parameter: torch.dtype, buffer: torch.dtype, place: str, **group: Any) -> list[Shard]:
    defaults = {name: key.default for name, key in MuonRule.keys.items()}
    settings = {**defaults, "lr": 0.02, **group}
    return [
        Shard(
            tensor(shape, parameter, 3 * i, place),
            tensor(shape, parameter, 3 * i + 1, place),
            {"momentum_buffer": tensor(shape, buffer, 3 * i + 2, place)},
            {**settings, "lr": 0.02 * (1 + i % 2)},
            *shape,
        )
        for i, shape in enumerate(SHAPES)
    ]


def run(some: Sequence[Shard], wire: torch.dtype, commit: Commit, together: bool) -> list[Tensor]:
    """Both halves of the rule; returns everything that they write."""
    rule = MuonRule()
    how: Any = rule if together else super(MuonRule, rule)
    elements = sum(shard.parameter.numel() for shard in some)
    buffer = torch.full((elements,), float("nan"), dtype=wire, device="cuda")
    sizes = [shard.parameter.numel() for shard in some]
    places: list[Tensor | None] = list(buffer.split(sizes))
    places[2] = None
    how.prepare_all(some, places, commit)
    updates = [torch.sin(torch.arange(size, device="cuda")).to(wire) for size in sizes]
    how.apply_all(some, updates, [None] * len(some), commit)
    return [buffer, *(t for s in some for t in (s.parameter, s.state["momentum_buffer"]))]


@pytest.mark.parametrize("place", ["alone", "shifted", "columns", "odd columns"])
@pytest.mark.parametrize("word", [None, True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", HALVES)
@pytest.mark.parametrize("parameter", HALVES)
def test_bits_are_those_of_one_by_one(
    parameter: torch.dtype,
    momentum: torch.dtype,
    nesterov: bool,
    word: bool | None,
    place: str,
) -> None:
    commit = Commit(None if word is None else torch.tensor(word, device="cuda"))
    for wire in HALVES:
        for decay in (0.95, 0.3, 0.0):
            options = {"nesterov": nesterov, "momentum": decay}
            one, other = (shards(parameter, momentum, place, **options) for _ in range(2))
            before = [t.clone() for s in one for t in (s.parameter, s.state["momentum_buffer"])]
            ours = run(one, wire, commit, together=True)
            theirs = run(other, wire, commit, together=False)
            for mine, right in zip(ours, theirs, strict=True):
                assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
            if word is False:
                assert all(torch.equal(a, b) for a, b in zip(ours[1:], before, strict=True))
            else:
                large = [pair for pair in zip(ours[1:], before, strict=True) if len(pair[0]) > 1]
                assert not any(torch.equal(a, b) for a, b in large)


@pytest.mark.parametrize("place", ["alone", "shifted", "odd columns"])
@pytest.mark.parametrize("word", [None, True, False])
@pytest.mark.parametrize("parameter", HALVES)
def test_bits_of_cautious_decay_are_those_of_one_by_one(
    parameter: torch.dtype, word: bool | None, place: str
) -> None:
    commit = Commit(None if word is None else torch.tensor(word, device="cuda"))
    for wire in HALVES:
        results = {}
        for cautious in (True, False):
            options = {"cautious_weight_decay": cautious, "weight_decay": 10.0}
            one, other = (shards(parameter, torch.float32, place, **options) for _ in range(2))
            results[cautious] = run(one, wire, commit, together=True)
            theirs = run(other, wire, commit, together=False)
            for mine, right in zip(results[cautious], theirs, strict=True):
                assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
        parameters = [results[cautious][1::2] for cautious in (True, False)]
        for with_mask, without in list(zip(*parameters, strict=True))[1:]:
            assert torch.equal(with_mask, without) == (word is False)


def test_groups_that_decay_otherwise_take_a_launch_each() -> None:
    """One call with both kinds, in turn."""
    results = []
    for together in (True, False):
        some = shards(torch.float32, torch.float32, "alone", weight_decay=10.0)
        for i, shard in enumerate(some):
            shard.group["cautious_weight_decay"] = i % 2 == 0  # type: ignore[index]
        results.append(run(some, torch.bfloat16, Commit(), together))
    for mine, right in zip(*results, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))


def test_a_refused_step_keeps_nan_out() -> None:
    some = shards(torch.float32, torch.float32, "alone")
    for shard in some:
        shard.gradient.fill_(float("nan"))
    before = [s.state["momentum_buffer"].clone() for s in some]
    run(some, torch.bfloat16, Commit(torch.tensor(False, device="cuda")), together=True)
    for shard, old in zip(some, before, strict=True):
        assert torch.equal(shard.state["momentum_buffer"], old)
        assert shard.parameter.isfinite().all()


@pytest.mark.parametrize("place", ["alone", "shifted"])
def test_one_bad_element_is_found(place: str) -> None:
    some = [tensor(s, dtype, i, place) for i, s in enumerate(SHAPES) for dtype in HALVES]
    assert not elementwise.has_nonfinite(some)
    for one in some:
        for value in (float("inf"), float("-inf"), float("nan")):
            old, one[-1, -1] = one[-1, -1].clone(), value
            assert elementwise.has_nonfinite(some)
            one[-1, -1] = old


@pytest.mark.parametrize("place", ["alone", "shifted"])
def test_bits_are_added_up_as_on_a_cpu(place: str) -> None:
    for dtype in HALVES:
        some = [tensor(s, dtype, i, place) for i, s in enumerate(SHAPES)]
        right = elementwise.bit_sum([one.cpu() for one in some])
        assert elementwise.bit_sum(some).cpu() == right
        some[-1].mul_(0.5)
        assert elementwise.bit_sum(some).cpu() != right


def transposed() -> list[Shard]:
    """Shards whose tensors are column-major."""
    return [
        Shard(
            s.parameter.T,
            s.gradient.T,
            {"momentum_buffer": s.state["momentum_buffer"].T},
            s.group,
            s.cols,
            s.rows,
        )
        for s in shards(torch.float32, torch.float32, "alone")
    ]


def test_what_a_kernel_cannot_take_is_done_one_by_one() -> None:
    x = torch.zeros(8, 8, device="cuda")
    assert elementwise.takes(x, x)
    assert not elementwise.takes(x, x.T[:4])
    assert not elementwise.takes(x.double())
    assert not elementwise.takes(x.cpu())
    ours = run(transposed(), torch.bfloat16, Commit(), together=True)
    theirs = run(transposed(), torch.bfloat16, Commit(), together=False)
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))


def test_the_rule_s_own_way_is_the_base_class_s() -> None:
    """What `run(together=False)` compares with is really one shard after the other."""
    assert UpdateRule.prepare_all is not MuonRule.prepare_all
    assert UpdateRule.apply_all is not MuonRule.apply_all
