"""What sharding changes in training: `python -m tests.training.equality --out FILE --into PAGE`.

Owns the runs and what is kept of them. Parity: losses of every step on several layouts, where
gradients are the same sums in another order, so that losses agree to a tolerance. Bits: one layout
with several settings of the runtime, where gradients are the same bits, and so must all else be.
The ranks are processes of this machine, with one thread each. What it says of them is in
`equality_text`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardmuon.training import data, metrics
from shardmuon.training.load import load
from shardmuon.training.model import CausalLM
from tests.ranks import RankPools
from tests.training import equality_text, launch

__all__ = ["HSDP", "LAYOUTS", "RUNTIMES", "SEEDS", "Layout", "bits", "curve", "digests", "measure"]

CONFIG = str(launch.ROOT / "configs" / "tiny.yaml")
LIMIT_S = 900.0
"""Seconds that one run may take, on a machine that is busy with other things too."""

COMMON = (
    "data.sequence_length=128",
    "schedule.decay_steps=40",
    "evaluation.every=0",
    "checkpoint.every=0",
    "mesh.silent_s=300",
    "logging.every=1",
    "logging.progress=none",
)


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and what spreads the model over them."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()


HSDP = Layout("4 ranks, HSDP 2 x 2", 4, ("mesh.replicate=2",))
FSDP = Layout("2 ranks, FSDP", 2)
LAYOUTS = (
    Layout(equality_text.ONE, 1),
    Layout(equality_text.PARTS, 1, ("accumulation.steps=4",)),
    Layout(
        equality_text.BLOCKS,
        1,
        ("optimizer.muon.ns_period=1000000", "optimizer.muon.ns_block=[64, null]"),
    ),
    FSDP,
    Layout("2 ranks, replicas", 2, ("mesh.replicate=2",)),
    Layout("4 ranks, FSDP", 4),
    HSDP,
    Layout("4 ranks, FSDP over tensor 2 x 2", 4, ("mesh.tensor=2",)),
)
SEEDS = (0, 1)
BITS_STEPS = 20

RUNTIMES: tuple[tuple[str, ...], ...] = (
    (),
    (),  # once more: else nobody knows that gradients are the same bits
    ("exchange=all_gather",),
    ("bucket_bytes=1",),  # each matrix alone
    ("bucket_bytes=300000",),
    ("bucket_bytes=1000000",),
    ("overlap=backward",),
    ("overlap=backward", "bucket_bytes=300000"),
    ("overlap=backward", "bucket_bytes=1", "exchange=all_gather"),
    ("deterministic=true",),
)
REPEAT = ("replicas=repeat",)
"""Only where there are replicas."""


def curve(pools: RankPools, layout: Layout, folder: Path, overrides: Sequence[str]) -> list[float]:
    """Train in `folder` without a checkpoint: loss of every step, and validation loss last."""
    wanted = [*overrides, *layout.overrides, "checkpoint.final=false"]
    _train(pools, layout, folder, wanted)
    losses = [record["loss"] for record in metrics.read(folder / "metrics.jsonl", "train")]
    (last,) = metrics.read(folder / "metrics.jsonl", "evaluate")
    return [*losses, last["loss"]]


def digests(
    pools: RankPools, layout: Layout, folder: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train in `folder`: SHA-256 of the numbers of all steps and of all tensors at the end.

    And what the first rank sent in the last step, which says whether a setting was heard.
    """
    _train(pools, layout, folder, [*overrides, *layout.overrides])
    steps = metrics.read(folder / "metrics.jsonl", "train")
    numbers = [[step[key] for key in ("loss", "grad_norm", "update_rms")] for step in steps]
    tensors = hashlib.sha256()
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    for name, value in sorted(launch.final_tensors(checkpoint, folder).items()):
        tensors.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        tensors.update(value.numpy().tobytes())
    return {
        "steps": len(steps),
        "numbers": hashlib.sha256(json.dumps(numbers).encode()).hexdigest(),
        "tensors": tensors.hexdigest(),
        "collectives": steps[-1]["optimizer"]["collectives"],
        "bytes_sent": steps[-1]["optimizer"]["bytes_sent"],
    }


def bits(
    pools: RankPools,
    layout: Layout,
    folder: Path,
    overrides: Sequence[str],
    runtimes: Sequence[Sequence[str]] = RUNTIMES,
) -> list[dict[str, Any]]:
    """The same run with each of these runtimes; all must have the digests of the first.

    Without clipping: it would change gradients that overlap has sent.
    """
    found = []
    for position, runtime in enumerate(runtimes):
        settings = [f"optimizer.runtime.{setting}" for setting in runtime]
        settings += ["clipping.max_norm=null", *overrides]
        began = time.monotonic()
        made = digests(pools, layout, folder / str(position), settings)
        found.append({"layout": layout.name, "runtime": list(runtime), **made})
        _tell(f"{layout.name}: {', '.join(runtime) or 'defaults'}", began)
    return found


def measure(pools: RankPools, folder: Path, steps: int) -> dict[str, Any]:
    """All runs, with the facts that a reader needs to make them again."""
    common = [*COMMON, f"schedule.steps={steps}"]
    runs = []
    for layout in LAYOUTS:
        for seed in SEEDS:
            began = time.monotonic()
            where = folder / f"{layout.name} {seed}"
            *losses, last = curve(pools, layout, where, [*common, f"seed={seed}"])
            exact = [float(f"{loss:.9g}") for loss in losses]  # all that float32 holds
            runs.append(
                {"layout": layout.name, "seed": seed, "losses": exact, "validation": round(last, 7)}
            )
            _tell(f"{layout.name}, seed {seed}", began)
    equal = []
    for layout, runtimes in ((FSDP, RUNTIMES), (HSDP, (*RUNTIMES, REPEAT))):
        few = [*common, f"schedule.stop_at={BITS_STEPS}"]
        equal += bits(pools, layout, folder / f"bits {layout.name}", few, runtimes)
    found = {"facts": _facts(common), "parity": runs, "bits": equal}
    return found | {"summary": equality_text.summarize(found)}


def _train(pools: RankPools, layout: Layout, folder: Path, overrides: Sequence[str]) -> None:
    wanted = [*overrides, f"logging.directory={folder}"]
    pools.run(layout.ranks, launch.train_as_rank, CONFIG, wanted, limit_s=LIMIT_S)


def _facts(overrides: Sequence[str]) -> dict[str, Any]:
    config = load(CONFIG, overrides)
    with torch.device("meta"):
        size = sum(p.numel() for p in CausalLM(config.model).parameters())
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "text": data.open_corpus(config.data, config.model.vocab_size).description,
        "parameters": size,
        "steps": config.schedule.steps,
        "warmup_steps": config.schedule.warmup_steps,
        "tokens_per_step": config.data.batch_sequences * config.data.sequence_length,
        "validation_sequences": config.evaluation.sequences,
        "overrides": list(overrides),
    }


def _tell(what: str, began: float) -> None:
    print(f"{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _with_pools(act: Callable[[RankPools, Path], dict[str, Any]]) -> dict[str, Any]:
    pools = RankPools()
    try:
        with tempfile.TemporaryDirectory(prefix="shardmuon-equality-") as folder:
            return act(pools, Path(folder))
    finally:
        pools.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.training.equality")
    parser.add_argument("--out", type=Path, help="train, and write this JSON file")
    parser.add_argument("--tables", type=Path, help="do not train: read this JSON file")
    parser.add_argument("--into", type=Path, help="put the tables into this page")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    if options.tables:
        found = json.loads(options.tables.read_text(encoding="utf-8"))
    else:
        torch.set_num_threads(1)
        found = _with_pools(lambda pools, folder: measure(pools, folder, options.steps))
    if options.out:
        options.out.write_text(equality_text.as_json(found), encoding="utf-8")
    if options.into:
        page = options.into.read_text(encoding="utf-8")
        options.into.write_text(equality_text.with_tables(page, found), encoding="utf-8")
    else:
        print(equality_text.tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
