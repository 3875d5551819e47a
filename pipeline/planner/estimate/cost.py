"""Dollars for GPU-hours at one price: the bill, its band, and what start, tail and losses add.

A price arrives with its range, source and date; today's date arrives with the question.
"""

import calendar
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from schemas.estimate import Assumption, Band, Dollars, Price
from schemas.units import P90_SDS

STALE_DAYS = 90
# Hours between two preemptions of one node. assumed: no provider promises any; half a day
SPOT_HOURS_BETWEEN_PREEMPTIONS = 12.0
_MILLION = 1_000_000


# --- how old a price is ------------------------------------------------------------------------


def is_stale(date_text: str, today: date) -> bool:
    """Whether a price is more than 90 days old, or of no known date.

    A month alone counts from its last day, a year from the last day of December.
    """
    read = _last_day_of(date_text.strip())
    return read is None or (today - read).days > STALE_DAYS


def _last_day_of(date_text: str) -> date | None:
    matched = re.fullmatch(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?", date_text)
    if matched is None:
        return None
    year, month = int(matched[1]), int(matched[2] or 12)
    if not (year >= 1 and 1 <= month <= 12):
        return None
    last = calendar.monthrange(year, month)[1]
    day = int(matched[3] or last)
    return date(year, month, day) if 1 <= day <= last else None


# --- preemptions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What a preemption of one node loses. Finished rows are durable, running ones are not."""

    hours_between: float
    emitted_tokens: float
    """Mean of a running request: the mean context less the prompt."""
    seconds_a_token: float
    """Of one running request, at the full batch."""
    start_s: float
    source: str

    def lost_s(self) -> float:
        """Time of the whole node that a preemption makes worthless."""
        return self.emitted_tokens * self.seconds_a_token

    def fraction(self) -> float:
        """Of the node's time: lost work and starting again, once in so many hours."""
        return (self.lost_s() + self.start_s) / (self.hours_between * 3600)


def long_request_warning(preemption: Preemption, limit_tokens: int) -> str | None:
    """A sentence where the longest requests outlast the time between preemptions."""
    hours = limit_tokens * preemption.seconds_a_token / 3600
    if hours <= preemption.hours_between:
        return None
    return (
        f"a completion of {limit_tokens:,} tokens runs {hours:.1f} hours, longer than the "
        f"{preemption.hours_between:g} hours between preemptions ({preemption.source}): most of "
        "those are lost each time; send the longest first or lower max_tokens"
    )


# --- the bill ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedHours:
    """What one option spends at the median, in hours of the whole option, and its band."""

    num_gpus: int
    gpu_hours: Band
    start_hours: float
    tail_hours: float
    restart_hours: float
    tokens: float
    """Output tokens of the whole job."""
    tokens_per_s: Band
    """Of all cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadDollars:
    """Parts of a bill's p50 that generate nothing."""

    start_usd: float
    tail_usd: float
    restart_usd: float
    preemption_usd: float


def bill(
    hours: CostedHours,
    price: Price,
    preemption: Preemption | None = None,
    *,
    fixed_usd: float = 0.0,
) -> Dollars:
    """GPU-hours at a price. `fixed_usd` is storage and egress.

    A price's range widens the dollars, never the days: the two add in quadrature of logarithms.
    """
    lost = preemption.fraction() if preemption else 0.0
    usd = hours.gpu_hours.p50 * price.usd_per_gpu_hour * (1 + lost) + fixed_usd
    per_million = usd / hours.tokens * _MILLION
    rate = hours.tokens_per_s
    return Dollars(
        price=price,
        usd=_band(usd, hours.gpu_hours, price),
        # Tokens that are never written are never paid for: lengths widen the sum, not this.
        usd_per_million_tokens=_band(
            per_million, Band(p10=1 / rate.p90, p50=1 / rate.p50, p90=1 / rate.p10), price
        ),
        preemption_usd=hours.gpu_hours.p50 * price.usd_per_gpu_hour * lost,
    )


def _band(middle: float, spread: Band, price: Price) -> Band:
    """About the middle: the spread of hours and the range of the price."""
    down = math.hypot(
        _log_ratio(spread.p50, spread.p10),
        _log_ratio(price.usd_per_gpu_hour, price.low_usd_per_gpu_hour),
    )
    up = math.hypot(
        _log_ratio(spread.p90, spread.p50),
        _log_ratio(price.high_usd_per_gpu_hour, price.usd_per_gpu_hour),
    )
    return Band(p10=middle * math.exp(-down), p50=middle, p90=middle * math.exp(up))


def _log_ratio(more: float, less: float) -> float:
    """Nothing for hardware of one's own at no price."""
    return math.log(more / less) if less > 0 else 0.0


def overhead_dollars(
    hours: CostedHours, price: Price, preemption: Preemption | None = None
) -> OverheadDollars:
    """What the median bill holds of start, tail, restarts and preemptions."""
    an_hour = hours.num_gpus * price.usd_per_gpu_hour
    return OverheadDollars(
        start_usd=hours.start_hours * an_hour,
        tail_usd=hours.tail_hours * an_hour,
        restart_usd=hours.restart_hours * an_hour,
        preemption_usd=bill(hours, price, preemption).preemption_usd,
    )


def usd_per_million_tokens(usd_per_gpu_hour: float, tokens_per_s_per_gpu: float) -> float:
    """While it generates, no overhead counted: a GPU writes 3,600 s x its rate in an hour."""
    return usd_per_gpu_hour / (3600 * tokens_per_s_per_gpu) * _MILLION


def dollar_assumptions(
    of_days: Sequence[Assumption], price: Price, gpu_hours: Band
) -> tuple[Assumption, ...]:
    """Parts of the variance of log dollars, widest first: what days hang on, and the price."""
    of_price = price_assumption(price, gpu_hours)
    left = 1 - of_price.variance_share
    found = [replace(item, variance_share=left * item.variance_share) for item in of_days]
    return tuple(sorted([*found, of_price], key=lambda item: -item.variance_share))


def price_assumption(price: Price, gpu_hours: Band) -> Assumption:
    """The price's part of the variance of log dollars. Days do not hang on it."""
    of_price = _log_ratio(price.high_usd_per_gpu_hour, price.low_usd_per_gpu_hour) / 2 / P90_SDS
    of_hours = _log_ratio(gpu_hours.p90, gpu_hours.p10) / 2 / P90_SDS
    total = of_price**2 + of_hours**2
    age = ", more than 90 days old" if price.stale else ""
    return Assumption(
        name=f"{price.kind.replace('_', ' ')} price",
        value=f"${price.usd_per_gpu_hour:.2f} a GPU-hour "
        f"(${price.low_usd_per_gpu_hour:.2f} to ${price.high_usd_per_gpu_hour:.2f})",
        source=f"{price.source}, {price.date}{age}",
        variance_share=of_price**2 / total if total else 0.0,
        measure="the provider's price of the day",
    )
