"""A freshly made model with an optimizer over it: what `bench step` and `trace` run.

Owns how models are made (each rank fills its own shards, so that no whole model is ever held), the
optimizers by name, and one iteration. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import record_function

from shardmuon.exchange.blocks import local
from shardmuon.muon import Muon
from shardmuon.routing import param_groups
from shardmuon.runtime import Runtime
from shardmuon.tools.timeline import STEP
from shardmuon.tools.workloads import PACKAGES, Experts, Workload
from shardmuon.training.config import Precision
from shardmuon.training.inputs import Model
from shardmuon.training.model import CausalLM
from shardmuon.training.place import Place, autocast

__all__ = ["RUNTIMES", "Subject", "Unfit", "make_optimizers", "make_subject", "unfilled"]

# Shardmuon under several names.
RUNTIMES = {
    "shardmuon": Runtime(),
    "owner": Runtime(bucket_bytes=2**62),
    "overlap": Runtime(overlap="backward"),
}
SEED = 0
LR = 1e-4  # small: random tokens teach nothing, and numbers must stay finite


class Unfit(Exception):
    """This optimizer cannot run here, and why."""


class _Stacks(nn.Module):
    """Three stacks [experts, out, in], named as in transformers."""

    is_transposed = False

    def __init__(self, sizes: Experts) -> None:
        super().__init__()
        wide = sizes.experts, sizes.hidden, sizes.dim
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(sizes.experts, sizes.dim, sizes.hidden))


class _ExpertLayer(nn.Module):
    """Parameters of a layer; computes nothing."""

    def __init__(self, sizes: Experts) -> None:
        super().__init__()
        self.q_proj = nn.Linear(sizes.dim, sizes.query_dim, bias=False)
        self.k_proj = nn.Linear(sizes.dim, sizes.kv_dim, bias=False)
        self.v_proj = nn.Linear(sizes.dim, sizes.kv_dim, bias=False)
        self.o_proj = nn.Linear(sizes.query_dim, sizes.dim, bias=False)
        self.gate = nn.Linear(sizes.dim, sizes.experts, bias=False)
        self.experts = _Stacks(sizes)


class _ExpertLayers(nn.Module):
    def __init__(self, sizes: Experts) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ExpertLayer(sizes) for _ in range(sizes.layers))


@dataclass
class Subject:
    """A model on its device, its batch, and the optimizers that share its parameters."""

    model: nn.Module
    place: Place
    precision: Precision
    inputs: Tensor | None  # [B, T] ids, None: gradients stay as they were made
    targets: Tensor | None
    optimizers: list[Optimizer] = field(default_factory=list)

    def backward(self) -> None:
        """Gradients of the mean cross entropy of this rank's tokens."""
        if self.inputs is None or self.targets is None:
            return
        self.model.zero_grad()
        with autocast(self.model, self.place.device, self.precision):
            logits = self.model(self.inputs)
        F.cross_entropy(logits.float().flatten(0, 1), self.targets.flatten()).backward()

    def step(self) -> None:
        """One step of the optimizers, in a range that traces are read by."""
        with record_function(STEP):
            for optimizer in self.optimizers:
                optimizer.step()

    def iterate(self, mark: Callable[[], object] = lambda: None) -> None:
        """One iteration; `mark` is called before, between and after backward and step."""
        mark()
        self.backward()
        mark()
        self.step()
        mark()


def make_subject(workload: Workload, place: Place) -> Subject:
    """A model with random weights, sharded over all ranks; no optimizer yet.

    Replicas get equal weights, and as in training each rank tokens of its own.
    """
    cuda = place.device.type == "cuda"
    precision = Precision(compute="bfloat16" if cuda else "float32")
    model, layers = unfilled(workload.model)
    if place.mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for each in (*layers, model):
            fully_shard(each, mesh=place.mesh, mp_policy=policy if cuda else MixedPrecisionPolicy())
    model.to_empty(device=place.device)
    generator = torch.Generator(place.device).manual_seed(SEED + _shard(place))
    _fill(model.parameters(), generator)
    if isinstance(workload.model, Experts):
        _make_up_gradients(model.parameters(), generator)
        return Subject(model, place, precision, None, None)
    generator.manual_seed(SEED + place.rank)
    shape = workload.sequences, workload.tokens
    ids = workload.model.vocab_size
    inputs, targets = (
        torch.randint(ids, shape, generator=generator, device=place.device) for _ in range(2)
    )
    return Subject(model, place, precision, inputs, targets)


def _shard(place: Place) -> int:
    """Which shard of the parameters this rank holds."""
    return place.rank if place.mesh is None else place.mesh.get_local_rank("shard")


def unfilled(sizes: Model | Experts) -> tuple[nn.Module, nn.ModuleList]:
    """The model without memory, and its layers."""
    with torch.device("meta"):
        if isinstance(sizes, Experts):
            stacks = _ExpertLayers(sizes)
            return stacks, stacks.layers
        model = CausalLM(sizes)
        return model, model.model.layers


@torch.no_grad()
def _fill(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    for parameter in parameters:
        if parameter.ndim < 2:
            local(parameter).fill_(1.0)
        else:
            local(parameter).normal_(0.0, 0.02, generator=generator)


@torch.no_grad()
def _make_up_gradients(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).normal_(generator=generator)


def make_optimizers(name: str, subject: Subject) -> list[Optimizer]:
    """The optimizers called `name` over all parameters. Raises Unfit."""
    model, place = subject.model, subject.place
    named = dict(model.named_parameters())
    groups = param_groups(model, muon={"lr": LR}, adamw={"lr": LR})
    if name in RUNTIMES:
        return [Muon(groups, mesh=place.mesh, runtime=RUNTIMES[name])]
    fused = place.device.type == "cuda"
    if name == "adamw":
        return [torch.optim.AdamW(named.values(), lr=LR, fused=fused)]
    matrices = [named[row.name] for row in groups.table if row.rule == "muon"]
    others = [named[row.name] for row in groups.table if row.rule != "muon"]
    if name == "vanilla":
        if any(matrix.ndim > 2 for matrix in matrices):
            raise Unfit("torch.optim.Muon takes no stacks of matrices")
        return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR, fused=fused)]
    return [_of_package(name, matrices, others)]


def _of_package(name: str, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> Optimizer:
    """Another package's optimizer: the same 5 steps, decay and momentum as far as it lets us."""
    if find_spec(PACKAGES[name]) is None:
        raise Unfit(f"not installed; pip install {name}")
    try:
        made = import_module(PACKAGES[name]).Muon
    except Exception as error:  # it may need other versions, and say so in any way
        raise Unfit(f"cannot be imported: {error}") from error
    if not isinstance(matrices[0], DTensor):
        raise Unfit("measured on sharded models only")
    if name == "muonium" and not matrices[0].is_cuda:
        raise Unfit("runs on GPUs only")
    groups: list[dict[str, Any]] = [{"params": list(matrices)}, {"params": list(others)}]
    settings: dict[str, Any] = {}
    if name == "muon-fsdp2":
        groups[0] |= {"lr": LR, "weight_decay": 0.1, "use_muon": True}
        groups[1] |= {"lr": LR, "weight_decay": 0.01, "use_muon": False}
    else:
        groups[1]["algorithm"] = "adamw"
        settings = {"lr": LR, "wd": 0.1, "use_cautious_wd": False}
        settings["orthogonalization_strategy"] = "newton_schulz"
    optimizer: Optimizer = made(groups, **settings)
    return optimizer
