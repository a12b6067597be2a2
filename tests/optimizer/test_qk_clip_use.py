"""QK-clip in use: attention whose logits stay bounded, what is refused, and the page."""

from __future__ import annotations

import contextlib
import math
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import shardmuon
from shardmuon import HeadRows, QKHeads, Runtime, qk_clip_
from tests import ranks
from tests.conftest import Worlds
from tests.problems import local, world_mesh
from tests.test_documents import ROOT, examples

# -- attention --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention that keeps its largest logits. groups: heads of keys and values."""

    max_logits: Tensor

    def __init__(self, heads: int, groups: int, head_dim: int, width: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.query = nn.Linear(width, heads * head_dim)
        self.key = nn.Linear(width, groups * head_dim)
        self.value = nn.Linear(width, groups * head_dim)
        self.out = nn.Linear(heads * head_dim, width)
        self.register_buffer("max_logits", torch.zeros(heads), persistent=False)

    def logits(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, tokens]"""
        x = F.layer_norm(x, x.shape[-1:])
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        logits: Tensor = q @ k.mT / math.sqrt(q.shape[-1])
        return logits

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        with torch.no_grad():
            self.max_logits.copy_(logits.amax(dim=(0, 2, 3)))
        v = self.value(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        attended = self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        return x + cast(Tensor, attended)

    def layer(self) -> QKHeads:
        query, key = self.query, self.key
        return QKHeads(
            max_logits=self.max_logits,
            query=[query.weight, query.bias],
            key=[key.weight, key.bias],
        )


@pytest.mark.parametrize("groups", [4, 2, 1])
@torch.no_grad()
def test_logits_of_an_attention_come_down_to_the_threshold(groups: int) -> None:
    torch.manual_seed(0)
    attention = Attention(4, groups, 6, 16)
    x = torch.randn(2, 10, 16)
    attention.query.weight.mul_(torch.tensor([60.0, 1.0, 90.0, 1.0]).repeat_interleave(6)[:, None])
    attention(x)
    before, largest = attention.logits(x), attention.max_logits.clone()
    assert (largest > 5).tolist() == [True, False, True, False]
    qk_clip_(attention.layer(), threshold=5.0)
    after = attention.logits(x)
    factor = (5.0 / largest).clamp(max=1.0)
    torch.testing.assert_close(after.amax(dim=(0, 2, 3)), largest * factor)
    torch.testing.assert_close(after, before * factor[:, None, None])
    assert torch.equal(after[:, 1::2], before[:, 1::2])


LIMIT = 8.0


def _train(threshold: float, overlap: Any) -> tuple[list[float], list[Tensor]]:
    """The largest logit of each step, and the weights, of a model whose lr is far too high."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Attention(3, 3, 5, 12) for _ in range(2)])
    fully_shard(model, mesh=world_mesh())
    groups = shardmuon.param_groups(
        model, muon={"lr": 0.8, "weight_decay": 0.0}, to_muon=["*.weight"]
    )
    optimizer = shardmuon.Muon(groups, runtime=Runtime(deterministic=True, overlap=overlap))
    inputs = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(25):
        x = torch.randn(4, 8, 12, generator=inputs).to(ranks.device())
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = qk_clip_([part.layer() for part in model], threshold=threshold)  # type: ignore[operator]
        seen.append(float(torch.stack(found).max()))
    return seen, [local(p).cpu().clone() for p in model.parameters()]


def test_a_training_whose_logits_explode_stays_bounded(pools: Worlds) -> None:
    """Steps that are on their way since backward carry updates, not weights, and stay right."""
    free = pools.run(2, _train, 1e30, "none")
    held = pools.run(2, _train, LIMIT, "none")
    early = pools.run(2, _train, LIMIT, "backward")
    assert free[0][0] == free[1][0]  # ranks have different data, and one maximum
    assert max(free[0][0]) > 20 * LIMIT
    assert max(held[0][0]) < 4 * LIMIT
    for (seen, weights), (also_seen, also_weights) in zip(held, early, strict=True):
        assert seen == also_seen
        assert all(map(torch.equal, weights, also_weights))


# -- refusals ---------------------------------------------------------------------------------

M = torch.ones(3)
W = torch.ones(15, 4)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"threshold": 0.0}, r"threshold must be above 0 and finite, got 0\.0"),
    ({}, {"threshold": math.nan}, "threshold must be above 0 and finite, got nan"),
    ({}, {"alpha": 1.5}, r"alpha must be in 0 \.\.\. 1, got 1\.5"),
    ({}, {"alpha": -0.1}, r"alpha must be in 0 \.\.\. 1, got -0\.1"),
    ({}, {"group": "all"}, "group must be a process group or None, got str"),
    ({"max_logits": torch.ones(4)}, {}, r"query\[0\]: \(15, 4\) does not divide into 4 heads"),
    ({"max_logits": torch.ones(3, 1)}, {}, r"\[heads\], got torch.float32 of shape \(3, 1\)"),
    ({"max_logits": M.int()}, {}, "max_logits must be floating point .* got torch.int32"),
    ({"key": torch.ones(14, 4)}, {}, r"key\[0\]: \(14, 4\) does not divide into heads of 5 rows"),
    ({"key": torch.ones(10, 4)}, {}, r"\[2\] heads of keys do not divide 3 of queries"),
    ({"key": [W, torch.ones(5)]}, {}, r"\[1, 3\] heads of keys do not divide 3 of queries"),
    ({"key": HeadRows(W, 0, 5)}, {}, r"\[0\] heads of keys do not divide 3 of queries"),
    ({"key": HeadRows(W, 3, 4)}, {}, r"heads of \[4, 5\] rows cannot be multiplied"),
    ({"key": ()}, {}, "query and key must have at least one parameter each"),
    ({"query": ()}, {}, "query and key must have at least one parameter each"),
    ({"query": W.int()}, {}, r"query\[0\]: dtype must be floating point, got torch.int32"),
    ({"query": torch.ones(15, 2, 2)}, {}, r"expected \[rows, in\] or \[rows\].* got \(15, 2, 2\)"),
    ({"query": HeadRows(W, 2, 5)}, {}, "2 heads, max_logits has 3; a rank that knows some heads"),
    ({"query": HeadRows(W, 3, 5, start=1)}, {}, "5 rows from row 1, .* do not fit into 15 rows"),
    ({"query": HeadRows(W, 3, 5, stride=4)}, {}, "one every 4, do not fit into 15 rows"),
    ({"rotary_query": HeadRows(W, 3, 5)}, {}, r"query\[0\] and .*rotary_query\[0\] are the same"),
]


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    good = torch.ones(15, 4)
    first = QKHeads(max_logits=M * 1000, query=good, key=good.clone())
    layer = QKHeads(**{"max_logits": M, "query": W, "key": torch.ones(15, 4), **changes})
    with pytest.raises(ValueError, match=message):
        qk_clip_([first, layer], **options)
    assert good.min() == 1


def _partial(of_weight: bool) -> None:
    mesh = world_mesh()
    ones = torch.ones(15 if of_weight else 3)
    summed = DTensor.from_local(ones, mesh, [Partial()], run_check=False)
    whole = DTensor.from_local(torch.ones(15, 4), mesh, [Replicate()], run_check=False)
    layer = QKHeads(
        max_logits=M if of_weight else summed,
        query=[whole, summed] if of_weight else whole,
        key=torch.ones(15, 4),
    )
    qk_clip_(layer)


@pytest.mark.parametrize(("of_weight", "name"), [(True, r"query[1]"), (False, "max_logits")])
def test_sums_that_are_not_reduced_are_refused(pools: Worlds, of_weight: bool, name: str) -> None:
    (error, *_) = pools.run_expecting_error(1, _partial, of_weight)
    assert f"layers[0].{name}" in error.message
    assert "Partial is not supported" in error.message


# -- the page ---------------------------------------------------------------------------------


def _run_page(folder: str) -> list[str]:
    """Run docs/qk-clip.md from top to bottom on this rank; what it prints."""
    printed: list[str] = []
    names: dict[str, object] = {"__name__": "page", "print": lambda *a: printed.append(str(a))}
    with contextlib.chdir(folder):
        for block in examples(ROOT / "docs" / "qk-clip.md"):
            exec(compile(block, "docs/qk-clip.md", "exec"), names)
    return printed


def test_the_page_runs_on_two_ranks(pools: Worlds, shared_folder: str) -> None:
    if ranks.backend() != "gloo":
        pytest.skip("the examples compute on the CPU")
    printed = pools.run(2, _run_page, shared_folder)
    assert printed[1] == []
    assert len(printed[0]) == 3
    assert all("0 heads clipped" in line for line in printed[0])
