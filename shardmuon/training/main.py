"""The command line of `train.py`.

Owns exit codes: 0 done, 2 bad input (one line on stderr), 1 anything else (with a traceback).
Imports torch only once the configuration is known to be good.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence

from shardmuon.training.config import Config
from shardmuon.training.load import ConfigError, load

__all__ = ["main"]

USAGE = "usage: train.py CONFIG [key.path=value ...]"
BAD_INPUT = 2

_HEAD_START_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments say; returns the exit code."""
    if {"-h", "--help"}.intersection(arguments):
        print(f"{USAGE}\nKeys are explained in docs/configuration.md.")
        return 0
    try:
        config = _configuration(arguments)
        from shardmuon.checkpoint import CheckpointError
        from shardmuon.training import run  # imports torch

        prepared = run.prepare(config)
    except ConfigError as error:
        return _refuse(error)
    try:
        run.run(prepared, arguments)
    except CheckpointError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception:
        return _fail(traceback.format_exc(), 1)
    return 0


def _configuration(arguments: Sequence[str]) -> Config:
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise ConfigError(f"got no configuration file; {USAGE}")
    config = load(arguments[0], arguments[1:])
    try:
        config.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise ConfigError(f"{arguments[0]}: {error}") from None
    return config


def _refuse(error: ConfigError) -> int:
    """Say what is wrong with the input, once for all ranks.

    All ranks usually see the same mistake. The first speaks and exits, and torchrun ends the
    others while they wait; one that is still there afterwards was alone with its mistake.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_HEAD_START_S)
    print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


def _fail(text: str, code: int) -> int:
    """Say what went wrong on this rank; alone, return the exit code, else end at once.

    A normal exit would wait in the process group for ranks that wait for this one; torchrun ends
    them when this process is gone.
    """
    rank = os.environ.get("RANK", "0")
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        os._exit(code)
    return code
