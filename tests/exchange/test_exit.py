"""A process may end right after its last collective, though a thread of gloo's is late."""

from __future__ import annotations

import subprocess
import sys

LATE = """
import threading, time
import torch
from shardmuon.exchange import collectives

buffer = torch.zeros(4)
collectives.Work(None, buffer).wait()

def let_go(held):
    time.sleep(0.1)
    held.clear()
    print("let go", flush=True)

threading.Thread(target=let_go, args=([buffer],), daemon=True).start()
del buffer
"""


def test_the_interpreter_ends_after_the_last_buffer() -> None:
    """A daemon thread stands in for gloo's: the interpreter would not wait for it otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "let go\n"
