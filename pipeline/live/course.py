"""The course of the rest of a run: when the queue is empty, and when the last row ends. Pure.

Time is counted in tokens of one request. An attempt either writes its answer, with a length of the
curve, or is interrupted at some age and made again: the ages of earlier interruptions tell when.
A row of several turns is one unit here, since its turns follow each other.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.planner.lengths.curve import SurvivalCurve
from pipeline.planner.lengths.lengths import LengthModel, nearest_log_normal_cut
from pipeline.planner.lengths.shapes import LengthShape

_MAX_CLASSES = 48
_MAX_AGES = 12
# Moments to look at: up to a multiple of the mean length, and from there to the longest.
_NEAR_MOMENTS, _FAR_MOMENTS, _NEAR_MEANS = 90, 50, 3.0
_TINY = 1e-9
# assumed: lengths that fewer than this share of requests reach count as never seen
_UNSEEN = 1e-4
# assumed: with fewer of the open rows left, what was expected since the last report is wrong
_LEAST_OF_OPEN = 0.5
# assumed: the tokens of a request in flight are known within this share of its length
_SLOW = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLeft:
    """Rows that have not ended."""

    rows_open: int
    running: Sequence[int]
    """Tokens of the open turn of each row in flight, when they were last reported."""
    tokens_since: float
    """Mean tokens that each has written since."""
    turns: float
    lengths: LengthModel
    """Lengths of one turn."""
    finished: int = 0
    """Attempts so far that ended with an answer."""
    interrupted: Mapping[int, int] = field(default_factory=dict)
    """Attempts so far that were interrupted, by the tokens that they would have had."""
    deadline_s: float = math.inf
    """Time limit of an attempt."""


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Share of attempts that are interrupted, and their ages then, in ascending classes."""

    share: float
    ages: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, rows: RowsLeft) -> "Interruptions":
        total = sum(rows.interrupted.values())
        if not total:
            return cls(share=0.0)
        ascending = [(float(age), float(n)) for age, n in sorted(rows.interrupted.items())]
        classes = list(_grouped(ascending, _MAX_AGES))
        return cls(
            share=total / (total + rows.finished + 1),
            ages=tuple(age for age, _ in classes),
            weights=tuple(count / total for _, count in classes),
        )

    @property
    def mean_age_per_answer(self) -> float:
        """Return the tokens that interrupted attempts last, for each attempt that is not."""
        pairs = zip(self.ages, self.weights, strict=True)
        mean = math.fsum(age * weight for age, weight in pairs)
        return mean * self.share / (1 - self.share)

    def beyond(self, age: float) -> tuple[float, list[tuple[float, float]]]:
        """Return the fraction that is interrupted later than at this age, and those ages."""
        place = bisect_right(self.ages, age)
        later = list(zip(self.ages[place:], self.weights[place:], strict=True))
        return math.fsum(weight for _, weight in later), later

    def prolonged(self, curve: SurvivalCurve, factor: float) -> SurvivalCurve:
        """Return the curve of rows, one of whose attempts may be interrupted.

        The ages of interruptions are longer by the factor.
        """
        if not self.share:
            return curve
        ages = [factor * age for age in self.ages]
        pairs = list(zip(ages, self.weights, strict=True))

        def alive(tokens: float) -> float:
            repeated = math.fsum(
                weight * (curve.survival(tokens - age) if tokens >= age else 1.0)
                for age, weight in pairs
            )
            return (1 - self.share) * curve.survival(tokens) + self.share * repeated

        points = {*curve.tokens[:: max(len(curve.tokens) // 400, 1)], curve.longest}
        points |= {edge for age in ages for edge in (age * (1 - 1e-6), age)}
        points |= {age + curve.mean * step / 4 for age in ages for step in range(1, 8)}
        points.add(max(ages) + curve.longest)
        return SurvivalCurve.on(points, alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """Requests of about one age."""

    count: float
    row_tokens: float
    """Tokens of the row so far, those of its earlier turns included."""
    turn_tokens: float


@dataclass(frozen=True, kw_only=True)
class Course:
    """Expected course of the open rows."""

    rows: RowsLeft
    slots: float
    """Requests that run at once."""
    deadline_tokens: float
    tail_speedup: float = 1.0
    """Pace of a request alone over that in a full batch. One that hangs gains nothing by it: its
    time is longer in tokens by this factor."""

    # -- the work

    @cached_property
    def tokens(self) -> float:
        """Tokens that are left to write."""
        return math.fsum(
            [self.num_waiting * self._curve.mean]
            + [each.count * self._written_left(each) for each in self._running]
        )

    @cached_property
    def empty_at(self) -> float:
        """Moment at which the queue is empty."""
        steady = self._share_new * (self._left - self.num_running * self._curve.mean_steady_left)
        return max((self.num_waiting * self._place_tokens + steady) / self.slots, 0.0)

    @cached_property
    def after_empty(self) -> float:
        """Tokens for which all slots would be busy with what is left when the queue is empty."""
        work = self._left + self.num_waiting * self._place_tokens
        return max(work / self.slots - self.empty_at, 0.0)

    @cached_property
    def _place_tokens(self) -> float:
        """Tokens for which a row keeps its place, the attempts that are interrupted included."""
        return self._curve.mean + self._interruptions.mean_age_per_answer

    @cached_property
    def _left(self) -> float:
        """Tokens for which the requests in flight keep their places."""
        return math.fsum(
            each.count * (self._written_left(each) + self._hanging_left(each))
            for each in self._running
        )

    @cached_property
    def num_running(self) -> float:
        return math.fsum(each.count for each in self._running)

    @property
    def num_waiting(self) -> float:
        return max(self.rows.rows_open - self.num_running, 0.0)

    @property
    def _share_new(self) -> float:
        """Share of the slots whose row is a new one when the queue is empty."""
        return min(self.num_waiting / self.slots, 1.0)

    # -- the end

    def drawn(self, chance: float) -> tuple[float, float]:
        """Return tokens of one request until the queue is empty, and from then to the end."""
        moments, chances = self._ends
        place = min(bisect_left(chances, chance), len(moments) - 1)
        end = moments[0]
        if place > 0:
            low, high = chances[place - 1], chances[place]
            part = (chance - low) / (high - low) if high > low else 1.0
            end = moments[place - 1] + min(part, 1.0) * (moments[place] - moments[place - 1])
        until_empty = min(self.empty_at, end)
        return until_empty, end - until_empty

    @cached_property
    def _ends(self) -> tuple[list[float], list[float]]:
        """Ascending moments, and the chance that every row has ended by each."""
        moments = self._moments()
        logs = [self._log_chance_of_new(moment) for moment in moments]
        for each in self._running:
            for place, alive in enumerate(self._alive_at(each, moments)):
                logs[place] += each.count * math.log(max(1 - alive, _TINY))
        return moments, [math.exp(min(log, 0.0)) for log in logs]

    def _moments(self) -> list[float]:
        """Return the moments to look at, from now and from when the queue is empty."""
        longest, near = self._row_curve.longest, _NEAR_MEANS * self._row_curve.mean
        steps = [near * step / _NEAR_MOMENTS for step in range(1, _NEAR_MOMENTS + 1)]
        far = max(longest - near, 0.0)
        steps += [near + far * (step / _FAR_MOMENTS) ** 2 for step in range(1, _FAR_MOMENTS + 1)]
        ends = {self.empty_at + step for step in steps}
        if self.empty_at < near:
            ends.update(steps)
        overdue = [each for each in self._running if self._is_overdue(each)]
        if overdue:
            last = max(self._most_left(each) for each in overdue) * self.tail_speedup
            last += self._curve.longest
            ends.update(last * (step / _NEAR_MOMENTS) ** 2 for step in range(1, _NEAR_MOMENTS + 1))
        return sorted(ends)

    def _log_chance_of_new(self, moment: float) -> float:
        """Return the log of the chance that the rows that start later have ended by then.

        In the steady state what a row has left when the queue is empty is distributed as the area
        below the curve; in a short rest it starts at any time until then.
        """
        num_new = min(self.num_waiting, self.slots)
        if not num_new:
            return 0.0
        curve, empty_at = self._row_curve, self.empty_at
        if self.num_waiting >= self.slots:
            ended = curve.area(moment - empty_at) / curve.mean if moment > empty_at else 0.0
        elif empty_at <= 0:
            ended = 1 - curve.survival(moment)
        else:
            begin = max(moment - empty_at, 0.0)
            area = curve.area(moment) - curve.area(begin)
            ended = max(((moment - begin) - area) / empty_at, 0.0)
        return num_new * math.log(max(ended, _TINY))

    # -- a request in flight

    def _alive_at(self, each: _InFlight, moments: Sequence[float]) -> Iterator[float]:
        """Yield the chance that the row of a request in flight has not ended, moment by moment."""
        if self._is_overdue(each):
            yield from (self._overdue_alive(each, moment) for moment in moments)
            return
        curve, so_far = self._curve, each.row_tokens
        alive, doubt, later = curve.survival(so_far), self._doubt(each), self._later(each)
        for moment in moments:
            writes = curve.survival(so_far + moment) / alive if doubt < 1 else 0.0
            repeats = math.fsum(
                weight * (curve.survival(moment - left) if moment >= left else 1.0)
                for left, weight in later
            )
            yield (1 - doubt) * writes + doubt * repeats

    def _doubt(self, each: _InFlight) -> float:
        """Return the chance that this attempt will be interrupted."""
        share = self._interruptions.share
        interrupted = share * self._interruptions.beyond(each.turn_tokens)[0]
        written = (1 - share) * self._curve.survival(each.row_tokens)
        return interrupted / (interrupted + written) if interrupted > 0 else 0.0

    def _later(self, each: _InFlight) -> list[tuple[float, float]]:
        """Return the tokens left until each class of interruptions, and its share of them."""
        total, later = self._interruptions.beyond(each.turn_tokens)
        return [
            ((age - each.turn_tokens) * self.tail_speedup, weight / total) for age, weight in later
        ]

    def _is_overdue(self, each: _InFlight) -> bool:
        """Return whether it has outlived all lengths and all interruptions so far."""
        return self._curve.is_beyond(each.row_tokens) and not self._doubt(each)

    def _overdue_alive(self, each: _InFlight, more: float) -> float:
        """Return the chance that an overdue row is alive.

        A little over all lengths it is slow and ends soon. Else it hangs: overdue as long again,
        or not; and at the deadline of the attempt it starts anew.
        """
        known, overdue, most = self._known(each), self._overdue(each), self._most_left(each)
        hangs = overdue**2 / (overdue**2 + (_SLOW * known) ** 2)
        slow = (1 - hangs) * math.exp(-more / (_SLOW * known))
        more /= self.tail_speedup
        if more < most:
            return slow + hangs * overdue / (overdue + more)
        is_repeated = most < self._curve.longest - each.row_tokens or self._is_past_limit(each)
        repeated = hangs * overdue / (overdue + most) if is_repeated else 0.0
        return slow + repeated * self._curve.survival((more - most) * self.tail_speedup)

    def _overdue(self, each: _InFlight) -> float:
        return max(each.row_tokens - self._known(each), 1.0)

    def _known(self, each: _InFlight) -> float:
        """Return the length that it has outlived."""
        return self._curve.longest if self._is_past_limit(each) else self._longest_known

    def _most_left(self, each: _InFlight) -> float:
        """Return the tokens until the limit of lengths or the deadline, whichever is first."""
        until_deadline = max(self.deadline_tokens - each.turn_tokens, 0.0)
        if self._is_past_limit(each):
            # It cannot write this much: it hangs.
            return min(until_deadline, 50 * self._curve.longest)
        return min(until_deadline, self._curve.longest - each.row_tokens)

    def _is_past_limit(self, each: _InFlight) -> bool:
        return each.row_tokens >= self._curve.longest

    def _written_left(self, each: _InFlight) -> float:
        """Return the mean tokens that the row has left to write."""
        if self._is_overdue(each):
            return min(self._overdue(each), max(self._curve.longest - each.row_tokens, 0.0))
        doubt = self._doubt(each)
        written = self._curve.mean_left(each.row_tokens) if doubt < 1 else 0.0
        return (1 - doubt) * written + doubt * self._curve.mean

    def _hanging_left(self, each: _InFlight) -> float:
        """Return for how long, in tokens, a request is expected to hang."""
        if not self._is_overdue(each):
            return self._doubt(each) * math.fsum(left * part for left, part in self._later(each))
        if self._is_past_limit(each):
            return min(self._overdue(each), self._most_left(each))
        return 0.0

    # -- curves and classes

    @cached_property
    def _curve(self) -> SurvivalCurve:
        return SurvivalCurve.of(_row_shape(self.rows))

    @cached_property
    def _row_curve(self) -> SurvivalCurve:
        return self._interruptions.prolonged(self._curve, self.tail_speedup)

    @cached_property
    def _interruptions(self) -> Interruptions:
        return Interruptions.of(self.rows)

    @cached_property
    def _longest_known(self) -> float:
        pairs = zip(self._curve.tokens, self._curve.survivals, strict=True)
        return max(tokens for tokens, alive in pairs if alive > _UNSEEN)

    @cached_property
    def _running(self) -> list[_InFlight]:
        """Rows in flight, in few enough classes to compute with."""
        rows, curve = self.rows, self._curve
        turns = max(round(rows.turns), 1)
        reported = Counter(rows.running)
        now = _by_now(reported, rows, curve)
        waits = rows.rows_open > len(rows.running)
        if not waits and sum(now.values()) < _LEAST_OF_OPEN * rows.rows_open:
            # They should have ended since, and have not: they are about to.
            now = {float(so_far): float(count) for so_far, count in reported.items()}
        per_turn = list(_grouped(sorted(now.items()), max(_MAX_CLASSES // turns, 8)))
        # More than are open: some have ended. Fewer although none waits: fewer than expected have.
        total = math.fsum(count for _, count in per_turn)
        share = rows.rows_open / max(total, _TINY)
        if waits:
            share = min(share, 1.0)
        return [
            _InFlight(
                count=share * count / turns,
                row_tokens=so_far + done * curve.mean / turns,
                turn_tokens=so_far,
            )
            for so_far, count in per_turn
            for done in range(turns)
        ]


def _row_shape(rows: RowsLeft) -> LengthShape:
    """Return the lengths of whole rows: sums over their turns."""
    if rows.turns <= 1:
        return rows.lengths.shape
    summary = rows.lengths.summary
    return nearest_log_normal_cut(
        summary.mean_tokens * rows.turns,
        summary.cv / math.sqrt(rows.turns),
        math.ceil(summary.limit_tokens * rows.turns),
    )


def _by_now(counts: Mapping[int, int], rows: RowsLeft, curve: SurvivalCurve) -> dict[float, float]:
    """Carry the requests on since the last report: some have ended, and others took their place."""
    since = rows.tokens_since
    if since <= 0:
        return {float(so_far): float(count) for so_far, count in counts.items()}
    now: dict[float, float] = {}
    gone = 0.0
    for so_far, count in counts.items():
        alive = 1.0 if curve.is_beyond(so_far) else curve.outlives(so_far, since)
        now[so_far + since] = now.get(so_far + since, 0.0) + alive * count
        gone += (1 - alive) * count
    if rows.rows_open > len(rows.running):
        now[since / 2] = now.get(since / 2, 0.0) + gone
    return {so_far: count for so_far, count in now.items() if count > 0}


def _grouped(ascending: Sequence[tuple[float, float]], most: int) -> Iterator[tuple[float, float]]:
    """Yield the mean and the count of at most so many groups of neighbours."""
    size = max(math.ceil(len(ascending) / most), 1)
    for start in range(0, len(ascending), size):
        group = ascending[start : start + size]
        number = math.fsum(count for _, count in group)
        yield math.fsum(value * count for value, count in group) / number, number
