"""Packs loads anew: owners below a largest load that starts at the lower bound.

Owns the search that succeeds where there are few different costs, as in models, and where many
trades at once would be needed. Moves costs, not matrices, like `balance`. Deterministic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from operator import mul, sub

__all__ = ["packed"]

# Packing is for few different costs; where there are many, small trades do.
MOST_KINDS = 6
# It ends this close to a top for which it failed.
NEAR = 0.0003
# States that packing below one top makes; it gives up where one state per rank is more.
MOST_STATES = 6_000
# A rank may leave this many times the mean of what ranks leave free; more only adds states.
UNEVEN = 4

Counts = tuple[int, ...]
"""How many matrices of each cost, the largest cost first."""


def packed(
    owners: Mapping[str, int], costs: Mapping[str, int], loads: Mapping[int, int], floor: int
) -> dict[str, int]:
    """`owners`, or those of a packing whose largest load is smaller. floor: no load is below."""
    names: dict[int, list[str]] = defaultdict(list)
    base = dict(loads)
    for name in sorted(owners, key=lambda name: (-costs[name], name)):
        if costs[name]:
            names[costs[name]].append(name)
            base[owners[name]] -= costs[name]
    if not 0 < len(names) <= MOST_KINDS:
        return dict(owners)
    kinds, counts = tuple(names), tuple(map(len, names.values()))
    # Of all that cost at least as much as a kind, some rank has this many.
    crowds = [-(-count // len(base)) for count in accumulate(counts)]
    floor = max(floor, *base.values(), *map(mul, kinds, crowds))
    ranks = sorted(base, key=lambda rank: (-base[rank], rank))
    best: Sequence[Counts] = ()
    low, high = floor - 1, max(loads.values())
    step = NEAR * low
    while high - low > 1 + NEAR * low:
        # Tops near the bound are the likelier and the easier: little of a rank may stay free.
        top = low + max(1, int(min(step, (high - low) // 2)))
        takes = _pack(kinds, counts, [top - base[rank] for rank in ranks])
        if takes:
            best, high = takes, top
        else:
            low, step = top, 2 * step
    after = dict(owners)
    for rank, take in zip(ranks, best, strict=bool(best)):
        for kind, count in zip(kinds, take, strict=True):
            after |= {names[kind].pop(): rank for _ in range(count)}
    return after


def _pack(kinds: Counts, counts: Counts, rooms: Sequence[int]) -> list[Counts]:
    """What each of the `rooms` takes, so that nothing is left; empty if none was found.

    Goes through states, what is left after some rooms, and keeps those nearest to the same mixture
    as in the beginning. Vectors that add up to zero can be ordered so that all partial sums stay
    small (Steinitz), so a solution has an order that stays near.
    """
    whole = room_left = sum(rooms)
    waste = UNEVEN * (whole - _load(kinds, counts)) // len(rooms)
    most = MOST_STATES // len(rooms)
    options = cache(lambda room: _options(kinds, counts, room, waste, most))
    layers = [{counts: counts}]  # each state, and the state before it
    for room in rooms:
        takes = options(room)
        room_left -= room
        goal = [count * room_left / whole for count in counts]
        after = _after(layers[-1], takes)
        kept = sorted(
            (sum(kind * abs(x - y) for kind, x, y in zip(kinds, left, goal, strict=True)), left)
            for left in after
            if _load(kinds, left) <= room_left
        )
        if not kept:
            return []
        layers.append({left: after[left] for _, left in kept[: most // len(takes)]})
    taken, left = [], kept[0][1]  # room for nothing is left, so nothing is
    for layer in reversed(layers[1:]):
        taken.append(tuple(map(sub, layer[left], left)))
        left = layer[left]
    return taken[::-1]


def _after(states: Iterable[Counts], takes: Sequence[Counts]) -> dict[Counts, Counts]:
    """What can be left of `states`, each with the first state that it comes from."""
    after: dict[Counts, Counts] = {}
    for state in states:
        for take in takes:
            left = tuple(map(sub, state, take))
            if min(left) < 0:  # room for more of a kind than there is
                left = tuple([max(0, count) for count in left])
            after.setdefault(left, state)
    return after


def _options(kinds: Counts, counts: Counts, room: int, waste: int, most: int) -> list[Counts]:
    """All that fits into `room` and leaves at most `waste` free, filled up with the smallest kind.

    Empty if there are more than `most`.
    """
    partial: list[tuple[Counts, int]] = [((), room)]
    later = _load(kinds, counts)
    for kind, count in zip(kinds, counts, strict=True):
        later -= kind * count
        grown = []
        for taken, free in partial:
            upper = min(count, free // kind)
            # Fewer, and even all matrices of later kinds leave too much free.
            lower = max(0, -((later + waste - free) // kind))
            lower = max(lower, upper) if kind == kinds[-1] else lower
            grown += [((*taken, n), free - n * kind) for n in range(upper, lower - 1, -1)]
        if len(grown) > most:
            return []
        partial = grown
    return [taken for taken, _ in partial]


def _load(kinds: Counts, counts: Counts) -> int:
    return sum(map(mul, kinds, counts))
