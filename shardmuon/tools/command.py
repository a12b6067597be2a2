"""The command line of `python -m shardmuon`.

Owns arguments and exit codes: 0 done, 2 wrong arguments, 1 anything else (one line on stderr).
Started by torchrun, its ranks share the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmuon.checkpoint.publish import CheckpointError, candidates, read_manifest
from shardmuon.planning.models import MODELS
from shardmuon.tools import bench_scaling
from shardmuon.tools.arguments import count, names_among
from shardmuon.tools.workloads import OPTIMIZERS, PACKAGES, WORKLOADS
from shardmuon.training.load import ConfigError

__all__ = ["main", "script"]

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments say; returns the exit code."""
    options = _parser().parse_args(arguments)
    commands = {
        "bench": _bench,
        "export": _export,
        "generate": _generate,
        "plan": _plan,
        "plot": _plot,
        "study": _study,
        "trace": _trace,
    }
    run = commands[options.command]
    try:
        run(options)
    except ConfigError as error:
        print(f"shardmuon {options.command}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except (CheckpointError, OSError) as error:
        print(f"shardmuon {options.command}: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def script() -> int:
    """The command `shardmuon`, the same as `python -m shardmuon`."""
    return main(sys.argv[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardmuon", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export", help="write a checkpoint's weights as safetensors files with an index"
    )
    export.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder: its newest")
    export.add_argument("folder", type=Path, help="new folder for the files")
    export.add_argument("--dtype", choices=DTYPES, help="of the weights; left out: as trained")
    export.add_argument("--optimizer", action="store_true", help="also write optimizer state")
    export.add_argument(
        "--file-gb", type=_positive, default=5.0, help="largest size of a file in 10^9 bytes"
    )
    bench = commands.add_parser("bench", help="measure on this machine")
    kinds = bench.add_subparsers(dest="what", required=True)
    ns = kinds.add_parser("ns", help="errors and times of Newton-Schulz")
    ns.add_argument(
        "--models", action="store_true", help="also time the matrices of well-known models"
    )
    ns.add_argument(
        "--compiled", action="store_true", help="also time the standard method under torch.compile"
    )
    step = kinds.add_parser("step", help="optimizer steps and whole iterations, side by side")
    step.add_argument("model", choices=WORKLOADS)
    step.add_argument(
        "--optimizers",
        type=names_among(*OPTIMIZERS, *PACKAGES),
        help="which, as in adamw,shardmuon; left out: all five",
    )
    step.add_argument("--packages", action="store_true", help="also those of other packages")
    step.add_argument("--steps", type=count, default=12, help="measured iterations")
    step.add_argument("--replicate", type=count, default=1, help="replicas of the model (HSDP)")
    step.add_argument("--sequences", type=count, help="on each rank; left out: the model's own")
    step.add_argument("--json", type=_new_file, help="file for all numbers")
    bench_scaling.add_arguments(
        kinds.add_parser("scaling", help="bench step on several numbers of ranks, in one table")
    )
    share = kinds.add_parser("share", help="one large matrix, by one owner and by a team")
    share.add_argument("rows", type=count)
    share.add_argument("cols", type=count)
    _add_plan(commands)
    _add_generate(commands)
    _add_plot(commands)
    _add_study(commands)
    trace = commands.add_parser("trace", help="profile shardmuon's steps, rank by rank")
    trace.add_argument("model", choices=WORKLOADS)
    trace.add_argument("--folder", type=Path, default=Path("trace"), help="for traces and picture")
    trace.add_argument("--overlap", action="store_true", help="with Runtime(overlap='backward')")
    trace.add_argument("--steps", type=count, default=3, help="profiled iterations")
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="who would own what, and how long a step would take")
    plan.add_argument(
        "source",
        help="a configuration, a Hugging Face folder, config.json or .safetensors file, or one of "
        + ", ".join(MODELS),
    )
    plan.add_argument("--ranks", type=count, help="FSDP2 over that many; left out: 8")
    plan.add_argument("--mesh", type=_mesh, help="replicas x shards, as in 8x128")
    plan.add_argument(
        "--device", choices=("h200", "here"), default="h200", help="here: measure this machine"
    )
    plan.add_argument("--method", default="auto", help="of Newton-Schulz; auto: the quickest")
    plan.add_argument(
        "--block", type=_block, help="a step of blocks, ns_block, as in 256xall: rows x columns"
    )
    plan.add_argument("--bucket-mb", type=_positive, help="bucket_bytes in 2^20 bytes")
    plan.add_argument(
        "--share-large", action="store_true", help="teams of ranks may share a large matrix"
    )
    plan.add_argument(
        "--replicas",
        choices=("auto", "once", "repeat"),
        default="auto",
        help="where replicas orthogonalize what they all hold",
    )
    plan.add_argument("--compare", action="store_true", help="also other ways to choose owners")
    plan.add_argument("--json", type=_new_file, help="file for all numbers")
    plan.add_argument("--plot", type=_new_file, help="picture of the step, .svg or .png")


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="let a trained model write text")
    generate.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a run's folder: its newest"
    )
    generate.add_argument("--prompt", default="\n", help="text to begin with; left out: a new line")
    generate.add_argument("--tokens", type=count, default=256, help="how many to write at most")
    generate.add_argument(
        "--temperature", type=_not_negative, default=0.8, help="0 always takes the likeliest token"
    )
    generate.add_argument("--top-k", type=count, default=0, help="draw among that many only")
    generate.add_argument("--seed", type=int, default=0)


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser("plot", help="compare runs: a table, and a picture of their losses")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    plot.add_argument(
        "--by",
        choices=("step", "tokens", "time", "all"),
        default="all",
        help="over what losses are drawn; left out: one panel for each",
    )
    plot.add_argument(
        "--out", type=_new_file, default=Path("runs.png"), help="the picture, .png or .svg"
    )
    plot.add_argument("--log", action="store_true", help="logarithmic axes")
    plot.add_argument("--table", action="store_true", help="only the table, without a picture")


def _add_study(commands: Any) -> None:
    study = commands.add_parser("study", help="train and compare many runs; tables and figures")
    study.add_argument(
        "files", nargs="+", type=Path, help="one YAML file; or JSON files of studies"
    )
    study.add_argument("--workers", type=count, default=1, help="runs that go on side by side")
    study.add_argument("--minutes", type=_positive, help="start no run that would end later")
    study.add_argument("--folder", type=Path, help="of the study; left out: runs/study-NAME")
    study.add_argument("--out", type=Path, help="file for the numbers; left out: in the folder")
    study.add_argument("--tables", action="store_true", help="print tables of JSON files")
    study.add_argument("--into", type=Path, help="page whose tables are replaced, with --tables")
    study.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="draw figures of JSON files into it"
    )


def _mesh(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected replicas x shards as in 8x128, got {text!r}")
    return int(sizes[0]), int(sizes[1])


def _block(text: str) -> tuple[int | None, int | None]:
    sizes = [None if size == "all" else count(size) for size in text.split("x")]
    if len(sizes) != 2 or sizes == [None, None]:
        raise argparse.ArgumentTypeError(f"expected rows x columns as in 256xall, got {text!r}")
    return sizes[0], sizes[1]


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def _bench(options: argparse.Namespace) -> None:
    if options.what == "scaling":
        bench_scaling.run(bench_scaling.options_of(options))
        return
    from shardmuon.tools import bench_ns, bench_share, bench_step

    if options.what == "ns":
        bench_ns.run(options.models, options.compiled)
        return
    if options.what == "share":
        bench_share.run(options.rows, options.cols)
        return
    names = options.optimizers or OPTIMIZERS
    if options.packages:
        names = (*names, *(name for name in PACKAGES if name not in names))
    bench_step.run(
        options.model, names, options.steps, options.json, options.replicate, options.sequences
    )


def _trace(options: argparse.Namespace) -> None:
    from shardmuon.tools import trace

    trace.run(
        options.model, options.folder, options.steps, "overlap" if options.overlap else "shardmuon"
    )


def _plan(options: argparse.Namespace) -> None:
    from shardmuon.exchange import collectives
    from shardmuon.planning.device import DEVICES
    from shardmuon.planning.planner import Freedom
    from shardmuon.tools import machine, plan_model
    from shardmuon.tools.sources import read_source
    from shardmuon.training import place
    from shardmuon.training.config import Mesh

    source = read_source(options.source)
    device = DEVICES.get(options.device)
    ranks = options.ranks or 8
    if device is None:
        here = place.start(Mesh(), place.choose_device(Mesh()))
        device = machine.measure(here)
        ranks = options.ranks or here.ranks
    replicas, shards = options.mesh or (1, ranks)
    if options.ranks and options.ranks != replicas * shards:
        raise ConfigError(f"--mesh {replicas}x{shards} is not --ranks {options.ranks}")
    bucket_bytes = int(options.bucket_mb * 2**20) if options.bucket_mb else None
    if collectives.rank() == 0:
        plan_model.run(
            source,
            plan_model.Options(
                shape=plan_model.Shape(replicas, shards),
                method=options.method,
                bucket_bytes=bucket_bytes,
                block=options.block,
                freedom=Freedom(device, options.share_large, options.replicas),
                compare=options.compare,
                json=options.json,
                plot=options.plot,
            ),
        )
    collectives.barrier()
    collectives.stop()


def _plot(options: argparse.Namespace) -> None:
    from shardmuon.tools import plot_runs

    runs = plot_runs.read_runs(options.runs)
    print(plot_runs.compare(runs))
    if options.table:
        return
    if options.out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out: got {options.out}, expected a name that ends in .png or .svg")
    by = tuple(plot_runs.AXES) if options.by == "all" else (options.by,)
    plot_runs.draw(runs, by, options.out, options.log)
    print(f"\nwrote {options.out}")


def _study(options: argparse.Namespace) -> None:
    if options.tables or options.figures is not None:
        from shardmuon.tools.study import figures, tables

        studies = tables.read(options.files)
        if options.tables and options.into is None:
            print("\n\n".join(tables.tables(each) for each in studies))
        elif options.tables:
            tables.insert(options.into, studies)
        for each in studies if options.figures is not None else ():
            for path in figures.draw(each, options.figures):
                print(f"wrote {path}")
        return
    if len(options.files) > 1:
        raise ConfigError("got several files; expected one YAML file, or --tables or --figures")
    from shardmuon.tools.study import run

    (path,) = options.files
    folder = options.folder or Path("runs") / f"study-{path.stem}"
    run.run(
        path,
        run.Options(
            workers=options.workers,
            minutes=options.minutes,
            folder=folder,
            out=options.out or folder / f"{path.stem}.json",
        ),
    )


def _export(options: argparse.Namespace) -> None:
    path = _checkpoint(options.checkpoint)
    import torch

    from shardmuon.checkpoint.export import export_checkpoint
    from shardmuon.exchange import collectives

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        collectives.start("gloo", timeout_s=1800.0)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    texts = _texts(read_manifest(path), options.dtype)
    export_checkpoint(
        path,
        options.folder,
        optimizer=options.optimizer,
        dtype=dtype,
        file_bytes=int(options.file_gb * 1e9),
        texts=texts,
    )
    if collectives.rank() == 0:
        for file in sorted(p for p in options.folder.rglob("*") if p.is_file()):
            print(f"{file.stat().st_size:>15,}  {file}")
    collectives.stop()


def _generate(options: argparse.Namespace) -> None:
    path = _checkpoint(options.checkpoint)
    from shardmuon.tools import generate

    drawing = generate.Drawing(
        temperature=options.temperature, top_k=options.top_k, seed=options.seed
    )
    generate.run(path, options.prompt, options.tokens, drawing)


def _checkpoint(path: Path) -> Path:
    """`path`, or the newest usable checkpoint of the run whose folder it is."""
    folder = path / "checkpoints"
    if not folder.is_dir():
        return path
    for found, wrong in candidates(folder):
        if wrong is None:
            return found
        print(f"warning: {found.name} is skipped: {wrong}", file=sys.stderr)
    raise CheckpointError(f"no usable checkpoint in {folder}")


def _texts(manifest: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """What transformers needs beside the weights of a run; nothing of other checkpoints."""
    from shardmuon.training.architecture import of_manifest

    if "config" not in manifest:
        return {}
    return {"config.json": of_manifest(manifest).config_json(dtype or "float32")}
