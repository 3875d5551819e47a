"""Status of a run, from the files of its output folder alone."""

from collections import defaultdict

from pipeline.dataset.run_record import (
    RunHistory,
    check_has_begun,
    check_has_run,
    read_history,
)
from pipeline.live.eta import days_left_after
from pipeline.store import lock
from pipeline.store.folder import Folder
from pipeline.store.run_folder import LIVE_FILE
from pipeline.untrusted.parsing import UNREADABLE
from schemas.estimate import Band
from schemas.manifest import Part, RunManifest, Session
from schemas.progress import Progress, RunState, RunStatus
from schemas.units import SECONDS_PER_DAY

_RATE_WINDOW_S = 300.0
# A run reports every 2 s. What is older is due to differing clocks, or to a run that waits.
_OLDEST_REPORT_S = 10.0


def run_status(folder: Folder, *, now_s: float, state: RunState | None = None) -> RunStatus:
    """Read the status. Raises ConfigError for a folder without a run.

    The driver passes the state that it knows.
    """
    return status_of(folder, begun_history(folder), now_s=now_s, state=state)


def begun_history(folder: Folder) -> RunHistory:
    """Read the history of a run. Raises ConfigError for a folder without one that has begun."""
    check_has_run(folder)
    history = read_history(folder)
    check_has_begun(folder, history)
    return history


def status_of(
    folder: Folder, manifest: RunManifest, *, now_s: float, state: RunState | None = None
) -> RunStatus:
    """Return the status of a run whose manifest has been read."""
    session, parts = manifest.sessions[-1], list(manifest.parts.values())
    rows_done = session.rows_done + manifest.rows_gained
    live = _live(folder, session)
    rows_open = session.rows_total - rows_done - len(manifest.failed)
    state = state or _state(folder, live, rows_open)
    # What the coordinator reported last is void once its driver is gone.
    if state not in ("running", "unknown"):
        live = None
    if live is not None:
        rows_done = max(rows_done, live.rows_finished)
    days_left = _days_left(live, now_s) if live else None
    eta_s = days_left.p50 * SECONDS_PER_DAY if days_left else None
    # A run whose rows have all ended still publishes the last ones, and ends its engines.
    is_over = not rows_open and days_left is None
    return RunStatus(
        folder=folder.where,
        state=state,
        rows_total=session.rows_total,
        rows_done=rows_done,
        rows_error=sum(part.num_errors for part in parts),
        rows_failed=len(manifest.failed),
        rows_outside_input=session.rows_outside_input,
        completion_tokens=sum(part.completion_tokens for part in parts),
        tokens_saved=sum(part.tokens_saved for part in parts),
        tokens_per_s=_tokens_per_s(manifest, now_s),
        eta_s=0.0 if is_over else eta_s,
        days_left=days_left,
        last_publish_s=max((part.published_at_s for part in parts), default=None),
        started_at_s=session.started_at_s,
        num_parts=len(parts),
        workers=live.workers if live else (),
        failed=tuple((row.row_id, row.sample_index, row.cause) for row in manifest.failed.values()),
    )


def _days_left(live: Progress, now_s: float) -> Band | None:
    """Return the job's own figure, less the time since its report."""
    age_s = min(now_s - live.updated_at_s, _OLDEST_REPORT_S)
    return days_left_after(live.days_left, age_s) if live.days_left else None


def _live(folder: Folder, session: Session) -> Progress | None:
    """Read the coordinator's last report in this session; None if there is none."""
    if not folder.exists(LIVE_FILE):
        return None
    try:
        live = Progress.from_json(folder.read(LIVE_FILE).decode())
    except UNREADABLE:
        # The file is not ours; the manifest has the rest.
        return None
    return live if live.session_id == session.session_id else None


def _state(folder: Folder, live: Progress | None, rows_open: int) -> RunState:
    driven = lock.is_driven(folder)
    if driven:
        return "running"
    if not rows_open:
        return "done"
    if driven is None:
        return "unknown"
    return live.state if live and live.state != "running" else "interrupted"


def _tokens_per_s(manifest: RunManifest, now_s: float) -> float | None:
    """Add up the rates of the workers' last parts; None before the first part."""
    by_worker: dict[str, list[Part]] = defaultdict(list)
    for part in manifest.session_parts:
        by_worker[part.worker_id].append(part)
    if not by_worker:
        return None
    started_s = manifest.sessions[-1].started_at_s
    return sum(_rate(parts, started_s, now_s) for parts in by_worker.values())


def _rate(parts: list[Part], started_s: float, now_s: float) -> float:
    """Compute a worker's rate since its last part before the window."""
    until_s = max(part.published_at_s for part in parts)
    earlier = (part.published_at_s for part in parts)
    from_s = max((s for s in earlier if s <= until_s - _RATE_WINDOW_S), default=started_s)
    if now_s - until_s > max(_RATE_WINDOW_S, 2 * (until_s - from_s)):
        # A worker that publishes no more.
        return 0.0
    recent = [part for part in parts if part.published_at_s > from_s]
    return sum(part.completion_tokens for part in recent) / max(until_s - from_s, 1e-3)
