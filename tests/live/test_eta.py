"""The estimate that the driver makes while the job runs."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.live.estimate import expectation
from pipeline.live.eta import LiveEta
from pipeline.live.log import LiveLog, read_live_log
from pipeline.live.update import Expectation, run_update
from schemas.config.planning import LengthsConfig
from schemas.estimate import Deviation, RunUpdate
from schemas.progress import Progress, WorkerReport
from schemas.units import SECONDS_PER_DAY
from tests.fakes.known import known
from tests.fakes.live_run import TODAY, filled_folder, run_file


def test_driver_takes_up_what_the_folder_says(tmp_path: Path) -> None:
    folder = filled_folder(tmp_path)
    config = run_file(tmp_path, engine={"kind": "embedded"}, sampling={"max_tokens": 200})
    config = config.model_copy(update={"lengths": LengthsConfig()})
    eta = LiveEta(
        folder=folder,
        config=config,
        today=TODAY,
        newer_log=lambda seen: read_live_log(folder),
        clock=time.monotonic,
    )
    assert eta.estimate() is None
    progress = Progress(
        session_id="s", updated_at_s=1.0, state="running", rows_total=100, rows_done=30,
        rows_failed=0, rows_error=0, completion_tokens=0, last_publish_s=None, leases_lost=0,
        workers=(),
    )  # fmt: skip
    eta.follow(progress)
    first = eta.estimate()
    assert first is not None
    # The time that the run takes to close is added.
    assert known(eta.days_left).p50 > known(first.days_left).p50
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
    eta = LiveEta(
        folder=folder,
        config=config,
        today=TODAY,
        newer_log=lambda seen: read_live_log(folder),
        clock=time.monotonic,
    )
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


def test_part_that_was_just_published_ends_no_rows_twice(tmp_path: Path) -> None:
    # 80 rows are published, 12 are in flight; 28 of the 80 are unflushed in the worker's report.
    worker = WorkerReport(
        worker_id="w0", state="running", engine="embedded", engine_release=None, in_flight=12,
        not_started=0, backing_off=0, unflushed=28, requests=0, interruptions=0, restarts=0,
        completion_tokens=0, last_cause=None,
    )  # fmt: skip
    update = running_eta(tmp_path, rows_done=80, workers=(worker,)).estimate()
    assert update is not None
    assert update.completions_left == 12
    assert progress(rows_done=80, workers=(worker,)).rows_finished == 88


def test_last_request_that_hangs_keeps_the_run_waiting(tmp_path: Path) -> None:
    # Answers have about 90 tokens; the last has run for as long as 1,000 and is overdue by 700, so
    # hangs for the time of 700 more in half of the cases: 56 s at 12.5 tokens/s.
    eta = running_eta(tmp_path, rows_done=99)
    log = eta.newer_log(0)
    assert log is not None
    log.running = {"w0": Counter({1000: 1})}
    eta.newer_log = lambda seen: log
    update = eta.estimate()
    assert update is not None
    assert update.tokens_left == 0
    assert 50 < known(eta.days_left).p50 * SECONDS_PER_DAY < 70


def test_run_whose_rows_have_all_ended_has_some_seconds_left_to_close(tmp_path: Path) -> None:
    eta = running_eta(tmp_path, rows_done=100)
    assert eta.days_left is None
    assert eta.estimate() is not None
    assert 0 < known(eta.days_left).p50 * SECONDS_PER_DAY <= 1.5


def test_figure_counts_down_between_estimates_and_never_reaches_zero(tmp_path: Path) -> None:
    now_s = [100.0]
    eta = running_eta(tmp_path)
    eta.clock = lambda: now_s[0]
    eta.follow(progress())
    eta.estimate()
    first = known(eta.days_left)
    now_s[0] += 3.0
    assert known(eta.days_left).p50 == pytest.approx(first.p50 - 3 / SECONDS_PER_DAY)
    now_s[0] += 1e6
    assert known(eta.days_left).p10 > 0


def test_log_is_fetched_again_only_if_it_has_more_readings(tmp_path: Path) -> None:
    seen: list[int] = []
    eta = running_eta(tmp_path)
    whole = eta.newer_log

    def newer(num_seen: int) -> LiveLog | None:
        seen.append(num_seen)
        return whole(num_seen) if num_seen < 10 else None

    eta.newer_log = newer
    eta.estimate()
    assert eta.estimate() is not None, "the log at hand serves"
    assert seen == [0, 10]


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
        return replace(run_update(*given), deviations=(deviation,))  # type: ignore[arg-type]

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
    monkeypatch.setattr("pipeline.live.eta._WAIT_AFTER_ERROR_S", 0.002)
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


def test_last_row_that_ends_is_estimated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.live.eta._SHORTEST_WAIT_S", 600.0)
    monkeypatch.setattr("pipeline.live.eta._LONGEST_WAIT_S", 600.0)
    eta = running_eta(tmp_path)
    with eta.working():
        eta.follow(progress(rows_done=100))
        wait_until(lambda: eta.days_left is not None)


def test_time_for_the_plan_does_not_delay_the_next_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def slow(*given: object, **options: object) -> Expectation:
        now_s[0] += 1000.0
        return expectation(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.live.eta.expectation", slow)
    eta = running_eta(tmp_path)
    eta.clock = lambda: now_s[0]
    assert eta.estimate() is not None
    assert eta.next_wait_s < 2.0
