"""A small Llama-style transformer.

Owns the architecture and the initial weights. Module names follow Hugging Face's Llama, so that
routing and later export meet real-world names. Knows nothing of ranks, sharding or optimizers.
Words: B sequences, T tokens, C width, H heads, K key-value heads, D channels of a head, V ids.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardmuon.training.inputs import Model

__all__ = ["CausalLM", "build", "transformers_config"]


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dim, computed in float32, then scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C] in the type of `x`."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normal.type_as(x) * self.weight.type_as(x)


def rotary_table(tokens: int, channels: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, T, D] of rotary positions, half-split layout, float32.

    RoFormer, https://arxiv.org/abs/2104.09864, eq. 34; halves instead of pairs as in Llama.
    """
    exponent = torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn queries or keys [B, H, T, D] by their positions; `table` is [2, T, D]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = table.type_as(x).unbind()
    turned: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
    return turned


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key-value head."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.channels = config.dim // config.heads
        self.shares = config.kv_heads < config.heads
        kv_dim = config.kv_heads * self.channels
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, n D] -> [B, n, T, D]."""
        return x.view(*x.shape[:2], -1, self.channels).transpose(1, 2)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        q = rotate(self._heads(self.q_proj(x)), table)
        k = rotate(self._heads(self.k_proj(x)), table)
        v = self._heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shares)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), table)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.channels = config.dim // config.heads
        self.theta = config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.recompute = False
        """Whether backward computes each block once more instead of keeping its activations."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> [B, T, C]."""
        x = self.embed_tokens(tokens)
        table = rotary_table(tokens.shape[1], self.channels, self.theta, tokens.device)
        for block in self.layers:
            if self.recompute and self.training:
                x = checkpoint(block, x, table, use_reentrant=False)
            else:
                x = block(x, table)
        out: Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """The decoder with its output head."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] int64 -> logits [B, T, V] in the compute type."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out


def build(config: Model, seed: int) -> CausalLM:
    """The model on the CPU in float32, the same weights for any number of ranks.

    Normal weights with `init_std`; the projections that write into the residual stream are
    smaller by sqrt(2 layers), as in GPT-2, so that its variance does not grow with depth.
    """
    model = CausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    narrow = config.init_std / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0.0, narrow if into_stream else config.init_std, generator=generator)
    return model


def transformers_config(config: Model, dtype: str) -> dict[str, Any]:
    """The config.json with which transformers' Llama computes what this model does.

    dtype: in which the weights are stored and loaded, such as "float32".
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim // config.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # read by versions before 5
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.init_std,
        "dtype": dtype,
    }
