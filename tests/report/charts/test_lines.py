"""Lines over time: positions worked out by hand."""

import pytest

from pipeline.report.charts.lines import Dot, Series, time_chart, time_ticks


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
    # The axis ends at 10; heights count from the top, those of dots from the bottom.
    assert chart.lines[0].polylines == ("0,100 25,50",)
    assert chart.lines[0].dots == (Dot(left_percent=100.0, bottom_percent=100.0),)
    assert chart.lines[0].last == 10.0


def test_band_far_above_its_line_does_not_press_it_flat() -> None:
    line = Series(name="a", points=[(0.0, 10.0), (10.0, 10.0)], tone="t0")
    chart = time_chart([line], 10.0, band=[(0.0, 5.0, 1000.0), (10.0, 9.0, 11.0)])
    assert chart.axes.y_ticks[-1].value == 20
    assert chart.bands == ("0,0 100,45 100,55 0,75",)


def test_axis_reaches_a_value_above_the_lines() -> None:
    line = Series(name="a", points=[(0.0, 10.0), (10.0, 10.0)], tone="t0")
    chart = time_chart([line], 10.0, highest=35.0)
    assert chart.axes.y_ticks[-1].value == 40
    assert chart.lines[0].polylines == ("0,75 100,75",)


def test_axis_of_small_values_ends_near_them() -> None:
    line = Series(name="a", points=[(0.0, 0.3), (10.0, 0.4)], tone="t0")
    assert time_chart([line], 10.0).axes.y_ticks[-1].value == pytest.approx(0.4)


def test_band_is_parted_where_nothing_is_known_and_its_lone_point_is_seen() -> None:
    band = [(0.0, 1.0, 2.0), (1.0, 1.0, 2.0), (2.0, None, None), (3.0, 1.0, 2.0)]
    line = Series(name="a", points=[(0.0, 2.0), (4.0, 2.0)], tone="t0")
    chart = time_chart([line], 4.0, band=band)
    assert chart.bands == ("0,0 25,0 25,50 0,50", "74.6,0 75.4,0 75.4,50 74.6,50")


def test_stretches_are_shaded_in_their_place() -> None:
    chart = time_chart([], 200.0, shaded=[(0.0, 10.0, "start"), (50.0, 100.0, "pause")])
    assert [(s.left_percent, s.width_percent, s.name) for s in chart.shades] == [
        (0.0, 5.0, "start"), (25.0, 25.0, "pause")
    ]  # fmt: skip
