"""Partials: rows that a planned stop interrupted, kept in `partials/` until they are continued.

Invariant: a worker that is stopped writes its rows to files of a few MB, each whole or not at all.
They say nothing about what is done: a row is continued only while it is open, so a kill at any
moment loses at most what rows had, and doubles nothing. A file is removed once none of its rows is
to be continued.

Rows are continued only under the settings and the chat template that they began with. The first
line of a file names them, and lists its rows; each other line is one row.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.store.folder import Folder
from pipeline.store.journal import RowName
from pipeline.store.run_folder import PARTIALS
from pipeline.untrusted.parsing import UNREADABLE
from schemas.begun import BegunRow
from schemas.units import MIB

# assumed: 1,000 rows of 32,000 tokens with their prompts, at 6 bytes per token
_MOST_BYTES = 256 * MIB
# A drain has two seconds by default: what is written by then counts.
_FILE_BYTES = 8 * MIB
_NAME = re.compile(r"begun-(?P<session>[^-]+)-(?P<worker>.+)-(?P<number>\d+)\.jsonl")

_Line = tuple[BegunRow, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Files of one run's interrupted rows."""

    folder: Folder
    run_id: str
    settings: str
    """Hash of all settings that rows depend on, and of the chat template."""

    def keep(self, session_id: str, worker_id: str, rows: Sequence[BegunRow]) -> int:
        """Write a worker's rows, those with the most tokens first. Return how many are kept."""
        self.folder.make(PARTIALS)
        waiting, num_kept, size_bytes, file_bytes = list[_Line](), 0, 0, 0
        # Rows of an earlier stop of this worker may still be continued from its files.
        number = self._next_number(session_id, worker_id)
        for row in sorted(rows, key=lambda row: -row.num_tokens):
            line = row.to_json().encode()
            size_bytes += len(line)
            if size_bytes > _MOST_BYTES:
                break
            waiting.append((row, line))
            file_bytes += len(line)
            if file_bytes >= _FILE_BYTES:
                self._write(f"begun-{session_id}-{worker_id}-{number:03d}.jsonl", waiting)
                num_kept += len(waiting)
                waiting, file_bytes, number = [], 0, number + 1
        if waiting:
            self._write(f"begun-{session_id}-{worker_id}-{number:03d}.jsonl", waiting)
        return num_kept + len(waiting)

    def _next_number(self, session_id: str, worker_id: str) -> int:
        own = [
            match
            for match in map(_NAME.fullmatch, self.folder.names(PARTIALS))
            if match and (match["session"], match["worker"]) == (session_id, worker_id)
        ]
        return max((int(match["number"]) + 1 for match in own), default=0)

    def _write(self, name: str, lines: Sequence["_Line"]) -> None:
        rows = [[row.row_id, row.sample_index, row.num_tokens] for row, _ in lines]
        head = json.dumps({"run_id": self.run_id, "settings": self.settings, "rows": rows})
        data = b"\n".join([head.encode(), *(line for _, line in lines), b""])
        self.folder.write_whole(f"{PARTIALS}/{name}", data)

    def names(self) -> list[str]:
        return [name for name in self.folder.names(PARTIALS) if _NAME.fullmatch(name)]

    def tokens_of(self, name: str) -> dict[RowName, int] | None:
        """Map a file's rows to their tokens; None for other settings, or no file of this run."""
        head, _ = self._read(name)
        return head

    def rows_of(self, name: str, wanted: Collection[RowName]) -> dict[RowName, BegunRow]:
        """Read some rows of a file; those that it does not have, or that are damaged, are left."""
        try:
            head, lines = self._read(name)
        except FileNotFoundError:
            # The coordinator has removed it: its rows are done.
            return {}
        found = {}
        for key, line in zip(head or (), lines, strict=False):
            if key in wanted:
                try:
                    found[key] = BegunRow.from_json(line)
                except UNREADABLE:
                    # Written by another release: the row is generated from its beginning.
                    continue
        return found

    def remove(self, name: str) -> None:
        self.folder.remove(f"{PARTIALS}/{name}")

    def remove_unfinished(self) -> None:
        """Remove what a kill left of a file that was being written."""
        for name in self.folder.names(PARTIALS):
            if name.endswith(".tmp"):
                self.remove(name)

    def _read(self, name: str) -> tuple[dict[RowName, int] | None, list[bytes]]:
        first, *lines = self.folder.read(f"{PARTIALS}/{name}").splitlines() or [b""]
        try:
            head = json.loads(first)
            if (head["run_id"], head["settings"]) != (self.run_id, self.settings):
                return None, []
            rows = {(str(row), int(sample)): int(tokens) for row, sample, tokens in head["rows"]}
        except UNREADABLE:
            return None, []
        return rows, lines


@dataclass(slots=True, kw_only=True)
class BegunRows:
    """Rows of this session that are to be continued, and the file of each."""

    partials: Partials
    by_number: Callable[[Mapping[RowName, int]], Mapping[int, int]]
    """Translates names to the session's row numbers; leaves out rows that it does not have."""
    is_open: Callable[[int], bool]
    log: Callable[[str], None]
    _files: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Row → its tokens and the file in which it has the most."""

    def load(self, worker_id: str | None = None) -> frozenset[int]:
        """Find the open rows in the files, or in those of a worker; return them.

        Files without any are removed.
        """
        names = self.partials.names()
        if worker_id is None:
            self.partials.remove_unfinished()
        else:
            names = [name for name in names if _worker(name) == worker_id]
        found: set[int] = set()
        for name in names:
            found |= self._add(name)
        self._files = {row: file for row, file in self._files.items() if self.is_open(row)}
        used = {name for _, name in self._files.values()}
        for name in names:
            if name not in used:
                self.partials.remove(name)
        return frozenset(found)

    def files_of(self, rows: Iterable[int]) -> tuple[tuple[int, str], ...]:
        """Return those of the rows that are to be continued, each with its file."""
        return tuple((row, self._files[row][1]) for row in rows if row in self._files)

    def _add(self, name: str) -> set[int]:
        tokens = self.partials.tokens_of(name)
        if tokens is None:
            self.log(
                f"event=partials_dropped file={PARTIALS}/{name} why='its rows began with another "
                f"model, sampling, chat template or other setting'"
            )
            return set()
        rows = {row: n for row, n in self.by_number(tokens).items() if self.is_open(row)}
        for row, num_tokens in rows.items():
            self._files[row] = max((num_tokens, name), self._files.get(row, (0, "")))
        if rows:
            self.log(
                f"event=partials_found file={PARTIALS}/{name} rows={len(rows)} "
                f"tokens={sum(rows.values())}"
            )
        return set(rows)


def _worker(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    return match["worker"] if match else None
