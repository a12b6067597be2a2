"""State that moves between `shardmuon.Muon` and torch's own optimizers keeps its bits.

Newton-Schulz runs in bf16 where a case continues with torch, so matrices are small: bf16 products
are slow on a CPU without bf16 units.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from shardmuon.checkpoint.convert import from_torch, to_torch
from tests import models
from tests.checkpoint.torch_pair import (
    assert_equal_dicts,
    bits,
    everything,
    filled,
    forms,
    ours,
    parts,
    tensors,
    theirs,
    train,
    trained,
)
from tests.problems import digest


@pytest.mark.parametrize("form", ["named", "unnamed", "nested", "flat", "nested both", "flat both"])
def test_from_torch_continues_in_the_bits_of_torch(form: str) -> None:
    model, pair = trained(named=form != "unnamed")
    twin = copy.deepcopy(model)
    optimizer = filled(twin)
    from_torch(twin, optimizer, *forms(model, pair, form))
    assert bits(twin, optimizer) == bits(model, *pair)
    train(model, pair, range(3, 6))
    train(twin, [optimizer], range(3, 6))
    assert bits(twin, optimizer) == bits(model, *pair)


@pytest.mark.parametrize("named", [True, False])
def test_to_torch_is_what_torch_would_save_and_continues_in_the_same_bits(named: bool) -> None:
    model, pair = trained()
    twin = copy.deepcopy(model)
    optimizer = ours(twin, named)
    from_torch(twin, optimizer, *forms(model, pair, "named"))
    states = to_torch(twin, optimizer)
    for state, right in zip(states, pair, strict=True):
        assert_equal_dicts(state, right.state_dict())
    train(twin, [optimizer], range(3, 5))
    third = copy.deepcopy(twin)
    fresh = theirs(third)
    for state, each in zip(to_torch(twin, optimizer), fresh, strict=True):
        assert state is not None
        each.load_state_dict(copy.deepcopy(state))
    train(twin, [optimizer], range(5, 8))
    train(third, fresh, range(5, 8))
    train(model, pair, range(3, 8))
    assert bits(third, *fresh) == bits(twin, optimizer) == bits(model, *pair)


def test_to_torch_gives_the_optimizers_own_tensors_and_changes_nothing() -> None:
    model = models.make()
    optimizer = ours(model)
    train(model, [optimizer], range(2))
    before = everything(model, optimizer)
    muon, adamw = to_torch(model, optimizer)
    assert muon is not None
    assert adamw is not None
    named = dict(model.named_parameters())
    for state in (muon, adamw):
        for group in state["param_groups"]:
            for key, name in zip(group["params"], group["param_names"], strict=True):
                entry = state["state"][key]
                assert entry is not optimizer.state[named[name]]
                assert all(entry[k] is v for k, v in optimizer.state[named[name]].items())
            group["lr"] = 5.0
    assert everything(model, optimizer) == before


def test_round_trip_leaves_every_bit() -> None:
    model = models.make()
    optimizer = ours(model, lr=0.05, momentum_dtype=torch.bfloat16)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    train(model, [optimizer], range(2))
    before = everything(model, optimizer)
    from_torch(model, optimizer, *to_torch(model, optimizer))
    assert everything(model, optimizer) == before
    file = io.BytesIO()
    torch.save(to_torch(model, optimizer), file)
    file.seek(0)
    other = ours(model, momentum_dtype=torch.bfloat16)
    from_torch(model, other, *torch.load(file, weights_only=True))
    for group in other.param_groups:
        if "step" in group:
            assert group["step"] == 0  # torch's file does not say
            group["step"] = 2
    assert everything(model, other) == before


def test_wrapped_names_and_other_groups_match_by_name() -> None:
    model = models.make()
    groups: list[Any] = [[], []]
    for number, (_, pairs) in enumerate(parts(model)):
        groups[number % 2] += [(f"_orig_mod.module.{name}", p) for name, p in reversed(pairs)]
    pair = (torch.optim.Muon(groups[0], lr=0.04), torch.optim.AdamW(groups[1], eps=1e-6))
    train(model, pair, range(2))
    twin = copy.deepcopy(model)
    optimizer = filled(twin)
    wrapped = nn.Sequential()
    wrapped.add_module("module", twin)
    from_torch(wrapped, optimizer, *forms(model, pair, "named"))
    assert [g["lr"] for g in optimizer.param_groups] == [0.04, 1e-3, 0.04, 1e-3]
    train(model, pair, range(2, 4))
    train(twin, [optimizer], range(2, 4))
    assert bits(twin, optimizer) == bits(model, *pair)


def test_settings_come_from_the_file_and_structure_does_not() -> None:
    model, pair = trained()
    for optimizer in pair:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # halves lr at once
    muon, adamw = forms(model, pair, "named")
    adamw["param_groups"][0].update(fused=True, foreach=False, lr=torch.tensor(0.25))
    mine = ours(model, momentum_dtype=torch.float32)
    mine.param_groups[0]["note"] = "kept"
    from_torch(model, mine, muon, adamw)
    late, tables, early, vectors = mine.param_groups
    assert (late["lr"], late["initial_lr"], late["momentum"]) == (0.01, 0.02, 0.9)
    assert (early["initial_lr"], early["adjust_lr_fn"]) == (0.03, "match_rms_adamw")
    assert (late["ns_dtype"], late["momentum_dtype"]) == (torch.bfloat16, torch.float32)
    assert (late["algorithm"], late["split_sizes"], late["note"]) == ("muon", None, "kept")
    assert tables["lr"] == torch.tensor(0.25)
    assert tables["lr"] is not adamw["param_groups"][0]["lr"]
    assert (tables["betas"], vectors["weight_decay"]) == ((0.8, 0.95), 0.0)
    assert not {"fused", "foreach", "amsgrad", "maximize"} & tables.keys()


def test_groups_that_share_a_tensor_as_learning_rate_part() -> None:
    model, pair = trained(steps=1)
    rate = torch.tensor(0.5)
    optimizer = ours(model, lr=rate)
    from_torch(model, optimizer, *forms(model, pair, "named"))
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01, 0.03, 0.01]
    assert rate == 0.5


def test_empty_groups_are_kept_and_keep_their_settings() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 3))})
    empty: dict[str, Any] = {"params": [], "lr": 0.5}
    optimizer = shardmuon.Muon([empty, {"params": [model["w"]], "lr": 0.25}])
    muon, adamw = to_torch(model, optimizer)
    assert muon is not None
    assert adamw is None
    assert [g["param_names"] for g in muon["param_groups"]] == [[], ["w"]]
    for group in muon["param_groups"]:
        group["lr"] = 0.125
    from_torch(model, optimizer, muon)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.125]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_an_optimizer_of_one_kind(algorithm: str) -> None:
    model, pair = trained()
    index = ["muon", "adamw"].index(algorithm)
    twin = copy.deepcopy(model)
    groups = [{"params": pairs, "algorithm": algorithm} for _, pairs in parts(twin)[index::2]]
    optimizer = shardmuon.Muon(groups, ns_dtype=torch.bfloat16)
    states = forms(model, pair, "named")
    from_torch(twin, optimizer, **{f"{algorithm}_state": states[index]})
    converted = to_torch(twin, optimizer)
    assert converted[1 - index] is None
    assert_equal_dicts(converted[index], pair[index].state_dict())
    before = everything(twin, optimizer)
    with pytest.raises(ValueError, match="has unexpected"):
        from_torch(twin, optimizer, *states)
    assert everything(twin, optimizer) == before


def test_none_leaves_the_groups_of_that_kind() -> None:
    model, pair = trained()
    optimizer = filled(model)
    from_torch(model, optimizer, muon_state=forms(model, pair, "named")[0])
    named = dict(model.named_parameters())
    assert float(optimizer.state[named["lm_head.weight"]]["step"]) == 7
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 1e-3, 0.03, 1e-3]


def test_parameters_without_state_start_from_zero() -> None:
    model = models.make()
    pair = theirs(model)
    train(model, [], range(1))
    model.spare_weight.grad = model.lm_head.weight.grad = None
    for each in pair:
        each.step()  # type: ignore[no-untyped-call]
    twin = copy.deepcopy(model)
    optimizer = filled(twin)
    from_torch(twin, optimizer, *forms(model, pair, "named"))
    train(model, pair, range(1, 3))
    train(twin, [optimizer], range(1, 3))
    assert bits(twin, optimizer) == bits(model, *pair)


def test_frozen_parameters_take_state_if_the_file_has_it() -> None:
    model, pair = trained()
    twin = copy.deepcopy(model)
    twin.spare_weight.requires_grad_(False)
    twin.lm_head.requires_grad_(False)
    optimizer = ours(twin)
    assert twin.spare_weight not in optimizer.state
    from_torch(twin, optimizer, *forms(model, pair, "named"))
    assert bits(twin, optimizer) == bits(model, *pair)


def test_tied_parameters_are_one() -> None:
    model = models.make()
    model.lm_head.weight = model.embed_tokens.weight
    pair = theirs(model)
    train(model, pair, range(2))
    for alias in ("embed_tokens.weight", "lm_head.weight"):
        muon, adamw = forms(model, pair, "named")
        for group in adamw["param_groups"]:
            group["param_names"] = [
                alias if name == "embed_tokens.weight" else name for name in group["param_names"]
            ]
        optimizer = filled(model)
        from_torch(model, optimizer, muon, adamw)
        assert bits(model, optimizer) == bits(model, *pair)


def test_older_files_count_steps_with_numbers() -> None:
    model, pair = trained()
    muon, adamw = forms(model, pair, "named")
    for state in adamw["state"].values():
        state["step"] = int(state["step"])
    optimizer = filled(model)
    from_torch(model, optimizer, muon, adamw)
    assert bits(model, optimizer) == bits(model, *pair)


def test_loading_writes_into_the_tensors_that_are_there() -> None:
    model, pair = trained()
    optimizer = filled(model)
    before = tensors(model, optimizer)
    states = forms(model, pair, "named")
    from_torch(model, optimizer, *states)
    after = tensors(model, optimizer)
    assert all(one is other for one, other in zip(before, after, strict=True))
    saved = [value for state in states for s in state["state"].values() for value in s.values()]
    assert not {t.data_ptr() for t in after} & {t.data_ptr() for t in saved}


def test_a_cast_is_a_warning_before_anything_changes() -> None:
    model, pair = trained()
    optimizer = ours(model, momentum_dtype=torch.bfloat16)
    before = everything(model, optimizer)
    states = forms(model, pair, "named")
    text = r"momentum_buffer was cast from torch\.float32 to torch\.bfloat16"
    with pytest.raises(UserWarning, match=text):  # the configuration makes warnings errors
        from_torch(model, optimizer, *states)
    assert everything(model, optimizer) == before
    with pytest.warns(UserWarning, match=text):
        from_torch(model, optimizer, *states)
    for name in models.MATRICES:
        parameter = dict(model.named_parameters())[name]
        right = pair[0].state[parameter]["momentum_buffer"].bfloat16()
        assert digest([optimizer.state[parameter]["momentum_buffer"]]) == digest([right])
