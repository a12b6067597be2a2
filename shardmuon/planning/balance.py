"""Evens out the loads of ranks after a first assignment.

Owns two searches. Matrices of one cost are alike, so both move costs, not matrices. The local one
gives a matrix of the most loaded rank away, exchanges one for one, or one for two, whatever lowers
the larger load of the two ranks most, until nothing does. The other packs all ranks anew below
tops that start at the lower bound; it succeeds where there are few different costs, as in models,
and many trades at once would be needed. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul, sub

__all__ = ["balance"]

# A plan is made in a second or two, also for a thousand ranks; the search ends earlier as a rule.
MOST_MOVES = 20_000
# Ranks that are tried as partners of the most loaded one, the least loaded first.
MOST_PARTNERS = 64
# Above this number of different costs on a rank, one-for-two exchanges take too long.
MOST_COSTS = 24
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


@dataclass(frozen=True)
class _Trade:
    """What the most loaded rank gives and takes; both are costs."""

    larger: int
    partner: int
    gives: tuple[int, ...]
    takes: tuple[int, ...]


def balance(
    owners: Mapping[str, int], costs: Mapping[str, int], loads: Mapping[int, int]
) -> dict[str, int]:
    """Owners after the search. costs: of the matrices that may move, the keys of `owners`.

    loads: of every rank, with these matrices and all else that it has. The largest never grows.
    """
    search = _Search(owners, costs, loads)
    floor = max(-(-sum(loads.values()) // len(loads)), max(costs.values(), default=0))
    for _ in range(MOST_MOVES):
        worst = search.most_loaded()
        if search.loads[worst] <= floor or not search.improve(worst):
            break
    return _packed(search.owners, costs, search.loads, floor)


def _packed(
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


class _Search:
    def __init__(
        self, owners: Mapping[str, int], costs: Mapping[str, int], loads: Mapping[int, int]
    ) -> None:
        self.owners = dict(owners)
        self.loads = dict(loads)
        self._held: dict[int, dict[int, list[str]]] = {rank: defaultdict(list) for rank in loads}
        for name in sorted(owners):
            self._held[owners[name]][costs[name]].append(name)
        self._ranked = sorted((load, rank) for rank, load in loads.items())

    def most_loaded(self) -> int:
        """The rank with the largest load, the lowest of them."""
        top = self._ranked[-1][0]
        return self._ranked[bisect_right(self._ranked, (top, -1))][1]

    def improve(self, worst: int) -> bool:
        """Carry out the best trade of `worst` with another rank, if one lowers its load."""
        best: _Trade | None = None
        for load, partner in self._ranked[:MOST_PARTNERS]:
            if load >= self.loads[worst]:
                break
            found = self._best_trade(worst, partner)
            if found is not None and (best is None or found.larger < best.larger):
                best = found
        if best is None:
            return False
        self._give(worst, best.partner, best.gives)
        self._give(best.partner, worst, best.takes)
        return True

    def _best_trade(self, worst: int, partner: int) -> _Trade | None:
        """The trade after which the larger of the two loads is smallest."""
        high, low = self.loads[worst], self.loads[partner]
        gap = high - low
        best: _Trade | None = None
        # Half of the gap is what should change hands; more than the gap makes it worse.
        mine, theirs = self._costs_of(worst), self._sums_of(partner)
        keys = [total for total, _ in theirs]
        for cost in mine:
            wanted = cost - gap / 2
            place = bisect_right(keys, wanted)
            for index in (place - 1, place):
                if not 0 <= index < len(theirs):
                    continue
                total, takes = theirs[index]
                moved = cost - total
                if not 0 < moved < gap:
                    continue
                larger = max(high - moved, low + moved)
                if best is None or larger < best.larger:
                    best = _Trade(larger, partner, (cost,), takes)
        return best

    def _costs_of(self, rank: int) -> list[int]:
        return sorted(cost for cost, names in self._held[rank].items() if names)

    def _sums_of(self, rank: int) -> list[tuple[int, tuple[int, ...]]]:
        """What a rank can give back: nothing, one matrix or two; by the sum of their costs."""
        costs = self._costs_of(rank)
        sums: dict[int, tuple[int, ...]] = {0: ()}
        for cost in costs:
            sums.setdefault(cost, (cost,))
        if len(costs) <= MOST_COSTS:
            for index, one in enumerate(costs):
                for other in costs[index:]:
                    if one != other or len(self._held[rank][one]) > 1:
                        sums.setdefault(one + other, (one, other))
        return sorted(sums.items())

    def _give(self, source: int, target: int, costs: Iterable[int]) -> None:
        for cost in costs:
            name = self._held[source][cost].pop()
            insort(self._held[target][cost], name)
            self.owners[name] = target
            self._change(source, -cost)
            self._change(target, cost)

    def _change(self, rank: int, by: int) -> None:
        self._ranked.remove((self.loads[rank], rank))
        self.loads[rank] += by
        insort(self._ranked, (self.loads[rank], rank))
