"""A run as series over its time: rows, rates, time left, engines' readings. Pure.

Times are seconds since the run began.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.dataset.run_record import RunHistory
from schemas.estimate import Band, LiveReading
from schemas.live import TimeLeft
from schemas.progress import slot_of
from schemas.units import SECONDS_PER_DAY

_NUM_STEPS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rows and tokens that one part made visible."""

    at_s: float
    rows: int
    tokens: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaPoint:
    """Estimated total duration of the run, as estimated at one time."""

    at_s: float
    total_s: Band


def published(history: RunHistory, began_at_s: float) -> list[Published]:
    """Parts in the order of time, each when its rows were first visible."""
    found = (
        Published(
            at_s=max(0.0, history.first_listed_s[part.name] - began_at_s),
            rows=part.num_rows,
            tokens=part.completion_tokens,
            worker=slot_of(part.worker_id),
        )
        for part in history.parts.values()
    )
    return sorted(found, key=lambda part: part.at_s)


def step_s(span_s: float, flush_interval_s: float) -> float:
    """The width of a rate's steps: not finer than parts come, not coarser than an eighth."""
    return max(span_s / _NUM_STEPS, min(2 * flush_interval_s, span_s / 8), 1e-3)


def rows_over_time(parts: Sequence[Published], span_s: float) -> list[tuple[float, float]]:
    """Rows visible, at the ends of some hundred steps."""
    found, total, place = [(0.0, 0.0)], 0, 0
    for number in range(1, _NUM_STEPS + 1):
        until_s = span_s * number / _NUM_STEPS
        while place < len(parts) and parts[place].at_s <= until_s:
            total += parts[place].rows
            place += 1
        found.append((until_s, float(total)))
    return found


def rates(parts: Sequence[Published], span_s: float, width_s: float) -> list[tuple[float, float]]:
    """Published tokens a second, each at the middle of its step."""
    num_steps = max(1, math.ceil(span_s / width_s - 1e-9))
    tokens = [0] * num_steps
    for part in parts:
        tokens[min(int(part.at_s / width_s), num_steps - 1)] += part.tokens
    found = []
    for number, count in enumerate(tokens):
        length_s = min(width_s, span_s - number * width_s)
        found.append(((number + 0.5) * width_s, count / max(length_s, width_s / 4)))
    return [(min(at_s, span_s), rate) for at_s, rate in found]


def of_readings(
    readings: Sequence[LiveReading], span_s: float, width_s: float, field: str
) -> list[tuple[float, float | None]]:
    """A figure of one engine, the mean by time in each step; None where nothing was read."""
    num_steps = max(1, math.ceil(span_s / width_s - 1e-9))
    sums, seconds = [0.0] * num_steps, [0.0] * num_steps
    for reading in readings:
        value = getattr(reading, field)
        if value is None:
            continue
        first = max(0, int(reading.start_s / width_s))
        last = min(num_steps - 1, int(reading.end_s / width_s))
        for number in range(first, last + 1):
            from_s = max(reading.start_s, number * width_s)
            inside_s = min(reading.end_s, (number + 1) * width_s) - from_s
            if inside_s > 0:
                sums[number] += value * inside_s
                seconds[number] += inside_s
    return [
        (
            min((number + 0.5) * width_s, span_s),
            sums[number] / seconds[number] if seconds[number] else None,
        )
        for number in range(num_steps)
    ]


def added(
    series: Sequence[Sequence[tuple[float, float | None]]],
) -> list[tuple[float, float | None]]:
    """All engines together; an engine that tells nothing in a step adds nothing."""
    found: list[tuple[float, float | None]] = []
    for points in zip(*series, strict=True):
        known = [value for _, value in points if value is not None]
        found.append((points[0][0], sum(known) if known else None))
    return found


def eta_points(times_left: Sequence[TimeLeft], offset_s: float, span_s: float) -> list[EtaPoint]:
    """The estimates that were noted up to `span_s`; their clock began `offset_s` after the run."""
    return [
        EtaPoint(at_s=at_s, total_s=_after(at_s, noted.days.times(SECONDS_PER_DAY)))
        for noted in times_left
        if (at_s := noted.at_s + offset_s) <= span_s
    ]


def _after(at_s: float, left_s: Band) -> Band:
    return Band(p10=at_s + left_s.p10, p50=at_s + left_s.p50, p90=at_s + left_s.p90)
