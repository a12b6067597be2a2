"""Which checkpoint a run continues from, and what has changed since.

Owns the meaning of `checkpoint.resume`. Reads only names and manifests, so that a wrong path is
refused before a process group exists. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmuon.checkpoint import manifest as manifests
from shardmuon.checkpoint import publish
from shardmuon.training.config import Config
from shardmuon.training.load import ConfigError, as_tree, differences

__all__ = ["Resume", "at", "checkpoint_folder", "extra", "resolve"]

# How a run is watched or cut short changes nothing of what it computes.
_IRRELEVANT = (
    "checkpoint.",
    "evaluation.",
    "logging.",
    "mesh.check_replicas",
    "mesh.silent_s",
    "mesh.timeout_s",
    "schedule.stop_at",
)
# The tensors of a checkpoint fit only these.
_FIXED = ("model.", "optimizer.name", "optimizer.to_")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where to continue: `path` is None at step 0. `changes` are lines for the user."""

    path: Path | None = None
    step: int = 0
    changes: tuple[str, ...] = ()


def checkpoint_folder(config: Config) -> Path:
    """Folder of this run's checkpoints."""
    return Path(config.logging.directory) / "checkpoints"


def extra(
    config: Config,
    tree: Mapping[str, Any] | None,
    fingerprint: str,
    lrs: dict[str, float],
    step: int,
) -> dict[str, Any]:
    """What a manifest holds besides tensors and groups. `step` steps are done.

    tree: config.json of a model of transformers, so that a checkpoint can do without its folder.
    Schedule and data order are pure functions of step and seed, so the next step is their state.
    """
    return {
        "schedule": {"next_step": step, "lr": lrs},
        "data": {"next_step": step, "seed": config.seed, "fingerprint": fingerprint},
        "config": as_tree(config),
        "architecture": tree,
    }


def resolve(config: Config, fingerprint: str, ranks: int) -> Resume:
    """Find the checkpoint that `ranks` ranks resume from, by names, manifests and sizes of files.

    Raises ConfigError or CheckpointError.
    """
    folder = checkpoint_folder(config)
    wanted = config.checkpoint.resume
    if wanted == "none":
        if taken := publish.published(folder):
            raise ConfigError(
                f"checkpoint.resume: got 'none', but {folder} holds {taken[-1].name}; expected "
                "checkpoint.resume=auto to continue it, or another logging.directory"
            )
        return Resume()
    if wanted != "auto":
        return at(Path(wanted), config, fingerprint, ranks)
    paths = (path for path, wrong in publish.candidates(folder) if wrong is None)
    path = next(filter(_is_sound, paths), None)
    return Resume() if path is None else at(path, config, fingerprint, ranks)


def at(path: Path, config: Config, fingerprint: str, ranks: int) -> Resume:
    """Resume from the checkpoint at `path`. Raises ConfigError or CheckpointError."""
    manifest = manifests.read(path)
    data = manifest.get("data")
    if not isinstance(manifest.get("config"), dict) or not isinstance(data, dict):
        raise ConfigError(f"checkpoint.resume: {path} was not written by train.py")
    changes = _changes(path, manifest, config, fingerprint, ranks)
    return Resume(path=path, step=manifest["step"], changes=changes)


def _is_sound(path: Path) -> bool:
    try:
        manifests.read(path)
    except publish.CheckpointError:
        return False
    return True


def _changes(
    path: Path, manifest: dict[str, Any], config: Config, fingerprint: str, ranks: int
) -> tuple[str, ...]:
    lines = differences(manifest["config"], as_tree(config))
    if manifest["world_size"] != ranks:
        lines.append(f"ranks: {manifest['world_size']} -> {ranks}")
    # A model's folder may be moved; names and shapes are proven when the tensors are loaded.
    paths = (manifest["config"].get("model", {}).get("path"), config.model.path)
    for line in lines:
        if line.startswith("model.path: ") and None not in paths:
            continue
        if line.startswith(_FIXED):
            raise ConfigError(f"checkpoint.resume: {path} does not fit, {line}; expected no change")
    changes = [line for line in lines if not line.startswith(_IRRELEVANT)]
    if manifest["data"].get("fingerprint") != fingerprint:
        changes.append("data: other files or sizes, so the order of samples is not the same")
    return tuple(changes)
