"""A run's engines over its time: rates, running requests, accept lengths, one row each. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.dataset.run_record import RunHistory
from pipeline.report import charts as chart
from pipeline.report import series as series
from pipeline.report.rows import RowFigures
from pipeline.store.journal import RunEvent
from schemas.config import RunFile
from schemas.estimate import LiveReading
from schemas.progress import RunStatus, slot_of

_GROUPS = 8
"""Engines that have a line of their own in a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine over the whole run, whatever processes it was."""

    name: str
    rows: int
    tokens: int
    tokens_per_s: float
    """Published, over the run's time."""
    running_requests: float | None
    """On average, since it was launched with its cap."""
    cap_requests: int | None
    accept_length: float | None
    restarts: int
    step_downs: int
    plan: str | None
    starved: str | None
    """What it is short of now, where it runs far fewer requests than it has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """What was read of a run; times are seconds since it began."""

    config: RunFile | None
    history: RunHistory
    parts: Sequence[series.Published]
    readings: Sequence[LiveReading]
    events: Sequence[RunEvent]
    rows: RowFigures
    began_at_s: float
    span_s: float

    def of_engines(self) -> dict[str, list[LiveReading]]:
        found: dict[str, list[LiveReading]] = {}
        for reading in self.readings:
            found.setdefault(slot_of(reading.engine), []).append(reading)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCharts:
    in_all: chart.TimeChart
    each: chart.TimeChart | None
    running: chart.TimeChart | None
    accept: chart.TimeChart | None


def engine_charts(seen: ReportInput) -> EngineCharts:
    flush_s = seen.config.output.flush_interval_s if seen.config else 15.0
    width_s = series.step_s(seen.span_s, flush_s)
    by_engine = seen.of_engines()
    rates = {
        name: series.of_readings(found, seen.span_s, width_s, "tokens_per_s")
        for name, found in by_engine.items()
    } or _published_rates(seen, width_s)
    return EngineCharts(
        in_all=chart.time_chart(
            [chart.NamedLine(name="all engines", tone="t0", points=_sum(rates, seen, width_s))],
            seen.span_s,
        ),
        each=chart.time_chart(_lines(rates), seen.span_s) if len(rates) > 1 else None,
        running=_running_chart(seen, by_engine, width_s),
        accept=_accept_chart(seen, by_engine, width_s),
    )


_Series = list[tuple[float, float | None]]


def _published_rates(seen: ReportInput, width_s: float) -> dict[str, _Series]:
    workers = sorted({part.worker for part in seen.parts}, key=_by_number)
    return {
        worker: [*series.rates([p for p in seen.parts if p.worker == worker], seen.span_s, width_s)]
        for worker in workers
    }


def _sum(rates: dict[str, _Series], seen: ReportInput, width_s: float) -> _Series:
    if not rates:
        return [*series.rates(seen.parts, seen.span_s, width_s)]
    return series.added(list(rates.values()))


def _lines(rates: dict[str, _Series]) -> list[chart.NamedLine]:
    """One for each engine; of many the slowest, the middle and the fastest at each time."""
    names = sorted(rates, key=_by_number)
    if len(names) <= _GROUPS:
        return [
            chart.NamedLine(name=name, tone=f"t{place}", points=rates[name])
            for place, name in enumerate(names)
        ]
    ranked = [
        (points[0][0], sorted(value for _, value in points if value is not None))
        for points in zip(*rates.values(), strict=True)
    ]
    shares = (("fastest engine", "t1", 1.0), ("middle", "t0", 0.5), ("slowest engine", "t2", 0.0))
    return [
        chart.NamedLine(
            name=name, tone=tone, points=[(at_s, _ranked(values, share)) for at_s, values in ranked]
        )
        for name, tone, share in shares
    ]


def _ranked(values: Sequence[float], share: float) -> float | None:
    return values[int(share * (len(values) - 1))] if values else None


def _running_chart(
    seen: ReportInput, by_engine: dict[str, list[LiveReading]], width_s: float
) -> chart.TimeChart | None:
    """Requests that run against what the engines take, over all engines."""
    if by_engine:
        running, caps = (
            series.added(
                [
                    series.of_readings(found, seen.span_s, width_s, field)
                    for found in by_engine.values()
                ]
            )
            for field in ("running_requests", "cap_requests")
        )
    else:
        changes = [(at - seen.began_at_s, float(n)) for at, n in seen.rows.in_flight()]
        if not changes:
            return None
        times = [seen.span_s * n / 120 for n in range(121)]
        running = list(zip(times, chart.stepped(changes, times), strict=True))
        cap = _cap_of_run(seen)
        caps = [(at, cap) for at in times]
    lines = [chart.NamedLine(name="cap", tone="t7", points=caps)] if caps[0][1] or by_engine else []
    lines.append(chart.NamedLine(name="running", tone="t0", points=running))
    return chart.time_chart(lines, seen.span_s)


def caps_of_engines(seen: ReportInput) -> list[int]:
    """Requests that each engine of the last session may run, as its last start told them."""
    sessions = seen.history.sessions
    began_at_s = sessions[-1].started_at_s if sessions else 0.0
    last = {
        slot_of(start.worker_id): start.max_running_requests
        for start in seen.history.engines
        if start.ready_at_s >= began_at_s
    }
    return list(last.values())


def _cap_of_run(seen: ReportInput) -> float | None:
    """By the engines that started; else by the run file, where it says how many there are."""
    caps = caps_of_engines(seen)
    if caps or seen.config is None:
        return float(sum(caps)) if caps else None
    number = seen.config.engine.num_workers or len({part.worker for part in seen.parts})
    return float(number * seen.config.engine.max_running_requests)


def _accept_chart(
    seen: ReportInput, by_engine: dict[str, list[LiveReading]], width_s: float
) -> chart.TimeChart | None:
    told = {
        name: series.of_readings(found, seen.span_s, width_s, "accept_length")
        for name, found in by_engine.items()
        if any(reading.accept_length is not None for reading in found)
    }
    return chart.time_chart(_lines(told), seen.span_s) if told else None


def _by_number(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


def engine_rows(seen: ReportInput, status: RunStatus) -> tuple[EngineRow, ...]:
    by_engine = seen.of_engines()
    starved = {slot_of(worker.worker_id): worker.starved for worker in status.workers}
    names = {part.worker for part in seen.parts} | by_engine.keys() | starved.keys()
    return tuple(
        _engine(name, seen, by_engine.get(name, []), starved.get(name))
        for name in sorted(names, key=_by_number)
    )


def _engine(
    name: str, seen: ReportInput, readings: Sequence[LiveReading], starved: str | None
) -> EngineRow:
    mine = [part for part in seen.parts if part.worker == name]
    tokens = sum(part.tokens for part in mine)
    starts = [e for e in seen.history.engines if slot_of(e.worker_id) == name]
    happened = Counter(
        event.kind for event in seen.events if event.worker and slot_of(event.worker) == name
    )
    caps = [reading.cap_requests for reading in readings] or [
        s.max_running_requests for s in starts
    ]
    # After a step down the earlier requests say nothing of the cap that stands beside them.
    as_launched = [reading for reading in readings if reading.cap_requests == caps[-1]]
    return EngineRow(
        name=name,
        rows=sum(part.rows for part in mine),
        tokens=tokens,
        tokens_per_s=tokens / seen.span_s,
        running_requests=mean_of(as_launched, "running_requests"),
        cap_requests=caps[-1] if caps else None,
        accept_length=mean_of(readings, "accept_length"),
        restarts=_restarts(name, seen),
        step_downs=happened["step_down"],
        plan=starts[-1].plan if starts else None,
        starved=starved,
    )


def _restarts(name: str, seen: ReportInput) -> int:
    """Times that it came up again, or was lost; its first start in a session is none."""
    starts = [session.started_at_s for session in seen.history.sessions]
    total = 0
    for start_s, end_s in pairwise([*starts, math.inf]):
        mine = Counter(
            event.kind
            for event in seen.events
            if event.worker and slot_of(event.worker) == name
            if start_s <= event.at_s < end_s
        )
        total += max(mine["engine_ready"] - 1, mine["engine_lost"], 0)
    return total


def mean_of(readings: Sequence[LiveReading], field: str) -> float | None:
    """By time."""
    known = [
        (getattr(r, field), r.end_s - r.start_s) for r in readings if getattr(r, field) is not None
    ]
    seconds = sum(length_s for _, length_s in known)
    return sum(value * length_s for value, length_s in known) / seconds if seconds > 0 else None
