"""Bars: bands, scales and the parts of a whole, worked out by hand."""

from pipeline.report.charts.bars import band_bar, bar_scale, stacked_segments
from schemas.estimate import Band
from schemas.plan import BudgetRow


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
