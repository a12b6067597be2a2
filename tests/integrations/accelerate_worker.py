"""Cases of accelerate's FSDP2 path, on every rank of one job; see jobs.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardmuon import Muon, plans
from shardmuon.exchange import collectives
from tests.integrations.jobs import serve
from tests.integrations.pieces import (
    batch,
    equal,
    groups_of,
    reference_step,
    run_page,
    same_bits,
    state_of,
    tiny_llama,
    undo_accelerate_on_cpu,
    use_accelerate_on_cpu,
    whole,
)


def accelerator(
    form: str = "SHARDED_STATE_DICT", layer: str = "LlamaDecoderLayer", **more: Any
) -> Accelerator:
    """A new one; the class keeps its state between objects."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        state_dict_type=form,
    )
    made = Accelerator(fsdp_plugin=plugin, **more)
    assert made.is_fsdp2
    return made


def take_steps(made: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    """Train with this rank's batches; losses."""
    losses = []
    for step in steps:
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        made.backward(loss)
        made.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


_plans: Any = plans


class Watched:
    """Counts plans and collectives of the library from construction on."""

    def __init__(self) -> None:
        self._collectives = sum(collectives.calls.values())
        self._plans = 0
        self._make_plan = _plans.make_plan
        _plans.make_plan = self._counting

    def _counting(self, *args: Any, **more: Any) -> Any:
        self._plans += 1
        return self._make_plan(*args, **more)

    def counts(self) -> tuple[int, int]:
        """(plans, collectives) so far."""
        return self._plans, sum(collectives.calls.values()) - self._collectives

    def close(self) -> None:
        _plans.make_plan = self._make_plan


def prepare_and_train(folder: Path) -> dict[str, Any]:
    """`prepare` swaps the parameters; the first step plans for those that are there then."""
    made = accelerator()
    model = tiny_llama()
    watched = Watched()
    inner = Muon(groups_of(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 / (1 + step))
    plain = set(model.parameters())
    model, optimizer, schedule = made.prepare(model, inner, schedule)
    swapped = {p for group in inner.param_groups for p in group["params"]}
    before = watched.counts()
    twin = tiny_llama()
    reference = Muon(groups_of(twin))
    exact = []
    for step in range(3):
        tokens = batch(step)
        made.backward(model(input_ids=tokens, labels=tokens).loss)
        norm = made.clip_grad_norm_(model.parameters(), 0.5)
        reference_step(twin, reference, model)
        optimizer.step()
        exact.append(equal(whole(model.named_parameters()), whole(twin.named_parameters())))
        schedule.step()
        for group, other in zip(inner.param_groups, reference.param_groups, strict=True):
            other["lr"] = group["lr"]
        optimizer.zero_grad()
    watched.close()
    return {
        "wrapped": type(optimizer).__name__,
        "inner is ours": optimizer.optimizer is inner,
        "all are DTensors": all(isinstance(p, DTensor) for p in swapped),
        "all were replaced": not plain & swapped,
        "in the model": swapped == set(model.parameters()),
        "before the first step": before,
        "plans after": watched.counts()[0] - 2,  # the twin's and the one after the swap
        "dead state": len(inner.state.keys() - swapped),
        "equal to one process": exact,
        "clipped": float(norm) > 0.5,
        "lr": [round(group["lr"], 9) for group in inner.param_groups],
        "owners": sorted(set(optimizer.optimizer.plan.owners().values())),
    }


def prepared_at_once(folder: Path) -> dict[str, Any]:
    """`prepare()` of the optimizer frees the state of replaced parameters before any step."""
    made = accelerator()
    model = tiny_llama()
    model, optimizer = made.prepare(model, Muon(groups_of(model)))
    inner = optimizer.optimizer
    kept = sum(not isinstance(p, DTensor) for p in inner.state)
    inner.prepare()
    return {
        "kept until then": kept,
        "dead": sum(not isinstance(p, DTensor) for p in inner.state),
        "as the parameter": all(
            value.placements == parameter.placements
            for parameter, state in inner.state.items()
            for kind, value in state.items()
            if kind != "step"
        ),
    }


def save_and_continue(folder: Path) -> dict[str, Any]:
    """A new process's objects load the state and repeat every bit; both forms of files."""
    outcome = {}
    for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        made = accelerator(form)
        model = tiny_llama()
        model, optimizer = made.prepare(model, Muon(groups_of(model)))
        take_steps(made, model, optimizer, range(2))
        made.save_state(str(folder / form))
        saved = whole(model.named_parameters()), state_of(optimizer.optimizer)
        losses = take_steps(made, model, optimizer, range(2, 4))
        ended = whole(model.named_parameters()), state_of(optimizer.optimizer)

        made = accelerator(form)
        model = tiny_llama(seed=1)
        fresh = Muon(groups_of(model), lr=0.5)
        model, optimizer = made.prepare(model, fresh)
        made.load_state(str(folder / form))
        restored = same_bits(model, fresh, saved)
        outcome[form] = {
            "restored": restored,
            "losses": take_steps(made, model, optimizer, range(2, 4)) == losses,
            "ended alike": same_bits(model, fresh, ended),
            "dead state": sum(not isinstance(p, DTensor) for p in fresh.state),
        }
    return outcome


def saved_before_a_step(folder: Path) -> dict[str, bool]:
    """Nothing has planned or stepped: the file holds zeros, and loads."""
    made = accelerator()
    model = tiny_llama()
    model, optimizer = made.prepare(model, Muon(groups_of(model)))
    made.save_state(str(folder / "first"))
    state = state_of(optimizer.optimizer)
    made.load_state(str(folder / "first"))
    return {
        "zero": not any(bool(value.count_nonzero()) for value in state.values()),
        "loaded": equal(state_of(optimizer.optimizer), state),
    }


def accumulation_and_bf16(folder: Path) -> dict[str, Any]:
    """Skipped steps change nothing; bf16 compute leaves float32 parameters and momentum."""
    made = accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = tiny_llama()
    model, optimizer = made.prepare(model, Muon(groups_of(model)))
    changed = []
    for step in range(4):
        before = whole(model.named_parameters())
        tokens = batch(step)
        with made.accumulate(model):
            made.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        changed.append(not equal(whole(model.named_parameters()), before))
    dtypes = {str(v.dtype) for s in optimizer.optimizer.state.values() for v in s.values()}
    return {"changed": changed, "dtypes": sorted(dtypes)}


def switched_by_hand(folder: Path) -> dict[str, Any]:
    """The swap as a function of its own, without an Accelerator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    optimizer = Muon(groups_of(model), lr=0.02)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            stand_in = torch.empty(1)
            stand_in.data_ptr = parameter.data_ptr()  # type: ignore[method-assign]
            group["params"][position] = stand_in
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    after = dict(model.named_parameters())
    fsdp2_switch_optimizer_parameters(optimizer, {before[name]: after[name] for name in before})
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return {
        "dead state": len(optimizer.state.keys() - set(model.parameters())),
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "owners": optimizer.plan.owners(),
    }


class _Rows(nn.Module):
    """Parameters of one row each: of two ranks the second one holds nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, rows) for rows in (8, 1, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.b(self.a(x))
        second: torch.Tensor = self.d(self.c(x))
        return first + second


def sharded_before(folder: Path) -> str:
    """accelerate mixes up parameters of which a rank holds nothing; all ranks are told."""
    made = accelerator(layer="Linear")
    torch.manual_seed(0)
    model = _Rows()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    model, optimizer = made.prepare(model, Muon(groups_of(model)))
    model(torch.randn(4, 8)).square().mean().backward()
    before = whole(model.named_parameters())
    said = _refusal(optimizer.step)
    assert equal(whole(model.named_parameters()), before)
    return said


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat_param = nn.Parameter(torch.zeros(96))


def flat_parameters(folder: Path) -> dict[str, str]:
    """What FSDP1 and ZeRO leave of matrices is refused in words; both need GPUs, these do not."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    zero = Muon(groups_of(model))
    for group in zero.param_groups:  # as ZeRO does: one flat partition for each group
        group["params"] = [nn.Parameter(torch.zeros(96))]
    views = Muon([("weight", nn.Parameter(torch.zeros(8, 12)))])
    views.param_groups[0]["params"][0].data = torch.zeros(48)  # FSDP1 with use_orig_params
    return {
        "FSDP1": _refusal(lambda: groups_of(_Flat())),
        "FSDP1, original parameters": _refusal(views.step),
        "ZeRO": _refusal(zero.step),
    }


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def without_the_patch(folder: Path) -> dict[str, Any]:
    """The public way on CPUs is DDP, and says nothing; last, because it undoes the patch."""
    undo_accelerate_on_cpu()
    del os.environ["ACCELERATE_TORCH_DEVICE"]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    made = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = tiny_llama()
    inner = Muon(groups_of(model), mesh=dist.group.WORLD)
    model, optimizer = made.prepare(model, inner)
    take_steps(made, model, optimizer, range(1))
    return {
        "fsdp2": made.is_fsdp2,
        "kind": type(model).__name__,
        "owners": sorted(set(inner.plan.owners().values())),
    }


def page(folder: Path) -> int:
    """The examples of docs/integrations/accelerate.md."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return run_page("accelerate.md", folder)


def replicas(folder: Path) -> dict[str, Any]:
    """HSDP, 2 replicas of 2 shards; only on 4 ranks."""
    # accelerate slices a mesh in a way that torch will no longer want.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
    parallel = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    made = accelerator(parallelism_config=parallel)
    model = tiny_llama()
    model, optimizer = made.prepare(model, Muon(groups_of(model)))
    twin = tiny_llama()
    reference = Muon(groups_of(twin))
    exact = []
    for step in range(2):
        tokens = batch(step)
        made.backward(model(input_ids=tokens, labels=tokens).loss)
        reference_step(twin, reference, model)
        optimizer.step()
        optimizer.zero_grad()
        exact.append(equal(whole(model.named_parameters()), whole(twin.named_parameters())))
    made.save_state(str(folder / "state"))
    saved = whole(model.named_parameters()), state_of(optimizer.optimizer)
    losses = take_steps(made, model, optimizer, range(2, 4))
    made.load_state(str(folder / "state"))
    optimizer.optimizer.check_replicas()
    return {
        "placements": [str(p) for p in next(iter(model.parameters())).placements],
        "equal to one process": exact,
        "restored": same_bits(model, optimizer.optimizer, saved),
        "losses": take_steps(made, model, optimizer, range(2, 4)) == losses,
        "owners": sorted(set(optimizer.optimizer.plan.owners().values())),
    }


if __name__ == "__main__":
    use_accelerate_on_cpu()
    Accelerator()  # makes the process group
    two = [
        prepare_and_train,
        prepared_at_once,
        save_and_continue,
        saved_before_a_step,
        accumulation_and_bf16,
        switched_by_hand,
        sharded_before,
        flat_parameters,
        page,
        without_the_patch,
    ]

    serve(two if dist.get_world_size() == 2 else [replicas])
    dist.destroy_process_group()
