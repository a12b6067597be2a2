"""What the fuzz tests share: how many inputs they draw, junk values, and mutations of real input.

Owns the budget (`SHARDMUON_EXAMPLES` inputs over all of them together, each test a share), the
counts that are printed at the end, and the generators that know nothing of what they are fed to.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import shardmuon
from shardmuon.exchange.blocks import local

TOTAL = int(os.environ.get("SHARDMUON_EXAMPLES", "0"))
"""0: each test's own small number of inputs, the same in every run."""

LIMIT_S = max(120, TOTAL // 5)

outcomes: dict[str, Counter[str]] = defaultdict(Counter)
"""By kind of input: how often it was taken, and by which exceptions it was refused."""


def fuzz(few: int, share: float) -> settings:
    """`few` inputs in an ordinary run, else this share of all, from a new seed."""
    return settings(
        max_examples=round(TOTAL * share) if TOTAL else few,
        derandomize=not TOTAL,
        database=None,
        deadline=datetime.timedelta(seconds=20),
        suppress_health_check=list(HealthCheck),
    )


def attempt(kind: str, act: Callable[[], Any], *allowed: type[Exception]) -> bool:
    """Whether `act` took its input. Any exception but those allowed goes on to the test."""
    try:
        act()
    except allowed as error:
        says_why, name = bool(str(error)), type(error).__name__
    else:
        outcomes[kind]["taken"] += 1
        return True
    assert says_why, f"{name} without a word"
    outcomes[kind][name] += 1
    return False


def rarely(draw: st.DrawFn, times: int) -> bool:
    """True once in about so many times; False is what an example shrinks to."""
    return draw(st.sampled_from(range(times))) == times - 1


# -- junk -----------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 0.0, 0.5, 1.0, -0.1, 1e-50, 1e308, 10**40, -(10**40), 2**63]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e-3, 5, 99, 100]),
    st.integers(),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(
        ["", "muon", "adamw", "Muon", "auto", "none", "gram", "kellr", "nan", "1e-4", "../x", "/x"]
    ),
    st.sampled_from(["a\0b", "\ud800", "a\nb", "x" * 300, "..", "dtype", "float32", "load"]),
    st.text(max_size=6),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(WORDS, each, max_size=3)),
    max_leaves=6,
)


def _tensors() -> list[Tensor]:
    return [
        torch.tensor(0.1),
        torch.tensor([0.5]),
        torch.tensor(float("nan")),
        torch.tensor(float("inf")),
        torch.tensor(-1.0),
        torch.tensor(True),
        torch.tensor(1j),
        torch.tensor(3),
        torch.ones(2),
        torch.ones(3, 4),
        torch.ones(3, 4, dtype=torch.complex64),
        torch.ones(3, 4, dtype=torch.int32),
        torch.ones(3, 4, dtype=torch.float64),
        torch.empty(0),
        torch.empty((), device="meta"),
        torch.empty(3, 4, device="meta"),
        torch.ones(3, 4).to_sparse(),
    ]


OBJECTS = st.one_of(
    st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn, torch.strided, object, len]),
    st.sampled_from(range(len(_tensors()))).map(lambda index: _tensors()[index]),
    st.sampled_from([b"x", 1j, range(3), frozenset({1}), Ellipsis, NotImplemented]),
)
JUNK = st.recursive(
    st.one_of(JSON, OBJECTS),
    lambda each: st.one_of(
        st.lists(each, max_size=3), st.lists(each, max_size=3).map(tuple), st.sets(WORDS)
    ),
    max_leaves=4,
)


# -- mutations ------------------------------------------------------------------------------------


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in nested dicts, lists and records, outside in."""
    held = vars(tree) if hasattr(tree, "__dict__") and not isinstance(tree, type) else tree
    if isinstance(held, dict):
        keys: list[Any] = list(held)
    elif isinstance(held, list):
        keys = list(range(len(held)))
    else:
        return
    for key in keys:
        yield held, key
        if depth < 8:
            yield from _places(held[key], depth + 1)


@st.composite
def mutated(draw: st.DrawFn, tree: Any, junk: st.SearchStrategy[Any]) -> Any:
    """A deep copy of `tree` with one to three changes of its structure or values."""
    whole = [copy.deepcopy(tree)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(whole))
        held, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(
            st.sampled_from(["junk", "junk", "remove", "rename", "twice", "other", "empty"])
        )
        if kind == "remove" and held is not whole:
            del held[key]
        elif kind == "rename" and isinstance(held, dict):
            held[draw(st.one_of(WORDS, st.sampled_from([0, 99])))] = held.pop(key)
        elif kind == "twice" and isinstance(held, list):
            held.insert(key, copy.deepcopy(held[key]))
        elif kind == "other":
            other, at = places[draw(st.integers(0, len(places) - 1))]
            held[key] = copy.deepcopy(other[at]) if at in _keys(other) else None
        elif kind == "empty":
            held[key] = type(held[key])() if isinstance(held[key], (dict, list, tuple, str)) else 0
        else:
            held[key] = copy.deepcopy(draw(junk))  # what is drawn may be one object, drawn often
    return whole[0]


def _keys(held: Any) -> Any:
    return held if isinstance(held, dict) else range(len(held))


@st.composite
def scribbled(draw: st.DrawFn, content: bytes, tokens: tuple[bytes, ...] = ()) -> bytes:
    """`content` cut off, or with bytes changed, removed and put in."""
    if draw(st.integers(0, 3)) == 0:
        return content[: draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        piece = draw(st.one_of(st.sampled_from([b"", *tokens]), st.binary(max_size=3)))
        changed[at : at + draw(st.integers(0, 4))] = piece
    return bytes(changed)


# -- what may not change --------------------------------------------------------------------------


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """All that an optimizer holds, to be compared bit by bit."""
    groups = [
        {
            key: [id(p) for p in value] if key == "params" else repr(value)
            for key, value in g.items()
        }
        for g in optimizer.param_groups
    ]
    state = {
        id(p): {key: (value.dtype, bits(value)) for key, value in kept.items()}
        for p, kept in optimizer.state.items()
    }
    return groups, state, [bits(p) for g in optimizer.param_groups for p in g["params"]]


def bits(tensor: Tensor) -> object:
    """The values that this rank holds of a tensor, nan included; of one without any its shape."""
    if tensor.is_meta:
        return tuple(tensor.shape)
    return local(tensor).contiguous().reshape(-1).view(torch.uint8).tolist()


def take_a_step(optimizer: shardmuon.Muon) -> None:
    """With gradients of ones: whatever was taken must train."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_meta for p in parameters):
        return
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
