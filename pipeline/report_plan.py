"""A report's table of what was planned beside what was measured: the dry run's part of it."""

from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.errors import PipelineError
from pipeline.live_estimate import RowCounts, config_of, expectation, update
from pipeline.live_log import read_live_log
from pipeline.run_history import RunHistory
from pipeline.storage import Folder
from schemas.estimate import GroupUpdate, RunUpdate
from schemas.progress import RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A figure that was expected, and what came of it."""

    name: str
    planned: float
    measured: float | None
    is_share: bool = False


def dry_run_rows(
    folder: Folder, status: RunStatus, history: RunHistory, *, now_s: float
) -> tuple[PlanRow, ...]:
    """Rates, requests and days by the planner for the launch that came up, beside the readings.

    None where there are no readings, or nothing was planned that they could be held against.
    """
    try:
        found = _updated(folder, status, history, now_s)
    except PipelineError:
        # `jobs.estimate --update-from` says why; the report has its other rows.
        return ()
    if found is None:
        return ()
    rows = [row for group in found.groups for row in _of_group(group)]
    if found.expected_days_left is not None and found.days_left.p50 > 0:
        planned, measured = found.expected_days_left.p50, found.days_left.p50
        rows.append(PlanRow(name="days left from here", planned=planned, measured=measured))
    return tuple(rows)


def _updated(
    folder: Folder, status: RunStatus, history: RunHistory, now_s: float
) -> RunUpdate | None:
    log = read_live_log(folder)
    if log is None or not log.readings:
        return None
    config = config_of(folder, log)
    launched = history.engines[-1].plan if history.engines else None
    today = datetime.fromtimestamp(now_s, UTC).date()
    counts = RowCounts(
        rows_total=status.rows_total, rows_done=status.rows_done, rows_failed=status.rows_failed
    )
    expected = expectation(folder, config, today=today, launched=launched)
    return update(log, config, counts, expected)


def _of_group(group: GroupUpdate) -> list[PlanRow]:
    rows = []
    if group.expected_tokens_per_s is not None:
        rows.append(
            PlanRow(
                name=f"tokens/s, {group.name}",
                planned=group.expected_tokens_per_s.p50,
                measured=group.tokens_per_s.p50,
            )
        )
    if group.expected_running_requests is not None:
        rows.append(
            PlanRow(
                name=f"running requests in an engine, {group.name}",
                planned=group.expected_running_requests,
                measured=group.running_requests,
            )
        )
    if group.expected_accept_length is not None and group.accept_length is not None:
        rows.append(
            PlanRow(
                name=f"accept length, {group.name}",
                planned=group.expected_accept_length,
                measured=group.accept_length,
            )
        )
    return rows
