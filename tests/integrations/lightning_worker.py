"""Cases of Lightning's Fabric and Trainer with ModelParallelStrategy; see jobs.py."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardmuon import Muon
from tests.integrations.jobs import serve
from tests.integrations.pieces import (
    equal,
    groups_of,
    reference_step,
    run_page,
    same_bits,
    state_of,
    whole,
)

LIGHTNING_SAYS = (
    ".*LeafSpec.*",  # it calls torch by a name that is going away
    ".*does not have many workers.*",
    ".*resuming from a checkpoint that ended before the epoch.*",
)


def build(seed: int = 0) -> nn.Sequential:
    """A small model, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(64, 32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.LayerNorm(32)
    )


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2, as Lightning wants it."""
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def loss_of(model: Any, step: int) -> Tensor:
    """Of this rank's own tokens."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: Tensor = model(torch.randint(64, (32,), generator=generator)).square().mean()
    return loss


def fabric(**more: Any) -> Any:
    strategy = FabricStrategy(
        parallelize_fn=shard,
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        **more,
    )
    made = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    made.launch()
    return made


def set_up(made: Any, seed: int = 0) -> tuple[Any, Any, Muon]:
    """(wrapped model, wrapped optimizer, ours)."""
    model = made.setup_module(build(seed))
    inner = Muon(groups_of(model))
    return model, made.setup_optimizers(inner), inner


def take_steps(made: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        made.backward(loss_of(model, step))
        made.clip_gradients(model, optimizer, max_norm=0.01)
        optimizer.step()
        optimizer.zero_grad()


def fabric_wrapper(folder: Path) -> dict[str, Any]:
    """Steps equal one process; plan, statistics and writes are the same through the wrapper."""
    made = fabric()
    model, optimizer, inner = set_up(made)
    twin = build()
    reference = Muon(groups_of(twin))
    seen_early = optimizer.plan  # through the wrapper first
    exact, norms = [], []
    for step in range(3):
        made.backward(loss_of(model, step))
        norms.append(float(made.clip_gradients(model, optimizer, max_norm=0.01)))
        reference_step(twin, reference, model)
        optimizer.measure_next_step()  # sets something inside
        optimizer.step()
        optimizer.zero_grad()
        exact.append(
            equal(whole(model.named_parameters()), whole(twin.named_parameters()))
            and inner.stats.orthogonality_error is not None
        )
    return {
        "wrapper": type(optimizer).__name__,
        "is a Muon": isinstance(optimizer, Muon) and optimizer is not inner,
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "names": inner.param_groups[0]["param_names"],
        "equal to one process": exact,
        "clipped": all(norm > 0.01 for norm in norms),
        "one plan": seen_early is inner.plan and optimizer.plan is inner.plan,
        "one statistics": optimizer.stats == inner.stats,
        "one state": optimizer.state is inner.state,
        "sent": inner.stats.bytes_sent > 0,
        "owners": inner.plan.owners(),
    }


def fabric_files(folder: Path) -> dict[str, Any]:
    """Both forms of checkpoint; other objects load them and repeat every bit."""
    got = {}
    for distributed in (True, False):
        made = fabric(save_distributed_checkpoint=distributed)
        model, optimizer, inner = set_up(made)
        take_steps(made, model, optimizer, range(2))
        path = folder / f"distributed {distributed}"
        made.save(path, {"model": model, "optimizer": optimizer})
        saved = whole(model.named_parameters()), state_of(inner)
        take_steps(made, model, optimizer, range(2, 4))
        ended = whole(model.named_parameters()), state_of(inner)

        made = fabric(save_distributed_checkpoint=distributed)
        model, optimizer, inner = set_up(made, seed=1)
        for group in inner.param_groups:
            group["lr"] = 0.5
        made.load(path, {"model": model, "optimizer": optimizer})
        restored = same_bits(model, inner, saved)
        take_steps(made, model, optimizer, range(2, 4))
        got[f"distributed {distributed}"] = {
            "restored": restored,
            "lr": [group["lr"] for group in inner.param_groups],
            "ended alike": same_bits(model, inner, ended),
            "folder": path.is_dir(),
        }
    return got


class Module(lightning.LightningModule):
    """Makes its model where Lightning has the mesh."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.model: Any = None
        self.before: list[Any] = []

    def configure_model(self) -> None:
        if self.model is None:
            assert self.device_mesh is not None
            self.model = shard(build(self.seed), self.device_mesh)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return loss_of(self.model, number)

    def configure_optimizers(self) -> Any:
        optimizer = Muon(groups_of(self.model))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.before = [self.contents(), self.rates()]

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return whole(self.model.named_parameters()), state_of(self.ours())

    def ours(self) -> Any:
        return self.trainer.optimizers[0]

    def rates(self) -> list[float]:
        return [round(group["lr"], 9) for group in self.ours().param_groups]


def trainer(folder: Path, steps: int, distributed: bool) -> lightning.Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=distributed,
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=0.01,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_trainer(folder: Path) -> dict[str, Any]:
    """A checkpoint restores parameters, momentum and learning rates exactly, in both forms."""
    data = torch.utils.data.DataLoader(list(range(64)))  # type: ignore[arg-type, var-annotated]
    got = {}
    for distributed in (True, False):
        first = Module()
        with narrowly_quiet():
            run = trainer(folder, 3, distributed)
            run.fit(first, data)
            saved, rates = first.contents(), first.rates()
            path = folder / f"{distributed}.ckpt"
            run.save_checkpoint(path)
            second = Module(seed=1)
            again = trainer(folder, 5, distributed)
            again.fit(second, data, ckpt_path=str(path))
        restored, restored_rates = second.before
        got[f"distributed {distributed}"] = {
            "ours": type(first.ours()).__name__,
            "sharded": all(isinstance(p, DTensor) for p in second.parameters()),
            "parameters": equal(restored[0], saved[0]),
            "state": equal(restored[1], saved[1]),
            "lr": restored_rates == rates == [round(x / 4, 9) for x in (0.02, 3e-3, 3e-3)],
            "went on": again.global_step == 5 and not equal(second.contents()[0], saved[0]),
            "owners": sorted(set(second.ours().plan.owners().values())),
        }
    return got


@contextlib.contextmanager
def narrowly_quiet() -> Iterator[None]:
    """Without what Lightning says that is not about the optimizer."""
    with warnings.catch_warnings():
        for message in LIGHTNING_SAYS:
            warnings.filterwarnings("ignore", message=message)
        yield


def page(folder: Path) -> int:
    """The examples of docs/integrations/lightning.md."""
    with narrowly_quiet():
        return run_page("lightning.md", folder)


if __name__ == "__main__":
    serve([fabric_wrapper, fabric_files, lightning_trainer, page])
    dist.destroy_process_group()
