"""Coefficients of the Newton-Schulz polynomials, with their sources.

Owns the named presets and the rule of which step takes which triple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What a number of steps does.

    triples: one per step. margin: factor on the norm by which a matrix is divided first; above 1
    where a polynomial must not see a singular value that rounding has put above 1.
    """

    triples: tuple[Triple, ...]
    margin: float = 1.0


PRESETS: dict[str, Schedule] = {
    # One triple serves any number of steps.
    "keller": Schedule((KELLER,)),
    # The classic iteration, which converges to the polar factor, slowly: Kovarik, SIAM J. Numer.
    # Anal. 7 (1970) 386; Bjorck and Bowie, SIAM J. Numer. Anal. 8 (1971) 358.
    "cubic": Schedule(((1.5, -0.5, 0.0),)),
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
    ),
    # Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534
    "you": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
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
        whole = Schedule(tuple(_triple(each) for each in coefficients))
    else:
        whole = Schedule((_triple(coefficients),))
    if len(whole.triples) == 1:
        return Schedule(whole.triples * steps, whole.margin)
    if steps > len(whole.triples):
        raise ValueError(f"{steps} steps, but there are triples for {len(whole.triples)}")
    return Schedule(whole.triples[:steps], whole.margin)


def _triple(numbers: object) -> Triple:
    a, b, c = (float(number) for number in numbers)  # type: ignore[attr-defined]
    return a, b, c
