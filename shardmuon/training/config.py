"""The configuration of a training run: one tree of frozen dataclasses, equal to one YAML file.

Owns every key, its type, default and meaning (the class docstrings are the reference page); ranges
that other parts share are those of `shardmuon.limits`.
Must not read files (`load.py` does), must not import torch, and changes no value in silence.
A word used below: *sequence* is one training sample of `data.sequence_length` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardmuon.limits import (
    AdjustLr,
    Count,
    CountOrZero,
    Decay,
    Finite,
    Fraction,
    Method,
    NormFloor,
    NotNegative,
    NsDtype,
    NsSteps,
    Positive,
    Preset,
    Seconds,
)
from shardmuon.runtime import Runtime
from shardmuon.training.inputs import Data, Model
from shardmuon.training.ranges import Section

__all__ = [
    "Accumulation",
    "AdamWGroups",
    "Checkpointing",
    "Clipping",
    "Compute",
    "Config",
    "Data",
    "Evaluation",
    "Logging",
    "Mesh",
    "Model",
    "MuonGroups",
    "OptimizerSection",
    "Precision",
    "Schedule",
]


@dataclass(frozen=True, kw_only=True)
class MuonGroups(Section):
    """Settings of the matrices of hidden layers under Muon; as in `torch.optim.Muon`.

    algorithm: "normuon" also divides each row of an update by its running size.
    lr: peak learning rate; the schedule scales it.
    weight_decay: decoupled decay, multiplied by the learning rate.
    cautious_weight_decay: decay only elements that the update moves towards zero, or leaves alone.
    momentum: share of the old momentum that is kept.
    momentum_warmup: steps over which momentum rises from momentum_start to momentum; 0 is none.
    momentum_start: momentum of the first step of that rise.
    nesterov: look one step ahead along the momentum.
    ns_coefficients: a, b, c of the Newton-Schulz polynomial, or the name of a preset.
    eps: least norm that a matrix is divided by; null divides by any norm but zero.
    ns_steps: Newton-Schulz iterations.
    ns_method: "standard" multiplies as torch does; "symmetric" and "gram" need fewer operations
        and agree within rounding; "auto" is the quickest on a GPU, standard on a CPU.
    adjust_lr_fn: scale by shape; null and "original" mean sqrt(max(1, rows / columns)),
        "match_rms_adamw" means 0.2 sqrt(max(rows, columns)), "spectral" sqrt(rows / columns).
    ns_dtype: type in which Newton-Schulz runs; null is bfloat16 on CUDA and float32 on CPU.
    ns_period: steps from one that orthogonalizes whole matrices to the next; those between take
        blocks of ns_block.
    ns_block: rows and columns of a block, one of which may be null for all; null without blocks.
    momentum_dtype: type of the momentum buffer; null is the parameter's type.
    beta2: share of the old average of a row that is kept; with algorithm "normuon" only, where null
        is 0.95.
    """

    algorithm: Literal["muon", "normuon"] = "muon"
    lr: NotNegative = 1e-3
    weight_decay: NotNegative = 0.1
    cautious_weight_decay: bool = False
    momentum: Decay = 0.95
    momentum_warmup: CountOrZero = 0
    momentum_start: Decay = 0.85
    nesterov: bool = True
    ns_coefficients: Preset | tuple[Finite, Finite, Finite] = "keller"
    eps: NormFloor | None = 1e-7
    ns_steps: NsSteps = 5
    ns_method: Method = "auto"
    adjust_lr_fn: AdjustLr | None = None
    ns_dtype: NsDtype | None = None
    ns_period: Count = 1
    ns_block: tuple[Count | None, Count | None] | None = None
    momentum_dtype: Literal["float32", "bfloat16"] | None = None
    beta2: Decay | None = None

    def check(self) -> None:
        _check_belongs("beta2", self.beta2, self.algorithm, "normuon")
        if self.ns_period > 1 and self.ns_block is None:
            raise ValueError(
                f"ns_block: got null with ns_period {self.ns_period}, expected rows and columns"
            )


@dataclass(frozen=True, kw_only=True)
class AdamWGroups(Section):
    """Settings of all other parameters, under AdamW as in `torch.optim.AdamW`, or under Lion.

    algorithm: "lion" steps by the sign of an average, and keeps half the state.
    lr: peak learning rate; the schedule scales it. null is 1e-3, under Lion 1e-4.
    betas: decay of the averages of the gradient and of its square; under Lion of the average in the
        update and of the one that is kept. null is 0.9 and 0.999, under Lion 0.9 and 0.99.
    eps: added to the root of the averaged square; null is 1e-8. Not under Lion.
    weight_decay: decoupled decay of embeddings, heads and matrices; norms and biases have none.
        null is 0.01, under Lion 0.
    cautious_weight_decay: decay only elements that the update moves towards zero, or leaves alone;
        null is false. Not under Lion, and not with optimizer.name: adamw.
    """

    algorithm: Literal["adamw", "lion"] = "adamw"
    lr: NotNegative | None = None
    betas: tuple[Decay, Decay] | None = None
    eps: NotNegative | None = None
    weight_decay: NotNegative | None = None
    cautious_weight_decay: bool | None = None

    def check(self) -> None:
        for key in ("eps", "cautious_weight_decay"):
            _check_belongs(key, getattr(self, key), self.algorithm, "adamw")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(Section):
    """Which optimizer, and its settings.

    name: "muon" puts matrices of hidden layers under Muon and all else under AdamW, in one
        optimizer; "adamw" puts everything under `torch.optim.AdamW`, for comparison.
    to_muon: name patterns (`*` allowed) of parameters to put under Muon all the same.
    to_adamw: name patterns of parameters to put under AdamW all the same.
    """

    name: Literal["muon", "adamw"] = "muon"
    muon: MuonGroups = field(default_factory=MuonGroups)
    adamw: AdamWGroups = field(default_factory=AdamWGroups)
    runtime: Runtime = field(default_factory=Runtime)
    to_muon: tuple[str, ...] = ()
    to_adamw: tuple[str, ...] = ()

    def check(self) -> None:
        if self.name == "adamw" and (self.to_muon or self.to_adamw):
            raise ValueError("name: got 'adamw' with to_muon or to_adamw, expected 'muon'")
        if self.name == "adamw" and self.adamw.cautious_weight_decay:
            raise ValueError(
                "adamw.cautious_weight_decay: got true with name 'adamw', expected false:"
                " torch.optim.AdamW does not have it"
            )
        if self.name == "adamw" and self.adamw.algorithm != "adamw":
            raise ValueError(
                f"adamw.algorithm: got {self.adamw.algorithm!r} with name 'adamw', expected 'adamw'"
            )


def _check_belongs(key: str, value: object, algorithm: str, owner: str) -> None:
    """Refuse a key that is given and that only another algorithm has."""
    if value is not None and algorithm != owner:
        raise ValueError(
            f"{key}: got {value} with algorithm {algorithm!r}, expected null: only {owner!r} has it"
        )


@dataclass(frozen=True, kw_only=True)
class Schedule(Section):
    """How long to train and how the learning rate of every group is scaled.

    steps: optimizer steps of the whole run.
    kind: "cosine" falls from the peak right after the warm-up; "stable" (warm-up, stable, decay)
        stays at the peak and falls linearly in the last `decay_steps`.
    warmup_steps: steps of linear warm-up; the first step has 1 / warmup_steps of the peak.
    decay_steps: length of the final fall of "stable".
    final: share of the peak that is left at the end.
    stop_at: end this run after that step, as if interrupted, with a checkpoint; null runs to
        `steps`. The schedule itself does not change.
    """

    steps: Count = 300
    kind: Literal["cosine", "stable"] = "cosine"
    warmup_steps: CountOrZero = 20
    decay_steps: CountOrZero = 0
    final: Fraction = 0.1
    stop_at: Count | None = None

    def check(self) -> None:
        used = self.warmup_steps + (self.decay_steps if self.kind == "stable" else 0)
        if used > self.steps:
            raise ValueError(
                f"warmup_steps: got {used} steps of warm-up and decay, "
                f"expected at most steps ({self.steps})"
            )


@dataclass(frozen=True, kw_only=True)
class Precision(Section):
    """Number formats. Parameters and optimizer state are kept in float32.

    compute: type of forward and backward.
    reduce: type in which gradients are summed over ranks.
    """

    compute: Literal["float32", "bfloat16"] = "float32"
    reduce: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class Compute(Section):
    """How the blocks of the model are computed; results stay the same up to rounding.

    activation_checkpointing: keep only the input of each block, and compute the block once more in
        backward: less memory for the time of one more forward pass.
    compile: `torch.compile` each block. Takes a C++ compiler, and time in the first steps.
    """

    activation_checkpointing: bool = False
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Accumulation(Section):
    """Gradient accumulation.

    steps: forward and backward passes per optimizer step; each takes data.batch_sequences /
        (ranks / mesh.tensor x steps) sequences on each rank.
    """

    steps: Count = 1


@dataclass(frozen=True, kw_only=True)
class Clipping(Section):
    """Gradient clipping.

    max_norm: largest global gradient norm; null does not clip.
    """

    max_norm: Positive | None = 1.0


@dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """Devices and ranks. FSDP2 shards the model over ranks / (replicate x tensor) ranks.

    device: "auto" takes CUDA if there is a GPU.
    ranks: number of ranks that must be there; null takes what torchrun started.
    replicate: replicas of the sharded model, which share the data (HSDP).
    tensor: ranks that split each matrix of a block between them and see the same data (tensor
        parallelism); must divide model.heads, model.kv_heads and model.hidden. Consecutive ranks
        form a group.
    check_replicas: steps between comparisons of a hash of all parameters over the replicas, after
        which a difference ends the run; 0 compares never. With Muon only.
    timeout_s: seconds after which a rank that waits for others in a step ends the job, and says
        which ranks are missing. Longer than the slowest first step.
    silent_s: seconds without a sign of life after which a rank counts as dead or stopped, which
        ends the job too.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: Count | None = None
    replicate: Count = 1
    tensor: Count = 1
    check_replicas: CountOrZero = 0
    timeout_s: Seconds = 600.0
    silent_s: Positive = 60.0


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Validation loss on a fixed set of sequences, the same for any number of ranks.

    every: steps between evaluations; 0 evaluates at the end only.
    sequences: sequences evaluated, evenly spread over the validation files.
    """

    every: CountOrZero = 100
    sequences: Count = 64


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Section):
    """Checkpoints, in the folder `checkpoints` of `logging.directory`.

    every: steps between checkpoints; 0 saves at the end only.
    final: save at the end too; false leaves a run that nobody continues without. A run that a
        signal ends is saved all the same.
    keep_last: how many of the newest checkpoints to keep; null keeps all.
    resume: "auto" continues from the newest usable checkpoint if there is one; "none" starts anew
        and refuses a folder that has checkpoints; anything else is the path of a checkpoint.
    weights: folder of safetensors files, such as an export, whose weights a new run starts from;
        names are those of transformers' Llama. A run that resumes does not look at it.
    async: write files while training goes on, from a copy in host memory.
    verify: "checksums" are taken while files are written and proven when they are loaded;
        "read-back" also reads every file again before it counts as saved.
    timeout_s: seconds after which a rank that waits for another one's files gives up.
    """

    every: CountOrZero = 100
    final: bool = True
    keep_last: Count | None = None
    resume: str = "auto"
    weights: str | None = None
    async_: bool = False
    verify: Literal["checksums", "read-back"] = "checksums"
    timeout_s: Seconds = 1800.0

    def check(self) -> None:
        if not self.resume:
            raise ValueError("resume: got '', expected auto, none or the path of a checkpoint")


@dataclass(frozen=True, kw_only=True)
class Logging(Section):
    """What is written and shown.

    directory: folder of the run: metrics.jsonl and checkpoints/.
    every: steps between lines of metrics.
    progress: "live" draws a view of the run on the terminal, which needs rich, "lines" prints
        plain lines, "none" nothing; "auto" is live on a terminal, if rich is there, and lines
        elsewhere.
    tensorboard: also write the numbers as TensorBoard events, into the folder `tensorboard` of
        `directory`.
    wandb: project of Weights & Biases that also gets the numbers; null is none. Its own
        environment variables hold, such as WANDB_MODE=offline.
    orthogonality: whether lines of metrics say how orthogonal the first rank's updates are, which
        costs a product in float64 for each of its matrices.
    """

    directory: str = "runs/default"
    every: Count = 10
    orthogonality: bool = False
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    tensorboard: bool = False
    wandb: str | None = None

    def check(self) -> None:
        if not self.directory:
            raise ValueError("directory: got '', expected a folder")
        if self.wandb == "":
            raise ValueError("wandb: got '', expected the name of a project, or null")


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The whole run.

    seed: of initial weights, data order and random numbers.
    """

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    compute: Compute = field(default_factory=Compute)
    accumulation: Accumulation = field(default_factory=Accumulation)
    clipping: Clipping = field(default_factory=Clipping)
    mesh: Mesh = field(default_factory=Mesh)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    logging: Logging = field(default_factory=Logging)
    seed: CountOrZero = 0

    def check(self) -> None:
        if self.data.is_bytes and self.model.vocab_size < 256:
            raise ValueError(
                f"model.vocab_size: got {self.model.vocab_size}, expected at least 256 for bytes"
            )
        if self.optimizer.runtime.overlap == "backward" and self.clipping.max_norm is not None:
            raise ValueError(
                f"clipping.max_norm: got {self.clipping.max_norm}, expected null with"
                " optimizer.runtime.overlap: backward, which sends gradients before they are"
                " clipped"
            )
        for key in () if self.model.path else ("heads", "kv_heads", "hidden"):
            if getattr(self.model, key) % self.mesh.tensor:
                raise ValueError(
                    f"mesh.tensor: got {self.mesh.tensor}, expected a divisor of "
                    f"model.{key} ({getattr(self.model, key)})"
                )

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if this run cannot be made by `ranks` ranks."""
        if self.mesh.ranks not in (None, ranks):
            raise ValueError(
                f"mesh.ranks: got {self.mesh.ranks}, but torchrun started {ranks}; "
                "expected null or that number"
            )
        replicate, tensor = self.mesh.replicate, self.mesh.tensor
        if ranks % (replicate * tensor):
            key = "mesh.tensor" if replicate == 1 else "mesh.replicate"
            raise ValueError(
                f"{key}: got {ranks} ranks, expected a multiple of "
                f"replicate x tensor = {replicate} x {tensor} = {replicate * tensor}"
            )
        data_ranks = ranks // tensor
        share = data_ranks * self.accumulation.steps
        if self.data.batch_sequences % share:
            raise ValueError(
                f"data.batch_sequences: got {self.data.batch_sequences}, expected a multiple of "
                f"{'ranks' if tensor == 1 else 'ranks / mesh.tensor'} x accumulation.steps = "
                f"{data_ranks} x {self.accumulation.steps} = {share}"
            )

    def micro_batch_sequences(self, data_ranks: int) -> int:
        """Sequences in one forward pass, with the batch spread over `data_ranks` ranks."""
        return self.data.batch_sequences // (data_ranks * self.accumulation.steps)
