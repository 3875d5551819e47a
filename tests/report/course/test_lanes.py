"""Time line: lanes of events, marked where they were."""

from collections import Counter
from dataclasses import replace

from pipeline.report.course.lanes import Lane, lanes
from pipeline.report.course.records import RunRecords
from schemas.manifest import CanaryEvent, FailedRow
from tests.fakes.run_records import BEGAN_AT_S, reading, run_records


def lanes_of(run: RunRecords) -> dict[str, Lane]:
    return {lane.name: lane for lane in lanes(run)}


def canary(verdict: str, at_s: float, **shares: float) -> CanaryEvent:
    return CanaryEvent(
        session_id="0", verdict=verdict, settings="f", shares=shares, at_s=BEGAN_AT_S + at_s  # type: ignore[arg-type]
    )  # fmt: skip


def test_canary_lasts_from_its_beginning_to_its_verdict() -> None:
    run = run_records(span_s=1000.0)
    run.history.canaries = [
        canary("begun", 100.0),
        canary("failed", 300.0, looping=0.31),
        canary("begun", 500.0),
    ]
    marks = lanes_of(run)["canary"].marks
    assert [(m.left_percent, m.width_percent, m.text) for m in marks] == [
        (10.0, 20.0, "canary failed: looping 31.0 %"),
        (50.0, 50.0, "canary without a verdict yet"),
    ]


def test_events_at_about_the_same_time_are_one_mark_that_names_some() -> None:
    events = [(100.0 + n / 100, "engine_ready") for n in range(64)] + [(900.0, "engine_ready")]
    ready = lanes_of(run_records(span_s=1000.0, events=events))["engines came up"]
    assert ready.total == 65
    assert [mark.left_percent for mark in ready.marks] == [10.0, 90.0]
    assert ready.marks[0].text == "w0 came up; w0 came up; w0 came up; and 61 more"


def test_share_of_working_engines_is_as_high_as_its_bar() -> None:
    readings = [
        reading(0, 1000),
        reading(500, 1000, engine="w1"),
        reading(0, 400, engine="w1", running=0.0),
    ]
    marks = lanes_of(run_records(span_s=1000.0, readings=readings))["engines working"].marks
    assert [(m.left_percent, m.width_percent, m.height_percent) for m in marks] == [
        (0.0, 50.0, 50.0), (50.0, 50.0, 100.0)
    ]  # fmt: skip
    assert marks[0].text == "1 of 2 engines had requests"


def test_retries_and_bad_rows_are_counted_over_time() -> None:
    run = run_records(span_s=1200.0)
    rows = replace(
        run.rows,
        _retries=Counter({int(BEGAN_AT_S + 600) // 5: 8, int(BEGAN_AT_S + 900) // 5: 2}),
        _errors=Counter({int(BEGAN_AT_S + 100) // 5: 1}),
    )
    run = replace(run, rows=rows)
    run.history.failed["hard", 0] = FailedRow(
        row_id="hard", sample_index=0, cause="HTTP 503", attempts=6, failed_at_s=BEGAN_AT_S + 1199
    )
    found = lanes_of(run)
    retries = found["retries"]
    assert retries.total == 10
    assert [(m.left_percent, m.height_percent) for m in retries.marks] == [
        (50.0, 100.0),
        (75.0, 25.0),
    ]
    assert found["error and failed rows"].total == 2


def test_lane_without_an_event_is_kept_empty() -> None:
    assert lanes_of(run_records(span_s=10.0))["stepped down"].marks == ()
