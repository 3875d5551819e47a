"""Dollars for GPU-hours at one price: the bill, its band, and the cost of preemptions.

A price comes with its range, source and date; the caller passes today's date.
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
_MILLION = 1_000_000


# --- how old a price is ------------------------------------------------------------------------


def is_stale(date_text: str, today: date) -> bool:
    """Return True for a price more than 90 days old, or with no known date.

    A bare month counts from its last day, a bare year from 31 December.
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
    """The loss when one node is preempted. Finished rows are durable, running ones are not."""

    hours_between: float
    emitted_tokens: float
    """Mean over running requests: the mean context minus the prompt."""
    seconds_a_token: float
    """Seconds per token of one running request at the full batch."""
    start_s: float
    source: str

    def lost_s(self) -> float:
        """Return the node's time that one preemption makes worthless."""
        return self.emitted_tokens * self.seconds_a_token

    def fraction(self) -> float:
        """Return the fraction of the node's time spent on lost work and restarts."""
        return (self.lost_s() + self.start_s) / (self.hours_between * 3600)


def long_request_warning(preemption: Preemption, limit_tokens: int) -> str | None:
    """Return a warning where the longest requests outlast the time between preemptions."""
    hours = limit_tokens * preemption.seconds_a_token / 3600
    if hours <= preemption.hours_between:
        return None
    return (
        f"a completion of {limit_tokens:,} tokens runs {hours:.1f} hours, longer than the "
        f"{preemption.hours_between:g} hours between preemptions ({preemption.source}): most of "
        "them are lost each time; start the longest first, or lower max_tokens"
    )


# --- the bill ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedHours:
    """Days and GPU-hours of one option without preemptions, and the tokens generated in them."""

    days: Band
    gpu_hours: Band
    tokens: float
    """Output tokens of the whole job."""
    tokens_per_s: Band
    """Tokens per second of all cards."""


def bill(
    hours: CostedHours,
    price: Price,
    preemption: Preemption | None = None,
) -> Dollars:
    """Price the GPU-hours, with those that preemptions add.

    The price's range widens the dollars, never the days: both add in quadrature as logarithms.
    """
    lost = preemption.fraction() if preemption else 0.0
    usd = hours.gpu_hours.p50 * price.usd_per_gpu_hour * (1 + lost)
    per_million = usd / hours.tokens * _MILLION
    rate = hours.tokens_per_s
    return Dollars(
        price=price,
        days=hours.days.times(1 + lost),
        usd=_band(usd, hours.gpu_hours, price),
        # Tokens that are never generated cost nothing: lengths widen the sum, not this rate.
        usd_per_million_tokens=_band(
            per_million, Band(p10=1 / rate.p90, p50=1 / rate.p50, p90=1 / rate.p10), price
        ),
        preemption_usd=hours.gpu_hours.p50 * price.usd_per_gpu_hour * lost,
    )


def _band(middle: float, spread: Band, price: Price) -> Band:
    """Combine the spread of the hours with the range of the price around `middle`."""
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
    """Return log(more / less), or 0 where owned hardware has no price."""
    return math.log(more / less) if less > 0 else 0.0


def dollar_assumptions(
    of_days: Sequence[Assumption], price: Price, gpu_hours: Band
) -> tuple[Assumption, ...]:
    """Return the variance shares of log dollars, widest first: those of the days, and the price."""
    of_price = price_assumption(price, gpu_hours)
    left = 1 - of_price.variance_share
    found = [replace(item, variance_share=left * item.variance_share) for item in of_days]
    return tuple(sorted([*found, of_price], key=lambda item: -item.variance_share))


def price_assumption(price: Price, gpu_hours: Band) -> Assumption:
    """Return the price's share of the variance of log dollars. Days do not depend on it."""
    of_price = _log_ratio(price.high_usd_per_gpu_hour, price.low_usd_per_gpu_hour) / 2 / P90_SDS
    of_hours = _log_ratio(gpu_hours.p90, gpu_hours.p10) / 2 / P90_SDS
    total = of_price**2 + of_hours**2
    age = ", more than 90 days old" if price.stale else ""
    return Assumption(
        name=f"{price.kind.replace('_', ' ')} price",
        value=f"${price.usd_per_gpu_hour:.2f} per GPU-hour "
        f"(${price.low_usd_per_gpu_hour:.2f} to ${price.high_usd_per_gpu_hour:.2f})",
        source=f"{price.source}, {price.date}{age}",
        variance_share=of_price**2 / total if total else 0.0,
        measure="the provider's price of the day",
    )
