"""A short version of `python -m tests.faults.soak`."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.conftest import Worlds
from tests.faults.soak import soak, wrong


@pytest.mark.skipif(ranks.backend() == "nccl", reason="whole tensors are compared on the CPU")
def test_shards_keep_the_bits_of_one_process_while_parameters_come_and_freeze(
    pools: Worlds,
) -> None:
    answers = pools.run(4, soak, 48, 0, 12)
    assert [look.step for look in answers[0]] == [12, 24, 36, 48]
    assert answers[0][-1].parameters == 24
    assert answers[0][-1].frozen > 0
    assert not wrong(answers, allowed=20_000_000)  # too short to say more of memory
