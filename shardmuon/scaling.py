"""Loss scaling on several ranks: all skip an overflowed step together, or none does.

Owns how ranks agree that a gradient has overflowed. All else, such as when the scale grows, is
torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.clipping import by_kind, device_types
from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks agree: the same arguments, methods and state dict.

    torch's own looks for inf and nan on each rank and each mesh alone, refuses plain tensors beside
    DTensors, and ranks that find nothing step without the others. This one reduces what all ranks
    have found with one small all-reduce for each `unscale_`, which is therefore collective: all
    ranks call it (or `step`, which does) the same number of times, even without gradients. The
    scale then stays equal on all ranks.

    A rank that has no loss, such as a pipeline stage before the last, calls
    `scaler.scale(torch.zeros((), device=...))` once, so that its scale exists.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Multiply gradients in place by `inv_scale` []; {device of the scale: 1.0 if all stop}.

        torch calls it for each optimizer, and asks its answer whether to step.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise ValueError("sparse gradients are not supported")
        if not allow_fp16 and any(g.dtype == torch.float16 for g in gradients):
            raise ValueError(
                "gradients are float16, whose range is what the scale saves; keep parameters in"
                " float32, and compute in float16 by MixedPrecisionPolicy or autocast"
            )
        found = found_inf.to(collectives.meeting_device(device_types(parameters)))
        with torch.no_grad():
            for (device, _), same in by_kind(local(g) for g in gradients).items():
                here = _unscale_(same, found_inf.to(device, copy=True), inv_scale.to(device))
                found = torch.maximum(found, here.to(found.device))
            collectives.all_reduce_max_(found)
        return {found_inf.device: found.to(found_inf.device)}


def _unscale_(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    """Multiply plain gradients of one kind in place; `found_inf` [], 1.0 if one is not finite."""
    if gradients[0].is_cuda and gradients[0].dtype == torch.bfloat16:
        # torch 2.11 has no kernel for these. The largest magnitude is nan or inf if one element is.
        largest = torch.stack(torch._foreach_norm(gradients, float("inf")))
        torch._foreach_mul_(gradients, inv_scale)
        return torch.maximum(found_inf, (~largest.isfinite().all()).to(found_inf.dtype))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
    return found_inf
