"""The factory that transformers' `Trainer` asks for an optimizer where it shards the model.

Owns the routing there: with FSDP the Trainer refuses a finished optimizer, and builds one from
`optimizer_cls_and_kwargs` itself. Imports nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardmuon.muon import Muon
from shardmuon.routing import param_groups
from shardmuon.runtime import Runtime

__all__ = ["MuonFactory"]


class MuonFactory:
    """`MuonFactory()(model, ...)` is an optimizer for the trainable parameters of `model`.

    For `Trainer(..., optimizer_cls_and_kwargs=(MuonFactory, {"muon": {"lr": 0.02}}))`. The Trainer
    calls any class that is no `Optimizer` so.
    """

    def __call__(
        self,
        opt_model: nn.Module,
        *,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        to_muon: Sequence[str] = (),
        to_adamw: Sequence[str] = (),
        mesh: DeviceMesh | ProcessGroup | None = None,
        runtime: Runtime | None = None,
    ) -> Muon:
        """Route as `shardmuon.param_groups`, whose four settings these are, and build.

        mesh, runtime: as in `shardmuon.Muon`. Learning rates come from the groups alone;
        `TrainingArguments.learning_rate` has no effect. Raises what those two raise.
        """
        groups = param_groups(opt_model, muon=muon, adamw=adamw, to_muon=to_muon, to_adamw=to_adamw)
        return Muon(groups, mesh=mesh, runtime=runtime or Runtime())
