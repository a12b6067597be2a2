"""Which Newton-Schulz method each matrix of a plan takes, and what it costs then.

Owns the answers that the ranks of a mesh share: what a group forces, what stands for `"auto"`
before and after the ranks have chosen, and times that were measured on the way, which go before
numbers of operations. Measures nothing; `orthogonalize/choice.py` does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardmuon.exchange import collectives
from shardmuon.exchange.agreement import MeshPart
from shardmuon.orthogonalize.choice import Answer, Problem, choose_methods
from shardmuon.planning.cost import flops_in, newton_schulz_flops
from shardmuon.planning.layout import Mesh
from shardmuon.planning.matrix import AUTO, Matrix
from shardmuon.planning.planner import bucket_size
from shardmuon.runtime import Runtime

__all__ = ["Methods", "is_open"]


class Methods:
    """What the ranks of each mesh have chosen so far."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._chosen: dict[tuple[Mesh, Problem], Answer] = {}

    def assign(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """`matrices` with "auto" replaced where it is known by what, and with its cost."""
        if self._runtime.deterministic:
            return [_with_method(m, "standard") if m.method == AUTO else m for m in matrices]
        problems = _problems(matrices, self._runtime.bucket_bytes)
        return [
            _with_answer(m, self._chosen.get((m.layout.mesh, problem)), problem) if problem else m
            for m, problem in zip(matrices, problems, strict=True)
        ]

    def choose(self, matrices: Sequence[Matrix], parts: Iterable[MeshPart]) -> None:
        """Choose what `matrices` leave open. Collective along the meshes that have such.

        All ranks of a mesh must hold equal plans, so that they ask for the same. Its first rank
        measures, the others take its answer.
        """
        problems = _problems(matrices, self._runtime.bucket_bytes)
        for part in parts:
            here = {
                problem
                for matrix, problem in zip(matrices, problems, strict=True)
                if problem and matrix.layout.mesh == part.mesh
            }
            if here:
                answer = _shared_answer(here, part)
                self._chosen.update({(part.mesh, p): each for p, each in answer.items()})


def _shared_answer(problems: set[Problem], part: MeshPart) -> Mapping[Problem, Answer]:
    answer: Mapping[Problem, Answer] | str | None = None
    if collectives.rank() == part.mesh.ranks[0]:
        try:
            answer = choose_methods(problems, part.device)
        except Exception as error:  # whatever it is: the others must not wait in vain
            answer = f"{type(error).__name__}: {error}"
    for group in part.groups:
        answer = collectives.from_first(answer, group)
    if not isinstance(answer, Mapping):
        raise RuntimeError(f"rank {part.mesh.ranks[0]} could not measure Newton-Schulz: {answer}")
    return answer


def is_open(matrices: Iterable[Matrix]) -> bool:
    """True if some method is not chosen yet."""
    return any(matrix.method == AUTO for matrix in matrices)


def _problems(matrices: Sequence[Matrix], bucket_bytes: int | None) -> list[Problem | None]:
    """What to choose a method for, by matrix; None where that is settled.

    The batch is what an owner will about have of such matrices in one bucket, rounded down to a
    power of two so that few problems are measured. Owners are not known yet: their loads depend on
    the method.
    """
    kinds = [(m.layout.mesh, *_sides(m), m.settings) for m in matrices]
    counts = Counter(kinds)
    by_mesh: dict[Mesh, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_mesh[matrix.layout.mesh].append(matrix)
    sizes = {mesh: bucket_bytes or bucket_size(those) for mesh, those in by_mesh.items()}
    problems: list[Problem | None] = []
    for matrix, kind in zip(matrices, kinds, strict=True):
        if matrix.method != AUTO:
            problems.append(None)
            continue
        share = -(-counts[kind] // len(matrix.layout.mesh.ranks))
        fitting = max(1, min(share, sizes[matrix.layout.mesh] // max(1, matrix.total_bytes)))
        batch = 1 << (fitting.bit_length() - 1)
        problems.append(Problem(batch, *_sides(matrix), matrix.wire_dtype, matrix.segments))
    return problems


def _sides(matrix: Matrix) -> tuple[int, int]:
    return min(matrix.rows, matrix.cols), max(matrix.rows, matrix.cols)


def _with_method(matrix: Matrix, method: str) -> Matrix:
    cost = newton_schulz_flops(matrix.rows, matrix.cols, matrix.segments, method)
    return replace(matrix, method=method, cost=cost)


def _with_answer(matrix: Matrix, answer: Answer | None, problem: Problem) -> Matrix:
    """`matrix` with the method chosen for it; it costs its part of the batch, if that was timed."""
    if answer is None:
        return matrix
    chosen = _with_method(matrix, answer.method)
    if answer.ms is None:
        return chosen
    return replace(chosen, cost=flops_in(answer.ms / problem.count))
