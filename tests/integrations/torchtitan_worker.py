"""Cases of torchtitan's optimizer components with our container, on every rank; see jobs.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides

from shardmuon import Muon
from shardmuon.integrations.torchtitan import MuonContainer, use_muon
from tests.integrations.jobs import serve
from tests.integrations.pieces import equal, reference_step, run_page, whole

OVERRIDE = "shardmuon.integrations.torchtitan.use_muon"
MUON_KEYS = {"lr": 0.02, "weight_decay": 0.05}
KEPT = ("algorithm", "lr", "weight_decay", "betas", "eps")


class Net(nn.Module):
    """Names as in torchtitan: tok_embeddings, layers, norm, output."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(64, 16)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.RMSNorm(16)
        self.output = nn.Linear(16, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        out: torch.Tensor = self.output(self.norm(h))
        return out


class Block(nn.Module):
    """One MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(16, 24)
        self.w2 = nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.w2(self.w1(x).relu())
        return out


def sharded(seed: int = 0) -> Net:
    dist.is_initialized() or dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net(seed)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def container(model: nn.Module) -> Any:
    """Built as torchtitan's trainer does, from the configuration that the override made."""
    return use_muon(default_adamw(lr=3e-3), muon=MUON_KEYS).build(model_parts=[model])


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(64, (32,), generator=generator)
    nn.functional.cross_entropy(model(tokens), tokens).backward()


def state_of(optimizers: Any) -> dict[str, torch.Tensor]:
    flat = optimizers.state_dict()
    return whole((k, v) for k, v in flat.items() if isinstance(v, torch.Tensor))


class Job(Configurable):
    """A configuration that holds that of the optimizer, as torchtitan's do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config
        override: OverrideConfig


def override(folder: Path) -> dict[str, Any]:
    """torchtitan itself applies the override from its command line's entry."""
    job = Job.Config(
        optimizer=default_adamw(lr=3e-3),
        override=OverrideConfig(imports=[(OVERRIDE, {"muon": MUON_KEYS})]),
    )
    apply_overrides(job.override, job)
    made = job.optimizer
    return {"made": type(made) is MuonContainer.Config, "muon": made.muon}


def steps(folder: Path) -> dict[str, Any]:
    """Groups, learning rates, and steps that equal one process, from the state on."""
    model, twin = sharded(), Net()
    optimizers = container(model)
    (inner,) = optimizers
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=6
    )
    named = dict(twin.named_parameters())
    reference = Muon(
        [
            {
                **{
                    k: v for k, v in group.items() if k in ("algorithm", *MUON_KEYS, "betas", "eps")
                },
                "params": [(name, named[name]) for name in group["param_names"]],
            }
            for group in inner.param_groups
        ]
    )
    exact = []
    for step in range(3):
        for group, other in zip(inner.param_groups, reference.param_groups, strict=True):
            other["lr"] = group["lr"]
        backward(model, step)
        reference_step(twin, reference, model)
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        exact.append(equal(whole(model.named_parameters()), whole(twin.named_parameters())))
    return {
        "ours": type(inner).__name__,
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "groups": [
            [group["algorithm"], group["fused"], group["initial_lr"], group["param_names"]]
            for group in inner.param_groups
        ],
        "rates moved": inner.param_groups[0]["lr"] != 0.02,
        "equal to one process": exact,
        "owners": sorted(set(inner.plan.owners().values())),
    }


def files(folder: Path) -> dict[str, Any]:
    """Saved before and after steps through DCP; other objects load it and repeat every bit."""
    model = sharded()
    optimizers = container(model)
    before = whole(model.named_parameters())
    empty = optimizers.state_dict()  # takes a hidden step where there is no state
    untouched = equal(whole(model.named_parameters()), before)
    for step in range(2):
        backward(model, step)
        optimizers.step()
        optimizers.zero_grad()
    contents = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    dcp.save(contents, checkpoint_id=str(folder / "saved"))
    saved = state_of(optimizers)
    again = sharded(seed=1)
    others = container(again)
    wanted = {"model": again.state_dict(), "optimizer": others.state_dict()}
    dcp.load(wanted, checkpoint_id=str(folder / "saved"))
    again.load_state_dict(wanted["model"])
    others.load_state_dict(wanted["optimizer"])
    restored = equal(state_of(others), saved)
    for each, theirs in ((model, optimizers), (again, others)):
        backward(each, 7)
        theirs.step()
    return {
        "hidden step": untouched,
        "keys": sorted(k for k in empty if "layers.0.w1" in k and k.startswith("state.")),
        "restored": restored,
        "ended alike": equal(whole(model.named_parameters()), whole(again.named_parameters())),
    }


def refusals(folder: Path) -> list[str]:
    """What cannot be, in words."""
    said = []
    for config in (
        OptimizersContainer.Config(
            param_groups=default_adamw().param_groups, implementation="fused_opt_states_bf16"
        ),
        OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"amsgrad": True}
                )
            ]
        ),
    ):
        try:
            use_muon(config).build(model_parts=[sharded()])
        except ValueError as error:
            said.append(str(error))
    return said


def page(folder: Path) -> int:
    """The examples of docs/integrations/torchtitan.md."""
    return run_page("torchtitan.md", folder)


if __name__ == "__main__":
    serve([override, steps, files, refusals, page])
    dist.destroy_process_group()
