"""Cases of transformers' Trainer, on every rank of one job or in one process; see jobs.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

from shardmuon import Muon
from shardmuon.integrations.transformers import MuonFactory
from tests.integrations.jobs import serve
from tests.integrations.pieces import (
    batch,
    equal,
    groups_of,
    run_page,
    same_bits,
    state_of,
    tiny_llama,
    undo_accelerate_on_cpu,
    use_accelerate_on_cpu,
    whole,
)

Trainer: Any = transformers.Trainer  # a wrapped optimizer and a factory are not in its types
SETTINGS = {"muon": {"lr": 0.02}, "adamw": {"lr": 3e-3, "betas": (0.9, 0.95)}}
FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


def rows() -> list[dict[str, Tensor]]:
    """A data set of 32 sequences of 8 tokens."""
    tokens = batch(0, rank=0, rows=32)
    return [{"input_ids": each, "labels": each} for each in tokens]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """4 steps, saved after 2, in a process that counts as new."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **more,
    )
    assert made.device.type == "cpu"  # makes the process group
    return made


def outcome(trainer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole parameters and whole optimizer state."""
    inner = trainer.optimizer.optimizer
    return whole(trainer.model_wrapped.named_parameters()), state_of(inner)


def with_optimizers(model: Any, args: TrainingArguments) -> tuple[Any, Muon]:
    """A Trainer that is given optimizer and schedule."""
    mesh = dist.group.WORLD if dist.is_initialized() else None
    optimizer = Muon(groups_of(model), mesh=mesh)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    both = (optimizer, schedule)
    return Trainer(model=model, args=args, train_dataset=rows(), optimizers=both), optimizer


def whole_parameters(folder: Path) -> dict[str, Any]:
    """One process, or DDP: trained, saved, and continued from the middle by other objects."""
    args = arguments(folder, use_cpu=True)
    trainer, optimizer = with_optimizers(tiny_llama(), args)
    called = []
    state_dict = optimizer.state_dict

    def counting() -> dict[str, Any]:
        called.append(1)
        return state_dict()

    optimizer.state_dict = counting  # type: ignore[method-assign]
    trainer.train()
    ended = outcome(trainer)
    got = {
        "wrapped": type(trainer.optimizer).__name__,
        "ours": trainer.optimizer.optimizer is optimizer,
        "state dicts taken": len(called) - 1,  # one by accelerate's prepare
        "owners": sorted(set(optimizer.plan.owners().values())),
        "lr": [round(group["lr"], 9) for group in optimizer.param_groups],
    }
    args = arguments(folder, use_cpu=True)
    trainer, optimizer = with_optimizers(tiny_llama(seed=1), args)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {**got, "resumed": same_bits(trainer.model_wrapped, optimizer, ended)}


def sharded_by_factory(folder: Path) -> dict[str, Any]:
    """FSDP2: the Trainer asks the factory, shards, trains, saves, and goes on from the middle."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    use_accelerate_on_cpu()
    chosen = (MuonFactory, SETTINGS)
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(folder, **FSDP),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=chosen,
    )
    trainer.train()
    ended = outcome(trainer)
    inner = trainer.optimizer.optimizer
    got = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "ours": type(inner).__name__,
        "sharded": all(isinstance(p, DTensor) for p in inner.state),
        "decays": [group["weight_decay"] for group in inner.param_groups],
        "owners": sorted(set(inner.plan.owners().values())),
    }
    again = Trainer(
        model=tiny_llama(seed=1),
        args=arguments(folder / "again", **FSDP),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=chosen,
    )
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed = same_bits(again.model_wrapped, again.optimizer.optimizer, ended)
    model = tiny_llama()
    try:
        Trainer(
            model=model,
            args=arguments(folder, **FSDP),
            train_dataset=rows(),
            optimizers=(Muon(groups_of(model)), None),
        )
        refused = "accepted"
    except RuntimeError as error:
        refused = str(error)
    del os.environ["ACCELERATE_TORCH_DEVICE"]
    undo_accelerate_on_cpu()
    return {**got, "resumed": resumed, "optimizers": refused}


def sharded_by_transformers(folder: Path) -> dict[str, Any]:
    """A model that transformers itself has sharded takes `optimizers=`."""
    source = folder / "model"
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(source)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(
        source, distributed_config=DistributedConfig(fsdp_size=2)
    )
    before = whole(model.named_parameters())
    args = arguments(folder, use_cpu=True, save_only_model=True)
    trainer, optimizer = with_optimizers(model, args)
    trainer.train()
    return {
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "trained": not equal(whole(model.named_parameters()), before),
        "owners": sorted(set(optimizer.plan.owners().values())),
    }


def without_the_patch(folder: Path) -> dict[str, Any]:
    """`fsdp` on CPUs is DDP, and nothing says so."""
    args = arguments(folder, use_cpu=True, **FSDP)
    trainer = Trainer(
        model=tiny_llama(),
        args=args,
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(MuonFactory, {**SETTINGS, "mesh": dist.group.WORLD}),
    )
    trainer.train()
    return {"fsdp2": trainer.accelerator.is_fsdp2, "kind": type(trainer.model_wrapped).__name__}


def page(folder: Path) -> int:
    """The examples of docs/integrations/trainer.md; they run on one process and on several."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return run_page("trainer.md", folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        cases = [whole_parameters, sharded_by_factory, sharded_by_transformers, without_the_patch]
        serve([*cases, page])
        dist.destroy_process_group()
    else:
        serve([whole_parameters, page])
