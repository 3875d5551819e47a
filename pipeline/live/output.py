"""A running job's estimate as JSON and as text."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.planner.estimate import figures as figures
from schemas.estimate import Band, GroupUpdate, OutputLengths, RunUpdate
from schemas.units import SECONDS_PER_DAY

_WIDTH, _LABEL = 120, 11
# A median below this many units is shown in the next smaller unit.
_LEAST_UNITS = 1.5


UNKNOWN = "not known yet"


def time_left(days: Band | None) -> str:
    """Return for example 1.6 days (1.3-2.1), in the unit that suits the median."""
    if days is None:
        return UNKNOWN
    if days.p90 == 0:
        return "none"
    units = ((1, "days"), (24, "h"), (1440, "min"), (SECONDS_PER_DAY, "s"))
    per_day, unit = next((u for u in units if days.p50 * u[0] >= _LEAST_UNITS), units[-1])
    scaled = days.times(per_day)
    return f"{figures.two_figures(scaled.p50)} {unit} ({figures.span(scaled)})"


def update_json(update: RunUpdate) -> dict[str, Any]:
    """Return the whole record in plain JSON types."""
    return asdict(update)


def update_text(update: RunUpdate) -> str:
    """Return the update for a terminal, each measured figure followed by the plan's."""
    return "\n".join(_lines(update))


def _lines(update: RunUpdate) -> Iterator[str]:
    rows = f"{update.rows_done:,} of {update.rows_total:,} rows done"
    left = f"{figures.large_count(update.completions_left)} completions"
    tokens = f"{figures.large_count(update.tokens_left)} tokens left"
    yield _line("job", f"{update.model}: {rows}, {left} and {tokens}")
    planned = None if update.expected_days_left is None else time_left(update.expected_days_left)
    yield _line("time left", _with_plan(time_left(update.days_left), planned))
    if update.usd_left is not None and update.price is not None:
        price = f"{figures.hourly_usd(update.price.usd_per_gpu_hour)} per GPU-hour"
        stale = ", stale" if update.price.stale else ""
        source = f"({update.price.source}, {figures.price_date(update.price)}{stale})"
        yield _line("dollars", f"{figures.usd_span(update.usd_left)} to go at {price} {source}")
    for group in update.groups:
        yield _line("engines", _group_text(group))
    yield _line("lengths", _lengths_text(update))
    band = update.availability
    yield _line("available", f"{band.p50:.2f} of the time ({band.p10:.2f}-{band.p90:.2f})")
    if update.counted_by == "answers":
        yield _line("counted by", "completions, because the engines export no counters")
    if update.no_dry_run is not None:
        yield _line("plan", f"none to compare with: {update.no_dry_run}")
    elif not update.deviations:
        yield _line("plan", "every measurement is within its band")
    for deviation in update.deviations:
        yield _line("deviates", f"{deviation.input.replace('_', ' ')}: {deviation.sentence}")
    for part in update.assumptions[:3]:
        share = figures.percent(part.variance_share)
        yield _line("depends on", f"{part.name} ({share} of the band): {part.value}; {part.source}")


def _line(label: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=" " * _LABEL,
        break_on_hyphens=False,
    )  # fmt: skip


def _with_plan(measured: str, planned: str | None) -> str:
    return measured if planned is None else f"{measured}; plan {planned}"


def _group_text(group: GroupUpdate) -> str:
    rate = "tokens/s not known yet"
    if group.tokens_per_s is not None:
        rate = f"{figures.span(group.tokens_per_s)} tokens/s"
    if group.expected_tokens_per_s is not None:
        rate = _with_plan(rate, figures.span(group.expected_tokens_per_s))
    running = "running requests not known yet"
    if group.running_requests is not None:
        running = f"{figures.average(group.running_requests)} requests in each"
    if group.expected_running_requests is not None:
        running = _with_plan(running, figures.average(group.expected_running_requests))
    parts = [f"{group.name}, {group.engines} running: {rate}", running]
    if group.accept_length is not None:
        accept = f"accept length {group.accept_length:.2g}"
        planned = group.expected_accept_length
        parts.append(_with_plan(accept, None if planned is None else f"{planned:.2g}"))
    readings = figures.average(group.independent_readings)
    parts.append(
        f"{readings} independent readings"
        if group.independent_readings
        else "no steady reading yet"
    )
    return "; ".join(parts)


def _lengths_text(update: RunUpdate) -> str:
    completions = f"{update.completions_seen:,} finished and {update.running_seen:,} running"
    measured = f"{_length(update.output_lengths)} by {completions}"
    cut = figures.percent(update.output_lengths.at_limit_fraction)
    limit = update.output_lengths.limit_tokens
    planned = _length(update.expected_output_lengths)
    return f"{_with_plan(measured, planned)}; {cut} end at the limit of {limit:,}"


def _length(lengths: OutputLengths) -> str:
    error = 100 * lengths.mean_relative_error
    return f"{figures.count(lengths.mean_tokens)} tokens ± {error:.0f} %, CV {lengths.cv:.1f}"
