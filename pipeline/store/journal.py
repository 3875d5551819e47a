"""A run's events (`events.jsonl`) and its engines' deaths (`engine-deaths.jsonl`).

Only the driver writes events, one per line, and drops the older half when the file exceeds its
bound. Readers skip what they cannot read: events are for people, and nothing is decided by them.
The coordinator writes deaths, which decide which rows are suspects.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pipeline.store.event_line import event_line
from pipeline.store.folder import Folder
from pipeline.store.run_folder import DEATHS_FILE, EVENTS_FILE
from pipeline.untrusted.parsing import UNREADABLE

RowName = tuple[str, int]
"""A row id with its sample index."""

_MAX_EVENTS = 5_000
_MAX_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event line of the driver's log."""

    kind: str
    at_s: float
    worker: str | None
    text: str
    """The line without its kind, truncated."""


def event_of(line: str, *, now_s: float) -> RunEvent | None:
    """Parse a line `event=kind key=value …`; None for any other line."""
    parsed = event_line(line)
    if parsed.kind is None:
        return None
    worker = parsed.fields.get("worker")
    rest = line.removeprefix(f"event={parsed.kind}").strip()
    return RunEvent(
        kind=parsed.kind,
        at_s=now_s,
        worker=None if worker is None else str(worker),
        text=rest[:_MAX_CHARACTERS],
    )


def append_events(folder: Folder, events: Sequence[RunEvent]) -> None:
    """Append events in one write."""
    if events:
        folder.append_line(EVENTS_FILE, b"".join(map(_line, events)))


def trim_events(folder: Folder, *, max_events: int = _MAX_EVENTS) -> None:
    """Keep the newer half of the bound when the file exceeds it."""
    lines = list(folder.read_lines(EVENTS_FILE))
    if len(lines) > max_events:
        folder.replace_lines(EVENTS_FILE, lines[-(max_events // 2) :])


def read_events(folder: Folder) -> list[RunEvent]:
    """Read all events, oldest first."""
    events = []
    for line in folder.read_lines(EVENTS_FILE):
        try:
            events.append(_event(json.loads(line)))
        except UNREADABLE:
            # A line that a crash truncated, or that another release wrote.
            continue
    return events


def _event(values: dict[str, object]) -> RunEvent:
    worker = values["worker"]
    return RunEvent(
        kind=str(values["kind"]),
        at_s=float(str(values["at_s"])),
        worker=None if worker is None else str(worker),
        text=str(values["text"]),
    )


def _line(event: RunEvent) -> bytes:
    text = json.dumps(asdict(event), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def append_death(folder: Folder, rows: Sequence[RowName], *, now_s: float) -> None:
    """Record an engine's death with the rows that were in flight."""
    values = {"at_s": now_s, "rows": rows}
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    folder.append_line(DEATHS_FILE, text.encode("utf-8", "surrogatepass") + b"\n")


def read_deaths(folder: Folder) -> Counter[RowName]:
    """Count for each row the deaths at which it was in flight. Ends a truncated last line."""
    folder.end_last_line(DEATHS_FILE)
    deaths: Counter[RowName] = Counter()
    for line in folder.read_lines(DEATHS_FILE):
        try:
            rows = [(str(row_id), int(sample)) for row_id, sample in json.loads(line)["rows"]]
        except UNREADABLE:
            continue
        deaths.update(rows)
    return deaths
