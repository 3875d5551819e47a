"""Options of an export, and its record in `export.json`."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

from schemas.units import MIB

ExportFormat = Literal["messages", "conversations", "tokens", "rows", "specforge", "speculators"]
ReasoningPlace = Literal["apart", "inline", "drop"]
FileType = Literal["parquet", "jsonl"]
Compression = Literal["none", "zstd", "gzip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Selection, order and format of the exported rows."""

    format: ExportFormat = "messages"
    reasoning: ReasoningPlace | None = None
    """Place of the reasoning. Null: inline for `conversations`, apart for the others."""
    file_bytes: int | None = 256 * MIB
    """Size of a file. Null: one file per split."""
    shuffle_seed: int | None = None
    """Seed of the shuffle. Null: keep the order of the input."""
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    """Names and shares, which sum to 1. A row's split depends on its id alone."""
    drop_flags: tuple[str, ...] = ()
    is_partial: bool = False
    tokenizer: str | None = None
    """Tokenizer that checks token rows; null: that of the run's model, if it is available."""
    file_type: FileType = "parquet"
    compression: Compression = "zstd"
    max_tokens: int | None = None
    """Most tokens of a row: prompt and completion of its last turn. Null: no limit."""
    is_cut: bool = False
    """True to cut a longer row at the end of its last turn within the limit, not leave it out."""
    is_deduplicated: bool = False
    """True to keep only the first of rows with the same answers."""

    def deciding(self) -> dict[str, object]:
        """Return the options as written into the fingerprint.

        Those added later are left out at their default, so that a data set keeps its fingerprint.
        """
        values = asdict(self)
        later = ("file_type", "compression", "max_tokens", "is_cut", "is_deduplicated")
        defaults = {field.name: field.default for field in fields(self) if field.name in later}
        return {
            name: value
            for name, value in values.items()
            if name not in defaults or value != defaults[name]
        }


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
    rows_cut: int = 0
    """Exported rows without their last turns."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ExportRecord":
        values = json.loads(text)
        values["files"] = tuple(ExportedFile(**file) for file in values["files"])
        return cls(**values)
