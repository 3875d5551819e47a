"""Scatter of options by days and dollars: a dot and its band each, and the efficient frontier."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.charts.axes import Scale, Tick
from schemas.estimate import Band

# Room around the outermost bands, by ratio.
_MARGIN = 1.15
_MOST_TICKS = 5
# About the size of a label of two digits on a phone: closer labels are joined.
_LABEL_WIDTH_PERCENT, _LABEL_HEIGHT_PERCENT = 9.0, 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """An option at one price; `number` is its label."""

    number: int
    tone: str
    title: str
    days: Band
    usd: Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A dot in percent of the chart, with the arms of its two bands."""

    spot: Spot
    left_percent: float
    bottom_percent: float
    left_arm: tuple[float, float]
    bottom_arm: tuple[float, float]
    is_efficient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Numbers of efficient options whose dots are close to each other."""

    text: str
    left_percent: float
    bottom_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Dots on logarithmic axes, or even ones where something costs nothing."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    efficient: tuple[Spot, ...]
    """Spots of the frontier, the fastest first."""
    labels: tuple[Label, ...]
    frontier: str
    """Points of an SVG line in a box of 100 x 100, from the fastest to the cheapest."""


def scatter(spots: Sequence[Spot]) -> Scatter | None:
    """Place the dots; None where there are none."""
    if not spots:
        return None
    x, y = _scale([spot.days for spot in spots]), _scale([spot.usd for spot in spots])
    efficient = frontier(spots)
    dots = tuple(_dot(spot, x, y, is_efficient=spot in efficient) for spot in spots)
    line = [_dot(spot, x, y, is_efficient=True) for spot in efficient]
    return Scatter(
        x_ticks=x.ticks(most=_MOST_TICKS),
        y_ticks=y.ticks(most=_MOST_TICKS),
        dots=dots,
        efficient=efficient,
        labels=_labels(line),
        frontier=" ".join(
            f"{dot.left_percent:g},{round(100 - dot.bottom_percent, 2):g}" for dot in line
        ),
    )


def frontier(spots: Sequence[Spot]) -> tuple[Spot, ...]:
    """Return the spots to which no other one is at once as fast and as cheap, fastest first."""
    found: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.days.p50, spot.usd.p50)):
        if not found or spot.usd.p50 < found[-1].usd.p50:
            found.append(spot)
    return tuple(found)


def _scale(bands: Sequence[Band]) -> Scale:
    low, high = min(band.p10 for band in bands), max(band.p90 for band in bands)
    if low <= 0:
        return Scale(low=0.0, high=high * _MARGIN or 1.0)
    return Scale(low=low / _MARGIN, high=high * _MARGIN, is_log=True)


def _dot(spot: Spot, x: Scale, y: Scale, *, is_efficient: bool) -> Dot:
    return Dot(
        spot=spot,
        left_percent=x.percent(spot.days.p50),
        bottom_percent=y.percent(spot.usd.p50),
        left_arm=(x.percent(spot.days.p10), x.percent(spot.days.p90)),
        bottom_arm=(y.percent(spot.usd.p10), y.percent(spot.usd.p90)),
        is_efficient=is_efficient,
    )


def _labels(line: Sequence[Dot]) -> tuple[Label, ...]:
    """Label the dots of the frontier; those that are close share one label, at the first."""
    groups: list[list[Dot]] = []
    for dot in line:
        if groups and _is_close(groups[-1], dot):
            groups[-1].append(dot)
        else:
            groups.append([dot])
    return tuple(
        Label(
            text=", ".join(dict.fromkeys(str(dot.spot.number) for dot in group)),
            left_percent=group[0].left_percent,
            bottom_percent=group[0].bottom_percent,
        )
        for group in groups
    )


def _is_close(group: Sequence[Dot], dot: Dot) -> bool:
    """Return whether a label at this dot would run into the group's."""
    first = group[0]
    width = _LABEL_WIDTH_PERCENT * len(group)
    return (
        abs(dot.left_percent - first.left_percent) < width
        and abs(dot.bottom_percent - first.bottom_percent) < _LABEL_HEIGHT_PERCENT
    )
