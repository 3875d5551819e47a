"""The fleet by its reports: the start, idle workers, silence, and flags of all engines."""

import pytest

from pipeline.run.fleet import Fleet
from schemas.config.quality import QualityConfig
from schemas.progress import WorkerReport, WorkerState
from tests.fakes.example_report import worker_report


def fleet(*, min_engines: int = 1) -> Fleet:
    quality = QualityConfig.model_validate({"empty_answer": {"max_share": 0.1}})
    return Fleet(min_engines=min_engines, quality=quality, accepted_shares={})


def with_flags(worker_id: str, num_flagged: int, *, of: int = 200) -> WorkerReport:
    flags = {"empty_answer": num_flagged}
    return worker_report(worker_id, window_rows=of, window_flags=flags)


# -- the start


def test_run_begins_when_enough_engines_are_ready_at_one_time() -> None:
    one = fleet(min_engines=2)
    assert one.engines_awaited == 2
    one.note_ready("w0")
    one.note_ready("w0")
    assert one.engines_awaited == 1
    one.note_ended("w0")
    one.note_ready("w1")
    assert one.engines_awaited == 1
    one.note_ready("w2")
    assert one.engines_awaited == 0


def test_run_that_has_begun_waits_for_no_engine_again() -> None:
    one = fleet(min_engines=2)
    for worker_id in ("w0", "w1"):
        one.note_ready(worker_id)
    for worker_id in ("w0", "w1"):
        one.note_ended(worker_id)
    assert one.engines_awaited == 0
    one.note_ready("w2")
    assert one.engines_awaited == 0


@pytest.mark.parametrize(
    ("state", "is_up"),
    [
        ("starting", False),
        ("restarting", False),
        ("lost", False),
        ("idle", True),
        ("running", True),
    ],
)
def test_start_is_new_once_the_engine_is_up(state: WorkerState, is_up: bool) -> None:
    one = fleet()
    assert one.note_start(worker_report("w0", state=state)) is is_up
    assert one.note_start(worker_report("w0", state=state)) is False
    assert one.note_start(worker_report("w0", state=state, restarts=1)) is is_up
    assert one.note_start(worker_report("w1", state=state)) is is_up


# -- rows for idle workers


def test_fullest_worker_gives_half_of_its_rows_back_once() -> None:
    one = fleet()
    for number, spare in enumerate((10, 41, 3)):
        one.note_report(worker_report(f"w{number}", not_started=spare))
    one.request_rows_back("idle")
    # Half of 41, rounded up.
    assert one.take_rows_to_give_back("w1") == 21
    assert one.take_rows_to_give_back("w1") == 0
    assert one.take_rows_to_give_back("w0") == 0


def test_worker_that_was_asked_is_passed_over_until_it_answers() -> None:
    one = fleet()
    one.note_report(worker_report("w0", not_started=10))
    one.note_report(worker_report("w1", not_started=41))
    one.request_rows_back("idle")
    one.request_rows_back("idle")
    assert one.take_rows_to_give_back("w1") == 21
    assert one.take_rows_to_give_back("w0") == 5


def test_idle_worker_is_not_asked_for_its_own_rows() -> None:
    one = fleet()
    one.note_report(worker_report("w0", not_started=10))
    one.request_rows_back("w0")
    assert one.take_rows_to_give_back("w0") == 0


@pytest.mark.parametrize(
    "last",
    [worker_report("w0", not_started=0), worker_report("w0", not_started=9, state="restarting")],
)
def test_worker_without_rows_to_spare_is_not_asked(last: WorkerReport) -> None:
    one = fleet()
    one.note_report(worker_report("w0", not_started=10))
    one.note_report(last)
    one.request_rows_back("idle")
    assert one.take_rows_to_give_back("w0") == 0


def test_worker_that_ended_is_not_asked_and_has_no_report() -> None:
    one = fleet()
    one.note_report(worker_report("w0", not_started=10))
    one.note_ended("w0")
    one.request_rows_back("idle")
    assert one.take_rows_to_give_back("w0") == 0
    assert one.reports == {}


# -- silence


def test_silent_worker_is_declared_dead_until_it_was_told() -> None:
    one = fleet()
    assert not one.is_declared_dead("w0")
    one.declare_dead("w0")
    assert one.is_declared_dead("w0")
    assert not one.is_declared_dead("w1")
    one.declare_alive("w0")
    assert not one.is_declared_dead("w0")


# -- engines that write badly


def test_engine_that_writes_worse_than_the_others_is_drained() -> None:
    one = fleet()
    for worker_id, flagged in (("w0", 120), ("w1", 2)):
        one.note_report(with_flags(worker_id, flagged))
    assert one.drain_cause("w1") is None
    assert one.drain_cause("w0") == "empty_answer in 120 of its last 200 rows (limit 10%)"


def test_flag_that_all_engines_break_is_returned_once() -> None:
    one = fleet()
    for worker_id, flagged in (("w0", 120), ("w1", 80)):
        one.note_report(with_flags(worker_id, flagged))
    assert one.take_flags_of_all(now_s=29.9) == {}
    assert one.take_flags_of_all(now_s=30.0) == {"empty_answer": 0.5}
    assert one.take_flags_of_all(now_s=90.0) == {}


def test_engines_are_compared_at_an_interval() -> None:
    one = fleet()
    assert one.take_flags_of_all(now_s=100.0) == {}
    for worker_id in ("w0", "w1"):
        one.note_report(with_flags(worker_id, 100))
    assert one.take_flags_of_all(now_s=129.9) == {}
    assert one.take_flags_of_all(now_s=130.0) == {"empty_answer": 0.5}


def test_accepted_share_is_the_limit_of_its_flag() -> None:
    one = fleet()
    one.accepted_shares = {"empty_answer": 0.6}
    for worker_id, flagged in (("w0", 120), ("w1", 2)):
        one.note_report(with_flags(worker_id, flagged))
    assert one.drain_cause("w0") is None
