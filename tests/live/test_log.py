"""The log of the readings: how it is bounded, and that its file gives it back."""

from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.live.log import LiveLog, LogKeeper, engine_seconds, read_live_log, write_live_log
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import READINGS_FILE
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.progress import TimeLeft
from tests.fakes.live_run import run_file, span


def days(middle: float) -> Band:
    return Band(p10=middle / 2, p50=middle, p90=middle * 2)


def test_time_left_is_noted_when_it_changes_and_read_again(tmp_path: Path) -> None:
    log = LiveLog(began_at_s=1000.0, run_file={})
    for now_s, middle in ((1010.0, 3.0), (1020.0, 3.0), (1030.0, 2.0), (1040.0, 3.0)):
        log.note_time_left(days(middle), now_s=now_s)
    assert log.times_left == [
        TimeLeft(at_s=10.0, days=days(3.0)),
        TimeLeft(at_s=30.0, days=days(2.0)),
        TimeLeft(at_s=40.0, days=days(3.0)),
    ]
    write_live_log(LocalFolder(tmp_path), log)
    assert read_live_log(LocalFolder(tmp_path)) == log


def test_interruptions_are_read_again_and_absent_in_files_of_earlier_releases(
    tmp_path: Path,
) -> None:
    log, folder = LiveLog(began_at_s=0.0, run_file={}), LocalFolder(tmp_path)
    log.add("w0", span(interrupted=((30, 2),)), now_s=30.0)
    log.add("w0", span(engine_age_s=30.0, interrupted=((30, 1), (90, 1))), now_s=60.0)
    write_live_log(folder, log)
    assert read_live_log(folder) == log
    assert log.interrupted == {30: 3, 90: 1}
    lines = folder.read(READINGS_FILE).decode().replace('"interrupted":[[30,3],[90,1]],', "")
    fields = (',"finished":2,"finished_tokens":200', "")
    folder.write_whole(READINGS_FILE, lines.replace(*fields).encode())
    old = read_live_log(folder)
    assert old is not None
    assert not old.interrupted
    assert [each.finished for each in old.readings["w0"]] == [0, 0]


def test_noted_times_are_thinned_evenly() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(1000):
        log.note_time_left(days(1000.0 - number), now_s=float(number))
    times = [noted.at_s for noted in log.times_left]
    assert len(times) == 240
    assert (times[0], times[-1]) == (0.0, 999.0)
    # 999 s between 240 times: 4.2 s on average.
    assert max(after - before for before, after in pairwise(times)) <= 9


def test_log_stays_small_and_keeps_its_sums() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(3000):
        told = span(engine_age_s=30.0 * number, tokens_per_s=100.0 + number % 2)
        log.add("w0", told, now_s=30.0 * (number + 1))
    readings = log.readings["w0"]
    assert len(readings) <= 120
    tokens = sum(each.tokens_per_s * (each.end_s - each.start_s) for each in readings)
    assert tokens == pytest.approx(30.0 * 3000 * 100.5)
    assert engine_seconds(log) == pytest.approx((90_000.0, 90_000.0))
    assert log.finished == {100: 6000}
    assert sorted(log.running_tokens()) == [50] * 8


def test_readings_of_two_launches_are_never_merged() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(400):
        launch, within = divmod(number, 50)
        told = span(engine_age_s=30.0 * within, cap_requests=8 + launch)
        log.add("w0", told, now_s=1000.0 * launch + 30.0 * (number + 1))
    assert len({each.cap_requests for each in log.readings["w0"]}) == 8
    ran_s, passed_s = engine_seconds(log)
    assert passed_s - ran_s == pytest.approx(7 * 1000.0)


def test_log_comes_back_from_its_file_and_a_session_between_is_no_loss(tmp_path: Path) -> None:
    folder, config = LocalFolder(tmp_path), run_file(tmp_path)
    keeper = LogKeeper.opened(folder, config, now_s=1000.0)
    keeper.log.add("w0", span(), now_s=1040.0)
    keeper.write()
    again = LogKeeper.opened(folder, config, now_s=9000.0)
    assert list(again.log.running_tokens()) == []
    again.log.add("w0", span(), now_s=9035.0)
    again.write()
    log = read_live_log(folder)
    assert log is not None
    assert RunFile.model_validate(log.run_file) == config
    assert log.finished == {100: 4}
    assert engine_seconds(log) == pytest.approx((60.0, 60.0))


def test_worker_that_follows_a_dead_one_has_its_slot(tmp_path: Path) -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    log.add("w0", span(), now_s=30.0)
    log.add("w0r1", span(), now_s=100.0)
    assert len(list(log.running_tokens())) == 8
    assert engine_seconds(log) == pytest.approx((60.0, 100.0))


def test_spoilt_file_of_readings_does_not_stop_a_run(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("live-readings.jsonl", b"{]\n")
    keeper = LogKeeper.opened(folder, run_file(tmp_path), now_s=1000.0)
    keeper.log.add("w0", span(), now_s=1040.0)
    keeper.write()
    log = read_live_log(folder)
    assert log is not None
    assert log.num_added == 1


# --- bounds ------------------------------------------------------------------------------------


def test_engine_that_is_silent_for_two_minutes_has_nothing_in_flight() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    log.add("w0", span(running=((10, 1),)), now_s=30.0)
    log.add("w1", span(running=((20, 2),)), now_s=150.0)
    assert sorted(log.running_tokens()) == [10, 20, 20]
    log.add("w1", span(running=((20, 2),)), now_s=150.1)
    assert sorted(log.running_tokens()) == [20, 20]
    assert list(LiveLog(began_at_s=0.0, run_file={}).running_tokens()) == []


def test_merged_reading_is_the_mean_by_time() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for number in range(121):
        is_second = number == 1
        reported = span(
            engine_age_s=max(30.0 * number - 20.0, 0.0),
            duration_s=10.0 if number == 0 else 30.0,
            running_requests=4.0 if is_second else 8.0,
            tokens_per_s=60.0 if is_second else 100.0,
            prompt_tokens_per_s=6.0 if is_second else 10.0,
            accept_length={0: 2.0, 1: 3.0}.get(number),
        )
        log.add("w0", reported, now_s=30.0 * (number + 1))
    assert len(log.readings["w0"]) == 120
    # The first two are the shortest pair: 10 s and 30 s.
    first = log.readings["w0"][0]
    assert (first.start_s, first.end_s, first.engine_age_s) == (20.0, 60.0, 0.0)
    assert (first.running_requests, first.tokens_per_s) == (5.0, 70.0)
    assert (first.prompt_tokens_per_s, first.accept_length) == (7.0, 2.75)
    assert log.readings["w0"][1].accept_length is None


def test_many_engines_share_the_bound_but_keep_four_readings() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    for worker in range(1001):
        for number in range(6):
            log.add(f"w{worker}", span(engine_age_s=30.0 * number), now_s=30.0 * (number + 1))
    assert len(log.readings["w1000"]) == 4
    assert log.num_added == 6006


def test_file_is_written_at_most_every_15_s_and_only_if_something_is_new(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    keeper = LogKeeper.opened(folder, run_file(tmp_path), now_s=1000.0)
    keeper.write_if_due(now_s=100.0)
    assert not folder.exists("live-readings.jsonl")
    keeper.log.add("w0", span(card="H200"), now_s=1040.0)
    keeper.write_if_due(now_s=114.9)
    assert not folder.exists("live-readings.jsonl")
    keeper.write_if_due(now_s=115.0)
    log = read_live_log(folder)
    assert log is not None
    assert (log.num_added, log.cards, log.counted_by_answers) == (1, {"w0": "H200"}, True)
    folder.remove("live-readings.jsonl")
    keeper.write_if_due(now_s=200.0)
    assert not folder.exists("live-readings.jsonl")


@pytest.mark.parametrize(
    "lines", ['{"record": "reading"}', '{"record": "run"}', "[]", '{"no": "record"}']
)
def test_file_that_is_no_log_is_refused_with_its_line(tmp_path: Path, lines: str) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole("live-readings.jsonl", lines.encode() + b"\n")
    with pytest.raises(ConfigError, match=r"live-readings.jsonl line 1: not a record of readings"):
        read_live_log(folder)


def test_engines_counters_leave_no_trace_of_answers() -> None:
    log = LiveLog(began_at_s=0.0, run_file={})
    log.add("w0", span(counted_by="engine"), now_s=30.0)
    assert not log.counted_by_answers
    assert engine_seconds(LiveLog(began_at_s=0.0, run_file={})) == (0.0, 0.0)
