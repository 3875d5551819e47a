"""Charts over time: where marks stand, worked out by hand; series from parts and readings."""

from collections import Counter

import pytest

from pipeline.report.charts import (
    NamedLine,
    histogram,
    mean,
    quantile,
    stepped,
    time_chart,
    time_ticks,
)
from pipeline.report.series import (
    Published,
    added,
    eta_points,
    of_readings,
    rates,
    rows_over_time,
    step_s,
)
from schemas.estimate import Band, LiveReading
from schemas.live import TimeLeft


def part(at_s: float, rows: int = 10, tokens: int = 100, worker: str = "w0") -> Published:
    return Published(at_s=at_s, rows=rows, tokens=tokens, worker=worker)


def reading(start_s: float, end_s: float, rate: float, accept: float | None = None) -> LiveReading:
    return LiveReading(
        engine="w0", start_s=start_s, end_s=end_s, engine_age_s=start_s, cap_requests=8,
        running_requests=4.0, tokens_per_s=rate, accept_length=accept, prompt_tokens_per_s=0.0,
    )  # fmt: skip


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
    chart = time_chart([NamedLine(name="a", points=points, tone="t0")], 100.0)
    # The axis ends at 10; heights count from the top. A point alone is drawn twice, as a dot.
    assert chart.lines[0].polylines == ("0,100 25,50", "100,0 100,0")
    assert chart.lines[0].last == 10.0


def test_band_far_above_its_line_does_not_press_it_flat() -> None:
    line = NamedLine(name="a", points=[(0.0, 10.0), (10.0, 10.0)], tone="t0")
    chart = time_chart([line], 10.0, band=[(0.0, 5.0, 1000.0), (10.0, 9.0, 11.0)])
    assert chart.y_ticks[-1].value == 20
    assert chart.band == "0,0 100,45 100,55 0,75"


def test_bars_hold_every_length_once_and_mark_the_limit() -> None:
    drawn = histogram(Counter({0: 1, 99: 2, 100: 4, 400: 1}), 400, num_bars=4)
    assert [(bar.low, bar.count, bar.height_percent) for bar in drawn.bars] == [
        (0, 3, 75.0), (100, 4, 100.0), (400, 1, 25.0)
    ]  # fmt: skip
    assert drawn.limit is not None
    assert (drawn.limit.value, drawn.limit.percent) == (400, 100.0)
    assert histogram({}, None).bars == ()


def test_quantiles_and_mean_of_counts() -> None:
    counts = Counter({10: 5, 20: 4, 1000: 1})
    assert [quantile(counts, share) for share in (0.5, 0.9, 0.95, 1.0)] == [10, 20, 1000, 1000]
    assert mean(counts) == 113
    assert (quantile({}, 0.5), mean({})) == (0, 0.0)


def test_value_holds_until_it_changes() -> None:
    assert stepped([(1.0, 5.0), (3.0, 0.0)], [0.0, 1.0, 2.9, 3.0]) == [None, 5.0, 5.0, 0.0]


def test_rates_add_up_to_all_tokens() -> None:
    parts = [part(5.0), part(15.0, tokens=300), part(25.0)]
    assert rates(parts, 25.0, 10.0) == [(5.0, 10.0), (15.0, 30.0), (25.0, 20.0)]
    assert rows_over_time(parts, 25.0)[-1] == (25.0, 30.0)
    assert step_s(1000.0, 15.0) == 30.0
    assert step_s(36_000.0, 15.0) == 300.0


def test_readings_are_means_by_time_and_gaps_stay_gaps() -> None:
    found = of_readings([reading(0, 10, 5.0), reading(10, 15, 20.0)], 40.0, 20.0, "tokens_per_s")
    assert found == [(10.0, 10.0), (30.0, None)]
    assert of_readings([reading(0, 10, 5.0)], 20.0, 20.0, "accept_length") == [(10.0, None)]
    assert added([found, [(10.0, 1.0), (30.0, 2.0)]]) == [(10.0, 11.0), (30.0, 2.0)]


def test_estimates_are_drawn_on_the_clock_of_the_run() -> None:
    # The readings' clock began 10 s after the run. A day left after 50 s: 86,460 s in all.
    band = Band(p10=0.5, p50=1.0, p90=2.0)
    noted = [TimeLeft(at_s=50.0, days=band), TimeLeft(at_s=91.0, days=band)]
    (point,) = eta_points(noted, 10.0, 100.0)
    assert point.at_s == 60.0
    assert point.total_s == Band(p10=43_260.0, p50=86_460.0, p90=172_860.0)
