"""What happened to a run and when: the log's event lines, kept in `events.jsonl`.

The driver alone writes it, one event a line, and drops the older half when it grows past its
bound. Readers leave out what they cannot read: the file is for people, nothing is decided by it.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pipeline.store.folder import Folder
from pipeline.store.run_folder import DEATHS_FILE, EVENTS_FILE

RowName = tuple[str, int]
"""A row id with its sample index."""

_MOST_EVENTS = 5_000
_MOST_CHARACTERS = 400
_FIELD = re.compile(r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One line of the log."""

    kind: str
    at_s: float
    worker: str | None
    text: str
    """The line without its kind, cut."""


def event_of(line: str, *, now_s: float) -> RunEvent | None:
    """The event of a line `event=kind key=value …`; None for any other line."""
    fields = dict(_FIELD.findall(line))
    kind = fields.get("event")
    if kind is None or not line.startswith("event="):
        return None
    rest = line.removeprefix(f"event={kind}").strip()
    return RunEvent(
        kind=kind, at_s=now_s, worker=fields.get("worker"), text=rest[:_MOST_CHARACTERS]
    )


def append_events(folder: Folder, events: Sequence[RunEvent]) -> None:
    """Write them behind the others, in one write."""
    if events:
        folder.append_line(EVENTS_FILE, b"".join(map(_line, events)))


def trim_events(folder: Folder, *, most: int = _MOST_EVENTS) -> None:
    """Keep the newer half of a file that has more than `most` lines."""
    lines = list(folder.read_lines(EVENTS_FILE))
    if len(lines) > most:
        folder.replace_lines(EVENTS_FILE, lines[-(most // 2) :])


def read_events(folder: Folder) -> list[RunEvent]:
    """In the order of time."""
    found = []
    for line in folder.read_lines(EVENTS_FILE):
        try:
            found.append(_event(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            # A line that a crash has cut, or that another release wrote.
            continue
    return found


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
    """One engine's death, with the rows that were in flight."""
    values = {"at_s": now_s, "rows": rows}
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    folder.append_line(DEATHS_FILE, text.encode("utf-8", "surrogatepass") + b"\n")


def read_deaths(folder: Folder) -> Counter[RowName]:
    """How often each row was in flight at a death; a line that a crash has cut is ended."""
    folder.end_last_line(DEATHS_FILE)
    deaths: Counter[RowName] = Counter()
    for line in folder.read_lines(DEATHS_FILE):
        try:
            rows = [(str(row_id), int(sample)) for row_id, sample in json.loads(line)["rows"]]
        except (ValueError, TypeError, KeyError):
            continue
        deaths.update(rows)
    return deaths
