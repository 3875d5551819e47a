"""Figures formatted for people: the terminal table and the page print the same strings.

An estimated figure has two significant digits; a count or a listed price has all of them.
"""

import math
from collections.abc import Sequence

from schemas.estimate import (
    Answer,
    AsLaunched,
    Band,
    ChosenPlan,
    HardwareEstimate,
    Price,
    PriceKind,
    StepParts,
    Support,
)
from schemas.units import GIB, SECONDS_PER_DAY

_PRICE_NAMES: dict[PriceKind, str] = {
    "on_demand": "on demand",
    "spot": "spot",
    "own": "own price",
}


# --- digits -----------------------------------------------------------------------------------


def two_figures(value: float) -> str:
    """Format with two significant digits and thousands separators: 0.90, 6.1, 13, 1,100."""
    rounded = float(f"{value:.1e}")
    if not rounded:
        return "0"
    decimals = max(0, 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def span(band: Band) -> str:
    """Format the middle 80 %: 5.6-8.2, or one figure where both ends look the same."""
    low, high = two_figures(band.p10), two_figures(band.p90)
    return low if low == high else f"{low}-{high}"


def count(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{round(value):,}"


def average(value: float) -> str:
    """Format a mean of counts: whole from ten up, one decimal below."""
    return f"{value:.1f}" if value < 9.95 else count(value)


def percent(fraction: float) -> str:
    """Format a fraction as percent, whole from ten up, one decimal below: 37 %, 2.4 %."""
    points = fraction * 100
    return f"{points:.0f} %" if points >= 9.95 or points == 0 else f"{points:.1f} %"


def axis_figure(value: float) -> str:
    """Format a round figure on an axis, as short as possible."""
    return count(value) if value == round(value) else ratio(value)


def short(value: float) -> str:
    """Format a round figure of any size on a logarithmic axis: 0.05, 20, 5k, 2M."""
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (size if letter == 'M' else 1e3):g}{letter}"
    return f"{value:,g}"


def ratio(value: float) -> str:
    """Format a plain number without trailing zeros: 1.2, 0.85, 1."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# --- units ------------------------------------------------------------------------------------


def days(value: float) -> str:
    """Format days: 5.7 days."""
    return f"{two_figures(value)} days"


def days_span(band: Band) -> str:
    """Format a band of days: 5.6-8.2 days."""
    return f"{span(band)} days"


def hours(value: float) -> str:
    """Format hours, or minutes where hours would round to nothing."""
    if 0 < value < 0.095:
        return f"{two_figures(value * 60)} min"
    return f"{two_figures(value)} h"


def usd(value: float) -> str:
    """Format dollars: $610."""
    return f"${two_figures(value)}"


def usd_span(band: Band) -> str:
    """Format a band of dollars: $490-760."""
    return f"${span(band)}"


def tokens_per_s(value: float) -> str:
    """Format a rate: 1,100 tokens/s."""
    return f"{two_figures(value)} tokens/s"


def gib(size_bytes: int) -> str:
    """Format bytes with the digits that a launch log prints: 51.08 GiB."""
    return f"{size_bytes / GIB:.2f} GiB"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds: 72 ms."""
    return f"{two_figures(seconds * 1000)} ms"


def large_count(value: float) -> str:
    """Format with two digits and a word: 2.3 billion."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size * 0.995:
            return f"{two_figures(value / size)} {word}"
    return two_figures(value)


# --- prices -----------------------------------------------------------------------------------


def price_name(kind: PriceKind) -> str:
    """Return the kind of price in words."""
    return _PRICE_NAMES[kind]


def hourly_usd(value: float) -> str:
    """Format a price as it is listed, to the cent."""
    return f"${value:,.2f}"


def hourly_span(price: Price) -> str:
    """Format the range of all listings: $1.40-2.20, or empty for a single price."""
    if price.low_usd_per_gpu_hour == price.high_usd_per_gpu_hour:
        return ""
    return f"${price.low_usd_per_gpu_hour:,.2f}-{price.high_usd_per_gpu_hour:,.2f}"


def price_date(price: Price) -> str:
    """Return the date on which the price was read."""
    return price.date or "date not known"


def stale_note(prices: Sequence[Price]) -> str | None:
    """Return one note for all old prices: how many, and what to do; None where none is old."""
    stale = sum(price.stale for price in prices)
    if not stale:
        return None
    return (
        f"{stale} of {len(prices)} prices are stale: more than 90 days old, or without a date; "
        "give the provider's price of the day with --price GPU=USD[/SPOT]"
    )


# --- an option in words -----------------------------------------------------------------------


def time_and_cost(option: HardwareEstimate) -> str:
    """Describe an option by its days and first bill: 5.7 days, $490 on demand."""
    parts = [days(option.days.p50)]
    if option.bills:
        bill = option.bills[0]
        parts.append(f"{usd(bill.usd.p50)} {price_name(bill.price.kind)}")
    return ", ".join(parts)


def as_launched(launched: AsLaunched) -> str:
    """Describe the user's own launch line on an option."""
    if launched.estimate is None:
        return f"as you launch it, it does not start: {launched.reason}"
    return f"as you launch it: {time_and_cost(launched.estimate)}"


def answered(answer: Answer) -> str:
    """Describe an answer at its price, with what preemptions add to it on spot."""
    words = f", {price_name(answer.price_kind)}" if answer.price_kind else ""
    words += f": {days(answer.days.p50)} ({span(answer.days)})"
    if answer.usd is not None and answer.usd_per_million_tokens is not None:
        each = usd(answer.usd_per_million_tokens.p50)
        words += f", {usd(answer.usd.p50)} ({usd_span(answer.usd)}), {each} per million tokens"
    if answer.preemption_usd:
        words += f"; preemptions are counted, {usd(answer.preemption_usd)}"
    return words


# --- a plan in words --------------------------------------------------------------------------


def plan_layout(plan: ChosenPlan) -> str:
    """Describe the layout: TP 1 x 7 replicas."""
    stages = f" x PP {plan.pp_size}" if plan.pp_size > 1 else ""
    replicas = f"{plan.replicas} replica{'' if plan.replicas == 1 else 's'}"
    return f"TP {plan.tp_size}{stages} x {replicas}"


def plan_switches(plan: ChosenPlan) -> str:
    """Describe the switches: MTP off, prefix cache off."""
    mtp = f"MTP on ({plan.num_draft_tokens} draft tokens)" if plan.mtp else "MTP off"
    return f"{mtp}, prefix cache {'on' if plan.prefix_cache else 'off'}"


def plan_requests(plan: ChosenPlan) -> str:
    """Describe how many requests run in one replica, and what limits them."""
    return (
        f"{average(plan.running_requests)} of at most {count(plan.cap_requests)} requests run in "
        f"each, limited by {plan.limited_by}"
    )


def step_parts(step: StepParts) -> tuple[tuple[str, float], ...]:
    """Return the parts of a step that last longer than 0, by name, in seconds."""
    parts = (
        ("dense", step.dense_s),
        ("experts", step.experts_s),
        ("attention", step.attention_s),
        ("communication", step.communication_s),
        ("overhead", step.overhead_s),
        ("drafts", step.draft_s),
        ("hand-over", step.hand_over_s),
        ("idle", step.idle_s),
    )
    return tuple((name, seconds) for name, seconds in parts if seconds)


def plan_step(plan: ChosenPlan) -> str:
    """Describe the step, its parts, and prefill's share of device time."""
    parts = ", ".join(
        f"{name} {two_figures(seconds * 1000)}" for name, seconds in step_parts(plan.step)
    )
    return (
        f"step {milliseconds(plan.step.step_s())} ({parts}), prefill {percent(plan.prefill_share)} "
        f"of device time"
    )


def plan_readings(plan: ChosenPlan) -> str:
    """Say which public readings the rate stands on."""
    if not plan.readings:
        return "stands on no public reading of this model or of models of this kind"
    each = [f"{near.readings} of {near.relation}" for near in plan.readings]
    return f"stands on public readings: {', '.join(each)}"


def support(readings: Support) -> str:
    """Return how many readings of a relation there are, from where and of when."""
    where = "; ".join(readings.sources)
    if readings.first_date is None:
        return f"{readings.readings} of {readings.relation} ({where})"
    dates = " to ".join(dict.fromkeys((readings.first_date, readings.last_date or "")))
    return f"{readings.readings} of {readings.relation} ({where}, {dates})"


def duration(seconds: float | None) -> str:
    """Format seconds: 42 s, 3 min, 5.2 h, 1.8 days; unknown where None."""
    if seconds is None:
        return "not known yet"
    for size_s, unit, digits in ((SECONDS_PER_DAY, "days", 1), (3_600, "h", 1), (60, "min", 0)):
        if seconds >= 1.5 * size_s:
            return f"{seconds / size_s:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
