"""Histograms: bins, axes and the limit, worked out by hand."""

from collections import Counter
from random import Random

import pytest

from pipeline.report.charts.histogram import Histogram, histogram


def bins(drawn: Histogram) -> list[tuple[int, int, int]]:
    return [(bar.low, bar.high, bar.count) for bar in drawn.bars]


def places(drawn: Histogram) -> list[tuple[float, float]]:
    return [(bar.left_percent, bar.width_percent) for bar in drawn.bars]


def test_bars_hold_every_length_once_and_mark_the_limit() -> None:
    # The axis ends behind 399: 4 bars of 100 tokens.
    drawn = histogram(Counter({0: 1, 99: 2, 100: 4, 399: 1}), 399, num_bars=4)
    assert bins(drawn) == [(0, 100, 3), (100, 200, 4), (300, 400, 1)]
    assert [bar.height_percent for bar in drawn.bars] == [75.0, 100.0, 25.0]
    assert places(drawn) == [(0.0, 25.0), (25.0, 25.0), (75.0, 25.0)]
    assert drawn.limit is not None
    assert (drawn.limit.value, drawn.limit.percent) == (399, 99.75)
    assert histogram({}, None).bars == ()


def test_short_lengths_far_below_the_limit_fill_the_axis() -> None:
    # 400 lengths from 20 to 59: one bar per token from 0 to 59, not one bar of 32,768.
    drawn = histogram(Counter(dict.fromkeys(range(20, 60), 10)), 32_768)
    assert len(drawn.bars) >= 20
    assert drawn.x_ticks[-1].value == 60
    assert (drawn.limit, drawn.limit_beyond, drawn.num_beyond) == (None, 32_768, 0)


def test_limit_little_beyond_the_longest_is_on_the_axis() -> None:
    drawn = histogram(Counter({100: 5, 200: 5, 900: 1}), 1000)
    assert drawn.limit is not None
    assert drawn.limit.value == 1000
    assert drawn.limit.percent > 99


def test_lengths_far_from_zero_have_an_axis_of_their_own() -> None:
    drawn = histogram(Counter({4000: 10, 4020: 20, 4039: 5}), 4096)
    # From 4,000 to the limit, which is close.
    assert drawn.bars[0].left_percent == 0.0
    assert drawn.limit is not None
    assert len(drawn.bars) == 3
    assert 35 < drawn.bars[-1].left_percent < 45


def test_one_length_is_a_bar_in_the_middle() -> None:
    drawn = histogram(Counter({40: 7}), 4096)
    assert bins(drawn) == [(40, 41, 7)]
    (place,) = places(drawn)
    assert place == (37.5, 12.5)


def test_few_outliers_are_counted_and_do_not_press_the_others_flat() -> None:
    # p10 to p90 is 81 to 98: the fence is 98 + 4 x 17 = 166.
    drawn = histogram(Counter({**dict.fromkeys(range(80, 100), 10), 32_768: 2}), 32_768)
    assert drawn.bars[-1].high <= 167
    assert sum(bar.count for bar in drawn.bars) == 200
    assert (drawn.num_beyond, drawn.limit_beyond) == (2, 32_768)
    assert len(drawn.bars) == 20


def test_wide_lengths_are_on_a_logarithmic_axis_with_those_at_the_limit() -> None:
    random = Random(1)
    counts = Counter(min(int(random.lognormvariate(7, 1.2)), 32_768) for _ in range(4000))
    counts[32_768] += 40
    drawn = histogram(counts, 32_768)
    assert drawn.is_log
    assert drawn.num_beyond == 0
    assert sum(bar.count for bar in drawn.bars) == 4040
    assert drawn.bars[0].low == 0
    assert drawn.bars[-1].count >= 40
    highest = max(drawn.bars, key=lambda bar: bar.count)
    assert 30 < highest.left_percent < 80
    assert len(drawn.bars) > 25
    assert [tick.value for tick in drawn.x_ticks][-1] == 10_000


@pytest.mark.parametrize("limit", [None, 10, 4096])
@pytest.mark.parametrize(
    "counts", [{0: 3}, {0: 3, 1: 1}, {0: 1, 100_000: 1}, {5: 1, 6: 100, 7: 1, 900: 1}, {2: 1}]
)
def test_no_length_is_lost_on_any_axis(counts: dict[int, int], limit: int | None) -> None:
    drawn = histogram(counts, limit)
    assert sum(bar.count for bar in drawn.bars) + drawn.num_beyond == sum(counts.values())
    assert all(bar.width_percent > 0 for bar in drawn.bars)
    ends = [bar.left_percent + bar.width_percent for bar in drawn.bars]
    assert max(ends) <= 100.01
    assert (drawn.limit is None) != (limit is not None and drawn.limit_beyond is None)
