"""Coefficients of the Newton-Schulz polynomials, with their sources.

Owns the named presets, the rule of which step takes which triple, and where the gram method starts
anew. `python -m tests.orthogonalize.restarts` is the search that found the latter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["KELLER", "PRESETS", "Coefficients", "Schedule", "Triple", "schedule_of"]

Triple = tuple[float, float, float]
"""(a, b, c) of the polynomial a x + b x^3 + c x^5, applied to singular values."""

Coefficients = str | Triple | Sequence[Triple]
"""Name of a preset, one triple for every step, or a triple per step."""

KELLER: Triple = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's quintic, https://kellerjordan.github.io/posts/muon/ and the default of
torch.optim.Muon. It trades convergence to 1 for a steep slope at 0: after five steps singular
values lie between about 0.7 and 1.2."""


@dataclass(frozen=True)
class Schedule:
    """What a number of steps does, and how it may be computed.

    triples: one per step. margin: factor on the norm by which a matrix is divided first; above 1
    where a polynomial must not see a singular value that rounding has put above 1.
    segments: steps of the gram method between two starts; in a preset the last one repeats, so that
    it serves any number of steps. gram_dtypes: in which the gram method may iterate. In bfloat16 it
    errs up to 2.4 times as much in 5 steps as the standard one, and may overflow in 10.
    """

    triples: tuple[Triple, ...]
    margin: float = 1.0
    segments: tuple[int, ...] = ()
    gram_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32, torch.float64)

    def parts(self) -> list[tuple[Triple, ...]]:
        """The triples of each segment."""
        assert sum(self.segments) == len(self.triples), self
        ends = list(itertools.accumulate(self.segments, initial=0))
        return [self.triples[one:other] for one, other in itertools.pairwise(ends)]


PRESETS: dict[str, Schedule] = {
    # One triple serves any number of steps. With keller the search finds 4+3 for 7 steps and 4+3+3
    # for 10, both within 4 % of their limits; threes serve all numbers, with a wider margin.
    "keller": Schedule((KELLER,), segments=(3,)),
    # The classic iteration, which converges to the polar factor, slowly: Kovarik, SIAM J. Numer.
    # Anal. 7 (1970) 386; Bjorck and Bowie, SIAM J. Numer. Anal. 8 (1971) 358.
    "cubic": Schedule(((1.5, -0.5, 0.0),), segments=(10,)),
    # Optimal for five steps from singular values of at least 0.001: Polar Express, arXiv
    # 2505.16932, with its safety factor of 1.02 folded into all but the last.
    "polar_express": Schedule(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7098828382687081, 0.42323551169305323),
        ),
        margin=1.02,
        segments=(2, 1, 2),
    ),
    # Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534
    "you": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        segments=(3, 2),
    ),
}
"""Schedules by name. One of a single triple repeats it; the others have no further steps."""


def schedule_of(coefficients: Coefficients, steps: int) -> Schedule:
    """The triples of `steps` steps.

    Raises ValueError for an unknown name, and for more steps than there are triples: each of
    several is made for its place, so that none can be repeated. Fewer steps take the first ones.
    """
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ValueError(f"{coefficients!r} is none of {', '.join(sorted(PRESETS))}")
        whole = PRESETS[coefficients]
    elif all(isinstance(each, (tuple, list)) for each in coefficients):
        whole = _given(tuple(_triple(each) for each in coefficients))
    else:
        whole = _given((_triple(coefficients),))
    if len(whole.triples) == 1:
        triples = whole.triples * steps
    elif steps > len(whole.triples):
        raise ValueError(f"{steps} steps, but there are triples for {len(whole.triples)}")
    else:
        triples = whole.triples[:steps]
    segments = _cautious(triples) if not whole.segments else _fill(whole.segments, steps)
    return replace(whole, triples=triples, segments=segments)


def _given(triples: tuple[Triple, ...]) -> Schedule:
    """Triples without a name; those of a preset of one triple are that preset."""
    for preset in PRESETS.values():
        if triples == preset.triples and len(triples) == 1:
            return preset
    return Schedule(triples, segments=())


def _fill(segments: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """As many segments as `steps` need: the last of those given repeats, and is cut short."""
    filled: list[int] = []
    lengths = itertools.chain(segments, itertools.repeat(segments[-1]))
    while sum(filled) < steps:
        filled.append(min(next(lengths), steps - sum(filled)))
    return tuple(filled)


# Rounding puts eigenvalues of R, whose trace is at most 1, some 1e-4 below zero. There a step
# multiplies them by about a^2, and by more the further they are below; past about -0.01 the
# polynomial is another one. So the product of a^2 from start to start stays below this.
MOST_GROWTH, MOST_STEPS = 150.0, 3


def _cautious(triples: tuple[Triple, ...]) -> tuple[int, ...]:
    """Segments for triples that nobody has measured: at most 3 steps, and fewer if they are steep.

    The last step of a segment does not count, because R is not used after it.
    """
    segments: list[int] = []
    growth = 1.0
    for number in range(len(triples)):
        steepest = triples[number - 1][0]
        growth *= steepest * steepest  # ** raises where this is inf
        if not segments or growth > MOST_GROWTH or segments[-1] == MOST_STEPS:
            segments.append(0)
            growth = 1.0
        segments[-1] += 1
    return tuple(segments)


def _triple(numbers: object) -> Triple:
    a, b, c = (float(number) for number in numbers)  # type: ignore[attr-defined]
    return a, b, c
