"""Newton-Schulz: the approximate orthogonal factor of whole matrices.

Owns what comes before and after the iteration (orientation, norm, dtypes) and the choice between
the methods, which compute the same polynomial by different products:

- standard: torch's own arithmetic, bit-equal to `torch.optim.Muon` on one matrix.
- symmetric: the same products, those whose result is symmetric computed by half where a kernel can.
- gram: iterates on the Gram matrix X X^T alone, and starts anew where rounding would build up.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shardmuon.orthogonalize.coefficients import Schedule
from shardmuon.orthogonalize.products import scaled, symmetric_product

__all__ = ["METHODS", "Team", "iteration_dtype", "newton_schulz", "newton_schulz_of_panels"]

METHODS = ("standard", "symmetric", "gram")


class Team(Protocol):
    """Ranks that each have a panel of the same matrices, and call the same functions in turn."""

    def everyones(self, x: Tensor) -> Tensor:
        """`x` of each rank, [ranks, *x.shape]."""

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks, rounded once, the same bits on all of them."""


def newton_schulz(
    matrix: Tensor,
    schedule: Schedule,
    eps: float | None,
    dtype: torch.dtype,
    method: str = "standard",
) -> Tensor:
    """Approximate orthogonal factor of each matrix.

    matrix: [rows, cols] or a batch [n, rows, cols], any floating dtype; not changed.
    eps: smallest norm by which a matrix is divided, as in torch. None: any matrix but zero is
    divided by its norm, found without overflow or underflow, so that scale does not matter.
    On a CPU a matrix that is not zero and has a smaller norm is warned of, once per process for
    each eps; on a GPU none is, because the host would have to wait for the norm.
    dtype: of the result, and of the iteration under "standard"; other methods iterate in float16 on
    a GPU and in float32 (float64 if asked for) on a CPU, see `iteration_dtype`.
    Returns a tensor of the same shape in `dtype`; with "standard" column-major where rows > cols.

    x is transposed if tall, divided by its Frobenius norm (at least `eps`) times the schedule's
    margin, then for each triple A = x x^T, x <- a x + (b A + c A A) x. With an eps the cast comes
    before the norm (torch's order), but for float16, which could not hold the sum. A zero matrix
    gives zero. A 2-D matrix under "standard" runs the calls that torch.optim.Muon makes, so equal
    input in equal memory format gives equal bits; batches and other methods may differ in the last
    bits.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    inner = iteration_dtype(schedule, method, dtype, matrix.device)
    if method == "standard":
        x = _unit(matrix, schedule.margin, eps, dtype)
        return _standard(x.mT, schedule).mT if tall else _standard(x, schedule)
    batch = matrix if matrix.ndim == 3 else matrix[None]
    batch, factors = _factors(batch, schedule.margin, eps)
    x = scaled(batch.mT if tall else batch, factors, inner)
    x = _gram(x, schedule, tall) if method == "gram" else _symmetric(x, schedule, tall)
    return scaled(x, None, dtype).view(matrix.shape)


def newton_schulz_of_panels(
    panels: Tensor,
    schedule: Schedule,
    eps: float | None,
    dtype: torch.dtype,
    tall: bool,
    team: Team,
) -> Tensor:
    """This rank's panels of the approximate orthogonal factors of matrices that a team shares.

    panels: [n, rows, cols], pieces of the matrices along their longer side, which is the first if
    `tall`; every rank of the team has another piece of the same matrices. Not changed. eps, dtype:
    as in `newton_schulz`. The gram method: x x^T is the sum of what each panel gives, the
    polynomial of it is computed by every rank, and its product with a panel is that of the matrix.
    Per call the team exchanges one number, and one square matrix per segment, for each matrix.
    """
    inner = iteration_dtype(schedule, "gram", dtype, panels.device)
    batch, factors = _factors(panels, schedule.margin, eps, team)
    x = scaled(batch.mT if tall else batch, factors, inner)
    return scaled(_gram(x, schedule, tall, team.total), None, dtype)


def iteration_dtype(
    schedule: Schedule, method: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype in which `method` iterates where `dtype` is asked for.

    "standard" takes `dtype`, as torch does. The others take float16 on a GPU, which costs as much
    as bfloat16 and rounds eight times finer; on a CPU half precision is slow and saves nothing, so
    that it is float32 at least. The gram method never takes bfloat16: see `Schedule.gram_dtypes`.
    """
    if method == "standard":
        return dtype
    inner = torch.float16 if device.type == "cuda" else torch.promote_types(dtype, torch.float32)
    return torch.float32 if method == "gram" and inner not in schedule.gram_dtypes else inner


def _unit(matrix: Tensor, margin: float, eps: float | None, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype` divided by its norm, by torch's calls where there is an eps."""
    if eps is None or dtype == torch.float16:
        batch, factors = _factors(matrix if matrix.ndim == 3 else matrix[None], margin, eps)
        return scaled(batch, factors, dtype).view(matrix.shape)
    x = matrix.to(dtype, copy=True)
    norm = x.norm() if matrix.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    divisor: Tensor = norm * margin if margin != 1.0 else norm
    _warn_below(eps, divisor, x)
    x.div_(divisor.clamp(min=eps))
    return x


def _factors(
    batch: Tensor, margin: float, eps: float | None, team: Team | None = None
) -> tuple[Tensor, Tensor]:
    """(`batch` in the range of its dtype, [n, 1, 1] by which to multiply it). Without overflow.

    The norm by which it is divided is that over all panels of `team`.
    """
    wide = batch.dtype if batch.dtype == torch.float64 else torch.float32

    def norms(x: Tensor) -> Tensor:
        out: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
        return out

    if not batch.numel():
        return batch, batch.new_ones(len(batch), 1, 1, dtype=wide)
    if eps is not None:
        divisor = _norm_of_all(norms(batch), None, team) * margin
        _warn_below(eps, divisor, batch)
        return batch, divisor.clamp(min=eps).reciprocal()
    # Divided by the largest magnitude first, squares can neither overflow nor vanish.
    largest = torch.linalg.vector_norm(batch, float("inf"), dim=(-2, -1), keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0).to(wide)
    batch = batch / largest
    norm = _norm_of_all(norms(batch), largest, team)
    return batch, torch.where(norm > 0, norm * margin, 1.0).reciprocal()


def _norm_of_all(norm: Tensor, unit: Tensor | None, team: Team | None) -> Tensor:
    """Norms [n, 1, 1] over all panels, as multiples of this rank's `unit` (one), like `norm`."""
    if team is None:
        return norm
    unit = torch.ones_like(norm) if unit is None else unit
    units, norms = team.everyones(torch.stack((unit, norm))).unbind(1)
    largest = units.amax(dim=0)
    total: Tensor = torch.linalg.vector_norm(norms * (units / largest), dim=0)
    return total * (largest / unit)


def _warn_below(eps: float, norms: Tensor, x: Tensor) -> None:
    """On a CPU, warn of a matrix of `x` that is not zero and is divided by more than its norm."""
    if x.device.type != "cpu" or not x.numel() or not bool((norms < eps).any()):
        return
    small = ((norms < eps) & x.ne(0).any(-1, keepdim=True).any(-2, keepdim=True)).any()
    if small:
        _warn_once(eps)


@functools.cache
def _warn_once(eps: float) -> None:
    warnings.warn(
        f"a matrix has a norm below eps={eps:g}, by which it is divided instead, so that its update"
        " fades; eps=None divides any matrix by its own norm",
        stacklevel=4,
    )


def _standard(x: Tensor, schedule: Schedule) -> Tensor:
    for a, b, c in schedule.triples:
        if x.ndim == 2:
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        else:
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _symmetric(x: Tensor, schedule: Schedule, turn: bool) -> Tensor:
    """x: [n, rows, cols]. turn: return the transposed matrices, contiguous."""
    last = len(schedule.triples) - 1
    for number, (a, b, c) in enumerate(schedule.triples):
        gram = symmetric_product(x, x)
        polynomial = symmetric_product(gram, gram, alpha=c, add=gram, beta=b, diagonal=a)
        x = _product(polynomial, x, turn and number == last)
    return x


def _gram(
    x: Tensor,
    schedule: Schedule,
    turn: bool,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """With R = x x^T each step is x <- P x, P = a + b R + c R R, and then R <- P R P.

    P and R are polynomials of the same matrix, so they commute and all products are symmetric. The
    factors of a segment are collected in Q and reach x at its end, where R is computed anew: the
    error of R grows with every step, and what is small in x was lost in Q. turn: as `_symmetric`.
    total: makes R of what this rank's part of x gives, if others have the rest.
    """
    parts = schedule.parts()
    for part, segment in enumerate(parts):
        r = symmetric_product(x, x)
        if total is not None:
            r = total(r)
        q: Tensor | None = None
        for number, (a, b, c) in enumerate(segment):
            p = symmetric_product(r, r, alpha=c, add=r, beta=b, diagonal=a)
            q = p if q is None else symmetric_product(p, q)
            if number + 1 < len(segment):
                r = symmetric_product(symmetric_product(p, r), p)
        assert q is not None
        x = _product(q, x, turn and part + 1 == len(parts))
    return x


def _product(symmetric: Tensor, x: Tensor, turn: bool) -> Tensor:
    """symmetric x, or its transpose: the last product of tall matrices brings them back at once."""
    return torch.bmm(x.mT, symmetric.mT) if turn else torch.bmm(symmetric, x)
