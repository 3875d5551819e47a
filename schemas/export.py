"""What an export is asked for, and what it says of itself in `export.json`."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

ExportFormat = Literal["messages", "conversations", "tokens", "rows"]
ReasoningPlace = Literal["apart", "inline", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """All that decides which rows go out, where, and in what order."""

    format: ExportFormat = "messages"
    reasoning: ReasoningPlace | None = None
    """Null: apart for `messages`, inline for `conversations`, which has no place for it."""
    file_bytes: int = 256 * 2**20
    shuffle_seed: int | None = None
    """Null: in the order of the input."""
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    """Names and shares, which sum to one. A row's split hangs on its id alone."""
    drop_flags: tuple[str, ...] = ()
    is_partial: bool = False
    tokenizer: str | None = None
    """What token rows are held against; null: the run's model, where its tokenizer is at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One file of the data set."""

    name: str
    split: str
    size_bytes: int
    num_rows: int
    first_bucket: int
    last_bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """`export.json`, written last: a folder without it is not whole."""

    fingerprint: str
    """Of the run, its parts and the options: the same again has nothing to do."""
    run_id: str
    format: ExportFormat
    rows_published: int
    rows_exported: int
    dropped: dict[str, int]
    """Reason → rows; with those exported they are the published ones."""
    files: tuple[ExportedFile, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ExportRecord":
        values = json.loads(text)
        values["files"] = tuple(ExportedFile(**file) for file in values["files"])
        return cls(**values)
