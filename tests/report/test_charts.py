"""Charts: positions of marks, worked out by hand."""

from collections import Counter

import pytest

from pipeline.report.charts import (
    Series,
    axis_ticks,
    band_bar,
    bar_scale,
    histogram,
    percent,
    rate_at,
    rate_chart,
    stacked_segments,
    time_chart,
    time_ticks,
)
from schemas.estimate import Band, RateCurve, RatePoint
from schemas.plan import BudgetRow


def curve(*points: tuple[int, float], mtp: bool = False) -> RateCurve:
    return RateCurve(
        mtp=mtp,
        cap_requests=points[-1][0] if points else 0,
        points=tuple(RatePoint(running_requests=x, tokens_per_s=y) for x, y in points),
    )


def rows(*sizes: int) -> tuple[BudgetRow, ...]:
    return tuple(BudgetRow(name=f"row {i}", bytes=size, note="") for i, size in enumerate(sizes))


def test_bar_is_to_scale_from_zero() -> None:
    bar = band_bar(Band(p10=5.0, p50=6.0, p90=8.0), 16.0)
    assert (bar.low_percent, bar.middle_percent, bar.high_percent) == (31.25, 37.5, 50.0)


def test_scale_ends_at_the_highest_unless_that_presses_the_others_flat() -> None:
    def bands(*ends: float) -> list[Band]:
        return [Band(p10=end / 2, p50=end / 1.5, p90=end) for end in ends]

    assert bar_scale(bands(1.2, 2.9, 8.4)) == 8.4
    assert bar_scale(bands(1.0, 2.0, 3.0, 110.0)) == 10.0  # the median is 2.5
    assert bar_scale([]) == 0.0
    far = band_bar(bands(110.0)[0], 10.0)
    assert (far.low_percent, far.high_percent, far.beyond) == (100.0, 100.0, True)
    assert not band_bar(bands(10.0)[0], 10.0).beyond


def test_bar_on_an_empty_scale_has_no_length() -> None:
    assert band_bar(Band(p10=0.0, p50=0.0, p90=0.0), 0.0).high_percent == 0.0


def test_segments_fill_the_bar_and_a_row_below_zero_has_no_width() -> None:
    widths = [segment.width_percent for segment in stacked_segments(rows(30, 50, 20, -10))]
    assert widths == [30.0, 50.0, 20.0, 0.0]
    assert stacked_segments(()) == ()


@pytest.mark.parametrize(
    ("highest", "values"),
    [
        (91, [0, 20, 40, 60, 80, 100]),
        (100, [0, 20, 40, 60, 80, 100]),
        (1142.0, [0, 250, 500, 750, 1000, 1250]),
        (297, [0, 100, 200, 300]),
        (6, [0, 2, 4, 6]),
        (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, [0]),
    ],
)
def test_ticks_are_round_and_end_at_or_above_the_highest(
    highest: float, values: list[float]
) -> None:
    ticks = axis_ticks(highest)
    assert [tick.value for tick in ticks] == pytest.approx(values)
    assert ticks[0].percent == 0.0
    assert len(ticks) == 1 or ticks[-1].percent == 100.0


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


@pytest.mark.parametrize(
    ("span_s", "unit", "values"),
    [
        (90.0, "s", [0, 20, 40, 60, 80]),
        (3600.0, "min", [0, 20, 40, 60]),
        (8 * 3600.0, "h", [0, 2, 4, 6, 8]),
        (3.5 * 86400, "days", [0, 1, 2, 3]),
    ],
)
def test_time_has_round_figures_of_its_own_unit(
    span_s: float, unit: str, values: list[int]
) -> None:
    ticks, name = time_ticks(span_s)
    assert name == unit
    assert [tick.value for tick in ticks] == values
    assert ticks[-1].percent <= 100


def test_line_is_parted_where_nothing_is_known() -> None:
    points = [(0.0, 0.0), (25.0, 5.0), (50.0, None), (100.0, 10.0)]
    chart = time_chart([Series(name="a", points=points, tone="t0")], 100.0)
    # The axis ends at 10; heights count from the top. A point alone is drawn twice, as a dot.
    assert chart.lines[0].polylines == ("0,100 25,50", "100,0 100,0")
    assert chart.lines[0].last == 10.0


def test_band_far_above_its_line_does_not_press_it_flat() -> None:
    line = Series(name="a", points=[(0.0, 10.0), (10.0, 10.0)], tone="t0")
    chart = time_chart([line], 10.0, band=[(0.0, 5.0, 1000.0), (10.0, 9.0, 11.0)])
    assert chart.axes.y_ticks[-1].value == 20
    assert chart.band == "0,0 100,45 100,55 0,75"


def test_bars_hold_every_length_once_and_mark_the_limit() -> None:
    drawn = histogram(Counter({0: 1, 99: 2, 100: 4, 400: 1}), 400, num_bars=4)
    assert [(bar.low, bar.count, bar.height_percent) for bar in drawn.bars] == [
        (0, 3, 75.0), (100, 4, 100.0), (400, 1, 25.0)
    ]  # fmt: skip
    assert drawn.limit is not None
    assert (drawn.limit.value, drawn.limit.percent) == (400, 100.0)
    assert histogram({}, None).bars == ()


def test_axis_reaches_a_value_above_the_lines() -> None:
    line = Series(name="a", points=[(0.0, 10.0), (10.0, 10.0)], tone="t0")
    chart = time_chart([line], 10.0, highest=35.0)
    assert chart.axes.y_ticks[-1].value == 40
    assert chart.lines[0].polylines == ("0,75 100,75",)


def test_bars_of_a_few_short_lengths_are_one_token_wide() -> None:
    # The axis ends at 2 tokens; 40 bars would be narrower than a token.
    drawn = histogram(Counter({1: 3, 2: 1}), None)
    assert [(bar.low, bar.high, bar.left_percent, bar.width_percent) for bar in drawn.bars] == [
        (1, 2, 50.0, 50.0), (2, 3, 100.0, 50.0)
    ]  # fmt: skip
    assert drawn.limit is None


def test_bars_are_where_their_lengths_are_on_the_axis() -> None:
    # The axis ends at 400, so 4 bars of 100 tokens.
    drawn = histogram(Counter({150: 2, 399: 1}), 200, num_bars=4)
    assert [(bar.left_percent, bar.width_percent) for bar in drawn.bars] == [
        (25.0, 25.0), (75.0, 25.0)
    ]  # fmt: skip
    assert drawn.limit is not None
    assert drawn.limit.percent == 50.0


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


def test_percentages_stay_within_the_chart() -> None:
    assert [percent(part, 8.0) for part in (-1.0, 0.0, 1.0, 9.0)] == [0.0, 0.0, 12.5, 100.0]
    assert percent(1.0, 0.0) == 0.0


def test_axis_of_small_values_ends_near_them() -> None:
    line = Series(name="a", points=[(0.0, 0.3), (10.0, 0.4)], tone="t0")
    assert time_chart([line], 10.0).axes.y_ticks[-1].value == pytest.approx(0.4)


def test_axis_of_lengths_has_room_for_forty_bars() -> None:
    # 4,000 tokens in 40 bars.
    assert [bar.low for bar in histogram(Counter({99: 1, 100: 1}), 4000).bars] == [0, 100]
