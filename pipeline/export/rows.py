"""RowForm: published rows converted to the formats that trainers read. Pure.

Invariant: a row is converted whole or left out with its reason. The loss mask of token rows is one
exactly where the engine generated: from the boundary that the engine reported. Token ids stay in
Arrow's buffers; only the tokenizer gets Python lists, of a few rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.export.chats import ChatForm, without_tool_fields
from pipeline.export.cutting import TEXT_FIELDS, heads, messages_of_turns
from schemas.export import ExportFormat, ExportOptions, ReasoningPlace

KEY_COLUMNS = ("row_id", "sample_index")
Decode = Callable[[Sequence[Sequence[int]]], list[str]]

# Tokens decoded at once. Each uses 36 bytes as a Python integer, and four as text.
_MAX_DECODED_TOKENS = 2**18

_ADDED_COLUMNS = {
    "tokens": ("turn_index", "input_ids", "loss_mask"),
    "conversations": ("conversations",),
}
# Formats whose columns are exactly those that the trainer takes: SpecForge hands every other one to
# the chat template.
_TRAINERS = ("specforge", "speculators")
# Columns that runs with tools have.
_TOOL_COLUMNS = ("tools", "tool_calls")
_TOKEN_FIELDS = (
    "prompt_token_ids", "completion_token_ids", "generation_boundary", "completion_tokens",
)  # fmt: skip
# The text that the ids must contain, and the place where it begins in them, approximately.
_TEXT_FIELDS = ("answer_text", "reasoning_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """Format of the exported rows."""

    format: ExportFormat
    own: tuple[str, ...]
    """Columns of the run's parts before the carried ones."""
    carried: tuple[str, ...]
    chat: ChatForm
    is_cut: bool = False
    """True if rows may be cut at a turn's end."""
    decode: Decode | None = None
    """Texts of many turns' token ids, without special tokens; None without a tokenizer."""

    @property
    def columns(self) -> list[str]:
        """Columns of a part that the form needs."""
        if self.format == "rows":
            return [*self.own, *self.carried]
        if self.format == "tokens":
            return [*KEY_COLUMNS, "turns", *self.carried]
        cut = ["turns"] if self.is_cut else []
        return [*KEY_COLUMNS, "messages", *cut, *self._context_columns]

    @property
    def _context_columns(self) -> list[str]:
        if self.format in _TRAINERS:
            return [name for name in _TOOL_COLUMNS if name in (*self.own, *self.carried)]
        tools = [name for name in _TOOL_COLUMNS if name in self.own and self.chat.has_tools]
        return [*tools, *self.carried]

    @property
    def read_columns(self) -> list[str]:
        """Paths of those columns in the file, with only the fields of turns that are used."""
        if self.format == "rows":
            return self.columns
        if self.format == "tokens":
            fields = [*_TOKEN_FIELDS, *(_TEXT_FIELDS if self.decode else ())]
        else:
            fields = list(TEXT_FIELDS)
        turns = [f"turns.list.element.{name}" for name in fields]
        return [path for name in self.columns for path in (turns if name == "turns" else [name])]

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns of the exported rows that name the row."""
        if self.format in _TRAINERS:
            return ("id",)
        return (*KEY_COLUMNS, "turn_index") if self.format == "tokens" else KEY_COLUMNS

    def key(self, row_id: str, sample_index: int) -> tuple[object, ...]:
        """Return the key of an exported row, as `written_key` reads it."""
        if self.format in _TRAINERS:
            return (self.chat.row_name(row_id, sample_index),)
        return (row_id, sample_index)

    def written_key(self, row: dict[str, Any]) -> tuple[object, ...] | None:
        """Read the key of a written row; None for a row's turns after its first."""
        if self.format == "tokens" and row["turn_index"] > 0:
            return None
        return tuple(row[name] for name in self.key_columns if name != "turn_index")

    def convert(
        self, batch: pa.Table, turns_kept: Sequence[int] = ()
    ) -> tuple[pa.Table, pa.Array, list[tuple[int, str]]]:
        """Convert a batch, each row with its first `turns_kept` turns; 0 keeps them all.

        Returns the converted rows, the place in the batch of each of them, and the places that
        were left out, with reasons.
        """
        left_out: dict[int, str] = {}
        if any(turns_kept):
            batch, left_out = self._cut(batch, turns_kept)
        if self.format == "tokens":
            return self._token_rows(batch.rename_columns(self._out_names(batch.column_names)))
        if self.format == "rows":
            return _without_places(batch, left_out)
        if self.is_cut:
            batch = batch.drop_columns(["turns"])
        if self.format == "messages" and self.chat.reasoning == "apart":
            if not self.chat.has_tools:
                batch = _with_column(batch, "messages", without_tool_fields(batch["messages"]))
            return _without_places(batch, left_out)
        columns, faults = self.chat.columns(batch)
        if self.format in _TRAINERS:
            changed = pa.table(dict(columns))
        else:
            ((name, values),) = columns
            place = batch.column_names.index("messages")
            names = self._out_names(batch.column_names)
            changed = batch.rename_columns(names).set_column(place, name, values)
        return _without_places(changed, faults | left_out)

    def _cut(self, batch: pa.Table, turns_kept: Sequence[int]) -> tuple[pa.Table, dict[int, str]]:
        """Cut rows after their first turns; also map the places where that cannot be to why."""
        turns = batch["turns"].combine_chunks()
        whole = pc.list_value_length(turns).to_pylist()
        kept = [few or all_ for few, all_ in zip(turns_kept, whole, strict=True)]
        left_out: dict[int, str] = {}
        if "messages" in batch.column_names:
            messages = batch["messages"].combine_chunks()
            num_messages = pc.list_value_length(messages).to_pylist()
            for place, few in enumerate(turns_kept):
                if few:
                    texts = (messages[place].as_py(), turns[place].as_py())
                    num_kept = messages_of_turns(*texts, few)
                    if num_kept is None:
                        left_out[place] = "turns_are_not_the_messages"
                    num_messages[place] = num_kept or num_messages[place]
            batch = _with_column(batch, "messages", heads(messages, num_messages))
        batch = _with_column(batch, "turns", heads(turns, kept))
        if self.format == "rows":
            batch = _with_column(batch, "finish_reason", _ends(batch, turns_kept))
        if "tool_calls" in self.own and "tool_calls" in batch.column_names:
            # They were those of the last turn.
            is_cut = pa.array([few > 0 for few in turns_kept])
            calls = pc.if_else(is_cut, None, batch["tool_calls"].combine_chunks())
            batch = _with_column(batch, "tool_calls", calls)
        return batch, left_out

    def _out_names(self, names: list[str]) -> list[str]:
        """Rename carried columns that have the name of a column which the format adds."""
        added, renamed = _ADDED_COLUMNS.get(self.format, ()), []
        for name in names:
            changed = name
            while changed in added or (changed != name and changed in names):
                changed = f"kept_{changed}"
            renamed.append(changed)
        return renamed

    def _token_rows(self, batch: pa.Table) -> tuple[pa.Table, pa.Array, list[tuple[int, str]]]:
        """Convert each turn to a row; a row is exported with all its turns or left out."""
        lists = batch["turns"].combine_chunks()
        turns, row_of_turn = pc.list_flatten(lists), pc.list_parent_indices(lists)
        left_out = self._left_out(lists, turns, row_of_turn)
        faulty = pa.array(left_out, row_of_turn.type)
        chosen = pc.indices_nonzero(pc.invert(pc.is_in(row_of_turn, value_set=faulty)))
        places = row_of_turn.take(chosen)
        first_turns = pc.subtract(lists.offsets, lists.offsets[0]).take(places)
        turn_index = pc.subtract(chosen.cast(pa.int32()), first_turns)
        input_ids, loss_mask = _joined(
            _taken(pc.struct_field(turns, "prompt_token_ids"), chosen),
            _taken(pc.struct_field(turns, "completion_token_ids"), chosen),
        )
        table = batch.drop_columns(["turns"]).take(places)
        columns = zip(_ADDED_COLUMNS["tokens"], (turn_index, input_ids, loss_mask), strict=True)
        for name, values in columns:
            table = table.append_column(name, values)
        return table, places, sorted(left_out.items())

    def _left_out(
        self, lists: pa.ListArray, turns: pa.StructArray, row_of_turn: pa.Array
    ) -> dict[int, str]:
        """Map each row to leave out to the fault of its first faulty turn."""
        faults = _token_faults(turns)
        if self.decode is not None:
            unlike = self._unlike_their_text(turns, pc.indices_nonzero(pc.is_null(faults)))
            is_unlike = pc.is_in(pa.array(range(len(turns)), pa.int64()), value_set=unlike)
            faults = pc.if_else(is_unlike, "tokens_are_not_the_text", faults)
        faulty = pc.indices_nonzero(pc.is_valid(faults))
        no_turns = pc.indices_nonzero(pc.equal(pc.list_value_length(lists), 0))
        left_out = dict.fromkeys(no_turns.to_pylist(), "no_turns")
        pairs = zip(
            row_of_turn.take(faulty).to_pylist(), faults.take(faulty).to_pylist(), strict=True
        )
        for row, fault in pairs:
            left_out.setdefault(row, fault)
        return left_out

    def _unlike_their_text(self, turns: pa.StructArray, sound: pa.Array) -> pa.Array:
        """List the turns at these places whose ids do not spell their answer."""
        assert self.decode is not None
        ids = _IdLists.of(_taken(pc.struct_field(turns, "completion_token_ids"), sound))
        answers = pc.struct_field(turns, "answer_text").take(sound).to_pylist()
        reasoning = pc.struct_field(turns, "reasoning_tokens").take(sound).to_pylist()
        expected = [answer.strip() for answer in answers]
        # The answer follows the reasoning and is mostly the smaller part. All ids are decoded only
        # where it is not there, or the reasoning was counted wrong.
        unsure = self._without(expected, ids, range(len(expected)), [n or 0 for n in reasoning])
        unlike = self._without(expected, ids, unsure, [0] * len(expected))
        return sound.take(pa.array(unlike, pa.int64())).cast(pa.int64())

    def _without(
        self, expected: list[str], ids: "_IdLists", places: Sequence[int], starts: list[int]
    ) -> list[int]:
        """List the places whose expected text is not in their ids from `starts` on."""
        assert self.decode is not None
        without = []
        for run in ids.runs(places, starts):
            texts = self.decode([ids.listed(place, starts[place]) for place in run])
            without += [
                place for place, text in zip(run, texts, strict=True) if expected[place] not in text
            ]
        return without


@dataclass(frozen=True, slots=True)
class _IdLists:
    """Lists of token ids, read from Arrow's buffer without a Python object per id."""

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
        """Ids of one list, from `start` on."""
        first, stop = self.offsets[place], self.offsets[place + 1]
        return self.values[min(first + start, stop) : stop].tolist()

    def runs(self, places: Sequence[int], starts: list[int]) -> Iterator[list[int]]:
        """Split the places into runs of at most `_MAX_DECODED_TOKENS`, or of one place."""
        run: list[int] = []
        num_tokens = 0
        for place in places:
            length = max(0, self.offsets[place + 1] - self.offsets[place] - starts[place])
            if run and num_tokens + length > _MAX_DECODED_TOKENS:
                yield run
                run, num_tokens = [], 0
            run.append(place)
            num_tokens += length
        if run:
            yield run


def _token_faults(turns: pa.StructArray) -> pa.Array:
    """Name the fault in each turn's ids, as its counts show it; null where they are consistent."""
    prompt = pc.struct_field(turns, "prompt_token_ids")
    generated = pc.struct_field(turns, "completion_token_ids")
    boundary = pc.struct_field(turns, "generation_boundary")
    counted = pc.struct_field(turns, "completion_tokens")
    lacks_ids = pc.or_(pc.is_null(prompt), pc.is_null(generated))
    begins_elsewhere = pc.fill_null(pc.not_equal(boundary, pc.list_value_length(prompt)), True)
    lacks_some = pc.fill_null(pc.not_equal(counted, pc.list_value_length(generated)), False)
    return pc.case_when(
        pc.make_struct(lacks_ids, begins_elsewhere, lacks_some),
        "no_token_ids",
        "boundary_is_not_the_prompts_end",
        "as_many_ids_as_tokens_are_missing",
    )


def _taken(lists: pa.ListArray, places: pa.Array) -> pa.ListArray:
    """Take the lists at these sorted places, without a copy where they are all."""
    return lists if len(places) == len(lists) else lists.take(places)


def _joined(prompt: pa.ListArray, generated: pa.ListArray) -> tuple[pa.ListArray, pa.ListArray]:
    """Concatenate each turn's prompt and generated ids, with a mask that is one where generated."""
    num_turns = len(prompt)
    slices = [both.slice(turn, 1) for turn in range(num_turns) for both in (prompt, generated)]
    pieces = pa.concat_arrays([prompt.slice(0, 0), *slices])
    # Prompt and generated pieces alternate, so a piece with an odd number was generated.
    mask = pc.bit_wise_and(pc.list_parent_indices(pieces), 1).cast(pa.int8())
    bounds = pieces.offsets.take(pa.array(range(0, 2 * num_turns + 1, 2), pa.int64()))
    input_ids = pa.ListArray.from_arrays(bounds, pc.list_flatten(pieces))
    return input_ids, pa.ListArray.from_arrays(bounds, mask)


def _with_column(batch: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = batch.column_names.index(name)
    return batch.set_column(place, batch.schema.field(place).with_type(values.type), values)


def _ends(batch: pa.Table, turns_kept: Sequence[int]) -> pa.Array:
    """Finish reasons of the rows: of a cut one, that of its last turn."""
    turns = batch["turns"].combine_chunks()
    of_turns = pc.struct_field(pc.list_flatten(turns), "finish_reason").to_pylist()
    stops = pc.subtract(turns.offsets, turns.offsets[0]).to_pylist()[1:]
    usual = batch["finish_reason"].to_pylist()
    rows = zip(turns_kept, stops, usual, strict=True)
    return pa.array([of_turns[stop - 1] if few else end for few, stop, end in rows], pa.string())


def _without_places(
    batch: pa.Table, left_out: dict[int, str]
) -> tuple[pa.Table, pa.Array, list[tuple[int, str]]]:
    places = pa.array(
        [place for place in range(batch.num_rows) if place not in left_out], pa.int64()
    )
    kept = batch.take(places) if left_out else batch
    return kept, places, sorted(left_out.items())


def form_of(
    options: ExportOptions, own: Sequence[str], carried: Sequence[str], decode: Decode | None
) -> RowForm:
    """Resolve the options' default place of the reasoning."""
    default: ReasoningPlace = "inline" if options.format == "conversations" else "apart"
    return RowForm(
        format=options.format,
        own=tuple(own),
        carried=tuple(carried),
        chat=ChatForm(format=options.format, reasoning=options.reasoning or default),
        is_cut=options.is_cut,
        decode=decode,
    )
