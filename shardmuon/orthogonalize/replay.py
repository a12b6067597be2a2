"""Newton-Schulz of small batches as CUDA graphs.

Owns the captured graphs and the memory that they keep. A step of a small model is bound by the
host, which launches some twenty kernels per batch; a graph launches them at once. Graphs are made
by `warm_up`, never in the middle of a step, where other streams are at work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import Schedule
from shardmuon.orthogonalize.newton_schulz import newton_schulz

__all__ = ["Replay", "clear", "orthogonalize", "pays", "warm_up"]

# Larger batches keep the GPU busy for longer than the host needs to launch them.
MOST_ELEMENTS = 2**26
# All graphs together keep at most this many bytes of inputs and outputs.
MOST_BYTES = 2**29

Key = tuple[object, ...]


class Replay:
    """`run` on inputs like `example`, captured. The results of a call are fresh tensors.

    beside: a graph that never runs at the same time, whose memory this one may use between calls.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], example: Tensor, beside: Replay | None = None
    ) -> None:
        self._input = example.clone(memory_format=torch.contiguous_format)
        side = torch.cuda.Stream(example.device)
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):
            run(self._input)  # compiles and chooses kernels, which no capture may do
        torch.cuda.current_stream(example.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile.
        pool = beside._graph.pool() if beside else None
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = run(self._input)

    def __call__(self, x: Tensor) -> Tensor:
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()

    @property
    def nbytes(self) -> int:
        """Bytes that stay allocated between calls; what lies between is shared by all graphs."""
        return self._input.nbytes + self._output.nbytes


_replays: OrderedDict[Key, Replay] = OrderedDict()


def pays(x: Tensor) -> bool:
    """Whether batches like `x` are run as a graph."""
    return x.is_cuda and 0 < x.numel() <= MOST_ELEMENTS


def orthogonalize(x: Tensor, schedule: Schedule, eps: float | None, method: str) -> Tensor:
    """`newton_schulz` in the dtype of `x`; by a graph if `warm_up` has made one. Equal bits."""
    key = _key(x, schedule, eps, method)
    replay = _replays.get(key)
    if replay is None:
        return newton_schulz(x, schedule, eps, x.dtype, method)
    _replays.move_to_end(key)
    return replay(x)


def warm_up(example: Tensor, schedule: Schedule, eps: float | None, method: str) -> None:
    """Compile the kernels for batches like `example`, and make their graph where it pays."""
    key = _key(example, schedule, eps, method)
    if not example.is_cuda or key in _replays:
        return

    def run(x: Tensor) -> Tensor:
        return newton_schulz(x, schedule, eps, x.dtype, method)

    if not pays(example):
        run(example)
        return
    beside = next((replay for other, replay in _replays.items() if other[0] == key[0]), None)
    _replays[key] = Replay(run, example, beside)
    while sum(replay.nbytes for replay in _replays.values()) > MOST_BYTES:
        _replays.popitem(last=False)


def clear() -> None:
    """Forget all graphs and free their memory."""
    _replays.clear()


def _key(x: Tensor, schedule: Schedule, eps: float | None, method: str) -> Key:
    """What a graph is good for. Its buffers belong to one stream: others may run meanwhile."""
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    return stream, tuple(x.shape), x.dtype, x.device, schedule, eps, method
