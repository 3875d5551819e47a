"""Rows chosen for the page while the parts are read once.

Only a row's place is kept, so that memory is the same for any number of rows; its text is read
once the choice is made. Each row has a random number that depends on its part and its place alone,
and the rows with the least numbers are chosen: a seeded sample that does not depend on the order
of the parts, and that mostly stays when a report is made again with more of them.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

_SEED = 20_261_201
_NUM_RANDOM = 20
_NUM_PER_FLAG = 3
_NUM_SLOWEST = 10
_MOST_ERRORS = 40


@dataclass(frozen=True, slots=True, order=True)
class Pick:
    """Place of a chosen row; the least rank comes first."""

    rank: float
    part: str
    place: int
    """Number of the row in its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRows:
    """The columns of one part that rows are chosen by."""

    part: str
    is_ok: Sequence[bool]
    took_s: Sequence[float]
    flagged: Sequence[tuple[int, Sequence[str]]]
    """Rows with flags: their places and flags."""


@dataclass(slots=True, kw_only=True)
class Picks:
    """Rows chosen so far."""

    random: list[Pick] = field(default_factory=list)
    by_flag: dict[str, list[Pick]] = field(default_factory=dict)
    slowest: list[Pick] = field(default_factory=list)
    errors: list[Pick] = field(default_factory=list)
    num_ok: int = 0
    num_errors: int = 0
    num_flagged: Counter[str] = field(default_factory=Counter)

    def add(self, rows: PartRows) -> None:
        """Choose among the rows of one more part."""
        random = Random(f"{_SEED} {rows.part}")  # noqa: S311 - a sample, no secret
        ranks = [random.random() for _ in rows.is_ok]
        num_ok = sum(rows.is_ok)
        self.num_ok += num_ok
        self.num_errors += len(rows.is_ok) - num_ok
        good = (place for place in _below(ranks, self.random) if rows.is_ok[place])
        self.random = _least(_NUM_RANDOM, self.random, ranks, good, rows.part)
        bad = [place for place, is_ok in enumerate(rows.is_ok) if not is_ok]
        self.errors = _least(_MOST_ERRORS, self.errors, ranks, bad, rows.part)
        slow = heapq.nlargest(_NUM_SLOWEST, range(len(ranks)), key=rows.took_s.__getitem__)
        negative_s = [-took_s for took_s in rows.took_s]
        self.slowest = _least(_NUM_SLOWEST, self.slowest, negative_s, slow, rows.part)
        self._add_flagged(rows, ranks)

    def all(self) -> set[Pick]:
        """Return every chosen row."""
        chosen = [self.random, self.slowest, self.errors, *self.by_flag.values()]
        return {pick for picks in chosen for pick in picks}

    def _add_flagged(self, rows: PartRows, ranks: Sequence[float]) -> None:
        places: dict[str, list[int]] = {}
        for place, flags in rows.flagged:
            for flag in flags:
                places.setdefault(flag, []).append(place)
        for flag, own in places.items():
            self.num_flagged[flag] += len(own)
            chosen = self.by_flag.get(flag, [])
            self.by_flag[flag] = _least(_NUM_PER_FLAG, chosen, ranks, own, rows.part)


def _below(ranks: Sequence[float], chosen: Sequence[Pick]) -> Iterable[int]:
    """Return the places of the few ranks that can still be chosen."""
    if len(chosen) < _NUM_RANDOM:
        return range(len(ranks))
    highest = chosen[-1].rank
    return [place for place, rank in enumerate(ranks) if rank < highest]


def _least(
    number: int, chosen: Sequence[Pick], ranks: Sequence[float], places: Iterable[int], part: str
) -> list[Pick]:
    new = (Pick(ranks[place], part, place) for place in places)
    return heapq.nsmallest(number, [*chosen, *new])
