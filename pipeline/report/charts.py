"""Where the marks of a chart over time stand, in percent of its own width and height. Pure.

Times are seconds since the run began; the right edge is the end of what is known.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.chart_geometry import Tick, axis_ticks
from schemas.units import SECONDS_PER_DAY

_UNITS = ((SECONDS_PER_DAY, "days"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_NUM_BARS = 40

Points = Sequence[tuple[float, float | None]]
"""Second and value; None where nothing is known, which parts the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLine:
    """A series, before it is placed."""

    name: str
    points: Points
    tone: str
    """The class that gives its colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLine:
    """A series as polylines in a box of 100 x 100, where heights count from the top."""

    name: str
    tone: str
    polylines: tuple[str, ...]
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart:
    """Lines over the run's time, with a band behind them where there is one."""

    lines: tuple[PlacedLine, ...]
    band: str
    """As `points` of an SVG polygon; empty where there is none."""
    x_ticks: tuple[Tick, ...]
    x_unit: str
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One class of a histogram."""

    low: float
    high: float
    count: int
    left_percent: float
    width_percent: float
    height_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Bars from zero, the limit marked."""

    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    limit: Tick | None


def time_unit(span_s: float) -> tuple[float, str]:
    """The largest unit of which the span has two."""
    return next((unit for unit in _UNITS if span_s >= 2 * unit[0]), _UNITS[-1])


def time_ticks(span_s: float) -> tuple[tuple[Tick, ...], str]:
    """Round figures within the span, in the unit that is named with them."""
    size_s, name = time_unit(span_s)
    whole = span_s / size_s
    ticks = (
        Tick(value=tick.value, percent=percent(tick.value, whole)) for tick in axis_ticks(whole)
    )
    return tuple(tick for tick in ticks if tick.value <= whole), name


def time_chart(
    lines: Sequence[NamedLine],
    span_s: float,
    *,
    band: Sequence[tuple[float, float, float]] = (),
    highest: float = 0.0,
) -> TimeChart:
    """All lines on one height, which the band's top and `highest` share in setting.

    `band` holds second, low and high. A band that goes far beyond the lines is cut at the top.
    """
    values = [value for line in lines for _, value in line.points if value is not None]
    top = max(values, default=0.0)
    tallest = min(max((high for _, _, high in band), default=0.0), 2 * top)
    y_ticks = axis_ticks(max(top, tallest, highest))
    y_end = y_ticks[-1].value
    x_ticks, x_unit = time_ticks(span_s)
    return TimeChart(
        lines=tuple(_placed(line, span_s, y_end) for line in lines),
        band=_polygon(band, span_s, y_end),
        x_ticks=x_ticks,
        x_unit=x_unit,
        y_ticks=y_ticks,
    )


def histogram(
    counts: Mapping[int, int], limit: int | None, *, num_bars: int = _NUM_BARS
) -> Histogram:
    """Equal classes from zero to the greatest length or the limit."""
    right = max([*counts, limit or 0, 1])
    x_ticks = axis_ticks(float(right))
    end = x_ticks[-1].value
    width = max(1, math.ceil(end / num_bars))
    classes: Counter[int] = Counter()
    for tokens, number in counts.items():
        classes[tokens // width] += number
    tallest = max(classes.values(), default=0)
    bars = tuple(
        Bar(
            low=place * width,
            high=(place + 1) * width,
            count=number,
            left_percent=percent(place * width, end),
            width_percent=percent(width, end),
            height_percent=percent(number, tallest),
        )
        for place, number in sorted(classes.items())
    )
    shown = Tick(value=limit, percent=percent(limit, end)) if limit is not None else None
    return Histogram(bars=bars, x_ticks=x_ticks, limit=shown)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The least length that so great a share of the counts does not exceed; 0 for none."""
    left = share * sum(counts.values())
    for tokens, number in sorted(counts.items()):
        left -= number
        if left <= 1e-9:
            return tokens
    return 0


def mean(counts: Mapping[int, int]) -> float:
    """0 for none."""
    total = sum(counts.values())
    return sum(tokens * number for tokens, number in counts.items()) / total if total else 0.0


def stepped(changes: Iterable[tuple[float, float]], times_s: Sequence[float]) -> list[float | None]:
    """The value that holds at each time, where `changes` tell second and new value in order."""
    found: list[float | None] = []
    ordered, place, value = list(changes), 0, None
    for time_s in times_s:
        while place < len(ordered) and ordered[place][0] <= time_s:
            value = ordered[place][1]
            place += 1
        found.append(value)
    return found


def percent(part: float, whole: float) -> float:
    """To two decimals, within 0 and 100."""
    return round(min(max(part / whole, 0.0), 1.0) * 100, 2) if whole > 0 else 0.0


def _placed(line: NamedLine, span_s: float, y_end: float) -> PlacedLine:
    runs: list[list[str]] = [[]]
    last = None
    for time_s, value in line.points:
        if value is None:
            runs.append([])
            continue
        runs[-1].append(_point(time_s, value, span_s, y_end))
        last = value
    # A point alone has no length: a second one on its place makes a dot of it.
    drawn = (run if len(run) > 1 else [*run, *run] for run in runs if run)
    return PlacedLine(
        name=line.name, tone=line.tone, polylines=tuple(" ".join(run) for run in drawn), last=last
    )


def _polygon(band: Sequence[tuple[float, float, float]], span_s: float, y_end: float) -> str:
    above = [_point(time_s, high, span_s, y_end) for time_s, _, high in band]
    below = [_point(time_s, low, span_s, y_end) for time_s, low, _ in reversed(band)]
    return " ".join([*above, *below])


def _point(time_s: float, value: float, span_s: float, y_end: float) -> str:
    return f"{percent(time_s, span_s):g},{round(100 - percent(value, y_end), 2):g}"
