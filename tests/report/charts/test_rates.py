"""Tokens/s against running requests: positions worked out by hand."""

import pytest

from pipeline.report.charts.rates import rate_at, rate_chart
from schemas.estimate import RateCurve, RatePoint


def curve(*points: tuple[int, float], mtp: bool = False) -> RateCurve:
    return RateCurve(
        mtp=mtp,
        cap_requests=points[-1][0] if points else 0,
        points=tuple(RatePoint(running_requests=x, tokens_per_s=y) for x, y in points),
    )


def test_rate_lies_on_the_line_between_points_and_level_beyond_them() -> None:
    line = curve((10, 100.0), (20, 180.0), (40, 220.0))
    assert [rate_at(line, x) for x in (1, 10, 15, 20, 30, 40, 90)] == [
        100.0, 100.0, 140.0, 180.0, 200.0, 220.0, 220.0,
    ]  # fmt: skip


def test_lines_share_axes_and_end_at_their_caps() -> None:
    chart = rate_chart(
        (curve((1, 50.0), (100, 500.0)), curve((1, 90.0), (20, 300.0), mtp=True)), 60
    )
    plain, mtp = chart.lines
    assert plain.line.polylines == ("1,90 100,0",)
    assert mtp.line.polylines == ("1,82 20,40",)
    assert (plain.cap.left_percent, plain.cap.bottom_percent) == (100.0, 100.0)
    assert (mtp.cap.left_percent, mtp.cap.bottom_percent) == (20.0, 60.0)
    assert (plain.cap.label_left, mtp.cap.label_left) == (True, False)
    assert chart.break_even is not None
    assert chart.break_even.percent == 60.0


def test_axis_reaches_a_break_even_near_the_caps_and_leaves_out_a_far_one() -> None:
    one = (curve((1, 50.0), (100, 500.0)),)
    near, far, none = rate_chart(one, 140), rate_chart(one, 400), rate_chart(one, None)
    assert near.break_even is not None
    assert near.axes.x_ticks[-1].value == 150
    assert near.break_even.percent == pytest.approx(93.33)
    assert (far.break_even, far.axes.x_ticks[-1].value) == (None, 100)
    assert none.break_even is None


def test_lower_of_two_caps_that_nearly_meet_is_named_beneath() -> None:
    chart = rate_chart(
        (curve((1, 50.0), (48, 480.0)), curve((1, 90.0), (48, 450.0), mtp=True)), None
    )
    assert [line.label_above for line in chart.lines] == [True, False]
    apart = rate_chart(
        (curve((1, 50.0), (48, 480.0)), curve((1, 90.0), (48, 200.0), mtp=True)), None
    )
    assert [line.label_above for line in apart.lines] == [True, True]


def test_curve_without_points_is_left_out() -> None:
    chart = rate_chart((curve((1, 50.0), (8, 200.0)), curve(mtp=True)), None)
    assert [line.mtp for line in chart.lines] == [False]
    assert rate_chart((), 12).lines == ()


# -- over time


def test_break_even_is_shown_up_to_half_beyond_the_cap() -> None:
    one = (curve((1, 50.0), (100, 500.0)),)
    assert rate_chart(one, 150).break_even is not None
    assert rate_chart(one, 151).break_even is None


def test_caps_at_a_distance_are_both_named_above() -> None:
    # 6 percent of the height apart, but 52 percent of the width.
    chart = rate_chart(
        (curve((1, 50.0), (100, 480.0)), curve((1, 90.0), (48, 450.0), mtp=True)), None
    )
    assert [line.label_above for line in chart.lines] == [True, True]
