"""The turns of one row, asked of a fake engine."""

import asyncio
from dataclasses import replace

from pipeline.worker.generation import Generator
from pipeline.worker.retries import Attempts
from pipeline.worker.row import Row
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Problem, Request
from schemas.shard import LeaseKey
from tests.fakes.desk import prompt
from tests.fakes.fake_engine import FakeEngine, echo


def generator_of(engine: FakeEngine, flag: str = "empty_answer") -> Generator:
    """Make a generator that asks again for turns with this flag."""
    config = RunFile.model_validate(
        {
            "prompts": {"path": "x"},
            "model": "m",
            "output": {"folder": "x"},
            "sampling": {"max_tokens": 50},
            "quality": {flag: {"policy": "retry"}},
        }
    )
    engine.alive = True
    attempts = Attempts(retry=config.retry, max_consecutive_failures=9)
    return Generator(engine=engine, config=config, attempts=attempts, language_of=None)


def a_row(*, turns: int = 1) -> Row:
    return Row(
        key=LeaseKey(shard_id=0, attempt=1),
        number=0,
        prompt=prompt(0, turns=turns),
        sample_index=0,
    )


def test_all_turns_are_generated_and_counted() -> None:
    engine, row = FakeEngine(), a_row(turns=3)
    generator = generator_of(engine)
    generator.attempts.num_consecutive_failures = 5
    assert asyncio.run(generator.generate(row)) is None
    assert len(row.turns) == 3
    # FakeEngine's turns have two tokens each.
    assert (generator.num_requests, generator.completion_tokens) == (3, 6)
    assert generator.attempts.num_consecutive_failures == 0
    assert row.attempts_at_turn == 0


def test_interrupted_turn_is_returned_and_counts_as_an_attempt() -> None:
    interruption = Interruption(cause="HTTP 503")

    def second_turn_fails(request: Request) -> Outcome:
        return interruption if request.turn_index == 1 else echo(request)

    row = a_row(turns=2)
    generator = generator_of(FakeEngine(script=second_turn_fails))
    assert asyncio.run(generator.generate(row)) == interruption
    assert (len(row.turns), row.attempts_at_turn) == (1, 1)
    assert asyncio.run(generator.generate(row)) == interruption
    assert (len(row.turns), row.attempts_at_turn, generator.num_requests) == (1, 2, 3)


def test_timeouts_and_http_errors_are_counted() -> None:
    outcomes: list[Outcome] = [
        Interruption(cause="no answer", connection_failed=True, kind="timeout"),
        Interruption(cause="HTTP 503", kind="refusal"),
        Interruption(cause="HTTP 429", kind="refusal"),
        Interruption(cause="reset", connection_failed=True),
        Refusal(kind="unusable_finish", text="tool_calls"),
        Refusal(kind="refused_by_engine", text="HTTP 400"),
    ]
    row = a_row()
    answers = iter(outcomes)
    generator = generator_of(FakeEngine(script=lambda request: next(answers)))
    for _ in outcomes:
        asyncio.run(generator.generate(row))
    assert generator.num_requests == 6
    assert (generator.num_timeouts, generator.num_refusals) == (1, 3)


def test_refusal_is_the_rows_problem_and_an_answer_of_the_engine() -> None:
    refusal = Refusal(kind="refused_by_engine", text="HTTP 400")
    generator = generator_of(FakeEngine(script=lambda request: refusal))
    generator.attempts.num_consecutive_failures = 5
    found = asyncio.run(generator.generate(a_row()))
    assert found == Problem(kind="refused_by_engine", text="HTTP 400")
    assert generator.attempts.num_consecutive_failures == 0


def test_refused_retry_of_a_flagged_turn_keeps_the_turn_and_goes_on() -> None:
    def refuses_retries(request: Request) -> Outcome:
        if len(engine.requests) == 2:
            return Refusal(kind="refused_by_engine", text="HTTP 400")
        turn = echo(request)
        assert isinstance(turn, Turn)
        return replace(turn, answer_text="") if request.turn_index == 0 else turn

    engine, row = FakeEngine(script=refuses_retries), a_row(turns=2)
    assert asyncio.run(generator_of(engine).generate(row)) is None
    assert [turn.answer_text for turn in row.turns] == ["", "answer to question 0.1"]
    assert row.flags == {"empty_answer"}


def test_turn_without_a_token_count_adds_none() -> None:
    def uncounted(request: Request) -> Outcome:
        turn = echo(request)
        assert isinstance(turn, Turn)
        return replace(turn, completion_tokens=None)

    generator = generator_of(FakeEngine(script=uncounted))
    assert asyncio.run(generator.generate(a_row())) is None
    assert generator.completion_tokens == 0


def test_context_length_of_the_engine_limits_a_retry() -> None:
    def cut(request: Request) -> Outcome:
        turn = echo(request)
        assert isinstance(turn, Turn)
        return replace(turn, finish_reason="length", prompt_tokens=40)

    engine = FakeEngine(script=cut, context_length=100)
    asyncio.run(generator_of(engine, "cut_in_answer").generate(a_row()))
    # 100 tokens of context less 40 of prompt; twice the budget would be 100.
    assert [request.sampling.max_tokens for request in engine.requests][:2] == [50, 60]
