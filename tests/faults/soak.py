"""A long run on 4 ranks in which matrices come, are frozen and thaw: `python -m tests.faults.soak`.

Owns the run and what is compared: every 100 steps the shards with one process that takes the same
steps on whole tensors, replicas with each other, and memory with what it was. Bits must be equal,
and memory flat once nothing more is added.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardmuon
from shardmuon.planning.report import table
from tests.grids import cut, mesh_of, placed, same_bits
from tests.grids import random as normal
from tests.problems import local
from tests.ranks import RankPools

__all__ = ["Look", "soak"]

MESH = (2, 2)
LETTERS = ("R0", "00", "R1", "s0")
"""HSDP, rows over both axes, columns under replicas, FSDP2 over tensor parallelism."""
MOST = 24
RUNTIME = shardmuon.Runtime(deterministic=True, bucket_bytes=6000)


class Look(NamedTuple):
    """What was seen after a step: parameters, of them frozen, those that differ, resident bytes."""

    step: int
    parameters: int
    frozen: int
    differing: tuple[str, ...]
    resident: int


class _Pair:
    """The same parameters sharded on this rank, and whole for one process; two optimizers."""

    def __init__(self) -> None:
        self.mesh = mesh_of(MESH)
        self.letters: list[str] = []
        self.shards: list[nn.Parameter] = []
        self.wholes: list[nn.Parameter] = []
        self.sharded: shardmuon.Muon | None = None
        self.alone: shardmuon.Muon | None = None

    def add(self, shape: tuple[int, ...], letters: str, seed: int) -> None:
        """One more parameter: a matrix for Muon, a vector for AdamW."""
        number = len(self.shards)
        letters = letters if len(shape) == 2 else "R0"
        values = normal(shape, seed)
        self.letters.append(letters)
        self.shards.append(nn.Parameter(placed(values, letters, self.mesh)))
        self.wholes.append(nn.Parameter(values.clone()))
        kind = {"lr": 0.02} if len(shape) == 2 else {"algorithm": "adamw", "lr": 1e-3}
        groups = [
            {"params": [(f"p{number}", side[number])], **kind}
            for side in (self.shards, self.wholes)
        ]
        if self.sharded is None or self.alone is None:
            options: dict[str, Any] = {"runtime": RUNTIME, "ns_dtype": torch.float32}
            self.sharded = shardmuon.Muon([groups[0]], mesh=self.mesh, **options)
            self.alone = shardmuon.Muon([groups[1]], **options)
        else:
            self.sharded.add_param_group(groups[0])
            self.alone.add_param_group(groups[1])

    def turn(self, number: int) -> None:
        """Freeze a parameter, or thaw it."""
        for side in (self.shards, self.wholes):
            side[number].requires_grad_(not side[number].requires_grad)
            side[number].grad = None

    def step(self, seed: int) -> None:
        assert self.sharded is not None
        assert self.alone is not None
        for number, (shard, whole) in enumerate(zip(self.shards, self.wholes, strict=True)):
            if shard.requires_grad:
                gradient = normal(tuple(whole.shape), seed + number)
                shard.grad = placed(gradient, self.letters[number], self.mesh)
                whole.grad = gradient
        self.sharded.step()
        self.alone.step()

    def differing(self) -> tuple[str, ...]:
        """Parameters or states of which this rank's part is not that of the whole, in bits."""
        assert self.sharded is not None
        assert self.alone is not None
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        names = []
        for number, (shard, whole) in enumerate(zip(self.shards, self.wholes, strict=True)):
            theirs = [whole, *self.alone.state[whole].values()]
            for mine, right in zip(
                [shard, *self.sharded.state[shard].values()], theirs, strict=True
            ):
                part = right
                if right.ndim:
                    part = cut(right, self.letters[number], MESH, coordinate)
                if not same_bits(_held(mine), part):
                    names.append(f"p{number}")
        self.sharded.check_replicas()
        return tuple(names)


def _held(tensor: Tensor) -> Tensor:
    return local(tensor).detach()


def soak(steps: int, seed: int, every: int) -> list[Look]:
    """What this rank saw. Parameters are added in the first half."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".* are plain tensors")  # those of one process
    rng = random.Random(seed)
    pair = _Pair()
    for _ in range(4):
        _add(pair, rng)
    looks = []
    for step in range(1, steps + 1):
        if (
            step % max(1, steps // (2 * MOST)) == 0
            and step < steps // 2
            and len(pair.shards) < MOST
        ):
            _add(pair, rng)
        if step % 7 == 0:
            pair.turn(rng.randrange(len(pair.shards)))
        pair.step(rng.randrange(2**30))
        if step % every == 0:
            frozen = sum(not p.requires_grad for p in pair.shards)
            looks.append(Look(step, len(pair.shards), frozen, pair.differing(), _resident()))
    return looks


def _add(pair: _Pair, rng: random.Random) -> None:
    shape = (
        (rng.randrange(1, 40), rng.randrange(1, 40))
        if rng.random() < 0.8
        else (rng.randrange(1, 50),)
    )
    pair.add(shape, rng.choice(LETTERS), rng.randrange(2**30))


def _resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wrong(answers: Sequence[Sequence[Look]], allowed: int) -> list[str]:
    """What is not as it should be. allowed: bytes by which a rank may grow after the middle."""
    found = []
    for rank, looks in enumerate(answers):
        found += [
            f"rank {rank}, step {look.step}: {look.differing}" for look in looks if look.differing
        ]
        later = [look.resident for look in looks[len(looks) // 2 :]]
        growth = later[-1] - later[0]
        if growth > allowed:
            found.append(f"rank {rank} has grown by {growth / 1e6:.1f} MB in the second half")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pools = RankPools()
    begin = time.monotonic()
    try:
        answers = pools.run(4, soak, options.steps, options.seed, 100, limit_s=3600.0)
    finally:
        pools.stop()
    rows = [
        (
            str(looks[0].step),
            str(looks[0].parameters),
            str(looks[0].frozen),
            str(sum(bool(look.differing) for look in looks)),
            " ".join(f"{look.resident / 1e6:.1f}" for look in looks),
        )
        for looks in zip(*answers, strict=True)
    ]
    print(
        "\n".join(table(("step", "parameters", "frozen", "ranks that differ", "MB by rank"), rows))
    )
    print(f"{time.monotonic() - begin:.0f} s")
    faults = wrong(answers, allowed=2_000_000)
    print("\n".join(faults) or "nothing is wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
