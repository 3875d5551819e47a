"""Time and dollars of a run, so far and in all, beside what was estimated for it. Pure."""

from dataclasses import dataclass

from pipeline.planner.estimate.figures import duration
from pipeline.report.charts.axes import percent
from pipeline.report.charts.bars import BandBar, band_bar
from pipeline.report.course.records import RunRecords
from pipeline.report.spending import NoSpending, Spending
from schemas.estimate import Band, RunUpdate
from schemas.units import SECONDS_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A quantity that grows while the run goes on."""

    so_far: float
    total: Band | None
    """Sum of what is done and what is to go; None while the latter is unknown."""
    estimated: Band | None
    """Estimate of the whole run before it began, or soon after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Time and dollars against the estimate."""

    source: str | None
    """Origin of the estimate; None if there is none."""
    seconds: Measure
    """Time of the sessions, with their starts."""
    usd: Measure | None
    """Cost of all cards; None if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureBars:
    """Bars of a measure on one scale."""

    so_far_percent: float
    total: BandBar | None
    estimated: BandBar | None


def comparison(
    run: RunRecords,
    estimate: RunUpdate | None,
    spent: Spending | NoSpending,
    left_s: Band | None,
) -> Comparison:
    """Compare the run with its plan, or with the first estimate that its engines gave."""
    ran_s = run.session_s
    whole_s, source = _estimated_s(run, estimate)
    seconds = Measure(
        so_far=ran_s, total=_plus(left_s, ran_s) if left_s else None, estimated=whole_s
    )
    usd = None
    if isinstance(spent, Spending):
        usd = _times(seconds, spent.usd_so_far / ran_s)
    return Comparison(source=source, seconds=seconds, usd=usd)


def measure_bars(measure: Measure) -> MeasureBars:
    """Draw a measure on a scale that ends with its greatest value."""
    bands = [band for band in (measure.total, measure.estimated) if band is not None]
    end = max([measure.so_far, *(band.p90 for band in bands)])
    return MeasureBars(
        so_far_percent=percent(measure.so_far, end),
        total=band_bar(measure.total, end) if measure.total else None,
        estimated=band_bar(measure.estimated, end) if measure.estimated else None,
    )


def _estimated_s(run: RunRecords, estimate: RunUpdate | None) -> tuple[Band | None, str | None]:
    if estimate is not None and estimate.expected_whole_days is not None:
        whole_s = estimate.expected_whole_days.times(SECONDS_PER_DAY)
        return whole_s, "the plan of the launch"
    if run.log.times_left:
        first = run.log.times_left[0]
        whole_s = _plus(first.days.times(SECONDS_PER_DAY), first.at_s)
        return whole_s, f"the run's first estimate, after {duration(first.at_s)}"
    return None, None


def _plus(band: Band, value: float) -> Band:
    return Band(p10=band.p10 + value, p50=band.p50 + value, p90=band.p90 + value)


def _times(measure: Measure, factor: float) -> Measure:
    return Measure(
        so_far=measure.so_far * factor,
        total=measure.total.times(factor) if measure.total else None,
        estimated=measure.estimated.times(factor) if measure.estimated else None,
    )
