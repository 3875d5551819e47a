"""Time and dollars against the estimate: its origin, and bars on one scale."""

from dataclasses import replace

import pytest

from pipeline.report.comparison import Measure, comparison, measure_bars
from pipeline.report.course.worktime import Pause, WorkTime
from pipeline.report.spending import NoSpending, Spending
from schemas.estimate import Band
from schemas.progress import TimeLeft
from tests.fakes.run_records import run_records

HOUR = Band(p10=1800.0, p50=3600.0, p90=7200.0)
SPENT = Spending(cards=(), gpu_hours=2.0, usd_so_far=8.0, usd_to_go=None)


def test_total_is_what_is_done_and_what_is_to_go() -> None:
    run = run_records(span_s=3600.0, state="running")
    found = comparison(run, None, SPENT, HOUR)
    assert found.seconds == Measure(
        so_far=3600.0, total=Band(p10=5400.0, p50=7200.0, p90=10_800.0), estimated=None
    )
    assert found.source is None
    # $8 for the first hour.
    assert found.usd is not None
    assert (found.usd.so_far, found.usd.total) == (8.0, Band(p10=12.0, p50=16.0, p90=24.0))


def test_time_between_sessions_is_no_time_of_the_run() -> None:
    pauses = [
        Pause(start_s=0.0, end_s=100.0, reason="start"),
        Pause(start_s=1000.0, end_s=2600.0, reason="between sessions"),
    ]
    run = replace(run_records(span_s=3600.0), work=WorkTime(pauses=pauses))
    assert comparison(run, None, NoSpending(why="?"), None).seconds.so_far == 2000.0


def test_first_estimate_stands_in_for_a_plan() -> None:
    run = run_records(span_s=3600.0, state="running")
    run.log.times_left.append(TimeLeft(at_s=240.0, days=Band(p10=0.5, p50=1.0, p90=2.0)))
    run.log.times_left.append(TimeLeft(at_s=900.0, days=Band(p10=5.0, p50=6.0, p90=7.0)))
    found = comparison(run, None, SPENT, HOUR)
    assert found.source == "the run's first estimate, after 4 min"
    assert found.seconds.estimated == Band(p10=43_440.0, p50=86_640.0, p90=173_040.0)
    assert found.usd is not None
    assert found.usd.estimated is not None
    assert found.usd.estimated.p50 == pytest.approx(86_640 / 3600 * 8)


def test_run_that_was_stopped_has_no_total() -> None:
    found = comparison(run_records(span_s=3600.0, state="stopped"), None, SPENT, None)
    assert found.seconds.total is None
    assert measure_bars(found.seconds).so_far_percent == 100.0


def test_bars_of_a_measure_share_a_scale() -> None:
    bars = measure_bars(
        Measure(
            so_far=5.0,
            total=Band(p10=8.0, p50=9.0, p90=10.0),
            estimated=Band(p10=12.0, p50=15.0, p90=20.0),
        )
    )
    assert bars.so_far_percent == 25.0
    assert bars.total is not None
    assert bars.estimated is not None
    assert (bars.total.low_percent, bars.total.high_percent) == (40.0, 50.0)
    assert (bars.estimated.middle_percent, bars.estimated.high_percent) == (75.0, 100.0)
