"""Refused rows are held back until it is known who is at fault. Time is a number."""

from dataclasses import replace

import pytest

from pipeline.worker.refusals import MOST_HELD, Refusals
from pipeline.worker.row import Row
from schemas.completion import Interruption, Outcome, Refusal
from schemas.prompt import Problem
from schemas.shard import LeaseKey
from tests.fakes.desk import prompt
from tests.fakes.fake_engine import PROBE, echo

PROBLEM = Problem(kind="refused_by_engine", text="HTTP 400: no")
REFUSED = Refusal(kind="refused_by_engine", text="HTTP 400: no")
DENIED = Interruption(cause="HTTP 401", kind="denial", is_engines=True)
BUSY = Interruption(cause="HTTP 503", is_engines=True)
ANSWER = echo(PROBE)


def row(number: int) -> Row:
    key = LeaseKey(shard_id=0, attempt=1)
    return Row(key=key, number=number, prompt=prompt(number), sample_index=0)


def holding(num_rows: int, *, most: int = 50, has_answered: bool = True) -> Refusals:
    """Hold rows that were refused at 10 s; an answer came long before."""
    refusals = Refusals(most_unproven=most)
    if has_answered:
        refusals.note_answer(PROBE, sent_s=0.0)
    for number in range(num_rows):
        refusals.hold(row(number), PROBLEM, now_s=10.0)
    return refusals


def settled(refusals: Refusals) -> list[int]:
    return [row.number for row, _ in refusals.take_settled()]


def probed(refusals: Refusals, outcome: Outcome | None, *, has_others: bool = False) -> None:
    refusals.note_probe(outcome, has_others=has_others, now_s=20.0)


def test_answer_to_a_later_request_settles_what_was_refused_before() -> None:
    refusals = holding(2)
    refusals.hold(row(2), PROBLEM, now_s=12.0)
    # On its way before the refusals: it shows that the server was well, not that it is.
    refusals.note_answer(PROBE, sent_s=9.0)
    assert settled(refusals) == []
    refusals.note_answer(PROBE, sent_s=11.0)
    assert settled(refusals) == [0, 1]
    assert refusals.num_held == 1
    refusals.note_answer(PROBE, sent_s=12.0)
    assert settled(refusals) == [2]


def test_probe_is_due_after_a_while_or_when_nothing_else_is_to_be_sent() -> None:
    refusals = holding(1)
    assert not refusals.is_probe_due(now_s=14.9, is_idle=False)
    assert refusals.is_probe_due(now_s=15.0, is_idle=False)
    assert refusals.is_probe_due(now_s=10.0, is_idle=True)
    many = holding(MOST_HELD)
    assert many.is_full
    assert many.is_probe_due(now_s=10.0, is_idle=False)
    assert not holding(0).is_probe_due(now_s=99.0, is_idle=True)


@pytest.mark.parametrize("outcome", [None, ANSWER])
def test_probe_that_is_accepted_settles_the_rows(outcome: Outcome | None) -> None:
    refusals = holding(3)
    probed(refusals, outcome)
    assert settled(refusals) == [0, 1, 2]
    assert refusals.drain_cause is None
    assert not refusals.is_probe_due(now_s=99.0, is_idle=True)


@pytest.mark.parametrize("outcome", [REFUSED, DENIED])
def test_engine_that_refuses_three_probes_leaves_with_its_rows_undone(outcome: Outcome) -> None:
    refusals = holding(3)
    for _ in range(2):
        probed(refusals, outcome)
        assert refusals.drain_cause is None
        # Not at once again: a server that restarts needs a moment.
        assert not refusals.is_probe_due(now_s=24.9, is_idle=True)
        assert refusals.is_probe_due(now_s=25.0, is_idle=False)
    probed(refusals, outcome)
    assert "refuses every request: HTTP 40" in str(refusals.drain_cause)
    assert settled(refusals) == []


def test_probes_count_in_a_row() -> None:
    refusals = holding(1)
    probed(refusals, REFUSED)
    probed(refusals, REFUSED)
    probed(refusals, None)
    refusals.hold(row(9), PROBLEM, now_s=30.0)
    probed(refusals, REFUSED)
    probed(refusals, BUSY)
    probed(refusals, REFUSED)
    assert refusals.drain_cause is None


def test_probes_alone_settle_no_more_rows_than_a_window_has() -> None:
    refusals = holding(MOST_HELD, most=30)
    probed(refusals, None)
    assert len(settled(refusals)) == MOST_HELD
    for number in range(100, 111):
        refusals.hold(row(number), PROBLEM, now_s=30.0)
    probed(refusals, None)
    assert settled(refusals) == []
    assert "refused 31 rows in a row, the last: HTTP 400: no" in str(refusals.drain_cause)


def test_answer_in_between_begins_the_count_anew() -> None:
    refusals = holding(MOST_HELD, most=30)
    probed(refusals, None)
    refusals.take_settled()
    refusals.note_answer(PROBE, sent_s=25.0)
    for number in range(100, 111):
        refusals.hold(row(number), PROBLEM, now_s=30.0)
    probed(refusals, None)
    assert len(settled(refusals)) == 11


def test_rows_go_to_others_while_the_engine_has_answered_none() -> None:
    refusals = holding(2, has_answered=False)
    assert refusals.accepted is None
    probed(refusals, None, has_others=True)
    assert "refused 2 rows in a row" in str(refusals.drain_cause)
    alone = holding(2, has_answered=False)
    probed(alone, None)
    assert settled(alone) == [0, 1]


def test_denial_has_the_engine_probed() -> None:
    refusals = Refusals(most_unproven=20)
    refusals.note_denial(now_s=10.0)
    assert refusals.is_probe_due(now_s=15.0, is_idle=False)
    probed(refusals, None)
    assert not refusals.is_probe_due(now_s=99.0, is_idle=True)


def test_last_answer_is_what_the_next_probe_sends() -> None:
    refusals = holding(0)
    later = replace(PROBE, row_id="later")
    refusals.note_answer(later, sent_s=1.0)
    assert refusals.accepted == later


def test_rows_that_are_given_back_are_forgotten() -> None:
    refusals = holding(3)
    refusals.clear()
    assert refusals.num_held == 0
    assert not refusals.is_probe_due(now_s=99.0, is_idle=True)
