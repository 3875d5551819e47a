"""Pauses of a run: stretches in which no engine had a request.

An engine's readings show when it had requests. Where a session has no readings, its published rows
do: a row has a request from its first one to its end. Pure.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeline.report.course.records import RunRecords
from pipeline.report.course.worktime import Pause, PauseReason, WorkTime

# Rows are timed to 5 s and readings lose some seconds at an engine's end.
_LEAST_PAUSE_S = 15.0
# An engine's loss is noted some time after its last request.
_LOSS_NOTED_S = 60.0
_NO_ENGINE = (
    "engine_lost",
    "engine_failed",
    "engine_drained",
    "engine_ready",
    "worker_silent",
    "node_lost",
    "step_down",
    "start_again",
    "waiting_for_resources",
)
_NO_STORE = ("waiting_for_folder",)

Stretch = tuple[float, float]


def work_time(run: RunRecords) -> WorkTime:
    """Find the pauses of a run up to the end of its span."""
    worked = _merged([*_of_readings(run), *_of_rows(run), *_at_present(run)])
    pauses = [
        pause
        for start_s, end_s in _gaps(worked, run.span_s)
        for pause in _named(start_s, end_s, run)
    ]
    return WorkTime(pauses=tuple(pauses))


# --- work ---------------------------------------------------------------------------------------


def _of_readings(run: RunRecords) -> list[Stretch]:
    return [(r.start_s, r.end_s) for r in run.readings if r.running_requests > 0]


def _of_rows(run: RunRecords) -> Iterator[Stretch]:
    """Yield when published rows had requests, outside the time that readings cover."""
    covered = _covered(run)
    for start_s, end_s in _in_flight(run):
        for hole_start_s, hole_end_s in _gaps(covered, run.span_s, least_s=0.0):
            if start_s < hole_end_s and hole_start_s < end_s:
                yield max(start_s, hole_start_s), min(end_s, hole_end_s)


def _in_flight(run: RunRecords) -> Iterator[Stretch]:
    steps = [(at_s - run.began_at_s, number) for at_s, number in run.rows.in_flight()]
    for (start_s, number), (end_s, _) in pairwise(steps):
        if number > 0:
            yield start_s, end_s


def _covered(run: RunRecords) -> list[Stretch]:
    """Return the time from the first reading to the last one in each session."""
    sessions = [*run.session_starts_s, run.span_s]
    covered = []
    for start_s, next_s in pairwise(sessions):
        own = [r for r in run.readings if start_s <= r.end_s and r.start_s < next_s]
        if own:
            covered.append((min(r.start_s for r in own), max(r.end_s for r in own)))
    return _merged(covered)


def _at_present(run: RunRecords) -> list[Stretch]:
    """Return the last seconds, which no reading or part covers yet, if requests are in flight."""
    if run.status.state != "running" or not any(w.in_flight for w in run.status.workers):
        return []
    ends = [r.end_s for r in run.readings if r.running_requests > 0]
    ends += [end_s for _, end_s in _in_flight(run)]
    last_session_s = run.session_starts_s[-1] if run.session_starts_s else 0.0
    known = [end_s for end_s in ends if end_s >= last_session_s]
    return [(max(known), run.span_s)] if known else []


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for start_s, end_s in sorted(stretches):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


# --- pauses -------------------------------------------------------------------------------------


def _gaps(
    stretches: Sequence[Stretch], span_s: float, *, least_s: float = _LEAST_PAUSE_S
) -> Iterator[Stretch]:
    """Yield what is between stretches that are in order, from 0 to the end of the span."""
    from_s = 0.0
    for start_s, end_s in [*stretches, (span_s, span_s)]:
        until_s = min(max(start_s, 0.0), span_s)
        if until_s - from_s > least_s:
            yield from_s, until_s
        from_s = max(from_s, end_s)


def _named(start_s: float, end_s: float, run: RunRecords) -> Iterator[Pause]:
    """Yield a gap as pauses, divided where a session starts."""
    starts = [at_s for at_s in run.session_starts_s if start_s <= at_s < end_s]
    if not starts:
        yield Pause(start_s=start_s, end_s=end_s, reason=_reason(start_s, end_s, run))
        return
    if start_s < starts[0]:
        yield Pause(start_s=start_s, end_s=starts[0], reason="between sessions")
    for session_s, next_s in pairwise(starts):
        # A session that ended before its first request.
        yield Pause(start_s=session_s, end_s=next_s, reason="between sessions")
    yield Pause(start_s=starts[-1], end_s=end_s, reason="start")


def _reason(start_s: float, end_s: float, run: RunRecords) -> PauseReason:
    if end_s >= run.span_s and run.status.state != "running":
        return "publishing the last rows"
    from_s, until_s = start_s - _LOSS_NOTED_S, end_s + _LOSS_NOTED_S
    kinds = {event.kind for event in run.events if from_s <= event.at_s - run.began_at_s <= until_s}
    if not kinds.isdisjoint(_NO_STORE):
        return "waiting for the store"
    return "no requests" if kinds.isdisjoint(_NO_ENGINE) else "waiting for an engine"
