"""Tiny models of 14 families of transformers, made from configurations: no network, no files.

Owns how each is built and what it is fed. Layers are few and narrow, but each kind of layer that a
family has occurs at least once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardmuon

__all__ = ["FAMILIES", "batch", "build", "config", "layers", "rows", "shard"]

VOCABULARY = 96

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {**_TEXT, "num_experts_per_tok": 2}
_GEMMA = {
    **_TEXT,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
_DEEPSEEK = {
    **_MOE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_QWEN_NEXT = {
    **_MOE,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
}

FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _TEXT),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_TEXT, "head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_MOE, "num_local_experts": 4}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _TEXT),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_MOE,
            "head_dim": 8,
            "num_local_experts": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _QWEN_NEXT),
}
"""Names of the configuration and of the model in transformers, and the configuration's values."""


def config(family: str, **changes: Any) -> Any:
    """A new configuration of `family`; dropout is off."""
    import transformers

    name, _, values = FAMILIES[family]
    made = getattr(transformers, name)(**{**values, **changes})
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob"):
        if hasattr(made, key):
            setattr(made, key, 0.0)
    return made


def build(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A whole float32 model on the CPU whose values depend on `seed` alone."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, FAMILIES[family][1])(config(family, **changes))
    return model


def batch(family: str, seed: int = 0, size: int = 2) -> dict[str, Tensor]:
    """Inputs and labels of `size` examples; `model(**batch(...)).loss` is the loss."""
    draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(seed))
    if family == "vit":
        side = _VIT["image_size"]
        pixels = draw(256, (size, 3, side, side)) / 128.0 - 1.0
        return {"pixel_values": pixels, "labels": draw(int(_VIT["num_labels"]), (size,))}
    tokens = draw(3, VOCABULARY, (size, 12))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers: members of the longest list of modules."""
    lists = [list(each.children()) for each in model.modules() if isinstance(each, nn.ModuleList)]
    longest: list[nn.Module] = max(lists, key=len)
    return iter(longest)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` of each layer and of the root, in place; returns the model."""
    wrap: Callable[..., Any] = fully_shard
    for layer in layers(model):
        wrap(layer, mesh=mesh)
    wrap(model, mesh=mesh)
    return model


def rows(model: nn.Module) -> list[str]:
    """How `param_groups` sorts `model`: name, shape, rule, how it is stored, reason."""
    groups = shardmuon.param_groups(model)
    turned = {name for each in groups if each.get("transposed") for name, _ in each["params"]}
    return [
        f"{row.name} {'x'.join(map(str, row.shape))} {row.rule}"
        f"{' transposed' if row.name in turned else ''}: {row.reason}"
        for row in groups.table
    ]
