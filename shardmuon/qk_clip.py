"""QK-clip: weights of queries and keys shrink where a head's attention logits have grown too large.

The rule is that of MuonClip (Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534,
algorithm 1). S_h is the largest attention logit of head h in the forward passes of a step, t the
threshold (100 there). After the optimizer's step, gamma_h = t / S_h where S_h > t, else 1, and

    rows of queries of head h    *= gamma_h ** alpha           alpha is 1/2 there
    rows of keys of head h       *= gamma_h ** (1 - alpha)
    rows of queries of head h that meet keys which all heads share    *= gamma_h

so that all logits of head h shrink by gamma_h and no other head's do. The third line is there for
the rotary part of multi-head latent attention (MLA); grouped-query attention takes it likewise.

Owns which rows belong to which head, and that every rank scales the rows that it holds by the same
bits. One small all-reduce serves all layers, and the host never waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardmuon.exchange import collectives
from shardmuon.exchange.blocks import layout_of, local

__all__ = ["HeadRows", "QKHeads", "qk_clip_"]


@dataclass(frozen=True)
class HeadRows:
    """Rows of a weight or bias that belong to heads, one head after the other.

    parameter: [rows, in] or [rows]; with `transposed`, stored [in, rows]. start: the first row of
    the first head. stride: from the first row of a head to that of the next; None: head_dim.
    """

    parameter: Tensor
    heads: int
    head_dim: int
    start: int = 0
    stride: int | None = None
    transposed: bool = False

    @property
    def step(self) -> int:
        """Rows from one head to the next."""
        return self.head_dim if self.stride is None else self.stride

    @property
    def stop(self) -> int:
        """One after the last row of the last head."""
        return self.start + (self.heads - 1) * self.step + self.head_dim


Rows = Tensor | HeadRows


@dataclass(frozen=True, kw_only=True)
class QKHeads:
    """Weights of one attention layer and its largest logits; see `qk_clip_`.

    max_logits: [heads], what the softmax of each head gets at most, scale included. Plain: of this
    rank's data, -inf where it knows nothing of a head. DTensor: its part is of this rank's heads.
    query, key: weights, and biases if there are any. A tensor is [heads * head_dim, in] or [heads *
    head_dim], a key's of as many heads or fewer; `HeadRows` says which rows of a larger one it is.
    rotary_query: rows of queries that meet keys which all heads share, as in MLA.
    """

    max_logits: Tensor
    query: Rows | Sequence[Rows]
    key: Rows | Sequence[Rows]
    rotary_query: Rows | Sequence[Rows] = ()


@torch.no_grad()
def qk_clip_(
    layers: QKHeads | Iterable[QKHeads],
    *,
    threshold: float = 100.0,
    alpha: float = 0.5,
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """Scale weights of queries and keys in place where logits exceeded `threshold`.

    Call it after `optimizer.step()`, when FSDP2's parameters are sharded. Momentum is not scaled.
    Collective: all ranks of `group` bring the same layers, each with its own maxima and parts.

    Args:
        layers: parameters are plain tensors or DTensors of any layout that Muon takes, of real
            floating point; bf16 is scaled in float32 and rounded once. With fewer heads of keys
            than of queries, keys stay and queries take the whole factor.
        threshold: above 0.
        alpha: the queries' share of the factor, 0 to 1.
        group: the ranks that hold these layers together, or work on the same model; default: all.
            With a pipeline, those of this stage.

    Returns the largest logits over all ranks, before scaling: float32 [heads] for each layer, the
    same bits on all ranks. A maximum that is inf or nan on any rank is inf there, and its head is
    left alone. Heads that do not exceed the threshold keep their bits.

    Raises ValueError, before anything is changed, for an argument out of range, rows that do not
    fit the heads, rows given twice, and dtypes and layouts that are not supported.
    """
    if not 0 < threshold < math.inf:
        raise ValueError(f"threshold must be above 0 and finite, got {threshold!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in 0 ... 1, got {alpha!r}")
    if group is not None and not collectives.is_group(group):
        raise ValueError(f"group must be a process group or None, got {type(group).__name__}")
    listed = [layers] if isinstance(layers, QKHeads) else list(layers)
    tasks = [_tasks(f"layers[{index}]", layer, alpha) for index, layer in enumerate(listed)]
    _check_distinct([task for some in tasks for task in some])
    if not listed:
        return []
    sizes = [len(layer.max_logits) for layer in listed]
    maxima = _maxima(listed, group)
    clipped = (maxima > threshold) & maxima.isfinite()
    # One copy for all, if parameters are offloaded.
    gamma = torch.where(clipped, threshold / maxima, 1.0).to(tasks[0][0].part.device)
    factors = {power: gamma.pow(power).split(sizes) for power in (alpha, 1 - alpha, 1.0)}
    for index, some in enumerate(tasks):
        for task in some:
            if task.power is not None:
                task.scale(factors[task.power][index])
    return list(maxima.split(sizes))


@dataclass(frozen=True)
class _Task:
    """Rows to scale by gamma ** power, None: not at all. held: half-open range of rows here."""

    name: str
    rows: HeadRows
    power: float | None
    held: tuple[int, int]

    @property
    def part(self) -> Tensor:
        return local(self.rows.parameter)

    def scale(self, factors: Tensor) -> None:
        """Multiply those of the rows that are here. factors: float32 [heads]."""
        rows, part = self.rows, self.part
        first, last = max(self.held[0], rows.start), min(self.held[1], rows.stop)
        if first >= last or not part.numel():
            return
        by_row = factors.new_ones(rows.heads, rows.step, device=part.device)
        by_row[:, : rows.head_dim] = factors.to(part.device)[:, None]
        mine = by_row.view(-1)[first - rows.start : last - rows.start]
        part = part.narrow(int(rows.transposed), first - self.held[0], last - first)
        # float32 factors: lower precision is promoted for the product, and rounded once.
        part.mul_(mine if rows.transposed or part.ndim == 1 else mine[:, None])


def _tasks(name: str, layer: QKHeads, alpha: float) -> list[_Task]:
    """What to scale in a layer, checked."""
    if layer.max_logits.ndim != 1 or not layer.max_logits.is_floating_point():
        raise ValueError(
            f"{name}: max_logits must be floating point of shape [heads], got"
            f" {layer.max_logits.dtype} of shape {tuple(layer.max_logits.shape)}"
        )
    heads = len(layer.max_logits)
    query = list(_rows(f"{name}.query", layer.query, heads, None))
    rotary = list(_rows(f"{name}.rotary_query", layer.rotary_query, heads, None))
    head_dim = query[0][1].head_dim if query else 1
    key = list(_rows(f"{name}.key", layer.key, None, head_dim))
    if not query or not key:
        raise ValueError(f"{name}: query and key must have at least one parameter each")
    for part, rows in query + rotary:
        if rows.heads != heads:
            raise ValueError(
                f"{part}: {rows.heads} heads, max_logits has {heads}; a rank that knows some heads"
                " only passes a DTensor, or -inf for the others"
            )
    counts = sorted({rows.heads for _, rows in key})
    if len(counts) > 1 or counts[0] < 1 or heads % counts[0]:
        raise ValueError(f"{name}.key: {counts} heads of keys do not divide {heads} of queries")
    dims = sorted({rows.head_dim for _, rows in query + key})
    if len(dims) > 1:
        raise ValueError(f"{name}: query and key: heads of {dims} rows cannot be multiplied")
    shared = counts[0] < heads
    groups: list[tuple[list[tuple[str, HeadRows]], float | None]] = [
        (query, 1.0 if shared else alpha),
        (key, None if shared else 1 - alpha),
        (rotary, 1.0),
    ]
    return [_Task(p, rows, power, _held(p, rows)) for some, power in groups for p, rows in some]


def _rows(
    name: str, given: Rows | Sequence[Rows], heads: int | None, head_dim: int | None
) -> Iterator[tuple[str, HeadRows]]:
    """(name, rows) of each; a tensor is cut into so many heads, or into heads of so many rows."""
    for index, rows in enumerate([given] if isinstance(given, Tensor | HeadRows) else given):
        part = f"{name}[{index}]"
        if isinstance(rows, Tensor):
            length = len(rows) if rows.ndim else 0
            unit = heads if heads is not None else head_dim
            if not unit or not length or length % unit:
                expected = f"{heads} heads" if heads is not None else f"heads of {head_dim} rows"
                raise ValueError(f"{part}: {tuple(rows.shape)} does not divide into {expected}")
            number = heads if heads is not None else length // unit
            rows = HeadRows(rows, number, length // number)
        yield part, rows


def _held(name: str, rows: HeadRows) -> tuple[int, int]:
    """Half-open range of the parameter's rows that this rank holds; ValueError if they misfit."""
    shape, dim = tuple(rows.parameter.shape), int(rows.transposed)
    if not rows.parameter.is_floating_point():
        raise ValueError(f"{name}: dtype must be floating point, got {rows.parameter.dtype}")
    if not dim < len(shape) <= 2:
        raise ValueError(f"{name}: expected [rows, in] or [rows], or [in, rows], got {shape}")
    least = min(rows.heads, rows.head_dim, rows.start + 1, rows.step - rows.head_dim + 1)
    if least < 1 or rows.stop > shape[dim]:
        raise ValueError(
            f"{name}: {rows.heads} heads of {rows.head_dim} rows from row {rows.start}, one every"
            f" {rows.step}, do not fit into {shape[dim]} rows"
        )
    layout = layout_of(name, rows.parameter, None)
    return layout.box(shape, layout.mesh.coordinates[collectives.rank()])[dim]


def _check_distinct(tasks: Sequence[_Task]) -> None:
    """ValueError, with two names, if rows would be scaled twice."""
    seen: dict[tuple[int, int], str] = {}
    for task in tasks:
        other = seen.setdefault((id(task.rows.parameter), task.rows.start), task.name)
        if other != task.name:
            raise ValueError(
                f"{other} and {task.name} are the same rows; give layers that share weights as one,"
                " with the larger of their maxima"
            )


def _maxima(layers: Sequence[QKHeads], group: ProcessGroup | None) -> Tensor:
    """The largest logits of all layers' heads over all ranks: float32 [all heads]."""
    device = collectives.meeting_device({layer.max_logits.device.type for layer in layers})
    known = [_known(index, layer.max_logits) for index, layer in enumerate(layers)]
    together = torch.cat([values.to(device, torch.float32) for values in known])
    # A collective need not keep a nan, and inf is larger than what any rank has.
    together.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    return collectives.all_reduce_max_(together, group)


def _known(index: int, max_logits: Tensor) -> Tensor:
    """[heads], -inf where this rank knows nothing."""
    if not isinstance(max_logits, DTensor):
        return local(max_logits)
    layout = layout_of(f"layers[{index}].max_logits", max_logits, None)
    coordinate = layout.mesh.coordinates[collectives.rank()]
    ((start, stop),) = layout.box(max_logits.shape, coordinate)
    known = local(max_logits).new_full((len(max_logits),), -math.inf)
    known[start:stop] = local(max_logits)
    return known
