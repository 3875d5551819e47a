"""Published rows in the forms that trainers read. Pure: a batch in, a batch out.

Invariant: a row comes out whole or is named with the reason why not. The loss mask of token rows is
one exactly where the engine generated: from the boundary that it reported itself. Token ids stay in
Arrow's buffers: a Python list of them is made for the tokenizer alone, a few rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.completion import COMPLETION_SCHEMA
from schemas.export import ExportFormat, ReasoningPlace

KEY_COLUMNS = ("row_id", "sample_index")
Decode = Callable[[Sequence[Sequence[int]]], list[str]]

_MOST_DECODED_TOKENS = 2**18
"""At once. As Python's own numbers they take 36 bytes each, and their text four."""

_CONVERSATION = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
_SHAREGPT = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}
_MADE = {"tokens": ("turn_index", "input_ids", "loss_mask"), "conversations": ("conversations",)}
_TOKEN_FIELDS = (
    "prompt_token_ids", "completion_token_ids", "generation_boundary", "completion_tokens",
)  # fmt: skip
_TEXT_FIELDS = ("answer_text", "reasoning_tokens")
"""What the ids are held against, and about where in them it begins."""
_PLAIN_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """How rows go out."""

    format: ExportFormat
    reasoning: ReasoningPlace
    carried: tuple[str, ...]
    decode: Decode | None = None
    """From the token ids of many turns to their texts, special tokens left out; None where no
    tokenizer is at hand.
    """

    @property
    def columns(self) -> list[str]:
        """What has to be read of a part."""
        if self.format == "rows":
            return [*COMPLETION_SCHEMA.names, *self.carried]
        body = "turns" if self.format == "tokens" else "messages"
        return [*KEY_COLUMNS, body, *self.carried]

    @property
    def read_columns(self) -> list[str]:
        """The same by their paths in the file: of the turns, only the fields that are looked at."""
        if self.format != "tokens":
            return self.columns
        fields = [*_TOKEN_FIELDS, *(_TEXT_FIELDS if self.decode else ())]
        turns = [f"turns.list.element.{name}" for name in fields]
        return [*KEY_COLUMNS, *turns, *self.carried]

    def convert(self, batch: pa.Table) -> tuple[pa.Table, pa.Array, list[tuple[int, str]]]:
        """The batch as it goes out, and for each of these rows the place where it came from.

        Also places that do not go out, each with its reason.
        """
        batch = batch.rename_columns(self._out_names(batch.column_names))
        if self.format == "tokens":
            return self._token_rows(batch)
        at = pa.array(range(batch.num_rows), pa.int64())
        if self.format == "rows" or (self.format == "messages" and self.reasoning == "apart"):
            return batch, at, []
        convert = self._conversation if self.format == "conversations" else self._messages
        values = [convert(messages) for messages in batch["messages"].to_pylist()]
        number = batch.column_names.index("messages")
        name, kind = "messages", _PLAIN_MESSAGES
        if self.format == "conversations":
            name, kind = "conversations", _CONVERSATION
        changed = batch.set_column(number, pa.field(name, kind), pa.array(values, kind))
        return changed, at, []

    def _out_names(self, names: list[str]) -> list[str]:
        """A kept column that has the name of one that the format makes goes out under another."""
        own, out = _MADE.get(self.format, ()), []
        for name in names:
            changed = name
            while changed in own or (changed != name and changed in names):
                changed = f"kept_{changed}"
            out.append(changed)
        return out

    def _text(self, message: dict[str, Any]) -> str:
        reasoning = message["reasoning_content"]
        if self.reasoning != "inline" or not reasoning:
            return str(message["content"])
        return f"<think>\n{reasoning}\n</think>\n\n{message['content']}"

    def _messages(self, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"role": m["role"], "content": self._text(m)} for m in messages]

    def _conversation(self, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"from": _SHAREGPT[m["role"]], "value": self._text(m)} for m in messages]

    def _token_rows(self, batch: pa.Table) -> tuple[pa.Table, pa.Array, list[tuple[int, str]]]:
        """A row a turn; a row goes out with all its turns or not at all."""
        lists = batch["turns"].combine_chunks()
        turns, row_of_turn = pc.list_flatten(lists), pc.list_parent_indices(lists)
        left_out = self._left_out(lists, turns, row_of_turn)
        faulty = pa.array(left_out, row_of_turn.type)
        chosen = pc.indices_nonzero(pc.invert(pc.is_in(row_of_turn, value_set=faulty)))
        at = row_of_turn.take(chosen)
        first_turns = pc.subtract(lists.offsets, lists.offsets[0]).take(at)
        turn_index = pc.subtract(chosen.cast(pa.int32()), first_turns)
        input_ids, loss_mask = _joined(
            _taken(pc.struct_field(turns, "prompt_token_ids"), chosen),
            _taken(pc.struct_field(turns, "completion_token_ids"), chosen),
        )
        kept = batch.drop_columns(["turns"]).take(at)
        columns = zip(_MADE["tokens"], (turn_index, input_ids, loss_mask), strict=True)
        for name, values in columns:
            kept = kept.append_column(name, values)
        return kept, at, sorted(left_out.items())

    def _left_out(
        self, lists: pa.ListArray, turns: pa.StructArray, row_of_turn: pa.Array
    ) -> dict[int, str]:
        """Rows that do not go out, each with the fault of its first turn that has one."""
        faults = _token_faults(turns)
        if self.decode is not None:
            unlike = self._unlike_their_text(turns, pc.indices_nonzero(pc.is_null(faults)))
            is_unlike = pc.is_in(pa.array(range(len(turns)), pa.int64()), value_set=unlike)
            faults = pc.if_else(is_unlike, "tokens_are_not_the_text", faults)
        faulty = pc.indices_nonzero(pc.is_valid(faults))
        no_turns = pc.indices_nonzero(pc.equal(pc.list_value_length(lists), 0))
        found = dict.fromkeys(no_turns.to_pylist(), "no_turns")
        pairs = zip(
            row_of_turn.take(faulty).to_pylist(), faults.take(faulty).to_pylist(), strict=True
        )
        for row, fault in pairs:
            found.setdefault(row, fault)
        return found

    def _unlike_their_text(self, turns: pa.StructArray, sound: pa.Array) -> pa.Array:
        """Which of the turns at these places have an answer that their ids do not spell."""
        assert self.decode is not None
        ids = _IdLists.of(_taken(pc.struct_field(turns, "completion_token_ids"), sound))
        answers = pc.struct_field(turns, "answer_text").take(sound).to_pylist()
        thought = pc.struct_field(turns, "reasoning_tokens").take(sound).to_pylist()
        wanted = [answer.strip() for answer in answers]
        # The answer is in what follows the thinking, mostly the smaller part; where it is not, or
        # the count of the thinking is amiss, the whole is decoded.
        unsure = self._without(wanted, ids, range(len(wanted)), [n or 0 for n in thought])
        unlike = self._without(wanted, ids, unsure, [0] * len(wanted))
        return sound.take(pa.array(unlike, pa.int64())).cast(pa.int64())

    def _without(
        self, wanted: list[str], ids: "_IdLists", places: Sequence[int], starts: list[int]
    ) -> list[int]:
        """Those of the places whose wanted text is not in their ids from the start on."""
        assert self.decode is not None
        found = []
        for some in ids.runs(places, starts):
            texts = self.decode([ids.listed(place, starts[place]) for place in some])
            found += [
                place for place, text in zip(some, texts, strict=True) if wanted[place] not in text
            ]
        return found


@dataclass(frozen=True, slots=True)
class _IdLists:
    """Lists of token ids, read from Arrow's buffer without an object for each id."""

    offsets: list[int]
    values: memoryview

    @classmethod
    def of(cls, lists: pa.ListArray) -> "_IdLists":
        values = lists.values
        data, width = values.buffers()[1], values.type.byte_width
        octets = memoryview(data).cast("B") if data else memoryview(b"")
        first = values.offset * width
        numbers = octets[first : first + len(values) * width].cast("i")
        return cls(lists.offsets.to_pylist(), numbers)

    def listed(self, place: int, start: int) -> list[int]:
        """The ids of one list from a start on."""
        first, stop = self.offsets[place], self.offsets[place + 1]
        return self.values[min(first + start, stop) : stop].tolist()

    def runs(self, places: Sequence[int], starts: list[int]) -> Iterator[list[int]]:
        """The places in runs that have `_MOST_DECODED_TOKENS` together, or are one."""
        run: list[int] = []
        num_tokens = 0
        for place in places:
            length = max(0, self.offsets[place + 1] - self.offsets[place] - starts[place])
            if run and num_tokens + length > _MOST_DECODED_TOKENS:
                yield run
                run, num_tokens = [], 0
            run.append(place)
            num_tokens += length
        if run:
            yield run


def _token_faults(turns: pa.StructArray) -> pa.Array:
    """Why each turn has no usable token ids, by its counts; null where they are as they should."""
    asked = pc.struct_field(turns, "prompt_token_ids")
    generated = pc.struct_field(turns, "completion_token_ids")
    boundary = pc.struct_field(turns, "generation_boundary")
    counted = pc.struct_field(turns, "completion_tokens")
    lacks_ids = pc.or_(pc.is_null(asked), pc.is_null(generated))
    begins_elsewhere = pc.fill_null(pc.not_equal(boundary, pc.list_value_length(asked)), True)
    lacks_some = pc.fill_null(pc.not_equal(counted, pc.list_value_length(generated)), False)
    return pc.case_when(
        pc.make_struct(lacks_ids, begins_elsewhere, lacks_some),
        "no_token_ids",
        "boundary_is_not_the_prompts_end",
        "as_many_ids_as_tokens_are_missing",
    )


def _taken(lists: pa.ListArray, places: pa.Array) -> pa.ListArray:
    """The lists at these places, in order and each once; all of them are not copied."""
    return lists if len(places) == len(lists) else lists.take(places)


def _joined(asked: pa.ListArray, generated: pa.ListArray) -> tuple[pa.ListArray, pa.ListArray]:
    """Each turn's ids, what was asked before what was generated, and a one where it was."""
    num_turns = len(asked)
    slices = [both.slice(turn, 1) for turn in range(num_turns) for both in (asked, generated)]
    pieces = pa.concat_arrays([asked.slice(0, 0), *slices])
    # Asked and generated take turns, so that a piece's place is odd where it was generated.
    mask = pc.bit_wise_and(pc.list_parent_indices(pieces), 1).cast(pa.int8())
    bounds = pieces.offsets.take(pa.array(range(0, 2 * num_turns + 1, 2), pa.int64()))
    input_ids = pa.ListArray.from_arrays(bounds, pc.list_flatten(pieces))
    return input_ids, pa.ListArray.from_arrays(bounds, mask)


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
