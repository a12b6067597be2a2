"""State that moves between `shardmuon.Muon` and torch's own optimizers keeps its bits.

Newton-Schulz runs in bf16 where a case continues with torch, so matrices are small: bf16 products
are slow on a CPU without bf16 units.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardmuon
from shardmuon.checkpoint.convert import from_torch, to_torch
from shardmuon.groups import MUON_DEFAULTS
from tests import models, ranks
from tests.conftest import Worlds
from tests.problems import assert_ranks_agree, digest, local, place, whole, world_mesh

MUON_KEYS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}
ADAMW_KEYS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95)}
EARLY = models.MATRICES[:2]
LATE = models.MATRICES[2:]

Pair = tuple[torch.optim.Muon, torch.optim.AdamW]
States = list[dict[str, Any]]
Edit = Callable[[Any], object]


def parts(model: nn.Module) -> list[tuple[dict[str, Any], list[tuple[str, nn.Parameter]]]]:
    """Keys and named parameters of four groups, Muon and AdamW in turn, not in model order."""
    named = dict(model.named_parameters())
    others = [name for name in reversed(named) if name not in models.MATRICES]
    vectors = [name for name in others if named[name].ndim == 1]
    tables = [name for name in others if named[name].ndim > 1]
    keys: list[tuple[dict[str, Any], list[str]]] = [
        ({**MUON_KEYS}, LATE),
        ({**ADAMW_KEYS}, tables),
        ({**MUON_KEYS, "lr": 0.03, "adjust_lr_fn": "match_rms_adamw"}, EARLY),
        ({**ADAMW_KEYS, "weight_decay": 0.0}, vectors),
    ]
    return [(each, [(name, named[name]) for name in names]) for each, names in keys]


def theirs(model: nn.Module, named: bool = True) -> Pair:
    """torch's two optimizers over `parts(model)`."""
    groups: list[dict[str, Any]] = [
        {**keys, "params": pairs if named else [p for _, p in pairs]}
        for keys, pairs in parts(model)
    ]
    return torch.optim.Muon(groups[::2]), torch.optim.AdamW(groups[1::2])


def ours(model: nn.Module, named: bool = True, **muon: Any) -> shardmuon.Muon:
    """Our optimizer over `parts(model)`, with settings of its own where `muon` is empty."""
    groups: list[dict[str, Any]] = [
        {"params": pairs if named else [p for _, p in pairs], **(muon if number % 2 == 0 else {})}
        for number, (_, pairs) in enumerate(parts(model))
    ]
    for group in groups[1::2]:
        group["algorithm"] = "adamw"
    runtime = shardmuon.Runtime(deterministic=True)
    return shardmuon.Muon(groups, ns_dtype=torch.bfloat16, runtime=runtime)


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        models.spread_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()


def tensors(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and state, sorted by name and key."""
    found: list[Tensor] = []
    for _, p in sorted(model.named_parameters()):
        found.append(p)
        for optimizer in optimizers:
            found += [value for _, value in sorted(optimizer.state.get(p, {}).items())]
    return found


def bits(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    return digest([local(t) for t in tensors(model, *optimizers)])


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Tensors and settings, to see that nothing changed."""
    groups = [sorted(group.items()) for group in optimizer.param_groups]
    settings = [[item for item in group if item[0] != "params"] for group in groups]
    return bits(model, optimizer), repr(settings)


def trained(named: bool = True, steps: int = 3) -> tuple[nn.Module, Pair]:
    """A whole model and torch's optimizers after some steps."""
    model = models.make()
    pair = theirs(model, named)
    train(model, pair, range(steps))
    return model, pair


def filled(model: nn.Module, **muon: Any) -> shardmuon.Muon:
    """Our optimizer of `model`, with state and settings that loading has to overwrite."""
    optimizer = ours(model, **muon)
    for state in optimizer.state.values():
        for value in state.values():
            local(value).fill_(7)
    return optimizer


def forms(model: nn.Module, pair: Pair, form: str) -> States:
    """torch's state of both optimizers in one of its forms."""
    if form in ("named", "unnamed"):
        return [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
    options = StateDictOptions(
        flatten_optimizer_state_dict="flat" in form, full_state_dict="full" in form
    )
    if "both" in form:
        state: Any = get_optimizer_state_dict(model, pair, options=options)
        return [state, state]
    found: Any = [get_optimizer_state_dict(model, each, options=options) for each in pair]
    return list(found)


def assert_equal_dicts(one: Any, other: Any) -> None:
    """Equal keys and plain values; tensors equal in dtype and bits."""
    if isinstance(other, Tensor):
        assert digest([local(one)]) == digest([local(other)])
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_equal_dicts(one[key], other[key])
    elif isinstance(other, list) and other and isinstance(other[0], dict):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal_dicts(left, right)
    else:
        assert type(one) is type(other)
        assert one == other


# -- one process ---------------------------------------------------------------------------------


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


# -- refusals ------------------------------------------------------------------------------------


def rename(state: dict[str, Any], old: str, new: str) -> None:
    for group in state["param_groups"]:
        group["param_names"] = [new if name == old else name for name in group["param_names"]]


def in_groups(state: dict[str, Any], **keys: Any) -> None:
    for group in state["param_groups"]:
        group.update(keys)


def without(state: dict[str, Any], key: str) -> None:
    for group in state["param_groups"]:
        del group[key]


MATRIX, TABLE = "blocks.1.up.weight", "lm_head.weight"

REFUSED: dict[str, tuple[str, Edit, str]] = {
    "missing and unexpected": (
        "muon",
        lambda s: rename(s, MATRIX, "other"),
        f"muon_state lacks {MATRIX} and has unexpected or repeated other",
    ),
    "twice": (
        "muon",
        lambda s: rename(s, MATRIX, "spare.proj.weight"),
        "unexpected or repeated spare.proj.weight",
    ),
    "of the other algorithm": ("muon", lambda s: rename(s, MATRIX, TABLE), f"unexpected.*{TABLE}"),
    "many": (
        "adamw",
        lambda s: s["param_groups"].append(
            {"params": [*range(90, 100)], "param_names": [f"x{n}" for n in range(10)]}
        ),
        "adamw_state has unexpected or repeated x0, x1, x2, x3, x4, x5, x6, x7 and 2 more$",
    ),
    "names of a part": (
        "muon",
        lambda s: s["param_groups"][0].pop("param_names"),
        "unexpected or repeated one without a name",
    ),
    "too few names": ("muon", lambda s: s["param_groups"][0]["param_names"].pop(), "2 names"),
    "too few without names": (
        "muon",
        lambda s: s.update(state={}, param_groups=[{"params": [0, 1]}]),
        r"muon_state has 2 parameters \(without names\), the optimizer 5",
    ),
    "state of nobody": ("muon", lambda s: s["state"].update({99: {}}), "in no group: 99"),
    "shape": (
        "muon",
        lambda s: s["state"][0].update(momentum_buffer=torch.zeros(8, 18)),
        rf"{MATRIX} momentum_buffer has shape \(8, 18\), expected \(18, 8\)",
    ),
    "vector's shape": (
        "adamw",
        lambda s: s["state"][3].update(exp_avg=torch.zeros(1)),
        r"exp_avg has shape \(1,\), expected",
    ),
    "not a tensor": (
        "muon",
        lambda s: s["state"][0].update(momentum_buffer=None),
        f"{MATRIX} momentum_buffer must be a floating-point tensor, got NoneType",
    ),
    "quantized": (
        "adamw",
        lambda s: s["state"][0].update(exp_avg=torch.zeros(11, 8, dtype=torch.int8)),
        "must be a floating-point tensor, got torch.int8",
    ),
    "step": (
        "adamw",
        lambda s: s["state"][0].update(step=None),
        f"{TABLE} step must be one number",
    ),
    "steps": (
        "adamw",
        lambda s: s["state"][0].update(step=torch.zeros(2)),
        f"{TABLE} step must be one number",
    ),
    "missing state": (
        "adamw",
        lambda s: s["state"][0].pop("exp_avg"),
        rf"{TABLE} has state \['exp_avg_sq', 'step'\], expected",
    ),
    "unknown state": ("muon", lambda s: s["state"][0].update(x=1), f"{MATRIX} has state.*'x'"),
    "amsgrad": ("adamw", lambda s: in_groups(s, amsgrad=True), f"{TABLE} has amsgrad=True"),
    "maximize": ("adamw", lambda s: in_groups(s, maximize=True), f"{TABLE} has maximize=True"),
    "Adam": (
        "adamw",
        lambda s: in_groups(s, decoupled_weight_decay=False),
        f"{TABLE} has decoupled_weight_decay=False",
    ),
    "SGD": (
        "muon",
        lambda s: without(s, "ns_coefficients"),
        rf"{MATRIX} is in a group with .*, not that of torch\.optim\.Muon",
    ),
    "out of range": (
        "muon",
        lambda s: in_groups(s, momentum=1.5),
        rf"muon_state: {MATRIX}: momentum must be a number in \[0, 1\), got 1.5",
    ),
    "structure": (
        "muon",
        lambda s: in_groups(s, split_sizes=[9, 9]),
        rf"{MATRIX} has split_sizes=\[9, 9\], its group here None",
    ),
    "algorithm": ("adamw", lambda s: in_groups(s, algorithm="muon"), "algorithm='muon'"),
    "another dict": (
        "muon",
        lambda s: s.update({MATRIX: s.pop("param_groups")}, state=0),
        "muon_state is not an optimizer's state dict: it has the key 'state'",
    ),
    "nothing": ("muon", lambda s: s.clear(), "muon_state has 0 parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_from_torch_refuses_and_changes_nothing(case: str) -> None:
    which, edit, text = REFUSED[case]
    model, pair = trained(steps=1)
    optimizer = filled(model)
    before = everything(model, optimizer)
    muon, adamw = forms(model, pair, "named")
    edit(muon if which == "muon" else adamw)
    with pytest.raises(ValueError, match=text):
        from_torch(model, optimizer, muon, adamw)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [("lr", 0.5, 0.25), ("ns_steps", 4, 5), ("initial_lr", 1.0, None)],
)
@pytest.mark.parametrize("form", ["named", "nested", "flat"])
def test_two_values_for_one_group_are_refused(form: str, key: str, one: Any, other: Any) -> None:
    model = models.make()
    pair = theirs(model)
    groups: list[dict[str, Any]] = [{"params": [each]} for each in parts(model)[0][1]]
    groups += [{"params": parts(model)[2][1]}]
    muon = torch.optim.Muon(groups)
    for group in muon.param_groups[1:]:
        group[key] = one
    muon.param_groups[0].update({} if other is None else {key: other})
    train(model, [muon, pair[1]], range(1))
    optimizer = filled(model)
    before = everything(model, optimizer)
    there = "'absent'" if other is None else other
    text = f"{key} is {there} for {LATE[0]} and {one} for {LATE[1]}"
    with pytest.raises(ValueError, match=text):
        from_torch(model, optimizer, *forms(model, (muon, pair[1]), form))
    assert everything(model, optimizer) == before


def test_swapped_states_are_refused() -> None:
    model, pair = trained(steps=1)
    optimizer = filled(model)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="muon_state lacks"):
        from_torch(model, optimizer, *reversed(forms(model, pair, "named")))
    assert everything(model, optimizer) == before
    holder = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 3))})
    other = torch.optim.AdamW(holder.named_parameters())
    with pytest.raises(
        ValueError, match=r"w is in a group with .*, not that of torch\.optim\.Muon"
    ):
        from_torch(holder, shardmuon.Muon(holder.named_parameters()), other.state_dict())


def test_the_model_must_hold_the_parameters() -> None:
    model, pair = trained(steps=1)
    optimizer = ours(model)
    states = forms(model, pair, "named")
    other = models.make()
    with pytest.raises(ValueError, match=r"the model does not have these .*: blocks\.1\.up"):
        from_torch(other, optimizer, *states)
    with pytest.raises(ValueError, match="the model does not have these"):
        to_torch(other, ours(model, named=False))


def test_names_must_be_unique_without_their_wrappers() -> None:
    inner = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, 2))})
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, 2))})
    model.add_module("module", inner)
    optimizer = shardmuon.Muon([("a", model["a"])])
    with pytest.raises(ValueError, match="two parameters of the name a"):
        to_torch(model, optimizer)


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [
        ("split_sizes", [2, 4], (6, 4)),
        ("num_heads", 3, (6, 4)),
        ("transposed", True, (6, 4)),
        ("flatten", True, (6, 2, 2)),
        ("stack", None, (2, 6, 4)),
        ("ns_coefficients", "polar_express", (6, 4)),
        ("ns_coefficients", [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)] * 3, (6, 4)),
        ("eps", None, (6, 4)),
    ],
)
def test_to_torch_refuses_what_torch_cannot_express(
    key: str, value: Any, shape: tuple[int, ...]
) -> None:
    model = nn.ParameterDict({"odd": nn.Parameter(torch.ones(shape))})
    structure = {key: value} if key in MUON_DEFAULTS else {}
    optimizer = shardmuon.Muon([{"params": list(model.named_parameters()), **structure}])
    with pytest.raises(ValueError, match=f"odd .*{key}.*torch.optim.Muon"):
        to_torch(model, optimizer)


def test_to_torch_spells_out_a_preset_of_one_triple() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3, 3))})
    optimizer = shardmuon.Muon(list(model.named_parameters()), ns_coefficients="cubic")
    muon, _ = to_torch(model, optimizer)
    assert muon is not None
    assert muon["param_groups"][0]["ns_coefficients"] == (1.5, -0.5, 0.0)
    assert "ns_method" not in muon["param_groups"][0]


# -- ranks ---------------------------------------------------------------------------------------


def shard(model: nn.Module) -> nn.Module:
    """A copy of `model` under FSDP2."""
    twin: Any = copy.deepcopy(model)
    for block in twin.blocks:
        fully_shard(block, mesh=world_mesh())
    fully_shard(twin, mesh=world_mesh())
    return twin  # type: ignore[no-any-return]


def _full_states(form: str) -> list[bool]:
    """Whole states of one process go to sharded and to whole parameters, then both continue."""
    model = models.make().to(ranks.device())
    pair = theirs(model, named=form != "unnamed")
    train(model, pair, range(3))
    states = forms(model, pair, form)
    sharded, twin = shard(model), copy.deepcopy(model)
    optimizer, alone = filled(sharded), filled(twin, mesh=world_mesh())
    from_torch(sharded, optimizer, *states)
    from_torch(twin, alone, *states)
    pieces, right = tensors(sharded, optimizer), tensors(model, *pair)
    kept = [digest(assert_ranks_agree(pieces)) == digest([whole(t) for t in right])]
    kept.append(any(local(piece).numel() not in (0, piece.numel()) for piece in pieces))
    train(sharded, [optimizer], range(3, 6))
    train(twin, [alone], range(3, 6))
    continued = digest(assert_ranks_agree(tensors(sharded, optimizer)))
    kept.append(continued == digest([whole(t) for t in tensors(twin, alone)]))
    if ranks.backend() == "gloo":
        train(model, pair, range(3, 6))
        kept.append(continued == digest([whole(t) for t in tensors(model, *pair)]))
    return kept


@pytest.mark.parametrize("form", ["named", "unnamed", "flat both"])
def test_whole_states_load_into_sharded_parameters(pools: Worlds, form: str) -> None:
    for kept in pools.run(2, _full_states, form):
        assert all(kept), kept


def _sharded_states() -> list[bool]:
    """Ours to torch's optimizers over the same DTensors, and from there in every form to ours."""
    model = shard(models.make().to(ranks.device()))
    optimizer = ours(model, **MUON_KEYS)
    train(model, [optimizer], range(2))
    right = bits(model, optimizer)
    states = to_torch(model, optimizer)
    kept = []
    pair = theirs(model)
    for state, each in zip(states, pair, strict=True):
        assert state is not None
        moments = [v for s in state["state"].values() for k, v in s.items() if k != "step"]
        kept.append(all(isinstance(value, DTensor) for value in moments))
        each.load_state_dict(state)
    kept.append(bits(model, *pair) == right)
    for form in ("named", "nested", "flat", "full nested", "full flat both"):
        fresh = filled(model)
        from_torch(model, fresh, *forms(model, pair, form))
        kept.append(bits(model, fresh) == right)
    return kept


def test_sharded_states_go_to_torch_and_return(pools: Worlds) -> None:
    for kept in pools.run(2, _sharded_states):
        assert all(kept), kept


def _one_rank_alone() -> list[bool]:
    """Rank 1 converts to and fro, after a forward pass, while rank 0 does not; then both step."""
    model = shard(models.make().to(ranks.device()))
    optimizer = ours(model)
    train(model, [optimizer], range(1))
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long, device=ranks.device()))
    before = digest([local(v) for s in optimizer.state.values() for v in s.values()])
    if dist.get_rank() == 1:
        from_torch(model, optimizer, *to_torch(model, optimizer))
    after = digest([local(v) for s in optimizer.state.values() for v in s.values()])
    dist.barrier()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    train(model, [optimizer], range(1, 2))
    return [before == after]


def test_conversions_need_no_other_rank(pools: Worlds) -> None:
    for kept in pools.run(2, _one_rank_alone):
        assert all(kept), kept


SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "uneven rows": ((5, 4), Shard(0)),
    "columns": ((4, 7), Shard(1)),
    "one row": ((1, 6), Shard(0)),
    "replicated": ((3, 4), Replicate()),
    "vector": ((3,), Shard(0)),
    "short vector": ((1,), Shard(0)),
    "scalar": ((), Replicate()),
    "middle of a cube": ((2, 5, 3), Shard(1)),
    "end of a kernel": ((2, 2, 3, 3), Shard(-1)),
}


def _parts_of_whole_tensors() -> dict[str, bool]:
    """AdamW state of every shape and placement, as parts of whole tensors."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}
    whole_ones = nn.ParameterDict({name: nn.Parameter(v) for name, v in values.items()})
    adamw = torch.optim.AdamW(whole_ones.named_parameters())
    model = nn.ParameterDict()
    for name, (shape, placement) in SHAPES.items():
        adamw.state[whole_ones[name]] = {
            "step": torch.tensor(4.0),
            "exp_avg": values[name],
            "exp_avg_sq": -values[name],
        }
        model[name] = nn.Parameter(place(torch.zeros(shape), world_mesh(), placement))
    optimizer = shardmuon.Muon([{"params": list(model.named_parameters()), "algorithm": "adamw"}])
    from_torch(model, optimizer, adamw_state=adamw.state_dict())
    kept = {}
    for name, value in values.items():
        state = optimizer.state[model[name]]
        loaded = [whole(state[key]) for key in ("step", "exp_avg", "exp_avg_sq")]
        kept[name] = digest(loaded) == digest([torch.tensor(4.0), value, -value])
    return kept


def test_each_rank_takes_its_part_of_whole_tensors(pools: Worlds) -> None:
    for kept in pools.run(2, _parts_of_whole_tensors):
        assert all(kept.values()), kept


def _misplaced() -> tuple[list[str], bool]:
    """States that are placed otherwise than the parameter."""
    mesh = world_mesh()
    weights = {"rows": place(torch.ones(4, 4), mesh, Shard(0)), "plain": torch.ones(4, 4)}
    model = nn.ParameterDict({name: nn.Parameter(w) for name, w in weights.items()})
    optimizer = shardmuon.Muon(model.named_parameters())
    before = everything(model, optimizer)
    messages = []
    for name, placement in (("rows", Shard(1)), ("rows", Replicate()), ("plain", Shard(0))):
        twin = torch.optim.Muon(model.named_parameters())
        for each, p in model.named_parameters():
            value = place(torch.ones(4, 4), mesh, placement) if each == name else torch.ones(4, 4)
            twin.state[p] = {"momentum_buffer": value}
        try:
            from_torch(model, optimizer, twin.state_dict())
        except ValueError as error:
            messages.append(str(error))
    return messages, everything(model, optimizer) == before


def test_state_that_is_placed_otherwise_is_refused(pools: Worlds) -> None:
    for messages, same in pools.run(2, _misplaced):
        assert same
        assert [m.split(" is placed as")[0] for m in messages] == [
            "muon_state: rows momentum_buffer",
            "muon_state: rows momentum_buffer",
            "muon_state: plain momentum_buffer",
        ]
        assert "Shard(dim=1)" in messages[0]
        assert messages[2].endswith("the parameter as a plain tensor")
