"""Positions of a chart's marks, in percent of the chart's own width and height. Pure.

There is no colour and no markup here. A chart grows with the page and its text does not, so that a
phone shows the same letters as a desktop. Heights count from the bottom, except in the points of
an SVG shape, where they count from the top.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from schemas.estimate import Band, RateCurve
from schemas.plan import BudgetRow
from schemas.units import SECONDS_PER_DAY

# A label starts right of its mark, unless the mark is further right than this.
_LABEL_ROOM_PERCENT = 62.0
# The scale of bars ends at most at this multiple of the median p90: a median bar is then at least
# a quarter of the width.
_SCALE_TO_MEDIAN = 4.0
# About the size of a label on a phone.
_CLOSE_PERCENT = 15.0
# The axis is extended beyond the larger cap, up to this multiple, to show the break-even.
_BREAK_EVEN_REACH = 1.5
_UNITS = ((SECONDS_PER_DAY, "days"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_NUM_BARS = 40

Points = Sequence[tuple[float, float | None]]
"""Pairs of x and y; a y of None is unknown and interrupts the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A value on an axis."""

    value: float
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Axes that start at zero."""

    x_end: float
    """Value at the right edge."""
    x_ticks: tuple[Tick, ...]
    x_unit: str = ""
    """Unit of the ticks' values."""
    y_ticks: tuple[Tick, ...]

    def left_percent(self, x: float) -> float:
        return percent(x, self.x_end)

    def bottom_percent(self, y: float) -> float:
        return percent(y, self.y_ticks[-1].value)

    def svg_point(self, x: float, y: float) -> str:
        """Format a point for the `points` of an SVG shape in a box of 100 x 100."""
        return f"{self.left_percent(x):g},{round(100 - self.bottom_percent(y), 2):g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Data of one line."""

    name: str
    points: Points
    tone: str
    """CSS class that gives the colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series as SVG polylines."""

    name: str
    tone: str
    polylines: tuple[str, ...]
    last: float | None
    """Last known value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines on common axes, in front of a band if there is one."""

    axes: Axes
    lines: tuple[Line, ...]
    band: str = ""
    """Points of an SVG polygon; empty without a band."""


# --- bars ---------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bin of a histogram, from `low` up to and without `high`."""

    low: float
    high: float
    count: int
    left_percent: float
    width_percent: float
    height_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Bins from zero, and the limit."""

    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    limit: Tick | None


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


def histogram(
    counts: Mapping[int, int], limit: int | None, *, num_bars: int = _NUM_BARS
) -> Histogram:
    """Sort counts into equal bins from zero to the greatest value or the limit."""
    x_ticks = axis_ticks(float(max([*counts, limit or 0, 1])))
    x_end = x_ticks[-1].value
    width = max(1, math.ceil(x_end / num_bars))
    bins: Counter[int] = Counter()
    for value, count in counts.items():
        bins[value // width] += count
    highest = max(bins.values(), default=0)
    bars = tuple(
        Bar(
            low=place * width,
            high=(place + 1) * width,
            count=count,
            left_percent=percent(place * width, x_end),
            width_percent=percent(width, x_end),
            height_percent=percent(count, highest),
        )
        for place, count in sorted(bins.items())
    )
    limit_tick = Tick(value=limit, percent=percent(limit, x_end)) if limit is not None else None
    return Histogram(bars=bars, x_ticks=x_ticks, limit=limit_tick)


# --- lines over time ----------------------------------------------------------------------------


def time_chart(
    series: Sequence[Series],
    span_s: float,
    *,
    band: Sequence[tuple[float, float, float]] = (),
    highest: float = 0.0,
) -> LineChart:
    """Draw series over the seconds of a run; `band` has triples of second, low and high.

    The y axis reaches the highest value and `highest`. A band is cut at twice the highest value.
    """
    values = [value for one in series for _, value in one.points if value is not None]
    top = max(values, default=0.0)
    band_top = min(max((high for _, _, high in band), default=0.0), 2 * top)
    x_ticks, x_unit = time_ticks(span_s)
    axes = Axes(
        x_end=span_s,
        x_ticks=x_ticks,
        x_unit=x_unit,
        y_ticks=axis_ticks(max(top, band_top, highest)),
    )
    return LineChart(
        axes=axes, lines=tuple(_line(one, axes) for one in series), band=_polygon(band, axes)
    )


def time_ticks(span_s: float) -> tuple[tuple[Tick, ...], str]:
    """Return round values within the span, and their unit."""
    unit_s, name = time_unit(span_s)
    span = span_s / unit_s
    values = [tick.value for tick in axis_ticks(span)]
    ticks = (Tick(value=value, percent=percent(value, span)) for value in values if value <= span)
    return tuple(ticks), name


def time_unit(span_s: float) -> tuple[float, str]:
    """Return the largest unit, in seconds and by name, that fits twice into the span."""
    return next((unit for unit in _UNITS if span_s >= 2 * unit[0]), _UNITS[-1])


def _line(series: Series, axes: Axes) -> Line:
    stretches: list[list[str]] = [[]]
    last = None
    for x, y in series.points:
        if y is None:
            stretches.append([])
            continue
        stretches[-1].append(axes.svg_point(x, y))
        last = y
    # A single point has no length; repeated, it is drawn as a dot.
    drawn = (points if len(points) > 1 else points * 2 for points in stretches if points)
    polylines = tuple(" ".join(points) for points in drawn)
    return Line(name=series.name, tone=series.tone, polylines=polylines, last=last)


def _polygon(band: Sequence[tuple[float, float, float]], axes: Axes) -> str:
    upper = [axes.svg_point(x, high) for x, _, high in band]
    lower = [axes.svg_point(x, low) for x, low, _ in reversed(band)]
    return " ".join([*upper, *lower])


# --- tokens/s against running requests ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A labelled point of a rate curve."""

    requests: float
    tokens_per_s: float
    left_percent: float
    bottom_percent: float
    label_left: bool
    """True if the label is left of the mark, for want of room on the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLine:
    """A rate curve, drawn from its first point to its cap."""

    mtp: bool
    line: Line
    cap: Mark
    label_above: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChart:
    """Tokens/s of one replica against running requests."""

    axes: Axes
    lines: tuple[RateLine, ...]
    break_even: Tick | None
    """Break-even of MTP, unless it is far right of all caps."""


def rate_chart(curves: Sequence[RateCurve], break_even_requests: int | None) -> RateChart:
    """Draw all curves that have points on common axes."""
    drawn = [curve for curve in curves if curve.points]
    highest_cap = max((curve.cap_requests for curve in drawn), default=0)
    is_shown = (
        break_even_requests is not None and break_even_requests <= highest_cap * _BREAK_EVEN_REACH
    )
    shown = break_even_requests if is_shown else None
    x_ticks = axis_ticks(max(highest_cap, shown or 0))
    axes = Axes(
        x_end=x_ticks[-1].value,
        x_ticks=x_ticks,
        y_ticks=axis_ticks(max((p.tokens_per_s for c in drawn for p in c.points), default=0.0)),
    )
    caps = [mark(curve, curve.cap_requests, axes) for curve in drawn]
    lines = tuple(
        RateLine(
            mtp=curve.mtp,
            line=_line(_series(curve), axes),
            cap=cap,
            label_above=not any(_is_close_below(cap, other) for other in caps),
        )
        for curve, cap in zip(drawn, caps, strict=True)
    )
    even = Tick(value=shown, percent=axes.left_percent(shown)) if shown is not None else None
    return RateChart(axes=axes, lines=lines, break_even=even)


def mark(curve: RateCurve, requests: float, axes: Axes) -> Mark:
    """Mark the point of a curve at a number of running requests."""
    rate = rate_at(curve, requests)
    left = axes.left_percent(requests)
    return Mark(
        requests=requests,
        tokens_per_s=rate,
        left_percent=left,
        bottom_percent=axes.bottom_percent(rate),
        label_left=left > _LABEL_ROOM_PERCENT,
    )


def rate_at(curve: RateCurve, requests: float) -> float:
    """Interpolate tokens/s between two points; beyond the ends the rate is constant."""
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


def _series(curve: RateCurve) -> Series:
    points = [(float(point.running_requests), point.tokens_per_s) for point in curve.points]
    tone = "mtp" if curve.mtp else "plain"
    return Series(name=f"MTP {'on' if curve.mtp else 'off'}", points=points, tone=tone)


def _is_close_below(lower: Mark, upper: Mark) -> bool:
    """Return true if labels above both marks would overlap."""
    rise = upper.bottom_percent - lower.bottom_percent
    distance = abs(upper.left_percent - lower.left_percent)
    return 0 < rise < _CLOSE_PERCENT and distance < _CLOSE_PERCENT


# --- axes ---------------------------------------------------------------------------------------


def axis_ticks(highest: float, *, most: int = 5) -> tuple[Tick, ...]:
    """Return round values from zero to the first one not below the highest, the axis's end."""
    if highest <= 0:
        return (Tick(value=0.0, percent=0.0),)
    rough_step = highest / most
    power = 10.0 ** math.floor(math.log10(rough_step))
    factors = (1, 2, 2.5, 5, 10)
    step = next(power * nice for nice in factors if power * nice >= rough_step * 0.999)
    number = math.ceil(highest / step - 1e-9)
    return tuple(Tick(value=i * step, percent=percent(i, number)) for i in range(number + 1))


def percent(part: float, whole: float) -> float:
    """Return a percentage from 0 to 100 with two decimals, finer than any screen."""
    return round(min(max(part / whole, 0.0), 1.0) * 100, 2) if whole > 0 else 0.0
