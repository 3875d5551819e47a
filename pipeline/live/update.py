"""A running job's readings and its plan → the time left, its band, and what deviates. Pure.

The walk: output lengths by the censored estimate → the forecast for an engine at these lengths →
its rate by its readings → the time left. Without a plan the readings are used alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.live.course import RowsLeft
from pipeline.live.groups import (
    LiveGroup,
    comparable,
    measured_group,
    planned_group,
    running_engines,
)
from pipeline.live.log import LiveLog, engine_seconds
from pipeline.live.time_left import time_left
from pipeline.live.trend import with_trend
from pipeline.planner.estimate.estimate import RatedGroup
from pipeline.planner.estimate.job_time import (
    AVAILABILITY,
    availability_seen,
    job_time,
    remaining_work,
    time_assumptions,
)
from pipeline.planner.lengths.censored import length_estimate, updated_lengths
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.rate.ranking import Load
from schemas.config.run_file import RunFile
from schemas.estimate import Assumption, Band, GroupUpdate, Price, RunUpdate

_NOTHING = Band(p10=0.0, p50=0.0, p90=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The run file's plan for the cards that the run uses."""

    groups: tuple[RatedGroup, ...]
    load: Load
    price: Price | None = None
    num_gpus: int = 0
    """GPUs that are paid for, running or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """The reason why there is no plan to compare with."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected lengths, turns and rates of a run, before any reading."""

    lengths: LengthModel
    turns_per_row: float
    plan: Planned | Unplanned


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of a run: in total, done and failed."""

    rows_total: int
    rows_done: int
    rows_failed: int
    rows_unpublished: int = 0
    """Finished, but not yet in a part."""
    rows_held: int = 0
    """Rows in flight or waiting at the workers, as of the same reports."""
    counted_at_s: float | None = None
    """Unix time of the count; None for a run that is not going on."""

    @property
    def rows_open(self) -> int:
        """Rows that have not ended. A part that was just published may still be reported as not."""
        left = self.rows_total - self.rows_done - self.rows_failed
        return min(max(left - self.rows_unpublished, self.rows_held), left)


def run_update(
    log: LiveLog, config: RunFile, rows: RowCounts, expectation: Expectation
) -> RunUpdate:
    """Return the estimate of the run from its readings; there must be at least one."""
    prior, plan = expectation.lengths, expectation.plan
    in_flight = list(log.running_tokens())
    lengths = _lengths(log.finished, Counter(in_flight), prior)
    groups = _groups(log, config, lengths, plan)
    running = in_flight if rows.rows_open else []
    completions = max(round(rows.rows_open * expectation.turns_per_row), len(running))
    availability = availability_seen(*engine_seconds(log))
    left_lengths = with_trend(
        lengths,
        log.all_readings(),
        waiting=completions - len(running),
        in_flight=len(running),
    )
    work = remaining_work(completions, 0, running, left_lengths)
    rates = [group.rate for group in groups if group.rate is not None]
    left, assumptions = None, tuple[Assumption, ...]()
    if work.tokens > 0 and rates:
        assumptions = time_assumptions(work, rates, availability=availability, started=True)
    # A request that hangs is expected to write nothing, and yet is waited for.
    if rows.rows_open and rates:
        left = time_left(
            RowsLeft(
                rows_open=rows.rows_open,
                running=running,
                tokens_since=log.tokens_since(rows.counted_at_s),
                turns=expectation.turns_per_row,
                lengths=left_lengths,
                finished=log.finished.total(),
                interrupted=log.interrupted,
                deadline_s=config.request_timeout_s,
            ),
            rates,
            lost_fraction=1 - availability.p50,
        )
    days = left.days if left else (None if rows.rows_open else _NOTHING)
    updates = tuple(group.update for group in groups)
    return RunUpdate(
        model=config.model,
        rows_total=rows.rows_total,
        rows_done=rows.rows_done,
        completions_left=float(completions),
        tokens_left=work.tokens,
        output_lengths=lengths.summary,
        expected_output_lengths=prior.summary,
        completions_seen=log.finished.total(),
        running_seen=len(running),
        groups=updates,
        tokens_per_s=left.tokens_per_s if left else _sum_of_rates(updates),
        availability=availability,
        days_left=days,
        expected_days_left=_expected_days(completions, running, prior, plan, started=True),
        expected_whole_days=_expected_days(
            round(rows.rows_total * expectation.turns_per_row), (), prior, plan, started=False
        ),
        usd_left=_usd(days, plan),
        price=plan.price if isinstance(plan, Planned) else None,
        counted_by="answers" if log.counted_by_answers else "engine",
        no_dry_run=plan.reason if isinstance(plan, Unplanned) else None,
        deviations=tuple(each for update in updates for each in update.deviations),
        assumptions=assumptions,
    )


def as_reported(update: RunUpdate, days_left: Band) -> RunUpdate:
    """Return the update with the time left that the running job itself reports."""
    usd_left = update.usd_left
    if usd_left is not None and update.days_left is not None and update.days_left.p50 > 0:
        usd_left = days_left.times(usd_left.p50 / update.days_left.p50)
    return replace(update, days_left=days_left, usd_left=usd_left)


def _lengths(
    finished: Mapping[int, int], in_flight: Mapping[int, int], prior: LengthModel
) -> LengthModel:
    estimate = length_estimate(finished, in_flight, prior.summary.limit_tokens, prior.shape)
    if estimate is None or not estimate.mean_tokens > 0:
        return prior
    source = f"{estimate.finished:,} finished and {estimate.running:,} running completions"
    return updated_lengths(prior, estimate, f"{source}, and {prior.summary.source}")


def _groups(
    log: LiveLog, config: RunFile, lengths: LengthModel, plan: Planned | Unplanned
) -> list[LiveGroup]:
    readings = log.all_readings()
    cards = sorted({log.cards.get(reading.engine, "") for reading in readings})
    planned: dict[str, RatedGroup] = {}
    if isinstance(plan, Planned):
        planned = {rated.group.hardware.gpu.name: rated for rated in plan.groups}
        if cards == [""] and len(planned) == 1:
            planned = {"": plan.groups[0]}
    groups = []
    for card in cards:
        own = [reading for reading in readings if log.cards.get(reading.engine, "") == card]
        engines, compared = running_engines(own, readings[-1].end_s), comparable(own)
        if isinstance(plan, Planned) and card in planned:
            load = replace(plan.load, lengths=lengths)
            groups.append(planned_group(planned[card], load, compared, engines))
        else:
            name = card or f"{config.engine.kind} engines"
            mean, gpus = lengths.summary.mean_tokens, config.engine.gpus_per_worker
            groups.append(measured_group(name, mean, compared, engines, gpus))
    return groups


def _expected_days(
    completions: int,
    running: Sequence[int],
    prior: LengthModel,
    plan: Planned | Unplanned,
    *,
    started: bool,
) -> Band | None:
    if isinstance(plan, Unplanned):
        return None
    work = remaining_work(completions, 0, running, prior)
    if not work.tokens > 0:
        return _NOTHING
    rates = [rated.rate for rated in plan.groups]
    return job_time(work, rates, availability=AVAILABILITY, started=started).days


def _usd(days: Band | None, plan: Planned | Unplanned) -> Band | None:
    if isinstance(plan, Unplanned) or plan.price is None or days is None:
        return None
    return days.times(24 * plan.num_gpus * plan.price.usd_per_gpu_hour)


def _sum_of_rates(groups: Sequence[GroupUpdate]) -> Band | None:
    """Add up the bands of groups that are fast or slow together; None if one is unknown."""
    bands = [group.tokens_per_s for group in groups if group.tokens_per_s is not None]
    if len(bands) < len(groups):
        return None
    return Band(
        p10=sum(band.p10 for band in bands),
        p50=sum(band.p50 for band in bands),
        p90=sum(band.p90 for band in bands),
    )
