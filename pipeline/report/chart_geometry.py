"""Where the marks of a chart stand, in percent of its own width and height.

Pure arithmetic: no colour, no markup. A chart grows with the page, its text does not, so that a
phone shows the same letters as a desk. Heights count from the bottom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from schemas.estimate import Band, RateCurve
from schemas.plan import BudgetRow

_LABEL_ROOM_PERCENT = 62.0  # a mark further right has its label on its left
_SCALE_TO_MEDIAN = 4.0  # a bar at the median is then a quarter of the width at least
_CLOSE_PERCENT = 15.0  # about the size of a label on a phone
_BREAK_EVEN_REACH = 1.5  # how far past the widest cap the axis goes to show the break-even


@dataclass(frozen=True, slots=True, kw_only=True)
class BandBar:
    """Solid from zero to the p10, paler from there to the p90, with a tick at the p50."""

    low_percent: float
    middle_percent: float
    high_percent: float
    beyond: bool
    """The p90 is more than the scale shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One row's part of a stacked bar."""

    row: BudgetRow
    width_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A figure on an axis."""

    value: float
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a line that is named."""

    requests: float
    tokens_per_s: float
    left_percent: float
    bottom_percent: float
    label_left: bool
    """The label stands on the mark's left, because there is no room on its right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series, from its first point to its cap."""

    mtp: bool
    points: str
    """As `points` of an SVG polyline in a box of 100 x 100, where heights count from the top."""
    cap: Mark
    label_above: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Tokens/s against running requests."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    break_even: Tick | None
    """None where there is none, or where it lies far to the right of all caps."""


def band_bar(band: Band, full_scale: float) -> BandBar:
    """The bar of a band on a scale from zero."""
    return BandBar(
        low_percent=_percent(band.p10, full_scale),
        middle_percent=_percent(band.p50, full_scale),
        high_percent=_percent(band.p90, full_scale),
        beyond=band.p90 > full_scale,
    )


def bar_scale(bands: Sequence[Band]) -> float:
    """The highest p90, unless it is so far above the others that it would press them flat."""
    highest = [band.p90 for band in bands]
    return min(max(highest), median(highest) * _SCALE_TO_MEDIAN) if highest else 0.0


def stacked_segments(rows: Sequence[BudgetRow]) -> tuple[Segment, ...]:
    """One segment a row, all together 100 percent; a row below zero has no width."""
    whole = sum(max(row.bytes, 0) for row in rows)
    return tuple(Segment(row=row, width_percent=_percent(row.bytes, whole)) for row in rows)


def axis_ticks(highest: float, *, most: int = 5) -> tuple[Tick, ...]:
    """Round figures from zero to the first that is not below the highest, which ends the axis."""
    if highest <= 0:
        return (Tick(value=0.0, percent=0.0),)
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    number = math.ceil(highest / step - 1e-9)
    return tuple(Tick(value=i * step, percent=_percent(i, number)) for i in range(number + 1))


def line_chart(curves: Sequence[RateCurve], break_even_requests: int | None) -> LineChart:
    """All curves on common axes that start at zero; a curve without points is left out."""
    drawn = [curve for curve in curves if curve.points]
    widest = max((curve.cap_requests for curve in drawn), default=0)
    if break_even_requests is not None and break_even_requests <= widest * _BREAK_EVEN_REACH:
        shown, right = break_even_requests, max(widest, break_even_requests)
    else:
        shown, right = None, widest
    x_ticks = axis_ticks(right)
    y_ticks = axis_ticks(max((p.tokens_per_s for c in drawn for p in c.points), default=0.0))
    x_end, y_end = x_ticks[-1].value, y_ticks[-1].value
    caps = [mark(curve, curve.cap_requests, x_ticks, y_ticks) for curve in drawn]
    lines = tuple(
        Line(
            mtp=curve.mtp,
            points=_points(curve, x_end, y_end),
            cap=cap,
            label_above=not any(_close_above(cap, other) for other in caps),
        )
        for curve, cap in zip(drawn, caps, strict=True)
    )
    return LineChart(
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        lines=lines,
        break_even=Tick(value=shown, percent=_percent(shown, x_end)) if shown is not None else None,
    )


def mark(
    curve: RateCurve, requests: float, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]
) -> Mark:
    """The point of a curve at this many running requests."""
    rate = rate_at(curve, requests)
    left = _percent(requests, x_ticks[-1].value)
    return Mark(
        requests=requests,
        tokens_per_s=rate,
        left_percent=left,
        bottom_percent=_percent(rate, y_ticks[-1].value),
        label_left=left > _LABEL_ROOM_PERCENT,
    )


def _close_above(lower: Mark, upper: Mark) -> bool:
    """Two caps so close together that their names would meet: the lower is named beneath."""
    rise = upper.bottom_percent - lower.bottom_percent
    return 0 < rise < _CLOSE_PERCENT and (
        abs(upper.left_percent - lower.left_percent) < _CLOSE_PERCENT
    )


def rate_at(curve: RateCurve, requests: float) -> float:
    """Tokens/s on the straight line between two points, and level beyond the ends."""
    points = curve.points
    if requests <= points[0].running_requests:
        return points[0].tokens_per_s
    for low, high in pairwise(points):
        if requests <= high.running_requests:
            share = (requests - low.running_requests) / (
                high.running_requests - low.running_requests
            )
            return low.tokens_per_s + share * (high.tokens_per_s - low.tokens_per_s)
    return points[-1].tokens_per_s


def _points(curve: RateCurve, x_end: float, y_end: float) -> str:
    return " ".join(
        f"{_percent(point.running_requests, x_end):g},"
        f"{round(100 - _percent(point.tokens_per_s, y_end), 2):g}"
        for point in curve.points
    )


def _percent(part: float, whole: float) -> float:
    """To two decimals, within 0 and 100: finer than any screen."""
    if whole <= 0:
        return 0.0
    return round(min(max(part / whole, 0.0), 1.0) * 100, 2)
