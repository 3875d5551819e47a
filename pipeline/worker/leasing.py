"""Lease rows from the coordinator, and leave to others those that are not to be finished here.

Invariant at a planned stop: a row is finished, or what it has is kept, or it has nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

from pipeline.dataset.partials import Partials
from pipeline.dataset.prompts import history
from pipeline.worker.background import Background
from pipeline.worker.backlog import Backlog, InFlight
from pipeline.worker.ports import Engine, LeaseBook
from pipeline.worker.publishing import Publisher
from pipeline.worker.refusals import Refusals
from pipeline.worker.row import Row, begun_row, over_context, resume_row, rows_of_lease
from schemas.prompt import Problem, Prompt
from schemas.shard import Lease, LeaseKey

# SGLang ends aborted requests after its current step, of a tenth of a second at most; answers of
# 1,000 requests take a second to read. A drain has two seconds by default.
_MOST_WAIT_S = 1.2
# An engine that is restarted on purpose has no time limit. assumed: a busy client reads all answers
# of 4,000 requests within this
_MOST_WAIT_TO_RESTART_S = 15.0
# A request that was on its way to the scheduler is not aborted with the others.
_REPEAT_S = 0.3


@dataclass(slots=True, kw_only=True)
class Leases:
    """Leases of one worker: when it may ask for one, and the rows of each."""

    worker_id: str
    session_id: str
    book: LeaseBook
    engine: Engine
    prompt_of: Callable[[int], Prompt]
    samples_per_prompt: int
    idle_poll_s: float
    log: Callable[[str], None]
    partials: Partials | None = None
    """Files of rows that engines have begun; None where none are kept."""
    is_over: bool = False
    """Set when no row is left for any worker."""
    is_dry: bool = False
    """Set while there is no row to lease."""
    _not_before_s: float = 0.0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._not_before_s

    def hold_off(self, num_polls: int = 1) -> None:
        """Ask for no lease during `num_polls` polls of an idle worker."""
        self._not_before_s = monotonic() + num_polls * self.idle_poll_s

    async def take(self) -> list[tuple[Row, Problem | None]] | None:
        """Take a lease. Return its rows, bad ones with their problem; None without a lease."""
        reply = await self.book.lease(self.worker_id)
        self.is_dry = reply.lease is None
        if reply.lease is None:
            self.is_over = reply.is_over
            self.hold_off()
            return None
        return await asyncio.to_thread(self._rows_of, reply.lease)

    async def fill(
        self,
        backlog: Backlog,
        is_short: Callable[[], bool],
        finish: Callable[[Row, Problem | None], None],
        wake: Callable[[], None],
    ) -> bool:
        """Take leases until enough rows are in line; return False where there was none to take.

        Bad rows are finished with their problem.
        """
        while is_short():
            leased = await self.take()
            if leased is None:
                return False
            for row, problem in leased:
                if problem is None:
                    backlog.add(row)
                else:
                    finish(row, problem)
            wake()
        return True

    async def give_back(self, first_rows: Mapping[LeaseKey, int]) -> None:
        """Give back the rows of each lease, from the row that it is mapped to.

        This worker pauses leasing, so that idle workers get the rows rather than itself.
        """
        self.hold_off(num_polls=2)
        for key, first_row in first_rows.items():
            await self.book.give_back(key, first_row)

    async def release(self) -> None:
        """Give up whatever the coordinator still counts as this worker's."""
        await self.book.release(self.worker_id)

    async def keep_begun(
        self, in_flight: InFlight, waiting: Iterable[Row], *, within_s: float = _MOST_WAIT_S
    ) -> None:
        """Abort the requests in flight, and keep what these rows and those that wait have."""
        if self.partials is None:
            return
        until_s = monotonic() + within_s
        while in_flight and monotonic() < until_s and await self.engine.abort_all():
            await in_flight.wait_for_end(_REPEAT_S)
        rows = [*in_flight.cut_off, *in_flight, *waiting]
        begun = [begun_row(row) for row in rows if row.has_begun]
        if not begun:
            return
        keep = partial(self.partials.keep, self.session_id, self.worker_id, begun)
        num_kept = await asyncio.to_thread(keep)
        tokens = sorted((row.num_tokens for row in begun), reverse=True)
        self.log(
            f"event=partials_kept worker={self.worker_id} rows={num_kept} of={len(rows)} "
            f"tokens={sum(tokens[:num_kept])}"
        )

    def _rows_of(self, lease: Lease) -> list[tuple[Row, Problem | None]]:
        rows = list(rows_of_lease(lease, self.prompt_of, self.samples_per_prompt))
        num_anew = _continue_rows(rows, lease, self.partials) if self.partials is not None else 0
        if num_anew:
            self.log(
                f"event=partials_dropped worker={self.worker_id} rows={num_anew} "
                f"why='the prompt has changed, or the line cannot be read'"
            )
        return [(row, row.prompt.problem or self._over_context(row.prompt)) for row in rows]

    def _over_context(self, prompt: Prompt) -> Problem | None:
        if self.engine.context_length is None:
            return None
        num_tokens = self.engine.prompt_tokens_at_least(history(prompt.messages, []))
        return over_context(num_tokens, self.engine.context_length)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of one worker that have not ended: in line, in flight, held back or unpublished."""

    in_flight: InFlight
    backlog: Backlog
    refusals: Refusals
    publisher: Publisher
    leases: Leases
    leasing: Background

    async def hand_over(self) -> None:
        """Keep what the rows have, and leave them to the engine that takes them first."""
        await self.leases.keep_begun(self.in_flight, self.backlog, within_s=_MOST_WAIT_TO_RESTART_S)
        await self.stop()
        await self.leases.book.hand_over(self.leases.worker_id)

    async def stop(self) -> None:
        """Publish what is finished, and forget all other rows."""
        await self.in_flight.cancel_and_wait()
        await self.leasing.settle()
        await self.publisher.flush_all()
        self._forget()

    async def drop(self) -> None:
        """Drop every row and release: a lease that came meanwhile goes back with the rest."""
        self.leases.hold_off()
        await self.leasing.settle()
        self._forget()
        await self.leases.release()

    def _forget(self) -> None:
        self.in_flight.cancel()
        self.in_flight.cut_off.clear()
        self.backlog.clear()
        self.refusals.clear()
        self.publisher.clear()


def _continue_rows(rows: Iterable[Row], lease: Lease, partials: Partials) -> int:
    """Give rows of a lease what engines before have generated of them.

    Returns how many begin anew, because their prompt has changed or their line cannot be read.
    """
    by_number, num_continued = {row.number: row for row in rows}, 0
    for file in {file for _, file in lease.begun}:
        of_file = (by_number[number] for number, of in lease.begun if of == file)
        names = {(row.prompt.row_id, row.sample_index): row for row in of_file}
        for name, begun in partials.rows_of(file, names.keys()).items():
            if begun.content_hash == names[name].prompt.content_hash:
                resume_row(names[name], begun)
                num_continued += 1
    return len(lease.begun) - num_continued
