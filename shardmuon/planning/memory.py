"""How much memory a step takes beside parameters, gradients and state: a bound, from routes alone.

Owns which buffers of a rank live at the same time. It follows the order of `exchange/pipeline.py`
and the bytes of what that allocates; a test holds the one against the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardmuon.planning.matrix import Matrix
from shardmuon.planning.routes import Hop, Route, gather_size, scatter_size

__all__ = ["Held", "held_bytes", "most_bytes"]

# Four float32 blocks: gradient, momentum and update widened, and one result rounded.
ELEMENTWISE_BYTES = 16


class Held(NamedTuple):
    """Bytes that one rank holds for one bucket, the most in each stage of its way.

    preparing: blocks are packed and sent. arriving: they travel to their owners. working: whole
    matrices are put together, orthogonalized and sent back. returning: updates travel back.
    applying: the rest of their way, and their use. early: `arriving`, if it leaves before the step.
    """

    preparing: int
    arriving: int
    working: int
    returning: int
    applying: int
    early: int = 0


def held_bytes(matrices: Sequence[Matrix], route: Route, overlap: str = "none") -> Held:
    """What the rank of `route` holds for a bucket of `matrices`; `overlap` as in Runtime."""
    inwards = [_buffers(hop) for hop in route.hops] or [(gather_size(route.departing), 0)]
    backs = [_buffers(hop.backwards) for hop in reversed(route.hops)]
    shares = [(share.padded, share.padded * len(share.parts)) for share in route.shares]
    wholes = sum(matrices[index].rows * matrices[index].cols for index, _ in route.owned)
    updates = sum(scatter_size(parcels) for _, parcels in route.owned)

    arriving = sum(inwards[0])
    arrived = inwards[-1][1] or arriving
    packing, returning = (updates + backs[0][0], sum(backs[0])) if backs else (updates, updates)
    orthogonalizing = updates + _newton_schulz([matrices[index] for index, _ in route.owned])
    most = max(orthogonalizing, packing, returning)
    working = max(*_passing(0, inwards), arrived + wholes, wholes + most)
    applying = max(_passing(updates, [*backs, *shares]), default=updates)
    elementwise = ELEMENTWISE_BYTES * max(parcel.block.numel for parcel in route.held)
    size = matrices[0].wire_bytes
    return Held(
        arriving * size + elementwise,
        arriving * size,
        working * size,
        returning * size,
        applying * size + elementwise,
        early=arriving * size if overlap == "backward" and route.hops else 0,
    )


def most_bytes(buckets: Sequence[Held]) -> int:
    """The most bytes at any moment of a step that takes `buckets` in this order.

    While one bucket is worked on, one behind it is on its way in and one before it on its way back.
    Buckets without a gradient are passed over, so these need not be its neighbours. Those that set
    out early are all on their way until their turn comes.
    """
    if not buckets:
        return 0
    before = _largest_so_far(buckets)
    after = [*_coming(buckets[::-1])][::-1]
    most = 0
    for bucket, gone, coming in zip(buckets, before, after, strict=True):
        most = max(
            most,
            bucket.preparing,
            coming.preparing + bucket.arriving + gone.returning,
            coming.arriving + bucket.working + gone.returning,
            coming.arriving + bucket.returning + gone.applying,
            bucket.applying,
        )
    return most


def _largest_so_far(buckets: Sequence[Held]) -> Iterator[Held]:
    """For each bucket, the most in each stage among those that come before it."""
    return accumulate(buckets[:-1], _largest, initial=Held(0, 0, 0, 0, 0))


def _coming(buckets: Sequence[Held]) -> Iterator[Held]:
    """For each bucket, what is held for those before it, when they are still to be worked on."""
    early, largest = 0, Held(0, 0, 0, 0, 0)
    for bucket in buckets:
        yield Held(early + largest.preparing, early + largest.arriving, 0, 0, 0)
        early += bucket.early
        # When its turn comes, only its state is left to advance.
        preparing, arriving = (n - bucket.early for n in (bucket.preparing, bucket.arriving))
        largest = _largest(largest, Held(preparing, arriving, 0, 0, 0))


def _largest(one: Held, other: Held) -> Held:
    return Held(*map(max, one, other))


def _buffers(hop: Hop) -> tuple[int, int]:
    """Wire elements (sent, received) of a hop as buffers, what stays on this rank included."""
    if hop.table:
        return hop.buffer_elements, hop.padded * len(hop.table)
    return hop.buffer_elements, sum(hop.receive_sizes)


def _passing(first: int, legs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Wire elements during each leg: what has arrived is packed and let go, sent and received."""
    arrived = first
    for sent, received in legs:
        yield sent + max(arrived, received)
        arrived = received


def _newton_schulz(owned: Sequence[Matrix]) -> int:
    """Elements that Newton-Schulz holds at most beside its input and result, for the largest batch.

    Counted as on a GPU, where matrices of one kind run together. With n <= m, the most is held by
    the last product of a step: two n x m matrices, as normalized and as before the step, and two
    n x n ones, or three under "gram". That method holds five between two products with the matrix,
    and no result by then, but the matrix twice.
    """
    kinds = Counter((m.rows, m.cols, m.settings, m.method, m.panel and m.panel[2:]) for m in owned)
    most = 0
    for (rows, cols, _, method, panel), count in kinds.items():
        n, m = min(rows, cols), max(rows, cols)
        each = 2 * n * m + 2 * n * n
        if method == "gram":
            each = max(2 * n * m + 3 * n * n, n * m + 5 * n * n)
        if panel is not None:  # a product of two square matrices is summed over a team
            n = min(panel[-2:])
            each = 2 * rows * cols + 8 * n * n
        most = max(most, count * each)
    return most
