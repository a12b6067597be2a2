"""`python -m shardmuon bench share`: one large matrix, by one owner and by a team of all ranks.

Owns what is measured and how it is shown: steps of an optimizer that has this matrix alone, and the
error of its update against float64.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import local
from shardmuon.muon import Muon
from shardmuon.orthogonalize.choice import milliseconds
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.planning.layout import chunk
from shardmuon.planning.report import table
from shardmuon.rules.muon import update_scale
from shardmuon.runtime import Runtime
from shardmuon.tools.accuracy import error
from shardmuon.training import place
from shardmuon.training.config import Mesh
from shardmuon.training.place import Place

__all__ = ["run"]

WARM, ROUNDS = 4, 12
RUNTIMES = {"one owner": Runtime(), "shared": Runtime(share_large=True)}
HEADER = ("matrix", "ranks with work", "step ms", "range", "error against float64")


def run(rows: int, cols: int) -> None:
    """Print a table for a float32 matrix [rows, cols], sharded by rows. Collective."""
    here = place.start(Mesh(), place.choose_device(Mesh()))
    gradient = _block(rows, cols, here)
    steps = {name: _Step(rows, cols, gradient, runtime, here) for name, runtime in RUNTIMES.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + ROUNDS):
        for name, step in steps.items():
            took = _slowest(step.milliseconds())
            times[name] += [took] if turn >= WARM else []
    right = _right(rows, cols, gradient, here)
    lines = []
    for name, step in steps.items():
        owners = len(set(step.optimizer.plan.owners().values()))
        middle, spread = statistics.median(times[name]), (min(times[name]), max(times[name]))
        wrong = _slowest(error(step.update(), right))
        lines.append(
            (name, str(owners), f"{middle:.2f}", "{:.2f} to {:.2f}".format(*spread), f"{wrong:.2e}")
        )
    if here.first:
        where = torch.cuda.get_device_name() if here.device.type == "cuda" else "CPU"
        print(f"{rows} x {cols} on {here.ranks} rank(s), {where}, torch {torch.__version__}\n")
        print("\n".join(table(HEADER, lines)))
    collectives.barrier()
    collectives.stop()


class _Step:
    """An optimizer over one zero matrix whose gradient is always the same."""

    def __init__(
        self, rows: int, cols: int, gradient: Tensor, runtime: Runtime, here: Place
    ) -> None:
        self.parameter = nn.Parameter(_placed(torch.zeros_like(gradient), rows, cols, here))
        self.parameter.grad = _placed(gradient, rows, cols, here)
        self.optimizer = Muon(
            [("matrix", self.parameter)], lr=1.0, weight_decay=0.0, momentum=0.0, runtime=runtime
        )

    def milliseconds(self) -> float:
        return milliseconds(lambda _: self.optimizer.step(), local(self.parameter))

    def update(self) -> Tensor:
        """This rank's rows of one update, without the factor for its shape."""
        before = local(self.parameter).double()
        self.optimizer.step()
        rows, cols = self.parameter.shape
        update: Tensor = before - local(self.parameter)
        return update / update_scale(rows, cols, None)


def _block(rows: int, cols: int, here: Place) -> Tensor:
    start, stop = chunk(0, rows, here.ranks, here.rank)
    generator = torch.Generator(here.device).manual_seed(here.rank)
    return torch.randn(stop - start, cols, generator=generator, device=here.device)


def _placed(block: Tensor, rows: int, cols: int, here: Place) -> Tensor:
    if here.mesh is None:
        return block
    return DTensor.from_local(
        block, here.mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, cols)),
        stride=(cols, 1),
    )  # fmt: skip


def _right(rows: int, cols: int, gradient: Tensor, here: Place) -> Tensor:
    """This rank's rows of the same polynomial in float64, of the gradient in the wire's dtype."""
    wire = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    sizes = [
        stop - start for start, stop in (chunk(0, rows, here.ranks, r) for r in range(here.ranks))
    ]
    padded = gradient.new_zeros(max(sizes), cols)
    padded[: len(gradient)] = gradient
    everyones = [padded]
    if here.mesh is not None:
        gathered, work = collectives.all_gather(padded.flatten(), here.mesh.get_group(0))
        work.wait()
        everyones = list(gathered.view(here.ranks, -1, cols))
    whole = torch.cat([each[:size] for each, size in zip(everyones, sizes, strict=True)])
    whole = whole.to(wire).double()
    updates = newton_schulz(whole, schedule_of("keller", 5), 1e-7, torch.float64)
    return updates[sum(sizes[: here.rank]) :][: sizes[here.rank]]


def _slowest(value: float) -> float:
    """The largest of all ranks."""
    values: Sequence[float] = collectives.gather_objects(value)
    return max(values)
