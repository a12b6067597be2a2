"""The header's wire form: what maxima over ranks say, without ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardmuon.exchange.header import (
    ERROR,
    GOOD,
    HEADER_BYTES,
    SKIP,
    SLOTS,
    Presence,
    Statement,
    exchange_header,
    read_header,
    severity_of,
)

CPU = torch.device("cpu")


def accepted(header: Tensor, refuse_nonfinite: bool) -> bool:
    return int(severity_of(header, ERROR if refuse_nonfinite else GOOD)) == GOOD


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def presence(states: str) -> list[Presence]:
    """One letter per parameter: p(resent), m(issing) or e(mpty shard, without gradient)."""
    return [Presence(f"w{i}", letter != "p", letter == "e") for i, letter in enumerate(states)]


def meet(statements: Sequence[Statement]) -> Tensor:
    """The header that ranks with these statements agree on."""
    headers = [exchange_header(statement, CPU, (), None) for statement in statements]
    assert all(header.shape == (HEADER_BYTES,) for header in headers)
    return torch.stack(headers).amax(0)


def test_equal_statements_are_accepted() -> None:
    header = meet([Statement(digest("a"), presence("pp"))] * 3)
    verdict = read_header(header, presence("pp"))
    assert (verdict.same_plan, verdict.fault, verdict.finite) == (True, False, True)
    assert (verdict.conflict, verdict.missing) == ((), frozenset())
    assert accepted(header, refuse_nonfinite=True)


@pytest.mark.parametrize("place", range(32))
def test_plans_that_differ_in_one_byte_are_told_apart(place: int) -> None:
    one = bytearray(32)
    other = bytearray(32)
    other[place] = 1
    header = meet([Statement(one.hex()), Statement(other.hex())])
    assert not read_header(header, ()).same_plan
    assert not accepted(header, refuse_nonfinite=False)


def test_gradients_on_some_ranks_only_are_named() -> None:
    header = meet(
        [Statement(digest("a"), presence("pmp")), Statement(digest("a"), presence("ppm"))]
    )
    assert read_header(header, presence("pmp")).conflict == ("w1", "w2")
    assert not accepted(header, refuse_nonfinite=False)


def test_gradients_missing_everywhere_are_no_conflict() -> None:
    header = meet([Statement(digest("a"), presence("pme"))] * 2)
    verdict = read_header(header, presence("pme"))
    assert verdict.conflict == ()
    assert verdict.missing == {1}
    assert accepted(header, refuse_nonfinite=False)


@pytest.mark.parametrize(("other", "missing"), [("p", set()), ("m", {0})])
def test_an_empty_shard_follows_the_others(other: str, missing: set[int]) -> None:
    header = meet([Statement(digest("a"), presence("e")), Statement(digest("a"), presence(other))])
    verdict = read_header(header, presence("e"))
    assert verdict.conflict == ()
    assert verdict.missing == missing


def test_one_rank_with_a_bad_gradient_or_a_fault_is_heard() -> None:
    good = Statement(digest("a"), presence("p"))
    bad = Statement(digest("a"), presence("p"), nonfinite=torch.tensor(True))
    header = meet([good, bad, good])
    assert not read_header(header, presence("p")).finite
    assert not accepted(header, refuse_nonfinite=True)
    assert accepted(header, refuse_nonfinite=False)
    header = meet([good, Statement(digest("a"), fault=True)])
    assert read_header(header, presence("p")).fault
    assert not accepted(header, refuse_nonfinite=False)


def test_parameters_beyond_the_slots_share_them() -> None:
    many = presence("p" * SLOTS + "m")
    header = meet([Statement(digest("a"), many)])
    assert read_header(header, many).conflict == ("w0", f"w{SLOTS}")


@pytest.mark.parametrize("elsewhere", [GOOD, SKIP, ERROR])
def test_the_worst_of_all_meshes_counts(elsewhere: int) -> None:
    word = torch.tensor(elsewhere, dtype=torch.uint8)
    header = meet([Statement(digest("a")), Statement(digest("a"), elsewhere=word)])
    assert int(severity_of(header, ERROR)) == elsewhere
    bad = Statement(digest("a"), nonfinite=torch.tensor(True), elsewhere=word)
    assert int(severity_of(meet([bad]), SKIP)) == max(SKIP, elsewhere)
