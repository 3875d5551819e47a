"""Prices per GPU-hour: the listing nearest to the median, with the range of all listings."""

from dataclasses import replace
from datetime import date

import pytest

from pipeline.errors import PlanError
from pipeline.planner.cards import Listing, gpu_named
from pipeline.planner.estimate import prices
from pipeline.planner.estimate.prices import OWN_PRICE, prices_of
from schemas.estimate import PriceKind

TODAY = date(2026, 12, 1)
CARD = replace(gpu_named("b200"), name="a card")


def listing(
    low: float, high: float, day: str, source: str, kind: PriceKind = "on_demand"
) -> Listing:
    return Listing(
        kind=kind, low_usd_per_gpu_hour=low, high_usd_per_gpu_hour=high, source=source, date=day
    )


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Listing]:
    """Listings of every card, for a test to fill."""
    found: list[Listing] = []
    monkeypatch.setattr(prices, "listed_prices", lambda gpu: tuple(found))
    return found


def test_quote_is_the_listing_nearest_to_the_median(listed: list[Listing]) -> None:
    # Middles 2, 3 and 6: the median is 3.
    listed += [
        listing(1, 3, "2026-11-01", "cheap"),
        listing(2, 4, "2026-11-02", "middle"),
        listing(5, 7, "2026-11-03", "dear"),
    ]
    (price,) = prices_of(CARD, TODAY)
    assert (price.kind, price.source, price.date) == ("on_demand", "middle", "2026-11-02")
    assert price.usd_per_gpu_hour == 3
    assert (price.low_usd_per_gpu_hour, price.high_usd_per_gpu_hour) == (1, 7)
    assert not price.stale


def test_newer_of_two_equally_near_listings_is_quoted(listed: list[Listing]) -> None:
    # Middles 2 and 4: both are 1 from the median of 3.
    listed += [listing(1, 3, "2026-10-01", "old"), listing(3, 5, "2026-11-20", "new")]
    assert prices_of(CARD, TODAY)[0].source == "new"


def test_listing_without_a_date_is_stale_and_says_so(listed: list[Listing]) -> None:
    listed.append(listing(2, 2, "", "undated"))
    (price,) = prices_of(CARD, TODAY)
    assert (price.date, price.stale) == ("date not known", True)


def test_on_demand_comes_before_spot_whatever_their_order(listed: list[Listing]) -> None:
    listed += [listing(1, 1, "2026-11-01", "s", "spot"), listing(2, 2, "2026-06-01", "d")]
    on_demand, spot = prices_of(CARD, TODAY)
    assert (on_demand.kind, on_demand.usd_per_gpu_hour) == ("on_demand", 2)
    assert (spot.kind, spot.usd_per_gpu_hour) == ("spot", 1)
    # 1 June is 183 days before 1 December, 1 November 30 days.
    assert (on_demand.stale, spot.stale) == (True, False)


def test_own_prices_replace_every_listing(listed: list[Listing]) -> None:
    listed.append(listing(2, 4, "2026-11-01", "a list"))
    own, spot = prices_of(CARD, TODAY, own_usd=1.5, own_spot_usd=0.5)
    assert (own.kind, spot.kind) == ("own", "spot")
    for price, usd in ((own, 1.5), (spot, 0.5)):
        assert (price.low_usd_per_gpu_hour, price.high_usd_per_gpu_hour) == (usd, usd)
        assert (price.source, price.date, price.stale) == (OWN_PRICE, "2026-12-01", False)
    assert [price.kind for price in prices_of(CARD, TODAY, own_spot_usd=0.5)] == ["spot"]
    assert [price.kind for price in prices_of(CARD, TODAY, own_usd=0.0)] == ["own"]


@pytest.mark.parametrize("usd", [-1.0, float("nan")])
def test_own_price_below_zero_is_refused(usd: float) -> None:
    with pytest.raises(PlanError, match="USD per GPU-hour; it must be 0 or more"):
        prices_of(CARD, TODAY, own_usd=usd)


def test_card_that_nobody_lists_has_no_price(listed: list[Listing]) -> None:
    assert prices_of(CARD, TODAY) == ()
