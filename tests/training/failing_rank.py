"""`train.py` with a fault: rank 1 fails when it reads the batch of step 2."""

from __future__ import annotations

import sys
from typing import Any

from shardmuon.training import batches
from shardmuon.training.main import main

sound = batches.micro_batch


def faulty(tokens: Any, config: Any, place: Any, step: int, micro_step: int) -> Any:
    if place.rank == 1 and step == 2:
        raise OSError("the disk of this rank is gone")
    return sound(tokens, config, place, step, micro_step)


batches.micro_batch = faulty

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
