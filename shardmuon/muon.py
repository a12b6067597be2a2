"""Muon for sharded parameters, as an ordinary `torch.optim.Optimizer`.

Owns parameter groups and state: who has which state from when to when, and what a state dict may
change. How a step is planned, exchanged and run is the engine's; what it computes is the rules'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from shardmuon.engine import Engine, StepStats
from shardmuon.entries import check_devices, parameter_names
from shardmuon.exchange.blocks import as_device_mesh, local
from shardmuon.groups import (
    ALGORITHMS,
    MUON,
    check_parameter,
    check_settings,
    complete_group,
    updates_matrices,
)
from shardmuon.limits import advice, show
from shardmuon.orthogonalize.coefficients import KELLER, Coefficients
from shardmuon.planning.matrix import AUTO
from shardmuon.planning.plan import Plan
from shardmuon.runtime import Runtime
from shardmuon.state import new_counter, new_state
from shardmuon.state_dicts import casts_in, check_state_dict, counter

__all__ = ["Muon", "StepStats"]

_OWN_KEYS = ("param_names", "mesh", "momentum_dtype")
"""Group keys that describe the tensors here; a state dict does not change them."""


class Muon(Optimizer):
    r"""Muon that orthogonalizes every whole matrix on one owner rank; AdamW for the rest.

    Arguments, names, defaults and arithmetic are those of :class:`torch.optim.Muon`. On one process
    with fp32 parameters and ``ns_dtype=torch.bfloat16`` results are bit-equal to it, on a GPU with
    ``Runtime(deterministic=True)``; on several ranks they are those of one process, whatever the
    sharding.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups of either. Parameters are plain
            tensors or DTensors (FSDP2) and must be final: build the optimizer after
            ``fully_shard``. A group with ``algorithm="adamw"`` takes AdamW, with the defaults of
            ``torch.optim.AdamW`` for keys that it does not give. Named parameters are planned and
            reported by name.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: decoupled decay, ``P <- P (1 - lr weight_decay)``.
        momentum: weight of the past in the running average of gradients, in [0, 1).
        nesterov: orthogonalize ``lerp(G, M, momentum)`` instead of ``M``.
        ns_coefficients: ``(a, b, c)`` of the quintic for all steps, a list of one triple per step,
            or the name of a preset: ``"keller"``, ``"polar_express"``, ``"you"``, ``"cubic"``.
        eps: smallest Frobenius norm by which a matrix is divided. ``None``: any matrix but zero is
            divided by its norm, so that an update does not depend on the gradient's scale.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        adjust_lr_fn: ``None`` or ``"original"`` (factor ``sqrt(max(1, rows / cols))``),
            ``"match_rms_adamw"`` (``0.2 sqrt(max(rows, cols))``), or ``"spectral"``
            (``sqrt(rows / cols)``, which ``torch.optim.Muon`` does not have); of the global shape.
        ns_dtype: dtype of Newton-Schulz and of what is exchanged: ``torch.bfloat16`` or
            ``torch.float32``. ``None``: bf16 on CUDA, fp32 on CPU.
        ns_method: how Newton-Schulz multiplies: ``"standard"`` as torch does; ``"symmetric"``
            computes symmetric products by half; ``"gram"`` iterates on the Gram matrix, both in
            float16 on GPUs, with fewer operations, and equal within rounding. ``"auto"``: the
            quickest for each shape, measured once per GPU; standard on CPUs and with
            ``Runtime(deterministic=True)``.
        momentum_dtype: dtype of the momentum buffer; ``None``: the parameter's.
        mesh: DeviceMesh or process group (DDP's) over which *plain* tensors are replicated, so
            that its ranks share the work. DTensors bring their own. A group may have its own.
        runtime: how steps run; see :class:`shardmuon.Runtime`.
        **keys: further group keys, as defaults of all groups that update matrices, such as
            ``algorithm="normuon"``, ``cautious_weight_decay``, ``momentum_warmup`` or ``ns_period``
            with ``ns_block``; the guide and the page on variants list them.

    Raises:
        ValueError: a value out of range, a misspelt key, or a parameter that the group's algorithm
            cannot take, that is given twice or lies on another device; the message names it.
        TypeError: an unknown argument, or something that is no tensor among the parameters.

    Settings are checked here, by `add_param_group` and `load_state_dict` before they change
    anything, and again in each step, because anyone may write into `param_groups`; there a tensor
    on a GPU is not read.

    All ranks of a mesh must call ``step`` together, with the same parameters. Everything else,
    state dicts included, is local.
    """

    def __init__(  # noqa: PLR0913  (torch.optim.Muon's arguments)
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER,
        eps: float | None = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        ns_method: str = AUTO,
        momentum_dtype: torch.dtype | None = None,
        mesh: DeviceMesh | ProcessGroup | None = None,
        runtime: Runtime = Runtime(),  # noqa: B008  (frozen)
        **keys: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "ns_method": ns_method,
            "momentum_dtype": momentum_dtype,
            **keys,
        }
        if not isinstance(runtime, Runtime):
            raise ValueError(f"runtime must be a shardmuon.Runtime, got {show(runtime)}")
        _check_defaults(defaults, keys)
        self._engine = Engine(runtime, as_device_mesh(mesh))
        super().__init__(params, defaults)

    # -- a step ---------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo  # type: ignore[untyped-decorator,unused-ignore]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; collective over the meshes of the parameters.

        closure: re-evaluates the model with gradients and returns the loss, which is returned.

        Raises, on all ranks and with nothing changed, RuntimeError if ranks have different plans,
        if a parameter has a gradient on some ranks only, or if a gradient is not finite (`Runtime`
        says when), and ValueError if a rank has a layout or a gradient that it cannot use. On GPUs
        an error that a step of a known plan finds comes at the next `step()` or `check()`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reconcile_state()
        self._engine.step(self.param_groups, self.state)
        return loss

    def prepare(self) -> None:
        """Make the plan and prove that all ranks made the same; collective. `step` does it too.

        On GPUs one rank of each mesh first measures which Newton-Schulz methods are quickest, if no
        cache file says so, in at most about two seconds.
        """
        self._reconcile_state()
        self._engine.prepare(self.param_groups)

    def check(self) -> None:
        """Raise an error that a step on a GPU has found but not raised yet; waits for that step."""
        self._engine.check()

    def check_replicas(self) -> None:
        """Compare a hash of all parameters along replicated axes; collective, waits for the device.

        Raises RuntimeError, the same on all ranks of a mesh, naming a parameter that differs. Call
        it once before training: neither `fully_shard` nor this class makes replicas start alike.
        """
        self._engine.check_replicas(self.param_groups)

    @property
    def plan(self) -> Plan:
        """Who owns which matrix. Made locally, without a collective."""
        return self._engine.plan(self.param_groups)

    @property
    def stats(self) -> StepStats:
        """What the last step did on this rank."""
        return self._engine.stats

    def measure_next_step(self) -> None:
        """Let the next step also measure `stats.orthogonality_error`, in float64. Local."""
        self._engine.measure_next_step()

    @property
    def runtime(self) -> Runtime:
        """How steps run."""
        return self._engine.runtime

    # -- groups and state -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and make its state; see the class for its keys. No collective.

        Raises what the class does, with nothing added.
        """
        given = _checked(param_group)
        group = complete_group(given, self.defaults)
        _check_names(given)
        _check_new(given["params"], self.param_groups)
        super().add_param_group(group)
        try:
            # The base class fills in the constructor's defaults, which are Muon's.
            own = {"algorithm", *ALGORITHMS[group["algorithm"]].keys}
            for key in self.defaults.keys() - own:
                del group[key]
            as_device_mesh(group.get("mesh"))
            names = parameter_names(self.param_groups)
            check_settings(group)
            for name, parameter in zip(names[-1], group["params"], strict=True):
                check_parameter(name, parameter, group)
            _check_unique([name for names_of_group in names for name in names_of_group])
            check_devices(self.param_groups, self._engine.default_mesh)
            self._reconcile_state()
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> StateDict:
        """As torch's: integer keys, this rank's shards. Local, and changes nothing."""
        self._reconcile_state()
        packed = super().state_dict()
        for group in packed["param_groups"]:
            if "mesh" in group:  # where ranks are is no business of a file; torch wants the key
                group["mesh"] = None
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load ours, or that of `torch.optim.Muon` into an optimizer of muon groups only. Local.

        Settings such as lr come from `state_dict`; keys that it does not have keep their values.
        Names stay, and momentum keeps the dtype it has here; a cast is a warning. Raises
        ValueError, with nothing changed, if a group's algorithm or the way in which its parameters
        are cut differs, if the state dict has no settings for it or settings that are out of range,
        or if state does not fit: other kinds, shapes or placements, or of parameters in no group.
        """
        self._reconcile_state()
        check_state_dict(self.param_groups, state_dict)
        if casts := casts_in(self.param_groups, state_dict):
            # Before anything is changed: a warning may be made an error.
            warnings.warn(", ".join(casts), stacklevel=2)
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before, strict=True):
            for key in _OWN_KEYS:
                group.pop(key, None)
            for key, value in old.items():
                group.setdefault(key, value)
        self._restore_dtypes(state_dict)
        for parameter in [p for p, state in self.state.items() if not state]:
            del self.state[parameter]  # it starts anew
        self._reconcile_state()
        self._engine.forget()

    def make_state(self, parameters: Iterable[Tensor]) -> None:
        """Make zero state for those of `parameters` that have none, frozen ones included. Local."""
        wanted = {p for p in parameters if p not in self.state}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in wanted:
                    self.state[parameter] = new_state(parameter, group)

    def _restore_dtypes(self, state_dict: StateDict) -> None:
        """Undo the base class's cast to the parameter's dtype: it costs fp32 momentum its bits."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                kinds = ALGORITHMS[group["algorithm"]].state
                for kind, tensor in self.state.get(parameter, {}).items():
                    given = state_dict["state"][key][kind]
                    if kinds[kind].form == "counter":
                        value = new_counter(parameter).copy_(counter(given))
                    else:
                        dtype = kinds[kind].dtype_for(parameter, group)
                        value = given.to(device=tensor.device, dtype=dtype)
                    self.state[parameter][kind] = value.clone() if value is given else value

    def _reconcile_state(self) -> None:
        """Make state for trainable parameters without it; drop that of parameters in no group.

        Frameworks replace a group's tensors after construction and tell nobody. State that is not
        zero cannot follow them: which new tensor replaces which old one is not known.
        """
        members = {p: group for group in self.param_groups for p in group["params"]}
        new = [p for p in members if p.requires_grad and p not in self.state]
        dead = [p for p in self.state if p not in members]
        if new and any(_is_nonzero(value) for p in dead for value in self.state[p].values()):
            raise RuntimeError(
                f"{len(dead)} parameters were replaced by other tensors after training had begun;"
                " their optimizer state would be lost. Build the optimizer after the model is"
                " wrapped, or load a state dict after replacing parameters"
            )
        for parameter in dead:
            del self.state[parameter]
        if dead:
            self._engine.forget()
        for parameter in new:
            self.state[parameter] = new_state(parameter, members[parameter])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": self._engine}


def _check_defaults(defaults: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse defaults that a group without keys of its own could not have. keys: not torch's."""
    group = {"algorithm": MUON, **defaults}
    if not updates_matrices(group):
        raise ValueError(
            f"algorithm {group['algorithm']!r} is not one for matrices: give it groups"
        )
    known = {"algorithm", *ALGORITHMS[group["algorithm"]].keys}
    for key in keys:
        if key not in known:
            near = advice(key, sorted(known))
            raise TypeError(f"Muon() got an unexpected keyword argument {key!r}{near}")
    check_settings({**ALGORITHMS[group["algorithm"]].defaults, **group})


def _checked(param_group: Any) -> dict[str, Any]:
    """The group with its parameters, or (name, parameter) pairs, as a list of nothing else."""
    if not isinstance(param_group, Mapping):
        raise TypeError(f"a parameter group must be a dict, got {show(param_group)}")
    if "params" not in param_group:
        raise ValueError(f"a parameter group needs the key 'params', got {show(list(param_group))}")
    params = param_group["params"]
    if isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, (set, frozenset, str, Mapping)):
        raise ValueError(f"params must be an ordered iterable of tensors, got {type(params)}")
    listed = list(params)
    for each in listed:
        pair = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
        if not isinstance(each[1] if pair else each, Tensor):
            raise TypeError(f"params must be tensors or (name, tensor) pairs, got {show(each)}")
    return {**param_group, "params": listed}


def _check_new(listed: Sequence[Any], groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a parameter that is listed twice or is in a group already, by its names."""
    seen = {
        parameter: name
        for group, names in zip(groups, parameter_names(groups), strict=True)
        for parameter, name in zip(group["params"], names, strict=True)
    }
    for position, each in enumerate(listed):
        name, parameter = each if isinstance(each, tuple) else (f"{len(groups)}.{position}", each)
        if parameter in seen:
            raise ValueError(
                f"the same parameter is given twice, as {seen[parameter]} and as {name}; tied"
                " weights and groups that overlap must name it once"
            )
        seen[parameter] = name


def _check_names(group: Mapping[str, Any]) -> None:
    """Refuse names, which may have come as a key of their own, that are not one per parameter."""
    names, count = group.get("param_names", []), len(group["params"])
    if "param_names" not in group:
        return
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"param_names must be a list of text, got {show(names)}")
    if len(names) != count:
        raise ValueError(f"param_names has {len(names)} names for {count} parameters")


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"parameter names must be unique, given twice: {', '.join(twice[:8])}")


def _is_nonzero(value: Tensor) -> bool:
    return bool(local(value).count_nonzero())
