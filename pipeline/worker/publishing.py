"""Collect finished rows, stage them as parts and have the coordinator publish these."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, time

from pipeline.worker.background import Background
from pipeline.worker.ports import Engine, LeaseBook
from pipeline.worker.row import Row, row_completion
from schemas.completion import Completion, QualityFlag
from schemas.config.run_file import RunFile
from schemas.manifest import Part
from schemas.prompt import Problem

_MAX_UNFLUSHED_ROWS = 20_000

Stage = Callable[[str, Sequence[Completion]], Part]
"""Writes a part of this name; nothing is visible yet."""


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Finished rows of one worker, flushed in batches."""

    worker_id: str
    session_id: str
    config: RunFile
    engine: Engine
    book: LeaseBook
    stage: Stage
    log: Callable[[str], None]
    window: deque[tuple[QualityFlag, ...]] = field(init=False)
    """Flags of the last rows that ended well, without those of the canary."""
    _finished: list[tuple[Row, Completion]] = field(default_factory=list)
    _flushing: Background = field(default_factory=Background)
    _last_flush_s: float = 0.0
    _num_parts: int = 0

    def __post_init__(self) -> None:
        self.window = deque(maxlen=self.config.quality.window_rows)

    @property
    def num_unflushed(self) -> int:
        return len(self._finished)

    @property
    def is_flushing(self) -> bool:
        return self._flushing.is_running

    def finish(self, row: Row, problem: Problem | None, *, is_canary: bool) -> None:
        """End a row as a completion, or as an error row with its problem."""
        completion = row_completion(
            row,
            problem,
            config=self.config,
            engine=self.engine,
            worker_id=self.worker_id,
            now_s=time(),
        )
        self._finished.append((row, completion))
        if problem is None and not is_canary:
            self.window.append(completion.flags)

    def start_interval(self) -> None:
        """Count the flush interval from this moment."""
        self._last_flush_s = monotonic()

    def flush_if_due(self, *, is_idle: bool) -> None:
        """Start a flush when the interval is over, a part is full, or no other row is left."""
        if not self._finished or self.is_flushing:
            return
        waited_s = monotonic() - self._last_flush_s
        is_full = len(self._finished) >= _MAX_UNFLUSHED_ROWS
        if is_idle or is_full or waited_s >= self.config.output.flush_interval_s:
            self._flushing.start(self._flush())

    async def flush_all(self) -> None:
        """Wait for the flush that runs, then publish the rest."""
        await self._flushing.wait()
        await self._flush()

    def drop_flagged(self) -> None:
        """Forget finished rows with quality flags: they are open again when the leases are."""
        self._finished = [pair for pair in self._finished if not pair[1].flags]

    def clear(self) -> None:
        self._finished.clear()

    def raise_fault(self) -> None:
        """Raise the error that ended the last flush, if any."""
        self._flushing.raise_fault()

    async def _flush(self) -> None:
        """Stage and publish what is finished; drop rows whose lease was lost meanwhile."""
        self.start_interval()
        batch, self._finished = self._finished, []
        while batch:
            self._num_parts += 1
            name = f"part-{self.session_id}-{self.worker_id}-{self._num_parts:06d}.parquet"
            completions = [completion for _, completion in batch]
            part = await asyncio.to_thread(self.stage, name, completions)
            leased = [(row.key, row.number) for row, _ in batch]
            stale = await self.book.publish(part, leased)
            if not stale:
                return
            self.log(f"event=stale_rows worker={self.worker_id} rows={len(stale)}")
            batch = [pair for pair in batch if (pair[0].key, pair[0].number) not in stale]
