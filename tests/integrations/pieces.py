"""What the workers of several frameworks share: a tiny model, comparisons, pages to run.

Owns no case. Imports transformers only where a model is made.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmuon import Muon, param_groups
from tests.integrations.jobs import ROOT

__all__ = [
    "batch",
    "equal",
    "groups_of",
    "reference_step",
    "run_page",
    "same_bits",
    "state_of",
    "tiny_llama",
    "undo_accelerate_on_cpu",
    "use_accelerate_on_cpu",
    "whole",
]

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def tiny_llama(seed: int = 0, **more: Any) -> Any:
    """A Llama of two layers and 27 thousand parameters; equal on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **more,
    )
    return LlamaForCausalLM(config)


def batch(step: int, rank: int | None = None, rows: int = 2) -> Tensor:
    """Tokens [rows, 8] of a step; each rank has its own."""
    number = rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0)
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(64, (rows, 8), generator=generator)


def groups_of(model: nn.Module) -> Any:
    """Groups whose settings differ from all defaults, so that a lost one is seen."""
    return param_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-3, "betas": (0.9, 0.95)})


def _full(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def whole(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of all tensors, gathered from all ranks; names without wrapper prefixes."""
    prefixes = ("module.", "_forward_module.", "_orig_mod.")
    whole = {}
    for name, tensor in named:
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        whole[name] = _full(tensor)
    return whole


def state_of(optimizer: Any) -> dict[str, Tensor]:
    """Copies of the whole optimizer state by parameter name and kind of state."""
    values = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for kind, value in optimizer.state[parameter].items():
                values[f"{name}.{kind}"] = value
    return whole(values.items())


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def same_bits(model: nn.Module, optimizer: Any, before: tuple[Any, Any]) -> bool:
    """Whether model and optimizer hold what `before` (whole parameters, whole state) says."""
    parameters, state = before
    return equal(whole(model.named_parameters()), parameters) and equal(state_of(optimizer), state)


def reference_step(twin: nn.Module, optimizer: Muon, model: nn.Module) -> None:
    """One step of plain whole parameters in this process alone, with the gradients of `model`."""
    gradients = whole((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    for name, parameter in twin.named_parameters():
        parameter.grad = gradients[name]
    with warnings.catch_warnings():
        # Every rank takes it alone, on purpose.
        warnings.filterwarnings("ignore", message=".*are plain tensors, so each of")
        optimizer.step()


def run_page(name: str, folder: Path) -> int:
    """Run the Python blocks of docs/integrations/`name` as one program; how many there are."""
    text = (ROOT / "docs" / "integrations" / name).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    blocks = PYTHON.findall(text)
    with contextlib.chdir(folder):
        for block in blocks:
            exec(compile(textwrap.dedent(block), f"docs/integrations/{name}", "exec"), names)
    return len(blocks)


_REPLACED: list[Any] = []


def use_accelerate_on_cpu() -> None:
    """Let accelerate take its FSDP2 path on CPU ranks.

    Its public settings make DDP of it (see docs/integrations/accelerate.md). What this replaces
    only chooses the backend; prepare, backward, save and load are accelerate's own. The
    environment variable ACCELERATE_TORCH_DEVICE=cpu belongs to it.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    _REPLACED.append(PartialState._prepare_backend)
    PartialState._prepare_backend = backend


def undo_accelerate_on_cpu() -> None:
    """accelerate as it is."""
    from accelerate import PartialState

    PartialState._prepare_backend = _REPLACED.pop()
