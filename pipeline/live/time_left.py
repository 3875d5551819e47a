"""Seconds until the last row of a running job ends, drawn from everything that is uncertain. Pure.

    until the queue is empty:  all slots are busy, so work over rate
    then:                      the last requests end one by one, each at its own length

Requests in flight count with what they have generated: the longer one has run, the longer it is
likely to be.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pipeline.live.course import Course, RowsLeft
from pipeline.planner.estimate.job_time import (
    band_of,
    heavy_tailed_by_name,
    log_rate_factor,
    luck_of,
)
from pipeline.planner.rate.errors import RateGroup, rate_of
from schemas.estimate import Band
from schemas.units import SECONDS_PER_DAY

# The 10th percentile of so many draws is within 2 % of the exact one.
_DRAWS = 800
_SEED = 20_261_201
# assumed: a run is interrupted about every half day, and what it costs is availability's doing
_HOURS_BETWEEN_INTERRUPTIONS = 12.0
# A request alone is faster than one in a full batch. assumed, where no plan tells by how much
_TAIL_SPEEDUP = (1.0, 2.0)
# A group that was only measured has the step of a full batch for a request alone too.
_LEAST_KNOWN_SPEEDUP = 1.01
# Rates and lengths of the rows to come differ from those so far. measured: replayed streams
_FUTURE_LOG_SD = 0.05


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
    rate = rate_of(groups)
    slots = max(sum(group.replicas * group.running_requests for group in groups), 1.0)
    pace = rate / slots
    course = Course(
        rows=rows,
        slots=slots,
        deadline_tokens=rows.deadline_s * pace,
        tail_speedup=statistics.mean(_tail_speedups(groups, pace)),
    )
    random = Random(_SEED)  # noqa: S311 - draws of a band, no secret
    drawn: list[tuple[float, float]] = []
    for draw in range(_DRAWS):
        longer = rows.lengths.summary.mean_relative_error * random.gauss(0, 1)
        factor = _rate_factor(groups, rate, longer, random)
        tokens_until_empty, tokens_after = course.drawn((draw + 0.5) / _DRAWS)
        full_s = tokens_until_empty / pace
        tail_s = _tail_s(course, tokens_after, groups, pace, random)
        seconds = (full_s + tail_s) * math.exp(longer + random.gauss(0, _FUTURE_LOG_SD)) / factor
        drawn.append((seconds / (1 - _drawn_loss(seconds, lost_fraction, random)), rate * factor))
    return TimeLeft(
        days=band_of(seconds / SECONDS_PER_DAY for seconds, _ in drawn),
        tokens_per_s=band_of(rate for _, rate in drawn),
        tokens=course.tokens,
    )


def _tail_s(
    course: Course, tokens: float, groups: Sequence[RateGroup], pace: float, random: Random
) -> float:
    """Return seconds of the tail: requests speed up as the batch empties.

    A step's time grows in a line with the requests that run.
    """
    full_step_s = 1 / pace
    alone_s = full_step_s / random.uniform(*_tail_speedups(groups, pace))
    crowded = min(tokens, course.after_empty)
    return alone_s * tokens + max(full_step_s - alone_s, 0.0) * crowded


def _tail_speedups(groups: Sequence[RateGroup], pace: float) -> tuple[float, float]:
    """Return the range of the pace of a request alone over that in a full batch."""
    speedup = 1 / pace / max(group.small_step_s for group in groups)
    return (speedup, speedup) if speedup > _LEAST_KNOWN_SPEEDUP else _TAIL_SPEEDUP


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
