"""Which model a run trains: the one of `model.py`, or one that transformers makes from a folder.

Owns all that differs between the two: how they are built, which modules are their blocks, how they
are called, how tensor parallelism splits them, and what describes them in a checkpoint. Knows
nothing of ranks. Transformers is imported only for a folder.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardmuon.training import model as llama
from shardmuon.training.config import Config
from shardmuon.training.inputs import Model
from shardmuon.training.load import ConfigError

__all__ = [
    "Architecture",
    "blocks",
    "find",
    "logits",
    "of_manifest",
    "recompute_activations",
    "tensor_plan",
    "transformers_model",
]

_LLAMA_PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
}
_IN_BLOCK = "layers.*."


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model that can be built. tree: its config.json of transformers, None for `model.py`'s.

    weights: folder of .safetensors files that it starts from, None for random weights.
    """

    model: Model
    tree: Mapping[str, Any] | None = None
    weights: Path | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes."""
        if self.tree is None:
            return self.model.vocab_size
        return int(_text_config(_config_of(self.tree)).vocab_size)

    def build(self, seed: int) -> nn.Module:
        """The model on the CPU in float32, the same weights for any number of ranks."""
        if self.tree is None:
            return llama.build(self.model, seed)
        auto = _transformers().AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.weights is not None:
                model = auto.from_pretrained(
                    self.weights, dtype=torch.float32, local_files_only=True
                )
            else:
                model = auto.from_config(_config_of(self.tree), dtype=torch.float32)
        assert isinstance(model, nn.Module)
        model.train()
        return model

    def config_json(self, dtype: str) -> dict[str, Any]:
        """The config.json that goes with weights stored as `dtype`, such as "float32"."""
        if self.tree is None:
            return llama.transformers_config(self.model, dtype)
        return {**self.tree, "dtype": dtype}


def find(config: Config) -> Architecture:
    """The architecture that a configuration asks for. Raises ConfigError if it cannot be built."""
    if config.model.path is None:
        return Architecture(model=config.model)
    folder = Path(config.model.path)
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError
    except OSError as error:
        raise ConfigError(
            f"model.path: cannot read {folder / 'config.json'} ({error.strerror}); expected a"
            " folder with a config.json of transformers"
        ) from None
    except ValueError:
        raise ConfigError(f"model.path: {folder / 'config.json'} is no JSON object") from None
    files = any(folder.glob("*.safetensors"))
    found = Architecture(model=config.model, tree=tree, weights=folder if files else None)
    _check(found, config)
    return found


def of_manifest(manifest: Mapping[str, Any]) -> Architecture:
    """The architecture of a checkpoint of `train.py`, with random weights to begin with."""
    config: Mapping[str, Any] = manifest["config"]
    return Architecture(model=Model(**config["model"]), tree=manifest.get("architecture"))


def _check(found: Architecture, config: Config) -> None:
    assert found.tree is not None
    model = transformers_model(found.tree, "model.path")
    settings = _text_config(model.config)
    longest = getattr(settings, "max_position_embeddings", None)
    if isinstance(longest, int) and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: got {config.data.sequence_length}, expected at most"
            f" {longest}, the max_position_embeddings of {config.model.path}"
        )
    if config.data.is_bytes and settings.vocab_size < 256:
        raise ConfigError(f"model.path: {settings.vocab_size} token ids are too few for bytes")
    if config.mesh.tensor > 1:
        tensor_plan(model)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            size = getattr(settings, key, None)
            if isinstance(size, int) and size % config.mesh.tensor:
                raise ConfigError(
                    f"mesh.tensor: got {config.mesh.tensor}, expected a divisor of {key} ({size})"
                )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the list of modules that holds most parameters, in order.

    Each is sharded, recomputed and compiled as one. Lists within layers hold fewer.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_size, default=()))


def _size(modules: nn.ModuleList) -> int:
    return sum(parameter.numel() for parameter in modules.parameters())


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Token ids [B, T] int64 -> logits [B, T, V] in the compute type."""
    if isinstance(model, llama.CausalLM):
        return model(tokens)  # type: ignore[no-any-return]
    out: Tensor = model(tokens, use_cache=False).logits
    return out


def recompute_activations(model: nn.Module) -> None:
    """Let each block keep only its input, and be computed once more in backward; in place."""
    if isinstance(model, llama.CausalLM):
        model.model.recompute = True
    else:
        old = getattr(model, "gradient_checkpointing_enable", None)  # its name before 5.24
        enable: Any = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """How tensor parallelism splits the linear layers of a block: "colwise" or "rowwise" by name.

    Raises ConfigError for a model whose split needs more than these two.
    """
    if isinstance(model, llama.CausalLM):
        return _LLAMA_PLAN
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    inside = dict(_inside_blocks(plan))
    others = sorted(set(inside.values()) - {"colwise", "rowwise"})
    if not inside or others:
        raise ConfigError(
            f"mesh.tensor: {type(model).__name__} splits its layers by"
            f" {', '.join(others) or 'no plan'}; expected a model with colwise and rowwise"
            " layers only, or mesh.tensor: 1"
        )
    return inside


def _inside_blocks(plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, style in plan.items():
        if name.startswith(_IN_BLOCK):
            yield name.removeprefix(_IN_BLOCK), style


# --- transformers -----------------------------------------------------------------------------


def transformers_model(tree: Mapping[str, Any], where: str) -> Any:
    """The causal language model that transformers makes of a config.json, on the meta device.

    Raises ConfigError, one line that starts with `where`, if it makes none. Code that comes with a
    model is never run.
    """
    kind = tree.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: config.json has no model_type, so it is not of transformers")
    if find_spec("transformers") is None:
        raise ConfigError(f"{where}: this takes transformers; pip install 'shardmuon[hf]'")
    if "auto_map" in tree and kind not in _transformers().CONFIG_MAPPING:
        raise ConfigError(
            f"{where}: model_type '{kind}' comes with code of its own, never run here"
        )
    try:
        with torch.device("meta"):
            return _transformers().AutoModelForCausalLM.from_config(
                _config_of(tree), trust_remote_code=False
            )
    except Exception as error:  # of any type, from the code of a few hundred models
        reason = textwrap.shorten(str(error), 240, placeholder=" ...")
        raise ConfigError(
            f"{where}: transformers makes no causal language model of model_type '{kind}': {reason}"
        ) from error


def _transformers() -> ModuleType:
    return import_module("transformers")


def _config_of(tree: Mapping[str, Any]) -> Any:
    return _transformers().CONFIG_MAPPING[tree["model_type"]].from_dict(dict(tree))


def _text_config(config: Any) -> Any:
    """The part about text of a model that also takes other things."""
    return config.get_text_config()
