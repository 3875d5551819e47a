"""Part, RunIdentity, RunManifest: what the output folder says of itself.

`run.json` holds the identity; `manifest.jsonl` holds one event a line, appended by the coordinator
alone: a session began, a part was published or taken back, a row was set aside, the canary began
or ended. What is done is the set of row ids in published parts.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

ROW_FORMAT = 2
"""Raised when the rows of a run get other columns: parts of one folder have the same."""

FIRST_COLUMNS = (
    "row_id", "sample_index", "messages", "turns", "status", "finish_reason", "error_kind",
    "error_text", "model", "thinking", "engine", "engine_release", "sampling", "attempt",
    "worker_id", "content_hash", "started_at", "finished_at",
)  # fmt: skip
"""Of a run record that does not name its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parquet file of finished rows."""

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
    flag_counts: tuple[tuple[str, int], ...] = ()
    """Quality flag → `ok` rows that bear it."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The settings that alter rows, as `field -> value` in the run file's own names."""

    settings: dict[str, object]

    def differences(self, other: "RunIdentity") -> list[tuple[str, object, object]]:
        """`(field, ours, theirs)` for every setting that is not the same in both."""
        fields = dict.fromkeys([*self.settings, *other.settings])
        pairs = [(name, self.settings.get(name), other.settings.get(name)) for name in fields]
        return [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`: written when the folder is first used, and when drift is accepted."""

    run_id: str
    created_at_s: float
    identity: RunIdentity
    carried_schema: str
    """The carried columns' Arrow schema, serialised, in base64."""
    accepted_drift: tuple[str, ...] = ()
    row_format: int = ROW_FORMAT
    quality: dict[str, object] = field(default_factory=dict)
    """The run file's `quality` section, as the last session had it: the export's policy."""
    columns: tuple[str, ...] = FIRST_COLUMNS
    """The columns of its parts before the carried ones."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        values = {"row_format": 1, **json.loads(text)}
        values["identity"] = RunIdentity(settings=values["identity"]["settings"])
        values["accepted_drift"] = tuple(values["accepted_drift"])
        values["columns"] = tuple(values.get("columns", FIRST_COLUMNS))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One driver's time on the folder, as it found it."""

    session_id: str
    started_at_s: float
    rows_total: int
    rows_done: int
    rows_error: int
    rows_outside_input: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row that used up its budget in this session; a resume tries it again."""

    row_id: str
    sample_index: int
    cause: str
    attempts: int
    failed_at_s: float


CanaryVerdict = Literal["begun", "passed", "failed", "accepted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEvent:
    """The canary began, or how it ended."""

    session_id: str
    verdict: CanaryVerdict
    settings: str
    """Fingerprint of the settings that alter rows: with others, another canary is due."""
    shares: dict[str, float]
    """What was over its limit, as found."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """An engine that came up: what finally ran."""

    worker_id: str
    engine: str
    release: str | None
    plan: str | None
    max_running_requests: int
    ready_at_s: float


@dataclass(slots=True, kw_only=True)
class RunManifest:
    """The events of `manifest.jsonl`, folded together in order."""

    parts: dict[str, Part] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    failed: dict[tuple[str, int], FailedRow] = field(default_factory=dict)
    """Rows set aside since the last session began, and not done after that."""
    session_parts: list[Part] = field(default_factory=list)
    """Parts published since the last session began."""
    canary: CanaryEvent | None = None
    canary_parts: list[Part] = field(default_factory=list)
    """Parts published since the last canary began."""
    rows_gained: int = 0
    """Rows listed since the last session began, less those taken back or gone."""
    engines: list[EngineRun] = field(default_factory=list)
    unreadable_lines: list[int] = field(default_factory=list)

    def fold(self, event: dict[str, object]) -> None:
        """Raises KeyError, TypeError or ValueError when `event` is not one of ours."""
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

    def _add(self, part: Part) -> None:
        # An earlier session's part that is listed again is no new work.
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
            self.session_parts = [kept for kept in self.session_parts if kept.name != name]
            self.canary_parts = [kept for kept in self.canary_parts if kept.name != name]


def manifest_from_lines(lines: Iterable[bytes]) -> RunManifest:
    """Lines that cannot be read are counted and left out: the files in `data/` are the truth."""
    manifest = RunManifest()
    for number, line in enumerate(lines, start=1):
        try:
            manifest.fold(json.loads(line))
        except (KeyError, TypeError, ValueError, AttributeError):
            manifest.unreadable_lines.append(number)
    return manifest


ManifestRecord = Part | Session | FailedRow | CanaryEvent | EngineRun | dict[str, object]


def event_line(event: str, record: "ManifestRecord") -> bytes:
    """One line of `manifest.jsonl`, with its line feed."""
    values = record if isinstance(record, dict) else asdict(record)
    if isinstance(record, Part) and not any(record.sample_indexes):
        values["sample_indexes"] = []
    text = json.dumps({"event": event, **values}, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def part_from_json(values: dict[str, object]) -> Part:
    row_ids = _strings(values["row_ids"])
    samples = values.get("sample_indexes") or [0] * len(row_ids)
    if not isinstance(samples, list) or len(samples) != len(row_ids):
        raise ValueError("as many sample_indexes as row_ids are needed")
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
