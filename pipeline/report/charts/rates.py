"""Chart of tokens/s against running requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.report.charts.axes import Axes, Tick, axis_ticks
from pipeline.report.charts.lines import Line, Series, drawn_line
from schemas.estimate import RateCurve

# A label starts right of its mark, unless the mark is further right than this.
_LABEL_ROOM_PERCENT = 62.0
# About the size of a label on a phone.
_CLOSE_PERCENT = 15.0
# The axis is extended beyond the larger cap, up to this multiple, to show the break-even.
_BREAK_EVEN_REACH = 1.5


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
            line=drawn_line(_series(curve), axes),
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
