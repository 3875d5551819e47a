"""Charts of engines: lines of a few, a band and outliers of many."""

from dataclasses import replace

import pytest

from pipeline.report.course.engine_charts import engine_charts
from pipeline.report.course.engines import engine_rows
from pipeline.report.course.records import Published, RunRecords
from pipeline.report.course.worktime import Pause, WorkTime
from tests.fakes.run_records import reading, run_records


def run_of(num_engines: int, slow: dict[int, float], accept: float | None = None) -> RunRecords:
    """Return 1,000 s of engines with 100 tokens/s, but for some."""
    readings = [
        reading(
            0, 1000, engine=f"w{n}", tokens_per_s=slow.get(n, 100.0 + n % 5), accept_length=accept
        )
        for n in range(num_engines)
    ]
    return run_records(span_s=1000.0, readings=readings)


def test_eight_engines_have_a_line_each() -> None:
    each = engine_charts(run_of(8, {}), []).each
    assert each is not None
    assert [line.name for line in each.lines] == [f"w{n}" for n in range(8)]
    assert each.bands == ()


def test_many_engines_are_a_band_with_those_that_differ() -> None:
    run = run_of(64, {7: 40.0, 20: 80.0, 41: 135.0, 50: 84.0}, accept=2.5)
    charts = engine_charts(run, [])
    assert charts.each is not None
    assert len(charts.each.bands) == 1
    assert [line.name for line in charts.each.lines] == [
        "median of 64 engines",
        "w7, 61 % below the median",
        "w41, 32 % above the median",
        "w20, 22 % below the median",
    ]
    assert charts.each.lines[0].last == 102.0
    assert charts.accept is not None
    assert [line.name for line in charts.accept.lines] == ["median of 64 engines"]


def test_sum_of_all_engines_is_their_total() -> None:
    charts = engine_charts(run_of(64, {}), [])
    assert charts.total.lines[0].last == pytest.approx(sum(100 + n % 5 for n in range(64)))
    assert charts.running is not None
    assert [(line.name, line.last) for line in charts.running.lines] == [
        ("cap", 512.0), ("running", 256.0)
    ]  # fmt: skip


def test_pauses_are_shaded_in_every_chart() -> None:
    charts = engine_charts(run_of(2, {}, accept=2.0), [(0.0, 100.0, "start")])
    for chart in (charts.total, charts.each, charts.running, charts.accept):
        assert chart is not None
        assert [shade.width_percent for shade in chart.shades] == [10.0]


def test_rate_of_a_late_engine_is_that_since_it_came() -> None:
    readings = [reading(0, 1000), reading(800, 1000, engine="w1")]
    parts = [Published(at_s=900.0, rows=1, tokens=10_000, worker=name) for name in ("w0", "w1")]
    run = run_records(span_s=1000.0, readings=readings, parts=parts)
    assert [row.tokens_per_s for row in engine_rows(run)] == [10.0, 50.0]
    pause = Pause(start_s=400.0, end_s=900.0, reason="no requests")
    paused = replace(run, work=WorkTime(pauses=[pause]))
    assert [row.tokens_per_s for row in engine_rows(paused)] == [20.0, 100.0]
