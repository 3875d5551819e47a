"""An estimate as JSON, with units in the keys, and as a table for a terminal.

The JSON keys are the interface of `jobs.estimate --json`; the HTML page refers to their paths.
Nothing is estimated here, and the order of the options is kept.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from pipeline.planner.estimate import figures as figures
from pipeline.planner.estimate.answers import cheapest, fastest
from pipeline.planner.estimate.rate_output import step_json
from schemas.estimate import (
    Band,
    ChosenPlan,
    Dollars,
    HardwareEstimate,
    PriceKind,
    RunEstimate,
)
from schemas.units import GIB

_WIDTH = 120
_RANKING_ORDER: tuple[PriceKind, ...] = ("own", "on_demand", "spot")


def ranking_bill(option: HardwareEstimate) -> Dollars | None:
    """Return the bill that ranks an option: at the own price, else on demand, else on spot."""
    bills = {bill.price.kind: bill for bill in option.bills}
    return next((bills[kind] for kind in _RANKING_ORDER if kind in bills), None)


def output_tokens(estimate: RunEstimate) -> float:
    """Return the expected output tokens of the whole run."""
    return estimate.num_completions * estimate.output_lengths.mean_tokens


def hours_usd(option: HardwareEstimate, bill: Dollars, hours: float) -> float:
    """Return the cost of all cards of the option for some hours."""
    return hours * option.num_gpus * bill.price.usd_per_gpu_hour


# --- JSON -------------------------------------------------------------------------------------


def estimate_json(estimate: RunEstimate) -> dict[str, Any]:
    """Return the estimate as plain values: its records, with the figures derived from them."""
    document = {**asdict(estimate), "output_tokens": output_tokens(estimate)}
    for name, answer in (("cheapest", cheapest), ("fastest", fastest)):
        found = answer(estimate.options)
        document[name] = asdict(found) if found else None
    for option, record in zip(estimate.options, document["options"], strict=True):
        _add_figures(option, record)
    for launched, record in zip(estimate.as_launched, document["as_launched"], strict=True):
        if launched.estimate is not None:
            _add_figures(launched.estimate, record["estimate"])
    return document


def _add_figures(option: HardwareEstimate, record: dict[str, Any]) -> None:
    """Add to the values of an option what is derived from them."""
    for bill, values in zip(option.bills, record["bills"], strict=True):
        values.update(
            ranks=bill is ranking_bill(option),
            start_usd=hours_usd(option, bill, option.start_hours),
            tail_usd=hours_usd(option, bill, option.tail_hours),
            restart_usd=hours_usd(option, bill, option.restart_hours),
        )
    for plan, values in zip(option.plans, record["plans"], strict=True):
        del values["step"]
        values.update(
            budget=[
                {"name": row.name, "gib": row.bytes / GIB, "note": row.note} for row in plan.budget
            ],
            total_gib=sum(row.bytes for row in plan.budget) / GIB,
            step_s={**step_json(plan.step), "whole": plan.step.step_s()},
        )


# --- text -------------------------------------------------------------------------------------


def estimate_text(estimate: RunEstimate) -> str:
    """Return the answers and the options, then assumptions, prices, misfits and warnings."""
    blocks = [
        _head_lines(estimate),
        _launched_lines(estimate),
        _answer_lines(estimate.options),
        _option_lines([option for option in estimate.options if option.cannot_run is None]),
        _apart_lines([option for option in estimate.options if option.cannot_run is not None]),
        _assumption_lines(estimate),
        _price_lines(estimate.options),
        _unfit_lines(estimate),
        _warning_lines(estimate.options),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _head_lines(estimate: RunEstimate) -> list[str]:
    outputs, prompts = estimate.output_lengths, estimate.prompt_lengths
    output = (
        f"mean {figures.count(outputs.mean_tokens)} tokens "
        f"(± {figures.percent(outputs.mean_relative_error)}), CV {figures.ratio(outputs.cv)}, "
        f"limit {figures.count(outputs.limit_tokens)} "
        f"({figures.percent(outputs.at_limit_fraction)} reach it): {outputs.source}"
    )
    counted = f", {figures.count(prompts.sampled)} counted" if prompts.sampled else ""
    prompt = (
        f"mean {figures.count(prompts.mean_tokens)} tokens, CV {figures.ratio(prompts.cv)}"
        f"{counted}: {prompts.source}"
    )
    run = (
        f"{estimate.model}: {figures.count(estimate.num_completions)} completions, about "
        f"{figures.large_count(output_tokens(estimate))} output tokens"
    )
    return [
        *_wrapped(run, first=""),
        *_wrapped(output, first="  output  "),
        *_wrapped(prompt, first="  prompt  "),
    ]


def _launched_lines(estimate: RunEstimate) -> list[str]:
    """Compare the user's own launch line with the best plan, a line for each option."""
    if not estimate.as_launched:
        return []
    planned = {option.option: option for option in estimate.options}
    lines = ["your launch line, and the best plan"]
    for launched in estimate.as_launched:
        text = f"{launched.option}: {figures.as_launched(launched)}"
        if launched.option in planned:
            text += f"; as planned: {figures.time_and_cost(planned[launched.option])}"
        lines += _wrapped(text, first="  ")
        for plan in launched.estimate.plans if launched.estimate else ():
            lines += _wrapped(figures.plan_requests(plan), first="    ")
    return lines


def _answer_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    lines = []
    for name, answer in (("cheapest", cheapest(options)), ("fastest", fastest(options))):
        if answer is not None:
            lines += _wrapped(f"{answer.option}{figures.answered(answer)}", first=f"{name:<10}")
    return lines


def _apart_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    """Return the options that this product cannot run, ranked among themselves."""
    if not options:
        return []
    lines = ["for comparison only, ranked apart"]
    for text in dict.fromkeys(filter(None, (option.cannot_run for option in options))):
        lines += _wrapped(text, first="  ")
    return [*lines, "", *_option_lines(options)[2:]]


def _option_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    """Return a row of p50 per option, its p10-p90 below, then its plans and overheads."""
    if not options:
        return ["no option runs this model"]
    kinds = [kind for kind in _RANKING_ORDER if any(_bill(option, kind) for option in options)]
    head = ("$/M tokens", "days", "tokens/s", "a GPU", "GPU-hours", *map(figures.price_name, kinds))
    tables = [_option_cells(option, kinds) for option in options]
    columns = zip(head, *(row for table in tables for row in table), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        _table_title(kinds),
        "",
        f"{'':>3}  {_row(head, widths)}  option",
    ]
    for rank, (option, table) in enumerate(zip(options, tables, strict=True), start=1):
        lines += _option_rows(rank, option, [_row(cells, widths) for cells in table])
    return lines[:-1]


def _table_title(kinds: Sequence[PriceKind]) -> str:
    """Say how the table is ordered; the answers above it count spot as well."""
    order = "cheapest output token first"
    if "spot" in kinds and len(kinds) > 1:
        order += f", {' or '.join(figures.price_name(kind) for kind in kinds if kind != 'spot')}"
    return f"p50, with p10-p90 below it; {order}"


def _option_rows(rank: int, option: HardwareEstimate, rows: Sequence[str]) -> list[str]:
    """Return the figures with the option's name next to them, then the explaining lines."""
    starts = [f"{rank:>3}  {rows[0]}  ", f"{'':>3}  {rows[1]}  "]
    names = textwrap.wrap(option.option, width=max(_WIDTH - len(starts[0]), 24))
    blank = " " * len(starts[0])
    lines = [
        f"{start}{name}".rstrip()
        for start, name in zip_longest((*starts, *[blank] * (len(names) - 2)), names, fillvalue="")
    ]
    explained = [text for plan in option.plans for text in _plan_texts(option, plan)]
    for text in (*explained, _loss_text(option)):
        lines += _wrapped(text, first=" " * 5)
    return [*lines, ""]


def _option_cells(
    option: HardwareEstimate, kinds: Iterable[PriceKind]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rank, per_gpu = ranking_bill(option), _only_plan_rate(option)
    bills = [_bill(option, kind) for kind in kinds]
    bands = (option.days, option.tokens_per_s, per_gpu, option.gpu_hours)
    middle = (
        figures.usd(rank.usd_per_million_tokens.p50) if rank else "no price",
        *(figures.two_figures(band.p50) if band else "by card" for band in bands),
        *(figures.usd(bill.usd.p50) if bill else "-" for bill in bills),
    )
    ends = (
        figures.usd_span(rank.usd_per_million_tokens) if rank else "",
        *(figures.span(band) if band else "" for band in bands),
        *(figures.usd_span(bill.usd) if bill else "" for bill in bills),
    )
    return middle, ends


def _bill(option: HardwareEstimate, kind: PriceKind) -> Dollars | None:
    return next((bill for bill in option.bills if bill.price.kind == kind), None)


def _only_plan_rate(option: HardwareEstimate) -> Band | None:
    """Return the rate per GPU; None for cards of several kinds, which share no rate."""
    return option.plans[0].tokens_per_s_per_gpu if len(option.plans) == 1 else None


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _plan_texts(option: HardwareEstimate, plan: ChosenPlan) -> tuple[str, str, str]:
    """Return three lines: the launch with its requests, the step with its parts, the readings."""
    stands_on = figures.plan_readings(plan)
    launch = (
        f"{figures.plan_layout(plan)}, {figures.plan_switches(plan)}; {figures.plan_requests(plan)}"
    )
    if len(option.plans) == 1:
        return launch, figures.plan_step(plan), stands_on
    band = plan.tokens_per_s_per_gpu
    rate = f"{figures.tokens_per_s(band.p50)} a GPU ({figures.span(band)})"
    return (
        f"{plan.num_gpus} x {plan.gpu}: {launch}",
        f"{rate}; {figures.plan_step(plan)}",
        stands_on,
    )


def _loss_text(option: HardwareEstimate) -> str:
    rank = ranking_bill(option)

    def priced(name: str, hours: float) -> str:
        usd = f" ({figures.usd(hours_usd(option, rank, hours))})" if rank else ""
        return f"{name} {figures.hours(hours)}{usd}"

    parts = [
        priced("start", option.start_hours),
        priced("tail", option.tail_hours),
        priced("restarts", option.restart_hours),
        *(
            f"preemptions {figures.usd(bill.preemption_usd)} {figures.price_name(bill.price.kind)}"
            for bill in option.bills
            if bill.preemption_usd
        ),
    ]
    return f"of which {', '.join(parts)}"


def _assumption_lines(estimate: RunEstimate) -> list[str]:
    if not estimate.assumptions or not estimate.options:
        return []
    lines = _wrapped(f"what widens the band most ({estimate.options[0].option})", first="")
    for item in estimate.assumptions:
        share = figures.percent(item.variance_share)
        lines += _wrapped(f"{item.name}: {item.value} ({item.source})", first=f"  {share:>5}  ")
        lines += _wrapped(f"narrowed by: {item.measure}", first=" " * 9)
    return lines


def _price_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    """Return one row per price, grouped by source."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for option in options:
        for bill in option.bills:
            price = bill.price
            cells = (
                figures.hourly_usd(price.usd_per_gpu_hour),
                figures.hourly_span(price),
                figures.price_name(price.kind),
                figures.price_date(price),
                option.option,
            )
            rows.setdefault(price.source, []).append(cells)
    if not rows:
        return ["prices: none known; pass --price to see dollars"]
    every = [cells for group in rows.values() for cells in group]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = ["prices per GPU-hour, with the range of all listings and the date they were read"]
    for source, group in rows.items():
        lines += _wrapped(f"{source}:", first="  ")
        for hourly, *rest, name in group:
            shown = (f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=False))
            lines += _wrapped(name, first=f"    {hourly:>{widths[0]}}  {'  '.join(shown)}  ")
    note = figures.stale_note([bill.price for option in options for bill in option.bills])
    return [*lines, *(_wrapped(note, first="  ") if note else ())]


def _unfit_lines(estimate: RunEstimate) -> list[str]:
    if not estimate.unfit:
        return []
    lines = ["does not run on"]
    for item in estimate.unfit:
        lines += _wrapped(f"{item.option}: {item.reason}", first="  ")
    return lines


def _warning_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    found = warnings_by_text(options)
    lines = ["warnings"] if found else []
    for text, names in found.items():
        lines += _wrapped(f"{', '.join(names)}: {text}", first="  ")
    return lines


def warnings_by_text(options: Iterable[HardwareEstimate]) -> dict[str, tuple[str, ...]]:
    """Return each warning once, with the options that it applies to."""
    found: dict[str, tuple[str, ...]] = {}
    for option in options:
        for text in _option_warnings(option):
            found[text] = (*found.get(text, ()), option.option)
    return found


def _option_warnings(option: HardwareEstimate) -> tuple[str, ...]:
    """Return the warnings of an option and its plans in order, without repeats."""
    of_plans = [text for plan in option.plans for text in plan.warnings]
    return tuple(dict.fromkeys((*option.warnings, *of_plans)))


def _wrapped(text: str, *, first: str) -> list[str]:
    """Wrap to 120 columns; later lines are indented to the text."""
    if len(first) > _WIDTH - 24:
        # No room next to it: the text starts on the next line.
        return [first.rstrip(), *_wrapped(text, first=" " * 9)]
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    ) or [first.rstrip()]
