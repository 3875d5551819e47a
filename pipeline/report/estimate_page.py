"""Page of an estimate: one HTML file without network, scripts or fonts of its own.

The template lays out, `charts` places marks, `planner.estimate.figures` formats. An element that
shows a figure names it: `data-figure` is its path in `estimate_json`, below `data-option` if that
is set. All text is escaped.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.planner.estimate import figures, output
from pipeline.planner.estimate.answers import cheapest, fastest
from pipeline.report.charts import bars, rates
from pipeline.report.charts.scatter import Spot, frontier, scatter
from pipeline.report.shell import template
from schemas.estimate import (
    Answer,
    AsLaunched,
    Assumption,
    ChosenPlan,
    Dollars,
    HardwareEstimate,
    RunEstimate,
)

# Options whose plans are unfolded; those of a whole catalogue would be a long page.
_OPEN_OPTIONS = 3
# Of more options, those that are not efficient are folded.
_SHOWN_OPTIONS = 8
_SHOWN_LAUNCHES = 3


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

    rank: int
    option: HardwareEstimate
    days: bars.BandBar
    bills: tuple[BillView, ...]
    ranking: BillView | None
    plans: tuple[PlanView, ...]
    shown: bool
    """False for one of many, which are folded."""
    opened: bool
    """True if its plans are unfolded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerView:
    """An answer, and where its figures are below its option."""

    answer: Answer
    path: str
    days_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedView:
    """The user's own launch line on an option, and the option's best plan if one fits."""

    index: int
    launched: AsLaunched
    planned: HardwareEstimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAssumption:
    """An assumption, the options that make it, and the range of its variance shares."""

    assumption: Assumption
    options: tuple[str, ...]
    lowest_share: float
    highest_share: float


def estimate_page(estimate: RunEstimate) -> str:
    """Render the page."""
    spots = _spots(estimate.options)
    efficient = {spot.number for spot in frontier(spots)}
    views = _option_views(estimate.options, efficient)
    prices = [bill.price for option in estimate.options for bill in option.bills]
    return template("estimate.html.j2").render(
        estimate=estimate,
        output_tokens=output.output_tokens(estimate),
        answers=_answers(estimate),
        launched=_launched_views(estimate),
        scatter=scatter(spots),
        options=[view for view in views if view.option.cannot_run is None],
        apart=[view for view in views if view.option.cannot_run is not None],
        has_spot=any(price.kind == "spot" for price in prices),
        stale_note=figures.stale_note(prices),
        other_assumptions=other_assumptions(estimate),
        warnings=output.warnings_by_text(estimate.options),
        hours_usd=output.hours_usd,
        shown_options=_SHOWN_OPTIONS,
        shown_launches=_SHOWN_LAUNCHES,
    )


def _answers(estimate: RunEstimate) -> tuple[tuple[str, AnswerView], ...]:
    """Return the cheapest and the fastest option with their titles, one if they are the same."""
    cheap, quick = cheapest(estimate.options), fastest(estimate.options)
    if quick is None:
        return ()
    if cheap is None or cheap == quick:
        title = "Fastest" if cheap is None else "Cheapest per token, and fastest"
        return ((title, _answer_view(estimate, quick)),)
    return (
        ("Cheapest per token", _answer_view(estimate, cheap)),
        ("Fastest", _answer_view(estimate, quick)),
    )


def _answer_view(estimate: RunEstimate, answer: Answer) -> AnswerView:
    option = next(option for option in estimate.options if option.option == answer.option)
    kinds = [bill.price.kind for bill in option.bills]
    if answer.price_kind is None:
        return AnswerView(answer=answer, path="", days_path="days")
    path = f"bills.{kinds.index(answer.price_kind)}"
    return AnswerView(answer=answer, path=path, days_path=f"{path}.days")


def _launched_views(estimate: RunEstimate) -> tuple[LaunchedView, ...]:
    planned = {option.option: option for option in estimate.options}
    return tuple(
        LaunchedView(index=index, launched=launched, planned=planned.get(launched.option))
        for index, launched in enumerate(estimate.as_launched)
    )


def _spots(options: Sequence[HardwareEstimate]) -> tuple[Spot, ...]:
    """Return each bill of the options that can run as a dot, with the option's rank."""
    return tuple(
        Spot(
            number=rank,
            tone=bill.price.kind,
            title=f"{option.option}, {figures.price_name(bill.price.kind)}: "
            f"{figures.days(bill.days.p50)}, {figures.usd(bill.usd.p50)}",
            days=bill.days,
            usd=bill.usd,
        )
        for rank, option in enumerate(options, start=1)
        for bill in option.bills
        if option.cannot_run is None
    )


def _option_views(
    options: Sequence[HardwareEstimate], efficient: Collection[int]
) -> tuple[OptionView, ...]:
    """Return a view of each option; the first and the efficient ones are shown unfolded."""
    days_scale = bars.bar_scale([option.days for option in options])
    usd_scale = bars.bar_scale([bill.usd for option in options for bill in option.bills])
    able = sum(option.cannot_run is None for option in options)
    views = []
    for index, option in enumerate(options):
        bills = tuple(
            BillView(index=place, bill=bill, bar=bars.band_bar(bill.usd, usd_scale))
            for place, bill in enumerate(option.bills)
        )
        ranking = output.ranking_bill(option)
        views.append(
            OptionView(
                rank=index + 1 if option.cannot_run is None else index + 1 - able,
                option=option,
                days=bars.band_bar(option.days, days_scale),
                bills=bills,
                ranking=next((view for view in bills if view.bill is ranking), None),
                plans=tuple(_plan_view(place, plan) for place, plan in enumerate(option.plans)),
                shown=index < _SHOWN_OPTIONS or index + 1 in efficient,
                opened=index < _OPEN_OPTIONS,
            )
        )
    return tuple(views)


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
