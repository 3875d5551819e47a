"""Planned figures of a run next to the measured ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pipeline.dataset.lengths import expected_lengths
from pipeline.errors import PipelineError
from pipeline.live.estimate import log_update
from pipeline.report.course.engines import caps_of_engines, mean_of
from pipeline.report.course.records import RunRecords
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import Folder
from schemas.config.run_file import RunFile
from schemas.estimate import GroupUpdate, RunUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A planned figure and the measured one."""

    name: str
    planned: float
    measured: float | None
    kind: Literal["number", "share", "days"] = "number"


def run_estimate(folder: Folder, run: RunRecords) -> RunUpdate | None:
    """Return what was estimated for the launch that came up; None without readings.

    `jobs.estimate --update-from` reports the reason if it cannot be estimated.
    """
    if not run.log.readings:
        return None
    today = datetime.fromtimestamp(run.now_s, UTC).date()
    try:
        return log_update(folder, run.log, run.history, today=today)
    except PipelineError:
        return None


def plan_rows(run: RunRecords, estimate: RunUpdate | None) -> tuple[PlanRow, ...]:
    """Compare the run file and the estimate of the launch with what was measured."""
    from_run_file = _run_file_rows(run, run.config) if run.config else ()
    return (*from_run_file, *(_estimate_rows(run, estimate) if estimate else ()))


def _run_file_rows(run: RunRecords, config: RunFile) -> Iterator[PlanRow]:
    rows = run.rows
    if config.lengths.output_tokens_column is None and rows.completion.turns:
        yield from _length_rows(config, rows)
    if config.lengths.prompt_tokens_mean is not None and rows.num_turns:
        tokens = sum(part.prompt_tokens for part in run.history.parts.values())
        yield PlanRow(
            name="prompt tokens a turn",
            planned=config.lengths.prompt_tokens_mean,
            measured=tokens / rows.num_turns,
        )
    caps = caps_of_engines(run) or [config.engine.max_running_requests]
    yield PlanRow(
        name="requests in an engine, of at most",
        planned=sum(caps) / len(caps),
        measured=mean_of(run.readings, "running_requests"),
    )
    if config.estimate.accept_length is not None:
        yield PlanRow(
            name="accept length",
            planned=config.estimate.accept_length,
            measured=mean_of(run.readings, "accept_length"),
        )


def _length_rows(config: RunFile, rows: RowFigures) -> Iterator[PlanRow]:
    expected = expected_lengths(config).summary
    yield PlanRow(
        name="output tokens a turn",
        planned=expected.mean_tokens,
        measured=rows.completion.mean_tokens,
    )
    yield PlanRow(
        name="turns that reach the limit",
        planned=expected.at_limit_fraction,
        measured=rows.num_cut / rows.num_turns if rows.num_turns else None,
        kind="share",
    )


def _estimate_rows(run: RunRecords, update: RunUpdate) -> Iterator[PlanRow]:
    """Compare rates, requests and days with those estimated for the launch."""
    for group in update.groups:
        yield from _group_rows(group)
    measured = run.status.days_left or update.days_left
    if update.expected_days_left is not None and measured is not None and measured.p50 > 0:
        yield PlanRow(
            name="time left from here",
            planned=update.expected_days_left.p50,
            measured=measured.p50,
            kind="days",
        )


def _group_rows(group: GroupUpdate) -> Iterator[PlanRow]:
    if group.expected_tokens_per_s is not None and group.tokens_per_s is not None:
        yield PlanRow(
            name=f"tokens/s, {group.name}",
            planned=group.expected_tokens_per_s.p50,
            measured=group.tokens_per_s.p50,
        )
    if group.expected_running_requests is not None:
        yield PlanRow(
            name=f"running requests in an engine, {group.name}",
            planned=group.expected_running_requests,
            measured=group.running_requests,
        )
    if group.expected_accept_length is not None and group.accept_length is not None:
        yield PlanRow(
            name=f"accept length, {group.name}",
            planned=group.expected_accept_length,
            measured=group.accept_length,
        )
