"""Dollars: the founding bills, preemptions, the age of a price."""

import math
from datetime import date

import pytest

from pipeline.planner.estimate.cost import (
    CostedHours,
    Preemption,
    bill,
    dollar_assumptions,
    is_stale,
    long_request_warning,
    price_assumption,
)
from schemas.estimate import Assumption, Band, Price, PriceKind


def price(usd: float, *, low: float = 0.0, high: float = 0.0, kind: PriceKind = "own") -> Price:
    return Price(
        kind=kind, low_usd_per_gpu_hour=low or usd, usd_per_gpu_hour=usd,
        high_usd_per_gpu_hour=high or usd, source="a list", date="2026-10", stale=False,
    )  # fmt: skip


def sure(figure: float) -> Band:
    return Band(p10=figure, p50=figure, p90=figure)


def hours(gpu_hours: Band, rate: Band | None = None) -> CostedHours:
    """The founding job: 2.281e9 tokens on four cards."""
    days = gpu_hours.times(1 / 4 / 24)
    return CostedHours(
        days=days, gpu_hours=gpu_hours, tokens=2.281e9, tokens_per_s=rate or sure(1600)
    )


def spot(**changes: float) -> Preemption:
    """27B on RTX PRO 6000: 80 running, 72 ms a token, mean length 2,500 of CV 1.2."""
    given = {
        "hours_between": 12.0, "emitted_tokens": 1.22 * 2500, "seconds_a_token": 0.072,
        "start_s": 600.0, **changes,
    }  # fmt: skip
    return Preemption(**given, source="assumed")


def test_the_founding_bill() -> None:
    # 4 cards x 16.5 days x 24 h = 1,584 GPU-hours at $1.69 = $2,677; at $0.59 $935
    assert bill(hours(sure(1584)), price(1.69)).usd.p50 == pytest.approx(2677, abs=0.5)
    assert bill(hours(sure(1584)), price(0.59)).usd.p50 == pytest.approx(935, abs=1)


def test_dollars_a_million_tokens() -> None:
    # 1.69 / (3.6e-3 x 400) = $1.17, which is 2,677 / 2,281
    made = bill(hours(sure(1584)), price(1.69))
    assert made.usd_per_million_tokens.p50 == pytest.approx(1.174, abs=0.001)


def test_preemptions_lengthen_the_job_as_they_lengthen_the_bill() -> None:
    calm, preempted = (
        bill(hours(sure(1584)), price(0.59)),
        bill(hours(sure(1584)), price(0.59), spot()),
    )
    assert calm.days.p50 == pytest.approx(16.5)
    for band in ("p10", "p50", "p90"):
        longer = getattr(preempted.days, band) / getattr(calm.days, band)
        assert longer == pytest.approx(1 + spot().fraction())
    assert preempted.usd.p50 / calm.usd.p50 == pytest.approx(1 + spot().fraction())


def test_preemptions_cost_two_percent() -> None:
    # 1.22 x 2,500 x 0.072 s = 219.6 s = 3.7 minutes are lost, 10 to start again, of 720: 1.9 %
    assert spot().lost_s() / 60 == pytest.approx(3.66, abs=0.01)
    assert spot().fraction() == pytest.approx(0.019, abs=0.0001)
    made = bill(hours(sure(1584)), price(0.59, kind="spot"), spot())
    assert made.preemption_usd == pytest.approx(935 * 0.019, rel=0.01)
    assert made.usd.p50 == pytest.approx(935 * 1.019, rel=0.001)
    assert bill(hours(sure(1584)), price(0.59)).preemption_usd == 0


def test_requests_that_outlast_the_node_are_told() -> None:
    # 32,768 tokens x 72 ms = 39 minutes
    assert long_request_warning(spot(), 32_768) is None
    said = long_request_warning(spot(hours_between=0.5), 32_768)
    assert said is not None
    assert "32,768 tokens runs 0.7 hours, longer than the 0.5 hours" in said


def test_the_range_of_a_price_widens_dollars_in_quadrature() -> None:
    # Hours 1.5 times up, the price 2 times up: e^root(0.405^2 + 0.693^2) = e^0.803 = 2.23
    made = bill(
        hours(Band(p10=1056, p50=1584, p90=2376), Band(p10=1280, p50=1600, p90=2000)),
        price(1.69, low=0.845, high=3.38),
    )
    assert made.usd.p90 / made.usd.p50 == pytest.approx(2.23, abs=0.01)
    assert made.usd.p50 / made.usd.p10 == pytest.approx(2.23, abs=0.01)
    # The rate alone, 1.25 either way: e^root(0.223^2 + 0.693^2) = e^0.728 = 2.07
    per_million = made.usd_per_million_tokens
    assert per_million.p90 / per_million.p50 == pytest.approx(2.07, abs=0.01)


def test_the_price_tells_its_part_of_the_dollars() -> None:
    told = price_assumption(price(2.0, low=1.0, high=4.0), Band(p10=100, p50=200, p90=400))
    assert told.variance_share == pytest.approx(0.5)
    assert told.value == "$2.00 per GPU-hour ($1.00 to $4.00)"
    assert price_assumption(price(2.0), sure(100)).variance_share == 0


def test_parts_of_the_dollars_add_up_widest_first() -> None:
    def part(name: str, share: float) -> Assumption:
        return Assumption(name=name, value="", source="", variance_share=share, measure="")

    of_days = (part("rate model", 0.75), part("availability", 0.25))
    # The price's range is the hours' own: half of the variance; the others share the other half.
    found = dollar_assumptions(
        of_days, price(2.0, low=1.0, high=4.0), Band(p10=100, p50=200, p90=400)
    )
    assert [item.name for item in found] == ["own price", "rate model", "availability"]
    assert [item.variance_share for item in found] == pytest.approx([0.5, 0.375, 0.125])


def test_hardware_of_ones_own_may_cost_nothing() -> None:
    made = bill(hours(Band(p10=100, p50=200, p90=400)), price(0.0))
    assert made.usd == Band(p10=0, p50=0, p90=0)
    assert not math.isnan(price_assumption(price(0.0), sure(1)).variance_share)


@pytest.mark.parametrize(
    ("date_text", "stale"),
    [
        ("2026-11-30", False),
        ("2026-09-01", False),  # 90 days before
        ("2026-08-31", True),
        ("2026-08", True),  # counts as 31 August
        ("2026-09", False),
        ("2025", True),
        ("not visible", True),
        ("", True),
        ("2026-13", True),
        ("2026-02-30", True),
        ("2026-12-05", False),
    ],
)
def test_a_price_is_stale_after_ninety_days(date_text: str, stale: bool) -> None:
    assert is_stale(date_text, date(2026, 11, 30)) is stale
