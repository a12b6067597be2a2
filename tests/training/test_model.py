"""The model: names, shapes, causality, rotary positions and seeded initial weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shardmuon.training import model as models
from shardmuon.training.config import Model

SMALL = Model(vocab_size=300, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)


def test_names_follow_hugging_face_llama() -> None:
    shapes = {name: tuple(p.shape) for name, p in models.build(SMALL, 0).named_parameters()}
    layer = {
        "input_layernorm": (32,),
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "post_attention_layernorm": (32,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (300, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (300, 32),
    }
    for i in range(2):
        expected |= {f"model.layers.{i}.{k}.weight": v for k, v in layer.items()}
    assert shapes == expected


def test_tied_head_is_one_parameter() -> None:
    model = models.build(replace(SMALL, tied_head=True), 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_gpt_configuration_has_124_million_parameters() -> None:
    config = Model(
        vocab_size=50304, dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, tied_head=True
    )
    with torch.device("meta"):
        model = models.CausalLM(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 124


def test_logits_see_no_later_token() -> None:
    model = models.build(SMALL, 0)
    tokens = torch.arange(20).reshape(2, 10)
    changed = tokens.clone()
    changed[:, 6:] += 100
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 10, 300)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_attention_depends_on_relative_positions_alone() -> None:
    """Rotated queries and keys: the product is a function of the distance."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8)
    table = models.rotary_table(12, 8, 10000.0, torch.device("cpu"))
    turned_q = models.rotate(q.expand(1, 1, 12, 8), table)[0, 0]
    turned_k = models.rotate(k.expand(1, 1, 12, 8), table)[0, 0]
    products = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(turned_q[0], q)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12))


def test_rotary_angles_are_half_split() -> None:
    table = models.rotary_table(4, 6, 100.0, torch.device("cpu"))
    x = torch.tensor([1.0, 0, 0, 0, 0, 0]).expand(4, 6)
    turned = models.rotate(x, table)
    expected = torch.zeros(4, 6)
    expected[:, 0] = torch.arange(4.0).cos()
    expected[:, 3] = torch.arange(4.0).sin()
    torch.testing.assert_close(turned, expected)


def test_norm_matches_torch() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(3, 5, 32), models.RMSNorm(32, 1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_grouped_heads_equal_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped = models.Attention(SMALL)
    full = models.Attention(replace(SMALL, kv_heads=4))
    with torch.no_grad():
        for name in ("q_proj", "o_proj"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("k_proj", "v_proj"):
            heads = getattr(grouped, name).weight.view(2, 8, 32)
            getattr(full, name).weight.copy_(heads.repeat_interleave(2, 0).view(32, 32))
    table = models.rotary_table(7, 8, 10000.0, torch.device("cpu"))
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(grouped(x, table), full(x, table))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = models.build(SMALL, 5).state_dict()
    torch.manual_seed(2)
    again, other = models.build(SMALL, 5).state_dict(), models.build(SMALL, 6).state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == name.endswith("norm.weight")


@pytest.mark.parametrize(("name", "narrow"), [("o_proj", True), ("up_proj", False)])
def test_initial_spread(name: str, narrow: bool) -> None:
    model = models.build(Model(dim=256, heads=4, kv_heads=4, layers=8, hidden=512), 0)
    weights = [p for n, p in model.named_parameters() if name in n]
    expected = 0.02 / math.sqrt(16) if narrow else 0.02
    for weight in weights:
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.02)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    model = models.build(SMALL, 0)
    tokens = torch.arange(200).reshape(2, 100)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert float(loss.detach()) == pytest.approx(math.log(300), rel=0.02)
