"""The training loop: steps, evaluation, checkpoints, metrics.

Owns the order of what happens in a run. Must not know how an optimizer works or how a checkpoint
is stored, and calls collectives only through the functions of `gradients` and `exchange`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardmuon.checkpoint import Checkpointer, publish
from shardmuon.exchange import collectives
from shardmuon.exchange.activity import during
from shardmuon.muon import Muon
from shardmuon.training import (
    architecture,
    batches,
    gradients,
    optimizers,
    place,
    resume,
    schedule,
    signals,
)
from shardmuon.training.architecture import Architecture
from shardmuon.training.config import Config
from shardmuon.training.data import Corpus
from shardmuon.training.metrics import Recorder
from shardmuon.training.optimizers import Built
from shardmuon.training.place import Place
from shardmuon.training.progress import Progress, validation_text
from shardmuon.training.timing import PhaseTimer, memory_bytes

__all__ = ["Parts", "Trainer"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of."""

    config: Config
    place: Place
    corpus: Corpus
    architecture: Architecture
    model: nn.Module
    built: Built
    checkpoints: Checkpointer


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Numbers of one step, on the device; `update_rms` is None if the step is not logged.

    stop_wishes: how many ranks were asked to stop.
    """

    loss: Tensor
    grad_norm: Tensor
    stop_wishes: Tensor
    update_rms: float | None


class Trainer:
    """Runs the steps from `start` to the end of the run.

    `step` is the number of optimizer steps done; the step that runs has that index. `stopped` says
    that a signal ended the run early.
    """

    def __init__(
        self, parts: Parts, start: resume.Resume, records: Recorder, progress: Progress
    ) -> None:
        self.config, self.place, self.corpus = parts.config, parts.place, parts.corpus
        self.architecture = parts.architecture
        self.model, self.built = parts.model, parts.built
        self.optimizer = parts.built.optimizer
        self.checkpoints = parts.checkpoints
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.step = start.step
        self.last_step = min(self.config.schedule.stop_at or math.inf, self.config.schedule.steps)
        self.scheduler = schedule.build(self.optimizer, self.config.schedule, start.step)
        self.records, self.progress = records, progress
        self.timer = PhaseTimer(self.place.device)
        self.validation_loss = math.nan
        self.stopped = False
        self._stop_request = signals.StopRequest()
        self._evaluated = -1
        # A checkpoint of another folder does not make one here.
        here = publish.final_path(resume.checkpoint_folder(self.config), start.step)
        self._saved = start.step if start.path == here else -1

    def run(self) -> None:
        """Train to the end; evaluates there too, and saves. A signal ends it after a step."""
        with self._stop_request.listening():
            while self.step < self.last_step and not self.stopped:
                self._advance()
            if self._evaluated != self.step and not self.stopped:
                self.evaluate()
            if self._saved != self.step and (self.config.checkpoint.final or self.stopped):
                self.save()
            self.checkpoints.wait()
        if self.stopped and self.place.first:
            signals.write_marker(Path(self.config.logging.directory), step=self.step)

    def _advance(self) -> None:
        """One step and what is due after it."""
        config = self.config
        logged = (self.step + 1) % config.logging.every == 0 or self.step == 0
        with self.timer.phase("step"):
            result = self._train_step(logged)
        self.step += 1
        self.progress.advance(self.step)
        if logged:
            self._log(result)
        if config.mesh.check_replicas and self.step % config.mesh.check_replicas == 0:
            self._check_replicas()
        self.checkpoints.raise_error()
        self.stopped = self._stop_request.agreed(result.stop_wishes)
        if self.stopped:
            return
        if config.evaluation.every and self.step % config.evaluation.every == 0:
            self.evaluate()
        if config.checkpoint.every and self.step % config.checkpoint.every == 0:
            self.save()

    def _train_step(self, logged: bool) -> StepResult:
        with self.timer.phase("forward_backward"), during("forward and backward", waits=True):
            loss = self._accumulate()
            norm, wishes = gradients.clip_(
                self.parameters, self.config.clipping.max_norm, self._stop_request.wish
            )
        lr = optimizers.group_lrs(self.optimizer)
        size = gradients.UpdateSize(self.built.matrices) if logged else None
        if logged and self.config.logging.orthogonality and isinstance(self.optimizer, Muon):
            self.optimizer.measure_next_step()
        with self.timer.phase("optimizer"):
            self.optimizer.step()
        self.lr = lr
        self.scheduler.step()
        self.optimizer.zero_grad()
        return StepResult(
            loss=loss,
            grad_norm=norm,
            stop_wishes=wishes,
            update_rms=size.rms() if size else None,
        )

    def _accumulate(self) -> Tensor:
        """Forward and backward over this rank's share of the global batch; its mean loss."""
        count = self.config.accumulation.steps
        total = torch.zeros((), device=self.place.device)
        for micro_step in range(count):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(micro_step == count - 1)
            inputs, targets = batches.micro_batch(
                self.corpus.train, self.config, self.place, self.step, micro_step
            )
            loss = self._token_losses(inputs, targets).mean() / count
            loss.backward()
            total += loss.detach()
        return total

    def _token_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats of every token: [B, T] float32."""
        with place.autocast(self.model, self.place.device, self.config.precision):
            logits = architecture.logits(self.model, inputs)
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="none"
        ).view(targets.shape)

    def _log(self, result: StepResult) -> None:
        """Write and show the numbers of the step just done."""
        loss = float(collectives.all_reduce_sum_(result.loss)) / self.place.ranks
        if not math.isfinite(loss) and self.config.optimizer.runtime.nonfinite == "error":
            raise RuntimeError(f"the training loss of step {self.step} is {loss}")
        seconds = self.timer.take()
        data = self.config.data
        speed = data.batch_sequences * data.sequence_length / seconds["step"]
        self.records.write(
            "train",
            self.step,
            loss=loss,
            grad_norm=float(result.grad_norm),
            update_rms=result.update_rms,
            optimizer=self._optimizer_stats(),
            lr=self.lr,
            seconds=seconds,
            tokens_per_s=speed,
            memory_bytes=memory_bytes(self.place.device),
        )

    def _check_replicas(self) -> None:
        if isinstance(self.optimizer, Muon):
            self.optimizer.check_replicas()

    def _optimizer_stats(self) -> dict[str, float | None] | None:
        """What Muon did in the last step on the first rank; None for other optimizers."""
        if not isinstance(self.optimizer, Muon):
            return None
        return asdict(self.optimizer.stats)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean validation loss over all ranks, into metrics and `validation_loss`."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.device)  # loss, sequences
        for inputs, targets, weights in batches.validation_batches(
            self.corpus.validation, self.config, self.place
        ):
            losses = self._token_losses(inputs, targets).mean(dim=1)
            sums += torch.stack(((losses * weights).sum(), weights.sum())).double()
        self.model.train()
        total, count = collectives.all_reduce_sum_(sums).tolist()
        loss = self.validation_loss = total / count
        self.records.write("evaluate", self.step, loss=loss, bits_per_byte=self._bits_per_byte())
        self._evaluated = self.step

    @property
    def saved(self) -> bool:
        """Whether a checkpoint holds the state after the last step."""
        return self._saved == self.step

    def describe_validation(self) -> str:
        """The last validation loss in words."""
        return validation_text(self.validation_loss, self._bits_per_byte())

    def _bits_per_byte(self) -> float | None:
        """The last validation loss per byte of text; None where the text is not known."""
        known = self.corpus.bytes_per_token
        return self.validation_loss / math.log(2) / known if known else None

    def save(self) -> None:
        """Save a checkpoint of the state after `step` steps."""
        if isinstance(self.optimizer, Muon):
            self.optimizer.check()
        extra = resume.extra(
            self.config,
            self.architecture.tree,
            self.corpus.fingerprint,
            optimizers.group_lrs(self.optimizer),
            self.step,
        )
        path = self.checkpoints.save(self.step, self.model, self.optimizer, extra)
        saved = "is saving" if self.config.checkpoint.async_ else "saved"
        self.progress.say(self.step, f"{saved} {path}")
        self._saved = self.step
