"""How fast a kind of device is: what turns a plan into milliseconds.

Owns the model of time and the numbers of known devices. They predict; nothing that a step computes
depends on them. All rates are per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardmuon.planning.cost import newton_schulz_flops, panel_flops

__all__ = ["DEVICES", "Device", "Link", "Rate"]


@dataclass(frozen=True)
class Rate:
    """Newton-Schulz of a batch of n x m matrices, n <= m, of F FLOPs in all.

    It takes F / tflops * (1 + half / n) + batch_ms: matrices of `half` rows reach half the rate.
    """

    tflops: float
    half: float
    batch_ms: float

    def ms(self, flops: float, rows: int) -> float:
        return flops / self.tflops * 1e-9 * (1 + self.half / rows) + self.batch_ms


@dataclass(frozen=True)
class Link:
    """A collective that brings a rank `size` bytes takes ms + size / gbs."""

    gbs: float
    ms: float

    def time_ms(self, size: float) -> float:
        return self.ms + size / self.gbs * 1e-6 if size else 0.0


@dataclass(frozen=True)
class Device:
    """A rank's processor, its memory and its links.

    rates: of Newton-Schulz by method. memory_gbs: bytes that elementwise work reads or writes.
    near: link between the `near_ranks` ranks of a host; far: between hosts. host_ms,
    host_ms_per_matrix: what Python takes in a step. is_host: it is a CPU, which then does nothing
    else, and which orthogonalizes one matrix at a time.
    """

    name: str
    rates: Mapping[str, Rate]
    memory_gbs: float
    near: Link
    far: Link
    near_ranks: int
    host_ms: float = 0.0
    host_ms_per_matrix: float = 0.0
    is_host: bool = False

    def newton_schulz_ms(
        self, count: int, rows: int, cols: int, segments: tuple[int, ...], method: str
    ) -> float:
        """Milliseconds for a batch of `count` matrices."""
        rate = self.rates.get(method) or self.rates["standard"]
        flops, side = newton_schulz_flops(rows, cols, segments, method), min(rows, cols)
        if self.is_host:
            return count * rate.ms(flops, side)
        return rate.ms(count * flops, side)

    def panel_ms(
        self,
        count: int,
        rows: int,
        cols: int,
        segments: tuple[int, ...],
        team: int,
        wire_bytes: int,
    ) -> float:
        """Milliseconds for a team's batch of `count` matrices; rows is their shorter side.

        At the start of each segment a square matrix is summed over the team: its parts are sent
        to be summed, and the sums are sent to all. The norm takes one small exchange.
        """
        rate = self.rates.get("gram") or self.rates["standard"]
        flops = count * panel_flops(rows, -(-cols // team), segments)
        link = self.link(team)
        sums = 2 * len(segments) * link.time_ms(count * rows**2 * wire_bytes * (1 - 1 / team))
        return rate.ms(flops, rows) + sums + link.ms

    def best_method(self, count: int, rows: int, cols: int, segments: tuple[int, ...]) -> str:
        """The quickest method for such a batch."""
        return min(
            self.rates, key=lambda name: self.newton_schulz_ms(count, rows, cols, segments, name)
        )

    def link(self, ranks: int) -> Link:
        """What a mesh of that many ranks communicates over."""
        return self.near if ranks <= self.near_ranks else self.far


DEVICES: dict[str, Device] = {
    # Rates: fitted to the tables of docs/benchmarks.md, section Newton-Schulz, which they meet
    # within 9 %. Link of a host: all-to-all of 2 ranks over NVLink, 1 MB to 1 GB. Link between
    # hosts: an assumption, 400 Gbit/s per GPU. Host: steps of gpt160m on one GPU.
    "h200": Device(
        name="h200",
        rates={
            "standard": Rate(tflops=654.0, half=322.0, batch_ms=0.131),
            "symmetric": Rate(tflops=681.0, half=378.0, batch_ms=0.111),
            "gram": Rate(tflops=704.0, half=710.0, batch_ms=0.125),
        },
        memory_gbs=4000.0,
        near=Link(gbs=330.0, ms=0.09),
        far=Link(gbs=45.0, ms=0.15),
        near_ranks=8,
        host_ms=1.5,
        host_ms_per_matrix=0.045,
    ),
    # One core of a server's CPU, float32, by `tools/machine.py`; link: processes of one host that
    # talk over gloo.
    "cpu": Device(
        name="cpu",
        rates={
            "standard": Rate(tflops=0.069, half=0.0, batch_ms=0.17),
            "symmetric": Rate(tflops=0.048, half=0.0, batch_ms=0.29),
            "gram": Rate(tflops=0.044, half=0.0, batch_ms=0.30),
        },
        memory_gbs=26.0,
        near=Link(gbs=1.0, ms=0.2),
        far=Link(gbs=1.0, ms=0.2),
        near_ranks=64,
        host_ms=2.0,
        host_ms_per_matrix=0.1,
        is_host=True,
    ),
}
