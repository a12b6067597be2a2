"""Evens out the loads of ranks after a first assignment.

Owns the local search: matrices of one cost are alike, so it moves costs, not matrices. From the
rank with the largest load it gives one away, exchanges one for one, or one for two, whatever lowers
the larger load of the two ranks most, until nothing does. Where that ends above the lower bound,
`packing` tries to do better. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardmuon.planning.packing import packed

__all__ = ["balance"]

# A plan is made in a second or two, also for a thousand ranks; the search ends earlier as a rule.
MOST_MOVES = 20_000
# Ranks that are tried as partners of the most loaded one, the least loaded first.
MOST_PARTNERS = 64
# Above this number of different costs on a rank, one-for-two exchanges take too long.
MOST_COSTS = 24


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
    return packed(search.owners, costs, search.loads, floor)


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
