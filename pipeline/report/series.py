"""Records that a report is made from, and series of a run over time. Pure.

Times are seconds since the run began. A series is a list of pairs of time and value; a value of
None is unknown.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.dataset.run_record import RunHistory
from pipeline.live.log import LiveLog
from pipeline.report.rows import RowFigures
from pipeline.store.journal import RunEvent
from schemas.config.run_file import RunFile
from schemas.estimate import Band, LiveReading
from schemas.progress import RunStatus, TimeLeft, slot_of
from schemas.units import SECONDS_PER_DAY

_NUM_STEPS = 120

TimeSeries = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rows and tokens that one part made visible."""

    at_s: float
    rows: int
    tokens: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Records of one run, read from its folder."""

    config: RunFile | None
    status: RunStatus
    history: RunHistory
    parts: Sequence[Published]
    log: LiveLog
    """Readings and estimates on the log's own clock."""
    readings: Sequence[LiveReading]
    """Readings of the log on the clock of the run."""
    events: Sequence[RunEvent]
    rows: RowFigures
    began_at_s: float
    now_s: float
    span_s: float

    def readings_by_engine(self) -> dict[str, list[LiveReading]]:
        """Group the readings by slot, so that a replaced worker's follow those of the first."""
        by_engine: dict[str, list[LiveReading]] = {}
        for reading in self.readings:
            by_engine.setdefault(slot_of(reading.engine), []).append(reading)
        return by_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaPoint:
    """Estimated total duration of the run, as estimated at one time."""

    at_s: float
    total_s: Band


def published(history: RunHistory, began_at_s: float) -> list[Published]:
    """List the parts in the order in which their rows became visible."""
    parts = (
        Published(
            at_s=max(0.0, history.first_listed_s[part.name] - began_at_s),
            rows=part.num_rows,
            tokens=part.completion_tokens,
            worker=slot_of(part.worker_id),
        )
        for part in history.parts.values()
    )
    return sorted(parts, key=lambda part: part.at_s)


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


def rates(parts: Sequence[Published], span_s: float, width_s: float) -> TimeSeries:
    """Compute published tokens per second, each at the middle of its step."""
    num_steps = _num_steps(span_s, width_s)
    tokens = [0] * num_steps
    for part in parts:
        tokens[min(int(part.at_s / width_s), num_steps - 1)] += part.tokens
    points: TimeSeries = []
    for number, count in enumerate(tokens):
        length_s = min(width_s, span_s - number * width_s)
        # A short last step would turn one part into a peak.
        rate = count / max(length_s, width_s / 4)
        points.append((_middle_s(number, span_s, width_s), rate))
    return points


def of_readings(
    readings: Sequence[LiveReading], span_s: float, width_s: float, field: str
) -> TimeSeries:
    """Average a field of one engine's readings over time in each step."""
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
            inside_s = min(reading.end_s, (number + 1) * width_s) - from_s
            if inside_s > 0:
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
