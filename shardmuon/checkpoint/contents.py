"""What a checkpoint holds of a model and an optimizer, by parameter name.

Owns the keys (`model.FQN`, `optimizer.FQN.STATE`), and how tensors are matched with those of a
checkpoint: by name, never by position. Reads and changes tensors of this rank only; no collective.
"""

from __future__ import annotations

import base64
import functools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from shardmuon.checkpoint.publish import CheckpointError
from shardmuon.checkpoint.settings import Groups, groups_of, name_of
from shardmuon.checkpoint.storage import Index
from shardmuon.groups import clean_fqn
from shardmuon.muon import Muon

__all__ = [
    "Contents",
    "check_names",
    "check_shapes",
    "collect",
    "forget_state",
    "named_tensors",
    "random_of",
    "random_state",
    "reshard",
    "restore_random",
    "some",
    "targets",
]

_SHOWN = 8


@dataclass(frozen=True)
class Contents:
    """Tensors by key, sharing the memory of model and optimizer.

    aliases: further names of tied weights, with the name under which each is stored.
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    groups: Groups


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Contents:
    """Everything to be saved. Raises CheckpointError for what cannot be."""
    named, aliases = named_tensors(model)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named.items()}
    if optimizer is None:
        return Contents(tensors, aliases, [])
    if isinstance(optimizer, Muon):
        optimizer.state_dict()  # makes state for parameters that a framework has put in since
    for name, parameter in _members(optimizer, named):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"optimizer state {key} of {name} is a {type(value).__name__}; a checkpoint"
                    " holds only tensors"
                )
            tensors[f"optimizer.{name}.{key}"] = value.detach()
    return Contents(tensors, aliases, groups_of(optimizer, named))


def targets(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, index: Index
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(tensors to be overwritten by those of a checkpoint, by key; state to be set to zero).

    Makes state where the optimizer has none yet, frozen parameters included. Raises CheckpointError
    if names or shapes do not fit. Warns of casts, of parameters that had no state when it was saved
    (they start anew) and of saved state whose parameters the optimizer does not hold now.
    """
    if optimizer is not None:
        _make_state(model, optimizer, index)
    found = collect(model, optimizer).tensors
    saved = {key for key in index if optimizer is not None or key.startswith("model.")}
    held = {_owner(key) for key in found if key.startswith("optimizer.")}
    known = {_owner(key) for key in saved if key.startswith("optimizer.")}
    anew = {
        k for k in found.keys() - saved if k.startswith("optimizer.") and _owner(k) not in known
    }
    left = {k for k in saved - found.keys() if k.startswith("optimizer.") and _owner(k) not in held}
    missing, unexpected = found.keys() - saved - anew, saved - found.keys() - left
    check_names(missing, unexpected)
    wanted = {key: tensor for key, tensor in found.items() if key not in anew}
    check_shapes(wanted, index)
    _check_casts(wanted, index)
    casts = [
        f"{key} from {index[key].properties.dtype} to {tensor.dtype}"
        for key, tensor in wanted.items()
        if index[key].properties.dtype != tensor.dtype
    ]
    for text, keys in (
        ("cast while loading", casts),
        ("no saved state, starts anew", anew),
        ("saved state of parameters that the optimizer does not hold", left),
    ):
        if keys:
            warnings.warn(f"{text}: {some(keys)}", stacklevel=2)
    return wanted, [found[key] for key in anew]


def forget_state(optimizer: torch.optim.Optimizer, before: Collection[Tensor]) -> None:
    """Drop the state that `targets` has made for a load that fails; `before` had some already."""
    for parameter in optimizer.state.keys() - before:
        del optimizer.state[parameter]


def random_state() -> dict[str, str]:
    """This rank's generator states as JSON values."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {kind: base64.b64encode(s.numpy().tobytes()).decode() for kind, s in states.items()}


def random_of(states: Mapping[str, str]) -> dict[str, Tensor]:
    """What `random_state` gave; a kind of device that is not here is left out.

    Raises CheckpointError, before anything is changed, for what is no state of a generator.
    """
    here = {"cpu": True, "cuda": torch.cuda.is_available()}
    found = {}
    for kind, text in states.items():
        if here.get(kind, False):
            try:
                content = bytearray(base64.b64decode(text, validate=True))
                found[kind] = torch.frombuffer(content, dtype=torch.uint8)
                torch.Generator(kind).set_state(found[kind])
            except (ValueError, RuntimeError, TypeError) as error:
                raise CheckpointError(f"it has no state of random numbers ({error})") from None
    return found


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Take up `random_of`."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def reshard(model: nn.Module) -> None:
    """Have the parameters registered that the optimizer holds.

    A forward pass without backward leaves the whole parameters of FSDP2's root in their place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters and persistent buffers by FQN, further names of tied ones)."""
    reshard(model)
    named: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        name = clean_fqn(raw)
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"model state {name} is a {type(value).__name__}; a checkpoint holds only tensors"
            )
        if name in named:
            raise CheckpointError(f"two tensors of the model have the name {name}, one as {raw}")
        if id(value) in names:
            aliases[name] = names[id(value)]
        else:
            names[id(value)] = name
            named[name] = value
    return named, aliases


def _members(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(FQN, parameter) of all parameters of the optimizer."""
    names = {tensor: name for name, tensor in named.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield name_of(parameter, names), parameter


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer, index: Index) -> None:
    """Make state for the parameters that have some in the checkpoint and none here."""
    saved = {_owner(key) for key in index if key.startswith("optimizer.")}
    members = _members(optimizer, named_tensors(model)[0])
    wanted = [p for name, p in members if f"optimizer.{name}" in saved and p not in optimizer.state]
    if isinstance(optimizer, Muon):
        optimizer.make_state(wanted)
    elif wanted:
        _take_hidden_step(model, optimizer, wanted)


def _take_hidden_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Sequence[Tensor]
) -> None:
    """Make state of another optimizer in the only public way, by a step with lr 0.

    torch takes it if there is neither state nor gradient; what there is comes back afterwards.
    """
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    kept = dict(optimizer.state)
    optimizer.state.clear()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        get_optimizer_state_dict(model, optimizer)
        kept.update({p: optimizer.state[p] for p in wanted if p in optimizer.state})
    finally:
        optimizer.state.clear()
        optimizer.state.update(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _owner(key: str) -> str:
    """The key of an optimizer state without the name of the state."""
    return key.rpartition(".")[0]


def check_names(missing: Collection[str], unexpected: Collection[str]) -> None:
    """CheckpointError if a checkpoint lacks names or has others."""
    if missing or unexpected:
        raise CheckpointError(
            f"it does not fit; missing: {some(missing)}; unexpected: {some(unexpected)}"
        )


def check_shapes(tensors: Mapping[str, Tensor], index: Index) -> None:
    """CheckpointError unless every tensor has the shape that `index` gives under its name."""
    for key, tensor in tensors.items():
        if index[key].size != tensor.shape:
            raise CheckpointError(
                f"{key} has shape {tuple(index[key].size)} in it, {tuple(tensor.shape)} here"
            )


def _check_casts(tensors: Mapping[str, Tensor], index: Index) -> None:
    """CheckpointError for a dtype of which torch makes no numbers of the tensor's kind."""
    for key, tensor in tensors.items():
        saved = index[key].properties.dtype
        if not _can_become(saved, tensor.dtype):
            raise CheckpointError(f"{key} is {saved} in it, which cannot become {tensor.dtype}")


@functools.cache
def _can_become(saved: torch.dtype, dtype: torch.dtype) -> bool:
    if saved == dtype or saved.is_complex:
        return saved == dtype
    try:
        zero = torch.zeros(saved.itemsize, dtype=torch.uint8, device="cpu").view(saved)
        torch.empty(1, dtype=dtype, device="cpu").copy_(zero)
    except (RuntimeError, TypeError):
        return False
    return True


def some(names: Iterable[object]) -> str:
    """The first of `names` in their order, as text."""
    listed = sorted(map(str, names))
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more if listed else "none"
