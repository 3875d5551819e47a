"""Engines of a run: one row each, with all their restarts. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.report.course.records import RunRecords
from schemas.estimate import LiveReading
from schemas.manifest import EngineRun
from schemas.progress import slot_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine over the whole run, with all its restarts."""

    name: str
    rows: int
    tokens: int
    tokens_per_s: float
    """Published tokens over the run's work since the engine first came up."""
    running_requests: float | None
    """Mean since it was launched with its cap."""
    cap_requests: int | None
    accept_length: float | None
    restarts: int
    step_downs: int
    plan: str | None
    starved: str | None
    """Reason that it runs far fewer requests than it could, if it does."""


def engine_rows(run: RunRecords) -> tuple[EngineRow, ...]:
    """Summarise each engine that published, has readings or is running."""
    by_engine = run.readings_by_engine()
    starved = {slot_of(worker.worker_id): worker.starved for worker in run.status.workers}
    names = {part.worker for part in run.parts} | by_engine.keys() | starved.keys()
    return tuple(
        _engine_row(name, run, by_engine.get(name, []), starved.get(name))
        for name in sorted(names, key=by_number)
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
        tokens_per_s=tokens
        / max(run.work.worked_s(_first_s(readings, starts, run), run.span_s), 1.0),
        running_requests=mean_of(as_launched, "running_requests"),
        cap_requests=caps[-1] if caps else None,
        accept_length=mean_of(readings, "accept_length"),
        restarts=_restarts(name, run),
        step_downs=_events_of(name, run)["step_down"],
        plan=starts[-1].plan if starts else None,
        starved=starved,
    )


def _first_s(
    readings: Sequence[LiveReading], starts: Sequence[EngineRun], run: RunRecords
) -> float:
    """Return when the engine first came up; the run's start if nothing tells."""
    first = [reading.start_s for reading in readings[:1]]
    first += [start.ready_at_s - run.began_at_s for start in starts[:1]]
    return max(min(first, default=0.0), 0.0)


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


def by_number(name: str) -> tuple[int, str]:
    """Return the sort key of a slot: `w10` follows `w9`."""
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name
