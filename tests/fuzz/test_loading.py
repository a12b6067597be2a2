"""Any state dict given to `load_state_dict` or `from_torch` is refused by ValueError, or taken.

What is taken must train, and what is refused must leave groups and state as they were.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardmuon
from shardmuon.checkpoint import from_torch, to_torch
from tests import models
from tests.fuzz.inputs import JUNK, LIMIT_S, attempt, fuzz, mutated, snapshot, take_a_step

pytestmark = pytest.mark.timeout(LIMIT_S)

FITTING = st.sampled_from(
    [
        0.5,
        torch.zeros(3, 4),
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(4, 3),
        torch.full((3, 4), float("nan")),
        torch.zeros(5),
        torch.tensor(7.0),
        {"momentum_buffer": torch.ones(3, 4)},
        {},
        None,
        "keller",
    ]
)
"""What might stand in the right place."""


def make() -> shardmuon.Muon:
    """Groups of both kinds, with state that is not zero."""
    groups: list[dict[str, Any]] = [
        {"params": [("a", nn.Parameter(torch.ones(3, 4))), ("b", nn.Parameter(torch.ones(3, 4)))]},
        {"params": [("c", nn.Parameter(torch.ones(5)))], "algorithm": "adamw"},
    ]
    optimizer = shardmuon.Muon(groups)
    take_a_step(optimizer)
    return optimizer


SAVED = make().state_dict()
PLAIN = torch.optim.Muon([nn.Parameter(torch.ones(3, 4)) for _ in range(2)]).state_dict()


@fuzz(few=120, share=0.1)
@given(
    st.one_of(
        mutated(SAVED, st.one_of(JUNK, FITTING)),
        mutated(SAVED, st.one_of(JUNK, FITTING)),
        mutated(SAVED["param_groups"], JUNK).map(lambda groups: {**SAVED, "param_groups": groups}),
        mutated(PLAIN, JUNK),
        JUNK,
    )
)
def test_load_state_dict(state: Any) -> None:
    optimizer = make()
    before = snapshot(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = attempt("load_state_dict", lambda: optimizer.load_state_dict(state), ValueError)
        if not taken:
            assert snapshot(optimizer) == before
        take_a_step(optimizer)


def _pair() -> tuple[models.Net, shardmuon.Muon]:
    model = models.make()
    optimizer = models.optimizer_of(model)
    take_a_step(optimizer)
    return model, optimizer


MUON, ADAMW = to_torch(*_pair())


@fuzz(few=60, share=0.05)
@given(
    st.one_of(mutated(MUON, st.one_of(JUNK, FITTING)), mutated(MUON, JUNK), JUNK),
    st.one_of(st.just(ADAMW), mutated(ADAMW, st.one_of(JUNK, FITTING))),
)
def test_from_torch(muon: Any, adamw: Any) -> None:
    model, optimizer = _pair()
    before = snapshot(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = attempt("from_torch", lambda: from_torch(model, optimizer, muon, adamw), ValueError)
        if not taken:
            assert snapshot(optimizer) == before
        take_a_step(optimizer)


def test_what_was_not_mutated_is_taken() -> None:
    optimizer = make()
    optimizer.load_state_dict(copy.deepcopy(SAVED))
    take_a_step(optimizer)
    model, optimizer = _pair()
    from_torch(model, optimizer, MUON, ADAMW)
    take_a_step(optimizer)
