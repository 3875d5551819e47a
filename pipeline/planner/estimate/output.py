"""An estimate as JSON (full precision, units in the keys) and as the table for a terminal.

The JSON keys are the interface of `python -m jobs.estimate --json`, and the page carries their
paths. Nothing is estimated here: options stand in the order in which they come.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from pipeline.planner.estimate import figures as figures
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
    """The bill that ranks an option: the user's own price, else on demand, else spot."""
    bills = {bill.price.kind: bill for bill in option.bills}
    return next((bills[kind] for kind in _RANKING_ORDER if kind in bills), None)


def output_tokens(estimate: RunEstimate) -> float:
    """Output tokens of the whole run, expected."""
    return estimate.num_completions * estimate.output_lengths.mean_tokens


def hours_usd(option: HardwareEstimate, bill: Dollars, hours: float) -> float:
    """What it costs to hold all cards of the option for a while."""
    return hours * option.num_gpus * bill.price.usd_per_gpu_hour


# --- JSON -------------------------------------------------------------------------------------


def estimate_json(estimate: RunEstimate) -> dict[str, Any]:
    """Return the estimate as plain values: its records, with the figures derived from them."""
    document = {**asdict(estimate), "output_tokens": output_tokens(estimate)}
    for option, record in zip(estimate.options, document["options"], strict=True):
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
                    {"name": row.name, "gib": row.bytes / GIB, "note": row.note}
                    for row in plan.budget
                ],
                total_gib=sum(row.bytes for row in plan.budget) / GIB,
                step_s={**step_json(plan.step), "whole": plan.step.step_s()},
            )
    return document


# --- text -------------------------------------------------------------------------------------


def estimate_text(estimate: RunEstimate) -> str:
    """The options as a table, then what the band hangs on, the prices, and what does not fit."""
    blocks = [
        _head_lines(estimate),
        _option_lines(estimate.options),
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


def _option_lines(options: Sequence[HardwareEstimate]) -> list[str]:
    """One row of p50 an option, its p10-p90 beneath, then its plans and what is lost on the way."""
    if not options:
        return ["no option runs this model"]
    kinds = [kind for kind in _RANKING_ORDER if any(_bill(option, kind) for option in options)]
    head = ("$/M tokens", "days", "tokens/s", "a GPU", "GPU-hours", *map(figures.price_name, kinds))
    tables = [_option_cells(option, kinds) for option in options]
    columns = zip(head, *(row for table in tables for row in table), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "p50, and p10-p90 beneath it; cheapest output token first",
        "",
        f"{'':>3}  {_row(head, widths)}  option",
    ]
    for rank, (option, table) in enumerate(zip(options, tables, strict=True), start=1):
        lines += _option_rows(rank, option, [_row(cells, widths) for cells in table])
    return lines[:-1]


def _option_rows(rank: int, option: HardwareEstimate, rows: Sequence[str]) -> list[str]:
    """The figures with the option's name beside them, then the lines that explain them."""
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
    """Cards of several kinds have no common rate."""
    return option.plans[0].tokens_per_s_per_gpu if len(option.plans) == 1 else None


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _plan_texts(option: HardwareEstimate, plan: ChosenPlan) -> tuple[str, str]:
    """What is launched and runs at once, and where the time goes; the card where there are two."""
    launch = (
        f"{figures.plan_layout(plan)}, {figures.plan_switches(plan)}; {figures.plan_requests(plan)}"
    )
    if len(option.plans) == 1:
        return launch, figures.plan_step(plan)
    band = plan.tokens_per_s_per_gpu
    rate = f"{figures.tokens_per_s(band.p50)} a GPU ({figures.span(band)})"
    return f"{plan.num_gpus} x {plan.gpu}: {launch}", f"{rate}; {figures.plan_step(plan)}"


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
    return f"of it: {', '.join(parts)}"


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
    """One row a price, under the source that it comes from."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for option in options:
        for bill in option.bills:
            price = bill.price
            cells = (
                figures.hourly_usd(price.usd_per_gpu_hour),
                figures.hourly_span(price),
                figures.price_name(price.kind),
                figures.price_date(price),
                "STALE" if price.stale else "",
                option.option,
            )
            rows.setdefault(price.source, []).append(cells)
    if not rows:
        return ["prices: none known; give your own to see dollars"]
    every = [cells for group in rows.values() for cells in group]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = ["prices of a GPU-hour, with the range that others ask, and when they were read"]
    for source, group in rows.items():
        lines += _wrapped(f"{source}:", first="  ")
        for hourly, *rest, name in group:
            shown = (f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=False))
            lines += _wrapped(name, first=f"    {hourly:>{widths[0]}}  {'  '.join(shown)}  ")
    return lines


def _unfit_lines(estimate: RunEstimate) -> list[str]:
    if not estimate.unfit:
        return []
    lines = ["runs on none of these"]
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
    """Each warning once, with the options that it holds for."""
    found: dict[str, tuple[str, ...]] = {}
    for option in options:
        for text in _option_warnings(option):
            found[text] = (*found.get(text, ()), option.option)
    return found


def _option_warnings(option: HardwareEstimate) -> tuple[str, ...]:
    """In the order in which they come, none twice."""
    of_plans = [text for plan in option.plans for text in plan.warnings]
    return tuple(dict.fromkeys((*option.warnings, *of_plans)))


def _wrapped(text: str, *, first: str) -> list[str]:
    """Lines of at most 120 columns; those after the first stand under the text."""
    if len(first) > _WIDTH - 24:
        # No room beside it: the text goes beneath.
        return [first.rstrip(), *_wrapped(text, first=" " * 9)]
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    ) or [first.rstrip()]
