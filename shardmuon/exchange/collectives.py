"""The only file of the library that calls collectives.

Owns the spelling of torch.distributed calls (2.11 and 2.13 differ) and the rule that a group of
one rank, or no process group at all, makes no call. Knows nothing of matrices, plans or buckets.
`calls` counts what was issued, so that a step's collectives can be checked against its plan.
"""

from __future__ import annotations

import atexit
import datetime
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Group",
    "Work",
    "all_gather",
    "all_reduce_max_",
    "all_reduce_sum_",
    "all_to_all",
    "barrier",
    "broadcast_object",
    "calls",
    "close_group",
    "device_type",
    "from_first",
    "gather_objects",
    "host_group",
    "is_group",
    "is_initialized",
    "meeting_device",
    "private_groups",
    "rank",
    "side_channel",
    "start",
    "stop",
    "world_size",
]

Group = Any  # dist.ProcessGroup is an alias of a C++ class that type checkers cannot see through

calls: Counter[str] = Counter()
"""Collectives issued by this process since import, by kind; groups of one rank issue none."""


class Work:
    """Handle of an asynchronous collective that also keeps its buffers alive until `wait`.

    A buffer freed under a running collective is reused by the allocator and corrupts the data of
    whoever reads or writes it next; holding the references here makes that impossible.
    """

    def __init__(self, handle: Any, *buffers: Tensor) -> None:
        self._handle = handle
        self._buffers = buffers
        _recent.extend(weakref.ref(buffer) for buffer in buffers if not buffer.is_cuda)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done: the host for CPU groups, the current stream for CUDA groups.

        timeout_s bounds the host's wait (CPU groups only; the group's own timeout holds for CUDA).
        """
        if self._handle is not None and timeout_s is not None and not self._buffers[0].is_cuda:
            self._handle.wait(datetime.timedelta(seconds=timeout_s))
        elif self._handle is not None:
            self._handle.wait()
        self._handle = None
        self._buffers = ()


_recent: deque[weakref.ref[Tensor]] = deque(maxlen=16)


@atexit.register
def _outlast_workers() -> None:
    """Wait half a second at most for gloo's threads to let go of the last buffers.

    A thread that drops the last reference to a tensor needs the interpreter for it, and aborts the
    process if that is ending (torch 2.13; a few of a hundred exits on a busy machine).
    """
    deadline = time.monotonic() + 0.5
    while any(buffer() is not None for buffer in _recent) and time.monotonic() < deadline:
        time.sleep(0.001)


def is_initialized() -> bool:
    """True if this process has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank() -> int:
    """Global rank, 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def world_size(group: Group = None) -> int:
    """Ranks in `group` (default: all), 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def is_group(value: object) -> bool:
    """True for a process group."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def device_type(group: Group) -> str:
    """Kind of device that `group` communicates from."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def meeting_device(computed_on: Collection[str]) -> torch.device:
    """Device from which all ranks reduce numbers together: of the same kind on all of them.

    computed_on: kinds of device that this rank's tensors are computed on. They only count where
    ranks can meet on the host and on a GPU; without any, it counts whether a GPU is in use.
    """
    gpus = sorted(set(computed_on) - {"cpu"})
    if is_initialized():
        backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
        # gloo takes tensors of GPUs too, but waits on the host anyway.
        able = [kind for kind, name in backends.items() if kind != "cpu" and name != "gloo"]
        if "cpu" in backends:
            gpus = [kind for kind in able if _is_in_use(kind, computed_on)]
        else:
            gpus = able
    if not gpus:
        return torch.device("cpu")
    return torch.device(gpus[0], torch.get_device_module(gpus[0]).current_device())


def _is_in_use(kind: str, computed_on: Collection[str]) -> bool:
    if computed_on:
        return kind in computed_on
    return bool(torch.get_device_module(kind).is_initialized())


def start(backend: str, timeout_s: float, device: torch.device | None = None) -> None:
    """Make the default process group from torchrun's environment variables."""
    dist.init_process_group(
        backend, timeout=datetime.timedelta(seconds=timeout_s), device_id=device
    )


def stop() -> None:
    """Destroy the default process group, if there is one."""
    if is_initialized():
        dist.destroy_process_group()


def host_group(timeout_s: float) -> Group:
    """A new group of all ranks that talk from the host; None without a process group. Collective.

    Errors and timeouts on it leave other groups as they are, and it may be used by a thread.
    """
    if not is_initialized():
        return None
    calls["new_group"] += 1
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def private_groups(groups: Sequence[Group]) -> list[Group]:
    """A new group of the same ranks for each of `groups`, in which nobody else communicates.

    Collective over the whole world, whose ranks may bring different groups, or none.
    """
    mine = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    everyones = sorted({ranks for some in gather_objects(mine) for ranks in some})
    made = {}
    for ranks in everyones:  # torch wants all ranks at the making of every group
        calls["new_group"] += 1
        made[ranks] = dist.new_group(list(ranks))
    return [made[ranks] for ranks in mine]


def close_group(group: Group) -> None:
    """Destroy a group made by `host_group`, if it still is one."""
    if group is not None and is_initialized():
        dist.destroy_process_group(group)


def side_channel(prefix: str, timeout_s: float) -> Any:
    """A store that all ranks share, on a connection of its own, so that a thread may use it.

    It is that of the rendezvous, and works while process groups are stuck.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(prefix, default.clone())
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def barrier(group: Group = None) -> None:
    """Wait for all ranks of `group`."""
    if world_size(group) > 1:
        calls["barrier"] += 1
        dist.barrier(group)


def all_reduce_sum_(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum `tensor` over `group` in place and return it."""
    if world_size(group) > 1:
        calls["all_reduce"] += 1
        Work(dist.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op=True), tensor).wait()
    return tensor


def all_reduce_max_(tensor: Tensor, group: Group = None, timeout_s: float | None = None) -> Tensor:
    """Elementwise maximum of `tensor` over `group`, in place; returns it. See `Work.wait`."""
    if world_size(group) > 1:
        calls["all_reduce"] += 1
        handle = dist.all_reduce(tensor, dist.ReduceOp.MAX, group, async_op=True)
        Work(handle, tensor).wait(timeout_s)
    return tensor


def broadcast_object(value: Any, source: int = 0, group: Group = None) -> Any:
    """The picklable `value` of global rank `source`, on every rank of `group`."""
    if world_size(group) == 1:
        return value
    calls["broadcast_object"] += 1
    box = [value]
    dist.broadcast_object_list(box, source, group)
    return box[0]


def from_first(value: Any, group: Group) -> Any:
    """The picklable `value` of the first rank of `group`, on every rank of it."""
    if world_size(group) == 1:
        return value
    return broadcast_object(value, dist.get_global_rank(group, 0), group)


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """The picklable `value` of every rank of `group`, in group order, on every rank."""
    size = world_size(group)
    if size == 1:
        return [value]
    calls["gather_objects"] += 1
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group)
    return values


def all_to_all(
    send: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: Group
) -> tuple[Tensor, Work]:
    """Start sending `send_splits[j]` consecutive elements of 1-D `send` to each group rank j.

    Returns (recv, work): recv is 1-D, holds `recv_splits[i]` elements from each group rank i in
    order, and may be read after `work.wait()`. `send` must not change before that.
    """
    recv = send.new_empty(sum(recv_splits))
    calls["all_to_all"] += 1
    handle = dist.all_to_all_single(
        recv, send, list(recv_splits), list(send_splits), group=group, async_op=True
    )
    return recv, Work(handle, send, recv)


def all_gather(send: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Start gathering 1-D `send` (same length on every rank) from all ranks of `group`.

    Returns (recv, work): recv is [ranks, len(send)], readable after `work.wait()`.
    """
    size = world_size(group)
    recv = send.new_empty(size, send.numel())
    calls["all_gather"] += 1
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    handle = gather(recv.view(-1), send, group=group, async_op=True)
    return recv, Work(handle, send, recv)
