"""Scatter of days and dollars: places worked out by hand, and the frontier's property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.charts.scatter import Spot, frontier, scatter
from schemas.estimate import Band


def spot(number: int, days: float, usd: float, width: float = 1.0) -> Spot:
    def band(middle: float) -> Band:
        return Band(p10=middle / width, p50=middle, p90=middle * width)

    return Spot(number=number, tone="spot", title=f"{number}", days=band(days), usd=band(usd))


def test_dots_and_arms_are_on_logarithmic_axes() -> None:
    # Days go from 1 to 100 and dollars from 10 to 1,000, with 15 % of room at each end.
    drawn = scatter([spot(1, 1.0, 1000.0), spot(2, 100.0, 10.0), spot(3, 10.0, 100.0, width=2.0)])
    assert drawn is not None
    middle = drawn.dots[2]
    assert (middle.left_percent, middle.bottom_percent) == (50.0, 50.0)
    low, high = middle.left_arm
    # log(2) / log(100 x 1.15^2) is 14.2 %.
    assert (low, high) == pytest.approx((35.8, 64.2), abs=0.1)
    assert low + high == pytest.approx(100)
    assert {tick.value for tick in drawn.x_ticks} >= {1, 10, 100}
    assert drawn.frontier.split()[1] == "50,50"
    assert [label.text for label in drawn.labels] == ["1", "3", "2"]


def test_owned_cards_that_cost_nothing_have_even_axes() -> None:
    drawn = scatter([spot(1, 2.0, 0.0), spot(2, 1.0, 10.0)])
    assert drawn is not None
    assert [dot.bottom_percent for dot in drawn.dots] == [0.0, pytest.approx(100 / 1.15, abs=0.01)]
    everything_free = scatter([spot(1, 2.0, 0.0)])
    assert everything_free is not None
    assert everything_free.dots[0].bottom_percent == 0.0


def test_close_dots_share_a_label() -> None:
    drawn = scatter([spot(1, 1.0, 100.0), spot(2, 1.01, 99.0), spot(3, 100.0, 1.0)])
    assert drawn is not None
    assert [label.text for label in drawn.labels] == ["1, 2", "3"]


def test_nothing_to_draw_is_no_chart() -> None:
    assert scatter([]) is None


figures = st.floats(min_value=0.01, max_value=1e6)


@given(st.lists(st.tuples(figures, figures), min_size=1, max_size=40))
def test_frontier_has_what_nothing_beats_and_nothing_else(pairs: list[tuple[float, float]]) -> None:
    spots = [spot(number, days, usd) for number, (days, usd) in enumerate(pairs)]
    efficient = frontier(spots)
    assert efficient
    for one in spots:
        beaten = any(
            other.days.p50 <= one.days.p50
            and other.usd.p50 <= one.usd.p50
            and (other.days.p50, other.usd.p50) != (one.days.p50, one.usd.p50)
            for other in spots
        )
        twin = any(
            (other.days.p50, other.usd.p50) == (one.days.p50, one.usd.p50) for other in efficient
        )
        assert twin != beaten
