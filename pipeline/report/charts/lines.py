"""Lines over time: stretches, bands between two lines, lone points, and shaded pauses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.report.charts.axes import Axes, Tick, axis_ticks, percent
from schemas.units import SECONDS_PER_DAY

_UNITS = ((SECONDS_PER_DAY, "days"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))

# Half the width of a band's single point, over the width of the chart.
_LONE_BAND_FRACTION = 0.004

Points = Sequence[tuple[float, float | None]]
"""Pairs of x and y; a y of None is unknown and interrupts the line."""
BandPoints = Sequence[tuple[float, float | None, float | None]]
"""Triples of x, low and high; None is unknown and interrupts the band."""
Stretch = tuple[float, float, str]
"""A stretch of the x axis: its start, its end, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Data of one line."""

    name: str
    points: Points
    tone: str
    """CSS class that gives the colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point that has no neighbours to be joined with."""

    left_percent: float
    bottom_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series as SVG polylines and dots."""

    name: str
    tone: str
    polylines: tuple[str, ...]
    dots: tuple[Dot, ...]
    last: float | None
    """Last known value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A shaded stretch of the x axis."""

    left_percent: float
    width_percent: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines on common axes, in front of bands and shades."""

    axes: Axes
    lines: tuple[Line, ...]
    bands: tuple[str, ...] = ()
    """Points of SVG polygons."""
    band_name: str = ""
    shades: tuple[Shade, ...] = ()


def time_chart(
    series: Sequence[Series],
    span_s: float,
    *,
    band: BandPoints = (),
    band_name: str = "",
    highest: float = 0.0,
    shaded: Sequence[Stretch] = (),
) -> LineChart:
    """Draw series over the seconds of a run.

    The y axis reaches the highest value and `highest`. A band is cut at twice the highest value.
    """
    values = [value for one in series for _, value in one.points if value is not None]
    top = max(values, default=0.0)
    band_top = min(max((high for _, _, high in band if high is not None), default=0.0), 2 * top)
    x_ticks, x_unit = time_ticks(span_s)
    axes = Axes(
        x_end=span_s,
        x_ticks=x_ticks,
        x_unit=x_unit,
        y_ticks=axis_ticks(max(top, band_top, highest)),
    )
    return LineChart(
        axes=axes,
        lines=tuple(drawn_line(one, axes) for one in series),
        bands=tuple(_polygons(band, axes)),
        band_name=band_name,
        shades=shades(shaded, span_s),
    )


def shades(stretches: Iterable[Stretch], span_s: float) -> tuple[Shade, ...]:
    """Place stretches of time on an axis from 0 to `span_s`."""
    return tuple(
        Shade(
            left_percent=percent(start_s, span_s),
            width_percent=round(percent(end_s, span_s) - percent(start_s, span_s), 2),
            name=name,
        )
        for start_s, end_s, name in stretches
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


def drawn_line(series: Series, axes: Axes) -> Line:
    """Draw the stretches of known points; a stretch of one point is a dot."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append((x, y))
    known = [stretch for stretch in stretches if stretch]
    return Line(
        name=series.name,
        tone=series.tone,
        polylines=tuple(
            " ".join(axes.svg_point(x, y) for x, y in stretch)
            for stretch in known
            if len(stretch) > 1
        ),
        dots=tuple(
            Dot(left_percent=axes.left_percent(x), bottom_percent=axes.bottom_percent(y))
            for (x, y), *others in known
            if not others
        ),
        last=known[-1][-1][1] if known else None,
    )


def _polygons(band: BandPoints, axes: Axes) -> Iterable[str]:
    """Yield a polygon for each stretch of known points; that of a single point is a thin bar."""
    stretch: list[tuple[float, float, float]] = []
    for x, low, high in [*band, (0.0, None, None)]:
        if low is not None and high is not None:
            stretch.append((x, low, high))
            continue
        if len(stretch) == 1:
            ((lone_x, lone_low, lone_high),) = stretch
            aside = axes.x_end * _LONE_BAND_FRACTION
            stretch = [(lone_x + by, lone_low, lone_high) for by in (-aside, aside)]
        if stretch:
            upper = [axes.svg_point(x, high) for x, _, high in stretch]
            lower = [axes.svg_point(x, low) for x, low, _ in reversed(stretch)]
            yield " ".join([*upper, *lower])
        stretch = []
