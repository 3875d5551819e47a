"""A run as series over its time: rows, rates, time left, engines' readings. Pure.

Times are seconds since the run began. The time left at a moment in the past is worked out from
what was published until then, so that a report drawn at the end shows how good it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from pipeline.dataset.history import RunHistory
from schemas.estimate import Band, LiveReading
from schemas.manifest import Session
from schemas.progress import slot_of
from schemas.units import P90_SDS

_NUM_STEPS = 120
_NUM_ETA_STEPS = 48
_ETA_WINDOW_S, _ETA_WINDOW_SHARE = 300.0, 0.3
# The rate of the last minutes, or of a part of the session once that is longer.
_SUB_WINDOWS = 6
_LEAST_LOG_SD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rows and tokens that one part made visible."""

    at_s: float
    rows: int
    tokens: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaPoint:
    """How long the whole run would take, as it could be told at a moment."""

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


def eta_points(
    parts: Sequence[Published], sessions: Sequence[Session], began_at_s: float, span_s: float
) -> list[EtaPoint]:
    """The whole run's length as known at some moments of the last session."""
    if not parts or not sessions:
        return []
    session, start_s = sessions[-1], sessions[-1].started_at_s - began_at_s
    mine = [part for part in parts if part.at_s >= start_s]
    found = []
    for number in range(1, _NUM_ETA_STEPS + 1):
        now_s = start_s + (span_s - start_s) * number / _NUM_ETA_STEPS
        rows_open = (
            session.rows_total
            - session.rows_done
            - sum(part.rows for part in mine if part.at_s <= now_s)
        )
        left_s = time_left(mine, rows_open, start_s, now_s)
        if left_s is not None:
            total_s = Band(p10=now_s + left_s.p10, p50=now_s + left_s.p50, p90=now_s + left_s.p90)
            found.append(EtaPoint(at_s=now_s, total_s=total_s))
    return found


def time_left(
    parts: Sequence[Published], rows_open: int, start_s: float, now_s: float
) -> Band | None:
    """Open rows over the rate of a window, which is as sure as its pieces agree.

    None before three pieces of the window have rows. What rows take that are still in flight is
    not in it: the first rows of a run are its short ones, so early figures are low.
    """
    if rows_open <= 0:
        return Band(p10=0.0, p50=0.0, p90=0.0)
    window_s = min(now_s - start_s, max(_ETA_WINDOW_S, _ETA_WINDOW_SHARE * (now_s - start_s)))
    if window_s <= 0:
        return None
    edges = [now_s - window_s * (1 - n / _SUB_WINDOWS) for n in range(_SUB_WINDOWS + 1)]
    pieces = [
        sum(part.rows for part in parts if low < part.at_s <= high) for low, high in pairwise(edges)
    ]
    if sum(count > 0 for count in pieces) < 3:
        return None
    middle_s = rows_open * window_s / sum(pieces)
    log_sd = max(stdev(pieces) / fmean(pieces) / math.sqrt(_SUB_WINDOWS), _LEAST_LOG_SD)
    away = math.exp(P90_SDS * log_sd)
    return Band(p10=middle_s / away, p50=middle_s, p90=middle_s * away)
