"""Axes: round values and positions."""

import pytest

from pipeline.report.charts.axes import axis_ticks, percent


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


def test_percentages_stay_within_the_chart() -> None:
    assert [percent(part, 8.0) for part in (-1.0, 0.0, 1.0, 9.0)] == [0.0, 0.0, 12.5, 100.0]
    assert percent(1.0, 0.0) == 0.0
