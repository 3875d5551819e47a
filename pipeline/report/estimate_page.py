"""An estimate as one HTML page that stands alone: no network, no script, no font of its own.

The template lays out, `chart_geometry` places, `estimate_figures` prints. An element that shows a
figure names it: `data-figure` is its path in `estimate_json`, below `data-option` if that is set.
Every text is escaped.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.planner.estimate import figures as figures
from pipeline.planner.estimate import output as output
from pipeline.report import chart_geometry as geometry
from schemas.estimate import Assumption, ChosenPlan, Dollars, HardwareEstimate, RunEstimate

_OPEN_OPTIONS = 3  # the first few show their plans; a whole catalogue would be a long page
_LABEL_FROM_PERCENT = 14.0  # a narrower segment has its name in the legend alone
_WIDE_FROM_PERCENT = 24.0  # the same on a phone
# Rows that have a colour of their own; all the others share one.
_SEGMENT_COLOURS = {
    "weights": "weights",
    "draft weights": "draft",
    "state pool": "states",
    "verify states": "verify",
    "KV pool": "kv",
    "left over": "free",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BillView:
    """One bill, and its bar on the scale that all bills share."""

    index: int
    bill: Dollars
    bar: geometry.BandBar


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """One plan with its charts."""

    index: int
    plan: ChosenPlan
    segments: tuple[geometry.Segment, ...]
    chart: geometry.LineChart
    average: geometry.Mark | None
    """Where the plan's own curve is at the running requests that are expected on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionView:
    """One option with its bars."""

    index: int
    option: HardwareEstimate
    days: geometry.BandBar
    bills: tuple[BillView, ...]
    ranking: BillView | None
    plans: tuple[PlanView, ...]
    opened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAssumption:
    """An assumption with the options that make it; the shares are the least and the greatest."""

    assumption: Assumption
    options: tuple[str, ...]
    lowest_share: float
    highest_share: float


def estimate_page(estimate: RunEstimate) -> str:
    """The whole page."""
    options = _option_views(estimate.options)
    return _template().render(
        estimate=estimate,
        output_tokens=output.output_tokens(estimate),
        options=options,
        fastest=min(options, key=lambda view: view.option.days.p50, default=None),
        other_assumptions=other_assumptions(estimate),
        warnings=output.warnings_by_text(estimate.options),
        label_from_percent=_LABEL_FROM_PERCENT,
        wide_from_percent=_WIDE_FROM_PERCENT,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("pipeline.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(figures=figures, hours_usd=output.hours_usd)
    environment.filters["quoted"] = shlex.quote
    environment.filters["segment_colour"] = lambda name: _SEGMENT_COLOURS.get(name, "other")
    return environment.get_template("estimate.html.j2")


def _option_views(options: Sequence[HardwareEstimate]) -> tuple[OptionView, ...]:
    days_scale = geometry.bar_scale([option.days for option in options])
    usd_scale = geometry.bar_scale([bill.usd for option in options for bill in option.bills])
    return tuple(
        _option_view(index, option, days_scale, usd_scale) for index, option in enumerate(options)
    )


def _option_view(
    index: int, option: HardwareEstimate, days_scale: float, usd_scale: float
) -> OptionView:
    bills = tuple(
        BillView(index=place, bill=bill, bar=geometry.band_bar(bill.usd, usd_scale))
        for place, bill in enumerate(option.bills)
    )
    ranking = output.ranking_bill(option)
    return OptionView(
        index=index,
        option=option,
        days=geometry.band_bar(option.days, days_scale),
        bills=bills,
        ranking=next((view for view in bills if view.bill is ranking), None),
        plans=tuple(_plan_view(place, plan) for place, plan in enumerate(option.plans)),
        opened=index < _OPEN_OPTIONS,
    )


def _plan_view(index: int, plan: ChosenPlan) -> PlanView:
    chart = geometry.line_chart(plan.curves, plan.break_even_requests)
    own = next((curve for curve in plan.curves if curve.mtp == plan.mtp and curve.points), None)
    return PlanView(
        index=index,
        plan=plan,
        segments=geometry.stacked_segments(plan.budget),
        chart=chart,
        average=(
            geometry.mark(own, plan.running_requests, chart.x_ticks, chart.y_ticks) if own else None
        ),
    )


def other_assumptions(estimate: RunEstimate) -> tuple[SharedAssumption, ...]:
    """What the options assume beside the estimate's own three, each once, widest first."""
    first = {_stated(item) for item in estimate.assumptions}
    found: dict[tuple[str, ...], list[tuple[str, Assumption]]] = {}
    for option in estimate.options:
        for item in option.assumptions:
            if _stated(item) not in first:
                found.setdefault(_stated(item), []).append((option.option, item))
    shared = (
        SharedAssumption(
            assumption=group[0][1],
            options=tuple(name for name, _ in group),
            lowest_share=min(item.variance_share for _, item in group),
            highest_share=max(item.variance_share for _, item in group),
        )
        for group in found.values()
    )
    return tuple(sorted(shared, key=lambda item: -item.highest_share))


def _stated(item: Assumption) -> tuple[str, ...]:
    """All of it but its weight, which differs from option to option."""
    return (item.name, item.value, item.source, item.measure)
