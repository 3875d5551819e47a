"""Interrupted rows on disk: what is read is what was written."""

import json

import pytest

from schemas.begun import BegunRow, FlaggedTurn
from schemas.completion import Turn
from schemas.partial import Continuation, PartialTurn, TokenIds
from schemas.prompt import FunctionCall, SamplingParams, TokenBias, ToolCall

IDS = TokenIds("i", [5, 0, 2**31 - 1])
TURN = Turn(
    reasoning_text="what\nis it",
    answer_text="half a pair: \ud83d",
    finish_reason="tool_calls",
    prompt_tokens=3,
    completion_tokens=3,
    reasoning_tokens=None,
    prompt_token_ids=IDS,
    completion_token_ids=None,
    generation_boundary=3,
    duration_s=1.5,
    tool_calls=(ToolCall(id="c", function=FunctionCall(name="f", arguments="{}")),),
    continued=(Continuation(at_token=2, worker_id="w1"),),
)
SAMPLING = SamplingParams(
    temperature=0.7, top_p=None, top_k=20, min_p=None, presence_penalty=None,
    repetition_penalty=None, max_tokens=9, seed=7, stop=("a", "b"),
    logit_bias=(TokenBias(token_id="5", bias=-1.0),),
)  # fmt: skip
WHOLE = BegunRow(
    row_id="q\u2028é",
    sample_index=2,
    content_hash="h",
    started_at_s=12.5,
    turns=(TURN,),
    so_far=PartialTurn(
        prompt_token_ids=IDS,
        completion_token_ids=TokenIds("i", [1, 2]),
        reasoning_tokens=2,
        is_thinking=True,
        duration_s=0.5,
        continued=(Continuation(at_token=1, worker_id="w2"),),
    ),
    interruptions=3,
    flags=("looping",),
    quality_retries=2,
    quality_retries_of_turn=1,
    flagged_turn=FlaggedTurn(turn=TURN, flags=("looping", "too_short")),
    next_sampling=SAMPLING,
    first_sampling=SAMPLING,
)
LEAST = BegunRow(row_id="q", sample_index=0, content_hash="h", started_at_s=0.0)


@pytest.mark.parametrize("row", [WHOLE, LEAST])
def test_row_is_read_as_it_was_written_on_one_line(row: BegunRow) -> None:
    line = row.to_json()
    assert len(line.splitlines()) == 1
    assert BegunRow.from_json(line.encode()) == row


def test_tokens_of_a_row_are_those_of_all_its_turns() -> None:
    assert (WHOLE.num_tokens, LEAST.num_tokens) == (5, 0)


@pytest.mark.parametrize(
    "change",
    [{"turns": 1}, {"so_far": {"prompt_token_ids": "!"}}, {"further": 1}, {"flagged_turn": "x"}],
)
def test_line_that_is_none_of_ours_raises_what_readers_expect(change: dict[str, object]) -> None:
    text = json.dumps(json.loads(WHOLE.to_json()) | change)
    with pytest.raises((ValueError, KeyError, TypeError)):
        BegunRow.from_json(text)
    with pytest.raises((ValueError, KeyError, TypeError)):
        BegunRow.from_json("[]")
