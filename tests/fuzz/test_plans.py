"""Any text given to `planning.text.loads` is refused by ValueError, or is a plan to be used."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.planning.cut import cut_parameter
from shardmuon.planning.device import DEVICES
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix
from shardmuon.planning.plan import Plan
from shardmuon.planning.planner import Freedom, make_plan
from shardmuon.planning.text import dumps, loads
from tests.fuzz.inputs import JSON, LIMIT_S, attempt, fuzz, mutated, scribbled

pytestmark = pytest.mark.timeout(LIMIT_S)

WHOLE = Mesh((0, 1, 2, 3), (2, 2), ("a", "b"))
LAYOUTS = [Layout(WHOLE), Layout(WHOLE, (Split(0, 0), Split(1, 1))), Layout(Mesh((2, 3), (2,)))]
CUTS = [
    cut
    for _, cut in (
        *cut_parameter((2, 8, 6)),
        *cut_parameter((8, 6), split_sizes=(3, 5)),
        *cut_parameter((8, 6), transposed=True),
        *cut_parameter((4, 3, 2, 2), flatten=True),
    )
]


def _base() -> str:
    """A plan of every kind of matrix, one of them shared by a team."""
    matrices = [
        Matrix(f"m{number}", cut, layout, "bfloat16", 2, 100, "s", segments=(3, 2))
        for number, (cut, layout) in enumerate(itertools.product(CUTS, LAYOUTS))
    ]
    large = Matrix(
        "large",
        cut_parameter((4096, 4096))[0][1],
        LAYOUTS[1],
        "bfloat16",
        2,
        10**12,
        segments=(3, 2),
        may_share=True,
    )
    freedom = Freedom(DEVICES["h200"], share_large=True)
    plan = make_plan([*matrices, large], bucket_bytes=1000, freedom=freedom)
    assert any(bucket.team for bucket in plan.buckets)
    return dumps(plan)


TEXT = _base()
TOKENS = (
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b"-1",
    b"0",
    b"1e999",
    b"null",
    b"true",
    b"99",
    b"[" * 9,
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Of a plan whose JSON is another, or is none."""
    if draw(st.booleans()):
        return draw(scribbled(TEXT.encode(), TOKENS)).decode(errors="replace")
    return json.dumps(draw(mutated(json.loads(TEXT), JSON)))


def use(plan: Plan) -> None:
    """All that one does with a plan that was kept."""
    assert loads(dumps(plan)) == plan
    plan.report()
    plan.owners()
    plan.transient_bytes()
    assert len(plan.digest) == 64
    assert plan.imbalance >= 1.0 or not plan.makespan


@fuzz(few=100, share=0.1)
@given(texts())
def test_plans_as_text(text: str) -> None:
    made: list[Plan] = []
    if attempt("plans as text", lambda: made.append(loads(text)), ValueError):
        use(made[0])


@pytest.mark.parametrize(
    "change",
    [
        {"meshes": [[[], [10**12, 0], []]]},
        {"meshes": [[[0], [True], []]]},
        {"exchange": "ring"},
        {"overlap": []},
        {"buckets": [[False, []]]},
        {"settings": 1},
    ],
)
def test_what_would_take_all_memory_or_fail_later_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this is no plan"):
        loads(json.dumps({**json.loads(TEXT), **change}))


BROKEN: dict[str, tuple[str, Any]] = {
    "negative cost": ("cost", -1),
    "huge cost": ("cost", 10**400),
    "cost": ("cost", "x"),
    "wire bytes": ("wire_bytes", 0),
    "method": ("method", "fast"),
    "layout": ("layout", -1),
    "segments": ("segments", [-1]),
    "id": ("id", 3),
    "rows": ("cut", [[8, 6], None, [0, 9], False, False, None]),
    "columns": ("cut", [[8, 6], None, None, False, False, [5, 3]]),
    "expert": ("cut", [[2, 8, 6], 2, None, False, False, None]),
    "shape": ("cut", [[8], None, None, False, False, None]),
    "stack without an expert": ("cut", [[2, 8, 6], None, None, False, False, None]),
    "team": ("panel", ["m0", 0, 10**12, 0, 8, 6]),
    "one more": ("x", 1),
}


@pytest.mark.parametrize(("key", "value"), BROKEN.values(), ids=list(BROKEN))
def test_a_matrix_that_cannot_be_is_refused(key: str, value: Any) -> None:
    content = json.loads(TEXT)
    content["buckets"][0][1][0][0][key] = value
    with pytest.raises(ValueError, match="this is no plan"):
        loads(json.dumps(content))


def test_a_split_must_be_of_a_dim_that_is_there() -> None:
    for splits in ([[0, 7]], [[5, 0]]):
        content = json.loads(TEXT)
        content["layouts"] = [[mesh, splits] for mesh, _ in content["layouts"]]
        with pytest.raises(ValueError, match="cannot split"):
            loads(json.dumps(content))


def test_the_plan_itself_is_taken() -> None:
    use(loads(TEXT))


def test_text_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        loads("[" * 100_000)
