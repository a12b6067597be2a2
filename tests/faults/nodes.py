"""Runs over several nodes whose workers and nodes fail: `python -m tests.faults.nodes`.

Owns the agents, what is done to them, and the judgement. A node is a torchrun agent with two
workers, all on this machine, started by the file that is shipped for it. Whatever happens, the
losses must be those of a run of four ranks that was left alone: in bits as long as there are four.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardmuon.planning.report import table
from tests.faults import jobs
from tests.faults.agents import Node, free_port
from tests.faults.trial import LOSS_TOLERANCE, records
from tests.training import launch

__all__ = ["EVENTS", "Field", "Outcome", "Reference", "play", "prepare"]

STEPS, EVERY, RANKS = 40, 4, 2
STRIKE = 10
"""What happens, happens once this step is done."""
LIMIT_S = 150.0
RDZV_CONF = (
    "join_timeout=100,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={}"
)
PACED = """import sys, time
from shardmuon.training import loop, main

def paced(self, logged, step=loop.Trainer._train_step):
    time.sleep({})
    return step(self, logged)

loop.Trainer._train_step = paced
sys.exit(main.main(sys.argv[1:]))
"""

Losses = dict[int, tuple[float, float]]
"""Loss and norm of the gradient by step."""


def losses(folder: Path) -> Losses:
    """Of the run in `folder`, the last of each step."""
    trained = [r for r in records(folder) if r["event"] == "train"]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in trained}


class Reference(NamedTuple):
    """The files that runs train on, and a run on four ranks that was left alone."""

    data: Path
    losses: Losses


def prepare(folder: Path) -> Reference:
    """Train the reference, on ranks of one agent."""
    data = folder / "data"
    data.mkdir(parents=True)
    launch.text_files(data)
    job = jobs.Job(_arguments(data, folder / "alone"), 2 * RANKS, folder / "logs")
    codes = job.finish()
    if any(codes):
        raise RuntimeError(f"the run left alone ended with {codes}:\n{job.log()}")
    return Reference(data, losses(folder / "alone"))


def _arguments(data: Path, folder: Path, *more: str) -> list[str]:
    settings = [f"schedule.steps={STEPS}", f"checkpoint.every={EVERY}", "mesh.silent_s=6"]
    return jobs.tiny(data, folder, *settings, *more)


class Field:
    """Where one run takes place: its folder, its nodes, and the commands that start them."""

    def __init__(self, reference: Reference, folder: Path, pace_s: float = 0.05) -> None:
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(PACED.format(pace_s))
        self.reference, self.folder = reference, folder
        self.arguments = _arguments(reference.data, folder)
        self.port = free_port()
        self.nodes: list[Node] = []
        self.struck = 0.0
        self.seen: list[tuple[dict[str, Any], float]] = []
        """Records, and when each was first seen."""

    def elastic(self, number: int, nodes: str = "2", **settings: str) -> Node:
        """Start a node through configs/launch/torchrun.sh; node 0 hosts the rendezvous."""
        command = [str(jobs.ROOT / "configs" / "launch" / "torchrun.sh"), *self.arguments]
        place = {"NODES": nodes, "HEAD": "127.0.0.1", "PORT": str(self.port), "RANKS": str(RANKS)}
        conf = RDZV_CONF.format("true" if number == 0 else "false")
        where = {"LOCAL_ADDR": "127.0.0.1", "RDZV_CONF": conf}
        return self._start(command, number, **{**place, **where, **settings})

    def static(self, number: int, *options: str) -> Node:
        """Start a node that is told its place."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *options]
        place = ["--node-rank", str(number), "--master-addr", "127.0.0.1"]
        size = ["--master-port", str(self.port), "--nproc-per-node", str(RANKS)]
        return self._start([*torchrun, *place, *size, "train.py", *self.arguments], number)

    def _start(self, command: Sequence[str], number: int, **settings: str) -> Node:
        node = Node(command, self.folder, self.folder / f"node{number}.log", **settings)
        self.nodes.append(node)
        return node

    def strike(self, step: int = STRIKE) -> None:
        """Wait until `step` is done; what the caller does next is what happened."""
        self.wait(lambda: self.step() >= step)
        self.struck = time.monotonic()

    def step(self) -> int:
        """The last step done by the newest start."""
        return max((r["step"] for r in records(self.folder)[-1:]), default=0)

    def starts(self) -> list[dict[str, Any]]:
        """How the run began and began again."""
        return [r for r in records(self.folder) if r["event"] == "start"]

    def pause(self) -> float:
        """Seconds from the strike to the first step of the last start; 0 without a strike."""
        if not self.struck:
            return 0.0
        found, waiting = 0.0, False
        for record, seen in self.seen:
            waiting = waiting or (record["event"] == "start" and seen > self.struck)
            if waiting and record["event"] == "train":
                found, waiting = seen - self.struck, False
        return found

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for something; TimeoutError if it does not come."""
        deadline = time.monotonic() + LIMIT_S
        while not done():
            self._look()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing for {LIMIT_S:g} s")
            time.sleep(0.05)

    def _look(self) -> None:
        now = time.monotonic()
        self.seen += [(record, now) for record in records(self.folder)[len(self.seen) :]]

    def end(self, *nodes: Node) -> list[int]:
        """Exit codes of agents, once they have ended."""
        self.wait(lambda: all(node.agent.poll() is not None for node in nodes))
        return [node.agent.wait() for node in nodes]

    def stop(self) -> None:
        """Leave nothing behind."""
        for node in self.nodes:
            node.stop()


class Outcome(NamedTuple):
    """What came of an event. ranks: of each start. steps: where each start continued.

    seconds: from the event to the next step. difference: the largest of a loss to the reference.
    """

    event: str
    ranks: list[int]
    steps: list[int]
    seconds: float
    difference: float
    wrong: list[str]


def nothing(field: Field) -> list[int]:
    """c10d rendezvous, nothing happens"""
    return field.end(field.elastic(0), field.elastic(1))


def nothing_static(field: Field) -> list[int]:
    """static rendezvous, nothing happens"""
    return field.end(field.static(0), field.static(1))


def _worker(number: int, *ranks: int) -> Callable[[Field], list[int]]:
    def event(field: Field) -> list[int]:
        nodes = field.elastic(0), field.elastic(1)
        field.strike()
        for node in nodes:
            node.send(number, *set(ranks).intersection(node.workers()))
        return field.end(*nodes)

    return event


def node_replaced(field: Field) -> list[int]:
    """node lost, replaced after 3 s"""
    nodes = field.elastic(0), field.elastic(1)
    field.strike()
    nodes[1].lose()
    time.sleep(3)
    return field.end(nodes[0], field.elastic(1))


def node_told_to_end(field: Field) -> list[int]:
    """All ranks stop in good order, as for any preemption."""
    nodes = field.elastic(0), field.elastic(1)
    field.strike()
    nodes[1].agent.terminate()
    assert field.end(nodes[1]) == [1]
    field.wait((field.folder / "preempted").exists)
    nodes[0].stop()  # its agent would wait for the other one, for 300 s
    return field.end(field.elastic(0), field.elastic(1))


def node_not_replaced(field: Field) -> list[int]:
    """node lost, not replaced"""
    nodes = field.elastic(0, "1:2"), field.elastic(1, "1:2")
    field.strike()
    nodes[1].lose()
    return field.end(nodes[0])


def node_returns(field: Field) -> list[int]:
    """node lost, joins again while the other trains"""
    nodes = field.elastic(0, "1:2"), field.elastic(1, "1:2")
    field.strike()
    nodes[1].lose()
    field.wait(lambda: len(field.starts()) == 2)
    field.strike(STRIKE + 2)
    return field.end(nodes[0], field.elastic(1, "1:2"))


def host_lost(field: Field) -> list[int]:
    """node with the rendezvous lost, both started again"""
    nodes = field.elastic(0), field.elastic(1)
    field.strike()
    nodes[0].lose()
    assert field.end(nodes[1]) == [1]
    return field.end(field.elastic(0), field.elastic(1))


class Event(NamedTuple):
    """What is done to a run. starts: of the run, in the end. ranks: of each, if not always four."""

    play: Callable[[Field], list[int]]
    ranks: tuple[int, ...] = (4, 4)
    pace_s: float = 0.05


EVENTS: Mapping[str, Event] = {
    "nothing": Event(nothing, (4,), 0.0),
    "nothing, static rendezvous": Event(nothing_static, (4,), 0.0),
    "worker killed": Event(_worker(signal.SIGKILL, 3)),
    "worker of rank 0 killed": Event(_worker(signal.SIGKILL, 0)),
    "worker stopped": Event(_worker(signal.SIGSTOP, 3)),
    "worker of rank 0 stopped": Event(_worker(signal.SIGSTOP, 0)),
    "node lost, replaced": Event(node_replaced),
    "node told to end, all started again": Event(node_told_to_end),
    "node lost, not replaced": Event(node_not_replaced, (4, 2)),
    "node lost, comes back later": Event(node_returns, (4, 2, 4), 0.6),
    "node with the rendezvous lost, all started again": Event(host_lost),
}


def play(name: str, reference: Reference, folder: Path) -> Outcome:
    """Run one event to the end; leaves no process behind."""
    event = EVENTS[name]
    field = Field(reference, folder, event.pace_s)
    codes, seconds, late = [0], 0.0, []
    try:
        codes = event.play(field)
        seconds = field.pause()
    except TimeoutError as error:
        late.append(str(error))
    finally:
        field.stop()
    starts = field.starts()
    ranks, steps = [r["ranks"] for r in starts], [r["step"] for r in starts]
    difference, wrong = _compare(field)
    wrong += late
    if codes != [0] * len(codes):
        wrong.append(f"the agents ended with {codes}")
    if tuple(ranks) != event.ranks:
        wrong.append(f"the starts had {ranks} ranks, expected {list(event.ranks)}")
    if (field.folder / "preempted").exists():
        wrong.append("the marker of a stop was left")
    return Outcome(name, ranks, steps, seconds, difference, wrong)


def _compare(field: Field) -> tuple[float, list[str]]:
    """(largest difference of a loss to the reference, what is wrong with the records)."""
    largest, wrong, done, exact = 0.0, [], 0, True
    reference = field.reference.losses
    for record in records(field.folder):
        step = record["step"]
        if record["event"] == "start":
            exact = exact and record["ranks"] == 2 * RANKS
            if done and step not in _continued(done):
                wrong.append(f"continued from step {step} after step {done}")
            done = step
        elif record["event"] == "train":
            if step != done + 1:
                wrong.append(f"step {step} after step {done}")
            done = step
            pairs = zip((record["loss"], record["grad_norm"]), reference[step], strict=True)
            difference = max(abs(here - there) for here, there in pairs)
            largest = max(largest, difference)
            if difference > (0.0 if exact else LOSS_TOLERANCE):
                wrong.append(f"step {step} differs by {difference}")
    if done != STEPS:
        wrong.append(f"ended after step {done}")
    return largest, wrong


def _continued(done: int) -> set[int]:
    """Where a run may continue after a fault: its newest checkpoint, or where it saved in the end.

    The record of a step is written before its checkpoint.
    """
    last = done - done % EVERY
    return {done, last, last - EVERY} if last == done else {done, last}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.nodes")
    parser.add_argument("--only", choices=list(EVENTS), action="append", default=[])
    options = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="shardmuon-nodes-") as folder:
        reference = prepare(Path(folder, "reference"))
        for number, name in enumerate(options.only or EVENTS):
            outcome = play(name, reference, Path(folder, str(number)))
            rows.append(_row(outcome))
            print(" | ".join(rows[-1]), flush=True)
            if outcome.wrong:
                failed = True
                logs = sorted(Path(folder, str(number)).glob("node*.log"))
                print(*outcome.wrong, *(log.read_text() for log in logs), sep="\n", flush=True)
    header = ("event", "ranks of each start", "from step", "seconds", "loss differs by", "wrong")
    print("\n".join(table(header, rows)))
    return int(failed)


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.event,
        ", ".join(map(str, outcome.ranks)),
        ", ".join(map(str, outcome.steps)),
        f"{outcome.seconds:.0f}" if outcome.seconds else "-",
        f"{outcome.difference:.1e}",
        str(len(outcome.wrong)),
    )


if __name__ == "__main__":
    sys.exit(main())
