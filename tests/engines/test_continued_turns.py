"""Parts of a turn and their whole: tokens, texts, thinking, and what cannot be continued."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.engines.wire.body import request_body
from pipeline.engines.wire.continuing import Continuing
from pipeline.errors import ConfigError
from pipeline.models.thinking import THINK
from schemas.completion import Interruption, Outcome, Turn
from schemas.partial import Continuation, PartialTurn, TokenIds
from schemas.prompt import Message, Request, SamplingParams

WORDS = {1: "so", 2: "</think>", 3: "yes", 4: "no", 9: ""}
SAMPLING = SamplingParams(
    temperature=0.7, top_p=None, top_k=None, min_p=None, presence_penalty=0.0,
    repetition_penalty=1.0, max_tokens=8, seed=7,
)  # fmt: skip
REQUEST = Request(
    row_id="q",
    sample_index=0,
    turn_index=0,
    messages=(Message(role="user", content="?"),),
    sampling=SAMPLING,
)


def words(lists: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(WORDS[one] for one in ids) for ids in lists]


def ids(*numbers: int) -> TokenIds:
    return TokenIds("i", numbers)


def continuing(**values: Any) -> Continuing:  # noqa: ANN401 - fields of the class
    made = Continuing(
        model="m",
        tags=THINK,
        **{"further_fields": {}, "read_decoder": lambda _: words, **values},
    )
    made.outcome(REQUEST, turn(1, 2, 3, reasoning=2), opens_in_prompt=True)
    return made


def turn(*numbers: int, prompt: TokenIds | None = None, reasoning: int | None = None) -> Turn:
    """A turn as SGLang's reasoning parser returns it."""
    before, closing, after = words([numbers])[0].partition("</think>")
    prompt_ids = ids(7, 7) if prompt is None else prompt
    return Turn(
        reasoning_text=before or None,
        answer_text=after if closing else "",
        finish_reason="stop",
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(numbers),
        reasoning_tokens=reasoning,
        prompt_token_ids=prompt_ids,
        completion_token_ids=ids(*numbers),
        generation_boundary=len(prompt_ids),
        duration_s=2.0,
    )


def part(
    *numbers: int, prompt: TokenIds | None = None, reasoning: int | None = None
) -> PartialTurn:
    return PartialTurn(
        prompt_token_ids=ids(7, 7) if prompt is None else prompt,
        completion_token_ids=ids(*numbers),
        reasoning_tokens=reasoning,
        is_thinking=reasoning is not None and reasoning >= len(numbers),
        duration_s=1.0,
        continued=(Continuation(at_token=len(numbers), worker_id="w1"),),
    )


def aborted(so_far: PartialTurn) -> Outcome:
    return Interruption(cause="the engine ended with 'abort'", so_far=so_far)


def kept(of: Continuing, so_far: PartialTurn, request: Request = REQUEST) -> PartialTurn | None:
    outcome = of.outcome(request, aborted(so_far), opens_in_prompt=True)
    assert isinstance(outcome, Interruption)
    return outcome.so_far


# -- what is kept


def test_the_last_step_is_left_out_with_all_tokens_that_drafting_may_add() -> None:
    first = kept(continuing(), part(1, 1, 1, 2, 3, 4, reasoning=4))
    assert first is not None
    assert (list(first.completion_token_ids), first.reasoning_tokens) == ([1, 1, 1, 2, 3], 4)
    assert not first.is_thinking
    # Four draft tokens: the closing tag is among those that are left out.
    first = kept(continuing(tokens_per_step=4), part(1, 1, 1, 2, 3, 4, reasoning=4))
    assert first is not None
    assert (list(first.completion_token_ids), first.reasoning_tokens) == ([1, 1], 2)
    assert first.is_thinking
    assert kept(continuing(tokens_per_step=6), part(1, 1, 1, 2, 3, 4)) is None


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, sampling=replace(SAMPLING, presence_penalty=0.5)),
        replace(REQUEST, sampling=replace(SAMPLING, frequency_penalty=0.5)),
        replace(REQUEST, sampling=replace(SAMPLING, repetition_penalty=1.1)),
        replace(REQUEST, sampling=replace(SAMPLING, stop=("no",))),
        replace(REQUEST, tools=({"type": "function"},)),
    ],
    ids=["presence", "frequency", "repetition", "stop", "tools"],
)
def test_turns_whose_rest_depends_on_more_than_their_ids_are_not_kept(request_: Request) -> None:
    of, so_far = continuing(), part(1, 1, 1)
    assert kept(of, so_far) is not None
    assert kept(of, so_far, request_) is None
    assert of.fitted(replace(request_, continues=so_far)).continues is None


def test_penalty_of_the_models_own_defaults_counts_where_a_request_has_none() -> None:
    request = replace(REQUEST, sampling=replace(SAMPLING, repetition_penalty=None))
    assert kept(continuing(), part(1, 1, 1), request) is not None
    of = continuing(read_penalty=lambda _: 1.05)
    assert kept(of, part(1, 1, 1), request) is None
    assert kept(of, part(1, 1, 1)) is not None


def test_nothing_is_kept_where_a_request_has_fields_of_unknown_effect() -> None:
    assert kept(continuing(further_fields={"min_tokens": 3}), part(1, 1, 1)) is None


def test_nothing_is_kept_without_a_tokenizer_or_before_a_turn_was_compared() -> None:
    assert kept(continuing(read_decoder=lambda _: None), part(1, 1, 1)) is None
    fresh = Continuing(model="m", tags=THINK, further_fields={}, read_decoder=lambda _: words)
    assert kept(fresh, part(1, 1, 1)) is None


def test_nothing_is_kept_of_a_model_whose_server_splits_its_texts_otherwise() -> None:
    of = continuing()
    other = replace(turn(1, 2, 3), answer_text="yes!")
    # A text that is cut may end within a character, and proves nothing.
    of.outcome(REQUEST, replace(other, finish_reason="length"), opens_in_prompt=True)
    assert kept(of, part(1, 1, 1)) is not None
    of.outcome(REQUEST, other, opens_in_prompt=True)
    assert kept(of, part(1, 1, 1)) is None


def test_nothing_is_kept_of_a_model_whose_tokenizer_is_damaged_or_fails_on_an_answer() -> None:
    def damaged(model: str) -> None:
        raise ConfigError("model: cannot read tokenizer.json")

    def fails(lists: Sequence[Sequence[int]]) -> list[str]:
        raise OverflowError("no such token")

    for read_decoder, why in ((damaged, "cannot read"), (lambda _: fails, "no such token")):
        lines: list[str] = []
        of = continuing(read_decoder=read_decoder, log=lines.append)
        assert kept(of, part(1, 1, 1)) is None
        assert len(lines) == 1
        assert why in lines[0]


def test_part_that_leaves_no_budget_begins_anew() -> None:
    of = continuing()
    fits, full = part(*[1] * 7), part(*[1] * 8)
    assert of.fitted(replace(REQUEST, continues=fits)).continues == fits
    assert of.fitted(replace(REQUEST, continues=full)).continues is None


# -- what is sent


def test_rest_is_requested_by_ids_within_the_budget_that_is_left() -> None:
    def body(request: Request) -> dict[str, object]:
        return request_body(
            request, model="m", template_kwargs={}, return_token_ids=True, further_fields={}
        )

    rest = body(replace(REQUEST, continues=part(1, 1, 1)))
    assert (rest["input_ids"], rest["max_tokens"]) == ([7, 7, 1, 1, 1], 5)
    whole = body(REQUEST)
    assert ("input_ids" in whole, whole["max_tokens"]) == (False, 8)
    without_budget = replace(REQUEST, sampling=replace(SAMPLING, max_tokens=None))
    assert "max_tokens" not in body(replace(without_budget, continues=part(1)))


# -- the whole

SENT = ids(7, 7, 1, 1)


@pytest.mark.parametrize(
    ("first", "rest", "texts", "reasoning"),
    [
        # Stopped in the thinking: the server counts 2 tokens up to the closing tag.
        (part(1, 1, reasoning=2), turn(1, 2, 3, prompt=SENT, reasoning=2), ("sososo", "yes"), 4),
        # Stopped in the answer: the server takes what follows for thinking.
        (
            part(2, 3, reasoning=1),
            turn(4, 9, prompt=ids(7, 7, 2, 3), reasoning=2),
            ("", "yesno"),
            1,
        ),
        # A server that does not count, and one that counts no thinking in the rest.
        (part(1, 1), turn(1, 2, 3, prompt=SENT), ("sososo", "yes"), None),
        (part(1, 1, reasoning=2), turn(1, 2, 3, prompt=SENT, reasoning=0), ("sososo", "yes"), None),
    ],
)
def test_whole_has_the_tokens_and_texts_of_both_parts(
    first: PartialTurn, rest: Turn, texts: tuple[str, str], reasoning: int | None
) -> None:
    request = replace(REQUEST, continues=first)
    whole = continuing().outcome(request, rest, opens_in_prompt=True)
    assert isinstance(whole, Turn)
    assert rest.completion_token_ids is not None
    assert whole.completion_token_ids == first.completion_token_ids + rest.completion_token_ids
    assert (whole.reasoning_text, whole.answer_text) == texts
    assert whole.reasoning_tokens == reasoning
    assert whole.prompt_token_ids == ids(7, 7)
    assert (whole.prompt_tokens, whole.generation_boundary) == (2, 2)
    assert whole.completion_tokens == len(whole.completion_token_ids)
    assert whole.duration_s == 3.0
    assert whole.continued == (Continuation(at_token=2, worker_id="w1"),)


def test_rest_that_is_aborted_lengthens_the_first_part() -> None:
    request = replace(REQUEST, continues=part(1, 1, reasoning=2))
    rest = part(1, 2, 3, 4, prompt=SENT, reasoning=2)
    outcome = continuing().outcome(request, aborted(rest), opens_in_prompt=True)
    assert isinstance(outcome, Interruption)
    assert outcome.so_far is not None
    assert list(outcome.so_far.completion_token_ids) == [1, 1, 1, 2, 3]
    assert list(outcome.so_far.prompt_token_ids) == [7, 7]
    assert (outcome.so_far.reasoning_tokens, outcome.so_far.is_thinking) == (4, False)
    assert outcome.so_far.duration_s == 2.0


def test_answer_that_did_not_continue_begins_anew_and_the_server_is_not_asked_again() -> None:
    lines: list[str] = []
    of = continuing(log=lines.append)
    request = replace(REQUEST, continues=part(1, 1))
    outcome = of.outcome(request, turn(1, 2, 3), opens_in_prompt=True)
    assert outcome is None
    assert "this release does not know input_ids" in lines[0]
    of.outcome(request, turn(1, 2, 3), opens_in_prompt=True)
    assert len(lines) == 1
    assert of.fitted(request).continues is None
