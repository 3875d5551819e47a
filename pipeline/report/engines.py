"""Engines of a run over time: rates, running requests, accept lengths, one row each. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.report import series
from pipeline.report.charts import LineChart, Series, time_chart
from pipeline.report.series import RunRecords, TimeSeries
from schemas.estimate import LiveReading
from schemas.progress import slot_of

# Engines that get a line of their own in a chart.
_MOST_LINES = 8
_NUM_STEPS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine over the whole run, with all its restarts."""

    name: str
    rows: int
    tokens: int
    tokens_per_s: float
    """Published tokens over the run's time."""
    running_requests: float | None
    """Mean since it was launched with its cap."""
    cap_requests: int | None
    accept_length: float | None
    restarts: int
    step_downs: int
    plan: str | None
    starved: str | None
    """Reason that it runs far fewer requests than it could, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCharts:
    """Charts over time of all engines and of each one."""

    total: LineChart
    each: LineChart | None
    running: LineChart | None
    accept: LineChart | None


def engine_charts(run: RunRecords) -> EngineCharts:
    """Draw the engines by their readings, else by what was published."""
    flush_s = run.config.output.flush_interval_s if run.config else 15.0
    width_s = series.step_s(run.span_s, flush_s)
    by_engine = run.readings_by_engine()
    rates = {
        name: series.of_readings(readings, run.span_s, width_s, "tokens_per_s")
        for name, readings in by_engine.items()
    } or _published_rates(run, width_s)
    if rates:
        total = series.added(list(rates.values()))
    else:
        total = series.rates(run.parts, run.span_s, width_s)
    return EngineCharts(
        total=time_chart([Series(name="all engines", tone="t0", points=total)], run.span_s),
        each=time_chart(_lines(rates), run.span_s) if len(rates) > 1 else None,
        running=_running_chart(run, by_engine, width_s),
        accept=_accept_chart(run, by_engine, width_s),
    )


def _published_rates(run: RunRecords, width_s: float) -> dict[str, TimeSeries]:
    workers = sorted({part.worker for part in run.parts}, key=_by_number)
    return {
        worker: series.rates([p for p in run.parts if p.worker == worker], run.span_s, width_s)
        for worker in workers
    }


def _lines(values: dict[str, TimeSeries]) -> list[Series]:
    """Return a line per engine; for many, the slowest, middle and fastest at each time."""
    names = sorted(values, key=_by_number)
    if len(names) <= _MOST_LINES:
        return [
            Series(name=name, tone=f"t{place}", points=values[name])
            for place, name in enumerate(names)
        ]
    ranked = [
        (points[0][0], sorted(value for _, value in points if value is not None))
        for points in zip(*values.values(), strict=True)
    ]
    shares = (("fastest engine", "t1", 1.0), ("middle", "t0", 0.5), ("slowest engine", "t2", 0.0))
    return [
        Series(
            name=name,
            tone=tone,
            points=[(at_s, _ranked(at_time, share)) for at_s, at_time in ranked],
        )
        for name, tone, share in shares
    ]


def _ranked(values: Sequence[float], share: float) -> float | None:
    return values[int(share * (len(values) - 1))] if values else None


def _running_chart(
    run: RunRecords, by_engine: dict[str, list[LiveReading]], width_s: float
) -> LineChart | None:
    """Draw the running requests of all engines against their caps."""
    if by_engine:
        running, caps = (
            series.added(
                [
                    series.of_readings(readings, run.span_s, width_s, field)
                    for readings in by_engine.values()
                ]
            )
            for field in ("running_requests", "cap_requests")
        )
    else:
        changes = [(at - run.began_at_s, float(n)) for at, n in run.rows.in_flight()]
        if not changes:
            return None
        times = [run.span_s * n / _NUM_STEPS for n in range(_NUM_STEPS + 1)]
        running = series.stepped(changes, times)
        cap = _cap_of_run(run)
        caps = [(at, cap) for at in times]
    lines = [Series(name="cap", tone="t7", points=caps)] if caps[0][1] or by_engine else []
    lines.append(Series(name="running", tone="t0", points=running))
    return time_chart(lines, run.span_s)


def _cap_of_run(run: RunRecords) -> float | None:
    """Add the caps of the engines that started; without any, derive the sum from the run file."""
    caps = caps_of_engines(run)
    if caps or run.config is None:
        return float(sum(caps)) if caps else None
    number = run.config.engine.num_workers or len({part.worker for part in run.parts})
    return float(number * run.config.engine.max_running_requests)


def caps_of_engines(run: RunRecords) -> list[int]:
    """Return the cap of each engine of the last session, as its last start reported it."""
    sessions = run.history.sessions
    began_at_s = sessions[-1].started_at_s if sessions else 0.0
    last = {
        slot_of(start.worker_id): start.max_running_requests
        for start in run.history.engines
        if start.ready_at_s >= began_at_s
    }
    return list(last.values())


def _accept_chart(
    run: RunRecords, by_engine: dict[str, list[LiveReading]], width_s: float
) -> LineChart | None:
    lengths = {
        name: series.of_readings(readings, run.span_s, width_s, "accept_length")
        for name, readings in by_engine.items()
        if any(reading.accept_length is not None for reading in readings)
    }
    return time_chart(_lines(lengths), run.span_s) if lengths else None


def _by_number(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


# --- one row per engine -------------------------------------------------------------------------


def engine_rows(run: RunRecords) -> tuple[EngineRow, ...]:
    """Summarise each engine that published, has readings or is running."""
    by_engine = run.readings_by_engine()
    starved = {slot_of(worker.worker_id): worker.starved for worker in run.status.workers}
    names = {part.worker for part in run.parts} | by_engine.keys() | starved.keys()
    return tuple(
        _engine_row(name, run, by_engine.get(name, []), starved.get(name))
        for name in sorted(names, key=_by_number)
    )


def _engine_row(
    name: str, run: RunRecords, readings: Sequence[LiveReading], starved: str | None
) -> EngineRow:
    parts = [part for part in run.parts if part.worker == name]
    tokens = sum(part.tokens for part in parts)
    starts = [start for start in run.history.engines if slot_of(start.worker_id) == name]
    caps = [reading.cap_requests for reading in readings] or [
        start.max_running_requests for start in starts
    ]
    # Requests that ran before a step down say nothing about the cap after it.
    as_launched = [reading for reading in readings if reading.cap_requests == caps[-1]]
    return EngineRow(
        name=name,
        rows=sum(part.rows for part in parts),
        tokens=tokens,
        tokens_per_s=tokens / run.span_s,
        running_requests=mean_of(as_launched, "running_requests"),
        cap_requests=caps[-1] if caps else None,
        accept_length=mean_of(readings, "accept_length"),
        restarts=_restarts(name, run),
        step_downs=_events_of(name, run)["step_down"],
        plan=starts[-1].plan if starts else None,
        starved=starved,
    )


def _restarts(name: str, run: RunRecords) -> int:
    """Count how often the engine came up again or was lost; a session's first start is none."""
    starts = [session.started_at_s for session in run.history.sessions]
    total = 0
    for start_s, end_s in pairwise([*starts, math.inf]):
        kinds = _events_of(name, run, start_s, end_s)
        total += max(kinds["engine_ready"] - 1, kinds["engine_lost"], 0)
    return total


def _events_of(
    name: str, run: RunRecords, start_s: float = -math.inf, end_s: float = math.inf
) -> Counter[str]:
    return Counter(
        event.kind
        for event in run.events
        if event.worker and slot_of(event.worker) == name
        if start_s <= event.at_s < end_s
    )


def mean_of(readings: Sequence[LiveReading], field: str) -> float | None:
    """Average a field over the time of the readings that have it; None without any."""
    known = [
        (value, reading.end_s - reading.start_s)
        for reading in readings
        if (value := getattr(reading, field)) is not None
    ]
    seconds = sum(length_s for _, length_s in known)
    return sum(value * length_s for value, length_s in known) / seconds if seconds > 0 else None
