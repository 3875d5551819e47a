"""Seconds until the last row of a running job ends, drawn from everything that is uncertain. Pure.

    until the queue is empty:  all slots are busy, so work over rate
    then:                      the last requests end one by one, each at its own length

Requests in flight count with what they have generated: the longer one has run, the longer it is
likely to be. A row of several turns is one unit here, since its turns follow each other.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from pipeline.planner.estimate.job_time import (
    band_of,
    heavy_tailed_by_name,
    log_rate_factor,
    luck_of,
)
from pipeline.planner.lengths.lengths import LengthModel, nearest_log_normal_cut
from pipeline.planner.lengths.shapes import LengthShape, SampledLengths, survival
from pipeline.planner.rate.errors import RateGroup, rate_of
from schemas.estimate import Band
from schemas.units import SECONDS_PER_DAY

_DRAWS = 2000
_SEED = 20_261_201
_GRID = 400
_MAX_CLASSES = 64
_TINY = 1e-9
# assumed: a run is interrupted about every half day, and what it costs is availability's doing
_HOURS_BETWEEN_INTERRUPTIONS = 12.0
# A request alone is faster than one in a full batch. assumed, where no plan tells by how much
_TAIL_SPEEDUP = (1.0, 2.0)
# Rates and lengths of the rows to come differ from those so far. measured: replayed streams
_FUTURE_LOG_SD = 0.05


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """The band of the time left, and the tokens that it takes."""

    days: Band
    tokens_per_s: Band
    tokens: float


def time_left(rows: RowsLeft, groups: Sequence[RateGroup], *, lost_fraction: float) -> TimeLeft:
    """Draw the time left. `lost_fraction` is the share of time that interruptions cost.

    `groups` are the engines with their measured rates: at least one, each above 0 tokens/s.
    """
    course = _Course.of(rows, groups)
    rate = rate_of(groups)
    slots = sum(group.replicas * group.running_requests for group in groups)
    pace = rate / slots
    random = Random(_SEED)  # noqa: S311 - draws of a band, no secret
    drawn: list[tuple[float, float]] = []
    for _ in range(_DRAWS):
        longer = rows.lengths.summary.mean_relative_error * random.gauss(0, 1)
        factor = _rate_factor(groups, rate, longer, random)
        tokens_until_empty, tokens_after = course.drawn(random.random())
        full_s = tokens_until_empty / pace
        tail_s = course.tail_s(tokens_after, groups, pace, random)
        seconds = (full_s + tail_s) * math.exp(longer + random.gauss(0, _FUTURE_LOG_SD)) / factor
        drawn.append((seconds / (1 - _drawn_loss(seconds, lost_fraction, random)), rate * factor))
    return TimeLeft(
        days=band_of(seconds / SECONDS_PER_DAY for seconds, _ in drawn),
        tokens_per_s=band_of(rate for _, rate in drawn),
        tokens=course.tokens,
    )


def _rate_factor(groups: Sequence[RateGroup], rate: float, longer: float, random: Random) -> float:
    """Draw the engines' rate over the measured one."""
    luck = luck_of(heavy_tailed_by_name(groups), random)
    return (
        sum(
            group.replicas * group.tokens_per_s * math.exp(log_rate_factor(group, luck, longer))
            for group in groups
        )
        / rate
    )


def _drawn_loss(seconds: float, lost_fraction: float, random: Random) -> float:
    """Draw the share of time lost: rare events, so a short rest of a run mostly loses nothing."""
    events = max(seconds / 3600 / _HOURS_BETWEEN_INTERRUPTIONS, 1e-3)
    return min(lost_fraction * random.gammavariate(events, 1 / events), 0.9)


# --- the course of the rest -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """Moments at which the queue is empty and the last row ends, in tokens of one request."""

    empty_at: float
    ends: tuple[float, ...]
    """Ascending moments, and below them the chance that every row has ended by then."""
    chances: tuple[float, ...]
    tokens: float
    mean_left: float
    """Mean tokens that a running row has left when the queue is empty."""

    @classmethod
    def of(cls, rows: RowsLeft, groups: Sequence[RateGroup]) -> "_Course":
        curve = _Curve.of(_row_shape(rows))
        running = _classes(rows, curve)
        num_running = math.fsum(count for _, count in running)
        waiting = max(rows.rows_open - num_running, 0.0)
        slots = max(sum(group.replicas * group.running_requests for group in groups), 1.0)
        left = math.fsum(count * curve.mean_left(so_far) for so_far, count in running)
        share_new = min(waiting / slots, 1.0)
        empty_at = max(
            (waiting * curve.mean + share_new * (left - num_running * curve.mean_steady_left))
            / slots,
            0.0,
        )
        num_new = min(waiting, slots)
        ends = curve.moments(empty_at)
        chances = []
        for moment in ends:
            log_chance = math.fsum(
                count * math.log(max(1 - curve.outlives(so_far, moment), _TINY))
                for so_far, count in running
            )
            if num_new > 0:
                ended = curve.new_ended(moment, empty_at, is_steady=waiting >= slots)
                log_chance += num_new * math.log(max(ended, _TINY))
            chances.append(math.exp(log_chance))
        mean_left = curve.mean_steady_left if share_new == 1 else left / max(num_running, 1.0)
        return cls(
            empty_at=empty_at,
            ends=tuple(ends),
            chances=tuple(chances),
            tokens=left + waiting * curve.mean,
            mean_left=mean_left,
        )

    def drawn(self, chance: float) -> tuple[float, float]:
        """Return tokens of one request until the queue is empty, and from then to the end."""
        place = min(bisect_left(self.chances, chance), len(self.ends) - 1)
        if place == 0:
            end = self.ends[0]
        else:
            low, high = self.chances[place - 1], self.chances[place]
            part = (chance - low) / (high - low) if high > low else 1.0
            end = self.ends[place - 1] + min(part, 1.0) * (self.ends[place] - self.ends[place - 1])
        until_empty = min(self.empty_at, end)
        return until_empty, end - until_empty

    def tail_s(
        self, tokens: float, groups: Sequence[RateGroup], pace: float, random: Random
    ) -> float:
        """Return seconds of the tail: requests speed up as the batch empties."""
        full_step_s = 1 / pace
        alone_s = max(group.small_step_s for group in groups)
        if alone_s >= 0.99 * full_step_s:
            alone_s = full_step_s / random.uniform(*_TAIL_SPEEDUP)
        crowded = min(tokens, self.mean_left)
        return alone_s * tokens + max(full_step_s - alone_s, 0.0) * crowded


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


def _classes(rows: RowsLeft, curve: "_Curve") -> list[tuple[float, float]]:
    """Return tokens so far of the rows in flight, few enough to compute with, and their counts."""
    counts: Counter[float] = Counter()
    turns = max(round(rows.turns), 1)
    for so_far in rows.running:
        for done in range(turns):
            counts[so_far + done * curve.mean / turns] += 1
    ascending = sorted(_by_now(counts, rows, curve).items())
    size = max(math.ceil(len(ascending) / _MAX_CLASSES), 1)
    classes = []
    for start in range(0, len(ascending), size):
        group = ascending[start : start + size]
        number = math.fsum(count for _, count in group)
        mean = math.fsum(so_far * count for so_far, count in group) / number
        classes.append((mean, number / turns))
    # More than are open: some have ended.
    share = min(rows.rows_open / max(math.fsum(count for _, count in classes), _TINY), 1.0)
    return [(so_far, share * count) for so_far, count in classes]


def _by_now(counts: Mapping[float, float], rows: RowsLeft, curve: "_Curve") -> dict[float, float]:
    """Carry the requests on since the last report: some have ended, and others took their place."""
    since = rows.tokens_since
    if since <= 0:
        return dict(counts)
    now: dict[float, float] = {}
    gone = 0.0
    for so_far, count in counts.items():
        alive = curve.outlives(so_far, since)
        now[so_far + since] = now.get(so_far + since, 0.0) + alive * count
        gone += (1 - alive) * count
    if rows.rows_open > len(rows.running):
        now[since / 2] = now.get(since / 2, 0.0) + gone
    return {so_far: count for so_far, count in now.items() if count > 0}


# --- a survival curve on a grid ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A distribution of lengths on a grid: survival, and the area below it up to each length."""

    tokens: tuple[float, ...]
    survivals: tuple[float, ...]
    areas: tuple[float, ...]
    second_areas: tuple[float, ...]

    @classmethod
    def of(cls, shape: LengthShape) -> "_Curve":
        limit = float(shape.limit_tokens)
        points = {limit * (step / _GRID) ** 2 for step in range(_GRID + 1)}
        if isinstance(shape, SampledLengths):
            points |= {edge for mean in shape.bin_means for edge in (mean * (1 - 1e-6), mean)}
        tokens = sorted(points)
        survivals = _survivals(shape, tokens)
        areas, seconds = [0.0], [0.0]
        for (low, high), (before, after) in zip(pairwise(tokens), pairwise(survivals), strict=True):
            area = (high - low) * (before + after) / 2
            areas.append(areas[-1] + area)
            seconds.append(seconds[-1] + area * (low + high) / 2)
        return cls(
            tokens=tuple(tokens),
            survivals=tuple(survivals),
            areas=tuple(areas),
            second_areas=tuple(seconds),
        )

    @property
    def mean(self) -> float:
        return self.areas[-1]

    @property
    def mean_steady_left(self) -> float:
        """Mean tokens left of a running request in a long run: E[o^2] / 2 E[o]."""
        return self.second_areas[-1] / self.areas[-1] if self.areas[-1] else 0.0

    def survival(self, tokens: float) -> float:
        return _interpolated(self.tokens, self.survivals, tokens)

    def area(self, tokens: float) -> float:
        return _interpolated(self.tokens, self.areas, tokens)

    def outlives(self, so_far: float, more: float) -> float:
        """Return the chance that a request with `so_far` tokens writes more than `more` others."""
        alive = self.survival(so_far)
        if alive < _TINY:
            # It has outlived all that is known: as long again is as likely as not.
            return so_far / (so_far + more) if so_far + more < self.tokens[-1] else 0.0
        return self.survival(so_far + more) / alive

    def mean_left(self, so_far: float) -> float:
        alive = self.survival(so_far)
        if alive < _TINY:
            return min(so_far, max(self.tokens[-1] - so_far, 0.0))
        return (self.areas[-1] - self.area(so_far)) / alive

    def new_ended(self, moment: float, empty_at: float, *, is_steady: bool) -> float:
        """Return the chance that a row which starts before the queue is empty has ended.

        In the steady state what it has left then is distributed as the area below the curve; in
        a short rest it starts at any time until then.
        """
        if is_steady:
            return self.area(moment - empty_at) / self.mean if moment > empty_at else 0.0
        if empty_at <= 0:
            return 1 - self.survival(moment)
        begin = max(moment - empty_at, 0.0)
        return max(((moment - begin) - (self.area(moment) - self.area(begin))) / empty_at, 0.0)

    def moments(self, empty_at: float) -> list[float]:
        """Return the moments to look at: up to the limit, now and after the queue is empty."""
        steps = self.tokens[1 :: max(len(self.tokens) // 240, 1)]
        longest = self.tokens[-1]
        return sorted({*steps, *(empty_at + step for step in steps), longest, empty_at + longest})


def _survivals(shape: LengthShape, ascending: Sequence[float]) -> list[float]:
    if not isinstance(shape, SampledLengths):
        return [
            survival(shape, point) if point < shape.limit_tokens else 0.0 for point in ascending
        ]
    alive, place, survivals = 1.0, 0, []
    for point in ascending:
        while place < len(shape.bin_means) and shape.bin_means[place] <= point:
            alive -= shape.weights[place]
            place += 1
        survivals.append(max(alive, 0.0) if point < shape.limit_tokens else 0.0)
    return survivals


def _interpolated(points: Sequence[float], values: Sequence[float], at: float) -> float:
    if at <= points[0]:
        return values[0]
    if at >= points[-1]:
        return values[-1]
    place = bisect_left(points, at)
    low, high = points[place - 1], points[place]
    return values[place - 1] + (at - low) / (high - low) * (values[place] - values[place - 1])
