"""Save and load model, optimizer and random numbers with torch.distributed.checkpoint (DCP).

Owns what goes into a checkpoint's tensors: only tensors, under FQN keys, so that DCP never pickles
a value. Group settings go into the manifest. All functions are called by all ranks together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from shardmuon.checkpoint import publish
from shardmuon.exchange import collectives

__all__ = ["load", "save"]


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    *,
    keep_last: int | None = None,
) -> Path:
    """Write and publish the checkpoint after `step` steps; returns its folder.

    `extra` holds JSON values for the manifest. With `keep_last`, older checkpoints are removed
    once the new one is published.
    """
    temporary = publish.final_path(root, step).with_suffix(".tmp")
    first = collectives.rank() == 0
    if first:
        publish.open_temporary(root, step)
    collectives.barrier()
    tensors, groups = _collect(model, optimizer)
    with _alone_is_meant():
        dcp.save(tensors, checkpoint_id=temporary)
    if first:
        manifest = {"step": step, "world_size": collectives.world_size(), "groups": groups}
        publish.publish(temporary, {**manifest, **extra})
        if keep_last is not None:
            publish.prune(root, keep_last)
    collectives.barrier()
    return publish.final_path(root, step)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model, optimizer state and random numbers in place from a published checkpoint.

    Settings of the optimizer's groups (lr, decay, ...) stay as they are: the run's configuration
    decides them, and the caller compares it with the manifest.
    Raises CheckpointError if the checkpoint is of another number of ranks or parameters.
    """
    manifest = publish.read_manifest(path)
    ranks = collectives.world_size()
    if manifest["world_size"] != ranks:
        raise publish.CheckpointError(
            f"{path} was written by {manifest['world_size']} ranks, but this run has {ranks}; "
            "expected the same number"
        )
    tensors, groups = _collect(model, optimizer)
    _compare_groups(path, manifest["groups"], groups)
    with _alone_is_meant():
        dcp.load(tensors, checkpoint_id=path)
    set_model_state_dict(model, tensors["model"])
    settings = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(
        model, optimizer, {"state": tensors["optimizer"], "param_groups": settings}
    )
    _restore_random(tensors["random"])


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """Without a process group DCP warns that it works in a single process, even if told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _collect(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(tensors by section and FQN, group settings as JSON values)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward pass without backward leaves the root's whole parameters registered, which
            # are not those that the optimizer holds.
            module.reshard()
    state = get_optimizer_state_dict(model, optimizer)
    tensors = {
        "model": get_model_state_dict(model),
        "optimizer": state["state"],
        "random": _random_state(),
    }
    groups: Any = state["param_groups"]
    return tensors, [{k: _plain(v) for k, v in group.items()} for group in groups]


def _random_state() -> dict[str, Tensor]:
    """This rank's generator states, under keys of this rank alone."""
    rank = collectives.rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: Mapping[str, Tensor]) -> None:
    for key, value in states.items():
        if key.startswith("cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


def _compare_groups(path: Path, saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    """Parameters must be in the same groups under the same algorithm."""
    for groups in (saved, current):
        for group in groups:
            group["params"] = sorted(group["params"])
    old, new = ([(g.get("algorithm"), g["params"]) for g in gs] for gs in (saved, current))
    for position, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            names = sorted(set(before[1]) ^ set(after[1])) or [f"algorithm {before[0]}, {after[0]}"]
            raise publish.CheckpointError(
                f"{path} does not fit the optimizer: group {position} differs in {names[0]}"
            )
    if len(old) != len(new):
        raise publish.CheckpointError(
            f"{path} has {len(old)} optimizer groups, this run has {len(new)}"
        )


def _plain(value: Any) -> Any:
    """A group setting as a JSON value."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Tensor):
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"optimizer group setting {value!r} has no JSON form")
