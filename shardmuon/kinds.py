"""What a parameter is: an embedding, a head, a router, a hidden matrix, or unknown.

Owns the default rule of `param_groups`, as a table. It looks at the modules that hold a parameter,
at their names without wrappers, and at its shape. What is here never imports transformers or PEFT:
their modules are known by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardmuon.groups import ADAMW, MUON, clean_fqn

__all__ = [
    "HEAD_NAMES",
    "ROUTER_NAMES",
    "UNKNOWN",
    "Heads",
    "Use",
    "default_rule",
    "heads_of",
    "uses_of",
]

HEAD_NAMES = frozenset(
    {
        "lm_head",
        "head",
        "output",
        "output_projection",
        "embed_out",
        "unembed",
        "classifier",
        "score",
    }
)
ROUTER_NAMES = frozenset({"gate", "router"})
UNKNOWN = "unknown"
_ADAPTERS = re.compile(r"\.(modules_to_save\.[^.]+|lora_[^.]+\.[^.]+|base_layer)$")
"""What PEFT puts behind the name of a module that it wraps."""


@dataclass(frozen=True)
class Use:
    """One place where a module holds a parameter; names are without wrappers."""

    name: str
    own: str  # last part of the name: what the module calls it
    module: nn.Module

    @property
    def path(self) -> list[str]:
        """Names of the modules down to the one that holds it; an adapter's is what it adapts."""
        return _ADAPTERS.sub("", self.name.removesuffix(self.own).rstrip(".")).split(".")

    @property
    def is_conv1d(self) -> bool:
        """Of Hugging Face's linear layer with weight [in, out]; known by name, so that nothing of
        transformers is imported. FSDP2 makes subclasses."""
        names = [kind.__name__ for kind in type(self.module).__mro__]
        return "Conv1D" in names and hasattr(self.module, "nf")

    @property
    def is_transposed(self) -> bool:
        """Stored [in, out]."""
        return self.is_conv1d or bool(getattr(self.module, "is_transposed", False))


def uses_of(model: nn.Module) -> dict[Tensor, list[Use]]:
    """Each trainable parameter with all places that hold it, the first named first."""
    uses: dict[Tensor, list[Use]] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                name = clean_fqn(f"{prefix}.{own}" if prefix else own)
                if is_lazy(parameter):
                    raise ValueError(f"{name} has no shape yet; run the model once before")
                uses.setdefault(parameter, []).append(Use(name, own, module))
    return uses


def default_rule(parameter: Tensor, use: Sequence[Use], heads: Heads) -> tuple[str, str]:
    """(rule, reason): that of the first entry of `_RULES` that holds."""
    for rule, reason, holds in _RULES:
        if holds(parameter, use, heads):
            return rule, reason
    module = type(use[0].module)  # FSDP2's subclasses are made inside torch.distributed
    kind = next(k for k in module.__mro__ if not k.__module__.startswith("torch.distributed."))
    return ADAMW, f"{UNKNOWN} {parameter.ndim}-D parameter of {kind.__name__}"


def _is_router(use: Use) -> bool:
    """The module, or the one around it, is called so."""
    return not ROUTER_NAMES.isdisjoint(use.path[-2:])


def _is_linear(use: Use) -> bool:
    return isinstance(use.module, nn.Linear) and use.own == "weight"


_Test = Callable[[Tensor, Sequence[Use], "Heads"], bool]
_RULES: tuple[tuple[str, str, _Test], ...] = (
    (ADAMW, "embedding", lambda _, use, heads: any(_is_embedding(u.module) for u in use)),
    (ADAMW, "vector or scalar", lambda p, use, heads: p.ndim < 2),
    (ADAMW, "output head", lambda _, use, heads: any(heads.is_output(u) for u in use)),
    (ADAMW, "router", lambda _, use, heads: any(_is_router(u) for u in use)),
    (ADAMW, "first or last layer", lambda _, use, heads: any(heads.is_edge(u) for u in use)),
    (
        ADAMW,
        "linear layer of one row or column",
        lambda p, use, heads: p.ndim == 2 and 1 in p.shape and all(map(_is_linear, use)),
    ),
    (
        MUON,
        "weight of a hidden linear layer",
        lambda p, use, heads: p.ndim == 2 and all(map(_is_linear, use)),
    ),
    (
        MUON,
        "weight of a hidden Conv1D, stored transposed",
        lambda p, use, heads: p.ndim == 2 and all(u.is_conv1d for u in use),
    ),
    (
        MUON,
        "stack of experts",
        lambda p, use, heads: p.ndim == 3 and all(hasattr(u.module, "is_transposed") for u in use),
    ),
)
"""(rule, reason, test); the first test that holds decides."""


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


@dataclass(frozen=True)
class Heads:
    """Where a model's first and last layers are."""

    outputs: frozenset[nn.Module]  # what `get_output_embeddings()` of any module returned
    edge: Sequence[str] | None  # path of the root, if linear layers directly under it are edges

    def is_output(self, use: Use) -> bool:
        """It is an output embedding, or is called like a head."""
        return use.module in self.outputs or use.path[-1] in HEAD_NAMES

    def is_edge(self, use: Use) -> bool:
        """It is a linear layer directly under a root that has layers deeper down."""
        return self.edge is not None and _is_linear(use) and use.path[:-1] == self.edge


def heads_of(model: nn.Module) -> Heads:
    """The first and last layers of `model`, whatever it is wrapped in."""
    getters = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    outputs = frozenset(getter() for getter in getters if callable(getter))
    prefix, root = _innermost(model)
    deep = any(
        parameter.ndim >= 2 and not _is_embedding(module)
        for child in root.children()
        for module in list(child.modules())[1:]
        for parameter in module.parameters(recurse=False)
    )
    path = [part for part in clean_fqn(f"{prefix}.weight").split(".")[:-1] if part]
    return Heads(outputs, path if deep else None)


def _innermost(model: nn.Module) -> tuple[str, nn.Module]:
    """The model inside its wrappers, which hold one module with parameters and nothing else."""
    prefix, root = "", model
    while not isinstance(root, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        held = [(name, c) for name, c in root.named_children() if any(True for _ in c.parameters())]
        if len(held) != 1 or any(True for _ in root.parameters(recurse=False)):
            break
        prefix, root = f"{prefix}.{held[0][0]}".lstrip("."), held[0][1]
    return prefix, root
