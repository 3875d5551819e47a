"""Series of a run over time. Pure.

Times are seconds since the run began. A series is a list of pairs of time and value; a value of
None is unknown. Rates leave pauses out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.report.course.records import Published
from pipeline.report.course.worktime import WorkTime
from schemas.estimate import Band, LiveReading
from schemas.progress import TimeLeft
from schemas.units import SECONDS_PER_DAY

_NUM_STEPS = 120

TimeSeries = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaPoint:
    """Estimated total duration of the run, as estimated at one time."""

    at_s: float
    total_s: Band


def step_s(span_s: float, flush_interval_s: float) -> float:
    """Choose the step of rates: no finer than parts come, no coarser than 1/8 of the span."""
    return max(span_s / _NUM_STEPS, min(2 * flush_interval_s, span_s / 8), 1e-3)


def rows_over_time(parts: Sequence[Published], span_s: float) -> list[tuple[float, float]]:
    """Count the visible rows at the end of each step."""
    points, total, place = [(0.0, 0.0)], 0, 0
    for number in range(1, _NUM_STEPS + 1):
        until_s = span_s * number / _NUM_STEPS
        while place < len(parts) and parts[place].at_s <= until_s:
            total += parts[place].rows
            place += 1
        points.append((until_s, float(total)))
    return points


def rates(parts: Sequence[Published], span_s: float, width_s: float, work: WorkTime) -> TimeSeries:
    """Compute published tokens per second of work, each at the middle of its step.

    A part that was published in a pause counts where the pause begins.
    """
    num_steps = _num_steps(span_s, width_s)
    tokens = [0] * num_steps
    for part in parts:
        # A pause's start is the end of the step before it.
        place = math.ceil(work.last_worked(part.at_s) / width_s) - 1
        tokens[min(max(place, 0), num_steps - 1)] += part.tokens
    points: TimeSeries = []
    for number, count in enumerate(tokens):
        worked_s = work.worked_s(number * width_s, min((number + 1) * width_s, span_s))
        # A step with little work would turn one part into a peak.
        rate = count / max(worked_s, width_s / 4) if worked_s or count else None
        points.append((_middle_s(number, span_s, width_s), rate))
    return points


def of_readings(
    readings: Sequence[LiveReading], span_s: float, width_s: float, field: str, work: WorkTime
) -> TimeSeries:
    """Average a field of one engine's readings over the work of each step."""
    num_steps = _num_steps(span_s, width_s)
    sums, seconds = [0.0] * num_steps, [0.0] * num_steps
    for reading in readings:
        value = getattr(reading, field)
        if value is None:
            continue
        first = max(0, int(reading.start_s / width_s))
        last = min(num_steps - 1, int(reading.end_s / width_s))
        for number in range(first, last + 1):
            from_s = max(reading.start_s, number * width_s)
            inside_s = work.worked_s(from_s, min(reading.end_s, (number + 1) * width_s))
            sums[number] += value * inside_s
            seconds[number] += inside_s
    means = (
        total / length_s if length_s else None
        for total, length_s in zip(sums, seconds, strict=True)
    )
    return [(_middle_s(number, span_s, width_s), mean) for number, mean in enumerate(means)]


def added(series: Sequence[TimeSeries]) -> TimeSeries:
    """Add series of equal times; an unknown value adds nothing."""
    points: TimeSeries = []
    for step in zip(*series, strict=True):
        known = [value for _, value in step if value is not None]
        points.append((step[0][0], sum(known) if known else None))
    return points


def stepped(changes: Iterable[tuple[float, float]], times_s: Sequence[float]) -> TimeSeries:
    """Sample a value that changes at the times of `changes`; it is unknown before the first."""
    points: TimeSeries = []
    ordered, place, value = list(changes), 0, None
    for time_s in times_s:
        while place < len(ordered) and ordered[place][0] <= time_s:
            value = ordered[place][1]
            place += 1
        points.append((time_s, value))
    return points


def eta_points(times_left: Sequence[TimeLeft], offset_s: float, span_s: float) -> list[EtaPoint]:
    """List the estimates noted up to `span_s`; their clock began `offset_s` after the run."""
    return [
        EtaPoint(at_s=at_s, total_s=_after(at_s, noted.days.times(SECONDS_PER_DAY)))
        for noted in times_left
        if (at_s := noted.at_s + offset_s) <= span_s
    ]


def _after(at_s: float, left_s: Band) -> Band:
    return Band(p10=at_s + left_s.p10, p50=at_s + left_s.p50, p90=at_s + left_s.p90)


def _num_steps(span_s: float, width_s: float) -> int:
    return max(1, math.ceil(span_s / width_s - 1e-9))


def _middle_s(number: int, span_s: float, width_s: float) -> float:
    return min((number + 0.5) * width_s, span_s)
