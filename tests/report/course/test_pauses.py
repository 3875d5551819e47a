"""Pauses of a run, and the clock that stands still in them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.dataset.parts import publish
from pipeline.report.course.pauses import work_time
from pipeline.report.course.records import RunRecords
from pipeline.report.course.worktime import Pause, WorkTime
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from tests.fakes.example_report import worker_report
from tests.fakes.run_records import BEGAN_AT_S, reading, run_records
from tests.fakes.staged_part import stage_part


def found(run: RunRecords) -> list[tuple[float, float, str]]:
    return [(pause.start_s, pause.end_s, pause.reason) for pause in work_time(run).pauses]


def test_start_gap_between_sessions_and_second_start_are_pauses() -> None:
    readings = [reading(60, 200), reading(200, 300), reading(590, 700)]
    run = run_records(span_s=700, readings=readings, sessions_s=(0.0, 550.0))
    assert found(run) == [
        (0.0, 60, "start"), (300, 550.0, "between sessions"), (550.0, 590, "start")
    ]  # fmt: skip


def test_session_that_ends_before_its_first_request_is_between_sessions() -> None:
    run = run_records(
        span_s=700, readings=[reading(0, 300), reading(600, 700)], sessions_s=(0.0, 400.0, 550.0)
    )
    assert found(run) == [
        (300, 400.0, "between sessions"),
        (400.0, 550.0, "between sessions"),
        (550.0, 600, "start"),
    ]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ((310.0, "engine_lost"), "waiting for an engine"),
        ((320.0, "waiting_for_folder"), "waiting for the store"),
        ((20.0, "engine_lost"), "no requests"),
    ],
)
def test_gap_within_a_session_is_named_after_what_happened(
    event: tuple[float, str], reason: str
) -> None:
    run = run_records(span_s=500, readings=[reading(0, 300), reading(400, 500)], events=[event])
    assert found(run) == [(300, 400, reason)]


def test_engine_that_works_while_another_is_away_makes_no_pause() -> None:
    readings = [reading(0, 100), reading(90, 300, engine="w1"), reading(290, 400)]
    assert found(run_records(span_s=400, readings=readings)) == []


def test_idle_reading_is_no_work_and_a_short_gap_no_pause() -> None:
    readings = [
        reading(0, 100),
        reading(100, 160, running=0.0),
        reading(160, 200),
        reading(210, 300),
    ]
    assert found(run_records(span_s=300, readings=readings)) == [(100, 160, "no requests")]


def test_end_of_a_running_run_counts_as_work_while_requests_are_in_flight() -> None:
    run = run_records(span_s=400, readings=[reading(0, 300)], state="running")
    assert found(run) == [(300, 400, "no requests")]
    busy = replace(run.status, workers=(worker_report(in_flight=3),))
    assert found(replace(run, status=busy)) == []


def test_rows_show_the_work_of_a_session_without_readings(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    # A session of an older release, without readings, then one with.
    began = BEGAN_AT_S
    rows = [
        completion("a", started_at_s=began + 20, finished_at_s=began + 90),
        completion("b", started_at_s=began + 200, finished_at_s=began + 250),
    ]
    run = run_records(
        span_s=600, readings=[reading(420, 600)], rows=figures_of(tmp_path, rows),
        sessions_s=(0.0, 400.0),
    )  # fmt: skip
    assert found(run) == [
        (0.0, 20.0, "start"),
        (90.0, 200.0, "no requests"),
        (250.0, 400.0, "between sessions"),
        (400.0, 420, "start"),
    ]


def figures_of(root: Path, rows: list[Completion]) -> RowFigures:
    folder = LocalFolder(root)
    for inner in ("staging", "data"):
        folder.make(inner)
    part = stage_part(
        folder, "p.parquet", rows, run_id="r", carried_schema=pa.schema([]), worker_id="w0"
    )
    publish(folder, part, now_s=1.0)
    figures = RowFigures()
    figures.read(folder, ["p.parquet"])
    return figures


def test_clock_stands_still_in_pauses() -> None:
    work = WorkTime(
        pauses=[
            Pause(start_s=0.0, end_s=10.0, reason="start"),
            Pause(start_s=50.0, end_s=80.0, reason="no requests"),
        ]
    )
    assert work.worked_s(0.0, 100.0) == 60.0
    assert work.worked_s(5.0, 20.0) == 10.0
    assert work.worked_s(55.0, 60.0) == 0.0
    assert [work.last_worked(at_s) for at_s in (5.0, 10.0, 49.0, 60.0, 80.0)] == [
        0.0, 10.0, 49.0, 50.0, 80.0
    ]  # fmt: skip
