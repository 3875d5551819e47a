"""A worker's surroundings without Ray: the real ledger and parts, and prompts to work on."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset.frozen import FrozenPrompts, freeze
from pipeline.dataset.journal import Journals, JournalWriter
from pipeline.dataset.partials import BegunRows, Partials
from pipeline.dataset.parts import discard, publish
from pipeline.dataset.prompts import InputColumns, PromptStream
from pipeline.run.ledger import Ledger
from pipeline.store.folder import Folder, LocalFolder
from pipeline.worker.intervals import Intervals
from pipeline.worker.ports import Engine
from pipeline.worker.worker import Worker
from schemas.completion import COMPLETION_SCHEMA
from schemas.config.run_file import RunFile
from schemas.manifest import FailedRow, Part
from schemas.progress import LeaseReply, Orders, WorkerReport
from schemas.prompt import Message, Problem, Prompt
from schemas.shard import LeaseKey

# No test waits for a check of the engine unless it asks for one.
QUICK = Intervals(
    tick_s=0.02,
    heartbeat_s=0.02,
    commit_s=0.02,
    idle_poll_s=0.02,
    restart_backoff_s=(0.0, 0.02),
)


@dataclass(slots=True)
class LocalBook:
    """The ledger and published parts without Ray, as a worker's LeaseBook."""

    ledger: Ledger
    folder: LocalFolder
    parts: list[Part] = field(default_factory=list)
    failed: list[FailedRow] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    orders: list[Orders] = field(default_factory=list)
    reports: list[WorkerReport] = field(default_factory=list)
    begun: BegunRows | None = None

    async def lease(self, worker_id: str) -> LeaseReply:
        lease = self.ledger.lease(worker_id, now_s=monotonic())
        if lease is not None and self.begun is not None:
            lease = replace(lease, begun=self.begun.files_of(lease.rows))
        return LeaseReply(lease=lease, is_over=self.ledger.is_over)

    async def publish(
        self, part: Part, rows: list[tuple[LeaseKey, int]]
    ) -> set[tuple[LeaseKey, int]]:
        if stale := self.ledger.stale_rows(rows):
            discard(self.folder, part)
            return stale
        self.parts.append(publish(self.folder, part, now_s=0.0))
        self.ledger.mark_done(rows)
        return set()

    async def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        if self.ledger.set_aside(key, row):
            self.failed.append(failed)

    async def give_back(self, key: LeaseKey, first_row: int) -> None:
        self.ledger.give_back(key, first_row)

    async def release(self, worker_id: str) -> None:
        self.ledger.worker_left(worker_id)

    async def hand_over(self, worker_id: str) -> None:
        self.ledger.worker_left(worker_id)
        if self.begun is not None:
            self.ledger.put_first(self.begun.load(worker_id))

    async def engine_died(self, rows: list[tuple[LeaseKey, int]]) -> None:
        self.ledger.engine_died(rows)

    async def engine_lost(self, worker_id: str, cause: str) -> None:
        self.lost.append(cause)
        self.ledger.worker_lost(worker_id)

    async def heartbeat(self, report: WorkerReport) -> Orders:
        self.reports.append(report)
        has_others = len({one.worker_id for one in self.reports}) > 1
        return self.orders.pop(0) if self.orders else Orders(has_others=has_others)

    def ids(self) -> list[str]:
        return [row_id for part in self.parts for row_id in part.row_ids]


def local_book(
    folder: LocalFolder, num_rows: int, *, shard_rows: int, max_shard_losses: int = 10
) -> LocalBook:
    """Make the folders of a run and the ledger of its rows."""
    for name in ("data", "staging", "logs"):
        folder.make(name)
    ledger = Ledger(
        row_states=bytearray(num_rows),
        shard_rows=shard_rows,
        lease_ttl_s=60,
        max_shard_losses=max_shard_losses,
    )
    return LocalBook(ledger, folder)


def worker_at(
    book: LocalBook,
    prompts: FrozenPrompts,
    engine: Engine,
    config: RunFile,
    *,
    worker_id: str = "w0",
    log: Callable[[str], None] = lambda line: None,
    intervals: Intervals = QUICK,
    partials: Partials | None = None,
) -> Worker:
    return Worker(
        worker_id=worker_id,
        session_id="s",
        config=config,
        engine=engine,
        book=book,
        prompt_of=prompts.prompt,
        writer=journal_writer(book.folder),
        log=log,
        intervals=intervals,
        partials=partials,
    )


def journal_writer(folder: Folder, run_id: str = "r") -> JournalWriter:
    return JournalWriter(
        journals=Journals(folder=folder, run_id=run_id),
        own_schema=COMPLETION_SCHEMA,
        carried_schema=pa.schema([]),
    )


def frozen(folder: LocalFolder, prompts: list[Prompt], name: str = "x") -> FrozenPrompts:
    columns = InputColumns(column="prompt", shape="prompt", system_column=None)
    stream = PromptStream(columns=columns, carried=(), arrow_schema=None, prompts=iter(prompts))
    return freeze(folder, name, stream)


def prompt(number: int, *, turns: int = 1, problem: Problem | None = None) -> Prompt:
    messages: list[Message] = []
    for turn in range(turns):
        messages.append(Message(role="user", content=f"question {number}.{turn}"))
        messages.append(Message(role="assistant", content=""))
    return Prompt(
        row_id=f"q{number:03d}",
        content_hash=f"h{number}",
        messages=() if problem else tuple(messages),
        carried={},
        problem=problem,
    )


def prompts_of(num: int) -> list[Prompt]:
    return [prompt(number) for number in range(num)]


def each_once(book: LocalBook, num: int) -> None:
    assert sorted(book.ids()) == [f"q{number:03d}" for number in range(num)]


def published_rows(book: LocalBook) -> dict[str, dict[str, Any]]:
    tables = [pq.read_table(book.folder.path(f"data/{part.name}")) for part in book.parts]
    return {row["row_id"]: row for table in tables for row in table.to_pylist()}
