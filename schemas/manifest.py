"""Records of the output folder: `run.json` and the events of `manifest.jsonl`.

`run.json` contains the identity of the run. `manifest.jsonl` contains one event per line, appended
by the coordinator alone: a session began, a part was published or unlisted, a row failed, the
canary began or ended, an engine came up. What is done is the set of row ids in published parts.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Literal

from schemas.chat_template import TemplateFacts

# Columns of a run record that does not list its own.
FIRST_COLUMNS = (
    "row_id", "sample_index", "messages", "turns", "status", "finish_reason", "error_kind",
    "error_text", "model", "thinking", "engine", "engine_release", "sampling", "attempt",
    "worker_id", "content_hash", "started_at", "finished_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parquet file of finished rows."""

    name: str
    size_bytes: int
    row_ids: tuple[str, ...]
    sample_indexes: tuple[int, ...]
    content_hashes: tuple[str, ...]
    num_errors: int
    prompt_tokens: int
    completion_tokens: int
    worker_id: str
    published_at_s: float = 0.0
    num_turns: int = 0
    tokens_saved: int = 0
    """Tokens that planned stops did not cost: those from which its turns were continued."""
    flag_counts: tuple[tuple[str, int], ...] = ()
    """Quality flag → `ok` rows that have it."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Settings that change rows, as `field -> value` with the run file's names."""

    settings: dict[str, object]

    def differences(self, other: "RunIdentity") -> list[tuple[str, object, object]]:
        """Return `(field, ours, theirs)` for each setting that differs."""
        fields = dict.fromkeys([*self.settings, *other.settings])
        pairs = [(name, self.settings.get(name), other.settings.get(name)) for name in fields]
        return [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`, written when the folder is first used and when drift is accepted."""

    run_id: str
    created_at_s: float
    identity: RunIdentity
    carried_schema: str
    """Arrow schema of the carried columns, serialised, in base64."""
    accepted_drift: tuple[str, ...] = ()
    quality: dict[str, object] = field(default_factory=dict)
    """`quality` section of the last session's run file, which the export follows."""
    template: TemplateFacts | None = None
    """Facts of the model's chat template in the last session; None in the first releases."""
    columns: tuple[str, ...] = FIRST_COLUMNS
    """Names of its parts' columns before the carried ones."""
    own_schema: str = ""
    """Arrow schema of those columns, serialised, in base64; empty in the first releases."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        values = json.loads(text)
        values["identity"] = RunIdentity(settings=values["identity"]["settings"])
        values["accepted_drift"] = tuple(values["accepted_drift"])
        values["columns"] = tuple(values.get("columns", FIRST_COLUMNS))
        template = values.get("template")
        values["template"] = TemplateFacts.from_json(template) if template else None
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turn of one driver on the folder, with the counts at its start."""

    session_id: str
    started_at_s: float
    rows_total: int
    rows_done: int
    rows_error: int
    rows_outside_input: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row that used up its attempts in this session; a resume retries it."""

    row_id: str
    sample_index: int
    cause: str
    attempts: int
    failed_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """A part whose rows are no longer done: taken back, missing or quarantined."""

    name: str


CanaryVerdict = Literal["begun", "passed", "failed", "accepted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEvent:
    """The start or the verdict of a canary."""

    session_id: str
    verdict: CanaryVerdict
    settings: str
    """Hash of the settings that change rows; with another one a new canary is due."""
    shares: dict[str, float]
    """Measured shares that exceed their limits."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """An engine that came up, with the flags that worked."""

    worker_id: str
    engine: str
    release: str | None
    plan: str | None
    max_running_requests: int
    ready_at_s: float


@dataclass(slots=True, kw_only=True)
class RunManifest:
    """State of the run after all events of `manifest.jsonl`."""

    parts: dict[str, Part] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    failed: dict[tuple[str, int], FailedRow] = field(default_factory=dict)
    """Rows that failed in the last session and are not done since."""
    session_parts: list[Part] = field(default_factory=list)
    """Parts published in the last session."""
    canary: CanaryEvent | None = None
    canary_parts: list[Part] = field(default_factory=list)
    """Parts published since the last canary began."""
    rows_gained: int = 0
    """Rows published in the last session, minus those unlisted."""
    engines: list[EngineRun] = field(default_factory=list)
    unreadable_lines: list[int] = field(default_factory=list)

    def fold(self, event: dict[str, object]) -> None:
        """Apply one event. Raises KeyError, TypeError or ValueError for an unknown one."""
        match event.pop("event"):
            case "part":
                self._add(part_from_json(event))
            case "unlisted":
                self._drop(str(event["name"]))
            case "session":
                self.sessions.append(Session(**event))  # type: ignore[arg-type]
                self.session_parts.clear()
                self.rows_gained = 0
                self.failed.clear()
            case "failed":
                row = FailedRow(**event)  # type: ignore[arg-type]
                self.failed[row.row_id, row.sample_index] = row
            case "canary":
                self.canary = CanaryEvent(**event)  # type: ignore[arg-type]
                if self.canary.verdict == "begun":
                    self.canary_parts.clear()
            case "engine":
                self.engines.append(EngineRun(**event))  # type: ignore[arg-type]
            case unknown:
                raise ValueError(f"unknown event {unknown!r}")

    def fold_lines(self, lines: Iterable[bytes]) -> None:
        """Fold whole lines; unreadable ones are counted: the files in `data/` are the truth."""
        for number, line in enumerate(lines, start=1):
            try:
                self.fold(json.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
                self.unreadable_lines.append(number)

    def _add(self, part: Part) -> None:
        # A part of an earlier session that is listed again is not new work.
        is_new = part.name not in self.parts or self.parts[part.name] in self.session_parts
        self._drop(part.name)
        self.parts[part.name] = part
        self.rows_gained += part.num_rows
        if is_new:
            self.session_parts.append(part)
            if self.canary is not None and self.canary.verdict in ("begun", "failed"):
                self.canary_parts.append(part)
        if self.failed:
            for key in zip(part.row_ids, part.sample_indexes, strict=True):
                self.failed.pop(key, None)

    def _drop(self, name: str) -> None:
        part = self.parts.pop(name, None)
        if part is not None:
            self.rows_gained -= part.num_rows
            self.session_parts = [other for other in self.session_parts if other.name != name]
            self.canary_parts = [other for other in self.canary_parts if other.name != name]


ManifestRecord = Part | Unlisted | Session | FailedRow | CanaryEvent | EngineRun

_EVENTS: dict[type, str] = {
    Part: "part",
    Unlisted: "unlisted",
    Session: "session",
    FailedRow: "failed",
    CanaryEvent: "canary",
    EngineRun: "engine",
}


def event_line(record: ManifestRecord) -> bytes:
    """Return the record's line of `manifest.jsonl`, with its line feed."""
    values = asdict(record)
    if isinstance(record, Part) and not any(record.sample_indexes):
        values["sample_indexes"] = []
    event = {"event": _EVENTS[type(record)], **values}
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def part_from_json(values: dict[str, object]) -> Part:
    name, row_ids = str(values["name"]), _strings(values["row_ids"])
    if name != PurePath(name).name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file's name")
    samples = values.get("sample_indexes") or [0] * len(row_ids)
    if not isinstance(samples, list) or len(samples) != len(row_ids):
        raise ValueError("sample_indexes and row_ids differ in length")
    fields = {**values, "row_ids": row_ids, "sample_indexes": tuple(int(s) for s in samples)}
    fields["content_hashes"] = _strings(values["content_hashes"])
    fields["flag_counts"] = _counts(values.get("flag_counts", []))
    return Part(**fields)  # type: ignore[arg-type]


def _counts(values: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(values, list):
        raise TypeError("expected a list")
    return tuple((str(name), int(count)) for name, count in values)


def _strings(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError("expected a list")
    return tuple(str(value) for value in values)
