"""Records of a run for TensorBoard and Weights & Biases.

Owns which of them a run feeds and the names of numbers there. Their packages are imported only
when they are asked for. Must not import torch before that.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmuon.training.config import Logging
from shardmuon.training.load import ConfigError
from shardmuon.training.metrics import Tracker

__all__ = ["TensorBoard", "WandB", "check", "scalars", "start"]

_NAMES = {"evaluate": "validation"}


def check(config: Logging) -> None:
    """Raise ConfigError if a tracker is asked for whose package is missing; imports nothing."""
    for key, wanted, package in (
        ("tensorboard", config.tensorboard, "tensorboard"),
        ("wandb", config.wandb is not None, "wandb"),
    ):
        if wanted and not _is_installed(package):
            raise ConfigError(f"logging.{key}: needs {package}: pip install 'shardmuon[{package}]'")


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of that name, such as wandb makes, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def start(config: Logging, step: int, tree: Mapping[str, Any]) -> list[Tracker]:
    """The trackers that `config` asks for, for a run that starts or continues after `step` steps.

    tree: the whole configuration. One that cannot start is left out with a warning.
    """
    folder = Path(config.directory)
    asked: list[Callable[[], Tracker]] = []
    if config.tensorboard:
        asked.append(lambda: TensorBoard(folder / "tensorboard", step))
    if (project := config.wandb) is not None:
        asked.append(lambda: WandB(project, folder, tree))
    made: list[Tracker] = []
    for make in asked:
        try:
            made.append(make())
        except Exception as error:
            warnings.warn(
                f"a tracker could not start, training goes on without it: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
    return made


def scalars(event: str, numbers: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers under names such as train/loss and train/seconds/step."""
    return dict(_flat(_NAMES.get(event, event), numbers))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value


class TensorBoard:
    """Event files in `folder`; those of steps after `step`, from before a restart, are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = step + 1 if step or folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of a record; of a "start" nothing."""
        if event != "start":
            for name, value in scalars(event, numbers).items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """A run of `project`, whose id is kept in `folder` so that a resumed run continues it.

    Files go to `folder`; mode, entity and the like are wandb's own environment variables.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "wandb-id.txt"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            name=folder.name,
            config=dict(config),
            settings=wandb.Settings(console="off"),  # it would catch the live view
        )
        # Steps of our own: a resumed run repeats some, which wandb's counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, event: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Log the numbers of a record; of a "start" nothing."""
        if event != "start":
            self._run.log({"step": step, **scalars(event, numbers)})

    def close(self) -> None:
        """Hand over what is left."""
        self._run.finish()
