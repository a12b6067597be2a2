"""Measures the device at hand, so that plans can be timed for it.

Owns the fit of `planning.device.Device` to this machine: Newton-Schulz, memory, the link of the
ranks that torchrun started, and Python's part of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardmuon.exchange import collectives
from shardmuon.muon import Muon
from shardmuon.orthogonalize.choice import milliseconds
from shardmuon.orthogonalize.coefficients import schedule_of
from shardmuon.orthogonalize.newton_schulz import METHODS, newton_schulz
from shardmuon.planning.cost import newton_schulz_flops
from shardmuon.planning.device import Device, Link, Rate
from shardmuon.training.place import Place

__all__ = ["measure"]

ROUNDS, ROUND_MS = 7, 60.0
# (matrices, rows, cols) of a batch. They must differ in rows, and in work for equal rows.
GPU_BATCHES = ((1, 512, 2048), (16, 512, 2048), (1, 1024, 4096), (8, 1024, 4096), (4, 2048, 8192))
CPU_BATCHES = ((1, 32, 128), (1, 64, 64), (1, 128, 512), (1, 256, 256), (1, 256, 1024))
SCHEDULE = schedule_of("keller", 5)


def measure(place: Place) -> Device:
    """This device, with the link between all ranks. Collective; the slowest rank counts."""
    cuda = place.device.type == "cuda"
    methods = METHODS if cuda else ("standard",)
    rates = {method: _rate(method, place.device) for method in methods}
    link = _link(place)
    host, per_matrix = _host_ms(place, link)
    found = Device(
        name="here",
        rates=rates,
        memory_gbs=_memory_gbs(place.device),
        near=link,
        far=link,
        near_ranks=place.ranks,
        host_ms=host,
        host_ms_per_matrix=per_matrix,
        is_host=not cuda,
    )
    everyone: list[Device] = collectives.gather_objects(found)
    return min(everyone, key=lambda device: device.rates["standard"].tflops)


def _rate(method: str, device: torch.device) -> Rate:
    """The three numbers of the model of time that fit measured batches best, relative errors."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    rows, times = [], []
    for count, n, m in GPU_BATCHES if cuda else CPU_BATCHES:
        shape = (count, n, m) if count > 1 else (n, m)
        x = torch.randn(shape, device=device, dtype=dtype)
        flops = count * newton_schulz_flops(n, m, SCHEDULE.segments, method) * 1e-9
        rows.append([flops, flops / n, 1.0])
        times.append(_median(partial(newton_schulz, x, SCHEDULE, 1e-7, dtype, method), x))
    model, measured = torch.tensor(rows).double(), torch.tensor(times).double()
    scaled = model / measured[:, None]
    per_flop, per_row, batch = _least_squares(scaled)
    return Rate(1 / per_flop, per_row / per_flop, batch)


def _least_squares(model: torch.Tensor) -> tuple[float, float, float]:
    """x >= 0 for which model x is nearest to ones: columns that would be negative are left out."""
    kept = list(range(model.size(1)))
    while True:
        x = torch.linalg.lstsq(model[:, kept], torch.ones(len(model), 1).double()).solution[:, 0]
        if bool((x >= 0).all()):
            break
        kept.pop(int(x.argmin()))
    full = [0.0, 0.0, 0.0]
    for index, value in zip(kept, x.tolist(), strict=True):
        full[index] = value
    return max(full[0], 1e-12), full[1], full[2]


def _median(run: Callable[[], object], x: torch.Tensor) -> float:
    """Of one run, from rounds of many, which all ranks begin together.

    In a step they share the machine too, and it is not shared in the time of one short run.
    """
    run()
    first = max(collectives.gather_objects(milliseconds(lambda _: run(), x)))
    count = max(1, int(ROUND_MS / first))

    def many() -> None:
        for _ in range(count):
            run()

    times = []
    for _ in range(ROUNDS):
        collectives.barrier()
        times.append(milliseconds(lambda _: many(), x) / count)
    return statistics.median(times)


def _memory_gbs(device: torch.device) -> float:
    """Bytes that an elementwise operation on two tensors reads and writes per second, in 10^9."""
    x = torch.randn(1 << (28 if device.type == "cuda" else 22), device=device)
    y = torch.randn_like(x)
    return 3 * x.nbytes / _median(lambda: y.lerp_(x, 0.5), x) * 1e-6


def _link(place: Place) -> Link:
    """From an all-to-all of small and of large messages."""
    if place.ranks == 1 or place.mesh is None:
        return Link(gbs=1e9, ms=0.0)
    group = place.mesh.get_group(0)
    sizes = (1 << 20, 1 << 28) if place.device.type == "cuda" else (1 << 12, 1 << 22)
    times = []
    for size in sizes:
        each = size // 4 // place.ranks
        send = torch.zeros(each * place.ranks, device=place.device)
        splits = [each] * place.ranks

        def exchange(send: torch.Tensor = send, splits: list[int] = splits) -> None:
            _, work = collectives.all_to_all(send, splits, splits, group)
            work.wait()

        times.append(_median(exchange, send))
    away = 1 - 1 / place.ranks
    per_byte = max(1e-12, (times[1] - times[0]) / ((sizes[1] - sizes[0]) * away))
    return Link(gbs=1e-6 / per_byte, ms=max(0.0, times[0] - per_byte * sizes[0] * away))


def _host_ms(place: Place, link: Link) -> tuple[float, float]:
    """Milliseconds of Python in a step: of any, and for each matrix more."""
    few, many = (_step_ms(count, place) for count in (4, 44))
    each = max(0.0, (many - few) / 40)
    return max(0.0, few - 4 * each - 3 * link.ms), each


def _step_ms(count: int, place: Place) -> float:
    """Of the host, for a step on matrices too small to compute on; header and one bucket."""
    values = [torch.ones(8, 2, device=place.device) for _ in range(count)]
    if place.mesh is not None:
        values = [DTensor.from_local(v, place.mesh, [Shard(0)], run_check=False) for v in values]
    params = [nn.Parameter(value) for value in values]
    optimizer = Muon(params, ns_method="standard", ns_steps=1)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(4 * ROUNDS):
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
