"""Saves and loads checkpoints of a training job, on all ranks together.

Owns the order of a save (collect, copy, write, verify, publish), who does what, and that every
error is one on all ranks. Talks over a process group of its own, on the host: storage that is slow
or fails must not reach the groups that train. With `asynchronous`, a thread does what comes after
the copy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardmuon.checkpoint import manifest as manifests
from shardmuon.checkpoint import publish
from shardmuon.checkpoint.contents import (
    Contents,
    collect,
    forget_state,
    named_tensors,
    random_of,
    random_state,
    restore_random,
    targets,
)
from shardmuon.checkpoint.publish import CheckpointError, FileRecord, published, unfinished
from shardmuon.checkpoint.settings import change_groups, group_changes
from shardmuon.checkpoint.storage import Planner, Reader, Writer
from shardmuon.checkpoint.together import Ranks
from shardmuon.exchange.blocks import local

__all__ = ["Checkpointer", "Found"]

_OWN_KEYS = publish.SEALING_KEYS | {"step", "world_size", "groups", "aliases", "random"}


@dataclass(frozen=True)
class Found:
    """The newest usable checkpoint, None if there is none; a line for each one passed over."""

    path: Path | None
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _Save:
    """One save under way. copies: what to write instead of the live tensors."""

    step: int
    contents: Contents
    extra: Mapping[str, Any]
    random: Mapping[str, str]
    copies: Mapping[str, Tensor] | None


class Checkpointer:
    """Checkpoints in the folder `root`, which all ranks see.

    Args:
        root: folder of the checkpoints; one job at a time may save into it.
        keep_last: how many of the newest to keep; None keeps all. Older ones are removed once a
            new one is published.
        asynchronous: `save` returns when the state is copied to host memory, which takes as much
            of it as the state; files are written meanwhile. The next `save` waits for the last.
        read_back: read every file again and compare it before publishing.
        timeout_s: how long a rank waits for another one's reading or writing.

    All methods are collective over all ranks of the job. Making one makes a gloo process group.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        read_back: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, expected at least 1 or None")
        self.root = Path(root)
        self.keep_last = keep_last
        self.read_back = read_back
        self.ranks = Ranks(timeout_s)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[Path] | None = None
        self._copies: dict[str, Tensor] = {}
        self._opened: tuple[Path, dict[str, Any], Reader] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint after `step` steps; returns the folder that it has or will have.

        extra: JSON values that come back from `load`, those of the first rank. Without an optimizer
        only weights are saved.
        Raises CheckpointError on all ranks, with earlier checkpoints as they were, if this save or
        the asynchronous one before fails.
        """
        self.wait()

        def take() -> _Save:
            contents = collect(model, optimizer)
            copies = None if self._thread is None else self._copy(contents.tensors)
            return _Save(step, contents, _plain(extra or {}), random_state(), copies)

        job = self.ranks.together("save", take)
        if self._thread is None:
            return self._write(job)
        self._pending = self._thread.submit(self._write, job)
        return publish.final_path(self.root, step)

    def wait(self) -> None:
        """Until the asynchronous save under way is published; raises its CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def raise_error(self) -> None:
        """Raise the CheckpointError of an asynchronous save that has failed.

        Does not wait, so some ranks may raise it a call later than others.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait, and give up thread and process group."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self.ranks.close()

    def newest(self) -> Found:
        """Look for the newest checkpoint that is complete and whose files have their checksums."""
        self.wait()
        paths, skipped = self.ranks.together("list checkpoints", self._list)
        paths, skipped = self.ranks.broadcast((paths, skipped))
        for path in paths:
            try:
                self.open(path)
                return Found(path, tuple(skipped))
            except CheckpointError as error:
                skipped.append(f"{path.name} is skipped: {error}")
        return Found(None, tuple(skipped))

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        settings: bool = True,
    ) -> dict[str, Any]:
        """Load model, optimizer state and random numbers in place; returns the manifest.

        Works from any number of ranks and placement to any other. Parameters are matched by name.
        settings: take the groups' settings (lr, ...) from the checkpoint, or keep what they are;
        algorithm and cutting of a parameter must be the same in any case. Random numbers come back
        on ranks that there were. Without an optimizer only the model is loaded.

        Raises CheckpointError on all ranks, before anything is changed, if a file is missing or
        damaged, if the manifest or the index is not of the right form, if names, shapes or
        structure do not fit, or if a setting is out of range.
        """
        self.wait()
        path = Path(path)
        manifest, reader = self.open(path)
        if optimizer is not None and not manifest["groups"]:
            raise CheckpointError(
                f"{path} holds no optimizer state; load it without an optimizer to take the weights"
            )
        had_state = set() if optimizer is None else set(optimizer.state)

        def prepare() -> tuple[
            dict[str, Tensor], list[dict[str, Any]], dict[str, Tensor], list[Tensor]
        ]:
            random = random_of(manifest["random"].get(str(self.ranks.rank), {}))
            changes = []
            if optimizer is not None:
                changes = group_changes(
                    optimizer, named_tensors(model)[0], manifest["groups"], settings
                )
            return random, changes, *targets(model, optimizer, reader.index())

        try:
            random, changes, tensors, anew = self.ranks.together(f"load {path}", prepare)
        except CheckpointError:
            if optimizer is not None:
                forget_state(optimizer, had_state)
            raise
        self.ranks.dcp(
            f"load {path}",
            lambda: dcp.load(
                dict(tensors),
                storage_reader=reader,
                process_group=self.ranks.group,
                no_dist=self.ranks.group is None,
            ),
        )
        for tensor in anew:
            tensor.zero_()
        if optimizer is not None:
            change_groups(optimizer, changes)
        restore_random(random)
        return manifest

    # -- parts ----------------------------------------------------------------------------------

    def _list(self) -> tuple[list[Path], list[str]]:
        """(published folders, newest first; a line for each unfinished one), on the first rank."""
        if not self.ranks.first:
            return [], []
        lines = [f"{path.name} is skipped: its save did not end" for path in unfinished(self.root)]
        return published(self.root)[::-1], lines

    def open(self, path: Path) -> tuple[dict[str, Any], Reader]:
        """Manifest and reader of a checkpoint that all ranks see and whose files are undamaged."""
        if self._opened is not None and self._opened[0] == path:
            return self._opened[1:]
        rank, ranks = self.ranks.rank, self.ranks.count

        def look() -> dict[str, Any]:
            manifest = manifests.read(path)
            share = sorted(manifest["files"])[rank::ranks]  # the ranks read every file once
            damage = publish.first_damaged(path, manifest["files"], share)
            if damage is not None:
                raise CheckpointError(damage)
            return manifest

        manifest = self.ranks.together(f"open {path}", look)
        self._opened = (path, manifest, Reader(path, manifest["files"]))
        return self._opened[1:]

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's blocks in host memory, which is kept from one save to the next."""
        copies = {}
        for key, tensor in tensors.items():
            block, old = local(tensor), self._copies.get(key)
            if old is None or old.shape != block.shape or old.dtype != block.dtype:
                old = torch.empty(
                    block.shape, dtype=block.dtype, device="cpu", pin_memory=block.is_cuda
                )
            copies[key] = old.copy_(block, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._copies = copies
        return copies

    def _write(self, job: _Save) -> Path:
        """Everything after the copy, on a thread or not. A failure leaves no temporary folder."""
        self._opened = None
        what = f"save step {job.step} to {self.root}"
        temporary = publish.temporary_path(self.root, job.step)
        first = self.ranks.first
        try:
            self.ranks.together(
                what, lambda: publish.open_temporary(self.root, job.step) if first else None
            )
            files = self._write_tensors(what, temporary, job)
            manifest = self._manifest(job)

            def finish() -> None:
                if first:
                    publish.publish(temporary, manifest, files)
                    if self.keep_last is not None:
                        publish.prune(self.root, self.keep_last, job.step)

            self.ranks.together(what, finish)
        except CheckpointError:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return publish.final_path(self.root, job.step)

    def _write_tensors(self, what: str, temporary: Path, job: _Save) -> dict[str, FileRecord]:
        writer = Writer(temporary)
        self.ranks.dcp(
            what,
            lambda: dcp.save(
                dict(job.contents.tensors),
                storage_writer=writer,
                planner=Planner(job.copies),
                process_group=self.ranks.group,
                no_dist=self.ranks.group is None,
            ),
        )

        def verify() -> dict[str, FileRecord]:
            if self.read_back:
                damage = publish.first_damaged(temporary, writer.files, writer.files)
                if damage is not None:
                    raise CheckpointError(damage)
            return writer.files

        mine = self.ranks.together(what, verify)
        shares = self.ranks.gather(mine)
        return {name: record for share in shares for name, record in share.items()}

    def _manifest(self, job: _Save) -> dict[str, Any]:
        """What is not a tensor, from all ranks."""
        random = self.ranks.gather(job.random)
        return {
            **job.extra,
            "step": job.step,
            "world_size": self.ranks.count,
            "groups": self._all_groups(job.contents),
            "aliases": dict(job.contents.aliases),
            "random": {str(rank): states for rank, states in enumerate(random)},
        }

    def _all_groups(self, contents: Contents) -> list[Mapping[str, Any]]:
        """Groups of all ranks, each once; pipeline stages have different ones."""
        mine = repr(contents.groups)
        said = self.ranks.gather(hashlib.sha256(mine.encode()).hexdigest())
        first_to_say = said.index(said[self.ranks.rank]) == self.ranks.rank
        told = self.ranks.gather(list(contents.groups) if first_to_say else [])
        return [group for groups in told for group in groups]


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `extra` as it will come back. Raises CheckpointError for names that are taken."""
    if taken := sorted(_OWN_KEYS & extra.keys()):
        raise CheckpointError(f"extra has keys that a manifest has of its own: {', '.join(taken)}")
    copy: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))
    return copy
