"""Attempts and starts: when an engine is sick, when to ask again, who goes with whom."""

import pytest

from pipeline.worker.retries import Attempts, Starts, Suspects, is_out_of_starts
from pipeline.worker.row import Row
from schemas.completion import Interruption
from schemas.config.engine import EngineConfig
from schemas.config.running import RetryConfig
from schemas.shard import LeaseKey
from tests.fakes.desk import prompt

FAILED = Interruption(cause="HTTP 500")
BUSY = Interruption(cause="HTTP 429", retry_after_s=2.0)


def attempts(max_consecutive_failures: int = 1000, **retry: float) -> Attempts:
    return Attempts(
        retry=RetryConfig.model_validate(retry),
        max_consecutive_failures=max_consecutive_failures,
        outage_patience_s=60.0,
    )


# -- sick engines


def test_failures_in_a_row_make_an_engine_sick_and_an_answer_breaks_the_row() -> None:
    counted = attempts(max_consecutive_failures=3)
    assert [counted.note_failure(FAILED, now_s=0.0) for _ in range(2)] == [None, None]
    counted.note_answer()
    assert [counted.note_failure(FAILED, now_s=0.0) for _ in range(2)] == [None, None]
    assert (
        counted.note_failure(FAILED, now_s=0.0)
        == "3 requests failed in a row, the last with: HTTP 500"
    )


def test_engine_is_sick_when_more_than_nine_of_ten_of_200_requests_fail() -> None:
    counted = attempts()
    for _ in range(20):
        counted.note_answer()
    # 180 of 200 is nine of ten: not yet.
    assert [counted.note_failure(FAILED, now_s=0.0) for _ in range(180)] == [None] * 180
    # The oldest answer leaves the 200: 181 failures are in.
    assert (
        counted.note_failure(FAILED, now_s=0.0)
        == "181 of 200 requests failed, the last with: HTTP 500"
    )


def test_busy_engine_leaves_its_rows_to_others_for_longer_each_time_until_it_answers() -> None:
    counted = attempts()
    busy = Interruption(cause="HTTP 429", is_engines=True)
    assert not counted.is_to_leave_rows(1000.0)
    counted.note_failure(busy, now_s=1000.0)
    assert not counted.is_to_leave_rows(1009.9)
    assert counted.is_to_leave_rows(1010.0)
    # 6, 12, 24, 30 and 30 s of rest, and 3 s for a probe after each.
    now_s, rests = 1010.0, []
    for _ in range(5):
        rests.append(counted.rest(now_s))
        assert counted.held_until_s == now_s + rests[-1]
        now_s = counted.held_until_s
        counted.note_failure(busy, now_s=now_s)
        assert not counted.is_to_leave_rows(now_s + 2.9)
        assert counted.is_to_leave_rows(now_s + 3.0)
    assert rests == [6.0, 12.0, 24.0, 30.0, 30.0]
    counted.note_answer()
    assert not counted.is_to_leave_rows(now_s + 1000.0)


def test_engine_that_denies_everything_keeps_its_rows_until_it_is_drained() -> None:
    counted = attempts()
    counted.note_failure(Interruption(cause="401", kind="denial", is_engines=True), now_s=0.0)
    assert not counted.is_to_leave_rows(1000.0)


def test_answers_are_no_failures_however_many() -> None:
    counted = attempts()
    for _ in range(400):
        counted.note_answer()
    assert counted.note_failure(FAILED, now_s=0.0) is None


def test_server_that_asks_for_a_wait_is_busy_and_not_sick() -> None:
    counted = attempts()
    assert {counted.note_failure(BUSY, now_s=0.0) for _ in range(300)} == {None}
    assert counted.note_failure(FAILED, now_s=0.0) is not None


def test_engine_that_is_busy_or_away_is_waited_for_and_not_for_ever() -> None:
    counted = attempts(max_consecutive_failures=3)
    away = Interruption(cause="HTTP 503", is_engines=True)
    assert {counted.note_failure(away, now_s=float(second)) for second in range(5, 66)} == {None}
    assert counted.note_failure(away, now_s=65.5) == "no answer for 60 s, the last with: HTTP 503"
    # An answer ends the outage, and another may last as long.
    counted.note_answer()
    assert counted.note_failure(away, now_s=70.0) is None
    assert counted.note_failure(away, now_s=130.0) is None


def test_denials_restart_no_engine_since_probes_judge_them() -> None:
    counted = attempts(max_consecutive_failures=2)
    denial = Interruption(cause="HTTP 401", kind="denial", is_engines=True)
    for _ in range(300):
        assert counted.note_failure(denial, now_s=0.0) is None


def test_restarted_engine_is_not_judged_by_what_was_before() -> None:
    counted = attempts(max_consecutive_failures=250)
    for _ in range(190):
        counted.note_failure(FAILED, now_s=0.0)
    counted.reset()
    assert counted.num_consecutive_failures == 0
    assert counted.note_failure(FAILED, now_s=0.0) is None


# -- waits


@pytest.mark.parametrize(
    ("num_attempts", "low_s", "high_s"),
    # 2 s doubled with each attempt, 20 s at most, times 0.5 to 1.1.
    [(1, 1.0, 2.2), (2, 2.0, 4.4), (4, 8.0, 17.6), (5, 10.0, 22.0), (9, 10.0, 22.0)],
)
def test_backoff_doubles_up_to_its_maximum_and_is_jittered(
    num_attempts: int, low_s: float, high_s: float
) -> None:
    counted = attempts(backoff_initial_s=2.0, backoff_max_s=20.0)
    waits_s = [counted.backoff_s(num_attempts, None) for _ in range(300)]
    assert low_s <= min(waits_s) < low_s * 1.15
    assert high_s * 0.9 < max(waits_s) <= high_s


def test_retry_after_is_waited_for_in_full_and_capped() -> None:
    counted = attempts(backoff_initial_s=1.0, backoff_max_s=9.0, retry_after_max_s=60.0)
    waits_s = [counted.backoff_s(1, 30.0) for _ in range(100)]
    assert min(waits_s) >= 30.0
    assert 31.0 < max(waits_s) <= 33.0
    assert 60.0 <= counted.backoff_s(1, 3600.0) <= 66.0
    # The backoff is longer than what the server asks for.
    assert counted.backoff_s(4, 0.5) >= 8.0


def test_engine_that_refuses_as_many_as_it_runs_is_left_alone_for_as_long_as_it_says() -> None:
    counted = attempts(retry_after_max_s=60.0)
    counted.note_failure(BUSY, now_s=0.0)
    counted.hold_if_refused(BUSY, max_running_requests=2, now_s=100.0)
    assert counted.held_until_s == 0.0
    counted.note_failure(BUSY, now_s=0.0)
    counted.hold_if_refused(FAILED, max_running_requests=2, now_s=100.0)
    assert counted.held_until_s == 0.0
    counted.hold_if_refused(BUSY, max_running_requests=2, now_s=100.0)
    assert counted.held_until_s == 102.0
    long = Interruption(cause="HTTP 429", retry_after_s=900.0)
    counted.hold_if_refused(long, max_running_requests=2, now_s=100.0)
    assert counted.held_until_s == 160.0


# -- starts


def test_starts_with_other_launch_flags_count_anew() -> None:
    starts = Starts()
    plans = (None, None, "a", "a", "b")
    assert [starts.note_start(plan, now_s=0.0) for plan in plans] == [1, 2, 1, 2, 1]
    starts.reset()
    assert starts.note_start("b", now_s=0.0) == 1


@pytest.mark.parametrize(
    ("kind", "is_first", "attempts", "lost_s", "is_out"),
    [
        ("sglang", True, 1, 0.0, False),
        ("sglang", True, 2, 0.0, True),
        ("sglang", False, 3, 0.0, False),
        ("sglang", False, 4, 0.0, True),
        # How long it is lost is no matter for an engine of ours, nor how often for an address.
        ("sglang", False, 3, 9e9, False),
        ("endpoint", True, 1, 0.0, True),
        ("endpoint", False, 99, 60.0, False),
        ("endpoint", False, 1, 60.1, True),
    ],
)
def test_engine_is_abandoned_by_starts_and_an_endpoint_by_time(
    kind: str, is_first: bool, attempts: int, lost_s: float, is_out: bool
) -> None:
    server = {"base_urls": ["http://x/v1"]} if kind == "endpoint" else {"command": ["sglang"]}
    engine = EngineConfig.model_validate(
        {"kind": kind, "max_restarts": 4, "outage_patience_s": 60.0, **server}
    )
    found = is_out_of_starts(engine, is_first=is_first, attempts=attempts, lost_s=lost_s)
    assert found is is_out


# -- suspects


def suspects_of(*deaths: int) -> Suspects:
    suspects = Suspects(max_deaths=2)
    for number, count in enumerate(deaths):
        suspects.add(
            Row(
                key=LeaseKey(shard_id=0, attempt=1),
                number=number,
                prompt=prompt(number),
                sample_index=0,
                deaths=count,
            )
        )
    return suspects


def taken(suspects: Suspects, max_rows: int) -> list[int]:
    return [row.number for row in suspects.take_together(max_rows)]


def test_few_suspects_go_one_by_one() -> None:
    suspects = suspects_of(*[2] * 8)
    assert [taken(suspects, 99) for _ in range(8)] == [[number] for number in range(8)]
    assert len(suspects) == 0


def test_many_suspects_go_in_groups_of_sixteen() -> None:
    suspects = suspects_of(*[2] * 26)
    assert taken(suspects, 99) == list(range(16))
    assert taken(suspects, 99) == list(range(16, 26))


def test_group_is_no_larger_than_what_the_engine_runs() -> None:
    assert taken(suspects_of(*[2] * 20), 5) == [0, 1, 2, 3, 4]


def test_row_whose_group_died_goes_alone_after_the_groups() -> None:
    suspects = suspects_of(3, *[2] * 9)
    assert taken(suspects, 99) == list(range(1, 10))
    assert taken(suspects, 99) == [0]


def test_row_is_suspect_from_its_deaths_on() -> None:
    suspects = suspects_of(1, 2, 3)
    assert [suspects.is_suspect(row) for row in suspects._rows] == [False, True, True]
    suspects.clear()
    assert len(suspects) == 0
