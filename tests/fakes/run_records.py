"""Records of a run as a report reads them, without a folder."""

from collections.abc import Sequence

from pipeline.dataset.run_record import RunHistory
from pipeline.live.log import LiveLog
from pipeline.report.course.records import Published, RunRecords
from pipeline.report.rows.figures import RowFigures
from pipeline.store.journal import RunEvent
from schemas.estimate import LiveReading
from schemas.manifest import Session
from schemas.progress import RunState, RunStatus, WorkerReport

BEGAN_AT_S = 1_790_000_000.0


def run_records(
    *,
    span_s: float,
    readings: Sequence[LiveReading] = (),
    parts: Sequence[Published] = (),
    events: Sequence[tuple[float, str]] = (),
    sessions_s: Sequence[float] = (0.0,),
    rows: RowFigures | None = None,
    state: RunState = "done",
    workers: Sequence[WorkerReport] = (),
) -> RunRecords:
    """Return the records of a run; events are pairs of seconds and kind."""
    history = RunHistory()
    history.sessions = [
        Session(
            session_id=str(number), started_at_s=BEGAN_AT_S + at_s, rows_total=100, rows_done=0,
            rows_error=0, rows_outside_input=0,
        )
        for number, at_s in enumerate(sessions_s)
    ]  # fmt: skip
    status = RunStatus(
        folder="out", state=state, rows_total=100, rows_done=0, rows_error=0, rows_failed=0,
        rows_outside_input=0, completion_tokens=0, tokens_saved=0, tokens_per_s=None, eta_s=None,
        days_left=None, last_publish_s=None, started_at_s=BEGAN_AT_S, num_parts=0,
        workers=tuple(workers), failed=(),
    )  # fmt: skip
    return RunRecords(
        config=None, status=status, history=history, parts=parts,
        log=LiveLog(began_at_s=BEGAN_AT_S, run_file={}), readings=readings,
        events=[
            RunEvent(kind=kind, at_s=BEGAN_AT_S + at_s, worker="w0", text="")
            for at_s, kind in events
        ],
        rows=rows or RowFigures(), began_at_s=BEGAN_AT_S, now_s=BEGAN_AT_S + span_s, span_s=span_s,
    )  # fmt: skip


def reading(
    start_s: float,
    end_s: float,
    *,
    engine: str = "w0",
    tokens_per_s: float = 100.0,
    running: float = 4.0,
    accept_length: float | None = None,
) -> LiveReading:
    return LiveReading(
        engine=engine, start_s=start_s, end_s=end_s, engine_age_s=start_s, cap_requests=8,
        running_requests=running, tokens_per_s=tokens_per_s, accept_length=accept_length,
        prompt_tokens_per_s=0.0,
    )  # fmt: skip
