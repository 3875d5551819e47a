"""Token rows as the vectorised path makes them are those that a plain loop makes."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.export.rows import KEY_COLUMNS, RowForm, form_of
from schemas.completion import COMPLETION_SCHEMA
from schemas.export import ExportOptions

TOKENS = ExportOptions(format="tokens")
_TURNS = COMPLETION_SCHEMA.field("turns").type
_IDS = st.none() | st.lists(st.integers(0, 300), max_size=6)
_TURN = st.fixed_dictionaries(
    {
        "prompt_token_ids": _IDS,
        "completion_token_ids": _IDS,
        "boundary_off_by": st.sampled_from([0, 0, 0, 0, 0, 1, None]),
        "tokens_off_by": st.sampled_from([0, 0, 0, 0, None, -1]),
        "answer_off": st.sampled_from([False, False, False, True]),
        "reasoning_tokens": st.none() | st.integers(0, 9),
    }
)


def decode(lists: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(f"<{number}>" for number in numbers) for numbers in lists]


def turn(drawn: dict[str, Any]) -> dict[str, Any]:
    """A turn of the parquet schema, right but for what was drawn to be off."""
    asked, generated = drawn["prompt_token_ids"], drawn["completion_token_ids"]
    boundary, counted = drawn["boundary_off_by"], drawn["tokens_off_by"]
    told = drawn["reasoning_tokens"]
    # The answer is the last half of the ids, wherever the count of the thinking says it begins.
    (answer,) = decode([(generated or [])[len(generated or []) // 2 :]])
    return {
        "answer_text": "!" if drawn["answer_off"] else f" {answer}\n",
        "finish_reason": "stop",
        "duration_s": 1.0,
        "reasoning_tokens": told,
        "prompt_token_ids": asked,
        "completion_token_ids": generated,
        "generation_boundary": None if boundary is None else len(asked or []) + boundary,
        "completion_tokens": None if counted is None else max(0, len(generated or []) + counted),
    }


def plain_fault(turn: dict[str, Any], *, is_decoded: bool) -> str | None:
    asked, generated = turn["prompt_token_ids"], turn["completion_token_ids"]
    if asked is None or generated is None:
        return "no_token_ids"
    if turn["generation_boundary"] != len(asked):
        return "boundary_is_not_the_prompts_end"
    if turn["completion_tokens"] not in (None, len(generated)):
        return "as_many_ids_as_tokens_are_missing"
    is_text = not is_decoded or turn["answer_text"].strip() in decode([generated])[0]
    return None if is_text else "tokens_are_not_the_text"


def plain_token_rows(
    rows: list[list[dict[str, Any]]], *, is_decoded: bool
) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Convert one token after the other."""
    made, left_out = [], []
    for at, turns in enumerate(rows):
        faults = [plain_fault(turn, is_decoded=is_decoded) for turn in turns] or ["no_turns"]
        fault = next(filter(None, faults), None)
        if fault is not None:
            left_out.append((at, fault))
            continue
        for index, one in enumerate(turns):
            ids = one["prompt_token_ids"] + one["completion_token_ids"]
            mask = [int(place >= one["generation_boundary"]) for place in range(len(ids))]
            made.append(
                {"row_id": f"r{at}", "sample_index": at % 3, "level": at * 7, "turn_index": index,
                 "input_ids": ids, "loss_mask": mask, "at": at}
            )  # fmt: skip
    return made, left_out


def batch_of(rows: list[list[dict[str, Any]]]) -> pa.Table:
    """Build two chunks, the first of which begins within its buffer, as a slice does."""
    table = pa.table(
        {
            "row_id": pa.array([f"r{n}" for n in range(-1, len(rows))]),
            "sample_index": pa.array([n % 3 for n in range(-1, len(rows))], pa.int32()),
            "turns": pa.array([[turn(FILLER)] * 2, *rows], _TURNS),
            "level": pa.array([n * 7 for n in range(-1, len(rows))], pa.int64()),
        }
    )
    assert table.column_names[:2] == list(KEY_COLUMNS)
    cut = 1 + len(rows) // 2
    return pa.concat_tables([table.slice(1, cut - 1), table.slice(cut)])


def converted(
    form: RowForm, rows: list[list[dict[str, Any]]]
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """The places as a column, beside what came from them."""
    made, places, left_out = form.convert(batch_of(rows))
    return made.append_column("at", places), left_out


FILLER = {
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3],
    "boundary_off_by": 0,
    "tokens_off_by": 0,
    "answer_off": False,
    "reasoning_tokens": 0,
}


@pytest.mark.parametrize("is_decoded", [False, True])
@given(drawn=st.lists(st.lists(_TURN, max_size=3), max_size=8))
@settings(deadline=None, max_examples=30)
def test_token_rows_are_those_of_a_plain_loop(
    drawn: list[list[dict[str, Any]]], is_decoded: bool
) -> None:
    rows = [[turn(one) for one in turns] for turns in drawn]
    form = form_of(TOKENS, COMPLETION_SCHEMA.names, ["level"], decode if is_decoded else None)
    made, left_out = converted(form, rows)
    assert (made.to_pylist(), left_out) == plain_token_rows(rows, is_decoded=is_decoded)


def test_sound_rows_of_many_lengths_are_those_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The property test draws faults often; here every row goes out, decoded a few at a time.
    monkeypatch.setattr("pipeline.export.rows._MAX_DECODED_TOKENS", 40)
    chance = random.Random(4)
    drawn = [
        [
            FILLER
            | {
                "prompt_token_ids": chance.choices(range(9), k=chance.randrange(20)),
                "completion_token_ids": chance.choices(range(9), k=chance.randrange(60)),
                "reasoning_tokens": chance.randrange(70),
            }
            for _ in range(chance.randrange(1, 4))
        ]
        for _ in range(50)
    ]
    rows = [[turn(one) for one in turns] for turns in drawn]
    decoded: list[list[int]] = []

    def noting(lists: Sequence[Sequence[int]]) -> list[str]:
        decoded.append([len(ids) for ids in lists])
        return decode(lists)

    made, left_out = converted(form_of(TOKENS, COMPLETION_SCHEMA.names, ["level"], noting), rows)
    assert not left_out
    assert all(sum(lengths) <= 40 or len(lengths) == 1 for lengths in decoded)
    # The next list would not have fitted, unless the run was the last of its pass.
    too_small = [
        first for first, second in itertools.pairwise(decoded) if sum(first) + second[0] <= 40
    ]
    assert len(too_small) <= 1
    assert (made.to_pylist(), left_out) == plain_token_rows(rows, is_decoded=True)
    assert made.schema.field("input_ids").type == pa.list_(pa.int32())
    assert made.schema.field("loss_mask").type == pa.list_(pa.int8())


def test_only_ids_are_decoded_that_follow_the_thinking() -> None:
    seen: list[list[int]] = []

    def noting(lists: Sequence[Sequence[int]]) -> list[str]:
        seen.extend(list(ids) for ids in lists)
        return decode(lists)

    ids = FILLER | {"completion_token_ids": [5, 6, 7, 8], "reasoning_tokens": 2}
    form_of(TOKENS, COMPLETION_SCHEMA.names, ["level"], noting).convert(batch_of([[turn(ids)]]))
    assert seen == [[7, 8]]
