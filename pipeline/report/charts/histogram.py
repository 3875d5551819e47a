"""Histograms whose axis is that of the data, with the limit marked wherever it is."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report.charts.axes import Scale, Tick, percent
from pipeline.report.rows.lengths import quantile

_NUM_BARS = 40
# Values further above the p90 than this many times the distance from the p10 are outliers: in a
# log-normal sample with CV 1 about one in 1,000 is.
_FENCE = 4.0
# On a logarithmic axis the middle 80 % must have this share of the width.
_LEAST_HUMP_SHARE = 0.2
# An axis starts at zero unless the least value is beyond this share of the greatest.
_FAR_FROM_ZERO = 0.5
# A limit at most this far beyond the greatest value is on the axis.
_LIMIT_REACH = 1.25
# Narrowest axis, in tokens: a single length is one bar in the middle.
_LEAST_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bin, from `low` up to and without `high`."""

    low: int
    high: int
    count: int
    left_percent: float
    width_percent: float
    height_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Bins of the lengths that most values have."""

    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    is_log: bool
    limit: Tick | None
    """The limit, if it is on the axis."""
    limit_beyond: int | None
    """The limit, if it is right of the axis."""
    num_beyond: int
    """Values right of the axis."""


def histogram(
    counts: Mapping[int, int], limit: int | None, *, num_bars: int = _NUM_BARS
) -> Histogram:
    """Sort counts into bins on an axis that the data fill.

    The axis is even; where outliers would press the rest into a few bars, it is logarithmic, and
    where that does not help either, outliers are counted instead of drawn.
    """
    scale = _scale(counts, limit)
    edges = _edges(scale, num_bars)
    bins: Counter[int] = Counter()
    beyond = 0
    for value, count in counts.items():
        if value >= scale.high:
            beyond += count
        else:
            bins[_place(value, edges)] += count
    highest = max(bins.values(), default=0)
    bars = tuple(
        Bar(
            low=0 if place == 0 and scale.is_log else edges[place],
            high=edges[place + 1],
            count=count,
            left_percent=scale.percent(edges[place]),
            width_percent=round(scale.percent(edges[place + 1]) - scale.percent(edges[place]), 2),
            height_percent=percent(count, highest),
        )
        for place, count in sorted(bins.items())
    )
    is_shown = limit is not None and scale.low <= limit <= scale.high
    return Histogram(
        bars=bars,
        x_ticks=scale.ticks() if counts else (),
        is_log=scale.is_log,
        limit=Tick(value=limit, percent=scale.percent(limit)) if limit and is_shown else None,
        limit_beyond=limit if limit is not None and not is_shown else None,
        num_beyond=beyond,
    )


def _scale(counts: Mapping[int, int], limit: int | None) -> Scale:
    """Choose an axis whose end is beyond the values on it."""
    values = sorted(counts)
    if not values:
        return Scale(low=0, high=1)
    least, most = values[0], values[-1]
    low, high = quantile(counts, 0.1), quantile(counts, 0.9)
    fence = high + _FENCE * max(high - low, _LEAST_WIDTH)
    if most <= fence:
        return _even_scale(least, most, limit)
    start = max(quantile(counts, 0.001), 1)
    hump = math.log(max(high, 1) / max(low, start)) / math.log(most / start)
    if hump >= _LEAST_HUMP_SHARE:
        return Scale(low=start, high=_reaching(most, limit) + 1, is_log=True)
    return _even_scale(least, max(value for value in values if value <= fence), limit)


def _even_scale(least: int, most: int, limit: int | None) -> Scale:
    end = _reaching(most, limit) + 1
    low = least if least > _FAR_FROM_ZERO * end else 0
    low = max(low - max(_LEAST_WIDTH - (end - low), 0) // 2, 0)
    return Scale(low=low, high=max(end, low + _LEAST_WIDTH))


def _reaching(most: int, limit: int | None) -> int:
    """Extend the axis to a limit that is close."""
    return limit if limit is not None and most < limit <= most * _LIMIT_REACH else most


def _edges(scale: Scale, num_bars: int) -> list[int]:
    """Divide the axis into bins of whole tokens."""
    first, end = int(scale.low), int(scale.high)
    if not scale.is_log:
        width = math.ceil((end - first) / num_bars)
        return [*range(first, end, width), end]
    inner = {round(scale.value(number / num_bars)) for number in range(1, num_bars)}
    return sorted({first, *(edge for edge in inner if first < edge < end), end})


def _place(value: int, edges: list[int]) -> int:
    low, high = 0, len(edges) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value >= edges[middle] else (low, middle)
    return low
