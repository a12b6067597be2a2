"""Counts the bytes of tensors that live while code runs, on any device.

Owns the counter. It sees each tensor that this thread makes through torch's dispatcher, and
forgets a storage when it is freed. What a kernel takes and gives back inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """While entered, counts storages that are made meanwhile.

    live: their bytes now. peak: the most so far. largest: the most bytes of one storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._watched:
                self._watch(storage._cdata, storage)
        return result

    def _watch(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._watched[key]
            self.live -= size

        self._watched[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
    ]
