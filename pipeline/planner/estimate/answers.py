"""The cheapest option and the fastest one, at any price that is known.

Spot counts where it is priced, with the time and the dollars that preemptions add. Options that
this product cannot run are never an answer.
"""

from collections.abc import Iterator, Sequence

from schemas.estimate import Answer, HardwareEstimate


def cheapest(options: Sequence[HardwareEstimate]) -> Answer | None:
    """Return the cheapest million tokens; None where nothing has a price."""
    priced = [answer for answer in _answers(options) if answer.usd_per_million_tokens]
    return min(priced, key=_usd, default=None)


def fastest(options: Sequence[HardwareEstimate]) -> Answer | None:
    """Return the fewest days, and the cheaper one of two that are equally fast."""
    return min(_answers(options), key=lambda answer: (answer.days.p50, _usd(answer)), default=None)


def _answers(options: Sequence[HardwareEstimate]) -> Iterator[Answer]:
    for option in options:
        if option.cannot_run is not None:
            continue
        for bill in option.bills:
            yield Answer(
                option=option.option,
                price_kind=bill.price.kind,
                days=bill.days,
                usd=bill.usd,
                usd_per_million_tokens=bill.usd_per_million_tokens,
                preemption_usd=bill.preemption_usd,
            )
        if not option.bills:
            yield Answer(
                option=option.option,
                price_kind=None,
                days=option.days,
                usd=None,
                usd_per_million_tokens=None,
                preemption_usd=0.0,
            )


def _usd(answer: Answer) -> float:
    known = answer.usd_per_million_tokens
    return known.p50 if known else float("inf")
