"""A worker's report and a run's progress, from which tests make their own."""

from dataclasses import replace

from schemas.progress import Progress, WorkerReport

_REPORT = WorkerReport(
    worker_id="w0",
    state="running",
    engine="fake",
    engine_release=None,
    in_flight=0,
    not_started=0,
    backing_off=0,
    unflushed=0,
    requests=0,
    interruptions=0,
    restarts=0,
    completion_tokens=0,
    last_cause=None,
)
_PROGRESS = Progress(
    session_id="s",
    updated_at_s=0.0,
    state="running",
    rows_total=100,
    rows_done=0,
    rows_failed=0,
    rows_error=0,
    completion_tokens=0,
    last_publish_s=None,
    leases_lost=0,
    workers=(),
)


def worker_report(worker_id: str = "w0", **changes: object) -> WorkerReport:
    return replace(_REPORT, worker_id=worker_id, **changes)  # type: ignore[arg-type]


def run_progress(*workers: WorkerReport, **changes: object) -> Progress:
    return replace(_PROGRESS, workers=workers, **changes)  # type: ignore[arg-type]
