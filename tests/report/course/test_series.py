"""Series of a run over time, from parts and readings."""

import json

from pipeline.dataset.run_record import RunHistory
from pipeline.report.course.records import Published, published
from pipeline.report.course.series import (
    added,
    eta_points,
    of_readings,
    rates,
    rows_over_time,
    step_s,
    stepped,
)
from pipeline.report.course.worktime import ALL_WORK, Pause, WorkTime
from schemas.estimate import Band, LiveReading
from schemas.manifest import Part, event_line
from schemas.progress import TimeLeft


def part(at_s: float, rows: int = 10, tokens: int = 100, worker: str = "w0") -> Published:
    return Published(at_s=at_s, rows=rows, tokens=tokens, worker=worker)


def reading(start_s: float, end_s: float, rate: float, accept: float | None = None) -> LiveReading:
    return LiveReading(
        engine="w0", start_s=start_s, end_s=end_s, engine_age_s=start_s, cap_requests=8,
        running_requests=4.0, tokens_per_s=rate, accept_length=accept, prompt_tokens_per_s=0.0,
    )  # fmt: skip


def test_value_holds_until_it_changes() -> None:
    points = stepped([(1.0, 5.0), (3.0, 0.0)], [0.0, 1.0, 2.9, 3.0])
    assert points == [(0.0, None), (1.0, 5.0), (2.9, 5.0), (3.0, 0.0)]


def test_rates_add_up_to_all_tokens() -> None:
    parts = [part(5.0), part(15.0, tokens=300), part(25.0)]
    assert rates(parts, 25.0, 10.0, ALL_WORK) == [(5.0, 10.0), (15.0, 30.0), (25.0, 20.0)]
    assert rows_over_time(parts, 25.0)[-1] == (25.0, 30.0)
    assert step_s(1000.0, 15.0) == 30.0
    assert step_s(36_000.0, 15.0) == 300.0


def test_readings_are_means_by_time_and_gaps_stay_gaps() -> None:
    found = of_readings(
        [reading(0, 10, 5.0), reading(10, 15, 20.0)], 40.0, 20.0, "tokens_per_s", ALL_WORK
    )
    assert found == [(10.0, 10.0), (30.0, None)]
    assert of_readings([reading(0, 10, 5.0)], 20.0, 20.0, "accept_length", ALL_WORK) == [
        (10.0, None)
    ]
    assert added([found, [(10.0, 1.0), (30.0, 2.0)]]) == [(10.0, 11.0), (30.0, 2.0)]


def test_estimates_are_drawn_on_the_clock_of_the_run() -> None:
    # The readings' clock began 10 s after the run. A day left after 50 s: 86,460 s in all.
    band = Band(p10=0.5, p50=1.0, p90=2.0)
    noted = [TimeLeft(at_s=at_s, days=band) for at_s in (50.0, 90.0, 91.0)]
    point, last = eta_points(noted, 10.0, 100.0)
    assert last.at_s == 100.0
    assert point.at_s == 60.0
    assert point.total_s == Band(p10=43_260.0, p50=86_460.0, p90=172_860.0)


def test_short_last_step_is_no_peak() -> None:
    # The third step is 1 s long and counts as a quarter of 10 s: 100 tokens in 2.5 s.
    assert rates([part(20.5)], 21.0, 10.0, ALL_WORK) == [(5.0, 0.0), (15.0, 0.0), (21.0, 40.0)]


def test_rows_are_counted_at_the_end_of_each_step() -> None:
    points = rows_over_time([part(5.0), part(15.0)], 60.0)
    # 120 steps of half a second.
    assert points[9:11] == [(4.5, 0.0), (5.0, 10.0)]
    assert points[29:31] == [(14.5, 10.0), (15.0, 20.0)]
    assert len(points) == 121


def test_reading_over_two_steps_counts_in_both() -> None:
    readings = [reading(0, 10, 20.0), reading(10, 30, 5.0)]
    # (10 s x 20 + 10 s x 5) / 20 s, then 5.
    points = of_readings(readings, 40.0, 20.0, "tokens_per_s", ALL_WORK)
    assert points == [(10.0, 12.5), (30.0, 5.0)]


def test_parts_are_in_the_order_of_their_first_publication() -> None:
    history = RunHistory()
    for name, at_s, worker in (("b", 1030.0, "w1r2"), ("a", 1010.0, "w0"), ("b", 1090.0, "w1r2")):
        listed = Part(
            name=name, size_bytes=1, row_ids=("x", "y"), sample_indexes=(0, 0),
            content_hashes=("h", "h"), num_errors=0, prompt_tokens=1, completion_tokens=7,
            worker_id=worker, published_at_s=at_s,
        )  # fmt: skip
        history.fold(json.loads(event_line(listed)))
    assert published(history, 1020.0) == [
        Published(at_s=0.0, rows=2, tokens=7, worker="w0"),
        Published(at_s=10.0, rows=2, tokens=7, worker="w1"),
    ]


def test_rates_leave_pauses_out() -> None:
    # Work from 0 to 10, from 15 to 20 and from 30: the pauses are half a step and a whole one.
    work = WorkTime(
        pauses=[
            Pause(start_s=10.0, end_s=15.0, reason="no requests"),
            Pause(start_s=20.0, end_s=30.0, reason="between sessions"),
        ]
    )
    parts = [part(5.0), part(18.0), part(22.0), part(35.0)]
    # The part of the second pause counts in the step before it: 200 tokens in 5 s.
    assert rates(parts, 40.0, 10.0, work) == [
        (5.0, 10.0), (15.0, 40.0), (25.0, None), (35.0, 10.0)
    ]  # fmt: skip
    readings = [reading(0, 12, 5.0), reading(16, 20, 7.0), reading(30, 40, 5.0)]
    found = of_readings(readings, 40.0, 10.0, "tokens_per_s", work)
    assert found == [(5.0, 5.0), (15.0, 7.0), (25.0, None), (35.0, 5.0)]
