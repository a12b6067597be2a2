"""QK-clip: the rule against float64, equal bits on any layout, and maxima that ranks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import HeadRows, QKHeads, qk_clip_
from shardmuon.exchange import collectives
from tests import ranks
from tests.conftest import Worlds
from tests.grids import cut, mesh_of, placed, random, same_bits
from tests.problems import local

HEADS, DIM, IN = 3, 5, 8  # 15 rows: heads are cut by shards on 2 and on 4 ranks
THRESHOLD = 100.0
MAXIMA = (250.0, 99.0, 130.0)
OTHERS = (-4.0, 170.0, 100.0)  # of a second layer

Wholes = Mapping[str, Tensor]


# -- layers of several kinds ------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A way to keep queries and keys. shapes: of the parameters, by name."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]

    def layer(self, p: Wholes, max_logits: Tensor) -> QKHeads:
        """The layer as a user describes it."""
        query: Any
        key: Any
        rotary: Any = ()
        if self.name == "separate":
            query, key = [p["q"], p["q_bias"]], [p["k"], p["k_bias"]]
        elif self.name == "grouped":
            query, key = p["q"], p["k"]
        elif self.name == "latent":  # each query: 3 and 2 rotary rows; each key: 3, and 4 of values
            query = HeadRows(p["q"], HEADS, 3, stride=5)
            rotary = HeadRows(p["q"], HEADS, 2, start=3, stride=5)
            key = HeadRows(p["kv"], HEADS, 3, stride=7)
        else:
            step = DIM * 3 if self.name == "interleaved" else None
            start = DIM if self.name == "interleaved" else DIM * HEADS
            turned = self.name == "transposed"
            query = [HeadRows(p["qkv"], HEADS, DIM, 0, step, turned)]
            key = [HeadRows(p["qkv"], HEADS, DIM, start, step, turned)]
            query.append(HeadRows(p["bias"], HEADS, DIM, 0, step))
            key.append(HeadRows(p["bias"], HEADS, DIM, start, step))
        return QKHeads(max_logits=max_logits, query=query, key=key, rotary_query=rotary)

    def roles(self) -> dict[str, list[tuple[str, int] | None]]:
        """By parameter and row: what the row is, and of which head. Written out, row by row."""
        q = [("q", h) for h in range(HEADS) for _ in range(DIM)]
        k = [("k", h) for h in range(HEADS) for _ in range(DIM)]
        none: list[tuple[str, int] | None] = [None]
        if self.name == "separate":
            return {"q": [*q], "q_bias": [*q], "k": [*k], "k_bias": [*k]}
        if self.name == "grouped":
            return {"q": [("alone", h) for h in range(HEADS) for _ in range(DIM)], "k": none * DIM}
        if self.name == "latent":
            some: list[tuple[str, int] | None] = []
            keys: list[tuple[str, int] | None] = []
            for h in range(HEADS):
                some += [("q", h)] * 3 + [("alone", h)] * 2
                keys += [("k", h)] * 3 + none * 4
            return {"q": some, "kv": keys}
        fused: list[tuple[str, int] | None] = [*q, *k, *none * (HEADS * DIM)]
        if self.name == "interleaved":
            fused = []
            for h in range(HEADS):
                fused += [("q", h)] * DIM + [("k", h)] * DIM + none * DIM
        return {"qkv": fused, "bias": [*fused]}


ROWS = HEADS * DIM
FUSED = {"qkv": (3 * ROWS, IN), "bias": (3 * ROWS,)}
KINDS = [
    Kind("separate", {"q": (ROWS, IN), "q_bias": (ROWS,), "k": (ROWS, IN), "k_bias": (ROWS,)}),
    Kind("grouped", {"q": (ROWS, IN), "k": (DIM, IN)}),
    Kind("latent", {"q": (ROWS, IN), "kv": (HEADS * 7, IN)}),
    Kind("fused", FUSED),
    Kind("interleaved", FUSED),
    Kind("transposed", {"qkv": (IN, 3 * ROWS), "bias": (3 * ROWS,)}),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))


def wholes(kind: Kind, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """The same values for every layout."""
    return {
        name: random(shape, seed * 100 + number).to(dtype)
        for number, (name, shape) in enumerate(kind.shapes.items())
    }


def by_hand(kind: Kind, before: Wholes, maxima: Sequence[float], alpha: float) -> Wholes:
    """The rule in float64, row by row."""
    powers = {"q": alpha, "k": 1 - alpha, "alone": 1.0}
    result = {}
    for name, roles in kind.roles().items():
        whole = before[name].double().clone()
        rows = whole.mT if kind.name == "transposed" and whole.ndim == 2 else whole
        for row, role in zip(rows, roles, strict=True):
            if role is not None and maxima[role[1]] > THRESHOLD:
                row *= (THRESHOLD / maxima[role[1]]) ** powers[role[0]]
        result[name] = whole
    return result


def alone(kind: Kind, dtype: torch.dtype, alpha: float = 0.5) -> list[dict[str, Tensor]]:
    """Two layers after clipping in this process: what every layout must give, in bits."""
    tensors = [wholes(kind, dtype, seed) for seed in (0, 1)]
    layers = [
        kind.layer(one, torch.tensor(maxima))
        for one, maxima in zip(tensors, (MAXIMA, OTHERS), strict=True)
    ]
    found = qk_clip_(layers, threshold=THRESHOLD, alpha=alpha)
    assert [each.tolist() for each in found] == [list(MAXIMA), list(OTHERS)]
    return tensors


@kinds
@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rule_is_that_of_the_paper(kind: Kind, alpha: float, dtype: torch.dtype) -> None:
    for seed, (maxima, clipped) in enumerate(
        zip((MAXIMA, OTHERS), alone(kind, dtype, alpha), strict=True)
    ):
        before = wholes(kind, dtype, seed)
        right = by_hand(kind, before, maxima, alpha)
        for name, tensor in clipped.items():
            assert tensor.dtype == dtype
            # A factor in float32 and a rounding, or bf16's one.
            tolerance = 4e-3 if dtype == torch.bfloat16 else 3e-7
            torch.testing.assert_close(tensor.double(), right[name], rtol=tolerance, atol=0)
            untouched = right[name] == before[name].double()
            assert 0 < untouched.sum() <= untouched.numel()
            assert torch.equal(tensor[untouched], before[name][untouched])


def test_low_precision_is_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        before = random((ROWS, IN), 3).to(dtype)
        query, key = before.clone(), before.clone()
        qk_clip_(QKHeads(max_logits=torch.tensor(MAXIMA), query=query, key=key))
        factors = (THRESHOLD / torch.tensor(MAXIMA)).clamp(max=1).sqrt().repeat_interleave(DIM)
        assert torch.equal(query, (before.float() * factors[:, None]).to(dtype))
        assert torch.equal(key, query)


# -- any layout -------------------------------------------------------------------------------


def _same_as_alone(
    kind: Kind, mesh_shape: tuple[int, ...], letters: str, right: list[dict[str, Tensor]]
) -> int:
    """Clip this rank's parts and compare them; each rank brings other maxima. Collectives."""
    mesh = mesh_of(mesh_shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    layers, parameters = [], []
    for seed, maxima in enumerate((MAXIMA, OTHERS)):
        held = {}
        for name, whole in wholes(kind, next(iter(right[0].values())).dtype, seed).items():
            own = letters.replace("1", "R") if whole.ndim == 1 else letters
            held[name] = nn.Parameter(placed(whole, own, mesh))
        parameters.append(held)
        layers.append(kind.layer(held, _own_maxima(maxima, letters)))
    before = sum(collectives.calls.values())
    found = qk_clip_(layers, threshold=THRESHOLD)
    issued = sum(collectives.calls.values()) - before
    assert [each.tolist() for each in found] == [list(MAXIMA), list(OTHERS)]
    for held, whole_ones in zip(parameters, right, strict=True):
        for name, whole in whole_ones.items():
            own = letters.replace("1", "R") if whole.ndim == 1 else letters
            assert same_bits(local(held[name]), cut(whole, own, mesh_shape, coordinate)), name
    return issued


def _own_maxima(maxima: Sequence[float], letters: str) -> Tensor:
    """Each head's maximum is known to one rank; under tensor parallelism, of its own heads only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.tensor(maxima)
    if letters != "s0":
        own = torch.arange(len(values)) % world == rank
        return torch.where(own, values, values - 200).to(ranks.device())
    data, tensor = mesh_of((2, 2))["a"], mesh_of((2, 2))["b"]
    part = values.chunk(2)[tensor.get_local_rank()] - 200 * data.get_local_rank()
    return DTensor.from_local(
        part.to(ranks.device()),
        tensor,
        [Shard(0)],
        run_check=False,
        shape=values.shape,
        stride=(1,),
    )


@kinds
@pytest.mark.parametrize(
    ("mesh", "letters"),
    [
        ((1,), "0"),
        ((2,), "0"),
        ((4,), "0"),
        ((2,), "1"),
        ((2,), "plain"),
        ((2, 2), "R0"),
        ((2, 2), "s0"),
        ((2, 2), "01"),
    ],
)
def test_every_layout_gives_the_bits_of_one_process(
    pools: Worlds, kind: Kind, mesh: tuple[int, ...], letters: str
) -> None:
    """One all-reduce serves two layers; ranks know different maxima."""
    for dtype in (torch.float32, torch.bfloat16):
        right = alone(kind, dtype)
        answers = pools.run(math.prod(mesh), _same_as_alone, kind, mesh, letters, right)
        assert set(answers) == {int(math.prod(mesh) > 1)}


def _of_a_stage() -> list[float]:
    """Stages along axis a of 2 x 2 have layers of their own."""
    mesh = mesh_of((2, 2))
    stage = mesh.get_local_rank("a")
    heads = 2 + stage
    weight = torch.ones(heads * 4, 3, device=ranks.device())
    largest = torch.full((heads,), 100.0 + 100 * dist.get_rank(), device=ranks.device())
    layer = QKHeads(max_logits=largest, query=weight, key=weight.clone())
    return [float(each.max()) for each in qk_clip_([layer], group=mesh.get_group("b"))]


def test_a_stage_of_a_pipeline_has_a_group_of_its_own(pools: Worlds) -> None:
    assert pools.run(4, _of_a_stage) == [[200.0], [200.0], [400.0], [400.0]]


def _with_a_bad_maximum(bad: float) -> list[bool]:
    """Rank 1 saw no number in head 0."""
    values = torch.tensor(MAXIMA)
    if dist.get_rank() == 1:
        values[0] = bad
    before = random((ROWS, IN), 0).to(ranks.device())
    query = before.clone()
    layer = QKHeads(max_logits=values.to(ranks.device()), query=query, key=before.clone())
    (found,) = qk_clip_(layer)
    assert found.tolist() == [math.inf, *MAXIMA[1:]]
    same = (query == before).view(HEADS, -1).all(dim=1)
    return [bool(each) for each in same]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_without_a_finite_maximum_is_left_alone(pools: Worlds, bad: float) -> None:
    assert pools.run(2, _with_a_bad_maximum, bad) == [[True, True, False]] * 2


class _NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for the value of a tensor on a GPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), function
        return function(*args, **(kwargs or {}))


def test_the_host_never_reads_a_value() -> None:
    one = torch.ones(())
    with _NoWaiting():  # type: ignore[no-untyped-call]
        for kind in KINDS:
            alone_layer = kind.layer(wholes(kind, torch.float32), torch.ones(HEADS) * 300)
            qk_clip_([alone_layer])
        with pytest.raises(AssertionError, match="local_scalar"):
            bool(one > 0)


def test_parameters_change_in_place_and_outside_of_autograd() -> None:
    query = nn.Parameter(random((ROWS, IN), 0))
    key = nn.Parameter(random((ROWS, IN), 1))
    version = query._version
    (found,) = qk_clip_(QKHeads(max_logits=torch.tensor(MAXIMA), query=query, key=key))
    assert query._version > version
    assert query.is_leaf
    assert query.requires_grad
    assert query.grad_fn is None
    assert not found.requires_grad
    assert qk_clip_([]) == []
