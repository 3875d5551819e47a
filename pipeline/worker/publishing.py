"""Collect finished rows: commit them to a journal at once, and publish journals as parts.

Invariant: a row is in `_uncommitted`, or in one journal, until its part is published. Rows of a
canary have journals of their own, because they are judged, and published, before all others.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time

from pipeline.dataset.journal import JournalKind, JournalName, JournalWriter, LeasedRow
from pipeline.quality.canary import ERROR_ROWS
from pipeline.worker.background import Background
from pipeline.worker.ports import Engine, LeaseBook
from pipeline.worker.row import Row, row_completion
from schemas.completion import Completion
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.prompt import Problem
from schemas.units import MIB

REFUSED = "refused_by_engine"

# A part of this size is read and written in a second; 900,000 rows of 10 KB are 140 parts.
_FULL_BYTES = 64 * MIB
# assumed: people look at the first rows after a minute, and at a run of weeks once an hour
_FIRST_AGE_S = 60.0
_MAX_AGE_S = 3600.0
# A canary that fails should stop the run soon.
_CANARY_AGE_S = 15.0


@dataclass(slots=True, kw_only=True)
class _OpenJournal:
    """A journal that takes rows, or is being published."""

    name: JournalName
    since_s: float
    size_bytes: int = 0
    leased: list[LeasedRow] = field(default_factory=list)
    """Rows in the journal's order."""
    flagged: set[int] = field(default_factory=set)
    """Positions of rows that a better engine might write better."""
    dropped: set[int] = field(default_factory=set)
    """Positions of rows that are not published from here."""


def _is_bad(completion: Completion) -> bool:
    return bool(completion.flags) or completion.error_kind == REFUSED


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Finished rows of one worker."""

    worker_id: str
    session_id: str
    config: RunFile
    engine: Engine
    book: LeaseBook
    writer: JournalWriter
    log: Callable[[str], None]
    commit_interval_s: float | None = None
    """Least time between two commits. None: as the folder allows."""
    window: deque[tuple[str, ...]] = field(init=False)
    """Flags of the last rows that ended well or were refused, without those of the canary."""
    _uncommitted: dict[JournalKind, list[tuple[Row, Completion]]] = field(
        default_factory=lambda: {"canary": [], "rows": []}
    )
    _open: dict[JournalKind, _OpenJournal] = field(default_factory=dict)
    _closed: list[_OpenJournal] = field(default_factory=list)
    """Journals on their way to `data/`."""
    _committing: Background = field(default_factory=Background)
    _publishing: Background = field(default_factory=Background)
    _committed_s: float = 0.0
    _num_journals: int = 0
    _drops_flagged: bool = False
    _num_aged: int = 0
    """Parts that were cut for their age."""

    def __post_init__(self) -> None:
        self.window = deque(maxlen=self.config.quality.window_rows)

    @property
    def num_unflushed(self) -> int:
        """Finished rows that are not published."""
        journals = [*self._open.values(), *self._closed]
        in_journals = sum(len(one.leased) - len(one.dropped) for one in journals)
        return in_journals + sum(map(len, self._uncommitted.values()))

    @property
    def is_flushing(self) -> bool:
        return self._committing.is_running or self._publishing.is_running

    @property
    def has_canary_rows(self) -> bool:
        return bool(self._uncommitted["canary"]) or "canary" in self._open

    def finish(self, row: Row, problem: Problem | None) -> None:
        """End a row as a completion, or as an error row with its problem."""
        completion = row_completion(
            row,
            problem,
            config=self.config,
            engine=self.engine,
            worker_id=self.worker_id,
            now_s=time(),
        )
        self._uncommitted["canary" if row.is_canary else "rows"].append((row, completion))
        if row.is_canary:
            return
        if problem is None:
            self.window.append(completion.flags)
        elif problem.kind == REFUSED:
            self.window.append((ERROR_ROWS,))

    def flush_if_due(self, *, is_idle: bool, is_canary_done: bool) -> None:
        """Commit rows, and publish journals that are full, old, or the last for the moment.

        `is_canary_done` says that no row of the canary is left with this worker.
        """
        now_s = monotonic()
        has_rows = any(self._uncommitted.values())
        is_due = is_idle or now_s - self._committed_s >= self._commit_interval_s
        if has_rows and is_due and not self._committing.is_running:
            self._committing.start(self._commit())
        if self._committing.is_running:
            # What it appends is not counted yet: no journal is closed meanwhile.
            return
        for kind, journal in list(self._open.items()):
            is_last = is_canary_done if kind == "canary" else is_idle
            if (is_last and not self._uncommitted[kind]) or self._is_due(journal, now_s):
                self._close(kind)
        if self._closed and not self._publishing.is_running:
            self._publishing.start(self._publish_closed())

    async def flush_all(self) -> None:
        """Commit and publish every finished row."""
        await self._committing.wait()
        await self._commit()
        await self._publishing.wait()
        for kind in list(self._open):
            self._close(kind)
        await self._publish_closed()

    def drop_flagged(self) -> None:
        """Forget rows with quality flags, and refused ones: they are open when the leases are."""
        self._drops_flagged = True

    def clear(self) -> None:
        """Forget every row: the coordinator has what was committed, and opens the others."""
        for rows in self._uncommitted.values():
            rows.clear()
        self._open.clear()

    def raise_fault(self) -> None:
        """Raise the error that ended the last commit or publication, if any."""
        self._committing.raise_fault()
        self._publishing.raise_fault()

    # -- inside

    def _is_due(self, journal: _OpenJournal, now_s: float) -> bool:
        if journal.size_bytes >= _FULL_BYTES:
            return True
        age_s = now_s - journal.since_s
        if journal.name.kind == "canary":
            return age_s >= min(self._max_age_s, _CANARY_AGE_S)
        if age_s < self._max_age_s:
            return False
        self._num_aged += 1
        return True

    @property
    def _commit_interval_s(self) -> float:
        if self.commit_interval_s is not None:
            return self.commit_interval_s
        return min(self.writer.journals.folder.append_interval_s, self._max_age_s)

    @property
    def _max_age_s(self) -> float:
        grown_s = min(_MAX_AGE_S, _FIRST_AGE_S * 2.0 ** min(self._num_aged, 10))
        return self.config.output.flush_interval_s or grown_s

    async def _commit(self) -> None:
        """Append what is finished to the journals; it is durable when this returns."""
        self._committed_s = monotonic()
        for kind, rows in self._uncommitted.items():
            if not rows:
                continue
            journal = self._open.get(kind) or self._new_journal(kind)
            # Taken at the same moment: until then these rows are unfinished for all others.
            self._uncommitted[kind] = []
            leased = [(row.key, row.number) for row, _ in rows]
            completions = [completion for _, completion in rows]
            size_bytes = await asyncio.to_thread(
                self.writer.append, journal.name, completions, leased
            )
            journal.size_bytes += size_bytes
            start = len(journal.leased)
            journal.flagged |= {start + n for n, one in enumerate(completions) if _is_bad(one)}
            journal.leased += leased

    def _new_journal(self, kind: JournalKind) -> _OpenJournal:
        self._num_journals += 1
        name = JournalName(
            session_id=self.session_id,
            worker_id=self.worker_id,
            number=self._num_journals,
            kind=kind,
        )
        self._open[kind] = _OpenJournal(name=name, since_s=monotonic())
        return self._open[kind]

    def _close(self, kind: JournalKind) -> None:
        self._closed.append(self._open.pop(kind))

    async def _publish_closed(self) -> None:
        while self._closed:
            await self._publish(self._closed[0])
            self._closed.pop(0)

    async def _publish(self, journal: _OpenJournal) -> None:
        """Stage and publish a journal's rows; drop those whose lease was lost meanwhile."""
        if self._drops_flagged:
            journal.dropped |= journal.flagged
        while True:
            kept = [n for n in range(len(journal.leased)) if n not in journal.dropped]
            part = await self._staged(journal)
            if part is None:
                break
            if part.num_rows != len(kept):
                # Begun anew after the coordinator, which took this worker for dead, removed it.
                self.log(f"event=stale_rows worker={self.worker_id} rows={len(kept)}")
                return
            stale = await self.book.publish(part, [journal.leased[n] for n in kept])
            if not stale:
                break
            self.log(f"event=stale_rows worker={self.worker_id} rows={len(stale)}")
            journal.dropped |= {n for n in kept if journal.leased[n] in stale}
        await asyncio.to_thread(self.writer.journals.remove, journal.name)

    async def _staged(self, journal: _OpenJournal) -> Part | None:
        """Stage a journal's rows; None without any, or when the coordinator has taken it over."""
        try:
            return await asyncio.to_thread(
                self.writer.journals.stage, journal.name, without=journal.dropped
            )
        except FileNotFoundError:
            self.log(f"event=stale_rows worker={self.worker_id} rows={len(journal.leased)}")
            return None
