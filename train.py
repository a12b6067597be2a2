"""Train a language model: `train.py CONFIG [key.path=value ...]`, alone or under torchrun."""

from __future__ import annotations

import sys

from shardmuon.training.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
