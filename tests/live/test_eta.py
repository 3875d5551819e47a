"""The estimate that the driver makes while the job runs."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.live.estimate import expectation
from pipeline.live.eta import LiveEta
from pipeline.live.update import Expectation, run_update
from schemas.config.planning import LengthsConfig
from schemas.estimate import Deviation, RunUpdate
from schemas.progress import Progress, WorkerReport
from tests.fakes.known import known
from tests.fakes.live_run import TODAY, filled_folder, run_file


def test_driver_takes_up_what_the_folder_says(tmp_path: Path) -> None:
    folder = filled_folder(tmp_path)
    config = run_file(tmp_path, engine={"kind": "embedded"}, sampling={"max_tokens": 200})
    config = config.model_copy(update={"lengths": LengthsConfig()})
    eta = LiveEta(folder=folder, config=config, today=TODAY)
    assert eta.estimate() is None
    progress = Progress(
        session_id="s", updated_at_s=1.0, state="running", rows_total=100, rows_done=30,
        rows_failed=0, rows_error=0, completion_tokens=0, last_publish_s=None, leases_lost=0,
        workers=(),
    )  # fmt: skip
    eta.follow(progress)
    first = eta.estimate()
    assert first is not None
    assert eta.days_left == first.days_left
    eta.follow(replace(progress, rows_done=90))
    later = eta.estimate()
    assert later is not None
    assert known(later.days_left).p50 < known(first.days_left).p50
    told = replace(progress, days_left=eta.days_left)
    assert Progress.from_json(told.to_json()) == told
    assert eta.take_events() == []


def running_eta(tmp_path: Path, **changes: object) -> LiveEta:
    """A driver's estimate with 30 of 100 rows done."""
    folder = filled_folder(tmp_path)
    config = run_file(tmp_path, engine={"kind": "embedded"}, lengths={})
    eta = LiveEta(folder=folder, config=config, today=TODAY)
    eta.follow(progress(**changes))
    return eta


def progress(**changes: object) -> Progress:
    values: dict[str, object] = {
        "session_id": "s", "updated_at_s": 1.0, "state": "running", "rows_total": 100,
        "rows_done": 30, "rows_failed": 0, "rows_error": 0, "completion_tokens": 0,
        "last_publish_s": None, "leases_lost": 0, "workers": (), **changes,
    }  # fmt: skip
    return Progress(**values)  # type: ignore[arg-type]


def test_rows_that_are_finished_or_failed_are_not_left(tmp_path: Path) -> None:
    worker = WorkerReport(
        worker_id="w0", state="running", engine="embedded", engine_release=None, in_flight=8,
        not_started=0, backing_off=0, unflushed=5, requests=0, interruptions=0, restarts=0,
        completion_tokens=0, last_cause=None,
    )  # fmt: skip
    update = running_eta(tmp_path, rows_failed=3, workers=(worker,)).estimate()
    assert update is not None
    # 100 - 30 - 3 - 5
    assert update.completions_left == 62


def test_run_without_open_rows_has_no_days_left(tmp_path: Path) -> None:
    eta = running_eta(tmp_path, rows_done=100)
    assert eta.estimate() is not None
    assert eta.days_left is None


def test_plan_is_made_once_for_the_launch_that_came_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str | None] = []

    def noted(*given: object, **options: object) -> Expectation:
        launched.append(options["launched"])  # type: ignore[arg-type]
        return expectation(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.live.eta.expectation", noted)
    eta = running_eta(tmp_path)
    report = WorkerReport(
        worker_id="w0", state="running", engine="embedded", engine_release=None, in_flight=0,
        not_started=0, backing_off=0, unflushed=0, requests=0, interruptions=0, restarts=0,
        completion_tokens=0, last_cause=None, plan="--tp-size 2",
    )  # fmt: skip
    eta.follow(progress(workers=(report,)))
    # A worker that has no engine yet does not hide the launch.
    eta.follow(progress(workers=(replace(report, plan=None),)))
    eta.estimate()
    eta.estimate()
    assert launched == ["--tp-size 2"]


def test_deviation_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deviation = Deviation(input="step_time", predicted=1.0, measured=2.0, sentence="a slow step")

    def deviating(*given: object) -> RunUpdate:
        return replace(run_update(*given), disagreements=(deviation,))  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.live.eta.run_update", deviating)
    eta = running_eta(tmp_path)
    eta.estimate()
    eta.estimate()
    assert eta.take_events() == ["event=deviates_from_plan input=step_time why='a slow step'"]
    assert eta.take_events() == []


def test_thread_estimates_until_the_block_ends_and_logs_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.live.eta._SHORTEST_WAIT_S", 0.001)
    monkeypatch.setattr("pipeline.live.eta._LONGEST_WAIT_S", 0.002)
    eta = running_eta(tmp_path)
    with eta.working():
        wait_until(lambda: eta.days_left is not None)
        eta.folder.write_whole("live-readings.jsonl", b"{]\n")
        wait_until(lambda: len(eta._events) > 0)
    (event,) = eta.take_events()
    assert event.startswith("event=no_estimate why=")
    assert "live-readings.jsonl line 1" in event


def wait_until(is_true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.005)
