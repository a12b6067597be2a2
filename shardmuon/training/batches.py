"""Which samples each rank takes of a step, as tensors.

Owns the split of the global batch over ranks and accumulation steps; ranks of one tensor-parallel
group take the same. What the global batch holds is `data.py`'s matter and does not depend on that
split.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardmuon.training.config import Config
from shardmuon.training.data import Tokens
from shardmuon.training.place import Place

__all__ = ["micro_batch", "places_of", "validation_batches"]


def places_of(micro_step: int, rank: int, ranks: int, size: int) -> range:
    """Places in the global batch that `rank` takes in `micro_step`, `size` at a time."""
    start = (micro_step * ranks + rank) * size
    return range(start, start + size)


def micro_batch(
    tokens: Tokens, config: Config, place: Place, step: int, micro_step: int
) -> tuple[Tensor, Tensor]:
    """(inputs, targets) [B, T] int64 on the device; step and micro_step count from 0."""
    size = config.micro_batch_sequences(place.data_ranks)
    places = places_of(micro_step, place.data_rank, place.data_ranks, size)
    rows = np.stack([tokens.sample(config.seed, step, index) for index in places])
    return _shifted(rows, place.device)


def validation_batches(
    tokens: Tokens, config: Config, place: Place
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(inputs, targets [B, T], weights [B] float32) of this rank, the same number on each rank.

    Sharded models need all ranks in each forward pass, so a rank that has fewer sequences gets
    rows of weight 0 to fill up.
    """
    count = config.evaluation.sequences
    size = config.micro_batch_sequences(place.data_ranks)
    batches = []
    for start in range(0, count, place.data_ranks * size):
        first = start + place.data_rank * size
        indices = range(first, first + size)
        rows = np.stack([tokens.spread(min(index, count - 1), count) for index in indices])
        weights = torch.tensor([float(index < count) for index in indices], device=place.device)
        batches.append((*_shifted(rows, place.device), weights))
    return batches


def _shifted(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device
) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(rows)
    if device.type == "cuda":
        ids = ids.pin_memory().to(device, non_blocking=True)
    return ids[:, :-1], ids[:, 1:]
