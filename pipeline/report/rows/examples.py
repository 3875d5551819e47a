"""Texts of chosen rows, clipped to what a page can hold.

The texts of a part are read in small batches up to the last row that is wanted, and what was read
is kept as long as its row is chosen, so that a report that is made again reads little.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import pyarrow as pa

from pipeline.dataset.frozen import frozen_in
from pipeline.report.rows.picks import Pick
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.prompt import Message

# Bytes of one text in the page, of all texts of one row, and of one error.
_TEXT_BYTES, _ROW_BYTES, _ERROR_BYTES = 3_000, 8_000, 600
# Messages of a row: the first ones and the last ones.
FIRST_MESSAGES, _LAST_MESSAGES = 3, 3
_BATCH_ROWS = 64
# Share of a clipped text that its beginning has.
_HEAD_SHARE = 2 / 3
# Longest id or name that is shown whole.
_NAME_BYTES = 200
_COLUMNS = (
    "row_id", "sample_index", "messages", "status", "finish_reason", "error_kind", "error_text",
    "flags", "attempt", "quality_retries", "worker_id", "started_at", "finished_at",
    "turns.list.element.prompt_tokens", "turns.list.element.completion_tokens",
    "turns.list.element.reasoning_tokens",
)  # fmt: skip
# Control characters have no glyph and no meaning in a page: they are shown as their pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """A text, without its middle if it is long."""

    head: str
    num_left_out: int = 0
    """Characters of the middle that are left out."""
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of a row's conversation."""

    role: str
    text: Clipped
    reasoning: Clipped | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row with its texts and its figures; None where a figure is unknown."""

    row_id: str
    sample_index: int
    said: tuple[Said, ...]
    messages_left_out: int = 0
    """Messages between the first and the last ones."""
    error: str | None = None
    took_s: float | None = None
    num_turns: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    attempts: int = 0
    quality_retries: int = 0
    flags: tuple[str, ...] = ()
    worker_id: str | None = None

    @property
    def first_words(self) -> str:
        """Beginning of the last question, on one line."""
        asked = [one.text.head for one in self.said if one.role == "user"]
        return " ".join(" ".join(asked[-1:]).split())[:140]


@dataclass(slots=True, kw_only=True)
class ExampleBook:
    """Texts that have been read, by the place of their row."""

    _known: dict[tuple[str, int], Example] = field(default_factory=dict)
    _prompts: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    """Prompts of failed rows, by row id."""

    def read(self, folder: Folder, picks: Iterable[Pick]) -> None:
        """Read the texts of these rows that are not known yet, and forget all others."""
        wanted: dict[str, set[int]] = {}
        known: dict[tuple[str, int], Example] = {}
        for pick in picks:
            key = (pick.part, pick.place)
            if key in self._known:
                known[key] = self._known[key]
            else:
                wanted.setdefault(pick.part, set()).add(pick.place)
        for part, places in wanted.items():
            for place, row in _rows_at(folder, part, places):
                known[part, place] = _example(row)
        self._known = known

    def of(self, picks: Iterable[Pick]) -> list[Example]:
        """Return the texts of these rows; a row whose part is gone has none."""
        found = (self._known.get((pick.part, pick.place)) for pick in picks)
        return [example for example in found if example is not None]

    def failed(self, folder: Folder, rows: Sequence[tuple[str, int, str]]) -> list[Example]:
        """Return rows that failed, with their prompts: triples of row id, sample and cause."""
        self._read_prompts(folder, {row_id for row_id, _, _ in rows})
        return [
            Example(
                row_id=_name(row_id),
                sample_index=sample,
                error=_whole(clipped(cause, _ERROR_BYTES)),
                **_conversation([_said_by(m) for m in self._prompts.get(row_id, ())]),  # type: ignore[arg-type]
            )
            for row_id, sample, cause in rows
        ]

    def _read_prompts(self, folder: Folder, row_ids: set[str]) -> None:
        self._prompts = {key: self._prompts[key] for key in row_ids & self._prompts.keys()}
        missing = row_ids - self._prompts.keys()
        if missing and (frozen := frozen_in(folder)) is not None:
            for row_id, number in frozen.numbers_of(missing):
                self._prompts[row_id] = frozen.prompt(number).messages


# --- reading ------------------------------------------------------------------------------------


def _rows_at(
    folder: Folder, part: str, places: set[int]
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield these rows of a part, and nothing if it cannot be read."""
    try:
        with opened_parquet(folder, f"{DATA}/{part}") as file:
            start = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(_COLUMNS)):
                for place in sorted(places & set(range(start, start + batch.num_rows))):
                    yield place, batch.slice(place - start, 1).to_pylist()[0]
                start += batch.num_rows
                if start > max(places):
                    return
    except (pa.ArrowException, OSError):
        # It was removed since it was listed; the next session reports it.
        return


def _example(row: dict[str, object]) -> Example:
    turns: list[dict[str, int | None]] = row["turns"]  # type: ignore[assignment]
    started, finished = row["started_at"], row["finished_at"]
    kind, text = row["error_kind"], row["error_text"]
    messages: list[dict[str, Any]] = row["messages"]  # type: ignore[assignment]
    said = [_said_in_part(message) for message in messages]
    return Example(
        row_id=_name(str(row["row_id"])),
        sample_index=row["sample_index"],  # type: ignore[arg-type]
        error=_whole(clipped(f"{kind}: {text}", _ERROR_BYTES)) if kind else None,
        took_s=(finished - started).total_seconds(),  # type: ignore[operator]
        num_turns=len(turns),
        prompt_tokens=_sum(turn["prompt_tokens"] for turn in turns),
        completion_tokens=_sum(turn["completion_tokens"] for turn in turns),
        reasoning_tokens=_sum(turn["reasoning_tokens"] for turn in turns),
        finish_reason=row["finish_reason"],  # type: ignore[arg-type]
        attempts=row["attempt"],  # type: ignore[arg-type]
        # Rows of the first format have neither flags nor retries for quality.
        quality_retries=row.get("quality_retries") or 0,  # type: ignore[arg-type]
        flags=tuple(row.get("flags") or ()),  # type: ignore[arg-type]
        worker_id=_name(str(row["worker_id"])),
        **_conversation(said),  # type: ignore[arg-type]
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# --- clipping -----------------------------------------------------------------------------------

_Message = tuple[str, str, str | None]
"""Role, text and reasoning."""


def _said_by(message: Message) -> _Message:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.role, _with_calls(message.content, calls), message.reasoning_content


def _said_in_part(message: dict[str, Any]) -> _Message:
    # Messages of earlier releases have no calls.
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["role"], _with_calls(message["content"], calls), message["reasoning_content"]


def _with_calls(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return a message's text, and a line for each tool that it calls."""
    lines = [f"calls {name}({arguments})" for name, arguments in calls]
    return "\n".join([*filter(None, [content]), *lines])


def _conversation(messages: Sequence[_Message]) -> dict[str, object]:
    """Return the first and the last messages, each text clipped to its share of the row."""
    # A prompt's open turns are empty.
    messages = [message for message in messages if message[1] or message[2]]
    left_out = max(len(messages) - FIRST_MESSAGES - _LAST_MESSAGES, 0)
    if left_out:
        messages = [*messages[:FIRST_MESSAGES], *messages[-_LAST_MESSAGES:]]
    texts = [text for _, content, thought in messages for text in (content, thought) if text]
    most_bytes = _text_limit([min(_page_bytes(text), _TEXT_BYTES) for text in texts])
    said = tuple(
        Said(
            role=_name(role),
            text=clipped(content, most_bytes),
            reasoning=clipped(thought, most_bytes) if thought else None,
        )
        for role, content, thought in messages
    )
    return {"said": said, "messages_left_out": left_out}


def _text_limit(sizes: Sequence[int]) -> int:
    """Return the most bytes of one text with which all of them fit into a row."""
    left_bytes = _ROW_BYTES
    for number, size in enumerate(sorted(sizes)):
        share = left_bytes // (len(sizes) - number)
        if size > share:
            return share
        left_bytes -= size
    return _TEXT_BYTES


def clipped(text: str, most_bytes: int) -> Clipped:
    """Leave out the middle of a text that would need more bytes in the page."""
    # No text of fewer bytes has more characters, and the rest of a long one is never looked at.
    start, end = text[:most_bytes].translate(_PICTURES), text[-most_bytes:].translate(_PICTURES)
    if len(text) <= most_bytes and _page_bytes(start) <= most_bytes:
        return Clipped(head=start)
    head = _fitting(start, int(most_bytes * _HEAD_SHARE))
    tail = _fitting(end[::-1], most_bytes - int(most_bytes * _HEAD_SHARE))[::-1]
    return Clipped(head=head, num_left_out=len(text) - len(head) - len(tail), tail=tail)


def _fitting(text: str, most_bytes: int) -> str:
    """Return the longest beginning of a text that needs at most these bytes in the page."""
    size = 0
    for place, character in enumerate(text):
        size += _page_bytes(character)
        if size > most_bytes:
            return text[:place]
    return text


def _page_bytes(text: str) -> int:
    """Return the bytes of a text as it is written into the page."""
    return len(escape(text).encode("utf-8", "replace"))


def _name(text: str) -> str:
    return _whole(clipped(text, _NAME_BYTES))


def _whole(text: Clipped) -> str:
    return f"{text.head} … {text.tail}" if text.num_left_out else text.head
