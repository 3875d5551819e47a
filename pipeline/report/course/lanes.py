"""Time line of a run: a lane for each kind of event, marked where it happened. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.report.charts.axes import percent
from pipeline.report.course.records import RunRecords
from schemas.manifest import Session

_LOST = ("engine_lost", "engine_failed", "worker_silent", "node_lost", "given_up", "engine_drained")
_NOTED = ("node_joined", "drift_accepted")
# Marks of one lane that are closer than this share of the width are one mark.
_NUM_BINS = 120
_MOST_NAMED = 3
# Shortest bar of a lane whose bars have heights.
_LEAST_HEIGHT_PERCENT = 18.0

Noted = tuple[float, str]
"""Seconds since the run began, and what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A bar in a lane."""

    left_percent: float
    width_percent: float
    """0 for a moment."""
    height_percent: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the time line."""

    name: str
    tone: str
    total: int
    """Number of events; of engines in the lane of working engines."""
    marks: tuple[Mark, ...]


def lanes(run: RunRecords) -> tuple[Lane, ...]:
    """Return all lanes, also those without a mark."""
    sessions = [(at_s, _session_text(s)) for at_s, s in _sessions(run)]
    ready = [
        (event.at_s - run.began_at_s, f"{event.worker} came up")
        for event in run.events
        if event.kind == "engine_ready"
    ]
    return (
        _moments("sessions, nodes", "t0", [*sessions, *_events(run, _NOTED)], run),
        _canary_lane(run),
        _working_lane(run),
        _moments("engines came up", "t1", ready, run),
        _moments("engines lost or drained", "bad", _events(run, _LOST), run),
        _moments("stepped down", "t2", _events(run, ("step_down",)), run),
        _counted("retries", "t2", _since_start(run.rows.retries, run), "retries", run),
        _counted("error and failed rows", "bad", _bad_rows(run), "rows", run),
    )


# --- moments ------------------------------------------------------------------------------------


def _sessions(run: RunRecords) -> Iterable[tuple[float, Session]]:
    return zip(run.session_starts_s, run.history.sessions, strict=True)


def _session_text(session: Session) -> str:
    return f"session began with {session.rows_done:,} of {session.rows_total:,} rows done"


def _events(run: RunRecords, kinds: Sequence[str]) -> list[Noted]:
    return [
        (event.at_s - run.began_at_s, f"{event.kind.replace('_', ' ')}: {event.text}")
        for event in run.events
        if event.kind in kinds
    ]


def _moments(name: str, tone: str, noted: Sequence[Noted], run: RunRecords) -> Lane:
    """Mark moments; those at about the same time are one mark that names the first of them."""
    bins: dict[int, list[Noted]] = {}
    for at_s, text in sorted(noted):
        place = int(at_s / run.span_s * _NUM_BINS)
        bins.setdefault(place, []).append((at_s, text))
    marks = tuple(
        Mark(
            left_percent=percent(together[0][0], run.span_s),
            width_percent=0.0,
            height_percent=100.0,
            text=_joined([text for _, text in together]),
        )
        for together in bins.values()
    )
    return Lane(name=name, tone=tone, total=len(noted), marks=marks)


def _joined(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    named = "; ".join(texts[:_MOST_NAMED])
    return f"{named}; and {more} more" if more > 0 else named


# --- stretches and heights ----------------------------------------------------------------------


def _canary_lane(run: RunRecords) -> Lane:
    """Draw each canary from its beginning to its verdict."""
    marks = []
    begun_s: float | None = None
    for event in run.history.canaries:
        at_s = event.at_s - run.began_at_s
        if event.verdict == "begun":
            begun_s = at_s
            continue
        over = ", ".join(f"{flag} {100 * share:.1f} %" for flag, share in event.shares.items())
        text = f"canary {event.verdict}{': ' + over if over else ''}"
        marks.append(_stretch(at_s if begun_s is None else begun_s, at_s, text, run))
        begun_s = None
    if begun_s is not None:
        marks.append(_stretch(begun_s, run.span_s, "canary without a verdict yet", run))
    return Lane(name="canary", tone="t3", total=len(marks), marks=tuple(marks))


def _stretch(start_s: float, end_s: float, text: str, run: RunRecords) -> Mark:
    left = percent(start_s, run.span_s)
    return Mark(
        left_percent=left,
        width_percent=round(percent(end_s, run.span_s) - left, 2),
        height_percent=100.0,
        text=text,
    )


def _working_lane(run: RunRecords) -> Lane:
    """Draw the share of the engines that had requests, by their readings."""
    by_engine = run.readings_by_engine()
    width_s = run.span_s / _NUM_BINS
    working: list[set[str]] = [set() for _ in range(_NUM_BINS)]
    for name, readings in by_engine.items():
        for reading in readings:
            if reading.running_requests > 0:
                first, last = int(reading.start_s / width_s + 1e-9), int(reading.end_s / width_s)
                for place in range(max(first, 0), min(last, _NUM_BINS - 1) + 1):
                    working[place].add(name)
    marks = []
    for number, places in groupby(range(_NUM_BINS), key=lambda place: len(working[place])):
        if number:
            together = list(places)
            marks.append(
                Mark(
                    left_percent=percent(together[0], _NUM_BINS),
                    width_percent=percent(len(together), _NUM_BINS),
                    height_percent=percent(number, len(by_engine)),
                    text=f"{number} of {len(by_engine)} engines had requests",
                )
            )
    return Lane(name="engines working", tone="t1", total=len(by_engine), marks=tuple(marks))


def _since_start(counts: Mapping[float, int], run: RunRecords) -> list[tuple[float, int]]:
    return [(at_s - run.began_at_s, number) for at_s, number in counts.items()]


def _bad_rows(run: RunRecords) -> list[tuple[float, int]]:
    failed = [(row.failed_at_s - run.began_at_s, 1) for row in run.history.failed.values()]
    return [*_since_start(run.rows.errors, run), *failed]


def _counted(
    name: str, tone: str, counts: Iterable[tuple[float, int]], what: str, run: RunRecords
) -> Lane:
    """Draw how many there were at each time."""
    bins: dict[int, int] = {}
    for at_s, number in counts:
        place = min(max(int(at_s / run.span_s * _NUM_BINS), 0), _NUM_BINS - 1)
        bins[place] = bins.get(place, 0) + number
    highest = max(bins.values(), default=0)
    marks = tuple(
        Mark(
            left_percent=percent(place, _NUM_BINS),
            width_percent=percent(1, _NUM_BINS),
            height_percent=max(percent(number, highest), _LEAST_HEIGHT_PERCENT),
            text=f"{number:,} {what}",
        )
        for place, number in sorted(bins.items())
    )
    return Lane(name=name, tone=tone, total=sum(bins.values()), marks=marks)
