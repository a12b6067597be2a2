"""`param_groups`: which parameter takes which rule, why, and how patterns override it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardmuon
from tests import models


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=True)
        self.o_proj = nn.Linear(8, 8, bias=False)


class Layer(nn.Module):
    """A transformer layer with a router and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.gate = nn.Linear(8, 4, bias=False)
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.experts = nn.Parameter(torch.ones(4, 8, 8))
        self.table = nn.Parameter(torch.ones(3, 8))
        self.conv = nn.Conv1d(8, 8, 3)


class Transformer(nn.Module):
    """Embedding and head under the given names."""

    def __init__(self, embedding: str, head: str, tied: bool = False) -> None:
        super().__init__()
        embed, out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        if tied:
            out.weight = embed.weight
        self.add_module(embedding, embed)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(8)
        self.add_module(head, out)


LAYER_RULES = {
    "input_norm.weight": "adamw",
    "input_norm.bias": "adamw",
    "attention.q_proj.weight": "muon",
    "attention.q_proj.bias": "adamw",
    "attention.o_proj.weight": "muon",
    "gate.weight": "adamw",
    "gate_proj.weight": "muon",
    "down_proj.weight": "muon",
    "experts": "adamw",
    "table": "adamw",
    "conv.weight": "adamw",
    "conv.bias": "adamw",
}
NAMES = [("embed_tokens", "lm_head"), ("wte", "output"), ("tok", "head")]


def expected_rules(embedding: str, head: str, tied: bool) -> dict[str, str]:
    rules = {f"layers.{i}.{name}": rule for i in range(2) for name, rule in LAYER_RULES.items()}
    rules |= {f"{embedding}.weight": "adamw", "norm.weight": "adamw", "norm.bias": "adamw"}
    return rules if tied else rules | {f"{head}.weight": "adamw"}


def names_of(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


@pytest.mark.parametrize(("embedding", "head"), NAMES)
@pytest.mark.parametrize("tied", [True, False])
def test_default_rule(embedding: str, head: str, tied: bool) -> None:
    model = Transformer(embedding, head, tied)
    groups = shardmuon.param_groups(model)
    assert {row.name: row.rule for row in groups.table} == expected_rules(embedding, head, tied)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {row.name: row.shape for row in groups.table} == shapes
    assert all(row.reason for row in groups.table)
    report = groups.report()
    for row in groups.table:
        assert row.name in report
        assert row.reason in report


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = Transformer("embed_tokens", "lm_head", tied)
    groups = shardmuon.param_groups(model)
    listed = [p for group in groups for _, p in group["params"]]
    assert len(listed) == len({id(p) for p in listed})
    assert {id(p) for p in listed} == {id(p) for p in model.parameters()}
    optimizer = shardmuon.Muon(groups)
    muon = {row.name for row in groups.table if row.rule == "muon"}
    assert set(optimizer.plan.owners()) == muon
    for name, p in model.named_parameters():
        keys = set(optimizer.state[p])
        assert keys == ({"momentum_buffer"} if name in muon else {"step", "exp_avg", "exp_avg_sq"})


def test_vectors_do_not_decay_but_embeddings_do() -> None:
    groups = shardmuon.param_groups(
        Transformer("wte", "lm_head"),
        muon={"lr": 0.5, "weight_decay": 0.3},
        adamw={"lr": 0.25, "weight_decay": 0.2},
    )
    decay = {name: group["weight_decay"] for group in groups for name in names_of(group)}
    lr = {name: group["lr"] for group in groups for name in names_of(group)}
    for row in groups.table:
        vector = len(row.shape) < 2
        wanted = 0.3 if row.rule == "muon" else 0.0 if vector else 0.2
        assert decay[row.name] == wanted, row
        assert lr[row.name] == (0.5 if row.rule == "muon" else 0.25), row


def test_zeros_in_settings_are_kept() -> None:
    groups = shardmuon.param_groups(
        Transformer("wte", "lm_head"),
        muon={"weight_decay": 0.0, "momentum": 0.0},
        adamw={"weight_decay": 0.0, "lr": 0.0},
    )
    optimizer = shardmuon.Muon(groups, weight_decay=0.5)
    for group in optimizer.param_groups:
        assert group["weight_decay"] == 0.0
        if group["algorithm"] == "muon":
            assert group["momentum"] == 0.0
        else:
            assert group["lr"] == 0.0


def test_patterns_override_the_rule() -> None:
    groups = shardmuon.param_groups(
        Transformer("wte", "lm_head"),
        to_muon=["*.gate.weight", "*.table"],
        to_adamw=["*.o_proj.weight"],
    )
    rules = {row.name: (row.rule, row.reason) for row in groups.table}
    for layer in range(2):
        for name, pattern in (("gate.weight", "*.gate.weight"), ("table", "*.table")):
            rule, reason = rules[f"layers.{layer}.{name}"]
            assert rule == "muon"
            assert pattern in reason
        assert rules[f"layers.{layer}.attention.o_proj.weight"][0] == "adamw"


@pytest.mark.parametrize("side", ["to_muon", "to_adamw"])
def test_pattern_that_matches_nothing_is_an_error(side: str) -> None:
    patterns: dict[str, Any] = {side: ["*.gaet.weight"]}
    with pytest.raises(ValueError, match=r"\*\.gaet\.weight"):
        shardmuon.param_groups(Transformer("wte", "lm_head"), **patterns)


def test_parameter_matched_for_both_rules_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.gate\.weight"):
        shardmuon.param_groups(
            Transformer("wte", "lm_head"), to_muon=["*.gate.*"], to_adamw=["layers.0.*"]
        )


def test_non_matrix_cannot_be_sent_to_muon() -> None:
    with pytest.raises(ValueError, match=r"norm\.weight"):
        shardmuon.param_groups(Transformer("wte", "lm_head"), to_muon=["norm.weight"])


class Conv1D(nn.Module):
    """A linear layer as Hugging Face stores GPT-2's: weight [in, out]."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.nf = rows
        self.weight = nn.Parameter(torch.zeros(cols, rows))
        self.bias = nn.Parameter(torch.zeros(rows))


class Experts(nn.Module):
    """Stacked experts that say how their matrices lie."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 10))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))


def test_orientation_follows_the_type_of_module() -> None:
    model = nn.ModuleDict({"mlp": Conv1D(12, 8), "plain": Experts(False), "turned": Experts(True)})
    groups = shardmuon.param_groups(model)
    turned = {
        name: group.get("transposed", False)
        for group in groups
        if group["algorithm"] == "muon"
        for name, _ in group["params"]
    }
    assert turned == {
        "mlp.weight": True,
        "plain.gate_up_proj": False,
        "turned.gate_up_proj": True,
    }
    owners = shardmuon.Muon(groups).plan.owners()
    assert "turned.gate_up_proj[3]" in owners
    rules = {row.name: row.rule for row in groups.table}
    assert rules["plain.gate_up_proj_bias"] == "adamw"


class Flat(nn.Module):
    """All weights in one vector, as FSDP1 leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.flat_param = nn.Parameter(torch.ones(100))


def test_model_without_hidden_matrices_is_an_error() -> None:
    with pytest.raises(ValueError, match="Muon"):
        shardmuon.param_groups(Flat())


def test_frozen_parameters_are_left_out() -> None:
    model = Transformer("wte", "lm_head")
    model.layers[0].requires_grad_(False)
    groups = shardmuon.param_groups(model)
    names = [name for group in groups for name in names_of(group)]
    assert not any(name.startswith("layers.0.") for name in names)
    assert "layers.1.gate_proj.weight" in names


class Wrapped(nn.Module):
    """What data-parallel wrappers do to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrapper_prefixes_are_not_part_of_names() -> None:
    model = Transformer("wte", "lm_head")
    inner = shardmuon.param_groups(model)
    outer = shardmuon.param_groups(Wrapped(model))
    assert [r.name for r in outer.table] == [r.name for r in inner.table]
    assert [r.rule for r in outer.table] == [r.rule for r in inner.table]
    assert shardmuon.Muon(outer).plan.owners().keys() == shardmuon.Muon(inner).plan.owners().keys()


def test_groups_are_a_list_for_the_optimizer() -> None:
    groups = models.groups(models.make())
    assert isinstance(groups, list)
    assert [row.name for row in groups.table if row.rule == "muon"] == models.MATRICES
    assert {group["algorithm"] for group in groups} == {"muon", "adamw"}


def test_tied_weight_is_updated_once_per_step() -> None:
    model = Transformer("wte", "lm_head", tied=True)
    tied: nn.Parameter = model.get_submodule("wte").weight  # type: ignore[assignment]
    twin = nn.Parameter(tied.detach().clone())
    optimizer = shardmuon.Muon(shardmuon.param_groups(model, adamw={"lr": 0.1}))
    reference = torch.optim.AdamW([twin], lr=0.1, foreach=False)
    for p in (tied, twin):
        p.grad = torch.ones_like(p)
    optimizer.step()
    reference.step()
    assert tied.equal(twin)
    assert model.get_submodule("lm_head").weight is tied


class Encoder(nn.Module):
    """Layers of its own between a linear layer that comes first and one that comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.regression = nn.Linear(8, 3)


def rules_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {row.name: (row.rule, row.reason) for row in shardmuon.param_groups(model).table}


def test_linear_layers_beside_deeper_ones_are_the_first_and_the_last() -> None:
    rules = rules_of(Encoder())
    for name in ("patches", "regression"):
        assert rules[f"{name}.weight"] == ("adamw", "first or last layer")
    assert rules["blocks.1.q_proj.weight"][0] == "muon"


def test_linear_layers_of_a_flat_model_are_hidden() -> None:
    flat = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
    assert [name for name, (rule, _) in rules_of(flat).items() if rule == "muon"] == [
        "1.weight",
        "3.weight",
    ]


class Holder(nn.Module):
    """As frameworks hold a model, beside things without parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model
        self.loss = nn.MSELoss()


def test_wrappers_count_as_no_level() -> None:
    inner = rules_of(Encoder())
    held = rules_of(Holder(Holder(Encoder())))
    assert held == {f"net.net.{name}": rule for name, rule in inner.items()}
    assert rules_of(Wrapped(Encoder())) == inner
    compiled = Encoder()
    compiled.regression = torch.compile(compiled.regression, backend="eager")  # type: ignore[assignment]
    assert rules_of(compiled) == inner
    assert rules_of(torch.compile(Encoder(), backend="eager")) == inner  # type: ignore[arg-type]


def test_an_adapter_is_sorted_as_what_it_adapts() -> None:
    model = Transformer("wte", "lm_head")
    for parent in (model, model.layers[0].attention, model.layers[0]):
        parent.requires_grad_(False)
    adapted = {"q_proj": model.layers[0].attention, "gate": model.layers[0], "lm_head": model}
    for name, parent in adapted.items():
        layer = getattr(parent, name)
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})
    model.score = nn.ModuleDict({"modules_to_save": nn.ModuleDict({"default": nn.Linear(8, 2)})})
    rules = {name: reason for name, (_, reason) in rules_of(model).items()}
    assert rules == {
        **{
            f"layers.0.attention.q_proj.lora_{x}.default.weight": "weight of a hidden linear layer"
            for x in "AB"
        },
        **{f"layers.0.gate.lora_{x}.default.weight": "router" for x in "AB"},
        **{f"lm_head.lora_{x}.default.weight": "output head" for x in "AB"},
        "score.modules_to_save.default.weight": "output head",
        "score.modules_to_save.default.bias": "vector or scalar",
    }


class Router(nn.Module):
    """A router whose matrix lies one level below its name."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 4, bias=False)


def test_small_matrices_that_steer_are_not_orthogonalized() -> None:
    layer = nn.ModuleDict({"router": Router(), "shared_gate": nn.Linear(8, 1), "up": Attention()})
    rules = rules_of(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
    assert rules["layers.0.router.proj.weight"] == ("adamw", "router")
    assert rules["layers.0.shared_gate.weight"] == ("adamw", "linear layer of one row or column")


class Fused(nn.Linear):
    """A subclass that holds a matrix beside its weight."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.table = nn.Parameter(torch.zeros(3, 8))


class Mute(nn.Module):
    """A stack of experts that does not say how its matrices lie."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(4, 6, 8))


def test_only_the_weight_of_a_linear_layer_is_known() -> None:
    layer = nn.ModuleDict({"fused": Fused(), "experts": Mute()})
    groups = shardmuon.param_groups(nn.ModuleDict({"layers": layer}))
    assert [(row.name, row.reason) for row in groups.unknown] == [
        ("layers.fused.table", "unknown 2-D parameter of Fused"),
        ("layers.experts.down_proj", "unknown 3-D parameter of Mute"),
    ]
    assert [row.name for row in groups.table if row.rule == "muon"] == ["layers.fused.weight"]
