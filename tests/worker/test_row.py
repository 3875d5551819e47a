"""A row from its lease to its completion: requests, flagged turns, what is written."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.quality.flags import LanguageOf
from pipeline.worker.row import (
    Row,
    add_or_retry_turn,
    engine_killed,
    failed_row,
    keep_flagged_turn,
    over_context,
    row_completion,
    row_request,
    rows_of_lease,
)
from schemas.completion import Completion, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Message, Problem
from schemas.shard import Lease, LeaseKey
from tests.fakes.desk import prompt, prompts_of
from tests.fakes.example_completion import TURN
from tests.fakes.fake_engine import FakeEngine

KEY = LeaseKey(shard_id=3, attempt=2)
EMPTY = replace(TURN, answer_text="")
CUT = replace(TURN, answer_text="an", finish_reason="length", prompt_tokens=900)


def run_file(**settings: object) -> RunFile:
    values: dict[str, Any] = {"prompts": {"path": "x"}, "model": "m", "output": {"folder": "x"}}
    return RunFile.model_validate(values | settings)


RETRY_EMPTY = run_file(quality={"empty_answer": {"policy": "retry"}, "max_attempts": 2})


def a_row(*, turns: int = 1) -> Row:
    return Row(key=KEY, number=7, prompt=prompt(5, turns=turns), sample_index=1)


def add(
    row: Row,
    turn: Turn,
    config: RunFile,
    *,
    context_length: int | None = None,
    language_of: LanguageOf | None = None,
) -> None:
    add_or_retry_turn(row, turn, config, context_length=context_length, language_of=language_of)


def completed(row: Row, problem: Problem | None = None) -> Completion:
    engine = FakeEngine(name="sglang", release="sglang 0.5.23", plan="--tp 2")
    return row_completion(
        row, problem, config=run_file(), engine=engine, worker_id="w4", now_s=50.0
    )


def test_lease_is_rows_of_prompts_times_samples() -> None:
    lease = Lease(key=KEY, worker_id="w0", rows=(1, 2, 5), deaths=((2, 1), (4, 9)))
    rows = list(rows_of_lease(lease, prompts_of(3).__getitem__, 2))
    found = [(row.number, row.prompt.row_id, row.sample_index, row.deaths) for row in rows]
    assert found == [(1, "q000", 1, 0), (2, "q001", 0, 1), (5, "q002", 1, 0)]
    assert {row.key for row in rows} == {KEY}


# -- requests


def test_request_is_for_the_first_open_turn_with_a_seed_of_its_own() -> None:
    row = a_row(turns=2)
    first = row_request(row, run_file(), "w0")
    row.turns.append(TURN)
    second = row_request(row, run_file(), "w0")
    assert (first.row_id, first.sample_index, first.turn_index) == ("q005", 1, 0)
    assert (second.turn_index, second.messages[1].content) == (1, "seven")
    assert second.messages[1].reasoning_content is None
    assert first.sampling.seed != second.sampling.seed
    with_reasoning = row_request(row, run_file(reasoning_in_history=True), "w0")
    assert with_reasoning.messages[1] == Message(
        role="assistant", content="seven", reasoning_content="hm"
    )


def test_flagged_turn_is_requested_again_with_other_sampling() -> None:
    row = a_row()
    first = row_request(row, RETRY_EMPTY, "w0")
    add(row, EMPTY, RETRY_EMPTY)
    assert (row.turns, row.quality_retries, row.quality_retries_of_turn) == ([], 1, 1)
    again = row_request(row, RETRY_EMPTY, "w0")
    assert again.sampling == row.next_sampling
    assert again.sampling.seed != first.sampling.seed


# -- turns


def test_good_turn_is_kept_and_attempts_begin_anew() -> None:
    row = a_row(turns=2)
    row.attempts_at_turn = 4
    add(row, TURN, RETRY_EMPTY)
    assert (row.turns, row.flags, row.attempts_at_turn) == ([TURN], set(), 0)
    assert row.first_sampling is None


def test_flagged_turn_is_kept_with_its_flags_after_the_last_attempt() -> None:
    row = a_row(turns=2)
    add(row, EMPTY, RETRY_EMPTY)
    add(row, EMPTY, RETRY_EMPTY)
    assert (row.turns, row.flags, row.quality_retries) == ([EMPTY], {"empty_answer"}, 1)
    # The next turn has its own attempts and the usual sampling.
    assert (row.quality_retries_of_turn, row.next_sampling, row.flagged_turn) == (0, None, None)
    add(row, EMPTY, RETRY_EMPTY)
    assert (len(row.turns), row.quality_retries) == (1, 2)


def test_sampling_of_the_first_turn_is_written_and_not_that_of_a_later_one() -> None:
    row = a_row(turns=2)
    add(row, EMPTY, RETRY_EMPTY)
    first = row.next_sampling
    add(row, TURN, RETRY_EMPTY)
    add(row, EMPTY, RETRY_EMPTY)
    assert row.next_sampling != first
    add(row, TURN, RETRY_EMPTY)
    assert row.first_sampling == first
    assert completed(row).sampling == first


def test_turn_is_judged_by_the_last_question_that_was_asked() -> None:
    copied = run_file(quality={"copied_prompt": {"policy": "retry", "enabled": True}})
    question = "Name the seven seas that old sailors knew, and say where each of them lies. " * 3
    row = a_row(turns=2)
    row.turns.append(TURN)
    messages = list(row.prompt.messages)
    messages[2] = Message(role="user", content=question)
    row.prompt = replace(row.prompt, messages=tuple(messages))
    add(row, replace(TURN, answer_text=question), copied)
    assert row.quality_retries == 1


def test_language_detector_reaches_the_flag() -> None:
    config = run_file(quality={"wrong_language": {"enabled": True}})
    asked = "Why is the sky blue in the day and red in the evening? Please explain it to me. "
    row = a_row()
    row.prompt = replace(row.prompt, messages=(Message(role="user", content=asked * 3),))
    answer = "Der Himmel ist blau, weil die Luft das kurze Licht mehr streut als das lange. "
    turn = replace(TURN, answer_text=answer * 3)
    add(row, turn, config, language_of=lambda text: ("de" if "Himmel" in text else "en", 0.99))
    assert row.flags == {"wrong_language"}


@pytest.mark.parametrize(
    ("context_length", "max_tokens"),
    # The context leaves 1,050 - 900 tokens; without a known length the budget doubles.
    [(1050, 150), (None, 200), (2000, 200)],
)
def test_cut_turn_gets_a_larger_budget_as_far_as_the_context_leaves_it(
    context_length: int | None, max_tokens: int
) -> None:
    config = run_file(sampling={"max_tokens": 100}, quality={"cut_in_answer": {"policy": "retry"}})
    row = a_row()
    add(row, CUT, config, context_length=context_length)
    assert row.next_sampling is not None
    assert row.next_sampling.max_tokens == max_tokens


def test_cut_turn_that_no_budget_helps_is_kept_at_once() -> None:
    config = run_file(sampling={"max_tokens": 100}, quality={"cut_in_answer": {"policy": "retry"}})
    row = a_row()
    add(row, CUT, config, context_length=1000)
    assert (row.turns, row.flags, row.quality_retries) == ([CUT], {"cut_in_answer"}, 0)
    unknown = a_row()
    add(unknown, replace(CUT, prompt_tokens=None), config, context_length=1000)
    assert unknown.next_sampling is not None
    assert unknown.next_sampling.max_tokens == 200


def test_flagged_turn_is_kept_when_its_next_generation_is_refused() -> None:
    row = a_row()
    assert not keep_flagged_turn(row)
    add(row, EMPTY, RETRY_EMPTY)
    assert keep_flagged_turn(row)
    assert (row.turns, row.flags, row.quality_retries) == ([EMPTY], {"empty_answer"}, 0)
    assert not keep_flagged_turn(row)


# -- what is written


def test_whole_row_is_ok_with_where_and_how_it_was_made() -> None:
    row = a_row()
    row.turns, row.started_at_s, row.interruptions = [TURN], 20.0, 2
    row.flags, row.quality_retries = {"too_short", "empty_answer"}, 3
    found = completed(row)
    assert (found.status, found.finish_reason, found.error_kind) == ("ok", "stop", None)
    assert (found.engine, found.engine_release, found.plan) == (
        "sglang",
        "sglang 0.5.23",
        "--tp 2",
    )
    assert (found.worker_id, found.attempt, found.quality_retries) == ("w4", 3, 3)
    assert (found.started_at_s, found.finished_at_s) == (20.0, 50.0)
    # In the order of the flags' list.
    assert found.flags == ("empty_answer", "too_short")
    assert [message.content for message in found.messages] == ["question 5.0", "seven"]
    assert (found.content_hash, found.sample_index) == ("h5", 1)


def test_error_row_keeps_its_turns_and_says_what_is_wrong() -> None:
    row = a_row(turns=2)
    row.turns, row.started_at_s = [TURN], 20.0
    found = completed(row, Problem(kind="refused_by_engine", text="HTTP 400: no"))
    assert (found.status, found.finish_reason) == ("error", None)
    assert (found.error_kind, found.error_text) == ("refused_by_engine", "HTTP 400: no")
    assert found.turns == (TURN,)


def test_row_that_no_engine_was_asked_for_has_no_attempt() -> None:
    found = completed(a_row(), Problem(kind="no_user_turn", text="none"))
    assert (found.attempt, found.started_at_s, found.finish_reason) == (0, 50.0, None)


def test_failed_row_is_listed_with_its_attempts_and_cause() -> None:
    row = a_row()
    row.attempts_at_turn = 6
    failed = failed_row(row, "HTTP 500", now_s=9.0)
    assert (failed.row_id, failed.sample_index) == ("q005", 1)
    assert (failed.cause, failed.attempts, failed.failed_at_s) == ("HTTP 500", 6, 9.0)


def test_prompt_as_long_as_the_context_leaves_no_room_to_answer() -> None:
    assert over_context(99, 100) is None
    assert over_context(100, 100) == Problem(
        kind="over_context",
        text="the prompt has at least 100 tokens; the engine's context is 100",
    )


def test_row_that_killed_its_engine_alone_is_told_with_its_deaths() -> None:
    row = a_row()
    row.deaths = 2
    assert engine_killed(row, "connection: reset") == Problem(
        kind="engine_killed",
        text="the engine died 3 times with this row in flight, at last of: connection: reset",
    )
