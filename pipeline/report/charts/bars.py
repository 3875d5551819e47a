"""Bars: a value with its band, and the parts of a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.report.charts.axes import percent
from schemas.estimate import Band
from schemas.plan import BudgetRow

# The scale of bars ends at most at this multiple of the median p90: a median bar is then at least
# a quarter of the width.
_SCALE_TO_MEDIAN = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BandBar:
    """A bar that is solid from zero to the p10, paler up to the p90, with a tick at the p50."""

    low_percent: float
    middle_percent: float
    high_percent: float
    beyond: bool
    """True if the p90 exceeds the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of a stacked bar."""

    row: BudgetRow
    width_percent: float


def band_bar(band: Band, full_scale: float) -> BandBar:
    """Draw a band on a scale from zero."""
    return BandBar(
        low_percent=percent(band.p10, full_scale),
        middle_percent=percent(band.p50, full_scale),
        high_percent=percent(band.p90, full_scale),
        beyond=band.p90 > full_scale,
    )


def bar_scale(bands: Sequence[Band]) -> float:
    """Return the highest p90, or less if it is so high that it would flatten the other bars."""
    highest = [band.p90 for band in bands]
    return min(max(highest), median(highest) * _SCALE_TO_MEDIAN) if highest else 0.0


def stacked_segments(rows: Sequence[BudgetRow]) -> tuple[Segment, ...]:
    """Divide 100 percent among the rows; a row below zero has no width."""
    total = sum(max(row.bytes, 0) for row in rows)
    return tuple(Segment(row=row, width_percent=percent(row.bytes, total)) for row in rows)
