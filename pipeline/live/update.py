"""A running job's readings and its dry run → the time left, its band, and what disagrees. Pure.

The walk: lengths by the censored estimate → what the dry run says of an engine at these lengths →
the rate by its readings → the time left. Without a dry run the readings stand alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.live.forecast import (
    forecast_of,
    live_update,
    measured_forecast,
    measured_group,
    updated_group,
)
from pipeline.live.readings import Forecast
from pipeline.planner.estimate.estimate import RatedGroup
from pipeline.planner.estimate.job_time import (
    AVAILABILITY,
    JobTime,
    availability_seen,
    job_time,
    remaining_work,
)
from pipeline.planner.lengths.censored import length_estimate, updated_lengths
from pipeline.planner.lengths.lengths import LengthModel
from pipeline.planner.rate.errors import RateGroup
from pipeline.planner.rate.ranking import Load
from schemas.estimate import (
    Band,
    GroupUpdate,
    LiveReading,
    OutputLengths,
    Price,
    RunUpdate,
)
from schemas.progress import slot_of

# An engine that has said nothing for so long, while others speak, is not counted on.
_GONE_AFTER_S = 900.0
# Each engine's last reading is held against all before it: that many comparisons, and beyond it a
# part of the engines stands for all.
_MOST_COMPARED = 40_000
_NOTHING = Band(p10=0.0, p50=0.0, p90=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the run file's estimate says of the cards that the run is on."""

    groups: tuple[RatedGroup, ...]
    load: Load
    price: Price | None = None
    num_gpus: int = 0
    """All that are paid for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDryRun:
    """There is none, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSoFar:
    """The run as its files or its coordinator tell it."""

    model: str
    engine: str
    gpus_per_engine: int
    rows_total: int
    rows_done: int
    rows_open: int
    """Neither finished nor given up."""
    turns_per_row: float
    readings: Sequence[LiveReading]
    cards: Mapping[str, str]
    """Of workers that know their GPU, by the catalogue's name."""
    finished: Iterable[int]
    running: Sequence[int]
    """Tokens of completions that ended, and tokens so far of those in flight."""
    ran_s: float
    passed_s: float
    """Of all engines together: time that they ran, and time that passed meanwhile."""
    counted_by_answers: bool


def run_update(seen: RunSoFar, prior: LengthModel, dry_run: Expected | NoDryRun) -> RunUpdate:
    """Needs one reading at least."""
    finished = list(seen.finished)
    lengths = _lengths(finished, seen.running, prior)
    groups = _groups(seen, lengths, dry_run)
    completions = seen.rows_open * seen.turns_per_row
    running = seen.running if seen.rows_open else ()
    total = max(round(completions), len(running))
    availability = availability_seen(seen.ran_s, seen.passed_s)
    work = remaining_work(total, 0, running, lengths)
    rates = [group.rate for group in groups if group.rate is not None]
    time = None
    if work.tokens > 0 and rates:
        time = job_time(work, rates, availability=availability, started=True)
    days = time.days if time else _NOTHING
    known = isinstance(dry_run, Expected)
    told = tuple(group.told for group in groups)
    return RunUpdate(
        model=seen.model,
        rows_total=seen.rows_total,
        rows_done=seen.rows_done,
        completions_left=float(total),
        tokens_left=work.tokens,
        output_lengths=lengths.summary,
        expected_output_lengths=prior.summary,
        completions_seen=len(finished),
        running_seen=len(running),
        groups=told,
        tokens_per_s=time.tokens_per_s if time else _summed(told),
        availability=availability,
        days_left=days,
        expected_days_left=_expected_days(total, running, prior, dry_run),
        usd_left=_usd(days, dry_run),
        price=dry_run.price if isinstance(dry_run, Expected) else None,
        counted_by="answers" if seen.counted_by_answers else "engine",
        no_dry_run=None if known else dry_run.reason,  # type: ignore[union-attr]  # as checked
        disagreements=tuple(found for group in told for found in group.disagreements),
        assumptions=time.assumptions if time else (),
    )


def _lengths(finished: Sequence[int], running: Sequence[int], prior: LengthModel) -> LengthModel:
    limit = prior.summary.limit_tokens
    estimate = length_estimate(finished, running, limit)
    if estimate is None or not estimate.mean_tokens > 0:
        return prior
    source = f"{estimate.finished:,} finished and {estimate.running:,} running completions"
    return updated_lengths(prior, estimate, f"{source}, and {prior.summary.source}")


# --- the engines, group by group ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    rate: RateGroup | None
    """None while nothing tells its rate."""
    told: GroupUpdate


def _groups(seen: RunSoFar, lengths: LengthModel, dry_run: Expected | NoDryRun) -> list[_Group]:
    names = sorted({seen.cards.get(reading.engine, "") for reading in seen.readings})
    planned: dict[str, RatedGroup] = {}
    if isinstance(dry_run, Expected):
        planned = {rated.group.hardware.gpu.name: rated for rated in dry_run.groups}
        if names == [""] and len(planned) == 1:
            planned = {"": dry_run.groups[0]}
    groups = []
    for name in names:
        readings = [r for r in seen.readings if seen.cards.get(r.engine, "") == name]
        engines = _engines_counted_on(readings, seen.readings)
        compared = _comparable(readings)
        if isinstance(dry_run, Expected) and name in planned:
            load = replace(dry_run.load, lengths=lengths)
            groups.append(_planned_group(planned[name], load, compared, engines))
        else:
            groups.append(_measured_group(seen, name, lengths.summary, compared, engines))
    return groups


def _engines_counted_on(readings: Sequence[LiveReading], every: Sequence[LiveReading]) -> int:
    latest_s = max(reading.end_s for reading in every)
    heard = [r for r in readings if latest_s - r.end_s <= _GONE_AFTER_S]
    # Two workers of one slot followed each other.
    return len({slot_of(reading.engine) for reading in heard})


def _comparable(readings: Sequence[LiveReading]) -> Sequence[LiveReading]:
    engines = sorted({reading.engine for reading in readings})
    most = len(engines)
    while most > 1 and most * len(readings) * most / len(engines) > _MOST_COMPARED:
        most -= 1
    if most == len(engines):
        return readings
    chosen = {engines[place * len(engines) // most] for place in range(most)}
    return [reading for reading in readings if reading.engine in chosen]


def _planned_group(
    rated: RatedGroup, load: Load, readings: Sequence[LiveReading], engines: int
) -> _Group:
    forecast = forecast_of(rated, load)
    update = live_update(readings, forecast)
    usual = forecast.tokens_per_s_at(forecast.running_requests)
    standing = replace(rated.rate, replicas=max(engines, 1), tokens_per_s=usual)
    return _Group(
        rate=updated_group(standing, update) if engines else None,
        told=GroupUpdate(
            name=rated.rate.name,
            engines=engines,
            running_requests=update.running_requests,
            tokens_per_s=_times(update.tokens_per_s, engines),
            accept_length=_latest_accept(readings),
            independent_readings=update.independent_readings,
            expected_running_requests=forecast.running_requests,
            expected_tokens_per_s=_times(_usual_band(forecast), engines),
            expected_accept_length=forecast.accept_length,
            disagreements=update.disagreements,
        ),
    )


def _measured_group(
    seen: RunSoFar,
    name: str,
    lengths: OutputLengths,
    readings: Sequence[LiveReading],
    engines: int,
) -> _Group:
    title = name or seen.engine
    forecast = measured_forecast(readings, lengths.mean_tokens)
    update = live_update(readings, forecast) if forecast else None
    rate = None
    if forecast and update and engines:
        standing = measured_group(title, engines, seen.gpus_per_engine, forecast)
        rate = updated_group(standing, update)
    return _Group(
        rate=rate,
        told=GroupUpdate(
            name=title,
            engines=engines,
            running_requests=update.running_requests if update else 0.0,
            tokens_per_s=_times(update.tokens_per_s, engines) if update else _NOTHING,
            accept_length=_latest_accept(readings),
            independent_readings=update.independent_readings if update else 0.0,
            expected_running_requests=None,
            expected_tokens_per_s=None,
            expected_accept_length=None,
            # Against what they were fitted to, readings disagree with nothing.
            disagreements=(),
        ),
    )


def _usual_band(forecast: Forecast) -> Band:
    return live_update((), forecast).tokens_per_s


def _latest_accept(readings: Sequence[LiveReading]) -> float | None:
    told = [r for r in readings if r.accept_length is not None]
    return max(told, key=lambda reading: reading.end_s).accept_length if told else None


# --- sums ---------------------------------------------------------------------------------------


def _expected_days(
    completions: int, running: Sequence[int], prior: LengthModel, dry_run: Expected | NoDryRun
) -> Band | None:
    if isinstance(dry_run, NoDryRun):
        return None
    work = remaining_work(completions, 0, running, prior)
    if not work.tokens > 0:
        return _NOTHING
    rates = [rated.rate for rated in dry_run.groups]
    time: JobTime = job_time(work, rates, availability=AVAILABILITY, started=True)
    return time.days


def _usd(days: Band, dry_run: Expected | NoDryRun) -> Band | None:
    if isinstance(dry_run, NoDryRun) or dry_run.price is None:
        return None
    return _times(days, 24 * dry_run.num_gpus * dry_run.price.usd_per_gpu_hour)


def _times(band: Band, factor: float) -> Band:
    return Band(p10=band.p10 * factor, p50=band.p50 * factor, p90=band.p90 * factor)


def _summed(groups: Sequence[GroupUpdate]) -> Band:
    """Of groups whose lucks are one another's."""
    bands = [group.tokens_per_s for group in groups]
    return Band(
        p10=sum(band.p10 for band in bands),
        p50=sum(band.p50 for band in bands),
        p90=sum(band.p90 for band in bands),
    )
