"""Lengths of rows, and rows cut at a turn's end. Pure.

A row is as long as the sequence of its last turn: the prompt, with all turns before it, and the
completion, as the engine counted them.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LENGTH_FIELDS = ("prompt_tokens", "completion_tokens")
# Text of each turn, by which its message is found.
TEXT_FIELDS = ("answer_text", "reasoning_text")


def turns_within(turns: Sequence[dict[str, Any]], max_tokens: int) -> int | None:
    """Count the leading turns within the limit; None if one up to there was not counted."""
    for number, turn in enumerate(turns):
        prompt, completion = (turn[name] for name in LENGTH_FIELDS)
        if prompt is None or completion is None:
            return None
        if prompt + completion > max_tokens:
            return number
    return len(turns)


def messages_of_turns(
    messages: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]], num_turns: int
) -> int | None:
    """Count the messages up to the end of the first `num_turns` turns.

    None if a turn is not among the messages. Assistant messages that were not generated may stand
    between those of the turns.
    """
    found = 0
    for number, message in enumerate(messages, start=1):
        turn = turns[found]
        if (
            message["role"] == "assistant"
            and message["content"] == turn["answer_text"]
            and message["reasoning_content"] == turn["reasoning_text"]
        ):
            found += 1
            if found == num_turns:
                return number
    return None


def heads(lists: pa.ListArray, lengths: Sequence[int]) -> pa.ListArray:
    """Keep the first elements of each list, as many as `lengths` says."""
    flat, row_of = pc.list_flatten(lists), pc.list_parent_indices(lists)
    starts = pc.subtract(lists.offsets, lists.offsets[0]).take(row_of)
    place = pc.subtract(pa.array(range(len(flat)), pa.int64()), starts.cast(pa.int64()))
    kept = pa.array(lengths, pa.int64())
    chosen = pc.less(place, kept.take(row_of))
    bounds = pa.array([0, *pc.cumulative_sum(kept).to_pylist()], pa.int32())
    return pa.ListArray.from_arrays(bounds, flat.filter(chosen))
