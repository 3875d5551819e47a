"""Options of an export, and its record in `export.json`."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from schemas.units import MIB

ExportFormat = Literal["messages", "conversations", "tokens", "rows"]
ReasoningPlace = Literal["apart", "inline", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Selection, order and format of the exported rows."""

    format: ExportFormat = "messages"
    reasoning: ReasoningPlace | None = None
    """Place of the reasoning. Null: apart for `messages`, inline for `conversations`."""
    file_bytes: int = 256 * MIB
    shuffle_seed: int | None = None
    """Seed of the shuffle. Null: keep the order of the input."""
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    """Names and shares, which sum to 1. A row's split depends on its id alone."""
    drop_flags: tuple[str, ...] = ()
    is_partial: bool = False
    tokenizer: str | None = None
    """Tokenizer that checks token rows; null: that of the run's model, if it is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file of the data set."""

    name: str
    split: str
    size_bytes: int
    num_rows: int
    first_bucket: int
    last_bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """`export.json`, written last: a folder without it is incomplete."""

    fingerprint: str
    """Hash of the run, its parts and the options; an export with the same one is finished."""
    run_id: str
    format: ExportFormat
    rows_published: int
    rows_exported: int
    dropped: dict[str, int]
    """Reason → rows; together with the exported rows these are the published ones."""
    files: tuple[ExportedFile, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ExportRecord":
        values = json.loads(text)
        values["files"] = tuple(ExportedFile(**file) for file in values["files"])
        return cls(**values)
