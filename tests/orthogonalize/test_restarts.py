"""The search for new starts: its emulation, and that the presets hold what it finds."""

from __future__ import annotations

import pytest
import torch

from shardmuon.orthogonalize.coefficients import PRESETS, schedule_of
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.tools.accuracy import KINDS, conditioned, error
from tests.orthogonalize import restarts
from tests.orthogonalize.restarts import Emulation, search

STEPS = 5
SMALL = ((128, 128), (128, 512))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_without_rounding_the_emulation_is_the_method(name: str) -> None:
    schedule = schedule_of(name, STEPS)
    x = torch.stack([conditioned("gaussian", 12, 30, seed) for seed in range(3)])
    unit = (x / (torch.linalg.matrix_norm(x, keepdim=True) * schedule.margin)).float()
    right = newton_schulz(x, schedule, None, torch.float64)
    assert error(restarts.standard(unit, schedule.triples, torch.float32), right) < 1e-5
    for segments in range(1, STEPS + 1):
        for cut, out in restarts.gram(unit, schedule.triples, torch.float32, segments):
            assert len(cut) == segments
            assert error(out, right) < 1e-4


def test_every_cut_is_tried_once() -> None:
    x = torch.ones(1, 1, 1)
    triples = schedule_of("cubic", 6).triples
    for segments, number in ((1, 1), (2, 5), (3, 10), (4, 10), (5, 5), (6, 1)):
        cuts = [cut for cut, _ in restarts.gram(x, triples, torch.float16, segments)]
        assert len(set(cuts)) == len(cuts) == number
        assert all(sum(cut) == 6 for cut in cuts)
    only = restarts.gram(x, triples, torch.float16, 3, (2, 1, 3))
    assert [cut for cut, _ in only] == [(2, 1, 3)]


def test_values_are_rounded_like_a_kernel_rounds_them() -> None:
    a = conditioned("gaussian", 64, 96).half().float() / 10
    right = (a.double() @ a.double().mT).half()
    out = restarts.product(a, a, torch.float16)
    assert torch.equal(out, out.half().float())
    # A sum in float32 may end on the other side of a tie.
    assert float((out.half() == right).double().mean()) > 0.99


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_hold_the_fewest_segments_that_will_do(name: str) -> None:
    schedule = schedule_of(name, STEPS)
    emulation = Emulation(schedule, SMALL, seeds=1)
    found = search(emulation, STEPS)
    assert len(found[-1].cut) == len(schedule.segments)
    stored = emulation.gram(torch.float16, schedule.segments) / emulation.limits()
    assert float(stored.max()) <= 1
    assert [each.load > 1 for each in found[:-1]] == [True] * (len(found) - 1)


def test_a_spiked_matrix_shows_what_others_hide() -> None:
    """Without them a long first segment would look nearly good enough."""
    emulation = Emulation(schedule_of("polar_express", STEPS), SMALL[:1], seeds=1)
    load = emulation.gram(torch.float16, (4, 1)) / emulation.limits()
    spiked = float(load[KINDS.index("spiked")])
    assert spiked > 3
    assert spiked > 2 * float(load[KINDS.index("1e6")])
