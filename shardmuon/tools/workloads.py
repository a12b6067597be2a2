"""The named models and optimizers of `bench step` and `trace`.

Owns the names and sizes. Imports no torch, so that a misspelt name is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmuon.training.inputs import Model

__all__ = ["OPTIMIZERS", "PACKAGES", "WORKLOADS", "Experts", "Workload"]

OPTIMIZERS = ("adamw", "vanilla", "owner", "shardmuon", "overlap")
PACKAGES = {"muonium": "muonium", "muon-fsdp2": "muon_fsdp2"}
"""Other packages' optimizers, by the name on PyPI, with the module's name."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers of a mixture of experts: parameters alone, which get made-up gradients.

    A layer has four attention projections, a router and three stacks of `experts` matrices.
    """

    layers: int
    dim: int
    query_dim: int
    kv_dim: int
    hidden: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and on how much: sequences x tokens per rank. Experts take no tokens."""

    model: Model | Experts
    sequences: int = 0
    tokens: int = 0

    @property
    def trains(self) -> bool:
        """True if there is a forward and a backward pass."""
        return isinstance(self.model, Model)


WORKLOADS = {
    "tiny": Workload(
        model=Model(vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, hidden=128),
        sequences=2,
        tokens=32,
    ),
    # Large enough that a CPU computes for most of a step.
    "small": Workload(
        model=Model(vocab_size=256, dim=256, layers=4, heads=8, kv_heads=8, hidden=1024),
        sequences=1,
        tokens=32,
    ),
    "gpt160m": Workload(
        model=Model(vocab_size=50304, dim=768, layers=12, heads=12, kv_heads=12, hidden=3072),
        sequences=4,
        tokens=2048,
    ),
    "llama1b": Workload(
        model=Model(vocab_size=32000, dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
        sequences=4,
        tokens=2048,
    ),
    "llama8b-half": Workload(
        model=Model(vocab_size=32000, dim=4096, layers=16, heads=32, kv_heads=8, hidden=14336),
        sequences=2,
        tokens=2048,
    ),
    # Four of the 48 layers of Qwen3-30B-A3B.
    "qwen3-moe": Workload(
        model=Experts(layers=4, dim=2048, query_dim=4096, kv_dim=512, hidden=768, experts=128)
    ),
}
