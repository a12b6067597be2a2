"""One training run from a checked configuration.

Owns the two halves of a start: `prepare` checks all that can be wrong with the user's input
without starting anything, `run` makes the process group, builds the parts and trains.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardmuon.checkpoint import Checkpointer, CheckpointError, publish
from shardmuon.checkpoint.export import load_weights
from shardmuon.exchange import collectives
from shardmuon.muon import Muon
from shardmuon.training import (
    architecture,
    data,
    optimizers,
    place,
    progress,
    resume,
    signals,
    trackers,
)
from shardmuon.training.architecture import Architecture
from shardmuon.training.config import Config
from shardmuon.training.load import ConfigError, as_tree
from shardmuon.training.loop import Parts, Trainer
from shardmuon.training.metrics import MetricsFile, Recorder
from shardmuon.training.place import Place
from shardmuon.watchdog import Watchdog

__all__ = ["Prepared", "prepare", "resume_command", "run"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run whose input is known to be good; no process group exists yet."""

    config: Config
    corpus: data.Corpus
    architecture: Architecture
    model: nn.Module
    device: torch.device
    start: resume.Resume


def prepare(config: Config) -> Prepared:
    """Find data, model, device and checkpoint. Raises ConfigError."""
    progress.check(config.logging.progress)
    trackers.check(config.logging)
    device = place.choose_device(config.mesh)
    found = architecture.find(config)
    corpus = data.open_corpus(config.data, found.vocab_size)
    try:
        start = resume.resolve(config, corpus.fingerprint, place.ranks_started())
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: {error}") from None
    weights = config.checkpoint.weights
    if weights is not None and not any(Path(weights).glob("*.safetensors")):
        raise ConfigError(
            f"checkpoint.weights: got '{weights}', expected a folder with .safetensors files"
        )
    model = found.build(config.seed)
    optimizers.check(model, config.optimizer)
    return Prepared(
        config=config, corpus=corpus, architecture=found, model=model, device=device, start=start
    )


def run(prepared: Prepared, arguments: Sequence[str]) -> None:
    """Train; `arguments` are those of the command line, for the resume command."""
    mesh = prepared.config.mesh
    here = place.start(mesh, prepared.device)
    with Watchdog(mesh.timeout_s, mesh.silent_s):
        _train(prepared, here, arguments)
        collectives.barrier()
    collectives.stop()


def _train(prepared: Prepared, here: Place, arguments: Sequence[str]) -> None:
    config = prepared.config
    torch.manual_seed(config.seed + here.data_rank)
    checkpoints = _checkpointer(config)
    start, notes = _agree(prepared, checkpoints)
    model = place.spread(prepared.model, here, config.precision, config.compute)
    if start.path is None and config.checkpoint.weights is not None:
        load_weights(config.checkpoint.weights, model)
    built = optimizers.build(model, config.optimizer, here.device, here.mesh)
    if start.path is not None:
        checkpoints.load(start.path, model, built.optimizer, settings=False)
    parts = Parts(
        config=config,
        place=here,
        corpus=prepared.corpus,
        architecture=prepared.architecture,
        model=model,
        built=built,
        checkpoints=checkpoints,
    )
    _announce(prepared, parts, start, notes)
    folder = Path(config.logging.directory)
    shown = progress.make(progress.choose(config.logging.progress, here.first))
    if here.first:
        signals.clear_marker(folder)
    with closing(_recorder(config, here, start.step, shown)) as records:
        records.write(
            "start",
            start.step,
            ranks=here.ranks,
            config=as_tree(config),
            loads_flops=_loads(built.optimizer),
        )
        trainer = Trainer(parts, start, records, shown)
        trainer.run()
    if here.first and config.logging.progress != "none":
        _conclude(trainer, arguments)
    checkpoints.close()


def _recorder(config: Config, here: Place, step: int, shown: progress.Progress) -> Recorder:
    """Where the first rank's numbers go; those of others go nowhere."""
    if not here.first:
        return Recorder([])
    file = MetricsFile(Path(config.logging.directory) / "metrics.jsonl")
    return Recorder([file, shown], trackers.start(config.logging, step, as_tree(config)))


def _loads(optimizer: torch.optim.Optimizer) -> list[int] | None:
    """Cost of each rank's Newton-Schulz in a step, in the order of ranks; None without Muon."""
    if not isinstance(optimizer, Muon):
        return None
    loads = optimizer.plan.loads()
    return [loads[rank] for rank in sorted(loads)]


def _checkpointer(config: Config) -> Checkpointer:
    settings = config.checkpoint
    return Checkpointer(
        resume.checkpoint_folder(config),
        keep_last=settings.keep_last,
        asynchronous=settings.async_,
        read_back=settings.verify == "read-back",
        timeout_s=settings.timeout_s,
    )


def _agree(prepared: Prepared, checkpoints: Checkpointer) -> tuple[resume.Resume, tuple[str, ...]]:
    """(where all ranks continue, a line for each checkpoint that cannot be used).

    Before the ranks could talk each looked at names and sizes alone; now the files are read.
    """
    if prepared.config.checkpoint.resume != "auto":
        return prepared.start, ()
    found = checkpoints.newest()
    if found.path is None:
        return resume.Resume(), found.skipped
    start = resume.at(
        found.path, prepared.config, prepared.corpus.fingerprint, place.ranks_started()
    )
    return start, found.skipped


def _announce(prepared: Prepared, parts: Parts, start: resume.Resume, notes: Sequence[str]) -> None:
    """Print what will be trained, and how the optimizer's work is shared."""
    here, optimizer = parts.place, parts.built.optimizer
    if isinstance(optimizer, Muon):
        optimizer.prepare()
    if not here.first or prepared.config.logging.progress == "none":
        return
    size = sum(p.numel() for p in parts.model.parameters())
    print(f"model: {size:,} parameters; {here.ranks} rank(s) on {here.device.type}")
    print(f"data: {prepared.corpus.description}")
    if prepared.corpus.is_bytes:
        bits = data.entropy_bits(prepared.corpus.validation)
        print(f"order-0 entropy of the validation text: {bits:.3f} bits per byte")
    print(parts.built.routing)
    if isinstance(optimizer, Muon):
        print(optimizer.plan.report())
    for line in notes:
        print(f"warning: {line}")
    if start.path is not None:
        print(f"resuming from {start.path} after step {start.step}")
        for line in start.changes:
            print(f"  changed since: {line}")
    print(flush=True)


def _conclude(trainer: Trainer, arguments: Sequence[str]) -> None:
    config = trainer.config
    folder = Path(config.logging.directory)
    newest = publish.final_path(resume.checkpoint_folder(config), trainer.step)
    if trainer.stopped:
        print("\nstopped by a signal, as soon as the step was done")
    print(f"\nstep {trainer.step} of {config.schedule.steps}: {trainer.describe_validation()}")
    print(f"metrics      {folder / 'metrics.jsonl'}")
    if not trainer.saved:
        return
    print(f"checkpoint   {newest}")
    if trainer.corpus.bytes_per_token is not None:  # else the way back to text is not known
        print(f"let it write {place.python()} -m shardmuon generate {shlex.quote(str(folder))}")
    if trainer.step < config.schedule.steps:
        print(f"resume       {resume_command(config, arguments)}")
    else:
        longer = [*arguments, f"schedule.steps={2 * config.schedule.steps}"]
        print(f"train longer {resume_command(config, longer)}")


def resume_command(config: Config, arguments: Sequence[str]) -> str:
    """The shell command that continues this run."""
    dropped = ("checkpoint.resume=", "schedule.stop_at=")
    kept = [a for a in arguments if not a.startswith(dropped)]
    kept = list({a.partition("=")[0]: a for a in kept}.values())
    if config.schedule.stop_at is not None:
        kept.append("schedule.stop_at=null")
    command = f"{place.launcher()} {shlex.join(['train.py', *kept, 'checkpoint.resume=auto'])}"
    nodes = place.nodes_started()
    return command if nodes == 1 else f"{command}  # on each of {nodes} nodes"
