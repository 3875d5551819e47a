"""Page of an estimate: one HTML file without network, scripts or fonts of its own.

The template lays out, `charts` places marks, `planner.estimate.figures` formats. An element that
shows a figure names it: `data-figure` is its path in `estimate_json`, below `data-option` if that
is set. All text is escaped.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.planner.estimate import figures, output
from pipeline.report.charts import bars, rates
from schemas.estimate import Assumption, ChosenPlan, Dollars, HardwareEstimate, RunEstimate

# Options whose plans are unfolded; those of a whole catalogue would be a long page.
_OPEN_OPTIONS = 3
# A narrower segment has its name only in the legend.
_LABEL_FROM_PERCENT = 14.0
# On a phone a narrower segment has its name only in the legend.
_WIDE_FROM_PERCENT = 24.0
# Budget rows with a colour of their own; all others share one.
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
    """A bill, and its bar on the common scale of all bills."""

    index: int
    bill: Dollars
    bar: bars.BandBar


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan with its charts."""

    index: int
    plan: ChosenPlan
    segments: tuple[bars.Segment, ...]
    chart: rates.RateChart
    average: rates.Mark | None
    """Point of the plan's curve at the expected mean of running requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionView:
    """A hardware option with its bars."""

    index: int
    option: HardwareEstimate
    days: bars.BandBar
    bills: tuple[BillView, ...]
    ranking: BillView | None
    plans: tuple[PlanView, ...]
    opened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAssumption:
    """An assumption, the options that make it, and the range of its variance shares."""

    assumption: Assumption
    options: tuple[str, ...]
    lowest_share: float
    highest_share: float


def estimate_page(estimate: RunEstimate) -> str:
    """Render the page."""
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
    days_scale = bars.bar_scale([option.days for option in options])
    usd_scale = bars.bar_scale([bill.usd for option in options for bill in option.bills])
    return tuple(
        _option_view(index, option, days_scale, usd_scale) for index, option in enumerate(options)
    )


def _option_view(
    index: int, option: HardwareEstimate, days_scale: float, usd_scale: float
) -> OptionView:
    bills = tuple(
        BillView(index=place, bill=bill, bar=bars.band_bar(bill.usd, usd_scale))
        for place, bill in enumerate(option.bills)
    )
    ranking = output.ranking_bill(option)
    return OptionView(
        index=index,
        option=option,
        days=bars.band_bar(option.days, days_scale),
        bills=bills,
        ranking=next((view for view in bills if view.bill is ranking), None),
        plans=tuple(_plan_view(place, plan) for place, plan in enumerate(option.plans)),
        opened=index < _OPEN_OPTIONS,
    )


def _plan_view(index: int, plan: ChosenPlan) -> PlanView:
    chart = rates.rate_chart(plan.curves, plan.break_even_requests)
    own = next((curve for curve in plan.curves if curve.mtp == plan.mtp and curve.points), None)
    return PlanView(
        index=index,
        plan=plan,
        segments=bars.stacked_segments(plan.budget),
        chart=chart,
        average=(rates.mark(own, plan.running_requests, chart.axes) if own else None),
    )


def other_assumptions(estimate: RunEstimate) -> tuple[SharedAssumption, ...]:
    """Collect the options' further assumptions without repeats, widest first."""
    main = {_key(item) for item in estimate.assumptions}
    groups: dict[tuple[str, ...], list[tuple[str, Assumption]]] = {}
    for option in estimate.options:
        for item in option.assumptions:
            if _key(item) not in main:
                groups.setdefault(_key(item), []).append((option.option, item))
    shared = (
        SharedAssumption(
            assumption=group[0][1],
            options=tuple(name for name, _ in group),
            lowest_share=min(item.variance_share for _, item in group),
            highest_share=max(item.variance_share for _, item in group),
        )
        for group in groups.values()
    )
    return tuple(sorted(shared, key=lambda item: -item.highest_share))


def _key(item: Assumption) -> tuple[str, ...]:
    """Identify an assumption by all but its variance share, which differs between options."""
    return (item.name, item.value, item.source, item.measure)
