"""The turns of one row, asked of a fake engine."""

import asyncio
import json
from dataclasses import replace

from pipeline.worker.generation import Generator
from pipeline.worker.refusals import Refusals
from pipeline.worker.retries import Attempts
from pipeline.worker.row import Row, row_completion
from schemas.completion import Completion, Interruption, Outcome, Refusal, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import FunctionCall, Message, Problem, Request, ToolCall
from schemas.shard import LeaseKey
from tests.fakes.desk import prompt
from tests.fakes.fake_engine import FakeEngine, echo

CALL = ToolCall(id="c1", function=FunctionCall(name="w", arguments="{}"))


def completed(row: Row) -> Completion:
    config = generator_of(FakeEngine()).config
    return row_completion(row, None, config=config, engine=FakeEngine(), worker_id="w0", now_s=1.0)


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
    attempts = Attempts(retry=config.retry, max_consecutive_failures=9, outage_patience_s=60.0)
    return Generator(
        engine=engine,
        config=config,
        attempts=attempts,
        refusals=Refusals(most_unproven=9),
        language_of=None,
        worker_id="w0",
    )


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


def calls_first(request: Request) -> Outcome:
    turn = echo(request)
    assert isinstance(turn, Turn)
    if request.turn_index:
        return turn
    return replace(turn, answer_text="", tool_calls=(CALL,), finish_reason="tool_calls")


def test_call_without_a_result_in_the_source_ends_the_conversation() -> None:
    row = a_row(turns=2)
    assert asyncio.run(generator_of(FakeEngine(script=calls_first)).generate(row)) is None
    assert [turn.tool_calls for turn in row.turns] == [(CALL,)]
    assert row.flags == set()
    made = completed(row)
    assert (made.status, made.finish_reason, made.tool_calls) == ("ok", "tool_calls", (CALL,))
    assert [message.role for message in made.messages] == ["user", "assistant"]
    assert made.messages[-1].tool_calls == (CALL,)


def test_turns_that_see_the_sources_answers_go_on_after_a_call() -> None:
    row = a_row(turns=2)
    row.prompt = replace(row.prompt, originals=("its own", "last"))
    engine = FakeEngine(script=calls_first)
    assert asyncio.run(generator_of(engine).generate(row)) is None
    assert len(row.turns) == 2
    assert engine.requests[1].messages[1] == Message(role="assistant", content="its own")
    made = completed(row)
    assert (made.tool_calls, made.messages[1].tool_calls) == (None, (CALL,))


def test_tools_of_a_row_are_sent_and_written_with_it() -> None:
    row = a_row()
    tool: dict[str, object] = {"type": "function", "function": {"name": "w"}}
    row.prompt = replace(row.prompt, tools=(tool,))
    engine = FakeEngine()
    asyncio.run(generator_of(engine).generate(row))
    assert engine.requests[0].tools == (tool,)
    assert json.loads(completed(row).tools or "") == [tool]
