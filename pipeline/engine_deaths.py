"""Which rows were in flight when an engine died: kept over sessions, so that a poison row is known.

A line a death, in `engine-deaths.jsonl`; the coordinator alone writes it. A row is named by its id,
since numbers hold for one session. What cannot be read is left out: the next death tells it again.
"""

import json
from collections import Counter
from collections.abc import Sequence

from pipeline.storage import Folder

DEATHS_FILE = "engine-deaths.jsonl"

RowName = tuple[str, int]
"""A row id with its sample index."""


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
