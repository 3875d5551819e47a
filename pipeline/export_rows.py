"""Published rows in the forms that trainers read. Pure: a batch in, a batch out.

Invariant: a row comes out whole or is named with the reason why not. The loss mask of token rows is
one exactly where the engine generated: from the boundary that it reported itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.completion import COMPLETION_SCHEMA
from schemas.export import ExportFormat, ReasoningPlace

KEY_COLUMNS = ("row_id", "sample_index")
Decode = Callable[[Sequence[int]], str]

_CONVERSATION = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
_SHAREGPT = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}
_PLAIN_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """How rows go out."""

    format: ExportFormat
    reasoning: ReasoningPlace
    carried: tuple[str, ...]
    decode: Decode | None = None
    """From token ids to text, special tokens left out; None where no tokenizer is at hand."""

    @property
    def columns(self) -> list[str]:
        """What has to be read of a part."""
        if self.format == "rows":
            return [*COMPLETION_SCHEMA.names, *self.carried]
        body = "turns" if self.format == "tokens" else "messages"
        return [*KEY_COLUMNS, body, *self.carried]

    def convert(self, batch: pa.Table) -> tuple[pa.Table, list[tuple[int, str]]]:
        """The batch as it goes out with a column `at`, the place in the batch each came from.

        Also places that do not go out, each with its reason.
        """
        if self.format == "tokens":
            return self._token_rows(batch)
        at = pa.array(range(batch.num_rows), pa.int32())
        if self.format == "rows" or (self.format == "messages" and self.reasoning == "apart"):
            return batch.append_column("at", at), []
        convert = self._conversation if self.format == "conversations" else self._messages
        values = [convert(messages) for messages in batch["messages"].to_pylist()]
        number = batch.column_names.index("messages")
        name, kind = "messages", _PLAIN_MESSAGES
        if self.format == "conversations":
            name, kind = "conversations", _CONVERSATION
        changed = batch.set_column(number, pa.field(name, kind), pa.array(values, kind))
        return changed.append_column("at", at), []

    def _text(self, message: dict[str, Any]) -> str:
        reasoning = message["reasoning_content"]
        if self.reasoning != "inline" or not reasoning:
            return str(message["content"])
        return f"<think>\n{reasoning}\n</think>\n\n{message['content']}"

    def _messages(self, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"role": m["role"], "content": self._text(m)} for m in messages]

    def _conversation(self, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"from": _SHAREGPT[m["role"]], "value": self._text(m)} for m in messages]

    def _token_rows(self, batch: pa.Table) -> tuple[pa.Table, list[tuple[int, str]]]:
        """A row a turn; a row goes out with all its turns or not at all."""
        places, turn_indexes, ids, masks = [], [], [], []
        left_out: list[tuple[int, str]] = []
        for place, turns in enumerate(batch["turns"].to_pylist()):
            reason = next(filter(None, map(self._token_fault, turns)), None)
            if reason is not None:
                left_out.append((place, reason))
                continue
            for index, turn in enumerate(turns):
                asked, generated = turn["prompt_token_ids"], turn["completion_token_ids"]
                places.append(place)
                turn_indexes.append(index)
                ids.append(asked + generated)
                masks.append([0] * len(asked) + [1] * len(generated))
        at = pa.array(places, pa.int32())
        kept = batch.drop_columns(["turns"]).take(at)
        columns = {
            "turn_index": pa.array(turn_indexes, pa.int32()),
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "at": at,
        }
        for name, values in columns.items():
            kept = kept.append_column(name, values)
        return kept, left_out

    def _token_fault(self, turn: dict[str, Any]) -> str | None:
        asked, generated = turn["prompt_token_ids"], turn["completion_token_ids"]
        if asked is None or generated is None:
            return "no_token_ids"
        if turn["generation_boundary"] != len(asked):
            return "boundary_is_not_the_prompts_end"
        if turn["completion_tokens"] not in (None, len(generated)):
            return "as_many_ids_as_tokens_are_missing"
        if self.decode is None:
            return None
        text, answer = self.decode(generated), turn["answer_text"].strip()
        return None if answer in text else "tokens_are_not_the_text"


def form_of(
    format_: ExportFormat,
    reasoning: ReasoningPlace | None,
    carried: Sequence[str],
    decode: Decode | None,
) -> RowForm:
    default: ReasoningPlace = "inline" if format_ == "conversations" else "apart"
    return RowForm(
        format=format_, reasoning=reasoning or default, carried=tuple(carried), decode=decode
    )
