"""Figures of the progress line."""

from dataclasses import replace

from pipeline.console.progress import (
    ProgressFigures,
    ProgressMeter,
    counts_text,
    progress_line,
    rows_text,
)
from schemas.estimate import Band
from tests.fakes.example_report import run_progress, worker_report

FIGURES = ProgressFigures(
    rows_done=7,
    rows_total=1200,
    rows_error=2,
    rows_failed=1,
    tokens_per_s=1234.4,
    engines_up=2,
    in_flight=6,
    waiting=4,
    retries=5,
    timeouts=3,
    refusals=1,
    time_left="1.6 days (1.3-2.1)",
)


def test_line_has_every_figure_as_key_and_value() -> None:
    assert progress_line(FIGURES) == (
        "event=progress rows=7/1200 tokens_per_s=1234 in_flight=6 errors=2 failed=1 engines=2 "
        "waiting=4 retries=5 timeouts=3 refusals=1 time_left='1.6 days (1.3-2.1)'"
    )


def test_texts_of_the_bar_leave_out_what_has_not_happened() -> None:
    # 7 of 1,200 are 0.6 %.
    assert rows_text(FIGURES) == "7/1,200 rows (1%), time left 1.6 days (1.3-2.1)"
    assert counts_text(FIGURES) == (
        "2 engines, 1,234 tokens/s, 6 in flight, 2 error rows, 1 failed row, 4 waiting, 5 retries, "
        "3 timeouts, 1 refusal"
    )
    calm = replace(
        FIGURES, rows_error=0, rows_failed=0, waiting=0, retries=0, timeouts=0, refusals=0
    )
    assert counts_text(replace(calm, engines_up=1)) == "1 engine, 1,234 tokens/s, 6 in flight"
    # The last estimate is older than the last row.
    assert rows_text(replace(FIGURES, rows_done=1198)).endswith(
        " rows (100%), time left 1.6 days (1.3-2.1)"
    )
    assert rows_text(replace(FIGURES, rows_done=1199)) == "1,199/1,200 rows (100%)"
    empty = replace(FIGURES, rows_done=0, rows_failed=0, rows_total=0)
    assert rows_text(empty) == "0/0 rows (100%)"


def test_time_left_is_the_estimates_and_unknown_before_it() -> None:
    meter = ProgressMeter()
    assert meter.figures(run_progress(), 0.0).time_left == "not known yet"
    left = Band(p10=1.0, p50=2.0, p90=3.0)
    assert meter.figures(run_progress(days_left=left), 1.0).time_left == "2.0 days (1.0-3.0)"


def test_counts_are_summed_over_workers_and_outlive_them() -> None:
    meter = ProgressMeter()
    first = worker_report("w0", interruptions=3, timeouts=2, refusals=1, backing_off=4, in_flight=5)
    second = worker_report("w1", state="starting", interruptions=10, timeouts=20, refusals=30)
    both = meter.figures(run_progress(first, second), 0.0)
    assert (both.retries, both.timeouts, both.refusals) == (13, 22, 31)
    assert (both.waiting, both.in_flight, both.engines_up) == (4, 5, 1)
    # w0 died, and its successor starts to count.
    heir = worker_report("w0r1", state="idle", interruptions=1, in_flight=2)
    after = meter.figures(run_progress(heir, second), 1.0)
    assert (after.retries, after.timeouts, after.refusals) == (14, 22, 31)
    assert (after.waiting, after.in_flight, after.engines_up) == (0, 2, 1)


def test_rate_is_that_of_the_last_minute_and_never_negative() -> None:
    meter = ProgressMeter()

    def rate(tokens: int, now_s: float) -> float:
        report = worker_report("w0", completion_tokens=tokens)
        return meter.figures(run_progress(report), now_s).tokens_per_s

    assert rate(0, 0.0) == 0
    # 9,000 tokens in 35 s.
    assert rate(9000, 35.0) == 9000 / 35
    # 0 s is out of the window at 70 s: 3,000 tokens in 35 s.
    assert rate(12000, 70.0) == 3000 / 35
    # A worker that was replaced counts from 0.
    assert rate(10, 71.0) == 0
