"""The trend of lengths along an input that is sorted by length or by kind of prompt. Pure.

The first answers of an engine are the short ones, whatever the order of the input. Each reading is
therefore compared with the mean that an input without order would show at the engine's age.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.planner.lengths.curve import SurvivalCurve
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.lengths.shapes import LogNormalCut, SampledLengths
from schemas.estimate import LiveReading

# A slope of fewer standard errors is chance.
_CHANCE = 2.5
# assumed: a trend goes on or has ended, so half of it is expected of the rows to come
_GOES_ON = 0.5
# assumed: after this many mean lengths an engine's requests have no common start any more
_SETTLED_MEANS = 3.0
# An engine whose running requests grow by more has new ones, all at the start of their lengths.
_FILLED = 1.25
# Fewer readings with completions show no trend.
_LEAST_READINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Completions of one reading: how far they are along the input, and how long."""

    place: float
    log_ratio: float
    """Logarithm of their mean length over the one that is expected without a trend."""
    weight: float


def with_trend(
    lengths: LengthModel, readings: Sequence[LiveReading], *, waiting: int, in_flight: int
) -> LengthModel:
    """Return the lengths of the rows that are left, by the trend of those that have ended."""
    ended = sum(reading.finished for reading in readings)
    total = ended + waiting + in_flight
    points = list(_points(readings, SurvivalCurve.of(lengths.shape), total))
    if len(points) < _LEAST_READINGS or not lengths.summary.cv or total == ended:
        return lengths
    line = _line_through(points, lengths.summary.cv)
    now, share_waiting = ended / total, waiting / (waiting + in_flight)
    # A trend is trusted for as far again as it has been seen.
    observed = now - points[0].place
    to_come = line.slope * min((1 - now) / 2, observed) * share_waiting
    log_factor = line.slope * (now - line.middle) + _GOES_ON * to_come
    return _longer(lengths, math.exp(log_factor), doubt=abs(_GOES_ON * to_come))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Logarithm of the length along the input, 0 in the middle of the rows that have ended."""

    middle: float
    slope: float


def _line_through(points: Sequence[_Point], cv: float) -> _Line:
    """Return the line of least squares, flat where its slope may be chance."""
    weights = math.fsum(point.weight for point in points)
    middle = math.fsum(point.weight * point.place for point in points) / weights
    level = math.fsum(point.weight * point.log_ratio for point in points) / weights
    spread = math.fsum(point.weight * (point.place - middle) ** 2 for point in points)
    if not spread > 0:
        return _Line(middle=middle, slope=0.0)
    slope = math.fsum(p.weight * (p.place - middle) * p.log_ratio for p in points) / spread
    scatter = math.fsum(
        p.weight * (p.log_ratio - level - slope * (p.place - middle)) ** 2 for p in points
    ) / (len(points) - 2)
    # Completions end in waves after a start, which scatters more than their lengths do.
    error = math.sqrt(max(scatter, cv**2) / spread)
    # The non-negative garrote: chance is set to 0, and a clear slope hardly changes.
    slope *= max(1 - (_CHANCE * error / slope) ** 2, 0.0) if slope else 0.0
    return _Line(middle=middle, slope=slope)


def _points(readings: Sequence[LiveReading], curve: SurvivalCurve, total: int) -> Iterator[_Point]:
    ended, loads = 0, dict[str, _Load]()
    for reading in sorted(readings, key=lambda reading: reading.end_s):
        number = reading.finished
        ended += number
        load = loads.setdefault(reading.engine, _Load())
        before = load.take(reading)
        if not number or not reading.finished_tokens or before < _SETTLED_MEANS * curve.mean:
            continue
        expected = _mean_of_ended(curve, (before + load.tokens) / 2)
        if expected > 0:
            ratio = reading.finished_tokens / number / expected
            place = (ended - number / 2) / total
            yield _Point(place=place, log_ratio=math.log(ratio), weight=float(number))


@dataclass(slots=True)
class _Load:
    """Tokens that a request has written that runs since the engine was last filled."""

    tokens: float = 0.0
    _running: float = 0.0
    _age_s: float = 0.0

    def take(self, reading: LiveReading) -> float:
        """Add a reading, and return the tokens before it."""
        is_filled = reading.running_requests > _FILLED * self._running
        is_launched = reading.engine_age_s < self._age_s
        if is_filled or is_launched:
            self.tokens = 0.0
        before = self.tokens
        if reading.running_requests > 0:
            pace = reading.tokens_per_s / reading.running_requests
            self.tokens += pace * (reading.end_s - reading.start_s)
        self._running, self._age_s = reading.running_requests, reading.engine_age_s
        return before


def _mean_of_ended(curve: SurvivalCurve, most: float) -> float:
    """Return the mean length of those that end within this many tokens."""
    alive = curve.survival(most)
    return (curve.area(most) - most * alive) / (1 - alive) if alive < 1 else 0.0


def _longer(lengths: LengthModel, factor: float, *, doubt: float) -> LengthModel:
    """Return lengths that are all longer by a factor, up to the limit."""
    summary, shape = lengths.summary, lengths.shape
    limit = float(summary.limit_tokens)
    if factor == 1:
        return lengths
    summary = replace(
        summary,
        mean_tokens=min(summary.mean_tokens * factor, limit),
        mean_relative_error=math.hypot(summary.mean_relative_error, doubt),
    )
    if isinstance(shape, LogNormalCut):
        return LengthModel(summary=summary, shape=replace(shape, mu=shape.mu + math.log(factor)))
    means = tuple(min(mean * factor, limit) for mean in shape.bin_means)
    longer = SampledLengths(bin_means=means, weights=shape.weights, limit_tokens=shape.limit_tokens)
    return LengthModel(summary=summary, shape=longer)
